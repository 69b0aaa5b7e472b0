"""Whole tiny models of transformers as peers of stacks of blocks; written for transformers 5.24.0.

The models are built from configurations, with weights drawn here, nothing left at a default that hides errors. Hooks
hand out what their modules compute under the names that our taps use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import RopeConfig
from deeptwin.reference.presets import V3Config

Stages = dict[str, Tensor]


def build(config: V3Config, *, seed: int) -> Any:
    """The model in fp32 with all its parameters and buffers drawn from `seed`."""
    import transformers

    fields, generation = _v3_fields(config), "V3"
    if config.index is not None:
        fields |= {f"index_{name}": getattr(config.index, name) for name in ("topk",)}
        fields |= {"index_n_heads": config.index.heads, "index_head_dim": config.index.dim}
        generation = "V32"
    made = getattr(transformers, f"Deepseek{generation}Config")(**fields)
    return _drawn(getattr(transformers, f"Deepseek{generation}ForCausalLM")(made), seed)


def _drawn(model: Any, seed: int) -> Any:
    rng = np.random.Generator(np.random.Philox(seed))
    for name, tensor in sorted(model.state_dict().items()):
        drawn = rng.standard_normal(tuple(tensor.shape))
        if "norm" in name and name.endswith("weight"):
            drawn = 1 + 0.2 * drawn
        elif "bias" in name:
            drawn = 0.3 * drawn
        elif "embed" not in name:
            drawn = drawn * tensor.shape[-1] ** -0.5
        tensor.copy_(torch.from_numpy(drawn))
    return model.eval().requires_grad_(False)


def _v3_fields(config: V3Config) -> dict[str, Any]:
    a, router = config.attention, config.router
    return {
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
        "attn_implementation": "eager",
    }


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    if rope.yarn is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    yarn = rope.yarn
    return {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def stages(model: Any, token_t: Tensor, *, chunks: Iterable[int] = ()) -> Stages:
    """Everything that hooks see of a run over the tokens, in one pass or in cached chunks of the given sizes."""
    found: dict[str, list[Tensor]] = {}
    hooks = [module.register_forward_hook(hook) for module, hook in _hooks(model, found)]
    sizes = list(chunks) or [len(token_t)]
    cache = None
    for part in token_t.split(sizes):
        out = model(part[None], cache=cache, use_cache=len(sizes) > 1)
        cache = out.get("cache") if len(sizes) > 1 else None
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def _hooks(model: Any, found: dict[str, list[Tensor]]) -> Iterable[tuple[Any, Callable[..., None]]]:
    def keep(name: str, x: Any) -> None:
        found.setdefault(name, []).append(x.reshape(-1, *x.shape[2:]) if x.dim() > 2 else x)

    def output(name: str) -> Callable[..., None]:
        return lambda module, args, out: keep(name, out[0] if isinstance(out, tuple) else out)

    def around(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            keep(f"{name}.x", args[0])
            keep(f"{name}.norm", out)

        return hook

    def router(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            for part, x in zip(("logits", "weights", "experts"), out, strict=True):
                keep(f"{name}.{part}", x)

        return hook

    yield model.model.embed_tokens, output("embed")
    for number, layer in enumerate(model.model.layers):
        name = f"layers.{number}"
        yield layer.input_layernorm, around(f"{name}.attn")
        yield layer.post_attention_layernorm, around(f"{name}.ffn")
        yield layer.self_attn, output(f"{name}.attn.out")
        yield layer.mlp, output(f"{name}.ffn.out")
        if hasattr(layer.mlp, "gate"):
            yield layer.mlp.gate, router(f"{name}.ffn")
    yield model.model.norm, around("head")
    yield model.lm_head, output("logits")
