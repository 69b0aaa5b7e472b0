"""The indexer of V3.2: index rows (layer norm, rotation, Hadamard transform), and scores of e4m3 rows, dense or paged.

Codes are widened to bf16, which holds every one of them exactly, so that products are added in fp32 on every tensor
core; the fp8 instructions of SM90 keep fewer bits of a sum than the contract has. Entries are the rows of a product and
heads the columns; heads are added in a tree of fixed shape, so a score depends on its query and its key alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .hadamard import butterflies
from .quant import e4m3_value, output_buffer
from .rope import difference_of_products
from .split_softmax import arch_of
from .wide_records import wide_views


@dataclass(frozen=True, kw_only=True)
class RowsLaunch:
    """Rows a program of the index rows takes; a row is summed whole, so it changes no result."""

    rows: int
    num_warps: int = 4


def rows_launch(arch: str) -> RowsLaunch:
    """The launch for an architecture: the shuffles of a transform need room in the unified buffer of an Ascend."""
    return RowsLaunch(rows=4 if arch == "ascend950" else 16)


@dataclass(frozen=True, kw_only=True)
class ScoresLaunch:
    """Entries of a program and the queries that share them; neither changes a result."""

    block_keys: int
    queries: int
    e4m3_bits: bool
    num_warps: int = 4


def scores_launch(arch: str, *, shared: bool) -> ScoresLaunch:
    """The launch for an architecture; queries share keys in one buffer, not in pages."""
    return ScoresLaunch(block_keys=128, queries=16 if shared else 1, e4m3_bits=arch == "ascend950")


@triton.jit
def _normed(x_ptr, row, channel, stride_xt, stride_xd, mask, mean, rstd, weight_ptr, bias_ptr, stride_w, stride_b):
    """Channels of rows, normalised and rounded to bf16."""
    x = tl.load(x_ptr + row[:, None] * stride_xt + channel[None, :] * stride_xd, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel * stride_w).to(tl.float32)
    bias = tl.load(bias_ptr + channel * stride_b).to(tl.float32)
    y = (x - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
    return y.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _index_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    table_ptr,
    positions_ptr,
    y_ptr,
    num_rows,
    num_heads,
    num_positions,
    stride_xt,
    stride_xd,
    stride_w,
    stride_b,
    stride_ts,
    stride_tr,
    stride_p,
    eps,
    factor,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    # 1. rows, and the other channel of every pair
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_rows
    mask = in_range[:, None] & (tl.arange(0, WIDTH) >= 0)[None, :]
    channel = tl.arange(0, WIDTH)
    is_turned = channel < 2 * HALF
    if INTERLEAVED:
        partner, is_first, pair = channel ^ 1, channel % 2 == 0, channel // 2
    else:
        partner, is_first, pair = (
            tl.where(channel < HALF, channel + HALF, channel - HALF),
            channel < HALF,
            channel % HALF,
        )
    partner = tl.where(is_turned, partner, channel).to(tl.int64)
    channel = channel.to(tl.int64)
    # 2. layer norm; a row is summed whole, in an order that its width fixes
    own = tl.load(x_ptr + row[:, None] * stride_xt + channel[None, :] * stride_xd, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(own, axis=1) / WIDTH
        apart = own - mean[:, None]
        rstd = 1.0 / tl.sqrt_rn(tl.sum(apart * apart, axis=1) / WIDTH + eps)
        own = _normed(
            x_ptr, row, channel, stride_xt, stride_xd, mask, mean, rstd, weight_ptr, bias_ptr, stride_w, stride_b
        )
        other = _normed(
            x_ptr, row, partner, stride_xt, stride_xd, mask, mean, rstd, weight_ptr, bias_ptr, stride_w, stride_b
        )
    else:
        other = tl.load(x_ptr + row[:, None] * stride_xt + partner[None, :] * stride_xd, mask=mask, other=0.0)
        other = other.to(tl.float32)
    # 3. rotation of the first channels; a position outside the table gives NaN instead of a stray read
    position = tl.load(positions_ptr + (row // num_heads) * stride_p, mask=in_range, other=0).to(tl.int64)
    known = is_turned[None, :] & ((position >= 0) & (position < num_positions))[:, None]
    table_at = table_ptr + position[:, None] * stride_ts + pair.to(tl.int64)[None, :] * stride_tr
    cos = tl.load(table_at, mask=known, other=float("nan"))
    sin = tl.load(table_at + HALF * stride_tr, mask=known, other=float("nan"))
    other = tl.where(is_first[None, :], other, other * -1.0)
    turned = difference_of_products(own, cos, other, sin).to(tl.bfloat16).to(tl.float32)
    y = tl.where(is_turned[None, :], turned, own)
    # 4. the transform, once more rounded
    if STAGES > 0:
        y = butterflies(y, ROWS, WIDTH, STAGES) * factor
    tl.store(y_ptr + row[:, None] * WIDTH + channel[None, :], y.to(tl.bfloat16), mask=mask)


@triton.jit
def _scores(k, k_sf, q_ptr, w_ptr, num_heads, stride_qh, HEADS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """The scores of keys [BLOCK, WIDTH] against one query, in fp32."""
    head = tl.arange(0, HEADS)
    in_heads = head < num_heads
    q_at = q_ptr + head.to(tl.int64)[:, None] * stride_qh + tl.arange(0, WIDTH)[None, :]
    q = e4m3_value(tl.load(q_at, mask=in_heads[:, None], other=0), BITS).to(tl.bfloat16)
    w = tl.load(w_ptr + head, mask=in_heads, other=0.0)
    dots = tl.dot(k, tl.trans(q))
    # not a maximum: a NaN of a visible key has to stay visible
    return tl.sum(tl.where(dots < 0.0, 0.0, dots) * w[None, :], axis=1) * k_sf


@triton.jit
def _score_rows(
    q_ptr,
    k_ptr,
    sf_ptr,
    w_ptr,
    length_ptr,
    out_ptr,
    num_tokens,
    num_keys,
    num_heads,
    stride_qt,
    stride_qh,
    stride_ks,
    stride_sf,
    stride_wt,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. a block of keys, and how many of them any of the queries sees
    start = tl.program_id(0).to(tl.int64) * BLOCK
    token0 = tl.program_id(1).to(tl.int64) * QUERIES
    key = start + tl.arange(0, BLOCK)
    tokens = token0 + tl.arange(0, QUERIES)
    longest = tl.max(tl.load(length_ptr + tokens, mask=tokens < num_tokens, other=0), axis=0)
    # 2. the keys, which all of them share; a key that nobody sees is not read
    is_seen = (key < longest) & (key < num_keys)
    k_at = k_ptr + key[:, None] * stride_ks + tl.arange(0, WIDTH)[None, :]
    k = e4m3_value(tl.load(k_at, mask=is_seen[:, None], other=0), BITS).to(tl.bfloat16)
    k_sf = tl.load(sf_ptr + key * stride_sf, mask=is_seen, other=0.0)
    for i in range(0, QUERIES):
        token = token0 + i
        if token < num_tokens:
            # 3. scores of a query, -inf for what it does not see
            length = tl.load(length_ptr + token)
            out_at = out_ptr + token * num_keys + key
            if start < length:
                q_at, w_at = q_ptr + token * stride_qt, w_ptr + token * stride_wt
                score = _scores(k, k_sf, q_at, w_at, num_heads, stride_qh, HEADS, WIDTH, BITS)
                tl.store(out_at, tl.where(key < length, score, float("-inf")), mask=key < num_keys)
            else:
                tl.store(out_at, tl.full([BLOCK], float("-inf"), tl.float32), mask=key < num_keys)


@triton.jit
def _score_pages(
    q_ptr,
    byte_ptr,
    sf_ptr,
    w_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    num_heads,
    num_columns,
    num_pages,
    page_entries,
    stride_qt,
    stride_qh,
    stride_page,
    stride_wt,
    stride_tt,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. the entries of these columns and where their records are
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = (column < tl.load(length_ptr + token)) & (column < num_columns)
    number = column // page_entries
    page = tl.load(table_ptr + token * stride_tt + number, mask=seen, other=-1)
    seen = seen & (page >= 0) & (page < num_pages)
    slot = (column - number * page_entries).to(tl.int64)
    page_at = tl.where(seen, page, 0).to(tl.int64) * stride_page
    # 2. scores; nothing is read for a block that the query does not see
    out_at = out_ptr + token * num_columns + column
    if tl.sum(seen.to(tl.int32), axis=0) > 0:
        k_at = byte_ptr + (page_at + slot * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
        k = e4m3_value(tl.load(k_at, mask=seen[:, None], other=0), BITS).to(tl.bfloat16)
        sf_at = sf_ptr + (page_at + tl.cast(page_entries, tl.int64) * WIDTH) // 4 + slot
        k_sf = tl.load(sf_at, mask=seen, other=0.0)
        q_at, w_at = q_ptr + token * stride_qt, w_ptr + token * stride_wt
        score = _scores(k, k_sf, q_at, w_at, num_heads, stride_qh, HEADS, WIDTH, BITS)
        tl.store(out_at, tl.where(seen, score, float("-inf")), mask=column < num_columns)
    else:
        tl.store(out_at, tl.full([BLOCK], float("-inf"), tl.float32), mask=column < num_columns)


def index_rows(
    x_thd: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    table_sr: torch.Tensor,
    positions_t: torch.Tensor,
    *,
    interleaved: bool,
    transform: bool,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [t, h, d] in bf16, with a layer norm before the rotation if `norm` has its weight and bias.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: d is no power of two from 16 up, or heads are not side by side in equal steps.
        RuntimeError: x_thd is on the CPU and kernels are not interpreted.
    """
    t, h, d = x_thd.shape
    if d < 16 or d & (d - 1):
        raise NotImplementedError(f"x_thd: expected a power of two of channels from 16 up, got {d}")
    y_thd = output_buffer(out, (t, h, d), torch.bfloat16, x_thd)
    if not t * h:
        return y_thd
    require_runnable("x_thd", x_thd)
    x_yd, launch = x_thd.reshape(t * h, d), rows_launch(arch_of(x_thd.device))
    weight, bias = (table_sr[0], table_sr[0]) if norm is None else norm
    _index_rows[(triton.cdiv(t * h, launch.rows),)](
        x_yd,
        weight,
        bias,
        table_sr,
        positions_t,
        y_thd,
        t * h,
        h,
        table_sr.shape[0],
        *x_yd.stride(),
        weight.stride(0),
        bias.stride(0),
        *table_sr.stride(),
        positions_t.stride(0),
        eps,
        d**-0.5,
        NORM=norm is not None,
        INTERLEAVED=interleaved,
        HALF=table_sr.shape[1] // 2,
        WIDTH=d,
        STAGES=d.bit_length() - 1 if transform else 0,
        ROWS=launch.rows,
        num_warps=launch.num_warps,
    )
    return y_thd


def index_scores(
    q_thd: torch.Tensor,
    k_sd: torch.Tensor,
    k_sf_s: torch.Tensor,
    w_th: torch.Tensor,
    length_t: torch.Tensor,
    *,
    launch: ScoresLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of the keys of one sequence, fp32 [t, s]; codes are given as bytes.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: d is no power of two from 16 up, or channels are not contiguous.
        RuntimeError: q_thd is on the CPU and kernels are not interpreted.
    """
    (t, h, d), s = q_thd.shape, k_sd.shape[0]
    _require_codes(q_thd=q_thd, k_sd=k_sd)
    scores_ts = output_buffer(out, (t, s), torch.float32, q_thd)
    if not t * s:
        return scores_ts
    require_runnable("q_thd", q_thd)
    launch = launch or scores_launch(arch_of(q_thd.device), shared=True)
    _score_rows[(triton.cdiv(s, launch.block_keys), triton.cdiv(t, launch.queries))](
        q_thd,
        k_sd,
        k_sf_s,
        w_th.contiguous(),
        length_t.contiguous(),
        scores_ts,
        t,
        s,
        h,
        *q_thd.stride()[:2],
        k_sd.stride(0),
        k_sf_s.stride(0),
        h,
        HEADS=max(16, triton.next_power_of_2(h)),
        WIDTH=d,
        QUERIES=launch.queries,
        BLOCK=launch.block_keys,
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
    )
    return scores_ts


def index_scores_paged(
    q_thd: torch.Tensor,
    cache_pow: torch.Tensor,
    w_th: torch.Tensor,
    table_tj: torch.Tensor,
    length_t: torch.Tensor,
    *,
    launch: ScoresLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of the keys of a paged cache, fp32 [t, j * o]; query codes are given as bytes.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        NotImplementedError: d is no power of two from 16 up, channels are not contiguous, or pages do not begin at
            multiples of four bytes.
        RuntimeError: q_thd is on the CPU and kernels are not interpreted.
    """
    (t, h, d), (p, o, _), j = q_thd.shape, cache_pow.shape, table_tj.shape[1]
    _require_codes(q_thd=q_thd)
    byte_pw, float_pw, _ = wide_views("cache_pow", cache_pow, align=4)
    scores_ts = output_buffer(out, (t, j * o), torch.float32, q_thd)
    if not t * j * o:
        return scores_ts
    require_runnable("q_thd", q_thd)
    if not p:
        return scores_ts.fill_(float("-inf"))
    launch = launch or scores_launch(arch_of(q_thd.device), shared=False)
    table_tj = table_tj.contiguous()
    _score_pages[(triton.cdiv(j * o, launch.block_keys), t)](
        q_thd,
        byte_pw,
        float_pw,
        w_th.contiguous(),
        table_tj,
        length_t.contiguous(),
        scores_ts,
        h,
        j * o,
        p,
        o,
        *q_thd.stride()[:2],
        byte_pw.stride(0),
        h,
        table_tj.stride(0),
        HEADS=max(16, triton.next_power_of_2(h)),
        WIDTH=d,
        BLOCK=launch.block_keys,
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,
    )
    return scores_ts


def _require_codes(**named: torch.Tensor) -> None:
    for name, x in named.items():
        if x.shape[-1] < 16 or x.shape[-1] & (x.shape[-1] - 1):
            raise NotImplementedError(f"{name}: expected a power of two of channels from 16 up, got {x.shape[-1]}")
        if x.numel() and x.stride(-1) != 1:
            raise NotImplementedError(f"{name}: expected contiguous channels, got strides {x.stride()}")
