"""Sparse attention over two caches on SM90: window rows or records, then compressed records, in one softmax.

Records are those of V4.1 (528 and 288 bytes) and of V4 (584 bytes, a bf16 tail among them). The groups that multiply
are those of `turns_sm90.py`. The third group copies codes and scales of half a block to shared memory while it writes
the half before as bf16 keys: the value of a code times its scale is exact there. Nothing is split, so a row has the
same bits alone or in any batch, and the same from rows as from records.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass
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
    name_keys,
    read_queries,
    read_rows,
    shared_memory,
)
from .seesaw_sm90 import EXP2
from .turns_sm90 import attend_half, group_registers

LANES = 4  # threads that bring one row, 16 channels each at a time
STEP = GROUP // LANES
PASSES = KEYS // STEP  # rows of a block that a thread brings a part of
PARTS = VALUES // (16 * LANES)  # sixteens of channels that it brings of each


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a record holds."""

    part: int  # bytes of sixteen codes
    scales: int  # bytes of scales
    coded: int = PARTS  # sixteens of codes that a thread brings; one behind them is bf16

    @property
    def data(self) -> int:
        """Bytes of codes and of what is bf16."""
        return LANES * (self.coded * self.part + (PARTS - self.coded) * 32)


RECORDS = {
    "e4m3": Record(part=16, scales=16),
    "e2m1": Record(part=8, scales=32),
    "v4": Record(part=16, scales=8, coded=PARTS - 1),
}
PIECES = PARTS + 2  # sixteens of bytes for what a thread brings of a row, and for its scales


class Bringer(NamedTuple):
    """What a thread that brings keys works with: a number for each of its rows, and the bytes of one of them."""

    ahead: Any  # list entries of a later block
    row: Any  # -1 for what is no key
    page: Any
    slot: Any
    raw: Any  # what it brings of a row, in shared memory; only this thread reads what it copied
    code: Any  # the same in registers: codes and bf16, then scales


def bringer_memory() -> Bringer:
    """Allocate it."""
    ahead, row, page, slot = [T.alloc_local((PASSES,), T.int32) for _ in range(4)]
    raw = T.alloc_shared((PIECES, GROUP, 16), T.uint8)
    return Bringer(ahead, row, page, slot, raw, T.alloc_local((PIECES * 4,), T.uint32))


# two instructions for a pair of codes, which no expression of the language lowers to
DECODE = """
#include <cuda_fp8.h>

__device__ __forceinline__ void dt_wait_copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void dt_take(void *to, const void *at) {
  uint4 *v = (uint4 *)to;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v->x), "=r"(v->y), "=r"(v->z), "=r"(v->w) : "r"((unsigned)__cvta_generic_to_shared(at)) : "memory");
}

// no access to memory is moved over it: what is copied next must not wait for the decoding
__device__ __forceinline__ void dt_order() { __syncwarp(); }

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

// four e4m3 codes, times a power of two
__device__ __forceinline__ uint2 dt_scaled(unsigned code, __nv_bfloat162 scale) {
  __half2 wide[2];
  unsigned *bits = reinterpret_cast<unsigned *>(wide);
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(bits[0]), "=r"(bits[1]) : "r"(code));
  unsigned part[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 value = __half22float2(wide[i]);
    *reinterpret_cast<__nv_bfloat162 *>(&part[i]) = __hmul2(__floats2bfloat162_rn(value.x, value.y), scale);
  }
  return make_uint2(part[0], part[1]);
}

// eight e4m3 codes and a UE8M0 scale
__device__ __forceinline__ void dt_put_e4m3(void *out, unsigned low, unsigned high, unsigned scale_byte) {
  // as bf16: 2^-127 of the byte 0 and the NaN of the byte 255 have the bit below the exponent
  const unsigned one = (scale_byte << 7) | (((scale_byte + 1u) & 0xFEu) == 0u ? 0x40u : 0u);
  unsigned both = __byte_perm(one, one, 0x1010);
  const __nv_bfloat162 scale = *reinterpret_cast<__nv_bfloat162 *>(&both);
  const uint2 first = dt_scaled(low, scale), second = dt_scaled(high, scale);
  *reinterpret_cast<uint4 *>(out) = make_uint4(first.x, first.y, second.x, second.y);
}

// eight bf16 values
__device__ __forceinline__ void dt_put_bf16(void *out, unsigned a, unsigned b, unsigned c, unsigned d) {
  *reinterpret_cast<uint4 *>(out) = make_uint4(a, b, c, d);
}
"""


def scale_piece(kind):
    """Which piece the scales begin at."""
    return PARTS + (RECORDS[kind].coded < PARTS)


def scale_of(kind, mine, u, lane):
    """The scale byte of a part of a row."""
    word, byte = {"e4m3": (u // 2, u % 2 * 2 + lane // 2), "e2m1": (u, lane), "v4": (u // 4, u % 4)}[kind]
    return mine.code[scale_piece(kind) * 4 + word] >> T.cast(8 * byte, T.uint32) & T.uint32(255)


@T.macro
def name_rows(mine, idx_tk, token, block, entries, first):
    """Start reading which rows of a block this thread brings a part of."""
    for g in T.unroll(PASSES):
        entry = block * KEYS + g * STEP + first
        mine.ahead[g] = T.if_then_else(entry < entries, idx_tk[token, entry], -1)


@T.macro
def find_rows(mine, held, slots):
    """Page and slot of the named rows; -1 for what the cache does not hold."""
    for g in T.unroll(PASSES):
        mine.row[g] = T.if_then_else(mine.ahead[g] < held, mine.ahead[g], -1)
        mine.page[g] = T.truncdiv(T.max(mine.row[g], 0), slots)
        mine.slot[g] = T.max(mine.row[g], 0) - mine.page[g] * slots


@T.macro
def copy_run(mine, piece, pages_pb, page, at, size, step, is_key, me):
    """Start copying a run of bytes of a record, `step` at a time; zeros where there is no key."""
    for i in T.unroll(size // step):
        T.call_extern(
            "handle",
            "tl::cp_async_gs_conditional<16>" if step == 16 else "tl::cp_async_gs_conditional<8>",
            T.address_of(mine.raw[piece + i * step // 16, me, i * step % 16]),
            T.address_of(pages_pb[page, at + i * step]),
            is_key,
        )


@T.macro
def copy_record(mine, g, pages_pb, kind, sectioned, slots, lane, me):
    """Start copying this thread's parts and the scales of one of its records; those of the row -1 are zero."""
    fmt = RECORDS[kind]
    coded = fmt.coded * LANES * fmt.part
    step = 16 if sectioned or kind != "v4" else 8  # records of 584 bytes lie at multiples of 8
    page, is_key = mine.page[g], mine.row[g] >= 0
    data = mine.slot[g] * (fmt.data if sectioned else fmt.data + fmt.scales)
    scale = slots * fmt.data + mine.slot[g] * fmt.scales if sectioned else data + coded
    tail = data + coded if sectioned else scale + fmt.scales
    for u in T.unroll(fmt.coded):
        copy_run(
            mine, u, pages_pb, page, data + (u * LANES + lane) * fmt.part, fmt.part, min(step, fmt.part), is_key, me
        )
    if fmt.coded < PARTS:
        copy_run(mine, fmt.coded, pages_pb, page, tail + lane * 32, 32, step, is_key, me)
    copy_run(mine, scale_piece(kind), pages_pb, page, scale, fmt.scales, min(16, fmt.scales), is_key, me)
    T.call_extern("handle", "dt_order")


@T.macro
def take_record(mine, me):
    """Wait for what was copied last, and take it into registers."""
    T.call_extern("handle", "dt_wait_copied")
    for i in T.unroll(PIECES):
        T.call_extern("handle", "dt_take", T.address_of(mine.code[i * 4]), T.address_of(mine.raw[i, me, 0]))
    T.call_extern("handle", "dt_order")


@T.macro
def put_codes(target, mine, kind, u0, parts, now, j, lane):
    """Write coded parts from `u0` on to half a key in shared memory, as bf16."""
    for v in T.unroll(parts):
        u = u0 + v
        at, word, code = (v * LANES + lane) * 16, u * 4, mine.code
        low, high = T.address_of(target[now, j, at]), T.address_of(target[now, j, at + 8])
        scale = scale_of(kind, mine, u, lane)
        if kind == "e2m1":
            T.call_extern("handle", "dt_put_e2m1", low, code[word], scale)
            T.call_extern("handle", "dt_put_e2m1", high, code[word + 1], scale)
        else:
            T.call_extern("handle", "dt_put_e4m3", low, code[word], code[word + 1], scale)
            T.call_extern("handle", "dt_put_e4m3", high, code[word + 2], code[word + 3], scale)


@T.macro
def put_tail(target, mine, u, now, j, lane):
    """Write the bf16 part `u` of the right half of a key."""
    for v in T.unroll(2):
        word, code = (PARTS // 2 + u) * 4 + v * 4, mine.code
        T.call_extern(
            "handle",
            "dt_put_bf16",
            T.address_of(target[now, j, (u * LANES + lane) * 16 + v * 8]),
            code[word],
            code[word + 1],
            code[word + 2],
            code[word + 3],
        )


@T.macro
def put_record(shared, mine, kind, now, j, lane):
    """Write this thread's part of a key to shared memory, as bf16."""
    right = RECORDS[kind].coded - PARTS // 2
    put_codes(shared.key_left, mine, kind, 0, PARTS // 2, now, j, lane)
    put_codes(shared.key_right, mine, kind, PARTS // 2, right, now, j, lane)
    if right < PARTS // 2:
        put_tail(shared.key_right, mine, right, now, j, lane)


@T.macro
def bring_rows(shared, mine, rows_pod, held, slots, idx_tk, token, entries, first, lane):
    """Copy the listed rows, block by block from the first on, which has been named."""
    for block in T.serial(T.ceildiv(entries, KEYS)):
        now = block % 2
        find_rows(mine, held, slots)
        name_rows(mine, idx_tk, token, block + 1, entries, first)
        T.barrier_wait(shared.key_free[now], block // 2 % 2 ^ 1)
        name_keys(shared, now, mine.row, first, lane, LANES)
        read_rows(rows_pod, shared, now, mine.row, mine.page, mine.slot, first, lane, LANES)


@T.macro
def bring_records(shared, mine, pages_pb, kind, sectioned, held, slots, idx_tk, token, entries, done, first, lane):
    """Decode the listed records, block by block behind the blocks that are `done`; the first has been named.

    While half a block is decoded the next half is copied. The loads are no loads into registers, because the compiler
    lets whoever waits for one of those wait for all.
    """
    me = T.get_thread_binding() - 2 * GROUP
    find_rows(mine, held, slots)
    copy_record(mine, 0, pages_pb, kind, sectioned, slots, lane, me)
    name_rows(mine, idx_tk, token, 1, entries, first)
    for i in T.serial(T.ceildiv(entries, KEYS)):
        now, turn = (done + i) % 2, (done + i) // 2 % 2
        take_record(mine, me)
        copy_record(mine, 1, pages_pb, kind, sectioned, slots, lane, me)
        T.barrier_wait(shared.key_free[now], turn ^ 1)
        name_keys(shared, now, mine.row, first, lane, LANES)
        put_record(shared, mine, kind, now, first, lane)
        take_record(mine, me)
        find_rows(mine, held, slots)
        copy_record(mine, 0, pages_pb, kind, sectioned, slots, lane, me)
        name_rows(mine, idx_tk, token, i + 2, entries, first)
        T.barrier_wait(shared.key_free[now], turn ^ 1)  # is over: keeps the compiler from decoding before it copies
        put_record(shared, mine, kind, now, STEP + first, lane)
        T.fence_proxy_async()
        T.barrier_arrive(shared.left_ready[now])
        T.barrier_arrive(shared.right_ready[now])
    T.call_extern("handle", "dt_wait_copied")  # the zeros behind the last block


def two_cache_program(
    num_heads: int, window: str, main: str, *, sectioned: bool, has_sink: bool, roles: Roles | None = None
):
    """The program for any number of tokens, list entries and pages; `window` is "rows" or a kind of record.

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
            T.import_source(DECODE + EXP2)
            shared = shared_memory()
            left, right = group_registers(), group_registers()
            mine = bringer_memory()

            # 1. which token and heads this program owns
            token = program // tiles
            head0 = program % tiles * HEADS
            window_blocks = T.ceildiv(window_entries, KEYS)
            blocks = window_blocks + T.ceildiv(main_entries, KEYS)
            thread = T.get_thread_binding()

            if thread < GROUP:
                # 2. even blocks, the left half of the values
                T.set_max_nreg(roles.multiply, 1)
                attend_half(shared, left, blocks, scale_log2, 0, shared.key_left, shared.left_ready, window == "rows")
                for h in T.Parallel(HEADS):
                    lse_th[token, head0 + h] = (left.top[h] + T.log2(left.total[h])) * LN_2
                divide_sums(left.sums, left.top, left.total, left.shrink, sink_h, head0, has_sink)
                T.copy(left.sums, shared.q_left)
                T.copy(shared.q_left, out_thd[token, head0 : head0 + HEADS, 0:HALF])
            elif thread < 2 * GROUP:
                # 3. odd blocks, the right half
                T.set_max_nreg(roles.multiply, 1)
                attend_half(
                    shared, right, blocks, scale_log2, 1, shared.key_right, shared.right_ready, window == "rows"
                )
                divide_sums(right.sums, right.top, right.total, right.shrink, sink_h, head0, has_sink)
                T.copy(right.sums, shared.q_right)
                T.copy(shared.q_right, out_thd[token, head0 : head0 + HEADS, HALF:VALUES])
            else:
                # 4. the queries, then the keys of block after block
                T.set_max_nreg(roles.bring, 0)
                lane = (thread - 2 * GROUP) % LANES
                first = (thread - 2 * GROUP) // LANES
                T.clear(mine.code)
                name_rows(mine, window_idx_tk, token, 0, window_entries, first)
                read_queries(q_thd, token, head0, shared, first, lane, LANES)
                held = window_pages * page_slots
                if window == "rows":
                    bring_rows(
                        shared, mine, window_rows, held, page_slots, window_idx_tk, token, window_entries, first, lane
                    )
                else:
                    bring_records(
                        shared,
                        mine,
                        window_rows,
                        window,
                        sectioned,
                        held,
                        page_slots,
                        window_idx_tk,
                        token,
                        window_entries,
                        0,
                        first,
                        lane,
                    )
                name_rows(mine, main_idx_tk, token, 0, main_entries, first)
                bring_records(
                    shared,
                    mine,
                    main_pb,
                    main,
                    sectioned,
                    main_pages * main_slots,
                    main_slots,
                    main_idx_tk,
                    token,
                    main_entries,
                    window_blocks,
                    first,
                    lane,
                )

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
