"""Index lists of a sliding window: worked rows, laws of rings and chunks, then what both sides refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.window import (
    compact_clip_triton,
    history_slots_triton,
    ring_slots_triton,
    window_decode_triton,
    window_draft_triton,
    window_prefill_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference.config import SlidingWindow, Truncation
from deeptwin.reference.window import (
    compact_clip,
    compact_rows,
    history_slots,
    ring_slots,
    window_decode,
    window_draft,
    window_prefill,
)

SMALL = SlidingWindow(window=4, ring=7)
MASK = replace(SMALL, truncation=Truncation.MASK, keep=7)
COMPACT = replace(SMALL, truncation=Truncation.COMPACT, keep=7)
CARD = load_card("window")
Judged = Callable[[str], list[Outcome]]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill(p: int, first: int, *, known: int = 0, valid: int = 0, config: SlidingWindow = SMALL) -> list[int]:
    """The list of one query in a batch of one sequence."""
    return window_prefill(ints(p), ints(0), ints(first), ints(0), ints(known), ints(valid), config=config)[0].tolist()


# properties of the reference


def test_worked_rows_of_a_decode_step() -> None:
    # state 2 has slots 14 … 20; position 9 is in slot 14 + 9 mod 7 = 16
    rows = window_decode(ints(9, 1, 0, 9), ints(0, 0, 0, 1), ints(2, 2), ints(0, 8), config=SMALL)
    assert rows.tolist() == [[20, 14, 15, 16], [14, 15, -1, -1], [14, -1, -1, -1], [15, 16, -1, -1]]


def test_worked_rows_of_a_prefill_chunk() -> None:
    # the chunk begins at 5: 3 and 4 are rows 2 and 3 of the history, 5 and 6 rows 4 and 5
    assert prefill(6, 5) == [2, 3, 4, 5]
    assert prefill(6, 0) == [7, 8, 9, 10]
    assert prefill(1, 0) == [4, 5, -1, -1]
    assert prefill(6, 5, valid=4) == [3, 4, 5, -1]
    # two sequences: histories of 4 rows each, then the chunks
    rows = window_prefill(ints(2, 9), ints(0, 1), ints(2, 8), ints(0, 3), ints(0, 0), ints(0, 0), config=SMALL)
    assert rows.tolist() == [[2, 3, 8, -1], [6, 7, 11, 12]]


@pytest.mark.parametrize("config", [MASK, COMPACT], ids=lambda config: config.truncation.value)
def test_worked_rows_under_truncation(config: SlidingWindow) -> None:
    # N = 12, K = 7: nothing below position 5 is seen
    assert prefill(6, 5, known=12, config=config) == [4, 5, -1, -1]
    assert prefill(9, 5, known=12, config=config) == [5, 6, 7, 8]
    assert prefill(4, 3, known=12, config=config) == [-1] * 4
    # the restart is later than the cut
    assert prefill(9, 7, known=12, valid=7, config=config) == [4, 5, 6, -1]


def test_worked_slots_of_a_ring() -> None:
    def stored(first: int, end: int, known: int, config: SlidingWindow) -> list[int]:
        count = end - first
        zeros = torch.zeros(count, dtype=torch.int32)
        positions = torch.arange(first, end, dtype=torch.int32)
        return ring_slots(positions, zeros, ints(end), ints(known), ints(1), config=config).tolist()

    # the last 7 of 9 tokens
    assert stored(0, 9, 9, SMALL) == [-1, -1, 9, 10, 11, 12, 13, 7, 8]
    assert stored(6, 8, 8, SMALL) == [13, 7]
    # N - K = 5: COMPACT leaves positions 3 and 4 out, MASK stores them
    assert stored(3, 7, 12, COMPACT) == [-1, -1, 12, 13]
    assert stored(3, 7, 12, MASK) == [10, 11, 12, 13]


def test_worked_history_and_clip() -> None:
    assert history_slots(ints(9, 2, 6), ints(0, 1, 2), ints(0, 0, 4), config=SMALL).tolist() == [
        [5, 6, 0, 1],
        [-1, -1, 7, 8],
        [-1, -1, 18, 19],
    ]
    first, end, known = ints(0, 3, 3, 14), ints(3, 10, 5, 20), ints(20, 20, 20, 20)
    assert compact_clip(first, end, known, config=COMPACT).tolist() == [2, 6, 1, 0]
    assert compact_clip(first, end, known, config=MASK).tolist() == [0, 0, 0, 0]
    assert compact_rows(first, end, known, config=COMPACT).tolist() == [2, 9, 11, 12, 13, 14, 15, 16, 17]
    none = torch.zeros(0, dtype=torch.int32)
    assert compact_rows(none, none, none, config=COMPACT).tolist() == []


def test_draft_blocks_see_133_of_192_slots() -> None:
    released = SlidingWindow(window=128, ring=134)
    rows = window_draft(ints(500, 2, -1), ints(0, 1, 2), ints(0, 0, 0), config=released, draft=5)
    assert rows.shape == (3, 192)
    assert (rows >= 0).sum(1).tolist() == [133, 8, 5]
    assert rows[0, :133].unique().numel() == 133
    assert rows[0, [0, 127, 128, 132]].tolist() == [373 % 134, 500 % 134, 501 % 134, 505 % 134]
    assert rows[1, :8].tolist() == [134 + j for j in range(8)]


def replayed(positions: list[int], ring: Tensor, config: SlidingWindow) -> list[int]:
    """Writes a step into a ring of positions, then reads the windows; the positions that the last query sees."""
    p, zeros = ints(*positions), torch.zeros(len(positions), dtype=torch.int32)
    slots = ring_slots(p, zeros, ints(positions[-1] + 1), ints(0), ints(0), config=config)
    ring[slots[slots >= 0].long()] = p[slots >= 0].long()
    lists = window_decode(p, zeros, ints(0), ints(0), config=config)
    for row, query in zip(lists.tolist(), positions, strict=True):
        expected = list(range(max(0, query - config.window + 1), query + 1))
        assert [int(ring[s]) for s in row if s >= 0] == expected
    return [int(ring[s]) for s in lists[-1].tolist() if s >= 0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=12))
def test_tokens_that_are_taken_back_leave_the_window_whole(steps: list[tuple[int, int]]) -> None:
    # a ring of W + B rows survives steps of up to B + 1 tokens of which any number but the first is taken back
    ring, begin = torch.full((SMALL.ring,), -9), 0
    for count, taken_back in steps:
        replayed(list(range(begin, begin + count)), ring, SMALL)
        begin += max(1, count - taken_back)
    assert replayed([begin], ring, SMALL)[-1] == begin


def test_a_ring_as_long_as_the_window_does_not() -> None:
    tight, ring = SlidingWindow(window=8, ring=8), torch.full((8,), -9)
    for p in range(8):
        replayed([p], ring, tight)
    with pytest.raises(AssertionError):
        replayed([8, 9, 10], ring, tight)
    spare, ring = SlidingWindow(window=8, ring=11), torch.full((11,), -9)
    assert replayed(list(range(11)), ring, spare) == list(range(3, 11))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.sampled_from(list(Truncation)),
    st.integers(0, 6),
    st.integers(0, 5),
)
def test_chunks_see_what_one_shot_sees(counts: list[int], truncation: Truncation, more_kept: int, beyond: int) -> None:
    """Walks a prompt in chunks with a ring of positions, and compares every window with its definition."""
    config = replace(SMALL, truncation=truncation, keep=SMALL.ring + more_kept)
    total = sum(counts)
    known = total + beyond
    ring, first = torch.full((SMALL.ring,), -9), 0
    cut = known - config.keep if truncation is not Truncation.OFF else 0
    for count in counts:
        end, here = first + count, [ints(x) for x in (first, first + count, known)]
        history = history_slots(here[0], ints(0), ints(0), config=config)[0].long()
        before = torch.where(history >= 0, ring[history.clamp(min=0)], -1)
        kept = compact_rows(*here, config=config)
        clip = int(compact_clip(*here, config=config))
        positions = (first + kept).to(torch.int32)
        rows = torch.cat([before, positions.long()])
        zeros = torch.zeros(len(kept), dtype=torch.int32)
        lists = window_prefill(positions, zeros, here[0], ints(-clip), here[2], ints(0), config=config)
        for p, row in zip(positions.tolist(), lists.tolist(), strict=True):
            low = min(max(p - config.window + 1, cut, 0), p + 1)
            assert [int(rows[i]) for i in row if i >= 0] == list(range(low, p + 1))
        slots = ring_slots(positions, zeros, here[1], here[2], ints(0), config=config)
        assert slots[slots >= 0].unique().numel() == int((slots >= 0).sum())
        ring[slots[slots >= 0].long()] = positions[slots >= 0].long()
        first = end
    # all modes agree on what a decode step can read: the last positions from N - K on
    for p in range(max(0, total - SMALL.ring, cut), total):
        assert ring[p % SMALL.ring] == p


def test_padding_sees_and_stores_nothing() -> None:
    b = (ints(3), ints(0), ints(9), ints(0))
    assert window_prefill(ints(5, 0), ints(0, -1), *b, config=SMALL)[1].tolist() == [-1] * 4
    assert window_decode(ints(5, 0), ints(0, -1), ints(0), ints(0), config=SMALL)[1].tolist() == [-1] * 4
    assert ring_slots(ints(5, 0), ints(0, -1), ints(6), ints(6), ints(0), config=SMALL).tolist() == [5, -1]
    none = torch.zeros(0, dtype=torch.int32)
    assert window_decode(ints(5), ints(-1), none, none, config=SMALL).tolist() == [[-1] * 4]
    assert window_prefill(none, none, *b, config=SMALL).shape == (0, 4)


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("window") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged: Judged) -> None:
    found = {"batch_invariant", "chunk_invariant"}
    outcomes = [o for o in judged("window") if o.check in found and o.status is Status.PASSED]
    promised = {(op.name, row.name) for op in CARD.ops for row in op.candidates if op.name != "compact_clip"}
    assert promised <= {(o.op, o.candidate) for o in outcomes}


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

ONE, TWO, FLOAT = ints(0), ints(0, 1), torch.tensor([0.0])


def test_bad_input_of_query_lists_is_refused() -> None:
    for list_of in (window_prefill, window_prefill_triton):
        with pytest.raises(ValueError, match="seq_t: expected t=1, got t=2"):
            list_of(ONE, TWO, ONE, ONE, ONE, ONE, config=SMALL)
        with pytest.raises(ValueError, match="offset_b: expected b=1, got b=2"):
            list_of(ONE, ONE, ONE, TWO, ONE, ONE, config=SMALL)
        with pytest.raises(TypeError, match="known_b: expected"):
            list_of(ONE, ONE, ONE, ONE, FLOAT, ONE, config=SMALL)
    for list_of in (window_decode, window_decode_triton):
        with pytest.raises(ValueError, match="valid_b: expected b=1, got b=2"):
            list_of(ONE, ONE, ONE, TWO, config=SMALL)
        with pytest.raises(TypeError, match="positions_t: expected"):
            list_of(FLOAT, ONE, ONE, ONE, config=SMALL)
    with pytest.raises(ValueError, match=r"seq_t: expected values in \[-1, 1\), got 1"):
        window_prefill(ONE, ints(1), ONE, ONE, ONE, ONE, config=SMALL)
    with pytest.raises(ValueError, match="positions_t: expected no position before its chunk"):
        window_prefill(ONE, ONE, ints(3), ONE, ONE, ONE, config=SMALL)
    with pytest.raises(ValueError, match=r"seq_t: expected values in \[-1, 1\), got -2"):
        window_decode(ONE, ints(-2), ONE, ONE, config=SMALL)


def test_bad_input_of_lists_of_sequences_is_refused() -> None:
    for draft in (window_draft, window_draft_triton):
        with pytest.raises(ValueError, match="config: expected a ring of at least 8, got 7"):
            draft(ONE, ONE, ONE, config=SMALL, draft=4)
        with pytest.raises(ValueError, match="draft: expected a positive number, got 0"):
            draft(ONE, ONE, ONE, config=SMALL, draft=0)
        with pytest.raises(TypeError, match="state_b: expected"):
            draft(ONE, FLOAT, ONE, config=SMALL, draft=2)
    for history in (history_slots, history_slots_triton):
        with pytest.raises(ValueError, match="state_b: expected b=1, got b=2"):
            history(ONE, TWO, ONE, config=SMALL)
        with pytest.raises(TypeError, match="first_b: expected"):
            history(FLOAT, ONE, ONE, config=SMALL)
    for clip in (compact_clip, compact_clip_triton):
        with pytest.raises(ValueError, match="end_b: expected b=1, got b=2"):
            clip(ONE, TWO, ONE, config=COMPACT)
        with pytest.raises(TypeError, match="known_b: expected"):
            clip(ONE, ONE, FLOAT, config=COMPACT)
    with pytest.raises(ValueError, match="end_b: expected chunks of one token or more"):
        compact_clip(ONE, ONE, ONE, config=COMPACT)


def test_bad_input_of_ring_slots_is_refused() -> None:
    for slots in (ring_slots, ring_slots_triton):
        with pytest.raises(ValueError, match="known_b: expected b=1, got b=2"):
            slots(ONE, ONE, ONE, TWO, ONE, config=SMALL)
        with pytest.raises(TypeError, match="seq_t: expected"):
            slots(ONE, FLOAT, ONE, ONE, ONE, config=SMALL)
    with pytest.raises(ValueError, match="positions_t: expected no position beyond its chunk"):
        ring_slots(ints(5), ONE, ints(5), ints(5), ONE, config=SMALL)
    with pytest.raises(ValueError, match=r"seq_t: expected values in \[-1, 1\), got 1"):
        ring_slots(ONE, ints(1), ints(5), ints(5), ONE, config=SMALL)


def test_buffers_that_do_not_fit_are_refused() -> None:
    pytest.importorskip("triton")
    wrong, narrow = torch.empty(1, 9, dtype=torch.int32), torch.empty(1, 4)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda out: window_prefill_triton(ONE, ONE, ONE, ONE, ONE, ONE, config=SMALL, out=out),
        lambda out: window_decode_triton(ONE, ONE, ONE, ONE, config=SMALL, out=out),
        lambda out: window_draft_triton(ONE, ONE, ONE, config=SMALL, draft=2, out=out),
        lambda out: history_slots_triton(ONE, ONE, ONE, config=SMALL, out=out),
        lambda out: ring_slots_triton(ONE, ONE, ONE, ONE, ONE, config=SMALL, out=out),
        lambda out: compact_clip_triton(ONE, ONE, ONE, config=COMPACT, out=out),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="out: expected contiguous"):
            call(wrong)
        with pytest.raises(TypeError, match="out: expected torch.int32"):
            call(narrow)


def test_bad_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="window: expected at least 1, got 0"):
        SlidingWindow(window=0, ring=4)
    with pytest.raises(ValueError, match="ring: expected at least the window of 4, got 3"):
        SlidingWindow(window=4, ring=3)
    with pytest.raises(ValueError, match="keep: expected at least the ring of 7, got 6"):
        replace(MASK, keep=6)
