"""The grouped low-rank output of CSA2, CSA and HCA: each group of heads meets its own block of wo_a.

Rows are bf16, or e4m3 codes with a UE8M0 scale for 32 or 128 channels; weights are bf16, or e4m3 codes with a UE8M0
scale for a square tile of as many. All of them are exact in bf16, where the products are taken; sums are fp32 in
ascending order of channels.
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
class GroupedLaunch:
    """`channels` fixes the order of summation; tiles of rows and outputs do not depend on how many there are."""

    rows: int = 64
    outputs: int = 64
    channels: int = 64
    num_warps: int = 4
    num_stages: int = 3
    e4m3_bits: bool = False


def grouped_launch(arch: str) -> GroupedLaunch:
    """The launch for an architecture."""
    if arch == "ascend950":
        return GroupedLaunch(rows=32, outputs=32, num_stages=1, e4m3_bits=True)
    return GroupedLaunch()


@triton.jit
def _grouped_output(
    u_ptr,
    u_sf_ptr,
    w_ptr,
    w_sf_ptr,
    z_ptr,
    num_rows,
    group_rank,
    group_width,
    stride_ut,
    QUANTIZED: tl.constexpr,
    WEIGHT_TILE: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. which rows, outputs and group
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    group = tl.program_id(2).to(tl.int64)
    in_rows, in_outputs = row < num_rows, output < group_rank
    w_row = group * group_rank + output
    width = tl.num_programs(2).to(tl.int64) * group_width

    # 2. sum over the channels of the group
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, group_width, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        in_group = channel < group_width
        u_mask = in_rows[:, None] & in_group[None, :]
        column = group * group_width + channel
        if QUANTIZED:
            code = tl.load(u_ptr + row[:, None] * stride_ut + column[None, :], mask=u_mask, other=0)
            u_sf_at = u_sf_ptr + row[:, None] * (width // ROW_GROUP) + (column // ROW_GROUP)[None, :]
            sf = tl.load(u_sf_at, mask=u_mask, other=0)
            u = (e4m3_value(code, BITS) * ue8m0_value(sf)).to(tl.bfloat16)
        else:
            u = tl.load(u_ptr + row[:, None] * stride_ut + column[None, :], mask=u_mask, other=0.0)
        w_mask = in_outputs[:, None] & in_group[None, :]
        w_at = w_ptr + w_row[:, None] * group_width + channel[None, :]
        if WEIGHT_TILE:
            code = tl.load(w_at, mask=w_mask, other=0)
            w_sf_row = (w_row // WEIGHT_TILE)[:, None] * tl.cdiv(group_width, WEIGHT_TILE)
            sf = tl.load(w_sf_ptr + w_sf_row + (channel // WEIGHT_TILE)[None, :], mask=w_mask, other=0)
            w = (e4m3_value(code, BITS) * ue8m0_value(sf)).to(tl.bfloat16)
        else:
            w = tl.load(w_at, mask=w_mask, other=0.0)
        acc = tl.dot(u, tl.trans(w), acc)

    # 3. store
    z_at = z_ptr + row[:, None] * (tl.num_programs(2) * group_rank) + w_row[None, :]
    tl.store(z_at, acc.to(z_ptr.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


def grouped_output(
    u_tk: torch.Tensor,
    u_sf: torch.Tensor | None,
    w_q: torch.Tensor,
    w_sf: torch.Tensor | None,
    *,
    groups: int,
    dtype: torch.dtype,
    weight_tile: int = 32,
    row_group: int = 32,
    launch: GroupedLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """z [t, groups * rank] of rows u_tk and weights, each bf16 or e4m3 codes with their scales.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
    """
    t, rank = len(u_tk), w_q.shape[0] // groups
    z_tf = output_buffer(out, (t, w_q.shape[0]), dtype, u_tk)
    require_runnable("u_tk", u_tk)
    if not t:
        return z_tf
    launch = launch or grouped_launch(arch_of(u_tk.device))
    _grouped_output[(triton.cdiv(t, launch.rows), triton.cdiv(rank, launch.outputs), groups)](
        u_tk if u_sf is None else u_tk.view(torch.uint8),
        u_tk if u_sf is None else u_sf,
        w_q if w_sf is None else w_q.view(torch.uint8),
        w_q if w_sf is None else w_sf,
        z_tf,
        t,
        rank,
        w_q.shape[1],
        u_tk.stride(0),
        QUANTIZED=u_sf is not None,
        WEIGHT_TILE=0 if w_sf is None else weight_tile,
        ROW_GROUP=row_group,
        ROWS=launch.rows,
        OUTPUTS=launch.outputs,
        CHANNELS=launch.channels,
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return z_tf
