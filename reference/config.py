"""Frozen configurations and enums of numeric choices, shared by name with the fast path.

Nothing here computes: `optimized/` may import this module without sharing arithmetic with the reference.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


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
FP8_128X128_UE8M0 = QuantFormat(
    name="fp8_128x128_ue8m0", rows=128, group=128, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4
)
FP8_32X32 = QuantFormat(name="fp8_32x32", rows=32, group=32, code=CodeKind.E4M3, scale=ScaleKind.UE8M0, amax_floor=1e-4)
MXFP4 = QuantFormat(name="mxfp4", rows=1, group=32, code=CodeKind.E2M1, scale=ScaleKind.UE8M0, amax_floor=6 * 2.0**-126)

QUANT_FORMATS = {
    f.name: f for f in (Q8, Q4I, Q4K, FP8_1X128, FP8_1X128_UE8M0, FP8_128X128, FP8_128X128_UE8M0, FP8_32X32, MXFP4)
}


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


class Scoring(enum.Enum):
    """How a router turns a logit into a score."""

    SIGMOID = "sigmoid"  # V3, V3.2
    SQRT_SOFTPLUS = "sqrt_softplus"  # V4, V4.1; softplus is the identity above 20


class WeightSum(enum.Enum):
    """What the selected scores are divided by; published implementations disagree."""

    EXACT = "exact"  # their sum: release code of V3, V3.2 and V4
    PLUS_EPS = "plus_eps"  # their sum + 1e-20: V4.1, transformers


class GroupScore(enum.Enum):
    """How a group-limited router ranks groups of experts."""

    TOP2_SUM = "top2_sum"  # the two largest biased scores together: V3 with a bias
    MAX = "max"  # the largest score: V2, V3 without a bias


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """A router: how it scores, how many experts it selects, and within how many of its groups."""

    num_experts: int
    topk: int
    scoring: Scoring
    weight_sum: WeightSum
    route_scale: float
    num_groups: int = 1
    kept_groups: int = 1
    group_score: GroupScore = GroupScore.TOP2_SUM

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_experts < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups: expected a divisor of {self.num_experts} experts, got {self.num_groups}")
        if not 1 <= self.kept_groups <= self.num_groups:
            raise ValueError(f"kept_groups: expected 1 to {self.num_groups}, got {self.kept_groups}")
        if self.num_groups > 1 and self.group_score is GroupScore.TOP2_SUM and self.group_size < 2:
            raise ValueError(f"num_groups: expected two experts a group for its score, got {self.group_size}")
        if not 1 <= self.topk <= self.kept_groups * self.group_size:
            raise ValueError(f"topk: expected 1 to {self.kept_groups * self.group_size} experts, got {self.topk}")
        if not self.route_scale > 0:
            raise ValueError(f"route_scale: expected a positive number, got {self.route_scale}")

    @property
    def group_size(self) -> int:
        """Experts of a group; they have consecutive numbers."""
        return self.num_experts // self.num_groups


ROUTER_V4_FLASH = RouterConfig(
    num_experts=256, topk=6, scoring=Scoring.SQRT_SOFTPLUS, weight_sum=WeightSum.EXACT, route_scale=1.5
)
ROUTER_V4_PRO = replace(ROUTER_V4_FLASH, num_experts=384, route_scale=2.5)
ROUTER_V41 = replace(ROUTER_V4_PRO, weight_sum=WeightSum.PLUS_EPS, route_scale=1.5)
ROUTER_V41_DRAFT = replace(ROUTER_V41, num_experts=128, topk=3)
ROUTER_V3 = replace(ROUTER_V4_FLASH, topk=8, scoring=Scoring.SIGMOID, route_scale=2.5, num_groups=8, kept_groups=4)


class Combine(enum.Enum):
    """How the outputs of a token's experts are added; the two round at different places."""

    SINGLE = "single"  # shared, then every slot in order, one rounding: mega-MoE, DeepEP without multiple reduction
    MULTIPLE = "multiple"  # a rounded partial sum per rank first: DeepEP's default


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """What a mixture of experts computes with; `combine` has no default, because the two variants round apart."""

    routed: QuantFormat  # weights of the routed experts
    shared: QuantFormat  # weights of the shared expert
    activation: QuantFormat  # rows before each product
    swiglu_limit: float | None
    combine: Combine

    def __post_init__(self) -> None:
        if self.activation.rows != 1:
            raise ValueError(f"activation: expected groups of one row, got {self.activation.rows} rows")
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise ValueError(f"swiglu_limit: expected a positive number or None, got {self.swiglu_limit}")


def moe_v41(combine: Combine) -> MoeConfig:
    """The experts of V4.1: MXFP4 weights, an FP8 shared expert, 32-wide activations."""
    return MoeConfig(routed=MXFP4, shared=FP8_32X32, activation=Q8, swiglu_limit=10.0, combine=combine)
