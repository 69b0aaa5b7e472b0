"""Which tokens a grammar admits: after every prefix, for the rows of a draft, and what that does to logits.

A request is free until its trigger has appeared, may be bound to complete the trigger, follows its grammar (at once
without a trigger), and is free again behind the end token. Here every mask is found anew from the whole list of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .byte_grammar import ByteGrammar, States, accepts
from .config import GrammarKind, GrammarRequest, GrammarStatus, Vocabulary
from .grammar_json import json_schema
from .grammar_text import ebnf, regex
from .serving_checks import expect_drafts, expect_masks, expect_request, expect_tokens

PARSERS = {GrammarKind.REGEX: regex, GrammarKind.JSON: json_schema, GrammarKind.EBNF: ebnf}


@dataclass(frozen=True)
class _Place:
    """Where the output of a request stands: tokens of the trigger that have appeared, what the grammar has left."""

    states: States
    progress: int = 0
    is_bound: bool = False
    has_ended: bool = False


def token_masks(token_n: Tensor, *, vocabulary: Vocabulary, request: GrammarRequest) -> tuple[Tensor, Tensor]:
    """Which tokens may come after each beginning of an output, and how many of the tokens given were admitted.

    Math:
        free: all, while the trigger has not fully appeared; bound: the next token of the trigger alone, once the bound
        token came; grammar: tokens whose bytes can follow, and the end token where the text is complete; ended: all.
        Bit b of word w stands for token 32 w + b.

    Shapes:
        token_n: int32 [n]; returns int32 [n + 1, ceil(v / 32)] and int32 [1].

    Edges:
        behind a token that was refused every mask is zero; where all tokens may come, the bits beyond v are one too.

    Raises:
        TypeError: tokens are not int32.
        ValueError: tokens have another shape; the trigger or bound token is not in the vocabulary; the schema is wrong.
        NotImplementedError: the schema says what the matcher does not know.

    Source:
        runtime.md section 7.1
    """
    expect_tokens(token_n)
    expect_request(request, vocabulary)
    grammar, tokens = PARSERS[request.kind](request.schema), token_n.tolist()
    mask_nw = torch.zeros(len(tokens) + 1, vocabulary.words, dtype=torch.int32)
    for n in range(len(tokens) + 1):
        place = _replayed(tokens[:n], grammar, vocabulary, request)
        if place is None:
            return mask_nw, torch.tensor([n - 1], dtype=torch.int32)
        mask_nw[n] = _mask(place, grammar, vocabulary, request)
    return mask_nw, torch.tensor([len(tokens)], dtype=torch.int32)


def speculative_masks(
    emitted_sj: Tensor, draft_sg: Tensor, *, vocabulary: Vocabulary, request: GrammarRequest
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the rows of every step of one request, whose drafts know nothing of the grammar.

    Math:
        the tokens emitted by the step before are added; row 0 has the mask behind them, row k + 1 the mask behind
        drafts 0 … k, as far as those are admitted

    Shapes:
        emitted_sj: int32 [s, j], −1 behind the last; draft_sg: int32 [s, g]; returns masks int32 [s, g + 1, words], how
        many rows a token may come from int32 [s], and `GrammarStatus` int32 [s].

    Edges:
        rows that no token may come from, and rows of a free request, are all ones; a step whose emitted tokens are
        refused, or behind which no token may come, aborts the request; a draft behind which none may come counts as
        refused.

    Raises:
        TypeError: tokens are not int32.
        ValueError: shapes disagree; the trigger or bound token is not in the vocabulary; the schema is wrong.
        NotImplementedError: the schema says what the matcher does not know.

    Source:
        runtime.md section 7.1
    """
    expect_drafts(emitted_sj, draft_sg)
    expect_request(request, vocabulary)
    grammar = PARSERS[request.kind](request.schema)
    steps, drafts = draft_sg.shape
    mask_sjw = torch.full((steps, drafts + 1, vocabulary.words), -1, dtype=torch.int32)
    rows_s = torch.zeros(steps, dtype=torch.int32)
    status_s = torch.full((steps,), int(GrammarStatus.ABORTED), dtype=torch.int32)
    tokens: list[int] = []
    for s in range(steps):
        tokens += [token for token in emitted_sj[s].tolist() if token >= 0]
        for row in range(drafts + 1):
            prefix = tokens + draft_sg[s, :row].tolist()
            place = _replayed(prefix, grammar, vocabulary, request)
            mask_w = None if place is None else _mask(place, grammar, vocabulary, request)
            if mask_w is None or not mask_w.any():
                break
            mask_sjw[s, row] = mask_w
            rows_s[s] += 1
        if not rows_s[s]:
            break
        status_s[s] = int(GrammarStatus.RUNNING)
    return mask_sjw, rows_s, status_s


def apply_masks(logits_tv_: Tensor, mask_yjw: Tensor, first_y: Tensor, length_y: Tensor) -> Tensor:
    """Logits of packed rows, −inf where the mask of a row forbids a token.

    Math:
        logits[first[y] + j, v] = −inf where bit v mod 32 of mask[y, j, v div 32] is 0, for j < length[y]

    Shapes:
        logits_tv_: fp32 [t, v], written in place and returned; mask_yjw: int32 [y, j, w]; first_y, length_y: int32 [y],
        the packed rows of request y.

    Edges:
        a mask beyond the rows of its request, or of a request without rows (first −1), is not used; columns beyond 32 w
        are untouched.

    Raises:
        TypeError: logits are not float32, or anything else not int32.
        ValueError: shapes disagree, or a request has rows outside of the batch.

    Source:
        runtime.md section 7.1
    """
    expect_masks(logits_tv_, mask_yjw, first_y, length_y)
    _, masks, words = mask_yjw.shape
    columns = min(32 * words, logits_tv_.shape[1])
    bit_v = torch.arange(columns)
    for y, (first, length) in enumerate(zip(first_y.tolist(), length_y.tolist(), strict=True)):
        for j in range(min(length, masks) if first >= 0 else 0):
            is_allowed_v = (mask_yjw[y, j, bit_v // 32].long() >> bit_v % 32) & 1
            logits_tv_[first + j, :columns][is_allowed_v == 0] = -torch.inf
    return logits_tv_


def _replayed(
    tokens: Sequence[int], grammar: ByteGrammar, vocabulary: Vocabulary, request: GrammarRequest
) -> _Place | None:
    """Where an output of these tokens stands; None if one of them is refused."""
    place: _Place | None = _Place(grammar.start())
    for n in range(len(tokens)):
        assert place is not None
        place = _after(place, tokens[: n + 1], grammar, vocabulary, request)
        if place is None:
            return None
    return place


def _after(
    place: _Place, tokens: Sequence[int], grammar: ByteGrammar, vocabulary: Vocabulary, request: GrammarRequest
) -> _Place | None:
    """The place behind the last of the tokens."""
    token, trigger = tokens[-1], request.trigger
    if not 0 <= token < len(vocabulary.tokens):
        return None
    if place.has_ended:
        return place
    if place.progress == len(trigger):
        if token == vocabulary.eos:
            return replace(place, has_ended=True) if accepts(place.states) else None
        states = grammar.after(place.states, vocabulary.tokens[token])
        return replace(place, states=states) if states and vocabulary.tokens[token] else None
    if place.is_bound:
        return replace(place, progress=place.progress + 1) if token == trigger[place.progress] else None
    # the longest beginning of the trigger that the output ends in
    ends = (j for j in range(len(trigger), -1, -1) if tuple(tokens[len(tokens) - j :]) == trigger[:j])
    progress = next(j for j in ends if j <= len(tokens))
    return replace(place, progress=progress, is_bound=token == request.bound)


def _mask(place: _Place, grammar: ByteGrammar, vocabulary: Vocabulary, request: GrammarRequest) -> Tensor:
    """The words of a mask."""
    is_free = place.progress < len(request.trigger) and not place.is_bound
    if place.has_ended or is_free:
        return torch.full((vocabulary.words,), -1, dtype=torch.int32)
    is_allowed_v = torch.zeros(32 * vocabulary.words, dtype=torch.bool)
    if place.progress < len(request.trigger):
        is_allowed_v[request.trigger[place.progress]] = True
    else:
        is_allowed_v[list(_admitted(place.states, grammar, vocabulary))] = True
    bits_wb = is_allowed_v.view(-1, 32).long() << torch.arange(32)
    word_w = bits_wb.sum(1, dtype=torch.int64)
    return torch.where(word_w < 2**31, word_w, word_w - 2**32).to(torch.int32)


def _admitted(states: States, grammar: ByteGrammar, vocabulary: Vocabulary) -> Iterator[int]:
    """Tokens whose bytes can follow; neighbours in the alphabet share the way through their common bytes."""
    if accepts(states):
        yield vocabulary.eos
    path, last = [states], b""
    for text, token in sorted((text, token) for token, text in enumerate(vocabulary.tokens) if text):
        shared = 0
        while shared < min(len(text), len(last)) and text[shared] == last[shared]:
            shared += 1
        del path[shared + 1 :]
        for byte in text[shared:]:
            path.append(grammar.step(path[-1], byte))
        last = text
        if path[-1]:
            yield token
