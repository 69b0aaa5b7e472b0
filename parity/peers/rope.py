"""transformers' rotary embedding of DeepSeek-V3 as a peer of `reference/rope.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.config import Pairing, RopeConfig, RopeSpan


def yarn_frequencies(config: RopeConfig) -> Tensor:
    """The frequencies that DeepseekV3RotaryEmbedding computes from the same configuration."""
    return _rotary(config).inv_freq.clone()


def table(positions_s: Tensor, freq_i: Tensor, *, magnitude: float = 1.0) -> Tensor:
    """The cosines and sines of DeepseekV3RotaryEmbedding with the given frequencies."""
    rotary = _rotary(RopeConfig(rope_dim=2 * len(freq_i), theta=10000.0, yarn=None))
    rotary.inv_freq, rotary.attention_scaling = freq_i, magnitude
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions_s[None])
    half = len(freq_i)
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)


def apply_interleaved(
    x_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    pairing: Pairing,
    span: RopeSpan,
    inverse: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """apply_rotary_pos_emb_interleave on the rotary slice, put back in interleaved order."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    if pairing is not Pairing.INTERLEAVED or inverse or x_thd.dtype != dtype:
        raise NotImplementedError(f"pairing: expected a forward interleaved rotation in {dtype}, got {pairing}")
    rows = table_sr[positions_t.long()]
    r, d = rows.shape[1], x_thd.shape[2]
    start = 0 if span is RopeSpan.FIRST else d - r
    part = x_thd[None, ..., start : start + r]
    cos, sin = (torch.cat([half, half], -1)[None] for half in rows.split(r // 2, -1))
    turned, _ = apply_rotary_pos_emb_interleave(part, part, cos, sin, unsqueeze_dim=2)
    y_thd = x_thd.clone()
    y_thd[..., start : start + r] = torch.stack(turned[0].split(r // 2, -1), -1).flatten(-2)
    return y_thd


def _rotary(config: RopeConfig) -> Any:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.theta}
    yarn = config.yarn
    if yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_length,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    length = 4096 if yarn is None else int(yarn.factor * yarn.original_length)
    return DeepseekV3RotaryEmbedding(
        DeepseekV3Config(qk_rope_head_dim=config.rope_dim, max_position_embeddings=length, rope_parameters=rope)
    )
