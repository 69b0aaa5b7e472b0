"""A whole V3.2 attention layer in fp32 torch, one step after the other, with faults that can be switched on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import DsaConfig, IndexerRope, MscaleRule, RecordFormat, ScaleKind, WeightCast
from deeptwin.reference.dsa_state import DsaState, DsaWeights
from deeptwin.reference.weights import Latents

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the layer does wrong; the default is right."""

    magnitude: str = "asked"  # asked, none, other_field
    picks: str = "causal"  # causal, future (no mask behind the selection), one_query_for_all
    indexer: str = "asked"  # asked, interleaved
    transform: str = "both"  # both, none, query_only
    head_weights: str = "fp32"  # fp32, bf16, relu
    relu: bool = True
    key_norm: bool = True
    latent: str = "record"  # record, unquantised, floor_on_amax, tail_quantised
    cached: str = "own"  # own, unnormalised
    past: str = "read"  # read, dropped
    missing: str = "absent"  # absent, rescaled (mass of what is not picked is spread over the picked)
    topk: int = 0  # fewer tokens than asked for


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def _mean(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True).float().double() / x.shape[-1]


def _norm(x: Tensor, weight: Tensor, config: DsaConfig, dtype: torch.dtype) -> Tensor:
    unit = x * torch.rsqrt(_mean(x.square()) + config.mla.norm_eps)
    if config.mla.weight_cast is WeightCast.BEFORE_WEIGHT:
        unit = _rounded(unit, dtype)
    return _rounded(unit * weight.double(), dtype)


def _turned(x: Tensor, table: Tensor, positions: Tensor, start: int, *, interleaved: bool) -> Tensor:
    """Heads [t, h, d] with the channels from `start` on rotated."""
    half = table.shape[1] // 2
    cos, sin = table.double()[positions][:, None].split(half, 2)
    first, second = slice(start, start + half), slice(start + half, start + 2 * half)
    if interleaved:
        first, second = slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def _codes(x: Tensor, fmt: RecordFormat, floor: float) -> tuple[Tensor, Tensor]:
    """Code values and scales of rows in groups of the format."""
    groups = x.float().unflatten(-1, (-1, fmt.quant.group))
    scale = groups.abs().amax(-1).clamp(min=floor) / 448.0
    if fmt.quant.scale is not ScaleKind.F32:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.exp2((exponent - (mantissa == 0.5).int()).double()).float()
    codes = (groups / scale[..., None]).clamp(-448, 448).to(E4M3).double()
    return codes.flatten(-2), scale.double()


def _hadamard(x: Tensor) -> Tensor:
    rows, half = x.reshape(-1, x.shape[-1]), 1
    while half < rows.shape[1]:
        parts = rows.reshape(len(rows), rows.shape[1] // (2 * half), 2, half)
        rows = torch.stack([parts[:, :, 0] + parts[:, :, 1], parts[:, :, 0] - parts[:, :, 1]], 2).reshape(rows.shape)
        half *= 2
    return (rows * rows.shape[1] ** -0.5).view(x.shape)


def _scale(faults: Faults, config: DsaConfig) -> float:
    yarn = config.mla.rope.yarn
    if yarn is None or faults.magnitude == "none":
        return float(config.mla.head_dim**-0.5)
    by_mscale = (yarn.mscale_rule is MscaleRule.DEMO) != (faults.magnitude == "other_field")
    field = yarn.mscale if by_mscale else yarn.mscale_all_dim
    return float(config.mla.head_dim**-0.5 * (0.1 * field * math.log(yarn.factor) + 1) ** 2)


def _latents(
    faults: Faults,
    x: Tensor,
    weights: DsaWeights,
    positions: Tensor,
    table: Tensor,
    config: DsaConfig,
    dtype: torch.dtype,
) -> Tensor:
    r = config.mla.rope.rope_dim
    down = _rounded(x @ weights.mla.w_kv_dm.double().T, dtype)
    c = down[:, :-r] if faults.cached == "unnormalised" else _norm(down[:, :-r], weights.mla.kv_norm_c, config, dtype)
    k_rope = _rounded(_turned(down[:, None, -r:], table, positions, 0, interleaved=True)[:, 0], dtype)
    if config.latent is not None and faults.latent != "unquantised":
        floor = 1e-4 if faults.latent == "floor_on_amax" else config.latent.quant.amax_floor
        codes, scale = _codes(c, config.latent, floor)
        c = codes * scale.repeat_interleave(config.latent.quant.group, 1)
        if faults.latent == "tail_quantised":
            k_rope = k_rope.float().clamp(-448, 448).to(E4M3).double()
    return torch.cat([c, k_rope], 1)


def _index(
    faults: Faults, x: Tensor, table: Tensor, positions: Tensor, config: DsaConfig, dtype: torch.dtype, *, query: bool
) -> tuple[Tensor, Tensor]:
    """Index rows [t, h, d] as codes and scales."""
    interleaved = config.indexer_rope is IndexerRope.INTERLEAVED or faults.indexer == "interleaved"
    y = _rounded(_turned(x, table, positions, 0, interleaved=interleaved), dtype)
    if config.index_key is None:
        return y, torch.ones(y.shape[:2], dtype=torch.float64)
    if faults.transform == "both" or (faults.transform == "query_only" and query):
        y = _rounded(_hadamard(y), dtype)
    codes, scale = _codes(y, config.index_key, config.index_key.quant.amax_floor)
    return codes, scale[..., 0]


def layer_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `dsa_attention`."""

    def dsa_attention(
        x_tm: Tensor,
        weights: DsaWeights,
        positions_t: Tensor,
        table_sr: Tensor,
        picks_tk: Tensor | None,
        *,
        config: DsaConfig,
        past: DsaState | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        mla, x = config.mla, x_tm.double()
        latent = _rounded(x @ weights.mla.w_qa_am.double().T, dtype)  # type: ignore[union-attr]
        latent = _norm(latent, weights.mla.q_norm_a, config, dtype)  # type: ignore[arg-type]
        q = _rounded(torch.einsum("ta,hda->thd", latent, weights.mla.w_qb_hda.double()), dtype)
        q = _rounded(_turned(q, table_sr, positions_t, mla.nope_dim, interleaved=True), dtype)
        rows = _latents(faults, x, weights, positions_t, table_sr, config, dtype)
        k = _rounded(x @ weights.w_k_dm.double().T, dtype)
        if faults.key_norm:
            apart = k - _mean(k)
            unit = apart * torch.rsqrt(_mean(apart.square()) + config.norm_eps)
            k = _rounded(unit * weights.k_norm_d.double() + weights.k_bias_d.double(), dtype)
        key, key_sf = _index(faults, k[:, None], table_sr, positions_t, config, dtype, query=False)
        state = DsaState(
            latents=Latents(rows_sd=rows, positions_s=positions_t), key_sd=key[:, 0], key_sf_s=key_sf[:, 0].float()
        )
        if past is not None and faults.past == "read":
            past = replace(past, key_sd=past.key_sd.double())
            past = replace(past, latents=replace(past.latents, rows_sd=past.latents.rows_sd.double()))
            state = past.then(state)
        seen = state.latents.positions_s[None, :] <= positions_t[:, None]
        if picks_tk is None:
            chosen = _selected(faults, x, latent, weights, positions_t, table_sr, state, seen, config, dtype)
        else:
            chosen = torch.zeros(len(x), len(state.latents.rows_sd) + 1, dtype=torch.bool)
            safe = torch.where((picks_tk >= 0) & (picks_tk < seen.shape[1]), picks_tk, seen.shape[1]).long()
            chosen = chosen.scatter(1, safe, True)[:, :-1]
        if faults.picks == "one_query_for_all" and len(chosen):
            chosen = chosen[-1:].expand_as(chosen)
        if faults.picks != "future":
            chosen = chosen & seen
        return _attended(faults, q, state.latents.rows_sd, chosen, weights, config, dtype)

    return dsa_attention


def _selected(
    faults: Faults,
    x: Tensor,
    latent: Tensor,
    weights: DsaWeights,
    positions: Tensor,
    table: Tensor,
    state: DsaState,
    seen: Tensor,
    config: DsaConfig,
    dtype: torch.dtype,
) -> Tensor:
    k = faults.topk or config.topk
    if seen.shape[1] <= k:
        return seen
    q = _rounded(torch.einsum("ta,hda->thd", latent, weights.w_qb_hda.double()), dtype)
    codes, q_sf = _index(faults, q, table, positions, config, dtype, query=True)
    head = x @ weights.w_head_hm.double().T
    head = _rounded(head, torch.bfloat16) if faults.head_weights == "bf16" else head
    head = head.relu() if faults.head_weights == "relu" else head
    head = head * q_sf * (config.index_heads * config.index_dim) ** -0.5
    dots = torch.einsum("thd,sd->ths", codes, state.key_sd.double())
    scores = torch.einsum("th,ths->ts", head, dots.relu() if faults.relu else dots) * state.key_sf_s.double()
    order = scores.float().masked_fill(~seen, -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.zeros_like(seen).scatter(1, order, True)


def _attended(
    faults: Faults, q: Tensor, rows: Tensor, chosen: Tensor, weights: DsaWeights, config: DsaConfig, dtype: torch.dtype
) -> Tensor:
    mla = config.mla
    nope, rope = q.split([mla.nope_dim, mla.rope.rope_dim], -1)
    qa = _rounded(torch.einsum("thn,hnc->thc", nope, weights.mla.w_uk_hnc.double()), dtype)
    scores = torch.einsum("thd,sd->ths", torch.cat([qa, rope], -1), rows).float().double() * _scale(faults, config)
    everything = scores
    scores = scores.masked_fill(~chosen[:, None], -torch.inf)
    top = (
        scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0) if rows.shape[0] else torch.zeros(*q.shape[:2], 1).double()
    )
    p = torch.exp(scores - top).float().double()
    total = p.sum(-1, keepdim=True)
    if faults.missing == "rescaled":
        total = torch.exp(everything - top).sum(-1, keepdim=True)
    c = mla.kv_lora_rank
    acc = torch.einsum("ths,sc->thc", _rounded(p, dtype), rows[:, :c])
    z = _rounded(torch.where(total == 0, 0.0, acc / total), dtype)
    out = _rounded(torch.einsum("thc,huc->thu", z, weights.mla.w_uv_huc.double()), dtype)
    return torch.einsum("thu,mhu->tm", out, weights.mla.w_o_mhu.double()).to(dtype)


_RIGHT = Faults()
right_layer = layer_with(_RIGHT)
magnitude_missing = layer_with(replace(_RIGHT, magnitude="none"))
magnitude_of_other_field = layer_with(replace(_RIGHT, magnitude="other_field"))
future_picks_attended = layer_with(replace(_RIGHT, picks="future"))
picks_of_last_query = layer_with(replace(_RIGHT, picks="one_query_for_all"))
latents_unquantised = layer_with(replace(_RIGHT, latent="unquantised"))
latent_floor_on_amax = layer_with(replace(_RIGHT, latent="floor_on_amax"))
rotary_key_quantised = layer_with(replace(_RIGHT, latent="tail_quantised"))
latents_unnormalised = layer_with(replace(_RIGHT, cached="unnormalised"))
past_dropped = layer_with(replace(_RIGHT, past="dropped"))
unpicked_mass_counted = layer_with(replace(_RIGHT, missing="rescaled"))
right_layer_free = right_layer
indexer_interleaved = layer_with(replace(_RIGHT, indexer="interleaved"))
transform_on_queries_alone = layer_with(replace(_RIGHT, transform="query_only"))
head_weights_relu = layer_with(replace(_RIGHT, head_weights="relu"))
index_relu_missing = layer_with(replace(_RIGHT, relu=False))
index_keys_not_normalised = layer_with(replace(_RIGHT, key_norm=False))
one_token_fewer = layer_with(replace(_RIGHT, topk=7))
