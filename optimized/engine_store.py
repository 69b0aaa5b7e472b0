"""Prefix reuse of an engine: pages and states of earlier prompts, kept as bytes under the keys of their blocks.

What is kept lives outside the pages of the runner, so a hit copies it into the request's own pages; no page is shared.
Behind the last whole block of a prompt the state of its sequence is kept too, because windows and pooled groups end
there; a hit ends where there is one, or earlier.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deeptwin.reference.config import MissingState, PrefixConfig

from .drafter import Drafter
from .prefix_cache import block_keys_array, prefix_hits_array
from .steps import Runner

LENGTH = struct.Struct("<Q")


class Store(Protocol):
    """Entries by key: `PrefixStore` on files, or `MemoryStore`."""

    def put(self, key: bytes, payload: bytes) -> None: ...

    def get(self, key: bytes) -> bytes | None: ...


class MemoryStore:
    """Entries in memory, for as long as the process lives."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def put(self, key: bytes, payload: bytes) -> None:
        """Keep an entry."""
        self.entries[key] = payload

    def get(self, key: bytes) -> bytes | None:
        """An entry, or None."""
        return self.entries.get(key)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """Tokens of a prompt that need not be computed, and what stands in their place."""

    tokens: int
    valid: int  # first position whose window state is there
    blocks: tuple[bytes, ...]
    state: bytes | None


NO_HIT = Hit(tokens=0, valid=0, blocks=(), state=None)


class PrefixReuse:
    """Finds, loads and publishes prefixes for one runner."""

    def __init__(self, config: PrefixConfig, store: Store, runner: Runner, drafter: Drafter) -> None:
        if config.block != runner.page_tokens:
            raise ValueError(f"config: expected blocks of {runner.page_tokens} tokens, a page, got {config.block}")
        self.config, self.store, self.runner, self.drafter = config, store, runner, drafter

    def boundary(self, prompt: int) -> int:
        """The position behind the last whole block, where a chunk has to end so that the state is there to keep."""
        return prompt // self.config.block * self.config.block

    def find(self, prompt: Sequence[int]) -> Hit:
        """The longest hit of a prompt; its bytes are taken along, so that the store may drop them meanwhile."""
        keys = self._keys(prompt)
        blocks: list[bytes] = []
        for key in keys:
            payload = self.store.get(key)
            if payload is None:
                break
            blocks.append(payload)
        states = {key: self.store.get(_state_key(key)) for key in keys[: len(blocks)]}
        known = [key for key, payload in states.items() if payload is not None]
        hit_b, valid_b = prefix_hits_array(
            _rows(keys)[None],
            torch.tensor([len(prompt)]),
            _rows(keys[: len(blocks)]),
            _rows(known),
            config=self.config,
        )
        count = int(hit_b) // self.config.block
        if not count:
            return NO_HIT
        return Hit(tokens=int(hit_b), valid=int(valid_b), blocks=tuple(blocks[:count]), state=states[keys[count - 1]])

    def load(self, hit: Hit, pages: Sequence[int], slot: int) -> None:
        """Put a hit into the pages and the state of a request."""
        for place, payload in enumerate(hit.blocks):
            main, draft = _parts(payload)
            self.runner.load_page(pages[place], main)
            self.drafter.load_page(pages[place], pages[place - 1] if place else 0, draft)
        if hit.state is not None:
            main, draft = _parts(hit.state)
            self.runner.restore(slot, hit.tokens, main)
            self.drafter.restore(slot, hit.tokens, draft)

    def publish(self, prompt: Sequence[int], end: int, pages: Sequence[int], slot: int) -> None:
        """Keep the blocks of a prompt that has been computed up to `end`, and the state there."""
        keys = self._keys(prompt[:end])
        for place, key in enumerate(keys):
            if self.store.get(key) is None:
                draft = self.drafter.page_bytes(pages[place], pages[place - 1] if place else 0)
                self.store.put(key, _joined(self.runner.page_bytes(pages[place]), draft))
        state = _joined(self.runner.snapshot(slot, end), self.drafter.snapshot(slot, end))
        self.store.put(_state_key(keys[-1]), state)

    def _keys(self, prompt: Sequence[int]) -> list[bytes]:
        tokens_bt = torch.tensor([list(prompt)], dtype=torch.int32)
        keys_bnk = block_keys_array(tokens_bt, torch.tensor([len(prompt)]), config=self.config)
        return [bytes(key) for key in keys_bnk[0].tolist()]


def exact_reuse(model: str, *, block: int, recompute: int = 1) -> PrefixConfig:
    """Hits that end where the state is stored; `recompute`: tokens that a hit leaves, K where a decoder is replayed."""
    return PrefixConfig(model=model, salt="", missing=MissingState.SHORTEN, block=block, recompute=recompute)


def _joined(main: bytes, draft: bytes) -> bytes:
    """What the model keeps and what its drafter keeps, as one entry."""
    return LENGTH.pack(len(main)) + main + draft


def _parts(payload: bytes) -> tuple[bytes, bytes]:
    (size,) = LENGTH.unpack_from(payload)
    return payload[LENGTH.size : LENGTH.size + size], payload[LENGTH.size + size :]


def _state_key(key: bytes) -> bytes:
    return hashlib.sha256(b"state\0" + key).digest()


def _rows(keys: Sequence[bytes]) -> Tensor:
    return torch.tensor([list(key) for key in keys], dtype=torch.uint8).reshape(-1, 32)
