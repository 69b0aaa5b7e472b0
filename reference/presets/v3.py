"""V3 and V3.2 in numbers: latent attention in every layer, the first layers dense; V3.2 selects its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import (
    FP8_1X128,
    FP8_1X128_UE8M0,
    FP8_128X128,
    INDEX_FP8_POW2,
    KV_V32_DEMO,
    ROUTER_V3,
    DsaConfig,
    FfnConfig,
    IndexerRope,
    MlaConfig,
    MscaleRule,
    QuantFormat,
    RecordFormat,
    ResidualNorm,
    RopeConfig,
    RouterConfig,
    WeighExperts,
    WeightCast,
    YarnConfig,
)


@dataclass(frozen=True, kw_only=True)
class IndexSizes:
    """The indexer that every layer of V3.2 has."""

    heads: int
    dim: int
    topk: int  # tokens
    rope: IndexerRope
    key: RecordFormat | None  # what an index key is stored as; None: plain rows without a Hadamard transform
    latent: RecordFormat | None  # what a latent row is stored as; None: unquantised


@dataclass(frozen=True, kw_only=True)
class V3Config:
    """A model of the V3 family; the blocks behind the `num_layers` of the main model are its draft modules."""

    name: str
    hidden: int
    num_layers: int
    draft_layers: int
    vocab_size: int
    norm_eps: float
    attention: MlaConfig
    index: IndexSizes | None  # None: every key is seen
    dense_layers: int  # the first ones
    dense_width: int
    router: RouterConfig
    shared_experts: int
    expert_width: int
    weights: QuantFormat  # of all matrices but embedding, head and router
    activation: QuantFormat  # rows before their products
    residual: ResidualNorm
    weigh: WeighExperts
    max_positions: int

    def __post_init__(self) -> None:
        if self.attention.hidden != self.hidden:
            raise ValueError(f"attention: expected a hidden size of {self.hidden}, got {self.attention.hidden}")
        if not 0 <= self.dense_layers <= self.num_layers:
            raise ValueError(f"dense_layers: expected 0 to {self.num_layers}, got {self.dense_layers}")
        if self.index is not None:
            assert self.dsa.mla is self.attention  # making it refuses sizes that do not fit

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has one feed-forward network in place of experts; draft modules never do."""
        return layer < self.dense_layers

    @property
    def dsa(self) -> DsaConfig:
        """The attention of V3.2.

        Raises:
            ValueError: there is no indexer, or its sizes do not fit.
        """
        if self.index is None:
            raise ValueError("index: expected an indexer, got None")
        return DsaConfig(
            mla=self.attention,
            index_heads=self.index.heads,
            index_dim=self.index.dim,
            topk=self.index.topk,
            indexer_rope=self.index.rope,
            index_key=self.index.key,
            latent=self.index.latent,
        )

    @property
    def ffn(self) -> FfnConfig:
        """What its experts compute with."""
        return FfnConfig(router=self.router, swiglu_limit=None, weigh=self.weigh, quantised=None)


V3_YARN = YarnConfig(
    factor=40.0,
    original_length=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    mscale_rule=MscaleRule.DEMO,
)


def v3() -> V3Config:
    """DeepSeek-V3 as released (v3-v32-v4.md sections 1.1 and 1.2)."""
    return V3Config(
        name="v3",
        hidden=7168,
        num_layers=61,
        draft_layers=1,
        vocab_size=129280,
        norm_eps=1e-6,
        attention=MlaConfig(
            hidden=7168,
            num_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            nope_dim=128,
            value_dim=128,
            rope=RopeConfig(rope_dim=64, theta=10000.0, yarn=V3_YARN),
            weight_cast=WeightCast.AFTER_WEIGHT,
        ),
        index=None,
        dense_layers=3,
        dense_width=18432,
        router=ROUTER_V3,
        shared_experts=1,
        expert_width=2048,
        weights=FP8_128X128,
        activation=FP8_1X128,
        residual=ResidualNorm.ROUNDED,
        weigh=WeighExperts.AFTER_DOWN,
        max_positions=163840,
    )


def v32() -> V3Config:
    """DeepSeek-V3.2: V3 with an indexer in every layer; its weight scales are fp32, those of activations are not."""
    return replace(
        v3(),
        name="v32",
        index=IndexSizes(
            heads=64,
            dim=128,
            topk=2048,
            rope=IndexerRope.HALF_SPLIT,
            key=INDEX_FP8_POW2,
            latent=KV_V32_DEMO,
        ),
        activation=FP8_1X128_UE8M0,
        residual=ResidualNorm.UNROUNDED,
    )
