"""The main job on real input, short enough to watch: three judgements that pass and one that must fail."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from . import report, shrink
from .card import Candidate, Card, Op, load_card
from .gate import Job, Runner, Settings, plan
from .house import HOUSE
from .outcome import EXIT_FAILED, EXIT_NOT_RUN, EXIT_PASSED, Outcome, exit_status

WRONG = HOUSE / "tests" / "candidates" / "wrong_sparse_attn.py"
# short enough to watch; `deeptwin gate` judges every component
SHOWN = ("quant", "rms_norm", "rope", "mla", "sparse_attn")
SHOWN_PEER_CASES = 8
SHOWN_REGIMES = ("normal", "peaked", "flat", "mean1")


def play(console: Console) -> int:
    """Run the four scenes; 0 when the first three pass and the wrong kernel is caught."""
    settings = Settings()
    cards = [load_card(name) for name in SHOWN]
    started = time.monotonic()
    codes = []

    _title(console, "1. the shipped Triton kernels, under the interpreter, against the reference")
    kernels = [job for card in cards for op in card.ops if op.candidates for job in _some(card, op)]
    codes.append(_show(console, settings, kernels))

    _title(console, "2. transformers' DeepseekV3Attention on real text, fp32 and bf16, prefill and cached decode")
    codes.append(_show(console, settings, _peer_jobs([load_card("mla")], text=True)))

    _title(console, "3. TileKernels' torch quantisers and other independent code against the reference")
    codes.append(_show(console, settings, _peer_jobs([c for c in cards if c.component != "mla"], text=False)))

    _title(console, "4. a deliberately wrong kernel: tests/candidates/wrong_sparse_attn.py")
    codes.append(_wrong_kernel(console, settings))
    console.print(f"\ndemo finished in {time.monotonic() - started:.0f} s")
    return max(codes)


def _title(console: Console, text: str) -> None:
    console.print(f"\n{text}\n", style="bold", markup=False, soft_wrap=True)


def _some(card: Card, op: Op) -> list[Job]:
    chosen: dict[str, Job] = {}
    rows = tuple(row for row in op.candidates if "cpu" in row.archs)
    for job in plan(card, op, full=False):
        if job.case.regime in SHOWN_REGIMES and all(row.refusal(job.case, "cpu") is None for row in rows):
            chosen.setdefault(job.case.regime, replace(job, candidates=rows, peers=()))
    return list(chosen.values())


def _peer_jobs(cards: Iterable[Card], *, text: bool) -> list[Job]:
    jobs = []
    for card in cards:
        for op in card.ops:
            with_peers = [job for job in plan(card, op, full=False) if job.peers]
            wanted = [job for job in with_peers if bool(getattr(job.case, "text", "")) is text]
            jobs += [replace(job, candidates=()) for job in (wanted if text else wanted[:SHOWN_PEER_CASES])]
    return jobs


def _run(settings: Settings, jobs: list[Job]) -> list[Outcome]:
    with Runner(settings) as runner:
        return runner.run(jobs)


def _show(console: Console, settings: Settings, jobs: list[Job]) -> int:
    started = time.monotonic()
    outcomes = _run(settings, jobs)
    report.print_result(console, outcomes, seconds=time.monotonic() - started)
    return exit_status(outcomes)


def _wrong_kernel(console: Console, settings: Settings) -> int:
    if not WRONG.is_file():
        console.print("skipped: the wrong kernel lies in tests/ of a source checkout", style="yellow")
        return EXIT_NOT_RUN
    spec = f"{WRONG.relative_to(HOUSE)}:sparse_attn"
    card = load_card("sparse_attn")
    op = card.op("sparse_attn")
    row = Candidate(name=spec, function=f"{WRONG}:sparse_attn")
    job = next(job for job in plan(card, op, full=False, rows=(row,)) if job.case.regime == "normal")
    failed = next((o for o in _run(settings, [job]) if o.status in report.FAILING), None)
    if failed is None:
        console.print("the wrong kernel was not caught", style="bold red")
        return EXIT_FAILED
    console.print(report.details(failed), markup=False, soft_wrap=True)
    with Runner(replace(settings, jobs=1)) as runner:
        smallest = shrink.Shrinker(runner, row, failed.check).shrink(job, failed)
    path = shrink.save(smallest, _failure_folder(), row.function, settings.seed)
    console.print(
        f"\nthe smallest failing case ({smallest.tried} tried): {smallest.describe()}", markup=False, soft_wrap=True
    )
    command = f"deeptwin run --case {shlex.quote(str(path))}"
    text = report.details(replace(smallest.outcome, command=command))
    console.print(text, markup=False, soft_wrap=True)
    console.print("\ncaught, as it must be", style="bold green")
    return EXIT_PASSED


def _failure_folder() -> Path:
    folder = Path("deeptwin-failures")
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="deeptwin-failures-"))
    return folder
