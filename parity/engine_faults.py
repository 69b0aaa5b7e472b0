"""Where a fault in an engine's step begins: its stages beside those of the stateless model on the same tokens.

The engine serves requests with a wrong part. Every stage that its tap hears is a row for each row of the step; rows are
told apart by request and position, and the last one counts, because it is the one that stands when drafts were taken
back. The stateless model runs over what the engine gave out, so tokens that went wrong do not hide where that began.
`bisect` walks both, request by request.

`python -m deeptwin.parity.engine_faults [FAULT …]` prints the first stage and row of every fault.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from deeptwin.optimized.engine import Generate
from deeptwin.optimized.engine_device import ModelDevice
from deeptwin.optimized.scheduler import Item
from deeptwin.reference.config import SamplingParams
from deeptwin.reference.csa2_state import Csa2Step

from .bisect import Compared, compare
from .capture import Dump, DumpWriter
from .mutants.engine import PARTS
from .serving import RIGHT, Parts, Serving, serve, stateless_logits

EXACT = 1e-12  # both sides are functions of the reference: a stage agrees in all its bits, or not


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A wrong part, the smallest run that shows it, and where it must be found."""

    entry: str
    serving: Serving
    stage: str  # the first that differs
    position: int  # of the first row that differs there
    prompts: tuple[int, ...] = (20,)
    tokens: int = 6


V3, V4 = Serving(generation="v3", budget=100), Serving(generation="v4", budget=100)
DRAFTED = replace(V4, gamma=3, quality=50)
FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        # layer 0 of V4 has a window alone, layer 1 is the first with groups; of V3, layer 1 is the first with experts
        "state_not_carried": Fault(
            entry="U27", serving=replace(V4, budget=6), stage="layers.1.attn.out", position=7, tokens=1
        ),
        "third_token_lost": Fault(entry="U31", serving=V4, stage="layers.1.attn.out", position=23, prompts=(23,)),
        "verified_state_rounded": Fault(entry="U32", serving=DRAFTED, stage="layers.1.attn.out", position=24),
        "tail_window_saved": Fault(entry="U33", serving=DRAFTED, stage="layers.1.attn.out", position=23),
        "stale_ring": Fault(
            entry="U34", serving=replace(V4, warm=16), stage="layers.0.attn.out", position=16, tokens=1
        ),
        "ring_aliased": Fault(entry="U36", serving=DRAFTED, stage="layers.0.attn.out", position=21),
        "drafts_not_taken_back": Fault(
            entry="U62", serving=replace(V3, gamma=2, quality=0), stage="layers.0.attn.out", position=22
        ),
        "combined_as_they_come": Fault(entry="U70", serving=V3, stage="layers.1.ffn.out", position=0, tokens=1),
        "split_at_the_chunk": Fault(
            entry="U71", serving=replace(V3, budget=7), stage="layers.0.attn.out", position=7, tokens=1
        ),
        "split_by_batch": Fault(
            entry="U73", serving=V3, stage="layers.0.attn.out", position=1, prompts=(20, 9), tokens=1
        ),
    }
)


@dataclass
class StageRows:
    """A tap that keeps every row of every stage by request and position."""

    rows: list[tuple[int, int]] = field(default_factory=list)  # of the step that is computed
    stages: dict[int, dict[str, dict[int, Tensor]]] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor) -> None:
        """Keep a stage; what does not have a row for each row of the step is left out."""
        for (request, position), row in zip(self.rows, x, strict=True) if len(x) == len(self.rows) else ():
            self.stages.setdefault(request, {}).setdefault(name, {})[position] = row.clone()


def recorded(parts: Parts, heard: StageRows) -> Parts:
    """The same parts with a device that says which rows it is about to compute."""

    class Recorded(parts.device):  # type: ignore[name-defined]
        def _step(self, items: Sequence[Item], *given: Any, **named: Any) -> Csa2Step:
            step: Csa2Step = super()._step(items, *given, **named)
            heard.rows = [(items[b].id, p) for b, p in zip(step.seq_t.tolist(), step.positions_t.tolist(), strict=True)]
            return step

    device: type[ModelDevice] = Recorded
    return replace(parts, device=device, tap=heard)


def requests_of(fault: Fault) -> list[Generate]:
    """Prompts of the lengths of a fault."""
    found = []
    for place, length in enumerate(fault.prompts):
        prompt = tuple((7 * i * i + 5 * i + 3 * place) % (fault.serving.vocab - 4) + 4 for i in range(length))
        params = SamplingParams(seed=place, temperature=0.0, max_tokens=fault.tokens, ignore_eos=True)
        found.append(Generate(prompt=prompt, params=params))
    return found


def first_difference(fault: Fault, parts: Parts) -> tuple[Compared | None, int]:
    """The first stage of an engine with these parts that is not that of the stateless model, and the position of its
    first row; None and -1 if all stages are."""
    heard, requests = StageRows(), requests_of(fault)
    found = serve(
        requests, [0] * len(requests), serving=fault.serving, backend="reference", parts=recorded(parts, heard)
    )
    with tempfile.TemporaryDirectory() as folder:
        engine, model = Path(folder) / "engine", Path(folder) / "model"
        positions = {}
        with DumpWriter(engine, producer="engine") as ours, DumpWriter(model, producer="stateless model") as theirs:
            for done in found:
                tokens = [*done.request.prompt, *done.tokens]
                known, stages = StageRows(), heard.stages[done.id]
                known.rows = [(done.id, position) for position in range(len(tokens) - 1)]
                stateless_logits(tokens[:-1], fault.serving, tap=known)
                # what a hit brought along was never computed; behind the last token but one there are only drafts
                positions[done.id] = [p for p in sorted(stages["embed"]) if p < len(tokens) - 1]
                for name, rows in known.stages[done.id].items():
                    if name in stages:
                        for write, by_position in ((ours, stages[name]), (theirs, rows)):
                            x = torch.stack([by_position[p] for p in positions[done.id]])
                            write(name, x, step=done.id)
        for one in compare(Dump(model), Dump(engine), limit=EXACT):
            if one.status == "differs":
                assert one.worst is not None
                return one, positions[one.stage.step][one.worst.index[0]]
    return None, -1


def main() -> None:
    """Print where every fault begins; exit code 1 if one is not found where it is."""
    console, wrong = Console(), 0
    table = Table("fault", "entry", "first stage", "request", "position", box=None)
    for name in sys.argv[1:] or FAULTS:
        fault = FAULTS[name]
        one, position = first_difference(fault, PARTS[name])
        stage, request = ("-", "-") if one is None else (one.stage.name, str(one.stage.step))
        wrong += (stage, position) != (fault.stage, fault.position)
        table.add_row(name, fault.entry, stage, request, str(position))
    console.print(table)
    for label, fault in (("v3", FAULTS["split_by_batch"]), ("v4", FAULTS["third_token_lost"])):
        one, _ = first_difference(fault, RIGHT)
        console.print(f"{label} with right parts: {'no difference' if one is None else one.stage.name}")
        wrong += one is not None
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
