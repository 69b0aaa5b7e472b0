"""Production calls of the sampler: 64 rows of a vocabulary of 129 280, and streams of 64 requests."""

from __future__ import annotations

import torch

from deeptwin.optimized.sampling import (
    argmax_tokens_triton,
    keep_prefix_triton,
    random_words_triton,
    sample_logits_triton,
    sample_probs_triton,
)
from deeptwin.reference.config import Draw

ROWS, VOCABULARY = 64, 129280


def _table() -> torch.Tensor:
    return torch.empty(ROWS, VOCABULARY)


def _int64() -> torch.Tensor:
    return torch.empty(ROWS, dtype=torch.int64)


def words() -> None:
    """Two blocks of every stream."""
    random_words_triton(_int64(), _int64(), count=8)


def probs() -> None:
    """A draw from given weights."""
    sample_probs_triton(_table(), _int64(), _int64(), draw=Draw.NVIDIA)


def probs_ascend() -> None:
    """The same with the draw of the Ascend kernel, which has no loop without a bound."""
    sample_probs_triton(_table(), _int64(), _int64(), draw=Draw.ASCEND)


def prefix() -> None:
    """Top-p and top-k on given probabilities."""
    keep_prefix_triton(_table(), _table(), torch.empty(ROWS), _int64())


def _logits(columns: int, draw: Draw) -> None:
    filters = torch.empty(ROWS), torch.empty(ROWS), _int64()
    sample_logits_triton(torch.empty(ROWS, columns), *filters, _int64(), _int64(), draw=draw)


def logits() -> None:
    """The whole pipeline."""
    _logits(VOCABULARY, Draw.NVIDIA)


def logits_ascend() -> None:
    """The whole pipeline with the draw of the Ascend kernel; fewer columns, as they cost only time of compilation."""
    _logits(1024, Draw.ASCEND)


def argmax() -> None:
    """Greedy rows."""
    argmax_tokens_triton(_table())
