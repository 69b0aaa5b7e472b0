"""Window keys and main entries in one softmax, in place in the ring: how the layers of V4 and of V4.1 attend.

Norm, RoPE, quantiser and store of the step's window keys are one launch. A chunk reads its history before it overwrites
it and attends over rows; a decode step attends over the ring itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deeptwin.reference.config import FusedStore, RecordTap, SlidingWindow, TwoCaches
from deeptwin.reference.csa2_state import Csa2Step

from .kv_cache import load_records_triton, norm_rope_store_triton
from .sparse_attn import two_cache_attn_decode_triton, two_cache_attn_triton
from .window import history_slots_triton, ring_slots_triton, window_decode_triton, window_prefill_triton


@dataclass(frozen=True, kw_only=True)
class WindowLayer:
    """What a layer brings beside its rows: `norm_d` and `eps` of its keys, `dtype` of its heads."""

    norm_d: Tensor
    sink_h: Tensor
    table_sr: Tensor
    window: SlidingWindow
    caches: TwoCaches
    eps: float
    dtype: torch.dtype


def attend_(
    q_thd: Tensor,
    down_td: Tensor,
    ring_pow_: Tensor,
    main_pow: Tensor,
    slot_tk: Tensor,
    step: Csa2Step,
    *,
    layer: WindowLayer,
) -> Tensor:
    """The heads [t, h, d] of a step; `down_td` are its keys before their norm, `slot_tk` the entries a token sees."""
    window, caches = layer.window, layer.caches
    past_sd = None
    if not step.decode:
        past_b = history_slots_triton(step.first_b, step.state_b, step.valid_b, config=window)
        past_sd = load_records_triton(ring_pow_, past_b.flatten(), layout=caches.layout)
    store_t = ring_slots_triton(step.positions_t, step.seq_t, step.end_b, step.known_b, step.state_b, config=window)
    tap = RecordTap.NONE if step.decode else RecordTap.CAST_BACK
    store = FusedStore(eps=layer.eps, layout=caches.layout, tap=tap, fmt=caches.window)
    _, rows_td = norm_rope_store_triton(
        ring_pow_, down_td, layer.norm_d, layer.table_sr, step.positions_t, store_t, store=store
    )
    entries = (main_pow, slot_tk, layer.sink_h)
    if past_sd is None:
        seen_tk = window_decode_triton(step.positions_t, step.seq_t, step.state_b, step.valid_b, config=window)
        heads = two_cache_attn_decode_triton(q_thd, ring_pow_, seen_tk, *entries, caches=caches, dtype=layer.dtype)
    else:
        seen_tk = window_prefill_triton(
            step.positions_t, step.seq_t, step.first_b, step.offset_b, step.known_b, step.valid_b, config=window
        )
        rows_sd = torch.cat([past_sd, rows_td])
        heads = two_cache_attn_triton(q_thd, rows_sd, seen_tk, *entries, caches=caches, dtype=layer.dtype)
    return heads[0]
