"""How the index lists of a sliding window are checked: exact integers, whole rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import SlidingWindow, Truncation

from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Relation, variants
from ..relations import Context, Variant, row_chunks
from ..rules import Bitwise

_mutant, _control = variants("window")
# first position and number of tokens of a chunk, and tokens known beyond its end, in multiples of the ring R and one by
# one around its edges: chunks that start at 0, end at a ring's edge, wrap once and twice, and sit before the kept rows
CHUNKS = (
    (0, 0, 1, 0),
    (0, 0, 0, 3),
    (0, 1, 1, 1),
    (1, -1, 0, 2),
    (1, 0, 1, -1),
    (2, 3, 0, 1),
    (3, 1, 2, 1),
    (0, 5, 3, 0),
)


@dataclass(frozen=True, kw_only=True)
class WindowCase:
    """`seqs` sequences, a window of `window` in a ring with `spare` rows more; `beyond` tokens known past a chunk."""

    seqs: int
    window: int
    spare: int
    truncation: str = "off"
    keep: int = 0
    beyond: int = 0
    restart: bool = False  # the state of some sequences begins at their chunk
    padding: int = 1
    index: str = "int32"
    draft: int = 0
    regime: str = "normal"

    @property
    def id(self) -> str:
        restart = "-restart" if self.restart else ""
        draft = f"-draft{self.draft}" if self.draft else ""
        sizes = f"b{self.seqs}-w{self.window}+{self.spare}-{self.truncation}{self.keep}-beyond{self.beyond}"
        return f"{sizes}{restart}-pad{self.padding}{draft}-{self.index}-{self.regime}"

    @property
    def config(self) -> SlidingWindow:
        ring = self.window + self.spare
        return SlidingWindow(
            window=self.window, ring=ring, truncation=Truncation(self.truncation), keep=self.keep or 2 * ring
        )


@dataclass(frozen=True)
class Batch:
    """The chunks of a case: packed tokens, and what is known of each sequence."""

    positions_t: Tensor
    seq_t: Tensor
    first_b: Tensor
    end_b: Tensor
    known_b: Tensor
    valid_b: Tensor
    state_b: Tensor


def batch(case: WindowCase, rng: np.random.Generator) -> Batch:
    """Chunks around the edges of the ring; states and padding in random order."""
    ring = case.window + case.spare
    rows = [CHUNKS[i % len(CHUNKS)] for i in range(case.seqs)]
    first = np.array([max(0, a * ring + b) for a, b, _, _ in rows], dtype=np.int64)
    count = np.array([max(1, c * ring + d) for _, _, c, d in rows], dtype=np.int64)
    valid = np.zeros_like(first)
    if case.restart:
        valid = np.where(np.arange(case.seqs) % 2 == 0, first, np.maximum(first - 1, 0))
    tokens = [(int(f) + i, b) for b, (f, n) in enumerate(zip(first, count, strict=True)) for i in range(n)]
    padding = [(int(rng.integers(0, 9)), -1)] * case.padding
    pairs = np.array([*tokens, *padding], dtype=np.int64).reshape(-1, 2)
    state = rng.permutation(case.seqs + 2)[: case.seqs]
    dtype = getattr(torch, case.index)
    columns = (pairs[:, 0], pairs[:, 1], first, first + count, first + count + case.beyond, valid, state)
    return Batch(*(torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in columns))


def kept(case: WindowCase, b: Batch) -> tuple[Tensor, Tensor]:
    """Rows of the packed chunks that the truncation leaves (padding too), and where each chunk begins among them."""
    count = (b.end_b - b.first_b).to(torch.int64)
    clip = torch.zeros_like(count)
    if case.truncation == "compact":
        clip = torch.minimum((b.known_b - case.config.keep - b.first_b).clamp(min=0).to(torch.int64), count - 1)
    start = torch.cumsum(count, 0) - count
    left = [torch.arange(int(s + c), int(s + n)) for s, c, n in zip(start, clip, count, strict=True)]
    padding = torch.arange(int(count.sum()), len(b.seq_t))
    rows = torch.cat([torch.arange(0), *left, padding])
    return rows, torch.cumsum(count - clip, 0) - (count - clip) - clip


def draw_prefill(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """The queries of a prefill chunk, those that COMPACT leaves."""
    b = batch(case, rng)
    rows, offset = kept(case, b)
    return {
        "positions_t": b.positions_t[rows],
        "seq_t": b.seq_t[rows],
        "first_b": b.first_b,
        "offset_b": offset.to(b.first_b.dtype),
        "known_b": b.known_b,
        "valid_b": b.valid_b,
        "config": case.config,
    }


def draw_decode(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """Queries of a decode step."""
    b = batch(case, rng)
    names = ("positions_t", "seq_t", "state_b", "valid_b")
    return {name: getattr(b, name) for name in names} | {"config": case.config}


def draw_slots(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """Keys of a chunk."""
    b = batch(case, rng)
    rows, _ = kept(case, b)
    names = ("end_b", "known_b", "state_b")
    tokens = {"positions_t": b.positions_t[rows], "seq_t": b.seq_t[rows]}
    return tokens | {name: getattr(b, name) for name in names} | {"config": case.config}


def draw_history(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """Sequences before a chunk."""
    b = batch(case, rng)
    return {"first_b": b.first_b, "state_b": b.state_b, "valid_b": b.valid_b, "config": case.config}


def draw_clip(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """Chunks and what is known of their sequences."""
    b = batch(case, rng)
    return {"first_b": b.first_b, "end_b": b.end_b, "known_b": b.known_b, "config": case.config}


def draw_draft(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """Sequences whose last accepted token ends a chunk; the first of them has none."""
    b = batch(case, rng)
    accepted = b.end_b - 1
    accepted[:1] = -1
    valid = torch.minimum(b.valid_b, (accepted + 1).clamp(min=0))
    return {"accepted_b": accepted, "state_b": b.state_b, "valid_b": valid, "config": case.config, "draft": case.draft}


def cases(full: bool) -> list[WindowCase]:
    """Ring wraps, restarts and truncation on small rings, the released sizes, window 1, no spare row, no sequence."""
    base = WindowCase(seqs=8, window=4, spare=3)
    found = [base, replace(base, restart=True), replace(base, spare=0, index="int64"), replace(base, window=1, spare=2)]
    found += [
        replace(base, truncation=t, keep=k, beyond=e) for t, k, e in product(("mask", "compact"), (7, 11), (0, 2))
    ]
    # prompts that are known far beyond the chunk: whole chunks lie before the kept rows
    found += [replace(base, truncation=t, keep=7, beyond=20) for t in ("mask", "compact")]
    found += [replace(base, truncation="mask", keep=8, restart=True), replace(base, seqs=1, padding=0)]
    found += [
        replace(base, window=5, spare=1, seqs=3),
        replace(base, seqs=0, padding=2),
        replace(base, seqs=0, padding=0),
    ]
    found += [
        WindowCase(seqs=2, window=128, spare=6),
        WindowCase(seqs=3, window=128, spare=6, truncation="compact", keep=140),
    ]
    if full:
        kinds = [("off", 0), *product(("mask", "compact"), (0, 5))]
        found += [
            WindowCase(seqs=8, window=w, spare=s, truncation=t, keep=w + s + k, beyond=9, restart=r)
            for w, s, (t, k), r in product((1, 3, 61), (0, 6), kinds, (False, True))
        ]
    return _unique(found)


def cases_draft(full: bool) -> list[WindowCase]:
    """Blocks of 1 to 5 drafts, the released sizes, a ring without a spare row."""
    base = WindowCase(seqs=8, window=4, spare=3, draft=2)
    found = [base, replace(base, restart=True), replace(base, draft=3, index="int64"), replace(base, seqs=0)]
    found += [WindowCase(seqs=8, window=128, spare=6, draft=5), replace(base, window=60, spare=4, draft=4)]
    if full:
        found += [
            replace(base, window=w, spare=5, draft=d, restart=r)
            for w, d, r in product((1, 59, 64), (1, 5), (False, True))
        ]
    return _unique(found)


def _unique(found: list[WindowCase]) -> list[WindowCase]:
    return list({case.id: case for case in found}.values())


# relation hooks


def positions_in_rows(inputs: Inputs, outputs: Outputs) -> Outputs:
    """The positions that stand in the rows of a prefill list, -1 where none does."""
    config, lists = inputs["config"], outputs["idx_tk"].to(torch.int64)
    seq = inputs["seq_t"].to(torch.int64).clamp(min=0)[:, None]
    first, offset = (inputs[n].to(torch.int64)[seq] for n in ("first_b", "offset_b"))
    history = len(inputs["first_b"]) * config.window
    old, new = lists - seq * config.window + first - config.window, lists - history - offset + first
    return {"positions_tk": torch.where(lists < 0, -1, torch.where(lists < history, old, new))}


def positions_in_slots(inputs: Inputs, outputs: Outputs) -> Outputs:
    """The positions that stand in the slots of a decode list: the latest up to the query that fits the slot."""
    config, lists = inputs["config"], outputs["idx_tk"].to(torch.int64)
    p = inputs["positions_t"].to(torch.int64)[:, None]
    state = inputs["state_b"].to(torch.int64)[inputs["seq_t"].to(torch.int64).clamp(min=0)][:, None]
    back = (p - (lists - state * config.ring)) % config.ring
    return {"positions_tk": torch.where(lists < 0, -1, p - back)}


def other_chunks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A query sees the same positions wherever its chunk begins, and nothing of its list depends on other queries."""
    for back in (1, 3):
        first = (inputs["first_b"] - back).clamp(min=0)
        # v0 may lie in the chunk that begins earlier
        yield Variant(
            label=f"chunks that begin {back} earlier",
            calls=(inputs | {"first_b": first},),
            join=lambda results, f=first: positions_in_rows(inputs | {"first_b": f}, results[0]),  # type: ignore[misc]
            expect=lambda outputs: positions_in_rows(inputs, outputs),
        )
    for label, part in (("one query a chunk", 1), ("three queries a chunk", 3)):
        for variant in _first_at_query(inputs, context, part):
            yield replace(variant, label=label)


def _first_at_query(inputs: Inputs, context: Context, part: int) -> Iterator[Variant]:
    """The chunk of a sequence begins at one of its queries: the earlier ones are left out, the others see the same."""
    seq, p = inputs["seq_t"].to(torch.int64), inputs["positions_t"].to(torch.int64)
    chosen = [b for b in range(len(inputs["first_b"])) if int((seq == b).sum()) > part]
    for b in chosen[:2]:
        begin = int(p[seq == b][part])
        rows = ((seq == b) & (p >= begin)).nonzero()[:, 0]
        first = inputs["first_b"].clone()
        first[b] = begin
        there = inputs | {"first_b": first, "positions_t": inputs["positions_t"][rows], "seq_t": inputs["seq_t"][rows]}
        yield Variant(
            label="",
            calls=(there,),
            join=lambda results, t=there: positions_in_rows(t, results[0]),  # type: ignore[misc]
            expect=lambda outputs, r=rows: {"positions_tk": positions_in_rows(inputs, outputs)["positions_tk"][r]},  # type: ignore[misc]
        )


def as_prefill(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The prefill list of a chunk that begins at position 0 names the same positions in the same order."""
    zeros = torch.zeros_like(inputs["state_b"])
    there = {name: inputs[name] for name in ("positions_t", "seq_t", "valid_b", "config")}
    there |= {"first_b": zeros, "offset_b": zeros, "known_b": zeros}
    yield Variant(
        label="prefill",
        calls=({name: there[name] for name in PREFILL_ORDER},),
        join=lambda results: positions_in_rows(there, results[0]),
        expect=lambda outputs: positions_in_slots(inputs, outputs),
    )


PREFILL_ORDER = ("positions_t", "seq_t", "first_b", "offset_b", "known_b", "valid_b", "config")


def permuted_states(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """States renumbered: the same places in other rings."""
    ring = inputs["config"].ring
    moved = inputs | {"state_b": inputs["state_b"] + 5}

    def back(results: list[Outputs]) -> Outputs:
        return {name: torch.where(x < 0, x, x - 5 * ring) for name, x in results[0].items()}

    yield Variant(label="states five further", calls=(moved,), join=back)


def tokens(case: Any) -> bool:
    """Relations make many calls: they run on one small ring, where there are queries."""
    return (case.window, case.spare) == (4, 3) and case.seqs > 0


def untruncated(case: Any) -> bool:
    """Where a decode step and a prefill chunk see the same keys."""
    return tokens(case) and case.truncation == "off"


def golden(*, draft: int = 0) -> Callable[[], list[WindowCase]]:
    """Ring wrap, a restart, truncation."""
    base = WindowCase(seqs=8, window=4, spare=3, draft=draft)
    found = [base, replace(base, restart=True)]
    if not draft:
        found += [replace(base, truncation=t, keep=8, beyond=1) for t in ("mask", "compact")]
    return lambda: found


QUERY_ROWS = {"positions_t": 0, "seq_t": 0}
REPEATS = Relation(name="run_to_run", axis="repeats", only=tokens)
ROWS_ALONE = Relation(name="batch_invariant", axis="rows", only=tokens)
STATES = Relation(name="page_permutation", axis="states", hook=permuted_states, only=tokens)

PREFILL = Op(
    name="window_prefill",
    reference="deeptwin.reference.window:window_prefill",
    outputs=(Output(name="idx_tk", rule=Bitwise(), dtype=torch.int32),),
    cases=cases,
    draw=draw_prefill,
    rows=QUERY_ROWS,
    out_rows={"idx_tk": 0},
    tile=8,
    relations=(
        REPEATS,
        ROWS_ALONE,
        Relation(name="chunk_invariant", axis="where the chunk begins", hook=other_chunks, only=untruncated),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.window:window_prefill_triton"),),
    builds=(
        BuildCase(
            name="w128",
            kernel="deeptwin.kernels.triton_ops.window:_prefill_rows",
            launch="deeptwin.parity.builds.launches.window:prefill_128",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("prefill_window_one_short", "U39", "the window has W − 1 keys"),
        _mutant("prefill_window_one_long", "U39", "the window begins one key early: the newest falls off the list"),
        _mutant("prefill_own_key_hidden", "U25", "a query does not see its own key"),
        _mutant("prefill_sees_the_future", "U25", "lists are W long even where the sequence is shorter"),
        _mutant("prefill_newest_first", "U72", "keys stand newest first"),
        _mutant("prefill_holes_first", "U73", "the −1 stand before the keys, so that blocks hold other keys"),
        _mutant("prefill_restart_ignored", "U34", "keys before v0 are read from a stale ring"),
        _mutant("prefill_history_of_first_sequence", "U37", "all sequences share the history of the first"),
        _mutant("prefill_history_shifted", "U27", "the history begins one row late: chunks see shifted keys"),
        _mutant("prefill_history_lost", "U31", "keys before the chunk are not seen"),
        _mutant("prefill_history_in_ring_order", "U36", "the history is read in ring order"),
        _mutant("prefill_chunk_offset_lost", "U37", "all sequences have the rows of the first chunk"),
        _mutant("prefill_not_truncated", "U64", "the decoder window is not cut at N − K"),
        _mutant("prefill_truncated_one_late", "U64", "the decoder window is cut at N − K + 1"),
        _mutant("prefill_truncation_without_known", "U64", "N is the end of the chunk, not of the prompt"),
        _mutant("prefill_placeholder_sees_itself", "U64", "a placeholder before the kept rows sees its own key"),
        _mutant("prefill_padding_seen", "U58", "a padding row reads the keys of sequence 0"),
        _mutant("prefill_list_of_first_query", "U09", "every query has the list of the first"),
        _mutant("prefill_not_deterministic", "U10", "every second launch moves one index"),
    ),
    controls=(_control("right_prefill"),),
    golden=golden(),
)

DECODE = Op(
    name="window_decode",
    reference="deeptwin.reference.window:window_decode",
    outputs=(Output(name="idx_tk", rule=Bitwise(), dtype=torch.int32),),
    cases=lambda full: [case for case in cases(full) if case.truncation == "off"],
    draw=draw_decode,
    rows=QUERY_ROWS,
    out_rows={"idx_tk": 0},
    tile=8,
    relations=(
        REPEATS,
        ROWS_ALONE,
        Relation(name="chunk_invariant", axis="queries in chunks", hook=row_chunks, only=tokens),
        STATES,
        Relation(
            name="decode_equals_prefill", axis="path", hook=as_prefill, partner="window_prefill", only=untruncated
        ),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.window:window_decode_triton"),),
    builds=(
        BuildCase(
            name="w128",
            kernel="deeptwin.kernels.triton_ops.window:_decode_rows",
            launch="deeptwin.parity.builds.launches.window:decode_128",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("decode_window_one_short", "U39", "the window has W − 1 keys"),
        _mutant("decode_own_key_hidden", "U25", "a query does not see its own key"),
        _mutant("decode_sees_stale_slots", "U34", "lists are W long even where the sequence is shorter"),
        _mutant("decode_newest_first", "U72", "keys stand newest first"),
        _mutant("decode_in_slot_order", "U32", "keys stand in the order of their slots"),
        _mutant("decode_ring_of_window", "U36", "positions wrap at W, although the ring has more rows"),
        _mutant("decode_stride_of_window", "U36", "rings are W rows apart, although they have more"),
        _mutant("decode_restart_ignored", "U34", "keys before v0 are read from a stale ring"),
        _mutant("decode_state_is_the_sequence", "U34", "the state of a sequence is taken for its number"),
        _mutant("decode_padding_seen", "U58", "a padding row reads the ring of sequence 0"),
        _mutant("decode_step_sees_its_end", "U32", "all queries of a step see what the last one sees"),
        _mutant("decode_not_deterministic", "U10", "every second launch moves one index"),
    ),
    controls=(_control("right_decode"),),
    golden=lambda: [case for case in golden()() if case.truncation == "off"],
)

DRAFT = Op(
    name="window_draft",
    reference="deeptwin.reference.window:window_draft",
    outputs=(Output(name="idx_bk", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_draft,
    draw=draw_draft,
    rows={"accepted_b": 0, "state_b": 0, "valid_b": 0},
    out_rows={"idx_bk": 0},
    tile=8,
    relations=(REPEATS, ROWS_ALONE, STATES),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.window:window_draft_triton"),),
    builds=(
        BuildCase(
            name="w128-draft5",
            kernel="deeptwin.kernels.triton_ops.window:_ring_rows",
            launch="deeptwin.parity.builds.launches.window:draft_128_5",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("draft_one_position_early", "U61", "the draft block stands one position early"),
        _mutant("draft_causal", "U25", "the list ends with the first draft key"),
        _mutant("draft_window_counts_drafts", "U39", "the window of W includes the draft keys"),
        _mutant("draft_not_padded", "U08", "holes at the end of the list repeat the last slot"),
        _mutant("draft_ring_of_window", "U36", "positions wrap at W, so drafts overwrite keys in the window"),
        _mutant("draft_restart_ignored", "U34", "keys before v0 are read from a stale ring"),
    ),
    controls=(_control("right_draft"),),
    golden=golden(draft=2),
)

SLOTS = Op(
    name="ring_slots",
    reference="deeptwin.reference.window:ring_slots",
    outputs=(Output(name="slots_t", rule=Bitwise(), dtype=torch.int32),),
    cases=cases,
    draw=draw_slots,
    rows=QUERY_ROWS,
    out_rows={"slots_t": 0},
    tile=1024,
    relations=(
        REPEATS,
        Relation(name="chunk_invariant", axis="keys in chunks", hook=row_chunks, only=tokens),
        STATES,
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.window:ring_slots_triton"),),
    builds=(
        BuildCase(
            name="ring134",
            kernel="deeptwin.kernels.triton_ops.window:_ring_slots",
            launch="deeptwin.parity.builds.launches.window:slots_134",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("slots_all_stored", "U28", "a chunk longer than the ring stores every row: the order decides"),
        _mutant("slots_one_too_few", "U33", "only R − 1 tokens of a chunk are stored"),
        _mutant("slots_of_the_window_only", "U33", "only W tokens of a chunk are stored: none can be taken back"),
        _mutant("slots_wrap_at_window", "U36", "positions wrap at W"),
        _mutant("slots_stride_of_window", "U36", "rings are W rows apart"),
        _mutant("slots_counted_from_the_chunk", "U35", "the slot is the number in the chunk, not the position"),
        _mutant("slots_placeholder_stored", "U64", "the placeholder of COMPACT writes the ring"),
        _mutant("slots_mask_stores_kept_only", "U64", "MASK stores as COMPACT does"),
        _mutant("slots_padding_stored", "U79", "a padding row writes slot 0 of state 0"),
        _mutant("slots_state_is_the_sequence", "U34", "the state of a sequence is taken for its number"),
    ),
    controls=(_control("right_slots"),),
    golden=golden(),
)

HISTORY = Op(
    name="history_slots",
    reference="deeptwin.reference.window:history_slots",
    outputs=(Output(name="slots_bk", rule=Bitwise(), dtype=torch.int32),),
    cases=lambda full: [case for case in cases(full) if case.truncation == "off"],
    draw=draw_history,
    rows={"first_b": 0, "state_b": 0, "valid_b": 0},
    out_rows={"slots_bk": 0},
    tile=8,
    relations=(REPEATS, ROWS_ALONE, STATES),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.window:history_slots_triton"),),
    builds=(
        BuildCase(
            name="w128",
            kernel="deeptwin.kernels.triton_ops.window:_ring_rows",
            launch="deeptwin.parity.builds.launches.window:history_128",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("history_with_the_chunk", "U27", "the history ends with the first key of the chunk"),
        _mutant("history_moved_to_the_front", "U23", "valid keys stand first, not where their position is"),
        _mutant("history_stale_before_0", "U74", "positions below 0 are read from the ring"),
        _mutant("history_restart_ignored", "U34", "positions before v0 are read from a stale ring"),
        _mutant("history_newest_first", "U26", "keys stand newest first"),
    ),
    controls=(_control("right_history"),),
    golden=lambda: [case for case in golden()() if case.truncation == "off"],
)

CLIP = Op(
    name="compact_clip",
    reference="deeptwin.reference.window:compact_clip",
    outputs=(Output(name="clip_b", rule=Bitwise(), dtype=torch.int32),),
    cases=cases,
    draw=draw_clip,
    rows={"first_b": 0, "end_b": 0, "known_b": 0},
    out_rows={"clip_b": 0},
    tile=1024,
    relations=(REPEATS,),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.window:compact_clip_triton"),),
    builds=(
        BuildCase(
            name="keep140",
            kernel="deeptwin.kernels.triton_ops.window:_clip",
            launch="deeptwin.parity.builds.launches.window:clip_140",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("clip_leaves_no_row", "U64", "a chunk before the kept rows has no row left"),
        _mutant("clip_of_mask", "U64", "MASK leaves rows out too"),
        _mutant("clip_from_the_chunk_end", "U64", "N is the end of the chunk"),
        _mutant("clip_one_too_many", "U64", "the first kept row is left out"),
    ),
    controls=(_control("right_clip"),),
    golden=golden(),
)

CARD = Card(
    component="window",
    summary="index lists of a sliding window: prefill rows, ring slots, restarts, prefill truncation, drafts",
    contract={
        "dtypes": "int32 or int64 in, int32 out",
        "order": "oldest key first, then −1; the width of a list is fixed",
        "window": "lo = clamp(max(p − W + 1, v0, N − K), 0, p + 1), N − K under truncation only",
        "ring": "slot = state · R + position mod R; the last R tokens of a chunk are stored",
        "history": "W rows a sequence before the rows of the chunk, loaded before the chunk is stored",
        "padding": "sequence −1: a list of −1, slot −1",
    },
    ops=(PREFILL, DECODE, DRAFT, SLOTS, HISTORY, CLIP),
    equivalents=(
        Equivalent(
            name="decode window cut at N − K",
            reason="K ≥ W + B: no query of a step, even one that is taken back, looks below N − K",
        ),
    ),
)
