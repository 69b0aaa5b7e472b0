"""Top-p and top-k in whole numbers: which tokens of a row are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_shape

WEIGHT_BITS = 31  # a weight is a multiple of 2^-31


def keep_prefix(logits_tv: Tensor, probs_tv: Tensor, top_p_t: Tensor, top_k_t: Tensor) -> Tensor:
    """Which tokens top-p and top-k leave.

    Math:
        w      = floor(probs * 2^31); target = floor(top_p * 2^31) + 1; active: top_p < 1, 0 < top_k < v
        classes of equal logits in descending order; the stopping class is the first at which the running sum of w
        reaches the target or the running count reaches top_k. Higher classes are kept, and of the stopping class the
        n lowest ids:
        n      = min(top_k − count above, ceil((target − sum above) * 2^-31 / prob of the class)), of active filters

    Shapes:
        logits_tv, probs_tv: fp32 [t, v], probs the softmax of the logits at some temperature, so that equal logits have
        equal probs; top_p_t: fp32 [t]; top_k_t: int64 [t]; returns bool [t, v].

    Rounding:
        (target − sum above) to fp32, the quotient to fp32 (definitional).

    Edges:
        no active filter, or no class that reaches a target: everything is kept. −0 and +0 are one class; −inf is the
        lowest class. A class of probability 0 at which top-p is active leaves n = 0. Negative top_k is no limit.

    Raises:
        ValueError: shapes disagree; NaN among the logits; a probability below 0 or not finite; top_p not in [0, 1];
            top_k = 0.
        TypeError: an argument is not of its dtype.

    Source:
        runtime.md section 2.2
    """
    dims: dict[str, int] = {}
    expect_shape("logits_tv", logits_tv, "tv", dims)
    expect_shape("probs_tv", probs_tv, "tv", dims)
    expect_filters(top_p_t, top_k_t, dims)
    expect_dtype("logits_tv", logits_tv, torch.float32)
    expect_dtype("probs_tv", probs_tv, torch.float32)
    if logits_tv.isnan().any():
        raise ValueError("logits_tv: expected numbers, got NaN")
    if not ((probs_tv >= 0) & probs_tv.isfinite()).all():
        raise ValueError("probs_tv: expected finite numbers from 0 on, got others")
    for name, good_t in (("top_p_t", (top_p_t >= 0) & (top_p_t <= 1)), ("top_k_t", top_k_t != 0)):
        if not good_t.all():
            raise ValueError(f"{name}: expected top_p in [0, 1] and top_k not 0, got {top_p_t}, {top_k_t}")
    kept_tv = torch.ones_like(logits_tv, dtype=torch.bool)
    for row, (top_p, top_k) in enumerate(zip(top_p_t.tolist(), top_k_t.tolist(), strict=True)):
        kept_tv[row] = kept_of_row(logits_tv[row], probs_tv[row], top_p, top_k)
    return kept_tv


def kept_of_row(logits_v: Tensor, probs_v: Tensor, top_p: float, top_k: int) -> Tensor:
    """`keep_prefix` of one row."""
    v = len(logits_v)
    by_p, by_k = top_p < 1, 0 < top_k < v
    target = int(top_p * 2.0**WEIGHT_BITS) + 1
    order_v = torch.sort(logits_v + 0.0, descending=True, stable=True).indices
    logit_v, sum_v = logits_v[order_v], fixed_point(probs_v)[order_v].cumsum(0)
    is_end_v = torch.cat([logit_v[1:] != logit_v[:-1], logit_v.new_ones(1, dtype=torch.bool)])
    count_v = torch.arange(1, v + 1)
    reached_v = is_end_v & ((sum_v >= target) & by_p | (count_v >= top_k) & by_k)
    if not bool(reached_v.any()):
        return torch.ones_like(logits_v, dtype=torch.bool)
    end = int(reached_v.nonzero()[0])
    above = int((logit_v > logit_v[end]).sum(dtype=torch.int64))
    n = end + 1 - above
    if by_k:
        n = min(n, top_k - above)
    if by_p:
        missing = torch.tensor(float(target - (int(sum_v[above - 1]) if above else 0)), dtype=torch.float32)
        prob = probs_v[order_v[end]]
        # in fp32; a class without probability adds nothing, however many of it are kept
        n = min(n, int(torch.ceil(missing * 2.0**-WEIGHT_BITS / prob).clamp(max=v)) if prob > 0 else 0)
    return torch.zeros_like(logits_v, dtype=torch.bool).scatter(0, order_v[: above + n], True)


def fixed_point(probs_v: Tensor) -> Tensor:
    """floor(p * 2^31): the product is exact. What is twice a probability or more is all the same."""
    return torch.floor(probs_v.clamp(max=4.0) * 2.0**WEIGHT_BITS).to(torch.int64)


def expect_filters(top_p_t: Tensor, top_k_t: Tensor, dims: dict[str, int]) -> None:
    """Raise unless there is one fp32 top_p and one int64 top_k for every row."""
    expect_shape("top_p_t", top_p_t, "t", dims)
    expect_dtype("top_p_t", top_p_t, torch.float32)
    expect_shape("top_k_t", top_k_t, "t", dims)
    expect_dtype("top_k_t", top_k_t, torch.int64)
