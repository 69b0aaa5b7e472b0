"""Sparse latent attention over records with a bf16 tail: codes become bf16 in registers, no copy is ever written.

A program owns one query token, one tile of heads and one split of the list, as in `sparse_attn.py`: split and block
boundaries depend on the list position alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import e4m3_value
from .split_softmax import (
    LOG2_E,
    LOWEST,
    SplitLaunch,
    arch_of,
    attention_outputs,
    combine,
    finish_rows,
    leave_split,
    load_query_tail,
    online_step,
    padded_tail,
    require_rows,
    require_value_dim,
    split_partials,
)
from .wide_records import WideRecord, wide_views


def sparse_mla_launch(num_heads: int, arch: str) -> SplitLaunch:
    """The launch for a number of heads and an architecture; it never looks at the batch or the list."""
    heads = min(64, max(16, triton.next_power_of_2(num_heads)))
    if arch == "ascend950":  # a decoded block of keys stands in the unified buffer beside the accumulator
        return SplitLaunch(block_heads=16, block_keys=16, split_keys=1024, num_warps=8, num_stages=1)
    # decoded keys pass through registers, which the accumulator fills
    block_keys = 16 if arch == "sm100" else 32
    return SplitLaunch(block_heads=heads, block_keys=block_keys, split_keys=1024, num_warps=8, num_stages=1)


@triton.jit
def _attend_records(
    q_ptr,
    byte_ptr,
    sf_ptr,
    tail_ptr,
    idx_ptr,
    length_ptr,
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
    stride_page,
    stride_it,
    HAS_LENGTH: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    RECORD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BITS: tl.constexpr,
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

    # 2. queries: the channels of the latent, then the rotary ones
    q_at = q_ptr + token * stride_qt + heads.to(tl.int64)[:, None] * stride_qh
    q = tl.load(q_at + tl.arange(0, VALUE_DIM)[None, :], mask=in_heads[:, None], other=0.0)
    q_tail = load_query_tail(q_at, in_heads, VALUE_DIM, TAIL_DIM, TAIL_PAD)

    # 3. online softmax over blocks in list order
    GROUPS: tl.constexpr = VALUE_DIM // GROUP
    channel = tl.arange(0, VALUE_DIM)
    group = tl.arange(0, GROUPS)
    tail_channel = tl.arange(0, TAIL_PAD)
    top = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, VALUE_DIM], tl.float32)
    for start in range(split * SPLIT_KEYS, split_end, BLOCK_KEYS):
        entries = start + tl.arange(0, BLOCK_KEYS)
        idx = tl.load(idx_ptr + token * stride_it + entries, mask=entries < split_end, other=-1)
        valid = (idx >= 0) & (idx < num_rows)
        row = tl.where(valid, idx, 0)
        page = row // page_slots
        # a hole reads nothing: its record may hold NaN
        at = page.to(tl.int64) * stride_page + (row - page * page_slots).to(tl.int64) * RECORD
        code = tl.load(byte_ptr + at[:, None] + channel[None, :], mask=valid[:, None], other=0)
        sf = tl.load(sf_ptr + ((at + VALUE_DIM) // 4)[:, None] + group[None, :], mask=valid[:, None], other=0.0)
        value = e4m3_value(tl.reshape(code, [BLOCK_KEYS, GROUPS, GROUP]), BITS)
        keys = tl.reshape((value * sf[:, :, None]).to(tl.bfloat16), [BLOCK_KEYS, VALUE_DIM])
        tail_at = tail_ptr + ((at + VALUE_DIM + 4 * GROUPS) // 2)[:, None] + tail_channel[None, :]
        tail = tl.load(tail_at, mask=valid[:, None] & (tail_channel < TAIL_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(keys))
        scores = tl.dot(q_tail, tl.trans(tail), scores)
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        top, total, acc = online_step(scores, keys, top, total, acc)

    # 4. finish, or leave fp32 partials
    rows = token * num_heads + heads
    if ONE_SPLIT:
        finish_rows(acc, total, top, rows, heads, in_heads, out_ptr, out_ptr, lse_ptr, False, VALUE_DIM)
    else:
        leave_split(
            acc, total, top, rows, in_heads, split, num_rows_out, part_ptr, part_max_ptr, part_sum_ptr, VALUE_DIM
        )


def sparse_mla(
    q_thd: torch.Tensor,
    cache_pow: torch.Tensor,
    idx_tk: torch.Tensor,
    topk_length_t: torch.Tensor | None,
    *,
    scale: float,
    record: WideRecord,
    launch: SplitLaunch | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over pages of interleaved records.

    Raises:
        NotImplementedError: latents are no power of two of channels, rows are not contiguous, or pages do not begin at
            multiples of four bytes.
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: q_thd is on the CPU and kernels are not interpreted.
    """
    num_tokens, num_heads, _ = q_thd.shape
    require_value_dim(record.channels)
    require_rows("q_thd", q_thd)
    require_rows("idx_tk", idx_tk)
    views = wide_views("cache_pow", cache_pow, align=record.align)
    out_thu, lse_th = attention_outputs(out, (num_tokens, num_heads, record.channels), q_thd)
    require_runnable("q_thd", q_thd)
    if num_tokens == 0:
        return out_thu, lse_th
    arch = arch_of(q_thd.device)
    launch = launch or sparse_mla_launch(num_heads, arch)
    num_splits = max(1, triton.cdiv(idx_tk.shape[1], launch.split_keys))
    head_tiles = triton.cdiv(num_heads, launch.block_heads)
    parts = split_partials(num_splits, (num_tokens, num_heads, record.channels), q_thd.device)
    _attend_records[(num_tokens * head_tiles, num_splits)](
        q_thd,
        *views,
        idx_tk,
        idx_tk if topk_length_t is None else topk_length_t.contiguous(),
        out_thu,
        lse_th,
        *parts,
        scale * LOG2_E.value,
        num_tokens * num_heads,
        num_heads,
        head_tiles,
        idx_tk.shape[1],
        cache_pow.shape[0] * cache_pow.shape[1],
        max(cache_pow.shape[1], 1),
        *q_thd.stride()[:2],
        views[0].stride(0),
        idx_tk.stride(0),
        HAS_LENGTH=topk_length_t is not None,
        ONE_SPLIT=num_splits == 1,
        RECORD=cache_pow.shape[2],
        VALUE_DIM=record.channels,
        GROUP=record.group,
        TAIL_DIM=record.tail,
        TAIL_PAD=padded_tail(record.tail),
        BLOCK_HEADS=launch.block_heads,
        BLOCK_KEYS=launch.block_keys,
        SPLIT_KEYS=launch.split_keys,
        BITS=arch == "ascend950",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if num_splits > 1:
        combine(parts, None, out_thu, lse_th, launch)
    return out_thu, lse_th
