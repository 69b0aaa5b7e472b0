"""Records of a paged cache: quantise and store, load and dequantise, and norm + RoPE + quantise + store in one launch.

e4m3 codes and scales are made and read as integers: they are the same on every target, also where the compiler cannot
convert fp8. A group of channels and its scale stay in one row of a tile, and the addresses of both are linear in page
and slot, so one kernel serves both layouts of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import e2m1_codes, e2m1_value, output_buffer, ue8m0_value
from .rope import difference_of_products


@dataclass(frozen=True, kw_only=True)
class RecordLaunch:
    """Groups a program of the store or the load takes. It changes no result."""

    groups: int
    num_warps: int = 8  # 8 channels a thread: with 16 the FP4 store needs a stack on SM100


def record_launch(group: int) -> RecordLaunch:
    """About 2048 channels a program, whatever the number of rows and the device."""
    return RecordLaunch(groups=max(1, 2048 // group))


@dataclass(frozen=True, kw_only=True)
class FusedLaunch:
    """Threads that share a row of the fused store: fixes the order in which its squares are added."""

    num_warps: int = 2


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record format and where a page of `slots` keeps its records: plain numbers for the kernels."""

    channels: int
    group: int
    packed: bool  # e2m1, two channels a byte; otherwise e4m3
    e4m3_scale: bool  # otherwise UE8M0
    max_value: float
    amax_floor: float
    sectioned: bool

    @property
    def data_bytes(self) -> int:
        """Bytes of the codes of a record."""
        return self.channels // 2 if self.packed else self.channels

    def places(self, slots: int) -> tuple[int, int, int]:
        """Bytes from one record's codes to the next, where the first scales stand, bytes to the next scales."""
        scales = self.channels // self.group
        if self.sectioned:
            return self.data_bytes, slots * self.data_bytes, scales
        return self.data_bytes + scales, self.data_bytes, self.data_bytes + scales


@triton.jit
def _e4m3_byte(x):
    """The nearest e4m3 code of fp32 values, ties to even, saturating."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 the codes are multiples of 2^-9: a sum with 1.5 * 2^23 has them in its last bits
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 15
    return tl.where(size < 0.015625, small, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _e4m3_value(byte):
    """The fp32 values of e4m3 codes given as int32."""
    size = byte & 0x7F
    small = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(size < 8, small, tl.where(size == 0x7F, 0x7FC00000, (size << 20) + (120 << 23)))
    return (bits | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _scale_byte(amax, floor, MAX: tl.constexpr, E4M3_SCALE: tl.constexpr):
    """The byte of the scale of groups whose largest magnitude is `amax`."""
    exact = tl.div_rn(tl.maximum(amax, floor), MAX)
    # up to a power of two by the exponent field; exact is a normal number, the floor sees to it
    byte = ((exact.to(tl.int32, bitcast=True) - 1) >> 23) + 1
    if E4M3_SCALE:
        byte = _e4m3_byte(exact)
    return byte


@triton.jit
def _scale_value(byte, E4M3_SCALE: tl.constexpr):
    """The fp32 value of a scale byte."""
    return _e4m3_value(byte) if E4M3_SCALE else ue8m0_value(byte)


@triton.jit
def _place(slot, is_inside, page_slots, stride_page):
    """Where the page of a slot begins, and the slot's number in it; slots outside count as slot 0."""
    slot = tl.where(is_inside, slot, 0).to(tl.int32)  # a 64-bit division is a call
    page = slot // page_slots
    return page.to(tl.int64) * stride_page, (slot - page * page_slots).to(tl.int64)


@triton.jit
def _store_groups(
    x,
    is_stored,
    codes_at,
    scale_at,
    floor,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX: tl.constexpr,
    PACKED: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
):
    """Write codes and scales of groups [ROWS, GROUP]; returns what they stand for, in fp32."""
    byte = _scale_byte(tl.max(tl.abs(x), axis=1), floor, MAX, E4M3_SCALE)
    tl.store(scale_at, byte.to(tl.uint8), mask=is_stored)
    scale = _scale_value(byte, E4M3_SCALE)[:, None]
    if PACKED:
        # two channels share a byte, the even one in the low nibble
        codes = e2m1_codes(x, scale, "e4m3" if E4M3_SCALE else "ue8m0")
        even, odd = tl.split(tl.reshape(codes, [ROWS, GROUP // 2, 2]))
        at = codes_at[:, None] + tl.arange(0, GROUP // 2)[None, :]
        tl.store(at, (even | (odd << 4)).to(tl.uint8), mask=is_stored[:, None])
        value = e2m1_value(codes) * scale
    else:
        codes = _e4m3_byte(tl.div_rn(x, scale))
        at = codes_at[:, None] + tl.arange(0, GROUP)[None, :]
        tl.store(at, codes.to(tl.uint8), mask=is_stored[:, None])
        value = _e4m3_value(codes) * scale
    return value


@triton.jit
def _store_records(
    x_ptr,
    slots_ptr,
    cache_ptr,
    num_groups,
    num_entries,
    page_slots,
    stride_xt,
    stride_xd,
    stride_s,
    stride_page,
    code_step,
    scale_start,
    scale_step,
    floor,
    ROW_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    MAX: tl.constexpr,
    PACKED: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
):
    # 1. which groups: they are numbered through all rows; where their records go
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    row, part = group // ROW_GROUPS, group % ROW_GROUPS
    slot = tl.load(slots_ptr + row * stride_s, mask=group < num_groups, other=-1).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_stored, page_slots, stride_page)
    # 2. rows that are not stored are not read
    x_ptrs = (x_ptr + row * stride_xt + part * GROUP * stride_xd)[:, None]
    x_ptrs += tl.arange(0, GROUP).to(tl.int64)[None, :] * stride_xd
    x = tl.load(x_ptrs, mask=is_stored[:, None], other=0.0).to(tl.float32)
    # 3. codes and scales
    codes_at = cache_ptr + page_at + slot * code_step + part * GROUP_BYTES
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step + part
    _store_groups(x, is_stored, codes_at, scale_at, floor, BLOCK_GROUPS, GROUP, MAX, PACKED, E4M3_SCALE)


@triton.jit
def _load_records(
    cache_ptr,
    slots_ptr,
    x_ptr,
    num_groups,
    num_entries,
    page_slots,
    stride_s,
    stride_page,
    code_step,
    scale_start,
    scale_step,
    ROW_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
):
    # 1. which groups, and where they stand
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    row, part = group // ROW_GROUPS, group % ROW_GROUPS
    slot = tl.load(slots_ptr + row * stride_s, mask=group < num_groups, other=-1).to(tl.int64)
    is_there = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_there, page_slots, stride_page)
    # 2. scales and codes; what no slot names is zero and was never read
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step + part
    scale = _scale_value(tl.load(scale_at, mask=is_there, other=0).to(tl.int32), E4M3_SCALE)[:, None]
    codes_at = (cache_ptr + page_at + slot * code_step + part * GROUP_BYTES)[:, None]
    byte = tl.load(codes_at + tl.arange(0, GROUP_BYTES)[None, :], mask=is_there[:, None], other=0).to(tl.int32)
    if PACKED:
        pair = tl.join(e2m1_value(byte & 15) * scale, e2m1_value(byte >> 4) * scale)
        x = tl.reshape(pair, [BLOCK_GROUPS, GROUP])
    else:
        x = _e4m3_value(byte) * scale
    # 3. the only rounding
    x_ptrs = x_ptr + (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    tl.store(x_ptrs, x.to(x_ptr.dtype.element_ty), mask=(group < num_groups)[:, None])


@triton.jit
def _normed(x_ptr, weight_ptr, column, stride_xd, stride_w, rstd):
    """Channels of a normalised row, rounded to bf16."""
    x = tl.load(x_ptr + column * stride_xd).to(tl.float32)
    weight = tl.load(weight_ptr + column * stride_w).to(tl.float32)
    return (x * rstd * weight).to(tl.bfloat16).to(tl.float32)


@triton.jit
def turned_row(
    x_ptr,
    weight_ptr,
    table_ptr,
    position,
    num_positions,
    stride_xd,
    stride_w,
    stride_ts,
    stride_tr,
    width,
    eps,
    CHANNELS: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A row, a group to a line: which channels, normalised ones, and those with the last ROTARY rotated."""
    # statistics: the sum is one-dimensional, so its order is that of the width alone
    x = tl.load(x_ptr + tl.arange(0, CHANNELS).to(tl.int64) * stride_xd).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / width + eps)
    # every channel and the other one of its pair
    part = tl.arange(0, CHANNELS // GROUP)
    channel = part[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    own = _normed(x_ptr, weight_ptr, channel.to(tl.int64), stride_xd, stride_w, rstd)
    other = _normed(x_ptr, weight_ptr, (channel ^ 1).to(tl.int64), stride_xd, stride_w, rstd)
    # a position outside the table gives NaN instead of a stray read
    is_turned = channel >= CHANNELS - ROTARY
    is_known = is_turned & (position >= 0) & (position < num_positions)
    pair = ((channel - (CHANNELS - ROTARY)) // 2).to(tl.int64)
    table_ptrs = table_ptr + position * stride_ts + pair * stride_tr
    cos = tl.load(table_ptrs, mask=is_known, other=float("nan"))
    sin = tl.load(table_ptrs + (ROTARY // 2) * stride_tr, mask=is_known, other=float("nan"))
    other = tl.where(channel % 2 == 0, other, other * -1.0)
    rotated = difference_of_products(own, cos, other, sin).to(tl.bfloat16).to(tl.float32)
    return channel, own, tl.where(is_turned, rotated, own)


@triton.jit
def _norm_rope_store(
    x_ptr,
    weight_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    cache_ptr,
    tap_ptr,
    num_entries,
    page_slots,
    num_positions,
    stride_xt,
    stride_xd,
    stride_w,
    stride_ts,
    stride_tr,
    stride_p,
    stride_s,
    stride_page,
    code_step,
    scale_start,
    scale_step,
    width,
    eps,
    floor,
    CHANNELS: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUP: tl.constexpr,
    MAX: tl.constexpr,
    PACKED: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    TAP: tl.constexpr,
):
    # 1. the row, normalised and rotated
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row * stride_p).to(tl.int64)
    channel, own, turned = turned_row(
        x_ptr + row * stride_xt,
        weight_ptr,
        table_ptr,
        position,
        num_positions,
        stride_xd,
        stride_w,
        stride_ts,
        stride_tr,
        width,
        eps,
        CHANNELS,
        ROTARY,
        GROUP,
    )
    # 2. codes and scales
    part = tl.arange(0, CHANNELS // GROUP)
    slot = tl.load(slots_ptr + row * stride_s).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_stored, page_slots, stride_page)
    codes_at = cache_ptr + page_at + slot * code_step + part * GROUP_BYTES
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step + part
    all_stored = (part >= 0) & is_stored
    stored = _store_groups(
        turned, all_stored, codes_at, scale_at, floor, CHANNELS // GROUP, GROUP, MAX, PACKED, E4M3_SCALE
    )
    # 3. the row on its way
    tap_ptrs = tap_ptr + row * CHANNELS + channel
    if TAP == "norm":
        tl.store(tap_ptrs, own.to(tl.bfloat16))
    elif TAP == "rope":
        tl.store(tap_ptrs, turned.to(tl.bfloat16))
    elif TAP == "cast_back":
        tl.store(tap_ptrs, stored.to(tl.bfloat16))


def store_records(
    cache_pow_: torch.Tensor, x_td: torch.Tensor, slots_t: torch.Tensor, *, record: Record
) -> torch.Tensor:
    """Quantise rows and write their records, in place; rows that share a slot leave either of them.

    Raises:
        RuntimeError: x_td is on the CPU and kernels are not interpreted.
    """
    if not x_td.numel() or not cache_pow_.numel():
        return cache_pow_
    require_runnable("x_td", x_td)
    launch, row_groups = record_launch(record.group), record.channels // record.group
    num_groups = x_td.shape[0] * row_groups
    _store_records[(triton.cdiv(num_groups, launch.groups),)](
        x_td,
        slots_t,
        cache_pow_,
        num_groups,
        cache_pow_.shape[0] * cache_pow_.shape[1],
        cache_pow_.shape[1],
        *x_td.stride(),
        slots_t.stride(0),
        cache_pow_.stride(0),
        *record.places(cache_pow_.shape[1]),
        record.amax_floor,
        ROW_GROUPS=row_groups,
        GROUP=record.group,
        BLOCK_GROUPS=launch.groups,
        MAX=record.max_value,
        PACKED=record.packed,
        E4M3_SCALE=record.e4m3_scale,
        GROUP_BYTES=record.data_bytes // row_groups,
        num_warps=launch.num_warps,
    )
    return cache_pow_


def load_records(
    cache_pow: torch.Tensor,
    slots_t: torch.Tensor,
    *,
    record: Record,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of entries in `dtype`, zeros where no entry is named.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: the cache is on the CPU and kernels are not interpreted.
    """
    x_td = output_buffer(out, (slots_t.shape[0], record.channels), dtype, cache_pow)
    if not x_td.numel():
        return x_td
    if not cache_pow.numel():
        return x_td.zero_()
    require_runnable("cache_pow", cache_pow)
    launch, row_groups = record_launch(record.group), record.channels // record.group
    num_groups = slots_t.shape[0] * row_groups
    _load_records[(triton.cdiv(num_groups, launch.groups),)](
        cache_pow,
        slots_t,
        x_td,
        num_groups,
        cache_pow.shape[0] * cache_pow.shape[1],
        cache_pow.shape[1],
        slots_t.stride(0),
        cache_pow.stride(0),
        *record.places(cache_pow.shape[1]),
        ROW_GROUPS=row_groups,
        GROUP=record.group,
        BLOCK_GROUPS=launch.groups,
        PACKED=record.packed,
        E4M3_SCALE=record.e4m3_scale,
        GROUP_BYTES=record.data_bytes // row_groups,
        num_warps=launch.num_warps,
    )
    return x_td


def norm_rope_store(
    cache_pow_: torch.Tensor,
    x_td: torch.Tensor,
    weight_d: torch.Tensor,
    table_sr: torch.Tensor,
    positions_t: torch.Tensor,
    slots_t: torch.Tensor,
    *,
    eps: float,
    tap: str,
    record: Record,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, RoPE, quantiser and store, a row to a program; returns the cache and the rows that `tap` names.

    Raises:
        RuntimeError: x_td is on the CPU and kernels are not interpreted.
    """
    t, d = x_td.shape
    tap_td = x_td.new_empty((t, 0 if tap == "none" else d), dtype=torch.bfloat16)
    if not t:
        return cache_pow_, tap_td
    require_runnable("x_td", x_td)
    _norm_rope_store[(t,)](
        x_td,
        weight_d,
        table_sr,
        positions_t,
        slots_t,
        cache_pow_,
        tap_td,
        cache_pow_.shape[0] * cache_pow_.shape[1],
        max(cache_pow_.shape[1], 1),
        table_sr.shape[0],
        *x_td.stride(),
        weight_d.stride(0),
        *table_sr.stride(),
        positions_t.stride(0),
        slots_t.stride(0),
        cache_pow_.stride(0),
        *record.places(cache_pow_.shape[1]),
        float(d),
        eps,
        record.amax_floor,
        CHANNELS=d,
        ROTARY=table_sr.shape[1],
        GROUP=record.group,
        MAX=record.max_value,
        PACKED=record.packed,
        E4M3_SCALE=record.e4m3_scale,
        GROUP_BYTES=record.data_bytes * record.group // d,
        TAP=tap,
        num_warps=FusedLaunch().num_warps,
    )
    return cache_pow_, tap_td
