"""The tensors of V3, V3.2 and V4 checkpoints one by one, and what tokens write and multiply, counted by loops.

Names, dtypes and shapes are those of v3-v32-v4.md sections 10.2 and 10.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from deeptwin.reference.presets import ModelConfig, V3Config, V4Config

Entry = tuple[str, str, tuple[int, ...]]  # name, stored dtype, shape


def tensors_v3(config: V3Config) -> Iterator[Entry]:
    """Every tensor of the published files, the draft module's copies included."""
    m, v = config.hidden, config.vocab_size
    yield from (("embed_tokens", "BF16", (v, m)), ("lm_head", "BF16", (v, m)), ("norm", "BF16", (m,)))
    for layer in range(config.num_layers + config.draft_layers):
        yield from _layer_v3(f"layers.{layer}", config, layer)
        if layer >= config.num_layers:
            yield f"layers.{layer}.eh_proj", "BF16", (m, 2 * m)
            yield from ((f"layers.{layer}.{name}", "BF16", (m,)) for name in ("enorm", "hnorm", "shared_head.norm"))
            yield from ((f"layers.{layer}.{name}", "BF16", (v, m)) for name in ("embed_tokens", "shared_head.head"))


def _layer_v3(prefix: str, config: V3Config, layer: int) -> Iterator[Entry]:
    m, a, attn = config.hidden, config.attention, f"{prefix}.self_attn"
    rope = a.rope.rope_dim
    yield f"{attn}.q_a_proj", "F8_B4", (a.q_lora_rank, m)
    yield f"{attn}.q_a_layernorm", "BF16", (a.q_lora_rank,)
    yield f"{attn}.q_b_proj", "F8_B4", (a.num_heads * (a.nope_dim + rope), a.q_lora_rank)
    yield f"{attn}.kv_a_proj_with_mqa", "F8_B4", (a.kv_lora_rank + rope, m)
    yield f"{attn}.kv_a_layernorm", "BF16", (a.kv_lora_rank,)
    yield f"{attn}.kv_b_proj", "F8_B4", (a.num_heads * (a.nope_dim + a.value_dim), a.kv_lora_rank)
    yield f"{attn}.o_proj", "F8_B4", (m, a.num_heads * a.value_dim)
    if config.index is not None:
        heads, dim = config.index.heads, config.index.dim
        yield f"{attn}.indexer.wq_b", "F8_B4", (heads * dim, a.q_lora_rank)
        yield f"{attn}.indexer.wk", "F8_B4", (dim, m)
        yield from ((f"{attn}.indexer.k_norm.{name}", "F32", (dim,)) for name in ("weight", "bias"))
        yield f"{attn}.indexer.weights_proj", "BF16", (heads, m)
    yield from ((f"{prefix}.{name}", "BF16", (m,)) for name in ("input_layernorm", "post_attention_layernorm"))
    if layer < config.dense_layers:
        yield from _gated(f"{prefix}.mlp", "F8_B4", config.dense_width, m)
        return
    e = config.router.num_experts
    yield f"{prefix}.mlp.gate", "BF16", (e, m)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (e,)
    yield from _gated(f"{prefix}.mlp.shared_experts", "F8_B4", config.expert_width * config.shared_experts, m)
    for expert in range(e):
        yield from _gated(f"{prefix}.mlp.experts.{expert}", "F8_B4", config.expert_width, m)


def tensors_v4(config: V4Config) -> Iterator[Entry]:
    """Every tensor of the published files."""
    m, v = config.hidden, config.vocab_size
    yield from (("embed", "BF16", (v, m)), ("head", "BF16", (v, m)), ("norm", "BF16", (m,)))
    yield from _head_mix("", config)
    for layer in range(config.num_layers):
        yield from _layer_v4(f"layers.{layer}", config, layer)
    for number in range(config.draft_layers):
        yield from _layer_v4(f"mtp.{number}", config, config.num_layers + number)
        yield from ((f"mtp.{number}.{name}", "F8_B1", (m, m)) for name in ("e_proj", "h_proj"))
        yield from ((f"mtp.{number}.{name}", "BF16", (m,)) for name in ("enorm", "hnorm", "norm"))
        yield from _head_mix(f"mtp.{number}.", config)


def _head_mix(prefix: str, config: V4Config) -> Iterator[Entry]:
    n = config.mhc.streams
    yield f"{prefix}hc_head_fn", "F32", (n, n * config.hidden)
    yield from ((f"{prefix}hc_head_{name}", "F32", (k,)) for name, k in (("base", n), ("scale", 1)))


def _layer_v4(prefix: str, config: V4Config, layer: int) -> Iterator[Entry]:
    m, a, e, n = config.hidden, config.attention, config.router.num_experts, config.mhc.streams
    width, q, d = a.num_heads * a.head_dim, a.q_lora_rank, a.head_dim
    for name, shape in (("wq_a", (q, m)), ("wq_b", (width, q)), ("wkv", (d, m))):
        yield f"{prefix}.attn.{name}", "F8_B1", shape
    yield f"{prefix}.attn.wo_a", "F8_B1", (a.o_groups * a.o_lora_rank, width // a.o_groups)
    yield f"{prefix}.attn.wo_b", "F8_B1", (m, a.o_groups * a.o_lora_rank)
    yield from ((f"{prefix}.attn.{name}", "BF16", (k,)) for name, k in (("q_norm", q), ("kv_norm", d)))
    yield f"{prefix}.attn.attn_sink", "F32", (a.num_heads,)
    ratio = a.compress_ratios[layer]
    if ratio:
        yield from _compressor(f"{prefix}.attn.compressor", m, d, ratio)
    if ratio == 4:
        yield f"{prefix}.attn.indexer.wq_b", "F8_B1", (a.index_heads * a.index_dim, q)
        yield f"{prefix}.attn.indexer.weights_proj", "BF16", (a.index_heads, m)
        yield from _compressor(f"{prefix}.attn.indexer.compressor", m, a.index_dim, ratio)
    yield from ((f"{prefix}.{name}", "BF16", (m,)) for name in ("attn_norm", "ffn_norm"))
    for site in ("hc_attn", "hc_ffn"):
        outputs = 2 * n + n * n
        yield f"{prefix}.{site}_fn", "F32", (outputs, n * m)
        yield from ((f"{prefix}.{site}_{name}", "F32", (k,)) for name, k in (("base", outputs), ("scale", 3)))
    yield f"{prefix}.ffn.gate", "BF16", (e, m)
    if layer < config.hash_layers:
        yield f"{prefix}.ffn.gate.tid2eid", "I64", (config.vocab_size, config.router.topk)
    else:
        yield f"{prefix}.ffn.gate.bias", "F32", (e,)
    yield from _gated(f"{prefix}.ffn.shared_experts", "F8_B1", config.expert_width * config.shared_experts, m)
    for expert in range(e):
        yield from _gated(f"{prefix}.ffn.experts.{expert}", "I8", config.expert_width, m)


def _compressor(prefix: str, m: int, d: int, ratio: int) -> Iterator[Entry]:
    wide = 2 * d if ratio == 4 else d
    yield from ((f"{prefix}.{name}", "BF16", (wide, m)) for name in ("wkv", "wgate"))
    yield f"{prefix}.ape", "F32", (ratio, wide)
    yield f"{prefix}.norm", "BF16", (d,)


def _gated(prefix: str, dtype: str, f: int, m: int) -> Iterator[Entry]:
    yield from ((f"{prefix}.{name}", dtype, shape) for name, shape in (("w1", (f, m)), ("w3", (f, m)), ("w2", (m, f))))


def written(config: ModelConfig, *, context: int) -> Tensor:
    """Bytes after `context` tokens, which are appended one by one to every layer; then the states of all layers."""
    assert isinstance(config, V3Config | V4Config)
    if isinstance(config, V3Config):
        bf16 = 2 * (config.attention.kv_lora_rank + config.attention.rope.rope_dim)
        size = bf16 if config.index is None else fp8_latent(config) + config.index.dim + 4
        return torch.tensor([sum(size for _ in range(config.num_layers) for _ in range(context)), 0])
    a, grown, states = config.attention, 0, 0
    rope = config.rope_main.rope_dim
    scales = len(range(0, a.head_dim - rope, 64))
    entry = (a.head_dim - rope) + rope * 2 + scales + 1
    key = a.index_dim // 2 + len(range(0, a.index_dim, 32))
    for ratio in a.compress_ratios[: config.num_layers]:
        states += sum(entry for _ in range(a.window))
        if ratio:
            grown += sum(entry + (key if ratio == 4 else 0) for p in range(context) if (p + 1) % ratio == 0)
            # two fp32 buffers, logits and values
            states += 2 * 4 * (8 * 2 * (a.head_dim + a.index_dim) if ratio == 4 else ratio * a.head_dim)
    return torch.tensor([grown, states])


def fp8_latent(config: V3Config) -> int:
    """Codes, an fp32 scale for each 128 of them, and the rotated channels in bf16."""
    c = config.attention.kv_lora_rank
    return c + 4 * len(range(0, c, 128)) + 2 * config.attention.rope.rope_dim


def multiplied(config: ModelConfig, *, context: int) -> Tensor:
    """Two operations for every stored value that a token meets, every scored key and every attended one."""
    assert isinstance(config, V3Config | V4Config)
    listed = tensors_v3(config) if isinstance(config, V3Config) else tensors_v4(config)
    linear = 0
    for name, dtype, shape in listed:
        draft = name.startswith("mtp") or name.startswith(tuple(_draft_prefixes(config)))
        expert = name.partition(".experts.")[2].partition(".")[0]
        idle = expert != "" and int(expert) >= config.router.topk  # the first ones stand for those of a token
        if not draft and not idle and not name.startswith("embed") and dtype != "I64":
            linear += 2 * prod(shape)
    indexer = core = 0
    for layer in range(config.num_layers):
        scored, attended, heads, width = _attended(config, layer, context)
        indexer += 2 * scored
        core += 2 * attended * heads * width
    units = 2 * linear + indexer * (2 if isinstance(config, V3Config) else 1) + 4 * core
    return torch.tensor([linear, indexer, core, units])


def _draft_prefixes(config: V3Config | V4Config) -> list[str]:
    blocks = range(config.num_layers, config.num_layers + config.draft_layers)
    return [f"layers.{layer}." for layer in blocks]


def _attended(config: V3Config | V4Config, layer: int, context: int) -> tuple[int, int, int, int]:
    """Multiplications of the index scores, attended keys, heads, and channels of a key and its value."""
    if isinstance(config, V3Config):
        a, index = config.attention, config.index
        width = a.kv_lora_rank + a.rope.rope_dim + a.kv_lora_rank
        if index is None:
            return 0, context, a.num_heads, width
        return context * index.heads * index.dim, min(context, index.topk), a.num_heads, width
    own = config.attention
    ratio, near = own.compress_ratios[layer], min(context, own.window)
    blocks = context // ratio if ratio else 0
    seen = min(blocks, own.index_topk) if ratio == 4 else blocks
    scored = blocks * own.index_heads * own.index_dim if ratio == 4 else 0
    return scored, seen + near, own.num_heads, 2 * own.head_dim
