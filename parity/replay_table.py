"""How far bounded replay is from exact prefill, row by row behind the cut: measured on tiny stacks, never gated.

`python -m deeptwin.parity.replay_table` prints one row for each distance d = p - (N - K) with the relative error of
the outputs after every decoder layer. Global keys are exact in all modes, so the error is that of windows alone; from
d = i (W - 1) on the i-th decoder layer is exact bit by bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import Truncation
from deeptwin.reference.csa2 import csa2_step_

from .cards.csa2 import RunCase, draw_run
from .environment import fixed_numerics
from .files import write_json


@dataclass(frozen=True, kw_only=True)
class Row:
    """Relative errors (norm of the difference over norm) of one row after each decoder layer, largest of all seeds."""

    distance: int
    errors: tuple[float, ...]
    equal: tuple[bool, ...]  # bit by bit, for every seed


def errors(*, stack: str, length: int, keep: int, seeds: int) -> list[Row]:
    """The kept rows of prompts of `length` tokens, against the same prompts without truncation."""
    found: list[list[list[float]]] = []
    equal: list[list[list[bool]]] = []
    with fixed_numerics():
        for seed in range(seeds):
            inputs = draw_run(
                RunCase(config=stack, lengths=(length,), free=True), np.random.Generator(np.random.Philox(seed))
            )
            map_ = inputs["config"].topology
            depths = range(map_.boundary + 1, len(inputs["layers"]) + 1)
            pairs = [(_after(inputs, depth, keep)[-keep:], _after(inputs, depth, None)[-keep:]) for depth in depths]
            found.append([_distances(bounded, exact) for bounded, exact in pairs])
            equal.append([(bounded == exact).all(1).tolist() for bounded, exact in pairs])
    layers = range(len(found[0]))
    return [
        Row(
            distance=d,
            errors=tuple(max(run[layer][d] for run in found) for layer in layers),
            equal=tuple(all(run[layer][d] for run in equal) for layer in layers),
        )
        for d in range(keep)
    ]


def _after(inputs: dict[str, Any], depth: int, keep: int | None) -> Tensor:
    """The residual stream after so many layers."""
    config, caches = inputs["config"], inputs["caches"]
    if keep is not None:
        config = replace(config, truncation=Truncation.MASK, keep=keep)
    own = replace(caches, page_pq=caches.page_pq.clone(), state_sq=caches.state_sq.clone())
    step, row_t = next(iter(inputs["batch"].steps()))
    layers = inputs["layers"][:depth]
    h_tm, _ = csa2_step_(inputs["h_tm"][row_t].double(), layers, own, step, None, config=config)
    return h_tm


def _distances(bounded: Tensor, exact: Tensor) -> list[float]:
    return ((bounded - exact).norm(dim=1) / exact.norm(dim=1)).tolist()


def rendered(rows: Sequence[Row]) -> str:
    """The table as text."""
    layers = range(1, len(rows[0].errors) + 1)
    lines = ["bounded against exact: relative error of kept rows after each decoder layer (0: bit by bit)"]
    lines.append("   d  " + "  ".join(f"layer {i:>2}" for i in layers))
    for row in rows:
        cells = ("       0" if same else f"{error:8.1e}" for error, same in zip(row.errors, row.equal, strict=True))
        lines.append(f"{row.distance:4d}  " + "  ".join(cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; with --out, keep it as JSON as well."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.replay_table", description=__doc__)
    parser.add_argument("--stack", choices=("tiny", "deep"), default="deep", help="3 or 10 decoder layers")
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--keep", type=int, default=14)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args(arguments)
    rows = errors(stack=chosen.stack, length=chosen.length, keep=chosen.keep, seeds=chosen.seeds)
    sys.stdout.write(rendered(rows) + "\n")
    if chosen.out is not None:
        record = {
            "stack": chosen.stack,
            "length": chosen.length,
            "keep": chosen.keep,
            "seeds": chosen.seeds,
            "torch": torch.__version__,
        }
        write_json(chosen.out, record | {"rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
