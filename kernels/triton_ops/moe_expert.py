"""Experts' first half in one launch: both projections of a tile, SwiGLU with the routing weight, e4m3 quantiser."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from . import require_runnable
from .linear import (
    LinearLaunch,
    codes_launch,
    expert_of_tile,
    formats,
    require_contiguous_rows,
    scaled_product,
    tiles_of_experts,
)
from .quant import SCALE_DTYPES, e4m3_codes, output_buffer, require_format, store_scale
from .split_softmax import arch_of
from .swiglu import gated


def expert_launch(group: int, f32_group: int, arch: str) -> LinearLaunch:
    """The launch of the product with a tile of half its width, for two accumulators. Whole groups lie in a tile.

    On Ascend the width stays: with 32 channels the lowering of the packed codes fails.
    """
    launch = codes_launch(f32_group, arch)
    features = max(group, launch.block_features if arch == "ascend950" else launch.block_features // 2)
    return dataclasses.replace(launch, block_features=features, num_warps=8 if features > 64 else launch.num_warps)


@triton.jit
def _expert_up(
    x_ptr,
    x_sf_ptr,
    w_ptr,
    w_sf_ptr,
    row_ends_ptr,
    tile_ends_ptr,
    weight_ptr,
    codes_ptr,
    sf_ptr,
    num_rows,
    half,
    width,
    num_experts,
    stride_xt,
    stride_xst,
    stride_we,
    stride_wf,
    stride_wse,
    stride_wsf,
    stride_weight,
    limit,
    floor,
    HAS_LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_FOLDED: tl.constexpr,
    W_ROWS: tl.constexpr,
    W_GROUP: tl.constexpr,
    W_FOLDED: tl.constexpr,
    W_PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. which expert: every expert has whole tiles of its own, in order
    GROUPS: tl.constexpr = BLOCK_FEATURES // GROUP
    tile = tl.program_id(0)
    mine, first_tile, first_row = expert_of_tile(tile, row_ends_ptr, tile_ends_ptr, num_experts, EXPERTS_PAD)
    # tiles beyond the last expert own no rows: nothing is read, nothing is written
    if mine < num_experts:
        offset = first_row + (tile - first_tile) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_rows = (offset < tl.load(row_ends_ptr + mine)) & (offset < num_rows)
        row = offset.to(tl.int64)
        feature = tl.program_id(1).to(tl.int64) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
        in_half = feature < half
        w_own = w_ptr + mine.to(tl.int64) * stride_we
        w_sf_own = w_sf_ptr + mine.to(tl.int64) * stride_wse
        # 2. both projections of the same channels, each rounded to bf16
        gate = scaled_product(
            x_ptr,
            x_sf_ptr,
            w_own,
            w_sf_own,
            row,
            in_rows,
            feature,
            in_half,
            width,
            stride_xt,
            stride_xst,
            stride_wf,
            stride_wsf,
            X_GROUP,
            X_FOLDED,
            W_ROWS,
            W_GROUP,
            W_FOLDED,
            W_PACKED,
            BLOCK_ROWS,
            BLOCK_FEATURES,
            BLOCK_WIDTH,
            BITS,
        ).to(tl.bfloat16)
        up = scaled_product(
            x_ptr,
            x_sf_ptr,
            w_own,
            w_sf_own,
            row,
            in_rows,
            feature + half,
            in_half,
            width,
            stride_xt,
            stride_xst,
            stride_wf,
            stride_wsf,
            X_GROUP,
            X_FOLDED,
            W_ROWS,
            W_GROUP,
            W_FOLDED,
            W_PACKED,
            BLOCK_ROWS,
            BLOCK_FEATURES,
            BLOCK_WIDTH,
            BITS,
        ).to(tl.bfloat16)
        # 3. SwiGLU in fp32; the weight comes before the quantiser
        weight = tl.load(weight_ptr + row * stride_weight, mask=in_rows, other=0.0).to(tl.float32)
        value = gated(gate.to(tl.float32), up.to(tl.float32), weight[:, None], limit, HAS_LIMIT, True)
        # 4. scales and codes, a group to a line; a tile of one group is a line already
        mask = in_rows[:, None] & in_half[None, :]
        codes_ptrs = codes_ptr + row[:, None] * half + feature[None, :]
        if GROUPS == 1:
            sf_ptrs = sf_ptr + row * (half // GROUP) + tl.program_id(1)
            scale = store_scale(tl.max(tl.abs(value), axis=1), floor, sf_ptrs, in_rows, 448.0, SCALE)
            tl.store(codes_ptrs, e4m3_codes(value, scale[:, None], SCALE), mask=mask)
        else:
            value = tl.reshape(value, [BLOCK_ROWS * GROUPS, GROUP])
            group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
            sf_at = row[:, None] * (half // GROUP) + group[None, :]
            sf_mask = in_rows[:, None] & (group < half // GROUP)[None, :]
            sf_ptrs = sf_ptr + tl.reshape(sf_at, [BLOCK_ROWS * GROUPS])
            sf_mask = tl.reshape(sf_mask, [BLOCK_ROWS * GROUPS])
            scale = store_scale(tl.max(tl.abs(value), axis=1), floor, sf_ptrs, sf_mask, 448.0, SCALE)
            codes = tl.reshape(e4m3_codes(value, scale[:, None], SCALE), [BLOCK_ROWS, BLOCK_FEATURES])
            tl.store(codes_ptrs, codes, mask=mask)


def expert_up(
    x_q: torch.Tensor,
    x_sf: torch.Tensor,
    w_q: torch.Tensor,
    w_sf: torch.Tensor,
    group_sizes_e: torch.Tensor,
    weight_y: torch.Tensor,
    *,
    x_group: int,
    w_block: tuple[int, int],
    scale: str,
    limit: float | None,
    amax_floor: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the first half of every expert; sizes beyond the rows are cut, missing ones leave rows unwritten.

    Raises:
        NotImplementedError: rows are not contiguous, a group is no power of two from 16 up, or the floor of fp32 scales
            is below 2^-80.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: x_q is on the CPU and kernels are not interpreted.
    """
    (y, m), (e, features, _) = x_q.shape, w_q.shape
    half = features // 2
    require_contiguous_rows(x_q=x_q, x_sf=x_sf, w_q=w_q, w_sf=w_sf)
    require_format(1, x_group, scale, amax_floor)
    codes_out, sf_out = out or (None, None)
    codes = output_buffer(codes_out, (y, half), torch.float8_e4m3fn, x_q)
    sf = output_buffer(sf_out, (y, half // x_group), SCALE_DTYPES[scale], x_q)
    f32_group = max((g for s, g in ((x_sf, x_group), (w_sf, w_block[1])) if s.dtype != torch.uint8), default=0)
    chosen = expert_launch(x_group, f32_group, arch_of(x_q.device))
    constants, launch = formats(x_sf, w_q, w_sf, x_group, w_block, arch_of(x_q.device), chosen)
    if not codes.numel():
        return codes, sf
    require_runnable("x_q", x_q)
    row_ends, tile_ends, tiles = tiles_of_experts(group_sizes_e, y, launch.block_rows)
    _expert_up[(tiles, triton.cdiv(half, launch.block_features))](
        x_q.view(torch.uint8),
        x_sf,
        w_q.view(torch.uint8),
        w_sf,
        row_ends,
        tile_ends,
        weight_y,
        codes,
        sf,
        y,
        half,
        m,
        e,
        x_q.stride(0),
        x_sf.stride(0),
        w_q.stride(0),
        w_q.stride(1),
        w_sf.stride(0),
        w_sf.stride(1),
        weight_y.stride(0),
        0.0 if limit is None else limit,
        amax_floor,
        HAS_LIMIT=limit is not None,
        GROUP=x_group,
        SCALE=scale,
        EXPERTS_PAD=triton.next_power_of_2(e),
        **constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return codes, sf
