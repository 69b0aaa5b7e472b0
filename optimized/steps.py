"""The forward step of an engine: packed rows of many sequences, in place over their paged caches.

A runner holds a model's weights, caches and plan. Its steps are those of `reference/model.py` with caches in place of
everything that came before: prefill chunks of any length, and decode steps of an anchor and its drafts. Rows that are
rejected later are written over by the next step. Page 0 and state 0 belong to nobody: padding goes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.taps import Tap, ignore

from .plan import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """What a step leaves for the head and for drafters; y counts its computed rows."""

    row_t: Tensor  # int64: which of the step's rows were computed, all but under COMPACT
    hidden_ym: Tensor  # bf16 [y, m]: behind the final norm, what the head reads
    features: tuple[Tensor, ...]  # V4: the streams before the head; V4.1: those behind every target layer


class Runner(Protocol):
    """A model over its caches, one class for each generation."""

    vocab: int
    page_tokens: int
    history: int  # tokens before the first row of a sequence that a step reads
    plan: Plan

    def forward(self, token_t: Tensor, past_bk: Tensor, step: Csa2Step, *, tap: Tap = ignore) -> Forward:
        """Advance every sequence of `step` by its rows, and write what they leave into the caches.

        Shapes:
            token_t: int64 [t], the rows in the order of `step`; past_bk: int64 [b, history], the tokens before the
            first row of every sequence, oldest first, -1 where there is none.
        """
        ...

    def head(self, hidden_ym: Tensor) -> Tensor:
        """Logits, fp32 [y, v]."""
        ...

    def snapshot(self, slot: int, end: int) -> bytes:
        """What of a state has to be there, beside pages, for a sequence to go on from token `end`."""
        ...

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """Put a snapshot into a state."""
        ...

    def page_bytes(self, page: int) -> bytes:
        """What a page holds."""
        ...

    def load_page(self, page: int, payload: bytes) -> None:
        """Fill a page with what `page_bytes` gave."""
        ...

    def cache_views(self) -> dict[str, Tensor]:
        """Every cache by name, `layers.0.main` for example, sharing memory; pages or states are the first axis."""
        ...

    def reset(self, slot: int) -> None:
        """Make a used state ready for a new sequence."""
        ...
