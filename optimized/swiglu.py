"""SwiGLU, fast, alone and fused with the quantiser of the down projection."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_multiple, expect_positive, expect_shape
from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind

STORAGE = (torch.bfloat16, torch.float16, torch.float32)


def swiglu_triton(
    h_ti: Tensor,
    weight_t: Tensor | None = None,
    *,
    limit: float | None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.swiglu.swiglu`.

    Raises:
        TypeError: h_ti, weight_t or dtype is not bf16, fp16 or fp32; `out` has another dtype.
        ValueError: shapes disagree; the width is odd; limit is not positive; `out` does not fit.
        NotImplementedError: rows are not contiguous.
    """
    _check(h_ti, weight_t, limit)
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    from deeptwin.kernels.triton_ops import swiglu

    return swiglu.swiglu(h_ti, weight_t, limit=limit, dtype=dtype, out=out)


def swiglu_quant_triton(
    h_ti: Tensor,
    weight_t: Tensor | None = None,
    *,
    limit: float | None,
    fmt: QuantFormat,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.swiglu.swiglu_quant` for e4m3 codes in groups along the row. Values are not inspected.

    Raises:
        TypeError: h_ti or weight_t is not bf16, fp16 or fp32; an `out` buffer has another dtype.
        ValueError: shapes disagree; the width is odd, or half of it no multiple of the group; limit is not positive;
            an `out` buffer does not fit.
        NotImplementedError: fmt has e2m1 codes, e4m3 scales, blocks of several rows, a group that is no power of two,
            or fp32 scales with a floor below 2^-80; rows are not contiguous.
    """
    _check(h_ti, weight_t, limit)
    if fmt.code is not CodeKind.E4M3 or fmt.scale is ScaleKind.E4M3 or fmt.rows != 1:
        raise NotImplementedError(f"fmt: expected e4m3 codes with UE8M0 or fp32 scales of rows, got {fmt.name}")
    expect_multiple("h_ti (half of the last axis)", h_ti.shape[1] // 2, fmt.group)
    from deeptwin.kernels.triton_ops import swiglu

    return swiglu.swiglu_quant(
        h_ti, weight_t, limit=limit, group=fmt.group, scale=fmt.scale.value, amax_floor=fmt.amax_floor, out=out
    )


def _check(h_ti: Tensor, weight_t: Tensor | None, limit: float | None) -> None:
    dims: dict[str, int] = {}
    expect_shape("h_ti", h_ti, "ti", dims)
    expect_dtype("h_ti", h_ti, *STORAGE)
    expect_multiple("h_ti (last axis)", dims["i"], 2)
    if weight_t is not None:
        expect_shape("weight_t", weight_t, "t", dims)
        expect_dtype("weight_t", weight_t, *STORAGE)
    if limit is not None:
        expect_positive("limit", limit)
