"""Index lists of a sliding window: exact int32 arithmetic, whole lists and a few of them to a program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer


@dataclass(frozen=True, kw_only=True)
class WindowLaunch:
    """Rows a program takes, and the power of two that covers the width of a list. It changes no result."""

    rows: int
    width: int
    num_warps: int = 4


def window_launch(width: int) -> WindowLaunch:
    """About 1024 list entries a program, whatever the number of rows and the device."""
    block = triton.next_power_of_2(width)
    return WindowLaunch(rows=max(1, 1024 // block), width=block)


@triton.jit
def _row_of(value_ptr, seq, is_real, stride):
    """The value of every row's sequence, 0 for padding."""
    return tl.load(value_ptr + seq.to(tl.int64) * stride, mask=is_real, other=0).to(tl.int32)


@triton.jit
def _my_rows(rows_ptr, seq_ptr, num_rows, num_seqs, stride_r, stride_q, ROWS: tl.constexpr):
    """Rows of this program, their positions, their sequences, and which of them are no padding."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position = tl.load(rows_ptr + row * stride_r, mask=row < num_rows, other=0).to(tl.int32)
    seq = tl.load(seq_ptr + row * stride_q, mask=row < num_rows, other=-1).to(tl.int32)
    is_real = (seq >= 0) & (seq < num_seqs)
    return row, position, tl.where(is_real, seq, 0), is_real


@triton.jit
def _prefill_rows(
    positions_ptr,
    seq_ptr,
    first_ptr,
    offset_ptr,
    known_ptr,
    valid_ptr,
    list_ptr,
    num_rows,
    num_seqs,
    window,
    keep,
    stride_p,
    stride_q,
    stride_f,
    stride_o,
    stride_k,
    stride_v,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TRUNCATED: tl.constexpr,
):
    # 1. the first key of every window
    row, position, seq, is_real = _my_rows(positions_ptr, seq_ptr, num_rows, num_seqs, stride_p, stride_q, ROWS)
    low = tl.maximum(tl.maximum(position - window + 1, _row_of(valid_ptr, seq, is_real, stride_v)), 0)
    if TRUNCATED:
        low = tl.maximum(low, _row_of(known_ptr, seq, is_real, stride_k) - keep)
    # 2. keys from there on: before the chunk they stand in the history, then in the chunk
    first = _row_of(first_ptr, seq, is_real, stride_f)
    history = seq * window + window - first
    chunk = num_seqs * window + _row_of(offset_ptr, seq, is_real, stride_o) - first
    entry = tl.arange(0, WIDTH)[None, :]
    seen = low[:, None] + entry
    index = seen + tl.where(seen < first[:, None], history[:, None], chunk[:, None])
    index = tl.where(is_real[:, None] & (seen <= position[:, None]), index, -1)
    mask = (row < num_rows)[:, None] & (entry < window)
    tl.store(list_ptr + row[:, None] * window + entry, index, mask=mask)


@triton.jit
def _decode_rows(
    positions_ptr,
    seq_ptr,
    state_ptr,
    valid_ptr,
    list_ptr,
    num_rows,
    num_seqs,
    window,
    ring,
    stride_p,
    stride_q,
    stride_s,
    stride_v,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, position, seq, is_real = _my_rows(positions_ptr, seq_ptr, num_rows, num_seqs, stride_p, stride_q, ROWS)
    low = tl.maximum(tl.maximum(position - window + 1, _row_of(valid_ptr, seq, is_real, stride_v)), 0)
    entry = tl.arange(0, WIDTH)[None, :]
    seen = low[:, None] + entry
    slot = (_row_of(state_ptr, seq, is_real, stride_s) * ring)[:, None] + seen % ring
    slot = tl.where(is_real[:, None] & (seen <= position[:, None]), slot, -1)
    mask = (row < num_rows)[:, None] & (entry < window)
    tl.store(list_ptr + row[:, None] * window + entry, slot, mask=mask)


@triton.jit
def _ring_rows(
    last_ptr,
    state_ptr,
    valid_ptr,
    list_ptr,
    num_rows,
    width,
    window,
    ring,
    beyond,
    stride_l,
    stride_s,
    stride_v,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FROM_VALID: tl.constexpr,
):
    # the window up to `last`, and `beyond` positions after it; a list that is not FROM_VALID keeps its first places
    # for positions that are not valid
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_real = row < num_rows
    last = tl.load(last_ptr + row * stride_l, mask=is_real, other=0).to(tl.int32)
    least = tl.maximum(tl.load(valid_ptr + row * stride_v, mask=is_real, other=0).to(tl.int32), 0)
    state = tl.load(state_ptr + row * stride_s, mask=is_real, other=0).to(tl.int32)
    low = last - window + 1
    if FROM_VALID:
        low = tl.maximum(low, least)
    entry = tl.arange(0, WIDTH)[None, :]
    seen = low[:, None] + entry
    is_key = (seen >= least[:, None]) & (seen <= (last + beyond)[:, None])
    slot = tl.where(is_key, (state * ring)[:, None] + seen % ring, -1)
    tl.store(list_ptr + row[:, None] * width + entry, slot, mask=is_real[:, None] & (entry < width))


@triton.jit
def _ring_slots(
    positions_ptr,
    seq_ptr,
    end_ptr,
    known_ptr,
    state_ptr,
    slots_ptr,
    num_rows,
    num_seqs,
    ring,
    keep,
    stride_p,
    stride_q,
    stride_e,
    stride_k,
    stride_s,
    ROWS: tl.constexpr,
    COMPACT: tl.constexpr,
):
    row, position, seq, is_real = _my_rows(positions_ptr, seq_ptr, num_rows, num_seqs, stride_p, stride_q, ROWS)
    is_stored = is_real & (_row_of(end_ptr, seq, is_real, stride_e) - position <= ring)
    if COMPACT:
        is_stored = is_stored & (position >= _row_of(known_ptr, seq, is_real, stride_k) - keep)
    slot = _row_of(state_ptr, seq, is_real, stride_s) * ring + position % ring
    tl.store(slots_ptr + row, tl.where(is_stored, slot, -1), mask=row < num_rows)


@triton.jit
def _clip(first_ptr, end_ptr, known_ptr, clip_ptr, num_rows, keep, stride_f, stride_e, stride_k, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_real = row < num_rows
    first = tl.load(first_ptr + row * stride_f, mask=is_real, other=0).to(tl.int32)
    end = tl.load(end_ptr + row * stride_e, mask=is_real, other=1).to(tl.int32)
    known = tl.load(known_ptr + row * stride_k, mask=is_real, other=0).to(tl.int32)
    clip = tl.minimum(tl.maximum(known - keep - first, 0), end - first - 1)
    tl.store(clip_ptr + row, clip, mask=is_real)


def window_prefill(
    positions_t: torch.Tensor,
    seq_t: torch.Tensor,
    first_b: torch.Tensor,
    offset_b: torch.Tensor,
    known_b: torch.Tensor,
    valid_b: torch.Tensor,
    *,
    window: int,
    keep: int | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of [history windows | chunk] that each query sees; `keep` is None without truncation.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: positions are on the CPU and kernels are not interpreted.
    """
    list_tk = output_buffer(out, (positions_t.shape[0], window), torch.int32, positions_t)
    if not list_tk.numel():
        return list_tk
    require_runnable("positions_t", positions_t)
    launch = window_launch(window)
    inputs = (positions_t, seq_t, first_b, offset_b, known_b, valid_b)
    _prefill_rows[(triton.cdiv(positions_t.shape[0], launch.rows),)](
        *inputs,
        list_tk,
        positions_t.shape[0],
        first_b.shape[0],
        window,
        keep or 0,
        *(x.stride(0) for x in inputs),
        ROWS=launch.rows,
        WIDTH=launch.width,
        TRUNCATED=keep is not None,
        num_warps=launch.num_warps,
    )
    return list_tk


def window_decode(
    positions_t: torch.Tensor,
    seq_t: torch.Tensor,
    state_b: torch.Tensor,
    valid_b: torch.Tensor,
    *,
    window: int,
    ring: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Ring slots that each query of a step sees.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: positions are on the CPU and kernels are not interpreted.
    """
    list_tk = output_buffer(out, (positions_t.shape[0], window), torch.int32, positions_t)
    if not list_tk.numel():
        return list_tk
    require_runnable("positions_t", positions_t)
    launch = window_launch(window)
    inputs = (positions_t, seq_t, state_b, valid_b)
    _decode_rows[(triton.cdiv(positions_t.shape[0], launch.rows),)](
        *inputs,
        list_tk,
        positions_t.shape[0],
        state_b.shape[0],
        window,
        ring,
        *(x.stride(0) for x in inputs),
        ROWS=launch.rows,
        WIDTH=launch.width,
        num_warps=launch.num_warps,
    )
    return list_tk


def ring_rows(
    last_b: torch.Tensor,
    state_b: torch.Tensor,
    valid_b: torch.Tensor,
    *,
    width: int,
    window: int,
    ring: int,
    beyond: int,
    from_valid: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Ring slots of the `window` positions up to `last_b` and of `beyond` positions after, in lists of `width`.

    With `from_valid` a list begins with its first valid position, otherwise the places of positions that are not valid
    hold -1.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: last_b is on the CPU and kernels are not interpreted.
    """
    list_bk = output_buffer(out, (last_b.shape[0], width), torch.int32, last_b)
    if not list_bk.numel():
        return list_bk
    require_runnable("last_b", last_b)
    launch = window_launch(width)
    _ring_rows[(triton.cdiv(last_b.shape[0], launch.rows),)](
        last_b,
        state_b,
        valid_b,
        list_bk,
        last_b.shape[0],
        width,
        window,
        ring,
        beyond,
        *(x.stride(0) for x in (last_b, state_b, valid_b)),
        ROWS=launch.rows,
        WIDTH=launch.width,
        FROM_VALID=from_valid,
        num_warps=launch.num_warps,
    )
    return list_bk


def ring_slots(
    positions_t: torch.Tensor,
    seq_t: torch.Tensor,
    end_b: torch.Tensor,
    known_b: torch.Tensor,
    state_b: torch.Tensor,
    *,
    ring: int,
    keep: int | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Ring slots that keys go to; `keep` is None unless rows before the kept ones are left out.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: positions are on the CPU and kernels are not interpreted.
    """
    slots_t = output_buffer(out, tuple(positions_t.shape), torch.int32, positions_t)
    if not slots_t.numel():
        return slots_t
    require_runnable("positions_t", positions_t)
    launch = window_launch(1)
    inputs = (positions_t, seq_t, end_b, known_b, state_b)
    _ring_slots[(triton.cdiv(positions_t.shape[0], launch.rows),)](
        *inputs,
        slots_t,
        positions_t.shape[0],
        end_b.shape[0],
        ring,
        keep or 0,
        *(x.stride(0) for x in inputs),
        ROWS=launch.rows,
        COMPACT=keep is not None,
        num_warps=launch.num_warps,
    )
    return slots_t


def compact_clip(
    first_b: torch.Tensor,
    end_b: torch.Tensor,
    known_b: torch.Tensor,
    *,
    keep: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows at the front of every chunk that are left out.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: first_b is on the CPU and kernels are not interpreted.
    """
    clip_b = output_buffer(out, tuple(first_b.shape), torch.int32, first_b)
    if not clip_b.numel():
        return clip_b
    require_runnable("first_b", first_b)
    launch = window_launch(1)
    _clip[(triton.cdiv(first_b.shape[0], launch.rows),)](
        first_b,
        end_b,
        known_b,
        clip_b,
        first_b.shape[0],
        keep,
        *(x.stride(0) for x in (first_b, end_b, known_b)),
        ROWS=launch.rows,
        num_warps=launch.num_warps,
    )
    return clip_b
