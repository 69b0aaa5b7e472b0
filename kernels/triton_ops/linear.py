"""Products of rows and weights: floating operands, and quantised bytes whose blocks share a scale.

A program owns one tile of rows and features and walks the whole width in steps of one length. The sum is never split
and no tile looks at the batch, so a row has the same bits alone, in any batch and in any group.

Quantised operands meet as bf16. A code times a power of two is exact there (for scale bytes 10 … 245), so UE8M0 scales
go into the operands; fp32 scales multiply the partial sum of their group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import e4m3_value, output_buffer, ue8m0_value
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class LinearLaunch:
    """Tile of one program. `block_width` fixes the order of summation."""

    block_rows: int = 64
    block_features: int = 128
    block_width: int = 64
    bits: bool = False  # take e4m3 codes apart by integer operations
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True)
class WidenLaunch:
    """Output blocks that a program takes, side by side. It changes no result."""

    blocks: int = 4
    num_warps: int = 4


def linear_launch(dtype: torch.dtype, arch: str) -> LinearLaunch:
    """The launch for floating operands; it never looks at the number of rows."""
    if dtype == torch.float32:  # products of fp32 run without tensor cores; larger tiles spill
        return LinearLaunch(block_rows=32, block_features=32, block_width=32, num_stages=1)
    return LinearLaunch()


def codes_launch(longest_f32_group: int, arch: str) -> LinearLaunch:
    """The launch for quantised operands: a step is one group where a scale multiplies the partial sum."""
    width = max(64, longest_f32_group)
    if arch == "ascend950":  # its compilers cannot widen e4m3, and the tile has to fit the unified buffer
        return LinearLaunch(block_rows=32, block_features=64, block_width=width, bits=True, num_stages=1)
    return LinearLaunch(block_width=width, num_warps=8 if width > 64 else 4, num_stages=2)


@triton.jit
def e2m1_values(nibble):
    """bf16 values of e2m1 codes 0 … 15, exactly; from 2 on a code is exponent and mantissa bit of a number."""
    size = nibble & 7
    bits = tl.where(size == 0, 0, tl.where(size == 1, 0x3F00, (size << 6) + (126 << 7)))
    return (bits | ((nibble >> 3) << 15)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def scaled_by_group(value, scale, ROWS: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr):
    """A tile of bf16 values, each PER neighbours times their power of two: exact, in bf16 or through fp32."""
    grouped = tl.reshape(value, [ROWS, WIDTH // PER, PER])
    if BITS:
        grouped = (grouped.to(tl.float32) * scale[:, :, None]).to(tl.bfloat16)
    else:
        grouped = grouped * scale.to(tl.bfloat16)[:, :, None]
    return tl.reshape(grouped, [ROWS, WIDTH])


@triton.jit
def scaled_product(
    x_ptr,
    x_sf_ptr,
    w_ptr,
    w_sf_ptr,
    row,
    in_rows,
    feature,
    in_features,
    width,
    stride_xt,
    stride_xst,
    stride_wf,
    stride_wsf,
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
    """The fp32 tile of the product, step after step in ascending order."""
    X_PER: tl.constexpr = min(X_GROUP, BLOCK_WIDTH)
    W_PER: tl.constexpr = min(W_GROUP, BLOCK_WIDTH)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_FEATURES], tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        # 1. codes; what lies beyond the width is zero
        column = start + tl.arange(0, BLOCK_WIDTH)
        x_mask = in_rows[:, None] & (column < width)[None, :]
        code = tl.load(x_ptr + row[:, None] * stride_xt + column[None, :], mask=x_mask, other=0)
        x = e4m3_value(code, BITS).to(tl.bfloat16)
        if W_PACKED:
            byte_at = start // 2 + tl.arange(0, BLOCK_WIDTH // 2)
            w_mask = in_features[:, None] & (byte_at < width // 2)[None, :]
            byte = tl.load(w_ptr + feature[:, None] * stride_wf + byte_at[None, :], mask=w_mask, other=0).to(tl.int32)
            # the even element stands in the low nibble
            nibble = tl.reshape(tl.join(byte & 15, byte >> 4), [BLOCK_FEATURES, BLOCK_WIDTH])
            w = e2m1_values(nibble)
        else:
            w_mask = in_features[:, None] & (column < width)[None, :]
            code = tl.load(w_ptr + feature[:, None] * stride_wf + column[None, :], mask=w_mask, other=0)
            w = e4m3_value(code, BITS).to(tl.bfloat16)
        # 2. scales
        x_group = start // X_GROUP + tl.arange(0, BLOCK_WIDTH // X_PER)
        xs_mask = in_rows[:, None] & (x_group * X_GROUP < width)[None, :]
        x_sf = tl.load(x_sf_ptr + row[:, None] * stride_xst + x_group[None, :], mask=xs_mask, other=0)
        w_group = start // W_GROUP + tl.arange(0, BLOCK_WIDTH // W_PER)
        ws_mask = in_features[:, None] & (w_group * W_GROUP < width)[None, :]
        ws_at = w_sf_ptr + (feature // W_ROWS)[:, None] * stride_wsf + w_group[None, :]
        w_sf = tl.load(ws_at, mask=ws_mask, other=0)
        if X_FOLDED:
            x = scaled_by_group(x, ue8m0_value(x_sf), BLOCK_ROWS, BLOCK_WIDTH, X_PER, BITS)
        if W_FOLDED:
            w = scaled_by_group(w, ue8m0_value(w_sf), BLOCK_FEATURES, BLOCK_WIDTH, W_PER, BITS)
        # 3. product; a scale that is no power of two belongs to the whole step
        if X_FOLDED and W_FOLDED:
            acc = tl.dot(x, tl.trans(w), acc)
        else:
            part = tl.dot(x, tl.trans(w))
            if not X_FOLDED:
                part = part * tl.reshape(x_sf, [BLOCK_ROWS])[:, None]
            if not W_FOLDED:
                part = part * tl.reshape(w_sf, [BLOCK_FEATURES])[None, :]
            acc += part
    return acc


@triton.jit
def _linear(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_features,
    width,
    stride_xt,
    stride_wf,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    # 1. which tile
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1).to(tl.int64) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    in_rows, in_features = row < num_rows, feature < num_features
    # 2. product
    acc = tl.zeros([BLOCK_ROWS, BLOCK_FEATURES], tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        in_width = (column < width)[None, :]
        x_ptrs = x_ptr + row[:, None] * stride_xt + column[None, :]
        w_ptrs = w_ptr + feature[:, None] * stride_wf + column[None, :]
        x = tl.load(x_ptrs, mask=in_rows[:, None] & in_width, other=0.0)
        w = tl.load(w_ptrs, mask=in_features[:, None] & in_width, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    # 3. bias, and the only rounding
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature, mask=in_features, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + row[:, None] * num_features + feature[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_rows[:, None] & in_features[None, :])


@triton.jit
def _linear_codes(
    x_ptr,
    x_sf_ptr,
    w_ptr,
    w_sf_ptr,
    add_ptr,
    y_ptr,
    num_rows,
    num_features,
    width,
    stride_xt,
    stride_xst,
    stride_wf,
    stride_wsf,
    stride_at,
    HAS_ADD: tl.constexpr,
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
    # 1. which tile
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1).to(tl.int64) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    in_rows, in_features = row < num_rows, feature < num_features
    # 2. product
    acc = scaled_product(
        x_ptr,
        x_sf_ptr,
        w_ptr,
        w_sf_ptr,
        row,
        in_rows,
        feature,
        in_features,
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
    )
    # 3. what is added, and the only rounding
    mask = in_rows[:, None] & in_features[None, :]
    if HAS_ADD:
        add_ptrs = add_ptr + row[:, None] * stride_at + feature[None, :]
        acc += tl.load(add_ptrs, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + row[:, None] * num_features + feature[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def expert_of_tile(tile, row_ends_ptr, tile_ends_ptr, num_experts, EXPERTS_PAD: tl.constexpr):
    """The expert of a tile, the expert's first tile and its first row; num_experts for a tile beyond the last one."""
    expert = tl.arange(0, EXPERTS_PAD)
    ends = tl.load(tile_ends_ptr + expert, mask=expert < num_experts, other=2147483647)
    mine = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.maximum(mine - 1, 0)
    first_tile = tl.where(mine > 0, tl.load(tile_ends_ptr + before), 0)
    first_row = tl.where(mine > 0, tl.load(row_ends_ptr + before), 0)
    return mine, first_tile, first_row


@triton.jit
def _linear_grouped(
    x_ptr,
    x_sf_ptr,
    w_ptr,
    w_sf_ptr,
    row_ends_ptr,
    tile_ends_ptr,
    y_ptr,
    num_rows,
    num_features,
    width,
    num_experts,
    stride_xt,
    stride_xst,
    stride_we,
    stride_wf,
    stride_wse,
    stride_wsf,
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
    tile = tl.program_id(0)
    mine, first_tile, first_row = expert_of_tile(tile, row_ends_ptr, tile_ends_ptr, num_experts, EXPERTS_PAD)
    # tiles beyond the last expert own no rows: nothing is read, nothing is written
    if mine < num_experts:
        # 2. product
        offset = first_row + (tile - first_tile) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_rows = (offset < tl.load(row_ends_ptr + mine)) & (offset < num_rows)
        row = offset.to(tl.int64)
        feature = tl.program_id(1).to(tl.int64) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
        in_features = feature < num_features
        acc = scaled_product(
            x_ptr,
            x_sf_ptr,
            w_ptr + mine.to(tl.int64) * stride_we,
            w_sf_ptr + mine.to(tl.int64) * stride_wse,
            row,
            in_rows,
            feature,
            in_features,
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
        )
        # 3. the only rounding
        y_ptrs = y_ptr + row[:, None] * num_features + feature[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_rows[:, None] & in_features[None, :])


@triton.jit
def _linear_slots(
    x_ptr,
    x_sf_ptr,
    w_ptr,
    w_sf_ptr,
    expert_ptr,
    y_ptr,
    num_rows,
    num_features,
    width,
    stride_xt,
    stride_xst,
    stride_we,
    stride_wf,
    stride_wse,
    stride_wsf,
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
    # 1. which expert: the rows of a tile name one, or none
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    expert = tl.load(expert_ptr + row, mask=row < num_rows, other=-1)
    mine = tl.max(expert, 0)
    if mine >= 0:
        # 2. product
        in_rows = expert >= 0
        feature = tl.program_id(1).to(tl.int64) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
        in_features = feature < num_features
        acc = scaled_product(
            x_ptr,
            x_sf_ptr,
            w_ptr + mine.to(tl.int64) * stride_we,
            w_sf_ptr + mine.to(tl.int64) * stride_wse,
            row,
            in_rows,
            feature,
            in_features,
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
        )
        # 3. the only rounding; other rows keep what they hold
        y_ptrs = y_ptr + row[:, None] * num_features + feature[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_rows[:, None] & in_features[None, :])


@triton.jit
def _widen_fp4(
    w_ptr,
    w_sf_ptr,
    codes_ptr,
    sf_ptr,
    num_features,
    width,
    stride_wf,
    stride_wsf,
    FROM: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    ACROSS: tl.constexpr = GROUP // FROM
    WIDTH: tl.constexpr = BLOCKS * GROUP
    # 1. scale bytes of the output blocks: the largest input byte less 6, as 6 · 2^6 fits e4m3
    feature = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * (BLOCKS * ACROSS) + tl.arange(0, BLOCKS * ACROSS)
    in_features = (feature < num_features)[:, None]
    in_groups = (group < width // FROM)[None, :]
    byte_ptrs = w_sf_ptr + feature[:, None] * stride_wsf + group[None, :]
    byte = tl.load(byte_ptrs, mask=in_features & in_groups, other=0).to(tl.int32)
    by_block = tl.reshape(byte, [ROWS, BLOCKS, ACROSS])
    largest = tl.max(tl.max(by_block, axis=2), axis=0)
    sf = tl.maximum(largest - 6, 0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    num_blocks = (width + GROUP - 1) // GROUP
    tl.store(sf_ptr + tl.program_id(0).to(tl.int64) * num_blocks + block, sf.to(tl.uint8), mask=block < num_blocks)
    # 2. codes: e2m1 values times 2^-14 … 2^6, on the grid of e4m3
    shift = tl.maximum(by_block - sf[None, :, None], -14)
    factor = tl.reshape(((shift + 127) << 23).to(tl.float32, bitcast=True), [ROWS, BLOCKS * ACROSS])
    pair = tl.program_id(1) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    pair_ptrs = w_ptr + feature[:, None] * stride_wf + pair[None, :]
    packed = tl.load(pair_ptrs, mask=in_features & (pair < width // 2)[None, :], other=0).to(tl.int32)
    nibble = tl.reshape(tl.join(packed & 15, packed >> 4), [ROWS, BLOCKS * ACROSS, FROM])
    value = tl.reshape(e2m1_values(nibble).to(tl.float32) * factor[:, :, None], [ROWS, WIDTH])
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    code_ptrs = codes_ptr + feature[:, None] * width + column[None, :]
    tl.store(code_ptrs, value.to(tl.float8e4nv), mask=in_features & (column < width)[None, :])


def linear(
    x_tm: torch.Tensor,
    w_fm: torch.Tensor,
    bias_f: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    launch: LinearLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the product of floating operands.

    Raises:
        NotImplementedError: rows are not contiguous.
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_tm is on the CPU and kernels are not interpreted.
    """
    t, f = x_tm.shape[0], w_fm.shape[0]
    require_contiguous_rows(x_tm=x_tm, w_fm=w_fm)
    y_tf = output_buffer(out, (t, f), dtype, x_tm)
    if not y_tf.numel():
        return y_tf
    require_runnable("x_tm", x_tm)
    launch = launch or linear_launch(x_tm.dtype, arch_of(x_tm.device))
    _linear[(triton.cdiv(t, launch.block_rows), triton.cdiv(f, launch.block_features))](
        x_tm,
        w_fm,
        y_tf if bias_f is None else bias_f.contiguous(),
        y_tf,
        t,
        f,
        x_tm.shape[1],
        x_tm.stride(0),
        w_fm.stride(0),
        HAS_BIAS=bias_f is not None,
        BLOCK_ROWS=launch.block_rows,
        BLOCK_FEATURES=launch.block_features,
        BLOCK_WIDTH=launch.block_width,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return y_tf


def linear_codes(
    x_q: torch.Tensor,
    x_sf: torch.Tensor,
    w_q: torch.Tensor,
    w_sf: torch.Tensor,
    add_tf: torch.Tensor | None,
    *,
    x_group: int,
    w_block: tuple[int, int],
    dtype: torch.dtype,
    launch: LinearLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the product of bytes; `w_block` is rows × group of the weight's scales.

    Raises:
        NotImplementedError: rows are not contiguous, or a group is no power of two from 16 up.
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_q is on the CPU and kernels are not interpreted.
    """
    t, f = x_q.shape[0], w_q.shape[0]
    require_contiguous_rows(x_q=x_q, x_sf=x_sf, w_q=w_q, w_sf=w_sf)
    constants, launch = formats(x_sf, w_q, w_sf, x_group, w_block, arch_of(x_q.device), launch)
    y_tf = output_buffer(out, (t, f), dtype, x_q)
    add = y_tf if add_tf is None else add_tf
    require_contiguous_rows(add_tf=add)
    if not y_tf.numel():
        return y_tf
    require_runnable("x_q", x_q)
    _linear_codes[(triton.cdiv(t, launch.block_rows), triton.cdiv(f, launch.block_features))](
        x_q.view(torch.uint8),
        x_sf,
        w_q.view(torch.uint8),
        w_sf,
        add,
        y_tf,
        t,
        f,
        x_q.shape[1],
        x_q.stride(0),
        x_sf.stride(0),
        w_q.stride(0),
        w_sf.stride(0),
        add.stride(0),
        HAS_ADD=add_tf is not None,
        **constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return y_tf


def linear_grouped(
    x_q: torch.Tensor,
    x_sf: torch.Tensor,
    w_q: torch.Tensor,
    w_sf: torch.Tensor,
    group_sizes_e: torch.Tensor,
    *,
    x_group: int,
    w_block: tuple[int, int],
    dtype: torch.dtype,
    launch: LinearLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the product of every expert's rows; sizes beyond the rows are cut, missing ones leave rows unwritten.

    Raises:
        NotImplementedError: rows are not contiguous, or a group is no power of two from 16 up.
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_q is on the CPU and kernels are not interpreted.
    """
    (y, _), (e, f, _) = x_q.shape, w_q.shape
    require_contiguous_rows(x_q=x_q, x_sf=x_sf, w_q=w_q, w_sf=w_sf)
    constants, launch = formats(x_sf, w_q, w_sf, x_group, w_block, arch_of(x_q.device), launch)
    y_yf = output_buffer(out, (y, f), dtype, x_q)
    if not y_yf.numel():
        return y_yf
    require_runnable("x_q", x_q)
    row_ends, tile_ends, tiles = tiles_of_experts(group_sizes_e, y, launch.block_rows)
    _linear_grouped[(tiles, triton.cdiv(f, launch.block_features))](
        x_q.view(torch.uint8),
        x_sf,
        w_q.view(torch.uint8),
        w_sf,
        row_ends,
        tile_ends,
        y_yf,
        y,
        f,
        x_q.shape[1],
        e,
        x_q.stride(0),
        x_sf.stride(0),
        w_q.stride(0),
        w_q.stride(1),
        w_sf.stride(0),
        w_sf.stride(1),
        EXPERTS_PAD=triton.next_power_of_2(e),
        **constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return y_yf


def linear_slots(
    x_q: torch.Tensor,
    x_sf: torch.Tensor,
    w_q: torch.Tensor,
    w_sf: torch.Tensor,
    expert_y: torch.Tensor,
    before_yf: torch.Tensor,
    *,
    x_group: int,
    w_block: tuple[int, int],
    launch: LinearLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the product of every row that names an expert; the others come from `before_yf`.

    Raises:
        NotImplementedError: rows are not contiguous, or a group is no power of two from 16 up.
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_q is on the CPU and kernels are not interpreted.
    """
    (y, _), (_, f, _) = x_q.shape, w_q.shape
    require_contiguous_rows(x_q=x_q, x_sf=x_sf, w_q=w_q, w_sf=w_sf)
    constants, launch = formats(x_sf, w_q, w_sf, x_group, w_block, arch_of(x_q.device), launch)
    if out is None:
        y_yf = before_yf.clone(memory_format=torch.contiguous_format)
    else:
        y_yf = output_buffer(out, (y, f), before_yf.dtype, x_q).copy_(before_yf)
    if not y_yf.numel():
        return y_yf
    require_runnable("x_q", x_q)
    _linear_slots[(triton.cdiv(y, launch.block_rows), triton.cdiv(f, launch.block_features))](
        x_q.view(torch.uint8),
        x_sf,
        w_q.view(torch.uint8),
        w_sf,
        expert_y.contiguous(),
        y_yf,
        y,
        f,
        x_q.shape[1],
        x_q.stride(0),
        x_sf.stride(0),
        w_q.stride(0),
        w_q.stride(1),
        w_sf.stride(0),
        w_sf.stride(1),
        **constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return y_yf


def tiles_of_experts(
    group_sizes_e: torch.Tensor, num_rows: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ends of the experts in rows and in tiles, and as many tiles as any sizes can need."""
    sizes = group_sizes_e.to(torch.int32)
    row_ends = torch.cumsum(sizes, 0, dtype=torch.int32)
    tile_ends = torch.cumsum((sizes + block_rows - 1) // block_rows, 0, dtype=torch.int32)
    # a whole number each, and one more for each expert that has rows
    return row_ends, tile_ends, num_rows // block_rows + min(len(sizes), num_rows)


def widen_fp4(
    w_q: torch.Tensor,
    w_sf: torch.Tensor,
    *,
    group: int,
    out_block: tuple[int, int],
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the widening of e2m1 rows in groups of `group` to e4m3 blocks of rows × columns.

    Raises:
        NotImplementedError: rows are not contiguous, or a block is no power of two.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: w_q is on the CPU and kernels are not interpreted.
    """
    rows, columns = out_block
    require_groups(w_sf=group, rows=rows, columns=columns)
    require_contiguous_rows(w_q=w_q, w_sf=w_sf)
    f, m = w_q.shape[0], 2 * w_q.shape[1]
    codes_out, sf_out = out or (None, None)
    codes = output_buffer(codes_out, (f, m), torch.float8_e4m3fn, w_q)
    sf = output_buffer(sf_out, (triton.cdiv(f, rows), triton.cdiv(m, columns)), torch.uint8, w_q)
    if not codes.numel():
        return codes, sf
    require_runnable("w_q", w_q)
    launch = WidenLaunch(blocks=max(1, 128 // columns))
    _widen_fp4[(sf.shape[0], triton.cdiv(sf.shape[1], launch.blocks))](
        w_q,
        w_sf,
        codes,
        sf,
        f,
        m,
        w_q.stride(0),
        w_sf.stride(0),
        FROM=group,
        ROWS=rows,
        GROUP=columns,
        BLOCKS=launch.blocks,
        num_warps=launch.num_warps,
    )
    return codes, sf


def require_contiguous_rows(**operands: torch.Tensor) -> None:
    """Refuse operands whose last axis is strided."""
    for name, x in operands.items():
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise NotImplementedError(f"{name}: expected contiguous rows, got strides {x.stride()}")


def require_groups(**sizes: int) -> None:
    """Refuse groups that no tile holds exactly."""
    for name, size in sizes.items():
        if size & (size - 1) or size < 16:
            raise NotImplementedError(f"{name}: expected groups of a power of two from 16 up, got {size}")


def formats(
    x_sf: torch.Tensor,
    w_q: torch.Tensor,
    w_sf: torch.Tensor,
    x_group: int,
    w_block: tuple[int, int],
    arch: str,
    launch: LinearLaunch | None,
) -> tuple[dict[str, object], LinearLaunch]:
    """The constants of a kernel for these formats, and its launch."""
    require_groups(x_sf=x_group, w_sf=w_block[1])
    x_folded, w_folded = (sf.dtype == torch.uint8 for sf in (x_sf, w_sf))
    unfolded = {group for folded, group in ((x_folded, x_group), (w_folded, w_block[1])) if not folded}
    if len(unfolded) > 1:
        raise NotImplementedError(f"x_sf, w_sf: expected fp32 scales of one group length, got {sorted(unfolded)}")
    launch = launch or codes_launch(max(unfolded, default=0), arch)
    constants: dict[str, object] = {
        "X_GROUP": x_group,
        "X_FOLDED": x_folded,
        "W_ROWS": w_block[0],
        "W_GROUP": w_block[1],
        "W_FOLDED": w_folded,
        "W_PACKED": w_q.dtype == torch.uint8,
        "BLOCK_ROWS": launch.block_rows,
        "BLOCK_FEATURES": launch.block_features,
        "BLOCK_WIDTH": launch.block_width,
        "BITS": launch.bits,
    }
    return constants, launch
