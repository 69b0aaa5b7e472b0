"""DSpark drafting: one forward of a block of noise tokens, then a chain of cheap steps that make it sequential.

Every main-model forward leaves features of its target layers: the mean over the residual streams that enter them. From
these come the keys that draft layers see of accepted tokens (`main_keys`), one for each draft layer, stored in the ring
of the layer like any window key. Rows that verification rejects are stored too: they are overwritten before any read.

A draft block of γ positions stands behind the newest token whose keys are valid, at position a: inputs are the sampled
token g and γ - 1 noise tokens at positions a + 1 … a + γ. All of them see the same keys, without a causal mask: the
last W accepted ones and the γ of the block (`draft_rows`). The first input is already the first prediction, so γ inputs
give γ drafts. With h[j] the hidden row of position j and t[-1] = g, the chain is, for j = 0 … γ - 1:

    logits[j] = norm(h[j]) head^T + w1[t[j-1]] w2^T            (`markov_step`, fp32)
    c[j]      = σ(clamp((h[j], w1[t[j-1]]) · w / T[j], ±60))   (`confidence`: h before its norm, token before this one)
    t[j]      ~ softmax pipeline of the target on logits[j], without grammar masks and blacklists

Source: runtime.md section 1.1 (DeepInfer, models/mtp/dflash.py, models/v4_modules/heads.py, layers/tilelang_ops/
get_kv_index.py, dflash.py). DeepSpec, where this was trained, feeds the normed row to the confidence head and adds a
bias. Letters beside the project's own: j positions of a block, z features of one token, r the Markov rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from .config import FP8_32X32, Q8, DraftBlock, Pairing, RopeSpan, WeightCast
from .dspark_layer import draft_attend_, draft_feed
from .dspark_state import DraftConfig, DraftLayer
from .linear import linear_quant
from .mhc import mhc_apply, mhc_enter, mhc_expand, mhc_settle, mhc_tap
from .numerics import CONTRACT, Numerics
from .rms_norm import rms_norm
from .rope import rope
from .weights import MhcCarry
from .window import window_draft

LIMIT = 60.0  # of confidence logits
LEAST_TEMPERATURE = 1e-5


def draft_rows(
    golden_b: Tensor, first_b: Tensor, accepted_b: Tensor, state_b: Tensor, valid_b: Tensor, *, block: DraftBlock
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a draft forward: ids, positions, the ring slots of the new keys, and those that all rows see.

    Math:
        a = first + accepted; ids g, noise, …, noise at positions a + 1 … a + γ, slot state · R + position mod R
        seen: positions max(a - W + 1, v0, 0) … a + γ, oldest first, then -1

    Shapes:
        golden_b: the sampled token; first_b: the position of the request's first verified row, -1 for padding;
        accepted_b: drafts accepted behind it; state_b, valid_b: as in `window`; all integers [b]. Returns ids_bj,
        positions_bj, slots_bj int32 [b, γ] and seen_bk int32 [b, W + γ rounded up to 64].

    Edges:
        a padding request has noise tokens at position 0, and -1 for every slot.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; first_b is below -1; accepted_b is negative or above γ.
    """
    dims: dict[str, int] = {}
    named = {"golden_b": golden_b, "first_b": first_b, "accepted_b": accepted_b, "state_b": state_b, "valid_b": valid_b}
    for name, x_b in named.items():
        expect_shape(name, x_b, "b", dims)
        expect_dtype(name, x_b, torch.int32, torch.int64)
    real_b1 = (first_b >= 0)[:, None]
    expect_in_range("first_b", first_b, -1, 2**31 - 1)
    expect_in_range("accepted_b", torch.where(real_b1[:, 0], accepted_b, 0), 0, block.draft + 1)
    last_b = torch.where(real_b1[:, 0], first_b.long() + accepted_b.long(), -1)
    position_bj = last_b[:, None] + 1 + torch.arange(block.draft, device=first_b.device)
    slot_bj = state_b.long()[:, None] * block.window.ring + position_bj % block.window.ring
    ids_bj = torch.full_like(position_bj, block.noise_token)
    ids_bj[:, 0] = torch.where(real_b1[:, 0], golden_b.long(), block.noise_token)
    seen_bk = window_draft(last_b, state_b, valid_b, config=block.window, draft=block.draft)
    rows = (ids_bj, torch.where(real_b1, position_bj, 0), torch.where(real_b1, slot_bj, -1))
    ids_bj, position_bj, slot_bj = (x.to(torch.int32) for x in rows)
    return ids_bj, position_bj, slot_bj, torch.where(real_b1, seen_bk, -1)


def target_features(streams_ztnm: Sequence[Tensor], *, num: Numerics = CONTRACT) -> Tensor:
    """The features of tokens: the mean over the streams that enter the attention of each target layer, side by side.

    Shapes:
        streams_ztnm: one [t, n, m] for each target layer, in the order of the config; returns [t, z], z = layers · m.

    Rounding:
        each mean once, to bf16.

    Raises:
        TypeError: a stream is not floating.
        ValueError: there is no layer, or shapes disagree.
    """
    expect_positive("streams_ztnm", len(streams_ztnm))
    dims: dict[str, int] = {}
    for stream_tnm in streams_ztnm:
        expect_shape("streams_ztnm", stream_tnm, "tnm", dims)
    return torch.cat([mhc_tap(stream_tnm, num=num) for stream_tnm in streams_ztnm], dim=1)


def main_keys(
    features_tz: Tensor,
    proj_q: Tensor,
    proj_sf: Tensor,
    norm_m: Tensor,
    wkv: Sequence[tuple[Tensor, Tensor, Tensor]],
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    eps: float,
    num: Numerics = CONTRACT,
) -> Tensor:
    """What draft layers see of the main model's tokens: a key for every draft layer, before the quantiser of the ring.

    Math:
        u = RMSNorm(lin8(features, proj)); key[i] = RMSNorm(lin8(u, wkv[i])), last r channels turned by the position

    Shapes:
        features_tz: [t, z]; proj_q, proj_sf: codes [m, z] and scales in FP8_32X32; norm_m: [m]; wkv: for every layer
        codes [d, m], scales, and the weight [d] of its norm; table_sr: fp32 [s, r]; positions_t: [t]; returns [t, i, d]
        with i the layers.

    Rounding:
        bf16 after each product, norm and rotation; inputs of products to Q8.

    Raises:
        ValueError: shapes disagree, there is no draft layer, or eps is not positive.
    """
    expect_positive("wkv", len(wkv))
    dims = {"t": len(positions_t)}
    expect_shape("features_tz", features_tz, "tz", dims)
    expect_shape("norm_m", norm_m, "m", dims)
    u_tm = linear_quant(features_tz, proj_q, proj_sf, x_fmt=Q8, w_fmt=FP8_32X32, num=num)
    u_tm = rms_norm(u_tm, norm_m, eps=eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    keys = []
    for w_q, w_sf, norm_d in wkv:
        key_td = linear_quant(u_tm, w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32, num=num)
        keys.append(rms_norm(key_td, norm_d, eps=eps, cast=WeightCast.AFTER_WEIGHT, num=num))
    keys_tid = torch.stack(keys, dim=1)
    return rope(
        keys_tid, table_sr, positions_t, pairing=Pairing.INTERLEAVED, span=RopeSpan.LAST, inverse=False, num=num
    )


def draft_hidden(
    embed_bjm: Tensor,
    layers: Sequence[DraftLayer],
    rings: Sequence[Tensor],
    table_sr: Tensor,
    positions_bj: Tensor,
    slots_bj: Tensor,
    seen_bk: Tensor,
    *,
    config: DraftConfig,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The hidden rows of every block, before the final norm; the rings are left as they were.

    Shapes:
        embed_bjm: bf16 [b, j, m], the embedded ids; rings: for every layer uint8 [p, o, w], with the keys of accepted
        tokens; table_sr: fp32 [s, r]; positions_bj, slots_bj, seen_bk: as `draft_rows`; returns [b, j, m].

    Rounding:
        as the parts of a V4.1 block; the row read from the last streams to bf16.

    Edges:
        what stands in the slots of the block before does not count. The keys of the block live for this call: the next
        main pass overwrites them before any read. Rows of padding requests come out as something finite.

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
    stream_tnm, pre_tn = mhc_expand(num.wide(embed_bjm).flatten(0, 1), config=config.mhc)
    carry = MhcCarry(stream_tnm=stream_tnm, pre_tn=pre_tn)
    for layer, ring_pow in zip(layers, rings, strict=True):
        x_tm, carry = mhc_enter(carry, layer.attention_site, config=config.mhc, num=num)
        carry = carry.left(draft_attend_(x_tm, layer, ring_pow.clone(), table_sr, *rows, config=config, num=num))
        x_tm, carry = mhc_enter(carry, layer.ffn_site, config=config.mhc, num=num)
        carry = carry.left(draft_feed(x_tm, layer, config=config, num=num))
    carry = mhc_settle(carry, num=num)
    assert carry.pre_tn is not None  # the schedule is shifted
    return mhc_apply(carry.pre_tn, carry.stream_tnm, num=num).unflatten(0, (dims["b"], dims["j"]))


def markov_step(base_bv: Tensor, token_b: Tensor, w1_vr: Tensor, w2_vr: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The logits of one block position, given the token before it.

    Math:
        logits[b, v] = base[b, v] + Σ_r w1[token[b], r] · w2[v, r]

    Shapes:
        base_bv: fp32 [b, v]; token_b: integer [b]; w1_vr, w2_vr: bf16 [v, r]; returns fp32 [b, v].

    Rounding:
        the sum through fp32, then the logit to fp32. A kernel may start its accumulator with the base.

    Raises:
        ValueError: shapes disagree, or a token lies outside the vocabulary.
        TypeError: base is not fp32, tokens are no integers, or a table is not bf16.
    """
    dims: dict[str, int] = {}
    expect_shape("base_bv", base_bv, "bv", dims)
    expect_shape("token_b", token_b, "b", dims)
    expect_dtype("base_bv", base_bv, torch.float32)
    expect_dtype("token_b", token_b, torch.int32, torch.int64)
    _check_table("w1_vr", w1_vr, dims)
    _check_table("w2_vr", w2_vr, dims)
    expect_in_range("token_b", token_b, 0, dims["v"])
    sum_bv = num.einsum("br,vr->bv", num.wide(w1_vr[token_b.long()]), num.wide(w2_vr))
    return num.f32(num.wide(base_bv) + sum_bv)


def confidence(
    h_bm: Tensor, token_b: Tensor, w1_vr: Tensor, weight_x: Tensor, *, temperature: float, num: Numerics = CONTRACT
) -> Tensor:
    """How probable it is that the next draft is accepted if all before it were.

    Math:
        c[b] = σ(clamp((Σ_m h[b, m] w[m] + Σ_r w1[token[b], r] w[m + r]) / max(temperature, 1e-5), -60, 60))

    Shapes:
        h_bm: [b, m], the block's hidden row before the final norm; token_b: integer [b], the token *before* the
        position; w1_vr: bf16 [v, r]; weight_x: bf16 [m + r]; returns fp32 [b].

    Rounding:
        each sum through fp32, their sum and the quotient to fp32, the result to fp32.

    Edges:
        the token is the sampled one for the first position of a block.

    Raises:
        ValueError: shapes disagree; a token lies outside the vocabulary; the temperature is negative or NaN.
        TypeError: tokens are no integers, or w1 or the weight is not bf16.
    """
    dims: dict[str, int] = {}
    expect_shape("h_bm", h_bm, "bm", dims)
    expect_shape("token_b", token_b, "b", dims)
    expect_dtype("token_b", token_b, torch.int32, torch.int64)
    _check_table("w1_vr", w1_vr, dims)
    expect_shape("weight_x", weight_x, "x", {"x": dims["m"] + dims["r"]})
    expect_dtype("weight_x", weight_x, torch.bfloat16)
    expect_in_range("token_b", token_b, 0, dims["v"])
    if not temperature >= 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    w_m, w_r = num.wide(weight_x).split([dims["m"], dims["r"]])
    hidden_b = num.sum(num.wide(h_bm) * w_m, dim=1)
    token_part_b = num.sum(num.wide(w1_vr[token_b.long()]) * w_r, dim=1)
    logit_b = num.f32(num.f32(hidden_b + token_part_b) / max(temperature, LEAST_TEMPERATURE))
    return num.f32(torch.sigmoid(logit_b.clamp(-LIMIT, LIMIT)))


def head_temperatures(text: str, *, draft: int) -> tuple[float, ...]:
    """The temperatures of the confidence head from their setting: one number, or one for each block position.

    Raises:
        ValueError: another count, or no numbers.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"text: expected numbers with commas between, got {text!r}") from error
    if len(values) not in (1, draft):
        raise ValueError(f"text: expected one temperature or {draft}, got {text!r}")
    return values * draft if len(values) == 1 else values


def _check_table(name: str, table_vr: Tensor, dims: dict[str, int]) -> None:
    expect_shape(name, table_vr, "vr", dims)
    expect_dtype(name, table_vr, torch.bfloat16)
