"""The Hadamard transform of index rows: spreads a large channel over all of them before they are quantised.

The matrix is Sylvester's, in natural order, over the square root of its size: symmetric, orthonormal and its own
inverse. Applied to queries and keys alike it changes no dot product; what it changes is the error of a quantiser whose
group holds one large channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_shape
from .numerics import CONTRACT, Numerics
from .rms_norm import FLOATING


def hadamard(x_td: Tensor, *, dtype: torch.dtype = torch.bfloat16, num: Numerics = CONTRACT) -> Tensor:
    """The normalised transform of every row.

    Math:
        y[t, i] = d^-0.5 sum_j (-1)^popcount(i & j) x[t, j]

    Shapes:
        x_td: [t, d], d a power of two; returns [t, d].

    Rounding:
        the order is part of the contract: for h = 1, 2, 4 … d / 2 every pair (j, j + h) becomes (a + b, a - b), each to
        fp32; then the product with fp32 d^-0.5 to fp32, and one rounding to `dtype`.

    Edges:
        d = 1 copies; the sum of a row may overflow fp32 only if its values are above 2^120.

    Raises:
        TypeError: x_td is not floating; dtype is no storage dtype.
        ValueError: x_td is not 2-D, or d is no power of two.

    Source:
        v3-v32-v4.md section 2.7; DeepSeek-V3.2, inference/model.py (factor); the order is this project's
    """
    dims: dict[str, int] = {}
    expect_shape("x_td", x_td, "td", dims)
    expect_dtype("x_td", x_td, *FLOATING)
    width = dims["d"]
    if width < 1 or width & (width - 1):
        raise ValueError(f"x_td (last axis): expected a power of two, got {width}")
    x_td, half = num.wide(x_td), 1
    while half < width:
        low_tgj, high_tgj = x_td.unflatten(1, (-1, 2, half)).unbind(2)
        x_td = num.f32(torch.stack([low_tgj + high_tgj, low_tgj - high_tgj], 2)).flatten(1)
        half *= 2
    factor = num.f32(torch.tensor(width**-0.5, dtype=num.carrier, device=x_td.device))
    return num.store(num.f32(x_td * factor), dtype)
