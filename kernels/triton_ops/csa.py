"""Query heads of V4: each normalised by itself, its last channels rotated, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .rope import difference_of_products


@dataclass(frozen=True, kw_only=True)
class HeadNormLaunch:
    """Threads that share a head: fixes the order in which its squares are added."""

    num_warps: int = 1


@triton.jit
def _head(x_ptr, channel, stride_xd, factor):
    """Channels of a normalised head, rounded to bf16."""
    return (tl.load(x_ptr + channel * stride_xd).to(tl.float32) * factor).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _head_norm_rope(
    x_ptr,
    table_ptr,
    positions_ptr,
    y_ptr,
    num_heads,
    num_positions,
    stride_xt,
    stride_xh,
    stride_xd,
    stride_ts,
    stride_tr,
    stride_p,
    eps,
    CAST: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROTARY: tl.constexpr,
):
    # 1. the factor of the head; the sum is one-dimensional, so its order is that of the width alone
    pid = tl.program_id(0).to(tl.int64)
    token, head = pid // num_heads, pid % num_heads
    x_ptr += token * stride_xt + head * stride_xh
    x = tl.load(x_ptr + tl.arange(0, CHANNELS).to(tl.int64) * stride_xd).to(tl.float32)
    if CAST == "release":
        mean = (tl.sum((x * x).to(tl.bfloat16).to(tl.float32), axis=0) / CHANNELS).to(tl.bfloat16).to(tl.float32)
        factor = (1.0 / tl.sqrt_rn((mean + eps).to(tl.bfloat16).to(tl.float32))).to(tl.bfloat16).to(tl.float32)
    else:
        factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / CHANNELS + eps)
        if CAST == "factor":
            factor = factor.to(tl.bfloat16).to(tl.float32)
    # 2. every channel and the other one of its pair; a position outside the table gives NaN instead of a stray read
    channel = tl.arange(0, CHANNELS)
    own = _head(x_ptr, channel.to(tl.int64), stride_xd, factor)
    other = _head(x_ptr, (channel ^ 1).to(tl.int64), stride_xd, factor)
    position = tl.load(positions_ptr + token * stride_p).to(tl.int64)
    is_turned = channel >= CHANNELS - ROTARY
    is_known = is_turned & (position >= 0) & (position < num_positions)
    pair = ((channel - (CHANNELS - ROTARY)) // 2).to(tl.int64)
    table_ptrs = table_ptr + position * stride_ts + pair * stride_tr
    cos = tl.load(table_ptrs, mask=is_known, other=float("nan"))
    sin = tl.load(table_ptrs + (ROTARY // 2) * stride_tr, mask=is_known, other=float("nan"))
    other = tl.where(channel % 2 == 0, other, other * -1.0)
    turned = tl.where(is_turned, difference_of_products(own, cos, other, sin), own)
    # 3. store
    tl.store(y_ptr + pid * CHANNELS + channel, turned.to(tl.bfloat16))


def head_norm_rope(
    q_thd: torch.Tensor,
    table_sr: torch.Tensor,
    positions_t: torch.Tensor,
    *,
    cast: str,
    eps: float,
    launch: HeadNormLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalised and rotated heads in bf16.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: a head has no power of two of channels.
        RuntimeError: q_thd is on the CPU and kernels are not interpreted.
    """
    t, heads, width = q_thd.shape
    if width < 16 or width & (width - 1):
        raise NotImplementedError(f"q_thd: expected a power of two of channels from 16 up, got {width}")
    y_thd = output_buffer(out, (t, heads, width), torch.bfloat16, q_thd)
    if not y_thd.numel():
        return y_thd
    require_runnable("q_thd", q_thd)
    launch = launch or HeadNormLaunch()
    _head_norm_rope[(t * heads,)](
        q_thd,
        table_sr,
        positions_t,
        y_thd,
        heads,
        table_sr.shape[0],
        *q_thd.stride(),
        *table_sr.stride(),
        positions_t.stride(0),
        eps,
        CAST=cast,
        CHANNELS=width,
        ROTARY=table_sr.shape[1],
        num_warps=launch.num_warps,
    )
    return y_thd
