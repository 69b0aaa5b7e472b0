"""Load balance without an auxiliary loss: the bias that steers the selection of experts, moved after each step.

A router ranks experts by score plus bias (`router`). After a training step the bias of an expert that had more than
its share of the tokens goes down by a fixed speed, of one that had less it goes up: the sign rule of V3. A rule that
moves in proportion to the excess is another one. In inference the bias is a constant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_shape
from .numerics import CONTRACT, Numerics


def expert_load(idx_tk: Tensor, *, num_experts: int) -> Tensor:
    """How many tokens of a batch selected each expert.

    Math:
        count[e] = number of (t, j) with idx[t, j] = e

    Shapes:
        idx_tk: int64 [t, k], -1 for no expert; returns int64 [e].

    Raises:
        ValueError: idx_tk is not 2-D or names an expert outside 0 .. e - 1; num_experts is below 1.
        TypeError: idx_tk is not int64.

    Source:
        v3-v32-v4.md section 7.6
    """
    expect_shape("idx_tk", idx_tk, "tk", {})
    expect_dtype("idx_tk", idx_tk, torch.int64)
    if num_experts < 1:
        raise ValueError(f"num_experts: expected at least 1, got {num_experts}")
    expect_in_range("idx_tk", idx_tk, -1, num_experts)
    return torch.bincount(idx_tk[idx_tk >= 0], minlength=num_experts)


def update_bias(bias_e: Tensor, count_e: Tensor, *, speed: float, num: Numerics = CONTRACT) -> Tensor:
    """Move the bias of every expert against its load.

    Math:
        mean     = sum_e count[e] / E
        bias'[e] = bias[e] - speed   if count[e] > mean
                   bias[e] + speed   if count[e] < mean
                   bias[e]           otherwise

    Shapes:
        bias_e: fp32 [e]; count_e: int64 [e], tokens of the whole batch, all ranks together; returns [e].

    Rounding:
        the speed to fp32, the sum to fp32; the comparison is exact, in integers.

    Edges:
        a batch without tokens moves nothing, and a speed of 0 (the end of V3's training) neither. A bias of -inf
        (expert disabled) stays. One expert alone always has its share.

    Raises:
        ValueError: shapes disagree; there is no expert; a count is negative; a bias is NaN or +inf; the speed is
            negative or not finite.
        TypeError: the bias is not fp32 or the counts not int64.

    Source:
        v3-v32-v4.md section 7.6 (V3: 0.001 for most of the training)
    """
    dims: dict[str, int] = {}
    expect_shape("bias_e", bias_e, "e", dims)
    expect_shape("count_e", count_e, "e", dims)
    expect_dtype("bias_e", bias_e, torch.float32)
    expect_dtype("count_e", count_e, torch.int64)
    if not dims["e"]:
        raise ValueError("bias_e: expected at least one expert, got none")
    if (count_e < 0).any():
        raise ValueError(f"count_e: expected 0 or more, got {count_e.min().item()}")
    if not (bias_e < torch.inf).all():
        raise ValueError("bias_e: expected finite values or -inf, got NaN or +inf")
    if not 0 <= speed < math.inf:
        raise ValueError(f"speed: expected a finite number from 0 on, got {speed}")
    # count > sum / E, without a division
    excess_e = count_e * dims["e"] - count_e.sum(dtype=torch.int64)
    step = num.f32(num.wide(torch.tensor(speed, dtype=torch.float64)))
    return num.f32(num.wide(bias_e) - step * excess_e.sign())
