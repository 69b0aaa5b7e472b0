"""Configurations of the scheduler, of the toy model that it is proved with, of step costs, and of grammars."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Fate(enum.IntEnum):
    """What one step does with a queued or running request."""

    STAYS = 0  # waits where it is
    RUNS = 1  # has rows in this step
    DROPPED = 2  # ended while it was queued
    IGNORED = 3  # too long for the prompt limit or the pool
    PREEMPTED = 4  # loses its blocks and is prefilled again
    STOPPED = 5  # would be preempted, but may not be prefilled again


class Finish(enum.IntEnum):
    """Why a stream ended."""

    OPEN = 0
    STOP = 1
    LENGTH = 2
    ABORTED = 3
    IGNORED = 4
    RESOURCES = 5
    FAILED = 6  # no token may follow: its grammar, or logits that no token can be drawn from


class StepKind(enum.IntEnum):
    """A batch is all prompt chunks or all decode rows."""

    DECODE = 0
    PROMPT = 1


class EngineKind(enum.Enum):
    """What an engine schedules: both kinds of step, or prompt chunks that are handed over."""

    NORMAL = "normal"
    PROMPT = "prompt"


def _positive(values: dict[str, int]) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name}: expected a positive number, got {value}")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine; `ranks` engines of them vote on the kind of every step.

    `block_size` tokens fill a block, `num_blocks` counts the ids of the pool (id 0 is never given out), `budget` bounds
    the tokens of a prompt step and `max_keys` the sum of the full lengths of its requests.
    """

    engine: EngineKind
    num_blocks: int
    block_size: int
    max_requests: int
    budget: int
    max_keys: int
    max_prompt: int
    max_length: int
    gamma: int  # drafts of a request in a step
    chunked: bool
    asynchronous: bool  # a step is scheduled before the one in flight is known
    scheduled_verification: bool  # fewer rows than gamma + 1 where drafts are not trusted
    stop_on_preempt: bool
    cp_size: int = 1
    ranks: int = 1
    all_interval: int = 70
    any_interval: int = 100

    def __post_init__(self) -> None:
        names = ("num_blocks", "block_size", "max_requests", "budget", "max_keys", "max_prompt", "max_length")
        more = ("cp_size", "ranks", "all_interval", "any_interval")
        _positive({name: getattr(self, name) for name in (*names, *more)})
        if self.gamma < 0:
            raise ValueError(f"gamma: expected a number from 0 on, got {self.gamma}")
        # no request grows by more than one block from one of its decode steps to the next
        if self.block_size <= self.reserve:
            raise ValueError(f"block_size: expected more than {self.reserve} tokens, got {self.block_size}")
        if self.max_keys < self.max_prompt:
            raise ValueError(f"max_keys: expected room for a prompt of {self.max_prompt} tokens, got {self.max_keys}")
        if self.budget < self.alignment:
            raise ValueError(
                f"budget: expected at least {self.alignment} for cp_size {self.cp_size}, got {self.budget}"
            )
        if not self.chunked and self.aligned(self.max_prompt) > self.budget:
            raise ValueError(
                f"budget: expected {self.aligned(self.max_prompt)} for whole prompts of {self.max_prompt} tokens, "
                f"got {self.budget}"
            )

    @property
    def alignment(self) -> int:
        """What a chunk's length is cut down to and its cost rounded up to."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def reserve(self) -> int:
        """Slots beyond the tokens the scheduler knows of: the drafts stored, and the rows of a step in flight."""
        return self.gamma + (self.gamma + 1 if self.asynchronous else 0)

    @property
    def max_positions(self) -> int:
        """Exclusive bound of every position that a step or its drafts touch."""
        return self.max_length + self.gamma + self.reserve

    def aligned(self, tokens: int) -> int:
        """`tokens` rounded up to the alignment."""
        return -(-tokens // self.alignment) * self.alignment

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a request that is known to hold `tokens` tokens."""
        return -(-(tokens + self.reserve) // self.block_size)


@dataclass(frozen=True, kw_only=True)
class WaitingQueue:
    """Requests in the order in which they wait, as columns.

    total_w: tokens to prefill (a preempted request has generated some of them); done_w: tokens of earlier chunks;
    held_w: blocks; is_ready_w: may be scheduled; has_ended_w: ended while queued; boundary_w: a position that a chunk
    must not cross, 0 if none; image_wi: first and one past last position of images, [w, i, 2], −1 where there is none.
    """

    total_w: Tensor
    done_w: Tensor
    held_w: Tensor
    is_ready_w: Tensor
    has_ended_w: Tensor
    boundary_w: Tensor
    image_wi: Tensor


@dataclass(frozen=True, kw_only=True)
class RunningBatch:
    """Decoding requests in the order in which they were admitted, as columns.

    output_r: tokens generated; total_r: all tokens that the scheduler knows of; held_r: blocks; is_constrained_r:
    follows a grammar, whose state cannot be made again.
    """

    output_r: Tensor
    total_r: Tensor
    held_r: Tensor
    is_constrained_r: Tensor


@dataclass(frozen=True, kw_only=True)
class ToyModel:
    """A model whose next token is a hash of the whole prefix, and a draft that is right in `quality` of 100 cases.

    h[p] = h[p−1] * radix + mix(token * stride + p), next = mix(h[p]) mod vocab_size, in 64 bits; mix is the finaliser
    x ^= x >> 31; x *= odd; x ^= x >> 29.
    """

    vocab_size: int
    eos: int
    quality: int = 50
    radix: int = 0x9E3779B97F4A7C15
    odd: int = 0xBF58476D1CE4E5B9
    stride: int = 0x94D049BB133111EB

    def __post_init__(self) -> None:
        _positive({"vocab_size": self.vocab_size})
        if not 0 <= self.quality <= 100:
            raise ValueError(f"quality: expected 0 to 100, got {self.quality}")


class Precision(enum.IntEnum):
    """FP8-equivalent operations of one multiply-add."""

    FP4 = 1
    FP8 = 2
    BF16 = 4
    FP32 = 8


@dataclass(frozen=True, kw_only=True)
class GemmCost:
    """A product of every row with a matrix of `inner` x `outer`."""

    inner: int
    outer: int
    precision: Precision

    @property
    def per_row(self) -> int:
        """FP8-equivalent operations of one row."""
        return self.inner * self.outer * self.precision


@dataclass(frozen=True, kw_only=True)
class PairCost:
    """Attention or scoring of `width` multiply-adds a pair; position p meets min((p + 1) div ratio, cap) keys."""

    ratio: int
    width: int
    precision: Precision
    cap: int = 0  # 0: none

    def __post_init__(self) -> None:
        _positive({"ratio": self.ratio, "width": self.width})
        if self.cap < 0:
            raise ValueError(f"cap: expected a number from 0 on, got {self.cap}")


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer computes for its rows; a consumer runs on the kept rows of a prompt only."""

    gemms: tuple[GemmCost, ...]
    pairs: tuple[PairCost, ...]
    is_consumer: bool


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What a step of a model computes: its layers, and the head on the rows whose logits are asked for."""

    layers: tuple[LayerCost, ...]
    head: GemmCost


class GrammarKind(enum.Enum):
    """The language that a schema is written in."""

    REGEX = "regex"
    JSON = "json"
    EBNF = "ebnf"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The bytes of every token; special tokens (`eos` among them) have none and belong to no grammar."""

    tokens: tuple[bytes, ...]
    eos: int

    def __post_init__(self) -> None:
        if not 0 <= self.eos < len(self.tokens):
            raise ValueError(f"eos: expected an id below {len(self.tokens)}, got {self.eos}")
        if self.tokens[self.eos]:
            raise ValueError(f"eos: expected a token without bytes, got {self.tokens[self.eos]!r}")

    @property
    def words(self) -> int:
        """Words of 32 bits in a mask."""
        return -(-len(self.tokens) // 32)


@dataclass(frozen=True, kw_only=True)
class GrammarRequest:
    """What a request asks for: a grammar, the tokens after which it holds, and a token that makes those mandatory."""

    kind: GrammarKind
    schema: str
    trigger: tuple[int, ...] = ()
    bound: int | None = None

    def __post_init__(self) -> None:
        if not self.schema:
            raise ValueError("schema: expected text, got an empty one")
        if any(not isinstance(token, int) or token < 0 for token in self.trigger):
            raise ValueError(f"trigger: expected token ids from 0 on, got {self.trigger}")
        if self.bound is None:
            return
        if isinstance(self.bound, bool) or not isinstance(self.bound, int) or self.bound < 0:
            raise ValueError(f"bound: expected one token id from 0 on, got {self.bound!r}")
        if not self.trigger:
            raise ValueError("bound: expected a trigger beside it, got none")


class GrammarStatus(enum.IntEnum):
    """Where the output of a request stands; a request that was aborted fails with one dummy token."""

    NONE = 0
    START = 1
    RUNNING = 2
    ABORTED = -1
