"""Dense latent decode on SM90 over a paged cache, by the roles of `seesaw_sm90.py`.

Keys are cut into splits of 4096, whatever the batch. A program owns one query token, one tile of heads and one split,
and leaves sums in fp32 that a second kernel merges; or, where tokens alone fill the chip, it walks all splits of its
row and merges them itself, in the same order and by the same instructions; or, where there are few of both, the
programs of `mla_few_sm90.py` take its place. A row has the same bits in any of these forms.
"""

# mypy: disable-error-code="valid-type"

from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import language as T

from .mla_few_sm90 import sum_slices
from .pages_sm90 import SPLIT, bring_keys
from .roles_sm90 import (
    GROUP,
    HALF,
    HEADS,
    KEYS,
    LN_2,
    LOG2_E,
    LOWEST,
    PASS_CONFIGS,
    THREADS,
    VALUES,
    Roles,
    scale_sums,
)
from .seesaw_sm90 import EXP2, first_group, read_queries, second_group, shared_memory

ENOUGH = 96  # programs that fill the chip
FEW = 40  # programs of splits: 0.12 ms for up to 132 (H200), where slices of 32 take 0.09 and of 48 0.15


@T.macro
def merge_heads(run_top, run_total, top, total, old, new):
    """Add a split to what a row has: the factors `old` and `new` of the sums, maximum and total."""
    for h in T.Parallel(HEADS):
        old[h] = T.exp2(run_top[h] - T.max(run_top[h], top[h]))
        new[h] = T.exp2(top[h] - T.max(run_top[h], top[h]))
        run_top[h] = T.max(run_top[h], top[h])
        run_total[h] = T.ieee_fmaf(total[h], new[h], T.ieee_mul(run_total[h], old[h]))


@T.macro
def invert(total, shrink):
    """The factor of finished sums: 0 for a row without keys; a NaN total stays visible."""
    for h in T.Parallel(HEADS):
        shrink[h] = T.if_then_else(total[h] == 0.0, 0.0, 1.0 / total[h])


def decode_program(num_heads: int, width: int, *, chained: bool, roles: Roles | None = None):
    """The program for any number of requests, queries, pages and table columns; `chained`: all splits of a row.

    Raises:
        NotImplementedError: heads are no multiple of the tile, or not 512 values with at most 64 channels behind them.
    """
    roles = roles or Roles(multiply=216, bring=72)
    if num_heads % HEADS:
        raise NotImplementedError(f"num_heads: expected a multiple of {HEADS}, got {num_heads}")
    if width not in (512, 576):
        raise NotImplementedError(f"width: expected 512 or 576, got {width}")
    tail, tiles = width - VALUES, num_heads // HEADS
    lanes, passes = roles.lanes, KEYS // roles.step
    tokens, requests, columns, pages = T.dynamic("tokens, requests, columns, pages")
    page_stride, table_stride, parts = T.dynamic("page_stride, table_stride, parts")

    @T.macro
    def leave(part, part_index, token, head0, channel, sums):
        """Store half the sums of a split in fp32."""
        for h, u in T.Parallel(HEADS, HALF):
            part[part_index, token, head0 + h, channel + u] = sums[h, u]

    @T.macro
    def merge_split(split, splits, sums, part, token, head0, channel, run_top, run_total, top, total, old, new):
        """Merge a finished split; after the last one `sums` are those of the row."""
        merge_heads(run_top, run_total, top, total, old, new)
        if split > 0:
            for h, u in T.Parallel(HEADS, HALF):
                sums[h, u] = T.ieee_fmaf(sums[h, u], new[h], T.ieee_mul(part[0, token, head0 + h, channel + u], old[h]))
        if split + 1 < splits:
            leave(part, 0, token, head0, channel, sums)

    @T.prim_func
    def mla_decode(
        q_thd: T.Tensor((tokens, num_heads, width), T.bfloat16),
        cache_pod: T.StridedTensor((pages, KEYS, width), (page_stride, width, 1), T.bfloat16),
        table_bp: T.StridedTensor((requests, columns), (table_stride, 1), T.int32),
        length_b: T.Tensor((requests,), T.int32),
        part_ithu: T.Tensor((parts, tokens, num_heads, VALUES), T.float32),
        state_3ith: T.Tensor((3, parts, tokens, num_heads), T.float32),
        out_thu: T.Tensor((tokens, num_heads, VALUES), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        scale_log2: T.float32,
        queries: T.int32,
    ):
        with T.Kernel(tokens * tiles, 1 if chained else parts, threads=THREADS) as (program, part):
            T.import_source(EXP2)
            shared = shared_memory(tail)
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
            run_top = T.alloc_fragment((HEADS,), T.float32)
            run_top_right = T.alloc_fragment((HEADS,), T.float32)
            run_total = T.alloc_fragment((HEADS,), T.float32)
            run_total_right = T.alloc_fragment((HEADS,), T.float32)
            row = T.alloc_local((passes,), T.int32)
            page = T.alloc_local((passes,), T.int32)
            used = T.alloc_local((1,), T.int32)
            slot = T.alloc_local((passes,), T.int32)

            # 1. which token, heads and splits this program owns; the queries are the last positions of a request
            token = program // tiles
            head0 = program % tiles * HEADS
            request = token // queries
            end = length_b[request] - queries + token % queries + 1
            splits = T.max(T.ceildiv(end, SPLIT), 1)
            first_split = 0 if chained else part
            last_split = splits if chained else T.min(part + 1, splits)
            thread = T.get_thread_binding()

            if thread < GROUP:
                # 2. even blocks, the left half of the values
                T.set_max_nreg(roles.multiply, 1)
                if chained:
                    T.fill(run_top, LOWEST)
                    T.fill(run_total, 0.0)
                for split in T.serial(last_split - first_split):
                    blocks = T.ceildiv(T.min(end - (first_split + split) * SPLIT, SPLIT), KEYS)
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
                        split,
                        tail,
                    )
                    if chained:
                        merge_split(
                            split,
                            splits,
                            left,
                            part_ithu,
                            token,
                            head0,
                            0,
                            run_top,
                            run_total,
                            top,
                            total,
                            shrink,
                            block_top,
                        )
                    else:
                        leave(part_ithu, part, token, head0, 0, left)
                        for h in T.Parallel(HEADS):
                            state_3ith[0, part, token, head0 + h] = top[h]
                            state_3ith[1, part, token, head0 + h] = total[h]
                            state_3ith[2, part, token, head0 + h] = 0.0
                if chained:
                    for h in T.Parallel(HEADS):
                        lse_th[token, head0 + h] = (run_top[h] + T.log2(run_total[h])) * LN_2
                    invert(run_total, shrink)
                    scale_sums(left, shrink)
                    T.copy(left, shared.q[0, :, :])
                    T.copy(shared.q[0, :, :], out_thu[token, head0 : head0 + HEADS, 0:HALF])
            elif thread < 2 * GROUP:
                # 3. odd blocks, the right half
                T.set_max_nreg(roles.multiply, 1)
                if chained:
                    T.fill(run_top_right, LOWEST)
                    T.fill(run_total_right, 0.0)
                for split in T.serial(last_split - first_split):
                    blocks = T.ceildiv(T.min(end - (first_split + split) * SPLIT, SPLIT), KEYS)
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
                        split,
                        tail,
                    )
                    if chained:
                        merge_split(
                            split,
                            splits,
                            right,
                            part_ithu,
                            token,
                            head0,
                            HALF,
                            run_top_right,
                            run_total_right,
                            top_right,
                            total_right,
                            shrink_right,
                            block_top_right,
                        )
                    else:
                        leave(part_ithu, part, token, head0, HALF, right)
                if chained:
                    invert(run_total_right, shrink_right)
                    scale_sums(right, shrink_right)
                    T.copy(right, shared.q[1, :, :])
                    T.copy(shared.q[1, :, :], out_thu[token, head0 : head0 + HEADS, HALF:VALUES])
            else:
                # 4. the queries, then the keys of block after block
                T.set_max_nreg(roles.bring, 0)
                lane = (thread - 2 * GROUP) % lanes
                first = (thread - 2 * GROUP) // lanes
                read_queries(q_thd, token, head0, shared, first, lane, tail, lanes)
                start = first_split * SPLIT
                bring_keys(
                    cache_pod,
                    table_bp,
                    shared,
                    request,
                    start,
                    T.min(end, last_split * SPLIT) - start,
                    pages,
                    used,
                    row,
                    page,
                    slot,
                    first,
                    lane,
                    tail,
                    lanes,
                    True,
                )

    return mla_decode


def combine_program(num_heads: int):
    """The program that merges the splits of a row as a chained one does: one head and all channels a program."""
    tokens, requests, parts = T.dynamic("tokens, requests, parts")

    @T.prim_func
    def combine(
        part_ithu: T.Tensor((parts, tokens, num_heads, VALUES), T.float32),
        state_3ith: T.Tensor((3, parts, tokens, num_heads), T.float32),
        length_b: T.Tensor((requests,), T.int32),
        out_thu: T.Tensor((tokens, num_heads, VALUES), T.bfloat16),
        lse_th: T.Tensor((tokens, num_heads), T.float32),
        queries: T.int32,
    ):
        with T.Kernel(tokens, num_heads, threads=GROUP) as (token, head):
            sums = T.alloc_fragment((VALUES,), T.float32)
            run = T.alloc_local((2,), T.float32)
            factor = T.alloc_local((2,), T.float32)
            end = length_b[token // queries] - queries + token % queries + 1
            run[0] = LOWEST
            run[1] = 0.0
            T.fill(sums, 0.0)
            for split in T.serial(T.max(T.ceildiv(end, SPLIT), 1)):
                top = state_3ith[0, split, token, head]
                total = state_3ith[1, split, token, head] + state_3ith[2, split, token, head]
                new_top = T.max(run[0], top)
                factor[0] = T.exp2(run[0] - new_top)
                factor[1] = T.exp2(top - new_top)
                run[0] = new_top
                run[1] = T.ieee_fmaf(total, factor[1], T.ieee_mul(run[1], factor[0]))
                for u in T.Parallel(VALUES):
                    value = part_ithu[split, token, head, u]
                    sums[u] = T.if_then_else(
                        split > 0, T.ieee_fmaf(value, factor[1], T.ieee_mul(sums[u], factor[0])), value
                    )
            shrink = T.if_then_else(run[1] == 0.0, 0.0, 1.0 / run[1])
            for u in T.Parallel(VALUES):
                out_thu[token, head, u] = sums[u] * shrink
            if T.get_thread_binding() == 0:
                lse_th[token, head] = (run[0] + T.log2(run[1])) * LN_2

    return combine


@lru_cache(maxsize=16)
def _compiled(num_heads: int, width: int, chained: bool) -> Any:
    program = decode_program(num_heads, width, chained=chained)
    return tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=PASS_CONFIGS)


@lru_cache(maxsize=16)
def _combine(num_heads: int) -> Any:
    return tilelang.compile(combine_program(num_heads), target={"kind": "cuda", "arch": "sm_90a"})


def _form(rows: int, parts: int) -> str:
    """Which programs fill the chip; it changes no bit."""
    if rows * parts <= FEW:
        return "slices"
    return "rows" if rows >= ENOUGH or parts == 1 else "splits"


def mla_decode(
    q_bthd: torch.Tensor,
    cache_pod: torch.Tensor,
    block_table_bp: torch.Tensor,
    lengths_b: torch.Tensor,
    *,
    scale: float,
    form: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build once for the heads and widths, and launch; rows of a page follow one another.

    `form`: a program walks whole "rows", or "splits", or sums "slices" of channels; left out, as fills the chip.
    """
    requests, queries, num_heads, width = q_bthd.shape
    tokens = requests * queries
    q_thd = q_bthd.reshape(tokens, num_heads, width)
    out_thu = torch.empty(tokens, num_heads, VALUES, dtype=q_bthd.dtype, device=q_bthd.device)
    lse_th = torch.empty(tokens, num_heads, dtype=torch.float32, device=q_bthd.device)
    shape = (requests, queries, num_heads)
    if tokens == 0:
        return out_thu.view(*shape, VALUES), lse_th.view(shape)
    if block_table_bp.shape[1] == 0:  # a program takes no empty argument; no request is so short that this shows
        block_table_bp = block_table_bp.new_full((requests, 1), -1)
    # from the width of the table, known on the host; splits beyond a request's length are never looked at
    parts = -(-block_table_bp.shape[1] * KEYS // SPLIT)
    if form is None:
        form = _form(tokens * num_heads // HEADS, parts)
    kept = 1 if form == "rows" else parts
    part_ithu = torch.empty(kept, tokens, num_heads, VALUES, dtype=torch.float32, device=q_bthd.device)
    state_3ith = torch.empty(3, kept, tokens, num_heads, dtype=torch.float32, device=q_bthd.device)
    pages = (cache_pod, block_table_bp, lengths_b)
    if form == "slices":
        sum_slices(q_thd, *pages, part_ithu, state_3ith, scale_log2=scale * LOG2_E, queries=queries)
    else:
        kernel = _compiled(num_heads, width, form == "rows")
        kernel(q_thd, *pages, part_ithu, state_3ith, out_thu, lse_th, scale * LOG2_E, queries)
    if form != "rows":
        _combine(num_heads)(part_ithu, state_3ith, lengths_b, out_thu, lse_th, queries)
    return out_thu.view(*shape, VALUES), lse_th.view(shape)
