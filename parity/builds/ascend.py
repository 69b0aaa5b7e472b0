"""Lowers Triton kernels to HIVM for the Ascend 950, without a device and without its machine-code step.

Triton's own front end makes Triton IR. From there two paths lead to the chip: `simd` turns it into linalg and gives it
to the cube and vector cores, `simt` keeps the thread model and uses the vector cores alone. The compiler verifies the
program, plans every on-chip buffer and refuses one that does not fit, so `lowered` means: accepted, placed and
scheduled for Ascend950PR_9589. It does not mean that it ran, or that machine code exists.

Belongs in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..card import Card, Op
from ..environment import installed
from ..outcome import Outcome, Status
from .ascend_tools import WHEELS, Toolchain, find, pins
from .nvidia import specialisations
from .spec import BuildCase, Expect, Specialisation, ast_source, verdict

TARGET = "Ascend950PR_9589"
PATHS = ("simd", "simt")
CUBE = "cube"  # the name of the matrix unit in `Expect.mma`
TIME_LIMIT_S = 240.0

# `compile-on-910-95` is the adapter's name for the 950; its own driver passes these
ADAPTER_PASSES = (
    "--discrete-mask-access-conversion=compile-on-910-95=True force-simt-template=False",
    "--triton-to-annotation",
    "--triton-to-unstructure=compile-on-910-95=True force-simt-template=False",
    "--triton-to-hivm",
    "--triton-to-hfusion",
    "--triton-to-llvm",
    "--bubble-up-operation",
    "--triton-to-linalg=global-kernel=false named-ops=True enable-nd2nz-on-vector=False enable-select-analysis=True "
    "compile-on-910-95=True",
)
SIMD_OPTIONS = (
    f"--target={TARGET}",
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
)
SIMT_OPTIONS = (f"--target={TARGET}", "--enable-triton-ir-compile", "--pure-simt", "--threads-per-warp=32")


class Refused(Exception):
    """A step of the chain did not accept the kernel; the message names the step and the cause."""


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """What one path made of a kernel: the program for the chip and what it takes."""

    program: str
    metrics: Mapping[str, float] = field(default_factory=dict)


def toolchain() -> dict[str, str]:
    """Versions that a build depends on."""
    pinned = {wheel.distribution: wheel.version for wheel in WHEELS}
    return {"triton": installed("triton") or "absent", **pinned, "ascend-tools": pins()}


# steps


def triton_ir(spec: Specialisation) -> str:
    """Triton IR of a specialisation, as triton makes it for any target, without source locations.

    Raises:
        Refused: triton's front end refused the kernel.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    source, options = ast_source(spec)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    try:
        codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
        module = source.make_ir(target, parsed, codegen, modules, context)
        backend.add_stages(stages, parsed, source.language)
        return stages["ttir"](module, {}).str_nodebug()
    except Exception as error:
        raise Refused(f"triton: {type(error).__name__}: {_last_line(error)}") from error


def linalg(ttir: Path, tools: Toolchain) -> Path:
    """Linalg on tensors, the form that both the SIMD path and the CPU start from.

    Raises:
        Refused: the adapter has no form for an operation, or has lost one.
    """
    result = ttir.with_suffix(".linalg")
    try:
        _run("adapter", [tools.adapter, ttir, *ADAPTER_PASSES, "-o", result], tools)
    except Refused as error:
        if _SCALAR_QUOTIENT.search(ttir.read_text()):
            raise Refused(f"adapter: tl.div_rn of scalars has no form there, of a tensor it has ({error})") from error
        raise
    text = result.read_text()
    left = sorted(set(re.findall(r"\btt\.\w+(?= %)", text)))
    if left:
        raise Refused(f"adapter: leaves {', '.join(left)} as it is, which the compiler does not know")
    lost = unwritten_buffers(text)
    if lost:
        raise Refused(f"adapter: {lost} loads are lost: their buffers are read, but nothing is ever written to them")
    return result


def lower_simd(ttir: Path, tools: Toolchain, num_warps: int) -> Lowered:
    """HIVM for the cube and vector cores.

    Raises:
        Refused: a step refused it, or a buffer does not fit.
    """
    folder = ttir.with_suffix(".simd")
    source = linalg(ttir, tools)
    options = [*SIMD_OPTIONS, f"--save-temps={folder}", "-o", ttir.with_suffix(".simd.o")]
    _run("simd", [tools.compiler, source, *options], tools)
    program = (folder / "module.hivm.opt.mlir").read_text()
    return Lowered(program=program, metrics=simd_metrics(program))


def lower_simt(ttir: Path, tools: Toolchain, num_warps: int) -> Lowered:
    """Threads on the vector cores; there is no matrix unit on this path.

    Raises:
        Refused: a step refused it, or a buffer does not fit.
    """
    result = ttir.with_suffix(".simt.o")
    _run("simt", [tools.compiler, ttir, *SIMT_OPTIONS, f"--num-warps={num_warps}", "-o", result], tools)
    program = result.read_text()  # the stand-in for the machine-code step hands its input through
    return Lowered(program=program, metrics=simt_metrics(program))


LOWER = {"simd": lower_simd, "simt": lower_simt}


def _run(step: str, command: Sequence[Any], tools: Toolchain) -> None:
    try:
        done = _called(command, tools)
        if done.returncode == -signal.SIGSEGV:  # seen once in some 60 calls with the same input: a crash of the tool
            done = _called(command, tools)
    except subprocess.TimeoutExpired as error:
        raise Refused(f"{step}: no result within {TIME_LIMIT_S:g} s") from error
    if done.returncode:
        raise Refused(f"{step}: {cause(done.stderr + done.stdout, done.returncode)}")


def _called(command: Sequence[Any], tools: Toolchain) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIME_LIMIT_S,
        env=tools.environment,
        check=False,
    )


# what a log and a program say

_GENERIC = re.compile(r"Failed to run|PLEASE submit|PassRun|Stack dump")
_PLACE = re.compile(r'(loc\((?:fused\[)?"[^)]*\)|/\S+?:\d+:\d+): ')
_SCALAR_QUOTIENT = re.compile(r"(?m)tt\.precise_divf .* : f\d+$")
_FOLDER = re.compile(r"/\S+/(?=\w+\.(?:cpp|h)\b)")
# from the telling to the general; a full buffer is what a developer can act on
_TELLING = (
    r"overflow, requires[^!\n]*",
    r"Assertion.*",
    r"LLVM ERROR.*",
    r"unsupported datatype.*",
    r"UNREACHABLE.*",
    r"error: .*",
)


def cause(log: str, status: int) -> str:
    """The line of a log that says why; buffer sizes are given in bytes as well."""
    lines = [line for line in log.splitlines() if not _GENERIC.search(line)]
    for pattern in _TELLING:
        for line in lines:
            if re.search(pattern, line):
                return _in_bytes(_FOLDER.sub("", _PLACE.sub("", line)).strip())[:400]
    return f"ended with status {status} and no message"


def _in_bytes(line: str) -> str:
    return re.sub(r"(\d+) bits", lambda found: f"{found[0]} ({int(found[1]) // 8} bytes)", line)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else ""


def unwritten_buffers(program: str) -> int:
    """Buffers of a linalg program that become a tensor and have no other use.

    The adapter makes such a program, without a word, of loads with a stride above one within rows that lie apart.
    """
    lost = 0
    for function in re.split(r"(?m)^  func\.func ", program):
        uses = Counter(re.findall(r"%[\w#-]+", function))
        made = re.findall(r"(%[\w-]+) = memref\.alloc\(", function)
        read = set(re.findall(r"bufferization\.to_tensor (%[\w-]+)", function))
        lost += sum(name in read and uses[name] == 2 for name in made)
    return lost


_SPACES = {"ub": "ub_bytes", "cbuf": "l1_bytes", "cc": "l0c_bytes"}
_CONSTANT = re.compile(r"(%[\w-]+) = llvm\.mlir\.constant\((\d+) : i64\)")
_BUFFER = re.compile(r"pointer_cast\(([^)]*)\)[^:]*: memref<([^,>]+),.*?address_space<(\w+)>")
_BITS = re.compile(r"(\d+)(?:E\w+)?$")


def simd_metrics(program: str) -> dict[str, float]:
    """Highest used byte of every on-chip memory, matrix products, copies and synchronisations."""
    called = Counter(re.findall(r"call @(\w+)\(", program))
    used = dict.fromkeys(_SPACES.values(), 0)
    for function in re.split(r"(?m)^  func\.func ", program):
        offsets = {name: int(value) for name, value in _CONSTANT.findall(function)}
        for operands, shape, space in _BUFFER.findall(function):
            if space in _SPACES:
                starts = [offsets.get(name.strip(), 0) for name in operands.split(",")]
                used[_SPACES[space]] = max(used[_SPACES[space]], max(starts) + _bytes(shape))
    return {
        **used,
        "mma": sum(n for name, n in called.items() if name.startswith("mma_tile")),
        "copies": sum(n for name, n in called.items() if re.match(r"(load|store|copy|nd2nz|fixpipe)_", name)),
        "vector_functions": sum(n for name, n in called.items() if "_outlined_vf_" in name),
        "syncs": len(re.findall(r"hivm\.hir\.(?:set_flag|sync_block_set|pipe_barrier)\b", program)),
    }


def _bytes(shape: str) -> int:
    *sizes, dtype = shape.split("x")
    if not all(size.isdigit() for size in sizes):
        return 0
    bits = _BITS.search(dtype.partition("E")[0])
    total = int(bits[1]) if bits else 8
    for size in sizes:
        total *= int(size)
    return total // 8


def simt_metrics(program: str) -> dict[str, float]:
    """Unified buffer, loads, stores, shuffles and barriers of the thread program."""
    shared = re.search(r"ttg\.shared = (\d+)", program)
    return {
        "ub_bytes": int(shared[1]) if shared else 0,
        "mma": 0,
        "loads": program.count("llvm.load "),
        "stores": program.count("llvm.store "),
        "shuffles": program.count(".shfl."),
        "barriers": program.count("hivm_regbaseintrins.sync_threads"),
        "instructions": len(re.findall(r"(?m)^ +(?:%[\w:]+ = )?llvm\.", program)),
    }


# verdicts


def build(
    card: Card, op: Op, case: BuildCase, *, tools: Toolchain | str | None = None, required: bool = True
) -> list[Outcome]:
    """One outcome for each path that the case declares. `tools` may be the reason why there are none."""
    tools = find() if tools is None else tools
    outcomes = []
    for path in PATHS:
        expect = case.expect.get(f"ascend950-{path}")
        if expect is None:
            continue
        started = time.monotonic()
        metrics: dict[str, float] = {}
        if isinstance(tools, str):
            status, message = Status.UNSUPPORTED, tools
        else:
            status, message, metrics = judge(case, path, expect, tools)
        ran = status in (Status.LOWERED, Status.KNOWN_FAILURE, Status.UNSUPPORTED)
        outcomes.append(
            Outcome(
                component=card.component,
                op=op.name,
                candidate=case.dsl,
                case=case.name,
                check=f"ascend950-{path}",
                status=status,
                message=message,
                diagnosis="" if ran else message.partition(":")[0],
                metrics=metrics,
                seconds=time.monotonic() - started,
                required=required,
                command=f"deeptwin compile --arch ascend950 --component {card.component}",
            )
        )
    return outcomes


def judge(case: BuildCase, path: str, expect: Expect, tools: Toolchain) -> tuple[Status, str, dict[str, float]]:
    """Lower what the launch of a case asks for and compare with the card: status, message, largest of each number."""
    metrics: dict[str, float] = {}
    started = time.monotonic()
    try:
        specs = specialisations(case, "ascend950")
    except Exception as error:
        return Status.ERROR, f"{case.launch}: {type(error).__name__}: {error}", metrics
    try:
        for spec in specs:
            for name, value in lower(spec, path, tools).metrics.items():
                metrics[name] = max(value, metrics.get(name, value))
        failure = _fault(expect, metrics["mma"])
    except Refused as error:
        failure = str(error)
    metrics["seconds"] = round(time.monotonic() - started, 2)
    return *verdict(failure, expect, Status.LOWERED), metrics


def _fault(expect: Expect, products: float) -> str:
    if expect.mma not in (None, CUBE):
        return f"card: for the Ascend 950 mma is {CUBE!r} or None, got {expect.mma!r}"
    if expect.mma == CUBE and not products:
        return "matrix product: declared on the cube unit, but the program has none there"
    if expect.mma is None and products:
        return f"matrix product: the card declares none, the program has {products:g} on the cube unit"
    return ""


def lower(spec: Specialisation, path: str, tools: Toolchain) -> Lowered:
    """Lower one specialisation along one path.

    Raises:
        Refused: a step refused it.
    """
    with tempfile.TemporaryDirectory(prefix="deeptwin-ascend-") as scratch:
        ttir = Path(scratch) / "kernel.ttir"
        ttir.write_text(triton_ir(spec))
        return LOWER[path](ttir, tools, spec.num_warps)
