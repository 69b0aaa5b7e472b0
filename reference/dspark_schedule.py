"""Confidence-scheduled verification: how many draft tokens a decode step verifies, and whose.

The survival a[b, j] of a draft is the product of the confidences up to it. A step of S requests that verifies N tokens
(one row for each request, and N - S drafts) is worth

    throughput(N) = (S + Σ of the N - S largest a) / time(N),   time(N) = base(G) + slope · G + sampler

with G the smallest captured graph of N tokens or more. N is the global maximum over all N from S on (no early stop),
chosen from rates that are two steps old: whether a token is verified must not depend on which token it is. The places
then go to the largest of the newest rates, in the order rate descending, request ascending, position ascending. Rates
never increase along a request, so its winners are a prefix.

Rates are fp32 and multiplied left to right, the expected count is added up in fp32 in sorted order, times and the
quotient are fp64: definitional under every numerics. Letters beside the project's own: j positions of a draft.

Source: runtime.md section 1.4 (DeepInfer, csrc/engine/mtp_varlen.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_shape
from .config import StepCost

FORWARD_WINDOW = 5000  # samples of the forward estimator, newest last
FORWARD_LEAST = 10  # samples of a graph size before it counts
SAMPLER_WINDOW = 9
SAMPLER_LEAST = 5


def survival_rates(confidence_bj: Tensor) -> Tensor:
    """How probable it is that a draft is still standing: fp32 products of confidences, left to right.

    Shapes:
        confidence_bj: fp32 [b, j]; returns fp32 [b, j].

    Edges:
        a confidence that is NaN counts as 0.

    Raises:
        ValueError: confidence_bj has not two axes.
        TypeError: confidences are not fp32.
    """
    expect_shape("confidence_bj", confidence_bj, "bj", {})
    expect_dtype("confidence_bj", confidence_bj, torch.float32)
    rate_bj = torch.where(confidence_bj.isnan(), 0, confidence_bj)
    for j in range(1, rate_bj.shape[1]):
        rate_bj[:, j] *= rate_bj[:, j - 1]  # torch.cumprod would carry fp64 from one to the next
    return rate_bj


def choose_total(rate_bj: Tensor, count_b: Tensor, *, cost: StepCost) -> Tensor:
    """N, the tokens of the step: the smallest one of greatest throughput, drafts of rate 0 included.

    Shapes:
        rate_bj: fp32 [b, j], two steps old; count_b: integer [b], drafts stored for each request; returns int64 [1].

    Edges:
        no request gives 0. A number beyond the largest graph is no candidate.

    Raises:
        ValueError: shapes disagree; a count is outside 0 … j; rates increase along a request, are NaN or outside
            [0, 1]; there are more requests than the largest graph has tokens.
        TypeError: rates are not fp32, or counts no integers.
    """
    pairs = _sorted_drafts(rate_bj, count_b)
    requests = len(count_b)
    if requests > cost.sizes[-1]:
        raise ValueError(f"rate_bj: expected at most {cost.sizes[-1]} requests for the largest graph, got {requests}")
    expected = torch.tensor(requests, dtype=torch.float32)
    best, total = expected.item() / step_time(requests, cost=cost), requests
    for extra, (rate, _, _) in enumerate(pairs, start=1):
        if requests + extra > cost.sizes[-1]:
            break
        expected = expected + torch.tensor(rate, dtype=torch.float32)
        throughput = expected.item() / step_time(requests + extra, cost=cost)
        if throughput > best:
            best, total = throughput, requests + extra
    return torch.tensor([total])


def step_time(tokens: int, *, cost: StepCost) -> float:
    """Milliseconds of a step of so many tokens: base of its graph, fp32 widened, then slope and sampler in fp64.

    Raises:
        ValueError: no graph is that large.
    """
    for size, base in zip(cost.sizes, cost.base_ms, strict=True):
        if size >= tokens:
            return torch.tensor(base, dtype=torch.float32).item() + max(0.0, cost.slope) * size + cost.sampler_ms
    raise ValueError(f"tokens: expected at most {cost.sizes[-1]}, got {tokens}")


def allocate(rate_bj: Tensor, count_b: Tensor, *, total: int) -> Tensor:
    """Rows that each request verifies in a step of `total` tokens: one, and one for each draft that wins a place.

    Shapes:
        rate_bj: fp32 [b, j], the newest; count_b: integer [b]; returns int32 [b], which add up to `total`.

    Raises:
        ValueError: shapes disagree; a count is outside 0 … j; rates increase along a request, are NaN or outside
            [0, 1]; `total` is below the number of requests or above all their rows.
        TypeError: rates are not fp32, or counts no integers.
    """
    pairs = _sorted_drafts(rate_bj, count_b)
    requests = len(count_b)
    if not requests <= total <= requests + len(pairs):
        raise ValueError(f"total: expected {requests} to {requests + len(pairs)}, got {total}")
    length_b = torch.ones(requests, dtype=torch.int32)
    for _, request, _ in pairs[: total - requests]:
        length_b[request] += 1
    return length_b


def _sorted_drafts(rate_bj: Tensor, count_b: Tensor) -> list[tuple[float, int, int]]:
    """(rate, request, position) of every stored draft: rate descending, then request and position ascending."""
    dims: dict[str, int] = {}
    expect_shape("rate_bj", rate_bj, "bj", dims)
    expect_shape("count_b", count_b, "b", dims)
    expect_dtype("rate_bj", rate_bj, torch.float32)
    expect_dtype("count_b", count_b, torch.int32, torch.int64)
    expect_in_range("count_b", count_b, 0, dims["j"] + 1)
    found = []
    for request, (rates, count) in enumerate(zip(rate_bj.tolist(), count_b.tolist(), strict=True)):
        stored = rates[:count]
        if any(not 0 <= rate <= 1 for rate in stored) or sorted(stored, reverse=True) != stored:
            raise ValueError(
                f"rate_bj: expected rates in [0, 1] that never increase, got {stored} of request {request}"
            )
        found += [(rate, request, j) for j, rate in enumerate(stored)]
    return sorted(found, key=lambda draft: (-draft[0], draft[1], draft[2]))


@dataclass(frozen=True, kw_only=True)
class RateHistory:
    """What the scheduler knows of one request: its two latest rate vectors, and how far its steps are processed."""

    previous: tuple[float, ...]  # of step N - 2; empty: there are none
    current: tuple[float, ...]  # of step N - 1
    scheduled: int  # steps handed to the device
    processed: int  # steps whose results came back
    stored: int  # drafts waiting to be verified
    unconsumed: bool = False  # drafts were written and not yet verified


def choose_rates(history: RateHistory) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The rates of a request for the choice of N, never newer than two steps, and for the (provisional) allocation.

    With a step in flight the newest vector on the CPU is two steps old already and serves for both. A missing vector
    counts as 1.0 where drafts exist that nobody has rated, as 0.0 otherwise.

    Raises:
        ValueError: more than one step is in flight, or a vector has not one rate for each stored draft.
    """
    ahead = history.scheduled - history.processed
    if ahead not in (0, 1):
        raise ValueError(f"scheduled: expected at most one step in flight, got {history.scheduled - history.processed}")
    filler = (1.0 if history.unconsumed or ahead == 1 else 0.0,) * history.stored
    for_total, for_places = (history.current if ahead else history.previous) or filler, history.current or filler
    for rates in (for_total, for_places):
        if len(rates) != history.stored:
            raise ValueError(f"stored: expected a rate for each of {history.stored} drafts, got {len(rates)}")
    return for_total, for_places


def full_lengths(count_b: Tensor) -> Tensor:
    """Rows of a step that is not scheduled (switch off, or no performance curve): one and every stored draft.

    Raises:
        ValueError: count_b has not one axis.
    """
    expect_shape("count_b", count_b, "b", {})
    return (count_b + 1).to(torch.int32)


def forward_slope(samples: Sequence[tuple[int, float]]) -> float:
    """Milliseconds a token that steps take beyond the curve, from samples (graph size, (measured - base) / size).

    The median over graph sizes of the median of each size; of the newest 5000 samples, sizes with 10 or more count.
    """
    by_size: dict[int, list[float]] = {}
    for size, value in samples[-FORWARD_WINDOW:]:
        by_size.setdefault(size, []).append(value)
    medians = [median(values) for values in by_size.values() if len(values) >= FORWARD_LEAST]
    return max(0.0, median(medians)) if medians else 0.0


def sampler_time(samples: Sequence[tuple[int, float]], *, requests: int) -> float:
    """Milliseconds of the sampler: the median of the last nine samples (requests, ms) of that many requests.

    With fewer than five of them the median of the last nine of all, with fewer than five of these 0.
    """
    own = [ms for count, ms in samples if count == requests][-SAMPLER_WINDOW:]
    every = [ms for _, ms in samples][-SAMPLER_WINDOW:]
    for values in (own, every):
        if len(values) >= SAMPLER_LEAST:
            return float(median(values))
    return 0.0
