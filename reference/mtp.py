"""Draft modules of V3, V3.2 and V4: one more block, fed with a hidden state and the token that follows it.

Row i holds what the main model made of token i, and the embedding of token i + 1; what comes out predicts token i + 2.
V3 joins the two by one product of both rows side by side, embedding first. V4 takes the four streams as they are
before the main model's head, adds the projected embedding to each, and reads the result with a head site of its own.
The block stands at position i, its kind is that of its own layer number: experts in V3, a window alone in V4, whatever
the first layers of the main model have.

Embedding and output head are the main model's. Which hidden state a row of V3 holds, before or after the main model's
final norm, is not settled by the sources; transformers and SGLang take the one after it, and so should a caller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block import block_v3, block_v4, embedding, v3_enter, v4_head
from .checks import expect_shape
from .config import WeightCast
from .linear import linear
from .mtp_weights import MtpJoin, MtpStreamJoin, MtpV3Weights, MtpV4Weights
from .numerics import CONTRACT, Numerics
from .presets import V3Config, V4Config
from .rms_norm import rms_norm
from .taps import Tap, ignore, under
from .v4_layer import product


def mtp_join(
    e_tm: Tensor,
    h_tm: Tensor,
    weights: MtpJoin,
    *,
    eps: float,
    cast: WeightCast,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """What the block of V3's draft module reads.

    Math:
        x = W [RMSNorm_e(e) | RMSNorm_h(h)]

    Shapes:
        e_tm: [t, m], the embedding of the next token; h_tm: [t, m]; returns [t, m].

    Rounding:
        both norms as `rms_norm`, the product to `dtype`.

    Raises:
        ValueError: shapes disagree; eps is not positive.
        TypeError: an operand is not floating; `dtype` is no storage dtype.

    Source:
        v3-v32-v4.md section 8.1
    """
    dims: dict[str, int] = {}
    expect_shape("e_tm", e_tm, "tm", dims)
    expect_shape("h_tm", h_tm, "tm", dims)
    expect_shape("weights.w_mj", weights.w_mj, "mj", dims | {"j": 2 * dims["m"]})
    e_tm = rms_norm(e_tm, weights.enorm_m, eps=eps, cast=cast, dtype=dtype, num=num)
    h_tm = rms_norm(h_tm, weights.hnorm_m, eps=eps, cast=cast, dtype=dtype, num=num)
    return linear(torch.cat([e_tm, h_tm], dim=1), weights.w_mj, dtype=dtype, num=num)


def mtp_join_streams(
    e_tm: Tensor, stream_tnm: Tensor, weights: MtpStreamJoin, *, eps: float, num: Numerics = CONTRACT
) -> Tensor:
    """The streams that the draft block of V4 begins with.

    Math:
        stream'[n] = W_e RMSNorm_e(e) + W_h RMSNorm_h(stream[n])

    Shapes:
        e_tm: [t, m], the embedding of the next token; stream_tnm: [t, n, m]; returns [t, n, m].

    Rounding:
        norms, both products and their sum to bf16; with scales the normed rows go through the quantiser first.

    Edges:
        every stream has a norm of its own over m channels.

    Raises:
        ValueError: shapes disagree; eps is not positive.
        TypeError: an operand is not floating.

    Source:
        v3-v32-v4.md section 8.2
    """
    dims: dict[str, int] = {}
    expect_shape("stream_tnm", stream_tnm, "tnm", dims)
    expect_shape("e_tm", e_tm, "tm", dims)
    e_tm = rms_norm(e_tm, weights.enorm_m, eps=eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    h_ym = rms_norm(stream_tnm.flatten(0, 1), weights.hnorm_m, eps=eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    e_tm = product(e_tm, weights.e_mm, weights.e_sf, num=num)
    h_tnm = product(h_ym, weights.h_mm, weights.h_sf, num=num).unflatten(0, stream_tnm.shape[:2])
    return num.bf16(e_tm[:, None] + h_tnm)


def mtp_v3(
    next_t: Tensor,
    h_tm: Tensor,
    weights: MtpV3Weights,
    table_sr: Tensor,
    *,
    config: V3Config,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> tuple[Tensor, Tensor]:
    """One draft module of V3 or V3.2 over a sequence.

    Shapes:
        next_t: integer [t], the token behind each row's own; h_tm: [t, m], the main model's hidden states, or what the
        module before returned; table_sr: fp32 [s, r], s >= t; returns logits_tv, and x_tm for a further module.

    Rounding:
        as `mtp_join` and `block_v3`; logits to fp32.

    Raises:
        ValueError: shapes disagree; a token lies outside the vocabulary.
        TypeError: tokens are no integers.

    Source:
        v3-v32-v4.md section 8.1
    """
    expect_shape("next_t", next_t, "t", {"t": len(h_tm)})
    e_tm = embedding("next_t", next_t, weights.embed_vm, num=num)
    cast = config.attention.weight_cast
    x_tm = mtp_join(e_tm, h_tm, weights.join, eps=config.norm_eps, cast=cast, dtype=dtype, num=num)
    tap("join", x_tm)
    zero_tm = torch.zeros_like(x_tm)
    h_tm, y_tm = block_v3(x_tm, zero_tm, weights.block, table_sr, config=config, dtype=dtype, num=num, tap=tap)
    _, x_tm = v3_enter(h_tm, y_tm, weights.norm_m, config=config, dtype=dtype, num=num, tap=under("head.", tap))
    return linear(x_tm, weights.head_vm, dtype=torch.float32, num=num), x_tm


def mtp_v4(
    next_t: Tensor,
    stream_tnm: Tensor,
    weights: MtpV4Weights,
    table_sr: Tensor,
    *,
    config: V4Config,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> tuple[Tensor, Tensor]:
    """The draft block of V4 over a sequence.

    Shapes:
        next_t: integer [t], the token behind each row's own; stream_tnm: [t, n, m], the main model's streams before
        its head; table_sr: fp32 [s, r] of the plain base, s >= t; returns logits_tv, and stream_tnm for another turn.

    Rounding:
        as `mtp_join_streams`, `block_v4` and `v4_head`; logits to fp32.

    Raises:
        ValueError: shapes disagree; a token lies outside the vocabulary.
        TypeError: tokens are no integers.

    Source:
        v3-v32-v4.md section 8.2
    """
    expect_shape("next_t", next_t, "t", {"t": len(stream_tnm)})
    e_tm = embedding("next_t", next_t, weights.embed_vm, num=num)
    stream_tnm = mtp_join_streams(e_tm, stream_tnm, weights.join, eps=config.norm_eps, num=num)
    tap("join", stream_tnm)
    layer = config.num_layers  # the number of the draft block: it has a schedule of its own
    stream_tnm = block_v4(stream_tnm, next_t, weights.block, table_sr, config=config, layer=layer, num=num, tap=tap)
    x_tm = v4_head(stream_tnm, weights.site, weights.norm_m, config=config, num=num, tap=under("head.", tap))
    return linear(x_tm, weights.head_vm, dtype=torch.float32, num=num), stream_tnm
