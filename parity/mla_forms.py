"""How far the naive and the absorbed form of latent attention are apart: `python -m deeptwin.parity.mla_forms`.

Both are stored in bf16 and measured against SEMANTIC, on real head widths and drawn rows: a figure, never a verdict.
They differ by associativity alone: in fp64 they agree to rounding (1e-15), which the last column shows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.mla import mla_absorbed, mla_naive
from deeptwin.reference.numerics import CONTRACT, SEMANTIC
from deeptwin.reference.rope import rope_frequencies, rope_table, table_magnitude
from deeptwin.reference.weights import Latents, MlaWeights

from . import draws
from .card import case_rng
from .cards.mla import V3_HEADS, _state


@dataclass(frozen=True, kw_only=True)
class Row:
    """Relative Frobenius distances of one shape."""

    keys: int
    regime: str
    naive: float
    absorbed: float
    apart: float
    fp64: float


def measure(keys: int, regime: str, *, queries: int, seed: int) -> Row:
    """Distances of `queries` tokens at the end of `keys` of them, 8 heads of the released widths."""
    config = replace(V3_HEADS, hidden=512, q_lora_rank=256)
    rng = case_rng("mla_forms", regime, f"keys {keys}", seed)
    weights = MlaWeights.from_state_dict(_state(config, rng, regime, torch.bfloat16), prefix="", config=config)
    x = draws.normal(rng, queries, config.hidden, dtype=torch.bfloat16, mean=1.0 if regime == "mean1" else 0.0)
    past = None
    if keys > queries:
        rows = draws.normal(rng, keys - queries, config.latent_dim, dtype=torch.bfloat16)
        past = Latents(rows_sd=rows, positions_s=torch.arange(keys - queries))
    magnitude = table_magnitude(config.rope.yarn)
    table = rope_table(torch.arange(keys), rope_frequencies(config.rope), magnitude=magnitude)
    positions = torch.arange(keys - queries, keys)
    outs: dict[tuple[str, str], Tensor] = {}
    for name, form in (("naive", mla_naive), ("absorbed", mla_absorbed)):
        for num in (SEMANTIC, CONTRACT):
            outs[name, num.name] = form(x, weights, positions, table, config=config, past=past, num=num)
    truth = outs["naive", "semantic"]

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a - b).norm() / truth.norm())

    return Row(
        keys=keys,
        regime=regime,
        naive=distance(outs["naive", "contract"], truth),
        absorbed=distance(outs["absorbed", "contract"], truth),
        apart=distance(outs["naive", "contract"], outs["absorbed", "contract"]),
        fp64=distance(outs["absorbed", "semantic"], truth),
    )


def table(rows: list[Row]) -> Iterator[str]:
    """The rows as text."""
    yield f"{'keys':>6} {'regime':>8} {'naive':>10} {'absorbed':>10} {'apart':>10} {'in fp64':>10}"
    for row in rows:
        numbers = " ".join(f"{x:10.2e}" for x in (row.naive, row.absorbed, row.apart, row.fp64))
        yield f"{row.keys:6d} {row.regime:>8} {numbers}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--regimes", nargs="+", default=["normal", "peaked", "mean1"])
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = [measure(k, r, queries=given.queries, seed=given.seed) for k in given.keys for r in given.regimes]
    sys.stdout.write("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()
