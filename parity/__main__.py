"""The `deeptwin` command line."""

from __future__ import annotations

import difflib
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from . import casefile, changed, goldens, mutation, report, shrink
from .candidates import CandidateNotFound, check_spec, fitting_ops, is_path
from .card import Candidate, Card, Op, card_names, load_card
from .environment import facts
from .files import replacing, write_json
from .gate import Job, Runner, Settings, plan, reference_row
from .outcome import BUILT, EXIT_FAILED, EXIT_NOT_RUN, EXIT_USAGE, Outcome, Status, exit_status

if TYPE_CHECKING:
    from .bisect import Compared

app = typer.Typer(
    help="Judge a fast kernel against the readable reference: right or wrong, and on which smallest input.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
golden_app = typer.Typer(help="Pinned outputs of the reference.", no_args_is_help=True)
app.add_typer(golden_app, name="golden")
CALL_LIMIT_S, FULL_LIMIT_S = 60.0, 300.0
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Component = Annotated[
    str, typer.Argument(help="A component, see `deeptwin list`.", autocompletion=lambda: list(card_names()))
]
Components = Annotated[list[str] | None, typer.Option("--component", "-c", help="Only this component (repeatable).")]
OpName = Annotated[
    str | None, typer.Option("--op", help="An operation of the component; by default found by signature.")
]
CandidateSpec = Annotated[
    str | None,
    typer.Option("--candidate", help="A row of the card, path/to/file.py:function or package.module:function."),
]
CaseId = Annotated[str | None, typer.Option("--case", help="One case by id, or a case file written by a failure.")]
Seed = Annotated[int, typer.Option("--seed", help="Changes every drawn input; printed with every result.")]
Device = Annotated[str, typer.Option("--device", help="cpu (Triton interpreter) or cuda.")]
Full = Annotated[bool, typer.Option("--full", help="Every case and the long relations.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Worker processes.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", help="Seconds one check may take before its worker is killed (60, with --full 300)."),
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the results as JSON (schema deeptwin.report/1).")]
RecordPath = Annotated[Path | None, typer.Option("--record", help="Write counts by check with device facts as JSON.")]
JunitPath = Annotated[Path | None, typer.Option("--junit", help="Write the results as JUnit XML.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every outcome, not only failures.")]


def fail(message: str) -> NoReturn:
    """Bad usage: say what was wrong and how to put it right, exit 2."""
    errors.print(f"error: {message}", style="red", markup=False)
    raise typer.Exit(EXIT_USAGE)


def _choose(kind: str, name: str, known: Sequence[str], hint: str) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    fail(f"{kind}: no {kind} called {name!r}.{meant} {hint}")


def _card(name: str) -> Card:
    return load_card(_choose("component", name, card_names(), "See 'deeptwin list'."))


def _rows(op: Op) -> dict[str, Candidate]:
    """Everything of an operation that can be judged by name: candidates, the reference, controls and mutants."""
    rows = [*op.candidates, reference_row(op), *op.controls]
    rows += [Candidate(name=mutant.name, function=mutant.function) for mutant in op.mutants]
    return {row.name: row for row in rows}


def _ops(card: Card, name: str | None, spec: str | None) -> list[Op]:
    """The operations to judge: the named one, those that have the named row, or those whose signature fits."""
    if name is not None:
        return [card.op(_choose("op", name, card.op_names, f"{card.component} has {', '.join(card.op_names)}."))]
    if spec is None:
        return list(card.ops)
    if ":" not in spec:
        named = sorted({row for op in card.ops for row in _rows(op)})
        _choose(
            "candidate", spec, named, f"See 'deeptwin show {card.component}', or name a function: file.py:function."
        )
        return [op for op in card.ops if spec in _rows(op)]
    _check_spec(spec)
    try:
        fits = fitting_ops(card.component, spec)
    except CandidateNotFound as error:
        errors.print(f"error: candidate: {error}", style="red", markup=False)
        raise typer.Exit(EXIT_FAILED) from error
    if not fits:
        calls = "\n  ".join(_signature(op) for op in card.ops)
        fail(f"candidate: {spec} has the parameters of no operation of {card.component}:\n  {calls}")
    return [card.op(name) for name in fits]


def _check_spec(spec: str) -> None:
    try:
        check_spec(spec)
    except ValueError as error:
        fail(str(error))


def _row(op: Op, spec: str) -> Candidate:
    if ":" in spec or is_path(spec):
        _check_spec(spec)
        return Candidate(name=spec, function=spec, required=False)
    rows = _rows(op)
    return rows[_choose("candidate", spec, list(rows), f"{op.name} has {', '.join(list(rows)[:8])}.")]


def _select(
    component: str, op: str | None, candidate: str | None, case: str | None, settings: Settings
) -> tuple[list[Job], str]:
    """The jobs that the options name, and a title for them."""
    card = _card(component)
    work: list[Job] = []
    for chosen in _ops(card, op, candidate):
        rows = None if candidate is None else (_row(chosen, candidate),)
        work += plan(card, chosen, full=settings.full or case is not None, device=settings.device, rows=rows)
    if case is not None:
        _choose("case", case, sorted({job.case.id for job in work}), f"See 'deeptwin show {component}'.")
        work = [job for job in work if job.case.id == case]
    return work, ", ".join(dict.fromkeys(f"{component}.{job.op.name}" for job in work))


def _settings(seed: int, full: bool, device: str, jobs: int, timeout: float | None = None) -> Settings:
    if device not in ("cpu", "cuda"):
        fail(f"device: expected cpu or cuda, got {device!r}")
    if jobs < 1:
        fail(f"jobs: expected at least 1, got {jobs}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            errors.print("did not run: --device cuda, but torch finds no CUDA device", style="red", markup=False)
            raise typer.Exit(EXIT_NOT_RUN)
    limit = timeout if timeout is not None else (FULL_LIMIT_S if full else CALL_LIMIT_S)
    return Settings(seed=seed, full=full, device=device, jobs=jobs, timeout=limit)


def _run_jobs(settings: Settings, jobs: Sequence[Job], title: str) -> list[Outcome]:
    """Run with a progress bar on a terminal, plain lines in a pipe."""
    if not console.is_terminal:
        with Runner(settings) as runner:

            def note(outcome: Outcome) -> None:
                if outcome.status in report.FAILING:
                    console.print(report.line(outcome), markup=False, soft_wrap=True)

            def tell(done: int, total: int) -> None:
                if done * 10 // total > (done - 1) * 10 // total and total >= 100:
                    console.print(f"{title}: {done} of {total} cases", markup=False, soft_wrap=True)

            runner.report, runner.progress = note, tell
            console.print(f"{title}: {len(jobs)} cases, seed {settings.seed}", markup=False, soft_wrap=True)
            return runner.run(jobs)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar, Runner(settings) as runner:
        cases = bar.add_task(title, total=len(jobs))
        runner.progress = lambda done, total: bar.update(cases, completed=done)
        return runner.run(jobs)


def _finish(
    outcomes: list[Outcome],
    settings: Settings,
    started: float,
    json_path: Path | None = None,
    junit: Path | None = None,
    verbose: bool = False,
) -> int:
    """Print and write the results; the exit status."""
    report.print_result(console, outcomes, seconds=time.monotonic() - started, verbose=verbose)
    if json_path is not None:
        record = report.to_json(
            outcomes,
            command=shlex.join(["deeptwin", *sys.argv[1:]]),
            environment=facts(settings.device),
            seed=settings.seed,
        )
        write_json(json_path, record)
    if junit is not None:
        with replacing(junit) as aside:
            aside.write_bytes(report.to_junit(outcomes))
    return exit_status(outcomes)


@app.command("list")
def list_components(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List components, their operations and candidates.

    Example: `deeptwin list`
    """
    cards = [load_card(name) for name in card_names()]
    if as_json:
        console.print_json(json.dumps([_describe(card) for card in cards]))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("component", "operation", "candidates", "cases", "mutants", "what it is"):
        table.add_column(title)
    for card in cards:
        for number, op in enumerate(card.ops):
            rows = ", ".join(row.name for row in op.candidates) or "-"
            counts = f"{len(op.cases(False))} / {len(op.cases(True))}"
            first = number == 0
            table.add_row(
                card.component if first else "",
                op.name,
                rows,
                counts,
                str(len(op.mutants)),
                card.summary if first else "",
            )
    console.print(table)


def _describe(card: Card) -> dict[str, Any]:
    return {
        "component": card.component,
        "summary": card.summary,
        "contract": dict(card.contract),
        "facts": dict(card.facts()),
        "operations": [
            {
                "name": op.name,
                "reference": op.reference,
                "signature": _signature(op),
                "outputs": [o.name for o in op.outputs],
                "relations": [f"{r.name} ({r.axis}, {r.promise})" for r in op.relations],
                "candidates": [{"name": c.name, "function": c.function, "archs": list(c.archs)} for c in op.candidates],
                "peers": [{"name": p.name, "explains": p.explains} for p in op.peers],
                "mutants": [{"name": m.name, "entry": m.entry, "fault": m.fault} for m in op.mutants],
                "cases": [case.id for case in op.cases(False)],
                "full_cases": [case.id for case in op.cases(True)],
            }
            for op in card.ops
        ],
        "equivalents": [{"name": e.name, "reason": e.reason} for e in card.equivalents],
    }


def _signature(op: Op) -> str:
    import inspect

    from .card import resolve

    signature = inspect.signature(resolve(op.reference))
    shown = [p for name, p in signature.parameters.items() if name not in ("num", "tap")]
    kept = [p.replace(annotation=inspect.Parameter.empty) for p in shown]
    names = signature.replace(parameters=kept, return_annotation=inspect.Signature.empty)
    return f"{op.name}{names} -> {', '.join(o.name for o in op.outputs)}"


@app.command()
def show(
    component: Component, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False
) -> None:
    """Show the contract of a component: signatures, rounding, edges, rules, relations, cases, mutants.

    Example: `deeptwin show sparse_attn`
    """
    card = _card(component)
    if as_json:
        console.print_json(json.dumps(_describe(card)))
        return
    console.print(f"[bold]{card.component}[/bold]: {card.summary}\n")
    for key, text in card.contract.items():
        console.print(f"  {key:<14} {text}", markup=False)
    for key, text in card.facts().items():
        console.print(f"  {key:<24} {text}", markup=False)
    for op in card.ops:
        console.print(f"\n{_signature(op)}", style="bold", markup=False)
        for output in op.outputs:
            dtype = output.dtype or "dtype"
            console.print(f"  output    {output.name} ({dtype}): {output.rule}", markup=False)
        for relation in op.relations:
            console.print(f"  relation  {relation.name} ({relation.axis}): {relation.promise}", markup=False)
        for row in op.candidates:
            console.print(f"  candidate {row.name}: {row.function} ({', '.join(row.archs)})", markup=False)
        for peer in op.peers:
            console.print(f"  peer      {peer.name}: {peer.explains}", markup=False)
        for mutant in op.mutants:
            console.print(f"  mutant    {mutant.name} ({mutant.entry}): {mutant.fault}", markup=False)
        console.print(f"  cases     {', '.join(case.id for case in op.cases(False))}", markup=False)
    for equivalent in card.equivalents:
        console.print(f"  equivalent {equivalent.name}: {equivalent.reason}", markup=False)


@app.command()
def run(
    component: Annotated[str | None, typer.Argument(help="A component; a case file names its own.")] = None,
    op: OpName = None,
    candidate: CandidateSpec = None,
    case: CaseId = None,
    seed: Seed = 0,
    device: Device = "cpu",
    full: Full = False,
    jobs: Jobs = 2,
    timeout: Timeout = None,
    do_shrink: Annotated[bool, typer.Option("--shrink/--no-shrink", help="Make the first failure small.")] = True,
    out: Annotated[Path, typer.Option("--out", help="Folder for the case files of failures.")] = Path(
        "deeptwin-failures"
    ),
    json_path: JsonPath = None,
    junit: JunitPath = None,
    verbose: Verbose = False,
) -> None:
    """Judge one candidate, yours or a shipped one.

    Examples: `deeptwin run sparse_attn --candidate my_kernel.py:decode`,
    `deeptwin run rms_norm --candidate triton --case t2-m7168-bf16-normal`,
    `deeptwin run --case deeptwin-failures/FILE.safetensors`
    """
    started = time.monotonic()
    settings = _settings(seed, full, device, jobs, timeout)
    if case is not None and case.endswith(".safetensors"):
        work, settings = _from_case_file(Path(case), candidate, settings)
        title = case
    else:
        if component is None:
            fail("component: expected a component name or --case FILE. See 'deeptwin list'.")
        work, title = _select(component, op, candidate, case, settings)
    outcomes = _run_jobs(settings, work, title)
    code = _finish(outcomes, settings, started, json_path, junit, verbose)
    if candidate is not None and do_shrink and not (case or "").endswith(".safetensors"):
        _shrink_first(settings, work, outcomes, out)
    raise typer.Exit(code)


def _from_case_file(path: Path, candidate: str | None, settings: Settings) -> tuple[list[Job], Settings]:
    if not path.is_file():
        fail(f"case: no such file {str(path)!r}")
    try:
        stored = casefile.read(path)
    except casefile.BadCaseFile as error:
        fail(f"case: {error}")
    card = _card(stored.component)
    op = card.op(_choose("op", stored.op, card.op_names, f"The file {path} is older than the card."))
    row = _row(op, candidate or stored.candidate)
    job = Job(
        card=card,
        op=op,
        case=stored.case,
        candidates=(row,),
        inputs=stored.inputs,
        source=str(path),
        check=stored.check,
    )
    return [job], replace(settings, seed=stored.seed)


def _shrink_first(settings: Settings, work: Sequence[Job], outcomes: Sequence[Outcome], out: Path) -> None:
    """Make the first failure of a candidate small and write it to a file.

    A case that the reference refuses, or a peer that disagrees, is no failure of the candidate: shrinking needs one.
    """
    failures = report.by_weight(o for o in outcomes if o.status in report.FAILING)
    for failed in failures:
        job = _job_of(failed, work)
        row = next((row for row in job.candidates if row.name == failed.candidate), None) if job else None
        if job is not None and row is not None:
            _shrink(settings, job, row, failed, out)
            return
    if failures:
        console.print("\nno failure is the candidate's own: nothing to make small")


def _job_of(failed: Outcome, work: Sequence[Job]) -> Job | None:
    same_op = [job for job in work if job.op.name == failed.op]
    exact = [job for job in same_op if job.case.id == failed.case]
    # a rate over a regime fails: its largest case has the best chance to show it alone
    regime = [job for job in same_op if f"all-{job.case.regime}" == failed.case]
    return exact[0] if exact else max(regime, key=_size, default=None)


def _shrink(settings: Settings, job: Job, row: Candidate, failed: Outcome, out: Path) -> None:
    console.print("\nmaking the first failure small …")
    with Runner(replace(settings, jobs=1)) as runner:
        smallest = shrink.Shrinker(runner, row, failed.check).shrink(job, failed)
    path = shrink.save(smallest, out, row.name, settings.seed)
    console.print(f"minimal failing case ({smallest.tried} tried): {smallest.describe()}", markup=False, soft_wrap=True)
    again = replace(smallest.outcome, command=f"deeptwin run --case {shlex.quote(str(path))}")
    console.print(report.details(again), markup=False, soft_wrap=True)


def _size(job: Job) -> int:
    return sum(v for v in vars(job.case).values() if isinstance(v, int) and not isinstance(v, bool))


@app.command("shrink")
def shrink_command(
    component: Component,
    candidate: Annotated[str, typer.Option("--candidate", help="The failing candidate.")],
    case: Annotated[str, typer.Option("--case", help="The failing case.")],
    op: OpName = None,
    seed: Seed = 0,
    device: Device = "cpu",
    timeout: Timeout = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the case file.")] = Path("deeptwin-failures"),
) -> None:
    """Make one failing case small and write it to a file.

    Example: `deeptwin shrink rms_norm --candidate my.py:norm --case t2-m7168-bf16-normal`
    """
    settings = _settings(seed, False, device, 1, timeout)
    jobs, title = _select(component, op, candidate, case, settings)
    outcomes = _run_jobs(settings, jobs, title)
    if not any(o.status in report.FAILING for o in outcomes):
        console.print(f"{case} does not fail for {candidate}: nothing to make small")
        raise typer.Exit(exit_status(outcomes))
    _shrink_first(settings, jobs, outcomes, out)
    raise typer.Exit(1)


@app.command()
def gate(
    component: Components = None,
    seed: Seed = 0,
    device: Device = "cpu",
    full: Full = False,
    since: Annotated[
        str | None, typer.Option("--changed", help="Only components that differ from this git revision.")
    ] = None,
    require: Annotated[list[str] | None, typer.Option("--require", help="An architecture that must have run.")] = None,
    jobs: Jobs = 2,
    timeout: Timeout = None,
    json_path: JsonPath = None,
    junit: JunitPath = None,
    record: RecordPath = None,
    verbose: Verbose = False,
) -> None:
    """Check every promise: references, golden vectors, peers, candidates, relations. Exits non-zero when one is broken.

    Examples: `deeptwin gate`, `deeptwin gate --changed main`, `deeptwin gate --full --json report.json`
    """
    started = time.monotonic()
    settings = _settings(seed, full, device, jobs, timeout)
    names = [_card(name).component for name in component] if component else list(card_names())
    names = _touched(names, since)
    if not names:
        console.print(f"no component differs from {since}: nothing to judge")
        return
    cards = [load_card(name) for name in names]
    outcomes: list[Outcome] = [o for card in cards for o in goldens.verify(card)]
    work = [job for card in cards for op in card.ops for job in plan(card, op, full=full, device=device)]
    outcomes += _run_jobs(settings, work, "gate")
    code = _finish(outcomes, settings, started, json_path, junit, verbose)
    if record is not None:
        command = shlex.join(["deeptwin", *sys.argv[1:]])
        kept = report.to_record(outcomes, command=command, environment=facts(device), seed=seed)
        write_json(record, kept)
    have = {"cpu"} if device == "cpu" else {facts("cuda")["capability"]}
    missing = sorted(set(require or ()) - have)
    if missing:
        console.print(f"required but not run: {', '.join(missing)} (ran on {', '.join(have)})", style="bold red")
        code = code or EXIT_NOT_RUN
    raise typer.Exit(code)


@golden_app.command("verify")
def golden_verify(component: Components = None, verbose: Verbose = False) -> None:
    """Recompute every golden vector and compare bytes; missing, changed and unused ones fail.

    Example: `deeptwin golden verify`
    """
    started = time.monotonic()
    names = [_card(name).component for name in component] if component else list(card_names())
    outcomes = [o for name in names for o in goldens.verify(load_card(name))]
    raise typer.Exit(_finish(outcomes, Settings(), started, verbose=verbose))


@golden_app.command("update")
def golden_update(
    component: Components = None,
    new_only: Annotated[bool, typer.Option("--new-only", help="Add vectors, keep the stored ones.")] = False,
) -> None:
    """Write golden vectors from the reference. A changed vector needs a DECISIONS paragraph.

    Example: `deeptwin golden update --component rope --new-only`
    """
    names = [_card(name).component for name in component] if component else list(card_names())
    for name in names:
        try:
            moved = goldens.update(load_card(name), new_only=new_only)
        except goldens.GoldenError as error:
            errors.print(f"error: {error}", style="red", markup=False)
            raise typer.Exit(1) from error
        console.print(f"{name}: {', '.join(moved) if moved else 'unchanged'}", markup=False, soft_wrap=True)


@app.command()
def mutants(
    component: Components = None,
    full: Full = False,
    jobs: Jobs = 2,
    seed: Seed = 0,
    json_path: JsonPath = None,
    verbose: Verbose = False,
) -> None:
    """Run every named wrong variant and show which check kills it. A survivor fails, and so does a dead control.

    Example: `deeptwin mutants --component sparse_attn`
    """
    from concurrent.futures import ThreadPoolExecutor

    started = time.monotonic()
    settings = _settings(seed, full, "cpu", jobs)
    cards = [_card(name) for name in component] if component else [load_card(name) for name in card_names()]
    checked = _run_jobs(settings, [job for card in cards for job in mutation.controls(card, full=full)], "controls")
    work = [(card, op, mutant) for card in cards for op in card.ops for mutant in op.mutants]
    with Runner(settings) as runner, ThreadPoolExecutor(jobs) as pool:
        kills = list(pool.map(lambda item: mutation.hunt(runner, *item, full=full), work))
    for kill in kills:
        console.print(report.line(kill.outcome).replace("passed  ", "killed  "), markup=False, soft_wrap=True, end="")
        console.print("  " + kill.outcome.message.rpartition(": ")[2], markup=False, soft_wrap=True)
    for card in cards:
        for equivalent in card.equivalents:
            console.print(
                f"equivalent    {card.component}/{equivalent.name}: {equivalent.reason}", markup=False, soft_wrap=True
            )
    outcomes = checked + [kill.outcome for kill in kills]
    killed = sum(kill.outcome.status is Status.PASSED for kill in kills)
    console.print(f"\n{killed} of {len(kills)} mutants killed")
    raise typer.Exit(_finish(outcomes, settings, started, json_path, verbose=verbose))


@app.command("compile")
def compile_command(
    arch: Annotated[
        list[str] | None, typer.Option("--arch", help="sm90, sm100 or ascend950 (repeatable); by default all of them.")
    ] = None,
    component: Components = None,
    since: Annotated[
        str | None, typer.Option("--changed", help="Only components that differ from this git revision.")
    ] = None,
    require: Annotated[list[str] | None, typer.Option("--require", help="An architecture that must be built.")] = None,
    jobs: Jobs = 2,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one build may take.")] = 600.0,
    use_cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Build only what changed since it was last built here.")
    ] = True,
    full: Annotated[
        bool, typer.Option("--full", help="Run every default case on the lowered Ascend kernels, not two of each.")
    ] = False,
    update: Annotated[bool, typer.Option("--update", help="Record the numbers in golden/records/ARCH/.")] = False,
    json_path: JsonPath = None,
    junit: JunitPath = None,
) -> None:
    """Build every kernel for chips that are not there: matrix unit, registers, spills, memory. Nothing runs.

    Examples: `deeptwin compile --arch sm100`, `deeptwin compile --changed main`,
    `deeptwin compile --arch ascend950 --require ascend950 --component mla`
    """
    from .builds import ascend_run, records
    from .builds.runner import BuildRunner, plan
    from .builds.spec import ARCHS

    started = time.monotonic()
    archs = list(dict.fromkeys(_choose("arch", name, ARCHS, f"One of {', '.join(ARCHS)}.") for name in arch or ARCHS))
    required = [_choose("arch", name, ARCHS, f"One of {', '.join(ARCHS)}.") for name in require or ()]
    names = _touched([_card(name).component for name in component] if component else list(card_names()), since)
    work = plan([load_card(name) for name in names], archs)
    if not work:
        console.print(f"no kernel to build differs from {since}" if since else "no card declares such a build")
        raise typer.Exit(0 if since else EXIT_NOT_RUN)
    with BuildRunner(jobs, timeout, use_cache, _build_progress(len(work))) as runner:
        outcomes = runner.run(work)
    if "ascend950" in archs:
        # what the chip's compiler starts from also runs, on this CPU: a wrong lowering shows here
        judging = Settings(jobs=jobs, full=full, relations=False)
        lowered = ascend_run.judge([load_card(name) for name in names], judging)
        outcomes += ascend_run.per_operation(lowered)
    # what a card declines by itself is not missing
    outcomes = [replace(o, required=o.required and o.check.partition("-")[0] in required) for o in outcomes]
    for name in archs:
        built = [o for o in outcomes if o.check.partition("-")[0] == name]
        records.show(console, name, built)
        if update:
            moved = records.update(name, built, complete=component is None and since is None)
            console.print(f"{name}: {len(moved)} recorded anew" if moved else f"{name}: the record stands")
    records.close(console, outcomes, seconds=time.monotonic() - started, reused=runner.reused)
    _write_builds(outcomes, archs, json_path, junit)
    code = exit_status(outcomes, ran=BUILT)
    missing = [a for a in required if not any(o.check.partition("-")[0] == a and o.status in BUILT for o in outcomes)]
    if missing:
        console.print(f"required but not built: {', '.join(missing)}", style="bold red")
        code = code or EXIT_NOT_RUN
    raise typer.Exit(code)


def _touched(names: list[str], since: str | None) -> list[str]:
    """Those of the components that differ from a git revision; all of them without one."""
    if since is None:
        return names
    try:
        touched = changed.affected_components(changed.changed_files(since))
    except changed.GitError as error:
        fail(str(error))
    return [name for name in names if name in touched]


def _build_progress(total: int) -> Callable[[Outcome], None]:
    """A line for every failure, and on a terminal one for every build."""
    done = 0

    def note(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if outcome.status in report.FAILING or console.is_terminal:
            console.print(f"{done}/{total} {report.line(outcome)}", markup=False, soft_wrap=True)

    return note


def _write_builds(outcomes: list[Outcome], archs: list[str], json_path: Path | None, junit: Path | None) -> None:
    from .builds import records

    if json_path is not None:
        command = shlex.join(["deeptwin", *sys.argv[1:]])
        written = report.to_json(outcomes, command=command, environment=facts("cpu"), seed=0)
        written["exit"] = exit_status(outcomes, ran=BUILT)
        written["toolchain"] = {name: records.compilers(name) for name in archs}
        recorded = {name: records.read(name) for name in archs}
        found = {o.id: records.changes(o, recorded[o.check.partition("-")[0]]) for o in outcomes}
        written["changes"] = {name: differs for name, differs in found.items() if differs}
        write_json(json_path, written)
    if junit is not None:
        with replacing(junit) as aside:
            aside.write_bytes(report.to_junit(outcomes))


@app.command()
def account(
    model: Annotated[str, typer.Argument(help="A released model, for example v41-flash or v41_flash.")],
    context: Annotated[int, typer.Option(min=0, help="Tokens of the sequence: caches and work depend on it.")] = 10**6,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a model weighs and costs, term by term: parameters, bytes, caches, work, published figures beside ours.

    Example: `deeptwin account v4-pro --context 131072`
    """
    from deeptwin.reference.presets import PRESETS, preset

    from . import accounts

    config = preset(_choose("model", model.replace("-", "_"), list(PRESETS), f"One of {', '.join(PRESETS)}."))
    if as_json:
        console.print_json(json.dumps(accounts.to_json(config, context)))
        return
    accounts.show(console, config, context)


@app.command("bench")
def bench_command(
    component: Components = None,
    shape: Annotated[str | None, typer.Option("--shape", help="Only benches whose name contains this.")] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="A saved record: what became slower fails.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one bench may take.")] = 120.0,
    json_path: JsonPath = None,
) -> None:
    """Time every candidate at production shapes on this machine's GPU, judged before and after.

    Examples: `deeptwin bench -c sparse_attn`, `deeptwin bench --json now.json --baseline before.json`
    """
    import torch

    from . import bench

    chosen = [one for one in bench.benches([_card(c).component for c in component or ()]) if (shape or "") in one.id]
    if not chosen:
        fail(f"shape: no bench of these components has {shape!r} in its name")
    if not torch.cuda.is_available():
        console.print("bench needs a CUDA device, and there is none", style="bold red")
        raise typer.Exit(EXIT_NOT_RUN)
    saved = None if baseline is None else json.loads(baseline.read_text())["rows"]
    record = bench.run(chosen, timeout=timeout, report=lambda name, rows: bench.show(console, name, rows))
    record["command"] = shlex.join(["deeptwin", *sys.argv[1:]])
    if json_path is not None:
        write_json(json_path, record)
    slower = bench.regressions(record["rows"], saved or [])
    for line in slower:
        console.print(f"slower: {line}", style="bold red", markup=False)
    failed = [row for row in record["rows"] if row["status"] in (Status.MISMATCH, Status.ERROR)]
    raise typer.Exit(EXIT_FAILED if slower or failed else 0)


@app.command("bisect")
def bisect_command(
    reference: Annotated[Path, typer.Argument(help="Folder of the dump that is right.")],
    candidate: Annotated[Path, typer.Argument(help="Folder of the dump in question.")],
    rival: Annotated[
        Path | None, typer.Option("--rival", help="Dump of the reference under RIVAL: judges by R1's budget.")
    ] = None,
    names: Annotated[
        Path | None, typer.Option("--map", help="JSON list of rules: how the candidate calls the reference's stages.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", help="Relative distance that a row may have, without --rival.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Find the first stage, row, head and channel where two dumps of a model part.

    Examples: `deeptwin bisect dumps/reference dumps/mine`,
    `deeptwin bisect dumps/semantic dumps/mine --rival dumps/rival --map names.json`
    """
    from . import bisect
    from .capture import BadDump, Dump

    if rival is not None and limit is not None:
        fail("limit: --limit is for dumps without --rival, whose budget it would replace")
    if limit is not None and not limit > 0:
        fail(f"limit: expected a positive relative distance, got {limit}")
    try:
        rules = None if names is None else bisect.read_map(names)
        other = None if rival is None else Dump(rival)
        walk = bisect.compare(Dump(reference), Dump(candidate), rival=other, rules=rules, limit=limit)
        found = list(walk)
    except (BadDump, bisect.BadMap) as error:
        fail(str(error))
    _tell_walk(found, json_path)


@app.command("layer")
def layer_command(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of the checkpoint: config.json and safetensors.")],
    dump: Annotated[Path, typer.Argument(help="Folder of the dump of your engine.")],
    layer: Annotated[int, typer.Option("--layer", help="The layer, from 0.")],
    names: Annotated[
        Path | None, typer.Option("--map", help="JSON list of rules: how the dump calls the reference's stages.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", help="Relative distance that a row may have, in place of R1's budget.")
    ] = None,
    step: Annotated[int, typer.Option("--step", help="Step of the dump.")] = 0,
    rank: Annotated[int, typer.Option("--rank", help="Rank of the dump.")] = 0,
    json_path: JsonPath = None,
) -> None:
    """Judge one layer of a checkpoint: the reference computes it from the dump's hidden states, stage by stage.

    Only this layer's tensors are read, so the checkpoint may be larger than the machine.
    Example: `deeptwin layer DeepSeek-V4-Flash dumps/mine --layer 3 --map names.json`
    """
    from deeptwin.reference.checkpoint import open_model

    from . import bisect
    from .capture import Dump
    from .layer import Given, judge_layer

    if limit is not None and not limit > 0:
        fail(f"limit: expected a positive relative distance, got {limit}")
    try:
        rules = None if names is None else bisect.read_map(names)
        given = Given(dump=Dump(dump), rules=rules, step=step, rank=rank)
        walk = judge_layer(open_model(checkpoint), layer, given, limit=limit)
    except (ValueError, TypeError, NotImplementedError) as error:
        fail(str(error))
    if walk.open_tokens:
        console.print(f"not judged, their choices are close: tokens {walk.open_tokens}")
    _tell_walk(walk.stages, json_path)


def _tell_walk(found: Sequence[Compared], json_path: Path | None) -> NoReturn:
    """Print a walk over stages, write it, and leave with what it says."""
    from . import bisect

    bisect.show(console, found)
    if json_path is not None:
        write_json(json_path, bisect.to_json(found))
    if all(one.status == "absent" for one in found):
        console.print("nothing was compared: no stage has its name in the candidate's dump", style="bold red")
        raise typer.Exit(EXIT_NOT_RUN)
    raise typer.Exit(EXIT_FAILED if any(one.status == "differs" for one in found) else 0)


@app.command()
def demo(
    generate: Annotated[bool, typer.Option("--generate", help="Let the engine write, instead of judging.")] = False,
    generation: Annotated[
        list[str] | None, typer.Option("--generation", help="v3, v32, v4 or v41 (repeatable); by default all of them.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="What computes: reference, vectorised or triton.")
    ] = "reference",
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", help="COMPONENT=CANDIDATE, or COMPONENT.OPERATION=module:function (repeatable)."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of every request.")] = 16,
) -> None:
    """The main job in two minutes: shipped kernels, somebody else's attention on real text, and a wrong kernel.

    With --generate tiny models with drawn weights continue real texts through the engine, and each text again alone.

    Examples: `deeptwin demo`, `deeptwin demo --generate --generation v41 --plan mhc=reference`
    """
    from . import demo as scenes
    from . import demo_generate

    if not generate:
        raise typer.Exit(scenes.play(console))
    chosen = generation or list(demo_generate.GENERATIONS)
    try:
        overrides = demo_generate.parsed(plan or [])
        raise typer.Exit(demo_generate.play(console, chosen, backend=backend, overrides=overrides, tokens=tokens))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="deeptwin")


if __name__ == "__main__":
    main()
