"""SwiGLU of rows that hold gate and up, alone and fused with an e4m3 group quantiser. Nothing is summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import SCALE_DTYPES, e4m3_codes, output_buffer, quant_launch, require_format, store_scale

LOG2_E = tl.constexpr(1.44269502162933349609375)  # rounded to fp32
LOG2_E_REST = tl.constexpr(1.92596299112661746887e-8)
LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, kw_only=True)
class SwigluLaunch:
    """Elements of a row that a program takes. It changes no result."""

    block: int = 1024
    num_warps: int = 4


@triton.jit
def gated(gate, up, weight, limit, HAS_LIMIT: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """silu(gate) · up · weight in fp32, in that order."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, limit * -1.0), limit)
    # exp(-gate) = 2^power · 2^rest: the rest of the rounded product would cost 2^-18 of the result at -88
    negative = gate * -1.0
    power = negative * LOG2_E
    rest = tl.fma(negative, tl.full(negative.shape, LOG2_E, tl.float32), power * -1.0) + negative * LOG2_E_REST
    # far below one, until gates are so large that their power decides alone; NaN of infinite ones
    rest = tl.maximum(rest, -1.0)
    value = gate / (1.0 + tl.exp2(power) * (1.0 + rest * LN_2)) * up  # the quotient within two ulps
    if HAS_WEIGHT:
        value = value * weight
    return value


@triton.jit
def _swiglu(
    h_ptr,
    weight_ptr,
    y_ptr,
    half,
    stride_ht,
    stride_wt,
    limit,
    HAS_LIMIT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < half
    gate = tl.load(h_ptr + row * stride_ht + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * stride_ht + half + column, mask=mask, other=0.0).to(tl.float32)
    weight = 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + row * stride_wt).to(tl.float32)
    value = gated(gate, up, weight, limit, HAS_LIMIT, HAS_WEIGHT)
    tl.store(y_ptr + row * half + column, value.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_quant(
    h_ptr,
    weight_ptr,
    codes_ptr,
    sf_ptr,
    num_rows,
    stride_ht,
    stride_wt,
    limit,
    floor,
    HAS_LIMIT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    # 1. a group to a line
    line, item = tl.arange(0, TILE_ROWS * TILE_GROUPS), tl.arange(0, GROUP)
    tiles: tl.constexpr = ROW_GROUPS // TILE_GROUPS
    row = (tl.program_id(0) // tiles).to(tl.int64) * TILE_ROWS + line // TILE_GROUPS
    in_row = (tl.program_id(0) % tiles) * TILE_GROUPS + line % TILE_GROUPS
    group = row * ROW_GROUPS + in_row
    in_range = row < num_rows
    mask = in_range[:, None]
    h_ptrs = h_ptr + (row * stride_ht + in_row * GROUP)[:, None] + item[None, :]
    gate = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h_ptrs + ROW_GROUPS * GROUP, mask=mask, other=0.0).to(tl.float32)
    weight = 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + row * stride_wt, mask=in_range, other=0.0).to(tl.float32)[:, None]
    value = gated(gate, up, weight, limit, HAS_LIMIT, HAS_WEIGHT)
    # 2. scales and codes of the unrounded value, which is off by more than a product with an inverse is
    scale = store_scale(tl.max(tl.abs(value), axis=1), floor, sf_ptr + group, in_range, 448.0, SCALE)
    code_ptrs = codes_ptr + (group * GROUP)[:, None] + item[None, :]
    tl.store(code_ptrs, e4m3_codes(value, scale[:, None], SCALE, EXACT=False), mask=mask)


def swiglu(
    h_ti: torch.Tensor,
    weight_t: torch.Tensor | None,
    *,
    limit: float | None,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch SwiGLU alone.

    Raises:
        NotImplementedError: rows are not contiguous.
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: h_ti is on the CPU and kernels are not interpreted.
    """
    _require_rows(h_ti)
    t, half = h_ti.shape[0], h_ti.shape[1] // 2
    y_tf = output_buffer(out, (t, half), dtype, h_ti)
    if not y_tf.numel():
        return y_tf
    require_runnable("h_ti", h_ti)
    launch = SwigluLaunch()
    _swiglu[(t, triton.cdiv(half, launch.block))](
        h_ti,
        h_ti if weight_t is None else weight_t,
        y_tf,
        half,
        h_ti.stride(0),
        0 if weight_t is None else weight_t.stride(0),
        0.0 if limit is None else limit,
        HAS_LIMIT=limit is not None,
        HAS_WEIGHT=weight_t is not None,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return y_tf


def swiglu_quant(
    h_ti: torch.Tensor,
    weight_t: torch.Tensor | None,
    *,
    limit: float | None,
    group: int,
    scale: str,
    amax_floor: float,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch SwiGLU and the quantiser in one kernel.

    Raises:
        NotImplementedError: rows are not contiguous, group is no power of two, or the floor of fp32 scales is below
            2^-80.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: h_ti is on the CPU and kernels are not interpreted.
    """
    require_format(1, group, scale, amax_floor)
    _require_rows(h_ti)
    t, half = h_ti.shape[0], h_ti.shape[1] // 2
    codes_out, sf_out = out or (None, None)
    codes = output_buffer(codes_out, (t, half), torch.float8_e4m3fn, h_ti)
    sf = output_buffer(sf_out, (t, half // group), SCALE_DTYPES[scale], h_ti)
    if not codes.numel():
        return codes, sf
    require_runnable("h_ti", h_ti)
    groups_per_row = half // group
    launch = quant_launch(group, groups_per_row, num_warps=1)
    _swiglu_quant[(triton.cdiv(t, launch.rows) * (groups_per_row // launch.groups),)](
        h_ti,
        h_ti if weight_t is None else weight_t,
        codes,
        sf,
        t,
        h_ti.stride(0),
        0 if weight_t is None else weight_t.stride(0),
        0.0 if limit is None else limit,
        amax_floor,
        HAS_LIMIT=limit is not None,
        HAS_WEIGHT=weight_t is not None,
        GROUP=group,
        ROW_GROUPS=groups_per_row,
        TILE_ROWS=launch.rows,
        TILE_GROUPS=launch.groups,
        SCALE=scale,
        num_warps=launch.num_warps,
    )
    return codes, sf


def _require_rows(h_ti: torch.Tensor) -> None:
    if h_ti.stride(-1) != 1:
        raise NotImplementedError(f"h_ti: expected contiguous rows, got strides {h_ti.stride()}")
