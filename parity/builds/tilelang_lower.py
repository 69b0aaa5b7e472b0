"""Lowers TileLang programs to source for a target, each in a process of its own.

The compiler aborts on some programs and speaks on stderr to others; either costs one verdict. What it warns about
counts as refused here: a buffer that is read before it is written lowers, and is wrong.

    python -m deeptwin.parity.builds.tilelang_lower LAUNCH KERNEL TARGET RESULT.json
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..candidates import load
from ..environment import installed
from ..house import worker_environment

TIME_LIMIT_S = 180.0
MESSAGE_LIMIT = 600
TARGETS: dict[str, dict[str, str]] = {
    "sm90": {"kind": "cuda", "arch": "sm_90a"},  # without the a there is neither wgmma nor tcgen05
    "sm100": {"kind": "cuda", "arch": "sm_100a"},
    "ascend950": {"kind": "ascend"},
}


class Refused(Exception):
    """The program was not accepted; the message names the cause."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix product of a program: tile [m, k] x [k, n] of `dtype` elements."""

    m: int
    n: int
    k: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """Source for the target, bytes of every memory that one program of the grid takes, and its products."""

    source: str
    memory: Mapping[str, int]
    products: tuple[Product, ...]
    seconds: float


def missing() -> str:
    """Why nothing can be lowered here, or ''."""
    return "" if installed("tilelang") else "tilelang is not installed: pip install tilelang==0.1.15"


def lower(launch: str, kernel: str, target: str, *, time_limit_s: float = TIME_LIMIT_S) -> Lowered:
    """Lower the program that the function `launch` returns, with the `PASS_CONFIGS` of the module of `kernel`.

    Raises:
        Refused: it was not accepted, not without a warning, or not in time.
        ValueError: `target` is unknown.
    """
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    with tempfile.TemporaryDirectory(prefix="deeptwin-tilelang-") as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, "-m", __name__, launch, kernel, target, str(result)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=time_limit_s,
                env=worker_environment("cuda"),
                cwd=scratch,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Refused(f"does not lower within {time_limit_s:g} s") from error
        log = done.stderr + done.stdout
        if not result.exists():
            raise Refused(f"the compiler ended with status {done.returncode}: {cause(log)}")
        record = json.loads(result.read_text())
    if "error" in record:
        raise Refused(f"does not lower: {cause(record['error'])}")
    if warned := warnings(log):
        raise Refused(f"lowers with a warning: {'; '.join(warned)}"[:MESSAGE_LIMIT])
    record["products"] = tuple(Product(**product) for product in record["products"])
    return Lowered(**record)


# what the compiler says

_TRACE = re.compile(r'^\s*(File "|\^+|~+|-->|\||raise |return )|^Traceback|__tb')
_TELLING = (
    r"Z3 (?:loop )?scheduling failed.*",
    r"unsupported expr.*",
    r"(?:\w*Error: )?Check failed: .*",
    r"^\w*Error: .*",
    r"\b(?:error|Error): .*",
)


def cause(log: str) -> str:
    """The line of a log that says why."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _TRACE.search(line)]
    for pattern in _TELLING:
        for line in lines:
            if found := re.search(pattern, line):
                return found[0][:MESSAGE_LIMIT]
    return lines[-1][:MESSAGE_LIMIT] if lines else "no message"


def warnings(log: str) -> list[str]:
    """The compiler's warnings, each with the buffers that it names."""
    found: list[str] = []
    for line in log.splitlines():
        if warning := re.search(r"\bWarning: (.*)", line):
            found.append(warning[1].strip())
        elif found and (named := re.match(r"\s+\[\d+\] (.*)", line)):
            found[-1] += f" ({named[1].strip()})"
    return found


# the process that lowers


def main(launch: str, kernel: str, target: str, result: str) -> None:
    """Lower one program and write the record; an exception of the compiler is a record too."""
    try:
        configs = getattr(sys.modules[load(kernel).__module__], "PASS_CONFIGS", {})
        record = _lowered(load(launch), configs, TARGETS[target])
    except Exception as error:
        record = {"error": f"{type(error).__name__}: {error}"}
    Path(result).write_text(json.dumps(record))


def _lowered(make: Callable[[], Any], configs: Mapping[str, Any], target: dict[str, str]) -> dict[str, Any]:
    import tvm
    from tilelang.engine.lower import lower as tilelang_lower
    from tvm.target import Target

    started = time.monotonic()
    chosen = Target(target)
    with chosen, tvm.transform.PassContext(opt_level=3, config=dict(configs)):
        program = make()
        products = _products(program)
        built = tilelang_lower(program, target=chosen)
    return {
        "source": built.kernel_source,
        "memory": _memory(built.device_mod),
        "products": products,
        "seconds": round(time.monotonic() - started, 2),
    }


def _products(program: Any) -> list[dict[str, Any]]:
    """Tiles of the products in the program as it was written: operands a, b, c, two flags, then m, n, k."""
    from tvm import tirx

    found = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Call) and re.search(r"tileop\.\w*gemm", str(getattr(node.op, "name", ""))):
            m, n, k = (int(size) for size in node.args[5:8])
            found.append({"m": m, "n": n, "k": k, "dtype": str(node.args[0].args[0].buffer.dtype)})

    tirx.stmt_functor.post_order_visit(program.body, visit)
    return found


def _memory(device_module: Any) -> dict[str, int]:
    """Bytes by memory; the largest of several kernels."""
    from tvm import DataType, tirx

    largest: dict[str, int] = {}
    for function in device_module.functions.values():
        taken: dict[str, int] = {}

        def visit(node: Any, taken: dict[str, int] = taken) -> None:
            if type(node).__name__ != "AllocBuffer" or not node.buffer.scope().startswith("shared"):
                return
            size = DataType(node.buffer.dtype).bits * DataType(node.buffer.dtype).lanes
            for extent in node.buffer.shape:
                size *= int(extent)
            scope = node.buffer.scope().removesuffix(".dyn")
            taken[scope] = taken.get(scope, 0) + (size + 7) // 8

        tirx.stmt_functor.post_order_visit(function.body, visit)
        largest |= {scope: max(size, largest.get(scope, 0)) for scope, size in taken.items()}
    return largest


if __name__ == "__main__":
    main(*sys.argv[1:])
