"""Exact top-k of rows, candidate blocks, and the maps from compact indices to entries and slots.

A row is selected by one program: it finds the k-th largest score from the top bit down, counting how many scores reach
each threshold, and writes what lies above, and of the scores at the threshold the first ones. A row that fits the
registers of a program is read once and searched bit by bit; a longer one is walked four bits at a time. Counts are
integers, so nothing depends on an order, and indices come out in the order of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .split_softmax import arch_of

BF16_MAX = tl.constexpr(3.3895313892515355e38)  # the largest finite bf16


@dataclass(frozen=True, kw_only=True)
class SelectLaunch:
    """Scores that a program looks at side by side, and whether these are all of a row; it changes no result."""

    block: int
    at_once: bool = False
    num_warps: int = 4


def select_launch(num_columns: int, arch: str) -> SelectLaunch:
    """A row at once while it fits the registers, 32 scores a thread at most; otherwise in blocks of 1024."""
    block = max(32, triton.next_power_of_2(num_columns))
    if block <= 32768 and arch.startswith("sm"):
        return SelectLaunch(block=block, at_once=True, num_warps=min(32, max(1, block // 512)))
    return SelectLaunch(block=min(1024, block))


@dataclass(frozen=True, kw_only=True)
class MapLaunch:
    """Elements of a program of the elementwise kernels."""

    block: int = 1024
    num_warps: int = 4


@triton.jit
def ordered(scores, valid, BITS: tl.constexpr):
    """Scores as integers in value order, ±0 alike, and which of them can be chosen: neither NaN nor −inf."""
    wide = scores.to(tl.float32) + 0.0  # −0 + 0 is +0
    bits = wide.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    if BITS == 16:
        key = key >> 16  # of a bf16 the lower half says nothing
    return key, valid & (wide > float("-inf"))


@triton.jit
def _select(
    scores_ptr,
    length_ptr,
    idx_ptr,
    num_columns,
    k,
    stride_st,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    score_ptr, out_ptr = scores_ptr + row * stride_st, idx_ptr + row * k
    length = tl.minimum(tl.load(length_ptr + row), num_columns)
    item = tl.arange(0, BLOCK)
    # 1. the k-th largest score: `low` never has fewer than k scores at or above it; a short row is chosen as it is
    searched = tl.where(length > k, length, 0)
    low = tl.full([], -(2 ** (BITS - 1)), tl.int32)
    digit = tl.arange(0, 16)
    for place in range(0, BITS // 4):
        shift = BITS - 4 - 4 * place
        reached = tl.zeros([16], tl.int32)
        for start in range(0, searched, BLOCK):
            column = start + item
            inside = column < length
            loaded = tl.load(score_ptr + column, mask=inside, other=0.0)
            key, valid = ordered(loaded, inside, BITS)
            at_least = valid[:, None] & (key[:, None] >= (low + (digit << shift))[None, :])
            reached += tl.sum(at_least.to(tl.int32), axis=0)
        low += (tl.maximum(tl.sum((reached >= k).to(tl.int32), axis=0), 1) - 1) << shift
    # 2. how many of the scores at the threshold belong to the k: all that the scores above leave room for
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        column = start + item
        inside = column < length
        key, valid = ordered(tl.load(score_ptr + column, mask=inside, other=0.0), inside, BITS)
        above += (valid & (key > low)).to(tl.int32)
    room = k - tl.sum(above, axis=0)
    # 3. the indices, in the order of the row
    written = tl.full([], 0, tl.int32)
    tied = tl.full([], 0, tl.int32)
    for start in range(0, length, BLOCK):
        column = start + item
        inside = column < length
        key, valid = ordered(tl.load(score_ptr + column, mask=inside, other=0.0), inside, BITS)
        is_tied = (valid & (key == low)).to(tl.int32)
        nth = tied + tl.cumsum(is_tied, axis=0)
        chosen = (valid & (key > low)) | ((is_tied > 0) & (nth <= room))
        count = chosen.to(tl.int32)
        at = written + tl.cumsum(count, axis=0) - 1
        tl.store(out_ptr + at, column, mask=chosen)
        tied += tl.sum(is_tied, axis=0)
        written += tl.sum(count, axis=0)
    # 4. what is left of the k places
    for start in range(0, k, BLOCK):
        at = start + item
        tl.store(out_ptr + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= written) & (at < k))


@triton.jit
def _select_at_once(
    scores_ptr,
    length_ptr,
    idx_ptr,
    num_columns,
    k,
    stride_st,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. the whole row; what cannot be chosen stands below everything that can
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    length = tl.minimum(tl.load(length_ptr + row), num_columns)
    inside = column < length
    key, valid = ordered(tl.load(scores_ptr + row * stride_st + column, mask=inside, other=0.0), inside, BITS)
    lowest = tl.full([], -(2 ** (BITS - 1)), tl.int32)
    key = tl.where(valid, key, lowest)
    # 2. the k-th largest score: `low` never has fewer than k scores at or above it
    low = tl.where(tl.sum((key >= 0).to(tl.int32), axis=0) >= k, 0, lowest)
    for place in range(1, BITS):
        higher = low + (tl.full([], 1, tl.int32) << (BITS - 1 - place))
        low = tl.where(tl.sum((key >= higher).to(tl.int32), axis=0) >= k, higher, low)
    # 3. all that lie above, and of those at the threshold the first ones
    above = key > low
    is_tied = ((key == low) & (key > lowest)).to(tl.int32)
    room = k - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | ((is_tied > 0) & (tl.cumsum(is_tied, axis=0) <= room))
    count = chosen.to(tl.int32)
    out_ptr = idx_ptr + row * k
    tl.store(out_ptr + tl.cumsum(count, axis=0) - 1, column, mask=chosen)
    # 4. what is left of the k places
    written = tl.sum(count, axis=0)
    for start in range(0, k, BLOCK):
        at = start + column
        tl.store(out_ptr + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= written) & (at < k))


@triton.jit
def _block_scores(
    scores_ptr,
    length_ptr,
    out_ptr,
    num_columns,
    num_blocks,
    block_size,
    stride_st,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(length_ptr + row), num_columns)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item = tl.arange(0, SIZE)
    column = block[:, None] * block_size + item[None, :]
    inside = (item < block_size)[None, :] & (column < length)
    scores = tl.load(scores_ptr + row * stride_st + column, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    best = tl.minimum(tl.max(scores, axis=1), BF16_MAX)
    best = tl.where(block == (length + block_size - 1) // block_size - 1, float("inf"), best)
    tl.store(out_ptr + row * num_blocks + block, best.to(out_ptr.dtype.element_ty), mask=block < num_blocks)


@triton.jit
def _compact_lengths(blocks_ptr, length_ptr, out_ptr, num_blocks, block_size, stride_bt, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + row).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_blocks, BLOCK):
        place = start + tl.arange(0, BLOCK)
        block = tl.load(blocks_ptr + row * stride_bt + place, mask=place < num_blocks, other=-1).to(tl.int64)
        left = length - block * block_size
        left = tl.where(left < 0, 0, tl.where(left > block_size, block_size, left))
        total += tl.where(block >= 0, left, 0).to(tl.int32)
    tl.store(out_ptr + row, tl.sum(total, axis=0))


@triton.jit
def _look_up(
    idx_ptr,
    table_ptr,
    out_ptr,
    num_items,
    k,
    num_places,
    size,
    stride_it,
    stride_tt,
    BLOCK: tl.constexpr,
):
    """table[row, idx div size] * size + idx mod size; −1 where the index or the table says so."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < num_items
    row = item // k
    idx = tl.load(idx_ptr + row * stride_it + item % k, mask=inside, other=-1)
    known = (idx >= 0) & (idx // size < num_places)
    place = tl.where(known, idx, 0) // size
    found = tl.load(table_ptr + row * stride_tt + place, mask=known, other=-1)
    result = tl.where(found < 0, -1, found * size + tl.where(known, idx, 0) % size)
    tl.store(out_ptr + item, result, mask=inside)


def topk(
    scores_ts: torch.Tensor,
    length_t: torch.Tensor,
    *,
    k: int,
    launch: SelectLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indices of the k largest scores of every row, int32 [t, k]. A length beyond the row counts as the row's.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: the scores of a row are not one behind the other.
        RuntimeError: scores_ts is on the CPU and kernels are not interpreted.
    """
    t, s = scores_ts.shape
    idx_tk = output_buffer(out, (t, k), torch.int32, scores_ts)
    if scores_ts.numel() and scores_ts.stride(1) != 1:
        raise NotImplementedError(f"scores_ts: expected contiguous rows, got strides {scores_ts.stride()}")
    if not t:
        return idx_tk
    require_runnable("scores_ts", scores_ts)
    launch = launch or select_launch(s, arch_of(scores_ts.device))
    (_select_at_once if launch.at_once else _select)[(t,)](
        scores_ts,
        length_t.contiguous(),
        idx_tk,
        s,
        k,
        scores_ts.stride(0),
        BITS=16 if scores_ts.dtype == torch.bfloat16 else 32,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return idx_tk


def candidate_blocks(
    scores_ts: torch.Tensor, length_t: torch.Tensor, *, block_size: int, k: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The k best blocks of every row, int32 [t, k].

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: the scores of a row are not one behind the other.
        RuntimeError: scores_ts is on the CPU and kernels are not interpreted.
    """
    t, s = scores_ts.shape
    num_blocks = triton.cdiv(s, block_size)
    best_tj = torch.empty((t, num_blocks), dtype=scores_ts.dtype, device=scores_ts.device)
    if scores_ts.numel():
        if scores_ts.stride(1) != 1:
            raise NotImplementedError(f"scores_ts: expected contiguous rows, got strides {scores_ts.stride()}")
        require_runnable("scores_ts", scores_ts)
        _block_scores[(triton.cdiv(num_blocks, 128), t)](
            scores_ts,
            length_t.contiguous(),
            best_tj,
            s,
            num_blocks,
            block_size,
            scores_ts.stride(0),
            SIZE=triton.next_power_of_2(block_size),
            BLOCK=128,
            num_warps=4,
        )
    return topk(best_tj, (length_t + block_size - 1) // block_size, k=k, out=out)


def compact_lengths(
    blocks_tj: torch.Tensor, length_t: torch.Tensor, *, block_size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compact columns of every row that hold a visible entry, int32 [t].

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: blocks_tj is on the CPU and kernels are not interpreted.
    """
    t, num_blocks = blocks_tj.shape
    compact_t = output_buffer(out, (t,), torch.int32, blocks_tj)
    if not t:
        return compact_t
    require_runnable("blocks_tj", blocks_tj)
    blocks = blocks_tj.contiguous()
    launch = MapLaunch()
    _compact_lengths[(t,)](
        blocks,
        length_t.contiguous(),
        compact_t,
        num_blocks,
        block_size,
        blocks.stride(0),
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return compact_t


def look_up(
    name: str, idx_tk: torch.Tensor, table_tj: torch.Tensor, *, size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`table[t, i div size] * size + i mod size` of every index, int32 [t, k]; `name` is that of the indices.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: the indices are on the CPU and kernels are not interpreted.
    """
    t, k = idx_tk.shape
    result_tk = output_buffer(out, (t, k), torch.int32, idx_tk)
    if not t * k:
        return result_tk
    if not table_tj.numel():
        return result_tk.fill_(-1)
    require_runnable(name, idx_tk)
    idx, table = idx_tk.contiguous(), table_tj.contiguous()
    launch = MapLaunch()
    _look_up[(triton.cdiv(t * k, launch.block),)](
        idx,
        table,
        result_tk,
        t * k,
        k,
        table.shape[1],
        size,
        idx.stride(0),
        table.stride(0),
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return result_tk
