"""A failing input as one file: safetensors with the tensors, JSON metadata with everything else.

The file is self-contained: `deeptwin run --case FILE` needs no other input. Enums and configurations are written by
name and read back only from `deeptwin.reference`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .files import replacing

FORMAT = "deeptwin.case/1"


class BadCaseFile(ValueError):
    """The file is not a readable case file; the message names the path and what is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredCase:
    """A case read from a file: its id and regime name it in reports."""

    id: str
    regime: str = "file"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseFile:
    """What a case file holds."""

    component: str
    op: str
    candidate: str
    check: str
    seed: int
    case: StoredCase
    inputs: dict[str, Any]
    note: str = ""


def write(path: Path, case: CaseFile) -> Path:
    """Write the file atomically and return its path."""
    tensors: dict[str, torch.Tensor] = {}
    values = {name: _encode(name, value, tensors) for name, value in case.inputs.items()}
    header = {
        "format": FORMAT,
        "component": case.component,
        "op": case.op,
        "candidate": case.candidate,
        "check": case.check,
        "seed": case.seed,
        "case": case.case.id,
        "regime": case.case.regime,
        "note": case.note,
        "inputs": values,
        "sha256": digest(tensors),
    }
    with replacing(path) as aside:
        save_file(tensors, aside, metadata={"deeptwin": json.dumps(header)})
    return path


def read(path: Path) -> CaseFile:
    """Read a case file.

    Raises:
        BadCaseFile: missing, truncated, edited or of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("deeptwin", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise BadCaseFile(f"{path}: not a readable case file: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadCaseFile(f"{path}: expected format {FORMAT!r}, got {header and header.get('format')!r}")
    found = digest(tensors)
    if found != header["sha256"]:
        raise BadCaseFile(f"{path}: tensors were changed: expected SHA-256 {header['sha256']}, got {found}")
    return CaseFile(
        component=header["component"],
        op=header["op"],
        candidate=header["candidate"],
        check=header["check"],
        seed=header["seed"],
        case=StoredCase(id=header["case"], regime=header["regime"]),
        inputs={name: _decode(value, tensors) for name, value in header["inputs"].items()},
        note=header["note"],
    )


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in name order."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        total.update(f"{name} {x.dtype} {tuple(x.shape)};".encode())
        total.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _encode(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        # the whole storage travels, so that strided views and the poison between their rows survive
        flat = torch.tensor([], dtype=torch.uint8).set_(value.untyped_storage())
        tensors[name] = flat.clone()
        layout = {"size": list(value.size()), "stride": list(value.stride()), "offset": value.storage_offset()}
        return {"tensor": name, "dtype": str(value.dtype), **layout}
    if isinstance(value, enum.Enum):
        return {"enum": f"{type(value).__module__}:{type(value).__name__}", "name": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {
            f.name: _encode(f"{name}.{f.name}", getattr(value, f.name), tensors) for f in dataclasses.fields(value)
        }
        return {"dataclass": f"{type(value).__module__}:{type(value).__name__}", "fields": parts}
    if isinstance(value, tuple):
        return {"tuple": [_encode(f"{name}.{i}", part, tensors) for i, part in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype_value": str(value)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, tuple):
        return {"tuple": [_encode(f"{name}.{i}", part, tensors) for i, part in enumerate(value)]}
    raise TypeError(f"{name}: cannot be written to a case file: {type(value).__name__}")


def _decode(value: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"].removeprefix("torch."))
        return tensors[value["tensor"]].view(dtype).as_strided(value["size"], value["stride"], value["offset"])
    if "enum" in value:
        return _named(value["enum"])[value["name"]]
    if "dataclass" in value:
        return _named(value["dataclass"])(**{k: _decode(v, tensors) for k, v in value["fields"].items()})
    if "tuple" in value:
        return tuple(_decode(part, tensors) for part in value["tuple"])
    if "dtype_value" in value:
        return getattr(torch, value["dtype_value"].removeprefix("torch."))
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    return value["value"]


def _named(spec: str) -> Any:
    module, _, name = spec.partition(":")
    if not module.startswith("deeptwin.reference."):
        raise BadCaseFile(f"{spec}: a case file may only name types of deeptwin.reference")
    return getattr(importlib.import_module(module), name)
