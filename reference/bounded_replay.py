"""Bounded replay: decoder layers see, compute and store only the last K tokens of a prompt, whatever its length.

All global keys of the decoder are made of encoder output, so a decoder layer's only own state is its sliding window.
To fill the windows of all L layers exactly takes W + (L - 1)(W - 1) tokens; bounded replay takes K. Modes:

    OFF      every row is computed and sees its whole window
    MASK     every row is computed, none sees a key below the cut N - K
    COMPACT  rows below the cut are dropped before the first decoder layer, but for one placeholder of a chunk without
             kept rows; the global keys are made of all rows before that

N counts the tokens that the request holds when a chunk is scheduled, not those up to the chunk's end. MASK and COMPACT
mean the same on rows from the cut on. Both differ from OFF in a cone behind the cut: the output of the i-th decoder
layer (from 1) is exact from N - K + i (W - 1) on, and only there.

`replay_prefill` says what truncation means on a decoder in exact integers, in which any wrong key shows: layers of a
windowed hash and a global sum. Everything here is one loop over rows or positions: a definition, not a way to run it.
The lists and slots that kernels use are those of `window`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from .config import SlidingWindow, Truncation

PRIME = 2**31 - 1


def replay_plan(
    first_b: Tensor, end_b: Tensor, known_b: Tensor, valid_b: Tensor, *, config: SlidingWindow
) -> tuple[Tensor, Tensor, Tensor]:
    """What every row of a packed chunk sees, and what becomes of it.

    Math:
        encoder low = max(p - W + 1, v, 0); decoder low = clamp(max(p - W + 1, N - K, v), 0, p + 1), as the encoder's
        under OFF; the keys are low … p. Those below the chunk come from the ring, oldest first, then those of the chunk

    Shapes:
        first_b, end_b: [b], the chunk of each sequence; known_b: [b], N; valid_b: [b], v, the first position whose
        state is valid; returns low_tj, history_tj: int32 [t, 2], encoder then decoder: the first key and how many keys
        come from the ring; flags_tj: bool [t, 3]: computed by decoder layers, good for use, stored in decoder rings.

    Edges:
        low = p + 1 means no key. A row below the cut is good for nothing; under COMPACT it is computed only as the
        last row of a chunk without kept rows, and never stored.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; a chunk is empty or reaches beyond N; v lies beyond the chunk's first position.

    Source:
        runtime.md section 4.2
    """
    _check_chunks(first_b, end_b, known_b, valid_b)
    low, history, flags = [], [], []
    for first, end, known, valid in zip(*(x.tolist() for x in (first_b, end_b, known_b, valid_b)), strict=True):
        cut = known - config.keep
        for p in range(first, end):
            encoder = max(p - config.window + 1, valid, 0)
            decoder = encoder
            if config.truncation is not Truncation.OFF:
                decoder = min(max(p - config.window + 1, cut, valid, 0), p + 1)
            low.append((encoder, decoder))
            history.append([max(first - start, 0) for start in (encoder, decoder)])
            below = config.truncation is not Truncation.OFF and p < cut
            dropped = below and config.truncation is Truncation.COMPACT
            computed = not dropped or p == end - 1
            flags.append((computed, not below, end - p <= config.ring and not dropped))
    pairs = [torch.tensor(rows, dtype=torch.int32).reshape(-1, 2) for rows in (low, history)]
    return pairs[0], pairs[1], torch.tensor(flags, dtype=torch.bool).reshape(-1, 3)


def exact_layers(positions_t: Tensor, seq_t: Tensor, known_b: Tensor, *, config: SlidingWindow, layers: int) -> Tensor:
    """How many decoder layers, counted from the first, give a row the output that it has without truncation.

    A row is exact in a layer if it sees its whole window there and all keys of it are exact, that is, if all these
    rows are exact in the layer before; the first layer's input is exact everywhere.

    Shapes:
        positions_t, seq_t: [t]; known_b: [b]; returns int32 [t], 0 to `layers`.

    Edges:
        W = 1: every row from the cut on is exact in every layer. N <= K: all rows are.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; a sequence is not in 0 … b - 1; a position is not below N; layers is not positive.

    Source:
        runtime.md section 4.3
    """
    expect_positive("layers", layers)
    _check_rows(positions_t, seq_t, known_b)
    tables = []
    for known in known_b.tolist():
        cut = 0 if config.truncation is Truncation.OFF else max(known - config.keep, 0)
        count, exact = [0] * known, [True] * known
        for _ in range(layers):
            before = exact
            exact = []
            for p in range(known):
                whole = max(p - config.window + 1, 0)
                exact.append(p >= cut and whole >= cut and all(before[whole : p + 1]))
            count = [n + now for n, now in zip(count, exact, strict=True)]
        tables.append(count)
    found = [tables[b][p] for p, b in zip(positions_t.tolist(), seq_t.tolist(), strict=True)]
    return torch.tensor(found, dtype=torch.int32)


def rebuild_rows(layers: int, *, config: SlidingWindow) -> tuple[int, int]:
    """Tokens that K has to be for the last window of keys of the last layer to be exact, and for its whole ring."""
    expect_positive("layers", layers)
    window = config.window + (layers - 1) * (config.window - 1)
    return window, window + config.ring - config.window


def ring_load_plan(first_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow) -> Tensor:
    """Block copies that load the W keys before every chunk from the rings into the rows in front of the chunks.

    The row of position j of sequence b is b * W + j - (first - W). Positions below v hold no key: their rows are
    filled with zeros. A run of rows that ends at the ring's end is one copy, what follows another.

    Shapes:
        first_b: [b], the position at which the chunk begins; state_b: [b], the slot of the state; valid_b: [b], v;
        returns int32 [b, 3, 4]: source ring or -1 for zeros, its first slot, the slot behind its last, the first row.

    Edges:
        fewer than three copies: the others are (-1, 0, 0, (b + 1) * W), which copy nothing.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree.

    Source:
        runtime.md section 4.8
    """
    _check_sequences({"first_b": first_b, "state_b": state_b, "valid_b": valid_b})
    plan = []
    for b, (first, state, valid) in enumerate(zip(first_b.tolist(), state_b.tolist(), valid_b.tolist(), strict=True)):
        copies: list[list[int]] = []
        for row in range(config.window):
            j = first - config.window + row
            source, slot = (state, j % config.ring) if j >= max(valid, 0) else (-1, row)
            if copies and copies[-1][0] == source and copies[-1][2] == slot:
                copies[-1][2] += 1
            else:
                copies.append([source, slot, slot + 1, b * config.window + row])
        plan += copies + [[-1, 0, 0, (b + 1) * config.window]] * (3 - len(copies))
    return torch.tensor(plan, dtype=torch.int32).reshape(len(first_b), 3, 4)


def replay_prefill(
    hidden_t: Tensor,
    global_b: Tensor,
    first_b: Tensor,
    counts_kb: Tensor,
    *,
    config: SlidingWindow,
    layers: int,
) -> tuple[Tensor, Tensor]:
    """What a decoder of windowed hashes makes of prompts that are prefilled chunk by chunk.

    Math:
        G[p] = global + sum over first <= j <= p of (2 j + 3) x_0[j]; fold(v_1 … v_n) = ((48271 + v_1) 48271 + v_2) …
        x_i+1[p] = 69621 x_i[p] + 40014 fold(x_i of the keys that p sees, oldest first) + 16807 G[p] + i + 1
        all mod 2^31 - 1; a layer's key of a position is its input there

    Shapes:
        hidden_t: int64 [t], what the encoder leaves of each token, the sequences one after the other; global_b: int64
        [b], the sum over the tokens before; first_b: [b], where the rest of a prompt begins, behind a prefix whose
        global keys are cached; counts_kb: [k, b], tokens of each sequence in each step; returns int64 out_tl [t, l],
        the outputs of all layers, and ring_bls [b, l, R], the keys that the rings hold afterwards.

    Edges:
        no decoder key stands before `first`, so v = first. Rows below the cut are -1, and so are slots of no token.

    Raises:
        TypeError: an argument is no integer tensor.
        ValueError: shapes disagree; the steps do not add up to t; a hidden value is not in 0 … 2^31 - 2.

    Source:
        runtime.md sections 4.2 to 4.4 (what is seen); the hash is ours
    """
    expect_positive("layers", layers)
    total_b = _check_prompts(hidden_t, global_b, first_b, counts_kb)
    out_tl = torch.full((len(hidden_t), layers), -1, dtype=torch.int64)
    ring_bls = torch.full((len(first_b), layers, config.ring), -1, dtype=torch.int64)
    start = 0
    for b, (count, first) in enumerate(zip(total_b, first_b.tolist(), strict=True)):
        known = first + count
        cut = known - config.keep if config.truncation is not Truncation.OFF else 0
        x, sums = dict(enumerate(hidden_t[start : start + count].tolist(), first)), {}
        total = int(global_b[b])
        for p in x:
            total = (total + (2 * p + 3) * x[p]) % PRIME
            sums[p] = total
        for layer in range(layers):
            for p in range(max(known - config.ring, first), known):
                ring_bls[b, layer, p % config.ring] = x[p]
            keys = {p: [x[j] for j in range(max(p - config.window + 1, cut, first), p + 1)] for p in x}
            x = {p: _layer(x[p], keys[p], sums[p], layer) for p in x}
            for p in range(max(cut, first), known):
                out_tl[start + p - first, layer] = x[p]
        start += count
    return out_tl, ring_bls


def _layer(own: int, keys: list[int], total: int, layer: int) -> int:
    folded = 1
    for key in keys:
        folded = (folded * 48271 + key) % PRIME
    return (69621 * own + 40014 * folded + 16807 * total + layer + 1) % PRIME


def _check_sequences(seq_b: dict[str, Tensor]) -> None:
    dims: dict[str, int] = {}
    for name, x_b in seq_b.items():
        expect_shape(name, x_b, "b", dims)
        expect_dtype(name, x_b, torch.int32, torch.int64)


def _check_chunks(first_b: Tensor, end_b: Tensor, known_b: Tensor, valid_b: Tensor) -> None:
    _check_sequences({"first_b": first_b, "end_b": end_b, "known_b": known_b, "valid_b": valid_b})
    if (end_b <= first_b).any():
        raise ValueError(f"end_b: expected chunks of one token or more, got {end_b.tolist()} after {first_b.tolist()}")
    if (known_b < end_b).any():
        raise ValueError(f"known_b: expected at least the chunks' ends {end_b.tolist()}, got {known_b.tolist()}")
    if (valid_b > first_b).any():
        raise ValueError(f"valid_b: expected at most the chunks' begins {first_b.tolist()}, got {valid_b.tolist()}")


def _check_rows(positions_t: Tensor, seq_t: Tensor, known_b: Tensor) -> None:
    dims: dict[str, int] = {}
    for name, x_t in (("positions_t", positions_t), ("seq_t", seq_t)):
        expect_shape(name, x_t, "t", dims)
        expect_dtype(name, x_t, torch.int32, torch.int64)
    _check_sequences({"known_b": known_b})
    expect_in_range("seq_t", seq_t, 0, len(known_b))
    if len(positions_t) and ((positions_t < 0) | (positions_t >= known_b[seq_t.long()])).any():
        raise ValueError(f"positions_t: expected positions below {known_b.tolist()}, got {positions_t.tolist()}")


def _check_prompts(hidden_t: Tensor, global_b: Tensor, first_b: Tensor, counts_kb: Tensor) -> list[int]:
    """Tokens of each sequence."""
    dims: dict[str, int] = {}
    expect_shape("hidden_t", hidden_t, "t", dims)
    expect_shape("counts_kb", counts_kb, "kb", dims)
    for name, x_b in (("global_b", global_b), ("first_b", first_b)):
        expect_shape(name, x_b, "b", dims)
    expect_dtype("hidden_t", hidden_t, torch.int64)
    for name, x in (("global_b", global_b), ("first_b", first_b), ("counts_kb", counts_kb)):
        expect_dtype(name, x, torch.int32, torch.int64)
    expect_in_range("hidden_t", hidden_t, 0, PRIME)
    total_b = counts_kb.sum(0, dtype=torch.int64)
    if int(total_b.sum(dtype=torch.int64)) != len(hidden_t):
        raise ValueError(f"counts_kb: expected steps of {len(hidden_t)} tokens in all, got {counts_kb.tolist()}")
    return total_b.tolist()
