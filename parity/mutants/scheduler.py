"""Engines and queue rules with one thing wrong at a time: the fast engine with a wrong part, and rules of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deeptwin.optimized.scheduler import (
    EngineState,
    Item,
    Request,
    Result,
    Scheduler,
    StepPlan,
    ToyDevice,
    streams_stepwise,
)
from deeptwin.reference.config import (
    EngineKind,
    Fate,
    Finish,
    ModelCost,
    Precision,
    RunningBatch,
    SchedulerConfig,
    StepKind,
    ToyModel,
    WaitingQueue,
)

right_streams = streams_stepwise


def _streams_with(
    scheduler: type[Scheduler] = Scheduler, device: type[ToyDevice] = ToyDevice
) -> Callable[..., tuple[Tensor, Tensor]]:
    def streams(
        prompt_bs: Tensor,
        length_b: Tensor,
        max_tokens_b: Tensor,
        arrival_b: Tensor,
        abort_b: Tensor,
        *,
        model: ToyModel,
        config: SchedulerConfig,
    ) -> tuple[Tensor, Tensor]:
        traffic = (prompt_bs, length_b, max_tokens_b, arrival_b, abort_b)
        return streams_stepwise(*traffic, model=model, config=config, scheduler=scheduler, device=device)

    return streams


# a device that computes something else


class _Batched(ToyDevice):
    """A device that remembers the step it runs."""

    plan: StepPlan | None = None
    row = 0

    def run(self, plan: StepPlan) -> dict[int, Result]:
        self.plan = plan
        return super().run(plan)

    def verify(self, item: Item, rows: int) -> Result:
        assert self.plan is not None
        self.row = self.plan.items.index(item)
        return super().verify(item, rows)


class _RowCounts(_Batched):
    def next(self, state: int) -> int:
        return super().next(state + self.row)


class _SlotOrder(ToyDevice):
    def fold(self, item: Item, last: int) -> int:
        slots = self.slots(item, range(last + 1))
        return int((self.keys[sorted(slots)] * self.powers[: last + 1].flip(0)).sum()) % 2**64


class _FromZero(ToyDevice):
    def prefill(self, item: Item) -> Result:
        result = super().prefill(item)
        start = item.keys - item.rows
        for place, token in enumerate(item.tokens):
            key = self.mix(token * self.model.stride + place)
            self.keys[self.slots(item, [start + place])] = key - 2**64 if key >= 2**63 else key
        return result


class _EightRows(_Batched):
    def fold(self, item: Item, last: int) -> int:
        assert self.plan is not None
        return super().fold(item, last) + (len(self.plan.items) >= 8)


class _SplitByLongest(_Batched):
    def fold(self, item: Item, last: int) -> int:
        assert self.plan is not None
        half = (max(one.keys for one in self.plan.items) + 1) // 2
        found = super().fold(item, last)
        return found if last < half else found ^ (found >> 7)


class _TooEarly(ToyDevice):
    def write(self, item: Item, start: int, tokens: Sequence[int]) -> None:
        early = start - (not item.tokens)
        keys = [self.mix(t * self.model.stride + start + j) for j, t in enumerate(tokens)]
        slots = self.slots(item, range(early, early + len(tokens)))
        self.keys[slots] = torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys])


class _LastRow(ToyDevice):
    def verify(self, item: Item, rows: int) -> Result:
        start = self.start(item)
        result = super().verify(item, rows)
        last = self.next(self.fold(item, start + rows - 1))
        return replace(result, tokens=(*result.tokens[:-1], last))


class _NotCorrected(ToyDevice):
    def start(self, item: Item) -> int:
        return item.keys - item.rows


class _Placeholders(ToyDevice):
    def agreed(self, drafts: Sequence[int], outputs: Sequence[int]) -> int:
        if drafts and all(draft == self.model.vocab_size - 1 for draft in drafts):
            return len(drafts)
        return super().agreed(drafts, outputs)


# a scheduler that forgets something


class _KeysKept(Scheduler):
    def preempt(self, state: EngineState, request_id: int) -> EngineState:
        committed = state.requests[request_id].committed
        state = super().preempt(state, request_id)
        return state.put(replace(state.requests[request_id], committed=committed))


class _OneStepOnly(SchedulerConfig):
    @property
    def reserve(self) -> int:
        return self.gamma


class _NoRoom(Scheduler):
    def __init__(self, config: SchedulerConfig, eos: int) -> None:
        super().__init__(_OneStepOnly(**vars(config)), eos)


class _RejectedKept(Scheduler):
    def settle(self, state: EngineState, plan: StepPlan, results: Mapping[int, Result]) -> EngineState:
        before = {item.id: state.requests[item.id].committed for item in plan.items}
        state = super().settle(state, plan, results)
        for item in plan.items:
            if plan.kind is StepKind.DECODE and item.id in state.running:
                request = state.requests[item.id]
                kept = min(before[item.id] + item.rows, len(request.tokens))
                state = state.put(replace(request, committed=kept))
        return state


class _StopAtTheEnd(Scheduler):
    def append(
        self, state: EngineState, request: Request, tokens: Sequence[int], *, stored: bool = False
    ) -> EngineState:
        tokens = tokens[: request.max_tokens + request.prompt - len(request.tokens)]
        if self.eos in tokens[:-1]:
            known = (*request.tokens, *tokens[:-1])
            request = replace(request, tokens=known, committed=request.committed + stored * (len(tokens) - 1))
            tokens = tokens[-1:]
        return super().append(state, request, tokens, stored=stored)


class _LimitLate(Scheduler):
    def append(
        self, state: EngineState, request: Request, tokens: Sequence[int], *, stored: bool = False
    ) -> EngineState:
        end = tokens.index(self.eos) + 1 if self.eos in tokens else len(tokens)
        known = (*request.tokens, *tokens[: end - 1])
        request = replace(request, tokens=known, committed=request.committed + stored * (end - 1))
        limit = max(request.max_tokens, len(known) + 1 - request.prompt)
        state = super().append(state, replace(request, max_tokens=limit), tokens[end - 1 : end], stored=stored)
        found = state.requests[request.id]
        # the result has room for the limit only
        return state.put(replace(found, tokens=found.tokens[: request.prompt + request.max_tokens - 1]))


class _ChunkSampled(Scheduler):
    def settle(self, state: EngineState, plan: StepPlan, results: Mapping[int, Result]) -> EngineState:
        state = super().settle(state, plan, results)
        for item in plan.items:
            if not item.is_last:
                request = state.requests[item.id]
                state = state.put(replace(request, tokens=(*request.tokens, *results[item.id].tokens)))
        return state


class _FreedTwice(Scheduler):
    def end(self, state: EngineState, request_id: int, finish: Finish) -> EngineState:
        again = state.requests[request_id].blocks[:1]
        state = super().end(state, request_id, finish)
        # the pool stays as large as it was: the block given out next also waits at the end
        return replace(state, free=(*again, *state.free[len(again) :]))


class _FreedAndKept(Scheduler):
    def preempt(self, state: EngineState, request_id: int) -> EngineState:
        blocks = state.requests[request_id].blocks
        state = super().preempt(state, request_id)
        return state.put(replace(state.requests[request_id], blocks=blocks))


class _LateKept(Scheduler):
    def settle(self, state: EngineState, plan: StepPlan, results: Mapping[int, Result]) -> EngineState:
        for item in plan.items:
            is_late = plan.kind is StepKind.DECODE and item.id in state.waiting
            if is_late and state.requests[item.id].finish is Finish.OPEN:
                request = state.requests[item.id]
                state = self.append(state, request, results[item.id].tokens, stored=True)
        return super().settle(state, plan, results)


class _TooLongServed(Scheduler):
    def arrive(self, state: EngineState, request: Request) -> EngineState:
        kept = request.tokens[: self.config.max_prompt - self.config.gamma]
        return super().arrive(state, replace(request, tokens=kept, prompt=len(kept)))


row_in_the_batch_counts = _streams_with(device=_RowCounts)
keys_in_order_of_arrival = _streams_with(device=_SlotOrder)
chunks_count_from_zero = _streams_with(device=_FromZero)
other_kernel_from_eight_rows = _streams_with(device=_EightRows)
split_by_the_longest = _streams_with(device=_SplitByLongest)
rows_one_position_early = _streams_with(device=_TooEarly)
token_of_the_last_row = _streams_with(device=_LastRow)
lengths_of_two_steps_ago = _streams_with(device=_NotCorrected)
placeholders_accepted = _streams_with(device=_Placeholders)
keys_of_the_owner_before = _streams_with(_KeysKept)
no_room_for_the_step_in_flight = _streams_with(_NoRoom)
rejected_keys_kept = _streams_with(_RejectedKept)
stop_looked_for_at_the_end = _streams_with(_StopAtTheEnd)
limit_of_tokens_late = _streams_with(_LimitLate)
chunk_sampled = _streams_with(_ChunkSampled)
blocks_freed_twice = _streams_with(_FreedTwice)
freed_blocks_kept = _streams_with(_FreedAndKept)
late_output_kept = _streams_with(_LateKept)
too_long_is_served = _streams_with(_TooLongServed)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.int32)


# a prompt step


@dataclass(frozen=True, kw_only=True)
class _Prefill:
    """The rules of a prompt step, walked through; the default is right."""

    aligned_budget: bool = True
    aligned_cost: bool = True
    unfinished_count: bool = False
    back: str = "reversed"  # where unfinished requests go: reversed, batch, end
    goes_on: bool = False
    images: str = "kept"  # kept, cut, never (run on), always (run on)
    boundary: str = "exact"  # exact, aligned, none
    keys: str = "whole"  # whole, chunk
    blocks: str = "whole"  # whole, chunk
    unready: str = "ends"  # ends, passed, taken
    limit: int = 0  # ids of the pool that a request may need beyond the rule
    ended_leaves: bool = True
    passes: bool = False  # what does not fit is passed over

    def __call__(
        self, queue: WaitingQueue, *, free: int, running: int, config: SchedulerConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, unit = len(queue.total_w), config.alignment
        fates, chunks, unfinished = [Fate.STAYS] * count, [0] * count, []
        used = keys = counted = 0
        for w in range(count):
            total, done = int(queue.total_w[w]), int(queue.done_w[w])
            if queue.has_ended_w[w]:
                if not self.ended_leaves:
                    break
                fates[w] = Fate.DROPPED
                continue
            if total > config.max_prompt or config.blocks_for(total) >= config.num_blocks + self.limit:
                fates[w] = Fate.IGNORED
                continue
            if not queue.is_ready_w[w] and self.unready != "taken":
                if self.unready == "passed":
                    continue
                break
            tokens = self._chunk(queue, w, used, config)
            asked = total if self.blocks == "whole" else done + tokens
            blocks = config.blocks_for(asked) - int(queue.held_w[w])
            weight = total if self.keys == "whole" else tokens
            is_barred = blocks > free or keys + weight > config.max_keys
            if is_barred or running + counted >= config.max_requests:
                if self.passes:
                    continue
                break
            if tokens <= 0 or (done + tokens < total and not config.chunked):
                break
            fates[w], chunks[w] = Fate.RUNS, tokens
            free, keys = free - blocks, keys + weight
            used += -(-tokens // unit) * unit if self.aligned_cost else tokens
            is_whole = done + tokens == total
            counted += is_whole or self.unfinished_count
            if not is_whole:
                unfinished.append(w)
                if config.engine is EngineKind.NORMAL and not self.goes_on:
                    break
        stays = [w for w in range(count) if fates[w] is Fate.STAYS]
        waiting = {
            "reversed": unfinished[::-1] + stays,
            "batch": unfinished + stays,
            "end": stays + unfinished,
        }[self.back]
        return _int32(fates), _int32(chunks), _int32(waiting + [-1] * (count - len(waiting)))

    def _chunk(self, queue: WaitingQueue, w: int, used: int, config: SchedulerConfig) -> int:
        total, done, unit = int(queue.total_w[w]), int(queue.done_w[w]), config.alignment
        room = config.budget - used
        tokens = min(total - done, room // unit * unit if self.aligned_budget else room)
        boundary = int(queue.boundary_w[w])
        if self.boundary != "none" and done < boundary < done + tokens:
            tokens = boundary - done
            if self.boundary == "aligned":
                tokens = max(tokens // unit * unit, 1)
        for first, last in queue.image_wi[w].tolist():
            if first < done + tokens < last and self.images != "cut":
                fits = -(-(last - done) // unit) * unit <= config.budget
                runs_on = {"kept": not used, "never": False, "always": True}[self.images]
                tokens = last - done if runs_on and fits else first - done
        return tokens


_PREFILL = _Prefill()
right_prefill = _PREFILL
budget_not_aligned = replace(_PREFILL, aligned_budget=False)
cost_not_aligned = replace(_PREFILL, aligned_cost=False)
unfinished_ones_count = replace(_PREFILL, unfinished_count=True)
unfinished_in_order = replace(_PREFILL, back="batch")
unfinished_to_the_end = replace(_PREFILL, back="end")
goes_on_behind_a_chunk = replace(_PREFILL, goes_on=True)
images_cut = replace(_PREFILL, images="cut")
never_runs_on = replace(_PREFILL, images="never")
always_runs_on = replace(_PREFILL, images="always")
boundary_aligned = replace(_PREFILL, boundary="aligned")
boundary_ignored = replace(_PREFILL, boundary="none")
keys_of_the_chunk = replace(_PREFILL, keys="chunk")
blocks_of_the_chunk = replace(_PREFILL, blocks="chunk")
unready_is_passed_over = replace(_PREFILL, unready="passed")
unready_is_taken = replace(_PREFILL, unready="taken")
pool_limit_off_by_one = replace(_PREFILL, limit=1)
ended_blocks_the_queue = replace(_PREFILL, ended_leaves=False)
rest_is_used = replace(_PREFILL, passes=True)


# a decode step


@dataclass(frozen=True, kw_only=True)
class _Decode:
    """The rules of a decode step; the default is right."""

    victim: str = "longest"  # longest, shortest, oldest
    asks: str = "any"  # any: a block must be free; needed: only for those that grow
    returns: bool = True
    frees: bool = True
    sort: str = "total"  # total, output
    ties: int = 1  # 1: in the running order
    constrained: str = "stops"
    gives_up: bool = True

    def __call__(
        self, batch: RunningBatch, *, free: int, config: SchedulerConfig
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = len(batch.total_r)
        output, total, held = batch.output_r.tolist(), batch.total_r.tolist(), batch.held_r.tolist()
        need = [config.blocks_for(tokens) for tokens in total]
        if not self.returns:
            need = [max(a, b) for a, b in zip(need, held, strict=True)]
        left = sorted(range(count), key=lambda r: (-output[r], self.ties * r))
        fates, victims, chosen = [Fate.STAYS] * count, [], []
        while left:
            r = left.pop()
            enough = free >= (1 if self.asks == "any" else max(need[r] - held[r], 0))
            while not enough and left:
                places = {"longest": 0, "shortest": -1, "oldest": left.index(min(left))}
                lost = left.pop(places[self.victim])
                victims.append(lost)
                free, held[lost] = free + held[lost] * self.frees, 0
                enough = free >= (1 if self.asks == "any" else max(need[r] - held[r], 0))
            if not enough:
                if self.gives_up:
                    victims.append(r)
                    free, held[r] = free + held[r], 0
                continue
            free, held[r] = free + held[r] - need[r], need[r]
            fates[r] = Fate.RUNS
            chosen.append(r)
        for r in victims:
            is_stopped = config.stop_on_preempt or (bool(batch.is_constrained_r[r]) and self.constrained == "stops")
            fates[r] = Fate.STOPPED if is_stopped else Fate.PREEMPTED
        by = total if self.sort == "total" else output
        order = sorted(chosen, key=lambda r: (-by[r], self.ties * r))
        columns = [found + [-1] * (count - len(found)) for found in (order, victims)]
        return _int32(fates), _int32(held), _int32(columns[0]), _int32(columns[1])


_DECODE = _Decode()
right_decode = _DECODE
shortest_preempted = replace(_DECODE, victim="shortest")
oldest_preempted = replace(_DECODE, victim="oldest")
runs_without_a_free_block = replace(_DECODE, asks="needed")
surplus_kept = replace(_DECODE, returns=False)
victims_keep_their_blocks = replace(_DECODE, frees=False)
sorted_by_output = replace(_DECODE, sort="output")
ties_backwards = replace(_DECODE, ties=-1)
constrained_again = replace(_DECODE, constrained="again")
last_one_stays = replace(_DECODE, gives_up=False)


# the vote


@dataclass(frozen=True, kw_only=True)
class _Kinds:
    """The vote on the kind of a step; the default is right."""

    at_zero: str = "all"  # all, any, none
    together: str = "any"
    restarts: bool = True
    failed_restart: bool = False
    second: bool = True
    exact: bool = True  # 0.9 itself is allowed
    null: int = 0

    def __call__(self, ready_td: Tensor, free_td: Tensor, chosen_td: Tensor, *, config: SchedulerConfig) -> Tensor:
        kinds, since = [], 0
        ids = config.num_blocks - self.null
        for ready, free, chosen in zip(ready_td, free_td, chosen_td, strict=True):
            used = (ids - free) * 10
            work = ready & ((used <= 9 * ids) if self.exact else (used < 9 * ids))
            asks_any = since > 0 and since % config.any_interval == 0
            asks_all = since % config.all_interval == 0
            if since == 0:
                asks_any, asks_all = self.at_zero == "any", self.at_zero == "all"
            elif asks_any and asks_all and self.together == "all":
                asks_any = False
            wanted = bool(work.any()) if asks_any else bool(asks_all and work.all())
            is_prompt = wanted and (bool(chosen.any()) or not self.second)
            kinds.append(StepKind.PROMPT if is_prompt else StepKind.DECODE)
            failed = wanted and not is_prompt and self.failed_restart
            since = 0 if (is_prompt and self.restarts) or failed else since + 1
        return _int32(kinds)


_KINDS = _Kinds()
right_kinds = _KINDS
no_vote_at_zero = replace(_KINDS, at_zero="none")
any_vote_at_zero = replace(_KINDS, at_zero="any")
all_before_any = replace(_KINDS, together="all")
counter_runs_on = replace(_KINDS, restarts=False)
failed_votes_restart = replace(_KINDS, failed_restart=True)
no_second_vote = replace(_KINDS, second=False)
limit_excluded = replace(_KINDS, exact=False)
null_block_left_out = replace(_KINDS, null=1)


# the cost


@dataclass(frozen=True, kw_only=True)
class _Flops:
    """The cost of a step, counted row by row; the default is right."""

    caps: bool = True
    group: str = "down"
    own: int = 1
    heads: str = "last"
    drops: str = "prompt"  # prompt, never, always
    before: str = "total"
    placeholder: int = 1
    fp4: int = 1

    def __call__(
        self, start_b: Tensor, end_b: Tensor, total_b: Tensor, *, is_decode: bool, keep: int, cost: ModelCost
    ) -> Tensor:
        found = []
        for start, end, total in zip(start_b.tolist(), end_b.tolist(), total_b.tolist(), strict=True):
            first = start
            if keep and self.drops != "never" and (not is_decode or self.drops == "always"):
                first = min(max((total if self.before == "total" else end) - keep, start), end - self.placeholder)
            flops = 0
            for layer in cost.layers:
                for p in range(max(first, start) if layer.is_consumer else start, end):
                    flops += self._row(layer, p)
            heads = end - start if is_decode or self.heads == "every" else min(end - start, 1)
            found.append(flops + heads * cost.head.inner * cost.head.outer * self._unit(cost.head.precision))
        return torch.tensor(found, dtype=torch.int64)

    def _row(self, layer: Any, p: int) -> int:
        flops = sum(gemm.inner * gemm.outer * self._unit(gemm.precision) for gemm in layer.gemms)
        for pair in layer.pairs:
            keys = p + self.own
            keys = keys // pair.ratio if self.group == "down" else -(-keys // pair.ratio)
            keys = min(keys, pair.cap) if pair.cap and self.caps else keys
            flops += keys * pair.width * self._unit(pair.precision)
        return flops

    def _unit(self, precision: Precision) -> int:
        return {"FP4": self.fp4, "FP8": 2, "BF16": 4, "FP32": 8}[precision.name]


_FLOPS = _Flops()
right_flops = _FLOPS
cap_ignored = replace(_FLOPS, caps=False)
groups_rounded_up = replace(_FLOPS, group="up")
own_key_left_out = replace(_FLOPS, own=0)
head_on_every_row = replace(_FLOPS, heads="every")
no_row_left_out = replace(_FLOPS, drops="never")
rows_left_out_of_decode = replace(_FLOPS, drops="always")
kept_from_the_chunk = replace(_FLOPS, before="end")
no_placeholder = replace(_FLOPS, placeholder=0)
fp4_as_fp8 = replace(_FLOPS, fp4=2)
