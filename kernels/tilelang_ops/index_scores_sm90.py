"""Index scores of e4m3 rows on SM90 with specialised warps: dense keys and pages of 64 keys.

A program owns a tile of queries, whose heads are the columns of one product, and a share of the keys, whose rows it
reads block after block by the tensor copy engine. Groups of 128 threads take 64 keys each: the positive part of every
dot times the weight of its head is summed in registers, in an order that the number of heads fixes. A score depends on
its query and its key alone.

The FP8 unit keeps about 14 bits of a dot. With `exact` the producer widens codes to fp16, which holds every one of
them, and the unit of 16 bits adds their products in fp32, at half the rate.
"""

# mypy: disable-error-code="valid-type"

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import PassConfigKey
from tilelang import language as T

WIDTH = 128
PAGE = 64
GROUP = 128  # threads of a role
HEADS = (16, 32, 64, 128)
PROGRAMS = 4 * 132  # as many at least, where there are keys enough
# the copy engine fills what lies beyond a tensor with zeros; other reads are clamped
PASS_CONFIGS = {PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


@dataclass(frozen=True, kw_only=True)
class ScoreLaunch:
    """Columns of a product, groups of consumers, and buffers; nothing of it changes a result."""

    columns: int = 128
    groups: int = 4
    buffers: int = 4
    raw_buffers: int = 2  # of codes that wait to be widened
    consumer_registers: int = 112
    producer_registers: int = 24

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return 64 * self.groups


def scores_launch(num_heads: int, *, exact: bool, paged: bool) -> ScoreLaunch:
    """The launch for a number of heads; queries share keys in one buffer, not in pages."""
    columns = num_heads if paged else 128
    if exact:
        return ScoreLaunch(columns=columns, groups=3, buffers=3, consumer_registers=152, producer_registers=48)
    return ScoreLaunch(columns=columns)


def score_program(num_heads: int, *, exact: bool, paged: bool, launch: ScoreLaunch | None = None):
    """The program for any number of queries and keys, in shares of `share` blocks of keys.

    Raises:
        NotImplementedError: heads are no power of two from 16 to 128.
    """
    if num_heads not in HEADS:
        raise NotImplementedError(f"num_heads: expected one of {HEADS}, got {num_heads}")
    launch = launch or scores_launch(num_heads, exact=exact, paged=paged)
    columns, groups, buffers, raw_buffers = launch.columns, launch.groups, launch.buffers, launch.raw_buffers
    keys, queries, consumers = launch.keys, columns // num_heads, groups * GROUP
    kind = T.float16 if exact else T.float8_e4m3fn
    tokens, entries, q_stride, k_stride, sf_stride = T.dynamic("tokens, entries, q_stride, k_stride, sf_stride")
    pages, table_width = T.dynamic("pages, table_width")
    k_shape, k_strides = ((pages, PAGE, WIDTH), (k_stride, WIDTH, 1)) if paged else ((entries, WIDTH), (k_stride, 1))
    sf_shape, sf_strides = ((pages, PAGE), (sf_stride, 1)) if paged else ((entries,), (sf_stride,))

    @T.macro
    def read_keys(k, table_tj, token, target, slot, first, ready):
        """Start to copy a block of keys; absent pages, and what lies beyond the last key, come as zeros."""
        if paged:
            for g in T.unroll(groups):
                number = first // PAGE + g
                page = T.if_then_else(number < table_width, table_tj[token, T.min(number, table_width - 1)], -1)
                T.tma_copy(
                    k[page : page + 1, 0:PAGE, :], target[slot, g * PAGE : (g + 1) * PAGE, :], barrier=ready[slot]
                )
        else:
            T.tma_copy(k[first : first + keys, 0:WIDTH], target[slot, :, :], barrier=ready[slot])
        T.barrier_arrive(ready[slot])

    @T.macro
    def widen(source, target, from_slot, slot):
        for i, j in T.Parallel(keys, WIDTH):
            target[slot, i, j] = T.cast(source[from_slot, i, j], T.float16)

    @T.prim_func
    def index_scores(
        q_yd: T.StridedTensor((tokens * num_heads, WIDTH), (q_stride, 1), T.float8_e4m3fn),
        k: T.StridedTensor(k_shape, k_strides, T.float8_e4m3fn),
        k_sf: T.StridedTensor(sf_shape, sf_strides, T.float32),
        w_y: T.Tensor((tokens * num_heads,), T.float32),
        table_tj: T.Tensor((tokens, table_width), T.int32),
        length_t: T.Tensor((tokens,), T.int32),
        scores_ts: T.Tensor((tokens, entries), T.float32),
        share: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(entries, keys), share), T.ceildiv(tokens, queries), threads=consumers + GROUP
        ) as (part, tile):
            q = T.alloc_shared((columns, WIDTH), kind)
            key = T.alloc_shared((buffers, keys, WIDTH), kind)
            dots = T.alloc_fragment((keys, columns), T.float32)
            weighted = T.alloc_fragment((keys, queries, num_heads), T.float32)
            weight = T.alloc_fragment((columns,), T.float32)
            total = T.alloc_fragment((keys, queries), T.float32)
            key_sf = T.alloc_fragment((keys,), T.float32)
            seen = T.alloc_fragment((keys,), T.int32)
            limit = T.alloc_fragment((queries,), T.int32)
            q_ready = T.alloc_barrier(GROUP)
            ready = T.alloc_barrier([GROUP] * buffers)
            free = T.alloc_barrier([consumers] * buffers)
            if exact:
                raw = T.alloc_shared((raw_buffers, keys, WIDTH), T.float8_e4m3fn)
                raw_ready = T.alloc_barrier([GROUP] * raw_buffers)
            thread = T.get_thread_binding()
            first = T.alloc_var(T.int32)
            longest = T.alloc_var(T.int32)
            blocks = T.alloc_var(T.int32)
            token0 = tile * queries

            # 1. the share of keys, and how many of its blocks any of the queries sees
            first = part * share * keys
            longest = 0
            for i in T.unroll(queries):
                longest = T.max(longest, length_t[T.min(token0 + i, tokens - 1)])
            longest = T.min(longest, entries)
            blocks = T.min(T.ceildiv(T.max(longest - first, 0), keys), share)

            if thread < consumers:
                T.set_max_nreg(launch.consumer_registers, 1)
                for j in T.Parallel(columns):
                    # x + |x| is twice the positive part, keeps a NaN, and needs no comparison
                    weight[j] = w_y[T.min(tile * columns + j, tokens * num_heads - 1)] * 0.5
                for h in T.Parallel(queries):
                    limit[h] = length_t[T.min(token0 + h, tokens - 1)]
                T.barrier_wait(q_ready, 0)
                for block in T.serial(blocks):
                    slot = block % buffers
                    start = first + block * keys
                    T.barrier_wait(ready[slot], block // buffers % 2)
                    T.wgmma_gemm(
                        key[slot, :, :],
                        q,
                        dots,
                        transpose_B=True,
                        clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
                    # 2. scales of the keys, while the products are made
                    for i in T.Parallel(keys):
                        if paged:
                            number = (start + i) // PAGE
                            page = T.if_then_else(
                                start + i < entries, table_tj[token0, T.min(number, table_width - 1)], -1
                            )
                            seen[i] = T.if_then_else(page >= 0, T.if_then_else(page < pages, 1, 0), 0)
                            key_sf[i] = k_sf[T.max(T.min(page, pages - 1), 0), (start + i) % PAGE]
                        else:
                            key_sf[i] = k_sf[T.min(start + i, entries - 1)]
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[slot])
                    # 3. the sum over heads
                    for i, h, j in T.Parallel(keys, queries, num_heads):
                        weighted[i, h, j] = (dots[i, h * num_heads + j] + T.abs(dots[i, h * num_heads + j])) * weight[
                            h * num_heads + j
                        ]
                    T.reduce_sum(weighted, total, dim=2)
                    # 4. -inf for what a query does not see
                    for i, h in T.Parallel(keys, queries):
                        total[i, h] = T.if_then_else(
                            start + i < limit[h], total[i, h] * key_sf[i], -T.infinity(T.float32)
                        )
                        if paged:
                            total[i, h] = T.if_then_else(seen[i] != 0, total[i, h], -T.infinity(T.float32))
                        if start + i < entries and token0 + h < tokens:
                            scores_ts[token0 + h, start + i] = total[i, h]
                # 5. blocks that no query sees
                for h in T.unroll(queries):
                    if token0 + h < tokens:
                        for b in T.serial(share - blocks):
                            at = first + (blocks + b) * keys + thread
                            if thread < keys and at < entries:
                                scores_ts[token0 + h, at] = -T.infinity(T.float32)
            else:
                T.set_max_nreg(launch.producer_registers, 0)
                q_rows = q_yd[tile * columns : (tile + 1) * columns, 0:WIDTH]
                if exact:
                    # 6. codes come a block ahead of their widening; those of the queries through the last buffer
                    last = raw_buffers - 1
                    T.tma_copy(q_rows, raw[last, 0:columns, :], barrier=raw_ready[last])
                    T.barrier_arrive(raw_ready[last])
                    for b in T.serial(last):
                        if b < blocks:
                            read_keys(k, table_tj, token0, raw, b, first + b * keys, raw_ready)
                    T.barrier_wait(raw_ready[last], 0)
                    for i, j in T.Parallel(columns, WIDTH):
                        q[i, j] = T.cast(raw[last, i, j], T.float16)
                    T.fence_proxy_async()
                    T.barrier_arrive(q_ready)
                    for block in T.serial(blocks):
                        slot = block % buffers
                        ahead = block + last
                        if ahead < blocks:
                            # all have read what stood there
                            T.sync_threads(7, GROUP)
                            read_keys(k, table_tj, token0, raw, ahead % raw_buffers, first + ahead * keys, raw_ready)
                        T.barrier_wait(free[slot], block // buffers % 2 ^ 1)
                        # the last buffer has been filled once more than the others
                        filled = block // raw_buffers + T.if_then_else(block % raw_buffers == last, 1, 0)
                        T.barrier_wait(raw_ready[block % raw_buffers], filled % 2)
                        widen(raw, key, block % raw_buffers, slot)
                        T.fence_proxy_async()
                        T.barrier_arrive(ready[slot])
                else:
                    T.tma_copy(q_rows, q, barrier=q_ready)
                    T.barrier_arrive(q_ready)
                    for block in T.serial(blocks):
                        slot = block % buffers
                        T.barrier_wait(free[slot], block // buffers % 2 ^ 1)
                        read_keys(k, table_tj, token0, key, slot, first + block * keys, ready)

    return index_scores


def share_of(blocks: int, tiles: int) -> int:
    """Blocks of keys that a program takes: all of them where there are tiles enough to fill the chip."""
    return max(1, min(blocks, blocks * tiles // PROGRAMS))


@lru_cache(maxsize=16)
def _compiled(num_heads: int, exact: bool, paged: bool) -> Any:
    program = score_program(num_heads, exact=exact, paged=paged)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)


def index_scores(
    q_thd: torch.Tensor,
    k_sd: torch.Tensor,
    k_sf_s: torch.Tensor,
    w_th: torch.Tensor,
    length_t: torch.Tensor,
    *,
    exact: bool,
) -> torch.Tensor:
    """Build once for the heads, and launch: scores of the keys of one sequence, fp32 [t, s].

    Raises:
        NotImplementedError: heads are no power of two from 16 to 128, rows have not 128 channels, or are not aligned
            as the copy engine takes them.
    """
    _require_rows("k_sd", k_sd)
    table_tj = length_t.new_empty(q_thd.shape[0], 1)  # of a program that does not take it
    return _launch(q_thd, k_sd, k_sf_s, w_th, table_tj, length_t, k_sd.shape[0], exact=exact, paged=False)


def index_scores_paged(
    q_thd: torch.Tensor,
    cache_pow: torch.Tensor,
    w_th: torch.Tensor,
    table_tj: torch.Tensor,
    length_t: torch.Tensor,
    *,
    exact: bool,
) -> torch.Tensor:
    """Build once for the heads, and launch: scores of the keys of a paged cache, fp32 [t, j * o].

    Raises:
        NotImplementedError: as `index_scores`; pages hold not 64 keys, or do not begin at multiples of 16 bytes.
    """
    pages, page, record = cache_pow.shape
    step = cache_pow.stride(0)
    if page != PAGE or record != WIDTH + 4 or cache_pow.stride()[1:] != (record, 1):
        raise NotImplementedError(
            f"cache_pow: expected pages of {PAGE} keys of 132 bytes, got {tuple(cache_pow.shape)}"
        )
    if step % 16 or cache_pow.data_ptr() % 16:
        raise NotImplementedError(f"cache_pow: expected pages that begin at multiples of 16 bytes, got {step}")
    entries = table_tj.shape[1] * PAGE
    if not pages:
        return torch.full((q_thd.shape[0], entries), -torch.inf, device=q_thd.device)
    k_pod = cache_pow.as_strided((pages, PAGE, WIDTH), (step, WIDTH, 1)).view(torch.float8_e4m3fn)
    scales = cache_pow.as_strided((pages, 4 * PAGE), (step, 1), cache_pow.storage_offset() + PAGE * WIDTH)
    k_sf_po = scales.view(torch.float32)
    return _launch(q_thd, k_pod, k_sf_po, w_th, table_tj.contiguous(), length_t, entries, exact=exact, paged=True)


def _launch(
    q_thd: torch.Tensor,
    k: torch.Tensor,
    k_sf: torch.Tensor,
    w_th: torch.Tensor,
    table_tj: torch.Tensor,
    length_t: torch.Tensor,
    entries: int,
    *,
    exact: bool,
    paged: bool,
) -> torch.Tensor:
    t, h, d = q_thd.shape
    if d != WIDTH:
        raise NotImplementedError(f"q_thd: expected rows of {WIDTH} channels, got {d}")
    if h not in HEADS:
        raise NotImplementedError(f"q_thd: expected a number of heads in {HEADS}, got {h}")
    scores_ts = torch.empty(t, entries, dtype=torch.float32, device=q_thd.device)
    if not scores_ts.numel():
        return scores_ts
    if q_thd.stride(0) != h * q_thd.stride(1):
        raise NotImplementedError(f"q_thd: expected heads in equal steps, got strides {q_thd.stride()}")
    q_yd = q_thd.as_strided((t * h, d), q_thd.stride()[1:])
    _require_rows("q_thd", q_yd)
    launch = scores_launch(h, exact=exact, paged=paged)
    share = share_of(-(-entries // launch.keys), -(-t * h // launch.columns))
    lists = w_th.contiguous().view(-1), table_tj, length_t.contiguous()
    _compiled(h, exact, paged)(q_yd, k, k_sf, *lists, scores_ts, share)
    return scores_ts


def _require_rows(name: str, x: torch.Tensor) -> None:
    if x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16:
        raise NotImplementedError(f"{name}: expected rows that begin at multiples of 16 bytes, got {x.stride()}")
