"""Prefix reuse: names, hits, blocks and windows, a warm request against a cold one, crashes, what both sides refuse."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.prefix_cache import (
    HEADER,
    PrefixStore,
    block_keys_array,
    persist_state_array,
    pool_run_array,
    prefix_hits_array,
    restore_state_array,
    serve_prefixes_cached,
    store_run_files,
)
from deeptwin.parity import goldens, prefix_crashes
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.csa2 import RunCase, draw_run
from deeptwin.parity.cards.prefix_cache import ServeCase, StateCase, draw_restore, draw_serve, draw_state
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.parity.peers.prefix_cache import sha256
from deeptwin.reference.block_pool import BlockPool, BlockTables
from deeptwin.reference.cache_plan import state_bytes
from deeptwin.reference.config import (
    PUT_STEPS,
    MissingState,
    PoolAction,
    PoolAnswer,
    PrefixConfig,
    SlidingWindow,
    StoreAction,
    Truncation,
)
from deeptwin.reference.csa2 import csa2_run
from deeptwin.reference.csa2_config import Csa2Config
from deeptwin.reference.csa2_state import Csa2Batch
from deeptwin.reference.prefix_cache import (
    block_keys,
    persist_state,
    pool_run,
    prefix_hits,
    restore_state,
    serve_prefixes,
    store_run,
)
from deeptwin.reference.prefix_toy import toy_prefill

CARD = load_card("prefix_cache")
EXACT = PrefixConfig(model="m", salt="s", missing=MissingState.SHORTEN, block=4)
COMPACT = SlidingWindow(window=4, ring=7, truncation=Truncation.COMPACT, keep=7)
Judged = Callable[[str], list[Outcome]]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tokens(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


# properties of the reference


def test_the_key_of_a_block_is_what_the_definition_says() -> None:
    key = hashlib.sha256(b"deeptwin.prefix.1\0\x01\0\0\0m\x01\0\0\0s\x04\0\0\0").digest()
    first = hashlib.sha256(key + bytes([7, 0, 0, 0, 0, 1, 0, 0, 0xFF, 0xF8, 1, 0, 0, 0, 0, 0])).digest()
    keys = block_keys(tokens([7, 256, 129279, 0, 1, 1, 1]), ints(7), config=EXACT)
    assert keys.shape == (1, 1, 32)
    assert bytes(keys[0, 0].tolist()) == first
    # the same by SHA-256 written out, and its known answer
    assert sha256(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert first.hex() == "5f5520cc33c64553b7ff800e019f4626c26db6d5b9137b5fe9786e38d549c7af"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 19), st.integers(1, 4))
def test_a_key_names_the_whole_prefix(row: list[int], spot: int, size: int) -> None:
    """Another token changes the keys of its block and of all behind it, and no other."""
    config = replace(EXACT, block=size)
    other = list(row)
    other[spot % len(row)] += 1
    keys = block_keys(tokens(row, other), ints(len(row), len(row)), config=config)
    same = (keys[0] == keys[1]).all(1).tolist()
    before = spot % len(row) // size
    assert same == [i < before for i in range(len(row) // size)]


def test_models_salts_and_block_sizes_never_share_a_key() -> None:
    row, length = tokens([1, 2, 3, 4, 5, 6, 7, 8]), ints(8)
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc")]
    configs = [replace(EXACT, model=m, salt=s, block=n) for m, s in pairs for n in (2, 4)]
    keys = {bytes(block_keys(row, length, config=c)[0, 0].tolist()) for c in configs}
    assert len(keys) == len(configs)


def hit(length: int, pages: list[int], states: list[int], **changes: Any) -> tuple[int, int]:
    """Hit and v of a request of `length` tokens in blocks of 4, of which some are stored."""
    config = replace(EXACT, **changes)
    keys = block_keys(torch.arange(40, dtype=torch.int32)[None], ints(40), config=config)
    chosen = [keys[0, torch.tensor(which, dtype=torch.int64)] for which in (pages, states)]
    found = prefix_hits(keys, ints(length), *chosen, config=config)
    return int(found[0]), int(found[1])


def test_worked_hits() -> None:
    every = list(range(10))
    assert hit(40, every, every) == (36, 0)  # one token at least is computed, and hits are whole blocks
    assert hit(41 - 4, every, every) == (36, 0)
    assert hit(36, every, every) == (32, 0)
    assert hit(40, every, every, recompute=13) == (24, 0)
    assert hit(3, every, every) == (0, 0)
    assert hit(40, [0, 1, 3, 4], every) == (8, 0)  # a gap ends the run
    assert hit(40, every, [0, 2, 5]) == (24, 0)
    assert hit(40, every, []) == (0, 0)
    assert hit(40, every, [0], missing=MissingState.ZERO_STATE) == (36, 36)
    assert hit(40, every, [8], missing=MissingState.ZERO_STATE) == (36, 0)


def test_worked_lines_of_a_pool() -> None:
    lines = [
        (PoolAction.GROW, 0, 9),  # 1 2 3
        (PoolAction.FORK, 0, 1),  # 1 2 shared, 3 copied to 4
        (PoolAction.FREE, 0, 0),  # 3 goes back
        (PoolAction.UNPIN, 3, 0),  # a double free
        (PoolAction.GROW, 2, 5),  # 5 6
        (PoolAction.FREE, 1, 0),  # 4, then 2, then 1 go back
        (PoolAction.PIN, 5, 0),
        (PoolAction.SHRINK, 2, 5),  # 6 goes back, 5 is pinned
        (PoolAction.GROW, 0, 28),  # 7 blocks of which 6 are free
        (PoolAction.GROW, 0, 32),  # there are only 7
    ]
    for run in (pool_run, pool_run_array):
        answers, table, held, free = run(tokens(*map(list, lines)), blocks=8, tables=3, block=4)
        expected = [[0, 0, 0], [0, 3, 4], *[[0, 0, 0]] * 8]
        expected[3], expected[8], expected[9] = [-2, 0, 0], [-1, 0, 0], [-2, 0, 0]
        assert answers.tolist() == expected
        assert (table == -1).all()
        assert held.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
        assert free.tolist() == [7, 3, 4, 2, 1, 6, -1, -1]


def test_a_table_is_not_cut_within_a_block_that_a_fork_shares() -> None:
    pool = BlockPool(6)
    tables = BlockTables(2, pool=pool, block=3)
    assert tables.grow(0, 6)
    assert tables.fork(0, 1) == (0, 0)
    with pytest.raises(ValueError, match="tokens: expected to leave shared block 2 full, got 2 tokens left in it"):
        tables.shrink(0, 1)
    assert (tables.rows, tables.tokens) == ([[1, 2], [1, 2]], [6, 6])
    tables.shrink(0, 3)
    assert (tables.rows, tables.tokens, pool.held) == ([[1], [1, 2]], [3, 6], {1: 2, 2: 1})


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 12),
    st.lists(st.tuples(st.sampled_from(list(PoolAction)), st.integers(0, 13), st.integers(0, 9)), max_size=60),
)
def test_blocks_are_conserved(blocks: int, lines: list[tuple[PoolAction, int, int]]) -> None:
    """Every block's references are the tables that hold it and its pins; free and held ones are all but the null."""
    pool = BlockPool(blocks)
    tables = BlockTables(3, pool=pool, block=3)
    for action, first, second in lines:
        on_block = action in (PoolAction.PIN, PoolAction.UNPIN)
        before = ([list(row) for row in tables.rows], dict(pool.held), list(pool.free))
        try:
            answer = tables.run(action, first if on_block else first % 3, second % 3 if action == 2 else second)[0]
        except ValueError:
            answer = PoolAnswer.REFUSED
        if answer is not PoolAnswer.DONE:
            assert before == (tables.rows, pool.held, list(pool.free))
        for block in range(blocks):
            owners = sum(row.count(block) for row in tables.rows) + tables.pins[block]
            assert pool.held.get(block, 0) == owners
        assert sorted([*pool.free, *pool.held]) == list(range(1, blocks))
        for row, count in zip(tables.rows, tables.tokens, strict=True):
            assert len(row) == len(set(row)) == -(-count // 3)
            # a block that is written to has one owner
            assert count % 3 == 0 or pool.held[row[-1]] - tables.pins[row[-1]] == 1


def test_windows_do_not_depend_on_slot_or_turn() -> None:
    """Two states with the same last records, in other slots of the pool: the same bytes are stored."""
    given_ = draw_state(StateCase(ends=(16, 3)), np.random.Generator(np.random.Philox(1)))
    stored = persist_state(**given_)
    other = torch.full_like(given_["state_sq"], 7)
    moved = ints(2, 0) if given_["state_b"][0] != 2 else ints(1, 0)
    restored = restore_state(other, stored, moved, given_["end_b"], config=given_["config"])
    again = persist_state(restored, moved, given_["end_b"], config=given_["config"])
    assert torch.equal(again, stored)
    assert (stored[1, :, :7] == 0).all()


# a warm request against a cold one, on the tiny stack


class Warm:
    """The tiny stack under bounded replay, a text of 58 tokens, and prefixes of it that another request computed."""

    def __init__(self) -> None:
        case = RunCase(config="tiny", lengths=(58,), free=True, truncation="compact")
        self.inputs = draw_run(case, np.random.Generator(np.random.Philox(3)))
        self.config: Csa2Config = self.inputs["config"]

    def batch(self, counts: list[int], decode: list[bool], *, start: int, state: int, valid: int) -> Csa2Batch:
        return replace(
            self.inputs["batch"],
            counts_kb=torch.tensor(counts, dtype=torch.int32)[:, None],
            decode_k=torch.tensor(decode),
            start_b=ints(start),
            valid_b=ints(valid),
            state_b=ints(state),
        )

    def run(self, pages: Tensor, states: Tensor, rows: slice, batch: Csa2Batch) -> tuple[Tensor, Tensor, Tensor]:
        caches = replace(self.inputs["caches"], page_pq=pages, state_sq=states)
        call = self.inputs | {"h_tm": self.inputs["h_tm"][rows], "caches": caches, "batch": batch}
        return csa2_run(**call)

    def after(self, prefix: int, *, stored: str, hit_valid: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The text behind a prefix that another request left; `stored`: whether its windows were kept."""
        pages, fresh = self.inputs["caches"].page_pq, torch.full_like(self.inputs["caches"].state_sq, 0xFF)
        first = self.batch([prefix], [False], start=0, state=0, valid=0)
        _, pages, states = self.run(pages, fresh, slice(prefix), first)
        kept = persist_state(states, ints(0), ints(prefix), config=self.config)
        states = fresh
        if stored == "stale":
            states = self.run(pages, fresh, slice(5, 5 + prefix), first)[2].flip(0)  # another text's, in our state
        if stored == "restored":
            states = restore_state(fresh.clone(), kept, ints(1), ints(prefix), config=self.config)
        batch = self.batch([55 - prefix, 1, 2], [False, True, True], start=prefix, state=1, valid=hit_valid)
        return self.run(pages, states, slice(prefix, None), batch)


@pytest.fixture(scope="module")
def warm() -> Warm:
    return Warm()


@pytest.fixture(scope="module")
def cold(warm: Warm) -> tuple[Tensor, Tensor, Tensor]:
    pages, states = warm.inputs["caches"].page_pq, torch.full_like(warm.inputs["caches"].state_sq, 0xFF)
    return warm.run(pages, states, slice(None), warm.batch([55, 1, 2], [False, True, True], start=0, state=1, valid=0))


@pytest.mark.parametrize("prefix", [16, 32])
def test_restoring_is_recomputing(warm: Warm, cold: tuple[Tensor, Tensor, Tensor], prefix: int) -> None:
    """U34, U35: after a hit all kept rows, decode steps, pages and the request's whole state have the cold bytes."""
    out, pages, states = warm.after(prefix, stored="restored")
    assert torch.equal(out[45 - prefix :], cold[0][45:])
    assert torch.equal(pages, cold[1])
    assert state_bytes(warm.config.plan) == states.shape[1]
    assert torch.equal(states[1], cold[2][1])


def test_windows_that_are_stale_or_missing_show(warm: Warm, cold: tuple[Tensor, Tensor, Tensor]) -> None:
    """Negative controls: another state's ring, a poisoned one; and v = h, which is an approximation and says so."""
    with pytest.raises(ValueError, match="expected finite values"):
        warm.after(32, stored="poisoned")
    for stored, valid in (("stale", 0), ("poisoned", 32)):
        out, _, _ = warm.after(32, stored=stored, hit_valid=valid)
        assert torch.isfinite(out).all()
        assert not torch.equal(out[13:], cold[0][45:])


# files that break


def test_no_crash_makes_the_store_serve_wrong_bytes() -> None:
    for tally in prefix_crashes.measure(rounds=2, size=40, puts=4):
        assert tally.crashes > 30
        assert (tally.wrong, tally.lost) == (0, 0), tally.line()
        assert tally.kind in ("truncate", "byte") or tally.whole > 0
        assert tally.absent > 0


def test_stores_that_lack_one_thing_are_noticed() -> None:
    found = prefix_crashes.controls(rounds=2, size=10, puts=2)
    assert [tally.kind for tally in found if not tally.wrong and not tally.lost] == []


def test_a_store_lists_its_entries_and_forgets_what_is_unfinished(tmp_path: Path) -> None:
    store, key = PrefixStore(tmp_path), bytes(range(32))
    store.put(key, b"payload")
    (tmp_path / f"{key.hex()}.partial").write_bytes(b"half")
    again = PrefixStore(tmp_path)
    assert again.keys() == [key]
    assert again.get(key) == b"payload"
    assert [path.name for path in tmp_path.iterdir()] == [key.hex()]
    assert len((tmp_path / key.hex()).read_bytes()) == HEADER.size + 32 + len(b"payload")
    again.drop(key)
    assert again.get(key) is None


def test_the_steps_of_a_put_are_the_declared_ones(tmp_path: Path) -> None:
    key, payload = tmp_path.name.encode().ljust(32, b"-"), b"new"
    script = [[StoreAction.KILL, 0, n] for n in range(len(PUT_STEPS) + 1)]
    lines = [line for kill in script for line in ([StoreAction.DROP, 0, 0], kill, [StoreAction.GET, 0, 0])]
    entry = (torch.tensor([list(key)], dtype=torch.uint8), torch.tensor([list(payload)], dtype=torch.uint8))
    for run in (store_run, store_run_files):
        assert run(tokens(*lines), *entry)[2::3].tolist() == [0, 0, 0, 0, 1, 1]


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("prefix_cache") == []


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 24), st.integers(1, 24)), min_size=1, max_size=4),
    st.sampled_from([2, 4]),
)
def test_a_server_with_a_cache_answers_as_one_without(made: list[tuple[int, int, int]], size: int) -> None:
    """Requests made of pieces of one text: any sequence of them."""
    text = [i * i % 7 for i in range(24)]
    rows = [[*text[:cut], *[(t + salt) % 7 for t in text[cut:]]] for salt, cut, _ in made]
    lengths = ints(*(length for _, _, length in made))
    config = replace(EXACT, block=size, recompute=7)
    call: dict[str, Any] = {"config": config, "window": COMPACT, "layers": 3}
    ours = serve_prefixes_cached(tokens(*rows), lengths, **call)
    for a, b in zip(ours, serve_prefixes(tokens(*rows), lengths, **call), strict=True):
        assert torch.equal(a, b)


def test_hits_do_happen() -> None:
    out, hits = serve_prefixes_cached(**draw_serve(ServeCase(requests=6, tokens=40), np.random.default_rng(2)))
    assert (hits > 0).any()
    assert len(set(out.tolist())) > 1


def test_the_toy_model_needs_every_token() -> None:
    row = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0]
    base = toy_prefill(row, window=COMPACT, layers=2)
    for spot in range(len(row)):
        other = list(row)
        other[spot] += 1
        assert toy_prefill(other, window=COMPACT, layers=2) != base


# batch invariance


def test_every_candidate_is_invariant(judged: Judged) -> None:
    found = {"batch_invariant", "masked_equals_absent"}
    outcomes = [o for o in judged("prefix_cache") if o.check in found and o.status is Status.PASSED]
    assert {o.op for o in outcomes if o.candidate in ("array", "files")} == {
        "block_keys",
        "prefix_hits",
        "pool_run",
        "persist_state",
        "store_run",
        "serve_prefixes",
    }


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def test_bad_requests_are_refused() -> None:
    for keys in (block_keys, block_keys_array):
        with pytest.raises(TypeError, match="tokens_bt: expected"):
            keys(torch.zeros(1, 4), ints(4), config=EXACT)
        with pytest.raises(ValueError, match="length_b: expected b=1, got b=2"):
            keys(tokens([1, 2]), ints(1, 2), config=EXACT)
        with pytest.raises(ValueError, match=r"length_b: expected values in \[0, 3\), got 3"):
            keys(tokens([1, 2]), ints(3), config=EXACT)
        with pytest.raises(ValueError, match="length_b: expected no negative lengths"):
            keys(tokens([1, 2]), ints(-1), config=EXACT)
        with pytest.raises(ValueError, match="tokens_bt: expected no negative tokens, got -1"):
            keys(tokens([1, -1]), ints(2), config=EXACT)


def test_bad_keys_are_refused() -> None:
    key = torch.zeros(1, 2, 32, dtype=torch.uint8)
    for hits in (prefix_hits, prefix_hits_array):
        with pytest.raises(ValueError, match="pages_sk: expected k=32"):
            hits(key, ints(4), key[0, :, :31], key[0], config=EXACT)
        with pytest.raises(TypeError, match="states_ik: expected"):
            hits(key, ints(4), key[0], key[0].int(), config=EXACT)
        with pytest.raises(ValueError, match="length_b: expected no negative lengths"):
            hits(key, ints(-4), key[0], key[0], config=EXACT)


def test_bad_pool_scripts_are_refused() -> None:
    bad = [[6, 0, 0], [PoolAction.GROW, 3, 0], [PoolAction.FORK, 0, 3], [PoolAction.GROW, 0, -1]]
    for run in (pool_run, pool_run_array):
        for line in bad:
            with pytest.raises(ValueError, match=r"^script_nj \("):
                run(tokens(line), blocks=4, tables=3, block=2)
        with pytest.raises(TypeError, match="script_nj: expected"):
            run(torch.zeros(1, 3), blocks=4, tables=3, block=2)
        with pytest.raises(ValueError, match="blocks: expected at least 2"):
            run(tokens([0, 0, 0]), blocks=1, tables=3, block=2)
        with pytest.raises(ValueError, match="block: expected a positive number, got 0"):
            run(tokens([0, 0, 0]), blocks=4, tables=3, block=0)


def test_a_pool_refuses_what_nobody_holds() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(2)
    assert taken == [1, 2]
    assert pool.allocate(2) is None
    pool.unpin(1)
    for act in (pool.unpin, pool.pin):
        with pytest.raises(ValueError, match="block: expected one that is held, got 1"):
            act(1)
    with pytest.raises(ValueError, match="count: expected fewer than the pool's 4 blocks, got 4"):
        pool.allocate(4)
    tables = BlockTables(2, pool=BlockPool(5), block=2)
    tables.grow(0, 1)
    with pytest.raises(ValueError, match="tokens: expected at most 1, got 2"):
        tables.shrink(0, 2)
    tables.grow(1, 1)
    with pytest.raises(ValueError, match="into: expected an empty table"):
        tables.fork(0, 1)


def test_bad_states_are_refused() -> None:
    rng = np.random.Generator(np.random.Philox(1))
    given_ = draw_state(StateCase(ends=(3,)), rng)
    for store in (persist_state, persist_state_array):
        with pytest.raises(ValueError, match=r"state_b: expected values in \[0, 2\), got 2"):
            store(**given_ | {"state_b": ints(2)})
        with pytest.raises(TypeError, match="state_sq: expected"):
            store(**given_ | {"state_sq": given_["state_sq"].int()})
    other = draw_restore(StateCase(ends=(3, 3)), rng)
    for load in (restore_state, restore_state_array):
        with pytest.raises(ValueError, match="state_b: expected every state once"):
            load(**other | {"state_b": ints(1, 1)})
        with pytest.raises(ValueError, match="stored_blow: expected o=10"):
            load(**other | {"stored_blow": other["stored_blow"][:, :, 1:]})
        with pytest.raises(TypeError, match="stored_blow: expected"):
            load(**other | {"stored_blow": other["stored_blow"].int()})


def test_bad_store_scripts_are_refused() -> None:
    key, payload = torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 5, dtype=torch.uint8)
    bad = [[8, 0, 0], [StoreAction.GET, 2, 0], [StoreAction.SWAP, 0, 2], [StoreAction.KILL, 0, -1]]
    for run in (store_run, store_run_files):
        for line in bad:
            with pytest.raises(ValueError, match=r"^script_nj \("):
                run(tokens(line), key, payload)
        with pytest.raises(TypeError, match="payload_pq: expected"):
            run(tokens([0, 0, 0]), key, payload.int())
        with pytest.raises(ValueError, match="key_pk: expected k=32"):
            run(tokens([0, 0, 0]), key[:, :31], payload)


def test_bad_services_are_refused() -> None:
    call: dict[str, Any] = {"config": replace(EXACT, recompute=7), "window": COMPACT, "layers": 1}
    for serve in (serve_prefixes, serve_prefixes_cached):
        with pytest.raises(ValueError, match=r"length_b: expected values in \[1, 3\), got 0"):
            serve(tokens([1, 2]), ints(0), **call)
        with pytest.raises(TypeError, match="tokens_bt: expected"):
            serve(torch.zeros(1, 2), ints(1), **call)
        with pytest.raises(ValueError, match="layers: expected a positive number, got 0"):
            serve(tokens([1, 2]), ints(1), **call | {"layers": 0})
    for config in (EXACT, replace(call["config"], missing=MissingState.ZERO_STATE), replace(call["config"], block=3)):
        with pytest.raises(ValueError, match="config: expected exact hits of even blocks that leave 7 tokens"):
            serve_prefixes(tokens([1, 2]), ints(1), **call | {"config": config})
    with pytest.raises(ValueError, match="window: expected a truncation, got OFF"):
        serve_prefixes(tokens([1, 2]), ints(1), **call | {"window": SlidingWindow(window=4, ring=7)})


def test_bad_configurations_are_refused() -> None:
    for name in ("block", "recompute"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            replace(EXACT, **{name: 0})
