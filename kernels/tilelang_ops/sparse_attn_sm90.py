"""Attention on SM90 over rows of a cache that lists or block tables name, by the roles of `seesaw_sm90.py`.

A program owns one query token and one tile of heads and walks the whole list in blocks of keys. The third group copies
the rows that a block names, 16 bytes at a time and asynchronously; a hole is filled with zeros and never read. The
list is not split, so a row has the same bits alone or in any batch.
"""

# mypy: disable-error-code="valid-type"

from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import language as T

from .roles_sm90 import (
    GROUP,
    HALF,
    HEADS,
    KEYS,
    LN_2,
    LOG2_E,
    PASS_CONFIGS,
    THREADS,
    VALUES,
    Roles,
    divide_sums,
)
from .seesaw_sm90 import (
    EXP2,
    first_group,
    half_of,
    name_keys,
    read_half,
    read_queries,
    read_tail,
    second_group,
    shared_memory,
)


def attend_program(
    num_heads: int,
    width: int,
    value_dim: int,
    *,
    has_length: bool,
    has_sink: bool,
    roles: Roles | None = None,
):
    """The program over a paged cache, for any number of tokens, list entries and pages, which may lie apart.

    Raises:
        NotImplementedError: heads are no multiple of the tile, or not 512 values with at most 64 channels behind them.
    """
    roles = roles or Roles(multiply=216, bring=72)
    if num_heads % HEADS:
        raise NotImplementedError(f"num_heads: expected a multiple of {HEADS}, got {num_heads}")
    if value_dim != VALUES or width not in (512, 576):
        raise NotImplementedError(f"width, value_dim: expected 512 or 576, and 512, got {width}, {value_dim}")
    tail, tiles = width - VALUES, num_heads // HEADS
    step, lanes, passes = roles.step, roles.lanes, KEYS // roles.step
    tokens, entries, pages, slots, page_stride = T.dynamic("tokens, entries, pages, slots, page_stride")

    @T.prim_func
    def sparse_attn(
        q_thd: T.Tensor((tokens, num_heads, width), T.bfloat16),
        kv_pod: T.StridedTensor((pages, slots, width), (page_stride, width, 1), T.bfloat16),
        idx_tk: T.Tensor((tokens, entries), T.int32),
        topk_length_t: T.Tensor((tokens,), T.int32),
        sink_h: T.Tensor((num_heads,), T.float32),
        out_thu: T.Tensor((tokens, num_heads, value_dim), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        scale_log2: T.float32,
    ):
        with T.Kernel(tokens * tiles, threads=THREADS) as program:
            T.import_source(EXP2)
            shared = shared_memory(tail, flags="shared")
            left = T.alloc_fragment((HEADS, HALF), T.float32)
            right = T.alloc_fragment((HEADS, HALF), T.float32)
            score = T.alloc_fragment((HEADS, KEYS), T.float32)
            score_right = T.alloc_fragment((HEADS, KEYS), T.float32)
            top = T.alloc_fragment((HEADS,), T.float32)
            top_right = T.alloc_fragment((HEADS,), T.float32)
            total = T.alloc_fragment((HEADS,), T.float32)
            total_right = T.alloc_fragment((HEADS,), T.float32)
            shrink = T.alloc_fragment((HEADS,), T.float32)
            shrink_right = T.alloc_fragment((HEADS,), T.float32)
            block_top = T.alloc_fragment((HEADS,), T.float32)
            block_top_right = T.alloc_fragment((HEADS,), T.float32)
            block_total = T.alloc_fragment((HEADS,), T.float32)
            block_total_right = T.alloc_fragment((HEADS,), T.float32)
            weight = T.alloc_fragment((HEADS, KEYS), T.bfloat16)
            weight_right = T.alloc_fragment((HEADS, KEYS), T.bfloat16)
            row = T.alloc_local((2 * passes,), T.int32)
            page = T.alloc_local((2 * passes,), T.int32)
            slot = T.alloc_local((2 * passes,), T.int32)

            # 1. which token, heads and entries this program owns
            token = program // tiles
            head0 = program % tiles * HEADS
            list_end = T.min(topk_length_t[token], entries) if has_length else entries
            blocks = T.ceildiv(list_end, KEYS)
            thread = T.get_thread_binding()

            if thread < GROUP:
                # 2. even blocks, the left half of the values
                T.set_max_nreg(roles.multiply, 1)
                first_group(
                    shared,
                    blocks,
                    scale_log2,
                    left,
                    score,
                    weight,
                    top,
                    total,
                    shrink,
                    block_top,
                    block_total,
                    0,
                    tail,
                )
                for h in T.Parallel(HEADS):
                    lse_th[token, head0 + h] = (top[h] + T.log2(total[h])) * LN_2
                divide_sums(left, top, total, shrink, sink_h, head0, has_sink)
                T.copy(left, shared.q[0, :, :])
                T.copy(shared.q[0, :, :], out_thu[token, head0 : head0 + HEADS, 0:HALF])
            elif thread < 2 * GROUP:
                # 3. odd blocks, the right half
                T.set_max_nreg(roles.multiply, 1)
                second_group(
                    shared,
                    blocks,
                    scale_log2,
                    right,
                    score_right,
                    weight_right,
                    top_right,
                    total_right,
                    shrink_right,
                    block_top_right,
                    block_total_right,
                    0,
                    tail,
                )
                divide_sums(right, top_right, total_right, shrink_right, sink_h, head0, has_sink)
                T.copy(right, shared.q[1, :, :])
                T.copy(shared.q[1, :, :], out_thu[token, head0 : head0 + HEADS, HALF:value_dim])
            else:
                # 4. the queries, then the keys of block after block
                T.set_max_nreg(roles.bring, 0)
                lane = (thread - 2 * GROUP) % lanes
                first = (thread - 2 * GROUP) // lanes
                read_queries(q_thd, token, head0, shared, first, lane, tail, lanes)
                for pair in T.serial(T.ceildiv(blocks, 2)):
                    for g in T.unroll(2 * passes):
                        entry = pair * 2 * KEYS + g * step + first
                        row[g] = T.if_then_else(entry < list_end, idx_tk[token, entry], -1)
                        row[g] = T.if_then_else(row[g] < pages * slots, row[g], -1)
                        page[g] = T.max(row[g], 0) // slots
                        slot[g] = T.max(row[g], 0) - page[g] * slots
                    # halves in the order in which they become free
                    for turn in T.unroll(2):
                        for now in T.unroll(2):
                            if pair * 2 + now < blocks:
                                half = turn ^ now
                                T.barrier_wait(shared.free[half_of(half, now)], pair % 2 ^ 1)
                                if turn == 0:
                                    name_keys(shared, now, row, now * passes, first, lane, lanes)
                                read_half(
                                    kv_pod,
                                    shared,
                                    half,
                                    now,
                                    row,
                                    page,
                                    slot,
                                    now * passes,
                                    first,
                                    lane,
                                    lanes,
                                )
                                if tail and turn == 1:
                                    read_tail(
                                        kv_pod,
                                        shared,
                                        now,
                                        row,
                                        page,
                                        slot,
                                        now * passes,
                                        first,
                                        lane,
                                        tail,
                                        lanes,
                                    )

    return sparse_attn


@lru_cache(maxsize=16)
def _compiled(num_heads: int, width: int, value_dim: int, has_length: bool, has_sink: bool) -> Any:
    program = attend_program(num_heads, width, value_dim, has_length=has_length, has_sink=has_sink)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)


def sparse_attn(
    q_thd: torch.Tensor,
    kv_pod: torch.Tensor,
    idx_tk: torch.Tensor,
    sink_h: torch.Tensor | None,
    topk_length_t: torch.Tensor | None,
    *,
    scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build once for the heads and widths, and launch; rows of a page follow one another, the rest is contiguous."""
    tokens, num_heads, width = q_thd.shape
    out_thu = torch.empty(tokens, num_heads, value_dim, dtype=q_thd.dtype, device=q_thd.device)
    lse_th = torch.empty(tokens, num_heads, dtype=torch.float32, device=q_thd.device)
    if tokens == 0:
        return out_thu, lse_th
    kernel = _compiled(num_heads, width, value_dim, topk_length_t is not None, sink_h is not None)
    # what a program does not take is still an argument of it
    length_t = idx_tk.new_empty(tokens) if topk_length_t is None else topk_length_t
    sink_h = lse_th.new_empty(num_heads) if sink_h is None else sink_h
    kernel(q_thd, kv_pod, idx_tk, length_t, sink_h, out_thu, lse_th, scale * LOG2_E)
    return out_thu, lse_th
