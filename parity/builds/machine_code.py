"""What a cubin for SM90 or SM100 is made of, and whether that is what the card declares."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from .spec import Expect

# SASS names of matrix products, by the unit that runs them
FAMILIES = {
    "wgmma": r"[HQIB]GMMA",
    "tcgen05": r"UTC\w*MMA",
    "mma.sync": r"[HQIDBO]MMA",
}
# the same units on narrow operands: a kernel that widens its fp8 first uses the unit, but not these
NARROW = {"wgmma.fp8": r"QGMMA", "tcgen05.fp8": r"UTCQMMA", "tcgen05.fp4": r"UTCOMMA"}
SPELLINGS = {
    **{"wgmma": "HGMMA", "tcgen05": "UTC*MMA", "block_scale": "UTC*MMA with block scales", "mma.sync": "HMMA"},
    **NARROW,
}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


class Unreadable(Exception):
    """The tools could not read a cubin."""


def dump(cubin: bytes, cuobjdump: Path) -> str:
    """Resource usage and SASS of a cubin.

    Raises:
        Unreadable: cuobjdump failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "-res-usage", "-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unreadable(f"cuobjdump ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def measure(dumped: str, ptx: str = "") -> dict[str, float]:
    """Registers and stack of a thread, and counts of instructions; the largest function of several counts.

    Raises:
        Unreadable: there is no resource line.
    """
    found = [tuple(map(int, row)) for row in _RESOURCES.findall(dumped)]
    if not found:
        raise Unreadable("cuobjdump gave no resource usage")
    counts = Counter(_INSTRUCTION.findall(dumped))
    products = {name: _matching(counts, pattern) for name, pattern in {**FAMILIES, **NARROW}.items()}
    return {
        "registers": max(row[0] for row in found),
        "stack": max(row[1] for row in found),
        **products,
        "block_scale": len(re.findall(r"tcgen05\.mma\S*block_scale", ptx)),
        "async_copies": _matching(counts, r"LDGSTS|UTMALDG|UBLKCP|UTMASTG"),
        "local_memory": _matching(counts, r"LDL|STL"),
        "instructions": counts.total(),
    }


def _matching(counts: Mapping[str, int], pattern: str) -> int:
    return sum(n for name, n in counts.items() if re.fullmatch(pattern, name))


def faults(measured: Mapping[str, float], expect: Expect) -> list[str]:
    """What differs from the card: the matrix unit first, then each limit that is passed."""
    found = _product_faults(measured, expect.mma)
    if measured["stack"] > expect.max_stack:
        found.append(
            f"spill: {measured['stack']:g} bytes of stack a thread ({measured['local_memory']:g} loads and stores of "
            f"local memory), at most {expect.max_stack} declared"
        )
    for name, limit, unit in (
        ("registers", expect.max_registers, "a thread"),
        ("shared", expect.max_shared, "bytes of shared memory"),
        ("tmem", expect.max_tmem, "columns of tensor memory"),
    ):
        if measured.get(name, 0) > limit:
            found.append(f"{name}: {measured[name]:g} {unit}, at most {limit} declared")
    return found


def _product_faults(measured: Mapping[str, float], mma: str | None) -> list[str]:
    present = {name: int(measured[name]) for name in FAMILIES if measured[name]}
    text = ", ".join(f"{n} {name} ({SPELLINGS[name]})" for name, n in present.items()) or "none"
    if mma is None:
        return [f"matrix product: none declared, found {text}"] if present else []
    if mma not in SPELLINGS:
        return [f"matrix product: expected one of {', '.join(SPELLINGS)}, got {mma!r}"]
    found = []
    if not measured[mma]:
        found.append(f"matrix product: expected {mma} ({SPELLINGS[mma]} in SASS), found {text}")
    if mma != "mma.sync" and measured["mma.sync"]:
        found.append(f"silent fall-back: {int(measured['mma.sync'])} mma.sync instructions where {mma} is declared")
    return found
