"""Production calls of RoPE: V3 (64 of 192, interleaved), V4.1 (the last 64 of 512), the indexer, the table."""

from __future__ import annotations

import torch

from deeptwin.optimized.rope import rope_table_triton, rope_triton
from deeptwin.reference.config import Pairing, RopeSpan

TOKENS, POSITIONS = 4096, 163840


def _rope(heads: int, dim: int, pairing: Pairing, span: RopeSpan, *, inverse: bool = False) -> None:
    rope_triton(
        torch.empty(TOKENS, heads, dim, dtype=torch.bfloat16),
        torch.empty(POSITIONS, 64),
        torch.empty(TOKENS, dtype=torch.int64),
        pairing=pairing,
        span=span,
        inverse=inverse,
    )


def query_v3() -> None:
    """The last 64 of 192 channels of 128 heads."""
    _rope(128, 192, Pairing.INTERLEAVED, RopeSpan.LAST)


def key_v3() -> None:
    """The rotary key alone."""
    _rope(1, 64, Pairing.INTERLEAVED, RopeSpan.LAST)


def query_v41_inverse() -> None:
    """The last 64 of 512 channels of 64 heads, turned back after attention."""
    _rope(64, 512, Pairing.INTERLEAVED, RopeSpan.LAST, inverse=True)


def indexer_v32() -> None:
    """The first 64 of 128 channels of 64 indexer heads, half-split pairs."""
    _rope(64, 128, Pairing.HALF_SPLIT, RopeSpan.FIRST)


def table() -> None:
    """Every position of the longest context."""
    rope_table_triton(torch.empty(POSITIONS, dtype=torch.int64), torch.empty(32))
