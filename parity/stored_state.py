"""Judges the caches of a stack by what their bytes mean: records and rings as values, slots as written or not.

A last bit of a hidden state moves a code here and there, and in every later layer some more. So codes are not counted:
each part of a page or of a state is decoded and judged as any other output, with RIVAL's distance as the yardstick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.cache_plan import Piece, page_pieces, state_pieces
from deeptwin.reference.config import INDEX_FP4, KV_FP8, PageLayout, RecordFormat
from deeptwin.reference.csa2_config import Csa2Config
from deeptwin.reference.kv_cache import unpack_records
from deeptwin.reference.numerics import SEMANTIC

from .outcome import Worst
from .rules import Budget, Close, Judgement, Oracles, Rule


@dataclass(frozen=True, kw_only=True)
class Values:
    """Oracles of one part, decoded."""

    semantic: Tensor
    contract: Tensor
    rival: Tensor
    marks: list[tuple[str, Tensor]]
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The bytes of all pages or states after a run: written slots by value, everything else untouched.

    `before` names the field of the argument `caches` that holds the bytes before the call; `limits` has a rule for
    each kind of part (index, main, ring, compressor), applied to every layer's part alone.
    """

    before: str
    limits: Mapping[str, Rule]

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """The first part whose slots differ from those of CONTRACT, or the part that uses most of its budget."""
        config = oracles.arguments["config"]
        before, contract = getattr(oracles.arguments["caches"], self.before), oracles.contract.to(torch.uint8)
        untouched = torch.ones(got.shape[1], dtype=torch.bool)
        metrics: dict[str, float] = {}
        used, worst, message = 0.0, None, ""
        for piece in page_pieces(config.plan) if self.before == "page_pq" else state_pieces(config.plan):
            untouched[piece.offset : piece.offset + piece.size] = False
            name = f"{piece.name} of layer {piece.layer}"
            old, want, have = (slots(block, piece, config) for block in (before, contract, got))
            written = (want != old).any(1)
            wrong = ((have != old).any(1) != written).nonzero()[:, 0]
            if len(wrong):
                slot = int(wrong[0])
                return _refused(f"{name}: {len(wrong)} slots written or left differ from CONTRACT's", slot, written)
            if not written.any():
                continue
            honest = (slots(x.to(torch.uint8), piece, config)[written] for x in (oracles.semantic, oracles.rival))
            semantic, rival = (decoded(x, piece, config).to(torch.float64) for x in honest)
            views = Values(
                semantic=semantic,
                contract=decoded(want[written], piece, config).to(torch.float64),
                rival=rival,
                marks=[],
                arguments=oracles.arguments,
            )
            part = self.limits[piece.name].judge(decoded(have[written], piece, config), views)
            for key, value in part.metrics.items():
                metrics[f"{piece.name}_{key}"] = max(value, metrics.get(f"{piece.name}_{key}", 0.0))
            if not part.used <= used:  # a NaN counts as more
                used, worst, message = part.used, part.worst, f"{name}: {part.message}"
            if not part.ok:
                return Judgement(ok=False, used=part.used, message=message, worst=part.worst, metrics=metrics)
        if (got[:, untouched] != before[:, untouched]).any():
            return _refused("bytes between the parts were written", 0, torch.zeros(1, dtype=torch.bool))
        return Judgement(ok=True, used=used, message=message, worst=worst, metrics=metrics)


def slots(block_pq: Tensor, piece: Piece, config: Csa2Config) -> Tensor:
    """The bytes of every slot of a part, page by page: its record, or a row of a compressor's ring."""
    part = block_pq[:, piece.offset : piece.offset + piece.size].cpu()
    fmt = _format(piece, config)
    if fmt is None:
        return part.reshape(-1, 4 * config.head_dim)
    if piece.name == "index" or config.layout is PageLayout.SECTIONED:
        codes, sf = part.split([piece.entries * fmt.data_bytes, piece.size - piece.entries * fmt.data_bytes], 1)
        return torch.cat([codes.reshape(-1, fmt.data_bytes), sf.reshape(-1, fmt.record_bytes - fmt.data_bytes)], 1)
    return part.reshape(-1, fmt.record_bytes)


def decoded(slot_yw: Tensor, piece: Piece, config: Csa2Config) -> Tensor:
    """The values of slots, in fp32, which holds every record exactly."""
    if _format(piece, config) is None:
        return slot_yw.contiguous().view(torch.float32)
    return unpack_records(slot_yw.contiguous(), num=SEMANTIC).to(torch.float32)


def _format(piece: Piece, config: Csa2Config) -> RecordFormat | None:
    return {"index": INDEX_FP4, "main": config.main, "ring": KV_FP8, "compressor": None}[piece.name]


def _refused(message: str, slot: int, written: Tensor) -> Judgement:
    state = "written" if written[slot] else "untouched"
    other = "untouched" if written[slot] else "written"
    return Judgement(
        ok=False,
        used=float("inf"),
        message=message,
        worst=Worst(index=(slot,), got=other, expected=state),
    )


def _limits(kind: str, bits: int, *, row: float, total: float, bias: float, element: float) -> Budget:
    """A budget in units of numbers of `bits` significant bits, for values that are held in fp32."""
    wider = 2.0 ** (24 - bits)
    return Budget(
        kind=kind,
        floor=0.25 * wider,
        element_factor=element,
        element_slack=element * wider,
        row=row,
        total=total,
        bias=bias * wider,
        bias_t=0.01,
    )


# quantised behind stacks of one to six layers; `evidence/csa2-pages.json` and `csa2-states.json` say how much is used
CSA2_STORED = {
    "index": _limits("e2m1 index records", 2, row=5.0, total=3.0, bias=0.5, element=2.5),
    "main": _limits("e2m1 main records", 2, row=4.0, total=2.0, bias=0.5, element=2.5),
    "ring": _limits("e4m3 window records", 4, row=6.0, total=3.0, bias=0.5, element=2.5),
    "compressor": _limits("fp32 ring of bf16 products", 8, row=5.0, total=3.0, bias=0.5, element=2.5),
}

# a layer that picked another entry at a near tie moves all that is stored behind it: slots are exact, values alike
CSA2_STORED_FREE = dict.fromkeys(CSA2_STORED, Close(rtol=1.0))
