"""Several processes against one: `python -m deeptwin.parity.parallel [--world 2 4 --backend nccl --device cuda]`."""

from __future__ import annotations

import argparse
import sys

from .distributed import SCENARIOS, Setup, run


def main() -> int:
    """Run every scenario with 2 and 4 processes (or `--world`) and print what was found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--world", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit-s", type=float, default=120.0)
    given = parser.parse_args()
    bad = 0
    for world in given.world:
        setup = Setup(world=world, backend=given.backend, device=given.device, limit_s=given.limit_s)
        for report in run(SCENARIOS, setup):
            verdict = f"bit-equal ({report.compared} comparisons)" if report.ok else f"DIFFERS {report.problem}"
            sys.stdout.write(f"{world} processes, {given.backend}: {report.scenario.partition(':')[2]}: {verdict}\n")
            bad += not report.ok
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
