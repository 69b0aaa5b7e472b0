"""Calls a candidate on fresh, guarded memory and says what it did to it.

Every input tensor is copied, storage and strides alike, into a buffer with sentinel bytes on both sides (0xFF: NaN
for whoever reads over the edge). After the call the inputs and their surroundings must be unchanged, and outputs
must be new tensors. What a clean result does not prove: a write far outside the guards goes unnoticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .card import Inputs, Op, Output, Outputs, resolve
from .floats import same_bytes

GUARD_BYTES = 512


class ContractViolation(Exception):
    """The candidate broke a rule of the call itself (shape, dtype, device, aliasing, foreign memory)."""


class SignatureError(Exception):
    """The candidate cannot be called like the reference."""


@dataclass
class GuardedTensor:
    """A copy of a tensor between sentinel bytes, with a snapshot to compare with afterwards."""

    name: str
    view: Tensor
    buffer: Tensor
    snapshot: Tensor

    @staticmethod
    def of(name: str, source: Tensor, device: str) -> GuardedTensor:
        """Copy the storage of `source` (gaps of a strided view included) to guarded memory on `device`."""
        size = source.untyped_storage().nbytes()
        buffer = torch.full((size + 2 * GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=device)
        stored = torch.tensor([], dtype=torch.uint8).set_(source.cpu().untyped_storage())
        buffer[GUARD_BYTES : GUARD_BYTES + size] = stored.to(device)
        whole = buffer[GUARD_BYTES : GUARD_BYTES + size].view(source.dtype)
        view = whole.as_strided(source.size(), source.stride(), whole.storage_offset() + source.storage_offset())
        return GuardedTensor(name, view, buffer, buffer.clone())

    @staticmethod
    def poisoned_like(name: str, like: Tensor, device: str) -> GuardedTensor:
        """A guarded output buffer with the shape and dtype of `like`, every byte 0xFF."""
        blank = torch.empty(like.shape, dtype=like.dtype)
        torch.tensor([], dtype=torch.uint8).set_(blank.untyped_storage()).fill_(0xFF)
        return GuardedTensor.of(name, blank, device)

    def changed_inside(self) -> bool:
        """Whether the tensor's own storage differs from the snapshot."""
        inner = slice(GUARD_BYTES, self.buffer.numel() - GUARD_BYTES)
        return not torch.equal(self.buffer[inner], self.snapshot[inner])

    def changed_between(self) -> bool:
        """Whether a byte of the storage that belongs to no element of the view differs from the snapshot."""
        size = self.view.element_size()
        whole = self.buffer[GUARD_BYTES : self.buffer.numel() - GUARD_BYTES]
        owned = torch.zeros(whole.numel() // size, dtype=torch.bool, device=whole.device)
        offset = self.view.storage_offset() - GUARD_BYTES // size
        owned.as_strided(self.view.size(), self.view.stride(), offset).fill_(True)
        moved = (whole != self.snapshot[GUARD_BYTES : self.buffer.numel() - GUARD_BYTES]).reshape(-1, size).any(-1)
        return bool((moved & ~owned).any())

    def changed_outside(self) -> bool:
        """Whether a sentinel byte around the tensor differs from the snapshot."""
        end = self.buffer.numel() - GUARD_BYTES
        head = torch.equal(self.buffer[:GUARD_BYTES], self.snapshot[:GUARD_BYTES])
        return not (head and torch.equal(self.buffer[end:], self.snapshot[end:]))


class Call:
    """A candidate from inputs to named outputs on the CPU; raises ContractViolation when it misbehaves."""

    def __init__(self, function: Callable[..., Any], op: Op, device: str = "cpu") -> None:
        self.function = function
        self.op = op
        self.device = device
        self.parameters = accepted_parameters(function, op)
        self.is_reference = function is resolve(op.reference)
        self.returned = [output.name for output in op.outputs][0 if op.writes is None else 1 :]
        self.has_out = "out" in self.parameters and bool(self.returned)

    def __call__(self, inputs: Inputs, *, out_like: Outputs | None = None) -> Outputs:
        """Run once. With `out_like` (outputs of an earlier call) the results go to guarded, poisoned buffers."""
        guarded: list[GuardedTensor] = []
        taken = taken_arguments(inputs, self.parameters)
        arguments = {name: self._guard(name, value, guarded) for name, value in taken.items()}
        buffers: list[GuardedTensor] = []
        if out_like is not None and self.has_out:
            buffers = [GuardedTensor.poisoned_like(name, out_like[name], self.device) for name in self.returned]
            views = tuple(buffer.view for buffer in buffers)
            arguments["out"] = views if len(views) > 1 else views[0]
        result = self.function(**arguments)
        if self.device != "cpu":
            torch.cuda.synchronize()
        self._check_memory(guarded, buffers)
        return self._named(result, inputs, guarded, buffers)

    def _guard(self, name: str, value: Any, guarded: list[GuardedTensor]) -> Any:
        if isinstance(value, Tensor):
            guarded.append(GuardedTensor.of(name, value, self.device))
            return guarded[-1].view
        if isinstance(value, tuple):
            return tuple(self._guard(f"{name}[{i}]", part, guarded) for i, part in enumerate(value))
        if is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: getattr(value, f.name) for f in fields(value)}
            if any(isinstance(part, Tensor) for part in parts.values()):
                return replace(value, **{k: self._guard(f"{name}.{k}", v, guarded) for k, v in parts.items()})
        return value

    def _check_memory(self, guarded: list[GuardedTensor], buffers: list[GuardedTensor]) -> None:
        for tensor in guarded:
            if tensor.changed_outside():
                raise ContractViolation(f"{tensor.name}: wrote outside this input")
            if tensor.changed_inside() and tensor.name != self.op.writes:
                raise ContractViolation(f"{tensor.name}: changed this input, which is read-only")
            if tensor.name == self.op.writes and tensor.changed_between():
                raise ContractViolation(f"{tensor.name}: wrote between its rows or pages")
        for tensor in buffers:
            if tensor.changed_outside():
                raise ContractViolation(f"out: wrote outside the buffer of {tensor.name}")

    def _named(
        self, result: Any, arguments: Inputs, guarded: list[GuardedTensor], buffers: list[GuardedTensor]
    ) -> Outputs:
        names = [output.name for output in self.op.outputs]
        values = result if isinstance(result, tuple) else (result,)
        if self.op.writes is not None:
            written = next(tensor.view for tensor in guarded if tensor.name == self.op.writes)
            values = (written, *values[len(values) - len(self.returned) :])
        if len(values) != len(names):
            raise ContractViolation(f"returned {len(values)} values, expected {len(names)}: {', '.join(names)}")
        owned = {tensor.buffer.untyped_storage().data_ptr(): tensor.name for tensor in guarded}
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, Tensor):
                raise ContractViolation(f"{name}: expected a tensor, got {type(value).__name__}")
            if value.device.type != self.device:
                raise ContractViolation(f"{name}: expected device {self.device}, got {value.device}")
            source = owned.get(value.untyped_storage().data_ptr()) if value.numel() else None
            if source is not None and name in self.returned:
                raise ContractViolation(f"{name}: is a view of the input {source}")
        outputs = {name: value.detach() for name, value in zip(names, values, strict=True)}
        if self.is_reference:
            outputs = {o.name: _stored(outputs[o.name], o, arguments) for o in self.op.outputs}
        for buffer in buffers:
            if not same_bytes(outputs[buffer.name], buffer.view):
                raise ContractViolation(f"out: the returned {buffer.name} is not what was written to the buffer")
        return {name: torch.empty_like(value, device="cpu").copy_(value) for name, value in outputs.items()}


def _stored(value: Tensor, output: Output, arguments: Inputs) -> Tensor:
    # the reference returns its carrier dtype; as a candidate it stores what the card declares
    return value.to(output.dtype if output.dtype is not None else arguments["dtype"])


def taken_arguments(inputs: Inputs, parameters: Collection[str]) -> Inputs:
    """What a candidate is called with: all but a `dtype` that it does not take.

    Raises:
        NotImplementedError: it takes none, and another than bf16 is asked for.
    """
    if "dtype" not in inputs or "dtype" in parameters:
        return inputs
    if inputs["dtype"] is not torch.bfloat16:
        raise NotImplementedError(f"dtype: the candidate has no dtype parameter, the case needs {inputs['dtype']}")
    return {name: value for name, value in inputs.items() if name != "dtype"}


def accepted_parameters(function: Callable[..., Any], op: Op) -> set[str]:
    """Names a candidate accepts; SignatureError unless it takes the reference's parameters (style rule C3)."""
    reference = inspect.signature(resolve(op.reference)).parameters
    expected = [name for name in reference if name not in ("num", "tap")]
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise SignatureError(f"signature: cannot be read: {error}") from error
    call = f"{op.name}({', '.join(expected)})"
    missing = [name for name in expected if name not in parameters and name != "dtype"]
    if missing:
        raise SignatureError(f"signature: missing parameter {', '.join(missing)}; expected {call}")
    for name, parameter in _extra(parameters.items(), expected):
        if parameter.default is inspect.Parameter.empty:
            raise SignatureError(f"signature: extra parameter {name} needs a default; expected {call}")
    return set(parameters)


def _extra(parameters: Any, expected: list[str]) -> Iterator[tuple[str, inspect.Parameter]]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in parameters:
        if name not in expected and parameter.kind not in variadic:
            yield name, parameter
