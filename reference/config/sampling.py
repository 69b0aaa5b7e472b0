"""Parameters of a request, the two declared draws, and the numbers that name a stream of random words."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

LEAST_TEMPERATURE = 1e-5  # what a lower one counts as: nearly greedy
POSITION_STRIDE = 10000019  # between the rows of one request in the numbering of streams
DRAFT_SEED_OFFSET = 1000000007  # added to the seed of a request for what it drafts


class Draw(enum.Enum):
    """How a row is drawn from its weights; both have the same law and give different tokens for the same seed."""

    NVIDIA = "nvidia"  # 2048 lanes; 32-bit words until one is below a multiple of the total
    ASCEND = "ascend"  # 4096 lanes, 2048 below 8192 columns; one 64-bit word modulo the total


class DrawUse(enum.IntEnum):
    """What a stream is for: the last part of its number."""

    FRESH = 0  # prefill, plain decode, the last row of a verification, drafts
    RESIDUAL = 1  # after a rejection
    ACCEPT = 2  # the uniform number that an acceptance is decided with


class RowError(enum.IntEnum):
    """Why a row has no token."""

    NONE = 0
    INVALID = 1  # a logit that is NaN or +inf; a probability that is not finite or negative
    EMPTY = 2  # nothing to draw: all logits −inf, or no weight above 2^-31
    OVERFULL = 3  # weights of 2^32 or more in all, twice a probability distribution
    PARAMETER = 4  # temperature, top_p or top_k outside its range


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request may ask for. There is no min-p and no penalty."""

    seed: int  # of the request, 0 … 2^64 − 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # −1: no limit
    max_tokens: int = 1  # 0 counts as 1
    top_logprobs: int = 0
    first_token_no_eos: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: expected 0 … 2^64 − 1, got {self.seed}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature: expected a finite number from 0 on, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        if self.top_k != -1 and not 1 <= self.top_k < 2**31:
            raise ValueError(f"top_k: expected -1 or 1 … 2^31 − 1, got {self.top_k}")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens: expected 0 or more, got {self.max_tokens}")
        if not 0 <= self.top_logprobs <= 1000:
            raise ValueError(f"top_logprobs: expected 0 … 1000, got {self.top_logprobs}")

    @property
    def drawn(self) -> SamplingParams:
        """What is drawn with: a temperature below the least is the least one, and then nothing is filtered."""
        at_least_one = replace(self, max_tokens=max(self.max_tokens, 1))
        if self.temperature >= LEAST_TEMPERATURE:
            return at_least_one
        return replace(at_least_one, temperature=LEAST_TEMPERATURE, top_p=1.0, top_k=-1)
