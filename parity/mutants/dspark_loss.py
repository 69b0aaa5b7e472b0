"""Training losses and measures of a drafter, in fp64 on torch, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deeptwin.reference.config import DraftLossConfig


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong; the default is right."""

    first: int = 0  # exponent of the first position
    half_l1: bool = False
    whole_label: bool = False  # the label takes the whole distance
    swapped: bool = False  # CE takes the target's distribution
    denominator: str = "global"  # global, local, count
    world: bool = True
    eps: float = 1e-6
    valid: str = "used"  # used, ignored, last
    decay: str = "used"  # used, none, inverse
    confidence: str = "logit"  # logit, probability
    exchanged: bool = False  # factors of CE and L1


def _loss(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    def dspark_loss(
        draft_bjv: Tensor,
        target_bjv: Tensor,
        confidence_bj: Tensor,
        token_bj: Tensor,
        valid_bj: Tensor,
        *,
        config: DraftLossConfig,
        ranks: tuple[int, float] = (1, 0.0),
    ) -> tuple[Tensor, Tensor]:
        seen = torch.ones_like(valid_bj) if faults.valid == "ignored" else valid_bj
        if faults.valid == "last":
            seen = valid_bj.clone()
            seen[:, -1] = False
        draft, target = (torch.nan_to_num(x.double()) for x in (draft_bjv, target_bjv))
        p, q = draft.softmax(-1), target.softmax(-1)
        distance = (p - q).abs().sum(-1)
        label = (1 - distance * (1.0 if faults.whole_label else 0.5)).clamp(0, 1)
        log = (target if faults.swapped else draft).log_softmax(-1)
        picked = log.gather(-1, token_bj.clamp(0, p.shape[-1] - 1)[..., None])[..., 0]
        x = torch.nan_to_num(confidence_bj.double())
        bce = x.clamp(min=0) - x * label + torch.log1p(torch.exp(-x.abs()))
        if faults.confidence == "probability":
            c = x.sigmoid().sigmoid()
            bce = -(label * c.log() + (1 - label) * (1 - c).log())
        j = torch.arange(valid_bj.shape[1], dtype=torch.float64) + faults.first
        decay = {"used": torch.exp(-j / config.decay), "none": j * 0 + 1, "inverse": torch.exp(-j * config.decay)}
        weight = decay[faults.decay][None, :] * seen
        total = weight.sum() + (0.0 if faults.denominator == "local" else ranks[1]) + faults.eps
        if faults.denominator == "count":
            total = seen.sum() + ranks[1] + faults.eps
        world = ranks[0] if faults.world else 1
        terms = (-picked, distance * (0.5 if faults.half_l1 else 1.0), bce)
        means = torch.stack([(weight * term).sum() * world / total for term in terms])
        factors = [config.ce, config.l1, config.confidence]
        if faults.exchanged:
            factors[:2] = factors[1], factors[0]
        return (means @ torch.tensor(factors, dtype=torch.float64))[None].float(), means.float()

    return dspark_loss


right_loss = _loss(Faults())
position_from_one = _loss(Faults(first=1))
half_distance = _loss(Faults(half_l1=True))
label_of_whole_distance = _loss(Faults(whole_label=True))
entropy_of_target = _loss(Faults(swapped=True))
local_denominator = _loss(Faults(denominator="local"))
denominator_counts = _loss(Faults(denominator="count"))
world_missing = _loss(Faults(world=False))
eps_large = _loss(Faults(eps=1e-2))
valid_ignored = _loss(Faults(valid="ignored"))
last_position_left_out = _loss(Faults(valid="last"))
no_decay = _loss(Faults(decay="none"))
decay_inverted = _loss(Faults(decay="inverse"))
confidence_as_probability = _loss(Faults(confidence="probability"))
factors_exchanged = _loss(Faults(exchanged=True))


def label_without_half(draft_bjv: Tensor, target_bjv: Tensor) -> Tensor:
    """1 - the whole distance."""
    distance = (draft_bjv.double().softmax(-1) - target_bjv.double().softmax(-1)).abs().sum(-1)
    return (1 - distance).clamp(0, 1).float()


def label_is_the_largest(draft_bjv: Tensor, target_bjv: Tensor) -> Tensor:
    """The target's probability of the draft's favourite."""
    best = draft_bjv.argmax(-1, keepdim=True)
    return target_bjv.double().softmax(-1).gather(-1, best)[..., 0].float()


def label_in_bf16(draft_bjv: Tensor, target_bjv: Tensor) -> Tensor:
    """Softmaxes in bf16."""
    p, q = (x.float().softmax(-1).bfloat16().double() for x in (draft_bjv, target_bjv))
    return (1 - (p - q).abs().sum(-1) / 2).clamp(0, 1).float()


def _metrics(
    *, cumulative: bool = True, prefix: bool = True, bins: int = 20, ties: float = 0.5
) -> Callable[..., Tensor]:
    def confidence_metrics(confidence_bj: Tensor, accepted_bj: Tensor) -> Tensor:
        p = confidence_bj.double()
        p = (p.cumprod(1) if cumulative else p).clamp(1e-8, 1 - 1e-8).flatten()
        hit = (accepted_bj.long().cumprod(1) if prefix else accepted_bj.long()).double().flatten()
        place = (p * bins).long().clamp(max=bins - 1)
        gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, place, p - hit)
        fine = (p * 1000).long().clamp(max=999)
        right, wrong = fine[hit > 0], fine[hit == 0]
        order = (right[:, None] > wrong[None, :]).double() + ties * (right[:, None] == wrong[None, :]).double()
        return torch.stack([gaps.abs().sum() / len(p), order.mean(), (p - hit).square().mean()]).float()

    return confidence_metrics


right_metrics = _metrics()
not_cumulative = _metrics(cumulative=False)
hits_not_of_prefix = _metrics(prefix=False)
bins_of_the_fit = _metrics(bins=15)
ties_count_whole = _metrics(ties=1.0)
