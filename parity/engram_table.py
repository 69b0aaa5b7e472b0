"""Looks real-sized n-gram rows up in a table file that is larger than memory ought to hold, and says what it cost.

`python -m deeptwin.parity.engram_table` makes a sparse file (2 GiB by default, on disk only where rows are written),
hashes drawn token ids into rows of it, looks all of them up and prints bytes per token and the growth of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import ENGRAM_V41
from deeptwin.reference.engram import engram_hash
from deeptwin.reference.engram_table import MappedTable, TableHeader, hash_digest, write_table
from deeptwin.reference.engram_vocab import CLASSES_V41, hash_layout

SEED = 20261129
CHUNK = 1024  # tokens looked up at a time
WRITTEN = 4096  # rows that really stand in the file, spread over it; all others are holes


def resident(name: str = "VmRSS") -> int:
    """Resident bytes of this process: now (VmRSS), or at most since `forget_peak` (VmHWM); pages of files count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Begin a new VmHWM."""
    Path("/proc/self/clear_refs").write_text("5")


def bytes_from_disk() -> int:
    """Bytes that this process made the kernel fetch from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _blocks(rows: Sequence[int], dim: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    for row in rows:
        codes = np.full((1, dim), row % 119, dtype=np.uint8)
        scales = np.full((1, dim // 32), 110 + row % 20, dtype=np.uint8)
        yield row, torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)


def drawn_rows(rng: np.random.Generator, tokens: int, layer: int, num_rows: int) -> Tensor:
    """The rows of drawn windows in one layer, folded into a table of `num_rows`."""
    layout = hash_layout(ENGRAM_V41)
    window = torch.from_numpy(rng.integers(0, layout.num_classes, (tokens, layout.window)).astype(np.int32))
    return engram_hash(window, torch.zeros(tokens, dtype=torch.bool), layout=layout)[layer] % num_rows


def measure(path: Path, *, gibibytes: float, tokens: int) -> dict[str, float]:
    """Write the file, look up the rows of one layer for `tokens` tokens, and check the written ones.

    Raises:
        RuntimeError: a row came back other than it was written.
    """
    layout, dim = hash_layout(ENGRAM_V41), ENGRAM_V41.head_dim
    header = TableHeader(
        num_rows=int(gibibytes * 2**30) // (dim + dim // 32),
        head_dim=dim,
        layer=ENGRAM_V41.layer_ids[0],
        hash_sha256=hash_digest(layout, 0),
        vocabulary_sha256=CLASSES_V41,
    )
    rng = np.random.Generator(np.random.Philox(SEED))
    written = sorted({int(row) for row in rng.integers(0, header.num_rows, WRITTEN)})
    write_table(path, header, _blocks(written, dim))
    stat = path.stat()
    forget_peak()
    before, fetched = resident(), bytes_from_disk()
    with MappedTable(path) as table:
        table.expect(layer=header.layer, hash_sha256=header.hash_sha256, vocabulary_sha256=CLASSES_V41)
        started = time.monotonic()
        for start in range(0, tokens, CHUNK):
            rows = drawn_rows(rng, min(CHUNK, tokens - start), 0, header.num_rows)
            rows[0, 0] = written[start % len(written)]
            codes, scales = table.lookup(rows)
            expected = written[start % len(written)]
            first = int(codes.view(torch.uint8)[0, 0]), int(scales[0, 0])
            if first != (expected % 119, 110 + expected % 20):
                raise RuntimeError(f"row {expected} came back as {first}")
        seconds = time.monotonic() - started
        copied = table.bytes_copied
    return {
        "file_bytes": stat.st_size,
        "file_bytes_on_disk": stat.st_blocks * 512,
        "rows": header.num_rows,
        "tokens": tokens,
        "bytes_copied_per_token": copied / tokens,
        "bytes_per_token_both_layers": 2 * copied / tokens,
        "bytes_from_disk_per_token": (bytes_from_disk() - fetched) / tokens,
        "peak_memory_growth_bytes": resident("VmHWM") - before,
        "microseconds_per_token": seconds / tokens * 1e6,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.engram_table", description=__doc__)
    parser.add_argument("--gibibytes", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the file is made (default: a temporary folder)"
    )
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        found = measure(Path(folder) / "table.engram", gibibytes=chosen.gibibytes, tokens=chosen.tokens)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
