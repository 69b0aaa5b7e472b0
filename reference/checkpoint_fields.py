"""Reading JSON objects whose mistakes are named: a key with its path, what was expected, what was got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import MscaleRule, YarnConfig

MISSING = object()
# table of a part: field of its dataclass -> key of the file, kind of the value
Table = Mapping[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The keys of one JSON object; `path` is what messages put before them."""

    values: Mapping[str, Any]
    path: str = ""

    def take(self, key: str, kind: str, default: Any = MISSING) -> Any:
        """The value of a key: an `int`, a `float` (whole numbers too), a tuple of `ints`, a `text`, or an `object`.

        Raises:
            ValueError: the key is missing and has no default, or its value is of another kind.
        """
        value = self.values.get(key, MISSING)
        if value is MISSING or (value is None and default is not MISSING):
            if default is MISSING:
                raise ValueError(f"{self.path}{key}: expected {KINDS[kind]}, got no such key")
            return default
        if not _fits(value, kind):
            raise ValueError(f"{self.path}{key}: expected {KINDS[kind]}, got {value!r}")
        if kind == "object":
            return Fields(values=value, path=f"{self.path}{key}.")
        return float(value) if kind == "float" else tuple(value) if kind == "ints" else value

    def expect(self, key: str, *allowed: Any, optional: bool = True) -> None:
        """Refuse a key with another value than those `allowed`; a missing one only where it is not optional.

        Raises:
            ValueError: another value, or none.
        """
        value = self.values.get(key, MISSING)
        if value is MISSING and optional:
            return
        # True is 1 in Python, but no number in JSON
        if not any(value == one and type(value) is type(one) for one in allowed):
            got = "no such key" if value is MISSING else repr(value)
            raise ValueError(f"{self.path}{key}: expected {' or '.join(map(repr, allowed))}, got {got}")

    def decline(self, key: str, only: Any, why: str) -> None:
        """Refuse a key with another value than `only`, which a model may have and this room has not.

        Raises:
            NotImplementedError: another value.
        """
        value = self.values.get(key, only)
        if value != only:
            raise NotImplementedError(f"{self.path}{key}: expected {only!r}, got {value!r}: {why}")

    def part(self, table: Table) -> dict[str, Any]:
        """The fields of a dataclass, by a table."""
        return {field: self.take(key, kind) for field, (key, kind) in table.items()}


KINDS = {
    "int": "a whole number",
    "float": "a number",
    "ints": "a list of whole numbers",
    "text": "a string",
    "texts": "a list of strings",
    "object": "an object",
}


def _fits(value: Any, kind: str) -> bool:
    whole = type(value) is int
    if kind == "ints":
        return isinstance(value, list) and all(type(one) is int for one in value)
    if kind == "texts":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    return {
        "int": whole,
        "float": whole or isinstance(value, float),
        "text": isinstance(value, str),
        "object": isinstance(value, Mapping),
    }[kind]


def written(part: Any, table: Table) -> dict[str, Any]:
    """The keys of a part, by the table that reads them."""
    found = {key: getattr(part, field) for field, (key, _) in table.items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def read_yarn(fields: Fields) -> YarnConfig | None:
    """YaRN as `rope_scaling` says it, or None for the plain table.

    Raises:
        ValueError: another kind of table; a number is missing.
    """
    kind = fields.values.get("rope_type", fields.values.get("type"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"{fields.path}type: expected 'yarn' or 'default', got {kind!r}")
    fields.expect("attention_factor", 1.0, 1)
    return YarnConfig(
        factor=fields.take("factor", "float"),
        original_length=fields.take("original_max_position_embeddings", "int"),
        beta_fast=fields.take("beta_fast", "float", 32.0),
        beta_slow=fields.take("beta_slow", "float", 1.0),
        mscale=fields.take("mscale", "float", 0.0),
        mscale_all_dim=fields.take("mscale_all_dim", "float", 0.0),
        mscale_rule=MscaleRule.DEMO,
    )


def written_yarn(yarn: YarnConfig) -> dict[str, Any]:
    """What `read_yarn` reads."""
    magnitudes = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim} if yarn.mscale else {}
    return magnitudes | {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }


def expect_quantisation(fields: Fields, block: list[int]) -> None:
    """Refuse a `quantization_config` that is not that of a release.

    Raises:
        ValueError: a value differs, or one that decides is missing.
    """
    fields.expect("quant_method", "fp8", optional=False)
    fields.expect("activation_scheme", "dynamic", optional=False)
    fields.expect("weight_block_size", block, optional=False)
    fields.expect("fmt", "e4m3")
