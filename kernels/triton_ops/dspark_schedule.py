"""Scheduled verification: survival rates of drafts, and the places that a step gives to the best of them.

A draft wins a place if fewer than `places` drafts rank before it: a larger rate, or the same rate and a smaller place
in the order of requests. Counting needs no sort, and every program reads all rates, a block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer


@dataclass(frozen=True, kw_only=True)
class ScheduleLaunch:
    """Drafts that a program ranks, and those it compares them with at a time. It changes no result."""

    own: int  # requests, of PAD drafts each
    others: int = 32
    num_warps: int = 4


def schedule_launch(pad: int) -> ScheduleLaunch:
    """64 drafts a program, whatever the number of requests and the device."""
    return ScheduleLaunch(own=max(1, 64 // pad))


@triton.jit
def _survival_rates(confidence_ptr, rate_ptr, num_requests, width, stride_cb, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_requests
    rate = tl.full([BLOCK], 1.0, tl.float32)
    for j in range(width):
        confidence = tl.load(confidence_ptr + request * stride_cb + j, mask=inside, other=0.0)
        rate = rate * tl.where(confidence != confidence, 0.0, confidence)
        tl.store(rate_ptr + request * width + j, rate, mask=inside)


@triton.jit
def _allocate(
    rate_ptr,
    count_ptr,
    length_ptr,
    num_requests,
    places,
    stride_rb,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
):
    # 1. the drafts of this program: PAD positions of each request, those beyond its count out of the race
    place = tl.program_id(0) * (OWN * PAD) + tl.arange(0, OWN * PAD)
    request = place // PAD
    j = place % PAD
    count = tl.load(count_ptr + request, mask=request < num_requests, other=0).to(tl.int32)
    stored = (j < WIDTH) & (j < count)
    rate = tl.load(rate_ptr + request.to(tl.int64) * stride_rb + j, mask=stored, other=-1.0)
    rate = tl.where(rate == rate, rate, -1.0)
    # 2. how many rank before each of them
    before = tl.zeros([OWN * PAD], tl.int32)
    for start in range(0, num_requests * PAD, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_request = other // PAD
        other_j = other % PAD
        other_count = tl.load(count_ptr + other_request, mask=other_request < num_requests, other=0).to(tl.int32)
        other_stored = (other_j < WIDTH) & (other_j < other_count)
        other_rate = tl.load(rate_ptr + other_request.to(tl.int64) * stride_rb + other_j, mask=other_stored, other=-2.0)
        other_rate = tl.where(other_rate == other_rate, other_rate, -1.0)
        larger = other_rate[None, :] > rate[:, None]
        earlier = (other_rate[None, :] == rate[:, None]) & (other[None, :] < place[:, None])
        before += tl.sum((larger | earlier).to(tl.int32), axis=1)
    # 3. lengths
    wins = tl.reshape((stored & (before < places)).to(tl.int32), [OWN, PAD])
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    tl.store(length_ptr + own, 1 + tl.sum(wins, axis=1), mask=own < num_requests)


def survival_rates(confidence_bj: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Products of confidences, left to right.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: confidence_bj is on the CPU and kernels are not interpreted.
    """
    b, j = confidence_bj.shape
    rate_bj = output_buffer(out, (b, j), torch.float32, confidence_bj)
    if not rate_bj.numel():
        return rate_bj
    require_runnable("confidence_bj", confidence_bj)
    confidence_bj = confidence_bj if confidence_bj.stride(1) == 1 else confidence_bj.contiguous()
    block = 128
    _survival_rates[(triton.cdiv(b, block),)](
        confidence_bj, rate_bj, b, j, confidence_bj.stride(0), BLOCK=block, num_warps=1
    )
    return rate_bj


def allocate(
    rate_bj: torch.Tensor, count_b: torch.Tensor, *, total: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of every request in a step of `total` tokens.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: rate_bj is on the CPU and kernels are not interpreted.
    """
    b, j = rate_bj.shape
    length_b = output_buffer(out, (b,), torch.int32, rate_bj)
    if not b:
        return length_b
    require_runnable("rate_bj", rate_bj)
    rate_bj = rate_bj if rate_bj.stride(1) == 1 else rate_bj.contiguous()
    pad = triton.next_power_of_2(max(j, 1))
    launch = schedule_launch(pad)
    _allocate[(triton.cdiv(b, launch.own),)](
        rate_bj,
        count_b.contiguous(),
        length_b,
        b,
        total - b,
        rate_bj.stride(0),
        WIDTH=j,
        PAD=pad,
        OWN=launch.own,
        OTHERS=launch.others,
        num_warps=launch.num_warps,
    )
    return length_b
