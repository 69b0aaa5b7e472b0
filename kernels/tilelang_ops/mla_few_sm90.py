"""Latent decode of few tokens on SM90: the scores of all keys first, then the values in slices of channels.

One program for each split of a row leaves most of the chip idle when there are few rows. Scores of different keys do
not depend on one another; sums over keys do, but those of different channels do not. So a first program scores some
blocks of keys, and a second one sums some channels of a split: the same numbers in the same order, by the same
instructions, as `mla_sm90.py`, whose merge of splits follows. A row has the same bits either way.
"""

# mypy: disable-error-code="valid-type"

from functools import lru_cache
from typing import Any

import tilelang
from tilelang import language as T

from .pages_sm90 import SPLIT, bring_keys
from .roles_sm90 import (
    EXP2,
    GROUP,
    HALF,
    HEADS,
    KEYS,
    LOWEST,
    PASS_CONFIGS,
    VALUES,
    Roles,
    count_block,
    find_top,
    mask_block,
    raise_top,
    read_queries,
    score_block,
    shared_memory,
    weigh_block,
)

SCORED = 2 * KEYS  # keys that a program scores: a pair of blocks, whose order of halves differs
BUFFERS = 4  # blocks of values under way


def score_program(num_heads: int, width: int):
    """The program that scores a pair of blocks for a token and a tile of heads."""
    tail, tiles, roles = width - VALUES, num_heads // HEADS, Roles()
    tokens, requests, columns, pages, blocks = T.dynamic("tokens, requests, columns, pages, blocks")
    page_stride, table_stride = T.dynamic("page_stride, table_stride")

    @T.prim_func
    def mla_scores(
        q_thd: T.Tensor((tokens, num_heads, width), T.bfloat16),
        cache_pod: T.StridedTensor((pages, KEYS, width), (page_stride, width, 1), T.bfloat16),
        table_bp: T.StridedTensor((requests, columns), (table_stride, 1), T.int32),
        length_b: T.Tensor((requests,), T.int32),
        score_tjhi: T.Tensor((tokens, blocks, num_heads, KEYS), T.float32),
        queries: T.int32,
    ):
        with T.Kernel(tokens * tiles, T.ceildiv(blocks, 2), threads=2 * GROUP) as (program, chunk):
            shared = shared_memory(tail)
            score = T.alloc_fragment((HEADS, KEYS), T.float32)
            row = T.alloc_local((KEYS // roles.step,), T.int32)
            page = T.alloc_local((KEYS // roles.step,), T.int32)
            slot = T.alloc_local((KEYS // roles.step,), T.int32)
            used = T.alloc_local((2,), T.int32)

            # 1. which token, heads and keys this program owns
            token = program // tiles
            head0 = program % tiles * HEADS
            request = token // queries
            end = length_b[request] - queries + token % queries + 1
            keys = T.min(T.min(end, blocks * KEYS) - chunk * SCORED, SCORED)
            thread = T.get_thread_binding()

            if thread < GROUP:
                # 2. scores
                T.barrier_wait(shared.q_ready, 0)
                T.fence_proxy_async()
                for now in T.unroll(2):
                    if now * KEYS < keys:
                        score_block(shared, now, 0, score, tail, False, False)
                        mask_block(shared, now, 0, score)
                        T.copy(score, score_tjhi[token, chunk * 2 + now, head0 : head0 + HEADS, :])
            else:
                # 3. the queries, then the keys
                lane = (thread - GROUP) % roles.lanes
                first = (thread - GROUP) // roles.lanes
                if keys > 0:
                    read_queries(q_thd, token, head0, shared, first, lane, tail, roles.lanes)
                    bring_keys(
                        cache_pod,
                        table_bp,
                        shared,
                        request,
                        chunk * SCORED,
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
                    )

    return mla_scores


@T.macro
def bring_values(cache_pod, value, ready, buffer, block, end, used, channel, span, thread):
    """Bring a span of the values of a block, by the copy engine if it is a whole page; no key is a row of zeros."""
    if used >= 0 and block * KEYS + KEYS <= end:
        T.tma_copy(cache_pod[used, :, channel : channel + span], value[buffer, :, :], barrier=ready[buffer])
    else:
        lanes = span // 8
        for g in T.unroll(KEYS // (GROUP // lanes)):
            j = g * (GROUP // lanes) + thread // lanes
            at = thread % lanes * 8
            T.ptx_cp_async(
                T.access_ptr(value[buffer, j, at], "w", 8),
                T.access_ptr(cache_pod[T.max(used, 0), j, channel + at], "r", 8),
                8,
                used >= 0 and block * KEYS + j < end,
            )
        T.ptx_commit_group()
        T.ptx_wait_group(0)
        T.fence_proxy_async()
    T.barrier_arrive(ready[buffer])


def value_program(num_heads: int, width: int, span: int):
    """The program that sums `span` channels of a split for a token and a tile of heads."""
    tiles, slices = num_heads // HEADS, VALUES // span
    tokens, requests, columns, pages, blocks = T.dynamic("tokens, requests, columns, pages, blocks")
    page_stride, table_stride, parts = T.dynamic("page_stride, table_stride, parts")

    @T.macro
    def read_pair(score_tjhi, token, head0, block, last, even, odd):
        """Start reading the scores of a pair of blocks."""
        if block < last:
            T.copy(score_tjhi[token, block, head0 : head0 + HEADS, :], even)
        if block + 1 < last:
            T.copy(score_tjhi[token, block + 1, head0 : head0 + HEADS, :], odd)

    @T.macro
    def add_values(value, ready, buffer, phase, weight, sums):
        """Multiply weights with the values of a block."""
        T.barrier_wait(ready[buffer], phase)
        T.wgmma_gemm(weight, value[buffer, :, :], sums)

    @T.macro
    def scale_by(sums, shrink):
        """Multiply every sum of a head by its factor."""
        for h, u in T.Parallel(HEADS, span):
            sums[h, u] = sums[h, u] * shrink[h]

    @T.prim_func
    def mla_values(
        cache_pod: T.StridedTensor((pages, KEYS, width), (page_stride, width, 1), T.bfloat16),
        table_bp: T.StridedTensor((requests, columns), (table_stride, 1), T.int32),
        length_b: T.Tensor((requests,), T.int32),
        score_tjhi: T.Tensor((tokens, blocks, num_heads, KEYS), T.float32),
        part_ithu: T.Tensor((parts, tokens, num_heads, VALUES), T.float32),
        state_2ith: T.Tensor((2, parts, tokens, num_heads), T.float32),
        scale_log2: T.float32,
        queries: T.int32,
    ):
        with T.Kernel(tokens * tiles, parts, slices, threads=GROUP) as (program, part, piece):
            T.import_source(EXP2)
            value = T.alloc_shared((BUFFERS, KEYS, span), T.bfloat16)
            ready = T.alloc_barrier([GROUP] * BUFFERS)
            sums = T.alloc_fragment((HEADS, span), T.float32)
            even = T.alloc_fragment((HEADS, KEYS), T.float32)
            odd = T.alloc_fragment((HEADS, KEYS), T.float32)
            next_even = T.alloc_fragment((HEADS, KEYS), T.float32)
            next_odd = T.alloc_fragment((HEADS, KEYS), T.float32)
            weight = T.alloc_fragment((HEADS, KEYS), T.bfloat16)
            top = T.alloc_fragment((HEADS,), T.float32)
            old_top = T.alloc_fragment((HEADS,), T.float32)
            block_top = T.alloc_fragment((HEADS,), T.float32)
            shrink = T.alloc_fragment((HEADS,), T.float32)
            total = T.alloc_fragment((HEADS,), T.float32)
            odd_total = T.alloc_fragment((HEADS,), T.float32)
            block_total = T.alloc_fragment((HEADS,), T.float32)
            used = T.alloc_local((BUFFERS,), T.int32)

            # 1. which token, heads, split and channels this program owns
            token = program // tiles
            head0 = program % tiles * HEADS
            request = token // queries
            channel = piece * span
            end = T.min(length_b[request] - queries + token % queries + 1, (part + 1) * SPLIT)
            block0 = part * (SPLIT // KEYS)
            last = T.max(T.min(T.ceildiv(end, KEYS), blocks), block0)
            thread = T.get_thread_binding()
            T.fill(top, LOWEST)
            T.fill(total, 0.0)
            T.fill(odd_total, 0.0)
            T.fill(sums, 0.0)

            # 2. the first two pairs of blocks come
            for i in T.unroll(BUFFERS):
                block = block0 + i
                used[i] = T.if_then_else(block < last, table_bp[request, block], -1)
                used[i] = T.if_then_else(used[i] < pages, used[i], -1)
            for i in T.unroll(BUFFERS):
                if block0 + i < last:
                    bring_values(cache_pod, value, ready, i, block0 + i, end, used[i], channel, span, thread)
            read_pair(score_tjhi, token, head0, block0, last, even, odd)

            # 3. pair after pair; both halves as the groups of `roles_sm90.py` do them
            for pair in T.serial(T.ceildiv(last - block0, 2)):
                block = block0 + pair * 2
                place, phase = pair % 2 * 2, pair // 2 % 2
                read_pair(score_tjhi, token, head0, block + 2, last, next_even, next_odd)
                T.copy(top, old_top)
                find_top(even, block_top, scale_log2)
                for h in T.Parallel(HEADS):
                    block_top[h] = T.max(top[h], block_top[h])
                raise_top(top, block_top, shrink)
                weigh_block(even, weight, top, scale_log2)
                count_block(even, total, shrink, block_total)
                if channel < HALF:
                    scale_by(sums, shrink)
                    add_values(value, ready, place, phase, weight, sums)
                    T.wait_wgmma(0)
                if block + 1 < last:
                    find_top(odd, block_top, scale_log2)
                    for h in T.Parallel(HEADS):
                        block_top[h] = T.max(top[h], block_top[h])
                    raise_top(top, block_top, shrink)
                    for h in T.Parallel(HEADS):
                        total[h] = total[h] * shrink[h]
                    if channel >= HALF:
                        for h, j in T.Parallel(HEADS, KEYS):
                            even[h, j] = even[h, j] * shrink[h]
                    else:
                        scale_by(sums, shrink)
                    weigh_block(odd, weight, top, scale_log2)
                    raise_top(old_top, top, shrink)
                    count_block(odd, odd_total, shrink, block_total)
                    if channel >= HALF:
                        scale_by(sums, shrink)
                    add_values(value, ready, place + 1, phase, weight, sums)
                    T.wait_wgmma(0)
                else:
                    raise_top(old_top, top, shrink)
                    for h in T.Parallel(HEADS):
                        odd_total[h] = odd_total[h] * shrink[h]
                    if channel >= HALF:
                        scale_by(sums, shrink)
                if channel >= HALF:
                    T.copy(even, weight)
                    add_values(value, ready, place, phase, weight, sums)
                    T.wait_wgmma(0)
                T.sync_threads()
                for i in T.unroll(2):
                    later = block + BUFFERS + i
                    if later < last:
                        used[i] = table_bp[request, later]
                        used[i] = T.if_then_else(used[i] < pages, used[i], -1)
                        bring_values(cache_pod, value, ready, place + i, later, end, used[i], channel, span, thread)
                T.copy(next_even, even)
                T.copy(next_odd, odd)

            # 4. what the merge takes
            if part * SPLIT < T.max(end, 1):
                for h, u in T.Parallel(HEADS, span):
                    part_ithu[part, token, head0 + h, channel + u] = sums[h, u]
                if piece == 0:
                    for h in T.Parallel(HEADS):
                        state_2ith[0, part, token, head0 + h] = top[h]
                        state_2ith[1, part, token, head0 + h] = total[h] + odd_total[h]

    return mla_values


@lru_cache(maxsize=16)
def scores(num_heads: int, width: int) -> Any:
    """The first program, built once."""
    program = score_program(num_heads, width)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)


@lru_cache(maxsize=16)
def values(num_heads: int, width: int, span: int) -> Any:
    """The second one."""
    program = value_program(num_heads, width, span)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)
