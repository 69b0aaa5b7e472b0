"""Selections by torch and TileKernels as peers of `reference/topk.py`; the latter written for tile_kernels 2.1.0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def torch_topk(scores_ts: Tensor, length_t: Tensor, *, k: int) -> Tensor:
    """torch.topk, which leaves open how it breaks ties, on each row's own prefix."""
    return _by_rows(scores_ts, length_t, k, lambda row, count: row.topk(count).indices)


def stable_topk(scores_ts: Tensor, length_t: Tensor, *, k: int) -> Tensor:
    """tile_kernels.torch.topk.stable_topk, which gives ties to the lower index, on each row's own prefix."""
    from tile_kernels.torch.topk import stable_topk as theirs

    return _by_rows(scores_ts, length_t, k, lambda row, count: theirs(row[None], count).reshape(-1))


def _by_rows(scores: Tensor, lengths: Tensor, k: int, best: Callable[[Tensor, int], Tensor]) -> Tensor:
    found = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        finite = (scores[row, :length] > -torch.inf).nonzero().reshape(-1)
        count = min(k, finite.numel())
        if count:
            chosen = finite[best(scores[row, finite], count)].sort().values
            found[row, :count] = chosen.to(torch.int32)
    return found
