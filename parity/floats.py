"""Bit-level facts about float tensors: bytes, ordered integers, distances in units in the last place."""

from __future__ import annotations

import torch
from torch import Tensor

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
NARROW_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of `x` as a flat uint8 tensor, in logical order."""
    # a copy: contiguous() keeps the odd stride of a one-element tensor, which view() then refuses
    return x.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and every byte agree (−0 differs from 0; equal NaN payloads agree)."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((raw_bytes(a) == raw_bytes(b)).all())


def ordered(x: Tensor) -> Tensor:
    """Integers in value order, one apart for neighbouring floats; −0 and +0 share a number."""
    bits = x.contiguous().view(_INT_OF_SIZE[x.element_size()]).to(torch.int64)
    lowest = -(2 ** (8 * x.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Number of representable values between `a` and `b`, element by element (int64)."""
    return (ordered(a) - ordered(b)).abs()


def unit_roundoff(dtype: torch.dtype) -> float:
    """2^-p for a float format with p significant bits: half the relative spacing of its values."""
    return 2.0 ** -SIGNIFICAND_BITS[dtype]


def row_rms(x: Tensor) -> Tensor:
    """Root mean square over the last axis, kept."""
    return x.square().mean(-1, keepdim=True).sqrt()


def poison_(x: Tensor) -> Tensor:
    """Fill the storage of `x` with bytes 0xFF: NaN in every float format, −1 in every integer one."""
    torch.tensor([], dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).fill_(0xFF)
    return x
