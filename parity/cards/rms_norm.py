"""How RMSNorm is checked, alone and fused with a group quantiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import QUANT_FORMATS, QuantFormat, ScaleKind, WeightCast

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
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
from ..floats import ordered, ulp_distance
from ..pairing import every_pair
from ..relations import CallFn, Context, Variant, row_chunks
from ..rules import Budget, Codes, Judgement, OneRounding, Oracles
from .quant import independent_rows

_mutant, _control = variants("rms_norm")
U = 2.0**-20  # relative error of an honest fp32 norm before its first rounding, with room
ALL_REGIMES = (*REGIMES, "zeros", "ties", "tiny", "huge", "subnormal", "cancel", "constant")
Marks = list[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """`tokens` rows of `width`; `dtype` is that of the input and, for the plain norm, of the output."""

    tokens: int
    width: int
    cast: str = "after"
    eps: float = 1e-6
    dtype: str = "bf16"
    out: str = "bf16"
    fmt: str = ""
    regime: str = "normal"

    @property
    def id(self) -> str:
        fmt = f"-{self.fmt}" if self.fmt else ""
        return f"t{self.tokens}-m{self.width}-{self.cast}-eps{self.eps:g}-{self.dtype}-{self.out}{fmt}-{self.regime}"


# what an honest evaluation may store, from the marks of CONTRACT


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.bfloat16).to(torch.float64)


def norm_interval(marks: Marks, arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest bf16 norm when the value before the first rounding is off by a relative u."""
    first = next(x for name, x in marks if name == "bf16")
    ends = [_bf16(first * (1 - u)), _bf16(first * (1 + u))]
    if arguments["cast"] is WeightCast.BEFORE_WEIGHT:
        ends = [_bf16(end * arguments["weight_m"].to(torch.float64)) for end in ends]
    return torch.minimum(*ends), torch.maximum(*ends)


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.float64)


def _groups(x: Tensor, fmt: QuantFormat) -> Tensor:
    return x.unflatten(-1, (-1, fmt.group))


def scale_interval(marks: Marks, arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest stored scale (in `ordered` or byte order) of rows inside `norm_interval`."""
    fmt: QuantFormat = arguments["fmt"]
    low, high = (_groups(x, fmt) for x in norm_interval(marks, arguments, u))
    spans_zero = (low <= 0) & (high >= 0)
    least = torch.where(spans_zero, 0.0, torch.minimum(low.abs(), high.abs())).amax(-1)
    most = torch.maximum(low.abs(), high.abs()).amax(-1)
    return _scale_order(least, fmt), _scale_order(most, fmt)


def _scale_order(amax: Tensor, fmt: QuantFormat) -> Tensor:
    scale = _fp32(_fp32(amax.clamp(min=fmt.amax_floor)) / fmt.max_value)
    if fmt.scale is ScaleKind.F32:
        return ordered(scale.to(torch.float32))
    mantissa, exponent = torch.frexp(scale)
    return (exponent - (mantissa == 0.5).to(torch.int32)).to(torch.int64) + 127


def code_interval(marks: Marks, arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest e4m3 code, in value order, of rows inside `norm_interval` under the stored scales."""
    fmt: QuantFormat = arguments["fmt"]
    sf: Tensor = arguments["sf"]
    scale = sf.to(torch.float64) if fmt.scale is ScaleKind.F32 else torch.exp2(sf.to(torch.float64) - 127)
    spread = scale.repeat_interleave(fmt.group, -1)
    low, high = (_e4m3_order(_fp32(x / spread)) for x in norm_interval(marks, arguments, u))
    return low, high


def _e4m3_order(x: Tensor) -> Tensor:
    return ordered(x.clamp(-448, 448).to(torch.float32).to(torch.float8_e4m3fn))


def sf_order(sf: Tensor) -> Tensor:
    """Stored scales in value order."""
    return sf.to(torch.int64) if sf.dtype == torch.uint8 else ordered(sf)


class NormRounding(OneRounding):
    """`OneRounding`, except that a norm rounded before its weight may move by what a flip of that rounding moves.

    The product with a weight near 2 carries a flipped last bit to 2 ulp of the result. Such an element counts as
    differing by one; how many may differ stays as it is.
    """

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge `got` against CONTRACT, elements inside `norm_interval` counted as one ulp at most."""
        if got.dtype != torch.bfloat16 or oracles.arguments["cast"] is not WeightCast.BEFORE_WEIGHT:
            return super().judge(got, oracles)
        low, high = norm_interval(oracles.marks, oracles.arguments, U)
        expected = oracles.contract.to(got.dtype)
        wide = got.to(torch.float64)
        lawful = (wide >= low) & (wide <= high) & (ulp_distance(got, expected) > 1)
        neighbour = torch.nextafter(expected, got)
        return super().judge(torch.where(lawful, neighbour, got), oracles)


# honest fp32 norms differ by the error of one number per row, which may be lucky on one side: RIVAL counts as at least
# one unit. 6 636 judgements (widths 300, 1536, 7168; 7 regimes, both casts, 50 seeds; 3 orders of summation and the
# Triton kernel): worst row 5.96 (constant rows), total 2.73, element 2.61 (RIVAL's + 1). A 12-bit root is 4 096 units.
F32_NORM = Budget(kind="fp32 norm", floor=1.0, row=12.0, total=6.0, element_factor=6.0, element_slack=6.0, bias=1.0)


def draw(case: NormCase, rng: np.random.Generator) -> Inputs:
    """Rows of a regime as a strided view; weights of both signs with zeros and large ones among them."""
    dtype = draws.DTYPES[case.dtype]
    x = draws.rows(rng, case.tokens, case.width, dtype=dtype, regime=case.regime)
    weight = draws.normal(rng, case.width, dtype=torch.bfloat16, scale=0.5, mean=1.0)
    weight[: case.width // 64] *= 30
    if case.width > 8:
        weight[-2:] = torch.tensor([0.0, -1.9921875])
    inputs: Inputs = {
        "x_tm": draws.strided(x, pad=8),
        "weight_m": weight.to(dtype),
        "eps": case.eps,
        "cast": WeightCast.AFTER_WEIGHT if case.cast == "after" else WeightCast.BEFORE_WEIGHT,
    }
    if case.fmt:
        return inputs | {"fmt": QUANT_FORMATS[case.fmt]}
    return inputs | {"dtype": draws.DTYPES[case.out]}


WIDTHS = (128, 512, 1280, 1536, 4096, 5120, 7168)


def cases(full: bool) -> list[NormCase]:
    """Every regime with enough elements for the rate rule, both casts and epsilons, production and awkward widths."""
    found = [NormCase(tokens=2, width=7168, eps=1e-20, regime=regime) for regime in ALL_REGIMES]
    before = NormCase(tokens=3, width=5120, cast="before")
    found += [replace(before, regime=regime) for regime in REGIMES]
    found += [NormCase(tokens=3, width=512, cast=c, eps=e) for c, e in product(("after", "before"), (1e-20, 1e-6))]
    found += [NormCase(tokens=2, width=w) for w in (1, 2, 127, 128, 1280, 1536, 2049, 4096)]
    found += [replace(before, width=512, regime=r, eps=e) for r, e in (("tiny", 1e-20), ("zeros", 1e-6))]
    found += [NormCase(tokens=0, width=512)]
    f32 = NormCase(tokens=3, width=1536, dtype="fp32", out="fp32")
    found += [
        replace(f32, regime=r, cast=c) for r, c in zip(REGIMES, ("after", "before", "after", "before"), strict=True)
    ]
    found += [replace(f32, out="bf16"), replace(f32, dtype="bf16", width=300), replace(f32, tokens=0)]
    if full:
        found += [
            NormCase(tokens=3, width=w, cast=c, eps=e, regime=r)
            for w, c, e, r in every_pair(WIDTHS, ("after", "before"), (1e-20, 1e-6), ALL_REGIMES)
            # 1e-6 alone makes 1 / rms exactly 1000: rows full of midpoints, which no arithmetic can be asked to hit
            if e == 1e-20 or r not in ("tiny", "subnormal")
        ]
        regimes = tuple(r for r in ALL_REGIMES if r != "huge")
        found += [
            replace(f32, width=w, cast=c, regime=r) for w, c, r in every_pair(WIDTHS, ("after", "before"), regimes)
        ]
    return list({case.id: case for case in found}.values())


def cases_quant(full: bool) -> list[NormCase]:
    """Regimes on Q8 rows, both casts, the other power-of-two format."""
    base = NormCase(tokens=2, width=5120, eps=1e-20, fmt="q8")
    found = [replace(base, regime=regime) for regime in ALL_REGIMES]
    found += [replace(base, width=1536, cast="before", eps=1e-6, regime=regime) for regime in REGIMES]
    found += [replace(base, width=7168, fmt="fp8_1x128_ue8m0"), replace(base, width=32), replace(base, tokens=0)]
    found += [replace(base, width=1280, dtype="fp32"), replace(base, tokens=3, width=96, regime="peaked")]
    if full:
        formats = ("q8", "fp8_1x128_ue8m0")
        found += [
            replace(base, tokens=3, width=w, cast=c, fmt=f, regime=r)
            for w, c, f, r in every_pair(WIDTHS, ("after", "before"), formats, ALL_REGIMES)
        ]
    return list({case.id: case for case in found}.values())


def cases_quant_f32(full: bool) -> list[NormCase]:
    """The format of V3 activations."""
    base = NormCase(tokens=2, width=7168, fmt="fp8_1x128", cast="before")
    found = [replace(base, regime=regime) for regime in (*REGIMES, "zeros")]
    found += [replace(base, width=128), replace(base, tokens=0)]
    if full:
        found += [
            replace(base, width=w, cast=c, eps=1e-20, regime=r)
            for w, c, r in every_pair(WIDTHS, ("after", "before"), ALL_REGIMES)
        ]
    return list({case.id: case for case in found}.values())


def quantises_what_it_stores(inputs: Inputs, outputs: Outputs, partner: CallFn | None) -> tuple[Outputs, Outputs]:
    """Codes and scales of the fused operation are those of the bf16 rows it returns, byte for byte."""
    from deeptwin.reference.quant import quantize

    codes, sf = quantize(outputs["y_tm"], fmt=inputs["fmt"])
    return {"codes": outputs["codes"], "sf": outputs["sf"]}, {"codes": codes, "sf": sf.to(outputs["sf"].dtype)}


def few_calls(case: Any) -> bool:
    """Relations make many calls: they run on the regimes where an order of summation shows, on few of them."""
    return case.regime in ("normal", "mean1", "file") and (case.width <= 2100 or case.tokens == 0)


def scaled(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A row times a power of two has the same norm, bit by bit, as long as eps stays below half an ulp of its mean."""
    for power in (-8, 6):
        yield Variant(label=f"rows times 2^{power}", calls=(inputs | {"x_tm": inputs["x_tm"] * 2.0**power},))


def without_eps(case: Any) -> bool:
    """Where scaling can be seen apart from eps."""
    return few_calls(case) and getattr(case, "eps", 1.0) <= 1e-20 and case.regime in REGIMES and case.tokens > 0


def serial_fp32_sum(case: Any) -> str | None:
    """The fp32 budget is not for the order in which loops on a CPU add a row."""
    if case.out == "fp32":
        return "the loops on the CPU add a row one by one, as no chip does: its fp32 budget is not for that order"
    return None


def outside_tile_kernels(case: NormCase) -> str | None:
    """Why TileKernels' norm does not take a case."""
    if case.cast != "after" or case.width % 16 or case.width > 8192 or case.dtype == "fp16":
        return "the weight before the only rounding, rows of 16·n elements up to 8192 in bf16 or fp32"
    if case.fmt and (case.fmt != "q8" or case.dtype != "bf16"):
        return "fused: e4m3 codes with UE8M0 scales of 32 of bf16 rows"
    return None if case.fmt or case.out == case.dtype else "the result has the dtype of the rows"


def golden() -> list[NormCase]:
    """Both casts, both epsilons, small rows."""
    base = NormCase(tokens=2, width=48)
    found = [replace(base, cast=c, eps=e) for c, e in product(("after", "before"), (1e-20, 1e-6))]
    return [
        *found,
        replace(base, regime="tiny", eps=1e-20),
        replace(base, regime="zeros"),
        replace(base, out="fp32", dtype="fp32"),
    ]


def golden_quant() -> list[NormCase]:
    """One fused case per cast."""
    return [NormCase(tokens=2, width=64, fmt="q8", cast=c, eps=1e-20) for c in ("after", "before")]


def _relations(batch: Callable[..., Iterator[Variant]] | None) -> tuple[Relation, ...]:
    rows = (
        (
            Relation(name="batch_invariant", axis="rows", only=few_calls),
            Relation(name="chunk_invariant", axis="row chunks", hook=row_chunks, only=few_calls),
        )
        if batch is None
        else (Relation(name="batch_invariant", axis="rows and row chunks", hook=batch, only=few_calls),)
    )
    return (
        *rows,
        Relation(name="layout_invariant", axis="alignment of rows", only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=few_calls),
    )


NORM = Op(
    name="rms_norm",
    reference="deeptwin.reference.rms_norm:rms_norm",
    outputs=(Output(name="y_tm", rule={torch.bfloat16: NormRounding(), torch.float32: F32_NORM}),),
    cases=cases,
    draw=draw,
    rows={"x_tm": 0},
    out_rows={"y_tm": 0},
    relations=(
        *_relations(None),
        Relation(name="scale_equivariance", axis="scale of the rows", hook=scaled, only=without_eps),
    ),
    candidates=(
        Candidate(
            name="triton", function="deeptwin.optimized.rms_norm:rms_norm_triton", lowered_declines=serial_fp32_sum
        ),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.rms_norm:rms_norm_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_tile_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="m7168",
            kernel="deeptwin.kernels.triton_ops.rms_norm:_rms_norm",
            launch="deeptwin.parity.builds.launches.rms_norm:norm_7168",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="m5120",
            kernel="deeptwin.kernels.triton_ops.rms_norm:_rms_norm",
            launch="deeptwin.parity.builds.launches.rms_norm:norm_5120",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="m512-before-weight",
            kernel="deeptwin.kernels.triton_ops.rms_norm:_rms_norm",
            launch="deeptwin.parity.builds.launches.rms_norm:norm_512",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="m5120-fp32",
            kernel="deeptwin.kernels.triton_ops.rms_norm:_rms_norm",
            launch="deeptwin.parity.builds.launches.rms_norm:norm_5120_fp32",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.rms_norm:deepseek_v3",
            needs=("transformers",),
            explains="DeepseekV3RMSNorm rounds before the weight; fp32 statistics on both sides",
            only=lambda case: case.cast == "before" and case.dtype == case.out,
        ),
        Peer(
            name="torch",
            function="deeptwin.parity.peers.rms_norm:torch_fp64",
            needs=(),
            explains="torch.nn.functional.rms_norm in fp64, rounded once; its sum of squares cannot overflow",
            only=lambda case: case.cast == "after" and case.regime != "huge",
        ),
    ),
    mutants=(
        _mutant("truncated", "R2", "the output is truncated to bf16"),
        _mutant("rounded_twice", "U86", "AFTER_WEIGHT with a second rounding before the weight"),
        _mutant("rounded_once", "U39", "BEFORE_WEIGHT without the rounding before the weight"),
        _mutant("rounded_through_fp16", "U86", "the row is rounded to fp16 on the way"),
        _mutant("eps_outside_sqrt", "U39", "eps is added to the root, not to the mean square"),
        _mutant("eps_missing", "U39", "eps is left out"),
        _mutant("eps_1e_6", "U39", "eps is 1e-6 whatever is asked for"),
        _mutant("eps_1e_5", "U39", "eps is 1e-5 whatever is asked for"),
        _mutant("eps_on_sum", "U39", "eps is added to the sum, not to the mean"),
        _mutant("mean_over_padded_width", "U26", "the mean divides by the width padded to a power of two"),
        _mutant("last_channel_not_counted", "U26", "the last channel is left out of the statistics"),
        _mutant("tail_unwritten", "U75", "channels beyond the last whole block of 128 are left unwritten"),
        _mutant("statistics_bf16", "U17", "squares are rounded to bf16"),
        _mutant("mean_bf16", "U17", "the mean square is rounded to bf16"),
        _mutant("inverse_rms_bf16", "U17", "1 / rms is rounded to bf16"),
        _mutant("accumulator_bf16", "U09", "the sum of squares is kept in bf16"),
        _mutant("approximate_rsqrt", "U17", "1 / rms has 12 correct bits"),
        _mutant("mean_subtracted", "U39", "the mean is subtracted, as a layer norm does"),
        _mutant("weight_plus_one", "U39", "the weight is 1 + w"),
        _mutant(
            "weight_bf16_product", "U86", "bf16 product of the rounded row and the weight, where one rounding is asked"
        ),
        _mutant("statistics_of_first_row", "U75", "every row uses the statistics of the first"),
        _mutant("statistics_over_batch", "U76", "the mean square is taken over the batch"),
        _mutant("last_row_stale", "U75", "the last row is left unwritten"),
        _mutant("split_depends_on_batch", "U73", "the order of summation depends on the number of rows"),
        _mutant("not_deterministic", "U10", "a counter leaks into the output: the second launch differs"),
    ),
    controls=(_control("right_wide_sum"), _control("right_blocks_of_512"), _control("right_lanes_of_128_backwards")),
    golden=golden,
)


# the library casts in groups of 32 with UE8M0 scales only
TILE_KERNELS_QUANT = Sm90Candidate(
    name="tile-kernels",
    function="deeptwin.optimized.rms_norm:rms_norm_quant_tile_kernels",
    needs=("tile_kernels",),
    declines=outside_tile_kernels,
)


def _quant_op(
    name: str, formats: Callable[[bool], list[NormCase]], sf: torch.dtype, golden: Any, builds: tuple[BuildCase, ...]
) -> Op:
    return Op(
        name=name,
        reference="deeptwin.reference.rms_norm:rms_norm_quant",
        outputs=(
            Output(name="y_tm", rule=NormRounding(), dtype=torch.bfloat16),
            Output(name="codes", rule=Codes(u=U, allowed=code_interval, order=ordered), dtype=torch.float8_e4m3fn),
            Output(name="sf", rule=Codes(u=U, allowed=scale_interval, order=sf_order), dtype=sf),
        ),
        cases=formats,
        draw=draw,
        rows={"x_tm": 0},
        out_rows={"y_tm": 0, "codes": 0, "sf": 0},
        relations=(
            *_relations(independent_rows),
            Relation(name="layout_round_trip", axis="norm, then quantiser", hook=quantises_what_it_stores),
        ),
        candidates=(
            Candidate(name="triton", function="deeptwin.optimized.rms_norm:rms_norm_quant_triton"),
            *(() if sf is torch.float32 else (TILE_KERNELS_QUANT,)),
        ),
        builds=builds,
        mutants=(
            _mutant("codes_of_unrounded_norm", "U86", "codes come from the norm before its rounding to bf16"),
            _mutant("amax_of_unrounded_norm", "U86", "amax comes from the norm before its rounding to bf16"),
            _mutant("quant_truncated", "R2", "the norm is truncated to bf16"),
            _mutant("quant_codes_truncated", "U60", "codes are truncated"),
            _mutant("quant_scale_floor_on_scale", "U94", "the floor is applied to the scale"),
            _mutant("quant_amax_of_row", "U53", "one amax for the whole row"),
            _mutant("quant_amax_before_weight", "U53", "amax is taken before the weight"),
            _mutant("quant_scale_next_power", "U56", "an exact power of two is rounded up to the next"),
            _mutant("quant_other_cast", "U86", "the other weight cast"),
        ),
        controls=(_control("right_quant_wide_sum"), _control("right_quant_lanes_of_128_backwards")),
        golden=golden,
    )


QUANT_BUILDS = (
    BuildCase(
        name="m5120-1x32",
        kernel="deeptwin.kernels.triton_ops.rms_norm:_rms_norm_quant",
        launch="deeptwin.parity.builds.launches.rms_norm:norm_quant_5120_1x32",
        expect=NO_PRODUCT | VECTOR,
    ),
    BuildCase(
        name="tilelang-m5120-1x32",
        dsl="tilelang",
        kernel="deeptwin.kernels.ascend_ops.rms_norm:rms_norm_quant_program",
        launch="deeptwin.parity.builds.launches.rms_norm_tilelang:ascend_5120_q8",
        expect={"ascend950-simd": Expect(mma=None)},
    ),
    BuildCase(
        name="tilelang-m7168-1x128",
        dsl="tilelang",
        kernel="deeptwin.kernels.ascend_ops.rms_norm:rms_norm_quant_program",
        launch="deeptwin.parity.builds.launches.rms_norm_tilelang:ascend_7168_fp8_1x128_ue8m0",
        expect={"ascend950-simd": Expect(mma=None)},
    ),
)
QUANT_F32_BUILDS = (
    BuildCase(
        name="m7168-1x128",
        kernel="deeptwin.kernels.triton_ops.rms_norm:_rms_norm_quant",
        launch="deeptwin.parity.builds.launches.rms_norm:norm_quant_7168_1x128",
        expect=NO_PRODUCT | VECTOR,
    ),
    BuildCase(
        name="tilelang-m7168-1x128",
        dsl="tilelang",
        kernel="deeptwin.kernels.ascend_ops.rms_norm:rms_norm_quant_program",
        launch="deeptwin.parity.builds.launches.rms_norm_tilelang:ascend_7168_fp8_1x128",
        expect={"ascend950-simd": Expect(mma=None)},
    ),
)

CARD = Card(
    component="rms_norm",
    summary="root-mean-square norm, alone and fused with a group quantiser",
    contract={
        "dtypes": "x and weight bf16, fp16 or fp32; y in `dtype`; fused: y bf16, e4m3 codes, scales of the format",
        "rounding": "AFTER_WEIGHT: once; BEFORE_WEIGHT: the row, then the product; codes of the bf16 row",
        "statistics": "fp32, any order that does not depend on the batch; a sum that overflows gives zeros",
        "eps": "inside the root, added to the mean square",
    },
    ops=(
        NORM,
        _quant_op("rms_norm_quant", cases_quant, torch.uint8, golden_quant, QUANT_BUILDS),
        _quant_op("rms_norm_quant_f32", cases_quant_f32, torch.float32, tuple, QUANT_F32_BUILDS),
    ),
    equivalents=(
        Equivalent(name="order of summation", reason="the contract rounds the sum once; honest orders stay within u"),
        Equivalent(
            name="eps 0 for 1e-20 on rows above 1e-6",
            reason="1e-20 is below half an ulp of any mean square above 1e-12; the regimes tiny and zeros see it",
        ),
    ),
)
