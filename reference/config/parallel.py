"""Configurations of work that is spread over devices."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ShuffleStep(enum.IntEnum):
    """Where the weights of a slot come from when experts move."""

    KEEP = 0  # the slot holds them
    COPY = 1  # another slot of the same rank held them
    RECEIVE = 2  # a slot of another rank held them
    SHARE = 3  # another slot of the same rank receives them


@dataclass(frozen=True, kw_only=True)
class RebalanceConfig:
    """When loads are recorded and experts move."""

    window: int  # steps whose loads are kept
    interval: int  # recorded steps from one rearrangement to the next; 0: never
    prefill_engine: bool = False  # a server of prefills alone records them
    after_prefill: bool = False  # prefills are recorded, and the next decode step rearranges, whatever the interval

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"interval: expected 0 or more, got {self.interval}")
        if self.window < 1:
            raise ValueError(f"window: expected at least 1, got {self.window}")
        if self.interval and self.window > self.interval:
            raise ValueError(f"window: expected at most the interval of {self.interval}, got {self.window}")
