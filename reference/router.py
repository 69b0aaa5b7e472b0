"""Routers: which experts a token goes to, and with which weights.

A router turns the logits of a token (one per expert) into scores, ranks the experts by score plus bias, selects the
`topk` best and weighs them by their *unbiased* scores:

    s[t, e]   = sigmoid(logit) or sqrt(softplus(logit))
    r[t, e]   = s[t, e] + bias[e]
    idx[t, :] = the topk largest r, descending, ties to the smaller index
    w[t, j]   = s[t, idx[j]] / (sum_j s[t, idx[j]] + eps) * route_scale

The bias balances load; it decides which experts are selected and nothing else. A group-limited router (V3) first
keeps the best groups of neighbouring experts. A hash router (V4, first layers) reads the experts from a table of
token ids and learns the weights alone. Which constant stands in the denominator is a choice of the configuration.

Where numbers are rounded: scores, ranks, the sum, the quotient and the product are each stored, in fp32 everywhere
but in the release code of V3, which keeps scores and weights in bf16 (`dtype`). Logits are never rounded to bf16:
they are the fp32 product of `linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_finite, expect_in_range, expect_shape
from .config import GroupScore, RouterConfig, Scoring, WeightSum
from .numerics import CONTRACT, Numerics

EPS = 1e-20
LINEAR_ABOVE = 20.0  # softplus(x) = x beyond


def route(
    logits_te: Tensor,
    bias_e: Tensor,
    bias_vl_e: Tensor | None,
    image_mask_t: Tensor | None,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Select experts by biased score, weigh them by score.

    Math:
        see the module docstring; image tokens are ranked with `bias_vl_e`. A group-limited router ranks its groups by
        the sum of their two largest r (or the largest), keeps `kept_groups` of them, ties to the smaller group, and
        selects among the experts of these.

    Shapes:
        logits_te: fp32 [t, e]; bias_e, bias_vl_e: fp32 [e]; image_mask_t (True: image), mask_t (True: a token,
        False: padding): bool [t]; returns idx_tk int64 [t, k] and weights_tk [t, k] in the order of the ranking.

    Rounding:
        scores to `dtype`, r to fp32, sum, quotient and product to `dtype` each.

    Edges:
        a padding row gives indices -1 and weights 0, whatever its logits hold. A bias of -inf disables an expert.
        Scores far below the smallest are still positive here (sqrt(softplus(-104)) = 2.6e-23); an fp32 evaluation may
        give 0. With PLUS_EPS a row of zero scores gets weights 0, with EXACT NaN.

    Raises:
        ValueError: shapes disagree; logits of a token are not finite; bias_vl_e and image_mask_t do not come together;
            a bias is NaN or +inf; the biases leave fewer than `topk` experts to select from.
        TypeError: logits or biases are not fp32, masks not bool; `dtype` is no storage dtype.

    Source:
        v41-blocks.md section 1.1, v3-v32-v4.md sections 7.1, 7.2
    """
    logits_te = _checked_logits(logits_te, mask_t, config)
    _check_bias("bias_e", bias_e, config)
    if (bias_vl_e is None) != (image_mask_t is None):
        raise ValueError(f"bias_vl_e: expected together with image_mask_t, got {bias_vl_e is not None} alone")
    scores_te = _scores(logits_te, config, dtype, num)
    bias_te = num.wide(bias_e)[None, :]
    if bias_vl_e is not None and image_mask_t is not None:
        _check_bias("bias_vl_e", bias_vl_e, config)
        expect_shape("image_mask_t", image_mask_t, "t", {"t": logits_te.shape[0]})
        expect_dtype("image_mask_t", image_mask_t, torch.bool)
        bias_te = torch.where(image_mask_t[:, None], num.wide(bias_vl_e), bias_te)
    ranks_te = num.f32(scores_te + bias_te)
    if config.num_groups > 1:
        ranks_te = ranks_te.masked_fill(~_in_kept_groups(ranks_te, config, num), -torch.inf)
    # a stable sort keeps equal ranks in the order of their index, and takes -0 for 0
    idx_tk = torch.sort(ranks_te, dim=-1, descending=True, stable=True).indices[:, : config.topk]
    return _weighed(idx_tk, scores_te, mask_t, config, dtype, num)


def route_hash(
    logits_te: Tensor,
    token_t: Tensor,
    table_vk: Tensor,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Take the experts of a token from a table, weigh them by score.

    Math:
        idx[t, :] = table[token[t], :], weights as in the module docstring; there is no bias.

    Shapes:
        logits_te: fp32 [t, e]; token_t: int64 or int32 [t]; table_vk: int64 or int32 [v, k]; mask_t: bool [t] or None;
        returns idx_tk int64 [t, k] in table order and weights_tk [t, k].

    Rounding:
        as `route`.

    Edges:
        as `route`; the id of a padding row is not read.

    Raises:
        ValueError: shapes disagree; logits of a token are not finite; a token id lies outside the table, an expert
            outside 0 .. e - 1; the row of a token names an expert twice.
        TypeError: logits are not fp32, ids no integers, the mask not bool; `dtype` is no storage dtype.

    Source:
        v3-v32-v4.md section 7.3
    """
    logits_te = _checked_logits(logits_te, mask_t, config)
    expect_shape("token_t", token_t, "t", {"t": logits_te.shape[0]})
    expect_shape("table_vk", table_vk, "vk", {"k": config.topk})
    expect_dtype("token_t", token_t, torch.int64, torch.int32)
    expect_dtype("table_vk", table_vk, torch.int64, torch.int32)
    token_t = token_t if mask_t is None else torch.where(mask_t, token_t, 0)
    valid_t = torch.ones_like(token_t, dtype=torch.bool) if mask_t is None else mask_t
    expect_in_range("token_t", token_t[valid_t], 0, table_vk.shape[0])
    idx_tk = logits_te.new_zeros((len(token_t), config.topk), dtype=torch.int64)
    idx_tk[valid_t] = table_vk[token_t[valid_t].long()].long()
    expect_in_range("table_vk", idx_tk, 0, config.num_experts)
    sorted_tk = idx_tk[valid_t].sort(-1).values
    if (sorted_tk[:, 1:] == sorted_tk[:, :-1]).any():
        raise ValueError(f"table_vk: expected {config.topk} different experts in a row, got one twice")
    return _weighed(idx_tk, _scores(logits_te, config, dtype, num), mask_t, config, dtype, num)


def map_replicas(idx_tk: Tensor, map_ej: Tensor, count_e: Tensor, *, ep_rank: int) -> Tensor:
    """Replace logical experts by one of their physical replicas, spread by row.

    Math:
        physical[t, j] = map[idx, (ep_rank + t * 23333) mod count[idx]], t counted through padding rows too

    Shapes:
        idx_tk: int64 [t, k]; map_ej: int64 or int32 [e, most replicas], entries at or beyond the count unread;
        count_e: the same dtype, [e]; returns int64 [t, k].

    Edges:
        -1 stays -1. The product is exact: an implementation in 32 bits may choose other replicas from row 92 037 on.
        Replicas hold the same weights, so that changes no value.

    Raises:
        ValueError: shapes disagree; an expert lies outside the map; a count is below 1 or above the width of the map;
            ep_rank is negative.
        TypeError: an argument is not of its integer dtype.

    Source:
        v41-blocks.md sections 1.1, 1.3
    """
    dims: dict[str, int] = {}
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_shape("map_ej", map_ej, "ej", dims)
    expect_shape("count_e", count_e, "e", dims)
    expect_dtype("idx_tk", idx_tk, torch.int64)
    expect_dtype("map_ej", map_ej, torch.int64, torch.int32)
    expect_dtype("count_e", count_e, map_ej.dtype)
    expect_in_range("idx_tk", idx_tk, -1, dims["e"])
    expect_in_range("count_e", count_e, 1, dims["j"] + 1)
    if ep_rank < 0:
        raise ValueError(f"ep_rank: expected 0 or more, got {ep_rank}")
    row_t1 = torch.arange(dims["t"], device=idx_tk.device)[:, None]
    logical_tk = idx_tk.clamp(min=0)
    replica_tk = (ep_rank + row_t1 * 23333) % count_e.long()[logical_tk]
    return torch.where(idx_tk >= 0, map_ej.long()[logical_tk, replica_tk], -1)


def _scores(logits_te: Tensor, config: RouterConfig, dtype: torch.dtype, num: Numerics) -> Tensor:
    x = num.wide(logits_te)
    if config.scoring is Scoring.SIGMOID:
        return num.store(torch.sigmoid(x), dtype)
    # log1p(exp(x)) overflows from 88 on in fp32; this form never does
    softplus = torch.clamp(x, min=0) + torch.log1p(torch.exp(-x.abs()))
    return num.store(torch.sqrt(torch.where(x > LINEAR_ABOVE, x, softplus)), dtype)


def _in_kept_groups(ranks_te: Tensor, config: RouterConfig, num: Numerics) -> Tensor:
    """Which experts stand in one of the `kept_groups` best groups."""
    ranks_tgi = ranks_te.unflatten(-1, (config.num_groups, config.group_size))
    if config.group_score is GroupScore.MAX:
        score_tg = ranks_tgi.amax(-1)
    else:
        first, second = ranks_tgi.topk(2, dim=-1).values.unbind(-1)
        score_tg = num.f32(first + second)
    best_tg = torch.sort(score_tg, dim=-1, descending=True, stable=True).indices[:, : config.kept_groups]
    # masked by -inf and not by 0: biased scores may be negative
    kept_tg = torch.zeros_like(score_tg, dtype=torch.bool).scatter(-1, best_tg, True)
    return kept_tg.repeat_interleave(config.group_size, -1)


def _weighed(
    idx_tk: Tensor, scores_te: Tensor, mask_t: Tensor | None, config: RouterConfig, dtype: torch.dtype, num: Numerics
) -> tuple[Tensor, Tensor]:
    """The weights of the selected experts; padding rows emptied."""
    scores_tk = scores_te.gather(-1, idx_tk)
    sum_t1 = num.store(num.sum(scores_tk, dim=-1, keepdim=True), dtype)
    if config.weight_sum is WeightSum.PLUS_EPS:
        sum_t1 = num.store(sum_t1 + EPS, dtype)
    weights_tk = num.store(num.store(scores_tk / sum_t1, dtype) * config.route_scale, dtype)
    if mask_t is not None:
        idx_tk = torch.where(mask_t[:, None], idx_tk, -1)
        weights_tk = torch.where(mask_t[:, None], weights_tk, 0)
    return idx_tk, weights_tk


def _checked_logits(logits_te: Tensor, mask_t: Tensor | None, config: RouterConfig) -> Tensor:
    """The logits with padding rows zeroed."""
    expect_shape("logits_te", logits_te, "te", {"e": config.num_experts})
    expect_dtype("logits_te", logits_te, torch.float32, torch.float64)
    if mask_t is not None:
        expect_shape("mask_t", mask_t, "t", {"t": logits_te.shape[0]})
        expect_dtype("mask_t", mask_t, torch.bool)
        logits_te = torch.where(mask_t[:, None], logits_te, 0)
    expect_finite("logits_te", logits_te)
    return logits_te


def _check_bias(name: str, bias_e: Tensor, config: RouterConfig) -> None:
    expect_shape(name, bias_e, "e", {"e": config.num_experts})
    expect_dtype(name, bias_e, torch.float32)
    expect_finite(name, bias_e.masked_fill(bias_e == -torch.inf, 0))
    enabled_g = (bias_e > -torch.inf).unflatten(0, (config.num_groups, config.group_size)).sum(-1, dtype=torch.int64)
    least = 2 if config.num_groups > 1 and config.group_score is GroupScore.TOP2_SUM else 1
    alive_g = enabled_g[enabled_g >= least].sort().values
    # whichever groups the scores favour, the kept ones must hold enough experts
    if len(alive_g) < config.kept_groups or int(alive_g[: config.kept_groups].sum(dtype=torch.int64)) < config.topk:
        raise ValueError(f"{name}: expected at least {config.topk} enabled experts in any kept groups")
