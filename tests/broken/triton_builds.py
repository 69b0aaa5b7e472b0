"""Triton kernels that build, or nearly, and must be refused: one of each kind, and one right kernel beside them.

Every kernel is a matrix product, out = a · bᵀ. Launches make tensors without memory, as `capture` asks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, out_ptr, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Right: one tile, the depth in steps of K."""
    rows, cols, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        a = tl.load(a_ptr + rows[:, None] * depth + (start + inner)[None, :])
        b = tl.load(b_ptr + cols[:, None] * depth + (start + inner)[None, :])
        acc = tl.dot(a, tl.trans(b), acc)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc)


@triton.jit
def without_matrix_unit(a_ptr, b_ptr, out_ptr, depth, M: tl.constexpr, N: tl.constexpr):
    """The product as multiplications and additions: right numbers, a hundredth of the speed."""
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, depth):
        a = tl.load(a_ptr + rows * depth + k).to(tl.float32)
        b = tl.load(b_ptr + cols * depth + k).to(tl.float32)
        acc += a[:, None] * b[None, :]
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc)


@triton.jit
def widened_fp8(a_ptr, b_ptr, out_ptr, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """fp8 operands that are widened first: the matrix unit is used, at half its speed."""
    rows, cols, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        a = tl.load(a_ptr + rows[:, None] * depth + (start + inner)[None, :]).to(tl.bfloat16)
        b = tl.load(b_ptr + cols[:, None] * depth + (start + inner)[None, :]).to(tl.bfloat16)
        acc = tl.dot(a, tl.trans(b), acc)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc)


@triton.jit
def scaled_outside(a_ptr, b_ptr, sf_ptr, out_ptr, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Block scales applied to the accumulator instead of inside the matrix unit."""
    rows, cols, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        a = tl.load(a_ptr + rows[:, None] * depth + (start + inner)[None, :])
        b = tl.load(b_ptr + cols[:, None] * depth + (start + inner)[None, :])
        sf = tl.load(sf_ptr + rows * (depth // K) + start // K)
        acc += tl.dot(a, tl.trans(b)) * sf[:, None]
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc)


@triton.jit
def block_scaled(a_ptr, a_sf_ptr, b_ptr, b_sf_ptr, out_ptr, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Right: MXFP8 with the scales inside the matrix unit of SM100."""
    rows, cols, inner, groups = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    acc = tl.zeros([M, N], tl.float32)
    for step in range(0, depth // K):
        a = tl.load(a_ptr + rows[:, None] * depth + (step * K + inner)[None, :])
        b = tl.load(b_ptr + cols[None, :] * depth + (step * K + inner)[:, None])
        a_sf = tl.load(a_sf_ptr + rows[:, None] * (depth // 32) + (step * (K // 32) + groups)[None, :])
        b_sf = tl.load(b_sf_ptr + cols[:, None] * (depth // 32) + (step * (K // 32) + groups)[None, :])
        acc = tl.dot_scaled(a, a_sf, "e4m3", b, b_sf, "e4m3", acc)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc)


@triton.jit
def mixed_types(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr):
    """bf16 times fp16, which the language has no product for."""
    rows, inner = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    b = tl.load(b_ptr + rows[:, None] * K + inner[None, :])
    tl.store(out_ptr + rows[:, None] * M + rows[None, :], tl.dot(a, tl.trans(b)))


def _operands(rows: int, cols: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return torch.empty(rows, depth, dtype=dtype), torch.empty(cols, depth, dtype=dtype), torch.empty(rows, cols)


def _product(rows: int, cols: int, inner: int, num_warps: int = 4, num_stages: int = 3) -> None:
    operands = _operands(rows, cols, 1024, torch.bfloat16)
    product[(1,)](*operands, 1024, M=rows, N=cols, K=inner, num_warps=num_warps, num_stages=num_stages)


def launch_right() -> None:
    """128 x 128: wgmma on SM90, tcgen05 on SM100."""
    _product(128, 128, 64)


def launch_few_rows() -> None:
    """16 rows: both compilers fall back to mma.sync, without a word."""
    _product(16, 128, 64)


def launch_too_many_accumulators() -> None:
    """128 x 128 sums in the registers of one warp: 512 words a thread."""
    operands = _operands(128, 128, 1024, torch.bfloat16)
    without_matrix_unit[(1,)](*operands, 1024, M=128, N=128, num_warps=1)


def launch_too_much_shared() -> None:
    """Eight buffers of 32 KiB."""
    _product(128, 128, 64, num_warps=8, num_stages=8)


def launch_without_matrix_unit() -> None:
    """64 x 64 on the ordinary units."""
    without_matrix_unit[(1,)](*_operands(64, 64, 1024, torch.bfloat16), 1024, M=64, N=64, num_warps=8)


def launch_widened_fp8() -> None:
    """fp8 rows of 1024."""
    widened_fp8[(1,)](*_operands(128, 128, 1024, torch.float8_e4m3fn), 1024, M=128, N=128, K=64, num_warps=8)


def launch_scaled_outside() -> None:
    """fp8 rows with a scale for each 128."""
    a, b, out = _operands(128, 128, 1024, torch.float8_e4m3fn)
    scaled_outside[(1,)](a, b, torch.empty(128, 8), out, 1024, M=128, N=128, K=128, num_warps=8)


def launch_block_scaled() -> None:
    """fp8 rows with a UE8M0 scale for each 32."""
    a, b, out = _operands(128, 128, 1024, torch.float8_e4m3fn)
    a_sf, b_sf = torch.empty(128, 32, dtype=torch.uint8), torch.empty(128, 32, dtype=torch.uint8)
    block_scaled[(1,)](a, a_sf, b, b_sf, out, 1024, M=128, N=128, K=128, num_warps=4, num_stages=2)


def launch_mixed_types() -> None:
    """bf16 and fp16."""
    a, b = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 64, dtype=torch.float16)
    mixed_types[(1,)](a, b, torch.empty(64, 64), M=64, K=64)


def launch_nothing() -> None:
    """No kernel at all."""


def launch_and_die() -> None:
    """Takes the compile process down."""
    import os

    os.abort()
