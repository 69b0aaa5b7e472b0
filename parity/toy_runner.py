"""A model whose hidden state is a hash of what its caches hold, behind the interface of a runner.

Every token leaves a key in its page and in a ring of its state; a row reads all pages of its sequence up to itself, the
ring, and the tokens before the step. A wrong page, slot, ring, position or token changes what comes out at once, and a
step costs next to nothing: schedules can be tried by the thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeptwin.optimized.plan import Plan
from deeptwin.optimized.steps import Forward
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.taps import Tap, ignore

WINDOW = 6
RADIX, STRIDE, ODD = -7046029254386353131, -7723592293110705685, -4658895280553007687


def _mixed(x: Tensor) -> Tensor:
    """Spreads 64 bits."""
    x = (x ^ (x >> 31)) * ODD
    return x ^ (x >> 29)


class ToyRunner:
    """Int64 hashes in place of hidden rows."""

    history = 2

    def __init__(
        self,
        plan: Plan,
        *,
        vocab: int,
        pages: int,
        states: int,
        page_tokens: int,
        backtracking: int = 9,
        spread: float = 4.0,
    ) -> None:
        self.plan, self.vocab, self.page_tokens, self.spread = plan, vocab, page_tokens, spread
        self.key_po = torch.arange(pages * page_tokens).view(pages, page_tokens) * ODD + 1  # what nobody wrote
        ring = WINDOW + backtracking
        self.ring_so = torch.arange(states * ring).view(states, ring) * ODD + 2

    def forward(self, token_t: Tensor, past_bk: Tensor, step: Csa2Step, *, tap: Tap = ignore) -> Forward:
        """Keys into pages and rings, then every row from what is there."""
        at_t, seq_t, ring = step.positions_t.long(), step.seq_t.long(), self.ring_so.shape[1]
        key_t = token_t * STRIDE + at_t
        for back, factor in ((1, RADIX), (2, ODD)):
            key_t = key_t + self._before(token_t, past_bk, step, back) * factor
        key_t = _mixed(key_t)
        slot_t = step.state_b.long()[seq_t]
        # a prompt's row sees the window as it was before the chunk, and what the chunk has put there since
        window_tw = at_t[:, None] - torch.arange(WINDOW)
        first_t1 = step.first_b.long()[seq_t][:, None]
        old_tw = self.ring_so[slot_t[:, None], window_tw % ring]
        row_tw = (torch.arange(len(token_t))[:, None] - torch.arange(WINDOW)).clamp(min=0)
        seen_tw = torch.where(window_tw < first_t1, old_tw, key_t[row_tw])
        self.key_po[step.table_bp.long()[seq_t, at_t // self.page_tokens], at_t % self.page_tokens] = key_t
        self.ring_so[slot_t, at_t % ring] = key_t
        if step.decode:
            seen_tw = self.ring_so[slot_t[:, None], window_tw % ring]
        there_tw = window_tw >= step.valid_b.long()[seq_t][:, None].clamp(min=0)
        ring_t = torch.where(there_tw, _mixed(seen_tw + window_tw * STRIDE), 0).sum(1)
        hidden_t = _mixed(self._pages(step)[seq_t, at_t] + ring_t)
        return Forward(row_t=torch.arange(len(token_t)), hidden_ym=hidden_t[:, None], features=())

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

    def _pages(self, step: Csa2Step) -> Tensor:
        """The sum over all keys up to each position of every sequence."""
        at_s = torch.arange(int(step.end_b.max()) if len(step.end_b) else 0)
        page_bs = step.table_bp.long()[:, (at_s // self.page_tokens).clamp(max=step.table_bp.shape[1] - 1)]
        return _mixed(self.key_po[page_bs, at_s % self.page_tokens] + at_s * RADIX).cumsum(1)

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


def toy_logits(tokens: Sequence[int], *, vocab: int, spread: float = 4.0) -> Tensor:
    """What the toy gives behind each of these tokens, fp32 [t, v]: written out with whole numbers, without caches."""
    keys: list[int] = []
    rows, whole = [], 0
    for at, token in enumerate(tokens):
        key = token * STRIDE + at
        for back, factor in ((1, RADIX), (2, ODD)):
            key += (tokens[at - back] if at >= back else -1) * factor
        keys.append(_mixed_int(key))
        whole += _mixed_int(keys[at] + at * RADIX)
        window = sum(_mixed_int(keys[j] + j * STRIDE) for j in range(max(at + 1 - WINDOW, 0), at + 1))
        hidden = _mixed_int(whole + window)
        words = [_mixed_int(_mixed_int(hidden + column * STRIDE) + RADIX) & 0xFFFF for column in range(vocab)]
        rows.append([(word - 2**15) * (spread / 2**15) for word in words])
    return torch.tensor(rows)


def _mixed_int(x: int) -> int:
    x = _wrapped(x)
    x = _wrapped((x ^ (x >> 31)) * ODD)
    return x ^ (x >> 29)


def _wrapped(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63
