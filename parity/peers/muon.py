"""Muon through a singular value decomposition, as a peer of `reference/muon.py`: it repeats no product."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import MuonConfig


def by_singular_values(update_ij: Tensor, *, config: MuonConfig) -> Tensor:
    """The polynomials applied to the singular values in fp64."""
    return _orthogonal(update_ij.double(), config).float()


def step_by_singular_values(
    weight: Tensor, momentum: Tensor, gradient: Tensor, *, learning_rate: float, config: MuonConfig
) -> tuple[Tensor, Tensor]:
    """The whole step in fp64."""
    mu = config.momentum
    moved = mu * momentum.double() + gradient.double()
    update = (gradient.double() + mu * moved).reshape(gradient.shape[0], -1)
    step = learning_rate * config.update_scale * max(update.shape) ** 0.5
    shrunk = weight.double() * (1 - learning_rate * config.weight_decay)
    return (shrunk - step * _orthogonal(update, config).reshape(weight.shape)).float(), moved.float()


def _orthogonal(update_ij: Tensor, config: MuonConfig) -> Tensor:
    u, s, v = torch.linalg.svd(update_ij, full_matrices=False)
    s = s / max(update_ij.norm().item(), config.norm_floor)
    for a, b, c in config.schedule:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v
