"""Index scores on SM100 with tensor memory, in the order of four bf16 chains.

A program owns a block of keys of a contiguous buffer and a tile of queries. Keys are decoded once, to bf16 in shared
memory; the heads of one query after the other meet them in an asynchronous tcgen05 product whose rows are keys, so that
every thread reads the row of its own key back from tensor memory and adds the heads in the order of the contract.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass

from tilelang import PassConfigKey
from tilelang import language as T

CHANNELS, RECORD, CODE_BYTES = 128, 68, 64
PASS_CONFIGS = {PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


@dataclass(frozen=True, kw_only=True)
class ScoreLaunch:
    """Keys and queries of a program; neither changes a result."""

    block_keys: int = 128
    queries: int = 16
    threads: int = 128


def score_program(num_heads: int, *, launch: ScoreLaunch | None = None):
    """The program over a buffer of records, for any number of queries and keys; scores in bf16.

    Column j of a row is key `first + j`; columns that a query does not see are −inf.

    Raises:
        NotImplementedError: heads are no multiple of 16 up to 128, or keys not one for each thread.
    """
    launch = launch or ScoreLaunch()
    keys, queries = launch.block_keys, launch.queries
    if num_heads % 16 or num_heads > 128:
        raise NotImplementedError(f"num_heads: expected a multiple of 16 up to 128, got {num_heads}")
    if keys != launch.threads:
        raise NotImplementedError(f"launch: expected as many keys as threads, got {keys} and {launch.threads}")
    tokens, entries = T.dynamic("tokens, entries")

    @T.macro
    def decode(byte, shift, scale):
        """The value of four bits: exponent and mantissa put where fp16 has them, 2^14 too small."""
        nibble = T.cast(T.shift_right(T.cast(byte, T.int32), shift), T.int32)
        half = T.bitwise_or(
            T.shift_left(T.bitwise_and(nibble, 7), 9),
            T.shift_left(T.bitwise_and(nibble, 8), 12),
        )
        return T.cast(T.reinterpret(T.cast(half, T.uint16), T.float16), T.float32) * 16384.0 * scale

    @T.macro
    def add_head(total, dot, weight):
        """bf16(t * w + total) in one rounding: a sum on the midpoint of two bf16 numbers moves to its error's side."""
        positive = T.cast(T.cast(T.if_then_else(dot < 0.0, 0.0, dot), T.bfloat16), T.float32)
        product = positive * weight
        wide = total + product
        part = wide - total
        error = (total - (wide - part)) + (product - part)
        bits = T.reinterpret(wide, T.int32)
        is_tie = T.And(T.bitwise_and(bits, 0xFFFF) == 0x8000, error != 0.0)
        away = T.if_then_else((error > 0.0) == (wide > 0.0), 1, -1)
        moved = T.reinterpret(bits + T.if_then_else(is_tie, away, 0), T.float32)
        return T.cast(T.cast(moved, T.bfloat16), T.float32)

    @T.prim_func
    def index_scores(
        q_thw: T.Tensor((tokens, num_heads, RECORD), T.uint8),
        k_sw: T.Tensor((entries, RECORD), T.uint8),
        w_th: T.Tensor((tokens, num_heads), T.bfloat16),
        first_t: T.Tensor((tokens,), T.int32),
        length_t: T.Tensor((tokens,), T.int32),
        scores_ts: T.Tensor((tokens, entries), T.bfloat16),
    ):
        with T.Kernel(T.ceildiv(entries, keys), T.ceildiv(tokens, queries), threads=launch.threads) as (block, tile):
            key = T.alloc_shared((keys, CHANNELS), T.bfloat16)
            query = T.alloc_shared((num_heads, CHANNELS), T.bfloat16)
            weight = T.alloc_shared((num_heads,), T.float32)
            dots_tm = T.alloc_tmem((keys, num_heads), T.float32)
            dots = T.alloc_fragment((keys, num_heads), T.float32)
            a0 = T.alloc_fragment((keys,), T.float32)
            a1 = T.alloc_fragment((keys,), T.float32)
            a2 = T.alloc_fragment((keys,), T.float32)
            a3 = T.alloc_fragment((keys,), T.float32)
            scored = T.alloc_barrier(1)

            # 1. the keys of the block
            for j, i in T.Parallel(keys, CODE_BYTES):
                row = T.min(block * keys + j, entries - 1)
                scale = T.reinterpret(T.shift_left(T.cast(k_sw[row, CODE_BYTES + i // 16], T.int32), 23), T.float32)
                key[j, 2 * i] = decode(k_sw[row, i], 0, scale)
                key[j, 2 * i + 1] = decode(k_sw[row, i], 4, scale)

            for turn in T.serial(queries):
                token = T.min(tile * queries + turn, tokens - 1)
                # 2. the heads of one query, and their products with all keys
                for h, i in T.Parallel(num_heads, CODE_BYTES):
                    scale = T.reinterpret(
                        T.shift_left(T.cast(q_thw[token, h, CODE_BYTES + i // 16], T.int32), 23), T.float32
                    )
                    query[h, 2 * i] = decode(q_thw[token, h, i], 0, scale)
                    query[h, 2 * i + 1] = decode(q_thw[token, h, i], 4, scale)
                for h in T.Parallel(num_heads):
                    weight[h] = T.cast(w_th[token, h], T.float32)
                T.tcgen05_gemm(key, query, dots_tm, transpose_B=True, clear_accum=True, mbar=scored)
                T.mbarrier_wait_parity(scored, turn % 2)
                T.copy(dots_tm, dots)

                # 3. every chain in ascending order of its heads; a NaN stays visible
                for j in T.Parallel(keys):
                    a0[j] = 0.0
                    a1[j] = 0.0
                    a2[j] = 0.0
                    a3[j] = 0.0
                for step in T.unroll(num_heads // 4):
                    for j in T.Parallel(keys):
                        a0[j] = add_head(a0[j], dots[j, step * 4], weight[step * 4])
                    for j in T.Parallel(keys):
                        a1[j] = add_head(a1[j], dots[j, step * 4 + 1], weight[step * 4 + 1])
                    for j in T.Parallel(keys):
                        a2[j] = add_head(a2[j], dots[j, step * 4 + 2], weight[step * 4 + 2])
                    for j in T.Parallel(keys):
                        a3[j] = add_head(a3[j], dots[j, step * 4 + 3], weight[step * 4 + 3])

                # 4. what the query sees of these keys, where its sequence has them, and −inf where it sees nothing
                if tile * queries + turn < tokens:
                    for j in T.Parallel(keys):
                        row = block * keys + j
                        column = row - first_t[token]
                        left = T.cast(T.cast(a0[j] + a2[j], T.bfloat16), T.float32)
                        right = T.cast(T.cast(a1[j] + a3[j], T.bfloat16), T.float32)
                        if row < entries and column >= 0 and column < length_t[token]:
                            scores_ts[token, column] = T.cast(left + right, T.bfloat16)
                        if row < entries and (row >= length_t[token] or first_t[token] + row >= entries):
                            scores_ts[token, row] = -T.infinity(T.bfloat16)

    return index_scores
