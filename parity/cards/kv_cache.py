"""How caches are checked: the bytes that a store leaves, the values that a load returns, the fused store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference import cache_plan
from deeptwin.reference.config import (
    INDEX_FP4,
    KV_FP4,
    KV_FP8,
    CodeKind,
    FusedStore,
    PageLayout,
    RecordFormat,
    RecordTap,
    ScaleKind,
)
from deeptwin.reference.rope import rope_frequencies, rope_table

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..floats import poison_
from ..relations import CallFn, Context, Variant, batch_invariant, row_chunks, take
from ..rules import Bitwise, Judgement, Oracles, worst_at
from .quant import DIRECTED
from .rope import CONFIGS, FAR

_mutant, _control = variants("kv_cache")
U = 2.0**-20  # relative error of an honest fp32 norm before its first rounding, with room
FORMATS = {fmt.name: fmt for fmt in (KV_FP8, KV_FP4, INDEX_FP4)}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class CacheCase:
    """`tokens` rows and `holes` of them without an entry, a cache of `pages` × `page` entries `gap` bytes apart."""

    tokens: int
    pages: int
    page: int
    fmt: str = "kv_fp8"
    layout: str = "interleaved"
    holes: int = 1
    gap: int = 32
    index: str = "int32"
    dtype: str = "bf16"
    tap: str = "rope"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-p{self.pages}x{self.page}-{self.fmt}-{self.layout}-holes{self.holes}-gap{self.gap}"
        return f"{shape}-{self.index}-{self.dtype}-{self.tap}-{self.regime}"

    @property
    def format(self) -> RecordFormat:
        return FORMATS[self.fmt]


# where a record stands, once more


def places(slots: Tensor, num_slots: int, fmt: RecordFormat, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Page [y, 1] and byte in the page [y, w] of every byte of the records in these slots."""
    page, offset = slots // num_slots, slots % num_slots
    scales = fmt.record_bytes - fmt.data_bytes
    if layout is PageLayout.INTERLEAVED:
        return page[:, None], offset[:, None] * fmt.record_bytes + torch.arange(fmt.record_bytes)
    data = offset[:, None] * fmt.data_bytes + torch.arange(fmt.data_bytes)
    return page[:, None], torch.cat(
        [data, num_slots * fmt.data_bytes + offset[:, None] * scales + torch.arange(scales)], 1
    )


def records(cache: Tensor, slots: Tensor, layout: PageLayout) -> Tensor:
    """The records of slots that lie in the cache, one to a row."""
    fmt = next(f for f in FORMATS.values() if f.record_bytes == cache.shape[2])
    page, byte = places(slots.to(torch.int64), cache.shape[1], fmt, layout)
    return cache.reshape(cache.shape[0], -1)[page, byte]


def inside(inputs: Inputs, cache: str) -> Tensor:
    """Which rows name an entry of the cache."""
    slots = inputs["slots_t"]
    return (slots >= 0) & (slots < inputs[cache].shape[0] * inputs[cache].shape[1])


def layout_of(inputs: Inputs) -> PageLayout:
    """The layout argument, which the fused store has in its plan."""
    return inputs["store"].layout if "store" in inputs else inputs["layout"]


# inputs


def _roomy(case: CacheCase) -> Tensor:
    """A cache whose pages lie `gap` bytes apart; every byte is 0xFF: NaN as a code and as a scale."""
    size = case.page * case.format.record_bytes
    block = draws.poisoned(case.pages, size + case.gap, dtype=torch.uint8)
    return block[:, :size].unflatten(1, (case.page, case.format.record_bytes))


def _slots(case: CacheCase, rng: np.random.Generator, slots: np.ndarray) -> Tensor:
    """Some of the slots replaced by what names no entry."""
    end = case.pages * case.page
    bad = [-1, end, -2, end + 7, -(2**31), 2**31 - 1]
    where = rng.permutation(slots.size)[: case.holes]
    slots = slots.astype(np.int64)
    slots[where] = bad[: where.size]
    return torch.from_numpy(slots).to(getattr(torch, case.index))


def _rows(case: CacheCase, rng: np.random.Generator) -> Tensor:
    fmt, dtype = case.format, draws.DTYPES[case.dtype]
    if case.regime not in DIRECTED:
        return draws.rows(rng, case.tokens, fmt.channels, dtype=dtype, regime=case.regime)
    groups = DIRECTED[case.regime](fmt.quant, dtype, rng)
    per_row = fmt.channels // fmt.quant.group
    chosen = groups[torch.arange(case.tokens * per_row) % len(groups)]
    return chosen.reshape(case.tokens, fmt.channels).to(dtype)


def draw_store(case: CacheCase, rng: np.random.Generator) -> Inputs:
    """A cache of random bytes, distinct slots in random order, holes among them whose rows are NaN."""
    cache = _roomy(case)
    cache.copy_(torch.from_numpy(rng.integers(0, 256, tuple(cache.shape), dtype=np.uint8)))
    x = _rows(case, rng)
    slots = _slots(case, rng, draws.distinct(rng, case.pages * case.page, case.tokens))
    inputs: Inputs = {"cache_pow_": cache, "x_td": x, "slots_t": slots, "layout": PageLayout(case.layout)}
    x[~inside(inputs, "cache_pow_")] = torch.nan
    return inputs | {"x_td": draws.strided(x, pad=8)}


def draw_load(case: CacheCase, rng: np.random.Generator) -> Inputs:
    """Entries of random codes and scales, repeated and out of order; entries that no slot names are NaN."""
    fmt, layout, cache = case.format, PageLayout(case.layout), _roomy(case)
    # page 0 stays poisoned where there is another: it is what a hole must not read
    low = case.page if case.pages > 1 else 0
    filled = low + draws.distinct(rng, case.pages * case.page - low, max(1, min(case.tokens, 24)))
    slots = filled[rng.integers(0, filled.size, case.tokens)] if case.tokens else filled[:0]
    page, byte = places(torch.from_numpy(np.sort(filled)), case.page, fmt, layout)
    cache.view(case.pages, -1)[page, byte] = _codes(case, filled.size, rng)
    return {
        "cache_pow": cache,
        "slots_t": _slots(case, rng, slots),
        "layout": layout,
        "dtype": draws.DTYPES[case.dtype],
    }


def _codes(case: CacheCase, count: int, rng: np.random.Generator) -> Tensor:
    """Records of every code but NaN and of scales over a wide range (extreme: all of UE8M0)."""
    fmt = case.format
    data = rng.integers(0, 256, (count, fmt.data_bytes), dtype=np.uint8)
    data.reshape(-1)[:256] = np.arange(256)[: data.size]
    if fmt.quant.code is CodeKind.E4M3:
        data = np.where(data & 0x7F == 0x7F, data - 1, data)
    low, high = (117, 137) if case.regime != "extreme" else (0, 254)
    if fmt.quant.scale is ScaleKind.E4M3:
        low, high = 1, 126
    scales = rng.integers(low, high, (count, fmt.record_bytes - fmt.data_bytes), dtype=np.uint8, endpoint=True)
    scales.reshape(-1)[:2] = [low, high]
    return torch.from_numpy(np.concatenate([data, scales], 1).astype(np.uint8))


def draw_fused(case: CacheCase, rng: np.random.Generator) -> Inputs:
    """Rows of a regime at positions near and far, weights of both signs, a table of the released frequencies."""
    inputs = draw_store(replace(case, holes=min(case.holes, case.tokens), regime="normal"), rng)
    x = draws.rows(rng, case.tokens, case.format.channels, dtype=draws.DTYPES[case.dtype], regime=case.regime)
    weight = draws.normal(rng, case.format.channels, dtype=torch.bfloat16, scale=0.5, mean=1.0)
    weight[: case.format.channels // 64] *= 30
    weight[-2:] = torch.tensor([0.75, -1.9921875])
    places_in_table = torch.tensor(FAR)
    table = rope_table(places_in_table, rope_frequencies(CONFIGS["v4_compressed"]))
    return {
        "cache_pow_": inputs["cache_pow_"],
        "x_td": draws.strided(x, pad=8),
        "weight_d": weight,
        "table_sr": table,
        "positions_t": torch.from_numpy(rng.integers(0, len(FAR), case.tokens)).to(getattr(torch, case.index)),
        "slots_t": inputs["slots_t"],
        "store": FusedStore(eps=1e-20, layout=PageLayout(case.layout), tap=RecordTap(case.tap)),
    }


# cases


def cases_store(full: bool) -> list[CacheCase]:
    """Formats × layouts, page sizes that break coincidences, regimes, directed groups, no row, no hole, all holes."""
    base = CacheCase(tokens=6, pages=3, page=5, holes=2)
    found = [replace(base, fmt=f, layout=lay) for f, lay in product(FORMATS, ("interleaved", "sectioned"))]
    found += [
        replace(base, fmt=f, regime=r) for f, r in zip(("kv_fp4", "kv_fp8", "index_fp4"), REGIMES[1:], strict=True)
    ]
    found += [replace(base, fmt=f, regime="small", tokens=3) for f in FORMATS]
    found += [replace(base, fmt=f, regime="midpoints", tokens=4, holes=0) for f in FORMATS]
    found += [
        replace(base, fmt="kv_fp4", regime="reciprocal_pairs", tokens=1, holes=0),
        replace(base, regime="powers", tokens=15, holes=0, layout="sectioned"),
        replace(base, fmt="index_fp4", layout="sectioned", page=64, tokens=9, gap=109696),  # a page of the shared block
        replace(base, fmt="kv_fp4", page=64, pages=2, gap=95616),
        replace(base, page=134, pages=2, tokens=7, index="int64"),  # a ring
        replace(base, page=1, pages=7, layout="sectioned"),
        replace(base, page=133, pages=1, fmt="index_fp4", layout="sectioned", gap=0),
        replace(base, tokens=0, holes=0),
        replace(base, tokens=1, pages=1, page=1, holes=0, gap=0),
        replace(base, holes=6),
        replace(base, dtype="fp32", fmt="kv_fp4", index="int64"),
    ]
    if full:
        sizes = (1, 2, 32, 53, 64, 128, 133)
        found += [
            replace(base, fmt=f, layout=lay, page=p, tokens=min(3 * p, 6))
            for f, lay, p in product(FORMATS, ("interleaved", "sectioned"), sizes)
        ]
        regimes = (*REGIMES, "zeros", "ties", "tiny", "cancel")
        found += [replace(base, fmt=f, regime=r, dtype=d) for f, r, d in product(FORMATS, regimes, ("bf16", "fp32"))]
        found += [replace(base, fmt=f, regime=r, holes=0) for f, r in product(FORMATS, DIRECTED)]
    return _unique(found)


def cases_load(full: bool) -> list[CacheCase]:
    """Formats × layouts, page sizes, storage dtypes, the whole range of scales, no row, all holes."""
    base = CacheCase(tokens=7, pages=3, page=5, holes=2)
    found = [replace(base, fmt=f, layout=lay) for f, lay in product(FORMATS, ("interleaved", "sectioned"))]
    found += [replace(base, fmt=f, regime="extreme", dtype="fp32") for f in FORMATS]
    found += [
        replace(base, regime="extreme"),
        replace(base, fmt="index_fp4", layout="sectioned", page=64, tokens=9, gap=109696),
        replace(base, fmt="kv_fp4", layout="sectioned", page=133, pages=2),
        replace(base, page=134, pages=2, tokens=9, index="int64"),
        replace(base, page=1, pages=9, layout="sectioned"),
        replace(base, tokens=0, holes=0),
        replace(base, tokens=1, pages=1, page=1, holes=0, gap=0),
        replace(base, tokens=6, holes=6),
        replace(base, dtype="fp16", fmt="kv_fp4"),
    ]
    if full:
        sizes = (1, 2, 32, 53, 64, 128, 133)
        found += [
            replace(base, fmt=f, layout=lay, page=p)
            for f, lay, p in product(FORMATS, ("interleaved", "sectioned"), sizes)
        ]
    return _unique(found)


def cases_fused(full: bool) -> list[CacheCase]:
    """Formats × taps, regimes, tiny rows that eps decides, no row, all holes."""
    base = CacheCase(tokens=6, pages=3, page=5, holes=2)
    pairs = (("kv_fp8", "interleaved"), ("kv_fp4", "interleaved"), ("index_fp4", "sectioned"))
    found = [replace(base, fmt=f, layout=lay, tap=t.value) for (f, lay), t in product(pairs, RecordTap)]
    found += [
        replace(base, regime=r, tokens=12, tap=t)
        for r, t in zip(REGIMES, ("rope", "rope", "norm", "rope"), strict=True)
    ]
    found += [replace(base, fmt="kv_fp4", regime=r) for r in REGIMES[1:]]
    found += [replace(base, regime=r, tap="norm", holes=0) for r in ("tiny", "zeros", "cancel")]
    found += [
        replace(base, layout="sectioned", page=134, pages=2, index="int64", tap="cast_back"),
        replace(base, fmt="kv_fp4", layout="sectioned", page=64, gap=95616),
        replace(base, tokens=0, holes=0),
        replace(base, tokens=3, holes=3, tap="cast_back"),
        replace(base, dtype="fp32", tap="norm"),
    ]
    if full:
        found += [
            replace(base, fmt=f, layout=lay, tap=t, regime=r)
            for (f, lay), t, r in product(pairs, ("rope", "cast_back"), (*REGIMES, "tiny", "constant", "ties"))
        ]
    return _unique(found)


def _unique(found: list[CacheCase]) -> list[CacheCase]:
    return list({case.id: case for case in found}.values())


# what an honest fused store may leave, from the marks of CONTRACT


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.bfloat16).to(torch.float64)


def norm_ends(oracles: Oracles) -> tuple[Tensor, Tensor]:
    """The lowest and highest normalised row when the value before its rounding is off by a relative U."""
    first = next(x for name, x in oracles.marks if name == "bf16")
    ends = (_bf16(first * (1 - U)), _bf16(first * (1 + U)))
    return torch.minimum(*ends), torch.maximum(*ends)


def turned_ends(oracles: Oracles) -> tuple[Tensor, Tensor]:
    """The lowest and highest rotated row: corners of the norm's interval, and the error of an fp32 rotation."""
    low, high = norm_ends(oracles)
    table = oracles.arguments["table_sr"].to(torch.float64)[oracles.arguments["positions_t"].to(torch.int64)]
    half = table.shape[1] // 2
    cos, sin = table[:, :half], table[:, half:]
    start = low.shape[1] - 2 * half
    lows, highs = low.clone(), high.clone()
    evens, odds = [x[:, start::2] for x in (low, high)], [x[:, start + 1 :: 2] for x in (low, high)]
    for place, (a, b) in ((0, (cos, -sin)), (1, (sin, cos))):
        one, two = [u * a for u in evens], [v * b for v in odds]
        room = 2.0**-21 * torch.maximum(one[0].abs() + two[0].abs(), one[1].abs() + two[1].abs())
        lows[:, start + place :: 2] = _bf16(torch.minimum(*one) + torch.minimum(*two) - room)
        highs[:, start + place :: 2] = _bf16(torch.maximum(*one) + torch.maximum(*two) + room)
    return lows, highs


def _largest(low: Tensor, high: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest amax of every group."""
    low, high = low.unflatten(-1, (-1, group)), high.unflatten(-1, (-1, group))
    least = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs())).amax(-1)
    return least, torch.maximum(low.abs(), high.abs()).amax(-1)


def scale_byte(amax: Tensor, fmt: RecordFormat) -> Tensor:
    """The stored scale of a group with this amax; bytes are in value order."""
    floored = amax.clamp(min=fmt.quant.amax_floor).to(torch.float32).to(torch.float64)
    scale = (floored / fmt.quant.max_value).to(torch.float32)
    if fmt.quant.scale is ScaleKind.E4M3:
        return scale.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int64)
    mantissa, exponent = torch.frexp(scale)
    return (exponent - (mantissa == 0.5).to(torch.int32)).to(torch.int64) + 127


def scale_value(byte: Tensor, fmt: RecordFormat) -> Tensor:
    """The fp64 value of a stored scale."""
    if fmt.quant.scale is ScaleKind.E4M3:
        return byte.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    return torch.exp2(byte.to(torch.float64) - 127)


def element(x: Tensor, fmt: RecordFormat) -> Tensor:
    """The element value nearest to x, ties to the even code."""
    x = x.to(torch.float32)
    if fmt.quant.code is CodeKind.E4M3:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float64)
    size = x.abs().clamp(max=6.0).to(torch.float64)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x.to(torch.float64))


def code_values(data: Tensor, fmt: RecordFormat) -> Tensor:
    """The element values of the code bytes of records."""
    if fmt.quant.code is CodeKind.E4M3:
        return data.contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    nibbles = torch.stack([data & 15, data >> 4], -1).flatten(-2).to(torch.int64)
    return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64)[nibbles]


@dataclass(frozen=True, kw_only=True)
class StoredRecords:
    """The bytes of a cache after a fused store: records of lawful rows in the named slots, the old bytes elsewhere.

    A row is lawful inside `turned_ends`; its scale byte is one that such a row has, its codes are those of such a row
    under the scale that was stored. Measured on all default cases, 50 seeds of two torch orders of summation and 8 of
    the Triton kernel: of 6.7 million stored bytes and 8.0 million elements of taps none is unlawful; 33 elements of the
    taps and no byte differ from CONTRACT at all.
    """

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Compare every byte with what CONTRACT leaves."""
        arguments = oracles.arguments
        fmt = next(f for f in FORMATS.values() if f.record_bytes == got.shape[2])
        rows = inside(arguments, "cache_pow_")
        slots, layout = arguments["slots_t"][rows].to(torch.int64), layout_of(arguments)
        wrong = got != oracles.contract
        differ = int(wrong.sum())
        page, byte = places(slots, max(got.shape[1], 1), fmt, layout)
        flat = wrong.reshape(got.shape[0], -1)
        flat[page, byte] = ~self._lawful(records(got, slots, layout), rows, fmt, oracles)
        count = int(flat.sum())
        where = tuple(int(i) for i in flat.reshape(got.shape).nonzero()[0]) if count else ()
        return Judgement(
            ok=count == 0,
            used=float("inf") if count else 0.0,
            message=f"{count} of {got.numel()} bytes are unlawful{f', first at {where}' if count else ''} "
            f"({differ} differ in all)",
            metrics={"differ": float(differ), "outside": float(count), "elements": float(got.numel())},
        )

    def _lawful(self, stored: Tensor, rows: Tensor, fmt: RecordFormat, oracles: Oracles) -> Tensor:
        """Which bytes of the stored records an honest store may have left."""
        low, high = (x[rows] for x in turned_ends(oracles))
        sf = stored[:, fmt.data_bytes :].to(torch.int64)
        least, most = (scale_byte(x, fmt) for x in _largest(low, high, fmt.quant.group))
        scale = scale_value(sf, fmt).repeat_interleave(fmt.quant.group, 1)
        lowest, highest = element(low / scale, fmt), element(high / scale, fmt)
        value = code_values(stored[:, : fmt.data_bytes], fmt)
        # a zero keeps the sign of its row, where that has one
        signed = (lowest.signbit() == highest.signbit()) & (value.signbit() != lowest.signbit())
        fits = (value >= lowest) & (value <= highest) & ~signed
        if fmt.quant.code is CodeKind.E2M1:
            fits = fits.unflatten(-1, (-1, 2)).all(-1)
        return torch.cat([fits, (sf >= least) & (sf <= most)], 1)


@dataclass(frozen=True, kw_only=True)
class HonestTap:
    """Rows handed out beside the bytes: every element between the ends of an honest evaluation."""

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Compare every element with its interval, whose ends are values of bf16."""
        low, high = self._ends(oracles)
        wide, expected = got.to(torch.float64), oracles.contract.to(got.dtype)
        # a NaN lies in no interval
        outside = ~((wide >= low) & (wide <= high))
        differ, count = int((got != expected).sum()), int(outside.sum())
        return Judgement(
            ok=count == 0,
            used=float("inf") if count else 0.0,
            message=f"{count} of {got.numel()} elements are unlawful ({differ} differ in all)",
            worst=worst_at(got, oracles.contract, outside.to(torch.float64)) if count else None,
            metrics={"differ": float(differ), "outside": float(count), "elements": float(got.numel())},
        )

    def _ends(self, oracles: Oracles) -> tuple[Tensor, Tensor]:
        tap, fmt = oracles.arguments["store"].tap, _format(oracles.arguments)
        low, high = norm_ends(oracles) if tap is RecordTap.NORM else turned_ends(oracles)
        if tap is RecordTap.NONE:
            return low[:, :0], high[:, :0]
        if tap is RecordTap.CAST_BACK:
            bytes_of_scales = [scale_byte(x, fmt) for x in _largest(low, high, fmt.quant.group)]
            scales = [scale_value(b, fmt).repeat_interleave(fmt.quant.group, 1) for b in bytes_of_scales]
            low, high = (
                torch.minimum(*(element(low / s, fmt) * s for s in scales)),
                torch.maximum(*(element(high / s, fmt) * s for s in scales)),
            )
        return low, high


def _format(arguments: Mapping[str, Any]) -> RecordFormat:
    return next(f for f in FORMATS.values() if f.record_bytes == arguments["cache_pow_"].shape[2])


# relation hooks


def named_bytes(inputs: Inputs) -> Tensor:
    """Bytes of the records that the slots name."""
    cache = inputs["cache_pow_"]
    allowed = torch.zeros(cache.shape, dtype=torch.bool)
    slots = inputs["slots_t"][inside(inputs, "cache_pow_")].to(torch.int64)
    page, byte = places(slots, max(cache.shape[1], 1), _format(inputs), layout_of(inputs))
    allowed.view(cache.shape[0], -1)[page, byte] = True
    return allowed


def _records_of(inputs: Inputs, chosen: list[int]) -> Callable[[Outputs], Outputs]:
    """Picks the records and other rows of the chosen rows, from outputs whose own rows are `rows`."""
    kept = [i for i in chosen if bool(inside(inputs, "cache_pow_")[i])]
    slots = inputs["slots_t"][kept]

    def pick(outputs: Outputs, rows: list[int] = chosen) -> Outputs:
        found = {"cache_pow_": records(outputs["cache_pow_"], slots, layout_of(inputs))}
        if "tap_td" in outputs:
            found["tap_td"] = outputs["tap_td"][rows]
        return found

    return pick


def rows_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A row leaves the same record alone, in a part of the batch, in another order, and beside huge rows."""
    n = inputs["x_td"].shape[0]
    if not n:
        yield Variant(label="repeat of zero rows", calls=(inputs,))
        return
    parts = [[i] for i in range(n if context.full else min(n, 2))]
    parts += [list(range(0, n, 2))]
    for part in parts:
        pick = _records_of(inputs, part)
        places_there = list(range(len(part)))
        yield Variant(
            label=f"rows {part} alone",
            calls=(take(inputs, context.op, part),),
            join=lambda results, p=pick, r=places_there: p(results[0], r),  # type: ignore[misc]
            expect=pick,
        )
    order = [int(i) for i in context.rng.permutation(n)]
    back = [order.index(i) for i in range(n)]

    def sorted_back(results: list[Outputs]) -> Outputs:
        return {name: x if name == "cache_pow_" else x[back] for name, x in results[0].items()}

    yield Variant(label="rows in another order", calls=(take(inputs, context.op, order),), join=sorted_back)
    keep = int(context.rng.integers(n))
    crowd = inputs["x_td"].clone()
    crowd[torch.arange(n) != keep] = 2.0**60
    pick = _records_of(inputs, [keep])
    yield Variant(
        label=f"row {keep} beside huge rows",
        calls=(inputs | {"x_td": crowd},),
        join=lambda results: pick(results[0]),
        expect=pick,
    )


def store_moved_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Pages in another order and closer together: the same records in them."""
    cache, slots = inputs["cache_pow_"], inputs["slots_t"].to(torch.int64)
    pages, size = cache.shape[0], cache.shape[1]
    named = inside(inputs, "cache_pow_")
    order = torch.from_numpy(context.rng.permutation(pages))
    moved = torch.argsort(order)
    safe = torch.where(named, slots, 0)
    renumbered = torch.where(named, moved[safe // size] * size + safe % size, slots)
    there = inputs | {"cache_pow_": cache[order].contiguous(), "slots_t": renumbered.to(inputs["slots_t"].dtype)}

    def back(results: list[Outputs]) -> Outputs:
        return {name: x[moved] if name == "cache_pow_" else x for name, x in results[0].items()}

    yield Variant(label="pages in another order, without gaps", calls=(there,), join=back)


def load_moved_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Pages in another order, entries in the other layout, unnamed entries zero: the same values."""
    cache, slots, layout = inputs["cache_pow"], inputs["slots_t"].to(torch.int64), inputs["layout"]
    pages, size = cache.shape[0], cache.shape[1]
    named = inside(inputs, "cache_pow")
    order = torch.from_numpy(context.rng.permutation(pages))
    safe = torch.where(named, slots, 0)
    renumbered = torch.where(named, torch.argsort(order)[safe // size] * size + safe % size, slots)
    there = inputs | {"cache_pow": cache[order].contiguous(), "slots_t": renumbered.to(inputs["slots_t"].dtype)}
    yield Variant(label="pages in another order, without gaps", calls=(there,))
    fmt = next(f for f in FORMATS.values() if f.record_bytes == cache.shape[2])
    other = next(x for x in PageLayout if x is not layout)
    converted = poison_(torch.empty(pages, size * cache.shape[2], dtype=torch.uint8))
    every = torch.arange(pages * size)
    page, byte = places(every, size, fmt, other)
    converted[page, byte] = records(cache, every, layout)
    yield Variant(
        label=f"layout {other.value}",
        calls=(inputs | {"cache_pow": converted.view(cache.shape), "layout": other},),
    )
    unnamed = torch.ones(pages * size, dtype=torch.bool)
    unnamed[slots[named]] = False
    blank = cache.reshape(pages, -1).clone()
    page, byte = places(every[unnamed], size, fmt, layout)
    blank[page, byte] = 0
    yield Variant(label="unnamed entries zero", calls=(inputs | {"cache_pow": blank.view(cache.shape)},))


def loaded_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A row reads the same alone, in any batch, in chunks."""
    yield from batch_invariant(inputs, context)
    yield from row_chunks(inputs, context)


def reads_back(inputs: Inputs, outputs: Outputs, load: CallFn | None) -> tuple[Outputs, Outputs]:
    """What a load returns of the stored slots is the quantiser's round trip of the rows, zeros where no slot is."""
    from deeptwin.reference.quant import fake_quantize

    named = inside(inputs, "cache_pow_")
    expected = torch.zeros(inputs["x_td"].shape, dtype=torch.bfloat16)
    rows = inputs["x_td"][named]
    expected[named] = fake_quantize(rows, fmt=_format(inputs).quant).to(torch.bfloat16)
    assert load is not None
    arguments = {"cache_pow": outputs["cache_pow_"], "slots_t": inputs["slots_t"], "layout": layout_of(inputs)}
    return load({**arguments, "dtype": torch.bfloat16}), {"x_td": expected}


def tap_is_stored(inputs: Inputs, outputs: Outputs, load: CallFn | None) -> tuple[Outputs, Outputs]:
    """The stored records are those of the rotated rows handed out, or read back as the values handed out."""
    from deeptwin.reference.kv_cache import pack_records

    named, tap = inside(inputs, "cache_pow_"), inputs["store"].tap
    stored = records(outputs["cache_pow_"], inputs["slots_t"][named], layout_of(inputs))
    if tap is RecordTap.ROPE:
        return {"records": stored}, {"records": pack_records(outputs["tap_td"][named], fmt=_format(inputs))}
    assert load is not None
    arguments = {"cache_pow": outputs["cache_pow_"], "slots_t": inputs["slots_t"][named], "layout": layout_of(inputs)}
    values = load({**arguments, "dtype": torch.bfloat16})["x_td"]
    return {"x_td": values}, {"x_td": outputs["tap_td"][named]}


def lean(case: Any) -> bool:
    """Relations make many calls: they run where nothing but format and layout changes what they say."""
    plain = case.regime == "file" or (case.regime == "normal" and case.page == 5 and case.dtype == "bf16")
    return plain and getattr(case, "tap", "rope") == "rope" and getattr(case, "holes", 2) == 2


def taps_a_row(case: Any) -> bool:
    """Whether the tap can be compared with what was stored."""
    return case.regime == "normal" and case.page == 5 and case.holes == 2 and case.tap in ("rope", "cast_back")


# golden vectors


def golden_store() -> list[CacheCase]:
    """Both layouts of every format."""
    base = CacheCase(tokens=3, pages=2, page=2, holes=1)
    found = [replace(base, fmt=f, layout=lay) for f, lay in product(FORMATS, ("interleaved", "sectioned"))]
    return [*found, *(replace(base, fmt=f, regime="small") for f in FORMATS)]


def golden_load() -> list[CacheCase]:
    """Every byte of every format."""
    return [CacheCase(tokens=3, pages=2, page=2, holes=1, fmt=f, layout="sectioned") for f in FORMATS]


def golden_fused() -> list[CacheCase]:
    """One case of every format, with the tap that its users take."""
    base = CacheCase(tokens=2, pages=1, page=2, holes=0)
    return [
        replace(base, tap="cast_back"),
        replace(base, fmt="kv_fp4", tap="norm"),
        replace(base, fmt="index_fp4", layout="sectioned", tap="none"),
    ]


def facts() -> dict[str, str]:
    """Sizes of V4.1-Flash, from its layer map and the record formats."""
    found: dict[str, str] = {}
    for main in (KV_FP4, KV_FP8):
        plan = cache_plan.v41_flash_caches(main=main)
        entries = sum(1 / plan.ratios[layer] for layer in plan.owners)
        entry = main.record_bytes + plan.index.record_bytes
        found[f"{main.name} bytes per token"] = f"{cache_plan.bytes_per_token(plan)} = {entries} entries × {entry}"
        used = sum(piece.size for piece in cache_plan.page_pieces(plan))
        found[f"{main.name} page"] = f"{cache_plan.page_bytes(plan)} bytes for {plan.page_tokens} tokens, {used} used"
    plan = cache_plan.v41_flash_caches()
    rings = [piece for piece in cache_plan.state_pieces(plan) if piece.name == "ring"]
    found["sliding ring"] = f"{rings[0].size} bytes = {plan.ring} × {plan.sliding.record_bytes}, {len(rings)} of them"
    kept = sum(piece.size for piece in rings[: plan.encoder_layers])
    found["state of a sequence"] = f"{cache_plan.state_bytes(plan)} bytes, {kept} of them outlive a request"
    return found


STORE_MUTANTS = (
    _mutant(
        "store_layout_ignored", "U23", "values then scales where entry after entry is asked, and the other way round"
    ),
    _mutant("store_always_interleaved", "U22", "the page is written entry by entry whatever the layout"),
    _mutant(
        "store_sections_of_64", "U29", "the scales of a sectioned page start after 64 entries whatever the page holds"
    ),
    _mutant("store_ignores_page_stride", "U22", "pages are written as if they followed one another"),
    _mutant("store_pages_of_twice_the_size", "U29", "slots are split by pages of twice their entries"),
    _mutant("store_page_and_offset_exchanged", "U23", "page and offset of a slot are exchanged"),
    _mutant("store_minus_one_wraps", "U79", "slot −1 wraps to the last entry of the last page"),
    _mutant("store_slot_beyond_clamped", "U79", "a slot beyond the cache goes to its last entry"),
    _mutant("store_slot_beyond_wraps", "U79", "a slot beyond the cache wraps to the first pages"),
    _mutant("store_stops_at_a_hole", "U28", "rows after a slot of −1 are not written"),
    _mutant("store_sectioned_never_written", "U28", "the branch of the sectioned layout returns before the store"),
    _mutant("store_last_code_lost", "U26", "the last code of every record is not written"),
    _mutant("store_spills_into_the_next", "U26", "a record is written one byte too wide"),
    _mutant("store_scale_bytes_reversed", "U54", "the four scale bytes of a word stand in the opposite order"),
    _mutant("store_scales_of_first_row", "U58", "all rows use the scales of the first"),
    _mutant("store_scale_of_a_huge_neighbour", "U76", "rows of the batch share their largest amax"),
    _mutant("store_floor_on_scale", "U94", "the floor is applied to the scale instead of to amax"),
    _mutant("store_no_floor", "U59", "an all-zero group divides 0 by 0"),
    _mutant("store_high_nibble_first", "U57", "the even channel stands in the high nibble"),
    _mutant(
        "store_quantised_twice", "U53", "rows are rounded to their quantised values and quantised again: other bytes"
    ),
    _mutant(
        "store_index_in_two_stages", "U94", "index rows are quantised, then again with a floor of 1e-4 on the scale"
    ),
    _mutant("store_multiplies_by_reciprocal", "U60", "codes from x · (1 / s)"),
    _mutant("store_codes_truncated", "U60", "codes are truncated"),
    _mutant("store_rows_backwards", "U26", "rows and slots are paired in opposite order"),
    _mutant("store_nan_rows_written_to_slot_0", "U74", "rows without a slot are written to entry 0"),
    _mutant("store_not_deterministic", "U10", "every second launch flips a bit of the first record"),
)
LOAD_MUTANTS = (
    _mutant(
        "load_layout_ignored",
        "U23",
        "values then scales are read where entry after entry is asked, and the other way round",
    ),
    _mutant("load_always_interleaved", "U22", "the page is read entry by entry whatever the layout"),
    _mutant("load_ignores_page_stride", "U22", "pages are read as if they followed one another"),
    _mutant("load_pages_of_twice_the_size", "U29", "slots are split by pages of twice their entries"),
    _mutant("load_hole_reads_entry_0", "U74", "−1 reads entry 0 times zero: 0 · NaN"),
    _mutant("load_hole_unwritten", "U75", "rows of −1 are left unwritten"),
    _mutant("load_hole_wraps", "U79", "−1 reads the last entry"),
    _mutant("load_upper_bound_unchecked", "U08", "a slot beyond the cache reads its last entry"),
    _mutant("load_first_slot_for_all", "U09", "every row reads the first slot"),
    _mutant("load_scale_of_next_entry", "U23", "codes are read with the scales of the entry before"),
    _mutant("load_scale_bytes_reversed", "U54", "the four scale bytes of a word are read in the opposite order"),
    _mutant("load_high_nibble_first", "U57", "the even channel is read from the high nibble"),
    _mutant("load_truncated", "R2", "the product is truncated to bf16"),
    _mutant("load_subnormals_as_zero", "U60", "subnormal e4m3 codes and scales are read as zero"),
    _mutant("load_scale_byte_0_as_zero", "U55", "the scale byte 0 is read as zero instead of 2^-127"),
    _mutant("load_not_deterministic", "U10", "every second launch differs in the last bit of one element"),
)
FUSED_MUTANTS = (
    _mutant("fused_norm_missing", "U39", "the row is not normalised"),
    _mutant("fused_eps_1e_6", "U39", "eps is 1e-6 instead of 1e-20"),
    _mutant("fused_norm_without_the_tail", "U39", "the mean square leaves out the rotary channels"),
    _mutant("fused_weight_before_rounding_twice", "U86", "the row is rounded to bf16 before its weight too"),
    _mutant("fused_norm_unrounded", "U86", "RoPE takes the norm before its rounding to bf16"),
    _mutant("fused_rope_unrounded", "U86", "the quantiser takes fp32 registers, not the rotated bf16 row"),
    _mutant("fused_norm_truncated", "R2", "the norm is truncated to bf16"),
    _mutant("fused_statistics_of_first_row", "U75", "every row uses the statistics of the first"),
    _mutant("fused_statistics_over_batch", "U76", "the mean square is taken over the batch"),
    _mutant("fused_half_split", "U12", "channels i and i + 32 are rotated together, not 2i and 2i + 1"),
    _mutant("fused_first_channels_turned", "U30", "the first channels are rotated, not the last"),
    _mutant("fused_not_turned", "U30", "no channel is rotated"),
    _mutant("fused_turned_backwards", "U30", "the rotation has the opposite sense"),
    _mutant("fused_position_of_first_row", "U37", "every row has the position of the first"),
    _mutant("fused_next_position", "U61", "rows are rotated one position on"),
    _mutant(
        "fused_table_of_the_device",
        "U95",
        "table entries are off by 2.4e-4, as those of a table built on the accelerator",
    ),
    _mutant("fused_tail_not_quantised", "U86", "the rotary tail is handed back unquantised"),
    _mutant("fused_tail_without_scale", "U53", "the groups of the rotary tail have the scale of the group before them"),
    _mutant("fused_tap_before_norm", "U93", "the tap is the row before the norm"),
    _mutant(
        "fused_tap_after_rope", "U93", "the tap of the norm is taken after RoPE, where the latent has been overwritten"
    ),
    _mutant("fused_tap_of_stored_rows_only", "U75", "rows without a slot have no tap"),
    _mutant("fused_tap_unrounded_codes", "U86", "the values handed back are not those of the stored codes"),
    _mutant("fused_minus_one_wraps", "U79", "slot −1 wraps to the last entry"),
    _mutant("fused_ignores_page_stride", "U22", "pages are written as if they followed one another"),
    _mutant("fused_layout_ignored", "U23", "the other layout is written"),
    _mutant("fused_floor_on_scale", "U94", "the floor is applied to the scale instead of to amax"),
    _mutant("fused_not_deterministic", "U10", "every second launch flips a bit of the first record"),
)

STORE = Op(
    name="store_records",
    reference="deeptwin.reference.kv_cache:store_records",
    outputs=(Output(name="cache_pow_", rule=Bitwise(), dtype=torch.uint8),),
    cases=cases_store,
    draw=draw_store,
    rows={"x_td": 0, "slots_t": 0},
    out_rows={},
    tile=4,
    writes="cache_pow_",
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lean),
        Relation(name="changed_slots", axis="bytes of the cache", hook=named_bytes, only=lean),
        Relation(name="batch_invariant", axis="rows alone, in parts, in another order", hook=rows_apart, only=lean),
        Relation(name="page_permutation", axis="pages, gaps between them", hook=store_moved_pages, only=lean),
        Relation(name="layout_round_trip", axis="writer → reader", hook=reads_back, partner="load_records", only=lean),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.kv_cache:store_records_triton"),),
    builds=(
        BuildCase(
            name="fp8-d512",
            kernel="deeptwin.kernels.triton_ops.kv_cache:_store_records",
            launch="deeptwin.parity.builds.launches.kv_cache:store_kv_fp8",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="index-d128",
            kernel="deeptwin.kernels.triton_ops.kv_cache:_store_records",
            launch="deeptwin.parity.builds.launches.kv_cache:store_index_fp4",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.kv_cache:tile_kernels_store",
            needs=("tile_kernels",),
            explains="tile_kernels 2.1.0 makes codes and scales, a loop over bytes stores them; under e4m3 scales its "
            "codes are x · (1 / s) where ours are x / s, which parts where s is 1.875 · 2^k",
            only=lambda case: case.fmt != "kv_fp4" or case.regime in ("midpoints", "small"),
        ),
    ),
    mutants=STORE_MUTANTS,
    controls=(_control("right_store"),),
    golden=golden_store,
)

LOAD = Op(
    name="load_records",
    reference="deeptwin.reference.kv_cache:load_records",
    outputs=(Output(name="x_td", rule=Bitwise()),),
    cases=cases_load,
    draw=draw_load,
    rows={"slots_t": 0},
    out_rows={"x_td": 0},
    tile=4,
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lean),
        Relation(name="batch_invariant", axis="rows alone, in any batch, in chunks", hook=loaded_rows, only=lean),
        Relation(
            name="page_permutation",
            axis="pages, gaps, layout, bytes that no slot names",
            hook=load_moved_pages,
            only=lean,
        ),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.kv_cache:load_records_triton"),),
    builds=(
        BuildCase(
            name="fp8-d512",
            kernel="deeptwin.kernels.triton_ops.kv_cache:_load_records",
            launch="deeptwin.parity.builds.launches.kv_cache:load_kv_fp8",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="fp4-d512",
            kernel="deeptwin.kernels.triton_ops.kv_cache:_load_records",
            launch="deeptwin.parity.builds.launches.kv_cache:load_kv_fp4",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.kv_cache:tile_kernels_load",
            needs=("tile_kernels",),
            explains="a loop over bytes finds the records, tile_kernels 2.1.0 casts them back",
            only=lambda case: case.dtype != "fp16" and case.regime != "extreme",
        ),
    ),
    mutants=LOAD_MUTANTS,
    controls=(_control("right_load"),),
    golden=golden_load,
)

FUSED = Op(
    name="norm_rope_store",
    reference="deeptwin.reference.kv_cache:norm_rope_store",
    outputs=(
        Output(name="cache_pow_", rule=StoredRecords(), dtype=torch.uint8),
        Output(name="tap_td", rule=HonestTap(), dtype=torch.bfloat16),
    ),
    cases=cases_fused,
    draw=draw_fused,
    rows={"x_td": 0, "positions_t": 0, "slots_t": 0},
    out_rows={"tap_td": 0},
    writes="cache_pow_",
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lean),
        Relation(name="changed_slots", axis="bytes of the cache", hook=named_bytes, only=lean),
        Relation(name="batch_invariant", axis="rows alone, in parts, in another order", hook=rows_apart, only=lean),
        Relation(name="layout_invariant", axis="alignment of rows", only=lean),
        Relation(
            name="layout_round_trip",
            axis="tap → bytes",
            hook=tap_is_stored,
            partner="load_records",
            only=taps_a_row,
        ),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.kv_cache:norm_rope_store_triton"),),
    builds=(
        BuildCase(
            name="fp8-d512",
            kernel="deeptwin.kernels.triton_ops.kv_cache:_norm_rope_store",
            launch="deeptwin.parity.builds.launches.kv_cache:fused_kv_fp8",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="fp4-d512",
            kernel="deeptwin.kernels.triton_ops.kv_cache:_norm_rope_store",
            launch="deeptwin.parity.builds.launches.kv_cache:fused_kv_fp4",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=FUSED_MUTANTS,
    controls=(_control("right_fused"), _control("right_fused_backwards")),
    golden=golden_fused,
)

CARD = Card(
    component="kv_cache",
    summary="caches as bytes: FP8, FP4 and index records, pages and rings, fused norm + RoPE + quantise + store",
    contract={
        "cache": "uint8 [pages, slots, record bytes]; the width names the format: 528, 288 or 68",
        "record": "codes, then a scale byte per group, group 0 first; the even e2m1 channel in the low nibble",
        "layout": "INTERLEAVED: record after record; SECTIONED: codes of the page, then scales; never inferred",
        "slots": "page · slots + offset; −1 and slots outside store nothing and load zeros; distinct in a store",
        "memory": "pages may lie apart; bytes that no slot names keep their value and may hold anything",
        "rounding": "as quant; fused: bf16 after the norm and after RoPE, and all channels are quantised",
        "precondition": "rows that are quantised are finite",
    },
    ops=(STORE, LOAD, FUSED),
    equivalents=(
        Equivalent(
            name="scale floor of FP4 records",
            reason="Q4k floors amax at 6 · 2^-9: the smallest e4m3 scale is 2^-9 on either side of the division",
        ),
        Equivalent(name="norm and store in two launches", reason="the fused launch rounds where the two do"),
    ),
    facts=facts,
)
