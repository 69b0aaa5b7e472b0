"""Guesses why an output is wrong: each guess is a property that the numbers either have or lack."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .floats import raw_bytes, row_rms, unit_roundoff
from .rules import Budget, Codes, OneRounding, Oracles, Rule, TopK

LOG2_E = 1.4426950408889634


def diagnose(got: Tensor, oracles: Oracles, rule: Rule) -> str:
    """The first guess that fits, or an empty string."""
    if isinstance(rule, TopK):
        return "selection differs"
    if isinstance(rule, Codes) or not got.is_floating_point() or got.element_size() == 1:
        return _code_guess(got, oracles.contract)
    truth = oracles.semantic if isinstance(rule, Budget) else oracles.contract
    k = torch.where(got.isfinite(), got.to(torch.float64), 0.0)
    o = torch.where(truth.isfinite(), truth.to(torch.float64), 0.0)
    if not got.numel():
        return ""
    for guess in (_log_base, _constant_scale, _shifted, _rope_layout, _zero_rows):
        found = guess(k, o, unit_roundoff(got.dtype))
        if found:
            return found
    truncated = _truncated(got, oracles.contract)
    return truncated or _rounds_elsewhere(k, oracles, rule, got.dtype)


def unwritten(got: Tensor) -> str | None:
    """NaN elements are what fresh memory holds under the gate: never written, or a NaN of the candidate's own."""
    count = int(got.isnan().sum())
    if not count:
        return None
    return f"unwritten output (fresh memory holds NaN here) or a computed NaN: {count} of {got.numel()} elements"


def _close(a: Tensor, b: Tensor, u: float) -> bool:
    scale = b.abs().max().item()
    return scale > 0 and (a - b).abs().max().item() <= 16 * u * scale


def _log_base(k: Tensor, o: Tensor, u: float) -> str:
    nonzero = o.abs() > 1e-3
    if int(nonzero.sum()) < 2:
        return ""
    ratio = k[nonzero] / o[nonzero]
    for factor, text in (
        (LOG2_E, "base 2 where natural is declared"),
        (1 / LOG2_E, "natural where base 2 is declared"),
    ):
        if (ratio - factor).abs().max().item() < max(1e-5, 4 * u) * factor:
            return f"log base: the ratio is {factor:.6f} everywhere, {text}"
    return ""


def _constant_scale(k: Tensor, o: Tensor, u: float) -> str:
    weight = (o * o).sum().item()
    if weight == 0:
        return ""
    factor = (k * o).sum().item() / weight
    if abs(factor - 1) > 8 * u and _close(k, o * factor, u):
        return f"constant scale: every value is {factor:.6g} times the expected one"
    return ""


def _shifted(k: Tensor, o: Tensor, u: float) -> str:
    for axis in range(o.dim()):
        for step in (1, -1):
            if o.shape[axis] < 3:
                continue
            moved = o.roll(step, axis)
            inner = slice(1, None) if step == 1 else slice(None, -1)
            index = tuple(inner if i == axis else slice(None) for i in range(o.dim()))
            if not _close(k[index], o[index], u) and _close(k[index], moved[index], u):
                return f"shifted by {step} along axis {axis}"
    return ""


def _rope_layout(k: Tensor, o: Tensor, u: float) -> str:
    width = o.shape[-1] if o.dim() else 0
    for rotary in (width, 64, 32, 16, 8, 4):
        if rotary % 2 or rotary > width or rotary < 4:
            continue
        for name, span in (("last", slice(width - rotary, None)), ("first", slice(0, rotary))):
            a, b = k[..., span], o[..., span]
            half_split = torch.cat((b[..., 0::2], b[..., 1::2]), -1)
            interleaved = torch.stack((b[..., : rotary // 2], b[..., rotary // 2 :]), -1).flatten(-2)
            for layout, other in (("half-split", half_split), ("interleaved", interleaved)):
                if not _close(a, b, u) and _close(a, other, u):
                    return f"RoPE layout: the {name} {rotary} channels are in {layout} order"
    return ""


def _zero_rows(k: Tensor, o: Tensor, u: float) -> str:
    if o.dim() < 2:
        return ""
    rows = ((row_rms(k) == 0) & (row_rms(o) > 0)).squeeze(-1)
    count = int(rows.sum())
    return f"{count} of {rows.numel()} rows are zero" if count else ""


def _truncated(got: Tensor, contract: Tensor) -> str:
    if got.dtype != torch.bfloat16:
        return ""
    bits = contract.to(torch.float32).view(torch.int32)
    cut = (bits & -65536).view(torch.float32).to(torch.bfloat16)
    nearest = contract.to(torch.bfloat16)
    telling = cut != nearest
    if int(telling.sum()) >= 16 and (got[telling] == cut[telling]).to(torch.float64).mean().item() > 0.9:
        return "truncates where the contract rounds to nearest"
    return ""


def _rounds_elsewhere(k: Tensor, oracles: Oracles, rule: Rule, dtype: torch.dtype) -> str:
    contract = torch.where(oracles.contract.isfinite(), oracles.contract.to(torch.float64), 0.0)
    unit = unit_roundoff(dtype) * torch.maximum(contract.abs(), row_rms(contract)).clamp_min(1e-300)
    away = ((k - contract).abs() / unit).max().item()
    limit = 16.0 if isinstance(rule, OneRounding) else 64.0
    if away <= limit:
        return f"rounds elsewhere than the contract (at most {away:.3g} units from it)"
    return f"wrong: up to {away:.3g} units from the contract"


def _code_guess(got: Tensor, expected: Tensor) -> str:
    a, b = raw_bytes(got).to(torch.int64), raw_bytes(expected).to(torch.int64)
    if a.numel() == 0 or got.element_size() > 1:
        return ""
    guesses: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("nibbles swapped: element 0 stands in the high nibble", lambda: bool((((b & 15) << 4 | b >> 4) == a).all())),
        ("every byte is off by the same amount", lambda: bool(((a - b) == (a - b)[0]).all())),
        ("only the sign of zero differs", lambda: bool(((a ^ b) & 0x7F == 0).all() and (b[a != b] & 0x7F == 0).all())),
    )
    for text, fits in guesses:
        if fits():
            return text
    differ = int((a != b).sum())
    return f"{differ} of {a.numel()} bytes differ, by up to {int((a - b).abs().max())}"
