"""Configuration of DeepSeek sparse attention (V3.2)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .attention import MlaConfig
from .formats import RecordFormat


class IndexerRope(enum.Enum):
    """Which channels of an index key or query rotate together; published implementations disagree, models too."""

    HALF_SPLIT = "half_split"  # (i, i + r / 2): what V3.2 was trained with; release code since November 2025
    INTERLEAVED = "interleaved"  # (2i, 2i + 1): first release of V3.2, where it is a fault; some derived models


@dataclass(frozen=True, kw_only=True)
class DsaConfig:
    """Sizes and choices of one block: latent attention, the indexer, and how many tokens a query keeps."""

    mla: MlaConfig
    index_heads: int
    index_dim: int
    topk: int
    indexer_rope: IndexerRope
    index_key: RecordFormat | None  # None: index rows are neither Hadamard transformed nor quantised
    latent: RecordFormat | None  # None: latents keep their storage dtype
    norm_eps: float = 1e-6  # of the layer norm of index keys

    def __post_init__(self) -> None:
        if not self.mla.q_lora_rank:
            raise ValueError("mla: expected a query latent, which the indexer shares, got q_lora_rank=0")
        for name in ("index_heads", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.index_dim < self.mla.rope.rope_dim:
            raise ValueError(f"index_dim: expected at least {self.mla.rope.rope_dim} channels, got {self.index_dim}")
        if self.index_key is not None and self.index_key.width != self.index_dim:
            raise ValueError(f"index_key: expected records of {self.index_dim} values, got {self.index_key.width}")
        if self.index_key is not None and self.index_dim & (self.index_dim - 1):
            raise ValueError(f"index_dim: expected a power of two for the Hadamard transform, got {self.index_dim}")
        parts = (self.mla.kv_lora_rank, self.mla.rope.rope_dim)
        if self.latent is not None and (self.latent.channels, self.latent.tail) != parts:
            got = (self.latent.channels, self.latent.tail)
            raise ValueError(f"latent: expected records of {parts[0]} + {parts[1]} values, got {got[0]} + {got[1]}")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps: expected a positive number, got {self.norm_eps}")
