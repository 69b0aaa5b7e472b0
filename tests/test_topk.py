"""Exact selection: laws of the reference, then what both sides refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.topk import (
    candidate_blocks_triton,
    compact_lengths_triton,
    physical_slots_triton,
    restore_indices_triton,
    topk_tilelang,
    topk_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.rules import TopK
from deeptwin.reference.topk import candidate_blocks, compact_lengths, physical_slots, restore_indices, topk

CARD = load_card("topk")
INF, NAN = math.inf, math.nan


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)


# properties of the reference


def test_by_hand() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]] * 4)
    assert topk(scores, int32([5, 3, 1, 0]), k=3).tolist() == [[1, 2, 3], [0, 1, 2], [0, -1, -1], [-1, -1, -1]]


def test_ties_go_to_the_lower_index_and_zeros_are_equal() -> None:
    """U45, U89: relu leaves whole runs of exact zeros, some of them negative."""
    scores = torch.tensor([[-0.0, 0.0, 5.0, -0.0, 0.0, 0.0, -1.0]])
    assert topk(scores, int32([7]), k=4).tolist() == [[0, 1, 2, 3]]
    # the selections that a rule without a tie order has to accept: 2 and any three of the five zeros
    accepted = TopK(scores="scores_ts", ties="any", crossing=0.0)
    declared = TopK(scores="scores_ts", ties="lower", crossing=0.0)
    for chosen, by_any, by_lower in (
        ([0, 1, 2, 3], True, True),
        ([2, 3, 4, 5], True, False),
        ([0, 1, 3, 4], False, False),
        ([2, 4, 5, 6], False, False),
    ):
        oracles = Given(scores_ts=scores)
        assert accepted.judge(int32([chosen]), oracles).ok is by_any
        assert declared.judge(int32([chosen]), oracles).ok is by_lower


class Given:
    """Oracles of a selection: only the arguments count."""

    def __init__(self, **arguments: Tensor) -> None:
        self.arguments: dict[str, Any] = dict(arguments)
        self.semantic = self.contract = self.rival = torch.zeros(1, 4, dtype=torch.int32)
        self.marks: list[tuple[str, Tensor]] = []


def test_the_rule_sees_lengths_order_and_crossings() -> None:
    rule = TopK(scores="scores_ts", lengths="length_t", crossing=0.0, ascending=True)
    oracles = Given(scores_ts=torch.tensor([[1.0, INF, 2.0, 3.0, 9.0]]), length_t=int32([4]))
    for chosen, right in (([1, 3], True), ([3, 1], False), ([1, 4], False), ([1, 2], False), ([2, 3], False)):
        assert rule.judge(int32([chosen]), oracles).ok is right
    wide = rule.judge(int32([[0, 1, 2, 3, -1]]), oracles)
    assert wide.ok
    assert not rule.judge(int32([[0, -1, 1, 2, 3]]), oracles).ok


def test_nan_and_masked_scores_are_never_chosen() -> None:
    """U18: 4096 scores, 4090 of them NaN, k = 2048."""
    scores = torch.full((1, 4096), NAN)
    places = [3, 77, 1000, 2047, 2048, 4095]
    scores[0, places] = torch.tensor([1.0, -5.0, 0.0, INF, 2.0, -1e30])
    found = topk(scores, int32([4096]), k=2048)[0]
    assert found[:6].tolist() == places
    assert (found[6:] == -1).all()
    masked = torch.tensor([[-INF, 1.0, -INF, NAN]])
    assert topk(masked, int32([4]), k=3).tolist() == [[1, -1, -1]]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("k", [8, 16, 40])
def test_lengths_around_k(length: int, k: int) -> None:
    """U19: k above, at and below the length; what stands beyond it may be anything."""
    scores = draw(1, 2, 20)
    poisoned = scores.clone()
    poisoned[0, length:], poisoned[1, length:] = NAN, INF
    found = topk(poisoned, int32([length] * 2), k=k)
    for row in range(2):
        best = sorted(range(length), key=lambda j: (-float(scores[row, j]), j))[:k]
        assert found[row].tolist() == sorted(best) + [-1] * (k - len(best))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-2, 2), min_size=0, max_size=24), st.integers(1, 30))
def test_equals_a_sort_by_score_and_index(values: list[int], k: int) -> None:
    scores = torch.tensor([values], dtype=torch.float32).reshape(1, -1)
    best = sorted(range(len(values)), key=lambda j: (-values[j], j))[:k]
    found = topk(scores, int32([len(values)]), k=k)[0].tolist()
    assert found == sorted(best) + [-1] * (k - len(best))


def test_candidate_blocks_by_hand() -> None:
    # blocks of 4: best 9, 8, 7 and the partial last one, which is kept whatever it holds
    scores = torch.tensor([[9.0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 7, -50, -60]])
    assert candidate_blocks(scores, int32([14]), block_size=4, k=2).tolist() == [[0, 3]]
    assert candidate_blocks(scores, int32([14]), block_size=4, k=3).tolist() == [[0, 1, 3]]
    assert candidate_blocks(scores, int32([14]), block_size=4, k=6).tolist() == [[0, 1, 2, 3, -1, -1]]
    assert candidate_blocks(scores, int32([8]), block_size=4, k=1).tolist() == [[1]]
    assert candidate_blocks(scores, int32([0]), block_size=4, k=2).tolist() == [[-1, -1]]


def test_an_infinite_score_does_not_push_out_the_last_block() -> None:
    scores = torch.tensor([[INF, 0.0, 0.0, 0.0]])
    assert candidate_blocks(scores, int32([4]), block_size=2, k=1).tolist() == [[1]]


def test_unreachable_blocks_are_dropped_and_the_last_is_not() -> None:
    scores = torch.full((1, 12), -INF)
    scores[0, 5] = 1.0
    assert candidate_blocks(scores, int32([12]), block_size=4, k=3).tolist() == [[1, 2, -1]]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 511, 512, 513, 700])
def test_candidates_hold_what_the_source_itself_selects(length: int) -> None:
    """Every block of one of the best k − 1 entries is kept: one place may go to the last block."""
    scores, lengths = draw(length, 3, 700), int32([length] * 3)
    blocks = candidate_blocks(scores, lengths, block_size=8, k=16)
    own = topk(scores, lengths, k=15)
    for row in range(3):
        assert set((own[row][own[row] >= 0] // 8).tolist()) <= set(blocks[row].tolist())
        assert (length - 1) // 8 in blocks[row].tolist()


@pytest.mark.parametrize("length", [0, 1, 8, 9, 100, 127, 128])
def test_with_room_for_every_block_the_selection_is_that_of_the_whole_row(length: int) -> None:
    scores, lengths = draw(length + 7, 2, 128).relu(), int32([length] * 2)
    blocks = candidate_blocks(scores, lengths, block_size=8, k=16)
    columns = (blocks.long()[:, :, None] * 8 + torch.arange(8)).flatten(1)
    compact = torch.where(columns >= 0, scores.gather(1, columns.clamp(min=0)), NAN)
    kept = compact_lengths(blocks, lengths, block_size=8)
    assert kept.tolist() == [length] * 2
    found = restore_indices(topk(compact, kept, k=20), blocks, block_size=8)
    assert torch.equal(found, topk(scores, lengths, k=20))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16383, 16384, 16385, 20001])
def test_the_closed_form_of_compact_lengths(length: int) -> None:
    """8 (kept − 1) + (S − 1) mod 8 + 1 with kept = min(nb, 2048)."""
    count = -(-length // 8)
    kept = min(count, 2048)
    blocks = torch.cat([torch.arange(kept - 1), torch.tensor([count - 1]), torch.full((2048 - kept,), -1)])
    found = compact_lengths(blocks[None].to(torch.int32), int32([length]), block_size=8)
    assert found.item() == 8 * (kept - 1) + (length - 1) % 8 + 1


def test_restored_indices_and_slots_by_hand() -> None:
    """U79: −1 stays −1, and never becomes the last block, page or slot."""
    blocks = int32([[2, 5, -1]])
    idx = int32([[0, 7, 8, 15, 16, -1, 24, -(2**31)]])
    assert restore_indices(idx, blocks, block_size=8).tolist() == [[16, 23, 40, 47, -1, -1, -1, -1]]
    table = int32([[7, 0, -1]])
    entries = int32([[0, 63, 64, 128, -1, 192, 2**31 - 1]])
    assert physical_slots(entries, table, page_entries=64).tolist() == [[448, 511, 0, -1, -1, -1, -1]]
    assert physical_slots(entries, torch.zeros(1, 0, dtype=torch.int32), page_entries=64).eq(-1).all()


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("topk") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("topk", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

SCORES, LENGTHS, TABLE = torch.zeros(2, 6), int32([6, 3]), int32([[0, 1], [1, -1]])
ROWS = {"scores_ts": SCORES, "length_t": LENGTHS}
CALLS: dict[str, tuple[tuple[Callable[..., Tensor], ...], dict[str, Any]]] = {
    "topk": ((topk, topk_triton, topk_tilelang), ROWS | {"k": 2}),
    "candidate_blocks": ((candidate_blocks, candidate_blocks_triton), ROWS | {"block_size": 2, "k": 2}),
    "compact_lengths": (
        (compact_lengths, compact_lengths_triton),
        {"blocks_tj": TABLE, "length_t": LENGTHS, "block_size": 2},
    ),
    "restore_indices": (
        (restore_indices, restore_indices_triton),
        {"idx_tk": TABLE, "blocks_tj": TABLE, "block_size": 2},
    ),
    "physical_slots": (
        (physical_slots, physical_slots_triton),
        {"idx_tk": TABLE, "table_tp": TABLE, "page_entries": 2},
    ),
}
BAD_VALUES = {
    "topk": {"scores_ts": SCORES[0], "length_t": int32([1]), "k": 0},
    "candidate_blocks": {"scores_ts": SCORES[0], "length_t": int32([1]), "k": 0, "block_size": 0},
    "compact_lengths": {"blocks_tj": TABLE[0], "length_t": int32([1]), "block_size": 0},
    "restore_indices": {"idx_tk": TABLE[0], "blocks_tj": TABLE[:1], "block_size": -8},
    "physical_slots": {"idx_tk": TABLE[0], "table_tp": TABLE[:1], "page_entries": 0},
}
BAD_DTYPES = {
    "topk": {"scores_ts": SCORES.to(torch.int32), "length_t": LENGTHS.long()},
    "candidate_blocks": {"scores_ts": SCORES.half(), "length_t": LENGTHS.long()},
    "compact_lengths": {"blocks_tj": TABLE.long(), "length_t": LENGTHS.long()},
    "restore_indices": {"idx_tk": TABLE.long(), "blocks_tj": TABLE.long()},
    "physical_slots": {"idx_tk": TABLE.long(), "table_tp": TABLE.float()},
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, bad in BAD_VALUES.items() for name in bad])
def test_values_are_refused(op: str, name: str) -> None:
    functions, arguments = CALLS[op]
    for function in functions:
        with pytest.raises(ValueError, match=f"^{name}: "):
            function(**arguments | {name: BAD_VALUES[op][name]})


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, bad in BAD_DTYPES.items() for name in bad])
def test_dtypes_are_refused(op: str, name: str) -> None:
    functions, arguments = CALLS[op]
    for function in functions:
        with pytest.raises(TypeError, match=f"^{name}: "):
            function(**arguments | {name: BAD_DTYPES[op][name]})


@pytest.mark.parametrize("lengths", [[-1, 3], [7, 3]])
def test_lengths_outside_the_row_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^length_t: expected values in \[0, 7\)"):
        topk(SCORES, int32(lengths), k=2)
    with pytest.raises(ValueError, match=r"^length_t: "):
        candidate_blocks(SCORES, int32(lengths), block_size=2, k=2)


def test_every_function_refuses_by_name() -> None:
    """The errors that each docstring promises, by function."""
    for error in (ValueError, TypeError):
        bad = int32([[1]]) if error is ValueError else LENGTHS.float()
        for refused in (topk, topk_triton, topk_tilelang):
            with pytest.raises(error):
                refused(SCORES, bad, k=1)
        for refused in (candidate_blocks, candidate_blocks_triton):
            with pytest.raises(error):
                refused(SCORES, bad, block_size=2, k=1)
        for refused in (compact_lengths, compact_lengths_triton):
            with pytest.raises(error):
                refused(TABLE, bad, block_size=2)
        wrong = TABLE[0] if error is ValueError else TABLE.float()
        for refused in (restore_indices, restore_indices_triton):
            with pytest.raises(error):
                refused(TABLE, wrong, block_size=2)
        for refused in (physical_slots, physical_slots_triton):
            with pytest.raises(error):
                refused(TABLE, wrong, page_entries=2)


def test_scores_that_are_not_contiguous_are_declined() -> None:
    scores = torch.zeros(6, 2).T
    for select in (topk_triton, topk_tilelang):
        with pytest.raises(NotImplementedError, match=r"^scores_ts: "):
            select(scores, LENGTHS, k=2)
    with pytest.raises(NotImplementedError, match=r"^scores_ts: "):
        candidate_blocks_triton(scores, LENGTHS, block_size=2, k=2)


def test_buffers_that_do_not_fit_are_refused() -> None:
    for out, error in ((int32([[0]]), ValueError), (torch.zeros(2, 2), TypeError)):
        with pytest.raises(error, match=r"^out: "):
            topk_triton(SCORES, LENGTHS, k=2, out=out)
        with pytest.raises(error, match=r"^out: "):
            restore_indices_triton(TABLE, TABLE, block_size=2, out=out)
        with pytest.raises(error, match=r"^out: "):
            physical_slots_triton(TABLE, TABLE, page_entries=2, out=out)


def test_rows_are_selected_at_once_in_parts_or_walked() -> None:
    """All ways are judged: the card has rows for each."""
    pytest.importorskip("triton")
    from deeptwin.kernels.triton_ops.topk import select_launch

    cases = [case for case in CARD.op("topk").cases(False) if case.columns]
    launches = [(case, select_launch(case.columns, case.k, "sm90")) for case in cases]
    ways = {(launch.at_once, case.columns > launch.block) for case, launch in launches}
    assert ways == {(True, False), (True, True), (False, True)}
    assert not select_launch(64, 16, "ascend950").at_once


def test_rows_of_the_card_take_every_launch_of_tilelang() -> None:
    pytest.importorskip("tilelang")
    from deeptwin.kernels.tilelang_ops.topk_sm90 import select_launch

    cases = [case for case in CARD.op("topk").cases(True) if case.columns]
    launches = [(case, select_launch(case.columns, case.k)) for case in cases]
    assert {launch.groups for _, launch in launches} == {4, 8, 16}
    parts = [-(-case.columns // launch.block) for case, launch in launches]
    again = [-(-n * case.k // launch.block) for n, (case, launch) in zip(parts, launches, strict=True)]
    assert {min(n, 2) for n in parts} == {min(n, 2) for n in again} == {1, 2}


def test_the_adapter_of_tilelang_declines() -> None:
    with pytest.raises(NotImplementedError, match=r"^scores_ts: expected a tensor on SM90"):
        topk_tilelang(SCORES, LENGTHS, k=2)
    with pytest.raises(NotImplementedError, match=r"^k: expected at most 16384"):
        topk_tilelang(torch.zeros(1, 32769), int32([5]), k=16385)
