"""SwiGLU: the gate of a feed-forward block, alone and followed by the quantiser of the down projection.

Rows hold the gate in their first half and the up projection in their second, as the product with w1 above w3 leaves
them. V4 and V4.1 limit both halves: the gate from above only, the up projection on either side. The routing weight of
a row is applied here, before the down projection and before its quantiser.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_multiple, expect_positive, expect_shape
from .config import QuantFormat
from .numerics import CONTRACT, Numerics
from .quant import quantize

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def swiglu(
    h_ti: Tensor,
    weight_t: Tensor | None = None,
    *,
    limit: float | None,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """silu(gate) · up · weight of each row.

    Math:
        a = min(h[t, :f], limit), c = clamp(h[t, f:], -limit, limit)
        v[t, :] = a / (1 + exp(-a)) · c · weight[t], in that order

    Shapes:
        h_ti: [t, 2f], gate then up; weight_t: [t] or None; limit: None for a model without one; returns [t, f].

    Rounding:
        one, to `dtype`, at return; exp(-a) to fp32, which overflows to infinity for a < -88.7.

    Edges:
        t = 0 gives an empty tensor. A gate far below zero gives a zero of the opposite sign of up.

    Raises:
        TypeError: h_ti or weight_t is not floating; dtype is no storage dtype.
        ValueError: shapes disagree; 2f is odd; limit is not positive.

    Source:
        v41-blocks.md sections 1.1, 1.3, v3-v32-v4.md section 7.4
    """
    return num.store(_gated(h_ti, weight_t, limit, num), dtype)


def swiglu_quant(
    h_ti: Tensor,
    weight_t: Tensor | None = None,
    *,
    limit: float | None,
    fmt: QuantFormat,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """`swiglu` followed by `quantize`, with nothing rounded in between.

    Shapes:
        h_ti: [t, 2f]; weight_t: [t] or None; codes [t, f] and scales in `fmt`, as `quantize` returns them.

    Rounding:
        as `quantize`, of the fp32 value; exp(-a) to fp32.

    Raises:
        TypeError: h_ti or weight_t is not floating.
        ValueError: as `swiglu`; a value is NaN or infinite; f is no multiple of the group of `fmt`.

    Source:
        v41-blocks.md section 1.1
    """
    return quantize(_gated(h_ti, weight_t, limit, num), fmt=fmt, num=num)


def _gated(h_ti: Tensor, weight_t: Tensor | None, limit: float | None, num: Numerics) -> Tensor:
    dims: dict[str, int] = {}
    expect_shape("h_ti", h_ti, "ti", dims)
    expect_dtype("h_ti", h_ti, *FLOATING)
    expect_multiple("h_ti (last axis)", dims["i"], 2)
    gate_tf, up_tf = num.wide(h_ti).chunk(2, dim=1)
    if limit is not None:
        expect_positive("limit", limit)
        gate_tf, up_tf = gate_tf.clamp(max=limit), up_tf.clamp(min=-limit, max=limit)
    # the infinity of fp32 is part of the definition: a / inf is -0
    v_tf = gate_tf / (1 + num.f32(torch.exp(-gate_tf))) * up_tf
    if weight_t is None:
        return v_tf
    expect_shape("weight_t", weight_t, "t", dims)
    expect_dtype("weight_t", weight_t, *FLOATING)
    return v_tf * num.wide(weight_t)[:, None]
