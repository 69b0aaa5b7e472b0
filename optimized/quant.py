"""Group quantisers, fast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_multiple, expect_shape
from deeptwin.reference.config import CodeKind, QuantFormat, ScaleKind

from .providers import packed, tile_kernels

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
        NotImplementedError: fmt.rows or fmt.group is no power of two, or fmt has e2m1 codes in blocks of rows.
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
    _check_quantized(codes, sf, fmt, dtype)
    from deeptwin.kernels.triton_ops import quant

    return quant.dequantize(
        codes, sf, rows=fmt.rows, group=fmt.group, code=fmt.code.value, scale=fmt.scale.value, dtype=dtype, out=out
    )


def quantize_tile_kernels(x_tm: Tensor, *, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """`quantize` by `per_token_cast` of TileKernels 2.1.0 (SM90, SM100).

    Layout: rows are packed if they are not; scales come row by row, UE8M0 bytes four to an int32 with the last one
    filled up, of which ours are a view. Codes are x times the rounded inverse of the scale: those of x / scale for
    powers of two, else off by one step where x / scale lies within 2^-22 of a midpoint. Launches repeat, and no row
    depends on its batch. NaN is left out of an amax; an e2m1 code of NaN is 6.

    Raises:
        TypeError: x_tm is not bf16, fp16 or fp32.
        ValueError: x_tm is not 2-D; fmt.rows is 1 and m no multiple of fmt.group.
        NotImplementedError: no TileKernels 2.x, fp16, blocks of rows, groups other than 16, 32, 64 and 128, rows that
            are no multiple of 64, or a floor that is not the library's.
    """
    expect_shape("x_tm", x_tm, "tm", {})
    expect_dtype("x_tm", x_tm, torch.bfloat16, torch.float16, torch.float32)
    if fmt.rows == 1:
        expect_multiple("x_tm (last axis)", x_tm.shape[1], fmt.group)
    if fmt.rows != 1 or fmt.group not in (16, 32, 64, 128):
        raise NotImplementedError(f"fmt: expected groups of 16, 32, 64 or 128 in a row, got {fmt.name}")
    if x_tm.dtype is torch.float16 or x_tm.shape[1] % 64:
        raise NotImplementedError(f"x_tm: expected 64·n columns in bf16 or fp32, got {x_tm.shape}, {x_tm.dtype}")
    library = tile_kernels()
    code, small = fmt.code.value, fmt.scale is ScaleKind.E4M3
    _expect_floor(library, fmt)
    codes, sf = library.quant.per_token_cast(
        packed(x_tm),
        code,
        fmt.group,
        round_sf=fmt.scale in (ScaleKind.UE8M0, ScaleKind.POW2_F32),
        use_packed_ue8m0=fmt.scale is ScaleKind.UE8M0,
        use_e4m3_sf=small,
    )
    if fmt.scale is ScaleKind.UE8M0:
        sf = sf.view(torch.uint8)[:, : x_tm.shape[1] // fmt.group]
    return codes.view(torch.uint8) if fmt.code is CodeKind.E2M1 else codes, sf


def dequantize_tile_kernels(
    codes: Tensor, sf: Tensor, *, fmt: QuantFormat, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`dequantize` by `cast_back` of TileKernels 2.1.0 (SM90, SM100).

    Layout: scales row by row, UE8M0 bytes packed here four to an int32. The library shifts the byte into the exponent
    field: 0 is zero there and 255 infinity, where ours are 2^-127 and NaN; bytes are not inspected. Launches repeat,
    and no row depends on its batch.

    Raises:
        TypeError: as `dequantize_triton`.
        ValueError: as `dequantize_triton`.
        NotImplementedError: no TileKernels 2.x, fp16, or rows that are no multiple of 64 elements.
    """
    _check_quantized(codes, sf, fmt, dtype)
    m = codes.shape[1] * (2 if fmt.code is CodeKind.E2M1 else 1)
    if dtype is torch.float16 or m % 64:
        raise NotImplementedError(f"dtype, codes: expected 64·n columns in bf16 or fp32, got {m}, {dtype}")
    library = tile_kernels()
    if fmt.scale is ScaleKind.UE8M0:
        rows, groups = sf.shape
        whole = sf.new_zeros(rows, -(-groups // 4) * 4)
        whole[:, :groups] = sf
        sf = whole.view(torch.int32)
    data = packed(codes.view(torch.int8) if fmt.code is CodeKind.E2M1 else codes)
    values: Tensor = library.quant.cast_back(
        (data, packed(sf)), "fp32" if dtype is torch.float32 else "bf16", (fmt.rows, fmt.group)
    )
    return values


def _expect_floor(library: Any, fmt: QuantFormat) -> None:
    """The floor on an amax is a setting of the whole library, which another caller may have changed."""
    floor = library.config.get_amax_clamp_for_quant(fmt.code.value, fmt.scale is ScaleKind.E4M3)
    if floor != fmt.amax_floor:
        raise NotImplementedError(f"fmt: expected the library's floor {floor}, got {fmt.amax_floor} of {fmt.name}")


def _check_quantized(codes: Tensor, sf: Tensor, fmt: QuantFormat, dtype: torch.dtype) -> None:
    expect_dtype("codes", codes, torch.float8_e4m3fn if fmt.code is CodeKind.E4M3 else torch.uint8)
    expect_dtype("sf", sf, SCALE_DTYPES[fmt.scale])
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    expect_shape("codes", codes, "tm", {})
    t, m = codes.shape[0], codes.shape[1] * (2 if fmt.code is CodeKind.E2M1 else 1)
    if fmt.rows == 1:
        expect_multiple("codes (last axis, in elements)", m, fmt.group)
    expect_shape("sf", sf, "tg", {"t": -(-t // fmt.rows), "g": -(-m // fmt.group)})
