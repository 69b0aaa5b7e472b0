"""A model whose hidden state is a hash of what its caches hold, behind the interface of a runner.

Every token leaves a key in its page and in a ring of its state; a row reads all pages of its sequence up to itself, the
ring, and the tokens before the step. A wrong page, slot, ring, position or token changes what comes out at once, and a
step costs next to nothing: schedules can be tried by the thousand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.optimized.plan import Plan
from deeptwin.optimized.steps import Forward
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.taps import Tap, ignore

WINDOW, BACKTRACKING = 6, 9
RING = WINDOW + BACKTRACKING
RADIX, STRIDE, ODD = -7046029254386353131, -7723592293110705685, -4658895280553007687


def _mixed(x: Tensor) -> Tensor:
    """Spreads 64 bits."""
    x = (x ^ (x >> 31)) * ODD
    return x ^ (x >> 29)


class ToyRunner:
    """Int64 hashes in place of hidden rows."""

    history = 2

    def __init__(self, plan: Plan, *, vocab: int, pages: int, states: int, page_tokens: int, spread: float = 4.0) -> None:
        self.plan, self.vocab, self.page_tokens, self.spread = plan, vocab, page_tokens, spread
        self.key_po = torch.arange(pages * page_tokens).view(pages, page_tokens) * ODD + 1  # what nobody wrote
        self.ring_so = torch.arange(states * RING).view(states, RING) * ODD + 2

    def forward(self, token_t: Tensor, past_bk: Tensor, step: Csa2Step, *, tap: Tap = ignore) -> Forward:
        """Keys into pages and rings, then every row from what is there."""
        at_t, seq_t = step.positions_t.long(), step.seq_t.long()
        before_t2 = torch.stack([self._before(token_t, past_bk, step, back) for back in (2, 1)], 1)
        key_t = _mixed(token_t * STRIDE + before_t2[:, 0] * ODD + before_t2[:, 1] * RADIX + at_t)
        # a row of a prompt sees the window as it was, and what the chunk put there since
        rows = [self._row(t, key_t, step) for t in range(len(token_t))] if not step.decode else None
        page_t = step.table_bp.long()[seq_t, at_t // self.page_tokens]
        self.key_po[page_t, at_t % self.page_tokens] = key_t
        self.ring_so[step.state_b.long()[seq_t], at_t % RING] = key_t
        window = rows if rows is not None else [self._ring(int(s), int(p), step) for s, p in zip(seq_t, at_t, strict=True)]
        whole = [self._pages(int(s), int(p), step) for s, p in zip(seq_t, at_t, strict=True)]
        hidden_y = _mixed(torch.stack(whole) + torch.stack(window)) if len(token_t) else token_t
        return Forward(row_t=torch.arange(len(token_t)), hidden_ym=hidden_y[:, None], features=())

    def head(self, hidden_ym: Tensor) -> Tensor:
        """Logits that look drawn; in thousandths, so that they are exact."""
        column_v = torch.arange(self.vocab)
        word_yv = _mixed(_mixed(hidden_ym + column_v * STRIDE) + RADIX) & 0xFFFF
        return (word_yv - 2**15).float() * (self.spread / 2**15)

    def _before(self, token_t: Tensor, past_bk: Tensor, step: Csa2Step, back: int) -> Tensor:
        within_t = step.positions_t.long() - step.first_b.long()[step.seq_t.long()]
        own_t = token_t[(torch.arange(len(token_t)) - back).clamp(min=0)]
        past_t = past_bk[step.seq_t.long(), (past_bk.shape[1] - back + within_t).clamp(max=past_bk.shape[1] - 1)]
        return torch.where(within_t >= back, own_t, past_t)

    def _pages(self, seq: int, position: int, step: Csa2Step) -> Tensor:
        at_s = torch.arange(position + 1)
        key_s = self.key_po[step.table_bp.long()[seq, at_s // self.page_tokens], at_s % self.page_tokens]
        return (_mixed(key_s + at_s * RADIX)).sum()

    def _ring(self, seq: int, position: int, step: Csa2Step) -> Tensor:
        at_w = torch.arange(max(position - WINDOW + 1, int(step.valid_b[seq])), position + 1)
        return _mixed(self.ring_so[int(step.state_b[seq]), at_w % RING] + at_w * STRIDE).sum()

    def _row(self, t: int, key_t: Tensor, step: Csa2Step) -> Tensor:
        seq, position = int(step.seq_t[t]), int(step.positions_t[t])
        first = int(step.first_b[seq])
        at_w = torch.arange(max(position - WINDOW + 1, int(step.valid_b[seq])), position + 1)
        start = t - (position - first)
        old_w = self.ring_so[int(step.state_b[seq]), at_w % RING]
        new_w = key_t[(start + at_w - first).clamp(min=0)]
        return _mixed(torch.where(at_w < first, old_w, new_w) + at_w * STRIDE).sum()

    def snapshot(self, slot: int, end: int) -> bytes:
        """The ring."""
        return self.ring_so[slot].numpy().tobytes()

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """The ring."""
        self.ring_so[slot] = torch.frombuffer(bytearray(payload), dtype=torch.int64)

    def page_bytes(self, page: int) -> bytes:
        """The keys of a page."""
        return self.key_po[page].numpy().tobytes()

    def load_page(self, page: int, payload: bytes) -> None:
        """The keys of a page."""
        self.key_po[page] = torch.frombuffer(bytearray(payload), dtype=torch.int64)

    def cache_views(self) -> dict[str, Tensor]:
        """Pages and rings."""
        return {"page": self.key_po, "ring": self.ring_so}

    def reset(self, slot: int) -> None:
        """Nothing: what an earlier request left in a ring is not read."""
