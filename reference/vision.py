"""Images as tokens: patches, the tower, the projector, and the rows of a span among those of text.

`images.py` plans and resizes an image; here it becomes a grid of patches on grey, the tower gives a row for every
patch, 3 x 3 rows become one token, and the tokens replace the rows of their span.

Letters beside the project's: n counts patches, i features of a patch or of a token before its projection, z the rows
of the joint projection.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import expect_dtype, expect_positive, expect_shape
from .config import ImagePlan, Pairing, RopeConfig, RopeSpan, TokenType, VisionConfig, WeightCast
from .images import internal_types
from .numerics import CONTRACT, Numerics
from .rms_norm import rms_norm
from .rope import rope, rope_frequencies, rope_table
from .weights import VisionBlockWeights, VisionWeights

GREY = 127  # trunc(0.5 * 255)


def image_patches(pixels_hwc: Tensor, *, plan: ImagePlan, config: VisionConfig, num: Numerics = CONTRACT) -> Tensor:
    """Patches of a resized image, centred on grey and normalised to -1 … 1.

    Math:
        y = (v / 255 - 0.5) / 0.5; patches row by row over the grid, each [channel, row, column]

    Shapes:
        pixels_hwc: uint8 [h, w, 3] inside the plan; returns [n, 3 patch^2], n = grid_h grid_w.

    Rounding:
        every operation to fp32, the result to bf16.

    Edges:
        left and top offset is half the gap, half to even.

    Raises:
        TypeError: pixels are no bytes.
        ValueError: pixels are no [h, w, 3], or larger than the plan.

    Source:
        v41-blocks.md section 6.1
    """
    expect_dtype("pixels_hwc", pixels_hwc, torch.uint8)
    expect_shape("pixels_hwc", pixels_hwc, "hwc", {"c": 3})
    h, w, p = pixels_hwc.shape[0], pixels_hwc.shape[1], config.patch
    if h > plan.height or w > plan.width:
        raise ValueError(f"pixels_hwc: expected at most {plan.height} x {plan.width}, got {h} x {w}")
    top, left = round((plan.height - h) / 2), round((plan.width - w) / 2)
    canvas = torch.full((plan.height, plan.width, 3), GREY, dtype=torch.uint8, device=pixels_hwc.device)
    canvas[top : top + h, left : left + w] = pixels_hwc
    grid = canvas.view(plan.grid_h, p, plan.grid_w, p, 3).permute(0, 2, 4, 1, 3)
    unit = num.f32(num.wide(grid.reshape(plan.grid_h * plan.grid_w, 3 * p * p)) / 255)
    return num.bf16(num.f32(unit - 0.5) / 0.5)


def vision_tower(
    patches_ni: Tensor,
    weights: VisionWeights,
    grids: tuple[tuple[int, int], ...],
    *,
    config: VisionConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """A row for every patch of every image; images do not see one another.

    Math:
        x += W_o attention(rope(W_qkv norm(x))); x += W_2 (silu(gate) up), gate and up = W_1 norm(x); last a norm
        scores / sqrt(head width), no mask; row and column turn the first and second half of the angles, half-split

    Shapes:
        patches_ni: [n, 3 patch^2]; grids: (rows, columns) of every image; returns [n, m].

    Rounding:
        every linear (after its bias), rotation, attention output, silu(gate) up and residual sum to bf16; softmax
        weights unnormalised to bf16 (free scale).

    Raises:
        ValueError: shapes disagree, or the grids do not add up to n.

    Source:
        v41-blocks.md section 6.2
    """
    expect_shape("patches_ni", patches_ni, "ni", {"i": 3 * config.patch**2})
    counts = [rows * columns for rows, columns in grids]
    if sum(counts) != len(patches_ni):
        raise ValueError(f"grids: expected {len(patches_ni)} patches, got {sum(counts)}")
    table = _table(grids, config)
    x_nm = num.bf16(_linear("ni,mi->nm", patches_ni, weights.w_patch_mi, weights.b_patch_m, num))
    for block in weights.blocks:
        x_nm = num.bf16(x_nm + _attention(x_nm, block, table, counts, config, num))
        h_nm = _norm(x_nm, block.norm2_m, config, num)
        gate_nf, up_nf = num.bf16(_linear("nm,im->ni", h_nm, block.w1_im, None, num)).chunk(2, -1)
        act_nf = num.bf16(gate_nf / (1 + torch.exp(-gate_nf)) * up_nf)
        x_nm = num.bf16(x_nm + num.bf16(_linear("nf,mf->nm", act_nf, block.w2_mf, None, num)))
    return _norm(x_nm, weights.norm_m, config, num)


def pixel_unshuffle(x_nm: Tensor, grids: tuple[tuple[int, int], ...], *, ratio: int) -> Tensor:
    """`ratio` x `ratio` patch rows side by side, one row a token; patches beyond the edge are zero.

    Math:
        feature c ratio^2 + a ratio + b of token (i, j) is channel c of patch (ratio i + a, ratio j + b)

    Shapes:
        x_nm: [n, m]; returns [y, m ratio^2], y = sum of ceil(rows / ratio) ceil(columns / ratio).

    Raises:
        ValueError: x_nm is not 2-D, the grids do not add up to n, or ratio is not positive.

    Source:
        v41-blocks.md section 6.3
    """
    expect_positive("ratio", ratio)
    expect_shape("x_nm", x_nm, "nm", {})
    if sum(rows * columns for rows, columns in grids) != len(x_nm):
        raise ValueError(f"grids: expected {len(x_nm)} patches, got {sum(rows * columns for rows, columns in grids)}")
    found, done, m = [x_nm.new_zeros(0, x_nm.shape[1] * ratio**2)], 0, x_nm.shape[1]
    for rows, columns in grids:
        i, j = -(-rows // ratio), -(-columns // ratio)
        whole = x_nm.new_zeros(i * ratio, j * ratio, m)
        whole[:rows, :columns] = x_nm[done : done + rows * columns].view(rows, columns, m)
        found.append(whole.view(i, ratio, j, ratio, m).permute(0, 2, 4, 1, 3).reshape(i * j, m * ratio**2))
        done += rows * columns
    return torch.cat(found)


def project_tokens(x_yi: Tensor, weights: VisionWeights, *, num: Numerics = CONTRACT) -> Tensor:
    """Image tokens in the width of the model: linear, exact GELU, linear; each to bf16. Raises ValueError on shapes."""
    h_yf = num.bf16(_linear("yi,fi->yf", x_yi, weights.w_in_fi, weights.b_in_f, num))
    h_yf = num.bf16(h_yf * (1 + torch.erf(h_yf / math.sqrt(2))) / 2)
    return num.bf16(_linear("yi,fi->yf", h_yf, weights.w_out_ff, weights.b_out_f, num))


def insert_images(
    embed_tm: Tensor, image_ym: Tensor, marker_km: Tensor, type_t: Tensor, *, num: Numerics = CONTRACT
) -> Tensor:
    """Embedding rows with the spans of images put in: image rows in order, markers by type.

    Shapes:
        embed_tm: [t, m]; image_ym: [y, m], a row for every IMAGE of this chunk; marker_km: [3, m], START, NEWLINE, END;
        type_t: integer [t]; returns [t, m].

    Rounding:
        none: rows are copied.

    Raises:
        TypeError: types are no integers.
        ValueError: shapes disagree, a type is unknown, or the chunk has not exactly y IMAGE positions.

    Source:
        v41-blocks.md section 6.4
    """
    dims: dict[str, int] = {"k": 3}
    for name, x, letters in (
        ("embed_tm", embed_tm, "tm"),
        ("image_ym", image_ym, "ym"),
        ("marker_km", marker_km, "km"),
    ):
        expect_shape(name, x, letters, dims)
    expect_shape("type_t", type_t, "t", dims)
    expect_dtype("type_t", type_t, torch.int32, torch.int64)
    internal_types(type_t)
    is_image = type_t == TokenType.IMAGE
    if int(is_image.sum(dtype=torch.int64)) != dims["y"]:
        raise ValueError(f"image_ym: expected {int(is_image.sum(dtype=torch.int64))} rows, got {dims['y']}")
    y_tm = num.wide(embed_tm).clone()
    y_tm[is_image] = num.wide(image_ym)
    for row, kind in enumerate((TokenType.START, TokenType.NEWLINE, TokenType.END)):
        y_tm[type_t == kind] = num.wide(marker_km)[row]
    return y_tm


def _table(grids: tuple[tuple[int, int], ...], config: VisionConfig) -> Tensor:
    freq = rope_frequencies(RopeConfig(rope_dim=config.head_dim // 2, theta=config.theta, yarn=None))
    half = len(freq)
    rows = torch.cat([torch.arange(h).repeat_interleave(w) for h, w in grids] or [torch.zeros(0, dtype=torch.int64)])
    columns = torch.cat([torch.arange(w).repeat(h) for h, w in grids] or [rows])
    row, column = rope_table(rows, freq), rope_table(columns, freq)
    return torch.cat([row[:, :half], column[:, :half], row[:, half:], column[:, half:]], 1)


def _linear(equation: str, x: Tensor, weight: Tensor, bias: Tensor | None, num: Numerics) -> Tensor:
    y = num.einsum(equation, num.wide(x), num.wide(weight))
    return y if bias is None else y + num.wide(bias)


def _norm(x_nm: Tensor, weight_m: Tensor, config: VisionConfig, num: Numerics) -> Tensor:
    return rms_norm(x_nm, weight_m, eps=config.norm_eps, cast=WeightCast.AFTER_WEIGHT, num=num)


def _attention(
    x_nm: Tensor, block: VisionBlockWeights, table: Tensor, counts: list[int], config: VisionConfig, num: Numerics
) -> Tensor:
    h_nm = _norm(x_nm, block.norm1_m, config, num)
    qkv = num.bf16(_linear("nm,zm->nz", h_nm, block.w_qkv_zm, block.b_qkv_z, num))
    q_nhd, k_nhd, v_nhd = qkv.unflatten(1, (3, config.num_heads, config.head_dim)).unbind(1)
    at, pairing = torch.arange(len(x_nm)), Pairing.HALF_SPLIT
    q_nhd, k_nhd = (
        rope(x, table, at, pairing=pairing, span=RopeSpan.FIRST, inverse=False, num=num) for x in (q_nhd, k_nhd)
    )
    found = [x_nm.new_zeros(0, config.num_heads, config.head_dim)]
    for q, k, v in zip(*(x.split(counts) for x in (q_nhd, k_nhd, v_nhd)), strict=True):
        score = num.einsum("nhd,shd->nhs", q, k) * config.head_dim**-0.5
        e = torch.exp(score - score.amax(-1, keepdim=True))
        total = num.sum(e, dim=-1, keepdim=True)
        out = num.einsum("nhs,shd->nhd", num.store(e, torch.bfloat16, free_scale=True), v)
        found.append(num.bf16(out / total))
    return num.bf16(_linear("nm,om->no", torch.cat(found).flatten(1), block.w_o_mm, block.b_o_m, num))
