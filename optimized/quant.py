"""Group quantisers, fast."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_multiple, expect_shape
from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind

SCALE_DTYPES = {
    ScaleKind.UE8M0: torch.uint8,
    ScaleKind.E4M3: torch.float8_e4m3fn,
    ScaleKind.F32: torch.float32,
    ScaleKind.POW2_F32: torch.float32,
}


def quantize_triton(
    x_tm: Tensor, *, fmt: QuantFormat, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """`reference.quant.quantize` of a bf16, fp16 or fp32 tensor. Values are not inspected: NaN and infinity give
    meaningless bytes.

    Raises:
        TypeError: x_tm is not bf16, fp16 or fp32; an `out` buffer has another dtype.
        ValueError: x_tm is not 2-D; fmt.rows is 1 and m no multiple of fmt.group; an `out` buffer does not fit.
        NotImplementedError: fmt.rows or fmt.group is no power of two, fmt has e2m1 codes in blocks of rows, or fp32
            scales with a floor below 2^-80.
    """
    expect_shape("x_tm", x_tm, "tm", {})
    expect_dtype("x_tm", x_tm, torch.bfloat16, torch.float16, torch.float32)
    if fmt.rows == 1:
        expect_multiple("x_tm (last axis)", x_tm.shape[1], fmt.group)
    from deeptwin.kernels.triton_ops import quant

    return quant.quantize(
        x_tm,
        rows=fmt.rows,
        group=fmt.group,
        code=fmt.code.value,
        scale=fmt.scale.value,
        max_value=fmt.max_value,
        amax_floor=fmt.amax_floor,
        out=out,
    )


def dequantize_triton(
    codes: Tensor, sf: Tensor, *, fmt: QuantFormat, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """`reference.quant.dequantize`.

    Raises:
        TypeError: codes or sf have another dtype than fmt says; dtype is not bf16, fp16 or fp32.
        ValueError: codes or sf are not 2-D; sf has not one scale for each block; fmt.rows is 1 and m no multiple of
            fmt.group; `out` does not fit.
    """
    expect_dtype("codes", codes, torch.float8_e4m3fn if fmt.code is CodeKind.E4M3 else torch.uint8)
    expect_dtype("sf", sf, SCALE_DTYPES[fmt.scale])
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    expect_shape("codes", codes, "tm", {})
    t, m = codes.shape[0], codes.shape[1] * (2 if fmt.code is CodeKind.E2M1 else 1)
    if fmt.rows == 1:
        expect_multiple("codes (last axis, in elements)", m, fmt.group)
    expect_shape("sf", sf, "tg", {"t": -(-t // fmt.rows), "g": -(-m // fmt.group)})
    from deeptwin.kernels.triton_ops import quant

    return quant.dequantize(
        codes, sf, rows=fmt.rows, group=fmt.group, code=fmt.code.value, scale=fmt.scale.value, dtype=dtype, out=out
    )
