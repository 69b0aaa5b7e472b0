"""Names for what happens inside a block: a tap is told every intermediate under a name that never changes.

A block calls its tap with names like `attn.norm`; who runs several blocks puts `layers.3.` before them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Tap = Callable[[str, Tensor], None]


def ignore(name: str, x: Tensor) -> None:
    """The tap of a run that nobody watches."""


def under(prefix: str, tap: Tap) -> Tap:
    """A tap that hears every name with `prefix` before it."""
    return lambda name, x: tap(prefix + name, x)
