"""Fast drafting; the contract is `reference/dspark.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from deeptwin.reference.config import FP8_32X32, KV_FP8, Q8, DraftBlock, Pairing, RopeSpan, TwoCaches, WeightCast
from deeptwin.reference.csa2_config import CastPoints
from deeptwin.reference.dspark_state import DraftConfig, DraftLayer
from deeptwin.reference.weights import MhcSite

from .csa2 import csa2_output_triton, csa2_project_triton
from .kv_cache import store_records_triton
from .linear import linear_codes_triton, linear_triton
from .mhc import mhc_apply_triton, mhc_expand_triton, mhc_mixes_triton, mhc_post_triton, mhc_tap_triton
from .moe import moe_triton
from .quant import quantize_triton
from .rms_norm import rms_norm_triton
from .rope import rope_triton
from .router import route_triton
from .sparse_attn import two_cache_attn_decode_triton

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.dspark import MarkovLaunch

LEAST_TEMPERATURE = 1e-5


def draft_rows_triton(
    golden_b: Tensor,
    first_b: Tensor,
    accepted_b: Tensor,
    state_b: Tensor,
    valid_b: Tensor,
    *,
    block: DraftBlock,
    trusted: bool = False,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.dspark.draft_rows`; inspecting values waits for the device.

    Raises:
        TypeError: an argument is no integer tensor; an `out` buffer has another dtype.
        ValueError: shapes disagree; an `out` buffer does not fit; where values are inspected: first_b is below -1, or
            accepted_b is negative or above γ.
    """
    dims: dict[str, int] = {}
    named = {"golden_b": golden_b, "first_b": first_b, "accepted_b": accepted_b, "state_b": state_b, "valid_b": valid_b}
    for name, x_b in named.items():
        expect_shape(name, x_b, "b", dims)
        expect_dtype(name, x_b, torch.int32, torch.int64)
    if not trusted:
        expect_in_range("first_b", first_b, -1, 2**31 - 1)
        expect_in_range("accepted_b", accepted_b[first_b >= 0], 0, block.draft + 1)
    from deeptwin.kernels.triton_ops import dspark as kernels

    return kernels.draft_rows(
        golden_b,
        first_b,
        accepted_b,
        state_b,
        valid_b,
        draft=block.draft,
        noise=block.noise_token,
        window=block.window.window,
        ring=block.window.ring,
        out=out,
    )


def target_features_triton(streams_ztnm: Sequence[Tensor]) -> Tensor:
    """`reference.dspark.target_features`.

    Raises:
        TypeError: a stream is not bf16.
        ValueError: there is no layer, or shapes disagree.
    """
    expect_positive("streams_ztnm", len(streams_ztnm))
    dims: dict[str, int] = {}
    for stream_tnm in streams_ztnm:
        expect_shape("streams_ztnm", stream_tnm, "tnm", dims)
        expect_dtype("streams_ztnm", stream_tnm, torch.bfloat16)
    return torch.cat([mhc_tap_triton(stream_tnm) for stream_tnm in streams_ztnm], dim=1)


def main_keys_triton(
    features_tz: Tensor,
    proj_q: Tensor,
    proj_sf: Tensor,
    norm_m: Tensor,
    wkv: Sequence[tuple[Tensor, Tensor, Tensor]],
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    eps: float,
) -> Tensor:
    """`reference.dspark.main_keys`; the projected row is quantised once for all layers.

    Raises:
        ValueError: shapes disagree, there is no draft layer, or eps is not positive.
    """
    expect_positive("wkv", len(wkv))
    expect_positive("eps", eps)
    dims = {"t": len(positions_t)}
    expect_shape("features_tz", features_tz, "tz", dims)
    expect_shape("norm_m", norm_m, "m", dims)
    u_q, u_sf = quantize_triton(
        rms_norm_triton(_product(features_tz, proj_q, proj_sf), norm_m, eps=eps, cast=WeightCast.AFTER_WEIGHT), fmt=Q8
    )
    keys = [
        rms_norm_triton(
            linear_codes_triton(u_q, u_sf, w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32),
            norm_d,
            eps=eps,
            cast=WeightCast.AFTER_WEIGHT,
        )
        for w_q, w_sf, norm_d in wkv
    ]
    return rope_triton(
        torch.stack(keys, dim=1),
        table_sr,
        positions_t,
        pairing=Pairing.INTERLEAVED,
        span=RopeSpan.LAST,
        inverse=False,
    )


def draft_hidden_triton(
    embed_bjm: Tensor,
    layers: Sequence[DraftLayer],
    rings: Sequence[Tensor],
    table_sr: Tensor,
    positions_bj: Tensor,
    slots_bj: Tensor,
    seen_bk: Tensor,
    *,
    config: DraftConfig,
    trusted: bool = False,
    in_place: bool = False,
) -> Tensor:
    """`reference.dspark.draft_hidden`; with `in_place` the keys of the block stay in the rings, and nothing is copied.

    Raises:
        ValueError: shapes disagree, or there is not one ring for each layer.
    """
    if len(rings) != len(layers):
        raise ValueError(f"rings: expected {len(layers)}, got {len(rings)}")
    dims: dict[str, int] = {}
    expect_shape("embed_bjm", embed_bjm, "bjm", dims)
    for name, x in (("positions_bj", positions_bj), ("slots_bj", slots_bj)):
        expect_shape(name, x, "bj", dims)
    expect_shape("seen_bk", seen_bk, "bk", dims)
    rows = positions_bj.flatten(), slots_bj.flatten(), seen_bk.repeat_interleave(dims["j"], 0)
    stream_tnm, pre_tn = mhc_expand_triton(embed_bjm.flatten(0, 1), config=config.mhc)
    for layer, ring_pow in zip(layers, rings, strict=True):
        own_pow = ring_pow if in_place else ring_pow.clone()
        x_tm, pre_tn, post_tn, comb_tnn = _entered(stream_tnm, pre_tn, layer.attention_site, config)
        y_tm = _attended(x_tm, layer, own_pow, table_sr, rows, config)
        stream_tnm = mhc_post_triton(stream_tnm, y_tm, post_tn, comb_tnn)
        x_tm, pre_tn, post_tn, comb_tnn = _entered(stream_tnm, pre_tn, layer.ffn_site, config)
        stream_tnm = mhc_post_triton(stream_tnm, _fed(x_tm, layer, config, trusted), post_tn, comb_tnn)
    return mhc_apply_triton(pre_tn, stream_tnm).unflatten(0, (dims["b"], dims["j"]))


def _entered(
    stream_tnm: Tensor, pre_tn: Tensor, site: MhcSite, config: DraftConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a sub-layer reads with the coefficients of the one before, and its own."""
    return mhc_apply_triton(pre_tn, stream_tnm), *mhc_mixes_triton(stream_tnm, site, config=config.mhc)


def _attended(
    x_tm: Tensor,
    layer: DraftLayer,
    ring_pow: Tensor,
    table_sr: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    config: DraftConfig,
) -> Tensor:
    csa2, weights = config.csa2, layer.attention
    positions_t, slots_t, seen_tk = rows
    x_tm = rms_norm_triton(x_tm, weights.attn_norm_m, eps=csa2.eps, cast=WeightCast.AFTER_WEIGHT)
    q_thd, key_td, _ = csa2_project_triton(x_tm, weights, table_sr, positions_t, config=csa2)
    store_records_triton(ring_pow, key_td, slots_t, layout=csa2.layout)
    out_thd, _ = two_cache_attn_decode_triton(
        q_thd,
        ring_pow,
        seen_tk,
        ring_pow.new_zeros(1, 1, csa2.main.record_bytes),
        seen_tk.new_empty(len(seen_tk), 0),
        weights.sink_h,
        caches=TwoCaches(window=KV_FP8, main=csa2.main, layout=csa2.layout, scale=csa2.head_dim**-0.5),
        dtype=torch.float32 if csa2.cast is CastPoints.FUSED else torch.bfloat16,
    )
    return csa2_output_triton(out_thd, weights, table_sr, positions_t, config=csa2)


def _fed(x_tm: Tensor, layer: DraftLayer, config: DraftConfig, trusted: bool) -> Tensor:
    x_tm = rms_norm_triton(x_tm, layer.ffn_norm_m, eps=config.csa2.eps, cast=WeightCast.AFTER_WEIGHT)
    logits_te = linear_triton(x_tm, layer.gate_em, dtype=torch.float32)
    idx_tk, weights_tk = route_triton(logits_te, layer.bias_e, None, None, None, config=config.router, trusted=trusted)
    x_q, x_sf = quantize_triton(x_tm, fmt=config.moe.activation)
    return moe_triton(
        x_q, x_sf, idx_tk, weights_tk, None, layer.experts, layer.shared, config=config.moe, trusted=trusted
    )


def markov_step_triton(
    base_bv: Tensor,
    token_b: Tensor,
    w1_vr: Tensor,
    w2_vr: Tensor,
    *,
    trusted: bool = False,
    launch: MarkovLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dspark.markov_step`; a token that was not inspected and lies outside adds nothing.

    Raises:
        ValueError: shapes disagree; `out` does not fit; where values are inspected: a token lies outside the
            vocabulary.
        TypeError: base or `out` is not fp32, tokens are no integers, or a table is not bf16.
    """
    dims: dict[str, int] = {}
    expect_shape("base_bv", base_bv, "bv", dims)
    expect_shape("token_b", token_b, "b", dims)
    expect_dtype("base_bv", base_bv, torch.float32)
    expect_dtype("token_b", token_b, torch.int32, torch.int64)
    for name, table_vr in (("w1_vr", w1_vr), ("w2_vr", w2_vr)):
        expect_shape(name, table_vr, "vr", dims)
        expect_dtype(name, table_vr, torch.bfloat16)
    if not trusted:
        expect_in_range("token_b", token_b, 0, dims["v"])
    from deeptwin.kernels.triton_ops import dspark as kernels

    return kernels.markov_step(base_bv, token_b, w1_vr, w2_vr, launch=launch, out=out)


def confidence_triton(
    h_bm: Tensor,
    token_b: Tensor,
    w1_vr: Tensor,
    weight_x: Tensor,
    *,
    temperature: float,
    trusted: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dspark.confidence`, of bf16 rows; a token that was not inspected and lies outside adds nothing.

    Raises:
        ValueError: shapes disagree; the temperature is negative or NaN; `out` does not fit; where values are
            inspected: a token lies outside the vocabulary.
        TypeError: rows, w1 or the weight are not bf16, tokens no integers, or `out` is not fp32.
    """
    dims: dict[str, int] = {}
    expect_shape("h_bm", h_bm, "bm", dims)
    expect_shape("token_b", token_b, "b", dims)
    expect_shape("w1_vr", w1_vr, "vr", dims)
    expect_shape("weight_x", weight_x, "x", {"x": dims["m"] + dims["r"]})
    for name, x in (("h_bm", h_bm), ("w1_vr", w1_vr), ("weight_x", weight_x)):
        expect_dtype(name, x, torch.bfloat16)
    expect_dtype("token_b", token_b, torch.int32, torch.int64)
    if not trusted:
        expect_in_range("token_b", token_b, 0, dims["v"])
    if not temperature >= 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    from deeptwin.kernels.triton_ops import dspark as kernels

    return kernels.confidence(h_bm, token_b, w1_vr, weight_x, temperature=max(temperature, LEAST_TEMPERATURE), out=out)


def _product(x_tm: Tensor, w_q: Tensor, w_sf: Tensor) -> Tensor:
    x_q, x_sf = quantize_triton(x_tm, fmt=Q8)
    return linear_codes_triton(x_q, x_sf, w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32)
