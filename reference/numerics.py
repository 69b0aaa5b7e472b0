"""One source text, several oracles.

Arithmetic in this room takes `num: Numerics`. A rounding that a kernel performs is marked by calling `num`, and
every contraction goes through `num.einsum` or `num.sum`; the three instances below then give the same text three
meanings:

* `SEMANTIC`  fp64, marks are the identity: what the model means.
* `CONTRACT`  fp64, each contraction rounded once to fp32, marks applied: what a correct kernel produces, free of
  summation order.
* `RIVAL`     fp32, contractions in blocks taken in reverse, marks applied (those whose scale a kernel may choose, at
  another scale): what honest arithmetic produces. Its distance to SEMANTIC is the yardstick of every budget.

A mark rounds the value and not the dtype: values stay in the carrier dtype of `num` across calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # value of codes 0..7; bit 3 is the sign

MarkObserver = Callable[[str, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """An arithmetic: carrier dtype, whether marks round, and in which order contractions are summed."""

    name: str
    carrier: torch.dtype
    marks: bool
    contraction_f32: bool = False  # round each contraction once to fp32
    block: int = 0  # 0: one library call; otherwise blocks of this length, last block first
    free_scale: float = 1.0  # factor around marks whose scale the contract leaves open
    observer: MarkObserver | None = None  # told the input of every mark, by name

    def observed(self, observer: MarkObserver) -> Numerics:
        """The same arithmetic, telling `observer(name, input)` of every mark it applies."""
        return replace(self, observer=observer)

    def wide(self, x: Tensor) -> Tensor:
        """`x` in the carrier dtype: exact for every dtype narrower than the carrier."""
        return x.to(self.carrier)

    # contractions

    def sum(self, x: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
        """Sum over `dim`, rounded once to fp32 under CONTRACT."""
        if not self.block:
            return self._contracted(x.sum(dim, keepdim=keepdim))
        parts = [part.sum(dim, keepdim=keepdim) for part in reversed(x.split(self.block, dim))]
        return _accumulate(parts)

    def einsum(self, equation: str, a: Tensor, b: Tensor) -> Tensor:
        """`torch.einsum` of two operands, each output element rounded once to fp32 under CONTRACT.

        Raises:
            ValueError: the equation does not name exactly two operands and an output.
        """
        inputs, arrow, output = equation.partition("->")
        names = inputs.split(",")
        if not arrow or len(names) != 2:
            raise ValueError(f"equation: expected 'ab,bc->ac' with two operands, got {equation!r}")
        summed = [letter for letter in names[0] if letter in names[1] and letter not in output]
        if not self.block or not summed:
            return self._contracted(torch.einsum(equation, a, b))
        along = summed[-1]
        a_parts = a.split(self.block, names[0].index(along))
        b_parts = b.split(self.block, names[1].index(along))
        pairs = reversed(list(zip(a_parts, b_parts, strict=True)))
        return _accumulate([torch.einsum(equation, x, y) for x, y in pairs])

    def _contracted(self, x: Tensor) -> Tensor:
        return x.to(torch.float32).to(self.carrier) if self.contraction_f32 else x

    # marks: each rounds through fp32, as hardware does

    def f32(self, x: Tensor) -> Tensor:
        """Round to fp32."""
        return self._mark("f32", x, lambda v: v)

    def bf16(self, x: Tensor) -> Tensor:
        """Round to bf16, for a rounding that every implementation performs."""
        return self._mark("bf16", x, lambda v: v.to(torch.bfloat16))

    def fp16(self, x: Tensor) -> Tensor:
        """Round to fp16 (overflow gives infinity)."""
        return self._mark("fp16", x, lambda v: v.to(torch.float16))

    def e4m3(self, x: Tensor) -> Tensor:
        """Round to e4m3fn, ties to even, saturating at ±448 (infinities too); NaN stays NaN."""
        # clamped first: torch 2.13 saturates out-of-range casts, torch 2.11 gives NaN
        return self._mark("e4m3", x, lambda v: v.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))

    def e5m2(self, x: Tensor) -> Tensor:
        """Round to e5m2, ties to even, saturating at ±57344; NaN stays NaN."""
        return self._mark("e5m2", x, lambda v: v.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2))

    def e2m1(self, x: Tensor) -> Tensor:
        """Round to e2m1, ties to the even code, saturating at ±6; the sign of zero and NaN are kept."""
        return self._mark("e2m1", x, _round_e2m1)

    def ue8m0(self, x: Tensor) -> Tensor:
        """Round a positive scale up to a power of two, 2^-127 … 2^127, by its fp32 exponent bits."""
        return self._mark("ue8m0", x, round_up_to_power_of_two)

    def store(self, x: Tensor, dtype: torch.dtype, *, free_scale: bool = False) -> Tensor:
        """Round to a component's storage dtype (float32, bfloat16 or float16).

        With `free_scale`, the kernel may choose the scale at which the value is rounded (softmax weights are
        rounded unnormalised against a running maximum); RIVAL then rounds at another scale than CONTRACT.

        Raises:
            TypeError: any other dtype.
        """
        marks = {torch.float32: self.f32, torch.bfloat16: self.bf16, torch.float16: self.fp16}
        if dtype not in marks:
            raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
        if free_scale and self.marks and self.free_scale != 1.0:
            return marks[dtype](x * self.free_scale) / self.free_scale
        return marks[dtype](x)

    def _mark(self, name: str, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        if self.observer is not None:
            self.observer(name, x)
        return rounded(x.to(torch.float32)).to(self.carrier) if self.marks else x


def _accumulate(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _round_e2m1(x: Tensor) -> Tensor:
    size = x.abs()
    # midpoints .25 .75 1.25 1.75 2.5 3.5 5 go to the code with an even mantissa bit
    code = sum(
        (size > mid if up_is_odd else size >= mid).to(torch.int64)
        for mid, up_is_odd in ((0.25, 1), (0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1))
    )
    value = torch.tensor(E2M1_GRID, dtype=x.dtype, device=x.device)[code]
    return torch.where(x.isnan(), x, torch.copysign(value, x))


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two ≥ x, from the bits of an fp32 tensor of positive scales (zero gives 2^-127).

    `pow(2, ceil(log2 x))` is wrong just above most powers of two; the exponent field is exact.
    """
    exponent = ((x.view(torch.int32) - 1) >> 23) + 1
    return torch.ldexp(torch.ones_like(x), exponent.clamp(0, 254) - 127)


SEMANTIC = Numerics(name="semantic", carrier=torch.float64, marks=False)
CONTRACT = Numerics(name="contract", carrier=torch.float64, marks=True, contraction_f32=True)
RIVAL = Numerics(name="rival", carrier=torch.float32, marks=True, block=64, free_scale=1.3)
