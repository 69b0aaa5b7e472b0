"""Kills, breaks and power cuts of the prefix store on real files: how many, and how often it then served wrong bytes.

`python -m deeptwin.parity.prefix_crashes` prints one line for each kind. Every kind ends alike: the folder is opened
again by a store that knows nothing, and every entry must be what was put, whole, or absent; what a put had returned
for must be there. Four kinds:

    kill       a child process puts an entry and ends at one of its calls, or in the middle of a write
    truncate   the file of an entry, or what a put left beside it, is cut at every length
    byte       one byte of a file is changed, at every place
    power cut  a disk model forgets what was not synced: contents and names survive in every way that POSIX allows

The same on stores that lack one thing must be noticed: those counts are printed too, and have to be above 0. (Against
kills and power cuts, sync and rename are enough; the checksum is there for files that change afterwards.)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from deeptwin.optimized.prefix_cache import HEADER, Disk, PrefixStore

KILLED = 9


@dataclass(kw_only=True)
class Tally:
    """How many crashes of a kind were injected, and what the store answered afterwards."""

    kind: str
    crashes: int = 0
    whole: int = 0
    absent: int = 0
    wrong: int = 0  # other bytes were served
    lost: int = 0  # a put had returned, and the entry is gone

    def line(self) -> str:
        """One row of the report."""
        return (
            f"{self.kind:<34} {self.crashes:7d} crashes  {self.whole:7d} whole  {self.absent:7d} absent"
            f"  {self.wrong:5d} wrong  {self.lost:5d} lost"
        )


def entry(number: int, version: int = 0, size: int = 300) -> tuple[bytes, bytes]:
    """A key and a payload."""
    key = hashlib.sha256(f"entry {number}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(1000 * number + version))
    return key, rng.integers(0, 256, size, dtype=np.uint8).tobytes()


def judge(tally: Tally, store: PrefixStore, allowed: dict[bytes, tuple[bytes | None, ...]]) -> None:
    """Ask for every entry; `allowed` says which answers are right, None for an entry that may be absent."""
    tally.crashes += 1
    for key, answers in allowed.items():
        found = store.get(key)
        if found is None:
            tally.absent += 1
            tally.lost += None not in answers
        elif found in answers:
            tally.whole += 1
        else:
            tally.wrong += 1


@dataclass
class FatalDisk(Disk):
    """A disk at whose n-th writing call the process ends, after a share of the bytes of a write."""

    steps: int
    share: float = 0.0

    def _ends(self) -> bool:
        self.steps -= 1
        return self.steps < 0

    def write(self, path: Path, data: bytes, *, append: bool) -> None:
        """One step."""
        if self._ends():
            super().write(path, data[: int(len(data) * self.share)], append=append)
            os._exit(KILLED)
        super().write(path, data, append=append)

    def sync(self, path: Path) -> None:
        """One step."""
        if self._ends():
            os._exit(KILLED)
        super().sync(path)

    def rename(self, path: Path, to: Path) -> None:
        """One step."""
        if self._ends():
            os._exit(KILLED)
        super().rename(path, to)


def kills(store_type: type[PrefixStore], *, rounds: int) -> Tally:
    """Child processes that end inside a put, beside entries that were there before."""
    tally = Tally(kind="kill")
    for number, steps, share in product(range(rounds), range(6), (0.0, 0.4, 1.0)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            key, old = entry(number)
            other, kept = entry(number + 1)
            new = entry(number, version=1)[1]
            store_type(folder).put(other, kept)
            if number % 2:
                store_type(folder).put(key, old)
            child = os.fork()
            if child == 0:
                store_type(folder, disk=FatalDisk(steps, share)).put(key, new)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            before = (old,) if number % 2 else (None,)
            allowed = (new,) if status == 0 else (*before, new)
            judge(tally, store_type(folder), {key: allowed, other: (kept,)})
    return tally


def breaks(store_type: type[PrefixStore], *, size: int) -> tuple[Tally, Tally]:
    """Files cut at every length, with and without an end beside them, and files with one byte changed."""
    cut, byte = Tally(kind="truncate"), Tally(kind="byte")
    key, payload = entry(7, size=size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store_type(folder).put(key, payload)
        path = store_type(folder).path(key)
        whole = path.read_bytes()
        beside = folder / f"{key.hex()}.partial"
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            judge(cut, store_type(folder), {key: (None,)})
            path.unlink(missing_ok=True)
            beside.write_bytes(whole[:length])
            judge(cut, store_type(folder), {key: (None,)})
        for at in range(len(whole)):
            for change in (1, 0x80, 0xFF):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
                judge(byte, store_type(folder), {key: (None,)})
                path.unlink(missing_ok=True)
        path.write_bytes(whole + b"\0")
        judge(byte, store_type(folder), {key: (None,)})
    return cut, byte


class PowerCut(Exception):
    """The machine stops."""


@dataclass
class File:
    """What a file holds, and how much of it is sure to survive."""

    data: bytes = b""
    synced: int = -1  # bytes that survive; -1: not even the file

    def survivors(self) -> list[bytes | None]:
        """What may be left of it: every sort of tail that was not synced."""
        if self.synced == len(self.data):
            return [self.data]
        sure = max(self.synced, 0)
        middle = (sure + len(self.data)) // 2
        tail = self.data[sure:]
        found: list[bytes | None] = [self.data[:sure], self.data[:middle], self.data]
        # the length is there, the bytes are not; or the end is there and the beginning is not
        found += [
            self.data[:sure] + bytes(len(tail)),
            self.data[:sure] + bytes(len(tail) // 2) + tail[len(tail) // 2 :],
        ]
        return found if self.synced >= 0 else [None, *found]


@dataclass
class ForgetfulDisk(Disk):
    """A disk in memory that stops after so many writing calls; names are sure as of the last sync of the folder.

    Later changes of names survive in order, up to any point.
    """

    steps: int
    files: list[File] = field(default_factory=list)
    now: dict[str, int] = field(default_factory=dict)
    sure: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[str, int | None]] = field(default_factory=list)

    def _step(self) -> None:
        if not self.steps:
            raise PowerCut
        self.steps -= 1

    def _name(self, name: str, number: int | None) -> None:
        self.changes.append((name, number))
        if number is None:
            self.now.pop(name, None)
        else:
            self.now[name] = number

    def write(self, path: Path, data: bytes, *, append: bool) -> None:
        """One step."""
        self._step()
        if append and path.name in self.now:
            self.files[self.now[path.name]].data += data
            return
        self.files.append(File(data))
        self._name(path.name, len(self.files) - 1)

    def sync(self, path: Path) -> None:
        """One step."""
        self._step()
        if path.name in self.now:
            file = self.files[self.now[path.name]]
            file.synced = len(file.data)
        else:
            self.sure, self.changes = dict(self.now), []

    def rename(self, path: Path, to: Path) -> None:
        """One step."""
        self._step()
        number = self.now[path.name]
        self._name(to.name, number)
        self._name(path.name, None)

    def read(self, path: Path) -> bytes | None:
        """What the running system sees."""
        return self.files[self.now[path.name]].data if path.name in self.now else None

    def remove(self, path: Path) -> None:
        """Not a step: what a store removes is no loss."""
        if path.name in self.now:
            self._name(path.name, None)

    def names(self, folder: Path) -> list[str]:
        """What the running system sees."""
        return sorted(self.now)

    def states(self) -> Iterator[dict[str, bytes]]:
        """Every folder that may be found after the power is back."""
        for kept in range(len(self.changes) + 1):
            names = dict(self.sure)
            for name, number in self.changes[:kept]:
                if number is None:
                    names.pop(name, None)
                else:
                    names[name] = number
            choices = [self.files[number].survivors() for number in names.values()]
            for left in product(*choices):
                yield {name: data for name, data in zip(names, left, strict=True) if data is not None}


def power_cuts(store_type: type[PrefixStore], *, puts: int) -> Tally:
    """A sequence of puts, two of each entry, that is cut before every call, and every folder that may be left."""
    tally = Tally(kind="power cut")
    work = [(*entry(number // 2, version=number % 2, size=40), number) for number in range(puts)]
    for steps in range(5 * puts + 1):
        disk = ForgetfulDisk(steps)
        store = store_type(Path("memory"), disk=disk)
        allowed: dict[bytes, tuple[bytes | None, ...]] = {key: (None,) for key, _, _ in work}
        try:
            for key, payload, _ in work:
                before = allowed[key]
                allowed[key] = (*before, payload)
                store.put(key, payload)
                allowed[key] = (payload,)
        except PowerCut:
            pass
        for left in disk.states():
            again = ForgetfulDisk(10**6)
            for name, data in left.items():
                again.write(Path(name), data, append=False)
            judge(tally, store_type(Path("memory"), disk=again), allowed)
    return tally


class Unchecked(PrefixStore):
    """A store that believes its files."""

    def get(self, key: bytes) -> bytes | None:
        """The bytes behind the head, whatever they are."""
        data = self.disk.read(self.path(key))
        return None if data is None else data[HEADER.size + 32 :]


class Unsynced(PrefixStore):
    """A store that never waits for the disk."""

    def put(self, key: bytes, payload: bytes) -> None:
        """Write and rename."""
        head = HEADER.pack(b"DTPREFIX", 1, len(payload), key)
        beside = self.folder / f"{key.hex()}.partial"
        self.disk.write(beside, head + hashlib.sha256(head + payload).digest() + payload, append=False)
        self.disk.rename(beside, self.path(key))


class InPlace(PrefixStore):
    """A store that writes over its entries."""

    def put(self, key: bytes, payload: bytes) -> None:
        """Write, then wait for the disk."""
        head = HEADER.pack(b"DTPREFIX", 1, len(payload), key)
        self.disk.write(self.path(key), head + hashlib.sha256(head + payload).digest(), append=False)
        self.disk.write(self.path(key), payload, append=True)
        self.disk.sync(self.path(key))
        self.disk.sync(self.folder)


def measure(*, rounds: int, size: int, puts: int) -> list[Tally]:
    """Every kind of crash on the store."""
    return [kills(PrefixStore, rounds=rounds), *breaks(PrefixStore, size=size), power_cuts(PrefixStore, puts=puts)]


def controls(*, rounds: int, size: int, puts: int) -> list[Tally]:
    """Stores that lack one thing; each of these tallies must show it as wrong or lost."""
    named = [
        ("unchecked, truncate", breaks(Unchecked, size=size)[0]),
        ("unchecked, byte", breaks(Unchecked, size=size)[1]),
        ("unsynced, power cut", power_cuts(Unsynced, puts=puts)),
        ("written in place, kill", kills(InPlace, rounds=rounds)),
        ("written in place, power cut", power_cuts(InPlace, puts=puts)),
    ]
    return [replace(tally, kind=f"control: {name}") for name, tally in named]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the store served wrong bytes or lost an entry, or a control went unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.prefix_crashes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", type=int, default=300)
    parser.add_argument("--puts", type=int, default=6)
    chosen = parser.parse_args(arguments)
    found = measure(rounds=chosen.rounds, size=chosen.size, puts=chosen.puts)
    # what is never synced survives in more ways than can be walked through
    noticed = controls(rounds=chosen.rounds, size=chosen.size, puts=min(chosen.puts, 3))
    for tally in [*found, *noticed]:
        sys.stdout.write(tally.line() + "\n")
    crashes, wrong, lost = (sum(getattr(tally, name) for tally in found) for name in ("crashes", "wrong", "lost"))
    sys.stdout.write(f"{crashes} crashes injected, {wrong} wrong answers, {lost} entries lost\n")
    return int(bool(wrong or lost) or not all(tally.wrong or tally.lost for tally in noticed))


if __name__ == "__main__":
    raise SystemExit(main())
