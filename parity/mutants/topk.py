"""Selections as a program that walks a row makes them, on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CAP = 3.3895313892515355e38
_calls = 0


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a selection does wrong; the default is right."""

    ties: str = "lower"  # lower, higher, flicker
    order: str = "ascending"  # ascending, by_score
    nan: str = "never"  # never, largest
    masked: str = "never"  # never, chosen
    lengths: str = "used"  # used, ignored, first_row, unplanned (all zero: no row gets a plan of its own)
    compare: str = "value"  # value, bits, bf16, high_byte, magnitude
    short: str = "padded"  # padded, zeros, repeated
    missing: int = 0  # places at the end that are left out
    last: bool = True  # the last block is always kept
    cap: bool = True
    reduce: str = "max"  # max, mean, first
    visible: bool = True  # scores beyond the length stay out of the last block
    blocks: str = "up"  # how the number of blocks is rounded: up, down
    unreachable: str = "dropped"  # dropped, kept


def _rank(faults: Faults, scores: Tensor) -> Tensor:
    """A number for every score; the larger is chosen first."""
    wide = scores.double()
    if faults.compare == "bits":
        bits = scores.float().contiguous().view(torch.int32)
        wide = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).double()  # −0 comes before +0
    elif faults.compare == "bf16":
        wide = scores.bfloat16().double()
    elif faults.compare == "high_byte":
        bits = scores.float().contiguous().view(torch.int32)
        wide = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> 24).double()
    elif faults.compare == "magnitude":
        wide = wide.abs()
    return wide


def select(faults: Faults, scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """One row at a time: sort by rank and index, take k."""
    global _calls
    _calls += 1
    rows, width = scores.shape
    found = torch.full((rows, k), -1, dtype=torch.int32)
    ranks = _rank(faults, scores)
    for row in range(rows):
        length = int(lengths[row])
        if faults.lengths == "ignored" or (faults.lengths == "unplanned" and not lengths.any()):
            length = width
        elif faults.lengths == "first_row":
            length = int(lengths[0])
        rank, score = ranks[row, :length], scores[row, :length]
        ok = ~score.isnan() if faults.nan == "never" else torch.ones_like(score, dtype=torch.bool)
        if faults.masked == "never":
            ok &= score != -torch.inf
        rank = rank.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        places = ok.nonzero().reshape(-1)
        if faults.ties == "higher" or (faults.ties == "flicker" and _calls % 2 == 0):
            places = places.flip(0)
        chosen = places[rank[places].argsort(descending=True, stable=True)][: max(k - faults.missing, 0)]
        if faults.order == "ascending":
            chosen = chosen.sort().values
        found[row, : chosen.numel()] = chosen.to(torch.int32)
        if faults.short == "zeros":
            found[row, chosen.numel() :] = 0
        elif faults.short == "repeated" and chosen.numel():
            found[row, chosen.numel() :] = chosen[-1].to(torch.int32)
    return found


def topk_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `topk`."""

    def topk(scores_ts: Tensor, length_t: Tensor, *, k: int) -> Tensor:
        return select(faults, scores_ts, length_t, k)

    return topk


def candidates_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `candidate_blocks`."""

    def candidate_blocks(scores_ts: Tensor, length_t: Tensor, *, block_size: int, k: int) -> Tensor:
        rows, width = scores_ts.shape
        count = -(-width // block_size)
        best = torch.full((rows, max(count, 1)), -torch.inf, dtype=torch.float64)
        blocks = torch.zeros(rows, dtype=torch.int32)
        for row in range(rows):
            length = int(length_t[row])
            blocks[row] = length // block_size if faults.blocks == "down" else -(-length // block_size)
            for block in range(int(blocks[row])):
                end = (block + 1) * block_size if not faults.visible else min((block + 1) * block_size, length)
                part = scores_ts[row, block * block_size : end].double()
                part = part[~part.isnan()]
                if part.numel():
                    value = {"max": part.max(), "mean": part.mean(), "first": part[0]}[faults.reduce]
                    best[row, block] = value.clamp(max=CAP) if faults.cap else value
            if faults.last and blocks[row]:
                best[row, blocks[row] - 1] = torch.inf
        if faults.unreachable == "kept":
            best = best.clamp(min=-CAP)
        return select(faults, best, blocks, k)

    return candidate_blocks


_RIGHT = Faults()
right_selection = topk_with(_RIGHT)
right_candidates = candidates_with(_RIGHT)

ties_to_the_higher = topk_with(replace(_RIGHT, ties="higher"))
ties_by_the_call = topk_with(replace(_RIGHT, ties="flicker"))
sorted_by_score = topk_with(replace(_RIGHT, order="by_score"))
nan_chosen = topk_with(replace(_RIGHT, nan="largest"))
masked_chosen = topk_with(replace(_RIGHT, masked="chosen"))
length_ignored = topk_with(replace(_RIGHT, lengths="ignored"))
unplanned_when_all_are_empty = topk_with(replace(_RIGHT, lengths="unplanned"))
length_of_the_first = topk_with(replace(_RIGHT, lengths="first_row"))
zeros_by_sign = topk_with(replace(_RIGHT, compare="bits"))
compared_in_bf16 = topk_with(replace(_RIGHT, compare="bf16"))
first_digit_only = topk_with(replace(_RIGHT, compare="high_byte"))
largest_magnitude = topk_with(replace(_RIGHT, compare="magnitude"))
padded_with_zeros = topk_with(replace(_RIGHT, short="zeros"))
padded_with_the_last = topk_with(replace(_RIGHT, short="repeated"))
one_too_few = topk_with(replace(_RIGHT, missing=1))

last_block_not_kept = candidates_with(replace(_RIGHT, last=False))
cap_missing = candidates_with(replace(_RIGHT, cap=False))
block_mean = candidates_with(replace(_RIGHT, reduce="mean"))
block_first_entry = candidates_with(replace(_RIGHT, reduce="first"))
block_reads_beyond = candidates_with(replace(_RIGHT, visible=False, last=False))
partial_block_lost = candidates_with(replace(_RIGHT, blocks="down"))
unreachable_kept = candidates_with(replace(_RIGHT, unreachable="kept"))
block_ties_to_the_higher = candidates_with(replace(_RIGHT, ties="higher"))


def entries_instead_of_blocks(scores_ts: Tensor, length_t: Tensor, *, block_size: int, k: int) -> Tensor:
    """Blocks of the best k entries: fewer than k blocks."""
    entries = select(_RIGHT, scores_ts, length_t, k)
    found = torch.full_like(entries, -1)
    for row, chosen in enumerate(entries):
        blocks = (chosen[chosen >= 0] // block_size).unique()
        found[row, : blocks.numel()] = blocks
    return found


def _lengths(*, absent: str = "skipped", partial: bool = True, shift: int = 0) -> Callable[..., Tensor]:
    def compact_lengths(blocks_tj: Tensor, length_t: Tensor, *, block_size: int) -> Tensor:
        total = torch.zeros_like(length_t)
        for block in blocks_tj.unbind(1):
            left = (length_t - block_size * block + shift).clamp(0, block_size)
            if not partial:
                left = torch.where(left > 0, block_size, 0)
            total = total + (left if absent == "counted" else torch.where(block >= 0, left, 0))
        return total.to(torch.int32)

    return compact_lengths


right_lengths = _lengths()
absent_blocks_counted = _lengths(absent="counted")
partial_block_whole = _lengths(partial=False)
length_one_short = _lengths(shift=-1)


def _look_up(idx: Tensor, table: Tensor, size: int, *, fault: str = "") -> Tensor:
    rows = table[:1].expand_as(table) if fault == "first_row" else table
    places = idx.long() % size if fault == "swapped" else idx.long() // size
    inside = idx.long() // size if fault == "swapped" else idx.long() % size
    known = (idx >= 0) & (idx < table.shape[1] * size)
    if fault == "wraps":
        known = idx < table.shape[1] * size  # python indexing: −1 is in the last page
    if not table.shape[1]:
        return torch.full_like(idx, -1)
    page = rows.long().gather(1, torch.where(known, places, 0) % table.shape[1])
    known = known & (page >= 0) if fault != "absent_page" else known
    result = page + inside if fault == "unscaled" else page * size + inside
    return torch.where(known, result, idx if fault == "beyond_kept" else -1).to(torch.int32)


def _restore(fault: str) -> Callable[..., Tensor]:
    def restore_indices(idx_tk: Tensor, blocks_tj: Tensor, *, block_size: int) -> Tensor:
        return _look_up(idx_tk, blocks_tj, block_size, fault=fault)

    return restore_indices


def _slots(fault: str) -> Callable[..., Tensor]:
    def physical_slots(idx_tk: Tensor, table_tp: Tensor, *, page_entries: int) -> Tensor:
        size = page_entries * 2 if fault == "double_page" else page_entries
        return _look_up(idx_tk, table_tp, size, fault=fault)

    return physical_slots


right_restore = _restore("")
restored_absent = _restore("wraps")
restored_unscaled = _restore("unscaled")
restored_by_the_first = _restore("first_row")
restored_absent_block = _restore("absent_page")

right_slots = _slots("")
slot_wraps = _slots("wraps")
slot_of_absent_page = _slots("absent_page")
slot_page_and_offset_swapped = _slots("swapped")
slot_by_the_first_table = _slots("first_row")
slot_of_a_double_page = _slots("double_page")
slot_beyond_the_table = _slots("beyond_kept")
