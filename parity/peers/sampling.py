"""Samplers and filters of others as peers of sampling: numpy's discrete law, transformers 5.24's logits processors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def numpy_choice(probs_tv: Tensor, seed_t: Tensor, subsequence_t: Tensor, *, draw: object) -> tuple[Tensor, Tensor]:
    """numpy.random.Generator.choice with its own random numbers, one for every row of the same distribution."""
    prob = probs_tv[0].double().numpy()
    generator = np.random.Generator(np.random.PCG64(int(seed_t[0]) % 2**64))
    token = generator.choice(len(prob), len(seed_t), p=prob / prob.sum())
    return torch.from_numpy(token), torch.zeros(len(seed_t), dtype=torch.int32)


def transformers_warpers(logits_tv: Tensor, probs_tv: Tensor, top_p_t: Tensor, top_k_t: Tensor) -> Tensor:
    """TopPLogitsWarper or TopKLogitsWarper on the logarithms of the probabilities, one filter a row."""
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    kept = torch.ones_like(logits_tv, dtype=torch.bool)
    for row, (top_p, top_k) in enumerate(zip(top_p_t.tolist(), top_k_t.tolist(), strict=True)):
        scores = probs_tv[row : row + 1].double().log()
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(torch.empty(1, 0, dtype=torch.long), scores)
        if top_k > 0:
            scores = TopKLogitsWarper(min(top_k, len(scores[0])))(torch.empty(1, 0, dtype=torch.long), scores)
        kept[row] = scores[0] > -torch.inf
    return kept
