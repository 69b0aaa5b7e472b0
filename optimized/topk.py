"""Exact selection, fast; the contract is `reference/topk.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape

from .providers import expect_sm90

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.topk import SelectLaunch


def topk_triton(
    scores_ts: Tensor, length_t: Tensor, *, k: int, launch: SelectLaunch | None = None, out: Tensor | None = None
) -> Tensor:
    """`reference.topk.topk` of bf16 or fp32 scores. A length beyond the row counts as the row's.

    Raises:
        TypeError: scores are not bfloat16 or float32, or lengths not int32; `out` has another dtype.
        ValueError: shapes disagree, or k is not positive; `out` does not fit.
        NotImplementedError: the scores of a row are not one behind the other.
    """
    _check_rows(scores_ts, length_t)
    expect_positive("k", k)
    from deeptwin.kernels.triton_ops import topk

    return topk.topk(scores_ts, length_t, k=k, launch=launch, out=out)


def topk_tilelang(scores_ts: Tensor, length_t: Tensor, *, k: int) -> Tensor:
    """`topk_triton` on SM90, whose threads count in shared memory: the same indices, whatever the batch.

    Raises:
        TypeError: as `topk_triton`.
        ValueError: as `topk_triton`.
        NotImplementedError: the scores of a row are not one behind the other, more than 16384 of more than 32768
            columns are wanted, or another device.
    """
    _check_rows(scores_ts, length_t)
    expect_positive("k", k)
    if k > 16384 and scores_ts.shape[1] > 32768:
        raise NotImplementedError(f"k: expected at most 16384 of more than 32768 columns, got {k}")
    if scores_ts.numel() and scores_ts.stride(1) != 1:
        raise NotImplementedError(f"scores_ts: expected contiguous rows, got strides {scores_ts.stride()}")
    expect_sm90("scores_ts", scores_ts)
    from deeptwin.kernels.tilelang_ops import topk_sm90 as kernels

    return kernels.topk(scores_ts, length_t, k=k)


def candidate_blocks_triton(
    scores_ts: Tensor, length_t: Tensor, *, block_size: int, k: int, out: Tensor | None = None
) -> Tensor:
    """`reference.topk.candidate_blocks` of bf16 or fp32 scores.

    Raises:
        TypeError: scores are not bfloat16 or float32, or lengths not int32; `out` has another dtype.
        ValueError: shapes disagree, or k or block_size is not positive; `out` does not fit.
        NotImplementedError: the scores of a row are not one behind the other.
    """
    _check_rows(scores_ts, length_t)
    expect_positive("block_size", block_size)
    expect_positive("k", k)
    from deeptwin.kernels.triton_ops import topk

    return topk.candidate_blocks(scores_ts, length_t, block_size=block_size, k=k, out=out)


def compact_lengths_triton(
    blocks_tj: Tensor, length_t: Tensor, *, block_size: int, out: Tensor | None = None
) -> Tensor:
    """`reference.topk.compact_lengths`.

    Raises:
        TypeError: blocks or lengths are not int32; `out` has another dtype.
        ValueError: shapes disagree, or block_size is not positive; `out` does not fit.
    """
    dims: dict[str, int] = {}
    _check("blocks_tj", blocks_tj, "tj", dims)
    _check("length_t", length_t, "t", dims)
    expect_positive("block_size", block_size)
    from deeptwin.kernels.triton_ops import topk

    return topk.compact_lengths(blocks_tj, length_t, block_size=block_size, out=out)


def restore_indices_triton(idx_tk: Tensor, blocks_tj: Tensor, *, block_size: int, out: Tensor | None = None) -> Tensor:
    """`reference.topk.restore_indices`.

    Raises:
        TypeError: indices or blocks are not int32; `out` has another dtype.
        ValueError: shapes disagree, or block_size is not positive; `out` does not fit.
    """
    dims: dict[str, int] = {}
    _check("idx_tk", idx_tk, "tk", dims)
    _check("blocks_tj", blocks_tj, "tj", dims)
    expect_positive("block_size", block_size)
    from deeptwin.kernels.triton_ops import topk

    return topk.look_up("idx_tk", idx_tk, blocks_tj, size=block_size, out=out)


def physical_slots_triton(idx_tk: Tensor, table_tp: Tensor, *, page_entries: int, out: Tensor | None = None) -> Tensor:
    """`reference.topk.physical_slots`.

    Raises:
        TypeError: indices or pages are not int32; `out` has another dtype.
        ValueError: shapes disagree, or page_entries is not positive; `out` does not fit.
    """
    dims: dict[str, int] = {}
    _check("idx_tk", idx_tk, "tk", dims)
    _check("table_tp", table_tp, "tp", dims)
    expect_positive("page_entries", page_entries)
    from deeptwin.kernels.triton_ops import topk

    return topk.look_up("idx_tk", idx_tk, table_tp, size=page_entries, out=out)


def _check_rows(scores_ts: Tensor, length_t: Tensor) -> None:
    dims: dict[str, int] = {}
    expect_shape("scores_ts", scores_ts, "ts", dims)
    expect_dtype("scores_ts", scores_ts, torch.bfloat16, torch.float32)
    _check("length_t", length_t, "t", dims)


def _check(name: str, x: Tensor, letters: str, dims: dict[str, int]) -> None:
    expect_shape(name, x, letters, dims)
    expect_dtype(name, x, torch.int32)
