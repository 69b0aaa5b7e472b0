"""The Hadamard transform as a kernel computes it, in fp32 on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the transform does wrong; the default is right."""

    stages: str = "ascending"  # ascending, descending, all_but_last
    order: str = "natural"  # natural, bit_reversed, sequency
    factor: str = "behind"  # behind, before, missing, bf16, one_over_d
    between: torch.dtype = torch.float32  # of the values between stages
    minus: str = "kept"  # kept, lost_in_last_stage, swapped
    store: str = "nearest"  # nearest, truncated
    rows: str = "own"  # own, first, last_unwritten, over_rows
    identity: bool = False
    counter: bool = False


_calls = 0


def transform(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `hadamard`."""

    def hadamard(x_td: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        global _calls
        if faults.identity:
            return x_td.to(dtype)
        x, width = x_td.float(), x_td.shape[1]
        factor = torch.tensor(width**-0.5, dtype=torch.float32)
        if faults.factor == "before":
            x = x * factor
        if faults.rows == "over_rows" and x.shape[0] == width:
            x = x.T.contiguous()
        steps = [1 << i for i in range(width.bit_length() - 1)]
        if faults.stages == "descending":
            steps.reverse()
        elif faults.stages == "all_but_last":
            steps = steps[:-1]
        for half in steps:
            parts = x.reshape(len(x), width // (2 * half), 2, half)
            a, b = parts[:, :, 0], parts[:, :, 1]
            low = a - b
            if faults.minus == "lost_in_last_stage" and half == width // 2:
                low = a + b
            elif faults.minus == "swapped":
                low = b - a
            x = torch.stack([a + b, low], 2).reshape(x.shape).to(faults.between).float()
        if faults.order != "natural":
            x = x[:, _order(faults.order, width)]
        x = _scaled(faults, x, factor, width)
        if faults.rows == "first" and len(x):
            x = x[:1].expand_as(x).contiguous()
        if faults.store == "truncated" and dtype is torch.bfloat16:
            x = (x.view(torch.int32) & -65536).view(torch.float32)
        y = x.to(dtype)
        if faults.rows == "last_unwritten":
            y[-1:] = torch.nan
        if faults.counter and y.numel():
            _calls += 1
            y.view(-1)[0] += _calls
        return y

    return hadamard


def _scaled(faults: Faults, x: Tensor, factor: Tensor, width: int) -> Tensor:
    if faults.factor == "behind":
        return x * factor
    if faults.factor == "bf16":
        return x * factor.bfloat16().float()
    return x / width if faults.factor == "one_over_d" else x


def _order(name: str, width: int) -> list[int]:
    bits = width.bit_length() - 1
    reversed_ = [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(width)]
    return reversed_ if name == "bit_reversed" else [reversed_[i ^ (i >> 1)] for i in range(width)]


_RIGHT = Faults()
right_butterflies = transform(_RIGHT)

transform_missing = transform(replace(_RIGHT, identity=True))
factor_missing = transform(replace(_RIGHT, factor="missing"))
factor_of_the_size = transform(replace(_RIGHT, factor="one_over_d"))
factor_bf16 = transform(replace(_RIGHT, factor="bf16"))
factor_first = transform(replace(_RIGHT, factor="before"))
stages_descending = transform(replace(_RIGHT, stages="descending"))
last_stage_missing = transform(replace(_RIGHT, stages="all_but_last"))
stages_bf16 = transform(replace(_RIGHT, between=torch.bfloat16))
bit_reversed_order = transform(replace(_RIGHT, order="bit_reversed"))
sequency_order = transform(replace(_RIGHT, order="sequency"))
minus_lost = transform(replace(_RIGHT, minus="lost_in_last_stage"))
minus_swapped = transform(replace(_RIGHT, minus="swapped"))
truncated = transform(replace(_RIGHT, store="truncated"))
first_row_for_all = transform(replace(_RIGHT, rows="first"))
last_row_unwritten = transform(replace(_RIGHT, rows="last_unwritten"))
square_transposed = transform(replace(_RIGHT, rows="over_rows"))
not_deterministic = transform(replace(_RIGHT, counter=True))
