"""Exact selection of the best entries of a row, and the candidate blocks that narrow a selection down.

A row of scores is compared by value: −0 equals +0, NaN and −inf are never chosen, and equal scores are given to the
lower index. The chosen indices come out in ascending order, then −1. What stands at or beyond the length of a row is
never looked at: it may be NaN, garbage or uninitialised.

With candidates, the selection has two levels. A source layer scores every entry and keeps the best *blocks* of
neighbouring entries; later layers score only the entries of those blocks, in compact columns, and a compact index i
means entry `blocks[i div size] * size + i mod size`. Because the kept blocks ascend and only the last block of a row
can be partial, the valid compact columns are a prefix: `compact_lengths` long.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape

BF16_MAX = (2 - 2.0**-7) * 2.0**127  # the largest finite bf16


MOST_AT_ONCE = 2**22  # numbers of keys that are gathered together


def topk(scores_ts: Tensor, length_t: Tensor, *, k: int) -> Tensor:
    """The indices of the k largest scores of every row, in ascending order.

    Math:
        idx[t] = the min(k, valid) entries j < length[t] with the largest scores[t, j]; a tie goes to the lower j

    Shapes:
        scores_ts: bf16 or fp32 [t, s]; length_t: int32 [t], 0 … s; returns int32 [t, k].

    Edges:
        fewer than k valid entries leave −1 as a suffix; NaN and −inf are no valid entries; +inf is.

    Raises:
        TypeError: scores are not bf16, fp32 or fp64, or lengths not int32.
        ValueError: shapes disagree, a length is not in 0 … s, or k is not positive.

    Source:
        v41-attention.md sections 4.1, 4.3; parity-rules.md R9
    """
    _check_rows(scores_ts, length_t)
    expect_positive("k", k)
    column_s = torch.arange(scores_ts.shape[1], device=scores_ts.device)
    valid_ts = (column_s < length_t[:, None]) & (scores_ts > -torch.inf)  # a comparison with NaN is false
    # a stable descending sort leaves equal scores in the order of their index
    by_score_ts = torch.where(valid_ts, scores_ts, -torch.inf).argsort(dim=1, descending=True, stable=True)
    best_tk = by_score_ts[:, :k]
    is_valid_tk = valid_ts.gather(1, best_tk)
    return _ascending(torch.where(is_valid_tk, best_tk, -1), k)


def candidate_blocks(scores_ts: Tensor, length_t: Tensor, *, block_size: int, k: int) -> Tensor:
    """The k best blocks of neighbouring entries of every row, in ascending order.

    Math:
        nb        = ceil(length[t] / block_size)
        score_b   = min(max of scores[t, j] over the visible entries j of block b, largest finite bf16)
        score_nb-1 = +inf: the last block, which may be partial, is always kept
        blocks[t] = topk of score_b among b < nb

    Shapes:
        scores_ts: bf16 or fp32 [t, s]; length_t: int32 [t]; returns int32 [t, k].

    Edges:
        length 0 gives −1 everywhere; a block without a valid score is dropped unless it is the last; NaN is skipped.

    Raises:
        TypeError: as `topk`.
        ValueError: as `topk`, or block_size is not positive.

    Source:
        v41-attention.md section 4.2
    """
    _check_rows(scores_ts, length_t)
    expect_positive("block_size", block_size)
    expect_positive("k", k)
    t, s = scores_ts.shape
    column_s = torch.arange(s, device=scores_ts.device)
    visible_ts = (column_s < length_t[:, None]) & (scores_ts > -torch.inf)
    num_blocks = -(-s // block_size)
    score_ts = scores_ts.new_full((t, num_blocks * block_size), -torch.inf)
    score_ts[:, :s] = torch.where(visible_ts, scores_ts, -torch.inf)
    score_tj = score_ts.reshape(t, num_blocks, block_size).amax(2).clamp(max=BF16_MAX)
    blocks_t = (length_t + block_size - 1) // block_size
    is_last_tj = torch.arange(num_blocks, device=scores_ts.device) == blocks_t[:, None] - 1
    return topk(torch.where(is_last_tj, torch.inf, score_tj), blocks_t, k=k)


def compact_lengths(blocks_tj: Tensor, length_t: Tensor, *, block_size: int) -> Tensor:
    """How many compact columns of every row hold a visible entry.

    Math:
        n[t] = sum over the blocks b >= 0 of row t of clamp(length[t] - block_size * b, 0, block_size)

    Shapes:
        blocks_tj: int32 [t, j], ascending, then −1; length_t: int32 [t]; returns int32 [t].

    Raises:
        TypeError: blocks or lengths are not int32.
        ValueError: shapes disagree, or block_size is not positive.

    Source:
        v41-attention.md section 4.2
    """
    dims: dict[str, int] = {}
    expect_shape("blocks_tj", blocks_tj, "tj", dims)
    expect_shape("length_t", length_t, "t", dims)
    expect_dtype("blocks_tj", blocks_tj, torch.int32)
    expect_dtype("length_t", length_t, torch.int32)
    expect_positive("block_size", block_size)
    left_tj = (length_t.long()[:, None] - block_size * blocks_tj.long()).clamp(0, block_size)
    return torch.where(blocks_tj >= 0, left_tj, 0).sum(1, dtype=torch.int32)


def restore_indices(idx_tk: Tensor, blocks_tj: Tensor, *, block_size: int) -> Tensor:
    """The entries that compact indices mean.

    Math:
        entry = blocks[t, i div block_size] * block_size + i mod block_size

    Shapes:
        idx_tk: int32 [t, k]; blocks_tj: int32 [t, j]; returns int32 [t, k].

    Edges:
        an index below 0, beyond the last block or inside a block of −1 gives −1.

    Raises:
        TypeError: indices or blocks are not int32.
        ValueError: shapes disagree, or block_size is not positive.

    Source:
        v41-attention.md section 4.2
    """
    dims: dict[str, int] = {}
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_shape("blocks_tj", blocks_tj, "tj", dims)
    expect_dtype("idx_tk", idx_tk, torch.int32)
    expect_dtype("blocks_tj", blocks_tj, torch.int32)
    expect_positive("block_size", block_size)
    block_tk = _looked_up(blocks_tj, idx_tk.long(), block_size)
    return torch.where(block_tk >= 0, block_tk * block_size + idx_tk % block_size, -1).to(torch.int32)


def physical_slots(idx_tk: Tensor, table_tp: Tensor, *, page_entries: int) -> Tensor:
    """The slots of a paged cache that logical entries lie in.

    Math:
        slot = table[t, j div page_entries] * page_entries + j mod page_entries

    Shapes:
        idx_tk: int32 [t, k]; table_tp: int32 [t, p], the pages of each row's sequence; returns int32 [t, k].

    Edges:
        an index below 0 or beyond the table, or a page of −1, gives −1 and never the last slot.

    Raises:
        TypeError: indices or pages are not int32.
        ValueError: shapes disagree, or page_entries is not positive.

    Source:
        v41-attention.md section 4.2
    """
    dims: dict[str, int] = {}
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_shape("table_tp", table_tp, "tp", dims)
    expect_dtype("idx_tk", idx_tk, torch.int32)
    expect_dtype("table_tp", table_tp, torch.int32)
    expect_positive("page_entries", page_entries)
    page_tk = _looked_up(table_tp, idx_tk.long(), page_entries)
    return torch.where(page_tk >= 0, page_tk * page_entries + idx_tk % page_entries, -1).to(torch.int32)


def seen_rows(row_ts: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are named at all, each once, and `row_ts` with places among them; -1 stays."""
    place_ts = torch.full_like(row_ts, -1)
    seen_y, place_ts[row_ts >= 0] = row_ts[row_ts >= 0].unique(return_inverse=True)
    return seen_y, place_ts


def in_chunks(seen_ts: Tensor, width: int) -> Iterator[tuple[slice, int]]:
    """Tokens whose keys of `width` numbers are looked at together, and how many columns the last of them sees."""
    if not seen_ts.any():
        return
    most = int(seen_ts.any(0).nonzero()[-1, 0]) + 1
    step = max(MOST_AT_ONCE // (most * width), 1)
    for start in range(0, len(seen_ts), step):
        yield slice(start, start + step), most


def _looked_up(table_tj: Tensor, idx_tk: Tensor, size: int) -> Tensor:
    """table[t, idx div size] in 64 bits; −1 where idx is negative or beyond the table."""
    j = table_tj.shape[1]
    known_tk = (idx_tk >= 0) & (idx_tk < j * size)
    if not j:
        return torch.full_like(idx_tk, -1)
    row_tk = torch.where(known_tk, idx_tk // size, 0)
    return torch.where(known_tk, table_tj.long().gather(1, row_tk), -1)


def _ascending(idx_tj: Tensor, k: int) -> Tensor:
    """The indices in ascending order with −1 behind them, as int32 [t, k]."""
    idx_tk = idx_tj.new_full((idx_tj.shape[0], k), -1)
    last = torch.iinfo(torch.int64).max
    ordered_tj = torch.where(idx_tj >= 0, idx_tj, last).sort(dim=1).values
    idx_tk[:, : idx_tj.shape[1]] = torch.where(ordered_tj == last, -1, ordered_tj)
    return idx_tk.to(torch.int32)


def _check_rows(scores_ts: Tensor, length_t: Tensor) -> None:
    dims: dict[str, int] = {}
    expect_shape("scores_ts", scores_ts, "ts", dims)
    expect_shape("length_t", length_t, "t", dims)
    expect_dtype("scores_ts", scores_ts, torch.bfloat16, torch.float32, torch.float64)
    expect_dtype("length_t", length_t, torch.int32)
    expect_in_range("length_t", length_t, 0, dims["s"] + 1)
