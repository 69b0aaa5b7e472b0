"""Layers of transformers as peers of blocks; written for transformers 5.24.0."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.block_weights import V3BlockWeights, V4BlockWeights
from deeptwin.reference.config import RopeConfig, V4Kind
from deeptwin.reference.dsa_state import DsaWeights
from deeptwin.reference.ffn_weights import GatedWeights, MoeWeights, PlainExperts
from deeptwin.reference.presets import V3Config, V4Config
from deeptwin.reference.v4_weights import checkpoint_names
from deeptwin.reference.weights import MlaWeights


def v3_fields(config: V3Config) -> dict[str, Any]:
    a, router, index = config.attention, config.router, config.index
    fields = (
        {} if index is None else {"index_n_heads": index.heads, "index_head_dim": index.dim, "index_topk": index.topk}
    )
    return fields | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.dense_width,
        "moe_intermediate_size": config.expert_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_heads,
        "n_shared_experts": config.shared_experts,
        "n_routed_experts": router.num_experts,
        "num_experts_per_tok": router.topk,
        "n_group": router.num_groups,
        "topk_group": router.kept_groups,
        "first_k_dense_replace": config.dense_layers,
        "q_lora_rank": a.q_lora_rank or None,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.nope_dim,
        "qk_rope_head_dim": a.rope.rope_dim,
        "v_head_dim": a.value_dim,
        "routed_scaling_factor": router.route_scale,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": _rope_fields(a.rope),
    }


def v4_fields(config: V4Config) -> dict[str, Any]:
    a, router, main = config.attention, config.router, config.num_layers
    names = {
        V4Kind.SLIDING: "sliding_attention",
        V4Kind.CSA: "compressed_sparse_attention",
        V4Kind.HCA: "heavily_compressed_attention",
    }
    kinds = [a.kind(layer) for layer in range(main)]
    dense = {a.compress_ratios[layer] for layer in range(main) if kinds[layer] is V4Kind.HCA}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "moe_intermediate_size": config.expert_width,
        "num_hidden_layers": main,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": 1,
        "head_dim": a.head_dim,
        "q_lora_rank": a.q_lora_rank,
        "qk_rope_head_dim": config.rope_main.rope_dim,
        "o_groups": a.o_groups,
        "o_lora_rank": a.o_lora_rank,
        "sliding_window": a.window,
        "layer_types": [names[kind] for kind in kinds],
        "compress_rates": {names[V4Kind.CSA]: 4, names[V4Kind.HCA]: min(dense, default=128)},
        "index_n_heads": a.index_heads,
        "index_head_dim": a.index_dim,
        "index_topk": a.index_topk,
        "n_routed_experts": router.num_experts,
        "num_experts_per_tok": router.topk,
        "routed_scaling_factor": router.route_scale,
        "scoring_func": "sqrtsoftplus",
        "num_hash_layers": config.hash_layers,
        "swiglu_limit": config.swiglu_limit,
        "hc_mult": config.mhc.streams,
        "hc_sinkhorn_iters": config.mhc.sinkhorn_iters,
        "hc_eps": config.mhc.eps,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_window.theta,
        "compress_rope_theta": config.rope_main.theta,
        "rope_parameters": _rope_fields(config.rope_main),
        "max_position_embeddings": config.max_positions,
    }


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    if rope.yarn is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    yarn = rope.yarn
    magnitudes = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim} if yarn.mscale else {}
    return magnitudes | {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }


def transformers_v3(
    h_tm: Tensor,
    y_tm: Tensor,
    weights: V3BlockWeights,
    table_sr: Tensor,
    *,
    config: V3Config,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """One layer of V3 or V3.2; its angles are its own. Returns what passes by and the output still to be added."""
    dense = isinstance(weights.ffn, GatedWeights)
    made, layer_class, _, rotary = made_v3(replace(config, dense_layers=int(dense)))
    layer = layer_class(made, layer_idx=0).float().eval().requires_grad_(False)
    layer.load_state_dict(layer_state_v3(weights, config))
    found: dict[str, Tensor] = {}
    layer.post_attention_layernorm.register_forward_hook(lambda module, args, out: found.update(h=args[0]))
    layer.mlp.register_forward_hook(lambda module, args, out: found.update(y=out))
    x = (h_tm + y_tm)[None]
    position = torch.arange(len(h_tm))[None]
    layer(
        x,
        attention_mask=causal_mask(len(h_tm), len(h_tm)),
        position_ids=position,
        position_embeddings=rotary(x, position),
    )
    return found["h"][0], found["y"][0]


def transformers_v4(
    stream_tnm: Tensor,
    token_t: Tensor,
    weights: V4BlockWeights,
    table_sr: Tensor,
    *,
    config: V4Config,
    layer: int,
) -> Tensor:
    """One layer of V4 in fp32, its streams rounded to bf16 at the end."""
    made, modeling, name = _made("v4", v4_fields(config))
    module = getattr(modeling, f"{name}DecoderLayer")(made, layer_idx=layer).float().eval().requires_grad_(False)
    rotary = getattr(modeling, f"{name}RotaryEmbedding")(config=made)
    state = layer_state_v4(weights)
    module.load_state_dict(state)
    position = torch.arange(len(token_t))[None]
    x = stream_tnm.float()[None]
    angles = {kind: rotary(x, position_ids=position, layer_type=kind) for kind in ("main", "compress")}
    out = module(
        x,
        input_ids=token_t[None],
        position_embeddings=angles,
        position_ids=position,
        attention_mask=causal_mask(len(token_t), config.attention.window),
    )
    return out[0].bfloat16()


def made_v3(config: V3Config) -> tuple[Any, Any, Any, Any]:
    """Configuration, classes of a layer and of a norm, and the angles of transformers' V3 or V3.2."""
    made, modeling, name = _made("v3" if config.index is None else "v32", v3_fields(config))
    rotary = getattr(modeling, f"{name}RotaryEmbedding")(config=made)
    return made, getattr(modeling, f"{name}DecoderLayer"), getattr(modeling, f"{name}RMSNorm"), rotary


def layer_state_v3(weights: V3BlockWeights, config: V3Config) -> dict[str, Tensor]:
    """The weights of a block under the names of the module, in fp32."""
    attention = weights.attention
    if isinstance(attention, DsaWeights):
        state = _mla_state(attention.mla, config) | {
            "indexer.wq_b.weight": attention.w_qb_hda.flatten(0, 1),
            "indexer.wk.weight": attention.w_k_dm,
            "indexer.k_norm.weight": attention.k_norm_d,
            "indexer.k_norm.bias": attention.k_bias_d,
            "indexer.weights_proj.weight": attention.w_head_hm,
        }
    else:
        state = _mla_state(attention, config)
    state = {f"self_attn.{name}": x for name, x in state.items()}
    state |= _norms_and_ffn(weights.attn_norm_m, weights.ffn_norm_m, weights.ffn)
    return {name: x.float() for name, x in state.items()}


def layer_state_v4(weights: V4BlockWeights) -> dict[str, Tensor]:
    """The weights of a block under the names of the module, in fp32."""
    state: dict[str, Tensor] = {}
    for field, key in checkpoint_names(1).items():
        owner, _, part = field.rpartition(".")
        held = getattr(weights.attention, owner) if owner else weights.attention
        value = None if held is None else getattr(held, part)
        if value is not None:
            state[f"self_attn.{key}"] = value
    for site, mixing in (("attn_hc", weights.attn_site), ("ffn_hc", weights.ffn_site)):
        state |= {f"{site}.fn": mixing.fn_wx, f"{site}.scale": mixing.scale_z, f"{site}.base": mixing.base_w}
    state |= _norms_and_ffn(weights.attn_norm_m, weights.ffn_norm_m, weights.ffn)
    return {name: x if x.dtype == torch.int64 else x.float() for name, x in state.items()}


def _made(generation: str, fields: dict[str, Any]) -> tuple[Any, Any, str]:
    import transformers

    name = f"Deepseek{generation.upper()}"
    modeling = importlib.import_module(f"transformers.models.deepseek_{generation}.modeling_deepseek_{generation}")
    return getattr(transformers, f"{name}Config")(**fields, attn_implementation="eager"), modeling, name


def causal_mask(tokens: int, window: int) -> Tensor:
    """What is added to scores: nothing for the last `window` keys up to a query's own."""
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    hidden = (back < 0) | (back >= window)
    return torch.zeros(tokens, tokens).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]


def _mla_state(weights: MlaWeights, config: V3Config) -> dict[str, Tensor]:
    # kv_b holds, head by head, the rows of W_UK and then those of W_UV
    kv_b_hdc = torch.cat([weights.w_uk_hnc, weights.w_uv_huc], dim=1)
    state = {
        "q_b_proj.weight" if config.attention.q_lora_rank else "q_proj.weight": weights.w_qb_hda.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": weights.w_kv_dm,
        "kv_a_layernorm.weight": weights.kv_norm_c,
        "kv_b_proj.weight": kv_b_hdc.flatten(0, 1),
        "o_proj.weight": weights.w_o_mhu.flatten(1),
    }
    if weights.w_qa_am is not None and weights.q_norm_a is not None:
        state |= {"q_a_proj.weight": weights.w_qa_am, "q_a_layernorm.weight": weights.q_norm_a}
    return state


def _norms_and_ffn(first: Tensor, second: Tensor, ffn: GatedWeights | MoeWeights) -> dict[str, Tensor]:
    state = {"input_layernorm.weight": first, "post_attention_layernorm.weight": second}
    if isinstance(ffn, GatedWeights):
        return state | _gated_state("mlp.", ffn)
    assert isinstance(ffn.experts, PlainExperts)
    assert isinstance(ffn.shared, GatedWeights)
    state |= {
        "mlp.gate.weight": ffn.gate_em,
        "mlp.experts.gate_up_proj": ffn.experts.w13_eim,
        "mlp.experts.down_proj": ffn.experts.w2_emf,
    }
    choice = {"e_score_correction_bias": ffn.bias_e, "tid2eid": ffn.table_vk}
    state |= {f"mlp.gate.{name}": x for name, x in choice.items() if x is not None}
    return state | _gated_state("mlp.shared_experts.", ffn.shared)


def _gated_state(prefix: str, weights: GatedWeights) -> dict[str, Tensor]:
    gate, up = weights.w13_im.chunk(2)
    named = {"gate_proj": gate, "up_proj": up, "down_proj": weights.w2_mf}
    return {f"{prefix}{name}.weight": x for name, x in named.items()}
