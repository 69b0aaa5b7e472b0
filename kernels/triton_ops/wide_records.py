"""Records with fp32 scales or a bf16 tail (V3.2: 656 and 132 bytes, V4: 584): quantise and store, load and dequantise.

fp32 scales and tails are written and read through views of the same bytes, so pages have to begin at multiples of four
bytes, or of two if scales are bytes. Nothing is summed: what is stored does not depend on the batch,
the launch or the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .kv_cache import _e4m3_byte, _place, _scale_byte
from .quant import e4m3_value, output_buffer, store_scale, ue8m0_value
from .split_softmax import arch_of

E4M3_MAX = tl.constexpr(448.0)


@dataclass(frozen=True, kw_only=True)
class WideLaunch:
    """Rows a program of the store or the load takes. It changes no result."""

    rows: int
    e4m3_bits: bool
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True)
class WideRecord:
    """A record format and where a page keeps its parts: plain numbers for the kernels."""

    channels: int
    group: int
    tail: int
    pad: int = 0  # zero bytes behind the scales
    sectioned: bool = False
    scale: str = "f32"  # f32, pow2_f32 (the writer rounds up to a power of two; readers need not know), ue8m0
    amax_floor: float = 0.0  # of the writer

    @property
    def align(self) -> int:
        """What pages begin at a multiple of."""
        return 2 if self.scale == "ue8m0" else 4

    @property
    def lines(self) -> int:
        """Groups of a record and what rounds them up to a power of two."""
        return triton.next_power_of_2(self.channels // self.group + self.pad)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a record and of their pad."""
        return (1 if self.scale == "ue8m0" else 4) * (self.channels // self.group) + self.pad

    def places(self, slots: int) -> tuple[int, int, int, int]:
        """Bytes from one record's codes to the next, where scales begin, bytes to the next scales, where tails do."""
        main = self.channels + 2 * self.tail
        if self.sectioned:
            return main, slots * main, self.scale_bytes, self.channels
        step = main + self.scale_bytes
        return step, self.channels, step, self.channels + self.scale_bytes


def wide_launch(record: WideRecord, arch: str) -> WideLaunch:
    """About 2048 channels a program, whatever the number of rows; the Ascend chain cannot convert e4m3."""
    return WideLaunch(rows=max(1, 2048 // (record.lines * record.group)), e4m3_bits=arch == "ascend950")


@triton.jit
def _leave_scales(amax, floor, part, at, is_stored, GROUPS: tl.constexpr, PAD: tl.constexpr, SCALE: tl.constexpr):
    """Write the scales of groups, and zeros behind them; returns the fp32 values of the scales."""
    if SCALE == "ue8m0":
        byte = tl.where(part < GROUPS, _scale_byte(amax, floor, E4M3_MAX, False, False), 0)
        tl.store(at, byte.to(tl.uint8), mask=is_stored & (part < GROUPS + PAD))
        scale = ue8m0_value(byte)
    else:
        scale = store_scale(amax, floor, at, is_stored & (part < GROUPS), E4M3_MAX, SCALE)
    return scale


@triton.jit
def _store_wide(
    x_ptr,
    slots_ptr,
    byte_ptr,
    scale_ptr,
    tail_ptr,
    num_rows,
    num_entries,
    stride_xt,
    stride_xd,
    stride_s,
    stride_page,
    code_step,
    scale_start,
    scale_step,
    tail_start,
    floor,
    PAGE_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    PAD: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. which groups of which rows, and where their records go
    line = tl.arange(0, ROWS * LINES)
    row = tl.program_id(0).to(tl.int64) * ROWS + line // LINES
    part = (line % LINES).to(tl.int64)
    slot = tl.load(slots_ptr + row * stride_s, mask=row < num_rows, other=-1).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_stored, PAGE_SLOTS, stride_page)
    # 2. scales and codes; rows that are not stored are not read
    channel = tl.arange(0, GROUP).to(tl.int64)
    x_at = (x_ptr + row * stride_xt)[:, None] + (part[:, None] * GROUP + channel[None, :]) * stride_xd
    coded = (is_stored & (part < GROUPS))[:, None]
    x = tl.load(x_at, mask=coded, other=0.0).to(tl.float32)
    scale_at = scale_ptr + (page_at + scale_start + slot * scale_step) // SCALE_STEP + part
    scale = _leave_scales(tl.max(tl.abs(x), axis=1), floor, part, scale_at, is_stored, GROUPS, PAD, SCALE)
    code = _e4m3_byte(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), BITS)
    code_at = (byte_ptr + page_at + slot * code_step + part * GROUP)[:, None] + channel[None, :]
    tl.store(code_at, code.to(tl.uint8), mask=coded)
    # 3. the tail, a row to a line
    if TAIL > 0:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        slot = tl.load(slots_ptr + row * stride_s, mask=row < num_rows, other=-1).to(tl.int64)
        is_stored = (slot >= 0) & (slot < num_entries)
        page_at, slot = _place(slot, is_stored, PAGE_SLOTS, stride_page)
        channel = tl.arange(0, TAIL_PAD).to(tl.int64)
        mask = is_stored[:, None] & (channel < TAIL)[None, :]
        x_at = (x_ptr + row * stride_xt)[:, None] + (GROUPS * GROUP + channel)[None, :] * stride_xd
        x = tl.load(x_at, mask=mask, other=0.0)
        tail_at = (tail_ptr + (page_at + slot * code_step + tail_start) // 2)[:, None] + channel[None, :]
        tl.store(tail_at, x.to(tl.bfloat16), mask=mask)


@triton.jit
def _load_wide(
    byte_ptr,
    scale_ptr,
    tail_ptr,
    slots_ptr,
    x_ptr,
    num_rows,
    num_entries,
    stride_s,
    stride_page,
    code_step,
    scale_start,
    scale_step,
    tail_start,
    PAGE_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. which groups, and where they stand; what no slot names is zero and was never read
    line = tl.arange(0, ROWS * LINES)
    row = tl.program_id(0).to(tl.int64) * ROWS + line // LINES
    part = (line % LINES).to(tl.int64)
    slot = tl.load(slots_ptr + row * stride_s, mask=row < num_rows, other=-1).to(tl.int64)
    is_there = (slot >= 0) & (slot < num_entries)
    page_at, slot = _place(slot, is_there, PAGE_SLOTS, stride_page)
    # 2. code times scale, the only rounding
    channel = tl.arange(0, GROUP).to(tl.int64)
    coded = is_there & (part < GROUPS)
    scale_at = scale_ptr + (page_at + scale_start + slot * scale_step) // SCALE_STEP + part
    if SCALE_STEP == 1:
        scale = ue8m0_value(tl.load(scale_at, mask=coded, other=0).to(tl.int32))
    else:
        scale = tl.load(scale_at, mask=coded, other=0.0)
    code_at = (byte_ptr + page_at + slot * code_step + part * GROUP)[:, None] + channel[None, :]
    x = e4m3_value(tl.load(code_at, mask=coded[:, None], other=0), BITS) * scale[:, None]
    width = GROUPS * GROUP + TAIL
    x_at = (x_ptr + row * width + part * GROUP)[:, None] + channel[None, :]
    tl.store(x_at, x.to(x_ptr.dtype.element_ty), mask=((row < num_rows) & (part < GROUPS))[:, None])
    # 3. the tail, a row to a line
    if TAIL > 0:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        slot = tl.load(slots_ptr + row * stride_s, mask=row < num_rows, other=-1).to(tl.int64)
        is_there = (slot >= 0) & (slot < num_entries)
        page_at, slot = _place(slot, is_there, PAGE_SLOTS, stride_page)
        channel = tl.arange(0, TAIL_PAD).to(tl.int64)
        in_tail = (channel < TAIL)[None, :]
        tail_at = (tail_ptr + (page_at + slot * code_step + tail_start) // 2)[:, None] + channel[None, :]
        tail = tl.load(tail_at, mask=is_there[:, None] & in_tail, other=0.0)
        x_at = (x_ptr + row * width + GROUPS * GROUP)[:, None] + channel[None, :]
        tl.store(x_at, tail.to(x_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & in_tail)


def wide_views(name: str, cache_pow: torch.Tensor, *, align: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages as bytes, as what their scales are (fp32 numbers where pages are aligned to four) and as bf16 numbers.

    Raises:
        NotImplementedError: pages do not begin at multiples of `align`, or their bytes are not one behind the other.
    """
    p, o, w = cache_pow.shape
    stride = cache_pow.stride(0) if p > 1 else o * w
    aligned = stride % align == 0 and cache_pow.storage_offset() % align == 0
    if not aligned or (cache_pow.numel() and not cache_pow[0].is_contiguous()):
        raise NotImplementedError(
            f"{name}: expected pages of contiguous bytes at multiples of {align}, got strides {cache_pow.stride()} and "
            f"offset {cache_pow.storage_offset()}"
        )
    page_pw = cache_pow.as_strided((p, o * w), (stride, 1))
    return page_pw, page_pw.view(torch.float32) if align == 4 else page_pw, page_pw.view(torch.bfloat16)


def store_wide(
    cache_pow_: torch.Tensor, x_td: torch.Tensor, slots_t: torch.Tensor, *, record: WideRecord
) -> torch.Tensor:
    """Quantise rows and write their records, in place; rows that share a slot leave either of them.

    Raises:
        NotImplementedError: pages are not aligned as the record asks.
        RuntimeError: x_td is on the CPU and kernels are not interpreted.
    """
    if not x_td.numel() or not cache_pow_.numel():
        return cache_pow_
    views = wide_views("cache_pow_", cache_pow_, align=record.align)
    launch = wide_launch(record, arch_of(cache_pow_.device))
    require_runnable("x_td", x_td)
    _store_wide[(triton.cdiv(x_td.shape[0], launch.rows),)](
        x_td,
        slots_t,
        *views,
        x_td.shape[0],
        cache_pow_.shape[0] * cache_pow_.shape[1],
        *x_td.stride(),
        slots_t.stride(0),
        views[0].stride(0),
        *record.places(cache_pow_.shape[1]),
        record.amax_floor,
        PAGE_SLOTS=cache_pow_.shape[1],
        ROWS=launch.rows,
        GROUPS=record.channels // record.group,
        GROUP=record.group,
        LINES=record.lines,
        PAD=record.pad,
        TAIL=record.tail,
        TAIL_PAD=triton.next_power_of_2(max(record.tail, 1)),
        SCALE=record.scale,
        SCALE_STEP=views[1].element_size(),
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
    )
    return cache_pow_


def load_wide(
    cache_pow: torch.Tensor,
    slots_t: torch.Tensor,
    *,
    record: WideRecord,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of entries in `dtype`, zeros where no entry is named.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: pages are not aligned as the record asks.
        RuntimeError: the cache is on the CPU and kernels are not interpreted.
    """
    x_td = output_buffer(out, (slots_t.shape[0], record.channels + record.tail), dtype, cache_pow)
    if not x_td.numel():
        return x_td
    if not cache_pow.numel():
        return x_td.zero_()
    views = wide_views("cache_pow", cache_pow, align=record.align)
    launch = wide_launch(record, arch_of(cache_pow.device))
    require_runnable("cache_pow", cache_pow)
    _load_wide[(triton.cdiv(slots_t.shape[0], launch.rows),)](
        *views,
        slots_t,
        x_td,
        slots_t.shape[0],
        cache_pow.shape[0] * cache_pow.shape[1],
        slots_t.stride(0),
        views[0].stride(0),
        *record.places(cache_pow.shape[1]),
        PAGE_SLOTS=cache_pow.shape[1],
        ROWS=launch.rows,
        GROUPS=record.channels // record.group,
        GROUP=record.group,
        LINES=record.lines,
        TAIL=record.tail,
        TAIL_PAD=triton.next_power_of_2(max(record.tail, 1)),
        SCALE_STEP=views[1].element_size(),
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
    )
    return x_td
