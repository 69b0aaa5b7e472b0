"""Steps of a serving engine, fast; the contract is `reference/scheduler.py`.

The rules of one step work on columns. `Scheduler` is built on them: every method takes a state and returns the next
one, nothing is changed in place. `streams_stepwise` lets ranks of schedulers serve requests with a toy model whose keys
lie in blocks, so that a wrong slot, a lost token or a late correction changes the tokens that come out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from deeptwin.reference.config import (
    EngineKind,
    Fate,
    Finish,
    ModelCost,
    RunningBatch,
    SchedulerConfig,
    StepKind,
    ToyModel,
    WaitingQueue,
)
from deeptwin.reference.serving_checks import (
    expect_queue,
    expect_running,
    expect_spans,
    expect_traffic,
    expect_votes,
)

NO_RATES = ((-1, ()), (-1, ()))  # of no step
TRUSTED = 0.5  # a draft whose survival reaches this is worth a row: the toy's performance curve


def prefill_step_vectorised(
    queue: WaitingQueue, *, free: int, running: int, config: SchedulerConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.scheduler.prefill_step`: runs of requests that are prefilled to the end are taken at once.

    Raises:
        TypeError: a column has another dtype.
        ValueError: shapes disagree, a request has nothing to prefill, or the first chunk would be empty.
    """
    expect_queue(queue)
    total = queue.total_w.long()
    blocks = (total + config.reserve + config.block_size - 1) // config.block_size
    ignored = (total > config.max_prompt) | (blocks >= config.num_blocks)
    gone = queue.has_ended_w | ignored
    fate = torch.where(queue.has_ended_w, int(Fate.DROPPED), torch.where(ignored, int(Fate.IGNORED), int(Fate.STAYS)))
    kept = (~gone).nonzero()[:, 0]
    chunk = torch.zeros_like(total)
    taken, unfinished, end = _take_chunks(queue, kept, blocks, chunk, (free, running), config)
    fate[taken] = int(Fate.RUNS)
    # what leaves does so only up to where the step ended
    fate[end:] = torch.where(fate[end:] == int(Fate.RUNS), fate[end:], int(Fate.STAYS))
    stays = (fate == int(Fate.STAYS)).nonzero()[:, 0]
    waiting = torch.cat([torch.tensor(unfinished[::-1], dtype=torch.int64), stays])
    order = torch.full_like(total, -1)
    order[: len(waiting)] = waiting
    return fate.to(torch.int32), chunk.to(torch.int32), order.to(torch.int32)


def _take_chunks(
    queue: WaitingQueue,
    kept: Tensor,
    blocks: Tensor,
    chunk: Tensor,
    room: tuple[int, int],
    config: SchedulerConfig,
) -> tuple[list[int], list[int], int]:
    """Fill `chunk`; who was taken, who of them is unfinished, and the place at which the step ended."""
    total, done, unit = queue.total_w.long()[kept], queue.done_w.long()[kept], config.alignment
    left, boundary = total - done, queue.boundary_w.long()[kept]
    more = blocks[kept] - queue.held_w.long()[kept]
    whole_cost = (left + unit - 1) // unit * unit
    is_cut = (boundary > done) & (boundary < total)
    free, running = room
    used = keys = at = 0
    taken: list[int] = []
    unfinished: list[int] = []
    while at < len(kept):
        rest = slice(at, None)
        count = torch.arange(len(kept) - at)
        barred = ~queue.is_ready_w[kept[rest]] | (more[rest].cumsum(0) > free)
        barred |= (keys + total[rest].cumsum(0) > config.max_keys) | (running + count >= config.max_requests)
        before = used + whole_cost[rest].cumsum(0) - whole_cost[rest]
        partial = is_cut[rest] | (left[rest] > (config.budget - before) // unit * unit)
        run = _first(barred | partial)
        whole = slice(at, at + run)
        chunk[kept[whole]] = left[whole]
        taken += kept[whole].tolist()
        free, keys, used = _spent((free, keys, used), more[whole], total[whole], whole_cost[whole])
        running, at = running + run, at + run
        if at == len(kept) or barred[run]:
            break
        tokens = _cut_chunk(queue, int(kept[at]), used, config)
        if tokens < left[at] and not config.chunked:
            break
        if tokens <= 0:
            if not used:
                raise ValueError(f"config: expected a budget for request {int(kept[at])}, got {config.budget}")
            break
        one = slice(at, at + 1)
        cost = torch.tensor([config.aligned(tokens)])
        free, keys, used = _spent((free, keys, used), more[one], total[one], cost)
        chunk[kept[at]] = tokens
        taken.append(int(kept[at]))
        is_whole = tokens == int(left[at])
        running, at = running + is_whole, at + 1
        if not is_whole:
            unfinished.append(taken[-1])
            if config.engine is EngineKind.NORMAL:
                return taken, unfinished, taken[-1] + 1
    return taken, unfinished, int(kept[at]) if at < len(kept) else len(chunk)


def _first(flags: Tensor) -> int:
    found = flags.nonzero()
    return int(found[0]) if len(found) else len(flags)


def _spent(have: tuple[int, int, int], blocks: Tensor, total: Tensor, cost: Tensor) -> tuple[int, int, int]:
    free, keys, used = have
    return free - int(blocks.sum()), keys + int(total.sum()), used + int(cost.sum())


def _cut_chunk(queue: WaitingQueue, place: int, used: int, config: SchedulerConfig) -> int:
    """Tokens of a chunk that ends at the budget, at a boundary, or at an image."""
    total, done = int(queue.total_w[place]), int(queue.done_w[place])
    room = config.budget - used
    end = min(total, done + room - room % config.alignment)
    boundary = int(queue.boundary_w[place])
    end = boundary if done < boundary < end else end
    image = queue.image_wi[place].long()
    split = ((image[:, 0] < end) & (end < image[:, 1])).nonzero()
    if len(split):
        first, last = image[split[0, 0]].tolist()
        end = last if used == 0 and config.aligned(last - done) <= config.budget else first
    return end - done


def decode_step_vectorised(
    batch: RunningBatch, *, free: int, config: SchedulerConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.scheduler.decode_step`: how many victims each request needs is looked up in their running sum.

    Raises:
        TypeError: a column has another dtype.
        ValueError: shapes disagree, or a request grew by more than one block.
    """
    expect_running(batch, config)
    count, total, held = len(batch.total_r), batch.total_r.long(), batch.held_r.long()
    need = (total + config.reserve + config.block_size - 1) // config.block_size
    by_output = batch.output_r.long().argsort(descending=True, stable=True)
    shortest = by_output.flip(0)
    # blocks free before a request's turn if nobody is preempted, and what preempting v requests would give back
    grown = (need - held)[shortest]
    before = free - (grown.cumsum(0) - grown)
    returned = held[by_output].cumsum(0)
    victims = torch.searchsorted(returned, 1 - before) + 1
    victims = torch.where(before >= 1, 0, victims).cummax(0).values if count else before
    runs = _first(torch.arange(count) + victims >= count)
    chosen, lost = shortest[:runs], by_output[: count - runs]
    # the last one left loses its blocks after all the others did
    fate = torch.empty(count, dtype=torch.int64)
    fate[chosen] = int(Fate.RUNS)
    stops = batch.is_constrained_r[lost] | config.stop_on_preempt
    fate[lost] = torch.where(stops, int(Fate.STOPPED), int(Fate.PREEMPTED))
    after = torch.zeros_like(held)
    after[chosen] = need[chosen]
    chosen = chosen.sort().values
    chosen = chosen[total[chosen].argsort(descending=True, stable=True)]
    order, lost_order = torch.full((2, count), -1).unbind(0)
    order[: len(chosen)], lost_order[: len(lost)] = chosen, lost
    results = (fate, after, order, lost_order)
    return tuple(x.to(torch.int32) for x in results)  # type: ignore[return-value]


def step_kinds_vectorised(ready_td: Tensor, free_td: Tensor, chosen_td: Tensor, *, config: SchedulerConfig) -> Tensor:
    """`reference.scheduler.step_kinds`: from one prompt step to the next in a leap.

    Raises:
        TypeError: flags are not bool or blocks not int32.
        ValueError: shapes disagree with one another or with config.ranks, or a pool has more free blocks than ids.
    """
    expect_votes(ready_td, free_td, chosen_td, config)
    has_work = ready_td & (10 * (config.num_blocks - free_td.long()) <= 9 * config.num_blocks)
    everyone, anyone, confirmed = has_work.all(1), has_work.any(1), chosen_td.any(1)
    kind = torch.zeros(len(ready_td), dtype=torch.int32)
    start = 0
    while start < len(kind):
        since = torch.arange(len(kind) - start)
        asks_any = (since > 0) & (since % config.any_interval == 0)
        asks_all = ~asks_any & (since % config.all_interval == 0)
        wanted = (asks_any & anyone[start:]) | (asks_all & everyone[start:])
        start += _first(wanted & confirmed[start:])
        kind[start : start + 1] = int(StepKind.PROMPT)
        start += 1
    return kind


def step_flops_vectorised(
    start_b: Tensor, end_b: Tensor, total_b: Tensor, *, is_decode: bool, keep: int, cost: ModelCost
) -> Tensor:
    """`reference.scheduler.step_flops`: pairs as differences of two sums in closed form.

    Raises:
        TypeError: an input is not int32.
        ValueError: shapes disagree, an end lies before its start or beyond the total, or keep is negative.
    """
    expect_spans(start_b, end_b, total_b, keep)
    start, end, total = start_b.long(), end_b.long(), total_b.long()
    first = start
    if keep and not is_decode:
        first = torch.maximum(torch.minimum(torch.maximum(total - keep, start), end - 1), start)
    flops = (end - start if is_decode else (end - start).clamp(max=1)) * cost.head.per_row
    for layer in cost.layers:
        low = first if layer.is_consumer else start
        flops = flops + (end - low) * sum(gemm.per_row for gemm in layer.gemms)
        for pair in layer.pairs:
            met = _pairs_up_to(end, pair.ratio, pair.cap) - _pairs_up_to(low, pair.ratio, pair.cap)
            flops = flops + met * (pair.width * int(pair.precision))
    return flops


def _pairs_up_to(rows: Tensor, ratio: int, cap: int) -> Tensor:
    """Keys that the first `rows` rows meet together: a sum of floor(t / ratio), t from 1 on, each at most `cap`."""
    below = rows.clamp(max=ratio * cap) if cap else rows
    whole = below // ratio
    return ratio * whole * (whole - 1) // 2 + whole * (below - ratio * whole + 1) + (rows - below) * cap


# the scheduler: states in, states out


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the scheduler knows of a request; `rates`: of the step before last and of the last, with their steps."""

    id: int
    tokens: tuple[int, ...]
    prompt: int
    max_tokens: int
    committed: int = 0
    blocks: tuple[int, ...] = ()
    rates: tuple[tuple[int, tuple[float, ...]], ...] = NO_RATES
    has_drafts: bool = False
    scheduled: int = 0
    processed: int = 0
    finish: Finish = Finish.OPEN
    is_constrained: bool = False
    stops: tuple[int, ...] | None = None  # tokens that end it; None: the end token of the engine
    boundary: int = 0  # a position that no chunk of the prompt crosses, 0 if none

    @property
    def in_flight(self) -> int:
        """Steps that are scheduled and not processed; RuntimeError if the counters cannot be."""
        flying = self.scheduled - self.processed
        if flying not in (0, 1):
            raise RuntimeError(f"request {self.id}: {self.scheduled} steps scheduled, {self.processed} processed")
        return flying


@dataclass(frozen=True, kw_only=True)
class Item:
    """A request's part of a step. `keys` counts keys after the step, as far as the scheduler knows."""

    id: int
    rows: int
    keys: int
    blocks: tuple[int, ...]
    known: int = 0  # tokens of the request that a prompt chunk belongs to
    tokens: tuple[int, ...] = ()  # of a prompt chunk
    is_last: bool = True
    rates_of: tuple[int, int] = (-1, -1)  # steps whose rates chose the number of rows, and their distribution

    def first_position(self, accepted: Mapping[int, int], config: SchedulerConfig) -> int:
        """The position of its first row: its keys, less those of drafts that the step before did not accept.

        `accepted` are the drafts accepted in that step, if it decoded; the scheduler counts as if all were.
        """
        keys = self.keys
        if config.asynchronous and self.id in accepted:
            keys -= config.gamma - accepted[self.id]
        return keys - self.rows


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step of one rank."""

    step: int
    kind: StepKind
    items: tuple[Item, ...] = ()

    def verified_rows(self, rates: Mapping[int, Sequence[float]], config: SchedulerConfig) -> list[int]:
        """Rows of every request: with a step in flight the same total, given out by rates that the scheduler lacks.

        `rates` are those of the step before; a request that was not in it has none.
        """
        rows = [item.rows for item in self.items]
        if not (config.asynchronous and config.scheduled_verification):
            return rows
        nothing = (0.0,) * config.gamma
        return _allocated_rows([rates.get(item.id, nothing) for item in self.items], sum(rows) - len(rows))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of an item: tokens in order, the last one sampled behind `accepted` drafts, and new rates."""

    tokens: tuple[int, ...]
    accepted: int = 0
    rates: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()  # of the tokens, where the device computes any


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """Requests by id, the queues, and the free blocks in the order in which they are given out."""

    requests: Mapping[int, Request] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    free: tuple[int, ...] = ()

    def put(self, *requests: Request) -> EngineState:
        """The state with these requests in place of the older ones."""
        return replace(self, requests={**self.requests, **{request.id: request for request in requests}})

    def without(self, ids: Iterable[int]) -> EngineState:
        """The state in which these requests stand in no queue."""
        gone = set(ids)
        waiting = tuple(i for i in self.waiting if i not in gone)
        return replace(self, waiting=waiting, running=tuple(i for i in self.running if i not in gone))

    @property
    def has_open(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)


class Scheduler:
    """The step functions of one rank."""

    def __init__(self, config: SchedulerConfig, eos: int) -> None:
        self.config = config
        self.eos = eos

    def start(self) -> EngineState:
        """No request, every block free but the null block."""
        return EngineState(free=tuple(range(1, self.config.num_blocks)))

    def arrive(self, state: EngineState, request: Request) -> EngineState:
        """The request joins the end of the queue."""
        state = state.put(request)
        return replace(state, waiting=(*state.waiting, request.id))

    def abort(self, state: EngineState, request_id: int) -> EngineState:
        """A request that has not ended is ended; one that waits leaves the queue when the queue is next looked at."""
        request = state.requests[request_id]
        if request.finish is not Finish.OPEN:
            return state
        if request_id in state.waiting:
            return state.put(replace(request, finish=Finish.ABORTED))
        return self.end(state, request_id, Finish.ABORTED)

    def end(self, state: EngineState, request_id: int, finish: Finish) -> EngineState:
        """The request leaves its queue and gives its blocks back."""
        state = self.release(state, request_id).without([request_id])
        return state.put(replace(state.requests[request_id], finish=finish))

    def release(self, state: EngineState, request_id: int) -> EngineState:
        """Blocks of a request go back to the tail of the free list, the last one first."""
        request = state.requests[request_id]
        state = replace(state, free=(*state.free, *request.blocks[::-1]))
        return state.put(replace(request, blocks=()))

    def resize(self, state: EngineState, request_id: int, blocks: int) -> EngineState:
        """The request holds this many blocks: the head of the free list, or less of its own."""
        request = state.requests[request_id]
        more = blocks - len(request.blocks)
        if more < 0:
            state = replace(state, free=(*state.free, *request.blocks[blocks:][::-1]))
            return state.put(replace(request, blocks=request.blocks[:blocks]))
        taken, state = state.free[:more], replace(state, free=state.free[more:])
        return state.put(replace(request, blocks=(*request.blocks, *taken)))

    def preempt(self, state: EngineState, request_id: int) -> EngineState:
        """The request starts again from its tokens, at the front of the queue."""
        state = self.release(state, request_id).without([request_id])
        request = state.requests[request_id]
        fresh = replace(request, committed=0, rates=NO_RATES, has_drafts=False, scheduled=0, processed=0)
        return replace(state.put(fresh), waiting=(request_id, *state.waiting))

    def reclaim(self, state: EngineState) -> EngineState:
        """With nobody running and too little free for the head, those behind it give up their chunks, last first."""
        for request_id in state.waiting[:0:-1]:
            head = state.requests[state.waiting[0]]
            lacking = self.config.blocks_for(len(head.tokens)) - len(head.blocks) > len(state.free)
            if state.running or not lacking:
                break
            state = self.release(state, request_id)
            state = state.put(replace(state.requests[request_id], committed=0))
        return state

    def queue(self, state: EngineState) -> WaitingQueue:
        """The waiting requests as columns."""
        waiting = [state.requests[i] for i in state.waiting]
        ended = [request.finish is not Finish.OPEN for request in waiting]
        return WaitingQueue(
            total_w=_column(len(request.tokens) for request in waiting),
            done_w=_column(request.committed for request in waiting),
            held_w=_column(len(request.blocks) for request in waiting),
            is_ready_w=torch.ones(len(waiting), dtype=torch.bool),
            has_ended_w=torch.tensor(ended, dtype=torch.bool),
            boundary_w=_column(request.boundary for request in waiting),
            image_wi=torch.zeros(len(waiting), 0, 2, dtype=torch.int32),
        )

    def prompt_step(self, state: EngineState, step: int) -> tuple[EngineState, StepPlan]:
        """Chunks for the head of the queue."""
        state = self.reclaim(state)
        waiting, config = state.waiting, self.config
        fates, chunks, order = prefill_step_vectorised(
            self.queue(state), free=len(state.free), running=len(state.running), config=config
        )
        items = []
        for request_id, fate, tokens in zip(waiting, fates.tolist(), chunks.tolist(), strict=True):
            request = state.requests[request_id]
            if fate in (Fate.DROPPED, Fate.IGNORED):
                finish = request.finish if fate == Fate.DROPPED else Finish.IGNORED
                state = self.release(state, request_id).put(replace(request, blocks=(), finish=finish))
            elif fate == Fate.RUNS:
                state = self.resize(state, request_id, config.blocks_for(len(request.tokens)))
                end = request.committed + tokens
                item = Item(
                    id=request_id,
                    rows=tokens,
                    keys=end,
                    blocks=state.requests[request_id].blocks,
                    known=len(request.tokens),
                    tokens=request.tokens[request.committed : end],
                    is_last=end == len(request.tokens),
                )
                items.append(item)
        whole = tuple(item.id for item in items if item.is_last)
        left = tuple(waiting[place] for place in order.tolist() if place >= 0)
        state = replace(state, waiting=left, running=(*state.running, *whole))
        return state, StepPlan(step=step, kind=StepKind.PROMPT, items=tuple(items))

    def decode_step(self, state: EngineState, step: int) -> tuple[EngineState, StepPlan]:
        """Rows for the running requests; those for whom no block is left are preempted."""
        running, config = state.running, self.config
        requests = [state.requests[i] for i in running]
        batch = RunningBatch(
            output_r=_column(len(request.tokens) - request.prompt for request in requests),
            total_r=_column(len(request.tokens) for request in requests),
            held_r=_column(len(request.blocks) for request in requests),
            is_constrained_r=torch.tensor([request.is_constrained for request in requests], dtype=torch.bool),
        )
        fates, held, order, lost = decode_step_vectorised(batch, free=len(state.free), config=config)
        for place in [place for place in lost.tolist() if place >= 0]:
            if fates[place] == Fate.STOPPED:
                state = self.end(state, running[place], Finish.RESOURCES)
            else:
                state = self.preempt(state, running[place])
        places = [place for place in order.tolist() if place >= 0]
        for place in sorted(places, key=lambda place: int(held[place] - batch.held_r[place])):
            state = self.resize(state, running[place], int(held[place]))
        chosen = [running[place] for place in places]
        rows, made = self.verification(state, chosen)
        items = []
        for request_id, count in zip(chosen, rows, strict=True):
            request = state.requests[request_id]
            # keys as if every row of the step in flight was accepted; the device takes back what was not
            keys = request.committed + request.in_flight * (config.gamma + 1) + count
            items.append(Item(id=request_id, rows=count, keys=keys, blocks=request.blocks, rates_of=made[request_id]))
            state = state.put(replace(request, scheduled=request.scheduled + 1))
        return state, StepPlan(step=step, kind=StepKind.DECODE, items=tuple(items))

    def verification(self, state: EngineState, chosen: Sequence[int]) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Rows of every request: all drafts, or as many as old rates make worth while, given out by new rates."""
        config = self.config
        if not config.scheduled_verification:
            return [config.gamma + 1] * len(chosen), dict.fromkeys(chosen, (-1, -1))
        old, new, made = [], [], {}
        for request_id in chosen:
            request = state.requests[request_id]
            choosing, giving = request.rates[1 if request.in_flight else 0], request.rates[1]
            made[request_id] = (choosing[0], giving[0])
            trusted = 1.0 if request.has_drafts or request.in_flight else 0.0
            missing = (trusted,) * config.gamma
            old.append(choosing[1] or missing)
            new.append(giving[1] or missing)
        worth = sum(survival >= TRUSTED for rates in old for survival in _survival(rates))
        return _allocated_rows(new, worth), made

    def settle(self, state: EngineState, plan: StepPlan, results: Mapping[int, Result]) -> EngineState:
        """What a step brought is appended; results of requests that ended or were preempted meanwhile are dropped."""
        for item in plan.items:
            request, result = state.requests[item.id], results[item.id]
            if plan.kind is StepKind.PROMPT:
                request = replace(request, committed=item.keys)
                state = state.put(request)
                if item.is_last:
                    state = self.append(state, request, result.tokens)
                continue
            if item.id not in state.running:
                continue
            made = (plan.step, result.rates)
            request = replace(request, processed=request.processed + 1, has_drafts=True, rates=(request.rates[1], made))
            state = self.append(state, request, result.tokens, stored=True)
        return state

    def append(
        self, state: EngineState, request: Request, tokens: Sequence[int], *, stored: bool = False
    ) -> EngineState:
        """Tokens one by one until one ends the request; with `stored` a key is committed for each."""
        for token in tokens:
            known, committed = (*request.tokens, token), request.committed + stored
            request = replace(request, tokens=known, committed=committed)
            if token in ((self.eos,) if request.stops is None else request.stops):
                return self.end(state.put(request), request.id, Finish.STOP)
            if len(known) > self.config.max_length or len(known) - request.prompt == request.max_tokens:
                return self.end(state.put(request), request.id, Finish.LENGTH)
        return state.put(request)


def _column(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _survival(rates: Sequence[float]) -> list[float]:
    return torch.tensor(rates, dtype=torch.float32).cumprod(0).tolist()


def _allocated_rows(rates: Sequence[Sequence[float]], drafts: int) -> list[int]:
    """One row each, and one for each of the drafts most likely to survive; ties go to the earlier request."""
    ranked = [(-survival, r, i) for r, row in enumerate(rates) for i, survival in enumerate(_survival(row))]
    rows = [1] * len(rates)
    for _, r, _ in sorted(ranked)[:drafts]:
        rows[r] += 1
    return rows


# a device with a toy model

WRAP = 2**64


class ToyDevice:
    """Keys in blocks, proposals and the lengths accepted last, as a device holds them; `run` changes them in place."""

    def __init__(self, model: ToyModel, config: SchedulerConfig) -> None:
        self.model = model
        self.config = config
        # what nobody wrote is no key of any token
        self.keys = torch.arange(1, config.num_blocks * config.block_size + 1) * _signed(model.odd)
        powers = [1]
        for _ in range(config.max_positions):
            powers.append(powers[-1] * model.radix % WRAP)
        self.powers = torch.tensor([_signed(power) for power in powers])
        self.proposals: dict[int, tuple[int, tuple[int, ...], tuple[float, ...]]] = {}
        self.accepted: dict[int, int] = {}
        self.highest = -1  # position that a row or a draft was given

    def run(self, plan: StepPlan) -> dict[int, Result]:
        """The results of a step, by request."""
        if plan.kind is StepKind.PROMPT:
            self.accepted = {}
            return {item.id: self.prefill(item) for item in plan.items}
        rows = self.rows(plan)
        results = {item.id: self.verify(item, count) for item, count in zip(plan.items, rows, strict=True)}
        self.accepted = {request_id: result.accepted for request_id, result in results.items()}
        return results

    def rows(self, plan: StepPlan) -> list[int]:
        """Rows of every request."""
        return plan.verified_rows({i: self.proposals[i][2] for i in self.accepted}, self.config)

    def prefill(self, item: Item) -> Result:
        """A chunk's keys, and the token behind its last row; placeholder drafts, which nobody trusts."""
        start = item.keys - item.rows
        self.write(item, start, item.tokens)
        token = self.next(self.fold(item, item.keys - 1))
        gamma = self.config.gamma
        self.proposals[item.id] = (token, (self.model.vocab_size - 1,) * gamma, (0.0,) * gamma)
        return Result(tokens=(token,))

    def verify(self, item: Item, rows: int) -> Result:
        """The anchor and its first drafts as rows; drafts count as long as each is what the row before it gives."""
        start = self.start(item)
        anchor, drafts, _ = self.proposals[item.id]
        inputs = (anchor, *drafts[: rows - 1])
        self.write(item, start, inputs)
        outputs = [self.next(self.fold(item, start + j)) for j in range(rows)]
        accepted = self.agreed(inputs[1:], outputs)
        tokens = (*inputs[1 : accepted + 1], outputs[accepted])
        state = self.fold(item, start + accepted)
        self.proposals[item.id] = self.draft(state, tokens[-1], start + accepted + 1)
        return Result(tokens=tokens, accepted=accepted, rates=self.proposals[item.id][2])

    def start(self, item: Item) -> int:
        """The position of an item's first row."""
        return item.first_position(self.accepted, self.config)

    def agreed(self, drafts: Sequence[int], outputs: Sequence[int]) -> int:
        """Leading drafts that equal the outputs before them."""
        count = 0
        while count < len(drafts) and drafts[count] == outputs[count]:
            count += 1
        return count

    def draft(self, state: int, anchor: int, position: int) -> tuple[int, tuple[int, ...], tuple[float, ...]]:
        """Drafts behind an anchor, some of them wrong, and rates that have little to do with it."""
        drafts, rates, token = [], [], anchor
        for j in range(self.config.gamma):
            state = (state * self.model.radix + self.mix(token * self.model.stride + position + j)) % WRAP
            luck = self.mix(state + 1)
            token = (self.next(state) + (luck % 100 >= self.model.quality)) % self.model.vocab_size
            drafts.append(token)
            rates.append((1.0, 1.0, 0.75, 0.5, 0.25, 0.0)[luck // 100 % 6])
            self.highest = max(self.highest, position + j)
        return anchor, tuple(drafts), tuple(rates)

    def slots(self, item: Item, positions: Sequence[int]) -> list[int]:
        """Where keys of positions lie; beyond the table there is the null block."""
        size = self.config.block_size
        blocks = [item.blocks[p // size] if p // size < len(item.blocks) else 0 for p in positions]
        return [block * size + p % size for block, p in zip(blocks, positions, strict=True)]

    def write(self, item: Item, start: int, tokens: Sequence[int]) -> None:
        """The keys of tokens from a position on."""
        positions = range(start, start + len(tokens))
        keys = [self.mix(t * self.model.stride + p) for t, p in zip(tokens, positions, strict=True)]
        self.keys[self.slots(item, positions)] = torch.tensor([_signed(key) for key in keys])
        self.highest = max(self.highest, positions[-1])

    def fold(self, item: Item, last: int) -> int:
        """The hash of all keys up to a position, read from the blocks."""
        keys = self.keys[self.slots(item, range(last + 1))]
        return int((keys * self.powers[: last + 1].flip(0)).sum()) % WRAP

    def next(self, state: int) -> int:
        """The token that a hash stands for."""
        return self.mix(state) % self.model.vocab_size

    def mix(self, x: int) -> int:
        """Spreads 64 bits."""
        x %= WRAP
        x = (x ^ x >> 31) * self.model.odd % WRAP
        return x ^ x >> 29


def _signed(x: int) -> int:
    return x - WRAP if x >= WRAP // 2 else x


# an engine: ranks of schedulers and devices that vote on every step


class Device(Protocol):
    """What computes the steps of one rank; `highest`: the last position that a row or a draft was given."""

    highest: int

    def run(self, plan: StepPlan) -> dict[int, Result]:
        """The results of a step, by request."""
        ...


Settled = list[tuple[StepPlan, dict[int, Result]]]


@dataclass(kw_only=True)
class Rank:
    """A scheduler, its state, its device, and the decode step whose results it has not processed."""

    scheduler: Scheduler
    device: Device
    state: EngineState
    pending: deque[tuple[StepPlan, dict[int, Result]]] = field(default_factory=deque)

    def run(self, plan: StepPlan, state: EngineState) -> Settled:
        """One step: launch it, process the one before, and this one unless it may wait; what was processed."""
        self.state = state
        results = self.device.run(plan)
        self.pending.append((plan, results))
        waits = self.scheduler.config.asynchronous and plan.kind is StepKind.DECODE and bool(plan.items)
        settled: Settled = []
        while len(self.pending) > waits:
            settled.append(self.pending.popleft())
            self.state = self.scheduler.settle(self.state, *settled[-1])
        return settled


Watch = Callable[[Rank, StepPlan], None]


class Ranks:
    """Ranks that take the same kind of step, prompt chunks or decode rows, by vote."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.steps = 0
        self.votes: list[tuple[list[bool], list[int], list[bool]]] = []  # since the last prompt step

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is in flight."""
        return any(rank.state.has_open or rank.pending for rank in self.ranks)

    def step(self, watch: Watch = lambda rank, plan: None) -> list[Settled]:
        """One step of every rank; what each of them processed. `watch` sees every rank behind its step."""
        prompts = [rank.scheduler.prompt_step(rank.state, self.steps) for rank in self.ranks]
        self.votes.append(
            (
                [bool(rank.state.waiting) for rank in self.ranks],
                # the limit on what is in use protects those that run
                [len(r.state.free) if r.state.running else r.scheduler.config.num_blocks - 1 for r in self.ranks],
                [bool(plan.items) for _, plan in prompts],
            )
        )
        config = self.ranks[0].scheduler.config
        if _last_kind(self.votes, config) is StepKind.PROMPT:
            self.votes, chosen = [], prompts
        else:
            self._forget_votes(config)
            # requests that ended in the queue, or never fit, have left it even if nobody was chosen
            states = [
                rank.state if plan.items else state for rank, (state, plan) in zip(self.ranks, prompts, strict=True)
            ]
            chosen = [
                rank.scheduler.decode_step(state, self.steps) for rank, state in zip(self.ranks, states, strict=True)
            ]
        settled = []
        for rank, (state, plan) in zip(self.ranks, chosen, strict=True):
            settled.append(rank.run(plan, state))
            watch(rank, plan)
        self.steps += 1
        return settled

    def _forget_votes(self, config: SchedulerConfig) -> None:
        """A kind depends on the number of votes by its remainders alone, so a whole period of failed ones may go."""
        period = math.lcm(config.all_interval, config.any_interval)
        if len(self.votes) > 2 * period:
            del self.votes[:period]


def streams_stepwise(
    prompt_bs: Tensor,
    length_b: Tensor,
    max_tokens_b: Tensor,
    arrival_b: Tensor,
    abort_b: Tensor,
    *,
    model: ToyModel,
    config: SchedulerConfig,
    scheduler: type[Scheduler] = Scheduler,
    device: type[ToyDevice] = ToyDevice,
    watch: Watch = lambda rank, plan: None,
) -> tuple[Tensor, Tensor]:
    """`reference.scheduler.streams`, served in steps: batches, chunks, blocks, drafts, preemption, a step in flight.

    Requests go to the ranks in turn; `watch` sees every rank after each of its steps. Of an aborted request the tokens
    up to its abortion come out.

    Raises:
        TypeError: an input is not int32.
        ValueError: shapes disagree, a prompt is empty, or max_tokens is not positive.
        NotImplementedError: the engine hands its prompts over.
        RuntimeError: the requests do not end in the steps that they can need.
    """
    expect_traffic(prompt_bs, length_b, max_tokens_b, arrival_b, abort_b)
    if config.engine is not EngineKind.NORMAL:
        raise NotImplementedError(f"config: expected an engine that decodes, got {config.engine}")
    ranks = []
    for _ in range(config.ranks):
        one = scheduler(config, model.eos)
        ranks.append(Rank(scheduler=one, device=device(model, config), state=one.start()))
    count = len(length_b)
    requests = [
        Request(
            id=b,
            tokens=tuple(prompt_bs[b, : length_b[b]].tolist()),
            prompt=int(length_b[b]),
            max_tokens=int(max_tokens_b[b]),
        )
        for b in range(count)
    ]
    _serve(ranks, requests, arrival_b.tolist(), abort_b.tolist(), watch)
    token_bn = torch.full((count, int(max_tokens_b.max()) if count else 0), -1, dtype=torch.int32)
    finish_b = torch.zeros(count, dtype=torch.int32)
    for b in range(count):
        request = ranks[b % config.ranks].state.requests[b]
        made = request.tokens[request.prompt :]
        token_bn[b, : len(made)] = torch.tensor(made, dtype=torch.int32)
        finish_b[b] = int(request.finish)
    return token_bn, finish_b


def _serve(
    ranks: list[Rank], requests: Sequence[Request], arrivals: Sequence[int], aborts: Sequence[int], watch: Watch
) -> None:
    config, together = ranks[0].scheduler.config, Ranks(ranks)
    # every token may take a step of its own, every prompt a vote and a chunk for each token, and preemption doubles it
    work = sum(request.max_tokens + len(request.tokens) for request in requests)
    last = max([0, *arrivals]) + 4 * (config.all_interval + config.any_interval) * (len(requests) + 1) + 16 * work
    while together.steps <= max([-1, *arrivals]) or together.has_work:
        if together.steps > last:
            raise RuntimeError(f"requests that do not end in {last} steps: {[rank.state.waiting for rank in ranks]}")
        for request, arrival, abort in zip(requests, arrivals, aborts, strict=True):
            rank = ranks[request.id % len(ranks)]
            if arrival == together.steps:
                rank.state = rank.scheduler.arrive(rank.state, request)
            if abort == together.steps and request.id in rank.state.requests:
                rank.state = rank.scheduler.abort(rank.state, request.id)
        together.step(watch)


def _last_kind(votes: list[tuple[list[bool], list[int], list[bool]]], config: SchedulerConfig) -> StepKind:
    ready, free, chosen = (torch.tensor(column) for column in zip(*votes, strict=True))
    return StepKind(int(step_kinds_vectorised(ready, free.to(torch.int32), chosen, config=config)[-1]))
