"""How Muon is checked: against singular values, and by what its iteration must leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import MUON_V4

from .. import draws
from ..card import REGIMES, Card, Equivalent, Inputs, Op, Output, Peer, Relation, variants
from ..relations import Context, Variant
from ..rules import MUON

_mutant, _control = variants("muon")
PEERS = "deeptwin.parity.peers.muon"


@dataclass(frozen=True, kw_only=True)
class MuonCase:
    """A matrix of `rows` x `columns`, or a tensor whose later axes are `columns` together."""

    rows: int
    columns: int
    axes: int = 2
    rank: int = 0  # 0: full
    regime: str = "normal"

    @property
    def tokens(self) -> int:
        """Rows, as the measurement of the limits counts them."""
        return self.rows

    @property
    def id(self) -> str:
        extras = (f"-axes{self.axes}" if self.axes > 2 else "") + (f"-rank{self.rank}" if self.rank else "")
        return f"i{self.rows}-j{self.columns}{extras}-{self.regime}"


def _matrix(case: MuonCase, rng: np.random.Generator) -> Tensor:
    if case.rank:
        left, right = (
            draws.normal(rng, *s, dtype=torch.float32) for s in ((case.rows, case.rank), (case.rank, case.columns))
        )
        return left @ right
    if case.regime == "spectrum":  # singular values from 1 down to 1 / 8
        u, _, v = torch.linalg.svd(draws.normal(rng, case.rows, case.columns, dtype=torch.float64), full_matrices=False)
        return ((u * torch.linspace(1, 0.125, len(v), dtype=torch.float64)) @ v).float()
    if case.regime == "small":  # far above the floor of the norm, far below ordinary updates
        return draws.rows(rng, case.rows, case.columns, dtype=torch.float32, regime="normal") * 2.0**-20
    return draws.rows(rng, case.rows, case.columns, dtype=torch.float32, regime=case.regime)


def draw(case: MuonCase, rng: np.random.Generator) -> Inputs:
    """An update with gaps between its rows."""
    return {"update_ij": draws.strided(_matrix(case, rng), pad=3), "config": MUON_V4}


def draw_step(case: MuonCase, rng: np.random.Generator) -> Inputs:
    """A weight of the usual size, a momentum of some earlier steps."""
    shape = (
        (case.rows, case.columns)
        if case.axes == 2
        else (case.rows, *(2,) * (case.axes - 2), case.columns >> case.axes - 2)
    )
    gradient = _matrix(case, rng)
    momentum = draws.normal(rng, case.rows, case.columns, dtype=torch.float32) * (gradient.abs().max() > 0)
    return {
        "weight": draws.normal(rng, *shape, dtype=torch.float32, scale=0.02),
        "momentum": momentum.reshape(shape) * 2,
        "gradient": gradient.reshape(shape),
        "learning_rate": 0.02,
        "config": MUON_V4,
    }


def cases(full: bool) -> list[MuonCase]:
    """Wide, tall and constructed spectra; zeros, rank one, tiny and huge entries."""
    wide = MuonCase(rows=16, columns=64)
    found = [replace(wide, regime=r) for r in (*REGIMES, "zeros", "tiny")]
    found += [MuonCase(rows=64, columns=24), MuonCase(rows=24, columns=24, regime="spectrum")]
    found += [MuonCase(rows=1, columns=1), MuonCase(rows=1, columns=40), MuonCase(rows=8, columns=33, rank=1)]
    found += [replace(wide, rank=4), replace(wide, regime="small")]
    if full:
        found += [MuonCase(rows=64, columns=256, regime=r) for r in (*REGIMES, "spectrum")]
        found += [MuonCase(rows=256, columns=96), MuonCase(rows=96, columns=96, regime="spectrum")]
    return found


def cases_step(full: bool) -> list[MuonCase]:
    """Every regime, both orientations, four axes."""
    wide = MuonCase(rows=16, columns=64)
    found = [replace(wide, regime=r) for r in (*REGIMES, "zeros")]
    found += [
        MuonCase(rows=64, columns=16),
        MuonCase(rows=24, columns=64, axes=4),
        MuonCase(rows=64, columns=16, axes=3),
    ]
    return [*found, *(MuonCase(rows=64, columns=256, regime=r) for r in REGIMES)] if full else found


# relation hooks


def scaled(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A positive factor (a power of two: exact) on the update changes nothing."""
    for exponent in (-3, 7):
        yield Variant(label=f"2^{exponent} times", calls=(inputs | {"update_ij": inputs["update_ij"] * 2.0**exponent},))


def permuted(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows and columns permuted, rows negated: orthogonal maps, exact in every arithmetic."""
    x = inputs["update_ij"]
    rows, columns = (torch.from_numpy(context.rng.permutation(n)) for n in x.shape)
    sign = torch.from_numpy(context.rng.choice([-1.0, 1.0], (x.shape[0], 1)).astype(np.float32))

    def back(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"orthogonal_ij": (results[0]["orthogonal_ij"] * sign)[rows.argsort()][:, columns.argsort()]}

    yield Variant(label="rows and columns", calls=(inputs | {"update_ij": x[rows][:, columns] * sign},), join=back)


def transposed(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The transpose of an update has the transposed result."""
    call = inputs | {"update_ij": inputs["update_ij"].T.contiguous()}
    yield Variant(
        label="transposed", calls=(call,), join=lambda r: {"orthogonal_ij": r[0]["orthogonal_ij"].T.contiguous()}
    )


CARD = Card(
    component="muon",
    summary="the optimiser of V4's matrices: momentum, Newton-Schulz in ten steps, decoupled decay",
    contract={
        "schedule": "eight steps (3.4445, -4.7750, 2.0315), then two steps (2, -1.5, 0.5)",
        "dtypes": "fp32 throughout; which products training lowers to bf16 is not published",
        "norm": "Frobenius, at least 1e-7; a zero update stays zero",
        "step": "0.18 times the root of the longer side, decay 0.1, momentum 0.95: from one public port, not confirmed",
        "parameters": "two axes or more, seen as [first, rest]; vectors, embedding and head have AdamW",
    },
    ops=(
        Op(
            name="newton_schulz",
            reference="deeptwin.reference.muon:newton_schulz",
            outputs=(Output(name="orthogonal_ij", rule=MUON, dtype=torch.float32),),
            cases=cases,
            draw=draw,
            rows={},
            out_rows={},
            relations=(
                Relation(
                    name="scale_equivariance",
                    axis="factor on the update",
                    promise="within contract",
                    hook=scaled,
                    only=lambda case: case.regime not in ("tiny", "zeros", "small"),
                ),
                Relation(name="head_permutation", axis="rows and columns", promise="within contract", hook=permuted),
                Relation(
                    name="stream_permutation",
                    axis="transposition",
                    promise="within contract",
                    hook=transposed,
                    only=lambda c: c.rows != c.columns,
                ),
            ),
            peers=(
                Peer(
                    name="singular-values",
                    function=f"{PEERS}:by_singular_values",
                    needs=(),
                    explains="the polynomials on the singular values of a decomposition in fp64",
                ),
            ),
            mutants=(
                _mutant("fast_steps_alone", "R1", "the two exact steps are left out"),
                _mutant("classic_five", "R1", "five fast steps, the schedule from before V4"),
                _mutant("one_exact_step", "R1", "one exact step instead of two"),
                _mutant("seven_fast_steps", "R1", "seven fast steps instead of eight"),
                _mutant("exact_steps_first", "R1", "the exact steps come first"),
                _mutant("cubic_exact_steps", "R1", "the exact steps are of third order"),
                _mutant("not_normalised", "R1", "the update is not divided by its norm"),
                _mutant("spectral_norm", "R1", "divided by the largest singular value"),
                _mutant("rows_normalised", "R1", "every row is divided by its own norm"),
                _mutant("zero_over_zero", "U59", "the norm has no floor"),
                _mutant("floor_added", "U94", "a floor is added to the norm instead of bounding it"),
                _mutant("floor_too_large", "U94", "the floor is 1e-3 and meets small updates"),
                _mutant("products_in_bf16", "U17", "products take bf16 operands"),
            ),
            controls=(_control("right_gram"), _control("right_horner"), _control("right_tall")),
            golden=lambda: [MuonCase(rows=6, columns=20), MuonCase(rows=20, columns=6, rank=3)],
        ),
        Op(
            name="muon_step",
            reference="deeptwin.reference.muon:muon_step",
            outputs=(
                Output(name="new_weight", rule=MUON, dtype=torch.float32),
                Output(name="new_momentum", rule=MUON, dtype=torch.float32),
            ),
            cases=cases_step,
            draw=draw_step,
            rows={},
            out_rows={},
            peers=(
                Peer(
                    name="singular-values",
                    function=f"{PEERS}:step_by_singular_values",
                    needs=(),
                    explains="the whole step in fp64",
                ),
            ),
            mutants=(
                _mutant("no_nesterov", "R1", "the momentum alone is the update"),
                _mutant("damped_momentum", "R1", "the gradient enters the momentum with a factor"),
                _mutant("scaled_by_rows", "R1", "the root of the rows and not of the longer side"),
                _mutant("not_scaled", "R1", "no factor for the shape"),
                _mutant("scaled_by_ratio", "R1", "the root of rows over columns, as other schedules have it"),
                _mutant("decay_in_gradient", "R1", "decay enters the gradient and is normalised away"),
                _mutant("no_decay", "R1", "no decay"),
                _mutant("decay_without_rate", "R1", "decay without the learning rate"),
                _mutant("flattened_to_the_last_axis", "R1", "all axes but the last are rows"),
            ),
            controls=(_control("right_step"), _control("right_step_horner")),
            golden=lambda: [MuonCase(rows=6, columns=20, axes=3)],
        ),
    ),
    equivalents=(
        Equivalent(name="iterating on the long side", reason="X X' X = X (X' X): the transposition saves work alone"),
        Equivalent(name="Horner's form", reason="the same polynomial; three products instead of three"),
    ),
)
