"""How latent attention is checked: two attention cores, the latent store, and whole blocks on drawn and real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import MlaConfig, MscaleRule, RopeConfig, WeightCast, YarnConfig
from deeptwin.reference.mla import mla_project
from deeptwin.reference.rope import rope_frequencies, rope_table, table_magnitude
from deeptwin.reference.weights import Latents, MlaWeights

from .. import draws, texts
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import FEW_HEADS, FULL_REGISTERS, NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase, Expect
from ..card import (
    REGIMES,
    Candidate,
    Card,
    Equivalent,
    Inputs,
    Op,
    Output,
    Outputs,
    Peer,
    Relation,
    Sm90Candidate,
    variants,
)
from ..pairing import every_pair
from ..peers.mla import TINY
from ..relations import (
    CHEAP_ROW_BYTES,
    CallFn,
    Context,
    Pick,
    Variant,
    in_a_crowd,
    join_rows,
    pick_rows,
    row_bytes,
    take,
)
from ..rules import ATTENTION, LSE, MLA_BLOCK, Bitwise, Close

# configurations of whole blocks

V3_YARN = YarnConfig(
    factor=40.0,
    original_length=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    mscale_rule=MscaleRule.HF,
)
# the head widths and ranks of V3 beside a smaller hidden state and fewer heads
V3_HEADS = MlaConfig(
    hidden=1024,
    num_heads=8,
    q_lora_rank=1536,
    kv_lora_rank=512,
    nope_dim=128,
    value_dim=128,
    rope=RopeConfig(rope_dim=64, theta=10000.0, yarn=V3_YARN),
    weight_cast=WeightCast.BEFORE_WEIGHT,
)


def _yarn(config: MlaConfig, **changes: object) -> MlaConfig:
    yarn = replace(config.rope.yarn or V3_YARN, **changes)  # type: ignore[arg-type]
    return replace(config, rope=replace(config.rope, yarn=yarn))


CONFIGS = {
    "tiny": TINY,
    "direct": replace(TINY, q_lora_rank=0),
    "no_yarn": replace(TINY, rope=replace(TINY.rope, yarn=None)),
    "uneven": _yarn(TINY, mscale_all_dim=0.707),
    "release": replace(
        _yarn(TINY, mscale_all_dim=0.707, mscale_rule=MscaleRule.DEMO), weight_cast=WeightCast.AFTER_WEIGHT
    ),
    "v3": V3_HEADS,
    "v3_uneven": _yarn(V3_HEADS, mscale_all_dim=0.707),
}

# cases


@dataclass(frozen=True, kw_only=True)
class PrefillCase:
    """`tokens` queries at the end of `tokens + before` keys."""

    tokens: int
    before: int = 0
    heads: int = 2
    dim: int = 80
    value_dim: int = 64
    dtype: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-before{self.before}-h{self.heads}-d{self.dim}v{self.value_dim}"
        return f"{shape}-{self.dtype}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """Requests with the lengths longest, 0, 1, page − 1, page, page + 1, 2 · page + 1, as many as there are."""

    requests: int
    tokens: int = 1
    heads: int = 5
    dim: int = 80
    value_dim: int = 64
    longest: int = 70
    page: int = 5
    dtype: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"b{self.requests}-t{self.tokens}-h{self.heads}-d{self.dim}v{self.value_dim}"
        return f"{shape}-s{self.longest}-page{self.page}-{self.dtype}-{self.regime}"

    @property
    def lengths(self) -> list[int]:
        edges = [self.longest, 0, 1, self.page - 1, self.page, self.page + 1, 2 * self.page + 1]
        return [min(edges[i % len(edges)], self.longest) for i in range(self.requests)]


@dataclass(frozen=True, kw_only=True)
class StoreCase:
    """`tokens` rows for a cache of `pages` pages; pages lie `gap` elements further apart than they are long."""

    tokens: int
    pages: int = 5
    page: int = 5
    dim: int = 40
    gap: int = 24
    holes: int = 2  # slots of −1
    index: str = "int64"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-p{self.pages}-page{self.page}-d{self.dim}-gap{self.gap}-holes{self.holes}-{self.index}"


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """`tokens` tokens, or a real `text`, after `past` cached ones; the first cached one stands at position `start`."""

    config: str = "tiny"
    tokens: int = 0
    past: int = 0
    start: int = 0
    text: str = ""
    dtype: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        what = self.text or f"t{self.tokens}"
        return f"{self.config}-{what}-past{self.past}-at{self.start}-{self.dtype}-{self.regime}"

    @property
    def needs(self) -> tuple[str, ...]:
        return texts.NEEDS if self.text else ()


C = TypeVar("C", PrefillCase, DecodeCase, StoreCase, BlockCase)


def _with(case: C, **changes: object) -> C:
    return replace(case, **changes)  # type: ignore[arg-type]


# inputs


def _query_scale(regime: str) -> float:
    return {"peaked": 4.0, "flat": 0.1, "huge": 30.0, "tiny": 2.0**-60, "zeros": 0.0}.get(regime, 1.0)


def _values(rng: np.random.Generator, regime: str, *shape: int, dtype: torch.dtype) -> Tensor:
    x = draws.normal(rng, *shape, dtype=dtype, mean=1.0 if regime == "mean1" else 0.0)
    if regime == "ties" and x.shape[0]:
        x[:] = x[:1].clone()
    return x * 2.0**-60 if regime == "tiny" else x


def draw_prefill(case: PrefillCase, rng: np.random.Generator) -> Inputs:
    """Queries and keys as views of wider rows whose rest is NaN."""
    dtype, keys = draws.DTYPES[case.dtype], case.tokens + case.before
    q = draws.normal(rng, case.tokens, case.heads, case.dim, dtype=dtype, scale=_query_scale(case.regime))
    return {
        "q_thd": draws.strided(q, pad=8),
        "k_shd": draws.strided(_values(rng, case.regime, keys, case.heads, case.dim, dtype=dtype), pad=8),
        "v_shu": draws.strided(_values(rng, case.regime, keys, case.heads, case.value_dim, dtype=dtype), pad=8),
        "scale": case.dim**-0.5,
        "dtype": dtype,
    }


def draw_decode(case: DecodeCase, rng: np.random.Generator) -> Inputs:
    """Scattered pages with NaN in every unused slot and between pages; junk in the table beyond each length."""
    dtype, page = draws.DTYPES[case.dtype], case.page
    q = draws.normal(
        rng, case.requests, case.tokens, case.heads, case.dim, dtype=dtype, scale=_query_scale(case.regime)
    )
    used = [-(-n // page) for n in case.lengths]
    order = rng.permutation(sum(used) + 2)  # the last two are owned by nobody
    cache = _roomy(len(order), page, case.dim, gap=64, dtype=dtype)
    draws.poison_(cache)
    junk = [*draws.BAD_INDICES, 10**6, int(order[-1]), int(order[-2])]
    table = rng.choice(junk, (case.requests, max(used, default=0) + 2))
    taken = 0
    for b, n in enumerate(case.lengths):
        mine = order[taken : taken + used[b]]
        taken += used[b]
        table[b, : used[b]] = mine
        rows = _values(rng, case.regime, n, case.dim, dtype=dtype)
        where = torch.arange(n)
        cache[torch.from_numpy(mine)[where // page], where % page] = rows
    return {
        "q_bthd": draws.strided(q, pad=8),
        "cache_pod": cache,
        "block_table_bp": torch.from_numpy(table.astype(np.int32)),
        "lengths_b": torch.tensor(case.lengths, dtype=torch.int32),
        "scale": case.dim**-0.5,
        "value_dim": case.value_dim,
        "dtype": dtype,
    }


def _roomy(pages: int, page: int, dim: int, *, gap: int, dtype: torch.dtype) -> Tensor:
    whole = torch.zeros(pages, page * dim + gap, dtype=dtype)
    return whole[:, : page * dim].unflatten(1, (page, dim))


def draw_store(case: StoreCase, rng: np.random.Generator) -> Inputs:
    """A cache of random bytes, slots in random order, some of them −1."""
    cache = _roomy(case.pages, case.page, case.dim, gap=case.gap, dtype=torch.bfloat16)
    canary = rng.integers(0, 2**16, tuple(cache.shape), dtype=np.uint16)
    cache.view(torch.int16).copy_(torch.from_numpy(canary.view(np.int16)))
    slots = draws.distinct(rng, case.pages * case.page, case.tokens).astype(np.int64)
    slots[rng.permutation(slots.size)[: case.holes]] = -1
    latent = draws.normal(rng, case.tokens, case.dim, dtype=torch.bfloat16)
    return {
        "cache_pod_": cache,
        "latent_td": draws.strided(latent, pad=8),
        "slots_t": torch.from_numpy(slots).to(getattr(torch, case.index)),
    }


def draw_block(case: BlockCase, rng: np.random.Generator) -> Inputs:
    """Weights under their checkpoint names, hidden states, what is cached, and the table of angles."""
    config, dtype = CONFIGS[case.config], draws.DTYPES[case.dtype]
    weights = MlaWeights.from_state_dict(_state(config, rng, case.regime, dtype), prefix="", config=config)
    if case.text:
        x = texts.hidden_states(case.text, config.hidden, dtype)
    else:
        regime = case.regime if case.regime == "mean1" else "normal"
        x = draws.rows(rng, case.tokens, config.hidden, dtype=dtype, regime=regime)
    first, end = case.start + case.past, case.start + case.past + len(x)
    past = None
    if case.past:
        rows = draws.normal(rng, case.past, config.latent_dim, dtype=dtype)
        past = Latents(rows_sd=rows, positions_s=torch.arange(case.start, first))
    magnitude = table_magnitude(config.rope.yarn)
    return {
        "x_tm": draws.strided(x, pad=8),
        "weights": weights,
        "positions_t": torch.arange(first, end),
        "table_sr": rope_table(torch.arange(end + 1), rope_frequencies(config.rope), magnitude=magnitude),
        "config": config,
        "past": past,
        "dtype": dtype,
    }


def _state(config: MlaConfig, rng: np.random.Generator, regime: str, dtype: torch.dtype) -> dict[str, Tensor]:
    heads, a, c, m = config.num_heads, config.q_lora_rank, config.kv_lora_rank, config.hidden
    shapes = {
        "kv_a_proj_with_mqa": (config.latent_dim, m),
        "kv_b_proj": (heads * (config.nope_dim + config.value_dim), c),
        "o_proj": (m, heads * config.value_dim),
        "q_b_proj" if a else "q_proj": (heads * config.head_dim, a or m),
    } | ({"q_a_proj": (a, m)} if a else {})
    state = {}
    for name, (rows, columns) in shapes.items():
        scale = columns**-0.5 * (_query_scale(regime) if name in ("q_b_proj", "q_proj") else 1.0)
        state[f"{name}.weight"] = draws.normal(rng, rows, columns, dtype=dtype, scale=scale)
    for name, width in {"kv_a_layernorm": c, **({"q_a_layernorm": a} if a else {})}.items():
        state[f"{name}.weight"] = draws.normal(rng, width, dtype=dtype, scale=0.1, mean=1.0)
    return state


# which cases


def cases_prefill(full: bool) -> list[PrefillCase]:
    """Regimes, the edges of the key block (64), chunks after a prefix, head counts, one production width."""
    base = PrefillCase(tokens=37)
    found = [_with(base, regime=r) for r in (*REGIMES, "zeros", "ties", "tiny", "huge")]
    found += [
        _with(base, tokens=0),
        _with(base, tokens=0, before=3),
        _with(base, tokens=1, heads=1),
        _with(base, tokens=63, heads=1),
        _with(base, tokens=64, heads=1),
        _with(base, tokens=65, heads=1),
        _with(base, tokens=130, heads=1),
        _with(base, tokens=3, before=400, heads=1),
        *(_with(base, tokens=17, before=120, regime=r) for r in REGIMES),
        _with(base, tokens=2, before=61, heads=5),
        _with(base, tokens=2, before=9, heads=16, dim=48, value_dim=16, regime="mean1"),
        _with(base, dtype="fp32"),
        _with(base, tokens=9, before=70, dtype="fp32", regime="peaked"),
        PrefillCase(tokens=2, before=63, heads=4, dim=192, value_dim=128),
    ]
    if full:
        found += [
            _with(base, tokens=t, before=s, heads=5, regime=r)
            for t, s, r in every_pair((1, 2, 7, 128, 129), (0, 1, 63, 64, 65), REGIMES)
        ]
        found += [PrefillCase(tokens=2, before=126, heads=128, dim=192, value_dim=128, regime=r) for r in REGIMES]
    return list({case.id: case for case in found}.values())


def cases_decode(full: bool) -> list[DecodeCase]:
    """Regimes and page sizes with every edge length in one batch, verify widths, head counts, production rows."""
    base = DecodeCase(requests=7)
    found = [_with(base, regime=r) for r in REGIMES]
    found += [_with(base, requests=4, regime=r) for r in ("zeros", "ties", "tiny", "huge")]
    found += [
        _with(base, page=1, tokens=2, heads=1, longest=35),
        _with(base, page=64, tokens=3, heads=1),
        _with(base, requests=3, tokens=3, regime="peaked"),
        _with(base, requests=3, page=53, heads=16),
        _with(base, requests=1, page=64, heads=17),
        _with(base, requests=0),
        _with(base, requests=2, longest=0),
        _with(base, requests=1, longest=1),
        _with(base, requests=2, page=16, longest=1100),
        _with(base, dtype="fp32", requests=4, page=7),
        _with(base, dtype="fp32", requests=3, regime="peaked"),
        DecodeCase(requests=1, tokens=1, heads=128, dim=576, value_dim=512, longest=130, page=64),
        DecodeCase(requests=1, tokens=2, heads=16, dim=576, value_dim=512, longest=200, page=64),
    ]
    if full:
        found += [
            _with(base, page=p, tokens=t, regime=r) for p, t, r in every_pair((1, 2, 61, 64, 128), (1, 2, 3), REGIMES)
        ]
        found += [
            DecodeCase(requests=3, tokens=2, heads=128, dim=576, value_dim=512, longest=2100, page=64, regime=r)
            for r in REGIMES
        ]
        found += [
            DecodeCase(requests=2, tokens=2, heads=64, dim=576, value_dim=512, longest=n, page=64) for n in (200, 4200)
        ]
    return list({case.id: case for case in found}.values())


def cases_store(full: bool) -> list[StoreCase]:
    """Page sizes, gaps, holes, index types, a full cache, one production row width."""
    base = StoreCase(tokens=9)
    found = [
        base,
        _with(base, page=1, pages=20),
        _with(base, page=64, pages=3, tokens=30),
        _with(base, gap=0, index="int32"),
        _with(base, tokens=25, holes=0),
        _with(base, tokens=9, holes=9),
        _with(base, tokens=0, holes=0),
        _with(base, tokens=1, holes=0, pages=1, page=1),
        StoreCase(tokens=3, pages=3, page=64, dim=576, holes=1),
    ]
    if full:
        found += [_with(base, page=p, gap=g, index=i) for p, g, i in product((2, 53, 61), (0, 8), ("int32", "int64"))]
    return list({case.id: case for case in found}.values())


def cases_block(full: bool) -> list[BlockCase]:
    """Every configuration, chunks after a past, positions beyond the original length, four texts in two dtypes."""
    base = BlockCase(tokens=33)
    found = [_with(base, regime=r) for r in REGIMES]
    found += [_with(base, config=name) for name in ("direct", "no_yarn", "uneven", "release")]
    found += [
        _with(base, tokens=0),
        _with(base, tokens=1),
        _with(base, tokens=2, past=1),
        _with(base, tokens=3, past=70, start=500),
        _with(base, tokens=3, past=70, dtype="fp32", config="uneven"),
        _with(base, dtype="fp32", regime="peaked", start=40),
        _with(base, dtype="fp32", config="direct"),
        _with(base, dtype="fp32", config="no_yarn"),
    ]
    found += [BlockCase(text=name, dtype=dtype) for name, dtype in product(texts.TEXTS, ("bf16", "fp32"))]
    found += [
        BlockCase(config="uneven", text="mixed", dtype="fp32", regime="peaked"),
        BlockCase(config="v3", text="english", start=5000),
        BlockCase(config="v3", text="chinese", dtype="fp32"),
        BlockCase(config="v3", text="code", regime="peaked"),
        BlockCase(config="v3_uneven", text="mixed", dtype="fp32"),
    ]
    if full:
        found += [
            BlockCase(config=config, text=name, dtype=dtype, regime=regime)
            for config, name, dtype, regime in every_pair(
                ("v3", "v3_uneven"), tuple(texts.TEXTS), ("bf16", "fp32"), ("normal", "peaked")
            )
        ]
        found += [_with(base, config=name, regime=r) for name, r in product(CONFIGS, REGIMES)]
    return list({case.id: case for case in found}.values())


# relation hooks


def _then(pick: Pick) -> Callable[[list[Outputs]], Outputs]:
    """Joins by picking a part of the only result."""
    return lambda results: pick(results[0])


def prefill_chunks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The queries in chunks, each with the keys up to its own end."""
    t, s = inputs["q_thd"].shape[0], inputs["k_shd"].shape[0]
    sizes = {1, 7, 16, (t + 1) // 2, t - 1} if context.full else {(t + 1) // 2, t - 1}
    for size in sorted({min(max(n, 1), max(t, 1)) for n in sizes}):
        parts = []
        for start in range(0, max(t, 1), size):
            end = min(start + size, t)
            cut = {name: inputs[name][: s - t + end] for name in ("k_shd", "v_shu")}
            parts.append(inputs | cut | {"q_thd": inputs["q_thd"][start:end]})
        yield Variant(label=f"chunks of {size}", calls=tuple(parts), join=lambda rs: join_rows(context.op, rs))


def prefill_future(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Keys and values after a query replaced by finite garbage: a masked weight is 0, and 0 times NaN would be NaN."""
    t, s = inputs["q_thd"].shape[0], inputs["k_shd"].shape[0]
    for kept in sorted({t // 2, t - 1} & set(range(1, t))):
        later = {name: inputs[name].clone() for name in ("k_shd", "v_shu")}
        for value in later.values():
            value[s - t + kept :] = 300.0
        expect = pick_rows(context.op, list(range(kept)))
        yield Variant(
            label=f"garbage after query {kept - 1}",
            calls=(inputs | later,),
            join=_then(expect),
            expect=expect,
        )
    if t < 2:
        yield Variant(label="one query: a repeat", calls=(inputs,))


def verify_as_steps(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Each of the t queries of a request alone, at the length it has when it is the last one."""
    t = inputs["q_bthd"].shape[1]
    steps = []
    for i in range(t):
        lengths = (inputs["lengths_b"] - (t - 1 - i)).clamp_min(0)
        steps.append(inputs | {"q_bthd": inputs["q_bthd"][:, i : i + 1], "lengths_b": lengths})

    def joined(results: list[Outputs]) -> Outputs:
        return {name: torch.cat([r[name] for r in results], 1) for name in results[0]}

    yield Variant(label="single steps", calls=tuple(steps), join=joined)


def move_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same rows on other pages, then on pages of other sizes."""
    cache, table = inputs["cache_pod"], inputs["block_table_bp"].to(torch.int64)
    pages, page = cache.shape[:2]
    for attempt in range(4 if context.full else 2):
        order = torch.from_numpy(context.rng.permutation(pages))
        moved = torch.empty_like(order)
        moved[order] = torch.arange(pages)
        inside = (table >= 0) & (table < pages)
        renumbered = torch.where(inside, moved[torch.where(inside, table, 0)], table)
        changed = {"cache_pod": cache[order].contiguous(), "block_table_bp": renumbered.to(torch.int32)}
        yield Variant(label=f"page order {attempt}", calls=(inputs | changed,))
    for size in {1, 3, 64} - {page} if context.full else {3} - {page}:
        yield Variant(label=f"pages of {size}", calls=(_repaged(inputs, size),))


def _repaged(inputs: Inputs, size: int) -> Inputs:
    lengths = inputs["lengths_b"].tolist()
    used = [-(-n // size) for n in lengths]
    cache = draws.poisoned(sum(used) + 1, size, inputs["cache_pod"].shape[2], dtype=inputs["cache_pod"].dtype)
    table = torch.full((len(lengths), max(used, default=0)), -1, dtype=torch.int32)
    taken = 0
    for b, rows in enumerate(_gathered(inputs)):
        table[b, : used[b]] = torch.arange(taken, taken + used[b])
        cache[taken : taken + used[b]].flatten(0, 1)[: len(rows)] = rows
        taken += used[b]
    return inputs | {"cache_pod": cache, "block_table_bp": table}


def _gathered(inputs: Inputs) -> list[Tensor]:
    """The rows of every request, in order of position."""
    page = inputs["cache_pod"].shape[1]
    tables, lengths = inputs["block_table_bp"], inputs["lengths_b"].tolist()
    return [
        inputs["cache_pod"][table[: -(-n // page)].to(torch.int64)].flatten(0, 1)[:n]
        for table, n in zip(tables, lengths, strict=True)
    ]


def table_width(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Table columns beyond the lengths, enough for another split of the keys, or cut away with the other requests.

    For `--full` and rows of production width also enough for splits that fill a chip, which another kernel may take.
    """
    table, page = inputs["block_table_bp"], inputs["cache_pod"].shape[1]
    crowded = context.full and row_bytes(inputs, context.op) > CHEAP_ROW_BYTES
    for keys in (4096, 65536) if crowded else (4096,):
        junk = torch.full((len(table), keys // page + 1), -1, dtype=torch.int32)
        yield Variant(label=f"{keys} more", calls=(inputs | {"block_table_bp": torch.cat([table, junk], 1)},))
    for row in range(min(2, len(table))):
        alone = take(inputs, context.op, [row])
        used = -(-int(alone["lengths_b"]) // page)
        narrow = alone | {"block_table_bp": alone["block_table_bp"][:, :used].contiguous()}
        yield Variant(label=f"request {row} alone", calls=(narrow,), expect=pick_rows(context.op, [row]))


def decode_future(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Slots that no query sees turn from NaN to infinity and zero; the newest row turns to finite garbage."""
    cache, t = inputs["cache_pod"], inputs["q_bthd"].shape[1]
    page = cache.shape[1]
    owned = torch.zeros(cache.shape[:2], dtype=torch.bool)
    newest = []
    for table, n in zip(inputs["block_table_bp"].to(torch.int64), inputs["lengths_b"].tolist(), strict=True):
        place = torch.arange(n)
        owned[table[place // page], place % page] = True
        newest += [(int(table[(n - 1) // page]), (n - 1) % page)] if n else []
    for value in (torch.inf, 0.0):
        other = cache.clone()
        other[~owned] = value
        yield Variant(label=f"unused slots {value}", calls=(inputs | {"cache_pod": other},))
    if t > 1 and newest:
        other = cache.clone()
        for where in newest:
            other[where] = 300.0
        yield Variant(
            label="garbage in the newest row",
            calls=(inputs | {"cache_pod": other},),
            join=_then(_earlier_queries),
            expect=_earlier_queries,
        )


def _earlier_queries(outputs: Outputs) -> Outputs:
    return {name: x[:, :-1] for name, x in outputs.items()}


def decode_as_prefill(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Every request through the prefill operation, with its rows as keys of each head."""
    (_, t, h, _), u = inputs["q_bthd"].shape, inputs["value_dim"]
    calls, missing = [], []
    for q, rows in zip(inputs["q_bthd"], _gathered(inputs), strict=True):
        count = min(t, len(rows))  # queries before the first key are not asked
        keys = rows[:, None].expand(-1, h, -1).contiguous()
        calls.append(
            {"q_thd": q[t - count :], "k_shd": keys, "v_shu": keys[..., :u].contiguous()}
            | {name: inputs[name] for name in ("scale", "dtype")}
        )
        missing.append(t - count)

    def joined(results: list[Outputs]) -> Outputs:
        out = [
            torch.cat([r["out_thu"].new_zeros(n, h, u), r["out_thu"]]) for n, r in zip(missing, results, strict=True)
        ]
        lse = [
            torch.cat([r["lse_th"].new_full((n, h), -torch.inf), r["lse_th"]])
            for n, r in zip(missing, results, strict=True)
        ]
        return {"out_bthu": torch.stack(out), "lse_bth": torch.stack(lse)}

    if calls:
        yield Variant(label="prefill", calls=tuple(calls), join=joined)


def named_slots(inputs: Inputs) -> Tensor:
    """The elements of the cache that the slots name."""
    cache, slots = inputs["cache_pod_"], inputs["slots_t"].to(torch.int64)
    allowed = torch.zeros(cache.shape, dtype=torch.bool)
    slots = slots[slots >= 0]
    allowed[slots // cache.shape[1], slots % cache.shape[1]] = True
    return allowed


def read_back(inputs: Inputs, outputs: Outputs, decode: CallFn | None) -> tuple[Outputs, Outputs]:
    """What decode returns for a request whose only key is the stored row: its value channels, then its last ones."""
    cache, slots = outputs["cache_pod_"], inputs["slots_t"].to(torch.int64)
    stored = (slots >= 0).nonzero()[:4, 0]
    width = 1 << (cache.shape[2].bit_length() - 1)
    parts: dict[str, list[Tensor]] = {"first": [], "last": []}
    for token in stored.tolist() if decode is not None else []:
        page, offset = divmod(int(slots[token]), cache.shape[1])
        one_slot = cache[page, offset][None, None]  # a page of one slot
        for name, view in (("first", one_slot[..., :width]), ("last", one_slot[..., -width:])):
            arguments = {
                "q_bthd": torch.zeros(1, 1, 1, width, dtype=cache.dtype),
                "cache_pod": view.clone(),
                "block_table_bp": torch.zeros(1, 1, dtype=torch.int32),
                "lengths_b": torch.ones(1, dtype=torch.int32),
                "scale": 1.0,
                "value_dim": width,
                "dtype": cache.dtype,
            }
            assert decode is not None
            parts[name].append(decode(arguments)["out_bthu"].reshape(1, width))
    empty = cache.new_zeros(0, width)
    rows = inputs["latent_td"][stored].contiguous()
    got = {name: torch.cat([empty, *found]) for name, found in parts.items()}
    return got, {"first": rows[:, :width].contiguous(), "last": rows[:, -width:].contiguous()}


def block_chunks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The tokens in chunks; each finds the rows of the earlier ones in its past, as the reference stores them."""
    t = len(inputs["x_tm"])
    for size in sorted({1, 7, 16, t - 1} & set(range(1, t)) if context.full else {5, t - 1} & set(range(1, t))):
        yield _chunked(inputs, [min(size, t - i) for i in range(0, t, size)], f"chunks of {size}", context)
    if t < 2:
        yield Variant(label="one token: a repeat", calls=(inputs,))


def absorbed_steps(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The other form, the last tokens one by one from the rows that a cache would hold."""
    t = len(inputs["x_tm"])
    steps = min(4, t - 1)
    yield _chunked(inputs, [t - steps, *[1] * steps], f"the last {steps} tokens one by one", context)


def _chunked(inputs: Inputs, sizes: list[int], label: str, context: Context) -> Variant:
    arguments = {name: inputs[name] for name in ("weights", "table_sr", "config", "dtype")}
    past, calls = inputs["past"], []
    for x, positions in zip(inputs["x_tm"].split(sizes), inputs["positions_t"].split(sizes), strict=True):
        calls.append(arguments | {"x_tm": x, "positions_t": positions, "past": past})
        rows = mla_project(
            x, inputs["weights"], positions, inputs["table_sr"], config=inputs["config"], dtype=inputs["dtype"]
        )[1]
        rows = replace(rows, rows_sd=rows.rows_sd.to(inputs["dtype"]))
        past = rows if past is None else past.then(rows)
    return Variant(label=label, calls=tuple(calls), join=lambda rs: join_rows(context.op, rs))


def later_tokens(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The tokens after a query replaced by finite garbage."""
    t = len(inputs["x_tm"])
    for kept in sorted({1, t // 2, t - 1} & set(range(1, t))):
        x = inputs["x_tm"].clone()
        x[kept:] = 30.0 * x[kept:].flip(-1)
        expect = pick_rows(context.op, list(range(kept)))
        yield Variant(
            label=f"garbage after token {kept - 1}",
            calls=(inputs | {"x_tm": x},),
            join=_then(expect),
            expect=expect,
        )
    if t < 2:
        yield Variant(label="one token: a repeat", calls=(inputs,))


# golden vectors


def golden_prefill() -> list[PrefillCase]:
    """Whole and as a later chunk."""
    small = PrefillCase(tokens=6, heads=2)
    return [small, _with(small, tokens=2, before=7, regime="peaked")]


def golden_decode() -> list[DecodeCase]:
    """Every edge length, and a verify width."""
    small = DecodeCase(requests=7, heads=2, longest=13)
    return [small, _with(small, requests=3, tokens=2, page=3)]


def golden_store() -> list[StoreCase]:
    """Holes and a gap between pages."""
    return [StoreCase(tokens=5, pages=2, dim=24)]


def golden_block() -> list[BlockCase]:
    """Both cast orders, unequal magnitudes, a past."""
    small = BlockCase(tokens=6)
    return [small, _with(small, config="uneven", past=5, start=30), _with(small, config="release", regime="peaked")]


# rows

# twice the worst of 50 seeds (5 at V3 head widths) on 30 cases, four regimes, text, a past, positions to 5065, in one
# pass and by steps: fp32 1.9e-6 (V3 widths; 1.0e-6 on the tiny ones; CONTRACT itself 2.8e-7), bf16 0.0245 (peaked;
# 0.012 elsewhere; CONTRACT itself 0.0128 and 0.0079)
TRANSFORMERS = {"fp32": Close(rtol=4e-6), "bf16": Close(rtol=0.05)}
EXPLAINS = {
    "fp32": "fp32 library products and cosines, 4 of 32 V3 frequencies another last bit: 1.9e-6 from SEMANTIC at worst",
    "bf16": "rounds scores, normalised weights, cosines, sines and each product of a rotation to bf16: 0.0245 from "
    "SEMANTIC at worst, where this reference is 0.0128 away (v3-v32-v4.md 3.3: 0.009 to 0.022 with bf16 scores)",
}


_core, _core_control = variants("mla")
_block, _block_control = variants("mla_block")


def plain(case: PrefillCase | DecodeCase) -> bool:
    """Relations between bits do not depend on the regime; under `--full` most cases are plain."""
    return case.regime == "normal" and case.dtype == "bf16" and case.dim <= 80


def specialised(case: DecodeCase) -> bool:
    """Relations of the kernels for SM90, on one case under `--full`."""
    return (case.requests, case.heads, case.dim) == (2, 64, 576)


def several_queries(case: PrefillCase | DecodeCase) -> bool:
    """Chunks and verify widths."""
    return plain(case) and case.tokens > 1


def one_split(case: DecodeCase) -> bool:
    """Short enough for relations with many calls."""
    return plain(case) and case.longest <= 128


def few_keys(case: DecodeCase) -> bool:
    """Under `--full` the relation calls with batches of 513 requests."""
    return plain(case) and case.tokens * case.longest <= 70 and case.page < 64


def few_heads(case: DecodeCase) -> bool:
    """The prefill kernel has one program for each head."""
    return one_split(case) and case.requests > 0 and case.heads <= 5


def small_block(case: BlockCase) -> bool:
    """Relations between blocks are checked on the small configurations."""
    return not case.config.startswith("v3")


def several_tokens(case: BlockCase) -> bool:
    """Blocks that can be cut."""
    return small_block(case) and (case.text != "" or case.tokens > 1)


def transformers_takes(dtype: str) -> Callable[[BlockCase], bool]:
    """What DeepseekV3Attention can be configured to do, in one dtype."""

    def takes(case: BlockCase) -> bool:
        config = CONFIGS[case.config]
        rule = None if config.rope.yarn is None else config.rope.yarn.mscale_rule
        fits = config.weight_cast is WeightCast.BEFORE_WEIGHT and rule is not MscaleRule.DEMO
        return fits and case.dtype == dtype and (case.text != "" or case.tokens > 0)

    return takes


def _peers() -> tuple[Peer, ...]:
    return tuple(
        Peer(
            name=f"transformers-{path}-{dtype}",
            function=function,
            needs=("transformers",),
            explains=EXPLAINS[dtype],
            rules={"y_tm": TRANSFORMERS[dtype]},
            only=transformers_takes(dtype),
        )
        for path, function in (
            ("prefill", "deeptwin.parity.peers.mla:transformers_prefill"),
            ("steps", "deeptwin.parity.peers.mla:transformers_steps"),
        )
        for dtype in ("fp32", "bf16")
    )


ATTENTION_OUTPUTS = (Output(name="out_thu", rule=ATTENTION), Output(name="lse_th", rule=LSE, dtype=torch.float32))
DECODE_OUTPUTS = (Output(name="out_bthu", rule=ATTENTION), Output(name="lse_bth", rule=LSE, dtype=torch.float32))
BLOCK_OUTPUTS = (Output(name="y_tm", rule=MLA_BLOCK),)
BLOCK_ROWS = {"x_tm": 0, "positions_t": 0}

PREFILL = Op(
    name="mla_prefill",
    reference="deeptwin.reference.mla:mla_prefill",
    outputs=ATTENTION_OUTPUTS,
    cases=cases_prefill,
    draw=draw_prefill,
    rows={"q_thd": 0},  # a shorter chunk is another call, not a part of the same
    out_rows={"out_thu": 0, "lse_th": 0},
    relations=(
        Relation(name="run_to_run", axis="repeats", only=plain),
        Relation(name="chunk_invariant", axis="query chunks", hook=prefill_chunks, only=several_queries),
        Relation(name="causality", axis="later keys", hook=prefill_future, only=several_queries),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.mla:mla_prefill_triton"),),
    builds=(
        BuildCase(
            name="h128",
            kernel="deeptwin.kernels.triton_ops.mla_prefill:_prefill",
            launch="deeptwin.parity.builds.launches.mla:prefill_h128",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="h128-fp32",
            kernel="deeptwin.kernels.triton_ops.mla_prefill:_prefill",
            launch="deeptwin.parity.builds.launches.mla:prefill_h128_fp32",
            expect=NO_PRODUCT | MATRIX,
        ),
    ),
    mutants=(
        _core("last_chunk_lost", "U01", "the newest chunk is lost in the merge"),
        _core("chunks_merged_equally", "U01", "chunks are merged with equal masses"),
        _core("chunks_merged_in_base_2", "U02", "a base-2 LSE goes into a natural-log merge of chunks"),
        _core("lse_base_2", "U02", "LSE in base 2 where natural is declared"),
        _core("future_by_one", "U25", "a query sees one key too many"),
        _core("own_key_hidden", "U25", "a query does not see its own key"),
        _core("mask_top_left", "U01", "the mask of a later chunk starts at the first key"),
        _core("first_key_head_for_all", "U09", "every head reads the keys of the first"),
        _core("scale_off_by_half_percent", "U05", "softmax scale off by 0.5 %"),
        _core("weights_truncated", "U87", "softmax weights truncated to bf16"),
        _core("scores_bf16", "U09", "scores rounded to bf16"),
        _core("accumulator_bf16", "U09", "the accumulator is kept in bf16"),
        _core("first_product_alone", "U82", "of two products into one accumulator the second is lost"),
        _core("second_product_alone", "U82", "of two products into one accumulator the first is lost"),
        _core("output_truncated", "R1", "the output is truncated to bf16"),
    ),
    controls=(
        _core_control("right_prefill"),
        _core_control("right_prefill_backwards"),
        _core_control("right_prefill_merged"),
    ),
    golden=golden_prefill,
)


def outside_specialised(case: DecodeCase) -> str | None:
    """Why the kernel with specialised warps does not take a case."""
    fits = (case.dim, case.value_dim, case.page, case.dtype) == (576, 512, 64, "bf16") and case.heads % 64 == 0
    return None if fits else "64·n heads over pages of 64 slots of 576 channels in bf16 only"


def outside_flash_mla(case: DecodeCase) -> str | None:
    """Why FlashMLA's legacy dense decode does not take a case."""
    fits = (case.dim, case.value_dim, case.page, case.dtype) == (576, 512, 64, "bf16")
    return None if fits and case.requests else "pages of 64 slots of 576 channels in bf16 only"


DECODE = Op(
    name="mla_decode",
    reference="deeptwin.reference.mla:mla_decode",
    outputs=DECODE_OUTPUTS,
    cases=cases_decode,
    draw=draw_decode,
    rows={"q_bthd": 0, "block_table_bp": 0, "lengths_b": 0},
    out_rows={"out_bthu": 0, "lse_bth": 0},
    relations=(
        Relation(
            name="batch_invariant",
            axis="requests",
            hook=in_a_crowd,
            only=lambda case: few_keys(case) or specialised(case),
        ),
        Relation(name="run_to_run", axis="repeats", only=lambda case: plain(case) or specialised(case)),
        Relation(name="page_permutation", axis="pages and their size", hook=move_pages, only=one_split),
        Relation(
            name="masked_equals_absent",
            axis="table columns",
            hook=table_width,
            only=lambda case: plain(case) or specialised(case),
        ),
        Relation(
            name="chunk_invariant",
            axis="verify width",
            hook=verify_as_steps,
            only=lambda case: several_queries(case) or specialised(case),
        ),
        Relation(
            name="causality",
            axis="unused and later slots",
            hook=decode_future,
            only=lambda case: one_split(case) or specialised(case),
        ),
        Relation(
            name="decode_equals_prefill",
            axis="path",
            promise="within contract",  # the keys are summed in other blocks
            hook=decode_as_prefill,
            partner="mla_prefill",
            only=few_heads,
        ),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.mla:mla_decode_triton"),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.mla:mla_decode_tilelang",
            needs=("tilelang",),
            declines=outside_specialised,
        ),
        Sm90Candidate(
            name="flash-mla",
            function="deeptwin.optimized.mla:mla_decode_flash_mla",
            needs=("flash_mla",),
            declines=outside_flash_mla,
            unpromised=dict.fromkeys(("batch_invariant", "chunk_invariant"), "its schedule splits keys by the batch"),
        ),
        Sm90Candidate(
            name="flash-mla-unsplit",
            function="deeptwin.optimized.mla:mla_decode_flash_mla_unsplit",
            needs=("flash_mla",),
            declines=outside_flash_mla,
        ),
    ),
    builds=(
        BuildCase(
            name="h128",
            kernel="deeptwin.kernels.triton_ops.mla:_decode_split",
            launch="deeptwin.parity.builds.launches.mla:decode_h128",
            expect=FULL_REGISTERS | MATRIX,
        ),
        BuildCase(
            name="h128-combine",
            kernel="deeptwin.kernels.triton_ops.split_softmax:_combine_splits",
            launch="deeptwin.parity.builds.launches.mla:decode_h128",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="tilelang-specialised-h128",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.mla_sm90:decode_program",
            launch="deeptwin.parity.builds.launches.mla_tilelang:sm90_h128",
            expect={"sm90": Expect(mma="wgmma")},
        ),
        BuildCase(
            name="tilelang-specialised-combine",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.mla_sm90:combine_program",
            launch="deeptwin.parity.builds.launches.mla_tilelang:sm90_h128_combine",
            expect={"sm90": NO_PRODUCT["sm90"]},
        ),
        BuildCase(
            name="tilelang-few-scores",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.mla_few_sm90:score_program",
            launch="deeptwin.parity.builds.launches.mla_tilelang:sm90_h128_scores",
            expect={"sm90": Expect(mma="wgmma")},
        ),
        BuildCase(
            name="tilelang-few-weights",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.mla_few_sm90:weight_program",
            launch="deeptwin.parity.builds.launches.mla_tilelang:sm90_h128_weights",
            expect={"sm90": NO_PRODUCT["sm90"]},
        ),
        BuildCase(
            name="tilelang-few-values",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.mla_few_sm90:value_program",
            launch="deeptwin.parity.builds.launches.mla_tilelang:sm90_h128_values",
            expect={"sm90": Expect(mma="wgmma")},
        ),
        BuildCase(
            name="h128-one-split",
            kernel="deeptwin.kernels.triton_ops.mla:_decode_split",
            launch="deeptwin.parity.builds.launches.mla:decode_h128_one_split",
            expect=FULL_REGISTERS | MATRIX,
        ),
        BuildCase(
            name="h128-verify",
            kernel="deeptwin.kernels.triton_ops.mla:_decode_split",
            launch="deeptwin.parity.builds.launches.mla:verify_h128",
            expect=FULL_REGISTERS | MATRIX,
        ),
        BuildCase(
            name="h16",
            kernel="deeptwin.kernels.triton_ops.mla:_decode_split",
            launch="deeptwin.parity.builds.launches.mla:decode_h16",
            expect=FEW_HEADS | MATRIX,
        ),
        BuildCase(
            name="h16-combine",
            kernel="deeptwin.kernels.triton_ops.split_softmax:_combine_splits",
            launch="deeptwin.parity.builds.launches.mla:decode_h16",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="h128-fp32",
            kernel="deeptwin.kernels.triton_ops.mla:_decode_split",
            launch="deeptwin.parity.builds.launches.mla:decode_h128_fp32",
            expect=NO_PRODUCT | MATRIX,
        ),
        BuildCase(
            name="h128-fp32-combine",
            kernel="deeptwin.kernels.triton_ops.split_softmax:_combine_splits",
            launch="deeptwin.parity.builds.launches.mla:decode_h128_fp32",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _core("splits_merged_in_base_2", "U03", "a base-2 LSE goes into a natural-log merge of splits"),
        _core("last_split_lost", "U01", "the newest split is lost in the merge"),
        _core("lse_base_by_layout", "U04", "LSE in base 2 where a request has several queries"),
        _core("empty_request_nan", "U07", "a request of length 0 divides 0 by 0"),
        _core("empty_request_unwritten", "U75", "a request of length 0 is left unwritten"),
        _core("first_table_for_all", "U09", "every request reads the pages of the first"),
        _core("longest_length_for_all", "U08", "every request has the length of the longest"),
        _core("split_depends_on_batch", "U73", "the split of the keys depends on the batch"),
        _core("not_deterministic", "U10", "every second launch differs in the last bit of one element"),
        _core("page_tail_read", "U74", "slots of the last page beyond the length are read: 0 · NaN"),
        _core("page_stride_ignored", "U22", "pages are read as if they were contiguous"),
        _core("verify_mask_missing", "U32", "every verify query sees what the last one sees"),
        _core("newest_key_hidden", "U25", "a query does not see its own key"),
        _core("value_from_the_rotary_end", "U23", "the value is the last channels of a row, not the first"),
        _core("decode_scale_off_by_3_percent", "U05", "softmax scale off by 3 %"),
    ),
    controls=(
        _core_control("right_decode"),
        _core_control("right_decode_splits"),
    ),
    golden=golden_decode,
)

STORE = Op(
    name="store_latent",
    reference="deeptwin.reference.mla:store_latent",
    outputs=(Output(name="cache_pod_", rule=Bitwise(), dtype=torch.bfloat16),),
    cases=cases_store,
    draw=draw_store,
    rows={"latent_td": 0, "slots_t": 0},
    out_rows={},
    tile=8,
    writes="cache_pod_",
    relations=(
        Relation(name="run_to_run", axis="repeats"),
        Relation(name="changed_slots", axis="bytes of the cache", hook=named_slots),
        Relation(name="layout_round_trip", axis="writer to reader", hook=read_back, partner="mla_decode"),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.mla:store_latent_triton"),),
    builds=(
        BuildCase(
            name="d576",
            kernel="deeptwin.kernels.triton_ops.mla:_store_rows",
            launch="deeptwin.parity.builds.launches.mla:store_576",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _core("slot_minus_one_wraps", "U79", "slot −1 wraps to the last slot of the last page"),
        _core("store_ignores_page_stride", "U22", "pages are written as if they were contiguous"),
        _core("store_one_slot_on", "U23", "every row lands one slot further"),
        _core("store_slot_transposed", "U23", "page and offset of a slot are exchanged"),
        _core("store_forgets_the_page", "U29", "every row lands in page 0"),
        _core("store_stops_at_a_hole", "U28", "rows after a slot of −1 are not written"),
        _core("store_rows_backwards", "U26", "rows and slots are paired in opposite order"),
        _core("store_without_the_rotary_key", "U28", "the second half of a row is not written"),
        _core("store_spills_into_the_next_slot", "U26", "a row is written one element too wide"),
    ),
    controls=(_core_control("right_store"),),
    golden=golden_store,
)

BLOCK_RELATIONS = (
    Relation(name="run_to_run", axis="repeats", only=small_block),
    Relation(
        name="chunk_invariant",
        axis="chunks after a past",
        promise="within contract",  # the past is given in the reference's bits
        hook=block_chunks,
        only=several_tokens,
    ),
    Relation(name="causality", axis="later tokens", hook=later_tokens, only=several_tokens),
)

NAIVE = Op(
    name="mla_naive",
    reference="deeptwin.reference.mla:mla_naive",
    outputs=BLOCK_OUTPUTS,
    cases=cases_block,
    draw=draw_block,
    rows=BLOCK_ROWS,
    out_rows={"y_tm": 0},
    relations=(
        *BLOCK_RELATIONS,
        Relation(
            name="decode_equals_prefill",
            axis="one pass in the naive form, steps in the absorbed one",
            promise="within contract",
            hook=absorbed_steps,
            partner="mla_absorbed",
            only=several_tokens,
        ),
    ),
    peers=_peers(),
    mutants=(
        _block("no_magnitude", "U05", "the softmax scale misses mscale²"),
        _block("other_mscale_field", "U06", "the softmax scale is taken from the other mscale field"),
        _block("no_yarn_table", "U30", "angles without YaRN"),
        _block("other_rope_base", "U30", "angles of another base"),
        _block("half_split_pairs", "U38", "channels i and i + r/2 are rotated together"),
        _block("rotary_key_not_rotated", "U30", "the rotary key is cached as it was projected"),
        _block("query_one_position_on", "U61", "queries are rotated one position too far"),
        _block("query_latent_not_normed", "U11", "the norm of the query latent is missing"),
        _block("latent_not_normed", "U11", "the norm of the key/value latent is missing"),
        _block("rotary_key_normed", "U11", "the rotary key is normalised too"),
        _block("first_rotary_key_for_all", "U09", "every key has the rotary part of the first"),
        _block("up_projections_swapped", "U13", "W_UK and W_UV are exchanged"),
        _block("heads_interleaved", "U26", "heads and channels are exchanged before the output projection"),
        _block("past_dropped", "U27", "the cached rows are not read"),
        _block("future_seen", "U25", "a query sees one key too many"),
    ),
    controls=(
        _block_control("naive_right"),
        _block_control("naive_right_backwards"),
    ),
    golden=golden_block,
)

ABSORBED = Op(
    name="mla_absorbed",
    reference="deeptwin.reference.mla:mla_absorbed",
    outputs=BLOCK_OUTPUTS,
    cases=cases_block,
    draw=draw_block,
    rows=BLOCK_ROWS,
    out_rows={"y_tm": 0},
    relations=BLOCK_RELATIONS,
    peers=_peers(),
    mutants=(
        _block("absorbed_no_magnitude", "U05", "the softmax scale misses mscale²"),
        _block("absorbed_scale_of_latent_width", "U05", "the scale is that of the absorbed width (c + r)^-0.5"),
        _block("absorbed_up_projections_swapped", "U13", "W_UK and W_UV are exchanged"),
        _block("absorbed_past_dropped", "U27", "the cached rows are not read"),
        _block("absorbed_chunks_merged_in_base_2", "U02", "a base-2 LSE goes into a natural-log merge of chunks"),
        _block("absorbed_last_chunk_lost", "U01", "the newest chunk is lost in the merge"),
        _block("absorbed_output_truncated", "R1", "the mixed latent is truncated to bf16"),
    ),
    controls=(
        _block_control("absorbed_right"),
        _block_control("absorbed_right_splits"),
    ),
    golden=golden_block,
)

CARD = Card(
    component="mla",
    summary="multi-head latent attention: naive and absorbed forms, paged latent cache",
    contract={
        "dtypes": "q, k, v, cache and out in `dtype` (bf16 or fp32); table and lengths int32; lse fp32",
        "rounding": "weights to dtype unnormalised (free scale), one rounding of the output, LSE to fp32; in blocks "
        "every projection, norm and rotation to dtype",
        "units": "LSE natural log",
        "mask": "key j is seen by the query at position p if j ≤ p; the queries are the last positions",
        "empty row": "a query without a key: out exactly 0, LSE −inf",
        "NaN": "unused slots and pages may hold NaN; keys after a query share its tile and have to be finite",
        "layout": "rows [c | k_rope], rotary pairs interleaved; pages [p, o, d] with any page stride; slot = page · o "
        "+ offset, −1 writes nothing",
    },
    ops=(PREFILL, DECODE, STORE, NAIVE, ABSORBED),
    equivalents=(
        Equivalent(
            name="block size, block order, splits merged in natural log",
            reason="the scale at which weights are rounded is the kernel's own (free scale): honest arithmetic",
        ),
        Equivalent(
            name="NaN in keys after a query of the same prefill tile",
            reason="the contract asks for finite keys there: 0 · NaN is NaN in the reference too",
        ),
    ),
)
