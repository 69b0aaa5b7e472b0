"""Index keys, queries and head weights, and the scores of visible entries: contiguous, paged, or in candidate blocks.

A program of a score kernel owns a block of entries. Entries are the rows of its product and heads the columns, so that
one query fills the tile; sixteen heads at a time are taken apart and added to four running sums per entry in the order
that the contract fixes, for every score order alike. A score therefore depends on its query and its key alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import e2m1_codes, output_buffer, store_scale, ue8m0_value
from .split_softmax import arch_of

CODE_BYTES, SCALE_BYTES, RECORD = tl.constexpr(64), tl.constexpr(4), 68
SMALLEST_AMAX = 6 * 2.0**-126
SCORE_DTYPES = {
    "fp32": torch.float32,
    "bf16_once": torch.bfloat16,
    "bf16_release": torch.bfloat16,
    "bf16_chains": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class ScoreLaunch:
    """Entries of a program and the queries that share them; neither changes a result."""

    block_keys: int
    queries: int
    fma: bool  # a bf16 product and sum with one rounding is an instruction; otherwise it is put together in fp32
    num_warps: int = 4


def score_launch(arch: str, *, shared: bool) -> ScoreLaunch:
    """The launch for an architecture; queries share keys in a contiguous buffer, not in pages or candidates."""
    return ScoreLaunch(block_keys=128, queries=16 if shared else 1, fma=arch != "ascend950")


@dataclass(frozen=True, kw_only=True)
class RecordLaunch:
    """Rows of 128 channels that a program rotates and quantises, and the step of the projection before it."""

    rows: int = 64
    step: int = 64
    num_warps: int = 4


@triton.jit
def _store_records(
    even,
    odd,
    row,
    in_range,
    position,
    table_ptr,
    out_ptr,
    num_positions,
    stride_ti,
    stride_tr,
    floor,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate the last 2 HALF channels, round to bf16, quantise and store; the halves of every pair are apart."""
    # 1. rotation; a position outside the table gives NaN instead of a stray read
    pair = tl.arange(0, 64)
    turned = pair >= 64 - HALF
    known = turned[None, :] & ((position >= 0) & (position < num_positions))[:, None]
    table_at = table_ptr + position[:, None] * stride_ti + (pair - (64 - HALF))[None, :] * stride_tr
    cos = tl.load(table_at, mask=known, other=float("nan"))
    sin = tl.load(table_at + HALF * stride_tr, mask=known, other=float("nan"))
    turned_even = tl.where(turned[None, :], even * cos - odd * sin, even).to(tl.bfloat16).to(tl.float32)
    turned_odd = tl.where(turned[None, :], even * sin + odd * cos, odd).to(tl.bfloat16).to(tl.float32)
    # 2. scales of groups of 32 channels, which are 16 pairs
    even3 = tl.reshape(turned_even, [ROWS, 4, 16])
    odd3 = tl.reshape(turned_odd, [ROWS, 4, 16])
    amax = tl.max(tl.maximum(tl.abs(even3), tl.abs(odd3)), axis=2)
    group = tl.arange(0, 4)[None, :]
    record_at = out_ptr + row[:, None] * 68
    scale = store_scale(amax, floor, record_at + CODE_BYTES + group, in_range[:, None], 6.0, "ue8m0")
    # 3. codes, the even channel in the low nibble
    byte = e2m1_codes(even3, scale[:, :, None], "ue8m0") | (e2m1_codes(odd3, scale[:, :, None], "ue8m0") << 4)
    code_at = record_at[:, :, None] + group[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(code_at, byte.to(tl.uint8), mask=in_range[:, None, None])


@triton.jit
def _index_keys(
    lat_ptr,
    w_ptr,
    norm_ptr,
    table_ptr,
    positions_ptr,
    out_ptr,
    num_rows,
    width,
    num_positions,
    stride_ls,
    stride_lc,
    stride_wd,
    stride_wc,
    stride_nd,
    stride_ti,
    stride_tr,
    stride_p,
    eps,
    floor,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    # 1. projection to 128 channels, even and odd ones apart
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_rows
    pair = tl.arange(0, 64).to(tl.int64)
    even = tl.zeros([ROWS, 64], tl.float32)
    odd = tl.zeros([ROWS, 64], tl.float32)
    for start in range(0, width, STEP):
        channel = start + tl.arange(0, STEP).to(tl.int64)
        inside = channel < width
        lat_at = lat_ptr + row[:, None] * stride_ls + channel[None, :] * stride_lc
        lat = tl.load(lat_at, mask=in_range[:, None] & inside[None, :], other=0.0)
        w_at = w_ptr + (2 * pair)[:, None] * stride_wd + channel[None, :] * stride_wc
        w_even = tl.load(w_at, mask=inside[None, :], other=0.0)
        w_odd = tl.load(w_at + stride_wd, mask=inside[None, :], other=0.0)
        even = tl.dot(lat, tl.trans(w_even), even, input_precision="ieee")
        odd = tl.dot(lat, tl.trans(w_odd), odd, input_precision="ieee")
    even = even.to(tl.bfloat16).to(tl.float32)
    odd = odd.to(tl.bfloat16).to(tl.float32)
    # 2. norm over all channels
    total = tl.sum(even * even + odd * odd, axis=1)
    rstd = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(total * 0.0078125 + eps))
    norm_at = norm_ptr + (2 * pair[:, None] + tl.arange(0, 2)[None, :]) * stride_nd
    norm_even, norm_odd = tl.split(tl.load(norm_at).to(tl.float32))
    even = (even * rstd[:, None] * norm_even[None, :]).to(tl.bfloat16).to(tl.float32)
    odd = (odd * rstd[:, None] * norm_odd[None, :]).to(tl.bfloat16).to(tl.float32)
    # 3. rotation and codes
    position = tl.load(positions_ptr + row * stride_p, mask=in_range, other=0).to(tl.int64)
    _store_records(
        even, odd, row, in_range, position, table_ptr, out_ptr, num_positions, stride_ti, stride_tr, floor, HALF, ROWS
    )


@triton.jit
def _index_queries(
    q_ptr,
    table_ptr,
    positions_ptr,
    out_ptr,
    num_rows,
    num_heads,
    num_positions,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_ti,
    stride_tr,
    stride_p,
    floor,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    # 1. rows are numbered through the heads of all tokens
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_rows
    token = row // num_heads
    q_at = q_ptr + token * stride_qt + (row % num_heads) * stride_qh
    channel = tl.arange(0, 128).to(tl.int64)
    q = tl.load(q_at[:, None] + channel[None, :] * stride_qd, mask=in_range[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(q, [ROWS, 64, 2]))
    # 2. rotation and codes
    position = tl.load(positions_ptr + token * stride_p, mask=in_range, other=0).to(tl.int64)
    _store_records(
        even.to(tl.float32),
        odd.to(tl.float32),
        row,
        in_range,
        position,
        table_ptr,
        out_ptr,
        num_positions,
        stride_ti,
        stride_tr,
        floor,
        HALF,
        ROWS,
    )


@triton.jit
def _index_weights(
    x_ptr,
    w_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    width,
    stride_xt,
    stride_xm,
    stride_wh,
    stride_wm,
    scale,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, HEADS).to(tl.int64)
    acc = tl.zeros([ROWS, HEADS], tl.float32)
    for start in range(0, width, STEP):
        channel = start + tl.arange(0, STEP).to(tl.int64)
        inside = channel < width
        x_at = x_ptr + token[:, None] * stride_xt + channel[None, :] * stride_xm
        x = tl.load(x_at, mask=(token < num_tokens)[:, None] & inside[None, :], other=0.0)
        w_at = w_ptr + head[:, None] * stride_wh + channel[None, :] * stride_wm
        w = tl.load(w_at, mask=(head < num_heads)[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    rounded = (acc.to(tl.bfloat16).to(tl.float32) * scale).to(tl.bfloat16)
    mask = (token < num_tokens)[:, None] & (head < num_heads)[None, :]
    tl.store(out_ptr + token[:, None] * num_heads + head[None, :], rounded, mask=mask)


@triton.jit
def _halves(code_at, sf_at, mask):
    """The even and the odd channels of records in bf16: exact, a code has two significant bits."""
    item = tl.arange(0, 64)
    byte = tl.load(code_at[:, None] + item[None, :], mask=mask[:, None], other=0).to(tl.int32)
    scale = ue8m0_value(tl.load(sf_at[:, None] + (item // 16)[None, :], mask=mask[:, None], other=0))
    return (_e2m1_value(byte) * scale).to(tl.bfloat16), (_e2m1_value(byte >> 4) * scale).to(tl.bfloat16)


@triton.jit
def _e2m1_value(nibble):
    """The number that the low four bits mean: exponent and mantissa put where fp16 has them, 2^14 too small."""
    half = ((nibble & 7) << 9) | ((nibble & 8) << 12)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _times_plus(t, w, a, FMA: tl.constexpr):
    """bf16(t * w + a) in one rounding, for bf16 t, w and a."""
    if FMA:
        nearest = tl.fma(t, w, a)
    else:
        # the product is exact in fp32; of the sum the rounding error is kept, and where the rounded sum is the midpoint
        # of two bf16 numbers it is moved one fp32 step to the side that the error is on
        product = t.to(tl.float32) * w.to(tl.float32)
        wide = a.to(tl.float32)
        total = wide + product
        part = total - wide
        error = (wide - (total - part)) + (product - part)
        bits = total.to(tl.int32, bitcast=True)
        outward = (error > 0.0) == (total > 0.0)
        is_tie = ((bits & 0xFFFF) == 0x8000) & (error != 0.0)
        bits = tl.where(is_tie, tl.where(outward, bits + 1, bits - 1), bits)
        nearest = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return nearest


@triton.jit
def _add_heads(total, dots, w_ptr, first, num_heads, ORDER: tl.constexpr, FMA: tl.constexpr):
    """The running sums [BLOCK, 4] of the chains and one more head each; heads beyond the last have the weight 0."""
    head = first + tl.arange(0, 4)
    w = tl.broadcast_to(tl.load(w_ptr + head, mask=head < num_heads, other=0.0)[None, :], dots.shape)
    # not a maximum: a NaN of a visible key has to stay visible
    if ORDER == "fp32":
        total += tl.where(dots < 0.0, 0.0, dots) * w.to(tl.float32)
    elif ORDER == "bf16_release":
        rounded = dots.to(tl.bfloat16).to(tl.float32)
        total += (tl.where(rounded < 0.0, 0.0, rounded) * w.to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    else:
        total = _times_plus(tl.where(dots < 0.0, 0.0, dots).to(tl.bfloat16), w, total, FMA)
    return total


@triton.jit
def _scores(
    k_even,
    k_odd,
    q_ptr,
    w_ptr,
    num_heads,
    stride_qh,
    GROUPS: tl.constexpr,
    ORDER: tl.constexpr,
    FMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scores [BLOCK] of the keys against one query, in fp32."""
    chain: tl.constexpr = tl.bfloat16 if ORDER == "bf16_chains" else tl.float32
    total = tl.zeros([BLOCK, 4], chain)
    for group in range(0, GROUPS):
        # 1. sixteen heads
        first = group * 16
        head = first + tl.arange(0, 16)
        q_at = q_ptr + head.to(tl.int64) * stride_qh
        q_even, q_odd = _halves(q_at, q_at + CODE_BYTES, head < num_heads)
        dots = tl.dot(k_even, tl.trans(q_even), input_precision="ieee")
        dots = tl.dot(k_odd, tl.trans(q_odd), dots, input_precision="ieee")
        # 2. taken apart: chain c has head 4 i + c in step i
        steps = tl.permute(tl.reshape(dots, [BLOCK, 4, 4]), (0, 2, 1))
        even, odd = tl.split(tl.reshape(steps, [BLOCK, 4, 2, 2]))
        d0, d2 = tl.split(even)
        d1, d3 = tl.split(odd)
        # 3. every chain in ascending order of its heads
        total = _add_heads(total, d0, w_ptr, first, num_heads, ORDER, FMA)
        total = _add_heads(total, d1, w_ptr, first + 4, num_heads, ORDER, FMA)
        total = _add_heads(total, d2, w_ptr, first + 8, num_heads, ORDER, FMA)
        total = _add_heads(total, d3, w_ptr, first + 12, num_heads, ORDER, FMA)
    # 4. the chains together
    left, right = tl.split(tl.reshape(total.to(tl.float32), [BLOCK, 2, 2]))
    a0, a2 = tl.split(left)
    a1, a3 = tl.split(right)
    return (a0 + a2).to(chain).to(tl.float32) + (a1 + a3).to(chain).to(tl.float32)


@triton.jit
def _score_buffer(
    q_ptr,
    k_ptr,
    w_ptr,
    first_ptr,
    length_ptr,
    out_ptr,
    num_tokens,
    num_keys,
    num_heads,
    stride_qt,
    stride_qh,
    stride_ks,
    stride_wt,
    GROUPS: tl.constexpr,
    ORDER: tl.constexpr,
    FMA: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. a block of the buffer, and the queries that may see some of it
    start = tl.program_id(0).to(tl.int64) * BLOCK
    token0 = tl.program_id(1).to(tl.int64) * QUERIES
    item = tl.arange(0, BLOCK)
    key = start + item
    tokens = token0 + tl.arange(0, QUERIES)
    is_token = tokens < num_tokens
    firsts = tl.load(first_ptr + tokens, mask=is_token, other=0).to(tl.int64)
    lengths = tl.load(length_ptr + tokens, mask=is_token, other=0).to(tl.int64)
    sees = (firsts < start + BLOCK) & (firsts + lengths > start)
    any_sees = tl.sum(sees.to(tl.int32), axis=0) > 0
    # 2. the keys, which all of them share
    key_at = k_ptr + key * stride_ks
    k_even, k_odd = _halves(key_at, key_at + CODE_BYTES, (key < num_keys) & any_sees)
    for i in range(0, QUERIES):
        token = token0 + i
        if token < num_tokens:
            first = tl.load(first_ptr + token).to(tl.int64)
            length = tl.load(length_ptr + token).to(tl.int64)
            row_ptr = out_ptr + token * num_keys
            # 3. what the query does not see, among the columns with the numbers of these keys
            row = first + key
            seen = (key < length) & (row >= 0) & (row < num_keys)
            tl.store(row_ptr + key, tl.full([BLOCK], float("-inf"), out_ptr.dtype.element_ty), (key < num_keys) & ~seen)
            # 4. what it sees of these keys, in the columns where its sequence has them
            if (first < start + BLOCK) & (first + length > start):
                score = _scores(
                    k_even,
                    k_odd,
                    q_ptr + token * stride_qt,
                    w_ptr + token * stride_wt,
                    num_heads,
                    stride_qh,
                    GROUPS,
                    ORDER,
                    FMA,
                    BLOCK,
                )
                column = key - first
                mask = (column >= 0) & (column < length) & (column < num_keys) & (key < num_keys)
                tl.store(row_ptr + column, score.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _score_entries(
    q_ptr,
    k_ptr,
    w_ptr,
    first_ptr,
    table_ptr,
    length_ptr,
    blocks_ptr,
    out_ptr,
    num_heads,
    num_columns,
    num_keys,
    num_pages,
    table_pages,
    page_entries,
    block_size,
    num_blocks,
    stride_qt,
    stride_qh,
    stride_ks,
    stride_wt,
    stride_tt,
    stride_bt,
    PAGED: tl.constexpr,
    RESTRICTED: tl.constexpr,
    GROUPS: tl.constexpr,
    ORDER: tl.constexpr,
    FMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. the entries that these columns stand for
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(length_ptr + token)
    entry = column.to(tl.int64)
    if RESTRICTED:
        place = column // block_size
        block = tl.load(blocks_ptr + token * stride_bt + place, mask=place < num_blocks, other=-1).to(tl.int64)
        entry = tl.where(block < 0, -1, block * block_size + column % block_size)
    seen = (entry >= 0) & (entry < length) & (column < num_columns)
    # 2. where their records are
    if PAGED:
        seen = seen & (entry < table_pages * page_entries)
        entry32 = tl.where(seen, entry, 0).to(tl.int32)  # a division of 64-bit numbers is a call
        page = tl.load(table_ptr + token * stride_tt + entry32 // page_entries, mask=seen, other=-1).to(tl.int64)
        seen = seen & (page >= 0) & (page < num_pages)
        offset = (entry32 % page_entries).to(tl.int64)
        page_at = k_ptr + tl.where(seen, page, 0) * stride_ks
        code_at = page_at + offset * CODE_BYTES
        sf_at = page_at + page_entries * CODE_BYTES + offset * SCALE_BYTES
    else:
        row = tl.load(first_ptr + token).to(tl.int64) + entry
        seen = seen & (row >= 0) & (row < num_keys)
        code_at = k_ptr + tl.where(seen, row, 0) * stride_ks
        sf_at = code_at + CODE_BYTES
    # 3. scores; nothing is read for a block that the query does not see
    out_at = out_ptr + token * num_columns + column
    in_row = column < num_columns
    if tl.sum(seen.to(tl.int32), axis=0) > 0:
        k_even, k_odd = _halves(code_at, sf_at, seen)
        q_at, w_at = q_ptr + token * stride_qt, w_ptr + token * stride_wt
        score = _scores(k_even, k_odd, q_at, w_at, num_heads, stride_qh, GROUPS, ORDER, FMA, BLOCK)
        score = tl.where(seen, score, float("-inf"))
        tl.store(out_at, score.to(out_ptr.dtype.element_ty), mask=in_row)
    else:
        tl.store(out_at, tl.full([BLOCK], float("-inf"), out_ptr.dtype.element_ty), mask=in_row)


def index_keys(
    lat_sc: torch.Tensor,
    wk_dc: torch.Tensor,
    norm_d: torch.Tensor,
    table_ir: torch.Tensor,
    positions_s: torch.Tensor,
    *,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Records [s, 68] of index keys. A position that is no row of the table gives meaningless bytes.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: lat_sc is on the CPU and kernels are not interpreted.
    """
    s, c = lat_sc.shape
    k_sw = output_buffer(out, (s, RECORD), torch.uint8, lat_sc)
    if not s:
        return k_sw
    require_runnable("lat_sc", lat_sc)
    launch = RecordLaunch()
    _index_keys[(triton.cdiv(s, launch.rows),)](
        lat_sc,
        wk_dc,
        norm_d,
        table_ir,
        positions_s,
        k_sw,
        s,
        c,
        table_ir.shape[0],
        *lat_sc.stride(),
        *wk_dc.stride(),
        norm_d.stride(0),
        *table_ir.stride(),
        positions_s.stride(0),
        eps,
        SMALLEST_AMAX,
        HALF=table_ir.shape[1] // 2,
        ROWS=launch.rows,
        STEP=launch.step,
        num_warps=launch.num_warps,
    )
    return k_sw


def index_queries(
    q_thd: torch.Tensor, table_ir: torch.Tensor, positions_t: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Records [t, h, 68] of index queries. A position that is no row of the table gives meaningless bytes.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: q_thd is on the CPU and kernels are not interpreted.
    """
    t, h, _ = q_thd.shape
    q_thw = output_buffer(out, (t, h, RECORD), torch.uint8, q_thd)
    if not t * h:
        return q_thw
    require_runnable("q_thd", q_thd)
    launch = RecordLaunch(rows=32)
    _index_queries[(triton.cdiv(t * h, launch.rows),)](
        q_thd,
        table_ir,
        positions_t,
        q_thw,
        t * h,
        h,
        table_ir.shape[0],
        *q_thd.stride(),
        *table_ir.stride(),
        positions_t.stride(0),
        SMALLEST_AMAX,
        HALF=table_ir.shape[1] // 2,
        ROWS=launch.rows,
        num_warps=launch.num_warps,
    )
    return q_thw


def index_weights(
    x_tm: torch.Tensor, w_hm: torch.Tensor, *, scale: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Head weights in bf16.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: x_tm is on the CPU and kernels are not interpreted.
    """
    (t, m), h = x_tm.shape, w_hm.shape[0]
    w_th = output_buffer(out, (t, h), torch.bfloat16, x_tm)
    if not t * h:
        return w_th
    require_runnable("x_tm", x_tm)
    _index_weights[(triton.cdiv(t, 64),)](
        x_tm,
        w_hm,
        w_th,
        t,
        h,
        m,
        *x_tm.stride(),
        *w_hm.stride(),
        scale,
        ROWS=64,
        HEADS=max(16, triton.next_power_of_2(h)),
        STEP=128,
        num_warps=4,
    )
    return w_th


def index_scores(
    q_thw: torch.Tensor,
    k_sw: torch.Tensor,
    w_th: torch.Tensor,
    first_t: torch.Tensor,
    length_t: torch.Tensor,
    blocks_tk: torch.Tensor | None,
    *,
    block_size: int,
    order: str,
    launch: ScoreLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores against a contiguous buffer, [t, s] or [t, k * block_size].

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: the bytes of a record are not one behind the other.
        RuntimeError: q_thw is on the CPU and kernels are not interpreted.
    """
    (t, h, _), s = q_thw.shape, k_sw.shape[0]
    _require_records(q_thw=q_thw, k_sw=k_sw)
    if blocks_tk is not None:
        return _entries(
            q_thw, k_sw, w_th, first_t, None, length_t, blocks_tk, block_size, order, s, launch=launch, out=out
        )
    scores_ts = output_buffer(out, (t, s), SCORE_DTYPES[order], q_thw)
    if not t * s:
        return scores_ts
    require_runnable("q_thw", q_thw)
    launch = launch or score_launch(arch_of(q_thw.device), shared=True)
    _score_buffer[(triton.cdiv(s, launch.block_keys), triton.cdiv(t, launch.queries))](
        q_thw,
        k_sw,
        w_th,
        first_t.contiguous(),
        length_t.contiguous(),
        scores_ts,
        t,
        s,
        h,
        *q_thw.stride()[:2],
        k_sw.stride(0),
        w_th.stride(0),
        GROUPS=triton.cdiv(h, 16),
        ORDER="fp32" if order == "bf16_once" else order,  # rounded as it is stored
        FMA=launch.fma,
        QUERIES=launch.queries,
        BLOCK=launch.block_keys,
        num_warps=launch.num_warps,
    )
    return scores_ts


def index_scores_paged(
    q_thw: torch.Tensor,
    cache_pow: torch.Tensor,
    w_th: torch.Tensor,
    table_tj: torch.Tensor,
    length_t: torch.Tensor,
    blocks_tk: torch.Tensor | None,
    *,
    block_size: int,
    order: str,
    launch: ScoreLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores against a paged cache, [t, j * o] or [t, k * block_size].

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: the bytes of a page are not one behind the other.
        RuntimeError: q_thw is on the CPU and kernels are not interpreted.
    """
    _require_records(q_thw=q_thw)
    if cache_pow.stride()[1:] != (RECORD, 1) and cache_pow.numel():
        raise NotImplementedError(f"cache_pow: expected pages of contiguous bytes, got strides {cache_pow.stride()}")
    return _entries(
        q_thw, cache_pow, w_th, None, table_tj, length_t, blocks_tk, block_size, order, 0, launch=launch, out=out
    )


def _entries(
    q_thw: torch.Tensor,
    keys: torch.Tensor,
    w_th: torch.Tensor,
    first_t: torch.Tensor | None,
    table_tj: torch.Tensor | None,
    length_t: torch.Tensor,
    blocks_tk: torch.Tensor | None,
    block_size: int,
    order: str,
    num_keys: int,
    *,
    launch: ScoreLaunch | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Launch over the columns of every row on its own: pages, or candidate blocks of pages or of a buffer."""
    t, h, _ = q_thw.shape
    page_entries = keys.shape[1] if table_tj is not None else 1
    table_pages = table_tj.shape[1] if table_tj is not None else 0
    columns = table_pages * page_entries if blocks_tk is None else blocks_tk.shape[1] * block_size
    scores_ts = output_buffer(out, (t, columns), SCORE_DTYPES[order], q_thw)
    if not t * columns:
        return scores_ts
    require_runnable("q_thw", q_thw)
    launch = launch or score_launch(arch_of(q_thw.device), shared=False)
    table = length_t if table_tj is None else table_tj.contiguous()
    blocks = length_t if blocks_tk is None else blocks_tk.contiguous()
    _score_entries[(triton.cdiv(columns, launch.block_keys), t)](
        q_thw,
        keys,
        w_th,
        length_t if first_t is None else first_t.contiguous(),
        table,
        length_t.contiguous(),
        blocks,
        scores_ts,
        h,
        columns,
        num_keys,
        keys.shape[0],
        table_pages,
        page_entries,
        block_size,
        0 if blocks_tk is None else blocks_tk.shape[1],
        *q_thw.stride()[:2],
        keys.stride(0),
        w_th.stride(0),
        table.stride(0),
        blocks.stride(0),
        PAGED=table_tj is not None,
        RESTRICTED=blocks_tk is not None,
        GROUPS=triton.cdiv(h, 16),
        ORDER="fp32" if order == "bf16_once" else order,  # rounded as it is stored
        FMA=launch.fma,
        BLOCK=launch.block_keys,
        num_warps=launch.num_warps,
    )
    return scores_ts


def _require_records(**named: torch.Tensor) -> None:
    for name, x in named.items():
        if x.stride(-1) != 1 and x.numel():
            raise NotImplementedError(f"{name}: expected records of contiguous bytes, got strides {x.stride()}")
