"""Products of experts in a buffer with room to spare, as decoding keeps it: experts begin at multiples of 128 rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_shape
from .config import QuantFormat
from .linear import linear_codes
from .numerics import CONTRACT, Numerics

SLOT_ROWS = 128  # they belong to one expert


def linear_slots(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    expert_y: Tensor,
    before_yf: Tensor,
    *,
    x_fmt: QuantFormat,
    w_fmt: QuantFormat,
    num: Numerics = CONTRACT,
) -> Tensor:
    """One product for each row of a buffer with room to spare: where a row names no expert, what stood there stays.

    Shapes:
        x_q, x_sf: [y, m] in x_fmt; w_q, w_sf: [e, f, m] in w_fmt, expert by expert; expert_y: int32 [y], −1 for none;
        before_yf: bf16 [y, f]; returns [y, f].

    Rounding:
        one, to bf16, at return.

    Edges:
        rows without an expert may hold anything. 128 rows from a multiple of 128 name one expert at most; y = 0 gives
        an empty tensor.

    Raises:
        TypeError: expert_y is not int32, before_yf not bf16; otherwise as `linear_codes`.
        ValueError: a row names no expert of e, or 128 rows name two; shapes disagree; otherwise as `linear_codes`.

    Source:
        kernel-libraries.md section 4.2
    """
    dims: dict[str, int] = {}
    expect_shape("x_q", x_q, "yi", dims)
    expect_shape("w_q", w_q, "efj", dims)
    expect_shape("expert_y", expert_y, "y", dims)
    expect_dtype("expert_y", expert_y, torch.int32)
    expect_shape("before_yf", before_yf, "yf", dims)
    expect_dtype("before_yf", before_yf, torch.bfloat16)
    for span_y in expert_y.split(SLOT_ROWS):
        named = set(span_y.tolist()) - {-1}
        if len(named) > 1 or not named <= set(range(dims["e"])):
            raise ValueError(f"expert_y: expected one of {dims['e']} experts or -1 in {SLOT_ROWS} rows, got {named}")
    y_yf = num.wide(before_yf).clone()
    for e in range(dims["e"]):
        rows = (expert_y == e).nonzero()[:, 0]
        if len(rows):
            operands = (x_q.view(torch.uint8)[rows].view(x_q.dtype), x_sf[rows], w_q[e], w_sf[e])
            y_yf[rows] = num.wide(linear_codes(*operands, x_fmt=x_fmt, w_fmt=w_fmt, num=num))
    return y_yf
