"""Dumps: every intermediate of a model run on disk, in the order it was computed, with names, axes, step and rank.

A dump is a folder: `manifest.json` names the stages in order, `tensors-00000.safetensors` and so on hold them. Anybody
can write one: the reference through its tap, the engine, a torch model through hooks (`captured`), another engine with
a script of its own. `bisect` compares two.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .floats import raw_bytes

FORMAT = "deeptwin.dump/1"
MANIFEST = "manifest.json"
SHARD_BYTES = 1 << 28  # a file is written whenever so much waits in memory


class Recorder(Protocol):
    """What stages are told to: a `DumpWriter`, or a function that keeps them."""

    def __call__(self, name: str, x: Tensor, *, step: int = 0, rank: int = 0) -> None: ...


class BadDump(ValueError):
    """A folder is not a readable dump; the message names the path and what is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One tensor of a dump: what it is called, what its axes are, and when and where it was computed.

    `dims` are the names of the axes, for example `("token", "head", "channel")`, or empty when the writer did not say.
    """

    name: str
    dims: tuple[str, ...] = ()
    step: int = 0
    rank: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    file: str = ""
    sha256: str = ""

    @property
    def key(self) -> str:
        """`name@step.rank`: unique within a dump."""
        return f"{self.name}@{self.step}.{self.rank}"


class DumpWriter:
    """Writes a dump; a context manager. The folder appears when the block ends, whole or not at all.

    An instance can be called with a name and a tensor, which is what the reference calls a tap. `producer` says who
    computes, for example `"transformers 5.24.0 deepseek_v4 fp32"`.

    Raises:
        ValueError: the folder exists.
    """

    def __init__(self, folder: Path, *, producer: str) -> None:
        if folder.exists():
            raise ValueError(f"folder: {folder} exists, expected a name that is free")
        self.folder, self.producer = folder, producer
        self._aside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        self._stages: dict[str, Stage] = {}
        self._waiting: dict[str, Tensor] = {}
        self._files = 0

    def __enter__(self) -> DumpWriter:
        self._aside.mkdir(parents=True)
        return self

    def __call__(self, name: str, x: Tensor, dims: Sequence[str] = (), *, step: int = 0, rank: int = 0) -> None:
        """Record a tensor as it is now.

        Raises:
            ValueError: the stage was recorded before, or the number of `dims` is not that of the axes.
        """
        if dims and len(dims) != x.dim():
            raise ValueError(f"dims: got {list(dims)} for a tensor of shape {tuple(x.shape)}")
        stage = Stage(
            name=name,
            dims=tuple(dims),
            step=step,
            rank=rank,
            dtype=str(x.dtype).removeprefix("torch."),
            shape=tuple(x.shape),
            file=f"tensors-{self._files:05}.safetensors",
            sha256=hashlib.sha256(raw_bytes(x).numpy().tobytes()).hexdigest(),
        )
        if stage.key in self._stages:
            raise ValueError(f"name: {name!r} was recorded before at step {step}, rank {rank}")
        self._stages[stage.key] = stage
        self._waiting[stage.key] = x.detach().cpu().clone(memory_format=torch.contiguous_format)
        if sum(t.nbytes for t in self._waiting.values()) >= SHARD_BYTES:
            self._flush()

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        if kind is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            return
        self._flush()
        stages = [dataclasses.asdict(stage) for stage in self._stages.values()]
        record = {"format": FORMAT, "producer": self.producer, "stages": stages}
        (self._aside / MANIFEST).write_text(json.dumps(record, indent=1) + "\n")
        os.replace(self._aside, self.folder)

    def _flush(self) -> None:
        if self._waiting:
            save_file(self._waiting, self._aside / f"tensors-{self._files:05}.safetensors")
            self._waiting, self._files = {}, self._files + 1


class Dump:
    """A dump that was read: its stages in order; tensors are loaded one at a time.

    Raises:
        BadDump: the folder holds no manifest of a known format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / MANIFEST
        try:
            record = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise BadDump(f"{path}: unreadable: {error}") from error
        found = record.get("format") if isinstance(record, dict) else None
        if found != FORMAT:
            raise BadDump(f"{path}: expected format {FORMAT!r}, got {found!r}")
        try:
            self.producer: str = record["producer"]
            self.stages = [_stage(entry) for entry in record["stages"]]
        except (KeyError, TypeError) as error:
            raise BadDump(f"{path}: a stage lacks a field or has one too many: {error}") from error

    def tensor(self, stage: Stage) -> Tensor:
        """The tensor of a stage.

        Raises:
            BadDump: its file is missing or truncated, or its bytes are not those that were written.
        """
        path = self.folder / stage.file
        try:
            with safe_open(path, framework="pt") as file:
                x: Tensor = file.get_tensor(stage.key)
        except (OSError, SafetensorError) as error:
            raise BadDump(f"{path}: cannot read {stage.key}: {error}") from error
        digest = hashlib.sha256(raw_bytes(x).numpy().tobytes()).hexdigest()
        if digest != stage.sha256:
            raise BadDump(f"{path}: {stage.key} was changed: expected SHA-256 {stage.sha256}, got {digest}")
        return x


def _stage(entry: Mapping[str, Any]) -> Stage:
    return Stage(**(dict(entry) | {"dims": tuple(entry["dims"]), "shape": tuple(entry["shape"])}))


@contextmanager
def captured(
    module: nn.Module,
    write: Recorder,
    *,
    only: Sequence[str] = ("*",),
    inputs: Sequence[str] = (),
    step: int = 0,
    rank: int = 0,
) -> Iterator[None]:
    """Record the output of every submodule whose dotted name fits a pattern of `only`, while the block runs.

    A tuple or mapping gives one stage for each tensor in it: `name.0` or `name.key`. A module that runs again within
    the block gives `name#2`, `name#3` and so on. The root module has the name `model`. Modules whose names fit a
    pattern of `inputs` give what they are called with too: `name.input.0`, or `name.input.key` of a keyword argument.
    """
    calls: dict[str, int] = {}

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def hook(name: str) -> Any:
        def record(_module: nn.Module, args: Any, named: Any, output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            label = name if calls[name] == 1 else f"{name}#{calls[name]}"
            given = {str(i): x for i, x in enumerate(args)} | named
            told = [*_tensors(f"{label}.input", given)] if fits(name, inputs) else []
            told += _tensors(label, output) if fits(name, only) else []
            for part, x in told:
                write(part, x, step=step, rank=rank)

        return record

    modules = [(name or "model", child) for name, child in module.named_modules()]
    chosen = [(name, child) for name, child in modules if fits(name, (*only, *inputs))]
    handles = [child.register_forward_hook(hook(name), with_kwargs=True) for name, child in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _tensors(f"{name}.{key}", value)
    elif isinstance(output, tuple | list):
        for index, value in enumerate(output):
            yield from _tensors(f"{name}.{index}", value)
