"""The offline engine: requests in, tokens out, over any generation of the model, in batches that change every step.

An engine is a scheduler, which decides what a step computes, and a device, which computes it with the functions that
its plan names. Nothing about other requests enters the tokens of one: with candidates that keep rows apart, what a
request gets depends on its prompt, its parameters and its seed alone.

    engine = Engine(runner, NoDrafter(vocab=runner.vocab), config)
    for done in engine.generate([Generate(prompt=(1, 2, 3), params=SamplingParams(seed=7, max_tokens=16))]):
        print(done.tokens)

`stream` gives the same tokens one after the other to an asynchronous caller.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from deeptwin.reference.config import (
    EngineKind,
    Finish,
    GrammarRequest,
    PrefixConfig,
    SamplingParams,
    SchedulerConfig,
    Vocabulary,
)
from deeptwin.reference.taps import Tap, ignore

from .drafter import Drafter
from .engine_device import Job, ModelDevice, Sampling
from .engine_store import NO_HIT, MemoryStore, PrefixReuse, Store
from .grammar_pool import GrammarPool
from .scheduler import Rank, Ranks, Request, Result, Scheduler, StepPlan
from .steps import Runner
from .structured_output import Automaton

COMPILE_POLL = 0.001  # seconds, while nothing but grammars is being worked on


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is apart from its model: scheduling, drawing, reuse of prefixes, grammars."""

    scheduler: SchedulerConfig
    sampling: Sampling
    prefix: PrefixConfig | None = None
    vocabulary: Vocabulary | None = None  # needed by requests with a grammar

    @property
    def states(self) -> int:
        """State slots that a runner needs: running requests, as many with a part of their prompt done, and nobody's."""
        return 2 * self.scheduler.max_requests + 1


@dataclass(frozen=True, kw_only=True)
class Generate:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    stops: tuple[int, ...] = ()  # tokens that end it, beside the end token
    grammar: GrammarRequest | None = None
    forced: tuple[int, ...] = ()  # tokens that come whatever is drawn: their log-probabilities are a score


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one step brought a request; `finish` is OPEN until its last event."""

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    failure: str = ""


@dataclass(kw_only=True)
class Generation:
    """What a request got, in the end; log-probabilities are those that the tokens were drawn with."""

    id: int
    request: Generate
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = Finish.OPEN
    failure: str = ""
    reused: int = 0  # tokens of the prompt that came from an earlier one


class Engine:
    """Serves requests with one model.

    Raises:
        ValueError: the drafter or the pages of the runner are not those of the scheduler's configuration; several
            ranks; an engine that hands its prompts over.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        config: EngineConfig,
        *,
        store: Store | None = None,
        scheduler: type[Scheduler] = Scheduler,
        device: type[ModelDevice] = ModelDevice,
        tap: Tap = ignore,
    ) -> None:
        limits = config.scheduler
        if limits.ranks != 1 or limits.engine is not EngineKind.NORMAL:
            raise ValueError(f"config: expected one rank that decodes, got {limits.ranks} of kind {limits.engine.name}")
        self.config = config
        self.reuse = None
        if config.prefix is not None:
            self.reuse = PrefixReuse(config.prefix, MemoryStore() if store is None else store, runner, drafter)
        self.device = device(runner, drafter, config.sampling, limits, states=config.states, reuse=self.reuse, tap=tap)
        plans = scheduler(limits, config.sampling.eos)
        self.rank = Rank(scheduler=plans, device=self.device, state=plans.start())
        self.ranks = Ranks([self.rank])
        self.open: dict[int, Generation] = {}
        self.counts: Counter[str] = Counter()  # steps, rows, drafts and so on, for whoever reports
        self.grammars = None if config.vocabulary is None else GrammarPool(config.vocabulary)
        self.next_id = 0
        self.queues: dict[int, asyncio.Queue[Event | BaseException]] = {}
        self.driver: asyncio.Task[None] | None = None

    # requests

    def submit(self, request: Generate) -> int:
        """Take a request; its number. It waits for its grammar to be compiled, then for its turn.

        Raises:
            ValueError: the prompt is empty or has a token outside the vocabulary, or a grammar was asked for and the
                engine has no vocabulary.
        """
        vocab = self.device.runner.vocab
        given = (*request.prompt, *request.stops, *request.forced)
        outside = [token for token in given if not 0 <= token < vocab]
        if not request.prompt or outside:
            raise ValueError(f"request: expected a prompt of tokens below {vocab}, got {outside or 'an empty one'}")
        if request.grammar is not None and self.grammars is None:
            raise ValueError("request: expected an engine with a vocabulary for a grammar, got one without")
        request_id, self.next_id = self.next_id, self.next_id + 1
        self.open[request_id] = Generation(id=request_id, request=request)
        if request.grammar is None or self.grammars is None:
            self._arrive(request_id, None)
        else:
            self.grammars.submit(request_id, request.grammar)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request that is open; one that is not stays as it is."""
        if request_id in self.rank.state.requests:
            self.rank.state = self.rank.scheduler.abort(self.rank.state, request_id)
        elif self.grammars is not None and request_id in self.grammars.pending:
            self.grammars.drop(request_id)
            self.open[request_id].finish = Finish.ABORTED

    def _arrive(self, request_id: int, automaton: Automaton | None) -> None:
        done = self.open[request_id]
        prompt, params = done.request.prompt, done.request.params.drawn
        hit = NO_HIT if self.reuse is None else self.reuse.find(prompt)
        boundary = 0 if self.reuse is None else self.reuse.boundary(len(prompt))
        done.reused = hit.tokens
        self.device.jobs[request_id] = Job(
            prompt=prompt,
            params=done.request.params,
            hit=hit,
            boundary=boundary,
            automaton=automaton,
            forced=done.request.forced,
        )
        ends = () if params.ignore_eos else (self.config.sampling.eos,)
        request = Request(
            id=request_id,
            tokens=prompt,
            prompt=len(prompt),
            max_tokens=params.max_tokens,
            committed=hit.tokens,
            is_constrained=automaton is not None,
            stops=(*ends, *done.request.stops),
            boundary=boundary,
        )
        self.rank.state = self.rank.scheduler.arrive(self.rank.state, request)

    # steps

    @property
    def has_work(self) -> bool:
        """Whether a request is open."""
        return bool(self.open)

    def step(self) -> list[Event]:
        """One step of the scheduler, and what became known by it.

        Raises:
            RuntimeError: scheduler and device disagree about a request.
        """
        self._compiled()
        settled: list[tuple[StepPlan, dict[int, Result]]] = []
        if self.ranks.has_work:
            (settled,) = self.ranks.step(self._watched)
        elif self.open and self.grammars is not None and self.grammars.pending:
            time.sleep(COMPILE_POLL)
        self._failed()
        events = self._events(settled)
        state = self.rank.state
        self.device.retain({i for i, request in state.requests.items() if request.blocks})
        return events

    def generate(
        self, requests: Sequence[Generate], *, hear: Callable[[Event], None] = lambda event: None
    ) -> list[Generation]:
        """Serve requests to their end; `hear` gets every event on the way.

        Raises:
            ValueError: as `submit`.
            RuntimeError: as `step`.
        """
        mine = [self.open[self.submit(request)] for request in requests]
        while any(done.id in self.open for done in mine):
            for event in self.step():
                hear(event)
        return mine

    async def stream(self, request: Generate) -> AsyncIterator[Event]:
        """The events of one request as they come; whoever stops listening aborts it.

        Raises:
            ValueError: as `submit`.
            RuntimeError: as `step`.
        """
        request_id = self.submit(request)
        queue = self.queues[request_id] = asyncio.Queue()
        if self.driver is None or self.driver.done():
            self.driver = asyncio.create_task(self._drive())
        try:
            while True:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.finish is not Finish.OPEN:
                    return
        finally:
            del self.queues[request_id]
            self.abort(request_id)

    async def _drive(self) -> None:
        """Steps for as long as somebody listens."""
        try:
            while self.queues and self.open:
                for event in self.step():
                    if event.id in self.queues:
                        self.queues[event.id].put_nowait(event)
                await asyncio.sleep(0)
        except BaseException as error:  # the listeners have to know, whatever it is
            for queue in self.queues.values():
                queue.put_nowait(error)

    def _compiled(self) -> None:
        """Requests whose grammar is done enter the queue; those whose grammar is wrong have failed."""
        for entry in [] if self.grammars is None else self.grammars.finished():
            request_id = entry.name
            assert isinstance(request_id, int)
            if entry.failure:
                self.open[request_id].failure = entry.failure
                self.open[request_id].finish = Finish.FAILED
                continue
            history = self.config.scheduler.gamma + 2
            vocabulary = self.config.vocabulary
            assert vocabulary is not None
            automaton = Automaton(vocabulary, entry.request, history=history, grammar=entry.grammar)
            self._arrive(request_id, automaton)

    def _watched(self, rank: Rank, plan: StepPlan) -> None:
        self.counts[f"{plan.kind.name.lower()}_steps"] += bool(plan.items)
        self.counts[f"{plan.kind.name.lower()}_rows"] += sum(item.rows for item in plan.items)

    def _failed(self) -> None:
        """What cannot go on, be it for its grammar or for its logits, ends."""
        for request_id, job in self.device.jobs.items():
            if job.failure and self.open[request_id].finish is Finish.OPEN:
                self.open[request_id].failure = job.failure
                self.rank.state = self.rank.scheduler.end(self.rank.state, request_id, Finish.FAILED)

    def _events(self, settled: Sequence[tuple[StepPlan, dict[int, Result]]]) -> list[Event]:
        """New tokens and ends of all requests, in the order of their numbers."""
        state = self.rank.state
        logprobs: dict[int, list[float]] = {}
        for _, results in settled:
            for request_id, result in results.items():
                logprobs.setdefault(request_id, []).extend(result.logprobs)
                self.counts["accepted"] += result.accepted
        events = []
        for request_id, done in list(self.open.items()):
            request = state.requests.get(request_id)
            if request is not None and done.finish is Finish.OPEN:
                done.finish = request.finish if request_id not in state.waiting else Finish.OPEN
            tokens = () if request is None or done.failure else request.tokens[request.prompt + len(done.tokens) :]
            own = tuple(logprobs.get(request_id, ())[: len(tokens)])
            done.tokens += tokens
            done.logprobs += own
            if tokens or done.finish is not Finish.OPEN:
                events.append(
                    Event(id=request_id, tokens=tokens, logprobs=own, finish=done.finish, failure=done.failure)
                )
            if done.finish is not Finish.OPEN:
                self._close(request_id)
        self._forget()
        return events

    def _close(self, request_id: int) -> None:
        del self.open[request_id]
        self.device.jobs.pop(request_id, None)

    def _forget(self) -> None:
        """Requests that have ended leave the state, once no step in flight has rows of theirs."""
        flying = {item.id for plan, _ in self.rank.pending for item in plan.items}
        state = self.rank.state
        kept = {i: r for i, r in state.requests.items() if i in self.open or i in flying}
        if len(kept) < len(state.requests):
            self.rank.state = replace(state, requests=kept)
