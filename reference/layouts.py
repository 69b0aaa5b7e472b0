"""Byte layouts of quantised weights: as checkpoints store them, and as products of other libraries want them.

Nothing here computes: every function is a view, a copy or a permutation of bytes, and has its inverse.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad

from .checks import expect_dtype, expect_multiple, expect_shape
from .config import CodeKind, QuantFormat, ScaleKind

GRANULE = 8  # rows of w1 and w3 that take turns in the interleaved layout
TILE_ROWS, TILE_LANES = 128, 32  # rows of a scale tile, and how many of them lie side by side


def from_checkpoint(w: Tensor, scale: Tensor, *, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of a stored weight: the same bytes under the dtypes of `quantize`.

    Shapes:
        w: int8 [f, m / 2] (packed e2m1) or float8_e4m3fn [f, m]; scale: float8_e8m0fnu or float32 (F32 formats), one
        for each block of `fmt`.

    Edges:
        a scale byte 0 (2^-127) is kept with a warning: no quantiser writes it.

    Raises:
        TypeError: w or scale has another dtype than checkpoints in `fmt` have.
        ValueError: scale has not one entry for each block; a UE8M0 scale is 255 (NaN).

    Source:
        v41-blocks.md sections 0.3, 5.4
    """
    expect_dtype("w", w, torch.float8_e4m3fn if fmt.code is CodeKind.E4M3 else torch.int8)
    expect_dtype("scale", scale, torch.float8_e8m0fnu if fmt.scale is ScaleKind.UE8M0 else torch.float32)
    expect_shape("w", w, "fi", {})
    f, m = w.shape[0], w.shape[1] * (1 if fmt.code is CodeKind.E4M3 else 2)
    expect_shape("scale", scale, "ng", {"n": -(-f // fmt.rows), "g": -(-m // fmt.group)})
    codes = w if fmt.code is CodeKind.E4M3 else w.view(torch.uint8)
    if fmt.scale is not ScaleKind.UE8M0:
        return codes, scale
    sf = scale.view(torch.uint8)
    if (sf == 255).any():
        raise ValueError(f"scale: expected bytes 0 to 254, got 255 (NaN) at {(sf == 255).nonzero()[0].tolist()}")
    if (sf == 0).any():
        warnings.warn(f"scale: {int((sf == 0).count_nonzero())} bytes are 0 (2^-127)", stacklevel=2)
    return codes, sf


def to_checkpoint(codes: Tensor, sf: Tensor, *, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """The inverse of `from_checkpoint`: int8 for packed codes, float8_e8m0fnu for UE8M0 scales."""
    w = codes if fmt.code is CodeKind.E4M3 else codes.view(torch.int8)
    return w, sf.view(torch.float8_e8m0fnu) if fmt.scale is ScaleKind.UE8M0 else sf


def expand_scales(sf: Tensor, *, fmt: QuantFormat, rows: int) -> Tensor:
    """Scales of blocks of rows repeated for each of `rows` rows."""
    return sf.repeat_interleave(fmt.rows, 0)[:rows]


def pack_scales(sf_tg: Tensor, *, word: torch.dtype) -> Tensor:
    """Scale bytes of neighbouring groups in one word, the first in the lowest byte; missing groups are 0.

    Shapes:
        sf_tg: uint8 [t, g]; returns int32 [t, g / 4] (CUDA) or int16 [t, g / 2] (Ascend), rounded up.

    Raises:
        TypeError: sf_tg is not uint8, as scales that are no powers of two cannot be; word is not int32 or int16.
    """
    expect_dtype("sf_tg", sf_tg, torch.uint8)
    if word not in (torch.int32, torch.int16):
        raise TypeError(f"word: expected int32 or int16, got {word}")
    return pad(sf_tg, (0, -sf_tg.shape[1] % word.itemsize)).view(word)


def unpack_scales(words: Tensor, *, groups: int) -> Tensor:
    """The inverse of `pack_scales` for rows of `groups` groups."""
    return words.contiguous().view(torch.uint8)[:, :groups].contiguous()


def column_major(words: Tensor, *, align: int) -> Tensor:
    """The same words with the rows of one column side by side, columns `align` rows apart or a multiple of it."""
    t, g = words.shape
    stride = -(-t // align) * align
    moved = words.new_zeros(g, stride).t()[:t]
    moved.copy_(words)
    return moved


def interleave_gate_up(w13: Tensor) -> Tensor:
    """Rows of w1 above w3 to the order g0…g7, u0…u7, g8…: of codes or of scales with one row each.

    Raises:
        ValueError: the halves are no multiple of 8 rows.
    """
    expect_multiple("w13 (rows)", w13.shape[-2], 2 * GRANULE)
    return w13.unflatten(-2, (2, -1, GRANULE)).transpose(-4, -3).flatten(-4, -2)


def deinterleave_gate_up(w13: Tensor) -> Tensor:
    """The inverse of `interleave_gate_up`."""
    return w13.unflatten(-2, (-1, 2, GRANULE)).transpose(-4, -3).flatten(-4, -2)


def tile_scales(sf: Tensor) -> Tensor:
    """Row r of every tile of 128 rows moves to (r mod 32) · 4 + r div 32.

    Raises:
        ValueError: the rows are no multiple of 128.
    """
    expect_multiple("sf (rows)", sf.shape[-2], TILE_ROWS)
    return sf.unflatten(-2, (-1, TILE_ROWS // TILE_LANES, TILE_LANES)).transpose(-3, -2).flatten(-4, -2)


def untile_scales(sf: Tensor) -> Tensor:
    """The inverse of `tile_scales`."""
    return sf.unflatten(-2, (-1, TILE_LANES, TILE_ROWS // TILE_LANES)).transpose(-3, -2).flatten(-4, -2)
