"""A toy model with the data flow of V4.1 in exact integers: any key that is missing, stale or not its own changes all.

Encoder layers have a sliding window and, as the compressed keys do, a sum over the hashes of whole pairs of tokens.
Decoder layers are those of `replay_prefill`: a truncated window and a sum over all encoder outputs.
"""

from __future__ import annotations

import torch

from .bounded_replay import replay_prefill
from .config import SlidingWindow

PRIME = 2**31 - 1
RATIO = 2


def toy_prefill(tokens: list[int], *, window: SlidingWindow, layers: int) -> int:
    """The last output of the last decoder layer, of a prompt that is computed in one piece.

    Math:
        x_0[p] = 16807 token + 1; E_i[j] = fold(x_i[2 j], x_i[2 j + 1]); S[p] = sum over 2 j + 2 <= p + 1 of
        (2 j + 3) E_i[j]; x_i+1[p] = 69621 x_i[p] + 40014 fold(x_i[p - W + 1 … p]) + 16807 S[p] + 100 + i;
        fold and all sums mod 2^31 - 1, as in `replay_prefill`
    """
    x = [(16807 * token + 1) % PRIME for token in tokens]
    for layer in range(layers):
        entries = [_fold(x[j : j + RATIO]) for j in range(0, len(x) - RATIO + 1, RATIO)]
        after = []
        for p, own in enumerate(x):
            total = sum((2 * j + 3) * entries[j] for j in range((p + 1) // RATIO)) % PRIME
            folded = _fold(x[max(p - window.window + 1, 0) : p + 1])
            after.append((69621 * own + 40014 * folded + 16807 * total + 100 + layer) % PRIME)
        x = after
    zero = torch.zeros(1, dtype=torch.int64)
    count_kb = torch.tensor([[len(x)]])
    out_tl, _ = replay_prefill(torch.tensor(x), zero, zero, count_kb, config=window, layers=layers)
    return int(out_tl[-1, -1])


def _fold(values: list[int]) -> int:
    folded = 1
    for value in values:
        folded = (folded * 48271 + value) % PRIME
    return folded
