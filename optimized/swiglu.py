"""SwiGLU, fast, alone and fused with the quantiser of the down projection."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_multiple, expect_positive, expect_shape
from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind

from .providers import packed, tile_kernels

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
        NotImplementedError: fmt has e2m1 codes, e4m3 scales, blocks of several rows, or a group that is no power of
            two; rows are not contiguous.
    """
    _check(h_ti, weight_t, limit)
    if fmt.code is not CodeKind.E4M3 or fmt.scale is ScaleKind.E4M3 or fmt.rows != 1:
        raise NotImplementedError(f"fmt: expected e4m3 codes with UE8M0 or fp32 scales of rows, got {fmt.name}")
    expect_multiple("h_ti (half of the last axis)", h_ti.shape[1] // 2, fmt.group)
    from deeptwin.kernels.triton_ops import swiglu

    return swiglu.swiglu_quant(
        h_ti, weight_t, limit=limit, group=fmt.group, scale=fmt.scale.value, amax_floor=fmt.amax_floor, out=out
    )


def swiglu_tile_kernels(
    h_ti: Tensor, weight_t: Tensor | None = None, *, limit: float | None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`swiglu` by `swiglu_forward` of TileKernels 2.1.0 (SM90, SM100).

    Layout: rows and weights are packed if they are not, weights in fp32. Elementwise: launches repeat, and no row
    depends on its batch.

    Raises:
        TypeError: h_ti, weight_t or dtype is not bf16, fp16 or fp32.
        ValueError: shapes disagree; the width is odd; limit is not positive.
        NotImplementedError: no TileKernels 2.x, fp16, or halves that are no multiple of 64.
    """
    _check(h_ti, weight_t, limit)
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    _expect_halves(h_ti)
    if dtype is torch.float16:
        raise NotImplementedError(f"dtype: expected bf16 or fp32, got {dtype}")
    y_tf: Tensor = tile_kernels().quant.swiglu_forward(
        packed(h_ti),
        "fp32" if dtype is torch.float32 else "bf16",
        topk_weights=_row_weights(weight_t),
        clamp_value=limit,
    )
    return y_tf


def swiglu_quant_tile_kernels(
    h_ti: Tensor, weight_t: Tensor | None = None, *, limit: float | None, fmt: QuantFormat
) -> tuple[Tensor, Tensor]:
    """`swiglu_quant` by `swiglu_forward_and_per_token_cast` of TileKernels 2.1.0 (SM90, SM100).

    Layout: as `swiglu_tile_kernels`; UE8M0 bytes come four to an int32, of which ours are a view. Codes under fp32
    scales are products with 448 / amax, ours quotients by the stored scale. Launches repeat, and no row depends on its
    batch.

    Raises:
        TypeError: h_ti or weight_t is not bf16, fp16 or fp32.
        ValueError: shapes disagree; the width is odd, or half of it no multiple of the group; limit is not positive.
        NotImplementedError: no TileKernels 2.x, fp16, halves that are no multiple of 64, or another format than e4m3
            with UE8M0 or fp32 scales of 32 or 128 and the library's floor.
    """
    _check(h_ti, weight_t, limit)
    expect_multiple("h_ti (half of the last axis)", h_ti.shape[1] // 2, fmt.group)
    _expect_halves(h_ti)
    library = tile_kernels()
    floor = library.config.get_amax_clamp_for_quant("e4m3", False)
    fits = fmt.code is CodeKind.E4M3 and fmt.scale is not ScaleKind.E4M3 and fmt.rows == 1 and fmt.group in (32, 128)
    if not fits or fmt.amax_floor != floor:
        raise NotImplementedError(f"fmt: expected e4m3 codes in groups of 32 or 128, floor {floor}, got {fmt.name}")
    is_byte = fmt.scale is ScaleKind.UE8M0
    codes, sf = library.quant.swiglu_forward_and_per_token_cast(
        packed(h_ti),
        "e4m3",
        fmt.group,
        topk_weights=_row_weights(weight_t),
        round_sf=fmt.scale is not ScaleKind.F32,
        use_packed_ue8m0=is_byte,
        clamp_value=limit,
    )
    return codes, sf.view(torch.uint8)[:, : h_ti.shape[1] // 2 // fmt.group] if is_byte else sf


def _expect_halves(h_ti: Tensor) -> None:
    half = h_ti.shape[1] // 2
    if h_ti.dtype is torch.float16 or not half or half % 64:
        raise NotImplementedError(f"h_ti: expected halves of 64·n columns in bf16 or fp32, got {half}, {h_ti.dtype}")


def _row_weights(weight_t: Tensor | None) -> Tensor | None:
    return None if weight_t is None else packed(weight_t.to(torch.float32))


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
