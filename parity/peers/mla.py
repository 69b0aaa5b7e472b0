"""transformers' DeepseekV3Attention as a peer of `reference/mla.py`; written for transformers 5.24.0.

What differs on purpose, so that the comparison is about the rest: its norm rounds before the weight
(`WeightCast.BEFORE_WEIGHT`), its YaRN follows `MscaleRule.HF`, it casts cosines and sines to the activation dtype, and
it caches rotary keys in de-interleaved order, which is undone here. `table_sr` is not used: the angles are its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import MlaConfig, MscaleRule, RopeConfig, WeightCast, YarnConfig
from deeptwin.reference.weights import Latents, MlaWeights

STEPS = 4  # tokens that `transformers_steps` decodes one by one

TINY = MlaConfig(
    hidden=64,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    nope_dim=16,
    value_dim=16,
    rope=RopeConfig(
        rope_dim=8,
        theta=10000.0,
        yarn=YarnConfig(
            factor=4.0,
            original_length=16,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            mscale_rule=MscaleRule.HF,
        ),
    ),
    weight_cast=WeightCast.BEFORE_WEIGHT,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class HfMla:
    """A DeepseekV3Attention with its rotary embedding, and the same weights in the reference's container."""

    attention: Any
    rotary: Any
    weights: MlaWeights


def build(config: MlaConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> HfMla:
    """The module of layer 0 with weights drawn from `seed`.

    Raises:
        ValueError: the norm epsilon or the cast order is not what the module hard-codes.
    """
    if config.norm_eps != 1e-6 or config.weight_cast is not WeightCast.BEFORE_WEIGHT:
        raise ValueError(
            f"config: expected norm_eps 1e-6 and BEFORE_WEIGHT, got {config.norm_eps}, {config.weight_cast}"
        )
    attention, rotary = _module(config, dtype)
    rng = np.random.Generator(np.random.Philox(seed))
    for name, parameter in sorted(attention.named_parameters()):
        drawn = rng.standard_normal(tuple(parameter.shape))
        drawn = 1 + 0.1 * drawn if "layernorm" in name else drawn * parameter.shape[-1] ** -0.5
        parameter.data.copy_(torch.from_numpy(drawn))
    weights = MlaWeights.from_state_dict(attention.state_dict(), prefix="", config=config)
    return HfMla(attention=attention, rotary=rotary, weights=weights)


def transformers_prefill(
    x_tm: Tensor,
    weights: MlaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    *,
    config: MlaConfig,
    past: Latents | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The block `mla_naive` or `mla_absorbed` in one pass."""
    return _in_chunks(x_tm, weights, positions_t, config, past, dtype, steps=0)


def transformers_steps(
    x_tm: Tensor,
    weights: MlaWeights,
    positions_t: Tensor,
    table_sr: Tensor,
    *,
    config: MlaConfig,
    past: Latents | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The same through a DynamicCache: one chunk, then the last tokens one by one."""
    return _in_chunks(x_tm, weights, positions_t, config, past, dtype, steps=STEPS)


def _in_chunks(
    x: Tensor,
    weights: MlaWeights,
    positions: Tensor,
    config: MlaConfig,
    past: Latents | None,
    dtype: Any,
    *,
    steps: int,
) -> Tensor:
    attention, rotary = _module(config, dtype)
    attention.load_state_dict(_state_dict(weights, config))
    peer = HfMla(attention=attention, rotary=rotary, weights=weights)
    cache, places = _cache(past, config), positions
    if past is not None:
        places = torch.cat([past.positions_s, positions])
    first = max(len(x) - steps, 1)
    outputs, seen = [], len(places) - len(x)
    for start, end in [(0, first), *((i, i + 1) for i in range(first, len(x)))]:
        outputs.append(_forward(peer, x[start:end], places[: seen + end], cache))
    return torch.cat(outputs)


def run(peer: HfMla, x_tm: Tensor) -> Tensor:
    """Outputs of one pass over positions 0 .. t - 1, without a cache."""
    return _forward(peer, x_tm, torch.arange(len(x_tm)), None)


def run_cached(peer: HfMla, x_tm: Tensor, *, chunks: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Outputs of consecutive chunks of the given sizes, and the cached rows [c | k_rope] in DeepSeek's order."""
    from transformers import DynamicCache

    cache = DynamicCache()
    outputs, start = [], 0
    for size in chunks:
        outputs.append(_forward(peer, x_tm[start : start + size], torch.arange(start + size), cache))
        start += size
    c_sc, k_rope_sr = cache.layers[0].keys[0, 0], cache.layers[0].values[0, 0]
    r = k_rope_sr.shape[-1]
    pairs = torch.arange(r).view(2, r // 2).T.flatten()  # 0, r/2, 1, r/2 + 1, ...
    return torch.cat(outputs), torch.cat([c_sc, k_rope_sr[:, pairs]], dim=-1)


def _cache(past: Latents | None, config: MlaConfig) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    if past is not None:
        c_sc, k_rope_sr = past.rows_sd.split([config.kv_lora_rank, config.rope.rope_dim], dim=-1)
        de_interleaved = torch.cat([k_rope_sr[:, 0::2], k_rope_sr[:, 1::2]], dim=-1)
        cache.update(c_sc[None, None].contiguous(), de_interleaved[None, None], 0)
    return cache


def _forward(peer: HfMla, x_tm: Tensor, places_s: Tensor, cache: Any) -> Tensor:
    """The next tokens; `places_s` are the positions of all keys, those of the tokens last."""
    positions_t = places_s[len(places_s) - len(x_tm) :]
    cos_sin = peer.rotary(x_tm[None], positions_t[None])
    hidden = places_s[None, :] > positions_t[:, None]
    mask = torch.zeros(hidden.shape, dtype=x_tm.dtype).masked_fill(hidden, torch.finfo(x_tm.dtype).min)
    return peer.attention(x_tm[None], cos_sin, mask[None, None], cache=cache)[0][0]


def _module(config: MlaConfig, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    hf_config = _hf_config(config)
    attention = modeling.DeepseekV3Attention(hf_config, layer_idx=0).to(dtype).eval().requires_grad_(False)
    return attention, modeling.DeepseekV3RotaryEmbedding(hf_config)


def _state_dict(weights: MlaWeights, config: MlaConfig) -> dict[str, Tensor]:
    # kv_b holds, head by head, the rows of W_UK and then those of W_UV
    kv_b_hdc = torch.cat([weights.w_uk_hnc, weights.w_uv_huc], dim=1)
    state = {
        "q_b_proj.weight" if config.q_lora_rank else "q_proj.weight": weights.w_qb_hda.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": weights.w_kv_dm,
        "kv_a_layernorm.weight": weights.kv_norm_c,
        "kv_b_proj.weight": kv_b_hdc.flatten(0, 1),
        "o_proj.weight": weights.w_o_mhu.flatten(1),
    }
    if weights.w_qa_am is not None and weights.q_norm_a is not None:
        state |= {"q_a_proj.weight": weights.w_qa_am, "q_a_layernorm.weight": weights.q_norm_a}
    return state


def _hf_config(config: MlaConfig) -> Any:
    from transformers import DeepseekV3Config

    yarn = config.rope.yarn
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    length = 4096
    if yarn is not None:
        length = int(yarn.factor * yarn.original_length)
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_length,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    return DeepseekV3Config(
        hidden_size=config.hidden,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank or None,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.nope_dim,
        qk_rope_head_dim=config.rope.rope_dim,
        v_head_dim=config.value_dim,
        max_position_embeddings=length,
        rope_parameters=rope,
        attn_implementation="eager",
    )
