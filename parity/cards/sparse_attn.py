"""How sparse attention is checked: shared key/value rows, index lists with holes, an optional sink, a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import FEW_HEADS, FULL_REGISTERS, NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase, Expect
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Peer, Relation, variants
from ..relations import Context, Variant, row_chunks
from ..rules import ATTENTION, LSE, Close

_mutant, _control = variants("sparse_attn")


@dataclass(frozen=True, kw_only=True)
class SparseCase:
    """`keys` rows to choose from, `topk` list entries; `page` > 0 makes it a paged cache of that page size."""

    tokens: int
    heads: int
    dim: int
    value_dim: int
    keys: int
    topk: int
    page: int = 0
    dtype: str = "bf16"
    regime: str = "normal"
    sink: str = "normal"  # normal, none, large, extreme
    holes: str = "some"  # none, some, leading, all, bad
    lengths: str = "none"  # none, mixed

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-h{self.heads}-d{self.dim}v{self.value_dim}-s{self.keys}-k{self.topk}"
        page = f"-page{self.page}" if self.page else ""
        return f"{shape}{page}-{self.dtype}-{self.regime}-sink_{self.sink}-holes_{self.holes}-len_{self.lengths}"


def draw(case: SparseCase, rng: np.random.Generator) -> Inputs:
    """Queries, keys whose unlisted rows are NaN, and hostile index lists."""
    dtype = draws.DTYPES[case.dtype]
    q = draws.normal(rng, case.tokens, case.heads, case.dim, dtype=dtype, scale=_query_scale(case.regime))
    kv = _keys(case, rng, dtype)
    # lists name rows of one half only; the other half holds NaN, which a tail beyond the length may point to
    usable = draws.distinct(rng, case.keys, max(1, case.keys // 2)) if case.keys else np.zeros(0, dtype=np.int64)
    spare = np.setdiff1d(np.arange(case.keys), usable)
    kv[torch.from_numpy(spare)] = torch.nan
    lists = np.full((case.tokens, case.topk), -1, dtype=np.int64)
    for row in lists:
        count = min(case.topk, usable.size)
        row[rng.permutation(case.topk)[:count]] = rng.permutation(usable)[:count]
        _punch(case, rng, row)
    lengths = None
    if case.lengths == "mixed":
        choices = [0, 1, case.topk - 1, case.topk, case.topk // 2]
        lengths = np.array([choices[i % len(choices)] for i in range(case.tokens)]).clip(0, case.topk)
        for row, length in zip(lists, lengths, strict=True):
            row[length:] = rng.choice([*spare[:4], *draws.BAD_INDICES], case.topk - length)
    if case.regime == "nankey" and usable.size:
        kv[int(usable[0])] = torch.nan
        lists[0, 0] = usable[0]
    inputs: Inputs = {
        "q_thd": draws.strided(q, pad=8),
        "kv_sd": kv,
        "idx_tk": torch.from_numpy(lists.astype(np.int32)),
        "sink_h": _sink(case, rng),
        "topk_length_t": None if lengths is None else torch.from_numpy(lengths.astype(np.int32)),
        "scale": case.dim**-0.5,
        "value_dim": case.value_dim,
        "dtype": dtype,
    }
    return inputs


def draw_decode(case: SparseCase, rng: np.random.Generator) -> Inputs:
    """The same with the rows scattered over a paged cache whose pages lie further apart than they are long."""
    inputs = draw(case, rng)
    kv = inputs.pop("kv_sd")
    pages = -(-case.keys // case.page) + 1
    slots = rng.permutation(pages * case.page)[: case.keys]
    roomy = draws.poisoned(pages, case.page * case.dim + 64, dtype=kv.dtype)
    cache = roomy[:, : case.page * case.dim].unflatten(1, (case.page, case.dim))
    cache[torch.from_numpy(slots // case.page), torch.from_numpy(slots % case.page)] = kv
    old = inputs["idx_tk"].numpy()
    inside = (old >= 0) & (old < case.keys)
    moved = np.where(inside, slots[np.where(inside, old, 0)] if case.keys else old, old)
    inputs["idx_tk"] = torch.from_numpy(moved.astype(np.int32))
    order = ("q_thd", "kv_pod", "idx_tk", "sink_h", "topk_length_t", "scale", "value_dim", "dtype")
    return {name: (inputs | {"kv_pod": cache})[name] for name in order}


def _query_scale(regime: str) -> float:
    return {"peaked": 4.0, "flat": 0.1, "huge": 30.0, "tiny": 2.0**-60, "zeros": 0.0}.get(regime, 1.0)


def _keys(case: SparseCase, rng: np.random.Generator, dtype: torch.dtype) -> torch.Tensor:
    mean = 1.0 if case.regime == "mean1" else 0.0
    kv = draws.normal(rng, case.keys, case.dim, dtype=dtype, mean=mean)
    if case.regime == "ties" and case.keys:
        kv[:] = kv[:1].clone()
    return kv * 2.0**-60 if case.regime == "tiny" else kv


def _punch(case: SparseCase, rng: np.random.Generator, row: np.ndarray) -> None:
    if case.holes == "some":
        row[rng.permutation(row.size)[: row.size // 8]] = -1
    elif case.holes == "leading":
        row[: 3 * row.size // 4] = -1
    elif case.holes == "all":
        row[:] = -1
    elif case.holes == "bad":
        where = rng.permutation(row.size)[: row.size // 4]
        row[where] = rng.choice([*draws.BAD_INDICES, case.keys + 10**6], where.size)


def _sink(case: SparseCase, rng: np.random.Generator) -> torch.Tensor | None:
    if case.sink == "none":
        return None
    sink = draws.normal(rng, case.heads, dtype=torch.float32, scale=2.0)
    if case.sink == "large":
        sink += 150.0  # as large as the scores of the huge regime, and beyond 2^127 in base 2
    if case.sink == "extreme":
        special = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 0.0, 1e4, -1e4, 60.0])
        sink[: special.numel()] = special[: case.heads]
    return sink


SMALL = SparseCase(tokens=3, heads=16, dim=64, value_dim=64, keys=160, topk=70)


def cases(full: bool) -> list[SparseCase]:
    """Regimes and edges on small heads, then the production shapes at one or two rows."""
    base = SMALL
    found = [_with(base, regime=r) for r in (*REGIMES, "zeros", "ties", "tiny", "huge")]
    # 13 rows × 16 heads: enough rows for the bias rule
    found += [_with(base, tokens=13, regime=r, lengths="mixed") for r in ("normal", "mean1")]
    found += [
        _with(base, tokens=0),
        _with(base, tokens=1, heads=1, keys=1, topk=1, holes="none"),
        _with(base, topk=1, keys=2, holes="none"),
        _with(base, topk=65, heads=5),
        _with(base, sink="none"),
        _with(base, sink="extreme"),
        _with(base, sink="extreme", regime="peaked"),
        _with(base, sink="large", regime="huge"),
        _with(base, sink="extreme", holes="all"),
        _with(base, sink="none", holes="all"),
        _with(base, holes="leading", topk=200, keys=500),
        _with(base, holes="bad"),
        _with(base, holes="some", lengths="mixed", tokens=6),
        # more entries than one split of the kernel: partial results are merged, and some splits are empty
        _with(base, heads=4, keys=2400, topk=1100, tokens=5, lengths="mixed"),
        _with(base, heads=4, keys=2400, topk=1100, tokens=2, holes="leading", regime="peaked"),
        _with(base, regime="nankey"),
        _with(base, dtype="fp32"),
        _with(base, dtype="fp32", regime="peaked"),
        SparseCase(tokens=1, heads=64, dim=512, value_dim=512, keys=1400, topk=640),
        SparseCase(tokens=2, heads=16, dim=576, value_dim=512, keys=600, topk=192, sink="none"),
    ]
    if full:
        found += [
            _with(base, regime=r, topk=k, sink=s) for r, k, s in product(REGIMES, (63, 64, 129), ("normal", "none"))
        ]
        found += [
            SparseCase(tokens=2, heads=64, dim=512, value_dim=512, keys=1400, topk=640, regime=r) for r in REGIMES
        ]
        found += [
            SparseCase(tokens=1, heads=128, dim=576, value_dim=512, keys=4200, topk=2048, sink="none"),
            SparseCase(tokens=1, heads=128, dim=512, value_dim=512, keys=2400, topk=1152),
        ]
    return list({case.id: case for case in found}.values())


def cases_decode(full: bool) -> list[SparseCase]:
    """Page sizes that break coincidences, regimes, lengths, holes, one production row."""
    base = _with(SMALL, page=5)
    found = [_with(base, regime=r) for r in REGIMES]
    found += [
        _with(base, page=1),
        _with(base, page=61),
        _with(base, page=64, lengths="mixed", tokens=6),
        _with(base, holes="all", sink="extreme"),
        _with(base, holes="leading", topk=200, keys=500),
        _with(base, heads=4, keys=2400, topk=1100, tokens=5, lengths="mixed"),
        _with(base, tokens=0),
        SparseCase(tokens=1, heads=64, dim=512, value_dim=512, keys=1400, topk=640, page=64),
    ]
    if full:
        found += [_with(base, page=p, regime=r) for p, r in product((2, 53, 69, 128), REGIMES)]
        found += [
            SparseCase(tokens=2, heads=64, dim=576, value_dim=512, keys=1400, topk=1024, page=64, sink="none", regime=r)
            for r in REGIMES
        ]
    return list({case.id: case for case in found}.values())


def _with(case: SparseCase, **changes: object) -> SparseCase:
    return replace(case, **changes)  # type: ignore[arg-type]


# relation hooks


def more_holes(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Entries of −1 appended, and whatever stands beyond the length replaced by −1, change nothing."""
    lists = inputs["idx_tk"]
    for extra in (1, 64, 130):
        pad = torch.full((lists.shape[0], extra), -1, dtype=torch.int32)
        yield Variant(label=f"{extra} holes appended", calls=(inputs | {"idx_tk": torch.cat([lists, pad], 1)},))
    if inputs["topk_length_t"] is not None:
        beyond = torch.arange(lists.shape[1])[None, :] >= inputs["topk_length_t"][:, None]
        masked = inputs | {"idx_tk": torch.where(beyond, -1, lists), "topk_length_t": None}
        yield Variant(label="length replaced by holes", calls=(masked,))


def poison_unlisted(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows that no list names may hold anything: NaN becomes infinity, then zero."""
    kv = inputs["kv_sd"]
    named = torch.zeros(kv.shape[0], dtype=torch.bool)
    lists = inputs["idx_tk"].to(torch.int64)
    if inputs["topk_length_t"] is not None:
        inside = torch.arange(lists.shape[1])[None, :] < inputs["topk_length_t"][:, None]
        lists = torch.where(inside, lists, -1)
    named[lists[(lists >= 0) & (lists < kv.shape[0])]] = True
    for value in (torch.inf, 0.0):
        other = kv.clone()
        other[~named] = value
        yield Variant(label=f"unlisted rows {value}", calls=(inputs | {"kv_sd": other},))


def permute_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same rows on other pages, the lists renumbered."""
    cache, lists = inputs["kv_pod"], inputs["idx_tk"].to(torch.int64)
    pages, slots = cache.shape[0], cache.shape[1]
    for attempt in range(4 if context.full else 2):
        order = torch.from_numpy(context.rng.permutation(pages))
        moved = torch.empty_like(order)
        moved[order] = torch.arange(pages)
        inside = (lists >= 0) & (lists < pages * slots)
        safe = torch.where(inside, lists, 0)
        renumbered = torch.where(inside, moved[safe // slots] * slots + safe % slots, lists)
        changed = inputs | {"kv_pod": cache[order].contiguous(), "idx_tk": renumbered.to(torch.int32)}
        yield Variant(label=f"page order {attempt}", calls=(changed,))


def as_prefill(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The prefill operation on the flattened cache."""
    cache = inputs["kv_pod"]
    flat = {("kv_sd" if k == "kv_pod" else k): v for k, v in inputs.items()}
    flat["kv_sd"] = cache.reshape(-1, cache.shape[-1]).clone()
    yield Variant(label="prefill", calls=(flat,))


def golden_cases() -> list[SparseCase]:
    """One small case per branch: sink, lengths, holes, empty rows."""
    small = SparseCase(tokens=2, heads=4, dim=16, value_dim=16, keys=24, topk=9)
    return [
        small,
        _with(small, sink="extreme", heads=8),
        _with(small, lengths="mixed", tokens=5),
        _with(small, holes="all"),
        _with(small, regime="peaked", sink="none", value_dim=12),
    ]


def golden_cases_decode() -> list[SparseCase]:
    """One paged case."""
    return [SparseCase(tokens=2, heads=4, dim=16, value_dim=16, keys=24, topk=9, page=5, lengths="mixed")]


OUTPUTS = (Output(name="out_thu", rule=ATTENTION), Output(name="lse_th", rule=LSE, dtype=torch.float32))
ROWS = {"q_thd": 0, "idx_tk": 0, "topk_length_t": 0}
OUT_ROWS = {"out_thu": 0, "lse_th": 0}


def finite(case: SparseCase) -> bool:
    """Relations on cases whose keys are finite where listed, and not on the longest lists: they make many calls."""
    return case.regime != "nankey" and case.tokens * case.topk <= 2500


PREFILL = Op(
    name="sparse_attn",
    reference="deeptwin.reference.sparse_attn:sparse_attn",
    outputs=OUTPUTS,
    cases=cases,
    draw=draw,
    rows=ROWS,
    out_rows=OUT_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="query tokens", only=finite),
        Relation(name="run_to_run", axis="repeats", only=finite),
        Relation(name="chunk_invariant", axis="query chunks", hook=row_chunks, only=finite),
        Relation(name="masked_equals_absent", axis="list entries", hook=more_holes, only=finite),
        Relation(name="causality", axis="unlisted rows", hook=poison_unlisted, only=finite),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.sparse_attn:sparse_attn_triton"),),
    builds=(
        BuildCase(
            name="h64-d512",
            kernel="deeptwin.kernels.triton_ops.sparse_attn:_attend_split",
            launch="deeptwin.parity.builds.launches.sparse_attn:prefill_h64_d512",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="h128-d512",
            kernel="deeptwin.kernels.triton_ops.sparse_attn:_attend_split",
            launch="deeptwin.parity.builds.launches.sparse_attn:prefill_h128_d512",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="h128-d512-combine",
            kernel="deeptwin.kernels.triton_ops.split_softmax:_combine_splits",
            launch="deeptwin.parity.builds.launches.sparse_attn:prefill_h128_d512",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="h128-d576",
            kernel="deeptwin.kernels.triton_ops.sparse_attn:_attend_split",
            launch="deeptwin.parity.builds.launches.sparse_attn:prefill_h128_d576",
            expect=FULL_REGISTERS | MATRIX,
        ),
        BuildCase(
            name="h128-d576-combine",
            kernel="deeptwin.kernels.triton_ops.split_softmax:_combine_splits",
            launch="deeptwin.parity.builds.launches.sparse_attn:prefill_h128_d576",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="h16-d512",
            kernel="deeptwin.kernels.triton_ops.sparse_attn:_attend_split",
            launch="deeptwin.parity.builds.launches.sparse_attn:prefill_h16_d512",
            expect=FEW_HEADS | MATRIX,
        ),
        BuildCase(
            name="h64-d512-fp32",
            kernel="deeptwin.kernels.triton_ops.sparse_attn:_attend_split",
            launch="deeptwin.parity.builds.launches.sparse_attn:prefill_h64_d512_fp32",
            expect=NO_PRODUCT | MATRIX,
        ),
        BuildCase(
            name="tilelang-h64-d512",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.sparse_attn:attend_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:sm100_h64_d512",
            expect={"sm100": Expect(mma="tcgen05")},
        ),
        BuildCase(
            name="tilelang-h128-d512",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.sparse_attn:attend_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:sm100_h128_d512",
            expect={"sm100": Expect(mma="tcgen05")},
        ),
        BuildCase(
            name="tilelang-h128-d576",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.sparse_attn:attend_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:sm100_h128_d576",
            expect={"sm100": Expect(mma="tcgen05")},
        ),
    ),
    peers=(
        Peer(
            name="torch-sdpa",
            function="deeptwin.parity.peers.sparse_attn:sdpa_fp64",
            needs=(),
            explains="torch's scaled_dot_product_attention in fp64, the sink as one more key with a zero value",
            rules={"out_thu": Close(rtol=2.0**-8), "lse_th": Close(rtol=1e-6)},
            only=lambda case: case.regime not in ("nankey",),
        ),
    ),
    mutants=(
        _mutant("scale_off_by_3_percent", "U05", "softmax scale off by 3 %"),
        _mutant("scale_off_by_half_percent", "U05", "softmax scale off by 0.5 %"),
        _mutant("last_key_dropped", "U01", "the last key of the list is lost in the last block"),
        _mutant("weights_truncated", "R1", "softmax weights truncated to bf16"),
        _mutant("accumulator_bf16", "R1", "the accumulator is kept in bf16"),
        _mutant("scores_bf16", "R1", "scores rounded to bf16"),
        _mutant("sink_ignored", "U78", "the sink is not in the denominator"),
        _mutant("sink_scaled", "U78", "the sink is multiplied by the softmax scale"),
        _mutant("sink_in_maximum", "U87", "the sink enters the running maximum"),
        _mutant("sink_to_base_2_early", "U78", "large sinks overflow in base 2 before stabilising"),
        _mutant("lse_base_2", "U02", "LSE in base 2 where natural is declared"),
        _mutant("lse_with_sink", "U78", "the LSE includes the sink"),
        _mutant("output_truncated", "R1", "the output is truncated to bf16"),
        _mutant("output_one_ulp_up", "R1", "every output one ulp too large"),
        _mutant("hole_wraps_to_last_row", "U79", "index −1 wraps to the last row"),
        _mutant("hole_times_nan", "U74", "a masked gather computes 0 · NaN"),
        _mutant("length_ignored", "U08", "topk_length is not passed to the kernel"),
        _mutant("empty_row_nan", "U07", "a row without keys divides 0 by 0"),
        _mutant("empty_row_unwritten", "U75", "a row without keys is left unwritten"),
        _mutant("nan_hidden", "U77", "a NaN of the inputs comes out as a finite number"),
        _mutant("upper_bound_unchecked", "U08", "indices beyond the keys are read"),
        _mutant("first_list_for_all", "U09", "every token uses the list of the first"),
        _mutant("split_depends_on_batch", "U73", "the split of the key list depends on the batch"),
        _mutant("order_depends_on_place", "U92", "equal rows of one tile are summed in different orders"),
        _mutant("not_deterministic", "U10", "every second launch differs in the last bit of one element"),
    ),
    controls=tuple(
        _control(name)
        for name in ("right_block_64", "right_block_128", "right_block_32_backwards", "right_lazy_maximum")
    ),
    golden=golden_cases,
)

DECODE = Op(
    name="sparse_attn_decode",
    reference="deeptwin.reference.sparse_attn:sparse_attn_decode",
    outputs=OUTPUTS,
    cases=cases_decode,
    draw=draw_decode,
    rows=ROWS,
    out_rows=OUT_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="query tokens", only=finite),
        Relation(name="run_to_run", axis="repeats"),
        Relation(name="page_permutation", axis="pages", hook=permute_pages, only=finite),
        Relation(name="decode_equals_prefill", axis="path", hook=as_prefill, partner="sparse_attn"),
        Relation(name="masked_equals_absent", axis="list entries", hook=more_holes, only=finite),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.sparse_attn:sparse_attn_decode_triton"),),
    builds=(
        BuildCase(
            name="h64-d512",
            kernel="deeptwin.kernels.triton_ops.sparse_attn:_attend_split",
            launch="deeptwin.parity.builds.launches.sparse_attn:decode_h64_d512",
            expect=FULL_REGISTERS | MATRIX,
        ),
        BuildCase(
            name="h128-d576",
            kernel="deeptwin.kernels.triton_ops.sparse_attn:_attend_split",
            launch="deeptwin.parity.builds.launches.sparse_attn:decode_h128_d576",
            expect=FULL_REGISTERS | MATRIX,
        ),
        BuildCase(
            name="h128-d576-combine",
            kernel="deeptwin.kernels.triton_ops.split_softmax:_combine_splits",
            launch="deeptwin.parity.builds.launches.sparse_attn:decode_h128_d576",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="tilelang-h64-d512",
            dsl="tilelang",
            kernel="deeptwin.kernels.ascend_ops.sparse_attn:sparse_attn_decode_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:ascend_h64_d512",
            expect={"ascend950-simd": Expect(mma="cube")},
        ),
        BuildCase(
            name="tilelang-h64-d576",
            dsl="tilelang",
            kernel="deeptwin.kernels.ascend_ops.sparse_attn:sparse_attn_decode_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:ascend_h64_d576",
            expect={"ascend950-simd": Expect(mma="cube")},
        ),
    ),
    mutants=(
        _mutant("decode_ignores_page_stride", "U22", "pages are read as if they were contiguous"),
        _mutant("decode_reads_page_0_for_holes", "U74", "holes read page 0, whose NaN meets a zero weight"),
    ),
    controls=(_control("right_decode"),),
    golden=golden_cases_decode,
)

CARD = Card(
    component="sparse_attn",
    summary="attention over index lists, shared key/value rows, sink, paged cache",
    contract={
        "dtypes": "q, kv and out in `dtype` (bf16 or fp32); idx, topk_length int32; sink fp32; lse fp32",
        "rounding": "weights to dtype unnormalised (free scale), one rounding of the output, LSE to fp32",
        "units": "LSE natural log, without the sink; the sink is an unscaled logit",
        "invalid": "index < 0, ≥ number of rows, or at or beyond topk_length: nothing is read",
        "empty row": "out exactly 0, LSE −inf",
        "NaN": "a NaN in a listed row comes out as NaN; unlisted rows may hold NaN",
        "layout": "bf16 rows [s, d] or pages [p, o, d] with any page stride, physical slot = page · o + slot",
    },
    ops=(PREFILL, DECODE),
    equivalents=(
        Equivalent(
            name="block size, block order, lazy maximum",
            reason="the scale at which weights are rounded is the kernel's own (free scale): honest arithmetic",
        ),
    ),
)
