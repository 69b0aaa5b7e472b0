"""The first place where two dumps part: stage, then row, head and channel.

The stages of the reference dump are walked in the order in which they were computed. With a second dump of the
reference under RIVAL every stage is judged by R1's budget: as far from the meaning as honest arithmetic. Without one
the rows of a stage may differ by a relative distance that depends on the coarser of the two dtypes; that finds where
two runs part, it proves no kernel right.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .capture import BadDump, Dump, Stage
from .diagnose import diagnose
from .floats import row_rms, unit_roundoff
from .outcome import Worst
from .rules import Budget, Judgement, worst_at

SCHEMA = "deeptwin.bisect/1"
# relative distance of a row that depth alone explains, in units of the coarser dtype: 2^-8 of bf16 gives 0.0625
DEFAULT_LIMIT_UNITS = 16.0
DEFAULT_BUDGET = Budget()


class BadMap(ValueError):
    """A map of names cannot be used; the message names the rule and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class MapRule:
    """How a stage of the reference is called in the other dump; `{layer}` and other braces stand for a run of digits.

    `shape` (with one −1) is given to the candidate's tensor first, `dims` names its axes then. Axes that only the
    candidate names must have length one; the others are put in the reference's order. `reshape`: as many values in the
    same order, on other axes. `unordered`: a row is a set (experts of a token, their weights), both are sorted.
    """

    reference: str
    candidate: str
    dims: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    reshape: bool = False
    unordered: bool = False

    def name_of(self, stage: str) -> str | None:
        """The candidate's name of a reference stage, or None if the rule is not for it."""
        parts = re.split(r"\{(\w+)\}", self.reference)
        pattern = "".join(f"(?P<{p}>\\d+)" if i % 2 else re.escape(p) for i, p in enumerate(parts))
        match = re.fullmatch(pattern, stage)
        return self.candidate.format(**match.groupdict()) if match else None


def read_map(path: Path) -> list[MapRule]:
    """The rules of a JSON file: a list of objects with `reference`, `candidate` and perhaps `dims` and `shape`.

    Raises:
        BadMap: unreadable, not such a list, or a candidate that uses braces its reference lacks.
    """
    try:
        entries = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise BadMap(f"{path}: unreadable: {error}") from error
    if not isinstance(entries, list):
        raise BadMap(f"{path}: expected a list of rules, got {type(entries).__name__}")
    rules = []
    for entry in entries:
        try:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
            rule = MapRule(**fields)
        except (TypeError, AttributeError) as error:
            raise BadMap(f"{path}: rule {entry!r}: {error}") from error
        unknown = set(re.findall(r"\{(\w*)\}", rule.candidate)) - set(re.findall(r"\{(\w+)\}", rule.reference))
        if unknown:
            raise BadMap(f"{path}: rule {rule.reference!r}: {{{sorted(unknown)[0]}}} stands only in its candidate")
        rules.append(rule)
    return rules


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What became of one stage of the reference."""

    stage: Stage
    candidate: str
    status: str  # "agrees", "differs" or "absent"
    used: float = 0.0  # share of the budget or of the limit
    message: str = ""
    diagnosis: str = ""
    worst: Worst | None = None
    place: dict[str, str] = field(default_factory=dict)  # axis → the indices that are wrong, in words


def compare(
    reference: Dump,
    candidate: Dump,
    *,
    rival: Dump | None = None,
    rules: list[MapRule] | None = None,
    limit: float | None = None,
    budget: Budget = DEFAULT_BUDGET,
) -> Iterator[Compared]:
    """Every stage of the reference beside its stage in the candidate, in order.

    The reference is the truth, the SEMANTIC run if there is a `rival`: the same stages under RIVAL. Without `rules` the
    names are the same. `limit` is the relative distance that a row may have, instead of 16 units of the coarser dtype;
    `budget` is the rule that judges with a `rival`.

    Raises:
        BadDump: a tensor cannot be read, or the rival lacks a stage that both others have.
    """
    theirs = {stage.key: stage for stage in candidate.stages}
    for stage in reference.stages:
        rule = rule_for(stage, rules)
        name = None if rule is None else rule.name_of(stage.name)
        other = None if name is None else theirs.get(f"{name}@{stage.step}.{stage.rank}")
        if rule is None or other is None:
            yield Compared(stage=stage, candidate=name or "-", status="absent", message="not in the candidate's dump")
            continue
        expected = reference.tensor(stage)
        yardstick = None if rival is None else _yardstick(rival, stage)
        try:
            got = aligned(candidate.tensor(other), other, rule, stage)
        except Misfit as error:
            yield Compared(stage=stage, candidate=other.name, status="differs", used=torch.inf, message=str(error))
            continue
        if rule.unordered:
            got, expected = got.sort(-1).values, expected.sort(-1).values
            yardstick = None if yardstick is None else yardstick.sort(-1).values
        yield _judged(stage, other, got, expected, yardstick, limit, budget)


def _yardstick(rival: Dump, stage: Stage) -> Tensor:
    """The same stage under RIVAL: without it there is no budget, and no other rule may stand in."""
    same = next((one for one in rival.stages if one.key == stage.key and one.shape == stage.shape), None)
    if same is None:
        raise BadDump(
            f"{rival.folder}: holds no {stage.key} of shape {list(stage.shape)}, of which RIVAL is the yardstick"
        )
    return rival.tensor(same)


def rule_for(stage: Stage, rules: list[MapRule] | None) -> MapRule | None:
    """The first rule for a stage; without rules, the one that keeps its name."""
    if rules is None:
        return MapRule(reference=stage.name, candidate=stage.name.replace("{", "{{").replace("}", "}}"))
    return next((rule for rule in rules if rule.name_of(stage.name) is not None), None)


class Misfit(ValueError):
    """The candidate's tensor cannot be laid beside the reference's."""


def aligned(x: Tensor, stage: Stage, rule: MapRule, reference: Stage) -> Tensor:
    """The candidate's tensor with the axes of the reference.

    Raises:
        Misfit: it has no such axes, or another shape.
    """
    if rule.reshape and x.numel() == math.prod(reference.shape):
        return x.reshape(reference.shape)
    if rule.shape:
        try:
            x = x.reshape(rule.shape)
        except RuntimeError as error:
            raise Misfit(f"shape {tuple(x.shape)} cannot become {list(rule.shape)}") from error
    dims = rule.dims or stage.dims
    if dims and reference.dims:
        if len(dims) != x.dim() or len(set(dims)) != len(dims):
            raise Misfit(f"dims {list(dims)} do not name the axes of {tuple(x.shape)}")
        surplus = [i for i, name in enumerate(dims) if name not in reference.dims]
        missing = [name for name in reference.dims if name not in dims]
        if missing or any(x.shape[i] != 1 for i in surplus):
            raise Misfit(f"axes {list(dims)} of {tuple(x.shape)} against {list(reference.dims)} of {reference.shape}")
        order = [dims.index(name) for name in reference.dims]
        x = x.permute(*surplus, *order).reshape([x.shape[i] for i in order])
    elif x.dim() == len(reference.shape) + 1 and x.shape[0] == 1:
        x = x[0]  # a batch of one, which most torch models have
    if tuple(x.shape) != reference.shape:
        raise Misfit(f"shape {tuple(x.shape)} against {reference.shape}")
    return x


@dataclass(frozen=True, kw_only=True)
class _Views:
    """The oracles of a rule, of one tensor of a dump."""

    semantic: Tensor
    rival: Tensor
    marks: list[tuple[str, Tensor]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def contract(self) -> Tensor:
        """A dump has one truth."""
        return self.semantic


def _judged(
    stage: Stage,
    other: Stage,
    got: Tensor,
    expected: Tensor,
    rival: Tensor | None,
    limit: float | None,
    budget: Budget,
) -> Compared:
    if not {got.dtype, expected.dtype} <= {torch.bfloat16, torch.float16, torch.float32, torch.float64}:
        return _judged_exactly(stage, other, got, expected)
    kinds = got.isfinite() != expected.isfinite()
    if kinds.any():
        judgement = Judgement(ok=False, used=torch.inf, message=f"{int(kinds.sum())} non-finite values at other places")
        return _outcome(stage, other, kinds, judgement, "", got, expected)
    truth = expected.to(torch.float64)
    views = _Views(semantic=truth, rival=truth if rival is None else rival.to(torch.float64))
    distance = _row_distance(got.to(torch.float64), truth)
    if rival is None:
        coarse = max(got.dtype, expected.dtype, key=unit_roundoff)
        allowed = DEFAULT_LIMIT_UNITS * unit_roundoff(coarse) if limit is None else limit
        largest = distance.max().item() if distance.numel() else 0.0
        text = f"largest relative distance of a row {largest:.3g}, allowed {allowed:.3g}"
        judgement = Judgement(ok=largest <= allowed, used=largest / allowed, message=text)
    else:
        judgement = budget.judge(got, views)
        allowed = budget.row * _row_distance(views.rival, truth).max().item()
    guess = "" if judgement.ok or got.dim() == 0 else diagnose(got, views, budget)
    return _outcome(stage, other, _wrong_elements(got, truth, distance, allowed), judgement, guess, got, expected)


def _judged_exactly(stage: Stage, other: Stage, got: Tensor, expected: Tensor) -> Compared:
    """Indices, masks and codes: every value is equal or wrong."""
    # integers among themselves keep all their bits; beside a float they must not cut it
    wide = torch.float64 if got.is_floating_point() or expected.is_floating_point() else torch.int64
    a, b = got.to(wide), expected.to(wide)
    wrong = a != b
    judgement = Judgement(ok=not wrong.any(), used=torch.inf if wrong.any() else 0.0)
    return _outcome(stage, other, wrong, judgement, "", a, b)


def _wrong_elements(got: Tensor, truth: Tensor, distance: Tensor, allowed: float) -> Tensor:
    """What is beyond the limit by itself, in the rows that are; of a row where nothing is, all."""
    if truth.dim() == 0:
        return distance > allowed
    rows = (distance > allowed)[..., None]
    beyond = (got.to(torch.float64) - truth).abs() > allowed * row_rms(truth)
    return rows & (beyond | ~beyond.any(-1, keepdim=True))


def _row_distance(x: Tensor, truth: Tensor) -> Tensor:
    """‖x − truth‖ of every row over its ‖truth‖, of no less than a thousandth of the tensor's largest row."""
    clean = torch.where(truth.isfinite(), truth, 0.0)
    error = torch.where(truth.isfinite(), x, 0.0) - clean
    if truth.dim() == 0:
        return error.abs() / clean.abs().clamp_min(1e-300)
    size = clean.norm(dim=-1)
    floor = 1e-3 * size.max().item() if size.numel() else 0.0
    return error.norm(dim=-1) / size.clamp_min(max(floor, 1e-300))


def _outcome(
    stage: Stage, other: Stage, wrong: Tensor, judgement: Judgement, guess: str, got: Tensor, expected: Tensor
) -> Compared:
    if judgement.ok:
        return Compared(stage=stage, candidate=other.name, status="agrees", used=judgement.used)
    badness = (got.to(torch.float64) - expected.to(torch.float64)).abs().nan_to_num(nan=torch.inf)
    where = wrong if wrong.any() else badness == badness.max()
    # the first wrong row decides: later ones may only follow from it
    badness = torch.where(_first_row(where), badness, -1.0)
    return Compared(
        stage=stage,
        candidate=other.name,
        status="differs",
        used=judgement.used,
        message=judgement.message or f"{int(wrong.sum())} of {wrong.numel()} values differ",
        diagnosis=guess,
        worst=worst_at(got, expected, badness),
        place=_place(stage, where),
    )


def _first_row(where: Tensor) -> Tensor:
    if where.dim() == 0:
        return where
    rows = where.reshape(-1, where.shape[-1]).any(-1)
    first = torch.zeros_like(rows)
    first[int(rows.to(torch.int8).argmax())] = True
    return first[:, None].expand(-1, where.shape[-1]).reshape(where.shape) & where


def _place(stage: Stage, where: Tensor) -> dict[str, str]:
    names = stage.dims or tuple(f"axis {i}" for i in range(where.dim()))
    sizes = enumerate(where.shape)
    return {names[i]: _words(where.movedim(i, 0).reshape(n, -1).any(-1)) for i, n in sizes if n > 1}


def _words(wrong: Tensor) -> str:
    """`all 8`, `3 of 8: 1, 4, 6` or `5 of 64: 2 … 60`."""
    indices = wrong.nonzero().flatten().tolist()
    if len(indices) == wrong.numel():
        return f"all {wrong.numel()}"
    shown = ", ".join(map(str, indices)) if len(indices) <= 8 else f"{indices[0]} … {indices[-1]}"
    return f"{len(indices)} of {wrong.numel()}: {shown}"


def show(console: Console, found: Sequence[Compared]) -> None:
    """Print the walk up to the first difference, and what is known about it."""
    first = next((i for i, one in enumerate(found) if one.status == "differs"), None)
    table = Table("stage", "candidate", "shape", "status", "used", box=None)
    shown = found if first is None else found[: first + 1]
    for one in shown:
        table.add_row(one.stage.name, one.candidate, str(list(one.stage.shape)), one.status, f"{one.used:.3g}")
    console.print(table)
    agree, absent = (sum(one.status == word for one in found) for word in ("agrees", "absent"))
    if first is None:
        console.print(f"no difference: {agree} stages agree, {absent} absent")
        return
    one, later = found[first], sum(x.status == "differs" for x in found[first + 1 :])
    console.print(
        f"first difference: {one.stage.name} (step {one.stage.step}, rank {one.stage.rank})", style="bold red"
    )
    for name, indices in one.place.items():
        console.print(f"  {name:<10} {indices}")
    console.print(f"  {one.message}", markup=False)
    if one.worst is not None:
        console.print(f"  at {list(one.worst.index)}: got {one.worst.got}, expected {one.worst.expected}", markup=False)
    if one.diagnosis:
        console.print(f"  diagnosis: {one.diagnosis}", markup=False)
    before = [x for x in found[:first] if x.status == "agrees"]
    last = f"; the last stage that agrees is {before[-1].stage.name}" if before else ""
    console.print(f"  {agree} stages agree, {absent} absent, {later} later ones differ too{last}", markup=False)


def to_json(found: Sequence[Compared]) -> dict[str, Any]:
    """The walk as plain JSON values (schema `deeptwin.bisect/1`)."""
    stages = [
        {
            "name": one.stage.name,
            "step": one.stage.step,
            "rank": one.stage.rank,
            "candidate": one.candidate,
            "status": one.status,
            "used": one.used if math.isfinite(one.used) else None,
            "message": one.message,
            "diagnosis": one.diagnosis,
            "place": one.place,
            "worst": None if one.worst is None else dataclasses.asdict(one.worst),
        }
        for one in found
    ]
    first = next((one.stage.name for one in found if one.status == "differs"), None)
    return {"schema": SCHEMA, "first_difference": first, "stages": stages}
