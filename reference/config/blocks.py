"""Configurations of the blocks outside attention."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from .formats import FP8_32X32, MXFP4, Q8, QuantFormat


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
