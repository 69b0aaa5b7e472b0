"""The Hadamard transform of rows by butterflies in a fixed order: the same bits on every target and in every batch.

A stage takes neighbours 2j and 2j + 1 to places j and j + d / 2. The index bits turn by one place a stage, so the next
neighbours are what stood twice as far apart at first, and after the last stage every value is in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class HadamardLaunch:
    """Rows a program takes; it changes no result."""

    rows: int
    num_warps: int = 4


def hadamard_launch(width: int, arch: str) -> HadamardLaunch:
    """About 4096 values a program; the shuffles of a stage need room in the unified buffer of an Ascend."""
    values = 512 if arch == "ascend950" else 4096
    return HadamardLaunch(rows=max(1, min(64, values // width)))


@triton.jit
def butterflies(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """The unnormalised transform of fp32 rows [ROWS, WIDTH], WIDTH = 2 to the STAGES."""
    for _ in tl.static_range(STAGES):
        even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
        halves = tl.permute(tl.join(even + odd, even - odd), (0, 2, 1))
        x = tl.reshape(halves, [ROWS, WIDTH])
    return x


@triton.jit
def _hadamard(
    x_ptr,
    y_ptr,
    num_rows,
    stride_xt,
    stride_xd,
    factor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    # 1. rows, in fp32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = (row < num_rows)[:, None]
    channel = tl.arange(0, WIDTH)
    x_at = x_ptr + row[:, None] * stride_xt + channel.to(tl.int64)[None, :] * stride_xd
    x = tl.load(x_at, mask=in_range, other=0.0).to(tl.float32)
    # 2. butterflies, the factor, one rounding
    y = butterflies(x, ROWS, WIDTH, STAGES) * factor
    tl.store(y_ptr + row[:, None] * WIDTH + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=in_range)


def hadamard(x_td: torch.Tensor, *, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """The normalised transform of rows.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_td is on the CPU and kernels are not interpreted.
    """
    t, d = x_td.shape
    y_td = output_buffer(out, (t, d), dtype, x_td)
    if not t:
        return y_td
    require_runnable("x_td", x_td)
    launch = hadamard_launch(d, arch_of(x_td.device))
    _hadamard[(triton.cdiv(t, launch.rows),)](
        x_td,
        y_td,
        t,
        *x_td.stride(),
        d**-0.5,
        ROWS=launch.rows,
        WIDTH=d,
        STAGES=d.bit_length() - 1,
        num_warps=launch.num_warps,
    )
    return y_td
