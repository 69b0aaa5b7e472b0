"""From looked-up bytes to the streams: the fp8 projection and the gate.

The projection widens codes and scales to bf16, which is exact, and multiplies on the matrix unit with fp32 sums over
ascending blocks of channels; the gate adds in a fixed order too. No tile depends on the number of tokens, so a token
has the same bits alone or in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import require_runnable
from .quant import e4m3_value, output_buffer, ue8m0_value
from .split_softmax import arch_of


@dataclass(frozen=True, kw_only=True)
class ProjectLaunch:
    """Tile of the projection; `groups` of 32 channels are added side by side and fix the order of summation."""

    block_t: int = 64
    block_u: int = 128
    groups: int = 2
    e4m3_bits: bool = False  # take codes apart where the chip cannot convert them
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True)
class GateLaunch:
    """Channels that are added side by side: fixes the order of summation."""

    block: int
    num_warps: int


def project_launch(arch: str) -> ProjectLaunch:
    """The same tile for every number of tokens; the Ascend chain takes the bits of a code apart itself."""
    return ProjectLaunch(e4m3_bits=arch == "ascend950")


def gate_launch(width: int) -> GateLaunch:
    """One block for streams up to 1024 channels, several in ascending order beyond."""
    block = min(max(triton.next_power_of_2(width), 32), 1024)
    return GateLaunch(block=block, num_warps=max(1, block // 256))


@triton.jit
def _widened(codes_ptr, sf_ptr, at, sf_at, mask, ROWS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr):
    """Values of [rows, groups, 32] codes as a bf16 tile [rows, channels]; code and scale give a bf16 number."""
    code = tl.load(codes_ptr + at, mask=mask, other=0)
    value = e4m3_value(code, BITS)
    scale = ue8m0_value(tl.load(sf_ptr + sf_at, mask=mask, other=127))
    return tl.reshape((value * scale).to(tl.bfloat16), [ROWS, GROUPS * 32])


@triton.jit
def _project(
    codes_ptr,
    sf_ptr,
    w_ptr,
    w_sf_ptr,
    kv_ptr,
    num_tokens,
    num_outputs,
    num_groups,
    stride_ct,
    stride_st,
    stride_wu,
    stride_vi,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
):
    # 1. which tokens and outputs
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(0).to(tl.int64) * BLOCK_U + tl.arange(0, BLOCK_U)
    in_tokens, in_outputs = token < num_tokens, output < num_outputs
    row, column = token[:, None, None], output[:, None, None]
    item = tl.arange(0, 32)[None, None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_U], tl.float32)
    # 2. blocks of channels, ascending
    for start in range(0, num_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)[None, :, None]
        inside = group < num_groups
        a_mask, b_mask = in_tokens[:, None, None] & inside, in_outputs[:, None, None] & inside
        a_at, a_sf_at = row * stride_ct + group * 32 + item, row * stride_st + group
        b_at, b_sf_at = column * stride_wu + group * 32 + item, (column // 32) * stride_vi + group
        a = _widened(codes_ptr, sf_ptr, a_at, a_sf_at, a_mask, BLOCK_T, GROUPS, BITS)
        b = _widened(w_ptr, w_sf_ptr, b_at, b_sf_at, b_mask, BLOCK_U, GROUPS, BITS)
        acc = tl.dot(a, tl.trans(b), acc)
    # 3. the only rounding
    kv_at = kv_ptr + token[:, None] * num_outputs + output[None, :]
    tl.store(kv_at, acc.to(tl.bfloat16), mask=in_tokens[:, None] & in_outputs[None, :])


@triton.jit
def _gate(
    r_ptr,
    kv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    image_ptr,
    out_ptr,
    width,
    count,
    scale,
    eps,
    num_streams,
    stride_rt,
    stride_rn,
    stride_kt,
    stride_kj,
    BLOCK: tl.constexpr,
):
    # 1. which token and stream; an image token reads no key and no value
    pid = tl.program_id(0).to(tl.int64)
    token, stream = pid // num_streams, pid % num_streams
    is_text = tl.load(image_ptr + token) == 0
    r_at = r_ptr + token * stride_rt + stream * stride_rn
    key_at = kv_ptr + token * stride_kt + stream * stride_kj
    value_at = kv_ptr + token * stride_kt + num_streams * stride_kj
    # 2. three sums, every lane its own until the end
    column = tl.arange(0, BLOCK).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    key_squares = tl.zeros([BLOCK], tl.float32)
    dots = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + column
        mask = (at < width) & is_text
        r = tl.load(r_at + at, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(key_at + at, mask=mask, other=0.0).to(tl.float32)
        q_weight = tl.load(q_weight_ptr + stream * width + at, mask=mask, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + stream * width + at, mask=mask, other=0.0).to(tl.float32)
        squares += r * r
        key_squares += key * key
        dots += r * (q_weight * k_weight) * key
    # 3. gate, by the sign bit of d: zero has one too
    rx = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / count + eps)
    rk = 1.0 / tl.sqrt_rn(tl.sum(key_squares, axis=0) / count + eps)
    d = tl.sum(dots, axis=0) * rx * rk * scale
    size = tl.abs(d)
    root = tl.sqrt_rn(tl.where(size < 1e-6, 1e-6, size))  # a maximum of two would hide a NaN on a device
    gate = 1.0 / (1.0 + tl.exp(tl.where(d.to(tl.int32, bitcast=True) < 0, root, root * -1.0)))
    # 4. streams
    for start in range(0, width, BLOCK):
        at = start + column
        r = tl.load(r_at + at, mask=at < width, other=0.0)
        value = tl.load(value_at + at, mask=(at < width) & is_text, other=0.0).to(tl.float32)
        gated = (r.to(tl.float32) + gate * value).to(tl.bfloat16)
        tl.store(out_ptr + pid * width + at, tl.where(is_text, gated, r), mask=at < width)


def engram_project(
    codes_tm: torch.Tensor,
    sf_tg: torch.Tensor,
    w_um: torch.Tensor,
    w_sf_ig: torch.Tensor,
    *,
    launch: ProjectLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys and values in bf16.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: tensors are on the CPU and kernels are not interpreted.
    """
    (t, m), u = codes_tm.shape, w_um.shape[0]
    kv_tu = output_buffer(out, (t, u), torch.bfloat16, codes_tm)
    if not kv_tu.numel():
        return kv_tu
    require_runnable("codes_tm", codes_tm)
    launch = launch or project_launch(arch_of(codes_tm.device))
    codes, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (codes_tm, w_um))
    sf, weight_sf = (x if x.stride(1) == 1 else x.contiguous() for x in (sf_tg, w_sf_ig))
    _project[(triton.cdiv(u, launch.block_u), triton.cdiv(t, launch.block_t))](
        codes.view(torch.uint8),
        sf,
        weight.view(torch.uint8),
        weight_sf,
        kv_tu,
        t,
        u,
        m // 32,
        codes.stride(0),
        sf.stride(0),
        weight.stride(0),
        weight_sf.stride(0),
        BLOCK_T=launch.block_t,
        BLOCK_U=launch.block_u,
        GROUPS=launch.groups,
        BITS=launch.e4m3_bits,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return kv_tu


def engram_gate(
    r_tnm: torch.Tensor,
    kv_tjm: torch.Tensor,
    q_weight_nm: torch.Tensor,
    k_weight_nm: torch.Tensor,
    image_t: torch.Tensor,
    *,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The streams after the memory, in bf16.

    Raises:
        ValueError: `out` has another shape or is not contiguous.
        TypeError: `out` has another dtype.
        RuntimeError: tensors are on the CPU and kernels are not interpreted.
    """
    t, n, m = r_tnm.shape
    gated_tnm = output_buffer(out, (t, n, m), torch.bfloat16, r_tnm)
    if not gated_tnm.numel():
        return gated_tnm
    require_runnable("r_tnm", r_tnm)
    launch = gate_launch(m)
    r_tnm, kv_tjm = (x if x.stride(2) == 1 else x.contiguous() for x in (r_tnm, kv_tjm))
    _gate[(t * n,)](
        r_tnm,
        kv_tjm,
        q_weight_nm.contiguous(),
        k_weight_nm.contiguous(),
        image_t.contiguous().view(torch.uint8),
        gated_tnm,
        m,
        float(m),
        m**-0.5,
        eps,
        n,
        *r_tnm.stride()[:2],
        *kv_tjm.stride()[:2],
        BLOCK=launch.block,
        num_warps=launch.num_warps,
    )
    return gated_tnm
