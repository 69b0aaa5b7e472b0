"""Containers: the feed-forward weights of a block, and whole blocks of every generation. Nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .dsa_state import DsaWeights
from .presets import V3Config, V4Config
from .weights import ExpertWeights, MlaWeights, _take


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedWeights:
    """Plain weights of one gated network: gate above up, and down."""

    w13_im: Tensor
    w2_mf: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainExperts:
    """Plain weights of routed experts: gate above up, and down."""

    w13_eim: Tensor
    w2_emf: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class MoeWeights:
    """A router and its experts; a router has a bias or a table of token ids, and in V4.1 a bias for images too."""

    gate_em: Tensor
    bias_e: Tensor | None
    table_vk: Tensor | None
    experts: PlainExperts | ExpertWeights
    shared: GatedWeights | ExpertWeights
    bias_vl_e: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.bias_e is None) == (self.table_vk is None):
            raise ValueError(
                f"bias_e: expected either a bias or a table, got {'no' if self.bias_e is None else 'both'}"
            )
        if isinstance(self.experts, PlainExperts) != isinstance(self.shared, GatedWeights):
            raise ValueError("shared: expected plain or quantised weights as for the experts, got the other")


@dataclass(frozen=True, kw_only=True, eq=False)
class V3BlockWeights:
    """Weights of one block of V3."""

    attn_norm_m: Tensor
    attention: MlaWeights | DsaWeights
    ffn_norm_m: Tensor
    ffn: GatedWeights | MoeWeights

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Tensor], *, prefix: str, config: V3Config, layer: int
    ) -> V3BlockWeights:
        """Take the tensors `prefix + "self_attn.q_a_proj.weight"` and so on.

        The names are those of transformers' modules and of checkpoints, which differ in the experts: stacked as
        `mlp.experts.gate_up_proj` there, one by one as `mlp.experts.0.gate_proj.weight` here.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        m, own = config.hidden, prefix + "self_attn."
        dense = config.is_dense(layer)
        return cls(
            attn_norm_m=_take(state, prefix, "input_layernorm.weight", m),
            attention=MlaWeights.from_state_dict(state, prefix=own, config=config.attention)
            if config.index is None
            else DsaWeights.from_state_dict(state, prefix=own, config=config.dsa),
            ffn_norm_m=_take(state, prefix, "post_attention_layernorm.weight", m),
            ffn=gated_weights(state, f"{prefix}mlp.", m, config.dense_width)
            if dense
            else moe_weights(state, f"{prefix}mlp.", config, table=False),
        )


def gated_weights(state: Mapping[str, Tensor], prefix: str, m: int, f: int) -> GatedWeights:
    """A gated network stored as three matrices `prefix + "gate_proj.weight"` and so on."""
    gate, up = (_take(state, prefix, f"{name}_proj.weight", f, m) for name in ("gate", "up"))
    return GatedWeights(w13_im=torch.cat([gate, up]), w2_mf=_take(state, prefix, "down_proj.weight", m, f))


def moe_weights(state: Mapping[str, Tensor], prefix: str, config: V3Config | V4Config, *, table: bool) -> MoeWeights:
    """A router and plain experts under the names of transformers' modules, or of checkpoints of V3.

    Raises:
        ValueError: a name is missing, or a shape is not the one of `config`.
    """
    m, f, e = config.hidden, config.expert_width, config.router.num_experts
    topk, shared = config.router.topk, config.shared_experts * f
    return MoeWeights(
        gate_em=_take(state, prefix, "gate.weight", e, m),
        bias_e=None if table else _take(state, prefix, "gate.e_score_correction_bias", e),
        table_vk=_take(state, prefix, "gate.tid2eid", config.vocab_size, topk) if table else None,
        experts=_stacked(state, prefix + "experts.", e, m, f),
        shared=gated_weights(state, prefix + "shared_experts.", m, shared),
    )


def _stacked(state: Mapping[str, Tensor], prefix: str, e: int, m: int, f: int) -> PlainExperts:
    if prefix + "gate_up_proj" in state:
        return PlainExperts(
            w13_eim=_take(state, prefix, "gate_up_proj", e, 2 * f, m),
            w2_emf=_take(state, prefix, "down_proj", e, m, f),
        )
    each = [gated_weights(state, f"{prefix}{expert}.", m, f) for expert in range(e)]
    return PlainExperts(
        w13_eim=torch.stack([one.w13_im for one in each]), w2_emf=torch.stack([one.w2_mf for one in each])
    )
