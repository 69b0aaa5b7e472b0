"""A file with the table of one layer of the n-gram memory, looked up in place.

A released table is 101 GB. The file is mapped into memory, and a look-up copies the rows that it was asked for; pages
that were read for it are given back afterwards, so neither the table nor its pages pile up in the process.

Layout: a header of one page (4096 bytes), then the rows one after the other, each its e4m3 codes followed by the
UE8M0 bytes of its groups of 32 (264 bytes for 256 channels). Codes and scales of a row stand together because they are
read together. The header is little-endian: magic, version, channels, number of rows, layer, SHA-256 of the hash
constants and of the class map, then the SHA-256 of all of these. A table is only meaningful with the constants and the
map it was trained with, and a wrong pair would fail nowhere else.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_multiple, expect_shape
from .config import EngramLayout

MAGIC = b"DTENGRAM"
VERSION = 1
HEADER_BYTES = 4096
FIELDS = struct.Struct("<8sIIQI32s32s")
GROUP = 32
BLOCK_ROWS = 512  # rows copied before pages are given back; a fault may map 16 pages around the one it needs


@dataclass(frozen=True, kw_only=True)
class TableHeader:
    """What a table file says about itself."""

    num_rows: int
    head_dim: int
    layer: int
    hash_sha256: str  # of the multipliers and primes of the layer
    vocabulary_sha256: str  # of the class map

    def __post_init__(self) -> None:
        if self.head_dim < GROUP or self.head_dim % GROUP:
            raise ValueError(f"head_dim: expected a positive multiple of {GROUP}, got {self.head_dim}")
        if self.num_rows < 1:
            raise ValueError(f"num_rows: expected at least 1, got {self.num_rows}")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: its codes, then its scales."""
        return self.head_dim + self.head_dim // GROUP

    def packed(self) -> bytes:
        """The first page of the file."""
        digests = (bytes.fromhex(self.hash_sha256), bytes.fromhex(self.vocabulary_sha256))
        fields = FIELDS.pack(MAGIC, VERSION, self.head_dim, self.num_rows, self.layer, *digests)
        return (fields + hashlib.sha256(fields).digest()).ljust(HEADER_BYTES, b"\0")


def hash_digest(layout: EngramLayout, layer_index: int) -> str:
    """SHA-256 of the multipliers and primes of one layer of `layout`, as int64 little-endian."""
    constants = (*layout.multipliers[layer_index], *layout.primes[layer_index])
    return hashlib.sha256(np.array(constants, dtype="<i8").tobytes()).hexdigest()


def write_table(path: Path, header: TableHeader, blocks: Iterable[tuple[int, Tensor, Tensor]]) -> None:
    """Write a table file from blocks (first row, codes, scale bytes), beside it first and renamed when complete.

    Shapes:
        a block: codes float8_e4m3fn [r, d], scales uint8 [r, d / 32].

    Edges:
        rows that no block covers are zero bytes, and take no space on a file system with sparse files.

    Raises:
        TypeError: codes or scales have another dtype.
        ValueError: a block has another shape, or rows beyond the table.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(header.packed())
            file.truncate(HEADER_BYTES + header.num_rows * header.row_bytes)
            for first, codes_rd, sf_rg in blocks:
                dims = {"d": header.head_dim, "g": header.head_dim // GROUP}
                expect_shape("codes_rd", codes_rd, "rd", dims)
                expect_shape("sf_rg", sf_rg, "rg", dims)
                expect_dtype("codes_rd", codes_rd, torch.float8_e4m3fn)
                expect_dtype("sf_rg", sf_rg, torch.uint8)
                if first < 0 or first + dims["r"] > header.num_rows:
                    raise ValueError(
                        f"blocks: expected rows below {header.num_rows}, got {first} to {first + dims['r']}"
                    )
                file.seek(HEADER_BYTES + first * header.row_bytes)
                file.write(torch.cat([codes_rd.view(torch.uint8), sf_rg], dim=1).numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class MappedTable:
    """A table file, open for look-ups; a context manager."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            ValueError: it is no table file, its header is damaged, or its length is not what the header says.
        """
        with path.open("rb") as file:
            self.header = _read_header(path, file.read(HEADER_BYTES))
            size = file.seek(0, os.SEEK_END)
            expected = HEADER_BYTES + self.header.num_rows * self.header.row_bytes
            if size != expected:
                raise ValueError(f"path: expected {expected} bytes in {path}, got {size}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)  # no read-ahead: the next row is somewhere else
        self.bytes_copied = 0

    def __enter__(self) -> MappedTable:
        return self

    def __exit__(self, *failure: object) -> None:
        self._map.close()

    def expect(self, *, layer: int, hash_sha256: str, vocabulary_sha256: str) -> None:
        """Refuse a table that belongs to another layer, to other hash constants or to another class map.

        Raises:
            ValueError: one of them differs.
        """
        wanted = {"layer": layer, "hash_sha256": hash_sha256, "vocabulary_sha256": vocabulary_sha256}
        for name, value in wanted.items():
            if getattr(self.header, name) != value:
                raise ValueError(f"{name}: expected a table of {value}, got one of {getattr(self.header, name)}")

    def lookup(self, row_tz: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of the named rows, as `engram_lookup` returns them of a table in memory.

        Raises:
            TypeError: row_tz is not int32.
            ValueError: row_tz is not 2-D, or names a row beyond the table; -1 is a hole.
        """
        dims: dict[str, int] = {}
        expect_shape("row_tz", row_tz, "tz", dims)
        expect_dtype("row_tz", row_tz, torch.int32)
        expect_in_range("row_tz", row_tz, -1, self.header.num_rows)
        width, count = self.header.row_bytes, row_tz.numel()
        hole = np.full(width, 127, dtype=np.uint8)  # unit scales
        hole[: self.header.head_dim] = 0
        rows = row_tz.reshape(-1).numpy()
        copied = np.empty((count, width), dtype=np.uint8)
        for start in range(0, count, BLOCK_ROWS):
            self._copy(rows[start : start + BLOCK_ROWS], copied[start : start + BLOCK_ROWS], hole)
        whole_tzq = torch.from_numpy(copied).view(dims["t"], dims["z"], width)
        codes_tm = whole_tzq[..., : self.header.head_dim].flatten(1).view(torch.float8_e4m3fn)
        return codes_tm, whole_tzq[..., self.header.head_dim :].flatten(1)

    def _copy(self, rows: np.ndarray, copied: np.ndarray, hole: np.ndarray) -> None:
        width, named = self.header.row_bytes, rows >= 0
        table = np.frombuffer(self._map, dtype=np.uint8, offset=HEADER_BYTES).reshape(-1, width)
        copied[named] = table[rows[named]]
        copied[~named] = hole
        self.bytes_copied += int(named.sum(dtype=np.int64)) * width
        del table  # the map cannot be closed while an array looks into it
        self._map.madvise(mmap.MADV_DONTNEED)


def expect_table(table_rd: Tensor, table_sf_rg: Tensor, row_tz: Tensor) -> None:
    """Refuse a table in memory, or rows of it, that cannot be.

    Raises:
        TypeError: the table is not float8_e4m3fn and uint8, or row_tz is not int32.
        ValueError: shapes disagree, or a row is not in -1 … r - 1.
    """
    dims: dict[str, int] = {}
    expect_shape("table_rd", table_rd, "rd", dims)
    expect_multiple("table_rd (last axis)", dims["d"], GROUP)
    expect_shape("table_sf_rg", table_sf_rg, "rg", dims | {"g": dims["d"] // GROUP})
    expect_shape("row_tz", row_tz, "tz", {})
    expect_dtype("table_rd", table_rd, torch.float8_e4m3fn)
    expect_dtype("table_sf_rg", table_sf_rg, torch.uint8)
    expect_dtype("row_tz", row_tz, torch.int32)
    expect_in_range("row_tz", row_tz, -1, dims["r"])


def _read_header(path: Path, page: bytes) -> TableHeader:
    fields, digest = page[: FIELDS.size], page[FIELDS.size : FIELDS.size + 32]
    if page[:8] != MAGIC or len(page) != HEADER_BYTES:
        raise ValueError(f"path: expected a table file, {path} starts with {page[:8]!r}")
    if hashlib.sha256(fields).digest() != digest:
        raise ValueError(f"path: the header of {path} is damaged")
    _, version, head_dim, num_rows, layer, constants, vocabulary = FIELDS.unpack(fields)
    if version != VERSION:
        raise ValueError(f"path: expected version {VERSION} in {path}, got {version}")
    return TableHeader(
        num_rows=num_rows,
        head_dim=head_dim,
        layer=layer,
        hash_sha256=constants.hex(),
        vocabulary_sha256=vocabulary.hex(),
    )
