"""Rotary position embedding, fast: the rotation and the table."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape
from deeptwin.reference.config import Pairing, RopeSpan

STORAGE = (torch.bfloat16, torch.float16, torch.float32)


def rope_table_triton(
    positions_s: Tensor, freq_i: Tensor, *, magnitude: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """`reference.rope.rope_table`: fp32 angles, cos and sin in fp64.

    Raises:
        TypeError: positions_s is no integer tensor, freq_i is not float32, `out` has another dtype.
        ValueError: positions_s or freq_i is not 1-D; magnitude is not positive; `out` does not fit.
    """
    expect_shape("positions_s", positions_s, "s", {})
    expect_shape("freq_i", freq_i, "i", {})
    expect_dtype("positions_s", positions_s, torch.int32, torch.int64)
    expect_dtype("freq_i", freq_i, torch.float32)
    expect_positive("magnitude", magnitude)
    from deeptwin.kernels.triton_ops import rope

    return rope.rope_table(positions_s, freq_i, magnitude=magnitude, out=out)


def rope_triton(
    x_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    pairing: Pairing,
    span: RopeSpan,
    inverse: bool,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.rope.rope`. Positions are not inspected: one outside the table gives NaN.

    Raises:
        TypeError: x_thd or dtype is not bf16, fp16 or fp32, table_sr is not float32, positions_t is no integer
            tensor, `out` has another dtype.
        ValueError: shapes disagree; r is odd or above d; `out` does not fit.
    """
    dims: dict[str, int] = {}
    expect_shape("x_thd", x_thd, "thd", dims)
    expect_shape("table_sr", table_sr, "sr", dims)
    expect_shape("positions_t", positions_t, "t", dims)
    expect_dtype("x_thd", x_thd, *STORAGE)
    expect_dtype("table_sr", table_sr, torch.float32)
    expect_dtype("positions_t", positions_t, torch.int32, torch.int64)
    if dims["r"] % 2 or dims["r"] > dims["d"]:
        raise ValueError(f"table_sr: expected an even width up to d={dims['d']}, got r={dims['r']}")
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    from deeptwin.kernels.triton_ops import rope

    return rope.rope(
        x_thd,
        table_sr,
        positions_t,
        interleaved=pairing is Pairing.INTERLEAVED,
        first=span is RopeSpan.FIRST,
        inverse=inverse,
        dtype=dtype,
        out=out,
    )
