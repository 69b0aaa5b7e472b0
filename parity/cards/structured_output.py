"""How masks of grammars are checked: an independent matcher, drafts against single steps, rows of a packed batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import GrammarKind, GrammarRequest, Vocabulary

from .. import draws, texts
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import CallFn, Context, Variant
from ..rules import Bitwise

_mutant, _control = variants("structured_output")

PIECES = (
    *(b'"', b'"a"', b'": ', b'", "', b'{"', b'"}', b"[]", b"[1, ", b"12", b"-1", b".5e", b"true", b"null", b" \n"),
    *(b"ab", b"abc", b"bc", b"xyx", b"\xc3\xa9x", b"\xe2\x98", b"\x98\x83", b"\\u00", b"((", b"))", b"+1", b"aba"),
)
SPECIAL = 256 + len(PIECES)  # a special token that is not the end
EOS = SPECIAL + 1
BYTES = Vocabulary(tokens=(*(bytes([c]) for c in range(256)), *PIECES, b"", b""), eos=EOS)
TRIGGER = (5, 6, 5, 6, 7)  # begins again inside itself
BOUND = 9

# a schema, and texts that it admits
GRAMMARS: dict[str, tuple[GrammarKind, str, tuple[str, ...]]] = {
    "words": (GrammarKind.REGEX, r"(a|b)*abb", ("abbabb", "ababb", "bbbaabb")),
    "wide": (GrammarKind.REGEX, r"[^\d]☃[é-☃]+é?", ("a☃é☃", "☃☃éé")),
    "list": (GrammarKind.REGEX, r"(?:\d{1,3}(?:,\d+)*)?", ("12,5", "1,12,5", "123,4,56")),
    "escapes": (GrammarKind.REGEX, r"\.\x41\u00e9[a-c-]\s\w+.", (".Aé-\nxyx☃", ".Aéa bcab")),
    "object": (
        GrammarKind.JSON,
        '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"},'
        '"c":{"type":"array","items":{"enum":["x",1]}}},"required":["a"]}',
        ('{"a": 12}', '{ "a":-1 ,"b": "é\\u00e9\\n", "c":[1, "x"]}', '{"a": 0, "c": []}'),
    ),
    "string": (GrammarKind.JSON, '{"type":"string"}', ('"abc"', '"\\"é☃"', '""')),
    "numbers": (
        GrammarKind.JSON,
        '{"type":"array","items":{"type":"number"},"minItems":2,"maxItems":3}',
        ("[1, -1.5e+12]", "[0,12,\n-0.5]"),
    ),
    "optional": (
        GrammarKind.JSON,
        '{"type":"object","properties":{"a":{"type":"number"},"b":{"type":"null"}}}',
        ('{"a": 1.5e12}', '{"b": null}', "{ }"),
    ),
    "choice": (
        GrammarKind.JSON,
        '{"anyOf":[{"type":"null"},{"type":"boolean"},{"const":"é"}]}',
        ("null", "true", '"é"'),
    ),
    "nested": (
        GrammarKind.JSON,
        '{"$defs":{"n":{"type":"object","properties":{"v":{"type":"integer"},"n":{"$ref":"#/$defs/n"}},'
        '"required":["v"]}},"$ref":"#/$defs/n"}',
        ('{"v": 1, "n": {"v": 12, "n":{"v":0}}}',),
    ),
    "sum": (
        GrammarKind.EBNF,
        'root ::= term ("+" term)*\n# one term\nterm ::= [0-9]+ | "(" root ")"\n',
        ("1+12", "((1+1)+12)", "((12))"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class GrammarCase:
    """An output of up to `tokens` tokens that follows a grammar, with `steps` steps of `drafts` drafts or none.

    `phase`: plain, trigger (the grammar holds behind it), bound (a token makes the rest of the trigger mandatory).
    """

    grammar: str
    tokens: int
    phase: str = "plain"
    drafts: int = 0
    vocabulary: str = "bytes"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"{self.grammar}-n{self.tokens}-{self.phase}-g{self.drafts}-{self.vocabulary}-{self.regime}"

    @property
    def needs(self) -> tuple[str, ...]:
        return texts.NEEDS if self.vocabulary == "deepseek" else ()


@dataclass(frozen=True, kw_only=True)
class RowCase:
    """`requests` constrained requests with `masks` masks each among packed rows of `columns` logits."""

    requests: int
    masks: int
    columns: int
    spare: int = 0  # mask words that are missing at the end
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"y{self.requests}-j{self.masks}-v{self.columns}-spare{self.spare}-{self.regime}"


def deepseek_vocabulary() -> Vocabulary:
    """Every byte and a thousand longer tokens of the DeepSeek vocabulary, the end token last."""
    ids = [*range(3, 259), *range(300, 1300), *texts.token_ids("code"), *texts.token_ids("mixed")]
    found = texts.token_bytes(dict.fromkeys(ids))
    return Vocabulary(tokens=(*found, b""), eos=len(found))


# inputs


def split(text: bytes, vocabulary: Vocabulary, rng: np.random.Generator) -> list[int]:
    """A text as tokens, cut at random."""
    ids: dict[bytes, int] = {}
    for token, piece in enumerate(vocabulary.tokens):
        ids.setdefault(piece, token)
    tokens, at = [], 0
    while at < len(text):
        sizes = [n for n in range(1, 8) if at + n <= len(text) and text[at : at + n] in ids]
        size = int(rng.choice(sizes))
        tokens.append(ids[text[at : at + size]])
        at += size
    return tokens


def _output(case: GrammarCase, vocabulary: Vocabulary, rng: np.random.Generator) -> list[int]:
    """Tokens that are admitted, and then anything; regimes: cut short, wrong somewhere, no text, no token."""
    admitted = GRAMMARS[case.grammar][2]
    tokens = split(admitted[int(rng.integers(len(admitted)))].encode(), vocabulary, rng)
    if case.regime == "wrong" and tokens:
        bad = (SPECIAL, -1, len(vocabulary.tokens), len(vocabulary.tokens) - 1, -(2**31), int(rng.integers(256)))
        tokens[int(rng.integers(len(tokens)))] = int(rng.choice(bad))
    elif case.regime == "early_end":
        tokens = [*tokens[: len(tokens) // 2], vocabulary.eos]
    elif case.regime == "no_text":
        tokens = [*tokens[:2], SPECIAL, *tokens[2:]]
    elif case.regime == "negative":
        tokens = [*tokens, -1, 3]
    else:
        tokens = [*tokens, vocabulary.eos, *(int(i) for i in rng.integers(0, 256, 3))]
    noise = [int(rng.choice((*TRIGGER, 11))) for _ in range(4)]
    if case.phase == "trigger":
        # the trigger begins, fails, and goes on from where it still fits
        tokens = [*noise, 5, 6, 5, 6, 5, 6, 7, *tokens]
    elif case.phase == "bound":
        tokens = [*noise[:2], 11, 5, 6, BOUND, *TRIGGER, *tokens]
    elif case.phase == "bound_inside":
        tokens = [5, 11, 5, *TRIGGER[1:], *tokens]
    return tokens[: case.tokens]


def _request(case: GrammarCase) -> GrammarRequest:
    kind, schema, _ = GRAMMARS[case.grammar]
    trigger = () if case.phase == "plain" else TRIGGER
    bound = {"bound": BOUND, "bound_inside": TRIGGER[1]}.get(case.phase)
    return GrammarRequest(kind=kind, schema=schema, trigger=trigger, bound=bound)


def _vocabulary(case: GrammarCase) -> Vocabulary:
    return deepseek_vocabulary() if case.vocabulary == "deepseek" else BYTES


def draw_tokens(case: GrammarCase, rng: np.random.Generator) -> Inputs:
    """One output."""
    vocabulary = _vocabulary(case)
    tokens = _output(case, vocabulary, rng)
    return {
        "token_n": torch.tensor(tokens, dtype=torch.int32),
        "vocabulary": vocabulary,
        "request": _request(case),
    }


def draw_steps(case: GrammarCase, rng: np.random.Generator) -> Inputs:
    """The same outputs, emitted in steps of several tokens; drafts go on for a while as the output does."""
    vocabulary = _vocabulary(case)
    tokens = _output(case, vocabulary, rng)
    emitted: list[list[int]] = [[]]
    drafts = []
    at = 0
    while True:
        right = tokens[at : at + case.drafts]
        others = {"negative": -1, "end_drafts": vocabulary.eos}
        wrong_from = 0 if case.regime in others else int(rng.integers(0, case.drafts + 1))
        wrong = [others.get(case.regime, int(i)) for i in rng.integers(-1, EOS + 2, case.drafts)]
        drafts.append([*right[:wrong_from], *wrong][: case.drafts])
        if at >= len(tokens):
            break
        step = tokens[at : at + int(rng.integers(1, case.drafts + 2))]
        emitted.append(step)
        at += len(step)
    width = case.drafts + 1
    padded = [[*step, *[-1] * (width - len(step))] for step in emitted]
    return {
        "emitted_sj": torch.tensor(padded, dtype=torch.int32).reshape(len(padded), width),
        "draft_sg": torch.tensor(drafts, dtype=torch.int32).reshape(len(drafts), case.drafts),
        "vocabulary": vocabulary,
        "request": _request(case),
    }


def draw_rows(case: RowCase, rng: np.random.Generator) -> Inputs:
    """Requests in any order among rows of others; some verify fewer rows than they have masks, some have none."""
    words = max(-(-case.columns // 32) - case.spare, 0)
    masks = rng.integers(-(2**31), 2**31, (case.requests, case.masks, words))
    if case.regime == "all_ones":
        masks[:] = -1
    elif case.regime == "single":
        masks[:] = 0
        masks[..., :: max(words - 1, 1)] = -(2**31)
    lengths = rng.integers(0, case.masks + 2, case.requests)
    firsts, row = [], 0
    for place in rng.permutation(case.requests):
        row += int(rng.integers(0, 2))  # a row of a free request
        firsts.append((place, row))
        row += int(lengths[place])
    first = np.zeros(case.requests, dtype=np.int64)
    for place, at in firsts:
        first[place] = -1 if rng.random() < 0.2 else at
    known = case.regime if case.regime in REGIMES else "normal"
    logits = draws.rows(rng, row + 1, case.columns, dtype=torch.float32, regime=known)
    if logits.numel():
        logits[0, 0] = torch.nan
    return {
        "logits_tv_": draws.strided(logits, pad=8),
        "mask_yjw": torch.from_numpy(masks.astype(np.int32)),
        "first_y": torch.from_numpy(first.astype(np.int32)),
        "length_y": torch.from_numpy(lengths.astype(np.int32)),
    }


# cases


def cases_tokens(full: bool) -> list[GrammarCase]:
    """Every grammar; phases, wrong tokens and early ends on some; a part of a real vocabulary."""
    base = GrammarCase(grammar="words", tokens=40)
    found = [replace(base, grammar=name) for name in GRAMMARS]
    found += [replace(base, regime=regime) for regime in ("wrong", "early_end", "no_text", "negative")]
    found += [replace(base, grammar="object", regime="wrong"), replace(base, grammar="list", regime="early_end")]
    found += [replace(base, phase=phase) for phase in ("trigger", "bound", "bound_inside")]
    found += [replace(base, phase=phase, regime="wrong") for phase in ("trigger", "bound")]
    found += [replace(base, phase="trigger", tokens=n) for n in (0, 8)]
    found += [replace(base, grammar="object", tokens=12, vocabulary="deepseek")]
    if full:
        regimes = ("normal", "wrong", "early_end")
        found += [replace(base, grammar=g, regime=r, phase="trigger") for g in GRAMMARS for r in regimes]
        found += [replace(base, grammar=g, regime=r, tokens=60) for g in GRAMMARS for r in regimes]
        found += [replace(base, grammar=g, tokens=24, vocabulary="deepseek") for g in ("numbers", "sum", "wide")]
    return list({case.id: case for case in found}.values())


def cases_steps(full: bool) -> list[GrammarCase]:
    """Draft counts, phases and wrong tokens; behind the end; one draft; no draft."""
    base = GrammarCase(grammar="words", tokens=30, drafts=3)
    found = [replace(base, phase=phase) for phase in ("plain", "trigger", "bound")]
    found += [replace(base, phase=phase, regime="wrong") for phase in ("plain", "trigger", "bound")]
    found += [replace(base, grammar=name) for name in ("list", "object", "sum", "wide")]
    found += [replace(base, drafts=0), replace(base, drafts=1, phase="trigger"), replace(base, drafts=5, phase="bound")]
    found += [replace(base, regime="early_end", phase="trigger"), replace(base, tokens=0)]
    found += [replace(base, grammar="list", regime=regime) for regime in ("negative", "end_drafts", "no_text")]
    if full:
        found += [
            replace(base, grammar=g, phase=p, drafts=d, regime=r)
            for g in GRAMMARS
            for p, d, r in (("plain", 4, "normal"), ("trigger", 5, "wrong"), ("bound", 2, "normal"))
        ]
    return list({case.id: case for case in found}.values())


def cases_rows(full: bool) -> list[RowCase]:
    """Regimes; vocabularies that end inside a word; masks that are too narrow; one request; none."""
    base = RowCase(requests=4, masks=3, columns=301)
    found = [replace(base, regime=regime) for regime in (*REGIMES, "all_ones", "single")]
    found += [replace(base, columns=n) for n in (1, 31, 32, 33, 64)]
    found += [replace(base, spare=1), replace(base, spare=1, columns=320), replace(base, spare=10)]
    found += [replace(base, requests=1, masks=1), replace(base, requests=0), replace(base, masks=6, requests=9)]
    found += [replace(base, requests=2, masks=2, columns=4200)]
    if full:
        found += [replace(base, columns=129280), replace(base, requests=64, masks=6, columns=999)]
        found += [replace(base, columns=n, regime="single") for n in range(2, 99, 7)]
    return list({case.id: case for case in found}.values())


# relations


def prefixes(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """What comes later changes no mask before it."""
    tokens, masks = inputs["token_n"], "mask_nw"
    for n in sorted({0, 1, len(tokens) // 2, len(tokens) - 1} & set(range(len(tokens)))):

        def first(outputs: Outputs, n: int = n) -> Outputs:
            return {masks: outputs[masks][: n + 1]}

        yield Variant(
            label=f"{n} tokens",
            calls=(inputs | {"token_n": tokens[:n].clone()},),
            join=lambda results: {masks: results[0][masks]},
            expect=first,
        )


def other_requests(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A request gives the same masks after one with another grammar, and after itself."""
    other = GrammarRequest(kind=GrammarKind.REGEX, schema="[0-9]+x", trigger=(7,), bound=8)
    yield Variant(label="after another grammar", calls=(inputs,), first=inputs | {"request": other})
    yield Variant(label="after itself", calls=(inputs,), first=inputs)


def fewer_drafts(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """With fewer drafts the first rows have the same masks."""
    drafts = inputs["draft_sg"]
    for width in sorted({0, 1, drafts.shape[1] - 1} & set(range(drafts.shape[1]))):

        def narrowed(outputs: Outputs, width: int = width) -> Outputs:
            rows = outputs["rows_s"].clamp(max=width + 1)
            return {"mask_sjw": outputs["mask_sjw"][:, : width + 1], "rows_s": rows, "status_s": outputs["status_s"]}

        yield Variant(
            label=f"{width} drafts", calls=(inputs | {"draft_sg": drafts[:, :width].clone()},), expect=narrowed
        )


def single_steps(inputs: Inputs, call: CallFn, context: Context) -> Iterator[tuple[str, Outputs, Outputs]]:
    """Every row's mask is the one that its tokens, one by one, lead to."""
    partner = context.partner
    assert partner is not None
    found = call(inputs)
    told = {name: inputs[name] for name in ("vocabulary", "request")}
    tokens: list[int] = []
    for s in range(len(inputs["draft_sg"])):
        tokens += [token for token in inputs["emitted_sj"][s].tolist() if token >= 0]
        for row in range(int(found["rows_s"][s])):
            prefix = torch.tensor([*tokens, *inputs["draft_sg"][s, :row].tolist()], dtype=torch.int32)
            alone = partner({"token_n": prefix, **told})
            expected = {"mask": alone["mask_nw"][-1], "accepted": alone["accepted"]}
            got = {"mask": found["mask_sjw"][s, row], "accepted": torch.tensor([len(prefix)], dtype=torch.int32)}
            yield f"step {s}, row {row}", got, expected


def refused_places(inputs: Inputs) -> Tensor:
    """Logits that a mask forbids."""
    logits, masks = inputs["logits_tv_"], inputs["mask_yjw"]
    refused = torch.zeros(logits.shape, dtype=torch.bool)
    for y, (first, length) in enumerate(zip(inputs["first_y"].tolist(), inputs["length_y"].tolist(), strict=True)):
        for j in range(min(length, masks.shape[1])):
            bits = [bool(word >> place & 1) for word in masks[y, j].tolist() for place in range(32)]
            width = min(len(bits), logits.shape[1])
            if first >= 0:
                refused[first + j, :width] = ~torch.tensor(bits[:width], dtype=torch.bool)
    return refused


def other_order(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Requests may be listed in any order, and one after the other."""
    count = len(inputs["first_y"])
    per_request = ("mask_yjw", "first_y", "length_y")
    order = torch.from_numpy(context.rng.permutation(count))
    yield Variant(label="permuted requests", calls=(inputs | {name: inputs[name][order] for name in per_request},))
    yield Variant(label="again", calls=(inputs,))


def alone(inputs: Inputs, call: CallFn, context: Context) -> Iterator[tuple[str, Outputs, Outputs]]:
    """A request's rows are what they are with nobody else constrained; the rows of others stay as they were."""
    together = call(inputs)["logits_tv_"]
    for y, (first, length) in enumerate(zip(inputs["first_y"].tolist(), inputs["length_y"].tolist(), strict=True)):
        one = {name: inputs[name][y : y + 1].clone() for name in ("mask_yjw", "first_y", "length_y")}
        got = call(inputs | one)["logits_tv_"]
        expected = inputs["logits_tv_"].clone()
        if first >= 0:
            expected[first : first + length] = together[first : first + length]
        yield f"request {y}", {"logits_tv_": got}, {"logits_tv_": expected}


def middling(case: Any) -> bool:
    """Relations make many calls."""
    return getattr(case, "grammar", "words") in ("words", "list", "sum") and getattr(case, "columns", 0) <= 400


MASKS = Op(
    name="token_masks",
    reference="deeptwin.reference.structured_output:token_masks",
    outputs=(
        Output(name="mask_nw", rule=Bitwise(), dtype=torch.int32),
        Output(name="accepted", rule=Bitwise(), dtype=torch.int32),
    ),
    cases=cases_tokens,
    draw=draw_tokens,
    rows={},
    out_rows={},
    relations=(
        Relation(name="causality", axis="later tokens", hook=prefixes, only=lambda c: middling(c) and c.tokens > 8),
        Relation(name="batch_invariant", axis="other requests", hook=other_requests, only=middling),
    ),
    candidates=(
        Candidate(
            name="xgrammar",
            function="deeptwin.optimized.structured_output:token_masks_xgrammar",
            archs=("cpu",),
            needs=("xgrammar",),
        ),
    ),
    mutants=(
        _mutant("bits_from_the_top", "U57", "token 0 stands in the highest bit of a word"),
        _mutant("end_at_any_time", "R6", "the end token is admitted although the text is not complete"),
        _mutant("end_never", "R6", "the end token is never admitted"),
        _mutant("nothing_behind_the_end", "R6", "behind the end token no token may come"),
        _mutant("grammar_from_the_start", "R6", "the trigger is not waited for"),
        _mutant("trigger_from_scratch", "R6", "a token that does not fit throws away all of the trigger"),
        _mutant("trigger_forgotten", "R6", "another trigger inside the grammar frees the output again"),
        _mutant("bound_outside_the_trigger", "R6", "the bound token does not count as a token of the trigger"),
        _mutant("bound_from_the_start", "R6", "a bound output must give the whole trigger again"),
        _mutant("bound_is_free", "R6", "a bound output may give any token"),
        _mutant("special_tokens_pass", "R6", "a token without bytes is taken as an empty text"),
        _mutant("spare_bits_set", "R6", "bits beyond the vocabulary are set"),
        _mutant("negative_from_the_end", "U40", "id −1 is looked up from the end of the vocabulary"),
        _mutant("first_byte_only", "R6", "a token is judged by its first byte"),
    ),
    controls=(_control("right_masks"),),
    golden=lambda: [GrammarCase(grammar=g, tokens=10, phase=p) for g, p in (("object", "plain"), ("words", "trigger"))],
)

STEPS = Op(
    name="speculative_masks",
    reference="deeptwin.reference.structured_output:speculative_masks",
    outputs=(
        Output(name="mask_sjw", rule=Bitwise(), dtype=torch.int32),
        Output(name="rows_s", rule=Bitwise(), dtype=torch.int32),
        Output(name="status_s", rule=Bitwise(), dtype=torch.int32),
    ),
    cases=cases_steps,
    draw=draw_steps,
    rows={},
    out_rows={},
    relations=(
        Relation(
            name="rollback_equals_serial",
            axis="drafts taken back",
            hook=single_steps,
            partner="token_masks",
            only=lambda case: middling(case) and case.grammar in ("words", "list"),
        ),
        Relation(name="decode_equals_prefill", axis="drafts", hook=fewer_drafts, only=lambda case: case.drafts > 0),
        Relation(name="batch_invariant", axis="other requests", hook=other_requests, only=middling),
    ),
    candidates=(
        Candidate(
            name="xgrammar",
            function="deeptwin.optimized.structured_output:speculative_masks_xgrammar",
            archs=("cpu",),
            needs=("xgrammar",),
        ),
    ),
    mutants=(
        _mutant("drafts_not_taken_back", "U62", "a draft stays accepted after its step"),
        _mutant("one_draft_too_few_taken_back", "U62", "the first draft stays accepted"),
        _mutant("trigger_not_taken_back", "U33", "the grammar goes back, the trigger does not"),
        _mutant("bound_not_taken_back", "U33", "a draft of the bound token binds the output"),
        _mutant("end_not_taken_back", "U62", "a draft of the end token frees the output"),
        _mutant("mask_before_the_draft", "R6", "row k + 1 has the mask before draft k"),
        _mutant("masks_behind_a_refused_draft", "R6", "later drafts are tried although one was refused"),
        _mutant("refusals_ignored", "R6", "an emitted token that is refused aborts nothing"),
        _mutant("last_token_not_fed", "U32", "of the emitted tokens the last one is not added"),
        _mutant("only_the_first_row", "R6", "rows of drafts have no mask"),
        _mutant("negative_draft_from_the_end", "U40", "draft −1 counts as the last token of the vocabulary"),
    ),
    controls=(_control("right_steps"),),
    golden=lambda: [GrammarCase(grammar="words", tokens=14, phase="bound", drafts=2)],
)

APPLY = Op(
    name="apply_masks",
    reference="deeptwin.reference.structured_output:apply_masks",
    outputs=(Output(name="logits_tv_", rule=Bitwise(), dtype=torch.float32),),
    cases=cases_rows,
    draw=draw_rows,
    rows={},
    out_rows={},
    writes="logits_tv_",
    relations=(
        Relation(name="changed_slots", axis="logits", hook=refused_places, only=middling),
        Relation(name="batch_invariant", axis="order of requests, repeats", hook=other_order, only=middling),
        Relation(
            name="split_invariant",
            axis="one request alone",
            hook=alone,
            only=lambda case: 0 < case.requests <= 4 and 300 <= case.columns <= 400,
        ),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.structured_output:apply_masks_triton",
            lowered_declines=lambda case: None if case.masks == 3 and case.regime == "mean1" else "one case shows it",
        ),
    ),
    builds=(
        BuildCase(
            name="v129280",
            kernel="deeptwin.kernels.triton_ops.structured_output:_apply",
            launch="deeptwin.parity.builds.launches.structured_output:apply",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="xgrammar",
            function="deeptwin.parity.peers.structured_output:xgrammar_rows",
            needs=("xgrammar",),
            explains="xgrammar 0.2.9, apply_token_bitmask_inplace on the rows that a request has",
            only=lambda case: case.spare == 0,
        ),
    ),
    mutants=(
        _mutant("bits_from_the_top_of_rows", "U57", "token 0 stands in the highest bit of a word"),
        _mutant("large_and_finite", "R5", "a forbidden logit is −1e9"),
        _mutant("every_mask_applied", "U37", "masks go on into the rows of the next request"),
        _mutant("absent_from_the_end", "U79", "first −1 means the last row"),
        _mutant("masks_of_the_first", "U09", "every request has the masks of the first"),
        _mutant("one_row_late", "R6", "masks lie one row too low"),
        _mutant("sign_bit_lost", "R6", "token 31 of every word is forbidden"),
        _mutant("last_word_skipped", "R6", "the word in which the vocabulary ends is not used"),
        _mutant("beyond_the_mask", "R6", "logits beyond the mask are forbidden"),
        _mutant("allowed_ones_too", "R6", "allowed logits are set to zero"),
    ),
    controls=(_control("right_rows"),),
    golden=lambda: [RowCase(requests=3, masks=2, columns=70)],
)

CARD = Card(
    component="structured_output",
    summary="masks of a regular expression, JSON schema or EBNF: after every token, for rows of drafts, on logits",
    contract={
        "bits": "bit b of word w is token 32 w + b, 1 is allowed; beyond the vocabulary 0 where a grammar holds",
        "trigger": "the grammar holds once the trigger has fully appeared; from a bound token on the rest is mandatory",
        "end": "the end token is admitted where the text is complete; behind it everything is",
        "refusal": "an emitted token that is refused, or a mask without any token, aborts the request",
        "drafts": "a draft that is refused ends the masked rows; no token may come from the rows behind it",
        "json": "strict: the keys of the schema in its order, no others; white space is free between them",
        "bytes": "characters are UTF-8, surrogates among them, as xgrammar has it",
    },
    ops=(MASKS, STEPS, APPLY),
    equivalents=(
        Equivalent(
            name="drafts checked behind the end",
            reason="behind the end token every token is accepted and every mask is all ones",
        ),
    ),
)
