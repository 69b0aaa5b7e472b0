"""Copies around the image tower: pixels into normalised patches, patches into tokens, tokens among text.

Nothing is summed; each output element is computed from one input element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer

BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, kw_only=True)
class CopyLaunch:
    """Elements of a row that a program takes; it changes no result."""

    block: int
    num_warps: int = 4


def copy_launch(width: int) -> CopyLaunch:
    """Up to 1024 elements a program, whatever the number of rows and the device."""
    return CopyLaunch(block=min(max(triton.next_power_of_2(width), 32), 1024))


@triton.jit
def _patches(
    pixels_ptr,
    y_ptr,
    height,
    width,
    top,
    left,
    grid_w,
    stride_h,
    stride_w,
    stride_c,
    PATCH: tl.constexpr,
    GREY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. the pixel of each feature: channel, row, column inside the patch
    patch = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = item < 3 * PATCH * PATCH
    row = (patch // grid_w) * PATCH + (item // PATCH) % PATCH - top
    column = (patch % grid_w) * PATCH + item % PATCH - left
    inside = mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    # 2. grey around the image
    pixel_ptrs = pixels_ptr + row * stride_h + column * stride_w + (item // (PATCH * PATCH)) * stride_c
    value = tl.where(inside, tl.load(pixel_ptrs, mask=inside, other=0).to(tl.float32), GREY)
    # 3. a true division; doubling is exact, so it does not matter whether it is fused
    unit = (tl.div_rn(value, 255.0) - 0.5) * 2.0
    tl.store(y_ptr + patch * (3 * PATCH * PATCH) + item, unit.to(tl.bfloat16), mask=mask)


@triton.jit
def _unshuffle(
    x_ptr,
    y_ptr,
    rows,
    columns,
    tokens_w,
    features,
    stride_n,
    stride_m,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = item < features
    row = (token // tokens_w) * RATIO + (item // RATIO) % RATIO
    column = (token % tokens_w) * RATIO + item % RATIO
    inside = mask & (row < rows) & (column < columns)
    x_ptrs = x_ptr + (row * columns + column) * stride_n + (item // (RATIO * RATIO)).to(tl.int64) * stride_m
    tl.store(y_ptr + token * features + item, tl.load(x_ptrs, mask=inside, other=0.0), mask=mask)


@triton.jit
def _insert(
    embed_ptr,
    image_ptr,
    marker_ptr,
    type_ptr,
    rank_ptr,
    y_ptr,
    width,
    num_images,
    stride_et,
    stride_em,
    stride_iy,
    stride_im,
    stride_kk,
    stride_km,
    BLOCK: tl.constexpr,
):
    # 1. where the row comes from: -1 text, 1 image, 0, 2 and 3 the markers start, newline and end
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = column < width
    kind = tl.load(type_ptr + token).to(tl.int64)
    rank = tl.load(rank_ptr + token).to(tl.int64)
    is_text = kind == -1
    is_image = (kind == 1) & (rank < num_images)
    is_marker = (kind == 0) | (kind == 2) | (kind == 3)
    # 2. one of the three is read, as bits; a row that is none of them comes out as all ones, which is NaN
    embed_ptrs = embed_ptr + token * stride_et + column * stride_em
    image_ptrs = image_ptr + rank * stride_iy + column * stride_im
    marker_ptrs = marker_ptr + tl.maximum(kind - 1, 0) * stride_kk + column * stride_km
    bits = tl.load(embed_ptrs, mask=mask & is_text, other=0)
    bits = bits | tl.load(image_ptrs, mask=mask & is_image, other=0)
    bits = bits | tl.load(marker_ptrs, mask=mask & is_marker, other=0)
    missing = tl.where(is_text | is_image | is_marker, 0, -1).to(bits.dtype)
    tl.store(y_ptr + token * width + column, bits | missing, mask=mask)


def patches(
    pixels_hwc: torch.Tensor,
    *,
    grid: tuple[int, int],
    offset: tuple[int, int],
    patch: int,
    grey: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Patches of a grid (rows, columns) with the image at `offset` (top, left), bf16.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: pixels_hwc is on the CPU and kernels are not interpreted.
    """
    features = 3 * patch * patch
    y_ni = output_buffer(out, (grid[0] * grid[1], features), torch.bfloat16, pixels_hwc)
    require_runnable("pixels_hwc", pixels_hwc)
    launch = copy_launch(features)
    _patches[(grid[0] * grid[1], triton.cdiv(features, launch.block))](
        pixels_hwc,
        y_ni,
        pixels_hwc.shape[0],
        pixels_hwc.shape[1],
        *offset,
        grid[1],
        *pixels_hwc.stride(),
        PATCH=patch,
        GREY=float(grey),
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return y_ni


def unshuffle(
    x_nm: torch.Tensor, grids: tuple[tuple[int, int], ...], *, ratio: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Tokens of `ratio` x `ratio` patches, a launch for every image.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_nm is on the CPU and kernels are not interpreted.
    """
    features = x_nm.shape[1] * ratio * ratio
    counts = [triton.cdiv(h, ratio) * triton.cdiv(w, ratio) for h, w in grids]
    y_yi = output_buffer(out, (sum(counts), features), x_nm.dtype, x_nm)
    launch = copy_launch(features)
    patch = token = 0
    for (rows, columns), count in zip(grids, counts, strict=True):
        if count and features:
            require_runnable("x_nm", x_nm)
            _unshuffle[(count, triton.cdiv(features, launch.block))](
                x_nm[patch:],
                y_yi[token:],
                rows,
                columns,
                triton.cdiv(columns, ratio),
                features,
                *x_nm.stride(),
                RATIO=ratio,
                BLOCK=launch.block,
                num_warps=launch.num_warps,
            )
        patch, token = patch + rows * columns, token + count
    return y_yi


def insert(
    embed_tm: torch.Tensor,
    image_ym: torch.Tensor,
    marker_km: torch.Tensor,
    type_t: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of text, images (by their running rank) and markers. A type that is none gives a row of NaN.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: embed_tm is on the CPU and kernels are not interpreted.
    """
    t, m = embed_tm.shape
    y_tm = output_buffer(out, (t, m), embed_tm.dtype, embed_tm)
    if not y_tm.numel():
        return y_tm
    require_runnable("embed_tm", embed_tm)
    rank_t = torch.clamp_min((type_t == 1).cumsum(0, dtype=torch.int32) - 1, 0)
    launch = copy_launch(m)
    embed, image, marker, y = (x.view(BITS[x.element_size()]) for x in (embed_tm, image_ym, marker_km, y_tm))
    _insert[(t, triton.cdiv(m, launch.block))](
        embed,
        image,
        marker,
        type_t,
        rank_t,
        y,
        m,
        image_ym.shape[0],
        *embed_tm.stride(),
        *image_ym.stride(),
        *marker_km.stride(),
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return y_tm
