"""Sparse attention over index lists, contiguous or paged: base-2 online softmax over fixed splits of the list.

A program owns one query token, one tile of heads and one split of the list. Split and block boundaries depend on the
list position alone, so a row has the same bits alone or in any batch, in prefill or in decode. The launch config and
the combine kernel stand in `split_softmax.py`.
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
def _attend_split(
    q_ptr,
    kv_ptr,
    idx_ptr,
    length_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale_log2,
    num_rows_out,
    num_heads,
    head_tiles,
    num_entries,
    num_rows,
    page_slots,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_ko,
    stride_it,
    HAS_LENGTH: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    # 1. which token, heads and entries this program owns
    pid = tl.program_id(0).to(tl.int64)
    token = pid // head_tiles
    heads = (pid % head_tiles).to(tl.int32) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    in_heads = heads < num_heads
    split = tl.program_id(1)
    list_end = num_entries
    if HAS_LENGTH:
        list_end = tl.minimum(tl.load(length_ptr + token), num_entries)
    split_end = tl.minimum((split + 1) * SPLIT_KEYS, list_end)

    # 2. queries: the value channels, then those that only the key has
    q_at = q_ptr + token * stride_qt + heads.to(tl.int64)[:, None] * stride_qh
    q = tl.load(q_at + tl.arange(0, VALUE_DIM)[None, :], mask=in_heads[:, None], other=0.0)
    q_tail = q
    if TAIL_PAD > 0:
        q_tail = load_query_tail(q_at, in_heads, VALUE_DIM, TAIL_DIM, TAIL_PAD)

    # 3. online softmax over blocks in list order
    top = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, VALUE_DIM], tl.float32)
    for start in range(split * SPLIT_KEYS, split_end, BLOCK_KEYS):
        entries = start + tl.arange(0, BLOCK_KEYS)
        idx = tl.load(idx_ptr + token * stride_it + entries, mask=entries < split_end, other=-1)
        valid = (idx >= 0) & (idx < num_rows)
        row = tl.where(valid, idx, 0)
        page = row // page_slots
        key_at = kv_ptr + page.to(tl.int64) * stride_kp + (row - page * page_slots).to(tl.int64) * stride_ko
        top, total, acc = attend_keys(
            q, q_tail, key_at, valid, top, total, acc, scale_log2, VALUE_DIM, TAIL_DIM, TAIL_PAD
        )

    # 4. finish, or leave fp32 partials
    rows = token * num_heads + heads
    if ONE_SPLIT:
        finish_rows(acc, total, top, rows, heads, in_heads, sink_ptr, out_ptr, lse_ptr, HAS_SINK, VALUE_DIM)
    else:
        leave_split(
            acc, total, top, rows, in_heads, split, num_rows_out, part_ptr, part_max_ptr, part_sum_ptr, VALUE_DIM
        )


def sparse_attn(
    q_thd: torch.Tensor,
    kv_sd: torch.Tensor,
    idx_tk: torch.Tensor,
    sink_h: torch.Tensor | None,
    topk_length_t: torch.Tensor | None,
    *,
    scale: float,
    value_dim: int,
    launch: SplitLaunch | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over a contiguous sequence, which is one page of s slots."""
    return sparse_attn_decode(
        q_thd,
        kv_sd.unsqueeze(0),
        idx_tk,
        sink_h,
        topk_length_t,
        scale=scale,
        value_dim=value_dim,
        launch=launch,
        out=out,
    )


def sparse_attn_decode(
    q_thd: torch.Tensor,
    kv_pod: torch.Tensor,
    idx_tk: torch.Tensor,
    sink_h: torch.Tensor | None,
    topk_length_t: torch.Tensor | None,
    *,
    scale: float,
    value_dim: int,
    launch: SplitLaunch | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over a paged cache.

    Raises:
        NotImplementedError: `value_dim` is no power of two from 16 up, or rows are not contiguous.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
    """
    num_tokens, num_heads, width = q_thd.shape
    require_value_dim(value_dim)
    require_rows("q_thd", q_thd)
    require_rows("kv_pod" if kv_pod.shape[0] != 1 else "kv_sd", kv_pod)
    require_rows("idx_tk", idx_tk)
    out_thu, lse_th = attention_outputs(out, (num_tokens, num_heads, value_dim), q_thd)
    require_runnable("q_thd", q_thd)
    if num_tokens == 0:
        return out_thu, lse_th
    launch = launch or split_launch(num_heads, q_thd.dtype, arch_of(q_thd.device))
    num_splits = max(1, triton.cdiv(idx_tk.shape[1], launch.split_keys))
    head_tiles = triton.cdiv(num_heads, launch.block_heads)
    parts = split_partials(num_splits, (num_tokens, num_heads, value_dim), q_thd.device)
    tail_dim = width - value_dim
    sink = out_thu if sink_h is None else sink_h.contiguous()
    _attend_split[(num_tokens * head_tiles, num_splits)](
        q_thd,
        kv_pod,
        idx_tk,
        idx_tk if topk_length_t is None else topk_length_t.contiguous(),
        sink,
        out_thu,
        lse_th,
        *parts,
        scale * LOG2_E.value,
        num_tokens * num_heads,
        num_heads,
        head_tiles,
        idx_tk.shape[1],
        kv_pod.shape[0] * kv_pod.shape[1],
        max(kv_pod.shape[1], 1),
        *q_thd.stride()[:2],
        *kv_pod.stride()[:2],
        idx_tk.stride(0),
        HAS_LENGTH=topk_length_t is not None,
        HAS_SINK=sink_h is not None,
        ONE_SPLIT=num_splits == 1,
        VALUE_DIM=value_dim,
        TAIL_DIM=tail_dim,
        TAIL_PAD=padded_tail(tail_dim),
        BLOCK_HEADS=launch.block_heads,
        BLOCK_KEYS=launch.block_keys,
        SPLIT_KEYS=launch.split_keys,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if num_splits > 1:
        combine(parts, None if sink_h is None else sink, out_thu, lse_th, launch)
    return out_thu, lse_th
