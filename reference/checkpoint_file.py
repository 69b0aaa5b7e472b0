"""One safetensors file: eight bytes of length, a JSON header, and the bytes of its tensors without gaps.

The header says for every tensor its dtype, shape and place. A file is read by mapping it into memory: nothing is copied
before it is computed with, and writing to a tensor changes no file. All that a header promises is checked before the
first tensor is handed out.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# dtypes as the format calls them, in the order in which the safetensors library writes them (the widest first)
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# what the files of a directory are called
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
# a private mapping that reserves no memory: one file may be larger than the machine
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies: its dtype as the format calls it, its shape, and its bytes in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # from the first byte of the file
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def read_entries(file_n: Tensor, *, file: str) -> dict[str, Entry]:
    """Everything that a file holds, by name; `file` is what messages and entries call it.

    Shapes:
        file_n: uint8 [n], the bytes of the whole file.

    Edges:
        the free text under `__metadata__` is no tensor. Tensors need not be aligned.

    Raises:
        ValueError: the file is shorter than its header says, or longer; the header is no JSON object, or names a tensor
            twice; a tensor has an unknown dtype, a shape that is none, or bytes that do not fit its shape; bytes belong
            to no tensor or to two.
    """
    total = len(file_n)
    if total < LENGTH_BYTES:
        raise ValueError(f"{file}: expected at least {LENGTH_BYTES} bytes, got {total}")
    length = int.from_bytes(bytes(file_n[:LENGTH_BYTES].tolist()), "little")
    if not 2 <= length <= min(LARGEST_HEADER, total - LENGTH_BYTES):
        room = min(LARGEST_HEADER, total - LENGTH_BYTES)
        raise ValueError(f"{file}: expected a header of 2 to {room} bytes, got one that says {length}: truncated?")
    first = LENGTH_BYTES + length
    header = _parsed(file_n[LENGTH_BYTES:first].numpy().tobytes(), file)
    entries = {name: _entry(name, record, file, first) for name, record in header.items() if name != "__metadata__"}
    _expect_no_gaps(entries, file, first, total)
    return entries


def _parsed(header: bytes, file: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{file}: expected every name once in the header, got {twice!r} twice")
        return found

    try:
        parsed = json.loads(header.decode(), object_pairs_hook=once)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected a header in JSON, got {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file}: expected a header that is an object, got {type(parsed).__name__}")
    return parsed


def _entry(name: str, record: Any, file: str, first: int) -> Entry:
    if not isinstance(record, dict) or set(record) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{file}: {name}: expected dtype, shape and data_offsets, got {record}")
    dtype, shape, place = record["dtype"], record["shape"], record["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{file}: {name}: expected a dtype of {', '.join(DTYPES)}, got {dtype}")
    if not _are_counts(shape) or not _are_counts(place) or len(place) != 2:
        raise ValueError(f"{file}: {name}: expected a shape and two offsets from 0 up, got {shape} and {place}")
    wanted = size_of(dtype, tuple(shape))
    if place[1] - place[0] != wanted:
        got = f"{place[1] - place[0]} at {place}"
        raise ValueError(f"{file}: {name}: expected {wanted} bytes for {dtype} {shape}, got {got}")
    return Entry(file=file, dtype=dtype, shape=tuple(shape), start=first + place[0], end=first + place[1])


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def _expect_no_gaps(entries: Mapping[str, Entry], file: str, first: int, total: int) -> None:
    at, before = first, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise ValueError(f"{file}: {name}: expected byte {at}, where {before} ends, got {entry.start}")
        at, before = entry.end, name
    if at != total:
        raise ValueError(f"{file}: expected {at} bytes, up to the end of {before}, got {total}")


def map_file(path: Path) -> Tensor:
    """The bytes of a file, mapped: what is never touched is never read, what is written stays in this process.

    Shapes:
        returns uint8 [n].

    Raises:
        ValueError: the file is not there, or empty.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a file of tensors, got {error}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def tensor_at(file_n: Tensor, entry: Entry) -> Tensor:
    """The tensor of an entry: a view of the file's bytes, or a copy where they are not aligned.

    Shapes:
        file_n: uint8 [n]; returns a tensor of the entry's dtype and shape.
    """
    dtype = DTYPES[entry.dtype]
    bytes_n = file_n[entry.start : entry.end]
    if entry.start % dtype.itemsize:
        bytes_n = bytes_n.clone()
    return bytes_n.view(dtype).view(entry.shape)


def stored_tensor(file_n: Tensor, *, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes, the shape and the dtype of one tensor of a file.

    Shapes:
        file_n: uint8 [n]; returns uint8 bytes, int64 sizes, and int64 [1], the place of the dtype in `DTYPES`.

    Raises:
        ValueError: the file has no such tensor; otherwise as `read_entries`.
    """
    entries = read_entries(file_n, file="file_n")
    if name not in entries:
        raise ValueError(f"name: expected one of {', '.join(sorted(entries))}, got {name!r}")
    entry = entries[name]
    bytes_n = tensor_at(file_n, entry).clone().flatten().view(torch.uint8)
    return bytes_n, torch.tensor(entry.shape, dtype=torch.int64), torch.tensor([list(DTYPES).index(entry.dtype)])


def dtype_name(name: str, x: Tensor) -> str:
    """What the format calls the dtype of the tensor `name`.

    Raises:
        TypeError: the format has none.
    """
    found = next((known for known, dtype in DTYPES.items() if dtype is x.dtype), None)
    if found is None:
        raise TypeError(f"{name}: expected a dtype of {', '.join(DTYPES)}, got {x.dtype}")
    return found


def pack_header(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """The header of a file and the order of its tensors, from their dtypes and shapes.

    Edges:
        the widest elements come first, names in order among them, and the header is filled up with blanks to a multiple
        of eight: every tensor is aligned. The safetensors library writes the same bytes.
    """
    ranks = list(DTYPES)
    order = sorted(shapes, key=lambda name: (ranks.index(shapes[name][0]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        dtype, shape = shapes[name]
        end = at + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, order


def file_bytes(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> Tensor:
    """A whole file with these tensors.

    Shapes:
        returns uint8 [n].

    Raises:
        TypeError: the format has no such dtype.
        ValueError: there are not as many names as tensors.
    """
    if len(names) != len(tensors):
        raise ValueError(f"names: expected {len(tensors)}, one for each tensor, got {len(names)}")
    found = dict(zip(names, tensors, strict=True))
    header, order = pack_header({name: (dtype_name(name, x), tuple(x.shape)) for name, x in found.items()})
    parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
    parts += [found[name].detach().contiguous().flatten().view(torch.uint8) for name in order]
    return torch.cat(parts)
