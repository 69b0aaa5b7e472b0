"""Wrong variants of HCA and of sliding layers: whole sequences, and steps with spoiled state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from deeptwin.reference.config import V4AttnConfig
from deeptwin.reference.csa2_state import Csa2Batch
from deeptwin.reference.hca import hca_run, sliding_run
from deeptwin.reference.v4_state import V4Caches
from deeptwin.reference.v4_weights import V4Weights

from .v4_layers import Faults, packed, whole

RIGHT = Faults()


def _whole(faults: Faults) -> Callable[..., Tensor]:
    attention = whole(faults)

    def hca_attention(
        x_tm: Tensor, weights: V4Weights, table_sr: Tensor, cu_seqlens: Tensor, *, config: V4AttnConfig
    ) -> Tensor:
        return attention(x_tm, weights, table_sr, cu_seqlens, config=config)

    return hca_attention


right_whole = _whole(RIGHT)
plain_base = _whole(replace(RIGHT, base="plain"))
window_plain_base = _whole(replace(RIGHT, base="window_plain"))
output_kept_turned = _whole(replace(RIGHT, output_turn="none"))
head_norm_missing = _whole(replace(RIGHT, head_norm="none"))
key_tail_quantised = _whole(replace(RIGHT, key="tail_too"))
entry_rounds_to_bf16 = _whole(replace(RIGHT, entry="bf16"))
sink_scaled = _whole(replace(RIGHT, sink="scaled"))
sink_ignored = _whole(replace(RIGHT, sink="ignored"))
window_one_short = _whole(replace(RIGHT, window=-1))
window_one_long = _whole(replace(RIGHT, window=1))
two_softmaxes = _whole(replace(RIGHT, softmax="two"))
duplicates_dropped = _whole(replace(RIGHT, duplicates="dropped"))
bias_missing = _whole(replace(RIGHT, bias="none"))
bias_one_place_on = _whole(replace(RIGHT, bias="shifted"))
one_softmax_for_all_channels = _whole(replace(RIGHT, weights="shared"))
mean_instead_of_softmax = _whole(replace(RIGHT, weights="mean"))
entry_at_its_last_token = _whole(replace(RIGHT, position="last"))
entry_at_its_centre = _whole(replace(RIGHT, position="centre"))
entry_at_its_number = _whole(replace(RIGHT, position="index"))
entry_visible_early = _whole(replace(RIGHT, visible="one_early"))
entry_visible_late = _whole(replace(RIGHT, visible="one_late"))
every_entry_visible = _whole(replace(RIGHT, visible="all"))
key_rounds_to_bf16 = _whole(replace(RIGHT, key="bf16"))
half_split_pairs = _whole(replace(RIGHT, pairs="half_split"))
groups_interleaved = _whole(replace(RIGHT, groups="interleaved"))


def _steps(batch: Csa2Batch) -> tuple[list[int], list[Tensor]]:
    lengths = batch.counts_kb.sum(0).tolist()
    order = torch.arange(len(batch.counts_kb))
    return lengths, [order.repeat_interleave(batch.counts_kb[:, b].long()) for b in range(len(lengths))]


def _run(faults: Faults, spoil: str = "") -> Callable[..., tuple[Tensor, ...]]:
    def hca_run_emulated(
        x_tm: Tensor, weights: V4Weights, table_sr: Tensor, caches: V4Caches, batch: Csa2Batch, *, config: V4AttnConfig
    ) -> tuple[Tensor, ...]:
        _, ring, main, pool = hca_run(x_tm, weights, table_sr, caches, batch, config=config)
        if spoil == "entries" and caches.main_pow is not None:
            main[:] = caches.main_pow
        if spoil == "pool":
            pool = pool.roll(1, 1)
        if spoil == "logits":
            pool = pool.flip(2)
        y = packed(faults, x_tm, weights, table_sr, *_steps(batch), None, config)
        return y, ring, main, pool

    return hca_run_emulated


right_run = _run(RIGHT)
run_history_lost = _run(replace(RIGHT, chunk="history_lost"))
run_group_split = _run(replace(RIGHT, chunk="group_split"))
run_entry_visible_early = _run(replace(RIGHT, visible="one_early"))
run_entries_never_stored = _run(RIGHT, "entries")
run_pool_one_row_on = _run(RIGHT, "pool")
run_logits_and_values_exchanged = _run(RIGHT, "logits")


def _sliding(faults: Faults, spoil: str = "") -> Callable[..., tuple[Tensor, ...]]:
    def sliding_run_emulated(
        x_tm: Tensor, weights: V4Weights, table_sr: Tensor, caches: V4Caches, batch: Csa2Batch, *, config: V4AttnConfig
    ) -> tuple[Tensor, ...]:
        _, ring = sliding_run(x_tm, weights, table_sr, caches, batch, config=config)
        if spoil == "lost":
            ring[:] = caches.ring_pow
        return packed(faults, x_tm, weights, table_sr, *_steps(batch), None, config), ring

    return sliding_run_emulated


right_sliding_run = _sliding(RIGHT)
sliding_history_lost = _sliding(replace(RIGHT, chunk="history_lost"))
sliding_window_one_long = _sliding(replace(RIGHT, window=1))
sliding_keys_never_stored = _sliding(RIGHT, "lost")


def compressed_table(
    x_tm: Tensor, weights: V4Weights, table_sr: Tensor, cu_seqlens: Tensor, *, config: V4AttnConfig
) -> Tensor:
    """The base of compressed layers, with YaRN, in a sliding layer."""
    i = torch.arange(0, 64, 2).float() / 64
    frequency = 1.0 / 160000.0**i
    ramp = ((torch.arange(32).float() - 15) / 10).clamp(0, 1)
    frequency = frequency / 16 * ramp + frequency * (1 - ramp)
    angle = torch.arange(len(table_sr)).float()[:, None] * frequency
    table = torch.cat([angle.double().cos(), angle.double().sin()], 1).float()
    return right_whole(x_tm, weights, table, cu_seqlens, config=config)
