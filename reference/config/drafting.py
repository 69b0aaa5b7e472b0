"""Configurations of DSpark drafting, of its verification and of its training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .attention import SlidingWindow


@dataclass(frozen=True, kw_only=True)
class DraftBlock:
    """What a block of drafts looks like: its length, the token that fills it, and the ring that it is stored in."""

    draft: int  # positions of a block, γ; the runtime's number, not the checkpoint's
    noise_token: int
    window: SlidingWindow

    def __post_init__(self) -> None:
        if not 1 <= self.draft <= 32:
            raise ValueError(f"draft: expected 1 to 32 positions, got {self.draft}")
        if self.noise_token < 0:
            raise ValueError(f"noise_token: expected a token id, got {self.noise_token}")
        if self.window.ring < self.window.window + self.draft + 1:
            least = self.window.window + self.draft + 1
            raise ValueError(f"window: expected a ring of at least {least} rows, got {self.window.ring}")


@dataclass(frozen=True, kw_only=True)
class DraftLossConfig:
    """How the three terms of the draft's training loss are weighted."""

    decay: float = 4.0  # of the weight exp(-j / decay) of block position j
    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0

    def __post_init__(self) -> None:
        if not self.decay > 0:
            raise ValueError(f"decay: expected a positive number, got {self.decay}")
        for name in ("ce", "l1", "confidence"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one decode step takes: the performance curve of captured graph sizes, and what is added to it."""

    sizes: tuple[int, ...]  # tokens a captured graph takes, strictly increasing
    base_ms: tuple[float, ...]
    slope: float = 0.0  # milliseconds a token of the graph, from the forward estimator
    sampler_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.base_ms):
            raise ValueError(f"base_ms: expected one time for each of {len(self.sizes)} sizes, got {len(self.base_ms)}")
        if self.sizes[0] < 1 or any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"sizes: expected strictly increasing positive numbers, got {self.sizes}")
        for name, values in (("base_ms", self.base_ms), ("slope", (self.slope,)), ("sampler_ms", (self.sampler_ms,))):
            if any(not (value >= 0 and math.isfinite(value)) for value in values):
                raise ValueError(f"{name}: expected finite times from 0 on, got {getattr(self, name)}")
        if min(self.base_ms) <= 0:
            raise ValueError(f"base_ms: expected positive times, got {self.base_ms}")
