"""Tiny whole models with drawn weights: a card, a checkpoint and an engine run them.

They have every kind of layer of their generation, and boundaries that a sequence of 40 tokens crosses: a window of 8,
pages of 16, selections of 4, groups of 8 in place of 128. Weights have the dtypes of the checkpoint in V4.1, and are
plain bf16 in V3 and V4. A draw depends on the generation, `vocab` and `seed` alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.block_v41 import V41Stack, stack_of
from deeptwin.reference.config import Combine, PageLayout, ScoreOrder
from deeptwin.reference.csa2_config import CastPoints
from deeptwin.reference.model_weights import V3Model, V4Model, V41Model
from deeptwin.reference.presets import (
    V3Config,
    V4Config,
    V41Config,
    tiny_v3,
    tiny_v4_flash,
    tiny_v32,
    tiny_v41_flash,
)
from deeptwin.reference.v4_weights import checkpoint_names

from . import draws
from .block_draws import MARGIN, State, memory_tables, v3_state, v4_state, v41_state

GENERATIONS = ("v3", "v32", "v4", "v41")
ENTROPY = 2.0  # of the next token, in nats: normal logits of variance 2 (ln v - 2) have about this much
BIAS = 0.1  # from one expert's bias to the next: less than scores differ by from token to token


def tiny_config(generation: str, *, vocab: int) -> V3Config | V4Config | V41Stack:
    """The model of a generation with `vocab` token ids.

    Raises:
        ValueError: an unknown generation, or fewer than 16 token ids.
    """
    if vocab < 16:
        raise ValueError(f"vocab: expected at least 16, got {vocab}")
    if generation in ("v3", "v32"):
        v3 = tiny_v3() if generation == "v3" else tiny_v32()
        index = None if v3.index is None else replace(v3.index, topk=4)
        return replace(v3, num_layers=4, vocab_size=vocab, index=index, max_positions=4096)
    if generation == "v4":
        v4 = tiny_v4_flash()
        attention = replace(v4.attention, index_topk=4)
        return replace(v4, vocab_size=vocab, attention=attention, max_positions=4096)
    if generation != "v41":
        raise ValueError(f"generation: expected one of {', '.join(GENERATIONS)}, got {generation!r}")
    stack = stack_of(
        _scaled(tiny_v41_flash(), vocab),
        cast=CastPoints.RELEASE,
        score_order=ScoreOrder.BF16_RELEASE,
        layout=PageLayout.INTERLEAVED,
        combine=Combine.SINGLE,
    )
    return replace(stack, csa2=replace(stack.csa2, page_tokens=16))


def _scaled(model: V41Config, vocab: int) -> V41Config:
    return replace(
        model,
        vocab_size=vocab,
        attention=replace(model.attention, window=8),
        engram=replace(model.engram, compressed_vocab_size=vocab - vocab // 8),
        draft=replace(model.draft, noise_token_id=vocab - 2),
        vision=replace(model.vision, image_token_id=vocab - 3),
        max_positions=4096,
    )


def tiny_state(
    generation: str, *, vocab: int, seed: int, fixed_experts: bool = False
) -> tuple[V3Config | V4Config | V41Stack, State]:
    """A tiny model and its tensors, as `drawn_state`."""
    config = tiny_config(generation, vocab=vocab)
    return config, drawn_state(config, seed=seed, fixed_experts=fixed_experts)


def drawn_state(
    config: V3Config | V4Config | V41Stack, *, seed: int, fixed_experts: bool = False, gain: float = 1.0
) -> State:
    """The tensors of a model under the names of released checkpoints.

    With `fixed_experts` the biases of experts lie so far apart that every token is routed alike, and no honest
    rounding changes a choice. `gain` sharpens attention.
    """
    vocab = config.model.vocab_size if isinstance(config, V41Stack) else config.vocab_size
    rng = np.random.Generator(np.random.Philox([seed, vocab, GENERATIONS.index(generation_of(config))]))
    if isinstance(config, V3Config):
        state = _v3(config, rng, gain)
    elif isinstance(config, V4Config):
        state = _v4(config, rng, gain)
    else:
        state = _v41(config, rng, gain)
    if not fixed_experts:
        biases = [name for name in state if name.endswith(("gate.bias", "gate.bias_vl", "e_score_correction_bias"))]
        state |= {name: state[name] * (BIAS / MARGIN) for name in biases}
    return state


def generation_of(config: V3Config | V4Config | V41Stack) -> str:
    """The name of a model's generation."""
    if isinstance(config, V3Config):
        return "v3" if config.index is None else "v32"
    return "v4" if isinstance(config, V4Config) else "v41"


def tiny_model(generation: str, *, vocab: int, seed: int, fixed_experts: bool = False) -> tuple[Any, Any]:
    """A tiny model of "v3", "v32", "v4" or "v41": its configuration and its weights, of `tiny_state`.

    They are V3Config and V3Model (v3, v32), V4Config and V4Model, or V41Stack and V41Model.
    """
    config, state = tiny_state(generation, vocab=vocab, seed=seed, fixed_experts=fixed_experts)
    if isinstance(config, V3Config):
        return config, V3Model.from_state_dict(state, config=config)
    if isinstance(config, V4Config):
        return config, V4Model.from_state_dict(state, config=config)
    return config, V41Model.from_state_dict(state, config=config, class_v=tiny_classes(config, seed=seed))


def tiny_classes(config: V41Stack, *, seed: int) -> Tensor:
    """The class of every token id, numbered as they appear: id 1 and some others share the class of an earlier one."""
    rng = np.random.Generator(np.random.Philox([seed, config.model.vocab_size]))
    vocab, classes = config.model.vocab_size, config.model.memory.num_classes
    shares = {1, *(2 + draws.distinct(rng, vocab - 2, vocab - classes - 1)).tolist()}
    found: list[int] = []
    for v in range(vocab):
        found.append(found[int(rng.integers(v))] if v in shares else max(found, default=-1) + 1)
    return torch.tensor(found, dtype=torch.int32)


def _v3(config: V3Config, rng: np.random.Generator, gain: float) -> State:
    state = _ends(rng, config.vocab_size, config.hidden, ("model.embed_tokens", "model.norm", "lm_head"))
    for layer in range(config.num_layers):
        drawn = v3_state(config, layer, rng, torch.bfloat16, gain=gain)
        state |= {f"model.layers.{layer}.{name}": x for name, x in _unstacked(drawn).items()}
    return state


def _unstacked(drawn: State) -> State:
    """Experts one by one, as checkpoints store them."""
    gate_up, down = drawn.get("mlp.experts.gate_up_proj"), drawn.get("mlp.experts.down_proj")
    if gate_up is None or down is None:
        return drawn
    state = {name: x for name, x in drawn.items() if name not in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")}
    for e, (w13_im, w2_mf) in enumerate(zip(gate_up, down, strict=True)):
        w1_fm, w3_fm = w13_im.chunk(2)
        for name, w in (("gate", w1_fm), ("up", w3_fm), ("down", w2_mf)):
            state[f"mlp.experts.{e}.{name}_proj.weight"] = w.clone()
    return state


def _v4(config: V4Config, rng: np.random.Generator, gain: float) -> State:
    n, m = config.mhc.streams, config.hidden
    state = _ends(rng, config.vocab_size, m, ("embed", "norm", "head"))
    state["hc_head_fn"] = draws.normal(rng, n, n * m, dtype=torch.float32, scale=(n * m) ** -0.5)
    state["hc_head_scale"] = draws.normal(rng, 1, dtype=torch.float32, scale=0.3, mean=1.5)
    state["hc_head_base"] = draws.normal(rng, n, dtype=torch.float32)
    for layer in range(config.num_layers):
        drawn = released_v4(v4_state(config, layer, rng, gain=gain))
        state |= {f"layers.{layer}.{name}": x for name, x in drawn.items()}
    return state


def released_v4(drawn: State) -> State:
    """The tensors of a block of V4 under transformers' names, renamed as in a released checkpoint."""
    names = dict(zip(checkpoint_names(1).values(), checkpoint_names(0).values(), strict=True))
    renamed = {f"self_attn.{theirs}": f"attn.{ours}" for theirs, ours in names.items()} | {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "mlp.gate.weight": "ffn.gate.weight",
        "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
        "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    }
    renamed |= {
        f"{site}_hc.{part}": f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "scale", "base")
    }
    state = State()
    for name, x in _unstacked(drawn).items():
        owner, _, last = name.rpartition("_proj.")
        owner, _, part = owner.rpartition(".")
        if name in renamed:
            state[renamed[name]] = x
        else:
            number = {"gate": "w1", "up": "w3", "down": "w2"}[part]
            state[f"ffn.{owner.removeprefix('mlp.')}.{number}.{last}"] = x
    return state


def _v41(config: V41Stack, rng: np.random.Generator, gain: float) -> State:
    state = _ends(rng, config.model.vocab_size, config.model.hidden, ("embed", "norm", "head"))
    for layer in range(config.model.num_layers):
        state |= v41_state(config, layer, rng, gain=gain)
    for layer, table in zip(config.model.engram.layers, memory_tables(config, rng), strict=True):
        state |= {f"layers.{layer}.engram.embed.{part}": x for part, x in zip(("weight", "scale"), table, strict=True)}
    return state


def _ends(rng: np.random.Generator, v: int, m: int, names: tuple[str, str, str]) -> State:
    """Embedding, last norm and head, in bf16."""
    deviation = math.sqrt(2 * max(math.log(v) - ENTROPY, 0.5))
    embed, norm, head = names
    return {
        f"{embed}.weight": draws.normal(rng, v, m, dtype=torch.bfloat16),
        f"{norm}.weight": draws.normal(rng, m, dtype=torch.bfloat16, scale=0.2, mean=1.0),
        f"{head}.weight": draws.normal(rng, v, m, dtype=torch.bfloat16, scale=deviation * m**-0.5),
    }
