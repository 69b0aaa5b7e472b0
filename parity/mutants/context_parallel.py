"""Splits that spread the work otherwise, or number rows and keys wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the split does otherwise; the default is right."""

    blocks: str = "mirror"  # mirror, contiguous, strided, swapped (late block first)
    size: str = "up"  # up, down (the rest is lost), whole_batch
    padding: str = "minus"  # minus, last (the last row again), next (rows of the next sequence)
    inverse: str = "right"  # right, by_rank_length, of_first_rank
    starts: str = "sum"  # sum, zero (every sequence counts from 0)
    position: str = "absolute"  # absolute, local
    least: int = 1
    groups: str = "down"  # down, up, without_self
    padded_keys: str = "empty"  # empty, zero, all
    kept: str = "last"  # last, first
    order: str = "place"  # place, row
    longest: str = "max"  # max, own (rank times its own count)
    local: bool = True  # numbers within the shard, not of the batch


def shards(queries: list[int], ranks: int, faults: Faults) -> list[list[tuple[int, int, bool]]]:
    """For every rank its places: sequence, local row, and whether it is padding."""
    found: list[list[tuple[int, int, bool]]] = [[] for _ in range(ranks)]
    for sequence, rows in enumerate(queries):
        size = -(-rows // (2 * ranks)) if faults.size == "up" else rows // (2 * ranks)
        for rank in range(ranks):
            late = 2 * ranks - 1 - rank
            order = {
                "mirror": (rank, late),
                "contiguous": (2 * rank, 2 * rank + 1),
                "strided": (rank, ranks + rank),
                "swapped": (late, rank),
            }[faults.blocks]
            for block in order:
                found[rank] += [(sequence, row, row >= rows) for row in range(block * size, (block + 1) * size)]
    return found


def split_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The split and its inverse."""

    def mirror_split(query_b: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
        queries = query_b.tolist()
        start = [sum(queries[:i]) if faults.starts == "sum" else 0 for i in range(len(queries))]
        rows = [
            [_row(start[s] + row, start[s] + queries[s] - 1, pad, faults) for s, row, pad in shard]
            for shard in shards(queries, ranks, faults)
        ]
        gather = torch.tensor(rows, dtype=torch.int64).reshape(ranks, -1)
        length, total = gather.shape[1], sum(queries)
        inverse = torch.zeros(total, dtype=torch.int64)
        for rank, shard in enumerate(rows):
            for place, row in enumerate(shard):
                if 0 <= row < total:
                    at = {"right": rank * length, "by_rank_length": rank * (length - 1), "of_first_rank": 0}
                    inverse[row] = at[faults.inverse] + place
        return gather, inverse

    return mirror_split


def _row(row: int, last: int, pad: bool, faults: Faults) -> int:
    if not pad or faults.padding == "next":
        return row
    return last if faults.padding == "last" else -1


def keys_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Positions and visible keys."""

    def mirror_keys(query_b: Tensor, key_b: Tensor, *, ranks: int, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = query_b.tolist(), key_b.tolist()
        room = [max(faults.least, tokens // ratio) for tokens in keys]
        found = []
        for shard in shards(queries, ranks, faults):
            for s, row, pad in shard:
                first = sum(room[:s]) if faults.starts == "sum" else 0
                at = row + (keys[s] - queries[s] if faults.position == "absolute" else 0)
                groups = {"down": (at + 1) // ratio, "up": -(-(at + 1) // ratio), "without_self": at // ratio}
                blank = {"empty": (0, first, first), "zero": (0, 0, 0), "all": (0, first, first + room[s])}
                found.append(blank[faults.padded_keys] if pad else (at, first, first + groups[faults.groups]))
        position, first_ci, end = torch.tensor(found, dtype=torch.int64).reshape(ranks, -1, 3).unbind(-1)
        return position.contiguous(), first_ci.contiguous(), end.contiguous()

    return mirror_keys


def exchange_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """Which rows are sent and where they arrive."""

    def compact_exchange(query_b: Tensor, kept_b: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
        queries, kept = query_b.tolist(), kept_b.tolist()
        begin = [sum(kept[:s]) for s in range(len(kept))]
        lists: list[list[tuple[int, int]]] = []
        for shard in shards(queries, ranks, faults):
            own = []
            for place, (s, row, pad) in enumerate(shard):
                number = row if faults.kept == "first" else row - (queries[s] - kept[s])
                if not pad and 0 <= number < kept[s]:
                    at = place if faults.local else sum(queries[:s]) + row
                    own.append((at, begin[s] + number))
            lists.append(sorted(own, key=lambda pair: pair[1]) if faults.order == "row" else own)
        longest = max(map(len, lists))
        sent = torch.full((ranks, longest), -1, dtype=torch.int64)
        arrival = torch.zeros(sum(kept), dtype=torch.int64)
        for rank, own in enumerate(lists):
            step = longest if faults.longest == "max" else len(own)
            for i, (place, number) in enumerate(own):
                sent[rank, i] = place
                arrival[number] = rank * step + i
        return sent, arrival

    return compact_exchange


def right_take(x_tm: Tensor, index_i: Tensor) -> Tensor:
    """Rows by index, zeros for -1."""
    rows = [x_tm[i] if i >= 0 else x_tm.new_zeros(x_tm.shape[1]) for i in index_i.tolist()]
    return torch.stack(rows) if rows else x_tm[:0].clone()


def padding_is_the_last_row(x_tm: Tensor, index_i: Tensor) -> Tensor:
    """-1 counts from the end."""
    return x_tm[index_i] if len(x_tm) else x_tm.new_zeros(len(index_i), x_tm.shape[1])


def padding_times_zero(x_tm: Tensor, index_i: Tensor) -> Tensor:
    """Padding is a real row times zero, which NaN survives."""
    if not x_tm.is_floating_point() or not len(x_tm):
        return right_take(x_tm, index_i)
    return x_tm[index_i.clamp(min=0)] * (index_i >= 0)[:, None].to(x_tm.dtype)


_RIGHT = Faults()
right_split = split_with(_RIGHT)
right_keys = keys_with(_RIGHT)
right_exchange = exchange_with(_RIGHT)

blocks_in_a_row = split_with(replace(_RIGHT, blocks="contiguous"))
blocks_strided = split_with(replace(_RIGHT, blocks="strided"))
late_block_first = split_with(replace(_RIGHT, blocks="swapped"))
blocks_rounded_down = split_with(replace(_RIGHT, size="down"))
padding_repeats_the_last_row = split_with(replace(_RIGHT, padding="last"))
padding_runs_into_the_next = split_with(replace(_RIGHT, padding="next"))
inverse_one_short = split_with(replace(_RIGHT, inverse="by_rank_length"))
inverse_within_the_shard = split_with(replace(_RIGHT, inverse="of_first_rank"))
sequences_on_top = split_with(replace(_RIGHT, starts="zero"))

positions_from_the_chunk = keys_with(replace(_RIGHT, position="local"))
no_room_for_a_short_sequence = keys_with(replace(_RIGHT, least=0))
open_group_visible = keys_with(replace(_RIGHT, groups="up"))
own_group_hidden = keys_with(replace(_RIGHT, groups="without_self"))
keys_from_zero = keys_with(replace(_RIGHT, starts="zero"))
padding_sees_from_zero = keys_with(replace(_RIGHT, padded_keys="zero"))
padding_sees_everything = keys_with(replace(_RIGHT, padded_keys="all"))
keys_of_late_block_first = keys_with(replace(_RIGHT, blocks="swapped"))

first_rows_kept = exchange_with(replace(_RIGHT, kept="first"))
sent_by_row = exchange_with(replace(_RIGHT, order="row", blocks="swapped"))
arrival_by_own_count = exchange_with(replace(_RIGHT, longest="own"))
numbers_of_the_batch = exchange_with(replace(_RIGHT, local=False))
