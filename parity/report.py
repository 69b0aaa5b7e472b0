"""Renderings of outcomes: text for people, JSON and JUnit XML for machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from .outcome import SCHEMA, Outcome, Status, exit_status, tally

STYLES = {
    Status.PASSED: "green",
    Status.MISMATCH: "bold red",
    Status.ERROR: "bold red",
    Status.UNSUPPORTED: "yellow",
    Status.KNOWN_FAILURE: "yellow",
    Status.COMPILED: "green",
    Status.LOWERED: "green",
}
GOOD = (Status.PASSED, Status.COMPILED, Status.LOWERED)
FAILING = (Status.MISMATCH, Status.ERROR)
SHOWN_FAILURES = 5


def by_weight(failures: Iterable[Outcome]) -> list[Outcome]:
    """Errors and wrong outputs before broken relations, which often only follow from them."""
    return sorted(failures, key=lambda o: o.status is not Status.ERROR and o.worst is None)


def line(outcome: Outcome) -> str:
    """One outcome on one line."""
    used = "" if outcome.budget_used is None else f"  budget {outcome.budget_used:.2g}"
    tail = f"  {outcome.message.splitlines()[0]}" if outcome.message and outcome.status not in GOOD else ""
    return f"{outcome.status.value:<13} {outcome.id}{used}{tail}"


def details(outcome: Outcome) -> str:
    """Everything a developer needs to act on a failure."""
    rows = [f"{outcome.status.value}: {outcome.id}"]
    if outcome.diagnosis:
        rows.append(f"  diagnosis  {outcome.diagnosis}")
    if outcome.message:
        rows.append("  message    " + outcome.message.replace("\n", "\n             "))
    if outcome.worst is not None:
        worst = outcome.worst
        ulps = "" if worst.ulps is None else f"  ({worst.ulps:g} ulp)"
        rows.append(
            f"  worst      {outcome.check}{list(worst.index)}: got {worst.got}, expected {worst.expected}{ulps}"
        )
    if outcome.metrics:
        rows.append("  measured   " + ", ".join(f"{k} {v:.3g}" for k, v in outcome.metrics.items()))
    if outcome.command:
        rows.append(f"  repeat     {outcome.command}")
    return "\n".join(rows)


def summary(outcomes: Sequence[Outcome]) -> Table:
    """One row per operation and candidate: counts by status and the largest share of a budget that was used."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[f"{outcome.component}.{outcome.op}", outcome.candidate].append(outcome)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("operation", "candidate", "passed", "failed", "other", "budget used"):
        table.add_column(title, justify="right" if title in ("passed", "failed", "other", "budget used") else "left")
    for (op, candidate), found in groups.items():
        passed = sum(o.status is Status.PASSED for o in found)
        failed = sum(o.status in FAILING for o in found)
        used = [o.budget_used for o in found if o.budget_used is not None]
        style = "red" if failed else ""
        cells = (str(passed), str(failed), str(len(found) - passed - failed), f"{max(used):.2f}" if used else "")
        table.add_row(op, candidate, *cells, style=style)
    return table


def print_result(console: Console, outcomes: Sequence[Outcome], *, seconds: float, verbose: bool = False) -> None:
    """The table, every failure in detail, and one closing line."""
    if verbose:
        for outcome in outcomes:
            console.print(
                line(outcome), style=STYLES.get(outcome.status), markup=False, highlight=False, soft_wrap=True
            )
    console.print(summary(outcomes))
    failures = by_weight(o for o in outcomes if o.status in FAILING)
    for outcome in failures[:SHOWN_FAILURES]:
        console.print("\n" + details(outcome), markup=False, highlight=False, soft_wrap=True)
    if len(failures) > SHOWN_FAILURES:
        console.print(f"\n… and {len(failures) - SHOWN_FAILURES} more failures (-v lists them, --json has them all)")
    missing = [o for o in outcomes if o.status is Status.UNSUPPORTED and o.required]
    for outcome in missing[:20]:
        console.print(f"did not run: {outcome.id}: {outcome.message}", markup=False, highlight=False, soft_wrap=True)
    code = exit_status(outcomes)
    word = {0: "passed", 1: "FAILED", 3: "DID NOT RUN"}[code]
    counts = ", ".join(f"{n} {status}" for status, n in tally(outcomes).items()) or "nothing was compared"
    style = "bold green" if code == 0 else "bold red"
    console.print(f"\n{word}: {counts} in {seconds:.0f} s", style=style, highlight=False)


def to_json(outcomes: Sequence[Outcome], *, command: str, environment: dict[str, Any], seed: int) -> dict[str, Any]:
    """The stable record of a run; `schema` names its version."""
    return {
        "schema": SCHEMA,
        "command": command,
        "environment": environment,
        "seed": seed,
        "counts": tally(outcomes),
        "exit": exit_status(outcomes),
        "outcomes": [outcome.to_json() for outcome in outcomes],
    }


def to_record(outcomes: Sequence[Outcome], *, command: str, environment: dict[str, Any], seed: int) -> dict[str, Any]:
    """What is kept of a run on a device: counts and the largest used budget by operation, candidate and check.

    Everything that did not pass is kept whole.
    """
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[f"{outcome.component}.{outcome.op}/{outcome.candidate}/{outcome.check}"].append(outcome)
    checks = {}
    for name, found in groups.items():
        used = [o.budget_used for o in found if o.budget_used is not None]
        checks[name] = tally(found) | ({"budget_used": round(max(used), 4)} if used else {})
    return {
        "schema": "deeptwin.record/1",
        "command": command,
        "environment": environment,
        "seed": seed,
        "counts": tally(outcomes),
        "checks": checks,
        "not_passed": [o.to_json() for o in outcomes if o.status is not Status.PASSED],
    }


def to_junit(outcomes: Sequence[Outcome]) -> bytes:
    """JUnit XML: a suite per operation, a test case per outcome."""
    root = ElementTree.Element("testsuites", name="deeptwin")
    suites: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        suites[f"{outcome.component}.{outcome.op}"].append(outcome)
    for name, found in suites.items():
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(found)),
            failures=str(sum(o.status is Status.MISMATCH for o in found)),
            errors=str(sum(o.status is Status.ERROR for o in found)),
            skipped=str(sum(o.status in (Status.UNSUPPORTED, Status.KNOWN_FAILURE) for o in found)),
        )
        for outcome in found:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{name}.{outcome.candidate}",
                name=f"{outcome.case}/{outcome.check}",
                time=f"{outcome.seconds:.3f}",
            )
            kind = {Status.MISMATCH: "failure", Status.ERROR: "error"}.get(outcome.status)
            if kind is None and outcome.status is not Status.PASSED:
                kind = "skipped"
            if kind is not None:
                message = outcome.diagnosis or outcome.message.split("\n")[0]
                node = ElementTree.SubElement(case, kind, message=_printable(message))
                node.text = _printable(details(outcome))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    """Text without the control characters that XML forbids."""
    return "".join(c if c in "\n\t" or " " <= c <= "\ud7ff" or c >= "\ue000" else "?" for c in text)
