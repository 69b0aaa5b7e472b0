"""Speed beside parity: every candidate of an operation at production shapes, in one run, on one device.

A bench draws inputs on the device, runs each candidate, judges a sample of its rows by the card's rules, times it, and
judges the same rows again. The benches of a component share a process; one that dies costs one table. Figures are
ratios to the other candidates of the same process and shares of the ceilings that the run measured first.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import json
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .card import Candidate, Inputs, Op, load_card, resolve
from .device_draws import DeviceDraws
from .environment import facts, family, fixed_numerics
from .guard import taken_arguments
from .house import worker_environment
from .judge import judge
from .oracles import OracleSet
from .outcome import Status
from .relations import num_rows, pick_rows, take

SCHEMA = "deeptwin.bench/1"
SEVERITY = (Status.PASSED, Status.KNOWN_FAILURE, Status.MISMATCH)
SAMPLED_ROWS = 6  # judged of each output: the first, the last and four between
WARMUP_MS, REPEAT_MS = 25, 100
SLOWER, SLOWER_MS = 1.05, 0.0008  # R19: a regression is beyond both


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One production shape: how its inputs are drawn on a device, and the least work that it is.

    `flops` counts two for a multiply-add, `bytes` every input and output once. `promises` are arguments beyond those of
    the reference, for candidates that know them: what a caller vouches for need not be read back from the device.
    `pick` makes the inputs of the judged rows where other arguments count rows; `sampled` is how many are judged.
    """

    component: str
    op: str
    shape: str
    draw: Callable[[DeviceDraws], Inputs]
    flops: float = 0.0
    bytes: float = 0.0
    promises: Mapping[str, object] = field(default_factory=dict)
    pick: Callable[[Inputs, list[int]], Inputs] | None = None
    sampled: int = SAMPLED_ROWS

    @property
    def id(self) -> str:
        """`component.op/shape`."""
        return f"{self.component}.{self.op}/{self.shape}"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was measured of one candidate: `ms` with cold caches, `graph_ms` in back-to-back graph replays."""

    bench: str
    candidate: str
    status: str
    message: str = ""
    budget_used: float | None = None
    ms: float | None = None
    graph_ms: float | None = None
    tflops: float | None = None  # these rates are of the shorter of the two times
    gbs: float | None = None
    ceiling: float | None = None  # share of the tighter of the two ceilings
    ratio: float | None = None  # cold time of the fastest other candidate over this one's: above 1 is faster
    graph_ratio: float | None = None  # the same of the graph times, in which a host's launches have no part


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What this device does at best, measured in the same run."""

    copy_gbs: float
    matmul_tflops: float


def benches(components: Sequence[str] = ()) -> list[Bench]:
    """All benches, or those of some components, in the order of `parity/benches`."""
    from . import benches as folder

    found: list[Bench] = []
    for name in sorted(module.name for module in pkgutil.iter_modules(folder.__path__)):
        if not components or name in components:
            found += importlib.import_module(f"{folder.__name__}.{name}").BENCHES
    return found


def run(chosen: Sequence[Bench], *, timeout: float, report: Callable[[str, list[Timing]], None]) -> dict[str, Any]:
    """Every bench, the components in processes of their own; returns the record. `timeout` is that of one bench."""
    with fixed_numerics():
        ceilings = measure_ceilings()
        record = facts("cuda")
    rows: list[Timing] = []
    for _, group in itertools.groupby(chosen, key=lambda bench: bench.component):
        pending = list(group)
        while pending:
            finished, reason = _apart(pending, ceilings, timeout)
            for bench, found in zip(pending, finished, strict=False):
                report(bench.id, found)
                rows += found
            pending = pending[len(finished) :]
            if pending:
                failed = Timing(bench=pending[0].id, candidate="-", status=Status.ERROR.value, message=reason)
                report(failed.bench, [failed])
                rows.append(failed)
                pending = pending[1:]
    return {
        "schema": SCHEMA,
        "environment": record,
        "ceilings": asdict(ceilings),
        "rows": [asdict(row) for row in rows],
    }


def measure_ceilings() -> Ceilings:
    """A copy of 2 GiB (read and written bytes) and a bf16 product of 8192³ on random data."""
    draws = DeviceDraws("cuda")
    source, a, b = draws.normal(1 << 30), draws.normal(8192, 8192), draws.normal(8192, 8192)
    target = torch.empty_like(source)
    copy, product = _median_ms(lambda: target.copy_(source)), _median_ms(lambda: torch.matmul(a, b))
    return Ceilings(copy_gbs=2 * source.nbytes / copy / 1e6, matmul_tflops=2 * 8192**3 / product / 1e9)


def measure(bench: Bench, ceilings: Ceilings) -> list[Timing]:
    """All candidates of one bench in this process."""
    op = load_card(bench.component).op(bench.op)
    inputs = bench.draw(DeviceDraws("cuda"))
    count = num_rows(inputs, op)
    # what is written in place has no rows of its own: all of it is judged
    sample = range(count) if op.writes else (round(i * (count - 1) / (bench.sampled - 1)) for i in range(bench.sampled))
    rows = sorted(set(sample))
    held = {name: _on_host(value) for name, value in inputs.items()}
    oracles = OracleSet(op, take(held, op, rows) if bench.pick is None else bench.pick(held, rows))
    timings = [_timed(bench, op, row, inputs, rows, oracles) for row in op.candidates if family("cuda") in row.archs]
    return _compared([_rated(one, bench, ceilings) for one in timings])


def _on_host(value: Any) -> Any:
    if (
        is_dataclass(value)
        and not isinstance(value, type)
        and any(isinstance(getattr(value, x.name), Tensor) for x in fields(value))
    ):
        return replace(value, **{x.name: _on_host(getattr(value, x.name)) for x in fields(value)})
    return value.cpu() if isinstance(value, Tensor) else value


def _timed(bench: Bench, op: Op, row: Candidate, inputs: Inputs, rows: list[int], oracles: OracleSet) -> Timing:
    base = Timing(bench=bench.id, candidate=row.name, status=Status.UNSUPPORTED.value)
    missing = [name for name in row.needs if importlib.util.find_spec(name) is None]
    if missing:
        return replace(base, message=f"needs {', '.join(missing)}")
    function = resolve(row.function)
    known = inspect.signature(function).parameters
    promised = {name: value for name, value in bench.promises.items() if name in known}
    try:
        call = partial(function, **taken_arguments(inputs, known), **promised)
        before = _verdict(call(), op, rows, oracles, row)
        with _plain_memory():
            ms, graph_ms = _median_ms(call), _graph_ms(call)
        after = _verdict(call(), op, rows, oracles, row)
    except (NotImplementedError, ImportError) as error:
        return replace(base, message=str(error))
    status, used, message = max(before, after, key=lambda verdict: (SEVERITY.index(verdict[0]), verdict[1]))
    return replace(base, status=status.value, budget_used=used, message=message, ms=ms, graph_ms=graph_ms)


@contextmanager
def _plain_memory() -> Iterator[None]:
    """Without the NaN that judging fills fresh memory with: it would be timed too."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def _verdict(
    result: Any, op: Op, rows: list[int], oracles: OracleSet, candidate: Candidate
) -> tuple[Status, float, str]:
    """The worst of all outputs; what the candidate's maker does not promise is a known failure, output by output."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    values = result if isinstance(result, tuple) else (result,)
    outputs = dict(zip((output.name for output in op.outputs), values, strict=True))
    picked = {name: x.cpu() for name, x in (outputs if op.writes else pick_rows(op, rows)(outputs)).items()}
    found = []
    for one in judge(picked, oracles, dict(candidate.rules)):
        failed, excused = one.status is Status.MISMATCH, one.output in candidate.unpromised
        status = Status.KNOWN_FAILURE if failed and excused else one.status
        found.append(
            (status, one.budget_used or 0.0, f"{one.output}: {one.message}; {one.diagnosis}" if failed else "")
        )
    return max(found, key=lambda verdict: (SEVERITY.index(verdict[0]), verdict[1]))


def _median_ms(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="median"))


def _graph_ms(call: Callable[[], Any]) -> float | None:
    from triton.testing import do_bench_cudagraph

    try:
        return float(do_bench_cudagraph(call, rep=REPEAT_MS, return_mode="median"))
    except RuntimeError:  # it allocates, or reads back, while it is captured
        return None


def _rated(timing: Timing, bench: Bench, ceilings: Ceilings) -> Timing:
    ms = min((x for x in (timing.ms, timing.graph_ms) if x), default=None)
    if ms is None:
        return timing
    tflops, gbs = bench.flops / ms / 1e9, bench.bytes / ms / 1e6
    share = max(tflops / ceilings.matmul_tflops, gbs / ceilings.copy_gbs)
    return replace(timing, tflops=tflops, gbs=gbs, ceiling=share)


def _compared(timings: list[Timing]) -> list[Timing]:
    """Each with the ratios of the fastest other candidate's times to its own, like with like."""
    found = []
    for one in timings:
        others = [x for x in timings if x.candidate != one.candidate]
        cold, graph = _ratio([x.ms for x in others], one.ms), _ratio([x.graph_ms for x in others], one.graph_ms)
        found.append(replace(one, ratio=cold, graph_ratio=graph))
    return found


def _ratio(others: Sequence[float | None], own: float | None) -> float | None:
    timed = [ms for ms in others if ms]
    return min(timed) / own if timed and own else None


def _apart(pending: Sequence[Bench], ceilings: Ceilings, timeout: float) -> tuple[list[list[Timing]], str]:
    """`measure` of several benches in a new process: those that it finished, and why it finished no more."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.touch()
        names = json.dumps([bench.id for bench in pending])
        words = [sys.executable, "-m", "deeptwin.parity.bench", names, json.dumps(asdict(ceilings)), str(path)]
        environment = worker_environment("cuda")
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=timeout * len(pending), check=False, env=environment
            )
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
            reason = lines[-1][:400]
        except subprocess.TimeoutExpired:
            reason = f"no result within {timeout * len(pending):.0f} s"
        found = [[Timing(**row) for row in json.loads(line)] for line in path.read_text().splitlines()]
        return found, reason


def _measure_all(names: Sequence[str], ceilings: Ceilings, path: Path) -> None:
    """Measure benches by name and append what was found, a line for each."""
    known = {bench.id: bench for bench in benches()}
    for name in names:
        with fixed_numerics():
            found = measure(known[name], ceilings)
        with path.open("a") as file:
            file.write(json.dumps([asdict(one) for one in found]) + "\n")
        torch.cuda.empty_cache()


def regressions(rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> list[str]:
    """What became slower than a saved run by more than R19 allows, in words."""
    saved = {(row["bench"], row["candidate"]): row["ms"] for row in baseline if row["ms"]}
    found = []
    for row in rows:
        old = saved.get((row["bench"], row["candidate"]))
        if old and row["ms"] and row["ms"] > SLOWER * old and row["ms"] - old > SLOWER_MS:
            found.append(f"{row['bench']} {row['candidate']}: {old:.4g} ms before, {row['ms']:.4g} ms now")
    return found


def show(console: Console, bench: str, rows: Sequence[Timing]) -> None:
    """Print one bench as a table."""
    titles = ("verdict", "budget", "ms", "graph ms", "TFLOP/s", "GB/s", "of ceiling", "ratio", "graph ratio")
    table = Table(bench, *titles, box=None)
    for row in rows:
        rates = (row.tflops, row.gbs, row.ceiling, row.ratio, row.graph_ratio)
        numbers = (row.budget_used, row.ms, row.graph_ms, *rates)
        table.add_row(row.candidate, row.status, *("-" if x is None else f"{x:.3g}" for x in numbers))
    console.print(table)
    for row in rows:
        if row.message:
            console.print(f"  {row.candidate}: {row.message}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    _measure_all(json.loads(sys.argv[1]), Ceilings(**json.loads(sys.argv[2])), Path(sys.argv[3]))
