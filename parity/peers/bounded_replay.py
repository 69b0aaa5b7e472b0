"""Bounded replay by other ways: the lists that `window` makes for kernels, and measurement on a decoder of hashes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.bounded_replay import replay_prefill
from deeptwin.reference.config import SlidingWindow, Truncation
from deeptwin.reference.window import compact_rows, history_slots, ring_slots, window_prefill


def plan_from_lists(
    first_b: Tensor, end_b: Tensor, known_b: Tensor, valid_b: Tensor, *, config: SlidingWindow
) -> tuple[Tensor, Tensor, Tensor]:
    """What a row sees, counted in the index lists of prefill and in the slots of the store."""
    count_b = (end_b - first_b).long()
    seq_t = torch.arange(len(first_b)).repeat_interleave(count_b)
    offset_b = count_b.cumsum(0) - count_b
    p_t = torch.arange(len(seq_t)) - offset_b[seq_t] + first_b.long()[seq_t]
    low, history, seen = [], [], []
    for sliding in (replace(config, truncation=Truncation.OFF), config):
        lists = window_prefill(p_t, seq_t, first_b, offset_b, known_b, valid_b, config=sliding)
        seen.append((lists >= 0).sum(1))
        low.append(p_t + 1 - seen[-1])
        history.append(((lists >= 0) & (lists < len(first_b) * config.window)).sum(1))
    computed_t = torch.zeros(len(seq_t), dtype=torch.bool)
    computed_t[compact_rows(first_b, end_b, known_b, config=config)] = True
    stored_t = ring_slots(p_t, seq_t, end_b, known_b, torch.zeros_like(first_b), config=config) >= 0
    pairs = [torch.stack(columns, 1).to(torch.int32) for columns in (low, history)]
    return pairs[0], pairs[1], torch.stack([computed_t, seen[1] > 0, stored_t], 1)


def exact_by_measurement(
    positions_t: Tensor, seq_t: Tensor, known_b: Tensor, *, config: SlidingWindow, layers: int
) -> Tensor:
    """In how many layers from the first a decoder of hashes gives a row the same output with truncation as without."""
    found = []
    for b, known in enumerate(known_b.tolist()):
        hidden_t = torch.from_numpy(np.random.Generator(np.random.Philox(b)).integers(0, 2**31 - 1, known))
        zero, count_kb = torch.zeros(1, dtype=torch.int64), torch.tensor([[known]])
        outputs = [
            replay_prefill(hidden_t, zero, zero, count_kb, config=c, layers=layers)[0]
            for c in (config, replace(config, truncation=Truncation.OFF))
        ]
        found.append((outputs[0] == outputs[1]).long().cumprod(1).sum(1))
    counts = [found[b][p] for p, b in zip(positions_t.tolist(), seq_t.tolist(), strict=True)]
    return torch.tensor([int(n) for n in counts], dtype=torch.int32)


def plan_from_slots(first_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow) -> Tensor:
    """Block copies, read off the ring slots that `window` names for every history row."""
    slots_bk = history_slots(first_b, state_b, valid_b, config=config)
    plan = torch.zeros(len(first_b), 3, 4, dtype=torch.int32)
    for b, slots in enumerate(slots_bk.tolist()):
        pairs = list(zip(slots, slots[1:], strict=False))
        cuts = [k for k, (one, two) in enumerate(pairs, 1) if two >= 0 and (one < 0 or two != one + 1)]
        edges = [0, *cuts, config.window]
        plan[b] = torch.tensor([-1, 0, 0, (b + 1) * config.window])
        for i, (begin, end) in enumerate(zip(edges, edges[1:], strict=False)):
            slot, zeros = slots[begin], slots[begin] < 0
            source, first = (-1, begin) if zeros else divmod(slot, config.ring)
            plan[b, i] = torch.tensor([source, first, first + end - begin, b * config.window + begin])
    return plan
