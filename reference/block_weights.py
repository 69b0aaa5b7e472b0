"""Containers: the weights of whole blocks, with their names in checkpoints. Nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .config import EngramConfig, MhcConfig
from .csa2_config import Csa2Config
from .dsa_state import DsaWeights
from .ffn_weights import GatedWeights, MoeSizes, MoeWeights, gated_weights, moe_weights, released_moe
from .presets import V3Config, V4Config, V41Config
from .v4_weights import V4Weights
from .weights import Csa2Weights, EngramWeights, MhcSite, MlaWeights, _take


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


@dataclass(frozen=True, kw_only=True, eq=False)
class V4BlockWeights:
    """Weights of one block of V4."""

    attn_site: MhcSite
    attn_norm_m: Tensor
    attention: V4Weights
    ffn_site: MhcSite
    ffn_norm_m: Tensor
    ffn: MoeWeights

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Tensor], *, prefix: str, config: V4Config, layer: int
    ) -> V4BlockWeights:
        """Take the tensors `prefix + "attn.wq_a.weight"` and so on of a released checkpoint, quantised or not.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        sizes = MoeSizes(
            hidden=config.hidden,
            experts=config.router.num_experts,
            width=config.expert_width,
            shared=config.shared_experts,
            table=(config.vocab_size, config.router.topk) if layer < config.hash_layers else None,
        )
        return cls(
            attn_site=MhcSite.from_state_dict(state, prefix=prefix + "hc_attn_", config=config.mhc),
            attn_norm_m=_take(state, prefix, "attn_norm.weight", config.hidden),
            attention=V4Weights.from_state_dict(state, prefix=prefix + "attn.", config=config.attn(layer)),
            ffn_site=MhcSite.from_state_dict(state, prefix=prefix + "hc_ffn_", config=config.mhc),
            ffn_norm_m=_take(state, prefix, "ffn_norm.weight", config.hidden),
            ffn=released_moe(state, prefix + "ffn.", sizes),
        )

    @classmethod
    def from_transformers(
        cls, state: Mapping[str, Tensor], *, prefix: str, config: V4Config, layer: int
    ) -> V4BlockWeights:
        """Take the tensors `prefix + "self_attn.q_a_proj.weight"` and so on of transformers' DeepseekV4DecoderLayer.

        Raises:
            ValueError: as `from_state_dict`.
        """
        attn = config.attn(layer)
        table = layer < config.hash_layers
        return cls(
            attn_site=MhcSite.from_state_dict(state, prefix=prefix + "attn_hc.", config=config.mhc),
            attn_norm_m=_take(state, prefix, "input_layernorm.weight", config.hidden),
            attention=V4Weights.from_transformers(state, prefix=prefix + "self_attn.", config=attn),
            ffn_site=MhcSite.from_state_dict(state, prefix=prefix + "ffn_hc.", config=config.mhc),
            ffn_norm_m=_take(state, prefix, "post_attention_layernorm.weight", config.hidden),
            ffn=moe_weights(state, prefix + "mlp.", config, table=table),
        )


def head_site(state: Mapping[str, Tensor], prefix: str, config: MhcConfig, hidden: int) -> MhcSite:
    """The site through which a head of V4 reads the streams: `prefix + "fn"`, `"scale"` and `"base"`.

    Raises:
        ValueError: a name is missing, or a shape is not the one of `config`.
    """
    n = config.streams
    return MhcSite(
        fn_wx=_take(state, prefix, "fn", n, n * hidden),
        scale_z=_take(state, prefix, "scale", 1),
        base_w=_take(state, prefix, "base", n),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class V41BlockWeights:
    """Weights of one block of V4.1; the norm before attention stands with the attention."""

    memory: EngramWeights | None
    attn_site: MhcSite
    attention: Csa2Weights
    ffn_site: MhcSite
    ffn_norm_m: Tensor
    ffn: MoeWeights

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Tensor], *, config: V41Config, csa2: Csa2Config, engram: EngramConfig, layer: int
    ) -> V41BlockWeights:
        """Take the tensors `layers.{layer}.attn.wq_a.weight` and so on of a released checkpoint.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        prefix, moe = f"layers.{layer}.", config.moe
        sizes = MoeSizes(
            hidden=config.hidden, experts=moe.experts, width=moe.width, shared=moe.shared_experts, image=True
        )
        owns = layer in config.engram.layers
        return cls(
            memory=EngramWeights.from_state_dict(state, prefix=prefix + "engram.", config=engram) if owns else None,
            attn_site=MhcSite.from_state_dict(state, prefix=prefix + "hc_attn_", config=config.mhc),
            attention=Csa2Weights.from_state_dict(state, layer=layer, config=csa2),
            ffn_site=MhcSite.from_state_dict(state, prefix=prefix + "hc_ffn_", config=config.mhc),
            ffn_norm_m=_take(state, prefix, "ffn_norm.weight", config.hidden),
            ffn=released_moe(state, prefix + "ffn.", sizes),
        )
