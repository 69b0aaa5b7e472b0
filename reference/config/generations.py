"""Choices of whole blocks, in which released codes disagree."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .blocks import MoeConfig, RouterConfig


class ResidualNorm(enum.Enum):
    """What the norm behind a residual addition reads."""

    ROUNDED = "rounded"  # the stored sum: V3, transformers
    UNROUNDED = "unrounded"  # the fp32 sum, of which the stored one is a rounding: V3.2


class WeighExperts(enum.Enum):
    """Where the routing weight of an expert enters; equal in real numbers."""

    BEFORE_DOWN = "before_down"  # with the gate, before the down projection: V4
    AFTER_DOWN = "after_down"  # with the output of the expert: V3, V3.2, transformers


@dataclass(frozen=True, kw_only=True)
class FfnConfig:
    """What the experts of a block compute with; its weights say whether they are plain or quantised."""

    router: RouterConfig
    swiglu_limit: float | None
    weigh: WeighExperts  # of plain weights; quantised ones are weighed before the down projection
    quantised: MoeConfig | None  # formats of quantised weights, None: a generation that is read with plain ones

    def __post_init__(self) -> None:
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise ValueError(f"swiglu_limit: expected a positive number or None, got {self.swiglu_limit}")
        if self.quantised is not None and self.quantised.swiglu_limit != self.swiglu_limit:
            got = self.quantised.swiglu_limit
            raise ValueError(f"quantised: expected a limit of {self.swiglu_limit}, got {got}")
