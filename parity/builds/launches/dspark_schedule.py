"""Production calls of scheduled verification: 512 requests a rank with five drafts each."""

from __future__ import annotations

import torch

from deeptwin.optimized.dspark_schedule import allocate_triton, survival_rates_triton

REQUESTS = 512


def survival() -> None:
    """Five confidences a request."""
    survival_rates_triton(torch.empty(REQUESTS, 5))


def places() -> None:
    """Half of the drafts get a place."""
    count = torch.empty(REQUESTS, dtype=torch.int32)
    allocate_triton(torch.empty(REQUESTS, 5), count, total=REQUESTS * 3, trusted=True)
