"""Mixture of experts: tokens go to the experts of their slots, and the outputs come back into one row.

A token has k slots, each with an expert and a routing weight (`router`). `dispatch` lays the slots out expert by
expert, so that each expert is one product of consecutive rows; `combine` adds up what comes back:

    u = bf16(x · w13ᵀ)                    both halves, FP8 rows against the expert's weights
    v = silu(min(a, 10)) · clamp(c) · w   the routing weight stands before the quantiser and the down projection
    o = bf16(Q8(v) · w2ᵀ)
    y = bf16(o_shared + o_1 + ... + o_k)  one slot after the other, in fp32

The order of the last sum is the declared slot order, whatever the layout, the ranks or the replicas are. A library
that first sums the experts of each rank and rounds that sum computes something else (`Combine.MULTIPLE`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_shape
from .config import Combine, MoeConfig
from .linear import linear_codes, linear_grouped
from .numerics import CONTRACT, Numerics
from .swiglu import swiglu_quant
from .weights import ExpertWeights

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def dispatch(idx_tk: Tensor, *, num_experts: int, alignment: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay the slots out expert by expert, the rows of an expert in the order of the tokens.

    Math:
        start[e] = end[e - 1] rounded up to `alignment`, end[e] = start[e] + number of slots of expert e
        row[t, j] = start[idx[t, j]] + number of earlier slots (t, then j) of the same expert
        slot[row[t, j]] = t * k + j

    Shapes:
        idx_tk: int64 [t, k], -1 for no expert; returns int32 row_tk [t, k], slot_y [y] and end_e [e], with
        y = t * k + min(e, t * k) * (alignment - 1) rounded up to `alignment`: enough for every routing.

    Edges:
        a slot without an expert has row -1. A row that no slot has (padding between experts, or the unused end) has
        slot -1. An expert without tokens has no rows; its end is its start.

    Raises:
        ValueError: idx_tk is not 2-D, or names an expert outside 0 .. e - 1; num_experts or alignment is below 1.
        TypeError: idx_tk is not int64.

    Source:
        v41-blocks.md section 1.3 (prefix sums of true ends)
    """
    dims: dict[str, int] = {}
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_dtype("idx_tk", idx_tk, torch.int64)
    for name, value in (("num_experts", num_experts), ("alignment", alignment)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    expect_in_range("idx_tk", idx_tk, -1, num_experts)
    slots = idx_tk.numel()
    num_rows = -(-(slots + min(num_experts, slots) * (alignment - 1)) // alignment) * alignment
    row_y, slot_y = idx_tk.new_full((slots,), -1), idx_tk.new_full((num_rows,), -1)
    end_e = idx_tk.new_zeros(num_experts)
    end = 0
    for expert in range(num_experts):
        start = -(-end // alignment) * alignment
        mine = (idx_tk.flatten() == expert).nonzero().flatten()
        end = start + len(mine)
        row_y[mine] = torch.arange(start, end, device=idx_tk.device)
        slot_y[start:end] = mine
        end_e[expert] = end
    return row_y.view(idx_tk.shape).to(torch.int32), slot_y.to(torch.int32), end_e.to(torch.int32)


def gather_rows(x_tm: Tensor, slot_y: Tensor, *, topk: int) -> Tensor:
    """Copy each token's row to the rows of its slots: `dispatch` applied to one tensor.

    Math:
        out[y, :] = x[slot[y] // topk, :], bytes as they are

    Shapes:
        x_tm: [t, m] of any dtype; slot_y: int32 [y]; returns [y, m] of the same dtype.

    Edges:
        rows with slot -1 are zero, whatever stands in x.

    Raises:
        ValueError: shapes disagree; topk is below 1; a slot lies outside 0 .. t * topk - 1.
        TypeError: slot_y is not int32.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("slot_y", slot_y, "y", dims)
    expect_dtype("slot_y", slot_y, torch.int32)
    if topk < 1:
        raise ValueError(f"topk: expected at least 1, got {topk}")
    expect_in_range("slot_y", slot_y, -1, dims["t"] * topk)
    rows_ym = x_tm.new_zeros(len(slot_y), dims["m"])
    used_y = slot_y >= 0
    rows_ym[used_y] = x_tm[slot_y[used_y].long() // topk]
    return rows_ym


def combine(
    expert_ym: Tensor,
    row_tk: Tensor,
    rank_tk: Tensor | None,
    node_tk: Tensor | None,
    shared_tm: Tensor | None,
    *,
    rule: Combine,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Add up what the experts of a token returned.

    Math:
        SINGLE:   y[t] = shared[t] + o[row[t, 0]] + ... + o[row[t, k - 1]]
        MULTIPLE: the slots of one rank are added first, in slot order, and the rounded sum takes the place of the last
        of them; with node_tk the sums of the ranks of one node are added in the same way; then as SINGLE.

    Shapes:
        expert_ym: [y, m]; row_tk: int32 [t, k], -1 for an empty slot; rank_tk, node_tk: int32 [t, k], the rank that
        holds the slot's expert and the node of that rank; shared_tm: [t, m] or None; returns [t, m].

    Rounding:
        every addition to fp32, from zero on; partial sums (MULTIPLE) and the result to `dtype`.

    Edges:
        empty slots are skipped and their rank is not read; a token without any gives shared, or zeros. The sum of a
        rank that holds one slot of the token is that slot. Rows that no slot names may hold NaN.

    Raises:
        ValueError: shapes disagree; a row lies outside 0 .. y - 1; rank_tk comes with SINGLE or is missing with
            MULTIPLE; node_tk comes without rank_tk.
        TypeError: rows, ranks or nodes are not int32, outputs not floating; `dtype` is no storage dtype.

    Source:
        v41-blocks.md section 1.1 (combine), runtime.md section 3.2
    """
    dims: dict[str, int] = {}
    expect_shape("expert_ym", expert_ym, "ym", dims)
    expect_shape("row_tk", row_tk, "tk", dims)
    expect_dtype("expert_ym", expert_ym, *FLOATING)
    expect_dtype("row_tk", row_tk, torch.int32)
    expect_in_range("row_tk", row_tk, -1, dims["y"])
    _check_ranks(rank_tk, node_tk, rule, dims)
    valid_tk = row_tk >= 0
    values_tkm = torch.zeros(*row_tk.shape, dims["m"], dtype=num.carrier, device=row_tk.device)
    values_tkm[valid_tk] = num.wide(expert_ym[row_tk[valid_tk].long()])
    for group_tk in (rank_tk, node_tk):
        if group_tk is not None:
            values_tkm, valid_tk = _partial_sums(values_tkm, valid_tk, group_tk, dtype, num)
    y_tm = torch.zeros(row_tk.shape[0], dims["m"], dtype=num.carrier, device=row_tk.device)
    if shared_tm is not None:
        expect_shape("shared_tm", shared_tm, "tm", dims)
        expect_dtype("shared_tm", shared_tm, *FLOATING)
        y_tm = num.f32(y_tm + num.wide(shared_tm))
    for j in range(dims["k"]):
        y_tm = torch.where(valid_tk[:, j, None], num.f32(y_tm + values_tkm[:, j]), y_tm)
    return num.store(y_tm, dtype)


def expert_up(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    group_sizes_e: Tensor,
    weight_y: Tensor,
    *,
    config: MoeConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """The first half of an expert: gate and up projection, SwiGLU with the routing weight, quantiser.

    Shapes:
        x_q, x_sf: [y, m] in config.activation, expert by expert, `group_sizes_e[e]` rows for expert e; w_q, w_sf:
        w1 above w3, [e, 2f, m] in config.routed; group_sizes_e: [e], int32 or int64; weight_y: [y]; returns codes
        [y, f] and their scales in config.activation.

    Rounding:
        both projections to bf16, then as `swiglu_quant`.

    Raises:
        TypeError: as `linear_grouped` and `swiglu_quant`.
        ValueError: as `linear_grouped` and `swiglu_quant`.

    Source:
        v41-blocks.md section 1.1
    """
    h_yi = linear_grouped(x_q, x_sf, w_q, w_sf, group_sizes_e, x_fmt=config.activation, w_fmt=config.routed, num=num)
    return swiglu_quant(h_yi, weight_y, limit=config.swiglu_limit, fmt=config.activation, num=num)


def moe(
    x_q: Tensor,
    x_sf: Tensor,
    idx_tk: Tensor,
    weights_tk: Tensor,
    rank_e: Tensor | None,
    experts: ExpertWeights,
    shared: ExpertWeights | None,
    *,
    config: MoeConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The feed-forward block of a token: its routed experts and the shared one.

    Math:
        see the module docstring.

    Shapes:
        x_q, x_sf: [t, m] in config.activation; idx_tk: int64 [t, k], -1 for no expert; weights_tk: fp32 [t, k];
        rank_e: int32 [e], the rank of each expert (for MULTIPLE); experts: weights in config.routed with a leading
        axis e; shared: weights in config.shared, or None; returns [t, m].

    Rounding:
        up projections and expert outputs to bf16, what stands between them to config.activation, then as `combine`.

    Edges:
        a token without experts (padding) gives the shared expert's row. An all-zero row gives zeros.

    Raises:
        ValueError: shapes disagree, or do not fit the formats; an expert lies outside 0 .. e - 1; rank_e comes with
            SINGLE or is missing with MULTIPLE.
        TypeError: an operand has another dtype than its format says; weights are not fp32, ranks not int32.

    Source:
        v41-blocks.md section 1.1
    """
    dims: dict[str, int] = {}
    expect_shape("x_q", x_q, "tm", dims)
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_shape("weights_tk", weights_tk, "tk", dims)
    expect_dtype("weights_tk", weights_tk, torch.float32, torch.float64)
    expect_shape("experts.w13_q", experts.w13_q, "eij", dims)
    rank_tk = None
    row_tk, slot_y, end_e = dispatch(idx_tk, num_experts=dims["e"], alignment=1)
    if rank_e is not None:
        expect_shape("rank_e", rank_e, "e", dims)
        expect_dtype("rank_e", rank_e, torch.int32)
        rank_tk = rank_e[idx_tk.clamp(min=0)]
    _check_ranks(rank_tk, None, config.combine, dims)
    slot_y = slot_y[slot_y >= 0]
    sizes_e = torch.diff(end_e, prepend=end_e.new_zeros(1))
    rows_q, rows_sf = (gather_rows(x, slot_y, topk=dims["k"]) for x in (x_q, x_sf))
    weight_y = weights_tk.flatten()[slot_y.long()]
    v = expert_up(rows_q, rows_sf, experts.w13_q, experts.w13_sf, sizes_e, weight_y, config=config, num=num)
    product = partial(linear_grouped, x_fmt=config.activation, w_fmt=config.routed, num=num)
    expert_ym = product(*v, experts.w2_q, experts.w2_sf, sizes_e)
    shared_tm = None if shared is None else _shared_expert(x_q, x_sf, shared, config, num)
    return combine(expert_ym, row_tk, rank_tk, None, shared_tm, rule=config.combine, num=num)


def _shared_expert(x_q: Tensor, x_sf: Tensor, shared: ExpertWeights, config: MoeConfig, num: Numerics) -> Tensor:
    """The same limits, no routing weight."""
    product = partial(linear_codes, x_fmt=config.activation, w_fmt=config.shared, num=num)
    h_ti = product(x_q, x_sf, shared.w13_q, shared.w13_sf)
    v_q, v_sf = swiglu_quant(h_ti, limit=config.swiglu_limit, fmt=config.activation, num=num)
    return product(v_q, v_sf, shared.w2_q, shared.w2_sf)


def _partial_sums(
    values_tkm: Tensor, valid_tk: Tensor, group_tk: Tensor, dtype: torch.dtype, num: Numerics
) -> tuple[Tensor, Tensor]:
    """Slots of one group added up in slot order; the rounded sum stands in the group's last slot, the only one left."""
    sums, is_last = [], []
    num_slots = valid_tk.shape[1]
    for j in range(num_slots):
        same_tk = valid_tk & valid_tk[:, j, None] & (group_tk == group_tk[:, j, None])
        partial_tm = torch.zeros_like(values_tkm[:, 0])
        for i in range(j + 1):
            partial_tm = torch.where(same_tk[:, i, None], num.f32(partial_tm + values_tkm[:, i]), partial_tm)
        sums.append(num.store(partial_tm, dtype))
        is_last.append(valid_tk[:, j] & ~same_tk[:, j + 1 :].any(-1))
    if not num_slots:
        return values_tkm, valid_tk
    return torch.stack(sums, 1), torch.stack(is_last, 1)


def _check_ranks(rank_tk: Tensor | None, node_tk: Tensor | None, rule: Combine, dims: dict[str, int]) -> None:
    if (rank_tk is not None) != (rule is Combine.MULTIPLE):
        given = "none" if rank_tk is None else "ranks"
        raise ValueError(f"rank_tk: expected ranks with MULTIPLE and none with SINGLE, got {given} with {rule.name}")
    if node_tk is not None and rank_tk is None:
        raise ValueError("node_tk: expected with rank_tk, got it alone")
    for name, group_tk in (("rank_tk", rank_tk), ("node_tk", node_tk)):
        if group_tk is not None:
            expect_shape(name, group_tk, "tk", dims)
            expect_dtype(name, group_tk, torch.int32)
