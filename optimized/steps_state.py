"""What of a state a sequence takes along: the keys of its last window by position, not by their place in a ring.

So the same tokens give the same bytes, whatever slot they had, how far the ring had turned, and what stood there
before. A snapshot at `end` needs the window before it to be live: no more than the tokens that a ring can take back may
have been written behind `end`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeptwin.reference.config import PageLayout, RecordFormat

from .steps import bytes_of, fill_with


def ring_parts(ring_pow: Tensor, slot: int, *, fmt: RecordFormat, layout: PageLayout) -> tuple[Tensor, ...]:
    """The ring of a state as tensors whose rows are its places, sharing memory: records, or codes and scales."""
    page_ow = ring_pow[slot]
    if layout is PageLayout.INTERLEAVED:
        return (page_ow,)
    places, main = len(page_ow), fmt.record_bytes - fmt.scale_bytes
    flat = page_ow.view(-1)
    codes, scales = flat[: places * main], flat[places * main :]
    return codes.view(places, main), scales.view(places, fmt.scale_bytes)


def save_rows(rings: Sequence[tuple[Tensor, int]], end: int) -> bytes:
    """The rows of the last `count` positions before `end` of every (ring, count), oldest first; zeros before 0."""
    found = []
    for ring, count in rings:
        position_k = torch.arange(end - count, end)
        rows = ring[position_k % len(ring)].clone()
        rows[position_k < 0] = 0
        found.append(rows)
    return bytes_of(found)


def load_rows(rings: Sequence[tuple[Tensor, int]], end: int, payload: bytes) -> None:
    """Write what `save_rows` gave into the rings, in place; rows before position 0 are left as they are.

    Raises:
        ValueError: the payload has another length.
    """
    buffers = [torch.empty(count, *ring.shape[1:], dtype=ring.dtype) for ring, count in rings]
    fill_with(payload, buffers)
    for (ring, count), rows in zip(rings, buffers, strict=True):
        position_k = torch.arange(end - count, end)
        is_real_k = position_k >= 0
        ring[position_k[is_real_k] % len(ring)] = rows[is_real_k].to(ring.device)
