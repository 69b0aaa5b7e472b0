"""Argument checks whose messages name the argument, what was got and what was expected."""

from __future__ import annotations

import torch


def expect_shape(name: str, x: torch.Tensor, letters: str, dims: dict[str, int]) -> None:
    """Bind each letter of `letters` to a size of `x`; raise ValueError if a bound letter disagrees."""
    if x.dim() != len(letters):
        raise ValueError(f"{name}: expected {len(letters)} dims [{', '.join(letters)}], got shape {tuple(x.shape)}")
    for letter, size in zip(letters, x.shape, strict=True):
        if dims.setdefault(letter, size) != size:
            raise ValueError(f"{name}: expected {letter}={dims[letter]}, got {letter}={size} in shape {tuple(x.shape)}")


def expect_dtype(name: str, x: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise TypeError unless `x.dtype` is one of `allowed`."""
    if x.dtype not in allowed:
        raise TypeError(f"{name}: expected {' or '.join(str(d) for d in allowed)}, got {x.dtype}")


def expect_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is greater than zero (NaN is refused too)."""
    if not value > 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")


def expect_multiple(name: str, value: int, of: int) -> None:
    """Raise ValueError unless `value` is a multiple of `of`."""
    if value % of:
        raise ValueError(f"{name}: expected a multiple of {of}, got {value}")


def expect_finite(name: str, x: torch.Tensor) -> None:
    """Raise ValueError if `x` holds NaN or infinity, naming the first position."""
    bad = ~torch.isfinite(x)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"{name}: expected finite values, got {x[where].item()} at {where}")


def expect_in_range(name: str, x: torch.Tensor, low: int, high: int) -> None:
    """Raise ValueError unless every element of the integer tensor `x` lies in [low, high)."""
    bad = (x < low) | (x >= high)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"{name}: expected values in [{low}, {high}), got {x[where].item()} at {where}")
