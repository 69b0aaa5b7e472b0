"""Builds Triton kernels for SM90 and SM100 without a device: PTX, cubin, and what stands in them.

`compiled` means: assembled for the chip, on its matrix unit, within the limits of the card. It does not mean that it
ran. Belongs in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..candidates import is_path, load
from ..card import Card, Op
from ..environment import installed
from ..outcome import Outcome, Status
from . import machine_code
from .spec import CAPABILITY, BuildCase, Expect, Specialisation, ast_source, capture, verdict

# lines of a compiler's log that say why, from the telling to the general
_TELLING = (r"out of resource.*", r"ptxas (?:fatal|error).*", r"\berror: .*", r"LLVM ERROR.*", r"Assertion.*")
MESSAGE_LIMIT = 600


class Refused(Exception):
    """The compiler did not accept the kernel."""


def toolchain() -> dict[str, str]:
    """Versions that a build depends on."""
    return {"triton": installed("triton") or "absent"}


def build(card: Card, op: Op, case: BuildCase, arch: str) -> list[Outcome]:
    """Build every specialisation of the case's kernel that its launch asks for; one outcome."""
    started = time.monotonic()
    metrics: dict[str, float] = {}
    try:
        specs = specialisations(case, arch)
    except Exception as error:
        status, message = Status.ERROR, f"{case.launch}: {type(error).__name__}: {error}"
    else:
        status, message, metrics = judge(specs, case.expect[arch], arch)
    diagnosis = "" if status in (Status.COMPILED, Status.KNOWN_FAILURE) else message.partition(":")[0]
    return [
        Outcome(
            component=card.component,
            op=op.name,
            candidate=case.dsl,
            case=case.name,
            check=arch,
            status=status,
            message=message,
            diagnosis=diagnosis,
            metrics=metrics,
            seconds=time.monotonic() - started,
            command=f"deeptwin compile --arch {arch} --component {card.component}",
        )
    ]


def specialisations(case: BuildCase, arch: str) -> list[Specialisation]:
    """The distinct ways in which the launch of a case calls its kernel.

    Raises:
        LookupError: the launch never calls it.
    """
    calls = capture(load(case.launch), arch)
    mine = [call for call in calls if _is_kernel(case.kernel, call.kernel)]
    if not mine:
        called = ", ".join(dict.fromkeys(call.kernel for call in calls)) or "nothing"
        raise LookupError(f"does not launch {case.kernel}, it launches {called}")
    return [call for number, call in enumerate(mine) if call not in mine[:number]]


def _is_kernel(named: str, called: str) -> bool:
    if is_path(named):  # a file outside the house has no module name of its own
        return named.rpartition(":")[2] == called.rpartition(":")[2]
    return named == called


def judge(specs: list[Specialisation], expect: Expect, arch: str) -> tuple[Status, str, dict[str, float]]:
    """Build and compare with the card: status, message, and the largest of each number."""
    metrics: dict[str, float] = {}
    started = time.monotonic()
    try:
        for spec in specs:
            for name, value in compile_kernel(spec, arch).items():
                metrics[name] = max(value, metrics.get(name, value))
        failure = "; ".join(machine_code.faults(metrics, expect))
    except Refused as error:
        failure = str(error)
    except machine_code.Unreadable as error:
        return Status.ERROR, str(error), metrics
    metrics["seconds"] = round(time.monotonic() - started, 2)
    return *verdict(failure, expect, Status.COMPILED), metrics


def compile_kernel(spec: Specialisation, arch: str) -> dict[str, float]:
    """Numbers of one cubin.

    Raises:
        Refused: triton, LLVM or ptxas did not accept the kernel.
        Unreadable: the cubin could not be read.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = ast_source(spec)
    target = GPUTarget("cuda", CAPABILITY[arch], 32)
    with tempfile.TemporaryDirectory(prefix="deeptwin-triton-") as cache, _environment(TRITON_CACHE_DIR=cache):
        log: list[str] = []
        try:
            with _stderr_to(log):
                built: Any = triton.compile(source, target=target, options=options)
        except Exception as error:
            raise Refused(f"does not compile: {cause(error, ''.join(log))}") from error
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    measured = machine_code.measure(machine_code.dump(built.asm["cubin"], tools / "cuobjdump"), built.asm["ptx"])
    return {
        "registers": measured.pop("registers"),
        "stack": measured.pop("stack"),
        "shared": built.metadata.shared,
        "tmem": getattr(built.metadata, "tmem_size", None) or 0,
        **measured,
    }


def cause(error: Exception, log: str) -> str:
    """The line of an exception or of the compilers' log that says why."""
    lines = [line.strip() for line in f"{error}\n{log}".splitlines() if line.strip()]
    for pattern in _TELLING:
        for line in lines:
            found = re.search(pattern, line, re.IGNORECASE)
            if found:
                return f"{type(error).__name__}: {found[0]}"[:MESSAGE_LIMIT]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:MESSAGE_LIMIT]


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _stderr_to(log: list[str]) -> Iterator[None]:
    """Append what compilers write to file descriptor 2 to `log`: their exceptions do not carry it."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            log.append(file.read().decode(errors="replace"))
