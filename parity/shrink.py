"""Makes a failing case small: first its shape, then its rows, then its values."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .card import Candidate, Inputs
from .casefile import CaseFile, StoredCase, write
from .gate import Job, Runner
from .outcome import Outcome, Status
from .relations import num_rows, take

Fails = Callable[[Job], Outcome | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shrunk:
    """The smallest failing job found, its outcome, and how many were tried."""

    job: Job
    inputs: Inputs
    outcome: Outcome
    tried: int

    def describe(self) -> str:
        """Shapes of the tensors that are left."""
        shapes = [f"{k}{list(v.shape)}" for k, v in self.inputs.items() if isinstance(v, torch.Tensor)]
        return ", ".join(shapes)


class Shrinker:
    """Greedy reduction within a number of tries and a time limit; a smaller case must fail the same check."""

    def __init__(
        self, runner: Runner, candidate: Candidate, check: str, *, tries: int = 300, seconds: float = 120.0
    ) -> None:
        self.runner = runner
        self.candidate = candidate
        self.check = check.removesuffix(":rate")
        self.deadline = time.monotonic() + seconds
        self.tries = tries
        self.tried = 0

    def shrink(self, job: Job, outcome: Outcome) -> Shrunk:
        """The smallest failing variant of `job` that was found in time."""
        job = dataclasses.replace(job, candidates=(self.candidate,), peers=(), check=self.check)
        job, outcome = self._descend(job, outcome, self._smaller_shapes)
        inputs = job.draw(self.runner.settings.seed)
        job = dataclasses.replace(job, inputs=inputs)
        job, outcome = self._descend(job, outcome, self._fewer_rows)
        job, outcome = self._descend(job, outcome, self._simpler_values)
        assert job.inputs is not None
        return Shrunk(job=job, inputs=job.inputs, outcome=outcome, tried=self.tried)

    def _descend(self, job: Job, outcome: Outcome, reductions: Callable[[Job], Iterator[Job]]) -> tuple[Job, Outcome]:
        progress = True
        while progress:
            progress = False
            for smaller in reductions(job):
                if self.tried >= self.tries or time.monotonic() >= self.deadline:
                    break
                failure = self._fails(smaller)
                if failure is not None:
                    job, outcome, progress = smaller, failure, True
                    break
        return job, outcome

    def _fails(self, job: Job) -> Outcome | None:
        self.tried += 1
        self.runner.forget()
        try:
            found = self.runner.run_job(job)
        except (ValueError, IndexError, ZeroDivisionError, AssertionError):
            return None  # the reduced parameters make no case
        for outcome in found:
            if outcome.check == self.check and outcome.status in (Status.MISMATCH, Status.ERROR):
                return outcome
        return None

    def _smaller_shapes(self, job: Job) -> Iterator[Job]:
        if job.inputs is not None:
            return
        for field in dataclasses.fields(job.case):
            value = getattr(job.case, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 1:
                continue
            for smaller in dict.fromkeys((1, value // 4, value // 2, value - 1)):
                if 0 < smaller < value:
                    yield dataclasses.replace(job, case=dataclasses.replace(job.case, **{field.name: smaller}))

    def _fewer_rows(self, job: Job) -> Iterator[Job]:
        assert job.inputs is not None
        count = num_rows(job.inputs, job.op)
        for rows in _halves(count):
            yield dataclasses.replace(job, inputs=take(job.inputs, job.op, rows))

    def _simpler_values(self, job: Job) -> Iterator[Job]:
        assert job.inputs is not None
        for name, value in job.inputs.items():
            if not isinstance(value, torch.Tensor) or value.dtype not in _SIMPLE or not value.numel():
                continue
            if name == job.op.writes:
                continue
            for simple in _simplified(value):
                yield dataclasses.replace(job, inputs=job.inputs | {name: simple})


_SIMPLE = (torch.bfloat16, torch.float16, torch.float32)


def _halves(count: int) -> Iterator[list[int]]:
    if count <= 1:
        return
    half = count // 2
    yield list(range(half))
    yield list(range(half, count))
    if count <= 8:
        for row in range(count):
            yield [i for i in range(count) if i != row]


def _simplified(value: torch.Tensor) -> Iterator[torch.Tensor]:
    wide = value.to(torch.float32)
    kept = ~wide.isfinite()  # poison stays poison: it may be what the case is about
    for simple in (torch.zeros_like(wide), torch.ones_like(wide), wide.clamp(-4, 4).round(), wide.sign()):
        changed = torch.where(kept, wide, simple).to(value.dtype)
        if not torch.equal(changed.nan_to_num(), value.nan_to_num()) and _cost(changed) < _cost(value):
            copy = value.clone(memory_format=torch.preserve_format)
            copy.copy_(changed)
            yield copy


def _cost(value: torch.Tensor) -> int:
    """Smaller is simpler: zero costs nothing, one costs one, small integers two, everything else three."""
    x = value.to(torch.float32).nan_to_num()
    whole = (x == x.round()) & (x.abs() <= 4)
    return int((torch.where(x == 0, 0, torch.where(x == 1, 1, torch.where(whole, 2, 3)))).sum())


def save(shrunk: Shrunk, folder: Path, candidate: str, seed: int) -> Path:
    """Write the shrunk case to `folder`; the name holds its component, operation, check and a digest."""
    job, check = shrunk.job, shrunk.outcome.check
    text = f"{job.label}/{candidate}/{check}/{seed}/{shrunk.describe()}"
    stem = (
        f"{job.card.component}.{job.op.name}-{check.replace(':', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )
    case = CaseFile(
        component=job.card.component,
        op=job.op.name,
        candidate=candidate,
        check=check,
        seed=seed,
        case=StoredCase(id=job.case.id, regime=job.case.regime),
        inputs=shrunk.inputs,
        note=f"{shrunk.outcome.message}; {shrunk.outcome.diagnosis}",
    )
    return write(folder / f"{stem}.safetensors", case)
