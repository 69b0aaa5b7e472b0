"""Drawn weights of whole blocks, under the names of checkpoints, as cards and tests take them.

Choices between experts are made by biases that lie far apart, or by a table: an honest rounding never changes one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.block_v41 import V41Stack
from deeptwin.reference.block_weights import V3BlockWeights, V4BlockWeights, V41BlockWeights
from deeptwin.reference.config import FP8_32X32, MXFP4, Q8, MhcConfig, QuantFormat
from deeptwin.reference.engram_vocab import hash_layout
from deeptwin.reference.presets import V3Config, V4Config
from deeptwin.reference.quant import quantize
from deeptwin.reference.topology import LayerMode
from deeptwin.reference.v4_weights import checkpoint_names, v4_shapes

from . import draws

State = dict[str, Tensor]
MARGIN = 4.0  # between the biases of two experts: scores of drawn rows lie closer together


class Drawing:
    """Draws tensors of one dtype into a state dict."""

    def __init__(self, rng: np.random.Generator, dtype: torch.dtype) -> None:
        self.rng, self.dtype, self.state = rng, dtype, State()

    def matrix(self, name: str, *shape: int, gain: float = 1.0, dtype: torch.dtype | None = None) -> None:
        """Normal values that keep the size of a row."""
        scale = gain * shape[-1] ** -0.5
        self.state[name] = draws.normal(self.rng, *shape, dtype=dtype or self.dtype, scale=scale)

    def norm(self, name: str, width: int) -> None:
        """A weight near one."""
        self.state[name] = draws.normal(self.rng, width, dtype=self.dtype, scale=0.2, mean=1.0)

    def quantised(self, name: str, rows: int, columns: int, fmt: QuantFormat, gain: float = 1.0) -> None:
        """Codes and scales of normal values."""
        w = draws.normal(self.rng, rows, columns, dtype=torch.bfloat16, scale=gain * columns**-0.5)
        self.state[f"{name}.weight"], self.state[f"{name}.scale"] = quantize(w, fmt=fmt)

    def bias(self, name: str, experts: int) -> None:
        """Biases in steps of `MARGIN`, in any order."""
        steps = torch.from_numpy(self.rng.permutation(experts).astype(np.float32))
        self.state[name] = MARGIN * (steps - experts / 2)

    def table(self, name: str, vocab: int, experts: int, topk: int) -> None:
        """Distinct experts of every token id."""
        rows = [self.rng.permutation(experts)[:topk] for _ in range(vocab)]
        self.state[name] = torch.from_numpy(np.stack(rows))

    def site(self, prefix: str, mhc: MhcConfig, hidden: int) -> None:
        """A mixing site whose matrices are peaked enough to be far from symmetric."""
        self.matrix(prefix + "fn", mhc.coefficients, mhc.streams * hidden, dtype=torch.float32)
        self.state[prefix + "scale"] = draws.normal(self.rng, 3, dtype=torch.float32, scale=0.3, mean=1.5)
        self.state[prefix + "base"] = draws.normal(self.rng, mhc.coefficients, dtype=torch.float32)


def v3_state(config: V3Config, layer: int, rng: np.random.Generator, dtype: torch.dtype, *, gain: float = 1.0) -> State:
    """The tensors of one block under transformers' names without a prefix; `gain` sharpens attention."""
    d, a, m = Drawing(rng, dtype), config.attention, config.hidden
    q_in = a.q_lora_rank or m
    if a.q_lora_rank:
        d.matrix("self_attn.q_a_proj.weight", a.q_lora_rank, m)
        d.norm("self_attn.q_a_layernorm.weight", a.q_lora_rank)
    name = "q_b_proj" if a.q_lora_rank else "q_proj"
    d.matrix(f"self_attn.{name}.weight", a.num_heads * a.head_dim, q_in, gain=gain)
    d.matrix("self_attn.kv_a_proj_with_mqa.weight", a.latent_dim, m)
    d.norm("self_attn.kv_a_layernorm.weight", a.kv_lora_rank)
    d.matrix("self_attn.kv_b_proj.weight", a.num_heads * (a.nope_dim + a.value_dim), a.kv_lora_rank)
    d.matrix("self_attn.o_proj.weight", m, a.num_heads * a.value_dim)
    if config.index is not None:
        index = config.index
        d.matrix("self_attn.indexer.wq_b.weight", index.heads * index.dim, a.q_lora_rank)
        d.matrix("self_attn.indexer.wk.weight", index.dim, m)
        d.norm("self_attn.indexer.k_norm.weight", index.dim)
        d.state["self_attn.indexer.k_norm.bias"] = draws.normal(rng, index.dim, dtype=dtype, scale=0.3)
        d.matrix("self_attn.indexer.weights_proj.weight", index.heads, m, dtype=torch.float32)
    d.norm("input_layernorm.weight", m)
    d.norm("post_attention_layernorm.weight", m)
    if config.is_dense(layer):
        _gated(d, "mlp.", m, config.dense_width)
    else:
        _experts(d, config, table=False)
    return d.state


def v3_block(
    config: V3Config, layer: int, rng: np.random.Generator, dtype: torch.dtype, *, gain: float = 1.0
) -> V3BlockWeights:
    """One drawn block of V3 or V3.2."""
    state = v3_state(config, layer, rng, dtype, gain=gain)
    return V3BlockWeights.from_state_dict(state, prefix="", config=config, layer=layer)


def v4_state(config: V4Config, layer: int, rng: np.random.Generator, *, gain: float = 1.0) -> State:
    """The tensors of one block under transformers' names without a prefix, plain weights in bf16."""
    d, attn = Drawing(rng, torch.bfloat16), config.attn(layer)
    names = checkpoint_names(1)
    for field, shape in v4_shapes(attn).items():
        name = "self_attn." + names[field]
        if field.endswith(("norm_a", "norm_d", "norm_c")):
            d.norm(name, *shape)
        elif field.endswith(("sink_h", "bias_rw")):
            d.state[name] = draws.normal(rng, *shape, dtype=torch.float32)
        else:
            d.matrix(name, *shape, gain=gain if field == "wq_a" else 1.0)
    d.norm("input_layernorm.weight", config.hidden)
    d.norm("post_attention_layernorm.weight", config.hidden)
    for prefix in ("attn_hc.", "ffn_hc."):
        d.site(prefix, config.mhc, config.hidden)
    _experts(d, config, table=layer < config.hash_layers)
    return d.state


def v4_block(config: V4Config, layer: int, rng: np.random.Generator, *, gain: float = 1.0) -> V4BlockWeights:
    """One drawn block of V4 with plain weights in bf16."""
    state = v4_state(config, layer, rng, gain=gain)
    return V4BlockWeights.from_transformers(state, prefix="", config=config, layer=layer)


def v41_state(config: V41Stack, layer: int, rng: np.random.Generator, *, gain: float = 1.0) -> State:
    """The tensors of one block under the names of checkpoints, quantised as released."""
    d, model, csa2 = Drawing(rng, torch.bfloat16), config.model, config.csa2
    prefix, m, a, head = f"layers.{layer}.", model.hidden, model.attention, csa2.head_dim
    mode, rank, width = csa2.topology.mode(layer), a.q_lora_rank, a.num_heads * csa2.head_dim
    attn, out = prefix + "attn.", a.o_groups * a.o_lora_rank
    for name, size in ((prefix + "attn_norm", m), (attn + "q_norm", rank), (attn + "kv_norm", head)):
        d.norm(f"{name}.weight", size)
    d.state[attn + "attn_sink"] = draws.normal(rng, a.num_heads, dtype=torch.float32)
    for name, rows, columns in (
        ("wq_a", rank, m),
        ("wkv", head, m),
        ("wo_a", out, width // a.o_groups),
        ("wo_b", m, out),
    ):
        d.quantised(attn + name, rows, columns, FP8_32X32)
    d.quantised(attn + "wq_b", width, rank, FP8_32X32, gain)
    if mode is LayerMode.FULL:
        for part in ("wkv", "wgate")[: a.compress_ratios[layer]]:
            d.matrix(f"{attn}compressor.{part}.weight", head, m)
        d.norm(attn + "compressor.norm.weight", head)
        d.matrix(attn + "indexer.wk.weight", a.index_dim, head)
        d.norm(attn + "indexer.k_norm.weight", a.index_dim)
    if mode in (LayerMode.FULL, LayerMode.REINDEX):
        d.quantised(attn + "indexer.wq_b", a.index_heads * a.index_dim, rank, FP8_32X32)
        d.matrix(attn + "indexer.weights_proj.weight", a.index_heads, m)
    for site in ("hc_attn_", "hc_ffn_"):
        d.site(prefix + site, model.mhc, m)
    d.norm(prefix + "ffn_norm.weight", m)
    ffn, moe = prefix + "ffn.", model.moe
    d.matrix(ffn + "gate.weight", moe.experts, m)
    d.bias(ffn + "gate.bias", moe.experts)
    d.state[ffn + "gate.bias_vl"] = -d.state[ffn + "gate.bias"]  # images go to the experts that text avoids
    for owner, f, fmt in (
        *((f"experts.{e}.", moe.width, MXFP4) for e in range(moe.experts)),
        ("shared_experts.", moe.shared_experts * moe.width, FP8_32X32),
    ):
        for name, rows, columns in (("w1", f, m), ("w2", m, f), ("w3", f, m)):
            d.quantised(ffn + owner + name, rows, columns, fmt)
    engram = config.model.memory
    if layer in engram.layer_ids:
        d.quantised(prefix + "engram.wkv", (engram.streams + 1) * m, engram.embed_dim, FP8_32X32)
        for name in ("q_weight", "k_weight"):
            d.state[f"{prefix}engram.{name}"] = draws.normal(rng, engram.streams, m, dtype=torch.bfloat16, mean=1.0)
    return d.state


def v41_block(config: V41Stack, layer: int, rng: np.random.Generator, *, gain: float = 1.0) -> V41BlockWeights:
    """One drawn block of V4.1."""
    state, model = v41_state(config, layer, rng, gain=gain), config.model
    return V41BlockWeights.from_state_dict(state, config=model, csa2=config.csa2, engram=model.memory, layer=layer)


def memory_tables(config: V41Stack, rng: np.random.Generator) -> tuple[tuple[Tensor, Tensor], ...]:
    """Codes and scales of the table of every memory layer."""
    engram = config.model.memory
    tables = []
    for rows in hash_layout(engram).num_rows:
        drawn = draws.normal(rng, rows, engram.head_dim, dtype=torch.bfloat16)
        tables.append(quantize(drawn, fmt=Q8))
    return tuple(tables)


def _gated(d: Drawing, prefix: str, m: int, f: int) -> None:
    for name, rows, columns in (("gate_proj", f, m), ("up_proj", f, m), ("down_proj", m, f)):
        d.matrix(f"{prefix}{name}.weight", rows, columns)


def _experts(d: Drawing, config: V3Config | V4Config, *, table: bool) -> None:
    m, f, e, topk = config.hidden, config.expert_width, config.router.num_experts, config.router.topk
    d.matrix("mlp.gate.weight", e, m)
    if table:
        d.table("mlp.gate.tid2eid", config.vocab_size, e, topk)
    else:
        d.bias("mlp.gate.e_score_correction_bias", e)
    d.matrix("mlp.experts.gate_up_proj", e, 2 * f, m)
    d.matrix("mlp.experts.down_proj", e, m, f)
    _gated(d, "mlp.shared_experts.", m, config.shared_experts * f)
