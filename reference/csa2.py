"""CSA2, the attention of V4.1: a sliding window and picked compressed entries in one softmax, caches that layers share.

A layer takes its normalised input x and returns what the residual stream gains. Per layer, in this order:

1. a FULL layer pools x to entries, stores them (FP4 or FP8 records), and stores index keys made from the same latents:
   all entries of a step stand in the caches before any query of the step looks, so a token sees what it completes;
2. a FULL or REINDEX layer scores entries j < floor((p + 1) / r) with its own queries and picks the best; others reuse
   the last pick. Queries always meet the index keys of their own segment's owner;
3. keys of the window: c = RMSNorm(x wkv), rotated, quantised as a whole to FP8 records, the rotary channels too;
4. one softmax over window and picked entries, without removing what both hold; key = value;
5. the output is rotated back at the query's position, goes through the block-diagonal wo_a, then wo_b.

A step advances every sequence by some tokens. Prefill reads [history of the rings | rows of the chunk]; decode stores
first and reads the rings. Both see the same values, so any way to cut a text into steps leaves the same bytes.

The stages 1 to 4 stand in `csa2_layer.py`, the bytes in `csa2_state.py`, the layer map and its rules in `topology.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .checks import expect_shape
from .config import FP8_32X32, Q8, Truncation
from .csa2_config import CastPoints, Csa2Config
from .csa2_layer import csa2_attend_, csa2_compress_, csa2_select, layer_norm, lin8, rotated
from .csa2_state import Csa2Batch, Csa2Caches, Csa2Step
from .numerics import CONTRACT, Numerics
from .quant import dequantize, fake_quantize
from .topology import LayerMode
from .weights import Csa2Weights
from .window import compact_clip, compact_rows


def csa2_project(
    x_tm: Tensor,
    weights: Csa2Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: Csa2Config,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads, the window key before its quantiser, and the query latent that the indexer shares.

    Math:
        latent = RMSNorm(lin8(x, wq_a)); q = lin8(latent, wq_b), last r channels rotated; no norm of a head
        key = RMSNorm(lin8(x, wkv)), last r channels rotated

    Shapes:
        x_tm: [t, m]; table_sr: fp32 [s, r]; positions_t: [t]; returns q_thd, key_td, latent_ta.

    Rounding:
        bf16 after each product, norm and rotation; inputs of products to Q8.

    Raises:
        ValueError: shapes disagree.

    Source:
        v41-attention.md section 2.1
    """
    expect_shape("x_tm", x_tm, "tm", {"t": len(positions_t), "m": config.hidden})
    latent_ta = lin8(x_tm, weights.wq_a_q, weights.wq_a_sf, num=num)
    latent_ta = layer_norm(latent_ta, weights.q_norm_a, config, num=num)
    q_thd = lin8(latent_ta, weights.wq_b_q, weights.wq_b_sf, num=num).unflatten(1, (config.num_heads, config.head_dim))
    key_td = layer_norm(lin8(x_tm, weights.wkv_q, weights.wkv_sf, num=num), weights.kv_norm_d, config, num=num)
    q_thd = rotated(q_thd, table_sr, positions_t, num=num)
    return q_thd, rotated(key_td[:, None], table_sr, positions_t, num=num)[:, 0], latent_ta


def csa2_output(
    out_thd: Tensor,
    weights: Csa2Weights,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    config: Csa2Config,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Rotate back at the query's position, then the grouped low-rank output.

    Math:
        u = out with its last r channels turned by the opposite angle; z_g = u[heads of group g] wo_a[g]^T
        y = lin8(z_1 … z_G, wo_b)

    Shapes:
        out_thd: [t, h, d]; returns y_tm.

    Rounding:
        RELEASE: u and z to bf16, y to bf16. FUSED: u stays fp32 and goes to Q8, z goes to Q8 unrounded.

    Raises:
        ValueError: shapes disagree.

    Source:
        v41-attention.md sections 2.1, 2.2
    """
    expect_shape("out_thd", out_thd, "thd", {"h": config.num_heads, "d": config.head_dim, "t": len(positions_t)})
    fused = config.cast is CastPoints.FUSED
    dtype = torch.float32 if fused else torch.bfloat16
    u_thd = rotated(out_thd, table_sr, positions_t, num=num, inverse=True, dtype=dtype)
    u_tk = u_thd.flatten(1)
    if fused:
        u_tk = fake_quantize(u_tk, fmt=Q8, num=num)
    w_nk = dequantize(weights.wo_a_q, weights.wo_a_sf, fmt=FP8_32X32, num=num)  # exact in bf16
    w_gnk, u_tgk = w_nk.unflatten(0, (config.o_groups, -1)), u_tk.unflatten(1, (config.o_groups, -1))
    z_tf = num.store(num.einsum("tgk,gnk->tgn", u_tgk, w_gnk), dtype).flatten(1)
    return lin8(z_tf, weights.wo_b_q, weights.wo_b_sf, num=num)


def csa2_run(
    h_tm: Tensor,
    layers: tuple[Csa2Weights, ...],
    caches: Csa2Caches,
    batch: Csa2Batch,
    picks_ltk: Tensor | None,
    *,
    config: Csa2Config,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor, Tensor]:
    """A stack of attention layers over packed sequences, step by step, all state in cache bytes.

    Math:
        h <- bf16(h + attention(RMSNorm(h))) in every backbone layer

    Shapes:
        h_tm: [t, m], the sequences of `batch` one after the other; layers: one for each backbone layer; picks_ltk:
        int32 [index sources, t, index_topk] of entries to attend to, or None: the layers select; returns h_tm, and
        copies of the pages and states after the last step.

    Rounding:
        the residual stream to bf16 after every layer.

    Edges:
        pages and states may hold anything before. Rows that COMPACT leaves out come back as zeros.

    Raises:
        ValueError: shapes disagree; there is not one set of weights for each backbone layer; the steps of `batch` do
            not add up to t tokens, or a decode step is longer than `config.backtracking`.

    Source:
        v41-attention.md sections 2, 5, 6, 9
    """
    _check_run(h_tm, layers, batch, config)
    caches = replace(caches, page_pq=caches.page_pq.clone(), state_sq=caches.state_sq.clone())
    out_tm = torch.zeros_like(num.wide(h_tm))
    for step, row_t in batch.steps():
        picks = None if picks_ltk is None else picks_ltk[:, row_t]
        h_ym, kept_t = csa2_step_(num.wide(h_tm)[row_t], layers, caches, step, picks, config=config, num=num)
        out_tm[row_t[kept_t]] = h_ym
    return out_tm, caches.page_pq, caches.state_sq


def csa2_step_(
    h_tm: Tensor,
    layers: tuple[Csa2Weights, ...],
    caches: Csa2Caches,
    step: Csa2Step,
    picks_ltk: Tensor | None,
    *,
    config: Csa2Config,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """One step through all layers, in place in the caches; returns the rows that were computed, and which they are."""
    map_, idx_tk, blocks_tk = config.topology, None, None
    kept_t = torch.arange(len(h_tm), device=h_tm.device)
    for layer, weights in enumerate(layers):
        x_tm = layer_norm(h_tm, weights.attn_norm_m, config, num=num)
        if map_.mode(layer) is LayerMode.FULL:  # before rows are left out: entries are made of all of them
            csa2_compress_(x_tm, weights, caches, step, layer=layer, config=config, num=num)
        if layer == map_.boundary and config.truncation is Truncation.COMPACT and not step.decode:
            kept_t, step = csa2_compact(step, config=config)
            h_tm, x_tm = h_tm[kept_t], x_tm[kept_t]
        forced_tk = None
        if picks_ltk is not None and layer in map_.index_sources:
            forced_tk = picks_ltk[map_.index_sources.index(layer), kept_t]
        out_thd, idx_tk, blocks_tk = csa2_attention_(
            x_tm, weights, caches, step, (idx_tk, blocks_tk), forced_tk, layer=layer, config=config, num=num
        )
        table_sr = caches.table(config, layer)
        h_tm = num.bf16(h_tm + csa2_output(out_thd, weights, table_sr, step.positions_t, config=config, num=num))
    return h_tm, kept_t


def csa2_attention_(
    x_tm: Tensor,
    weights: Csa2Weights,
    caches: Csa2Caches,
    step: Csa2Step,
    carried: tuple[Tensor | None, Tensor | None],
    forced_tk: Tensor | None,
    *,
    layer: int,
    config: Csa2Config,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Stages 2 to 4 of a layer: project, select, attend, in place in the ring of the layer.

    Shapes:
        x_tm: [t, m], normalised; carried: the selection and the candidate blocks of the layers before, None where there
        are none; forced_tk: int32 [t, index_topk], entries in place of an index source's own, or None: it selects;
        returns out_thd, and what to carry on.

    Raises:
        ValueError: shapes disagree.

    Source:
        v41-attention.md sections 2, 4, 5
    """
    map_, (idx_tk, blocks_tk) = config.topology, carried
    table_sr = caches.table(config, layer)
    q_thd, key_td, latent_ta = csa2_project(x_tm, weights, table_sr, step.positions_t, config=config, num=num)
    if layer in map_.index_sources and forced_tk is not None:
        idx_tk = forced_tk
    elif layer in map_.index_sources:
        idx_tk, blocks_tk = csa2_select(
            x_tm, latent_ta, weights, caches, step, blocks_tk, layer=layer, config=config, num=num
        )
    seen_tk = None if map_.mode(layer) is LayerMode.SWA else idx_tk
    out_thd = csa2_attend_(q_thd, key_td, weights.sink_h, seen_tk, caches, step, layer=layer, config=config, num=num)
    return out_thd, idx_tk, blocks_tk


def csa2_compact(step: Csa2Step, *, config: Csa2Config) -> tuple[Tensor, Csa2Step]:
    """The rows that decoder layers compute, and the step that they see."""
    window = config.sliding(decoder=True)
    kept_t = compact_rows(step.first_b, step.end_b, step.known_b, config=window)
    clip_b = compact_clip(step.first_b, step.end_b, step.known_b, config=window)
    return kept_t, replace(step, positions_t=step.positions_t[kept_t], seq_t=step.seq_t[kept_t], clip_b=clip_b)


def _check_run(h_tm: Tensor, layers: tuple[Csa2Weights, ...], batch: Csa2Batch, config: Csa2Config) -> None:
    expect_shape("h_tm", h_tm, "tm", {"m": config.hidden})
    backbone = config.topology.num_layers - config.topology.draft_layers
    if len(layers) != backbone:
        raise ValueError(f"layers: expected {backbone}, got {len(layers)}")
    if int(batch.counts_kb.sum(dtype=torch.int64)) != len(h_tm):
        raise ValueError(f"batch: expected steps of {len(h_tm)} tokens in all, got {batch.counts_kb.tolist()}")
    longest = batch.counts_kb[batch.decode_k]
    if longest.numel() and int(longest.max()) > config.backtracking:
        raise ValueError(f"batch: expected decode steps of up to {config.backtracking}, got {longest.tolist()}")
