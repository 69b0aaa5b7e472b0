"""Production calls of the Hadamard transform: index queries of V3.2, 64 heads of 128 channels."""

from __future__ import annotations

import torch

from deeptwin.optimized.hadamard import hadamard_triton


def index_rows() -> None:
    """The heads of a chunk of 4096 tokens."""
    hadamard_triton(torch.empty(4096 * 64, 128, dtype=torch.bfloat16))
