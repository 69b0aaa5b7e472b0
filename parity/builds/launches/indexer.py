"""Production calls of the indexer of V4.1: 32 heads of 128 channels, keys of 512-channel latents, rows of 5120."""

from __future__ import annotations

import torch

from deeptwin.optimized.indexer import (
    index_keys_triton,
    index_queries_triton,
    index_scores_paged_triton,
    index_scores_triton,
    index_weights_triton,
)
from deeptwin.reference.config import ScoreOrder

TOKENS, HEADS, POSITIONS, RECORD = 4096, 32, 163840, 68


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int32)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.uint8)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def keys() -> None:
    """Keys of a chunk of compressed entries."""
    positions = torch.empty(TOKENS, dtype=torch.int64)
    index_keys_triton(_bf16(TOKENS, 512), _bf16(128, 512), _bf16(128), torch.empty(POSITIONS, 64), positions, eps=1e-20)


def queries() -> None:
    """Queries of a chunk."""
    positions = torch.empty(TOKENS, dtype=torch.int64)
    index_queries_triton(_bf16(TOKENS, HEADS, 128), torch.empty(POSITIONS, 64), positions)


def weights() -> None:
    """Head weights of a chunk."""
    index_weights_triton(_bf16(TOKENS, 5120), _bf16(HEADS, 5120), scale=2.0**-6)


def _buffer(order: ScoreOrder) -> None:
    index_scores_triton(
        _bytes(TOKENS, HEADS, RECORD),
        _bytes(65536, RECORD),
        _bf16(TOKENS, HEADS),
        _int32(TOKENS),
        _int32(TOKENS),
        None,
        block_size=8,
        order=order,
    )


def buffer_chains() -> None:
    """Prefill of the encoder: every visible entry of a packed buffer."""
    _buffer(ScoreOrder.BF16_CHAINS)


def buffer_fp32() -> None:
    """The quality order, for comparison on a device."""
    _buffer(ScoreOrder.FP32)


def restricted_chains() -> None:
    """Prefill of a decoder consumer: 2048 candidate blocks of 8."""
    index_scores_triton(
        _bytes(TOKENS, HEADS, RECORD),
        _bytes(65536, RECORD),
        _bf16(TOKENS, HEADS),
        _int32(TOKENS),
        _int32(TOKENS),
        _int32(TOKENS, 2048),
        block_size=8,
        order=ScoreOrder.BF16_CHAINS,
    )


def paged_chains() -> None:
    """Decode: 64 requests, pages of 128 entries."""
    index_scores_paged_triton(
        _bytes(64, HEADS, RECORD),
        _bytes(8192, 128, RECORD),
        _bf16(64, HEADS),
        _int32(64, 1024),
        _int32(64),
        None,
        block_size=8,
        order=ScoreOrder.BF16_CHAINS,
    )
