"""Runs parts of the model on several processes and compares every byte with one process.

`run(["package.module:scenario", …], Setup(world=4))` starts `world` processes that form one group of torch.distributed,
gives each scenario to all of them, and returns what rank 0 found. Backend and device are data: gloo on the CPU here,
NCCL on GPUs unchanged. Kernels compute on a device, the reference on a CPU. Every process has a time limit; one that
is late, or dies, is ended and reported, never waited for.

A scenario is a function of its `Group`. It draws the same inputs on every rank, does its share of the work, and gives
pairs of tensors that must be equal, by name: what the group made, and what one rank makes alone.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .card import resolve
from .floats import raw_bytes

Pairs = Mapping[str, tuple[Tensor, Tensor]]
OWN = "deeptwin.parity.parallel_runs"
SCENARIOS = tuple(
    f"{OWN}:{name}"
    for name in (
        *("context_parallel", "merged_keys", "bounded_replay"),
        *("expert_parallel", "data_parallel", "moving_experts"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How many processes there are, how they talk, where they compute, how long they may take."""

    world: int
    backend: str = "gloo"
    device: str = "cpu"  # "cuda": rank r has device r
    limit_s: float = 60.0
    seed: int = 0
    repeats: int = 1  # how often each scenario runs; every run must give the bytes of the first

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"world: expected at least 1, got {self.world}")
        if self.repeats < 1:
            raise ValueError(f"repeats: expected at least 1, got {self.repeats}")
        if not self.limit_s > 0:
            raise ValueError(f"limit_s: expected a positive number, got {self.limit_s}")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of one scenario: pairs that were compared, and the first that differs or the error."""

    scenario: str
    compared: int
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether something was compared and everything was equal."""
        return self.compared > 0 and not self.problem


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process among others: who it is, where it computes, and how it talks to them."""

    rank: int
    world: int
    device: torch.device
    seed: int

    def rng(self, name: str) -> np.random.Generator:
        """The same generator on every rank."""
        entropy = [self.seed, *name.encode()]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

    def gathered(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, of one shape, one behind the other."""
        raw = _as_bytes(x)
        parts = [torch.empty_like(raw) for _ in range(self.world)]
        dist.all_gather(parts, raw)
        return _as(torch.cat(parts), x, self.world * x.shape[0])

    def exchanged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Part r goes to rank r; what comes back is one part from every rank. Only the first axis may differ."""
        like = parts[0]
        counts = torch.tensor([len(part) for part in parts], device=self.device)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        width = _as_bytes(like[:0]).shape[1]
        arriving = incoming.tolist()
        into = torch.empty(sum(arriving), width, dtype=torch.uint8, device=self.device)
        sent = torch.cat([_as_bytes(part) for part in parts])
        dist.all_to_all_single(into, sent, arriving, counts.tolist())
        return [_as(part, like, len(part)) for part in into.split(arriving)]

    def moved(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Point to point, all at once: (rank, tensor) pairs, in the same order for any two ranks."""
        calls = [dist.P2POp(dist.isend, _as_bytes(x), rank) for rank, x in sends]
        buffers = [(rank, x, _as_bytes(torch.empty_like(x))) for rank, x in receives]
        calls += [dist.P2POp(dist.irecv, raw, rank) for rank, _, raw in buffers]
        for call in dist.batch_isend_irecv(calls) if calls else []:
            call.wait()
        for _, x, raw in buffers:
            x.copy_(_as(raw, x, x.shape[0]))


def run(scenarios: Sequence[str], setup: Setup) -> list[Report]:
    """Give the scenarios to a group of processes, one after the other; one report each.

    Edges:
        a group that dies or is late gives a report with the reason for every scenario that it did not finish.
    """
    # a server that has imported torch forks every process: four imports cost more than all scenarios
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, OWN])
    answers = context.Queue()
    found: dict[str, Report] = {}
    with TemporaryDirectory() as folder:
        arguments = (list(scenarios), setup, str(Path(folder) / "meeting"), answers)
        processes = [
            context.Process(target=_member, args=(rank, *arguments), daemon=True) for rank in range(setup.world)
        ]
        for process in processes:
            process.start()
        late = time.monotonic() + setup.limit_s
        problem = _collect(found, answers, processes, len(scenarios), late)
        for process in processes:
            process.join(max(0.1, late - time.monotonic()) if not problem else 0.1)
            if process.is_alive():
                process.terminate()
                process.join()
    return [found.get(name, Report(scenario=name, compared=0, problem=problem or "no answer")) for name in scenarios]


def _collect(found: dict[str, Report], answers: Any, processes: Sequence[Any], wanted: int, late: float) -> str:
    """Fill `found` until everything is there; the reason if it does not come."""
    while len(found) < wanted:
        try:
            report = answers.get(timeout=0.2)
        except queue.Empty:
            dead = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if dead:
                return f"rank {dead[0]} ended with exit status {processes[dead[0]].exitcode}"
            if time.monotonic() > late:
                return "the time limit was reached"
            continue
        # the first answer with a problem stands
        if report.scenario not in found or (report.problem and found[report.scenario].ok):
            found[report.scenario] = report
        if report.problem and not report.compared:
            return f"{report.scenario} failed before"
    return ""


def _member(rank: int, scenarios: list[str], setup: Setup, meeting: str, answers: Any) -> None:
    """One process of the group."""
    torch.set_num_threads(1)
    on_gpu = setup.device != "cpu"
    device = torch.device(setup.device, rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        setup.backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=setup.world,
        timeout=timedelta(seconds=setup.limit_s),
    )
    group = Group(rank=rank, world=setup.world, device=device, seed=setup.seed)
    try:
        for name in scenarios:
            _play(name, group, answers, setup.repeats)
    finally:
        dist.destroy_process_group()


def _play(name: str, group: Group, answers: Any, repeats: int) -> None:
    """One scenario; every rank says what is wrong with its own pairs, rank 0 answers for all."""
    try:
        pairs = resolve(name)(group)
        problems = [_difference(key, *pair) for key, pair in pairs.items()]
        for run_number in range(1, repeats):
            again = resolve(name)(group)
            problems += [_difference(f"{key}, run {run_number}", again[key][0], pairs[key][0]) for key in pairs]
        problem = next(filter(None, problems), "")
        wrong = group.gathered(torch.tensor([[bool(problem)]], device=group.device)).flatten().tolist()
    except Exception:
        answers.put(Report(scenario=name, compared=0, problem=f"rank {group.rank}: {traceback.format_exc(limit=-4)}"))
        raise
    first = wrong.index(True) if True in wrong else 0
    if group.rank == first:
        text = f"rank {group.rank}: {problem}" if problem else ""
        answers.put(Report(scenario=name, compared=len(pairs), problem=text))


def _difference(name: str, got: Tensor, expected: Tensor) -> str:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{name}: {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    wrong = int((raw_bytes(got.cpu()) != raw_bytes(expected.cpu())).sum())
    return f"{name}: {wrong} of {got.numel() * got.element_size()} bytes differ" if wrong else ""


def _as_bytes(x: Tensor) -> Tensor:
    """[n, bytes of an item]: backends know few dtypes."""
    flat = x.contiguous().reshape(x.shape[0], -1) if x.shape[0] else x.new_empty(0, x[:1].numel() or _item(x))
    return flat.view(torch.uint8)


def _as(raw: Tensor, like: Tensor, count: int) -> Tensor:
    return raw.contiguous().view(like.dtype).reshape(count, *like.shape[1:])


def _item(x: Tensor) -> int:
    size = 1
    for n in x.shape[1:]:
        size *= n
    return size
