"""How the engine is checked: what a request gets is what it gets alone without any cache, whatever else goes on.

`serve` runs the engine on a tiny model of every generation, and on a toy whose hidden state is a hash of all its caches
hold. Every axis of `RELATIONS` changes one thing that must not matter; what the engine does not promise must differ.
`serve_kernels` is the engine on kernels, whose runs are compared with one another: a device tries every axis, the
interpreter the smallest case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.optimized.verification import Greedy
from deeptwin.reference.config import Draw, Finish, Truncation

from ..card import Candidate, Card, Inputs, Mutant, Op, Output, Outputs, Relation, variants
from ..relations import CallFn, Context, first_difference
from ..rules import Bitwise, Judgement, Oracles, at
from ..serving import GENERATIONS, Serving

_mutant, _control = variants("engine")

ROWS = dict.fromkeys(("prompt_bs", "length_b", "max_tokens_b", "arrival_b", "temperature_b", "top_p_b", "seed_b"), 0)
Pair = tuple[str, Outputs, Outputs]


@dataclass(frozen=True, kw_only=True)
class ServeCase:
    """`requests` of up to `prompt` + `tokens` tokens on a tiny model; `only`: the axes to be tried, all if empty."""

    generation: str
    requests: int = 4
    prompt: int = 20
    tokens: int = 4
    only: tuple[str, ...] = ()
    layers: int = 0
    seconds: float = 0.0  # that a check of the case may take
    regime: str = "normal"  # greedy: every request; long: all limits are `tokens`, and nothing ends earlier

    @property
    def id(self) -> str:
        how = f"-l{self.layers}" if self.layers else ""
        return f"{self.generation}-b{self.requests}-s{self.prompt}-n{self.tokens}{how}-{self.regime}"


def draw_serve(case: ServeCase, rng: np.random.Generator) -> Inputs:
    """Prompts of any length, nonsense behind them; greedy and drawn requests, some of them filtered; two alike."""
    b, serving = case.requests, Serving(generation=case.generation, layers=case.layers)
    length = rng.integers(1, case.prompt + 1, b)
    length[: min(b, 2)] = case.prompt
    prompt = rng.integers(-(2**31), 2**31 - 1, (b, case.prompt + 2))
    for row in range(b):
        prompt[row, : length[row]] = prompt[row, : length[row]] % (serving.vocab - 4) + 4
    if b > 1:
        prompt[1, : case.prompt - 3] = prompt[0, : case.prompt - 3]  # a common beginning
    long = case.regime == "long"
    limit = np.full(b, case.tokens) if long else rng.integers(1, case.tokens + 1, b)
    limit[:1] = case.tokens
    temperature = np.where(rng.random(b) < 0.4, 0.0, rng.choice([0.7, 1.0, 1.5], b))
    if case.regime == "greedy":
        temperature[:] = 0.0
    return {
        "prompt_bs": torch.from_numpy(prompt.astype(np.int32)),
        "length_b": torch.from_numpy(length),
        "max_tokens_b": torch.from_numpy(limit),
        "arrival_b": torch.from_numpy(rng.integers(0, 6, b)),
        "temperature_b": torch.from_numpy(temperature.astype(np.float32)),
        "top_p_b": torch.from_numpy(rng.choice([1.0, 0.9], b).astype(np.float32)),
        "seed_b": torch.from_numpy(rng.integers(0, 2**62, b)),
        "serving": serving,
    }


def cases_serve(full: bool) -> list[ServeCase]:
    """A toy and every generation with all axes; 96 requests of 128 tokens on the axes that need many."""
    many = ServeCase(generation="v3", requests=96, tokens=128, only=MANY, seconds=300.0, regime="long")
    # the longest come first, so that two workers end together
    found = [replace(many, layers=2, only=("batch_composition",)), replace(many, generation="toy")]
    # bounded replay leaves rows of a prompt out, and a hit stands in front of them, from 31 tokens on
    found += [ServeCase(generation=g, prompt=34 if g == "v41" else 20) for g in reversed(GENERATIONS)]
    found += [ServeCase(generation="toy", requests=12, prompt=50, tokens=20), ServeCase(generation="toy", requests=0)]
    few = ServeCase(generation="v3", requests=3, prompt=9, tokens=2, only=("batch_composition",))
    # groups of four that an answer completes
    found.append(ServeCase(generation="v4", requests=1, tokens=10, only=("continuation", "draft_width"), regime="long"))
    found.append(few)
    if full:
        found += [replace(many, generation=g, seconds=3000.0) for g in ("v3", "v32", "v4", "v41")]
        found += [ServeCase(generation=g, requests=9, prompt=70, tokens=12, seconds=1000.0) for g in GENERATIONS]
    return list({case.id: case for case in found}.values())


# the axes: each yields what was called and what it must give


Axis = Callable[[Inputs, CallFn, Context], Iterator[Pair]]


def _some(variants: Sequence[Any], inputs: Inputs, context: Context, few: int = 2) -> Sequence[Any]:
    """All variants for the toy and under --full; the first ones for a model that takes its time."""
    return variants if context.full or inputs["serving"].generation == "toy" else variants[:few]


def _rows(inputs: Inputs, rows: list[int]) -> Inputs:
    index = torch.tensor(rows, dtype=torch.int64)
    return inputs | {name: inputs[name].index_select(0, index) for name in ROWS}


def _of(outputs: Outputs, rows: list[int], limit_b: Tensor) -> Outputs:
    """What those requests got, as wide as the longest of them may be."""
    width = int(limit_b[rows].max()) if rows else 0
    index = torch.tensor(rows, dtype=torch.int64)
    whole = {name: x.index_select(0, index) for name, x in outputs.items()}
    return {name: x[:, :width] if x.dim() == 2 else x for name, x in whole.items()}


def _smallest(
    inputs: Inputs, call: CallFn, change: Callable[[Inputs], Inputs], got: Outputs, expected: Outputs
) -> Pair:
    """The request that differs, alone or with one other beside it, if that still shows it; all of them if not."""
    wrong = [b for b in range(len(inputs["length_b"])) if first_difference(_row(got, b), _row(expected, b))]
    others = [b for b in range(len(inputs["length_b"])) if b not in wrong[:1]]
    for rows in [[*wrong[:1]], *([wrong[0], other] for other in others[:8])] if wrong else []:
        few = _rows(inputs, rows)
        pair = call(change(few)), call(few)
        if first_difference(*pair):
            return f"requests {rows}", *pair
    return f"requests {wrong} of {len(others) + 1}", got, expected


def _row(outputs: Outputs, b: int) -> Outputs:
    return {name: x[b : b + 1] for name, x in outputs.items()}


def _unchanged(*changes: tuple[str, dict[str, Any]]) -> Axis:
    """An axis on which other settings of the engine give the same."""

    def axis(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
        expected = call(inputs)
        for label, settings in _some(changes, inputs, context):

            def change(given: Inputs, settings: dict[str, Any] = settings) -> Inputs:
                return given | {"serving": replace(given["serving"], **settings)}

            got = call(change(inputs))
            if first_difference(got, expected):
                less, got, smaller = _smallest(inputs, call, change, got, expected)
                yield f"{label}, {less}", got, smaller
            else:
                yield label, got, expected

    return axis


def batch_composition(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """Requests alone, in pairs, twice, more and fewer at a time."""
    expected, count, limit_b = call(inputs), len(inputs["length_b"]), inputs["max_tokens_b"]
    groups = [[0], [count - 1, 0]] if count < 20 else [list(range(0, count, 16))]
    for group in _some(groups, inputs, context) if count else []:
        yield f"requests {group}", call(_rows(inputs, group)), _of(expected, group, limit_b)
    crossed = (7, 8, 9) if context.full or inputs["serving"].generation == "toy" else (9,)
    for copies in crossed if 2 < count < 20 else ():  # a limit that batches cross
        serving = replace(inputs["serving"], max_requests=copies, budget=copies * len(inputs["prompt_bs"][0]))
        many = _rows(inputs, [0] * copies) | {"serving": serving, "arrival_b": torch.zeros(copies).long()}
        yield f"{copies} alike at once", call(many), _of(expected, [0] * copies, limit_b)
    is_toy = inputs["serving"].generation == "toy"
    for most in (1,) if 0 < count < 20 else (64,) if count and (is_toy or context.full) else ():
        serving = replace(inputs["serving"], max_requests=most)
        yield f"{most} at a time", call(inputs | {"serving": serving}), expected


def arrival_order(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """All at once, one after the other, in another order."""
    expected, count, limit_b = call(inputs), len(inputs["length_b"]), inputs["max_tokens_b"]
    order = [int(i) for i in context.rng.permutation(count)]
    turned = _rows(inputs, order) | {"arrival_b": inputs["arrival_b"]}
    yield f"order {order}", call(turned), _of(expected, order, limit_b)
    if count < 20:
        times = (("all at once", torch.zeros(count)), ("late", torch.arange(count) * 5))
        for label, arrival_b in _some(times, inputs, context, few=1):
            yield label, call(inputs | {"arrival_b": arrival_b.long()}), expected


def neighbours(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """The first request beside others that ask for something else."""
    expected, changes = (
        call(inputs),
        (
            ("hot neighbours, other seeds", {"temperature_b": 3.0, "seed_b": 12345}),
            ("greedy neighbours", {"temperature_b": 0.0}),
            ("narrow neighbours", {"top_p_b": 0.05}),
        ),
    )
    for label, values in _some(changes, inputs, context) if len(inputs["length_b"]) > 1 else ():
        changed = {name: inputs[name].clone() for name in values}
        for name, value in values.items():
            changed[name][1:] = value
        yield label, _row(call(inputs | changed), 0), _row(expected, 0)
    if len(inputs["length_b"]) > 1 and (context.full or inputs["serving"].generation == "toy"):
        serving = replace(inputs["serving"], gamma=2, quality=60)
        drafted = inputs | {"serving": serving, "temperature_b": torch.ones(len(inputs["length_b"]))}
        seed_b = inputs["seed_b"].clone()
        seed_b[1:] = 12345
        yield "other seeds, with drafts", _row(call(drafted | {"seed_b": seed_b}), 0), _row(call(drafted), 0)


def continuation(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """Prompts that end with the beginning of their own answer go on alike: so their lengths have every residue."""
    expected, length_b, limit_b = call(inputs), inputs["length_b"], inputs["max_tokens_b"]
    for made in (1, 2, 3):
        own_b = (expected["token_bn"] >= 0).sum(1)
        rows = (own_b > made).nonzero()[:, 0].tolist()
        few, width = _rows(inputs, rows), inputs["prompt_bs"].shape[1] + made
        prompt_bs = torch.zeros(len(rows), width, dtype=torch.int32)
        for place, b in enumerate(rows):
            own = [*inputs["prompt_bs"][b, : length_b[b]].tolist(), *expected["token_bn"][b, :made].tolist()]
            prompt_bs[place, : len(own)] = torch.tensor(own, dtype=torch.int32)
        few |= {"prompt_bs": prompt_bs, "length_b": few["length_b"] + made, "max_tokens_b": few["max_tokens_b"] - made}
        rest = _of(expected, rows, limit_b)
        rest = {name: x[:, made:] if x.dim() == 2 else x for name, x in rest.items()}
        if rows:
            yield f"behind {made} tokens", call(few), rest


def grammars(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """Requests without a grammar beside some with one, and one with a grammar alone and beside others, with drafts."""
    count = len(inputs["length_b"])
    if count < 3:
        return
    serving, expected = inputs["serving"], call(inputs)
    some = replace(serving, grammars=(0, 2))
    got = call(inputs | {"serving": some})
    yield "free requests beside grammars", _row(got, 1), _row(expected, 1)
    width = int(inputs["max_tokens_b"][0])
    alone = call(_rows(inputs, [0]) | {"serving": replace(serving, grammars=(0,))})
    yield "a grammar alone", alone, {name: x[:, :width] if x.dim() == 2 else x for name, x in _row(got, 0).items()}
    greedy = inputs | {"temperature_b": torch.zeros(count)}
    plain = call(greedy | {"serving": some})
    for quality in _some((60, 0, 100), inputs, context, few=1):
        drafted = replace(some, gamma=2, quality=quality)
        yield f"grammars with drafts, quality {quality}", call(greedy | {"serving": drafted}), plain


def drafts(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """Greedy requests with any number of drafts of any quality, synchronous and not, in a tight pool."""
    greedy = inputs | {"temperature_b": torch.zeros(len(inputs["length_b"]))}
    expected = call(greedy)
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("2 drafts in flight, tight", {"gamma": 2, "quality": 60, "asynchronous": True, "tight": True}),
        ("5 drafts, all right", {"gamma": 5, "quality": 100}),
        ("1 draft, all wrong", {"gamma": 1, "quality": 0}),
        ("2 drafts", {"gamma": 2, "quality": 60}),
        ("3 drafts, scheduled", {"gamma": 3, "quality": 60, "scheduled": True, "asynchronous": True}),
    )
    if inputs["serving"].generation != "toy":
        changes = (("2 drafts of the model's own drafter", {"gamma": 2, "quality": -1}), *changes)
    for label, settings in _some(changes, inputs, context):
        yield label, call(greedy | {"serving": replace(inputs["serving"], **settings)}), expected


def schedules(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """Steps in flight change nothing, with drafts and without, for drawn requests too."""
    serving = inputs["serving"]
    for label, base in (("plain", serving), ("drafted", replace(serving, gamma=2, quality=60))):
        expected = call(inputs | {"serving": base})
        yield label, call(inputs | {"serving": replace(base, asynchronous=True)}), expected


def replay_modes(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """Masked rows give what left-out rows give, whole or behind a hit; prompts that are kept whole change nothing."""
    serving = inputs["serving"]
    mask, compact = (replace(serving, truncation=t) for t in (Truncation.MASK, Truncation.COMPACT))
    masked = call(inputs | {"serving": mask})
    yield "masked and compact", call(inputs | {"serving": compact}), masked
    yield "compact in small chunks", call(inputs | {"serving": replace(compact, budget=5)}), masked
    yield "compact behind a hit", call(inputs | {"serving": replace(compact, warm=serving.page)}), masked
    short = inputs | {"length_b": inputs["length_b"].clamp(max=9)}
    yield "short prompts", call(short | {"serving": compact}), call(short)


def not_promised(inputs: Inputs, call: CallFn, context: Context) -> Iterator[Pair]:
    """What changes the tokens of drawn requests, as the specification says."""
    count, serving = len(inputs["length_b"]), inputs["serving"]
    hot = inputs | {"temperature_b": torch.ones(count), "max_tokens_b": inputs["max_tokens_b"].clamp(min=5)}
    plain = call(hot)
    yield "another seed", call(hot | {"seed_b": hot["seed_b"] + 1}), plain
    yield "drawn behind drafts", call(hot | {"serving": replace(serving, gamma=2, quality=60)}), plain
    yield (
        "the draw of another platform",
        call(hot | {"serving": replace(serving, vocab=64, draw=Draw.ASCEND)}),
        call(hot | {"serving": replace(serving, vocab=64)}),
    )
    nearly = replace(serving, greedy=Greedy.EPS)
    cold = hot | {"temperature_b": torch.zeros(count)}
    eps, argmax = call(cold | {"serving": nearly}), call(cold)
    yield "greedy by a draw: other log-probabilities", eps, argmax
    if serving.generation == "v41":
        off, compact = call(hot), call(hot | {"serving": replace(serving, truncation=Truncation.COMPACT)})
        yield "bounded replay of long prompts", compact, off


MANY = ("batch_composition", "arrival_order")
AXES: dict[str, tuple[str, Axis]] = {
    "batch_composition": ("batch composition", batch_composition),
    "arrival_order": ("arrival order", arrival_order),
    "continuation": ("length of the prompt", continuation),
    "chunk_size": ("chunks of prompts", _unchanged(("budget 7", {"budget": 7}), ("budget 1000", {"budget": 1000}))),
    "page_size": ("page size", _unchanged(("pages of 32", {"page": 32}), ("pages of 48", {"page": 48}))),
    "page_order": ("order of pages and states", _unchanged(("1", {"shuffle": 1}), ("2", {"shuffle": 2}))),
    "prefix_hit": (
        "length of a prefix hit",
        _unchanged(("a page", {"warm": 16}), ("two pages", {"warm": 33}), ("short chunks", {"warm": 32, "budget": 5})),
    ),
    "draft_width": ("drafts", drafts),
    "steps_in_flight": ("synchronous or not", schedules),
    "preemption": (
        "preemption",
        _unchanged(("tight", {"tight": True}), ("tight, in flight", {"tight": True, "asynchronous": True})),
    ),
    "neighbour_parameters": ("parameters of other requests", neighbours),
    "grammar_neighbours": ("grammars of other requests", grammars),
    "replay_modes": ("bounded replay", replay_modes),
}


def _wanted(name: str) -> Callable[[ServeCase], bool]:
    def wanted(case: ServeCase) -> bool:
        if not case.requests or (case.only and name not in case.only):
            return False
        return name != "replay_modes" or case.generation == "v41"

    return wanted


RELATIONS = (
    *(Relation(name=n, axis=axis, hook=hook, only=_wanted(n)) for n, (axis, hook) in AXES.items()),
    Relation(
        name="declared_difference",
        axis="what is not promised",
        promise="different",
        hook=not_promised,
        only=lambda case: 0 < case.requests < 20 and not case.only and case.generation in ("toy", "v41"),
    ),
)


def _elsewhere(case: ServeCase) -> str | None:
    """Right parts in place of those that mutants exchange: the smallest case of V3 has all of them."""
    return None if (case.generation, case.requests) == ("v3", 3) else "right parts are tried on a small case of V3"


def _fault(name: str, entry: str, axis: str, fault: str, generation: str, *, requests: int = 4) -> Mutant:
    """A mutant that its axis must catch, on the smallest case of a generation that shows it."""

    def only(case: ServeCase) -> bool:
        return (case.generation, case.requests) == (generation, requests) and not case.layers

    return replace(_mutant(name, entry, fault), axis=axis, only=only)


MUTANTS = (
    _fault("state_not_carried", "U27", "chunk_size", "a later chunk finds no state of its open group", "v4"),
    _fault(
        "third_token_lost",
        "U31",
        "continuation",
        "the last of 4 n + 3 tokens is not kept for its group",
        "v4",
        requests=1,
    ),
    _fault(
        "verified_state_rounded",
        "U32",
        "draft_width",
        "several rows leave another state than one by one",
        "v4",
        requests=1,
    ),
    _fault("tail_window_saved", "U33", "draft_width", "a group that drafts have left is not kept", "v4", requests=1),
    _fault("stale_ring", "U34", "prefix_hit", "behind a hit the window is another request's", "toy"),
    _fault("window_recomputed", "U35", "prefix_hit", "behind a hit no row sees the window before it", "toy"),
    _fault("ring_of_the_window", "U36", "draft_width", "a ring without room for drafts", "toy"),
    _fault("drafts_not_taken_back", "U62", "draft_width", "rows of rejected drafts stay in the cache", "v3"),
    _fault("seed_of_the_prompt", "U65", "declared_difference", "all samples of a prompt have one seed", "toy"),
    _fault("seed_of_a_neighbour", "U66", "neighbour_parameters", "drafts are judged with the last one's seed", "toy"),
    _fault("seed_of_the_place", "U67", "arrival_order", "the seed is the place in the batch", "toy"),
    _fault("seed_ignored", "U68", "declared_difference", "the seed that was asked for is not used", "toy"),
    _fault("late_divergence", "U69", "batch_composition", "an ulp in one row of a thousand", "toy", requests=96),
    _fault("combined_as_they_come", "U70", "batch_composition", "experts are added as they come", "v3"),
    _fault("split_at_the_chunk", "U71", "chunk_size", "keys before a chunk and in it are summed apart", "v3"),
    _fault("other_from_eight_rows", "U72", "batch_composition", "another kernel from eight rows on", "toy"),
    _fault("split_by_batch", "U73", "batch_composition", "as many splits of the keys as requests", "v3"),
)

SERVE = Op(
    name="serve",
    reference="deeptwin.parity.serving:serve_alone",
    outputs=(
        Output(name="token_bn", rule=Bitwise(), dtype=torch.int32),
        Output(name="logprob_bn", rule=Bitwise(), dtype=torch.float32),
        Output(name="finish_b", rule=Bitwise(), dtype=torch.int32),
    ),
    cases=cases_serve,
    draw=draw_serve,
    rows=ROWS,
    out_rows={"token_bn": 0, "logprob_bn": 0, "finish_b": 0},
    relations=RELATIONS,
    judges_reference=False,
    golden=lambda: cases_serve(False)[2:7],
    candidates=(Candidate(name="reference-plan", function="deeptwin.parity.serving:serve_reference", archs=("cpu",)),),
    mutants=MUTANTS,
    controls=(replace(_control("right_parts"), declines=_elsewhere),),
)


ROUNDED = 1e-6  # a certain token's log-probability is 0 but for the rounding of a renormalised sum


@dataclass(frozen=True)
class WellFormed:
    """Tokens of the vocabulary, at least one and no more than asked for, then -1; log-probabilities; reasons."""

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Look at one output by itself; nothing is compared."""
        arguments = oracles.arguments
        limit_b1 = arguments["max_tokens_b"][:, None]
        if got.dim() == 1:
            wrong = (got != int(Finish.STOP)) & (got != int(Finish.LENGTH))
        elif got.is_floating_point():
            wrong = ~(got <= ROUNDED)
            wrong |= ~got.isfinite()
        else:
            place_n, is_there = torch.arange(got.shape[1]), got >= 0
            wrong = (got >= arguments["serving"].vocab) | (is_there & (place_n >= limit_b1))
            wrong |= is_there & (place_n > 0) & ~is_there.roll(1, 1)
            wrong[:, :1] |= ~is_there[:, :1]
        if not wrong.any():
            return Judgement(ok=True, used=0.0)
        where = at(int(wrong.reshape(-1).to(torch.int8).argmax()), got.shape)
        return Judgement(ok=False, used=float("inf"), message=f"{got[where].item()} at {list(where)}")


def cases_kernels(full: bool) -> list[ServeCase]:
    """Every generation on all axes, and 96 requests of 128 tokens; a CPU runs the smallest on one axis."""
    found = [ServeCase(generation="v3", requests=2, prompt=5, tokens=2, only=("batch_composition",), seconds=200.0)]
    found += [replace(case, seconds=500.0) for case in cases_serve(False)[2:6]]
    many = ServeCase(generation="v3", requests=96, tokens=128, only=MANY, seconds=500.0, regime="long")
    return found + [replace(many, generation=g) for g in GENERATIONS[1:]]


KERNELS = Op(
    name="serve_kernels",
    reference="deeptwin.parity.serving:serve_shapes",
    outputs=(
        Output(name="token_bn", rule=WellFormed(), dtype=torch.int32),
        Output(name="logprob_bn", rule=WellFormed(), dtype=torch.float32),
        Output(name="finish_b", rule=WellFormed(), dtype=torch.int32),
    ),
    cases=cases_kernels,
    draw=draw_serve,
    rows=ROWS,
    out_rows={"token_bn": 0, "logprob_bn": 0, "finish_b": 0},
    # kernels of prompts and of single rows are others
    relations=tuple(relation for relation in RELATIONS if relation.name != "continuation"),
    judges_reference=False,
    candidates=(
        Candidate(
            name="triton-plan",
            function="deeptwin.parity.serving:serve_triton",
            interpreter_declines=lambda case: None if case.requests == 2 else "takes the interpreter too long",
        ),
    ),
)

CARD = Card(
    component="engine",
    summary="requests in batches over paged caches: what each gets does not depend on any other, nor on the schedule",
    contract={
        "tokens": "those of the stateless model and the declared draw, bit for bit under a plan of reference functions",
        "log-probabilities": "fp32, of the distribution that a token was drawn from; greedy: at temperature 1",
        "not promised": "equal tokens of drawn requests with and without drafts, under scheduled verification, behind "
        "preemption with drafts, on another platform's draw, or with bounded replay of long prompts",
    },
    ops=(SERVE, KERNELS),
)
