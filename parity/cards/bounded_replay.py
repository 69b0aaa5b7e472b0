"""How bounded replay is checked: exact integers, and a decoder of hashes in which every wrong key shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.bounded_replay import rebuild_rows
from deeptwin.reference.config import SlidingWindow, Truncation

from ..card import Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..pairing import every_pair
from ..relations import Context, Variant, row_chunks
from ..rules import Bitwise
from .window import WindowCase, batch
from .window import cases as window_cases

_mutant, _control = variants("bounded_replay")

# how a prompt is cut into steps
STEPS = {"one": (1000,), "ones": (1,), "threes": (3,), "growing": (1, 2, 5, 11, 99), "long": (9, 1, 1, 99)}


@dataclass(frozen=True, kw_only=True)
class PromptCase:
    """Prompts of `lengths` tokens, of which `cached` are a prefix that was met before."""

    lengths: tuple[int, ...]
    window: int = 4
    spare: int = 3
    truncation: str = "compact"
    more: int = 0  # tokens that are kept beyond the ring
    steps: str = "one"
    cached: int = 0
    layers: int = 3
    index: str = "int32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        sizes = f"t{'.'.join(str(n) for n in self.lengths)}-w{self.window}+{self.spare}+{self.more}"
        cached = f"-cached{self.cached}" if self.cached else ""
        return f"{sizes}-{self.truncation}-{self.steps}{cached}-l{self.layers}-{self.index}-{self.regime}"

    @property
    def config(self) -> SlidingWindow:
        ring = self.window + self.spare
        return SlidingWindow(
            window=self.window, ring=ring, truncation=Truncation(self.truncation), keep=ring + self.more
        )


# inputs


def draw_plan(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """Chunks around the edges of the ring and of the kept rows."""
    b = batch(case, rng)
    names = ("first_b", "end_b", "known_b", "valid_b")
    return {name: getattr(b, name) for name in names} | {"config": case.config}


def draw_load(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """Sequences before a chunk, their states in random order."""
    b = batch(case, rng)
    return {name: getattr(b, name) for name in ("first_b", "state_b", "valid_b")} | {"config": case.config}


def draw_exact(case: PromptCase, rng: np.random.Generator) -> Inputs:
    """Every row of all prompts, in random order."""
    pairs = np.array([(p, b) for b, n in enumerate(case.lengths) for p in range(n)], dtype=np.int64).reshape(-1, 2)
    pairs = pairs[rng.permutation(len(pairs))]
    dtype = getattr(torch, case.index)
    return {
        "positions_t": torch.from_numpy(pairs[:, 0].copy()).to(dtype),
        "seq_t": torch.from_numpy(pairs[:, 1].copy()).to(dtype),
        "known_b": torch.tensor(case.lengths, dtype=dtype),
        "config": case.config,
        "layers": case.layers,
    }


def counts_of(lengths: tuple[int, ...], steps: str) -> Tensor:
    """Tokens of each sequence in each step; later sequences begin a step late."""
    sizes, left = STEPS[steps], list(lengths)
    rows: list[list[int]] = []
    while any(left):
        turns = [len(rows) - b % 2 for b in range(len(left))]
        step = [min(n, sizes[min(k, len(sizes) - 1)]) if k >= 0 else 0 for n, k in zip(left, turns, strict=True)]
        left = [n - taken for n, taken in zip(left, step, strict=True)]
        rows.append(step)
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), len(lengths))


def draw_prefill(case: PromptCase, rng: np.random.Generator) -> Inputs:
    """Hidden values in the whole range; prefixes of other lengths where some are cached."""
    dtype = getattr(torch, case.index)
    cached = [max(case.cached - b, 0) for b in range(len(case.lengths))]
    return {
        "hidden_t": torch.from_numpy(rng.integers(0, 2**31 - 1, sum(case.lengths))),
        "global_b": torch.from_numpy(rng.integers(0, 2**31 - 1, len(case.lengths))),
        "first_b": torch.tensor(cached, dtype=dtype),
        "counts_kb": counts_of(case.lengths, case.steps).to(dtype),
        "config": case.config,
        "layers": case.layers,
    }


# which cases


def _unique(found: list[PromptCase]) -> list[PromptCase]:
    return list({case.id: case for case in found}.values())


def cases_chunk(full: bool) -> list[WindowCase]:
    """Those of the window lists."""
    return [case for case in window_cases(full) if not case.draft]


def cases_load(full: bool) -> list[WindowCase]:
    """Truncation does not show in what is loaded."""
    return [case for case in cases_chunk(full) if case.truncation == "off"]


def cases_exact(full: bool) -> list[PromptCase]:
    """Prompts around K, a window of one, the released window and K."""
    base = PromptCase(lengths=(31, 7, 10, 11, 1))
    found = [replace(base, truncation=t, more=m) for t, m in product(("off", "mask", "compact"), (0, 4))]
    found += [
        replace(base, window=1, spare=0),
        replace(base, window=1, spare=2, index="int64"),
        replace(base, layers=1),
    ]
    found += [replace(base, lengths=()), PromptCase(lengths=(300,), window=128, spare=6, more=6, layers=2)]
    if full:
        found += [
            replace(base, lengths=(64, 19), window=w, spare=s, more=m, layers=n)
            for w, s, m, n in product((2, 3, 9), (0, 5), (0, 7, 30), (1, 4))
        ]
        # the ring of 20 layers is exact with K = 2541 and its last window is not with K = 2540
        found += [PromptCase(lengths=(2600,), window=128, spare=6, more=m, layers=20) for m in (2406, 2407)]
    return _unique(found)


def cases_prefill(full: bool) -> list[PromptCase]:
    """Modes, steps, prompts around K and within it, cached prefixes, packed prompts, a window of one, the released."""
    base = PromptCase(lengths=(31, 7, 12, 1))
    found = [replace(base, truncation=t, steps=s) for t, s in product(("off", "mask", "compact"), ("one", "growing"))]
    found += [replace(base, steps=s, more=m) for s, m in (("ones", 0), ("threes", 4), ("long", 2), ("growing", 30))]
    found += [replace(base, cached=c, steps="threes", truncation=t) for c, t in product((4, 9), ("mask", "compact"))]
    found += [
        replace(base, cached=6, truncation="off", index="int64"),
        replace(base, window=1, spare=0, steps="threes"),
        replace(base, window=5, spare=0, steps="long"),
        replace(base, lengths=(9, 9, 9, 9, 9), more=1, steps="threes"),
        replace(base, lengths=()),
        PromptCase(lengths=(200,), window=128, spare=6, more=6, layers=2, steps="growing"),
    ]
    if full:
        found += [
            replace(base, truncation=t, steps=s, window=w, spare=b, cached=c, more=m)
            for t, s, w, b, c, m in every_pair(("off", "mask", "compact"), tuple(STEPS), (1, 3), (0, 4), (0, 5), (0, 9))
        ]
    return _unique(found)


# relation hooks


def one_sequence(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The chunk of every sequence without the others, and all in another order."""
    count_b = (inputs["end_b"] - inputs["first_b"]).tolist()
    ends = np.cumsum(count_b)
    groups = [[b] for b in range(len(count_b))][:3] + [list(reversed(range(len(count_b))))]
    for group in groups:
        index = torch.tensor(group)
        call = inputs | {name: inputs[name][index] for name in ("first_b", "end_b", "known_b", "valid_b")}
        rows = torch.cat([torch.arange(ends[b] - count_b[b], ends[b]) for b in group])

        def of_group(outputs: Outputs, rows: Tensor = rows) -> Outputs:
            return {name: x[rows] for name, x in outputs.items()}

        yield Variant(label=f"sequences {group}", calls=(call,), expect=of_group)


def cut_chunks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Every chunk in two: rows see the same keys and are as good, wherever the chunk begins."""
    first, end = inputs["first_b"], inputs["end_b"]
    middle = torch.where(end - first > 1, first + (end - first) // 2, end)
    whole = (middle < end).nonzero()[:, 0]
    halves = (inputs | {"end_b": middle}, inputs | {"first_b": middle})
    second = halves[1] | {name: halves[1][name][whole] for name in ("first_b", "end_b", "known_b", "valid_b")}
    counts = [(call["end_b"] - call["first_b"]).tolist() for call in (halves[0], second)]
    owner = [torch.arange(len(first)).repeat_interleave(torch.tensor(counts[0], dtype=torch.int64))]
    owner.append(whole.repeat_interleave(torch.tensor(counts[1], dtype=torch.int64)))

    def seen(outputs: Outputs) -> Outputs:
        return {"low_tj": outputs["low_tj"], "good_t": outputs["flags_tj"][:, 1]}

    def join(results: list[Outputs]) -> Outputs:
        order = torch.argsort(torch.cat(owner), stable=True)
        return {name: torch.cat([seen(r)[name] for r in results])[order] for name in ("low_tj", "good_t")}

    yield Variant(label="halves", calls=(halves[0], second), join=join, expect=seen)


def one_load(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A sequence alone loads the same slots, to the first rows."""
    for b in range(min(len(inputs["first_b"]), 4)):
        call = inputs | {name: inputs[name][b : b + 1] for name in ("first_b", "state_b", "valid_b")}
        shift = torch.tensor([0, 0, 0, b * inputs["config"].window], dtype=torch.int32)

        def of_one(outputs: Outputs, b: int = b, shift: Tensor = shift) -> Outputs:
            return {"plan_bij": outputs["plan_bij"][b : b + 1] - shift}

        yield Variant(label=f"sequence {b} alone", calls=(call,), expect=of_one)


def other_states(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """States renumbered: the same slots of other rings."""

    def back(results: list[Outputs]) -> Outputs:
        plan = results[0]["plan_bij"].clone()
        plan[..., 0] -= torch.where(plan[..., 0] >= 0, 5, 0).to(torch.int32)
        return {"plan_bij": plan}

    yield Variant(label="states five further", calls=(inputs | {"state_b": inputs["state_b"] + 5},), join=back)


def other_steps(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same prompts in other steps: outputs and rings."""
    lengths = tuple(inputs["counts_kb"].sum(0).tolist())
    for steps in STEPS if context.full else ("one", "threes"):
        counts = counts_of(lengths, steps).to(inputs["counts_kb"].dtype)
        yield Variant(label=f"steps {steps}", calls=(inputs | {"counts_kb": counts},))


def one_prompt(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Prompts alone, in pairs and in another order."""
    lengths = inputs["counts_kb"].sum(0).tolist()
    ends, n = np.cumsum(lengths), len(lengths)
    for group in [[b] for b in range(n)] + [[0, n - 1], list(reversed(range(n)))]:
        index = torch.tensor(group)
        rows = torch.cat([torch.arange(ends[b] - lengths[b], ends[b]) for b in group])
        call = inputs | {"hidden_t": inputs["hidden_t"][rows], "counts_kb": inputs["counts_kb"][:, index]}
        call |= {name: inputs[name][index] for name in ("global_b", "first_b")}

        def of_group(outputs: Outputs, rows: Tensor = rows, index: Tensor = index) -> Outputs:
            return {"out_tl": outputs["out_tl"][rows], "ring_bls": outputs["ring_bls"][index]}

        yield Variant(label=f"prompts {group}", calls=(call,), expect=of_group)


def other_mode(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Kept rows do not depend on whether the others are computed; where all are kept, nor on any truncation."""
    config = inputs["config"]
    other = Truncation.MASK if config.truncation is Truncation.COMPACT else Truncation.COMPACT
    modes = [other] if config.truncation is not Truncation.OFF else []
    known = inputs["first_b"] + inputs["counts_kb"].sum(0)
    longest = max(int(known.max()), config.ring) if len(known) else config.ring
    for mode in modes:
        yield Variant(label=mode.value, calls=(inputs | {"config": replace(config, truncation=mode)},))
    if config.truncation is Truncation.OFF or longest <= config.keep:
        for mode in Truncation:
            whole = replace(config, truncation=mode, keep=longest)
            yield Variant(label=f"{mode.value}, all kept", calls=(inputs | {"config": whole},))


def later_tokens(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Other tokens at the end of the first prompt: what stands before keeps its outputs."""
    length = int(inputs["counts_kb"].sum(0)[0])
    hidden = inputs["hidden_t"].clone()
    hidden[length - 2 : length] += 1 - 2 * (hidden[length - 2 : length] > 0).long()

    def before(outputs: Outputs) -> Outputs:
        return {"out_tl": outputs["out_tl"][: length - 2]}

    yield Variant(
        label="other end", calls=(inputs | {"hidden_t": hidden},), join=lambda rs: before(rs[0]), expect=before
    )


def small(case: WindowCase) -> bool:
    """Relations make many calls: they run on one small ring, where there are chunks."""
    return (case.window, case.spare) == (4, 3) and case.seqs > 1


def short(case: PromptCase) -> bool:
    """Prompts on a small ring."""
    return case.window <= 5 and len(case.lengths) > 1


def golden_chunk() -> list[WindowCase]:
    """Every mode, a restart, prompts known far beyond the chunk."""
    base = WindowCase(seqs=8, window=4, spare=3)
    found = [base, replace(base, restart=True)]
    return found + [replace(base, truncation=t, keep=7, beyond=e) for t, e in product(("mask", "compact"), (0, 20))]


def golden_prompt() -> list[PromptCase]:
    """Every mode and a cached prefix."""
    base = PromptCase(lengths=(31, 7, 12, 1), steps="growing")
    return [*(replace(base, truncation=t.value) for t in Truncation), replace(base, cached=9)]


# rows


def _candidate(function: str) -> tuple[Candidate, ...]:
    return (Candidate(name="vectorised", function=function, archs=("cpu",)),)


def _peer(function: str, explains: str) -> Peer:
    return Peer(name=function.partition(":")[2], function=function, needs=(), explains=explains)


CHUNK_ROWS = dict.fromkeys(("first_b", "end_b", "known_b", "valid_b"), 0)

PLAN = Op(
    name="replay_plan",
    reference="deeptwin.reference.bounded_replay:replay_plan",
    outputs=(
        Output(name="low_tj", rule=Bitwise(), dtype=torch.int32),
        Output(name="history_tj", rule=Bitwise(), dtype=torch.int32),
        Output(name="flags_tj", rule=Bitwise(), dtype=torch.bool),
    ),
    cases=cases_chunk,
    draw=draw_plan,
    rows=CHUNK_ROWS,
    out_rows={},
    relations=(
        Relation(name="run_to_run", axis="repeats", only=small),
        Relation(name="batch_invariant", axis="sequences", hook=one_sequence, only=small),
        Relation(name="chunk_invariant", axis="where a chunk begins", hook=cut_chunks, only=small),
    ),
    candidates=_candidate("deeptwin.optimized.bounded_replay:replay_plan_vectorised"),
    peers=(
        _peer(
            "deeptwin.parity.peers.bounded_replay:plan_from_lists",
            "counted in the index lists and slots that `window` makes for kernels",
        ),
    ),
    mutants=(
        _mutant("plan_not_cut", "U64", "decoder layers see the whole window"),
        _mutant("plan_cut_one_late", "U64", "the cut is N − K + 1"),
        _mutant("plan_cut_from_the_chunk_end", "U64", "N is the end of the chunk, not of the prompt"),
        _mutant("plan_encoder_cut_too", "U64", "encoder layers are cut as well"),
        _mutant("plan_window_one_short", "U39", "the window has W − 1 keys"),
        _mutant("plan_restart_ignored", "U34", "keys below v are read from a stale ring"),
        _mutant("plan_chunk_without_a_row", "U64", "a chunk before the kept rows has no row"),
        _mutant("plan_placeholder_sees_itself", "U64", "a row below the cut sees its own key"),
        _mutant("plan_placeholder_stored", "U64", "the placeholder writes the ring"),
        _mutant("plan_mask_drops_rows", "U64", "MASK drops rows too"),
        _mutant("plan_degenerate_rows_used", "U64", "rows without keys are good for use, prompt log-probs too"),
        _mutant("plan_history_clipped", "U27", "no more keys of the ring are counted than the chunk has rows"),
        _mutant("plan_ring_one_short", "U33", "R − 1 rows of a chunk are stored"),
    ),
    controls=(_control("right_plan"),),
    golden=golden_chunk,
)

EXACT = Op(
    name="exact_layers",
    reference="deeptwin.reference.bounded_replay:exact_layers",
    outputs=(Output(name="layers_t", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_exact,
    draw=draw_exact,
    rows={"positions_t": 0, "seq_t": 0},
    out_rows={"layers_t": 0},
    tile=8,
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lambda case: case.layers == 3),
        Relation(name="batch_invariant", axis="rows", only=lambda case: case.more == 4),
        Relation(name="chunk_invariant", axis="rows in chunks", hook=row_chunks, only=lambda case: case.layers == 1),
    ),
    candidates=_candidate("deeptwin.optimized.bounded_replay:exact_layers_vectorised"),
    peers=(
        replace(
            _peer(
                "deeptwin.parity.peers.bounded_replay:exact_by_measurement",
                "outputs of a decoder of hashes with and without truncation, compared",
            ),
            only=lambda case: sum(case.lengths) < 400,
        ),
    ),
    mutants=(
        _mutant("exact_at_a_whole_window_a_layer", "U64", "a layer costs W rows, as published: W − 1 is the truth"),
        _mutant("exact_first_layer_free", "U64", "the first decoder layer is exact from the cut on"),
        _mutant("exact_everywhere_behind_the_cut", "U64", "kept rows are called exact: the approximation is denied"),
        _mutant("exact_not_for_short_prompts", "U64", "prompts within K are called approximate"),
        _mutant("exact_not_without_truncation", "U64", "OFF is judged as if it were cut"),
    ),
    controls=(_control("right_exact"),),
    golden=lambda: cases_exact(False)[:6],
)

LOAD = Op(
    name="ring_load_plan",
    reference="deeptwin.reference.bounded_replay:ring_load_plan",
    outputs=(Output(name="plan_bij", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_load,
    draw=draw_load,
    rows=dict.fromkeys(("first_b", "state_b", "valid_b"), 0),
    out_rows={"plan_bij": 0},
    relations=(
        Relation(name="run_to_run", axis="repeats", only=small),
        Relation(name="batch_invariant", axis="sequences", hook=one_load, only=small),
        Relation(name="page_permutation", axis="states", hook=other_states, only=small),
    ),
    candidates=_candidate("deeptwin.optimized.bounded_replay:ring_load_plan_vectorised"),
    peers=(
        _peer(
            "deeptwin.parity.peers.bounded_replay:plan_from_slots",
            "read off the ring slots that `window` names for every history row",
        ),
    ),
    mutants=(
        _mutant("load_over_the_ring_end", "U36", "a copy runs over the end of the ring"),
        _mutant("load_stale_keys", "U34", "positions below v are loaded from a stale ring"),
        _mutant("load_state_is_the_sequence", "U34", "the state of a sequence is taken for its number"),
        _mutant("load_one_history_for_all", "U37", "all sequences load to the rows of the first"),
        _mutant("load_with_the_chunk", "U27", "the history ends with the first key of the chunk"),
        _mutant("load_ring_of_window", "U36", "positions wrap at W"),
        _mutant("load_in_slot_order", "U32", "copies stand in the order of their slots"),
    ),
    controls=(_control("right_load"),),
    golden=lambda: [case for case in golden_chunk() if case.truncation == "off"],
)

PREFILL = Op(
    name="replay_prefill",
    reference="deeptwin.reference.bounded_replay:replay_prefill",
    outputs=(
        Output(name="out_tl", rule=Bitwise(), dtype=torch.int64),
        Output(name="ring_bls", rule=Bitwise(), dtype=torch.int64),
    ),
    cases=cases_prefill,
    draw=draw_prefill,
    rows={},
    out_rows={},
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lambda case: short(case) and case.steps == "long"),
        Relation(name="batch_invariant", axis="packed prompts", hook=one_prompt, only=short),
        Relation(name="chunk_invariant", axis="steps", hook=other_steps, only=short),
        Relation(name="masked_equals_absent", axis="truncation", hook=other_mode),
        Relation(name="causality", axis="later tokens", hook=later_tokens, only=short),
    ),
    candidates=_candidate("deeptwin.optimized.bounded_replay:replay_prefill_vectorised"),
    mutants=(
        _mutant("prefill_not_cut", "U64", "decoder layers see the whole window"),
        _mutant("prefill_cut_from_the_chunk_end", "U71", "N is the end of the chunk: steps move the cut"),
        _mutant("prefill_restart_ignored", "U34", "a cached prefix's decoder keys are read from another's ring"),
        _mutant("prefill_global_keys_of_kept_rows", "U64", "rows are dropped before their global keys are made"),
        _mutant("prefill_sums_restart_at_a_chunk", "U27", "global keys of earlier steps are not seen"),
        _mutant("prefill_offset_of_dropped_rows_lost", "U37", "kept rows take the inputs of the chunk's first"),
        _mutant("prefill_history_lost", "U71", "keys of earlier steps are not seen"),
        _mutant("prefill_history_one_late", "U36", "the history is read one slot further"),
        _mutant("prefill_ring_written_first", "U27", "a chunk is stored before the history is read"),
        _mutant("prefill_ring_of_another", "U69", "all prompts share the rings of the first"),
        _mutant("prefill_ring_of_window", "U36", "positions wrap at W, so a ring never holds more"),
        _mutant("prefill_ring_one_short", "U33", "R − 1 rows of a chunk are stored"),
        _mutant("prefill_newest_first", "U32", "keys are folded newest first"),
        _mutant("prefill_split_by_the_batch", "U73", "windows are folded in two parts whose border the batch decides"),
        _mutant("prefill_window_depends_on_the_batch", "U72", "from three prompts on a window has a key less"),
    ),
    controls=(_control("right_prefill"),),
    golden=golden_prompt,
)


def facts() -> dict[str, str]:
    """What exact windows would cost, and what K = 140 leaves exact."""
    released = SlidingWindow(window=128, ring=134, truncation=Truncation.COMPACT, keep=140)
    window, ring = rebuild_rows(20, config=released)
    exact = [max(released.keep - layer * (released.window - 1), 0) for layer in (1, 2)]
    return {
        "tokens that make the last window of 20 layers exact": f"{window}, its ring of 134 rows {ring}",
        "exact rows of K = 140": f"{exact[0]} of the first decoder layer, {exact[1]} of the second and later ones",
    }


CARD = Card(
    component="bounded_replay",
    summary="decoder layers see, compute and store only the last K tokens of a prompt (V4.1)",
    contract={
        "dtypes": "int32 or int64 in, int32 or bool out; hashes int64",
        "visibility": "encoder max(p − W + 1, v, 0) … p; decoder from clamp(max(p − W + 1, N − K, v), 0, p + 1)",
        "N": "tokens that the request holds when the chunk is scheduled",
        "verdicts": "mask = compact on kept rows, bit by bit; bounded against exact is measured, never gated as equal",
        "COMPACT": "global keys are made of all rows, then rows below the cut are dropped, one at least remains",
        "use": "rows below the cut are good for nothing: no prompt log-probs under MASK and COMPACT",
    },
    ops=(PLAN, EXACT, LOAD, PREFILL),
    equivalents=(
        Equivalent(
            name="a stored placeholder, or MASK that stores kept rows only, in replay_prefill",
            reason="K ≥ R and no kept row looks below the cut: only slots that are overwritten or unread differ",
        ),
        Equivalent(
            name="COMPACT without a placeholder in replay_prefill",
            reason="its output is good for nothing and it stores nothing; only an engine needs a row of every chunk",
        ),
    ),
    facts=facts,
)
