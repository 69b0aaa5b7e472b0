"""The feed-forward half of a block: one gated network, or a router and its experts, with plain or quantised weights.

Plain weights are those of a checkpoint after dequantisation; rows then meet no quantiser. Experts are added in fp32,
lowest number first and the shared one last, and rounded once. Quantised weights are the business of `moe`, which has
an order of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block_weights import GatedWeights, MoeWeights, PlainExperts
from .checks import expect_dtype, expect_in_range, expect_shape
from .config import FfnConfig, WeighExperts
from .linear import linear
from .moe import moe
from .numerics import CONTRACT, Numerics
from .quant import quantize
from .router import route, route_hash
from .swiglu import swiglu
from .taps import Tap, ignore
from .weights import ExpertWeights


def gated(
    x_tm: Tensor,
    weights: GatedWeights,
    weight_t: Tensor | None = None,
    *,
    limit: float | None,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """One gated network: W2 (silu(W1 x) * W3 x * weight).

    Rounding:
        both up projections, the gated row and the result to `dtype`.

    Raises:
        ValueError: shapes disagree.
        TypeError: an operand is not floating; `dtype` is no storage dtype.

    Source:
        v3-v32-v4.md section 7.4
    """
    v_tf = swiglu(linear(x_tm, weights.w13_im, dtype=dtype, num=num), weight_t, limit=limit, dtype=dtype, num=num)
    return linear(v_tf, weights.w2_mf, dtype=dtype, num=num)


def plain_experts(
    x_tm: Tensor,
    idx_tk: Tensor,
    weights_tk: Tensor,
    experts: PlainExperts,
    shared: GatedWeights,
    *,
    config: FfnConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The routed experts of every token, and the shared one.

    Math:
        y[t] = sum_e weight[t, e] * expert_e(x[t]) + shared(x[t])

    Shapes:
        x_tm: [t, m]; idx_tk: int64 [t, k], -1 for no expert; weights_tk: [t, k]; returns [t, m].

    Rounding:
        as `gated`; with AFTER_DOWN the weight meets the stored output and the product is not rounded. Every addition
        to fp32, the result to `dtype`.

    Edges:
        an expert without tokens is skipped; a token without experts gets the shared one alone.

    Raises:
        ValueError: shapes disagree; an expert lies outside 0 .. e - 1.
        TypeError: idx_tk is not int64; an operand is not floating; `dtype` is no storage dtype.

    Source:
        v3-v32-v4.md section 7.4
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("experts.w13_eim", experts.w13_eim, "eim", dims)
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_shape("weights_tk", weights_tk, "tk", dims)
    expect_dtype("idx_tk", idx_tk, torch.int64)
    expect_in_range("idx_tk", idx_tk, -1, dims["e"])
    x_tm, weights_tk = num.wide(x_tm), num.wide(weights_tk)
    y_tm = torch.zeros_like(x_tm)
    before = config.weigh is WeighExperts.BEFORE_DOWN
    for e in range(dims["e"]):
        token_y, slot_y = (idx_tk == e).nonzero(as_tuple=True)
        if not len(token_y):
            continue
        weight_y = weights_tk[token_y, slot_y]
        own = GatedWeights(w13_im=experts.w13_eim[e], w2_mf=experts.w2_emf[e])
        o_ym = gated(x_tm[token_y], own, weight_y if before else None, limit=config.swiglu_limit, dtype=dtype, num=num)
        y_tm[token_y] = num.f32(y_tm[token_y] + (o_ym if before else o_ym * weight_y[:, None]))
    shared_tm = gated(x_tm, shared, limit=config.swiglu_limit, dtype=dtype, num=num)
    return num.store(num.f32(y_tm + shared_tm), dtype)


def routed_ffn(
    x_tm: Tensor,
    token_t: Tensor,
    image_t: Tensor | None,
    weights: MoeWeights,
    *,
    config: FfnConfig,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    """Route the rows, and let their experts compute.

    Shapes:
        x_tm: [t, m], normalised; token_t: int64 or int32 [t], read by a hash router alone; image_t: bool [t] (True:
        image), read with an image bias; returns [t, m].

    Rounding:
        logits to fp32, then as `route`, and as `plain_experts` or `moe`.

    Raises:
        ValueError: as `route`, `route_hash`, `plain_experts` and `moe`; weights are quantised and `config` has no
            formats for them; image_t is missing with an image bias.
        TypeError: as those functions.

    Source:
        v3-v32-v4.md sections 7.1 to 7.5, v41-blocks.md section 1.1
    """
    logits_te = linear(x_tm, weights.gate_em, dtype=torch.float32, num=num)
    tap("logits", logits_te)
    if weights.bias_e is None:
        assert weights.table_vk is not None
        idx_tk, weights_tk = route_hash(logits_te, token_t, weights.table_vk, None, config=config.router, num=num)
    else:
        if (weights.bias_vl_e is None) != (image_t is None):
            raise ValueError(f"image_t: expected with an image bias only, got {'none' if image_t is None else 'one'}")
        idx_tk, weights_tk = route(
            logits_te, weights.bias_e, weights.bias_vl_e, image_t, None, config=config.router, num=num
        )
    tap("experts", idx_tk)
    tap("weights", weights_tk)
    if isinstance(weights.experts, PlainExperts) and isinstance(weights.shared, GatedWeights):
        return plain_experts(
            x_tm, idx_tk, weights_tk, weights.experts, weights.shared, config=config, dtype=dtype, num=num
        )
    if config.quantised is None:
        raise ValueError("config: expected formats for quantised weights, got None")
    assert isinstance(weights.experts, ExpertWeights)
    assert isinstance(weights.shared, ExpertWeights)
    x_q, x_sf = quantize(x_tm, fmt=config.quantised.activation, num=num)
    return moe(x_q, x_sf, idx_tk, weights_tk, None, weights.experts, weights.shared, config=config.quantised, num=num)
