"""RMSNorm, alone and fused with an e4m3 group quantiser: one program a row.

Both kernels take the statistics with the same helper, block and warps, so the fused one stores the very bytes that a
norm followed by a quantiser would. The order of summation depends on the width of the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import SCALE_DTYPES, e4m3_codes, output_buffer, require_format, store_scale


@dataclass(frozen=True, kw_only=True)
class NormLaunch:
    """Elements of a row that are added side by side: fixes the order of summation."""

    block: int
    num_warps: int


def norm_launch(width: int) -> NormLaunch:
    """One block for rows up to 2048, several in ascending order beyond; about 8 elements a thread."""
    block = min(max(triton.next_power_of_2(width), 32), 2048)
    return NormLaunch(block=block, num_warps=max(1, block // 256))


@triton.jit
def _appended(blocks, block):
    return blocks + (block,)


@triton.jit
def _blocks(x_ptr, stride_xm, width, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The row in registers, all loads under way at once."""
    blocks = ()
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        block = tl.load(x_ptr + column.to(tl.int64) * stride_xm, mask=column < width, other=0.0)
        blocks = _appended(blocks, block)
    return blocks


@triton.jit
def _inverse_rms(blocks, count, eps, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        x = blocks[i].to(tl.float32)
        squares += x * x
    # within two ulps on every device, unlike an approximate rsqrt; the Ascend chain has no tl.div_rn of scalars
    return 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / count + eps)


@triton.jit
def _scaled(x, rstd, weight, STORED: tl.constexpr, BEFORE_WEIGHT: tl.constexpr):
    unit = x * rstd
    if BEFORE_WEIGHT:
        unit = unit.to(STORED).to(tl.float32)
    return (unit * weight).to(STORED)


@triton.jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    y_ptr,
    width,
    count,
    stride_xt,
    stride_xm,
    stride_wm,
    eps,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
):
    # 1. statistics
    row = tl.program_id(0).to(tl.int64)
    blocks = _blocks(x_ptr + row * stride_xt, stride_xm, width, BLOCK, BLOCKS)
    rstd = _inverse_rms(blocks, count, eps, BLOCK, BLOCKS)
    # 2. elements
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        weight = tl.load(weight_ptr + column * stride_wm, mask=mask, other=0.0).to(tl.float32)
        y = _scaled(blocks[i].to(tl.float32), rstd, weight, y_ptr.dtype.element_ty, BEFORE_WEIGHT)
        tl.store(y_ptr + row * width + column, y, mask=mask)


@triton.jit
def _rms_norm_quant(
    x_ptr,
    weight_ptr,
    y_ptr,
    codes_ptr,
    sf_ptr,
    width,
    count,
    stride_xt,
    stride_xm,
    stride_wm,
    eps,
    floor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
):
    # 1. statistics
    row = tl.program_id(0).to(tl.int64)
    blocks = _blocks(x_ptr + row * stride_xt, stride_xm, width, BLOCK, BLOCKS)
    rstd = _inverse_rms(blocks, count, eps, BLOCK, BLOCKS)
    num_groups = width // GROUP
    BLOCK_GROUPS: tl.constexpr = BLOCK // GROUP
    for i in tl.static_range(BLOCKS):
        # 2. elements
        column = i * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        weight = tl.load(weight_ptr + column * stride_wm, mask=mask, other=0.0).to(tl.float32)
        y = _scaled(blocks[i].to(tl.float32), rstd, weight, y_ptr.dtype.element_ty, BEFORE_WEIGHT)
        tl.store(y_ptr + row * width + column, y, mask=mask)
        # 3. codes of the rounded elements, a group to a line
        rounded = tl.reshape(y, [BLOCK_GROUPS, GROUP])
        group = i * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        sf_ptrs = sf_ptr + row * num_groups + group
        scale = store_scale(
            tl.max(tl.abs(rounded.to(tl.float32)), axis=1), floor, sf_ptrs, group < num_groups, 448.0, SCALE
        )
        codes = tl.reshape(e4m3_codes(rounded, scale[:, None], SCALE), [BLOCK])
        tl.store(codes_ptr + row * width + column, codes, mask=mask)


def rms_norm(
    x_tm: torch.Tensor,
    weight_m: torch.Tensor,
    *,
    eps: float,
    before_weight: bool,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalised rows in `dtype`; with `before_weight` they are rounded before the weight too.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_tm is on the CPU and kernels are not interpreted.
    """
    y_tm = output_buffer(out, tuple(x_tm.shape), dtype, x_tm)
    if not x_tm.numel():
        return y_tm
    require_runnable("x_tm", x_tm)
    t, m = x_tm.shape
    launch = norm_launch(m)
    strides = (x_tm.stride(0), x_tm.stride(1), weight_m.stride(0))
    _rms_norm[(t,)](
        x_tm,
        weight_m,
        y_tm,
        m,
        float(m),
        *strides,
        eps,
        BLOCK=launch.block,
        BLOCKS=triton.cdiv(m, launch.block),
        BEFORE_WEIGHT=before_weight,
        num_warps=launch.num_warps,
    )
    return y_tm


def rms_norm_quant(
    x_tm: torch.Tensor,
    weight_m: torch.Tensor,
    *,
    eps: float,
    before_weight: bool,
    group: int,
    scale: str,
    amax_floor: float,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised rows in bf16, their e4m3 codes and the scales of groups of `group`.

    Raises:
        NotImplementedError: group is no power of two, or the floor of fp32 scales is below 2^-80.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: x_tm is on the CPU and kernels are not interpreted.
    """
    require_format(1, group, scale, amax_floor)
    t, m = x_tm.shape
    y_out, codes_out, sf_out = out or (None, None, None)
    y_tm = output_buffer(y_out, (t, m), torch.bfloat16, x_tm)
    codes = output_buffer(codes_out, (t, m), torch.float8_e4m3fn, x_tm)
    sf = output_buffer(sf_out, (t, m // group), SCALE_DTYPES[scale], x_tm)
    if not x_tm.numel():
        return y_tm, codes, sf
    require_runnable("x_tm", x_tm)
    launch = norm_launch(m)
    _rms_norm_quant[(t,)](
        x_tm,
        weight_m,
        y_tm,
        codes,
        sf,
        m,
        float(m),
        x_tm.stride(0),
        x_tm.stride(1),
        weight_m.stride(0),
        eps,
        amax_floor,
        BLOCK=launch.block,
        BLOCKS=triton.cdiv(m, launch.block),
        GROUP=group,
        BEFORE_WEIGHT=before_weight,
        SCALE=scale,
        num_warps=launch.num_warps,
    )
    return y_tm, codes, sf
