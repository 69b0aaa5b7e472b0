"""transformers' DeepseekV4Attention as a peer of `reference/csa.py` and `reference/hca.py`; written for 5.24.0.

What differs on purpose, so that the comparison is about the rest: it quantises nothing and transforms no index row
(`cache=None`, `IndexCast.PLAIN`), and it breaks ties of index scores as torch.topk does: with 16 index heads there are
none. `table_sr` is not used: the angles are its own. It runs in fp32 and is compared with SEMANTIC.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.config import V4AttnConfig, V4Kind
from deeptwin.reference.v4_weights import V4Weights, checkpoint_names

LAYER_TYPES = {
    V4Kind.SLIDING: "sliding_attention",
    V4Kind.CSA: "compressed_sparse_attention",
    V4Kind.HCA: "heavily_compressed_attention",
}
PROMPT = 5  # tokens of the first chunk of the cached form


def transformers_csa(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    cu_seqlens: Tensor,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
) -> Tensor:
    """Every sequence in one pass, without a cache; it selects for itself."""
    return _sequences(x_tm, weights, cu_seqlens, config, cached=False)


def transformers_csa_cached(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    cu_seqlens: Tensor,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
) -> Tensor:
    """A chunk, then token by token through transformers' cache."""
    return _sequences(x_tm, weights, cu_seqlens, config, cached=True)


def transformers_dense(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, cu_seqlens: Tensor, *, config: V4AttnConfig
) -> Tensor:
    """As `transformers_csa`, for layers that select nothing."""
    return _sequences(x_tm, weights, cu_seqlens, config, cached=False)


def transformers_dense_cached(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, cu_seqlens: Tensor, *, config: V4AttnConfig
) -> Tensor:
    """As `transformers_csa_cached`, for layers that select nothing."""
    return _sequences(x_tm, weights, cu_seqlens, config, cached=True)


def _sequences(x_tm: Tensor, weights: V4Weights, cu_seqlens: Tensor, config: V4AttnConfig, *, cached: bool) -> Tensor:
    attention, rotary, hf_config = built(config)
    attention.load_state_dict(_state_dict(weights))
    bounds = cu_seqlens.tolist()
    found = [x_tm[:0].float()]
    for low, high in zip(bounds, bounds[1:], strict=False):
        if high > low:
            found.append(_sequence(attention, rotary, hf_config, x_tm[low:high].float(), config, cached))
    return torch.cat(found)


def _sequence(attention: Any, rotary: Any, hf_config: Any, x: Tensor, config: V4AttnConfig, cached: bool) -> Tensor:
    from transformers import DynamicCache

    cache = DynamicCache(config=hf_config) if cached else None
    first = min(PROMPT, len(x)) if cached else len(x)
    out, seen = [], 0
    for size in [first] + [1] * (len(x) - first):
        rows = torch.arange(seen, seen + size)
        low = max(seen - config.window + 1, 0) if cached else 0  # its cache keeps the last window - 1 keys
        keys = torch.arange(low, seen + size)
        gone = (keys > rows[:, None]) | (keys <= rows[:, None] - config.window)
        mask = torch.zeros(gone.shape).masked_fill(gone, -torch.inf)[None, None]
        chunk = x[None, seen : seen + size]
        angles = {kind: rotary(chunk, position_ids=rows[None], layer_type=kind) for kind in ("main", "compress")}
        out.append(attention(chunk, angles, rows[None], mask, cache=cache)[0][0])
        seen += size
    return torch.cat(out)


def built(config: V4AttnConfig) -> tuple[Any, Any, Any]:
    """The module of layer 0 with its rotary embedding and its configuration.

    Raises:
        NotImplementedError: the module quantises nothing.
    """
    if config.cache is not None:
        raise NotImplementedError(f"config: expected no quantiser, got {config.cache.name}")
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    rope = config.rope
    yarn: dict[str, Any] = {"rope_type": "default"}
    length = 4096
    if rope.yarn is not None:
        length = int(rope.yarn.factor * rope.yarn.original_length)
        yarn = {
            "rope_type": "yarn",
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.original_length,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
        }
    kinds = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    if config.ratio:
        kinds[LAYER_TYPES[config.kind]] = config.ratio
    sliding = config.kind is V4Kind.SLIDING
    hf_config = DeepseekV4Config(
        vocab_size=97,
        hidden_size=config.hidden,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=config.num_heads,
        num_key_value_heads=1,
        head_dim=config.head_dim,
        q_lora_rank=config.q_rank,
        qk_rope_head_dim=rope.rope_dim,
        o_groups=config.o_groups,
        o_lora_rank=config.o_rank,
        sliding_window=config.window,
        layer_types=[LAYER_TYPES[config.kind]],
        compress_rates=kinds,
        index_n_heads=config.index_heads or 16,
        index_head_dim=config.index_dim or 16,
        index_topk=config.index_topk or 3,
        rope_theta=rope.theta if sliding else 10000.0,
        compress_rope_theta=160000.0 if sliding else rope.theta,
        rope_parameters={"rope_theta": 10000.0, **yarn},
        max_position_embeddings=length,
        rms_norm_eps=config.eps,
        n_routed_experts=8,
        num_experts_per_tok=2,
        attn_implementation="eager",
    )
    attention = v4.DeepseekV4Attention(hf_config, layer_idx=0).float().eval().requires_grad_(False)
    return attention, v4.DeepseekV4RotaryEmbedding(hf_config), hf_config


def _state_dict(weights: V4Weights) -> dict[str, Tensor]:
    found = {}
    for field, name in checkpoint_names(1).items():
        owner, _, part = field.rpartition(".")
        held = getattr(weights, owner) if owner else weights
        tensor = getattr(held, part, None) if held is not None else None
        if tensor is not None:
            found[name] = tensor.float()
    return found
