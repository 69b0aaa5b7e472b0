"""Compares one candidate output with its oracles, in a fixed order.

Type, dtype and shape first; then the positions of NaN, +inf and −inf, kind by kind, before anything is zeroed; then
the rule of the card. A failure is looked at once more for a diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import diagnose
from .card import Output, Outputs
from .oracles import OracleSet
from .outcome import Status, Worst
from .rules import Budget, OfOutputs, Rule, at


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Status of one output, with everything a report needs."""

    output: str
    status: Status
    message: str = ""
    diagnosis: str = ""
    worst: Worst | None = None
    budget_used: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def judge(outputs: Outputs, oracles: OracleSet, rules: dict[str, Rule] | None = None) -> list[Verdict]:
    """One verdict per declared output; `rules` replaces the card's rule by output name (peers)."""
    return [_judge_output(outputs, o, oracles, (rules or {}).get(o.name)) for o in oracles.op.outputs]


def _judge_output(outputs: Outputs, output: Output, oracles: OracleSet, rule: Rule | None) -> Verdict:
    got, dtype = outputs[output.name], oracles.dtype(output)
    views = oracles.of(output)
    shape = tuple(views.contract.shape)
    if got.dtype != dtype or tuple(got.shape) != shape:
        message = f"expected {dtype} {shape}, got {got.dtype} {tuple(got.shape)}"
        return Verdict(output=output.name, status=Status.MISMATCH, message=message, diagnosis="shape or dtype")
    rule = rule or output.rule_for(dtype)
    mismatch = _nonfinite_mismatch(got, _expected_kinds(rule, views, dtype), output.name)
    if mismatch is not None:
        unwritten = diagnose.unwritten(got)
        return mismatch if unwritten is None else _with(mismatch, unwritten)
    if isinstance(rule, OfOutputs):
        rule = replace(rule, outputs=outputs)
    judgement = rule.judge(got, views)
    return Verdict(
        output=output.name,
        status=Status.PASSED if judgement.ok else Status.MISMATCH,
        message=judgement.message,
        diagnosis="" if judgement.ok else diagnose.diagnose(got, views, rule),
        worst=None if judgement.ok else judgement.worst,
        budget_used=judgement.used,
        metrics=judgement.metrics,
    )


def _with(verdict: Verdict, diagnosis: str) -> Verdict:
    return Verdict(**(verdict.__dict__ | {"diagnosis": diagnosis}))


def _expected_kinds(rule: Rule, views: object, dtype: torch.dtype) -> Tensor:
    truth: Tensor = views.semantic if isinstance(rule, Budget) else views.contract  # type: ignore[attr-defined]
    # a finite value of the oracle may overflow in the storage dtype: that infinity is the right answer
    return truth.to(dtype) if truth.is_floating_point() else truth


_KINDS = {
    "NaN": torch.isnan,
    "+inf": lambda x: x == torch.inf,
    "-inf": lambda x: x == -torch.inf,
}


def _nonfinite_mismatch(got: Tensor, expected: Tensor, name: str) -> Verdict | None:
    if not got.is_floating_point() or got.element_size() == 1:
        return None
    for kind, test in _KINDS.items():
        wrong = test(got) != test(expected)
        if wrong.any():
            where = at(int(wrong.reshape(-1).to(torch.int8).argmax()), got.shape)
            side = "candidate" if test(got)[where] else "reference"
            return Verdict(
                output=name,
                status=Status.MISMATCH,
                message=f"{kind} only in the {side}: {int(wrong.sum())} of {got.numel()} positions",
                diagnosis="non-finite values at different positions",
                worst=Worst(index=where, got=str(got[where].item()), expected=str(expected[where].item())),
                budget_used=float("inf"),
            )
    return None
