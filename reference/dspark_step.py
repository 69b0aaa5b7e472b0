"""What surrounds verification in a decode step: which rows there are, what a request keeps, and what it takes back.

Nothing is copied or undone after a rejection. Keys of rejected positions are overwritten when the true tokens run:
the ring has W + γ + 1 rows or more, so that a full rejection cannot have destroyed a key still inside the window, and
a compressed entry is written again by whichever token completes its group. Only counters move back.

Source: runtime.md sections 1.3, 1.5 (DeepInfer, csrc/engine/{sequence,scheduler}.hpp, prepare_sample.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import expect_in_range, expect_shape


def next_confidences(confidence_bj: Tensor, stopped_b: Tensor) -> Tensor:
    """What the scheduler is told: confidences of a request that emitted a stop token are 0; the pool keeps its own.

    Raises:
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    expect_shape("confidence_bj", confidence_bj, "bj", dims)
    expect_shape("stopped_b", stopped_b, "b", dims)
    return torch.where(stopped_b[:, None], 0, confidence_bj)


def commit_tokens(
    emitted: Sequence[int], *, length: int, produced: int, stop: int | None, max_length: int, max_tokens: int
) -> tuple[int, str]:
    """How many emitted tokens are appended, and why the request ends ("" if it goes on).

    After each token: "stop" if it is `stop` (None: ignored), "length" if the request is then longer than `max_length`
    or has produced `max_tokens`. Later tokens of the step are dropped. The key of the newest token is not computed
    yet: a running request has keys of all its tokens but one.

    Raises:
        ValueError: nothing was emitted, or the request had ended before.
    """
    if not emitted or length > max_length or produced >= max_tokens:
        raise ValueError(f"emitted: expected tokens of a running request, got {list(emitted)} at length {length}")
    for count, token in enumerate(emitted, start=1):
        if token == stop:
            return count, "stop"
        if length + count > max_length or produced + count == max_tokens:
            return count, "length"
    return len(emitted), ""


def shift_history(window_bk: Tensor, rejected_b: Tensor, *, fill: int) -> Tensor:
    """The n-gram windows after a step that ran optimistically: the newest `rejected` ids are taken back.

    Shapes:
        window_bk: integer [b, k], oldest first; rejected_b: integer [b]; returns [b, k], `fill` in front.

    Raises:
        ValueError: shapes disagree, or more ids are rejected than there are.
    """
    dims: dict[str, int] = {}
    expect_shape("window_bk", window_bk, "bk", dims)
    expect_shape("rejected_b", rejected_b, "b", dims)
    expect_in_range("rejected_b", rejected_b, 0, dims["k"] + 1)
    from_bk = torch.arange(dims["k"])[None, :] - rejected_b[:, None]
    return torch.where(from_bk >= 0, window_bk.gather(1, from_bk.clamp(min=0)), fill)
