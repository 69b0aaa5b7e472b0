"""What the parent and a worker process say to each other."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .builds.spec import BuildCase
from .card import Inputs, Outputs
from .outcome import Outcome
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
class BuildRequest:
    """One kernel to build; answered by the compile worker."""

    component: str
    op: str
    case: BuildCase
    arch: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What happened. `status`: ok, violation, unsupported, error (raised), broken (cannot be called at all).

    `poisoned` says that the device of this process answers every further call with an error: the parent replaces it.
    """

    status: str
    message: str = ""
    trace: str = ""
    outputs: Outputs = field(default_factory=dict)
    finding: Finding | None = None
    poisoned: bool = False
    builds: tuple[Outcome, ...] = ()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # torch 2.13 cannot unpickle fp8 tensors; the storage's bytes keep strides and the poison between rows
        if not isinstance(value, Tensor):
            return NotImplemented
        stored = torch.tensor([], dtype=torch.uint8).set_(value.detach().cpu().untyped_storage())
        layout = (value.dtype, tuple(value.size()), value.stride(), value.storage_offset())
        return _tensor, (stored.numpy().tobytes(), *layout)


def _tensor(stored: bytes, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    flat = torch.frombuffer(bytearray(stored), dtype=torch.uint8) if stored else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).as_strided(size, stride, offset)


def pack(message: Request | BuildRequest | Reply) -> bytes:
    """The bytes of a message; tensors travel with their whole storage."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The message that `pack` wrote."""
    return pickle.loads(data)
