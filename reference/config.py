"""Frozen configurations and enums of numeric choices, shared by name with the fast path.

Nothing here computes: `optimized/` may import this module without sharing arithmetic with the reference.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WeightCast(enum.Enum):
    """Where RMSNorm rounds relative to its weight; published implementations disagree."""

    AFTER_WEIGHT = "after_weight"  # (x * rstd) * w, one rounding: DeepSeek release code, DeepInfer
    BEFORE_WEIGHT = "before_weight"  # round x * rstd, multiply by w, round again: transformers V3, V3.2


class ScaleKind(enum.Enum):
    """How a quantiser rounds and stores its scale."""

    UE8M0 = "ue8m0"  # rounded up to a power of two; stored as the byte exponent + 127
    E4M3 = "e4m3"  # rounded to e4m3fn
    F32 = "f32"  # amax / max_value in fp32


class CodeKind(enum.Enum):
    """The element format of a quantiser."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"  # packed two to a byte, even index in the low nibble


@dataclass(frozen=True, kw_only=True)
class QuantFormat:
    """A group quantiser: `rows` x `group` elements share one scale (rows = 1 for activations)."""

    name: str
    rows: int
    group: int
    code: CodeKind
    scale: ScaleKind
    amax_floor: float  # applied to amax, never to the scale

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows: expected at least 1, got {self.rows}")
        if self.group < 2 or self.group % 2:
            raise ValueError(f"group: expected a positive even number, got {self.group}")
        if not self.amax_floor > 0:
            raise ValueError(f"amax_floor: expected a positive number, got {self.amax_floor}")

    @property
    def max_value(self) -> float:
        """The largest magnitude of the element format."""
        return 448.0 if self.code is CodeKind.E4M3 else 6.0


Q8 = QuantFormat(name="q8", rows=1, group=32, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4)
Q4I = QuantFormat(name="q4i", rows=1, group=32, code=CodeKind.E2M1, scale=ScaleKind.UE8M0, amax_floor=6 * 2.0**-126)
Q4K = QuantFormat(name="q4k", rows=1, group=16, code=CodeKind.E2M1, scale=ScaleKind.E4M3, amax_floor=6 * 2.0**-9)
FP8_1X128 = QuantFormat(name="fp8_1x128", rows=1, group=128, code=CodeKind.E4M3, scale=ScaleKind.F32, amax_floor=1e-4)
FP8_1X128_UE8M0 = QuantFormat(
    name="fp8_1x128_ue8m0", rows=1, group=128, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4
)
FP8_128X128 = QuantFormat(
    name="fp8_128x128", rows=128, group=128, code=CodeKind.E4M3, scale=ScaleKind.F32, amax_floor=1e-4
)
FP8_32X32 = QuantFormat(name="fp8_32x32", rows=32, group=32, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4)
MXFP4 = QuantFormat(name="mxfp4", rows=1, group=32, code=CodeKind.E2M1, scale=ScaleKind.UE8M0, amax_floor=6 * 2.0**-126)

QUANT_FORMATS = {f.name: f for f in (Q8, Q4I, Q4K, FP8_1X128, FP8_1X128_UE8M0, FP8_128X128, FP8_32X32, MXFP4)}


class PageLayout(enum.Enum):
    """Where a page of a cache keeps the scales of its records."""

    INTERLEAVED = "interleaved"  # [data | scales] of one entry after the other: DeepInfer's main and SWA caches
    SECTIONED = "sectioned"  # the data of all entries, then the scales of all entries: index keys, SGLang's caches


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """What one cache entry of `channels` values is stored as: element codes, then the scales of its groups."""

    name: str
    channels: int
    quant: QuantFormat

    def __post_init__(self) -> None:
        if self.channels <= 0 or self.channels % self.quant.group:
            raise ValueError(f"channels: expected a positive multiple of {self.quant.group}, got {self.channels}")

    @property
    def data_bytes(self) -> int:
        """Bytes of the element codes of one entry."""
        return self.channels if self.quant.code is CodeKind.E4M3 else self.channels // 2

    @property
    def record_bytes(self) -> int:
        """Bytes of one entry; every scale is one byte."""
        return self.data_bytes + self.channels // self.quant.group


KV_FP8 = RecordFormat(name="kv_fp8", channels=512, quant=Q8)  # 528 bytes: sliding window, optional main cache
KV_FP4 = RecordFormat(name="kv_fp4", channels=512, quant=Q4K)  # 288 bytes: compressed main cache of V4.1
INDEX_FP4 = RecordFormat(name="index_fp4", channels=128, quant=Q4I)  # 68 bytes: index keys of V4.1


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


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of the image tower, of its projector, and the rules of the preprocessing plan."""

    hidden: int = 1024
    num_heads: int = 16
    num_layers: int = 32
    intermediate: int = 2816
    model_dim: int = 5120
    patch: int = 14
    downsample: int = 3  # patches along each side of one image token
    max_tokens: int = 1024  # of one span, markers included
    min_pixels: int = 295936
    max_wh_ratio: float | None = None
    theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden", "num_heads", "num_layers", "intermediate", "model_dim", "patch", "downsample"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.hidden % (4 * self.num_heads):
            raise ValueError(f"hidden: expected a multiple of 4 x {self.num_heads} heads, got {self.hidden}")
        if self.max_tokens < 5:
            raise ValueError(f"max_tokens: expected at least 5, got {self.max_tokens}")
        if self.max_wh_ratio is not None and not self.max_wh_ratio > 0:
            raise ValueError(f"max_wh_ratio: expected a positive number or None, got {self.max_wh_ratio}")

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.num_heads


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """What becomes of one image: its size in pixels, patches and tokens."""

    width: int
    height: int
    grid_w: int
    grid_h: int
    tokens_w: int
    tokens_h: int

    @property
    def tokens(self) -> int:
        """Length of the span: a newline behind every row, a start and an end."""
        return self.tokens_h * (self.tokens_w + 1) + 2


class TokenType(enum.IntEnum):
    """What stands at a position of a prompt, as the release numbers it."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3
