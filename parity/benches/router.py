"""Selection of six among 256 experts, as V4 has them, and among the 384 of V4.1; image tokens and padding aside."""

from __future__ import annotations

from dataclasses import replace

import torch

from deeptwin.reference.config import ROUTER_V4_FLASH, ROUTER_V41, RouterConfig, WeightSum

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

# TileKernels adds 1e-20 to the sum, as V4.1 does
V4_PLUS_EPS = replace(ROUTER_V4_FLASH, weight_sum=WeightSum.PLUS_EPS)


def _route(tokens: int, config: RouterConfig) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "logits_te": draws.normal(tokens, config.num_experts, dtype=torch.float32),
            "bias_e": draws.normal(config.num_experts, dtype=torch.float32),
            "bias_vl_e": None,
            "image_mask_t": None,
            "mask_t": None,
            "config": config,
            "dtype": torch.float32,
        }

    return Bench(
        component="router",
        op="route",
        shape=f"t{tokens}-e{config.num_experts}-k{config.topk}",
        draw=draw,
        bytes=4.0 * config.num_experts * (tokens + 1) + 12.0 * tokens * config.topk,
        promises={"trusted": True},
    )


BENCHES = (*(_route(tokens, V4_PLUS_EPS) for tokens in (64, 4096)), _route(8192, ROUTER_V41))
