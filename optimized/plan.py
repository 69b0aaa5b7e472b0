"""Which function computes every operation of an engine. Nothing is chosen silently, and nothing falls back.

A component has one candidate for all its operations: `reference`, `vectorised` (torch) or `triton`. An operation that
needs another one is named by itself. `reference` names functions of the reference under CONTRACT: a plan made of them
is free of summation order, so it isolates the scheduling of an engine from its kernels, and one component from others.

The reference returns fp64 carriers of values that it has already rounded. A row says what its outputs are stored as,
and they are cast to that, which loses nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.csa2_config import CastPoints

Stored = torch.dtype | Callable[[Mapping[str, Any]], torch.dtype]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The functions that compute one operation, by candidate, as import strings."""

    candidates: Mapping[str, str]
    stored: tuple[Stored, ...] = (torch.bfloat16,)  # outputs of the reference; the last stands for all further ones
    definitional: bool = False  # its bits are part of the model: an input that all candidates share


def _rows(module: str, *names: str, fast: str = "triton", **given: Any) -> dict[str, Operation]:
    """Operations of `module` that have one fast candidate beside the reference, of the same name with a suffix."""
    component = given.pop("component", module)
    source = given.pop("source", module)
    return {
        f"{component}.{name}": Operation(
            candidates={
                "reference": f"deeptwin.reference.{source}:{name}",
                fast: f"deeptwin.optimized.{module}:{name.removesuffix('_')}_{fast}{'_' * name.endswith('_')}",
            },
            **given,
        )
        for name in names
    }


def _both(component: str, *names: str, source: str | None = None, **given: Any) -> dict[str, Operation]:
    """Operations that have a vectorised and a Triton candidate."""
    found = {}
    for name in names:
        rows = {"reference": f"deeptwin.reference.{source or component}:{name}"}
        rows |= {fast: f"deeptwin.optimized.{component}:{name}_{fast}" for fast in ("vectorised", "triton")}
        found[f"{component}.{name}"] = Operation(candidates=rows, **given)
    return found


def _attended(given: Mapping[str, Any]) -> torch.dtype:
    return torch.float32 if given["config"].cast is CastPoints.FUSED else torch.bfloat16


F32 = (torch.float32,)
OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "rope.table_of": Operation(candidates={"reference": "deeptwin.reference.rope:table_of"}, definitional=True),
        "engram.hash_layout": Operation(
            candidates={"reference": "deeptwin.reference.engram_vocab:hash_layout"}, definitional=True
        ),
    }
    | _rows("linear", "linear", "linear_codes", "linear_quant", "linear_grouped")
    | _rows("quant", "quantize")
    | _rows("rms_norm", "rms_norm")
    | _rows("router", "route", "route_hash", stored=F32)
    | _rows("moe", "moe")
    | _rows("block_ffn", "gated", "plain_experts", component="moe")
    | _rows("mhc", "mhc_expand", stored=(torch.bfloat16, torch.float32))
    | _rows("mhc", "mhc_mixes", stored=F32)
    | _rows("mhc", "mhc_apply", "mhc_post", "mhc_head", "mhc_tap")
    | _rows("engram", "engram_window", "engram_hash", "engram")
    | _rows("attention_v3", "mla_step_", component="mla", source="mla_step")
    | _rows("attention_v32", "dsa_step_", component="dsa", source="dsa_step")
    | _rows("attention_v4", "csa_step_", component="csa", source="csa")
    | _rows("attention_v4", "hca_step_", component="hca", source="hca")
    | _rows("attention_v41", "csa2_compress_", component="csa2", source="csa2_layer")
    | _rows("attention_v41", "csa2_compact", component="csa2", source="csa2")
    | _rows("attention_v41", "csa2_attention_", component="csa2", source="csa2", stored=(_attended,))
    | _rows("csa2", "csa2_output")
    | _rows("window", "ring_slots")
    | _rows("kv_cache", "store_records")
    | _rows("mtp", "mtp_join", "mtp_join_streams")
    | _rows("dspark", "draft_rows", "target_features", "main_keys", "draft_hidden")
    | _rows("dspark", "markov_step", "confidence", stored=F32)
    | _both("dspark_verify", "verify_rows", stored=F32)
    | _rows("dspark_verify", "verify_pack", stored=F32)
    | _rows("dspark_schedule", "survival_rates", stored=F32)
    | _rows("dspark_schedule", "choose_total", fast="vectorised", stored=F32)
    | _both("dspark_schedule", "allocate", stored=F32)
    | _both("sampling", "random_words", source="philox")
    | _rows("sampling", "uniforms", "subsequences", "sample_seeds", fast="vectorised", source="philox", stored=F32)
    | _both("sampling", "sample_probs", "sample_logits", "argmax_tokens", stored=F32)
    | _both("sampling", "keep_prefix", source="sampling_filter", stored=F32)
    | _rows("sampling", "mask_logits", "ranked", "smaller_mass", fast="vectorised", source="sampling_rows", stored=F32)
    | _rows("structured_output", "apply_masks", stored=F32)
)

SHARED = ("rope", "linear", "rms_norm", "router", "moe")
RUNTIME = ("sampling", "dspark_verify", "dspark_schedule", "structured_output")
GENERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "v3": (*SHARED, "mla", "mtp", *RUNTIME),
        "v32": (*SHARED, "dsa", "mtp", *RUNTIME),
        "v4": (*SHARED, "quant", "mhc", "csa", "hca", "mtp", *RUNTIME),
        "v41": (*SHARED, "quant", "mhc", "engram", "csa2", "window", "kv_cache", "dspark", *RUNTIME),
    }
)
# what a backend takes for a component, the first that an operation has; `rows` says which it was
BACKENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"reference": ("reference",), "vectorised": ("vectorised", "reference"), "triton": ("triton", "vectorised")}
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which candidate computes every component of an engine.

    `candidates` maps a component to a candidate, and an operation `component.name` to a candidate of its own or to
    `package.module:function` or `path/file.py:function`.
    """

    candidates: Mapping[str, str]
    _found: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, candidate in self.candidates.items():
            if "." in name:
                _expect_operation(name)
                self._spec(name)
            elif not _operations(name):
                raise ValueError(f"candidates: expected one of {', '.join(_components())}, got {name!r}{_near(name)}")
            elif not any(candidate in OPERATIONS[operation].candidates for operation in _operations(name)):
                known = sorted({row for operation in _operations(name) for row in OPERATIONS[operation].candidates})
                raise ValueError(f"candidates: expected {' or '.join(known)} for {name}, got {candidate!r}")

    def op(self, name: str) -> Callable[..., Any]:
        """The function that computes an operation, `rms_norm.rms_norm` for example; imported when first asked for.

        Raises:
            ValueError: there is no such operation, the plan has no candidate for it, or its function does not exist.
        """
        if name not in self._found:
            _expect_operation(name)
            spec = self._spec(name)
            function = _imported(name, spec)
            is_reference = spec.startswith("deeptwin.reference.")
            self._found[name] = _cast_to_storage(function, OPERATIONS[name].stored) if is_reference else function
        return self._found[name]

    def rows(self) -> list[tuple[str, str, str]]:
        """Operation, candidate and import string of everything that the plan can compute, in the table's order."""
        known = [name for name in OPERATIONS if name in self.candidates or _component(name) in self.candidates]
        return [(name, self._candidate(name), self._spec(name)) for name in known]

    def _candidate(self, name: str) -> str:
        if OPERATIONS[name].definitional:
            return "reference"
        given = self.candidates.get(name) or self.candidates.get(_component(name))
        if given is None:
            raise ValueError(f"candidates: expected one for {_component(name)}, got only {sorted(self.candidates)}")
        return "given" if ":" in given else given

    def _spec(self, name: str) -> str:
        given, rows = self.candidates.get(name, ""), OPERATIONS[name].candidates
        if ":" in given:
            return given
        candidate = self._candidate(name)
        if candidate not in rows:
            raise ValueError(f"candidates: expected {' or '.join(rows)} for {name}, got {candidate!r}")
        return rows[candidate]


def plan_of(generation: str, backend: str, overrides: Mapping[str, str] = MappingProxyType({})) -> Plan:
    """The complete plan of a generation: every component that its steps, its drafter and its sampler call.

    Raises:
        ValueError: no such generation or backend; an override names no component or operation of it, or no candidate;
            the backend has nothing for an operation.
    """
    if generation not in GENERATIONS:
        raise ValueError(f"generation: expected {', '.join(GENERATIONS)}, got {generation!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected {', '.join(BACKENDS)}, got {backend!r}")
    candidates: dict[str, str] = {}
    for component in GENERATIONS[generation]:
        candidates[component] = _preferred(component, backend)
        for name in _operations(component):
            rows = OPERATIONS[name].candidates
            if candidates[component] not in rows and not OPERATIONS[name].definitional:
                candidates[name] = _first(name, backend)
    for name in overrides:
        if (_component(name) if "." in name else name) not in candidates:
            raise ValueError(f"overrides: expected parts of {generation}, got {name!r}{_near(name)}")
        if "." not in name:  # a component's candidate is meant for all of its operations
            candidates = {key: value for key, value in candidates.items() if _component(key) != name or "." not in key}
    return Plan(candidates=candidates | dict(overrides))


def _preferred(component: str, backend: str) -> str:
    """The candidate of most weight that any operation of the component has."""
    own = [OPERATIONS[name].candidates for name in _operations(component) if not OPERATIONS[name].definitional]
    for candidate in BACKENDS[backend]:
        if any(candidate in rows for rows in own):
            return candidate
    if own:
        raise ValueError(f"backend: expected a candidate of {component} for {backend}, got none")
    return "reference"


def _first(name: str, backend: str) -> str:
    for candidate in BACKENDS[backend]:
        if candidate in OPERATIONS[name].candidates:
            return candidate
    raise ValueError(f"backend: expected a candidate of {name} for {backend}, got {list(OPERATIONS[name].candidates)}")


def _component(name: str) -> str:
    return name.partition(".")[0]


def _components() -> list[str]:
    return list(dict.fromkeys(_component(name) for name in OPERATIONS))


def _operations(component: str) -> list[str]:
    return [name for name in OPERATIONS if _component(name) == component]


def _expect_operation(name: str) -> None:
    if name not in OPERATIONS:
        own = _operations(_component(name)) or _components()
        raise ValueError(f"name: expected one of {', '.join(own)}, got {name!r}{_near(name)}")


def _near(name: str) -> str:
    close = difflib.get_close_matches(name, [*OPERATIONS, *_components()], n=1)
    return f" (meant {close[0]!r}?)" if close else ""


def _imported(name: str, spec: str) -> Callable[..., Any]:
    module_name, _, function = spec.rpartition(":")
    try:
        module = _from_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{name}: expected {spec} to import, got {error}") from error
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{name}: expected a function {function!r} in {module_name}, got {found!r}")
    return found


def _from_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise ImportError(f"no file {path}")
    found = importlib.util.spec_from_file_location(f"deeptwin_plan_{abs(hash(path)):x}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _cast_to_storage(function: Callable[..., Any], stored: tuple[Stored, ...]) -> Callable[..., Any]:
    """The reference's function with fp64 outputs in the dtype that they were rounded to."""

    @wraps(function)
    def cast(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        if isinstance(found, Tensor):
            return _narrow(found, stored[0], named)
        if isinstance(found, tuple):
            last = len(stored) - 1
            return tuple(_narrow(x, stored[min(i, last)], named) for i, x in enumerate(found))
        return found

    return cast


def _narrow(x: Any, stored: Stored, named: Mapping[str, Any]) -> Any:
    if not isinstance(x, Tensor) or x.dtype != torch.float64:
        return x
    dtype = named.get("dtype") or (stored if isinstance(stored, torch.dtype) else stored(named))
    return x.to(dtype)
