"""Sparse attention on SM90 with specialised warps: 128 threads gather keys, two groups of 128 multiply.

A program owns one query token and one tile of heads and walks the whole list in blocks of keys. The producer copies the
rows that a block names, 16 bytes at a time and asynchronously, into one of two buffers; a hole is filled with zeros and
never read. The first group of consumers computes scores, the online softmax and the left half of the values, the second
takes weights and factors from shared memory and adds the right half: each keeps 64 x 256 sums in registers.

The arithmetic is that of `triton_ops/sparse_attn.py`: base-2 online softmax over blocks that depend on the list
position alone, weights rounded unnormalised, the sink in the denominator only. The list is not split, so a row has
the same bits alone or in any batch.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import PassConfigKey
from tilelang import language as T

LOWEST = -3.0e38  # start of the running maximum: finite, so that a list that begins with holes never meets inf - inf
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
GROUP = 128  # threads of a role
ROW_THREADS = 8  # threads that read one row, 16 bytes each at a time
# holes are tested once per row; the compiler's own test would stand before every element
PASS_CONFIGS = {PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


@dataclass(frozen=True, kw_only=True)
class SpecialisedLaunch:
    """Tile of one program and the registers of its roles. `block_keys` fixes the order of summation."""

    block_heads: int = 64
    block_keys: int = 64
    first_registers: int = 240  # scores beside 128 sums
    second_registers: int = 168
    producer_registers: int = 80


def attend_program(
    num_heads: int,
    width: int,
    value_dim: int,
    *,
    has_length: bool,
    has_sink: bool,
    launch: SpecialisedLaunch | None = None,
):
    """The program over a paged cache, for any number of tokens, list entries and pages, which may lie apart.

    Raises:
        NotImplementedError: heads are no multiple of the tile, or not 512 values with at most 64 channels behind them.
    """
    launch = launch or SpecialisedLaunch()
    heads, keys = launch.block_heads, launch.block_keys
    if num_heads % heads:
        raise NotImplementedError(f"num_heads: expected a multiple of {heads}, got {num_heads}")
    if value_dim != 512 or width not in (512, 576):
        raise NotImplementedError(f"width, value_dim: expected 512 or 576, and 512, got {width}, {value_dim}")
    half, tail, tiles = value_dim // 2, width - value_dim, num_heads // heads
    step = GROUP // ROW_THREADS  # rows that the producer reads at a time
    tokens, entries, pages, slots, page_stride = T.dynamic("tokens, entries, pages, slots, page_stride")

    @T.macro
    def read_query(q_thd, token, head, target, h, lane, first, span):
        """Copy `span` channels of a query from channel `first` on."""
        for u in T.unroll(span // (8 * ROW_THREADS)):
            at = lane * 8 + u * 8 * ROW_THREADS
            T.ptx_cp_async(T.access_ptr(target[h, at], "w", 8), T.access_ptr(q_thd[token, head, first + at], "r", 8), 8)

    @T.macro
    def read_key(kv_pod, row, page, slot, target, now, j, lane, first, span):
        """Copy `span` channels of a row from channel `first` on; the row -1 becomes zeros."""
        for u in T.unroll(span // (8 * ROW_THREADS)):
            at = lane * 8 + u * 8 * ROW_THREADS
            T.ptx_cp_async(
                T.access_ptr(target[now, j, at], "w", 8),
                T.access_ptr(kv_pod[page, slot, first + at], "r", 8),
                8,
                row >= 0,
            )

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
        with T.Kernel(tokens * tiles, threads=3 * GROUP) as program:
            q_left = T.alloc_shared((heads, half), T.bfloat16)
            q_right = T.alloc_shared((heads, half), T.bfloat16)
            key_left = T.alloc_shared((2, keys, half), T.bfloat16)
            key_right = T.alloc_shared((2, keys, half), T.bfloat16)
            if tail:
                q_tail = T.alloc_shared((heads, tail), T.bfloat16)
                key_tail = T.alloc_shared((2, keys, tail), T.bfloat16)
            weight = T.alloc_shared((heads, keys), T.bfloat16)
            factor = T.alloc_shared((heads,), T.float32)
            is_key = T.alloc_shared((2, keys), T.int32)
            left = T.alloc_fragment((heads, half), T.float32)
            right = T.alloc_fragment((heads, half), T.float32)
            score = T.alloc_fragment((heads, keys), T.float32)
            top = T.alloc_fragment((heads,), T.float32)
            new_top = T.alloc_fragment((heads,), T.float32)
            shrink = T.alloc_fragment((heads,), T.float32)
            shrink_right = T.alloc_fragment((heads,), T.float32)
            total = T.alloc_fragment((heads,), T.float32)
            block_total = T.alloc_fragment((heads,), T.float32)
            row = T.alloc_local((keys // step,), T.int32)
            page = T.alloc_local((keys // step,), T.int32)
            slot = T.alloc_local((keys // step,), T.int32)
            q_ready = T.alloc_barrier(GROUP)
            key_ready = T.alloc_barrier([GROUP, GROUP])
            key_free = T.alloc_barrier([2 * GROUP, 2 * GROUP])
            named_ready = T.alloc_barrier([GROUP, GROUP])  # `is_key` is written by ordinary stores
            weight_ready = T.alloc_barrier(GROUP)
            weight_free = T.alloc_barrier(GROUP)

            # 1. which token, heads and entries this program owns
            token = program // tiles
            head0 = program % tiles * heads
            list_end = T.min(topk_length_t[token], entries) if has_length else entries
            blocks = T.ceildiv(list_end, keys)
            thread = T.get_thread_binding()

            if thread < GROUP:
                # 2. scores, weights, the left half of the values
                T.set_max_nreg(launch.first_registers, 1)
                T.fill(top, LOWEST)
                T.fill(total, 0.0)
                T.fill(left, 0.0)
                T.barrier_wait(q_ready, 0)
                for block in T.serial(blocks):
                    now = block % 2
                    T.barrier_wait(key_ready[now], block // 2 % 2)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_left, key_left[now, :, :], score, transpose_B=True, clear_accum=True)
                    T.wgmma_gemm(q_right, key_right[now, :, :], score, transpose_B=True)
                    if tail:
                        T.wgmma_gemm(q_tail, key_tail[now, :, :], score, transpose_B=True)
                    T.wait_wgmma(0)
                    T.barrier_wait(named_ready[now], block // 2 % 2)
                    for h, j in T.Parallel(heads, keys):
                        score[h, j] = T.if_then_else(
                            is_key[now, j] != 0, score[h, j] * scale_log2, -T.infinity(T.float32)
                        )
                    T.copy(top, new_top)
                    T.reduce_max(score, new_top, dim=1, clear=False)
                    for h in T.Parallel(heads):
                        shrink[h] = T.exp2(top[h] - new_top[h])
                    for h, j in T.Parallel(heads, keys):
                        score[h, j] = T.exp2(score[h, j] - new_top[h])
                    T.reduce_sum(score, block_total, dim=1)
                    for h in T.Parallel(heads):
                        total[h] = total[h] * shrink[h] + block_total[h]
                        top[h] = new_top[h]
                    T.barrier_wait(weight_free, block % 2 ^ 1)
                    T.copy(score, weight)
                    T.copy(shrink, factor)
                    T.fence_proxy_async()
                    T.barrier_arrive(weight_ready)
                    for h, u in T.Parallel(heads, half):
                        left[h, u] = left[h, u] * shrink[h]
                    T.barrier_wait(weight_ready, block % 2)
                    T.wgmma_gemm(weight, key_left[now, :, :], left)
                    T.wait_wgmma(0)
                    T.barrier_arrive(key_free[now])

                # 3. divide by the row sum plus the sink; a row without keys is 0, and a NaN sum stays visible
                for h in T.Parallel(heads):
                    # may overflow to inf on purpose: the quotient is then 0
                    sink = T.exp2(sink_h[head0 + h] * LOG2_E - top[h]) if has_sink else T.float32(0)
                    shrink[h] = T.if_then_else(total[h] == 0.0, 0.0, 1.0 / (total[h] + sink))
                    lse_th[token, head0 + h] = (top[h] + T.log2(total[h])) * LN_2
                T.barrier_wait(weight_free, blocks % 2 ^ 1)
                T.copy(shrink, factor)
                T.barrier_arrive(weight_ready)
                for h, u in T.Parallel(heads, half):
                    left[h, u] = left[h, u] * shrink[h]
                T.copy(left, q_left)
                T.copy(q_left, out_thu[token, head0 : head0 + heads, 0:half])
            elif thread < 2 * GROUP:
                # 4. the right half of the values
                T.set_max_nreg(launch.second_registers, 1)
                T.fill(right, 0.0)
                for block in T.serial(blocks):
                    now = block % 2
                    T.barrier_wait(key_ready[now], block // 2 % 2)
                    T.fence_proxy_async()
                    T.barrier_wait(weight_ready, block % 2)
                    T.copy(factor, shrink_right)
                    for h, u in T.Parallel(heads, half):
                        right[h, u] = right[h, u] * shrink_right[h]
                    T.wgmma_gemm(weight, key_right[now, :, :], right)
                    T.wait_wgmma(0)
                    T.barrier_arrive(weight_free)
                    T.barrier_arrive(key_free[now])
                T.barrier_wait(weight_ready, blocks % 2)
                T.copy(factor, shrink_right)
                for h, u in T.Parallel(heads, half):
                    right[h, u] = right[h, u] * shrink_right[h]
                T.copy(right, q_right)
                T.copy(q_right, out_thu[token, head0 : head0 + heads, half:value_dim])
            else:
                # 5. the queries, then the keys of block after block
                T.set_max_nreg(launch.producer_registers, 0)
                lane = (thread - 2 * GROUP) % ROW_THREADS
                first = (thread - 2 * GROUP) // ROW_THREADS
                for g in T.unroll(heads // step):
                    h = g * step + first
                    read_query(q_thd, token, head0 + h, q_left, h, lane, 0, half)
                    read_query(q_thd, token, head0 + h, q_right, h, lane, half, half)
                    if tail:
                        read_query(q_thd, token, head0 + h, q_tail, h, lane, value_dim, tail)
                T.fence_proxy_async()
                T.cp_async_barrier_noinc(q_ready)
                for block in T.serial(blocks):
                    now = block % 2
                    for g in T.unroll(keys // step):
                        entry = block * keys + g * step + first
                        row[g] = T.if_then_else(entry < list_end, idx_tk[token, entry], -1)
                        row[g] = T.if_then_else(row[g] < pages * slots, row[g], -1)
                        page[g] = T.max(row[g], 0) // slots
                        slot[g] = T.max(row[g], 0) - page[g] * slots
                    T.barrier_wait(key_free[now], block // 2 % 2 ^ 1)
                    for g in T.unroll(keys // step):
                        if lane == 0:
                            is_key[now, g * step + first] = T.if_then_else(row[g] >= 0, 1, 0)
                    T.barrier_arrive(named_ready[now])
                    for g in T.unroll(keys // step):
                        j = g * step + first
                        read_key(kv_pod, row[g], page[g], slot[g], key_left, now, j, lane, 0, half)
                        read_key(kv_pod, row[g], page[g], slot[g], key_right, now, j, lane, half, half)
                        if tail:
                            read_key(kv_pod, row[g], page[g], slot[g], key_tail, now, j, lane, value_dim, tail)
                    T.fence_proxy_async()
                    T.cp_async_barrier_noinc(key_ready[now])

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
