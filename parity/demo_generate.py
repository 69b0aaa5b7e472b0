"""The engine on real text: tiny models with drawn weights continue four texts together, then each of them alone.

What they write means nothing, the weights are drawn; that the bytes are the same is the point.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from deeptwin.optimized.engine import Event, Generate, Generation
from deeptwin.optimized.plan import Plan, plan_of
from deeptwin.reference.config import SamplingParams

from .outcome import EXIT_FAILED, EXIT_PASSED
from .serving import Parts, Serving, engine_for
from .texts import TEXTS, token_ids, vocabulary
from .tiny_models import GENERATIONS as GENERATIONS

PROMPT = 48  # tokens of each text
END = 1  # DeepSeek's end of sentence


def parsed(rows: Sequence[str]) -> dict[str, str]:
    """`component=candidate` rows as overrides of a plan.

    Raises:
        ValueError: a row has another form.
    """
    pairs = [row.partition("=") for row in rows]
    for row, (name, _, candidate) in zip(rows, pairs, strict=True):
        if not name or not candidate:
            raise ValueError(f"plan: expected COMPONENT=CANDIDATE, got {row!r}")
    return {name: candidate for name, _, candidate in pairs}


def play(
    console: Console, generations: Sequence[str], *, backend: str, overrides: Mapping[str, str], tokens: int
) -> int:
    """Generate with every model; 0 when every text got alone what it got beside the others.

    Raises:
        ValueError: an unknown generation, backend, component or candidate.
    """
    plans = {name: plan_of(name, backend, overrides) for name in generations}
    return max(_one(console, name, plan, backend, overrides, tokens) for name, plan in plans.items())


def _one(console: Console, generation: str, plan: Plan, backend: str, overrides: Mapping[str, str], tokens: int) -> int:
    console.print(f"\n{generation}: {_summary(plan)}\n", style="bold", markup=False, soft_wrap=True)
    words, _ = vocabulary()
    serving = Serving(generation=generation, vocab=len(words), eos=END, page=16, budget=64)
    requests = [
        Generate(
            prompt=tuple(token_ids(name)[:PROMPT]),
            params=SamplingParams(seed=place, temperature=0.0 if place % 2 else 1.0, max_tokens=tokens),
        )
        for place, name in enumerate(TEXTS)
    ]
    parts = Parts(overrides=overrides)
    engine = engine_for(serving, requests, backend, parts=parts)
    started = time.monotonic()
    with _progress(console, len(requests) * tokens) as hear:
        together = engine.generate(requests, hear=hear)
    seconds = time.monotonic() - started
    _show(console, together, words)
    made = sum(len(done.tokens) for done in together)
    # the highest of the whole process: models that ran before count too
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steps = engine.counts["prompt_steps"] + engine.counts["decode_steps"]
    console.print(f"{made} tokens in {steps} steps, {made / seconds:.1f} tokens/s, peak {peak:.0f} MiB")
    alone = [engine_for(serving, [one], backend, parts=parts).generate([one])[0] for one in requests]
    same = sum(_bits(a) == _bits(b) for a, b in zip(together, alone, strict=True))
    style = "green" if same == len(requests) else "bold red"
    console.print(f"alone: {same} of {len(requests)} texts have the same tokens and log-probability bits", style=style)
    return EXIT_PASSED if same == len(requests) else EXIT_FAILED


def _bits(done: Generation) -> tuple[list[int], list[float]]:
    return done.tokens, done.logprobs


def _summary(plan: Plan) -> str:
    """How many operations each candidate computes, and every one that was named by hand."""
    rows = plan.rows()
    named = [f"{operation} by {spec}" for operation, candidate, spec in rows if candidate == "given"]
    kinds = sorted({candidate for _, candidate, _ in rows})
    counts = [f"{sum(one == kind for _, one, _ in rows)} operations by {kind}" for kind in kinds]
    return ", ".join(counts + named)


def _show(console: Console, found: Sequence[Generation], words: Sequence[str]) -> None:
    table = Table("text", "continued with", "ended by", box=None, padding=(0, 1))
    for done, name in zip(found, TEXTS, strict=True):
        table.add_row(name, repr("".join(words[token] for token in done.tokens)), done.finish.name.lower())
    console.print(table)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Event], None]]:
    """A bar on a terminal, nothing in a pipe."""
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda event: bar.advance(task, len(event.tokens))
