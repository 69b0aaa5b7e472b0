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
RECORD_FORMATS = {f.record_bytes: f for f in (KV_FP8, KV_FP4, INDEX_FP4)}  # the width of a record names its format


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
        if self.window.channels != self.main.channels:
            raise ValueError(f"main: expected {self.window.channels} channels, got {self.main.channels}")
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
    BF16_RELEASE = "bf16_release"  # dot product, weighted product and sum each rounded to bf16: DeepSeek release code
    BF16_CHAINS = "bf16_chains"  # four chains of bf16 fma, heads c, c + 4, c + 8, ... each: DeepGEMM on SM100


@dataclass(frozen=True, kw_only=True)
class MhcConfig:
    """Residual streams and how they are mixed; a site has (2 + streams) * streams mixing coefficients."""

    streams: int
    sinkhorn_iters: int  # column steps; the softmax counts as the first row step
    eps: float  # added to pre, to every softmax entry and to every Sinkhorn sum
    norm_eps: float  # of the norm over all streams of a token
    post_scale: float
    shifted: bool  # V4.1: a sub-layer reads the stream with the `pre` of the one before it; V4: with its own

    def __post_init__(self) -> None:
        for name in ("streams", "sinkhorn_iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("eps", "post_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if not self.norm_eps >= 2.0**-126:
            raise ValueError(f"norm_eps: expected a normal fp32 number, at least 2^-126, got {self.norm_eps}")

    @property
    def coefficients(self) -> int:
        """Mixing coefficients of one site: streams to read, streams to write, and their square between streams."""
        return (2 + self.streams) * self.streams


MHC_V41 = MhcConfig(streams=4, sinkhorn_iters=20, eps=1e-6, norm_eps=1e-20, post_scale=2.0, shifted=True)
MHC_V4 = MhcConfig(streams=4, sinkhorn_iters=20, eps=1e-6, norm_eps=1e-6, post_scale=2.0, shifted=False)


class OutsideVocabulary(enum.Enum):
    """What a token id that the vocabulary does not have stands for, where no mask calls it an image."""

    IMAGE = "image"  # an image token: DeepInfer numbers the places of an image beyond the vocabulary
    REFUSE = "refuse"  # a mistake of the caller


@dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """Sizes of the n-gram memory: one hashed table per layer of `layer_ids`."""

    hidden: int
    streams: int  # residual streams; each has its own key, all share one value
    layer_ids: tuple[int, ...]
    max_ngram: int  # n-grams of 2 … max_ngram tokens are looked up
    num_heads: int  # hashes, each with a table of its own, for every n
    head_dim: int  # width of a table row
    vocab_start: int  # table sizes are the primes from here on
    num_classes: int  # of the compressed vocabulary; an input of every multiplier
    pad_id: int  # token id, not class, that stands for what lies before the sequence
    eps: float = 1e-20

    def __post_init__(self) -> None:
        least = {"hidden": 1, "streams": 1, "max_ngram": 2, "num_heads": 1, "vocab_start": 2, "num_classes": 1}
        for name, low in (*least.items(), ("pad_id", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}: expected at least {low}, got {getattr(self, name)}")
        if self.head_dim < 32 or self.head_dim % 32:
            raise ValueError(f"head_dim: expected a positive multiple of 32, got {self.head_dim}")
        if len(set(self.layer_ids)) != len(self.layer_ids) or min(self.layer_ids, default=-1) < 0:
            raise ValueError(f"layer_ids: expected distinct layer numbers, got {self.layer_ids}")
        if not self.eps > 0:
            raise ValueError(f"eps: expected a positive number, got {self.eps}")

    @property
    def num_columns(self) -> int:
        """Table rows that one token looks up in one layer."""
        return (self.max_ngram - 1) * self.num_heads

    @property
    def embed_dim(self) -> int:
        """Width of what one token looks up in one layer."""
        return self.num_columns * self.head_dim


@dataclass(frozen=True, kw_only=True)
class EngramLayout:
    """Constants of the hash of every layer; `reference/engram_vocab.py` makes them.

    `multipliers[l][s]` belongs to the token s places back, `primes[l][z]` is the size of sub-table z: the columns of
    the 2-grams come first, `num_heads` for every n.
    """

    num_heads: int
    num_classes: int
    multipliers: tuple[tuple[int, ...], ...]
    primes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.multipliers or len(self.multipliers) != len(self.primes):
            raise ValueError(f"primes: expected {len(self.multipliers)} layers, got {len(self.primes)}")
        columns = (self.window - 1) * self.num_heads
        for row, sizes in zip(self.multipliers, self.primes, strict=True):
            if len(row) != self.window or len(sizes) != columns or self.window < 2:
                raise ValueError(f"primes: expected {columns} for {self.window} multipliers, got {len(sizes)}")
            if min(row) < 1 or max(row) * (self.num_classes - 1) >= 2**63:
                raise ValueError(f"multipliers: expected products with a class below 2^63, got {row}")
            if min(sizes) < 1 or sum(sizes) >= 2**31:
                raise ValueError(f"primes: expected positive sizes that add up to less than 2^31, got {sum(sizes)}")

    @property
    def window(self) -> int:
        """Tokens that a hash sees: the own one and those before it."""
        return len(self.multipliers[0])

    @property
    def num_columns(self) -> int:
        """Table rows that one token looks up in one layer."""
        return len(self.primes[0])

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Rows of the table of every layer."""
        return tuple(sum(sizes) for sizes in self.primes)

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """First row of every sub-table."""
        return tuple(tuple(sum(sizes[:z]) for z in range(len(sizes))) for sizes in self.primes)


ENGRAM_V41 = EngramConfig(
    hidden=5120, streams=4, layer_ids=(1, 14), max_ngram=4, num_heads=8, head_dim=256, pad_id=2,
    vocab_start=16_000_000, num_classes=99_092
)  # fmt: skip
ENGRAM_TINY = replace(
    ENGRAM_V41, hidden=512, layer_ids=(1,), num_heads=2, head_dim=128, vocab_start=1000, num_classes=1000
)


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
