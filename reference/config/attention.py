"""Configurations of the attention blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .formats import PageLayout, RecordFormat, WeightCast


class Pairing(enum.Enum):
    """Which two channels RoPE rotates together."""

    INTERLEAVED = "interleaved"  # (2i, 2i + 1)
    HALF_SPLIT = "half_split"  # (i, i + r / 2)


class RopeSpan(enum.Enum):
    """Which channels of a head are rotary."""

    FIRST = "first"
    LAST = "last"


class MscaleRule(enum.Enum):
    """Which YaRN magnitude field feeds what; equal for every released config."""

    DEMO = "demo"  # softmax scale by mscale², tables unscaled: DeepSeek release code
    HF = "hf"  # softmax scale by mscale_all_dim², tables by m(mscale) / m(mscale_all_dim): transformers


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN context extension of a RoPE frequency table."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    mscale_rule: MscaleRule

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"factor: expected at least 1, got {self.factor}")
        if self.original_length <= 0:
            raise ValueError(f"original_length: expected a positive number, got {self.original_length}")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(f"beta_fast: expected beta_fast > beta_slow > 0, got {self.beta_fast}, {self.beta_slow}")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """A rotary frequency table: width of the rotated slice, base, and YaRN if it applies."""

    rope_dim: int
    theta: float
    yarn: YarnConfig | None

    def __post_init__(self) -> None:
        if self.rope_dim <= 0 or self.rope_dim % 2:
            raise ValueError(f"rope_dim: expected a positive even number, got {self.rope_dim}")
        if not self.theta > 1:
            raise ValueError(f"theta: expected a number above 1, got {self.theta}")


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Sizes of one multi-head latent attention block; `rope.rope_dim` is the width of the rotary slice."""

    hidden: int
    num_heads: int
    q_lora_rank: int  # 0: queries are projected directly, without a norm
    kv_lora_rank: int
    nope_dim: int  # channels of a query or key head that carry no position
    value_dim: int
    rope: RopeConfig
    weight_cast: WeightCast
    norm_eps: float = 1e-6  # of the two latent norms, in every release

    def __post_init__(self) -> None:
        for name in ("hidden", "num_heads", "kv_lora_rank", "nope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.q_lora_rank < 0:
            raise ValueError(f"q_lora_rank: expected 0 or more, got {self.q_lora_rank}")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps: expected a positive number, got {self.norm_eps}")

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached row: the key/value latent and the rotary key."""
        return self.kv_lora_rank + self.rope.rope_dim


@dataclass(frozen=True, kw_only=True)
class TwoCaches:
    """The records that one softmax reads: those of the sliding window and those of the compressed main cache."""

    window: RecordFormat
    main: RecordFormat
    layout: PageLayout  # of both: no kernel reads a mixture
    scale: float  # factor of the scores

    def __post_init__(self) -> None:
        if self.window.width != self.main.width:
            raise ValueError(f"main: expected {self.window.width} channels, got {self.main.width}")
        if not self.scale > 0:
            raise ValueError(f"scale: expected a positive number, got {self.scale}")


class RecordTap(enum.Enum):
    """Which rows the fused store hands out beside the bytes that it stores."""

    NONE = "none"
    NORM = "norm"  # normalised, before RoPE: what index keys are made from
    ROPE = "rope"  # rotated, before the quantiser
    CAST_BACK = "cast_back"  # the values that the stored bytes stand for: what a prefill chunk attends to


@dataclass(frozen=True, kw_only=True)
class FusedStore:
    """How norm, RoPE, quantiser and store in one launch normalise, address and tap."""

    eps: float
    layout: PageLayout
    tap: RecordTap
    fmt: RecordFormat | None = None  # one of RECORD_WRITERS where these know the width of the cache

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"eps: expected a positive number, got {self.eps}")


class Truncation(enum.Enum):
    """How decoder layers treat the rows of a prompt before its last `keep` tokens."""

    OFF = "off"  # encoder layers, and exact prefill
    MASK = "mask"  # all rows are computed, none looks below the kept ones
    COMPACT = "compact"  # only kept rows are computed and stored, at least one of every chunk


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """Sizes of a sliding window kept in a ring, and its truncation."""

    window: int  # keys that a query sees, its own among them
    ring: int  # rows of the ring: the window and the tokens that may be taken back
    truncation: Truncation = Truncation.OFF
    keep: int = 0  # tokens at the end of a prompt that truncation keeps

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: expected at least 1, got {self.window}")
        if self.ring < self.window:
            raise ValueError(f"ring: expected at least the window of {self.window}, got {self.ring}")
        if self.truncation is not Truncation.OFF and self.keep < self.ring:
            raise ValueError(f"keep: expected at least the ring of {self.ring}, got {self.keep}")


@dataclass(frozen=True, kw_only=True)
class CompressorConfig:
    """How tokens are pooled: `ratio` tokens to an entry, with `overlap` also those of the group before."""

    ratio: int
    overlap: bool = False  # a token then has two series of channels: one for the next group, one for its own

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise ValueError(f"ratio: expected at least 1, got {self.ratio}")
        if self.overlap and self.ratio == 1:
            raise ValueError("overlap: expected False with ratio 1, got True")

    @property
    def series(self) -> int:
        """Gate and value rows are this many times as wide as an entry."""
        return 2 if self.overlap else 1

    @property
    def span(self) -> int:
        """Tokens that an entry is pooled from."""
        return self.ratio * self.series

    def ring(self, backtrack: int) -> int:
        """Tokens that the state keeps when up to `backtrack` tokens may be run again."""
        return self.span + max(0, backtrack - 1)


C1 = CompressorConfig(ratio=1)  # V4.1, decoder: no gate, no state
C2 = CompressorConfig(ratio=2)  # V4.1, encoder
CSA4 = CompressorConfig(ratio=4, overlap=True)  # V4
HCA128 = CompressorConfig(ratio=128)  # V4


class ScoreOrder(enum.Enum):
    """How index scores are rounded and in which order heads are added; published implementations disagree."""

    FP32 = "fp32"  # dot products and their weighted sum in fp32, fp32 scores: the quality oracle
    BF16_ONCE = "bf16_once"  # FP32, then one rounding to bf16: as the V4 report describes it
    BF16_RELEASE = "bf16_release"  # dot product, weighted product and sum each rounded to bf16: DeepSeek release code
    BF16_CHAINS = "bf16_chains"  # four chains of bf16 fma, heads c, c + 4, c + 8, ... each: DeepGEMM on SM100
