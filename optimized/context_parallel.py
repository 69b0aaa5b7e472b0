"""Balanced context parallelism in whole arrays of indices."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_in_range, expect_shape


def mirror_split_torch(query_b: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
    """`reference.context_parallel.mirror_split`.

    Raises:
        ValueError: query_b is not 1-D or negative; ranks is below 1.
        TypeError: query_b is not int64.
    """
    _check_rows("query_b", query_b, ranks)
    sequence_i, row_ci = _local_rows(query_b, ranks)
    start_b = query_b.cumsum(0) - query_b
    gather_ci = torch.where(row_ci < query_b[sequence_i], start_b[sequence_i] + row_ci, -1)
    return gather_ci, _inverse(gather_ci, int(query_b.sum()))


def mirror_keys_torch(query_b: Tensor, key_b: Tensor, *, ranks: int, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.context_parallel.mirror_keys`.

    Raises:
        ValueError: arguments are not 1-D, differ in length or are negative; a sequence has more rows than tokens;
            ranks or ratio is below 1.
        TypeError: query_b or key_b is not int64.
    """
    _check_rows("query_b", query_b, ranks)
    _check_rows("key_b", key_b, ranks)
    expect_shape("key_b", key_b, "b", {"b": len(query_b)})
    if ratio < 1:
        raise ValueError(f"ratio: expected at least 1, got {ratio}")
    if (key_b < query_b).any():
        raise ValueError(f"key_b: expected at least the rows {query_b.tolist()}, got {key_b.tolist()}")
    sequence_i, row_ci = _local_rows(query_b, ranks)
    room_b = torch.div(key_b, ratio, rounding_mode="floor").clamp(min=1)
    first_ci = (room_b.cumsum(0) - room_b)[sequence_i].expand_as(row_ci).contiguous()
    real_ci = row_ci < query_b[sequence_i]
    position_ci = torch.where(real_ci, (key_b - query_b)[sequence_i] + row_ci, 0)
    seen_ci = torch.where(real_ci, torch.div(position_ci + 1, ratio, rounding_mode="floor"), 0)
    return position_ci, first_ci, first_ci + seen_ci


def compact_exchange_torch(query_b: Tensor, kept_b: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
    """`reference.context_parallel.compact_exchange`.

    Raises:
        ValueError: arguments are not 1-D, differ in length or are negative; more rows are kept than there are; ranks
            is below 1.
        TypeError: query_b or kept_b is not int64.
    """
    _check_rows("query_b", query_b, ranks)
    _check_rows("kept_b", kept_b, ranks)
    expect_shape("kept_b", kept_b, "b", {"b": len(query_b)})
    if (kept_b > query_b).any():
        raise ValueError(f"kept_b: expected at most the rows {query_b.tolist()}, got {kept_b.tolist()}")
    sequence_i, row_ci = _local_rows(query_b, ranks)
    kept_i = kept_b[sequence_i]
    after_ci = row_ci - (query_b[sequence_i] - kept_i)
    sends_ci = (after_ci >= 0) & (row_ci < query_b[sequence_i])
    longest = int(sends_ci.sum(1).max())
    order_ci = sends_ci.cumsum(1) - 1
    slot_ci = torch.arange(ranks, device=row_ci.device)[:, None] * longest + order_ci
    sent_ci = torch.full((ranks, longest), -1, dtype=torch.int64, device=row_ci.device)
    local_ci = torch.arange(row_ci.shape[1], device=row_ci.device).expand_as(row_ci)
    sent_ci.view(-1)[slot_ci[sends_ci]] = local_ci[sends_ci]
    number_ci = (kept_b.cumsum(0) - kept_b)[sequence_i] + after_ci
    arrival_t = torch.empty(int(kept_b.sum()), dtype=torch.int64, device=row_ci.device)
    arrival_t[number_ci[sends_ci]] = slot_ci[sends_ci]
    return sent_ci, arrival_t


def take_rows_torch(x_tm: Tensor, index_i: Tensor) -> Tensor:
    """`reference.context_parallel.take_rows`.

    Raises:
        ValueError: shapes disagree; an index lies outside -1 .. t - 1.
        TypeError: index_i is not int64.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("index_i", index_i, "i", dims)
    expect_dtype("index_i", index_i, torch.int64)
    expect_in_range("index_i", index_i, -1, dims["t"])
    if not dims["t"]:
        return x_tm.new_zeros(dims["i"], dims["m"])
    return torch.where((index_i >= 0)[:, None], x_tm[index_i.clamp(min=0)], x_tm.new_zeros(()))


def _local_rows(query_b: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The sequence of every place of a shard, and the row of that sequence, beyond its end in padding."""
    size_b = torch.div(query_b + 2 * ranks - 1, 2 * ranks, rounding_mode="floor")
    sequence_i = torch.repeat_interleave(torch.arange(len(query_b), device=query_b.device), 2 * size_b)
    within_i = torch.arange(len(sequence_i), device=query_b.device) - (2 * (size_b.cumsum(0) - size_b))[sequence_i]
    size_i = size_b[sequence_i]
    rank_c1 = torch.arange(ranks, device=query_b.device)[:, None]
    second_i = within_i >= size_i
    block_ci = torch.where(second_i, 2 * ranks - 1 - rank_c1, rank_c1)
    return sequence_i, block_ci * size_i + within_i - torch.where(second_i, size_i, 0)


def _inverse(gather_ci: Tensor, rows: int) -> Tensor:
    flat = gather_ci.flatten()
    inverse_t = torch.empty(rows, dtype=torch.int64, device=flat.device)
    places = torch.arange(len(flat), device=flat.device)
    inverse_t[flat[flat >= 0]] = places[flat >= 0]
    return inverse_t


def _check_rows(name: str, rows_b: Tensor, ranks: int) -> None:
    expect_shape(name, rows_b, "b", {})
    expect_dtype(name, rows_b, torch.int64)
    if (rows_b < 0).any():
        raise ValueError(f"{name}: expected 0 or more, got {rows_b.tolist()}")
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
