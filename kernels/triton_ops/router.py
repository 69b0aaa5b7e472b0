"""Routers: scores, ranking with deterministic ties, weights; one program a token, whose experts lie side by side.

Exponential and logarithm are evaluated here with fp32 additions and products, so that a score is right to a few units
in the last place on every device (the fast functions of some lose half of the bits), and far below zero too.
The selected scores are summed over a tree of strides K/2 … 2, 1. Nothing depends on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer

MOST_EXPERTS = 1024
MOST_SELECTED = 32


@dataclass(frozen=True, kw_only=True)
class RouteLaunch:
    """Lanes for the experts and for the selected ones. The number of warps changes no result."""

    experts: int
    selected: int
    num_warps: int = 1


def route_launch(num_experts: int, topk: int) -> RouteLaunch:
    """Powers of two, whatever the batch and the device.

    Raises:
        NotImplementedError: more than 1024 experts, or more than 32 selected.
    """
    if num_experts > MOST_EXPERTS:
        raise NotImplementedError(f"config: expected at most {MOST_EXPERTS} experts, got {num_experts}")
    if topk > MOST_SELECTED:
        raise NotImplementedError(f"config: expected at most {MOST_SELECTED} selected experts, got {topk}")
    return RouteLaunch(
        experts=max(triton.next_power_of_2(num_experts), 32), selected=max(triton.next_power_of_2(topk), 2)
    )


@triton.jit
def exp_of_negative(x):
    """e^x for x ≤ 0, down to the smallest subnormal: 2^n · e^r with |r| ≤ ln 2 / 2."""
    x = tl.maximum(x, -120.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = x - n * 0.693359375  # 10 bits of ln 2: the product is exact
    r = r - n * -2.12194440e-4
    p = 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r * r + r + 1.0
    # 2^n in two normal factors: n goes down to -173
    whole = n.to(tl.int32)
    half = whole >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    return p * first * second


@triton.jit
def _log1p_of_unit(q):
    """log(1 + q) for 0 ≤ q ≤ 1, as 2 artanh(q / (2 + q)): all terms are positive, none cancels."""
    z = tl.div_rn(q, q + 2.0)
    w = z * z
    p = w * (1.0 / 15) + 1.0 / 13
    p = p * w + 1.0 / 11
    p = p * w + 1.0 / 9
    p = p * w + 1.0 / 7
    p = p * w + 0.2
    p = p * w + 1.0 / 3
    return 2.0 * z + 2.0 * z * (w * p)


@triton.jit
def _score(x, SIGMOID: tl.constexpr):
    size = tl.abs(x)
    if SIGMOID:
        small = exp_of_negative(size * -1.0)
        score = tl.div_rn(tl.where(x >= 0, 1.0, small), 1.0 + small)
    else:
        root = exp_of_negative(size * -0.5)
        softplus = tl.maximum(x, 0.0) + _log1p_of_unit(root * root)
        # beyond -20 the root of e^x itself; beyond 20 softplus is the identity
        score = tl.where(x < -20.0, root, tl.sqrt_rn(tl.where(x > 20.0, x, softplus)))
    return score


@triton.jit
def _store_selected(
    idx,
    scores,
    active,
    row,
    idx_ptr,
    weights_ptr,
    route_scale,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    STEPS: tl.constexpr,
    PLUS_EPS: tl.constexpr,
):
    """Weights of the selected scores, and both rows of outputs. `scores` is 0 beyond TOPK."""
    stored = weights_ptr.dtype.element_ty
    total = scores
    for step in tl.static_range(STEPS):
        total = tl.sum(tl.reshape(total, [2, TOPK_PAD >> (step + 1)]), axis=0)
    total = tl.zeros([TOPK_PAD], tl.float32) + tl.sum(total, axis=0)
    total = total.to(stored).to(tl.float32)
    if PLUS_EPS:
        total = (total + 1e-20).to(stored).to(tl.float32)
    quotient = tl.div_rn(scores, total).to(stored).to(tl.float32)
    weights = tl.where(active, (quotient * route_scale).to(stored).to(tl.float32), 0.0)
    slot = tl.arange(0, TOPK_PAD)
    inside = slot < TOPK
    tl.store(idx_ptr + row * TOPK + slot, tl.where(active, idx, -1).to(tl.int64), mask=inside)
    tl.store(weights_ptr + row * TOPK + slot, weights.to(stored), mask=inside)


@triton.jit
def _without_other_groups(
    ranks, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr
):
    """Ranks with -inf for the experts of all but the KEPT best groups; ties go to the smaller group."""
    grid = tl.reshape(ranks, [GROUPS, GROUP_SIZE])
    best = tl.max(grid, axis=1)
    if TOP2:
        place = tl.arange(0, GROUP_SIZE)[None, :]
        first = tl.min(tl.where(grid == best[:, None], place, GROUP_SIZE), axis=1)
        best += tl.max(tl.where(place == first[:, None], -float("inf"), grid), axis=1)
    group = tl.arange(0, GROUPS)
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(KEPT):
        top = tl.max(best, axis=0)
        chosen = tl.min(tl.where((best == top) & (kept == 0), group, GROUPS), axis=0)
        kept = tl.where(group == chosen, 1, kept)
        best = tl.where(group == chosen, -float("inf"), best)
    return tl.reshape(tl.where(kept[:, None] > 0, grid, -float("inf")), [GROUPS * GROUP_SIZE])


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    bias_vl_ptr,
    image_ptr,
    mask_ptr,
    idx_ptr,
    weights_ptr,
    num_experts,
    stride_lt,
    route_scale,
    HAS_IMAGE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SIGMOID: tl.constexpr,
    PLUS_EPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    TOP2: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    STEPS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    # 1. scores; what stands in a padding row is not looked at
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    active = expert >= 0
    if HAS_MASK:
        active = (tl.load(mask_ptr + row) + expert * 0) != 0
    logits = tl.load(logits_ptr + row * stride_lt + expert, mask=inside, other=0.0)
    scores = _score(tl.where(active, logits, 0.0), SIGMOID).to(weights_ptr.dtype.element_ty).to(tl.float32)
    # 2. ranks
    bias = tl.load(bias_ptr + expert, mask=inside, other=0.0)
    if HAS_IMAGE:
        bias_vl = tl.load(bias_vl_ptr + expert, mask=inside, other=0.0)
        bias = tl.where((tl.load(image_ptr + row) + expert * 0) != 0, bias_vl, bias)
    ranks = tl.where(inside, scores + bias, -float("inf"))
    if GROUPS > 1:
        ranks = _without_other_groups(ranks, GROUPS, GROUP_SIZE, KEPT, TOP2)
    # 3. the largest one after the other, of equal ranks the smallest index: ranks as integers in their order and the
    # bits of scores, none negative, because a warp reduces integers by one instruction; below all ranks stands what
    # cannot be chosen
    lowest = tl.full([EXPERTS], -0x80000000, tl.int32)
    bits = (ranks + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is +0
    keys = tl.where(ranks > -float("inf"), tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), lowest)
    score_bits = scores.to(tl.int32, bitcast=True)
    slot = tl.arange(0, TOPK_PAD)
    idx = tl.full([TOPK_PAD], -1, tl.int32)
    selected = tl.zeros([TOPK_PAD], tl.int32)
    for j in tl.static_range(TOPK):
        top = tl.max(keys, axis=0)
        # no rank is left where the biases were not inspected and disable too many: -1, not some expert
        chosen = tl.where(top > -0x80000000, tl.min(tl.where(keys == top, expert, EXPERTS), axis=0), -1)
        idx = tl.where(slot == j, chosen, idx)
        selected = tl.where(slot == j, tl.max(tl.where(expert == chosen, score_bits, 0), axis=0), selected)
        keys = tl.where(expert == chosen, lowest, keys)
    # 4. weights
    lane = slot >= 0
    if HAS_MASK:
        lane = (tl.load(mask_ptr + row) + slot * 0) != 0
    selected = selected.to(tl.float32, bitcast=True)
    _store_selected(idx, selected, lane, row, idx_ptr, weights_ptr, route_scale, TOPK, TOPK_PAD, STEPS, PLUS_EPS)


@triton.jit
def _route_hash(
    logits_ptr,
    token_ptr,
    table_ptr,
    mask_ptr,
    idx_ptr,
    weights_ptr,
    num_tokens_known,
    num_experts,
    stride_lt,
    route_scale,
    HAS_MASK: tl.constexpr,
    SIGMOID: tl.constexpr,
    PLUS_EPS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    STEPS: tl.constexpr,
):
    # 1. experts from the table, each guarded: an id that nobody inspected reads nothing
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TOPK_PAD)
    inside = slot < TOPK
    active = slot >= 0
    if HAS_MASK:
        active = (tl.load(mask_ptr + row) + slot * 0) != 0
    token = tl.load(token_ptr + row).to(tl.int64)
    known = inside & active & (token >= 0) & (token < num_tokens_known)
    idx = tl.load(table_ptr + token * TOPK + slot, mask=known, other=-1).to(tl.int64)
    known = known & (idx >= 0) & (idx < num_experts)
    # 2. scores of these alone
    logits = tl.load(logits_ptr + row * stride_lt + idx, mask=known, other=0.0)
    scores = tl.where(known, _score(logits, SIGMOID).to(weights_ptr.dtype.element_ty).to(tl.float32), 0.0)
    idx = tl.where(known, idx, -1)
    _store_selected(idx, scores, active, row, idx_ptr, weights_ptr, route_scale, TOPK, TOPK_PAD, STEPS, PLUS_EPS)


@triton.jit
def _map_replicas(
    idx_ptr, map_ptr, count_ptr, out_ptr, num_slots, topk, width, stride_it, ep_rank, BLOCK: tl.constexpr
):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = item < num_slots
    row = item // topk
    idx = tl.load(idx_ptr + row * stride_it + item % topk, mask=inside, other=-1)
    valid = idx >= 0
    count = tl.load(count_ptr + idx, mask=valid, other=1).to(tl.int64)
    # 64 bits: the product passes 2^31 at row 92 037
    replica = (row * 23333 + ep_rank) % count
    physical = tl.load(map_ptr + idx * width + replica, mask=valid, other=-1).to(tl.int64)
    tl.store(out_ptr + item, physical, mask=inside)


def route(
    logits_te: torch.Tensor,
    bias_e: torch.Tensor,
    bias_vl_e: torch.Tensor | None,
    image_mask_t: torch.Tensor | None,
    mask_t: torch.Tensor | None,
    *,
    topk: int,
    sigmoid: bool,
    plus_eps: bool,
    route_scale: float,
    groups: tuple[int, int],
    top2: bool,
    dtype: torch.dtype,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights; `groups` are the number of groups and how many are kept.

    Raises:
        NotImplementedError: more than 1024 experts or 32 selected; groups of a size that is no power of two.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: logits_te is on the CPU and kernels are not interpreted.
    """
    t, e = logits_te.shape
    launch = route_launch(e, topk)
    num_groups, kept = groups
    size = e // num_groups
    if num_groups > 1 and size & (size - 1):
        raise NotImplementedError(f"config: expected powers of two, got {num_groups} groups of {size}")
    idx_out, weights_out = out or (None, None)
    idx_tk = output_buffer(idx_out, (t, topk), torch.int64, logits_te)
    weights_tk = output_buffer(weights_out, (t, topk), dtype, logits_te)
    if not t:
        return idx_tk, weights_tk
    require_runnable("logits_te", logits_te)
    logits_te = _rows(logits_te)
    bias_e = bias_e.contiguous()
    _route[(t,)](
        logits_te,
        bias_e,
        bias_e if bias_vl_e is None else bias_vl_e.contiguous(),
        idx_tk if image_mask_t is None else image_mask_t.contiguous().view(torch.uint8),
        idx_tk if mask_t is None else mask_t.contiguous().view(torch.uint8),
        idx_tk,
        weights_tk,
        e,
        logits_te.stride(0),
        route_scale,
        HAS_IMAGE=image_mask_t is not None,
        HAS_MASK=mask_t is not None,
        SIGMOID=sigmoid,
        PLUS_EPS=plus_eps,
        # groups of places that no expert has come last: they rank below every other
        GROUPS=launch.experts // size if num_groups > 1 else 1,
        GROUP_SIZE=size,
        KEPT=kept,
        TOP2=top2,
        TOPK=topk,
        TOPK_PAD=launch.selected,
        STEPS=launch.selected.bit_length() - 1,
        EXPERTS=launch.experts,
        num_warps=launch.num_warps,
    )
    return idx_tk, weights_tk


def route_hash(
    logits_te: torch.Tensor,
    token_t: torch.Tensor,
    table_vk: torch.Tensor,
    mask_t: torch.Tensor | None,
    *,
    sigmoid: bool,
    plus_eps: bool,
    route_scale: float,
    dtype: torch.dtype,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of the table and their weights.

    Raises:
        NotImplementedError: more than 1024 experts or 32 selected.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: logits_te is on the CPU and kernels are not interpreted.
    """
    (t, e), (v, topk) = logits_te.shape, table_vk.shape
    launch = route_launch(e, topk)
    idx_out, weights_out = out or (None, None)
    idx_tk = output_buffer(idx_out, (t, topk), torch.int64, logits_te)
    weights_tk = output_buffer(weights_out, (t, topk), dtype, logits_te)
    if not t:
        return idx_tk, weights_tk
    require_runnable("logits_te", logits_te)
    logits_te = _rows(logits_te)
    _route_hash[(t,)](
        logits_te,
        token_t.contiguous(),
        table_vk.contiguous(),
        idx_tk if mask_t is None else mask_t.contiguous().view(torch.uint8),
        idx_tk,
        weights_tk,
        v,
        e,
        logits_te.stride(0),
        route_scale,
        HAS_MASK=mask_t is not None,
        SIGMOID=sigmoid,
        PLUS_EPS=plus_eps,
        TOPK=topk,
        TOPK_PAD=launch.selected,
        STEPS=launch.selected.bit_length() - 1,
        num_warps=launch.num_warps,
    )
    return idx_tk, weights_tk


def map_replicas(
    idx_tk: torch.Tensor,
    map_ej: torch.Tensor,
    count_e: torch.Tensor,
    *,
    ep_rank: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Physical experts.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: idx_tk is on the CPU and kernels are not interpreted.
    """
    physical_tk = output_buffer(out, tuple(idx_tk.shape), torch.int64, idx_tk)
    if not idx_tk.numel():
        return physical_tk
    require_runnable("idx_tk", idx_tk)
    idx_tk = _rows(idx_tk)
    block = 256
    _map_replicas[(triton.cdiv(idx_tk.numel(), block),)](
        idx_tk,
        map_ej.contiguous(),
        count_e.contiguous(),
        physical_tk,
        idx_tk.numel(),
        idx_tk.shape[1],
        map_ej.shape[1],
        idx_tk.stride(0),
        ep_rank,
        BLOCK=block,
        num_warps=4,
    )
    return physical_tk


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with adjacent elements in a row; rows may lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()
