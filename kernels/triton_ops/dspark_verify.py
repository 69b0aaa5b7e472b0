"""Verification of drafts: one program a row decides and leaves the weights that the sampler draws from; then packing.

The exponential is the one of the router's kernel, right to a few units in the last place on every device. Fixed-point
sums are whole numbers, so their order is free, and nothing depends on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import output_buffer
from .router import exp_of_negative

PENALTY = tl.constexpr(5e-5)
FIXED_ONE = tl.constexpr(2147483648.0)


@dataclass(frozen=True, kw_only=True)
class VerifyLaunch:
    """Columns of a row taken at once; it changes no result."""

    block: int = 2048
    num_warps: int = 8


@dataclass(frozen=True, kw_only=True)
class PackLaunch:
    """Requests of a program; it changes no result."""

    requests: int = 32
    num_warps: int = 1


@triton.jit
def _exp(x):
    """e^x of log-probabilities, 0 of -inf; slightly positive ones are allowed."""
    small = exp_of_negative(tl.minimum(tl.where(x > -100.0, x, -100.0), 0.0))
    # beyond 0 by rounding only: e^x = 1 / e^-x
    large = 1.0 / exp_of_negative(tl.maximum(x, 0.0) * -1.0)
    return tl.where(x == float("-inf"), 0.0, tl.where(x > 0.0, large, small))


@triton.jit
def _verify_rows(
    target_ptr,
    draft_ptr,
    token_ptr,
    pool_ptr,
    fresh_ptr,
    word_ptr,
    accepted_ptr,
    weights_ptr,
    alpha_ptr,
    num_columns,
    num_pool,
    stride_qt,
    stride_pz,
    ASCEND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. what the row is; a pool row that nobody inspected and lies outside reads nothing
    row = tl.program_id(0).to(tl.int64)
    item = tl.arange(0, BLOCK)
    is_fresh = tl.load(fresh_ptr + row) != 0
    pool = tl.load(pool_ptr + row).to(tl.int64)
    has_draft = (is_fresh == 0) & (pool >= 0) & (pool < num_pool)
    token = tl.load(token_ptr + row).to(tl.int64)
    q_ptr = target_ptr + row * stride_qt
    # no address is formed from what stands in a fresh row, masked or not
    p_ptr = draft_ptr + tl.where(has_draft, pool, 0) * stride_pz
    # 2. the decision, in every lane the same
    lane = tl.arange(0, 16)
    known = (lane >= 0) & has_draft & (token >= 0) & (token < num_columns)
    place = tl.where(known, token, 0)
    lq = tl.load(q_ptr + place, mask=known, other=float("-inf"))
    lp = tl.load(p_ptr + place, mask=known, other=0.0)
    possible = known & (lq > float("-inf"))
    chance = _exp(tl.minimum(tl.where(possible, lq - lp, 0.0), 0.0))
    word = tl.load(word_ptr + row + lane * 0)
    if ASCEND:
        is_below = 2 * word + 1 < (chance * 8589934592.0).to(tl.int64)
    else:
        is_below = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10 < chance
    tl.store(accepted_ptr + row + lane, (possible & is_below).to(tl.uint8), mask=lane == 0)
    # 3. weights, and the fixed-point sum of theirs
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_columns, BLOCK):
        column = start + item.to(tl.int64)
        inside = column < num_columns
        log_q = tl.load(q_ptr + column, mask=inside, other=float("-inf"))
        log_p = tl.load(p_ptr + column, mask=inside & has_draft, other=float("-inf"))
        weight = tl.maximum(_exp(log_q) - _exp(log_p - PENALTY), 0.0)
        tl.store(weights_ptr + row * num_columns + column, weight, mask=inside)
        total += (weight * FIXED_ONE).to(tl.int64)
    left = tl.sum(total, axis=0).to(tl.float32) * 4.656612873077393e-10
    alpha = tl.where(is_fresh, 1.0, tl.maximum(1.0 - left, 0.0))
    tl.store(alpha_ptr + row, alpha)


@triton.jit
def _verify_pack(
    accepted_ptr,
    sampled_ptr,
    token_ptr,
    golden_ptr,
    first_ptr,
    length_ptr,
    stop_ptr,
    count_ptr,
    final_ptr,
    packed_ptr,
    stopped_ptr,
    num_requests,
    HAS_GOLDEN: tl.constexpr,
    STOPS: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
):
    # 1. the rows of each request
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    inside = request < num_requests
    length = tl.load(length_ptr + request, mask=inside, other=0).to(tl.int32)
    first = tl.load(first_ptr + request, mask=inside, other=0)
    j = tl.arange(0, ROWS_PAD)[None, :]
    row = first[:, None] + j
    in_rows = j < length[:, None]
    token = tl.load(token_ptr + row, mask=in_rows, other=-1).to(tl.int32)
    sampled = tl.load(sampled_ptr + row, mask=in_rows, other=-1).to(tl.int32)
    accepted = tl.load(accepted_ptr + row, mask=in_rows, other=0).to(tl.int32)
    if HAS_GOLDEN:
        golden = tl.load(golden_ptr + row, mask=in_rows, other=-1).to(tl.int32)
        sampled = tl.where(golden >= 0, golden, sampled)
        accepted = tl.where(golden >= 0, (golden == token).to(tl.int32), accepted)
    # 2. accepted rows up to the first that is not
    is_verify = j < length[:, None] - 1
    end = tl.min(tl.where(is_verify & (accepted != 0), ROWS_PAD, j + tl.zeros([REQUESTS, ROWS_PAD], tl.int32)), axis=1)
    count = tl.minimum(end, tl.maximum(length - 1, 0))
    emitted = j < count[:, None]
    is_final = (j == count[:, None]) & in_rows
    final = tl.max(tl.where(is_final, sampled, -1), axis=1)
    tl.store(count_ptr + request, count, mask=inside)
    tl.store(final_ptr + request, final, mask=inside)
    tl.store(packed_ptr + row, tl.where(emitted, token, -1), mask=in_rows)
    # 3. stop tokens among what is emitted
    shown = tl.where(emitted, token, tl.where(is_final, sampled, -1))
    stopped = tl.zeros([REQUESTS], tl.int32)
    for k in tl.static_range(STOPS):
        stop = tl.load(stop_ptr + request.to(tl.int64) * STOPS + k, mask=inside, other=-1).to(tl.int32)
        hit = (shown == stop[:, None]) & (shown >= 0)
        stopped = tl.maximum(stopped, tl.max(hit.to(tl.int32), axis=1))
    tl.store(stopped_ptr + request, stopped.to(tl.uint8), mask=inside)


def verify_rows(
    target_tv: torch.Tensor,
    draft_zv: torch.Tensor,
    token_t: torch.Tensor,
    pool_t: torch.Tensor,
    fresh_t: torch.Tensor,
    word_t: torch.Tensor,
    *,
    ascend: bool,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decisions, weights to draw from, and acceptance estimates.

    Raises:
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: target_tv is on the CPU and kernels are not interpreted.
    """
    t, v = target_tv.shape
    given = out or (None, None, None)
    accepted_t = output_buffer(given[0], (t,), torch.bool, target_tv)
    weights_tv = output_buffer(given[1], (t, v), torch.float32, target_tv)
    alpha_t = output_buffer(given[2], (t,), torch.float32, target_tv)
    if not t:
        return accepted_t, weights_tv, alpha_t
    require_runnable("target_tv", target_tv)
    target_tv, draft_zv = (x if x.stride(-1) == 1 else x.contiguous() for x in (target_tv, draft_zv))
    launch = VerifyLaunch()
    _verify_rows[(t,)](
        target_tv,
        draft_zv,
        token_t.contiguous(),
        pool_t.contiguous(),
        fresh_t.contiguous().view(torch.uint8),
        word_t.contiguous(),
        accepted_t.view(torch.uint8),
        weights_tv,
        alpha_t,
        v,
        draft_zv.shape[0],
        target_tv.stride(0),
        draft_zv.stride(0),
        ASCEND=ascend,
        BLOCK=min(launch.block, max(triton.next_power_of_2(v), 32)),
        num_warps=launch.num_warps,
    )
    return accepted_t, weights_tv, alpha_t


def verify_pack(
    accepted_t: torch.Tensor,
    sampled_t: torch.Tensor,
    token_t: torch.Tensor,
    golden_t: torch.Tensor | None,
    length_b: torch.Tensor,
    stop_bk: torch.Tensor,
    *,
    draft: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What every request emits.

    Raises:
        ValueError: an `out` buffer has another shape or is not contiguous.
        TypeError: an `out` buffer has another dtype.
        RuntimeError: length_b is on the CPU and kernels are not interpreted.
    """
    t, b = len(token_t), len(length_b)
    given = out or (None,) * 4
    count_b, final_b = (output_buffer(x, (b,), torch.int32, length_b) for x in given[:2])
    packed_t = output_buffer(given[2], (t,), torch.int32, length_b)
    stopped_b = output_buffer(given[3], (b,), torch.bool, length_b)
    if not b:
        return count_b, final_b, packed_t, stopped_b
    require_runnable("length_b", length_b)
    launch = PackLaunch()
    _verify_pack[(triton.cdiv(b, launch.requests),)](
        accepted_t.contiguous().view(torch.uint8),
        sampled_t.contiguous(),
        token_t.contiguous(),
        token_t if golden_t is None else golden_t.contiguous(),
        torch.cumsum(length_b, 0, dtype=torch.int64) - length_b,
        length_b.contiguous(),
        stop_bk.contiguous(),
        count_b,
        final_b,
        packed_t,
        stopped_b.view(torch.uint8),
        b,
        HAS_GOLDEN=golden_t is not None,
        STOPS=stop_bk.shape[1],
        REQUESTS=launch.requests,
        ROWS_PAD=triton.next_power_of_2(draft + 1),
        num_warps=launch.num_warps,
    )
    return count_b, final_b, packed_t, stopped_b
