"""Containers: the weights of draft modules of V3 and V4, with their names in checkpoints. Nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .block_weights import V3BlockWeights, V4BlockWeights, head_site
from .presets import V3Config, V4Config
from .weights import MhcSite, _take, stored


@dataclass(frozen=True, kw_only=True, eq=False)
class MtpJoin:
    """What makes one row of an embedding and a hidden state (V3)."""

    enorm_m: Tensor
    hnorm_m: Tensor
    w_mj: Tensor  # columns: the embedding's, then the hidden state's


@dataclass(frozen=True, kw_only=True, eq=False)
class MtpStreamJoin:
    """What makes streams of an embedding and streams (V4); with scales the matrices are e4m3 codes."""

    enorm_m: Tensor
    hnorm_m: Tensor
    e_mm: Tensor
    h_mm: Tensor
    e_sf: Tensor | None = None
    h_sf: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.e_sf is None) != (self.h_sf is None):
            raise ValueError("h_sf: expected scales for both matrices or for none, got them for one")


@dataclass(frozen=True, kw_only=True, eq=False)
class MtpV3Weights:
    """One draft module of V3; embedding and head are the main model's."""

    join: MtpJoin
    block: V3BlockWeights
    norm_m: Tensor
    embed_vm: Tensor
    head_vm: Tensor

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, prefix: str, config: V3Config) -> MtpV3Weights:
        """Take the tensors `prefix + "eh_proj.weight"` and so on, prefix `model.layers.61.` in the released checkpoint.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        m, v = config.hidden, config.vocab_size
        join = MtpJoin(
            enorm_m=_take(state, prefix, "enorm.weight", m),
            hnorm_m=_take(state, prefix, "hnorm.weight", m),
            w_mj=_take(state, prefix, "eh_proj.weight", m, 2 * m),
        )
        return cls(
            join=join,
            block=V3BlockWeights.from_state_dict(state, prefix=prefix, config=config, layer=config.num_layers),
            norm_m=_take(state, prefix, "shared_head.norm.weight", m),
            embed_vm=_take(state, prefix, "embed_tokens.weight", v, m),
            head_vm=_take(state, prefix, "shared_head.head.weight", v, m),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MtpV4Weights:
    """One draft block of V4; embedding and head are the main model's."""

    join: MtpStreamJoin
    block: V4BlockWeights
    site: MhcSite  # of the head: reads the streams
    norm_m: Tensor
    embed_vm: Tensor
    head_vm: Tensor

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, prefix: str, config: V4Config) -> MtpV4Weights:
        """Take the tensors `prefix + "e_proj.weight"` and so on, prefix `mtp.0.` in the released checkpoint.

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        m, v = config.hidden, config.vocab_size
        found = {name: state.get(f"{prefix}{name}_proj.scale") for name in "eh"}
        scales = {name: None if x is None else stored(x) for name, x in found.items()}
        join = MtpStreamJoin(
            enorm_m=_take(state, prefix, "enorm.weight", m),
            hnorm_m=_take(state, prefix, "hnorm.weight", m),
            e_mm=_take(state, prefix, "e_proj.weight", m, m),
            h_mm=_take(state, prefix, "h_proj.weight", m, m),
            e_sf=scales["e"],
            h_sf=scales["h"],
        )
        return cls(
            join=join,
            block=V4BlockWeights.from_state_dict(state, prefix=prefix, config=config, layer=config.num_layers),
            site=head_site(state, prefix + "hc_head_", config.mhc, m),
            norm_m=_take(state, prefix, "norm.weight", m),
            embed_vm=_take(state, "", "embed.weight", v, m),
            head_vm=_take(state, "", "head.weight", v, m),
        )
