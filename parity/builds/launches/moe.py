"""Production calls of the mixture of experts of V4.1: 4096 tokens, six of 384 experts, rows of 5120."""

from __future__ import annotations

import torch

from deeptwin.optimized.moe import combine_triton, dispatch_triton, expert_up_triton, gather_rows_triton
from deeptwin.reference.config import FP8_1X128, FP8_128X128, Combine, MoeConfig, moe_v41

TOKENS, TOPK, EXPERTS, WIDTH = 4096, 6, 384, 5120


def _combine(ranks: bool, nodes: bool) -> None:
    groups = torch.empty(TOKENS, TOPK, dtype=torch.int32)
    combine_triton(
        torch.empty(TOKENS * TOPK, WIDTH, dtype=torch.bfloat16),
        torch.empty(TOKENS, TOPK, dtype=torch.int32),
        groups if ranks else None,
        groups if nodes else None,
        torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16),
        rule=Combine.MULTIPLE if ranks else Combine.SINGLE,
        trusted=True,
    )


def dispatch_v41() -> None:
    """Four kernels: counts, prefixes over chunks, starts of the experts, rows."""
    idx = torch.empty(TOKENS, TOPK, dtype=torch.int64)
    dispatch_triton(idx, num_experts=EXPERTS, alignment=128, trusted=True)


def rows_v41_codes() -> None:
    """The codes of the rows: bytes."""
    x = torch.empty(TOKENS, WIDTH, dtype=torch.float8_e4m3fn)
    gather_rows_triton(x, torch.empty(TOKENS * TOPK, dtype=torch.int32), topk=TOPK, trusted=True)


def rows_v41_weights() -> None:
    """A routing weight for each slot: words."""
    weights = torch.empty(TOKENS * TOPK, 1)
    gather_rows_triton(weights, torch.empty(TOKENS * TOPK, dtype=torch.int32), topk=1, trusted=True)


def combine_v41() -> None:
    """A single reduction."""
    _combine(ranks=False, nodes=False)


def combine_v41_ranks() -> None:
    """Partial sums by rank."""
    _combine(ranks=True, nodes=False)


def combine_v41_nodes() -> None:
    """Partial sums by rank, then by node."""
    _combine(ranks=True, nodes=True)


def _expert(config: MoeConfig, w_q: torch.Tensor, w_sf: torch.Tensor, width: int) -> None:
    rows, fmt = TOKENS, config.activation
    sf_dtype = torch.uint8 if fmt.group == 32 else torch.float32
    expert_up_triton(
        torch.empty(rows, width, dtype=torch.float8_e4m3fn),
        torch.empty(rows, width // fmt.group, dtype=sf_dtype),
        w_q,
        w_sf,
        torch.empty(len(w_q), dtype=torch.int32),
        torch.empty(rows),
        config=config,
        trusted=True,
    )


def expert_v41() -> None:
    """The routed experts of one rank: MXFP4 weights, 2304 channels, a limit."""
    w_q = torch.empty(48, 4608, WIDTH // 2, dtype=torch.uint8)
    _expert(moe_v41(Combine.SINGLE), w_q, torch.empty(48, 4608, WIDTH // 32, dtype=torch.uint8), WIDTH)


def expert_v3() -> None:
    """The routed experts of one rank of V3: FP8 blocks of 128 x 128, 2048 channels, no limit."""
    config = MoeConfig(
        routed=FP8_128X128, shared=FP8_128X128, activation=FP8_1X128, swiglu_limit=None, combine=Combine.SINGLE
    )
    w_q = torch.empty(32, 4096, 7168, dtype=torch.float8_e4m3fn)
    _expert(config, w_q, torch.empty(32, 32, 56), 7168)
