"""The entrance of draft modules, fast: norms and products of their own components, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_shape
from deeptwin.reference.config import FP8_1X128_UE8M0, FP8_128X128_UE8M0, WeightCast

from .linear import linear_quant_triton, linear_triton
from .rms_norm import STORAGE, rms_norm_triton

if TYPE_CHECKING:
    from deeptwin.reference.mtp_weights import MtpJoin, MtpStreamJoin


def mtp_join_triton(
    e_tm: Tensor,
    h_tm: Tensor,
    weights: MtpJoin,
    *,
    eps: float,
    cast: WeightCast,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`reference.mtp.mtp_join`.

    Raises:
        ValueError: shapes disagree; eps is not positive.
        TypeError: an operand or dtype is not bf16, fp16 or fp32.
        NotImplementedError: the weight is not of `dtype`.
    """
    dims: dict[str, int] = {}
    expect_shape("e_tm", e_tm, "tm", dims)
    expect_shape("h_tm", h_tm, "tm", dims)
    expect_shape("weights.w_mj", weights.w_mj, "mj", dims | {"j": 2 * dims["m"]})
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    _expect_plain("weights.w_mj", weights.w_mj, dtype)
    joined_tj = torch.empty(dims["t"], 2 * dims["m"], dtype=dtype, device=e_tm.device)
    joined_tj[:, : dims["m"]] = rms_norm_triton(e_tm, weights.enorm_m, eps=eps, cast=cast, dtype=dtype)
    joined_tj[:, dims["m"] :] = rms_norm_triton(h_tm, weights.hnorm_m, eps=eps, cast=cast, dtype=dtype)
    return linear_triton(joined_tj, weights.w_mj, dtype=dtype)


def mtp_join_streams_triton(e_tm: Tensor, stream_tnm: Tensor, weights: MtpStreamJoin, *, eps: float) -> Tensor:
    """`reference.mtp.mtp_join_streams`.

    Raises:
        ValueError: shapes disagree; eps is not positive.
        TypeError: an operand is not bf16, fp16 or fp32.
        NotImplementedError: plain weights are not bf16.
    """
    dims: dict[str, int] = {}
    expect_shape("stream_tnm", stream_tnm, "tnm", dims)
    expect_shape("e_tm", e_tm, "tm", dims)
    for name in ("e_mm", "h_mm"):
        if weights.e_sf is None:
            _expect_plain(f"weights.{name}", getattr(weights, name), torch.bfloat16)
    rows_ym = stream_tnm.flatten(0, 1)
    e_tm = _product(_normed(e_tm, weights.enorm_m, eps), weights.e_mm, weights.e_sf)
    h_ym = _product(_normed(rows_ym, weights.hnorm_m, eps), weights.h_mm, weights.h_sf)
    return e_tm[:, None] + h_ym.view(stream_tnm.shape)


def _expect_plain(name: str, w_fm: Tensor, dtype: torch.dtype) -> None:
    if w_fm.dtype != dtype:
        raise NotImplementedError(f"{name}: expected {dtype} as the normed rows, got {w_fm.dtype}")


def _normed(x_tm: Tensor, weight_m: Tensor, eps: float) -> Tensor:
    return rms_norm_triton(x_tm, weight_m, eps=eps, cast=WeightCast.AFTER_WEIGHT)


def _product(x_tm: Tensor, w_fm: Tensor, w_sf: Tensor | None) -> Tensor:
    if w_sf is None:
        return linear_triton(x_tm, w_fm)
    return linear_quant_triton(x_tm, w_fm, w_sf, x_fmt=FP8_1X128_UE8M0, w_fmt=FP8_128X128_UE8M0)
