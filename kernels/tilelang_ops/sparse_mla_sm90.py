"""Sparse latent attention on SM90 over records of 656 bytes, by the roles of `seesaw_sm90.py`.

A record is 512 codes, four fp32 scales and 64 bf16 channels that only enter the score. In the third group four threads
share a row: each reads 64 codes of half a row, with their scale, into registers and writes them two halves later, as
code times scale in bf16; the channels behind them are copied. Eight rows lie side by side in a warp, so that what it
writes at a time lies in different banks. The list is not split, so a row has the same bits alone or in any batch.
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
    read_queries,
    second_group,
    shared_memory,
)

LANES = 4  # threads that bring one row, 64 channels each of a half
STEP = GROUP // LANES
PASSES = KEYS // STEP  # rows of a block that a thread brings a part of
PARTS = HALF // (16 * LANES)  # sixteens of channels that it brings of half a row
UNIT = 16  # bytes in which places of records are counted, so that 32 bits hold one
TAIL = 64
WIDTH = VALUES + TAIL
RECORD = 656 // UNIT
SCALES_AT = VALUES // UNIT  # four, each of 128 channels
TAIL_AT = SCALES_AT + 1

# a conversion of a pair of codes, which no expression of the language lowers to
DECODE = """
#include <cuda_fp8.h>

__device__ __forceinline__ void dt_read16(void *to, const void *at, bool is_key) {
  *(uint4 *)to = is_key ? __ldg((const uint4 *)at) : make_uint4(0u, 0u, 0u, 0u);
}

__device__ __forceinline__ void dt_read4(void *to, const void *at, bool is_key) {
  *(unsigned *)to = is_key ? __ldg((const unsigned *)at) : 0u;
}

// eight e4m3 codes and their scale
__device__ __forceinline__ void dt_put_e4m3(void *out, unsigned low, unsigned high, float scale) {
  unsigned part[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned code = (i < 2 ? low : high) >> (16 * (i & 1));
    const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(code & 0xFFFFu), __NV_E4M3);
    const float2 value = __half22float2(__half2(wide));
    __nv_bfloat162 narrow = __floats2bfloat162_rn(value.x * scale, value.y * scale);
    part[i] = *reinterpret_cast<unsigned *>(&narrow);
  }
  *reinterpret_cast<uint4 *>(out) = make_uint4(part[0], part[1], part[2], part[3]);
}
"""


@T.macro
def place_rows(held, slots, stride, ahead, place, now):
    """Where the named records begin; -1 for what the cache does not hold."""
    for g in T.unroll(PASSES):
        i = now * PASSES + g
        page = T.truncdiv(T.max(ahead[i], 0), slots)
        slot = T.max(ahead[i], 0) - page * slots
        place[i] = T.if_then_else(ahead[i] >= 0 and ahead[i] < held, page * stride + slot * RECORD, -1)


@T.macro
def name_rows(idx_tk, token, block, list_end, ahead, now, first):
    """Start reading which rows of a block this thread brings a part of."""
    for g in T.unroll(PASSES):
        entry = block * KEYS + g * STEP + first
        ahead[now * PASSES + g] = T.if_then_else(entry < list_end, idx_tk[token, entry], -1)


@T.macro
def read_part(cache_xo, half, now, place, lane, code, scale):
    """Start reading this thread's codes of half a block, and their scale."""
    for g in T.unroll(PASSES):
        i = now * PASSES + g
        at = T.max(place[i], 0)
        for u in T.unroll(PARTS):
            T.call_extern(
                "handle",
                "dt_read16",
                T.address_of(code[(i * PARTS + u) * 4]),
                T.address_of(cache_xo[at, ((half * LANES + lane) * PARTS + u) * 16]),
                place[i] >= 0,
            )
        T.call_extern(
            "handle",
            "dt_read4",
            T.address_of(scale[i]),
            T.address_of(cache_xo[at + SCALES_AT, (half * 2 + lane // 2) * 4]),
            place[i] >= 0,
        )


@T.macro
def put_part(shared, half, now, first, lane, code, scale):
    """Write this thread's part of half a block to shared memory, as bf16."""
    for g in T.unroll(PASSES):
        j, i = g * STEP + first, now * PASSES + g
        for v in T.unroll(2 * PARTS):
            word = i * PARTS * 4 + v * 2
            T.call_extern(
                "handle",
                "dt_put_e4m3",
                T.address_of(shared.key[half, now, j, lane * PARTS * 16 + v * 8]),
                code[word],
                code[word + 1],
                scale[i],
            )


@T.macro
def copy_tail(cache_xo, shared, now, place, first, lane):
    """Copy this thread's part of the channels behind the values."""
    for g in T.unroll(PASSES):
        i = now * PASSES + g
        for u in T.unroll(TAIL // (8 * LANES)):
            at = (lane + u * LANES) * 8
            T.call_extern(
                "handle",
                "tl::cp_async_gs_conditional<16>",
                T.address_of(shared.key_tail[now, g * STEP + first, at]),
                T.address_of(cache_xo[T.max(place[i], 0) + TAIL_AT, at * 2]),
                place[i] >= 0,
            )
    T.cp_async_barrier_noinc(shared.tail_ready[now])


def sparse_mla_program(num_heads: int, *, has_length: bool, roles: Roles | None = None):
    """The program for any number of tokens, list entries and pages, which may lie apart.

    Raises:
        NotImplementedError: heads are no multiple of the tile.
    """
    roles = roles or Roles(multiply=208, bring=88)
    if num_heads % HEADS:
        raise NotImplementedError(f"num_heads: expected a multiple of {HEADS}, got {num_heads}")
    tiles = num_heads // HEADS
    tokens, entries, units = T.dynamic("tokens, entries, units")

    @T.prim_func
    def sparse_mla(
        q_thd: T.Tensor((tokens, num_heads, WIDTH), T.bfloat16),
        cache_xo: T.StridedTensor((units, UNIT), (UNIT, 1), T.uint8),
        idx_tk: T.Tensor((tokens, entries), T.int32),
        topk_length_t: T.Tensor((tokens,), T.int32),
        out_thu: T.Tensor((tokens, num_heads, VALUES), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        scale_log2: T.float32,
        held: T.int32,
        slots: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(tokens * tiles, threads=THREADS) as program:
            T.import_source(DECODE + EXP2)
            shared = shared_memory(TAIL)
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
            ahead = T.alloc_local((2 * PASSES,), T.int32)
            place = T.alloc_local((2 * PASSES,), T.int32)
            code = T.alloc_local((2 * PASSES * PARTS * 4,), T.uint32)
            scale = T.alloc_local((2 * PASSES,), T.float32)

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
                    TAIL,
                    True,
                    True,
                )
                for h in T.Parallel(HEADS):
                    lse_th[token, head0 + h] = (top[h] + T.log2(total[h])) * LN_2
                divide_sums(left, top, total, shrink, lse_th, head0, False)
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
                    TAIL,
                    True,
                    True,
                )
                divide_sums(right, top_right, total_right, shrink_right, lse_th, head0, False)
                T.copy(right, shared.q[1, :, :])
                T.copy(shared.q[1, :, :], out_thu[token, head0 : head0 + HEADS, HALF:VALUES])
            else:
                # 4. the queries, then the keys of block after block
                T.set_max_nreg(roles.bring, 0)
                lane = thread % 32 // 8
                first = (thread - 2 * GROUP) // 32 * 8 + thread % 8
                for local in (code, scale):
                    T.clear(local)
                for now in T.unroll(2):
                    name_rows(idx_tk, token, now, list_end, ahead, now, first)
                for now in T.unroll(2):
                    place_rows(held, slots, stride, ahead, place, now)
                    name_rows(idx_tk, token, 2 + now, list_end, ahead, now, first)
                    read_part(cache_xo, now, now, place, lane, code, scale)
                read_queries(q_thd, token, head0, shared, first, lane, TAIL, LANES)
                for pair in T.serial(T.ceildiv(blocks, 2)):
                    # halves in the order in which they become free
                    for turn in T.serial(2):
                        for now in T.unroll(2):
                            half = turn ^ now
                            if pair * 2 + now < blocks:
                                T.barrier_wait(shared.free[half_of(half, now)], pair % 2 ^ 1)
                                if turn == 0:
                                    name_keys(shared, now, place, now * PASSES, first, lane, LANES)
                                else:
                                    copy_tail(cache_xo, shared, now, place, first, lane)
                                put_part(shared, half, now, first, lane, code, scale)
                                T.barrier_arrive(shared.ready[half_of(half, now)])
                            # the registers are free for what the same buffer takes next
                            if turn == 1:
                                place_rows(held, slots, stride, ahead, place, now)
                                name_rows(idx_tk, token, pair * 2 + 4 + now, list_end, ahead, now, first)
                            read_part(cache_xo, 1 - half, now, place, lane, code, scale)

    return sparse_mla


@lru_cache(maxsize=16)
def _compiled(num_heads: int, has_length: bool) -> Any:
    program = sparse_mla_program(num_heads, has_length=has_length)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)


def sparse_mla(
    q_thd: torch.Tensor,
    cache_pow: torch.Tensor,
    idx_tk: torch.Tensor,
    topk_length_t: torch.Tensor | None,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build once for the heads, and launch; queries and lists are contiguous, records of a page follow one another."""
    tokens, num_heads, _ = q_thd.shape
    out_thu = torch.empty(tokens, num_heads, VALUES, dtype=q_thd.dtype, device=q_thd.device)
    lse_th = torch.empty(tokens, num_heads, dtype=torch.float32, device=q_thd.device)
    if tokens == 0:
        return out_thu, lse_th
    if not idx_tk.shape[1]:  # a program takes no empty argument
        idx_tk = idx_tk.new_full((tokens, 1), -1)
    length_t = idx_tk.new_empty(tokens) if topk_length_t is None else topk_length_t
    kernel = _compiled(num_heads, topk_length_t is not None)
    pages, slots, _ = cache_pow.shape
    # pages, and what lies between them
    span = (pages - 1) * cache_pow.stride(0) + cache_pow[0].numel()
    units_xo = cache_pow.as_strided((span // UNIT, UNIT), (UNIT, 1))
    places = pages * slots, slots, cache_pow.stride(0) // UNIT
    kernel(q_thd, units_xo, idx_tk, length_t, out_thu, lse_th, scale * LOG2_E, *places)
    return out_thu, lse_th
