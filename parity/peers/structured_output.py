"""xgrammar's own masking of logits as a peer of `reference/structured_output.py`; written for xgrammar 0.2.9."""

from __future__ import annotations

import torch
from torch import Tensor


def xgrammar_rows(logits_tv_: Tensor, mask_yjw: Tensor, first_y: Tensor, length_y: Tensor) -> Tensor:
    """apply_token_bitmask_inplace on the rows of each request that has any."""
    import xgrammar

    for first, length, masks in zip(first_y.tolist(), length_y.tolist(), mask_yjw, strict=True):
        count = min(length, len(masks))
        if first >= 0 and count:
            rows = logits_tv_[first : first + count].clone()
            xgrammar.apply_token_bitmask_inplace(rows, masks[:count].contiguous())
            # every bit of the mask may be set: then there is nothing to do, and NaN stays NaN
            logits_tv_[first : first + count] = torch.where(rows == -torch.inf, rows, logits_tv_[first : first + count])
    return logits_tv_
