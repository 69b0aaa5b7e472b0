"""Whole tiny models beside transformers, stage by stage: `python -m deeptwin.parity.peer_table [MODEL …]`.

A row stands for one kind of stage over all layers: how far the two are apart at most, at the 99.9 % quantile, in fp32
units of the larger of element and row, and relatively over all. Each model runs in one pass, by cached steps there and
without a cache here, and once more with epsilons that show (hc_eps 0.05, rms_norm_eps 0.03). The command fails if a
stage lies beyond `LIMIT` or a discrete choice differs; `--write` keeps the result in `evidence/peers.json`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from deeptwin.reference.model import model_v3, model_v4
from deeptwin.reference.model_weights import V3Model, V4Model
from deeptwin.reference.numerics import SEMANTIC
from deeptwin.reference.presets import V3Config, V4Config, tiny_v3, tiny_v4_flash, tiny_v4_pro, tiny_v32

from .bisect import MapRule, read_map
from .cards.block import plain_v3, plain_v4
from .environment import facts, fixed_numerics
from .files import write_json
from .floats import row_rms
from .peers.model import build, map_of, stages

RECORD = Path(__file__).with_name("evidence") / "peers.json"
LIMIT = 1e-5  # relative distance of a stage; measured 1.2e-6 at most
TOKENS = 44
CHUNKS = (30, *[1] * 14)  # of the cached run
MODELS: dict[str, Callable[[], V3Config | V4Config]] = {
    "v3": tiny_v3,
    "v32": tiny_v32,
    "v4_flash": tiny_v4_flash,
    "v4_pro": tiny_v4_pro,
}
DISCRETE = ("experts", "picks")
# what the map for `deeptwin bisect` leaves out: transformers picks keys in the future too and masks them later
PICKS = tuple(
    MapRule(reference="layers.{i}.attn.picks", candidate=f"model.layers.{{i}}.self_attn.{owner}indexer")
    for owner in ("compressor.", "")
)
CAUSES = {
    "v3": "library order of fp32 products and sums; the routing weight behind the down projection and 1e-20 in its sum",
    "v32": "as v3; index scores in another order",
    "v4_flash": "library order of fp32 products and sums; streams normalised before the mixing product instead of "
    "after it; 1e-20 in the sum of routing weights",
    "v4_pro": "as v4_flash",
}


def config_of(model: str, *, eps: bool) -> V3Config | V4Config:
    """The tiny model as transformers has it: nothing quantised."""
    config = MODELS[model]()
    if isinstance(config, V4Config):
        config = plain_v4(config)
        mhc = replace(config.mhc, eps=0.05, norm_eps=0.03)
        return replace(config, mhc=mhc, norm_eps=0.03) if eps else config
    config = plain_v3(config)
    return replace(config, norm_eps=0.03) if eps else config


def compare(model: str, run: str, *, seed: int = 1) -> dict[str, dict[str, float]]:
    """One run of a model, by kind of stage; `run` is plain, cached or eps."""
    config = config_of(model, eps=run == "eps")
    peer = build(config, seed=seed)
    rng = np.random.Generator(np.random.Philox(seed))
    token_t = torch.from_numpy(rng.integers(0, config.vocab_size, TOKENS))
    theirs = stages(peer, token_t, chunks=CHUNKS if run == "cached" else ())
    ours: dict[str, Tensor] = {}
    state, tap = peer.state_dict(), ours.__setitem__
    if isinstance(config, V4Config):
        model_v4(token_t, V4Model.from_transformers(state, config=config), config=config, num=SEMANTIC, tap=tap)
    else:
        weights = V3Model.from_state_dict(state, config=config)
        model_v3(token_t, weights, config=config, dtype=torch.float32, num=SEMANTIC, tap=tap)
    kinds: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    rules = (*read_map(map_of(config)), *PICKS)
    for name, x in ours.items():
        called = next((found for rule in rules if (found := rule.name_of(name)) in theirs), None)
        if called is not None:
            kinds[re.sub(r"layers\.\d+\.", "", name)].append((x, torch.cat(theirs[called])))
    return {kind: _distances(kind, pairs) for kind, pairs in kinds.items()}


def _distances(kind: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    if kind.endswith(DISCRETE):
        differing = sum(_other_choices(x, y, causal=kind.endswith("picks")) for x, y in pairs)
        return {"rows": float(sum(len(x) for x, _ in pairs)), "differing_rows": float(differing)}
    if kind.endswith("weights"):  # in the order of the ranking here, in any order there
        pairs = [(x.sort(-1).values, y.sort(-1).values) for x, y in pairs]
    apart, units, ours = [], [], []
    for x, y in pairs:
        x, y = x.double(), y.double().view(x.shape)
        error = (x - y).abs()
        apart.append(error.flatten())
        units.append((error / (2.0**-24 * torch.maximum(x.abs(), row_rms(x)).clamp_min(2.0**-126))).flatten())
        ours.append(x.flatten())
    error, unit = torch.cat(apart), torch.cat(units)
    return {
        "max": error.max().item(),
        "p999": torch.quantile(error, 0.999).item(),
        "ulp": unit.max().item(),
        "relative": (error.norm() / torch.cat(ours).norm()).item(),
    }


def _other_choices(x: Tensor, y: Tensor, *, causal: bool) -> int:
    """Rows that chose something else; a pick in the future of its row is none."""

    def chosen(rows: Tensor) -> list[set[int]]:
        return [{n for n in row if n >= 0 and (n <= p or not causal)} for p, row in enumerate(rows.tolist())]

    return sum(a != b for a, b in zip(chosen(x), chosen(y), strict=True))


def table(models: Sequence[str]) -> dict[str, Any]:
    """Every run of every model, with the cause of what is left."""
    found: dict[str, Any] = {}
    with fixed_numerics():
        for model in models:
            runs = {run: compare(model, run) for run in ("plain", "cached", "eps")}
            found[model] = {"cause": CAUSES[model], "runs": runs}
    return found


def failures(found: dict[str, Any]) -> list[str]:
    """What lies beyond the limit, or chose otherwise."""
    lines = []
    for model, result in found.items():
        for run, kinds in result["runs"].items():
            for kind, numbers in kinds.items():
                if numbers.get("differing_rows", 0) or not numbers.get("relative", 0.0) <= LIMIT:
                    lines.append(f"{model} {run} {kind}: {numbers}")
    return lines


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the table."""
    for model, result in found.items():
        console.print(f"\n{model}: {result['cause']}", soft_wrap=True, markup=False)
        heads = (f"{run + ' max':>14}{'p99.9':>10}{'ulp':>8}{'rel':>10}" for run in result["runs"])
        console.print(f"{'stage':<14}" + "".join(heads), soft_wrap=True)
        for kind in result["runs"]["plain"]:
            cells = []
            for run in result["runs"].values():
                n = run[kind]
                if "rows" in n:
                    cells.append(f"{n['differing_rows']:.0f} of {n['rows']:.0f} rows differ".rjust(42))
                else:
                    cells.append(f"{n['max']:>14.1e}{n['p999']:>10.1e}{n['ulp']:>8.0f}{n['relative']:>10.1e}")
            console.print(f"{kind:<14}" + "".join(cells), soft_wrap=True, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the named models (default all) and print; 1 if something lies beyond the limit."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.peer_table", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--write", action="store_true", help="record the result; needs all models")
    given = parser.parse_args(arguments)
    chosen = given.models or list(MODELS)
    unknown = set(chosen) - set(MODELS)
    if unknown:
        parser.error(f"expected one of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    if given.write and set(chosen) != set(MODELS):
        parser.error("--write needs all models")
    found, console = table(chosen), Console()
    show(console, found)
    if given.write:
        write_json(RECORD, {"tokens": TOKENS, "limit": LIMIT, "environment": facts("cpu"), "models": found})
    beyond = failures(found)
    for line in beyond:
        console.print(f"beyond {LIMIT}: {line}", soft_wrap=True, markup=False)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
