"""Copies around the image tower, fast; the contract is `reference/vision.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from deeptwin.reference.config import ImagePlan, TokenType, VisionConfig

STORAGE = (torch.bfloat16, torch.float16, torch.float32)
GREY = 127


def image_patches_triton(
    pixels_hwc: Tensor, *, plan: ImagePlan, config: VisionConfig, out: Tensor | None = None
) -> Tensor:
    """`reference.vision.image_patches`.

    Raises:
        TypeError: pixels are no bytes; `out` has another dtype.
        ValueError: pixels are no [h, w, 3], or larger than the plan; `out` does not fit.
    """
    expect_dtype("pixels_hwc", pixels_hwc, torch.uint8)
    expect_shape("pixels_hwc", pixels_hwc, "hwc", {"c": 3})
    h, w = pixels_hwc.shape[:2]
    if h > plan.height or w > plan.width:
        raise ValueError(f"pixels_hwc: expected at most {plan.height} x {plan.width}, got {h} x {w}")
    from deeptwin.kernels.triton_ops import vision

    offset = (round((plan.height - h) / 2), round((plan.width - w) / 2))
    grid = (plan.grid_h, plan.grid_w)
    return vision.patches(pixels_hwc, grid=grid, offset=offset, patch=config.patch, grey=GREY, out=out)


def pixel_unshuffle_triton(
    x_nm: Tensor, grids: tuple[tuple[int, int], ...], *, ratio: int, out: Tensor | None = None
) -> Tensor:
    """`reference.vision.pixel_unshuffle` of bf16, fp16 or fp32 rows.

    Raises:
        TypeError: x_nm or `out` has another dtype.
        ValueError: x_nm is not 2-D, the grids do not add up to n, or ratio is not positive; `out` does not fit.
    """
    expect_positive("ratio", ratio)
    expect_shape("x_nm", x_nm, "nm", {})
    expect_dtype("x_nm", x_nm, *STORAGE)
    total = sum(rows * columns for rows, columns in grids)
    if total != len(x_nm):
        raise ValueError(f"grids: expected {len(x_nm)} patches, got {total}")
    from deeptwin.kernels.triton_ops import vision

    return vision.unshuffle(x_nm, grids, ratio=ratio, out=out)


def insert_images_triton(
    embed_tm: Tensor,
    image_ym: Tensor,
    marker_km: Tensor,
    type_t: Tensor,
    *,
    trusted: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.vision.insert_images`. With `trusted` types are not inspected, which would wait for the device: an
    unknown one, and an IMAGE without a row, then give NaN.

    Raises:
        TypeError: types are no integers; rows or `out` have another dtype than embed_tm.
        ValueError: shapes disagree; not trusted, and a type is unknown or there is not one row for every IMAGE token;
            `out` does not fit.
    """
    dims: dict[str, int] = {"k": 3}
    for name, x, letters in (
        ("embed_tm", embed_tm, "tm"),
        ("image_ym", image_ym, "ym"),
        ("marker_km", marker_km, "km"),
    ):
        expect_shape(name, x, letters, dims)
        expect_dtype(name, x, *(STORAGE if x is embed_tm else (embed_tm.dtype,)))
    expect_shape("type_t", type_t, "t", dims)
    expect_dtype("type_t", type_t, torch.int32, torch.int64)
    if not trusted:
        expect_in_range("type_t", type_t, min(TokenType), max(TokenType) + 1)
        images = int((type_t == TokenType.IMAGE).sum(dtype=torch.int64))
        if images != dims["y"]:
            raise ValueError(f"image_ym: expected {images} rows, got {dims['y']}")
    from deeptwin.kernels.triton_ops import vision

    return vision.insert(embed_tm, image_ym, marker_km, type_t, out=out)
