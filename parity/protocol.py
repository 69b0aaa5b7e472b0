"""What the parent and a worker process say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from .card import Inputs, Outputs
from .relations import Finding


@dataclass(frozen=True, kw_only=True)
class Request:
    """One thing to do with a candidate: `task` is "outputs" or the name of a relation of the operation."""

    component: str
    op: str
    candidate: str
    inputs: Inputs
    task: str
    case_id: str
    seed: int
    full: bool = False
    device: str = "cpu"
    partner: str | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What happened. `status`: ok, violation, unsupported, error (raised), broken (cannot be called at all)."""

    status: str
    message: str = ""
    trace: str = ""
    outputs: Outputs = field(default_factory=dict)
    finding: Finding | None = None
