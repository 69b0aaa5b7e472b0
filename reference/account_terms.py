"""What an account is made of: terms of parameters, of caches and of work, each with the formula of its number."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction
from math import prod


class Stored(enum.Enum):
    """How a tensor lies in the checkpoint."""

    MXFP4 = "e2m1, 1x32"
    FP8_ROWS = "e4m3, 1x32"
    FP8_TILES = "e4m3, 32x32"
    FP8_BLOCKS = "e4m3, 128x128"
    FP8_BLOCKS_F32 = "e4m3, 128x128 fp32"
    BF16 = "bf16"
    FP32 = "fp32"
    INT64 = "int64"

    def num_bytes(self, values: int, odd_blocks: int = 0) -> int:
        """Bytes of the values and their scales; `odd_blocks` are what cut edges add to the scales of whole blocks."""
        whole, scales, scale_bytes = {
            Stored.MXFP4: (values // 2, values // 32, 1),
            Stored.FP8_ROWS: (values, values // 32, 1),
            Stored.FP8_TILES: (values, values // 1024, 1),
            Stored.FP8_BLOCKS: (values, values // 16384, 1),
            Stored.FP8_BLOCKS_F32: (values, values // 16384, 4),
            Stored.BF16: (values * 2, 0, 0),
            Stored.FP32: (values * 4, 0, 0),
            Stored.INT64: (values * 8, 0, 0),
        }[self]
        return whole + (scales + odd_blocks) * scale_bytes


BLOCKED = (Stored.FP8_BLOCKS, Stored.FP8_BLOCKS_F32)
FORMATS = {
    "FP4": (Stored.MXFP4,),
    "FP8": (Stored.FP8_ROWS, Stored.FP8_TILES, Stored.FP8_BLOCKS, Stored.FP8_BLOCKS_F32),
    "BF16": (Stored.BF16,),
    "F32": (Stored.FP32,),
}


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of the account: `formula` is how `parameters` came about."""

    part: str
    name: str
    formula: str
    parameters: int
    stored: Stored
    odd_blocks: int = 0  # scales of blocks that are cut by an edge, beyond parameters / 16384

    @property
    def num_bytes(self) -> int:
        """Bytes in the checkpoint, scales included."""
        return self.stored.num_bytes(self.parameters, self.odd_blocks)


@dataclass(frozen=True, kw_only=True)
class CacheTerm:
    """What some layers store: `entry_bytes` for every `ratio` tokens, and `state_bytes` however long the text is."""

    name: str
    formula: str  # of the bytes of a token, or of the state
    layers: int
    entry_bytes: int = 0
    ratio: int = 1
    state_bytes: int = 0

    @property
    def per_token(self) -> Fraction:
        """Bytes that a token costs, on average, in all layers."""
        return Fraction(self.layers * self.entry_bytes, self.ratio)

    def at(self, context: int) -> int:
        """Bytes of all layers for a sequence of `context` tokens; an unfinished group has no entry."""
        return self.layers * (context // self.ratio * self.entry_bytes + self.state_bytes)


class Precision(enum.Enum):
    """The unit that does the work; the value is its cost in equivalent FP8 operations."""

    FP4 = Fraction(1, 2)
    FP8 = Fraction(1)
    BF16 = Fraction(2)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations of one decoded token, two for every multiplication with its addition."""

    name: str  # linear, indexer or core
    formula: str
    flops: int
    precision: Precision

    @property
    def equivalent(self) -> Fraction:
        """Operations in units of FP8."""
        return self.flops * self.precision.value


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published figure beside ours; it is reproduced if ours, rounded as it is printed, is the same number."""

    what: str
    published: str  # as printed, without the unit
    unit: str
    own: Fraction | None  # in the same unit; None: nothing to compute it from
    note: str = ""

    @property
    def digits(self) -> int:
        """Decimals of the published number."""
        return len(self.published.partition(".")[2])

    @property
    def is_reproduced(self) -> bool:
        """Whether ours rounds to it."""
        return self.own is not None and round(self.own, self.digits) == Fraction(self.published)


def line(part: str, name: str, formula: str, parameters: int, stored: Stored) -> Term:
    """A line without cut blocks."""
    return Term(part=part, name=name, formula=formula, parameters=parameters, stored=stored)


def shaped(part: str, name: str, stored: Stored, shapes: tuple[tuple[int, ...], ...], *, times: int = 1) -> Term:
    """A line of tensors, each one block for itself: `times` times those of `shapes`."""
    sizes = [prod(shape) for shape in shapes]
    blocks = sum(prod(-(-n // 128) for n in shape) for shape in shapes)
    return Term(
        part=part,
        name=name,
        formula=f"{times}*({' + '.join('*'.join(map(str, shape)) for shape in shapes)})",
        parameters=times * sum(sizes),
        stored=stored,
        odd_blocks=times * blocks - times * sum(sizes) // 16384 if stored in BLOCKED else 0,
    )
