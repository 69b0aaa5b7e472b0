"""Which tokens a request must get, whatever is served beside it, and the rules by which steps are filled.

`streams` is the truth: one request alone, its whole prefix read for every token. The rest are the rules of the queues,
one step at a time: who is prefilled and how far, who decodes and who is preempted, which kind of step comes next, and
what a step costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import (
    EngineKind,
    Fate,
    Finish,
    LayerCost,
    ModelCost,
    RunningBatch,
    SchedulerConfig,
    StepKind,
    ToyModel,
    WaitingQueue,
)
from .serving_checks import expect_queue, expect_running, expect_spans, expect_traffic, expect_votes
from .toy_model import next_token


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
    """The tokens of every request, and why each stream ends: without a batch, a cache, a draft or a schedule.

    Math:
        token = the toy model's hash of the whole prefix, appended until it is eos, or the request holds more than
        max_length tokens, or max_tokens are generated (checked in this order)

    Shapes:
        prompt_bs: int32 [b, s], of which length_b count; max_tokens_b; arrival_b: step at which a request arrives;
        abort_b: step at which it is aborted, −1 never; returns int32 [b, n], −1 behind the end, and `Finish` [b].

    Edges:
        a prompt beyond max_prompt, or as large as the pool, is ignored. Arrival and abortion change no token: what an
        aborted request has got is the beginning of its stream.

    Raises:
        TypeError: an input is not int32.
        ValueError: shapes disagree, a prompt is empty, or max_tokens is not positive.

    Source:
        runtime.md sections 1.5, 5.2, 5.6
    """
    expect_traffic(prompt_bs, length_b, max_tokens_b, arrival_b, abort_b)
    longest = int(max_tokens_b.max()) if len(length_b) else 0
    token_bn = torch.full((len(length_b), longest), -1, dtype=torch.int32)
    finish_b = torch.zeros(len(length_b), dtype=torch.int32)
    for row, (length, max_tokens) in enumerate(zip(length_b.tolist(), max_tokens_b.tolist(), strict=True)):
        tokens = prompt_bs[row, :length].tolist()
        finish = Finish.IGNORED if _never_fits(length, config) else Finish.OPEN
        while finish is Finish.OPEN:
            tokens.append(next_token(tokens, model))
            token_bn[row, len(tokens) - length - 1] = tokens[-1]
            if tokens[-1] == model.eos:
                finish = Finish.STOP
            elif len(tokens) > config.max_length or len(tokens) - length == max_tokens:
                finish = Finish.LENGTH
        finish_b[row] = finish
    return token_bn, finish_b


def prefill_step(
    queue: WaitingQueue, *, free: int, running: int, config: SchedulerConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """What a prompt step takes from the waiting queue: each request's fate and chunk, and the queue afterwards.

    Math:
        from the front: ended and ignored requests leave; a request that is not ready, or needs more blocks than are
        free, or is one more than max_requests, or brings the sum of full lengths over max_keys, ends the step;
        chunk = min(remaining, floor((budget - used) / a) * a), cut at a boundary and before an image that it would
        split; used += ceil(chunk / a) * a

    Shapes:
        the columns of `queue` [w]; `free` blocks, `running` requests that are prefilled already; returns `Fate` [w],
        chunk lengths [w], and the places of those that wait afterwards, then −1 [w]; all int32.

    Edges:
        blocks for the whole request are taken with its first chunk; only requests that are prefilled to the end count
        against max_requests; an unfinished one ends the step of a NORMAL engine; unfinished ones go back to the front
        one by one, so several end up in reversed order; the step's first request may run on to the end of an image
        that it would split, if that fits the budget.

    Raises:
        TypeError: a column has another dtype.
        ValueError: shapes disagree, a request has nothing to prefill, or the first chunk would be empty.

    Source:
        runtime.md section 5.2
    """
    expect_queue(queue)
    count = len(queue.total_w)
    fate_w, chunk_w = [Fate.STAYS] * count, [0] * count
    used = keys = whole = 0
    unfinished: list[int] = []
    for w in range(count):
        total, done = int(queue.total_w[w]), int(queue.done_w[w])
        if queue.has_ended_w[w] or _never_fits(total, config):
            fate_w[w] = Fate.DROPPED if queue.has_ended_w[w] else Fate.IGNORED
            continue
        blocks = config.blocks_for(total) - int(queue.held_w[w])
        too_many = running + whole >= config.max_requests or keys + total > config.max_keys
        if not queue.is_ready_w[w] or blocks > free or too_many:
            break
        chunk = _chunk(total, done, int(queue.boundary_w[w]), queue.image_wi[w].tolist(), used, config)
        if done + chunk < total and not config.chunked:
            break
        if chunk <= 0:
            if not used:
                raise ValueError(
                    f"config: expected a budget for the chunk at {done} of request {w}, got {config.budget}"
                )
            break
        fate_w[w], chunk_w[w] = Fate.RUNS, chunk
        free, keys, used = free - blocks, keys + total, used + config.aligned(chunk)
        if done + chunk == total:
            whole += 1
            continue
        unfinished.append(w)
        if config.engine is EngineKind.NORMAL:
            break
    waiting = unfinished[::-1] + [w for w in range(count) if fate_w[w] is Fate.STAYS]
    return _int32(fate_w), _int32(chunk_w), _int32(waiting + [-1] * (count - len(waiting)))


def decode_step(batch: RunningBatch, *, free: int, config: SchedulerConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which running requests decode, in which order, and which lose their blocks.

    Math:
        sorted by output length, longest first; from the shortest end: with a block free the request runs and takes or
        returns blocks; with none free the longest of the others is preempted first; the last one left preempts itself.
        Those that run are sorted by total length, longest first.

    Shapes:
        the columns of `batch` [r]; returns `Fate` [r], blocks held afterwards [r], the places of those that run in
        their order, then −1 [r], and of those that lost their blocks in the order of it, then −1 [r]; all int32.

    Edges:
        a request runs only while a block is free, even if it needs none; ties keep the running order; a preempted
        request that follows a grammar is stopped, as is everyone with stop_on_preempt.

    Raises:
        TypeError: a column has another dtype.
        ValueError: shapes disagree, or a request grew by more than one block.

    Source:
        runtime.md section 5.3
    """
    expect_running(batch, config)
    need_r = [config.blocks_for(total) for total in batch.total_r.tolist()]
    held_r, count = batch.held_r.tolist(), len(batch.total_r)
    fate_r = [Fate.STAYS] * count
    order = sorted(range(count), key=lambda r: -int(batch.output_r[r]))
    victims: list[int] = []
    while order:
        r = order.pop()
        while free < 1 and order:
            victim = order.pop(0)
            free, held_r[victim] = free + held_r[victim], 0
            victims.append(victim)
        if free < 1:
            free, held_r[r] = free + held_r[r], 0
            victims.append(r)
            continue
        fate_r[r] = Fate.RUNS
        free, held_r[r] = free + held_r[r] - need_r[r], need_r[r]
    for r in victims:
        fate_r[r] = Fate.STOPPED if config.stop_on_preempt or batch.is_constrained_r[r] else Fate.PREEMPTED
    chosen = [r for r in range(count) if fate_r[r] is Fate.RUNS]
    chosen = sorted(chosen, key=lambda r: -int(batch.total_r[r]))
    places = [found + [-1] * (count - len(found)) for found in (chosen, victims)]
    return _int32(fate_r), _int32(held_r), _int32(places[0]), _int32(places[1])


def step_kinds(ready_td: Tensor, free_td: Tensor, chosen_td: Tensor, *, config: SchedulerConfig) -> Tensor:
    """The kind of every step of a group of ranks that vote.

    Math:
        s = decode steps since the last prompt step; a rank has work when its head is ready and at most 0.9 of the ids
        of its pool are in use; s > 0 and s mod any_interval = 0: prompt if any rank has work; else
        s mod all_interval = 0: prompt if every rank has; a second vote asks that some rank really chose a chunk

    Shapes:
        ready_td, chosen_td: bool [t, d]; free_td: int32 [t, d] free blocks; returns `StepKind` int32 [t].

    Edges:
        s = 0 is a multiple of all_interval; a prompt step sets s to 0, a failed vote is a decode step.

    Raises:
        TypeError: flags are not bool or blocks not int32.
        ValueError: shapes disagree with one another or with config.ranks, or a pool has more free blocks than ids.

    Source:
        runtime.md section 5.3
    """
    expect_votes(ready_td, free_td, chosen_td, config)
    kind_t, since = [StepKind.DECODE] * len(ready_td), 0
    for t in range(len(ready_td)):
        used_d = [config.num_blocks - free for free in free_td[t].tolist()]
        ready_d = ready_td[t].tolist()
        work_d = [ready and 10 * used <= 9 * config.num_blocks for ready, used in zip(ready_d, used_d, strict=True)]
        wanted = False
        if since > 0 and since % config.any_interval == 0:
            wanted = any(work_d)
        elif since % config.all_interval == 0:
            wanted = all(work_d)
        if wanted and any(chosen_td[t].tolist()):
            kind_t[t] = StepKind.PROMPT
        since = 0 if kind_t[t] is StepKind.PROMPT else since + 1
    return _int32(kind_t)


def step_flops(
    start_b: Tensor, end_b: Tensor, total_b: Tensor, *, is_decode: bool, keep: int, cost: ModelCost
) -> Tensor:
    """FP8-equivalent operations of the rows [start, end) of every request.

    Math:
        sum over layers, over the layer's rows p: sum of inner * outer * coefficient over its products
        + sum of min((p + 1) div ratio, cap) * width * coefficient over its pairs; then the head

    Shapes:
        start_b, end_b: int32 [b]; total_b: tokens that the request holds; returns int64 [b].

    Edges:
        with keep > 0 a consumer layer of a prompt runs from clamp(total - keep, start, end - 1) on; the head sees every
        row of a decode step and one row of a chunk; no row costs nothing.

    Raises:
        TypeError: an input is not int32.
        ValueError: shapes disagree, an end lies before its start or beyond the total, or keep is negative.

    Source:
        runtime.md section 5.8
    """
    expect_spans(start_b, end_b, total_b, keep)
    found = []
    for start, end, total in zip(start_b.tolist(), end_b.tolist(), total_b.tolist(), strict=True):
        first = min(max(total - keep, start), end - 1) if keep and not is_decode else start
        flops = 0
        for layer in cost.layers:
            flops += sum(_row_flops(p, layer) for p in range(max(first, start) if layer.is_consumer else start, end))
        heads = end - start if is_decode else min(end - start, 1)
        found.append(flops + heads * cost.head.per_row)
    return torch.tensor(found, dtype=torch.int64)


def _row_flops(position: int, layer: LayerCost) -> int:
    flops = sum(gemm.per_row for gemm in layer.gemms)
    for pair in layer.pairs:
        keys = (position + 1) // pair.ratio
        flops += (min(keys, pair.cap) if pair.cap else keys) * pair.width * pair.precision
    return flops


def _never_fits(tokens: int, config: SchedulerConfig) -> bool:
    return tokens > config.max_prompt or config.blocks_for(tokens) >= config.num_blocks


def _chunk(total: int, done: int, boundary: int, images: list[list[int]], used: int, config: SchedulerConfig) -> int:
    """Tokens of the next chunk; 0 or less if there is no room for any."""
    room = (config.budget - used) // config.alignment * config.alignment
    end = done + min(total - done, room)
    if boundary > done:
        end = min(end, boundary)
    for first, last in images:
        if first < end < last:
            runs_on = not used and config.aligned(last - done) <= config.budget
            end = last if runs_on else first
    return end - done


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.int32)
