"""Production calls of drafting: V4.1-Flash, 64 requests a rank, blocks of five."""

from __future__ import annotations

import torch

from deeptwin.optimized.dspark import confidence_triton, draft_rows_triton, markov_step_triton
from deeptwin.reference.config import DraftBlock, SlidingWindow

REQUESTS, VOCAB, RANK, HIDDEN = 64, 129280, 256, 5120


def _integers(count: int) -> list[torch.Tensor]:
    return [torch.empty(REQUESTS, dtype=torch.int32) for _ in range(count)]


def rows() -> None:
    """A window of 128 in a ring of 134."""
    window = SlidingWindow(window=128, ring=134)
    draft_rows_triton(*_integers(5), block=DraftBlock(draft=5, noise_token=128799, window=window), trusted=True)


def markov() -> None:
    """The whole vocabulary."""
    tables = (torch.empty(VOCAB, RANK, dtype=torch.bfloat16) for _ in range(2))
    markov_step_triton(torch.empty(REQUESTS, VOCAB), *_integers(1), *tables, trusted=True)


def head() -> None:
    """Hidden rows and rows of the first table."""
    h, table = (torch.empty(n, m, dtype=torch.bfloat16) for n, m in ((REQUESTS, HIDDEN), (VOCAB, RANK)))
    weight = torch.empty(HIDDEN + RANK, dtype=torch.bfloat16)
    confidence_triton(h, *_integers(1), table, weight, temperature=0.7, trusted=True)
