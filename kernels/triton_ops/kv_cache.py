"""Records of a paged cache: quantise and store, load and dequantise, and norm + RoPE + quantise + store in one launch.

e4m3 codes and scales are converted by the target, or made and read as integers where its compiler cannot: the bytes are
the same. A group of channels and its scale stay in one row of a tile, and the addresses of both are linear in page and
slot, so one kernel serves both layouts of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import e2m1_codes, e2m1_value, e4m3_value, output_buffer, quotient, share_of, ue8m0_byte, ue8m0_value
from .rope import difference_of_products
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class RecordLaunch:
    """Groups a program of the store or the load takes. It changes no result."""

    groups: int
    e4m3_bits: bool
    num_warps: int = 8  # 8 channels a thread: with 16 the FP4 store needs a stack on SM100


def record_launch(group: int, arch: str) -> RecordLaunch:
    """About 2048 channels a program, whatever the number of rows; the Ascend chain cannot convert e4m3."""
    return RecordLaunch(groups=max(1, 2048 // group), e4m3_bits=arch == "ascend950")


@dataclass(frozen=True, kw_only=True)
class FusedLaunch:
    """One warp takes a row of the fused store: its squares are added without a barrier, in an order of their own."""

    e4m3_bits: bool
    num_warps: int = 1


def fused_launch(arch: str) -> FusedLaunch:
    """The same for every width and number of rows; the Ascend chain cannot convert e4m3."""
    return FusedLaunch(e4m3_bits=arch == "ascend950")


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
def _e4m3_byte(x, BITS: tl.constexpr):
    """The nearest e4m3 code of fp32 values, ties to even, saturating."""
    if BITS:
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # below 2^-6 the codes are multiples of 2^-9: a sum with 1.5 * 2^23 has them in its last bits
        small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 15
        code = tl.where(size < 0.015625, small, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    else:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return code


@triton.jit
def _e2m1_values(byte, BITS: tl.constexpr):
    """The fp32 values of the two e2m1 codes of a byte, the low nibble first."""
    byte = byte.to(tl.int32)
    if BITS:
        low, high = e2m1_value(byte & 15), e2m1_value(byte >> 4)
    else:
        # exponent and mantissa at the top of an fp32 number whose exponents begin at -126: its subnormals are theirs
        low = ((byte << 22) & 0x01C00000) | ((byte << 28) & -0x80000000)
        high = ((byte << 18) & 0x01C00000) | ((byte << 24) & -0x80000000)
        low = low.to(tl.float32, bitcast=True) * 2.0**126
        high = high.to(tl.float32, bitcast=True) * 2.0**126
    return low, high


@triton.jit
def _scale_byte(amax, floor, MAX: tl.constexpr, E4M3_SCALE: tl.constexpr, BITS: tl.constexpr):
    """The byte of the scale of groups whose largest magnitude is `amax`."""
    amax = tl.maximum(amax, floor)
    return _e4m3_byte(share_of(amax, MAX), BITS) if E4M3_SCALE else ue8m0_byte(amax, MAX)


@triton.jit
def _scale_value(byte, E4M3_SCALE: tl.constexpr, BITS: tl.constexpr):
    """The fp32 value of a scale byte."""
    return e4m3_value(byte, BITS) if E4M3_SCALE else ue8m0_value(byte)


@triton.jit
def _place(slot, is_inside, PAGE_SLOTS: tl.constexpr, stride_page):
    """Where the page of a slot begins, and the slot's number in it; slots outside count as slot 0."""
    slot = tl.where(is_inside, slot, 0).to(tl.int32)  # a 64-bit division is a call
    page = slot // PAGE_SLOTS
    return page.to(tl.int64) * stride_page, (slot - page * PAGE_SLOTS).to(tl.int64)


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
    BITS: tl.constexpr,
):
    """Write codes and scales of groups [ROWS, GROUP]; returns what they stand for, in fp32."""
    wide = x.to(tl.float32)
    byte = _scale_byte(tl.max(tl.abs(wide), axis=1), floor, MAX, E4M3_SCALE, BITS)
    tl.store(scale_at, byte.to(tl.uint8), mask=is_stored)
    scale = _scale_value(byte, E4M3_SCALE, BITS)[:, None]
    scale_kind: tl.constexpr = "e4m3" if E4M3_SCALE else "ue8m0"
    if PACKED:
        # two channels share a byte, the even one in the low nibble
        codes = e2m1_codes(x, scale, scale_kind)
        even, odd = tl.split(tl.reshape(codes, [ROWS, GROUP // 2, 2]))
        at = codes_at[:, None] + tl.arange(0, GROUP // 2)[None, :]
        tl.store(at, (even | (odd << 4)).to(tl.uint8), mask=is_stored[:, None])
        value = e2m1_value(codes) * scale
    else:
        codes = _e4m3_byte(quotient(wide, scale, scale_kind, 2 if x.dtype == tl.float32 else 1), BITS)
        at = codes_at[:, None] + tl.arange(0, GROUP)[None, :]
        tl.store(at, codes.to(tl.uint8), mask=is_stored[:, None])
        value = e4m3_value(codes, BITS) * scale
    return value


@triton.jit
def _store_records(
    x_ptr,
    slots_ptr,
    cache_ptr,
    num_groups,
    num_entries,
    stride_xt,
    stride_xd,
    stride_s,
    stride_page,
    code_step,
    scale_start,
    scale_step,
    floor,
    PAGE_SLOTS: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    MAX: tl.constexpr,
    PACKED: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. which groups: they are numbered through all rows; where their records go
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    row, part = group // ROW_GROUPS, group % ROW_GROUPS
    slot = tl.load(slots_ptr + row * stride_s, mask=group < num_groups, other=-1).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_stored, PAGE_SLOTS, stride_page)
    # 2. rows that are not stored are not read
    x_ptrs = (x_ptr + row * stride_xt + part * GROUP * stride_xd)[:, None]
    x_ptrs += tl.arange(0, GROUP).to(tl.int64)[None, :] * stride_xd
    x = tl.load(x_ptrs, mask=is_stored[:, None], other=0.0)
    # 3. codes and scales
    codes_at = cache_ptr + page_at + slot * code_step + part * GROUP_BYTES
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step + part
    _store_groups(x, is_stored, codes_at, scale_at, floor, BLOCK_GROUPS, GROUP, MAX, PACKED, E4M3_SCALE, BITS)


@triton.jit
def _load_records(
    cache_ptr,
    slots_ptr,
    x_ptr,
    num_groups,
    num_entries,
    stride_s,
    stride_page,
    code_step,
    scale_start,
    scale_step,
    PAGE_SLOTS: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. which groups, and where they stand
    group = tl.program_id(0) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    row, part = group // ROW_GROUPS, group % ROW_GROUPS
    slot = tl.load(slots_ptr + row.to(tl.int64) * stride_s, mask=group < num_groups, other=-1).to(tl.int64)
    is_there = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_there, PAGE_SLOTS, stride_page)
    # 2. scales and codes; what no slot names is zero and was never read
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step + part
    scale = _scale_value(tl.load(scale_at, mask=is_there, other=0), E4M3_SCALE, BITS)[:, None]
    codes_at = (cache_ptr + page_at + slot * code_step + part * GROUP_BYTES)[:, None]
    byte = tl.load(codes_at + tl.arange(0, GROUP_BYTES)[None, :], mask=is_there[:, None], other=0)
    if PACKED:
        low, high = _e2m1_values(byte, BITS)
        x = tl.reshape(tl.join(low * scale, high * scale), [BLOCK_GROUPS, GROUP])
    else:
        x = e4m3_value(byte, BITS) * scale
    # 3. the only rounding
    x_ptrs = x_ptr + (group.to(tl.int64) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    tl.store(x_ptrs, x.to(x_ptr.dtype.element_ty), mask=(group < num_groups)[:, None])


@triton.jit
def _normed(x, rstd, weight):
    """Channels of a normalised row."""
    return (x.to(tl.float32) * rstd * weight.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def normed_row(
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
    TAIL: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """The normalised channels of a row, and its last TAIL again, of which the last ROTARY are rotated; both in bf16."""
    # 1. all that is read, before anything waits for it; a position outside the table gives NaN, not a stray read
    channel = tl.arange(0, CHANNELS).to(tl.int64)
    x, weight = tl.load(x_ptr + channel * stride_xd), tl.load(weight_ptr + channel * stride_w)
    channel = CHANNELS - TAIL + tl.arange(0, TAIL).to(tl.int64)
    tail, tail_weight = tl.load(x_ptr + channel * stride_xd), tl.load(weight_ptr + channel * stride_w)
    pair = tl.arange(0, TAIL // 2).to(tl.int64) - (TAIL - ROTARY) // 2
    is_known = (pair >= 0) & (position >= 0) & (position < num_positions)
    table_ptrs = table_ptr + position * stride_ts + pair * stride_tr
    cos = tl.load(table_ptrs, mask=is_known, other=float("nan"))
    sin = tl.load(table_ptrs + (ROTARY // 2) * stride_tr, mask=is_known, other=float("nan"))
    # 2. the sum is one-dimensional, so its order is that of the width alone
    wide = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / width + eps)
    # 3. the rotation of neighbours
    even, odd = tl.split(tl.reshape(_normed(tail, rstd, tail_weight).to(tl.float32), [TAIL // 2, 2]))
    turned_even = tl.where(pair < 0, even, difference_of_products(even, cos, odd, sin))
    turned_odd = tl.where(pair < 0, odd, difference_of_products(odd, cos, even * -1.0, sin))
    turned = tl.reshape(tl.join(turned_even, turned_odd), [TAIL])
    return _normed(x, rstd, weight), turned.to(tl.bfloat16)


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
    PAGE_SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAIL: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUP: tl.constexpr,
    MAX: tl.constexpr,
    PACKED: tl.constexpr,
    E4M3_SCALE: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    TAP: tl.constexpr,
    BITS: tl.constexpr,
):
    PARTS: tl.constexpr = CHANNELS // GROUP
    TURNED: tl.constexpr = TAIL // GROUP
    # 1. where the record goes
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row * stride_p).to(tl.int64)
    slot = tl.load(slots_ptr + row * stride_s).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_stored, PAGE_SLOTS, stride_page)
    codes_at = cache_ptr + page_at + slot * code_step
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step
    # 2. the row, normalised, and its tail, rotated
    own, turned = normed_row(
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
        TAIL,
        ROTARY,
    )
    # 3. codes and scales, a group to a line: those before the tail, then those of the tail
    part = tl.arange(0, PARTS)
    groups = tl.reshape(own, [PARTS, GROUP])
    mask = is_stored & (part < PARTS - TURNED)
    code_ptrs = codes_at + part * GROUP_BYTES
    stored = _store_groups(groups, mask, code_ptrs, scale_at + part, floor, PARTS, GROUP, MAX, PACKED, E4M3_SCALE, BITS)
    part = PARTS - TURNED + tl.arange(0, TURNED)
    groups = tl.reshape(turned, [TURNED, GROUP])
    mask = is_stored & (part >= 0)
    code_ptrs = codes_at + part * GROUP_BYTES
    stored_tail = _store_groups(
        groups, mask, code_ptrs, scale_at + part, floor, TURNED, GROUP, MAX, PACKED, E4M3_SCALE, BITS
    )
    # 4. the row on its way
    if TAP == "norm":
        _store_tap(tap_ptr + row * CHANNELS, own, own, CHANNELS, 0)
    elif TAP == "rope":
        _store_tap(tap_ptr + row * CHANNELS, own, turned, CHANNELS, TAIL)
    elif TAP == "cast_back":
        tail = tl.reshape(stored_tail, [TAIL])
        _store_tap(tap_ptr + row * CHANNELS, tl.reshape(stored, [CHANNELS]), tail, CHANNELS, TAIL)


@triton.jit
def _store_tap(tap_ptr, row, tail, CHANNELS: tl.constexpr, TAIL: tl.constexpr):
    """Write a row to bf16, its last TAIL channels from `tail`."""
    channel = tl.arange(0, CHANNELS)
    tl.store(tap_ptr + channel, row.to(tl.bfloat16), mask=channel < CHANNELS - TAIL)
    if TAIL:
        tl.store(tap_ptr + CHANNELS - TAIL + tl.arange(0, TAIL), tail.to(tl.bfloat16))


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
    launch, row_groups = record_launch(record.group, arch_of(x_td.device)), record.channels // record.group
    num_groups = x_td.shape[0] * row_groups
    _store_records[(triton.cdiv(num_groups, launch.groups),)](
        x_td,
        slots_t,
        cache_pow_,
        num_groups,
        cache_pow_.shape[0] * cache_pow_.shape[1],
        *x_td.stride(),
        slots_t.stride(0),
        cache_pow_.stride(0),
        *record.places(cache_pow_.shape[1]),
        record.amax_floor,
        PAGE_SLOTS=cache_pow_.shape[1],
        ROW_GROUPS=row_groups,
        GROUP=record.group,
        BLOCK_GROUPS=launch.groups,
        MAX=record.max_value,
        PACKED=record.packed,
        E4M3_SCALE=record.e4m3_scale,
        GROUP_BYTES=record.data_bytes // row_groups,
        BITS=launch.e4m3_bits,
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
    launch, row_groups = record_launch(record.group, arch_of(cache_pow.device)), record.channels // record.group
    num_groups = slots_t.shape[0] * row_groups
    _load_records[(triton.cdiv(num_groups, launch.groups),)](
        cache_pow,
        slots_t,
        x_td,
        num_groups,
        cache_pow.shape[0] * cache_pow.shape[1],
        slots_t.stride(0),
        cache_pow.stride(0),
        *record.places(cache_pow.shape[1]),
        PAGE_SLOTS=cache_pow.shape[1],
        ROW_GROUPS=row_groups,
        GROUP=record.group,
        BLOCK_GROUPS=launch.groups,
        PACKED=record.packed,
        E4M3_SCALE=record.e4m3_scale,
        GROUP_BYTES=record.data_bytes // row_groups,
        BITS=launch.e4m3_bits,
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
    launch = fused_launch(arch_of(x_td.device))
    _norm_rope_store[(t,)](
        x_td,
        weight_d,
        table_sr,
        positions_t,
        slots_t,
        cache_pow_,
        tap_td,
        cache_pow_.shape[0] * cache_pow_.shape[1],
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
        PAGE_SLOTS=max(cache_pow_.shape[1], 1),
        CHANNELS=d,
        TAIL=triton.next_power_of_2(max(table_sr.shape[1], record.group)),
        ROTARY=table_sr.shape[1],
        GROUP=record.group,
        MAX=record.max_value,
        PACKED=record.packed,
        E4M3_SCALE=record.e4m3_scale,
        GROUP_BYTES=record.data_bytes * record.group // d,
        TAP=tap,
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
    )
    return cache_pow_, tap_td
