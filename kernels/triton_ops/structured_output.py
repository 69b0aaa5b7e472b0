"""Masks of grammars on logits: one program reads a run of mask words and writes −inf where their bits are zero.

A logit that is allowed is neither read nor written. Masks are bits in the order of the tokens, so a run of words covers
a run of logits and nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable


@dataclass(frozen=True, kw_only=True)
class MaskLaunch:
    """Mask words of a program; each stands for 32 logits."""

    words: int
    num_warps: int = 4


def mask_launch(num_words: int) -> MaskLaunch:
    """A short row at once, a long one in runs of 4096 logits."""
    return MaskLaunch(words=min(128, triton.next_power_of_2(max(num_words, 1))))


@triton.jit
def _apply(
    logits_ptr,
    mask_ptr,
    first_ptr,
    length_ptr,
    num_rows,
    num_columns,
    num_masks,
    num_words,
    stride_lt,
    WORDS: tl.constexpr,
):
    request, which = tl.program_id(1) // num_masks, tl.program_id(1) % num_masks
    # 1. the packed row, if the request has one for this mask
    first = tl.load(first_ptr + request)
    row = (first + which).to(tl.int64)
    is_used = (first >= 0) & (which < tl.load(length_ptr + request)) & (row < num_rows)
    # 2. a run of words
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(mask_ptr + tl.program_id(1).to(tl.int64) * num_words + word, mask=word < num_words, other=-1)
    # 3. its logits
    place = tl.arange(0, 32)
    column = word[:, None] * 32 + place[None, :]
    is_refused = ((bits[:, None] >> place[None, :]) & 1) == 0
    tl.store(
        logits_ptr + row * stride_lt + column,
        tl.full([WORDS, 32], float("-inf"), tl.float32),
        mask=is_refused & (column < num_columns) & is_used,
    )


def apply_masks(
    logits_tv: torch.Tensor,
    mask_yjw: torch.Tensor,
    first_y: torch.Tensor,
    length_y: torch.Tensor,
    *,
    launch: MaskLaunch | None = None,
) -> torch.Tensor:
    """−inf in place where the masks of packed rows have a zero bit; returns the logits.

    Raises:
        NotImplementedError: the logits of a row are not one behind the other.
        RuntimeError: the logits are on the CPU and kernels are not interpreted.
    """
    num_requests, num_masks, num_words = mask_yjw.shape
    if logits_tv.numel() and logits_tv.stride(1) != 1:
        raise NotImplementedError(f"logits_tv_: expected contiguous rows, got strides {logits_tv.stride()}")
    if not logits_tv.numel() or not mask_yjw.numel():
        return logits_tv
    require_runnable("logits_tv_", logits_tv)
    launch = launch or mask_launch(num_words)
    _apply[(triton.cdiv(num_words, launch.words), num_requests * num_masks)](
        logits_tv,
        mask_yjw.contiguous(),
        first_y.contiguous(),
        length_y.contiguous(),
        logits_tv.shape[0],
        logits_tv.shape[1],
        num_masks,
        num_words,
        logits_tv.stride(0),
        WORDS=launch.words,
        num_warps=launch.num_warps,
    )
    return logits_tv
