"""Lowers TileLang programs to AscendC for the Ascend 950, without a device and without its C++ compiler.

The compiler infers layouts, schedules the units of a core against each other, inserts their synchronisation and
places every buffer. `lowered` means: accepted without a warning, scheduled, and within every on-chip memory. It does
not mean that it ran, or that its C++ compiles.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

from ..card import Card, Op
from ..environment import installed
from ..outcome import Outcome, Status
from .spec import BuildCase, Expect
from .tilelang_lower import Lowered, lower, missing
from .tilelang_outcome import Measured, Row, judge, tile_faults

KEY = "ascend950-simd"  # vector code is written in SIMD; products run on the cube unit
CUBE = "cube"  # the name of the matrix unit in `Expect.mma`
# bytes of each memory: of a vector core, then of the cube core
MEMORIES = {
    "shared": ("ub_bytes", "unified buffer", 253952),
    "shared.l1": ("l1_bytes", "L1", 524288),
    "shared.l0a": ("l0a_bytes", "L0A", 65536),
    "shared.l0b": ("l0b_bytes", "L0B", 65536),
    "shared.l0c": ("l0c_bytes", "L0C", 262144),
}
_CALL = re.compile(r"\b(asc\w*|simd_inst::\w+)(?:<[^;()]*>)?\(")


def toolchain() -> dict[str, str]:
    """Versions that a build depends on."""
    return {"tilelang": installed("tilelang") or "absent"}


def build(card: Card, op: Op, case: BuildCase) -> list[Outcome]:
    """Lower the program that the case's launch returns; one outcome."""
    row = Row(card=card, op=op, case=case, arch="ascend950", check=KEY)
    if reason := missing():
        return [row.outcome(Status.UNSUPPORTED, reason)]
    expect = case.expect[KEY]
    return [judge(row, expect, Status.LOWERED, partial(_measure, case, expect))]


def _measure(case: BuildCase, expect: Expect) -> Measured:
    lowered = lower(case.launch, case.kernel, "ascend950")
    metrics = measure(lowered)
    return metrics, [*tile_faults(lowered.products, npu=True), *faults(lowered, metrics, expect)]


def measure(lowered: Lowered) -> dict[str, float]:
    """Bytes of every memory, and counts of products, vector instructions, copies and synchronisations."""
    called = Counter(_CALL.findall(lowered.source))
    return {
        **{name: lowered.memory.get(scope, 0) for scope, (name, _, _) in MEMORIES.items()},
        "mma": sum(n for name, n in called.items() if name in ("asc_mmad", "ascend_gemm_l1")),
        "vector_functions": len(re.findall(r"__simd_vf__ inline void", lowered.source)),
        "vector_instructions": sum(n for name, n in called.items() if name.startswith("simd_inst::")),
        "copies": sum(n for name, n in called.items() if name.startswith("asc_copy_")),
        "syncs": sum(n for name, n in called.items() if name.startswith("asc_sync_")),
    }


def faults(lowered: Lowered, metrics: dict[str, float], expect: Expect) -> list[str]:
    """What differs from the card or does not fit the chip."""
    found = []
    if expect.mma not in (None, CUBE):
        found.append(f"mma: expected {CUBE!r} or None for the Ascend 950, got {expect.mma!r}")
    elif expect.mma == CUBE and not metrics["mma"]:
        found.append("matrix product: expected one on the cube unit, found none")
    elif expect.mma is None and metrics["mma"]:
        found.append(f"matrix product: none declared, found {metrics['mma']:g} on the cube unit")
    for scope, size in lowered.memory.items():
        _, name, limit = MEMORIES.get(scope, ("", scope, 0))
        if size > limit:
            found.append(f"{name} overflow: {size} bytes of {limit}")
    return found
