"""Sparse attention over two caches on SM90: window rows or records, then compressed records, in one softmax.

The roles are those of `roles_sm90.py`. The third group reads codes and scales of a block into registers while it
writes those of the one before as bf16 keys to shared memory: the value of a code times its scale is exact there.
Nothing is split, so a row has the same bits alone or in any batch, and the same from rows as from records.
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
    first_group,
    name_keys,
    read_queries,
    read_rows,
    second_group,
    shared_memory,
)

LANES = 4  # threads that bring one row, 16 channels each at a time
STEP = GROUP // LANES
PASSES = KEYS // STEP  # rows of a block that a thread brings a part of
PARTS = VALUES // (16 * LANES)  # sixteens of channels that it brings of each
BYTES = {"e4m3": VALUES, "e2m1": VALUES // 2}
SCALES = {"e4m3": VALUES // 32, "e2m1": VALUES // 16}
WORDS = {"e4m3": 4, "e2m1": 2}  # of a part

# two instructions for a pair of codes, which no expression of the language lowers to
DECODE = """
#include <cuda_fp8.h>

__device__ __forceinline__ void dt_read16(void *to, const void *at, bool is_key) {
  *(uint4 *)to = is_key ? __ldg((const uint4 *)at) : make_uint4(0u, 0u, 0u, 0u);
}

__device__ __forceinline__ void dt_read8(void *to, const void *at, bool is_key) {
  *(uint2 *)to = is_key ? __ldg((const uint2 *)at) : make_uint2(0u, 0u);
}

// eight e2m1 codes and an e4m3 scale
__device__ __forceinline__ void dt_put_e2m1(void *out, unsigned code, unsigned scale_byte) {
  const __half_raw wide = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)scale_byte, __NV_E4M3);
  const __nv_bfloat162 scale = __float2bfloat162_rn(__half2float(__half(wide)) * 64.0f);
  const __nv_bfloat162 lift = __float2bfloat162_rn(0x1p120f);
  unsigned pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // magnitude and sign of codes i and i + 4 at their places in bf16: 2^-126 of their values
    const unsigned at = code >> (4 * i);
    unsigned bits = ((at & 0x00070007u) << 6) | ((at & 0x00080008u) << 12);
    __nv_bfloat162 value = __hmul2(__hmul2(*reinterpret_cast<__nv_bfloat162 *>(&bits), lift), scale);
    pair[i] = *reinterpret_cast<unsigned *>(&value);
  }
  uint4 all;
  all.x = __byte_perm(pair[0], pair[1], 0x5410);
  all.y = __byte_perm(pair[2], pair[3], 0x5410);
  all.z = __byte_perm(pair[0], pair[1], 0x7632);
  all.w = __byte_perm(pair[2], pair[3], 0x7632);
  *reinterpret_cast<uint4 *>(out) = all;
}

// eight e4m3 codes and a UE8M0 scale
__device__ __forceinline__ void dt_put_e4m3(void *out, unsigned low, unsigned high, unsigned scale_byte) {
  const unsigned bits = scale_byte == 255u ? 0x7FC00000u : scale_byte == 0u ? 0x00400000u : scale_byte << 23;
  const float scale = __uint_as_float(bits);
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


def two_cache_program(
    num_heads: int, window: str, main: str, *, sectioned: bool, has_sink: bool, roles: Roles | None = None
):
    """The program for any number of tokens, list entries and pages; `window` is "rows" or a code, `main` a code.

    Raises:
        NotImplementedError: heads are no multiple of the tile.
    """
    roles = roles or Roles(multiply=192, bring=120)
    if num_heads % HEADS:
        raise NotImplementedError(f"num_heads: expected a multiple of {HEADS}, got {num_heads}")
    tiles = num_heads // HEADS
    tokens, window_entries, main_entries = T.dynamic("tokens, window_entries, main_entries")
    window_pages, window_slots, window_width, window_stride = T.dynamic(
        "window_pages, window_slots, window_width, window_stride"
    )
    main_pages, main_bytes, main_stride = T.dynamic("main_pages, main_bytes, main_stride")
    if window == "rows":
        window_type = T.StridedTensor((window_pages, window_slots, VALUES), (window_stride, VALUES, 1), T.bfloat16)
    else:
        window_type = T.StridedTensor((window_pages, window_width), (window_stride, 1), T.uint8)

    @T.macro
    def name_rows(window_idx_tk, main_idx_tk, token, block, window_blocks, ahead, first):
        """Start reading which rows of a block this thread brings a part of."""
        for g in T.unroll(PASSES):
            entry = block * KEYS + g * STEP + first
            later = entry - window_blocks * KEYS
            if block < window_blocks:
                ahead[g] = T.if_then_else(entry < window_entries, window_idx_tk[token, entry], -1)
            else:
                ahead[g] = T.if_then_else(later < main_entries, main_idx_tk[token, later], -1)

    @T.macro
    def find_rows(in_window, page_slots, main_slots, ahead, row, page, slot):
        """Page and slot of the named rows; -1 for what no cache holds."""
        bound = T.if_then_else(in_window, window_pages * page_slots, main_pages * main_slots)
        slots = T.if_then_else(in_window, page_slots, main_slots)
        for g in T.unroll(PASSES):
            row[g] = T.if_then_else(ahead[g] < bound, ahead[g], -1)
            page[g] = T.truncdiv(T.max(row[g], 0), slots)
            slot[g] = T.max(row[g], 0) - page[g] * slots

    @T.macro
    def read_record(pages_pb, kind, row, page, slot, slots, lane, code, sf, g):
        """Start reading this thread's codes and the scales of a record; those of the row -1 are zero."""
        size, scales, words = BYTES[kind], SCALES[kind], WORDS[kind]
        data = slot * size if sectioned else slot * (size + scales)
        scale = slots * size + slot * scales if sectioned else data + size
        for u in T.unroll(PARTS):
            T.call_extern(
                "handle",
                "dt_read16" if kind == "e4m3" else "dt_read8",
                T.address_of(code[(g * PARTS + u) * 4]),
                T.address_of(pages_pb[page, data + (u * LANES + lane) * 4 * words]),
                row >= 0,
            )
        for w in T.unroll(scales // 16):
            T.call_extern(
                "handle",
                "dt_read16",
                T.address_of(sf[g * 8 + w * 4]),
                T.address_of(pages_pb[page, scale + 16 * w]),
                row >= 0,
            )

    @T.macro
    def put_half(target, kind, first, now, j, lane, code, sf, g):
        """Write this thread's parts from `first` on to half a key in shared memory, as bf16."""
        for v in T.unroll(PARTS // 2):
            u = first + v
            at, word = (v * LANES + lane) * 16, (g * PARTS + u) * 4
            low, high = T.address_of(target[now, j, at]), T.address_of(target[now, j, at + 8])
            if kind == "e4m3":
                shift = T.cast(8 * (u % 2 * 2 + lane // 2), T.uint32)
                scale = sf[g * 8 + u // 2] >> shift & T.uint32(255)
                T.call_extern("handle", "dt_put_e4m3", low, code[word], code[word + 1], scale)
                T.call_extern("handle", "dt_put_e4m3", high, code[word + 2], code[word + 3], scale)
            else:
                scale = sf[g * 8 + u] >> T.cast(8 * lane, T.uint32) & T.uint32(255)
                T.call_extern("handle", "dt_put_e2m1", low, code[word], scale)
                T.call_extern("handle", "dt_put_e2m1", high, code[word + 1], scale)

    @T.macro
    def put_record(shared, kind, now, j, lane, code, sf, g):
        """Write this thread's part of a key to shared memory, as bf16."""
        put_half(shared.key_left, kind, 0, now, j, lane, code, sf, g)
        put_half(shared.key_right, kind, PARTS // 2, now, j, lane, code, sf, g)

    @T.prim_func
    def two_cache_attn(
        q_thd: T.Tensor((tokens, num_heads, VALUES), T.bfloat16),
        window_rows: window_type,
        window_idx_tk: T.Tensor((tokens, window_entries), T.int32),
        main_pb: T.StridedTensor((main_pages, main_bytes), (main_stride, 1), T.uint8),
        main_idx_tk: T.Tensor((tokens, main_entries), T.int32),
        sink_h: T.Tensor((num_heads,), T.float32),
        out_thd: T.Tensor((tokens, num_heads, VALUES), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        scale_log2: T.float32,
        page_slots: T.int32,
        main_slots: T.int32,
    ):
        with T.Kernel(tokens * tiles, threads=THREADS) as program:
            T.import_source(DECODE)
            shared = shared_memory(0)
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
            own = T.alloc_fragment((HEADS,), T.float32)
            ahead = T.alloc_local((PASSES,), T.int32)
            row = T.alloc_local((PASSES,), T.int32)
            page = T.alloc_local((PASSES,), T.int32)
            slot = T.alloc_local((PASSES,), T.int32)
            next_row = T.alloc_local((PASSES,), T.int32)
            next_page = T.alloc_local((PASSES,), T.int32)
            next_slot = T.alloc_local((PASSES,), T.int32)
            code = T.alloc_local((PASSES * PARTS * 4,), T.uint32)
            sf = T.alloc_local((PASSES * 8,), T.uint32)

            # 1. which token and heads this program owns
            token = program // tiles
            head0 = program % tiles * HEADS
            window_blocks = T.ceildiv(window_entries, KEYS)
            blocks = window_blocks + T.ceildiv(main_entries, KEYS)
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
                    top,
                    total,
                    shrink,
                    block_top,
                    block_total,
                    0,
                    window == "rows",
                )
                for h in T.Parallel(HEADS):
                    lse_th[token, head0 + h] = (top[h] + T.log2(total[h])) * LN_2
                divide_sums(left, top, total, shrink, sink_h, head0, has_sink)
                T.copy(left, shared.q_left)
                T.copy(shared.q_left, out_thd[token, head0 : head0 + HEADS, 0:HALF])
            elif thread < 2 * GROUP:
                # 3. odd blocks, the right half
                T.set_max_nreg(roles.multiply, 1)
                second_group(
                    shared,
                    blocks,
                    scale_log2,
                    right,
                    score_right,
                    top_right,
                    total_right,
                    shrink_right,
                    block_top_right,
                    block_total_right,
                    own,
                    0,
                    window == "rows",
                )
                divide_sums(right, top_right, total_right, shrink_right, sink_h, head0, has_sink)
                T.copy(right, shared.q_right)
                T.copy(shared.q_right, out_thd[token, head0 : head0 + HEADS, HALF:VALUES])
            else:
                # 4. the queries, then the keys of block after block
                T.set_max_nreg(roles.bring, 0)
                lane = (thread - 2 * GROUP) % LANES
                first = (thread - 2 * GROUP) // LANES
                for local in (code, sf):
                    T.clear(local)
                name_rows(window_idx_tk, main_idx_tk, token, 0, window_blocks, ahead, first)
                find_rows(window_blocks > 0, page_slots, main_slots, ahead, row, page, slot)
                name_rows(window_idx_tk, main_idx_tk, token, 1, window_blocks, ahead, first)
                for g in T.unroll(PASSES):
                    if window_blocks == 0:
                        read_record(main_pb, main, row[g], page[g], slot[g], main_slots, lane, code, sf, g)
                    elif window != "rows":
                        read_record(window_rows, window, row[g], page[g], slot[g], page_slots, lane, code, sf, g)
                read_queries(q_thd, token, head0, shared, first, lane, 0, LANES)
                for block in T.serial(blocks):
                    now = block % 2
                    find_rows(block + 1 < window_blocks, page_slots, main_slots, ahead, next_row, next_page, next_slot)
                    name_rows(window_idx_tk, main_idx_tk, token, block + 2, window_blocks, ahead, first)
                    T.barrier_wait(shared.key_free[now], block // 2 % 2 ^ 1)
                    name_keys(shared, now, row, first, lane, LANES)
                    if window == "rows" and block < window_blocks:
                        read_rows(window_rows, shared, now, row, page, slot, first, lane, 0, True, LANES)
                    # a part of the next block is read as soon as its registers are free
                    for g in T.unroll(PASSES):
                        j = g * STEP + first
                        if block >= window_blocks:
                            put_record(shared, main, now, j, lane, code, sf, g)
                        elif window != "rows":
                            put_record(shared, window, now, j, lane, code, sf, g)
                        if block + 1 >= window_blocks:
                            read_record(
                                main_pb, main, next_row[g], next_page[g], next_slot[g], main_slots, lane, code, sf, g
                            )
                        elif window != "rows":
                            read_record(
                                window_rows,
                                window,
                                next_row[g],
                                next_page[g],
                                next_slot[g],
                                page_slots,
                                lane,
                                code,
                                sf,
                                g,
                            )
                    if window != "rows" or block >= window_blocks:
                        T.fence_proxy_async()
                        T.barrier_arrive(shared.left_ready[now])
                        T.barrier_arrive(shared.right_ready[now])
                    for g in T.unroll(PASSES):
                        row[g] = next_row[g]
                        page[g] = next_page[g]
                        slot[g] = next_slot[g]

    return two_cache_attn


@lru_cache(maxsize=32)
def _compiled(num_heads: int, window: str, main: str, sectioned: bool, has_sink: bool) -> Any:
    program = two_cache_program(num_heads, window, main, sectioned=sectioned, has_sink=has_sink)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)


def two_cache_attn(
    q_thd: torch.Tensor,
    window: torch.Tensor,
    window_idx_tk: torch.Tensor,
    main_pow: torch.Tensor,
    main_idx_tk: torch.Tensor,
    sink_h: torch.Tensor | None,
    *,
    kinds: tuple[str, str],
    sectioned: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build once for heads and kinds, and launch; `window` is rows [s, d] or pages, whose bytes follow one another."""
    tokens, num_heads, _ = q_thd.shape
    out_thd = torch.empty_like(q_thd, memory_format=torch.contiguous_format)
    lse_th = torch.empty(tokens, num_heads, dtype=torch.float32, device=q_thd.device)
    if tokens == 0:
        return out_thd, lse_th
    window_idx_tk, main_idx_tk = _not_empty(window_idx_tk), _not_empty(main_idx_tk)
    kernel = _compiled(num_heads, *kinds, sectioned, sink_h is not None)
    rows = kinds[0] == "rows"
    window_slots = window.shape[0] if rows else window.shape[1]
    kernel(
        q_thd,
        window.unsqueeze(0) if rows else _bytes(window),
        window_idx_tk,
        _bytes(main_pow),
        main_idx_tk,
        lse_th.new_empty(num_heads) if sink_h is None else sink_h,  # what a program does not take is its argument
        out_thd,
        lse_th,
        scale * LOG2_E,
        max(window_slots, 1),
        max(main_pow.shape[1], 1),
    )
    return out_thd, lse_th


def _bytes(pages_pow: torch.Tensor) -> torch.Tensor:
    """Pages as rows of bytes, wherever they lie."""
    return pages_pow.as_strided((pages_pow.shape[0], pages_pow[0].numel()), (pages_pow.stride(0), 1))


def _not_empty(idx_tk: torch.Tensor) -> torch.Tensor:
    """A list of nothing as one of a hole: a program takes no empty argument."""
    return idx_tk if idx_tk.shape[1] else idx_tk.new_full((len(idx_tk), 1), -1)
