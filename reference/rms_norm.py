"""Root-mean-square normalisation, alone and followed by a group quantiser."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_positive, expect_shape
from .config import QuantFormat, WeightCast
from .numerics import CONTRACT, Numerics
from .quant import quantize

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rms_norm(
    x_tm: Tensor,
    weight_m: Tensor,
    *,
    eps: float,
    cast: WeightCast,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Scale each row to unit root-mean-square, then by a learned weight.

    Math:
        y[t, m] = weight[m] * x[t, m] / sqrt(mean_m(x[t, :]^2) + eps)

    Shapes:
        x_tm: [t, m]; weight_m: [m]; returns [t, m].

    Rounding:
        AFTER_WEIGHT: one, to `dtype`, at return. BEFORE_WEIGHT: the normalised row to `dtype`, then its product with
        the weight to `dtype` again. V3.2 normalises the unrounded residual sum: pass it as fp32.

    Edges:
        t = 0 gives an empty tensor. An all-zero row gives zeros (eps = 1e-20 makes its 1/rms 1e10, still finite).
        The sum of squares is an fp32 number, as in a kernel: when it overflows (|x| above about 1e19) the row
        comes out as zeros under CONTRACT and RIVAL, but not under SEMANTIC.

    Raises:
        TypeError: x_tm or weight_m is not floating; dtype is no storage dtype.
        ValueError: shapes disagree; eps is not positive.

    Source:
        v41-blocks.md section 4.1 (one rounding, eps 1e-20), v3-v32-v4.md section 2.1 (both cast points, eps 1e-6)
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("weight_m", weight_m, "m", dims)
    expect_dtype("x_tm", x_tm, *FLOATING)
    expect_dtype("weight_m", weight_m, *FLOATING)
    expect_positive("eps", eps)
    x_tm, weight_m = num.wide(x_tm), num.wide(weight_m)
    mean_t1 = num.sum(x_tm * x_tm, dim=-1, keepdim=True) / dims["m"]
    unit_tm = x_tm * torch.rsqrt(mean_t1 + eps)
    if cast is WeightCast.BEFORE_WEIGHT:
        unit_tm = num.store(unit_tm, dtype)
    return num.store(unit_tm * weight_m, dtype)


def project_norm(
    x_tm: Tensor,
    w_am: Tensor,
    norm_a: Tensor,
    *,
    eps: float,
    cast: WeightCast,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The normalised latent of rows: RMSNorm(x w^T; norm), the product rounded to `dtype` before the norm.

    Raises:
        TypeError: norm_a is not floating; dtype is no storage dtype.
        ValueError: shapes disagree; eps is not positive.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("w_am", w_am, "am", dims)
    latent_ta = num.store(num.einsum("tm,am->ta", num.wide(x_tm), num.wide(w_am)), dtype)
    return rms_norm(latent_ta, norm_a, eps=eps, cast=cast, dtype=dtype, num=num)


def rms_norm_quant(
    x_tm: Tensor,
    weight_m: Tensor,
    *,
    eps: float,
    cast: WeightCast,
    fmt: QuantFormat,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise, round to bf16, quantise the rounded rows.

    Codes and scales describe the bf16 row, not the unrounded one, so that the fused kernel and a norm followed by a
    quantiser store the same bytes.

    Shapes:
        x_tm: [t, m]; weight_m: [m]; returns y [t, m] and the codes and scales of `quantize`.

    Rounding:
        as `rms_norm` to bf16, then as `quantize`.

    Raises:
        TypeError: x_tm or weight_m is not floating.
        ValueError: as `rms_norm` and `quantize`.

    Source:
        v41-attention.md section 2.2, v41-blocks.md section 4.1
    """
    y_tm = rms_norm(x_tm, weight_m, eps=eps, cast=cast, dtype=torch.bfloat16, num=num)
    codes, sf = quantize(y_tm, fmt=fmt, num=num)
    return y_tm, codes, sf
