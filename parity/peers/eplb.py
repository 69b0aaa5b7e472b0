"""What a plan and a placement must satisfy, recomputed from their definition: peers of `reference/eplb.py`.

There is no public implementation of this replication rule to compare with; the placement is recomputed in plain Python
with exact sums, the plan by moving names of experts from slot to slot.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import ShuffleStep


def in_fractions(count_tle: Tensor, *, num_slots: int, slots_per_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The placement with sums of fp32 values as fractions, rounded once."""
    experts, width = count_tle.shape[2], num_slots - count_tle.shape[2] + 1
    layers = [_layer(count_tle[:, i].tolist(), experts, num_slots, slots_per_rank) for i in range(count_tle.shape[1])]
    maps = [[slots + [-1] * (width - len(slots)) for slots in own] for _, own in layers]
    held = torch.tensor([x for x, _ in layers], dtype=torch.int64).reshape(len(layers), num_slots)
    copies = torch.tensor([[len(slots) for slots in own] for _, own in layers], dtype=torch.int64)
    table = torch.tensor(maps, dtype=torch.int64)
    return held, table.reshape(len(layers), experts, width), copies.reshape(len(layers), experts)


def _rounded(total: Fraction) -> np.float32:
    return np.float32(float(total))


def _layer(counts: list[list[int]], num_experts: int, num_slots: int, cap: int) -> tuple[list[int], list[list[int]]]:
    experts = range(num_experts)
    slots: list[list[int]] = [[e] for e in experts]
    tie = [np.float32(1e-4) * np.float32(e) for e in experts]
    for slot in range(len(slots), num_slots):
        total = {e: Fraction(0) for e in experts}
        for row in counts:
            share = [(np.float32(row[e]) + tie[e]) / np.float32(len(slots[e])) for e in experts]
            first = int(np.argmax(share))
            for e in experts:
                now = list(share)
                if e == first:
                    now[e] = np.float32(row[e]) / np.float32(len(slots[e]) + 1)
                total[e] += Fraction(float(max(now)))
        slots[min(experts, key=lambda e: (_rounded(total[e]), e))].append(slot)
    if cap > 1:
        renamed = _renamed(counts, slots, num_slots, cap)
        slots = [[renamed[slot] for slot in own] for own in slots]
    held = [0] * num_slots
    for e, own in enumerate(slots):
        for slot in own:
            held[slot] = e
    return held, slots


def _renamed(counts: list[list[int]], slots: list[list[int]], num_slots: int, cap: int) -> dict[int, int]:
    expert = {slot: e for e, own in enumerate(slots) for slot in own}
    share = {
        s: np.array([np.float32(row[e]) / np.float32(len(slots[e])) for row in counts], np.float32)
        for s, e in expert.items()
    }
    weight = {s: _rounded(sum((Fraction(float(x)) for x in share[s]), Fraction(0))) for s in share}
    ranks = [np.zeros(len(counts), np.float32) for _ in range(num_slots // cap)]
    members: list[list[int]] = [[] for _ in ranks]
    peak = np.zeros(len(counts), np.float32)
    for slot in sorted(share, key=lambda s: (-weight[s], s)):
        cost = {
            r: _rounded(sum((Fraction(float(x)) for x in np.maximum(peak, ranks[r] + share[slot])), Fraction(0)))
            for r in range(len(ranks))
            if len(members[r]) < cap
        }
        best = min(cost, key=lambda r: (cost[r], r))
        members[best].append(slot)
        ranks[best] = ranks[best] + share[slot]
        peak = np.maximum(peak, ranks[best])
    return {slot: r * cap + i for r, own in enumerate(members) for i, slot in enumerate(own)}


def by_ranks(old_lp: Tensor, new_lp: Tensor, *, slots_per_rank: int) -> tuple[Tensor, Tensor]:
    """The plan rank by rank: what a rank has, what it fetches once, whom it asks."""
    step, source = torch.full_like(new_lp, -1), torch.full_like(new_lp, -1)
    for layer in range(len(new_lp)):
        old, new = (x[layer].reshape(-1, slots_per_rank) for x in (old_lp, new_lp))
        for expert in new.unique().tolist():
            has, needs = (old == expert).any(1), (new == expert).any(1)
            givers = has.nonzero().flatten().tolist()
            takers = (needs & ~has).nonzero().flatten().tolist()
            share = len(takers) // len(givers)
            # every giver serves `share` takers in a row, the rest one more from the first giver on
            served = [giver for giver in givers for _ in range(share)] + givers[: len(takers) - share * len(givers)]
            for rank in needs.nonzero().flatten().tolist():
                first = None
                for i in (new[rank] == expert).nonzero().flatten().tolist():
                    slot = rank * slots_per_rank + i
                    if old[rank, i] == expert:
                        found = ShuffleStep.KEEP, slot
                    elif has[rank]:
                        found = ShuffleStep.COPY, rank * slots_per_rank + int((old[rank] == expert).nonzero()[0])
                    elif first is not None:
                        found = ShuffleStep.SHARE, first
                    else:
                        giver, first = served[takers.index(rank)], slot
                        found = ShuffleStep.RECEIVE, giver * slots_per_rank + int((old[giver] == expert).nonzero()[0])
                    step[layer, slot], source[layer, slot] = int(found[0]), found[1]
    return step, source
