"""Runs the mutants: every named wrong variant must be caught, and every right variant of the same base must pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .card import Candidate, Card, Mutant, Op
from .gate import Job, Runner, plan
from .outcome import Outcome, Status


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What became of one mutant: the first check that caught it, or none. `broken` is a mutant that could not run."""

    component: str
    op: str
    mutant: Mutant
    killer: Outcome | None
    tried: int
    broken: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """The record: passed when the mutant was killed by a comparison, error when it could not run."""
        status, message, diagnosis = Status.MISMATCH, f"survived {self.tried} cases", "the gate is blind to this fault"
        if self.broken is not None:
            status, message, diagnosis = Status.ERROR, self.broken.message, "the mutant could not run"
        elif self.killer is not None:
            status, diagnosis = Status.PASSED, self.killer.diagnosis
            message = f"killed by {self.killer.check} on {self.killer.case}"
        return Outcome(
            component=self.component,
            op=self.op,
            candidate=self.mutant.name,
            case=self.mutant.entry,
            check="mutant",
            status=status,
            message=f"{self.mutant.fault}: {message}",
            diagnosis=diagnosis,
            command=f"deeptwin mutants --component {self.component}",
        )


def controls(card: Card, *, full: bool) -> list[Job]:
    """Jobs that judge the right variants: a mutant's death says nothing if its base dies too."""
    jobs = [job for op in card.ops if op.controls for job in plan(card, op, full=full, rows=op.controls)]
    return [job for job in jobs if not all(row.declines(job.case) for row in job.candidates)]


def hunt(runner: Runner, card: Card, op: Op, mutant: Mutant, *, full: bool) -> Kill:
    """Run one mutant on the cases of its operation until a comparison kills it, that of its axis if it has one."""
    row = Candidate(name=mutant.name, function=mutant.function)
    seen: list[Outcome] = []
    jobs = [job for job in plan(card, op, full=full, rows=(row,)) if mutant.only(job.case)]
    for tried, job in enumerate(jobs, start=1):
        found = runner.run_job(replace(job, peers=(), check=mutant.axis), stop_at_failure=not mutant.axis)
        seen += found
        for outcome in found:
            if outcome.status is Status.MISMATCH and mutant.axis in ("", outcome.check):
                return Kill(component=card.component, op=op.name, mutant=mutant, killer=outcome, tried=tried)
            if outcome.status is Status.ERROR:
                return Kill(
                    component=card.component, op=op.name, mutant=mutant, killer=None, tried=tried, broken=outcome
                )
    rates = [] if mutant.axis else runner.rates(jobs, seen)
    rate = next((o for o in rates if o.status is Status.MISMATCH), None)
    return Kill(component=card.component, op=op.name, mutant=mutant, killer=rate, tried=len(jobs))
