"""Whole models of transformers: as peers of ours, and with what their modules compute; written for transformers 5.24.0.

The models are built from configurations, with weights drawn here or taken from ours, nothing left at a default that
hides errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.model_weights import V3Model, V4Model
from deeptwin.reference.presets import V3Config, V4Config

from ..capture import captured
from .block import layer_state_v3, layer_state_v4, v3_fields, v4_fields

MAPS = Path(__file__).resolve().parents[1] / "maps"
INPUTS = ("*layernorm", "*.norm", "*.ffn_hc", "*.o_a_proj")  # modules whose input is a stage of ours


def made(config: V3Config | V4Config) -> Any:
    """The model in fp32, with whatever weights it begins with."""
    import transformers

    if isinstance(config, V4Config):
        generation, fields = "V4", v4_fields(config)
    else:
        generation, fields = "V3" if config.index is None else "V32", v3_fields(config)
    shape = getattr(transformers, f"Deepseek{generation}Config")(**fields, attn_implementation="eager")
    model = getattr(transformers, f"Deepseek{generation}ForCausalLM")(shape)
    return model.float().eval().requires_grad_(False)


def build(config: V3Config | V4Config, *, seed: int) -> Any:
    """The model with all its parameters and buffers drawn from `seed`."""
    model = made(config)
    rng = np.random.Generator(np.random.Philox(seed))
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith("tid2eid"):
            rows = [rng.permutation(config.router.num_experts)[: tensor.shape[1]] for _ in range(len(tensor))]
            tensor.copy_(torch.from_numpy(np.stack(rows)))
            continue
        drawn = rng.standard_normal(tuple(tensor.shape))
        if "norm" in name and name.endswith("weight"):
            drawn = 1 + 0.2 * drawn
        elif "bias" in name:
            drawn = 0.3 * drawn
        elif "embed" not in name:
            drawn = drawn * tensor.shape[-1] ** -0.5
        tensor.copy_(torch.from_numpy(drawn))
    return model


def map_of(config: V3Config | V4Config) -> Path:
    """How transformers calls our stages, for `deeptwin bisect --map`."""
    return MAPS / f"transformers_{'v4' if isinstance(config, V4Config) else 'v3'}.json"


def stages(model: Any, token_t: Tensor, *, chunks: Iterable[int] = ()) -> dict[str, list[Tensor]]:
    """What its modules compute, without the batch axis: in one pass over the tokens, or chunk by chunk with a cache."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, x: Tensor, *, step: int = 0, rank: int = 0) -> None:
        # routers see tokens without a batch
        found.setdefault(name, []).append(x[0] if x.dim() > 2 else x)

    sizes = list(chunks) or [len(token_t)]
    cache = None
    for part in token_t.split(sizes):
        with captured(model, keep, inputs=INPUTS):
            out = model(part[None], cache=cache, use_cache=len(sizes) > 1)
        cache = out.get("cache") if len(sizes) > 1 else None
    return found


def transformers_v3(
    token_t: Tensor, weights: V3Model, *, config: V3Config, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits of V3 or V3.2 in fp32, with our weights."""
    layers = [layer_state_v3(block, config) for block in weights.layers]
    return _logits(made(config), token_t, weights, layers, {})


def transformers_v4(token_t: Tensor, weights: V4Model, *, config: V4Config) -> Tensor:
    """Logits of V4 in fp32, with our weights."""
    site = weights.site
    own = {"fn": site.fn_wx, "scale": site.scale_z, "base": site.base_w}
    layers = [layer_state_v4(block) for block in weights.layers]
    return _logits(made(config), token_t, weights, layers, {f"model.hc_head.hc_{name}": x for name, x in own.items()})


def _logits(
    model: Any, token_t: Tensor, weights: V3Model | V4Model, layers: list[dict[str, Tensor]], own: dict[str, Tensor]
) -> Tensor:
    state = own | {f"model.layers.{i}.{name}": x for i, layer in enumerate(layers) for name, x in layer.items()}
    state |= {
        "model.embed_tokens.weight": weights.embed_vm.float(),
        "model.norm.weight": weights.norm_m.float(),
        "lm_head.weight": weights.head_vm.float(),
    }
    model.load_state_dict(state)
    logits: Tensor = model(token_t[None]).logits[0]
    return logits
