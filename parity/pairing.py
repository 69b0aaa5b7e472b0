"""Few cases out of many: every pair of choices instead of every combination."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def every_pair(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value per axis in which any two values of different axes meet at least once.

    Faults that need two particular choices at once are met, at a fraction of the full product; combinations that
    bring the most unmet pairs come first, so the result depends on the axes only.

    Raises:
        ValueError: fewer than two axes, which have no pairs.
    """
    if len(axes) < 2:
        raise ValueError(f"axes: expected two or more, got {len(axes)}")
    unmet = {
        (i, a, j, b)
        for i, j in combinations(range(len(axes)), 2)
        for a, b in product(range(len(axes[i])), range(len(axes[j])))
    }
    chosen = []
    candidates = list(product(*(range(len(axis)) for axis in axes)))
    # a pass keeps what brings at least `gain` new pairs; the last pass, gain 1, leaves none unmet
    for gain in range(len(axes) * (len(axes) - 1) // 2, 0, -1):
        for row in candidates:
            new = {(i, row[i], j, row[j]) for i, j in combinations(range(len(axes)), 2)} & unmet
            if len(new) >= gain:
                unmet -= new
                chosen.append(row)
        if not unmet:
            break
    return [tuple(axis[n] for axis, n in zip(axes, row, strict=True)) for row in chosen]
