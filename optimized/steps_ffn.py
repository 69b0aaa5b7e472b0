"""The feed-forward half of a step: one gated network, or a router and its experts, by the functions of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import FfnConfig
from deeptwin.reference.ffn_weights import GatedWeights, MoeWeights, PlainExperts
from deeptwin.reference.taps import Tap, ignore

from .plan import Plan


def feed_forward(
    x_tm: Tensor,
    token_t: Tensor,
    image_t: Tensor | None,
    weights: GatedWeights | MoeWeights,
    *,
    config: FfnConfig,
    plan: Plan,
    tap: Tap = ignore,
) -> Tensor:
    """What the rows gain from their network; token_t is read by a hash router alone.

    Raises:
        ValueError: shapes disagree; weights are quantised and `config` has no formats for them.
    """
    if isinstance(weights, GatedWeights):
        return plan.op("moe.gated")(x_tm, weights, limit=config.swiglu_limit)
    gate_em, router = weights.gate_em, config.router
    logits_te = plan.op("linear.linear")(x_tm.to(gate_em.dtype), gate_em, dtype=torch.float32)
    tap("logits", logits_te)
    if weights.table_vk is not None:
        idx_tk, weights_tk = plan.op("router.route_hash")(logits_te, token_t, weights.table_vk, None, config=router)
    else:
        image_t = image_t if weights.bias_vl_e is not None else None
        idx_tk, weights_tk = plan.op("router.route")(
            logits_te, weights.bias_e, weights.bias_vl_e, image_t, None, config=router
        )
    tap("experts", idx_tk)
    tap("weights", weights_tk)
    experts, shared = weights.experts, weights.shared
    if isinstance(experts, PlainExperts):
        return plan.op("moe.plain_experts")(x_tm, idx_tk, weights_tk, experts, shared, config=config)
    if config.quantised is None:
        raise ValueError("config: expected formats for quantised weights, got None")
    x_q, x_sf = plan.op("quant.quantize")(x_tm, fmt=config.quantised.activation)
    return plan.op("moe.moe")(x_q, x_sf, idx_tk, weights_tk, None, experts, shared, config=config.quantised)
