"""How scheduled verification is checked: exact integers for exact rates, ties and saturated confidences included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import StepCost
from deeptwin.reference.dspark_curve import graph_sizes

from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Relation, variants
from ..relations import Context, Variant
from ..rules import Bitwise

_mutant, _control = variants("dspark_schedule")


@dataclass(frozen=True, kw_only=True)
class RatesCase:
    """`requests` with up to `draft` drafts each; `curve` is how the time of a step grows with its graph."""

    requests: int
    draft: int = 5
    curve: str = "line"  # line, flat, steps, dip, steep, ties, short, slope, fitted, near
    full: bool = True  # every request has all its drafts
    total: float = 0.5  # share of the drafts that get a place
    regime: str = "normal"  # normal, sure, ties, ones, zeros

    @property
    def id(self) -> str:
        counts = "all" if self.full else "some"
        return f"b{self.requests}-j{self.draft}-{self.curve}-{counts}-total{self.total:g}-{self.regime}"


def _confidences(case: RatesCase, rng: np.random.Generator) -> np.ndarray:
    shape = (case.requests, case.draft)
    if case.regime in ("ones", "zeros"):
        return np.full(shape, float(case.regime == "ones"), dtype=np.float32)
    if case.regime == "ties":
        return rng.choice(np.array([1.0, 0.5, 0.25, 0.0], dtype=np.float32), shape, p=[0.4, 0.3, 0.2, 0.1])
    return (rng.random(shape) ** (0.05 if case.regime == "sure" else 0.5)).astype(np.float32)


def _rates(case: RatesCase, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Products left to right; what stands beyond the stored drafts is poison."""
    rates = _confidences(case, rng)
    for j in range(1, case.draft):
        rates[:, j] *= rates[:, j - 1]
    count = np.full(case.requests, case.draft) if case.full else rng.integers(0, case.draft + 1, case.requests)
    poison = np.where(np.arange(case.requests)[:, None] % 2 == 0, np.nan, 2.0).astype(np.float32)
    rates = np.where(np.arange(case.draft)[None, :] < count[:, None], rates, poison)
    return torch.from_numpy(rates), torch.from_numpy(count.astype(np.int32))


def step_cost(case: RatesCase) -> StepCost:
    """Times that make the choice fall on one end, in between, on a tie, or beyond a dip."""
    most = max(case.requests, 1) * (1 + case.draft)
    if case.curve == "short":
        most = max(case.requests, 1) + case.draft
    sizes = graph_sizes(most, 0)
    x = np.array(sizes, dtype=np.float64)
    base = {
        "line": 10 + x * 0.7,
        "short": 10 + x * 0.1,
        "flat": x * 0 + 10.1,
        "steps": 10 + np.floor(x / 20) * 7,
        "dip": np.where(x < most * 0.6, 3 + x, 4.0),  # a larger graph that is faster
        "steep": x**2,
        "ties": x,  # with rates of one every number is worth the same
        "slope": 10 + x * 0.001,
        "fitted": x * 0 + 1,
        "near": x * (1 - 1e-9 * np.arange(len(x))),  # ties once the times are fp32
    }[case.curve]
    plain = case.curve in ("ties", "dip", "fitted", "near")
    slope = 0.45 if case.curve == "slope" else 0.013
    return StepCost(
        sizes=sizes,
        base_ms=tuple(base.tolist()),
        slope=0.0 if plain else slope,
        sampler_ms=0.0 if plain else 1.7,
    )


def draw_confidences(case: RatesCase, rng: np.random.Generator) -> Inputs:
    """Some confidences are NaN."""
    confidence = _confidences(case, rng)
    if case.regime == "normal":
        confidence[rng.random(confidence.shape) < 0.1] = np.nan
    return {"confidence_bj": torch.from_numpy(confidence)}


def draw_total(case: RatesCase, rng: np.random.Generator) -> Inputs:
    """Rates, counts and a curve; a fitted one makes all graphs worth the same but for the last bits of fp32."""
    rate, count = _rates(case, rng)
    cost = step_cost(case)
    if case.curve == "fitted":
        expected = case.requests + np.cumsum(np.sort(rate.double().numpy(), axis=None)[::-1])
        worth = tuple(float(expected[size - case.requests - 1]) for size in cost.sizes if size > case.requests)
        cost = replace(cost, sizes=cost.sizes[-len(worth) :], base_ms=worth)
    return {"rate_bj": rate, "count_b": count, "cost": cost}


def draw_places(case: RatesCase, rng: np.random.Generator) -> Inputs:
    """Rates, counts and a total."""
    rate, count = _rates(case, rng)
    return {"rate_bj": rate, "count_b": count, "total": case.requests + round(case.total * int(count.sum()))}


def cases_rates(full: bool) -> list[RatesCase]:
    """Every regime, no request, one position."""
    small = RatesCase(requests=3)
    found = [replace(small, regime=r) for r in ("normal", "sure", "ties", "ones", "zeros")]
    return [*found, replace(small, requests=0), replace(small, draft=1), RatesCase(requests=130, draft=3)]


def cases_total(full: bool) -> list[RatesCase]:
    """Every curve with rates that differ and with rates that tie; counts that differ; nothing to choose."""
    small = RatesCase(requests=4)
    curves = ("line", "flat", "steps", "dip", "steep", "ties", "short")
    found = [replace(small, curve=c, regime=r) for c in curves for r in ("normal", "ties")]
    found += [replace(small, curve="ties", regime="ones"), replace(small, curve="dip", regime="zeros")]
    found += [replace(small, full=False, curve=c, requests=9) for c in ("line", "steps", "flat", "short")]
    found += [replace(small, requests=0), replace(small, requests=1, draft=1), replace(small, regime="sure")]
    found += [RatesCase(requests=60, curve=c, regime="sure") for c in ("line", "steps", "slope", "fitted")]
    found += [
        replace(small, curve="near", regime="ones"),
        RatesCase(requests=40, curve="fitted"),
        RatesCase(requests=30, curve="slope"),
    ]
    if full:
        found += [RatesCase(requests=n, curve=c, full=False) for n in (2, 17, 200) for c in curves]
    return found


def cases_places(full: bool) -> list[RatesCase]:
    """Ties, all and no places, counts that differ, more drafts than one program ranks."""
    small = RatesCase(requests=5)
    found = [replace(small, regime=r) for r in ("normal", "sure", "ties", "ones", "zeros")]
    found += [replace(small, total=t, regime="ties") for t in (0.0, 0.2, 0.9, 1.0)]
    found += [replace(small, full=False, regime=r, total=t) for r in ("normal", "ties") for t in (0.3, 0.7)]
    found += [replace(small, requests=0), replace(small, requests=1, draft=1), RatesCase(requests=70, regime="ties")]
    found += [RatesCase(requests=9, draft=32, full=False, regime="ones", total=0.4)]
    return [*found, RatesCase(requests=512, regime="ties", full=False)] if full else found


def golden() -> list[RatesCase]:
    """One case of ties."""
    return [RatesCase(requests=4, regime="ties", full=False)]


# relation hooks


def later_tokens_change(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Non-anticipation: whether a draft has a place does not depend on the rates behind it in its request."""
    rate, count, total = inputs["rate_bj"], inputs["count_b"], inputs["total"]
    for request in range(min(len(count), 3)):
        for j in range(int(count[request])):
            changed = rate.clone()
            changed[request, j + 1 :] = 0.0

            def admitted(outputs: Outputs, request: int = request, j: int = j) -> Outputs:
                return {"length_b": (outputs["length_b"][request : request + 1] > j + 1).to(torch.int32)}

            yield Variant(
                label=f"rates behind draft {j} of request {request}",
                calls=(inputs | {"rate_bj": changed, "total": total},),
                join=lambda results, see=admitted: see(results[0]),  # type: ignore[misc]
                expect=admitted,
            )
    if not len(count) or not int(count.max()):
        yield Variant(label="nothing to change", calls=(inputs,))


def requests_renumbered(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Requests in another order keep their lengths where no rates tie."""
    order = torch.from_numpy(context.rng.permutation(len(inputs["count_b"])))
    changed = inputs | {name: inputs[name][order].contiguous() for name in ("rate_bj", "count_b")}
    yield Variant(
        label="requests renumbered",
        calls=(changed,),
        expect=lambda outputs: {"length_b": outputs["length_b"][order]},
    )


def untied(case: RatesCase) -> bool:
    """Renumbering moves ties."""
    return case.regime == "normal" and 1 < case.requests < 20


ONE_KERNEL = "every size is a kernel of its own to lower"

SURVIVAL = Op(
    name="survival_rates",
    reference="deeptwin.reference.dspark_schedule:survival_rates",
    outputs=(Output(name="rate_bj", rule=Bitwise(), dtype=torch.float32),),
    cases=cases_rates,
    draw=draw_confidences,
    rows={"confidence_bj": 0},
    out_rows={"rate_bj": 0},
    tile=128,
    relations=(
        Relation(name="batch_invariant", axis="requests", only=lambda case: case.requests == 3),
        Relation(name="run_to_run", axis="repeats", only=lambda case: case.requests == 3),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark_schedule:survival_rates_triton",
            lowered_declines=lambda case: None if (case.requests, case.draft) == (3, 5) else ONE_KERNEL,
        ),
    ),
    builds=(
        BuildCase(
            name="b512-j5",
            kernel="deeptwin.kernels.triton_ops.dspark_schedule:_survival_rates",
            launch="deeptwin.parity.builds.launches.dspark_schedule:survival",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("nan_as_one", "U75", "a NaN confidence counts as certain"),
        _mutant("products_in_f64", "U17", "the products are carried in fp64"),
        _mutant("without_own", "U61", "a draft's own confidence is left out"),
        _mutant("through_logarithms", "U17", "exp of a sum of logarithms"),
        _mutant("not_multiplied", "U49", "confidences instead of their products"),
    ),
    controls=(_control("right_survival"),),
    golden=golden,
)

TOTAL = Op(
    name="choose_total",
    reference="deeptwin.reference.dspark_schedule:choose_total",
    outputs=(Output(name="total", rule=Bitwise(), dtype=torch.int64),),
    cases=cases_total,
    draw=draw_total,
    rows={},
    out_rows={},
    candidates=(
        Candidate(
            name="vectorised", function="deeptwin.optimized.dspark_schedule:choose_total_vectorised", archs=("cpu",)
        ),
    ),
    mutants=(
        _mutant("early_stop", "U90", "stops at the first number that is not better: not the global maximum"),
        _mutant("largest_of_ties", "U45", "of equal throughputs the largest number wins"),
        _mutant("time_between_graphs", "U73", "the time of a number of tokens, not of the graph that runs them"),
        _mutant("graph_below", "U73", "the graph below the number of tokens"),
        _mutant("zero_rates_left_out", "U26", "drafts of rate 0 are no candidates"),
        _mutant("requests_not_expected", "U61", "the one certain token of each request does not count"),
        _mutant("sampler_left_out", "U49", "the time of the sampler is left out"),
        _mutant("slope_by_tokens", "U73", "the slope multiplies tokens instead of the graph's size"),
        _mutant("slope_left_out", "U49", "the online correction is left out"),
        _mutant("expected_in_f64", "U17", "the expected count is added up in fp64"),
        _mutant("base_in_f64", "U17", "times of the curve are not rounded to fp32"),
        _mutant("beyond_the_largest", "U73", "numbers beyond the largest graph take its time"),
        _mutant("counts_ignored", "U75", "positions without a stored draft count"),
        _mutant("rates_unsorted", "U46", "drafts are taken in the order of requests"),
    ),
    controls=(_control("right_total"),),
    golden=golden,
)

PLACES = Op(
    name="allocate",
    reference="deeptwin.reference.dspark_schedule:allocate",
    outputs=(Output(name="length_b", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_places,
    draw=draw_places,
    rows={},
    out_rows={},
    relations=(
        Relation(
            name="causality",
            axis="drafts behind the one that is admitted",
            hook=later_tokens_change,
            only=lambda case: case.requests < 6,
        ),
        Relation(name="head_permutation", axis="requests", hook=requests_renumbered, only=untied),
        Relation(name="run_to_run", axis="repeats", only=lambda case: case.regime == "ties" and case.requests < 6),
    ),
    candidates=(
        Candidate(name="vectorised", function="deeptwin.optimized.dspark_schedule:allocate_vectorised"),
        Candidate(
            name="triton",
            function="deeptwin.optimized.dspark_schedule:allocate_triton",
            lowered_declines=lambda case: None if (case.requests, case.draft) == (5, 5) else ONE_KERNEL,
        ),
    ),
    builds=(
        BuildCase(
            name="b512-j5",
            kernel="deeptwin.kernels.triton_ops.dspark_schedule:_allocate",
            launch="deeptwin.parity.builds.launches.dspark_schedule:places",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("ties_by_position", "U45", "of equal rates the smaller position wins, then the request"),
        _mutant("ties_to_the_last", "U45", "of equal rates the larger request wins"),
        _mutant("ties_change", "U46", "how a tie falls depends on the call"),
        _mutant("one_place_more", "U26", "one place too many"),
        _mutant("one_place_less", "U26", "one place too few"),
        _mutant("empty_positions_win", "U75", "positions without a stored draft get places"),
        _mutant("places_in_turn", "U49", "every request gets a place in turn"),
        _mutant("single_confidences", "U49", "drafts are ranked by their own confidence, so winners are no prefix"),
        _mutant("fresh_row_missing", "U61", "the row that is always verified is left out"),
        _mutant("total_as_places", "U61", "all tokens of the step are places for drafts"),
    ),
    controls=(_control("right_places"),),
    golden=golden,
)

CARD = Card(
    component="dspark_schedule",
    summary="confidence-scheduled verification: survival, the number of tokens of a step, who gets the places",
    contract={
        "rates": "fp32, products left to right; NaN confidences count as 0; never increasing along a request",
        "total": "global maximum of (S + Σ rates) / time, N from S up, strict comparison: the smallest wins ties",
        "rounding": "the expected count in fp32 in sorted order; times and quotient in fp64, curve times fp32 widened",
        "ties": "equal rates: request ascending, then position ascending (SGLang: position first)",
        "age": "N from rates two steps old, places from the newest; `choose_rates` says which these are",
        "lossless": "only if N does not depend on the tokens: a two-step-old confidence still correlates where drafts "
        "of a position use its random words again (tests, `negative controls`)",
    },
    ops=(SURVIVAL, TOTAL, PLACES),
    equivalents=(
        Equivalent(name="stable sort of the flat rates", reason="flat order is request, then position"),
        Equivalent(
            name="drafts ranked across requests by position first where no rates tie", reason="the order never shows"
        ),
    ),
)
