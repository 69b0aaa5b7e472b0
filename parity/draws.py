"""Hostile, reproducible inputs. Everything is drawn with numpy's Philox generator and cast on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .floats import poison_

BAD_INDICES = (-(2**31), -123456, -1, 2147480000, 2**31 - 1)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Independent normal values, drawn in fp32 and cast."""
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale) + np.float32(mean)).to(
        dtype
    )


def rows(rng: np.random.Generator, count: int, width: int, *, dtype: torch.dtype, regime: str) -> Tensor:
    """Rows of activations [count, width] in a numeric regime.

    normal; peaked: one channel ×100; flat: ×0.01; mean1: shifted by one; zeros; ties: few distinct values;
    tiny and huge: ×2^-100 and ×2^90; subnormal; cancel: alternating signs of nearly equal values; constant rows.
    """
    x: np.ndarray = rng.standard_normal((count, width), dtype=np.float32)
    if regime == "peaked" and width:
        x[:, int(rng.integers(width))] *= 100
    elif regime == "flat":
        x *= np.float32(0.01)
    elif regime == "mean1":
        x += 1
    elif regime == "zeros":
        x[:] = 0
    elif regime == "ties":
        x = rng.integers(-3, 4, (count, width)).astype(np.float32) / 2
    elif regime == "tiny":
        x *= np.float32(2.0**-100)
    elif regime == "huge":
        x *= np.float32(2.0**90)
    elif regime == "subnormal":
        x *= np.float32(2.0**-130)
    elif regime == "cancel":
        x = (1 + x * np.float32(2.0**-6)) * np.where(np.arange(width) % 2, -1, 1).astype(np.float32)
    elif regime == "constant":
        x = np.repeat(x[:, :1], width, 1)
    elif regime not in ("normal",):
        raise ValueError(f"regime: unknown {regime!r}")
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


def strided(x: Tensor, *, pad: int) -> Tensor:
    """The same values as a view whose last axis is followed by `pad` poisoned elements in memory."""
    roomy = torch.empty(*x.shape[:-1], x.shape[-1] + pad, dtype=x.dtype)
    poison_(roomy)
    view = roomy[..., : x.shape[-1]]
    view.copy_(x)
    return view


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose every byte is 0xFF: NaN in every float format."""
    return poison_(torch.empty(shape, dtype=dtype))


def distinct(rng: np.random.Generator, high: int, count: int) -> np.ndarray:
    """`count` distinct integers below `high`, in random order."""
    return rng.permutation(high)[:count]
