"""A deterministic model that looks at its whole prefix: one wrong token anywhere changes all that follow."""

from __future__ import annotations

from collections.abc import Sequence

from .config import ToyModel

WRAP = 2**64


def next_token(tokens: Sequence[int], model: ToyModel) -> int:
    """The token that follows a prefix.

    Math:
        h[p] = h[p−1] * radix + mix(token[p] * stride + p) mod 2^64, h[−1] = 0; next = mix(h) mod vocab_size
    """
    state = 0
    for position, token in enumerate(tokens):
        state = (state * model.radix + _mix(token * model.stride + position, model)) % WRAP
    return _mix(state, model) % model.vocab_size


def _mix(x: int, model: ToyModel) -> int:
    x %= WRAP
    x = (x ^ x >> 31) * model.odd % WRAP
    return x ^ x >> 29
