"""The forward step of an engine: packed rows of many sequences, in place over their paged caches.

A runner holds a model's weights, caches and plan. Its steps are those of `reference/model.py` with caches in place of
everything that came before: prefill chunks of any length, and decode steps of an anchor and its drafts. Rows that are
rejected later are written over by the next step. Page 0 and state 0 belong to nobody: padding goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_in_range, expect_shape
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.taps import Tap, ignore

from .plan import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """What a step leaves for the head and for drafters; y counts its computed rows."""

    row_t: Tensor  # int64: which of the step's rows were computed, all but under COMPACT
    hidden_ym: Tensor  # bf16 [y, m]: behind the final norm, what the head reads
    features: tuple[Tensor, ...]  # streams: V4, before the head; V4.1, into the attention of target layers


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


def expect_rows(token_t: Tensor, past_bk: Tensor, step: Csa2Step, *, vocab: int, history: int, positions: int) -> None:
    """Raise ValueError unless there is a known token for every row and every place of the history, and all rows have
    angles; TypeError unless tokens are int64."""
    expect_shape("token_t", token_t, "t", {"t": len(step.positions_t)})
    expect_shape("past_bk", past_bk, "bk", {"b": len(step.end_b), "k": history})
    for name, x in (("token_t", token_t), ("past_bk", past_bk)):
        expect_dtype(name, x, torch.int64)
    expect_in_range("token_t", token_t, 0, vocab)
    expect_in_range("past_bk", past_bk, -1, vocab)
    expect_in_range("step.positions_t", step.positions_t, 0, positions)


def bytes_of(parts: Sequence[Tensor]) -> bytes:
    """The bytes of tensors, one after the other."""
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in parts]
    return torch.cat(flat).cpu().numpy().tobytes() if flat else b""


def fill_with(payload: bytes, parts: Sequence[Tensor]) -> None:
    """Write what `bytes_of` gave back into tensors of the same shapes, in place.

    Raises:
        ValueError: the payload has another length.
    """
    sizes = [x.numel() * x.element_size() for x in parts]
    if len(payload) != sum(sizes):
        raise ValueError(f"payload: expected {sum(sizes)} bytes, got {len(payload)}")
    if not payload:
        return
    whole = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    for x, flat in zip(parts, whole.split(sizes), strict=True):
        x.copy_(flat.clone().view(x.dtype).view(x.shape))
