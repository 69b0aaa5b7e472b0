"""What drafts for an engine, as the engine sees it, and the drafters that compute nothing.

An engine calls `observe` after every forward of the main model, prefill chunks and decode steps alike, before anything
is decided about the rows: a drafter keeps of them what later drafts attend to. Rows that verification rejects are kept
too; they are written over before anything reads them. It calls `propose` for requests whose newest token was just
drawn. A drafter knows requests by what a step says of them, and writes only to states and pages of these.

`Drafter` is implemented by `NoDrafter` and `ScriptedDrafter` here, `DsparkDrafter` (V4.1) in `drafter_dspark.py` and
`MtpDrafter` (V3, V3.2, V4) in `drafter_mtp.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deeptwin.reference.config import DRAFT_SEED_OFFSET, Draw, DrawUse, RowError
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.dspark_state import DraftRequests

from .steps import Forward
from .verification import Operations, drawn_with

WRAP = 2**64


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftBatch:
    """Requests whose newest token, at position first + accepted + 1, was just drawn.

    `requests` says where they stand and how they draw: golden_b, that token; first_b, the position of the first row of
    their last step, or of the last row of a prefill with accepted_b 0; -1 for padding. All of it int64 but temperature
    and top-p. A request without a newest token, because its row could not be drawn, counts as padding.
    """

    requests: DraftRequests
    ids: tuple[int, ...]  # the names of the requests
    table_bp: Tensor  # int32, pages of a request, in order

    @property
    def real_b(self) -> Tensor:
        """Which requests are none of padding."""
        return (self.requests.first_b >= 0) & (self.requests.golden_b >= 0)


class Drafter(Protocol):
    """Drafts tokens behind those of an engine's requests."""

    gamma: int  # drafts of a request in a step

    def observe(self, forward: Forward, token_t: Tensor, step: Csa2Step) -> None:
        """Keep what drafts need of a step's rows; token_t: int64 [t], its inputs."""
        ...

    def propose(self, batch: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts token_bj int64 [b, γ], the logarithms of what they were drawn from fp32 [b, γ, v], and confidence_bj
        fp32 [b, γ]."""
        ...

    def page_bytes(self, page: int, before: int) -> bytes:
        """What a full page holds that depends on tokens up to its end; `before` is the page in front of it, or 0."""
        ...

    def load_page(self, page: int, before: int, payload: bytes) -> None:
        """Fill a page, and of the one in front of it what depends on the first token of this one."""
        ...

    def snapshot(self, slot: int, end: int) -> bytes:
        """What of a state has to be there, beside pages, for a sequence to go on from token `end`, its newest key."""
        ...

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """Put a snapshot into a state."""
        ...


class _Stateless:
    """The half of a drafter that keeps nothing of the steps that it sees."""

    def observe(self, forward: Forward, token_t: Tensor, step: Csa2Step) -> None:
        """Nothing is kept."""

    def page_bytes(self, page: int, before: int) -> bytes:
        """Pages hold nothing."""
        return b""

    def load_page(self, page: int, before: int, payload: bytes) -> None:
        """Pages hold nothing."""

    def snapshot(self, slot: int, end: int) -> bytes:
        """States hold nothing."""
        return b""

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """States hold nothing."""


class NoDrafter(_Stateless):
    """Plain decoding: steps of one row a request."""

    gamma = 0

    def __init__(self, *, vocab: int) -> None:
        self.vocab = vocab

    def propose(self, batch: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
        """No drafts."""
        golden_b = batch.requests.golden_b
        nothing_bj = torch.zeros(len(golden_b), 0, device=golden_b.device)
        return nothing_bj.long(), nothing_bj[:, :, None].expand(-1, -1, self.vocab), nothing_bj


class ScriptedDrafter(_Stateless):
    """Drafts out of a script: point masses that are right in `quality` of 100 cases, whatever the model says.

    `streams` has, by the name of a request, all its tokens, prompt and output. A hash of name and position decides
    whether the draft is the stream's token, and how confident it is; neither depends on a token. Behind the end of a
    stream, and for an unknown name, the draft is V - 1.
    """

    def __init__(self, streams: Mapping[int, Sequence[int]], *, quality: int, gamma: int, vocab: int) -> None:
        if not 0 <= quality <= 100:
            raise ValueError(f"quality: expected 0 to 100, got {quality}")
        if gamma < 1:
            raise ValueError(f"gamma: expected at least one draft, got {gamma}")
        self.streams = streams
        self.quality = quality
        self.gamma = gamma
        self.vocab = vocab

    def propose(self, batch: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts of every request, each by itself."""
        requests = batch.requests
        first_b = (requests.first_b + requests.accepted_b + 2).tolist()
        drawn = [
            [self._draft(name, first + j) for j in range(self.gamma)]
            for name, first in zip(batch.ids, first_b, strict=True)
        ]
        drafts = torch.tensor(drawn, dtype=torch.float64).reshape(len(drawn), self.gamma, 2)
        token_bj = drafts[:, :, 0].long().to(requests.golden_b.device)
        logprob_bjv = torch.full((*token_bj.shape, self.vocab), -torch.inf, device=token_bj.device)
        logprob_bjv.scatter_(2, token_bj[:, :, None], 0.0)
        return token_bj, logprob_bjv, drafts[:, :, 1].float().to(token_bj.device)

    def _draft(self, name: int, position: int) -> tuple[int, float]:
        luck = _mixed(name * 0x9E3779B97F4A7C15 + position)
        stream = self.streams.get(name, ())
        token = stream[position] if position < len(stream) else self.vocab - 1
        wrong = position < len(stream) and luck % 100 >= self.quality
        return (token + wrong) % self.vocab, (1.0, 0.9375, 0.75, 0.5, 0.25, 0.0)[luck // 100 % 6]


def draw_drafts(
    logits_bv: Tensor, position_b: Tensor, requests: DraftRequests, *, draw: Draw, ops: Operations
) -> tuple[Tensor, Tensor]:
    """One draft of every request, at position_b int64 [b], and the logarithms fp32 [b, v] of what it was drawn from.

    It is drawn as the target's token there would be, with the seed moved. A greedy request drafts at the least
    temperature. A row that cannot be drawn drafts V - 1, as a placeholder does: the target has to say what is wrong.
    """
    filters = drawn_with(requests.temperature_b, requests.top_p_b, requests.top_k_b)
    stream_b = ops.op("sampling.subsequences")(position_b, torch.zeros_like(position_b), use=DrawUse.FRESH)
    token_b, error_b, logprob_bv, _ = ops.op("sampling.sample_logits")(
        logits_bv, *filters, requests.seed_b + DRAFT_SEED_OFFSET, stream_b, draw=draw
    )
    failed_b, last = error_b != RowError.NONE, logits_bv.shape[1] - 1
    logprob_bv = torch.where(failed_b[:, None], -torch.inf, logprob_bv)
    logprob_bv[:, last] = torch.where(failed_b, 0.0, logprob_bv[:, last])
    return torch.where(failed_b, last, token_b), logprob_bv


def _mixed(x: int) -> int:
    x %= WRAP
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9 % WRAP
    x = (x ^ x >> 29) * 0x94D049BB133111EB % WRAP
    return x ^ x >> 32
