"""Mirror split: worked layouts, work that is balanced, attention that does not notice; what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.context_parallel import (
    compact_exchange_torch,
    mirror_keys_torch,
    mirror_split_torch,
    take_rows_torch,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.outcome import Outcome
from deeptwin.reference.context_parallel import compact_exchange, mirror_keys, mirror_split, take_rows

CARD = load_card("context_parallel")
Judged = Callable[[str], list[Outcome]]
ROWS = st.lists(st.integers(0, 25), min_size=1, max_size=4)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# properties of the reference


def test_a_split_by_hand() -> None:
    """Ten rows and two ranks: four blocks of three, the last with two padding rows; then a sequence of one row."""
    gather, inverse = mirror_split(ints(10, 1), ranks=2)
    assert gather.tolist() == [[0, 1, 2, 9, -1, -1, 10, -1], [3, 4, 5, 6, 7, 8, -1, -1]]
    assert inverse.tolist() == [0, 1, 2, 8, 9, 10, 11, 12, 13, 3, 6]


def test_keys_by_hand() -> None:
    """Ratio 4, seven tokens of which five are rows: positions 2 to 6; the second sequence has no whole group."""
    position, first, end = mirror_keys(ints(5, 2), ints(7, 3), ranks=1, ratio=4)
    assert position.tolist() == [[2, 3, 4, 5, 6, 0, 1, 2]]
    assert first.tolist() == [[0] * 6 + [1, 1]]
    assert end.tolist() == [[0, 1, 1, 1, 1, 0, 1, 1]]
    # a third sequence begins behind the place that the second one takes
    assert mirror_keys(ints(1, 2, 1), ints(7, 3, 8), ranks=1, ratio=4)[1].tolist() == [[0, 0, 1, 1, 2, 2]]


def test_an_exchange_by_hand() -> None:
    """The last four of ten rows: rank 0 sends row 9 (its place 3), rank 1 rows 6, 7, 8 (its places 3, 4, 5)."""
    sent, arrival = compact_exchange(ints(10), ints(4), ranks=2)
    assert sent.tolist() == [[3, -1, -1], [3, 4, 5]]
    assert arrival.tolist() == [3, 4, 5, 0]


def test_one_rank_holds_everything_in_order() -> None:
    gather, inverse = mirror_split(ints(4, 6), ranks=1)
    assert gather.tolist() == [list(range(10))]
    assert inverse.tolist() == list(range(10))
    assert mirror_split(ints(0, 0), ranks=3)[0].shape == (3, 0)


@settings(max_examples=15, deadline=None)
@given(ROWS, st.integers(1, 5))
def test_every_row_is_somewhere_once_and_comes_back(rows: list[int], ranks: int) -> None:
    gather, inverse = mirror_split(ints(*rows), ranks=ranks)
    held = gather[gather >= 0]
    assert torch.equal(held.sort().values, torch.arange(sum(rows)))
    assert torch.equal(gather.flatten()[inverse], torch.arange(sum(rows)))
    x = torch.arange(1, sum(rows) + 1)[:, None] * 10
    shards = [take_rows(x, own) for own in gather]
    assert torch.equal(take_rows(torch.cat(shards), inverse), x)
    assert all((shard[own < 0] == 0).all() for shard, own in zip(shards, gather, strict=True))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 30))
def test_work_is_balanced(rows: int, ranks: int, past: int) -> None:
    """Causal pairs of each rank: equal when the blocks are full, apart by no more than padding rows otherwise."""
    _, first, end = mirror_keys(ints(rows), ints(rows + past), ranks=ranks, ratio=1)
    pairs = (end - first).sum(1)
    if rows % (2 * ranks) == 0:
        assert (pairs == pairs[0]).all()
    padding = -rows % (2 * ranks)
    assert pairs.max() - pairs.min() <= padding * (rows + padding + past)
    assert pairs.sum() == sum(range(past + 1, past + rows + 1))


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_of_shards_is_attention_of_the_batch(ranks: int, ratio: int) -> None:
    """A row-wise attention over key ranges, in integers: bit-equal to one rank, padding rows see nothing."""
    rows, tokens = ints(9, 4, 1), ints(13, 4, 3)
    keys = torch.arange(1, int((tokens // ratio).clamp(min=1).sum()) + 1)

    def attend(first: Tensor, end: Tensor) -> Tensor:
        return torch.tensor([[int((keys[a:b] ** 2).sum())] for a, b in zip(first.tolist(), end.tolist(), strict=True)])

    _, first, end = mirror_keys(rows, tokens, ranks=ranks, ratio=ratio)
    gather, inverse = mirror_split(rows, ranks=ranks)
    shards = torch.cat([attend(a, b) for a, b in zip(first, end, strict=True)])
    _, alone_first, alone_end = mirror_keys(rows, tokens, ranks=1, ratio=ratio)
    alone = take_rows(attend(alone_first[0], alone_end[0]), mirror_split(rows, ranks=1)[1])
    assert torch.equal(take_rows(shards, inverse), alone)
    assert (shards[gather.flatten() < 0] == 0).all()


@settings(max_examples=15, deadline=None)
@given(ROWS, st.integers(1, 4), st.integers(0, 9))
def test_kept_rows_go_to_a_new_split(rows: list[int], ranks: int, kept: int) -> None:
    """Full split, exchange, second split of what is left: the same as splitting the kept rows at once."""
    query, last = ints(*rows), ints(*rows).clamp(max=kept)
    x = torch.arange(1, sum(rows) + 1)[:, None]
    shards = [take_rows(x, own) for own in mirror_split(query, ranks=ranks)[0]]
    sent, arrival = compact_exchange(query, last, ranks=ranks)
    gathered = torch.cat([take_rows(shard, own) for shard, own in zip(shards, sent, strict=True)])
    start = query.cumsum(0) - query
    wanted = torch.cat([x[int(s + q - k) : int(s + q)] for s, q, k in zip(start, query, last, strict=True)])
    assert torch.equal(take_rows(gathered, arrival), wanted)


@pytest.mark.parametrize("op", [take_rows, take_rows_torch])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8])
def test_rows_of_every_dtype_keep_their_bytes(op: Callable[..., Tensor], dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8).reshape(3, 16) * 5
    x = raw.view(dtype)
    found = op(x, ints(2, -1, 0))
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), torch.stack([raw[2], raw[0] * 0, raw[0]]))


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("context_parallel") == []


# batch invariance


def test_sequences_do_not_see_each_other(judged) -> None:
    assert {"mirror_split/torch", "take_rows/torch"}.isdisjoint(judged.without("context_parallel", "batch_invariant"))


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def bad_rows(op: Callable[..., object], name: str, *more: Tensor, **options: int) -> None:
    """What all of them refuse of a list of rows, given first or after `more`."""
    with pytest.raises(ValueError, match=rf"{name}: expected 1 dims \[b\]"):
        op(*more, ints(3)[None], ranks=2, **options)
    with pytest.raises(ValueError, match=rf"{name}: expected 0 or more, got \[-1\]"):
        op(*more, ints(-1), ranks=2, **options)


@pytest.mark.parametrize("op", [mirror_split, mirror_split_torch])
def test_bad_splits_are_refused(op: Callable[..., object]) -> None:
    bad_rows(op, "query_b")
    with pytest.raises(TypeError, match=r"query_b: expected torch\.int64"):
        op(ints(3).int(), ranks=2)
    with pytest.raises(ValueError, match="ranks: expected at least 1, got 0"):
        op(ints(3), ranks=0)


@pytest.mark.parametrize("op", [mirror_keys, mirror_keys_torch])
def test_bad_key_ranges_are_refused(op: Callable[..., object]) -> None:
    bad_rows(op, "key_b", ints(0), ratio=2)
    bad_rows(lambda query, **options: op(query, ints(3), **options), "query_b", ratio=2)
    with pytest.raises(ValueError, match="key_b: expected b=1, got b=2"):
        op(ints(3), ints(3, 3), ranks=2, ratio=2)
    with pytest.raises(ValueError, match=r"key_b: expected at least the rows \[3\], got \[2\]"):
        op(ints(3), ints(2), ranks=2, ratio=2)
    for query, key, name in ((ints(3).int(), ints(3), "query_b"), (ints(3), ints(3).int(), "key_b")):
        with pytest.raises(TypeError, match=rf"{name}: expected torch\.int64"):
            op(query, key, ranks=2, ratio=2)
    with pytest.raises(ValueError, match="ratio: expected at least 1, got 0"):
        op(ints(3), ints(3), ranks=2, ratio=0)
    with pytest.raises(ValueError, match="ranks: expected at least 1, got 0"):
        op(ints(3), ints(3), ranks=0, ratio=2)


@pytest.mark.parametrize("op", [compact_exchange, compact_exchange_torch])
def test_bad_exchanges_are_refused(op: Callable[..., object]) -> None:
    bad_rows(op, "kept_b", ints(3))
    bad_rows(lambda query, **options: op(query, ints(0), **options), "query_b")
    with pytest.raises(ValueError, match="kept_b: expected b=1, got b=2"):
        op(ints(3), ints(1, 1), ranks=2)
    for query, kept, name in ((ints(3).int(), ints(3), "query_b"), (ints(3), ints(3).int(), "kept_b")):
        with pytest.raises(TypeError, match=rf"{name}: expected torch\.int64"):
            op(query, kept, ranks=2)
    with pytest.raises(ValueError, match=r"kept_b: expected at most the rows \[3\], got \[4\]"):
        op(ints(3), ints(4), ranks=2)
    with pytest.raises(ValueError, match="ranks: expected at least 1, got 0"):
        op(ints(3), ints(3), ranks=0)


@pytest.mark.parametrize("op", [take_rows, take_rows_torch])
def test_bad_indices_are_refused(op: Callable[..., object]) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"x_tm: expected 2 dims \[t, m\]"):
        op(x[0], ints(0))
    with pytest.raises(ValueError, match=r"index_i: expected 1 dims \[i\]"):
        op(x, ints(0)[None])
    for bad in (2, -2):
        with pytest.raises(ValueError, match=rf"index_i: expected values in \[-1, 2\), got {bad} at"):
            op(x, ints(0, bad))
    with pytest.raises(TypeError, match=r"index_i: expected torch\.int64"):
        op(x, ints(0).int())
