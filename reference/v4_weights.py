"""Weights of an attention layer of V4, with their names in released checkpoints and in transformers.

Nothing here computes. A matrix stands as its checkpoint stores it, one row for each output: e4m3 codes with a UE8M0
scale for a tile of 128 x 128, or floating values without a scale (`_sf` is None then).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from .config import V4AttnConfig, V4Kind
from .weights import stored

Part = TypeVar("Part")

# field of the container -> name in a released checkpoint, name in transformers; `.scale` stands beside the former
MATRICES = {
    "wq_a": ("wq_a", "q_a_proj"),
    "wq_b": ("wq_b", "q_b_proj"),
    "wkv": ("wkv", "kv_proj"),
    "wo_a": ("wo_a", "o_a_proj"),
    "wo_b": ("wo_b", "o_b_proj"),
    "index_wq": ("indexer.wq_b", "compressor.indexer.q_b_proj"),
}
VECTORS = {
    "q_norm_a": ("q_norm.weight", "q_a_norm.weight"),
    "kv_norm_d": ("kv_norm.weight", "kv_norm.weight"),
    "sink_h": ("attn_sink", "sinks"),
    "index_head_hm": ("indexer.weights_proj.weight", "compressor.indexer.scorer.weights_proj.weight"),
}
COMPRESSORS = {"entry": ("compressor", "compressor"), "index_entry": ("indexer.compressor", "compressor.indexer")}
PARTS = {
    "value_wm": ("wkv.weight", "kv_proj.weight"),
    "gate_wm": ("wgate.weight", "gate_proj.weight"),
    "bias_rw": ("ape", "position_bias"),
    "norm_c": ("norm.weight", "kv_norm.weight"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressorWeights:
    """What pools tokens to entries: w = c channels, twice as many with overlap (series a, then series b)."""

    value_wm: Tensor
    gate_wm: Tensor
    bias_rw: Tensor  # float32
    norm_c: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class V4Weights:
    """Weights of one layer; None where its kind owns none."""

    wq_a: Tensor  # [a, m]
    wq_b: Tensor  # [h * d, a]
    wkv: Tensor  # [d, m]
    wo_a: Tensor  # [groups * rank, h * d / groups]
    wo_b: Tensor  # [m, groups * rank]
    q_norm_a: Tensor
    kv_norm_d: Tensor
    sink_h: Tensor  # float32
    wq_a_sf: Tensor | None = None
    wq_b_sf: Tensor | None = None
    wkv_sf: Tensor | None = None
    wo_a_sf: Tensor | None = None
    wo_b_sf: Tensor | None = None
    entry: CompressorWeights | None = None
    index_entry: CompressorWeights | None = None
    index_wq: Tensor | None = None  # [index heads * index width, a]
    index_wq_sf: Tensor | None = None
    index_head_hm: Tensor | None = None

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, prefix: str, config: V4AttnConfig) -> V4Weights:
        """Take the tensors `prefix + "wq_a.weight"`, `"wq_a.scale"` and so on of a released checkpoint.

        Raises:
            ValueError: a name is missing, one that the kind does not own is there, or a shape is not of `config`.
        """
        return cls._taken(state, prefix, config, 0)

    @classmethod
    def from_transformers(cls, state: Mapping[str, Tensor], *, prefix: str, config: V4AttnConfig) -> V4Weights:
        """Take the tensors `prefix + "q_a_proj.weight"` and so on of transformers' DeepseekV4Attention.

        Raises:
            ValueError: as `from_state_dict`.
        """
        return cls._taken(state, prefix, config, 1)

    @classmethod
    def _taken(cls, state: Mapping[str, Tensor], prefix: str, config: V4AttnConfig, names: int) -> V4Weights:
        shapes = v4_shapes(config)
        found: dict[str, Tensor | None] = {}
        for field, name in checkpoint_names(names).items():
            tensor, shape = state.get(prefix + name), shapes.get(field)
            is_scale = field.endswith("_sf")
            if is_scale and tensor is not None and shapes.get(field.removesuffix("_sf")) is not None:
                shape = tuple(-(-n // 128) for n in shapes[field.removesuffix("_sf")])
            if (tensor is None) != (shape is None) or (tensor is not None and tensor.shape != shape):
                got = None if tensor is None else tuple(tensor.shape)
                raise ValueError(f"state: expected {prefix}{name} {shape}, got {got}")
            found[field] = None if tensor is None else stored(tensor)
        flat = {field: tensor for field, tensor in found.items() if "." not in field}
        for owner in COMPRESSORS:
            if found[f"{owner}.norm_c"] is not None:
                parts = {part: found[f"{owner}.{part}"] for part in PARTS}
                flat[owner] = CompressorWeights(**parts)  # type: ignore[arg-type, assignment]
        return cls(**flat)  # type: ignore[arg-type]


def owned(part: Part | None, name: str) -> Part:
    """A part that not every kind of layer has; raise ValueError if it is not there."""
    if part is None:
        raise ValueError(f"{name}: expected the parts of this kind of layer, got None")
    return part


def checkpoint_names(names: int) -> dict[str, str]:
    """Field, parts of compressors as `entry.norm_c`, -> name; 0: released checkpoint, 1: transformers."""
    found = {field: f"{both[names]}.weight" for field, both in MATRICES.items()}
    found |= {f"{field}_sf": f"{both[names]}.scale" for field, both in MATRICES.items()}
    found |= {field: both[names] for field, both in VECTORS.items()}
    for owner, owners in COMPRESSORS.items():
        found |= {f"{owner}.{part}": f"{owners[names]}.{both[names]}" for part, both in PARTS.items()}
    return found


def v4_shapes(config: V4AttnConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a layer owns, scales aside."""
    m, a, d, heads = config.hidden, config.q_rank, config.head_dim, config.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (a, m),
        "wq_b": (heads * d, a),
        "wkv": (d, m),
        "wo_a": (config.o_groups * config.o_rank, heads * d // config.o_groups),
        "wo_b": (m, config.o_groups * config.o_rank),
        "q_norm_a": (a,),
        "kv_norm_d": (d,),
        "sink_h": (heads,),
    }
    owners = {}
    if config.kind is not V4Kind.SLIDING:
        owners["entry"] = d
    if config.kind is V4Kind.CSA:
        owners["index_entry"] = config.index_dim
        shapes["index_wq"] = (config.index_heads * config.index_dim, a)
        shapes["index_head_hm"] = (config.index_heads, m)
    for owner, c in owners.items():
        w = c * config.compressor.series
        parts = ((w, m), (w, m), (config.ratio, w), (c,))
        shapes |= {f"{owner}.{part}": shape for part, shape in zip(PARTS, parts, strict=True)}
    return shapes
