"""What the component tests share: a short gate run, made once per component."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from deeptwin.parity.card import Op, load_card
from deeptwin.parity.gate import Job, Runner, Settings, plan
from deeptwin.parity.outcome import Outcome

Judged = Callable[[str], list[Outcome]]


def _middling(op: Op, card_name: str) -> list[Job]:
    """Two cases of middling size on which an invariance runs and as many other relations as can be had."""
    jobs = plan(load_card(card_name), op, full=False)
    jobs = [j for j in jobs if not getattr(j.case, "needs", ())]

    def rank(job: Job) -> tuple[int, int]:
        size = sum(v for v in vars(job.case).values() if isinstance(v, int))
        return -sum(relation.only(job.case) for relation in op.relations), abs(size - 100)

    invariant = [j for j in jobs if any(r.only(j.case) for r in op.relations if r.name.endswith("_invariant"))]
    return sorted(invariant or jobs, key=rank)[:2]


@pytest.fixture(scope="session")
def judged() -> Judged:
    """Outcomes of the component's reference and candidates on two cases of each operation, relations included."""

    @cache
    def outcomes(component: str) -> list[Outcome]:
        card = load_card(component)
        jobs = [job for op in card.ops for job in _middling(op, component)]
        with Runner(Settings(jobs=1)) as runner:
            return runner.run(jobs)

    return outcomes
