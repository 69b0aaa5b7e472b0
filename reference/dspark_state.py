"""Sizes, choices and weights of the draft layers, as both sides of `dspark` take them. Nothing here computes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .config import MhcConfig, MoeConfig, RouterConfig
from .csa2_config import Csa2Config
from .weights import Csa2Weights, ExpertWeights, MhcSite


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What a draft layer computes with: attention without compression, shifted streams, a smaller router."""

    csa2: Csa2Config
    mhc: MhcConfig
    router: RouterConfig
    moe: MoeConfig

    def __post_init__(self) -> None:
        if not self.mhc.shifted:
            raise ValueError("mhc: expected a shifted schedule, got one that reads with its own coefficients")


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftLayer:
    """Weights of one draft layer; `mtp.i.*` of the checkpoint, named like those of a backbone layer."""

    attention: Csa2Weights
    attention_site: MhcSite
    ffn_site: MhcSite
    ffn_norm_m: Tensor
    gate_em: Tensor
    bias_e: Tensor
    experts: ExpertWeights
    shared: ExpertWeights
