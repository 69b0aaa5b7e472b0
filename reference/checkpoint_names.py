"""The tensors that a checkpoint of every generation has: names, dtypes and shapes, from the configuration.

A matrix of codes is two tensors: `X.weight`, and its scales as `X.scale` (V4, V4.1) or `X.weight_scale_inv` (V3). A
plain checkpoint, which nothing quantised, has the weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .account_terms import Stored
from .checkpoint_file import DTYPES
from .checkpoint_names_v41 import Named, matrices, named_v41, vectors
from .presets import ModelConfig, V3Config, V4Config, V41Config
from .v4_weights import checkpoint_names, v4_shapes

NAME_BYTES = 80  # the longest name of a release has 58


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One tensor that a checkpoint must have. `or_dtypes` are those that it may have where no source settles it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    or_dtypes: tuple[str, ...] = ()
    is_draft: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that are accepted, the usual one first."""
        return (self.dtype, *self.or_dtypes)


def expected_tensors(config: ModelConfig, *, plain: str | None = None) -> tuple[Spec, ...]:
    """Every tensor of a checkpoint, draft modules included, as released or with `plain` weights of this dtype.

    Raises:
        ValueError: `plain` for V4.1, whose weights are codes.

    Source:
        v3-v32-v4.md sections 10.2 and 10.4, v41-blocks.md section 0.3, v41-attention.md section 1.3
    """
    if isinstance(config, V3Config):
        named, drafts = (
            _named_v3(config),
            [f"model.layers.{config.num_layers + i}." for i in range(config.draft_layers)],
        )
    elif isinstance(config, V4Config):
        named, drafts = _named_v4(config), ["mtp."]
    elif plain is not None:
        raise ValueError(f"plain: expected None for V4.1, whose weights are codes, got {plain!r}")
    else:
        named, drafts = named_v41(config), ["mtp."]
    found = []
    for name, stored, shape in named:
        is_draft = name.startswith(tuple(drafts))
        parts = _stored(name, stored, shape) if plain is None else [(name, _unquantised(stored, plain), shape)]
        for part, dtype, own in parts:
            others = _unsettled(part, dtype, config) if plain is None else _cast(part, dtype, plain)
            found.append(Spec(name=part, dtype=dtype, shape=own, or_dtypes=others, is_draft=is_draft))
    return tuple(found)


def tensor_table(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The released tensors of a model in the order of their names, as numbers.

    Shapes:
        returns uint8 [n, 80], a name and zeros; int64 [n], the place of its dtype in `DTYPES`; int64 [n, 2], its sizes,
        -1 where a vector has none.
    """
    specs = sorted(expected_tensors(config), key=lambda spec: spec.name)
    names = b"".join(spec.name.encode().ljust(NAME_BYTES, b"\0") for spec in specs)
    dtypes = list(DTYPES)
    return (
        torch.frombuffer(bytearray(names), dtype=torch.uint8).view(-1, NAME_BYTES),
        torch.tensor([dtypes.index(spec.dtype) for spec in specs]),
        torch.tensor([[*spec.shape, -1][:2] for spec in specs]),
    )


def _stored(name: str, stored: Stored, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    """The tensors of a matrix or vector: values, or codes and scales."""
    dtype = {Stored.BF16: "BF16", Stored.FP32: "F32", Stored.INT64: "I64"}.get(stored)
    if dtype is not None:
        return [(name, dtype, shape)]
    rows, columns = shape
    block = {Stored.MXFP4: (1, 32), Stored.FP8_ROWS: (1, 32), Stored.FP8_TILES: (32, 32)}.get(stored, (128, 128))
    scales = (-(-rows // block[0]), -(-columns // block[1]))
    codes = ("I8", (rows, columns // 2)) if stored is Stored.MXFP4 else ("F8_E4M3", shape)
    if stored is Stored.FP8_BLOCKS_F32:
        return [(name, *codes), (name + "_scale_inv", "F32", scales)]
    return [(name, *codes), (name.removesuffix(".weight") + ".scale", "F8_E8M0", scales)]


def _unquantised(stored: Stored, plain: str) -> str:
    return {Stored.FP32: "F32", Stored.INT64: "I64"}.get(stored, plain)


def _cast(name: str, dtype: str, plain: str) -> tuple[str, ...]:
    """Who saves a model in one dtype may have cast these with it; sites, sinks and position biases never are."""
    may_be_cast = dtype == "F32" and plain != "F32" and name.endswith(("bias", "k_norm.weight"))
    return (plain,) if may_be_cast else ()


def _unsettled(name: str, dtype: str, config: ModelConfig) -> tuple[str, ...]:
    """What else a tensor may be stored as: no source settles the norms of V4 and two of the indexer of V3.2."""
    parts = ("indexer.k_norm.", "indexer.weights_proj.") if isinstance(config, V3Config) else ("norm.weight",)
    is_open = not isinstance(config, V41Config) and any(part in name for part in parts)
    return ({"BF16": "F32", "F32": "BF16"}[dtype],) if is_open else ()


def _named_v3(config: V3Config) -> Iterator[Named]:
    m, v = config.hidden, config.vocab_size
    yield from matrices("", Stored.BF16, {"model.embed_tokens": (v, m), "lm_head": (v, m)})
    yield from vectors("model.", Stored.BF16, {"norm.weight": m})
    for layer in range(config.num_layers + config.draft_layers):
        prefix = f"model.layers.{layer}."
        yield from _block_v3(prefix, config, layer)
        if layer >= config.num_layers:
            shapes = {"eh_proj": (m, 2 * m), "embed_tokens": (v, m), "shared_head.head": (v, m)}
            yield from matrices(prefix, Stored.BF16, shapes)
            yield from vectors(prefix, Stored.BF16, dict.fromkeys(("enorm.weight", "hnorm.weight"), m))
            yield from vectors(prefix, Stored.BF16, {"shared_head.norm.weight": m})


def _block_v3(prefix: str, config: V3Config, layer: int) -> Iterator[Named]:
    m, a, own = config.hidden, config.attention, prefix + "self_attn."
    codes = Stored.FP8_BLOCKS_F32
    heads, query = a.num_heads, "q_b_proj" if a.q_lora_rank else "q_proj"
    if a.q_lora_rank:
        yield from matrices(own, codes, {"q_a_proj": (a.q_lora_rank, m)})
        yield from vectors(own, Stored.BF16, {"q_a_layernorm.weight": a.q_lora_rank})
    shapes = {
        query: (heads * a.head_dim, a.q_lora_rank or m),
        "kv_a_proj_with_mqa": (a.latent_dim, m),
        "kv_b_proj": (heads * (a.nope_dim + a.value_dim), a.kv_lora_rank),
        "o_proj": (m, heads * a.value_dim),
    }
    yield from matrices(own, codes, shapes)
    yield from vectors(own, Stored.BF16, {"kv_a_layernorm.weight": a.kv_lora_rank})
    if config.index is not None:
        count, dim = config.index.heads, config.index.dim
        yield from matrices(own, codes, {"indexer.wq_b": (count * dim, a.q_lora_rank), "indexer.wk": (dim, m)})
        yield from matrices(own, Stored.BF16, {"indexer.weights_proj": (count, m)})
        yield from vectors(own, Stored.FP32, {"indexer.k_norm.weight": dim, "indexer.k_norm.bias": dim})
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    yield from vectors(prefix, Stored.BF16, dict.fromkeys(norms, m))
    names, mlp = ("gate_proj", "up_proj", "down_proj"), prefix + "mlp."
    if config.is_dense(layer):
        yield from gated(mlp, codes, names, m, config.dense_width)
        return
    e, f = config.router.num_experts, config.expert_width
    yield from matrices(mlp, Stored.BF16, {"gate": (e, m)})
    yield from vectors(mlp, Stored.FP32, {"gate.e_score_correction_bias": e})
    yield from gated(mlp + "shared_experts.", codes, names, m, f * config.shared_experts)
    for expert in range(e):
        yield from gated(f"{mlp}experts.{expert}.", codes, names, m, f)


def gated(prefix: str, stored: Stored, names: tuple[str, str, str], m: int, f: int) -> Iterator[Named]:
    """The three matrices of a gated network: gate, up, down."""
    gate, up, down = names
    return matrices(prefix, stored, {gate: (f, m), up: (f, m), down: (m, f)})


def _named_v4(config: V4Config) -> Iterator[Named]:
    m, v = config.hidden, config.vocab_size
    yield from matrices("", Stored.BF16, {"embed": (v, m), "head": (v, m)})
    yield from vectors("", Stored.BF16, {"norm.weight": m})
    yield from _head_site("", config)
    for layer in range(config.num_layers):
        yield from _block_v4(f"layers.{layer}.", config, layer)
    for draft in range(config.draft_layers):
        prefix = f"mtp.{draft}."
        yield from _block_v4(prefix, config, config.num_layers + draft)
        yield from matrices(prefix, Stored.FP8_BLOCKS, {"e_proj": (m, m), "h_proj": (m, m)})
        yield from vectors(prefix, Stored.BF16, dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight"), m))
        yield from _head_site(prefix, config)


def _head_site(prefix: str, config: V4Config) -> Iterator[Named]:
    n = config.mhc.streams
    yield f"{prefix}hc_head_fn", Stored.FP32, (n, n * config.hidden)
    yield from vectors(prefix, Stored.FP32, {"hc_head_base": n, "hc_head_scale": 1})


def _block_v4(prefix: str, config: V4Config, layer: int) -> Iterator[Named]:
    m, mhc, attn = config.hidden, config.mhc, config.attn(layer)
    names = checkpoint_names(0)
    for field, shape in v4_shapes(attn).items():
        yield f"{prefix}attn.{names[field]}", _stored_v4(field), shape
    yield from vectors(prefix, Stored.BF16, {"attn_norm.weight": m, "ffn_norm.weight": m})
    for site in ("hc_attn_", "hc_ffn_"):
        yield f"{prefix}{site}fn", Stored.FP32, (mhc.coefficients, mhc.streams * m)
        yield from vectors(prefix + site, Stored.FP32, {"base": mhc.coefficients, "scale": 3})
    e, f, ffn, parts = config.router.num_experts, config.expert_width, prefix + "ffn.", ("w1", "w3", "w2")
    yield from matrices(ffn, Stored.BF16, {"gate": (e, m)})
    if layer < config.hash_layers:
        yield ffn + "gate.tid2eid", Stored.INT64, (config.vocab_size, config.router.topk)
    else:
        yield from vectors(ffn, Stored.FP32, {"gate.bias": e})
    yield from gated(ffn + "shared_experts.", Stored.FP8_BLOCKS, parts, m, f * config.shared_experts)
    for expert in range(e):
        yield from gated(f"{ffn}experts.{expert}.", Stored.MXFP4, parts, m, f)


def _stored_v4(field: str) -> Stored:
    if field == "sink_h" or field.endswith(".bias_rw"):
        return Stored.FP32
    return Stored.FP8_BLOCKS if field in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "index_wq") else Stored.BF16
