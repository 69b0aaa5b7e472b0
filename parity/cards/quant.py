"""How the group quantisers are checked: bytes of codes and scales, and the values read back from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import QUANT_FORMATS, CodeKind, QuantFormat, ScaleKind
from deeptwin.reference.quant import encode_e2m1, encode_e4m3, pack_e2m1

from .. import draws
from ..builds.ascend_presets import VECTOR, WIDENS_E4M3
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import (
    REGIMES,
    Candidate,
    Card,
    Equivalent,
    Inputs,
    Mutant,
    Op,
    Output,
    Outputs,
    Peer,
    Relation,
    Sm90Candidate,
    variants,
)
from ..floats import ordered
from ..pairing import every_pair
from ..relations import CallFn, Context, Variant, batch_invariant, pick_rows, row_chunks, take
from ..rules import Bitwise, Codes, Rule

_mutant, _control = variants("quant")
HUGE = 2.0**100
ALL_REGIMES = (*REGIMES, "zeros", "ties", "tiny", "huge", "subnormal", "cancel", "constant")


@dataclass(frozen=True, kw_only=True)
class QuantCase:
    """`tokens` × `width` elements in the format named `fmt`; `dtype` is that of the unquantised side."""

    tokens: int
    width: int
    fmt: str = "q8"
    dtype: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-m{self.width}-{self.fmt}-{self.dtype}-{self.regime}"

    @property
    def format(self) -> QuantFormat:
        return QUANT_FORMATS[self.fmt]


# directed groups: each function returns fp64 groups [n, group] to be cast to the dtype of the case

Groups = Callable[[QuantFormat, torch.dtype, np.random.Generator], Tensor]


def powers(fmt: QuantFormat, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """Groups whose largest magnitude stands on and beside the border of every scale exponent −30 … 29."""
    border = fmt.max_value * 2.0 ** torch.arange(-30, 30, dtype=torch.float64)
    amax = torch.cat([border, _beside(border, dtype, 1), _beside(border, dtype, -1)])
    amax = torch.cat([amax, _beside(border / fmt.max_value, dtype, 1)])
    return _with_amax(amax, fmt, rng)


def midpoints(fmt: QuantFormat, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """Every midpoint between two codes and its neighbours in the input dtype, under exact power-of-two scales."""
    grid = _grid(fmt)
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(grid)], dtype=torch.float64)
    values = torch.cat([middles, _beside(middles, dtype, 1), _beside(middles, dtype, -1)])
    return torch.cat([_packed(torch.cat([values, -values]), fmt) * scale for scale in (1.0, 8.0, 0.25)])


def codebook(fmt: QuantFormat, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """The value of every code, both zeros among them."""
    grid = torch.tensor(_grid(fmt), dtype=torch.float64)
    return torch.cat([_packed(torch.cat([grid, -grid]), fmt) * scale for scale in (1.0, 2.0, 0.125)])


def small(fmt: QuantFormat, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """Groups below and around the floor: 1e-12 … 1e-4, 1e-30, zeros of either sign."""
    sizes = torch.from_numpy(10.0 ** rng.uniform(-12, -3.5, 40))
    floor = torch.tensor([fmt.amax_floor, 1e-4, 1e-30], dtype=torch.float64)
    amax = torch.cat([sizes, floor, _beside(floor, dtype, 1), _beside(floor, dtype, -1), torch.zeros(2).double()])
    groups = _with_amax(amax, fmt, rng)
    groups[-1] = -0.0
    return groups


def mixed_scales(fmt: QuantFormat, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """Neighbouring groups with scales (1.5, 1, 1, 1), (1, 1.5, 1, 1), … times powers of two."""
    words = 1 + 0.5 * torch.eye(4, dtype=torch.float64)
    amax = torch.cat([words * 2.0**k for k in (0, -3, 5)]).flatten() * fmt.max_value
    return _with_amax(amax, fmt, rng)


def reciprocal_pairs(fmt: QuantFormat, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """The 42 pairs of an e4m3 scale s and a bf16 x for which x / s and x · (1 / s) round to different e2m1 codes."""
    scales = torch.tensor([1.875 * 2.0**e for e in range(-6, 8)], dtype=torch.float64)
    groups = torch.zeros(len(scales), fmt.group, dtype=torch.float64)
    groups[:, :7] = torch.tensor([6.0, 1.25, 2.5, 5.0, -1.25, -2.5, -5.0], dtype=torch.float64)
    return groups * scales[:, None]


def scaled_midpoints(fmt: QuantFormat, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """Midpoints times an fp32 scale that is no power of two: x / s and any product with a reciprocal part here."""
    grid = _grid(fmt)
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(grid)], dtype=torch.float64)
    amax = torch.from_numpy(np.float32(rng.uniform(1, 2, 24)))
    scales = (amax / torch.full_like(amax, fmt.max_value)).to(torch.float64)
    groups = torch.cat([_packed(middles, fmt) * scale for scale in scales])
    groups[:, -1] = amax.to(torch.float64).repeat_interleave(len(groups) // len(amax))
    return groups


DIRECTED: dict[str, Groups] = {
    f.__name__: f for f in (powers, midpoints, codebook, small, mixed_scales, reciprocal_pairs, scaled_midpoints)
}


def _grid(fmt: QuantFormat) -> list[float]:
    if fmt.code is CodeKind.E2M1:
        return [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return every.to(torch.float64).tolist()


def _beside(x: Tensor, dtype: torch.dtype, steps: int) -> Tensor:
    """The neighbour of positive values in `dtype`, `steps` away."""
    size, integer = (2, torch.int16) if dtype != torch.float32 else (4, torch.int32)
    assert x.to(dtype).element_size() == size
    return (x.to(dtype).view(integer) + steps).view(dtype).to(torch.float64)


def _with_amax(amax: Tensor, fmt: QuantFormat, rng: np.random.Generator) -> Tensor:
    """Groups of random values whose largest magnitude, at a random place, is `amax`."""
    groups = torch.from_numpy(rng.uniform(-0.98, 0.98, (len(amax), fmt.group))) * amax[:, None]
    places = torch.from_numpy(rng.integers(0, fmt.group, len(amax)))
    signs = torch.from_numpy(rng.choice([-1.0, 1.0], len(amax)))
    groups[torch.arange(len(amax)), places] = amax * signs
    return groups


def _packed(values: Tensor, fmt: QuantFormat) -> Tensor:
    """The values in groups that all hold the largest magnitude of the format, so that the scale is 1."""
    rest = fmt.group - 1
    padded = torch.nn.functional.pad(values, (0, -len(values) % rest)).reshape(-1, rest)
    return torch.nn.functional.pad(padded, (0, 1), value=fmt.max_value)


def draw_quantize(case: QuantCase, rng: np.random.Generator) -> Inputs:
    """Rows of a regime, or directed groups laid out block by block; a strided view."""
    fmt, dtype = case.format, draws.DTYPES[case.dtype]
    if case.regime not in DIRECTED:
        x = draws.rows(rng, case.tokens, case.width, dtype=dtype, regime=case.regime)
        return {"x_tm": draws.strided(x, pad=8), "fmt": fmt}
    t, g = -(-case.tokens // fmt.rows), -(-case.width // fmt.group)
    groups = DIRECTED[case.regime](fmt, dtype, rng)
    chosen = groups[torch.arange(t * g) % len(groups)].reshape(t, g * fmt.group)
    x = chosen.repeat_interleave(fmt.rows, 0)[: case.tokens, : case.width].to(dtype)
    return {"x_tm": draws.strided(x, pad=8), "fmt": fmt}


def draw_fake_quantize(case: QuantCase, rng: np.random.Generator) -> Inputs:
    """The same with the storage dtype."""
    return draw_quantize(case, rng) | {"dtype": draws.DTYPES[case.dtype]}


def draw_dequantize(case: QuantCase, rng: np.random.Generator) -> Inputs:
    """Random codes, every byte among them, and scales over the whole range of their format; no NaN among either."""
    fmt = case.format
    width = case.width if fmt.code is CodeKind.E4M3 else case.width // 2
    codes = torch.from_numpy(rng.integers(0, 256, (case.tokens, width), dtype=np.uint8))
    sweep = min(codes.numel(), 256)
    codes.view(-1)[:sweep] = torch.arange(sweep, dtype=torch.uint8)
    if fmt.code is CodeKind.E4M3:
        codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes).view(torch.float8_e4m3fn)
    shape = (-(-case.tokens // fmt.rows), -(-case.width // fmt.group))
    return {
        "codes": draws.strided(codes, pad=8),
        "sf": draws.strided(_scales(case, shape, rng), pad=4),
        "fmt": fmt,
        "dtype": draws.DTYPES[case.dtype],
    }


def _scales(case: QuantCase, shape: tuple[int, int], rng: np.random.Generator) -> Tensor:
    kind = case.format.scale
    if kind is ScaleKind.F32:
        low, high = (-30.0, 30.0) if case.regime != "extreme" else (-140.0, 127.0)
        return torch.from_numpy(np.exp2(rng.uniform(low, high, shape)).astype(np.float32))
    low, high = (117, 137) if case.regime != "extreme" else (0, 254)
    if kind is ScaleKind.E4M3:
        return torch.from_numpy(rng.integers(1, 127, shape, dtype=np.uint8)).view(torch.float8_e4m3fn)
    sf = torch.from_numpy(rng.integers(low, high, shape, dtype=np.uint8, endpoint=True))
    if sf.numel() > 1:
        sf.view(-1)[:2] = torch.tensor([low, high], dtype=torch.uint8)  # 2^-127 and 2^127 where extreme
    return sf


PRODUCTION = (
    ("q8", 7168), ("q4i", 512), ("q4k", 1536), ("fp8_1x128", 5120), ("fp8_1x128_ue8m0", 4096), ("mxfp4", 1280)
)  # fmt: skip


def cases_quantize(full: bool) -> list[QuantCase]:
    """Regimes on one format, production widths and directed groups on all, edge blocks on the 128 × 128 one."""
    found = [QuantCase(tokens=2, width=512, regime=regime) for regime in ALL_REGIMES]
    for name, width in PRODUCTION:
        case = QuantCase(tokens=2, width=width, fmt=name)
        group = case.format.group
        found += [case, replace(case, tokens=1, width=group), replace(case, tokens=3, width=3 * group, dtype="fp32")]
        # four rows of 60 groups hold all of `powers`
        found += [_directed(name, regime, "bf16") for regime in ("powers", "midpoints", "codebook", "small")]
        found += [_directed(name, regime, "fp32") for regime in ("powers", "midpoints")]
        found += [_directed(name, "mixed_scales", "bf16")]
    found += [replace(QuantCase(tokens=0, width=256), fmt=name) for name in ("q8", "q4k", "fp8_128x128")]
    found += [_directed("fp8_1x128", "scaled_midpoints", "fp32")]
    found += [_directed("q4k", "reciprocal_pairs", "bf16")]
    found += [QuantCase(tokens=2, width=256, fmt="q4k", regime=r) for r in ("huge", "normal")]
    found += [QuantCase(tokens=2, width=256, dtype="fp16"), QuantCase(tokens=5, width=128, regime="peaked", fmt="q4i")]
    blocks = QuantCase(tokens=130, width=576, fmt="fp8_128x128")
    found += [
        blocks,
        replace(blocks, tokens=1, width=1),
        replace(blocks, regime="zeros"),
        replace(blocks, dtype="fp32"),
    ]
    found += [replace(blocks, tokens=256, width=2048, regime=r) for r in ("powers", "small")] if full else []
    tiles = QuantCase(tokens=70, width=136, fmt="fp8_32x32")
    found += [
        tiles,
        replace(tiles, tokens=1, width=1),
        replace(tiles, tokens=0),
        replace(tiles, dtype="fp32", regime="powers", tokens=480, width=512),
        *(replace(tiles, tokens=64, width=512, regime=r) for r in ("midpoints", "codebook", "small", "mixed_scales")),
    ]
    found += [replace(blocks, tokens=129, width=1153, regime="codebook")]
    if full:
        names, dtypes = QUANT_FORMATS, ("bf16", "fp16", "fp32")
        found += [
            QuantCase(tokens=3, width=1280, fmt=n, dtype=d, regime=r)
            for n, d, r in every_pair(tuple(names), dtypes, ALL_REGIMES)
            if d != "fp16" or r not in ("tiny", "huge", "subnormal")
        ]
        found += [QuantCase(tokens=2, width=w, fmt=n) for n, w in product(names, (128, 512, 1536, 4096, 5120, 7168))]
    return list({case.id: case for case in found}.values())


def _directed(name: str, regime: str, dtype: str) -> QuantCase:
    """Large enough to hold every group of the directed regime once."""
    fmt = QUANT_FORMATS[name]
    count = len(DIRECTED[regime](fmt, draws.DTYPES[dtype], np.random.default_rng(0)))
    tokens = 4 if count > 8 else 1
    return QuantCase(tokens=tokens, width=-(-count // tokens) * fmt.group, fmt=name, dtype=dtype, regime=regime)


def cases_fake_quantize(full: bool) -> list[QuantCase]:
    """Regimes, and the directed groups that see a missing element rounding."""
    found = [QuantCase(tokens=2, width=512, regime=regime) for regime in REGIMES]
    found += [_directed(name, "midpoints", "bf16") for name in ("fp8_1x128_ue8m0", "q8", "q4k")]
    found += [QuantCase(tokens=3, width=256, fmt=name, dtype="fp32") for name in (QUANT_FORMATS if full else ("q4i",))]
    found += [QuantCase(tokens=130, width=200, fmt="fp8_128x128"), QuantCase(tokens=0, width=128)]
    return found


def cases_dequantize(full: bool) -> list[QuantCase]:
    """Every format and storage dtype, the whole range of scales, edge blocks, zero tokens."""
    found = [QuantCase(tokens=2, width=width, fmt=name) for name, width in PRODUCTION]
    found += [replace(case, width=512, regime="extreme", dtype="fp32") for case in found]
    found += [QuantCase(tokens=3, width=512, fmt=name, dtype="fp16") for name in ("q8", "q4k")]
    found += [QuantCase(tokens=4, width=2048, regime="extreme"), QuantCase(tokens=0, width=256)]
    found += [QuantCase(tokens=1, width=QUANT_FORMATS[name].group, fmt=name) for name, _ in PRODUCTION]
    blocks = QuantCase(tokens=130, width=576, fmt="fp8_128x128")
    found += [blocks, replace(blocks, tokens=0), replace(blocks, tokens=129, width=129, dtype="fp32")]
    tiles = QuantCase(tokens=70, width=136, fmt="fp8_32x32")
    found += [tiles, replace(tiles, regime="extreme", dtype="fp32"), replace(tiles, tokens=0)]
    if full:
        found += [
            QuantCase(tokens=5, width=1280, fmt=n, dtype=d, regime=r)
            for n, d, r in product(QUANT_FORMATS, ("bf16", "fp16", "fp32"), ("normal", "extreme"))
        ]
    return list({case.id: case for case in found}.values())


# relation hooks


def independent_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """What `batch_invariant` and `row_chunks` ask, with huge numbers where the former has NaN: NaN is no input."""
    huge = min(HUGE, torch.finfo(inputs["x_tm"].dtype).max)
    for variant in (*batch_invariant(inputs, context), *row_chunks(inputs, context)):
        calls = tuple(c | {"x_tm": c["x_tm"].nan_to_num(nan=huge)} for c in variant.calls)
        yield replace(variant, label=variant.label.replace("NaN", "huge"), calls=calls)


def independent_quantized_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same on codes and scales; the garbage is bytes 0xFF, NaN in every format that has one."""
    as_bytes = inputs | {name: _bytes(inputs[name]) for name in ("codes", "sf")}
    for variant in (*batch_invariant(as_bytes, context), *row_chunks(as_bytes, context)):
        yield replace(variant, calls=tuple(_typed(call, inputs) for call in variant.calls))
    n = inputs["codes"].shape[0]
    for keep in range(min(n, 1)):
        spoiled = take(as_bytes, context.op, list(range(n)))
        for name in ("codes", "sf"):
            spoiled[name][torch.arange(n) != keep] = 0xFF
        pick = pick_rows(context.op, [keep])
        label = f"row {keep} beside bytes 0xFF"
        yield Variant(label=label, calls=(_typed(spoiled, inputs),), join=lambda r, p=pick: p(r[0]), expect=pick)  # type: ignore[misc]


def _bytes(x: Tensor) -> Tensor:
    # filling is not implemented for the narrow floats
    return x.contiguous().view(torch.uint8)


def _typed(call: Inputs, like: Inputs) -> Inputs:
    return call | {name: call[name].contiguous().view(like[name].dtype) for name in ("codes", "sf")}


def blocks_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows of whole blocks give the same bytes apart."""
    x, size = inputs["x_tm"], inputs["fmt"].rows
    parts = tuple(inputs | {"x_tm": x[i : i + size]} for i in range(0, max(x.shape[0], 1), size))

    def join(results: list[Outputs]) -> Outputs:
        return {name: torch.cat([r[name] for r in results]) for name in context.op.out_rows}

    yield Variant(label=f"chunks of {size} rows", calls=parts, join=join)


def rows_or_blocks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Hook of batch_invariant: rows where a group lies in one row, rows of blocks otherwise."""
    yield from (independent_rows if inputs["fmt"].rows == 1 else blocks_apart)(inputs, context)


def reads_back(inputs: Inputs, outputs: Outputs, partner: CallFn | None) -> tuple[Outputs, Outputs]:
    """The reader returns what the writer was given where every value is representable, zero signs included."""
    assert partner is not None
    x = inputs["x_tm"]
    return partner({**outputs, "fmt": inputs["fmt"], "dtype": x.dtype}), {"x_tm": x}


def one_row_groups(case: Any) -> bool:
    """Whether a row can be taken out of its batch: no group spans several rows."""
    return case.regime == "file" or QUANT_FORMATS[case.fmt].rows == 1


def lean(case: Any) -> bool:
    """Relations make many calls: they run where no regime changes what they say, on narrow rows."""
    return case.regime in ("normal", "peaked", "file") and (case.width <= 640 or case.tokens == 0)


def golden_quantize() -> list[QuantCase]:
    """Midpoints, small and all-zero groups of every format, edge blocks."""
    found = [_directed(name, "midpoints", "fp32") for name in ("q8", "q4i")]
    found += [_directed(name, "small", "bf16") for name in ("q8", "q4i", "q4k", "fp8_1x128")]
    found += [_directed("q4k", "reciprocal_pairs", "bf16"), _directed("q8", "powers", "fp32")]
    found += [QuantCase(tokens=2, width=128, fmt=name) for name in ("fp8_1x128_ue8m0", "mxfp4")]
    found += [QuantCase(tokens=40, width=72, fmt="fp8_32x32")]
    return [*found, QuantCase(tokens=130, width=136, fmt="fp8_128x128")]


def golden_dequantize() -> list[QuantCase]:
    """Every byte of every format."""
    return [QuantCase(tokens=2, width=512, fmt=name, dtype="fp32", regime="extreme") for name in ("q8", "q4i", "q4k")]


def _representable(case: Any) -> bool:
    return case.regime == "codebook"


QUANTIZE_BUILDS = {
    (CodeKind.E4M3, ScaleKind.UE8M0): (
        BuildCase(
            name="1x128-m7168",
            kernel="deeptwin.kernels.triton_ops.quant:_quantize_rows",
            launch="deeptwin.parity.builds.launches.quant:quantize_fp8_1x128_ue8m0",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="1x32-m5120",
            kernel="deeptwin.kernels.triton_ops.quant:_quantize_rows",
            launch="deeptwin.parity.builds.launches.quant:quantize_q8",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="32x32-m5120",
            kernel="deeptwin.kernels.triton_ops.quant:_quantize_blocks",
            launch="deeptwin.parity.builds.launches.quant:quantize_fp8_32x32",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    (CodeKind.E4M3, ScaleKind.F32): (
        BuildCase(
            name="1x128-m7168",
            kernel="deeptwin.kernels.triton_ops.quant:_quantize_rows",
            launch="deeptwin.parity.builds.launches.quant:quantize_fp8_1x128",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="128x128-m7168",
            kernel="deeptwin.kernels.triton_ops.quant:_quantize_blocks",
            launch="deeptwin.parity.builds.launches.quant:quantize_fp8_128x128",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    (CodeKind.E2M1, ScaleKind.UE8M0): (
        BuildCase(
            name="mxfp4-m7168",
            kernel="deeptwin.kernels.triton_ops.quant:_quantize_rows",
            launch="deeptwin.parity.builds.launches.quant:quantize_mxfp4",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="q4i-m128",
            kernel="deeptwin.kernels.triton_ops.quant:_quantize_rows",
            launch="deeptwin.parity.builds.launches.quant:quantize_q4i",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    (CodeKind.E2M1, ScaleKind.E4M3): (
        BuildCase(
            name="q4k-m512",
            kernel="deeptwin.kernels.triton_ops.quant:_quantize_rows",
            launch="deeptwin.parity.builds.launches.quant:quantize_q4k",
            expect=NO_PRODUCT | WIDENS_E4M3,
        ),
    ),
}


# TileKernels multiplies by a rounded inverse: of amax / 448 for fp32 scales, of the stored scale for e4m3 ones. With
# the rounding of the scale itself these are three fp32 roundings, 3 · 2^-24 between its product and our quotient
INVERSE_U = 2.0**-22


def _nibbles(packed: Tensor) -> Tensor:
    """The e2m1 codes of packed bytes in value order, both zeros in the middle."""
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2).to(torch.int64)
    return torch.where(codes < 8, codes, 7 - codes)


def codes_by_inverse(marks: list[tuple[str, Tensor]], arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and the highest code, in value order, of x / s off by a relative u, s as it was stored."""
    fmt: QuantFormat = arguments["fmt"]
    s_tm = arguments["sf"].to(torch.float64).repeat_interleave(fmt.group, -1)
    ratio_tm = arguments["x_tm"].to(torch.float64) / s_tm
    ends = [(ratio_tm * (1 - u)).to(torch.float32), (ratio_tm * (1 + u)).to(torch.float32)]
    if fmt.code is CodeKind.E4M3:
        ends = [ordered(encode_e4m3(end)) for end in ends]
    else:
        ends = [_nibbles(pack_e2m1(encode_e2m1(end))) for end in ends]
    return torch.minimum(*ends), torch.maximum(*ends)


def outside_tile_kernels(case: QuantCase) -> str | None:
    """Why TileKernels' cast of rows does not take a case."""
    if case.format.rows != 1 or case.width % 64 or case.dtype == "fp16":
        return "rows of 64·n elements in bf16 or fp32, groups in one row"
    return None


def outside_cast_back(case: QuantCase) -> str | None:
    """Why TileKernels' cast back does not take a case."""
    if case.width % 64 or case.dtype == "fp16":
        return "rows of 64·n elements to bf16 or fp32"
    if case.regime == "extreme" and case.format.scale is ScaleKind.UE8M0:
        return "it reads scale byte 0 as zero, the OCP format as 2^-127"
    return None


def _tile_kernels_row(code: CodeKind, scale: ScaleKind) -> Candidate:
    """The vendor's cast; where it multiplies by a rounded inverse its codes have a rule of their own."""
    order = ordered if code is CodeKind.E4M3 else _nibbles
    by_inverse: dict[str, Rule] = {"codes": Codes(u=INVERSE_U, allowed=codes_by_inverse, order=order)}
    return Sm90Candidate(
        name="tile-kernels",
        function="deeptwin.optimized.quant:quantize_tile_kernels",
        needs=("tile_kernels",),
        declines=outside_tile_kernels,
        rules={} if scale is ScaleKind.UE8M0 else by_inverse,
    )


def _quantize_op(
    code: CodeKind, scale: ScaleKind, peers: tuple[Peer, ...], mutants: tuple[Mutant, ...], controls: tuple[str, ...]
) -> Op:
    """`quantize` for the formats with these codes and scales: the dtypes of its outputs belong to the operation."""
    sf_dtypes = {ScaleKind.UE8M0: torch.uint8, ScaleKind.E4M3: torch.float8_e4m3fn, ScaleKind.F32: torch.float32}

    def mine(found: list[QuantCase]) -> list[QuantCase]:
        return [case for case in found if case.format.code is code and case.format.scale is scale]

    return Op(
        name=f"quantize_{code.value}_{scale.value}",
        reference="deeptwin.reference.quant:quantize",
        outputs=(
            Output(name="codes", rule=Bitwise(), dtype=torch.float8_e4m3fn if code is CodeKind.E4M3 else torch.uint8),
            Output(name="sf", rule=Bitwise(), dtype=sf_dtypes[scale]),
        ),
        cases=lambda full: mine(cases_quantize(full)),
        draw=draw_quantize,
        rows={"x_tm": 0},
        out_rows={"codes": 0, "sf": 0},
        relations=(
            Relation(name="run_to_run", axis="repeats", only=lean),
            Relation(
                name="batch_invariant",
                axis="rows alone, permuted, duplicated, in chunks, beside garbage; blocks",
                hook=rows_or_blocks,
                only=lean,
            ),
            Relation(
                name="layout_round_trip",
                axis="writer → reader",
                hook=reads_back,
                partner="dequantize",
                only=_representable,
            ),
        ),
        candidates=(
            Candidate(name="triton", function="deeptwin.optimized.quant:quantize_triton"),
            _tile_kernels_row(code, scale),
        ),
        builds=QUANTIZE_BUILDS[code, scale],
        peers=peers,
        mutants=mutants,
        controls=tuple(_control(name) for name in controls),
        golden=lambda: mine(golden_quantize()),
    )


def _tile_kernels(explains: str, only: Callable[[Any], bool] = lambda case: True) -> tuple[Peer, ...]:
    return (
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.quant:tile_kernels_cast",
            needs=("tile_kernels",),
            explains=f"tile_kernels 2.1.0, torch.cast.cast: {explains}",
            only=lambda case: case.dtype != "fp16" and only(case),
        ),
    )


E4M3_UE8M0 = _quantize_op(
    CodeKind.E4M3,
    ScaleKind.UE8M0,
    _tile_kernels("the reciprocal of a power of two is exact, so x · (1 / s) has our bytes"),
    (
        _mutant(
            "scale_floor_of_exponent", "U52", "the stored scale keeps the exponent of a scale that is no power of two"
        ),
        _mutant("payload_not_requantised", "U53", "the scale is rounded up, the codes belong to the unrounded one"),
        _mutant(
            "packed_without_mask", "U54", "mantissa bits of the next scale leak into the byte when scales are packed"
        ),
        _mutant("clamp_after_rounding", "U55", "the minimum scale is applied after rounding to a power of two"),
        _mutant("scale_by_log2", "U56", "pow(2, ceil(log2 s)) in fp32"),
        _mutant("no_floor", "U59", "an all-zero group divides 0 by 0"),
        _mutant("floor_on_scale", "U94", "the floor is applied to the scale instead of to amax"),
        _mutant("floor_missing_below_1e_4", "U94", "the floor of another format"),
        _mutant("codes_truncated", "U60", "codes are truncated"),
        _mutant("ties_away", "U60", "midpoints go away from zero"),
        _mutant("subnormal_codes_lost", "U60", "subnormal codes are flushed to zero"),
        _mutant("codes_through_bf16", "U86", "x / s is rounded to bf16 before e4m3"),
        _mutant("codes_through_fp16", "U60", "x / s is rounded to fp16 before e4m3"),
        _mutant("amax_without_sign", "U53", "the largest value, not the largest magnitude, gives the scale"),
        _mutant("amax_one_group_back", "U23", "a group uses the scale of the group before it"),
        _mutant("last_element_not_in_amax", "U26", "the last element of every group is left out of amax"),
        _mutant("negative_zero_lost", "U60", "−0 comes out as +0"),
        _mutant("rows_share_scales", "U58", "all rows use the scales of the first"),
        _mutant("scale_of_a_huge_neighbour", "U76", "rows of the batch share the largest amax"),
        _mutant("tile_of_one_row", "U52", "each row of a 32 × 32 tile has its own scale, the first is stored"),
        _mutant("pad_contaminates_tile", "U76", "rows beyond the edge of a 32 × 32 tile hold stale values"),
        _mutant("edge_tile_skipped", "U58", "the scale of a partial tile is left as it was in memory"),
    ),
    ("right_division", "right_reciprocal_of_power_of_two"),
)
E4M3_F32 = _quantize_op(
    CodeKind.E4M3,
    ScaleKind.F32,
    _tile_kernels(
        "the scale is ours; codes are x · (448 / amax) where ours divide by the stored scale, so only groups whose "
        "scale is a power of two have the same codes",
        lambda case: case.regime in ("zeros", "midpoints", "codebook"),
    ),
    (
        _mutant("f32_multiplies_by_448_over_amax", "U60", "codes from x · (448 / amax) instead of x / s"),
        _mutant("f32_multiplies_by_reciprocal", "U60", "codes from x · (1 / s)"),
        _mutant("f32_scale_by_reciprocal", "U53", "the scale is amax · (1 / 448)"),
        _mutant("f32_scale_rounded_up", "U52", "the scale is rounded up to a power of two"),
        _mutant("f32_pad_contaminates_block", "U76", "rows beyond the edge of a 128 × 128 block hold stale values"),
        _mutant("f32_edge_block_skipped", "U58", "the scale of a partial block is left as it was in memory"),
        _mutant("f32_block_of_one_row", "U52", "each row of a block has its own scale, the first is stored"),
        _mutant("f32_no_floor", "U59", "an all-zero group divides 0 by 0"),
        _mutant("f32_floor_on_scale", "U94", "the floor is applied to the scale"),
        _mutant("f32_codes_truncated", "U60", "codes are truncated"),
    ),
    ("right_division",),
)
E2M1_UE8M0 = _quantize_op(
    CodeKind.E2M1,
    ScaleKind.UE8M0,
    _tile_kernels("the reciprocal of a power of two is exact, so x · (1 / s) has our bytes"),
    (
        _mutant("fp4_high_nibble_first", "U57", "element 0 stands in the high nibble"),
        _mutant("fp4_input_rounded_to_bf16", "U60", "0.25000006 comes out as 0: x / s is rounded to bf16 first"),
        _mutant("fp4_ties_away", "U60", "midpoints go away from zero"),
        _mutant("fp4_ties_to_zero", "U60", "midpoints go to zero"),
        _mutant("fp4_truncated", "U60", "codes are truncated"),
        _mutant("fp4_scale_by_log2", "U56", "pow(2, ceil(log2 s)) in fp32"),
        _mutant("fp4_no_floor", "U59", "an all-zero group divides 0 by 0"),
        _mutant("fp4_floor_of_fp8", "U94", "the floor 1e-4 of the fp8 formats"),
        _mutant("fp4_sign_of_zero_lost", "U60", "−0 comes out as +0"),
        _mutant("fp4_scale_floor_of_exponent", "U52", "the scale is rounded down"),
    ),
    ("right_division", "right_reciprocal_of_power_of_two"),
)
E2M1_E4M3 = _quantize_op(
    CodeKind.E2M1,
    ScaleKind.E4M3,
    _tile_kernels(
        "codes are x · (1 / s) where ours are x / s: only groups whose scale is no 1.875 · 2^k have the same codes",
        lambda case: case.regime in ("midpoints", "codebook", "small", "mixed_scales"),
    ),
    (
        _mutant(
            "q4k_multiplies_by_reciprocal", "U60", "codes from x · (1 / s): differs in 42 pairs of bf16 x and e4m3 s"
        ),
        _mutant("q4k_divides_by_unrounded_scale", "U53", "the codes belong to the unrounded scale"),
        _mutant("q4k_scale_truncated", "U52", "the e4m3 scale is truncated"),
        _mutant("q4k_scale_rounded_up", "U52", "the e4m3 scale is a power of two"),
        _mutant("q4k_scale_overflows", "U54", "a scale beyond 448 becomes NaN"),
        _mutant("q4k_no_floor", "U59", "an all-zero group divides 0 by 0"),
        _mutant("q4k_high_nibble_first", "U57", "element 0 stands in the high nibble"),
    ),
    ("right_division",),
)

DEQUANTIZE = Op(
    name="dequantize",
    reference="deeptwin.reference.quant:dequantize",
    outputs=(Output(name="x_tm", rule=Bitwise()),),
    cases=cases_dequantize,
    draw=draw_dequantize,
    rows={"codes": 0, "sf": 0},
    out_rows={"x_tm": 0},
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lambda case: lean(case) and one_row_groups(case)),
        Relation(
            name="batch_invariant",
            axis="rows alone, permuted, duplicated, in chunks, beside garbage",
            hook=independent_quantized_rows,
            only=lambda case: lean(case) and one_row_groups(case),
        ),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.quant:dequantize_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.quant:dequantize_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_cast_back,
        ),
    ),
    builds=(
        BuildCase(
            name="fp8-1x128-m7168",
            kernel="deeptwin.kernels.triton_ops.quant:_dequantize",
            launch="deeptwin.parity.builds.launches.quant:dequantize_fp8_1x128",
            expect=NO_PRODUCT | WIDENS_E4M3,
        ),
        BuildCase(
            name="fp8-128x128-m7168",
            kernel="deeptwin.kernels.triton_ops.quant:_dequantize",
            launch="deeptwin.parity.builds.launches.quant:dequantize_fp8_128x128",
            expect=NO_PRODUCT | WIDENS_E4M3,
        ),
        BuildCase(
            name="fp8-32x32-m5120",
            kernel="deeptwin.kernels.triton_ops.quant:_dequantize",
            launch="deeptwin.parity.builds.launches.quant:dequantize_fp8_32x32",
            expect=NO_PRODUCT | WIDENS_E4M3,
        ),
        BuildCase(
            name="q8-m5120",
            kernel="deeptwin.kernels.triton_ops.quant:_dequantize",
            launch="deeptwin.parity.builds.launches.quant:dequantize_q8",
            expect=NO_PRODUCT | WIDENS_E4M3,
        ),
        BuildCase(
            name="mxfp4-m7168",
            kernel="deeptwin.kernels.triton_ops.quant:_dequantize",
            launch="deeptwin.parity.builds.launches.quant:dequantize_mxfp4",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="q4k-m512",
            kernel="deeptwin.kernels.triton_ops.quant:_dequantize",
            launch="deeptwin.parity.builds.launches.quant:dequantize_q4k",
            expect=NO_PRODUCT | WIDENS_E4M3,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.quant:tile_kernels_cast_back",
            needs=("tile_kernels",),
            explains="tile_kernels 2.1.0, torch.cast.cast_back: shifts the scale byte, so that byte 0 is zero",
            only=lambda case: (
                case.dtype != "fp16" and not (case.regime == "extreme" and case.format.scale is ScaleKind.UE8M0)
            ),
        ),
    ),
    mutants=(
        _mutant("reads_high_nibble_first", "U57", "element 0 is read from the high nibble"),
        _mutant("reads_scale_byte_0_as_zero", "U55", "the shifted scale byte 0 is zero instead of 2^-127"),
        _mutant("reads_bias_126", "U52", "the exponent bias of the scale is 126"),
        _mutant("reads_scale_of_next_group", "U23", "groups are read with their neighbour's scale"),
        _mutant("reads_first_row_scales", "U58", "all rows are read with the scales of the first"),
        _mutant("reads_edge_block_wrong", "U58", "a partial block is read with the scale of the block before it"),
        _mutant("reads_truncated", "R2", "the product is truncated to bf16"),
        _mutant("reads_through_bf16_scale", "U53", "the fp32 scale is rounded to bf16"),
        _mutant("reads_subnormals_as_zero", "U60", "subnormal codes are read as zero"),
    ),
    controls=(_control("right_reader"),),
    golden=golden_dequantize,
)
FAKE_QUANTIZE = Op(
    name="fake_quantize",
    reference="deeptwin.reference.quant:fake_quantize",
    outputs=(Output(name="x_tm", rule=Bitwise()),),
    cases=cases_fake_quantize,
    draw=draw_fake_quantize,
    rows={"x_tm": 0},
    out_rows={"x_tm": 0},
    mutants=(
        _mutant("fake_rounds_to_bf16", "U86", "elements are rounded to bf16 instead of to the grid of the codes"),
        _mutant("fake_returns_input", "U86", "nothing is quantised"),
    ),
    controls=(_control("right_fake"),),
)

CARD = Card(
    component="quant",
    summary="group quantisers (e4m3 and e2m1 codes; UE8M0, e4m3 and fp32 scales) and their inverse",
    contract={
        "dtypes": "x bf16, fp16 or fp32; codes float8_e4m3fn or packed uint8; sf uint8, float8_e4m3fn or fp32",
        "rounding": "amax / max and x / s by fp32 division; UE8M0 up by the exponent field; codes ties to even",
        "floor": "on amax, never on the scale; an all-zero group has the scale of the floor and zero codes",
        "layout": "the even e2m1 element in the low nibble; UE8M0 exponent + 127; edge blocks padded with zeros",
        "zero": "the sign of zero is kept",
        "precondition": "x is finite",
    },
    ops=(E4M3_UE8M0, E4M3_F32, E2M1_UE8M0, E2M1_E4M3, DEQUANTIZE, FAKE_QUANTIZE),
    equivalents=(
        Equivalent(
            name="x · (1 / s) for power-of-two scales", reason="the reciprocal of 2^k, |k| ≤ 126, is exact in fp32"
        ),
        Equivalent(
            name="amax · (1 / max) for UE8M0 and e4m3 scales of bf16 input",
            reason="gives the same scale byte for every bf16 amax (checked exhaustively in tests/test_quant.py)",
        ),
        Equivalent(
            name="no saturation of e4m3 codes",
            reason="|x / s| ≤ 448 (1 + 2^-24) when s ≥ amax / 448 (1 − 2^-24), which rounds to 448 by itself",
        ),
    ),
)
