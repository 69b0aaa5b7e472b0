"""Repair of Triton's CPU interpreter for bf16 and fp8, applied on import and proven by the probe beside it.

The stock interpreter (3.6 to 3.9) keeps bf16 and fp8 values as raw integers and then computes on those integers, with
no error. Each repair below carries the letter under which the probe checks it:

    (a) conversions between float types: round to nearest even, saturating into fp8, NaN kept
    (b) tl.dot: operands decoded, product in fp64 rounded once to fp32, accumulator added in fp32
    (c) arithmetic and comparisons of bf16 and fp8: in fp32, rounded back
    (d) conversions between integers and bf16 or fp8
    (e) tl.fma: product and sum in fp64, rounded to the type
    (f) bf16 and fp8 constants
    (g) reductions and scans of bf16 and fp8 are refused: a kernel casts to fp32 first

and, not about numbers:

    (h) overflow, division by zero and NaN raise no numpy warnings while a kernel runs, as on a device
    (i) a scalar of the kernel is the bound of a loop: triton 3.6 calls int() on a one-element array, which numpy 2.4
        refuses (triton 3.8 does not: there the repair changes nothing)
    (j) a device function patches the language once in a launch, not at each of its calls: that took a third of the time
        of a kernel that calls many

A dot of fp32 operands is never rounded to tf32 here, whatever its `input_precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock

from .interpreter_probe import probe

SUPPORTED_TRITON = "3.6 to 3.9"

NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
FLOATS = {**NARROW, tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64}
LARGEST_FP8 = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
SAME_SIZE_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

USED_NAMES = (
    "_convert_float",
    "_patch_lang",
    "_patch_lang_tensor",
    "_LangPatchScope",
    "_get_np_dtype",
    "_ir.ROUNDING_MODE.RTZ",
    "TensorHandle",
    "InterpretedFunction",
    "InterpreterBuilder.binary_op",
    "InterpreterBuilder.cast_impl",
    "InterpreterBuilder.create_dot",
    "InterpreterBuilder.create_fma",
    "InterpreterBuilder.create_fp_to_fp",
    "InterpreterBuilder.ternary_op",
    "InterpreterBuilder.unary_op",
    "ReduceScanOpInterface.check_tensor",
    "GridExecutor.__call__",
)


def require_known_interpreter() -> None:
    """Refuse an interpreter whose private names are not those that the repair replaces.

    Raises:
        RuntimeError: triton was imported before TRITON_INTERPRET=1 was set, or a name is missing.
    """
    missing = [name for name in USED_NAMES if not _resolves(name)]
    if missing:
        raise RuntimeError(
            f"triton {triton.__version__}: the interpreter has no {', '.join(missing)}; "
            f"the repair knows triton {SUPPORTED_TRITON}"
        )
    if not isinstance(tl.standard.sum, stock.InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET: must be set to 1 before triton is imported")


def _resolves(dotted_name: str) -> bool:
    found: Any = stock
    for part in dotted_name.split("."):
        found = getattr(found, part, None)
    return found is not None


# the bits that the interpreter holds, and the values that they mean


def decode(bits: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    """The values of an interpreter array, as a torch tensor of the matching float type."""
    shape = np.shape(bits)
    return torch.from_numpy(np.array(bits).reshape(-1)).view(FLOATS[dtype]).reshape(shape)


def encode(values: torch.Tensor, dtype: tl.dtype) -> np.ndarray:
    """Values rounded to `dtype`, as the interpreter holds them."""
    if dtype in LARGEST_FP8:
        # the device conversion saturates; torch 2.13 saturates e4m3 only and torch 2.11 gives NaN
        largest = LARGEST_FP8[dtype]
        values = values.to(torch.float32).clamp(-largest, largest)
    rounded = values.to(FLOATS[dtype]).contiguous()
    bits = rounded.reshape(-1).view(SAME_SIZE_INT[rounded.element_size()]).numpy()
    return bits.view(stock._get_np_dtype(dtype)).reshape(tuple(rounded.shape))


def _widened(handle: stock.TensorHandle) -> np.ndarray:
    """The values of a handle in a type that numpy computes in: bf16 and fp8 as fp32, others as they are."""
    dtype = handle.dtype.scalar
    return decode(handle.data, dtype).to(torch.float32).numpy() if dtype in NARROW else handle.data


def _handle(values: np.ndarray, dtype: tl.dtype) -> stock.TensorHandle:
    return stock.TensorHandle(encode(torch.from_numpy(np.array(values)), dtype), dtype)


# the replacements; `before` is the stock function


def _convert_float(before: Callable, bits: np.ndarray, src: tl.dtype, dst: tl.dtype, rounding: Any) -> np.ndarray:
    if src not in FLOATS or dst not in FLOATS:
        return before(bits, src, dst, rounding)
    values = decode(bits, src)
    if rounding == stock._ir.ROUNDING_MODE.RTZ:
        if dst != tl.bfloat16 or src != tl.float32:
            raise NotImplementedError(f"fp_downcast_rounding: rounding to zero from {src} into {dst} is not repaired")
        kept = values.view(torch.int32) & -(1 << 16)
        values = torch.where(values.isnan(), values, kept.view(torch.float32))
    # callers view the result as the interpreter's type: hand them unsigned bits of the same size
    return encode(values, dst).view(f"uint{dst.primitive_bitwidth}")


def _create_dot(before: Callable, self: Any, a: Any, b: Any, acc: Any, *options: Any) -> stock.TensorHandle:
    # an fp32 BLAS product gives equal rows of one tile different bits; fp64 rounded once does not
    product = np.matmul(_widened(a).astype(np.float64), _widened(b).astype(np.float64))
    return stock.TensorHandle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)


def _binary_op(before: Callable, self: Any, lhs: Any, rhs: Any, op: Callable) -> stock.TensorHandle:
    dtype = lhs.dtype.scalar
    if dtype not in NARROW:
        return before(self, lhs, rhs, op)
    result = op(_widened(lhs), _widened(rhs))
    return stock.TensorHandle(result, tl.int1) if result.dtype == bool else _handle(result, dtype)


def _unary_op(before: Callable, self: Any, arg: Any, op: Callable) -> stock.TensorHandle:
    dtype = arg.dtype.scalar
    return _handle(op(_widened(arg)), dtype) if dtype in NARROW else before(self, arg, op)


def _ternary_op(before: Callable, self: Any, x: Any, y: Any, z: Any, op: Callable) -> stock.TensorHandle:
    dtype = z.dtype.scalar
    # np.where only moves bits; anything else computes
    if dtype not in NARROW or op is np.where:
        return before(self, x, y, z, op)
    return _handle(op(_widened(x), _widened(y), _widened(z)), dtype)


def _cast_impl(before: Callable, self: Any, src: Any, dst_type: Any) -> stock.TensorHandle:
    src_dtype, dst_dtype = src.dtype.scalar, dst_type.scalar
    if src_dtype not in NARROW and dst_dtype not in NARROW:
        return before(self, src, dst_type)
    if src_dtype in FLOATS and dst_dtype in FLOATS:
        return self.create_fp_to_fp(src, dst_type, None)
    if dst_dtype in NARROW:
        return _handle(np.asarray(src.data).astype(np.float32), dst_dtype)
    return stock.TensorHandle(_widened(src).astype(stock._get_np_dtype(dst_dtype)), dst_dtype)


def _create_fma(before: Callable, self: Any, x: Any, y: Any, z: Any) -> stock.TensorHandle:
    dtype = z.dtype.scalar
    if dtype not in FLOATS or dtype == tl.float64:
        return before(self, x, y, z)
    exact = _widened(x).astype(np.float64) * _widened(y) + _widened(z)
    # torch takes fp64 to a narrow type by way of fp32: two roundings
    return _handle(exact if dtype == tl.float32 else _odd_float32(exact), dtype)


def _odd_float32(exact: np.ndarray) -> np.ndarray:
    """fp64 values in fp32, an inexact one with an odd last bit: rounded on to a narrower type, it is rounded once."""
    near = np.atleast_1d(exact).astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.int32)
    is_even = (bits & 1 == 0) & (back != exact) & np.isfinite(back)
    bits = np.where(is_even, bits + np.where(np.abs(back) > np.abs(exact), -1, 1), bits).astype(np.int32)
    return bits.view(np.float32).reshape(np.shape(exact))


def _constant(dtype: tl.dtype, before: Callable | None, self: Any, value: float) -> stock.TensorHandle:
    return _handle(np.array([value], dtype=np.float32), dtype)


def _check_tensor(before: Callable, self: Any, inputs: Any) -> None:
    before(self, inputs)
    for arg in inputs:
        if arg.dtype.scalar in NARROW:
            # numpy would add or compare the raw bits; a device would accumulate in the narrow type
            raise TypeError(f"input: expected float32 or an integer type to reduce or scan, got {arg.dtype.scalar}")


def _call_without_warnings(before: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()
    try:
        with np.errstate(all="ignore"):
            return before(self, *args, **kwargs)
    finally:
        _patched.clear()


_patched: set[int] = set()  # ids of the globals of modules whose names of the language are patched in this launch


def _patch_lang(before: Callable, fn: Any) -> Any:
    if id(fn.__globals__) in _patched:
        return stock._LangPatchScope()
    _patched.add(id(fn.__globals__))
    return before(fn)


def _patch_lang_tensor(before: Callable, tensor: Any, scope: Any) -> None:
    before(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One name of the stock interpreter and the function that takes its place."""

    item: str
    owner: Any
    name: str
    function: Callable

    def bound(self, before: Callable | None) -> Callable:
        """The function with the stock one as its first argument; a plain function, so that it binds `self`."""
        function = partial(self.function, before)
        return lambda *args, **kwargs: function(*args, **kwargs)


_BUILDER = stock.InterpreterBuilder
REPLACEMENTS = (
    Replacement(item="a", owner=stock, name="_convert_float", function=_convert_float),
    Replacement(item="b", owner=_BUILDER, name="create_dot", function=_create_dot),
    Replacement(item="c", owner=_BUILDER, name="binary_op", function=_binary_op),
    Replacement(item="c", owner=_BUILDER, name="unary_op", function=_unary_op),
    Replacement(item="c", owner=_BUILDER, name="ternary_op", function=_ternary_op),
    Replacement(item="d", owner=_BUILDER, name="cast_impl", function=_cast_impl),
    Replacement(item="e", owner=_BUILDER, name="create_fma", function=_create_fma),
    Replacement(item="f", owner=_BUILDER, name="get_bf16", function=partial(_constant, tl.bfloat16)),
    Replacement(item="f", owner=_BUILDER, name="get_fp8e4nv", function=partial(_constant, tl.float8e4nv)),
    Replacement(item="f", owner=_BUILDER, name="get_fp8e5", function=partial(_constant, tl.float8e5)),
    Replacement(item="g", owner=stock.ReduceScanOpInterface, name="check_tensor", function=_check_tensor),
    Replacement(item="h", owner=stock.GridExecutor, name="__call__", function=_call_without_warnings),
    Replacement(item="i", owner=stock, name="_patch_lang_tensor", function=_patch_lang_tensor),
    Replacement(item="j", owner=stock, name="_patch_lang", function=_patch_lang),
)
_before: dict[Replacement, Callable | None] = {}


def install() -> None:
    """Put every replacement in place, once."""
    for entry in REPLACEMENTS:
        if entry not in _before:
            _before[entry] = getattr(entry.owner, entry.name, None)
            setattr(entry.owner, entry.name, entry.bound(_before[entry]))


@contextmanager
def unrepaired(*items: str) -> Iterator[None]:
    """Take the replacements of some items out, to show that the probe then refuses."""
    taken_out = [entry for entry in REPLACEMENTS if entry.item in items and entry in _before]
    for entry in taken_out:
        before = _before.pop(entry)
        if before is None:
            delattr(entry.owner, entry.name)
        else:
            setattr(entry.owner, entry.name, before)
    try:
        yield
    finally:
        install()


require_known_interpreter()
install()
probe()
