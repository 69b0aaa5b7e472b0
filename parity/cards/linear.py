"""How linear layers are checked: floating products, products of quantised bytes alone and by group, widened weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import (
    MXFP4,
    QUANT_FORMATS,
    QuantFormat,
    ScaleKind,
)
from deeptwin.reference.linear import linear_codes
from deeptwin.reference.numerics import SEMANTIC
from deeptwin.reference.quant import quantize

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase, Expect
from ..card import (
    REGIMES,
    Candidate,
    Card,
    Equivalent,
    Inputs,
    Op,
    Output,
    Outputs,
    Peer,
    Relation,
    Sm90Candidate,
    variants,
)
from ..fp8_unit import Fp8Sums, Fp8Unit, fp8_unit_sums
from ..relations import CallFn, Context, Variant, batch_invariant, pick_rows, row_chunks, take
from ..rules import Bitwise, Budget

_mutant, _control = variants("linear")
PEERS = "deeptwin.parity.peers.linear"
OPTIMIZED = "deeptwin.optimized.linear"
ALL_REGIMES = (*REGIMES, "zeros", "ties", "tiny", "huge", "cancel", "constant")

# bf16 operands have no lower precision to fall back to (TF32 holds them exactly): what is left is the order of the sum,
# and matrix units that cut their accumulator towards zero after every step, 320 times in a row of 5120. Measured on
# 3 600 judgements (4 shapes up to 5120 wide, 6 regimes, 50 seeds; one sum, blocks backwards, a unit that cuts): worst
# row 121 (the cutting unit on peaked rows), total 89, element 0.45 of its limit, mean signed error 139 units. TF32
# operands are off by some 2^12 units, a result through bf16 by 2^14.
F32_PRODUCT = Budget(
    kind="fp32 product", floor=1.0, row=200.0, total=150.0, element_factor=64.0, element_slack=256.0, bias=256.0
)
RULES = {torch.bfloat16: Budget(kind="bf16 product"), torch.float32: F32_PRODUCT}


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """`tokens` rows of `width` times `features` rows; `dtype` is that of the operands, `out` of the result."""

    tokens: int
    features: int
    width: int
    bias: bool = False
    dtype: str = "bf16"
    out: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        bias = "-bias" if self.bias else ""
        return f"t{self.tokens}-f{self.features}-m{self.width}{bias}-{self.dtype}-{self.out}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class CodesCase:
    """The same from bytes: rows in the format named `x`, the weight in the one named `w`."""

    tokens: int
    features: int
    width: int
    x: str = "q8"
    w: str = "fp8_32x32"
    add: bool = False
    out: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        add = "-add" if self.add else ""
        return f"t{self.tokens}-f{self.features}-m{self.width}-{self.x}-{self.w}{add}-{self.out}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class GroupedCase:
    """Experts with `sizes` rows each."""

    sizes: tuple[int, ...]
    features: int
    width: int
    x: str = "q8"
    w: str = "mxfp4"
    index: str = "int32"
    out: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        sizes = ".".join(map(str, self.sizes))
        return f"y{sizes}-f{self.features}-m{self.width}-{self.x}-{self.w}-{self.index}-{self.out}-{self.regime}"

    @property
    def tokens(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, kw_only=True)
class SlotsCase:
    """Experts with `counts` rows each in shares of `room` rows; `order` names the expert of every share."""

    counts: tuple[int, ...]
    room: int = 128
    order: tuple[int, ...] = ()
    features: int = 72
    width: int = 256
    x: str = "fp8_1x128"
    w: str = "fp8_128x128"
    regime: str = "normal"

    @property
    def id(self) -> str:
        counts = ".".join(map(str, self.counts))
        order = "-o" + ".".join(map(str, self.order)) if self.order else ""
        return f"y{counts}of{self.room}{order}-f{self.features}-m{self.width}-{self.x}-{self.w}-{self.regime}"

    @property
    def tokens(self) -> int:
        return len(self.counts) * self.room


@dataclass(frozen=True, kw_only=True)
class WidenCase:
    """A weight whose scales lie at most `spread` exponents apart inside a block, the largest byte being `top`."""

    features: int
    width: int
    spread: int = 11
    top: int = 125
    out: str = "fp8_32x32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"f{self.features}-m{self.width}-spread{self.spread}-top{self.top}-{self.out}-{self.regime}"


# inputs


def _weight(rng: np.random.Generator, features: int, width: int, regime: str) -> Tensor:
    """Weights whose tiles of 32 × 32 differ in size by powers of two, so that no scale stands for its neighbour."""
    w = draws.rows(
        rng, features, width, dtype=torch.float32, regime=regime if regime in ("ties", "mean1") else "normal"
    )
    tiles = rng.integers(-3, 4, (-(-features // 32), -(-width // 32)))
    sizes = torch.from_numpy(np.exp2(tiles.astype(np.float32)))
    spread = sizes.repeat_interleave(32, 0)[:features].repeat_interleave(32, 1)[:, :width]
    return w * spread * max(width, 1) ** -0.5


def _rows(rng: np.random.Generator, tokens: int, width: int, regime: str, dtype: torch.dtype) -> Tensor:
    """Rows of a regime; neighbouring groups of 32 differ in size."""
    x = draws.rows(rng, tokens, width, dtype=torch.float32, regime=regime)
    sizes = torch.from_numpy(np.exp2(rng.integers(-2, 3, -(-width // 32)).astype(np.float32)))
    return (x * sizes.repeat_interleave(32)[:width]).to(dtype)


def draw_linear(case: LinearCase, rng: np.random.Generator) -> Inputs:
    """Rows and weights as views of wider rows whose rest is NaN."""
    dtype = draws.DTYPES[case.dtype]
    bias = draws.normal(rng, case.features, dtype=torch.bfloat16).to(dtype) if case.bias else None
    return {
        "x_tm": draws.strided(_rows(rng, case.tokens, case.width, case.regime, dtype), pad=8),
        "w_fm": draws.strided(_weight(rng, case.features, case.width, case.regime).to(dtype), pad=8),
        "bias_f": bias,
        "dtype": draws.DTYPES[case.out],
    }


def _operand(x: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    codes, sf = quantize(x, fmt=fmt)
    return draws.strided(codes, pad=16), draws.strided(
        sf.to(torch.float32 if fmt.scale is ScaleKind.F32 else sf.dtype), pad=4
    )


def draw_codes(case: CodesCase, rng: np.random.Generator) -> Inputs:
    """Quantised rows and weights as views of wider rows; what lies behind them is 0xFF, NaN in every format."""
    x_fmt, w_fmt = QUANT_FORMATS[case.x], QUANT_FORMATS[case.w]
    x_q, x_sf = _operand(_rows(rng, case.tokens, case.width, case.regime, torch.bfloat16), x_fmt)
    w_q, w_sf = _operand(_weight(rng, case.features, case.width, case.regime), w_fmt)
    add = None
    if case.add:
        add = draws.strided(draws.normal(rng, case.tokens, case.features, dtype=draws.DTYPES[case.out]), pad=8)
    return {
        "x_q": x_q,
        "x_sf": x_sf,
        "w_q": w_q,
        "w_sf": w_sf,
        "add_tf": add,
        "x_fmt": x_fmt,
        "w_fmt": w_fmt,
        "dtype": draws.DTYPES[case.out],
    }


def draw_quant(case: CodesCase, rng: np.random.Generator) -> Inputs:
    """bf16 rows and a quantised weight."""
    x_fmt, w_fmt = QUANT_FORMATS[case.x], QUANT_FORMATS[case.w]
    x = _rows(rng, case.tokens, case.width, case.regime, torch.bfloat16)
    w_q, w_sf = _operand(_weight(rng, case.features, case.width, case.regime), w_fmt)
    return {
        "x_tm": draws.strided(x, pad=8),
        "w_q": w_q,
        "w_sf": w_sf,
        "x_fmt": x_fmt,
        "w_fmt": w_fmt,
        "dtype": draws.DTYPES[case.out],
    }


def _expert_weights(
    case: GroupedCase | SlotsCase, experts: int, fmt: QuantFormat, rng: np.random.Generator
) -> dict[str, Tensor]:
    each = [_operand(_weight(rng, case.features, case.width, case.regime), fmt) for _ in range(experts)]
    codes = torch.stack([codes.contiguous().view(torch.uint8) for codes, _ in each])
    return {
        "w_q": draws.strided(codes, pad=16).view(each[0][0].dtype),
        "w_sf": draws.strided(torch.stack([sf for _, sf in each]), pad=4),
    }


def draw_grouped(case: GroupedCase, rng: np.random.Generator) -> Inputs:
    """Rows in the order of their experts, and a weight of its own for every expert."""
    x_fmt, w_fmt = QUANT_FORMATS[case.x], QUANT_FORMATS[case.w]
    x_q, x_sf = _operand(_rows(rng, case.tokens, case.width, case.regime, torch.bfloat16), x_fmt)
    return {
        "x_q": x_q,
        "x_sf": x_sf,
        **_expert_weights(case, len(case.sizes), w_fmt, rng),
        "group_sizes_e": torch.tensor(case.sizes, dtype=getattr(torch, case.index)),
        "x_fmt": x_fmt,
        "w_fmt": w_fmt,
        "dtype": draws.DTYPES[case.out],
    }


def draw_slots(case: SlotsCase, rng: np.random.Generator) -> Inputs:
    """Rows without an expert are bytes 0xFF, NaN in every format; what stands where results go is no result."""
    order = case.order or tuple(range(len(case.counts)))
    x_fmt, w_fmt = QUANT_FORMATS[case.x], QUANT_FORMATS[case.w]
    x_q, x_sf = _operand(_rows(rng, case.tokens, case.width, case.regime, torch.bfloat16), x_fmt)
    place_y = torch.arange(case.tokens) % case.room
    named_y = place_y < torch.tensor(case.counts).repeat_interleave(case.room)
    for part in (x_q, x_sf):
        part.view(torch.uint8)[~named_y] = 0xFF
    return {
        "x_q": x_q,
        "x_sf": x_sf,
        **_expert_weights(case, 1 + max(order, default=0), w_fmt, rng),
        "expert_y": torch.where(named_y, torch.tensor(order).repeat_interleave(case.room), -1).to(torch.int32),
        "before_yf": draws.normal(rng, case.tokens, case.features, dtype=torch.bfloat16, scale=100.0),
        "x_fmt": x_fmt,
        "w_fmt": w_fmt,
    }


def draw_widen(case: WidenCase, rng: np.random.Generator) -> Inputs:
    """Every code under every shift that the spread admits; with regime zeros, empty groups far below the others."""
    groups = case.width // 32
    codes = torch.from_numpy(rng.integers(0, 256, (case.features, case.width // 2), dtype=np.uint8))
    byte = torch.from_numpy(rng.integers(case.top - case.spread, case.top + 1, (case.features, groups), dtype=np.int64))
    byte[:: max(case.features // 4, 1)] = case.top
    if case.regime == "zeros":
        empty = torch.from_numpy(rng.random((case.features, groups)) < 0.3)
        codes = torch.where(empty.repeat_interleave(16, 1), codes & 0x88, codes)
        byte = torch.where(empty, 1, byte)
    return {
        "w_q": draws.strided(codes, pad=16),
        "w_sf": draws.strided(byte.clamp(min=0).to(torch.uint8), pad=4),
        "fmt": MXFP4,
        "out_fmt": QUANT_FORMATS[case.out],
    }


# which cases


def _unique(found: list[Any]) -> list[Any]:
    return list({case.id: case for case in found}.values())


def cases_linear(full: bool) -> list[LinearCase]:
    """Regimes in either result dtype, edges of every tile axis, odd widths, production widths, fp32 operands."""
    base = LinearCase(tokens=33, features=40, width=160)
    found = [replace(base, regime=r) for r in ALL_REGIMES]
    found += [replace(base, out="fp32", bias=True, regime=r) for r in REGIMES]
    found += [
        replace(base, bias=True),
        replace(base, tokens=1, features=1, width=1),
        replace(base, tokens=2, features=24, width=24),
        replace(base, tokens=65, features=130, width=72),
        replace(base, tokens=0),
        replace(base, tokens=3, width=0, bias=True),
        replace(base, tokens=2, features=129, width=2304),
        replace(base, tokens=1, features=384, width=1280, out="fp32"),
        replace(base, tokens=2, features=64, width=5120, out="fp32"),
        replace(base, dtype="fp32", out="fp32", width=96),
        replace(base, dtype="fp32", tokens=5, regime="mean1"),
        replace(base, dtype="fp16", tokens=5),
    ]
    if full:
        found += [
            LinearCase(tokens=t, features=f, width=w, out=o, regime=r)
            for t, f, w, o, r in product((1, 64, 129), (127,), (63, 65), ("bf16", "fp32"), ("normal", "mean1"))
        ]
        found += [LinearCase(tokens=2, features=128, width=w) for w in (1280, 7168, 9216)]
        # as many tiles of 64 x 128 as an H200 has cores, and a column of tiles more
        found += [LinearCase(tokens=704, features=f, width=32) for f in (1536, 1664)]
    return _unique(found)


def cases_codes(full: bool) -> list[CodesCase]:
    """Regimes on V4.1's formats, every pair of formats, edges, what is added, production widths."""
    base = CodesCase(tokens=33, features=72, width=160)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "ties", "tiny", "cancel")]
    mixed = replace(base, features=136, w="mxfp4")
    found += [replace(mixed, regime=r) for r in REGIMES]
    v3 = replace(base, tokens=9, features=136, width=384, x="fp8_1x128", w="fp8_128x128")
    found += [replace(v3, regime=r) for r in (*REGIMES, "constant")]
    found += [
        replace(base, add=True, tokens=9),
        replace(base, add=True, out="fp32", tokens=9),
        replace(mixed, out="fp32", tokens=9),
        replace(v3, out="fp32", add=True),
        replace(v3, w="mxfp4", tokens=3),
        replace(v3, x="q8", tokens=3),
        replace(v3, x="fp8_1x128_ue8m0", w="fp8_32x32", tokens=3),
        replace(v3, x="fp8_1x128_ue8m0", w="mxfp4", tokens=3),
        replace(v3, x="fp8_1x128_ue8m0", w="fp8_128x128_ue8m0", regime="mean1"),
        *SILICON,
        replace(base, tokens=1, features=1, width=32),
        replace(base, tokens=2, features=24, width=96, w="mxfp4"),
        replace(base, tokens=65, features=129, width=128),
        replace(base, tokens=0),
        replace(base, tokens=2, features=40, width=5120),
        replace(mixed, tokens=2, features=40, width=2304),
        replace(v3, tokens=2, features=129, width=7168),
    ]
    if full:
        pairs = [("q8", "fp8_32x32"), ("q8", "mxfp4"), ("fp8_1x128", "fp8_128x128"), ("fp8_1x128_ue8m0", "mxfp4")]
        found += [
            CodesCase(tokens=t, features=f, width=384, x=x, w=w, out=o, regime=r)
            for (x, w), t, f, o, r in product(pairs, (1, 65), (127,), ("bf16", "fp32"), ("normal", "mean1"))
        ]
        found += [CodesCase(tokens=2, features=128, width=w) for w in (1280, 8192)]
    return _unique(found)


def cases_quant(full: bool) -> list[CodesCase]:
    """Regimes on each pair of formats that a model uses, production widths."""
    base = CodesCase(tokens=33, features=72, width=160)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "tiny", "ties")]
    v3 = CodesCase(tokens=5, features=136, width=384, x="fp8_1x128", w="fp8_128x128")
    found += [replace(v3, regime=r) for r in REGIMES]
    found += [
        replace(base, w="mxfp4", regime="mean1"),
        replace(v3, x="fp8_1x128_ue8m0", w="mxfp4"),
        replace(base, tokens=0),
        replace(base, tokens=9, out="fp32"),
        replace(base, tokens=2, features=40, width=5120),
    ]
    if full:
        found += [
            CodesCase(tokens=t, features=96, width=w, x=x, w=wf, regime=r)
            for (x, wf), t, w, r in product(
                (("q8", "fp8_32x32"), ("fp8_1x128", "fp8_128x128")), (65,), (128,), ALL_REGIMES
            )
        ]
    return _unique(found)


def cases_grouped(full: bool) -> list[GroupedCase]:
    """Sizes 0, 1 and beyond a tile of 64 rows, in every place; all rows in one expert; no rows at all."""
    base = GroupedCase(sizes=(3, 0, 5, 1, 0, 2), features=72, width=128)
    found = [replace(base, regime=r) for r in REGIMES]
    found += [
        replace(base, sizes=(0, 0, 7, 0)),
        replace(base, sizes=(63, 66, 0, 1), features=24, width=64),
        replace(base, sizes=(1, 64, 65), features=24, width=64, w="fp8_32x32"),
        replace(base, sizes=(1,) * 9, features=24, width=64),
        replace(base, sizes=(0, 0, 0)),
        replace(base, sizes=(5,)),
        replace(base, x="fp8_1x128", w="fp8_128x128", width=256, features=136, index="int64"),
        replace(base, w="fp8_32x32", index="int64", out="fp32"),
        *GROUPED_SILICON,
    ]
    if full:
        shapes = ((64, 0, 64), (128, 1), (1, 127, 0, 0, 2), (0, 200), (65, 65, 65), tuple(range(12)))
        found += [
            GroupedCase(sizes=s, features=72, width=128, w=w, regime=r)
            for s, w, r in product(shapes, ("mxfp4", "fp8_32x32"), ("normal", "mean1"))
        ]
    return _unique(found)


def cases_slots(full: bool) -> list[SlotsCase]:
    """Regimes, full and empty shares, ends inside and between tiles, an expert with two shares, V4.1's formats."""
    base = SlotsCase(counts=(3, 0, 70))
    found = [replace(base, regime=r) for r in REGIMES]
    found += [
        replace(base, counts=(128, 64), width=128),
        replace(base, counts=(2, 66, 1), order=(1, 0, 1), width=128),
        replace(base, counts=(130, 0), room=256, width=128, features=8),
        replace(base, counts=()),
        replace(base, counts=(0, 0), width=128),
        replace(base, counts=(5, 1), x="q8", w="mxfp4", width=64, features=24),
    ]
    if full:
        found += [
            replace(base, counts=c, room=256, features=136, regime=r)
            for c, r in product(((130, 16, 0, 200), (1, 255, 64, 65)), ("normal", "mean1"))
        ]
    return _unique(found)


def cases_widen(full: bool) -> list[WidenCase]:
    """Spreads up to 14 exponents, the floor of the scale byte, empty groups, partial blocks, a coarser block."""
    base = WidenCase(features=64, width=128)
    found = [replace(base, spread=s) for s in (0, 11, 14)]
    found += [
        replace(base, regime="zeros"),
        replace(base, top=6, spread=6),
        replace(base, top=3, spread=3),
        replace(base, top=254, spread=14),
        replace(base, features=33, width=96),
        replace(base, features=1, width=32),
        replace(base, features=128, width=256, out="fp8_128x128_ue8m0", spread=14),
    ]
    if full:
        found += [WidenCase(features=f, width=w, spread=s) for f, w, s in product((31, 128), (64, 2304), (5, 14))]
    return _unique(found)


# relation hooks


def _as_bytes(inputs: Inputs) -> Inputs:
    # filling and moving rows is not implemented for the narrow floats
    return inputs | {n: inputs[n].contiguous().view(torch.uint8) for n in ("x_q", "x_sf")}


def _typed(call: Inputs, like: Inputs) -> Inputs:
    return call | {n: call[n].contiguous().view(like[n].dtype) for n in ("x_q", "x_sf")}


def independent_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows alone, permuted, duplicated, in chunks, and beside rows whose every byte is 0xFF."""
    plain = _as_bytes(inputs)
    for variant in (*batch_invariant(plain, context), *row_chunks(plain, context)):
        yield replace(variant, calls=tuple(_typed(call, inputs) for call in variant.calls))
    n = inputs["x_q"].shape[0]
    if n > 1:
        spoiled = take(plain, context.op, list(range(n)))
        for name in ("x_q", "x_sf"):
            spoiled[name][1:] = 0xFF
        pick = pick_rows(context.op, [0])
        yield Variant(
            label="row 0 beside bytes 0xFF",
            calls=(_typed(spoiled, inputs),),
            join=lambda results: pick(results[0]),
            expect=pick,
        )


def features_in_parts(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Features in parts of whole tiles, as ranks would hold them, and rows in chunks."""
    yield from row_chunks(inputs, context)
    w = inputs["w_fm"]
    for size in (32, 64):
        parts = []
        for start in range(0, w.shape[0], size):
            bias = inputs["bias_f"]
            part = {"w_fm": w[start : start + size], "bias_f": None if bias is None else bias[start : start + size]}
            parts.append(inputs | part)
        if len(parts) > 1:
            yield Variant(label=f"parts of {size} features", calls=tuple(parts), join=_joined_features)


def _joined_features(results: list[Outputs]) -> Outputs:
    return {"y_tf": torch.cat([r["y_tf"] for r in results], 1)}


def quantised_first(inputs: Inputs, outputs: Outputs, partner: CallFn | None) -> tuple[Outputs, Outputs]:
    """The product of the bytes that the quantiser writes, byte for byte."""
    assert partner is not None
    x_q, x_sf = quantize(inputs["x_tm"], fmt=inputs["x_fmt"])
    rest = {n: inputs[n] for n in ("w_q", "w_sf", "x_fmt", "w_fmt", "dtype")}
    return outputs, partner({"x_q": x_q, "x_sf": x_sf, "add_tf": None, **rest})


def experts_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Every expert's rows through the plain product: the same bytes as in the batch of all experts."""
    sizes = inputs["group_sizes_e"].tolist()
    starts = np.cumsum([0, *sizes])
    rest = {n: inputs[n] for n in ("x_fmt", "w_fmt", "dtype")}
    calls = tuple(
        {
            "x_q": inputs["x_q"][starts[e] : starts[e + 1]],
            "x_sf": inputs["x_sf"][starts[e] : starts[e + 1]],
            "w_q": inputs["w_q"][e],
            "w_sf": inputs["w_sf"][e],
            "add_tf": None,
            **rest,
        }
        for e in range(len(sizes))
        if sizes[e]
    )
    if calls:
        yield Variant(
            label="experts apart", calls=calls, join=lambda results: {"y_yf": torch.cat([r["y_tf"] for r in results])}
        )


def shares_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Every expert's rows through the plain product: the same bytes as in the buffer."""
    expert_y = inputs["expert_y"]
    present = sorted({e for e in expert_y.tolist() if e >= 0})
    rows = [(expert_y == e).nonzero()[:, 0] for e in present]
    plain = _as_bytes(inputs)
    rest = {n: inputs[n] for n in ("x_fmt", "w_fmt")}
    calls = tuple(
        _typed({n: plain[n][rows_y] for n in ("x_q", "x_sf")}, inputs)
        | {"w_q": inputs["w_q"][e], "w_sf": inputs["w_sf"][e], "add_tf": None, "dtype": torch.bfloat16, **rest}
        for e, rows_y in zip(present, rows, strict=True)
    )
    if calls:
        yield Variant(
            label="experts apart",
            calls=calls,
            join=lambda results: {"y_yf": torch.cat([r["y_tf"] for r in results])},
            expect=pick_rows(context.op, torch.cat(rows).tolist()),
        )


def other_padding(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """What stands in rows without an expert, and where they would go, changes no other row."""
    named_y = inputs["expert_y"] >= 0
    plain = _as_bytes(inputs)
    for name in ("x_q", "x_sf"):
        plain[name] = torch.where(named_y[:, None], plain[name], 0)
    call = _typed(plain, inputs) | {"before_yf": torch.zeros_like(inputs["before_yf"])}
    pick = pick_rows(context.op, named_y.nonzero()[:, 0].tolist())
    yield Variant(label="zeros behind the rows", calls=(call,), join=lambda results: pick(results[0]), expect=pick)


def same_slots_again(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same call again, on fresh poisoned outputs and after a call whose buffer is full."""
    full = inputs | {"expert_y": torch.zeros_like(inputs["expert_y"])}
    for launch in range(1, 20 if context.full else 3):
        yield Variant(
            label=f"launch {launch}",
            calls=(inputs,),
            first=full if launch % 2 == 0 else None,
            fresh_out=launch % 2 == 1,
        )


def rows_of_experts(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows moved inside their expert, experts in another order, one row of each expert alone, poisoned mates."""
    sizes = inputs["group_sizes_e"].tolist()
    starts = np.cumsum([0, *sizes])
    spans = [list(range(starts[e], starts[e + 1])) for e in range(len(sizes))]
    plain = _as_bytes(inputs)

    def variant(label: str, experts: list[int], rows: list[list[int]]) -> Variant:
        flat = [r for span in rows for r in span]
        call = _typed(take(plain, context.op, flat), inputs)
        counts = torch.tensor([len(span) for span in rows], dtype=inputs["group_sizes_e"].dtype)
        index = torch.tensor(experts)
        w_q = inputs["w_q"].contiguous().view(torch.uint8)[index].view(inputs["w_q"].dtype)
        call |= {"w_q": w_q, "w_sf": inputs["w_sf"][index], "group_sizes_e": counts}
        return Variant(label=label, calls=(call,), expect=pick_rows(context.op, flat))

    everyone = list(range(len(sizes)))
    yield variant("rows permuted in their expert", everyone, [list(context.rng.permutation(s)) for s in spans])
    order = [int(e) for e in context.rng.permutation(len(sizes))]
    yield variant("experts permuted", order, [spans[e] for e in order])
    yield variant("first row of each expert", everyone, [span[:1] for span in spans])
    yield variant("every row twice", everyone, [[r for r in span for _ in range(2)] for span in spans])
    if len(spans) > 1:
        yield variant("last expert left out", everyone[:-1], spans[:-1])
    kept = [span[0] for span in spans if span]
    spoiled = take(plain, context.op, list(range(sum(sizes))))
    others = torch.tensor([r for r in range(sum(sizes)) if r not in kept], dtype=torch.int64)
    for name in ("x_q", "x_sf"):
        spoiled[name][others] = 0xFF
    pick = pick_rows(context.op, kept)
    yield Variant(
        label="first rows beside bytes 0xFF",
        calls=(inputs | {n: _typed(spoiled, inputs)[n] for n in ("x_q", "x_sf")},),
        join=lambda results: pick(results[0]),
        expect=pick,
    )


def same_rows_again(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same call twice, on fresh poisoned outputs and after a call with other sizes."""
    moved = inputs | {"group_sizes_e": inputs["group_sizes_e"].flip(0)}
    for launch in range(1, 20 if context.full else 3):
        first = moved if launch % 2 == 0 else None
        yield Variant(label=f"launch {launch}", calls=(inputs,), first=first, fresh_out=launch % 2 == 1)


def few_calls(case: Any) -> bool:
    """Relations make many calls: they run where an order of summation shows, on few elements."""
    size = case.tokens * case.features * case.width
    return case.regime in ("normal", "mean1", "file") and (case.regime == "file" or size <= 250_000)


def lean(case: Any) -> bool:
    """Where a difference in the order shows best: fp32 results, and the regime whose sums lose most; in few rows, as
    the sizes of the batch at the edges of a tile are variants of the relation.
    """
    if case.regime == "file":
        return True
    size = case.tokens * case.features * case.width
    telling = case.out == "fp32" or case.regime == "mean1" or size <= 20_000
    return few_calls(case) and telling and 1 < case.tokens <= 40


# goldens


def golden_linear() -> list[LinearCase]:
    """Both result dtypes, a bias, fp32 operands."""
    base = LinearCase(tokens=3, features=5, width=72)
    return [base, replace(base, out="fp32", bias=True), replace(base, dtype="fp32", out="fp32", regime="mean1")]


def golden_codes() -> list[CodesCase]:
    """Every pair of formats of a released model."""
    base = CodesCase(tokens=3, features=40, width=64)
    v3 = replace(base, width=256, x="fp8_1x128", w="fp8_128x128", features=130)
    return [base, replace(base, w="mxfp4", add=True), v3, replace(v3, features=8, x="fp8_1x128_ue8m0", w="mxfp4")]


def golden_quant() -> list[CodesCase]:
    """V4.1 and V3."""
    base = CodesCase(tokens=2, features=40, width=64)
    return [base, replace(base, width=128, x="fp8_1x128", w="fp8_128x128")]


def golden_grouped() -> list[GroupedCase]:
    """Sizes 0, 1 and more."""
    return [GroupedCase(sizes=(2, 0, 1), features=8, width=64)]


def golden_widen() -> list[WidenCase]:
    """The widest spread, and empty groups."""
    base = WidenCase(features=32, width=64, spread=14)
    return [base, replace(base, spread=11, regime="zeros")]


def _repeats(only: Callable[[Any], bool]) -> Relation:
    return Relation(name="run_to_run", axis="repeats", only=only)


def golden_slots() -> list[SlotsCase]:
    """A full share, one with a row, an empty one."""
    return [SlotsCase(counts=(1, 0, 2), features=8, width=64, x="q8", w="mxfp4")]


def not_native(case: Any) -> str | None:
    """Why the block-scaled instruction does not take a case."""
    if case.regime == "file":
        return None
    scales = {QUANT_FORMATS[case.x].scale, QUANT_FORMATS[case.w].scale}
    if scales != {ScaleKind.UE8M0}:
        return "the block-scaled instruction takes UE8M0 scales"
    return f"the block-scaled instruction takes widths of 128·n, got {case.width}" if case.width % 128 else None


def beyond_deep_gemm(case: LinearCase) -> str | None:
    """Why DeepGEMM's bf16 product does not take a case."""
    fits = case.dtype == "bf16" and not case.bias and case.tokens > 0 and case.width > 0
    return None if fits and not (case.width % 8 or case.features % 8) else "bf16, no bias, widths and features of 8·n"


LINEAR = Op(
    name="linear",
    reference="deeptwin.reference.linear:linear",
    outputs=(Output(name="y_tf", rule=RULES),),
    cases=cases_linear,
    draw=draw_linear,
    rows={"x_tm": 0},
    out_rows={"y_tf": 0},
    tile=64,
    relations=(
        Relation(name="batch_invariant", axis="rows", only=lean),
        Relation(name="chunk_invariant", axis="row chunks, parts of the features", hook=features_in_parts, only=lean),
        _repeats(lean),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.linear:linear_triton"),
        Sm90Candidate(
            name="deep-gemm",
            function="deeptwin.optimized.linear:linear_deep_gemm",
            needs=("deep_gemm",),
            declines=beyond_deep_gemm,
        ),
    ),
    builds=(
        BuildCase(
            name="bf16-m5120",
            kernel="deeptwin.kernels.triton_ops.linear:_linear",
            launch="deeptwin.parity.builds.launches.linear:lin16_5120",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="fp32-out-m5120-bias",
            kernel="deeptwin.kernels.triton_ops.linear:_linear",
            launch="deeptwin.parity.builds.launches.linear:lin32_5120_bias",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="fp32-m1024",
            kernel="deeptwin.kernels.triton_ops.linear:_linear",
            launch="deeptwin.parity.builds.launches.linear:lin32_fp32",
            expect=NO_PRODUCT | MATRIX,
        ),
    ),
    peers=(
        Peer(
            name="torch",
            function=f"{PEERS}:torch_fp64",
            needs=(),
            explains="torch.nn.functional.linear in fp64, rounded once",
        ),
    ),
    mutants=(
        _mutant("truncated", "R1", "the result is truncated to bf16"),
        _mutant("accumulator_bf16", "U09", "the sum is kept in bf16"),
        _mutant("accumulator_fp16", "U09", "the sum is kept in fp16"),
        _mutant("fp32_through_bf16", "U17", "an fp32 result is rounded to bf16 on the way"),
        _mutant("operands_tf32", "U17", "fp32 operands are rounded to TF32"),
        _mutant("operands_bf16", "U17", "fp32 operands are rounded to bf16"),
        _mutant("tail_dropped", "U80", "columns beyond the last whole step are not summed"),
        _mutant("pairs_swapped", "U57", "neighbouring columns of the rows change places"),
        _mutant("features_tail_unwritten", "U81", "features beyond a multiple of 16 are left as they were"),
        _mutant("features_shifted", "U81", "features of the second tile are off by one"),
        _mutant("bias_missing", "U49", "the bias is left out"),
        _mutant("bias_after_rounding", "U86", "the product is rounded before the bias is added"),
        _mutant("last_row_stale", "U75", "the last row is left unwritten"),
        _mutant("one_tile_a_core", "U83", "tiles are mixed up when there are as many of them as cores, only then"),
        _mutant("split_depends_on_batch", "U73", "the width is split by the number of rows"),
        _mutant("other_order_beyond_8_rows", "U72", "more than eight rows are summed in another order"),
        _mutant("not_deterministic", "U10", "a counter leaks into the result: the second launch differs"),
    ),
    controls=(
        _control("right_wide_sum"),
        _control("right_blocks_backwards"),
        _control("right_truncating_unit"),
    ),
    golden=golden_linear,
)


SILICON = tuple(
    case
    for base in (CodesCase(tokens=20, features=40, width=256), CodesCase(tokens=66, features=40, width=128))
    for case in (replace(base, regime="mean1"), replace(base, regime="peaked"), replace(base, regime="cancel"))
) + (
    CodesCase(tokens=12, features=72, width=256, x="fp8_1x128", w="fp8_128x128", regime="mean1"),
    *(
        CodesCase(tokens=33, features=136, width=w, x="fp8_1x128", w="fp8_128x128", out=out, regime=r)
        for w, r in (*product((128,), REGIMES), (1024, "normal"), (1024, "mean1"))
        for out in ("fp32", "bf16")
    ),
    CodesCase(tokens=33, features=136, width=256, x="fp8_1x128", w="fp8_128x128", add=True, out="fp32"),
)


def on_silicon(case: CodesCase) -> str | None:
    """Shapes for the kernels of one chip, which others are judged on elsewhere."""
    return "multiples of what the FP8 unit takes: an interpreter is judged on other widths" if case in SILICON else None


def outside_deep_gemm(case: CodesCase) -> str | None:
    """Why DeepGEMM's FP8 product does not take a case."""
    fits = (case.x, case.w, case.out, case.add) == ("fp8_1x128", "fp8_128x128", "bf16", False)
    fits = fits and case.tokens > 0 and case.width % 128 == 0 and case.features % 8 == 0
    return None if fits else "fp8_1x128 rows by fp8_128x128 weights of 8·n features only"


def outside_deep_gemm_fp32(case: CodesCase) -> str | None:
    """Why DeepGEMM's FP8 product to fp32 does not take a case."""
    fits = (case.x, case.w, case.out) == ("fp8_1x128", "fp8_128x128", "fp32")
    fits = fits and case.tokens > 32 and case.width % 128 == 0 and case.features % 8 == 0
    return None if fits else "more than 32 fp8_1x128 rows by fp8_128x128 weights of 8·n features only"


V3_GROUPED = GroupedCase(sizes=(3, 0, 33), features=136, width=256, x="fp8_1x128", w="fp8_128x128", regime="mean1")
GROUPED_SILICON = (
    *(replace(V3_GROUPED, regime=r) for r in ("mean1", "peaked", "flat")),
    replace(V3_GROUPED, sizes=(128, 0, 256), features=8, width=128),
    replace(V3_GROUPED, sizes=(1, 130), features=72),
    # more than 64 rows an expert: the larger tile, whose last one overlaps the one before
    replace(V3_GROUPED, sizes=(200, 5, 0, 195), regime="normal"),
    replace(V3_GROUPED, sizes=(200, 5, 0, 195), x="q8", w="fp8_32x32", regime="normal"),
    replace(V3_GROUPED, x="q8", w="fp8_32x32"),
    # small enough for relations: rows and mates, and overlapping tiles beside those of the plain product
    replace(V3_GROUPED, sizes=(3, 0, 5, 1), features=40, width=128),
    replace(V3_GROUPED, sizes=(193,), features=8, width=128),
)


def grouped_on_silicon(case: GroupedCase) -> str | None:
    """`on_silicon`, for experts."""
    return "V3's formats by the units of one chip: an interpreter has a case" if case in GROUPED_SILICON else None


def ungrouped_by_tilelang(case: GroupedCase) -> str | None:
    """Why the kernel with specialised warps does not take a case."""
    pairs = (("fp8_1x128", "fp8_128x128"), ("fp8_1x128_ue8m0", "fp8_128x128_ue8m0"), ("q8", "fp8_32x32"))
    fits = (case.x, case.w) in pairs and case.out == "bf16" and not (case.width % 128 or case.features % 8)
    return None if fits else "blocks of 128 or of 32, widths of 128·n and 8·n features to bf16"


def ungrouped_by_deep_gemm(case: GroupedCase) -> str | None:
    """Why DeepGEMM's grouped FP8 products do not take a case."""
    fits = (case.x, case.w, case.out) == ("fp8_1x128", "fp8_128x128", "bf16")
    fits = fits and case.tokens > 0 and case.features % 8 == 0
    return None if fits else "fp8_1x128 rows by fp8_128x128 weights of 8·n features to bf16 only"


def slots_outside_deep_gemm(case: SlotsCase) -> str | None:
    """Why DeepGEMM's contiguous form does not take a case."""
    fits = (case.x, case.w) == ("fp8_1x128", "fp8_128x128") and case.tokens > 0
    return None if fits and case.features % 8 == 0 else "fp8_1x128 rows by fp8_128x128 weights of 8·n features only"


def slots_outside_masked(case: SlotsCase) -> str | None:
    """Why DeepGEMM's masked form does not take a case."""
    return slots_outside_deep_gemm(case) or ("a share for each expert, in their order" if case.order else None)


def outside_specialised(case: CodesCase) -> str | None:
    """Why the kernel with specialised warps does not take a case."""
    pairs = (("fp8_1x128", "fp8_128x128"), ("fp8_1x128_ue8m0", "fp8_128x128_ue8m0"), ("q8", "fp8_32x32"))
    if (case.x, case.w) not in pairs or case.add or case.out != "bf16":
        return "blocks of 1 x 128 with 128 x 128 or of 1 x 32 with 32 x 32, to bf16"
    aligned = case.width % 128 == 0 and case.features % 8 == 0
    return None if aligned else f"widths of 128·n and 8·n features, got {case.width} and {case.features}"


def _magnitudes(inputs: Inputs) -> Tensor:
    """The product with the sign bit of every code cleared: scales are positive."""
    plain = {n: (inputs[n].contiguous().view(torch.uint8) & 0x7F).view(inputs[n].dtype) for n in ("x_q", "w_q")}
    add_tf = None if inputs["add_tf"] is None else inputs["add_tf"].abs()
    return linear_codes(**(inputs | plain | {"add_tf": add_tf}), num=SEMANTIC)


def codes_by_unit(inputs: Inputs, features: Tensor) -> Tensor:
    """What the FP8 unit makes of some features."""
    x_fmt, w_fmt = inputs["x_fmt"], inputs["w_fmt"]
    w_q = inputs["w_q"].contiguous().view(torch.uint8)[features].view(inputs["w_q"].dtype)
    w_sf = inputs["w_sf"][features // w_fmt.rows]
    total_tf = fp8_unit_sums((inputs["x_q"], inputs["x_sf"]), (w_q, w_sf), group=x_fmt.group, rows=1)
    return total_tf if inputs["add_tf"] is None else total_tf + inputs["add_tf"][:, features]


# sums by the FP8 unit, of which a sample of features is held to the bits of its model as well. To bf16 what is cut
# shows in all-positive rows as a mean signed error: 0.2 units (1 000 judgements of the model, 50 seeds, evidence/
# fp8-product-bf16.json); DeepGEMM on an H200 0.24 in 8 features of 128 products, and 1.1 of the total limit of others
FP8_BF16 = Budget(kind="bf16 product by the FP8 unit", row=3.0, total=2.0, bias=0.5)
FP8_CODES = {"y_tf": Fp8Sums(rest=FP8_BF16, sums=codes_by_unit)}
# to fp32 all-positive rows lose 2^-8.4 of their magnitudes at worst, 2^-10.2 in all (evidence/fp8-product-fp32.json):
# nothing is averaged over heads as in scores
FP8_F32 = {"y_tf": Fp8Sums(rest=Fp8Unit(reach=_magnitudes, element=2.0**-8, total=2.0**-10), sums=codes_by_unit)}

CODES = Op(
    name="linear_codes",
    reference="deeptwin.reference.linear:linear_codes",
    outputs=(Output(name="y_tf", rule=RULES),),
    cases=cases_codes,
    draw=draw_codes,
    rows={"x_q": 0, "x_sf": 0, "add_tf": 0},
    out_rows={"y_tf": 0},
    tile=64,
    relations=(
        Relation(
            name="batch_invariant",
            axis="rows alone, permuted, duplicated, in chunks, beside garbage",
            hook=independent_rows,
            only=lean,
        ),
        _repeats(lean),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.linear:linear_codes_triton",
            interpreter_declines=on_silicon,
        ),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.linear:linear_codes_tilelang",
            needs=("tilelang",),
            declines=outside_specialised,
            rules=FP8_CODES,
        ),
        Sm90Candidate(
            name="deep-gemm",
            function="deeptwin.optimized.linear:linear_codes_deep_gemm",
            needs=("deep_gemm",),
            declines=outside_deep_gemm,
            rules=FP8_CODES,
        ),
        Sm90Candidate(
            name="deep-gemm-fp32",
            function="deeptwin.optimized.linear:linear_codes_deep_gemm",
            needs=("deep_gemm",),
            declines=outside_deep_gemm_fp32,
            rules=FP8_F32,
        ),
        Sm90Candidate(
            name="deep-gemm-fp32-contract",
            function="deeptwin.optimized.linear:linear_codes_deep_gemm",
            needs=("deep_gemm",),
            declines=outside_deep_gemm_fp32,
            unpromised={"y_tf": "the FP8 unit cuts a sum to 14 bits after every 32 products"},
        ),
        Candidate(
            name="triton-native",
            function="deeptwin.optimized.linear:linear_codes_triton_native",
            archs=("cpu", "sm100"),
            declines=not_native,
            interpreter_declines=on_silicon,
        ),
    ),
    builds=(
        BuildCase(
            name="q8-fp8_32x32-m1280",
            kernel="deeptwin.kernels.triton_ops.linear:_linear_codes",
            launch="deeptwin.parity.builds.launches.linear:codes_32x32",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="q8-mxfp4-m5120",
            kernel="deeptwin.kernels.triton_ops.linear:_linear_codes",
            launch="deeptwin.parity.builds.launches.linear:codes_mxfp4",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="fp8_1x128-fp8_128x128-m18432",
            kernel="deeptwin.kernels.triton_ops.linear:_linear_codes",
            launch="deeptwin.parity.builds.launches.linear:codes_128x128",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="native-q8-fp8_32x32-m8192",
            kernel="deeptwin.kernels.triton_ops.linear_native:_linear_codes_native",
            launch="deeptwin.parity.builds.launches.linear:native_32x32",
            expect={"sm100": Expect(mma="block_scale")},
        ),
        BuildCase(
            name="native-q8-mxfp4-m2304",
            kernel="deeptwin.kernels.triton_ops.linear_native:_linear_codes_native",
            launch="deeptwin.parity.builds.launches.linear:native_mxfp4",
            expect={"sm100": Expect(mma="block_scale")},
        ),
        BuildCase(
            name="tilelang-fp8_1x128-fp8_128x128",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.linear_sm90:product_program",
            launch="deeptwin.parity.builds.launches.linear_tilelang:sm90_128x128",
            expect={"sm90": Expect(mma="wgmma.fp8")},
        ),
        BuildCase(
            name="tilelang-q8-fp8_32x32",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.linear_sm90:product_program",
            launch="deeptwin.parity.builds.launches.linear_tilelang:sm90_32x32",
            expect={"sm90": Expect(mma="wgmma.fp8")},
        ),
        BuildCase(
            name="tilelang-q8-fp8_32x32-m1280",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.linear:linear_codes_program",
            launch="deeptwin.parity.builds.launches.linear_tilelang:sm100_32x32",
            expect={"sm100": Expect(mma="block_scale")},
        ),
        BuildCase(
            name="tilelang-q8-mxfp4-m5120",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.linear:linear_codes_program",
            launch="deeptwin.parity.builds.launches.linear_tilelang:sm100_mxfp4",
            expect={"sm100": Expect(mma="block_scale")},
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function=f"{PEERS}:tile_kernels_linear_codes",
            needs=("tile_kernels",),
            explains="tile_kernels 2.1.0, torch.cast.cast_back of both operands; the product by torch in fp64",
        ),
        Peer(
            name="transformers",
            function=f"{PEERS}:transformers_linear_codes",
            needs=("transformers",),
            explains="the readers of the fine-grained FP8 and MXFP4 integrations; the product by torch in fp64",
        ),
    ),
    mutants=(
        _mutant("codes_truncated", "R1", "the result is truncated to bf16"),
        _mutant("codes_accumulator_bf16", "U09", "the sum is kept in bf16"),
        _mutant("codes_through_bf16", "U17", "an fp32 result is rounded to bf16 on the way"),
        _mutant("codes_partial_bf16", "U86", "the sum of each group is rounded to bf16 before its scale"),
        _mutant("codes_high_nibble_first", "U57", "element 0 is read from the high nibble"),
        _mutant("codes_no_subnormals", "U60", "subnormal codes are read as zero"),
        _mutant("x_scale_exponent_only", "U52", "only the exponent of an fp32 scale is used"),
        _mutant("x_scale_rounded_up", "U53", "fp32 scales are rounded up, the codes stay"),
        _mutant("x_scale_unmasked", "U54", "mantissa bits of the next scale leak into the packed exponent"),
        _mutant("x_scale_of_next_group", "U23", "rows are read with the scale of their next group"),
        _mutant("x_scale_of_first_row", "U58", "all rows are read with the scales of the first"),
        _mutant("x_scale_of_batch", "U76", "all rows of a tile share the largest scale"),
        _mutant("x_scale_missing", "U49", "the scales of the rows are left out"),
        _mutant("w_scale_transposed", "U23", "scales of the weight are read column after column"),
        _mutant("w_scale_rows_of_128", "U29", "tiles of 32 rows are taken for blocks of 128, or the other way round"),
        _mutant("w_scale_rows_permuted", "U22", "rows of scales are read in the tile order of another library"),
        _mutant("w_scale_of_next_group", "U23", "weights are read with the scale of their next group"),
        _mutant("w_scale_exponent_only", "U52", "only the exponent of an fp32 weight scale is used"),
        _mutant("w_scale_rounded_up", "U53", "fp32 weight scales are rounded up, the codes stay"),
        _mutant("w_scale_missing", "U49", "the scales of the weight are left out"),
        _mutant("w_scale_bias_126", "U52", "the exponent bias of the weight scales is 126"),
        _mutant("codes_tail_dropped", "U80", "columns beyond the last whole step are not summed"),
        _mutant("codes_features_tail_unwritten", "U81", "features beyond a multiple of 16 are left as they were"),
        _mutant("codes_add_missing", "U82", "what should be added is left out"),
        _mutant("codes_add_twice", "U82", "what should be added is added twice"),
        _mutant("codes_add_after_rounding", "U86", "the product is rounded before the addition"),
        _mutant("codes_last_row_stale", "U75", "the last row is left unwritten"),
        _mutant("codes_split_depends_on_batch", "U73", "the width is split by the number of rows"),
    ),
    controls=(
        _control("codes_right"),
        _control("codes_right_backwards"),
        _control("codes_right_truncating_unit"),
        replace(_control("codes_of_fp8_unit"), rules=FP8_CODES, declines=outside_specialised),
        replace(
            _control("codes_of_fp8_unit"), name="codes_of_fp8_unit_fp32", rules=FP8_F32, declines=outside_deep_gemm_fp32
        ),
    ),
    golden=golden_codes,
)

QUANT = Op(
    name="linear_quant",
    reference="deeptwin.reference.linear:linear_quant",
    outputs=(Output(name="y_tf", rule=RULES),),
    cases=cases_quant,
    draw=draw_quant,
    rows={"x_tm": 0},
    out_rows={"y_tf": 0},
    tile=64,
    relations=(
        Relation(
            name="layout_round_trip",
            axis="quantiser, then product",
            hook=quantised_first,
            partner="linear_codes",
            only=few_calls,
        ),
        Relation(name="chunk_invariant", axis="row chunks", hook=row_chunks, only=lean),
        _repeats(lean),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.linear:linear_quant_triton"),),
    peers=(
        Peer(
            name="tile-kernels",
            function=f"{PEERS}:tile_kernels_linear_quant",
            needs=("tile_kernels",),
            explains="tile_kernels 2.1.0, torch.cast: the same bytes for UE8M0 scales; fp32 scales have other codes",
            only=lambda case: QUANT_FORMATS[case.x].scale is ScaleKind.UE8M0,
        ),
    ),
    mutants=(
        _mutant("quant_rows_unquantised", "U49", "the rows are not quantised"),
        _mutant("quant_one_scale_a_row", "U52", "one scale for the whole row"),
        _mutant("quant_other_group", "U29", "groups of 128 where 32 are asked, or the other way round"),
        _mutant("quant_codes_bf16", "U86", "x / s is rounded to bf16 instead of e4m3"),
        _mutant("quant_payload_not_requantised", "U53", "the scale is rounded up, the codes belong to the unrounded"),
        _mutant("quant_scale_floor_of_exponent", "U52", "the scale keeps the exponent of one that is no power of two"),
        _mutant("quant_floor_on_scale", "U94", "the floor is applied to the scale"),
        _mutant("quant_codes_truncated", "U60", "codes are truncated"),
        _mutant("quant_scale_of_batch", "U76", "rows of the batch share the largest amax"),
        _mutant("quant_w_scale_transposed", "U23", "scales of the weight are read column after column"),
        _mutant("quant_w_high_nibble_first", "U57", "element 0 is read from the high nibble"),
    ),
    controls=(_control("quant_right"),),
    golden=golden_quant,
)


def grouped_by_unit(inputs: Inputs, features: Tensor) -> Tensor:
    """What the FP8 unit makes of some features, expert by expert."""
    sizes = inputs["group_sizes_e"].tolist()
    rows = [inputs[n].split(sizes) for n in ("x_q", "x_sf")]
    rest = {n: inputs[n] for n in ("x_fmt", "w_fmt")} | {"add_tf": None}
    each = [
        codes_by_unit(rest | {"x_q": x_q, "x_sf": x_sf, "w_q": inputs["w_q"][e], "w_sf": inputs["w_sf"][e]}, features)
        for e, (x_q, x_sf) in enumerate(zip(*rows, strict=True))
    ]
    return torch.cat(each)


FP8_GROUPED = {"y_yf": Fp8Sums(rest=FP8_BF16, sums=grouped_by_unit)}

# what DeepGEMM does to rows of a tile that name no expert: the tile is written whole
TILE_WRITTEN = {"y_yf": "tiles are written whole, with rows that no expert has"}


def normal_slots(case: SlotsCase) -> bool:
    """One regime stands for all: relations are about rows, not about values."""
    return case.regime == "file" or (case.regime == "normal" and any(case.counts))


GROUPED = Op(
    name="linear_grouped",
    reference="deeptwin.reference.linear:linear_grouped",
    outputs=(Output(name="y_yf", rule=RULES),),
    cases=cases_grouped,
    draw=draw_grouped,
    rows={"x_q": 0, "x_sf": 0},
    out_rows={"y_yf": 0},
    tile=64,
    relations=(
        Relation(
            name="batch_invariant",
            axis="rows in their expert, experts, mates of a tile",
            hook=rows_of_experts,
            only=lean,
        ),
        Relation(
            name="chunk_invariant",
            axis="experts apart, through the plain product",
            hook=experts_apart,
            partner="linear_codes",
            only=lambda case: few_calls(case) and case.tokens > 0,
        ),
        Relation(name="run_to_run", axis="repeats", hook=same_rows_again, only=lean),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.linear:linear_grouped_triton",
            interpreter_declines=grouped_on_silicon,
        ),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.linear:linear_grouped_tilelang",
            needs=("tilelang",),
            declines=ungrouped_by_tilelang,
            rules=FP8_GROUPED,
        ),
        Sm90Candidate(
            name="deep-gemm",
            function="deeptwin.optimized.linear:linear_grouped_deep_gemm",
            needs=("deep_gemm",),
            declines=ungrouped_by_deep_gemm,
            rules=FP8_GROUPED,
        ),
        Sm90Candidate(
            name="deep-gemm-masked",
            function="deeptwin.optimized.linear:linear_grouped_deep_gemm_masked",
            needs=("deep_gemm",),
            declines=ungrouped_by_deep_gemm,
            rules=FP8_GROUPED,
        ),
    ),
    builds=(
        BuildCase(
            name="q8-mxfp4-m5120",
            kernel="deeptwin.kernels.triton_ops.linear:_linear_grouped",
            launch="deeptwin.parity.builds.launches.linear:grouped_mxfp4",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="fp8_1x128-fp8_128x128-m2048",
            kernel="deeptwin.kernels.triton_ops.linear:_linear_grouped",
            launch="deeptwin.parity.builds.launches.linear:grouped_128x128",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="tilelang-fp8_1x128-fp8_128x128-grouped",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.linear_sm90:product_program",
            launch="deeptwin.parity.builds.launches.linear_tilelang:sm90_grouped",
            expect={"sm90": Expect(mma="wgmma.fp8")},
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function=f"{PEERS}:tile_kernels_linear_grouped",
            needs=("tile_kernels",),
            explains="tile_kernels 2.1.0, torch.cast.cast_back of both operands, expert by expert",
        ),
    ),
    mutants=(
        _mutant("grouped_off_by_one", "U49", "rows meet the weight of the next expert"),
        _mutant("grouped_empty_not_counted", "U37", "experts without rows are not counted"),
        _mutant("grouped_boundary_row", "U37", "the first row of an expert meets the weight of the one before"),
        _mutant("grouped_tile_of_first_row", "U37", "a tile across two experts meets the weight of its first row"),
        _mutant("grouped_tile_of_last_row", "U37", "a tile across two experts meets the weight of its last row"),
        _mutant("grouped_even_shares", "U37", "every expert is given as many rows"),
        _mutant("grouped_scales_of_first_expert", "U58", "every expert is read with the scales of the first"),
        _mutant("grouped_last_unwritten", "U75", "the rows of the last expert are left unwritten"),
        _mutant("grouped_single_rows_skipped", "U19", "an expert with one row is taken for an empty one"),
        _mutant("grouped_stale_beyond_a_tile", "U83", "rows of an expert beyond its first tile are left unwritten"),
    ),
    controls=(_control("grouped_right"),),
    golden=golden_grouped,
)

SLOTS = Op(
    name="linear_slots",
    reference="deeptwin.reference.linear_slots:linear_slots",
    outputs=(Output(name="y_yf", rule=RULES, dtype=torch.bfloat16),),
    cases=cases_slots,
    draw=draw_slots,
    rows={"x_q": 0, "x_sf": 0, "expert_y": 0, "before_yf": 0},
    out_rows={"y_yf": 0},
    relations=(
        Relation(
            name="chunk_invariant",
            axis="experts apart, through the plain product",
            hook=shares_apart,
            partner="linear_codes",
            only=normal_slots,
        ),
        Relation(name="masked_equals_absent", axis="rows without an expert", hook=other_padding, only=normal_slots),
        Relation(name="run_to_run", axis="repeats", hook=same_slots_again, only=normal_slots),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.linear:linear_slots_triton"),
        Sm90Candidate(
            name="deep-gemm",
            function="deeptwin.optimized.linear:linear_slots_deep_gemm",
            needs=("deep_gemm",),
            declines=slots_outside_deep_gemm,
            unpromised=TILE_WRITTEN,
        ),
        Sm90Candidate(
            name="deep-gemm-masked",
            function="deeptwin.optimized.linear:linear_slots_deep_gemm_masked",
            needs=("deep_gemm",),
            declines=slots_outside_masked,
            unpromised=TILE_WRITTEN,
        ),
    ),
    builds=(
        BuildCase(
            name="fp8_1x128-fp8_128x128-m7168",
            kernel="deeptwin.kernels.triton_ops.linear:_linear_slots",
            launch="deeptwin.parity.builds.launches.linear:slots_128x128",
            expect=PRODUCT | MATRIX,
        ),
    ),
    mutants=(
        _mutant("slots_tile_written", "U58", "rows behind the last of an expert are written to the end of the tile"),
        _mutant("slots_zeroed", "U58", "rows without an expert become zero"),
        _mutant("slots_first_expert", "U37", "every share meets the weight of the first expert"),
        _mutant("slots_expert_by_place", "U37", "shares meet the weights in order, whatever they name"),
        _mutant("slots_last_row_kept", "U19", "the last row of an expert is left as it was"),
        _mutant("slots_second_tile_kept", "U83", "rows beyond the first 64 of a share are left as they were"),
        _mutant("slots_nan_spreads", "U74", "rows without an expert are multiplied by zero and added"),
    ),
    controls=(_control("slots_right"),),
    golden=golden_slots,
)

WIDEN = Op(
    name="widen_fp4",
    reference="deeptwin.reference.linear:widen_fp4",
    outputs=(
        Output(name="codes", rule=Bitwise(), dtype=torch.float8_e4m3fn),
        Output(name="sf", rule=Bitwise(), dtype=torch.uint8),
    ),
    cases=cases_widen,
    draw=draw_widen,
    rows={},
    out_rows={},
    candidates=(Candidate(name="triton", function="deeptwin.optimized.linear:widen_fp4_triton"),),
    builds=(
        BuildCase(
            name="f5120-m2304",
            kernel="deeptwin.kernels.triton_ops.linear:_widen_fp4",
            launch="deeptwin.parity.builds.launches.linear:widen_expert",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("widen_smallest_scale", "U52", "the smallest scale of a block is kept: larger ones saturate"),
        _mutant("widen_scale_of_first_row", "U58", "the scale of a block comes from its first row"),
        _mutant("widen_offset_5", "U52", "the scale is five exponents below the largest"),
        _mutant("widen_offset_7", "U52", "the scale is seven exponents below the largest: 6 · 2^7 saturates"),
        _mutant("widen_unshifted", "U53", "the largest scale is kept: small values fall below the grid"),
        _mutant("widen_wraps_below_zero", "U54", "scale bytes below 6 wrap around"),
        _mutant("widen_cut_at_11", "U53", "blocks more than eleven exponents apart are lifted"),
        _mutant("widen_scales_of_rows_lost", "U53", "the scale of a row is not folded into its codes"),
        _mutant("widen_high_nibble_first", "U57", "element 0 is read from the high nibble"),
        _mutant("widen_sign_of_zero_lost", "U60", "−0 comes out as +0"),
        _mutant("widen_subnormals_lost", "U60", "subnormal codes are flushed to zero"),
    ),
    controls=(_control("widen_right"),),
    golden=golden_widen,
)

CARD = Card(
    component="linear",
    summary="linear layers: floating products, products of block-scaled bytes alone and by expert, FP4 widened to FP8",
    contract={
        "dtypes": "rows and weights bf16, fp16 or fp32, or e4m3 and packed e2m1 codes with UE8M0 or fp32 scales",
        "rounding": "one, at return, of the exact sum; a bias or an added tensor goes in before it",
        "order": "any order of summation that does not depend on the batch: no split by the number of rows",
        "layout": "weights [out, in] as in checkpoints; the even e2m1 element in the low nibble; scales row-major",
        "groups": "rows in the order of the experts; sizes from 0 up that add up to the rows",
        "precondition": "UE8M0 bytes of a product from 10 to 245, where a code times its scale is exact in bf16",
    },
    ops=(LINEAR, CODES, QUANT, GROUPED, SLOTS, WIDEN),
    equivalents=(
        Equivalent(
            name="scale by scale or scale times scale",
            reason="(P · sa) · sb and P · (sa · sb) differ by fp32 roundings, and not at all for powers of two",
        ),
        Equivalent(
            name="pow(2, ceil(log2 s)) for the scales of the rows",
            reason="only groups whose amax stands just above a power of two differ; the card of quant draws them",
        ),
    ),
)
