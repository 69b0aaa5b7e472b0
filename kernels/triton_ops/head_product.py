"""A product of its own for every head: absorbed queries (W_UK) and values from mixed latents (W_UV)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class HeadLaunch:
    """Tokens and columns of a program; `step` fixes the order of summation."""

    rows: int
    columns: int
    step: int
    num_warps: int = 4


def head_launch(arch: str) -> HeadLaunch:
    """The launch for an architecture, whatever the number of tokens."""
    return HeadLaunch(rows=64, columns=64 if arch == "ascend950" else 128, step=64)


@triton.jit
def _head_product(
    x_ptr,
    w_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    inner,
    columns,
    stride_xt,
    stride_xh,
    stride_xn,
    stride_wh,
    stride_wn,
    stride_wc,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    # 1. which tokens, head and columns
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = token < num_tokens, column < columns
    # 2. the product, in steps of the inner width
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, STEP):
        channel = start + tl.arange(0, STEP).to(tl.int64)
        inside = channel < inner
        x_at = x_ptr + head * stride_xh + token[:, None] * stride_xt + channel[None, :] * stride_xn
        x = tl.load(x_at, mask=in_rows[:, None] & inside[None, :], other=0.0)
        w_at = w_ptr + head * stride_wh + channel[:, None] * stride_wn + column[None, :] * stride_wc
        w = tl.load(w_at, mask=inside[:, None] & in_columns[None, :], other=0.0)
        acc = tl.dot(x, w, acc)
    # 3. one rounding
    out_at = out_ptr + (token[:, None] * num_heads + head) * columns + column[None, :]
    tl.store(out_at, acc.to(tl.bfloat16), mask=in_rows[:, None] & in_columns[None, :])


def head_product(x_thn: torch.Tensor, w_hnc: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """out[t, h] = x[t, h] w[h] in bf16; any strides.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_thn is on the CPU and kernels are not interpreted.
    """
    (t, h, n), c = x_thn.shape, w_hnc.shape[2]
    out_thc = output_buffer(out, (t, h, c), torch.bfloat16, x_thn)
    if not t:
        return out_thc
    require_runnable("x_thn", x_thn)
    launch = head_launch(arch_of(x_thn.device))
    _head_product[(triton.cdiv(t, launch.rows), h, triton.cdiv(c, launch.columns))](
        x_thn,
        w_hnc,
        out_thc,
        t,
        h,
        n,
        c,
        *x_thn.stride(),
        *w_hnc.stride(),
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        STEP=launch.step,
        num_warps=launch.num_warps,
    )
    return out_thc
