"""Whole latent attention blocks in fp32 on the CPU, naive and absorbed, with faults that can be switched on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deeptwin.reference.config import MlaConfig, MscaleRule, WeightCast
from deeptwin.reference.weights import Latents, MlaWeights

from .mla import Faults, attend, product


@dataclass(frozen=True, kw_only=True)
class BlockFaults:
    """What a block does wrong; the default is right."""

    core: Faults = field(default_factory=Faults)
    magnitude: str = "config"  # config, none, other_field
    width: str = "head"  # head, latent (of the absorbed key), nope
    table: str = "given"  # given, no_yarn, other_base
    pairing: str = "interleaved"  # interleaved, half_split
    rotated: str = "both"  # both, queries
    shift: int = 0  # added to the positions of the queries
    query_norm: bool = True
    latent_norm: str = "latent"  # latent, missing, with_rotary
    rotary_key: str = "own"  # own, first_token
    up: str = "right"  # right, swapped
    past: str = "used"  # used, dropped
    heads: str = "right"  # right, interleaved


def block(faults: BlockFaults, *, absorbed: bool) -> Callable[..., Tensor]:
    """The emulation with the signature of `mla_naive` and `mla_absorbed`."""

    def mla(
        x_tm: Tensor,
        weights: MlaWeights,
        positions_t: Tensor,
        table_sr: Tensor,
        *,
        config: MlaConfig,
        past: Latents | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        q, rows, places = _project(faults, x_tm, weights, positions_t, table_sr, config, dtype)
        if past is not None and faults.past != "dropped":
            rows = torch.cat([past.rows_sd.float(), rows])
            places = torch.cat([past.positions_s, places])
        uk, uv = weights.w_uk_hnc, weights.w_uv_huc
        if faults.up == "swapped":
            uk, uv = uv, uk
        # the keys are in order of position: a query sees those up to its own
        own_t = torch.searchsorted(places, positions_t, right=True) - 1
        scale = _scale(faults, config)
        c = config.kv_lora_rank
        if absorbed:
            qa = _stored("thn,hnc->thc", q[..., : config.nope_dim], uk, dtype)
            q = torch.cat([qa, q[..., config.nope_dim :]], -1)
            z = attend(faults.core, q, rows[:, None], rows[:, None, :c], own_t, scale=scale, dtype=dtype)[0]
            out = _stored("thc,huc->thu", z, uv, dtype)
        else:
            k = _stored("sc,hnc->shn", rows[:, :c], uk, dtype)
            k = torch.cat([k, rows[:, None, c:].expand(-1, config.num_heads, -1)], -1)
            v = _stored("sc,huc->shu", rows[:, :c], uv, dtype)
            out = attend(faults.core, q, k, v, own_t, scale=scale, dtype=dtype)[0].float()
        if faults.heads == "interleaved":
            out = out.transpose(1, 2).reshape(out.shape)
        return _stored("thu,mhu->tm", out, weights.w_o_mhu, dtype).to(dtype)

    return mla


def _stored(equation: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return product(equation, a, b).to(dtype).float()


def _project(
    faults: BlockFaults,
    x: Tensor,
    w: MlaWeights,
    positions: Tensor,
    table: Tensor,
    config: MlaConfig,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    latent, c = x, config.kv_lora_rank
    if w.w_qa_am is not None and w.q_norm_a is not None:
        latent = _stored("tm,am->ta", x, w.w_qa_am, dtype)
        latent = _norm(latent, w.q_norm_a, config, dtype) if faults.query_norm else latent
    q = _stored("ta,hda->thd", latent, w.w_qb_hda, dtype)
    down = _stored("tm,dm->td", x, w.w_kv_dm, dtype)
    kv, rotary = down[:, :c], down[:, c:]
    if faults.latent_norm == "with_rotary":
        rotary = _norm(rotary, torch.ones(rotary.shape[1]), config, dtype)
    if faults.latent_norm != "missing":
        kv = _norm(kv, w.kv_norm_c, config, dtype)
    table = _table(faults, config, table)
    n = config.nope_dim
    q = torch.cat([q[..., :n], _turn(faults, q[..., n:], table[positions + faults.shift], dtype)], -1)
    if faults.rotated == "both":
        rotary = _turn(faults, rotary[:, None], table[positions], dtype)[:, 0]
    if faults.rotary_key == "first_token" and len(rotary):
        rotary = rotary[:1].expand_as(rotary)
    return q, torch.cat([kv, rotary], -1), positions


def _norm(x: Tensor, weight: Tensor, config: MlaConfig, dtype: torch.dtype) -> Tensor:
    mean = x.double().square().mean(-1, keepdim=True).float()
    y = x * torch.rsqrt(mean.double() + config.norm_eps).float()
    if config.weight_cast is WeightCast.BEFORE_WEIGHT:
        y = y.to(dtype).float()
    return (y * weight.float()).to(dtype).float()


def _turn(faults: BlockFaults, x: Tensor, row_tr: Tensor, dtype: torch.dtype) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = row_tr[:, None, :half], row_tr[:, None, half:]
    if faults.pairing == "half_split":
        u, v = x[..., :half], x[..., half:]
        y = torch.cat([u * cos - v * sin, u * sin + v * cos], -1)
    else:
        u, v = x[..., 0::2], x[..., 1::2]
        y = torch.stack([u * cos - v * sin, u * sin + v * cos], -1).flatten(-2)
    return y.to(dtype).float()


def _table(faults: BlockFaults, config: MlaConfig, table: Tensor) -> Tensor:
    if faults.table == "given":
        return torch.cat([table, table[-1:]])  # one row more for shifted positions
    base = 500000.0 if faults.table == "other_base" else config.rope.theta
    r = config.rope.rope_dim
    freq = base ** -(torch.arange(0, r, 2, dtype=torch.float64) / r)
    angle = torch.arange(len(table) + 1, dtype=torch.float64)[:, None] * freq
    return torch.cat([angle.cos(), angle.sin()], -1).float()


def _scale(faults: BlockFaults, config: MlaConfig) -> float:
    width = {"head": config.head_dim, "latent": config.latent_dim, "nope": config.nope_dim}[faults.width]
    yarn = config.rope.yarn
    if yarn is None or faults.magnitude == "none":
        return width**-0.5
    by_all_dim = (yarn.mscale_rule is MscaleRule.HF) != (faults.magnitude == "other_field")
    mscale = yarn.mscale_all_dim if by_all_dim else yarn.mscale
    return width**-0.5 * (0.1 * mscale * math.log(yarn.factor) + 1) ** 2


_RIGHT = BlockFaults()
naive_right = block(_RIGHT, absorbed=False)
naive_right_backwards = block(replace(_RIGHT, core=Faults(block=16, backwards=True)), absorbed=False)
absorbed_right = block(_RIGHT, absorbed=True)
absorbed_right_splits = block(replace(_RIGHT, core=Faults(split=16)), absorbed=True)

no_magnitude = block(replace(_RIGHT, magnitude="none"), absorbed=False)
other_mscale_field = block(replace(_RIGHT, magnitude="other_field"), absorbed=False)
no_yarn_table = block(replace(_RIGHT, table="no_yarn"), absorbed=False)
other_rope_base = block(replace(_RIGHT, table="other_base"), absorbed=False)
half_split_pairs = block(replace(_RIGHT, pairing="half_split"), absorbed=False)
rotary_key_not_rotated = block(replace(_RIGHT, rotated="queries"), absorbed=False)
query_one_position_on = block(replace(_RIGHT, shift=1), absorbed=False)
query_latent_not_normed = block(replace(_RIGHT, query_norm=False), absorbed=False)
latent_not_normed = block(replace(_RIGHT, latent_norm="missing"), absorbed=False)
rotary_key_normed = block(replace(_RIGHT, latent_norm="with_rotary"), absorbed=False)
first_rotary_key_for_all = block(replace(_RIGHT, rotary_key="first_token"), absorbed=False)
up_projections_swapped = block(replace(_RIGHT, up="swapped"), absorbed=False)
heads_interleaved = block(replace(_RIGHT, heads="interleaved"), absorbed=False)
past_dropped = block(replace(_RIGHT, past="dropped"), absorbed=False)
future_seen = block(replace(_RIGHT, core=Faults(causal=1)), absorbed=False)

absorbed_no_magnitude = block(replace(_RIGHT, magnitude="none"), absorbed=True)
absorbed_scale_of_latent_width = block(replace(_RIGHT, width="latent"), absorbed=True)
absorbed_up_projections_swapped = block(replace(_RIGHT, up="swapped"), absorbed=True)
absorbed_past_dropped = block(replace(_RIGHT, past="dropped"), absorbed=True)
absorbed_chunks_merged_in_base_2 = block(replace(_RIGHT, core=Faults(split=16, merge="base_2")), absorbed=True)
absorbed_last_chunk_lost = block(replace(_RIGHT, core=Faults(split=16, merge="last_lost")), absorbed=True)
absorbed_output_truncated = block(replace(_RIGHT, core=Faults(output="truncated")), absorbed=True)
