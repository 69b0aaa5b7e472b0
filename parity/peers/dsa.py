"""transformers' DeepseekV32Attention as a peer of `reference/dsa.py`; written for transformers 5.24.0.

What differs on purpose, so that the comparison is about the rest: no Hadamard transform and no quantiser
(`index_key` and `latent` None), norms that round before the weight, `MscaleRule.HF`, de-interleaved rotary keys in the
cache. `table_sr` is not used: the angles are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import DsaConfig, IndexerRope, WeightCast
from deeptwin.reference.dsa_state import DsaState, DsaWeights

from .mla import TINY as TINY_MLA

STEPS = 4  # tokens that `transformers_steps` decodes one by one

# 16 index heads: with two or four, exact zeros tie at the k-th place and transformers leaves ties open
TINY = DsaConfig(
    mla=TINY_MLA,
    index_heads=16,
    index_dim=16,
    topk=8,
    indexer_rope=IndexerRope.HALF_SPLIT,
    index_key=None,
    latent=None,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class HfDsa:
    """A DeepseekV32Attention with its rotary embedding, and the same weights in the reference's container."""

    attention: Any
    rotary: Any
    weights: DsaWeights


def build(config: DsaConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> HfDsa:
    """The module of layer 0 with weights drawn from `seed`; norms and the bias are drawn too.

    Raises:
        ValueError: the configuration asks for what the module does not do.
    """
    attention, rotary = _module(config, dtype)
    rng = np.random.Generator(np.random.Philox(seed))
    for name, parameter in sorted(attention.named_parameters()):
        drawn = rng.standard_normal(tuple(parameter.shape))
        if parameter.dim() == 1:
            drawn = 0.1 * drawn + (0.0 if name.endswith("bias") else 1.0)
        else:
            drawn = drawn * parameter.shape[-1] ** -0.5
        parameter.data.copy_(torch.from_numpy(drawn))
    weights = DsaWeights.from_state_dict(attention.state_dict(), prefix="", config=config)
    return HfDsa(attention=attention, rotary=rotary, weights=weights)


def run(peer: HfDsa, x_tm: Tensor, *, steps: int = 0) -> tuple[Tensor, list[set[int]], Tensor]:
    """Outputs of one pass, or of a first chunk and `steps` single tokens through the cache; picks; index scores."""
    from transformers import DynamicCache

    seen: list[tuple[Tensor, Tensor]] = []
    inner = peer.attention.indexer.forward

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        kept: list[Tensor] = []
        topk = torch.Tensor.topk

        def recorded(scores: Tensor, *rest: Any, **named: Any) -> Any:
            kept.append(scores)
            return topk(scores, *rest, **named)

        torch.Tensor.topk = recorded  # type: ignore[method-assign, assignment]
        try:
            indices = inner(*args, **kwargs)
        finally:
            torch.Tensor.topk = topk  # type: ignore[method-assign]
        seen.append((indices[0], kept[0][0]))
        return indices

    peer.attention.indexer.forward = watched
    try:
        cache = DynamicCache(config=peer.attention.config)
        first = len(x_tm) - steps
        outputs = [
            _forward(peer, x_tm[start:end], end, cache)
            for start, end in [(0, first), *((i, i + 1) for i in range(first, len(x_tm)))]
        ]
    finally:
        peer.attention.indexer.forward = inner
    picks, scores = [], torch.full((len(x_tm), len(x_tm)), -torch.inf)
    for indices, rows in seen:
        for own, row in zip(indices, rows, strict=True):
            position = len(picks)
            picks.append({int(i) for i in own if int(i) <= position})
            scores[position, : position + 1] = row[: position + 1]
    return torch.cat(outputs), picks, scores


def transformers_prefill(
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
    """`dsa_attention` in one pass, the picks its own."""
    return run(_loaded(weights, config, dtype), x_tm)[0]


def transformers_steps(
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
    """The same through its cache: one chunk, then the last tokens one by one."""
    return run(_loaded(weights, config, dtype), x_tm, steps=min(STEPS, max(len(x_tm) - 1, 0)))[0]


def _loaded(weights: DsaWeights, config: DsaConfig, dtype: torch.dtype) -> HfDsa:
    from .mla import _state_dict

    attention, rotary = _module(config, dtype)
    state = _state_dict(weights.mla, config.mla) | {
        "indexer.wq_b.weight": weights.w_qb_hda.flatten(0, 1),
        "indexer.wk.weight": weights.w_k_dm,
        "indexer.k_norm.weight": weights.k_norm_d,
        "indexer.k_norm.bias": weights.k_bias_d,
        "indexer.weights_proj.weight": weights.w_head_hm,
    }
    attention.load_state_dict(state)
    return HfDsa(attention=attention, rotary=rotary, weights=weights)


def _forward(peer: HfDsa, x_tm: Tensor, end: int, cache: Any) -> Tensor:
    positions_t = torch.arange(end - len(x_tm), end)
    cos_sin = peer.rotary(x_tm[None], positions_t[None])
    hidden = torch.arange(end)[None, :] > positions_t[:, None]
    mask = torch.zeros(hidden.shape, dtype=x_tm.dtype).masked_fill(hidden, torch.finfo(x_tm.dtype).min)
    return peer.attention(x_tm[None], cos_sin, mask[None, None], cache=cache)[0][0]


def _module(config: DsaConfig, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    plain = config.index_key is None and config.latent is None and config.indexer_rope is IndexerRope.HALF_SPLIT
    if not plain or config.mla.weight_cast is not WeightCast.BEFORE_WEIGHT:
        raise ValueError(f"config: expected half-split pairs, no quantiser and norms BEFORE_WEIGHT, got {config}")
    hf_config = _hf_config(config)
    attention = modeling.DeepseekV32Attention(hf_config, layer_idx=0).to(dtype).eval().requires_grad_(False)
    return attention, modeling.DeepseekV32RotaryEmbedding(hf_config)


def _hf_config(config: DsaConfig) -> Any:
    from transformers import DeepseekV32Config

    mla, yarn = config.mla, config.mla.rope.yarn
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": mla.rope.theta}
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
    return DeepseekV32Config(
        hidden_size=mla.hidden,
        num_hidden_layers=1,
        num_attention_heads=mla.num_heads,
        num_key_value_heads=mla.num_heads,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.nope_dim,
        qk_rope_head_dim=mla.rope.rope_dim,
        v_head_dim=mla.value_dim,
        index_n_heads=config.index_heads,
        index_head_dim=config.index_dim,
        index_topk=config.topk,
        max_position_embeddings=length,
        rope_parameters=rope,
        attn_implementation="eager",
    )
