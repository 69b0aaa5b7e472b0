"""How sparse attention is checked: shared key/value rows, index lists with holes, an optional sink, a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import FP8_1X64, Q4K, Q8, PageLayout, RecordFormat, TwoCaches
from deeptwin.reference.quant import dequantize, quantize

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import FEW_HEADS, FULL_REGISTERS, NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase, Expect
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Peer, Relation, Sm90Candidate, variants
from ..pairing import every_pair
from ..relations import Context, Variant, in_a_crowd, row_chunks
from ..rules import ATTENTION, LSE, TWO_CACHES, Close

_mutant, _control = variants("sparse_attn")
_pair_mutant, _pair_control = variants("two_caches")


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
    lengths: str = "none"  # none, mixed, zero

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
    if case.lengths != "none":
        choices = [0] if case.lengths == "zero" else [0, 1, case.topk - 1, case.topk, case.topk // 2]
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


def _punch(case: SparseCase | PairCase, rng: np.random.Generator, row: np.ndarray) -> None:
    if case.holes == "some":
        row[rng.permutation(row.size)[: row.size // 8]] = -1
    elif case.holes == "leading":
        row[: 3 * row.size // 4] = -1
    elif case.holes == "all":
        row[:] = -1
    elif case.holes == "bad":
        where = rng.permutation(row.size)[: row.size // 4]
        row[where] = rng.choice([*draws.BAD_INDICES, 2 * 10**6], where.size)


def _sink(case: SparseCase | PairCase, rng: np.random.Generator) -> torch.Tensor | None:
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
            _with(base, regime=r, topk=k, sink=s) for r, k, s in every_pair(REGIMES, (63, 64, 129), ("normal", "none"))
        ]
        found += [
            SparseCase(tokens=2, heads=64, dim=512, value_dim=512, keys=1400, topk=640, regime=r) for r in REGIMES
        ]
        found += [
            SparseCase(tokens=1, heads=128, dim=576, value_dim=512, keys=4200, topk=2048, sink="none"),
            SparseCase(tokens=1, heads=128, dim=512, value_dim=512, keys=2400, topk=1152),
            SparseCase(tokens=5, heads=64, dim=512, value_dim=512, keys=400, topk=140),
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
        _with(base, lengths="zero"),
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


# two caches


@dataclass(frozen=True, kw_only=True)
class PairCase:
    """`window` and `main` list entries; rings of `ring` records, pages of `page` records."""

    tokens: int
    heads: int = 4
    channels: int = 64
    window: int = 20
    main: int = 50
    ring: int = 10
    page: int = 8
    main_format: str = "fp4"
    layout: str = "interleaved"
    dtype: str = "bf16"
    regime: str = "normal"
    sink: str = "normal"
    holes: str = "some"  # none, some, leading, all, bad

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-h{self.heads}-d{self.channels}-w{self.window}r{self.ring}-m{self.main}p{self.page}"
        how = f"{self.main_format}-{self.layout}-{self.dtype}-{self.regime}"
        return f"{shape}-{how}-sink_{self.sink}-holes_{self.holes}"

    @property
    def caches(self) -> TwoCaches:
        """Formats and layout; 512 channels are the records of V4.1, or of V4 in both caches."""
        fp8 = RecordFormat(name="kv_fp8", channels=self.channels, quant=Q8)
        fp4 = RecordFormat(name="kv_fp4", channels=self.channels, quant=Q4K)
        group = self.channels // 8
        quant = replace(FP8_1X64, group=group)
        v4 = RecordFormat(name="kv_v4", channels=7 * group, tail=group, pad=1, quant=quant)
        window, main = {"fp4": (fp8, fp4), "fp8": (fp8, fp8), "v4": (v4, v4)}[self.main_format]
        return TwoCaches(window=window, main=main, layout=PageLayout(self.layout), scale=self.channels**-0.5)


def draw_pair_decode(case: PairCase, rng: np.random.Generator) -> Inputs:
    """Rings and pages further apart than they are long; records that no list names hold 0xFF, NaN in code and scale."""
    caches = case.caches
    q = draws.normal(rng, case.tokens, case.heads, case.channels, dtype=torch.bfloat16, scale=_query_scale(case.regime))
    window, window_idx = _drawn_cache(case, rng, case.window, case.ring, caches.window)
    main, main_idx = _drawn_cache(case, rng, case.main, case.page, caches.main)
    return {
        "q_thd": draws.strided(q, pad=8),
        "window_pow": window,
        "window_idx_tk": window_idx,
        "main_pow": main,
        "main_idx_tk": main_idx,
        "sink_h": _sink(case, rng),
        "caches": caches,
        "dtype": draws.DTYPES[case.dtype],
    }


def draw_pair(case: PairCase, rng: np.random.Generator) -> Inputs:
    """The same with the rings as bf16 rows, NaN where a record is."""
    return _with_rows(draw_pair_decode(case, rng))


def _with_rows(inputs: Inputs) -> Inputs:
    rows = _values(inputs["window_pow"], inputs["caches"].window, inputs["caches"].layout)
    swapped = {("window_sd" if name == "window_pow" else name): value for name, value in inputs.items()}
    return swapped | {"window_sd": rows}


def _drawn_cache(
    case: PairCase, rng: np.random.Generator, entries: int, page: int, fmt: RecordFormat
) -> tuple[Tensor, Tensor]:
    count = max(entries * 2, 1) if case.main or case.window else 1
    pages = -(-count // page) + 1
    slots = draws.distinct(rng, pages * page, max(entries, 1))
    mean = 1.0 if case.regime == "mean1" else 0.0
    x = draws.normal(rng, len(slots), fmt.width, dtype=torch.bfloat16, mean=mean)
    if case.regime == "ties":
        x[:] = x[:1].clone()
    x *= 2.0**-60 if case.regime == "tiny" else 1.0
    codes, sf = (part.view(torch.uint8) for part in quantize(x[:, : fmt.channels].contiguous(), fmt=fmt.quant))
    if case.regime == "nankey":
        sf[0, -1] = 255  # a NaN scale in either format
    sf = torch.nn.functional.pad(sf, (0, fmt.pad))
    tail = x[:, fmt.channels :].contiguous().view(torch.uint8)
    cache = draws.poisoned(pages, page * fmt.record_bytes + 32, dtype=torch.uint8)[:, : page * fmt.record_bytes]
    where, at = (torch.from_numpy(v) for v in (slots // page, slots % page))
    if case.layout == "interleaved":
        cache.unflatten(1, (page, -1))[where, at] = torch.cat([codes, sf, tail], 1)
    else:
        data = page * (fmt.record_bytes - fmt.scale_bytes)
        cache[:, :data].unflatten(1, (page, -1))[where, at] = torch.cat([codes, tail], 1)
        cache[:, data:].unflatten(1, (page, -1))[where, at] = sf
    lists = np.full((case.tokens, entries), -1, dtype=np.int64)
    for row in lists:
        row[:] = rng.permutation(slots)[:entries] if entries else row
        if case.holes == "bad" and entries:
            bad = rng.permutation(entries)[: entries // 4]
            row[bad] = rng.choice([*draws.BAD_INDICES, pages * page, pages * page + 7], bad.size)
        elif entries:
            _punch(case, rng, row)
    return cache.unflatten(1, (page, fmt.record_bytes)), torch.from_numpy(lists.astype(np.int32))


def _values(cache_pow: Tensor, fmt: RecordFormat, layout: PageLayout) -> Tensor:
    """Every record of a cache as a bf16 row."""
    pages, page, width = cache_pow.shape
    data, scales = fmt.data_bytes, fmt.scale_bytes
    if layout is PageLayout.INTERLEAVED:
        codes, sf, tail = cache_pow.reshape(-1, width).split([data, scales, 2 * fmt.tail], 1)
    else:
        parts = cache_pow.reshape(pages, -1).split([page * (width - scales), page * scales], 1)
        rows, sf = (part.reshape(pages * page, -1) for part in parts)
        codes, tail = rows.split([data, 2 * fmt.tail], 1)
    if fmt.quant == Q4K:
        return dequantize(codes, sf.contiguous().view(torch.float8_e4m3fn), fmt=fmt.quant).to(torch.bfloat16)
    codes = codes.contiguous().view(torch.float8_e4m3fn)
    x = dequantize(codes, sf[:, : scales - fmt.pad], fmt=fmt.quant).to(torch.bfloat16)
    return torch.cat([x, tail.contiguous().view(torch.bfloat16)], 1) if fmt.tail else x


PAIR = PairCase(tokens=3)
V4 = PairCase(
    tokens=3,
    heads=64,
    channels=512,
    window=128,
    main=512,
    ring=134,
    page=64,
    main_format="v4",
    layout="sectioned",
)


def cases_pair_decode(full: bool) -> list[PairCase]:
    """Regimes, arrangements, formats, edges of both lists, one production row."""
    base = PAIR
    found = [_pair(base, regime=r) for r in (*REGIMES, "zeros", "ties", "tiny")]
    found += [
        _pair(base, layout="sectioned", main=20, window=5),
        _pair(base, tokens=9, regime="mean1", dtype="fp32"),
        _pair(base, regime="peaked", dtype="fp32", layout="sectioned"),
        _pair(base, main_format="fp8"),
        _pair(base, main_format="fp8", layout="sectioned", heads=5, regime="mean1"),
        _pair(base, main_format="v4", layout="sectioned"),
        _pair(base, main_format="v4", layout="sectioned", regime="nankey"),
        _pair(base, main_format="v4", tokens=1, regime="peaked"),
        _pair(base, tokens=0),
        _pair(base, tokens=1, heads=1, window=1, main=1, ring=1, page=1, holes="none"),
        _pair(base, window=0),
        _pair(base, main=0, holes="none"),
        _pair(base, window=64, main=65, ring=134, page=64, tokens=1),
        _pair(base, window=65, main=130, ring=7, page=53, tokens=1, holes="leading"),
        _pair(base, holes="bad"),
        _pair(base, holes="all"),
        _pair(base, holes="all", sink="none"),
        _pair(base, sink="none"),
        _pair(base, sink="extreme", heads=8),
        _pair(base, regime="nankey"),
        PairCase(tokens=1, heads=64, channels=512, window=128, main=512, ring=134, page=64),
        _pair(V4, tokens=1, window=64, main=130),
    ]
    if full:
        found += [
            _pair(base, regime=r, layout=y, main_format=f, dtype=d)
            for r, y, f, d in every_pair(REGIMES, ("interleaved", "sectioned"), ("fp4", "fp8"), ("bf16", "fp32"))
        ]
        found += [
            PairCase(
                tokens=2, heads=64, channels=512, window=128, main=512, ring=134, page=128, regime=r, layout="sectioned"
            )
            for r in REGIMES
        ]
        found += wide_pairs() + v4_pairs()
    return list({case.id: case for case in found}.values())


def cases_pair(full: bool) -> list[PairCase]:
    """Regimes and edges with bf16 window rows."""
    base = PAIR
    found = [_pair(base, regime=r) for r in REGIMES]
    found += [
        _pair(base, tokens=9, layout="sectioned", dtype="fp32"),
        _pair(base, main_format="fp8"),
        _pair(base, tokens=0),
        _pair(base, window=0),
        _pair(base, window=65, main=70, tokens=2, holes="leading"),
        _pair(base, holes="bad", sink="extreme", heads=8, layout="sectioned"),
        _pair(base, holes="all"),
        _pair(base, regime="nankey"),
    ]
    if full:
        found += [_pair(base, regime=r, main=m, sink=s) for r, m, s in product(REGIMES, (1, 64), ("normal", "none"))]
        found += wide_pairs()
    return list({case.id: case for case in found}.values())


def wide_pairs() -> list[PairCase]:
    """What the kernels for SM90 take: formats, arrangements, odd lists, holes, a NaN."""
    wide = PairCase(tokens=3, heads=64, channels=512, window=70, main=200, ring=9, page=7)
    return [
        wide,
        _pair(wide, main_format="fp8", layout="sectioned", holes="bad", sink="none"),
        _pair(wide, layout="sectioned", regime="peaked", sink="extreme", tokens=1),
        _pair(wide, tokens=1, main=0, holes="leading"),
        _pair(wide, tokens=1, window=0, holes="all"),
        _pair(wide, tokens=2, regime="nankey"),
        _pair(wide, tokens=2, regime="tiny", main_format="fp8", layout="sectioned", sink="none"),
    ]


def v4_pairs() -> list[PairCase]:
    """What FlashMLA takes of V4: lists of several 64-key blocks, which it splits by the batch, holes, a sink, a NaN.

    And pages that it does not take.
    """
    return [
        V4,
        _pair(V4, layout="interleaved", ring=10, page=6, window=70, main=200, tokens=2),
        _pair(V4, heads=128, main=200, tokens=2),
        _pair(V4, holes="leading", regime="mean1", tokens=2),
        _pair(V4, holes="bad", sink="extreme", regime="flat", tokens=1),
        _pair(V4, holes="all", tokens=1),
        _pair(V4, holes="none", sink="none", regime="peaked", window=1, main=64, tokens=2),
        _pair(V4, main=0, holes="none", tokens=1),
        _pair(V4, window=0, main=70, tokens=1),
        _pair(V4, regime="nankey", main=100, tokens=2),
    ]


def _pair(case: PairCase, **changes: object) -> PairCase:
    return replace(case, **changes)  # type: ignore[arg-type]


def pair_holes(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Holes appended to the main list."""
    for extra in (1, 70):
        pad = torch.full((inputs["q_thd"].shape[0], extra), -1, dtype=torch.int32)
        main = {"main_idx_tk": torch.cat([inputs["main_idx_tk"], pad], 1)}
        yield Variant(label=f"{extra} holes behind the main list", calls=(inputs | main,))


def pair_unlisted(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Bytes of main records that no list names change from 0xFF to zero."""
    caches, lists = inputs["caches"], inputs["main_idx_tk"].to(torch.int64)
    pages, page, width = inputs["main_pow"].shape
    unnamed = torch.ones(pages * page, dtype=torch.bool)
    unnamed[lists[(lists >= 0) & (lists < pages * page)]] = False
    flat = inputs["main_pow"].reshape(pages, -1).clone()
    if caches.layout is PageLayout.INTERLEAVED:
        flat.unflatten(1, (page, width))[unnamed.view(pages, page)] = 0
    else:
        data = page * (width - caches.main.scale_bytes)
        flat[:, :data].unflatten(1, (page, -1))[unnamed.view(pages, page)] = 0
        flat[:, data:].unflatten(1, (page, -1))[unnamed.view(pages, page)] = 0
    yield Variant(label="unlisted records zero", calls=(inputs | {"main_pow": flat.view(pages, page, width)},))


def pair_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The pages of the main cache in another order, its list renumbered."""
    moved = permute_pages({"kv_pod": inputs["main_pow"], "idx_tk": inputs["main_idx_tk"]}, context)
    for variant in moved:
        call = variant.calls[0]
        yield replace(variant, calls=(inputs | {"main_pow": call["kv_pod"], "main_idx_tk": call["idx_tk"]},))


def pair_as_prefill(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The prefill operation on the rows that the rings hold."""
    yield Variant(label="prefill", calls=(_with_rows(inputs),))


def golden_pair() -> list[PairCase]:
    """Both main formats."""
    small = PairCase(tokens=2, heads=2, channels=32, window=5, main=9, ring=5, page=4)
    return [small, _pair(small, main_format="fp8", dtype="fp32")]


def golden_pair_decode() -> list[PairCase]:
    """Both arrangements, bad entries, records of V4."""
    small = PairCase(tokens=2, heads=2, channels=32, window=5, main=9, ring=5, page=4)
    return [
        small,
        _pair(small, layout="sectioned", holes="bad", sink="extreme"),
        _pair(small, layout="sectioned", main_format="v4"),
    ]


OUTPUTS = (Output(name="out_thu", rule=ATTENTION), Output(name="lse_th", rule=LSE, dtype=torch.float32))
ROWS = {"q_thd": 0, "idx_tk": 0, "topk_length_t": 0}
OUT_ROWS = {"out_thu": 0, "lse_th": 0}


def finite(case: SparseCase) -> bool:
    """Relations on cases whose keys are finite where listed, and not on the longest lists: they make many calls."""
    return case.regime != "nankey" and case.tokens * case.topk <= 2500


def outside_specialised(case: SparseCase) -> str | None:
    """Why the kernel with specialised warps does not take a case."""
    fits = case.heads % 64 == 0 and case.dim in (512, 576) and case.value_dim == 512 and case.dtype == "bf16"
    return None if fits else "64·n heads of 512 or 576 channels in bf16 only"


def outside_flash_mla(case: SparseCase) -> str | None:
    """Why FlashMLA's legacy sparse prefill does not take a case."""
    fits = case.heads in (64, 128) and case.dim in (512, 576) and case.value_dim == 512 and case.dtype == "bf16"
    return None if fits and case.tokens else "64 or 128 heads of 512 or 576 channels in bf16 only"


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
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.sparse_attn:sparse_attn_triton"),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.sparse_attn:sparse_attn_tilelang",
            needs=("tilelang",),
            declines=outside_specialised,
        ),
        Sm90Candidate(
            name="flash-mla",
            function="deeptwin.optimized.sparse_attn:sparse_attn_flash_mla",
            needs=("flash_mla",),
            declines=outside_flash_mla,
        ),
    ),
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
            name="tilelang-specialised-h128-d576",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.sparse_attn_sm90:attend_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:sm90_h128_d576",
            expect={"sm90": Expect(mma="wgmma")},
        ),
        BuildCase(
            name="tilelang-h64-d512",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.sparse_attn:attend_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:sm100_h64_d512",
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
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.sparse_attn:sparse_attn_decode_triton"),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.sparse_attn:sparse_attn_decode_tilelang",
            needs=("tilelang",),
            declines=outside_specialised,
        ),
    ),
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
        _mutant("empty_batch_reads_a_key", "U21", "with all lengths zero every list is given one entry"),
    ),
    controls=(_control("right_decode"),),
    golden=golden_cases_decode,
)


def outside_specialised_pair(case: PairCase) -> str | None:
    """Why the kernel with specialised warps does not take a case."""
    fits = case.heads % 64 == 0 and case.channels == 512 and case.dtype == "bf16"
    return None if fits else "64·n heads of 512 channels with bf16 output only"


def outside_flash_mla_pair(case: PairCase) -> str | None:
    """Why FlashMLA's legacy sparse decode does not take a case."""
    fits = case.heads in (64, 128) and case.channels == 512 and case.dtype == "bf16" and case.tokens > 0
    v4 = case.main_format == "v4" and case.layout == "sectioned"
    return None if fits and v4 else "64 or 128 heads over V4's records in sectioned pages only"


def plain_pair(case: PairCase) -> bool:
    """Relations on small plain cases, and on those of the kernels for SM90 under `--full`."""
    small = case.channels <= 64 or case.tokens == 3
    return case.regime == "normal" and small and case.tokens > 0 and case.holes in ("some", "bad")


def few_pair(case: PairCase) -> bool:
    """Relations that make many calls."""
    return plain_pair(case) and case.tokens == 3 and case.window * case.main > 0 and case.sink == "normal"


PAIR_OUTPUTS = (Output(name="out_thd", rule=TWO_CACHES), Output(name="lse_th", rule=LSE, dtype=torch.float32))
PAIR_ROWS = {"q_thd": 0, "window_idx_tk": 0, "main_idx_tk": 0}
PAIR_OUT_ROWS = {"out_thd": 0, "lse_th": 0}

# 240 on sm90 with triton 3.8; a block of keys, decoded in registers, stands beside 128 registers of accumulator
_DECODED = "the accumulator fills half of the register file, decoded keys spill once a block"
DECODED = {
    "sm90": Expect(mma="wgmma", max_stack=256, reason=_DECODED),
    "sm100": Expect(mma="tcgen05", max_stack=32, reason=_DECODED),
}

TWO_PREFILL = Op(
    name="two_cache_attn",
    reference="deeptwin.reference.sparse_attn:two_cache_attn",
    outputs=PAIR_OUTPUTS,
    cases=cases_pair,
    draw=draw_pair,
    rows=PAIR_ROWS,
    out_rows=PAIR_OUT_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="query tokens", only=few_pair),
        Relation(name="chunk_invariant", axis="query chunks", hook=row_chunks, only=few_pair),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.sparse_attn:two_cache_attn_triton"),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.sparse_attn:two_cache_attn_tilelang",
            needs=("tilelang",),
            declines=outside_specialised_pair,
        ),
    ),
    builds=(
        BuildCase(
            name="h64-d512",
            kernel="deeptwin.kernels.triton_ops.two_cache:_attend_two_caches",
            launch="deeptwin.parity.builds.launches.sparse_attn:two_prefill_h64",
            expect=DECODED | MATRIX,
        ),
    ),
    mutants=(
        _pair_mutant("two_softmaxes", "U02", "each cache has a softmax of its own"),
        _pair_mutant("sink_in_each_cache", "U78", "the sink is counted once for each cache"),
        _pair_mutant("sink_scaled", "U78", "the sink is multiplied by the softmax scale"),
        _pair_mutant("duplicates_dropped", "U08", "an index that stands in both lists is attended once"),
        _pair_mutant("value_without_rotary_channels", "U30", "the rotary channels of the key are no value"),
        _pair_mutant("main_cache_skipped", "U28", "the compressed entries are never read"),
        _pair_mutant("last_main_entry_lost", "U01", "the last entry of the main list is lost"),
    ),
    controls=(_pair_control("right_prefill"),),
    golden=golden_pair,
)

TWO_DECODE = Op(
    name="two_cache_attn_decode",
    reference="deeptwin.reference.sparse_attn:two_cache_attn_decode",
    outputs=PAIR_OUTPUTS,
    cases=cases_pair_decode,
    draw=draw_pair_decode,
    rows=PAIR_ROWS,
    out_rows=PAIR_OUT_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="query tokens", hook=in_a_crowd, only=few_pair),
        Relation(name="run_to_run", axis="repeats", only=few_pair),
        Relation(name="page_permutation", axis="pages", hook=pair_pages, only=few_pair),
        Relation(
            name="decode_equals_prefill",
            axis="path",
            hook=pair_as_prefill,
            partner="two_cache_attn",
            only=plain_pair,
        ),
        Relation(name="masked_equals_absent", axis="list entries", hook=pair_holes, only=few_pair),
        Relation(name="causality", axis="unlisted records", hook=pair_unlisted, only=plain_pair),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.sparse_attn:two_cache_attn_decode_triton"),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.sparse_attn:two_cache_attn_decode_tilelang",
            needs=("tilelang",),
            declines=outside_specialised_pair,
        ),
        Sm90Candidate(
            name="flash-mla",
            function="deeptwin.optimized.sparse_attn:two_cache_attn_decode_flash_mla",
            needs=("flash_mla",),
            declines=outside_flash_mla_pair,
            unpromised={"batch_invariant": "its schedule splits lists by the batch"},
        ),
        Sm90Candidate(
            name="flash-mla-unsplit",
            function="deeptwin.optimized.sparse_attn:two_cache_attn_decode_flash_mla_unsplit",
            needs=("flash_mla",),
            declines=outside_flash_mla_pair,
        ),
    ),
    builds=(
        BuildCase(
            name="h64-d512",
            kernel="deeptwin.kernels.triton_ops.two_cache:_attend_two_caches",
            launch="deeptwin.parity.builds.launches.sparse_attn:two_decode_h64",
            expect=DECODED | MATRIX,
        ),
        BuildCase(
            name="tilelang-specialised-h64",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.two_cache_sm90:two_cache_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:sm90_two_decode",
            expect={"sm90": Expect(mma="wgmma", max_stack=16, reason="two addresses are put aside before the loop")},
        ),
        BuildCase(
            name="tilelang-specialised-h64-v4",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.two_cache_sm90:two_cache_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:sm90_two_decode_v4",
            expect={"sm90": Expect(mma="wgmma")},
        ),
        BuildCase(
            name="h64-d512-fp8-sectioned",
            kernel="deeptwin.kernels.triton_ops.two_cache:_attend_two_caches",
            launch="deeptwin.parity.builds.launches.sparse_attn:two_decode_h64_fp8",
            expect=DECODED | MATRIX,
        ),
        BuildCase(
            name="h64-d512-pages-of-one",  # a size of 1 is a constant of the build, which has no methods of a tensor
            kernel="deeptwin.kernels.triton_ops.two_cache:_attend_two_caches",
            launch="deeptwin.parity.builds.launches.sparse_attn:two_decode_pages_of_one",
            expect={"sm90": DECODED["sm90"]},
        ),
        BuildCase(
            name="tilelang-h64-d512",
            dsl="tilelang",
            kernel="deeptwin.kernels.ascend_ops.two_cache:two_cache_decode_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:ascend_two_decode",
            expect={"ascend950-simd": Expect(mma="cube")},
        ),
        BuildCase(
            name="tilelang-h64-d512-fp8-sectioned",
            dsl="tilelang",
            kernel="deeptwin.kernels.ascend_ops.two_cache:two_cache_decode_program",
            launch="deeptwin.parity.builds.launches.sparse_attn_tilelang:ascend_two_decode_fp8",
            expect={"ascend950-simd": Expect(mma="cube")},
        ),
    ),
    mutants=(
        _pair_mutant("arrangements_mixed_up", "U23", "interleaved pages are read as sectioned ones"),
        _pair_mutant("page_stride_ignored", "U22", "pages are read as if they were contiguous"),
        _pair_mutant("nibbles_swapped", "U57", "element 0 is taken from the high nibble"),
        _pair_mutant("signs_lost", "U60", "the sign bit of e2m1 codes is lost"),
        _pair_mutant("scale_byte_as_exponent", "U53", "an e4m3 scale byte is taken for a power of two"),
        _pair_mutant("one_scale_a_record", "U23", "the first scale of a record serves all its groups"),
        _pair_mutant("window_exponent_off_by_one", "U52", "UE8M0 exponents are biased by 126"),
        _pair_mutant("pad_of_scales_forgotten", "U23", "scales of V4's records are read seven bytes apart, not eight"),
        _pair_mutant("tail_dropped", "U30", "the rotary channels of V4's records are zero"),
        _pair_mutant("lists_swapped", "U29", "each list is looked up in the other cache"),
        _pair_mutant("main_bounded_by_the_window", "U08", "main entries beyond the size of the window are holes"),
        _pair_mutant("hole_reads_the_last_record", "U79", "index −1 wraps to the last record"),
        _pair_mutant("hole_times_nan", "U74", "a masked gather computes 0 · NaN"),
        _pair_mutant("empty_row_unwritten", "U75", "a row without keys is left unwritten"),
        _pair_mutant("first_lists_for_all", "U09", "every token uses the lists of the first"),
        _pair_mutant("weights_truncated", "R1", "softmax weights truncated to bf16"),
        _pair_mutant("split_depends_on_batch", "U73", "the split of the lists depends on the batch"),
    ),
    controls=(
        _pair_control("right_decode"),
        _pair_control("right_decode_block_128"),
        _pair_control("right_decode_backwards"),
        _pair_control("right_decode_lazy_maximum"),
    ),
    golden=golden_pair_decode,
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
        "records": "uint8 pages [p, o, w], interleaved or sectioned; FP8 528 B, FP4 288 B, V4 584 B at 512 channels",
        "two caches": "window list, then main list, one softmax, duplicates kept; weights bf16, out bf16 or fp32",
    },
    ops=(PREFILL, DECODE, TWO_PREFILL, TWO_DECODE),
    equivalents=(
        Equivalent(
            name="block size, block order, lazy maximum",
            reason="the scale at which weights are rounded is the kernel's own (free scale): honest arithmetic",
        ),
    ),
)
