"""How the balance of experts is checked: placements, plans and clocks, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from deeptwin.reference.config import RebalanceConfig, ShuffleStep
from deeptwin.reference.eplb import initial_placement, place_experts

from ..card import Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import Context, Variant, row_chunks
from ..rules import Bitwise

_mutant, _control = variants("eplb")
PEERS = "deeptwin.parity.peers.eplb"


@dataclass(frozen=True, kw_only=True)
class PlaceCase:
    """Loads of `steps` steps in `layers` layers; `extra` slots beyond one for each expert, `cap` slots a rank."""

    experts: int
    extra: int
    cap: int
    steps: int = 4
    layers: int = 2
    regime: str = "normal"  # see `_counts`

    @property
    def id(self) -> str:
        return f"e{self.experts}+{self.extra}-c{self.cap}-t{self.steps}-l{self.layers}-{self.regime}"

    @property
    def slots(self) -> int:
        return self.experts + self.extra


def _counts(case: PlaceCase, rng: np.random.Generator) -> np.ndarray:
    t, n, e = case.steps, case.layers, case.experts
    shape = (t, n, e)
    if case.regime == "skewed":
        return rng.poisson(40 * rng.pareto(1.2, (1, n, e)) * (0.5 + rng.random(shape))).clip(max=10**6)
    if case.regime == "zeros":
        return np.zeros(shape, dtype=np.int64)
    if case.regime == "hot":
        return np.where(np.arange(e) == e // 2, 3000, 3) + rng.integers(0, 2, shape)
    if case.regime == "equal":  # exact ties everywhere
        return np.full(shape, 12)
    if case.regime == "few":
        return rng.integers(0, 3, shape)
    if case.regime == "wide":
        return 10 ** rng.uniform(0, 3, shape)
    if case.regime == "worked":  # a tie of two experts that a tie break on the tried copy would decide
        return np.broadcast_to(np.array([[12, 24, 0], [12, 12, 24]])[:, None], shape)
    if case.regime == "huge":  # the tie break is lost, quotients round
        return 2**30 - rng.integers(0, 5, shape)
    counts: np.ndarray = rng.integers(0, 400, shape)
    if case.regime == "part":
        counts[t // 2 :] = 0
    return counts


def draw(case: PlaceCase, rng: np.random.Generator) -> Inputs:
    """Counts of every regime; each layer has its own."""
    count = torch.from_numpy(_counts(case, rng).astype(np.int32))
    return {"count_tle": count, "num_slots": case.slots, "slots_per_rank": case.cap}


def draw_shuffle(case: PlaceCase, rng: np.random.Generator) -> Inputs:
    """Two placements of the same experts: the first one or random ones, and random ones or that of loads."""
    counts = torch.from_numpy(_counts(case, rng).astype(np.int32))
    first = initial_placement(layers=case.layers, num_experts=case.experts, num_slots=case.slots)[0]
    if case.regime == "normal":
        old, new = first, place_experts(counts, num_slots=case.slots, slots_per_rank=case.cap)[0]
    elif case.regime == "equal":
        old, new = first, first.clone()
    else:  # every number of copies, on any ranks
        old, new = (_random_placement(case, rng) for _ in range(2))
    return {"old_lp": old, "new_lp": new, "slots_per_rank": case.cap}


def _random_placement(case: PlaceCase, rng: np.random.Generator) -> torch.Tensor:
    favourite = rng.integers(0, case.experts, (case.layers, 1))
    extra = np.where(rng.random((case.layers, case.extra)) < 0.5, favourite, rng.integers(0, case.experts, case.extra))
    rows = [rng.permutation(np.concatenate([np.arange(case.experts), own])) for own in extra]
    return torch.from_numpy(np.stack(rows))


@dataclass(frozen=True, kw_only=True)
class FirstCase:
    """The placement before any load."""

    experts: int
    extra: int
    layers: int = 2
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"e{self.experts}+{self.extra}-l{self.layers}"


def draw_first(case: FirstCase, rng: np.random.Generator) -> Inputs:
    """Nothing is drawn."""
    return {"layers": case.layers, "num_experts": case.experts, "num_slots": case.experts + case.extra}


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """`steps` steps, a share of them prefills."""

    steps: int
    window: int = 3
    interval: int = 8
    prefills: float = 0.3
    prefill_engine: bool = False
    after_prefill: bool = False
    regime: str = "normal"

    @property
    def id(self) -> str:
        kind = ("-engine" if self.prefill_engine else "") + ("-after" if self.after_prefill else "")
        return f"t{self.steps}-w{self.window}-i{self.interval}-p{self.prefills:g}{kind}"


def draw_steps(case: StepCase, rng: np.random.Generator) -> Inputs:
    """Prefills in runs and alone."""
    config = RebalanceConfig(
        window=case.window,
        interval=case.interval,
        prefill_engine=case.prefill_engine,
        after_prefill=case.after_prefill,
    )
    return {"is_prefill_t": torch.from_numpy(rng.random(case.steps) < case.prefills), "config": config}


def cases(full: bool) -> list[PlaceCase]:
    """Every regime, no extra slots, one slot a rank, one rank, one expert, no steps, no layers."""
    small = PlaceCase(experts=8, extra=4, cap=3)
    regimes = ("normal", "skewed", "zeros", "hot", "equal", "few", "huge", "part")
    found = [replace(small, regime=r) for r in regimes]
    found += [replace(small, extra=0, cap=2), replace(small, cap=1), replace(small, cap=12), replace(small, cap=6)]
    found += [
        PlaceCase(experts=1, extra=3, cap=2),
        replace(small, steps=0),
        replace(small, layers=0),
        replace(small, steps=1),
    ]
    found += [PlaceCase(experts=24, extra=8, cap=4, steps=7, layers=3, regime=r) for r in ("skewed", "few")]
    found += [PlaceCase(experts=4, extra=8, cap=3, steps=2, layers=6, regime="wide")]
    found += [PlaceCase(experts=3, extra=1, cap=2, steps=2, regime="worked")]
    if full:
        found += [PlaceCase(experts=64, extra=16, cap=10, steps=20, layers=2, regime=r) for r in regimes]
        found += [PlaceCase(experts=256, extra=32, cap=9, steps=3, layers=1, regime="skewed")]
    return found


def cases_shuffle(full: bool) -> list[PlaceCase]:
    """From the first placement to that of loads, between random ones, to itself."""
    small = PlaceCase(experts=8, extra=4, cap=3)
    found = [small, replace(small, regime="equal"), replace(small, layers=0, regime="equal")]
    found += [replace(small, regime="skewed", layers=4), PlaceCase(experts=4, extra=12, cap=2, layers=6, regime="few")]
    found += [PlaceCase(experts=3, extra=21, cap=3, layers=6, regime="few"), replace(small, cap=1, regime="few")]
    found += [
        PlaceCase(experts=5, extra=5, cap=10, regime="few"),
        PlaceCase(experts=2, extra=20, cap=2, layers=6, regime="few"),
    ]
    return [*found, PlaceCase(experts=256, extra=32, cap=9, regime="few")] if full else found


def cases_first(full: bool) -> list[FirstCase]:
    """Fewer, as many and more extra slots than experts."""
    return [FirstCase(experts=e, extra=x) for e, x in ((8, 4), (8, 0), (1, 3), (3, 7), (5, 5), (384, 24))]


def cases_steps(full: bool) -> list[StepCase]:
    """Both engines, both options, intervals of one and of none, the window as long as the interval."""
    small = StepCase(steps=40)
    found = [small, replace(small, prefills=0.0), replace(small, prefills=1.0), replace(small, prefill_engine=True)]
    found += [replace(small, after_prefill=True), replace(small, after_prefill=True, prefills=0.7)]
    found += [replace(small, interval=0), replace(small, interval=0, after_prefill=True), replace(small, steps=0)]
    found += [replace(small, interval=1, window=1), replace(small, interval=3, window=3), StepCase(steps=1)]
    return [*found, StepCase(steps=3000, window=100, interval=1000)] if full else found


# relation hooks


def layers_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Layers one by one, and in another order."""
    if not inputs["count_tle"].shape[1]:
        yield Variant(label="repeat without layers", calls=(inputs,))
        return
    yield from row_chunks(inputs, context)
    order = torch.from_numpy(context.rng.permutation(inputs["count_tle"].shape[1]))
    yield Variant(
        label="layers permuted",
        calls=(inputs | {"count_tle": inputs["count_tle"][:, order]},),
        expect=lambda base: {name: x[order] for name, x in base.items()},
    )


def steps_in_any_order(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Steps count alike, whichever came first; steps without load in front change nothing but ties."""
    order = torch.from_numpy(context.rng.permutation(len(inputs["count_tle"])))
    yield Variant(label="steps permuted", calls=(inputs | {"count_tle": inputs["count_tle"][order]},))


def weights_arrive(inputs: Inputs, outputs: Outputs, partner: Any) -> tuple[Outputs, Outputs]:
    """Carrying out the plan gives the new placement; no rank receives an expert twice or one that it holds."""
    old, new, cap = inputs["old_lp"], inputs["new_lp"], inputs["slots_per_rank"]
    step, source = outputs["step_lp"].cpu(), outputs["source_lp"].cpu()
    moved, clean = torch.full_like(old, -1), torch.ones(1, dtype=torch.int64)
    for layer in range(len(old)):
        late = step[layer] == int(ShuffleStep.SHARE)
        moved[layer, ~late] = old[layer, source[layer, ~late]]
        moved[layer, late] = moved[layer, source[layer, late]]
        rank = torch.arange(old.shape[1]) // cap
        fetched = (step[layer] == int(ShuffleStep.RECEIVE)).nonzero().flatten()
        pairs = [(int(rank[i]), int(new[layer, i])) for i in fetched]
        held = {(int(r), int(e)) for r, e in zip(rank, old[layer], strict=True)}
        stays = step[layer] != int(ShuffleStep.RECEIVE)
        near = bool((rank[source[layer]] == rank)[stays].all()) and bool((rank[source[layer]] != rank)[~stays].all())
        clean *= near and len(set(pairs)) == len(pairs) and not held & set(pairs)
    return {"moved_lp": moved, "clean": clean}, {"moved_lp": new, "clean": torch.ones_like(clean)}


def is_small(case: Any) -> bool:
    """Relations make many calls."""
    return case.experts <= 24


OUTPUTS = tuple(Output(name=name, rule=Bitwise(), dtype=torch.int64) for name in ("expert_lp", "map_lej", "copies_le"))
OUT_ROWS = {"expert_lp": 0, "map_lej": 0, "copies_le": 0}

CARD = Card(
    component="eplb",
    summary="balance of experts: copies, packing on ranks, plan of the moves, when they happen",
    contract={
        "arithmetic": "fp32 as written: load + e * 1e-4, quotients by copies, sums of two loads; sums over steps are "
        "contractions (one rounding), so their order is free",
        "ties": "argmax, argmin and ranks: the lowest index; equal slots keep their order; torch's own argmin on a GPU "
        "promises none of this",
        "map": "copies in the order in which they were made, renamed to their new slots; unused entries -1",
        "plan": "every source is read before any slot is written; an expert arrives once on a rank",
        "clock": "experts move after the step, its loads included; the first time after a quarter of the interval",
        "replicas": "which copy a token takes is `router.map_replicas`",
    },
    ops=(
        Op(
            name="place_experts",
            reference="deeptwin.reference.eplb:place_experts",
            outputs=OUTPUTS,
            cases=cases,
            draw=draw,
            rows={"count_tle": 1},
            out_rows=OUT_ROWS,
            relations=(
                Relation(name="chunk_invariant", axis="layers", hook=layers_apart, only=is_small),
                Relation(name="stream_permutation", axis="steps", hook=steps_in_any_order, only=is_small),
            ),
            candidates=(Candidate(name="torch", function="deeptwin.optimized.eplb:place_experts_torch"),),
            peers=(
                Peer(
                    name="fractions",
                    function=f"{PEERS}:in_fractions",
                    needs=(),
                    explains="plain Python with exact sums",
                    only=lambda case: case.experts <= 64,
                ),
            ),
            mutants=(
                _mutant("no_tie_break", "U45", "equal shares are not told apart by the expert's number"),
                _mutant("tie_break_large", "U45", "the tie break outweighs loads"),
                _mutant("tie_break_in_relief", "U45", "the tie break stays when a copy is tried"),
                _mutant("last_of_equal_experts", "U45", "of equal experts the last gets the copy"),
                _mutant("copies_not_counted", "R6", "shares ignore the copies made so far"),
                _mutant("two_copies_tried", "R6", "two copies are tried at once"),
                _mutant("latest_step_alone", "R6", "only the latest step counts"),
                _mutant("steps_added_first", "R6", "loads of all steps are added before they are compared"),
                _mutant("in_fp64", "R6", "fp64, where the tie break survives large counts"),
                _mutant("layer_of_the_first", "U37", "every layer gets the placement of the first"),
                _mutant("lightest_first", "R6", "light slots are placed first"),
                _mutant("in_slot_order", "R6", "slots are placed in their order"),
                _mutant("unstable_order", "U46", "equal slots change places"),
                _mutant("least_loaded_rank", "R6", "the rank with the least load, not the least rise of the peak"),
                _mutant("peak_over_all_steps", "R6", "the peak of all steps together"),
                _mutant("ranks_filled_in_turn", "R6", "a rank is filled before the next"),
                _mutant("peak_forgotten", "R6", "the peak of the ranks so far is not kept"),
                _mutant("load_not_added", "R6", "a rank's load stays zero"),
                _mutant("single_slots_packed", "R6", "one slot a rank is packed all the same"),
                _mutant("map_of_the_old_slots", "U23", "the map names the slots before packing"),
                _mutant("unused_entries_zero", "U08", "unused entries of the map are slot 0"),
                _mutant("copies_by_slot", "R6", "copies are listed by their new slot"),
            ),
            controls=(_control("right_place"),),
            golden=lambda: [
                PlaceCase(experts=6, extra=3, cap=3, regime="skewed"),
                PlaceCase(experts=6, extra=2, cap=2, regime="few"),
            ],
        ),
        Op(
            name="initial_placement",
            reference="deeptwin.reference.eplb:initial_placement",
            outputs=OUTPUTS,
            cases=cases_first,
            draw=draw_first,
            rows={},
            out_rows=OUT_ROWS,
            candidates=(Candidate(name="torch", function="deeptwin.optimized.eplb:initial_placement_torch"),),
            mutants=(
                _mutant("extra_from_the_last", "R6", "extra slots from the last expert on"),
                _mutant("extra_all_of_expert_0", "R6", "all extra slots hold expert 0"),
                _mutant("copies_side_by_side", "R6", "copies stand side by side"),
            ),
            controls=(_control("right_initial"),),
            golden=lambda: [FirstCase(experts=5, extra=3)],
        ),
        Op(
            name="shuffle_plan",
            reference="deeptwin.reference.eplb:shuffle_plan",
            outputs=tuple(Output(name=name, rule=Bitwise(), dtype=torch.int64) for name in ("step_lp", "source_lp")),
            cases=cases_shuffle,
            draw=draw_shuffle,
            rows={"old_lp": 0, "new_lp": 0},
            out_rows={"step_lp": 0, "source_lp": 0},
            relations=(
                Relation(name="batch_invariant", axis="layers", only=is_small),
                Relation(name="layout_round_trip", axis="moved weights", hook=weights_arrive),
            ),
            candidates=(Candidate(name="torch", function="deeptwin.optimized.eplb:shuffle_plan_torch"),),
            peers=(
                Peer(name="ranks", function=f"{PEERS}:by_ranks", needs=(), explains="expert by expert, rank by rank"),
            ),
            mutants=(
                _mutant("received_although_local", "R6", "a rank receives what it holds"),
                _mutant("received_twice", "R6", "every slot receives for itself"),
                _mutant("copied_onto_itself", "R6", "an unchanged slot is copied"),
                _mutant("first_holder_serves_all", "R6", "one holder serves every rank"),
                _mutant("holders_in_turn", "R6", "holders serve in turn, not in runs"),
                _mutant("holders_by_ceiling", "R6", "runs are rounded up, the last holders serve nobody"),
                _mutant("sent_from_the_same_place", "U23", "the sender's slot is the receiver's place on its rank"),
                _mutant("sent_from_the_new_slot", "U36", "the sender's slot is looked up in the new placement"),
                _mutant("last_local_slot", "U45", "a rank copies from its last slot"),
                _mutant("copied_from_the_new_slot", "U36", "a rank copies from where the expert will be"),
            ),
            controls=(_control("right_plan"),),
            golden=lambda: [PlaceCase(experts=3, extra=9, cap=2, regime="few")],
        ),
        Op(
            name="rebalance_steps",
            reference="deeptwin.reference.eplb:rebalance_steps",
            outputs=(
                Output(name="kept_t", rule=Bitwise(), dtype=torch.bool),
                Output(name="moves_t", rule=Bitwise(), dtype=torch.bool),
                Output(name="filled_t", rule=Bitwise(), dtype=torch.int64),
            ),
            cases=cases_steps,
            draw=draw_steps,
            rows={},
            out_rows={},
            candidates=(Candidate(name="torch", function="deeptwin.optimized.eplb:rebalance_steps_torch"),),
            mutants=(
                _mutant("counter_from_zero", "R6", "the first move comes after a whole interval"),
                _mutant("first_step_moves", "R6", "the first recorded step moves experts"),
                _mutant("counter_not_reset", "R6", "after the first move every step moves"),
                _mutant("prefills_recorded", "R6", "prefills count in a normal engine"),
                _mutant("prefills_never_recorded", "R6", "prefills never count"),
                _mutant("moves_in_the_prefill", "R6", "experts move in the prefill, not at the next decode step"),
                _mutant("prefill_option_ignored", "U49", "the option after_prefill is not read"),
                _mutant("window_emptied", "R6", "the window starts anew after a move"),
                _mutant("one_step_late", "R6", "experts move one step late"),
            ),
            controls=(_control("right_steps"),),
            golden=lambda: [StepCase(steps=20, interval=4)],
        ),
    ),
    equivalents=(Equivalent(name="another order of the sum over steps", reason="fp32 values in fp64, rounded once"),),
)
