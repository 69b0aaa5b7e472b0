"""How SwiGLU is checked, alone and fused with the quantiser of the down projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import QUANT_FORMATS, QuantFormat, ScaleKind

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
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
from ..floats import ordered
from ..relations import CallFn, Context, Variant, batch_invariant, row_chunks
from ..rules import Budget, Codes, OneRounding

_mutant, _control = variants("swiglu")
U = 2.0**-20  # relative error of an honest fp32 evaluation: two ulps of exp, and a rounding for each other step
EDGES = (
    -120.0,
    -89.0,
    -88.5,
    -87.0,
    -40.0,
    -16.0,
    -1.0,
    -0.0,
    0.0,
    0.5,
    9.9375,
    10.0,
    10.0625,
    20.0,
    50.0,
    88.0,
    100.0,
)
Marks = list[tuple[str, Tensor]]

# honest fp32 evaluations differ by a few roundings of each element, which may be lucky on one side. Measured on 1 500
# judgements (2 widths, 5 regimes, 50 seeds; quotient, sigmoid, weight first): worst row 2.8, total 1.7, element 0.2 of
# its limit, mean signed error 0.11 units. A result through bf16 is off by 2^14.
F32_SWIGLU = Budget(kind="fp32 swiglu", floor=1.0, row=6.0, total=4.0, element_factor=4.0, element_slack=8.0, bias=1.0)


@dataclass(frozen=True, kw_only=True)
class SwigluCase:
    """`tokens` rows of two halves of `width`; `limit` 0 is none, `weight` says whether rows are weighted."""

    tokens: int
    width: int
    limit: float = 10.0
    weight: bool = True
    dtype: str = "bf16"
    out: str = "bf16"
    fmt: str = ""
    regime: str = "normal"

    @property
    def id(self) -> str:
        weight = "-weighted" if self.weight else ""
        target = self.fmt or self.out
        return f"t{self.tokens}-f{self.width}-limit{self.limit:g}{weight}-{self.dtype}-{target}-{self.regime}"


def draw(case: SwigluCase, rng: np.random.Generator) -> Inputs:
    """Gates and up projections around the limit as a strided view; weights with zero and one among them."""
    dtype = draws.DTYPES[case.dtype]
    if case.regime == "edges":
        values = np.array(EDGES)
        h = torch.from_numpy(rng.choice(np.concatenate([values, -values]), (case.tokens, 2 * case.width))).to(dtype)
    else:
        scale = {"flat": 1.0, "peaked": 1.0, "tiny": 1.0}.get(case.regime, 6.0)
        h = (draws.rows(rng, case.tokens, 2 * case.width, dtype=torch.float32, regime=case.regime) * scale).to(dtype)
    weight = None
    if case.weight:
        weight = torch.from_numpy(rng.uniform(0.01, 1.5, 2 * case.tokens).astype(np.float32))[::2]
        weight[2:3] = 0.0
        weight[3:4] = 1.0
    inputs: Inputs = {
        "h_ti": draws.strided(h, pad=8),
        "weight_t": weight,
        "limit": case.limit or None,
    }
    return inputs | ({"fmt": QUANT_FORMATS[case.fmt]} if case.fmt else {"dtype": draws.DTYPES[case.out]})


# what an honest evaluation may store, from the marks of CONTRACT


def fp32(x: Tensor) -> Tensor:
    """Rounded to fp32."""
    return x.to(torch.float32).to(torch.float64)


def value_interval(marks: Marks, u: float) -> tuple[Tensor, Tensor]:
    """The value before its quantiser, nearer to zero and further from it by a relative u."""
    _, value = [x for name, x in marks if name == "f32"][:2]
    return fp32(value * (1 - u)), fp32(value * (1 + u))


def scale_order(amax: Tensor, fmt: QuantFormat) -> Tensor:
    """The stored scale of a group with this amax, in value order."""
    scale = fp32(fp32(amax.clamp(min=fmt.amax_floor)) / fmt.max_value)
    if fmt.scale is ScaleKind.F32:
        return ordered(scale.to(torch.float32))
    mantissa, exponent = torch.frexp(scale)
    return (exponent - (mantissa == 0.5).to(torch.int32)).to(torch.int64) + 127


def scale_interval(marks: Marks, arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest stored scale, in value order."""
    fmt: QuantFormat = arguments["fmt"]
    low, high = (x.abs().unflatten(-1, (-1, fmt.group)).amax(-1) for x in value_interval(marks, u))
    return scale_order(low, fmt), scale_order(high, fmt)


def code_interval(marks: Marks, arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest e4m3 code, in value order, under the stored scales."""
    fmt: QuantFormat = arguments["fmt"]
    sf: Tensor = arguments["sf"]
    scale = sf.to(torch.float64) if fmt.scale is ScaleKind.F32 else torch.exp2(sf.to(torch.float64) - 127)
    spread = scale.repeat_interleave(fmt.group, -1)
    ends = [e4m3_order(fp32(x / spread)) for x in value_interval(marks, u)]
    return torch.minimum(*ends), torch.maximum(*ends)


def e4m3_order(x: Tensor) -> Tensor:
    """The e4m3 code of x, in value order."""
    return ordered(x.clamp(-448, 448).to(torch.float32).to(torch.float8_e4m3fn))


def sf_order(sf: Tensor) -> Tensor:
    """Stored scales in value order."""
    return sf.to(torch.int64) if sf.dtype == torch.uint8 else ordered(sf)


# which cases


def _unique(found: list[SwigluCase]) -> list[SwigluCase]:
    return list({case.id: case for case in found}.values())


def cases(full: bool) -> list[SwigluCase]:
    """Every regime with enough elements for the rate rule, with and without limit and weight, odd widths, fp32."""
    base = SwigluCase(tokens=5, width=2304)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "ties", "edges", "cancel", "constant")]
    found += [replace(base, limit=0, weight=False, width=2048, regime=r) for r in (*REGIMES, "edges")]
    small = replace(base, width=96)
    found += [
        replace(small, weight=False, regime="edges"),
        replace(small, limit=0, regime="edges"),
        replace(small, width=128),
        replace(small, limit=0.5, width=33),
        replace(small, tokens=1, width=1),
        replace(small, tokens=9, width=1030),
        replace(small, tokens=0),
        replace(small, width=0),
        replace(small, dtype="fp16"),
        *(replace(small, width=640, out="fp32", regime=r) for r in REGIMES),
        replace(small, width=640, dtype="fp32", out="fp32", limit=0, weight=False),
    ]
    if full:
        found += [
            SwigluCase(tokens=3, width=w, limit=c, weight=g, out=o, regime=r)
            for w, c, g, o, r in product((256, 2048), (0, 10.0), (False, True), ("bf16", "fp32"), REGIMES)
        ]
    return _unique(found)


def cases_quant(full: bool) -> list[SwigluCase]:
    """Regimes on Q8 rows, with and without limit and weight."""
    base = SwigluCase(tokens=5, width=2304, fmt="q8")
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "ties", "tiny", "edges")]
    small = replace(base, width=96)
    found += [replace(base, weight=False, width=1056), replace(small, limit=0), replace(small, tokens=0)]
    found += [
        replace(small, width=32, tokens=1),
        replace(small, width=128),
        replace(small, width=256, fmt="fp8_1x128_ue8m0", regime="edges"),
    ]
    if full:
        found += [
            SwigluCase(tokens=3, width=w, limit=c, weight=g, fmt=f, regime=r)
            for w, c, g, f, r in product(
                (256, 2304), (0, 10.0), (False, True), ("q8", "fp8_1x128_ue8m0"), (*REGIMES, "edges")
            )
        ]
    return _unique(found)


def cases_quant_f32(full: bool) -> list[SwigluCase]:
    """The format of V3 activations: no limit, no weight."""
    base = SwigluCase(tokens=5, width=2048, limit=0, weight=False, fmt="fp8_1x128")
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "edges")]
    found += [replace(base, width=128, tokens=3), replace(base, width=128, tokens=0)]
    if full:
        found += [replace(base, width=w, weight=True, limit=10.0, regime=r) for w, r in product((256, 2304), REGIMES)]
    return _unique(found)


# relation hooks


def _fits(value: Any) -> Any:
    return value.nan_to_num(nan=3e4) if isinstance(value, Tensor) else value


def independent_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows alone, permuted, in chunks and beside garbage: huge numbers where a quantiser takes no NaN."""
    for variant in (*batch_invariant(inputs, context), *row_chunks(inputs, context)):
        calls = variant.calls
        if "fmt" in inputs:
            calls = tuple({name: _fits(value) for name, value in call.items()} for call in calls)
        yield replace(variant, label=variant.label.replace("NaN", "huge" if "fmt" in inputs else "NaN"), calls=calls)


def rounds_what_it_returns(inputs: Inputs, outputs: Outputs, partner: CallFn | None) -> tuple[Outputs, Outputs]:
    """Codes and scales of the fused operation are those of the fp32 value that SwiGLU alone returns."""
    from deeptwin.reference.quant import quantize

    assert partner is not None
    value = partner({n: inputs[n] for n in ("h_ti", "weight_t", "limit")} | {"dtype": torch.float32})["y_tf"]
    codes, sf = quantize(value, fmt=inputs["fmt"])
    return outputs, {"codes": codes, "sf": sf.to(outputs["sf"].dtype)}


def few_calls(case: Any) -> bool:
    """Relations make many calls: they run on few elements."""
    return case.regime in ("normal", "edges", "file") and (case.regime == "file" or case.width <= 128)


def outside_tile_kernels(case: SwigluCase) -> str | None:
    """Why TileKernels' SwiGLU does not take a case."""
    if case.width % 64 or not case.width or "fp16" in (case.dtype, case.out):
        return "halves of 64·n columns in bf16 or fp32"
    return None


def golden() -> list[SwigluCase]:
    """The edges of the limit in either dtype, with and without a weight."""
    base = SwigluCase(tokens=4, width=24, regime="edges")
    return [base, replace(base, weight=False, limit=0), replace(base, out="fp32")]


def golden_quant() -> list[SwigluCase]:
    """One case with everything."""
    return [SwigluCase(tokens=4, width=64, fmt="q8", regime=r) for r in ("normal", "edges")]


RELATIONS = (
    Relation(name="batch_invariant", axis="rows and row chunks", hook=independent_rows, only=few_calls),
    Relation(name="run_to_run", axis="repeats", only=few_calls),
)

SWIGLU = Op(
    name="swiglu",
    reference="deeptwin.reference.swiglu:swiglu",
    outputs=(Output(name="y_tf", rule={torch.bfloat16: OneRounding(), torch.float32: F32_SWIGLU}),),
    cases=cases,
    draw=draw,
    rows={"h_ti": 0, "weight_t": 0},
    out_rows={"y_tf": 0},
    relations=RELATIONS,
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.swiglu:swiglu_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.swiglu:swiglu_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_tile_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="f2304-limit-weight",
            kernel="deeptwin.kernels.triton_ops.swiglu:_swiglu",
            launch="deeptwin.parity.builds.launches.swiglu:swiglu_2304",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="f2048",
            kernel="deeptwin.kernels.triton_ops.swiglu:_swiglu",
            launch="deeptwin.parity.builds.launches.swiglu:swiglu_2048",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.swiglu:tile_kernels_swiglu",
            needs=("tile_kernels",),
            explains="tile_kernels 2.1.0, torch.swiglu.swiglu_forward: fp32 in our order, rounded here",
            only=lambda case: case.dtype != "fp16" and case.out == "bf16",
        ),
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.swiglu:transformers_swiglu",
            needs=("transformers",),
            explains="DeepseekV4Experts._apply_gate on fp32 rows; it has a limit and weighs rows elsewhere",
            only=lambda case: case.limit > 0 and not case.weight and case.out == "bf16",
        ),
    ),
    mutants=(
        _mutant("truncated", "R2", "the result is truncated to bf16"),
        _mutant("fp32_through_bf16", "R1", "an fp32 result is rounded to bf16 on the way"),
        _mutant("silu_rounded_to_bf16", "U86", "silu(gate) is rounded to bf16 before the product"),
        _mutant("silu_rounded_to_fp16", "U86", "silu(gate) is rounded to fp16 before the product"),
        _mutant("halves_swapped", "U50", "w1 and w3 change places: the up projection is gated by its own half"),
        _mutant("halves_interleaved", "U14", "gate and up are read in turns"),
        _mutant("limit_missing", "U85", "neither half is limited, as in a shared expert of the first revision"),
        _mutant("gate_unlimited", "U50", "the gate is not limited"),
        _mutant("gate_limited_below_too", "U39", "the gate is limited on either side"),
        _mutant("gate_limited_below_only", "U39", "the gate is limited from below instead of above"),
        _mutant("gate_limited_after_silu", "U50", "the limit comes after silu"),
        _mutant("up_unlimited", "U50", "the up projection is not limited"),
        _mutant("up_limited_above_only", "U39", "the up projection is limited from above only"),
        _mutant("up_limited_below_only", "U39", "the up projection is limited from below only"),
        _mutant("limit_is_7", "U49", "the limit is 7 whatever is asked for"),
        _mutant("unstable_exp", "U51", "exp(a) / (1 + exp(a)): infinity over infinity from 89"),
        _mutant("gelu", "U39", "another gate function"),
        _mutant("negative_gates_cut", "U24", "gates below zero give zero"),
        _mutant("weight_missing", "U44", "the routing weight is left out"),
        _mutant("weight_squared", "U44", "the routing weight is applied twice"),
        _mutant("weight_on_gate", "U44", "the routing weight is applied before silu"),
        _mutant("weight_of_next_row", "U37", "rows are weighted with their neighbour's weight"),
        _mutant("last_row_stale", "U75", "the last row is left unwritten"),
        _mutant("tail_unwritten", "U26", "columns beyond a multiple of 128 are left unwritten"),
    ),
    controls=(
        _control("right_quotient"),
        _control("right_sigmoid"),
        _control("right_weight_first"),
    ),
    golden=golden,
)


def _quant_op(name: str, found: Any, sf: torch.dtype, golden_cases: Any, build: BuildCase, mine: bool) -> Op:
    return Op(
        name=name,
        reference="deeptwin.reference.swiglu:swiglu_quant",
        outputs=(
            Output(name="codes", rule=Codes(u=U, allowed=code_interval, order=ordered), dtype=torch.float8_e4m3fn),
            Output(name="sf", rule=Codes(u=U, allowed=scale_interval, order=sf_order), dtype=sf),
        ),
        cases=found,
        draw=draw,
        rows={"h_ti": 0, "weight_t": 0},
        out_rows={"codes": 0, "sf": 0},
        relations=(
            *RELATIONS,
            Relation(
                name="layout_round_trip",
                axis="SwiGLU in fp32, then quantiser",
                hook=rounds_what_it_returns,
                partner="swiglu",
                only=few_calls,
            ),
        ),
        candidates=(
            Candidate(name="triton", function="deeptwin.optimized.swiglu:swiglu_quant_triton"),
            Sm90Candidate(
                name="tile-kernels",
                function="deeptwin.optimized.swiglu:swiglu_quant_tile_kernels",
                needs=("tile_kernels",),
                declines=outside_tile_kernels,
                unpromised={} if mine else {"layout_round_trip": "codes are products with 448 / amax, not quotients"},
            ),
        ),
        builds=(build,),
        peers=(
            Peer(
                name="tile-kernels",
                function="deeptwin.parity.peers.swiglu:tile_kernels_swiglu_quant",
                needs=("tile_kernels",),
                explains="tile_kernels 2.1.0, swiglu_forward and cast of its fp32 value",
                only=lambda case: mine,
            ),
        ),
        mutants=(
            _mutant("quant_of_rounded_value", "U86", "the value is rounded to bf16 before its quantiser"),
            _mutant("quant_halves_swapped", "U50", "w1 and w3 change places"),
            _mutant("quant_codes_truncated", "U60", "codes are truncated"),
            _mutant("quant_codes_through_bf16", "U86", "x / s is rounded to bf16 before e4m3"),
            _mutant("quant_floor_on_scale", "U94", "the floor is applied to the scale"),
            _mutant("quant_no_floor", "U59", "an all-zero group divides 0 by 0"),
            _mutant("quant_payload_not_requantised", "U53", "the scale is rounded up, the codes are not"),
            _mutant("quant_scale_floor_of_exponent", "U52", "the scale keeps the exponent of one that is no power"),
            _mutant("quant_weight_after", "U44", "the routing weight is applied to the codes"),
            _mutant("quant_weight_missing", "U44", "the routing weight is left out"),
            _mutant("quant_amax_unweighted", "U44", "amax is taken before the routing weight"),
            _mutant("quant_limit_missing", "U85", "neither half is limited"),
            _mutant("quant_gate_limited_below_too", "U39", "the gate is limited on either side"),
            _mutant("quant_up_limited_above_only", "U39", "the up projection is limited from above only"),
            _mutant("quant_scale_of_batch", "U76", "rows of the batch share the largest amax"),
        )
        if mine
        else (
            _mutant("quant_of_rounded_value", "U86", "the value is rounded to bf16 before its quantiser"),
            _mutant("quant_halves_swapped", "U50", "w1 and w3 change places"),
            _mutant("quant_codes_truncated", "U60", "codes are truncated"),
            _mutant("quant_no_floor", "U59", "an all-zero group divides 0 by 0"),
            _mutant("quant_floor_on_scale", "U94", "the floor is applied to the scale"),
        ),
        controls=(
            _control("quant_right"),
            _control("quant_right_sigmoid"),
        ),
        golden=golden_cases,
    )


CARD = Card(
    component="swiglu",
    summary="SwiGLU with limit and routing weight, alone and fused with a group quantiser",
    contract={
        "dtypes": "rows and weight bf16, fp16 or fp32; y in `dtype`; fused: e4m3 codes, scales of the format",
        "layout": "gate in the first half of a row, up in the second",
        "rounding": "once, at return; fused: the fp32 value is quantised, with no rounding to bf16 before",
        "limit": "gate from above, up on either side; None for a model without one",
        "order": "a / (1 + exp(-a)), times up, times the weight",
        "edges": "exp(-a) overflows to infinity below -88.7: the result is a zero",
        "precondition": "fused: the value is finite",
    },
    ops=(
        SWIGLU,
        _quant_op(
            "swiglu_quant",
            cases_quant,
            torch.uint8,
            golden_quant,
            BuildCase(
                name="q8-f2304",
                kernel="deeptwin.kernels.triton_ops.swiglu:_swiglu_quant",
                launch="deeptwin.parity.builds.launches.swiglu:swiglu_quant_2304",
                expect=NO_PRODUCT | VECTOR,
            ),
            True,
        ),
        _quant_op(
            "swiglu_quant_f32",
            cases_quant_f32,
            torch.float32,
            tuple,
            BuildCase(
                name="fp8_1x128-f2048",
                kernel="deeptwin.kernels.triton_ops.swiglu:_swiglu_quant",
                launch="deeptwin.parity.builds.launches.swiglu:swiglu_quant_2048",
                expect=NO_PRODUCT | VECTOR,
            ),
            False,
        ),
    ),
    equivalents=(
        Equivalent(
            name="clamp before or after the rounding of the product before",
            reason="a limit of 10 is exact in bf16, and rounding is monotone",
        ),
        Equivalent(name="a · 1 / (1 + exp(-a))", reason="differs by one fp32 rounding; controls of the card"),
    ),
)
