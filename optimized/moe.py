"""Fast mixture of experts; the contract is `reference/moe.py`."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_in_range, expect_multiple, expect_shape
from deeptwin.reference.config import Combine, MoeConfig

from .linear import _check_grouped, linear_codes_triton, linear_grouped_triton
from .swiglu import swiglu_quant_triton

STORAGE = (torch.bfloat16, torch.float16, torch.float32)
MOST_SLOTS = 32


class Experts(Protocol):
    """Quantised weights of experts, as `reference.weights.ExpertWeights` holds them."""

    @property
    def w13_q(self) -> Tensor: ...

    @property
    def w13_sf(self) -> Tensor: ...

    @property
    def w2_q(self) -> Tensor: ...

    @property
    def w2_sf(self) -> Tensor: ...


def dispatch_triton(
    idx_tk: Tensor,
    *,
    num_experts: int,
    alignment: int,
    trusted: bool = False,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.moe.dispatch`. Inspecting values waits for the device; without it an unknown expert counts as -1.

    Raises:
        ValueError: idx_tk is not 2-D, or names an expert outside 0 .. e - 1; num_experts or alignment is below 1; an
            `out` buffer does not fit.
        TypeError: idx_tk is not int64; an `out` buffer is not int32.
    """
    expect_shape("idx_tk", idx_tk, "tk", {})
    expect_dtype("idx_tk", idx_tk, torch.int64)
    for name, value in (("num_experts", num_experts), ("alignment", alignment)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if not trusted:
        expect_in_range("idx_tk", idx_tk, -1, num_experts)
    from deeptwin.kernels.triton_ops import moe as kernels

    return kernels.dispatch(idx_tk, num_experts=num_experts, alignment=alignment, out=out)


def gather_rows_triton(
    x_tm: Tensor, slot_y: Tensor, *, topk: int, trusted: bool = False, out: Tensor | None = None
) -> Tensor:
    """`reference.moe.gather_rows`.

    Raises:
        ValueError: shapes disagree; topk is below 1; a slot lies outside 0 .. t * topk - 1 (where values are
            inspected); `out` does not fit.
        TypeError: slot_y is not int32; `out` has another dtype.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("slot_y", slot_y, "y", dims)
    expect_dtype("slot_y", slot_y, torch.int32)
    if topk < 1:
        raise ValueError(f"topk: expected at least 1, got {topk}")
    if not trusted:
        expect_in_range("slot_y", slot_y, -1, dims["t"] * topk)
    from deeptwin.kernels.triton_ops import moe as kernels

    return kernels.gather_rows(x_tm, slot_y, topk=topk, out=out)


def combine_triton(
    expert_ym: Tensor,
    row_tk: Tensor,
    rank_tk: Tensor | None,
    node_tk: Tensor | None,
    shared_tm: Tensor | None,
    *,
    rule: Combine,
    dtype: torch.dtype = torch.bfloat16,
    trusted: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.moe.combine`.

    Raises:
        ValueError: shapes disagree; a row lies outside 0 .. y - 1 (where values are inspected); rank_tk comes with
            SINGLE or is missing with MULTIPLE; node_tk comes without rank_tk; `out` does not fit.
        TypeError: rows, ranks or nodes are not int32; outputs or `dtype` are not bf16, fp16 or fp32; `out` has another
            dtype.
        NotImplementedError: more than 32 slots.
    """
    dims: dict[str, int] = {}
    expect_shape("expert_ym", expert_ym, "ym", dims)
    expect_shape("row_tk", row_tk, "tk", dims)
    expect_dtype("expert_ym", expert_ym, *STORAGE)
    expect_dtype("row_tk", row_tk, torch.int32)
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    if dims["k"] > MOST_SLOTS:
        raise NotImplementedError(f"row_tk: expected at most {MOST_SLOTS} slots, got {dims['k']}")
    _check_ranks(rank_tk, rule)
    if node_tk is not None and rank_tk is None:
        raise ValueError("node_tk: expected with rank_tk, got it alone")
    for name, group_tk in (("rank_tk", rank_tk), ("node_tk", node_tk)):
        if group_tk is not None:
            expect_shape(name, group_tk, "tk", dims)
            expect_dtype(name, group_tk, torch.int32)
    if shared_tm is not None:
        expect_shape("shared_tm", shared_tm, "tm", dims)
        expect_dtype("shared_tm", shared_tm, *STORAGE)
    if not trusted:
        expect_in_range("row_tk", row_tk, -1, dims["y"])
    from deeptwin.kernels.triton_ops import moe as kernels

    return kernels.combine(expert_ym, row_tk, rank_tk, node_tk, shared_tm, dtype=dtype, out=out)


def expert_up_triton(
    x_q: Tensor,
    x_sf: Tensor,
    w_q: Tensor,
    w_sf: Tensor,
    group_sizes_e: Tensor,
    weight_y: Tensor,
    *,
    config: MoeConfig,
    trusted: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.moe.expert_up` in one launch. Values are not inspected; with `trusted` the sizes neither.

    Raises:
        TypeError: an operand has another dtype than its format says; group_sizes_e is neither int32 nor int64;
            weight_y is not bf16, fp16 or fp32; an `out` buffer has another dtype.
        ValueError: shapes disagree or do not fit the formats; a size is negative, or the sizes do not add up to y; an
            `out` buffer does not fit.
        NotImplementedError: as `linear_grouped_triton`.
    """
    fmt, w_fmt = config.activation, config.routed
    _check_grouped((x_q, x_sf), (w_q, w_sf), group_sizes_e, fmt, w_fmt, trusted)
    expect_multiple("w_q (features)", w_q.shape[1], 2 * fmt.group)
    expect_shape("weight_y", weight_y, "y", {"y": x_q.shape[0]})
    expect_dtype("weight_y", weight_y, *STORAGE)
    from deeptwin.kernels.triton_ops import moe_expert

    return moe_expert.expert_up(
        x_q,
        x_sf,
        w_q,
        w_sf,
        group_sizes_e,
        weight_y,
        x_group=fmt.group,
        w_block=(w_fmt.rows, w_fmt.group),
        scale=fmt.scale.value,
        limit=config.swiglu_limit,
        amax_floor=fmt.amax_floor,
        out=out,
    )


def moe_triton(
    x_q: Tensor,
    x_sf: Tensor,
    idx_tk: Tensor,
    weights_tk: Tensor,
    rank_e: Tensor | None,
    experts: Experts,
    shared: Experts | None,
    *,
    config: MoeConfig,
    trusted: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.moe.moe`: dispatch, first half of the experts, grouped product, combine.

    Rows that no slot has are zero and belong to the last expert, so that no size is read back from the device.

    Raises:
        ValueError: shapes disagree, or do not fit the formats; an expert lies outside 0 .. e - 1 (where values are
            inspected); rank_e comes with SINGLE or is missing with MULTIPLE; `out` does not fit.
        TypeError: an operand has another dtype than its format says; weights are not fp32, ranks not int32; `out` has
            another dtype.
        NotImplementedError: more than 32 slots; as the products and the quantiser.
    """
    dims: dict[str, int] = {}
    expect_shape("x_q", x_q, "tm", dims)
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_shape("weights_tk", weights_tk, "tk", dims)
    expect_dtype("weights_tk", weights_tk, torch.float32)
    expect_shape("experts.w13_q", experts.w13_q, "eij", dims)
    if dims["k"] > MOST_SLOTS:
        raise NotImplementedError(f"idx_tk: expected at most {MOST_SLOTS} slots, got {dims['k']}")
    _check_ranks(rank_e, config.combine)
    rank_tk = None
    if rank_e is not None:
        expect_shape("rank_e", rank_e, "e", dims)
        expect_dtype("rank_e", rank_e, torch.int32)
        rank_tk = rank_e[idx_tk.clamp(min=0)]
    row_tk, slot_y, end_e = dispatch_triton(idx_tk, num_experts=dims["e"], alignment=1, trusted=trusted)
    end_e[-1:] = len(slot_y)
    sizes_e = torch.diff(end_e, prepend=end_e.new_zeros(1))
    rows_q, rows_sf = (gather_rows_triton(x, slot_y, topk=dims["k"], trusted=True) for x in (x_q, x_sf))
    weight_y = gather_rows_triton(weights_tk.reshape(-1, 1), slot_y, topk=1, trusted=True).squeeze(1)
    v = expert_up_triton(rows_q, rows_sf, experts.w13_q, experts.w13_sf, sizes_e, weight_y, config=config, trusted=True)
    expert_ym = linear_grouped_triton(
        *v,
        experts.w2_q,
        experts.w2_sf,
        sizes_e,
        x_fmt=config.activation,
        w_fmt=config.routed,
        trusted=True,
    )
    shared_tm = None if shared is None else _shared_expert(x_q, x_sf, shared, config)
    return combine_triton(expert_ym, row_tk, rank_tk, None, shared_tm, rule=config.combine, trusted=True, out=out)


def _shared_expert(x_q: Tensor, x_sf: Tensor, shared: Experts, config: MoeConfig) -> Tensor:
    product = partial(linear_codes_triton, x_fmt=config.activation, w_fmt=config.shared)
    h_ti = product(x_q, x_sf, shared.w13_q, shared.w13_sf)
    v_q, v_sf = swiglu_quant_triton(h_ti, limit=config.swiglu_limit, fmt=config.activation)
    return product(v_q, v_sf, shared.w2_q, shared.w2_sf)


def _check_ranks(ranks: Tensor | None, rule: Combine) -> None:
    if (ranks is not None) != (rule is Combine.MULTIPLE):
        given = "none" if ranks is None else "ranks"
        raise ValueError(f"rank_tk: expected ranks with MULTIPLE and none with SINGLE, got {given} with {rule.name}")
