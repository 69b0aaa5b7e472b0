"""The Hadamard transform, fast; the contract is `reference/hadamard.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_shape

STORAGE = (torch.bfloat16, torch.float16, torch.float32)


def hadamard_triton(x_td: Tensor, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """The normalised transform of every row, in the order of the contract.

    Raises:
        TypeError: x_td or dtype is not bfloat16, float16 or float32; `out` has another dtype.
        ValueError: x_td is not 2-D, or d is no power of two; `out` does not fit.
        NotImplementedError: d is above 4096.
    """
    dims: dict[str, int] = {}
    expect_shape("x_td", x_td, "td", dims)
    expect_dtype("x_td", x_td, *STORAGE)
    width = dims["d"]
    if width < 1 or width & (width - 1):
        raise ValueError(f"x_td: expected a power of two of channels, got {width}")
    if width > 4096:
        raise NotImplementedError(f"x_td: expected at most 4096 channels, got {width}")
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    from deeptwin.kernels.triton_ops import hadamard as kernels

    return kernels.hadamard(x_td, dtype=dtype, out=out)
