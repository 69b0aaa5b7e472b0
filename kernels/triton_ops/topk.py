"""Exact top-k of rows, candidate blocks, and the maps from compact indices to entries and slots.

A program finds the k-th largest score of a row by counting how many scores reach a threshold, and writes what lies
above, and of the scores at the threshold the first ones. On a GPU the scores lie in registers: the threshold is
halved between bounds, and of a row that is too long the best of its parts are selected first, then the best of these;
elsewhere a row is walked, four bits of the threshold at a time. Counts are exact, so nothing depends on an order, and
indices come out in the order of the row.
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
    """Scores that a program looks at side by side, and whether it keeps them in registers; it changes no result."""

    block: int
    at_once: bool = False
    num_warps: int = 4
    registers: int = 64  # of a thread, at once: with all that the compiler would take, h200 is a sixth slower


def select_launch(num_columns: int, k: int, arch: str) -> SelectLaunch:
    """On GPUs a row, or parts of it, in registers, 32 scores a thread; else blocks of 1024.

    Parts of 8192 are the fastest where they have 16 k scores and more; those of 4 k still halve a row.
    """
    block, width = max(32, triton.next_power_of_2(num_columns)), triton.next_power_of_2(k)
    part = min(block, max(8192, min(16 * width, 32768)))
    if arch.startswith("sm") and (part == block or part >= 4 * width):
        return SelectLaunch(block=part, at_once=True, num_warps=max(1, part // 1024))
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
def _key(number, BITS: tl.constexpr):
    """An fp32 number as an integer in value order, ±0 alike; of a bf16 the lower half says nothing."""
    bits = (number + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is +0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> (32 - BITS)


@triton.jit
def _threshold(key, BITS: tl.constexpr):
    """The least fp32 number of a key."""
    bits = key << (32 - BITS)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _reach(x, key, BITS: tl.constexpr):
    """How many scores reach a key; fp32 holds such counts exactly, and adds at twice the rate of integers."""
    return tl.sum(tl.where(x >= _threshold(key, BITS), 1.0, 0.0), axis=0).to(tl.int32)


@triton.jit
def _ordinals(flags, BLOCK: tl.constexpr):
    """1, 2, … for the flags that are set, in their order: counted in lines of 32, then the lines."""
    grid = tl.reshape(flags.to(tl.int32), [BLOCK // 32, 32])
    lines = tl.sum(grid, axis=1)
    before = tl.cumsum(lines, axis=0) - lines
    return tl.reshape(tl.cumsum(grid, axis=1) + before[:, None], [BLOCK])


@triton.jit
def _select_at_once(
    scores_ptr,
    origin_ptr,
    length_ptr,
    idx_ptr,
    num_columns,
    k,
    stride_st,
    HAS_ORIGIN: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. the scores of a part, by their columns or by those that are named; what cannot be chosen is -inf
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    item = tl.arange(0, BLOCK)
    column = part * BLOCK + item
    if HAS_ORIGIN:
        at = tl.load(origin_ptr + row * num_columns + column, mask=column < num_columns, other=-1)
        inside = at >= 0
    else:
        at = column
        inside = column < tl.minimum(tl.load(length_ptr + row), num_columns)
    x = tl.load(scores_ptr + row * stride_st + at, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.maximum(x, float("-inf"))
    # 2. the k-th largest score: count scores reach low, and these are no more than k or high is reached by fewer.
    # One score of each of k or more groups reaches the least of their maxima
    best = x
    if GROUPS < BLOCK // 4:
        best = tl.max(tl.max(tl.reshape(x, [BLOCK // GROUPS // 4, GROUPS, 4]), axis=2), axis=0)
    lowest = tl.full([], -(2 ** (BITS - 1)), tl.int32) + (0x7FFFFF >> (32 - BITS)) + 1  # that is finite
    low = tl.maximum(_key(tl.min(best, axis=0), BITS), lowest)
    high = _key(tl.max(best, axis=0), BITS) + 1
    count = _reach(x, low, BITS)
    middle = (low & high) + ((low ^ high) >> 1)
    while (count > k) & (middle > low):
        reached = _reach(x, middle, BITS)
        if reached >= k:
            low = middle
            count = reached
        else:
            high = middle
        middle = (low & high) + ((low ^ high) >> 1)
    # 3. all that reach low; if these are too many, of the ties at low the first ones. Bounds, counts and sums: logic on
    # flags would be packed into bits and unpacked again
    floor, above = _threshold(low, BITS), _threshold(low + 1, BITS)
    last = tl.full([], BLOCK, tl.int32)
    if count > k:
        tied = tl.where(x >= floor, 1, 0) - tl.where(x >= above, 1, 0)
        nth = _ordinals(tied, BLOCK) * tied
        room = k - _reach(x, low + 1, BITS)
        last = tl.max(tl.where(nth <= room, item * tied, 0), axis=0)
    chosen = tl.where(x >= tl.where(item <= last, floor, above), 1, 0)
    # -1 for the others; 16 bits, because the places pass from one layout to another
    place = (_ordinals(chosen, BLOCK) * chosen - 1).to(tl.int16)
    is_chosen = place >= 0
    out_ptr = idx_ptr + (row * tl.num_programs(1) + part) * k
    index = column
    if HAS_ORIGIN:
        index = tl.load(origin_ptr + row * num_columns + column, mask=is_chosen, other=-1)
    tl.store(out_ptr + place.to(tl.int64), index, mask=is_chosen)
    # 4. what is left of the k places
    for start in range(tl.minimum(count, k), k, BLOCK):
        left = start + item
        tl.store(out_ptr + left, tl.full([BLOCK], -1, tl.int32), mask=left < k)


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
    launch = launch or select_launch(s, k, arch_of(scores_ts.device))
    length_t = length_t.contiguous()
    if launch.at_once:
        _select_parts(scores_ts, None, length_t, idx_tk, launch)
        return idx_tk
    _select[(t,)](
        scores_ts,
        length_t,
        idx_tk,
        s,
        k,
        scores_ts.stride(0),
        BITS=16 if scores_ts.dtype == torch.bfloat16 else 32,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return idx_tk


def _select_parts(
    scores_ts: torch.Tensor,
    origin_ts: torch.Tensor | None,
    length_t: torch.Tensor,
    idx_tk: torch.Tensor,
    launch: SelectLaunch,
) -> None:
    """The best of every part of a row, then the best of these, until one part is left."""
    t, k = idx_tk.shape
    s = (scores_ts if origin_ts is None else origin_ts).shape[1]
    block = min(launch.block, max(32, triton.next_power_of_2(s)))
    num_parts = max(1, triton.cdiv(s, block))
    found = idx_tk
    if num_parts > 1:
        found = torch.empty((t, num_parts * k), dtype=torch.int32, device=scores_ts.device)
    _select_at_once[(t, num_parts)](
        scores_ts,
        length_t if origin_ts is None else origin_ts,
        length_t,
        found,
        s,
        k,
        scores_ts.stride(0),
        HAS_ORIGIN=origin_ts is not None,
        BITS=16 if scores_ts.dtype == torch.bfloat16 else 32,
        GROUPS=triton.next_power_of_2(k),
        BLOCK=block,
        num_warps=max(1, launch.num_warps * block // launch.block),
        maxnreg=launch.registers,
    )
    if num_parts > 1:
        _select_parts(scores_ts, found, length_t, idx_tk, launch)


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
