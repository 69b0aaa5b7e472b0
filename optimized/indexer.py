"""Index keys, queries, head weights and scores, fast; the contract is `reference/indexer.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape
from deeptwin.reference.config import INDEX_FP4, ScoreOrder

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.indexer import ScoreLaunch


def index_keys_triton(
    lat_sc: Tensor,
    wk_dc: Tensor,
    norm_d: Tensor,
    table_ir: Tensor,
    positions_s: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.indexer.index_keys` of bf16 tensors. Values are not inspected: a position that is no row of the table
    gives meaningless bytes.

    Raises:
        TypeError: latents, weights or norm are not bfloat16, the table not float32, positions no integers; `out` has
            another dtype.
        ValueError: shapes disagree; a key has not 128 channels; eps is not positive; `out` does not fit.
    """
    dims: dict[str, int] = {}
    expect_shape("lat_sc", lat_sc, "sc", dims)
    expect_shape("wk_dc", wk_dc, "dc", dims)
    expect_shape("norm_d", norm_d, "d", dims)
    for name, x in (("lat_sc", lat_sc), ("wk_dc", wk_dc), ("norm_d", norm_d)):
        expect_dtype(name, x, torch.bfloat16)
    _check_channels("wk_dc", dims["d"])
    _check_rotation(table_ir, "positions_s", positions_s, "s", dims)
    expect_positive("eps", eps)
    from deeptwin.kernels.triton_ops import indexer

    return indexer.index_keys(lat_sc, wk_dc, norm_d, table_ir, positions_s, eps=eps, out=out)


def index_queries_triton(q_thd: Tensor, table_ir: Tensor, positions_t: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`reference.indexer.index_queries` of bf16 heads. Values are not inspected: a position that is no row of the table
    gives meaningless bytes.

    Raises:
        TypeError: q_thd is not bfloat16, the table not float32, positions no integers; `out` has another dtype.
        ValueError: shapes disagree; a head has not 128 channels; `out` does not fit.
    """
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_dtype("q_thd", q_thd, torch.bfloat16)
    _check_channels("q_thd", dims["d"])
    _check_rotation(table_ir, "positions_t", positions_t, "t", dims)
    from deeptwin.kernels.triton_ops import indexer

    return indexer.index_queries(q_thd, table_ir, positions_t, out=out)


def index_weights_triton(x_tm: Tensor, w_hm: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
    """`reference.indexer.index_weights` of bf16 tensors.

    Raises:
        TypeError: x_tm or w_hm is not bfloat16; `out` has another dtype.
        ValueError: shapes disagree; scale is not positive; `out` does not fit.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("w_hm", w_hm, "hm", dims)
    expect_dtype("x_tm", x_tm, torch.bfloat16)
    expect_dtype("w_hm", w_hm, torch.bfloat16)
    expect_positive("scale", scale)
    from deeptwin.kernels.triton_ops import indexer

    return indexer.index_weights(x_tm, w_hm, scale=scale, out=out)


def index_scores_triton(
    q_thw: Tensor,
    k_sw: Tensor,
    w_th: Tensor,
    first_t: Tensor,
    length_t: Tensor,
    blocks_tk: Tensor | None,
    *,
    block_size: int,
    order: ScoreOrder,
    launch: ScoreLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.indexer.index_scores`.

    Raises:
        TypeError: records are not uint8, weights not bfloat16, first, lengths or blocks not int32; `out` has another
            dtype.
        ValueError: shapes disagree, a record has not 68 bytes, or block_size is not positive; `out` does not fit.
        NotImplementedError: the bytes of a record are not one behind the other.
    """
    dims = _check_queries(q_thw, w_th, length_t, blocks_tk, block_size)
    _check("k_sw", k_sw, "sw", torch.uint8, dims)
    _check("first_t", first_t, "t", torch.int32, dims)
    from deeptwin.kernels.triton_ops import indexer

    return indexer.index_scores(
        q_thw,
        k_sw,
        w_th,
        first_t,
        length_t,
        blocks_tk,
        block_size=block_size,
        order=order.value,
        launch=launch,
        out=out,
    )


def index_scores_paged_triton(
    q_thw: Tensor,
    cache_pow: Tensor,
    w_th: Tensor,
    table_tj: Tensor,
    length_t: Tensor,
    blocks_tk: Tensor | None,
    *,
    block_size: int,
    order: ScoreOrder,
    launch: ScoreLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.indexer.index_scores_paged`, with the bits of `index_scores_triton` for the same keys.

    Raises:
        TypeError: records are not uint8, weights not bfloat16, pages, lengths or blocks not int32; `out` has another
            dtype.
        ValueError: shapes disagree, a record has not 68 bytes, or block_size is not positive; `out` does not fit.
        NotImplementedError: the bytes of a page are not one behind the other.
    """
    dims = _check_queries(q_thw, w_th, length_t, blocks_tk, block_size)
    _check("cache_pow", cache_pow, "pow", torch.uint8, dims)
    _check("table_tj", table_tj, "tj", torch.int32, dims)
    from deeptwin.kernels.triton_ops import indexer

    return indexer.index_scores_paged(
        q_thw,
        cache_pow,
        w_th,
        table_tj,
        length_t,
        blocks_tk,
        block_size=block_size,
        order=order.value,
        launch=launch,
        out=out,
    )


def _check_queries(
    q_thw: Tensor, w_th: Tensor, length_t: Tensor, blocks_tk: Tensor | None, block_size: int
) -> dict[str, int]:
    dims: dict[str, int] = {}
    _check("q_thw", q_thw, "thw", torch.uint8, dims)
    _check("w_th", w_th, "th", torch.bfloat16, dims)
    _check("length_t", length_t, "t", torch.int32, dims)
    if blocks_tk is not None:
        expect_positive("block_size", block_size)
        _check("blocks_tk", blocks_tk, "tk", torch.int32, dims)
    return dims


def _check(name: str, x: Tensor, letters: str, dtype: torch.dtype, dims: dict[str, int]) -> None:
    if letters.endswith("w") and x.shape[-1:] != (INDEX_FP4.record_bytes,):
        raise ValueError(f"{name}: expected records of {INDEX_FP4.record_bytes} bytes, got shape {tuple(x.shape)}")
    expect_shape(name, x, letters, dims)
    expect_dtype(name, x, dtype)


def _check_channels(name: str, channels: int) -> None:
    if channels != INDEX_FP4.channels:
        raise ValueError(f"{name}: expected {INDEX_FP4.channels} channels, got {channels}")


def _check_rotation(table_ir: Tensor, name: str, positions: Tensor, letter: str, dims: dict[str, int]) -> None:
    expect_shape("table_ir", table_ir, "ir", dims)
    expect_shape(name, positions, letter, dims)
    expect_dtype("table_ir", table_ir, torch.float32)
    expect_dtype(name, positions, torch.int32, torch.int64)
    if dims["r"] % 2 or dims["r"] > INDEX_FP4.channels:
        raise ValueError(f"table_ir: expected an even width up to {INDEX_FP4.channels}, got r={dims['r']}")
