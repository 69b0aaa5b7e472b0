"""Muon in fp32 on the CPU, with other coefficients, orders and scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import MUON_FAST, MuonConfig


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the optimiser does otherwise; the default is right. `form` and `tall` are honest choices."""

    form: str = "gram"  # gram: b A + c A A first; horner: X first
    tall: bool = False  # iterate on the long side
    schedule: Callable[[MuonConfig], tuple[tuple[float, float, float], ...]] = lambda config: config.schedule
    norm: str = "frobenius"  # frobenius, none, spectral, rows
    floor: str = "asked"  # asked, none, added, large
    products: torch.dtype = torch.float32
    nesterov: bool = True
    damped: bool = False  # the gradient enters the momentum with 1 - mu
    scale: str = "longer"  # longer, rows, none, ratio
    decay: str = "decoupled"  # decoupled, in_gradient, none, without_rate
    flatten: str = "first"  # first, last


def orthogonal(x: Tensor, config: MuonConfig, faults: Faults) -> Tensor:
    """The iteration."""
    is_turned = (x.shape[0] > x.shape[1]) != faults.tall
    x = x.T if is_turned else x
    norm = {
        "frobenius": lambda: x.norm(),
        "none": lambda: torch.ones(()),
        "spectral": lambda: torch.linalg.matrix_norm(x, 2),
        "rows": lambda: x.norm(dim=1, keepdim=True),
    }[faults.norm]()
    floor = config.norm_floor
    norm = {
        "asked": lambda: norm.clamp(min=floor),
        "none": lambda: norm,
        "added": lambda: norm + floor * 1e4,
        "large": lambda: norm.clamp(min=1e-3),
    }[faults.floor]()
    x = x / norm
    for a, b, c in faults.schedule(config):
        x = x.to(faults.products).float()
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x if faults.form == "gram" else _horner(x, gram, a, b, c)
    return x.T if is_turned else x


def _horner(x: Tensor, gram: Tensor, a: float, b: float, c: float) -> Tensor:
    return a * x + gram @ (b * x + c * (gram @ x))


def newton_schulz_with(faults: Faults) -> Callable[..., Tensor]:
    """The iteration on an update."""

    def newton_schulz(update_ij: Tensor, *, config: MuonConfig) -> Tensor:
        return orthogonal(update_ij, config, faults).contiguous()

    return newton_schulz


def step_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The whole step."""

    def muon_step(
        weight: Tensor, momentum: Tensor, gradient: Tensor, *, learning_rate: float, config: MuonConfig
    ) -> tuple[Tensor, Tensor]:
        mu, decay = config.momentum, config.weight_decay
        if faults.decay == "in_gradient":
            gradient = gradient + decay * weight
        moved = mu * momentum + gradient * ((1 - mu) if faults.damped else 1.0)
        update = gradient + mu * moved if faults.nesterov else moved
        flat = update.flatten(1) if faults.flatten == "first" else update.flatten(0, -2)
        i, j = flat.shape
        scale = {"longer": max(i, j) ** 0.5, "rows": i**0.5, "none": 1.0, "ratio": max(1.0, i / j) ** 0.5}[faults.scale]
        step = learning_rate * config.update_scale * scale * orthogonal(flat, config, faults)
        shrink = {"decoupled": learning_rate * decay, "without_rate": decay}.get(faults.decay, 0.0)
        return weight * (1 - shrink) - step.reshape(weight.shape), moved

    return muon_step


_RIGHT = Faults()
right_gram = newton_schulz_with(_RIGHT)
right_horner = newton_schulz_with(replace(_RIGHT, form="horner"))
right_tall = newton_schulz_with(replace(_RIGHT, tall=True))
right_step = step_with(_RIGHT)
right_step_horner = step_with(replace(_RIGHT, form="horner"))

fast_steps_alone = newton_schulz_with(
    replace(_RIGHT, schedule=lambda c: tuple(s for s in c.schedule if s == MUON_FAST))
)
classic_five = newton_schulz_with(replace(_RIGHT, schedule=lambda c: (MUON_FAST,) * 5))
one_exact_step = newton_schulz_with(replace(_RIGHT, schedule=lambda c: c.schedule[:-1]))
seven_fast_steps = newton_schulz_with(replace(_RIGHT, schedule=lambda c: c.schedule[1:]))
exact_steps_first = newton_schulz_with(replace(_RIGHT, schedule=lambda c: c.schedule[::-1]))
cubic_exact_steps = newton_schulz_with(
    replace(_RIGHT, schedule=lambda c: tuple(s if s == MUON_FAST else (1.5, -0.5, 0.0) for s in c.schedule))
)
not_normalised = newton_schulz_with(replace(_RIGHT, norm="none"))
spectral_norm = newton_schulz_with(replace(_RIGHT, norm="spectral"))
rows_normalised = newton_schulz_with(replace(_RIGHT, norm="rows"))
zero_over_zero = newton_schulz_with(replace(_RIGHT, floor="none"))
floor_added = newton_schulz_with(replace(_RIGHT, floor="added"))
floor_too_large = newton_schulz_with(replace(_RIGHT, floor="large"))
products_in_bf16 = newton_schulz_with(replace(_RIGHT, products=torch.bfloat16))

no_nesterov = step_with(replace(_RIGHT, nesterov=False))
damped_momentum = step_with(replace(_RIGHT, damped=True))
scaled_by_rows = step_with(replace(_RIGHT, scale="rows"))
not_scaled = step_with(replace(_RIGHT, scale="none"))
scaled_by_ratio = step_with(replace(_RIGHT, scale="ratio"))
decay_in_gradient = step_with(replace(_RIGHT, decay="in_gradient"))
no_decay = step_with(replace(_RIGHT, decay="none"))
decay_without_rate = step_with(replace(_RIGHT, decay="without_rate"))
flattened_to_the_last_axis = step_with(replace(_RIGHT, flatten="last"))
