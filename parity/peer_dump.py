"""Dumps of a tiny model by transformers and by the reference, as one makes them of an engine of one's own:

    python -m deeptwin.parity.peer_dump DIR [--model v4_flash] [--fault MODULE:TOKEN:CHANNEL]
    deeptwin bisect DIR/reference DIR/transformers --map DIR/map.json --limit 1e-5

`dump_peer` is all that an engine in torch needs: hooks that write what its modules compute.
With `--fault` one value of what a module returns is moved, which `bisect` has to find. The limit is that of the table
of peers: both compute in fp32, and an engine that stores bf16 is judged by `--rival` instead.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.model import model_v3, model_v4
from deeptwin.reference.model_weights import V3Model, V4Model
from deeptwin.reference.numerics import SEMANTIC, Numerics
from deeptwin.reference.presets import V3Config, V4Config

from .capture import DumpWriter, captured
from .environment import fixed_numerics
from .peer_table import MODELS, config_of
from .peers.model import INPUTS, build, map_of

TOKENS = 44
# axes of the stages of a model, by the end of their names; all others are token and channel
DIMS = {
    "*.comb": ("token", "from", "to"),
    "*.pre": ("token", "stream"),
    "*.post": ("token", "stream"),
    "*.stream": ("token", "stream", "channel"),
    "*.stream.*": ("token", "stream", "channel"),
    "*.heads": ("token", "head", "channel"),
    "*.turned": ("token", "head", "channel"),
    "*.experts": ("token", "choice"),
    "*.weights": ("token", "choice"),
    "*.picks": ("token", "choice"),
    "*.scores": ("token", "key"),
    "*.logits": ("token", "expert"),
    "logits": ("token", "vocabulary"),
    "memory.rows": ("layer", "token", "column"),
}


def dims_of(stage: str) -> tuple[str, ...]:
    """What the axes of one of our stages are called."""
    return next((dims for end, dims in DIMS.items() if fnmatch.fnmatchcase(stage, end)), ("token", "channel"))


def dump_reference(
    folder: Path, token_t: Tensor, weights: V3Model | V4Model, *, config: V3Config | V4Config, num: Numerics
) -> None:
    """Every stage of the reference under one numerics; V3 stores in fp32."""
    with DumpWriter(folder, producer=f"deeptwin reference {config.name} {num.name}") as write:

        def tap(name: str, x: Tensor) -> None:
            write(name, x, dims_of(name))

        if isinstance(config, V4Config):
            assert isinstance(weights, V4Model)
            model_v4(token_t, weights, config=config, num=num, tap=tap)
        else:
            assert isinstance(weights, V3Model)
            model_v3(token_t, weights, config=config, dtype=torch.float32, num=num, tap=tap)


def dump_peer(folder: Path, model: Any, token_t: Tensor) -> None:
    """What the modules of a torch model return, and what some of them are called with."""
    producer = f"transformers {type(model).__name__}"
    with DumpWriter(folder, producer=producer) as write, captured(model, write, inputs=INPUTS):
        model(token_t[None])


def break_(model: Any, module: str, token: int, channel: int) -> None:
    """From now on move one value of what a module returns, by the size of its row.

    Raises:
        ValueError: the model has no such module.
    """
    named = dict(model.named_modules())
    if module not in named:
        raise ValueError(f"module: expected one of the model's, got {module!r}")

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        x = (output[0] if isinstance(output, tuple) else output).clone()
        row = x[0, token].flatten()
        row[channel] += row.square().mean().sqrt()
        x[0, token] = row.view_as(x[0, token])
        return (x, *output[1:]) if isinstance(output, tuple) else x

    named[module].register_forward_hook(hook)


def drawn_peer(model: str, seed: int = 1) -> tuple[V3Config | V4Config, Any, Tensor]:
    """A configuration of ours, the model of transformers with drawn weights, and drawn tokens."""
    config = config_of(model, eps=False)
    rng = np.random.Generator(np.random.Philox(seed))
    return config, build(config, seed=seed), torch.from_numpy(rng.integers(0, config.vocab_size, TOKENS))


def dump_all(folder: Path, model: str, *, fault: str = "", seed: int = 1) -> None:
    """The dumps `reference` and `transformers` of one model and its drawn tokens, and the map between them."""
    config, peer, token_t = drawn_peer(model, seed)
    state = peer.state_dict()
    weights: V3Model | V4Model
    if isinstance(config, V4Config):
        weights = V4Model.from_transformers(state, config=config)
    else:
        weights = V3Model.from_state_dict(state, config=config)
    dump_reference(folder / "reference", token_t, weights, config=config, num=SEMANTIC)
    if fault:
        module, token, channel = fault.rsplit(":", 2)
        break_(peer, module, int(token), int(channel))
    dump_peer(folder / "transformers", peer, token_t)
    shutil.copyfile(map_of(config), folder / "map.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the dumps and say how to compare them."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.peer_dump", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder that is made")
    parser.add_argument("--model", choices=list(MODELS), default="v4_flash")
    parser.add_argument("--fault", default="", metavar="MODULE:TOKEN:CHANNEL", help="a value that is moved")
    given = parser.parse_args(arguments)
    if given.folder.exists():
        parser.error(f"folder: {given.folder} exists, expected a name that is free")
    with fixed_numerics():
        dump_all(given.folder, given.model, fault=given.fault)
    d = given.folder
    sys.stdout.write(f"deeptwin bisect {d}/reference {d}/transformers --map {d}/map.json --limit 1e-5\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
