"""The tensors of a checkpoint one by one, as a peer of the formulas of `reference/accounting.py`; V4.1's stand here.

Names, dtypes and shapes are those of the released file (v41-blocks.md section 0.3), one entry for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from deeptwin.reference.presets import ModelConfig, V3Config, V4Config, V41Config

from .accounting_earlier import tensors_v3, tensors_v4

Entry = tuple[str, str, tuple[int, ...]]  # name, stored dtype, shape
# values that share one scale
SCALED = {"I8": (1, 32), "F8": (32, 32), "F8_ROWS": (1, 32), "F8_B1": (128, 128), "F8_B4": (128, 128)}
NO_PARAMETERS = ("I64",)


def checkpoint(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Parameters by stored dtype, and bytes, counted over the list of tensors."""
    return counted(listed(config))


def listed(config: ModelConfig) -> Iterator[Entry]:
    """Every tensor of the checkpoint."""
    if isinstance(config, V3Config):
        return tensors_v3(config)
    return tensors_v4(config) if isinstance(config, V4Config) else tensors(config)


def counted(entries: Iterable[Entry]) -> tuple[Tensor, Tensor]:
    """Parameters by stored dtype, and bytes, of a list of tensors."""
    counts, size = dict.fromkeys(("I8", "F8", "BF16", "F32"), 0), 0
    for name, dtype, shape in entries:
        if min(shape) < 1:
            raise ValueError(f"{name}: expected positive sizes, got {shape}")
        if dtype not in NO_PARAMETERS:
            counts[dtype.partition("_")[0]] += prod(shape)
        size += prod(shape) * {"BF16": 2, "F32": 4, "I64": 8}.get(dtype, 1) // (2 if dtype == "I8" else 1)
        if dtype in SCALED:
            scales = prod(-(-n // block) for n, block in zip(shape, SCALED[dtype], strict=True))
            size += scales * (4 if dtype == "F8_B4" else 1)
    return torch.tensor(list(counts.values())), torch.tensor([size])


def tensors(config: V41Config) -> Iterator[Entry]:
    """Every tensor of the model."""
    m, v = config.hidden, config.vocab_size
    yield from (("embed", "BF16", (v, m)), ("head", "BF16", (v, m)), ("norm", "BF16", (m,)))
    yield from ((f"image_{name}", "BF16", (m,)) for name in ("start", "end", "newline"))
    for layer in range(config.num_layers):
        yield from _block(f"layers.{layer}", config, config.moe.experts)
        yield from _sources(f"layers.{layer}.attn", config, layer)
    for layer, rows in zip(config.engram.layers, config.engram.table_rows, strict=True):
        yield from _engram(f"layers.{layer}.engram", config, rows)
    for number in range(config.draft.layers):
        yield from _block(f"mtp.{number}", config, config.draft.experts)
    yield "mtp.0.main_proj", "F8", (m, len(config.draft.target_layers) * m)
    yield from (("mtp.0.main_norm", "BF16", (m,)), ("mtp.last.norm", "BF16", (m,)))
    yield from ((f"mtp.last.markov_head.{name}", "BF16", (v, config.draft.markov_rank)) for name in ("embed", "head"))
    yield "mtp.last.confidence_head.proj", "BF16", (1, m + config.draft.markov_rank)
    yield from _vision(config)


def _block(prefix: str, config: V41Config, experts: int) -> Iterator[Entry]:
    m, f, a = config.hidden, config.moe.width, config.attention
    q, d, width = a.q_lora_rank, a.head_dim, a.num_heads * a.head_dim
    for name, shape in (("wq_a", (q, m)), ("wq_b", (width, q)), ("wkv", (d, m))):
        yield f"{prefix}.attn.{name}", "F8", shape
    yield f"{prefix}.attn.wo_a", "F8", (a.o_groups * a.o_lora_rank, width // a.o_groups)
    yield f"{prefix}.attn.wo_b", "F8", (m, a.o_groups * a.o_lora_rank)
    yield from ((f"{prefix}.attn.{name}", "BF16", (n,)) for name, n in (("q_norm", q), ("kv_norm", d)))
    yield from ((f"{prefix}.{name}", "BF16", (m,)) for name in ("attn_norm", "ffn_norm"))
    yield f"{prefix}.attn.attn_sink", "F32", (a.num_heads,)
    yield f"{prefix}.ffn.gate.weight", "BF16", (experts, m)
    yield from ((f"{prefix}.ffn.gate.{name}", "F32", (experts,)) for name in ("bias", "bias_vl"))
    for expert in range(experts):
        for name, shape in (("w1", (f, m)), ("w2", (m, f)), ("w3", (f, m))):
            yield f"{prefix}.ffn.experts.{expert}.{name}", "I8", shape
    wide = f * config.moe.shared_experts
    for name, shape in (("w1", (wide, m)), ("w2", (m, wide)), ("w3", (wide, m))):
        yield f"{prefix}.ffn.shared_experts.{name}", "F8", shape
    n = config.mhc.streams
    outputs = n + n + n * n
    for site in ("hc_attn", "hc_ffn"):
        yield f"{prefix}.{site}_fn", "F32", (outputs, n * m)
        yield from ((f"{prefix}.{site}_{name}", "F32", (k,)) for name, k in (("base", outputs), ("scale", 3)))


def _sources(prefix: str, config: V41Config, layer: int) -> Iterator[Entry]:
    m, a = config.hidden, config.attention
    d, i = a.head_dim, a.index_dim
    if layer in a.kv_source_layers:
        yield f"{prefix}.compressor.wkv", "BF16", (d, m)
        yield f"{prefix}.compressor.norm", "BF16", (d,)
        if a.compress_ratios[layer] > 1:
            yield f"{prefix}.compressor.wgate", "BF16", (d, m)
        yield f"{prefix}.indexer.wk", "BF16", (i, d)
        yield f"{prefix}.indexer.k_norm", "BF16", (i,)
    if layer in a.index_source_layers:
        yield f"{prefix}.indexer.wq_b", "F8", (a.index_heads * i, a.q_lora_rank)
        yield f"{prefix}.indexer.weights_proj", "BF16", (a.index_heads, m)


def _engram(prefix: str, config: V41Config, rows: int) -> Iterator[Entry]:
    e, n, m = config.engram, config.mhc.streams, config.hidden
    read = e.head_dim * sum(e.heads for _ in range(2, e.max_ngram + 1))
    yield f"{prefix}.embed", "F8_ROWS", (rows, e.head_dim)
    yield f"{prefix}.wkv", "F8", (n * m + m, read)
    yield from ((f"{prefix}.{name}", "BF16", (n, m)) for name in ("q_weight", "k_weight"))


def _vision(config: V41Config) -> Iterator[Entry]:
    s, m = config.vision, config.hidden
    d, f = s.hidden, s.width
    layers = [("vision.patch_embed.proj", (d, 3 * s.patch * s.patch), True)]
    for number in range(s.layers):
        block = f"vision.blocks.{number}"
        layers += [(f"{block}.attn.wqkv", (3 * d, d), True), (f"{block}.attn.wo", (d, d), True)]
        layers += [(f"{block}.mlp.w1", (2 * f, d), False), (f"{block}.mlp.w2", (d, f), False)]
        yield from ((f"{block}.{name}", "BF16", (d,)) for name in ("norm1", "norm2"))
    layers += [("aligner.w1", (m, d * s.downsample**2), True), ("aligner.w2", (m, m), True)]
    yield "vision.norm", "BF16", (d,)
    for name, shape, has_bias in layers:
        yield f"{name}.weight", "BF16", shape
        if has_bias:
            yield f"{name}.bias", "BF16", shape[:1]
