"""How exact selection is checked: ties, lengths, NaN, candidate blocks, and the maps back to entries and slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase, Expect
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Peer, Relation, Sm90Candidate, variants
from ..relations import Context, Variant, row_chunks
from ..rules import Bitwise, TopK

_mutant, _control = variants("topk")
ALL_REGIMES = (*REGIMES, "zeros", "ties", "tiny", "huge", "subnormal", "relu", "signed_zeros", "nan", "masked", "near")


@dataclass(frozen=True, kw_only=True)
class SelectCase:
    """`tokens` rows of `columns` scores, of which `k` are chosen; `size` > 0: of blocks of that size."""

    tokens: int
    columns: int
    k: int
    size: int = 0
    dtype: str = "bf16"
    regime: str = "normal"
    lengths: str = "full"  # full, mixed, zero

    @property
    def id(self) -> str:
        size = f"-b{self.size}" if self.size else ""
        return f"t{self.tokens}-s{self.columns}-k{self.k}{size}-{self.dtype}-{self.regime}-len_{self.lengths}"


@dataclass(frozen=True, kw_only=True)
class MapCase:
    """`tokens` rows of `k` indices into a table of `places` blocks or pages of `size` entries."""

    tokens: int
    k: int
    places: int
    size: int
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-k{self.k}-p{self.places}-e{self.size}-{self.regime}"


def _scores(case: SelectCase, rng: np.random.Generator) -> Tensor:
    dtype, shape = draws.DTYPES[case.dtype], (case.tokens, case.columns)
    known = case.regime if case.regime in (*REGIMES, "zeros", "ties", "tiny", "huge", "subnormal") else "normal"
    x = draws.rows(rng, *shape, dtype=torch.float32, regime=known)
    if case.regime == "relu":
        x = torch.relu(x - 1.0)  # whole runs of exact zeros, as a positive part leaves them
    elif case.regime == "signed_zeros":
        x = torch.where(torch.from_numpy(rng.random(shape)) < 0.5, 0.0, -0.0) + torch.relu(x - 2.0) * -1.0
    elif case.regime == "nan":
        x[torch.from_numpy(rng.random(shape)) < 0.9] = torch.nan
    elif case.regime == "masked":
        x[torch.from_numpy(rng.random(shape)) < 0.5] = -torch.inf
        x[:, 1:2], x[:, 3:4] = torch.inf, torch.inf
    elif case.regime == "infinite":
        x = torch.where(torch.from_numpy(rng.random(shape)) < 0.9, torch.inf, x)
    elif case.regime == "near":
        x = 1 + x * 2.0**-12  # equal in bf16, unequal in fp32
    return x.to(dtype)


def _lengths(case: SelectCase) -> Tensor:
    s, unit = case.columns, max(case.size, 1)
    edges = [s, 0, 1, case.k * unit - 1, case.k * unit, case.k * unit + 1, s - 1, unit - 1, unit, unit + 1, s // 2]
    lengths = {"full": [s], "zero": [0], "mixed": edges}[case.lengths]
    return torch.tensor([lengths[i % len(lengths)] for i in range(case.tokens)], dtype=torch.int32).clamp(0, s)


def draw(case: SelectCase, rng: np.random.Generator) -> Inputs:
    """Scores of a regime as a strided view; what stands beyond a length is NaN, infinite or the largest of all."""
    scores, lengths = _scores(case, rng), _lengths(case)
    beyond = torch.arange(case.columns) >= lengths[:, None]
    garbage = torch.from_numpy(rng.choice(np.array([np.nan, np.inf, 1e38, -np.inf], np.float32), scores.shape))
    scores = torch.where(beyond, garbage.to(scores.dtype), scores)
    inputs: Inputs = {"scores_ts": draws.strided(scores, pad=8), "length_t": lengths}
    if case.size:
        inputs["block_size"] = case.size
    return inputs | {"k": case.k}


def draw_compact(case: SelectCase, rng: np.random.Generator) -> Inputs:
    """Ascending blocks whose last is the partial one, −1 behind them."""
    lengths = _lengths(case)
    blocks = torch.full((case.tokens, case.k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        count = -(-length // case.size)
        kept = min(count, int(rng.integers(1, case.k + 1)))
        chosen = np.append(rng.permutation(max(count - 1, 0))[: max(kept - 1, 0)], [count - 1] * (count > 0))
        blocks[row, : chosen.size] = torch.from_numpy(np.sort(chosen).astype(np.int32))
    return {"blocks_tj": blocks, "length_t": lengths, "block_size": case.size}


def _draw_map(case: MapCase, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    entries = case.places * case.size
    idx = rng.integers(0, max(entries, 1), (case.tokens, case.k))
    bad = rng.random(idx.shape) < 0.3
    nasty = [*draws.BAD_INDICES, entries, entries + 10**6]
    idx = np.where(bad, rng.choice(nasty, idx.shape), idx)
    table = rng.permuted(np.tile(np.arange(4 * case.places), (case.tokens, 1)), axis=1)[:, : case.places]
    table = np.where(rng.random(table.shape) < 0.2, -1, table)
    return torch.from_numpy(idx.astype(np.int32)), torch.from_numpy(table.astype(np.int32))


def draw_restore(case: MapCase, rng: np.random.Generator) -> Inputs:
    """Compact indices with holes and nasty numbers among them."""
    idx, blocks = _draw_map(case, rng)
    return {"idx_tk": idx, "blocks_tj": blocks, "block_size": case.size}


def draw_slots(case: MapCase, rng: np.random.Generator) -> Inputs:
    """Entries with holes and nasty numbers among them, pages in any order, some absent."""
    idx, table = _draw_map(case, rng)
    return {"idx_tk": idx, "table_tp": table, "page_entries": case.size}


SMALL = SelectCase(tokens=3, columns=70, k=16)


def cases(full: bool) -> list[SelectCase]:
    """Regimes on short rows, lengths around k and the row, rows of several blocks of the kernel, fp32."""
    found = [replace(SMALL, regime=regime) for regime in ALL_REGIMES]
    found += [replace(SMALL, dtype="fp32", regime=regime) for regime in (*REGIMES, "relu", "near", "nan")]
    found += [
        replace(SMALL, tokens=11, lengths="mixed"),
        replace(SMALL, tokens=11, lengths="mixed", regime="relu", dtype="fp32"),
        replace(SMALL, lengths="zero"),
        replace(SMALL, tokens=0, regime="relu"),
        replace(SMALL, tokens=1, columns=1, k=1),
        replace(SMALL, columns=5, k=8),
        replace(SMALL, columns=16),
        replace(SMALL, columns=0, tokens=2),
        replace(SMALL, k=1, regime="ties"),
        replace(SMALL, k=64, regime="masked", tokens=2),
        # the tie at the k-th place goes on over several blocks of the kernel
        replace(SMALL, tokens=2, columns=2300, k=512, regime="relu"),
        replace(SMALL, tokens=1, columns=2100, k=700, regime="nan"),
        replace(SMALL, tokens=1, columns=4096, k=512, dtype="fp32"),
        # beyond the registers of a program: the best of parts, then of these; walked where too many are wanted
        replace(SMALL, tokens=2, columns=32800, k=512, regime="relu", lengths="mixed"),
        replace(SMALL, tokens=1, columns=33000, k=2048, regime="near", dtype="fp32"),
        replace(SMALL, tokens=1, columns=33000, k=8200, regime="relu"),
        # more wanted than groups can bound, and the widest range of ranks
        replace(SMALL, tokens=1, columns=6000, k=5000, regime="infinite", dtype="fp32"),
    ]
    if full:
        found += [
            replace(SMALL, tokens=2, columns=s, k=k, regime=r, dtype=d)
            for s, k, r, d in product((513, 1024, 1025), (64, 512), ("normal", "ties", "relu"), ("bf16", "fp32"))
        ]
        found += [replace(SMALL, tokens=1, columns=16385, k=512), replace(SMALL, tokens=2, columns=4096, k=2048)]
        # the best of the best of parts
        found += [replace(SMALL, tokens=1, columns=140000, k=512, regime=r) for r in ("normal", "relu", "masked")]
    return list({case.id: case for case in found}.values())


def cases_candidates(full: bool) -> list[SelectCase]:
    """Regimes, lengths around blocks and their number, more blocks than kept, infinite scores."""
    base = SelectCase(tokens=3, columns=90, k=5, size=8)
    found = [replace(base, regime=regime) for regime in (*REGIMES, "ties", "relu", "nan", "masked", "huge")]
    found += [
        replace(base, tokens=11, lengths="mixed"),
        replace(base, tokens=11, lengths="mixed", regime="masked", k=2, dtype="fp32"),
        replace(base, regime="masked", k=1),
        replace(base, size=16, k=3),
        replace(base, size=1, k=80, regime="masked", tokens=2),
        replace(base, size=5),
        replace(base, k=64),
        replace(base, tokens=0, regime="relu"),
        replace(base, columns=0, tokens=2),
        replace(base, tokens=1, columns=9000, k=1024, dtype="fp32"),
    ]
    if full:
        found += [replace(base, tokens=1, columns=s, k=2048) for s in (16383, 16384, 16385, 20000)]
    return list({case.id: case for case in found}.values())


def cases_compact(full: bool) -> list[SelectCase]:
    """Lengths around blocks, all or some of them kept."""
    base = SelectCase(tokens=11, columns=300, k=12, size=8, lengths="mixed")
    found = [replace(base, regime=regime) for regime in REGIMES]
    found += [replace(base, size=16), replace(base, k=1), replace(base, k=1100, columns=9001), replace(base, tokens=0)]
    return found + ([replace(base, k=2048, columns=16385 + i) for i in range(8)] if full else [])


def cases_maps(full: bool) -> list[MapCase]:
    """Block and page sizes, one place, no index, no row."""
    base = MapCase(tokens=3, k=40, places=7, size=8)
    found = [replace(base, regime=regime) for regime in REGIMES]
    found += [replace(base, size=s, places=p) for s, p in ((1, 9), (16, 1), (5, 3), (64, 4), (128, 2))]
    found += [replace(base, tokens=0), replace(base, places=0), replace(base, k=1), replace(base, k=600)]
    return found + ([replace(base, size=s, places=33, k=512) for s in (8, 61, 64, 128, 256)] if full else [])


def other_garbage(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """What stands beyond the lengths is changed: NaN, +inf, then absent altogether."""
    scores, lengths = inputs["scores_ts"], inputs["length_t"]
    beyond = torch.arange(scores.shape[1]) >= lengths[:, None]
    for value in (torch.nan, torch.inf):
        yield Variant(label=f"{value} beyond", calls=(inputs | {"scores_ts": scores.masked_fill(beyond, value)},))
    longest = int(lengths.max()) if lengths.numel() else 0
    yield Variant(label="absent", calls=(inputs | {"scores_ts": scores[:, :longest].contiguous()},))


def all_candidates(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Where every block is kept, a wider selection adds none."""
    wider = inputs | {"k": inputs["k"] + 7}

    def narrowed(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: x[:, : inputs["k"]] for name, x in results[0].items()}

    yield Variant(label="seven more places", calls=(wider,), join=narrowed)


def short(case: SelectCase | MapCase) -> bool:
    """Relations make many calls: they run on short rows full of ties, where an order could show, and on no rows."""
    if isinstance(case, MapCase):
        return case.regime == "normal" and case.k <= 40 and case.size in (5, 8)
    return case.regime in ("relu", "masked", "file") and case.columns <= 100 and case.tokens <= 3


def prefix_sum(case: object) -> str | None:
    """No case of these runs lowered on a CPU."""
    return "a prefix sum stays a call of the chip's library, which the CPU does not have"


def _relations(*more: Relation) -> tuple[Relation, ...]:
    return (
        Relation(name="batch_invariant", axis="rows", only=short),
        Relation(name="run_to_run", axis="repeats", only=short),
        Relation(name="chunk_invariant", axis="row chunks", hook=row_chunks, only=short),
        *more,
    )


GARBAGE = Relation(name="causality", axis="beyond the length", hook=other_garbage, only=short)
ROWS = {"scores_ts": 0, "length_t": 0}

# four programs a core instead of two: 241 us at 64 registers, 290 at 96, 302 at 128 (8192 rows of 8192, h200)
FEW_REGISTERS = (
    "64 registers a thread, some of them spilled, are a sixth faster than as many as the compiler would take"
)
SPILLS = {
    "sm90": Expect(mma=None, max_stack=448, reason=FEW_REGISTERS),
    "sm100": Expect(mma=None, max_stack=832, reason=FEW_REGISTERS),
}

TOPK = Op(
    name="topk",
    reference="deeptwin.reference.topk:topk",
    outputs=(
        Output(
            name="idx_tk",
            rule=TopK(scores="scores_ts", lengths="length_t", ties="lower", crossing=0.0, ascending=True),
            dtype=torch.int32,
        ),
    ),
    cases=cases,
    draw=draw,
    rows=ROWS,
    out_rows={"idx_tk": 0},
    relations=_relations(GARBAGE, Relation(name="layout_invariant", axis="alignment of rows", only=short)),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.topk:topk_triton", lowered_declines=prefix_sum),
        Sm90Candidate(name="tilelang", function="deeptwin.optimized.topk:topk_tilelang", needs=("tilelang",)),
    ),
    builds=(
        BuildCase(
            name="bf16-k512",
            kernel="deeptwin.kernels.triton_ops.topk:_select",
            launch="deeptwin.parity.builds.launches.topk:topk_bf16",
            expect=VECTOR,
        ),
        BuildCase(
            name="bf16-parts-k512",
            kernel="deeptwin.kernels.triton_ops.topk:_select_at_once",
            launch="deeptwin.parity.builds.launches.topk:topk_bf16",
            expect=SPILLS,
        ),
        BuildCase(
            name="fp32-s8192-k512",
            kernel="deeptwin.kernels.triton_ops.topk:_select_at_once",
            launch="deeptwin.parity.builds.launches.topk:topk_at_once",
            expect=SPILLS,
        ),
        BuildCase(
            name="fp32-k512",
            kernel="deeptwin.kernels.triton_ops.topk:_select",
            launch="deeptwin.parity.builds.launches.topk:topk_fp32",
            expect=VECTOR,
        ),
        BuildCase(
            name="fp32-k16384",
            kernel="deeptwin.kernels.triton_ops.topk:_select",
            launch="deeptwin.parity.builds.launches.topk:topk_wide",
            expect=NO_PRODUCT,
        ),
        BuildCase(
            name="tilelang-fp32-s8192-k512",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.topk_sm90:select_program",
            launch="deeptwin.parity.builds.launches.topk_tilelang:sm90_s8192_k512",
            expect={"sm90": Expect(mma=None, max_registers=64)},
        ),
        BuildCase(
            name="tilelang-bf16-s32768-k2048",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.topk_sm90:select_program",
            launch="deeptwin.parity.builds.launches.topk_tilelang:sm90_s32768_k2048",
            expect={"sm90": Expect(mma=None, max_registers=64)},
        ),
        BuildCase(
            name="tilelang-fp32-of-parts-k512",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.topk_sm90:select_program",
            launch="deeptwin.parity.builds.launches.topk_tilelang:sm90_of_parts",
            expect={"sm90": Expect(mma=None, max_registers=64)},
        ),
    ),
    peers=(
        Peer(
            name="torch-topk",
            function="deeptwin.parity.peers.topk:torch_topk",
            needs=(),
            explains="torch.topk on each row's prefix; it leaves ties open, so any of them is accepted",
            rules={
                "idx_tk": TopK(scores="scores_ts", lengths="length_t", ties="any", crossing=0.0, ascending=True),
            },
        ),
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.topk:stable_topk",
            needs=("tile_kernels",),
            explains="tile_kernels 2.1.0, torch.topk.stable_topk: ties to the lower index, as ours",
        ),
    ),
    mutants=(
        _mutant("ties_to_the_higher", "U45", "a tie at the k-th place goes to the higher index"),
        _mutant("ties_by_the_call", "U46", "which of the tied entries are chosen changes between calls"),
        _mutant("sorted_by_score", "U46", "the indices come out in the order of their scores"),
        _mutant("nan_chosen", "U18", "NaN counts as the largest score"),
        _mutant("masked_chosen", "U47", "entries of −inf fill the places that are left"),
        _mutant("length_ignored", "U08", "what stands beyond the length is chosen"),
        _mutant("unplanned_when_all_are_empty", "U21", "with all lengths zero the plan is read past its end"),
        _mutant("length_of_the_first", "U09", "every row has the length of the first"),
        _mutant("zeros_by_sign", "U89", "−0 comes after +0, so a tie at zero is broken by the sign"),
        _mutant("compared_in_bf16", "U17", "fp32 scores are compared in bf16"),
        _mutant("first_digit_only", "U18", "the threshold is looked for in the upper bits only"),
        _mutant("largest_magnitude", "U24", "the sign of a score is lost"),
        _mutant("padded_with_zeros", "U19", "a row shorter than k is filled up with index 0"),
        _mutant("padded_with_the_last", "U19", "a row shorter than k is filled up with its last index"),
        _mutant("one_too_few", "U19", "k − 1 indices"),
    ),
    controls=(_control("right_selection"),),
    golden=lambda: [
        replace(SMALL, tokens=4, columns=40, k=8, regime=r, lengths="mixed") for r in ("relu", "signed_zeros", "nan")
    ],
)

CANDIDATES = Op(
    name="candidate_blocks",
    reference="deeptwin.reference.topk:candidate_blocks",
    outputs=(Output(name="blocks_tk", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_candidates,
    draw=draw,
    rows=ROWS,
    out_rows={"blocks_tk": 0},
    relations=_relations(
        GARBAGE,
        Relation(
            name="masked_equals_absent",
            axis="places to spare",
            hook=all_candidates,
            only=lambda case: case.k * case.size > case.columns > 0,
        ),
    ),
    candidates=(
        Candidate(
            name="triton", function="deeptwin.optimized.topk:candidate_blocks_triton", lowered_declines=prefix_sum
        ),
    ),
    builds=(
        BuildCase(
            name="block-scores",
            kernel="deeptwin.kernels.triton_ops.topk:_block_scores",
            launch="deeptwin.parity.builds.launches.topk:candidates",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("last_block_not_kept", "U26", "the last, partial block has to compete"),
        _mutant("cap_missing", "U18", "an infinite score draws level with the last block"),
        _mutant("block_mean", "U25", "a block has the mean of its scores"),
        _mutant("block_first_entry", "U25", "a block has the score of its first entry"),
        _mutant("block_reads_beyond", "U08", "the partial block takes scores from beyond the length"),
        _mutant("partial_block_lost", "U31", "the number of blocks is rounded down"),
        _mutant("unreachable_kept", "U47", "blocks without a score fill the places that are left"),
        _mutant("block_ties_to_the_higher", "U45", "tied blocks go to the higher index"),
        _mutant("entries_instead_of_blocks", "U25", "k entries are kept instead of k blocks"),
    ),
    controls=(_control("right_candidates"),),
    golden=lambda: [
        SelectCase(tokens=5, columns=60, k=3, size=8, lengths="mixed", regime=r) for r in ("normal", "masked")
    ],
)

COMPACT = Op(
    name="compact_lengths",
    reference="deeptwin.reference.topk:compact_lengths",
    outputs=(Output(name="length_t", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_compact,
    draw=draw_compact,
    rows={"blocks_tj": 0, "length_t": 0},
    out_rows={"length_t": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=lambda case: case.columns <= 300),),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.topk:compact_lengths_triton"),),
    builds=(
        BuildCase(
            name="b2048",
            kernel="deeptwin.kernels.triton_ops.topk:_compact_lengths",
            launch="deeptwin.parity.builds.launches.topk:compact",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("absent_blocks_counted", "U79", "a block of −1 counts as a whole one"),
        _mutant("partial_block_whole", "U31", "the partial block counts as a whole one"),
        _mutant("length_one_short", "U25", "the query's own entry is not counted"),
    ),
    controls=(_control("right_lengths"),),
    golden=lambda: [SelectCase(tokens=6, columns=60, k=4, size=8, lengths="mixed")],
)

RESTORE = Op(
    name="restore_indices",
    reference="deeptwin.reference.topk:restore_indices",
    outputs=(Output(name="entry_tk", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_maps,
    draw=draw_restore,
    rows={"idx_tk": 0, "blocks_tj": 0},
    out_rows={"entry_tk": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=short),),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.topk:restore_indices_triton"),),
    builds=(
        BuildCase(
            name="k512",
            kernel="deeptwin.kernels.triton_ops.topk:_look_up",
            launch="deeptwin.parity.builds.launches.topk:restore",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("restored_absent", "U79", "−1 is restored from the last block"),
        _mutant("restored_unscaled", "U25", "the block number is not multiplied by the block size"),
        _mutant("restored_by_the_first", "U09", "every row is restored with the blocks of the first"),
        _mutant("restored_absent_block", "U79", "a block of −1 gives negative entries other than −1"),
    ),
    controls=(_control("right_restore"),),
    golden=lambda: [MapCase(tokens=2, k=12, places=4, size=8)],
)

SLOTS = Op(
    name="physical_slots",
    reference="deeptwin.reference.topk:physical_slots",
    outputs=(Output(name="slot_tk", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_maps,
    draw=draw_slots,
    rows={"idx_tk": 0, "table_tp": 0},
    out_rows={"slot_tk": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=short),),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.topk:physical_slots_triton"),),
    mutants=(
        _mutant("slot_wraps", "U79", "entry −1 wraps to the last slot"),
        _mutant("slot_of_absent_page", "U79", "a page of −1 gives a slot"),
        _mutant("slot_page_and_offset_swapped", "U22", "page and offset are exchanged"),
        _mutant("slot_by_the_first_table", "U09", "every row uses the table of the first"),
        _mutant("slot_of_a_double_page", "U29", "the table is read as one of pages twice as long"),
        _mutant("slot_beyond_the_table", "U08", "an entry beyond the table is its own slot"),
    ),
    controls=(_control("right_slots"),),
    golden=lambda: [MapCase(tokens=2, k=12, places=3, size=5)],
)

CARD = Card(
    component="topk",
    summary="exact top-k with declared ties, candidate blocks, compact indices and slots",
    contract={
        "dtypes": "scores bf16 or fp32; lengths, indices, blocks, pages and slots int32",
        "ties": "the lower index; −0 equals +0",
        "never chosen": "NaN, −inf, and whatever stands at or beyond the length",
        "order": "ascending, −1 behind",
        "candidates": "the block maximum capped at the largest finite bf16; the last block of a row always kept",
        "precondition": "0 ≤ length ≤ columns; compact lengths are a prefix where blocks ascend",
    },
    ops=(TOPK, CANDIDATES, COMPACT, RESTORE, SLOTS),
    equivalents=(
        Equivalent(
            name="a histogram, a sort or any other way to the threshold",
            reason="the set is determined by the scores, the lengths and the tie rule",
        ),
    ),
)
