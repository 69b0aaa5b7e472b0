"""A mixture of experts as kernels compute it, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.config import CodeKind, Combine, MoeConfig, QuantFormat, ScaleKind

from .quant import Faults as QuantFaults
from .quant import quantize_with

_calls = 0


# dispatch


def dispatch_with(
    *,
    order: str = "token",
    hole: int = -1,
    ends: str = "true",
    aligned: bool = True,
    tail: int = -1,
    chunk: int = 0,
    lost: int = 0,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The emulation with the signature of `dispatch`."""

    def dispatch(idx_tk: Tensor, *, num_experts: int, alignment: int) -> tuple[Tensor, Tensor, Tensor]:
        global _calls
        _calls += 1
        slots = idx_tk.numel()
        size = -(-(slots + min(num_experts, slots) * (alignment - 1)) // alignment) * alignment
        expert = torch.where(idx_tk < 0, hole % num_experts if hole != -1 else -1, idx_tk).flatten()
        key = torch.arange(slots)
        if order == "slot" and slots:
            key = (key % idx_tk.shape[1]) * len(idx_tk) + key // idx_tk.shape[1]
        elif order == "falling" or (order == "call" and _calls % 2):
            key = -key
        row, slot, end = torch.full((slots,), -1), torch.full((size + slots,), tail), torch.zeros(num_experts).long()
        step = alignment if aligned else 1
        last = 0
        for e in range(num_experts):
            first = -(-last // step) * step
            mine = (expert == e).nonzero().flatten()
            mine = mine[key[mine].argsort()]
            place = torch.arange(len(mine))
            if chunk:
                place = torch.cat([torch.arange(len(c)) for c in _by_chunk(mine, chunk)]) if len(mine) else place
            row[mine] = first + place
            slot[first + place] = mine
            last = first + len(mine)
            end[e] = last if ends == "true" else -(-last // step) * step
        if lost and slots:
            row[-1] = -1
        return row.view(idx_tk.shape).int(), slot[:size].int(), end.int()

    return dispatch


def _by_chunk(mine: Tensor, chunk: int) -> list[Tensor]:
    return [mine[mine // chunk == c] for c in range(int(mine[-1]) // chunk + 1)]


def rows_with(*, padding: str = "zero", token: str = "own", lost: int = 0) -> Callable[..., Tensor]:
    """The emulation with the signature of `gather_rows`."""

    def gather_rows(x_tm: Tensor, slot_y: Tensor, *, topk: int) -> Tensor:
        slot = slot_y.long().clamp(min=0)
        which = {"own": slot // topk, "slot": slot % max(len(x_tm), 1), "swapped": slot % topk % max(len(x_tm), 1)}
        rows = x_tm[which[token]].clone() if len(x_tm) else x_tm.new_zeros(len(slot_y), x_tm.shape[1])
        if padding == "zero":
            rows[slot_y < 0] = 0
        elif padding == "stale":
            rows[slot_y < 0] = 7
        if lost:
            rows[:, -1] = 0
        return rows

    return gather_rows


# combine


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What the sum of a token does wrong."""

    order: str = "slots"  # slots, backwards, rows, pairs
    shared: str = "first"  # first, last, lost, in_first_rank
    accumulator: torch.dtype = torch.float32
    store: str = "nearest"  # nearest, truncated
    partial: str = "rounded"  # rounded, unrounded
    rule: str = "asked"  # asked, multiple
    place: str = "last"  # last, first, rank
    nodes: str = "used"  # used, ignored
    ranks: str = "own"  # own, first_token
    hole: str = "skipped"  # skipped, last_row, times_nan, row_0
    empty: str = "written"  # written, stale
    lost: int = 0


def combine_with(faults: Sums) -> Callable[..., Tensor]:
    """The emulation with the signature of `combine`."""

    def combine(
        expert_ym: Tensor,
        row_tk: Tensor,
        rank_tk: Tensor | None,
        node_tk: Tensor | None,
        shared_tm: Tensor | None,
        *,
        rule: Combine,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        t, k = row_tk.shape
        x, valid = _rows_of(faults, expert_ym, row_tk)
        shared = None if shared_tm is None or faults.shared == "lost" else shared_tm.float()
        if faults.rule == "multiple" and rank_tk is None:
            rank_tk = torch.zeros_like(row_tk)
        if faults.ranks == "first_token" and rank_tk is not None and t:
            rank_tk = rank_tk[:1].expand_as(rank_tk)
        weight = torch.zeros(t, k)
        for level, group in enumerate((rank_tk, None if faults.nodes == "ignored" else node_tk)):
            if group is None:
                continue
            if level == 0 and faults.shared == "in_first_rank" and shared is not None and k:
                x[:, 0] = torch.where(valid[:, :1], shared + x[:, 0], x[:, 0])
                shared = torch.where(valid[:, :1], 0.0, shared)
            x, valid = _grouped(faults, x, valid, group, dtype)
            weight = group.float() if faults.place == "rank" else weight
        order = _order(faults, weight, row_tk)
        y = _added(faults, x.gather(1, order[..., None].expand_as(x)), valid.gather(1, order), shared, dtype)
        if faults.store == "truncated" and dtype == torch.bfloat16:
            y = (y.view(torch.int32) & -65536).view(torch.float32)
        if faults.empty == "stale":
            y[~(row_tk >= 0).any(1)] = 7.0
        return y.to(dtype)

    return combine


def _rows_of(faults: Sums, expert_ym: Tensor, row_tk: Tensor) -> tuple[Tensor, Tensor]:
    valid = row_tk >= 0
    if faults.lost and row_tk.shape[1] > 1:
        valid = valid & (torch.arange(row_tk.shape[1]) < row_tk.shape[1] - 1)
    rows = row_tk.long() if faults.hole == "last_row" else row_tk.long().clamp(min=0)
    if not len(expert_ym):
        return torch.zeros(*row_tk.shape, expert_ym.shape[1]), valid
    x = expert_ym.float()[rows]
    if faults.hole in ("last_row", "row_0"):
        return x, torch.ones_like(valid)
    if faults.hole == "times_nan":
        return torch.where(valid[..., None], x, x * torch.nan), torch.ones_like(valid)
    return torch.where(valid[..., None], x, 0.0), valid


def _grouped(faults: Sums, x: Tensor, valid: Tensor, group: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k = x.shape[1]
    sums, kept = torch.zeros_like(x), torch.zeros_like(valid)
    for j in range(k):
        same = valid & valid[:, j, None] & (group == group[:, j, None])
        for i in range(k):
            sums[:, j] = sums[:, j] + torch.where(same[:, i, None], x[:, i], 0.0)
        outer = same[:, j + 1 :] if faults.place != "first" else same[:, :j]
        kept[:, j] = valid[:, j] & ~outer.any(1)
    return (sums.to(dtype).float() if faults.partial == "rounded" else sums), kept


def _order(faults: Sums, weight: Tensor, row_tk: Tensor) -> Tensor:
    t, k = row_tk.shape
    if faults.order == "backwards":
        return torch.arange(k).flip(0).expand(t, k)
    if faults.order == "rows":
        return row_tk.long().argsort(dim=1, stable=True)
    return weight.argsort(dim=1, stable=True)


def _added(faults: Sums, x: Tensor, valid: Tensor, shared: Tensor | None, dtype: torch.dtype) -> Tensor:
    terms = [torch.where(valid[:, j, None], x[:, j], 0.0) for j in range(x.shape[1])]
    if shared is not None and faults.shared in ("first", "in_first_rank"):
        terms.insert(0, shared)
    elif shared is not None and faults.shared == "last":
        terms.append(shared)
    while faults.order == "pairs" and len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)] + terms[len(terms) // 2 * 2 :]
    y = torch.zeros(len(x), x.shape[2])
    for term in terms:
        y = (y + term).to(faults.accumulator).float()
    return y


# the whole block


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the block does wrong. `block`, `backwards` and `exponential` are honest choices."""

    block: int = 64  # channels of a product that are summed at once
    backwards: bool = False
    exponential: str = "exact"  # exact, two_units_off
    weight: str = "own"  # own, bf16, first_slot, ignored, after_down, before_up
    gate: str = "first"  # first, second
    clamp: str = "asked"  # asked, gate_below, up_above_only, none
    shared: str = "asked"  # asked, not_clamped, lost, weighted
    inner: str = "quantised"  # quantised, bf16, bf16_first, batch_scale
    up_rounded: bool = True
    output_rounded: bool = True
    nibbles: str = "low_first"
    scales: str = "own"  # own, next_row
    expert: str = "own"  # own, first_token, off_by_one, hole_0
    lost: str = "none"  # none, last_slot, channels, rows
    combine: str = "asked"  # asked, other, by_slot


def moe_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `moe`."""

    def moe(
        x_q: Tensor,
        x_sf: Tensor,
        idx_tk: Tensor,
        weights_tk: Tensor,
        rank_e: Tensor | None,
        experts: Any,
        shared: Any,
        *,
        config: MoeConfig,
    ) -> Tensor:
        x = _values(faults, x_q, x_sf, config.activation)
        t, k = idx_tk.shape
        e = experts.w13_q.shape[0]
        idx, weights = _chosen(faults, idx_tk, e), _weighed(faults, weights_tk)
        rows = torch.zeros(t * k, x.shape[1])
        for expert in range(e):
            mine = (idx.flatten() == expert).nonzero().flatten()
            if faults.lost == "rows":
                mine = mine[:64]
            if not len(mine):
                continue
            own = [getattr(experts, name)[expert] for name in ("w13_q", "w13_sf", "w2_q", "w2_sf")]
            weight = weights.flatten()[mine]
            rows[mine] = _expert(faults, x[mine // k], own, weight, config, config.routed, config.swiglu_limit)
        row_tk = torch.where(idx >= 0, torch.arange(t * k).view(t, k), -1).int()
        if faults.lost == "last_slot" and k > 1:
            row_tk[:, -1] = -1
        output = None if shared is None or faults.shared == "lost" else _shared(faults, x, shared, weights, config)
        return _summed(faults, rows, row_tk, idx, rank_e, output, config)

    return moe


def _chosen(faults: Faults, idx: Tensor, num_experts: int) -> Tensor:
    if faults.expert == "first_token" and len(idx):
        return idx[:1].expand_as(idx)
    if faults.expert == "off_by_one":
        return torch.where(idx >= 0, (idx + 1) % num_experts, -1)
    return idx.clamp(min=0) if faults.expert == "hole_0" else idx


def _weighed(faults: Faults, weights: Tensor) -> Tensor:
    if faults.weight == "bf16":
        return weights.bfloat16().float()
    if faults.weight == "first_slot" and weights.shape[1]:
        return weights[:, :1].expand_as(weights)
    weights = weights.nan_to_num(1.0) if faults.expert in ("hole_0", "first_token") else weights
    return torch.ones_like(weights) if faults.weight == "ignored" else weights


def _shared(faults: Faults, x: Tensor, shared: Any, weights: Tensor, config: MoeConfig) -> Tensor:
    limit = None if faults.shared == "not_clamped" else config.swiglu_limit
    weight = weights[:, 0].nan_to_num(1.0) if faults.shared == "weighted" and weights.shape[1] else torch.ones(len(x))
    own = [shared.w13_q, shared.w13_sf, shared.w2_q, shared.w2_sf]
    right = replace(faults, weight="own", nibbles="low_first")
    return _expert(right, x, own, weight, config, config.shared, limit)


def _expert(
    faults: Faults,
    x: Tensor,
    own: list[Tensor],
    weight: Tensor,
    config: MoeConfig,
    fmt: QuantFormat,
    limit: float | None,
) -> Tensor:
    after = faults.weight == "after_down"
    v = _activated(faults, x, own[:2], torch.ones_like(weight) if after else weight, fmt, limit)
    o = _product(faults, _inner(faults, v, config.activation), _values(faults, own[2], own[3], fmt))
    o = o.bfloat16().float() if faults.output_rounded else o
    return (o * weight[:, None]).bfloat16().float() if after else o


def _activated(
    faults: Faults, x: Tensor, own: list[Tensor], weight: Tensor, fmt: QuantFormat, limit: float | None
) -> Tensor:
    """What the quantiser between the products reads."""
    if faults.weight == "before_up":
        x, weight = x * weight[:, None], torch.ones_like(weight)
    u = _product(faults, x, _values(faults, own[0], own[1], fmt), cut=32 if faults.lost == "channels" else 0)
    u = u.bfloat16().float() if faults.up_rounded else u
    a, c = u.chunk(2, 1) if faults.gate == "first" else u.chunk(2, 1)[::-1]
    if limit is not None and faults.clamp != "none":
        a = a.clamp(min=-limit if faults.clamp == "gate_below" else None, max=limit)
        c = c.clamp(min=None if faults.clamp == "up_above_only" else -limit, max=limit)
    small = torch.exp(-a.double()).float()
    if faults.exponential == "two_units_off":
        small = small * (1 + 2.0**-22)
    v = a / (1 + small) * c * weight[:, None]
    return v.bfloat16().float() if faults.inner == "bf16_first" else v


def expert_up_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `expert_up`."""

    def expert_up(
        x_q: Tensor,
        x_sf: Tensor,
        w_q: Tensor,
        w_sf: Tensor,
        group_sizes_e: Tensor,
        weight_y: Tensor,
        *,
        config: MoeConfig,
    ) -> tuple[Tensor, Tensor]:
        x, sizes = _values(faults, x_q, x_sf, config.activation), group_sizes_e.tolist()
        weight = weight_y.bfloat16().float() if faults.weight == "bf16" else weight_y
        weight = torch.ones_like(weight) if faults.weight == "ignored" else weight
        v = torch.full((len(x), w_q.shape[1] // 2), 3.0)
        start = 0
        for expert, size in enumerate(sizes):
            mine = slice(start, start + (min(size, 64) if faults.lost == "rows" else size))
            start += size
            if size:
                expert = (expert + 1) % len(sizes) if faults.expert == "off_by_one" else expert
                own = [w_q[expert], w_sf[expert]]
                v[mine] = _activated(faults, x[mine], own, weight[mine], config.routed, config.swiglu_limit)
        quant = QuantFaults(amax="batch") if faults.inner == "batch_scale" else QuantFaults()
        codes, sf = quantize_with(quant)(v, fmt=config.activation)
        return codes, sf

    return expert_up


def _inner(faults: Faults, v: Tensor, fmt: QuantFormat) -> Tensor:
    if faults.inner == "bf16":
        return v.bfloat16().float()
    quant = QuantFaults(amax="batch") if faults.inner == "batch_scale" else QuantFaults()
    codes, sf = quantize_with(quant)(v, fmt=fmt)
    return _values(Faults(), codes, sf, fmt)


def _values(faults: Faults, codes: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    if fmt.code is CodeKind.E2M1:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        low, high = (codes & 15).long(), (codes >> 4).long()
        pair = (low, high) if faults.nibbles == "low_first" else (high, low)
        value = grid[torch.stack(pair, -1)].flatten(-2)
    else:
        value = codes.float()
    scale = sf.float() if fmt.scale is not ScaleKind.UE8M0 else torch.exp2(sf.double() - 127).float()
    if faults.scales == "next_row" and fmt.rows == 1 and fmt.code is CodeKind.E2M1:
        scale = scale.roll(-1, 0)
    spread = scale.repeat_interleave(fmt.rows, 0)[: value.shape[0]].repeat_interleave(fmt.group, 1)
    return value * spread[:, : value.shape[1]]


def _product(faults: Faults, x: Tensor, w: Tensor, cut: int = 0) -> Tensor:
    width = x.shape[1] - cut
    parts = [
        # fp64 inside a block and one rounding: an fp32 BLAS call gives a row other bits in another batch
        (x[:, i : min(i + faults.block, width)].double() @ w[:, i : min(i + faults.block, width)].double().T).float()
        for i in range(0, width, faults.block)
    ]
    total = torch.zeros(len(x), len(w))
    for part in reversed(parts) if faults.backwards else parts:
        total = total + part
    return total


def _summed(
    faults: Faults,
    rows: Tensor,
    row_tk: Tensor,
    idx: Tensor,
    rank_e: Tensor | None,
    output: Tensor | None,
    config: MoeConfig,
) -> Tensor:
    rank = None if rank_e is None else rank_e[idx.clamp(min=0)]
    if faults.combine == "other":
        rank = torch.zeros_like(row_tk) if rank is None else None
    elif faults.combine == "by_slot" and rank is not None:
        rank = torch.arange(idx.shape[1]).expand_as(idx).int() // 2
    rule = Combine.SINGLE if rank is None else Combine.MULTIPLE
    return combine_with(Sums())(rows, row_tk, rank, None, output, rule=rule)


right_dispatch = dispatch_with()
dispatch_last_token_first = dispatch_with(order="falling")
dispatch_order_by_call = dispatch_with(order="call")
dispatch_by_slot_major = dispatch_with(order="slot")
dispatch_hole_is_expert_0 = dispatch_with(hole=0)
dispatch_hole_is_last_expert = dispatch_with(hole=-2)
dispatch_ends_aligned = dispatch_with(ends="aligned")
dispatch_starts_unaligned = dispatch_with(aligned=False)
dispatch_tail_stale = dispatch_with(tail=0)
dispatch_chunks_not_added = dispatch_with(chunk=128)
dispatch_last_slot_lost = dispatch_with(lost=1)

right_rows = rows_with()
rows_padding_is_row_0 = rows_with(padding="row_0")
rows_padding_stale = rows_with(padding="stale")
rows_slot_as_token = rows_with(token="slot")
rows_of_token_slots = rows_with(token="swapped")
rows_last_column_lost = rows_with(lost=1)

_SUM = Sums()
right_combine = combine_with(_SUM)
combine_shared_last = combine_with(replace(_SUM, shared="last"))
combine_shared_lost = combine_with(replace(_SUM, shared="lost"))
combine_shared_in_first_rank = combine_with(replace(_SUM, shared="in_first_rank"))
combine_slots_backwards = combine_with(replace(_SUM, order="backwards"))
combine_in_row_order = combine_with(replace(_SUM, order="rows"))
combine_pairwise = combine_with(replace(_SUM, order="pairs"))
combine_bf16_accumulator = combine_with(replace(_SUM, accumulator=torch.bfloat16))
combine_truncated = combine_with(replace(_SUM, store="truncated"))
combine_single_for_multiple = combine_with(replace(_SUM, partial="unrounded"))
combine_multiple_for_single = combine_with(replace(_SUM, rule="multiple"))
combine_ranks_in_rank_order = combine_with(replace(_SUM, place="rank"))
combine_ranks_at_first_slot = combine_with(replace(_SUM, place="first"))
combine_nodes_ignored = combine_with(replace(_SUM, nodes="ignored"))
combine_ranks_of_first_token = combine_with(replace(_SUM, ranks="first_token"))
combine_hole_is_last_row = combine_with(replace(_SUM, hole="last_row"))
combine_hole_times_nan = combine_with(replace(_SUM, hole="times_nan"))
combine_hole_is_row_0 = combine_with(replace(_SUM, hole="row_0"))
combine_empty_row_unwritten = combine_with(replace(_SUM, empty="stale"))
combine_last_slot_lost = combine_with(replace(_SUM, lost=1))

_RIGHT = Faults()
right_blocks_of_64 = moe_with(_RIGHT)
right_blocks_of_16_backwards = moe_with(replace(_RIGHT, block=16, backwards=True))
right_fast_exponential = moe_with(replace(_RIGHT, exponential="two_units_off"))
weight_after_down = moe_with(replace(_RIGHT, weight="after_down"))
weight_before_up = moe_with(replace(_RIGHT, weight="before_up"))
weight_bf16 = moe_with(replace(_RIGHT, weight="bf16"))
weight_of_first_slot = moe_with(replace(_RIGHT, weight="first_slot"))
weight_ignored = moe_with(replace(_RIGHT, weight="ignored"))
gate_and_up_swapped = moe_with(replace(_RIGHT, gate="second"))
gate_clamped_below = moe_with(replace(_RIGHT, clamp="gate_below"))
up_clamped_above_only = moe_with(replace(_RIGHT, clamp="up_above_only"))
not_clamped = moe_with(replace(_RIGHT, clamp="none"))
shared_not_clamped = moe_with(replace(_RIGHT, shared="not_clamped"))
shared_lost = moe_with(replace(_RIGHT, shared="lost"))
shared_weighted = moe_with(replace(_RIGHT, shared="weighted"))
inner_not_quantised = moe_with(replace(_RIGHT, inner="bf16"))
inner_rounded_before_quantiser = moe_with(replace(_RIGHT, inner="bf16_first"))
up_product_not_rounded = moe_with(replace(_RIGHT, up_rounded=False))
expert_output_not_rounded = moe_with(replace(_RIGHT, output_rounded=False))
scale_of_batch = moe_with(replace(_RIGHT, inner="batch_scale"))
nibbles_swapped = moe_with(replace(_RIGHT, nibbles="high_first"))
scales_of_next_row = moe_with(replace(_RIGHT, scales="next_row"))
expert_of_first_token = moe_with(replace(_RIGHT, expert="first_token"))
expert_off_by_one = moe_with(replace(_RIGHT, expert="off_by_one"))
hole_is_expert_0 = moe_with(replace(_RIGHT, expert="hole_0"))
last_slot_lost = moe_with(replace(_RIGHT, lost="last_slot"))
last_channels_lost = moe_with(replace(_RIGHT, lost="channels"))
rows_beyond_a_tile_lost = moe_with(replace(_RIGHT, lost="rows"))
other_combine = moe_with(replace(_RIGHT, combine="other"))
ranks_of_slots = moe_with(replace(_RIGHT, combine="by_slot"))

right_up_blocks_of_64 = expert_up_with(_RIGHT)
right_up_blocks_of_16_backwards = expert_up_with(replace(_RIGHT, block=16, backwards=True))
right_up_fast_exponential = expert_up_with(replace(_RIGHT, exponential="two_units_off"))
up_gate_and_up_swapped = expert_up_with(replace(_RIGHT, gate="second"))
up_not_clamped = expert_up_with(replace(_RIGHT, clamp="none"))
up_gate_clamped_below = expert_up_with(replace(_RIGHT, clamp="gate_below"))
up_up_clamped_above_only = expert_up_with(replace(_RIGHT, clamp="up_above_only"))
up_weight_ignored = expert_up_with(replace(_RIGHT, weight="ignored"))
up_weight_bf16 = expert_up_with(replace(_RIGHT, weight="bf16"))
up_weight_before = expert_up_with(replace(_RIGHT, weight="before_up"))
up_of_unrounded_product = expert_up_with(replace(_RIGHT, up_rounded=False))
up_rounded_before_quantiser = expert_up_with(replace(_RIGHT, inner="bf16_first"))
up_scale_of_batch = expert_up_with(replace(_RIGHT, inner="batch_scale"))
up_nibbles_swapped = expert_up_with(replace(_RIGHT, nibbles="high_first"))
up_scales_of_next_row = expert_up_with(replace(_RIGHT, scales="next_row"))
up_expert_off_by_one = expert_up_with(replace(_RIGHT, expert="off_by_one"))
up_last_channels_lost = expert_up_with(replace(_RIGHT, lost="channels"))
up_rows_beyond_a_tile_lost = expert_up_with(replace(_RIGHT, lost="rows"))
