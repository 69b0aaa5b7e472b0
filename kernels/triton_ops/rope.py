"""Rotary embedding: the rotation of heads by table rows, and the table itself. Elementwise, so no summation order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class RopeLaunch:
    """Heads a program takes, and whether it reads pairs side by side as one run; neither changes a result."""

    heads: int
    one_run: bool
    num_warps: int = 4


def rope_launch(num_heads: int, rotary_dim: int, arch: str) -> RopeLaunch:
    """About 1024 pairs a program, whatever the number of tokens; the Ascend chain cannot part a run into pairs."""
    pairs = triton.next_power_of_2(rotary_dim // 2)
    heads = min(triton.next_power_of_2(num_heads), max(1, 1024 // pairs))
    return RopeLaunch(heads=heads, one_run=arch != "ascend950")


@triton.jit
def difference_of_products(a, b, c, d):
    """a * b - c * d for bf16 or fp16 values a, c and fp32 b, d: right to 2 ulp of fp32 even where it cancels.

    b and d are cut into 12 high and 12 low bits, so every product is exact.
    """
    b_high = (b.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    d_high = (d.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    return (a * b_high - c * d_high) + (a * (b - b_high) - c * (d - d_high))


@triton.jit
def _rope(
    x_ptr,
    table_ptr,
    positions_ptr,
    y_ptr,
    num_heads,
    head_dim,
    num_positions,
    start,
    rest_start,
    stride_xt,
    stride_xh,
    stride_xd,
    stride_ts,
    stride_tr,
    stride_p,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ONE_RUN: tl.constexpr,
    INVERSE: tl.constexpr,
):
    # 1. the table row of the token; a position outside the table gives NaN instead of a stray read
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    position = tl.load(positions_ptr + token * stride_p).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF).to(tl.int64)[None, :]
    known = (pair < HALF) & (position >= 0) & (position < num_positions)
    row_ptr = table_ptr + position * stride_ts
    cos = tl.load(row_ptr + pair * stride_tr, mask=known, other=float("nan"))
    sin = tl.load(row_ptr + (pair + HALF) * stride_tr, mask=known, other=float("nan"))
    if INVERSE:
        sin = sin * -1.0  # as exact as a negation, which the Ascend thread path does not know
    # 2. the rotated slice
    x_ptrs = x_ptr + token * stride_xt + head * stride_xh
    y_ptrs = y_ptr + (token * num_heads + head) * head_dim
    if INTERLEAVED and ONE_RUN:
        item = tl.arange(0, 2 * BLOCK_HALF).to(tl.int64)[None, :]
        mask = (head < num_heads) & (item < 2 * HALF)
        both = tl.load(x_ptrs + (start + item) * stride_xd, mask=mask, other=0.0).to(tl.float32)
        u, v = tl.split(tl.reshape(both, [BLOCK_HEADS, BLOCK_HALF, 2]))
        turned = tl.join(
            difference_of_products(u, cos, v, sin).to(y_ptr.dtype.element_ty),
            difference_of_products(u, sin, v * -1.0, cos).to(y_ptr.dtype.element_ty),
        )
        tl.store(y_ptrs + start + item, tl.reshape(turned, [BLOCK_HEADS, 2 * BLOCK_HALF]), mask=mask)
    else:
        if INTERLEAVED:
            first, second = start + 2 * pair, start + 2 * pair + 1
        else:
            first, second = start + pair, start + pair + HALF
        mask = (head < num_heads) & (pair < HALF)
        u = tl.load(x_ptrs + first * stride_xd, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x_ptrs + second * stride_xd, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptrs + first, difference_of_products(u, cos, v, sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptrs + second, difference_of_products(u, sin, v * -1.0, cos).to(y_ptr.dtype.element_ty), mask=mask)
    # 3. the other channels, all on one side of the slice
    rest = head_dim - 2 * HALF
    for offset in range(0, rest, BLOCK_REST):
        index = offset + tl.arange(0, BLOCK_REST).to(tl.int64)[None, :]
        rest_mask = (head < num_heads) & (index < rest)
        x = tl.load(x_ptrs + (rest_start + index) * stride_xd, mask=rest_mask, other=0.0)
        tl.store(y_ptrs + rest_start + index, x.to(y_ptr.dtype.element_ty), mask=rest_mask)


@triton.jit
def _rope_table(
    positions_ptr,
    freq_ptr,
    table_ptr,
    stride_p,
    stride_f,
    magnitude,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF).to(tl.int64)
    mask = pair < HALF
    freq = tl.load(freq_ptr + pair * stride_f, mask=mask, other=0.0)
    # the fp32 angle is part of the model; cos and sin of it are as exact as fp32 can hold
    angle = (tl.load(positions_ptr + row * stride_p).to(tl.float32) * freq).to(tl.float64)
    tl.store(table_ptr + row * (2 * HALF) + pair, tl.cos(angle).to(tl.float32) * magnitude, mask=mask)
    tl.store(table_ptr + row * (2 * HALF) + HALF + pair, tl.sin(angle).to(tl.float32) * magnitude, mask=mask)


def rope(
    x_thd: torch.Tensor,
    table_sr: torch.Tensor,
    positions_t: torch.Tensor,
    *,
    interleaved: bool,
    first: bool,
    inverse: bool,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x_thd` with its first or last channels rotated. A position that is no row of the table gives NaN.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_thd is on the CPU and kernels are not interpreted.
    """
    y_thd = output_buffer(out, tuple(x_thd.shape), dtype, x_thd)
    if not x_thd.numel():
        return y_thd
    require_runnable("x_thd", x_thd)
    t, h, d = x_thd.shape
    s, r = table_sr.shape
    launch = rope_launch(h, r, arch_of(x_thd.device))
    _rope[(t, triton.cdiv(h, launch.heads))](
        x_thd,
        table_sr,
        positions_t,
        y_thd,
        h,
        d,
        s,
        0 if first else d - r,
        r if first else 0,
        *x_thd.stride(),
        *table_sr.stride(),
        positions_t.stride(0),
        HALF=r // 2,
        BLOCK_HALF=triton.next_power_of_2(r // 2),
        BLOCK_REST=128,
        BLOCK_HEADS=launch.heads,
        INTERLEAVED=interleaved,
        ONE_RUN=launch.one_run,
        INVERSE=inverse,
        num_warps=launch.num_warps,
        # fp32 rows: their products are not exact, so contraction, which the compiler chooses anew for every
        # specialisation of the strides, would make a row depend on its batch
        enable_fp_fusion=False,
    )
    return y_thd


def rope_table(
    positions_s: torch.Tensor, freq_i: torch.Tensor, *, magnitude: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Cosines, then sines, of every position, float32 [s, r]. Needs a device with fp64.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: positions_s are on the CPU and kernels are not interpreted.
    """
    half = freq_i.shape[0]
    table_sr = output_buffer(out, (positions_s.shape[0], 2 * half), torch.float32, positions_s)
    if not table_sr.numel():
        return table_sr
    require_runnable("positions_s", positions_s)
    _rope_table[(positions_s.shape[0],)](
        positions_s,
        freq_i,
        table_sr,
        positions_s.stride(0),
        freq_i.stride(0),
        magnitude,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=1,
    )
    return table_sr
