"""What happens to rows before and after a draw: blacklists and masks, ranked log-probabilities, mass below a token."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from .numerics import CONTRACT, Numerics
from .structured_output import apply_masks


def mask_logits(
    logits_tv: Tensor, banned_v: Tensor | None, no_eos_t: Tensor | None, allowed_ti: Tensor | None, *, eos: int
) -> Tensor:
    """Rows without the tokens that must not be drawn.

    Math:
        −inf where the token is banned, where it is eos and the row must not end yet, and where the mask of the row
        forbids it (`structured_output.apply_masks`, one mask a row); the logit elsewhere

    Shapes:
        logits_tv: fp32 [t, v]; banned_v: bool [v] (the blacklist); no_eos_t: bool [t]; allowed_ti: int32
        [t, ceil(v / 32)] (a grammar); each may be None; returns fp32 [t, v].

    Edges:
        a row may lose all its tokens: drawing from it then says EMPTY. Bits behind the last column are not read.

    Raises:
        ValueError: shapes disagree, or eos is no column.
        TypeError: an argument is not of its dtype.

    Source:
        runtime.md section 2.2, steps 2 to 4
    """
    dims: dict[str, int] = {}
    expect_shape("logits_tv", logits_tv, "tv", dims)
    expect_dtype("logits_tv", logits_tv, torch.float32)
    if not 0 <= eos < dims["v"]:
        raise ValueError(f"eos: expected a column of {dims['v']}, got {eos}")
    masked_tv = logits_tv.clone()
    if banned_v is not None:
        expect_shape("banned_v", banned_v, "v", dims)
        expect_dtype("banned_v", banned_v, torch.bool)
        masked_tv[:, banned_v] = -torch.inf
    if no_eos_t is not None:
        expect_shape("no_eos_t", no_eos_t, "t", dims)
        expect_dtype("no_eos_t", no_eos_t, torch.bool)
        masked_tv[no_eos_t, eos] = -torch.inf
    if allowed_ti is not None:
        expect_shape("allowed_ti", allowed_ti, "ti", {"t": dims["t"], "i": -(-dims["v"] // 32)})
        expect_dtype("allowed_ti", allowed_ti, torch.int32)
        row_t = torch.arange(dims["t"], dtype=torch.int32)
        apply_masks(masked_tv, allowed_ti[:, None], row_t, torch.ones_like(row_t))
    return masked_tv


def ranked(values_tv: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of every row, largest first, ties by id: top log-probabilities, and forced top-k.

    Shapes:
        values_tv: fp32 [t, v]; returns value_tk fp32 and id_tk int64 [t, k].

    Edges:
        −0 equals +0 and keeps its sign. −inf is a value like any other; places behind the last column are −inf, id −1.
        A draw from forced top-k takes place among the k values, in this order, and its token is id[t, place].

    Raises:
        ValueError: the shape is not [t, v]; a value is NaN; k is not positive.
        TypeError: values are not fp32.

    Source:
        runtime.md sections 2.2 (step 5), 2.6 and 3.2
    """
    dims: dict[str, int] = {}
    expect_shape("values_tv", values_tv, "tv", dims)
    expect_dtype("values_tv", values_tv, torch.float32)
    expect_positive("k", k)
    if values_tv.isnan().any():
        raise ValueError("values_tv: expected numbers, got NaN")
    order_tk = torch.sort(values_tv, dim=1, descending=True, stable=True).indices[:, :k]
    value_tk = values_tv.new_full((dims["t"], k), -torch.inf)
    id_tk = torch.full((dims["t"], k), -1, dtype=torch.int64)
    value_tk[:, : order_tk.shape[1]] = values_tv.gather(1, order_tk)
    id_tk[:, : order_tk.shape[1]] = order_tk
    return value_tk, id_tk


def smaller_mass(logprobs_tv: Tensor, token_t: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The probability of what ranks no higher than a token, itself included; of equal ones, the lower ids.

    Math:
        mass[t] = sum of exp(lp[i]) over lp[i] < lp[token], and over lp[i] = lp[token] with i <= token

    Shapes:
        logprobs_tv: fp32 [t, v]; token_t: int64 [t], −1 for none; returns fp32 [t].

    Rounding:
        the exponentials and their sum, to fp32.

    Edges:
        no token gives 0; a token of log-probability −inf gives 0.

    Raises:
        ValueError: shapes disagree; a token is no column and not −1.
        TypeError: log-probabilities are not fp32, or tokens not int64.

    Source:
        runtime.md section 2.6
    """
    dims: dict[str, int] = {}
    expect_shape("logprobs_tv", logprobs_tv, "tv", dims)
    expect_shape("token_t", token_t, "t", dims)
    expect_dtype("logprobs_tv", logprobs_tv, torch.float32)
    expect_dtype("token_t", token_t, torch.int64)
    expect_in_range("token_t", token_t, -1, dims["v"])
    own_t1 = logprobs_tv.gather(1, token_t.clamp(min=0)[:, None])
    id_v = torch.arange(dims["v"])
    counted_tv = (logprobs_tv < own_t1) | ((logprobs_tv == own_t1) & (id_v <= token_t[:, None]))
    prob_tv = num.f32(torch.exp(num.wide(logprobs_tv)))
    mass_t = num.sum(torch.where(counted_tv, prob_tv, 0.0), dim=1)
    return torch.where(token_t >= 0, num.f32(mass_t), 0.0)
