"""Configuration of one attention layer of V4."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .attention import CompressorConfig, MscaleRule, RopeConfig, ScoreOrder, SlidingWindow, YarnConfig
from .formats import FP8_1X128, INDEX_FP4, KV_V4, QuantFormat, RecordFormat


class V4Kind(enum.Enum):
    """What a layer attends to beside its sliding window."""

    SLIDING = "sliding"  # nothing
    CSA = "csa"  # the best compressed entries, of overlapping groups
    HCA = "hca"  # every compressed entry


class HeadNorm(enum.Enum):
    """How the weightless RMS norm of a query head rounds; published implementations disagree by up to 2^-8."""

    RELEASE = "release"  # square, mean, mean plus eps, reciprocal root and product each to bf16: DeepSeek release code
    FACTOR = "factor"  # the factor in fp32, rounded to bf16, then the product rounded: transformers
    FUSED = "fused"  # fp32, one rounding at the end: SGLang


class IndexCast(enum.Enum):
    """What index queries and keys are stored as."""

    PLAIN = "plain"  # bf16 values, no Hadamard transform: transformers
    FP4 = "fp4"  # Hadamard transform, then e2m1 in groups of 32 with UE8M0 scales: DeepSeek release code
    FP8 = "fp8"  # Hadamard transform, then e4m3 rows of 128 with an fp32 scale: SGLang's option


class OutputCast(enum.Enum):
    """What the first output product of a group of heads sees."""

    RELEASE = "release"  # bf16 rows
    FUSED = "fused"  # fp32 rows quantised to e4m3 in groups of 128 with UE8M0 scales: DeepGEMM's grouped product


@dataclass(frozen=True, kw_only=True)
class V4AttnConfig:
    """Sizes and numeric choices of one attention layer."""

    kind: V4Kind
    hidden: int
    num_heads: int
    head_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int  # keys that a query sees, its own among them
    ratio: int  # tokens to an entry; 0 for SLIDING
    index_heads: int  # of CSA, otherwise 0, as the next two
    index_dim: int
    index_topk: int
    rope: RopeConfig  # of everything that the layer rotates
    head_norm: HeadNorm
    index: IndexCast
    score_order: ScoreOrder
    output: OutputCast
    cache: RecordFormat | None = KV_V4  # None: keys and entries stay bf16, without a quantiser
    backtracking: int = 1  # tokens that a step may take back, and the most that a decode step holds
    page_tokens: int = 256
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden", "num_heads", "q_rank", "o_groups", "o_rank", "window", "backtracking"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_heads % self.o_groups:
            raise ValueError(f"o_groups: expected a divisor of {self.num_heads}, got {self.o_groups}")
        if self.rope.rope_dim > self.head_dim:
            raise ValueError(f"rope: expected up to {self.head_dim} channels, got {self.rope.rope_dim}")
        if (self.ratio > 1) != (self.kind is not V4Kind.SLIDING) or (self.kind is V4Kind.SLIDING and self.ratio):
            raise ValueError(f"ratio: expected 0 for SLIDING and 2 or more otherwise, got {self.ratio}")
        if self.ratio and self.page_tokens % self.ratio:
            raise ValueError(f"page_tokens: expected a multiple of {self.ratio}, got {self.page_tokens}")
        for name in ("index_heads", "index_dim", "index_topk"):
            if (getattr(self, name) > 0) != (self.kind is V4Kind.CSA):
                raise ValueError(f"{name}: expected a number above 0 for CSA only, got {getattr(self, name)}")
        if self.cache is not None and (self.head_dim, self.rope.rope_dim) != (self.cache.width, self.cache.tail):
            wanted = f"{self.cache.width} channels with {self.cache.tail} rotary ones"
            raise ValueError(f"cache: expected None or {wanted}, got {self.head_dim} and {self.rope.rope_dim}")
        if self.kind is V4Kind.CSA and self.index is not IndexCast.PLAIN and self.index_dim != INDEX_FP4.channels:
            raise ValueError(f"index_dim: expected {INDEX_FP4.channels} for quantised keys, got {self.index_dim}")

    @property
    def compressor(self) -> CompressorConfig:
        """How tokens become entries."""
        return CompressorConfig(ratio=self.ratio, overlap=self.kind is V4Kind.CSA)

    @property
    def sliding(self) -> SlidingWindow:
        """The window and its ring."""
        return SlidingWindow(window=self.window, ring=self.window + self.backtracking)

    @property
    def index_quant(self) -> QuantFormat | None:
        """The quantiser of index queries and keys."""
        return {IndexCast.PLAIN: None, IndexCast.FP4: INDEX_FP4.quant, IndexCast.FP8: FP8_1X128}[self.index]

    @property
    def page_entries(self) -> int:
        """Compressed entries of a page."""
        return self.page_tokens // self.ratio


V4_YARN = YarnConfig(
    factor=16.0,
    original_length=65536,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.0,
    mscale_all_dim=0.0,
    mscale_rule=MscaleRule.DEMO,
)
V4_ROPE_SLIDING = RopeConfig(rope_dim=64, theta=10000.0, yarn=None)
V4_ROPE_COMPRESSED = RopeConfig(rope_dim=64, theta=160000.0, yarn=V4_YARN)
V4_RATIOS = {V4Kind.SLIDING: 0, V4Kind.CSA: 4, V4Kind.HCA: 128}


def v4_flash_attn(
    kind: V4Kind, *, head_norm: HeadNorm, index: IndexCast, score_order: ScoreOrder, output: OutputCast
) -> V4AttnConfig:
    """A layer of V4-Flash."""
    csa = kind is V4Kind.CSA
    return V4AttnConfig(
        kind=kind,
        hidden=4096,
        num_heads=64,
        head_dim=512,
        q_rank=1024,
        o_groups=8,
        o_rank=1024,
        window=128,
        ratio=V4_RATIOS[kind],
        index_heads=64 * csa,
        index_dim=128 * csa,
        index_topk=512 * csa,
        rope=V4_ROPE_SLIDING if kind is V4Kind.SLIDING else V4_ROPE_COMPRESSED,
        head_norm=head_norm,
        index=index,
        score_order=score_order,
        output=output,
    )


def v4_pro_attn(
    kind: V4Kind, *, head_norm: HeadNorm, index: IndexCast, score_order: ScoreOrder, output: OutputCast
) -> V4AttnConfig:
    """A layer of V4-Pro."""
    csa = kind is V4Kind.CSA
    return V4AttnConfig(
        kind=kind,
        hidden=7168,
        num_heads=128,
        head_dim=512,
        q_rank=1536,
        o_groups=16,
        o_rank=1024,
        window=128,
        ratio=V4_RATIOS[kind],
        index_heads=64 * csa,
        index_dim=128 * csa,
        index_topk=1024 * csa,
        rope=V4_ROPE_SLIDING if kind is V4Kind.SLIDING else V4_ROPE_COMPRESSED,
        head_norm=head_norm,
        index=index,
        score_order=score_order,
        output=output,
    )
