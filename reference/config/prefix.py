"""Configuration of prefix reuse: how blocks are named, and how far a hit may reach."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MissingState(enum.Enum):
    """What a hit does where the windows' state was not stored at its end."""

    SHORTEN = "shorten"  # it ends earlier, where the state was stored: exact
    ZERO_STATE = "zero_state"  # no key before the hit's end is visible: encoder layers are approximate behind it


class PoolAction(enum.IntEnum):
    """One line of a block pool's script: action, first number, second number."""

    GROW = 0  # table, tokens more
    FREE = 1  # table
    FORK = 2  # table to share, table that is empty
    SHRINK = 3  # table, tokens fewer
    PIN = 4  # block
    UNPIN = 5  # block


class PoolAnswer(enum.IntEnum):
    """What became of a line."""

    DONE = 0
    WAITS = -1  # not enough free blocks now
    REFUSED = -2  # it can never be done: a block that nobody holds, more blocks than there are


class StoreAction(enum.IntEnum):
    """One line of a store's script: action, entry, number."""

    PUT = 0
    GET = 1  # answers 1: right bytes, 0: absent, -1: other bytes
    DROP = 2
    REOPEN = 3
    KILL = 4  # a put that dies after so many of its PUT_STEPS; then the store is opened again
    TRUNCATE = 5  # the entry's file is cut to so many bytes, modulo its length
    SPOIL = 6  # that byte, modulo the file's length, is one more
    SWAP = 7  # the files of the entry and of another change names


# what a put does, in this order; the entry is there from the rename on
PUT_STEPS = ("write header", "write payload", "sync file", "rename", "sync folder")


@dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    """Names of blocks and reach of hits; two configurations that differ never share a block."""

    model: str
    salt: str
    missing: MissingState
    block: int = 128  # tokens
    recompute: int = 1  # tokens at the end of a request that a hit leaves: K where decoder layers are replayed

    def __post_init__(self) -> None:
        for name in ("block", "recompute"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
