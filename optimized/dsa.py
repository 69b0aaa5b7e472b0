"""DeepSeek sparse attention, fast: index rows, scores, attention over records; the contract is `reference/dsa*.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_records, expect_shape
from deeptwin.reference.config import DsaConfig, IndexerRope

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.dsa_index import ScoresLaunch
    from deeptwin.kernels.triton_ops.split_softmax import SplitLaunch

E4M3 = torch.float8_e4m3fn


def dsa_index_queries_triton(
    q_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: DsaConfig,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dsa_index.dsa_index_queries` of bf16 heads. Values are not inspected: a position that is no row of the
    table gives NaN.

    Raises:
        TypeError: q_thd is not bfloat16, the table not float32, positions no integers; `out` has another dtype.
        ValueError: shapes disagree, also with `config`; `out` does not fit.
        NotImplementedError: d is no power of two from 16 up.
    """
    _check_rows("q_thd", q_thd, table_sr, positions_t, config)
    return _index_rows(q_thd, None, table_sr, positions_t, config, out)


def dsa_index_keys_triton(
    k_td: Tensor,
    weight_d: Tensor,
    bias_d: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: DsaConfig,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dsa_index.dsa_index_keys` of bf16 keys; as `dsa_index_queries_triton`.

    Raises:
        TypeError: k_td is not bfloat16, weight or bias neither bfloat16 nor float32, the table not float32, positions
            no integers; `out` has another dtype.
        ValueError: shapes disagree, also with `config`; `out` does not fit.
        NotImplementedError: d is no power of two from 16 up.
    """
    expect_shape("k_td", k_td, "td", {})
    _check_rows("k_td", k_td[:, None], table_sr, positions_t, config)
    for name, x_d in (("weight_d", weight_d), ("bias_d", bias_d)):
        expect_shape(name, x_d, "d", {"d": config.index_dim})
        expect_dtype(name, x_d, torch.bfloat16, torch.float32)
    whole = None if out is None else out[:, None]
    return _index_rows(k_td[:, None], (weight_d, bias_d), table_sr, positions_t, config, whole)[:, 0]


def dsa_index_scores_triton(
    q_thd: Tensor,
    k_sd: Tensor,
    k_sf_s: Tensor,
    w_th: Tensor,
    length_t: Tensor,
    *,
    launch: ScoresLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dsa_index.dsa_index_scores` of e4m3 rows.

    Raises:
        TypeError: q or k are not e4m3, scales or weights are not float32, lengths are not int32; `out` has another
            dtype.
        ValueError: shapes disagree; `out` does not fit.
        NotImplementedError: d is no power of two from 16 up, or channels are not contiguous.
    """
    dims = _check_scores(q_thd, w_th, length_t)
    expect_shape("k_sd", k_sd, "sd", dims)
    expect_dtype("k_sd", k_sd, E4M3)
    expect_shape("k_sf_s", k_sf_s, "s", dims)
    expect_dtype("k_sf_s", k_sf_s, torch.float32)
    from deeptwin.kernels.triton_ops import dsa_index

    codes = q_thd.view(torch.uint8), k_sd.view(torch.uint8)
    return dsa_index.index_scores(*codes, k_sf_s, w_th, length_t, launch=launch, out=out)


def dsa_index_scores_paged_triton(
    q_thd: Tensor,
    cache_pow: Tensor,
    w_th: Tensor,
    table_tj: Tensor,
    length_t: Tensor,
    *,
    launch: ScoresLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.dsa_index.dsa_index_scores_paged`, with the bits of `dsa_index_scores_triton` for the same keys.

    Raises:
        TypeError: q is not e4m3, the cache not uint8, weights not float32, pages or lengths not int32; `out` has
            another dtype.
        ValueError: shapes disagree; `out` does not fit.
        NotImplementedError: d is no power of two from 16 up, channels are not contiguous, or pages do not begin at
            multiples of four bytes.
    """
    dims = _check_scores(q_thd, w_th, length_t)
    expect_shape("cache_pow", cache_pow, "pow", {"w": dims["d"] + 4})
    expect_dtype("cache_pow", cache_pow, torch.uint8)
    expect_shape("table_tj", table_tj, "tj", dims)
    expect_dtype("table_tj", table_tj, torch.int32)
    from deeptwin.kernels.triton_ops import dsa_index

    codes = q_thd.view(torch.uint8)
    return dsa_index.index_scores_paged(codes, cache_pow, w_th, table_tj, length_t, launch=launch, out=out)


def sparse_mla_triton(
    q_thd: Tensor,
    cache_pow: Tensor,
    idx_tk: Tensor,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    launch: SplitLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.dsa.sparse_mla` of bf16 queries, with bf16 weights and output.

    Raises:
        ValueError: shapes disagree, no format with a tail has records of w bytes, `scale` is not positive, or an `out`
            buffer has another shape.
        TypeError: queries are not bfloat16, the cache is not uint8, indices or lengths are not int32, or an `out`
            buffer has another dtype.
        NotImplementedError: rows are not contiguous, or pages do not begin at multiples of four bytes.
    """
    dims: dict[str, int] = {}
    fmt = expect_records("cache_pow", cache_pow, {})
    if not fmt.tail:
        raise ValueError(f"cache_pow: expected records with a bf16 tail, got those of {fmt.name}")
    expect_shape("q_thd", q_thd, "thd", dims | {"d": fmt.width})
    expect_dtype("q_thd", q_thd, torch.bfloat16)
    expect_shape("idx_tk", idx_tk, "tk", {"t": q_thd.shape[0]})
    expect_dtype("idx_tk", idx_tk, torch.int32)
    if topk_length_t is not None:
        expect_shape("topk_length_t", topk_length_t, "t", {"t": q_thd.shape[0]})
        expect_dtype("topk_length_t", topk_length_t, torch.int32)
    expect_positive("scale", scale)
    from deeptwin.kernels.triton_ops import sparse_mla as kernels
    from deeptwin.kernels.triton_ops.wide_records import WideRecord

    record = WideRecord(channels=fmt.channels, group=fmt.quant.group, tail=fmt.tail)
    return kernels.sparse_mla(
        q_thd, cache_pow, idx_tk, topk_length_t, scale=scale, record=record, launch=launch, out=out
    )


def _index_rows(
    x_thd: Tensor,
    norm: tuple[Tensor, Tensor] | None,
    table_sr: Tensor,
    positions_t: Tensor,
    config: DsaConfig,
    out: Tensor | None,
) -> Tensor:
    from deeptwin.kernels.triton_ops import dsa_index

    return dsa_index.index_rows(
        x_thd,
        norm,
        table_sr,
        positions_t,
        interleaved=config.indexer_rope is IndexerRope.INTERLEAVED,
        transform=config.index_key is not None,
        eps=config.norm_eps,
        out=out,
    )


def _check_rows(name: str, x_thd: Tensor, table_sr: Tensor, positions_t: Tensor, config: DsaConfig) -> None:
    dims = {"d": config.index_dim, "r": config.mla.rope.rope_dim}
    expect_shape(name, x_thd, "thd", dims)
    expect_dtype(name, x_thd, torch.bfloat16)
    expect_shape("table_sr", table_sr, "sr", dims)
    expect_dtype("table_sr", table_sr, torch.float32)
    expect_shape("positions_t", positions_t, "t", dims)
    expect_dtype("positions_t", positions_t, torch.int32, torch.int64)


def _check_scores(q_thd: Tensor, w_th: Tensor, length_t: Tensor) -> dict[str, int]:
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_dtype("q_thd", q_thd, E4M3)
    expect_shape("w_th", w_th, "th", dims)
    expect_dtype("w_th", w_th, torch.float32)
    expect_shape("length_t", length_t, "t", dims)
    expect_dtype("length_t", length_t, torch.int32)
    return dims
