"""The engine by its public face: requests, streams, ends of every kind, failures of one beside others, and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.drafter import NoDrafter, ScriptedDrafter
from deeptwin.optimized.engine import Engine, EngineConfig, Event, Generate, Generation
from deeptwin.optimized.engine_device import Sampling
from deeptwin.optimized.engine_store import MemoryStore, exact_reuse
from deeptwin.optimized.plan import plan_of
from deeptwin.optimized.prefix_cache import PrefixStore
from deeptwin.optimized.scheduler import Rank, StepPlan
from deeptwin.optimized.verification import Greedy
from deeptwin.parity.cards.engine import SERVE
from deeptwin.parity.engine_faults import FAULTS, first_difference
from deeptwin.parity.mutants.engine import PARTS
from deeptwin.parity.schedules import Watcher
from deeptwin.parity.serving import DIGITS, EOS, RIGHT, Serving, requests_of, schedule_of, serve_alone, vocabulary_of
from deeptwin.parity.toy_runner import ToyRunner, toy_logits
from deeptwin.reference.config import Draw, EngineKind, Finish, GrammarKind, GrammarRequest, SamplingParams

VOCAB = 61
TOY = Serving(generation="toy")


def asked(*prompt: int, tokens: int = 6, seed: int = 1, **more: Any) -> Generate:
    """A request of a prompt; what `SamplingParams` knows goes there."""
    own = {name: more.pop(name) for name in ("stops", "grammar", "forced") if name in more}
    return Generate(prompt=prompt, params=SamplingParams(seed=seed, max_tokens=tokens, **more), **own)


def engine_of(requests: Sequence[Generate] = (), *, runner: Any = None, **given: Any) -> Engine:
    """An engine on the toy in which these requests fit; `given` are limits of the scheduler, or `store`."""
    wide = [*requests, asked(*range(4, 24), tokens=12), asked(*range(4, 24), tokens=12)]
    store, vocabulary, kind = given.pop("store", None), given.pop("vocabulary", True), given.pop("kind", Engine)
    limits = replace(schedule_of(replace(TOY, gamma=given.get("gamma", 0)), wide), **given)
    config = EngineConfig(
        scheduler=limits,
        sampling=Sampling(draw=Draw.NVIDIA, greedy=Greedy.ARGMAX, eos=EOS),
        prefix=None if store is None else exact_reuse("toy", block=16),
        vocabulary=vocabulary_of(VOCAB) if vocabulary else None,
    )
    toy = ToyRunner(
        plan_of("v3", "reference"), vocab=VOCAB, pages=limits.num_blocks, states=config.states, page_tokens=16
    )
    drafter = ScriptedDrafter({}, quality=50, gamma=limits.gamma, vocab=VOCAB) if limits.gamma else None
    made: Engine = kind(toy if runner is None else runner(toy), drafter or NoDrafter(vocab=VOCAB), config, store=store)
    return made


def only(request: Generate, **given: Any) -> Generation:
    """What one request gets."""
    (done,) = engine_of([request], **given).generate([request])
    return done


def is_clean(engine: Engine) -> bool:
    """Nothing of any request is left: pages, state slots, jobs, tracks."""
    pages = sorted(engine.rank.state.free) == list(range(1, engine.config.scheduler.num_blocks))
    slots = sorted(engine.device.slots) == list(range(1, engine.config.states))
    return pages and slots and not engine.open and not engine.device.tracks and not engine.device.jobs


MANY = [asked(*range(4 + i, 9 + 3 * i), seed=i, tokens=5 + i, temperature=0.5 * (i % 3)) for i in range(6)]


# properties of the reference


def test_requests_get_what_they_get_alone() -> None:
    engine = engine_of(MANY)
    found = engine.generate(MANY)
    inputs = {
        "prompt_bs": torch.tensor([[*r.prompt, *[0] * (24 - len(r.prompt))] for r in MANY], dtype=torch.int32),
        "length_b": torch.tensor([len(r.prompt) for r in MANY]),
        "max_tokens_b": torch.tensor([r.params.max_tokens for r in MANY]),
        "arrival_b": torch.zeros(len(MANY), dtype=torch.int64),
        "temperature_b": torch.tensor([r.params.temperature for r in MANY]),
        "top_p_b": torch.ones(len(MANY)),
        "seed_b": torch.tensor([r.params.seed for r in MANY]),
    }
    token_bn, logprob_bn, _ = serve_alone(**inputs, serving=TOY)
    for b, done in enumerate(found):
        assert done.tokens == token_bn[b, : len(done.tokens)].tolist()
        assert done.logprobs == logprob_bn[b, : len(done.tokens)].tolist()
        assert (token_bn[b, len(done.tokens) :] == -1).all()
    assert is_clean(engine)


def test_events_are_the_answer_in_parts() -> None:
    events: list[Event] = []
    engine = engine_of(MANY)
    found = engine.generate(MANY, hear=events.append)
    for done in found:
        own = [event for event in events if event.id == done.id]
        assert [token for event in own for token in event.tokens] == done.tokens
        assert [event.finish is not Finish.OPEN for event in own] == [False] * (len(own) - 1) + [True]
    assert engine.counts["prompt_rows"] == sum(len(r.prompt) for r in MANY)


def test_streams_give_what_generate_gives_and_seeds_count() -> None:
    async def heard(engine: Engine, request: Generate) -> list[int]:
        return [token async for event in engine.stream(request) for token in event.tokens]

    async def together(engine: Engine, requests: list[Generate]) -> list[list[int]]:
        return await asyncio.gather(*(heard(engine, request) for request in requests))

    engine = engine_of(MANY)
    assert asyncio.run(together(engine, MANY)) == [done.tokens for done in engine_of(MANY).generate(MANY)]
    assert is_clean(engine)
    seeded = [asked(5, 6, 7, seed=seed) for seed in (1, 2, 1)]
    one, two, again = asyncio.run(together(engine, seeded))
    assert one == again != two


def test_who_stops_listening_aborts_its_own_request_alone() -> None:
    async def run(engine: Engine) -> list[int]:
        async def first(request: Generate) -> None:
            stream = engine.stream(request)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]

        async def whole(request: Generate) -> list[int]:
            return [token async for event in engine.stream(request) for token in event.tokens]

        left, _ = await asyncio.gather(whole(MANY[5]), first(asked(4, 5, tokens=40, ignore_eos=True)))
        while engine.has_work:
            engine.step()
        return left

    engine = engine_of([*MANY, asked(4, 5, tokens=40)])
    assert asyncio.run(run(engine)) == only(MANY[5]).tokens
    assert is_clean(engine)


class _Wrong:
    """A runner that raises at its third forward, or gives NaN for some token."""

    def __init__(self, runner: ToyRunner, *, fails: bool = False, bad: int = -1) -> None:
        self.runner, self.left, self.bad = runner, 3 if fails else -1, bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def forward(self, token_t: Tensor, *given: Any, **named: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise OSError("the device is gone")
        self.last_t = token_t
        return self.runner.forward(token_t, *given, **named)

    def head(self, hidden_ym: Tensor) -> Tensor:
        logits_yv = self.runner.head(hidden_ym)
        if len(self.last_t) == len(logits_yv):
            logits_yv[self.last_t == self.bad] = torch.nan
        return logits_yv


def test_an_exception_reaches_everybody_who_listens() -> None:
    async def heard(engine: Engine, request: Generate) -> str:
        try:
            async for _ in engine.stream(request):
                pass
        except OSError as error:
            return str(error)
        return "nothing"

    async def together(engine: Engine) -> list[str]:
        return await asyncio.gather(*(heard(engine, replace_limit(request)) for request in MANY[:3]))

    def replace_limit(request: Generate) -> Generate:
        return replace(request, params=replace(request.params, ignore_eos=True, max_tokens=6))

    engine = engine_of(MANY, runner=lambda toy: _Wrong(toy, fails=True))
    assert asyncio.run(together(engine)) == ["the device is gone"] * 3


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    first = only(asked(4, 5, 6, temperature=0.0, tokens=1)).tokens[0]
    bad = asked(4, 5, 6, temperature=0.0)
    others = (asked(30, i, temperature=0.0) for i in range(4, VOCAB))
    good = next(other for other in others if first not in only(other).tokens)  # which never meets the bad row
    engine = engine_of([bad, good], runner=lambda toy: _Wrong(toy, bad=first))
    failed, done = engine.generate([bad, good])
    assert (failed.finish, failed.failure) == (Finish.FAILED, "no token can be drawn: INVALID")
    assert done.tokens == only(good).tokens
    assert is_clean(engine)


# ends


def first_is_eos() -> tuple[int, ...]:
    """A prompt behind which the end token has the largest logit."""
    for a in range(4, VOCAB):
        for b in range(4, VOCAB):
            if int(toy_logits([a, b], vocab=VOCAB)[-1].argmax()) == EOS:
                return a, b
    raise AssertionError("the toy never ends")


def test_ends_of_every_kind() -> None:
    prompt = first_is_eos()
    assert only(asked(*prompt, temperature=0.0)).tokens == [EOS]
    assert only(asked(*prompt, temperature=0.0)).finish is Finish.STOP
    without = only(asked(*prompt, temperature=0.0, first_token_no_eos=True))
    assert without.tokens[0] == int(toy_logits(prompt, vocab=VOCAB)[-1].index_fill(0, torch.tensor(EOS), -9).argmax())
    through = only(asked(*prompt, temperature=0.0, ignore_eos=True, tokens=4))
    assert (through.tokens[0], len(through.tokens), through.finish) == (EOS, 4, Finish.LENGTH)
    for limit in (0, 1):  # 0 counts as 1
        one = only(asked(4, 5, tokens=limit, ignore_eos=True))
        assert (len(one.tokens), one.finish) == (1, Finish.LENGTH)
    plain = only(asked(4, 5, 6, tokens=8, temperature=0.0, ignore_eos=True)).tokens
    for place in (0, 3):
        stop = plain[place]
        stopped = only(asked(4, 5, 6, tokens=8, temperature=0.0, ignore_eos=True, stops=(stop,)), gamma=2 * (place > 0))
        assert (stopped.tokens, stopped.finish) == (plain[: plain.index(stop) + 1], Finish.STOP)


def test_a_prompt_that_never_fits_is_ignored() -> None:
    long = asked(*[5] * 40)
    engine = engine_of(max_prompt=30)
    ignored, done = engine.generate([long, MANY[0]])
    assert (ignored.finish, ignored.tokens) == (Finish.IGNORED, [])
    assert done.tokens == only(MANY[0]).tokens
    assert is_clean(engine)


@pytest.mark.parametrize("stops", [False, True])
def test_one_request_that_needs_more_pages_than_there_are_ends(stops: bool) -> None:
    long = asked(*range(4, 24), tokens=60, ignore_eos=True, temperature=0.0)
    engine = engine_of([long], num_blocks=4, stop_on_preempt=stops)
    (done,) = engine.generate([long])
    assert done.finish is (Finish.RESOURCES if stops else Finish.IGNORED)
    assert 0 < len(done.tokens) < 60
    assert done.tokens == only(long).tokens[: len(done.tokens)]
    assert is_clean(engine)


def test_preempted_requests_get_the_same() -> None:
    requests = [asked(*range(4, 20), seed=i, tokens=30, ignore_eos=True) for i in range(3)]
    engine = engine_of(requests, num_blocks=7)
    assert [done.tokens for done in engine.generate(requests)] == [only(request).tokens for request in requests]
    assert engine.counts["prompt_rows"] > sum(len(r.prompt) for r in requests)  # some were computed twice


# aborts


@pytest.mark.parametrize("asynchronous", [False, True])
def test_aborts_at_any_time_leave_nothing(asynchronous: bool) -> None:
    limits = {"max_requests": 2, "asynchronous": asynchronous, "gamma": 2}
    requests = [asked(*range(4, 14), seed=i, tokens=12, ignore_eos=True) for i in range(3)]
    for steps in (0, 1, 2, 3, 6):
        engine = engine_of(requests, **limits)
        ids = [engine.submit(request) for request in requests]
        opened = dict(engine.open)
        for _ in range(steps):
            engine.step()
        for request_id in ids[1:]:  # one runs or waits, one waits
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        assert [opened[i].finish for i in ids] == [Finish.LENGTH, Finish.ABORTED, Finish.ABORTED]
        assert opened[0].tokens == only(requests[0], **limits).tokens
        for request_id in ids:
            engine.abort(request_id)  # it has ended: nothing happens
        engine.step()
        assert is_clean(engine)
        assert opened[0].finish is Finish.LENGTH


def test_a_request_is_aborted_while_its_grammar_is_compiled() -> None:
    engine = engine_of()
    request_id = engine.submit(asked(4, 5, grammar=DIGITS))
    opened = engine.open[request_id]
    engine.abort(request_id)
    assert [(event.id, event.finish) for event in engine.step()] == [(request_id, Finish.ABORTED)]
    assert opened.finish is Finish.ABORTED
    assert is_clean(engine)


# grammars


def test_grammars_that_are_wrong_or_leave_no_token_fail_alone() -> None:
    wrong = asked(4, 5, grammar=GrammarRequest(kind=GrammarKind.REGEX, schema="["))
    nothing = asked(4, 6, grammar=GrammarRequest(kind=GrammarKind.REGEX, schema="\x7f"))  # no token of the vocabulary
    right = asked(4, 7, tokens=5, grammar=DIGITS)
    engine = engine_of()
    one, two, three, free = engine.generate([wrong, nothing, right, MANY[1]])
    assert (one.finish, two.finish) == (Finish.FAILED, Finish.FAILED)
    assert "schema: expected regex" in one.failure
    assert two.failure == "the grammar leaves no token"
    assert not one.tokens
    assert not two.tokens
    assert all(4 <= token < 14 or token == EOS for token in three.tokens)
    assert free.tokens == only(MANY[1]).tokens
    assert is_clean(engine)


# scores and prefixes


def test_forced_tokens_are_scored() -> None:
    prompt, forced = (4, 9, 17), (30, 12, 55, 4)
    for gamma in (0, 2):
        done = only(asked(*prompt, tokens=4, forced=forced, ignore_eos=True), gamma=gamma)
        logits_tv = toy_logits([*prompt, *forced], vocab=VOCAB)[len(prompt) - 1 : -1]
        expected_t = logits_tv.double().log_softmax(1)[torch.arange(4), torch.tensor(forced)]
        assert done.tokens == list(forced)
        assert torch.allclose(torch.tensor(done.logprobs).double(), expected_t, rtol=0, atol=1e-6)


def test_a_second_engine_takes_prefixes_from_a_folder(tmp_path: Path) -> None:
    request = asked(*range(4, 44), tokens=5)
    first, second = (only(request, store=PrefixStore(tmp_path)) for _ in range(2))
    assert (first.reused, second.reused) == (0, 32)
    assert (second.tokens, second.logprobs) == (first.tokens, first.logprobs)
    assert first.tokens == only(request).tokens
    shorter = asked(*range(4, 30), tokens=5)
    assert only(shorter, store=PrefixStore(tmp_path)).tokens == only(shorter).tokens


class _Watched(Engine):
    """An engine that a watcher looks at behind every step."""

    watcher = Watcher()

    def _watched(self, rank: Rank, plan: StepPlan) -> None:
        super()._watched(rank, plan)
        self.watcher(rank, plan)


def test_random_traffic_with_aborts_breaks_no_rule() -> None:
    rng = np.random.default_rng(5)
    for n in range(4):
        _Watched.watcher = Watcher()
        requests = [
            asked(*rng.integers(4, VOCAB, rng.integers(1, 30)).tolist(), seed=i, tokens=int(rng.integers(1, 14)))
            for i in range(12)
        ]
        limits = {"gamma": n, "asynchronous": bool(n % 2), "num_blocks": 12, "max_requests": 3 + n, "budget": 11}
        engine = engine_of(requests, kind=_Watched, store=MemoryStore() if n > 1 else None, **limits)
        aborted, opened = set(), {}
        for request in requests:
            name = engine.submit(request)
            opened[name] = engine.open[name]
            engine.step()
            if rng.random() < 0.3:
                aborted.add(int(rng.integers(0, name + 1)))
                engine.abort(max(aborted))
        while engine.has_work:
            engine.step()
        assert _Watched.watcher.faults == []
        assert is_clean(engine)
        assert {i for i, done in opened.items() if done.finish is Finish.ABORTED} <= aborted
        assert all(done.finish is not Finish.OPEN for done in opened.values())


# faults


def test_every_mutant_has_a_case_and_an_axis() -> None:
    cases = SERVE.cases(False)
    relations = {relation.name: relation for relation in SERVE.relations}
    assert len({mutant.entry for mutant in SERVE.mutants}) == len(SERVE.mutants) == 17
    for mutant in SERVE.mutants:
        chosen = [case for case in cases if mutant.only(case)]
        assert any(relations[mutant.axis].only(case) for case in chosen), mutant.name


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_step_is_found_where_it_begins(name: str) -> None:
    fault = FAULTS[name]
    one, position = first_difference(fault, PARTS[name])
    assert one is not None
    assert (one.stage.name, position) == (fault.stage, fault.position)


@pytest.mark.parametrize("name", ["split_by_batch", "third_token_lost"])
def test_right_parts_differ_nowhere(name: str) -> None:
    assert first_difference(FAULTS[name], RIGHT) == (None, -1)


# rejected input


def test_requests_that_cannot_be_served_are_refused() -> None:
    engine = engine_of(vocabulary=False)
    for request in (asked(), asked(VOCAB), asked(-1), asked(4, stops=(VOCAB,)), asked(4, forced=(VOCAB,))):
        with pytest.raises(ValueError, match="^request: expected a prompt of tokens below 61"):
            engine.submit(request)
    with pytest.raises(ValueError, match="^request: expected an engine with a vocabulary"):
        engine.submit(asked(4, grammar=DIGITS))
    assert not engine.has_work
    with pytest.raises(ValueError, match="^request"):
        engine.generate([asked()])
    with pytest.raises(ValueError, match="^request"):
        asyncio.run(anext(engine.stream(asked())))  # type: ignore[arg-type]


def test_engines_that_do_not_fit_together_are_refused() -> None:
    engine = engine_of()
    drafter, config, runner = NoDrafter(vocab=VOCAB), engine.config, engine.device.runner
    for changed in ({"ranks": 2}, {"engine": EngineKind.PROMPT}):
        with pytest.raises(ValueError, match="^config: expected one rank that decodes"):
            Engine(runner, drafter, replace(config, scheduler=replace(config.scheduler, **changed)))
    with pytest.raises(ValueError, match="^drafter: expected one of 2 drafts"):
        Engine(runner, drafter, replace(config, scheduler=replace(config.scheduler, gamma=2)))
    with pytest.raises(ValueError, match="^runner: expected pages of 8 tokens"):
        Engine(runner, drafter, replace(config, scheduler=replace(config.scheduler, block_size=8)))
    with pytest.raises(ValueError, match="^config: expected blocks of 16 tokens"):
        Engine(runner, drafter, replace(config, prefix=exact_reuse("toy", block=8)))


def test_a_device_that_knows_other_tokens_is_noticed() -> None:
    engine = engine_of(MANY)
    ids = [engine.submit(request) for request in MANY[:2]]
    engine.step()
    (track,) = [engine.device.tracks[i] for i in ids if i in engine.device.tracks][:1]
    track.tokens.append(5)
    with pytest.raises(RuntimeError, match=r"^request \d: a row at"):
        engine.generate([MANY[2]])


def test_prompts_outside_the_vocabulary_are_no_requests() -> None:
    one = torch.ones(1)
    columns = {"length_b": one.long(), "max_tokens_b": one.long(), "temperature_b": one, "top_p_b": one}
    with pytest.raises(ValueError, match="^prompt_bs: expected tokens below 61"):
        requests_of(torch.tensor([[VOCAB]], dtype=torch.int32), seed_b=one.long(), **columns, serving=TOY)
