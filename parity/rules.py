"""How one output is judged: the rules R1, R2, R6, R9 and R16 of the parity rules, as data with their measured limits.

A rule sees the candidate's tensor and the oracles of the same inputs and says how much of its budget was used. The
limits below were fixed by `python -m deeptwin.parity.evidence`; its results stand in `parity/evidence/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics

from .floats import raw_bytes, row_rms, ulp_distance, unit_roundoff
from .outcome import Worst

RATE_LIMIT = 1e-3  # R2: share of elements that may differ by one ulp
RATE_MIN_ELEMENTS = 10_000  # R2: below this many elements the share says nothing
SMALLEST_NORMAL = 2.0**-126  # of fp32 and bf16
ROW_MIN_ELEMENTS = 64  # R1: below this many elements a row's rms is too uncertain a yardstick


class Oracles(Protocol):
    """The oracles of one output for one set of inputs, in fp64 (codes and indices in their own dtype)."""

    @property
    def semantic(self) -> Tensor: ...

    @property
    def contract(self) -> Tensor: ...

    @property
    def rival(self) -> Tensor: ...

    @property
    def marks(self) -> list[tuple[str, Tensor]]:
        """The input of every mark that CONTRACT applied, by name, in order."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The inputs of the case."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a rule found: whether it holds, how much of the budget was used, and where it was worst."""

    ok: bool
    used: float
    message: str = ""
    worst: Worst | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Rule(Protocol):
    """A way to judge one output whose type, dtype, shape and non-finite positions already agree."""

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement: ...


@dataclass(frozen=True, kw_only=True)
class OfOutputs:
    """What a rule is given that also reads the candidate's other outputs; the judge sets it."""

    outputs: Mapping[str, Tensor] = field(default_factory=dict)


def at(index: int, shape: torch.Size) -> tuple[int, ...]:
    """The coordinate of flat position `index`."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(index), shape))


def worst_at(got: Tensor, expected: Tensor, badness: Tensor) -> Worst:
    """Both values at the position where `badness` is largest; `expected` is rounded to the dtype of `got`."""
    index = at(int(badness.reshape(-1).argmax()), got.shape)
    rounded = expected if expected.dtype == got.dtype else expected.to(got.dtype)
    ulps = ulp_distance(got[index].reshape(1), rounded[index].reshape(1)).item() if got.is_floating_point() else None
    return Worst(index=index, got=f"{got[index].item():.9g}", expected=f"{expected[index].item():.9g}", ulps=ulps)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """R1: as far from the meaning as honest arithmetic, measured against RIVAL's own distance on the same inputs.

    u is 2^-p of the output's dtype, a row is the last axis, and unit = u·max(|O|, rms of O's row). Four limits:
    every element, every row, the whole tensor, and the mean signed error (which sees truncation and offsets).
    `scale` is the least magnitude that rounding happens at: an LSE near zero is a difference of two numbers of order
    one. A device may flush what lies under the smallest normal fp32 number: there zero is right, and no unit is smaller
    than it. A row that is all zero has no unit and must be hit exactly.
    Rows of fewer than 64 elements are pooled with their neighbours for the row limit: on 16 elements RIVAL's own
    rms is lucky by a factor of two once in some ten thousand rows (measured: 1 of 1 750 draws raised an alarm).
    """

    kind: str = "bf16 attention"
    element_factor: float = 2.0
    element_slack: float = 2.0
    row: float = 2.0
    total: float = 1.25
    floor: float = 0.25
    scale: float = 0.0
    bias: float = 0.1
    bias_t: float = 6.0

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge `got` against SEMANTIC, with RIVAL as the yardstick."""
        if got.numel() == 0:
            return Judgement(ok=True, used=0.0)
        # non-finite positions were compared before; an overflow of the storage dtype is one of them
        finite = oracles.semantic.to(got.dtype).isfinite()
        truth = torch.where(finite, oracles.semantic, 0.0)
        ours = torch.where(finite, got.to(torch.float64), 0.0) - truth
        ours = torch.where((got == 0) & (truth.abs() < SMALLEST_NORMAL), 0.0, ours)
        theirs = torch.where(finite & oracles.rival.isfinite(), oracles.rival.to(torch.float64), truth) - truth
        u = unit_roundoff(got.dtype)
        unit = u * torch.maximum(truth.abs(), row_rms(truth).clamp_min(self.scale))
        unit = torch.where(row_rms(truth) > 0, unit.clamp_min(SMALLEST_NORMAL), unit)
        pooled = _pooled_rms(truth, finite)
        least = torch.where(pooled > 0, (self.floor * u * pooled.clamp_min(self.scale)).clamp_min(SMALLEST_NORMAL), 0.0)
        yardstick = _at_least(_pooled_rms(theirs, finite), least)
        used = {
            "element": self._element(ours, theirs, unit),
            "row": (_pooled_rms(ours, finite) / yardstick).max().item() / self.row,
            "total": _ratio(_rms(ours), max(_rms(theirs), _rms(least))) / self.total,
            "bias": self._bias(ours, truth, unit),
        }
        name = max(used, key=lambda key: float("inf") if math.isnan(used[key]) else used[key])
        return Judgement(
            ok=all(value < 1.0 or value == 0.0 for value in used.values()),
            used=used[name],
            message=f"{name} error uses {used[name]:.3g} of its budget",
            worst=worst_at(got, oracles.semantic, ours.abs() / _at_least(unit, 1e-300)),
            metrics={f"{key}_used": value for key, value in used.items()} | {"D": _global_difference(got, truth)},
        )

    def _element(self, ours: Tensor, theirs: Tensor, unit: Tensor) -> float:
        worst = _in_units(ours, unit).max().item()
        return worst / (self.element_factor * _in_units(theirs, unit).max().item() + self.element_slack)

    def _bias(self, ours: Tensor, truth: Tensor, unit: Tensor) -> float:
        means = _in_units(ours * truth.sign(), unit, signed=True).mean(-1).reshape(-1)
        if means.numel() < 32:
            return 0.0
        mean, spread = abs(means.mean().item()), means.std().item() / means.numel() ** 0.5
        return min(mean / self.bias, _ratio(mean, spread) / self.bias_t)


def _pooled_rms(x: Tensor, counted: Tensor) -> Tensor:
    """Root mean square of every row, rows of fewer than ROW_MIN_ELEMENTS counted elements pooled with neighbours."""
    squares, counts = x.square().sum(-1).reshape(-1), counted.sum(-1).reshape(-1)
    pool = _pools(counts)
    pools = int(pool[-1]) + 1 if len(pool) else 1
    total = torch.zeros(pools, dtype=x.dtype).index_add_(0, pool, squares)
    count = torch.zeros(pools, dtype=x.dtype).index_add_(0, pool, counts.to(x.dtype))
    return (total / count.clamp_min(1.0)).sqrt()


def _pools(counts: Tensor) -> Tensor:
    """The pool of every row: as even as they come for rows of one width, else closed when it has enough elements."""
    rows, width = len(counts), int(counts.max()) if len(counts) else 0
    if rows and width and bool((counts == width).all()):
        return torch.arange(rows) * max(1, rows // -(-ROW_MIN_ELEMENTS // width)) // rows
    pool, found, held = [], 0, 0
    for count in counts.tolist():
        pool.append(found)
        held += count
        if held >= ROW_MIN_ELEMENTS:
            found, held = found + 1, 0
    # what is left over at the end is too little by itself
    return torch.tensor(pool, dtype=torch.int64).clamp_max(max(found - 1, 0))


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _ratio(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else float("inf"))


def _at_least(x: Tensor, floor: Tensor | float) -> Tensor:
    floor = torch.as_tensor(floor, dtype=x.dtype)
    return torch.maximum(x, floor).clamp_min(1e-300)


def _in_units(error: Tensor, unit: Tensor, *, signed: bool = False) -> Tensor:
    size = error if signed else error.abs()
    # an all-zero row has no unit: it must be hit exactly
    return torch.where(error == 0, 0.0, size / unit)


def _global_difference(got: Tensor, truth: Tensor) -> float:
    """D of R3: reported beside the verdict, never the rule."""
    x, y = torch.where(got.isfinite(), got.to(torch.float64), 0.0), truth
    norm = (x.square() + y.square()).sum().item()
    return (x - y).square().sum().item() / norm if norm else 0.0


@dataclass(frozen=True, kw_only=True)
class Close:
    """For peers: the relative Frobenius distance to SEMANTIC, which the peer's own arithmetic explains."""

    rtol: float

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge ‖got − O‖ / ‖O‖ over the whole tensor."""
        finite = oracles.semantic.isfinite()
        truth = torch.where(finite, oracles.semantic, 0.0)
        error = torch.where(finite, got.to(torch.float64), 0.0) - truth
        distance = _ratio(error.norm().item(), truth.norm().item())
        return Judgement(
            ok=distance <= self.rtol,
            used=distance / self.rtol,
            message=f"relative distance {distance:.3g}, allowed {self.rtol:.3g}",
            worst=worst_at(got, oracles.semantic, error.abs()) if got.numel() else None,
            metrics={"distance": distance},
        )


@dataclass(frozen=True, kw_only=True)
class OneRounding:
    """R2: one rounding and no long contraction. Every element within one ulp of CONTRACT, at most 1e-3 differ.

    `cancellation` counts ulps at no less than that share of the row's rms: where a short sum cancels, an fp32
    evaluation is off by more than an ulp of the tiny result although every step was rounded once (RoPE pairs).
    The share of differing elements is judged here only when the tensor is large enough; the gate also judges it
    over all cases of a regime together. One burst is allowed on top: a bf16 row has 128 mantissas, and where an honest
    last-bit difference of the row's scale moves one product across a midpoint, all elements with that mantissa flip
    together (measured on norms: 42 of 15 360 in one of 4 500 judgements). Truncation differs in half of the elements.
    """

    cancellation: float = 0.0

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge `got` against CONTRACT rounded to the dtype of `got`."""
        expected = oracles.contract.to(got.dtype)
        ulps = torch.where(got.isfinite(), ulp_distance(got, expected), 0).to(torch.float64)
        differ = int((ulps > 0).sum())
        if self.cancellation and got.numel():
            wide = torch.where(expected.isfinite(), expected.to(torch.float64), 0.0)
            step = 2 * unit_roundoff(got.dtype) * self.cancellation * row_rms(wide)
            small = (got.to(torch.float64) - wide).abs() <= step
            ulps = torch.where(small, ulps.clamp_max(1), ulps)
        worst_ulps = ulps.max().item() if ulps.numel() else 0.0
        burst = got.shape[-1] * 4 * unit_roundoff(got.dtype)
        allowed = RATE_LIMIT * max(got.numel(), RATE_MIN_ELEMENTS) + burst
        rate_used = differ / allowed if got.numel() >= RATE_MIN_ELEMENTS else 0.0
        used = max(worst_ulps / 2.0 if worst_ulps > 1 else 0.0, rate_used)
        return Judgement(
            ok=worst_ulps <= 1 and rate_used <= 1.0,
            used=used if used > 0 else differ / allowed,
            message=f"{worst_ulps:g} ulp at worst, {differ} of {got.numel()} elements differ",
            worst=worst_at(got, expected, ulps) if differ else None,
            metrics={
                "ulps": worst_ulps,
                "differ": float(differ),
                "elements": float(got.numel()),
                "burst": burst,
            },
        )


@dataclass(frozen=True)
class Bitwise:
    """R6: equal bytes; only where nothing but exact operations precede.

    A NaN of two bytes or more equals any other: arithmetic leaves its sign and payload to the processor.
    """

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Compare bytes with CONTRACT."""
        expected = oracles.contract.to(got.dtype)
        size = got.element_size()
        wrong = (raw_bytes(got) != raw_bytes(expected)).reshape(got.numel(), size).any(-1)
        if got.is_floating_point() and size > 1:
            wrong = wrong & ~(got.isnan() & expected.isnan()).reshape(-1)
        count = int(wrong.sum())
        if not count:
            return Judgement(ok=True, used=0.0, metrics={"differ": 0.0, "elements": float(got.numel())})
        return Judgement(
            ok=False,
            used=float("inf"),
            message=f"{count} of {got.numel()} elements differ in their bytes",
            worst=_byte_worst(got, expected, wrong),
            metrics={"differ": float(count), "elements": float(got.numel())},
        )


def _byte_worst(got: Tensor, expected: Tensor, wrong: Tensor) -> Worst:
    flat = int(wrong.nonzero()[0])
    size = got.element_size()

    def text(x: Tensor) -> str:
        start = flat * size
        hexed = bytes(raw_bytes(x)[start : start + size].flip(0).tolist()).hex().upper()
        value = x.reshape(-1)[flat].to(torch.float64).item()
        return f"0x{hexed} ({value:.9g})"

    return Worst(index=at(flat, got.shape), got=text(got), expected=text(expected))


@dataclass(frozen=True, kw_only=True)
class Codes(OfOutputs):
    """R2 for quantised outputs behind arithmetic: bytes may differ only where the contract is within u of a step.

    `allowed(marks, arguments, u)` gives the lowest and the highest code that an evaluation with relative error u
    before the first mark may produce, in value order; `order` maps bytes to that order. `arguments` also holds the
    candidate's outputs by name, because a scale that moved lawfully moves every code of its group.
    """

    u: float
    allowed: Callable[[list[tuple[str, Tensor]], dict[str, Any], float], tuple[Tensor, Tensor]]
    order: Callable[[Tensor], Tensor]

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Every code inside its allowed interval, which is at most one step wide."""
        low, high = self.allowed(oracles.marks, {**oracles.arguments, **self.outputs}, self.u)
        codes, contract = self.order(got), oracles.contract.to(got.dtype)
        outside = (codes < low) | (codes > high)
        differ = int((raw_bytes(got) != raw_bytes(contract)).sum())
        count = int(outside.sum())
        expected = self.order(contract)
        worst = None
        if count:
            where = at(int(outside.reshape(-1).to(torch.int8).argmax()), codes.shape)
            worst = Worst(index=where, got=f"step {codes[where].item()}", expected=f"step {expected[where].item()}")
        return Judgement(
            ok=count == 0,
            used=float("inf") if count else 0.0,
            message=f"{count} of {codes.numel()} codes differ away from a rounding boundary ({differ} differ in all)",
            worst=worst,
            metrics={"differ": float(differ), "outside": float(count), "elements": float(codes.numel())},
        )


@dataclass(frozen=True, kw_only=True)
class Within(OfOutputs):
    """For values behind a choice that the candidate makes: inside the interval of honest results for its own choice.

    `interval(arguments, u)` gives the lowest and the highest value when every step may be off by a relative u;
    `arguments` also holds the candidate's outputs by name.
    """

    u: float
    interval: Callable[[dict[str, Any], float], tuple[Tensor, Tensor]]

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Every element inside its interval."""
        low, high = self.interval({**oracles.arguments, **self.outputs}, self.u)
        value = got.to(torch.float64)
        inside = (value >= low) & (value <= high)
        middle, half = (low + high) / 2, (high - low) / 2
        used = torch.where(value == middle, 0.0, (value - middle).abs() / half.clamp_min(1e-300))
        count = int((~inside).sum())
        return Judgement(
            ok=count == 0,
            used=used.max().item() if used.numel() else 0.0,
            message=f"{count} of {got.numel()} values outside the interval of honest results",
            worst=worst_at(got, middle, torch.where(inside, 0.0, used)) if count else None,
            metrics={"outside": float(count), "interval_used": used.max().item() if used.numel() else 0.0},
        )


@dataclass(frozen=True, kw_only=True)
class OfStored(OfOutputs):
    """The rule of a later step, judged on what the candidate itself stored of an earlier one.

    A stored element may lawfully lie one step beside the contract's, and what is made of it then differs by more than
    the later step's own error. `again(arguments, outputs, num)` is the reference of the later step, on those outputs.
    """

    rule: Rule
    again: Callable[[dict[str, Any], Mapping[str, Tensor], Numerics], Tensor]

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge `got` by `rule`, with the oracles of the later step."""
        try:
            return self.rule.judge(got, _Again(self, oracles.arguments))
        except (ValueError, TypeError) as error:
            message = f"the later step refuses what was stored: {error}"
            return Judgement(ok=False, used=float("inf"), message=message)


@dataclass(frozen=True)
class _Again:
    """Oracles of a step that starts from stored values."""

    of: OfStored
    arguments: dict[str, Any]

    def _run(self, num: Numerics) -> Tensor:
        return self.of.again(self.arguments, self.of.outputs, num)

    @property
    def semantic(self) -> Tensor:
        return self._run(SEMANTIC)

    @property
    def contract(self) -> Tensor:
        return self._run(CONTRACT)

    @property
    def rival(self) -> Tensor:
        return self._run(RIVAL)

    @property
    def marks(self) -> list[tuple[str, Tensor]]:
        marks: list[tuple[str, Tensor]] = []
        self._run(CONTRACT.observed(lambda name, x: marks.append((name, x))))
        return marks


@dataclass(frozen=True, kw_only=True)
class TopK:
    """R9: a selection of k indices per row, judged on the contract's scores.

    `scores` names the argument that holds the scores [rows, s], and `lengths` the one that says how many count;
    NaN and −inf are never selected. With `ties="lower"` equal scores at the k-th place go to the lower index (−0 = +0);
    with `ties="any"` any of them. `crossing` is how far, absolute and of the largest score, a score left out may exceed
    a chosen one: nothing where the scores are the operation's own input. With `ascending` the indices come in that
    order, −1 behind them.
    """

    scores: str
    ties: str = "lower"
    lengths: str | None = None
    crossing: float = 1e-5
    ascending: bool = False

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Valid range, unique, count = min(k, valid), no crossing above the tolerance, then the tie rule."""
        scores = oracles.arguments[self.scores].to(torch.float64)
        if self.lengths is not None:
            beyond = torch.arange(scores.shape[1]) >= oracles.arguments[self.lengths][:, None]
            scores = scores.masked_fill(beyond, torch.nan)
        crossed = 0.0
        for row in range(got.shape[0]):
            problem, crossing = self._row_problem(got[row], scores[row])
            crossed = max(crossed, crossing)
            if problem:
                expected = oracles.contract[row].tolist()
                worst = Worst(index=(row,), got=str(got[row].tolist()), expected=str(expected))
                return Judgement(ok=False, used=float("inf"), message=f"row {row}: {problem}", worst=worst)
        return Judgement(ok=True, used=0.0, metrics={"crossing": crossed})

    def _row_problem(self, got: Tensor, scores: Tensor) -> tuple[str | None, float]:
        """What is wrong with a row, and how far a score left out exceeds a chosen one, of the largest score."""
        picked = got[got >= 0].to(torch.int64)
        if ((got >= scores.numel()) | (got < -1)).any():
            return f"index out of range 0..{scores.numel() - 1}", 0.0
        if picked.unique().numel() != picked.numel():
            return "an index appears twice", 0.0
        valid = (~scores.isnan() & (scores > -torch.inf)).nonzero().reshape(-1)
        if picked.numel() != min(got.numel(), valid.numel()):
            return f"{picked.numel()} indices chosen, expected {min(got.numel(), valid.numel())}", 0.0
        if not torch.isin(picked, valid).all():
            return "a NaN or masked score was chosen", 0.0
        if self.ascending and not torch.equal(got, torch.cat([picked.sort().values.to(got.dtype), got[got < 0]])):
            return "the indices are not in ascending order with -1 behind them", 0.0
        left = valid[~torch.isin(valid, picked)]
        if not left.numel() or not picked.numel():
            return None, 0.0
        best, least = scores[left].max().item(), scores[picked].min().item()
        finite = scores[valid][scores[valid].isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 0.0
        crossed = (best - least) / (1 + largest) if best > least else 0.0
        if best > least and not best - least <= self.crossing * (1 + largest):
            return f"a score left out exceeds a chosen one by {best - least:.3g}", crossed
        if self.ties == "lower" and best == least:
            last = picked[scores[picked] == least].max()
            if (left[scores[left] == least] < last).any():
                return "tie at the k-th place not given to the lower index", crossed
        return None, crossed


@dataclass(frozen=True, kw_only=True)
class Law:
    """R16: rows of one distribution, each drawn once, by the chi-square test; the contract's own draws too.

    `probs` names the argument that holds the distribution, the same in every row. Bins of fewer than five expected
    draws are one bin; the statistic must lie below its quantile `level`. What has no weight is never drawn, and every
    count lies within 5 √E + 5 of its expectation.
    """

    probs: str
    level: float = 0.999

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Both the candidate's draws and those of the contract."""
        prob = oracles.arguments[self.probs][0].to(torch.float64)
        metrics, problem = {}, ""
        for side, drawn in (("contract", oracles.contract), ("candidate", got)):
            found, value = chi_square(drawn.to(torch.int64), prob)
            metrics[f"{side}_p_value"] = value
            if found or value < 1 - self.level:
                problem = f"the {side}'s draws: {found or f'p = {value:.2g} of the chi-square test'}"
        used = (1 - self.level) / max(min(metrics.values()), 1e-300)
        return Judgement(ok=not problem, used=float("inf") if problem else used, message=problem, metrics=metrics)


def chi_square(drawn: Tensor, prob: Tensor) -> tuple[str, float]:
    """What is impossible in these draws, if anything, and how likely a chi-square as large as theirs is."""
    if not ((drawn >= 0) & (drawn < len(prob))).all():
        return "a draw is no column", 0.0
    count = torch.bincount(drawn, minlength=len(prob)).to(torch.float64)
    expected = prob / prob.sum() * len(drawn)
    if count[expected == 0].any():
        return "what has no weight was drawn", 0.0
    if ((count - expected).abs() > 5 * expected.sqrt() + 5).any():
        return "a count is further than 5 √E + 5 from its expectation", 0.0
    large = expected >= 5
    bins = torch.cat([expected[large], expected[~large].sum().reshape(1)])
    counts = torch.cat([count[large], count[~large].sum().reshape(1)])
    known = bins > 0
    if int(known.sum()) < 2:
        return "", 1.0
    statistic = ((counts - bins)[known].square() / bins[known]).sum()
    freedom = (known.sum() - 1).to(torch.float64)
    return "", torch.special.gammaincc(freedom / 2, statistic / 2).item()


# limits by output kind; the measurement behind each stands in parity/evidence/ (`python -m deeptwin.parity.evidence`)

# one number per row and a handful of fp32 roundings on both sides: RIVAL may be lucky, so its distance counts as at
# least two units. A rounded constant (scale · log2 e) shifts every LSE alike: that is no bias of the kernel.
LSE = Budget(kind="lse", floor=2.0, scale=1.0, row=2.5, total=2.5, element_slack=4.0, bias=1.0)

# log-probabilities of a whole vocabulary: a handful of fp32 roundings at the size of the logarithm of the sum (at most
# 12), which shift a row alike: that is no bias of the kernel. Measured: evidence/log-probabilities.json
LOG_PROBS = Budget(kind="log-probabilities", floor=1.0, scale=16.0, row=2.0, total=2.0, bias=2.0)

# fp32 weights: the error of a row is that of its few largest scores, one draw of a wide distribution on either side.
# Far below what a lower precision does: TF32 is off by 2^13 units, bf16 weights by 2^15.
F32_ATTENTION = Budget(
    kind="fp32 attention", floor=1.0, row=50.0, total=8.0, element_factor=8.0, element_slack=32.0, bias=1.0
)

ATTENTION = {torch.bfloat16: Budget(), torch.float32: F32_ATTENTION}

# attention whose weights are bf16 although the output is fp32: judged in units of bf16, as if it were stored so. Its
# own unit would compare the rounding of a few weights with another draw of the same few (right ones: 1.18 of the row)
TWO_CACHES = {
    torch.bfloat16: Budget(),
    torch.float32: Budget(
        kind="two caches, fp32 output", floor=0.25 * 2**16, element_slack=2.0 * 2**16, bias=0.1 * 2**16
    ),
}

# whole MLA blocks: five roundings in a row, in other places in the naive and the absorbed form. Measured on fp32 torch
# with every stored value rounded (keys in order, and in blocks of 16 taken backwards): 50 seeds (5 at V3 head widths),
# 36 cases (1 to 72 tokens with and without a past, four regimes, text), each form judged by its own oracle and by that
# of the other, 10 860 judgements a dtype. Worst bf16: element 1.05 of 2·RIVAL + 2, row 3.15, total 1.72 (1.11 from 33
# tokens on), mean signed error 0.34 units (rows share the output projection, so their mean errors are no independent
# draws: t says nothing). Worst fp32: element 1.53, row 6.42, total 2.93, bias 1.13.
MLA_BLOCK = {
    torch.bfloat16: Budget(
        kind="bf16 mla block", element_factor=2.5, element_slack=3.0, row=4.0, total=2.0, bias=0.5, bias_t=0.01
    ),
    torch.float32: Budget(
        kind="fp32 mla block",
        floor=1.0,
        element_factor=4.0,
        element_slack=4.0,
        row=10.0,
        total=4.0,
        bias=2.0,
        bias_t=0.01,
    ),
}

# one side of a CSA2 layer, and stacks of one to six layers: quantisers between the roundings, whose steps are several
# units, so that a mean signed error of a stack says nothing (reference itself: 0.9 units in one of 40 judgements).
# Measured (50 seeds, evidence/csa2-*.json): a side has the rms of RIVAL in every row; the worst element of a stack is
# 1.005 of 2.5 RIVAL + 3, its row 2.1, its total 1.7
CSA2_SIDE = Budget(kind="csa2 side", element_factor=2.0, element_slack=2.0, row=2.5, total=1.5, bias=0.5, bias_t=0.01)
CSA2_STACK = Budget(kind="csa2 stack", element_factor=3.0, element_slack=4.0, row=4.0, total=2.5, bias=8.0, bias_t=0.01)

# whole blocks in bf16, and logits behind them, whose choices of experts and keys no rounding changes: quantisers lie
# between the roundings in V4 and V4.1, several sums in all. Measured with two honest arithmetics (20 seeds,
# evidence/block-*.json): V3 needs 1.07 of RIVAL's rms in total and 1.3 in its worst row; two layers of V4.1 1.39 in
# total, 3.14 in a row (sharp attention: one alarm of 200 at a row limit of 3) and 0.72 of the element limit. Logits
# of whole models (20 seeds, 760 judgements, evidence/model-*.json): 1.46 in total, 2.84 in a row, 0.85 of the element
# limit, in V4.1 of six tokens and more; the error of a single one is one draw (1.76 once in 40)
BLOCK = Budget(kind="block", element_factor=2.5, element_slack=3.0, row=4.0, total=1.6, bias=8.0, bias_t=0.01)

# a norm, rounded, and a product of what it leaves (in V4 a sum of two): 240 judgements of right ones in bf16 (20 seeds,
# evidence/mtp-join*.json) need 1.0 of RIVAL's rms in every row and in total
JOIN = Budget(kind="norm and product", row=2.5, total=1.5, bias=0.5, bias_t=0.01)
# one attention layer of V4 on given rows: the roundings of a CSA2 layer with quantiser groups of 128 instead of 32, so
# that the error of a row hangs on fewer scales. Measured on an honest torch layer (20 seeds, 320 judgements,
# evidence/v4-{output,hca,hca-steps}.json): 1.06 of RIVAL's rms in total, 2.3 in the worst row (3.2 once in the gate,
# packed sequences in chunks), 0.51 of 2.5 RIVAL + 3 in the worst element, a mean signed error of 0.92 units at worst
V4_LAYER = Budget(kind="v4 layer", element_factor=2.5, element_slack=3.0, row=5.0, total=2.0, bias=1.0, bias_t=0.01)
# ten products in a row, which stretch the smallest singular values most and every rounding with them: the honest forms
# (Horner, the Gram matrix of the long side) differ among each other as much as from SEMANTIC, and a mean signed error
# says nothing. Measured (50 seeds, 18 cases, 2 700 judgements, evidence/muon.json): worst row 5.6 and worst total 2.8
# times RIVAL's, worst element 0.8 of 4 RIVAL + 4
MUON = Budget(kind="muon", element_factor=4.0, element_slack=4.0, row=8.0, total=4.0, bias=8.0, bias_t=0.01)
