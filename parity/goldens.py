"""Golden vectors: the CONTRACT outputs of a few small cases, pinned with provenance.

`golden/<component>/manifest.json` names every vector with the SHA-256 of its inputs and outputs; the arrays stand in
`vectors.safetensors` beside it. Missing, changed and unused vectors all fail. Updating is explicit and atomic: both
files are written aside and renamed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .card import Card, Inputs, Outputs, case_rng
from .casefile import digest
from .environment import fixed_numerics
from .files import replacing
from .floats import same_bytes
from .house import HOUSE
from .oracles import OracleSet
from .outcome import Outcome, Status
from .relations import first_difference

GENERATOR = "deeptwin.golden/1"
GOLDEN_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Vector:
    """One recomputed golden vector."""

    key: str
    inputs: str  # SHA-256
    outputs: Outputs


def folder(component: str, root: Path | None = None) -> Path:
    """Where the vectors of a component live."""
    return (root or HOUSE / "golden") / component


def recompute(card: Card) -> Iterator[Vector]:
    """Every golden vector of a card, from its cases and the reference."""
    with fixed_numerics():
        for op in card.ops:
            for case in op.golden():
                inputs = op.draw(case, case_rng(card.component, op.name, case.id, GOLDEN_SEED))
                oracles = OracleSet(op, inputs)
                stored = {o.name: oracles.contract[o.name].to(oracles.dtype(o)) for o in op.outputs}
                yield Vector(key=f"{op.name}/{case.id}", inputs=digest(_tensors(inputs)), outputs=stored)


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            found |= _tensors({f"{name}.{i}": part for i, part in enumerate(value)})
        elif hasattr(value, "__dataclass_fields__"):
            found |= {f"{name}.{k}": v for k, v in vars(value).items() if isinstance(v, torch.Tensor)}
    return found


def verify(card: Card, root: Path | None = None) -> list[Outcome]:
    """Compare the stored vectors with recomputed ones; one outcome per vector, plus unused and unreadable files."""
    place = folder(card.component, root)

    def outcome(key: str, status: Status, message: str = "", diagnosis: str = "") -> Outcome:
        op, _, case = key.partition("/")
        return Outcome(
            component=card.component,
            op=op,
            candidate="reference",
            case=case or "-",
            check="golden",
            status=status,
            message=message,
            diagnosis=diagnosis,
            command=f"deeptwin golden verify --component {card.component}",
        )

    try:
        manifest, arrays = _read(place)
    except GoldenError as error:
        return [outcome("files", Status.MISMATCH, str(error))]
    found: list[Outcome] = []
    entries = manifest["vectors"]
    for vector in recompute(card):
        found.append(outcome(vector.key, *_compare(vector, entries.get(vector.key), arrays, place)))
    expected = {o.op + "/" + o.case for o in found}
    for key in sorted(set(entries) - expected):
        found.append(outcome(key, Status.MISMATCH, f"{place}: vector {key} is unused: no card case asks for it"))
    for name in sorted(p.name for p in place.iterdir() if p.name not in ("manifest.json", "vectors.safetensors")):
        found.append(outcome("files", Status.MISMATCH, f"{place / name}: unused file"))
    return found


class GoldenError(Exception):
    """A golden file is missing, truncated or edited; the message names the path and, where known, both digests."""


def _read(place: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    path, data = place / "manifest.json", place / "vectors.safetensors"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise GoldenError(f"{path}: missing; write it with 'deeptwin golden update'") from error
    except json.JSONDecodeError as error:
        raise GoldenError(f"{path}: not JSON: {error}") from error
    if manifest.get("generator") != GENERATOR:
        raise GoldenError(f"{path}: expected generator {GENERATOR!r}, got {manifest.get('generator')!r}")
    try:
        arrays = load_file(data)
    except FileNotFoundError as error:
        raise GoldenError(f"{data}: missing; write it with 'deeptwin golden update'") from error
    except (SafetensorError, OSError) as error:
        wanted, got = manifest["sha256"], _file_digest(data)
        raise GoldenError(f"{data}: unreadable ({error}): expected SHA-256 {wanted}, got {got}") from error
    found = _file_digest(data)
    if found != manifest["sha256"]:
        raise GoldenError(f"{data}: changed: expected SHA-256 {manifest['sha256']}, got {found}")
    return manifest, arrays


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compare(
    vector: Vector, entry: dict[str, Any] | None, arrays: dict[str, torch.Tensor], place: Path
) -> tuple[Status, str, str]:
    if entry is None:
        return Status.MISMATCH, f"{place}: no vector {vector.key}; write it with 'deeptwin golden update'", "missing"
    if entry["inputs"] != vector.inputs:
        text = f"{place}: inputs of {vector.key}: expected SHA-256 {entry['inputs']}, got {vector.inputs}"
        return Status.MISMATCH, text, "the case draws other inputs"
    stored = {name: arrays[f"{vector.key}:{name}"] for name in entry["outputs"] if f"{vector.key}:{name}" in arrays}
    for name, value in vector.outputs.items():
        if name not in stored:
            return Status.MISMATCH, f"{place}: {vector.key}: output {name} is missing", "missing"
        if not same_bytes(stored[name], value):
            where = first_difference({name: value}, {name: stored[name]})
            return Status.MISMATCH, f"{place}: {vector.key}: reference against golden: {where}", "the reference moved"
    return Status.PASSED, "", ""


def update(card: Card, *, new_only: bool = False, root: Path | None = None) -> list[str]:
    """Write the vectors of a card, atomically; with `new_only` stored vectors stay as they are. Returns what changed.

    Raises:
        GoldenError: `new_only` with unreadable stored files.
    """
    place = folder(card.component, root)
    old: dict[str, Any] = {}
    kept: dict[str, torch.Tensor] = {}
    if (place / "manifest.json").exists() and new_only:
        manifest, kept = _read(place)
        old = manifest["vectors"]
    elif (place / "manifest.json").exists():
        try:
            old = _read(place)[0]["vectors"]
        except GoldenError:
            old = {}
    vectors: dict[str, Any] = {}
    arrays: dict[str, torch.Tensor] = {}
    changed: list[str] = []
    for vector in recompute(card):
        if new_only and vector.key in old:
            vectors[vector.key] = old[vector.key]
            arrays |= {f"{vector.key}:{n}": kept[f"{vector.key}:{n}"] for n in old[vector.key]["outputs"]}
            continue
        outputs = {name: {"sha256": digest({name: x}), "dtype": str(x.dtype)} for name, x in vector.outputs.items()}
        vectors[vector.key] = {"inputs": vector.inputs, "outputs": outputs}
        arrays |= {f"{vector.key}:{name}": x.contiguous() for name, x in vector.outputs.items()}
        if old.get(vector.key) != vectors[vector.key]:
            changed.append(vector.key)
    changed += sorted(f"{key} (removed)" for key in set(old) - set(vectors))
    _write(place, card, vectors, arrays)
    return changed


def _write(place: Path, card: Card, vectors: dict[str, Any], arrays: dict[str, torch.Tensor]) -> None:
    with replacing(place / "vectors.safetensors") as data, replacing(place / "manifest.json") as listing:
        save_file(arrays, data)
        manifest = {
            "generator": GENERATOR,
            "component": card.component,
            "source": "reference under CONTRACT; tests tie it to the worked numbers of the spec and to peers",
            "seed": GOLDEN_SEED,
            "sha256": _file_digest(data),
            "vectors": dict(sorted(vectors.items())),
        }
        listing.write_text(json.dumps(manifest, indent=1) + "\n")


def faults(card: Card) -> list[str]:
    """What `verify` says of vectors that do not hold; a card without vectors is a fault too."""
    outcomes = verify(card)
    return [o.message for o in outcomes if o.status is not Status.PASSED] if outcomes else ["there are no vectors"]
