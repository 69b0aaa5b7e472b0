"""Containers: the weights of whole models, with their names in checkpoints. Nothing here computes.

A released checkpoint of V3 is quantised; its tensors are expected as they are after dequantisation. Those of V4 and
V4.1 are taken as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_v41 import V41Stack
from .block_weights import V3BlockWeights, V4BlockWeights, V41BlockWeights, head_site
from .checks import expect_dtype, expect_shape
from .engram_vocab import hash_layout
from .presets import V3Config, V4Config
from .weights import MhcSite, _take


@dataclass(frozen=True, kw_only=True, eq=False)
class V3Model:
    """Weights of V3 or V3.2; `layers` may be any sequence, for example one that reads a layer when it is asked for."""

    embed_vm: Tensor
    layers: Sequence[V3BlockWeights]
    norm_m: Tensor
    head_vm: Tensor

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, config: V3Config) -> V3Model:
        """Take the tensors `model.embed_tokens.weight`, `model.layers.0.…`, `model.norm.weight`, `lm_head.weight`.

        The names are those of checkpoints and of transformers, with either form of the experts.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        m, v = config.hidden, config.vocab_size
        return cls(
            embed_vm=_take(state, "", "model.embed_tokens.weight", v, m),
            layers=tuple(
                V3BlockWeights.from_state_dict(state, prefix=f"model.layers.{layer}.", config=config, layer=layer)
                for layer in range(config.num_layers)
            ),
            norm_m=_take(state, "", "model.norm.weight", m),
            head_vm=_take(state, "", "lm_head.weight", v, m),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class V4Model:
    """Weights of V4; `layers` as in `V3Model`."""

    embed_vm: Tensor
    layers: Sequence[V4BlockWeights]
    site: MhcSite  # of the head: reads the streams
    norm_m: Tensor
    head_vm: Tensor

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, config: V4Config) -> V4Model:
        """Take the tensors `embed.weight`, `layers.0.…`, `hc_head_fn`, `norm.weight`, `head.weight` of a checkpoint.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        m, v = config.hidden, config.vocab_size
        return cls(
            embed_vm=_take(state, "", "embed.weight", v, m),
            layers=tuple(
                V4BlockWeights.from_state_dict(state, prefix=f"layers.{layer}.", config=config, layer=layer)
                for layer in range(config.num_layers)
            ),
            site=head_site(state, "hc_head_", config.mhc, m),
            norm_m=_take(state, "", "norm.weight", m),
            head_vm=_take(state, "", "head.weight", v, m),
        )

    @classmethod
    def from_transformers(cls, state: Mapping[str, Tensor], *, config: V4Config) -> V4Model:
        """Take the tensors of transformers' DeepseekV4ForCausalLM, `model.embed_tokens.weight` and so on.

        Raises:
            ValueError: as `from_state_dict`.
        """
        m, v = config.hidden, config.vocab_size
        return cls(
            embed_vm=_take(state, "", "model.embed_tokens.weight", v, m),
            layers=tuple(
                V4BlockWeights.from_transformers(state, prefix=f"model.layers.{layer}.", config=config, layer=layer)
                for layer in range(config.num_layers)
            ),
            site=head_site(state, "model.hc_head.hc_", config.mhc, m),
            norm_m=_take(state, "", "model.norm.weight", m),
            head_vm=_take(state, "", "lm_head.weight", v, m),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class V41Model:
    """Weights of V4.1, the tables of its n-gram memory, and the classes of its vocabulary; `layers` as in `V3Model`.

    The classes are no part of a checkpoint: `compress_vocabulary` makes them of a tokenizer's pieces.
    """

    embed_vm: Tensor
    layers: Sequence[V41BlockWeights]
    tables: tuple[tuple[Tensor, Tensor], ...]  # codes and scales of every memory layer
    class_v: Tensor  # int32: the class of every token id
    norm_m: Tensor
    head_vm: Tensor

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, config: V41Stack, class_v: Tensor) -> V41Model:
        """Take the tensors `embed.weight`, `layers.0.…`, `norm.weight`, `head.weight` of a checkpoint.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`; class_v is not one class for each
                token id, or has another number of classes than the memory.
            TypeError: class_v is not int32; a table is not float8_e4m3fn with scales of one byte.
        """
        model = config.model
        m, v, memory = model.hidden, model.vocab_size, model.memory
        expect_shape("class_v", class_v, "v", {"v": v})
        expect_dtype("class_v", class_v, torch.int32)
        found = len(class_v.unique())
        if found != memory.num_classes:
            raise ValueError(f"class_v: expected {memory.num_classes} classes, got {found}")
        tables = []
        for layer, rows in zip(memory.layer_ids, hash_layout(memory).num_rows, strict=True):
            prefix = f"layers.{layer}.engram.embed."
            codes = _take(state, prefix, "weight", rows, memory.head_dim)
            scales = _take(state, prefix, "scale", rows, memory.head_dim // 32)
            expect_dtype(prefix + "weight", codes, torch.float8_e4m3fn)
            expect_dtype(prefix + "scale", scales, torch.uint8)
            tables.append((codes, scales))
        return cls(
            embed_vm=_take(state, "", "embed.weight", v, m),
            layers=tuple(
                V41BlockWeights.from_state_dict(state, config=model, csa2=config.csa2, engram=memory, layer=layer)
                for layer in range(model.num_layers)
            ),
            tables=tuple(tables),
            class_v=class_v,
            norm_m=_take(state, "", "norm.weight", m),
            head_vm=_take(state, "", "head.weight", v, m),
        )
