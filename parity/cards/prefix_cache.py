"""How prefix reuse is checked: names, hits, pools and windows bit by bit, files that break, a server on a toy model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.cache_plan import encoder_rings, record_bytes, state_bytes
from deeptwin.reference.config import (
    KV_FP8,
    MissingState,
    PageLayout,
    PoolAction,
    PrefixConfig,
    ScoreOrder,
    SlidingWindow,
    StoreAction,
    Truncation,
)
from deeptwin.reference.csa2_config import CastPoints, Csa2Config, tiny_csa2, v41_flash_csa2
from deeptwin.reference.prefix_cache import block_keys, pool_run

from .. import draws
from ..card import Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import Context, Variant, row_chunks
from ..rules import Bitwise

_mutant, _control = variants("prefix_cache")


# cases


@dataclass(frozen=True, kw_only=True)
class KeyCase:
    """Requests of up to `tokens` tokens that share beginnings; blocks of `block`."""

    requests: int
    tokens: int
    block: int
    recompute: int = 1
    missing: str = "shorten"
    model: str = "v41"
    salt: str = ""
    index: str = "int32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        names = f"{self.model}.{self.salt}-{self.missing}-leave{self.recompute}"
        return f"b{self.requests}-t{self.tokens}-block{self.block}-{names}-{self.index}-{self.regime}"

    @property
    def config(self) -> PrefixConfig:
        return PrefixConfig(
            model=self.model,
            salt=self.salt,
            missing=MissingState(self.missing),
            block=self.block,
            recompute=self.recompute,
        )


@dataclass(frozen=True, kw_only=True)
class PoolCase:
    """A script of `lines` lines on `tables` tables over a pool of `blocks`; `regime` says what it mostly does."""

    blocks: int
    tables: int
    block: int = 4
    lines: int = 40
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"n{self.blocks}-tables{self.tables}-block{self.block}-lines{self.lines}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class StateCase:
    """States of the named stack behind `ends` tokens."""

    ends: tuple[int, ...]
    stack: str = "tiny"
    layout: str = "interleaved"
    index: str = "int32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"{self.stack}-e{'.'.join(str(n) for n in self.ends)}-{self.layout}-{self.index}-{self.regime}"

    @property
    def config(self) -> Csa2Config:
        make = {"tiny": tiny_csa2, "v41": v41_flash_csa2}[self.stack]
        return make(cast=CastPoints.RELEASE, score_order=ScoreOrder.BF16_CHAINS, layout=PageLayout(self.layout))


@dataclass(frozen=True, kw_only=True)
class StoreCase:
    """A script of `lines` lines on `entries` entries of `size` bytes; `regime` says what breaks."""

    entries: int
    size: int
    lines: int = 60
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"p{self.entries}-q{self.size}-lines{self.lines}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class ServeCase:
    """Requests of up to `tokens` tokens, one after the other, that share beginnings with earlier ones."""

    requests: int
    tokens: int
    block: int = 4
    window: int = 4
    spare: int = 3
    more: int = 0  # tokens kept beyond the ring
    truncation: str = "compact"
    layers: int = 3  # with K = 7 no row of the last is exact: what is reused has to make the same approximation
    regime: str = "normal"

    @property
    def id(self) -> str:
        sizes = f"b{self.requests}-t{self.tokens}-block{self.block}-w{self.window}+{self.spare}+{self.more}"
        return f"{sizes}-{self.truncation}-l{self.layers}-{self.regime}"

    @property
    def sliding(self) -> SlidingWindow:
        ring = self.window + self.spare
        return SlidingWindow(
            window=self.window, ring=ring, truncation=Truncation(self.truncation), keep=ring + self.more
        )


# inputs


def shared_tokens(requests: int, tokens: int, vocabulary: int, rng: np.random.Generator) -> np.ndarray:
    """Random requests, each of which begins like an earlier one up to a random place."""
    x = rng.integers(0, vocabulary, (requests, tokens))
    for b in range(1, requests):
        same = int(rng.integers(0, tokens + 1))
        x[b, :same] = x[int(rng.integers(0, b)), :same]
    return x.astype(np.int32)


def draw_keys(case: KeyCase, rng: np.random.Generator) -> Inputs:
    """Tokens above 16 bits, whole and partial blocks, garbage behind the end of a request."""
    x = shared_tokens(case.requests, case.tokens, 2**31 - 1 if case.regime == "huge" else 129280, rng)
    length = rng.integers(0, case.tokens + 1, case.requests)
    length[: case.requests // 3] = case.tokens // case.block * case.block
    for b, n in enumerate(length):
        x[b, n:] = rng.choice(np.array(draws.BAD_INDICES, dtype=np.int32), case.tokens - n)
    return {
        "tokens_bt": draws.strided(torch.from_numpy(x), pad=3),
        "length_b": torch.from_numpy(length).to(getattr(torch, case.index)),
        "config": case.config,
    }


def draw_hits(case: KeyCase, rng: np.random.Generator) -> Inputs:
    """Stored blocks with gaps, stored windows behind some of them; keys in random order."""
    given = draw_keys(case, rng)
    keys_bnk = block_keys(**given)
    flat = keys_bnk.flatten(0, 1)
    flat = flat[(flat != 0).any(1)].unique(dim=0) if len(flat) else flat
    flat = flat[torch.from_numpy(rng.permutation(len(flat)))]
    stored, behind = (torch.from_numpy(rng.random(len(flat)) < share) for share in (0.85, 0.5))
    return {
        "keys_bnk": keys_bnk,
        "length_b": given["length_b"],
        "pages_sk": flat[stored],
        "states_ik": flat[behind],
        "config": case.config,
    }


def draw_pool(case: PoolCase, rng: np.random.Generator) -> Inputs:
    """Lines of every kind; small pools are full most of the time."""
    kinds = {"normal": (5, 2, 2, 2, 1, 2), "forks": (3, 2, 6, 2, 1, 1), "pins": (3, 2, 1, 1, 4, 5)}
    weights = np.array(kinds.get(case.regime, kinds["normal"]), dtype=np.float64)
    rows: list[tuple[int, int, int]] = []
    if case.regime == "cuts":
        # a table cut within a block that its fork shares, then between two, then within its own
        rows += [(PoolAction.GROW, 0, 2 * case.block), (PoolAction.FORK, 0, 1), (PoolAction.SHRINK, 0, 1)]
        rows += [(PoolAction.SHRINK, 0, case.block), (PoolAction.GROW, 0, 2), (PoolAction.SHRINK, 0, 1)]
    for action in rng.choice(len(PoolAction), case.lines, p=weights / weights.sum()):
        on_block = action in (PoolAction.PIN, PoolAction.UNPIN)
        first = int(rng.integers(-1, case.blocks + 2)) if on_block else int(rng.integers(case.tables))
        second = int(rng.integers(case.tables if action == PoolAction.FORK else 2 * case.block + 2))
        rows.append((int(action), first, second))
    # more than there is can never be had
    rows += [(PoolAction.GROW, 0, case.blocks * case.block)] if case.lines else []
    script = torch.tensor(rows, dtype=torch.int32).reshape(-1, 3)
    return {"script_nj": script, "blocks": case.blocks, "tables": case.tables, "block": case.block}


def draw_state(case: StateCase, rng: np.random.Generator) -> Inputs:
    """States of random bytes in random order, more of them than are named."""
    dtype = getattr(torch, case.index)
    size = state_bytes(case.config.plan)
    return {
        "state_sq": torch.from_numpy(rng.integers(0, 256, (len(case.ends) + 1, size), dtype=np.uint8)),
        "state_b": torch.from_numpy(rng.permutation(len(case.ends) + 1)[: len(case.ends)]).to(dtype),
        "end_b": torch.tensor(case.ends, dtype=dtype),
        "config": case.config,
    }


def draw_restore(case: StateCase, rng: np.random.Generator) -> Inputs:
    """Stored windows of random bytes, states of 0xFF bytes."""
    given = draw_state(case, rng)
    plan = case.config.plan
    shape = (len(case.ends), plan.encoder_layers, plan.ring, KV_FP8.record_bytes)
    return {
        "state_sq_": draws.poisoned(*given["state_sq"].shape, dtype=torch.uint8),
        "stored_blow": torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)),
        **{name: given[name] for name in ("state_b", "end_b", "config")},
    }


def draw_store(case: StoreCase, rng: np.random.Generator) -> Inputs:
    """Scripts that ask for every entry after everything that breaks."""
    actions = {
        "normal": [StoreAction.PUT, StoreAction.GET, StoreAction.DROP, StoreAction.REOPEN],
        "killed": [StoreAction.PUT, StoreAction.KILL, StoreAction.KILL, StoreAction.DROP],
        "damaged": [StoreAction.PUT, StoreAction.TRUNCATE, StoreAction.SPOIL, StoreAction.SPOIL],
        "swapped": [StoreAction.PUT, StoreAction.SWAP, StoreAction.SWAP, StoreAction.KILL],
    }[case.regime]
    rows = [(StoreAction.PUT, e, 0) for e in range(case.entries) if e % 2]
    while len(rows) < case.lines:
        action, entry = actions[int(rng.integers(len(actions)))], int(rng.integers(case.entries))
        number = int(rng.integers({StoreAction.KILL: 6, StoreAction.SWAP: case.entries}.get(action, case.size + 200)))
        rows.append((action, entry, number))
        rows += [(StoreAction.GET, int(rng.integers(case.entries)), 0)] * int(rng.integers(3))
        rows.append((StoreAction.GET, entry, 0))
    keys = [list(hashlib.sha256(bytes([e])).digest()) for e in range(case.entries)]
    return {
        "script_nj": torch.tensor(rows, dtype=torch.int32).reshape(-1, 3),
        "key_pk": torch.tensor(keys, dtype=torch.uint8).reshape(-1, 32),
        "payload_pq": torch.from_numpy(rng.integers(0, 256, (case.entries, case.size), dtype=np.uint8)),
    }


def draw_serve(case: ServeCase, rng: np.random.Generator) -> Inputs:
    """Requests over two tokens, so that blocks with equal tokens stand behind other prefixes too."""
    x = shared_tokens(case.requests, case.tokens, 2, rng)
    length = rng.integers(case.tokens // 2, case.tokens + 1, case.requests)
    # a text that grows, as in a conversation
    length[1:2] = np.minimum(length[1:2], max(case.tokens - case.sliding.keep, 1))
    for b in range(2, case.requests, 2):
        x[b, : length[1]] = x[1, : length[1]]
        length[b] = case.tokens
    if case.requests > 3:
        # another prefix whose blocks have all been met: the first in one request, the others in another
        x[0, : case.block] = 1 - x[1, : case.block]
        x[3] = np.concatenate([x[1, : case.block], x[0, case.block :]])
        length[[0, 3]] = case.tokens * 2 // 3, case.tokens
    sliding = case.sliding
    config = PrefixConfig(model="toy", salt="", missing=MissingState.SHORTEN, block=case.block, recompute=sliding.keep)
    return {
        "tokens_bt": torch.from_numpy(x),
        "length_b": torch.from_numpy(np.maximum(length, 1).astype(np.int32)),
        "config": config,
        "window": sliding,
        "layers": case.layers,
    }


# which cases


def cases_keys(full: bool) -> list[KeyCase]:
    """Blocks of 1 to 128, names, no request, no whole block."""
    base = KeyCase(requests=6, tokens=30, block=4)
    found = [
        base,
        replace(base, block=1, tokens=7),
        replace(base, block=8, index="int64"),
        replace(base, regime="huge"),
    ]
    found += [
        replace(base, model="v4", salt="tenant é"),
        replace(base, model="v41tenant", salt=""),
        replace(base, salt="1"),
    ]
    found += [KeyCase(requests=3, tokens=400, block=128), replace(base, requests=0), replace(base, tokens=3)]
    if full:
        found += [replace(base, tokens=t, block=n) for t, n in product((64, 65), (3, 16, 64))]
    return found


def cases_hits(full: bool) -> list[KeyCase]:
    """Both rules for missing windows, tokens to leave around the block."""
    base = KeyCase(requests=8, tokens=40, block=4)
    found = [replace(base, missing=m, recompute=k) for m, k in product(("shorten", "zero_state"), (1, 4, 5, 11))]
    found += [replace(base, block=1, tokens=9), replace(base, index="int64", block=7), replace(base, requests=0)]
    found += [replace(base, tokens=3), KeyCase(requests=3, tokens=600, block=128, recompute=140)]
    if full:
        found += [
            replace(base, missing=m, recompute=k, block=n, requests=20)
            for m, k, n in product(("shorten", "zero_state"), (1, 2, 16), (2, 3, 8))
        ]
    return found


def cases_pool(full: bool) -> list[PoolCase]:
    """Pools that are always full, forks, pins, no line, the null block alone with another."""
    base = PoolCase(blocks=9, tables=3)
    found = [
        base,
        replace(base, regime="forks"),
        replace(base, regime="pins"),
        replace(base, regime="cuts"),
        replace(base, blocks=30, regime="forks"),
    ]
    found += [replace(base, blocks=2, block=1), replace(base, lines=0), replace(base, blocks=12, block=128)]
    if full:
        found += [
            PoolCase(blocks=n, tables=5, block=b, lines=300, regime=r)
            for n, b, r in product((3, 20, 80), (1, 5), ("normal", "forks", "pins"))
        ]
    return found


def cases_state(full: bool) -> list[StateCase]:
    """Rings that are not full, that have turned, both arrangements, none, and the released sizes."""
    base = StateCase(ends=(16, 3, 0, 11, 10))
    found = [base, replace(base, layout="sectioned", index="int64"), replace(base, ends=())]
    found += [StateCase(ends=(256,), stack="v41")]
    if full:
        found += [StateCase(ends=(128, 1000), stack="v41", layout="sectioned"), replace(base, ends=tuple(range(24)))]
    return found


def cases_store(full: bool) -> list[StoreCase]:
    """What dies, what breaks, what changes names; an entry without bytes."""
    base = StoreCase(entries=4, size=70)
    found = [replace(base, regime=r) for r in ("normal", "killed", "damaged", "swapped")]
    found += [replace(base, size=0, regime="damaged"), replace(base, size=5000, regime="damaged", lines=40)]
    found += [replace(base, lines=0)]
    if full:
        found += [
            StoreCase(entries=e, size=300, lines=200, regime=r)
            for e, r in product((1, 2, 7), ("normal", "killed", "damaged", "swapped"))
        ]
    return found


def cases_serve(full: bool) -> list[ServeCase]:
    """Blocks around the window, K around the block, both modes, one request, one layer."""
    base = ServeCase(requests=6, tokens=40)
    found = [
        base,
        replace(base, block=2, requests=12, tokens=24),
        replace(base, block=8, more=2),
        replace(base, truncation="mask", more=5),
    ]
    found += [replace(base, window=1, spare=1), replace(base, requests=1, tokens=1), replace(base, layers=1)]
    if full:
        found += [
            replace(base, requests=12, block=n, more=m, window=w, layers=3)
            for n, m, w in product((2, 6, 16), (0, 3), (2, 6))
        ]
    return found


# relation hooks


def later_tokens(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Other tokens in the second half: the keys of the blocks before stay."""
    half = inputs["tokens_bt"].shape[1] // 2
    blocks = half // inputs["config"].block
    other = inputs["tokens_bt"].clone()
    other[:, half:] = torch.where(other[:, half:] > 0, other[:, half:] - 1, other[:, half:])

    def before(outputs: Outputs) -> Outputs:
        return {"keys_bnk": outputs["keys_bnk"][:, :blocks]}

    yield Variant(
        label="other end", calls=(inputs | {"tokens_bt": other},), join=lambda rs: before(rs[0]), expect=before
    )


def other_order(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """What is stored, in another order and twice."""
    for label, twice in (("other order", False), ("twice", True)):
        call = dict(inputs)
        for name in ("pages_sk", "states_ik"):
            keys = inputs[name][torch.from_numpy(context.rng.permutation(len(inputs[name])))]
            call[name] = torch.cat([keys, keys]) if twice else keys
        yield Variant(label=label, calls=(call,))


def done_lines(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Without the lines that waited or were refused, everything ends the same."""
    answer_nj = pool_run(**inputs)[0]
    done = answer_nj[:, 0] == 0

    def kept(outputs: Outputs) -> Outputs:
        return outputs | {"answer_nj": outputs["answer_nj"][done]}

    yield Variant(label="done lines", calls=(inputs | {"script_nj": inputs["script_nj"][done]},), expect=kept)


def moved_states(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The states in other places."""
    order = torch.from_numpy(context.rng.permutation(len(inputs["state_sq"])))
    state_sq = torch.empty_like(inputs["state_sq"])
    state_sq[order] = inputs["state_sq"]
    state_b = order[inputs["state_b"].long()].to(inputs["state_b"].dtype)
    yield Variant(label="other places", calls=(inputs | {"state_sq": state_sq, "state_b": state_b},))


def written(inputs: Inputs) -> Tensor:
    """The bytes that a restored window may touch."""
    config, allowed = inputs["config"], torch.zeros_like(inputs["state_sq_"], dtype=torch.bool)
    ring = config.plan.ring
    for state, end in zip(inputs["state_b"].tolist(), inputs["end_b"].tolist(), strict=True):
        for piece in encoder_rings(config.plan):
            for j in range(max(end - ring, 0), end):
                for part in record_bytes(piece, j % ring, fmt=KV_FP8, layout=config.layout):
                    allowed[state, part] = True
    return allowed


def stored_again(inputs: Inputs, outputs: Outputs, partner: object) -> tuple[Outputs, Outputs]:
    """What was restored is stored again with the same bytes."""
    assert callable(partner)
    ring = inputs["config"].plan.ring
    call = {"state_sq": outputs["state_sq_"]} | {name: inputs[name] for name in ("state_b", "end_b", "config")}
    there = (inputs["end_b"].long()[:, None] - ring + torch.arange(ring) >= 0)[:, None, :, None]
    return partner(call), {"stored_blow": torch.where(there, inputs["stored_blow"], 0)}


def opened_again(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A store that is opened again behind every line answers the same."""
    script = inputs["script_nj"]
    again = torch.tensor([[StoreAction.REOPEN, 0, 0]], dtype=torch.int32).expand(len(script), -1)
    both = torch.stack([script, again], 1).flatten(0, 1)
    yield Variant(
        label="opened again",
        calls=(inputs | {"script_nj": both},),
        join=lambda results: {"answer_n": results[0]["answer_n"][::2].clone()},
    )


def without_history(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Answers do not depend on what was served before: requests alone, in another order, twice."""
    count = len(inputs["tokens_bt"])
    groups = [[count - 1], list(reversed(range(count))), [count - 1] * 2]
    for group in groups if not context.full else [*groups, *([b] for b in range(count))]:
        index = torch.tensor(group)

        def answers(outputs: Outputs, index: Tensor = index) -> Outputs:
            return {"out_b": outputs["out_b"][index]}

        call = inputs | {name: inputs[name][index] for name in ("tokens_bt", "length_b")}
        yield Variant(
            label=f"requests {group}", calls=(call,), join=lambda rs: {"out_b": rs[0]["out_b"]}, expect=answers
        )


def plain(case: KeyCase) -> bool:
    """Relations run on the first case of every kind."""
    return case.requests >= 6 and case.block == 4 and case.tokens >= 30 and case.salt == ""


def tiny(case: StateCase) -> bool:
    """States that a definition walks through in time."""
    return case.stack == "tiny" and len(case.ends) > 0


# rows


def _candidate(function: str) -> tuple[Candidate, ...]:
    return (Candidate(name="array", function=function, archs=("cpu",)),)


REPEATS = Relation(name="run_to_run", axis="repeats")

KEYS = Op(
    name="block_keys",
    reference="deeptwin.reference.prefix_cache:block_keys",
    outputs=(Output(name="keys_bnk", rule=Bitwise(), dtype=torch.uint8),),
    cases=cases_keys,
    draw=draw_keys,
    rows={"tokens_bt": 0, "length_b": 0},
    out_rows={"keys_bnk": 0},
    relations=(
        replace(REPEATS, only=plain),
        Relation(name="batch_invariant", axis="requests", only=plain),
        Relation(name="chunk_invariant", axis="requests in chunks", hook=row_chunks, only=plain),
        Relation(name="causality", axis="later tokens", hook=later_tokens, only=plain),
    ),
    candidates=_candidate("deeptwin.optimized.prefix_cache:block_keys_array"),
    peers=(
        Peer(
            name="sha256_written_out",
            function="deeptwin.parity.peers.prefix_cache:keys_of_one_message",
            needs=(),
            explains="each key by its own, from the whole nested message, with SHA-256 written out",
            only=lambda case: case.tokens <= 30,
        ),
    ),
    mutants=(
        _mutant("keys_not_chained", "U34", "a block is named by its own tokens: other prefixes hit"),
        _mutant("keys_without_salt", "U41", "the salt is not in the key"),
        _mutant("keys_without_model", "U41", "the model is not in the key"),
        _mutant("keys_of_joined_names", "U41", "model and salt are joined without their lengths"),
        _mutant("keys_big_endian", "U23", "tokens are hashed with their high byte first"),
        _mutant("keys_of_16_bit_tokens", "U41", "tokens above 65535 are cut to 16 bits"),
        _mutant("keys_of_partial_blocks", "U27", "the last, partial block has a key"),
        _mutant("keys_beyond_the_length", "U58", "blocks behind the end of a request have keys"),
    ),
    controls=(_control("right_keys"),),
    golden=lambda: cases_keys(False)[:4],
)

HITS = Op(
    name="prefix_hits",
    reference="deeptwin.reference.prefix_cache:prefix_hits",
    outputs=(
        Output(name="hit_b", rule=Bitwise(), dtype=torch.int32),
        Output(name="valid_b", rule=Bitwise(), dtype=torch.int32),
    ),
    cases=cases_hits,
    draw=draw_hits,
    rows={"keys_bnk": 0, "length_b": 0},
    out_rows={"hit_b": 0, "valid_b": 0},
    relations=(
        replace(REPEATS, only=plain),
        Relation(name="batch_invariant", axis="requests", hook=None, only=plain),
        Relation(name="page_permutation", axis="stored keys", hook=other_order, only=plain),
    ),
    candidates=_candidate("deeptwin.optimized.prefix_cache:prefix_hits_array"),
    mutants=(
        _mutant("hits_leave_nothing", "U35", "a prompt that is all cached computes no token"),
        _mutant("hits_leave_one_token", "U64", "the hit reaches into the last K tokens"),
        _mutant("hits_over_a_gap", "U34", "blocks behind a missing one count"),
        _mutant("hits_without_a_state", "U35", "windows that were never stored are taken for restored"),
        _mutant("hits_end_at_the_first_state", "U71", "the first boundary with windows is taken, not the last"),
        _mutant("hits_restart_hidden", "U34", "v is 0 although the windows are empty"),
        _mutant("hits_into_a_block", "U27", "a hit ends inside a block"),
    ),
    controls=(_control("right_hits"),),
    golden=lambda: cases_hits(False)[:8],
)

POOL = Op(
    name="pool_run",
    reference="deeptwin.reference.prefix_cache:pool_run",
    outputs=tuple(
        Output(name=name, rule=Bitwise(), dtype=torch.int32) for name in ("answer_nj", "table_bp", "held_p", "free_p")
    ),
    cases=cases_pool,
    draw=draw_pool,
    rows={},
    out_rows={},
    relations=(
        REPEATS,
        Relation(name="masked_equals_absent", axis="lines that were not done", hook=done_lines),
    ),
    candidates=_candidate("deeptwin.optimized.prefix_cache:pool_run_array"),
    mutants=(
        _mutant("pool_last_freed_first", "R7", "free blocks are a stack"),
        _mutant("pool_tables_freed_forwards", "R7", "a table frees its first block first"),
        _mutant("pool_double_free", "U34", "a block that nobody pinned is freed under a table"),
        _mutant("pool_null_block_used", "U74", "block 0 is handed out"),
        _mutant("pool_partial_block_shared", "U34", "a fork shares the last, partial block: both write it"),
        _mutant("pool_cut_within_shared_block", "U34", "a table is cut within a block that its fork reads"),
        _mutant("pool_forks_not_counted", "U34", "a fork does not count its references"),
        _mutant("pool_leaks_when_full", "U28", "a request that has to wait keeps what it found"),
        _mutant("pool_waits_for_ever", "U19", "more blocks than there are is waited for"),
        _mutant("pool_surplus_kept", "U28", "blocks without tokens stay in the table"),
        _mutant("pool_needs_one_spare", "U19", "the last free block is never handed out"),
    ),
    controls=(_control("right_pool"),),
    golden=lambda: cases_pool(False)[:3],
)

PERSIST = Op(
    name="persist_state",
    reference="deeptwin.reference.prefix_cache:persist_state",
    outputs=(Output(name="stored_blow", rule=Bitwise(), dtype=torch.uint8),),
    cases=cases_state,
    draw=draw_state,
    rows={"state_b": 0, "end_b": 0},
    out_rows={"stored_blow": 0},
    relations=(
        replace(REPEATS, only=tiny),
        Relation(name="batch_invariant", axis="requests", only=tiny),
        Relation(name="page_permutation", axis="states", hook=moved_states, only=tiny),
    ),
    candidates=_candidate("deeptwin.optimized.prefix_cache:persist_state_array"),
    mutants=(
        _mutant("persist_in_slot_order", "U36", "windows are stored in the order of their slots"),
        _mutant("persist_stale_before_0", "U74", "positions below 0 are read from the ring"),
        _mutant("persist_state_is_the_sequence", "U34", "the state of a sequence is taken for its number"),
        _mutant("persist_other_layout", "U23", "codes and scales are read in the other arrangement"),
        _mutant("persist_window_only", "U33", "W records are stored: none can be taken back"),
        _mutant("persist_one_ahead", "U36", "every record is read one slot further"),
    ),
    controls=(_control("right_persist"),),
    golden=lambda: [StateCase(ends=(16, 3)), StateCase(ends=(11,), layout="sectioned")],
)

RESTORE = Op(
    name="restore_state",
    reference="deeptwin.reference.prefix_cache:restore_state",
    outputs=(Output(name="state_sq_", rule=Bitwise(), dtype=torch.uint8),),
    cases=cases_state,
    draw=draw_restore,
    rows={},
    out_rows={},
    writes="state_sq_",
    relations=(
        replace(REPEATS, only=tiny),
        Relation(name="changed_slots", axis="bytes of the states", hook=written, only=tiny),
        Relation(
            name="layout_round_trip", axis="store and restore", hook=stored_again, partner="persist_state", only=tiny
        ),
    ),
    candidates=_candidate("deeptwin.optimized.prefix_cache:restore_state_array"),
    mutants=(
        _mutant("restore_in_slot_order", "U36", "stored records go to slot 0 and on"),
        _mutant("restore_before_0", "U79", "positions below 0 are written"),
        _mutant("restore_state_is_the_sequence", "U34", "the state of a sequence is taken for its number"),
        _mutant("restore_other_layout", "U23", "codes and scales are written in the other arrangement"),
        _mutant("restore_window_only", "U33", "W records are restored: none can be taken back"),
        _mutant("restore_clears_the_state", "U28", "the rest of the state is set to zero"),
        _mutant("restore_one_ahead", "U36", "every record is written one slot further"),
    ),
    controls=(_control("right_restore"),),
    golden=lambda: [StateCase(ends=(16,))],
)

STORE = Op(
    name="store_run",
    reference="deeptwin.reference.prefix_cache:store_run",
    outputs=(Output(name="answer_n", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_store,
    draw=draw_store,
    rows={},
    out_rows={},
    relations=(
        replace(REPEATS, only=lambda case: case.regime == "killed"),
        Relation(name="masked_equals_absent", axis="opening again", hook=opened_again),
    ),
    candidates=(Candidate(name="files", function="deeptwin.optimized.prefix_cache:store_run_files", archs=("cpu",)),),
    mutants=(
        _mutant("store_not_checked", "U34", "whatever a file holds is served"),
        _mutant("store_checks_the_first_bytes", "U34", "the checksum covers the head and 8 bytes"),
        _mutant("store_checks_lengths", "U34", "a file of the right length is believed"),
        _mutant("store_believes_names", "U34", "a file is the entry whose name it has"),
        _mutant("store_writes_in_place", "U62", "a put writes over the entry: what dies takes the old one along"),
        _mutant("store_keeps_what_is_there", "U28", "a put of a name that exists is skipped, damage or not"),
        _mutant("store_forgets_when_reopened", "U28", "nothing survives the process"),
        _mutant("store_never_drops", "U34", "a dropped entry is served"),
    ),
    controls=(_control("right_store"),),
    golden=lambda: cases_store(False)[:4],
)

SERVE = Op(
    name="serve_prefixes",
    reference="deeptwin.reference.prefix_cache:serve_prefixes",
    outputs=(
        Output(name="out_b", rule=Bitwise(), dtype=torch.int64),
        Output(name="hit_b", rule=Bitwise(), dtype=torch.int32),
    ),
    cases=cases_serve,
    draw=draw_serve,
    rows={},
    out_rows={},
    relations=(
        replace(REPEATS, only=lambda case: case.block == 2),
        Relation(name="batch_invariant", axis="requests served before", hook=without_history),
    ),
    candidates=_candidate("deeptwin.optimized.prefix_cache:serve_prefixes_cached"),
    mutants=(
        _mutant("server_stale_windows", "U34", "after a hit the windows of the request before are read"),
        _mutant("server_windows_not_restored", "U35", "after a hit the windows begin empty, and nothing says so"),
        _mutant("server_windows_in_other_slots", "U36", "restored windows stand in other slots"),
        _mutant("server_hits_without_windows", "U35", "a hit ends where no windows were stored"),
        _mutant("server_stale_decoder", "U34", "decoder windows of the request before are seen"),
        _mutant("server_hits_up_to_the_end", "U64", "a hit leaves one token: decoder windows begin at it"),
        _mutant("server_pair_lost_at_a_step", "U33", "a pair of tokens that a step cuts is never pooled"),
        _mutant("server_sums_from_the_hit", "U71", "global keys of the cached prefix are not seen"),
        _mutant("server_blocks_by_their_tokens", "U34", "blocks are found by their tokens, whatever the prefix"),
        _mutant("server_entries_shifted", "U29", "blocks keep the entries of one place before"),
        _mutant("server_steps_see_themselves", "U71", "windows begin with the step: hits move them"),
        _mutant("server_third_request_differs", "U72", "from the third request on a window is a key short"),
    ),
    controls=(_control("right_server"),),
    golden=lambda: cases_serve(False)[:3],
)

CARD = Card(
    component="prefix_cache",
    summary="reuse of prompt prefixes: chained block hashes, counted blocks, stored windows, a store on files",
    contract={
        "dtypes": "tokens int32, keys uint8 of 32 bytes, numbers int32 or int64",
        "keys": "SHA-256 chain over model, salt and blocks of tokens: this project's definition",
        "hit": "longest run of stored blocks that leaves `recompute` tokens; SHORTEN: ends where windows are stored",
        "state": "rings of encoder layers are stored by position; decoder rings and compressors are dropped",
        "blocks": "0 is null; free list FIFO; a table frees its last block first; forks copy a partial one",
        "store": "file beside, sync, rename, sync of the folder; a file is believed only whole and under its own key",
    },
    ops=(KEYS, HITS, POOL, PERSIST, RESTORE, STORE, SERVE),
    equivalents=(
        Equivalent(
            name="a stored partial group of a compressor",
            reason="every ratio divides the block: behind a whole block no group is open",
        ),
        Equivalent(
            name="decoder rings stored too",
            reason="a hit leaves K tokens, from which every decoder window is made again: they would never be read",
        ),
    ),
)
