"""Random schedules: traffic and engines drawn at random, streams compared with the truth, the engine watched.

`python -m deeptwin.parity.schedules [COUNT [SEED]]` says how many were tried, and what they contained.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.optimized.scheduler import Rank, Scheduler, StepPlan, streams_stepwise
from deeptwin.reference.config import EngineKind, Finish, SchedulerConfig, StepKind, ToyModel
from deeptwin.reference.scheduler import streams

VOCABULARY, STOP = 23, 3


@dataclass
class Watcher:
    """Looks at every rank after every step; `faults` says what was broken, `seen` counts what happened."""

    faults: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __call__(self, rank: Rank, plan: StepPlan) -> None:
        """Blocks, budgets, keys, positions and the age of rates."""
        config = rank.scheduler.config
        self.seen[plan.kind.name] += bool(plan.items)
        self._blocks(rank, config)
        rows = [item.rows for item in plan.items]
        if plan.kind is StepKind.PROMPT:
            self._say(sum(map(config.aligned, rows)) > config.budget, "a prompt step beyond its budget")
            self.seen["CHUNK"] += sum(not item.is_last for item in plan.items)
        else:
            self._say(any(not 1 <= count <= config.gamma + 1 for count in rows), "rows outside 1 … gamma + 1")
            late = [item for item in plan.items if item.rates_of[0] > plan.step - 2 or item.rates_of[1] > plan.step - 1]
            self._say(config.scheduled_verification and bool(late), "rates that were not there yet")
        self._say(len(rank.state.running) > config.max_requests, "more requests than may run")
        self._say(rank.device.highest >= config.max_positions, "a position beyond the bound")
        for request in (rank.state.requests[i] for i in rank.state.running):
            self._say(request.committed != len(request.tokens) - 1, "keys that are not all but the newest token's")
            self._say(request.in_flight > config.asynchronous, "a step in flight")

    def _blocks(self, rank: Rank, config: SchedulerConfig) -> None:
        state = rank.state
        held = [block for request in state.requests.values() for block in request.blocks]
        everywhere = sorted([*held, *state.free])
        self._say(everywhere != list(range(1, config.num_blocks)), "blocks lost, doubled or invented")
        ended = [r for r in state.requests.values() if r.finish is not Finish.OPEN and r.id not in state.waiting]
        self._say(any(request.blocks for request in ended), "an ended request that holds blocks")

    def _say(self, is_wrong: bool, what: str) -> None:
        if is_wrong:
            self.faults.append(what)


class Counting(Scheduler):
    """The scheduler, counting what it is rarely seen to do."""

    seen: Counter[str] = Counter()

    def preempt(self, state: Any, request_id: int) -> Any:
        """As the scheduler's."""
        Counting.seen["PREEMPTED"] += 1
        return super().preempt(state, request_id)


def random_schedule(rng: np.random.Generator) -> dict[str, Any]:
    """Traffic with aborts, a toy model, and an engine in which every request fits."""
    gamma, asynchronous = int(rng.integers(0, 6)), bool(rng.integers(2))
    reserve = gamma + (gamma + 1 if asynchronous else 0)
    block = reserve + int(rng.integers(1, 5))
    longest, count = int(rng.integers(8, 36)), int(rng.integers(1, 8))
    need = -(-(longest + 1 + reserve) // block)
    cp_size = int(rng.integers(1, 4))
    config = SchedulerConfig(
        engine=EngineKind.NORMAL,
        num_blocks=need + 2 + int(rng.integers(0, 3 * need)),
        block_size=block,
        max_requests=int(rng.integers(1, 7)),
        budget=int(rng.integers(2 * cp_size, 24)),
        max_keys=longest + 1 + int(rng.integers(0, 60)),
        max_prompt=longest + 1,
        max_length=longest,
        gamma=gamma,
        chunked=True,
        asynchronous=asynchronous,
        scheduled_verification=bool(rng.integers(2)),
        stop_on_preempt=False,
        cp_size=cp_size,
        ranks=int(rng.integers(1, 4)),
        all_interval=int(rng.integers(1, 6)),
        any_interval=int(rng.integers(1, 8)),
    )
    length = rng.integers(1, longest - 2, count)
    prompt = rng.integers(-(2**31), 2**31 - 1, (count, longest))
    for row in range(count):
        prompt[row, : length[row]] %= VOCABULARY
    arrival = rng.integers(0, 12, count)
    abort = np.where(rng.random(count) < 0.15, arrival + rng.integers(0, 20, count), -1)
    quality = int(rng.choice([0, 50, 90, 100]))
    columns = {"length_b": length, "max_tokens_b": rng.integers(1, 30, count), "arrival_b": arrival, "abort_b": abort}
    return {
        "prompt_bs": _int32(prompt),
        **{name: _int32(column) for name, column in columns.items()},
        "model": ToyModel(vocab_size=VOCABULARY, eos=STOP, quality=quality),
        "config": config,
    }


def schedule_faults(inputs: dict[str, Any], seen: Counter[str] | None = None) -> list[str]:
    """What is wrong with the streams of one schedule or with the engine on its way; nothing, if all is well."""
    watcher = Watcher()
    truth, reasons = streams(**inputs)
    got, ends = streams_stepwise(**inputs, scheduler=Counting, watch=watcher)
    for b in range(len(truth)):
        made = int((got[b] >= 0).sum())
        is_cut = int(inputs["abort_b"][b]) >= 0 and int(ends[b]) == Finish.ABORTED
        if not torch.equal(got[b, :made], truth[b, :made]) or (got[b, made:] >= 0).any():
            watcher.faults.append(f"request {b}: {got[b].tolist()} instead of {truth[b].tolist()}")
        elif not is_cut and (not torch.equal(got[b], truth[b]) or int(ends[b]) != int(reasons[b])):
            watcher.faults.append(f"request {b}: ended by {int(ends[b])} behind {made} tokens")
        watcher.seen[Finish(int(ends[b])).name] += 1
    if seen is not None:
        seen.update(watcher.seen)
    return watcher.faults


def _int32(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32))


def main() -> None:
    """Try argv[1] schedules, 1000 by default, from seed argv[2]."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    seen: Counter[str] = Counter()
    wrong = 0
    for n in range(count):
        rng = np.random.Generator(np.random.Philox(key=[seed, n]))
        faults = schedule_faults(random_schedule(rng), seen)
        wrong += bool(faults)
        if faults:
            sys.stdout.write(f"schedule {n} of seed {seed}: {faults[0]}\n")
    seen.update(Counting.seen)
    what = ", ".join(f"{name.lower()} {number}" for name, number in sorted(seen.items()))
    sys.stdout.write(f"{count} random schedules, {wrong} with a fault; {what}\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
