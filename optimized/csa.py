"""Attention of V4 on the fast kernels: the contract is `reference/csa.py`, what layers share `reference/v4_layer.py`.

Keys, entries and index keys are records whatever the form: whole sequences are one prefill step over fresh caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_shape
from deeptwin.reference.config import (
    FP8_1X128_UE8M0,
    INDEX_FP4,
    HeadNorm,
    IndexCast,
    OutputCast,
    PageLayout,
    V4AttnConfig,
    V4Kind,
)
from deeptwin.reference.csa2_state import Csa2Batch
from deeptwin.reference.v4_state import V4Caches, v4_caches
from deeptwin.reference.v4_weights import V4Weights, owned

from .hadamard import hadamard_triton
from .indexer import index_scores_paged_triton, index_weights_triton
from .products_v4 import product, rotated
from .providers import deep_gemm
from .quant import quantize_triton
from .topk import topk_triton

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.csa import HeadNormLaunch
    from deeptwin.kernels.triton_ops.csa2 import GroupedLaunch

SECTIONED = PageLayout.SECTIONED


def head_norm_rope_triton(
    q_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    cast: HeadNorm,
    eps: float,
    launch: HeadNormLaunch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalised heads with their last channels rotated. A position outside the table gives NaN.

    Raises:
        TypeError: q_thd is not bf16, the table not fp32, positions no integers, or `out` has another dtype.
        ValueError: shapes disagree, or `out` does not fit.
        NotImplementedError: a head has no power of two of channels.
    """
    dims: dict[str, int] = {}
    expect_shape("q_thd", q_thd, "thd", dims)
    expect_dtype("q_thd", q_thd, torch.bfloat16)
    expect_shape("table_sr", table_sr, "sr", dims)
    expect_dtype("table_sr", table_sr, torch.float32)
    expect_shape("positions_t", positions_t, "t", dims)
    expect_dtype("positions_t", positions_t, torch.int32, torch.int64)
    if dims["r"] % 2 or dims["r"] > dims["d"]:
        raise ValueError(f"table_sr: expected an even width up to d={dims['d']}, got r={dims['r']}")
    from deeptwin.kernels.triton_ops import csa as kernels

    return kernels.head_norm_rope(q_thd, table_sr, positions_t, cast=cast.value, eps=eps, launch=launch, out=out)


def v4_output_triton(
    out_thd: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: V4AttnConfig,
    launch: GroupedLaunch | None = None,
) -> Tensor:
    """Rotate back, grouped low-rank output, output projection.

    Raises:
        ValueError: shapes disagree.
    """
    expect_shape("out_thd", out_thd, "thd", {"h": config.num_heads, "d": config.head_dim, "t": len(positions_t)})
    from deeptwin.kernels.triton_ops import csa2 as kernels

    fused = config.output is OutputCast.FUSED
    dtype = torch.float32 if fused else torch.bfloat16
    u_tk = rotated(out_thd, table_sr, positions_t, inverse=True, dtype=dtype).flatten(1)
    u_q, u_sf = quantize_triton(u_tk, fmt=FP8_1X128_UE8M0) if fused else (u_tk, None)
    z_tf = kernels.grouped_output(
        u_q,
        u_sf,
        weights.wo_a,
        weights.wo_a_sf,
        groups=config.o_groups,
        dtype=torch.bfloat16,
        weight_tile=128,
        row_group=128,
        launch=launch,
    )
    return product(z_tf, weights.wo_b, weights.wo_b_sf)


def v4_output_deep_gemm(
    out_thd: Tensor, weights: V4Weights, table_sr: Tensor, positions_t: Tensor, *, config: V4AttnConfig
) -> Tensor:
    """`v4_output` at the fused cast points; DeepGEMM 2.5.0's FP8 einsum multiplies the groups. It takes scales as
    fp32 numbers on SM90 and truncates within 128 products; run to run and whatever the batch a token has the same bits.

    Raises:
        ValueError: shapes disagree.
        NotImplementedError: no DeepGEMM, other cast points, weights without scales, no token, or groups that are no
            multiple of 128 channels wide or no part or multiple of 128 long.
    """
    expect_shape("out_thd", out_thd, "thd", {"h": config.num_heads, "d": config.head_dim, "t": len(positions_t)})
    if config.output is not OutputCast.FUSED or weights.wo_a_sf is None:
        raise NotImplementedError(f"config, weights: expected fused cast points and FP8 weights, got {config.output}")
    groups, rank = config.o_groups, config.o_rank
    width = weights.wo_a.shape[1]
    if not len(out_thd) or width % 128 or (rank % 128 and 128 % rank):
        raise NotImplementedError(
            f"weights: expected tokens, 128·n columns and 128·n or 128/n rows, got {width}, {rank}"
        )
    library = deep_gemm()
    u_tk = rotated(out_thd, table_sr, positions_t, inverse=True, dtype=torch.float32).flatten(1)
    u_q, u_sf = quantize_triton(u_tk, fmt=FP8_1X128_UE8M0)
    w_sf = weights.wo_a_sf.repeat_interleave(128, 0)[: groups * rank].unflatten(0, (groups, rank))[:, ::128]
    z_tgf = torch.empty(len(u_q), groups, rank, dtype=torch.bfloat16, device=u_q.device)
    rows = u_q.unflatten(1, (groups, width)), torch.exp2(u_sf.float() - 127).unflatten(1, (groups, width // 128))
    matrices = weights.wo_a.unflatten(0, (groups, rank)), torch.exp2(w_sf.float() - 127).contiguous()
    library.fp8_einsum("bhr,hdr->bhd", rows, matrices, z_tgf)
    return product(z_tgf.flatten(1), weights.wo_b, weights.wo_b_sf)


def csa_select_triton(
    x_tm: Tensor,
    latent_ta: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    index_pow: Tensor,
    table_tp: Tensor,
    *,
    config: V4AttnConfig,
) -> Tensor:
    """The entries that every query attends to.

    Raises:
        ValueError: shapes disagree; the weights have no indexer.
        NotImplementedError: index keys are not FP4.
    """
    _require_fp4(config)
    expect_shape("x_tm", x_tm, "tm", {"t": len(latent_ta)})
    index_wq, index_head_hm = owned(weights.index_wq, "index_wq"), owned(weights.index_head_hm, "index_head_hm")
    heads, width = config.index_heads, config.index_dim
    q_tk = product(latent_ta, index_wq, weights.index_wq_sf)
    q_thd = rotated(q_tk.unflatten(1, (heads, width)), table_sr, positions_t)
    codes, sf = quantize_triton(hadamard_triton(q_thd.flatten(0, 1)), fmt=INDEX_FP4.quant)
    q_thw = torch.cat([codes, sf], 1).unflatten(0, (len(x_tm), heads))
    w_th = index_weights_triton(x_tm, index_head_hm, scale=(heads * width) ** -0.5)
    length_t = ((positions_t + 1) // config.ratio).to(torch.int32)
    scores_tj = index_scores_paged_triton(
        q_thw, index_pow, w_th, table_tp, length_t, None, block_size=1, order=config.score_order
    )
    return topk_triton(scores_tj, length_t.clamp(max=scores_tj.shape[1]), k=config.index_topk)


def csa_attention_triton(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    cu_seqlens: Tensor,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
) -> Tensor:
    """Whole sequences: one prefill step over fresh caches.

    Raises:
        ValueError: shapes disagree; config is not of kind CSA.
        NotImplementedError: keys or index keys are not quantised.
    """
    caches, batch = _whole_sequences(x_tm, cu_seqlens, config)
    return csa_run_triton(x_tm, weights, table_sr, caches, batch, picks_tk, config=config)[0]


def csa_run_triton(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    batch: Csa2Batch,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Any steps; caches are copied once and then written in place.

    Raises:
        ValueError: shapes disagree; config is not of kind CSA; caches lack a part; the steps do not add up to t tokens,
            or a decode step is longer than `config.backtracking`.
        NotImplementedError: index keys are not FP4.
    """
    _require_steps(x_tm, batch, config, V4Kind.CSA)
    _require_parts(caches, V4Kind.CSA)
    _require_fp4(config)
    from .attention_v4 import csa_step_triton_

    caches = caches.clone()
    y_tm = torch.empty_like(x_tm, memory_format=torch.contiguous_format)
    for step, row_t in batch.steps():
        picks = None if picks_tk is None else picks_tk[row_t].contiguous()
        y_tm[row_t] = csa_step_triton_(x_tm[row_t], weights, table_sr, caches, step, picks, config=config)
    parts = (caches.main_pow, caches.pool, caches.index_pow, caches.index_pool)
    main_pow, pool, index_pow, index_pool = (owned(part, "caches") for part in parts)
    return y_tm, caches.ring_pow, main_pow, pool, index_pow, index_pool


def _whole_sequences(x_tm: Tensor, cu_seqlens: Tensor, config: V4AttnConfig) -> tuple[V4Caches, Csa2Batch]:
    """Fresh caches and the one prefill step that advances sequences from position 0.

    Raises:
        ValueError: cu_seqlens does not split the rows of x_tm.
        NotImplementedError: keys are not quantised.
    """
    expect_shape("cu_seqlens", cu_seqlens, "n", {})
    if config.cache is None or (config.kind is V4Kind.CSA and config.index is IndexCast.PLAIN):
        raise NotImplementedError(f"config: expected quantised caches, got cache={config.cache}, index={config.index}")
    counts_b = cu_seqlens.diff().to(torch.int32)
    if int(cu_seqlens[0]) or int(cu_seqlens[-1]) != len(x_tm) or bool((counts_b < 0).any()):
        raise ValueError(f"cu_seqlens: expected numbers from 0 up to {len(x_tm)}, got {cu_seqlens.tolist()}")
    pages_b = -(-counts_b.long() // config.page_tokens)
    table_bp = torch.arange(max(int(pages_b.max()), 1) if len(pages_b) else 1, device=x_tm.device).to(torch.int32)
    first_b1 = (pages_b.cumsum(0) - pages_b).to(torch.int32)[:, None]
    table_bp = torch.where(table_bp < pages_b[:, None], first_b1 + table_bp, -1).to(torch.int32)
    zeros_b = torch.zeros_like(counts_b)
    batch = Csa2Batch(
        counts_kb=counts_b[None],
        decode_k=torch.zeros(1, dtype=torch.bool),
        start_b=zeros_b,
        valid_b=zeros_b,
        state_b=torch.arange(len(counts_b), device=x_tm.device).to(torch.int32),
        table_bp=table_bp,
    )
    pages = max(int(pages_b.sum()), 1)
    return v4_caches(config, pages=pages, states=max(len(counts_b), 1), device=x_tm.device), batch


def _require_fp4(config: V4AttnConfig) -> None:
    if config.index is not IndexCast.FP4:
        raise NotImplementedError(f"config: expected index keys in FP4, got {config.index.name}")


def _require_parts(caches: V4Caches, kind: V4Kind) -> None:
    """Raise ValueError unless every part that a kind of layer keeps is there."""
    names = {V4Kind.SLIDING: (), V4Kind.HCA: ("main_pow", "pool")}
    for name in names.get(kind, ("main_pow", "pool", "index_pow", "index_pool")):
        owned(getattr(caches, name), "caches")


def _require_steps(x_tm: Tensor, batch: Csa2Batch, config: V4AttnConfig, kind: V4Kind) -> None:
    """Raise ValueError unless the steps are those of x_tm, none is too long, and config is of the kind."""
    if config.kind is not kind:
        raise ValueError(f"config: expected kind {kind.name}, got {config.kind.name}")
    expect_shape("x_tm", x_tm, "tm", {"m": config.hidden})
    if int(batch.counts_kb.sum()) != len(x_tm):
        raise ValueError(f"batch: expected steps of {len(x_tm)} tokens in all, got {batch.counts_kb.tolist()}")
    longest = batch.counts_kb[batch.decode_k]
    if longest.numel() and int(longest.max()) > config.backtracking:
        raise ValueError(f"batch: expected decode steps of up to {config.backtracking}, got {longest.tolist()}")
