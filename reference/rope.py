"""Rotary position embedding: frequencies, the table of cosines and sines, and the rotation.

Frequencies, angles and table entries are *definitional*: their roundings are part of the model and happen under every
numerics. At position 10^6 an angle in fp32 is 0.02 to 0.04 rad away from the exact one, so a more accurate table is
another model. The table is therefore an input of every component that rotates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from .config import MscaleRule, Pairing, RopeConfig, RopeSpan, YarnConfig
from .numerics import CONTRACT, SEMANTIC, Numerics


def rope_frequencies(config: RopeConfig) -> Tensor:
    """The angular frequency of each rotated pair, in radians per position.

    Math:
        f_i = 1 / theta^(2i / r); with YaRN f_i becomes f_i / factor * ramp_i + f_i * (1 - ramp_i)

    Shapes:
        returns float32 [r / 2].

    Rounding:
        each operation to fp32, in the order written: exponent, power, reciprocal, blend (definitional). One power
        theta^(-2i / r) instead of power and reciprocal moves 12 of 32 entries for theta = 10000.

    Edges:
        YaRN leaves pairs up to the low end of the ramp alone and divides those from its high end on by the factor.

    Source:
        v3-v32-v4.md section 2.6, v41-attention.md section 2.1
    """
    exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float32) / config.rope_dim
    # the power is taken in fp64 and rounded to fp32: fp32 pow differs in the last bit between libraries
    powers = torch.tensor([config.theta**e for e in exponents.tolist()], dtype=torch.float32)
    freq_i = 1.0 / powers
    if config.yarn is None:
        return freq_i
    low, high = yarn_ramp_ends(config)
    ramp_i = ((torch.arange(len(freq_i), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    smooth_i = 1 - ramp_i
    return freq_i / config.yarn.factor * (1 - smooth_i) + freq_i * smooth_i


def yarn_ramp_ends(config: RopeConfig) -> tuple[float, float]:
    """The pair indices where YaRN starts to divide by the factor, and from where it divides fully.

    Math:
        pair(n) = r ln(L0 / (2 pi n)) / (2 ln theta): the pair that turns n times over the original length L0

    Raises:
        ValueError: config has no YaRN.
    """
    yarn = config.yarn
    if yarn is None:
        raise ValueError("config: expected a YaRN extension, got yarn=None")

    def pair(turns: float) -> float:
        span = math.log(yarn.original_length / (2 * math.pi * turns))
        return config.rope_dim * span / (2 * math.log(config.theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), config.rope_dim - 1)
    return (low, high) if low != high else (low, high + 0.001)


def table_of(config: RopeConfig, length: int) -> Tensor:
    """The table of positions 0 to length - 1, float32 [length, r]."""
    return rope_table(torch.arange(length), rope_frequencies(config), magnitude=table_magnitude(config.yarn))


def rope_table(positions_s: Tensor, freq_i: Tensor, *, magnitude: float = 1.0, num: Numerics = CONTRACT) -> Tensor:
    """Cosines, then sines, of every position.

    Math:
        angle[s, i] = position[s] * freq[i]; row s is cos(angle[s, :]) then sin(angle[s, :]), times magnitude

    Shapes:
        positions_s: integer [s]; freq_i: float32 [r / 2]; returns float32 [s, r].

    Rounding:
        position, angle and the entries to fp32, cos and sin in fp64 of the fp32 angle, magnitude by an fp32 product:
        definitional, the same under every `num`.

    Edges:
        position 0 gives ones and zeros; negative positions turn backwards. `magnitude` is 1 in every released model.

    Raises:
        TypeError: positions_s is no integer tensor, freq_i is not float32.
        ValueError: positions_s or freq_i is not 1-D; magnitude is not positive.

    Source:
        v41-attention.md section 2.1, design.md section 3
    """
    del num
    expect_shape("positions_s", positions_s, "s", {})
    expect_shape("freq_i", freq_i, "i", {})
    expect_dtype("positions_s", positions_s, torch.int32, torch.int64)
    expect_dtype("freq_i", freq_i, torch.float32)
    expect_positive("magnitude", magnitude)
    angle_si = positions_s[:, None] * freq_i  # integer times float32 is a float32 product of the rounded position
    wide_si = SEMANTIC.wide(angle_si)
    table_sr = torch.empty(len(positions_s), 2 * len(freq_i), dtype=torch.float32, device=freq_i.device)
    table_sr[:, : len(freq_i)] = torch.cos(wide_si)  # the assignment rounds fp64 to fp32
    table_sr[:, len(freq_i) :] = torch.sin(wide_si)
    return table_sr * magnitude


def rope(
    x_thd: Tensor,
    table_sr: Tensor,
    positions_t: Tensor,
    *,
    pairing: Pairing,
    span: RopeSpan,
    inverse: bool,
    dtype: torch.dtype = torch.bfloat16,
    num: Numerics = CONTRACT,
) -> Tensor:
    """Rotate r channels of every head by the angles of the token's position.

    Math:
        (u, v) -> (u cos - v sin, u sin + v cos); the inverse turns by the opposite angle
        INTERLEAVED pairs channels (2i, 2i + 1) of the slice, HALF_SPLIT pairs (i, i + r / 2)

    Shapes:
        x_thd: [t, h, d]; table_sr: float32 [s, r] of `rope_table`; positions_t: integer [t], rows of table_sr;
        returns [t, h, d]. The slice is the first or the last r channels of d.

    Rounding:
        one, to `dtype`, at return. The other d - r channels pass through it unchanged if x is of that dtype.

    Edges:
        t = 0 gives an empty tensor; r = d rotates everything; position 0 changes nothing.

    Raises:
        TypeError: x_thd is not floating, table_sr is not float32, positions_t is no integer tensor, dtype is no
            storage dtype.
        ValueError: shapes disagree; r is odd or above d; a position is not a row of table_sr.

    Source:
        v3-v32-v4.md section 2.5, v41-attention.md section 2.1
    """
    _check_rope(x_thd, table_sr, positions_t)
    r, d = table_sr.shape[1], x_thd.shape[2]
    x_thd = num.wide(x_thd)
    table_tr = num.wide(table_sr)[positions_t.long()]
    cos_t1i, sin_t1i = table_tr[:, None, : r // 2], table_tr[:, None, r // 2 :]
    if inverse:
        sin_t1i = -sin_t1i
    start = 0 if span is RopeSpan.FIRST else d - r
    if pairing is Pairing.INTERLEAVED:
        first, second = slice(start, start + r, 2), slice(start + 1, start + r, 2)
    else:
        first, second = slice(start, start + r // 2), slice(start + r // 2, start + r)
    u_thi, v_thi = x_thd[..., first], x_thd[..., second]
    y_thd = x_thd.clone()
    y_thd[..., first] = u_thi * cos_t1i - v_thi * sin_t1i
    y_thd[..., second] = u_thi * sin_t1i + v_thi * cos_t1i
    return num.store(y_thd, dtype)


def softmax_scale(head_dim: int, yarn: YarnConfig | None) -> float:
    """The factor of attention scores: head_dim^-0.5, times the square of YaRN's magnitude.

    Math:
        head_dim^-0.5 * m(x)^2, m(x) = 0.1 x ln(factor) + 1; x is mscale (DEMO) or mscale_all_dim (HF)

    Edges:
        without YaRN, or with a zero mscale, the magnitude is exactly 1.

    Raises:
        ValueError: head_dim is not positive.

    Source:
        v3-v32-v4.md section 2.6
    """
    expect_positive("head_dim", head_dim)
    if yarn is None:
        return head_dim**-0.5
    return head_dim**-0.5 * _yarn_magnitude(yarn, _softmax_mscale(yarn)) ** 2


def table_magnitude(yarn: YarnConfig | None) -> float:
    """The factor of table entries: 1 under DEMO, m(mscale) / m(mscale_all_dim) under HF."""
    if yarn is None or yarn.mscale_rule is MscaleRule.DEMO:
        return 1.0
    return _yarn_magnitude(yarn, yarn.mscale) / _yarn_magnitude(yarn, yarn.mscale_all_dim)


def _softmax_mscale(yarn: YarnConfig) -> float:
    return yarn.mscale if yarn.mscale_rule is MscaleRule.DEMO else yarn.mscale_all_dim


def _yarn_magnitude(yarn: YarnConfig, mscale: float) -> float:
    return 0.1 * mscale * math.log(yarn.factor) + 1.0  # a factor of 1 gives 1


def _check_rope(x_thd: Tensor, table_sr: Tensor, positions_t: Tensor) -> None:
    dims: dict[str, int] = {}
    expect_shape("x_thd", x_thd, "thd", dims)
    expect_shape("table_sr", table_sr, "sr", dims)
    expect_shape("positions_t", positions_t, "t", dims)
    expect_dtype("x_thd", x_thd, torch.bfloat16, torch.float16, torch.float32, torch.float64)
    expect_dtype("table_sr", table_sr, torch.float32)
    expect_dtype("positions_t", positions_t, torch.int32, torch.int64)
    if dims["r"] % 2 or dims["r"] > dims["d"]:
        raise ValueError(f"table_sr: expected an even width up to d={dims['d']}, got r={dims['r']}")
    expect_in_range("positions_t", positions_t, 0, dims["s"])
