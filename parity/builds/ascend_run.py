"""Runs the linalg of the Ascend gate on the CPU, as the candidate `triton-ascend-cpu` of the cards.

What runs is the form that the compiler for the chip starts from, so a wrong translation of Triton IR is seen here, and
so is a launch config for the chip; what the compiler makes of it afterwards is not. From linalg the way is MLIR loops,
LLVM as triton carries it, and the C compiler. e4m3 codes are bytes on this way; other fp8 has no form.

Only for a process without TRITON_INTERPRET; `judge` starts such workers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..card import Candidate, Card, Op
from ..gate import Job, Runner, Settings, plan
from ..outcome import Outcome, Status
from ..pool import Worker
from ..report import FAILING
from .ascend import Refused, linalg, triton_ir
from .ascend_tools import Toolchain, cache_folder, find, pins
from .spec import Specialisation, capture

NAME = "triton-ascend-cpu"
E4M3 = "f8E4M3FN"
KERNELS = "deeptwin.kernels.triton_ops"
OPTIMIZED = "deeptwin.optimized."
COMPILED = "compiled"  # any device name but "cpu" starts a worker without the interpreter

LOOP_PASSES = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-index-to-llvm",
    "--reconcile-unrealized-casts",
)

# nothing frees what a program allocates, so all of it is freed behind the program; fresh memory is NaN
RUNTIME = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct block { struct block *before; char pad[56]; } block;
static block *last;

void *lowered_malloc(int64_t size) {
    block *fresh = aligned_alloc(64, (sizeof(block) + size + 63) / 64 * 64);
    if (!fresh) abort();
    memset(fresh + 1, 0xFF, size);
    fresh->before = last;
    last = fresh;
    return fresh + 1;
}

void lowered_release(void) {
    while (last) { block *before = last->before; free(last); last = before; }
}

// what LLVM calls for arithmetic in bf16; the 16 bits are returned at the bottom of a float register
static float bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = x != x ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    memcpy(&x, &bits, 4);
    return x;
}

float __truncsfbf2(float x) { return bf16_of(x); }

// to nearest, ties to even, saturating
uint8_t lowered_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint8_t sign = bits >> 24 & 0x80;
    float size = fabsf(x);
    if (x != x) return sign | 0x7F;
    if (size >= 464) return sign | 0x7E;
    if (size < 0x1p-6f) return sign | (uint8_t)rintf(size * 0x1p9f);
    bits &= 0x7FFFFFFF;
    return sign | (((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

typedef struct { int64_t rank; void *descriptor; } unranked;
typedef struct { char *allocated, *aligned; int64_t offset, sizes[]; } ranked;

static void copy(int64_t size, int64_t rank, const int64_t *sizes, const int64_t *from_strides,
                 const int64_t *to_strides, const char *from, char *to) {
    if (rank == 0) { memcpy(to, from, size); return; }
    if (rank == 1 && *from_strides == 1 && *to_strides == 1) { memcpy(to, from, size * *sizes); return; }
    for (int64_t i = 0; i < *sizes; i++)
        copy(size, rank - 1, sizes + 1, from_strides + 1, to_strides + 1, from + i * *from_strides * size,
             to + i * *to_strides * size);
}

void memrefCopy(int64_t size, unranked *source, unranked *target) {
    ranked *from = source->descriptor, *to = target->descriptor;
    int64_t rank = source->rank;
    copy(size, rank, from->sizes, from->sizes + rank, to->sizes + rank, from->aligned + from->offset * size,
         to->aligned + to->offset * size);
}
"""

SCALARS: dict[str, Any] = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
SAMPLE = 2  # cases of one operation that run by default: lowering one takes seconds
SPARE_BYTES = 1 << 16  # for the two buffers that only the chip uses


# one kernel


class Program:
    """A kernel as a function of this process: called once for every program of the grid."""

    def __init__(self, library: Path, name: str) -> None:
        loaded = ctypes.CDLL(str(library))
        self.function, self.release = getattr(loaded, name), loaded.lowered_release
        self.function.restype = self.release.restype = None
        self.spare = torch.zeros(SPARE_BYTES, dtype=torch.uint8)

    def __call__(self, grid: Sequence[int], types: Sequence[str], values: Sequence[Any]) -> None:
        """Run the programs of `grid` one after the other."""
        sizes = [*grid, 1, 1][:3]
        fixed = [*_memory(self.spare), *_memory(self.spare)]
        for kind, value in zip(types, values, strict=True):
            fixed += _memory(value) if kind.startswith("*") else [SCALARS[kind](value)]
        fixed += [ctypes.c_int32(size) for size in sizes]
        for z, y, x in itertools.product(*(range(size) for size in reversed(sizes))):
            self.function(*fixed, ctypes.c_int32(x), ctypes.c_int32(y), ctypes.c_int32(z))
            self.release()


def _memory(x: Tensor) -> list[Any]:
    """A rank-1 memref: allocated and aligned pointer, offset, size, stride."""
    pointer, size = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.numel())
    return [pointer, pointer, ctypes.c_int64(0), size, ctypes.c_int64(1)]


def program(spec: Specialisation, tools: Toolchain) -> Program:
    """The program of a specialisation, from the cache of this machine if it was built before.

    Raises:
        NotImplementedError: fp8.
        Refused: a step refused the kernel.
    """
    return _program(_Key(spec), tools)


class _Key:
    """A specialisation that can be a key: equal when everything that is compiled is equal."""

    def __init__(self, spec: Specialisation) -> None:
        self.spec, self.text = spec, repr(spec)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@functools.lru_cache(maxsize=256)
def _program(key: _Key, tools: Toolchain) -> Program:
    ttir = triton_ir(key.spec)
    if "f8E" in ttir.replace(E4M3, ""):
        raise NotImplementedError("kernel: it holds an fp8 that is not e4m3")
    import triton

    digest = hashlib.sha256("\0".join((ttir, RUNTIME, *LOOP_PASSES, pins(), triton.__version__)).encode()).hexdigest()
    library = cache_folder().with_name("lowered") / f"{digest[:32]}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
            os.replace(_shared_library(ttir, Path(scratch), tools), library)
    return Program(library, key.spec.kernel.rpartition(":")[2])


def _shared_library(ttir: str, folder: Path, tools: Toolchain) -> Path:
    source = folder / "kernel.ttir"
    source.write_text(ttir)
    try:
        tensors = linalg(source, tools)
    except Refused as error:
        if E4M3 in ttir and "tt.fp_to_fp" in str(error):
            raise NotImplementedError(f"kernel: it widens e4m3: {error}") from error
        raise
    tensors.write_text(for_cpu(tensors.read_text()))
    loops, assembly = folder / "kernel.llvm.mlir", folder / "kernel.s"
    _step("loops", [tools.optimizer, tensors, *LOOP_PASSES, "-o", loops])
    loops.write_text(loops.read_text().replace("@malloc(", "@lowered_malloc("))
    assembly.write_text(_assembly(loops))
    runtime, library = folder / "runtime.c", folder / "kernel.so"
    runtime.write_text(RUNTIME)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotImplementedError("cc: expected a C compiler (cc or gcc) to run the Ascend lowering on the CPU")
    _step("cc", [compiler, "-O2", "-shared", "-fPIC", "-o", library, runtime, assembly, "-lm"])
    return library


_NARROWING = re.compile(
    r"hfusion\.cast \{mode = #hfusion\.round_mode<rint>\} ins\((%\S+) : (tensor<\S+xf32>)\) "
    r"outs\((%\S+) : (tensor<\S+xf8E4M3FN>)\) -> \S+"
)


def for_cpu(program: str) -> str:
    """Linalg without hints to the chip's compiler, and with bytes for e4m3, which LLVM 19 does not have."""
    lines = [line for line in program.splitlines() if "annotation.mark" not in line]
    call = "%code = func.call @lowered_e4m3(%in) : (f32) -> i8 linalg.yield %code : i8"
    text = _NARROWING.sub(rf"linalg.map ins(\1 : \2) outs(\3 : \4) (%in: f32) {{ {call} }}", "\n".join(lines))
    if E4M3 in text:
        text = re.sub(rf"arith\.constant 0\.0+e\+00 : {E4M3}", "arith.constant 0 : i8", text).replace(E4M3, "i8")
        text = text.replace("module {", "module {\n  func.func private @lowered_e4m3(f32) -> i8", 1)
    return text


def _step(name: str, command: Sequence[Any]) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "rror" in line] or done.stderr.splitlines()[-1:]
        raise Refused(f"{name}: {lines[0][:400] if lines else f'status {done.returncode}'}")


def _assembly(loops: Path) -> str:
    """x86-64 assembly of LLVM-dialect IR, by the LLVM inside triton (private names: triton is pinned)."""
    from triton._C.libtriton import ir, llvm

    llvm.init_targets()
    context = ir.context()
    ir.load_dialects(context)
    module = llvm.to_module(ir.parse_mlir_module(str(loops), context), llvm.context())
    llvm.optimize_module(module, llvm.OPTIMIZE_O3)
    arguments: tuple[Any, ...] = (str(module), "x86_64-unknown-linux-gnu", "", "", [], False, False)
    try:
        text = llvm.translate_to_asm(*arguments, False)
    except TypeError:  # triton 3.6 takes one argument less
        text = llvm.translate_to_asm(*arguments)
    return "\n".join(line for line in text.splitlines() if ".prefalign" not in line)


# launches of a whole operation


def _arch_of(device: torch.device) -> str:
    return "ascend950"


@contextmanager
def lowered_launches(tools: Toolchain) -> Iterator[None]:
    """Every `kernel[grid](...)` on CPU tensors runs its Ascend lowering, with the launch configs of the chip."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        (spec,) = capture(lambda: original(self, *args, grid=grid, warmup=True, **kwargs), "ascend950")
        bound = self.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in self.signature.parameters})
        bound.apply_defaults()
        names = [name for name, kind in spec.signature.items() if kind != "constexpr"]
        types, values = [spec.signature[n] for n in names], [bound.arguments[n] for n in names]
        sizes = grid(bound.arguments) if callable(grid) else grid
        program(spec, tools)(sizes, types, values)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        kernels = importlib.import_module(KERNELS)
        stack.enter_context(mock.patch.object(kernels, "INTERPRETED", True))  # it may run on CPU tensors
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{KERNELS}.") and hasattr(module, "arch_of"):
                stack.enter_context(mock.patch.object(module, "arch_of", _arch_of))
        yield


def __getattr__(name: str) -> Callable[..., Any]:
    """`<component>__<function>`: that function of `optimized/`, with its kernels lowered."""
    component, separator, function = name.partition("__")
    if not separator or not component or not function:
        raise AttributeError(name)
    module = importlib.import_module(f"{OPTIMIZED}{component}")
    fast = getattr(module, function)

    @functools.wraps(fast)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        tools = find()
        if isinstance(tools, str):
            raise NotImplementedError(f"tools: {tools}")
        for loaded in _kernel_modules(module):
            importlib.import_module(loaded)
        with lowered_launches(tools):
            return fast(*args, **kwargs)

    lowered.__signature__ = inspect.signature(fast)  # type: ignore[attr-defined]
    return lowered


def _kernel_modules(module: Any) -> list[str]:
    """Kernel modules, which fast functions import in their bodies: they have to be there to be patched."""
    import pkgutil

    kernels = importlib.import_module(KERNELS)
    return [f"{KERNELS}.{m.name}" for m in pkgutil.iter_modules(kernels.__path__) if "interpreter" not in m.name]


# judging


class LoweredRunner(Runner):
    """The gate's runner with workers that do not interpret."""

    def worker(self) -> Worker:
        """The worker process of the current thread; requests still say `cpu`, which is where tensors lie."""
        if not hasattr(self._local, "worker"):
            self._local.worker = Worker(COMPILED, self.settings.timeout)
            with self._lock:
                self._workers.append(self._local.worker)
        return self._local.worker


def row(candidate: Candidate) -> Candidate | None:
    """The lowered row beside a row of the card, or None if that is no function of `optimized/` or for one chip only."""
    module, _, function = candidate.function.partition(":")
    if not module.startswith(OPTIMIZED) or not {"sm90", "sm100"} <= set(candidate.archs):
        return None
    return replace(
        candidate,
        name=NAME,
        function=f"{__name__}:{module.removeprefix(OPTIMIZED)}__{function}",
        archs=("ascend950",),
        declines=lambda case: candidate.declines(case) or candidate.lowered_declines(case),
        interpreter_declines=lambda case: None,
        required=False,
    )


def judge(
    cards: Sequence[Card],
    settings: Settings,
    *,
    report: Callable[[Outcome], None] = lambda outcome: None,
    tools: Toolchain | str | None = None,
    required: bool = True,
) -> list[Outcome]:
    """Cases of the cards on lowered kernels, by the rules (and relations, if set) of the cards.

    Of each operation's default cases that the kernels take, `SAMPLE` run, spread over all of them; under
    `settings.full` all run. What would be `passed` is `lowered`: no Ascend device was involved. Without tools there is
    one outcome for each operation, which did not run.
    """
    tools = find() if tools is None else tools
    work: list[Job] = []
    missing: list[Outcome] = []
    for card, op in [(one, op) for one in cards for op in one.ops]:
        rows = tuple(found for c in op.candidates if (found := row(c)) is not None)
        if rows and isinstance(tools, str):
            missing.append(_did_not_run(card, op, tools, required))
        elif rows:
            jobs = plan(card, op, full=False, rows=rows)
            work += jobs if settings.full else _sample(jobs)
    with LoweredRunner(settings, lambda outcome: report(_never_passed(outcome))) as runner:
        return missing + [_never_passed(outcome) for outcome in runner.run(work)]


def _sample(jobs: Sequence[Job]) -> list[Job]:
    """`SAMPLE` jobs that the rows take, evenly spread from the first on; the first job if they take none.

    The last ones are left out: cards end with production shapes, which take minutes in plain loops.
    """
    taken = [job for job in jobs if any(row.refusal(job.case, "cpu") is None for row in job.candidates)] or jobs[:1]
    return [taken[i * len(taken) // SAMPLE] for i in range(SAMPLE)] if len(taken) > SAMPLE else list(taken)


def per_operation(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """One outcome for each operation, beside its builds: how much was right, what was declined, what failed first."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.component, outcome.op), []).append(outcome)
    return [_summary(found) for found in groups.values()]


def _summary(found: list[Outcome]) -> Outcome:
    failed = [o for o in found if o.status in FAILING]
    right = [o for o in found if o.status in (Status.LOWERED, Status.KNOWN_FAILURE)]
    declined = [o for o in found if o.status is Status.UNSUPPORTED and not o.check.endswith(":rate")]
    used = [o.budget_used for o in right if o.budget_used is not None]
    counts = {"checks": len(right) + len(failed), "failed": len(failed), "declined": len(declined)}
    base = failed[0] if failed else right[0] if right else declined[0]
    message = f"{len(right)} checks right on the CPU"
    if declined:
        message += f", {len(declined)} cases declined: {declined[0].message}"
    if failed:
        message = f"{len(failed)} of {counts['checks']} checks failed, first {base.id}: {base.message}"
    return replace(
        base,
        case="on-the-cpu",
        check="ascend950-cpu",
        message=message if right or failed else base.message,
        budget_used=max(used, default=None) if not failed else base.budget_used,
        metrics={name: float(n) for name, n in counts.items()},
        seconds=sum(o.seconds for o in found),
    )


def _did_not_run(card: Card, op: Op, reason: str, required: bool) -> Outcome:
    return Outcome(
        component=card.component,
        op=op.name,
        candidate=NAME,
        case="all",
        check="outputs",
        status=Status.UNSUPPORTED,
        message=reason,
        command=_command(card.component),
        required=required,
    )


def _never_passed(outcome: Outcome) -> Outcome:
    command = _command(outcome.component)
    if outcome.status is not Status.PASSED:
        return replace(outcome, command=command)
    message = f"right on the CPU as lowered for the Ascend 950: {outcome.message}".removesuffix(": ")
    return replace(outcome, status=Status.LOWERED, message=message, command=command)


def _command(component: str) -> str:
    return f"deeptwin compile --arch ascend950 --component {component}"
