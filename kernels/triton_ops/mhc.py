"""Hyper-connections: copies and reads of the streams, their update, the projection to coefficients, Sinkhorn.

The projection runs over [tokens x channels] tiles of one stream after the other. fp32 weights are cut into three bf16
parts, so that every product of a tensor core is exact; a tile's sums start at zero and are then added in fp32, which
keeps the truncation of long accumulations out. How the channels are split depends on the width alone, and the partial
sums are added in ascending order. Coefficients of a token live in separate registers of one thread: there is no
reduction whose order a layout could change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer


@dataclass(frozen=True, kw_only=True)
class MhcLaunch:
    """Tiles of the projection: `splits` runs of `span` channels fix the order of summation."""

    span: int
    splits: int
    tokens: int = 32
    channels: int = 64
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True)
class Gates:
    """The numbers of a configuration that the kernels take."""

    iters: int
    eps: float
    norm_eps: float
    post_scale: float


def mhc_launch(width: int) -> MhcLaunch:
    """Sixteen splits of the channels of a stream, fewer on narrow streams, whatever the number of tokens."""
    span = triton.cdiv(triton.cdiv(width, 16), 64) * 64
    return MhcLaunch(span=span, splits=triton.cdiv(width, span))


COLUMNS = 1024  # channels that a program of the elementwise kernels takes; it changes no result
SATURATED = tl.constexpr(3.3895313892515355e38)  # the largest bf16 number
TOKENS = 32  # tokens whose coefficients one program computes, one a thread; it changes no result


@triton.jit
def _expand(
    x_ptr,
    stream_ptr,
    pre_ptr,
    width,
    stride_xt,
    stride_xm,
    STREAMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    mask = column < width
    x = tl.load(x_ptr + token * stride_xt + column * stride_xm, mask=mask, other=0.0)
    for n in tl.static_range(STREAMS):
        tl.store(stream_ptr + (token * STREAMS + n) * width + column, x, mask=mask)
    copy = tl.arange(0, BLOCK_N).to(tl.int64)
    first = tl.where(copy == 0, 1.0, 0.0)
    tl.store(pre_ptr + token * STREAMS + copy, first, mask=(copy < STREAMS) & (tl.program_id(1) == 0))


@triton.jit
def _stream(stream_ptr, token, n, column, width, stride_st, stride_sn, stride_sm):
    at = stream_ptr + token * stride_st + n * stride_sn + column * stride_sm
    return tl.load(at, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _apply(
    pre_ptr,
    stream_ptr,
    x_ptr,
    width,
    stride_pt,
    stride_pn,
    stride_st,
    stride_sn,
    stride_sm,
    MEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    total = tl.zeros([COLUMNS], tl.float32)
    for n in tl.static_range(4):
        share = 0.25
        if not MEAN:
            share = tl.load(pre_ptr + token * stride_pt + n * stride_pn)
        total = tl.fma(share, _stream(stream_ptr, token, n, column, width, stride_st, stride_sn, stride_sm), total)
    tl.store(x_ptr + token * width + column, total.to(x_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _updated(y, r0, r1, r2, r3, post, c0, c1, c2, c3):
    # the product with y first, then the streams in order; fused by name, so that every kernel gives the same bits
    return tl.fma(c3, r3, tl.fma(c2, r2, tl.fma(c1, r1, tl.fma(c0, r0, post * y)))).to(tl.bfloat16)


@triton.jit
def _post(
    stream_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    width,
    stride_st,
    stride_sn,
    stride_sm,
    stride_yt,
    stride_ym,
    stride_pt,
    stride_pn,
    stride_ct,
    stride_ci,
    stride_co,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    mask = column < width
    y = tl.load(y_ptr + token * stride_yt + column * stride_ym, mask=mask, other=0.0).to(tl.float32)
    r0 = _stream(stream_ptr, token, 0, column, width, stride_st, stride_sn, stride_sm)
    r1 = _stream(stream_ptr, token, 1, column, width, stride_st, stride_sn, stride_sm)
    r2 = _stream(stream_ptr, token, 2, column, width, stride_st, stride_sn, stride_sm)
    r3 = _stream(stream_ptr, token, 3, column, width, stride_st, stride_sn, stride_sm)
    for o in tl.static_range(4):
        post = tl.load(post_ptr + token * stride_pt + o * stride_pn)
        comb = comb_ptr + token * stride_ct + o * stride_co
        c0 = tl.load(comb)
        c1 = tl.load(comb + stride_ci)
        c2 = tl.load(comb + 2 * stride_ci)
        c3 = tl.load(comb + 3 * stride_ci)
        updated = _updated(y, r0, r1, r2, r3, post, c0, c1, c2, c3)
        tl.store(out_ptr + (token * 4 + o) * width + column, updated, mask=mask)


@triton.jit
def _three_parts(x):
    # 24 significant bits in three bf16 numbers: both differences are exact
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _add_product(sums, tile, fn_ptr, first, column, width, weights, stride_fw, stride_fx, BLOCK_W: tl.constexpr):
    """Add the product of a bf16 tile [tokens, channels] with the weights of its stream, which start at `first`."""
    w = tl.arange(0, BLOCK_W).to(tl.int64)
    at = fn_ptr + (first + column[:, None]) * stride_fx + w[None, :] * stride_fw
    weight = tl.load(at, mask=(column[:, None] < width) & (w[None, :] < weights), other=0.0)
    high, middle, low = _three_parts(weight)
    product = tl.dot(tile, low)
    product = tl.dot(tile, middle, product)
    product = tl.dot(tile, high, product)
    return sums + product


@triton.jit
def _store_partials(partial_ptr, sums, squares, token, tokens, weights, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr):
    """Rows of one split, tokens side by side: the products, then the square sum."""
    # the sum over channels as a product with ones, into the column behind the weights: its order is the hardware's,
    # not the layout's. An infinity has no three parts: it stands as the largest bf16 number
    w = tl.arange(0, BLOCK_W).to(tl.int64)
    ones = tl.where(w[None, :] == weights, 1.0, tl.zeros([BLOCK_M, BLOCK_W], tl.float32)).to(tl.bfloat16)
    high, middle, low = _three_parts(tl.minimum(squares, SATURATED))
    total = tl.dot(low, ones)
    total = tl.dot(middle, ones, total)
    total = tl.dot(high, ones, total)
    at = partial_ptr + (tl.program_id(1).to(tl.int64) * (weights + 1) + w[None, :]) * tokens + token[:, None]
    tl.store(at, sums + total, mask=(token[:, None] < tokens) & (w[None, :] <= weights))


@triton.jit
def _project(
    stream_ptr,
    fn_ptr,
    partial_ptr,
    tokens,
    width,
    span,
    weights,
    stride_st,
    stride_sn,
    stride_sm,
    stride_fw,
    stride_fx,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    start = tl.program_id(1) * span
    sums = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for step in range(0, 4 * span // BLOCK_M):
        # the four streams of a block of channels, one after the other
        n = step % 4
        column = start + step // 4 * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (token[:, None] < tokens) & (column[None, :] < width)
        at = stream_ptr + token[:, None] * stride_st + n * stride_sn + column[None, :] * stride_sm
        tile = tl.load(at, mask=mask, other=0.0)
        wide = tile.to(tl.float32)
        squares += wide * wide
        sums = _add_product(sums, tile, fn_ptr, n * width, column, width, weights, stride_fw, stride_fx, BLOCK_W)
    _store_partials(partial_ptr, sums, squares, token, tokens, weights, BLOCK_M, BLOCK_W)


@triton.jit
def _coefficient(ptr, token, mask, stride_t, offset):
    return tl.load(ptr + token * stride_t + offset, mask=mask, other=0.0)[:, None]


@triton.jit
def _update_and_project(
    stream_ptr,
    y_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    out_ptr,
    x_ptr,
    partial_ptr,
    tokens,
    width,
    span,
    weights,
    stride_st,
    stride_sn,
    stride_sm,
    stride_yt,
    stride_ym,
    stride_rt,
    stride_rn,
    stride_pt,
    stride_pn,
    stride_ct,
    stride_ci,
    stride_co,
    stride_fw,
    stride_fx,
    READ: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    live = token < tokens
    start = tl.program_id(1) * span
    sums = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for step in range(0, span, BLOCK_M):
        # 1. the old streams and the output of the sub-layer
        column = start + step + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = live[:, None] & (column[None, :] < width)
        y = tl.load(y_ptr + token[:, None] * stride_yt + column[None, :] * stride_ym, mask=mask, other=0.0)
        y = y.to(tl.float32)
        at = stream_ptr + token[:, None] * stride_st + column[None, :] * stride_sm
        r0 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        r1 = tl.load(at + stride_sn, mask=mask, other=0.0).to(tl.float32)
        r2 = tl.load(at + 2 * stride_sn, mask=mask, other=0.0).to(tl.float32)
        r3 = tl.load(at + 3 * stride_sn, mask=mask, other=0.0).to(tl.float32)
        read = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        for o in range(4):
            # 2. a new stream, rounded; everything after reads the rounded value
            post = _coefficient(post_ptr, token, live, stride_pt, o * stride_pn)
            c0 = _coefficient(comb_ptr, token, live, stride_ct, o * stride_co)
            c1 = _coefficient(comb_ptr, token, live, stride_ct, o * stride_co + stride_ci)
            c2 = _coefficient(comb_ptr, token, live, stride_ct, o * stride_co + 2 * stride_ci)
            c3 = _coefficient(comb_ptr, token, live, stride_ct, o * stride_co + 3 * stride_ci)
            tile = _updated(y, r0, r1, r2, r3, post, c0, c1, c2, c3)
            tl.store(out_ptr + (token[:, None] * 4 + o) * width + column[None, :], tile, mask=mask)
            # 3. its share of what the next sub-layer reads, and of the projection
            wide = tile.to(tl.float32)
            if READ:
                read = tl.fma(_coefficient(pre_ptr, token, live, stride_rt, o * stride_rn), wide, read)
            squares += wide * wide
            sums = _add_product(sums, tile, fn_ptr, o * width, column, width, weights, stride_fw, stride_fx, BLOCK_W)
        if READ:
            tl.store(x_ptr + token[:, None] * width + column[None, :], read.to(tl.bfloat16), mask=mask)
    _store_partials(partial_ptr, sums, squares, token, tokens, weights, BLOCK_M, BLOCK_W)


@triton.jit
def _sum_splits(partial_ptr, total_ptr, count, splits, BLOCK: tl.constexpr):
    """The partial sums of every row and token, added in ascending order of their split."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = at < count
    total = tl.zeros([BLOCK], tl.float32)
    offset = at
    for _ in range(splits):
        total += tl.load(partial_ptr + offset, mask=mask, other=0.0)
        offset += count
    tl.store(total_ptr + at, total, mask=mask)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(x * -1.0))


@triton.jit
def _softmax_row(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    total = (a + b) + (c + d)
    return a / total + eps, b / total + eps, c / total + eps, d / total + eps


@triton.jit
def _sinkhorn(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, comb_ptr, token, live, iters, eps):
    """Store the normalised matrices of a block of tokens, given their sixteen logits, row by row."""
    # 1. softmax, the first row step
    a0, a1, a2, a3 = _softmax_row(a0, a1, a2, a3, eps)
    b0, b1, b2, b3 = _softmax_row(b0, b1, b2, b3, eps)
    c0, c1, c2, c3 = _softmax_row(c0, c1, c2, c3, eps)
    d0, d1, d2, d3 = _softmax_row(d0, d1, d2, d3, eps)
    # 2. columns, then rows and columns in turn
    total = ((a0 + b0) + (c0 + d0)) + eps
    a0, b0, c0, d0 = a0 / total, b0 / total, c0 / total, d0 / total
    total = ((a1 + b1) + (c1 + d1)) + eps
    a1, b1, c1, d1 = a1 / total, b1 / total, c1 / total, d1 / total
    total = ((a2 + b2) + (c2 + d2)) + eps
    a2, b2, c2, d2 = a2 / total, b2 / total, c2 / total, d2 / total
    total = ((a3 + b3) + (c3 + d3)) + eps
    a3, b3, c3, d3 = a3 / total, b3 / total, c3 / total, d3 / total
    for _ in range(1, iters):
        total = ((a0 + a1) + (a2 + a3)) + eps
        a0, a1, a2, a3 = a0 / total, a1 / total, a2 / total, a3 / total
        total = ((b0 + b1) + (b2 + b3)) + eps
        b0, b1, b2, b3 = b0 / total, b1 / total, b2 / total, b3 / total
        total = ((c0 + c1) + (c2 + c3)) + eps
        c0, c1, c2, c3 = c0 / total, c1 / total, c2 / total, c3 / total
        total = ((d0 + d1) + (d2 + d3)) + eps
        d0, d1, d2, d3 = d0 / total, d1 / total, d2 / total, d3 / total
        total = ((a0 + b0) + (c0 + d0)) + eps
        a0, b0, c0, d0 = a0 / total, b0 / total, c0 / total, d0 / total
        total = ((a1 + b1) + (c1 + d1)) + eps
        a1, b1, c1, d1 = a1 / total, b1 / total, c1 / total, d1 / total
        total = ((a2 + b2) + (c2 + d2)) + eps
        a2, b2, c2, d2 = a2 / total, b2 / total, c2 / total, d2 / total
        total = ((a3 + b3) + (c3 + d3)) + eps
        a3, b3, c3, d3 = a3 / total, b3 / total, c3 / total, d3 / total
    # 3. sixteen numbers a token, one after the other
    at = comb_ptr + token * 16
    _store_row(at, a0, a1, a2, a3, live)
    _store_row(at + 4, b0, b1, b2, b3, live)
    _store_row(at + 8, c0, c1, c2, c3, live)
    _store_row(at + 12, d0, d1, d2, d3, live)


@triton.jit
def _store_row(at, a, b, c, d, live):
    tl.store(at, a, mask=live)
    tl.store(at + 1, b, mask=live)
    tl.store(at + 2, c, mask=live)
    tl.store(at + 3, d, mask=live)


@triton.jit
def _logits(ptr, token, live, stride_t, stride_o):
    a = tl.load(ptr + token * stride_t, mask=live, other=0.0)
    b = tl.load(ptr + token * stride_t + stride_o, mask=live, other=0.0)
    c = tl.load(ptr + token * stride_t + 2 * stride_o, mask=live, other=0.0)
    d = tl.load(ptr + token * stride_t + 3 * stride_o, mask=live, other=0.0)
    return a, b, c, d


@triton.jit
def _normalise_matrices(
    logits_ptr, comb_ptr, tokens, iters, eps, stride_lt, stride_li, stride_lo, BLOCK_T: tl.constexpr
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    live = token < tokens
    a0, a1, a2, a3 = _logits(logits_ptr, token, live, stride_lt, stride_lo)
    b0, b1, b2, b3 = _logits(logits_ptr + stride_li, token, live, stride_lt, stride_lo)
    c0, c1, c2, c3 = _logits(logits_ptr + 2 * stride_li, token, live, stride_lt, stride_lo)
    d0, d1, d2, d3 = _logits(logits_ptr + 3 * stride_li, token, live, stride_lt, stride_lo)
    _sinkhorn(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, comb_ptr, token, live, iters, eps)


@triton.jit
def _mixed(total_ptr, token, live, tokens, rstd, first, scale, base_ptr):
    """Four neighbouring coefficients before their gate."""
    at = total_ptr + first * tokens + token
    a = tl.load(at, mask=live, other=0.0) * rstd * scale + tl.load(base_ptr + first)
    b = tl.load(at + tokens, mask=live, other=0.0) * rstd * scale + tl.load(base_ptr + first + 1)
    c = tl.load(at + 2 * tokens, mask=live, other=0.0) * rstd * scale + tl.load(base_ptr + first + 2)
    d = tl.load(at + 3 * tokens, mask=live, other=0.0) * rstd * scale + tl.load(base_ptr + first + 3)
    return a, b, c, d


@triton.jit
def _finish(
    total_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    tokens,
    count,
    iters,
    eps,
    norm_eps,
    post_scale,
    HEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # 1. the norm; its square sum stands behind the products
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    live = token < tokens
    row = 4 if HEAD else 24
    squares = tl.load(total_ptr + row * tokens + token, mask=live, other=0.0)
    squares = tl.where(squares < SATURATED, squares, float("inf"))
    rstd = 1.0 / tl.sqrt_rn(squares / count + norm_eps)
    # 2. how to read
    scale = tl.load(scale_ptr)
    a, b, c, d = _mixed(total_ptr, token, live, tokens, rstd, 0, scale, base_ptr)
    _store_row(pre_ptr + token * 4, _sigmoid(a) + eps, _sigmoid(b) + eps, _sigmoid(c) + eps, _sigmoid(d) + eps, live)
    if not HEAD:
        # 3. how to write
        scale = tl.load(scale_ptr + 1)
        a, b, c, d = _mixed(total_ptr, token, live, tokens, rstd, 4, scale, base_ptr)
        a, b, c, d = (
            _sigmoid(a) * post_scale,
            _sigmoid(b) * post_scale,
            _sigmoid(c) * post_scale,
            _sigmoid(d) * post_scale,
        )
        _store_row(post_ptr + token * 4, a, b, c, d, live)
        # 4. how to mix
        scale = tl.load(scale_ptr + 2)
        a0, a1, a2, a3 = _mixed(total_ptr, token, live, tokens, rstd, 8, scale, base_ptr)
        b0, b1, b2, b3 = _mixed(total_ptr, token, live, tokens, rstd, 12, scale, base_ptr)
        c0, c1, c2, c3 = _mixed(total_ptr, token, live, tokens, rstd, 16, scale, base_ptr)
        d0, d1, d2, d3 = _mixed(total_ptr, token, live, tokens, rstd, 20, scale, base_ptr)
        _sinkhorn(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, comb_ptr, token, live, iters, eps)


def mhc_expand(
    x_tm: torch.Tensor, *, streams: int, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the rows, and coefficients that read the first copy.

    Raises:
        ValueError, TypeError: an `out` buffer does not fit.
        RuntimeError: x_tm is on the CPU and kernels are not interpreted.
    """
    t, m = x_tm.shape
    stream_out, pre_out = out or (None, None)
    stream_tnm = output_buffer(stream_out, (t, streams, m), x_tm.dtype, x_tm)
    pre_tn = output_buffer(pre_out, (t, streams), torch.float32, x_tm)
    if not x_tm.numel():
        return stream_tnm, pre_tn
    require_runnable("x_tm", x_tm)
    _expand[(t, triton.cdiv(m, COLUMNS))](
        x_tm,
        stream_tnm,
        pre_tn,
        m,
        *x_tm.stride(),
        STREAMS=streams,
        BLOCK_N=triton.next_power_of_2(streams),
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return stream_tnm, pre_tn


def mhc_read(pre_tn: torch.Tensor | None, stream_tnm: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The streams of each token, weighted, or their mean without weights.

    Raises:
        ValueError, TypeError: `out` does not fit.
        RuntimeError: stream_tnm is on the CPU and kernels are not interpreted.
    """
    t, _, m = stream_tnm.shape
    x_tm = output_buffer(out, (t, m), torch.bfloat16, stream_tnm)
    if not x_tm.numel():
        return x_tm
    require_runnable("stream_tnm", stream_tnm)
    weights = stream_tnm if pre_tn is None else pre_tn
    _apply[(t, triton.cdiv(m, COLUMNS))](
        weights,
        stream_tnm,
        x_tm,
        m,
        weights.stride(0),
        weights.stride(1),
        *stream_tnm.stride(),
        MEAN=pre_tn is None,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return x_tm


def mhc_post(
    stream_tnm: torch.Tensor,
    y_tm: torch.Tensor,
    post_tn: torch.Tensor,
    comb_tnn: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The new streams.

    Raises:
        ValueError, TypeError: `out` does not fit.
        RuntimeError: stream_tnm is on the CPU and kernels are not interpreted.
    """
    t, n, m = stream_tnm.shape
    new_tnm = output_buffer(out, (t, n, m), torch.bfloat16, stream_tnm)
    if not new_tnm.numel():
        return new_tnm
    require_runnable("stream_tnm", stream_tnm)
    _post[(t, triton.cdiv(m, COLUMNS))](
        stream_tnm,
        y_tm,
        post_tn,
        comb_tnn,
        new_tnm,
        m,
        *stream_tnm.stride(),
        *y_tm.stride(),
        *post_tn.stride(),
        *comb_tnn.stride(),
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return new_tnm


def mhc_sinkhorn(logits_tnn: torch.Tensor, *, iters: int, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Normalised matrices.

    Raises:
        ValueError, TypeError: `out` does not fit.
        RuntimeError: logits_tnn is on the CPU and kernels are not interpreted.
    """
    comb_tnn = output_buffer(out, tuple(logits_tnn.shape), torch.float32, logits_tnn)
    t = logits_tnn.shape[0]
    if not t:
        return comb_tnn
    require_runnable("logits_tnn", logits_tnn)
    _normalise_matrices[(triton.cdiv(t, TOKENS),)](
        logits_tnn, comb_tnn, t, iters, eps, *logits_tnn.stride(), BLOCK_T=TOKENS, num_warps=1
    )
    return comb_tnn


def mhc_mixes(
    stream_tnm: torch.Tensor,
    fn_wx: torch.Tensor,
    scale_z: torch.Tensor,
    base_w: torch.Tensor,
    gates: Gates,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The coefficients of a site.

    Raises:
        ValueError, TypeError: an `out` buffer does not fit.
        RuntimeError: stream_tnm is on the CPU and kernels are not interpreted.
    """
    t, _, m = stream_tnm.shape
    results = _coefficient_buffers(out, stream_tnm)
    if not stream_tnm.numel():
        return results
    require_runnable("stream_tnm", stream_tnm)
    partial = _partials(stream_tnm, fn_wx, mhc_launch(m))
    _gate(partial, scale_z, base_w, results, m, gates)
    return results


def mhc_partials(stream_tnm: torch.Tensor, fn_wx: torch.Tensor) -> torch.Tensor:
    """What the coefficients are made of: products and square sum of every split, [split, weight, token].

    The square sum stands behind the products; added in the order of the splits they are those of `mhc_mixes`.

    Raises:
        RuntimeError: stream_tnm is on the CPU and kernels are not interpreted.
    """
    require_runnable("stream_tnm", stream_tnm)
    return _partials(stream_tnm, fn_wx, mhc_launch(stream_tnm.shape[2]))


def mhc_gates(
    partial_pwt: torch.Tensor, scale_z: torch.Tensor, base_w: torch.Tensor, width: int, gates: Gates
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The coefficients of a site from a product made elsewhere: sums of every split, the square sum behind the weights.

    Raises:
        RuntimeError: partial_pwt is on the CPU and kernels are not interpreted.
    """
    tokens = partial_pwt.shape[2]
    require_runnable("partial_pwt", partial_pwt)
    results = partial_pwt.new_empty(tokens, 4), partial_pwt.new_empty(tokens, 4), partial_pwt.new_empty(tokens, 4, 4)
    _gate(partial_pwt, scale_z, base_w, results, width, gates)
    return results


def mhc_head_weights(
    stream_tnm: torch.Tensor, fn_nx: torch.Tensor, scale_z: torch.Tensor, base_n: torch.Tensor, gates: Gates
) -> torch.Tensor:
    """How a head reads the streams.

    Raises:
        RuntimeError: stream_tnm is on the CPU and kernels are not interpreted.
    """
    t, n, m = stream_tnm.shape
    pre_tn = torch.empty((t, n), dtype=torch.float32, device=stream_tnm.device)
    if not stream_tnm.numel():
        return pre_tn
    require_runnable("stream_tnm", stream_tnm)
    partial = _partials(stream_tnm, fn_nx, mhc_launch(m))
    _gate(partial, scale_z, base_n, (pre_tn, pre_tn, pre_tn), m, gates)
    return pre_tn


def mhc_boundary(
    stream_tnm: torch.Tensor,
    y_tm: torch.Tensor,
    pre_tn: torch.Tensor | None,
    post_tn: torch.Tensor,
    comb_tnn: torch.Tensor,
    fn_wx: torch.Tensor,
    scale_z: torch.Tensor,
    base_w: torch.Tensor,
    gates: Gates,
    out: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Update, projection and, where `pre_tn` is given, the read of the next sub-layer in one pass; else a pass more.

    Raises:
        ValueError, TypeError: an `out` buffer does not fit.
        RuntimeError: stream_tnm is on the CPU and kernels are not interpreted.
    """
    t, n, m = stream_tnm.shape
    stream_out, x_out = out[:2] if out else (None, None)
    new_tnm = output_buffer(stream_out, (t, n, m), torch.bfloat16, stream_tnm)
    x_tm = output_buffer(x_out, (t, m), torch.bfloat16, stream_tnm)
    results = _coefficient_buffers(out[2:] if out else None, stream_tnm)
    if not stream_tnm.numel():
        return (new_tnm, x_tm, *results)
    require_runnable("stream_tnm", stream_tnm)
    launch = mhc_launch(m)
    weights = fn_wx.shape[0]
    partial = torch.empty((launch.splits, weights + 1, t), dtype=torch.float32, device=stream_tnm.device)
    read_tn = post_tn if pre_tn is None else pre_tn
    _update_and_project[(triton.cdiv(t, launch.tokens), launch.splits)](
        stream_tnm,
        y_tm,
        read_tn,
        post_tn,
        comb_tnn,
        fn_wx,
        new_tnm,
        x_tm,
        partial,
        t,
        m,
        launch.span,
        weights,
        *stream_tnm.stride(),
        *y_tm.stride(),
        *read_tn.stride(),
        *post_tn.stride(),
        *comb_tnn.stride(),
        *fn_wx.stride(),
        READ=pre_tn is not None,
        BLOCK_T=launch.tokens,
        BLOCK_M=launch.channels,
        BLOCK_W=_weight_tile(weights),
        num_warps=2 * launch.num_warps,  # five wide tiles are alive beside those of the projection
    )
    _gate(partial, scale_z, base_w, results, m, gates)
    if pre_tn is None:
        mhc_read(results[0], new_tnm, out=x_tm)
    return (new_tnm, x_tm, *results)


def _coefficient_buffers(
    out: tuple[torch.Tensor, ...] | None, stream_tnm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    t, n, _ = stream_tnm.shape
    pre_out, post_out, comb_out = out or (None, None, None)
    return (
        output_buffer(pre_out, (t, n), torch.float32, stream_tnm),
        output_buffer(post_out, (t, n), torch.float32, stream_tnm),
        output_buffer(comb_out, (t, n, n), torch.float32, stream_tnm),
    )


def _weight_tile(weights: int) -> int:
    return max(16, triton.next_power_of_2(weights + 1))


def _partials(stream_tnm: torch.Tensor, fn_wx: torch.Tensor, launch: MhcLaunch) -> torch.Tensor:
    """Products and square sum of every split: [split, weight, token], the square sum last."""
    t, _, m = stream_tnm.shape
    weights = fn_wx.shape[0]
    partial = torch.empty((launch.splits, weights + 1, t), dtype=torch.float32, device=stream_tnm.device)
    _project[(triton.cdiv(t, launch.tokens), launch.splits)](
        stream_tnm,
        fn_wx,
        partial,
        t,
        m,
        launch.span,
        weights,
        *stream_tnm.stride(),
        *fn_wx.stride(),
        BLOCK_T=launch.tokens,
        BLOCK_M=launch.channels,
        BLOCK_W=_weight_tile(weights),
        num_warps=launch.num_warps,
    )
    return partial


def _gate(
    partial: torch.Tensor,
    scale_z: torch.Tensor,
    base_w: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    width: int,
    gates: Gates,
) -> None:
    splits, rows, t = partial.shape
    total = partial[0]
    if splits > 1:
        total = torch.empty_like(total)
        grid = (triton.cdiv(total.numel(), COLUMNS),)
        _sum_splits[grid](partial, total, total.numel(), splits, BLOCK=COLUMNS, num_warps=4)
    _finish[(triton.cdiv(t, TOKENS),)](
        total,
        scale_z,
        base_w,
        *results,
        t,
        float(4 * width),
        gates.iters,
        gates.eps,
        gates.norm_eps,
        gates.post_scale,
        HEAD=rows == 5,
        BLOCK_T=TOKENS,
        num_warps=1,
    )
