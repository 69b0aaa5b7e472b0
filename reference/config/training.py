"""Configurations of what happens in training only."""

from __future__ import annotations

from dataclasses import dataclass

NewtonSchulz = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """An optimiser of matrices: momentum, the polynomials that it is made orthogonal with, and the step.

    The schedule of V4 is published; `update_scale`, `weight_decay` and `momentum` are those of one public port only.
    """

    schedule: NewtonSchulz  # coefficients a, b, c of every step
    momentum: float
    update_scale: float  # times the root of the longer side: about the size of an AdamW step
    weight_decay: float
    norm_floor: float  # least Frobenius norm that is divided by

    def __post_init__(self) -> None:
        if not self.schedule:
            raise ValueError(f"schedule: expected at least one step, got {self.schedule}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: expected a number in [0, 1), got {self.momentum}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay: expected 0 or more, got {self.weight_decay}")
        for name in ("update_scale", "norm_floor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")


MUON_FAST = (3.4445, -4.7750, 2.0315)  # drives every singular value towards one, and past it
MUON_EXACT = (2.0, -1.5, 0.5)  # settles on one
MUON_V4 = MuonConfig(
    schedule=(MUON_FAST,) * 8 + (MUON_EXACT,) * 2,
    momentum=0.95,
    update_scale=0.18,
    weight_decay=0.1,
    norm_floor=1e-7,
)
