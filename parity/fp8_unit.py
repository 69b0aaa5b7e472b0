"""What the FP8 matrix unit of SM90 makes of a sum, bit for bit, and a rule for what is made of such sums.

A step adds 32 products to the sum so far. Every term is cut 13 bits below the largest of their exponents, where that of
a product is the sum of its factors' exponents; the new sum is cut to 14 significant bits. `fp8_unit_dots` gave the bits
of 12 288 dots of an H200 (three data sets, 128 long; a part stands in `golden/records/sm90/fp8-dots.json`), and
`fp8_unit_sums` those of 272 312 results of our kernels and DeepGEMM's. So the error of a dot is a share of the sum of
its magnitudes, not of its value, and has the sign of what was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .card import Inputs
from .rules import Judgement, Oracles, Rule, worst_at

LEAST = -200  # the exponent of zero: below that of every product


def fp8_unit_dots(a_im: Tensor, b_jm: Tensor) -> Tensor:
    """Rows of e4m3 values times rows of e4m3 values in fp64: [i, j]."""
    total_ij = torch.zeros(len(a_im), len(b_jm), dtype=torch.float64)
    for a, b in zip(a_im.split(32, 1), b_jm.split(32, 1), strict=True):
        product = a[:, None] * b[None]
        exponents = torch.where(product == 0, LEAST, _exponent(a)[:, None] + _exponent(b)[None])
        largest = torch.maximum(exponents.amax(-1), _exponent(total_ij))
        step = torch.exp2((largest - 13).double())
        terms = torch.cat([product, total_ij[..., None]], -1)
        total_ij = _cut((torch.trunc(terms / step[..., None]) * step[..., None]).sum(-1))
    return total_ij


def fp8_unit_sums(x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], *, group: int, rows: int) -> Tensor:
    """Products of e4m3 rows as kernels on the unit make them, [t, f] in fp32.

    The dot of every `group` of columns leaves the unit, and is added to the sum so far times the product of its scales,
    which is rounded, by one fused multiply-add. Scales of a weight belong to `rows` of its rows.
    """
    x_values, w_values = x[0].double(), w[0].double()
    x_sf, w_sf = _scales(x[1]), _scales(w[1]).repeat_interleave(rows, 0)[: len(w_values)]
    total_tf = torch.zeros(len(x_values), len(w_values))
    for g, (a, b) in enumerate(zip(x_values.split(group, 1), w_values.split(group, 1), strict=True)):
        scale_tf = x_sf[:, g, None] * w_sf[None, :, g]
        total_tf = (total_tf.double() + fp8_unit_dots(a, b) * scale_tf.double()).float()
    return total_tf


def _scales(sf: Tensor) -> Tensor:
    return sf if sf.dtype == torch.float32 else torch.exp2(sf.float() - 127)


def _exponent(x: Tensor) -> Tensor:
    """Of the leading bit; LEAST for zero."""
    return torch.where(x == 0, LEAST, torch.frexp(x)[1] - 1)


def _cut(x: Tensor) -> Tensor:
    """Towards zero to 14 significant bits."""
    step = torch.exp2((_exponent(x) - 13).double())
    return torch.trunc(x / step) * step


@dataclass(frozen=True, kw_only=True)
class Fp8Unit:
    """Every element, and all of them together, as near as the unit comes; `reach` adds the magnitudes of all terms.

    Measured on 50 seeds of every regime (`parity/evidence/fp8-index-scores.json`).
    """

    reach: Callable[[Inputs], Tensor] = field(repr=False)
    element: float = 2.0**-10
    total: float = 2.0**-12

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge `got` against SEMANTIC, in shares of the reach of each element."""
        if got.numel() == 0:
            return Judgement(ok=True, used=0.0)
        finite = oracles.semantic.isfinite()
        truth = torch.where(finite, oracles.semantic, 0.0)
        error = torch.where(finite, got.to(torch.float64), 0.0) - truth
        reach = torch.where(finite, self.reach(oracles.arguments), 0.0)
        share = torch.where(error == 0, 0.0, error.abs() / reach)
        reached = share[reach > 0]
        used = {
            "element": share.max().item() / self.element,
            "total": reached.square().mean().sqrt().item() / self.total if reached.numel() else 0.0,
        }
        name = max(used, key=lambda key: used[key])
        return Judgement(
            ok=all(value < 1.0 for value in used.values()),
            used=used[name],
            message=f"{name} error uses {used[name]:.3g} of what the FP8 unit needs",
            worst=worst_at(got, oracles.semantic, share),
            metrics={f"{key}_used": value for key, value in used.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Fp8Sums:
    """A product by the unit: all of it by `rest`, and a sample of its features bit by bit.

    `sums(arguments, features)` is what the unit makes of those features, in fp32.
    """

    rest: Rule
    sums: Callable[[Inputs, Tensor], Tensor] = field(repr=False)
    most: int = 192  # features that the model, which takes a step of 32 products at a time, is asked for

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge by `rest`, then the bytes of the sample."""
        found = self.rest.judge(got, oracles)
        if not found.ok or got.numel() == 0:
            return found
        features = torch.linspace(0, got.shape[1] - 1, min(self.most, got.shape[1])).round().long()
        expected, picked = self.sums(oracles.arguments, features).to(got.dtype), got[:, features]
        differ = (picked != expected) & ~(picked.isnan() & expected.isnan())
        count = int(differ.sum())
        metrics = found.metrics | {"bits_differ": float(count), "bits_judged": float(picked.numel())}
        if not count:
            return replace(found, metrics=metrics)
        return Judgement(
            ok=False,
            used=float("inf"),
            message=f"{count} of {picked.numel()} elements have not the bits of the FP8 unit",
            worst=worst_at(picked, expected, differ.double()),
            metrics=metrics,
        )
