"""Production calls of drafting: V4.1-Flash, 64 requests a rank, blocks of five."""

from __future__ import annotations

import torch

from deeptwin.optimized.dspark import confidence_triton, draft_rows_triton, markov_step_triton
from deeptwin.reference.config import DraftBlock, SlidingWindow

REQUESTS, VOCAB, RANK, HIDDEN = 64, 129280, 256, 5120


def _integers() -> torch.Tensor:
    return torch.empty(REQUESTS, dtype=torch.int32)


def _table(rows: int, width: int) -> torch.Tensor:
    return torch.empty(rows, width, dtype=torch.bfloat16)


def rows() -> None:
    """A window of 128 in a ring of 134."""
    window = SlidingWindow(window=128, ring=134)
    block = DraftBlock(draft=5, noise_token=128799, window=window)
    given = _integers(), _integers(), _integers(), _integers(), _integers()
    draft_rows_triton(*given, block=block, trusted=True)


def markov() -> None:
    """The whole vocabulary."""
    base = torch.empty(REQUESTS, VOCAB)
    markov_step_triton(base, _integers(), _table(VOCAB, RANK), _table(VOCAB, RANK), trusted=True)


def head() -> None:
    """Hidden rows and rows of the first table."""
    weight = torch.empty(HIDDEN + RANK, dtype=torch.bfloat16)
    h, table = _table(REQUESTS, HIDDEN), _table(VOCAB, RANK)
    confidence_triton(h, _integers(), table, weight, temperature=0.7, trusted=True)
