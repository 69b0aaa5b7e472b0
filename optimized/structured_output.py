"""Masks of a grammar, fast; the contract is `reference/structured_output.py`.

The automaton of a request is kept from token to token: progress in the trigger, the grammar's own matcher, and what is
needed to go back. xgrammar, of the extra `engine`, compiles the grammar (written for version 0.2.9).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deeptwin.reference.config import GrammarKind, GrammarRequest, GrammarStatus, Vocabulary
from deeptwin.reference.serving_checks import (
    expect_drafts,
    expect_masks_shape,
    expect_request,
    expect_tokens,
)

from .grammar_pool import compiled_by, engine, grammar_compiler

if TYPE_CHECKING:
    from deeptwin.kernels.triton_ops.structured_output import MaskLaunch


def token_masks_xgrammar(
    token_n: Tensor, *, vocabulary: Vocabulary, request: GrammarRequest, automaton: type[Automaton] | None = None
) -> tuple[Tensor, Tensor]:
    """`reference.structured_output.token_masks`, token by token.

    Raises:
        TypeError: tokens are not int32.
        ValueError: tokens have another shape; the trigger or bound token is not in the vocabulary; the schema is wrong.
        ImportError: xgrammar is not installed.
    """
    expect_tokens(token_n)
    expect_request(request, vocabulary)
    tokens, place = token_n.tolist(), (automaton or Automaton)(vocabulary, request, history=0)
    mask_nw = torch.zeros(len(tokens) + 1, vocabulary.words, dtype=torch.int32)
    for n, token in enumerate(tokens):
        place.write_mask(mask_nw[n])
        if not place.accept(token):
            return mask_nw, torch.tensor([n], dtype=torch.int32)
    place.write_mask(mask_nw[-1])
    return mask_nw, torch.tensor([len(tokens)], dtype=torch.int32)


def speculative_masks_xgrammar(
    emitted_sj: Tensor,
    draft_sg: Tensor,
    *,
    vocabulary: Vocabulary,
    request: GrammarRequest,
    automaton: type[Automaton] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.structured_output.speculative_masks`: drafts are accepted for the time being and taken back.

    Raises:
        TypeError: tokens are not int32.
        ValueError: shapes disagree; the trigger or bound token is not in the vocabulary; the schema is wrong.
        ImportError: xgrammar is not installed.
    """
    expect_drafts(emitted_sj, draft_sg)
    expect_request(request, vocabulary)
    steps, drafts = draft_sg.shape
    mask_sjw = torch.full((steps, drafts + 1, vocabulary.words), -1, dtype=torch.int32)
    rows_s = torch.zeros(steps, dtype=torch.int32)
    status_s = torch.full((steps,), int(GrammarStatus.ABORTED), dtype=torch.int32)
    place = (automaton or Automaton)(vocabulary, request, history=drafts + 2)
    for s in range(steps):
        emitted = [token for token in emitted_sj[s].tolist() if token >= 0]
        if not all(place.accept(token) for token in emitted):
            break
        rows = place.write_masks(draft_sg[s].tolist(), mask_sjw[s])
        if not rows:
            break
        rows_s[s], status_s[s] = rows, int(GrammarStatus.RUNNING)
    return mask_sjw, rows_s, status_s


def apply_masks_triton(
    logits_tv_: Tensor, mask_yjw: Tensor, first_y: Tensor, length_y: Tensor, *, launch: MaskLaunch | None = None
) -> Tensor:
    """`reference.structured_output.apply_masks`; rows outside of the batch are skipped, not refused.

    Raises:
        TypeError: logits are not float32, or anything else not int32.
        ValueError: shapes disagree.
        NotImplementedError: the logits of a row are not one behind the other.
    """
    expect_masks_shape(logits_tv_, mask_yjw, first_y, length_y)
    from deeptwin.kernels.triton_ops import structured_output

    return structured_output.apply_masks(logits_tv_, mask_yjw, first_y, length_y, launch=launch)


class Automaton:
    """Where the output of one request stands; `history` is how many tokens a trigger can be taken back.

    `grammar` is what a `GrammarPool` compiled for the request; without it the grammar is compiled here.
    """

    def __init__(self, vocabulary: Vocabulary, request: GrammarRequest, *, history: int, grammar: Any = None) -> None:
        self.vocabulary = vocabulary
        self.request = request
        self.matcher = engine().GrammarMatcher(grammar or _compiled(vocabulary, request.kind, request.schema))
        self.fallback = _fallback(request.trigger)
        self.progress = 0
        self.is_bound = False
        self.in_grammar = 0  # tokens that the matcher has accepted, the end token among them
        self.behind_end = 0  # tokens after it
        self.before: deque[tuple[int, bool]] = deque(maxlen=history or None)
        # bits beyond the vocabulary, which the matcher leaves set
        spare = 32 * vocabulary.words - len(vocabulary.tokens)
        self.last_word = -1 if not spare else (1 << 32 - spare) - 1

    @property
    def in_trigger(self) -> bool:
        """Whether a part of the trigger is still to come."""
        return self.progress < len(self.request.trigger)

    @property
    def has_ended(self) -> bool:
        """Whether the end token was accepted."""
        return bool(self.matcher.is_terminated())

    def accept(self, token: int) -> bool:
        """Take one token, or refuse it and change nothing."""
        if not 0 <= token < len(self.vocabulary.tokens):
            return False
        if self.has_ended:
            self.behind_end += 1
            return True
        now = (self.progress, self.is_bound)
        if not self.in_trigger:
            if not self._admits(token):
                return False
            self.in_grammar += 1
        elif self.is_bound:
            if token != self.request.trigger[self.progress]:
                return False
            self.progress += 1
        else:
            self._follow(token)
        if self.request.trigger and not self.has_ended:
            self.before.append(now)
        return True

    def _admits(self, token: int) -> bool:
        is_text = bool(self.vocabulary.tokens[token]) or token == self.vocabulary.eos
        return is_text and bool(self.matcher.accept_token(token))

    def _follow(self, token: int) -> None:
        trigger = self.request.trigger
        while self.progress and trigger[self.progress] != token:
            self.progress = self.fallback[self.progress]
        self.progress += trigger[self.progress] == token
        self.is_bound = token == self.request.bound

    def rollback(self, tokens: int) -> None:
        """Be where the automaton was so many accepted tokens ago.

        Raises:
            ValueError: more tokens than were accepted, or than are remembered.
        """
        behind = min(tokens, self.behind_end)
        left = tokens - behind
        ended = self.has_ended and left > 0
        remembered = len(self.before) + ended if self.request.trigger else self.in_grammar
        if left > remembered:
            raise ValueError(f"tokens: expected at most {behind + remembered} to take back, got {tokens}")
        self.behind_end -= behind
        inside = min(left, self.in_grammar)
        if inside:
            self.matcher.rollback(inside)
            self.in_grammar -= inside
        if self.request.trigger:
            for _ in range(left - ended):
                self.progress, self.is_bound = self.before.pop()

    def write_mask(self, mask_w: Tensor) -> bool:
        """Fill the words of a mask; whether any token may come."""
        if self.has_ended or (self.in_trigger and not self.is_bound):
            mask_w.fill_(-1)
            return True
        if self.in_trigger:
            token = self.request.trigger[self.progress]
            mask_w.zero_()
            mask_w[token // 32] = (1 << token % 32) - (1 << 32 if token % 32 == 31 else 0)
            return True
        filled = torch.empty(1, len(mask_w), dtype=torch.int32)
        self.matcher.fill_next_token_bitmask(filled)
        filled[0, -1] &= self.last_word
        mask_w.copy_(filled[0])
        return bool(mask_w.any())

    def write_masks(self, drafts: Sequence[int], mask_jw: Tensor) -> int:
        """Fill the masks of a step: row 0 is that of the next token, row k + 1 stands behind drafts 0 … k.

        Drafts are accepted for the time being. Returns how many rows, from the first on, a token may come from; the
        masks of all others are all ones.
        """
        mask_jw.fill_(-1)
        taken = rows = 0
        for row, mask_w in enumerate(mask_jw):
            if row and not self.accept(drafts[row - 1]):
                break
            taken = row
            if not self.write_mask(mask_w):
                mask_w.fill_(-1)
                break
            rows += 1
        self.rollback(taken)
        return rows


def _fallback(trigger: tuple[int, ...]) -> list[int]:
    """For every length of a matched beginning, the next shorter one that the output also ends in."""
    fallback = [0] * (len(trigger) + 1)
    length = 0
    for place in range(1, len(trigger)):
        while length and trigger[place] != trigger[length]:
            length = fallback[length]
        length += trigger[place] == trigger[length]
        fallback[place + 1] = length
    return fallback


@lru_cache(maxsize=64)
def _compiled(vocabulary: Vocabulary, kind: GrammarKind, schema: str) -> Any:
    return compiled_by(grammar_compiler(vocabulary, threads=1, cache_bytes=0), kind, schema)
