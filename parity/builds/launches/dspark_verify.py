"""Production calls of verification: 64 requests of five drafts, the whole vocabulary."""

from __future__ import annotations

import torch

from deeptwin.optimized.dspark_verify import verify_pack_triton, verify_rows_triton
from deeptwin.reference.config import Draw

REQUESTS, DRAFT, VOCAB = 64, 5, 129280
ROWS = REQUESTS * (DRAFT + 1)


def _integers(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32)


def verify() -> None:
    """Every row of the step."""
    verify_rows_triton(
        torch.empty(ROWS, VOCAB),
        torch.empty((REQUESTS + 1) * DRAFT, VOCAB),
        _integers(ROWS),
        _integers(ROWS),
        torch.empty(ROWS, dtype=torch.bool),
        torch.empty(ROWS, dtype=torch.int64),
        draw=Draw.NVIDIA,
        trusted=True,
    )


def pack() -> None:
    """Two stop tokens a request."""
    verify_pack_triton(
        torch.empty(ROWS, dtype=torch.bool),
        torch.empty(ROWS, dtype=torch.int64),
        _integers(ROWS),
        None,
        _integers(REQUESTS),
        torch.empty(REQUESTS, 2, dtype=torch.int32),
        draft=DRAFT,
        trusted=True,
    )
