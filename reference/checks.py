"""Argument checks whose messages name the argument, what was got and what was expected."""

from __future__ import annotations

import torch

from .config import RECORD_FORMATS, RecordFormat


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


def expect_records(name: str, cache_pow: torch.Tensor, dims: dict[str, int]) -> RecordFormat:
    """The format of a paged cache of records, uint8 [p, o, w]: w bytes a record, pages without gaps inside.

    Raises:
        TypeError: the cache is not uint8.
        ValueError: no format has records of w bytes, or the o * w bytes of a page do not follow one another.
    """
    expect_dtype(name, cache_pow, torch.uint8)
    expect_shape(name, cache_pow, "pow", dims)
    num_slots, width = cache_pow.shape[1:]
    if width not in RECORD_FORMATS:
        known = ", ".join(f"{size} ({fmt.name})" for size, fmt in RECORD_FORMATS.items())
        raise ValueError(f"{name}: expected records of {known} bytes, got {width} in shape {tuple(cache_pow.shape)}")
    page, slot, byte = cache_pow.stride()
    if byte != 1 or (num_slots > 1 and slot != width) or (cache_pow.shape[0] > 1 and page < num_slots * width):
        raise ValueError(
            f"{name}: expected pages of {num_slots * width} bytes in a row, got strides {cache_pow.stride()}"
        )
    return RECORD_FORMATS[width]
