"""The stages that all attention layers of V4 share: projections, the window, attention over values or records, output.

`csa.py` and `hca.py` say how they follow. A layer takes its normalised input x and returns what the streams gain. It
rotates everything, queries, window keys, entries and the output, by the angles of one table: base 160000 with YaRN
where there is a compressor, base 10000 without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_chunk, expect_shape
from .compressor import compress, compress_decode, compress_prefill, compress_project, compress_rows, compress_tail
from .config import (
    FP8_1X128_UE8M0,
    FP8_128X128_UE8M0,
    HeadNorm,
    OutputCast,
    PageLayout,
    Pairing,
    RopeSpan,
    TwoCaches,
    V4AttnConfig,
    WeightCast,
)
from .csa2_state import Csa2Step
from .kv_cache import load_records, pack_records, store_records, unpack_records
from .linear import linear, linear_quant
from .numerics import CONTRACT, Numerics
from .quant import dequantize, fake_quantize
from .rms_norm import rms_norm
from .rope import rope
from .sparse_attn import sparse_attn, two_cache_attn, two_cache_attn_decode
from .topk import physical_slots
from .v4_weights import CompressorWeights, V4Weights
from .window import history_slots, ring_slots, window_decode, window_prefill

SECTIONED = PageLayout.SECTIONED  # of every cache of V4


def v4_project(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads, the window key before its quantiser, and the query latent that the indexer shares.

    Math:
        latent = RMSNorm(x wq_a); q = head norm(latent wq_b), each head by itself, last r channels rotated
        key = RMSNorm(x wkv), last r channels rotated: key and value of all heads

    Shapes:
        x_tm: [t, m]; table_sr: fp32 [s, r]; positions_t: [t]; returns q_thd, key_td, latent_ta.

    Rounding:
        bf16 after each product, norm and rotation; the head norm as `HeadNorm` says; inputs of products with quantised
        weights to e4m3 in groups of 128.

    Raises:
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md section 5.1
    """
    expect_shape("x_tm", x_tm, "tm", {"t": len(positions_t), "m": config.hidden})
    latent_ta = _norm(product(x_tm, weights.wq_a, weights.wq_a_sf, num=num), weights.q_norm_a, config, num)
    q_tk = product(latent_ta, weights.wq_b, weights.wq_b_sf, num=num)
    q_thd = head_norm(
        q_tk.unflatten(1, (config.num_heads, config.head_dim)), cast=config.head_norm, eps=config.eps, num=num
    )
    key_td = _norm(product(x_tm, weights.wkv, weights.wkv_sf, num=num), weights.kv_norm_d, config, num)
    key_td = rotated(key_td[:, None], table_sr, positions_t, num=num)[:, 0]
    return rotated(q_thd, table_sr, positions_t, num=num), key_td, latent_ta


def head_norm(q_thd: Tensor, *, cast: HeadNorm, eps: float, num: Numerics = CONTRACT) -> Tensor:
    """Every head scaled to unit root-mean-square, without a weight.

    Math:
        y[t, h, d] = q[t, h, d] / sqrt(mean_d(q[t, h, :]^2) + eps)

    Shapes:
        q_thd: [t, h, d]; returns [t, h, d].

    Rounding:
        RELEASE: square, mean, mean plus eps, reciprocal root and product each to bf16. FACTOR: the factor to bf16, then
        the product. FUSED: the product.

    Edges:
        an all-zero head gives zeros; where eps does not count, scaling a head changes nothing.

    Raises:
        ValueError: q_thd is not 3-D.

    Source:
        v3-v32-v4.md section 5.1
    """
    expect_shape("q_thd", q_thd, "thd", {})
    q_thd, width = num.wide(q_thd), q_thd.shape[2]
    if cast is HeadNorm.RELEASE:
        mean_th1 = num.bf16(num.sum(num.bf16(q_thd * q_thd), dim=-1, keepdim=True) / width)
        return num.bf16(q_thd * num.bf16(torch.rsqrt(num.bf16(mean_th1 + eps))))
    factor_th1 = torch.rsqrt(num.sum(q_thd * q_thd, dim=-1, keepdim=True) / width + eps)
    return num.bf16(q_thd * (num.bf16(factor_th1) if cast is HeadNorm.FACTOR else factor_th1))


def v4_output(
    out_thd: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Rotate back at the query's position, then the grouped low-rank output.

    Math:
        u = out with its last r channels turned by the opposite angle; z_g = wo_a[g] u[heads of group g]
        y = wo_b (z_1 … z_G); group g holds heads g h / G … (g + 1) h / G - 1

    Shapes:
        out_thd: [t, h, d]; returns y_tm.

    Rounding:
        u, z and y to bf16; FUSED: u stays fp32 and goes to e4m3 in groups of 128.

    Raises:
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md sections 5.6, 5.7
    """
    expect_shape("out_thd", out_thd, "thd", {"h": config.num_heads, "d": config.head_dim, "t": len(positions_t)})
    fused = config.output is OutputCast.FUSED
    u_thd = rotated(
        out_thd, table_sr, positions_t, num=num, inverse=True, dtype=torch.float32 if fused else torch.bfloat16
    )
    u_tk = u_thd.flatten(1)
    if fused:
        u_tk = fake_quantize(u_tk, fmt=FP8_1X128_UE8M0, num=num)
    w_nk = num.wide(weights.wo_a)
    if weights.wo_a_sf is not None:
        w_nk = dequantize(weights.wo_a, weights.wo_a_sf, fmt=FP8_128X128_UE8M0, num=num)  # exact in bf16
    u_tgk, w_gnk = u_tk.unflatten(1, (config.o_groups, -1)), w_nk.unflatten(0, (config.o_groups, -1))
    z_tf = num.bf16(num.einsum("tgk,gnk->tgn", u_tgk, w_gnk)).flatten(1)
    return product(z_tf, weights.wo_b, weights.wo_b_sf, num=num)


# without caches


def packed_positions(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Position and sequence of every token of whole sequences; raise if `cu_seqlens` does not split `tokens`."""
    expect_shape("cu_seqlens", cu_seqlens, "n", {})
    expect_chunk(torch.zeros_like(cu_seqlens[1:]), cu_seqlens, tokens)
    seq_t = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device).repeat_interleave(cu_seqlens.long().diff())
    return torch.arange(tokens, device=cu_seqlens.device) - cu_seqlens.long()[seq_t], seq_t


def whole_entries(
    x_tm: Tensor,
    weights: CompressorWeights,
    table_sr: Tensor,
    cu_seqlens: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The rotated entries of whole sequences, before a quantiser, in the rows that `compress_rows` says."""
    value_tw, gate_tw = compress_project(x_tm, weights.value_wm, weights.gate_wm, num=num)
    start_b, pooling = torch.zeros_like(cu_seqlens[1:]), config.compressor
    pooled_yd, entry_y = compress(value_tw, gate_tw, weights.bias_rw, start_b, cu_seqlens, config=pooling, num=num)
    return _tail(pooled_yd, entry_y, weights, table_sr, config, num)


def visible_rows(positions_t: Tensor, seq_t: Tensor, cu_seqlens: Tensor, *, ratio: int) -> Tensor:
    """The row of `whole_entries` that entry j of a token's sequence is, int64 [t, j]; -1 where it is not visible.

    Entry j is visible to a query at position p iff its last token is there: (j + 1) * ratio <= p + 1.
    """
    entry_y, seq_y = compress_rows(torch.zeros_like(cu_seqlens[1:]), cu_seqlens, ratio=ratio)
    first_b = torch.searchsorted(seq_y.long(), torch.arange(len(cu_seqlens) - 1, device=seq_y.device))
    most = int(entry_y.max()) + 1 if len(entry_y) else 0
    entry_j = torch.arange(most, device=positions_t.device)
    is_visible_tj = (entry_j + 1) * ratio <= positions_t[:, None] + 1
    return torch.where(is_visible_tj, first_b[seq_t][:, None] + entry_j, -1)


def attend_values(
    q_thd: Tensor,
    key_td: Tensor,
    entry_yd: Tensor,
    rows_tk: Tensor,
    positions_t: Tensor,
    sink_h: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Attention over the window and the listed entries, all of them values as a cache would hold them.

    Math:
        one softmax over keys p - W + 1 … p of the token's sequence and the entries rows_tk, no list removing what the
        other covers too; scale d^-0.5, the sink in the denominator alone; key = value

    Shapes:
        key_td, entry_yd: before the quantiser; rows_tk: rows of entry_yd, -1 for none; returns out_thd.
    """
    held_sd = torch.cat([as_cached(key_td, config, num), as_cached(entry_yd, config, num)])
    back_w = torch.arange(config.window - 1, -1, -1, device=positions_t.device)
    own_t = torch.arange(len(q_thd), device=positions_t.device)
    window_tw = torch.where(back_w <= positions_t[:, None], own_t[:, None] - back_w, -1)
    idx_tk = torch.cat([window_tw, torch.where(rows_tk >= 0, rows_tk + len(key_td), -1)], 1).to(torch.int32)
    dtype = torch.float32 if config.output is OutputCast.FUSED else torch.bfloat16
    scale, d = config.head_dim**-0.5, config.head_dim
    # weights are rounded to bf16 whatever the output is stored in, as those over records are
    out_thd, _ = sparse_attn(q_thd, held_sd, idx_tk, sink_h, None, scale=scale, value_dim=d, dtype=dtype, num=num)
    return out_thd


def as_cached(x_yd: Tensor, config: V4AttnConfig, num: Numerics) -> Tensor:
    """What a cache would give back: all but the rotary channels through the quantiser."""
    if config.cache is None:
        return x_yd
    c = config.cache.channels
    return torch.cat([fake_quantize(x_yd[:, :c], fmt=config.cache.quant, num=num), x_yd[:, c:]], 1)


# with caches


def step_entries_(
    x_tm: Tensor,
    weights: CompressorWeights,
    pool_: Tensor,
    table_sr: Tensor,
    step: Csa2Step,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """The rotated entries that a step completes, and their slots, -1 for rows without one; advances the pool, in place."""
    value_tw, gate_tw = compress_project(x_tm, weights.value_wm, weights.gate_wm, num=num)
    pooling, bias_rw, cu = config.compressor, weights.bias_rw, step.cu_seqlens
    if step.decode:
        slot_t, seq_y = step.state_b[step.seq_t.long()], step.seq_t
        pooled_yd, entry_y = compress_decode(
            value_tw, gate_tw, bias_rw, pool_, slot_t, step.positions_t, config=pooling, num=num
        )
    else:
        seq_y = compress_rows(step.first_b, cu, ratio=config.ratio)[1]
        pooled_yd, entry_y = compress_prefill(
            value_tw, gate_tw, bias_rw, pool_, step.state_b, step.first_b, cu, config=pooling, num=num
        )
    slot_y1 = physical_slots(entry_y[:, None], step.table_bp[seq_y.long()], page_entries=config.page_entries)
    return _tail(pooled_yd, entry_y, weights, table_sr, config, num), slot_y1[:, 0]


def attend_records_(
    q_thd: Tensor,
    key_td: Tensor,
    ring_pow_: Tensor,
    main_pow: Tensor | None,
    slot_tk: Tensor,
    sink_h: Tensor,
    step: Csa2Step,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Store the window keys of a step in their rings, in place, and attend to window and entries by their records.

    A prefill step reads the history of the rings before it overwrites them, then its own rows; a decode step stores
    first and reads the rings. Both see the same values.

    Shapes:
        main_pow: None reads no entry; slot_tk: int32 [t, any] slots of main_pow; returns out_thd.
    """
    window, fmt = config.sliding, config.cache
    assert fmt is not None
    store_t = ring_slots(step.positions_t, step.seq_t, step.end_b, step.known_b, step.state_b, config=window)
    caches = TwoCaches(window=fmt, main=fmt, layout=SECTIONED, scale=config.head_dim**-0.5)
    main_pow = ring_pow_[:0] if main_pow is None else main_pow
    dtype = torch.float32 if config.output is OutputCast.FUSED else torch.bfloat16
    if step.decode:
        store_records(ring_pow_, key_td, store_t, layout=SECTIONED, fmt=fmt, num=num)
        seen_tk = window_decode(step.positions_t, step.seq_t, step.state_b, step.valid_b, config=window)
        return two_cache_attn_decode(
            q_thd, ring_pow_, seen_tk, main_pow, slot_tk, sink_h, caches=caches, dtype=dtype, num=num
        )[0]
    past_b = history_slots(step.first_b, step.state_b, step.valid_b, config=window)
    past_sd = load_records(ring_pow_, past_b.flatten(), layout=SECTIONED, num=num)
    store_records(ring_pow_, key_td, store_t, layout=SECTIONED, fmt=fmt, num=num)
    rows_td = unpack_records(pack_records(key_td, fmt=fmt, num=num), fmt=fmt, num=num)  # decode will read these values
    seen_tk = window_prefill(
        step.positions_t, step.seq_t, step.first_b, step.offset_b, step.known_b, step.valid_b, config=window
    )
    window_sd = torch.cat([past_sd, rows_td])
    return two_cache_attn(q_thd, window_sd, seen_tk, main_pow, slot_tk, sink_h, caches=caches, dtype=dtype, num=num)[0]


def entry_slots(step: Csa2Step, *, config: V4AttnConfig) -> Tensor:
    """The slot of every entry j that a token of a step sees, int32 [t, j], -1 where it is not visible."""
    visible_t = (step.positions_t.long() + 1) // config.ratio
    entry_j = torch.arange(int(visible_t.max()) if len(visible_t) else 0, device=visible_t.device)
    entry_tj = torch.where(entry_j < visible_t[:, None], entry_j, -1).to(torch.int32)
    return physical_slots(entry_tj, step.table_bp[step.seq_t.long()], page_entries=config.page_entries)


# pieces


def product(x_tm: Tensor, w_fm: Tensor, w_sf: Tensor | None, *, num: Numerics = CONTRACT) -> Tensor:
    """Rows times a matrix in bf16; with scales the matrix is e4m3, and so are the rows, in groups of 128."""
    if w_sf is None:
        return linear(x_tm, w_fm, num=num)
    return linear_quant(x_tm, w_fm, w_sf, x_fmt=FP8_1X128_UE8M0, w_fmt=FP8_128X128_UE8M0, num=num)


def rotated(
    x_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    inverse: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The last channels of every head turned by the angles of its position."""
    pairing, span = Pairing.INTERLEAVED, RopeSpan.LAST
    return rope(x_thd, table_sr, positions_t, pairing=pairing, span=span, inverse=inverse, dtype=dtype, num=num)


def _norm(x_tm: Tensor, weight_m: Tensor, config: V4AttnConfig, num: Numerics) -> Tensor:
    return rms_norm(x_tm, weight_m, eps=config.eps, cast=WeightCast.AFTER_WEIGHT, num=num)


def _tail(
    pooled_yd: Tensor,
    entry_y: Tensor,
    weights: CompressorWeights,
    table_sr: Tensor,
    config: V4AttnConfig,
    num: Numerics,
) -> Tensor:
    return compress_tail(pooled_yd, weights.norm_c, table_sr, entry_y, ratio=config.ratio, eps=config.eps, num=num)[1]
