"""Root-mean-square normalisation, fast, alone and fused with a group quantiser."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_multiple, expect_positive, expect_shape
from deeptwin.reference.config import CodeKind, QuantFormat, WeightCast

STORAGE = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm_triton(
    x_tm: Tensor,
    weight_m: Tensor,
    *,
    eps: float,
    cast: WeightCast,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.rms_norm.rms_norm`.

    Raises:
        TypeError: x_tm, weight_m or dtype is not bf16, fp16 or fp32; `out` has another dtype.
        ValueError: shapes disagree; eps is not positive; `out` does not fit.
    """
    _check(x_tm, weight_m, eps)
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    from deeptwin.kernels.triton_ops import rms_norm

    before_weight = cast is WeightCast.BEFORE_WEIGHT
    return rms_norm.rms_norm(x_tm, weight_m, eps=eps, before_weight=before_weight, dtype=dtype, out=out)


def rms_norm_quant_triton(
    x_tm: Tensor,
    weight_m: Tensor,
    *,
    eps: float,
    cast: WeightCast,
    fmt: QuantFormat,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.rms_norm.rms_norm_quant` for e4m3 codes in groups along the row.

    Raises:
        TypeError: x_tm or weight_m is not bf16, fp16 or fp32; an `out` buffer has another dtype.
        ValueError: shapes disagree; eps is not positive; m is no multiple of fmt.group; an `out` buffer does not fit.
        NotImplementedError: fmt has e2m1 codes, blocks of several rows, a group that is no power of two, or fp32 scales
            with a floor below 2^-80.
    """
    _check(x_tm, weight_m, eps)
    if fmt.code is not CodeKind.E4M3 or fmt.rows != 1:
        raise NotImplementedError(f"fmt: expected e4m3 codes and rows=1, got {fmt.code.value}, rows={fmt.rows}")
    expect_multiple("x_tm (last axis)", x_tm.shape[1], fmt.group)
    from deeptwin.kernels.triton_ops import rms_norm

    return rms_norm.rms_norm_quant(
        x_tm,
        weight_m,
        eps=eps,
        before_weight=cast is WeightCast.BEFORE_WEIGHT,
        group=fmt.group,
        scale=fmt.scale.value,
        amax_floor=fmt.amax_floor,
        out=out,
    )


def _check(x_tm: Tensor, weight_m: Tensor, eps: float) -> None:
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("weight_m", weight_m, "m", dims)
    expect_dtype("x_tm", x_tm, *STORAGE)
    expect_dtype("weight_m", weight_m, *STORAGE)
    expect_positive("eps", eps)
