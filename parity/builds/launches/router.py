"""Production calls of the routers: V4.1 and its draft blocks, V3 with its groups, V4's hash layers, replicas."""

from __future__ import annotations

import torch

from deeptwin.optimized.router import map_replicas_triton, route_hash_triton, route_triton
from deeptwin.reference.config import ROUTER_V3, ROUTER_V4_PRO, ROUTER_V41, ROUTER_V41_DRAFT, RouterConfig

TOKENS = 4096


def _route(config: RouterConfig, *, vision: bool = False, mask: bool = True) -> None:
    route_triton(
        torch.empty(TOKENS, config.num_experts),
        torch.empty(config.num_experts),
        torch.empty(config.num_experts) if vision else None,
        torch.empty(TOKENS, dtype=torch.bool) if vision else None,
        torch.empty(TOKENS, dtype=torch.bool) if mask else None,
        config=config,
        trusted=True,
    )


def route_v41() -> None:
    """384 experts, six selected, image tokens and padding rows among the tokens."""
    _route(ROUTER_V41, vision=True)


def route_v41_draft() -> None:
    """128 experts, three selected."""
    _route(ROUTER_V41_DRAFT)


def route_v3() -> None:
    """Eight groups of 32, four kept."""
    _route(ROUTER_V3, mask=False)


def hash_v4_pro() -> None:
    """The first layers of V4-Pro: six experts for each of 129280 tokens."""
    route_hash_triton(
        torch.empty(TOKENS, ROUTER_V4_PRO.num_experts),
        torch.empty(TOKENS, dtype=torch.int64),
        torch.empty(129280, ROUTER_V4_PRO.topk, dtype=torch.int64),
        None,
        config=ROUTER_V4_PRO,
        trusted=True,
    )


def replicas_v41() -> None:
    """384 experts with up to four replicas each."""
    map_replicas_triton(
        torch.empty(TOKENS, 6, dtype=torch.int64),
        torch.empty(384, 4, dtype=torch.int32),
        torch.empty(384, dtype=torch.int32),
        ep_rank=3,
        trusted=True,
    )
