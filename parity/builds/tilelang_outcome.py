"""What a build of a TileLang program is judged by, whatever the target: faults found, failure expected, tiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..card import Card, Op
from ..outcome import Outcome, Status
from .spec import BuildCase, Expect, verdict
from .tilelang_lower import Product, Refused

Measured = tuple[Mapping[str, float], Sequence[str]]  # numbers of a build, and its faults
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "uint8": 8}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Names of a build, to write outcomes with."""

    card: Card
    op: Op
    case: BuildCase
    arch: str
    check: str

    def outcome(
        self,
        status: Status,
        message: str = "",
        *,
        metrics: Mapping[str, float] | None = None,
        seconds: float = 0.0,
        required: bool = True,
    ) -> Outcome:
        """The record; the part of a message before the first colon says what is wrong."""
        wrong = status in (Status.MISMATCH, Status.ERROR)
        return Outcome(
            component=self.card.component,
            op=self.op.name,
            candidate=self.case.dsl,
            case=self.case.name,
            check=self.check,
            status=status,
            message=message,
            diagnosis=message.partition(":")[0] if wrong else "",
            metrics=dict(metrics or {}),
            seconds=seconds,
            required=required,
            command=f"deeptwin compile --arch {self.arch} --component {self.card.component}",
        )


def judge(row: Row, expect: Expect, built: Status, measure: Callable[[], Measured]) -> Outcome:
    """Build with `measure` and compare with the card; without a fault the status is `built`."""
    started = time.monotonic()
    metrics: dict[str, float] = {}
    try:
        numbers, faults = measure()
        metrics, failure = dict(numbers), "; ".join(faults)
    except Refused as error:
        failure = str(error)
    seconds = time.monotonic() - started
    metrics["seconds"] = round(seconds, 2)
    status, message = verdict(failure, expect, built)
    return row.outcome(status, message, metrics=metrics, seconds=seconds)


def tile_faults(products: Sequence[Product], *, npu: bool) -> list[str]:
    """Tiles that are known to lower and to compute wrongly.

    Source:
        fault catalogue: U80 (tilelang#2381), U81 (tilelang#2593), U84 (pto-isa#214)
    """
    found = []
    for product in dict.fromkeys(products):
        tile = f"{product.m} x {product.n} x {product.k} of {product.dtype}"
        step = 256 // BITS.get(product.dtype, 8)
        if product.k % step:
            found.append(
                f"product tile: {tile}, its last {product.k % step} of k are dropped: no multiple of {step} (U80)"
            )
        if product.n % 16 == 8:
            found.append(f"product tile: {tile}, its n is 8 modulo 16, which is computed wrongly (U81)")
        if npu and product.dtype in ("int8", "uint8"):
            found.append(f"product tile: {tile}, 8-bit integer products come out wrong on this chip (U84)")
    return found
