"""What a component card is made of: operations, outputs with their rules, relations, candidates, peers, mutants.

A card (`parity/cards/<component>.py`) holds one literal `CARD`. It is the only place that knows how a component is
checked; the command line, pytest, CI and the support matrix are generated from cards. Functions of other rooms are
named by import strings (`package.module:function`) and imported in a worker process only.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from .builds.spec import BuildCase
from .rules import Rule

Inputs = dict[str, Any]  # keyword arguments of the reference function, without `num`
Outputs = dict[str, torch.Tensor]

PROMISES = ("bit-equal", "within contract", "different")
REGIMES = ("normal", "peaked", "flat", "mean1")  # every card draws them: the rules are blind to faults without them


class Case(Protocol):
    """One drawn input: a frozen dataclass whose `id` is readable and unique within its operation."""

    @property
    def id(self) -> str: ...

    @property
    def regime(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output of an operation: its name, dtype (`None`: the `dtype` argument of the case) and rule by dtype."""

    name: str
    rule: Rule | Mapping[torch.dtype, Rule]
    dtype: torch.dtype | None = None

    def rule_for(self, dtype: torch.dtype) -> Rule:
        """The rule that judges this output when it is stored in `dtype`."""
        return self.rule[dtype] if isinstance(self.rule, Mapping) else self.rule


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A property that must hold between calls, with its axis and what a correct kernel promises on it.

    `hook` is what the named relation of `parity/relations.py` needs to know about this operation, for example how
    to permute its pages. With `promise="bit-equal"` one differing byte fails; with `"within contract"` the variant
    is judged by the rules of the outputs; `"different"` is for what must not be equal.
    """

    name: str
    axis: str
    promise: str = "bit-equal"
    hook: Callable[..., Any] | None = None
    partner: str | None = None  # another operation of the card, called with the candidate of the same name
    only: Callable[[Any], bool] = lambda case: True

    def __post_init__(self) -> None:
        if self.promise not in PROMISES:
            raise ValueError(f"promise: expected one of {PROMISES}, got {self.promise!r}")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An implementation to judge. `declines` gives the reason why a case is outside its declared limits, or None.

    A `required` row must run on every case that it does not decline; a function that a user names may say
    NotImplementedError for what it does not do. `interpreter_declines` adds cases that take an interpreter too long,
    `lowered_declines` cases that say nothing about the Ascend lowering, which runs on the CPU in plain loops.
    `unpromised` names outputs and relations that a vendor does not promise, with the reason: where they do not hold
    the verdict is a known failure. `rules` replaces the rule of an output where the row declares another arithmetic.
    """

    name: str
    function: str
    archs: tuple[str, ...] = ("cpu", "sm90", "sm100")
    needs: tuple[str, ...] = ()
    declines: Callable[[Any], str | None] = lambda case: None
    interpreter_declines: Callable[[Any], str | None] = lambda case: None
    lowered_declines: Callable[[Any], str | None] = lambda case: None
    unpromised: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    required: bool = True

    def refusal(self, case: Any, device: str) -> str | None:
        """Why the row does not run a case on a device, or None."""
        return self.declines(case) or (self.interpreter_declines(case) if device == "cpu" else None)


@dataclass(frozen=True, kw_only=True)
class Sm90Candidate(Candidate):
    """A row for SM90 alone, by a package that not every machine has."""

    archs: tuple[str, ...] = ("sm90",)
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An independent implementation by others that checks the reference itself.

    It is called like a candidate on the cases that `only` admits; `rules` may replace the rule of an output where
    the peer promises something else, and `explains` says why.
    """

    name: str
    function: str
    needs: tuple[str, ...]
    explains: str
    rules: Mapping[str, Rule] = field(default_factory=dict)
    only: Callable[[Any], bool] = lambda case: True


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A named wrong variant, what is wrong with it, and the entry it stands for.

    The entry is one of the fault catalogue (U…), or the parity rule (R…) that a fault without an entry breaks. With an
    `axis` only the relation of that name counts as having caught it, on the cases that `only` admits.
    """

    name: str
    function: str
    entry: str
    fault: str
    axis: str = ""
    only: Callable[[Any], bool] = lambda case: True


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """A change that no input can show, with the reason; listed so that nobody adds it as a mutant."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation of a component: its reference function and everything that checks it."""

    name: str
    reference: str
    outputs: tuple[Output, ...]
    cases: Callable[[bool], Sequence[Any]]  # argument: full
    draw: Callable[[Any, np.random.Generator], Inputs]
    rows: Mapping[str, int]  # batch axis of every input that has one
    out_rows: Mapping[str, int]  # batch axis of every output
    tile: int = 1  # rows per program of the shipped launch config; edges of R8
    writes: str | None = None  # parameter written in place: the first output; the others are the last values returned
    relations: tuple[Relation, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    builds: tuple[BuildCase, ...] = ()  # what every kernel behind the candidates is built as, without a device
    peers: tuple[Peer, ...] = ()
    mutants: tuple[Mutant, ...] = ()
    controls: tuple[Candidate, ...] = ()  # right variants of the mutants' base: each must pass
    golden: Callable[[], Sequence[Any]] = tuple
    judges_reference: bool = True  # False: the reference is the truth by its form, and too slow for relations

    def case(self, case_id: str, *, full: bool = True) -> Any:
        """The case named `case_id`; KeyError if there is none."""
        for case in self.cases(full):
            if case.id == case_id:
                return case
        raise KeyError(case_id)


@dataclass(frozen=True, kw_only=True)
class Card:
    """Everything the gate knows about one component."""

    component: str
    summary: str
    contract: Mapping[str, str]
    ops: tuple[Op, ...]
    equivalents: tuple[Equivalent, ...] = ()
    facts: Callable[[], Mapping[str, str]] = dict  # computed figures that `show` prints

    @cached_property
    def op_names(self) -> tuple[str, ...]:
        """Operation names in card order; the first is the default."""
        return tuple(op.name for op in self.ops)

    def op(self, name: str) -> Op:
        """The operation called `name`; KeyError if the card has none."""
        for op in self.ops:
            if op.name == name:
                return op
        raise KeyError(name)


def variants(module: str) -> tuple[Callable[[str, str, str], Mutant], Callable[[str], Candidate]]:
    """What makes the rows of `parity/mutants/<module>.py`: mutant(function, entry, fault) and control(function)."""
    path = f"deeptwin.parity.mutants.{module}"

    def mutant(function: str, entry: str, fault: str) -> Mutant:
        return Mutant(name=function, function=f"{path}:{function}", entry=entry, fault=fault)

    def control(function: str) -> Candidate:
        return Candidate(name=function, function=f"{path}:{function}")

    return mutant, control


def resolve(spec: str) -> Callable[..., Any]:
    """The function that an import string `package.module:function` names."""
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)


def case_rng(component: str, op: str, case_id: str, seed: int) -> np.random.Generator:
    """The generator of one case: the SHA-256 of its id and the run's seed, so every machine draws the same bytes."""
    digest = hashlib.sha256(f"{component}/{op}/{case_id}#{seed}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "little")))


def card_names() -> tuple[str, ...]:
    """Names of all components that have a card, in alphabetical order."""
    from . import cards

    return tuple(sorted(module.name for module in pkgutil.iter_modules(cards.__path__)))


def load_card(component: str) -> Card:
    """The card of `component`; ModuleNotFoundError if there is none."""
    return importlib.import_module(f"deeptwin.parity.cards.{component}").CARD
