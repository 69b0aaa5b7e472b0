"""The record of one check. Text, JSON and JUnit are renderings of it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "deeptwin.report/1"


class Status(enum.StrEnum):
    """What became of a check. `compiled` and `lowered` are builds without a device and never mean passed."""

    PASSED = "passed"
    MISMATCH = "mismatch"
    UNSUPPORTED = "unsupported"
    ERROR = "error"
    KNOWN_FAILURE = "known-failure"
    COMPILED = "compiled"
    LOWERED = "lowered"


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The coordinate that decided, both values there, and their distance in units in the last place."""

    index: tuple[int, ...]
    got: str
    expected: str
    ulps: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One (component, operation, candidate, case, check) and its verdict.

    `check` is the name of an output, of a relation, or of a reference check. `required` says that a status of
    `unsupported` counts as something that did not run.
    """

    component: str
    op: str
    candidate: str
    case: str
    check: str
    status: Status
    message: str = ""
    diagnosis: str = ""
    worst: Worst | None = None
    budget_used: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    command: str = ""
    required: bool = True
    seconds: float = 0.0

    @property
    def id(self) -> str:
        """`component.op/candidate/case/check`: unique within a run."""
        return f"{self.component}.{self.op}/{self.candidate}/{self.case}/{self.check}"

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        record = asdict(self) | {"id": self.id, "status": self.status.value}
        if self.worst is not None:
            record["worst"]["index"] = list(self.worst.index)
        return record


EXIT_PASSED, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_RUN = 0, 1, 2, 3
JUDGED = (Status.PASSED, Status.KNOWN_FAILURE)
BUILT = (Status.COMPILED, Status.LOWERED, Status.KNOWN_FAILURE)


def exit_status(outcomes: Iterable[Outcome], *, ran: Collection[Status] = JUDGED) -> int:
    """0: every promised check ran and passed; 1: one failed; 3: something required did not run, or nothing ran.

    `ran` are the statuses of something that ran: a gate that only compiled has judged nothing, a build has not failed
    for that, so `ran=BUILT` there.
    """
    seen = list(outcomes)
    if any(o.status in (Status.MISMATCH, Status.ERROR) for o in seen):
        return EXIT_FAILED
    nothing = not any(o.status in ran for o in seen)
    if nothing or any(o.status is Status.UNSUPPORTED and o.required for o in seen):
        return EXIT_NOT_RUN
    return EXIT_PASSED


def tally(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Number of outcomes by status, zero counts left out."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome.status.value] = counts.get(outcome.status.value, 0) + 1
    return counts
