"""How far transformers' V3.2 attention is from the reference, stage by stage: `python -m deeptwin.parity.dsa_stages`.

Tiny layers in fp32, whole and through the cache, against SEMANTIC: index scores, picked sets, layer outputs. A figure:
the verdicts stand in the card of `dsa`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from deeptwin.reference.dsa import dsa_attention, dsa_picks, dsa_project
from deeptwin.reference.numerics import SEMANTIC

from . import draws
from .card import case_rng
from .cards.dsa import table_of
from .floats import ulp_distance
from .peers.dsa import STEPS, TINY, build, run


def stages(tokens: int, steps: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What transformers has and what the reference means, by stage; picks as the number of rows that part."""
    peer, config = build(TINY, seed=seed), TINY
    x = draws.normal(case_rng("dsa_stages", "x", "x", seed), tokens, config.mla.hidden, dtype=torch.float32)
    out, picks, scores = run(peer, x, steps=steps)
    first = (x, peer.weights, torch.arange(tokens), table_of(config, tokens))
    _, latent, state = dsa_project(*first, config=config, dtype=torch.float32, num=SEMANTIC)
    ours, meant = dsa_picks(x, latent, *first[1:], state, config=config, dtype=torch.float32, num=SEMANTIC)
    y = dsa_attention(*first, None, config=config, dtype=torch.float32, num=SEMANTIC)
    seen = torch.ones(tokens, tokens).tril().bool()
    parted = [{i for i in row if i >= 0} != set_ for row, set_ in zip(ours.tolist(), picks, strict=True)]
    return {
        "index scores": (scores[seen], meant[seen]),
        "output": (out, y),
        "picked sets": (torch.tensor(parted).float(), torch.zeros(tokens, dtype=torch.float64)),
    }


def table(tokens: int, seeds: int) -> Iterator[str]:
    """Worst numbers over the seeds as text: relative distance, largest and 99.9 % error, its ulps."""
    yield f"{'path':>8} {'stage':>14} {'relative':>10} {'max':>10} {'p99.9':>10} {'ulp p99.9':>10}"
    for path, steps in (("prefill", 0), ("steps", STEPS)):
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for seed in range(seeds):
            for stage, pair in stages(tokens, steps, seed).items():
                found.setdefault(stage, []).append(pair)
        for stage, pairs in found.items():
            got = torch.cat([a.flatten() for a, _ in pairs])
            meant = torch.cat([b.flatten() for _, b in pairs])
            error = (got.double() - meant).abs()
            if stage == "picked sets":
                yield f"{path:>8} {stage:>14} {int(error.sum())} of {error.numel()} rows differ"
                continue
            ulps = ulp_distance(got, meant.float()).double()
            numbers = (error.norm() / meant.norm(), error.max(), error.quantile(0.999))
            yield f"{path:>8} {stage:>14} " + " ".join(f"{x:10.2e}" for x in numbers) + f" {ulps.quantile(0.999):10.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    sys.stdout.write("\n".join(table(given.tokens, given.seeds)) + "\n")


if __name__ == "__main__":
    main()
