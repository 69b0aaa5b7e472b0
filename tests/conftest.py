"""What the component tests share: a short gate run, made once per component."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deeptwin.parity.card import Op, case_rng, load_card, resolve
from deeptwin.parity.environment import fixed_numerics
from deeptwin.parity.gate import Job, Runner, Settings, plan
from deeptwin.parity.guard import Call
from deeptwin.parity.judge import judge
from deeptwin.parity.oracles import OracleSet
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


@pytest.fixture
def tile_kernels_faults(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """What is wrong with a component's rows of TileKernels on the cases that they take.

    The library's torch references, of the same distribution, stand in for its CUDA functions: adapters are judged, the
    kernels are not.
    """
    pytest.importorskip("tile_kernels")
    for name in ("cast", "norm", "rope", "swiglu", "topk", "mhc", "engram"):
        importlib.import_module(f"tile_kernels.torch.{name}")
    spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("tile_kernels_stand_in.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "tile_kernels", module.stand_in())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    projection = pytest.importorskip("deeptwin.kernels.triton_ops.mhc")
    monkeypatch.setattr(projection, "mhc_partials", module.partials)
    return _row_faults


def _row_faults(component: str) -> list[str]:
    faults = []
    for op in load_card(component).ops:
        for row in (row for row in op.candidates if row.name == "tile-kernels"):
            call = Call(resolve(row.function), op)
            for case in (case for case in op.cases(False) if row.declines(case) is None):
                inputs = op.draw(case, case_rng(component, op.name, case.id, 0))
                with fixed_numerics():
                    verdicts = judge(call(inputs), OracleSet(op, inputs), dict(row.rules))
                faults += [f"{op.name}/{case.id}: {v.output}" for v in verdicts if v.status is not Status.PASSED]
    return faults
