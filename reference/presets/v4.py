"""V4-Flash and V4-Pro in numbers: a compression ratio for every layer, experts in every layer, four streams."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..config import (
    FP8_1X128_UE8M0,
    FP8_128X128_UE8M0,
    MHC_V4,
    MXFP4,
    ROUTER_V4_FLASH,
    ROUTER_V4_PRO,
    Combine,
    FfnConfig,
    MhcConfig,
    MoeConfig,
    MscaleRule,
    QuantFormat,
    RopeConfig,
    RouterConfig,
    WeighExperts,
    YarnConfig,
)


class LayerKind(enum.Enum):
    """What a layer attends to beside its sliding window."""

    SLIDING = "sliding"  # nothing
    CSA = "csa"  # picked blocks of 4 tokens
    HCA = "hca"  # all blocks of many tokens


@dataclass(frozen=True, kw_only=True)
class V4AttentionSizes:
    """Attention of V4; `compress_ratios` has an entry for every block, those of the draft last."""

    num_heads: int
    head_dim: int  # of queries and of the one key, which is the value too
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int  # per group
    window: int
    compress_ratios: tuple[int, ...]  # 0: window alone, 4: overlapping blocks and an indexer, more: dense
    index_heads: int
    index_dim: int
    index_topk: int  # blocks

    def __post_init__(self) -> None:
        if self.num_heads % self.o_groups:
            raise ValueError(f"o_groups: expected a divisor of {self.num_heads} heads, got {self.o_groups}")
        odd = [ratio for ratio in self.compress_ratios if ratio != 0 and ratio < 4]
        if odd:
            raise ValueError(f"compress_ratios: expected 0, 4 or more, got {odd}")

    def kind(self, layer: int) -> LayerKind:
        """What the layer attends to."""
        kinds = {0: LayerKind.SLIDING, 4: LayerKind.CSA}
        return kinds.get(self.compress_ratios[layer], LayerKind.HCA)


@dataclass(frozen=True, kw_only=True)
class V4Config:
    """A model of the V4 family; the blocks behind the `num_layers` of the main model are its drafts."""

    name: str
    hidden: int
    num_layers: int
    draft_layers: int
    vocab_size: int
    norm_eps: float
    attention: V4AttentionSizes
    rope_window: RopeConfig  # of everything that a layer of ratio 0 rotates
    rope_main: RopeConfig  # of everything that any other layer rotates
    mhc: MhcConfig
    router: RouterConfig
    hash_layers: int  # the first ones take the experts of a token from a table
    shared_experts: int
    expert_width: int
    swiglu_limit: float
    weigh: WeighExperts  # of plain weights
    weights: QuantFormat  # of projections and shared experts
    experts: QuantFormat
    activation: QuantFormat
    max_positions: int

    def __post_init__(self) -> None:
        blocks, ratios = self.num_layers + self.draft_layers, self.attention.compress_ratios
        if len(ratios) != blocks:
            raise ValueError(f"attention: expected a ratio for each of {blocks} blocks, got {len(ratios)}")
        if any(ratios[self.num_layers :]):
            raise ValueError(f"attention: expected ratio 0 in drafts, got {ratios[self.num_layers :]}")
        if self.rope_window.rope_dim != self.rope_main.rope_dim:
            raise ValueError(f"rope_main: expected {self.rope_window.rope_dim} channels, got {self.rope_main.rope_dim}")
        if not 0 <= self.hash_layers <= self.num_layers:
            raise ValueError(f"hash_layers: expected 0 to {self.num_layers}, got {self.hash_layers}")

    def rope(self, layer: int) -> RopeConfig:
        """The frequencies of everything that the layer rotates."""
        return self.rope_main if self.attention.compress_ratios[layer] else self.rope_window

    @property
    def ffn(self) -> FfnConfig:
        """What its experts compute with: formats of the release, or plain weights."""
        moe = MoeConfig(
            routed=self.experts,
            shared=self.weights,
            activation=self.activation,
            swiglu_limit=self.swiglu_limit,
            combine=Combine.SINGLE,
        )
        return FfnConfig(router=self.router, swiglu_limit=self.swiglu_limit, weigh=self.weigh, quantised=moe)


V4_YARN = YarnConfig(
    factor=16.0,
    original_length=65536,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.0,
    mscale_all_dim=0.0,
    mscale_rule=MscaleRule.DEMO,
)


def v4_flash() -> V4Config:
    """DeepSeek-V4-Flash as released (v3-v32-v4.md sections 1.1 and 1.2)."""
    return V4Config(
        name="v4_flash",
        hidden=4096,
        num_layers=43,
        draft_layers=1,
        vocab_size=129280,
        norm_eps=1e-6,
        attention=V4AttentionSizes(
            num_heads=64,
            head_dim=512,
            q_lora_rank=1024,
            o_groups=8,
            o_lora_rank=1024,
            window=128,
            compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
            index_heads=64,
            index_dim=128,
            index_topk=512,
        ),
        rope_window=RopeConfig(rope_dim=64, theta=10000.0, yarn=None),
        rope_main=RopeConfig(rope_dim=64, theta=160000.0, yarn=V4_YARN),
        mhc=MHC_V4,
        router=ROUTER_V4_FLASH,
        hash_layers=3,
        shared_experts=1,
        expert_width=2048,
        swiglu_limit=10.0,
        weigh=WeighExperts.BEFORE_DOWN,
        weights=FP8_128X128_UE8M0,
        experts=MXFP4,
        activation=FP8_1X128_UE8M0,
        max_positions=1048576,
    )


def v4_pro() -> V4Config:
    """DeepSeek-V4-Pro as released; no layer of its main model has a window alone."""
    return V4Config(
        name="v4_pro",
        hidden=7168,
        num_layers=61,
        draft_layers=1,
        vocab_size=129280,
        norm_eps=1e-6,
        attention=V4AttentionSizes(
            num_heads=128,
            head_dim=512,
            q_lora_rank=1536,
            o_groups=16,
            o_lora_rank=1024,
            window=128,
            compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),
            index_heads=64,
            index_dim=128,
            index_topk=1024,
        ),
        rope_window=RopeConfig(rope_dim=64, theta=10000.0, yarn=None),
        rope_main=RopeConfig(rope_dim=64, theta=160000.0, yarn=V4_YARN),
        mhc=MHC_V4,
        router=ROUTER_V4_PRO,
        hash_layers=3,
        shared_experts=1,
        expert_width=3072,
        swiglu_limit=10.0,
        weigh=WeighExperts.BEFORE_DOWN,
        weights=FP8_128X128_UE8M0,
        experts=MXFP4,
        activation=FP8_1X128_UE8M0,
        max_positions=1048576,
    )
