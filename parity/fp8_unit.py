"""What the FP8 matrix unit of SM90 makes of a sum, as a rule: products are cut below the largest of their step.

Measured on an H200 and emulated in `mutants/dsa.py` (kernel-libraries.md 4.8): the unit aligns 32 products and what it
has so far to the largest of them and keeps 13 bits below it. So the error of a dot is a share of the sum of its
magnitudes, not of its value, and has the sign of what was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .card import Inputs
from .rules import Judgement, Oracles, worst_at


@dataclass(frozen=True, kw_only=True)
class Fp8Unit:
    """Every element, and all of them together, as near as the unit comes; `reach` adds the magnitudes of all terms.

    Measured on 50 seeds of every regime (`parity/evidence/fp8-index-scores.json`).
    """

    reach: Callable[[Inputs], Tensor] = field(repr=False)
    element: float = 2.0**-10
    total: float = 2.0**-12

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge `got` against SEMANTIC, in shares of the reach of each element."""
        if got.numel() == 0:
            return Judgement(ok=True, used=0.0)
        finite = oracles.semantic.isfinite()
        truth = torch.where(finite, oracles.semantic, 0.0)
        error = torch.where(finite, got.to(torch.float64), 0.0) - truth
        reach = torch.where(finite, self.reach(oracles.arguments), 0.0)
        share = torch.where(error == 0, 0.0, error.abs() / reach)
        reached = share[reach > 0]
        used = {
            "element": share.max().item() / self.element,
            "total": reached.square().mean().sqrt().item() / self.total if reached.numel() else 0.0,
        }
        name = max(used, key=lambda key: used[key])
        return Judgement(
            ok=all(value < 1.0 for value in used.values()),
            used=used[name],
            message=f"{name} error uses {used[name]:.3g} of what the FP8 unit needs",
            worst=worst_at(got, oracles.semantic, share),
            metrics={f"{key}_used": value for key, value in used.items()},
        )
