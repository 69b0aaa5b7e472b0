"""Production calls of the index lists: a prefill chunk, a decode step, W = 128 in a ring of 134."""

from __future__ import annotations

import torch

from deeptwin.optimized.window import (
    compact_clip_triton,
    history_slots_triton,
    ring_slots_triton,
    window_decode_triton,
    window_draft_triton,
    window_prefill_triton,
)
from deeptwin.reference.config import SlidingWindow, Truncation

TOKENS, SEQUENCES = 4096, 64
DECODER = SlidingWindow(window=128, ring=134, truncation=Truncation.COMPACT, keep=140)


def _integers(count: int, size: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.int32) for _ in range(count)]


def prefill_128() -> None:
    """A decoder layer of a prefill chunk."""
    window_prefill_triton(*_integers(2, TOKENS), *_integers(4, SEQUENCES), config=DECODER)


def decode_128() -> None:
    """A step of several tokens."""
    window_decode_triton(*_integers(2, TOKENS), *_integers(2, SEQUENCES), config=DECODER)


def draft_128_5() -> None:
    """Draft blocks of five."""
    window_draft_triton(*_integers(3, SEQUENCES), config=DECODER, draft=5)


def slots_134() -> None:
    """Where the keys of a chunk go."""
    ring_slots_triton(*_integers(2, TOKENS), *_integers(3, SEQUENCES), config=DECODER)


def history_128() -> None:
    """What is loaded before a chunk."""
    history_slots_triton(*_integers(3, SEQUENCES), config=DECODER)


def clip_140() -> None:
    """Rows that a chunk leaves out."""
    compact_clip_triton(*_integers(3, SEQUENCES), config=DECODER)
