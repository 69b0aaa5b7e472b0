"""Fast sparse attention; the contract is `reference/sparse_attn.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.split_softmax import SplitLaunch


def sparse_attn_triton(
    q_thd: Tensor,
    kv_sd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    launch: SplitLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to listed rows of a sequence; queries, keys and output are of `dtype`.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, `scale` is not positive, or an `out` buffer has
            another shape.
        TypeError: `dtype` is not bfloat16 or float32, queries, keys or an `out` buffer have another dtype, indices or
            lengths are not int32, or the sink is not float32.
        NotImplementedError: `value_dim` is no power of two from 16 up, or rows are not contiguous.
    """
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_shape("kv_sd", kv_sd, "sd", dims)
    expect_dtype("kv_sd", kv_sd, dtype)
    _check_lists(q_thd, idx_tk, sink_h, topk_length_t, dims, scale, value_dim, dtype)
    from deeptwin.kernels.triton_ops import sparse_attn as kernels

    return kernels.sparse_attn(
        q_thd, kv_sd, idx_tk, sink_h, topk_length_t, scale=scale, value_dim=value_dim, launch=launch, out=out
    )


def sparse_attn_decode_triton(
    q_thd: Tensor,
    kv_pod: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    launch: SplitLaunch | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to listed slots of a paged cache; as `sparse_attn_triton`, and with the same bits for the same list.

    Raises:
        ValueError: shapes disagree, `value_dim` is not in 1..d, `scale` is not positive, or an `out` buffer has
            another shape.
        TypeError: `dtype` is not bfloat16 or float32, queries, keys or an `out` buffer have another dtype, indices or
            lengths are not int32, or the sink is not float32.
        NotImplementedError: `value_dim` is no power of two from 16 up, or rows are not contiguous.
    """
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_shape("kv_pod", kv_pod, "pod", dims)
    expect_dtype("kv_pod", kv_pod, dtype)
    _check_lists(q_thd, idx_tk, sink_h, topk_length_t, dims, scale, value_dim, dtype)
    from deeptwin.kernels.triton_ops import sparse_attn as kernels

    return kernels.sparse_attn_decode(
        q_thd, kv_pod, idx_tk, sink_h, topk_length_t, scale=scale, value_dim=value_dim, launch=launch, out=out
    )


def _check_lists(
    q_thd: Tensor,
    idx_tk: Tensor,
    sink_h: Tensor | None,
    topk_length_t: Tensor | None,
    dims: dict[str, int],
    scale: float,
    value_dim: int,
    dtype: torch.dtype,
) -> None:
    expect_dtype("q_thd", q_thd, dtype)
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"dtype: expected bfloat16 or float32, got {dtype}")
    expect_shape("idx_tk", idx_tk, "tk", dims)
    expect_dtype("idx_tk", idx_tk, torch.int32)
    if sink_h is not None:
        expect_shape("sink_h", sink_h, "h", dims)
        expect_dtype("sink_h", sink_h, torch.float32)
    if topk_length_t is not None:
        expect_shape("topk_length_t", topk_length_t, "t", dims)
        expect_dtype("topk_length_t", topk_length_t, torch.int32)
    expect_positive("scale", scale)
    if not 1 <= value_dim <= dims["d"]:
        raise ValueError(f"value_dim: expected a number in 1..{dims['d']}, got {value_dim}")
