"""Rotary position embedding, fast: the rotation and the table."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape
from deeptwin.reference.config import Pairing, RopeSpan

from .providers import packed, tile_kernels

STORAGE = (torch.bfloat16, torch.float16, torch.float32)


def rope_table_triton(
    positions_s: Tensor, freq_i: Tensor, *, magnitude: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """`reference.rope.rope_table`: fp32 angles, cos and sin in fp64.

    Raises:
        TypeError: positions_s is no integer tensor, freq_i is not float32, `out` has another dtype.
        ValueError: positions_s or freq_i is not 1-D; magnitude is not positive; `out` does not fit.
    """
    expect_shape("positions_s", positions_s, "s", {})
    expect_shape("freq_i", freq_i, "i", {})
    expect_dtype("positions_s", positions_s, torch.int32, torch.int64)
    expect_dtype("freq_i", freq_i, torch.float32)
    expect_positive("magnitude", magnitude)
    from deeptwin.kernels.triton_ops import rope

    return rope.rope_table(positions_s, freq_i, magnitude=magnitude, out=out)


def rope_triton(
    x_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    pairing: Pairing,
    span: RopeSpan,
    inverse: bool,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.rope.rope`. Positions are not inspected: one outside the table gives NaN.

    Raises:
        TypeError: x_thd or dtype is not bf16, fp16 or fp32, table_sr is not float32, positions_t is no integer
            tensor, `out` has another dtype.
        ValueError: shapes disagree; r is odd or above d; `out` does not fit.
    """
    _check_rope(x_thd, table_sr, positions_t, dtype)
    from deeptwin.kernels.triton_ops import rope

    return rope.rope(
        x_thd,
        table_sr,
        positions_t,
        interleaved=pairing is Pairing.INTERLEAVED,
        first=span is RopeSpan.FIRST,
        inverse=inverse,
        dtype=dtype,
        out=out,
    )


def rope_tile_kernels(
    x_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    pairing: Pairing,
    span: RopeSpan,
    inverse: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`rope` by `apply_rotary` of TileKernels 2.1.0 (SM90, SM100), which rotates in place: here a copy of x_thd.

    Layout: the slice is a view of the packed copy, the table is cosines then sines, as ours. Positions are not
    inspected, and the library reads whatever row they name: they must be rows of the table. Launches repeat, and no
    token depends on its batch.

    Raises:
        TypeError: as `rope_triton`.
        ValueError: as `rope_triton`.
        NotImplementedError: no TileKernels 2.x, fp16, a result of another dtype than x_thd, another slice than 64 or
            128 channels, or heads that are no multiple of 8.
    """
    _check_rope(x_thd, table_sr, positions_t, dtype)
    r, d = table_sr.shape[1], x_thd.shape[2]
    if r not in (64, 128):
        raise NotImplementedError(f"table_sr: expected 64 or 128 channels to rotate, got {r}")
    if x_thd.dtype is torch.float16 or dtype is not x_thd.dtype or d % 8:
        raise NotImplementedError(
            f"x_thd, dtype: expected 8·n channels in one of bf16 and fp32, got {d}, {x_thd.dtype}, {dtype}"
        )
    library = tile_kernels()
    y_thd = x_thd.clone(memory_format=torch.contiguous_format)
    library.transform.apply_rotary(
        y_thd[..., :r] if span is RopeSpan.FIRST else y_thd[..., d - r :],
        packed(table_sr),
        positions=packed(positions_t),
        interleaved=pairing is Pairing.INTERLEAVED,
        conjugate=inverse,
    )
    return y_thd


def _check_rope(x_thd: Tensor, table_sr: Tensor, positions_t: Tensor, dtype: torch.dtype) -> None:
    dims: dict[str, int] = {}
    expect_shape("x_thd", x_thd, "thd", dims)
    expect_shape("table_sr", table_sr, "sr", dims)
    expect_shape("positions_t", positions_t, "t", dims)
    expect_dtype("x_thd", x_thd, *STORAGE)
    expect_dtype("table_sr", table_sr, torch.float32)
    expect_dtype("positions_t", positions_t, torch.int32, torch.int64)
    if dims["r"] % 2 or dims["r"] > dims["d"]:
        raise ValueError(f"table_sr: expected an even width up to d={dims['d']}, got r={dims['r']}")
    if dtype not in STORAGE:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
