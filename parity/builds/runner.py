"""Builds many kernels: in parallel, each at most once for the same sources and compilers.

A build that succeeded is kept in the user's cache under the hash of everything that it depends on: the files that its
kernel, its launch and its builder import, the versions of the compilers, and what the card expects.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..card import Card, Op
from ..changed import import_graph, reachable
from ..house import HOUSE
from ..outcome import BUILT, Outcome, Status
from ..pool import Worker
from ..protocol import BuildRequest
from .spec import BuildCase

BUILDERS = {
    ("triton", "sm90"): "nvidia",
    ("triton", "sm100"): "nvidia",
    ("triton", "ascend950"): "ascend",
    ("tilelang", "sm90"): "tilelang_cuda",
    ("tilelang", "sm100"): "tilelang_cuda",
    ("tilelang", "ascend950"): "tilelang_ascend",
}
Report = Callable[[Outcome], None]


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """One case for one architecture."""

    card: Card
    op: Op
    case: BuildCase
    arch: str

    @property
    def label(self) -> str:
        """`component.op/case`."""
        return f"{self.card.component}.{self.op.name}/{self.case.name}"


def builder_name(dsl: str, arch: str) -> str:
    """The module that builds a language for an architecture."""
    return f"deeptwin.parity.builds.{BUILDERS[dsl, arch]}"


def plan(cards: Sequence[Card], archs: Sequence[str]) -> list[BuildJob]:
    """Every build that the cards declare for these architectures."""
    return [
        BuildJob(card=card, op=op, case=case, arch=arch)
        for arch in archs
        for card in cards
        for op in card.ops
        for case in op.builds
        if any(key.startswith(arch) and key.removeprefix(arch)[:1] in ("", "-") for key in case.expect)
    ]


class BuildRunner:
    """Runs builds, each thread with its own compile process; a context manager."""

    def __init__(
        self, jobs: int = 2, timeout: float = 300.0, use_cache: bool = True, report: Report = lambda outcome: None
    ) -> None:
        self.jobs = jobs
        self.timeout = timeout
        self.use_cache = use_cache
        self.report = report
        self.reused = 0  # outcomes that came out of the cache
        self._local = threading.local()
        self._workers: list[Worker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> BuildRunner:
        return self

    def __exit__(self, *failure: object) -> None:
        for worker in self._workers:
            worker.stop()

    def run(self, jobs: Sequence[BuildJob]) -> list[Outcome]:
        """Every outcome, in the order of the jobs."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return [outcome for found in pool.map(self.run_job, jobs) for outcome in found]

    def run_job(self, job: BuildJob) -> list[Outcome]:
        """The outcomes of one job, from the cache if nothing that they depend on has changed."""
        kept = cache_folder() / f"{key_of(job)}.json"
        found = _read(kept) if self.use_cache else []
        if found:
            with self._lock:
                self.reused += len(found)
        else:
            found = self._build(job)
            if self.use_cache and all(outcome.status in BUILT for outcome in found):
                _write(kept, found)
        for outcome in found:
            self.report(outcome)
        return found

    def _build(self, job: BuildJob) -> list[Outcome]:
        request = BuildRequest(component=job.card.component, op=job.op.name, case=job.case, arch=job.arch)
        reply = self._worker().ask(request)
        if reply.status == "ok":
            return list(reply.builds)
        message = "\n".join(filter(None, (reply.message, reply.trace.rstrip())))
        return [
            Outcome(
                component=job.card.component,
                op=job.op.name,
                candidate=job.case.dsl,
                case=job.case.name,
                check=job.arch,
                status=Status.ERROR,
                message=message,
                command=f"deeptwin compile --arch {job.arch} --component {job.card.component}",
            )
        ]

    def _worker(self) -> Worker:
        if not hasattr(self._local, "worker"):
            self._local.worker = Worker("cuda", self.timeout, module="deeptwin.parity.builds.worker")
            with self._lock:
                self._workers.append(self._local.worker)
        return self._local.worker


# the cache


def cache_folder() -> Path:
    """Where finished builds are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deeptwin" / "builds"


def key_of(job: BuildJob) -> str:
    """Hash of the sources, the compilers and the expectation of a job."""
    builder = builder_name(job.case.dsl, job.arch)
    roots = {name.partition(":")[0] for name in (job.case.kernel, job.case.launch)} | {builder}
    roots = {root.removeprefix("deeptwin.") for root in roots}
    digest = hashlib.sha256(repr((job.label, job.arch, job.case, toolchain(builder), sys.version_info[:2])).encode())
    for module in sorted(reachable(roots, _graph())):
        path = _file_of(module)
        if path is not None and _shapes_a_build(module):
            digest.update(f"{module}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def toolchain(builder: str) -> dict[str, str]:
    """Names and versions of the compilers behind a builder; nothing if it does not say."""
    try:
        module = importlib.import_module(builder)
    except ModuleNotFoundError:
        return {}
    return dict(getattr(module, "toolchain", dict)())


def _shapes_a_build(module: str) -> bool:
    return not module.startswith("parity.") or module.startswith("parity.builds.")


@cache
def _graph() -> dict[str, set[str]]:
    return import_graph()


@cache
def _file_of(module: str) -> Path | None:
    base = HOUSE.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _read(path: Path) -> list[Outcome]:
    try:
        return [outcome_of(record) for record in json.loads(path.read_text())["outcomes"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _write(path: Path, outcomes: Sequence[Outcome]) -> None:
    from ..files import write_json

    write_json(path, {"outcomes": [outcome.to_json() for outcome in outcomes]})


def outcome_of(record: dict[str, object]) -> Outcome:
    """The outcome of a build that `Outcome.to_json` wrote."""
    fields = {name: value for name, value in record.items() if name != "id"}
    return replace(Outcome(**fields), status=Status(record["status"]))  # type: ignore[arg-type]
