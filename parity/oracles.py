"""The oracles of one set of inputs, each computed once when first asked for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics

from .card import Inputs, Op, Output, Outputs, resolve


class BadCase(Exception):
    """The case itself breaks the contract: the reference refuses its inputs."""


def _fresh(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@dataclass
class OracleSet:
    """SEMANTIC, CONTRACT (with its marks) and RIVAL outputs of an operation for one set of inputs."""

    op: Op
    inputs: Inputs

    def run(self, num: Numerics) -> Outputs:
        """The reference under `num`, on copies of the inputs.

        Raises:
            BadCase: the reference refuses the inputs.
        """
        function = resolve(self.op.reference)
        arguments = {name: _fresh(value) for name, value in self.inputs.items()}
        if "num" in inspect.signature(function).parameters:
            arguments["num"] = num
        try:
            result = function(**arguments)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise BadCase(f"the reference refuses this case: {error}") from error
        values = result if isinstance(result, tuple) else (result,)
        if self.op.writes is not None:
            values = (arguments[self.op.writes], *values[len(values) - len(self.op.outputs) + 1 :])
        return dict(zip((output.name for output in self.op.outputs), values, strict=True))

    @cached_property
    def semantic(self) -> Outputs:
        """What the model means."""
        return self.run(SEMANTIC)

    @cached_property
    def rival(self) -> Outputs:
        """What honest arithmetic produces."""
        return self.run(RIVAL)

    @cached_property
    def _contract(self) -> tuple[Outputs, list[tuple[str, Tensor]]]:
        marks: list[tuple[str, Tensor]] = []
        outputs = self.run(CONTRACT.observed(lambda name, x: marks.append((name, x))))
        return outputs, marks

    @property
    def contract(self) -> Outputs:
        """What a correct kernel produces."""
        return self._contract[0]

    def dtype(self, output: Output) -> torch.dtype:
        """The declared dtype of an output: its own, or the `dtype` argument of the case."""
        return output.dtype if output.dtype is not None else self.inputs["dtype"]

    def of(self, output: Output) -> OutputOracles:
        """The oracles of one output."""
        return OutputOracles(self, output.name)


@dataclass
class OutputOracles:
    """View of an `OracleSet` on one output (the `Oracles` protocol of the rules)."""

    all: OracleSet
    name: str

    @property
    def semantic(self) -> Tensor:
        return self.all.semantic[self.name]

    @property
    def contract(self) -> Tensor:
        return self.all.contract[self.name]

    @property
    def rival(self) -> Tensor:
        return self.all.rival[self.name]

    @property
    def marks(self) -> list[tuple[str, Tensor]]:
        return self.all._contract[1]

    @property
    def arguments(self) -> dict[str, Any]:
        return self.all.inputs
