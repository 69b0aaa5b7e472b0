"""Load and bias expert by expert, in Python numbers, as peers of `reference/load_bias.py`."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def counted(idx_tk: Tensor, *, num_experts: int) -> Tensor:
    """A tally of the slots."""
    tally = Counter(expert for row in idx_tk.tolist() for expert in row)
    return torch.tensor([tally[expert] for expert in range(num_experts)], dtype=torch.int64)


def against_the_mean(bias_e: Tensor, count_e: Tensor, *, speed: float) -> Tensor:
    """Every count against the exact mean; the sum in numpy's fp32."""
    mean = Fraction(sum(count_e.tolist()), len(count_e))
    step = np.float32(speed)
    moved = []
    for bias, count in zip(bias_e.numpy(), count_e.tolist(), strict=True):
        moved.append(bias - step if count > mean else bias + step if count < mean else bias)
    return torch.from_numpy(np.array(moved, dtype=np.float32))
