"""Sizes, choices and weights of the draft layers, as both sides of `dspark` take them. Nothing here computes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .config import DraftBlock, MhcConfig, MoeConfig, RouterConfig
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


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftHead:
    """What turns hidden rows into tokens: the norm and the tables of the last draft module, the shared head."""

    norm_m: Tensor
    head_vm: Tensor  # bf16, the main model's
    w1_vr: Tensor
    w2_vr: Tensor
    confidence_x: Tensor
    temperatures: tuple[float, ...]  # of the confidence, one for each position of a block


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel:
    """Everything that drafts: the shared embedding, the draft layers, the head."""

    embed_vm: Tensor
    layers: tuple[DraftLayer, ...]
    head: DraftHead
    config: DraftConfig
    block: DraftBlock

    def __post_init__(self) -> None:
        if len(self.head.temperatures) != self.block.draft:
            raise ValueError(f"head: expected {self.block.draft} temperatures, got {len(self.head.temperatures)}")


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftMain:
    """What makes the keys that drafts see of the main model's tokens, before each layer's own product and norm."""

    proj_q: Tensor  # codes [m, z], z the target layers' features side by side
    proj_sf: Tensor
    norm_m: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftRequests:
    """Where the blocks of a batch stand, as `draft_rows` takes it, and how requests draw: as their target does."""

    golden_b: Tensor
    first_b: Tensor
    accepted_b: Tensor
    state_b: Tensor
    valid_b: Tensor
    temperature_b: Tensor  # fp32
    top_p_b: Tensor  # fp32
    top_k_b: Tensor  # int64
    seed_b: Tensor  # int64, of the request


@dataclass(frozen=True, kw_only=True, eq=False)
class ProposalPool:
    """Drafts of every slot, γ rows each; slot 0 is the placeholder."""

    token_z: Tensor  # int64
    logprob_zv: Tensor  # fp32
    confidence_z: Tensor  # fp32
    draft: int
