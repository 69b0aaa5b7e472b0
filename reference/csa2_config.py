"""Sizes and numeric choices of a CSA2 stack, and the released ones. Nothing here computes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .cache_plan import CachePlan
from .config import (
    KV_FP4,
    MscaleRule,
    PageLayout,
    RecordFormat,
    RopeConfig,
    ScoreOrder,
    SlidingWindow,
    Truncation,
    YarnConfig,
)
from .topology import TINY_TOPOLOGY, V41_TOPOLOGY, Topology


class CastPoints(enum.Enum):
    """Where the output side of a layer rounds; the two moves one layer by D ~ 8e-4, so they are never compared."""

    RELEASE = "release"  # bf16 output, bf16 product with wo_a, bf16 z: release reference
    FUSED = "fused"  # fp32 output to Q8, e4m3 product with wo_a, fp32 z to Q8: DeepInfer on SM100


@dataclass(frozen=True, kw_only=True)
class Csa2Config:
    """Sizes and choices of a CSA2 stack."""

    hidden: int
    num_heads: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    backtracking: int  # tokens that a step may take back, and the most that a decode step holds
    page_tokens: int
    rope_window: RopeConfig  # layers of ratio 0
    rope_main: RopeConfig  # all others: queries, window keys, entries, index keys, output
    topology: Topology
    cast: CastPoints
    score_order: ScoreOrder
    layout: PageLayout  # of rings and main pages; index keys are sectioned
    main: RecordFormat = KV_FP4
    truncation: Truncation = Truncation.OFF  # of the decoder
    keep: int = 0
    eps: float = 1e-20

    def __post_init__(self) -> None:
        for name in ("hidden", "num_heads", "q_rank", "o_groups", "o_rank", "window", "backtracking"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_heads % self.o_groups:
            raise ValueError(f"o_groups: expected a divisor of {self.num_heads}, got {self.o_groups}")
        self.sliding(decoder=True)  # refuses a keep below the ring

    @property
    def head_dim(self) -> int:
        """Channels of a query head, of a key, and of a value."""
        return self.main.channels

    @property
    def plan(self) -> CachePlan:
        """Sizes of pages and states."""
        return CachePlan(
            ratios=self.topology.ratios,
            owners=self.topology.kv_sources,
            draft_layers=self.topology.draft_layers,
            page_tokens=self.page_tokens,
            window=self.window,
            backtracking=self.backtracking,
            main=self.main,
        )

    def sliding(self, *, decoder: bool) -> SlidingWindow:
        """The window of an encoder or a decoder layer."""
        ring = self.window + self.backtracking
        if not decoder:
            return SlidingWindow(window=self.window, ring=ring)
        return SlidingWindow(window=self.window, ring=ring, truncation=self.truncation, keep=self.keep)

    def rope(self, layer: int) -> RopeConfig:
        """The frequencies of everything that the layer rotates."""
        return self.rope_main if self.topology.ratios[layer] else self.rope_window


V41_YARN = YarnConfig(
    factor=16.0,
    original_length=65536,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.0,
    mscale_all_dim=0.0,
    mscale_rule=MscaleRule.DEMO,
)
V41_ROPE_WINDOW = RopeConfig(rope_dim=64, theta=10000.0, yarn=None)
V41_ROPE_MAIN = RopeConfig(rope_dim=64, theta=160000.0, yarn=V41_YARN)


def v41_flash_csa2(*, cast: CastPoints, score_order: ScoreOrder, layout: PageLayout) -> Csa2Config:
    """The attention of V4.1-Flash."""
    return Csa2Config(
        hidden=5120,
        num_heads=64,
        q_rank=1280,
        o_groups=8,
        o_rank=1024,
        window=128,
        backtracking=6,
        page_tokens=128,
        rope_window=V41_ROPE_WINDOW,
        rope_main=V41_ROPE_MAIN,
        topology=V41_TOPOLOGY,
        cast=cast,
        score_order=score_order,
        layout=layout,
    )


def tiny_csa2(*, cast: CastPoints, score_order: ScoreOrder, layout: PageLayout) -> Csa2Config:
    """Six layers of every mode with real record sizes, that a CPU runs in seconds."""
    return Csa2Config(
        hidden=96,
        num_heads=4,
        q_rank=64,
        o_groups=2,
        o_rank=32,
        window=4,
        backtracking=6,
        page_tokens=16,
        rope_window=V41_ROPE_WINDOW,
        rope_main=V41_ROPE_MAIN,
        topology=TINY_TOPOLOGY,
        cast=cast,
        score_order=score_order,
        layout=layout,
    )
