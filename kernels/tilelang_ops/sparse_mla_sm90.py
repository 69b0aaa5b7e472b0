"""Sparse latent attention on SM90 over records of 656 bytes, by the roles of `seesaw_sm90.py`.

A record is 512 codes, four fp32 scales and 64 bf16 channels that only enter the score. In the third group four threads
share a row. Each copies its codes of half a row to a place in shared memory that it alone reads, and takes them from
there when the next are on their way: what is read ahead in registers would wait for whatever was asked for last. Code
times scale is written as bf16; the channels behind the values are copied. Eight rows lie side by side in a warp, so
that what it writes at a time lies in different banks.

Two tiles of heads of one token are a cluster: each program decodes half of the rows of a block and writes them to both.
The list is not split, so a row has the same bits alone or in any batch.
"""

# mypy: disable-error-code="valid-type"

from functools import lru_cache
from typing import Any, NamedTuple

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
    read_queries,
    second_group,
    shared_memory,
)

LANES = 4  # threads that bring one row, 16 channels each at a time
ROWS = 32 // LANES  # that a warp brings at a time
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
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// of the thread's own copies; the wait of the language adds a barrier, under the name of that of the first group
__device__ __forceinline__ void dt_wait_copied() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void dt_take16(void *to, const void *at) {
  uint4 &x = *(uint4 *)to;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"((unsigned)__cvta_generic_to_shared(at)) : "memory");
}

__device__ __forceinline__ void dt_take4(void *to, const void *at) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(*(unsigned *)to)
               : "r"((unsigned)__cvta_generic_to_shared(at)) : "memory");
}

// four e4m3 codes times their scale, as bf16
__device__ __forceinline__ uint2 dt_e4m3x4(unsigned codes, float scale) {
  __half2 low, high;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(*(unsigned *)&low), "=r"(*(unsigned *)&high) : "r"(codes));
  const float2 x = __half22float2(low), y = __half22float2(high);
  const __nv_bfloat162 first = __floats2bfloat162_rn(x.x * scale, x.y * scale);
  const __nv_bfloat162 second = __floats2bfloat162_rn(y.x * scale, y.y * scale);
  return make_uint2(*(const unsigned *)&first, *(const unsigned *)&second);
}

__device__ __forceinline__ void dt_put8(void *out, unsigned low, unsigned high, float scale) {
  const uint2 x = dt_e4m3x4(low, scale), y = dt_e4m3x4(high, scale);
  *(uint4 *)out = make_uint4(x.x, x.y, y.x, y.y);
}

// what the warp has written, before its lanes send it
__device__ __forceinline__ void dt_settle() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// a KiB to the same place of the other program of the cluster, whose barrier counts the bytes
__device__ __forceinline__ void dt_send1024(void *from, void *ready, unsigned other) {
  const unsigned here = (unsigned)__cvta_generic_to_shared(from), bar = (unsigned)__cvta_generic_to_shared(ready);
  unsigned there, told;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(other));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(told) : "r"(bar), "r"(other));
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
               :: "r"(there), "r"(here), "r"(told) : "memory");
}
"""


class Raw(NamedTuple):
    """Codes and scales on their way, a place for each thread that brings them."""

    code: Any
    scale: Any


def part_of(u, lane):
    """Which sixteen channels of half a row a thread brings: two lanes take turns, so that sectors are read whole."""
    return (lane // 2 * PARTS + u) * 2 + lane % 2


def row_of(g, rank, first):
    """Which row of a block a thread brings in pass `g`: those of its own program come first."""
    return (g ^ rank) * STEP + first


@T.macro
def name_row(idx_tk, token, pair, list_end, ahead):
    """Start reading which record one of the rows is that this warp brings of a pair of blocks: another in each lane."""
    mine = T.get_thread_binding() % GROUP
    entry = pair * 2 * KEYS + mine % 32 // ROWS * STEP + mine // 32 * ROWS + mine % ROWS
    ahead[0] = T.if_then_else(entry < list_end, idx_tk[token, entry], -1)


@T.macro
def place_rows(held, slots, stride, ahead, rank, place):
    """Where the records of the rows begin that this thread brings a part of; -1 for what the cache does not hold."""
    page = T.truncdiv(T.max(ahead[0], 0), slots)
    slot = T.max(ahead[0], 0) - page * slots
    ahead[0] = T.if_then_else(ahead[0] >= 0 and ahead[0] < held, page * stride + slot * RECORD, -1)
    for now in T.unroll(2):
        for g in T.unroll(PASSES):
            lane = (now * PASSES + (g ^ rank)) * ROWS + T.get_thread_binding() % ROWS
            place[now * PASSES + g] = T.shfl_sync(ahead[0], lane)


@T.macro
def copy_codes(cache_xo, raw, half, place, lane):
    """Start copying this thread's codes of half a row, and their scales, to where it alone reads them."""
    mine = T.get_thread_binding() % GROUP
    at = T.max(place, 0)
    for u in T.unroll(PARTS):
        T.call_extern(
            "handle",
            "tl::cp_async_gs_conditional<16>",
            T.address_of(raw.code[u, mine, 0]),
            T.address_of(cache_xo[at, half * HALF + part_of(u, lane) * 16]),
            place >= 0,
        )
    T.call_extern(
        "handle",
        "tl::cp_async_gs_conditional<4>",
        T.address_of(raw.scale[mine]),
        T.address_of(cache_xo[at + SCALES_AT, (half * 2 + lane // 2) * 4]),
        place >= 0,
    )
    T.ptx_commit_group()


@T.macro
def take_codes(raw, code, scale):
    """Wait for what `copy_codes` has started, and read it."""
    mine = T.get_thread_binding() % GROUP
    T.call_extern("handle", "dt_wait_copied")
    for u in T.unroll(PARTS):
        T.call_extern("handle", "dt_take16", T.address_of(code[u * 4]), T.address_of(raw.code[u, mine, 0]))
    T.call_extern("handle", "dt_take4", T.address_of(scale[0]), T.address_of(raw.scale[mine]))


@T.macro
def put_codes(shared, half, now, j, lane, code, scale):
    """Write this thread's part of half a row to shared memory, as bf16."""
    for u in T.unroll(PARTS):
        for v in T.unroll(2):
            at = T.address_of(shared.key[half, now, j, part_of(u, lane) * 16 + v * 8])
            T.call_extern("handle", "dt_put8", at, code[u * 4 + v * 2], code[u * 4 + v * 2 + 1], scale[0])


@T.macro
def share_rows(shared, half, now, rank):
    """Send the rows that this warp has written, in panels of 64 channels, and expect those of the other program."""
    mine = T.get_thread_binding() % GROUP
    T.call_extern("handle", "dt_settle")
    if mine % 32 < HALF // 64:
        rows = T.address_of(shared.key[half, now, rank * STEP + mine // 32 * ROWS, mine % 32 * 64])
        T.call_extern("handle", "dt_send1024", rows, T.address_of(shared.ready[half_of(half, now)]), 1 - rank)
    if mine == 0:
        T.mbarrier_expect_tx(shared.ready[half_of(half, now)], STEP * HALF * 2)


@T.macro
def name_keys(shared, now, place, rank, first, lane):
    """Say which rows of a block are keys."""
    for g in T.unroll(PASSES):
        if lane == 0:
            shared.is_key[now, row_of(g, rank, first)] = T.if_then_else(place[now * PASSES + g] >= 0, 1, 0)
    T.barrier_arrive(shared.named[now])


@T.macro
def copy_tail(cache_xo, shared, now, place, rank, first, lane):
    """Copy this thread's part of the channels behind the values."""
    for g in T.unroll(PASSES):
        i = now * PASSES + g
        for u in T.unroll(TAIL // (8 * LANES)):
            at = (lane + u * LANES) * 8
            T.call_extern(
                "handle",
                "tl::cp_async_gs_conditional<16>",
                T.address_of(shared.key_tail[now, row_of(g, rank, first), at]),
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
    programs = 1 + (tiles % 2 == 0)  # of a cluster: tiles of one token, of which each decodes half of the keys
    own = PASSES // programs
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
        with T.Kernel(tokens * tiles, threads=THREADS, cluster_dims=programs) as program:
            T.import_source(DECODE + EXP2)
            shared = shared_memory(TAIL, programs=programs, flags="shared")
            raw = Raw(
                code=T.alloc_shared((PARTS, GROUP, 16), T.uint8),
                scale=T.alloc_shared((GROUP,), T.float32),
            )
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
            ahead = T.alloc_local((1,), T.int32)
            place = T.alloc_local((2 * PASSES,), T.int32)
            code = T.alloc_local((PARTS * 4,), T.uint32)
            scale = T.alloc_local((1,), T.float32)

            # 1. which token, heads and entries this program owns
            token = program // tiles
            head0 = program % tiles * HEADS
            list_end = T.min(topk_length_t[token], entries) if has_length else entries
            blocks = T.ceildiv(list_end, KEYS)
            rank = program % programs
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
                )
                divide_sums(right, top_right, total_right, shrink_right, lse_th, head0, False)
                T.copy(right, shared.q[1, :, :])
                T.copy(shared.q[1, :, :], out_thu[token, head0 : head0 + HEADS, HALF:VALUES])
            else:
                # 4. the queries, then the keys of block after block
                T.set_max_nreg(roles.bring, 0)
                lane = thread % 32 // ROWS
                first = (thread - 2 * GROUP) // 32 * ROWS + thread % ROWS
                name_row(idx_tk, token, 0, list_end, ahead)
                place_rows(held, slots, stride, ahead, rank, place)
                copy_codes(cache_xo, raw, 0, place[0], lane)
                name_row(idx_tk, token, 1, list_end, ahead)
                read_queries(q_thd, token, head0, shared, first, lane, TAIL, LANES)
                for pair in T.serial(T.ceildiv(blocks, 2)):
                    # halves in the order in which they become free
                    for turn in T.serial(2):
                        for now in T.unroll(2):
                            half = turn ^ now
                            for g in T.unroll(own):
                                take_codes(raw, code, scale)
                                if g + 1 < own:
                                    copy_codes(cache_xo, raw, half, place[now * PASSES + g + 1], lane)
                                elif now == 0:
                                    copy_codes(cache_xo, raw, 1 - turn, place[PASSES], lane)
                                elif turn == 0:
                                    copy_codes(cache_xo, raw, 1, place[0], lane)
                                if pair * 2 + now < blocks:
                                    if g == 0:
                                        T.barrier_wait(shared.free[half_of(half, now)], pair % 2 ^ 1)
                                        if turn == 0:
                                            name_keys(shared, now, place, rank, first, lane)
                                    put_codes(shared, half, now, row_of(g, rank, first), lane, code, scale)
                                    if g + 1 == own:
                                        if programs > 1:
                                            share_rows(shared, half, now, rank)
                                        T.barrier_arrive(shared.ready[half_of(half, now)])
                                        if turn == 1:
                                            copy_tail(cache_xo, shared, now, place, rank, first, lane)
                    place_rows(held, slots, stride, ahead, rank, place)
                    copy_codes(cache_xo, raw, 0, place[0], lane)
                    name_row(idx_tk, token, pair + 2, list_end, ahead)
                T.call_extern("handle", "dt_wait_copied")
            if programs > 1:
                T.cluster_sync()  # the other program writes here no more

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
