"""Products of quantised bytes by the block-scaled matrix instruction of SM100: codes and scale bytes go in as they are.

A program owns one tile of rows and features and walks the whole width, as in `linear.py`; targets without the
instruction run that file's kernels instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .linear import require_contiguous_rows
from .quant import output_buffer


@dataclass(frozen=True, kw_only=True)
class NativeLaunch:
    """Tile of one program: the instruction takes 128 rows, and four scales of 32 elements at a time."""

    block_rows: int = 128
    block_features: int = 128
    block_width: int = 128
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def _linear_codes_native(
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
    W_ROWS: tl.constexpr,
    W_GROUP: tl.constexpr,
    W_PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    W_PER_BYTE: tl.constexpr = 2 if W_PACKED else 1
    W_KIND: tl.constexpr = "e2m1" if W_PACKED else "e4m3"
    # 1. which tile
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1).to(tl.int64) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    in_rows, in_features = row < num_rows, feature < num_features
    # 2. product; the width is a multiple of the step
    acc = tl.zeros([BLOCK_ROWS, BLOCK_FEATURES], tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        x = tl.load(x_ptr + row[:, None] * stride_xt + column[None, :], mask=in_rows[:, None], other=0)
        byte_at = start // W_PER_BYTE + tl.arange(0, BLOCK_WIDTH // W_PER_BYTE)
        w = tl.load(w_ptr + feature[:, None] * stride_wf + byte_at[None, :], mask=in_features[:, None], other=0)
        # one scale for each 32 elements, whatever the blocks are
        group_start = start + tl.arange(0, BLOCK_WIDTH // 32) * 32
        x_sf_ptrs = x_sf_ptr + row[:, None] * stride_xst + (group_start // X_GROUP)[None, :]
        x_sf = tl.load(x_sf_ptrs, mask=in_rows[:, None], other=0)
        w_sf_ptrs = w_sf_ptr + (feature // W_ROWS)[:, None] * stride_wsf + (group_start // W_GROUP)[None, :]
        w_sf = tl.load(w_sf_ptrs, mask=in_features[:, None], other=0)
        acc = tl.dot_scaled(x, x_sf, "e4m3", tl.trans(w), w_sf, W_KIND, acc)
    # 3. what is added, and the only rounding
    mask = in_rows[:, None] & in_features[None, :]
    if HAS_ADD:
        add_ptrs = add_ptr + row[:, None] * stride_at + feature[None, :]
        acc += tl.load(add_ptrs, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + row[:, None] * num_features + feature[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


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
    launch: NativeLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the product of bytes.

    Raises:
        NotImplementedError: a scale is not UE8M0 or its group no multiple of 32, the width is no multiple of 128, or
            rows are not contiguous.
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_q is on the CPU and kernels are not interpreted.
    """
    launch = launch or NativeLaunch()
    (t, m), f = x_q.shape, w_q.shape[0]
    for name, sf, group in (("x_sf", x_sf, x_group), ("w_sf", w_sf, w_block[1])):
        if sf.dtype != torch.uint8 or group % 32:
            raise NotImplementedError(f"{name}: expected UE8M0 scales of groups of 32·n, got {sf.dtype}, {group}")
    if m % launch.block_width:
        raise NotImplementedError(f"x_q: expected rows of a multiple of {launch.block_width}, got {m}")
    require_contiguous_rows(x_q=x_q, x_sf=x_sf, w_q=w_q, w_sf=w_sf)
    y_tf = output_buffer(out, (t, f), dtype, x_q)
    if not y_tf.numel():
        return y_tf
    require_runnable("x_q", x_q)
    add = y_tf if add_tf is None else add_tf
    require_contiguous_rows(add_tf=add)
    _linear_codes_native[(triton.cdiv(t, launch.block_rows), triton.cdiv(f, launch.block_features))](
        x_q.view(torch.uint8),
        x_sf,
        w_q.view(torch.uint8),
        w_sf,
        add,
        y_tf,
        t,
        f,
        m,
        x_q.stride(0),
        x_sf.stride(0),
        w_q.stride(0),
        w_sf.stride(0),
        add.stride(0),
        HAS_ADD=add_tf is not None,
        X_GROUP=x_group,
        W_ROWS=w_block[0],
        W_GROUP=w_block[1],
        W_PACKED=w_q.dtype == torch.uint8,
        BLOCK_ROWS=launch.block_rows,
        BLOCK_FEATURES=launch.block_features,
        BLOCK_WIDTH=launch.block_width,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return y_tf
