"""What computes the steps that a scheduler plans: a model over paged caches, a sampler, a drafter, grammars.

The device knows of every request what the scheduler learns a step later: its tokens, its proposals, how many drafts
were accepted. Keys of rejected drafts stay in the caches until the true tokens overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.config import Draw, RowError, SamplingParams, SchedulerConfig, StepKind
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.dspark_state import DraftRequests
from deeptwin.reference.taps import Tap, ignore

from .drafter import DraftBatch, Drafter
from .engine_store import NO_HIT, Hit, PrefixReuse
from .scheduler import Item, Result, StepPlan
from .steps import Runner
from .structured_output import Automaton
from .verification import (
    Greedy,
    Verified,
    VerifyRows,
    clear_proposals_,
    proposal_pool,
    step_tokens,
    verify,
    write_proposals_,
)


@dataclass(kw_only=True)
class Job:
    """What a request asks of the device."""

    prompt: tuple[int, ...]
    params: SamplingParams
    hit: Hit = NO_HIT
    boundary: int = 0  # where blocks and state of the prompt are published; 0: nowhere
    automaton: Automaton | None = None
    forced: tuple[int, ...] = ()  # tokens that must come first
    fed: int = 0  # generated tokens that the grammar has taken
    failure: str = ""


@dataclass(kw_only=True)
class Track:
    """What the device knows of a request that holds pages."""

    slot: int  # of its state, and of its proposals
    tokens: list[int] = field(default_factory=list)
    valid: int = 0  # first position whose window state is there
    has_drafts: bool = False
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How rows become tokens."""

    draw: Draw
    greedy: Greedy
    eos: int
    banned: tuple[int, ...] = ()


class ModelDevice:
    """Runs step plans on a runner, one after the other."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        sampling: Sampling,
        config: SchedulerConfig,
        *,
        states: int,
        reuse: PrefixReuse | None,
        tap: Tap = ignore,
    ) -> None:
        if drafter.gamma != config.gamma:
            raise ValueError(f"drafter: expected one of {config.gamma} drafts, got one of {drafter.gamma}")
        if runner.page_tokens != config.block_size:
            raise ValueError(f"runner: expected pages of {config.block_size} tokens, got {runner.page_tokens}")
        self.runner, self.drafter, self.sampling, self.config, self.reuse = runner, drafter, sampling, config, reuse
        self.tap = tap  # hears every stage of every forward
        self.where = next(iter(runner.cache_views().values())).device
        self.banned_v = self._tensor([token in sampling.banned for token in range(runner.vocab)])
        self.pool = None
        if config.gamma:
            self.pool = proposal_pool(slots=states - 1, draft=config.gamma, vocab=runner.vocab, device=self.where)
        self.jobs: dict[int, Job] = {}
        self.tracks: dict[int, Track] = {}
        self.slots = list(range(states - 1, 0, -1))  # slot 0 is nobody's
        self.accepted: dict[int, int] = {}  # drafts, in the step before if that decoded
        self.highest = -1

    def run(self, plan: StepPlan) -> dict[int, Result]:
        """The results of a step, by request."""
        if plan.kind is StepKind.PROMPT:
            self.accepted = {}
            return self._prefill(plan.items) if plan.items else {}
        results = self._decode(plan) if plan.items else {}
        self.accepted = {request_id: result.accepted for request_id, result in results.items()}
        return results

    def retain(self, ids: set[int]) -> None:
        """Forget the tracks of all other requests; their slots are free again."""
        for request_id in [i for i in self.tracks if i not in ids]:
            self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        slot = self.tracks.pop(request_id).slot
        if self.pool is not None:
            clear_proposals_(self.pool, slot)
        self.slots.append(slot)

    # prompts

    def _prefill(self, items: Sequence[Item]) -> dict[int, Result]:
        starts = [item.keys - item.rows for item in items]
        tracks = [self._enter(item, start) for item, start in zip(items, starts, strict=True)]
        step = self._step(items, starts, [item.known for item in items], decode=False)
        token_t = self._tensor([token for item in items for token in item.tokens])
        forward = self.runner.forward(token_t, self._past(tracks, starts), step, tap=self.tap)
        self.drafter.observe(forward, token_t, step)
        # the last row of a chunk is always computed
        last_b = torch.searchsorted(forward.row_t, step.cu_seqlens[1:].long() - 1)
        for item in items:
            self._publish(item)
        whole = [b for b, item in enumerate(items) if item.is_last]
        results = {item.id: Result(tokens=()) for item in items}
        if whole:
            done = [items[b] for b in whole]
            logits_tv = self.runner.head(forward.hidden_ym[last_b[whole]])
            no_eos_t = self._tensor([self.jobs[item.id].params.first_token_no_eos for item in done])
            results |= self._drawn(done, [1] * len(done), logits_tv, no_eos_t)
        return results

    def _enter(self, item: Item, start: int) -> Track:
        """The track of a prompt's chunk: a new one if it is the first, perhaps behind a hit."""
        if start == 0 and item.id in self.tracks:  # its earlier chunks were given up
            self._drop(item.id)
        if item.id not in self.tracks:
            if not self.slots:
                raise RuntimeError(f"request {item.id}: no state slot is left beside those of {sorted(self.tracks)}")
            track = self.tracks[item.id] = Track(slot=self.slots.pop())
            self.runner.reset(track.slot)
            if start:
                self._load(item, track, start)
        track = self.tracks[item.id]
        if len(track.tokens) != start:
            raise RuntimeError(f"request {item.id}: a chunk from {start} on, but {len(track.tokens)} tokens are known")
        track.tokens += item.tokens
        self.highest = max(self.highest, item.keys - 1)
        return track

    def _load(self, item: Item, track: Track, start: int) -> None:
        job = self.jobs[item.id]
        if self.reuse is None or job.hit.tokens != start:
            raise RuntimeError(f"request {item.id}: a first chunk from {start} on, but a hit of {job.hit.tokens}")
        self.reuse.load(job.hit, item.blocks, track.slot)
        track.tokens, track.valid = list(job.prompt[:start]), job.hit.valid

    def _publish(self, item: Item) -> None:
        job = self.jobs[item.id]
        if self.reuse is not None and job.boundary and item.keys == job.boundary:
            self.reuse.publish(job.prompt, job.boundary, item.blocks, self.tracks[item.id].slot)

    # drafts and their verification

    def _decode(self, plan: StepPlan) -> dict[int, Result]:
        items, tracks = plan.items, [self.tracks[item.id] for item in plan.items]
        rates = {i: self.tracks[i].rates for i in self.accepted if i in self.tracks}
        rows = plan.verified_rows(rates, self.config)
        starts = [item.first_position(self.accepted, self.config) for item in items]
        for item, start, track in zip(items, starts, tracks, strict=True):
            if start != len(track.tokens) - 1:
                raise RuntimeError(f"request {item.id}: a row at {start}, but {len(track.tokens)} tokens are known")
        step = self._step(items, starts, [s + n for s, n in zip(starts, rows, strict=True)], rows=rows, decode=True)
        token_t = step_tokens(
            self._tensor([track.tokens[-1] for track in tracks]), self._slots(items), self._tensor(rows), self.pool
        )
        forward = self.runner.forward(token_t, self._past(tracks, starts), step, tap=self.tap)
        self.drafter.observe(forward, token_t, step)
        self.highest = max(self.highest, int(step.positions_t.max()) + self.config.gamma)
        results = self._drawn(items, rows, self.runner.head(forward.hidden_ym), None)
        return self._propose(items, starts, results)

    def _propose(self, items: Sequence[Item], starts: Sequence[int], results: dict[int, Result]) -> dict[int, Result]:
        """Draft behind the newest token of every request; the scheduler is told how likely the drafts are."""
        if self.pool is None:
            return results
        tracks = [self.tracks[item.id] for item in items]
        requests = DraftRequests(
            golden_b=self._tensor([track.tokens[-1] for track in tracks]),
            first_b=self._tensor(starts),
            accepted_b=self._tensor([results[item.id].accepted for item in items]),
            state_b=self._tensor([track.slot for track in tracks]),
            valid_b=self._tensor([track.valid for track in tracks]),
            **self._asked(items),
        )
        ids = tuple(item.id for item in items)
        drafted = self.drafter.propose(DraftBatch(requests=requests, ids=ids, table_bp=self._table(items)))
        write_proposals_(self.pool, requests.state_b, *drafted)
        for track, rates in zip(tracks, drafted[2].tolist(), strict=True):
            track.has_drafts, track.rates = True, tuple(rates)
        return {item.id: replace(results[item.id], rates=self.tracks[item.id].rates) for item in items}

    def _slots(self, items: Sequence[Item]) -> Tensor:
        tracks = [self.tracks[item.id] for item in items]
        return self._tensor([track.slot if track.has_drafts else 0 for track in tracks])

    def _drawn(
        self, items: Sequence[Item], rows: Sequence[int], logits_tv: Tensor, no_eos_t: Tensor | None
    ) -> dict[int, Result]:
        """Draw from the rows of every request, and let what it emits be its newest tokens."""
        tracks, length_b = [self.tracks[item.id] for item in items], self._tensor(rows)
        allowed_ti = self._masks(items, rows)
        logits_tv = self.runner.plan.op("sampling.mask_logits")(
            logits_tv, self.banned_v, no_eos_t, allowed_ti, eos=self.sampling.eos
        )
        found = verify(
            logits_tv,
            VerifyRows(
                length_b=length_b,
                position_b=self._tensor([len(track.tokens) for track in tracks]),
                slot_b=self._slots(items),
                **self._asked(items),
                stop_bk=self._tensor([[-1]] * len(items)),  # the scheduler stops
            ),
            self.pool,
            greedy=self.sampling.greedy,
            draw=self.sampling.draw,
            ops=self.runner.plan,
            forced_t=self._forced(items, rows),
        )
        return {item.id: self._emitted(item.id, found, b) for b, item in enumerate(items)}

    def _asked(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """How every request draws, as columns."""
        params = [self.jobs[item.id].params for item in items]
        return {
            "temperature_b": self._tensor([p.temperature for p in params]),
            "top_p_b": self._tensor([p.top_p for p in params]),
            "top_k_b": self._tensor([p.top_k for p in params]),
            "seed_b": self._tensor([_signed(p.seed) for p in params]),
        }

    def _forced(self, items: Sequence[Item], rows: Sequence[int]) -> Tensor | None:
        """The tokens that must come, -1 where a request leaves the row free; None if nobody forces any."""
        if not any(self.jobs[item.id].forced for item in items):
            return None
        forced = []
        for item, count in zip(items, rows, strict=True):
            job, made = self.jobs[item.id], len(self.tracks[item.id].tokens) - len(self.jobs[item.id].prompt)
            own = job.forced[made : made + count]
            forced += [*own, *[-1] * (count - len(own))]
        return self._tensor(forced)

    def _emitted(self, request_id: int, found: Verified, b: int) -> Result:
        count = int(found.accepted_b[b]) + 1
        tokens = tuple(found.token_bj[b, :count].tolist())
        job, track = self.jobs[request_id], self.tracks[request_id]
        if found.error_b[b]:
            job.failure = job.failure or f"no token can be drawn: {RowError(int(found.error_b[b])).name}"
            tokens = (*tokens[:-1], self.sampling.eos)  # something has to follow; the engine ends the request
        track.tokens += tokens
        return Result(tokens=tokens, accepted=count - 1, logprobs=tuple(found.logprob_bj[b, :count].tolist()))

    # grammars

    def _masks(self, items: Sequence[Item], rows: Sequence[int]) -> Tensor | None:
        """Which tokens each row may give, int32 [t, words]; None if no request follows a grammar."""
        if not any(self.jobs[item.id].automaton for item in items):
            return None
        allowed_ti = torch.full((sum(rows), -(-self.runner.vocab // 32)), -1, dtype=torch.int32)
        row = 0
        for item, count in zip(items, rows, strict=True):
            self._mask(item.id, allowed_ti[row : row + count])
            row += count
        return allowed_ti.to(self.where)

    def _mask(self, request_id: int, allowed_ji: Tensor) -> None:
        """The masks of one request's rows: behind the tokens it has, then behind each draft that its grammar takes."""
        job, track = self.jobs[request_id], self.tracks[request_id]
        automaton = job.automaton
        if automaton is None or job.failure:
            return
        made = track.tokens[len(job.prompt) :]
        for token in made[job.fed :]:
            if not automaton.accept(token):
                job.failure = f"the grammar refuses token {token}"
                return
        job.fed = len(made)
        rows = automaton.write_masks([] if self.pool is None else self._drafts(track), allowed_ji)
        if not rows:
            job.failure = "the grammar leaves no token"
            return
        allowed_ji[rows:] = 0  # nothing may come from these

    def _drafts(self, track: Track) -> list[int]:
        assert self.pool is not None
        slot = track.slot if track.has_drafts else 0
        drafts: list[int] = self.pool.token_z[slot * self.pool.draft : (slot + 1) * self.pool.draft].tolist()
        return drafts

    # what a step needs

    def _step(
        self,
        items: Sequence[Item],
        starts: Sequence[int],
        known: Sequence[int],
        *,
        decode: bool,
        rows: Sequence[int] | None = None,
    ) -> Csa2Step:
        """Packed positions of all requests, their pages and states."""
        tracks = [self.tracks[item.id] for item in items]
        counts = self._tensor(rows if rows is not None else [item.rows for item in items])
        first_b, place_b = self._tensor(starts), torch.arange(len(items), device=self.where)
        seq_t = place_b.repeat_interleave(counts)
        within_t = torch.arange(len(seq_t), device=self.where) - (counts.cumsum(0) - counts)[seq_t]
        return Csa2Step(
            positions_t=(first_b[seq_t] + within_t).to(torch.int32),
            seq_t=seq_t.to(torch.int32),
            first_b=first_b.to(torch.int32),
            end_b=(first_b + counts).to(torch.int32),
            known_b=self._tensor(known).to(torch.int32),
            valid_b=self._tensor([track.valid for track in tracks]).to(torch.int32),
            state_b=self._tensor([track.slot for track in tracks]).to(torch.int32),
            table_bp=self._table(items),
            clip_b=torch.zeros_like(place_b, dtype=torch.int32),
            decode=decode,
        )

    def _table(self, items: Sequence[Item]) -> Tensor:
        """Pages of every request in order, -1 behind them."""
        width = max(len(item.blocks) for item in items)
        return self._tensor([[*item.blocks, *[-1] * (width - len(item.blocks))] for item in items]).to(torch.int32)

    def _past(self, tracks: Sequence[Track], starts: Sequence[int]) -> Tensor:
        """The tokens before the first row of every request, -1 where there is none."""
        size = self.runner.history
        past = [
            [-1] * max(size - start, 0) + t.tokens[max(start - size, 0) : start]
            for t, start in zip(tracks, starts, strict=True)
        ]
        return self._tensor(past).long().reshape(len(tracks), size)

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.where)


def _signed(x: int) -> int:
    """The bits of an unsigned 64-bit number as a signed one."""
    return x - 2**64 if x >= 2**63 else x
