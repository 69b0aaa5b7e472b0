"""From the logits of a step to what every request emits: target distributions, decisions about drafts, draws, packing.

A step holds, for each request, an anchor row and a row behind each draft that it verifies. Row j gives the token at
position P0 + j. All its random words come from the seed of its request, P0 and j, and it reads nothing of other
requests, so what a request emits does not depend on the batch. A request of one row, a prefill or plain decoding, is
drawn with the words of a fresh row: for it this is ordinary sampling.

Drafts wait in a pool between two steps. Slot 0 is a placeholder, a point mass on token V - 1 of confidence 1: a request
without proposals reads it, and nobody writes to it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from deeptwin.reference.config import LEAST_TEMPERATURE, Draw, DrawUse, RowError
from deeptwin.reference.dspark_state import ProposalPool


class Operations(Protocol):
    """What names the function of every operation: a `Plan`."""

    def op(self, name: str) -> Callable[..., Any]:
        """The function of `component.operation`."""


class Greedy(enum.Enum):
    """What a temperature below 1e-5 means."""

    ARGMAX = "argmax"  # the lowest of the largest logits; a draft counts if it is that token
    EPS = "eps"  # a draw at temperature 1e-5 without filters, as the source runtime has it


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifyRows:
    """The requests of a step, in the order of their rows, and how each of them draws."""

    length_b: Tensor  # int64, rows of the request: 1 + its drafts, 0 for padding
    position_b: Tensor  # int64, of the token that the first row gives
    slot_b: Tensor  # int64, where its proposals lie; 0: it has none
    temperature_b: Tensor  # fp32, as requested
    top_p_b: Tensor  # fp32
    top_k_b: Tensor  # int64
    seed_b: Tensor  # int64, the bits of the request's seed
    stop_bk: Tensor  # int64, tokens that end the request, -1 for none


@dataclass(frozen=True, kw_only=True, eq=False)
class Verified:
    """What a step brought, by request; `alpha_t` and `target_tv` by row."""

    token_bj: Tensor  # int64 [b, γ + 1]: the accepted drafts, then the token of the row that ended it; -1 behind
    logprob_bj: Tensor  # fp32, of each in the target's distribution; 0 behind
    emitted_b: Tensor  # int64, how many of them count: up to the first stop token
    accepted_b: Tensor  # int64, drafts accepted, before stop tokens are looked at
    golden_b: Tensor  # int64, the token of the row that ended the request: the next anchor; -1 for padding and errors
    stopped_b: Tensor  # bool, whether an emitted token is a stop token
    error_b: Tensor  # int32, `RowError` of the row that ended the request
    alpha_t: Tensor  # fp32, estimated acceptance of every row, 1 where nothing was verified
    target_tv: Tensor  # fp32, the log-probabilities that tokens were judged by


def proposal_pool(*, slots: int, draft: int, vocab: int, device: torch.device | None = None) -> ProposalPool:
    """A pool of `slots` slots behind slot 0, every one of which holds placeholders.

    Raises:
        ValueError: a size is not positive.
    """
    for name, size in (("slots", slots), ("draft", draft), ("vocab", vocab)):
        expect_positive(name, size)
    count = (slots + 1) * draft
    logprob_zv = torch.full((count, vocab), -torch.inf, device=device)
    logprob_zv[:, vocab - 1] = 0.0
    token_z = torch.full((count,), vocab - 1, dtype=torch.int64, device=device)
    confidence_z = torch.ones(count, device=device)
    return ProposalPool(token_z=token_z, logprob_zv=logprob_zv, confidence_z=confidence_z, draft=draft)


def write_proposals_(
    pool: ProposalPool, slot_b: Tensor, token_bj: Tensor, logprob_bjv: Tensor, confidence_bj: Tensor
) -> None:
    """Keep what requests drafted, in place; what goes to slot 0 is dropped.

    Raises:
        ValueError: shapes disagree; a slot is not in the pool.
        TypeError: log-probabilities or confidences are not fp32, or ids not int64.
    """
    dims = {"j": pool.draft, "v": pool.logprob_zv.shape[1]}
    expect_shape("slot_b", slot_b, "b", dims)
    expect_shape("token_bj", token_bj, "bj", dims)
    expect_shape("logprob_bjv", logprob_bjv, "bjv", dims)
    expect_shape("confidence_bj", confidence_bj, "bj", dims)
    for name, x in (("slot_b", slot_b), ("token_bj", token_bj)):
        expect_dtype(name, x, torch.int64)
    for name, x in (("logprob_bjv", logprob_bjv), ("confidence_bj", confidence_bj)):
        expect_dtype(name, x, torch.float32)
    _check_slots(slot_b, pool)
    kept_b = slot_b > 0
    row_bj = slot_b[kept_b, None] * pool.draft + torch.arange(pool.draft, device=slot_b.device)
    pool.token_z[row_bj] = token_bj[kept_b]
    pool.logprob_zv[row_bj] = logprob_bjv[kept_b]
    pool.confidence_z[row_bj] = confidence_bj[kept_b]


def clear_proposals_(pool: ProposalPool, slot: int) -> None:
    """Make a slot hold placeholders again, for the next request that gets it.

    Raises:
        ValueError: the slot is not in the pool, or is slot 0.
    """
    if not 0 < slot < len(pool.token_z) // pool.draft:
        raise ValueError(f"slot: expected 1 … {len(pool.token_z) // pool.draft - 1}, got {slot}")
    own = slice(slot * pool.draft, (slot + 1) * pool.draft)
    for x in (pool.token_z, pool.logprob_zv, pool.confidence_z):
        x[own] = x[: pool.draft]


def step_tokens(golden_b: Tensor, slot_b: Tensor, length_b: Tensor, pool: ProposalPool | None) -> Tensor:
    """The input tokens int64 [t] of a decode step: of each request its anchor, then the drafts that it verifies.

    Raises:
        ValueError: shapes disagree; a slot is not in the pool; a request has more drafts than the pool.
        TypeError: an argument is not int64.
    """
    _check_columns({"golden_b": golden_b, "slot_b": slot_b, "length_b": length_b})
    _check_lengths(length_b, slot_b, pool)
    owner_t, row_t = _rows(length_b)
    if pool is None:
        return golden_b[owner_t]
    draft_t = pool.token_z[slot_b[owner_t] * pool.draft + (row_t - 1).clamp(min=0)]
    return torch.where(row_t == 0, golden_b[owner_t], draft_t)


def verify(
    logits_tv: Tensor,
    rows: VerifyRows,
    pool: ProposalPool | None,
    *,
    greedy: Greedy,
    draw: Draw,
    ops: Operations,
    forced_t: Tensor | None = None,
) -> Verified:
    """Decide about all drafts of a step and draw what follows them.

    Math:
        q[j] = softmax pipeline of row j; accept and residual as `dspark_verify.verify_rows`; what is emitted as
        `dspark_verify.verify_pack`

    Shapes:
        logits_tv: fp32 [t, v], masked, `rows.length_b` of them for each request in turn; pool: None where nobody has
        drafts; forced_t: int64 [t], tokens that must come (-1: none), or None.

    Edges:
        a greedy row under ARGMAX reads no random word; its log-probabilities are those of temperature 1 without
        filters. Where no residual is left, the lowest of the largest logits is emitted (`Draw.ASCEND`: of the largest
        log-probabilities). A row that cannot be drawn accepts nothing and ends its request with token -1 and an error;
        rows behind the end of their request are never looked at.

    Raises:
        ValueError: shapes disagree; lengths do not add up to t or exceed the drafts of the pool; a slot is not in it.
        TypeError: an argument is not of its dtype.

    Source:
        runtime.md sections 1.3, 2.1 to 2.4
    """
    _check_rows(logits_tv, rows, pool, forced_t)
    owner_t, row_t = _rows(rows.length_b)
    fresh_t = row_t == rows.length_b[owner_t] - 1
    seed_t, position_t = rows.seed_b[owner_t], rows.position_b[owner_t]
    stream = {use: ops.op("sampling.subsequences")(position_t, row_t, use=use) for use in DrawUse}
    argmax_t = ((rows.temperature_b < LEAST_TEMPERATURE) & (greedy is Greedy.ARGMAX))[owner_t]
    cold = 1.0 if greedy is Greedy.ARGMAX else LEAST_TEMPERATURE
    filters = [x_b[owner_t] for x_b in drawn_with(rows.temperature_b, rows.top_p_b, rows.top_k_b, cold=cold)]
    token_t, error_t, target_tv, _ = ops.op("sampling.sample_logits")(
        logits_tv, *filters, seed_t, stream[DrawUse.FRESH], draw=draw
    )
    largest_t, _ = ops.op("sampling.argmax_tokens")(logits_tv)
    draft_t, alpha_t = torch.full_like(token_t, -1), torch.ones(len(token_t), device=token_t.device)
    accepted_t = torch.zeros_like(fresh_t)
    if pool is not None and not bool(fresh_t.all()):
        pool_t = torch.where(fresh_t, 0, rows.slot_b[owner_t] * pool.draft + row_t)
        draft_t = torch.where(fresh_t, -1, pool.token_z[pool_t])
        word_t = ops.op("sampling.random_words")(seed_t, stream[DrawUse.ACCEPT], count=1)[:, 0]
        accepted_t, weights_tv, alpha_t = ops.op("dspark_verify.verify_rows")(
            target_tv, pool.logprob_zv, draft_t, pool_t, fresh_t, word_t, draw=draw
        )
        again_t, empty_t = ops.op("sampling.sample_probs")(weights_tv, seed_t, stream[DrawUse.RESIDUAL], draw=draw)
        spare_t = largest_t if draw is Draw.NVIDIA else ops.op("sampling.argmax_tokens")(target_tv)[0]
        token_t = torch.where(fresh_t, token_t, torch.where(empty_t == RowError.NONE, again_t, spare_t))
    # greedy rows are settled by their logits; one that cannot be drawn has no largest, nor a target to accept by
    accepted_t = torch.where(argmax_t, (draft_t == largest_t) & (draft_t >= 0), accepted_t)
    token_t = torch.where(argmax_t, largest_t, torch.where(error_t == RowError.NONE, token_t, -1))
    count_b, final_b, packed_t, stopped_b = ops.op("dspark_verify.verify_pack")(
        accepted_t, token_t, draft_t, forced_t, rows.length_b, rows.stop_bk, draft=0 if pool is None else pool.draft
    )
    end_t = count_b.long()[owner_t]
    emitted_t = torch.where(row_t < end_t, packed_t.long(), torch.where(row_t == end_t, final_b.long()[owner_t], -1))
    columns = _columns(owner_t, row_t, (len(rows.length_b), 1 if pool is None else pool.draft + 1))
    own_t = target_tv.gather(1, emitted_t.clamp(min=0)[:, None])[:, 0]
    token_bj = columns(emitted_t, -1)
    has_rows_b, count_b = rows.length_b > 0, count_b.long()
    return Verified(
        token_bj=token_bj,
        logprob_bj=columns(torch.where(emitted_t >= 0, own_t, 0.0), 0.0),
        emitted_b=torch.where(has_rows_b, torch.minimum(_first_stop(token_bj, rows.stop_bk), count_b) + 1, 0),
        accepted_b=count_b,
        golden_b=final_b.long(),
        stopped_b=stopped_b,
        error_b=torch.where(has_rows_b, columns(error_t, 0).gather(1, count_b[:, None])[:, 0], 0),
        alpha_t=alpha_t,
        target_tv=target_tv,
    )


def _first_stop(token_bj: Tensor, stop_bk: Tensor) -> Tensor:
    """The place of the first stop token among what requests emitted, behind all of it if there is none."""
    is_stop_bj = ((token_bj[:, :, None] == stop_bk[:, None, :]) & (token_bj >= 0)[:, :, None]).any(2)
    width = token_bj.shape[1]
    return torch.where(is_stop_bj, torch.arange(width, device=token_bj.device), width).amin(1)


def _columns(owner_t: Tensor, row_t: Tensor, shape: tuple[int, int]) -> Callable[[Tensor, float], Tensor]:
    """What makes columns [b, j] of their requests out of rows."""

    def columns(x_t: Tensor, fill: float) -> Tensor:
        x_bj = x_t.new_full(shape, fill)
        x_bj[owner_t, row_t] = x_t
        return x_bj

    return columns


def drawn_with(
    temperature_b: Tensor, top_p_b: Tensor, top_k_b: Tensor, *, cold: float = LEAST_TEMPERATURE
) -> tuple[Tensor, Tensor, Tensor]:
    """What requests are drawn with: one below the least temperature is drawn at `cold`, and nothing is filtered."""
    cold_b = temperature_b < LEAST_TEMPERATURE
    temperature_b = torch.where(cold_b, cold, temperature_b)
    return temperature_b, torch.where(cold_b, 1.0, top_p_b), torch.where(cold_b, -1, top_k_b)


def _rows(length_b: Tensor) -> tuple[Tensor, Tensor]:
    """The request of every row, and its place in it."""
    owner_t = torch.arange(len(length_b), device=length_b.device).repeat_interleave(length_b)
    start_b = length_b.cumsum(0) - length_b
    return owner_t, torch.arange(len(owner_t), device=length_b.device) - start_b[owner_t]


def _check_slots(slot_b: Tensor, pool: ProposalPool) -> None:
    expect_in_range("slot_b", slot_b, 0, len(pool.token_z) // pool.draft)


def _check_lengths(length_b: Tensor, slot_b: Tensor, pool: ProposalPool | None) -> None:
    expect_in_range("length_b", length_b, 0, 2 if pool is None else pool.draft + 2)
    if pool is not None:
        _check_slots(slot_b, pool)


def _check_columns(columns: dict[str, Tensor]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for name, x_b in columns.items():
        expect_shape(name, x_b, "b", dims)
        expect_dtype(name, x_b, torch.int64)
    return dims


def _check_rows(logits_tv: Tensor, rows: VerifyRows, pool: ProposalPool | None, forced_t: Tensor | None) -> None:
    names = ("length_b", "position_b", "slot_b", "top_k_b", "seed_b")
    dims = _check_columns({f"rows.{name}": getattr(rows, name) for name in names})
    for name in ("temperature_b", "top_p_b"):
        expect_shape(f"rows.{name}", getattr(rows, name), "b", dims)
        expect_dtype(f"rows.{name}", getattr(rows, name), torch.float32)
    expect_shape("rows.stop_bk", rows.stop_bk, "bk", dims)
    expect_dtype("rows.stop_bk", rows.stop_bk, torch.int64)
    expect_shape("logits_tv", logits_tv, "tv", dims)
    expect_dtype("logits_tv", logits_tv, torch.float32)
    if pool is not None and pool.logprob_zv.shape[1] != dims["v"]:
        raise ValueError(f"pool: expected v={dims['v']}, got v={pool.logprob_zv.shape[1]}")
    _check_lengths(rows.length_b, rows.slot_b, pool)
    if int(rows.length_b.sum()) != dims["t"]:
        raise ValueError(f"rows.length_b: expected {dims['t']} rows in all, got {rows.length_b.tolist()}")
    if forced_t is not None:
        expect_shape("forced_t", forced_t, "t", dims)
        expect_dtype("forced_t", forced_t, torch.int64)
