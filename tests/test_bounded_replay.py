"""Bounded replay: worked rows, the cone behind the cut in integers and on the tiny stack, what both sides refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.bounded_replay import (
    exact_layers_vectorised,
    replay_plan_vectorised,
    replay_prefill_vectorised,
    ring_load_plan_vectorised,
)
from deeptwin.parity import goldens, replay_table
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.csa2 import RunCase, draw_run
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference.bounded_replay import (
    exact_layers,
    rebuild_rows,
    replay_plan,
    replay_prefill,
    ring_load_plan,
)
from deeptwin.reference.config import SlidingWindow, Truncation
from deeptwin.reference.csa2 import csa2_run
from deeptwin.reference.window import history_slots

SMALL = SlidingWindow(window=4, ring=7)
MASK = replace(SMALL, truncation=Truncation.MASK, keep=7)
COMPACT = replace(SMALL, truncation=Truncation.COMPACT, keep=7)
RELEASED = SlidingWindow(window=128, ring=134, truncation=Truncation.COMPACT, keep=140)
CARD = load_card("bounded_replay")
Judged = Callable[[str], list[Outcome]]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def hidden(count: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).integers(0, 2**31 - 1, count))


def prefill(x: Tensor, config: SlidingWindow, *, layers: int = 3, steps: tuple[int, ...] | None = None) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int64)
    counts = torch.tensor([[n] for n in steps or (len(x),)])
    return replay_prefill(x, zero, zero, counts, config=config, layers=layers)[0]


def kept_rows(first: int, end: int, known: int, config: SlidingWindow) -> Tensor:
    return replay_plan(ints(first), ints(end), ints(known), ints(0), config=config)[2]


# properties of the reference


def test_worked_rows_of_a_chunk() -> None:
    # N = 12, K = 7: the cut is 5; the chunk holds 3 … 6
    low, history, flags = replay_plan(ints(3), ints(7), ints(12), ints(0), config=COMPACT)
    assert low.tolist() == [[0, 4], [1, 5], [2, 5], [3, 5]]
    assert history.tolist() == [[3, 0], [2, 0], [1, 0], [0, 0]]
    assert flags.tolist() == [[False] * 3, [False] * 3, [True] * 3, [True] * 3]
    masked = replay_plan(ints(3), ints(7), ints(12), ints(0), config=MASK)
    assert torch.equal(masked[0], low)
    assert masked[2].tolist() == [[True, False, True]] * 2 + [[True] * 3] * 2
    # keys below v are in nobody's ring
    assert replay_plan(ints(9), ints(10), ints(12), ints(8), config=COMPACT)[0].tolist() == [[8, 8]]


def test_a_chunk_before_the_kept_rows_has_one_placeholder_that_is_not_stored() -> None:
    _, _, flags = replay_plan(ints(0), ints(4), ints(30), ints(0), config=COMPACT)
    assert flags.tolist() == [[False] * 3] * 3 + [[True, False, False]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 20), st.integers(0, 30), st.integers(0, 9))
def test_a_chunk_costs_as_many_decoder_rows_as_it_keeps(first: int, count: int, beyond: int, more: int) -> None:
    """clip = clamp(T − K − s, 0, q − 1) rows are dropped; those that remain are the last ones."""
    config = replace(COMPACT, keep=COMPACT.ring + more)
    known = first + count + beyond
    clip = min(max(known - config.keep - first, 0), count - 1)
    computed = kept_rows(first, first + count, known, config)[:, 0]
    assert computed.tolist() == [False] * clip + [True] * (count - clip)
    assert kept_rows(first, first + count, known, MASK)[:, 0].all()


def test_the_published_numbers_of_rebuilding() -> None:
    """2541 tokens rebuild the last window of 20 layers of 128, published as 20 · 128; the ring takes B more."""
    assert rebuild_rows(20, config=RELEASED) == (2541, 2547)
    assert rebuild_rows(1, config=RELEASED) == (128, 134)


def test_the_first_layer_alone_has_exact_rows_with_140_kept() -> None:
    rows = torch.arange(1000, dtype=torch.int32)
    count = exact_layers(rows, torch.zeros_like(rows), ints(1000), config=RELEASED, layers=2)
    # d = 127 … 139 in the first layer, none deeper
    assert count.tolist() == [0] * 987 + [1] * 13


@pytest.mark.parametrize(("keep", "exact"), [(2541, True), (2540, False)])
def test_2541_tokens_rebuild_20_layers_and_2540_do_not(keep: int, exact: bool) -> None:
    """The last window of keys of the last layer, which are outputs of the 19th, and its last output."""
    rows = torch.arange(2600 - 128, 2600, dtype=torch.int32)
    config = replace(RELEASED, keep=keep)
    count = exact_layers(rows, torch.zeros_like(rows), ints(2600), config=config, layers=20)
    assert bool((count >= 19).all()) == exact
    assert (int(count[-1]) == 20) == exact


@pytest.mark.parametrize(("window", "layers"), [(4, 2), (4, 3), (3, 4)])
def test_the_tokens_of_an_exact_rebuild_are_the_least(window: int, layers: int) -> None:
    """The keys of the last layer's last window are exact with that K and not with one less."""
    length = 40
    for spare, which in ((0, 0), (2, 1)):
        ring = window + spare
        keep = rebuild_rows(layers, config=SlidingWindow(window=window, ring=ring))[which]
        held = range(length - ring, length) if which else range(length - window, length)
        for k, exact in ((keep, True), (keep - 1, False)):
            if k < ring:
                continue
            config = SlidingWindow(window=window, ring=ring, truncation=Truncation.MASK, keep=k)
            rows = torch.tensor(held, dtype=torch.int32)
            below = exact_layers(rows, torch.zeros_like(rows), ints(length), config=config, layers=layers)
            # a key of layer l is an output of layer l - 1
            assert bool((below >= layers - 1).all()) == exact


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 8), st.integers(1, 30), st.integers(1, 3))
def test_the_cone_is_hit_exactly(window: int, spare: int, more: int, length: int, layers: int) -> None:
    """Property 6: outputs agree with those without truncation exactly where they are said to."""
    ring = window + spare
    config = SlidingWindow(window=window, ring=ring, truncation=Truncation.COMPACT, keep=ring + more)
    x = hidden(length, length)
    agree = prefill(x, config, layers=layers) == prefill(x, replace(config, truncation=Truncation.OFF), layers=layers)
    rows = torch.arange(length, dtype=torch.int32)
    count = exact_layers(rows, torch.zeros_like(rows), ints(length), config=config, layers=layers)
    assert torch.equal(agree.long().cumprod(1).sum(1), count.long())


def test_a_token_reaches_as_far_as_its_cone() -> None:
    """In layer i a token's window reach is i · (W − 1) rows; the global sum is held fixed by a second change."""
    x = hidden(24)
    base = prefill(x, SMALL)
    for spot in (0, 9):
        other = x.clone()
        # the first token of weight 3 takes back what the weight of `spot` adds, so sums agree from `spot` on
        other[spot] += (2 * (spot + 1) + 3) % (2**31 - 1) if other[spot] < 2**30 else -(2 * (spot + 1) + 3)
        other[spot + 1] += (2 * spot + 3) * (1 if other[spot] < x[spot] else -1)
        moved = prefill(other, SMALL) != base
        for layer in range(3):
            touched = moved[:, layer].nonzero()[:, 0].tolist()
            assert touched == list(range(spot, min(spot + 1 + (layer + 1) * 3, 23) + 1))


def test_a_plan_loads_what_the_slots_of_a_history_name() -> None:
    first, state, valid = ints(9, 2, 6, 0), ints(0, 1, 2, 3), ints(0, 0, 4, 0)
    plan = ring_load_plan(first, state, valid, config=SMALL)
    assert plan[:3].tolist() == [
        [[0, 5, 7, 0], [0, 0, 2, 2], [-1, 0, 0, 4]],
        [[-1, 0, 2, 4], [1, 0, 2, 6], [-1, 0, 0, 8]],
        [[-1, 0, 2, 8], [2, 4, 6, 10], [-1, 0, 0, 12]],
    ]
    rows = torch.full((16,), -9)
    for source, begin, end, row in plan.flatten(0, 1).tolist():
        rows[row : row + end - begin] = torch.arange(begin, end) + source * 7 if source >= 0 else -1
    assert rows.tolist() == history_slots(first, state, valid, config=SMALL).flatten().tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 5), st.integers(0, 60))
def test_a_load_is_three_copies_at_most(first: int, window: int, spare: int, valid: int) -> None:
    config = SlidingWindow(window=window, ring=window + spare)
    (plan,) = ring_load_plan(ints(first), ints(1), ints(min(valid, first)), config=config).tolist()
    assert sum(end - begin for _, begin, end, _ in plan) == window
    assert all(0 <= begin <= end <= config.ring for _, begin, end, _ in plan)
    # no row that is filled with zeros belongs to a valid position
    assert sum(end - begin for source, begin, end, _ in plan if source < 0) == max(
        min(valid, first) - first + window, 0
    )


def test_no_key_below_v_is_seen() -> None:
    """Property 8: the first key of every row is at least v, in both kinds of layers."""
    low, _, _ = replay_plan(ints(9, 4), ints(15, 9), ints(20, 9), ints(7, 4), config=COMPACT)
    assert (low >= torch.tensor([[7]] * 6 + [[4]] * 5)).all()


def test_rings_hold_the_last_positions_in_every_mode() -> None:
    """Property 5, and the same bytes whether dropped rows were computed or not."""
    x, zero = hidden(31), torch.zeros(1, dtype=torch.int64)
    for config in (SMALL, MASK, COMPACT):
        _, ring = replay_prefill_vectorised(x, zero, zero, torch.tensor([[9], [22]]), config=config, layers=1)
        assert [int(ring[0, 0, p % 7]) for p in range(24, 31)] == x[24:].tolist()


def test_a_row_without_keys_has_finite_outputs_on_the_stack() -> None:
    """Placeholders and rows below the cut see the sink and compressed entries only."""
    inputs = draw_run(RunCase(lengths=(30,), truncation="mask"), np.random.Generator(np.random.Philox(1)))
    out, _, _ = csa2_run(**inputs)
    assert torch.isfinite(out).all()


def test_the_error_falls_to_zero_at_the_cone_of_the_tiny_stack() -> None:
    """The second verdict: reported, never gated as equal; what is gated is where it must vanish, and that it exists."""
    rows = replay_table.errors(stack="tiny", length=26, keep=14, seeds=1)
    assert [row.distance for row in rows] == list(range(14))
    for layer in range(3):
        edge = (layer + 1) * 3
        values = [row.errors[layer] for row in rows]
        assert all(value == 0 for value in values[edge:])
        assert values[edge - 1] > 0
        assert all(value < 1 for value in values)
    assert "bounded against exact" in replay_table.rendered(rows)


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("bounded_replay") == []


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from(list(Truncation)),
    st.integers(0, 8),
    st.integers(0, 6),
)
def test_any_steps_and_prefixes_come_out_alike(
    counts: list[list[int]], truncation: Truncation, more: int, cached: int
) -> None:
    width = max(len(row) for row in counts)
    steps = torch.tensor([row + [0] * (width - len(row)) for row in counts]).T
    config = replace(SMALL, truncation=truncation, keep=SMALL.ring + more)
    first = torch.tensor([cached] * len(counts))
    inputs = (hidden(int(steps.sum())), hidden(len(counts), 1), first, steps)
    ours = replay_prefill_vectorised(*inputs, config=config, layers=2)
    for a, b in zip(ours, replay_prefill(*inputs, config=config, layers=2), strict=True):
        assert torch.equal(a, b)


# batch invariance


def test_every_candidate_is_invariant(judged: Judged) -> None:
    found = {"batch_invariant", "chunk_invariant", "masked_equals_absent"}
    outcomes = [o for o in judged("bounded_replay") if o.check in found and o.status is Status.PASSED]
    assert {(o.op, o.check) for o in outcomes if o.candidate == "vectorised"} >= {
        ("replay_plan", "batch_invariant"),
        ("replay_plan", "chunk_invariant"),
        ("exact_layers", "batch_invariant"),
        ("ring_load_plan", "batch_invariant"),
        ("replay_prefill", "batch_invariant"),
        ("replay_prefill", "chunk_invariant"),
        ("replay_prefill", "masked_equals_absent"),
    }


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

ONE, TWO, FLOAT = ints(0), ints(0, 1), torch.tensor([0.0])


def test_bad_chunks_are_refused() -> None:
    for plan in (replay_plan, replay_plan_vectorised):
        with pytest.raises(ValueError, match="end_b: expected b=1, got b=2"):
            plan(ONE, TWO, ONE, ONE, config=COMPACT)
        with pytest.raises(TypeError, match="known_b: expected"):
            plan(ONE, ints(1), FLOAT, ONE, config=COMPACT)
    with pytest.raises(ValueError, match="end_b: expected chunks of one token or more"):
        replay_plan(ONE, ONE, ONE, ONE, config=COMPACT)
    with pytest.raises(ValueError, match="known_b: expected at least the chunks' ends"):
        replay_plan(ONE, ints(3), ints(2), ONE, config=COMPACT)
    with pytest.raises(ValueError, match="valid_b: expected at most the chunks' begins"):
        replay_plan(ONE, ints(3), ints(3), ints(1), config=COMPACT)


def test_bad_rows_are_refused() -> None:
    for exact in (exact_layers, exact_layers_vectorised):
        with pytest.raises(ValueError, match="seq_t: expected t=1, got t=2"):
            exact(ONE, TWO, ints(3), config=MASK, layers=1)
        with pytest.raises(TypeError, match="positions_t: expected"):
            exact(FLOAT, ONE, ints(3), config=MASK, layers=1)
        with pytest.raises(ValueError, match="layers: expected a positive number, got 0"):
            exact(ONE, ONE, ints(3), config=MASK, layers=0)
    with pytest.raises(ValueError, match=r"seq_t: expected values in \[0, 1\), got 1"):
        exact_layers(ONE, ints(1), ints(3), config=MASK, layers=1)
    with pytest.raises(ValueError, match="positions_t: expected positions below"):
        exact_layers(ints(3), ONE, ints(3), config=MASK, layers=1)
    with pytest.raises(ValueError, match="layers: expected a positive number, got 0"):
        rebuild_rows(0, config=MASK)


def test_bad_loads_are_refused() -> None:
    for plan in (ring_load_plan, ring_load_plan_vectorised):
        with pytest.raises(ValueError, match="state_b: expected b=1, got b=2"):
            plan(ONE, TWO, ONE, config=SMALL)
        with pytest.raises(TypeError, match="first_b: expected"):
            plan(FLOAT, ONE, ONE, config=SMALL)


def test_bad_prompts_are_refused() -> None:
    x, count = hidden(3), torch.tensor([[3]])
    for run in (replay_prefill, replay_prefill_vectorised):
        with pytest.raises(ValueError, match="counts_kb: expected steps of 3 tokens in all"):
            run(x, ONE, ONE, torch.tensor([[2]]), config=SMALL, layers=1)
        with pytest.raises(ValueError, match="layers: expected a positive number, got 0"):
            run(x, ONE, ONE, count, config=SMALL, layers=0)
        with pytest.raises(TypeError, match="first_b: expected"):
            run(x, ONE, FLOAT, count, config=SMALL, layers=1)
    with pytest.raises(ValueError, match="hidden_t: expected values in"):
        replay_prefill(x - 2**31, ONE, ONE, count, config=SMALL, layers=1)


def test_truncation_needs_tokens_to_keep() -> None:
    """K < W + B, and K = 0 with a mode on."""
    for keep in (6, 0):
        with pytest.raises(ValueError, match=f"keep: expected at least the ring of 7, got {keep}"):
            replace(MASK, keep=keep)
