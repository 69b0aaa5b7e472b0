"""Drafts of V3, V3.2 and V4 by their draft module, which is applied again for every further draft.

Row p of the module joins what the main model made of token p with the embedding of token p + 1, so it can be computed
when that token is known: with the next rows of the sequence, or by `propose` for the token that was just drawn. Until
then the drafter keeps the hidden state. Entry p of the module's cache, which the row leaves there, is a function of the
tokens up to p + 1: in pages it counts to the page of token p + 1, one place behind its own.

For a further draft the module reads its own output in place of the main model's. What such rows leave in the cache is
written over when the main model has seen their tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from deeptwin.reference.config import Draw, PageLayout
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.dspark_state import DraftRequests
from deeptwin.reference.mtp_weights import MtpV3Weights, MtpV4Weights
from deeptwin.reference.presets import V3Config, V4Config
from deeptwin.reference.v4_state import v4_caches

from .drafter import DraftBatch, draw_drafts
from .plan import Plan
from .steps import Forward, bytes_of, fill_with
from .steps_state import load_rows, ring_parts, save_rows
from .steps_v3 import v3_block_step_, v3_cache, v3_enter_step
from .steps_v4 import v4_block_step_, v4_head_step


class Module(Protocol):
    """A draft module over its cache: what differs from one generation to the other."""

    vocab: int
    row: tuple[int, ...]  # shape of a token's hidden state

    def hidden(self, forward: Forward) -> Tensor:
        """Of a step of the main model, what the module reads, bf16 [t, ...]."""
        ...

    def advance(self, next_t: Tensor, hidden_t: Tensor, step: Csa2Step) -> Tensor:
        """Rows of a step, in place in the cache; what a further application reads, bf16 [t, ...]."""
        ...

    def logits(self, carried_t: Tensor) -> Tensor:
        """Of what `advance` returned, fp32 [t, v]."""
        ...

    def page_rows(self, page: int) -> list[Tensor]:
        """The rows of a page, one entry each, sharing memory."""
        ...

    def state_rings(self, slot: int) -> list[tuple[Tensor, int]]:
        """The rings of a state, sharing memory, and how many positions of them count."""
        ...


class V3Module:
    """The module of V3 or V3.2 over pages of its own, which lie as the main model's."""

    def __init__(
        self,
        config: V3Config,
        weights: MtpV3Weights,
        plan: Plan,
        *,
        pages: int,
        page_tokens: int,
        positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.weights, self.plan = config, weights, plan
        self.vocab = config.vocab_size
        self.row: tuple[int, ...] = (config.hidden,)
        self.table_sr = plan.op("rope.table_of")(config.attention.rope, positions).to(device)
        self.cache = v3_cache(config, pages=pages, page_tokens=page_tokens, device=device)

    def hidden(self, forward: Forward) -> Tensor:
        """The rows behind the final norm."""
        return forward.hidden_ym

    def advance(self, next_t: Tensor, hidden_t: Tensor, step: Csa2Step) -> Tensor:
        """As `reference.mtp.mtp_v3`: what the head reads, and a further application too."""
        config, weights = self.config, self.weights
        e_tm, cast = weights.embed_vm[next_t], config.attention.weight_cast
        x_tm = self.plan.op("mtp.mtp_join")(e_tm, hidden_t, weights.join, eps=config.norm_eps, cast=cast)
        h_tm, y_tm = v3_block_step_(
            x_tm,
            torch.zeros_like(x_tm),
            weights.block,
            self.table_sr,
            self.cache,
            step,
            config=config,
            plan=self.plan,
        )
        return v3_enter_step(h_tm, y_tm, weights.norm_m, config=config, plan=self.plan)[1]

    def logits(self, carried_t: Tensor) -> Tensor:
        """The head's."""
        return self.plan.op("linear.linear")(carried_t, self.weights.head_vm, dtype=torch.float32)

    def page_rows(self, page: int) -> list[Tensor]:
        """Latents, and in V3.2 index keys as codes and scales."""
        if isinstance(self.cache, Tensor):
            return [self.cache[page]]
        assert self.config.index is not None
        key = self.config.index.key
        assert key is not None
        return [
            self.cache.latent_pow[page],
            *ring_parts(self.cache.index_pow, page, fmt=key, layout=PageLayout.SECTIONED),
        ]

    def state_rings(self, slot: int) -> list[tuple[Tensor, int]]:
        """Pages hold everything."""
        return []


class V4Module:
    """The draft block of V4 over a ring in every state: it has a window alone."""

    def __init__(
        self,
        config: V4Config,
        weights: MtpV4Weights,
        plan: Plan,
        *,
        states: int,
        backtracking: int,
        positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.weights, self.plan = config, weights, plan
        self.vocab = config.vocab_size
        self.row: tuple[int, ...] = (config.mhc.streams, config.hidden)
        # the block has a number of its own behind the layers, and the schedule of that number
        self.attn = replace(config.attn(config.num_layers), backtracking=backtracking)
        self.table_sr = plan.op("rope.table_of")(self.attn.rope, positions).to(device)
        self.caches = v4_caches(self.attn, pages=0, states=states, device=device)

    def hidden(self, forward: Forward) -> Tensor:
        """The streams before the head."""
        return forward.features[0]

    def advance(self, next_t: Tensor, hidden_t: Tensor, step: Csa2Step) -> Tensor:
        """As `reference.mtp.mtp_v4`: streams."""
        config, weights = self.config, self.weights
        stream_tnm = self.plan.op("mtp.mtp_join_streams")(
            weights.embed_vm[next_t], hidden_t, weights.join, eps=config.norm_eps
        )
        return v4_block_step_(
            stream_tnm,
            next_t,
            weights.block,
            self.table_sr,
            self.caches,
            step,
            config=config,
            attn=self.attn,
            plan=self.plan,
        )

    def logits(self, carried_t: Tensor) -> Tensor:
        """Of the streams through the block's own site and norm."""
        x_tm = v4_head_step(carried_t, self.weights.site, self.weights.norm_m, config=self.config, plan=self.plan)
        return self.plan.op("linear.linear")(x_tm, self.weights.head_vm, dtype=torch.float32)

    def page_rows(self, page: int) -> list[Tensor]:
        """Pages hold nothing."""
        return []

    def state_rings(self, slot: int) -> list[tuple[Tensor, int]]:
        """The window."""
        assert self.attn.cache is not None
        parts = ring_parts(self.caches.ring_pow, slot, fmt=self.attn.cache, layout=PageLayout.SECTIONED)
        return [(part, self.attn.window) for part in parts]


class MtpDrafter:
    """Drafts by applying a module `gamma` times; it has no head for confidence, so every draft is trusted."""

    def __init__(
        self, module: Module, *, gamma: int, states: int, draw: Draw, plan: Plan, device: torch.device | str = "cpu"
    ) -> None:
        if gamma < 1:
            raise ValueError(f"gamma: expected at least one draft, got {gamma}")
        self.module = module
        self.gamma = gamma
        self.draw = draw
        self.plan = plan
        # hidden states of the newest tokens of every state, by position: of two steps, and of the token before them
        places = 2 * (gamma + 1) + 1
        self.hidden = torch.zeros(states, places, *module.row, dtype=torch.bfloat16, device=device)
        self.position = torch.full((states, places), -1, dtype=torch.int64, device=device)

    def observe(self, forward: Forward, token_t: Tensor, step: Csa2Step) -> None:
        """Compute the rows whose next token is among the step's inputs, and keep hidden states for the others.

        Raises:
            ValueError: a sequence goes on from a token whose hidden state is not there.
        """
        hidden_t, position_t, seq_t = self.module.hidden(forward), step.positions_t.long(), step.seq_t.long()
        state_t = step.state_b.long()[seq_t]
        # before its first valid position a sequence has no row
        kept_t = position_t > step.valid_b.long()[seq_t]
        begins_t = kept_t & (position_t == step.first_b.long()[seq_t])
        before_t = torch.cat([hidden_t[:1], hidden_t[:-1]])
        before_t[begins_t] = self._kept(state_t[begins_t], position_t[begins_t] - 1)
        if kept_t.any():
            self.module.advance(token_t[kept_t], before_t[kept_t], _moved_back(step, kept_t))
        places = self.hidden.shape[1]
        newest_t = step.end_b.long()[seq_t] - position_t <= places
        at = state_t[newest_t], position_t[newest_t] % places
        self.hidden[at] = hidden_t[newest_t]
        self.position[at] = position_t[newest_t]

    def propose(self, batch: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
        """A draft behind the newest token of every request, then one behind each draft; padding drafts V - 1.

        Raises:
            ValueError: the hidden state of a request's newest key is not there.
        """
        real_b = batch.real_b
        own = DraftRequests(**{name: x[real_b] for name, x in vars(batch.requests).items()})
        table_bp, state_b, valid_b = batch.table_bp[real_b], own.state_b.long(), own.valid_b
        position_b, token_b = own.first_b.long() + own.accepted_b.long(), own.golden_b.long()
        carried_b = self._kept(state_b, position_b)
        shape = len(real_b), self.gamma, self.module.vocab
        token_bj = token_b.new_full(shape[:2], shape[2] - 1)
        logprob_bjv = torch.full(shape, -torch.inf, device=token_b.device)
        logprob_bjv[:, :, -1] = 0.0
        for j in range(self.gamma if len(token_b) else 0):
            step = _one_row(position_b + j, state_b, valid_b, table_bp)
            carried_b = self.module.advance(token_b, carried_b, step)
            logits_bv = self.module.logits(carried_b)
            token_b, logprob_bv = draw_drafts(logits_bv, position_b + j + 2, own, draw=self.draw, ops=self.plan)
            token_bj[real_b, j], logprob_bjv[real_b, j] = token_b, logprob_bv
        return token_bj, logprob_bjv, torch.ones(shape[:2], device=token_b.device)

    def page_bytes(self, page: int, before: int) -> bytes:
        """The entries that the tokens of a page completed: the last one of the page in front, and all but its last."""
        found = []
        for own, front in zip(self.module.page_rows(page), self.module.page_rows(before), strict=True):
            # the first page of a sequence has nothing in front: page 0 belongs to nobody
            found += [front[-1:] if before else torch.zeros_like(front[-1:]), own[:-1]]
        return bytes_of(found)

    def load_page(self, page: int, before: int, payload: bytes) -> None:
        """Write what `page_bytes` gave where it belongs.

        Raises:
            ValueError: the payload has another length.
        """
        places = []
        for own, front in zip(self.module.page_rows(page), self.module.page_rows(before), strict=True):
            places += [front[-1:] if before else torch.empty_like(front[-1:]), own[:-1]]
        fill_with(payload, places)

    def snapshot(self, slot: int, end: int) -> bytes:
        """The hidden state of the newest token, and the window before its entry.

        Raises:
            ValueError: the newest token is not the one before `end`.
        """
        hidden = self._kept(torch.tensor([slot]), torch.tensor([end - 1]))
        return bytes_of([hidden]) + save_rows(self.module.state_rings(slot), end - 1)

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """Put a snapshot into a state.

        Raises:
            ValueError: the payload has another length.
        """
        place = (end - 1) % self.hidden.shape[1]
        row = self.hidden[slot, place]
        size = row.numel() * row.element_size()
        load_rows(self.module.state_rings(slot), end - 1, payload[size:])
        fill_with(payload[:size], [row])
        self.position[slot] = -1
        self.position[slot, place] = end - 1

    def _kept(self, state_y: Tensor, position_y: Tensor) -> Tensor:
        """Hidden states of tokens."""
        at = state_y, position_y % self.hidden.shape[1]
        lost_y = self.position[at] != position_y
        if lost_y.any():
            which = int(lost_y.nonzero()[0])
            where = f"position {position_y[which]} in state {state_y[which]}"
            raise ValueError(f"step: expected rows behind one whose hidden state was seen, got none of {where}")
        return self.hidden[at]


def _moved_back(step: Csa2Step, kept_t: Tensor) -> Csa2Step:
    """The step of the module: a row stands one position before the token that it embeds."""
    first_b, end_b = torch.maximum(step.first_b - 1, step.valid_b), step.end_b - 1
    has_rows_b = end_b > first_b
    number_b = (has_rows_b.cumsum(0) - 1).to(torch.int32)
    return Csa2Step(
        positions_t=(step.positions_t - 1)[kept_t],
        seq_t=number_b[step.seq_t[kept_t].long()],
        first_b=first_b[has_rows_b],
        end_b=end_b[has_rows_b],
        known_b=step.known_b[has_rows_b],
        valid_b=step.valid_b[has_rows_b],
        state_b=step.state_b[has_rows_b],
        table_bp=step.table_bp[has_rows_b],
        clip_b=step.clip_b[has_rows_b],
        decode=step.decode,
    )


def _one_row(position_b: Tensor, state_b: Tensor, valid_b: Tensor, table_bp: Tensor) -> Csa2Step:
    """A decode step of one row for each request."""
    first_b = position_b.to(torch.int32)
    return Csa2Step(
        positions_t=first_b,
        seq_t=torch.arange(len(first_b), dtype=torch.int32, device=first_b.device),
        first_b=first_b,
        end_b=first_b + 1,
        known_b=first_b + 1,
        valid_b=valid_b.to(torch.int32),
        state_b=state_b.to(torch.int32),
        table_bp=table_bp,
        clip_b=torch.zeros_like(first_b),
        decode=True,
    )
