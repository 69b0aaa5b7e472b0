"""Mixture of experts: where the slots go, copying the rows there, adding up what comes back.

Positions come from counts and prefix sums in a fixed order, never from atomics, so the layout is the same on every
launch. The sum of a token is taken slot by slot by one program for a stretch of its channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer


@dataclass(frozen=True, kw_only=True)
class DispatchLaunch:
    """Slots that a program counts, chunks whose counts it adds up, experts side by side. It changes no result."""

    chunk: int = 128
    chunk_counts: int = 64
    expert_block: int = 64
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True)
class CombineLaunch:
    """Channels of a program. It changes no result: a channel is added up alone."""

    block: int
    num_warps: int = 4


def combine_launch(width: int, *, multiple: bool) -> CombineLaunch:
    """Fewer channels where a program keeps one partial sum for every slot."""
    most = 256 if multiple else 1024
    return CombineLaunch(block=min(max(triton.next_power_of_2(width), 32), most))


@triton.jit
def _count_slots(
    idx_ptr,
    count_ptr,
    num_slots,
    topk,
    num_experts,
    num_chunks,
    stride_it,
    CHUNK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """How many slots of a chunk each expert has: count[e, chunk]."""
    chunk = tl.program_id(0).to(tl.int64)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = slot < num_slots
    idx = tl.load(idx_ptr + (slot // topk) * stride_it + slot % topk, mask=inside, other=-1).to(tl.int32)
    for start in range(0, num_experts, EXPERT_BLOCK):
        expert = start + tl.arange(0, EXPERT_BLOCK)
        count = tl.sum((idx[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(count_ptr + expert.to(tl.int64) * num_chunks + chunk, count, mask=expert < num_experts)


@triton.jit
def _add_up_chunks(count_ptr, total_ptr, num_chunks, CHUNK_COUNTS: tl.constexpr):
    """Replace the counts of an expert by the number of its slots in earlier chunks; keep the total."""
    expert = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK_COUNTS)
    before = tl.program_id(0) * 0
    for start in range(0, num_chunks, CHUNK_COUNTS):
        inside = start + place < num_chunks
        count_at = count_ptr + expert * num_chunks + start + place
        count = tl.load(count_at, mask=inside, other=0)
        # a prefix sum of few numbers by comparison: the scan of the Ascend chain cannot be run on a CPU
        earlier = tl.sum(tl.where(place[None, :] < place[:, None], count[None, :], 0), axis=1)
        tl.store(count_at, before + earlier, mask=inside)
        before += tl.sum(count, axis=0)
    tl.store(total_ptr + expert, before)


@triton.jit
def _place_experts(
    total_ptr, start_ptr, end_ptr, num_experts, alignment, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr
):
    """First row of each expert, a multiple of `alignment`, and the row behind its last one."""
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    total = tl.load(total_ptr + expert, mask=inside, other=0)
    start = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_experts, EXPERT_BLOCK):
        other = first + tl.arange(0, EXPERT_BLOCK)
        size = tl.load(total_ptr + other, mask=other < num_experts, other=0)
        aligned = (size + alignment - 1) // alignment * alignment
        start += tl.sum(tl.where(other[None, :] < expert[:, None], aligned[None, :], 0), axis=1)
    tl.store(start_ptr + expert, start, mask=inside)
    tl.store(end_ptr + expert, start + total, mask=inside)


@triton.jit
def _place_slots(
    idx_ptr,
    count_ptr,
    start_ptr,
    row_ptr,
    slot_ptr,
    num_slots,
    topk,
    num_experts,
    num_chunks,
    stride_it,
    CHUNK: tl.constexpr,
):
    # 1. slots of the same expert that stand earlier in this chunk
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK)
    slot = chunk * CHUNK + place
    inside = slot < num_slots
    idx = tl.load(idx_ptr + (slot // topk) * stride_it + slot % topk, mask=inside, other=-1).to(tl.int32)
    valid = (idx >= 0) & (idx < num_experts)
    earlier = (idx[:, None] == idx[None, :]) & (place[None, :] < place[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    # 2. behind the start of the expert and its slots in earlier chunks
    known = tl.where(valid, idx, 0).to(tl.int64)
    before = tl.load(count_ptr + known * num_chunks + chunk, mask=valid, other=0)
    row = tl.load(start_ptr + known, mask=valid, other=0) + before + rank
    tl.store(row_ptr + slot, tl.where(valid, row, -1), mask=inside)
    tl.store(slot_ptr + row.to(tl.int64), slot.to(tl.int32), mask=valid)


@triton.jit
def _gather_rows(x_ptr, slot_ptr, out_ptr, topk, width, stride_xt, stride_xm, BLOCK: tl.constexpr):
    # one program a row: loads and stores of whole rows
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    token = (slot // topk).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = column < width
        x = tl.load(x_ptr + token * stride_xt + column * stride_xm, mask=inside & (slot >= 0), other=0)
        tl.store(out_ptr + row * width + column, x, mask=inside)


@triton.jit
def _combine_slots(
    expert_ptr,
    row_ptr,
    shared_ptr,
    y_ptr,
    width,
    stride_ey,
    stride_st,
    HAS_SHARED: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    acc = tl.zeros([BLOCK], tl.float32)
    if HAS_SHARED:
        acc += tl.load(shared_ptr + token * stride_st + column, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(TOPK):
        row = tl.load(row_ptr + token * TOPK + j).to(tl.int64)
        # an empty slot adds zero, which changes nothing: the sum is never -0
        at = expert_ptr + row * stride_ey + column
        acc += tl.load(at, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(y_ptr + token * width + column, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _last_of_group(valid, group, slot):
    """Which slots are the last valid one of their group."""
    same = valid[:, None] & valid[None, :] & (group[:, None] == group[None, :])
    later = same & (slot[None, :] > slot[:, None])
    return valid & (tl.sum(later.to(tl.int32), axis=1) == 0)


@triton.jit
def _combine_groups(
    expert_ptr,
    row_ptr,
    rank_ptr,
    node_ptr,
    shared_ptr,
    y_ptr,
    width,
    stride_ey,
    stride_st,
    HAS_NODE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. the slots of the token
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    stored = y_ptr.dtype.element_ty
    slot = tl.arange(0, TOPK_PAD)
    at = token * TOPK + slot
    rank = tl.load(rank_ptr + at, mask=slot < TOPK, other=0)
    valid = tl.load(row_ptr + at, mask=slot < TOPK, other=-1) >= 0
    last = _last_of_group(valid, rank, slot)
    # 2. the sum of a rank so far, in the place of each of its slots; only the last is used
    sums = tl.zeros([TOPK_PAD, BLOCK], tl.float32)
    for i in tl.static_range(TOPK):
        row = tl.load(row_ptr + token * TOPK + i).to(tl.int64)
        x = tl.load(expert_ptr + row * stride_ey + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        takes = valid & (slot >= i) & (rank == tl.load(rank_ptr + token * TOPK + i))
        sums += tl.where(takes[:, None], x[None, :], 0.0)
    sums = sums.to(stored).to(tl.float32)
    if HAS_NODE:
        # 3. the same with the sums of the ranks of a node
        node = tl.load(node_ptr + at, mask=slot < TOPK, other=0)
        over = tl.zeros([TOPK_PAD, BLOCK], tl.float32)
        for i in tl.static_range(TOPK):
            x = tl.sum(tl.where(((slot == i) & last)[:, None], sums, 0.0), axis=0)
            takes = last & (slot >= i) & (node == tl.load(node_ptr + token * TOPK + i))
            over += tl.where(takes[:, None], x[None, :], 0.0)
        last = _last_of_group(last, node, slot)
        sums = over.to(stored).to(tl.float32)
    # 4. what is left, in slot order
    acc = tl.zeros([BLOCK], tl.float32)
    if HAS_SHARED:
        acc += tl.load(shared_ptr + token * stride_st + column, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(TOPK):
        acc += tl.sum(tl.where(((slot == i) & last)[:, None], sums, 0.0), axis=0)
    tl.store(y_ptr + token * width + column, acc.to(stored), mask=inside)


def dispatch(
    idx_tk: torch.Tensor,
    *,
    num_experts: int,
    alignment: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row of each slot, slot of each row, end of each expert.

    Raises:
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: idx_tk is on the CPU and kernels are not interpreted.
    """
    launch = DispatchLaunch()
    slots = idx_tk.numel()
    capacity = slots + min(num_experts, slots) * (alignment - 1)
    num_rows = triton.cdiv(capacity, alignment) * alignment
    row_out, slot_out, end_out = out or (None, None, None)
    row_tk = output_buffer(row_out, tuple(idx_tk.shape), torch.int32, idx_tk)
    slot_y = output_buffer(slot_out, (num_rows,), torch.int32, idx_tk)
    end_e = output_buffer(end_out, (num_experts,), torch.int32, idx_tk)
    if not slots:
        return row_tk, slot_y, end_e.zero_()
    require_runnable("idx_tk", idx_tk)
    if idx_tk.stride(-1) != 1:
        idx_tk = idx_tk.contiguous()
    num_chunks, topk = triton.cdiv(slots, launch.chunk), idx_tk.shape[1]
    count = torch.empty(num_experts, num_chunks, dtype=torch.int32, device=idx_tk.device)
    total = torch.empty(num_experts, dtype=torch.int32, device=idx_tk.device)
    start = torch.empty_like(total)
    _count_slots[(num_chunks,)](
        idx_tk,
        count,
        slots,
        topk,
        num_experts,
        num_chunks,
        idx_tk.stride(0),
        CHUNK=launch.chunk,
        EXPERT_BLOCK=launch.expert_block,
        num_warps=launch.num_warps,
    )
    _add_up_chunks[(num_experts,)](count, total, num_chunks, CHUNK_COUNTS=launch.chunk_counts, num_warps=4)
    experts = max(triton.next_power_of_2(num_experts), 32)
    _place_experts[(1,)](
        total,
        start,
        end_e,
        num_experts,
        alignment,
        EXPERTS=experts,
        EXPERT_BLOCK=32,
        num_warps=launch.num_warps,
    )
    slot_y.fill_(-1)
    _place_slots[(num_chunks,)](
        idx_tk,
        count,
        start,
        row_tk,
        slot_y,
        slots,
        topk,
        num_experts,
        num_chunks,
        idx_tk.stride(0),
        CHUNK=launch.chunk,
        num_warps=launch.num_warps,
    )
    return row_tk, slot_y, end_e


def gather_rows(
    x_tm: torch.Tensor, slot_y: torch.Tensor, *, topk: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of slots; narrow floats are copied as the bytes that they are.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_tm is on the CPU and kernels are not interpreted.
    """
    width = x_tm.shape[1]
    rows_ym = output_buffer(out, (len(slot_y), width), x_tm.dtype, x_tm)
    if not rows_ym.numel():
        return rows_ym
    require_runnable("x_tm", x_tm)
    if not x_tm.numel():
        return rows_ym.view(torch.uint8).zero_().view(rows_ym.dtype)
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x_tm.element_size()]
    _gather_rows[(len(slot_y),)](
        x_tm.view(as_integers),
        slot_y.contiguous(),
        rows_ym.view(as_integers),
        topk,
        width,
        x_tm.stride(0),
        x_tm.stride(1),
        BLOCK=min(max(triton.next_power_of_2(width), 32), 2048),
        num_warps=4,
    )
    return rows_ym


def combine(
    expert_ym: torch.Tensor,
    row_tk: torch.Tensor,
    rank_tk: torch.Tensor | None,
    node_tk: torch.Tensor | None,
    shared_tm: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of slots; with ranks, rounded partial sums first.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: expert_ym is on the CPU and kernels are not interpreted.
    """
    (t, topk), width = row_tk.shape, expert_ym.shape[1]
    y_tm = output_buffer(out, (t, width), dtype, expert_ym)
    if not y_tm.numel():
        return y_tm
    require_runnable("expert_ym", expert_ym)
    expert_ym = expert_ym if expert_ym.stride(-1) == 1 else expert_ym.contiguous()
    shared = y_tm if shared_tm is None else shared_tm if shared_tm.stride(-1) == 1 else shared_tm.contiguous()
    launch = combine_launch(width, multiple=rank_tk is not None)
    grid = (t, triton.cdiv(width, launch.block))
    row_tk = row_tk.contiguous()
    if rank_tk is None:
        _combine_slots[grid](
            expert_ym,
            row_tk,
            shared,
            y_tm,
            width,
            expert_ym.stride(0),
            shared.stride(0),
            HAS_SHARED=shared_tm is not None,
            TOPK=topk,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
        )
        return y_tm
    rank = rank_tk.contiguous()
    _combine_groups[grid](
        expert_ym,
        row_tk,
        rank,
        rank if node_tk is None else node_tk.contiguous(),
        shared,
        y_tm,
        width,
        expert_ym.stride(0),
        shared.stride(0),
        HAS_NODE=node_tk is not None,
        HAS_SHARED=shared_tm is not None,
        TOPK=topk,
        TOPK_PAD=max(triton.next_power_of_2(topk), 2),
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return y_tm
