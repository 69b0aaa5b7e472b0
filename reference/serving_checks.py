"""Checks of what the scheduler and the grammar are given, shared by both sides; nothing here computes."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_shape
from .config import GrammarRequest, RunningBatch, SchedulerConfig, Vocabulary, WaitingQueue

INT_LIMIT = 2**31 - 1


def expect_traffic(
    prompt_bs: Tensor, length_b: Tensor, max_tokens_b: Tensor, arrival_b: Tensor, abort_b: Tensor
) -> None:
    """Raise unless prompts, lengths, limits and times are int32 columns that fit together."""
    dims: dict[str, int] = {}
    expect_shape("prompt_bs", prompt_bs, "bs", dims)
    expect_dtype("prompt_bs", prompt_bs, torch.int32)
    limits = {"length_b": (1, dims["s"] + 1), "max_tokens_b": (1, INT_LIMIT), "arrival_b": (0, INT_LIMIT)}
    columns = {"length_b": length_b, "max_tokens_b": max_tokens_b, "arrival_b": arrival_b, "abort_b": abort_b}
    for name, column in columns.items():
        expect_shape(name, column, "b", dims)
        expect_dtype(name, column, torch.int32)
        expect_in_range(name, column, *limits.get(name, (-1, INT_LIMIT)))


def expect_queue(queue: WaitingQueue) -> None:
    """Raise unless the columns of a waiting queue fit together and every request has something to prefill."""
    dims: dict[str, int] = {}
    for name in ("total_w", "done_w", "held_w", "boundary_w"):
        expect_shape(f"queue.{name}", getattr(queue, name), "w", dims)
        expect_dtype(f"queue.{name}", getattr(queue, name), torch.int32)
        expect_in_range(f"queue.{name}", getattr(queue, name), 0, INT_LIMIT)
    for name in ("is_ready_w", "has_ended_w"):
        expect_shape(f"queue.{name}", getattr(queue, name), "w", dims)
        expect_dtype(f"queue.{name}", getattr(queue, name), torch.bool)
    expect_shape("queue.image_wi", queue.image_wi, "wix", dims | {"x": 2})
    expect_dtype("queue.image_wi", queue.image_wi, torch.int32)
    if (queue.done_w >= queue.total_w).any():
        raise ValueError(
            f"queue.total_w: expected more than what is done, got {queue.total_w.tolist()} of {queue.done_w.tolist()}"
        )


def expect_running(batch: RunningBatch, config: SchedulerConfig) -> None:
    """Raise unless the columns of a running batch fit together and nobody grew by more than one block."""
    dims: dict[str, int] = {}
    for name in ("output_r", "total_r", "held_r"):
        expect_shape(f"batch.{name}", getattr(batch, name), "r", dims)
        expect_dtype(f"batch.{name}", getattr(batch, name), torch.int32)
        expect_in_range(f"batch.{name}", getattr(batch, name), 0, INT_LIMIT)
    expect_shape("batch.is_constrained_r", batch.is_constrained_r, "r", dims)
    expect_dtype("batch.is_constrained_r", batch.is_constrained_r, torch.bool)
    for total, held in zip(batch.total_r.tolist(), batch.held_r.tolist(), strict=True):
        if config.blocks_for(total) > held + 1:
            raise ValueError(f"batch.total_r: expected at most one block beside {held}, got {total} tokens")


def expect_votes(ready_td: Tensor, free_td: Tensor, chosen_td: Tensor, config: SchedulerConfig) -> None:
    """Raise unless flags and free blocks of all ranks fit together."""
    dims = {"d": config.ranks}
    expect_shape("ready_td", ready_td, "td", dims)
    expect_dtype("ready_td", ready_td, torch.bool)
    expect_shape("free_td", free_td, "td", dims)
    expect_dtype("free_td", free_td, torch.int32)
    expect_in_range("free_td", free_td, 0, config.num_blocks)
    expect_shape("chosen_td", chosen_td, "td", dims)
    expect_dtype("chosen_td", chosen_td, torch.bool)


def expect_spans(start_b: Tensor, end_b: Tensor, total_b: Tensor, keep: int) -> None:
    """Raise unless 0 <= start <= end <= total for every request and `keep` is not negative."""
    dims: dict[str, int] = {}
    columns = {"start_b": start_b, "end_b": end_b, "total_b": total_b}
    for name, column in columns.items():
        expect_shape(name, column, "b", dims)
        expect_dtype(name, column, torch.int32)
    expect_in_range("start_b", start_b, 0, INT_LIMIT)
    if (end_b < start_b).any():
        raise ValueError(f"end_b: expected ends behind {start_b.tolist()}, got {end_b.tolist()}")
    if (total_b < end_b).any():
        raise ValueError(f"total_b: expected totals from {end_b.tolist()} on, got {total_b.tolist()}")
    if keep < 0:
        raise ValueError(f"keep: expected a number from 0 on, got {keep}")


def expect_tokens(token_n: Tensor) -> None:
    """Raise unless these are the tokens of one output."""
    expect_shape("token_n", token_n, "n", {})
    expect_dtype("token_n", token_n, torch.int32)


def expect_drafts(emitted_sj: Tensor, draft_sg: Tensor) -> None:
    """Raise unless emitted tokens and drafts belong to the same steps, and nothing was emitted before the first."""
    dims: dict[str, int] = {}
    expect_shape("emitted_sj", emitted_sj, "sj", dims)
    expect_dtype("emitted_sj", emitted_sj, torch.int32)
    expect_shape("draft_sg", draft_sg, "sg", dims)
    expect_dtype("draft_sg", draft_sg, torch.int32)
    if dims["s"] and (emitted_sj[0] >= 0).any():
        raise ValueError(f"emitted_sj: expected no token before the first step, got {emitted_sj[0].tolist()}")


def expect_request(request: GrammarRequest, vocabulary: Vocabulary) -> None:
    """Raise unless the trigger and the bound token are in the vocabulary."""
    tokens = (*request.trigger, *(() if request.bound is None else (request.bound,)))
    if any(token >= len(vocabulary.tokens) for token in tokens):
        raise ValueError(f"request: expected tokens below {len(vocabulary.tokens)}, got {tokens}")


def expect_masks_shape(logits_tv_: Tensor, mask_yjw: Tensor, first_y: Tensor, length_y: Tensor) -> None:
    """The part of `expect_masks` that reads no values."""
    dims: dict[str, int] = {}
    expect_shape("logits_tv_", logits_tv_, "tv", dims)
    expect_dtype("logits_tv_", logits_tv_, torch.float32)
    expect_shape("mask_yjw", mask_yjw, "yjw", dims)
    expect_dtype("mask_yjw", mask_yjw, torch.int32)
    for name, column in {"first_y": first_y, "length_y": length_y}.items():
        expect_shape(name, column, "y", dims)
        expect_dtype(name, column, torch.int32)


def expect_masks(logits_tv_: Tensor, mask_yjw: Tensor, first_y: Tensor, length_y: Tensor) -> None:
    """Raise unless every request's rows lie in the batch."""
    expect_masks_shape(logits_tv_, mask_yjw, first_y, length_y)
    rows = len(logits_tv_)
    expect_in_range("length_y", length_y, 0, rows + 1)
    expect_in_range("first_y", first_y, -1, rows + 1)
    if (first_y + length_y > rows).any():
        spans = list(zip(first_y.tolist(), length_y.tolist(), strict=True))
        raise ValueError(f"length_y: expected rows inside of {rows}, got firsts and lengths {spans}")
