"""The stages of a CSA2 layer on the fast kernels: the contract is `reference/csa2_layer.py`.

Attention is one stage from the normalised row to its heads: rows are quantised once for both products that read them,
and the window key goes from its product to the ring in one launch of norm, rotation, quantiser and store.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_shape
from deeptwin.reference.config import (
    C1,
    C2,
    FP8_32X32,
    KV_FP8,
    Q8,
    FusedStore,
    PageLayout,
    RecordTap,
    TwoCaches,
)
from deeptwin.reference.csa2_config import CastPoints, Csa2Config
from deeptwin.reference.csa2_state import Csa2Caches, Csa2Step
from deeptwin.reference.topology import LayerMode
from deeptwin.reference.weights import Csa2Weights

from .attention_window import WindowLayer, attend_
from .compressor import compress_decode_triton, compress_prefill_triton, compress_tail_triton, compress_triton
from .indexer import index_queries_triton, index_scores_paged_triton, index_weights_triton
from .kv_cache import norm_rope_store_triton, store_records_triton
from .linear import linear_codes_triton, linear_quant_triton, linear_triton
from .products_v4 import layer_norm, rotated
from .quant import quantize_triton
from .topk import (
    candidate_blocks_triton,
    compact_lengths_triton,
    physical_slots_triton,
    restore_indices_triton,
    topk_triton,
)
from .window import compact_clip_triton


def projected(
    x_tm: Tensor, weights: Csa2Weights, table_sr: Tensor, positions_t: Tensor, *, config: Csa2Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads, the key before its norm, the query latent."""
    expect_shape("x_tm", x_tm, "tm", {"t": len(positions_t), "m": config.hidden})
    x_q, x_sf = quantize_triton(x_tm, fmt=Q8)  # once for both products
    down_ta = _product(x_q, x_sf, weights.wq_a_q, weights.wq_a_sf)
    latent_ta = layer_norm(down_ta, weights.q_norm_a, config)
    q_tk = linear_quant_triton(latent_ta, weights.wq_b_q, weights.wq_b_sf, x_fmt=Q8, w_fmt=FP8_32X32)
    q_thd = rotated(q_tk.unflatten(1, (config.num_heads, config.head_dim)), table_sr, positions_t)
    return q_thd, _product(x_q, x_sf, weights.wkv_q, weights.wkv_sf), latent_ta


def csa2_compress_triton_(
    x_tm: Tensor, weights: Csa2Weights, caches: Csa2Caches, step: Csa2Step, *, layer: int, config: Csa2Config
) -> None:
    """Stage 1 of a FULL layer, in place: pool the step's tokens, store entries and index keys, advance the ring.

    Raises:
        ValueError: shapes disagree; the layer owns no compressor.
    """
    ratio, table_sr = config.topology.ratios[layer], caches.table(config, layer)
    value_tw = linear_triton(x_tm, weights.own("entry_value_dm"), dtype=torch.float32)
    cu = step.cu_seqlens
    if ratio == 1:
        pooled_yd, entry_y = compress_triton(value_tw, None, None, step.first_b, cu, config=C1)
        seq_y = step.seq_t
    else:
        gate_tw = linear_triton(x_tm, weights.own("entry_gate_dm"), dtype=torch.float32)
        state = caches.compressor(config, layer)
        if step.decode:
            slot_t, seq_y = step.state_b[step.seq_t.long()], step.seq_t
            pooled_yd, entry_y = compress_decode_triton(
                value_tw, gate_tw, None, state, slot_t, step.positions_t, config=C2
            )
        else:
            pooled_yd, entry_y = compress_prefill_triton(
                value_tw, gate_tw, None, state, step.state_b, step.first_b, cu, config=C2
            )
            rows_b = (step.end_b // ratio - step.first_b // ratio).clamp(min=1).long()
            seq_y = torch.arange(len(rows_b), device=rows_b.device).repeat_interleave(rows_b)
    latent_yd, entry_yd = compress_tail_triton(
        pooled_yd, weights.own("entry_norm_d"), table_sr, entry_y, ratio=ratio, eps=config.eps
    )
    table_yp = step.table_bp[seq_y.long()].contiguous()
    slot_y = physical_slots_triton(entry_y[:, None].contiguous(), table_yp, page_entries=config.page_tokens // ratio)
    store_records_triton(caches.records(config, "main", layer), entry_yd, slot_y[:, 0], layout=config.layout)
    store = FusedStore(eps=config.eps, layout=PageLayout.SECTIONED, tap=RecordTap.NONE)
    norm_rope_store_triton(
        caches.records(config, "index", layer),
        linear_triton(latent_yd, weights.own("index_wk")),
        weights.own("index_norm"),
        table_sr,
        entry_y.clamp(min=0) * ratio,
        slot_y[:, 0],
        store=store,
    )


def _select(
    x_tm: Tensor,
    latent_ta: Tensor,
    weights: Csa2Weights,
    caches: Csa2Caches,
    step: Csa2Step,
    blocks_tk: Tensor | None,
    layer: int,
    config: Csa2Config,
) -> tuple[Tensor, Tensor | None]:
    map_, table_sr = config.topology, caches.table(config, layer)
    length_t = (step.positions_t + 1) // map_.ratios[layer]
    q_tk = linear_quant_triton(
        latent_ta, weights.own("index_wq_q"), weights.own("index_wq_sf"), x_fmt=Q8, w_fmt=FP8_32X32
    )
    q_thw = index_queries_triton(q_tk.unflatten(1, (map_.index_heads, map_.index_dim)), table_sr, step.positions_t)
    scale, size = (map_.index_heads * map_.index_dim) ** -0.5, map_.candidate_size
    w_th = index_weights_triton(x_tm, weights.own("index_head_hm"), scale=scale)
    key_pow = caches.records(config, "index", map_.kv_source(layer))
    within_tk = blocks_tk if map_.reads_candidates(layer) else None
    table_tp = step.table_bp[step.seq_t.long()].contiguous()
    scores_ts = index_scores_paged_triton(
        q_thw, key_pow, w_th, table_tp, length_t, within_tk, block_size=size, order=config.score_order
    )
    if within_tk is not None:
        compact_t = compact_lengths_triton(within_tk, length_t, block_size=size)
        idx_tk = topk_triton(scores_ts, compact_t, k=map_.index_topk)
        return restore_indices_triton(idx_tk, within_tk, block_size=size), blocks_tk
    if layer == map_.candidate_source:
        blocks_tk = candidate_blocks_triton(scores_ts, length_t, block_size=size, k=map_.candidate_blocks)
    return topk_triton(scores_ts, length_t, k=map_.index_topk), blocks_tk


def _attend(
    q_thd: Tensor,
    down_td: Tensor,
    weights: Csa2Weights,
    idx_tk: Tensor | None,
    caches: Csa2Caches,
    step: Csa2Step,
    layer: int,
    config: Csa2Config,
) -> Tensor:
    """The heads of a step over window and selection; without a selection over the window alone."""
    map_ = config.topology
    if idx_tk is None:
        main_pow = caches.page_pq.new_zeros(0, 1, config.main.record_bytes)
        slot_tk = torch.zeros(len(q_thd), 0, dtype=torch.int32, device=q_thd.device)
    else:
        main_pow, entries = caches.records(config, "main", map_.kv_source(layer)), config.page_tokens
        table_tp = step.table_bp[step.seq_t.long()].contiguous()
        slot_tk = physical_slots_triton(idx_tk, table_tp, page_entries=entries // map_.ratios[layer])
    window_layer = WindowLayer(
        norm_d=weights.kv_norm_d,
        sink_h=weights.sink_h,
        table_sr=caches.table(config, layer),
        window=config.sliding(decoder=layer >= map_.boundary and map_.ratios[layer] > 0),
        caches=TwoCaches(window=KV_FP8, main=config.main, layout=config.layout, scale=config.head_dim**-0.5),
        eps=config.eps,
        dtype=torch.float32 if config.cast is CastPoints.FUSED else torch.bfloat16,
    )
    ring_pow = caches.records(config, "ring", layer)
    return attend_(q_thd, down_td, ring_pow, main_pow, slot_tk, step, layer=window_layer)


def csa2_attention_triton_(
    x_tm: Tensor,
    weights: Csa2Weights,
    caches: Csa2Caches,
    step: Csa2Step,
    carried: tuple[Tensor | None, Tensor | None],
    forced_tk: Tensor | None,
    *,
    layer: int,
    config: Csa2Config,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Project, select and attend, in place in the ring of the layer; returns heads, selection and candidates.

    Raises:
        ValueError: shapes disagree.
    """
    map_, (idx_tk, blocks_tk) = config.topology, carried
    q_thd, down_td, latent_ta = projected(x_tm, weights, caches.table(config, layer), step.positions_t, config=config)
    if layer in map_.index_sources and forced_tk is not None:
        idx_tk = forced_tk.contiguous()
    elif layer in map_.index_sources:
        idx_tk, blocks_tk = _select(x_tm, latent_ta, weights, caches, step, blocks_tk, layer, config)
    seen_tk = None if map_.mode(layer) is LayerMode.SWA else idx_tk
    return _attend(q_thd, down_td, weights, seen_tk, caches, step, layer, config), idx_tk, blocks_tk


def csa2_compact_triton(step: Csa2Step, *, config: Csa2Config) -> tuple[Tensor, Csa2Step]:
    """The rows that decoder layers compute, and the step that they see."""
    window = config.sliding(decoder=True)
    clip_b = compact_clip_triton(step.first_b, step.end_b, step.known_b, config=window)
    seq_t = step.seq_t.long()
    kept_t = (step.positions_t >= (step.first_b + clip_b)[seq_t]).nonzero()[:, 0]
    return kept_t, replace(step, positions_t=step.positions_t[kept_t], seq_t=step.seq_t[kept_t], clip_b=clip_b)


def _product(x_q: Tensor, x_sf: Tensor, w_q: Tensor, w_sf: Tensor) -> Tensor:
    return linear_codes_triton(x_q, x_sf, w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32)
