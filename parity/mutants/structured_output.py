"""Masks as an engine makes and applies them, with one thing wrong at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deeptwin.optimized.structured_output import Automaton, speculative_masks_xgrammar, token_masks_xgrammar
from deeptwin.reference.config import GrammarRequest, GrammarStatus, Vocabulary

right_masks, right_steps = token_masks_xgrammar, speculative_masks_xgrammar


def _masks_with(automaton: type[Automaton]) -> Callable[..., tuple[Tensor, Tensor]]:
    def token_masks(token_n: Tensor, *, vocabulary: Vocabulary, request: GrammarRequest) -> tuple[Tensor, Tensor]:
        return token_masks_xgrammar(token_n, vocabulary=vocabulary, request=request, automaton=automaton)

    return token_masks


def _set(mask_w: Tensor, token: int, allowed: bool) -> None:
    bit = 1 << token % 32
    word = int(mask_w[token // 32]) & 0xFFFFFFFF
    word = word | bit if allowed else word & ~bit
    mask_w[token // 32] = word - 2**32 if word >= 2**31 else word


class _BitsFromTheTop(Automaton):
    def write_mask(self, mask_w: Tensor) -> bool:
        found = super().write_mask(mask_w)
        for w, word in enumerate(mask_w.tolist()):
            turned = int(f"{word & 0xFFFFFFFF:032b}"[::-1], 2)
            mask_w[w] = turned - 2**32 if turned >= 2**31 else turned
        return found


class _EndAtAnyTime(Automaton):
    def write_mask(self, mask_w: Tensor) -> bool:
        found = super().write_mask(mask_w)
        _set(mask_w, self.vocabulary.eos, True)
        return found


class _EndNever(Automaton):
    def write_mask(self, mask_w: Tensor) -> bool:
        found = super().write_mask(mask_w)
        _set(mask_w, self.vocabulary.eos, False)
        return found


class _NothingBehindTheEnd(Automaton):
    def accept(self, token: int) -> bool:
        return not self.has_ended and super().accept(token)


class _GrammarFromTheStart(Automaton):
    def __init__(self, vocabulary: Vocabulary, request: GrammarRequest, *, history: int) -> None:
        super().__init__(vocabulary, replace(request, trigger=(), bound=None), history=history)


class _TriggerFromScratch(Automaton):
    def _follow(self, token: int) -> None:
        trigger = self.request.trigger
        self.progress = self.progress + 1 if trigger[self.progress] == token else int(trigger[0] == token)
        self.is_bound = token == self.request.bound


class _TriggerForgotten(Automaton):
    def accept(self, token: int) -> bool:
        found = super().accept(token)
        if found and self.in_grammar and self.request.trigger and token == self.request.trigger[0]:
            self.progress = 1
        elif found and self.in_grammar == 2 and self.request.trigger:
            self.progress, self.is_bound = 0, False
        return found


class _BoundOutsideTheTrigger(Automaton):
    def _follow(self, token: int) -> None:
        if token == self.request.bound:
            self.is_bound = True
        else:
            super()._follow(token)


class _BoundFromTheStart(Automaton):
    def _follow(self, token: int) -> None:
        super()._follow(token)
        if self.is_bound:
            self.progress = 0


class _BoundIsFree(Automaton):
    def _follow(self, token: int) -> None:
        super()._follow(token)
        self.is_bound = False


class _SpecialTokensPass(Automaton):
    def _admits(self, token: int) -> bool:
        return not (self.vocabulary.tokens[token] or token == self.vocabulary.eos) or super()._admits(token)


class _SpareBitsSet(Automaton):
    def __init__(self, vocabulary: Vocabulary, request: GrammarRequest, *, history: int) -> None:
        super().__init__(vocabulary, request, history=history)
        self.last_word = -1


class _NegativeFromTheEnd(Automaton):
    def accept(self, token: int) -> bool:
        # what a list of tokens does with −1
        return super().accept(token % len(self.vocabulary.tokens) if token < 0 else token)


class _FirstByteOnly(Automaton):
    def write_mask(self, mask_w: Tensor) -> bool:
        found = super().write_mask(mask_w)
        first = {bytes([byte]): bool(int(mask_w[byte // 32]) >> byte % 32 & 1) for byte in range(256)}
        if not self.in_trigger and not self.has_ended:
            for token, text in enumerate(self.vocabulary.tokens):
                if len(text) > 1:
                    _set(mask_w, token, first[text[:1]])
        return found


bits_from_the_top = _masks_with(_BitsFromTheTop)
end_at_any_time = _masks_with(_EndAtAnyTime)
end_never = _masks_with(_EndNever)
nothing_behind_the_end = _masks_with(_NothingBehindTheEnd)
grammar_from_the_start = _masks_with(_GrammarFromTheStart)
trigger_from_scratch = _masks_with(_TriggerFromScratch)
trigger_forgotten = _masks_with(_TriggerForgotten)
bound_outside_the_trigger = _masks_with(_BoundOutsideTheTrigger)
bound_from_the_start = _masks_with(_BoundFromTheStart)
bound_is_free = _masks_with(_BoundIsFree)
special_tokens_pass = _masks_with(_SpecialTokensPass)
spare_bits_set = _masks_with(_SpareBitsSet)
negative_from_the_end = _masks_with(_NegativeFromTheEnd)
first_byte_only = _masks_with(_FirstByteOnly)


# drafts


def _steps_with(automaton: type[Automaton]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def speculative_masks(
        emitted_sj: Tensor, draft_sg: Tensor, *, vocabulary: Vocabulary, request: GrammarRequest
    ) -> tuple[Tensor, Tensor, Tensor]:
        told: dict[str, Any] = {"vocabulary": vocabulary, "request": request, "automaton": automaton}
        return speculative_masks_xgrammar(emitted_sj, draft_sg, **told)

    return speculative_masks


class _DraftsNotTakenBack(Automaton):
    def rollback(self, tokens: int) -> None:
        pass


class _OneDraftTooFew(Automaton):
    def rollback(self, tokens: int) -> None:
        super().rollback(max(tokens - 1, 0))


class _TriggerNotTakenBack(Automaton):
    def rollback(self, tokens: int) -> None:
        kept = (self.progress, self.is_bound)
        super().rollback(tokens)
        self.progress, self.is_bound = kept


class _BoundNotTakenBack(Automaton):
    def rollback(self, tokens: int) -> None:
        kept = self.is_bound
        super().rollback(tokens)
        self.is_bound = kept


class _EndNotTakenBack(Automaton):
    def rollback(self, tokens: int) -> None:
        if not self.has_ended:
            super().rollback(tokens)


drafts_not_taken_back = _steps_with(_DraftsNotTakenBack)
one_draft_too_few_taken_back = _steps_with(_OneDraftTooFew)
trigger_not_taken_back = _steps_with(_TriggerNotTakenBack)
bound_not_taken_back = _steps_with(_BoundNotTakenBack)
end_not_taken_back = _steps_with(_EndNotTakenBack)
negative_draft_from_the_end = _steps_with(_NegativeFromTheEnd)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """A step that starts again from all tokens; the default is right."""

    shift: int = 0  # rows by which the mask is older than the draft before it
    goes_on: bool = False  # behind a refused draft
    refuses: bool = True
    feeds: int = 0  # emitted tokens left out at the end
    rows: int = 99

    def __call__(
        self, emitted_sj: Tensor, draft_sg: Tensor, *, vocabulary: Vocabulary, request: GrammarRequest
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, drafts = draft_sg.shape
        masks = torch.full((steps, drafts + 1, vocabulary.words), -1, dtype=torch.int32)
        rows = torch.zeros(steps, dtype=torch.int32)
        status = torch.full((steps,), int(GrammarStatus.ABORTED), dtype=torch.int32)
        automaton = Automaton(vocabulary, request, history=drafts + 2)
        for s in range(steps):
            emitted = [token for token in emitted_sj[s].tolist() if token >= 0]
            fed = [automaton.accept(token) for token in emitted[: len(emitted) - self.feeds]]
            if self.refuses and not all(fed):
                return masks, rows, status
            status[s], rows[s], taken = int(GrammarStatus.RUNNING), 1, 0
            automaton.write_mask(masks[s, 0])
            for row, token in enumerate(draft_sg[s].tolist(), start=1):
                before = masks[s, row - 1].clone()
                if not automaton.accept(token):
                    if self.goes_on:
                        continue
                    break
                taken, rows[s] = taken + 1, row + 1
                automaton.write_mask(masks[s, row])
                if self.shift:
                    masks[s, row] = before
            masks[s, self.rows :] = -1
            automaton.rollback(taken)
        return masks, rows, status


mask_before_the_draft = _Steps(shift=1)
masks_behind_a_refused_draft = _Steps(goes_on=True)
refusals_ignored = _Steps(refuses=False)
last_token_not_fed = _Steps(feeds=1)
only_the_first_row = _Steps(rows=1)


# rows


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Masks on packed rows; the default is right."""

    bits: str = "low"  # low: bit 0 first; top: bit 31 first; unsigned: bit 31 is lost
    value: float = -torch.inf
    every_mask: bool = False
    wraps: bool = False
    first_masks: bool = False
    down: int = 0
    skips: bool = False  # the word in which the vocabulary ends
    beyond: bool = False
    zeroes: bool = False

    def __call__(self, logits_tv_: Tensor, mask_yjw: Tensor, first_y: Tensor, length_y: Tensor) -> Tensor:
        rows, width = logits_tv_.shape
        for y, (first, length) in enumerate(zip(first_y.tolist(), length_y.tolist(), strict=True)):
            if first < 0 and not self.wraps:
                continue
            for j in range(mask_yjw.shape[1] if self.every_mask else min(length, mask_yjw.shape[1])):
                row = (first + j + self.down) % rows
                allowed = self._allowed(mask_yjw[0 if self.first_masks else y, j], width)
                logits = logits_tv_[row, : len(allowed)]
                logits[~allowed] = self.value
                if self.zeroes:
                    logits[allowed] = 0.0
        return logits_tv_

    def _allowed(self, words: Tensor, width: int) -> Tensor:
        bits = (words.long()[:, None] >> torch.arange(32)) & 1
        if self.bits == "top":
            bits = bits.flip(1)
        elif self.bits == "unsigned":
            bits[:, 31] = 0
        allowed = bits.reshape(-1)[:width] > 0
        if self.skips and width % 32:
            allowed[width // 32 * 32 :] = True
        if self.beyond:
            allowed = torch.cat([allowed, torch.zeros(width - len(allowed), dtype=torch.bool)])
        return allowed


right_rows = _Rows()
bits_from_the_top_of_rows = _Rows(bits="top")
large_and_finite = _Rows(value=-1e9)
every_mask_applied = _Rows(every_mask=True)
absent_from_the_end = _Rows(wraps=True)
masks_of_the_first = _Rows(first_masks=True)
one_row_late = _Rows(down=1)
sign_bit_lost = _Rows(bits="unsigned")
last_word_skipped = _Rows(skips=True)
beyond_the_mask = _Rows(beyond=True)
allowed_ones_too = _Rows(zeroes=True)
