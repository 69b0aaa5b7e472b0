"""The stages of a CSA2 layer that touch caches: compress and store, select, attend. `csa2.py` says how they follow."""

from __future__ import annotations

import torch
from torch import Tensor

from .compressor import compress, compress_decode, compress_prefill, compress_project, compress_rows, compress_tail
from .config import (
    C1,
    C2,
    FP8_32X32,
    KV_FP8,
    Q8,
    FusedStore,
    PageLayout,
    Pairing,
    RecordTap,
    RopeSpan,
    TwoCaches,
    WeightCast,
)
from .csa2_config import CastPoints, Csa2Config
from .csa2_state import Csa2Caches, Csa2Step
from .indexer import index_queries, index_scores_paged, index_visible, index_weights
from .kv_cache import load_records, norm_rope_store, pack_records, store_records, unpack_records
from .linear import linear, linear_quant
from .numerics import CONTRACT, Numerics
from .rms_norm import rms_norm
from .rope import rope
from .sparse_attn import two_cache_attn, two_cache_attn_decode
from .topk import candidate_blocks, compact_lengths, physical_slots, restore_indices, topk
from .weights import Csa2Weights
from .window import history_slots, ring_slots, window_decode, window_prefill


def csa2_compress_(
    x_tm: Tensor,
    weights: Csa2Weights,
    caches: Csa2Caches,
    step: Csa2Step,
    *,
    layer: int,
    config: Csa2Config,
    num: Numerics = CONTRACT,
) -> None:
    """Stage 1 of a FULL layer, in place: pool the step's tokens, store entries and index keys, advance the ring.

    Raises:
        ValueError: shapes disagree; the layer owns no compressor.

    Source:
        v41-attention.md sections 3, 4.1, 5
    """
    ratio, table_sr = config.topology.ratios[layer], caches.table(config, layer)
    pooled_yd, entry_y, seq_y = _pooled(x_tm, weights, caches, step, layer, config, num)
    latent_yd, entry_yd = compress_tail(
        pooled_yd, weights.own("entry_norm_d"), table_sr, entry_y, ratio=ratio, eps=config.eps, num=num
    )
    slot_y1 = physical_slots(entry_y[:, None], step.table_bp[seq_y.long()], page_entries=config.page_tokens // ratio)
    main_pow, index_pow = caches.records(config, "main", layer), caches.records(config, "index", layer)
    store_records(main_pow, entry_yd, slot_y1[:, 0], layout=config.layout, num=num)
    key_yl, first_y = linear(latent_yd, weights.own("index_wk"), num=num), entry_y.clamp(min=0) * ratio
    store = FusedStore(eps=config.eps, layout=PageLayout.SECTIONED, tap=RecordTap.NONE)
    norm_rope_store(
        index_pow, key_yl, weights.own("index_norm"), table_sr, first_y, slot_y1[:, 0], store=store, num=num
    )


def csa2_select(
    x_tm: Tensor,
    latent_ta: Tensor,
    weights: Csa2Weights,
    caches: Csa2Caches,
    step: Csa2Step,
    blocks_tk: Tensor | None,
    *,
    layer: int,
    config: Csa2Config,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor | None]:
    """Stage 2 of a FULL or REINDEX layer: the picked entries of every query, and the candidates for later layers.

    Shapes:
        x_tm, latent_ta: as `csa2_project`; blocks_tk: candidates of the source, read by its consumers; returns int32
        [t, index_topk], ascending, -1 behind; and blocks_tk, or new ones if this layer is their source.

    Raises:
        ValueError: shapes disagree; the layer owns no indexer.

    Source:
        v41-attention.md section 4
    """
    map_, table_sr = config.topology, caches.table(config, layer)
    length_t = index_visible(step.positions_t, ratio=map_.ratios[layer])
    q_tk = lin8(latent_ta, weights.own("index_wq_q"), weights.own("index_wq_sf"), num=num)
    q_thw = index_queries(q_tk.unflatten(1, (map_.index_heads, map_.index_dim)), table_sr, step.positions_t, num=num)
    w_th = index_weights(x_tm, weights.own("index_head_hm"), scale=(map_.index_heads * map_.index_dim) ** -0.5, num=num)
    key_pow = caches.records(config, "index", map_.kv_source(layer))
    within_tk = blocks_tk if map_.reads_candidates(layer) else None
    size, table_tp = map_.candidate_size, step.table_bp[step.seq_t.long()]
    scores_ts = index_scores_paged(
        q_thw, key_pow, w_th, table_tp, length_t, within_tk, block_size=size, order=config.score_order, num=num
    )
    if within_tk is not None:
        compact_t = compact_lengths(within_tk, length_t, block_size=size)
        idx_tk = topk(scores_ts, compact_t, k=map_.index_topk)
        return restore_indices(idx_tk, within_tk, block_size=size), blocks_tk
    if layer == map_.candidate_source:
        blocks_tk = candidate_blocks(scores_ts, length_t, block_size=size, k=map_.candidate_blocks)
    return topk(scores_ts, length_t, k=map_.index_topk), blocks_tk


def csa2_attend_(
    q_thd: Tensor,
    key_td: Tensor,
    sink_h: Tensor,
    idx_tk: Tensor | None,
    caches: Csa2Caches,
    step: Csa2Step,
    *,
    layer: int,
    config: Csa2Config,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Stage 3: store the window keys in the layer's ring, in place, and attend to window and picked entries.

    Shapes:
        q_thd, key_td: as `csa2_project`; idx_tk: as `csa2_select`, None for a layer of ratio 0; returns out_thd.

    Rounding:
        as `two_cache_attn`: to bf16, or to fp32 for CastPoints.FUSED.

    Raises:
        ValueError: shapes disagree.

    Source:
        v41-attention.md sections 5, 6
    """
    decoder = layer >= config.topology.boundary and config.topology.ratios[layer] > 0
    window, ring_pow = config.sliding(decoder=decoder), caches.records(config, "ring", layer)
    store_t = ring_slots(step.positions_t, step.seq_t, step.end_b, step.known_b, step.state_b, config=window)
    where = {"caches": TwoCaches(window=KV_FP8, main=config.main, layout=config.layout, scale=config.head_dim**-0.5)}
    main_pow, slot_tk = _main_entries(idx_tk, caches, step, layer, config)
    dtype = torch.float32 if config.cast is CastPoints.FUSED else torch.bfloat16
    if step.decode:
        store_records(ring_pow, key_td, store_t, layout=config.layout, num=num)
        seen_tk = window_decode(step.positions_t, step.seq_t, step.state_b, step.valid_b, config=window)
        out_thd, _ = two_cache_attn_decode(
            q_thd, ring_pow, seen_tk, main_pow, slot_tk, sink_h, dtype=dtype, num=num, **where
        )
        return out_thd
    # the history is read before the chunk overwrites it
    past_b = history_slots(step.first_b, step.state_b, step.valid_b, config=window)
    past_sd = load_records(ring_pow, past_b.flatten(), layout=config.layout, num=num)
    store_records(ring_pow, key_td, store_t, layout=config.layout, num=num)
    # by way of the bytes: decode will read these values, whatever the numerics
    rows_td = unpack_records(pack_records(key_td, fmt=KV_FP8, num=num), num=num)
    window_sd = torch.cat([past_sd, rows_td])
    seen_tk = window_prefill(
        step.positions_t, step.seq_t, step.first_b, step.offset_b, step.known_b, step.valid_b, config=window
    )
    out_thd, _ = two_cache_attn(q_thd, window_sd, seen_tk, main_pow, slot_tk, sink_h, dtype=dtype, num=num, **where)
    return out_thd


def _pooled(
    x_tm: Tensor,
    weights: Csa2Weights,
    caches: Csa2Caches,
    step: Csa2Step,
    layer: int,
    config: Csa2Config,
    num: Numerics,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled entries, their numbers, and their sequences."""
    value_tw, gate_tw = compress_project(x_tm, weights.own("entry_value_dm"), weights.entry_gate_dm, num=num)
    cu = step.cu_seqlens
    if gate_tw is None:
        pooled_yd, entry_y = compress(value_tw, None, None, step.first_b, cu, config=C1, num=num)
        return pooled_yd, entry_y, compress_rows(step.first_b, cu, ratio=1)[1]
    state = caches.compressor(config, layer)
    if step.decode:
        slot_t = step.state_b[step.seq_t.long()]
        pooled_yd, entry_y = compress_decode(
            value_tw, gate_tw, None, state, slot_t, step.positions_t, config=C2, num=num
        )
        return pooled_yd, entry_y, step.seq_t
    pooled_yd, entry_y = compress_prefill(
        value_tw, gate_tw, None, state, step.state_b, step.first_b, cu, config=C2, num=num
    )
    return pooled_yd, entry_y, compress_rows(step.first_b, cu, ratio=C2.ratio)[1]


def _main_entries(
    idx_tk: Tensor | None, caches: Csa2Caches, step: Csa2Step, layer: int, config: Csa2Config
) -> tuple[Tensor, Tensor]:
    """The main cache that a layer reads, and the slots of its picked entries."""
    if idx_tk is None:
        empty_pow = caches.page_pq.new_zeros(0, 1, config.main.record_bytes)
        return empty_pow, torch.zeros(len(step.positions_t), 0, dtype=torch.int32, device=empty_pow.device)
    entries = config.page_tokens // config.topology.ratios[layer]
    slot_tk = physical_slots(idx_tk, step.table_bp[step.seq_t.long()], page_entries=entries)
    return caches.records(config, "main", config.topology.kv_source(layer)), slot_tk


def lin8(x_tm: Tensor, w_q: Tensor, w_sf: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """The product of rows, quantised to Q8, and e4m3 weights, in bf16."""
    return linear_quant(x_tm, w_q, w_sf, x_fmt=Q8, w_fmt=FP8_32X32, num=num)


def layer_norm(x_tm: Tensor, weight_m: Tensor, config: Csa2Config, *, num: Numerics = CONTRACT) -> Tensor:
    """RMSNorm as every norm of the text model does it: one rounding, behind the weight."""
    return rms_norm(x_tm, weight_m, eps=config.eps, cast=WeightCast.AFTER_WEIGHT, num=num)


def rotated(
    x_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    inverse: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """The last channels of every head turned by the angles of its position."""
    pairing, span = Pairing.INTERLEAVED, RopeSpan.LAST
    return rope(x_thd, table_sr, positions_t, pairing=pairing, span=span, inverse=inverse, dtype=dtype, num=num)
