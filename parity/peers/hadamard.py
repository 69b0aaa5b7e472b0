"""The Hadamard transform by its definition: a product with the matrix whose signs count shared bits."""

from __future__ import annotations

import torch
from torch import Tensor


def explicit_matrix(x_td: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Entry (i, j) is -1 to the number of bits that i and j share, over the square root of the size; in fp64."""
    width = x_td.shape[1]
    index = torch.arange(width)
    shared = index[:, None] & index[None, :]
    odd = torch.zeros_like(shared)
    while bool(shared.any()):
        odd ^= shared & 1
        shared = shared >> 1
    matrix = (1 - 2 * odd).double() / width**0.5
    return (x_td.double() @ matrix).to(dtype)
