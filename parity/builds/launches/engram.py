"""Production calls of the n-gram memory of V4.1: 4096 tokens of prefill, and a decode step with three drafts."""

from __future__ import annotations

import torch

from deeptwin.optimized.engram import (
    engram_embed_triton,
    engram_gate_triton,
    engram_lookup_triton,
    engram_project_triton,
    engram_window_triton,
)
from deeptwin.reference.config import ENGRAM_V41, OutsideVocabulary

TOKENS, REQUESTS, VOCABULARY, ROWS = 4096, 64, 129_280, 384_016_682


def _window(tokens: int, requests: int) -> None:
    engram_window_triton(
        torch.empty(tokens, dtype=torch.int32),
        torch.empty(tokens, dtype=torch.bool),
        torch.empty(requests + 1, dtype=torch.int32),
        torch.empty(requests, dtype=torch.int32),
        torch.empty(requests, ENGRAM_V41.max_ngram - 1, dtype=torch.int32),
        torch.empty(VOCABULARY, dtype=torch.int32),
        pad_class=ENGRAM_V41.pad_id,
        outside=OutsideVocabulary.IMAGE,
        trusted=True,
    )


def window_prefill() -> None:
    """Windows and histories of packed prompts."""
    _window(TOKENS, 16)


def window_decode() -> None:
    """Windows and histories of 64 requests with four tokens each."""
    _window(4 * REQUESTS, REQUESTS)


def hash_v41() -> None:
    """Rows of both layers; the constants have no memory here either."""
    from deeptwin.kernels.triton_ops.engram import engram_hash

    layers, columns = len(ENGRAM_V41.layer_ids), ENGRAM_V41.num_columns
    window = torch.empty(TOKENS, ENGRAM_V41.max_ngram, dtype=torch.int32)
    multipliers = torch.empty(layers, ENGRAM_V41.max_ngram, dtype=torch.int64)
    sizes = torch.empty(layers, columns, dtype=torch.int64)
    engram_hash(
        window,
        torch.empty(TOKENS, dtype=torch.bool),
        constants=(multipliers, sizes, torch.empty(layers, columns, dtype=torch.int64)),
        num_heads=ENGRAM_V41.num_heads,
        num_classes=ENGRAM_V41.num_classes,
    )


def _table() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.empty(ROWS, ENGRAM_V41.head_dim, dtype=torch.float8_e4m3fn)
    scales = torch.empty(ROWS, ENGRAM_V41.head_dim // 32, dtype=torch.uint8)
    return codes, scales, torch.empty(TOKENS, ENGRAM_V41.num_columns, dtype=torch.int32)


def lookup_v41() -> None:
    """Bytes of 24 rows a token."""
    engram_lookup_triton(*_table(), trusted=True)


def embed_v41() -> None:
    """The same rows as bf16 values."""
    engram_embed_triton(*_table(), trusted=True)


def project_v41() -> None:
    """6144 looked-up channels to four keys and a value of 5120."""
    inputs, outputs = ENGRAM_V41.embed_dim, (ENGRAM_V41.streams + 1) * ENGRAM_V41.hidden
    engram_project_triton(
        torch.empty(TOKENS, inputs, dtype=torch.float8_e4m3fn),
        torch.empty(TOKENS, inputs // 32, dtype=torch.uint8),
        torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn),
        torch.empty(outputs // 32, inputs // 32, dtype=torch.uint8),
    )


def gate_v41() -> None:
    """Four streams of 5120."""
    streams, hidden = ENGRAM_V41.streams, ENGRAM_V41.hidden
    weight = torch.empty(streams, hidden, dtype=torch.bfloat16)
    engram_gate_triton(
        torch.empty(TOKENS, streams, hidden, dtype=torch.bfloat16),
        torch.empty(TOKENS, streams + 1, hidden, dtype=torch.bfloat16),
        weight,
        weight,
        torch.empty(TOKENS, dtype=torch.bool),
        eps=ENGRAM_V41.eps,
    )
