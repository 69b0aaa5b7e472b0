"""Hyper-connections: copies and reads of the streams, their update, the projection to coefficients, Sinkhorn.

The projection runs over [tokens x channels] tiles of one stream after the other. fp32 weights are cut into three bf16
parts, so that every product of a tensor core is exact; a tile's sums start at zero and are then added in fp32, which
keeps the truncation of long accumulations out. How the channels are split depends on the width alone, the partial sums
are added in ascending order, and squares in pairs, whatever the layout. Coefficients of a token live in separate
registers of one thread: there is no reduction whose order a layout could change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class MhcLaunch:
    """Tiles of the projection: each of `splits` takes `blocks` of 64 channels, which fixes the order of summation.

    How many tokens a program takes changes no result. `options` are those of the compiler.
    """

    splits: int
    blocks: int
    tokens: int
    options: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Gates:
    """The numbers of a configuration that the kernels take."""

    iters: int
    eps: float
    norm_eps: float
    post_scale: float


def mhc_launch(tokens: int, width: int, arch: str) -> MhcLaunch:
    """Up to sixteen splits of the channels of a stream, whatever the number of tokens."""
    blocks = triton.cdiv(width, CHANNELS)
    each = triton.cdiv(blocks, 16)
    splits = triton.cdiv(blocks, each)
    if tokens <= 64 or arch == "ascend950":  # a larger tile does not fit its unified buffer
        return MhcLaunch(splits=splits, blocks=each, tokens=64, options={"num_warps": 4})
    if arch == "sm100":
        return MhcLaunch(splits=splits, blocks=each, tokens=128, options={"num_warps": 8})
    # weights are read once for 256 tokens, and with 128 registers a thread two programs share a core
    return MhcLaunch(splits=splits, blocks=each, tokens=256, options={"num_warps": 8, "maxnreg": 128})


CHANNELS = 64  # of one step of the projection: sixteen sums of four squares a row are left for the end
COLUMNS = 1024  # channels that a program of the elementwise kernels takes; it changes no result
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
def _update(
    stream_ptr,
    y_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    x_ptr,
    width,
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
    READ: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # 1. the old streams and the output of the sub-layer
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    mask = column < width
    y = tl.load(y_ptr + token * stride_yt + column * stride_ym, mask=mask, other=0.0).to(tl.float32)
    r0 = _stream(stream_ptr, token, 0, column, width, stride_st, stride_sn, stride_sm)
    r1 = _stream(stream_ptr, token, 1, column, width, stride_st, stride_sn, stride_sm)
    r2 = _stream(stream_ptr, token, 2, column, width, stride_st, stride_sn, stride_sm)
    r3 = _stream(stream_ptr, token, 3, column, width, stride_st, stride_sn, stride_sm)
    read = tl.zeros([COLUMNS], tl.float32)
    for o in tl.static_range(4):
        # 2. the product with y first, then the streams in order; fused by name, so that bits are the same everywhere
        comb = comb_ptr + token * stride_ct + o * stride_co
        new = tl.load(post_ptr + token * stride_pt + o * stride_pn) * y
        new = tl.fma(tl.load(comb), r0, new)
        new = tl.fma(tl.load(comb + stride_ci), r1, new)
        new = tl.fma(tl.load(comb + 2 * stride_ci), r2, new)
        new = tl.fma(tl.load(comb + 3 * stride_ci), r3, new).to(tl.bfloat16)
        tl.store(out_ptr + (token * 4 + o) * width + column, new, mask=mask)
        if READ:
            # 3. what the next sub-layer reads, of the rounded streams
            pre = tl.load(pre_ptr + token * stride_rt + o * stride_rn)
            read = tl.fma(pre, new.to(tl.float32), read)
    if READ:
        tl.store(x_ptr + token * width + column, read.to(tl.bfloat16), mask=mask)


@triton.jit
def _split_weights(fn_ptr, parts_ptr, count, stride_fw, stride_fx, BLOCK: tl.constexpr):
    """Three bf16 parts of every weight, [part, weight, channel]: the low ones first, the high ones last."""
    w = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = at < count
    weight = tl.load(fn_ptr + w * stride_fw + at * stride_fx, mask=mask, other=0.0)
    # 24 significant bits in three bf16 numbers: both differences are exact
    high = weight.to(tl.bfloat16)
    rest = weight - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    plane = tl.num_programs(1).to(tl.int64) * count
    part_ptrs = parts_ptr + w * count + at
    tl.store(part_ptrs, (rest - middle.to(tl.float32)).to(tl.bfloat16), mask=mask)
    tl.store(part_ptrs + plane, middle, mask=mask)
    tl.store(part_ptrs + 2 * plane, high, mask=mask)


@triton.jit
def _pairs(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Neighbours added: an order that no layout changes."""
    return tl.sum(tl.reshape(x, [ROWS, COLUMNS // 2, 2]), axis=2)


@triton.jit
def _project(
    stream_ptr,
    parts_ptr,
    partial_ptr,
    tokens,
    width,
    blocks,
    stride_st,
    stride_sn,
    stride_sm,
    WEIGHTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    # 1. all splits of some tokens are neighbours, and so are their channels
    split = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    live = token < tokens
    item = tl.arange(0, BLOCK_M)
    w = tl.arange(0, 32)
    stream_ptrs = stream_ptr + token[:, None] * stride_st + item.to(tl.int64)[None, :] * stride_sm
    part_ptrs = parts_ptr + w.to(tl.int64)[None, :] * (4 * width) + item[:, None]
    plane = WEIGHTS * 4 * width
    sums = tl.zeros([BLOCK_T, 32], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_M // 4], tl.float32)
    for step in range(0, 4 * blocks):
        # 2. the four streams of a block of channels, one after the other
        n, column = step % 4, (step // 4 * SPLITS + split).to(tl.int64) * BLOCK_M
        in_width = column + item < width
        at = stream_ptrs + n * stride_sn + column * stride_sm
        tile = tl.load(at, mask=live[:, None] & in_width[None, :], other=0.0)
        wide = tile.to(tl.float32)
        squares += _pairs(_pairs(wide * wide, BLOCK_T, BLOCK_M), BLOCK_T, BLOCK_M // 2)
        # 3. the low, middle and high parts of the weights: sums start at zero in the matrix unit and are added outside
        at = part_ptrs + n * width + column
        mask = in_width[:, None] & (w[None, :] < WEIGHTS)
        product = tl.dot(tile, tl.load(at, mask=mask, other=0.0))
        product = tl.dot(tile, tl.load(at + plane, mask=mask, other=0.0), product)
        product = tl.dot(tile, tl.load(at + 2 * plane, mask=mask, other=0.0), product)
        sums += product
    # 4. rows of one split, tokens side by side: the products, then the square sum
    first = partial_ptr + split.to(tl.int64) * (WEIGHTS + 1) * tokens + token
    tl.store(first[:, None] + w[None, :] * tokens, sums, mask=live[:, None] & (w[None, :] < WEIGHTS))
    squares = _pairs(_pairs(squares, BLOCK_T, BLOCK_M // 4), BLOCK_T, BLOCK_M // 8)
    squares = _pairs(_pairs(squares, BLOCK_T, BLOCK_M // 16), BLOCK_T, BLOCK_M // 32)
    tl.store(first + WEIGHTS * tokens, tl.reshape(squares, [BLOCK_T]), mask=live)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(x * -1.0))


@triton.jit
def _shares(a, b, c, d, eps):
    """Four numbers divided by their sum plus eps: one reciprocal, four products."""
    part = 1.0 / (((a + b) + (c + d)) + eps)
    return a * part, b * part, c * part, d * part


@triton.jit
def _softmax_row(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _shares(tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _sinkhorn(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, comb_ptr, token, live, iters, eps):
    """Store the normalised matrices of a block of tokens, given their sixteen logits, row by row."""
    # 1. softmax, the first row step
    a0, a1, a2, a3 = _softmax_row(a0, a1, a2, a3, eps)
    b0, b1, b2, b3 = _softmax_row(b0, b1, b2, b3, eps)
    c0, c1, c2, c3 = _softmax_row(c0, c1, c2, c3, eps)
    d0, d1, d2, d3 = _softmax_row(d0, d1, d2, d3, eps)
    # 2. columns, then rows and columns in turn
    a0, b0, c0, d0 = _shares(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _shares(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _shares(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _shares(a3, b3, c3, d3, eps)
    for _ in range(1, iters):
        a0, a1, a2, a3 = _shares(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _shares(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _shares(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _shares(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _shares(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _shares(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _shares(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _shares(a3, b3, c3, d3, eps)
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
def _total(at, live, step, SPLITS: tl.constexpr):
    """The partial sums of one row, added in ascending order of their split."""
    total = tl.load(at, mask=live, other=0.0)
    for _ in range(1, SPLITS):
        at += step
        total += tl.load(at, mask=live, other=0.0)
    return total


@triton.jit
def _mixed(at, live, tokens, step, rstd, scale, base_ptr, SPLITS: tl.constexpr):
    """Four neighbouring coefficients before their gate."""
    a = _total(at, live, step, SPLITS) * rstd * scale + tl.load(base_ptr)
    b = _total(at + tokens, live, step, SPLITS) * rstd * scale + tl.load(base_ptr + 1)
    c = _total(at + 2 * tokens, live, step, SPLITS) * rstd * scale + tl.load(base_ptr + 2)
    d = _total(at + 3 * tokens, live, step, SPLITS) * rstd * scale + tl.load(base_ptr + 3)
    return a, b, c, d


@triton.jit
def _finish(
    partial_ptr,
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
    SPLITS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # 1. the norm; its square sum stands behind the products
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    live = token < tokens
    row: tl.constexpr = 4 if HEAD else 24
    at = partial_ptr + token
    step = (row + 1) * tokens
    squares = _total(at + row * tokens, live, step, SPLITS)
    rstd = 1.0 / tl.sqrt_rn(squares / count + norm_eps)
    # 2. how to read
    scale = tl.load(scale_ptr)
    a, b, c, d = _mixed(at, live, tokens, step, rstd, scale, base_ptr, SPLITS)
    _store_row(pre_ptr + token * 4, _sigmoid(a) + eps, _sigmoid(b) + eps, _sigmoid(c) + eps, _sigmoid(d) + eps, live)
    if not HEAD:
        # 3. how to write
        scale = tl.load(scale_ptr + 1)
        a, b, c, d = _mixed(at + 4 * tokens, live, tokens, step, rstd, scale, base_ptr + 4, SPLITS)
        a, b, c, d = (
            _sigmoid(a) * post_scale,
            _sigmoid(b) * post_scale,
            _sigmoid(c) * post_scale,
            _sigmoid(d) * post_scale,
        )
        _store_row(post_ptr + token * 4, a, b, c, d, live)
        # 4. how to mix
        scale = tl.load(scale_ptr + 2)
        a0, a1, a2, a3 = _mixed(at + 8 * tokens, live, tokens, step, rstd, scale, base_ptr + 8, SPLITS)
        b0, b1, b2, b3 = _mixed(at + 12 * tokens, live, tokens, step, rstd, scale, base_ptr + 12, SPLITS)
        c0, c1, c2, c3 = _mixed(at + 16 * tokens, live, tokens, step, rstd, scale, base_ptr + 16, SPLITS)
        d0, d1, d2, d3 = _mixed(at + 20 * tokens, live, tokens, step, rstd, scale, base_ptr + 20, SPLITS)
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
    _updated(stream_tnm, y_tm, None, post_tn, comb_tnn, new_tnm, None)
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
    partial = _partials(stream_tnm, fn_wx)
    _gate(partial, scale_z, base_w, results, m, gates)
    return results


def mhc_partials(stream_tnm: torch.Tensor, fn_wx: torch.Tensor) -> torch.Tensor:
    """What the coefficients are made of: products and square sum of every split, [split, weight, token].

    The square sum stands behind the products; added in the order of the splits they are those of `mhc_mixes`.

    Raises:
        RuntimeError: stream_tnm is on the CPU and kernels are not interpreted.
    """
    require_runnable("stream_tnm", stream_tnm)
    return _partials(stream_tnm, fn_wx)


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
    partial = _partials(stream_tnm, fn_nx)
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
    """Update and, where `pre_tn` is given, the read of the next sub-layer in one pass, else in the last; projection.

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
    _updated(stream_tnm, y_tm, pre_tn, post_tn, comb_tnn, new_tnm, x_tm)
    partial = _partials(new_tnm, fn_wx)
    _gate(partial, scale_z, base_w, results, m, gates)
    if pre_tn is None:
        mhc_read(results[0], new_tnm, out=x_tm)
    return (new_tnm, x_tm, *results)


def _updated(
    stream_tnm: torch.Tensor,
    y_tm: torch.Tensor,
    pre_tn: torch.Tensor | None,
    post_tn: torch.Tensor,
    comb_tnn: torch.Tensor,
    new_tnm: torch.Tensor,
    x_tm: torch.Tensor | None,
) -> None:
    """Write the new streams and, where `pre_tn` is given, what it reads of them."""
    t, _, m = stream_tnm.shape
    read_tn = post_tn if pre_tn is None else pre_tn
    _update[(t, triton.cdiv(m, COLUMNS))](
        stream_tnm,
        y_tm,
        read_tn,
        post_tn,
        comb_tnn,
        new_tnm,
        new_tnm if x_tm is None else x_tm,
        m,
        *stream_tnm.stride(),
        *y_tm.stride(),
        *read_tn.stride(),
        *post_tn.stride(),
        *comb_tnn.stride(),
        READ=pre_tn is not None,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


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


def _partials(stream_tnm: torch.Tensor, fn_wx: torch.Tensor) -> torch.Tensor:
    """Products and square sum of every split: [split, weight, token], the square sum last."""
    (t, _, m), (weights, count) = stream_tnm.shape, fn_wx.shape
    launch = mhc_launch(t, m, arch_of(stream_tnm.device))
    parts = torch.empty((3, weights, count), dtype=torch.bfloat16, device=fn_wx.device)
    grid = (triton.cdiv(count, COLUMNS), weights)
    _split_weights[grid](fn_wx, parts, count, *fn_wx.stride(), BLOCK=COLUMNS, num_warps=4)
    partial = torch.empty((launch.splits, weights + 1, t), dtype=torch.float32, device=stream_tnm.device)
    _project[(launch.splits, triton.cdiv(t, launch.tokens))](
        stream_tnm,
        parts,
        partial,
        t,
        m,
        launch.blocks,
        *stream_tnm.stride(),
        WEIGHTS=weights,
        SPLITS=launch.splits,
        BLOCK_T=launch.tokens,
        BLOCK_M=CHANNELS,
        num_stages=3,
        **launch.options,
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
    _finish[(triton.cdiv(t, TOKENS),)](
        partial,
        scale_z,
        base_w,
        *results,
        t,
        float(4 * width),
        gates.iters,
        gates.eps,
        gates.norm_eps,
        gates.post_scale,
        SPLITS=splits,
        HEAD=rows == 5,
        BLOCK_T=TOKENS,
        num_warps=1,
    )
