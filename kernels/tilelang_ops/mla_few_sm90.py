"""Latent decode of few tokens on SM90: scores of all keys, then their weights, then the values in slices of channels.

One program for each split of a row leaves most of the chip idle when there are few rows. Scores of different keys do
not depend on one another, weights only on the maxima of earlier blocks, and sums of different channels not at all. So
three kernels share out first keys, then keys, then channels, and do the same arithmetic in the same order as the two
groups of `seesaw_sm90.py`: a row has the same bits as by `mla_sm90.py`, whose merge of splits follows.
"""

# mypy: disable-error-code="valid-type"

from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import language as T

from .pages_sm90 import SPLIT, bring_keys
from .roles_sm90 import GROUP, HALF, HEADS, KEYS, LOWEST, PASS_CONFIGS, VALUES, Roles
from .seesaw_sm90 import (
    EXP2,
    find_top,
    half_of,
    mask_block,
    raise_top,
    read_queries,
    score_block,
    shared_memory,
    weigh_block,
)

PROGRAMS = 128  # of scores: about as many as a chip takes at a time
PAIRS = SPLIT // (2 * KEYS)  # pairs of a split
SPAN = 64  # channels of a slice
BUFFERS = 6  # blocks of values under way
# how the matrix unit leaves a product, so that the weights of a block are added in the order of the other forms
PRODUCT = T.Fragment(
    (HEADS, KEYS),
    forward_fn=lambda h, j: (h // 16 * 32 + h % 8 * 4 + j % 8 // 2, j // 8 * 4 + h % 16 // 8 * 2 + j % 2),
)


@T.macro
def find_earlier(top, top_tih, token, first, last, head0):
    """The maximum of the pairs of a split from `first` on, before `last`."""
    T.fill(top, LOWEST)
    for i in T.unroll(PAIRS):
        for h in T.Parallel(HEADS):
            top[h] = T.max(top[h], T.if_then_else(first + i < last, top_tih[token, first + i, head0 + h], LOWEST))


def score_program(num_heads: int, width: int):
    """The program that scores `scored` pairs of blocks for a token and a tile of heads, and finds the pairs' maxima."""
    tail, tiles, roles = width - VALUES, num_heads // HEADS, Roles()
    tokens, requests, columns, pages, pairs = T.dynamic("tokens, requests, columns, pages, pairs")
    page_stride, table_stride = T.dynamic("page_stride, table_stride")

    @T.prim_func
    def mla_scores(
        q_thd: T.Tensor((tokens, num_heads, width), T.bfloat16),
        cache_pod: T.StridedTensor((pages, KEYS, width), (page_stride, width, 1), T.bfloat16),
        table_bp: T.StridedTensor((requests, columns), (table_stride, 1), T.int32),
        length_b: T.Tensor((requests,), T.int32),
        score_ti2hj: T.Tensor((tokens, pairs, 2, num_heads, KEYS), T.float32),
        top_tih: T.Tensor((tokens, pairs, num_heads), T.float32),
        scale_log2: T.float32,
        queries: T.int32,
        scored: T.int32,
    ):
        with T.Kernel(tokens * tiles, T.ceildiv(pairs, scored), threads=2 * GROUP) as (program, chunk):
            shared = shared_memory(tail)
            score = T.alloc_fragment((HEADS, KEYS), T.float32)
            top = T.alloc_fragment((HEADS,), T.float32)
            block_top = T.alloc_fragment((HEADS,), T.float32)
            row = T.alloc_local((KEYS // roles.step,), T.int32)
            page = T.alloc_local((KEYS // roles.step,), T.int32)
            used = T.alloc_local((1,), T.int32)
            slot = T.alloc_local((KEYS // roles.step,), T.int32)

            # 1. which token, heads and keys this program owns
            token = program // tiles
            head0 = program % tiles * HEADS
            request = token // queries
            end = length_b[request] - queries + token % queries + 1
            start = chunk * scored * 2 * KEYS
            keys = T.max(T.min(end - start, scored * 2 * KEYS), 0)
            thread = T.get_thread_binding()

            if thread < GROUP:
                # 2. scores
                T.barrier_wait(shared.q_ready, 0)
                T.fence_proxy_async()
                for pair in T.serial(T.ceildiv(keys, 2 * KEYS)):
                    T.fill(top, LOWEST)
                    for now in T.unroll(2):
                        if (pair * 2 + now) * KEYS < keys:
                            score_block(shared, now, pair % 2, score, tail)
                            mask_block(shared, now, pair % 2, score)
                            for half in T.unroll(2):  # nobody sums the values
                                T.barrier_arrive(shared.free[half_of(half, now)])
                            find_top(score, block_top, scale_log2)
                            for h in T.Parallel(HEADS):
                                top[h] = T.max(top[h], block_top[h])
                            T.copy(score, score_ti2hj[token, chunk * scored + pair, now, head0 : head0 + HEADS, :])
                    T.copy(top, top_tih[token, chunk * scored + pair, head0 : head0 + HEADS])
            else:
                # 3. the queries, then the keys
                lane = (thread - GROUP) % roles.lanes
                first = (thread - GROUP) // roles.lanes
                read_queries(q_thd, token, head0, shared, first, lane, tail, roles.lanes)
                bring_keys(
                    cache_pod,
                    table_bp,
                    shared,
                    request,
                    start,
                    keys,
                    pages,
                    used,
                    row,
                    page,
                    slot,
                    first,
                    lane,
                    tail,
                    roles.lanes,
                    False,
                )

    return mla_scores


def weight_program(num_heads: int):
    """The program that weighs a pair of blocks for a token and a tile of heads, for either half of the values.

    Of a block a half needs weights and a step: the factor of what was summed before, and what is added to the total.
    The weights of an odd block are left once.
    """
    tiles = num_heads // HEADS
    tokens, requests, pairs = T.dynamic("tokens, requests, pairs")

    @T.macro
    def leave_weights(weight, kept, weight_si2hj, side, pair, now, head0):
        """Store the weights of a block, by way of shared memory and so in whole rows."""
        T.copy(weight, kept)
        T.copy(kept, weight_si2hj[side, pair, now, head0 : head0 + HEADS, :])

    @T.macro
    def leave_step(step_si22h, side, pair, now, head0, factor, count):
        """Store the step of a block."""
        T.copy(factor, step_si22h[side, pair, now, 0, head0 : head0 + HEADS])
        T.copy(count, step_si22h[side, pair, now, 1, head0 : head0 + HEADS])

    @T.prim_func
    def mla_weights(
        length_b: T.Tensor((requests,), T.int32),
        score_ti2hj: T.Tensor((tokens, pairs, 2, num_heads, KEYS), T.float32),
        top_tih: T.Tensor((tokens, pairs, num_heads), T.float32),
        weight_si2hj: T.Tensor((2 * tokens, pairs, 2, num_heads, KEYS), T.bfloat16),
        step_si22h: T.Tensor((2 * tokens, pairs, 2, 2, num_heads), T.float32),
        scale_log2: T.float32,
        queries: T.int32,
    ):
        with T.Kernel(tokens * tiles, pairs, threads=GROUP) as (program, pair):
            T.import_source(EXP2)
            even = T.alloc_fragment((HEADS, KEYS), T.float32)
            odd = T.alloc_fragment((HEADS, KEYS), T.float32)
            weight = T.alloc_fragment((HEADS, KEYS), T.bfloat16)
            kept = T.alloc_shared((HEADS, KEYS), T.bfloat16)
            top = T.alloc_fragment((HEADS,), T.float32)
            top_right = T.alloc_fragment((HEADS,), T.float32)
            block_top = T.alloc_fragment((HEADS,), T.float32)
            factor = T.alloc_fragment((HEADS,), T.float32)
            one = T.alloc_fragment((HEADS,), T.float32)
            count = T.alloc_fragment((HEADS,), T.float32)
            none = T.alloc_fragment((HEADS,), T.float32)
            T.annotate_layout({even: PRODUCT, odd: PRODUCT})

            token = program // tiles
            head0 = program % tiles * HEADS
            end = length_b[token // queries] - queries + token % queries + 1
            if pair * 2 * KEYS < end:
                # 1. the maximum of the pairs before, in this split
                T.copy(score_ti2hj[token, pair, 0, head0 : head0 + HEADS, :], even)
                find_earlier(top, top_tih, token, pair // PAIRS * PAIRS, pair, head0)
                T.copy(top, top_right)
                T.fill(one, 1.0)
                T.fill(none, 0.0)

                # 2. the even block for the left half
                find_top(even, block_top, scale_log2)
                for h in T.Parallel(HEADS):
                    block_top[h] = T.max(top[h], block_top[h])
                raise_top(top, block_top, factor)
                weigh_block(even, weight, top, scale_log2)
                T.reduce_sum(even, count, dim=1)
                leave_weights(weight, kept, weight_si2hj, token, pair, 0, head0)
                leave_step(step_si22h, token, pair, 0, head0, factor, count)
                if (pair * 2 + 1) * KEYS < end:
                    # 3. the odd block for both, the even one for the right half, whose sums it finds scaled
                    T.copy(score_ti2hj[token, pair, 1, head0 : head0 + HEADS, :], odd)
                    find_top(odd, block_top, scale_log2)
                    for h in T.Parallel(HEADS):
                        block_top[h] = T.max(top[h], block_top[h])
                    raise_top(top, block_top, factor)
                    for h, j in T.Parallel(HEADS, KEYS):
                        even[h, j] = even[h, j] * factor[h]
                    T.copy(even, weight)
                    leave_weights(weight, kept, weight_si2hj, tokens + token, pair, 0, head0)
                    leave_step(step_si22h, tokens + token, pair, 0, head0, one, none)
                    weigh_block(odd, weight, top, scale_log2)
                    T.reduce_sum(odd, count, dim=1)
                    leave_weights(weight, kept, weight_si2hj, token, pair, 1, head0)
                    leave_step(step_si22h, token, pair, 1, head0, factor, none)
                    raise_top(top_right, top, factor)
                    leave_step(step_si22h, tokens + token, pair, 1, head0, factor, count)
                else:
                    leave_weights(weight, kept, weight_si2hj, tokens + token, pair, 0, head0)
                    leave_step(step_si22h, tokens + token, pair, 0, head0, factor, none)

    return mla_weights


def value_program(num_heads: int, width: int):
    """The program that sums a slice of channels of a split for a token and a tile of heads."""
    tiles, slices = num_heads // HEADS, VALUES // SPAN
    tokens, requests, columns, pages, pairs = T.dynamic("tokens, requests, columns, pages, pairs")
    page_stride, table_stride, parts = T.dynamic("page_stride, table_stride, parts")

    @T.prim_func
    def mla_values(
        cache_pod: T.StridedTensor((pages, KEYS, width), (page_stride, width, 1), T.bfloat16),
        table_bp: T.StridedTensor((requests, columns), (table_stride, 1), T.int32),
        length_b: T.Tensor((requests,), T.int32),
        top_tih: T.Tensor((tokens, pairs, num_heads), T.float32),
        weight_si2hj: T.Tensor((2 * tokens, pairs, 2, num_heads, KEYS), T.bfloat16),
        step_si22h: T.Tensor((2 * tokens, pairs, 2, 2, num_heads), T.float32),
        part_ithu: T.Tensor((parts, tokens, num_heads, VALUES), T.float32),
        state_3ith: T.Tensor((3, parts, tokens, num_heads), T.float32),
        queries: T.int32,
    ):
        with T.Kernel(tokens * tiles, parts, slices, threads=2 * GROUP) as (program, part, piece):
            value = T.alloc_shared((BUFFERS, KEYS, SPAN), T.bfloat16)
            weight = T.alloc_shared((BUFFERS, HEADS, KEYS), T.bfloat16)
            step = T.alloc_shared((BUFFERS, 2, HEADS), T.float32)
            ready = T.alloc_barrier([GROUP] * BUFFERS)
            free = T.alloc_barrier([GROUP] * BUFFERS)
            sums = T.alloc_fragment((HEADS, SPAN), T.float32)
            top = T.alloc_fragment((HEADS,), T.float32)
            total = T.alloc_fragment((HEADS,), T.float32)
            factor = T.alloc_fragment((HEADS,), T.float32)
            count = T.alloc_fragment((HEADS,), T.float32)
            used = T.alloc_local((1,), T.int32)

            # 1. which token, heads, split and channels this program owns
            token = program // tiles
            head0 = program % tiles * HEADS
            request = token // queries
            channel = piece * SPAN
            half = channel // HALF
            side = half * tokens + token
            keys = T.min(length_b[request] - queries + token % queries + 1 - part * SPLIT, SPLIT)
            blocks = T.max(T.ceildiv(keys, KEYS), 0)
            thread = T.get_thread_binding()

            if thread < GROUP:
                # 2. block after block
                T.fill(sums, 0.0)
                T.fill(total, 0.0)
                for i in T.serial(blocks):
                    now = i % BUFFERS
                    T.barrier_wait(ready[now], i // BUFFERS % 2)
                    T.copy(step[now, 0, :], factor)
                    T.copy(step[now, 1, :], count)
                    for h, u in T.Parallel(HEADS, SPAN):
                        sums[h, u] = sums[h, u] * factor[h]
                    T.wgmma_gemm(weight[now, :, :], value[now, :, :], sums)
                    for h in T.Parallel(HEADS):
                        total[h] = T.ieee_fmaf(total[h], factor[h], count[h])
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[now])

                # 3. what the merge takes
                if blocks > 0 or part == 0:
                    T.copy(sums, part_ithu[part, token, head0 : head0 + HEADS, channel : channel + SPAN])
                    if channel % HALF == 0:
                        T.copy(total, state_3ith[1 + half, part, token, head0 : head0 + HEADS])
                    if channel == 0:
                        find_earlier(top, top_tih, token, part * PAIRS, part * PAIRS + T.ceildiv(blocks, 2), head0)
                        T.copy(top, state_3ith[0, part, token, head0 : head0 + HEADS])
            else:
                # 4. what a block needs; for the right half the odd block of a pair comes first
                first, at = (thread - GROUP) // (SPAN // 8), thread % (SPAN // 8) * 8
                for i in T.serial(blocks):
                    now = i % BUFFERS
                    block = T.min(i ^ half, blocks - 1)
                    pair, odd = part * PAIRS + block // 2, block % 2
                    used[0] = table_bp[request, part * (SPLIT // KEYS) + block]
                    T.barrier_wait(free[now], i // BUFFERS % 2 ^ 1)
                    T.tma_copy(
                        weight_si2hj[T.if_then_else(odd == 1, token, side), pair, odd, head0 : head0 + HEADS, :],
                        weight[now, :, :],
                        barrier=ready[now],
                    )
                    T.tma_copy(
                        step_si22h[side, pair, odd, :, head0 : head0 + HEADS],
                        step[now, :, :],
                        barrier=ready[now],
                    )
                    if used[0] >= 0 and used[0] < pages and block * KEYS + KEYS <= keys:
                        T.tma_copy(
                            cache_pod[used[0], :, channel : channel + SPAN], value[now, :, :], barrier=ready[now]
                        )
                    else:  # a row that is no key becomes zeros
                        if used[0] >= pages:
                            used[0] = -1
                        for g in T.unroll(KEYS * SPAN // (8 * GROUP)):
                            row = g * (8 * GROUP // SPAN) + first
                            for u in T.unroll(8):
                                value[now, row, at + u] = T.if_then_else(
                                    used[0] >= 0 and block * KEYS + row < keys,
                                    cache_pod[T.max(used[0], 0), row, channel + at + u],
                                    T.bfloat16(0),
                                )
                        T.fence_proxy_async()
                    T.barrier_arrive(ready[now])

    return mla_values


@lru_cache(maxsize=16)
def _compiled(num_heads: int, width: int) -> tuple[Any, Any, Any]:
    programs = (score_program(num_heads, width), weight_program(num_heads), value_program(num_heads, width))
    target = {"kind": "cuda", "arch": "sm_90a"}
    scores, weights, values = (tilelang.compile(p, target=target, pass_configs=PASS_CONFIGS) for p in programs)
    return scores, weights, values


def sum_slices(
    q_thd: torch.Tensor,
    cache_pod: torch.Tensor,
    table_bp: torch.Tensor,
    length_b: torch.Tensor,
    part_ithu: torch.Tensor,
    state_3ith: torch.Tensor,
    *,
    scale_log2: float,
    queries: int,
) -> None:
    """Fill `part_ithu` and `state_3ith` with the sums, maxima and totals of every split."""
    tokens, num_heads, width = q_thd.shape
    pairs = -(-table_bp.shape[1] // 2)
    score_ti2hj = part_ithu.new_empty(tokens, pairs, 2, num_heads, KEYS)
    top_tih = part_ithu.new_empty(tokens, pairs, num_heads)
    weight_si2hj = q_thd.new_empty(2 * tokens, pairs, 2, num_heads, KEYS)
    step_si22h = part_ithu.new_empty(2 * tokens, pairs, 2, 2, num_heads)
    scored = -(-tokens * (num_heads // HEADS) * pairs // PROGRAMS)
    scores, weights, values = _compiled(num_heads, width)
    scores(q_thd, cache_pod, table_bp, length_b, score_ti2hj, top_tih, scale_log2, queries, scored)
    weights(length_b, score_ti2hj, top_tih, weight_si2hj, step_si22h, scale_log2, queries)
    values(cache_pod, table_bp, length_b, top_tih, weight_si2hj, step_si22h, part_ithu, state_3ith, queries)
