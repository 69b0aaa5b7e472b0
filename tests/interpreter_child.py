"""Measurements of the repaired interpreter, written as one JSON object; test_interpreter.py runs this in a process.

The environment variable must be set before triton is imported, which the process that runs pytest cannot promise.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from deeptwin.kernels.triton_ops import interpreter, interpreter_probe

NARROW = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"bf16": None, "e4m3": 448.0, "e5m2": 57344.0}
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
BLOCK = 65536


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def round_to_zero_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, compare_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + BLOCK + i, x - y)
    tl.store(out_ptr + 2 * BLOCK + i, x * y)
    tl.store(out_ptr + 3 * BLOCK + i, -x)
    tl.store(out_ptr + 4 * BLOCK + i, tl.abs(x))
    tl.store(out_ptr + 5 * BLOCK + i, tl.where(x > y, x, y))
    tl.store(compare_ptr + i, (x < y).to(tl.int32))
    tl.store(compare_ptr + BLOCK + i, (x >= y).to(tl.int32))
    tl.store(compare_ptr + 2 * BLOCK + i, (x == y).to(tl.int32))
    tl.store(compare_ptr + 3 * BLOCK + i, (x != y).to(tl.int32))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)))


@triton.jit
def constant_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    masked = tl.load(x_ptr + i, mask=i < BLOCK // 2, other=-2.0)
    tl.store(y_ptr + i, masked * 0.5 + tl.full((BLOCK,), 3.0, dtype))


@triton.jit
def reduce_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr, WHAT: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    if WHAT == "sum":
        tl.store(y_ptr, tl.sum(x, 0).to(tl.float32))
    elif WHAT == "sum of fp32":
        tl.store(y_ptr, tl.sum(x.to(tl.float32), 0))
    else:
        tl.store(y_ptr + tl.arange(0, BLOCK), tl.associative_scan(x, 0, added).to(tl.float32))


@triton.jit
def added(x, y):
    return x + y


def different(x: torch.Tensor, y: torch.Tensor) -> int:
    """How many elements differ in their bits; NaNs count as equal."""
    both_nan = x.to(torch.float32).isnan() & y.to(torch.float32).isnan()
    integer = INTEGER[x.element_size()]
    return int((~both_nan & (x.view(integer) != y.view(integer))).sum())


def every_bf16() -> torch.Tensor:
    return torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)


def dense_f32() -> torch.Tensor:
    """Every upper half of an fp32 number with low halves below, at and above the rounding point."""
    upper = torch.arange(-32768, 32768, dtype=torch.int32) << 16
    return torch.cat([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)


def launched(kernel: object, x: torch.Tensor, dtype: torch.dtype, block: int = BLOCK) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    kernel[(x.numel() // block,)](x, y, block)
    return y


def casts_from_f32() -> dict[str, list[int]]:
    x = dense_f32()
    counts = {}
    for name, dtype in {**NARROW, "f16": torch.float16}.items():
        largest = LARGEST.get(name)
        expected = (x if largest is None else x.clamp(-largest, largest)).to(dtype)
        counts[name] = [different(launched(copy_kernel, x, dtype), expected), x.numel()]
    return counts


def casts_to_f32() -> dict[str, list[int]]:
    counts = {}
    for name, dtype in NARROW.items():
        x = every_bf16() if name == "bf16" else torch.arange(256).to(torch.uint8).view(dtype)
        y = launched(copy_kernel, x, torch.float32, x.numel())
        counts[name] = [different(y, x.to(torch.float32)), x.numel()]
    return counts


def bf16_round_trip() -> int:
    x = every_bf16()
    return different(launched(copy_kernel, launched(copy_kernel, x, torch.float32), torch.bfloat16), x)


def round_to_zero() -> int:
    x = dense_f32()
    expected = (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return different(launched(round_to_zero_kernel, x, torch.bfloat16)[~x.isnan()], expected[~x.isnan()])


def arithmetic() -> dict[str, list[int]]:
    rng = np.random.Generator(np.random.Philox(7))
    counts = {}
    for name, dtype in NARROW.items():
        codes = every_bf16() if name == "bf16" else torch.arange(BLOCK).to(torch.uint8).view(dtype)
        x, y = codes, codes[torch.from_numpy(rng.permutation(BLOCK))]
        out, compare = torch.empty(6, BLOCK, dtype=dtype), torch.empty(4, BLOCK, dtype=torch.int32)
        arithmetic_kernel[(1,)](x, y, out, compare, BLOCK)
        a, b = x.to(torch.float32), y.to(torch.float32)
        largest = LARGEST[name]
        wide = torch.stack([a + b, a - b, a * b, -a, a.abs(), torch.where(a > b, a, b)])
        expected = (wide if largest is None else wide.clamp(-largest, largest)).to(dtype)
        # a bit-wise negation and a selection keep an infinity that a saturating result would lose
        judged = wide.isfinite()
        judged[3] &= a != 0  # triton 3.6 negates by subtracting from zero, which loses the sign of -0
        compared = torch.stack([a < b, a >= b, a == b, a != b]).to(torch.int32)
        counts[name] = [different(out[judged], expected[judged]), int((compare != compared).sum())]
    return counts


def dots() -> dict[str, int]:
    rng = np.random.Generator(np.random.Philox(11))
    counts = {}
    for name, dtype in {**NARROW, "f16": torch.float16, "f32": torch.float32}.items():
        a, b = (torch.from_numpy(rng.standard_normal((64, 64))).to(torch.float32).to(dtype) for _ in range(2))
        c = torch.empty(64, 64)
        dot_kernel[(1,)](a, b, c, 64, 64, 64)
        expected = torch.einsum("ik,kj->ij", a.to(torch.float64), b.to(torch.float64)).to(torch.float32)
        counts[name] = different(c, expected)
    return counts


def equal_rows() -> dict[str, int]:
    """Shapes in which equal rows of one tile do not give equal bits."""
    rng = np.random.Generator(np.random.Philox(13))
    counts = {}
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        counts[name] = 0
        for m, n, k in itertools.product((16, 32, 64), (16, 32, 64), (16, 64, 128)):
            row = torch.from_numpy(rng.standard_normal((1, k))).to(torch.float32).to(dtype)
            b = torch.from_numpy(rng.standard_normal((k, n))).to(torch.float32).to(dtype)
            c = torch.empty(m, n)
            dot_kernel[(1,)](row.expand(m, k).contiguous(), b, c, m, n, k)
            counts[name] += different(c, c[:1].expand(m, n).contiguous()) > 0
    return counts


def fused_multiply_add() -> dict[str, int]:
    rng = np.random.Generator(np.random.Philox(17))
    counts = {}
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        x, y, z = (torch.from_numpy(rng.standard_normal(4096)).to(torch.float32).to(dtype) for _ in range(3))
        out = torch.empty(4096, dtype=dtype)
        fma_kernel[(1,)](x, y, z, out, 4096)
        exact = x.to(torch.float64) * y.to(torch.float64) + z.to(torch.float64)
        counts[name] = different(out, exact.to(torch.float32).to(dtype))
    return counts


def integer_casts() -> dict[str, int]:
    whole = torch.arange(-BLOCK // 2, BLOCK // 2) * 517
    counts = {}
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        x = whole.to(dtype)
        counts[str(dtype)] = different(launched(copy_kernel, x, torch.bfloat16), x.to(torch.bfloat16))
    values = every_bf16()
    values = torch.where(values.abs() < 2.0**31, values, 1.0)
    back = launched(copy_kernel, values, torch.int32)
    counts["back"] = int((back != values.to(torch.float32).to(torch.int32)).sum())
    return counts


def constants() -> dict[str, list[float]]:
    results = {}
    for name, dtype in NARROW.items():
        y = torch.empty(4, dtype=dtype)
        constant_kernel[(1,)](torch.tensor([1.0, -4.0, 9.0, 9.0]).to(dtype), y, 4)
        results[name] = y.to(torch.float32).tolist()
    return results


def reductions() -> dict[str, str]:
    results = {}
    for (name, dtype), what in itertools.product(NARROW.items(), ("sum", "sum of fp32", "scan")):
        y = torch.zeros(8)
        try:
            reduce_kernel[(1,)](torch.ones(8).to(dtype), y, 8, what)
        except triton.runtime.errors.InterpreterError as error:
            results[f"{what}, {name}"] = str(error)
        else:
            results[f"{what}, {name}"] = f"{y[0].item()}"
    return results


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def refusals() -> dict[str, str]:
    messages = {"repaired": raised(interpreter_probe.probe)}
    for item in "abcdefgh":
        with interpreter.unrepaired(item):
            messages[item] = raised(interpreter_probe.probe)
    with interpreter.unrepaired(*"abcdefgh"):
        messages["stock"] = raised(interpreter_probe.probe)
    interpreter.install()
    messages["twice"] = raised(interpreter_probe.probe)
    return messages


def unknown_interpreter() -> str:
    known = interpreter.USED_NAMES
    interpreter.USED_NAMES = (*known, "InterpreterBuilder.no_such_name")
    try:
        return raised(interpreter.require_known_interpreter)
    finally:
        interpreter.USED_NAMES = known


MEASUREMENTS = (
    casts_from_f32,
    casts_to_f32,
    bf16_round_trip,
    round_to_zero,
    arithmetic,
    dots,
    equal_rows,
    fused_multiply_add,
    integer_casts,
    constants,
    reductions,
    refusals,
    unknown_interpreter,
)

if __name__ == "__main__":
    json.dump({measure.__name__: measure() for measure in MEASUREMENTS}, sys.stdout)
