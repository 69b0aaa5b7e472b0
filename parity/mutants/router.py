"""Routers as a kernel computes them, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import GroupScore, RouterConfig, Scoring, WeightSum


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the router does wrong; the default is right. `backwards` and `log1p` are honest choices."""

    backwards: bool = False  # the selected scores are added last to first
    log1p: str = "stable"  # stable, plain (log1p(exp(x)) below 20), naive (log(1 + exp(x)))
    scoring: str = "asked"  # asked, sigmoid, sigmoid_without_groups, softplus
    linear_above: float = 20.0
    logits: torch.dtype = torch.float32
    scores: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32
    bias: float = 1.0
    weights_of: str = "scores"  # scores, ranks
    ties: str = "lower"  # lower, upper, by_row, by_call
    group_ties: str = "lower"  # lower, upper
    group_score: str = "asked"  # asked, max, unbiased
    groups: str = "consecutive"  # consecutive, strided
    more_groups: int = 0
    outside: float = -torch.inf  # rank of experts in other groups
    lanes: str = "exact"  # exact, padded_with_0
    disabled: str = "kept_out"  # kept_out, as_zero
    eps: str = "asked"  # asked, missing, minimum, minimum_1e_6, after
    scale_power: int = 1
    total: str = "selected"  # selected, all, one
    image: str = "own"  # own, ignored, for_all, on_top, first_row
    mask: str = "used"  # used, ignored, index_0, weights_kept, times_nan
    order: str = "rank"  # rank, index
    last_expert: bool = True
    mate: bool = False


_calls = 0
RouteFn = Callable[..., tuple[Tensor, Tensor]]


def scores_of(faults: Faults, x: Tensor, config: RouterConfig, dtype: torch.dtype) -> Tensor:
    """Scores in fp32, every step rounded to fp32."""
    x = x.to(faults.logits).float()
    sigmoid = config.scoring is Scoring.SIGMOID or faults.scoring == "sigmoid"
    if faults.scoring == "sigmoid_without_groups" and config.num_groups == 1:
        sigmoid = True
    if sigmoid:
        score = _rounded(torch.sigmoid(x.double()))
    else:
        if faults.log1p == "naive":
            soft = torch.log(1 + torch.exp(x))
        elif faults.log1p == "plain":
            soft = _rounded(torch.log1p(_rounded(torch.exp(x.double().clamp(max=80.0))).double()))
        else:
            small = _rounded(torch.exp(-x.abs().double()))
            soft = x.clamp(min=0) + _rounded(torch.log1p(small.double()))
        if faults.log1p != "naive":
            soft = torch.where(x > faults.linear_above, x, soft)
        score = soft if faults.scoring == "softplus" else _rounded(soft.double().sqrt())
    return score.to(faults.scores).to(dtype).float()


def _rounded(x: Tensor) -> Tensor:
    # fp64 and one rounding: torch's fp32 functions give other bits in the vector body than in its tail
    return x.float()


def _ranks(
    faults: Faults, scores: Tensor, bias_e: Tensor, bias_vl_e: Tensor | None, image_mask_t: Tensor | None
) -> Tensor:
    text = bias_e.nan_to_num(neginf=0.0) if faults.disabled == "as_zero" else bias_e
    bias = (text * faults.bias if faults.bias else torch.zeros_like(text)).expand_as(scores)
    if bias_vl_e is not None and image_mask_t is not None and faults.image != "ignored":
        is_image = image_mask_t
        if faults.image == "for_all":
            is_image = torch.ones_like(is_image)
        elif faults.image == "first_row" and len(is_image):
            is_image = is_image[:1].expand_as(is_image)
        vision = bias + bias_vl_e if faults.image == "on_top" else bias_vl_e.expand_as(bias)
        bias = torch.where(is_image[:, None], vision, bias)
    ranks = scores + bias
    if faults.mate and len(ranks) > 1:
        ranks = ranks + 1e-3 * ranks.roll(1, 0).nan_to_num(0.0, 0.0, 0.0)
    if not faults.last_expert and ranks.shape[1] > 1:
        ranks = torch.cat([ranks[:, :-1], ranks[:, :1] * 0 - 1e30], 1)
    return ranks


def _grouped(faults: Faults, ranks: Tensor, scores: Tensor, config: RouterConfig) -> Tensor:
    t, groups = len(ranks), config.num_groups
    by_group = scores if faults.group_score == "unbiased" else ranks
    strided = faults.groups == "strided"
    shape = (t, config.group_size, groups) if strided else (t, groups, config.group_size)
    view = by_group.reshape(shape).transpose(1, 2) if strided else by_group.reshape(shape)
    one = config.group_score is GroupScore.MAX or faults.group_score == "max"
    best = view.sort(-1, descending=True).values
    group_score = best[..., 0] if one else best[..., 0] + best[..., 1]
    order = _first(group_score, min(config.kept_groups + faults.more_groups, groups), faults.group_ties)
    kept = torch.zeros(t, groups, dtype=torch.bool).scatter(1, order, True)
    every = kept[:, None, :].expand(shape) if strided else kept[:, :, None].expand(shape)
    return torch.where(every.reshape(t, -1), ranks, faults.outside)


def _first(x: Tensor, count: int, ties: str) -> Tensor:
    """Indices of the `count` largest, descending."""
    global _calls
    upper = torch.zeros(len(x), dtype=torch.bool)
    if ties == "upper":
        upper[:] = True
    elif ties == "by_row":
        upper[1::2] = True
    elif ties == "by_call":
        _calls += 1
        upper[:] = _calls % 2 == 0
    lower_first = torch.sort(x, dim=-1, descending=True, stable=True).indices
    upper_first = x.shape[1] - 1 - torch.sort(x.flip(-1), dim=-1, descending=True, stable=True).indices
    return torch.where(upper[:, None], upper_first, lower_first)[:, :count]


def _weights(faults: Faults, picked: Tensor, scores: Tensor, config: RouterConfig, dtype: torch.dtype) -> Tensor:
    def stored(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    columns = list(picked.unbind(1))
    if faults.backwards:
        columns.reverse()
    total = torch.zeros(len(picked))
    for column in columns:
        total = total + column
    if faults.total == "all":
        total = _rounded(scores.double().sum(1))
    elif faults.total == "one":
        total = torch.ones_like(total)
    total = stored(total)
    asked = config.weight_sum is WeightSum.PLUS_EPS
    if faults.eps == "asked" and asked:
        total = stored(total + 1e-20)
    elif faults.eps == "minimum":
        total = total.clamp(min=1e-20)
    elif faults.eps == "minimum_1e_6":
        total = total.clamp(min=1e-6)
    share = stored(picked / total[:, None])
    if faults.eps == "after":
        share = share + 1e-20
    return stored(share * config.route_scale**faults.scale_power).to(faults.weights).to(dtype)


def _emptied(faults: Faults, idx: Tensor, weights: Tensor, mask_t: Tensor | None) -> tuple[Tensor, Tensor]:
    if mask_t is None or faults.mask == "ignored":
        return idx, weights
    real = mask_t[:, None]
    if faults.mask == "times_nan":
        weights = torch.where(real, weights, torch.nan)
    elif faults.mask != "weights_kept":
        weights = torch.where(real, weights, 0.0)
    return torch.where(real, idx, 0 if faults.mask == "index_0" else -1), weights


def _real(logits_te: Tensor, mask_t: Tensor | None) -> Tensor:
    return logits_te if mask_t is None else torch.where(mask_t[:, None], logits_te, 0.0)


def route_with(faults: Faults) -> RouteFn:
    """The emulation with the signature of `route`."""

    def route(
        logits_te: Tensor,
        bias_e: Tensor,
        bias_vl_e: Tensor | None,
        image_mask_t: Tensor | None,
        mask_t: Tensor | None,
        *,
        config: RouterConfig,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        scores = scores_of(faults, _real(logits_te, mask_t), config, dtype)
        ranks = _ranks(faults, scores, bias_e, bias_vl_e, image_mask_t)
        if config.num_groups > 1:
            ranks = _grouped(faults, ranks, scores, config)
        if faults.lanes == "padded_with_0":
            lanes = -ranks.shape[1] % 128
            ranks = torch.cat([ranks, torch.zeros(len(ranks), lanes)], 1)
        idx = _first(ranks, config.topk, faults.ties)
        if faults.lanes == "padded_with_0":
            idx = torch.where(idx < config.num_experts, idx, 0)
        if faults.order == "index":
            idx = idx.sort(1).values
        picked = (ranks if faults.weights_of == "ranks" else scores).gather(1, idx)
        return _emptied(faults, idx, _weights(faults, picked, scores, config, dtype), mask_t)

    return route


def hash_with(faults: Faults, *, select: str = "token", order: str = "table", equal: bool = False) -> RouteFn:
    """The emulation with the signature of `route_hash`."""

    def route_hash(
        logits_te: Tensor,
        token_t: Tensor,
        table_vk: Tensor,
        mask_t: Tensor | None,
        *,
        config: RouterConfig,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        scores = scores_of(faults, _real(logits_te, mask_t), config, dtype)
        rows = token_t % len(table_vk)
        if select == "first_row":
            rows = rows[:1].expand_as(rows)
        elif select == "position":
            rows = torch.arange(len(rows)) % len(table_vk)
        idx = _first(scores, config.topk, "lower") if select == "score" else table_vk[rows]
        picked = scores.gather(1, idx)
        if equal:
            picked = torch.ones_like(picked)
        weights = _weights(faults, picked, scores, config, dtype)
        if order == "index":
            idx = idx.sort(1).values
        return _emptied(faults, idx, weights, mask_t)

    return route_hash


def replicas_with(*, wraps: bool = False, replica: str = "own", empty: str = "kept") -> Callable[..., Tensor]:
    """The emulation with the signature of `map_replicas`."""

    def map_replicas(idx_tk: Tensor, map_ej: Tensor, count_e: Tensor, *, ep_rank: int) -> Tensor:
        row = torch.arange(len(idx_tk))[:, None]
        if replica == "within_expert" and idx_tk.shape[1]:
            earlier = (idx_tk[:, None, :1] == idx_tk[None, :, :1]).tril(-1) if len(idx_tk) < 999 else row[None] * 0
            row = earlier.sum(1)
        product = row * 23333
        if wraps:
            product = (product + 2**31) % 2**32 - 2**31
        number = product if replica == "ignores_rank" else product + ep_rank
        logical = idx_tk.clamp(min=0)
        count = torch.full_like(logical, map_ej.shape[1]) if replica == "of_width" else count_e.long()[logical]
        chosen = torch.zeros_like(logical) if replica == "first" else number % count
        physical = map_ej.long()[logical, chosen]
        return torch.where(idx_tk >= 0, physical, -1) if empty == "kept" else map_ej.long()[idx_tk, chosen]

    return map_replicas


_RIGHT = Faults()
right_stable = route_with(_RIGHT)
right_backwards = route_with(replace(_RIGHT, backwards=True))
right_naive_log1p = route_with(replace(_RIGHT, log1p="plain"))
right_hash = hash_with(_RIGHT)
right_replicas = replicas_with()

bias_in_weights = route_with(replace(_RIGHT, weights_of="ranks"))
bias_forgotten = route_with(replace(_RIGHT, bias=0.0))
bias_twice = route_with(replace(_RIGHT, bias=2.0))
ties_to_the_larger_index = route_with(replace(_RIGHT, ties="upper"))
ties_by_place_in_the_batch = route_with(replace(_RIGHT, ties="by_row"))
ties_change_between_calls = route_with(replace(_RIGHT, ties="by_call"))
group_ties_to_the_larger_group = route_with(replace(_RIGHT, group_ties="upper"))
other_groups_zero = route_with(replace(_RIGHT, outside=0.0))
padding_lanes_win = route_with(replace(_RIGHT, lanes="padded_with_0"))
disabled_expert_kept = route_with(replace(_RIGHT, disabled="as_zero"))
sigmoid_without_groups = route_with(replace(_RIGHT, scoring="sigmoid_without_groups"))
softplus_without_root = route_with(replace(_RIGHT, scoring="softplus"))
softplus_naive = route_with(replace(_RIGHT, log1p="naive"))
softplus_linear_above_10 = route_with(replace(_RIGHT, linear_above=10.0))
eps_missing = route_with(replace(_RIGHT, eps="missing"))
eps_as_minimum = route_with(replace(_RIGHT, eps="minimum"))
eps_1e_6 = route_with(replace(_RIGHT, eps="minimum_1e_6"))
eps_after_division = route_with(replace(_RIGHT, eps="after"))
scale_missing = route_with(replace(_RIGHT, scale_power=0))
scale_twice = route_with(replace(_RIGHT, scale_power=2))
normalised_over_all = route_with(replace(_RIGHT, total="all"))
not_normalised = route_with(replace(_RIGHT, total="one"))
image_bias_ignored = route_with(replace(_RIGHT, image="ignored"))
image_bias_for_all = route_with(replace(_RIGHT, image="for_all"))
image_bias_on_top = route_with(replace(_RIGHT, image="on_top"))
image_mask_of_first_row = route_with(replace(_RIGHT, image="first_row"))
mask_ignored = route_with(replace(_RIGHT, mask="ignored"))
masked_index_0 = route_with(replace(_RIGHT, mask="index_0"))
masked_weights_kept = route_with(replace(_RIGHT, mask="weights_kept"))
masked_row_nan = route_with(replace(_RIGHT, mask="times_nan"))
group_by_best_expert = route_with(replace(_RIGHT, group_score="max"))
groups_strided = route_with(replace(_RIGHT, groups="strided"))
one_group_more = route_with(replace(_RIGHT, more_groups=1))
groups_by_unbiased_scores = route_with(replace(_RIGHT, group_score="unbiased"))
logits_bf16 = route_with(replace(_RIGHT, logits=torch.bfloat16))
scores_bf16 = route_with(replace(_RIGHT, scores=torch.bfloat16))
weights_bf16 = route_with(replace(_RIGHT, weights=torch.bfloat16))
sorted_by_index = route_with(replace(_RIGHT, order="index"))
last_expert_unseen = route_with(replace(_RIGHT, last_expert=False))
bias_of_batch_mate = route_with(replace(_RIGHT, mate=True))

hash_row_of_first_token = hash_with(_RIGHT, select="first_row")
hash_selects_by_score = hash_with(_RIGHT, select="score")
hash_sorts_experts = hash_with(_RIGHT, order="index")
hash_weights_equal = hash_with(_RIGHT, equal=True)
hash_sigmoid = hash_with(replace(_RIGHT, scoring="sigmoid"))
hash_softplus_naive = hash_with(replace(_RIGHT, log1p="naive"))
hash_eps_as_minimum = hash_with(replace(_RIGHT, eps="minimum"))
hash_padding_reads_last_row = hash_with(replace(_RIGHT, mask="ignored"))
hash_by_position = hash_with(_RIGHT, select="position")

replica_product_wraps = replicas_with(wraps=True)
replica_ignores_rank = replicas_with(replica="ignores_rank")
replica_of_width = replicas_with(replica="of_width")
replica_always_first = replicas_with(replica="first")
replica_row_within_expert = replicas_with(replica="within_expert")
replica_of_empty_slot = replicas_with(empty="indexed")
