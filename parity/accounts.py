"""Renders the account of a model: tables for people, JSON for programs."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from rich.console import Console

from deeptwin.reference.account_claims import claims, fp8_work
from deeptwin.reference.account_terms import FORMATS, Claim, Term
from deeptwin.reference.accounting import (
    account,
    activated,
    cache_bytes_per_token,
    caches,
    engram_bytes_per_token,
    sequence_bytes,
    totals,
    work,
)
from deeptwin.reference.presets import ModelConfig

CONTEXT = 10**6  # tokens at which the published figures are given


def to_json(config: ModelConfig, context: int = CONTEXT) -> dict[str, Any]:
    """Everything that `show` prints."""
    by_format, num_bytes = totals(config)
    grown, states = sequence_bytes(config, context=context).tolist()
    parts = work(config, context=context)
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
        "context": context,
        "caches": [
            {
                "name": part.name,
                "formula": part.formula,
                "bytes_per_token": float(part.per_token),
                "state_bytes": part.layers * part.state_bytes,
            }
            for part in caches(config)
        ],
        "cache_bytes_per_token": float(cache_bytes_per_token(config)),
        "sequence_bytes": {"records": grown, "states": states},
        "work": [{"name": p.name, "formula": p.formula, "flops": p.flops, "unit": p.precision.name} for p in parts],
        "flops": sum(part.flops for part in parts),
        "fp8_flops": float(fp8_work(config, context)),
        "claims": [
            {
                "what": claim.what,
                "published": claim.published,
                "unit": claim.unit,
                "own": None if claim.own is None else float(claim.own),
                "reproduced": claim.is_reproduced,
                "note": claim.note,
            }
            for claim in claims(config)
        ],
    }


def show(console: Console, config: ModelConfig, context: int = CONTEXT) -> None:
    """Print every term, the totals, what one token uses, caches, work, and the published figures beside ours."""
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
    by_format, num_bytes = totals(config)
    tables = num_bytes.item() - sum(term.num_bytes for term in terms)
    if tables:
        console.print(f"tables of the hash layers: {tables:,} bytes, no parameters", soft_wrap=True)
    listed = ", ".join(f"{name} {count:,}" for name, count in zip(FORMATS, by_format.tolist(), strict=True))
    console.print(f"\nby format: {listed}", soft_wrap=True)
    for phase, items in activated(config).items():
        console.print(f"activated in {phase}: {sum(items.values()):,}", soft_wrap=True)
        used = ", ".join(f"{name} {count:,}" for name, count in items.items() if count)
        console.print(f"  {used}", soft_wrap=True)
    if engram_bytes_per_token(config):
        console.print(f"Engram rows read: {engram_bytes_per_token(config):,} bytes a token", soft_wrap=True)
    _show_caches(console, config, context)
    _show_work(console, config, context)
    _show_claims(console, claims(config))


def _show_caches(console: Console, config: ModelConfig, context: int) -> None:
    console.print("\ncaches", style="bold")
    for part in caches(config):
        size = (
            f"{part.layers * part.state_bytes:,} bytes" if part.state_bytes else f"{_number(part.per_token)} B a token"
        )
        console.print(f"  {part.name:<32} {size:>24}  {part.formula}", soft_wrap=True, markup=False)
    grown, states = sequence_bytes(config, context=context).tolist()
    console.print(f"  {'sum':<32} {_number(cache_bytes_per_token(config)) + ' B a token':>24}", soft_wrap=True)
    whole = f"{grown + states:,} bytes: {grown:,} grown, {states:,} states"
    console.print(f"  a sequence of {context:,} tokens: {whole}", soft_wrap=True)


def _show_work(console: Console, config: ModelConfig, context: int) -> None:
    console.print(f"\nwork of one token after {context:,} others", style="bold")
    for part in work(config, context=context):
        size, unit = f"{part.flops / 1e9:,.2f} GFLOP", part.precision.name.lower()
        console.print(f"  {part.name:<10} {size:>18} {unit:<5} {part.formula}", soft_wrap=True, markup=False)
    units = f"{float(fp8_work(config, context)) / 1e9:,.2f} G"
    console.print(f"  in FP8 operations (bf16 twice, FP4 half): {units}", soft_wrap=True)


def _show_claims(console: Console, found: tuple[Claim, ...]) -> None:
    for reproduced, title in ((True, "published and reproduced"), (False, "published and NOT reproduced")):
        rows = [claim for claim in found if claim.is_reproduced is reproduced]
        if rows:
            console.print(f"\n{title}", style="bold")
        for claim in rows:
            own = "nothing to compute it from" if claim.own is None else f"ours {_number(claim.own)}"
            note = f"  ({claim.note})" if claim.note else ""
            text = f"  {claim.what}: {claim.published} {claim.unit}, {own}{note}"
            console.print(text, soft_wrap=True, markup=False, highlight=False)


def _number(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.2f}"


def _line(part: str, name: str, parameters: str, stored: str, num_bytes: str, formula: str) -> str:
    # plain columns: a table would cut numbers on a narrow terminal
    return f"{part:<9} {name:<36} {parameters:>18} {stored:<18} {num_bytes:>18} {formula}".rstrip()


def _sums(terms: list[Term] | tuple[Term, ...]) -> tuple[str, str, str, str]:
    return f"{sum(t.parameters for t in terms):,}", "", f"{sum(t.num_bytes for t in terms):,}", ""
