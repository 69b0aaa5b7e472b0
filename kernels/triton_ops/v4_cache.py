"""Records of V4: 448 channels as e4m3 codes in groups of 64, the last 64 as bf16, 7 UE8M0 scales and a zero byte.

Eight groups make a row; the last one is the tail: it is copied, and the zero byte stands where its scale would be. So a
tile of groups holds whole rows, and every load and store is a run of 64 elements. The tail is read and written through
a bf16 view of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .kv_cache import _e4m3_byte, _e4m3_value, _normed, _place, _scale_byte
from .quant import output_buffer, ue8m0_value
from .rope import difference_of_products

WIDTH, GROUP, PARTS = 512, 64, 8
CODES, SCALES, RECORD = 448, 8, 584
E4M3_MAX = tl.constexpr(448.0)


@dataclass(frozen=True, kw_only=True)
class V4RecordLaunch:
    """Groups a program of the store or the load takes; threads that share a row of the fused store."""

    groups: int = 32
    num_warps: int = 8
    row_warps: int = 2  # fixes the order in which squares are added


def v4_places(slots: int, *, sectioned: bool) -> tuple[int, int, int, int]:
    """Bytes from one record's codes to the next, first scale, bytes to the next scales, first byte of a tail."""
    if sectioned:
        return RECORD - SCALES, slots * (RECORD - SCALES), SCALES, CODES
    return RECORD, CODES, RECORD, CODES + SCALES


def bf16_view(name: str, pages: torch.Tensor) -> torch.Tensor:
    """The same bytes as bf16.

    Raises:
        NotImplementedError: a page begins at an odd byte.
    """
    if pages.storage_offset() % 2 or pages.stride(0) % 2:
        raise NotImplementedError(f"{name}: expected pages at even bytes, got strides {pages.stride()}")
    return pages.view(torch.bfloat16)


@triton.jit
def _store_rows(
    x,
    part,
    is_stored,
    codes_at,
    scale_at,
    tail_at,
    floor,
    LINE: tl.constexpr,
):
    """Write groups [rows, LINE] of which part 7 is the tail; returns what they stand for, in fp32."""
    is_tail = part == 7
    byte = tl.where(is_tail, 0, _scale_byte(tl.max(tl.abs(x), axis=1), floor, E4M3_MAX, False))
    tl.store(scale_at, byte.to(tl.uint8), mask=is_stored)
    scale = ue8m0_value(byte)[:, None]
    codes = _e4m3_byte(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))
    column = tl.arange(0, LINE)[None, :]
    tl.store(codes_at[:, None] + column, codes.to(tl.uint8), mask=(is_stored & (part < 7))[:, None])
    tl.store(tail_at[:, None] + column, x.to(tl.bfloat16), mask=(is_stored & is_tail)[:, None])
    return tl.where(is_tail[:, None], x, _e4m3_value(codes) * scale)


@triton.jit
def _store_v4(
    x_ptr,
    slots_ptr,
    cache_ptr,
    tail_ptr,
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
    tail_start,
    floor,
    BLOCK_GROUPS: tl.constexpr,
    LINE: tl.constexpr,
):
    # 1. which groups: they are numbered through all rows; where their records go
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    row, part = group // 8, group % 8
    slot = tl.load(slots_ptr + row * stride_s, mask=group < num_groups, other=-1).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_stored, page_slots, stride_page)
    # 2. rows that are not stored are not read
    x_ptrs = (x_ptr + row * stride_xt + part * LINE * stride_xd)[:, None]
    x_ptrs += tl.arange(0, LINE).to(tl.int64)[None, :] * stride_xd
    x = tl.load(x_ptrs, mask=is_stored[:, None], other=0.0).to(tl.float32)
    # 3. codes, scales, tail
    record = page_at + slot * code_step
    tail_at = tail_ptr + (record + tail_start) // 2
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step + part
    _store_rows(x, part, is_stored, cache_ptr + record + part * LINE, scale_at, tail_at, floor, LINE)


@triton.jit
def _load_v4(
    cache_ptr,
    tail_ptr,
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
    tail_start,
    BLOCK_GROUPS: tl.constexpr,
    LINE: tl.constexpr,
):
    # 1. which groups, and where they stand
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    row, part = group // 8, group % 8
    slot = tl.load(slots_ptr + row * stride_s, mask=group < num_groups, other=-1).to(tl.int64)
    is_there = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_there, page_slots, stride_page)
    record = page_at + slot * code_step
    # 2. scales, codes, tail; what no slot names is zero and was never read
    column = tl.arange(0, LINE)[None, :]
    coded, is_tail = is_there & (part < 7), is_there & (part == 7)
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step + part
    scale = ue8m0_value(tl.load(scale_at, mask=coded, other=0).to(tl.int32))[:, None]
    byte = tl.load((cache_ptr + record + part * LINE)[:, None] + column, mask=coded[:, None], other=0).to(tl.int32)
    tail_at = tail_ptr + (record + tail_start) // 2
    tail = tl.load(tail_at[:, None] + column, mask=is_tail[:, None], other=0.0).to(tl.float32)
    x = tl.where(is_tail[:, None], tail, _e4m3_value(byte) * scale)
    # 3. the only rounding
    x_ptrs = x_ptr + (group * LINE)[:, None] + column
    tl.store(x_ptrs, x.to(x_ptr.dtype.element_ty), mask=(group < num_groups)[:, None])


@triton.jit
def _norm_rope_store_v4(
    x_ptr,
    weight_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    cache_ptr,
    tail_ptr,
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
    tail_start,
    eps,
    floor,
    CHANNELS: tl.constexpr,
    LINE: tl.constexpr,
    TAP: tl.constexpr,
):
    # 1. statistics of the row; the sum is one-dimensional, so its order is that of the width alone
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xt
    x = tl.load(x_ptr + tl.arange(0, CHANNELS).to(tl.int64) * stride_xd).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / CHANNELS + eps)
    # 2. every channel and the other one of its pair, a group to a line
    part = tl.arange(0, 8)
    channel = part[:, None] * LINE + tl.arange(0, LINE)[None, :]
    own = _normed(x_ptr, weight_ptr, channel.to(tl.int64), stride_xd, stride_w, rstd)
    other = _normed(x_ptr, weight_ptr, (channel ^ 1).to(tl.int64), stride_xd, stride_w, rstd)
    # 3. rotation of the tail; a position outside the table gives NaN instead of a stray read
    position = tl.load(positions_ptr + row * stride_p).to(tl.int64)
    is_turned = channel >= CHANNELS - LINE
    is_known = is_turned & (position >= 0) & (position < num_positions)
    pair = ((channel - (CHANNELS - LINE)) // 2).to(tl.int64)
    table_ptrs = table_ptr + position * stride_ts + pair * stride_tr
    cos = tl.load(table_ptrs, mask=is_known, other=float("nan"))
    sin = tl.load(table_ptrs + (LINE // 2) * stride_tr, mask=is_known, other=float("nan"))
    other = tl.where(channel % 2 == 0, other, other * -1.0)
    turned = difference_of_products(own, cos, other, sin).to(tl.bfloat16).to(tl.float32)
    turned = tl.where(is_turned, turned, own)
    # 4. codes, scales, tail
    slot = tl.load(slots_ptr + row * stride_s).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_stored, page_slots, stride_page)
    record = page_at + slot * code_step
    codes_at = cache_ptr + record + part * LINE
    scale_at = cache_ptr + page_at + scale_start + slot * scale_step + part
    tail_at = tail_ptr + (record + tail_start) // 2 + (part - 7) * LINE  # only part 7 is written
    stored = _store_rows(turned, part, (part >= 0) & is_stored, codes_at, scale_at, tail_at, floor, LINE)
    # 5. the row on its way
    tap_ptrs = tap_ptr + row * CHANNELS + channel
    if TAP == "norm":
        tl.store(tap_ptrs, own.to(tl.bfloat16))
    elif TAP == "rope":
        tl.store(tap_ptrs, turned.to(tl.bfloat16))
    elif TAP == "cast_back":
        tl.store(tap_ptrs, stored.to(tl.bfloat16))


def store_v4(
    cache_pow_: torch.Tensor, x_td: torch.Tensor, slots_t: torch.Tensor, *, floor: float, sectioned: bool
) -> torch.Tensor:
    """Quantise rows and write their records, in place; rows that share a slot leave either of them.

    Raises:
        NotImplementedError: a page begins at an odd byte.
        RuntimeError: x_td is on the CPU and kernels are not interpreted.
    """
    if not x_td.numel() or not cache_pow_.numel():
        return cache_pow_
    require_runnable("x_td", x_td)
    launch, (pages, slots, _) = V4RecordLaunch(), cache_pow_.shape
    num_groups = x_td.shape[0] * PARTS
    _store_v4[(triton.cdiv(num_groups, launch.groups),)](
        x_td,
        slots_t,
        cache_pow_,
        bf16_view("cache_pow_", cache_pow_),
        num_groups,
        pages * slots,
        slots,
        *x_td.stride(),
        slots_t.stride(0),
        cache_pow_.stride(0),
        *v4_places(slots, sectioned=sectioned),
        floor,
        BLOCK_GROUPS=launch.groups,
        LINE=GROUP,
        num_warps=launch.num_warps,
    )
    return cache_pow_


def load_v4(
    cache_pow: torch.Tensor,
    slots_t: torch.Tensor,
    *,
    sectioned: bool,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of entries in `dtype`, zeros where no entry is named.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: a page begins at an odd byte.
        RuntimeError: the cache is on the CPU and kernels are not interpreted.
    """
    x_td = output_buffer(out, (slots_t.shape[0], WIDTH), dtype, cache_pow)
    if not x_td.numel():
        return x_td
    if not cache_pow.numel():
        return x_td.zero_()
    require_runnable("cache_pow", cache_pow)
    launch, (pages, slots, _) = V4RecordLaunch(), cache_pow.shape
    num_groups = slots_t.shape[0] * PARTS
    _load_v4[(triton.cdiv(num_groups, launch.groups),)](
        cache_pow,
        bf16_view("cache_pow", cache_pow),
        slots_t,
        x_td,
        num_groups,
        pages * slots,
        slots,
        slots_t.stride(0),
        cache_pow.stride(0),
        *v4_places(slots, sectioned=sectioned),
        BLOCK_GROUPS=launch.groups,
        LINE=GROUP,
        num_warps=launch.num_warps,
    )
    return x_td


def norm_rope_store_v4(
    cache_pow_: torch.Tensor,
    x_td: torch.Tensor,
    weight_d: torch.Tensor,
    table_sr: torch.Tensor,
    positions_t: torch.Tensor,
    slots_t: torch.Tensor,
    *,
    eps: float,
    floor: float,
    sectioned: bool,
    tap: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, RoPE of the tail, quantiser and store, a row to a program; returns the cache and the rows that `tap` names.

    Raises:
        NotImplementedError: the table does not turn exactly the tail; a page begins at an odd byte.
        RuntimeError: x_td is on the CPU and kernels are not interpreted.
    """
    if table_sr.shape[1] != GROUP:
        raise NotImplementedError(f"table_sr: expected a width of {GROUP}, got {table_sr.shape[1]}")
    t = len(x_td)
    tap_td = x_td.new_empty((t, 0 if tap == "none" else WIDTH), dtype=torch.bfloat16)
    if not t:
        return cache_pow_, tap_td
    require_runnable("x_td", x_td)
    slots = max(cache_pow_.shape[1], 1)
    _norm_rope_store_v4[(t,)](
        x_td,
        weight_d,
        table_sr,
        positions_t,
        slots_t,
        cache_pow_,
        bf16_view("cache_pow_", cache_pow_),
        tap_td,
        cache_pow_.shape[0] * cache_pow_.shape[1],
        slots,
        table_sr.shape[0],
        *x_td.stride(),
        weight_d.stride(0),
        *table_sr.stride(),
        positions_t.stride(0),
        slots_t.stride(0),
        cache_pow_.stride(0),
        *v4_places(slots, sectioned=sectioned),
        eps,
        floor,
        CHANNELS=WIDTH,
        LINE=GROUP,
        TAP=tap,
        num_warps=V4RecordLaunch().row_warps,
    )
    return cache_pow_, tap_td
