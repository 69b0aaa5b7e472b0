"""Balanced context parallelism: the rows of a prefill are spread so that every rank has the same causal work.

A sequence of q rows is cut into 2 c blocks of b = ceil(q / 2c) rows for c ranks; rank r takes block r and, behind it,
block 2c - 1 - r. The work of a row grows with its position, so a late block goes with an early one ("mirror",
"zig-zag"). Blocks that q does not fill are padded with rows -1. A rank holds the pairs of all sequences one after the
other, L = sum of 2 b rows, the same on every rank, so shards can be gathered in rank order and put back by an index.

When only the last rows of a prefill go on (bounded replay), the rows that are kept lie where the full split put them.
Each rank sends its own, the lists padded to one length, and the rows are split anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_shape


def mirror_split(query_b: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
    """Which rows each rank holds, and where each row is found when the shards stand one behind the other.

    Math:
        see the module docstring; gather[r, i] is a row of the packed batch or -1, and inverse[gather[r, i]] = r L + i

    Shapes:
        query_b: int64 [b], rows of every sequence; returns int64 gather_ci [c, L] and inverse_t [t], t = sum of rows.

    Edges:
        a sequence without rows takes no place; one rank holds everything in order, with at most one padding row a
        sequence; with fewer rows than blocks most blocks are padding.

    Raises:
        ValueError: query_b is not 1-D or negative; ranks is below 1.
        TypeError: query_b is not int64.

    Source:
        runtime.md section 6.2
    """
    _check_rows("query_b", query_b, ranks)
    shards: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for rows in query_b.tolist():
        size = -(-rows // (2 * ranks))
        for rank, shard in enumerate(shards):
            for block in (rank, 2 * ranks - 1 - rank):
                own = range(block * size, (block + 1) * size)
                shard.extend(start + row if row < rows else -1 for row in own)
        start += rows
    gather_ci = torch.tensor(shards, dtype=torch.int64)
    inverse_t = torch.empty(start, dtype=torch.int64)
    for place, row in enumerate(gather_ci.flatten().tolist()):
        if row >= 0:
            inverse_t[row] = place
    return gather_ci, inverse_t


def mirror_keys(query_b: Tensor, key_b: Tensor, *, ranks: int, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the rows that each rank holds, and which compressed keys they may see.

    Math:
        position = keys of the sequence - its rows + row
        first = sum over earlier sequences of max(1, keys div ratio)
        end   = first + (position + 1) div ratio

    Shapes:
        query_b, key_b: int64 [b], rows and tokens of every sequence, the rows being its last tokens; returns int64
        position_ci, first_ci and end_ci [c, L], laid out as `mirror_split` does.

    Edges:
        a padding row has position 0 and sees nothing: its end is its first key, that of its sequence. A sequence too
        short for a compressed key still takes the place of one.

    Raises:
        ValueError: arguments are not 1-D, differ in length or are negative; a sequence has more rows than tokens;
            ranks or ratio is below 1.
        TypeError: query_b or key_b is not int64.

    Source:
        runtime.md section 6.2
    """
    _check_rows("query_b", query_b, ranks)
    _check_rows("key_b", key_b, ranks)
    expect_shape("key_b", key_b, "b", {"b": len(query_b)})
    if ratio < 1:
        raise ValueError(f"ratio: expected at least 1, got {ratio}")
    if (key_b < query_b).any():
        raise ValueError(f"key_b: expected at least the rows {query_b.tolist()}, got {key_b.tolist()}")
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    first = 0
    for rows, tokens in zip(query_b.tolist(), key_b.tolist(), strict=True):
        size = -(-rows // (2 * ranks))
        for rank, shard in enumerate(found):
            for block in (rank, 2 * ranks - 1 - rank):
                for row in range(block * size, (block + 1) * size):
                    position = tokens - rows + row
                    seen = (position, first, first + (position + 1) // ratio)
                    shard.append(seen if row < rows else (0, first, first))
        first += max(1, tokens // ratio)
    position_ci, first_ci, end_ci = torch.tensor(found, dtype=torch.int64).reshape(ranks, -1, 3).unbind(-1)
    return position_ci.contiguous(), first_ci.contiguous(), end_ci.contiguous()


def compact_exchange(query_b: Tensor, kept_b: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
    """Which of its rows each rank sends when the last `kept` rows of every sequence go on, and where they arrive.

    Math:
        sent[r] = local numbers of the rows of rank r that are kept, ascending (sequence, half, row), then -1 up to the
        longest list n; the kept row that is number i of rank r's list arrives at r n + i

    Shapes:
        query_b, kept_b: int64 [b]; returns int64 sent_ci [c, n] and arrival_t [sum of kept], the kept rows in the
        order of the packed batch.

    Edges:
        nothing kept gives empty lists.

    Raises:
        ValueError: arguments are not 1-D, differ in length or are negative; more rows are kept than there are; ranks
            is below 1.
        TypeError: query_b or kept_b is not int64.

    Source:
        runtime.md sections 4.5, 6.2
    """
    _check_rows("query_b", query_b, ranks)
    _check_rows("kept_b", kept_b, ranks)
    expect_shape("kept_b", kept_b, "b", {"b": len(query_b)})
    if (kept_b > query_b).any():
        raise ValueError(f"kept_b: expected at most the rows {query_b.tolist()}, got {kept_b.tolist()}")
    kept: list[int] = []
    start = 0
    for rows, last in zip(query_b.tolist(), kept_b.tolist(), strict=True):
        kept.extend(range(start + rows - last, start + rows))
        start += rows
    number = {row: i for i, row in enumerate(kept)}
    shards = mirror_split(query_b, ranks=ranks)[0].tolist()
    lists = [[i for i, row in enumerate(shard) if row in number] for shard in shards]
    longest = max(len(mine) for mine in lists)
    sent_ci = torch.full((ranks, longest), -1, dtype=torch.int64)
    arrival_t = torch.empty(len(kept), dtype=torch.int64)
    for rank, mine in enumerate(lists):
        for i, local in enumerate(mine):
            sent_ci[rank, i] = local
            arrival_t[number[shards[rank][local]]] = rank * longest + i
    return sent_ci, arrival_t


def take_rows(x_tm: Tensor, index_i: Tensor) -> Tensor:
    """Copy rows by index, zeros for -1: a shard of a batch, or a batch from gathered shards.

    Math:
        out[i, :] = x[index[i], :], bytes as they are

    Shapes:
        x_tm: [t, m] of any dtype; index_i: int64 [i]; returns [i, m] of the same dtype.

    Raises:
        ValueError: shapes disagree; an index lies outside -1 .. t - 1.
        TypeError: index_i is not int64.

    Source:
        runtime.md section 6.2
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("index_i", index_i, "i", dims)
    expect_dtype("index_i", index_i, torch.int64)
    out_im = x_tm.new_zeros(len(index_i), dims["m"])
    for i, row in enumerate(index_i.tolist()):
        if not -1 <= row < dims["t"]:
            raise ValueError(f"index_i: expected values in [-1, {dims['t']}), got {row} at {i}")
        if row >= 0:
            out_im[i] = x_tm[row]
    return out_im


def _check_rows(name: str, rows_b: Tensor, ranks: int) -> None:
    expect_shape(name, rows_b, "b", {})
    expect_dtype(name, rows_b, torch.int64)
    if (rows_b < 0).any():
        raise ValueError(f"{name}: expected 0 or more, got {rows_b.tolist()}")
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
