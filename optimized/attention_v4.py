"""One step of an attention layer of V4 on the fast kernels, in place in its caches.

Keys, entries and index keys are records whatever the form; the contract is `csa_step_` and `hca_step_` of the
reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_shape
from deeptwin.reference.config import (
    FP8_1X128_UE8M0,
    OutputCast,
    PageLayout,
    TwoCaches,
    V4AttnConfig,
    V4Kind,
)
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.v4_state import V4Caches
from deeptwin.reference.v4_weights import CompressorWeights, V4Weights, owned

from .attention_window import WindowLayer, attend_
from .compressor import compress_decode_triton, compress_prefill_triton, compress_tail_triton
from .csa import _require_fp4, csa_select_triton, head_norm_rope_triton, v4_output_triton
from .hadamard import hadamard_triton
from .kv_cache import store_records_triton
from .linear import linear_triton
from .products_v4 import layer_norm, product, product_of_codes
from .quant import quantize_triton
from .topk import physical_slots_triton

SECTIONED = PageLayout.SECTIONED


def csa_step_triton_(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    step: Csa2Step,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
) -> Tensor:
    """One step of a layer of kind CSA, in place in the caches.

    Raises:
        ValueError: shapes disagree; caches or weights lack a part.
        NotImplementedError: index keys are not FP4, or there is no quantised cache.
    """
    _require_fp4(config)
    q_thd, down_td, latent_ta = _projected(x_tm, weights, table_sr, step.positions_t, config)
    main_pow, index_pow = owned(caches.main_pow, "caches"), owned(caches.index_pow, "caches")
    _store_entries(x_tm, weights, caches, table_sr, step, config)
    index_yd, slot_y = _step_entries(
        x_tm,
        owned(weights.index_entry, "index_entry"),
        owned(caches.index_pool, "caches"),
        table_sr,
        step,
        config,
    )
    store_records_triton(index_pow, hadamard_triton(index_yd), slot_y, layout=SECTIONED)
    table_tp = step.table_bp[step.seq_t.long()].contiguous()
    if picks_tk is None:
        picks_tk = csa_select_triton(
            x_tm, latent_ta, weights, table_sr, step.positions_t, index_pow, table_tp, config=config
        )
    slot_tk = physical_slots_triton(picks_tk, table_tp, page_entries=config.page_entries)
    out_thd = _attend(q_thd, down_td, weights, main_pow, slot_tk, caches.ring_pow, table_sr, step, config)
    return v4_output_triton(out_thd, weights, table_sr, step.positions_t, config=config)


def hca_step_triton_(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, caches: V4Caches, step: Csa2Step, *, config: V4AttnConfig
) -> Tensor:
    """One step of a layer of kind HCA or SLIDING, in place in the caches.

    Raises:
        ValueError: shapes disagree; caches or weights lack a part.
        NotImplementedError: there is no quantised cache.
    """
    q_thd, down_td, _ = _projected(x_tm, weights, table_sr, step.positions_t, config)
    main_pow = caches.ring_pow[:0]
    slot_tk = torch.zeros(len(x_tm), 0, dtype=torch.int32, device=x_tm.device)
    if config.kind is V4Kind.HCA:
        main_pow = owned(caches.main_pow, "caches")
        _store_entries(x_tm, weights, caches, table_sr, step, config)
        slot_tk = _visible_slots(step, config)
    out_thd = _attend(q_thd, down_td, weights, main_pow, slot_tk, caches.ring_pow, table_sr, step, config)
    return v4_output_triton(out_thd, weights, table_sr, step.positions_t, config=config)


def _visible_slots(step: Csa2Step, config: V4AttnConfig) -> Tensor:
    """The slots of all entries that every token sees, -1 behind; as long as the fullest sequence needs."""
    most = int(step.end_b.max()) // config.ratio
    entry_j = torch.arange(most, dtype=torch.int32, device=step.positions_t.device)
    visible_t1 = ((step.positions_t + 1) // config.ratio)[:, None]
    entry_tj = torch.where(entry_j < visible_t1, entry_j, -1).to(torch.int32)
    return physical_slots_triton(
        entry_tj, step.table_bp[step.seq_t.long()].contiguous(), page_entries=config.page_entries
    )


def _projected(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, positions_t: Tensor, config: V4AttnConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads, the key before its norm, the query latent."""
    expect_shape("x_tm", x_tm, "tm", {"t": len(positions_t), "m": config.hidden})
    if weights.wq_a_sf is None or weights.wkv_sf is None:
        down_ta, down_td = linear_triton(x_tm, weights.wq_a), linear_triton(x_tm, weights.wkv)
    else:  # the rows are quantised once for both products
        x_q, x_sf = quantize_triton(x_tm, fmt=FP8_1X128_UE8M0)
        down_ta = product_of_codes(x_q, x_sf, weights.wq_a, weights.wq_a_sf)
        down_td = product_of_codes(x_q, x_sf, weights.wkv, weights.wkv_sf)
    latent_ta = layer_norm(down_ta, weights.q_norm_a, config)
    q_thd = product(latent_ta, weights.wq_b, weights.wq_b_sf).unflatten(1, (config.num_heads, config.head_dim))
    q_thd = head_norm_rope_triton(q_thd, table_sr, positions_t, cast=config.head_norm, eps=config.eps)
    return q_thd, down_td, latent_ta


def _store_entries(
    x_tm: Tensor, weights: V4Weights, caches: V4Caches, table_sr: Tensor, step: Csa2Step, config: V4AttnConfig
) -> None:
    """The entries that a step completes, into the pages of the main cache."""
    entry, pool_ = owned(weights.entry, "entry"), owned(caches.pool, "caches")
    entry_yd, slot_y = _step_entries(x_tm, entry, pool_, table_sr, step, config)
    store_records_triton(owned(caches.main_pow, "caches"), entry_yd, slot_y, layout=SECTIONED, fmt=config.cache)


def _step_entries(
    x_tm: Tensor, weights: CompressorWeights, pool_: Tensor, table_sr: Tensor, step: Csa2Step, config: V4AttnConfig
) -> tuple[Tensor, Tensor]:
    """The rotated entries that a step completes, and their slots; advances the pool."""
    value_tw = linear_triton(x_tm, weights.value_wm, dtype=torch.float32)
    gate_tw = linear_triton(x_tm, weights.gate_wm, dtype=torch.float32)
    pooling, bias_rw = config.compressor, weights.bias_rw
    if step.decode:
        slot_t, seq_y = step.state_b[step.seq_t.long()], step.seq_t
        pooled_yd, entry_y = compress_decode_triton(
            value_tw, gate_tw, bias_rw, pool_, slot_t, step.positions_t, config=pooling
        )
    else:
        pooled_yd, entry_y = compress_prefill_triton(
            value_tw, gate_tw, bias_rw, pool_, step.state_b, step.first_b, step.cu_seqlens, config=pooling
        )
        rows_b = (step.end_b // config.ratio - step.first_b // config.ratio).clamp(min=1).long()
        seq_y = torch.arange(len(rows_b), device=rows_b.device).repeat_interleave(rows_b)
    _, entry_yd = compress_tail_triton(pooled_yd, weights.norm_c, table_sr, entry_y, ratio=config.ratio, eps=config.eps)
    table_yp = step.table_bp[seq_y.long()].contiguous()
    slot_y1 = physical_slots_triton(entry_y[:, None].contiguous(), table_yp, page_entries=config.page_entries)
    return entry_yd, slot_y1[:, 0]


def _attend(
    q_thd: Tensor,
    down_td: Tensor,
    weights: V4Weights,
    main_pow: Tensor,
    slot_tk: Tensor,
    ring_pow_: Tensor,
    table_sr: Tensor,
    step: Csa2Step,
    config: V4AttnConfig,
) -> Tensor:
    """The heads of a step over window and entries."""
    fmt = config.cache
    if fmt is None:
        raise NotImplementedError("config: expected a quantised cache, got None")
    layer = WindowLayer(
        norm_d=weights.kv_norm_d,
        sink_h=weights.sink_h,
        table_sr=table_sr,
        window=config.sliding,
        caches=TwoCaches(window=fmt, main=fmt, layout=SECTIONED, scale=config.head_dim**-0.5),
        eps=config.eps,
        dtype=torch.float32 if config.output is OutputCast.FUSED else torch.bfloat16,
    )
    return attend_(q_thd, down_td, ring_pow_, main_pow, slot_tk, step, layer=layer)
