"""Products as all attention layers of V4 take them, and norm and rotation of V4.1 too; the contract is
`reference/v4_layer.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.config import (
    FP8_1X128_UE8M0,
    FP8_128X128_UE8M0,
    Pairing,
    RopeSpan,
    V4AttnConfig,
    WeightCast,
)
from deeptwin.reference.csa2_config import Csa2Config

from .linear import linear_codes_triton, linear_quant_triton, linear_triton
from .rms_norm import rms_norm_triton
from .rope import rope_triton


def product(x_tm: Tensor, w_fm: Tensor, w_sf: Tensor | None) -> Tensor:
    """Rows times a matrix in bf16; with scales the matrix is e4m3, and so are the rows, in groups of 128."""
    if w_sf is None:
        return linear_triton(x_tm, w_fm)
    return linear_quant_triton(x_tm, w_fm, w_sf, x_fmt=FP8_1X128_UE8M0, w_fmt=FP8_128X128_UE8M0)


def product_of_codes(x_q: Tensor, x_sf: Tensor, w_q: Tensor, w_sf: Tensor) -> Tensor:
    """The same product of rows that are quantised already."""
    return linear_codes_triton(x_q, x_sf, w_q, w_sf, x_fmt=FP8_1X128_UE8M0, w_fmt=FP8_128X128_UE8M0)


def layer_norm(x_tm: Tensor, weight_m: Tensor, config: V4AttnConfig | Csa2Config) -> Tensor:
    """RMSNorm as every norm of a layer does it."""
    return rms_norm_triton(x_tm, weight_m, eps=config.eps, cast=WeightCast.AFTER_WEIGHT)


def rotated(
    x_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    inverse: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The last channels of every head turned by the angles of its position."""
    pairing, span = Pairing.INTERLEAVED, RopeSpan.LAST
    return rope_triton(x_thd, table_sr, positions_t, pairing=pairing, span=span, inverse=inverse, dtype=dtype)
