"""How the Hadamard transform is checked: bit for bit, because the order of its sums is part of the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Peer, Relation, variants
from ..relations import row_chunks
from ..rules import Bitwise, Close, OneRounding

_mutant, _control = variants("hadamard")


@dataclass(frozen=True, kw_only=True)
class HadamardCase:
    """`tokens` rows of `width` channels; regime `spread`: magnitudes over 40 powers of two, so that sums round."""

    tokens: int
    width: int = 128
    dtype: str = "bf16"
    out: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-d{self.width}-{self.dtype}-{self.out}-{self.regime}"


def draw(case: HadamardCase, rng: np.random.Generator) -> Inputs:
    """Rows of a regime as a strided view."""
    dtype = draws.DTYPES[case.dtype]
    if case.regime == "spread":
        x = draws.normal(rng, case.tokens, case.width, dtype=torch.float32)
        x = (x * torch.exp2(torch.from_numpy(rng.integers(-20, 21, (case.tokens, case.width))))).to(dtype)
    else:
        x = draws.rows(rng, case.tokens, case.width, dtype=dtype, regime=case.regime)
    return {"x_td": draws.strided(x, pad=8), "dtype": draws.DTYPES[case.out]}


def cases(full: bool) -> list[HadamardCase]:
    """Regimes, every size up to the released one, both storage dtypes, no row, a row more than a program takes."""
    base = HadamardCase(tokens=5)
    regimes = (*REGIMES, "spread", "zeros", "ties", "tiny", "huge", "cancel", "constant")
    found = [replace(base, regime=r) for r in regimes]
    found += [replace(base, regime=r, dtype="fp32", out="fp32") for r in (*REGIMES, "spread")]
    found += [replace(base, width=1 << i, regime="spread") for i in range(7)]
    found += [replace(base, tokens=n) for n in (0, 1, 33)]
    found += [replace(base, tokens=128, regime="spread"), replace(base, width=512, tokens=2, out="fp32")]
    found += [replace(base, dtype="fp16", out="fp16")]
    if full:
        found += [
            HadamardCase(tokens=65, width=w, out=o, regime=r)
            for w, o, r in product((64, 128), ("bf16", "fp32"), regimes)
        ]
    return list({case.id: case for case in found}.values())


def golden_cases() -> list[HadamardCase]:
    """Plain and spread rows in both dtypes."""
    base = HadamardCase(tokens=2, width=16, regime="spread")
    return [base, replace(base, width=128, regime="normal"), replace(base, dtype="fp32", out="fp32")]


def few_rows(case: HadamardCase) -> bool:
    """Relations make many calls."""
    return case.regime in ("normal", "spread") and case.width == 128 and 1 < case.tokens < 10


def one_lowered(case: HadamardCase) -> str | None:
    """Lowered, one shape stands for all."""
    if case.id != "t5-d128-bf16-bf16-normal":
        return "every shape is a program of its own, which takes seconds to build: one of them stands for all"
    return None


HADAMARD = Op(
    name="hadamard",
    reference="deeptwin.reference.hadamard:hadamard",
    outputs=(Output(name="y_td", rule=Bitwise()),),
    cases=cases,
    draw=draw,
    rows={"x_td": 0},
    out_rows={"y_td": 0},
    tile=32,
    relations=(
        Relation(name="batch_invariant", axis="rows", only=few_rows),
        Relation(name="chunk_invariant", axis="chunks of rows", hook=row_chunks, only=few_rows),
        Relation(name="run_to_run", axis="repeats", only=few_rows),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.hadamard:hadamard_triton",
            lowered_declines=one_lowered,
        ),
    ),
    builds=(
        BuildCase(
            name="index-rows",
            kernel="deeptwin.kernels.triton_ops.hadamard:_hadamard",
            launch="deeptwin.parity.builds.launches.hadamard:index_rows",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="explicit-matrix-bf16",
            function="deeptwin.parity.peers.hadamard:explicit_matrix",
            needs=(),
            explains="one product in fp64, rounded once; our butterflies round every sum to fp32 first",
            rules={"y_td": OneRounding(cancellation=2.0**-12)},
            only=lambda case: case.out != "fp32" and case.regime != "huge",
        ),
        Peer(
            name="explicit-matrix-fp32",
            function="deeptwin.parity.peers.hadamard:explicit_matrix",
            needs=(),
            explains="seven roundings to fp32 on the way, none in the explicit product: 2^-23 each",
            rules={"y_td": Close(rtol=2.0**-21)},
            only=lambda case: case.out == "fp32",
        ),
    ),
    mutants=(
        _mutant("transform_missing", "U15", "rows are returned as they are"),
        _mutant("factor_missing", "U15", "the factor d^-0.5 is left out"),
        _mutant("factor_of_the_size", "U15", "the factor is 1 / d"),
        _mutant("factor_bf16", "U86", "the factor is rounded to bf16"),
        _mutant("factor_first", "R6", "the factor is applied before the sums"),
        _mutant("stages_descending", "R6", "pairs that stand far apart are added first"),
        _mutant("last_stage_missing", "U15", "the halves of a row are transformed apart"),
        _mutant("stages_bf16", "U86", "values are rounded to bf16 between stages"),
        _mutant("bit_reversed_order", "U13", "channels come out in bit-reversed order"),
        _mutant("sequency_order", "U13", "channels come out by the number of their sign changes"),
        _mutant("minus_lost", "U15", "the last stage adds twice"),
        _mutant("minus_swapped", "U15", "every difference has the opposite sign"),
        _mutant("truncated", "R2", "the output is truncated to bf16"),
        _mutant("first_row_for_all", "U09", "every row is the transform of the first"),
        _mutant("last_row_unwritten", "U75", "the last row is left unwritten"),
        _mutant("square_transposed", "U84", "a square of rows is transformed along the other axis: norms are right"),
        _mutant("not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(_control("right_butterflies"),),
    golden=golden_cases,
)

CARD = Card(
    component="hadamard",
    summary="normalised Hadamard transform of index rows, natural order",
    contract={
        "dtypes": "x and y bf16, fp16 or fp32; d a power of two",
        "rounding": "every sum to fp32, the product with fp32 d^-0.5 to fp32, one rounding to dtype",
        "order": "pairs (j, j + h) for h = 1, 2, 4 … d / 2",
        "layout": "natural (Sylvester) order of channels",
    },
    ops=(HADAMARD,),
    equivalents=(
        Equivalent(name="two transforms in a row", reason="the matrix is its own inverse: identity but for rounding"),
    ),
)
