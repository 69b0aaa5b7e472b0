"""How balanced context parallelism is checked: index lists, exactly, and that nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .. import draws
from ..card import Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import Context, Variant
from ..rules import Bitwise

_mutant, _control = variants("context_parallel")
PEERS = "deeptwin.parity.peers.context_parallel"


@dataclass(frozen=True, kw_only=True)
class SplitCase:
    """Rows of every sequence, tokens before them, ranks, ratio of the keys, rows that are kept."""

    rows: tuple[int, ...]
    ranks: int = 2
    past: int = 0
    ratio: int = 1
    kept: int = 5
    regime: str = "counts"

    @property
    def id(self) -> str:
        listed = "+".join(map(str, self.rows)) or "none"
        return f"q{listed}-c{self.ranks}-p{self.past}-r{self.ratio}-k{self.kept}"


def draw_split(case: SplitCase, rng: np.random.Generator) -> Inputs:
    """Nothing is drawn."""
    return {"query_b": torch.tensor(case.rows, dtype=torch.int64), "ranks": case.ranks}


def draw_keys(case: SplitCase, rng: np.random.Generator) -> Inputs:
    """Every sequence has up to `past` tokens before its rows."""
    past = rng.integers(0, case.past + 1, len(case.rows))
    split = draw_split(case, rng)
    return split | {"key_b": split["query_b"] + torch.from_numpy(past), "ratio": case.ratio}


def draw_exchange(case: SplitCase, rng: np.random.Generator) -> Inputs:
    """Up to `kept` rows of every sequence go on."""
    split = draw_split(case, rng)
    return split | {"kept_b": split["query_b"].clamp(max=case.kept)}


@dataclass(frozen=True, kw_only=True)
class TakeCase:
    """`count` of `tokens` rows, a share of them padding."""

    tokens: int
    count: int
    width: int = 8
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-n{self.count}-m{self.width}"


def draw_take(case: TakeCase, rng: np.random.Generator) -> Inputs:
    """A strided view with NaN in its first and last row."""
    rows = draws.normal(rng, case.tokens, case.width, dtype=torch.bfloat16)
    if case.tokens:
        rows[[0, -1]] = torch.nan
    index = rng.integers(-1, case.tokens, case.count) if case.tokens else np.full(case.count, -1)
    index[::3] = -1
    return {"x_tm": draws.strided(rows, pad=3), "index_i": torch.from_numpy(index)}


def cases(full: bool) -> list[SplitCase]:
    """Full and part blocks, fewer rows than blocks, no rows, one rank, several sequences, pasts that cut groups."""
    found = [SplitCase(rows=(n,), ranks=c) for n, c in ((16, 2), (17, 2), (3, 4), (1, 2), (0, 2), (9, 1), (24, 3))]
    found += [SplitCase(rows=rows) for rows in ((), (5, 0, 8), (0, 0), (1, 1, 1), (13, 4, 21))]
    found += [
        SplitCase(rows=(13, 4, 21), ranks=c, past=9, ratio=r, kept=6) for c, r in ((2, 1), (3, 2), (4, 4), (2, 128))
    ]
    found += [
        SplitCase(rows=(7, 1, 30), ranks=4, past=3, ratio=4, kept=1),
        SplitCase(rows=(40, 3), kept=0, past=40, ratio=4),
    ]
    if full:
        found += [
            SplitCase(rows=(q, q + 3), ranks=c, past=p, ratio=r, kept=8)
            for q in (8, 15, 31)
            for c in (2, 4, 8)
            for p, r in ((0, 2), (7, 4))
        ]
        found += [SplitCase(rows=(1500, 700), ranks=8, past=100, ratio=2, kept=140)]
    return found


def cases_take(full: bool) -> list[TakeCase]:
    """No rows, nothing taken, one row."""
    found = [TakeCase(tokens=9, count=14), TakeCase(tokens=0, count=4), TakeCase(tokens=5, count=0)]
    return [*found, TakeCase(tokens=1, count=6, width=1)]


# relation hooks


def there_and_back(inputs: Inputs, outputs: Outputs, partner: object) -> tuple[Outputs, Outputs]:
    """Shards gathered in rank order and put back are the batch; every rank has as many rows as the others."""
    gather, inverse = outputs["gather_ci"].cpu(), outputs["inverse_t"].cpu()
    rows = torch.arange(int(inputs["query_b"].sum()))
    return {"rows": gather.flatten()[inverse]}, {"rows": rows}


def sequences_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A batch is its sequences one after the other."""
    count = len(inputs["query_b"])
    if count < 2:
        yield Variant(label="repeat", calls=(inputs,))
        return
    calls = tuple(inputs | {"query_b": inputs["query_b"][i : i + 1]} for i in range(count))
    start = (inputs["query_b"].cumsum(0) - inputs["query_b"]).tolist()

    def join(results: list[Outputs]) -> Outputs:
        shifted = [
            torch.where(r["gather_ci"] >= 0, r["gather_ci"] + s, -1) for r, s in zip(results, start, strict=True)
        ]
        return {"gather_ci": torch.cat(shifted, 1)}

    yield Variant(label="one by one", calls=calls, join=join, expect=lambda base: {"gather_ci": base["gather_ci"]})


def kept_rows_arrive(inputs: Inputs, outputs: Outputs, partner: object) -> tuple[Outputs, Outputs]:
    """What the ranks send, gathered in rank order, holds every kept row at its place of arrival."""
    start = inputs["query_b"].cumsum(0)
    wanted = [torch.arange(int(e - k), int(e)) for e, k in zip(start, inputs["kept_b"], strict=True)]
    shards = _places(inputs["query_b"].tolist(), inputs["ranks"])
    sent, arrival = outputs["sent_ci"].cpu(), outputs["arrival_t"].cpu()
    flat = torch.tensor([shards[r][i] if i >= 0 else -1 for r, own in enumerate(sent.tolist()) for i in own])
    expected = torch.cat([torch.zeros(0, dtype=torch.int64), *wanted])
    return {"rows": flat[arrival] if len(flat) else expected[:0]}, {"rows": expected}


def _places(queries: list[int], ranks: int) -> list[list[int]]:
    """The rows of every rank, place by place, -1 for padding."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for rows in queries:
        size = (rows + 2 * ranks - 1) // (2 * ranks)
        padded = [*range(start, start + rows), *[-1] * (2 * ranks * size - rows)]
        for rank in range(ranks):
            late = (2 * ranks - 1 - rank) * size
            found[rank] += padded[rank * size : (rank + 1) * size] + padded[late : late + size]
        start += rows
    return found


def _outputs(*names: str) -> tuple[Output, ...]:
    return tuple(Output(name=name, rule=Bitwise(), dtype=torch.int64) for name in names)


CARD = Card(
    component="context_parallel",
    summary="mirror split of a prefill over ranks, key ranges, and the exchange when only the last rows go on",
    contract={
        "split": "2c blocks of ceil(q / 2c) rows; rank r has block r, then block 2c - 1 - r; padding is -1",
        "gather": "shards in rank order; the inverse index puts rows back exactly",
        "keys": "groups that end at or before the row; a sequence too short for one takes the place of one",
        "padding": "position 0, no visible key, hidden state 0",
        "decode": "is not split: rows stay on their rank",
    },
    ops=(
        Op(
            name="mirror_split",
            reference="deeptwin.reference.context_parallel:mirror_split",
            outputs=_outputs("gather_ci", "inverse_t"),
            cases=cases,
            draw=draw_split,
            rows={},
            out_rows={},
            relations=(
                Relation(name="layout_round_trip", axis="gathered shards", hook=there_and_back),
                Relation(name="batch_invariant", axis="sequences", hook=sequences_apart),
            ),
            candidates=(Candidate(name="torch", function="deeptwin.optimized.context_parallel:mirror_split_torch"),),
            peers=(
                Peer(name="rows", function=f"{PEERS}:split_by_row", needs=(), explains="every row asks for its place"),
            ),
            mutants=(
                _mutant("blocks_in_a_row", "R6", "a rank has two neighbouring blocks"),
                _mutant("blocks_strided", "R6", "a rank has block r and block c + r"),
                _mutant("late_block_first", "R6", "the late block stands in front"),
                _mutant("blocks_rounded_down", "U26", "blocks are rounded down and the rest is lost"),
                _mutant("padding_repeats_the_last_row", "U40", "padding is the last row again"),
                _mutant("padding_runs_into_the_next", "U37", "padding is the next sequence"),
                _mutant("inverse_one_short", "R6", "the inverse counts shards one row short"),
                _mutant("inverse_within_the_shard", "R6", "the inverse counts within the shard"),
                _mutant("sequences_on_top", "U37", "every sequence starts at row 0"),
            ),
            controls=(_control("right_split"),),
            golden=lambda: [SplitCase(rows=(5, 0, 8), ranks=3)],
        ),
        Op(
            name="mirror_keys",
            reference="deeptwin.reference.context_parallel:mirror_keys",
            outputs=_outputs("position_ci", "first_ci", "end_ci"),
            cases=cases,
            draw=draw_keys,
            rows={},
            out_rows={},
            candidates=(Candidate(name="torch", function="deeptwin.optimized.context_parallel:mirror_keys_torch"),),
            peers=(
                Peer(name="rows", function=f"{PEERS}:keys_by_row", needs=(), explains="keys are counted one by one"),
            ),
            mutants=(
                _mutant("positions_from_the_chunk", "U61", "positions count from the first row of the chunk"),
                _mutant("no_room_for_a_short_sequence", "U39", "a sequence without keys takes no place"),
                _mutant("open_group_visible", "U25", "a group that is not full is visible"),
                _mutant("own_group_hidden", "U25", "the group that ends with the row is hidden"),
                _mutant("keys_from_zero", "U37", "every sequence sees the keys of the first"),
                _mutant("padding_sees_from_zero", "U58", "padding names key 0"),
                _mutant("padding_sees_everything", "U58", "padding sees every key"),
                _mutant("keys_of_late_block_first", "R6", "positions of another layout"),
            ),
            controls=(_control("right_keys"),),
            golden=lambda: [SplitCase(rows=(5, 0, 8), ranks=2, past=9, ratio=4)],
        ),
        Op(
            name="compact_exchange",
            reference="deeptwin.reference.context_parallel:compact_exchange",
            outputs=_outputs("sent_ci", "arrival_t"),
            cases=cases,
            draw=draw_exchange,
            rows={},
            out_rows={},
            relations=(Relation(name="layout_round_trip", axis="sent rows", hook=kept_rows_arrive),),
            candidates=(
                Candidate(name="torch", function="deeptwin.optimized.context_parallel:compact_exchange_torch"),
            ),
            peers=(
                Peer(name="rows", function=f"{PEERS}:exchange_by_row", needs=(), explains="rows queue up by place"),
            ),
            mutants=(
                _mutant("first_rows_kept", "U35", "the first rows go on"),
                _mutant("sent_by_row", "R6", "places of another layout"),
                _mutant("arrival_by_own_count", "R6", "arrivals count each rank's own list"),
                _mutant("numbers_of_the_batch", "R6", "rows are numbered in the batch"),
            ),
            controls=(_control("right_exchange"),),
            golden=lambda: [SplitCase(rows=(9, 14), ranks=2, kept=6)],
        ),
        Op(
            name="take_rows",
            reference="deeptwin.reference.context_parallel:take_rows",
            outputs=(Output(name="out_im", rule=Bitwise(), dtype=torch.bfloat16),),
            cases=cases_take,
            draw=draw_take,
            rows={"index_i": 0},
            out_rows={"out_im": 0},
            relations=(Relation(name="batch_invariant", axis="rows"),),
            candidates=(Candidate(name="torch", function="deeptwin.optimized.context_parallel:take_rows_torch"),),
            peers=(
                Peer(
                    name="zero-row",
                    function=f"{PEERS}:index_with_zero_row",
                    needs=(),
                    explains="numpy, bytes, a zero row",
                ),
            ),
            mutants=(
                _mutant("padding_is_the_last_row", "U40", "-1 counts from the end"),
                _mutant("padding_times_zero", "U74", "padding is a row times zero"),
            ),
            controls=(_control("right_take"),),
            golden=lambda: [TakeCase(tokens=4, count=7)],
        ),
    ),
    equivalents=(
        Equivalent(
            name="ascending rows within a list", reason="places of a shard ascend with its rows, block by block"
        ),
    ),
)
