"""The scheduler: streams that no schedule changes, the rules of the queues by hand, random engines that are watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.scheduler import (
    EngineState,
    Item,
    Rank,
    Ranks,
    Request,
    Scheduler,
    StepPlan,
    ToyDevice,
    decode_step_vectorised,
    prefill_step_vectorised,
    step_flops_vectorised,
    step_kinds_vectorised,
    streams_stepwise,
)
from deeptwin.parity import goldens
from deeptwin.parity.cards.scheduler import BASE, CARD, COST, StreamCase, draw_streams
from deeptwin.parity.schedules import Watcher, random_schedule, schedule_faults
from deeptwin.reference.config import (
    EngineKind,
    Fate,
    Finish,
    GemmCost,
    PairCost,
    Precision,
    RunningBatch,
    SchedulerConfig,
    StepKind,
    ToyModel,
    WaitingQueue,
)
from deeptwin.reference.scheduler import decode_step, prefill_step, step_flops, step_kinds, streams

RUNS, STAYS, IGNORED, DROPPED = int(Fate.RUNS), int(Fate.STAYS), int(Fate.IGNORED), int(Fate.DROPPED)
PROMPT_ENGINE = replace(BASE, engine=EngineKind.PROMPT)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def waiting(total: list[int], **columns: Any) -> WaitingQueue:
    count = len(total)
    given_columns = {
        "done_w": [0] * count,
        "held_w": [0] * count,
        "boundary_w": [0] * count,
        "image_wi": [[[-1, -1]]] * count,
    } | {name: value for name, value in columns.items() if name not in ("is_ready_w", "has_ended_w")}
    flags = {
        "is_ready_w": torch.tensor(columns.get("is_ready_w", [True] * count), dtype=torch.bool),
        "has_ended_w": torch.tensor(columns.get("has_ended_w", [False] * count), dtype=torch.bool),
    }
    image = int32(given_columns.pop("image_wi")).reshape(count, -1, 2)
    numbers = {name: int32(value) for name, value in given_columns.items()}
    return WaitingQueue(total_w=int32(total), image_wi=image, **numbers, **flags)


def batch(output: list[int], total: list[int], held: list[int], constrained: list[bool] | None = None) -> RunningBatch:
    flags = torch.tensor(constrained or [False] * len(total), dtype=torch.bool)
    return RunningBatch(output_r=int32(output), total_r=int32(total), held_r=int32(held), is_constrained_r=flags)


def fates(found: tuple[Tensor, ...]) -> list[list[int]]:
    return [column.tolist() for column in found]


# properties of the reference


def traffic(prompts: list[list[int]], limits: list[int]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    count = len(prompts)
    return {
        "prompt_bs": int32([[*prompt, *[-9] * (width - len(prompt))] for prompt in prompts]),
        "length_b": int32([len(prompt) for prompt in prompts]),
        "max_tokens_b": int32(limits),
        "arrival_b": torch.zeros(count, dtype=torch.int32),
        "abort_b": torch.full((count,), -1, dtype=torch.int32),
    }


def hashed(tokens: list[int], model: ToyModel) -> int:
    """The toy model once more, in numpy's 64-bit integers."""
    with np.errstate(over="ignore"):

        def mix(x: np.uint64) -> np.uint64:
            x = (x ^ (x >> np.uint64(31))) * np.uint64(model.odd)
            return x ^ (x >> np.uint64(29))

        state = np.uint64(0)
        for position, token in enumerate(tokens):
            key = mix(np.uint64(token) * np.uint64(model.stride) + np.uint64(position))
            state = state * np.uint64(model.radix) + key
        return int(mix(state) % np.uint64(model.vocab_size))


def test_a_stream_is_the_hash_of_its_whole_prefix() -> None:
    model = ToyModel(vocab_size=50, eos=-1)
    found, finish = streams(**traffic([[3, 1, 4], [1]], [6, 2]), model=model, config=BASE)
    for row, prompt in enumerate([[3, 1, 4], [1]]):
        tokens = list(prompt)
        for token in [t for t in found[row].tolist() if t >= 0]:
            assert token == hashed(tokens, model)
            tokens.append(token)
    assert (found >= 0).sum(1).tolist() == [6, 2]
    assert finish.tolist() == [Finish.LENGTH, Finish.LENGTH]


def test_streams_end_where_they_should() -> None:
    asked = traffic([[3, 1, 4], [5, 5], [7] * 31, [2] * 30], [40, 1, 5, 40])
    found, _ = streams(**asked, model=ToyModel(vocab_size=50, eos=-1), config=BASE)
    stop = int(found[0, 4])
    first = found[0].tolist().index(stop)
    found, finish = streams(**asked, model=ToyModel(vocab_size=50, eos=stop), config=BASE)
    assert (found[0] >= 0).sum() == first + 1
    # a prompt beyond max_prompt is ignored; 30 tokens may become 61, one more than max_length
    assert finish.tolist()[:3] == [Finish.STOP, Finish.LENGTH, Finish.IGNORED]
    whole, _ = streams(**asked, model=ToyModel(vocab_size=50, eos=-1), config=BASE)
    assert (whole >= 0).sum(1).tolist() == [40, 1, 0, 31]


def test_a_prompt_as_large_as_the_pool_is_ignored() -> None:
    small = replace(BASE, num_blocks=4)
    # 8 tokens a block, 5 in reserve: 19 tokens need three of the ids 1, 2, 3, and 20 need a fourth
    _, finish = streams(**traffic([[1] * 19, [1] * 20], [1, 1]), model=ToyModel(vocab_size=9, eos=-1), config=small)
    assert finish.tolist() == [Finish.LENGTH, Finish.IGNORED]


def test_chunks_are_aligned_and_an_unfinished_request_ends_a_normal_step() -> None:
    config = replace(BASE, cp_size=2, budget=18)  # alignment 4: 16 of the 18 tokens can be used
    assert fates(prefill_step(waiting([5, 30, 3]), free=30, running=0, config=config)) == [
        [RUNS, RUNS, STAYS],
        [5, 8, 0],
        [1, 2, -1],
    ]
    # on a prompt engine the third is looked at, but nothing is left
    config = replace(PROMPT_ENGINE, cp_size=2)
    assert prefill_step(waiting([5, 30, 3]), free=30, running=0, config=config)[1].tolist() == [5, 8, 0]


def test_several_unfinished_requests_end_up_in_reversed_order() -> None:
    queue = waiting([20, 20, 20], boundary_w=[4, 5, 0])
    found = prefill_step(queue, free=30, running=0, config=replace(PROMPT_ENGINE, budget=12))
    assert fates(found) == [[RUNS, RUNS, RUNS], [4, 5, 3], [2, 1, 0]]


def test_a_boundary_is_not_aligned_again() -> None:
    config = replace(PROMPT_ENGINE, cp_size=2, budget=16)
    found = prefill_step(waiting([20, 20], boundary_w=[5, 0]), free=30, running=0, config=config)
    # the chunk of 5 costs 8
    assert found[1].tolist() == [5, 8]


def test_images_are_not_cut() -> None:
    image = [[[4, 12]], [[2, 9]]]
    budget = replace(PROMPT_ENGINE, budget=10)
    # 10 tokens end inside of the first image: the chunk stops before it, and the next begins
    assert prefill_step(waiting([20, 9], image_wi=image), free=30, running=0, config=budget)[1].tolist() == [4, 2]
    # a boundary inside: the first request of a step runs on where the budget allows it, a later one does not
    queue = waiting([20, 20], image_wi=image, boundary_w=[6, 6])
    assert prefill_step(queue, free=30, running=0, config=replace(budget, budget=30))[1].tolist() == [12, 2]


def test_an_empty_first_chunk_is_an_error() -> None:
    queue = waiting([20], image_wi=[[[0, 20]]])
    for step in (prefill_step, prefill_step_vectorised):
        with pytest.raises(ValueError, match=r"^config: expected a budget"):
            step(queue, free=30, running=0, config=replace(BASE, budget=10))


def test_the_queue_is_strict_and_ended_or_impossible_requests_leave_it() -> None:
    queue = waiting([3, 31, 4, 5], is_ready_w=[True, True, False, True], has_ended_w=[True, False, False, False])
    assert fates(prefill_step(queue, free=30, running=0, config=BASE)) == [
        [DROPPED, IGNORED, STAYS, STAYS],
        [0, 0, 0, 0],
        [2, 3, -1, -1],
    ]


def test_only_requests_that_are_prefilled_count_against_the_limit() -> None:
    queue = waiting([9, 9, 2], boundary_w=[3, 0, 0])
    found = prefill_step(queue, free=30, running=5, config=replace(PROMPT_ENGINE, budget=40))
    # six may run: the chunk of the first does not count, the second is the sixth
    assert found[1].tolist() == [3, 9, 0]


def test_a_prompt_that_does_not_fit_whole_waits() -> None:
    config = replace(BASE, chunked=False, budget=30)
    assert prefill_step(waiting([20, 11, 2]), free=30, running=0, config=config)[1].tolist() == [20, 0, 0]


def test_decode_by_hand() -> None:
    # 8 tokens a block, 5 in reserve: 11 tokens need two blocks, 12 need three
    found = decode_step(batch([9, 4, 7, 4], [12, 11, 12, 11], [2, 2, 2, 2]), free=1, config=BASE)
    # the shortest runs first and needs nothing; so do the other of its kind and the third with the last free block;
    # then nothing is free for the longest, which is also the last one left
    assert fates(found) == [
        [Fate.PREEMPTED, RUNS, RUNS, RUNS],
        [0, 2, 3, 2],
        [2, 1, 3, -1],
        [0, -1, -1, -1],
    ]


def test_without_a_free_block_the_longest_output_goes_first() -> None:
    found = decode_step(batch([9, 4, 7], [11, 11, 11], [2, 2, 2], [True, False, False]), free=0, config=BASE)
    assert fates(found) == [[Fate.STOPPED, RUNS, RUNS], [0, 2, 2], [1, 2, -1], [0, -1, -1]]
    alone = decode_step(batch([9], [11], [2]), free=0, config=BASE)
    assert fates(alone) == [[Fate.PREEMPTED], [0], [-1], [0]]
    assert decode_step(batch([9], [11], [2]), free=0, config=replace(BASE, stop_on_preempt=True))[0] == Fate.STOPPED


def test_surplus_blocks_go_back() -> None:
    # the first returns a block, so the second finds one
    assert decode_step(batch([2, 1], [12, 11], [2, 3]), free=1, config=BASE)[1].tolist() == [3, 2]


def votes(ready: list[list[bool]], free: int = 30, **intervals: int) -> list[int]:
    flags = torch.tensor(ready)
    config = replace(BASE, ranks=flags.shape[1], **intervals)
    everywhere = torch.full(flags.shape, free, dtype=torch.int32)
    return [t for t, kind in enumerate(step_kinds(flags, everywhere, flags, config=config).tolist()) if kind]


def test_votes_of_all_and_of_any() -> None:
    # with work everywhere every step is a prompt step: s = 0 is a multiple of 70
    assert votes([[True, True]] * 5) == [0, 1, 2, 3, 4]
    # with work on one rank of two a prompt step comes with every hundredth decode step behind the last
    assert votes([[True, False]] * 303) == [100, 201, 302]
    # from 71 on there is work everywhere; the vote of 140 is the next of all, and of any comes before it at 100
    late = [[True, t > 70] for t in range(105)]
    assert votes(late)[0] == 100
    assert votes([[True, t > 60] for t in range(80)]) == [70, 71, 72, 73, 74, 75, 76, 77, 78, 79]


def test_a_coincident_vote_is_one_of_any() -> None:
    assert votes([[True, False]] * 8, all_interval=3, any_interval=6) == [6]
    assert votes([[True, False]] * 8, all_interval=6, any_interval=6) == [6]


def test_a_pool_that_is_nearly_used_up_has_no_work() -> None:
    # 40 ids: 36 may be in use, the null block among them
    assert votes([[True]], free=4) == [0]
    assert votes([[True]], free=3) == []


def test_nothing_chosen_is_no_prompt_step() -> None:
    ready = torch.ones(6, 1, dtype=torch.bool)
    chosen = torch.tensor([[False], [False], [False], [True], [True], [False]])
    free = torch.full((6, 1), 30, dtype=torch.int32)
    config = replace(BASE, all_interval=3, any_interval=100)
    assert step_kinds(ready, free, chosen, config=config).tolist() == [0, 0, 0, 1, 1, 0]


def test_costs_by_hand() -> None:
    one = {"start_b": int32([2]), "end_b": int32([4]), "total_b": int32([4])}
    # first layer: 7*11*2 + 13*3*1 = 193 a row; window pairs 3 + 4, 17*4 each; one group of four behind row 3, 5*8
    # second layer: 19*2*4 = 152 a row; one group of three on each row, 23*2; head 29*31*4 = 3596
    first = 2 * 193 + (3 + 4) * 68 + 40
    second = 2 * 152 + 2 * 46
    assert step_flops(**one, is_decode=True, keep=0, cost=COST).tolist() == [first + second + 2 * 3596]
    assert step_flops(**one, is_decode=False, keep=0, cost=COST).tolist() == [first + second + 3596]
    # with one row kept the consumer runs on row 3 alone; a decode step keeps all
    assert step_flops(**one, is_decode=False, keep=1, cost=COST).tolist() == [first + second // 2 + 3596]
    assert step_flops(**one, is_decode=True, keep=1, cost=COST).tolist() == [first + second + 2 * 3596]


def test_units_of_cost() -> None:
    assert [int(p) for p in (Precision.FP4, Precision.FP8, Precision.BF16, Precision.FP32)] == [1, 2, 4, 8]
    assert GemmCost(inner=3, outer=5, precision=Precision.BF16).per_row == 60


@pytest.mark.parametrize("gamma", range(9))
def test_a_reservation_is_exactly_what_a_step_in_flight_may_write(gamma: int) -> None:
    """(len − 1) + (γ + 1) + (γ + 1) = len + 2 γ + 1 slots; positions are bounded with equality at max_length."""
    in_flight = replace(BASE, gamma=gamma, block_size=32, asynchronous=True)
    assert in_flight.reserve == 2 * gamma + 1
    assert in_flight.max_positions == in_flight.max_length + gamma + (gamma + 1) + gamma
    at_once = replace(in_flight, asynchronous=False)
    assert (at_once.reserve, at_once.max_positions) == (gamma, at_once.max_length + 2 * gamma)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_decode_conserves_blocks_and_keeps_one_free(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 8))
    total = data.draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    held = [BASE.blocks_for(t) + data.draw(st.integers(-1, 1)) for t in total]
    output = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    free = data.draw(st.integers(0, 5))
    fate, after, order, victims = decode_step(batch(output, total, held), free=free, config=BASE)
    ran = [r for r in order.tolist() if r >= 0]
    lost = [r for r in victims.tolist() if r >= 0]
    assert sorted(ran + lost) == list(range(count))
    assert sum(after.tolist()) - sum(held) <= free
    assert all(int(after[r]) == BASE.blocks_for(total[r]) for r in ran)
    assert not any(after[lost].tolist())
    assert len(fate) == count


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("scheduler") == []


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**63 - 1))
def test_streams_do_not_depend_on_the_schedule(seed: int) -> None:
    """Arrivals, aborts, budgets, chunks, blocks, drafts, steps in flight, ranks; blocks and positions are watched."""
    assert schedule_faults(random_schedule(np.random.Generator(np.random.Philox(seed)))) == []


def test_the_watcher_sees_a_broken_engine() -> None:
    class Leaking(Scheduler):
        def release(self, state: Any, request_id: int) -> Any:
            state = super().release(state, request_id)
            return replace(state, free=state.free[1:])

    class Early(ToyDevice):
        def write(self, item: Any, start: int, tokens: Any) -> None:
            super().write(item, start, tokens)
            self.highest = self.config.max_positions

    inputs = draw_streams(StreamCase(requests=4), np.random.Generator(np.random.Philox(3)))
    for wrong, fault in ({"scheduler": Leaking}, "blocks lost"), ({"device": Early}, "a position beyond"):
        watcher = Watcher()
        streams_stepwise(**inputs, watch=watcher, **wrong)
        assert any(found.startswith(fault) for found in watcher.faults)
    watcher = Watcher()
    streams_stepwise(**inputs, watch=watcher)
    assert watcher.faults == []


class Scripted(Scheduler):
    """Has work and finds a chunk as a script says."""

    def __init__(self, config: SchedulerConfig, ready: list[bool], found: list[bool]) -> None:
        super().__init__(config, eos=0)
        self.ready, self.found = ready, found

    def prompt_step(self, state: EngineState, step: int) -> tuple[EngineState, StepPlan]:
        item = Item(id=0, rows=1, keys=1, blocks=())
        return state, StepPlan(step=step, kind=StepKind.PROMPT, items=(item,) * self.found[step])

    def decode_step(self, state: EngineState, step: int) -> tuple[EngineState, StepPlan]:
        return state, StepPlan(step=step, kind=StepKind.DECODE)


class Unrun(Rank):
    """Takes its next step as read."""

    def run(self, plan: StepPlan, state: EngineState) -> list[Any]:
        assert isinstance(self.scheduler, Scripted)
        ready = plan.step + 1 < len(self.scheduler.ready) and self.scheduler.ready[plan.step + 1]
        self.state = replace(state, waiting=(0,) * ready)
        return []


@pytest.mark.parametrize("intervals", [(1, 2), (3, 4), (4, 6)])
def test_old_votes_are_forgotten_and_no_step_changes_its_kind(intervals: tuple[int, int]) -> None:
    config = replace(BASE, all_interval=intervals[0], any_interval=intervals[1])
    steps, period = 400, np.lcm(*intervals)
    draws = np.random.Generator(np.random.Philox(intervals[1]))
    # long stretches without a prompt step, and work that no chunk is found for
    ready_td, found_td = torch.from_numpy(draws.random((2, steps, 1)) < 0.2).unbind(0)
    scheduler = Scripted(config, ready_td[:, 0].tolist(), found_td[:, 0].tolist())
    state = EngineState(waiting=(0,) * bool(ready_td[0]), free=tuple(range(30)))
    ranks = Ranks([Unrun(scheduler=scheduler, device=ToyDevice(ToyModel(vocab_size=9, eos=-1), config), state=state)])
    kinds, longest = [], 0
    for _ in range(steps):
        ranks.step(lambda rank, plan: kinds.append(int(plan.kind)))
        longest = max(longest, len(ranks.votes))
    free_td = torch.full((steps, 1), config.num_blocks - 1, dtype=torch.int32)
    assert kinds == step_kinds(ready_td, free_td, found_td, config=config).tolist()
    assert sum(kinds) > 3
    assert longest == 2 * period


def test_rates_are_two_steps_old() -> None:
    """Sync: the newest rates give out rows; in flight they are not there yet, and two-step-old ones do both."""
    for asynchronous in (False, True):
        case = StreamCase(requests=4, scheduled=True, asynchronous=asynchronous, tokens=12, regime="together")
        ages: set[tuple[int, int]] = set()
        inputs = draw_streams(case, np.random.Generator(np.random.Philox(5)))
        streams_stepwise(
            **inputs,
            watch=lambda rank, plan, ages=ages: ages.update(
                (plan.step - item.rates_of[0], plan.step - item.rates_of[1])
                for item in plan.items
                if item.rates_of[0] >= 0
            ),
        )
        assert min(old for old, _ in ages) == 2
        assert min(new for _, new in ages) == (2 if asynchronous else 1)


def test_a_stopped_request_runs_once_more_and_its_output_is_dropped() -> None:
    case = StreamCase(requests=4, asynchronous=True)
    inputs = draw_streams(case, np.random.Generator(np.random.Philox(1)))
    late: list[int] = []

    def watch(rank: Any, plan: Any) -> None:
        late.extend(item.id for item in plan.items if rank.state.requests[item.id].finish is not Finish.OPEN)

    found = streams_stepwise(**inputs, watch=watch)
    truth = streams(**inputs)
    assert late
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("stops", [False, True])
def test_a_request_that_outgrows_the_pool_ends(stops: bool) -> None:
    config = replace(BASE, num_blocks=5, max_prompt=20, max_length=60, stop_on_preempt=stops)
    inputs = traffic([[1, 2, 3]], [50])
    model = ToyModel(vocab_size=50, eos=-1)
    found, finish = streams_stepwise(**inputs, model=model, config=config)
    truth, _ = streams(**inputs, model=model, config=config)
    made = int((found[0] >= 0).sum())
    assert 0 < made < 50
    assert torch.equal(found[0, :made], truth[0, :made])
    assert finish.tolist() == [Finish.RESOURCES if stops else Finish.IGNORED]


def test_aborts_while_waiting_in_flight_and_behind_the_end() -> None:
    inputs = traffic([[1, 2, 3], [4, 5], [6]], [9, 9, 1])
    inputs["abort_b"] = int32([0, 4, 40])
    inputs["arrival_b"] = int32([0, 0, 50])
    model = ToyModel(vocab_size=50, eos=-1)
    config = replace(BASE, all_interval=2, any_interval=3)
    found, finish = streams_stepwise(**inputs, model=model, config=config)
    truth, _ = streams(**inputs, model=model, config=config)
    assert finish.tolist() == [Finish.ABORTED, Finish.ABORTED, Finish.LENGTH]
    made = int((found[1] >= 0).sum())
    assert 0 < made < 9
    assert torch.equal(found[1, :made], truth[1, :made])
    assert (found[0] < 0).all()
    assert torch.equal(found[2], truth[2])


def test_counters_that_cannot_be_are_an_error() -> None:
    request = Request(id=1, tokens=(1,), prompt=1, max_tokens=1)
    assert [replace(request, scheduled=n, processed=5).in_flight for n in (5, 6)] == [0, 1]
    for scheduled in (4, 7):
        with pytest.raises(RuntimeError, match="request 1: "):
            _ = replace(request, scheduled=scheduled, processed=5).in_flight


# batch invariance


def test_streams_are_batch_invariant(judged) -> None:
    assert [row for row in judged.without("scheduler", "batch_invariant") if row.startswith("streams")] == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

MODEL = ToyModel(vocab_size=9, eos=1)
STREAMS = {**traffic([[1, 2], [3]], [2, 2]), "model": MODEL, "config": BASE}
QUEUE = waiting([3, 4])
BATCH = batch([1, 2], [3, 4], [1, 1])
FLAGS, BLOCKS = torch.ones(3, 1, dtype=torch.bool), torch.full((3, 1), 5, dtype=torch.int32)
VOTES = {"ready_td": FLAGS, "free_td": BLOCKS, "chosen_td": FLAGS, "config": BASE}
SPANS = {"start_b": int32([0]), "end_b": int32([2]), "total_b": int32([3]), "is_decode": True, "keep": 0, "cost": COST}


@pytest.mark.parametrize("function", [streams, streams_stepwise])
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("prompt_bs", int32([[1]]), ValueError),
        ("prompt_bs", torch.zeros(2, 2), TypeError),
        ("length_b", int32([0, 1]), ValueError),
        ("length_b", int32([3, 1]), ValueError),
        ("max_tokens_b", int32([0, 1]), ValueError),
        ("arrival_b", int32([-1, 0]), ValueError),
        ("abort_b", int32([-2, 0]), ValueError),
        ("abort_b", torch.zeros(2), TypeError),
    ],
)
def test_traffic_is_refused(function: Callable[..., Any], name: str, value: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^({name}|length_b): "):
        function(**STREAMS | {name: value})
    for refused in (streams, streams_stepwise):
        for kind in (ValueError, TypeError):
            bad = int32([0, 0]) if kind is ValueError else torch.ones(2)
            with pytest.raises(kind, match="^length_b: "):
                refused(**STREAMS | {"length_b": bad})


def test_an_engine_that_hands_over_is_declined_and_a_hang_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="^config: "):
        streams_stepwise(**STREAMS | {"config": PROMPT_ENGINE})

    class Idle(Scheduler):
        def append(self, state: Any, request: Any, tokens: Any, *, stored: bool = False) -> Any:
            return super().append(state, request, (), stored=stored)

    # the steps that requests may need grow with the intervals of the votes
    hasty = replace(BASE, all_interval=2, any_interval=3)
    with pytest.raises(RuntimeError, match="do not end"):
        streams_stepwise(**STREAMS | {"config": hasty}, scheduler=Idle)


@pytest.mark.parametrize("function", [prefill_step, prefill_step_vectorised])
def test_queues_are_refused(function: Callable[..., Any]) -> None:
    def call(queue: WaitingQueue) -> None:
        function(queue, free=1, running=0, config=BASE)

    for column, value in (("done_w", int32([3, 0])), ("held_w", int32([-1, 0])), ("total_w", int32([1]))):
        with pytest.raises(ValueError, match=r"^queue\."):
            call(replace(QUEUE, **{column: value}))
    with pytest.raises(TypeError, match=r"^queue\.is_ready_w: "):
        call(replace(QUEUE, is_ready_w=int32([1, 1])))
    for refused in (prefill_step, prefill_step_vectorised):
        for error, bad in ((ValueError, int32([9, 0])), (TypeError, torch.zeros(2))):
            with pytest.raises(error, match=r"^queue\."):
                refused(replace(QUEUE, done_w=bad), free=1, running=0, config=BASE)


def test_batches_are_refused() -> None:
    for refused in (decode_step, decode_step_vectorised):
        for error, bad in ((ValueError, int32([0, -1])), (TypeError, torch.zeros(2))):
            with pytest.raises(error, match=r"^batch\.held_r: "):
                refused(replace(BATCH, held_r=bad), free=1, config=BASE)
        with pytest.raises(ValueError, match=r"^batch\.total_r: expected at most one block"):
            refused(replace(BATCH, total_r=int32([3, 30])), free=1, config=BASE)


def test_votes_are_refused() -> None:
    for refused in (step_kinds, step_kinds_vectorised):
        for error, name, bad in (
            (ValueError, "ready_td", FLAGS[:, :0]),
            (ValueError, "free_td", BLOCKS + 40),
            (TypeError, "chosen_td", BLOCKS),
        ):
            with pytest.raises(error, match=f"^{name}: "):
                refused(**VOTES | {name: bad})


def test_spans_are_refused() -> None:
    for refused in (step_flops, step_flops_vectorised):
        for error, name, bad in (
            (ValueError, "start_b", int32([-1])),
            (ValueError, "end_b", int32([-1])),
            (ValueError, "total_b", int32([1])),
            (ValueError, "keep", -1),
            (TypeError, "end_b", torch.ones(1)),
        ):
            with pytest.raises(error, match=f"^{name}: "):
                refused(**SPANS | {name: bad})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"gamma": -1}, "gamma"),
        ({"block_size": 5}, "block_size"),
        ({"max_keys": 29}, "max_keys"),
        ({"cp_size": 9}, "budget"),
        ({"chunked": False}, "budget"),
    ],
)
def test_configurations_are_refused(change: dict[str, Any], name: str) -> None:
    assert isinstance(BASE, SchedulerConfig)
    with pytest.raises(ValueError, match=f"^{name}: "):
        replace(BASE, **change)


def test_models_and_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="^quality: "):
        replace(MODEL, quality=101)
    with pytest.raises(ValueError, match="^vocab_size: "):
        replace(MODEL, vocab_size=0)
    with pytest.raises(ValueError, match="^cap: "):
        PairCost(ratio=1, width=1, precision=Precision.FP8, cap=-1)
    with pytest.raises(ValueError, match="^ratio: "):
        PairCost(ratio=0, width=1, precision=Precision.FP8)
