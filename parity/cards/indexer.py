"""How the indexer is checked: visibility, records of keys and queries, head weights, scores in three orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import INDEX_FP4, RopeConfig, ScoreOrder
from deeptwin.reference.quant import quantize
from deeptwin.reference.rope import rope_frequencies, rope_table

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase, Expect
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import Context, Variant, batch_invariant, row_chunks
from ..rules import Bitwise, Budget, Close, Codes, OneRounding, Rule

_ADDRESS = "one 64-bit address waits in local memory: 4 loads and stores outside the products"
_CODES = "64 registers a thread: four words of the codes spill"
SPILT_CODES = {"sm100": Expect(mma=None, max_stack=16, reason=_CODES)}
SPILT_ADDRESS = {"sm100": Expect(mma="tcgen05", max_stack=8, reason=_ADDRESS)}

_mutant, _control = variants("indexer")
U = 2.0**-20  # relative error of an honest fp32 product, norm or rotation before its rounding, with room
RECORD = INDEX_FP4.record_bytes
TABLE = rope_table(torch.arange(4096), rope_frequencies(RopeConfig(rope_dim=64, theta=160000.0, yarn=None)))
Marks = list[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class VisibleCase:
    """Positions around the multiples of a ratio."""

    tokens: int
    ratio: int
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-r{self.ratio}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class RecordCase:
    """`tokens` latents of `width` channels (keys, weights), or queries of `heads` heads."""

    tokens: int
    width: int = 512
    heads: int = 8
    rotary: int = 64
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-m{self.width}-h{self.heads}-r{self.rotary}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class ScoreCase:
    """`tokens` queries on `keys` entries; `page` > 0: in pages of that many; `blocks` > 0: that many candidates."""

    tokens: int
    keys: int
    heads: int = 8
    page: int = 0
    blocks: int = 0
    size: int = 8
    sequences: int = 1
    order: str = "bf16_chains"
    regime: str = "normal"
    lengths: str = "mixed"  # mixed, full, zero

    @property
    def id(self) -> str:
        page = f"-page{self.page}" if self.page else ""
        blocks = f"-b{self.blocks}x{self.size}" if self.blocks else ""
        shape = f"t{self.tokens}-h{self.heads}-s{self.keys}-n{self.sequences}{page}{blocks}"
        return f"{shape}-{self.order}-{self.regime}-len_{self.lengths}"


# what an honest evaluation may store: intervals carried from the first rounding to the bytes

Interval = tuple[Tensor, Tensor]


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.bfloat16).to(torch.float64)


def _times(a: Interval, b: Interval) -> Interval:
    ends = torch.stack([a[i] * b[j] for i in (0, 1) for j in (0, 1)])
    return ends.amin(0), ends.amax(0)


def _widened(x: Interval, error: Tensor) -> Interval:
    return _bf16(x[0] - error), _bf16(x[1] + error)


def _key_rows(marks: Marks, arguments: dict[str, Any], u: float) -> Interval:
    """Normalised rows of keys, as an honest product and norm may round them."""
    exact = next(x for name, x in marks if name == "bf16")
    size = arguments["lat_sc"].double().abs() @ arguments["wk_dc"].double().abs().T
    low, high = _widened((exact, exact), u * size)
    spans = (low <= 0) & (high >= 0)
    least = torch.where(spans, 0.0, torch.minimum(low.abs(), high.abs())).square().mean(-1, keepdim=True)
    most = torch.maximum(low.abs(), high.abs()).square().mean(-1, keepdim=True)
    eps, weight = arguments["eps"], arguments["norm_d"].double()
    rstd = (torch.rsqrt(most + eps) * (1 - u), torch.rsqrt(least + eps) * (1 + u))
    product = _times(_times((low, high), rstd), (weight, weight))
    return _widened(product, u * torch.maximum(product[0].abs(), product[1].abs()))


def _turned(rows: Interval, table: Tensor, positions: Tensor, u: float) -> Interval:
    """Rows [y, 128] with their last channels rotated."""
    half = table.shape[1] // 2
    entries = table.double()[positions.long()]
    start = rows[0].shape[1] - 2 * half
    first, second = slice(start, None, 2), slice(start + 1, None, 2)
    a, b = ((x[0][:, part], x[1][:, part]) for part in (first, second) for x in (rows,))
    cos, sin = (entries[:, :half],) * 2, (entries[:, half:],) * 2
    minus = (-entries[:, half:],) * 2
    low, high = rows[0].clone(), rows[1].clone()
    for part, one, other in ((first, _times(a, cos), _times(b, minus)), (second, _times(a, sin), _times(b, cos))):
        size = torch.maximum(one[0].abs(), one[1].abs()) + torch.maximum(other[0].abs(), other[1].abs())
        low[:, part], high[:, part] = _widened((one[0] + other[0], one[1] + other[1]), u * size)
    return low, high


def _record_interval(rows: Interval, record: Tensor) -> Interval:
    """Lowest and highest codes and scale of a record [y, 132], the codes under the scale that is stored."""
    low, high = (x.unflatten(1, (4, 32)) for x in rows)
    spans = (low <= 0) & (high >= 0)
    least = torch.where(spans, 0.0, torch.minimum(low.abs(), high.abs())).amax(-1)
    most = torch.maximum(low.abs(), high.abs()).amax(-1)
    scale = torch.exp2(record[:, 64:].double() - 127).repeat_interleave(32, -1)
    codes = (_code_order(rows[0] / scale, -1), _code_order(rows[1] / scale, 1))
    scales = (_scale_order(least), _scale_order(most))
    return torch.cat([codes[0], scales[0]], 1), torch.cat([codes[1], scales[1]], 1)


def _code_order(x: Tensor, zero: int) -> Tensor:
    """The code of x in value order, −8 … −1 and 1 … 8; an exact zero may have either sign."""
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    lower, upper = torch.bucketize(x.abs(), edges), torch.bucketize(x.abs(), edges, right=True)
    code = torch.where(lower % 2 == 0, lower, upper) + 1
    return torch.where(x == 0, zero, torch.where(x < 0, -code, code))


def _scale_order(amax: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp((amax.clamp(min=INDEX_FP4.quant.amax_floor) / 6).float().double())
    return (exponent - (mantissa == 0.5).to(torch.int32)).to(torch.int64) + 127


def record_order(records: Tensor) -> Tensor:
    """The 128 codes and 4 scales of records in value order, [..., 132]."""
    byte = records[..., :64].to(torch.int64)
    nibble = torch.stack([byte & 15, byte >> 4], -1).flatten(-2)
    code = torch.where(nibble >= 8, -(nibble & 7) - 1, nibble + 1)
    return torch.cat([code, records[..., 64:].to(torch.int64)], -1)


def key_interval(marks: Marks, arguments: dict[str, Any], u: float) -> Interval:
    """What an honest kernel may store for keys."""
    rows = _turned(_key_rows(marks, arguments, u), arguments["table_ir"], arguments["positions_s"], u)
    return _record_interval(rows, arguments["k_sw"])


def query_interval(marks: Marks, arguments: dict[str, Any], u: float) -> Interval:
    """What an honest kernel may store for queries."""
    t, h, d = arguments["q_thd"].shape
    rows = arguments["q_thd"].double().reshape(t * h, d)
    positions = arguments["positions_t"].repeat_interleave(h)
    turned = _turned((rows, rows), arguments["table_ir"], positions, u)
    low, high = _record_interval(turned, arguments["q_thw"].reshape(t * h, RECORD))
    return low.unflatten(0, (t, h)), high.unflatten(0, (t, h))


# inputs


def draw_visible(case: VisibleCase, rng: np.random.Generator) -> Inputs:
    """Every residue of the ratio near zero, then far positions."""
    positions = torch.cat([torch.arange(case.tokens), torch.from_numpy(rng.integers(0, 2**20, case.tokens))])
    return {"positions_t": positions[: case.tokens * 2].to(torch.int32), "ratio": case.ratio}


def _table(case: RecordCase) -> Tensor:
    half = case.rotary // 2
    return torch.cat([TABLE[:, :half], TABLE[:, 32 : 32 + half]], 1)


def _positions(case: RecordCase, rng: np.random.Generator) -> Tensor:
    positions = torch.from_numpy(rng.integers(0, len(TABLE), case.tokens))
    positions[:1] = len(TABLE) - 1
    return positions


def draw_keys(case: RecordCase, rng: np.random.Generator) -> Inputs:
    """Latents of a regime as a strided view; norm weights of both signs."""
    lat = draws.rows(rng, case.tokens, case.width, dtype=torch.bfloat16, regime=case.regime)
    norm = draws.normal(rng, 128, dtype=torch.bfloat16, scale=0.5, mean=1.0)
    norm[:3] = torch.tensor([-1.5, 0.0, 20.0])
    return {
        "lat_sc": draws.strided(lat, pad=8),
        "wk_dc": draws.normal(rng, 128, case.width, dtype=torch.bfloat16, scale=case.width**-0.5),
        "norm_d": norm,
        "table_ir": _table(case),
        "positions_s": _positions(case, rng),
        "eps": 1e-20,
    }


def draw_queries(case: RecordCase, rng: np.random.Generator) -> Inputs:
    """Heads of a regime; `midpoints` puts values on the borders between codes, in unrotated channels."""
    count = case.tokens * case.heads
    regime = "normal" if case.regime == "midpoints" else case.regime
    q = draws.rows(rng, count, 128, dtype=torch.bfloat16, regime=regime)
    if case.regime == "midpoints":
        q[:, :32] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4) * torch.tensor([1.0, -1.0] * 16)
        q[:, 32:64] = q[:, :32] * 2.0**-9
    return {
        "q_thd": draws.strided(q.unflatten(0, (case.tokens, case.heads)), pad=8),
        "table_ir": _table(case),
        "positions_t": _positions(case, rng).to(torch.int32),
    }


def draw_weights(case: RecordCase, rng: np.random.Generator) -> Inputs:
    """Hidden rows of a regime and signed weights."""
    x = draws.rows(rng, case.tokens, case.width, dtype=torch.bfloat16, regime=case.regime)
    w = draws.normal(rng, case.heads, case.width, dtype=torch.bfloat16, scale=case.width**-0.5)
    return {"x_tm": draws.strided(x, pad=8), "w_hm": w, "scale": 2.0**-6}


def _records(rng: np.random.Generator, count: int, regime: str) -> Tensor:
    """Records of rows of a regime. The dot products of two of them are exact in fp32: no scale is out of all bounds."""
    rows = draws.rows(rng, count, 128, dtype=torch.bfloat16, regime=regime)
    codes, sf = quantize(rows, fmt=INDEX_FP4.quant)
    return torch.cat([codes, sf], 1)


def _row(**channels: float) -> Tensor:
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    for name, value in channels.items():
        x[0, int(name[1:])] = value
    return torch.cat(quantize(x, fmt=INDEX_FP4.quant), 1)[0]


def _midpoint_queries(case: ScoreCase, q: Tensor, k: Tensor, w: Tensor) -> None:
    """A first head adds 2^-30, a fifth makes its chain an exact midpoint of bf16 with it: one rounding goes the other
    way than two. Keys are 1 in channels 0, 1 and 32."""
    k[:] = _row(c0=1.0, c1=1.0, c32=1.0)
    w[:] = 0.0
    q[:, 0], q[:, 4] = _row(c32=2.0**-20), _row(c0=6.0, c1=1.0)
    w[:, 0], w[:, 4] = -(2.0**-10), 37 / 256  # 259 / 256 less a little: 258 / 256


def _sequences(case: ScoreCase, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """First key and number of visible entries of every token; sequences lie one behind the other, out of order."""
    each = case.keys // case.sequences
    owner = torch.from_numpy(rng.permutation(case.tokens) % case.sequences)
    edges = [each, 0, 1, each - 1, case.size - 1, case.size, case.size + 1, each // 2]
    chosen = {"mixed": edges, "full": [each], "zero": [0]}[case.lengths]
    lengths = torch.tensor([chosen[i % len(chosen)] for i in range(case.tokens)], dtype=torch.int32).clamp(0, each)
    return (owner * each).to(torch.int32), lengths


def draw_scores(case: ScoreCase, rng: np.random.Generator) -> Inputs:
    """Records of a regime; keys that no query sees are bytes 0xFF, whose scales are NaN."""
    regime = case.regime if case.regime in ("flat", "mean1", "zeros", "ties") else "normal"
    # a hot channel on both sides would carry sums beyond the 24 bits of fp32
    q = _records(rng, case.tokens * case.heads, "peaked" if case.regime == "peaked" else regime)
    q = q.unflatten(0, (case.tokens, case.heads))
    k = _records(rng, case.keys, regime)
    w = draws.normal(rng, case.tokens, case.heads, dtype=torch.bfloat16, scale=2.0**-6)
    if case.regime == "zeros":
        w[:] = 0.0
    if case.regime == "midpoint":
        _midpoint_queries(case, q, k, w)
    first, lengths = _sequences(case, rng)
    seen = torch.zeros(case.keys, dtype=torch.bool)
    for start, length in zip(first.tolist(), lengths.tolist(), strict=True):
        seen[start : start + length] = True
    k[~seen] = 0xFF
    if case.regime == "nankey" and case.keys:
        k[int(first[0]), 64:] = 0xFF
    return {
        "q_thw": draws.strided(q, pad=4),
        "k_sw": draws.strided(k, pad=12),
        "w_th": w,
        "first_t": first,
        "length_t": lengths,
        "blocks_tk": _blocks(case, lengths, rng),
        "block_size": case.size,
        "order": ScoreOrder(case.order),
    }


def _blocks(case: ScoreCase, lengths: Tensor, rng: np.random.Generator) -> Tensor | None:
    """Ascending candidates whose last is the partial block, −1 behind them; some blocks of the last row are unseen."""
    if not case.blocks:
        return None
    blocks = torch.full((case.tokens, case.blocks), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        count = -(-length // case.size)
        chosen = rng.permutation(max(count - 1, 0))[: case.blocks - 1]
        chosen = np.sort(np.append(chosen, [count - 1] * (count > 0)))
        blocks[row, : chosen.size] = torch.from_numpy(chosen.astype(np.int32))
    if case.tokens > 1 and case.blocks > 2:
        blocks[-1, -1] = 10**6
    return blocks


def draw_paged(case: ScoreCase, rng: np.random.Generator) -> Inputs:
    """The same keys scattered over pages that lie further apart than they are long; absent pages behind the last."""
    flat = draw_scores(case, rng)
    records, first = flat.pop("k_sw"), flat.pop("first_t")
    each = case.keys // case.sequences
    per = -(-each // case.page)
    pages = case.sequences * per + 2
    order = torch.from_numpy(rng.permutation(pages)[: case.sequences * per]).to(torch.int32)
    roomy = draws.poisoned(pages, case.page * RECORD + 60, dtype=torch.uint8)
    cache = roomy[:, : case.page * RECORD].unflatten(1, (case.page, RECORD))
    for i in range(case.sequences * each):
        page, slot = order[i // each * per + i % each // case.page], i % each % case.page
        place = roomy[page]
        place[slot * 64 : slot * 64 + 64] = records[i, :64]
        place[case.page * 64 + slot * 4 : case.page * 64 + slot * 4 + 4] = records[i, 64:]
    owner = first.long() // max(each, 1)
    table = order.reshape(case.sequences, per)[owner]
    absent = torch.tensor([[-1, pages, 2**31 - 1]], dtype=torch.int32).expand(case.tokens, 3)
    lengths = flat["length_t"]
    if case.regime == "absent":
        table, lengths = table.clone(), lengths.clone()
        table[:, ::2] = -1
    whole = {"cache_pow": cache, "table_tj": torch.cat([table, absent], 1), **flat}
    names = ("q_thw", "cache_pow", "w_th", "table_tj", "length_t", "blocks_tk", "block_size", "order")
    return {name: whole[name] for name in names}


KEYS = RecordCase(tokens=3)


def cases_visible(full: bool) -> list[VisibleCase]:
    """Ratios of every generation, every residue."""
    base = VisibleCase(tokens=9, ratio=2)
    found = [replace(base, regime=r) for r in REGIMES]
    return found + [VisibleCase(tokens=2 * r + 2, ratio=r) for r in (1, 4, 128)] + [replace(base, tokens=0)]


def cases_keys(full: bool) -> list[RecordCase]:
    """Regimes, awkward widths, other rotary widths, no token, more tokens than a program takes."""
    found = [replace(KEYS, regime=r) for r in (*REGIMES, "zeros", "ties", "tiny", "cancel", "constant")]
    found += [replace(KEYS, width=w) for w in (96, 1, 130)]
    found += [replace(KEYS, tokens=0), replace(KEYS, tokens=65), replace(KEYS, rotary=32), replace(KEYS, rotary=128)]
    if full:
        found += [replace(KEYS, tokens=200, regime=r) for r in REGIMES]
    return list({case.id: case for case in found}.values())


def cases_queries(full: bool) -> list[RecordCase]:
    """Regimes, midpoints between codes, the heads of the released model, no token."""
    base = RecordCase(tokens=3, heads=5)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "ties", "tiny", "cancel", "midpoints", "constant")]
    found += [replace(base, tokens=0), replace(base, tokens=2, heads=32), replace(base, heads=1, rotary=16)]
    if full:
        found += [replace(base, tokens=40, heads=32, regime=r) for r in REGIMES]
    return list({case.id: case for case in found}.values())


def cases_weights(full: bool) -> list[RecordCase]:
    """Regimes, the released width, awkward sizes."""
    base = RecordCase(tokens=9, width=600, heads=32)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "cancel")]
    found += [replace(base, tokens=1, width=5120), replace(base, tokens=65, width=96, heads=2), replace(base, tokens=0)]
    return found + ([replace(base, tokens=40, width=5120, regime=r) for r in REGIMES] if full else [])


BASE = ScoreCase(tokens=4, keys=72)


def cases_scores(full: bool) -> list[ScoreCase]:
    """Regimes, numbers of heads, packed sequences, candidates, no visible entry; the released heads on two blocks."""
    found = [replace(BASE, regime=r) for r in (*REGIMES, "zeros", "ties", "nankey", "midpoint")]
    found += [
        replace(BASE, heads=32, tokens=8, keys=150),
        replace(BASE, heads=2),
        replace(BASE, heads=5, tokens=2),
        replace(BASE, sequences=3, tokens=6),
        replace(BASE, sequences=2, tokens=5, blocks=3, keys=90),
        replace(BASE, blocks=5, tokens=8),
        replace(BASE, blocks=4, size=16, heads=32, tokens=3, keys=200),
        replace(BASE, blocks=1, tokens=3),
        replace(BASE, lengths="zero"),
        replace(BASE, tokens=0),
        replace(BASE, keys=0, tokens=2),
        replace(BASE, tokens=1, keys=1, lengths="full"),
        replace(BASE, tokens=17, keys=40),
    ]
    if full:
        found += [
            replace(BASE, heads=h, keys=s, tokens=6, regime=r, blocks=b)
            for h, s, r, b in product((8, 32), (127, 300), REGIMES, (0, 6))
        ]
        found += [replace(BASE, heads=64, keys=1024, tokens=2), replace(BASE, heads=32, keys=3000, tokens=1)]
    return list({case.id: case for case in found}.values())


def cases_paged(full: bool) -> list[ScoreCase]:
    """Page sizes, candidates in pages, absent pages, packed requests."""
    base = replace(BASE, page=16, tokens=4)
    found = [replace(base, regime=r) for r in (*REGIMES, "absent")]
    found += [
        replace(base, page=7, sequences=2),
        replace(base, page=64, heads=32, keys=150),
        replace(base, page=1, keys=20, tokens=2),
        replace(base, blocks=5, sequences=2, keys=100),
        replace(base, blocks=3, regime="absent"),
        replace(base, lengths="zero"),
        replace(base, tokens=0),
        replace(base, page=128, tokens=1, lengths="full", keys=200),
    ]
    if full:
        found += [replace(base, page=p, keys=300, regime=r, tokens=6) for p, r in product((8, 53, 128), REGIMES)]
    return list({case.id: case for case in found}.values())


# relation hooks


def restricted(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The scores of candidates are those of the whole row at the same places, bit for bit."""
    blocks, size = inputs["blocks_tk"].long(), inputs["block_size"]
    entry = (blocks[:, :, None] * size + torch.arange(size)).flatten(1)
    entry = torch.where((entry >= 0) & (entry < inputs["length_t"][:, None]), entry, -1)

    def gathered(results: list[Outputs]) -> Outputs:
        whole = results[0]["scores_ts"]
        padded = torch.nn.functional.pad(whole, (0, 1), value=-torch.inf)
        return {"scores_ts": padded.gather(1, torch.where(entry < 0, whole.shape[1], entry))}

    yield Variant(label="whole rows", calls=(inputs | {"blocks_tk": None},), join=gathered)


def unseen_keys(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Keys that no query sees may hold any bytes."""
    k = inputs["k_sw"]
    seen = torch.zeros(len(k), dtype=torch.bool)
    for start, length in zip(inputs["first_t"].tolist(), inputs["length_t"].tolist(), strict=True):
        seen[start : start + length] = True
    for label, noise in (("zeros", torch.zeros_like(k)), ("random", torch.full_like(k, 0x7B))):
        yield Variant(label=label, calls=(inputs | {"k_sw": torch.where(seen[:, None], k, noise)},))


def moved_sequences(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The buffer starts later: what stands before the sequences changes nothing."""
    k = inputs["k_sw"]
    for shift in (1, 13):
        moved = torch.cat([torch.full((shift, RECORD), 0xFF, dtype=torch.uint8), k])
        changed = inputs | {"k_sw": moved, "first_t": inputs["first_t"] + shift}

        def cut(results: list[Outputs], shift: int = shift) -> Outputs:
            scores = results[0]["scores_ts"]
            return {"scores_ts": scores[:, : scores.shape[1] - shift] if inputs["blocks_tk"] is None else scores}

        yield Variant(label=f"shifted by {shift}", calls=(changed,), join=cut)


def permuted_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same entries on other pages, the tables renumbered."""
    cache, table = inputs["cache_pow"], inputs["table_tj"].long()
    pages = cache.shape[0]
    order = torch.from_numpy(context.rng.permutation(pages))
    moved = torch.empty_like(order)
    moved[order] = torch.arange(pages)
    inside = (table >= 0) & (table < pages)
    renumbered = torch.where(inside, moved[torch.where(inside, table, 0)], table).to(torch.int32)
    changed = inputs | {"cache_pow": cache[order].contiguous(), "table_tj": renumbered}
    yield Variant(label="other pages", calls=(changed,))


def as_buffer(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The contiguous operation on the entries of the first row's pages, one row at a time."""
    cache, op = inputs["cache_pow"], context.op
    p, o, _ = cache.shape
    flat = cache.reshape(p, -1)
    records = torch.cat([flat[:, : o * 64].reshape(p, o, 64), flat[:, o * 64 :].reshape(p, o, 4)], 2)
    hidden = torch.full((1, o, RECORD), 0xFF, dtype=torch.uint8)
    records = torch.cat([records, hidden])
    calls = []
    for row, table in enumerate(inputs["table_tj"].long()):
        known = torch.where((table >= 0) & (table < p), table, p)
        one = {
            name: x[row : row + 1]
            for name, x in inputs.items()
            if name in op.rows and name != "table_tj" and x is not None
        }
        shared = {name: inputs[name] for name in ("blocks_tk", "block_size", "order")}
        buffer = {"k_sw": records[known].flatten(0, 1), "first_t": torch.zeros(1, dtype=torch.int32)}
        calls.append(shared | one | buffer)

    def joined(results: list[Outputs]) -> Outputs:
        return {"scores_ts": torch.cat([r["scores_ts"] for r in results])}

    yield Variant(label="one buffer a row", calls=tuple(calls), join=joined)


def as_the_chains(case: Any) -> str | None:
    """Lowered, two of the three orders stand for all."""
    return "the kernel is that of the other two orders, which run here"


def other_shapes(case: Any) -> str | None:
    """Lowered, one shape of the scores stands for all."""
    if case.regime != "normal" or case.tokens != 4 or case.heads != 8:
        return "every shape is a program of its own, which takes seconds to build: one of them stands for all"
    return None


def few_calls(case: Any) -> bool:
    """Relations make many calls: they run on small shapes, where an order of summation shows as well."""
    return case.regime in ("normal", "file") and case.tokens <= 6 and getattr(case, "keys", 0) <= 100


def _restricted_case(case: Any) -> bool:
    return few_calls(case) and case.blocks > 0


def finite_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """`batch_invariant` with huge numbers where it has NaN: NaN is no input of a quantiser."""
    for variant in (*batch_invariant(inputs, context), *row_chunks(inputs, context)):
        calls = tuple(
            {n: x.nan_to_num(nan=1e30) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in c.items()}
            for c in variant.calls
        )
        yield replace(variant, label=variant.label.replace("NaN", "huge"), calls=calls)


def _row_relations(rows: Callable[..., Iterator[Variant]]) -> tuple[Relation, ...]:
    return (
        Relation(name="run_to_run", axis="repeats", only=lambda case: few_calls(case) and case.rotary != 64),
        Relation(name="batch_invariant", axis="rows and row chunks", hook=rows, only=few_calls),
    )


VISIBLE = Op(
    name="index_visible",
    reference="deeptwin.reference.indexer:index_visible",
    outputs=(Output(name="visible_t", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_visible,
    draw=draw_visible,
    rows={"positions_t": 0},
    out_rows={"visible_t": 0},
    mutants=(
        _mutant("visible_too_early", "U25", "an entry is seen before its last token"),
        _mutant("visible_too_late", "U25", "an entry is seen one token late"),
    ),
    controls=(_control("right_visible"),),
)

KEYS_OP = Op(
    name="index_keys",
    reference="deeptwin.reference.indexer:index_keys",
    outputs=(Output(name="k_sw", rule=Codes(u=U, allowed=key_interval, order=record_order), dtype=torch.uint8),),
    cases=cases_keys,
    draw=draw_keys,
    rows={"lat_sc": 0, "positions_s": 0},
    out_rows={"k_sw": 0},
    relations=_row_relations(finite_rows),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.indexer:index_keys_triton"),),
    builds=(
        BuildCase(
            name="m512",
            kernel="deeptwin.kernels.triton_ops.indexer:_index_keys",
            launch="deeptwin.parity.builds.launches.indexer:keys",
            expect=PRODUCT | MATRIX,
        ),
    ),
    mutants=(
        _mutant("keys_without_norm", "U11", "the norm of the keys is missing"),
        _mutant("keys_eps_1e_6", "U39", "epsilon 1e-6 instead of 1e-20"),
        _mutant("keys_half_split", "U12", "RoPE pairs channels i and i + 32"),
        _mutant("keys_first_channels", "U14", "the first 64 channels are rotated"),
        _mutant("keys_not_rotated", "U13", "keys are not rotated"),
        _mutant("keys_at_position_zero", "U13", "every key is rotated as at position 0"),
        _mutant("keys_at_the_first_position", "U09", "every key is rotated as the first"),
        _mutant("keys_hadamard", "U15", "a Hadamard transform that V4.1 does not have"),
        _mutant("keys_product_kept", "R2", "the product is not rounded to bf16 before the norm"),
        _mutant("keys_product_truncated", "R2", "the product is truncated to bf16"),
        _mutant("keys_floor_of_fp8", "U94", "the floor 1e-4 of the fp8 formats"),
        _mutant("keys_high_nibble_first", "U57", "element 0 stands in the high nibble"),
        _mutant("keys_scales_reversed", "U54", "the four scale bytes stand in reverse order"),
        _mutant("keys_scales_in_front", "U23", "the scales stand before the codes"),
        _mutant("keys_truncated", "U60", "codes are truncated"),
        _mutant("keys_in_two_stages", "R11", "quantised twice: equal values, other bytes"),
    ),
    controls=(_control("right_keys"),),
    golden=lambda: [replace(KEYS, width=64, regime=r) for r in ("normal", "tiny")],
)

QUERIES = Op(
    name="index_queries",
    reference="deeptwin.reference.indexer:index_queries",
    outputs=(Output(name="q_thw", rule=Codes(u=U, allowed=query_interval, order=record_order), dtype=torch.uint8),),
    cases=cases_queries,
    draw=draw_queries,
    rows={"q_thd": 0, "positions_t": 0},
    out_rows={"q_thw": 0},
    relations=_row_relations(finite_rows),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.indexer:index_queries_triton"),),
    builds=(
        BuildCase(
            name="h32",
            kernel="deeptwin.kernels.triton_ops.indexer:_index_queries",
            launch="deeptwin.parity.builds.launches.indexer:queries",
            expect=NO_PRODUCT | VECTOR | SPILT_CODES,
        ),
    ),
    peers=(
        Peer(
            name="transformers-tile-kernels",
            function="deeptwin.parity.peers.indexer:v4_rope_and_cast",
            needs=("transformers", "tile_kernels"),
            explains="transformers 5.24.0, the interleaved rotation of V4; tile_kernels 2.1.0, torch.cast.cast to e2m1",
            only=lambda case: case.regime not in ("zeros", "tiny"),
        ),
    ),
    mutants=(
        _mutant("queries_normed", "U11", "the per-head query norm of V4"),
        _mutant("queries_half_split", "U12", "RoPE pairs channels i and i + 32"),
        _mutant("queries_first_channels", "U14", "the first 64 channels are rotated"),
        _mutant("queries_not_rotated", "U13", "queries are not rotated"),
        _mutant("queries_at_the_first_position", "U09", "every query is rotated as the first"),
        _mutant("queries_hadamard", "U16", "a Hadamard transform on the query alone"),
        _mutant("queries_high_nibble_first", "U57", "element 0 stands in the high nibble"),
        _mutant("queries_floor_of_fp8", "U94", "the floor 1e-4 of the fp8 formats"),
    ),
    controls=(_control("right_queries"),),
    golden=lambda: [RecordCase(tokens=2, heads=2, regime=r) for r in ("normal", "midpoints")],
)

WEIGHTS = Op(
    name="index_weights",
    reference="deeptwin.reference.indexer:index_weights",
    outputs=(Output(name="w_th", rule=Budget(kind="bf16 projection"), dtype=torch.bfloat16),),
    cases=cases_weights,
    draw=draw_weights,
    rows={"x_tm": 0},
    out_rows={"w_th": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=lambda case: case.tokens * case.width == 65 * 96),),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.indexer:index_weights_triton"),),
    builds=(
        BuildCase(
            name="h32-m5120",
            kernel="deeptwin.kernels.triton_ops.indexer:_index_weights",
            launch="deeptwin.parity.builds.launches.indexer:weights",
            expect=PRODUCT | MATRIX,
        ),
    ),
    mutants=(
        _mutant("weights_not_scaled", "U05", "the factor 2^-6 is missing"),
        _mutant("weights_added_in_bf16", "U17", "the product is accumulated in bf16"),
        _mutant("weights_positive", "U25", "negative weights are cut off"),
        _mutant("weights_softmax", "U25", "a softmax over the heads"),
    ),
    controls=(_control("right_weights"), _control("right_weights_in_steps")),
    golden=lambda: [RecordCase(tokens=2, width=48, heads=4)],
)

# one fp32 sum of weighted terms a score, in another order on either side: RIVAL may be lucky, its distance counts as at
# least one unit. Measured on sums in one chain of fp32 and on wide sums (parity/evidence/fp32-index-scores.json).
F32_SCORES = Budget(
    kind="fp32 index scores", floor=1.0, row=3.0, total=2.0, element_factor=2.0, element_slack=4.0, bias=1.0
)
RULES: dict[ScoreOrder, Rule] = {
    ScoreOrder.FP32: F32_SCORES,
    # a sum of rounded products that cancels is off by more than an ulp of what is left of it
    ScoreOrder.BF16_ONCE: OneRounding(cancellation=2.0**-7),
    ScoreOrder.BF16_RELEASE: OneRounding(cancellation=2.0**-7),
    ScoreOrder.BF16_CHAINS: Bitwise(),
}
SCORE_DTYPES = {ScoreOrder.FP32: torch.float32}
SHORT = {
    ScoreOrder.FP32: "fp32",
    ScoreOrder.BF16_ONCE: "once",
    ScoreOrder.BF16_RELEASE: "release",
    ScoreOrder.BF16_CHAINS: "chains",
}
EVERY_ORDER = (
    _mutant("relu_missing", "U24", "negative dot products count"),
    _mutant("relu_after_the_sum", "U24", "the positive part is taken of the sum, not of each head"),
    _mutant("sigmoid_mean", "U25", "a mean of sigmoids"),
    _mutant("weights_ignored", "U25", "every head has the same weight"),
    _mutant("heads_added_in_bf16", "U17", "the heads are added in bf16, one after the other"),
    _mutant("last_head_lost", "U80", "the last head does not count"),
)
CHAINS_ONLY = (
    _mutant("sees_one_too_many", "U25", "the entry behind the last visible one is scored"),
    _mutant("sees_one_too_few", "U25", "the query's own entry is not scored"),
    _mutant("length_ignored", "U08", "lengths are not passed to the kernel"),
    _mutant("length_of_the_first", "U09", "every row has the length of the first"),
    _mutant("sequences_share_keys", "U37", "packed sequences all read the keys of the first"),
    _mutant("padded_head_counts", "U08", "a head that only fills the tile has the weight of another"),
    _mutant("unseen_times_zero", "U74", "a masked product computes 0 · NaN"),
    _mutant("unseen_unwritten", "U75", "columns beyond the length are left as they were"),
    _mutant("stale_keys", "U93", "keys are published on every other call only; between, older ones are scored"),
    _mutant("scales_ignored", "U58", "codes are multiplied without their scales"),
    _mutant("block_number_as_entry", "U25", "a candidate block is taken for an entry"),
    _mutant("restricted_in_fp32", "U89", "candidates are scored in another order than whole rows"),
    _mutant("not_deterministic", "U20", "every other launch differs in one element"),
    _mutant("order_depends_on_batch", "U73", "the order of the heads depends on the batch"),
    _mutant("chains_contiguous", "R6", "a chain takes neighbouring heads"),
    _mutant("chains_descending", "R6", "a chain takes its heads from the last to the first"),
    _mutant("one_chain", "R6", "one chain instead of four"),
    _mutant("fma_rounded_twice", "R6", "product and sum are rounded to fp32, then to bf16"),
    _mutant("product_rounded", "R6", "the product is rounded before it is added"),
    _mutant("order_of_the_release", "R6", "the order of the release code"),
)
OTHERS = {
    ScoreOrder.FP32: (_mutant("order_of_the_release", "U17", "scores are rounded to bf16 on the way"),),
    ScoreOrder.BF16_ONCE: (_mutant("order_of_the_release", "R2", "products are rounded before they are added"),),
    ScoreOrder.BF16_RELEASE: (
        _mutant("order_of_the_chains", "R2", "the order of the fused kernel"),
        _mutant("order_of_fp32", "R2", "rounded once, at the end"),
    ),
    ScoreOrder.BF16_CHAINS: CHAINS_ONLY,
}
SCORER = Peer(
    name="transformers-scorer",
    function="deeptwin.parity.peers.indexer:v4_scorer",
    needs=("transformers",),
    explains="transformers 5.24.0, DeepseekV4IndexerScorer in fp32: its factors channels^-0.5 and heads^-0.5 are each "
    "rounded; together they are a power of two for 2, 8 and 32 heads",
    rules={"scores_ts": Close(rtol=1e-6)},
    only=lambda case: case.heads in (2, 8, 32) and case.tokens > 0 and case.regime not in ("nankey",),
)
BUFFER_BUILDS = {
    ScoreOrder.FP32: (
        BuildCase(
            name="h32-buffer",
            kernel="deeptwin.kernels.triton_ops.indexer:_score_buffer",
            launch="deeptwin.parity.builds.launches.indexer:buffer_fp32",
            expect=PRODUCT,
        ),
    ),
    ScoreOrder.BF16_ONCE: (),
    ScoreOrder.BF16_RELEASE: (),
    ScoreOrder.BF16_CHAINS: (
        BuildCase(
            name="h32-buffer",
            kernel="deeptwin.kernels.triton_ops.indexer:_score_buffer",
            launch="deeptwin.parity.builds.launches.indexer:buffer_chains",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="h32-candidates",
            kernel="deeptwin.kernels.triton_ops.indexer:_score_entries",
            launch="deeptwin.parity.builds.launches.indexer:restricted_chains",
            expect=PRODUCT,
        ),
        BuildCase(
            name="tilelang-h32",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.indexer:score_program",
            launch="deeptwin.parity.builds.launches.indexer_tilelang:sm100_h32",
            expect=SPILT_ADDRESS,
        ),
        BuildCase(
            name="tilelang-ascend-h32",
            dsl="tilelang",
            kernel="deeptwin.kernels.ascend_ops.indexer:score_program",
            launch="deeptwin.parity.builds.launches.indexer_tilelang:ascend_h32",
            expect={"ascend950-simd": Expect(mma="cube")},
        ),
    ),
}


def _buffer_cases(order: ScoreOrder, full: bool) -> list[ScoreCase]:
    """Every case in the order of the chains; the regimes, heads and candidates in the others."""
    found = cases_scores(full)
    if order is not ScoreOrder.BF16_CHAINS and not full:
        found = [c for c in found if c.regime in (*REGIMES, "zeros") and c.lengths == "mixed" and c.sequences == 1]
        found = [c for c in found if c.tokens in (0, 3, 4, 8)]
    return [replace(case, order=order.value) for case in found]


def _packed(case: Any) -> bool:
    return few_calls(case) and case.sequences > 1


PACKED_RELATIONS = (
    Relation(name="run_to_run", axis="repeats", only=_packed),
    Relation(name="batch_invariant", axis="queries", only=_packed),
    Relation(name="chunk_invariant", axis="query chunks", hook=row_chunks, only=_packed),
    Relation(name="causality", axis="unseen keys", hook=unseen_keys, only=_packed),
    Relation(name="page_permutation", axis="place in the buffer", hook=moved_sequences, only=_packed),
)


def _score_op(order: ScoreOrder) -> Op:
    """`index_scores` in one order: the dtype of its output belongs to the operation."""
    is_chains = order is ScoreOrder.BF16_CHAINS
    candidates = Relation(name="masked_equals_absent", axis="candidates", hook=restricted, only=_restricted_case)
    return Op(
        name=f"index_scores_{SHORT[order]}",
        reference="deeptwin.reference.indexer:index_scores",
        outputs=(Output(name="scores_ts", rule=RULES[order], dtype=SCORE_DTYPES.get(order, torch.bfloat16)),),
        cases=lambda full: _buffer_cases(order, full),
        draw=draw_scores,
        rows={"q_thw": 0, "w_th": 0, "first_t": 0, "length_t": 0, "blocks_tk": 0},
        out_rows={"scores_ts": 0},
        tile=16 if is_chains else 1,
        relations=(*PACKED_RELATIONS, candidates) if is_chains else (candidates,),
        candidates=(
            Candidate(
                name="triton",
                function="deeptwin.optimized.indexer:index_scores_triton",
                lowered_declines=as_the_chains if order is ScoreOrder.BF16_RELEASE else other_shapes,
            ),
        ),
        builds=BUFFER_BUILDS[order],
        peers=(SCORER,) if order is ScoreOrder.FP32 else (),
        mutants=(*EVERY_ORDER, *OTHERS[order]),
        controls=(_control("right_scores"), _control("right_scores_summed_in_fp32")),
        golden=lambda: [replace(BASE, tokens=3, keys=20, sequences=2, order=order.value, blocks=b) for b in (0, 2)],
    )


PAGED = Op(
    name="index_scores_paged",
    reference="deeptwin.reference.indexer:index_scores_paged",
    outputs=(Output(name="scores_ts", rule=Bitwise(), dtype=torch.bfloat16),),
    cases=cases_paged,
    draw=draw_paged,
    rows={"q_thw": 0, "w_th": 0, "table_tj": 0, "length_t": 0, "blocks_tk": 0},
    out_rows={"scores_ts": 0},
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lambda c: few_calls(c) and c.page == 7),
        Relation(name="batch_invariant", axis="queries", only=lambda c: few_calls(c) and c.page == 7),
        Relation(name="page_permutation", axis="pages", hook=permuted_pages, only=few_calls),
        Relation(
            name="decode_equals_prefill",
            axis="pages and one buffer",
            hook=as_buffer,
            partner="index_scores_chains",
            only=lambda c: few_calls(c) and c.tokens > 0,
        ),
        Relation(name="masked_equals_absent", axis="candidates", hook=restricted, only=_restricted_case),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.indexer:index_scores_paged_triton",
            lowered_declines=other_shapes,
        ),
    ),
    builds=(
        BuildCase(
            name="h32-pages",
            kernel="deeptwin.kernels.triton_ops.indexer:_score_entries",
            launch="deeptwin.parity.builds.launches.indexer:paged_chains",
            expect=PRODUCT | SPILT_ADDRESS | MATRIX,
        ),
    ),
    mutants=(
        _mutant("pages_interleaved", "U23", "a page is read as codes and scales of one entry after the other"),
        _mutant("page_stride_ignored", "U22", "pages are read as if they were contiguous"),
        _mutant("table_of_the_first", "U09", "every row uses the pages of the first"),
        _mutant("table_reversed", "U29", "the pages of a sequence are read in another order"),
        _mutant("absent_page_wraps", "U79", "page −1 is the last page"),
        _mutant("page_0_times_zero", "U74", "hidden entries are read, and 0 · NaN added"),
        _mutant("paged_length_ignored", "U08", "lengths are not passed to the kernel"),
    ),
    controls=(_control("right_paged"),),
    golden=lambda: [replace(BASE, tokens=3, keys=20, page=6, sequences=2)],
)

CARD = Card(
    component="indexer",
    summary="FP4 index keys and queries, head weights, scores in three orders, pages and candidates",
    contract={
        "dtypes": "latents, heads, rows and weights bf16; records uint8; scores fp32 (FP32) or bf16",
        "rounding": "product, norm and rotation of a key each to bf16, then Q4i; scores as ScoreOrder says",
        "records": "64 bytes of e2m1, the even element in the low nibble, then 4 UE8M0 bytes; any sign of zero",
        "pages": "the codes of all entries of a page, then their scales",
        "invisible": "entries at or beyond the length, blocks and pages of −1: −inf, and never read",
        "precondition": "dot products exact in fp32 (group scales within 2^11), otherwise bits are not promised",
        "NaN": "a NaN in a visible key comes out as NaN",
    },
    ops=(VISIBLE, KEYS_OP, QUERIES, WEIGHTS, *(_score_op(order) for order in ScoreOrder), PAGED),
    equivalents=(
        Equivalent(
            name="the factor 2^-6 of the weights left out",
            reason="a positive power of two scales every score alike: no ranking changes (the weights themselves do)",
        ),
        Equivalent(
            name="head of weight 0 added", reason="t · 0 + A = A in every order, and A is +0 at the start of a chain"
        ),
    ),
)
