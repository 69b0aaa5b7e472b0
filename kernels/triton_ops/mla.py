"""Paged kernels of multi-head latent attention: the latent store and the absorbed decode.

A decode program owns one query token, one tile of heads and one split of the positions, combined as in
`split_softmax.py`. A row reduces in an order that its own key positions fix, and a verify row as a decode row would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import require_runnable
from .split_softmax import (
    LOG2_E,
    LOWEST,
    SplitLaunch,
    arch_of,
    attend_keys,
    attention_outputs,
    combine,
    finish_rows,
    leave_split,
    load_query_tail,
    padded_tail,
    require_rows,
    require_value_dim,
    split_launch,
    split_partials,
)


@triton.jit
def _store_rows(
    cache_ptr,
    latent_ptr,
    slots_ptr,
    num_tokens,
    num_slots,
    page_slots,
    stride_cp,
    stride_co,
    stride_lt,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # 1. rows and slots; -1, and what no cache holds, writes nothing
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < num_slots)
    slot = tl.where(kept, slot, 0)
    page = slot // page_slots

    # 2. copy
    cols = tl.arange(0, WIDTH_PAD)
    mask = kept[:, None] & (cols < WIDTH)[None, :]
    rows = tl.load(latent_ptr + token[:, None] * stride_lt + cols[None, :], mask=mask, other=0.0)
    cache_at = cache_ptr + page * stride_cp + (slot - page * page_slots) * stride_co
    tl.store(cache_at[:, None] + cols[None, :], rows, mask=mask)


@triton.jit
def _decode_split(
    q_ptr,
    cache_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale_log2,
    num_rows_out,
    num_queries,
    num_heads,
    head_tiles,
    num_pages,
    page_slots,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_cp,
    stride_co,
    stride_bb,
    ONE_SPLIT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    # 1. which request, query, heads and positions this program owns
    pid = tl.program_id(0).to(tl.int64)
    token = pid // head_tiles
    request = token // num_queries
    query = token - request * num_queries
    heads = (pid % head_tiles).to(tl.int32) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    in_heads = heads < num_heads
    split = tl.program_id(1)
    # the queries are the last positions; a query before the first key has an end <= 0
    end = tl.load(length_ptr + request) - num_queries + query.to(tl.int32) + 1
    split_end = tl.minimum((split + 1) * SPLIT_KEYS, end)

    # 2. queries: the value channels, then those that only the key has
    q_at = q_ptr + request * stride_qb + query * stride_qt + heads.to(tl.int64)[:, None] * stride_qh
    q = tl.load(q_at + tl.arange(0, VALUE_DIM)[None, :], mask=in_heads[:, None], other=0.0)
    q_tail = q
    if TAIL_PAD > 0:
        q_tail = load_query_tail(q_at, in_heads, VALUE_DIM, TAIL_DIM, TAIL_PAD)

    # 3. online softmax over blocks of ascending positions, through the block table
    top = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, VALUE_DIM], tl.float32)
    for start in range(split * SPLIT_KEYS, split_end, BLOCK_KEYS):
        position = start + tl.arange(0, BLOCK_KEYS)
        table_col = position // page_slots
        page = tl.load(table_ptr + request * stride_bb + table_col, mask=position < split_end, other=-1)
        valid = (page >= 0) & (page < num_pages)
        page = tl.where(valid, page, 0).to(tl.int64)
        key_at = cache_ptr + page * stride_cp + (position - table_col * page_slots).to(tl.int64) * stride_co
        top, total, acc = attend_keys(
            q, q_tail, key_at, valid, top, total, acc, scale_log2, VALUE_DIM, TAIL_DIM, TAIL_PAD
        )

    # 4. finish, or leave fp32 partials
    rows = token * num_heads + heads
    if ONE_SPLIT:
        finish_rows(acc, total, top, rows, heads, in_heads, lse_ptr, out_ptr, lse_ptr, False, VALUE_DIM)
    else:
        leave_split(
            acc, total, top, rows, in_heads, split, num_rows_out, part_ptr, part_max_ptr, part_sum_ptr, VALUE_DIM
        )


def store_latent(cache_pod_: torch.Tensor, latent_td: torch.Tensor, slots_t: torch.Tensor) -> torch.Tensor:
    """Launch the store.

    Raises:
        NotImplementedError: rows are not contiguous.
    """
    num_tokens, width = latent_td.shape
    require_rows("cache_pod_", cache_pod_)
    require_rows("latent_td", latent_td)
    require_runnable("cache_pod_", cache_pod_)
    if num_tokens == 0:
        return cache_pod_
    block_rows = 8
    _store_rows[(triton.cdiv(num_tokens, block_rows),)](
        cache_pod_,
        latent_td,
        slots_t.contiguous(),
        num_tokens,
        cache_pod_.shape[0] * cache_pod_.shape[1],
        max(cache_pod_.shape[1], 1),
        *cache_pod_.stride()[:2],
        latent_td.stride(0),
        WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width),
        BLOCK_ROWS=block_rows,
        num_warps=4,
    )
    return cache_pod_


def mla_decode(
    q_bthd: torch.Tensor,
    cache_pod: torch.Tensor,
    block_table_bp: torch.Tensor,
    lengths_b: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    launch: SplitLaunch | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the paged decode.

    Raises:
        NotImplementedError: `value_dim` is no power of two from 16 up, or rows are not contiguous.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
    """
    num_requests, num_queries, num_heads, width = q_bthd.shape
    require_value_dim(value_dim)
    require_rows("q_bthd", q_bthd)
    require_rows("cache_pod", cache_pod)
    require_rows("block_table_bp", block_table_bp)
    out_bthu, lse_bth = attention_outputs(out, (*q_bthd.shape[:3], value_dim), q_bthd)
    require_runnable("q_bthd", q_bthd)
    num_tokens = num_requests * num_queries
    if num_tokens == 0:
        return out_bthu, lse_bth
    launch = launch or split_launch(num_heads, q_bthd.dtype, arch_of(q_bthd.device))
    page_slots = max(cache_pod.shape[1], 1)
    # from the width of the table, known on the host; splits beyond a request's length are empty and change nothing
    num_splits = max(1, triton.cdiv(block_table_bp.shape[1] * page_slots, launch.split_keys))
    head_tiles = triton.cdiv(num_heads, launch.block_heads)
    parts = split_partials(num_splits, (num_tokens, num_heads, value_dim), q_bthd.device)
    _decode_split[(num_tokens * head_tiles, num_splits)](
        q_bthd,
        cache_pod,
        block_table_bp,
        lengths_b.contiguous(),
        out_bthu,
        lse_bth,
        *parts,
        scale * LOG2_E.value,
        num_tokens * num_heads,
        num_queries,
        num_heads,
        head_tiles,
        cache_pod.shape[0],
        page_slots,
        *q_bthd.stride()[:3],
        *cache_pod.stride()[:2],
        block_table_bp.stride(0),
        ONE_SPLIT=num_splits == 1,
        VALUE_DIM=value_dim,
        TAIL_DIM=width - value_dim,
        TAIL_PAD=padded_tail(width - value_dim),
        BLOCK_HEADS=launch.block_heads,
        BLOCK_KEYS=launch.block_keys,
        SPLIT_KEYS=launch.split_keys,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if num_splits > 1:
        combine(parts, None, out_bthu.flatten(0, 1), lse_bth.flatten(0, 1), launch)
    return out_bthu, lse_bth
