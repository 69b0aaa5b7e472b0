"""Index lists of a sliding window: which keys a query sees, where they stand, and which ring slots new keys go to.

The window of a query at position p is [lo, p], with

    lo = clamp(max(p - W + 1, v0, N - K), 0, p + 1)

where W is the window, v0 the first position whose keys are valid (above 0 after a restart without state), and N - K,
for decoder layers under truncation only, the first of the K kept tokens of a prompt of N. lo = p + 1 means that no key
is seen. Lists hold the keys oldest first, then -1; their length does not depend on the data.

A ring of R >= W rows keeps the key of position j of the sequence with state s in slot s * R + j mod R. During prefill
the keys of positions before the chunk are loaded from the ring *before* the chunk is stored, W rows for each sequence,
and stand before those of the chunk: [history windows of all sequences | rows of the chunk | ...].

Every function is exact integer arithmetic on int32 or int64; a token whose sequence is -1 is padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from .config import SlidingWindow, Truncation


def window_prefill(
    positions_t: Tensor,
    seq_t: Tensor,
    first_b: Tensor,
    offset_b: Tensor,
    known_b: Tensor,
    valid_b: Tensor,
    *,
    config: SlidingWindow,
) -> Tensor:
    """The rows of [history windows | rows of the chunk] that each query of a prefill chunk sees.

    Math:
        position j < first is row seq * W + (j - first + W), any other is row b * W + offset + (j - first)

    Shapes:
        positions_t, seq_t: [t], a query's position and sequence; first_b: [b], the position at which the chunk of a
        sequence begins; offset_b: [b], where the row of that position stands among the rows of the chunk (below 0 when
        COMPACT left it out); known_b: [b], tokens known of the sequence; valid_b: [b], v0; returns int32 [t, W].

    Edges:
        padding and an empty window give a row of -1. A placeholder of COMPACT, at p < N - K, sees nothing.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; a sequence is not in -1 … b - 1; a position lies before its chunk.

    Source:
        v41-attention.md section 6, runtime.md section 4 (order of the rows)
    """
    seq_b = {"first_b": first_b, "offset_b": offset_b, "known_b": known_b, "valid_b": valid_b}
    _check(positions_t, seq_t, seq_b)
    real_t, at_t = seq_t >= 0, seq_t.clamp(min=0).long()
    first_t1 = _of(first_b, at_t)[:, None]
    if (real_t & (positions_t < first_t1[:, 0])).any():
        raise ValueError(f"positions_t: expected no position before its chunk, got {positions_t.tolist()}")
    seen_tk, is_key_tk = _window(positions_t, real_t, at_t, known_b, valid_b, config)
    history_tk = at_t[:, None] * config.window + (seen_tk - first_t1 + config.window)
    chunk_tk = len(first_b) * config.window + _of(offset_b, at_t)[:, None] + (seen_tk - first_t1)
    return torch.where(is_key_tk, torch.where(seen_tk < first_t1, history_tk, chunk_tk), -1).to(torch.int32)


def window_decode(
    positions_t: Tensor, seq_t: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow
) -> Tensor:
    """The ring slots that each query of a decode step sees: the last min(p + 1, W) tokens, oldest first.

    Shapes:
        positions_t, seq_t: [t]; state_b, valid_b: [b]; returns int32 [t, W].

    Edges:
        as `window_prefill`. Truncation does not show: a step takes back fewer tokens than K - W, so no window reaches
        below N - K. The keys of all tokens of the step stand in the ring before any query reads.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; a sequence is not in -1 … b - 1.

    Source:
        v41-attention.md section 6
    """
    _check(positions_t, seq_t, {"state_b": state_b, "valid_b": valid_b})
    real_t, at_t = seq_t >= 0, seq_t.clamp(min=0).long()
    seen_tk, is_key_tk = _window(positions_t, real_t, at_t, None, valid_b, config)
    slot_tk = _of(state_b, at_t)[:, None] * config.ring + seen_tk % config.ring
    return torch.where(is_key_tk, slot_tk, -1).to(torch.int32)


def window_draft(accepted_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow, draft: int) -> Tensor:
    """The ring slots that the draft queries of a block see: the last W accepted keys and all keys of the block.

    There is no causal mask inside the block, so its `draft` queries share one list. Their keys stand at positions
    accepted + 1 … accepted + draft of the same ring, and the next step overwrites them.

    Shapes:
        accepted_b: [b], the position of the last accepted token, -1 if there is none; state_b, valid_b: [b]; returns
        int32 [b, W + draft rounded up to 64].

    Edges:
        fewer than W accepted keys: the list is shorter, then -1.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; draft is not positive; the ring is shorter than W + draft.

    Source:
        v41-attention.md section 6, runtime.md section 1
    """
    expect_positive("draft", draft)
    if config.ring < config.window + draft:
        raise ValueError(f"config: expected a ring of at least {config.window + draft}, got {config.ring}")
    _check_sequences({"accepted_b": accepted_b, "state_b": state_b, "valid_b": valid_b})
    width = -(-(config.window + draft) // 64) * 64
    last_b1 = accepted_b.long()[:, None] + draft
    low_b1 = torch.maximum(accepted_b - config.window + 1, valid_b).clamp(min=0).long()[:, None]
    seen_bk = low_b1 + torch.arange(width, device=accepted_b.device)
    slot_bk = state_b.long()[:, None] * config.ring + seen_bk % config.ring
    return torch.where(seen_bk <= last_b1, slot_bk, -1).to(torch.int32)


def ring_slots(
    positions_t: Tensor, seq_t: Tensor, end_b: Tensor, known_b: Tensor, state_b: Tensor, *, config: SlidingWindow
) -> Tensor:
    """The ring slots that the keys of a chunk or a step go to; -1 for those that are not stored.

    Math:
        state * R + p mod R if end - p <= R (the last R tokens of the chunk), and p >= N - K under COMPACT

    Shapes:
        positions_t, seq_t: [t]; end_b: [b], one past the last position of the chunk; known_b, state_b: [b]; returns
        int32 [t].

    Edges:
        padding and the placeholder of COMPACT are not stored. MASK stores rows that no kept query sees.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; a sequence is not in -1 … b - 1; a position lies beyond its chunk.

    Source:
        v41-attention.md section 6
    """
    _check(positions_t, seq_t, {"end_b": end_b, "known_b": known_b, "state_b": state_b})
    at_t, p_t = seq_t.clamp(min=0).long(), positions_t.long()
    left_t = _of(end_b, at_t) - p_t
    is_stored_t = (seq_t >= 0) & (left_t <= config.ring)
    if ((seq_t >= 0) & (left_t < 1)).any():
        raise ValueError(f"positions_t: expected no position beyond its chunk, got {positions_t.tolist()}")
    if config.truncation is Truncation.COMPACT:
        is_stored_t = is_stored_t & (p_t >= _of(known_b, at_t) - config.keep)
    return torch.where(is_stored_t, _of(state_b, at_t) * config.ring + p_t % config.ring, -1).to(torch.int32)


def history_slots(first_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow) -> Tensor:
    """The ring slots of the W positions before a chunk, oldest first; -1 where there is no valid key.

    Loaded with `load_records`, they are the history windows in front of the chunk's rows, zeros where -1.

    Shapes:
        first_b, state_b, valid_b: [b]; returns int32 [b, W].

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree.

    Source:
        v41-attention.md sections 5, 6
    """
    _check_sequences({"first_b": first_b, "state_b": state_b, "valid_b": valid_b})
    seen_bk = first_b.long()[:, None] - config.window + torch.arange(config.window, device=first_b.device)
    slot_bk = state_b.long()[:, None] * config.ring + seen_bk % config.ring
    return torch.where((seen_bk >= 0) & (seen_bk >= valid_b[:, None]), slot_bk, -1).to(torch.int32)


def compact_clip(first_b: Tensor, end_b: Tensor, known_b: Tensor, *, config: SlidingWindow) -> Tensor:
    """How many rows at the front of every chunk COMPACT leaves out; 0 in the other modes.

    Math:
        clamp(N - K - first, 0, end - first - 1): at least one row remains

    Shapes:
        first_b, end_b, known_b: [b]; returns int32 [b].

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; a chunk is empty.

    Source:
        v41-attention.md section 6
    """
    _check_sequences({"first_b": first_b, "end_b": end_b, "known_b": known_b})
    if (end_b <= first_b).any():
        raise ValueError(f"end_b: expected chunks of one token or more, got {end_b.tolist()} after {first_b.tolist()}")
    if config.truncation is not Truncation.COMPACT:
        return torch.zeros_like(first_b, dtype=torch.int32)
    before_b = (known_b.long() - config.keep - first_b).clamp(min=0)
    return torch.minimum(before_b, end_b.long() - first_b - 1).to(torch.int32)


def compact_rows(first_b: Tensor, end_b: Tensor, known_b: Tensor, *, config: SlidingWindow) -> Tensor:
    """Which rows of the packed chunks remain, in order: int64, as many as `compact_clip` leaves."""
    clip_b, count_b = compact_clip(first_b, end_b, known_b, config=config), end_b.long() - first_b
    start_b = torch.cumsum(count_b, 0) - count_b
    rows = [
        torch.arange(start + clip, start + count)
        for start, clip, count in zip(start_b.tolist(), clip_b.tolist(), count_b.tolist(), strict=True)
    ]
    return torch.cat([torch.arange(0), *rows])


def _window(
    positions_t: Tensor,
    real_t: Tensor,
    at_t: Tensor,
    known_b: Tensor | None,
    valid_b: Tensor,
    config: SlidingWindow,
) -> tuple[Tensor, Tensor]:
    """The positions [t, W] from the first key on, and which of them are keys."""
    p_t = positions_t.long()
    low_t = torch.maximum(p_t - config.window + 1, _of(valid_b, at_t))
    if known_b is not None and config.truncation is not Truncation.OFF:
        low_t = torch.maximum(low_t, _of(known_b, at_t) - config.keep)
    low_t = torch.minimum(low_t.clamp(min=0), p_t + 1)
    seen_tk = low_t[:, None] + torch.arange(config.window, device=p_t.device)
    return seen_tk, real_t[:, None] & (seen_tk <= p_t[:, None])


def _of(x_b: Tensor, at_t: Tensor) -> Tensor:
    """The value of every token's sequence; a batch without sequences has padding only."""
    return x_b.long()[at_t] if len(x_b) else torch.zeros_like(at_t)


def _check(positions_t: Tensor, seq_t: Tensor, seq_b: dict[str, Tensor]) -> None:
    dims: dict[str, int] = {}
    for name, x_t in (("positions_t", positions_t), ("seq_t", seq_t)):
        expect_shape(name, x_t, "t", dims)
        expect_dtype(name, x_t, torch.int32, torch.int64)
    expect_in_range("seq_t", seq_t, -1, _check_sequences(seq_b))


def _check_sequences(seq_b: dict[str, Tensor]) -> int:
    dims: dict[str, int] = {}
    for name, x_b in seq_b.items():
        expect_shape(name, x_b, "b", dims)
        expect_dtype(name, x_b, torch.int32, torch.int64)
    return dims["b"]
