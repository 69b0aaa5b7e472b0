"""Sparse attention over two caches on SM90: window rows or records, then compressed records, in one softmax.

The roles are those of `roles_sm90.py`, and how the third group brings records is told in `records_sm90.py`: the value
of a code times its scale is exact in bf16. Nothing is split, so a row has the same bits alone or in any batch, and the
same from rows as from records.
"""

# mypy: disable-error-code="valid-type"

from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import language as T

from .records_sm90 import (
    DECODE,
    LANES,
    PARTS,
    PASSES,
    STEP,
    UNIT,
    places_of,
    put_e4m3,
    read_words,
    units_of,
)
from .roles_sm90 import (
    EXP2,
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
    half_of,
    name_keys,
    read_half,
    read_queries,
    second_group,
    shared_memory,
)

BYTES = {"e4m3": VALUES, "e2m1": VALUES // 2}
SCALES = {"e4m3": VALUES // 32, "e2m1": VALUES // 16}


def two_cache_program(
    num_heads: int, window: str, main: str, *, sectioned: bool, has_sink: bool, roles: Roles | None = None
):
    """The program for any number of tokens, list entries and pages; `window` is "rows" or a code, `main` a code.

    Raises:
        NotImplementedError: heads are no multiple of the tile.
    """
    roles = roles or Roles(multiply=208, bring=88)
    if num_heads % HEADS:
        raise NotImplementedError(f"num_heads: expected a multiple of {HEADS}, got {num_heads}")
    tiles = num_heads // HEADS
    tokens, window_entries, main_entries = T.dynamic("tokens, window_entries, main_entries")
    window_units, main_units = T.dynamic("window_units, main_units")
    if window == "rows":
        window_type = T.StridedTensor((window_units, 1, VALUES), (VALUES, VALUES, 1), T.bfloat16)
    else:
        window_type = T.StridedTensor((window_units, UNIT), (UNIT, 1), T.uint8)

    @T.macro
    def name_rows(window_idx_tk, main_idx_tk, token, pair, now, window_blocks, ahead, first):
        """Start reading which rows of a block this thread brings a part of."""
        block = pair * 2 + now
        for g in T.unroll(PASSES):
            entry = block * KEYS + g * STEP + first
            later = entry - window_blocks * KEYS
            if block < window_blocks:
                ahead[now * PASSES + g] = T.if_then_else(entry < window_entries, window_idx_tk[token, entry], -1)
            else:
                ahead[now * PASSES + g] = T.if_then_else(later < main_entries, main_idx_tk[token, later], -1)

    @T.macro
    def place_rows(kind, rows, slots, stride, ahead, place, scale_place, now):
        """Where the named rows of a cache begin, and their scales; -1 for what it does not hold."""
        for g in T.unroll(PASSES):
            i = now * PASSES + g
            held = ahead[i] >= 0 and ahead[i] < rows
            if kind == "rows":
                place[i] = T.if_then_else(held, ahead[i], -1)
            else:
                size, scales = BYTES[kind] // UNIT, SCALES[kind] // UNIT
                page = T.truncdiv(T.max(ahead[i], 0), slots)
                slot = T.max(ahead[i], 0) - page * slots
                place[i] = T.if_then_else(held, page * stride + slot * (size if sectioned else size + scales), -1)
                if sectioned:
                    scale_place[i] = page * stride + slots * size + slot * scales

    @T.macro
    def read_record(units_xo, kind, half, place, scale_place, lane, code, sf, i):
        """Start reading this thread's codes and scales of half a record; those of no record are zero."""
        size, scales = BYTES[kind], SCALES[kind]
        part = half * LANES + lane
        is_key = place[i] >= 0
        at = T.max(place[i], 0)
        read_words(units_xo, at, part * (size // (2 * LANES)), size // (2 * LANES * 16), is_key, code, i)
        of_scales = scale_place[i] if sectioned else at + size // UNIT
        T.call_extern(
            "handle",
            "dt_read4" if kind == "e2m1" else "dt_read2",
            T.address_of(sf[i]),
            T.address_of(units_xo[of_scales, part * (scales // (2 * LANES))]),
            is_key,
        )

    @T.macro
    def read_part(window_xo, main_xo, in_window, half, now, place, scale_place, lane, code, sf):
        """Start reading this thread's part of half a block, if it is of records."""
        for g in T.unroll(PASSES):
            if not in_window:
                read_record(main_xo, main, half, place, scale_place, lane, code, sf, now * PASSES + g)
            elif window != "rows":
                read_record(window_xo, window, half, place, scale_place, lane, code, sf, now * PASSES + g)

    @T.macro
    def put_part(shared, kind, half, now, first, lane, code, sf):
        """Write this thread's part of half a block to shared memory, as bf16."""
        for g in T.unroll(PASSES):
            j, i = g * STEP + first, now * PASSES + g
            for v in T.unroll(PARTS):
                if kind == "e4m3":
                    byte = sf[i] >> T.cast(8 * (v // 2), T.uint32) & T.uint32(255)
                    put_e4m3(shared, half, now, j, lane, code, i, v, T.call_extern("float32", "dt_e8m0", byte))
                else:
                    byte = sf[i] >> T.cast(8 * v, T.uint32) & T.uint32(255)
                    for w in T.unroll(2):
                        T.call_extern(
                            "handle",
                            "dt_put_e2m1",
                            T.address_of(shared.key[half, now, j, (lane * PARTS + v) * 16 + 8 * w]),
                            code[i * PARTS * 4 + v * 2 + w],
                            byte,
                        )

    @T.prim_func
    def two_cache_attn(
        q_thd: T.Tensor((tokens, num_heads, VALUES), T.bfloat16),
        window_xo: window_type,
        window_idx_tk: T.Tensor((tokens, window_entries), T.int32),
        main_xo: T.StridedTensor((main_units, UNIT), (UNIT, 1), T.uint8),
        main_idx_tk: T.Tensor((tokens, main_entries), T.int32),
        sink_h: T.Tensor((num_heads,), T.float32),
        out_thd: T.Tensor((tokens, num_heads, VALUES), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        scale_log2: T.float32,
        window_held: T.int32,
        window_slots: T.int32,
        window_stride: T.int32,
        main_held: T.int32,
        main_slots: T.int32,
        main_stride: T.int32,
    ):
        with T.Kernel(tokens * tiles, threads=THREADS) as program:
            T.import_source(DECODE + EXP2)
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
            weight = T.alloc_fragment((HEADS, KEYS), T.bfloat16)
            weight_right = T.alloc_fragment((HEADS, KEYS), T.bfloat16)
            ahead = T.alloc_local((2 * PASSES,), T.int32)
            place = T.alloc_local((2 * PASSES,), T.int32)
            scale_place = T.alloc_local((2 * PASSES,), T.int32)
            row = T.alloc_local((PASSES,), T.int32)
            zero = T.alloc_local((PASSES,), T.int32)
            is_key = T.alloc_local((PASSES,), T.int32)
            code = T.alloc_local((2 * PASSES * PARTS * 4,), T.uint32)
            sf = T.alloc_local((2 * PASSES,), T.uint32)

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
                    weight,
                    top,
                    total,
                    shrink,
                    block_top,
                    block_total,
                    0,
                    0,
                    True,
                    False,
                )
                for h in T.Parallel(HEADS):
                    lse_th[token, head0 + h] = (top[h] + T.log2(total[h])) * LN_2
                divide_sums(left, top, total, shrink, sink_h, head0, has_sink)
                T.copy(left, shared.q[0, :, :])
                T.copy(shared.q[0, :, :], out_thd[token, head0 : head0 + HEADS, 0:HALF])
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
                    0,
                    True,
                    False,
                )
                divide_sums(right, top_right, total_right, shrink_right, sink_h, head0, has_sink)
                T.copy(right, shared.q[1, :, :])
                T.copy(shared.q[1, :, :], out_thd[token, head0 : head0 + HEADS, HALF:VALUES])
            else:
                # 4. the queries, then the keys of block after block
                T.set_max_nreg(roles.bring, 0)
                # eight rows side by side, so that what they write at a time lies in different banks
                lane = thread % 32 // 8
                first = (thread - 2 * GROUP) // 32 * 8 + thread % 8
                for local in (code, sf):
                    T.clear(local)
                T.clear(zero)
                for now in T.unroll(2):
                    name_rows(window_idx_tk, main_idx_tk, token, 0, now, window_blocks, ahead, first)
                for now in T.unroll(2):
                    if now < window_blocks:
                        place_rows(window, window_held, window_slots, window_stride, ahead, place, scale_place, now)
                    else:
                        place_rows(main, main_held, main_slots, main_stride, ahead, place, scale_place, now)
                    name_rows(window_idx_tk, main_idx_tk, token, 1, now, window_blocks, ahead, first)
                    read_part(window_xo, main_xo, now < window_blocks, now, now, place, scale_place, lane, code, sf)
                read_queries(q_thd, token, head0, shared, first, lane, 0, LANES)
                for pair in T.serial(T.ceildiv(blocks, 2)):
                    # halves in the order in which they become free
                    for turn in T.serial(2):
                        for now in T.unroll(2):
                            half = turn ^ now
                            if pair * 2 + now < blocks:
                                T.barrier_wait(shared.free[half_of(half, now)], pair % 2 ^ 1)
                                if turn == 0:
                                    name_keys(shared, now, place, now * PASSES, first, lane, LANES)
                                if pair * 2 + now >= window_blocks:
                                    put_part(shared, main, half, now, first, lane, code, sf)
                                elif window != "rows":
                                    put_part(shared, window, half, now, first, lane, code, sf)
                                if window == "rows" and pair * 2 + now < window_blocks:
                                    for g in T.unroll(PASSES):
                                        is_key[g] = place[now * PASSES + g]
                                        row[g] = T.max(is_key[g], 0)
                                    read_half(
                                        window_xo,
                                        shared,
                                        half,
                                        now,
                                        is_key,
                                        row,
                                        zero,
                                        0,
                                        first,
                                        lane,
                                        True,
                                        LANES,
                                    )
                                else:
                                    T.barrier_arrive(shared.ready[half_of(half, now)])
                            # the registers are free for what the same buffer takes next
                            later = pair + turn
                            if turn == 1:
                                if later * 2 + now < window_blocks:
                                    place_rows(
                                        window, window_held, window_slots, window_stride, ahead, place, scale_place, now
                                    )
                                else:
                                    place_rows(main, main_held, main_slots, main_stride, ahead, place, scale_place, now)
                                name_rows(window_idx_tk, main_idx_tk, token, pair + 2, now, window_blocks, ahead, first)
                            read_part(
                                window_xo,
                                main_xo,
                                later * 2 + now < window_blocks,
                                1 - half,
                                now,
                                place,
                                scale_place,
                                lane,
                                code,
                                sf,
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
    kernel(
        q_thd,
        window.unsqueeze(1) if kinds[0] == "rows" else units_of(window),
        window_idx_tk,
        units_of(main_pow),
        main_idx_tk,
        lse_th.new_empty(num_heads) if sink_h is None else sink_h,  # what a program does not take is its argument
        out_thd,
        lse_th,
        scale * LOG2_E,
        *((len(window), 1, 1) if kinds[0] == "rows" else places_of(window)),
        *places_of(main_pow),
    )
    return out_thd, lse_th


def _not_empty(idx_tk: torch.Tensor) -> torch.Tensor:
    """A list of nothing as one of a hole: a program takes no empty argument."""
    return idx_tk if idx_tk.shape[1] else idx_tk.new_full((len(idx_tk), 1), -1)
