"""Muon: momentum of a weight matrix, made nearly orthogonal, as its update.

A matrix X = sum of s u v' has singular values s. One Newton-Schulz step replaces every s by a s + b s^3 + c s^5 and
leaves u and v as they are; ten steps of V4's schedule bring the singular values of a well-conditioned matrix within
2e-3 of one. What is published of V4's training is the schedule and which parameters are treated so: matrices, with
the exception of embedding and head; norms, biases and scales have AdamW. Everything here is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_finite, expect_positive, expect_shape
from .config import MuonConfig
from .numerics import CONTRACT, Numerics


def newton_schulz(update_ij: Tensor, *, config: MuonConfig, num: Numerics = CONTRACT) -> Tensor:
    """Bring the singular values of a matrix close to one.

    Math:
        X = update / max(||update||_F, norm_floor), transposed if it has more rows than columns
        A = X X';  X = a X + (b A + c A A) X   for every (a, b, c) of the schedule
        transposed back

    Shapes:
        update_ij: fp32 [i, j]; returns [i, j].

    Rounding:
        the squared norm, A, A A and the last product are contractions; the quotient, b A + c A A and X are rounded to
        fp32 at every step.

    Edges:
        zeros give zeros. Singular values that are zero stay zero, and those far below the largest stay below one: a
        square Gaussian matrix is not well-conditioned. A positive factor on the update changes nothing above the
        floor, as long as the squared norm is an fp32 number.

    Raises:
        ValueError: update_ij is not 2-D, is empty, or holds NaN or infinity.
        TypeError: update_ij is not fp32.

    Source:
        v3-v32-v4.md section 9.1
    """
    expect_shape("update_ij", update_ij, "ij", {})
    expect_dtype("update_ij", update_ij, torch.float32)
    expect_finite("update_ij", update_ij)
    if not update_ij.numel():
        raise ValueError(f"update_ij: expected at least one element, got shape {tuple(update_ij.shape)}")
    return _orthogonal(num.wide(update_ij), config, num)


def muon_step(
    weight: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    *,
    learning_rate: float,
    config: MuonConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """One step of the optimiser on one parameter.

    Math:
        M' = mu M + G;  U = G + mu M'                                  Nesterov
        W' = W (1 - rate * decay) - rate * scale * sqrt(max(i, j)) * newton_schulz(U)

    Shapes:
        weight, momentum, gradient: fp32 of one shape with two axes or more, seen as [i, j] = [first, all others];
        returns the new weight and the new momentum.

    Rounding:
        M', U and both terms of W' are rounded to fp32, and their difference.

    Edges:
        a zero gradient and momentum shrink the weight alone.

    Raises:
        ValueError: shapes differ or have fewer than two axes (vectors have AdamW); the update is empty or not finite;
            the learning rate is not positive.
        TypeError: an argument is not fp32.

    Source:
        v3-v32-v4.md section 9.1
    """
    for name, value in (("weight", weight), ("momentum", momentum), ("gradient", gradient)):
        expect_dtype(name, value, torch.float32)
        if value.shape != weight.shape or value.dim() < 2:
            raise ValueError(f"{name}: expected two axes or more, as weight {tuple(weight.shape)}, got {value.dim()}")
    expect_positive("learning_rate", learning_rate)
    new_momentum = num.f32(config.momentum * num.wide(momentum) + num.wide(gradient))
    update = num.f32(num.wide(gradient) + config.momentum * new_momentum)
    flat_ij = update.flatten(1)
    expect_finite("gradient", flat_ij)
    if not flat_ij.numel():
        raise ValueError(f"gradient: expected at least one element, got shape {tuple(gradient.shape)}")
    step = learning_rate * config.update_scale * max(flat_ij.shape) ** 0.5
    moved = num.f32(step * _orthogonal(flat_ij, config, num).reshape(weight.shape))
    kept = num.f32(num.wide(weight) * (1 - learning_rate * config.weight_decay))
    return num.f32(kept - moved), new_momentum


def _orthogonal(x_ij: Tensor, config: MuonConfig, num: Numerics) -> Tensor:
    """The iteration, in the carrier of `num`, on the side with the smaller Gram matrix."""
    is_tall = x_ij.shape[0] > x_ij.shape[1]
    x_ij = x_ij.T if is_tall else x_ij
    norm = torch.sqrt(num.sum((x_ij * x_ij).flatten(), dim=0)).clamp(min=config.norm_floor)
    x_ij = num.f32(x_ij / norm)
    for a, b, c in config.schedule:
        gram_ik = num.einsum("ij,kj->ik", x_ij, x_ij)
        mixed_ik = num.f32(b * gram_ik + c * num.einsum("ij,jk->ik", gram_ik, gram_ik))
        x_ij = num.f32(a * x_ij + num.einsum("ik,kj->ij", mixed_ik, x_ij))
    return x_ij.T if is_tall else x_ij
