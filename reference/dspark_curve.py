"""The performance curve of decode steps: which graph sizes are measured, how, and the files that keep the result.

A curve is a list of (tokens of a captured graph, milliseconds). Its file has the name `<sha256>.<uuid4 hex>.<seconds>`:
the hash is that of everything the times depend on, so a curve is found by its name alone. A reader never sees a file
that is half written: it is written aside, synchronised and renamed.

Source: runtime.md section 1.4 (DeepInfer, worker/decode_perf_cache.py, worker/model_runner.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

INTERVAL = 8  # between graph sizes, from there on
TTL = 3600.0  # seconds that a curve may be read
GRACE = 7200.0  # seconds after that until its file is deleted
REPLAYS = 5
NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{32})\.(\d+)")

Curve = tuple[tuple[int, float], ...]


def graph_sizes(max_requests: int, draft: int) -> tuple[int, ...]:
    """Tokens of the captured graphs: powers of two below 8, multiples of 8, and the maximum, max_requests · (1 + γ).

    Raises:
        ValueError: max_requests is not positive, or draft is negative.
    """
    if max_requests < 1 or draft < 0:
        raise ValueError(f"max_requests: expected 1 or more of drafts from 0 on, got {max_requests} of {draft}")
    most = max_requests * (1 + draft)
    small = [size for size in (1, 2, 4) if size < most]
    return (*small, *range(INTERVAL, most, INTERVAL), most)


def measured(replays_ms: Sequence[float]) -> float:
    """The time of one graph from five replays: the fastest and the slowest are dropped, three are averaged.

    Raises:
        ValueError: there are not five.
    """
    if len(replays_ms) != REPLAYS:
        raise ValueError(f"replays_ms: expected {REPLAYS} times, got {len(replays_ms)}")
    kept = sorted(replays_ms)[1:-1]
    return sum(kept) / len(kept)


def curve_key(*, model: str, sizes: tuple[int, ...], dp: int, cp: int, ep: int) -> str:
    """The hash that a curve is filed under: SHA-256 of canonical JSON of all that its times depend on."""
    facts = {
        "time_unit": "ms",
        "model_path": model,
        "batch_sizes": list(sizes),
        "dp_size": dp,
        "cp_size": cp,
        "ep_size": ep,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_curve(folder: Path, key: str, curve: Curve, *, now: float, unique: str) -> Path:
    """File a curve atomically; `unique` is 32 hex digits that no other writer has.

    Raises:
        ValueError: the name that key, unique and now make is none of a curve file.
    """
    name = f"{key}.{unique}.{int(now)}"
    if not NAME.fullmatch(name):
        raise ValueError(f"key: expected 64 and 32 lower-case hex digits and a time, got {name}")
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / name, folder / f"{name}.tmp"
    with aside.open("w") as file:
        json.dump([list(point) for point in curve], file)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    return path


def read_curve(folder: Path, key: str, *, sizes: tuple[int, ...], now: float) -> Curve | None:
    """The newest curve of `key` that is at most an hour old and has exactly these sizes, or None.

    A file that cannot be read, or that is not the list of times it should be, is passed over.
    """
    found = []
    for path in folder.glob("*"):
        match = NAME.fullmatch(path.name)
        if match and match[1] == key and now - int(match[3]) <= TTL:
            found.append((int(match[3]), path))
    for _, path in sorted(found, reverse=True):
        try:
            points = json.loads(path.read_text())
            curve = tuple((int(size), float(ms)) for size, ms in points)
        except (OSError, ValueError, TypeError):
            continue
        if tuple(size for size, _ in curve) == sizes and all(0 < ms < float("inf") for _, ms in curve):
            return curve
    return None


def stale_curves(folder: Path, *, now: float) -> list[Path]:
    """Files that the writer deletes: three hours old, or with a name that is none of ours.

    A file that another writer is about to rename is left alone until it is that old.
    """
    stale = []
    for path in sorted(folder.glob("*")):
        match = NAME.fullmatch(path.name.removesuffix(".tmp"))
        if match is None or now - int(match[3]) > TTL + GRACE:
            stale.append(path)
    return stale
