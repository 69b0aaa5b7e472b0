"""Kernels that the Ascend gate must refuse, each for a reason of its own, with the launches that build them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def large_tile(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile that no unified buffer holds."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.store(y_ptr + at, x - tl.max(x, 1)[:, None])


@triton.jit
def product(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    """One tile of a matrix product; it fits as long as N does."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def product_by_hand(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    """The same by a sum over rows: right, and on the vector cores."""
    row = tl.arange(0, N)
    a = tl.load(a_ptr + row[:, None] * N + row[None, :]).to(tl.float32)
    for column in range(0, N):
        b = tl.load(b_ptr + row * N + column).to(tl.float32)
        tl.store(c_ptr + row * N + column, tl.sum(a * b[None, :], 1))


@triton.jit
def scalar_quotient(x_ptr, y_ptr, count, N: tl.constexpr):
    """A correctly rounded quotient of scalars, for which the adapter has no form."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x * tl.div_rn(tl.sum(x, 0), count))


@triton.jit
def first_of_the_largest(x_ptr, y_ptr, N: tl.constexpr):
    """An argmax, which the SIMD path does not take."""
    tl.store(y_ptr, tl.argmax(tl.load(x_ptr + tl.arange(0, N)), 0))


@triton.jit
def even_elements(x_ptr, y_ptr, stride, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Every second element of rows that lie apart: the adapter makes a program that never loads them."""
    row, pair = tl.arange(0, ROWS).to(tl.int64) // 3 * stride, tl.arange(0, PAIRS)
    x = tl.load(x_ptr + row[:, None] + 2 * pair[None, :])
    tl.store(y_ptr + tl.arange(0, ROWS)[:, None] * PAIRS + pair[None, :], x)


@triton.jit
def widened_codes(codes_ptr, y_ptr, N: tl.constexpr):
    """e4m3 codes to fp32, which the adapter leaves as it is."""
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(codes_ptr + i).to(tl.float32))


@triton.jit
def doubled_rows(x_ptr, y_ptr, width, N: tl.constexpr):
    """Each row twice itself."""
    i = tl.arange(0, N)
    at = tl.program_id(0) * width + i
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=i < width, other=0.0) * 2.0, mask=i < width)


# launches


def launch_large_tile() -> None:
    """256 KiB in fp32."""
    x = torch.empty(256, 256, dtype=torch.bfloat16)
    large_tile[(1,)](x, torch.empty(256, 256), 256, 256)


def launch_product() -> None:
    """64 x 64, which fits on both paths."""
    _products(product, 64)


def launch_large_product() -> None:
    """256 x 256 in fp32, more than the threads have room for."""
    x = torch.empty(256, 256)
    product[(1,)](x, x, x, 256)


def launch_product_by_hand() -> None:
    """64 x 64."""
    _products(product_by_hand, 64)


def launch_scalar_quotient() -> None:
    """One row."""
    scalar_quotient[(1,)](torch.empty(1024), torch.empty(1024), 1024.0, 1024)


def launch_first_of_the_largest() -> None:
    """One row."""
    first_of_the_largest[(1,)](torch.empty(256), torch.empty(1, dtype=torch.int32), 256)


def launch_even_elements() -> None:
    """Sixteen pairs in each of 64 rows."""
    even_elements[(1,)](torch.empty(64, 32), torch.empty(64, 16), 32, 64, 16)


def launch_widened_codes() -> None:
    """256 codes."""
    widened_codes[(1,)](torch.empty(256, dtype=torch.float8_e4m3fn), torch.empty(256), 256)


def _products(kernel, size: int) -> None:
    x = torch.empty(size, size, dtype=torch.bfloat16)
    kernel[(1,)](x, x, torch.empty(size, size), size)


# candidates


def norm_without_statistics(x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: object, dtype: torch.dtype) -> Tensor:
    """A norm that doubles its rows; called like the others of its card, on lowered kernels."""
    from deeptwin.parity.builds.ascend_run import lowered_launches
    from deeptwin.parity.builds.ascend_tools import Toolchain, find

    tools = find()
    assert isinstance(tools, Toolchain)
    x, y = x_tm.to(dtype).contiguous(), torch.empty(x_tm.shape, dtype=dtype)
    with lowered_launches(tools):
        if x.numel():
            doubled_rows[(x.shape[0],)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return y
