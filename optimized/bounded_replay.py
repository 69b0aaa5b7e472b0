"""Bounded replay, fast: all rows of a chunk at once, and prompts by way of rings, chunks and dropped rows.

Values are not inspected: an ill-formed chunk gives ill-formed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape
from deeptwin.reference.config import SlidingWindow, Truncation

MODULUS = 2**31 - 1


def replay_plan_vectorised(
    first_b: Tensor, end_b: Tensor, known_b: Tensor, valid_b: Tensor, *, config: SlidingWindow
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.bounded_replay.replay_plan`.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree.
    """
    _check("b", first_b=first_b, end_b=end_b, known_b=known_b, valid_b=valid_b)
    p_t, seq_t = _rows(first_b, end_b)
    first_t, end_t, known_t, valid_t = (x.long()[seq_t] for x in (first_b, end_b, known_b, valid_b))
    encoder_t = torch.maximum(p_t - config.window + 1, valid_t).clamp(min=0)
    cut_t = torch.zeros_like(p_t) if config.truncation is Truncation.OFF else known_t - config.keep
    decoder_t = torch.minimum(torch.maximum(encoder_t, cut_t), p_t + 1)
    low_tj = torch.stack([encoder_t, decoder_t], 1)
    below_t = p_t < cut_t
    dropped_t = below_t & (config.truncation is Truncation.COMPACT)
    computed_t = ~dropped_t | (p_t == end_t - 1)
    stored_t = (end_t - p_t <= config.ring) & ~dropped_t
    history_tj = (first_t[:, None] - low_tj).clamp(min=0)
    flags_tj = torch.stack([computed_t, ~below_t, stored_t], 1)
    return low_tj.to(torch.int32), history_tj.to(torch.int32), flags_tj


def exact_layers_vectorised(
    positions_t: Tensor, seq_t: Tensor, known_b: Tensor, *, config: SlidingWindow, layers: int
) -> Tensor:
    """`reference.bounded_replay.exact_layers`, in closed form: a layer costs W - 1 rows behind the cut.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; layers is not positive.
    """
    expect_positive("layers", layers)
    _check("t", positions_t=positions_t, seq_t=seq_t)
    _check("b", known_b=known_b)
    cut_t = known_b.long()[seq_t.long()] - config.keep
    behind_t = positions_t.long() - cut_t
    step = config.window - 1
    count_t = behind_t.div(step, rounding_mode="floor").clamp(0, layers) if step else layers * (behind_t >= 0).long()
    whole_t = (cut_t <= 0) | (config.truncation is Truncation.OFF)
    return torch.where(whole_t, layers, count_t).to(torch.int32)


def ring_load_plan_vectorised(first_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow) -> Tensor:
    """`reference.bounded_replay.ring_load_plan`: zeros, then a run up to the ring's end, then one from its start.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree.
    """
    _check("b", first_b=first_b, state_b=state_b, valid_b=valid_b)
    first_b, state_b, window, ring = first_b.long(), state_b.long(), config.window, config.ring
    empty_b = (valid_b.long().clamp(min=0) - first_b + window).clamp(0, window)
    count_b = window - empty_b
    slot_b = (first_b - count_b) % ring
    run_b = torch.minimum(count_b, ring - slot_b)
    base_b = torch.arange(len(first_b), device=first_b.device) * window
    none_b = torch.full_like(first_b, -1)
    zero_b = torch.zeros_like(first_b)
    rows = (
        (none_b, zero_b, empty_b, base_b),
        (state_b, slot_b, slot_b + run_b, base_b + empty_b),
        (state_b, zero_b, count_b - run_b, base_b + empty_b + run_b),
    )
    plan_bij = torch.stack([torch.stack(row, 1) for row in rows], 1)
    used_bi = plan_bij[..., 2] > plan_bij[..., 1]
    blank_bij = torch.stack((none_b, zero_b, zero_b, base_b + window), 1)[:, None].expand(-1, 3, -1)
    order_bi = torch.argsort((~used_bi).to(torch.int8), dim=1, stable=True)
    packed_bij = torch.where(used_bi[..., None], plan_bij, blank_bij)
    return packed_bij.gather(1, order_bi[..., None].expand(-1, -1, 4)).to(torch.int32)


def replay_prefill_vectorised(
    hidden_t: Tensor,
    global_b: Tensor,
    first_b: Tensor,
    counts_kb: Tensor,
    *,
    config: SlidingWindow,
    layers: int,
) -> tuple[Tensor, Tensor]:
    """`reference.bounded_replay.replay_prefill`, as an engine does it: chunk by chunk, from rings and kept rows only.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; layers is not positive; the steps do not add up to t.
    """
    expect_positive("layers", layers)
    _check("t", hidden_t=hidden_t)
    _check("b", global_b=global_b, first_b=first_b)
    expect_shape("counts_kb", counts_kb, "kb", {"b": len(first_b)})
    total_b = counts_kb.sum(0)
    if int(total_b.sum()) != len(hidden_t):
        raise ValueError(f"counts_kb: expected steps of {len(hidden_t)} tokens in all, got {counts_kb.tolist()}")
    known_b, base_b = first_b + total_b, total_b.cumsum(0) - total_b
    out_tl = torch.full((len(hidden_t), layers), -1, dtype=torch.int64)
    # what a ring held before is somebody else's
    ring_bls = torch.full((len(first_b), layers, config.ring), MODULUS - 1, dtype=torch.int64)
    begin_b, sum_b = first_b.long(), global_b.long()
    for count_b in counts_kb.long():
        live_b = count_b.nonzero()[:, 0]
        end_b = begin_b + count_b
        p_t, seq_t = _rows(begin_b[live_b], end_b[live_b])
        row_t = (base_b - first_b)[live_b][seq_t] + p_t
        totals_t = _running_sums(p_t, seq_t, hidden_t[row_t], sum_b[live_b])
        sum_b = sum_b.index_put((live_b,), totals_t[count_b[live_b].cumsum(0) - 1])
        where = (begin_b[live_b], end_b[live_b], known_b[live_b], first_b[live_b])
        x_y, kept_t, flags_tj = _decode_chunk(hidden_t[row_t], totals_t, ring_bls, live_b, where, config, layers)
        good_y = flags_tj[kept_t, 1]
        out_tl[row_t[kept_t][good_y]] = x_y[good_y]
        begin_b = end_b
    slot_bs = torch.arange(config.ring).expand(len(first_b), -1)
    held_bs = known_b[:, None] - 1 - (known_b[:, None] - 1 - slot_bs) % config.ring
    return out_tl, ring_bls.where((held_bs >= first_b[:, None])[:, None], -1)


def _decode_chunk(
    hidden_t: Tensor,
    totals_t: Tensor,
    ring_bls: Tensor,
    live_b: Tensor,
    where: tuple[Tensor, ...],
    config: SlidingWindow,
    layers: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """All decoder layers on the kept rows of a chunk: outputs [y, l], which rows they are, and the flags of all."""
    begin_b, end_b, known_b, valid_b = where
    low_tj, _, flags_tj = replay_plan_vectorised(begin_b, end_b, known_b, valid_b, config=config)
    kept_t = flags_tj[:, 0].nonzero()[:, 0]
    p_t, seq_t = _rows(begin_b, end_b)
    p_y, seq_y = p_t[kept_t], seq_t[kept_t]
    load_bij = ring_load_plan_vectorised(begin_b, live_b, valid_b, config=config)
    count_b = torch.bincount(seq_y, minlength=len(live_b))
    # rows of [histories | kept rows of the chunk]: position j stands at offset + j
    history_b = torch.arange(len(live_b)) * config.window + config.window - begin_b
    chunk_b = len(live_b) * config.window + count_b.cumsum(0) - end_b
    seen_yk = low_tj[kept_t, 1:] + torch.arange(config.window)
    is_key_yk = seen_yk <= p_y[:, None]
    at_yk = torch.where(seen_yk < begin_b[seq_y][:, None], history_b[seq_y][:, None], chunk_b[seq_y][:, None]) + seen_yk
    at_yk = torch.where(is_key_yk, at_yk, 0)
    stored_y = flags_tj[kept_t, 2]
    slot_y, owner_y = p_y % config.ring, live_b[seq_y]
    x_y, out = hidden_t[kept_t], []
    for layer in range(layers):
        rows = torch.cat([_load(ring_bls[:, layer], load_bij, config), x_y])
        ring_bls[owner_y[stored_y], layer, slot_y[stored_y]] = x_y[stored_y]
        folded_y = torch.ones_like(x_y)
        for k in range(config.window):
            folded_y = torch.where(is_key_yk[:, k], (folded_y * 48271 + rows[at_yk[:, k]]) % MODULUS, folded_y)
        own_y, total_y = 69621 * x_y % MODULUS, 16807 * totals_t[kept_t] % MODULUS
        x_y = (own_y + 40014 * folded_y % MODULUS + total_y + layer + 1) % MODULUS
        out.append(x_y)
    return torch.stack(out, 1), kept_t, flags_tj


def _load(ring_bs: Tensor, load_bij: Tensor, config: SlidingWindow) -> Tensor:
    """The history rows of a chunk, one block copy after the other."""
    rows = torch.full((len(load_bij) * config.window,), MODULUS - 1, dtype=torch.int64)
    for source, begin, end, row in load_bij.flatten(0, 1).tolist():
        rows[row : row + end - begin] = ring_bs[source, begin:end] if source >= 0 else 0
    return rows


def _running_sums(p_t: Tensor, seq_t: Tensor, x_t: Tensor, sum_b: Tensor) -> Tensor:
    """The weighted sums of each sequence up to every row."""
    terms_t = (2 * p_t + 3) * x_t % MODULUS
    running_t = terms_t.cumsum(0)
    first_t = torch.searchsorted(seq_t, seq_t)  # where each row's sequence begins
    before_t = running_t[first_t] - terms_t[first_t]
    return (running_t - before_t + sum_b[seq_t]) % MODULUS


def _rows(first_b: Tensor, end_b: Tensor) -> tuple[Tensor, Tensor]:
    """Position and sequence of every row of packed chunks."""
    count_b = end_b.long() - first_b.long()
    seq_t = torch.arange(len(count_b), device=count_b.device).repeat_interleave(count_b)
    start_b = count_b.cumsum(0) - count_b
    return torch.arange(len(seq_t), device=count_b.device) - (start_b - first_b.long())[seq_t], seq_t


def _check(letter: str, **tensors: Tensor) -> None:
    dims: dict[str, int] = {}
    for name, x in tensors.items():
        expect_shape(name, x, letter, dims)
        expect_dtype(name, x, torch.int32, torch.int64)
