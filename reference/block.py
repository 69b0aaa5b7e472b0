"""Decoder blocks of every generation, made of the components of this room.

A block is attention and then a feed-forward network, each behind a norm and each added to what passes by. What passes
by differs: one row a token in V3 and V3.2, four streams in V4 and V4.1. The functions take whole sequences from their
first token on and keep nothing between calls.

What a tap hears, in this order; names in brackets where the generation has them:

    [engram.stream]                                     streams behind the n-gram memory (V4.1)
    [attn.pre, attn.post, attn.comb] attn.x attn.norm   coefficients of the site, what is read, normalised
    [attn.scores, attn.picks]                           what the indexer made of keys or entries, and its selection
    [attn.heads, attn.turned]                           what every head read, and that with its rotation undone (V4)
    attn.out stream.attn                                the sub-layer's output, and what passes by with it added
    [ffn.pre ...] ffn.x ffn.norm                        the same of the second sub-layer
    [ffn.logits, ffn.experts, ffn.weights]              the router
    ffn.out [stream.ffn]                                (V3 adds the output at the start of the next block)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block_ffn import gated, routed_ffn
from .block_weights import V3BlockWeights, V4BlockWeights
from .checks import expect_dtype, expect_in_range, expect_shape
from .config import ResidualNorm, V4Kind, WeightCast
from .csa import csa_attention
from .dsa import dsa_attention, dsa_picks, dsa_project
from .ffn_weights import GatedWeights
from .hca import hca_attention, sliding_attention
from .mhc import mhc_apply, mhc_head, mhc_mixes, mhc_post
from .mla import mla_naive
from .numerics import CONTRACT, Numerics
from .presets import V3Config, V4Config
from .rms_norm import rms_norm
from .taps import Tap, ignore, under
from .weights import MhcSite, MlaWeights


def embedding(name: str, token_t: Tensor, embed_vm: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The rows of tokens, [t, m]; `name` is what the caller's argument is called.

    Raises:
        ValueError: token_t has not one axis, or a token lies outside the vocabulary.
        TypeError: tokens are no integers.
    """
    expect_shape(name, token_t, "t", {})
    expect_dtype(name, token_t, torch.int64, torch.int32)
    expect_in_range(name, token_t, 0, len(embed_vm))
    return num.wide(embed_vm[token_t.long()])


def block_v3(
    h_tm: Tensor,
    y_tm: Tensor,
    weights: V3BlockWeights,
    table_sr: Tensor,
    *,
    config: V3Config,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> tuple[Tensor, Tensor]:
    """One block of V3 or V3.2 over a sequence: latent attention, then a dense network or experts.

    Math:
        h' = h + y; h'' = h' + attention(RMSNorm(h')); y'' = ffn(RMSNorm(h'')); the next block gets h'' and y''

    Shapes:
        h_tm, y_tm: [t, m], the row that passes by and the output still to be added to it (zeros at the first block);
        table_sr: fp32 [s, r], s >= t; returns h_tm and y_tm for the next block.

    Rounding:
        h' and h'' to `dtype`. The norms read them (ROUNDED), or the fp32 sums that they are roundings of (UNROUNDED).

    Raises:
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md sections 2.1, 3, 4, 7
    """
    dims = {"m": config.hidden}
    expect_shape("h_tm", h_tm, "tm", dims)
    expect_shape("y_tm", y_tm, "tm", dims)
    position_t = torch.arange(dims["t"], device=h_tm.device)
    h_tm, x_tm = v3_enter(h_tm, y_tm, weights.attn_norm_m, config=config, dtype=dtype, num=num, tap=under("attn.", tap))
    a_tm = _attention_v3(x_tm, weights, table_sr, config, dtype, num, under("attn.", tap))
    tap("attn.out", a_tm)
    h_tm, x_tm = v3_enter(h_tm, a_tm, weights.ffn_norm_m, config=config, dtype=dtype, num=num, tap=under("ffn.", tap))
    tap("stream.attn", h_tm)
    if isinstance(weights.ffn, GatedWeights):
        y_tm = gated(x_tm, weights.ffn, limit=None, dtype=dtype, num=num)
    else:
        y_tm = routed_ffn(
            x_tm, position_t, None, weights.ffn, config=config.ffn, dtype=dtype, num=num, tap=under("ffn.", tap)
        )
    tap("ffn.out", y_tm)
    return h_tm, y_tm


def v3_enter(
    h_tm: Tensor,
    y_tm: Tensor,
    norm_m: Tensor,
    *,
    config: V3Config,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> tuple[Tensor, Tensor]:
    """Add the output that waits, and normalise: what passes by, and what the sub-layer or the head reads."""
    sum_tm = num.f32(num.wide(h_tm) + num.wide(y_tm))
    h_tm = num.store(sum_tm, dtype)
    x_tm = h_tm if config.residual is ResidualNorm.ROUNDED else sum_tm
    tap("x", x_tm)
    x_tm = rms_norm(x_tm, norm_m, eps=config.norm_eps, cast=config.attention.weight_cast, dtype=dtype, num=num)
    tap("norm", x_tm)
    return h_tm, x_tm


def block_v4(
    stream_tnm: Tensor,
    token_t: Tensor,
    weights: V4BlockWeights,
    table_sr: Tensor,
    *,
    config: V4Config,
    layer: int,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """One block of V4 over a sequence: each sub-layer reads the streams with its own coefficients and writes to them.

    Math:
        pre, post, comb = mixes(stream); y = attention(RMSNorm(apply(pre, stream))); stream' = post y + comb^T stream;
        the same again with the experts

    Shapes:
        stream_tnm: [t, n, m]; token_t: integer [t], read by hash-routed layers; table_sr: fp32 [s, r], s >= t, of
        `config.rope(layer)`; returns [t, n, m].

    Rounding:
        what is read and the streams to bf16, coefficients to fp32; the rest as the components.

    Raises:
        ValueError: shapes disagree.

    Source:
        v3-v32-v4.md sections 5 to 7
    """
    dims = {"m": config.hidden, "n": config.mhc.streams}
    expect_shape("stream_tnm", stream_tnm, "tnm", dims)
    expect_shape("token_t", token_t, "t", dims)
    attn, ends = config.attn(layer), torch.tensor([0, dims["t"]], device=stream_tnm.device)
    own = under("attn.", tap)
    x_tm, post_tn, comb_tnn = v4_enter(
        stream_tnm, weights.attn_site, weights.attn_norm_m, config=config, num=num, tap=own
    )
    if attn.kind is V4Kind.CSA:
        y_tm = csa_attention(x_tm, weights.attention, table_sr, ends, None, config=attn, num=num, tap=own)
    else:
        attend = hca_attention if attn.kind is V4Kind.HCA else sliding_attention
        y_tm = attend(x_tm, weights.attention, table_sr, ends, config=attn, num=num, tap=own)
    own("out", y_tm)
    stream_tnm = mhc_post(stream_tnm, y_tm, post_tn, comb_tnn, num=num)
    tap("stream.attn", stream_tnm)
    own = under("ffn.", tap)
    x_tm, post_tn, comb_tnn = v4_enter(
        stream_tnm, weights.ffn_site, weights.ffn_norm_m, config=config, num=num, tap=own
    )
    y_tm = routed_ffn(x_tm, token_t, None, weights.ffn, config=config.ffn, num=num, tap=own)
    own("out", y_tm)
    stream_tnm = mhc_post(stream_tnm, y_tm, post_tn, comb_tnn, num=num)
    tap("stream.ffn", stream_tnm)
    return stream_tnm


def v4_enter(
    stream_tnm: Tensor,
    site: MhcSite,
    norm_m: Tensor,
    *,
    config: V4Config,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> tuple[Tensor, Tensor, Tensor]:
    """Begin a sub-layer: what it reads, normalised, and the `post` and `comb` that its output waits for."""
    pre_tn, post_tn, comb_tnn = mhc_mixes(stream_tnm, site, config=config.mhc, num=num)
    x_tm = mhc_apply(pre_tn, stream_tnm, num=num)
    for name, x in (("pre", pre_tn), ("post", post_tn), ("comb", comb_tnn), ("x", x_tm)):
        tap(name, x)
    x_tm = rms_norm(x_tm, norm_m, eps=config.norm_eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    tap("norm", x_tm)
    return x_tm, post_tn, comb_tnn


def v4_head(
    stream_tnm: Tensor,
    site: MhcSite,
    norm_m: Tensor,
    *,
    config: V4Config,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """What the output head of V4, or of its draft, reads: the streams through a site of their own, normalised."""
    x_tm = mhc_head(stream_tnm, site, config=config.mhc, num=num)
    tap("x", x_tm)
    x_tm = rms_norm(x_tm, norm_m, eps=config.norm_eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    tap("norm", x_tm)
    return x_tm


def _attention_v3(
    x_tm: Tensor,
    weights: V3BlockWeights,
    table_sr: Tensor,
    config: V3Config,
    dtype: torch.dtype,
    num: Numerics,
    tap: Tap,
) -> Tensor:
    where = (torch.arange(len(x_tm), device=x_tm.device), table_sr)
    if isinstance(weights.attention, MlaWeights):
        return mla_naive(x_tm, weights.attention, *where, config=config.attention, dtype=dtype, num=num)
    dsa, own = config.dsa, weights.attention
    _, latent_ta, state = dsa_project(x_tm, own, *where, config=dsa, dtype=dtype, num=num)
    picks_tk, scores_ts = dsa_picks(x_tm, latent_ta, own, *where, state, config=dsa, dtype=dtype, num=num)
    tap("scores", scores_ts)
    tap("picks", picks_tk)
    return dsa_attention(x_tm, own, *where, picks_tk, config=dsa, dtype=dtype, num=num)
