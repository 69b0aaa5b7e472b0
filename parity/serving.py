"""Requests served by the engine on a tiny or a toy model, and the same requests answered one by one without any cache.

`serve_reference` and `serve_triton` are the engine with a plan of one backend. `serve_alone` is the truth: every
request by itself, the whole sequence computed again for every token, drawn by the reference's sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.optimized.drafter import Drafter, NoDrafter, ScriptedDrafter
from deeptwin.optimized.drafters import drafter_of
from deeptwin.optimized.engine import Engine, EngineConfig, Generate, Generation
from deeptwin.optimized.engine_device import ModelDevice, Sampling
from deeptwin.optimized.engine_store import MemoryStore, Store, exact_reuse
from deeptwin.optimized.plan import Plan, plan_of
from deeptwin.optimized.runners import runner_of
from deeptwin.optimized.scheduler import EngineState, Scheduler
from deeptwin.optimized.steps import Runner
from deeptwin.optimized.verification import Greedy
from deeptwin.reference.config import (
    LEAST_TEMPERATURE,
    Draw,
    DrawUse,
    EngineKind,
    Finish,
    GrammarKind,
    GrammarRequest,
    SamplingParams,
    SchedulerConfig,
    Truncation,
    Vocabulary,
)
from deeptwin.reference.model import model_v3, model_v4, model_v41
from deeptwin.reference.numerics import CONTRACT, Numerics
from deeptwin.reference.philox import subsequences
from deeptwin.reference.presets import V3Config, V4Config
from deeptwin.reference.sampling import argmax_tokens, sample_logits
from deeptwin.reference.structured_output import apply_masks, token_masks
from deeptwin.reference.taps import Tap, ignore

from .tiny_drafts import tiny_draft
from .tiny_models import tiny_model
from .toy_runner import ToyRunner, toy_logits

EOS = 3
BACKTRACKING = 6  # tokens of the longest decode step, as released
GENERATIONS = ("toy", "v3", "v32", "v4", "v41")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Everything about a run but the requests: model, schedule, drafts, reuse of prefixes.

    `warm`: the requests were served before, with all prompts cut to this many tokens (0: nothing was), and left their
    prefixes. `shuffle` renumbers pages and states; `quality` is that of scripted drafts, -1: the model's own drafter.
    """

    generation: str
    vocab: int = 61
    eos: int = EOS
    seed: int = 1
    page: int = 16
    budget: int = 24
    max_requests: int = 4
    tight: bool = False
    asynchronous: bool = False
    gamma: int = 0
    quality: int = 100
    scheduled: bool = False
    warm: int = 0
    shuffle: int = 0
    truncation: Truncation = Truncation.OFF
    greedy: Greedy = Greedy.ARGMAX
    draw: Draw = Draw.NVIDIA
    layers: int = 0  # the first ones of V3 only; 0: all
    grammars: tuple[int, ...] = ()  # requests that follow a grammar of digits


Outputs = tuple[Tensor, Tensor, Tensor]  # token_bn int32, -1 behind; logprob_bn fp32, 0 behind; finish_b int32
Served = Callable[..., Outputs]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an engine is made of, for whoever puts another part in; what comes before a run is served by right parts."""

    device: type[ModelDevice] = ModelDevice
    overrides: Mapping[str, str] = field(default_factory=dict)  # of the plan
    runner: Callable[[Runner], Any] = lambda runner: runner  # what stands in its place
    backtracking: int | None = None  # positions that a ring can take back, as many as needed if None
    tap: Tap = ignore


RIGHT = Parts()


def on_columns(run: Callable[[list[Generate], list[int], Serving, torch.device], list[Generation]]) -> Served:
    """`run` as the card calls it: requests and arrivals are columns of a draw, and so is what they get."""

    def served(
        prompt_bs: Tensor,
        length_b: Tensor,
        max_tokens_b: Tensor,
        arrival_b: Tensor,
        temperature_b: Tensor,
        top_p_b: Tensor,
        seed_b: Tensor,
        *,
        serving: Serving,
    ) -> Outputs:
        where = prompt_bs.device
        requests = requests_of(prompt_bs, length_b, max_tokens_b, temperature_b, top_p_b, seed_b, serving=serving)
        token_bn, logprob_bn, finish_b = _columns(run(requests, arrival_b.tolist(), serving, where))
        return token_bn.to(where), logprob_bn.to(where), finish_b.to(where)

    served.__doc__ = run.__doc__
    return served


@on_columns
def serve_reference(
    requests: list[Generate], arrivals: list[int], serving: Serving, where: torch.device
) -> list[Generation]:
    """The engine on functions of the reference: what is judged is scheduling, caches, drafts and drawing."""
    return serve(requests, arrivals, serving=serving, backend="reference")


@on_columns
def serve_triton(
    requests: list[Generate], arrivals: list[int], serving: Serving, where: torch.device
) -> list[Generation]:
    """The engine on Triton kernels."""
    return serve(requests, arrivals, serving=serving, backend="triton", where=where)


@on_columns
def serve_shapes(
    requests: list[Generate], arrivals: list[int], serving: Serving, where: torch.device
) -> list[Generation]:
    """The shapes of what comes out, for runs that are compared among themselves alone."""
    return [Generation(id=place, request=request) for place, request in enumerate(requests)]


@on_columns
def serve_alone(
    requests: list[Generate], arrivals: list[int], serving: Serving, where: torch.device
) -> list[Generation]:
    """Every request by itself, without caches, batches or drafts.

    It runs under CONTRACT alone: a run has too many marks to be kept, and no other arithmetic has the same tokens.
    An engine's answer is the guess that makes this affordable; where it is wrong, the truth is what comes out.
    """
    names = ("generation", "vocab", "eos", "seed", "layers", "greedy", "draw", "grammars")
    plain = Serving(**{name: getattr(serving, name) for name in names}, max_requests=96, budget=4096)
    guesses = [done.tokens for done in serve(requests, [0] * len(requests), serving=plain, backend="reference")]
    return [_alone(i, *pair, serving) for i, pair in enumerate(zip(requests, guesses, strict=True))]


def requests_of(
    prompt_bs: Tensor,
    length_b: Tensor,
    max_tokens_b: Tensor,
    temperature_b: Tensor,
    top_p_b: Tensor,
    seed_b: Tensor,
    *,
    serving: Serving,
) -> list[Generate]:
    """The rows of a draw as requests.

    Raises:
        ValueError: a prompt is empty, or has tokens outside the vocabulary.
    """
    found = []
    for b, length in enumerate(length_b.tolist()):
        prompt = tuple(prompt_bs[b, :length].tolist())
        if not prompt or not all(0 <= token < serving.vocab for token in prompt):
            raise ValueError(f"prompt_bs: expected tokens below {serving.vocab} in row {b}, got {prompt}")
        params = SamplingParams(
            seed=int(seed_b[b]),
            temperature=float(temperature_b[b]),
            top_p=float(top_p_b[b]),
            max_tokens=int(max_tokens_b[b]),
        )
        grammar = DIGITS if b in serving.grammars else None
        found.append(Generate(prompt=prompt, params=params, grammar=grammar))
    return found


def serve(
    requests: list[Generate],
    arrivals: list[int],
    *,
    serving: Serving,
    backend: str,
    where: torch.device | str = "cpu",
    parts: Parts = RIGHT,
    hear: Callable[[Engine], None] = lambda engine: None,
) -> list[Generation]:
    """Serve requests that arrive at the given steps; `hear` sees the engine behind every step."""
    streams = _streams(requests, serving, backend, where) if serving.gamma and serving.quality >= 0 else {}
    store = MemoryStore()
    if serving.warm:
        early = [replace(r, prompt=r.prompt[: serving.warm]) for r in requests if len(r.prompt) >= serving.warm]
        engine_for(serving, early, backend, streams={}, store=store, where=where).generate(early)
    engine = engine_for(serving, requests, backend, streams=streams, store=store, where=where, parts=parts)
    found: dict[int, Generation] = {}
    step = 0
    order = sorted(range(len(requests)), key=lambda i: (arrivals[i], i))
    while order or engine.has_work:
        while order and arrivals[order[0]] <= step:
            place = order.pop(0)
            name = engine.submit(requests[place])
            found[place] = engine.open[name]
            if isinstance(engine.device.drafter, ScriptedDrafter):
                engine.device.drafter.streams = dict(engine.device.drafter.streams) | {name: streams[place]}
        engine.step()
        hear(engine)
        step += 1
    return [found[place] for place in range(len(requests))]


def engine_for(
    serving: Serving,
    requests: list[Generate],
    backend: str,
    *,
    streams: dict[int, tuple[int, ...]] | None = None,
    store: Store | None = None,
    where: torch.device | str = "cpu",
    parts: Parts = RIGHT,
) -> Engine:
    """An engine in which every request fits; a tight pool holds about two of them."""
    limits = schedule_of(serving, requests)
    config = EngineConfig(
        scheduler=limits,
        sampling=Sampling(draw=serving.draw, greedy=serving.greedy, eos=serving.eos),
        prefix=exact_reuse(serving.generation, block=serving.page, recompute=max(_kept(serving), 1))
        if serving.warm
        else None,
        vocabulary=vocabulary_of(serving.vocab) if serving.grammars else None,
    )
    plan = plan_of("v3" if serving.generation == "toy" else serving.generation, backend, parts.overrides)
    room = max(limits.gamma + 1, BACKTRACKING) if parts.backtracking is None else parts.backtracking
    runner = parts.runner(runner_for(serving, plan, limits, states=config.states, backtracking=room, where=where))
    drafter = _drafter(serving, runner, streams, config.states, str(where))
    scheduler = type("Shuffled", (_Shuffled,), {"by": serving.shuffle}) if serving.shuffle else Scheduler
    return Engine(runner, drafter, config, store=store, scheduler=scheduler, device=parts.device, tap=parts.tap)


def schedule_of(serving: Serving, requests: list[Generate]) -> SchedulerConfig:
    """The limits of a run."""
    longest = max([1, *(len(r.prompt) + r.params.drawn.max_tokens for r in requests)])
    reserve = serving.gamma + (serving.gamma + 1 if serving.asynchronous else 0)
    need = -(-(longest + 1 + reserve) // serving.page)
    return SchedulerConfig(
        engine=EngineKind.NORMAL,
        num_blocks=need + 3 if serving.tight else need * max(len(requests), 1) + 2,
        block_size=serving.page,
        max_requests=serving.max_requests,
        budget=serving.budget,
        max_keys=(longest + 1) * max(len(requests), 1),
        max_prompt=longest + 1,
        max_length=longest,
        gamma=serving.gamma,
        chunked=True,
        asynchronous=serving.asynchronous,
        scheduled_verification=serving.scheduled,
        stop_on_preempt=False,
        all_interval=1,
        any_interval=2,
    )


def runner_for(
    serving: Serving,
    plan: Plan,
    limits: SchedulerConfig,
    *,
    states: int,
    backtracking: int = BACKTRACKING,
    where: torch.device | str = "cpu",
) -> Runner:
    """A tiny model, or the toy, over caches as large as the schedule needs."""
    sizes: dict[str, Any] = {
        "pages": limits.num_blocks,
        "states": states,
        "page_tokens": serving.page,
        "backtracking": backtracking,
    }
    if serving.generation == "toy":
        return ToyRunner(plan, vocab=serving.vocab, **sizes)
    config, weights = _model(serving, where)
    if serving.generation == "v41":
        kept = replace(config.csa2, truncation=serving.truncation, keep=_kept(serving))
        config = replace(config, csa2=kept)
    return runner_of(
        config,
        weights,
        plan,
        **sizes,
        positions=limits.max_positions,
        device=where,
    )


def vocabulary_of(vocab: int) -> Vocabulary:
    """Four special tokens, the digits, then other characters."""
    letters = [bytes([ord("0") + i]) for i in range(10)] + [chr(0x100 + i).encode() for i in range(vocab - 14)]
    return Vocabulary(tokens=(b"", b"", b"", b"", *letters), eos=EOS)


DIGITS = GrammarRequest(kind=GrammarKind.REGEX, schema="[0-9]+")


class _Shuffled(Scheduler):
    """Gives pages out in another order."""

    by = 0

    def start(self) -> EngineState:
        state = super().start()
        order = np.random.default_rng(self.by).permutation(len(state.free))
        return replace(state, free=tuple(state.free[i] for i in order))


def _model(serving: Serving, where: torch.device | str = "cpu") -> tuple[Any, Any]:
    config, weights = _drawn_model(serving.generation, serving.vocab, serving.seed, str(where))
    if not serving.layers:
        return config, weights
    return replace(config, num_layers=serving.layers), replace(weights, layers=weights.layers[: serving.layers])


@lru_cache(maxsize=6)
def _drawn_model(generation: str, vocab: int, seed: int, where: str = "cpu") -> tuple[Any, Any]:
    config, weights = tiny_model(generation, vocab=vocab, seed=seed)
    return config, _placed(weights, where)


def _placed(value: Any, where: str) -> Any:
    """The same weights, every tensor of them elsewhere."""
    if isinstance(value, Tensor):
        return value.to(where)
    if isinstance(value, tuple):
        return tuple(_placed(item, where) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{one.name: _placed(getattr(value, one.name), where) for one in fields(value)})


def _kept(serving: Serving) -> int:
    """Tokens at the end of a prompt that bounded replay keeps; 0: nothing is replayed."""
    if serving.truncation is Truncation.OFF or serving.generation != "v41":
        return 0
    config, _ = _model(serving)
    return int(config.csa2.plan.ring)


def _drafter(
    serving: Serving, runner: Runner, streams: dict[int, tuple[int, ...]] | None, states: int, where: str
) -> Drafter:
    if not serving.gamma:
        return NoDrafter(vocab=serving.vocab)
    if serving.quality >= 0 or serving.generation == "toy":
        return ScriptedDrafter(streams or {}, quality=serving.quality, gamma=serving.gamma, vocab=serving.vocab)
    weights = _drawn_draft(serving.generation, serving.vocab, serving.seed, serving.gamma, where)
    return drafter_of(runner, weights, gamma=serving.gamma, states=states, draw=serving.draw)


@lru_cache(maxsize=6)
def _drawn_draft(generation: str, vocab: int, seed: int, gamma: int, where: str) -> Any:
    config, weights = _drawn_model(generation, vocab, seed)
    return _placed(tiny_draft(generation, config, weights, seed=seed, gamma=gamma), where)


def _streams(
    requests: list[Generate], serving: Serving, backend: str, where: torch.device | str
) -> dict[int, tuple[int, ...]]:
    """What plain decoding gives, as the script of a drafter."""
    plain = replace(serving, gamma=0, warm=0, tight=False, asynchronous=False, scheduled=False)
    engine = engine_for(plain, requests, backend, where=where)
    return {i: (*done.request.prompt, *done.tokens) for i, done in enumerate(engine.generate(requests))}


def _columns(found: list[Generation]) -> Outputs:
    width = max([0, *(done.request.params.drawn.max_tokens for done in found)])
    token_bn = torch.full((len(found), width), -1, dtype=torch.int32)
    logprob_bn = torch.zeros(len(found), width)
    for b, done in enumerate(found):
        token_bn[b, : len(done.tokens)] = torch.tensor(done.tokens, dtype=torch.int32)
        logprob_bn[b, : len(done.tokens)] = torch.tensor(done.logprobs)
    return token_bn, logprob_bn, torch.tensor([int(done.finish) for done in found], dtype=torch.int32)


# the truth


def _alone(place: int, request: Generate, guess: Sequence[int], serving: Serving) -> Generation:
    """The stream of one request. As long as a guess is right, one pass over all of it gives its logits.

    The model is causal, so a row does not depend on the guess behind it; from the first wrong token on every sequence
    is computed anew.
    """
    done, params = Generation(id=place, request=request), request.params.drawn
    behind = stateless_logits([*request.prompt, *guess], serving)[len(request.prompt) - 1 :]
    while done.finish is Finish.OPEN:
        made = done.tokens
        logits_v = (
            behind[len(made)] if made == guess[: len(made)] else stateless_logits([*request.prompt, *made], serving)[-1]
        )
        logits_tv = _masked(logits_v[None].to(torch.float32), request, made, serving)
        token, logprob = _drawn(logits_tv, params, request.params.temperature, len(request.prompt) + len(made), serving)
        done.tokens.append(token)
        done.logprobs.append(logprob)
        if token == serving.eos:
            done.finish = Finish.STOP
        elif len(made) == params.max_tokens:
            done.finish = Finish.LENGTH
    return done


def _masked(logits_tv: Tensor, request: Generate, made: list[int], serving: Serving) -> Tensor:
    if request.grammar is None:
        return logits_tv
    vocabulary = vocabulary_of(serving.vocab)
    mask_nw, _ = token_masks(torch.tensor(made, dtype=torch.int32), vocabulary=vocabulary, request=request.grammar)
    one = torch.ones(1, dtype=torch.int32)
    return apply_masks(logits_tv.clone(), mask_nw[None, -1:], one - 1, one)


def _drawn(
    logits_tv: Tensor, params: SamplingParams, asked: float, position: int, serving: Serving
) -> tuple[int, float]:
    """A token and its log-probability; greedy tokens under ARGMAX are measured at temperature 1 without filters."""
    is_argmax = asked < LEAST_TEMPERATURE and serving.greedy is Greedy.ARGMAX
    stream_t = subsequences(torch.tensor([position]), torch.tensor([0]), use=DrawUse.FRESH)
    token_t, _, logprob_tv, _ = sample_logits(
        logits_tv,
        torch.tensor([1.0 if is_argmax else params.temperature]),
        torch.tensor([1.0 if is_argmax else params.top_p]),
        torch.tensor([-1 if is_argmax else params.top_k]),
        torch.tensor([params.seed]),
        stream_t,
        draw=serving.draw,
    )
    token = int(argmax_tokens(logits_tv)[0] if is_argmax else token_t)
    return token, float(logprob_tv[0, token])


def stateless_logits(tokens: list[int], serving: Serving, *, num: Numerics = CONTRACT, tap: Tap = ignore) -> Tensor:
    """The logits behind every token, [t, v], of one pass over all of them; the toy has no stages."""
    if serving.generation == "toy":
        return toy_logits(tokens, vocab=serving.vocab)
    config, weights = _model(serving)
    token_t = torch.tensor(tokens)
    if isinstance(config, V3Config):
        logits_tv = model_v3(token_t, weights, config=config, num=num, tap=tap)
    elif isinstance(config, V4Config):
        logits_tv = model_v4(token_t, weights, config=config, num=num, tap=tap)
    else:
        logits_tv = model_v41(
            token_t, torch.zeros_like(token_t, dtype=torch.bool), weights, config=config, num=num, tap=tap
        )
    return logits_tv
