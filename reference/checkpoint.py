"""Checkpoints as Hugging Face directories: config.json, safetensors files, and an index where there are several.

`open_checkpoint` maps the files and reads their headers alone. A checkpoint is a mapping from names to tensors, which
`from_state_dict` of a block takes; a tensor is a view of its file, so a layer of a checkpoint costs what the layer
weighs, whatever the file does. `open_model` reads the configuration too and refuses what is not the model that it says:
every tensor is there, none beside, with the dtype and the shape that the configuration gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_config import plain_dtype, read_config
from .checkpoint_file import CONFIG, INDEX, SINGLE, Entry, map_file, read_entries, tensor_at
from .checkpoint_names import Spec, expected_tensors
from .config import FP8_128X128
from .presets import ModelConfig, V3Config, V4Config
from .quant import dequantize

PREFIX = "model."
SHOWN = 8  # faults that a message names
# what transformers calls some tensors of V4 when it saves a model, and what the release calls them
SAVED_V4 = (
    (r"^model\.embed_tokens\.weight$", "embed.weight"),
    (r"^model\.hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"\.attn\.norm\.weight$", ".attn.kv_norm.weight"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a directory by name, each a view of its mapped file; with or without the prefix `model.`."""

    folder: Path
    entries: Mapping[str, Entry]  # by the names that are stored
    _mapped: dict[str, Tensor] = field(default_factory=dict)

    def stored_name(self, name: str) -> str | None:
        """How the directory spells a name, or None if it has no such tensor."""
        return next((one for one in (name, other_spelling(name)) if one in self.entries), None)

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored_name(name)
        if stored is None:
            raise KeyError(name)
        entry = self.entries[stored]
        if entry.file not in self._mapped:
            self._mapped[entry.file] = map_file(self.folder / entry.file)
        if len(self._mapped[entry.file]) < entry.end:
            got = len(self._mapped[entry.file])
            raise ValueError(f"{entry.file}: {stored}: expected {entry.end} bytes, as when it was opened, got {got}")
        return tensor_at(self._mapped[entry.file], entry)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.stored_name(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def release(self) -> None:
        """Forget the mappings: what nobody holds any more leaves memory, and the next tensor maps its file again."""
        self._mapped.clear()


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenModel:
    """A checkpoint whose tensors are those of its configuration."""

    config: ModelConfig
    tensors: Checkpoint
    plain: str | None  # dtype of weights that nothing quantised

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors as `from_state_dict` of the blocks and of the model takes them."""
        return Dequantised(tensors=self.tensors) if isinstance(self.config, V3Config) else self.tensors


def other_spelling(name: str) -> str:
    """The name with the prefix `model.` if it has none, without it if it has."""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else PREFIX + name


def open_checkpoint(folder: Path) -> Checkpoint:
    """Map the tensors of a directory; nothing but headers is read.

    Raises:
        ValueError: neither an index nor one file is there, or both; the index is none, names files elsewhere, or
            disagrees with the files in a name or in the size; one tensor stands under both spellings; otherwise as
            `read_entries`.

    Source:
        v41-blocks.md section 0.3
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.exists() == single.exists():
        raise ValueError(
            f"folder: expected either {INDEX} or {SINGLE} in {folder}, got {'both' if index.exists() else 'neither'}"
        )
    places, total = _read_index(index) if index.exists() else (None, None)
    entries: dict[str, Entry] = {}
    for file in [SINGLE] if places is None else sorted(set(places.values())):
        found = read_entries(map_file(folder / file), file=file)
        for name in found:
            if places is not None and places.get(name) != file:
                raise ValueError(f"{file}: {name}: expected only what {INDEX} places here, it says {places.get(name)}")
        entries |= found
    for name in places or ():
        if name not in entries:
            raise ValueError(f"{INDEX}: {name}: expected it in {(places or {})[name]}, whose header lacks it")
    size = sum(entry.num_bytes for entry in entries.values())
    if total is not None and total != size:
        raise ValueError(f"{INDEX}: metadata.total_size: expected {size}, the bytes of all tensors, got {total}")
    twice = sorted(name for name in entries if name.startswith(PREFIX) and other_spelling(name) in entries)
    if twice:
        raise ValueError(
            f"{folder.name}: expected one spelling of a name, got {other_spelling(twice[0])} and {twice[0]}"
        )
    return Checkpoint(folder=folder, entries=entries)


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    record = _read_json(path)
    places = record.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{INDEX}: weight_map: expected a file for every name, got {type(places).__name__}")
    outside = sorted(file for file in set(places.values()) if Path(file).name != file)
    if outside:
        raise ValueError(f"{INDEX}: weight_map: expected files of this directory, got {outside[0]!r}")
    metadata = record.get("metadata", {})
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and type(total) is not int:
        raise ValueError(f"{INDEX}: metadata.total_size: expected a whole number, got {total!r}")
    return places, total


def _read_json(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{path.name}: {key}: expected every key once, got it twice")
            found[key] = value
        return found

    try:
        record = json.loads(path.read_text(), object_pairs_hook=once)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: expected JSON in {path}, got {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path.name}: expected an object, got {type(record).__name__}")
    return record


def open_model(folder: Path) -> OpenModel:
    """Open a directory and refuse what is not the model that its config.json says.

    Edges:
        draft modules of a plain checkpoint may be missing as a whole: transformers does not save them.

    Raises:
        ValueError: as `open_checkpoint` and `read_config`; a tensor is missing, is one too many or has another shape.
        TypeError: a tensor has another dtype.
        NotImplementedError: as `read_config`.
    """
    record = _read_json(folder / CONFIG)
    config, plain = read_config(record, name=folder.resolve().name), plain_dtype(record)
    tensors = open_checkpoint(folder)
    if plain is not None and isinstance(config, V4Config):
        tensors = replace(tensors, entries={_released(name): entry for name, entry in tensors.entries.items()})
    shapes, dtypes = faults(tensors.entries, expected_tensors(config, plain=plain))
    found = shapes or dtypes
    if found:
        more = f"\n… and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        text = "\n".join(found[:SHOWN]) + more
        raise ValueError(f"tensors: {text}") if shapes else TypeError(f"tensors: {text}")
    return OpenModel(config=config, tensors=tensors, plain=plain)


def _released(name: str) -> str:
    for saved, released in SAVED_V4:
        name = re.sub(saved, released, name)
    return name


def faults(entries: Mapping[str, Entry], specs: tuple[Spec, ...]) -> tuple[list[str], list[str]]:
    """What is wrong with names and shapes, and what with dtypes, one line for each tensor."""
    shapes, dtypes, known = [], [], set()
    stored = {name.removeprefix(PREFIX): name for name in entries}
    # plain checkpoints are those of others, who may leave the drafts out
    is_plain = not any(spec.dtype.startswith("F8") for spec in specs)
    has_drafts = any(spec.is_draft and spec.name.removeprefix(PREFIX) in stored for spec in specs)
    for spec in specs:
        key = spec.name.removeprefix(PREFIX)
        known.add(key)
        if key not in stored:
            if not (spec.is_draft and is_plain and not has_drafts):
                shapes.append(f"{spec.name}: expected {spec.dtype} {list(spec.shape)}, got no such tensor")
            continue
        entry = entries[stored[key]]
        if entry.shape != spec.shape:
            shapes.append(f"{stored[key]}: expected shape {list(spec.shape)}, got {list(entry.shape)} in {entry.file}")
        elif entry.dtype not in spec.dtypes:
            dtypes.append(f"{stored[key]}: expected {' or '.join(spec.dtypes)}, got {entry.dtype} in {entry.file}")
    extra = sorted(name for key, name in stored.items() if key not in known)
    shapes += [f"{name}: expected no such tensor{_why_not(name)}, got one in {entries[name].file}" for name in extra]
    return shapes, dtypes


def _why_not(name: str) -> str:
    """What a tensor that should not be there means, where it means something."""
    if re.search(r"hc_\w+_norm\.weight$", name):
        return " (its values belong into the columns of the site's fn)"
    return " (a head of the streams: hc_shifted false)" if "hc_head_" in name else ""


def value_faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """What no weight can be: NaN and infinity, NaN codes of e4m3, the NaN byte of UE8M0; one line for each tensor.

    Edges:
        reads every tensor that it is given. A flipped bit that gives another number is not seen.
    """
    found = []
    for name, x in tensors.items():
        byte = x.view(torch.uint8) if x.element_size() == 1 else None
        if x.dtype is torch.float8_e4m3fn and byte is not None:
            bad = (byte & 0x7F) == 0x7F
        elif x.dtype is torch.float8_e8m0fnu and byte is not None:
            bad = byte == 0xFF
        elif x.is_floating_point():
            bad = ~torch.isfinite(x)
        else:
            continue
        if bad.any():
            where = [int(i) for i in bad.nonzero()[0]]
            count = int(bad.sum(dtype=torch.int64))
            found.append(f"{name}: expected numbers, got {count} that are none, the first at {where}")
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Dequantised(Mapping[str, Tensor]):
    """The tensors of a V3 checkpoint as its blocks take them, made one by one when asked for; others pass through.

    A matrix is its codes times its scales, rounded to bf16 as the release's own conversion does. That happens under
    every numerics: it is the weight. The signed weights of index heads become fp32, which is exact.
    """

    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        x, scale = self.tensors[name], name + "_scale_inv"
        if scale in self.tensors:
            plain = dequantize(x, self.tensors[scale], fmt=FP8_128X128)
            return torch.empty_like(plain, dtype=torch.bfloat16).copy_(plain)  # bf16 numbers already
        is_index_weight = name.endswith(".self_attn.indexer.weights_proj.weight")
        return torch.empty_like(x, dtype=torch.float32).copy_(x) if is_index_weight else x

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
