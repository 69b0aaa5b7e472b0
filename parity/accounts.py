"""Renders the account of a model: tables for people, JSON for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from deeptwin.reference.accounting import FORMATS, Term, account, activated, engram_bytes_per_token, totals
from deeptwin.reference.presets import V41Config


def to_json(config: V41Config) -> dict[str, Any]:
    """Everything that `show` prints."""
    by_format, num_bytes = totals(config)
    return {
        "model": config.name,
        "terms": [
            {
                "part": term.part,
                "name": term.name,
                "formula": term.formula,
                "parameters": term.parameters,
                "stored": term.stored.value,
                "bytes": term.num_bytes,
            }
            for term in account(config)
        ],
        "parameters_by_format": dict(zip(FORMATS, by_format.tolist(), strict=True)),
        "parameters": sum(by_format.tolist()),
        "bytes": num_bytes.item(),
        "activated": {phase: {**items, "total": sum(items.values())} for phase, items in activated(config).items()},
        "engram_bytes_per_token": engram_bytes_per_token(config),
    }


def show(console: Console, config: V41Config) -> None:
    """Print every term, the totals, and the parameters that one token uses."""
    terms = account(config)
    console.print(
        f"{config.name}\n{_line('part', 'term', 'parameters', 'stored as', 'bytes', 'formula')}", soft_wrap=True
    )
    for part in dict.fromkeys(term.part for term in terms):
        own = [term for term in terms if term.part == part]
        for number, term in enumerate(own):
            cells = (f"{term.parameters:,}", term.stored.value, f"{term.num_bytes:,}", term.formula)
            console.print(_line("" if number else part, term.name, *cells), soft_wrap=True, markup=False)
        console.print(_line("", "sum", *_sums(own)), soft_wrap=True, style="bold")
    console.print(_line("model", "sum", *_sums(terms)), soft_wrap=True, style="bold")
    by_format, _ = totals(config)
    listed = ", ".join(f"{name} {count:,}" for name, count in zip(FORMATS, by_format.tolist(), strict=True))
    console.print(f"\nby format: {listed}", soft_wrap=True)
    for phase, items in activated(config).items():
        console.print(f"activated in {phase}: {sum(items.values()):,}", soft_wrap=True)
        console.print("  " + ", ".join(f"{name} {count:,}" for name, count in items.items()), soft_wrap=True)
    console.print(f"Engram rows read: {engram_bytes_per_token(config):,} bytes a token", soft_wrap=True)


def _line(part: str, name: str, parameters: str, stored: str, num_bytes: str, formula: str) -> str:
    # plain columns: a table would cut numbers on a narrow terminal
    return f"{part:<9} {name:<30} {parameters:>16} {stored:<12} {num_bytes:>16} {formula}".rstrip()


def _sums(terms: list[Term] | tuple[Term, ...]) -> tuple[str, str, str, str]:
    return f"{sum(t.parameters for t in terms):,}", "", f"{sum(t.num_bytes for t in terms):,}", ""
