"""Balance of experts in plain Python and numpy, with faults that can be switched on.

Written apart from both sides: sums are exact (`math.fsum`), every step is an np.float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import RebalanceConfig, ShuffleStep

F32 = np.float32


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the procedures do otherwise; the default is right."""

    tie_break: float = 1e-4
    tie_in_relief: bool = False  # the tie break stays when a copy is tried
    argmin_last: bool = False
    fresh_copies: bool = True  # loads are divided by the copies made so far
    relief_copies: int = 1  # copies that are tried at once
    steps: str = "all"  # all, last, summed (one step with everything)
    float_type: type = np.float32
    layer: str = "own"  # own, first
    order: str = "heaviest"  # heaviest, lightest, slot, unstable
    rank_rule: str = "peak"  # peak, load (its own sum), total_peak (one number for all steps), fullest
    peak_kept: bool = True
    load_added: bool = True
    capacity: bool = True
    single_slots_packed: bool = False
    map_moved: bool = True
    unused: int = -1
    copies_sorted: bool = False


def place(count: np.ndarray, num_slots: int, cap: int, faults: Faults) -> tuple[list[int], list[list[int]], list[int]]:
    """One layer: the expert of every slot, the slots of every expert, the copies."""
    num_experts = count.shape[1]
    if faults.steps == "last":
        count = count[-1:]
    elif faults.steps == "summed":
        count = count.sum(0, keepdims=True)
    load: np.ndarray = count.astype(faults.float_type)
    held = list(range(num_experts))
    while len(held) < num_slots:
        held.append(_next(load, held, faults))
    copies = [held.count(e) for e in range(num_experts)]
    places = _pack(load, held, copies, cap, faults)
    found = [-1] * num_slots
    for slot, expert in zip(places, held, strict=True):
        found[slot] = expert
    slots = [[places[i] if faults.map_moved else i for i, x in enumerate(held) if x == e] for e in range(num_experts)]
    return found, [sorted(x) for x in slots] if faults.copies_sorted else slots, copies


def _next(load: np.ndarray, held: list[int], faults: Faults) -> int:
    num_experts = load.shape[1]
    real = faults.float_type
    copies = [held.count(e) if faults.fresh_copies else 1 for e in range(num_experts)]
    tie = [real(real(faults.tie_break) * real(e)) for e in range(num_experts)]
    totals = []
    shares = [[real(real(row[e] + tie[e]) / real(copies[e])) for e in range(num_experts)] for row in load]
    for tried in range(num_experts):
        peaks = []
        for row, share in zip(load, shares, strict=True):
            top = max(share)
            if share.index(top) == tried:
                base = row[tried] + tie[tried] if faults.tie_in_relief else row[tried]
                relieved = real(real(base) / real(copies[tried] + faults.relief_copies))
                top = max([x for e, x in enumerate(share) if e != tried] + [relieved])
            peaks.append(float(top))
        totals.append(real(math.fsum(peaks)))
    best = min(totals)
    return num_experts - 1 - totals[::-1].index(best) if faults.argmin_last else totals.index(best)


def _pack(load: np.ndarray, held: list[int], copies: list[int], cap: int, faults: Faults) -> list[int]:
    if cap == 1 and not faults.single_slots_packed:
        return list(range(len(held)))
    real, steps = faults.float_type, range(len(load))
    share = [[real(load[t, e] / real(copies[e])) for t in steps] for e in range(load.shape[1])]
    weight = [real(math.fsum(map(float, share[e]))) for e in held]
    keys: dict[str, Callable[[int], tuple[float, int]]] = {
        "heaviest": lambda i: (-weight[i], i),
        "lightest": lambda i: (weight[i], i),
        "slot": lambda i: (0.0, i),
        "unstable": lambda i: (-weight[i], -i),
    }
    ranks = len(held) // cap
    rank_load = [[real(0) for _ in steps] for _ in range(ranks)]
    peak = [real(0) for _ in steps]
    filled, places = [0] * ranks, [0] * len(held)
    for slot in sorted(range(len(held)), key=keys[faults.order]):
        more = share[held[slot]]
        free = [r for r in range(ranks) if filled[r] < cap]
        loads = {r: [real(a + b) for a, b in zip(rank_load[r], more, strict=True)] for r in free}
        costs: dict[str, Callable[[int], float]] = {
            "peak": lambda r: real(math.fsum(float(max(p, x)) for p, x in zip(peak, loads[r], strict=True))),  # noqa: B023
            "load": lambda r: real(math.fsum(map(float, loads[r]))),  # noqa: B023
            "total_peak": lambda r: max([real(0), *loads[r]]),  # noqa: B023
            "fullest": lambda r: -filled[r],
        }
        best = min(free, key=costs[faults.rank_rule])
        places[slot] = best * cap + filled[best]
        filled[best] += 1
        if faults.load_added:
            rank_load[best] = loads[best]
        if faults.peak_kept:
            peak = [max(p, x) for p, x in zip(peak, loads[best], strict=True)]
    return places


def place_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The whole placement, layer by layer."""

    def place_experts(count_tle: Tensor, *, num_slots: int, slots_per_rank: int) -> tuple[Tensor, Tensor, Tensor]:
        count = count_tle.numpy()
        layers = [0 if faults.layer == "first" else i for i in range(count.shape[1])]
        found = [place(count[:, i], num_slots, slots_per_rank, faults) for i in layers]
        width = num_slots - count.shape[2] + 1
        maps = [[x + [faults.unused] * (width - len(x)) for x in slots] for _, slots, _ in found]
        shape = (len(found), count.shape[2])
        return (
            torch.tensor([x for x, _, _ in found], dtype=torch.int64).reshape(len(found), num_slots),
            torch.tensor(maps, dtype=torch.int64).reshape(*shape, width),
            torch.tensor([x for _, _, x in found], dtype=torch.int64).reshape(shape),
        )

    return place_experts


@dataclass(frozen=True, kw_only=True)
class ShuffleFaults:
    """What the plan does otherwise; the default is right."""

    local: bool = True  # the rank's own slots are looked at
    share: bool = True  # a second slot copies from the first
    keep: bool = True
    sender: str = "spread"  # spread, first, round, ceil
    sender_slot: str = "first"  # first, same, of_new
    last_local: bool = False
    local_of_new: bool = False


def plan_with(faults: ShuffleFaults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The plan of every slot, by dictionaries of holders."""

    def shuffle_plan(old_lp: Tensor, new_lp: Tensor, *, slots_per_rank: int) -> tuple[Tensor, Tensor]:
        rows = [
            _plan(old, new, slots_per_rank, faults) for old, new in zip(old_lp.tolist(), new_lp.tolist(), strict=True)
        ]
        found = torch.tensor(rows, dtype=torch.int64).reshape(*old_lp.shape, 2)
        return found[..., 0].contiguous(), found[..., 1].contiguous()

    return shuffle_plan


def _plan(old: list[int], new: list[int], cap: int, faults: ShuffleFaults) -> list[tuple[int, int]]:
    held: dict[int, dict[int, list[int]]] = {}
    wanted: dict[int, dict[int, list[int]]] = {}
    for table, into in ((old, held), (new, wanted)):
        for slot, expert in enumerate(table):
            into.setdefault(expert, {}).setdefault(slot // cap, []).append(slot)
    found = []
    for slot, expert in enumerate(new):
        rank, holders = slot // cap, held[expert]
        local = (wanted if faults.local_of_new else held)[expert].get(rank) if rank in holders else None
        if old[slot] == expert and faults.keep:
            found.append((int(ShuffleStep.KEEP), slot))
        elif local and faults.local:
            found.append((int(ShuffleStep.COPY), local[-1 if faults.last_local else 0]))
        elif wanted[expert][rank][0] != slot and faults.share:
            found.append((int(ShuffleStep.SHARE), wanted[expert][rank][0]))
        else:
            needy = sorted(r for r in wanted[expert] if r not in holders or not faults.local)
            sender = _sender(needy.index(rank), len(needy), sorted(holders), faults)
            slots = {"first": holders[sender], "same": [sender * cap + slot % cap]}
            slots["of_new"] = wanted[expert].get(sender, holders[sender])
            found.append((int(ShuffleStep.RECEIVE), slots[faults.sender_slot][0]))
    return found


def _sender(j: int, needy: int, holders: list[int], faults: ShuffleFaults) -> int:
    count = len(holders)
    n = needy // count
    if faults.sender == "first":
        return holders[0]
    if faults.sender == "round":
        return holders[j % count]
    if faults.sender == "ceil":
        return holders[j // -(-needy // count)]
    return holders[j // n if j < n * count else j - n * count]


@dataclass(frozen=True, kw_only=True)
class StepFaults:
    """What the clock does otherwise; the default is right."""

    start: str = "early"  # early, zero, full
    reset: bool = True
    prefills: str = "asked"  # asked, always, never
    after: str = "next_decode"  # next_decode, at_once, interval
    window: str = "capped"  # capped, emptied
    late: bool = False  # one step later


def steps_with(faults: StepFaults) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The clock, one step after the other."""

    def rebalance_steps(is_prefill_t: Tensor, *, config: RebalanceConfig) -> tuple[Tensor, Tensor, Tensor]:
        kept, moves, filled = [], [], []
        early = config.interval - max(1, config.interval // 4)
        counter = {"early": early, "zero": 0, "full": config.interval - 1}[faults.start]
        rows, pending, was_due = 0, False, False
        for is_prefill in is_prefill_t.tolist():
            asked = config.prefill_engine or config.after_prefill
            wanted = {"asked": asked, "always": True, "never": False}[faults.prefills]
            record = config.interval > 0 and (wanted or not is_prefill)
            counter += record
            rows = min(config.window, rows + record)
            by_interval = record and counter >= config.interval
            due = by_interval
            if config.after_prefill:
                due = {
                    "next_decode": pending and not is_prefill,
                    "at_once": is_prefill,
                    "interval": by_interval,
                }[faults.after]
            due = due and config.interval > 0
            pending = is_prefill or (pending and not due)
            if due:
                counter = 0 if faults.reset else config.interval - 1
                rows = 0 if faults.window == "emptied" else rows
            kept.append(record)
            moves.append(was_due if faults.late else due)
            filled.append(rows)
            was_due = due
        return (
            torch.tensor(kept, dtype=torch.bool),
            torch.tensor(moves, dtype=torch.bool),
            torch.tensor(filled, dtype=torch.int64),
        )

    return rebalance_steps


def initial_with(expert: Callable[[int, int, int], int]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The first placement, where slot p of P holds expert(p, E, P)."""

    def initial_placement(*, layers: int, num_experts: int, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
        held = [expert(p, num_experts, num_slots) for p in range(num_slots)]
        slots = [[p for p, x in enumerate(held) if x == e] for e in range(num_experts)]
        width = num_slots - num_experts + 1
        rows = torch.tensor([x + [-1] * (width - len(x)) for x in slots])
        copies = torch.tensor([len(x) for x in slots])
        return torch.tensor(held).repeat(layers, 1), rows.repeat(layers, 1, 1), copies.repeat(layers, 1)

    return initial_placement


_RIGHT, _PLAN, _CLOCK = Faults(), ShuffleFaults(), StepFaults()
right_place = place_with(_RIGHT)
right_plan = plan_with(_PLAN)
right_steps = steps_with(_CLOCK)
right_initial = initial_with(lambda p, e, slots: p % e)

no_tie_break = place_with(replace(_RIGHT, tie_break=0.0))
tie_break_large = place_with(replace(_RIGHT, tie_break=1.0))
tie_break_in_relief = place_with(replace(_RIGHT, tie_in_relief=True))
last_of_equal_experts = place_with(replace(_RIGHT, argmin_last=True))
copies_not_counted = place_with(replace(_RIGHT, fresh_copies=False))
two_copies_tried = place_with(replace(_RIGHT, relief_copies=2))
latest_step_alone = place_with(replace(_RIGHT, steps="last"))
steps_added_first = place_with(replace(_RIGHT, steps="summed"))
in_fp64 = place_with(replace(_RIGHT, float_type=np.float64))
layer_of_the_first = place_with(replace(_RIGHT, layer="first"))
lightest_first = place_with(replace(_RIGHT, order="lightest"))
in_slot_order = place_with(replace(_RIGHT, order="slot"))
unstable_order = place_with(replace(_RIGHT, order="unstable"))
least_loaded_rank = place_with(replace(_RIGHT, rank_rule="load"))
peak_over_all_steps = place_with(replace(_RIGHT, rank_rule="total_peak"))
ranks_filled_in_turn = place_with(replace(_RIGHT, rank_rule="fullest"))
peak_forgotten = place_with(replace(_RIGHT, peak_kept=False))
load_not_added = place_with(replace(_RIGHT, load_added=False))
single_slots_packed = place_with(replace(_RIGHT, single_slots_packed=True))
map_of_the_old_slots = place_with(replace(_RIGHT, map_moved=False))
unused_entries_zero = place_with(replace(_RIGHT, unused=0))
copies_by_slot = place_with(replace(_RIGHT, copies_sorted=True))

received_although_local = plan_with(replace(_PLAN, local=False))
received_twice = plan_with(replace(_PLAN, share=False))
copied_onto_itself = plan_with(replace(_PLAN, keep=False))
first_holder_serves_all = plan_with(replace(_PLAN, sender="first"))
holders_in_turn = plan_with(replace(_PLAN, sender="round"))
holders_by_ceiling = plan_with(replace(_PLAN, sender="ceil"))
sent_from_the_same_place = plan_with(replace(_PLAN, sender_slot="same"))
sent_from_the_new_slot = plan_with(replace(_PLAN, sender_slot="of_new"))
last_local_slot = plan_with(replace(_PLAN, last_local=True))
copied_from_the_new_slot = plan_with(replace(_PLAN, local_of_new=True))

counter_from_zero = steps_with(replace(_CLOCK, start="zero"))
first_step_moves = steps_with(replace(_CLOCK, start="full"))
counter_not_reset = steps_with(replace(_CLOCK, reset=False))
prefills_recorded = steps_with(replace(_CLOCK, prefills="always"))
prefills_never_recorded = steps_with(replace(_CLOCK, prefills="never"))
moves_in_the_prefill = steps_with(replace(_CLOCK, after="at_once"))
prefill_option_ignored = steps_with(replace(_CLOCK, after="interval"))
window_emptied = steps_with(replace(_CLOCK, window="emptied"))
one_step_late = steps_with(replace(_CLOCK, late=True))

extra_from_the_last = initial_with(lambda p, e, slots: p if p < e else e - 1 - (p - e) % e)
extra_all_of_expert_0 = initial_with(lambda p, e, slots: p if p < e else 0)
copies_side_by_side = initial_with(lambda p, e, slots: p * e // slots)
