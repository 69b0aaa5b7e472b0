"""Root-mean-square normalisation, fast, alone and fused with a group quantiser."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_multiple, expect_positive, expect_shape
from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind, WeightCast

from .providers import packed, tile_kernels

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
        NotImplementedError: fmt has e2m1 codes, blocks of several rows, or a group that is no power of two.
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


def rms_norm_tile_kernels(
    x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: WeightCast, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`rms_norm` by `norm_forward` of TileKernels 2.1.0 (SM90, SM100).

    Layout: rows are packed if they are not. fp32 sums of 128 threads and less in an order of the width alone; launches
    repeat, and no row depends on its batch.

    Raises:
        TypeError: x_tm, weight_m or dtype is not bf16, fp16 or fp32.
        ValueError: shapes disagree; eps is not positive.
        NotImplementedError: no TileKernels 2.x, BEFORE_WEIGHT, fp16, a weight or a result of another dtype than x_tm,
            or rows of other widths than 16·n up to 8192.
    """
    _check(x_tm, weight_m, eps)
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    _expect_one_dtype(x_tm, weight_m, cast)
    if dtype is not x_tm.dtype:
        raise NotImplementedError(f"dtype: expected {x_tm.dtype} as x_tm, got {dtype}")
    y_tm: Tensor = tile_kernels().quant.norm_forward(packed(x_tm), packed(weight_m), eps)[0]
    return y_tm


def rms_norm_quant_tile_kernels(
    x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: WeightCast, fmt: QuantFormat
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm_quant` by `norm_forward_and_per_token_cast` of TileKernels 2.1.0 (SM90, SM100).

    Layout: as `rms_norm_tile_kernels`; UE8M0 bytes come four to an int32, of which ours are a view. The library
    quantises the row rounded to the dtype of x_tm, which is ours in bf16 alone. Launches repeat, and no row depends on
    its batch.

    Raises:
        TypeError: x_tm or weight_m is not bf16, fp16 or fp32.
        ValueError: shapes disagree; eps is not positive; m is no multiple of fmt.group.
        NotImplementedError: no TileKernels 2.x, BEFORE_WEIGHT, other rows than bf16 of 16·n up to 8192, another weight
            than bf16, or another format than e4m3 with UE8M0 scales of 32 and the library's floor.
    """
    _check(x_tm, weight_m, eps)
    expect_multiple("x_tm (last axis)", x_tm.shape[1], fmt.group)
    _expect_one_dtype(x_tm, weight_m, cast)
    library = tile_kernels()
    floor = library.config.get_amax_clamp_for_quant("e4m3", False)
    if (fmt.code, fmt.scale, fmt.rows, fmt.group) != (CodeKind.E4M3, ScaleKind.UE8M0, 1, 32) or fmt.amax_floor != floor:
        raise NotImplementedError(f"fmt: expected e4m3 codes, UE8M0 scales of 32, floor {floor}, got {fmt.name}")
    if x_tm.dtype is not torch.bfloat16:
        raise NotImplementedError(f"x_tm: expected torch.bfloat16, got {x_tm.dtype}")
    (codes, sf), y_tm, _, _ = library.quant.norm_forward_and_per_token_cast(
        packed(x_tm), packed(weight_m), eps, "e4m3", 32, round_sf=True, use_packed_ue8m0=True, with_out_bf16=True
    )
    return y_tm, codes, sf.view(torch.uint8)[:, : x_tm.shape[1] // 32]


def _expect_one_dtype(x_tm: Tensor, weight_m: Tensor, cast: WeightCast) -> None:
    """What both norms of TileKernels ask for."""
    width = x_tm.shape[1]
    if x_tm.dtype is torch.float16 or not 0 < width <= 8192 or width % 16:
        raise NotImplementedError(f"x_tm: expected 16·n columns up to 8192 in bf16 or fp32, got {width}, {x_tm.dtype}")
    if weight_m.dtype is not x_tm.dtype:
        raise NotImplementedError(f"weight_m: expected {x_tm.dtype} as x_tm, got {weight_m.dtype}")
    if cast is not WeightCast.AFTER_WEIGHT:
        raise NotImplementedError(f"cast: expected {WeightCast.AFTER_WEIGHT}, got {cast}")


def _check(x_tm: Tensor, weight_m: Tensor, eps: float) -> None:
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("weight_m", weight_m, "m", dims)
    expect_dtype("x_tm", x_tm, *STORAGE)
    expect_dtype("weight_m", weight_m, *STORAGE)
    expect_positive("eps", eps)
