"""What the component tests share: a short gate run, made once per component."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deeptwin.parity.card import Op, load_card
from deeptwin.parity.gate import Job, Runner, Settings, plan
from deeptwin.parity.outcome import Outcome, Status


def _middling(op: Op, card_name: str) -> list[Job]:
    """Two cases of middling size on which an invariance runs and as many other relations as can be had.

    A row that an interpreter takes on few cases only gets one of those as well.
    """
    jobs = plan(load_card(card_name), op, full=False)
    jobs = [j for j in jobs if not getattr(j.case, "needs", ())]

    def rank(job: Job) -> tuple[int, int]:
        size = sum(v for v in vars(job.case).values() if isinstance(v, int))
        return -sum(relation.only(job.case) for relation in op.relations), abs(size - 100)

    invariant = [j for j in jobs if any(r.only(j.case) for r in op.relations if r.name.endswith("_invariant"))]
    chosen = sorted(invariant or jobs, key=rank)[:2]
    for row in {row.name: row for job in jobs for row in job.candidates}.values():
        if all(row.refusal(job.case, "cpu") for job in chosen):
            taken = [job for job in jobs if row.refusal(job.case, "cpu") is None]
            chosen += sorted(taken, key=rank)[:1]
    return chosen


class Judged:
    """Outcomes of a component's reference and candidates on two cases of each operation, relations included."""

    def __init__(self) -> None:
        self._outcomes: dict[str, list[Outcome]] = {}

    def __call__(self, component: str) -> list[Outcome]:
        if component not in self._outcomes:
            card = load_card(component)
            jobs = [job for op in card.ops for job in _middling(op, component)]
            with Runner(Settings(jobs=1)) as runner:
                self._outcomes[component] = runner.run(jobs)
        return self._outcomes[component]

    def faults(self, component: str) -> list[str]:
        """Checks that failed, and promised rows of which none passed."""
        failed = [o.id for o in self(component) if o.status in (Status.MISMATCH, Status.ERROR)]
        return [*failed, *self._silent(component, lambda outcome: True)]

    def without(self, component: str, check: str) -> list[str]:
        """Promised rows for which `check` never passed."""
        return self._silent(component, lambda outcome: outcome.check == check)

    def _silent(self, component: str, counts: Callable[[Outcome], bool]) -> list[str]:
        heard = {(o.op, o.candidate) for o in self(component) if o.status is Status.PASSED and counts(o)}
        promised = {
            (op.name, row.name) for op in load_card(component).ops for row in op.candidates if "cpu" in row.archs
        }
        return [f"{op}/{row}" for op, row in sorted(promised - heard)]


@pytest.fixture(scope="session")
def judged() -> Judged:
    """One short gate run for each component that is asked for."""
    return Judged()
