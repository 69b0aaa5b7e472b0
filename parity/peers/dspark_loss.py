"""The training loss of a drafter on torch's own loss functions, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deeptwin.reference.config import DraftLossConfig


def torch_losses(
    draft_bjv: Tensor,
    target_bjv: Tensor,
    confidence_bj: Tensor,
    token_bj: Tensor,
    valid_bj: Tensor,
    *,
    config: DraftLossConfig,
    ranks: tuple[int, float] = (1, 0.0),
) -> tuple[Tensor, Tensor]:
    """cross_entropy, l1_loss and binary_cross_entropy_with_logits, averaged with the weights of the positions."""
    p, q = (functional.softmax(x.double(), -1) for x in (draft_bjv, target_bjv))
    label = 1 - functional.l1_loss(p, q, reduction="none").sum(-1) / 2
    ce = functional.cross_entropy(draft_bjv.double().flatten(0, 1), token_bj.flatten().clamp(0), reduction="none")
    bce = functional.binary_cross_entropy_with_logits(confidence_bj.double(), label, reduction="none")
    terms = (ce.view_as(bce), functional.l1_loss(p, q, reduction="none").sum(-1), bce)
    weight = torch.exp(-torch.arange(valid_bj.shape[1], dtype=torch.float64) / config.decay)[None, :] * valid_bj
    total = weight.sum() + ranks[1] + 1e-6
    means = torch.stack([torch.where(valid_bj, weight * x, 0).sum() * ranks[0] / total for x in terms])
    factors = torch.tensor([config.ce, config.l1, config.confidence], dtype=torch.float64)
    return (means @ factors)[None].float(), means.float()


def torch_labels(draft_bjv: Tensor, target_bjv: Tensor) -> Tensor:
    """The overlap Σ min(p, q), which equals one minus half of the distance."""
    p, q = (functional.softmax(x.double(), -1) for x in (draft_bjv, target_bjv))
    return torch.minimum(p, q).sum(-1).float()


def ranked_metrics(confidence_bj: Tensor, accepted_bj: Tensor) -> Tensor:
    """Calibration by a loop over bins, the area by counting pairs of bins, Brier by torch's mean squared error."""
    p = confidence_bj.double().cumprod(1).clamp(1e-8, 1 - 1e-8).flatten()
    hit = (accepted_bj.long().cumprod(1) > 0).flatten()
    ece = p.new_zeros(())
    for low in range(20):
        inside = (p * 20 >= low) & ((p * 20 < low + 1) | (torch.tensor(low == 19)))
        if inside.any():
            ece = ece + (p[inside].mean() - hit[inside].double().mean()).abs() * inside.sum() / len(p)
    coarse = (p * 1000).floor().clamp(max=999)
    right, wrong = coarse[hit], coarse[~hit]
    order = (right[:, None] > wrong[None, :]).double() + (right[:, None] == wrong[None, :]).double() / 2
    return torch.stack([ece, order.mean(), functional.mse_loss(p, hit.double())]).float()
