"""Pooling of groups of tokens into compressed entries, with the state that a group needs across chunks.

Entry j of a sequence is made of tokens r j … r j + r - 1 and exists once the last of them has been processed. Every
channel has its own softmax over the tokens of the group. With overlap (V4, r = 4) a token has two series of channels:
its first one is pooled into the next entry, its second one into its own, in one softmax.

Everything is packed: the tokens of a sequence stand side by side in ascending order. The state of a sequence is a ring
of fp32 rows, [slots, ring, 2, w]: 0 holds the logits (gate plus bias), 1 the values; token p lies at p mod ring. A
rejected token is run again at its position: it overwrites its ring row and any entry made of it.

Letters beside the project's: w is the width of gate and value rows, c or 2 c with overlap; y counts output rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import (
    expect_chunk,
    expect_dtype,
    expect_pooling_state,
    expect_positive,
    expect_rows_to_pool,
    expect_shape,
    expect_slots,
    expect_step,
)
from .config import CompressorConfig, Pairing, RopeSpan, WeightCast
from .numerics import CONTRACT, Numerics
from .rms_norm import rms_norm
from .rope import rope


def compress_project(
    x_tm: Tensor, w_value_wm: Tensor, w_gate_wm: Tensor | None, *, num: Numerics = CONTRACT
) -> tuple[Tensor, Tensor | None]:
    """Value and gate rows of the layer's normalised input; no gate for ratio 1.

    Rounding:
        one, to fp32 (for ratio 1 the release rounds to bf16, which `compress` does: the same number).

    Raises:
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    expect_shape("x_tm", x_tm, "tm", dims)
    expect_shape("w_value_wm", w_value_wm, "wm", dims)
    value_tw = num.f32(num.einsum("tm,wm->tw", num.wide(x_tm), num.wide(w_value_wm)))
    if w_gate_wm is None:
        return value_tw, None
    expect_shape("w_gate_wm", w_gate_wm, "wm", dims)
    return value_tw, num.f32(num.einsum("tm,wm->tw", num.wide(x_tm), num.wide(w_gate_wm)))


def compress_rows(start_b: Tensor, cu_seqlens: Tensor, *, ratio: int) -> tuple[Tensor, Tensor]:
    """Which entry every output row of a chunk is, and of which sequence.

    Math:
        sequence b completes entries floor(start / r) … floor((start + length) / r) - 1, and has one row -1 if none

    Shapes:
        start_b: integer [b], first positions; cu_seqlens: integer [b + 1]; returns entry_y and seq_y, int32 [y].

    Raises:
        TypeError: start_b or cu_seqlens are no integers.
        ValueError: shapes disagree; cu_seqlens is malformed; a start is negative; ratio is not positive.
    """
    expect_positive("ratio", ratio)
    expect_chunk(start_b, cu_seqlens, None)
    start_b, length_b = start_b.long(), cu_seqlens.long().diff()
    first_b = start_b // ratio
    made_b = (start_b + length_b) // ratio - first_b
    rows_b = made_b.clamp(min=1)
    seq_y = torch.arange(len(start_b), device=start_b.device).repeat_interleave(rows_b)
    local_y = torch.arange(len(seq_y), device=start_b.device) - (rows_b.cumsum(0) - rows_b)[seq_y]
    entry_y = torch.where(local_y < made_b[seq_y], first_b[seq_y] + local_y, -1)
    return entry_y.to(torch.int32), seq_y.to(torch.int32)


def compress(
    value_tw: Tensor,
    gate_tw: Tensor | None,
    bias_rw: Tensor | None,
    start_b: Tensor,
    cu_seqlens: Tensor,
    *,
    config: CompressorConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Entries of chunks that begin at a group boundary: nothing is carried over.

    Math:
        z[t] = gate[t] + bias[p(t) mod r]; a = softmax over the tokens of the group of z, per channel
        m[j] = sum_t a[t] value[t]; overlap: the group before through channels :c, its own through c:

    Shapes:
        value_tw, gate_tw: [t, w], no gate for ratio 1; bias_rw: [r, w] or None; rows as `compress_rows` says;
        returns m_yc [y, c] and entry_y int32 [y].

    Rounding:
        gate plus bias to fp32; row sums of the softmax and the weighted sum as contractions; m to bf16.

    Edges:
        tokens of an unfinished group are in no entry. A row without an entry is zero with entry -1, whatever the
        tokens hold. Entry 0 has no group before it: value 0, weight exactly 0.

    Raises:
        TypeError: a tensor has a wrong dtype.
        ValueError: shapes disagree; the gate is missing for a ratio above 1; chunk bounds are malformed; a start is no
            multiple of the ratio, or not 0 with overlap.

    Source:
        v41-attention.md sections 3.1, 3.2, v3-v32-v4.md sections 5.2, 5.4
    """
    width = expect_rows_to_pool(value_tw, gate_tw, bias_rw, config)
    expect_chunk(start_b, cu_seqlens, len(value_tw))
    if (start_b % config.ratio).any() or (config.overlap and start_b.any()):
        wanted = "0" if config.overlap else f"multiples of {config.ratio}"
        raise ValueError(f"start_b: expected {wanted}, got {start_b.tolist()}")
    no_ring = value_tw.new_zeros(1, 1, 2, width)
    pairs_t2w = _pairs(value_tw, gate_tw, bias_rw, _tokens(start_b, cu_seqlens)[1], num)
    return _chunk_entries(pairs_t2w, no_ring, torch.zeros_like(start_b), start_b, cu_seqlens, config, num)


def compress_prefill(
    value_tw: Tensor,
    gate_tw: Tensor,
    bias_rw: Tensor | None,
    state_: Tensor,
    state_slot_b: Tensor,
    start_b: Tensor,
    cu_seqlens: Tensor,
    *,
    config: CompressorConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Entries that a chunk of any length completes; then the chunk's last tokens enter the ring.

    Math:
        as `compress`; a token before the chunk is read from the ring. All reads come first. Then the last
        min(ring, length) tokens of each sequence overwrite their ring rows.

    Shapes:
        as `compress`; state_: float32 under every `num`, written in place; state_slot_b: integer [b].

    Edges:
        slot -1 is a padding sequence: nothing is read or written, its rows are zero with entry -1.

    Raises:
        TypeError: a tensor has a wrong dtype.
        ValueError: as `compress`; ratio is 1; the ring is shorter than span - 1; a slot is unknown or used twice.
    """
    width = expect_rows_to_pool(value_tw, gate_tw, bias_rw, config)
    expect_chunk(start_b, cu_seqlens, len(value_tw))
    expect_pooling_state(state_, width, config)
    expect_slots("state_slot_b", state_slot_b, len(start_b), len(state_), distinct=True)
    seq_t, position_t = _tokens(start_b, cu_seqlens)
    pairs_t2w = _pairs(value_tw, gate_tw, bias_rw, position_t, num)
    found = _chunk_entries(pairs_t2w, state_, state_slot_b, start_b, cu_seqlens, config, num)
    left_t = cu_seqlens[1:][seq_t] - torch.arange(len(seq_t), device=seq_t.device)
    slot_t = torch.where(left_t <= state_.shape[1], state_slot_b.long()[seq_t], -1)
    _write(state_, slot_t, position_t, pairs_t2w)
    return found


def compress_decode(
    value_tw: Tensor,
    gate_tw: Tensor,
    bias_rw: Tensor | None,
    state_: Tensor,
    state_slot_t: Tensor,
    position_t: Tensor,
    *,
    config: CompressorConfig,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """One step of one or several tokens a sequence: all enter the ring, then each that ends a group emits its entry.

    Shapes:
        as `compress_prefill`; state_slot_t, position_t: integer [t]; returns a row for every token.

    Edges:
        a token that ends no group, and a padding token (slot -1), has a zero row and entry -1.

    Raises:
        TypeError: a tensor has a wrong dtype.
        ValueError: as `compress_prefill`; tokens of a slot are apart, or their positions do not ascend by one; a
            position is negative; the ring is shorter than span + tokens of the step - 1.
    """
    width = expect_rows_to_pool(value_tw, gate_tw, bias_rw, config)
    expect_pooling_state(state_, width, config)
    expect_slots("state_slot_t", state_slot_t, len(value_tw), len(state_), distinct=False)
    expect_step(state_slot_t, position_t, state_.shape[1], config.span)
    slot_t, position_t = state_slot_t.long(), position_t.long()
    _write(state_, slot_t, position_t, _pairs(value_tw, gate_tw, bias_rw, position_t, num))
    ends_t = ((position_t + 1) % config.ratio == 0) & (slot_t >= 0)
    entry_t = torch.where(ends_t, position_t // config.ratio, -1)
    position_ti = _group_positions(entry_t, config)
    pairs_ti2w = num.wide(state_)[slot_t.clamp(min=0)[:, None], position_ti.clamp(min=0) % state_.shape[1]]
    return _pooled(pairs_ti2w, position_ti, entry_t, config, num), entry_t.to(torch.int32)


def compress_tail(
    m_yc: Tensor,
    weight_c: Tensor,
    table_sr: Tensor,
    entry_y: Tensor,
    *,
    ratio: int,
    eps: float,
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """The latent of every entry, which index keys are made of, and its rotated form, which the cache stores.

    Math:
        latent = RMSNorm(m; weight); key = latent, its last r channels rotated at the group's first token, ratio * entry

    Shapes:
        m_yc: [y, c]; weight_c: [c]; table_sr: float32 [s, r], row p for position p; returns two [y, c].

    Rounding:
        latent to bf16 once, after the weight; key to bf16 after the rotation of the rounded latent.

    Edges:
        entry -1 is rotated at position 0; a zero row stays zero.

    Raises:
        TypeError: a tensor has a wrong dtype.
        ValueError: shapes disagree; ratio or eps is not positive; a position is beyond the table.
    """
    expect_positive("ratio", ratio)
    expect_dtype("entry_y", entry_y, torch.int32, torch.int64)
    dims: dict[str, int] = {}
    for name, x, letters in (("m_yc", m_yc, "yc"), ("weight_c", weight_c, "c"), ("entry_y", entry_y, "y")):
        expect_shape(name, x, letters, dims)
    latent_yc = rms_norm(m_yc, weight_c, eps=eps, cast=WeightCast.AFTER_WEIGHT, num=num)
    position_y = entry_y.long().clamp(min=0) * ratio
    pairing, span = Pairing.INTERLEAVED, RopeSpan.LAST  # in every release
    key_y1c = rope(latent_yc[:, None], table_sr, position_y, pairing=pairing, span=span, inverse=False, num=num)
    return latent_yc, key_y1c[:, 0]


def _tokens(start_b: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence and position of every token of a chunk."""
    seq_t = torch.arange(len(start_b), device=start_b.device).repeat_interleave(cu_seqlens.long().diff())
    return seq_t, torch.arange(len(seq_t), device=start_b.device) + (start_b.long() - cu_seqlens[:-1])[seq_t]


def _pairs(
    value_tw: Tensor, gate_tw: Tensor | None, bias_rw: Tensor | None, position_t: Tensor, num: Numerics
) -> Tensor:
    value_tw = num.wide(value_tw)
    logit_tw = torch.zeros_like(value_tw) if gate_tw is None else num.wide(gate_tw)
    if bias_rw is not None:
        logit_tw = num.f32(logit_tw + num.wide(bias_rw)[position_t % len(bias_rw)])
    return torch.stack([logit_tw, value_tw], 1)


def _group_positions(entry_y: Tensor, config: CompressorConfig) -> Tensor:
    """The tokens of each entry, [y, span] in ascending order; below 0 where there is none."""
    end_y1 = (entry_y.long()[:, None] + 1) * config.ratio
    position_yi = end_y1 - config.span + torch.arange(config.span, device=entry_y.device)
    return torch.where(entry_y[:, None] >= 0, position_yi, -1)


def _chunk_entries(
    pairs: Tensor, state: Tensor, slot_b: Tensor, start_b: Tensor, cu: Tensor, config: CompressorConfig, num: Numerics
) -> tuple[Tensor, Tensor]:
    entry_y, seq_y = (x.long() for x in compress_rows(start_b, cu, ratio=config.ratio))
    slot_y, start_y1 = slot_b.long()[seq_y], start_b.long()[seq_y, None]
    entry_y = torch.where(slot_y >= 0, entry_y, -1)
    position_yi = _group_positions(entry_y, config)
    in_chunk_yi = position_yi >= start_y1
    token_yi = torch.where(in_chunk_yi, position_yi - start_y1 + cu.long()[seq_y, None], len(pairs))
    chunk = torch.cat([pairs, pairs.new_zeros(1, *pairs.shape[1:])])
    ring = num.wide(state)[slot_y.clamp(min=0)[:, None], position_yi.clamp(min=0) % state.shape[1]]
    pairs_yi2w = torch.where(in_chunk_yi[..., None, None], chunk[token_yi], ring)
    return _pooled(pairs_yi2w, position_yi, entry_y, config, num), entry_y.to(torch.int32)


def _pooled(
    pairs_yi2w: Tensor, position_yi: Tensor, entry_y: Tensor, config: CompressorConfig, num: Numerics
) -> Tensor:
    absent_yi1 = (position_yi < 0)[..., None]
    logit_yiw = pairs_yi2w[:, :, 0].masked_fill(absent_yi1, -torch.inf)
    value_yiw = pairs_yi2w[:, :, 1].masked_fill(absent_yi1, 0.0)
    if config.overlap:
        r, c = config.ratio, logit_yiw.shape[2] // 2
        logit_yiw, value_yiw = (torch.cat([x[:, :r, :c], x[:, r:, c:]], 1) for x in (logit_yiw, value_yiw))
    e_yic = torch.exp(logit_yiw - logit_yiw.amax(1, keepdim=True))
    weight_yic = e_yic / num.sum(e_yic, dim=1, keepdim=True)
    m_yc = num.sum(weight_yic * value_yiw, dim=1)
    return num.bf16(torch.where(entry_y[:, None] >= 0, m_yc, 0.0))


def _write(state_: Tensor, slot_t: Tensor, position_t: Tensor, pairs_t2w: Tensor) -> None:
    kept = slot_t >= 0
    rows = torch.empty_like(pairs_t2w[kept], dtype=torch.float32).copy_(pairs_t2w[kept])  # fp32 numbers already
    state_[slot_t[kept], position_t[kept] % state_.shape[1]] = rows
