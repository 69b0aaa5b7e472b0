"""Prefix reuse, fast: blocks hashed from one buffer, sets and a pool in arrays, windows by gather, entries in files."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deeptwin.reference.checks import (
    expect_dtype,
    expect_in_range,
    expect_key_sets,
    expect_pool_script,
    expect_positive,
    expect_requests,
    expect_shape,
    expect_states,
    expect_store_script,
)
from deeptwin.reference.config import (
    KV_FP8,
    MissingState,
    PageLayout,
    PoolAction,
    PoolAnswer,
    PrefixConfig,
    SlidingWindow,
    StoreAction,
)
from deeptwin.reference.csa2_config import Csa2Config
from deeptwin.reference.csa2_state import Csa2Caches

from .bounded_replay import replay_prefill_vectorised

MODULUS = 2**31 - 1
MAGIC = b"DTPREFIX"
HEADER = struct.Struct("<8sIQ32s")  # magic, version, bytes of the payload, key; a SHA-256 of all else stands behind it
VERSION = 1


def block_keys_array(tokens_bt: Tensor, length_b: Tensor, *, config: PrefixConfig) -> Tensor:
    """`reference.prefix_cache.block_keys`: every request is one little-endian buffer, of which blocks are views.

    Raises:
        TypeError: tokens are not int32, lengths no integers.
        ValueError: shapes disagree; a length is not in 0 … t; a token is negative.
    """
    dims = expect_requests(tokens_bt, length_b)
    names = (config.model.encode(), config.salt.encode())
    root = hashlib.sha256(b"deeptwin.prefix.1\0")
    for name in names:
        root.update(struct.pack("<I", len(name)) + name)
    root.update(struct.pack("<I", config.block))
    rows = tokens_bt.contiguous().numpy().astype("<i4", copy=False)
    size = 4 * config.block
    keys = []
    for row, length in zip(rows, length_b.tolist(), strict=True):
        buffer, key = memoryview(row).cast("B"), root.digest()
        chain = bytearray()
        for start in range(0, length // config.block * size, size):
            hashed = hashlib.sha256(key)
            hashed.update(buffer[start : start + size])
            key = hashed.digest()
            chain += key
        keys.append(chain.ljust(dims["t"] // config.block * 32, b"\0"))
    flat = bytearray().join(keys)
    shape = (dims["b"], dims["t"] // config.block, 32)
    return torch.frombuffer(flat, dtype=torch.uint8).view(shape) if flat else torch.zeros(shape, dtype=torch.uint8)


def prefix_hits_array(
    keys_bnk: Tensor, length_b: Tensor, pages_sk: Tensor, states_ik: Tensor, *, config: PrefixConfig
) -> tuple[Tensor, Tensor]:
    """`reference.prefix_cache.prefix_hits`: one look-up of all keys in each set, then prefixes by running products.

    Raises:
        TypeError: keys are not uint8, lengths no integers.
        ValueError: shapes disagree; a length is negative.
    """
    dims = expect_key_sets(keys_bnk, length_b, pages_sk, states_ik)
    blocks_n = torch.arange(1, dims["n"] + 1)
    allowed_bn = blocks_n * config.block <= (length_b.long() - config.recompute)[:, None]
    run_bn = (_members(keys_bnk, pages_sk) & allowed_bn).long().cumprod(1)
    state_bn = _members(keys_bnk, states_ik)
    ends_bn = run_bn * state_bn if config.missing is MissingState.SHORTEN else run_bn
    none_b1 = torch.zeros(dims["b"], 1, dtype=torch.int64)
    hit_b = torch.cat([none_b1, ends_bn * blocks_n], 1).amax(1)
    valid_b = torch.where(torch.cat([none_b1.bool(), state_bn], 1).gather(1, hit_b[:, None])[:, 0], 0, hit_b)
    return (hit_b * config.block).to(torch.int32), (valid_b * config.block).to(torch.int32)


def pool_run_array(script_nj: Tensor, *, blocks: int, tables: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.prefix_cache.pool_run`: a ring of free blocks, an array of counts, an array of tables.

    Raises:
        TypeError: the script is not int32.
        ValueError: the script is not [n, 3], names an unknown action or table, or a negative number of tokens; there
            are fewer than two blocks; block is not positive.
    """
    expect_positive("block", block)
    if blocks < 2:
        raise ValueError(f"blocks: expected at least 2, the null block and another, got {blocks}")
    expect_pool_script(script_nj, tables)
    pool = _ArrayPool(blocks, tables, block)
    answers = [pool.line(*line) for line in script_nj.tolist()]
    answer_nj = torch.tensor(answers, dtype=torch.int32).reshape(-1, 3)
    free = torch.full((blocks,), -1, dtype=torch.int32)
    free[: pool.free] = pool.ring[(pool.head + torch.arange(pool.free)) % blocks]
    return answer_nj, pool.table.clone(), pool.count.clone(), free


class _ArrayPool:
    """Fixed arrays, no allocation after the start: what a C++ or device-side pool keeps."""

    def __init__(self, blocks: int, tables: int, block: int) -> None:
        self.blocks, self.block = blocks, block
        self.ring = torch.arange(1, blocks + 1, dtype=torch.int32)
        self.head, self.free = 0, blocks - 1
        self.count = torch.zeros(blocks, dtype=torch.int32)
        self.pins = torch.zeros(blocks, dtype=torch.int32)  # references that belong to no table
        self.table = torch.full((tables, blocks), -1, dtype=torch.int32)
        self.used = [0] * tables
        self.tokens = [0] * tables

    def line(self, action: int, first: int, second: int) -> tuple[int, int, int]:
        if action in (PoolAction.PIN, PoolAction.UNPIN):
            change = 1 if action == PoolAction.PIN else -1
            asked = self.count if change > 0 else self.pins
            if not 0 < first < self.blocks or not asked[first]:
                return PoolAnswer.REFUSED, 0, 0
            self.pins[first] += change
            self._refer(torch.tensor([first]), change)
            return PoolAnswer.DONE, 0, 0
        if action == PoolAction.FORK:
            return self._fork(first, second)
        after = self.tokens[first] + second if action == PoolAction.GROW else self.tokens[first] - second
        if action == PoolAction.FREE:
            after = 0
        if after < 0 or (action == PoolAction.SHRINK and self._is_shared(first, after)):
            return PoolAnswer.REFUSED, 0, 0
        need = -(-after // self.block)
        more = need - self.used[first]
        if action == PoolAction.GROW:
            if more >= self.blocks:
                return PoolAnswer.REFUSED, 0, 0
            if more > self.free:
                return PoolAnswer.WAITS, 0, 0
            self.table[first, self.used[first] : need] = self._take(more)
        else:
            self._refer(self.table[first, need : self.used[first]].flip(0).long(), -1)
            self.table[first, need:] = -1
        self.used[first], self.tokens[first] = need, after
        return PoolAnswer.DONE, 0, 0

    def _is_shared(self, table: int, tokens: int) -> bool:
        """Whether the block that so many tokens end within belongs to another table too."""
        if tokens % self.block == 0:
            return False
        last = self.table[table, tokens // self.block].long()
        return bool(self.count[last] - self.pins[last] > 1)

    def _fork(self, first: int, second: int) -> tuple[int, int, int]:
        if self.used[second]:
            return PoolAnswer.REFUSED, 0, 0
        full = self.tokens[first] // self.block
        partial = self.used[first] - full
        if partial > self.free:
            return PoolAnswer.WAITS, 0, 0
        self.count[self.table[first, :full].long()] += 1
        self.table[second, :full] = self.table[first, :full]
        self.table[second, full : full + partial] = self._take(partial)
        self.used[second], self.tokens[second] = self.used[first], self.tokens[first]
        if not partial:
            return PoolAnswer.DONE, 0, 0
        return PoolAnswer.DONE, int(self.table[first, full]), int(self.table[second, full])

    def _take(self, count: int) -> Tensor:
        taken = self.ring[(self.head + torch.arange(count)) % self.blocks]
        self.head, self.free = (self.head + count) % self.blocks, self.free - count
        self.count[taken.long()] = 1
        return taken

    def _refer(self, ids: Tensor, change: int) -> None:
        """Count references of distinct blocks up or down; those without any go to the tail, in order."""
        self.count[ids] += change
        freed = ids[self.count[ids] == 0].to(torch.int32)
        self.ring[(self.head + self.free + torch.arange(len(freed))) % self.blocks] = freed
        self.free += len(freed)


def persist_state_array(state_sq: Tensor, state_b: Tensor, end_b: Tensor, *, config: Csa2Config) -> Tensor:
    """`reference.prefix_cache.persist_state`: one gather for each ring.

    Raises:
        TypeError: states are not uint8, numbers no integers.
        ValueError: shapes disagree; a state is not in 0 … s - 1.
    """
    expect_states("state_sq", state_sq, state_b, end_b)
    rings = _rings(state_sq, config)
    slot_bo, there_bo = _ring_slots(end_b, config)
    if not rings:
        return torch.zeros(len(state_b), 0, config.plan.ring, KV_FP8.record_bytes, dtype=torch.uint8)
    stored_blow = torch.stack([_records(ring, config)[state_b.long()[:, None], slot_bo] for ring in rings], 1)
    return torch.where(there_bo[:, None, :, None], stored_blow, 0)


def restore_state_array(
    state_sq_: Tensor, stored_blow: Tensor, state_b: Tensor, end_b: Tensor, *, config: Csa2Config
) -> Tensor:
    """`reference.prefix_cache.restore_state`: one scatter for each ring, in place.

    Raises:
        TypeError: states are not uint8, numbers no integers.
        ValueError: shapes disagree; a state is not in 0 … s - 1, or twice in state_b.
    """
    expect_states("state_sq_", state_sq_, state_b, end_b)
    rings = _rings(state_sq_, config)
    sizes = {"b": len(state_b), "l": len(rings), "o": config.plan.ring, "w": KV_FP8.record_bytes}
    expect_shape("stored_blow", stored_blow, "blow", sizes)
    expect_dtype("stored_blow", stored_blow, torch.uint8)
    if len(state_b.unique()) != len(state_b):
        raise ValueError(f"state_b: expected every state once, got {state_b.tolist()}")
    slot_bo, there_bo = _ring_slots(end_b, config)
    state_y = state_b.long()[:, None].expand_as(slot_bo)[there_bo]
    for i, ring in enumerate(rings):
        record_yw = stored_blow[:, i][there_bo]
        if config.layout is PageLayout.INTERLEAVED:
            ring[state_y, slot_bo[there_bo]] = record_yw
            continue
        data = config.plan.ring * KV_FP8.data_bytes
        flat_sq, at_y1 = ring.view(len(ring), -1), slot_bo[there_bo][:, None]
        codes_yw, sf_yw = record_yw.split([KV_FP8.data_bytes, KV_FP8.record_bytes - KV_FP8.data_bytes], 1)
        flat_sq[state_y[:, None], at_y1 * codes_yw.shape[1] + torch.arange(codes_yw.shape[1])] = codes_yw
        flat_sq[state_y[:, None], data + at_y1 * sf_yw.shape[1] + torch.arange(sf_yw.shape[1])] = sf_yw
    return state_sq_


def store_run_files(script_nj: Tensor, key_pk: Tensor, payload_pq: Tensor) -> Tensor:
    """`reference.prefix_cache.store_run` on real files, in a folder that is removed afterwards.

    Raises:
        TypeError: the script is not int32, keys or payloads are not uint8.
        ValueError: shapes disagree; an unknown action or entry; a number is negative.
    """
    expect_store_script(script_nj, key_pk, payload_pq)
    keys = [bytes(key) for key in key_pk.tolist()]
    payloads = [bytes(payload) for payload in payload_pq.tolist()]
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        store = PrefixStore(Path(folder))
        for action, entry, number in script_nj.tolist():
            answer, path = 0, store.path(keys[entry])
            if action == StoreAction.PUT:
                store.put(keys[entry], payloads[entry])
            elif action == StoreAction.GET:
                found = store.get(keys[entry])
                answer = 0 if found is None else 1 if found == payloads[entry] else -1
            elif action == StoreAction.DROP:
                store.drop(keys[entry])
            elif action == StoreAction.KILL:
                with _killed():
                    PrefixStore(Path(folder), disk=DyingDisk(steps=number)).put(keys[entry], payloads[entry])
            elif action == StoreAction.SWAP:
                _swap(path, store.path(keys[number]))
            elif action != StoreAction.REOPEN and path.exists():
                _damage(path, action, number)
            if action in (StoreAction.REOPEN, StoreAction.KILL):
                store = PrefixStore(Path(folder))
            answers.append(answer)
    return torch.tensor(answers, dtype=torch.int32)


def serve_prefixes_cached(
    tokens_bt: Tensor, length_b: Tensor, *, config: PrefixConfig, window: SlidingWindow, layers: int
) -> tuple[Tensor, Tensor]:
    """`reference.prefix_cache.serve_prefixes`, as an engine serves: blocks and windows of earlier requests are reused.

    Raises:
        TypeError: tokens are not int32, lengths no integers.
        ValueError: shapes disagree; a length is not in 1 … t; a token is negative; layers is not positive.
    """
    expect_positive("layers", layers)
    dims = expect_requests(tokens_bt, length_b)
    expect_in_range("length_b", length_b, 1, dims["t"] + 1)
    server = _Server(config, window, layers, blocks=dims["b"] * -(-dims["t"] // config.block) + 2)
    keys_bnk = block_keys_array(tokens_bt, length_b, config=config)
    served = [
        server.serve(tokens[:length].long(), keys[: length // config.block])
        for tokens, keys, length in zip(tokens_bt, keys_bnk, length_b.tolist(), strict=True)
    ]
    out, hits = ([pair[i] for pair in served] for i in range(2))
    return torch.tensor(out, dtype=torch.int64), torch.tensor(hits, dtype=torch.int32)


class _Server:
    """The caches of the toy model, and one request after the other."""

    CHUNK = 7  # tokens of a prefill step: an odd number, so steps cut blocks and pairs

    def __init__(self, config: PrefixConfig, window: SlidingWindow, layers: int, *, blocks: int) -> None:
        self.config, self.window, self.layers = config, window, layers
        self.pool = _ArrayPool(blocks, blocks, config.block)
        # what a block keeps of its tokens: hashes of pairs, for every encoder layer, and encoder outputs
        self.entry_ple = torch.full((blocks, layers, config.block // 2), MODULUS - 1, dtype=torch.int64)
        self.hidden_po = torch.full((blocks, config.block), MODULUS - 1, dtype=torch.int64)
        self.page_sk = torch.zeros(0, 32, dtype=torch.uint8)
        self.page_s: list[int] = []  # the block of each key
        self.state_ik = torch.zeros(0, 32, dtype=torch.uint8)
        self.stored_ilo: list[Tensor] = []  # windows by position
        # one state for all requests: each finds there what the one before left
        self.ring_lo = torch.full((layers, window.ring), MODULUS - 1, dtype=torch.int64)
        self.pair_l = torch.full((layers,), MODULUS - 1, dtype=torch.int64)
        self.table = 0

    def serve(self, tokens_t: Tensor, keys_nk: Tensor) -> tuple[int, int]:
        """The answer to a request, and its hit."""
        count, size = len(tokens_t), self.config.block
        hit_b, _ = prefix_hits_array(
            keys_nk[None], torch.tensor([count]), self.page_sk, self.state_ik, config=self.config
        )
        hit = int(hit_b)
        row, shared = self._table(count, keys_nk, hit)
        checkpoint = count // size * size
        at, hidden = hit, []
        while at < count:
            end = min(at + self.CHUNK, checkpoint if at < checkpoint else count)
            hidden.append(self._encode(tokens_t[at:end], at, row))
            at = end
            if at == checkpoint:
                self._persist(keys_nk, at)
        hidden_t = torch.cat(hidden)
        position_t = torch.arange(hit, count)
        self.hidden_po[row[position_t // size], position_t % size] = hidden_t
        before_t = self.hidden_po[row[: hit // size]].flatten()
        total = int(((2 * torch.arange(hit) + 3) * before_t % MODULUS).sum()) % MODULUS
        self._publish(keys_nk, row, shared)
        out_tl, _ = replay_prefill_vectorised(
            hidden_t,
            torch.tensor([total]),
            torch.tensor([hit]),
            torch.tensor([[count - hit]]),
            config=self.window,
            layers=self.layers,
        )
        return int(out_tl[-1, -1]), hit

    def _table(self, count: int, keys_nk: Tensor, hit: int) -> tuple[Tensor, int]:
        """The blocks of a request: those of the hit are shared, and its encoder windows are there again."""
        pool, shared, table = self.pool, hit // self.config.block, self.table
        self.table += 1
        if shared:
            place = {bytes(key): block for key, block in zip(self.page_sk.tolist(), self.page_s, strict=True)}
            ids = torch.tensor([place[bytes(key)] for key in keys_nk[:shared].tolist()])
            pool.table[table, :shared] = ids.to(torch.int32)
            pool.count[ids] += 1
            pool.used[table], pool.tokens[table] = shared, hit
            index = [bytes(key) for key in self.state_ik.tolist()].index(bytes(keys_nk[shared - 1].tolist()))
            slot_o, there_o = _positions(torch.tensor([hit]), self.window.ring)
            self.ring_lo[:, slot_o[0][there_o[0]]] = self.stored_ilo[index][:, there_o[0]]
        answer = pool.line(PoolAction.GROW, table, count - hit)
        assert answer[0] == PoolAnswer.DONE
        return pool.table[table].long(), shared

    def _encode(self, tokens_t: Tensor, first: int, row: Tensor) -> Tensor:
        """All encoder layers on one chunk, from ring and blocks."""
        window, ring = self.window.window, self.window.ring
        count, size = len(tokens_t), self.config.block
        position_t = torch.arange(first, first + count)
        x_t = (16807 * tokens_t + 1) % MODULUS
        past_o = torch.arange(first - window, first)
        kept_t = position_t[max(count - ring, 0) :]
        for layer in range(self.layers):
            rows = torch.cat([self.ring_lo[layer, past_o % ring], x_t])
            self.ring_lo[layer, kept_t % ring] = x_t[max(count - ring, 0) :]
            self._pool_pairs(x_t, first, layer, row)
            folded_t = torch.ones_like(x_t)
            for k in range(window):
                j_t = position_t - window + 1 + k
                keyed_t = (folded_t * 48271 + rows[j_t - first + window]) % MODULUS
                folded_t = torch.where(j_t >= 0, keyed_t, folded_t)
            pair_y = torch.arange((first + count) // 2)
            entry_y = self.entry_ple[row[2 * pair_y // size], layer, pair_y % (size // 2)]
            sums = torch.cat([torch.zeros(1, dtype=torch.int64), ((2 * pair_y + 3) * entry_y % MODULUS).cumsum(0)])
            total_t = sums[(position_t + 1) // 2] % MODULUS
            own_t = 69621 * x_t % MODULUS + 40014 * folded_t % MODULUS
            x_t = (own_t + 16807 * total_t % MODULUS + 100 + layer) % MODULUS
        return x_t

    def _pool_pairs(self, x_t: Tensor, first: int, layer: int, row: Tensor) -> None:
        """Hash the pairs that a chunk completes; its last token may wait for the next chunk."""
        if first % 2:
            x_t = torch.cat([self.pair_l[layer : layer + 1], x_t])
        if len(x_t) % 2:
            self.pair_l[layer] = x_t[-1]
        whole = x_t[: len(x_t) // 2 * 2].view(-1, 2)
        entry_y = ((48271 + whole[:, 0]) % MODULUS * 48271 + whole[:, 1]) % MODULUS
        pair_y = first // 2 + torch.arange(len(entry_y))
        half = self.config.block // 2
        self.entry_ple[row[pair_y // half], layer, pair_y % half] = entry_y

    def _persist(self, keys_nk: Tensor, end: int) -> None:
        """Keep the windows as they are behind the last whole block."""
        slot_o, there_o = _positions(torch.tensor([end]), self.window.ring)
        self.state_ik = torch.cat([self.state_ik, keys_nk[-1:]])
        self.stored_ilo.append(torch.where(there_o[0], self.ring_lo[:, slot_o[0]], 0))

    def _publish(self, keys_nk: Tensor, row: Tensor, shared: int) -> None:
        """Let later requests find the blocks that this one has filled."""
        self.page_sk = torch.cat([self.page_sk, keys_nk[shared:]])
        self.page_s += row[shared : len(keys_nk)].tolist()


class Disk:
    """What a store asks of a file system. A subclass may die at any call, or forget what was not synced."""

    def write(self, path: Path, data: bytes, *, append: bool) -> None:
        """Write to a file, or behind what it holds."""
        with path.open("ab" if append else "wb") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        """Return when everything that was written to a file, or to the names in a folder, survives a power loss."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name, in one step; a file that had it is gone."""
        os.replace(path, to)

    def read(self, path: Path) -> bytes | None:
        """The bytes of a file, or None if there is none."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, path: Path) -> None:
        """Remove a file, if there is one."""
        path.unlink(missing_ok=True)

    def names(self, folder: Path) -> list[str]:
        """The names in a folder."""
        return sorted(path.name for path in folder.iterdir())


class Killed(Exception):
    """The process ends here, as far as the store can know."""


@dataclass
class DyingDisk(Disk):
    """A disk that dies after so many writing calls."""

    steps: int

    def _step(self) -> None:
        if not self.steps:
            raise Killed
        self.steps -= 1

    def write(self, path: Path, data: bytes, *, append: bool) -> None:
        """One step."""
        self._step()
        super().write(path, data, append=append)

    def sync(self, path: Path) -> None:
        """One step."""
        self._step()
        super().sync(path)

    def rename(self, path: Path, to: Path) -> None:
        """One step."""
        self._step()
        super().rename(path, to)


class PrefixStore:
    """Entries in files, named by their keys; a file says which entry it is and is believed only whole.

    A put writes beside the entry, syncs, renames, and syncs the folder. Whatever a crash leaves, a reader finds the
    entry as it was put, or none. A folder belongs to one process at a time.
    """

    def __init__(self, folder: Path, *, disk: Disk | None = None) -> None:
        """Open a folder; what a put left unfinished is removed."""
        self.folder, self.disk = folder, disk or Disk()
        for name in self.disk.names(folder):
            if name.endswith(".partial"):
                self.disk.remove(folder / name)

    def path(self, key: bytes) -> Path:
        """Where the entry of a key stands."""
        return self.folder / key.hex()

    def put(self, key: bytes, payload: bytes) -> None:
        """Store an entry, in place of whatever has its name; it survives a power loss when this returns."""
        head = HEADER.pack(MAGIC, VERSION, len(payload), key)
        beside = self.folder / f"{key.hex()}.partial"
        self.disk.write(beside, head + hashlib.sha256(head + payload).digest(), append=False)
        self.disk.write(beside, payload, append=True)
        self.disk.sync(beside)
        self.disk.rename(beside, self.path(key))
        self.disk.sync(self.folder)

    def get(self, key: bytes) -> bytes | None:
        """The payload of an entry, or None; a file that is not what was put is removed."""
        data = self.disk.read(self.path(key))
        if data is None:
            return None
        head, digest, payload = data[: HEADER.size], data[HEADER.size : HEADER.size + 32], data[HEADER.size + 32 :]
        expected = HEADER.pack(MAGIC, VERSION, len(payload), key)
        if head == expected and hashlib.sha256(head + payload).digest() == digest:
            return payload
        self.drop(key)
        return None

    def drop(self, key: bytes) -> None:
        """Forget an entry."""
        self.disk.remove(self.path(key))

    def keys(self) -> list[bytes]:
        """The keys of all entries; one of them may yet turn out to be damaged."""
        names = [name for name in self.disk.names(self.folder) if len(name) == 64]
        return [bytes.fromhex(name) for name in names]


@contextmanager
def _killed() -> Iterator[None]:
    """What dies here leaves the files as they are."""
    try:
        yield
    except Killed:
        return


def _swap(path: Path, other: Path) -> None:
    """Exchange the names of two files, of which either may be absent."""
    if path == other:
        return
    aside = path.with_suffix(".aside")
    for source, to in ((path, aside), (other, path), (aside, other)):
        if source.exists():
            os.replace(source, to)


def _damage(path: Path, action: int, number: int) -> None:
    data = bytearray(path.read_bytes())
    where = number % len(data) if data else 0
    if action == StoreAction.TRUNCATE:
        data = data[:where]
    elif data:
        data[where] = (data[where] + 1) % 256
    path.write_bytes(data)


def _members(keys_bnk: Tensor, set_sk: Tensor) -> Tensor:
    """Which keys are in the set."""
    whole = torch.cat([keys_bnk.flatten(0, 1), set_sk])
    _, number_y = torch.unique(whole, dim=0, return_inverse=True) if len(whole) else (None, whole[:, 0].long())
    mine_bn = number_y[: len(whole) - len(set_sk)].view(keys_bnk.shape[:2])
    return torch.isin(mine_bn, number_y[len(whole) - len(set_sk) :])


def _rings(state_sq: Tensor, config: Csa2Config) -> list[Tensor]:
    """The rings [s, o, w] of encoder layers, sharing memory."""
    nothing = state_sq.new_zeros(0)
    caches = Csa2Caches(page_pq=nothing, state_sq=state_sq, window_table=nothing, main_table=nothing)
    return [caches.records(config, "ring", layer) for layer in range(config.plan.encoder_layers)]


def _records(ring_sow: Tensor, config: Csa2Config) -> Tensor:
    """The records of a ring one behind the other, whatever its arrangement."""
    if config.layout is PageLayout.INTERLEAVED:
        return ring_sow
    states, slots, width = ring_sow.shape
    data = slots * KV_FP8.data_bytes
    codes, sf = ring_sow.flatten(1).split([data, slots * width - data], 1)
    return torch.cat([codes.view(states, slots, -1), sf.view(states, slots, -1)], 2)


def _ring_slots(end_b: Tensor, config: Csa2Config) -> tuple[Tensor, Tensor]:
    return _positions(end_b, config.plan.ring)


def _positions(end_b: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    """Slots of the last `ring` positions before each end, oldest first, and whether there are such positions."""
    position_bo = end_b.long()[:, None] - ring + torch.arange(ring)
    return position_bo % ring, position_bo >= 0
