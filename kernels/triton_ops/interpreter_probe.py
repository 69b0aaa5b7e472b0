"""Proof that the interpreter computes what a device computes: one small kernel per item of the repair.

The expected values are worked out by hand or by torch; nothing is taken from the repair that is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _copy_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, sum_ptr, less_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(sum_ptr + i, x * y + x)
    tl.store(less_ptr + i, (x < y).to(tl.int32))


@triton.jit
def _fma_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.fma(x, x, x))


@triton.jit
def _constant_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptr + i, tl.load(x_ptr + i) * 0.5 + tl.full((N,), 1.5, dtype))


@triton.jit
def _sum_kernel(x_ptr, y_ptr, N: tl.constexpr):
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N)), 0).to(tl.float32))


@triton.jit
def _overflow_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.exp(tl.load(x_ptr + i)))


NARROW_TYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
SAME_SIZE_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_HALF_WAY = 1 + 2.0**-8  # between two bf16 numbers; the even one is 1
_SAMPLE = (0.4962, -1.999, _HALF_WAY, 3 * _HALF_WAY, 464.5, 1e6, -float("inf"), float("nan"))


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    both_nan = x.to(torch.float32).isnan() & y.to(torch.float32).isnan()
    integer = SAME_SIZE_INT[x.element_size()]
    return bool((both_nan | (x.view(integer) == y.view(integer))).all())


def _float_casts_round() -> bool:
    x = torch.tensor(_SAMPLE)
    for dtype, limit in ((torch.bfloat16, None), (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        expected = (x if limit is None else x.clamp(-limit, limit)).to(dtype)
        narrow, wide = torch.empty(len(x), dtype=dtype), torch.empty(len(x))
        _copy_kernel[(1,)](x, narrow, len(x))
        _copy_kernel[(1,)](expected, wide, len(x))
        if not _same(narrow, expected) or not _same(wide, expected.to(torch.float32)):
            return False
    return True


def _dot_is_exact_and_row_invariant() -> bool:
    n = 32
    row = torch.cos(torch.arange(n) * 1.7)
    other = torch.sin(torch.arange(n * n) * 0.9).reshape(n, n)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        a, b, c = row.to(dtype).expand(n, n).contiguous(), other.to(dtype), torch.empty(n, n)
        _dot_kernel[(1,)](a, b, c, n)
        exact = torch.matmul(a.to(torch.float64), b.to(torch.float64))
        if not _same(c, exact.to(torch.float32)) or not _same(c, c[:1].expand(n, n).contiguous()):
            return False
    return True


def _narrow_arithmetic_rounds() -> bool:
    x = torch.tensor([1.5, -2.25, 0.375, -0.0])
    y = torch.tensor([-0.75, 3.5, 0.4375, 1.0])
    for dtype in NARROW_TYPES:
        a, b = x.to(dtype), y.to(dtype)
        result, less = torch.empty(4, dtype=dtype), torch.empty(4, dtype=torch.int32)
        _arithmetic_kernel[(1,)](a, b, result, less, 4)
        wide_a, wide_b = a.to(torch.float32), b.to(torch.float32)
        product = (wide_a * wide_b).to(dtype).to(torch.float32)
        if not _same(result, (product + wide_a).to(dtype)) or less.tolist() != (wide_a < wide_b).int().tolist():
            return False
    return True


def _integer_casts_are_right() -> bool:
    whole = torch.tensor([3, -257, 70_000, 1], dtype=torch.int32)
    rounded, back = torch.empty(4, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
    _copy_kernel[(1,)](whole, rounded, 4)
    _copy_kernel[(1,)](rounded, back, 4)
    return _same(rounded, whole.to(torch.bfloat16)) and back.tolist() == [3, -256, 70_144, 1]


def _fma_rounds_once() -> bool:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([1 + 2.0**-7, -1.5, 0.3, 100.0]).to(dtype)
        y = torch.empty(4, dtype=dtype)
        _fma_kernel[(1,)](x, y, 4)
        wide = x.to(torch.float64)
        if not _same(y, (wide * wide + wide).to(torch.float32).to(dtype)):
            return False
    return True


def _constants_are_right() -> bool:
    for dtype in NARROW_TYPES:
        y = torch.empty(4, dtype=dtype)
        _constant_kernel[(1,)](torch.tensor([1.0, 2.0, -4.0, 0.0]).to(dtype), y, 4)
        if y.to(torch.float32).tolist() != [2.0, 2.5, -0.5, 1.5]:
            return False
    return True


def _narrow_sums_are_refused() -> bool:
    for dtype in NARROW_TYPES:
        try:
            _sum_kernel[(1,)](torch.ones(4).to(dtype), torch.empty(1), 4)
        except InterpreterError as error:
            refused = _innermost(error)
        else:
            return False
        if not isinstance(refused, TypeError):
            return False
    return True


def _innermost(error: BaseException) -> BaseException:
    # the interpreter wraps what a kernel raises once for every jitted function on the way
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _overflow_is_silent() -> bool:
    with np.errstate(all="raise"):
        _overflow_kernel[(1,)](torch.tensor([1000.0, 0.0]), torch.empty(2), 2)
    return True


@triton.jit
def _loop_kernel(bound, out_ptr):
    count = 0
    for _ in range(0, bound):
        count += 1
    tl.store(out_ptr, count)


def _scalars_bound_loops() -> bool:
    out = torch.zeros(1, dtype=torch.int32)
    _loop_kernel[(1,)](5, out)
    return out.item() == 5


PROBES: dict[str, tuple[str, Callable[[], bool]]] = {
    "a": ("conversion between float types", _float_casts_round),
    "b": ("tl.dot", _dot_is_exact_and_row_invariant),
    "c": ("bf16 and fp8 arithmetic", _narrow_arithmetic_rounds),
    "d": ("conversion between integers and bf16", _integer_casts_are_right),
    "e": ("tl.fma", _fma_rounds_once),
    "f": ("bf16 and fp8 constants", _constants_are_right),
    "g": ("refusal to reduce bf16 and fp8", _narrow_sums_are_refused),
    "h": ("silent overflow", _overflow_is_silent),
    "i": ("a kernel scalar as loop bound", _scalars_bound_loops),
}


def probe() -> None:
    """Run every probe kernel.

    Raises:
        RuntimeError: a probe gives other bits than expected; the message names the items.
    """
    failed = []
    for item, (what, passes) in PROBES.items():
        right = False
        with suppress(Exception), np.errstate(all="ignore"):
            right = passes()
        if not right:
            failed.append(f"({item}) {what}")
    if failed:
        raise RuntimeError(
            f"triton {triton.__version__}: the interpreter is wrong in {', '.join(failed)}; "
            "no kernel runs on it unrepaired"
        )
