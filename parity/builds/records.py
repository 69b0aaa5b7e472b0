"""The recorded numbers of every build, what differs from them, and the table that shows both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..files import write_json
from ..house import HOUSE
from ..outcome import BUILT, Outcome, Status, exit_status, tally
from ..report import FAILING, STYLES, by_weight, details, line
from .runner import BUILDERS, builder_name, toolchain

SCHEMA = "deeptwin.builds/1"
FOLDER = HOUSE / "golden" / "records"
BOUND_TO_THE_RUN = ("seconds",)  # never compared
SHOWN_CHANGES = 4
LOG_WIDTH = 200
# a column for each of these, in this order, where a build has it; the other numbers stand in the JSON
COLUMNS = {
    **{"registers": "reg", "stack": "stack", "shared": "shared", "tmem": "tmem", "instructions": "instr"},
    **{"ub_bytes": "UB", "l1_bytes": "L1", "l0c_bytes": "L0C", "seconds": "s"},
}
PRODUCTS = ("wgmma", "tcgen05", "block_scale", "mma.sync", "mma")


def path_of(arch: str, folder: Path = FOLDER) -> Path:
    """The file that holds the numbers of an architecture."""
    return folder / arch / "builds.json"


def read(arch: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The recorded numbers of an architecture; empty ones if there are none."""
    path = path_of(arch, folder)
    if not path.is_file():
        return {"schema": SCHEMA, "arch": arch, "toolchain": {}, "builds": {}}
    return json.loads(path.read_text())


def compilers(arch: str) -> dict[str, str]:
    """Names and versions of everything that builds for an architecture."""
    found: dict[str, str] = {}
    for dsl, built_for in BUILDERS:
        if built_for == arch:
            found |= toolchain(builder_name(dsl, arch))
    return found


def numbers(outcome: Outcome) -> dict[str, Any]:
    """What is recorded of one build."""
    kept = {name: value for name, value in outcome.metrics.items() if name not in BOUND_TO_THE_RUN}
    return {"status": outcome.status.value, **kept}


def changes(outcome: Outcome, recorded: dict[str, Any]) -> list[str]:
    """How a build differs from its recorded numbers; a build that is not recorded is new."""
    if outcome.status not in BUILT:
        return []
    old, new = recorded["builds"].get(outcome.id), numbers(outcome)
    if old is None:
        return ["new"]
    names = [name for name in (*new, *(name for name in old if name not in new)) if old.get(name) != new.get(name)]
    return [f"{name} {_text(old.get(name))} → {_text(new.get(name))}" for name in names]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "-" if value is None else str(value)


def update(arch: str, outcomes: Iterable[Outcome], *, complete: bool, folder: Path = FOLDER) -> list[str]:
    """Record the builds of an architecture; the ids that are new, changed or gone.

    With `complete` the outcomes are all that there are, and what is no longer built is dropped. A failed build changes
    nothing.
    """
    recorded = read(arch, folder)
    built = {o.id: o for o in outcomes if o.status in BUILT}
    moved = [name for name, outcome in built.items() if changes(outcome, recorded)]
    kept = {} if complete else recorded["builds"]
    if complete:
        moved += [name for name in recorded["builds"] if name not in built]
    builds = {**kept, **{name: numbers(outcome) for name, outcome in built.items()}}
    if moved or recorded["toolchain"] != compilers(arch):
        record = {"schema": SCHEMA, "arch": arch, "toolchain": compilers(arch), "builds": dict(sorted(builds.items()))}
        write_json(path_of(arch, folder), record)
    return moved


# text


def table(arch: str, outcomes: Sequence[Outcome], recorded: dict[str, Any]) -> Table:
    """One row per build: status, matrix instructions, resources, and what differs from the recorded numbers."""
    columns = [name for name in COLUMNS if any(name in o.metrics for o in outcomes)]
    several = len({o.check for o in outcomes}) > 1
    made = Table(box=None, pad_edge=False, header_style="bold", title=arch, title_justify="left", title_style="bold")
    for title in ("build", *(("for",) if several else ()), "status", "matrix unit"):
        made.add_column(title, no_wrap=True)
    for name in columns:
        made.add_column(COLUMNS[name], justify="right", no_wrap=True)
    made.add_column("against the record", no_wrap=True)
    for outcome in outcomes:
        label = f"{outcome.component}.{outcome.op}/{outcome.case}"
        label += "" if outcome.candidate == "triton" else f" ({outcome.candidate})"
        differs = changes(outcome, recorded)
        more = [f"and {len(differs) - SHOWN_CHANGES} more"] if len(differs) > SHOWN_CHANGES else []
        made.add_row(
            label,
            *((outcome.check.rpartition("-")[2],) if several else ()),
            outcome.status.value,
            ", ".join(f"{outcome.metrics[p]:g} {p}" for p in PRODUCTS if outcome.metrics.get(p)) or "-",
            *(_text(outcome.metrics.get(name)) for name in columns),
            ", ".join([*differs[:SHOWN_CHANGES], *more]),
            style=STYLES.get(outcome.status, ""),
        )
    return made


def show(console: Console, arch: str, outcomes: Sequence[Outcome]) -> None:
    """The table of one architecture, and the compilers if they are not the recorded ones."""
    recorded, used = read(arch), compilers(arch)
    # a log has no width of its own: rich takes 80 columns there and would cut the numbers off
    wide = Console(file=console.file, width=console.width if console.is_terminal else LOG_WIDTH, highlight=False)
    wide.print(table(arch, outcomes, recorded))
    if recorded["toolchain"] and recorded["toolchain"] != used:
        old = ", ".join(f"{name} {version}" for name, version in recorded["toolchain"].items())
        new = ", ".join(f"{name} {version}" for name, version in used.items())
        console.print(f"recorded with {old}; built with {new}", style="yellow", markup=False, soft_wrap=True)
    console.print()


def close(console: Console, outcomes: Sequence[Outcome], *, seconds: float, reused: int) -> None:
    """Every failure in detail, what did not run, and one line that never says passed."""
    for outcome in by_weight(o for o in outcomes if o.status in FAILING):
        console.print(details(outcome) + "\n", markup=False, highlight=False, soft_wrap=True)
    for outcome in outcomes:
        if outcome.status is Status.UNSUPPORTED:
            console.print(f"did not run: {outcome.id}: {outcome.message}", markup=False, soft_wrap=True)
        elif outcome.status is Status.KNOWN_FAILURE:
            console.print(line(outcome), markup=False, soft_wrap=True)
    counts = ", ".join(f"{n} {status}" for status, n in tally(outcomes).items()) or "nothing was built"
    code = exit_status(outcomes, ran=BUILT)
    word = {0: "built, not run", 1: "FAILED", 3: "DID NOT RUN"}[code]
    text = f"{word}: {counts} in {seconds:.0f} s" + (f" ({reused} unchanged since an earlier run)" if reused else "")
    console.print(text, style="bold green" if code == 0 else "bold red", highlight=False)
