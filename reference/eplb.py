"""Balance of experts over devices: which experts get copies, which rank holds them, how weights travel, and when.

Loads are counted in `t` recent steps for every layer `l` and logical expert `e`. There are `p` physical slots, the
same number on every rank; slots beyond the first copy of every expert hold further copies. A token finds a copy of its
expert through the map [l, e, j] (`router.map_replicas`). Three greedy procedures follow one another:

1. one after the other, an extra slot goes to the expert whose further copy lowers the sum over steps of the busiest
   expert's load most;
2. slots, heaviest first, go to the rank whose additional load raises the sum over steps of the busiest rank's load
   least;
3. a rank that lacks the weights of a slot receives them once, from one of the ranks that hold them.

All arithmetic is fp32 as written; sums over steps are contractions, so their order is free. Ties go to the lowest
index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_shape
from .config import RebalanceConfig, ShuffleStep
from .numerics import CONTRACT, Numerics

TIE_BREAK = 1e-4  # times the expert's number: lost on counts above some 2^11


def initial_placement(*, layers: int, num_experts: int, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """The placement before any load is known: every expert in its own slot, extra slots from expert 0 on.

    Math:
        expert[l, p] = p mod E

    Shapes:
        returns int64 expert_lp [l, p], map_lej [l, e, p - E + 1] and copies_le [l, e].

    Raises:
        ValueError: there is no expert, a negative number of layers, or fewer slots than experts.

    Source:
        runtime.md section 6.1
    """
    if layers < 0 or num_experts < 1:
        raise ValueError(f"num_experts: expected at least 1 in 0 or more layers, got {num_experts} in {layers}")
    _check_slots(num_slots, num_experts, 1)
    expert_lp = (torch.arange(num_slots) % num_experts).repeat(layers, 1)
    map_lej = _slot_map(expert_lp, torch.arange(num_slots).expand_as(expert_lp), num_experts)
    return expert_lp, map_lej, _copies(expert_lp, num_experts)


def place_experts(
    count_tle: Tensor, *, num_slots: int, slots_per_rank: int, num: Numerics = CONTRACT
) -> tuple[Tensor, Tensor, Tensor]:
    """A new placement from the loads of recent steps.

    Math:
        see the module docstring, and `_next_copy` and `_packed`. Slots of rank r are r * slots_per_rank and the
        following; a rank fills them in the order in which they are given to it. Copies of an expert keep the order in
        which they were made.

    Shapes:
        count_tle: int32 [t, l, e], steps without a record are zero; returns int64 expert_lp [l, p], the expert of
        every slot; map_lej [l, e, p - E + 1], the slots of every expert, then -1; copies_le [l, e].

    Rounding:
        loads, quotients and sums of two loads to fp32 each; sums over steps are contractions.

    Edges:
        without any load the tie break alone decides: the last experts get the extra slots. With one slot a rank
        nothing is packed. A rank may hold two copies of one expert. Without any step expert 0 gets every extra slot.

    Raises:
        ValueError: counts are not 3-D, negative, or without expert; there are fewer slots than experts, or a number
            that the ranks cannot share.
        TypeError: counts are not int32.

    Source:
        runtime.md section 6.1
    """
    dims: dict[str, int] = {}
    expect_shape("count_tle", count_tle, "tle", dims)
    expect_dtype("count_tle", count_tle, torch.int32)
    if not dims["e"]:
        raise ValueError("count_tle: expected at least one expert, got none")
    if (count_tle < 0).any():
        raise ValueError(f"count_tle: expected 0 or more, got {count_tle.min().item()}")
    _check_slots(num_slots, dims["e"], slots_per_rank)
    load_tle = num.f32(num.wide(count_tle))
    held = [_replicated(load_tle[:, layer], num_slots, num) for layer in range(dims["l"])]
    expert_lp = torch.stack(held) if held else torch.zeros(0, num_slots, dtype=torch.int64)
    copies_le = _copies(expert_lp, dims["e"])
    places = [
        _packed(load_tle[:, layer], expert_lp[layer], copies_le[layer], slots_per_rank, num)
        for layer in range(dims["l"])
    ]
    place_lp = torch.stack(places) if places else expert_lp
    map_lej = _slot_map(expert_lp, place_lp, dims["e"])
    return torch.empty_like(expert_lp).scatter_(1, place_lp, expert_lp), map_lej, copies_le


def shuffle_plan(old_lp: Tensor, new_lp: Tensor, *, slots_per_rank: int) -> tuple[Tensor, Tensor]:
    """Where the weights of every slot come from when experts move.

    Math:
        KEEP     the slot holds its expert
        COPY     else, the rank holds it: from its first slot that does
        SHARE    else, an earlier slot of the rank receives it: from that slot, afterwards
        RECEIVE  else: the R ranks that need the expert and the S ranks that hold it, both ascending; with n = R div S
                 the needy rank j is served by holder j div n while j < n S, else by holder j - n S; from the holder's
                 first slot

    Shapes:
        old_lp, new_lp: int64 [l, p], the expert of every slot; returns int64 step_lp [l, p] (`ShuffleStep`) and
        source_lp [l, p], a slot of the same layer: of the old placement, for SHARE of the new one.

    Edges:
        every source is read before any slot is written.

    Raises:
        ValueError: shapes differ; slots are not the same number on every rank; an expert is negative or a new one is
            held nowhere.
        TypeError: an argument is not int64.

    Source:
        runtime.md section 6.1
    """
    dims: dict[str, int] = {}
    for name, value in (("old_lp", old_lp), ("new_lp", new_lp)):
        expect_shape(name, value, "lp", dims)
        expect_dtype(name, value, torch.int64)
        if (value < 0).any():
            raise ValueError(f"{name}: expected experts from 0 on, got {value.min().item()}")
    _check_slots(dims["p"], 1, slots_per_rank)
    step_lp, source_lp = torch.empty_like(new_lp), torch.empty_like(new_lp)
    for layer in range(dims["l"]):
        old, new = old_lp[layer].tolist(), new_lp[layer].tolist()
        for slot in range(dims["p"]):
            step, source = _source(slot, old, new, slots_per_rank)
            step_lp[layer, slot], source_lp[layer, slot] = int(step), source
    return step_lp, source_lp


def rebalance_steps(is_prefill_t: Tensor, *, config: RebalanceConfig) -> tuple[Tensor, Tensor, Tensor]:
    """At which steps loads are recorded and experts move.

    Math:
        a prefill is recorded by an engine of prefills, or if a rearrangement follows it; other steps always are
        counter = interval - max(1, interval div 4) at first, + 1 at each recorded step; at the interval experts move
        and the counter is 0. With `after_prefill` they move at the first decode step after a prefill instead.

    Shapes:
        is_prefill_t: bool [t]; returns bool kept_t and moves_t (after the step, its loads included), and int64
        filled_t, the recorded steps that the window holds after the step.

    Edges:
        an interval of 0 records and moves nothing.

    Raises:
        ValueError: is_prefill_t is not 1-D.
        TypeError: is_prefill_t is not bool.

    Source:
        runtime.md section 6.1
    """
    expect_shape("is_prefill_t", is_prefill_t, "t", {})
    expect_dtype("is_prefill_t", is_prefill_t, torch.bool)
    kept_t, moves_t, filled_t = (torch.zeros_like(is_prefill_t, dtype=d) for d in (torch.bool, torch.bool, torch.int64))
    counter, rows, waits = config.interval - max(1, config.interval // 4), 0, False
    for step, is_prefill in enumerate(is_prefill_t.tolist()):
        counts = bool(config.interval) and (not is_prefill or config.prefill_engine or config.after_prefill)
        counter, rows = counter + counts, min(rows + counts, config.window)
        due = waits and not is_prefill if config.after_prefill else counts and counter == config.interval
        waits = is_prefill or (waits and not due)
        counter = 0 if due else counter
        kept_t[step], moves_t[step], filled_t[step] = counts, bool(config.interval) and due, rows
    return kept_t, moves_t, filled_t


def _replicated(load_te: Tensor, num_slots: int, num: Numerics) -> Tensor:
    """The expert of every slot: one for each, then the extra ones."""
    num_experts = load_te.shape[1]
    held = list(range(num_experts))
    while len(held) < num_slots:
        copies_e = torch.bincount(torch.tensor(held), minlength=num_experts)
        held.append(_next_copy(load_te, copies_e, num))
    return torch.tensor(held)


def _next_copy(load_te: Tensor, copies_e: Tensor, num: Numerics) -> int:
    """The expert whose further copy lowers the sum of the peaks most.

    share[t, e] = (load[t, e] + e * 1e-4) / copies[e]; the busiest expert of a step is the first with the largest share.
    A copy of it makes its share load / (copies + 1), without the tie break; a copy of any other changes no peak.
    """
    expert_e = torch.arange(len(copies_e))
    tie_e = num.f32(num.f32(num.wide(torch.tensor(TIE_BREAK, dtype=torch.float64))) * expert_e)
    share_te = num.f32(num.f32(load_te + tie_e) / copies_e)
    busiest_t = share_te.argmax(1) if len(share_te) else expert_e[:0]
    relieved_te = num.f32(load_te / (copies_e + 1))
    totals = []
    for expert in range(len(copies_e)):
        one_te = (busiest_t[:, None] == expert) & (expert_e == expert)
        peak_t = torch.where(one_te, relieved_te, share_te).amax(1)
        totals.append(num.sum(peak_t, dim=0))
    return int(torch.stack(totals).argmin())


def _packed(load_te: Tensor, expert_p: Tensor, copies_e: Tensor, slots_per_rank: int, num: Numerics) -> Tensor:
    """The new number of every slot."""
    num_slots = len(expert_p)
    if slots_per_rank == 1:
        return torch.arange(num_slots)
    share_te = num.f32(load_te / copies_e)
    weight_p = num.sum(share_te, dim=0)[expert_p]
    rank_load = [torch.zeros_like(share_te[:, 0]) for _ in range(num_slots // slots_per_rank)]
    filled, place_p, peak_t = [0] * len(rank_load), torch.empty_like(expert_p), torch.zeros_like(share_te[:, 0])
    for slot in torch.sort(weight_p, descending=True, stable=True).indices.tolist():
        more_t = share_te[:, expert_p[slot]]
        free = [rank for rank, used in enumerate(filled) if used < slots_per_rank]
        loads = {rank: num.f32(rank_load[rank] + more_t) for rank in free}
        # min takes the first of equal ranks
        best = min(free, key=lambda rank: num.sum(torch.maximum(peak_t, loads[rank]), dim=0).item())  # noqa: B023
        place_p[slot] = best * slots_per_rank + filled[best]
        filled[best] += 1
        rank_load[best] = loads[best]
        peak_t = torch.maximum(peak_t, loads[best])
    return place_p


def _source(slot: int, old: list[int], new: list[int], slots_per_rank: int) -> tuple[ShuffleStep, int]:
    """What becomes of one slot."""

    def first_slot(rank: int, held: list[int]) -> int | None:
        own = range(rank * slots_per_rank, (rank + 1) * slots_per_rank)
        return next((i for i in own if held[i] == expert), None)

    expert, mine = new[slot], slot // slots_per_rank
    if old[slot] == expert:
        return ShuffleStep.KEEP, slot
    local = first_slot(mine, old)
    if local is not None:
        return ShuffleStep.COPY, local
    receives = first_slot(mine, new)
    assert receives is not None
    if receives != slot:
        return ShuffleStep.SHARE, receives
    ranks = range(len(new) // slots_per_rank)
    holders = [rank for rank in ranks if first_slot(rank, old) is not None]
    if not holders:
        raise ValueError(f"new_lp: expected experts that old_lp holds, got {expert}")
    needy = [rank for rank in ranks if rank not in holders and first_slot(rank, new) is not None]
    n, j = len(needy) // len(holders), needy.index(mine)
    found = first_slot(holders[j // n if j < n * len(holders) else j - n * len(holders)], old)
    assert found is not None
    return ShuffleStep.RECEIVE, found


def _copies(expert_lp: Tensor, num_experts: int) -> Tensor:
    return (expert_lp[:, None, :] == torch.arange(num_experts)[:, None]).sum(-1, dtype=torch.int64)


def _slot_map(expert_lp: Tensor, place_lp: Tensor, num_experts: int) -> Tensor:
    """The places of every expert's copies in the order of `expert_lp`, then -1."""
    layers, num_slots = expert_lp.shape
    map_lej = expert_lp.new_full((layers, num_experts, num_slots - num_experts + 1), -1)
    for layer in range(layers):
        for expert in range(num_experts):
            own = place_lp[layer][expert_lp[layer] == expert]
            map_lej[layer, expert, : len(own)] = own
    return map_lej


def _check_slots(num_slots: int, num_experts: int, slots_per_rank: int) -> None:
    if num_slots < num_experts:
        raise ValueError(f"num_slots: expected at least {num_experts} for as many experts, got {num_slots}")
    if slots_per_rank < 1 or num_slots % slots_per_rank:
        raise ValueError(f"slots_per_rank: expected a divisor of {num_slots} slots, got {slots_per_rank}")
