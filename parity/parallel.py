"""Several processes against one: `python -m deeptwin.parity.parallel [--world 2 4 --backend nccl --device cuda]`."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from .distributed import SCENARIOS, Setup, run
from .environment import facts
from .files import write_json

SCHEMA = "deeptwin.parallel/1"


def main() -> int:
    """Run every scenario with 2 and 4 processes (or `--world`) and print what was found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--world", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each scenario, which must give the same bytes")
    parser.add_argument("--record", type=Path, help="write the verdicts with device facts as JSON")
    given = parser.parse_args()
    bad, rows = 0, []
    for world in given.world:
        setup = Setup(
            world=world, backend=given.backend, device=given.device, limit_s=given.limit_s, repeats=given.repeats
        )
        for report in run(SCENARIOS, setup):
            verdict = f"bit-equal ({report.compared} comparisons)" if report.ok else f"DIFFERS {report.problem}"
            sys.stdout.write(f"{world} processes, {given.backend}: {report.scenario.partition(':')[2]}: {verdict}\n")
            rows.append(asdict(report) | {"world": world, "ok": report.ok})
            bad += not report.ok
    if given.record is not None:
        command = shlex.join(["python", "-m", "deeptwin.parity.parallel", *sys.argv[1:]])
        record = {"schema": SCHEMA, "command": command, "repeats": given.repeats, "environment": facts(given.device)}
        write_json(given.record, record | {"rows": rows})
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
