"""Wrong prefix caches: keys, hits, pools, stored windows, files and a whole server. One emulation each, with faults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deeptwin.reference.config import MissingState, PrefixConfig, SlidingWindow
from deeptwin.reference.csa2_config import Csa2Config

MODULUS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class KeyFaults:
    """What the names of blocks leave out or confuse; the default is right."""

    chained: bool = True
    salt: bool = True
    model: bool = True
    order: str = "little"
    token_bytes: int = 4
    partial: bool = False
    length: bool = True
    lengths_named: bool = True


def keys_with(faults: KeyFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `block_keys`."""

    def block_keys(tokens_bt: Tensor, length_b: Tensor, *, config: PrefixConfig) -> Tensor:
        n = tokens_bt.shape[1] // config.block
        keys = torch.zeros(len(tokens_bt), n, 32, dtype=torch.uint8)
        root = b"deeptwin.prefix.1\0"
        for used, text in ((faults.model, config.model), (faults.salt, config.salt)):
            name = text.encode() if used else b""
            root += (len(name).to_bytes(4, "little") if faults.lengths_named else b"") + name
        start = hashlib.sha256(root + config.block.to_bytes(4, "little")).digest()
        for b, row in enumerate(tokens_bt.tolist()):
            key, length = start, int(length_b[b]) if faults.length else tokens_bt.shape[1]
            if not faults.length and not int(length_b[b]):
                continue
            whole = -(-length // config.block) if faults.partial else length // config.block
            for i in range(min(whole, n)):
                block = row[i * config.block : min((i + 1) * config.block, length)]
                size = faults.token_bytes
                data = b"".join((token % 2 ** (8 * size)).to_bytes(size, faults.order) for token in block)
                key = hashlib.sha256((key if faults.chained else start) + data).digest()
                keys[b, i] = torch.tensor(list(key), dtype=torch.uint8)
        return keys

    return block_keys


@dataclass(frozen=True, kw_only=True)
class HitFaults:
    """How a hit reaches too far or not far enough; the default is right."""

    recompute: str = "own"  # own, none, one
    gaps: bool = False
    state: str = "own"  # own, assumed, first
    restart: bool = True
    whole_blocks: bool = True


def hits_with(faults: HitFaults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `prefix_hits`."""

    def prefix_hits(
        keys_bnk: Tensor, length_b: Tensor, pages_sk: Tensor, states_ik: Tensor, *, config: PrefixConfig
    ) -> tuple[Tensor, Tensor]:
        pages, states = ([row.tobytes() for row in x.numpy()] for x in (pages_sk, states_ik))
        left = {"none": 0, "one": 1}.get(faults.recompute, config.recompute)
        hits, valid = [], []
        for row, length in zip(keys_bnk.numpy(), length_b.tolist(), strict=True):
            room = max(length - left, 0)
            most = room // config.block if faults.whole_blocks else -(-room // config.block)
            keys = [key.tobytes() for key in row[:most]]
            there = [key in pages for key in keys]
            hit = sum(there) if faults.gaps else (there + [False]).index(False)
            ends = [i + 1 for i in range(hit) if keys[i] in states]
            if config.missing is MissingState.SHORTEN and faults.state != "assumed":
                hit = (ends[0] if faults.state == "first" else ends[-1]) if ends else 0
            tokens = min(hit * config.block, room) if not faults.whole_blocks else hit * config.block
            hits.append(tokens)
            known = hit == 0 or hit in ends or faults.state == "assumed"
            valid.append(0 if known or not faults.restart else tokens)
        return torch.tensor(hits, dtype=torch.int32), torch.tensor(valid, dtype=torch.int32)

    return prefix_hits


@dataclass(frozen=True, kw_only=True)
class PoolFaults:
    """What a block pool does wrong; the default is right."""

    order: str = "fifo"  # fifo, lifo
    reverse: bool = True
    double_free: bool = False
    null: bool = False
    share_partial: bool = False
    cut_shared: bool = False
    count_forks: bool = True
    leak: bool = False
    endless: bool = False
    surplus: bool = True
    short: int = 0


class _Pool:
    def __init__(self, faults: PoolFaults, blocks: int, tables: int, block: int) -> None:
        self.faults, self.blocks, self.block = faults, blocks, block
        self.free = list(range(0 if faults.null else 1, blocks))
        self.refs, self.pins = [0] * blocks, [0] * blocks
        self.table: list[list[int]] = [[] for _ in range(tables)]
        self.tokens = [0] * tables

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free) - self.faults.short:
            if self.faults.leak:
                for block in self.free:
                    self.refs[block] = 1
                self.free = []
            return None
        taken = [self.free.pop(-1 if self.faults.order == "lifo" else 0) for _ in range(count)]
        for block in taken:
            self.refs[block] = 1
        return taken

    def give(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] <= 0:
            self.refs[block] = 0
            self.free.append(block)

    def line(self, action: int, first: int, second: int) -> list[int]:
        if action in (4, 5):
            if not 0 < first < self.blocks or not (self.refs if action == 4 else self.pins)[first]:
                if action == 5 and self.faults.double_free and 0 < first < self.blocks:
                    self.give(first)
                    return [0, 0, 0]
                return [-2, 0, 0]
            self.pins[first] += 1 if action == 4 else -1
            if action == 4:
                self.refs[first] += 1
            else:
                self.give(first)
            return [0, 0, 0]
        if action == 2:
            return self.fork(first, second)
        after = self.tokens[first] + second if action == 0 else self.tokens[first] - second if action == 3 else 0
        if after < 0 or (action == 3 and not self.faults.cut_shared and self.is_shared(first, after)):
            return [-2, 0, 0]
        need = -(-after // self.block)
        if action == 0:
            more = need - len(self.table[first])
            if more >= self.blocks and not self.faults.endless:
                return [-2, 0, 0]
            taken = self.take(more)
            if taken is None:
                return [-1, 0, 0]
            self.table[first] += taken
        elif action == 1 or self.faults.surplus:
            gone = self.table[first][need:]
            self.table[first] = self.table[first][:need]
            for block in reversed(gone) if self.faults.reverse else gone:
                self.give(block)
        self.tokens[first] = after
        return [0, 0, 0]

    def is_shared(self, table: int, tokens: int) -> bool:
        block = self.table[table][tokens // self.block] if tokens % self.block else 0
        return self.refs[block] - self.pins[block] > 1

    def fork(self, first: int, second: int) -> list[int]:
        if self.table[second]:
            return [-2, 0, 0]
        full = len(self.table[first]) if self.faults.share_partial else self.tokens[first] // self.block
        own = self.take(len(self.table[first]) - full)
        if own is None:
            return [-1, 0, 0]
        for block in self.table[first][:full] if self.faults.count_forks else []:
            self.refs[block] += 1
        self.table[second] = self.table[first][:full] + own
        self.tokens[second] = self.tokens[first]
        return [0, self.table[first][full], own[0]] if own else [0, 0, 0]


def pool_with(faults: PoolFaults) -> Callable[..., tuple[Tensor, ...]]:
    """The emulation with the signature of `pool_run`."""

    def pool_run(script_nj: Tensor, *, blocks: int, tables: int, block: int) -> tuple[Tensor, ...]:
        pool = _Pool(faults, blocks, tables, block)
        answers = [pool.line(*line) for line in script_nj.tolist()]
        rows = [*pool.table, pool.free[:blocks]]
        whole = torch.tensor([(row + [-1] * blocks)[:blocks] for row in rows], dtype=torch.int32)
        answer = torch.tensor(answers, dtype=torch.int32).reshape(-1, 3)
        return answer, whole[:-1], torch.tensor(pool.refs, dtype=torch.int32), whole[-1]

    return pool_run


@dataclass(frozen=True, kw_only=True)
class WindowFaults:
    """How stored windows lose their order or their place; the default is right."""

    order: str = "position"  # position, slot
    before: bool = False  # positions below 0 too
    state: str = "own"  # own, sequence
    layout: str = "own"  # own, other
    kept: str = "ring"  # ring, window
    ahead: int = 0
    clears: bool = False


def _places(config: Csa2Config, layer: int, slot: int, faults: WindowFaults) -> list[int]:
    """The bytes of a slot of a ring in a state, whose rings stand one behind the other."""
    ring, size = config.window + config.backtracking, 528
    base = layer * (-(-ring * size // 32) * 32)
    sectioned = (config.layout.value == "sectioned") != (faults.layout == "other")
    if not sectioned:
        return list(range(base + slot * size, base + (slot + 1) * size))
    behind = base + ring * 512
    codes = range(base + slot * 512, base + (slot + 1) * 512)
    return [*codes, *range(behind + slot * 16, behind + (slot + 1) * 16)]


def _slots(config: Csa2Config, end: int, faults: WindowFaults) -> list[tuple[int, int]]:
    """Rows of the stored window and the slots that they are of."""
    ring = config.window + config.backtracking
    least = config.window if faults.kept == "window" else ring
    positions = [j for j in range(end - least, end) if j >= 0 or faults.before]
    if faults.order == "slot":
        return [(j % ring, j % ring) for j in positions]
    return [(j - end + ring, (j + faults.ahead) % ring) for j in positions]


def persist_with(faults: WindowFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `persist_state`."""

    def persist_state(state_sq: Tensor, state_b: Tensor, end_b: Tensor, *, config: Csa2Config) -> Tensor:
        layers, ring = config.plan.encoder_layers, config.window + config.backtracking
        out = torch.zeros(len(state_b), layers, ring, 528, dtype=torch.uint8)
        for b, (state, end) in enumerate(zip(state_b.tolist(), end_b.tolist(), strict=True)):
            for row, slot in _slots(config, end, faults):
                for layer in range(layers):
                    source = b if faults.state == "sequence" else state
                    out[b, layer, row] = state_sq[source, _places(config, layer, slot, faults)]
        return out

    return persist_state


def restore_with(faults: WindowFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `restore_state`."""

    def restore_state(
        state_sq_: Tensor, stored_blow: Tensor, state_b: Tensor, end_b: Tensor, *, config: Csa2Config
    ) -> Tensor:
        for b, (state, end) in enumerate(zip(state_b.tolist(), end_b.tolist(), strict=True)):
            owner = b if faults.state == "sequence" else state
            if faults.clears:
                state_sq_[owner] = 0
            for row, slot in _slots(config, end, faults):
                for layer in range(config.plan.encoder_layers):
                    state_sq_[owner, _places(config, layer, slot, faults)] = stored_blow[b, layer, row]
        return state_sq_

    return restore_state


@dataclass(frozen=True, kw_only=True)
class StoreFaults:
    """What a store of entries gets wrong; the default is right. Its files are byte strings in a dictionary."""

    checked: str = "whole"  # whole, nothing, head, lengths
    named: bool = True
    beside: bool = True
    replaces: bool = True
    reopens: bool = True
    drops: bool = True


class _Store:
    def __init__(self, faults: StoreFaults) -> None:
        self.faults = faults
        self.files: dict[int, bytes] = {}

    def put(self, entry: int, key: bytes, payload: bytes, steps: int) -> None:
        if entry in self.files and not self.faults.replaces:
            return
        covered = {"head": payload[:8], "nothing": b"", "lengths": b""}.get(self.faults.checked, payload)
        head = key + len(payload).to_bytes(4, "little")
        head += hashlib.sha256(head + covered).digest()
        if self.faults.beside and steps > 3:
            self.files[entry] = head + payload
        elif not self.faults.beside and steps > 0:
            self.files[entry] = head + payload if steps > 1 else head

    def get(self, entry: int, key: bytes) -> bytes | None:
        data = self.files.get(entry)
        if data is None:
            return None
        head, digest, payload = data[:36], data[36:68], data[68:]
        covered = {"head": payload[:8], "nothing": b"", "lengths": b""}.get(self.faults.checked, payload)
        ok = len(data) >= 68 or self.faults.checked == "nothing"
        if self.faults.checked != "nothing":
            ok = ok and hashlib.sha256(head + covered).digest() == digest
        if self.faults.checked in ("lengths", "whole"):
            ok = ok and int.from_bytes(head[32:], "little") == len(payload)
        if not ok or (self.faults.named and head[:32] != key):
            del self.files[entry]
            return None
        return payload


def store_with(faults: StoreFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `store_run`."""

    def store_run(script_nj: Tensor, key_pk: Tensor, payload_pq: Tensor) -> Tensor:
        store, answers = _Store(faults), []
        keys, payloads = ([bytes(row) for row in x.tolist()] for x in (key_pk, payload_pq))
        for action, entry, number in script_nj.tolist():
            answer = 0
            data = store.files.get(entry, b"")
            if action in (0, 4):
                store.put(entry, keys[entry], payloads[entry], 9 if action == 0 else number)
            elif action == 1:
                found = store.get(entry, keys[entry])
                answer = 0 if found is None else 1 if found == payloads[entry] else -1
            elif action == 2 and faults.drops:
                store.files.pop(entry, None)
            elif action == 5 and data:
                store.files[entry] = data[: number % len(data)]
            elif action == 6 and data:
                at = number % len(data)
                store.files[entry] = data[:at] + bytes([(data[at] + 1) % 256]) + data[at + 1 :]
            elif action == 7 and entry != number:
                one, two = store.files.pop(entry, None), store.files.pop(number, None)
                store.files |= {e: d for e, d in ((number, one), (entry, two)) if d is not None}
            if action in (3, 4) and not faults.reopens:
                store.files.clear()
            answers.append(answer)
        return torch.tensor(answers, dtype=torch.int32)

    return store_run


@dataclass(frozen=True, kw_only=True)
class ServerFaults:
    """What a server with a prefix cache takes from the wrong request; the default is right."""

    windows: str = "stored"  # stored, stale, none, slots, missing_state
    decoder: str = "cut"  # cut, stale
    reach: str = "kept"  # kept, last_token
    pair: bool = True
    sums: bool = True
    chained: bool = True
    entries: str = "own"  # own, shifted
    chunk: int = 5
    chunk_sees: str = "all"  # all, chunk
    mates: int = 0  # from this request on, the window is a key shorter


class _Server:
    def __init__(self, faults: ServerFaults, config: PrefixConfig, window: SlidingWindow, layers: int) -> None:
        self.faults, self.config, self.window, self.layers = faults, config, window, layers
        self.entries: dict[tuple[int, ...], list[list[int]]] = {}  # by prefix: pair hashes of its last block, by layer
        self.outputs: dict[tuple[int, ...], list[int]] = {}
        self.states: dict[tuple[int, ...], list[dict[int, int]]] = {}
        self.rings: list[dict[int, int]] = [{} for _ in range(layers)]
        self.decoder: list[dict[int, int]] = [{} for _ in range(layers)]
        self.count = 0

    def name(self, tokens: list[int], end: int) -> tuple[int, ...]:
        size = self.config.block
        return tuple(tokens[:end]) if self.faults.chained else (end, *tokens[end - size : end])

    def serve(self, tokens: list[int]) -> tuple[int, int]:
        self.count += 1
        size, count, ring = self.config.block, len(tokens), self.window.ring
        most = count - (self.config.recompute if self.faults.reach == "kept" else 1)
        hit = 0
        while hit + size <= most and self.name(tokens, hit + size) in self.entries:
            hit += size
        while hit and self.name(tokens, hit) not in self.states and self.faults.windows != "missing_state":
            hit -= size
        if self.faults.windows == "none":
            self.rings = [{} for _ in range(self.layers)]
        elif hit and self.faults.windows != "stale":
            stored = self.states.get(self.name(tokens, hit), [{} for _ in range(self.layers)])
            shift = hit if self.faults.windows == "slots" else 0
            self.rings = [{(j + shift) % ring: x for j, x in layer.items()} for layer in stored]
        pairs = [
            [e for end in range(size, hit + 1, size) for e in self.entries[self.name(tokens, end)][i]]
            for i in range(self.layers)
        ]
        outputs = [x for end in range(size, hit + 1, size) for x in self.outputs[self.name(tokens, end)]]
        waiting: list[int | None] = [None] * self.layers
        last, at = count // size * size, hit
        while at < count:
            end = min(at + self.faults.chunk, last if at < last else count)
            outputs += self._encode(tokens[at:end], at, pairs, waiting)
            at = end
            if at == last:
                self.states[self.name(tokens, at)] = [dict(ring_i) for ring_i in self.rings]
        for end in range(size, last + 1, size):
            half, moved = size // 2, 1 if self.faults.entries == "shifted" else 0
            self.entries[self.name(tokens, end)] = [
                p[max(end // 2 - half - moved, 0) : end // 2 - moved] for p in pairs
            ]
            self.outputs[self.name(tokens, end)] = outputs[end - size : end]
        return self._decode(outputs, hit), hit

    def _encode(self, tokens: list[int], first: int, pairs: list[list[int]], waiting: list[int | None]) -> list[int]:
        w = self.window.window - int(0 < self.faults.mates <= self.count)
        x = [(16807 * token + 1) % MODULUS for token in tokens]
        for i in range(self.layers):
            after = []
            for n, own in enumerate(x):
                p = first + n
                self.rings[i][p % self.window.ring] = own
                held = waiting[i]
                if p % 2 and held is not None:
                    pairs[i].append(((48271 + held) % MODULUS * 48271 + own) % MODULUS)
                    waiting[i] = None
                elif p % 2 == 0:
                    waiting[i] = own
                low = max(p - w + 1, first if self.faults.chunk_sees == "chunk" else 0)
                folded = 1
                for j in range(low, p + 1):
                    folded = (folded * 48271 + self.rings[i].get(j % self.window.ring, 0)) % MODULUS
                total = sum((2 * j + 3) * e for j, e in enumerate(pairs[i][: (p + 1) // 2])) % MODULUS
                after.append((69621 * own + 40014 * folded + 16807 * total + 100 + i) % MODULUS)
            if not self.faults.pair:
                waiting[i] = None
            x = after
        return x

    def _decode(self, outputs: list[int], hit: int) -> int:
        count, w = len(outputs), self.window.window
        cut = max(count - self.window.keep, hit)
        sums, total = {}, 0
        for p, x in enumerate(outputs):
            total = (total + (2 * p + 3) * x) % MODULUS if p >= hit or self.faults.sums else 0
            sums[p] = total
        h = {p: outputs[p] for p in range(cut, count)}
        for i in range(self.layers):
            past = self.decoder[i] if self.faults.decoder == "stale" else {}
            keys = past | h
            after = {}
            for p, own in h.items():
                folded = 1
                for j in range(max(p - w + 1, 0), p + 1):
                    if j in keys:
                        folded = (folded * 48271 + keys[j]) % MODULUS
                after[p] = (69621 * own + 40014 * folded + 16807 * sums[p] + i + 1) % MODULUS
            self.decoder[i] = h
            h = after
        return h[count - 1]


def serve_with(faults: ServerFaults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `serve_prefixes`."""

    def serve_prefixes(
        tokens_bt: Tensor, length_b: Tensor, *, config: PrefixConfig, window: SlidingWindow, layers: int
    ) -> tuple[Tensor, Tensor]:
        server = _Server(faults, config, window, layers)
        served = [server.serve(row[:n]) for row, n in zip(tokens_bt.tolist(), length_b.tolist(), strict=True)]
        out, hits = ([pair[i] for pair in served] for i in range(2))
        return torch.tensor(out, dtype=torch.int64), torch.tensor(hits, dtype=torch.int32)

    return serve_prefixes


right_keys = keys_with(KeyFaults())
keys_not_chained = keys_with(KeyFaults(chained=False))
keys_without_salt = keys_with(KeyFaults(salt=False))
keys_without_model = keys_with(KeyFaults(model=False))
keys_of_joined_names = keys_with(KeyFaults(lengths_named=False))
keys_big_endian = keys_with(KeyFaults(order="big"))
keys_of_16_bit_tokens = keys_with(KeyFaults(token_bytes=2))
keys_of_partial_blocks = keys_with(KeyFaults(partial=True))
keys_beyond_the_length = keys_with(KeyFaults(length=False))

right_hits = hits_with(HitFaults())
hits_leave_nothing = hits_with(HitFaults(recompute="none"))
hits_leave_one_token = hits_with(HitFaults(recompute="one"))
hits_over_a_gap = hits_with(HitFaults(gaps=True))
hits_without_a_state = hits_with(HitFaults(state="assumed"))
hits_end_at_the_first_state = hits_with(HitFaults(state="first"))
hits_restart_hidden = hits_with(HitFaults(restart=False))
hits_into_a_block = hits_with(HitFaults(whole_blocks=False))

right_pool = pool_with(PoolFaults())
pool_last_freed_first = pool_with(PoolFaults(order="lifo"))
pool_tables_freed_forwards = pool_with(PoolFaults(reverse=False))
pool_double_free = pool_with(PoolFaults(double_free=True))
pool_null_block_used = pool_with(PoolFaults(null=True))
pool_partial_block_shared = pool_with(PoolFaults(share_partial=True))
pool_cut_within_shared_block = pool_with(PoolFaults(cut_shared=True))
pool_forks_not_counted = pool_with(PoolFaults(count_forks=False))
pool_leaks_when_full = pool_with(PoolFaults(leak=True))
pool_waits_for_ever = pool_with(PoolFaults(endless=True))
pool_surplus_kept = pool_with(PoolFaults(surplus=False))
pool_needs_one_spare = pool_with(PoolFaults(short=1))

right_persist = persist_with(WindowFaults())
persist_in_slot_order = persist_with(WindowFaults(order="slot"))
persist_stale_before_0 = persist_with(WindowFaults(before=True))
persist_state_is_the_sequence = persist_with(WindowFaults(state="sequence"))
persist_other_layout = persist_with(WindowFaults(layout="other"))
persist_window_only = persist_with(WindowFaults(kept="window"))
persist_one_ahead = persist_with(WindowFaults(ahead=1))

right_restore = restore_with(WindowFaults())
restore_in_slot_order = restore_with(WindowFaults(order="slot"))
restore_before_0 = restore_with(WindowFaults(before=True))
restore_state_is_the_sequence = restore_with(WindowFaults(state="sequence"))
restore_other_layout = restore_with(WindowFaults(layout="other"))
restore_window_only = restore_with(WindowFaults(kept="window"))
restore_clears_the_state = restore_with(WindowFaults(clears=True))
restore_one_ahead = restore_with(WindowFaults(ahead=1))

right_store = store_with(StoreFaults())
store_not_checked = store_with(StoreFaults(checked="nothing"))
store_checks_the_first_bytes = store_with(StoreFaults(checked="head"))
store_checks_lengths = store_with(StoreFaults(checked="lengths"))
store_believes_names = store_with(StoreFaults(named=False))
store_writes_in_place = store_with(StoreFaults(beside=False))
store_keeps_what_is_there = store_with(StoreFaults(replaces=False))
store_forgets_when_reopened = store_with(StoreFaults(reopens=False))
store_never_drops = store_with(StoreFaults(drops=False))

right_server = serve_with(ServerFaults())
server_stale_windows = serve_with(ServerFaults(windows="stale"))
server_windows_not_restored = serve_with(ServerFaults(windows="none"))
server_windows_in_other_slots = serve_with(ServerFaults(windows="slots"))
server_hits_without_windows = serve_with(ServerFaults(windows="missing_state"))
server_stale_decoder = serve_with(ServerFaults(decoder="stale"))
server_hits_up_to_the_end = serve_with(ServerFaults(reach="last_token"))
server_pair_lost_at_a_step = serve_with(ServerFaults(pair=False))
server_sums_from_the_hit = serve_with(ServerFaults(sums=False))
server_blocks_by_their_tokens = serve_with(ServerFaults(chained=False))
server_entries_shifted = serve_with(ServerFaults(entries="shifted"))
server_steps_see_themselves = serve_with(ServerFaults(chunk_sees="chunk"))
server_third_request_differs = serve_with(ServerFaults(mates=3))
