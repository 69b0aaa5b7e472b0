"""CSA2 on the fast kernels: the contract is `reference/csa2.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_shape
from deeptwin.reference.config import FP8_32X32, Q8, Truncation
from deeptwin.reference.csa2_config import CastPoints, Csa2Config
from deeptwin.reference.csa2_state import Csa2Batch, Csa2Caches, Csa2Step
from deeptwin.reference.topology import LayerMode
from deeptwin.reference.weights import Csa2Weights

from .attention_v41 import (
    csa2_attention_triton_,
    csa2_compact_triton,
    csa2_compress_triton_,
    projected,
)
from .linear import linear_codes_triton
from .products_v4 import layer_norm, rotated
from .quant import quantize_triton

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.csa2 import GroupedLaunch


def csa2_project_triton(
    x_tm: Tensor, weights: Csa2Weights, table_sr: Tensor, positions_t: Tensor, *, config: Csa2Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads, the window key before its quantiser, the query latent; all bf16.

    Raises:
        ValueError: shapes disagree.
    """
    q_thd, down_td, latent_ta = projected(x_tm, weights, table_sr, positions_t, config=config)
    key_td = layer_norm(down_td, weights.kv_norm_d, config)
    return q_thd, rotated(key_td[:, None], table_sr, positions_t)[:, 0], latent_ta


def csa2_output_triton(
    out_thd: Tensor,
    weights: Csa2Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: Csa2Config,
    launch: GroupedLaunch | None = None,
) -> Tensor:
    """Rotate back, grouped low-rank output, output projection.

    Raises:
        ValueError: shapes disagree.
    """
    expect_shape("out_thd", out_thd, "thd", {"h": config.num_heads, "d": config.head_dim, "t": len(positions_t)})
    from deeptwin.kernels.triton_ops import csa2 as kernels

    fused = config.cast is CastPoints.FUSED
    dtype = torch.float32 if fused else torch.bfloat16
    u_tk = rotated(out_thd, table_sr, positions_t, inverse=True, dtype=dtype).flatten(1)
    u_q, u_sf = quantize_triton(u_tk, fmt=Q8) if fused else (u_tk, None)
    groups = config.o_groups
    z_tf = kernels.grouped_output(u_q, u_sf, weights.wo_a_q, weights.wo_a_sf, groups=groups, dtype=dtype, launch=launch)
    z_q, z_sf = quantize_triton(z_tf, fmt=Q8)
    return linear_codes_triton(z_q, z_sf, weights.wo_b_q, weights.wo_b_sf, x_fmt=Q8, w_fmt=FP8_32X32)


def csa2_run_triton(
    h_tm: Tensor,
    layers: tuple[Csa2Weights, ...],
    caches: Csa2Caches,
    batch: Csa2Batch,
    picks_ltk: Tensor | None,
    *,
    config: Csa2Config,
) -> tuple[Tensor, Tensor, Tensor]:
    """A stack of attention layers, step by step; pages and states are copied once and then written in place.

    Raises:
        ValueError: shapes disagree; there is not one set of weights for each backbone layer; the steps of `batch` do
            not add up to t tokens, or a decode step is longer than `config.backtracking`.
    """
    expect_shape("h_tm", h_tm, "tm", {"m": config.hidden})
    backbone = config.topology.num_layers - config.topology.draft_layers
    if len(layers) != backbone:
        raise ValueError(f"layers: expected {backbone}, got {len(layers)}")
    if int(batch.counts_kb.sum()) != len(h_tm):
        raise ValueError(f"batch: expected steps of {len(h_tm)} tokens in all, got {batch.counts_kb.tolist()}")
    longest = batch.counts_kb[batch.decode_k]
    if longest.numel() and int(longest.max()) > config.backtracking:
        raise ValueError(f"batch: expected decode steps of up to {config.backtracking}, got {longest.tolist()}")
    caches = replace(caches, page_pq=caches.page_pq.clone(), state_sq=caches.state_sq.clone())
    out_tm = torch.zeros_like(h_tm, memory_format=torch.contiguous_format)
    for step, row_t in batch.steps():
        picks = None if picks_ltk is None else picks_ltk[:, row_t]
        h_ym, kept_t = _step(h_tm[row_t], layers, caches, step, picks, config)
        out_tm[row_t[kept_t]] = h_ym
    return out_tm, caches.page_pq, caches.state_sq


def _step(
    h_tm: Tensor,
    layers: tuple[Csa2Weights, ...],
    caches: Csa2Caches,
    step: Csa2Step,
    picks_ltk: Tensor | None,
    config: Csa2Config,
) -> tuple[Tensor, Tensor]:
    map_ = config.topology
    idx_tk = blocks_tk = None
    kept_t = torch.arange(len(h_tm), device=h_tm.device)
    for layer, weights in enumerate(layers):
        x_tm = layer_norm(h_tm, weights.attn_norm_m, config)
        if map_.mode(layer) is LayerMode.FULL:
            csa2_compress_triton_(x_tm, weights, caches, step, layer=layer, config=config)
        if layer == map_.boundary and config.truncation is Truncation.COMPACT and not step.decode:
            kept_t, step = csa2_compact_triton(step, config=config)
            h_tm, x_tm = h_tm[kept_t], x_tm[kept_t]
        forced_tk = None
        if picks_ltk is not None and layer in map_.index_sources:
            forced_tk = picks_ltk[map_.index_sources.index(layer), kept_t]
        out_thd, idx_tk, blocks_tk = csa2_attention_triton_(
            x_tm, weights, caches, step, (idx_tk, blocks_tk), forced_tk, layer=layer, config=config
        )
        table_sr = caches.table(config, layer)
        h_tm = h_tm + csa2_output_triton(out_thd, weights, table_sr, step.positions_t, config=config)
    return h_tm, kept_t
