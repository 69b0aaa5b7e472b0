"""Prefix reuse: which blocks of a prompt are cached already, what is kept of a request, and what a store may serve.

The global keys of a prompt are cached in blocks of 128 tokens. A block is named by a chain of hashes,

    key_0 = H(model, salt),  key_i = H(key_(i-1), tokens of block i)

so a key names a whole prefix. This chain is this project's definition: that of the vendor is not public. A hit is the
longest prefix of stored blocks that leaves the last tokens to compute: one at least, K where decoder layers are
replayed, since their windows are never stored and are made of the last K tokens. Of a request's own state the windows
of encoder layers are stored, cut to the ring; those of decoder layers are dropped, and at the end of a block no
compressor holds a part of a group.

Everything here is a definition: a walk through dictionaries, request after request. `serve_prefixes` says what all
of it together must not change: anything.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from .block_pool import BlockPool, BlockTables
from .cache_plan import encoder_rings, record_bytes
from .checks import (
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
from .config import (
    KV_FP8,
    PUT_STEPS,
    MissingState,
    PoolAction,
    PoolAnswer,
    PrefixConfig,
    SlidingWindow,
    StoreAction,
    Truncation,
)
from .csa2_config import Csa2Config
from .prefix_toy import RATIO, toy_prefill

KEY_BYTES = 32


def block_keys(tokens_bt: Tensor, length_b: Tensor, *, config: PrefixConfig) -> Tensor:
    """The key of every whole block of each request.

    Math:
        H is SHA-256; key_0 hashes "deeptwin.prefix.1", a zero byte, then model and salt in UTF-8, each behind its
        length, then the tokens of a block; key_i hashes key_(i-1) and the tokens; numbers are 4 bytes, little-endian

    Shapes:
        tokens_bt: int32 [b, t], anything beyond the length; length_b: [b]; returns uint8 [b, floor(t / block), 32].

    Edges:
        blocks that a request does not fill have the key 0.

    Raises:
        TypeError: tokens are not int32, lengths no integers.
        ValueError: shapes disagree; a length is not in 0 … t; a token is negative.

    Source:
        runtime.md section 5.5
    """
    dims = expect_requests(tokens_bt, length_b)
    keys_bnk = torch.zeros(dims["b"], dims["t"] // config.block, KEY_BYTES, dtype=torch.uint8)
    names = (config.model.encode(), config.salt.encode())
    root = b"deeptwin.prefix.1\0" + b"".join(_number(len(name)) + name for name in names) + _number(config.block)
    for b, (tokens, length) in enumerate(zip(tokens_bt.tolist(), length_b.tolist(), strict=True)):
        key = hashlib.sha256(root).digest()
        for i in range(length // config.block):
            block = tokens[i * config.block : (i + 1) * config.block]
            key = hashlib.sha256(key + b"".join(_number(token) for token in block)).digest()
            keys_bnk[b, i] = torch.tensor(list(key), dtype=torch.uint8)
    return keys_bnk


def prefix_hits(
    keys_bnk: Tensor, length_b: Tensor, pages_sk: Tensor, states_ik: Tensor, *, config: PrefixConfig
) -> tuple[Tensor, Tensor]:
    """How many tokens of each request need not be computed, and the first position whose window state is valid then.

    Shapes:
        keys_bnk: as `block_keys`; length_b: [b], tokens known; pages_sk: uint8 [s, 32], keys of stored blocks;
        states_ik: uint8 [i, 32], keys behind which the windows of encoder layers are stored; returns hit_b, valid_b:
        int32 [b].

    Edges:
        a stored block behind a gap is no hit. valid > 0, under ZERO_STATE only, says that the request is approximate.

    Raises:
        TypeError: keys are not uint8, lengths no integers.
        ValueError: shapes disagree; a length is negative.

    Source:
        runtime.md sections 4.4, 5.5
    """
    expect_key_sets(keys_bnk, length_b, pages_sk, states_ik)
    pages, states = ({bytes(key) for key in x.tolist()} for x in (pages_sk, states_ik))
    hits, valid = [], []
    for keys, length in zip(keys_bnk.tolist(), length_b.tolist(), strict=True):
        blocks = [bytes(key) for key in keys[: max(length - config.recompute, 0) // config.block]]
        hit = 0
        while hit < len(blocks) and blocks[hit] in pages:
            hit += 1
        if config.missing is MissingState.SHORTEN:
            while hit and blocks[hit - 1] not in states:
                hit -= 1
        hits.append(hit * config.block)
        valid.append(0 if not hit or blocks[hit - 1] in states else hit * config.block)
    return torch.tensor(hits, dtype=torch.int32), torch.tensor(valid, dtype=torch.int32)


def pool_run(script_nj: Tensor, *, blocks: int, tables: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a block pool and its tables are after a script of `PoolAction`.

    Shapes:
        script_nj: int32 [n, 3]; returns answer_nj: int32 [n, 3], a `PoolAnswer`, then for a fork the block to copy and
        the block to copy it to, otherwise 0; table_bp: int32 [tables, blocks], -1 behind the last; held_p: int32
        [blocks], references; free_p: int32 [blocks], the free list, -1 behind it.

    Edges:
        a line that waits or is refused changes nothing. To unpin what is in tables but not pinned is a double free.

    Raises:
        TypeError: the script is not int32.
        ValueError: the script is not [n, 3], names an unknown action or table, or a negative number of tokens; there
            are fewer than two blocks; block is not positive.

    Source:
        runtime.md section 5.5
    """
    expect_positive("block", block)
    pool = BlockPool(blocks)
    state = BlockTables(tables, pool=pool, block=block)
    expect_pool_script(script_nj, tables)
    answers = []
    for action, first, second in script_nj.tolist():
        try:
            answers.append(state.run(PoolAction(action), first, second))
        except ValueError:
            answers.append((PoolAnswer.REFUSED, 0, 0))
    rows = [*state.rows, [pool.held.get(b, 0) for b in range(blocks)], list(pool.free)]
    whole = torch.tensor([row + [-1] * (blocks - len(row)) for row in rows], dtype=torch.int32)
    answer_nj = torch.tensor(answers, dtype=torch.int32).reshape(-1, 3)
    return answer_nj, whole[:-2], whole[-2], whole[-1]


def persist_state(state_sq: Tensor, state_b: Tensor, end_b: Tensor, *, config: Csa2Config) -> Tensor:
    """The part of a request's state that a store keeps: the rings of encoder layers, by position.

    Shapes:
        state_sq: uint8 [s, q], states as `csa2_run` leaves them; state_b: [b]; end_b: [b], tokens in them; returns
        uint8 [b, encoder layers, R, w], the records of positions end - R … end - 1.

    Edges:
        positions below 0 are zero bytes. The same prefix gives the same bytes, whatever slot or ring turn it had.

    Raises:
        TypeError: states are not uint8, numbers no integers.
        ValueError: shapes disagree; a state is not in 0 … s - 1.

    Source:
        runtime.md section 4.4
    """
    expect_states("state_sq", state_sq, state_b, end_b)
    rings = encoder_rings(config.plan)
    ring, width = config.plan.ring, KV_FP8.record_bytes
    stored_blow = torch.zeros(len(state_b), len(rings), ring, width, dtype=torch.uint8)
    for b, (state, end) in enumerate(zip(state_b.tolist(), end_b.tolist(), strict=True)):
        for i, piece in enumerate(rings):
            for j in range(max(end - ring, 0), end):
                places = record_bytes(piece, j % ring, fmt=KV_FP8, layout=config.layout)
                stored_blow[b, i, j - end + ring] = torch.cat([state_sq[state, part] for part in places])
    return stored_blow


def restore_state(
    state_sq_: Tensor, stored_blow: Tensor, state_b: Tensor, end_b: Tensor, *, config: Csa2Config
) -> Tensor:
    """Write what `persist_state` kept into other states, in place; nothing else of them changes.

    Shapes:
        as `persist_state`; returns state_sq_.

    Raises:
        TypeError: states are not uint8, numbers no integers.
        ValueError: shapes disagree; a state is not in 0 … s - 1, or twice in state_b.

    Source:
        runtime.md section 4.4
    """
    expect_states("state_sq_", state_sq_, state_b, end_b)
    rings, ring = encoder_rings(config.plan), config.plan.ring
    sizes = {"b": len(state_b), "l": len(rings), "o": ring, "w": KV_FP8.record_bytes}
    expect_shape("stored_blow", stored_blow, "blow", sizes)
    expect_dtype("stored_blow", stored_blow, torch.uint8)
    if len(state_b.unique()) != len(state_b):
        raise ValueError(f"state_b: expected every state once, got {state_b.tolist()}")
    for b, (state, end) in enumerate(zip(state_b.tolist(), end_b.tolist(), strict=True)):
        for i, piece in enumerate(rings):
            for j in range(max(end - ring, 0), end):
                data, scales = record_bytes(piece, j % ring, fmt=KV_FP8, layout=config.layout)
                record = stored_blow[b, i, j - end + ring]
                state_sq_[state, data], state_sq_[state, scales] = record.split(
                    [KV_FP8.data_bytes, KV_FP8.record_bytes - KV_FP8.data_bytes]
                )
    return state_sq_


def store_run(script_nj: Tensor, key_pk: Tensor, payload_pq: Tensor) -> Tensor:
    """What a store of entries answers during a script of `StoreAction`, whatever dies or breaks meanwhile.

    Shapes:
        script_nj: int32 [n, 3]; key_pk: uint8 [p, 32], the names of entries; payload_pq: uint8 [p, q], their bytes;
        returns int32 [n]: 1 or 0 for a GET, 0 for everything else.

    Edges:
        an entry that was damaged, or has the bytes of another, is absent, and its file is removed when it is asked for.
        A put that dies before its rename leaves what was there before. Nothing breaks where there is no file.

    Raises:
        TypeError: the script is not int32, keys or payloads are not uint8.
        ValueError: shapes disagree; an unknown action or entry; a number is negative.

    Source:
        runtime.md section 4.4 (what is stored); the store is ours
    """
    expect_store_script(script_nj, key_pk, payload_pq)
    file: dict[int, int] = {}  # under the name of an entry: whose bytes, -1 for damaged ones
    answers = []
    for action, entry, number in script_nj.tolist():
        answer = 0
        if action == StoreAction.PUT or (action == StoreAction.KILL and number > PUT_STEPS.index("rename")):
            file[entry] = entry
        elif action == StoreAction.GET and entry in file:
            answer = int(file[entry] == entry)
            if not answer:
                del file[entry]
        elif action == StoreAction.DROP:
            file.pop(entry, None)
        elif action in (StoreAction.TRUNCATE, StoreAction.SPOIL) and entry in file:
            file[entry] = -1
        elif action == StoreAction.SWAP:
            one, other = file.pop(entry, None), file.pop(number, None)
            file |= {name: owner for name, owner in ((number, one), (entry, other)) if owner is not None}
        answers.append(answer)
    return torch.tensor(answers, dtype=torch.int32)


def serve_prefixes(
    tokens_bt: Tensor, length_b: Tensor, *, config: PrefixConfig, window: SlidingWindow, layers: int
) -> tuple[Tensor, Tensor]:
    """What a toy model answers to requests that come one after the other, each computed alone and from its start.

    Math:
        the last output of `toy_prefill`: `layers` encoder layers, then as many decoder layers under bounded replay;
        hit: the longest run of blocks in common with an earlier request that ends where that one's last whole block
        did, because windows are stored there

    Shapes:
        tokens_bt: int32 [b, t]; length_b: [b], at least 1; returns out_b: int64 [b], hit_b: int32 [b].

    Raises:
        TypeError: tokens are not int32, lengths no integers.
        ValueError: shapes disagree; a length is not in 1 … t; a token is negative; layers is not positive; the
            configuration's hits may be approximate, or reach into the last K tokens; blocks are odd; nothing is
            truncated.

    Source:
        runtime.md sections 4.4, 5.5
    """
    expect_positive("layers", layers)
    dims = expect_requests(tokens_bt, length_b)
    expect_in_range("length_b", length_b, 1, dims["t"] + 1)
    if config.missing is not MissingState.SHORTEN or config.recompute < window.keep or config.block % RATIO:
        raise ValueError(f"config: expected exact hits of even blocks that leave {window.keep} tokens, got {config}")
    if window.truncation is Truncation.OFF:
        raise ValueError("window: expected a truncation, got OFF: decoder windows are not stored")
    out, hits = [], []
    ends: list[list[int]] = []  # what earlier requests had in whole blocks
    for tokens, length in zip(tokens_bt.tolist(), length_b.tolist(), strict=True):
        most = max(length - config.recompute, 0)
        hits.append(max((len(e) for e in ends if len(e) <= most and e == tokens[: len(e)]), default=0))
        out.append(toy_prefill(tokens[:length], window=window, layers=layers))
        ends.append(tokens[: length // config.block * config.block])
    return torch.tensor(out, dtype=torch.int64), torch.tensor(hits, dtype=torch.int32)


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")
