"""Plans and runs checks: for every case of every operation, the reference, its peers and the candidates."""

from __future__ import annotations

import importlib.util
import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from . import ledger
from .card import Candidate, Card, Inputs, Op, Peer, case_rng
from .environment import architecture, family, fixed_numerics
from .judge import Verdict, judge
from .oracles import BadCase, OracleSet
from .outcome import Outcome, Status
from .pool import Worker
from .protocol import Reply, Request
from .rules import RATE_LIMIT, RATE_MIN_ELEMENTS, OneRounding, Rule

Report = Callable[[Outcome], None]
STATUS_OF_REPLY = {
    "violation": Status.MISMATCH,
    "unsupported": Status.UNSUPPORTED,
    "error": Status.ERROR,
    "broken": Status.ERROR,
    "crashed": Status.ERROR,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is done; what is run is the list of jobs."""

    seed: int = 0
    full: bool = False
    device: str = "cpu"
    jobs: int = 2
    timeout: float = 60.0
    relations: bool = True


@dataclass(frozen=True, kw_only=True)
class Job:
    """All checks of one case: the candidates and peers to judge on the same inputs and oracles."""

    card: Card
    op: Op
    case: Any
    candidates: tuple[Candidate, ...]
    peers: tuple[Peer, ...] = ()
    inputs: Inputs | None = None  # given by a case file; otherwise drawn
    source: str = ""  # the case file
    check: str = ""  # only the outputs and this relation: the case has lost the fields that relations ask for

    @property
    def label(self) -> str:
        """`component.op/case`."""
        return f"{self.card.component}.{self.op.name}/{self.case.id}"

    def draw(self, seed: int) -> Inputs:
        """The inputs of the case."""
        if self.inputs is not None:
            return self.inputs
        return self.op.draw(self.case, case_rng(self.card.component, self.op.name, self.case.id, seed))


def reference_row(op: Op) -> Candidate:
    """The reference as its own candidate: a rule that it cannot pass, or a relation it breaks, is a fault of ours."""
    return Candidate(name="reference", function=op.reference)


def plan(card: Card, op: Op, *, full: bool, device: str = "cpu", rows: Sequence[Candidate] | None = None) -> list[Job]:
    """The jobs of one operation: with `rows` only those candidates, otherwise reference, card rows and peers."""
    if rows is None:
        own = [c for c in op.candidates if family(device) in c.archs]
        candidates = (reference_row(op), *own) if device == "cpu" and op.judges_reference else tuple(own)
        peers = op.peers if device == "cpu" else ()
    else:
        candidates, peers = tuple(rows), ()
    if not candidates:
        return []  # on a device only kernels are judged
    return [
        Job(
            card=card,
            op=op,
            case=case,
            candidates=candidates,
            peers=tuple(p for p in peers if p.only(case)),
        )
        for case in op.cases(full)
    ]


class Runner:
    """Runs jobs, each worker thread with its own worker process; a context manager that fixes the numerics."""

    def __init__(self, settings: Settings, report: Report = lambda outcome: None) -> None:
        self.settings = settings
        self.report = report
        self.progress: Callable[[int, int], None] = lambda done, total: None  # cases finished, cases in all
        self.entries = ledger.read(arch=architecture(settings.device))
        self._local = threading.local()
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._given_up: set[tuple[str, str, str]] = set()
        self._numerics = ExitStack()

    def __enter__(self) -> Runner:
        self._numerics.enter_context(fixed_numerics())
        return self

    def __exit__(self, *failure: object) -> None:
        self._numerics.close()
        for worker in self._workers:
            worker.stop()

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Every outcome, in the order of the jobs; rate checks of R2 over whole regimes come last."""
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(self.settings.jobs) as pool:
            for done, found in enumerate(pool.map(self.run_job, jobs), start=1):
                outcomes.extend(found)
                self.progress(done, len(jobs))
        rates = self.rates(jobs, outcomes)
        for outcome in rates:
            self.report(outcome)
        return outcomes + rates

    def rates(self, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """R2's share of differing elements, over all cases of a regime together."""
        return [ledger.apply(o, self.entries) for o in _regime_rates(jobs, outcomes)]

    def run_job(self, job: Job, *, stop_at_failure: bool = False) -> list[Outcome]:
        """Every outcome of one case; with `stop_at_failure` none after the first that fails."""
        outcomes: list[Outcome] = []
        for outcome in self._outcomes(job):
            final = ledger.apply(outcome, self.entries)
            self.report(final)
            outcomes.append(final)
            if stop_at_failure and final.status in (Status.MISMATCH, Status.ERROR):
                break
        return outcomes

    def forget(self) -> None:
        """Try candidates again that were given up after a crash."""
        self._given_up.clear()

    def worker(self) -> Worker:
        """The worker process of the current thread."""
        if not hasattr(self._local, "worker"):
            self._local.worker = Worker(self.settings.device, self.settings.timeout)
            with self._lock:
                self._workers.append(self._local.worker)
        return self._local.worker

    def _outcomes(self, job: Job) -> Iterator[Outcome]:
        missing = [name for name in getattr(job.case, "needs", ()) if importlib.util.find_spec(name) is None]
        if missing:
            names = " ".join(name.replace("_", "-") for name in missing)
            text = f"the case needs {', '.join(missing)}: pip install {names}"
            yield self._outcome(job, "reference", "inputs", Status.UNSUPPORTED, message=text)
            return
        try:
            inputs = job.draw(self.settings.seed)
            oracles = OracleSet(job.op, inputs)
            _ = oracles.contract
        except BadCase as error:
            yield self._outcome(job, "reference", "inputs", Status.ERROR, message=str(error))
            return
        for candidate in job.candidates:
            yield from self._candidate(job, candidate, inputs, oracles)
        for peer in job.peers:
            yield from self._peer(job, peer, inputs, oracles)

    def _candidate(self, job: Job, row: Candidate, inputs: Inputs, oracles: OracleSet) -> Iterator[Outcome]:
        key = (job.card.component, job.op.name, row.name)
        if key in self._given_up:
            return
        reason = None if job.source else row.refusal(job.case, self.settings.device)
        if reason is not None:
            yield self._outcome(job, row.name, "outputs", Status.UNSUPPORTED, message=reason, required=False)
            return
        for entry in self.entries:
            if entry.mode == "never-launch" and entry.covers(*key, job.case.id):
                yield self._outcome(job, row.name, "outputs", Status.KNOWN_FAILURE, message=f"{entry.issue}: not run")
                return
        started = time.monotonic()
        reply = self._ask(job, row, inputs, "outputs")
        if reply.status != "ok":
            yield self._failed(job, row, "outputs", reply)
            return
        for verdict in judge(reply.outputs, oracles, dict(row.rules)):
            seconds = time.monotonic() - started
            yield _excused(self._judged(job, row.name, verdict, verdict.output, seconds), row)
        if self.settings.relations:
            for outcome in self._relations(job, row, inputs, oracles):
                yield _excused(outcome, row)

    def _relations(self, job: Job, row: Candidate, inputs: Inputs, oracles: OracleSet) -> Iterator[Outcome]:
        for relation in job.op.relations:
            if job.check != relation.name if job.check else not relation.only(job.case):
                continue
            partner = self._partner(job, row, relation.partner)
            if relation.partner is not None and partner is None:
                continue
            started = time.monotonic()
            reply = self._ask(job, row, inputs, relation.name, partner)
            if reply.status != "ok" or reply.finding is None:
                yield self._failed(job, row, relation.name, reply)
                if reply.status == "crashed":
                    return
                continue
            finding, seconds = reply.finding, time.monotonic() - started
            status, message, diagnosis = Status.PASSED, f"{finding.status}, {finding.variants} variants", ""
            if finding.status == "differs":
                status, message, diagnosis = Status.MISMATCH, finding.detail, f"not {relation.name} ({relation.axis})"
            for label, outputs in finding.others.items():
                bad = [v for v in judge(outputs, oracles, dict(row.rules)) if v.status is not Status.PASSED]
                if bad:
                    status, message = Status.MISMATCH, f"{label}: {bad[0].output}: {bad[0].message}"
                    diagnosis = bad[0].diagnosis
                    break
            yield self._outcome(
                job, row.name, relation.name, status, message=message, diagnosis=diagnosis, seconds=seconds
            )

    def _partner(self, job: Job, row: Candidate, op_name: str | None) -> str | None:
        if op_name is None:
            return None
        other = job.card.op(op_name)
        if row.name == "reference":
            return other.reference
        return next((c.function for c in other.candidates if c.name == row.name), None)

    def _peer(self, job: Job, peer: Peer, inputs: Inputs, oracles: OracleSet) -> Iterator[Outcome]:
        row = Candidate(name=peer.name, function=peer.function, needs=peer.needs)
        reply = self._ask(job, row, inputs, "outputs")
        if reply.status != "ok":
            yield self._failed(job, row, "peer", reply)
            return
        rules: dict[str, Rule] = dict(peer.rules)
        for verdict in judge(reply.outputs, oracles, rules):
            yield self._judged(job, peer.name, verdict, f"peer:{verdict.output}", 0.0)

    def _ask(self, job: Job, row: Candidate, inputs: Inputs, task: str, partner: str | None = None) -> Reply:
        request = Request(
            component=job.card.component,
            op=job.op.name,
            candidate=row.function,
            inputs=inputs,
            task=task,
            case_id=job.case.id,
            seed=self.settings.seed,
            full=self.settings.full,
            device=self.settings.device,
            partner=partner,
            needs=row.needs,
        )
        # a case may need longer than others, and says so
        return self.worker().ask(request, max(self.settings.timeout, getattr(job.case, "seconds", 0.0)))

    def _failed(self, job: Job, row: Candidate, check: str, reply: Reply) -> Outcome:
        message = reply.message
        if reply.status in ("broken", "crashed"):
            with self._lock:
                self._given_up.add((job.card.component, job.op.name, row.name))
            message += "; its remaining cases were not run"
        if reply.trace:
            message += "\n" + reply.trace.rstrip()
        status = STATUS_OF_REPLY[reply.status]
        return self._outcome(job, row.name, check, status, message=message, required=row.required)

    def _judged(self, job: Job, name: str, verdict: Verdict, check: str, seconds: float) -> Outcome:
        outcome = self._outcome(job, name, check, verdict.status, message=verdict.message, seconds=seconds)
        return replace(
            outcome,
            diagnosis=verdict.diagnosis,
            worst=verdict.worst,
            budget_used=verdict.budget_used,
            metrics=verdict.metrics,
        )

    def _outcome(self, job: Job, name: str, check: str, status: Status, **values: Any) -> Outcome:
        return Outcome(
            component=job.card.component,
            op=job.op.name,
            candidate=name,
            case=job.case.id,
            check=check,
            status=status,
            command=repeat_command(job, name, self.settings),
            **values,
        )


def _excused(outcome: Outcome, row: Candidate) -> Outcome:
    """A mismatch in what the row's maker does not promise is known, and says so."""
    reason = row.unpromised.get(outcome.check)
    if reason is None or outcome.status is not Status.MISMATCH:
        return outcome
    return replace(outcome, status=Status.KNOWN_FAILURE, message=f"not promised ({reason}): {outcome.message}")


def repeat_command(job: Job, candidate: str, settings: Settings) -> str:
    """The command that repeats this case."""
    if job.source:
        return f"deeptwin run --case {shlex.quote(job.source)}"
    words = [
        "deeptwin",
        "run",
        job.card.component,
        "--op",
        job.op.name,
        "--candidate",
        candidate,
        "--case",
        job.case.id,
    ]
    if settings.seed:
        words += ["--seed", str(settings.seed)]
    if settings.device != "cpu":
        words += ["--device", settings.device]
    return shlex.join(words)


@dataclass
class _Rate:
    differ: float = 0.0
    elements: float = 0.0
    burst: float = 0.0
    cases: list[str] = field(default_factory=list)


def _regime_rates(jobs: Iterable[Job], outcomes: Iterable[Outcome]) -> list[Outcome]:
    """R2 over all cases of a regime together: at most 1e-3 of at least 1e4 elements may differ."""
    regime_of = {(j.card.component, j.op.name, j.case.id): j.case.regime for j in jobs}
    judged_by_rate = {
        (j.card.component, j.op.name, output.name)
        for j in jobs
        for output in j.op.outputs
        if any(isinstance(rule, OneRounding) for rule in _rules(output.rule))
    }
    rates: dict[tuple[str, str, str, str, str], _Rate] = defaultdict(_Rate)
    for o in outcomes:
        if (o.component, o.op, o.check) in judged_by_rate and "ulps" in o.metrics:
            regime = regime_of[o.component, o.op, o.case]
            rate = rates[o.component, o.op, o.candidate, o.check, regime]
            rate.differ += o.metrics["differ"]
            rate.elements += o.metrics["elements"]
            rate.burst = max(rate.burst, o.metrics["burst"])
            rate.cases.append(o.case)
    return [_rate_outcome(key, rate) for key, rate in rates.items() if rate.elements]


def _rules(rule: Any) -> Iterable[Rule]:
    return rule.values() if isinstance(rule, Mapping) else (rule,)


def _rate_outcome(key: tuple[str, str, str, str, str], rate: _Rate) -> Outcome:
    component, op, candidate, check, regime = key
    used = rate.differ / (RATE_LIMIT * rate.elements + rate.burst)
    text = f"{rate.differ:.0f} of {rate.elements:.0f} elements differ over {len(rate.cases)} cases"
    status, required, diagnosis = Status.PASSED, True, ""
    if rate.elements < RATE_MIN_ELEMENTS:
        status, required, text = Status.UNSUPPORTED, False, f"{text}: too few to judge the rate"
    elif used > 1:
        status, diagnosis = Status.MISMATCH, "rounds elsewhere than the contract, too often for a correct kernel"
    return Outcome(
        component=component,
        op=op,
        candidate=candidate,
        case=f"all-{regime}",
        check=f"{check}:rate",
        status=status,
        message=text,
        diagnosis=diagnosis,
        budget_used=used,
        required=required,
        command=f"deeptwin run {component} --op {op} --candidate {shlex.quote(candidate)}",
    )
