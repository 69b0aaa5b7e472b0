"""The stages that all attention layers of V4 share at both ends: query, key and latent, entries, output.

`csa.py` and `hca.py` say how they follow. A layer takes its normalised input x and returns what the streams gain. It
rotates everything, queries, window keys, entries and the output, by the angles of one table: base 160000 with YaRN
where there is a compressor, base 10000 without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_shape
from .compressor import compress_tail
from .config import (
    FP8_1X128_UE8M0,
    FP8_128X128_UE8M0,
    HeadNorm,
    OutputCast,
    Pairing,
    RopeSpan,
    V4AttnConfig,
    WeightCast,
)
from .linear import linear, linear_quant
from .numerics import CONTRACT, Numerics
from .quant import dequantize, fake_quantize
from .rms_norm import rms_norm
from .rope import rope
from .taps import Tap, ignore
from .v4_weights import CompressorWeights, V4Weights


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
    q_thd = q_tk.unflatten(1, (config.num_heads, config.head_dim))
    q_thd = head_norm_rope(q_thd, table_sr, positions_t, cast=config.head_norm, eps=config.eps, num=num)
    key_td = _norm(product(x_tm, weights.wkv, weights.wkv_sf, num=num), weights.kv_norm_d, config, num)
    key_td = rotated(key_td[:, None], table_sr, positions_t, num=num)[:, 0]
    return q_thd, key_td, latent_ta


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


def head_norm_rope(
    q_thd: Tensor, table_sr: Tensor, positions_t: Tensor, *, cast: HeadNorm, eps: float, num: Numerics = CONTRACT
) -> Tensor:
    """Normalised heads with their last channels rotated: `head_norm`, then `rotated`.

    Shapes:
        q_thd: [t, h, d]; table_sr: fp32 [s, r]; positions_t: [t]; returns [t, h, d].

    Rounding:
        as `head_norm`, then to bf16 again.

    Raises:
        ValueError: shapes disagree; a position is no row of the table.
    """
    return rotated(head_norm(q_thd, cast=cast, eps=eps, num=num), table_sr, positions_t, num=num)


def v4_output(
    out_thd: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
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
    tap("turned", u_thd)
    u_tk = u_thd.flatten(1)
    if fused:
        u_tk = fake_quantize(u_tk, fmt=FP8_1X128_UE8M0, num=num)
    w_nk = num.wide(weights.wo_a)
    if weights.wo_a_sf is not None:
        w_nk = dequantize(weights.wo_a, weights.wo_a_sf, fmt=FP8_128X128_UE8M0, num=num)  # exact in bf16
    u_tgk, w_gnk = u_tk.unflatten(1, (config.o_groups, -1)), w_nk.unflatten(0, (config.o_groups, -1))
    z_tf = num.bf16(num.einsum("tgk,gnk->tgn", u_tgk, w_gnk)).flatten(1)
    return product(z_tf, weights.wo_b, weights.wo_b_sf, num=num)


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


def pool_tail(
    pooled_yd: Tensor,
    entry_y: Tensor,
    weights: CompressorWeights,
    table_sr: Tensor,
    *,
    config: V4AttnConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Pooled entries normalised and rotated at the first token of their own group, r times the entry."""
    _, entry_yd = compress_tail(
        pooled_yd, weights.norm_c, table_sr, entry_y, ratio=config.ratio, eps=config.eps, num=num
    )
    return entry_yd
