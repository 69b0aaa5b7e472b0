"""Laws, agreement and speed of the draws: `python -m deeptwin.parity.sampling_laws [--draws 1000000]`.

Every law of runtime.md §2.7 is drawn by the torch form, for both platforms, and judged by the chi-square test; the
definition draws the same rows of the narrow laws, and every token is compared. The result goes to
`evidence/sampling-laws.json`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.optimized.sampling import sample_probs_vectorised
from deeptwin.reference.config import Draw
from deeptwin.reference.sampling import sample_probs

from .environment import facts, fixed_numerics
from .evidence import FOLDER
from .files import write_json
from .rules import chi_square

NARROW, WIDTHS = 16, (16, 64, 1024, 129280)
BATCH = 2**22  # columns of all rows together
Sampler = Callable[..., tuple[Tensor, Tensor]]


def law(name: str, columns: int) -> Tensor:
    """The probabilities of a law, fp32."""
    rank = torch.arange(columns, dtype=torch.float64)
    if name == "softmax-normal":
        normal = np.random.Generator(np.random.Philox(columns)).standard_normal(columns)
        weight = torch.exp(torch.from_numpy(normal))
    elif name == "sparse":
        weight = torch.zeros(columns, dtype=torch.float64)
        weight[(torch.arange(8) * 7919 + 3) % columns] = torch.arange(1.0, 9.0, dtype=torch.float64)
    else:
        weight = {"uniform": rank * 0 + 1, "zipf": 1 / (rank + 1), "geometric": 0.7**rank}[name]
    return (weight / weight.sum()).float()


LAWS = ("uniform", "softmax-normal", "zipf", "geometric", "sparse")


def drawn(sampler: Sampler, prob: Tensor, count: int, draw: Draw) -> tuple[Tensor, float]:
    """`count` tokens of one row, each of its own seed, and the seconds of processor time."""
    rows = max(BATCH // len(prob), 1)
    found, started = [], time.process_time()
    for start in range(0, count, rows):
        seed = torch.arange(start, min(start + rows, count))
        found.append(sampler(prob.expand(len(seed), -1), seed, torch.full_like(seed, 3), draw=draw)[0])
    return torch.cat(found), time.process_time() - started


def measure(draws: int) -> dict[str, Any]:
    """Chi-square of every law and width, agreement of the two forms, draws per second."""
    laws: dict[str, dict[str, Any]] = {}
    agreeing = compared = 0
    spent = {"definition": 0.0, "vectorised": 0.0}
    for name in LAWS:
        for draw in Draw:
            for columns in WIDTHS if draw is Draw.NVIDIA else WIDTHS[1:]:
                # as many draws as one wide row allows in a minute
                count = draws if columns <= 64 else draws // 10 if columns == 1024 else draws // 500
                prob = law(name, columns)
                token, seconds = drawn(sample_probs_vectorised, prob, count, draw)
                problem, likely = chi_square(token, prob.double())
                laws[f"{name} {draw.value} v{columns}"] = {"draws": count, "p": likely, "problem": problem}
                if columns == (NARROW if draw is Draw.NVIDIA else 64):
                    some = draws // (2 * len(LAWS))
                    plain, plain_seconds = drawn(sample_probs, prob, some, draw)
                    spent["definition"] += plain_seconds
                    spent["vectorised"] += seconds * some / count
                    agreeing, compared = agreeing + int((plain == token[:some]).sum()), compared + some
    return {
        "agreeing": agreeing,
        "compared": compared,
        "draws_per_second": {form: round(compared / seconds) for form, seconds in spent.items()},
        "worst_p": min(found["p"] for found in laws.values()),
        "laws": laws,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the record; 1 if a law or a token is wrong."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.sampling_laws", description=__doc__)
    parser.add_argument("--draws", type=int, default=1_000_000)
    draws = parser.parse_args(arguments).draws
    with fixed_numerics():
        record = measure(draws)
    command = f"python -m deeptwin.parity.sampling_laws --draws {draws}"
    write_json(FOLDER / "sampling-laws.json", {"command": command, "environment": facts()} | record)
    wrong = [name for name, found in record["laws"].items() if found["problem"] or found["p"] < 1e-3]
    sys.stdout.write(
        f"{record['agreeing']} of {record['compared']} tokens agree; smallest p of {len(record['laws'])} chi-square "
        f"tests {record['worst_p']:.3g}; draws per second {record['draws_per_second']}; wrong: {wrong or 'none'}\n"
    )
    return 1 if wrong or record["agreeing"] != record["compared"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
