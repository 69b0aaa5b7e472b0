"""Routers of TileKernels (torch reference) and transformers; logits reach the latter through an identity weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.config import RouterConfig


def tile_kernels_gate(
    logits_te: Tensor,
    bias_e: Tensor,
    bias_vl_e: Tensor | None,
    image_mask_t: Tensor | None,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """`moe_topk_gate_forward` of tile_kernels 2.1.0."""
    from tile_kernels.torch.topk import moe_topk_gate_forward

    return moe_topk_gate_forward(
        logits_te.contiguous(),
        config.topk,
        False,
        0,
        config.route_scale,
        0,
        "sqrtsoftplus",
        mask=mask_t,
        bias=bias_e,
        image_bias=bias_vl_e,
        image_token_mask=image_mask_t,
    )


def transformers_v4(
    logits_te: Tensor,
    bias_e: Tensor,
    bias_vl_e: Tensor | None,
    image_mask_t: Tensor | None,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """DeepseekV4TopKRouter; its unsorted selection is put in the order of its own ranks."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    gate = DeepseekV4TopKRouter(_v4_config(config))
    gate.e_score_correction_bias.copy_(bias_e)
    _, weights, idx = _run(gate, logits_te)
    return _in_order(idx, weights, gate.score_fn(logits_te) + bias_e)


def transformers_v4_hash(
    logits_te: Tensor,
    token_t: Tensor,
    table_vk: Tensor,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """DeepseekV4HashRouter."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    gate = DeepseekV4HashRouter(_v4_config(config, vocabulary=len(table_vk)))
    gate.tid2eid.copy_(table_vk)
    _, weights, idx = _run(gate, logits_te, token_t)
    return idx, weights


def transformers_v3(
    logits_te: Tensor,
    bias_e: Tensor,
    bias_vl_e: Tensor | None,
    image_mask_t: Tensor | None,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """DeepseekV3TopkRouter, ordered as `transformers_v4`."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    gate = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=config.num_experts,
            n_routed_experts=config.num_experts,
            num_local_experts=config.num_experts,
            num_experts_per_tok=config.topk,
            n_group=config.num_groups,
            topk_group=config.kept_groups,
            routed_scaling_factor=config.route_scale,
            norm_topk_prob=True,
        )
    )
    gate.e_score_correction_bias.copy_(bias_e)
    _, weights, idx = _run(gate, logits_te)
    return _in_order(idx, weights, logits_te.sigmoid() + bias_e)


def _run(gate: Any, logits_te: Tensor, *ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate.weight = torch.nn.Parameter(torch.eye(logits_te.shape[1]), requires_grad=False)
    with torch.no_grad():
        return gate(logits_te.contiguous(), *ids)


def _in_order(idx: Tensor, weights: Tensor, ranks_te: Tensor) -> tuple[Tensor, Tensor]:
    order = ranks_te.gather(1, idx).sort(-1, descending=True).indices
    return idx.gather(1, order), weights.gather(1, order)


def _v4_config(config: RouterConfig, vocabulary: int = 8) -> Any:
    from types import SimpleNamespace

    # the gate reads these fields only
    return SimpleNamespace(
        num_experts_per_tok=config.topk,
        num_local_experts=config.num_experts,
        hidden_size=config.num_experts,
        scoring_func="sqrtsoftplus",
        routed_scaling_factor=config.route_scale,
        vocab_size=vocabulary,
    )
