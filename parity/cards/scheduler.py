"""How the scheduler is checked: streams that no schedule may change, and the rules of single steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import (
    EngineKind,
    Finish,
    GemmCost,
    LayerCost,
    ModelCost,
    PairCost,
    Precision,
    RunningBatch,
    SchedulerConfig,
    ToyModel,
    WaitingQueue,
)

from ..card import Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Relation, variants
from ..relations import CallFn, Context, Variant
from ..rules import Bitwise, Judgement, Oracles, at

_mutant, _control = variants("scheduler")
VOCABULARY, STOP = 23, 3


@dataclass(frozen=True, kw_only=True)
class StreamCase:
    """`requests` of up to `prompt` + `tokens` tokens; `pool`: roomy, tight (preemption); `abort`: none, some."""

    requests: int
    prompt: int = 14
    tokens: int = 12
    gamma: int = 2
    asynchronous: bool = False
    scheduled: bool = False
    pool: str = "roomy"
    budget: int = 9
    ranks: int = 1
    cp_size: int = 1
    quality: int = 70
    abort: str = "none"
    regime: str = "normal"  # together: all arrive at once; long: prompts beyond the limit among them

    @property
    def id(self) -> str:
        flags = f"{'async' if self.asynchronous else 'sync'}-{'scheduled' if self.scheduled else 'fixed'}"
        sizes = f"b{self.requests}-s{self.prompt}-n{self.tokens}-g{self.gamma}-q{self.quality}"
        where = f"{self.pool}-k{self.budget}-d{self.ranks}-cp{self.cp_size}"
        return f"{sizes}-{flags}-{where}-abort_{self.abort}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class QueueCase:
    """`waiting` requests and a prompt step of `budget` tokens."""

    waiting: int
    budget: int
    engine: str = "normal"
    free: int = 30
    running: int = 1
    max_requests: int = 6
    max_keys: int = 120
    cp_size: int = 1
    chunked: bool = True
    regime: str = "normal"  # images, boundaries, ended, unready, large
    draw: int = 0  # another queue of the same kind

    @property
    def id(self) -> str:
        limits = f"k{self.budget}-free{self.free}-r{self.running}-max{self.max_requests}-keys{self.max_keys}"
        how = f"{self.engine}-cp{self.cp_size}-{'chunks' if self.chunked else 'whole'}"
        return f"w{self.waiting}-{limits}-{how}-{self.regime}-{self.draw}"


@dataclass(frozen=True, kw_only=True)
class RunningCase:
    """`running` requests and `free` blocks."""

    running: int
    free: int
    stops: bool = False
    regime: str = "normal"  # ties, surplus, full (everyone needs a block)
    draw: int = 0

    @property
    def id(self) -> str:
        return f"r{self.running}-free{self.free}-{'stops' if self.stops else 'again'}-{self.regime}-{self.draw}"


@dataclass(frozen=True, kw_only=True)
class VoteCase:
    """`steps` steps of `ranks` ranks; `work`: share of ranks that are ready."""

    steps: int
    ranks: int
    all_interval: int
    any_interval: int
    work: float = 0.8
    ids: int = 40
    regime: str = "normal"  # full: pools around the limit

    @property
    def id(self) -> str:
        votes = f"i{self.all_interval}x{self.any_interval}-w{self.work}-p{self.ids}"
        return f"t{self.steps}-d{self.ranks}-{votes}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class CostCase:
    """`requests` spans of up to `tokens` rows."""

    requests: int
    tokens: int
    keep: int = 0
    is_decode: bool = False
    regime: str = "normal"

    @property
    def id(self) -> str:
        kind = "decode" if self.is_decode else "prompt"
        return f"b{self.requests}-t{self.tokens}-keep{self.keep}-{kind}-{self.regime}"


# rules: an aborted request may have got any beginning of its stream


@dataclass(frozen=True)
class Beginnings:
    """Equal tokens; of an aborted request the beginning of them."""

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Compare with CONTRACT row by row."""
        expected = oracles.contract.to(got.dtype)
        is_aborted = oracles.arguments["abort_b"] >= 0
        is_cut = (got < 0) & is_aborted[:, None]
        # behind the first place that is left out everything is
        is_cut &= is_cut.flip(1).cumprod(1).flip(1).bool()
        wrong = (got != expected) & ~is_cut
        return _judged(wrong, got, expected)


@dataclass(frozen=True)
class Reasons:
    """Equal reasons; an aborted request may have been aborted instead."""

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Compare with CONTRACT."""
        expected = oracles.contract.to(got.dtype)
        is_aborted = (oracles.arguments["abort_b"] >= 0) & (got == int(Finish.ABORTED))
        return _judged((got != expected) & ~is_aborted, got, expected)


def _judged(wrong: Tensor, got: Tensor, expected: Tensor) -> Judgement:
    if not wrong.any():
        return Judgement(ok=True, used=0.0)
    where = at(int(wrong.reshape(-1).to(torch.int8).argmax()), got.shape)
    text = f"{int(wrong.sum())} of {got.numel()} differ, first at {list(where)}: "
    return Judgement(ok=False, used=float("inf"), message=f"{text}{int(got[where])} against {int(expected[where])}")


# inputs


def _int32(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32))


def stream_config(case: StreamCase) -> SchedulerConfig:
    """An engine in which every request fits: a tight pool holds about two of them."""
    longest = case.prompt + case.tokens
    reserve = case.gamma + (case.gamma + 1 if case.asynchronous else 0)
    block = reserve + 2
    need = -(-(longest + 1 + reserve) // block)
    return SchedulerConfig(
        engine=EngineKind.NORMAL,
        num_blocks=need + 3 if case.pool == "tight" else need * case.requests + 2,
        block_size=block,
        max_requests=3 if case.pool == "tight" else 10,
        budget=case.budget,
        max_keys=2 * longest + 2,
        max_prompt=longest + 1,
        max_length=longest,
        gamma=case.gamma,
        chunked=True,
        asynchronous=case.asynchronous,
        scheduled_verification=case.scheduled,
        stop_on_preempt=False,
        cp_size=case.cp_size,
        ranks=case.ranks,
        all_interval=3,
        any_interval=4,
    )


def draw_streams(case: StreamCase, rng: np.random.Generator) -> Inputs:
    """Prompts of any length with nonsense behind them, limits of one token and more, arrivals now and then."""
    b = case.requests
    length = rng.integers(1, case.prompt + 1, b)
    limit = rng.integers(1, case.tokens + 1, b)
    config = stream_config(case)
    width = case.prompt + 2
    if case.regime == "long" and b:
        width = config.max_prompt + 3
        length[b // 2] = config.max_prompt + 1
        length[0], limit[0] = case.prompt, case.tokens
    prompt = rng.integers(-(2**31), 2**31 - 1, (b, width))
    for row in range(b):
        prompt[row, : length[row]] %= VOCABULARY
    arrival = rng.integers(0, 8, b) if case.regime != "together" else np.zeros(b)
    abort = (
        np.where(rng.random(b) < 0.5, arrival + rng.integers(0, 12, b), -1) if case.abort == "some" else np.full(b, -1)
    )
    if case.regime == "together":
        limit[:] = case.tokens
    return {
        "prompt_bs": _int32(prompt),
        "length_b": _int32(length),
        "max_tokens_b": _int32(limit),
        "arrival_b": _int32(arrival),
        "abort_b": _int32(abort),
        "model": ToyModel(vocab_size=VOCABULARY, eos=STOP if case.regime != "together" else -1, quality=case.quality),
        "config": config,
    }


BASE = SchedulerConfig(
    engine=EngineKind.NORMAL,
    num_blocks=40,
    block_size=8,
    max_requests=6,
    budget=16,
    max_keys=120,
    max_prompt=30,
    max_length=60,
    gamma=2,
    chunked=True,
    asynchronous=True,
    scheduled_verification=False,
    stop_on_preempt=False,
)


def draw_queue(case: QueueCase, rng: np.random.Generator) -> Inputs:
    """Requests of any length, some half prefilled; images of up to eight tokens, boundaries before, in and behind."""
    w = case.waiting
    total = rng.integers(1, 31, w)
    if case.regime == "large" and w:
        total[rng.integers(w, size=2)] = rng.choice([30, 31, 35], 2)
    done = np.minimum(rng.integers(0, 20, w) * (rng.random(w) < 0.4), total - 1)
    image = np.full((w, 2, 2), -1)
    if case.regime == "images":
        for row in range(w):
            at_token = int(done[row]) + int(rng.integers(0, 5))
            for which in range(2):
                end = at_token + int(rng.integers(1, 7))
                if end <= total[row]:
                    image[row, which] = (at_token, end)
                at_token = end + int(rng.integers(0, 3))
    boundary = (
        rng.integers(0, 30, w) * (rng.random(w) < 0.6) if case.regime in ("boundaries", "images") else np.zeros(w)
    )
    engine = EngineKind(case.engine)
    config = replace(BASE, engine=engine, budget=case.budget, max_requests=case.max_requests, max_keys=case.max_keys)
    queue = WaitingQueue(
        total_w=_int32(total),
        done_w=_int32(done),
        held_w=_int32(rng.integers(0, 3, w)),
        is_ready_w=torch.from_numpy(rng.random(w) < (0.6 if case.regime == "unready" else 1.0)),
        has_ended_w=torch.from_numpy(rng.random(w) < (0.4 if case.regime == "ended" else 0.0)),
        boundary_w=_int32(boundary),
        image_wi=_int32(image),
    )
    config = replace(config, cp_size=case.cp_size, chunked=case.chunked)
    if case.regime == "large":
        config = replace(config, num_blocks=5)
    return {"queue": queue, "free": case.free, "running": case.running, "config": config}


def draw_running(case: RunningCase, rng: np.random.Generator) -> Inputs:
    """Requests that need a block, need none, or hold one too many; some follow a grammar."""
    r = case.running
    total = rng.integers(1, 60, r) if case.regime != "ties" else rng.integers(20, 22, r)
    need = np.array([BASE.blocks_for(int(x)) for x in total], dtype=np.int64)
    spare = {"full": (-1, 0), "surplus": (0, 2)}.get(case.regime, (-1, 2))
    batch = RunningBatch(
        output_r=_int32(rng.integers(0, 3 if case.regime == "ties" else 20, r)),
        total_r=_int32(total),
        held_r=_int32(np.maximum(need + rng.integers(*spare, r), 0)),
        is_constrained_r=torch.from_numpy(rng.random(r) < 0.3),
    )
    return {"batch": batch, "free": case.free, "config": replace(BASE, stop_on_preempt=case.stops)}


def draw_votes(case: VoteCase, rng: np.random.Generator) -> Inputs:
    """Ranks that are ready or not, pools that are free or nearly used up, chunks that come to nothing."""
    shape = (case.steps, case.ranks)
    free = rng.integers(2, 7, shape) if case.regime == "full" else rng.integers(5, 40, shape)
    config = replace(BASE, ranks=case.ranks, all_interval=case.all_interval, any_interval=case.any_interval)
    config = replace(config, num_blocks=case.ids)
    return {
        "ready_td": torch.from_numpy(rng.random(shape) < case.work),
        "free_td": _int32(free),
        "chosen_td": torch.from_numpy(rng.random(shape) < 0.7),
        "config": config,
    }


COST = ModelCost(
    layers=(
        LayerCost(
            gemms=(
                GemmCost(inner=7, outer=11, precision=Precision.FP8),
                GemmCost(inner=13, outer=3, precision=Precision.FP4),
            ),
            pairs=(
                PairCost(ratio=1, width=17, precision=Precision.BF16, cap=8),
                PairCost(ratio=4, width=5, precision=Precision.FP32),
            ),
            is_consumer=False,
        ),
        LayerCost(
            gemms=(GemmCost(inner=19, outer=2, precision=Precision.BF16),),
            pairs=(PairCost(ratio=3, width=23, precision=Precision.FP8, cap=5),),
            is_consumer=True,
        ),
    ),
    head=GemmCost(inner=29, outer=31, precision=Precision.BF16),
)


def draw_cost(case: CostCase, rng: np.random.Generator) -> Inputs:
    """Spans that start anywhere, some of them empty, totals at their end or behind it."""
    start = rng.integers(0, case.tokens + 1, case.requests)
    end = start + rng.integers(0, case.tokens + 1, case.requests)
    total = end + rng.integers(0, 40, case.requests) * (rng.random(case.requests) < 0.7)
    return {
        "start_b": _int32(start),
        "end_b": _int32(end),
        "total_b": _int32(total),
        "is_decode": case.is_decode,
        "keep": case.keep,
        "cost": COST,
    }


# cases


def cases_streams(full: bool) -> list[StreamCase]:
    """Both schedules × fixed and scheduled verification, pools, ranks, chunks, draft counts and qualities, aborts."""
    base = StreamCase(requests=5)
    in_flight = replace(base, asynchronous=True)
    found = [
        base,
        replace(in_flight, pool="tight"),
        replace(base, requests=9, regime="together", tokens=9),
        replace(in_flight, regime="long"),
        in_flight,
        replace(base, pool="tight"),
        replace(base, scheduled=True, pool="tight"),
        replace(in_flight, scheduled=True, pool="tight"),
        replace(in_flight, requests=9, regime="together", tokens=9, budget=40),
        replace(in_flight, gamma=0, pool="tight"),
        replace(in_flight, gamma=5, quality=100),
        replace(base, gamma=3, quality=0, scheduled=True),
        replace(in_flight, ranks=2, requests=7, pool="tight"),
        replace(base, cp_size=2, budget=8),
        replace(in_flight, abort="some", pool="tight"),
        replace(base, abort="some", ranks=3),
        replace(base, requests=1, prompt=1, tokens=1),
        replace(base, requests=0),
    ]
    if full:
        found += [
            replace(base, requests=b, gamma=g, asynchronous=a, scheduled=s, pool=p, abort=c, ranks=d, quality=q)
            for b, g, a, s, p, c, d, q in (
                (6, g, bool(n & 1), bool(n & 2), ("roomy", "tight")[n // 4 % 2], ("none", "some")[n % 3 // 2], d, q)
                for n in range(8)
                for g, d, q in ((1, 1, 90), (4, 2, 50), (8, 3, 100))
            )
        ]
    return list({case.id: case for case in found}.values())


def cases_queue(full: bool) -> list[QueueCase]:
    """Regimes × engines, aligned chunks, each limit alone, an empty queue."""
    base = QueueCase(waiting=6, budget=40)
    prompt = replace(base, engine="prompt")
    found = [
        replace(base, regime=r, engine=e, draw=n)
        for r in ("normal", "images", "boundaries", "ended", "unready", "large")
        for e, n in (("normal", 0), ("prompt", 1), ("prompt", 2))
    ]
    found += [
        replace(base, regime=r, engine="prompt", cp_size=3, draw=n) for r in ("normal", "images") for n in range(3)
    ]
    found += [replace(base, regime="images", engine="prompt", budget=b) for b in (13, 19, 61)]
    found += [replace(base, budget=200, max_requests=n, engine="prompt") for n in (1, 2, 3)]
    found += [replace(base, budget=37, max_requests=3, engine="prompt", regime="boundaries", draw=n) for n in range(3)]
    found += [replace(base, budget=200, free=0), replace(base, budget=200, max_keys=50)]
    found += [replace(prompt, budget=200, max_keys=60, draw=n) for n in range(3)]
    found += [replace(prompt, budget=200, free=7, draw=n) for n in range(3)]
    found += [replace(base, budget=7, free=n, draw=n) for n in (1, 2, 3)]
    found += [replace(base, chunked=False, draw=n) for n in range(2)] + [replace(base, waiting=0)]
    if full:
        found += [replace(c, draw=n) for c in tuple(found) for n in range(3, 12)]
    return list({case.id: case for case in found}.values())


def cases_running(full: bool) -> list[RunningCase]:
    """Regimes × free blocks from none to enough, one request, none."""
    base = RunningCase(running=7, free=2)
    found = [replace(base, regime=r, free=n) for r in ("normal", "ties", "surplus", "full") for n in (0, 1, 3, 20)]
    found += [replace(base, stops=True), replace(base, running=1, free=0), replace(base, running=1, free=1)]
    found += [replace(base, running=0)]
    if full:
        found += [replace(c, draw=n, running=r) for c in tuple(found) for n, r in ((1, 9), (2, 16), (3, 3))]
    return list({case.id: case for case in found}.values())


def cases_votes(full: bool) -> list[VoteCase]:
    """The released intervals, short ones, one that divides the other, pools at the limit."""
    base = VoteCase(steps=60, ranks=3, all_interval=4, any_interval=7)
    found = [base, replace(base, ranks=1), replace(base, work=0.2)]
    found += [replace(base, regime="full", work=1.0, ids=n) for n in (40, 41)]
    found += [replace(base, all_interval=2, any_interval=4, work=0.5), replace(base, all_interval=70, any_interval=100)]
    found += [replace(base, steps=0), replace(base, all_interval=1, any_interval=1), replace(base, work=0.05)]
    found += [replace(base, steps=450, all_interval=70, any_interval=100, work=0.6)]
    if full:
        found += [replace(base, all_interval=a, any_interval=b, work=0.5) for a in range(1, 7) for b in range(1, 7)]
    return list({case.id: case for case in found}.values())


def cases_cost(full: bool) -> list[CostCase]:
    """Chunks and decode steps, with and without rows that are left out."""
    base = CostCase(requests=6, tokens=40)
    found = [base, replace(base, is_decode=True), replace(base, is_decode=True, keep=9), replace(base, requests=0)]
    found += [replace(base, keep=n) for n in (1, 9, 30, 200)] + [replace(base, tokens=2, keep=1)]
    return found + ([replace(base, tokens=3000, keep=n) for n in (0, 140)] if full else [])


# relations


def still(case: StreamCase) -> bool:
    """An aborted request has got more or less, as time went."""
    return case.abort == "none" and case.requests == 5 and case.scheduled and case.pool == "tight"


def other_chunks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Prompts in chunks of one token, of a few, and whole; blocks of another size."""
    config = inputs["config"]
    for budget in (1, 5, 1000):
        yield Variant(label=f"budget {budget}", calls=(inputs | {"config": replace(config, budget=budget, cp_size=1)},))
    blocks = replace(config, block_size=config.block_size + 3)
    yield Variant(label="larger blocks", calls=(inputs | {"config": blocks},))


def other_schedules(inputs: Inputs, call: CallFn, context: Context) -> Iterator[tuple[str, Outputs, Outputs]]:
    """Speculative equals plain for any draft; steps in flight, scheduled verification and ranks change nothing."""
    expected, config, model = call(inputs), inputs["config"], inputs["model"]
    roomy = replace(config, block_size=24, gamma=0)
    schedules = {
        "no drafts": roomy,
        "no drafts, in flight": replace(roomy, asynchronous=True),
        "five drafts": replace(roomy, gamma=5),
        "five drafts, in flight, scheduled": replace(
            roomy, gamma=5, asynchronous=True, scheduled_verification=True, ranks=2
        ),
        "one at a time": replace(config, max_requests=1),
        "rare prompts": replace(config, all_interval=70, any_interval=100),
    }
    for label, other in schedules.items():
        yield label, call(inputs | {"config": other}), expected
    for quality in (0, 100):
        yield f"quality {quality}", call(inputs | {"model": replace(model, quality=quality)}), expected


def continued(inputs: Inputs, call: CallFn, context: Context) -> Iterator[tuple[str, Outputs, Outputs]]:
    """A prompt that already holds the first tokens of the stream is answered with the rest of it."""
    whole = call(inputs)["token_bn"]
    length, limit = inputs["length_b"], inputs["max_tokens_b"]
    rows = [b for b in range(len(length)) if int((whole[b] >= 0).sum()) > 2]
    if not rows:
        yield "no stream is long enough", {}, {}
        return
    prompts = torch.full((len(rows), inputs["prompt_bs"].shape[1] + 2), -7, dtype=torch.int32)
    for place, b in enumerate(rows):
        prompts[place, : length[b]] = inputs["prompt_bs"][b, : length[b]]
        prompts[place, length[b] : length[b] + 2] = whole[b, :2]
    told = {name: inputs[name][rows] for name in ("arrival_b", "abort_b")}
    longer = told | {"prompt_bs": prompts, "length_b": length[rows] + 2, "max_tokens_b": limit[rows] - 2}
    rest = call(inputs | longer)["token_bn"]
    yield "two tokens later", {"token_bn": rest}, {"token_bn": whole[rows, 2 : 2 + rest.shape[1]]}


def earlier_steps(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """What happens later changes no step before it."""
    steps = len(inputs["ready_td"])
    for count in sorted({1, steps // 2, steps - 1} & set(range(1, steps))):

        def first(outputs: Outputs, count: int = count) -> Outputs:
            return {"kind_t": outputs["kind_t"][:count]}

        cut = {name: inputs[name][:count].clone() for name in ("ready_td", "free_td", "chosen_td")}
        yield Variant(label=f"{count} steps", calls=(inputs | cut,), expect=first)


def shorter_queue(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Who waits behind changes nothing for those in front."""
    queue, count = inputs["queue"], len(inputs["queue"].total_w)
    for kept in sorted({1, count // 2, count - 1} & set(range(1, count))):

        def front(outputs: Outputs, kept: int = kept) -> Outputs:
            return {name: outputs[name][:kept] for name in ("fate_w", "chunk_w")}

        def without_order(results: list[Outputs]) -> Outputs:
            return {name: results[0][name] for name in ("fate_w", "chunk_w")}

        cut = replace(queue, **{name: column[:kept].clone() for name, column in vars(queue).items()})
        yield Variant(label=f"{kept} requests", calls=(inputs | {"queue": cut},), join=without_order, expect=front)


def _fast(op: str, candidate: str = "vectorised") -> tuple[Candidate, ...]:
    function = {
        "streams": "deeptwin.optimized.scheduler:streams_stepwise",
        "prefill_step": "deeptwin.optimized.scheduler:prefill_step_vectorised",
        "decode_step": "deeptwin.optimized.scheduler:decode_step_vectorised",
        "step_kinds": "deeptwin.optimized.scheduler:step_kinds_vectorised",
        "step_flops": "deeptwin.optimized.scheduler:step_flops_vectorised",
    }[op]
    return (Candidate(name=candidate, function=function, archs=("cpu",)),)


TIMES = {"prompt_bs": 0, "length_b": 0, "max_tokens_b": 0, "arrival_b": 0, "abort_b": 0}


def same_width(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Requests alone, in pairs, in another order and twice; the width of the result is that of the longest."""
    count, rows = len(inputs["length_b"]), tuple(TIMES)
    groups = [[b] for b in range(count)] + [[count - 1, 0], [int(i) for i in context.rng.permutation(count)], [0] * 9]
    for group in groups:

        def chosen(outputs: Outputs, group: list[int] = group) -> Outputs:
            width = int(inputs["max_tokens_b"][group].max())
            return {"token_bn": outputs["token_bn"][group, :width], "finish_b": outputs["finish_b"][group]}

        part = {name: inputs[name][group].clone() for name in rows}
        yield Variant(label=f"requests {group}", calls=(inputs | part,), expect=chosen)


STREAMS = Op(
    name="streams",
    reference="deeptwin.reference.scheduler:streams",
    outputs=(
        Output(name="token_bn", rule=Beginnings(), dtype=torch.int32),
        Output(name="finish_b", rule=Reasons(), dtype=torch.int32),
    ),
    cases=cases_streams,
    draw=draw_streams,
    rows=TIMES,
    out_rows={"token_bn": 0, "finish_b": 0},
    relations=(
        Relation(name="batch_invariant", axis="requests beside it", hook=same_width, only=still),
        Relation(name="chunk_invariant", axis="chunks, blocks", hook=other_chunks, only=still),
        Relation(name="split_invariant", axis="drafts, steps in flight, votes", hook=other_schedules, only=still),
        Relation(name="rollback_equals_serial", axis="tokens given as a prompt", hook=continued, only=still),
    ),
    candidates=_fast("streams", "stepwise"),
    mutants=(
        _mutant("row_in_the_batch_counts", "U69", "the next token depends on the place in the batch"),
        _mutant("keys_in_order_of_arrival", "U70", "keys are added up in the order of their slots"),
        _mutant("chunks_count_from_zero", "U71", "positions in a chunk are counted from its first token"),
        _mutant("other_kernel_from_eight_rows", "U72", "eight requests and more go another way"),
        _mutant("split_by_the_longest", "U73", "keys are cut where the longest request of the batch is cut"),
        _mutant("keys_of_the_owner_before", "U34", "a preempted request keeps its count of keys"),
        _mutant("no_room_for_the_step_in_flight", "U36", "blocks are reserved for one step only"),
        _mutant("rows_one_position_early", "U61", "rows of a step are written one position early"),
        _mutant("token_of_the_last_row", "U62", "the token behind the last row is given, whatever was accepted"),
        _mutant("rejected_keys_kept", "U33", "keys of rejected drafts count as committed"),
        _mutant("lengths_of_two_steps_ago", "U32", "a step in flight counts as if all its drafts were accepted"),
        _mutant("placeholders_accepted", "R6", "the placeholder drafts behind a prompt are taken"),
        _mutant("stop_looked_for_at_the_end", "R6", "only the last token of a step can stop a request"),
        _mutant("limit_of_tokens_late", "R6", "a step may go beyond the limit of tokens"),
        _mutant("chunk_sampled", "R6", "the token behind a chunk in the middle of a prompt is given"),
        _mutant("blocks_freed_twice", "R6", "blocks of an ended request go back twice"),
        _mutant("freed_blocks_kept", "R6", "a preempted request gives its blocks back and uses them on"),
        _mutant("late_output_kept", "R6", "the result of a step in flight is added to a preempted request"),
        _mutant("too_long_is_served", "R6", "a prompt beyond the limit is cut and served"),
    ),
    controls=(_control("right_streams"),),
    golden=lambda: [StreamCase(requests=3, asynchronous=True, pool="tight"), StreamCase(requests=4, regime="long")],
)

PREFILL = Op(
    name="prefill_step",
    reference="deeptwin.reference.scheduler:prefill_step",
    outputs=tuple(Output(name=name, rule=Bitwise(), dtype=torch.int32) for name in ("fate_w", "chunk_w", "order_w")),
    cases=cases_queue,
    draw=draw_queue,
    rows={},
    out_rows={},
    relations=(
        Relation(name="causality", axis="requests behind", hook=shorter_queue, only=lambda case: case.waiting > 1),
    ),
    candidates=_fast("prefill_step"),
    mutants=(
        _mutant("budget_not_aligned", "R6", "a chunk may end anywhere"),
        _mutant("cost_not_aligned", "R6", "a chunk costs its tokens, not its padded length"),
        _mutant("unfinished_ones_count", "R6", "a request in the middle of its prompt counts against the limit"),
        _mutant("unfinished_in_order", "R6", "unfinished requests go back in the order of the batch"),
        _mutant("unfinished_to_the_end", "R6", "unfinished requests go to the end of the queue"),
        _mutant("goes_on_behind_a_chunk", "R6", "a NORMAL engine goes on behind an unfinished request"),
        _mutant("images_cut", "R6", "a chunk may end inside of an image"),
        _mutant("never_runs_on", "R6", "the first request may not run on to the end of an image"),
        _mutant("always_runs_on", "R6", "any request may run on to the end of an image"),
        _mutant("boundary_aligned", "R6", "a chunk that ends at a boundary is cut down to the alignment"),
        _mutant("boundary_ignored", "R6", "a chunk runs over a boundary"),
        _mutant("keys_of_the_chunk", "R6", "the sum of lengths counts chunks only"),
        _mutant("blocks_of_the_chunk", "R6", "blocks are asked for the chunk only"),
        _mutant("unready_is_passed_over", "R6", "a request that is not ready is overtaken"),
        _mutant("unready_is_taken", "R6", "a request that is not ready is prefilled"),
        _mutant("pool_limit_off_by_one", "R6", "a request that needs every id of the pool waits for ever"),
        _mutant("ended_blocks_the_queue", "R6", "a request that ended while queued stays at the front"),
        _mutant("rest_is_used", "R6", "what does not fit is passed over for what does"),
    ),
    controls=(_control("right_prefill"),),
    golden=lambda: [QueueCase(waiting=6, budget=40, engine="prompt", regime="images", draw=n) for n in range(2)],
)

DECODE = Op(
    name="decode_step",
    reference="deeptwin.reference.scheduler:decode_step",
    outputs=tuple(
        Output(name=name, rule=Bitwise(), dtype=torch.int32) for name in ("fate_r", "held_r", "order_r", "victim_r")
    ),
    cases=cases_running,
    draw=draw_running,
    rows={},
    out_rows={},
    candidates=_fast("decode_step"),
    mutants=(
        _mutant("shortest_preempted", "R6", "the request with the shortest output loses its blocks"),
        _mutant("oldest_preempted", "R6", "the first of the running order loses its blocks"),
        _mutant("runs_without_a_free_block", "R6", "a request that needs no block runs although none is free"),
        _mutant("surplus_kept", "R6", "a block too many is not given back"),
        _mutant("victims_keep_their_blocks", "R6", "what a preempted request held is not free for others"),
        _mutant("sorted_by_output", "R6", "those that run are sorted by output length"),
        _mutant("ties_backwards", "U46", "equal requests change places"),
        _mutant("constrained_again", "R6", "a request with a grammar is prefilled again"),
        _mutant("last_one_stays", "R6", "the last request waits for a block instead of giving up its own"),
    ),
    controls=(_control("right_decode"),),
    golden=lambda: [RunningCase(running=7, free=0, regime=r) for r in ("normal", "ties")],
)

KINDS = Op(
    name="step_kinds",
    reference="deeptwin.reference.scheduler:step_kinds",
    outputs=(Output(name="kind_t", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_votes,
    draw=draw_votes,
    rows={},
    out_rows={},
    relations=(Relation(name="causality", axis="later steps", hook=earlier_steps, only=lambda case: case.steps > 1),),
    candidates=_fast("step_kinds"),
    mutants=(
        _mutant("no_vote_at_zero", "R6", "behind a prompt step no vote is held"),
        _mutant("any_vote_at_zero", "R6", "behind a prompt step any rank's work will do"),
        _mutant("all_before_any", "R6", "where both votes fall together all ranks must have work"),
        _mutant("counter_runs_on", "R6", "a prompt step does not start the count again"),
        _mutant("failed_votes_restart", "R6", "a vote that failed starts the count again"),
        _mutant("no_second_vote", "R6", "a prompt step without a chunk is run"),
        _mutant("limit_excluded", "R6", "a pool that is used to exactly 0.9 is full"),
        _mutant("null_block_left_out", "R6", "the null block counts neither as used nor as an id"),
    ),
    controls=(_control("right_kinds"),),
    golden=lambda: [VoteCase(steps=40, ranks=2, all_interval=3, any_interval=5)],
)

FLOPS = Op(
    name="step_flops",
    reference="deeptwin.reference.scheduler:step_flops",
    outputs=(Output(name="flops_b", rule=Bitwise(), dtype=torch.int64),),
    cases=cases_cost,
    draw=draw_cost,
    rows={"start_b": 0, "end_b": 0, "total_b": 0},
    out_rows={"flops_b": 0},
    relations=(Relation(name="batch_invariant", axis="requests", only=lambda case: case.tokens <= 40),),
    candidates=_fast("step_flops"),
    mutants=(
        _mutant("cap_ignored", "R6", "a row meets every key"),
        _mutant("groups_rounded_up", "U25", "an unfinished group counts as a key"),
        _mutant("own_key_left_out", "U25", "position p meets p keys"),
        _mutant("head_on_every_row", "R6", "a prompt's logits are counted for every row"),
        _mutant("no_row_left_out", "R6", "consumers run on all rows of a prompt"),
        _mutant("rows_left_out_of_decode", "R6", "consumers skip rows of a decode step"),
        _mutant("kept_from_the_chunk", "R6", "rows are kept before the end of the chunk, not of the request"),
        _mutant("no_placeholder", "R6", "a chunk may have no row left"),
        _mutant("fp4_as_fp8", "R6", "products in FP4 cost as much as in FP8"),
    ),
    controls=(_control("right_flops"),),
    golden=lambda: [CostCase(requests=4, tokens=20, keep=9), CostCase(requests=4, tokens=20, is_decode=True)],
)

CARD = Card(
    component="scheduler",
    summary="streams that no schedule changes; who is prefilled, decodes, is preempted; the vote; the cost of a step",
    contract={
        "streams": "a request's tokens depend on its prompt alone, not on batch, chunks, blocks, drafts or timing",
        "prefill": "strictly from the front; blocks for the whole request are taken with its first chunk",
        "decode": "a request runs only while a block is free; the longest output is preempted first; ties keep order",
        "vote": "all ranks at multiples of all_interval, from 0 on; any rank at multiples of any_interval, from 1 on",
        "blocks": "tokens known + drafts + the rows of a step in flight; ids from 1 on, first in first out",
        "cost": "FP8-equivalent operations of a multiply-add: FP4 1, FP8 2, BF16 4, FP32 8",
        "aborts": "an aborted request has got the beginning of its stream",
    },
    ops=(STREAMS, PREFILL, DECODE, KINDS, FLOPS),
    equivalents=(
        Equivalent(
            name="drafts made from an older prefix",
            reason="greedy verification gives the same tokens for any draft; only the number of steps changes",
        ),
        Equivalent(name="blocks given out last in first out", reason="no token depends on the id of a block"),
    ),
)
