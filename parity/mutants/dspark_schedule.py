"""Scheduled verification in plain Python and numpy, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import StepCost


@dataclass(frozen=True, kw_only=True)
class Total:
    """What the choice of N does wrong; the default is right."""

    early_stop: bool = False
    ties: str = "smallest"  # smallest, largest
    graph: str = "rounded_up"  # rounded_up, exact, rounded_down
    zero_rates: bool = True
    requests_count: bool = True  # the S tokens that are certain count in the expectation
    sampler: bool = True
    slope: str = "graph"  # graph, tokens, none
    expected: str = "f32"  # f32, f64
    base: str = "f32"  # f32, f64
    beyond: bool = False  # numbers beyond the largest graph take its time
    counts: bool = True  # positions beyond the stored drafts are left out
    rates: str = "survival"  # survival, request_order


def _choose(faults: Total) -> Callable[..., Tensor]:
    def choose_total(rate_bj: Tensor, count_b: Tensor, *, cost: StepCost) -> Tensor:
        requests, found = len(count_b), []
        for rates, count in zip(rate_bj.tolist(), count_b.tolist(), strict=True):
            found += rates[: count if faults.counts else len(rates)]
        if faults.rates != "request_order":
            found.sort(reverse=True)
        if not faults.zero_rates:
            found = [rate for rate in found if rate > 0]
        kind = np.float32 if faults.expected == "f32" else np.float64
        expected = kind(requests if faults.requests_count else 0)
        best, total = -1.0, requests
        for extra in range(len(found) + 1):
            tokens = requests + extra
            if tokens > cost.sizes[-1] and not faults.beyond:
                break
            if extra:
                expected = kind(expected + kind(found[extra - 1]))
            value = float(expected) / _time(faults, tokens, cost)
            if value > best or (faults.ties == "largest" and value == best):
                best, total = value, tokens
            elif faults.early_stop:
                break
        return torch.tensor([total])

    return choose_total


def _time(faults: Total, tokens: int, cost: StepCost) -> float:
    at = int(np.searchsorted(cost.sizes, tokens))
    if faults.graph == "rounded_down" and at and (at == len(cost.sizes) or cost.sizes[at] != tokens):
        at -= 1
    at = min(at, len(cost.sizes) - 1)
    size, base = cost.sizes[at], cost.base_ms[at]
    if faults.graph == "exact" and at and size != tokens:  # a straight line between captured sizes
        share = (tokens - cost.sizes[at - 1]) / (size - cost.sizes[at - 1])
        base = cost.base_ms[at - 1] + share * (base - cost.base_ms[at - 1])
    base = float(np.float32(base)) if faults.base == "f32" else base
    slope = {"graph": size, "tokens": tokens, "none": 0}[faults.slope] * cost.slope
    return base + slope + (cost.sampler_ms if faults.sampler else 0.0)


right_total = _choose(Total())
early_stop = _choose(Total(early_stop=True))
largest_of_ties = _choose(Total(ties="largest"))
time_between_graphs = _choose(Total(graph="exact"))
graph_below = _choose(Total(graph="rounded_down"))
zero_rates_left_out = _choose(Total(zero_rates=False))
requests_not_expected = _choose(Total(requests_count=False))
sampler_left_out = _choose(Total(sampler=False))
slope_by_tokens = _choose(Total(slope="tokens"))
slope_left_out = _choose(Total(slope="none"))
expected_in_f64 = _choose(Total(expected="f64"))
base_in_f64 = _choose(Total(base="f64"))
beyond_the_largest = _choose(Total(beyond=True))
counts_ignored = _choose(Total(counts=False))
rates_unsorted = _choose(Total(rates="request_order"))


@dataclass(frozen=True, kw_only=True)
class Places:
    """What the allocation does wrong; the default is right."""

    ties: str = "request"  # request, position, last_request, unstable
    extra: int = 0
    counts: bool = True
    rounds: bool = False  # one place for every request in turn
    order: str = "rate"  # rate, single
    base: int = 1
    places: str = "drafts"  # drafts, total


_calls = 0


def _allocate(faults: Places) -> Callable[..., Tensor]:
    def allocate(rate_bj: Tensor, count_b: Tensor, *, total: int) -> Tensor:
        global _calls
        _calls += 1
        found = []
        for request, (rates, count) in enumerate(zip(rate_bj.tolist(), count_b.tolist(), strict=True)):
            own = rates[: count if faults.counts else len(rates)]
            if faults.order == "single":  # the confidence of a draft itself
                own = [b / a if a else 0.0 for a, b in zip([1.0, *own], own, strict=False)]
            found += [(rate, request, j) for j, rate in enumerate(own)]
        keys = {
            "request": lambda d: (-d[0], d[1], d[2]),
            "position": lambda d: (-d[0], d[2], d[1]),
            "last_request": lambda d: (-d[0], -d[1], d[2]),
            "unstable": lambda d: (-d[0], d[1] * (-1) ** _calls, d[2]),
        }
        key = (lambda d: (d[2], d[1])) if faults.rounds else keys[faults.ties]
        places = total + faults.extra - (len(count_b) if faults.places == "drafts" else 0)
        length = torch.full((len(count_b),), faults.base, dtype=torch.int32)
        for _, request, _ in sorted(found, key=key)[: max(places, 0)]:
            length[request] += 1
        return length

    return allocate


right_places = _allocate(Places())
ties_by_position = _allocate(Places(ties="position"))
ties_to_the_last = _allocate(Places(ties="last_request"))
ties_change = _allocate(Places(ties="unstable"))
one_place_more = _allocate(Places(extra=1))
one_place_less = _allocate(Places(extra=-1))
empty_positions_win = _allocate(Places(counts=False))
places_in_turn = _allocate(Places(rounds=True))
single_confidences = _allocate(Places(order="single"))
fresh_row_missing = _allocate(Places(base=0))
total_as_places = _allocate(Places(places="total"))


def _survival(
    *, nan: float = 0.0, wide: bool = False, shifted: bool = False, log: bool = False
) -> Callable[..., Tensor]:
    def survival_rates(confidence_bj: Tensor) -> Tensor:
        x = torch.where(confidence_bj.isnan(), nan, confidence_bj)
        if log:
            return x.log().cumsum(1).exp()
        if wide:
            return x.double().cumprod(1).float()
        out = x.clone()
        for j in range(1, x.shape[1]):
            out[:, j] = out[:, j - 1] * x[:, j]
        return torch.cat([torch.ones_like(out[:, :1]), out[:, :-1]], 1) if shifted else out

    return survival_rates


right_survival = _survival()
nan_as_one = _survival(nan=1.0)
products_in_f64 = _survival(wide=True)
without_own = _survival(shifted=True)
through_logarithms = _survival(log=True)


def not_multiplied(confidence_bj: Tensor) -> Tensor:
    """The confidences themselves."""
    return torch.where(confidence_bj.isnan(), 0, confidence_bj)
