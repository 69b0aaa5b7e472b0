"""Drafting: rows of a block, the Markov step and the confidence head.

The Markov step is a product with the vocabulary on the rows of the matrix unit and requests on its columns, so a few
requests fill it; every program owns 64 requests, its accumulator starts with the base logits, and the rank is walked in
steps of one length. A request has the same bits in any batch. The confidence head is one program a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class MarkovLaunch:
    """Tile of one program. `block_rank` fixes the order of summation."""

    block_vocab: int = 128
    block_requests: int = 64
    block_rank: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True)
class ConfidenceLaunch:
    """Elements that are added side by side: fixes the order of summation."""

    block: int = 1024
    num_warps: int = 4


def markov_launch(arch: str) -> MarkovLaunch:
    """The launch of the Markov step; it never looks at the number of requests."""
    if arch == "ascend950":  # the tile has to fit the unified buffer
        return MarkovLaunch(block_vocab=64, block_requests=32, num_stages=1)
    return MarkovLaunch()


@triton.jit
def _draft_rows(
    golden_ptr,
    first_ptr,
    accepted_ptr,
    state_ptr,
    valid_ptr,
    ids_ptr,
    position_ptr,
    slot_ptr,
    seen_ptr,
    window,
    ring,
    noise,
    width,
    DRAFT: tl.constexpr,
    DRAFT_PAD: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    # 1. where the block stands
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(first_ptr + request).to(tl.int32)
    is_real = first >= 0
    last = tl.where(is_real, first + tl.load(accepted_ptr + request).to(tl.int32), -1)
    base = tl.load(state_ptr + request).to(tl.int32) * ring
    # 2. its rows
    j = tl.arange(0, DRAFT_PAD)
    inside = j < DRAFT
    position = last + 1 + j
    golden = tl.load(golden_ptr + request).to(tl.int32)
    ids = tl.where(is_real & (j == 0), golden, noise)
    row = request * DRAFT + j
    tl.store(ids_ptr + row, ids, mask=inside)
    tl.store(position_ptr + row, tl.where(is_real, position, 0), mask=inside)
    tl.store(slot_ptr + row, tl.where(is_real, base + position % ring, -1), mask=inside)
    # 3. what they see
    low = tl.maximum(tl.maximum(last - window + 1, tl.load(valid_ptr + request).to(tl.int32)), 0)
    entry = tl.arange(0, WIDTH_PAD)
    seen = low + entry
    is_seen = is_real & (seen <= last + DRAFT)
    tl.store(seen_ptr + request * width + entry, tl.where(is_seen, base + seen % ring, -1), mask=entry < width)


@triton.jit
def _markov_step(
    base_ptr,
    token_ptr,
    w1_ptr,
    w2_ptr,
    logits_ptr,
    num_requests,
    num_tokens,
    rank,
    stride_bb,
    stride_1v,
    stride_2v,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    # 1. which tile, and its base logits
    vocab = tl.program_id(0).to(tl.int64) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    request = tl.program_id(1).to(tl.int64) * BLOCK_REQUESTS + tl.arange(0, BLOCK_REQUESTS)
    in_vocab, in_requests = vocab < num_tokens, request < num_requests
    in_tile = in_vocab[:, None] & in_requests[None, :]
    acc = tl.load(base_ptr + request[None, :] * stride_bb + vocab[:, None], mask=in_tile, other=0.0)
    # 2. rows of the first table; a token that nobody inspected reads nothing
    token = tl.load(token_ptr + request, mask=in_requests, other=-1).to(tl.int64)
    known = (token >= 0) & (token < num_tokens)
    # 3. product
    for start in range(0, rank, BLOCK_RANK):
        column = start + tl.arange(0, BLOCK_RANK)
        in_rank = column < rank
        w = tl.load(
            w2_ptr + vocab[:, None] * stride_2v + column[None, :], mask=in_vocab[:, None] & in_rank[None, :], other=0.0
        )
        e = tl.load(
            w1_ptr + token[:, None] * stride_1v + column[None, :], mask=known[:, None] & in_rank[None, :], other=0.0
        )
        acc = tl.dot(w, tl.trans(e), acc)
    tl.store(logits_ptr + request[None, :] * num_tokens + vocab[:, None], acc, mask=in_tile)


@triton.jit
def _weighted(x_ptr, weight_ptr, width, is_known, BLOCK: tl.constexpr):
    """Σ x · weight of a row: products of bf16 are exact, sums side by side, then one tree."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = (column < width) & is_known
        x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def _confidence(
    h_ptr,
    token_ptr,
    w1_ptr,
    weight_ptr,
    confidence_ptr,
    num_tokens,
    width,
    rank,
    stride_hb,
    stride_1v,
    temperature,
    BLOCK: tl.constexpr,
    RANK_PAD: tl.constexpr,
):
    # 1. both parts of the row
    request = tl.program_id(0).to(tl.int64)
    logit = _weighted(h_ptr + request * stride_hb, weight_ptr, width, request >= 0, BLOCK)
    token = tl.load(token_ptr + request).to(tl.int64)
    known = (token >= 0) & (token < num_tokens)
    logit += _weighted(w1_ptr + token * stride_1v, weight_ptr + width, rank, known, RANK_PAD)
    # 2. temperature, limits, sigmoid
    logit = logit / temperature
    # comparisons let a NaN through, which maximum and minimum may drop
    logit = tl.where(logit > 60.0, 60.0, tl.where(logit < -60.0, -60.0, logit))
    tl.store(confidence_ptr + request, 1.0 / (1.0 + tl.exp(logit * -1.0)))


def draft_rows(
    golden_b: torch.Tensor,
    first_b: torch.Tensor,
    accepted_b: torch.Tensor,
    state_b: torch.Tensor,
    valid_b: torch.Tensor,
    *,
    draft: int,
    noise: int,
    window: int,
    ring: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions, slots and the list of seen slots of every block.

    Raises:
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: first_b is on the CPU and kernels are not interpreted.
    """
    b, width = len(first_b), -(-(window + draft) // 64) * 64
    given = out or (None,) * 4
    ids_bj, position_bj, slot_bj = (output_buffer(x, (b, draft), torch.int32, first_b) for x in given[:3])
    seen_bk = output_buffer(given[3], (b, width), torch.int32, first_b)
    if not b:
        return ids_bj, position_bj, slot_bj, seen_bk
    require_runnable("first_b", first_b)
    _draft_rows[(b,)](
        golden_b.contiguous(),
        first_b.contiguous(),
        accepted_b.contiguous(),
        state_b.contiguous(),
        valid_b.contiguous(),
        ids_bj,
        position_bj,
        slot_bj,
        seen_bk,
        window,
        ring,
        noise,
        width,
        DRAFT=draft,
        DRAFT_PAD=triton.next_power_of_2(draft),
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=1,
    )
    return ids_bj, position_bj, slot_bj, seen_bk


def markov_step(
    base_bv: torch.Tensor,
    token_b: torch.Tensor,
    w1_vr: torch.Tensor,
    w2_vr: torch.Tensor,
    *,
    launch: MarkovLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Base logits and the product of two rows of the tables.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: base_bv is on the CPU and kernels are not interpreted.
    """
    (b, v), rank = base_bv.shape, w1_vr.shape[1]
    logits_bv = output_buffer(out, (b, v), torch.float32, base_bv)
    if not logits_bv.numel():
        return logits_bv
    require_runnable("base_bv", base_bv)
    base_bv, w1_vr, w2_vr = (_rows(x) for x in (base_bv, w1_vr, w2_vr))
    launch = launch or markov_launch(arch_of(base_bv.device))
    _markov_step[(triton.cdiv(v, launch.block_vocab), triton.cdiv(b, launch.block_requests))](
        base_bv,
        token_b.contiguous(),
        w1_vr,
        w2_vr,
        logits_bv,
        b,
        v,
        rank,
        base_bv.stride(0),
        w1_vr.stride(0),
        w2_vr.stride(0),
        BLOCK_VOCAB=launch.block_vocab,
        BLOCK_REQUESTS=launch.block_requests,
        BLOCK_RANK=launch.block_rank,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return logits_bv


def confidence(
    h_bm: torch.Tensor,
    token_b: torch.Tensor,
    w1_vr: torch.Tensor,
    weight_x: torch.Tensor,
    *,
    temperature: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Confidences of one block position.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: h_bm is on the CPU and kernels are not interpreted.
    """
    (b, m), (v, rank) = h_bm.shape, w1_vr.shape
    confidence_b = output_buffer(out, (b,), torch.float32, h_bm)
    if not b:
        return confidence_b
    require_runnable("h_bm", h_bm)
    h_bm, w1_vr = _rows(h_bm), _rows(w1_vr)
    launch = ConfidenceLaunch()
    _confidence[(b,)](
        h_bm,
        token_b.contiguous(),
        w1_vr,
        weight_x.contiguous(),
        confidence_b,
        v,
        m,
        rank,
        h_bm.stride(0),
        w1_vr.stride(0),
        temperature,
        BLOCK=launch.block,
        RANK_PAD=triton.next_power_of_2(rank),
        num_warps=launch.num_warps,
    )
    return confidence_b


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with adjacent elements in a row; rows may lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()
