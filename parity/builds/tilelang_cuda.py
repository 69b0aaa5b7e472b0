"""Builds TileLang programs for SM90 and SM100 without a device: CUDA source, cubin, and what stands in them.

A product into registers lowers for SM100 too, as mma.sync and without a word, at a fraction of the speed. So the
matrix unit is read off the machine code, never off the source.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ..card import Card, Op
from ..environment import installed
from ..outcome import Outcome, Status
from . import machine_code
from .spec import BuildCase, Expect
from .tilelang_lower import MESSAGE_LIMIT, TARGETS, Lowered, Refused, lower, missing
from .tilelang_outcome import Measured, Row, judge, tile_faults

ASSEMBLE_LIMIT_S = 110.0
NVCC_OPTIONS = ("-cubin", "-O3", "-std=c++20", "-DENABLE_BF16", "-DENABLE_FP8")
_ROLE = re.compile(r"if \(\(\(int\)threadIdx\.x\) < (?:128|256|384)\)")
_NAMED_BARRIER = re.compile(r"__sync_thread_partial\((\d+),")
_TELLING = (r"ptxas (?:fatal|error).*", r"\berror\s*:.*", r"static assertion failed.*")


def toolchain() -> dict[str, str]:
    """Versions that a build depends on."""
    nvcc = find_nvcc()
    return {"tilelang": installed("tilelang") or "absent", "nvcc": _version(nvcc) if nvcc else "absent"}


def build(card: Card, op: Op, case: BuildCase, arch: str) -> list[Outcome]:
    """Build the program that the case's launch returns; one outcome."""
    row = Row(card=card, op=op, case=case, arch=arch, check=arch)
    if reason := unsupported():
        return [row.outcome(Status.UNSUPPORTED, reason)]
    expect = case.expect[arch]
    return [judge(row, expect, Status.COMPILED, partial(_measure, case, expect, arch))]


def unsupported() -> str:
    """Why nothing can be built here, or ''."""
    if reason := missing():
        return reason
    if find_nvcc() is None:
        return "nvcc was not found: pip install 'deeptwin[tilelang]', or install CUDA 13"
    return "" if _cuobjdump() else "cuobjdump was not found: it comes with triton"


def find_nvcc() -> Path | None:
    """The compiler of the wheels that the extra `tilelang` pins, or else one on PATH or of a CUDA installation."""
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    installed_there = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    places = [wheels, *([Path(on_path)] if on_path else []), installed_there]
    return next((place for place in places if place.is_file()), None)


def _measure(case: BuildCase, expect: Expect, arch: str) -> Measured:
    lowered = lower(case.launch, case.kernel, arch)
    try:
        metrics = measure(lowered, assemble(lowered.source, arch))
    except machine_code.Unreadable as error:
        raise Refused(str(error)) from error
    found = [*tile_faults(lowered.products, npu=False), *machine_code.faults(metrics, expect)]
    return metrics, [*found, *barrier_faults(lowered.source)]


def assemble(source: str, arch: str) -> bytes:
    """The cubin of a CUDA source that TileLang wrote.

    Raises:
        Refused: nvcc or ptxas did not accept it.
    """
    package = _package("tilelang") or Path()
    includes = [f"-I{package / folder}" for folder in ("src", "3rdparty/cutlass/include")]
    with tempfile.TemporaryDirectory(prefix="deeptwin-nvcc-") as scratch:
        text, cubin = Path(scratch) / "kernel.cu", Path(scratch) / "kernel.cubin"
        text.write_text(source)
        command = [find_nvcc(), *NVCC_OPTIONS, f"-arch={TARGETS[arch]['arch']}", *includes, text, "-o", cubin]
        try:
            done = subprocess.run(
                [str(word) for word in command],
                capture_output=True,
                text=True,
                timeout=ASSEMBLE_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Refused(f"does not assemble within {ASSEMBLE_LIMIT_S:g} s") from error
        if done.returncode:
            raise Refused(f"does not assemble: {_cause(done.stderr + done.stdout)}")
        return cubin.read_bytes()


def measure(lowered: Lowered, cubin: bytes) -> dict[str, float]:
    """Numbers of a cubin; shared memory of the launch and tensor memory come from the lowering.

    Raises:
        Unreadable: the cubin could not be read.
    """
    measured = machine_code.measure(machine_code.dump(cubin, _cuobjdump() or Path("cuobjdump")))
    columns = [int(n) for n in re.findall(r"tmem_allocate\([^;]*, (\d+)\)", lowered.source)]
    return {
        "registers": measured.pop("registers"),
        "stack": measured.pop("stack"),
        "shared": sum(size for scope, size in lowered.memory.items() if scope.startswith("shared")),
        "tmem": sum(columns),
        **measured,
        "block_scale": lowered.source.count("tcgen05mma_blockscaled"),
    }


def barrier_faults(source: str) -> list[str]:
    """Named barriers that two roles of a program share, where threads of one release, or wait for, the other's.

    TileLang numbers the barriers of each role, but those behind a wait for copies (`T.ptx_wait_group`) anew.
    """
    roles: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    branches: list[tuple[int, int]] = []  # indent and line of the open branches over groups of threads
    for number, line in enumerate(source.splitlines()):
        indent = len(line) - len(line.lstrip())
        other = line.lstrip().startswith("} else") and any(at == indent for at, _ in branches)
        if line.lstrip().startswith("}"):
            branches = [(at, begin) for at, begin in branches if at < indent]
        if other or _ROLE.search(line):
            branches.append((indent, number))
        if found := _NAMED_BARRIER.search(line):
            roles[found[1]].add(tuple(begin for _, begin in branches))
    return [f"named barrier {name} is shared by {len(users)} roles" for name, users in roles.items() if len(users) > 1]


def _cause(log: str) -> str:
    for pattern in _TELLING:
        if found := re.search(pattern, log):
            return found[0].strip()[:MESSAGE_LIMIT]
    return (log.strip().splitlines() or ["no message"])[-1][:MESSAGE_LIMIT]


def _version(nvcc: Path) -> str:
    done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    return found[1] if found else "unknown"


def _package(name: str) -> Path | None:
    """The folder of a package, without importing it."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _cuobjdump() -> Path | None:
    triton = _package("triton")
    tool = triton / "backends" / "nvidia" / "bin" / "cuobjdump" if triton else None
    return tool if tool and tool.is_file() else None
