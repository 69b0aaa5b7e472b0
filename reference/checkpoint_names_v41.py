"""The tensors of a V4.1 checkpoint: text model, memory, drafts, vision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .account_terms import Stored
from .presets import V41Config

Named = tuple[str, Stored, tuple[int, ...]]  # name, how it is stored, logical shape


def matrices(prefix: str, stored: Stored, shapes: Mapping[str, tuple[int, int]]) -> Iterator[Named]:
    """Matrices, which are called `X.weight`."""
    return ((f"{prefix}{name}.weight", stored, shape) for name, shape in shapes.items())


def vectors(prefix: str, stored: Stored, sizes: Mapping[str, int]) -> Iterator[Named]:
    """Vectors, by their whole names."""
    return ((prefix + name, stored, (size,)) for name, size in sizes.items())


def named_v41(config: V41Config) -> Iterator[Named]:
    """Everything that the file stores."""
    m, v, d = config.hidden, config.vocab_size, config.draft
    yield from matrices("", Stored.BF16, {"embed": (v, m), "head": (v, m)})
    yield from vectors("", Stored.BF16, dict.fromkeys(("norm.weight", "image_start", "image_end", "image_newline"), m))
    for layer in range(config.num_layers):
        yield from _block(f"layers.{layer}.", config, config.moe.experts)
        yield from _sources(f"layers.{layer}.attn.", config, layer)
    for layer, rows in zip(config.engram.layers, config.engram.table_rows, strict=True):
        yield from _memory(f"layers.{layer}.engram.", config, rows)
    for draft in range(d.layers):
        yield from _block(f"mtp.{draft}.", config, d.experts)
    if d.layers:
        last = f"mtp.{d.layers - 1}."
        yield from matrices("mtp.0.", Stored.FP8_TILES, {"main_proj": (m, len(d.target_layers) * m)})
        yield from vectors("mtp.0.", Stored.BF16, {"main_norm.weight": m})
        yield from vectors(last, Stored.BF16, {"norm.weight": m})
        ends = {"markov_head.embed": (v, d.markov_rank), "markov_head.head": (v, d.markov_rank)}
        yield from matrices(last, Stored.BF16, ends | {"confidence_head.proj": (1, m + d.markov_rank)})
    yield from _vision(config)


def _block(prefix: str, config: V41Config, experts: int) -> Iterator[Named]:
    m, a, mhc, f = config.hidden, config.attention, config.mhc, config.moe.width
    width, out = a.num_heads * a.head_dim, a.o_groups * a.o_lora_rank
    attention = {
        "wq_a": (a.q_lora_rank, m),
        "wq_b": (width, a.q_lora_rank),
        "wkv": (a.head_dim, m),
        "wo_a": (out, width // a.o_groups),
        "wo_b": (m, out),
    }
    yield from matrices(prefix + "attn.", Stored.FP8_TILES, attention)
    norms = {"attn.q_norm.weight": a.q_lora_rank, "attn.kv_norm.weight": a.head_dim}
    yield from vectors(prefix, Stored.BF16, norms | {"attn_norm.weight": m, "ffn_norm.weight": m})
    yield from vectors(prefix, Stored.FP32, {"attn.attn_sink": a.num_heads})
    yield from matrices(prefix, Stored.BF16, {"ffn.gate": (experts, m)})
    yield from vectors(prefix, Stored.FP32, {"ffn.gate.bias": experts, "ffn.gate.bias_vl": experts})
    for expert in range(experts):
        shapes = {"w1": (f, m), "w3": (f, m), "w2": (m, f)}
        yield from matrices(f"{prefix}ffn.experts.{expert}.", Stored.MXFP4, shapes)
    wide = f * config.moe.shared_experts
    shapes = {"w1": (wide, m), "w3": (wide, m), "w2": (m, wide)}
    yield from matrices(prefix + "ffn.shared_experts.", Stored.FP8_TILES, shapes)
    for site in ("hc_attn_", "hc_ffn_"):
        yield f"{prefix}{site}fn", Stored.FP32, (mhc.coefficients, mhc.streams * m)
        yield from vectors(prefix + site, Stored.FP32, {"base": mhc.coefficients, "scale": 3})


def _sources(prefix: str, config: V41Config, layer: int) -> Iterator[Named]:
    m, a = config.hidden, config.attention
    if layer in a.kv_source_layers:
        gate = {"wgate": (a.head_dim, m)} if a.compress_ratios[layer] > 1 else {}
        yield from matrices(prefix + "compressor.", Stored.BF16, {"wkv": (a.head_dim, m)} | gate)
        yield from matrices(prefix, Stored.BF16, {"indexer.wk": (a.index_dim, a.head_dim)})
        norms = {"compressor.norm.weight": a.head_dim, "indexer.k_norm.weight": a.index_dim}
        yield from vectors(prefix, Stored.BF16, norms)
    if layer in a.index_source_layers:
        yield from matrices(prefix, Stored.FP8_TILES, {"indexer.wq_b": (a.index_heads * a.index_dim, a.q_lora_rank)})
        yield from matrices(prefix, Stored.BF16, {"indexer.weights_proj": (a.index_heads, m)})


def _memory(prefix: str, config: V41Config, rows: int) -> Iterator[Named]:
    e, n, m = config.engram, config.mhc.streams, config.hidden
    yield from matrices(prefix, Stored.FP8_ROWS, {"embed": (rows, e.head_dim)})
    yield from matrices(prefix, Stored.FP8_TILES, {"wkv": ((n + 1) * m, e.rows_per_token * e.head_dim)})
    yield from ((prefix + name, Stored.BF16, (n, m)) for name in ("q_weight", "k_weight"))


def _vision(config: V41Config) -> Iterator[Named]:
    s, m = config.vision, config.hidden
    d, f = s.hidden, s.width
    biased = {"vision.patch_embed.proj": (d, 3 * s.patch**2)}
    for block in range(s.layers):
        prefix = f"vision.blocks.{block}."
        biased |= {prefix + "attn.wqkv": (3 * d, d), prefix + "attn.wo": (d, d)}
        yield from matrices(prefix, Stored.BF16, {"mlp.w1": (2 * f, d), "mlp.w2": (d, f)})
        yield from vectors(prefix, Stored.BF16, {"norm1.weight": d, "norm2.weight": d})
    biased |= {"aligner.w1": (m, d * s.downsample**2), "aligner.w2": (m, m)}
    yield from vectors("vision.", Stored.BF16, {"norm.weight": d})
    yield from matrices("", Stored.BF16, biased)
    yield from vectors("", Stored.BF16, {f"{name}.bias": shape[0] for name, shape in biased.items()})
