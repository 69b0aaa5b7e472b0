"""A matcher of texts byte by byte: what may still follow, as a set of stacks of expressions that are left to match.

Nothing is compiled. An expression is a range of bytes, a sequence, a choice, a repetition or the name of a rule, so
regular expressions, JSON schemas and grammars with recursion are matched in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

DEEPEST = 400  # expressions that may be left to match: a rule that calls itself before it reads has no end
LAST_POINT = 0x10FFFF
LEADS = (0, 0, 0xC0, 0xE0, 0xF0)  # marks of the first byte of UTF-8, by length
# code points that UTF-8 writes with one, two, three and four bytes
SPANS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST_POINT))


@dataclass(frozen=True)
class Byte:
    """One byte from `low` to `high`."""

    low: int
    high: int


@dataclass(frozen=True)
class Seq:
    """One part after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """One of the options; none at all matches nothing."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`least` to `most` times; without a limit if `most` is None."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Rule:
    """The rule of this name."""

    name: str


Node = Byte | Seq | Alt | Repeat | Rule
Stack = tuple[Node, ...]
States = frozenset[Stack]
EMPTY = Seq(())


@dataclass(frozen=True)
class ByteGrammar:
    """An expression and the rules that it names."""

    root: Node
    rules: Mapping[str, Node] = field(default_factory=dict)
    _known: dict[Stack, States] = field(default_factory=dict, repr=False, compare=False)

    def start(self) -> States:
        """Nothing is matched yet."""
        return self.reachable([(self.root,)])

    def step(self, states: States, byte: int) -> States:
        """What is left behind one more byte; no state if the byte cannot stand here."""
        left = [s[1:] for s in states if s and isinstance(s[0], Byte) and s[0].low <= byte <= s[0].high]
        return self.reachable(left)

    def after(self, states: States, text: Iterable[int]) -> States:
        """What is left behind a text."""
        for byte in text:
            states = self.step(states, byte)
        return states

    def reachable(self, stacks: Iterable[Stack]) -> States:
        """Stacks that begin with a byte or are empty, in place of those that begin with anything else."""
        found: set[Stack] = set()
        for stack in stacks:
            if stack not in self._known:
                self._known[stack] = frozenset(self._opened(stack))
            found |= self._known[stack]
        return frozenset(found)

    def _opened(self, stack: Stack) -> Iterator[Stack]:
        seen, todo = {stack}, [stack]
        while todo:
            stack = todo.pop()
            if not stack or isinstance(stack[0], Byte):
                yield stack
                continue
            if len(stack) > DEEPEST:
                raise ValueError(f"schema: expected rules that read before they call themselves, got {stack[0]}")
            for opened in self._expanded(stack[0]):
                next_stack = opened + stack[1:]
                if next_stack not in seen:
                    seen.add(next_stack)
                    todo.append(next_stack)

    def _expanded(self, node: Node) -> list[Stack]:
        if isinstance(node, Seq):
            return [node.parts]
        if isinstance(node, Alt):
            return [(option,) for option in node.options]
        if isinstance(node, Rule):
            return [(self.rules[node.name],)]
        assert isinstance(node, Repeat)
        if node.most == 0:
            return [()]
        once = Repeat(node.node, max(node.least - 1, 0), None if node.most is None else node.most - 1)
        return [(node.node, once)] + ([()] if node.least == 0 else [])


def accepts(states: States) -> bool:
    """Whether the text may end here."""
    return () in states


def literal(text: str) -> Node:
    """Exactly this text, in UTF-8."""
    return Seq(tuple(Byte(byte, byte) for byte in text.encode()))


def optional(node: Node) -> Node:
    """The node, or nothing."""
    return Repeat(node, 0, 1)


def points(ranges: Iterable[tuple[int, int]], *, negated: bool = False) -> Node:
    """One character whose code point lies in one of the ranges, or in none of them; surrogates count as characters."""
    if negated:
        ranges = _others(sorted(ranges))
    pieces = [
        piece
        for low, high in ranges
        for first, last in SPANS
        if max(low, first) <= min(high, last)
        for piece in _encoded(max(low, first), min(high, last))
    ]
    return Alt(tuple(pieces))


def _others(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = 0
    for low, high in ranges:
        if start < low:
            yield start, low - 1
        start = max(start, high + 1)
    if start <= LAST_POINT:
        yield start, LAST_POINT


def _encoded(low: int, high: int) -> Iterator[Node]:
    """UTF-8 of code points of one length, as sequences of byte ranges."""
    size = 1 + sum(low > last for _, last in SPANS)
    for place in range(1, size):
        # the lower bytes must run through all their values, or the bytes above be the same
        rest = (1 << 6 * place) - 1
        if low & ~rest == high & ~rest:
            continue
        if low & rest:
            yield from _encoded(low, low | rest)
            yield from _encoded((low | rest) + 1, high)
            return
        if high & rest != rest:
            yield from _encoded(low, (high & ~rest) - 1)
            yield from _encoded(high & ~rest, high)
            return
    lows, highs = _utf8(low, size), _utf8(high, size)
    yield Seq(tuple(Byte(a, b) for a, b in zip(lows, highs, strict=True)))


def _utf8(point: int, size: int) -> list[int]:
    if size == 1:
        return [point]
    tail = [0x80 | point >> 6 * place & 0x3F for place in range(size - 1)][::-1]
    return [LEADS[size] | point >> 6 * (size - 1), *tail]
