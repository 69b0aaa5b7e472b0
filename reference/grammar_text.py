"""Regular expressions and EBNF as expressions over bytes."""

from __future__ import annotations

import re
from collections.abc import Callable

from .byte_grammar import EMPTY, Alt, ByteGrammar, Node, Repeat, Rule, Seq, literal, points

Ranges = list[tuple[int, int]]
DIGIT: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
# white space as ECMAScript has it
SPACE: Ranges = [(9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
SPACE += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
HEX_DIGITS = {"x": 2, "u": 4}
ANY: Ranges = [(0, 0x10FFFF)]


def regex(schema: str) -> ByteGrammar:
    """The grammar of a regular expression that describes the whole text.

    Edges:
        ^ and $ at the ends are taken for granted; a lazy quantifier describes the same texts as a greedy one; a dot is
        any character, line ends included.

    Raises:
        ValueError: a parenthesis, a class or a quantifier is not closed, or quantifies nothing.
        NotImplementedError: look-around, a back reference, a named group, a word boundary, or an anchor inside.
    """
    text = schema.removeprefix("^")
    is_anchored = text.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", text)
    parser = _Regex(text[:-1] if is_anchored else text)
    return ByteGrammar(parser.whole())


def ebnf(schema: str) -> ByteGrammar:
    """The grammar of rules `name ::= expression`, of which `root` describes the whole text.

    Raises:
        ValueError: there is no rule, no rule `root`, or one that is named and not defined; as `regex`.
    """
    lines = [
        re.sub(r'^((?:[^"#\[]|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\])*)#.*$', r"\1", x) for x in schema.split("\n")
    ]
    text = "\n".join(lines)
    heads = list(re.finditer(r"^\s*([A-Za-z_][\w-]*)\s*::=", text, re.MULTILINE))
    if not heads or text[: heads[0].start()].strip():
        raise ValueError(f"schema: expected rules of the form name ::= expression, got {schema!r}")
    ends = [head.start() for head in heads[1:]] + [len(text)]
    rules = {head[1]: _Ebnf(text[head.end() : end]).whole() for head, end in zip(heads, ends, strict=True)}
    for name in ["root", *(name for node in rules.values() for name in _named(node))]:
        if name not in rules:
            raise ValueError(f"schema: expected a rule {name}, got {', '.join(rules)}")
    return ByteGrammar(Rule("root"), rules)


def _named(node: Node) -> list[str]:
    if isinstance(node, Rule):
        return [node.name]
    inner = getattr(node, "parts", ()) or getattr(node, "options", ()) or [getattr(node, "node", EMPTY)]
    return [name for part in inner if part is not EMPTY for name in _named(part)]


class _Parser:
    """Choices of sequences of quantified items; what an item is differs between the two languages."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def whole(self) -> Node:
        """The expression that is all of the text."""
        node = self.choice()
        if self.at < len(self.text):
            raise self.wrong("the end")
        return node

    def wrong(self, wanted: str) -> ValueError:
        found = self.text[self.at : self.at + 1] or "the end"
        return ValueError(f"schema: expected {wanted} at {self.at} of {self.text!r}, got {found}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, wanted: str = "") -> str:
        found = self.peek()
        if not found or (wanted and found != wanted):
            raise self.wrong(wanted or "a character")
        self.at += 1
        return found

    def blank(self) -> None:
        """Nothing is left out between items."""

    def item(self) -> Node:
        raise AssertionError("each language has items of its own")

    def choice(self) -> Node:
        options = [self.sequence()]
        while self.peek() == "|":
            self.take()
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        self.blank()
        while self.peek() not in ("", "|", ")"):
            parts.append(self.quantified(self.item()))
            self.blank()
        return Seq(tuple(parts))

    def quantified(self, node: Node) -> Node:
        mark = self.peek()
        if mark in ("*", "+", "?") and mark:
            self.take()
            node = Repeat(node, int(mark == "+"), 1 if mark == "?" else None)
        elif mark == "{":
            found = re.compile(r"\{(\d+)(,?)(\d*)\}").match(self.text, self.at)
            if found is None:
                raise self.wrong("a quantifier {n}, {n,} or {n,m}")
            self.at = found.end()
            least = int(found[1])
            most = least if not found[2] else int(found[3]) if found[3] else None
            node = Repeat(node, least, most)
        return node

    def group(self) -> Node:
        self.take("(")
        node = self.choice()
        self.take(")")
        return node

    def character(self) -> int:
        """The code point of a character or of an escape that stands for one."""
        found = self.take()
        if found != "\\":
            return ord(found)
        letter = self.take()
        if letter in HEX_DIGITS:
            size = HEX_DIGITS[letter]
            digits = self.text[self.at : self.at + size]
            if not re.fullmatch(f"[0-9a-fA-F]{{{size}}}", digits):
                raise self.wrong(f"{size} hexadecimal digits")
            self.at += size
            return int(digits, 16)
        return ord(CONTROLS.get(letter, letter))

    def escaped_class(self) -> tuple[Ranges, bool] | None:
        """Ranges of \\d, \\w or \\s, and whether they are meant to be left out."""
        letter = self.text[self.at + 1 : self.at + 2]
        if self.peek() != "\\" or letter.lower() not in CLASSES or not letter:
            return None
        self.at += 2
        return CLASSES[letter.lower()], letter.isupper()

    def char_class(self) -> Node:
        self.take("[")
        negated = self.peek() == "^"
        self.at += negated
        ranges: Ranges = []
        while self.peek() != "]":
            found = self.escaped_class()
            if found is not None:
                if found[1]:
                    raise NotImplementedError(f"schema: classes inside a class are not negated, got {self.text!r}")
                ranges += found[0]
                continue
            low = high = self.character()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.take()
                high = self.character()
            if high < low:
                raise self.wrong("a range that ascends")
            ranges.append((low, high))
        self.take("]")
        return points(ranges, negated=negated)


class _Regex(_Parser):
    def item(self) -> Node:
        mark = self.peek()
        if mark in ("*", "+", "?", "{"):
            raise self.wrong("something to repeat")
        if mark == "(":
            return self.regex_group()
        found = self.escaped_class()
        if found is not None:
            return points(found[0], negated=found[1])
        kinds: dict[str, Callable[[], Node]] = {"[": self.char_class, ".": self.dot}
        if mark in kinds:
            return kinds[mark]()
        if mark in ("^", "$") or re.compile(r"\\[bB1-9kpP]").match(self.text, self.at):
            raise NotImplementedError(f"schema: no anchor, boundary or back reference inside, got {self.text!r}")
        return literal(chr(self.character()))

    def dot(self) -> Node:
        self.take(".")
        return points(ANY)

    def regex_group(self) -> Node:
        if self.text.startswith("(?", self.at) and not self.text.startswith("(?:", self.at):
            raise NotImplementedError(f"schema: groups are plain, got {self.text[self.at :]!r}")
        if self.text.startswith("(?:", self.at):
            self.text = self.text[: self.at + 1] + self.text[self.at + 3 :]
        return self.group()

    def quantified(self, node: Node) -> Node:
        repeated = super().quantified(node)
        if repeated is not node and self.peek() == "?":
            self.take()
        return repeated


class _Ebnf(_Parser):
    def blank(self) -> None:
        while self.peek() in (" ", "\t", "\n", "\r") and self.peek():
            self.take()

    def quantified(self, node: Node) -> Node:
        self.blank()
        return super().quantified(node)

    def item(self) -> Node:
        mark = self.peek()
        if mark == "[":
            return self.char_class()
        if mark == "(":
            return self.group()
        if mark == '"':
            return self.quoted()
        found = re.compile(r"[A-Za-z_][\w-]*").match(self.text, self.at)
        if found is None:
            raise self.wrong("a rule, a text, a class or a group")
        self.at = found.end()
        return Rule(found[0])

    def quoted(self) -> Node:
        self.take('"')
        parts: list[Node] = []
        while self.peek() != '"':
            parts.append(points([(point := self.character(), point)]))
        self.take('"')
        return Seq(tuple(parts))
