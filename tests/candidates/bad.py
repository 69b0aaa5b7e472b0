"""Candidates for `rms_norm` that misbehave, one way each; the gate must give one verdict and go on."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor


def right(x_tm: Tensor, weight_m: Tensor, *, eps: float, cast: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = x_tm.double()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if cast.value == "before_weight":
        y = y.float().to(dtype).double()
    return (y * weight_m.double()).float().to(dtype)


def wrong_shape(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    return right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)[..., :-1]


def wrong_dtype(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    return right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype).double()


def wrong_device(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    return right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype).to("meta")


def not_a_tensor(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    return right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype).tolist()


def nan(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    return right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype) * torch.nan


def unwritten(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    y = torch.empty(x_tm.shape, dtype=dtype)
    y[:-1] = right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)[:-1]
    return y


def raises(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    raise RuntimeError("illegal instruction in lane 7")


def hangs(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    time.sleep(3600)


def exits(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    os._exit(0)


def segfault(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    ctypes.string_at(0)


def mutates_input(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    y = right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)
    weight_m[0] += 1
    return y


def writes_around_input(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    y = right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)
    end = weight_m.data_ptr() + weight_m.numel() * weight_m.element_size()
    ctypes.memset(end, 0, 4)
    return y


def writes_around_out(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16, out=None):
    y = right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)
    if out is None:
        return y
    out.copy_(y)
    ctypes.memset(out.data_ptr() - 2, 0, 2)
    return out


def ignores_out(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16, out=None):
    return right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)


def view_of_input(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    return x_tm


_launches = 0


def not_deterministic(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    global _launches
    _launches += 1
    y = right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)
    if _launches % 2 == 0 and y.numel():
        y.view(-1).view(torch.uint8)[0] ^= 1
    return y


def batch_dependent(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    y = right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)
    if x_tm.shape[0] > 1 and y.numel():
        y[0, :1].view(torch.uint8)[0] ^= 1
    return y


def layout_dependent(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    y = right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)
    if x_tm.stride(0) % 2 and y.numel():
        y[0, :1].view(torch.uint8)[0] ^= 1
    return y


def prints(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    os.write(1, b"\x80\x04 noise on stdout\n" * 1000)
    sys.stdout.write("more noise\n")
    return right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)


def needs_more(x_tm, weight_m, *, eps, cast, workspace, dtype=torch.bfloat16):
    return right(x_tm, weight_m, eps=eps, cast=cast, dtype=dtype)


def lacks_eps(x_tm, weight_m):
    return x_tm


def declines(x_tm, weight_m, *, eps, cast, dtype=torch.bfloat16):
    raise NotImplementedError(f"x_tm: expected a width of 12, got {x_tm.shape[1]}")
