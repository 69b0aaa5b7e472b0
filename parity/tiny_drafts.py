"""Drawn weights of draft modules beside the tiny models: embedding and head are the model's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.block_v41 import V41Stack
from deeptwin.reference.config import FP8_32X32, DraftBlock
from deeptwin.reference.dspark_state import DraftMain, DraftModel
from deeptwin.reference.dspark_weights import draft_main, draft_model
from deeptwin.reference.model_weights import V3Model, V4Model, V41Model
from deeptwin.reference.mtp_weights import MtpV3Weights, MtpV4Weights
from deeptwin.reference.presets import V3Config, V4Config

from . import draws
from .block_draws import MARGIN, Drawing, State, v3_state, v4_state, v41_state
from .tiny_models import BIAS, GENERATIONS, released_v4

TinyDraft = MtpV3Weights | MtpV4Weights | tuple[DraftModel, DraftMain]


def tiny_draft(
    generation: str,
    config: V3Config | V4Config | V41Stack,
    weights: V3Model | V4Model | V41Model,
    *,
    seed: int,
    gamma: int = 3,
) -> TinyDraft:
    """The draft module of a tiny model, as `drafter_of` takes it; for V4.1 of blocks of `gamma`.

    Raises:
        ValueError: the configuration or the weights are not of that generation.
    """
    rng = np.random.Generator(np.random.Philox([seed, weights.embed_vm.shape[0], 16 + GENERATIONS.index(generation)]))
    if isinstance(config, V3Config) and isinstance(weights, V3Model):
        return _v3(config, weights, rng)
    if isinstance(config, V4Config) and isinstance(weights, V4Model):
        return _v4(config, weights, rng)
    if isinstance(config, V41Stack) and isinstance(weights, V41Model):
        state = tiny_draft_state(config, rng) | {"embed.weight": weights.embed_vm, "head.weight": weights.head_vm}
        window, noise = config.csa2.sliding(decoder=False), config.model.draft.noise_token_id
        block = DraftBlock(draft=gamma, noise_token=noise, window=window)
        model = draft_model(state, config=config, block=block, temperatures=(1.0,) * gamma)
        return model, draft_main(state, config=config)
    raise ValueError(f"weights: expected those of a tiny {generation}, got {type(weights).__name__}")


def tiny_draft_state(config: V41Stack, rng: np.random.Generator) -> State:
    """The drafting tensors of a tiny V4.1 under the names of released checkpoints."""
    model, draft = config.model, config.model.draft
    m, v, last = model.hidden, model.vocab_size, f"mtp.{draft.layers - 1}."
    smaller = replace(config, model=replace(model, moe=replace(model.moe, experts=draft.experts, topk=draft.topk)))
    d = Drawing(rng, torch.bfloat16)
    for i in range(draft.layers):
        number = model.num_layers + i
        drawn = v41_state(smaller, number, rng)
        d.state |= {name.replace(f"layers.{number}.", f"mtp.{i}."): x for name, x in drawn.items()}
        for bias in ("gate.bias", "gate.bias_vl"):
            d.state[f"mtp.{i}.ffn.{bias}"] *= BIAS / MARGIN
    d.quantised("mtp.0.main_proj", m, m * len(draft.target_layers), FP8_32X32)
    d.norm("mtp.0.main_norm.weight", m)
    d.norm(last + "norm.weight", m)
    for part in ("embed", "head"):
        d.matrix(f"{last}markov_head.{part}.weight", v, draft.markov_rank)
    d.matrix(last + "confidence_head.proj.weight", 1, m + draft.markov_rank)
    return d.state


def _v3(config: V3Config, weights: V3Model, rng: np.random.Generator) -> MtpV3Weights:
    m, d = config.hidden, Drawing(rng, torch.bfloat16)
    d.state |= v3_state(config, config.num_layers, rng, torch.bfloat16)
    d.state["mlp.gate.e_score_correction_bias"] *= BIAS / MARGIN
    for name in ("enorm", "hnorm", "shared_head.norm"):
        d.norm(f"{name}.weight", m)
    d.matrix("eh_proj.weight", m, 2 * m)
    shared = {"embed_tokens.weight": weights.embed_vm, "shared_head.head.weight": weights.head_vm}
    return MtpV3Weights.from_state_dict(d.state | shared, prefix="", config=config)


def _v4(config: V4Config, weights: V4Model, rng: np.random.Generator) -> MtpV4Weights:
    m, n, d = config.hidden, config.mhc.streams, Drawing(rng, torch.bfloat16)
    d.state |= released_v4(v4_state(config, config.num_layers, rng))
    d.state["ffn.gate.bias"] *= BIAS / MARGIN
    for name in ("enorm", "hnorm", "norm"):
        d.norm(f"{name}.weight", m)
    for name in ("e_proj", "h_proj"):
        d.matrix(f"{name}.weight", m, m)
    d.matrix("hc_head_fn", n, n * m, dtype=torch.float32)
    d.state["hc_head_scale"] = torch.ones(1)
    d.state["hc_head_base"] = draws.normal(rng, n, dtype=torch.float32)
    prefixed: dict[str, Tensor] = {f"mtp.0.{name}": x for name, x in d.state.items()}
    shared = {"embed.weight": weights.embed_vm, "head.weight": weights.head_vm}
    return MtpV4Weights.from_state_dict(prefixed | shared, prefix="mtp.0.", config=config)
