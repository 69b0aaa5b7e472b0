"""Writing a checkpoint: the files that `open_model` reads, all of them or none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_file import CONFIG, INDEX, SINGLE, dtype_name, pack_header


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], *, config: Mapping[str, Any], shard_bytes: int = 1 << 32
) -> None:
    """Write a directory that appears whole or not at all: config.json, and tensors in files of about `shard_bytes`.

    Edges:
        a tensor is never split, so a file may be larger; what fits into one file has no index.

    Raises:
        ValueError: the directory exists; shard_bytes is not positive.
        TypeError: the format has no such dtype.
    """
    if folder.exists():
        raise ValueError(f"folder: expected a name that is free, got {folder}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected a positive number, got {shard_bytes}")
    shapes = {name: (dtype_name(name, x), tuple(x.shape)) for name, x in tensors.items()}
    shards = _shards({name: x.nbytes for name, x in tensors.items()}, shard_bytes)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    aside.mkdir(parents=True)
    try:
        places: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            header, order = pack_header({name: shapes[name] for name in names})
            with (aside / file).open("wb") as out:
                out.write(header)
                for name in order:
                    out.write(tensors[name].detach().contiguous().flatten().view(torch.uint8).numpy().data)
            places |= dict.fromkeys(names, file)
        if len(shards) > 1:
            total = sum(x.nbytes for x in tensors.values())
            _write_json(aside / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
        _write_json(aside / CONFIG, config)
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")
