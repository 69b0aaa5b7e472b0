"""V4.1-Flash in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import MHC_V41, EngramConfig, MhcConfig


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Attention of V4.1: one compression ratio for every layer, drafts included; 0 is a window alone."""

    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int  # per group
    window: int
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    candidate_source_layer: int
    candidate_topk_blocks: int
    candidate_block_size: int
    index_heads: int
    index_dim: int
    index_topk: int

    def __post_init__(self) -> None:
        if self.num_heads % self.o_groups:
            raise ValueError(f"o_groups: expected a divisor of {self.num_heads} heads, got {self.o_groups}")
        if set(self.compress_ratios) - {0, 1, 2}:
            raise ValueError(f"compress_ratios: expected ratios 0, 1 and 2, got {sorted(set(self.compress_ratios))}")
        for name in ("kv_source_layers", "index_source_layers"):
            idle = [layer for layer in getattr(self, name) if not self.compress_ratios[layer]]
            if idle:
                raise ValueError(f"{name}: expected layers that compress, got {idle}")
        if not set(self.kv_source_layers) <= set(self.index_source_layers):
            raise ValueError(f"kv_source_layers: expected index sources, got {self.kv_source_layers}")


@dataclass(frozen=True, kw_only=True)
class MoeSizes:
    """Experts of every block; drafts have fewer of the same width."""

    experts: int
    shared_experts: int
    topk: int
    width: int
    route_scale: float
    swiglu_limit: float

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk: expected a number in 1..{self.experts}, got {self.topk}")


@dataclass(frozen=True, kw_only=True)
class EngramSizes:
    """Memory layers and the rows of their tables."""

    layers: tuple[int, ...]
    table_rows: tuple[int, ...]
    max_ngram: int
    heads: int  # hash heads of each n-gram length from two up
    head_dim: int
    vocab_size: int
    compressed_vocab_size: int
    pad_token_id: int

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.table_rows):
            raise ValueError(f"table_rows: expected one number for each of {self.layers}, got {self.table_rows}")

    @property
    def rows_per_token(self) -> int:
        """Table rows that one layer reads for a token."""
        return (self.max_ngram - 1) * self.heads


@dataclass(frozen=True, kw_only=True)
class DraftSizes:
    """Draft blocks: attention and experts like the backbone's, fewer experts, and what they own beside."""

    layers: int
    target_layers: tuple[int, ...]
    experts: int
    topk: int
    markov_rank: int
    noise_token_id: int


@dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """Vision tower and its projector."""

    layers: int
    hidden: int
    heads: int
    width: int
    patch: int
    downsample: int
    rope_theta: float
    max_tokens: int
    min_pixels: int
    image_token_id: int


@dataclass(frozen=True, kw_only=True)
class V41Config:
    """A model of the V4.1 family."""

    name: str
    hidden: int
    num_layers: int
    vocab_size: int
    norm_eps: float
    attention: AttentionSizes
    moe: MoeSizes
    mhc: MhcConfig
    engram: EngramSizes
    draft: DraftSizes
    vision: VisionSizes
    rope_theta: float
    compress_rope_theta: float
    max_positions: int

    def __post_init__(self) -> None:
        blocks = self.num_layers + self.draft.layers
        if len(self.attention.compress_ratios) != blocks:
            got = len(self.attention.compress_ratios)
            raise ValueError(f"attention: expected a ratio for each of {blocks} blocks, got {got}")
        if any(self.attention.compress_ratios[self.num_layers :]):
            raise ValueError("attention: expected ratio 0 in draft blocks, got a compressing one")
        for name, layers in (("engram", self.engram.layers), ("draft", self.draft.target_layers)):
            if any(not 0 <= layer < self.num_layers for layer in layers):
                raise ValueError(f"{name}: expected layers below {self.num_layers}, got {layers}")

    @property
    def memory(self) -> EngramConfig:
        """Its n-gram memory."""
        e = self.engram
        return EngramConfig(
            hidden=self.hidden,
            streams=self.mhc.streams,
            layer_ids=e.layers,
            max_ngram=e.max_ngram,
            num_heads=e.heads,
            head_dim=e.head_dim,
            vocab_start=e.vocab_size,
            num_classes=e.compressed_vocab_size,
            pad_id=e.pad_token_id,
            eps=self.norm_eps,
        )


def v41_flash() -> V41Config:
    """DeepSeek-V4.1-Flash as released (v41-blocks.md section 0.2, v41-attention.md section 1.1)."""
    return V41Config(
        name="v41_flash",
        hidden=5120,
        num_layers=40,
        vocab_size=129280,
        norm_eps=1e-20,
        attention=_v41_flash_attention(),
        moe=MoeSizes(experts=384, shared_experts=1, topk=6, width=2304, route_scale=1.5, swiglu_limit=10.0),
        mhc=MHC_V41,
        engram=EngramSizes(
            layers=(1, 14),
            table_rows=(384006168, 384016682),
            max_ngram=4,
            heads=8,
            head_dim=256,
            vocab_size=16000000,
            compressed_vocab_size=99092,
            pad_token_id=2,
        ),
        draft=DraftSizes(
            layers=3, target_layers=(37, 38, 39), experts=128, topk=3, markov_rank=256, noise_token_id=128799
        ),
        vision=_v41_flash_vision(),
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        max_positions=1048576,
    )


def _v41_flash_attention() -> AttentionSizes:
    return AttentionSizes(
        num_heads=64,
        head_dim=512,
        rope_dim=64,
        q_lora_rank=1280,
        o_groups=8,
        o_lora_rank=1024,
        window=128,
        compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layers=(2, 8, 14, 20),
        index_source_layers=(2, 8, 14, 20, 24, 28, 32, 36),
        candidate_source_layer=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        index_heads=32,
        index_dim=128,
        index_topk=512,
    )


def _v41_flash_vision() -> VisionSizes:
    return VisionSizes(
        layers=32,
        hidden=1024,
        heads=16,
        width=2816,
        patch=14,
        downsample=3,
        rope_theta=10000.0,
        max_tokens=1024,
        min_pixels=295936,
        image_token_id=129264,
    )
