"""Fast routers; the contract is `reference/router.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_finite, expect_in_range, expect_shape
from deeptwin.reference.config import GroupScore, RouterConfig, Scoring, WeightSum

from .providers import packed, tile_kernels

STORAGE = (torch.bfloat16, torch.float16, torch.float32)


def route_triton(
    logits_te: Tensor,
    bias_e: Tensor,
    bias_vl_e: Tensor | None,
    image_mask_t: Tensor | None,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
    trusted: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.router.route`.

    Inspecting values waits for the device. Without it bad ones give meaningless rows, never an expert that the biases
    disable.

    Raises:
        ValueError: shapes disagree; bias_vl_e and image_mask_t do not come together; an `out` buffer does not fit;
            where values are inspected: logits of a token are not finite, a bias is NaN or +inf, or the biases leave
            fewer than `topk` experts to select from.
        TypeError: logits or biases are not fp32, masks not bool, `dtype` is no storage dtype.
        NotImplementedError: more than 1024 experts or 32 selected; groups whose size is no power of two.
    """
    t = _check_logits(logits_te, mask_t, config, dtype, trusted)
    _check_biases(bias_e, bias_vl_e, image_mask_t, t, config, trusted)
    from deeptwin.kernels.triton_ops import router

    return router.route(
        logits_te,
        bias_e,
        bias_vl_e,
        image_mask_t,
        mask_t,
        topk=config.topk,
        sigmoid=config.scoring is Scoring.SIGMOID,
        plus_eps=config.weight_sum is WeightSum.PLUS_EPS,
        route_scale=config.route_scale,
        groups=(config.num_groups, config.kept_groups),
        top2=config.group_score is GroupScore.TOP2_SUM,
        dtype=dtype,
        out=out,
    )


def route_hash_triton(
    logits_te: Tensor,
    token_t: Tensor,
    table_vk: Tensor,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
    trusted: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.router.route_hash`; values are inspected as in `route_triton`.

    Raises:
        ValueError: shapes disagree; an `out` buffer does not fit; where values are inspected: logits of a token are
            not finite, a token id lies outside the table, an expert outside 0 .. e - 1, or a row names one twice.
        TypeError: logits are not fp32, ids no integers, the mask not bool; `dtype` is no storage dtype.
        NotImplementedError: more than 1024 experts or 32 selected.
    """
    t = _check_logits(logits_te, mask_t, config, dtype, trusted)
    expect_shape("token_t", token_t, "t", {"t": t})
    expect_shape("table_vk", table_vk, "vk", {"k": config.topk})
    expect_dtype("token_t", token_t, torch.int64, torch.int32)
    expect_dtype("table_vk", table_vk, torch.int64, torch.int32)
    if not trusted:
        read_t = token_t if mask_t is None else token_t[mask_t]
        expect_in_range("token_t", read_t, 0, table_vk.shape[0])
        rows_tk = table_vk[read_t.long()].sort(-1).values
        expect_in_range("table_vk", rows_tk, 0, config.num_experts)
        if (rows_tk[:, 1:] == rows_tk[:, :-1]).any():
            raise ValueError(f"table_vk: expected {config.topk} different experts in a row, got one twice")
    from deeptwin.kernels.triton_ops import router

    return router.route_hash(
        logits_te,
        token_t,
        table_vk,
        mask_t,
        sigmoid=config.scoring is Scoring.SIGMOID,
        plus_eps=config.weight_sum is WeightSum.PLUS_EPS,
        route_scale=config.route_scale,
        dtype=dtype,
        out=out,
    )


def map_replicas_triton(
    idx_tk: Tensor,
    map_ej: Tensor,
    count_e: Tensor,
    *,
    ep_rank: int,
    trusted: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.router.map_replicas`, with the exact product.

    Raises:
        ValueError: shapes disagree; ep_rank is negative; `out` does not fit; where values are inspected: an expert lies
            outside the map, or a count is below 1 or above the width of the map.
        TypeError: an argument or `out` is not of its integer dtype.
    """
    dims: dict[str, int] = {}
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_shape("map_ej", map_ej, "ej", dims)
    expect_shape("count_e", count_e, "e", dims)
    expect_dtype("idx_tk", idx_tk, torch.int64)
    expect_dtype("map_ej", map_ej, torch.int64, torch.int32)
    expect_dtype("count_e", count_e, map_ej.dtype)
    if ep_rank < 0:
        raise ValueError(f"ep_rank: expected 0 or more, got {ep_rank}")
    if not trusted:
        expect_in_range("idx_tk", idx_tk, -1, dims["e"])
        expect_in_range("count_e", count_e, 1, dims["j"] + 1)
    from deeptwin.kernels.triton_ops import router

    return router.map_replicas(idx_tk, map_ej, count_e, ep_rank=ep_rank, out=out)


def route_tile_kernels(
    logits_te: Tensor,
    bias_e: Tensor,
    bias_vl_e: Tensor | None,
    image_mask_t: Tensor | None,
    mask_t: Tensor | None,
    *,
    config: RouterConfig,
    dtype: torch.dtype = torch.float32,
    trusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """`route` by `moe_topk_gate_forward` of TileKernels 2.1.0 (SM90, SM100).

    Layout: logits are packed if they are not. Ties go to the smaller expert, 1e-20 is added to the sum. A logit of a
    token that is not finite traps on the device and costs the context: values are inspected as in `route_triton`, or
    the caller vouches for them. Launches repeat, and no row depends on its batch.

    Raises:
        ValueError: as `route_triton`.
        TypeError: as `route_triton`.
        NotImplementedError: no TileKernels 2.x; sigmoid scores, groups, the exact sum, another dtype than fp32, more
            than 32 selected, or experts that are no multiple of 4.
    """
    t = _check_logits(logits_te, mask_t, config, dtype, trusted)
    _check_biases(bias_e, bias_vl_e, image_mask_t, t, config, trusted)
    kind = (config.scoring, config.weight_sum, config.num_groups)
    if kind != (Scoring.SQRT_SOFTPLUS, WeightSum.PLUS_EPS, 1) or config.topk > 32 or config.num_experts % 4:
        raise NotImplementedError(f"config: expected sqrt-softplus, no groups, sum + 1e-20, 4·n experts, got {config}")
    if dtype is not torch.float32:
        raise NotImplementedError(f"dtype: expected float32, got {dtype}")
    idx_tk, weights_tk = tile_kernels().moe.moe_topk_gate_forward(
        packed(logits_te),
        config.topk,
        use_shared_as_routed=False,
        num_shared_experts=0,
        routed_scaling_factor=config.route_scale,
        ep_rank=0,
        mask=mask_t,
        bias=packed(bias_e),
        image_bias=None if bias_vl_e is None else packed(bias_vl_e),
        image_token_mask=image_mask_t,
    )
    return idx_tk, weights_tk


def _check_biases(
    bias_e: Tensor,
    bias_vl_e: Tensor | None,
    image_mask_t: Tensor | None,
    tokens: int,
    config: RouterConfig,
    trusted: bool,
) -> None:
    if (bias_vl_e is None) != (image_mask_t is None):
        raise ValueError(f"bias_vl_e: expected together with image_mask_t, got {bias_vl_e is not None} alone")
    _check_bias("bias_e", bias_e, config, trusted)
    if bias_vl_e is not None and image_mask_t is not None:
        _check_bias("bias_vl_e", bias_vl_e, config, trusted)
        expect_shape("image_mask_t", image_mask_t, "t", {"t": tokens})
        expect_dtype("image_mask_t", image_mask_t, torch.bool)


def _check_logits(
    logits_te: Tensor, mask_t: Tensor | None, config: RouterConfig, dtype: torch.dtype, trusted: bool
) -> int:
    expect_shape("logits_te", logits_te, "te", {"e": config.num_experts})
    expect_dtype("logits_te", logits_te, torch.float32)
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    if mask_t is not None:
        expect_shape("mask_t", mask_t, "t", {"t": logits_te.shape[0]})
        expect_dtype("mask_t", mask_t, torch.bool)
    if not trusted:
        expect_finite("logits_te", logits_te if mask_t is None else logits_te.masked_fill(~mask_t[:, None], 0))
    return logits_te.shape[0]


def _check_bias(name: str, bias_e: Tensor, config: RouterConfig, trusted: bool) -> None:
    expect_shape(name, bias_e, "e", {"e": config.num_experts})
    expect_dtype(name, bias_e, torch.float32)
    if trusted:
        return
    is_enabled = bias_e > -torch.inf
    expect_finite(name, torch.where(bias_e == -torch.inf, 0, bias_e))
    counts = sorted(is_enabled.view(config.num_groups, config.group_size).sum(1).tolist())
    needs_two = config.num_groups > 1 and config.group_score is GroupScore.TOP2_SUM
    usable = [count for count in counts if count > needs_two]
    if len(usable) < config.kept_groups or sum(usable[: config.kept_groups]) < config.topk:
        raise ValueError(f"{name}: expected at least {config.topk} enabled experts in any kept groups")
