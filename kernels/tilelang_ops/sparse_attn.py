"""Sparse attention on SM100 with tensor memory: scores and output accumulate there, never in registers.

A program owns one query token and one tile of heads and walks the whole list in blocks of keys. Both products are
asynchronous tcgen05 instructions: `T.tcgen05_gemm` fails to build where `T.gemm` would quietly fall back to mma.sync.
While the scores of one block are computed, the keys of the next are gathered into the other buffer.

The arithmetic is that of `triton_ops/sparse_attn.py`: base-2 online softmax over blocks that depend on the list
position alone, weights rounded unnormalised, the sink in the denominator only, one division at the end.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass

from tilelang import PassConfigKey
from tilelang import language as T

LOWEST = -3.0e38  # start of the running maximum: finite, so that a list that begins with holes never meets inf - inf
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# holes are tested here once per row; the compiler's own test would stand before every element
PASS_CONFIGS = {PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


@dataclass(frozen=True, kw_only=True)
class SparseLaunch:
    """Tile of one program. `block_keys` fixes the order of summation; two `buffers` let gathers overlap products."""

    block_heads: int = 64
    block_keys: int = 64
    columns: int = 256  # output channels that pass through registers at a time
    threads: int = 256
    buffers: int = 2


def sparse_launch(width: int) -> SparseLaunch:
    """The launch for keys of `width` channels: beyond 512, two key buffers and the queries exceed 227 KiB."""
    return SparseLaunch(buffers=2 if width <= 512 else 1)


def attend_program(
    num_heads: int,
    width: int,
    value_dim: int,
    *,
    has_length: bool,
    has_sink: bool,
    launch: SparseLaunch | None = None,
):
    """The program over a paged cache, for any number of tokens, list entries and pages.

    The cache is seen in units of 8 elements, so that the compiler knows its rows to be aligned; a page of
    `page_slots` rows, one behind the other, may be longer than they are.

    Raises:
        NotImplementedError: heads are no multiple of the tile, or `value_dim` none of the columns.
    """
    launch = launch or sparse_launch(width)
    heads, keys, columns, buffers = launch.block_heads, launch.block_keys, launch.columns, launch.buffers
    if num_heads % heads:
        raise NotImplementedError(f"num_heads: expected a multiple of {heads}, got {num_heads}")
    if value_dim % columns or (width - value_dim) % 64:
        raise NotImplementedError(f"value_dim: expected a multiple of {columns}, 64·n below {width}, got {value_dim}")
    tiles = num_heads // heads
    tail = width - value_dim  # channels that only the key has, in tiles of their own: addresses stay powers of two
    tokens, entries, pages, page_units = T.dynamic("tokens, entries, pages, page_units")

    @T.macro
    def listed_row(idx_tk, token, entry, list_end, rows):
        """The row that an entry names; a negative number for a hole."""
        row = T.if_then_else(entry < list_end, idx_tk[token, entry], -1)
        return T.if_then_else(row < rows, row, -1)

    @T.macro
    def gather(kv_px8, idx_tk, token, block, list_end, rows, page_slots, key_nyd, first, span):
        """Read channels of the keys of a block, 16 bytes at a time; a hole, whose row may hold NaN, is not read."""
        for j, c in T.Parallel(keys, span // 8):
            row = listed_row(idx_tk, token, block * keys + j, list_end, rows)
            # the maximum changes nothing; without it the compiler spends a minute on a proof that indices are positive
            page, slot = T.max(T.truncdiv(row, page_slots), 0), T.max(T.truncmod(row, page_slots), 0)
            at = slot * (width // 8) + first // 8 + c
            for v in T.vectorized(8):
                key_nyd[block % buffers, j, c * 8 + v] = T.if_then_else(row >= 0, kv_px8[page, at, v], T.bfloat16(0))

    @T.prim_func
    def sparse_attn(
        q_thd: T.Tensor((tokens, num_heads, width), T.bfloat16),
        kv_px8: T.Tensor((pages, page_units, 8), T.bfloat16),
        idx_tk: T.Tensor((tokens, entries), T.int32),
        topk_length_t: T.Tensor((tokens,), T.int32),
        sink_h: T.Tensor((num_heads,), T.float32),
        out_thu: T.Tensor((tokens, num_heads, value_dim), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        scale_log2: T.float32,
        rows: T.int32,
        page_slots: T.int32,
    ):
        with T.Kernel(tokens * tiles, threads=launch.threads) as program:
            q = T.alloc_shared((heads, value_dim), T.bfloat16)
            key = T.alloc_shared((buffers, keys, value_dim), T.bfloat16)
            if tail:
                q_tail = T.alloc_shared((heads, tail), T.bfloat16)
                key_tail = T.alloc_shared((buffers, keys, tail), T.bfloat16)
            weight = T.alloc_shared((heads, keys), T.bfloat16)
            score_tm = T.alloc_tmem((heads, keys), T.float32)
            out_tm = T.alloc_tmem((heads, value_dim), T.float32)
            score = T.alloc_fragment((heads, keys), T.float32)
            part = T.alloc_fragment((heads, columns), T.float32)
            top = T.alloc_fragment((heads,), T.float32)
            new_top = T.alloc_fragment((heads,), T.float32)
            shrink = T.alloc_fragment((heads,), T.float32)
            total = T.alloc_fragment((heads,), T.float32)
            block_total = T.alloc_fragment((heads,), T.float32)
            scored = T.alloc_barrier(1)
            added = T.alloc_barrier(1)

            # 1. which token, heads and entries this program owns
            token = program // tiles
            head0 = program % tiles * heads
            list_end = T.min(topk_length_t[token], entries) if has_length else entries
            T.copy(q_thd[token, head0 : head0 + heads, 0:value_dim], q)
            if tail:
                T.copy(q_thd[token, head0 : head0 + heads, value_dim:width], q_tail)
            T.fill(top, LOWEST)
            T.fill(total, 0.0)
            blocks = T.ceildiv(list_end, keys)
            if buffers > 1:
                gather(kv_px8, idx_tk, token, 0, list_end, rows, page_slots, key, 0, value_dim)
                if tail:
                    gather(kv_px8, idx_tk, token, 0, list_end, rows, page_slots, key_tail, value_dim, tail)

            for block in T.serial(blocks):
                now = block % buffers
                if buffers == 1:
                    gather(kv_px8, idx_tk, token, block, list_end, rows, page_slots, key, 0, value_dim)
                    if tail:
                        gather(kv_px8, idx_tk, token, block, list_end, rows, page_slots, key_tail, value_dim, tail)
                # 2. scores; meanwhile the next keys are read into the buffer that the last product has left
                if tail:
                    T.tcgen05_gemm(q_tail, key_tail[now, :, :], score_tm, transpose_B=True, clear_accum=True, mbar=None)
                T.tcgen05_gemm(q, key[now, :, :], score_tm, transpose_B=True, clear_accum=not tail, mbar=scored)
                if buffers > 1:
                    if block > 0:
                        T.mbarrier_wait_parity(added, (block - 1) % 2)
                    if block + 1 < blocks:
                        gather(kv_px8, idx_tk, token, block + 1, list_end, rows, page_slots, key, 0, value_dim)
                        if tail:
                            gather(
                                kv_px8, idx_tk, token, block + 1, list_end, rows, page_slots, key_tail, value_dim, tail
                            )
                T.mbarrier_wait_parity(scored, block % 2)
                T.copy(score_tm, score)

                # 3. one step of the online softmax
                for h, j in T.Parallel(heads, keys):
                    row = listed_row(idx_tk, token, block * keys + j, list_end, rows)
                    score[h, j] = T.if_then_else(row >= 0, score[h, j] * scale_log2, -T.infinity(T.float32))
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
                T.copy(score, weight)

                # 4. values, on top of what the earlier blocks left in tensor memory
                if block > 0:
                    for c in T.unroll(value_dim // columns):
                        T.copy(out_tm[:, c * columns : (c + 1) * columns], part)
                        for h, u in T.Parallel(heads, columns):
                            part[h, u] = part[h, u] * shrink[h]
                        T.copy(part, out_tm[:, c * columns : (c + 1) * columns])
                T.tcgen05_gemm(weight, key[now, :, :], out_tm, clear_accum=(block == 0), mbar=added)
                if buffers == 1:
                    T.mbarrier_wait_parity(added, block % 2)
            if buffers > 1 and blocks > 0:
                T.mbarrier_wait_parity(added, (blocks - 1) % 2)

            # 5. divide by the row sum plus the sink, once; a row without keys is 0, and a NaN sum stays visible
            for h in T.Parallel(heads):
                # may overflow to inf on purpose: the quotient is then 0
                sink = T.exp2(sink_h[head0 + h] * LOG2_E - top[h]) if has_sink else T.float32(0)
                shrink[h] = total[h] + sink
                lse_th[token, head0 + h] = (top[h] + T.log2(total[h])) * LN_2
            for c in T.unroll(value_dim // columns):
                T.copy(out_tm[:, c * columns : (c + 1) * columns], part)
                for h, u in T.Parallel(heads, columns):
                    part[h, u] = T.if_then_else(total[h] == 0.0, 0.0, part[h, u] / shrink[h])
                T.copy(part, out_thu[token, head0 : head0 + heads, c * columns : (c + 1) * columns])

    return sparse_attn
