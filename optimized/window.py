"""Index lists of a sliding window, fast. Values are not inspected; a sequence that is none counts as padding."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_positive, expect_shape
from deeptwin.reference.config import SlidingWindow, Truncation


def window_prefill_triton(
    positions_t: Tensor,
    seq_t: Tensor,
    first_b: Tensor,
    offset_b: Tensor,
    known_b: Tensor,
    valid_b: Tensor,
    *,
    config: SlidingWindow,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.window.window_prefill`.

    Raises:
        TypeError: an argument is no integer tensor; `out` has another dtype.
        ValueError: shapes disagree; `out` does not fit.
    """
    _check("t", positions_t=positions_t, seq_t=seq_t)
    _check("b", first_b=first_b, offset_b=offset_b, known_b=known_b, valid_b=valid_b)
    from deeptwin.kernels.triton_ops import window

    keep = None if config.truncation is Truncation.OFF else config.keep
    return window.window_prefill(
        positions_t, seq_t, first_b, offset_b, known_b, valid_b, window=config.window, keep=keep, out=out
    )


def window_decode_triton(
    positions_t: Tensor,
    seq_t: Tensor,
    state_b: Tensor,
    valid_b: Tensor,
    *,
    config: SlidingWindow,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.window.window_decode`.

    Raises:
        TypeError: an argument is no integer tensor; `out` has another dtype.
        ValueError: shapes disagree; `out` does not fit.
    """
    _check("t", positions_t=positions_t, seq_t=seq_t)
    _check("b", state_b=state_b, valid_b=valid_b)
    from deeptwin.kernels.triton_ops import window

    return window.window_decode(positions_t, seq_t, state_b, valid_b, window=config.window, ring=config.ring, out=out)


def window_draft_triton(
    accepted_b: Tensor,
    state_b: Tensor,
    valid_b: Tensor,
    *,
    config: SlidingWindow,
    draft: int,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.window.window_draft`.

    Raises:
        TypeError: an argument is no integer tensor; `out` has another dtype.
        ValueError: shapes disagree; draft is not positive; the ring is shorter than W + draft; `out` does not fit.
    """
    _check("b", accepted_b=accepted_b, state_b=state_b, valid_b=valid_b)
    expect_positive("draft", draft)
    if config.ring < config.window + draft:
        raise ValueError(f"config: expected a ring of at least {config.window + draft}, got {config.ring}")
    from deeptwin.kernels.triton_ops import window

    return window.ring_rows(
        accepted_b,
        state_b,
        valid_b,
        width=-(-(config.window + draft) // 64) * 64,
        window=config.window,
        ring=config.ring,
        beyond=draft,
        from_valid=True,
        out=out,
    )


def ring_slots_triton(
    positions_t: Tensor,
    seq_t: Tensor,
    end_b: Tensor,
    known_b: Tensor,
    state_b: Tensor,
    *,
    config: SlidingWindow,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.window.ring_slots`.

    Raises:
        TypeError: an argument is no integer tensor; `out` has another dtype.
        ValueError: shapes disagree; `out` does not fit.
    """
    _check("t", positions_t=positions_t, seq_t=seq_t)
    _check("b", end_b=end_b, known_b=known_b, state_b=state_b)
    from deeptwin.kernels.triton_ops import window

    keep = config.keep if config.truncation is Truncation.COMPACT else None
    return window.ring_slots(positions_t, seq_t, end_b, known_b, state_b, ring=config.ring, keep=keep, out=out)


def history_slots_triton(
    first_b: Tensor, state_b: Tensor, valid_b: Tensor, *, config: SlidingWindow, out: Tensor | None = None
) -> Tensor:
    """`reference.window.history_slots`.

    Raises:
        TypeError: an argument is no integer tensor; `out` has another dtype.
        ValueError: shapes disagree; `out` does not fit.
    """
    _check("b", first_b=first_b, state_b=state_b, valid_b=valid_b)
    from deeptwin.kernels.triton_ops import window

    return window.ring_rows(
        first_b - 1,
        state_b,
        valid_b,
        width=config.window,
        window=config.window,
        ring=config.ring,
        beyond=0,
        from_valid=False,
        out=out,
    )


def compact_clip_triton(
    first_b: Tensor, end_b: Tensor, known_b: Tensor, *, config: SlidingWindow, out: Tensor | None = None
) -> Tensor:
    """`reference.window.compact_clip`.

    Raises:
        TypeError: an argument is no integer tensor; `out` has another dtype.
        ValueError: shapes disagree; `out` does not fit.
    """
    _check("b", first_b=first_b, end_b=end_b, known_b=known_b)
    from deeptwin.kernels.triton_ops import window

    # nothing is left out when every token is kept
    keep = config.keep if config.truncation is Truncation.COMPACT else 2**30
    return window.compact_clip(first_b, end_b, known_b, keep=keep, out=out)


def _check(letter: str, **tensors: Tensor) -> None:
    dims: dict[str, int] = {}
    for name, x in tensors.items():
        expect_shape(name, x, letter, dims)
        expect_dtype(name, x, torch.int32, torch.int64)
