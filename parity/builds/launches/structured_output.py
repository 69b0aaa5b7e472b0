"""A production call of the masking: 64 constrained requests with five drafts each, the whole vocabulary."""

from __future__ import annotations

import torch

from deeptwin.optimized.structured_output import apply_masks_triton

REQUESTS, MASKS, VOCABULARY = 64, 6, 129280


def apply() -> None:
    """Masks of all rows of a decode step."""
    rows = torch.empty(REQUESTS, dtype=torch.int32)
    masks = torch.empty(REQUESTS, MASKS, VOCABULARY // 32, dtype=torch.int32)
    apply_masks_triton(torch.empty(REQUESTS * MASKS, VOCABULARY), masks, rows, rows.clone())
