"""How V3.2 attention is checked: index rows, weights and scores, attention over records, and whole layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import (
    FP8_1X128,
    FP8_1X128_POW2,
    FP8_1X128_POW2_SCALE_FLOOR,
    INDEX_FP8_F32,
    INDEX_FP8_POW2,
    KV_V32_DEMO,
    KV_V32_FMLA,
    DsaConfig,
    IndexerRope,
    PageLayout,
    RecordFormat,
    RopeConfig,
    WeightCast,
)
from deeptwin.reference.dsa import dsa_project
from deeptwin.reference.dsa_index import dsa_index_scores, dsa_index_scores_paged
from deeptwin.reference.dsa_state import DsaState, DsaWeights
from deeptwin.reference.kv_cache import load_records, pack_records, store_records
from deeptwin.reference.numerics import SEMANTIC
from deeptwin.reference.quant import fake_quantize, quantize
from deeptwin.reference.rope import rope_frequencies, rope_table, table_magnitude
from deeptwin.reference.weights import Latents

from .. import draws
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import NO_PRODUCT, PRODUCT
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
from ..fp8_unit import Fp8Unit
from ..peers.dsa import TINY
from ..relations import CallFn, Context, Pick, Variant, in_a_crowd, join_rows, pick_rows, row_chunks
from ..rules import ATTENTION, LSE, MLA_BLOCK, Bitwise, Budget, Close
from .indexer import F32_SCORES
from .linear import F32_PRODUCT
from .mla import CONFIGS as MLA_CONFIGS
from .mla import _state as mla_state

_mutant, _control = variants("dsa")
_layer, _layer_control = variants("dsa_layer")
RECORD = KV_V32_FMLA.record_bytes

# configurations

WIDE = {fmt.name: fmt for fmt in (KV_V32_FMLA, KV_V32_DEMO, INDEX_FP8_POW2, INDEX_FP8_F32)}
KV_V32_F32 = replace(KV_V32_DEMO, name="kv_v32_f32", quant=FP8_1X128)
WRITERS = {"fmla": KV_V32_FMLA, "demo": KV_V32_DEMO, "f32": KV_V32_F32}
KEYS = {"pow2": INDEX_FP8_POW2, "f32": INDEX_FP8_F32, "none": None}
# real groups of 128 channels beside few heads and narrow rows
LATENT = RecordFormat(name="tiny_latent", channels=128, tail=8, quant=FP8_1X128_POW2_SCALE_FLOOR)
RECORDS = DsaConfig(
    mla=replace(TINY.mla, num_heads=2, kv_lora_rank=128, weight_cast=WeightCast.AFTER_WEIGHT),
    index_heads=16,
    index_dim=128,
    topk=8,
    indexer_rope=IndexerRope.HALF_SPLIT,
    index_key=INDEX_FP8_POW2,
    latent=LATENT,
)
CONFIGS = {
    "tiny": TINY,
    "uneven": replace(TINY, mla=MLA_CONFIGS["uneven"]),
    "release": replace(TINY, mla=MLA_CONFIGS["release"]),
    "records": RECORDS,
}


def index_config(rotary: int, dim: int, rope: str, key: str) -> DsaConfig:
    """A configuration of which only the indexer matters."""
    found = KEYS[key]
    if found is not None and dim != 128:
        found = RecordFormat(name="narrow", channels=dim, quant=replace(FP8_1X128_POW2, group=dim))
    mla = replace(TINY.mla, rope=RopeConfig(rope_dim=rotary, theta=10000.0, yarn=None))
    rope_ = IndexerRope(rope)
    return replace(TINY, mla=mla, index_dim=dim, indexer_rope=rope_, index_key=found)


# cases


@dataclass(frozen=True, kw_only=True)
class RowsCase:
    """`tokens` × `heads` index rows of `dim` channels, `rotary` of which turn."""

    tokens: int
    heads: int = 4
    dim: int = 128
    rotary: int = 64
    rope: str = "half_split"
    key: str = "pow2"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-h{self.heads}-d{self.dim}r{self.rotary}"
        return f"{shape}-{self.rope}-{self.key}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class WeightsCase:
    """`tokens` rows of `width`; regime `close`: two heads whose weights differ by 2^-10."""

    tokens: int
    width: int = 96
    heads: int = 16
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-m{self.width}-h{self.heads}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class ScoreCase:
    """`tokens` queries on `keys` keys; `page` > 0: in pages of that many."""

    tokens: int
    keys: int
    heads: int = 16
    dim: int = 128
    page: int = 0
    scale: str = "f32"  # pow2, f32
    regime: str = "normal"
    lengths: str = "mixed"  # mixed, full, zero

    @property
    def id(self) -> str:
        page = f"-page{self.page}" if self.page else ""
        shape = f"t{self.tokens}-h{self.heads}-d{self.dim}-s{self.keys}{page}"
        return f"{shape}-{self.scale}-{self.regime}-len_{self.lengths}"


@dataclass(frozen=True, kw_only=True)
class MlaCase:
    """`keys` records to choose from in pages of `page`, `topk` list entries."""

    tokens: int
    heads: int = 4
    keys: int = 40
    topk: int = 17
    page: int = 5
    writer: str = "fmla"  # fmla, demo, f32: scales as they are, not rounded up to a power of two
    regime: str = "normal"
    holes: str = "some"  # none, some, leading, all, bad
    lengths: str = "none"  # none, mixed, zero
    gap: int = 32  # bytes between pages

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-h{self.heads}-s{self.keys}-k{self.topk}-page{self.page}"
        gap = "" if self.gap else "-dense"
        return f"{shape}{gap}-{self.writer}-{self.regime}-holes_{self.holes}-len_{self.lengths}"


@dataclass(frozen=True, kw_only=True)
class WideCase:
    """`tokens` rows and `holes` of them without an entry, a cache of `pages` × `page` records 32 bytes apart."""

    tokens: int
    pages: int = 3
    page: int = 5
    fmt: str = "kv_v32_fmla"
    layout: str = "interleaved"
    holes: int = 2
    dtype: str = "bf16"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shape = f"t{self.tokens}-p{self.pages}x{self.page}-{self.fmt}-{self.layout}-holes{self.holes}"
        return f"{shape}-{self.dtype}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """`tokens` tokens after `past` cached ones, the first of which stands at `start`; `free`: the indexer picks."""

    tokens: int
    config: str = "tiny"
    past: int = 0
    start: int = 0
    dtype: str = "fp32"
    regime: str = "normal"
    picks: str = "some"  # some, future (entries after the query among them), free

    @property
    def id(self) -> str:
        shape = f"{self.config}-t{self.tokens}-past{self.past}-at{self.start}"
        return f"{shape}-{self.dtype}-{self.regime}-picks_{self.picks}"


# inputs


def _positions(rng: np.random.Generator, count: int, rows: int) -> Tensor:
    positions = torch.from_numpy(rng.integers(0, rows, count))
    positions[:1] = rows - 2
    return positions


def draw_queries(case: RowsCase, rng: np.random.Generator) -> Inputs:
    """Heads of a regime as a strided view, positions near and far."""
    config = index_config(case.rotary, case.dim, case.rope, case.key)
    x = draws.rows(rng, case.tokens * case.heads, case.dim, dtype=torch.bfloat16, regime=case.regime)
    table = rope_table(torch.arange(200), rope_frequencies(config.mla.rope))
    return {
        "q_thd": draws.strided(x.unflatten(0, (case.tokens, case.heads)), pad=8),
        "table_sr": table,
        "positions_t": _positions(rng, case.tokens, len(table)).to(torch.int32),
        "config": config,
    }


def draw_keys(case: RowsCase, rng: np.random.Generator) -> Inputs:
    """Keys with a mean, norm weights of both signs, a bias."""
    queries = draw_queries(replace(case, heads=1), rng)
    k = queries.pop("q_thd")[:, 0] + (0.0 if case.regime in ("zeros", "flat", "tiny") else 0.5)
    weight = draws.normal(rng, case.dim, dtype=torch.bfloat16, scale=0.3, mean=1.0)
    weight[-2:] = torch.tensor([-1.5, 0.0])
    bias = draws.normal(rng, case.dim, dtype=torch.bfloat16, scale=0.3)
    return {"k_td": draws.strided(k, pad=8), "weight_d": weight, "bias_d": bias, **queries}


def draw_weights(case: WeightsCase, rng: np.random.Generator) -> Inputs:
    """Hidden rows of a regime, fp32 weights, scales of queries over some powers of two."""
    regime = "normal" if case.regime == "close" else case.regime
    x = draws.rows(rng, case.tokens, case.width, dtype=torch.bfloat16, regime=regime)
    w = draws.normal(rng, case.heads, case.width, dtype=torch.float32, scale=case.width**-0.5)
    if case.regime == "close":
        w[1] = w[0] * (1 + 2.0**-10)
    sf = torch.exp2(torch.from_numpy(rng.integers(-9, -4, (case.tokens, case.heads))).float())
    return {"x_tm": draws.strided(x, pad=8), "w_hm": w, "q_sf_th": sf, "index_dim": 128}


def draw_scores(case: ScoreCase, rng: np.random.Generator) -> Inputs:
    """Codes of rows of a regime; keys that no query sees are bytes 0xFF, NaN as codes and as scales."""
    regime = case.regime if case.regime in (*REGIMES, "zeros", "ties") else "normal"
    fmt = replace(FP8_1X128 if case.scale == "f32" else FP8_1X128_POW2, group=case.dim)
    q = draws.rows(rng, case.tokens * case.heads, case.dim, dtype=torch.bfloat16, regime=regime)
    q_q, q_sf = quantize(q, fmt=fmt)
    k_q, k_sf = quantize(draws.rows(rng, case.keys, case.dim, dtype=torch.bfloat16, regime=regime), fmt=fmt)
    w = draws.normal(rng, case.tokens, case.heads, dtype=torch.float32, scale=(case.heads * case.dim) ** -0.5)
    edges = [case.keys, 0, 1, case.keys - 1, case.keys // 2]
    chosen = {"mixed": edges, "full": [case.keys], "zero": [0]}[case.lengths]
    lengths = torch.tensor([chosen[i % len(chosen)] for i in range(case.tokens)], dtype=torch.int32).clamp(min=0)
    unseen = torch.arange(case.keys) >= (int(lengths.max()) if case.tokens else 0)
    k_q.view(torch.uint8)[unseen] = 0xFF
    k_sf[unseen] = torch.nan
    if case.regime == "nankey" and case.keys:
        k_q.view(torch.uint8)[0, 5] = 0xFF
    return {
        "q_thd": draws.strided(q_q.unflatten(0, (case.tokens, case.heads)).view(torch.uint8), pad=16).view(q_q.dtype),
        "k_sd": draws.strided(k_q.view(torch.uint8), pad=16).view(k_q.dtype),
        "k_sf_s": torch.stack([k_sf[:, 0]] * 2, 1)[:, 0],
        "w_th": w * q_sf.view(w.shape),
        "length_t": lengths,
    }


def draw_paged(case: ScoreCase, rng: np.random.Generator) -> Inputs:
    """The same keys scattered over pages that lie further apart than they are long; absent pages behind the last."""
    flat = draw_scores(case, rng)
    codes, sf = flat.pop("k_sd").contiguous().view(torch.uint8), flat.pop("k_sf_s").contiguous()
    each = -(-case.keys // case.page)
    pages, size = each + 3, case.page * (case.dim + 4)
    order = torch.from_numpy(rng.permutation(pages)[:each])
    roomy = draws.poisoned(pages, size + 64, dtype=torch.uint8)
    for i in range(case.keys):
        page, slot = roomy[order[i // case.page]], i % case.page
        page[slot * case.dim : (slot + 1) * case.dim] = codes[i]
        place = case.page * case.dim + 4 * slot
        page[place : place + 4] = sf[i : i + 1].view(torch.uint8)
    table = torch.cat([order, torch.tensor([-1, pages, 2**31 - 1])]).to(torch.int32).expand(case.tokens, -1).clone()
    if case.regime == "absent":
        table[:, ::2] = -1
        flat["length_t"] = flat["length_t"] + 3 * case.page
    elif case.tokens > 1:
        table[1] = table[1].flip(0)  # a query with pages of its own, absent ones first
        table[1, 3:] = order.flip(0).to(torch.int32)
    cache = roomy[:, :size].unflatten(1, (case.page, case.dim + 4))
    whole = flat | {"cache_pow": cache, "table_tj": table}
    return {name: whole[name] for name in ("q_thd", "cache_pow", "w_th", "table_tj", "length_t")}


def _query_scale(regime: str) -> float:
    return {"peaked": 4.0, "flat": 0.1, "huge": 30.0, "tiny": 2.0**-40, "zeros": 0.0}.get(regime, 1.0)


def draw_mla(case: MlaCase, rng: np.random.Generator) -> Inputs:
    """Lists that name records of one half only; all others, and gaps between pages, are bytes 0xFF."""
    fmt = WRITERS[case.writer]
    q = draws.normal(rng, case.tokens, case.heads, fmt.width, dtype=torch.bfloat16, scale=_query_scale(case.regime))
    usable = draws.distinct(rng, case.keys, max(1, case.keys // 2)) if case.keys else np.zeros(0, dtype=np.int64)
    mean = 1.0 if case.regime == "mean1" else 0.0
    rows = draws.normal(rng, usable.size, fmt.width, dtype=torch.bfloat16, mean=mean)
    if case.regime == "small":  # below the floor of one writer, above that of the other; codes are subnormal
        rows[:, : fmt.channels] *= 2.0 ** -torch.arange(4).repeat_interleave(128).mul(3)
    pages = -(-case.keys // case.page) + 1
    block = draws.poisoned(pages, case.page * RECORD + case.gap, dtype=torch.uint8)
    cache = block[:, : case.page * RECORD].unflatten(1, (case.page, RECORD))
    slots = rng.permutation(pages * case.page)[: case.keys]
    records = pack_records(rows, fmt=fmt)
    if case.regime == "nankey" and usable.size:
        records[0, 3] = 0xFF
    mine = torch.from_numpy(slots[usable])
    cache[mine // case.page, mine % case.page] = records
    spare = np.delete(slots, usable)
    lists = np.full((case.tokens, case.topk), -1, dtype=np.int64)
    for row in lists:
        count = min(case.topk, usable.size)
        row[rng.permutation(case.topk)[:count]] = rng.permutation(slots[usable])[:count]
        _punch(case, rng, row)
    lengths = None
    if case.lengths != "none":
        choices = [0] if case.lengths == "zero" else [case.topk - 1, 0, 1, case.topk, case.topk // 2]
        lengths = np.array([choices[i % len(choices)] for i in range(case.tokens)]).clip(0, case.topk)
        for row, length in zip(lists, lengths, strict=True):
            row[length:] = rng.choice([*spare[:4], *draws.BAD_INDICES], case.topk - length)
    if case.regime == "nankey" and usable.size:
        lists[0, 0] = slots[usable[0]]
    return {
        "q_thd": draws.strided(q, pad=8),
        "cache_pow": cache,
        "idx_tk": torch.from_numpy(lists.astype(np.int32)),
        "topk_length_t": None if lengths is None else torch.from_numpy(lengths.astype(np.int32)),
        "scale": 0.1352337788608801 * (192 / 576) ** 0.5,
    }


def _punch(case: MlaCase, rng: np.random.Generator, row: np.ndarray) -> None:
    if case.holes == "some":
        row[rng.permutation(row.size)[: row.size // 8]] = -1
    elif case.holes == "leading":
        row[: 3 * row.size // 4] = -1
    elif case.holes == "all":
        row[:] = -1
    elif case.holes == "bad":
        where = rng.permutation(row.size)[: row.size // 4]
        row[where] = rng.choice([*draws.BAD_INDICES, 2 * 10**6], where.size)


def _slots(case: WideCase, rng: np.random.Generator, slots: np.ndarray) -> Tensor:
    bad = [-1, case.pages * case.page, -2, -(2**31), 2**31 - 1]
    where = rng.permutation(slots.size)[: case.holes]
    slots = slots.astype(np.int64)
    slots[where] = bad[: where.size]
    return torch.from_numpy(slots).to(torch.int32)


def _wide_rows(case: WideCase, rng: np.random.Generator, count: int) -> Tensor:
    """Rows of a regime; `small`: groups about both floors, zero groups; `powers`: amax one step above 448 · 2^k."""
    fmt, dtype = WIDE[case.fmt], draws.DTYPES[case.dtype]
    if case.regime not in ("small", "powers"):
        return draws.rows(rng, count, fmt.width, dtype=dtype, regime=case.regime)
    x = draws.normal(rng, count, fmt.width, dtype=torch.float32)
    groups = x[:, : fmt.channels].unflatten(1, (-1, 128))
    place = torch.arange(count * groups.shape[1]).view(count, -1, 1)
    if case.regime == "small":
        sizes = torch.tensor([3e-2, 1e-2, 1e-5, 0.0, 5e-5, 2e-4, 4.4e-2, 4.6e-2])
        groups *= sizes[place % 8] / groups.abs().amax(-1, keepdim=True)
    else:
        groups *= 0.25
        top = 448.0 * torch.exp2(place[..., 0] % 20 - 14.0)
        groups *= top[..., None] / 448.0 / 4
        groups[..., 3] = torch.nextafter(top, torch.tensor(torch.inf))
    return x.to(dtype)


def draw_wide_store(case: WideCase, rng: np.random.Generator) -> Inputs:
    """A cache of random bytes, distinct slots in random order, holes among them whose rows are NaN."""
    fmt = WIDE[case.fmt]
    size = case.page * fmt.record_bytes
    block = torch.from_numpy(rng.integers(0, 256, (case.pages, size + 32), dtype=np.uint8))
    x = _wide_rows(case, rng, case.tokens)
    slots = _slots(case, rng, draws.distinct(rng, case.pages * case.page, case.tokens))
    x[(slots < 0) | (slots >= case.pages * case.page)] = torch.nan
    return {
        "cache_pow_": block[:, :size].unflatten(1, (case.page, fmt.record_bytes)),
        "x_td": draws.strided(x, pad=8),
        "slots_t": slots,
        "layout": PageLayout(case.layout),
        "fmt": fmt,
    }


def draw_wide_load(case: WideCase, rng: np.random.Generator) -> Inputs:
    """Entries written by a store into pages of 0xFF bytes, read out of order and twice."""
    fmt = WIDE[case.fmt]
    size = case.page * fmt.record_bytes
    block = draws.poisoned(case.pages, size + 32, dtype=torch.uint8)
    cache = block[:, :size].unflatten(1, (case.page, fmt.record_bytes))
    low = case.page if case.pages > 1 else 0
    filled = low + draws.distinct(rng, case.pages * case.page - low, max(1, min(case.tokens, 9)))
    rows = _wide_rows(case, rng, filled.size)
    store_records(cache, rows, torch.from_numpy(filled), layout=PageLayout(case.layout), fmt=fmt)
    slots = filled[rng.integers(0, filled.size, case.tokens)] if case.tokens else filled[:0]
    return {
        "cache_pow": cache,
        "slots_t": _slots(case, rng, slots),
        "layout": PageLayout(case.layout),
        "dtype": draws.DTYPES[case.dtype],
    }


def layer_weights(config: DsaConfig, rng: np.random.Generator, regime: str, dtype: torch.dtype) -> DsaWeights:
    """Weights under their checkpoint names; norms and the bias are drawn too."""
    h, d, m, a = config.index_heads, config.index_dim, config.mla.hidden, config.mla.q_lora_rank
    state = mla_state(config.mla, rng, regime, dtype)
    state["indexer.wq_b.weight"] = draws.normal(rng, h * d, a, dtype=dtype, scale=a**-0.5)
    state["indexer.wk.weight"] = draws.normal(rng, d, m, dtype=dtype, scale=m**-0.5)
    state["indexer.k_norm.weight"] = draws.normal(rng, d, dtype=dtype, scale=0.1, mean=1.0)
    state["indexer.k_norm.bias"] = draws.normal(rng, d, dtype=dtype, scale=0.3)
    state["indexer.weights_proj.weight"] = draws.normal(rng, h, m, dtype=torch.float32, scale=m**-0.5)
    if regime == "small":  # latents below the floor on the scale
        state["kv_a_layernorm.weight"] *= 2.0**-20
    if regime == "peaked_key":  # rotary keys of many digits, which no quantiser may touch
        state["kv_a_proj_with_mqa.weight"][-config.mla.rope.rope_dim :] *= 6.0
    return DsaWeights.from_state_dict(state, prefix="", config=config)


def table_of(config: DsaConfig, rows: int) -> Tensor:
    """Angles of the first positions."""
    rope = config.mla.rope
    return rope_table(torch.arange(rows), rope_frequencies(rope), magnitude=table_magnitude(rope.yarn))


def draw_layer(case: LayerCase, rng: np.random.Generator) -> Inputs:
    """Hidden rows, weights, what is cached (as the reference stores other rows), and picks."""
    config, dtype = CONFIGS[case.config], draws.DTYPES[case.dtype]
    weights = layer_weights(config, rng, case.regime, dtype)
    regime = case.regime if case.regime == "mean1" else "normal"
    x = draws.rows(rng, case.past + case.tokens, config.mla.hidden, dtype=dtype, regime=regime)
    first, end = case.start + case.past, case.start + case.past + case.tokens
    table, past = table_of(config, end + 1), None
    if case.past:
        positions = torch.arange(case.start, first)
        past = stored_state(x[: case.past], weights, positions, table, config, dtype)
    picks = None if case.picks == "free" else _picks(case, rng, config.topk)
    return {
        "x_tm": draws.strided(x[case.past :], pad=8),
        "weights": weights,
        "positions_t": torch.arange(first, end),
        "table_sr": table,
        "picks_tk": picks,
        "config": config,
        "past": past,
        "dtype": dtype,
    }


def stored_state(
    x: Tensor, weights: DsaWeights, positions: Tensor, table: Tensor, config: DsaConfig, dtype: torch.dtype
) -> DsaState:
    """What the reference leaves of tokens, in its storage dtypes."""
    state = dsa_project(x, weights, positions, table, config=config, dtype=dtype)[2]
    key = state.key_sd if config.index_key is not None else state.key_sd.to(dtype)
    return replace(state, key_sd=key, latents=replace(state.latents, rows_sd=state.latents.rows_sd.to(dtype)))


def _picks(case: LayerCase, rng: np.random.Generator, topk: int) -> Tensor:
    """Random tokens of those that each query sees, its own among them only by chance."""
    picks = torch.full((case.tokens, topk), -1, dtype=torch.int32)
    total = case.past + case.tokens
    for i in range(case.tokens):
        high = total if case.picks == "future" else case.past + i + 1
        found = np.sort(rng.permutation(high)[:topk])
        picks[i, : found.size] = torch.from_numpy(found.astype(np.int32))
    return picks


# which cases


def cases_rows(full: bool) -> list[RowsCase]:
    """Regimes, both pairings with and without a transform, other widths, no token, the released heads."""
    base = RowsCase(tokens=3)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "ties", "cancel", "constant")]
    found += [replace(base, rope=r, key=k) for r, k in product(("half_split", "interleaved"), ("pow2", "none"))]
    found += [replace(base, dim=16, rotary=8), replace(base, rotary=128), replace(base, dim=64, rotary=16, heads=3)]
    found += [replace(base, tokens=n) for n in (0, 1)]
    found += [replace(base, tokens=2, heads=64), replace(base, tokens=17, heads=1)]
    if full:
        found += [replace(base, tokens=9, rope=r, regime=g) for r, g in product(("half_split", "interleaved"), REGIMES)]
    return list({case.id: case for case in found}.values())


def cases_weights(full: bool) -> list[WeightsCase]:
    """Regimes, the released width, no token."""
    base = WeightsCase(tokens=5)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "cancel", "close")]
    found += [replace(base, tokens=2, width=7168, heads=64), replace(base, tokens=0), replace(base, width=1, heads=1)]
    return found + ([replace(base, tokens=40, width=7168, heads=64, regime=r) for r in REGIMES] if full else [])


def cases_scores(full: bool) -> list[ScoreCase]:
    """Regimes, both kinds of scale, head counts, edges of the key block, nothing to see."""
    base = ScoreCase(tokens=4, keys=40)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "ties", "nankey")]
    found += [
        replace(base, scale="pow2"),
        replace(base, heads=64, tokens=2, keys=130),
        *(replace(base, heads=64, regime=r) for r in ("normal", "mean1", "nankey")),
        replace(base, heads=5),
        replace(base, dim=16),
        replace(base, keys=128, tokens=2, lengths="full"),
        replace(base, tokens=17, keys=9),
        replace(base, lengths="zero"),
        replace(base, tokens=0),
        replace(base, keys=0, tokens=2),
        replace(base, tokens=1, keys=1, lengths="full"),
    ]
    if full:
        found += [
            replace(base, heads=h, keys=s, regime=r, scale=k)
            for h, s, r, k in product((16, 64), (127, 300), REGIMES, ("f32", "pow2"))
        ]
    return list({case.id: case for case in found}.values())


def cases_paged(full: bool) -> list[ScoreCase]:
    """Page sizes, absent pages, regimes."""
    base = ScoreCase(tokens=4, keys=40, page=16)
    found = [replace(base, regime=r) for r in (*REGIMES, "absent", "nankey")]
    found += [
        replace(base, page=7),
        replace(base, page=64, heads=64, keys=150, tokens=3),
        replace(base, page=64, heads=64, keys=150, tokens=1, lengths="full"),
        replace(base, page=1, keys=12, tokens=2),
        replace(base, page=80, keys=100, tokens=2, scale="pow2"),
        replace(base, lengths="zero"),
        replace(base, tokens=0),
    ]
    if full:
        found += [replace(base, page=p, keys=300, regime=r) for p, r in product((8, 53, 64, 128), REGIMES)]
    return list({case.id: case for case in found}.values())


def cases_mla(full: bool) -> list[MlaCase]:
    """Regimes, writers, page sizes, lists with holes, lengths, several splits, the released shape at one row."""
    base = MlaCase(tokens=3)
    found = [replace(base, regime=r) for r in (*REGIMES, "zeros", "huge", "tiny", "small", "nankey")]
    found += [
        replace(base, writer="demo", regime="small"),
        replace(base, writer="f32"),
        replace(base, tokens=9, lengths="mixed"),
        replace(base, tokens=9, regime="mean1"),
        replace(base, lengths="zero"),
        replace(base, holes="all"),
        replace(base, holes="leading", topk=70, keys=120),
        replace(base, holes="bad"),
        replace(base, page=1),
        replace(base, page=64, keys=200, topk=65, heads=17, tokens=1),
        replace(base, topk=1, keys=2, holes="none"),
        replace(base, tokens=0),
        replace(base, tokens=2, keys=2400, topk=1100, page=64, heads=2, lengths="mixed"),
        MlaCase(tokens=1, heads=128, keys=300, topk=128, page=64, gap=0),
    ]
    if full:
        found += [replace(base, page=p, regime=r, topk=k) for p, r, k in product((2, 53, 64), REGIMES, (31, 33))]
        found += [MlaCase(tokens=1, heads=128, keys=4200, topk=2048, page=64, regime=r) for r in REGIMES]
        dense = MlaCase(tokens=3, heads=64, keys=900, topk=384, page=64, gap=0)
        found += [
            dense,
            replace(dense, tokens=1, holes="leading", regime="mean1"),
            replace(dense, tokens=1, holes="bad"),
        ]
        # what the kernel for SM90 takes and FlashMLA does not: gaps, lengths, indices beyond the cache, NaN codes
        wide = MlaCase(tokens=3, heads=64, keys=500, topk=200, page=53)
        found += [replace(wide, regime=r) for r in (*REGIMES, "zeros", "small", "nankey")]
        found += [replace(wide, holes=h) for h in ("none", "leading", "all", "bad")]
        found += [replace(wide, lengths=k) for k in ("mixed", "zero")]
        found += [replace(wide, topk=k) for k in (1, 63, 64, 65, 129)]
        # two tiles of heads bring keys for each other
        paired = replace(wide, heads=128)
        found += [replace(paired, holes=h) for h in ("some", "leading", "all", "bad")]
        found += [replace(paired, lengths=k) for k in ("mixed", "zero")]
        found += [replace(paired, topk=65), replace(paired, regime="nankey")]
        found += [replace(dense, writer=w, tokens=1, regime="peaked") for w in ("fmla", "demo")]
        found += [replace(dense, writer="f32", tokens=1, heads=h) for h in (64, 128)]
    return list({case.id: case for case in found}.values())


def cases_wide(full: bool) -> list[WideCase]:
    """Writers × layouts, regimes about the floors, page sizes, storage dtypes, no row, all holes."""
    base = WideCase(tokens=6)
    found = [replace(base, fmt=f, layout=lay) for f, lay in product(WIDE, ("interleaved", "sectioned"))]
    found += [replace(base, fmt=f, regime="small", tokens=8, holes=0) for f in WIDE]
    found += [replace(base, fmt=f, regime="powers", tokens=8, holes=0, dtype="fp32") for f in WIDE]
    found += [replace(base, regime=r, fmt=f) for r, f in zip(REGIMES[1:], (*WIDE,)[1:], strict=True)]
    found += [
        replace(base, page=64, pages=2, tokens=9, fmt="index_fp8_pow2", layout="sectioned"),
        replace(base, page=80, pages=2, tokens=5, fmt="index_fp8_f32", layout="sectioned"),
        replace(base, page=1, pages=8),
        replace(base, dtype="fp32"),
        replace(base, tokens=0, holes=0),
        replace(base, tokens=5, holes=5),
        replace(base, tokens=1, pages=1, page=1, holes=0),
    ]
    if full:
        found += [
            replace(base, fmt=f, layout=lay, page=p, dtype=d)
            for f, lay, p, d in product(WIDE, ("interleaved", "sectioned"), (2, 53, 64), ("bf16", "fp32"))
        ]
    return list({case.id: case for case in found}.values())


def cases_layer(full: bool) -> list[LayerCase]:
    """Layers that hold rows as they are."""
    return [case for case in _layers(full) if case.config != "records"]


def cases_records(full: bool) -> list[LayerCase]:
    """Layers over records."""
    return [case for case in _layers(full) if case.config == "records"]


def _layers(full: bool) -> list[LayerCase]:
    """Configurations, a past, picks in the future, regimes; records in bf16."""
    base = LayerCase(tokens=20)
    found = [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, config=c) for c in ("uneven", "release")]
    found += [
        replace(base, picks="future"),
        replace(base, tokens=4, past=30, start=40),
        replace(base, tokens=0),
        replace(base, tokens=1),
        replace(base, config="tiny", dtype="bf16", tokens=33),
    ]
    records = replace(base, config="records", dtype="bf16")
    found += [replace(records, regime=r, tokens=12) for r in (*REGIMES, "small", "peaked_key")]
    found += [replace(records, tokens=3, past=20)]
    if full:
        found += [replace(records, tokens=40, past=p, regime=r) for p, r in product((0, 9), REGIMES)]
        found += [replace(base, tokens=60, config=c, regime=r) for c, r in product(("tiny", "uneven"), REGIMES)]
    return list({case.id: case for case in found}.values())


def cases_free(full: bool) -> list[LayerCase]:
    """At, below and beyond `topk` tokens; a past; records, whose near ties only relations can judge."""
    base = LayerCase(tokens=40, picks="free")
    found = [
        base,
        replace(base, regime="mean1"),
        replace(base, regime="peaked"),
        replace(base, tokens=8),
        replace(base, tokens=9),
        replace(base, tokens=3, past=7, start=5),
        replace(base, tokens=1, past=30),
        replace(base, config="records", dtype="bf16", tokens=14),
    ]
    if full:
        found += [replace(base, tokens=90, regime=r) for r in REGIMES]
        found += [replace(base, config="records", dtype="bf16", tokens=60)]
    return list({case.id: case for case in found}.values())


# relation hooks


def unseen_keys(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Keys that no query sees may hold any bytes."""
    beyond = torch.arange(len(inputs["k_sd"])) >= int(inputs["length_t"].max())
    codes = inputs["k_sd"].contiguous().view(torch.uint8).clone()
    codes[beyond] = 0x38
    sf = torch.where(beyond, 1.0, inputs["k_sf_s"])
    yield Variant(label="ones", calls=(inputs | {"k_sd": codes.view(torch.float8_e4m3fn), "k_sf_s": sf},))


def more_keys(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Keys behind all that are seen are -inf columns and change nothing else."""
    k, sf = inputs["k_sd"].contiguous().view(torch.uint8), inputs["k_sf_s"]
    extra = 131
    more = torch.cat([k, torch.full((extra, k.shape[1]), 0xFF, dtype=torch.uint8)]).view(torch.float8_e4m3fn)
    call = inputs | {"k_sd": more, "k_sf_s": torch.cat([sf, torch.full((extra,), torch.nan)])}

    def cut(results: list[Outputs]) -> Outputs:
        return {"scores_ts": results[0]["scores_ts"][:, : len(k)].contiguous()}

    yield Variant(label=f"{extra} keys behind", calls=(call,), join=cut)


def permuted_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same keys on other pages, the tables renumbered."""
    cache, table = inputs["cache_pow"], inputs["table_tj"].long()
    pages = cache.shape[0]
    order = torch.from_numpy(context.rng.permutation(pages))
    inside = (table >= 0) & (table < pages)
    renumbered = torch.where(inside, torch.argsort(order)[torch.where(inside, table, 0)], table).to(torch.int32)
    changed = inputs | {"cache_pow": cache[order].contiguous(), "table_tj": renumbered}
    yield Variant(label="other pages, without gaps", calls=(changed,))


def as_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The dense operation on the keys of each row's pages, one row at a time."""
    cache, d = inputs["cache_pow"], inputs["q_thd"].shape[2]
    p, o, _ = cache.shape
    flat = torch.cat([cache.reshape(p, -1), torch.full((1, o * (d + 4)), 0xFF, dtype=torch.uint8)])
    codes = flat[:, : o * d].reshape(p + 1, o, d)
    sf = flat[:, o * d :].reshape(p + 1, o, 4).contiguous().view(torch.float32)[..., 0]
    calls = []
    for row, table in enumerate(inputs["table_tj"].long()):
        known = torch.where((table >= 0) & (table < p), table, p)
        one = {name: inputs[name][row : row + 1] for name in ("q_thd", "w_th", "length_t")}
        k = codes[known].flatten(0, 1).view(torch.float8_e4m3fn)
        calls.append(one | {"k_sd": k, "k_sf_s": sf[known].flatten()})
    yield Variant(
        label="dense rows", calls=tuple(calls), join=lambda rs: {"scores_ts": torch.cat([r["scores_ts"] for r in rs])}
    )


def moved_records(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same records on other pages, the lists renumbered, pages without gaps."""
    cache, lists = inputs["cache_pow"], inputs["idx_tk"].long()
    pages, slots = cache.shape[:2]
    order = torch.from_numpy(context.rng.permutation(pages))
    inside = (lists >= 0) & (lists < pages * slots)
    safe = torch.where(inside, lists, 0)
    renumbered = torch.where(inside, torch.argsort(order)[safe // slots] * slots + safe % slots, lists)
    yield Variant(
        label="other pages",
        calls=(inputs | {"cache_pow": cache[order].contiguous(), "idx_tk": renumbered.to(torch.int32)},),
    )


def more_holes(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Entries of -1 appended, and what stands beyond the length replaced by -1, change nothing."""
    lists = inputs["idx_tk"]
    pad = torch.full((len(lists), 70), -1, dtype=torch.int32)
    yield Variant(label="70 holes appended", calls=(inputs | {"idx_tk": torch.cat([lists, pad], 1)},))
    if inputs["topk_length_t"] is not None:
        beyond = torch.arange(lists.shape[1]) >= inputs["topk_length_t"][:, None]
        call = inputs | {"idx_tk": torch.where(beyond, -1, lists), "topk_length_t": None}
        yield Variant(label="length replaced by holes", calls=(call,))


def _named_records(inputs: Inputs) -> tuple[Tensor, Tensor]:
    slots = inputs["slots_t"].long()
    return slots, (slots >= 0) & (slots < inputs["cache_pow_"].shape[0] * inputs["cache_pow_"].shape[1])


def named_bytes(inputs: Inputs) -> Tensor:
    """Bytes of the records that the slots name."""
    cache, (slots, named) = inputs["cache_pow_"], _named_records(inputs)
    fmt, allowed = inputs["fmt"], torch.zeros(inputs["cache_pow_"].shape, dtype=torch.bool)
    flat, size = allowed.view(len(cache), -1), cache.shape[1]
    for slot in slots[named].tolist():
        page, offset = divmod(slot, size)
        if inputs["layout"] is PageLayout.INTERLEAVED:
            flat[page, offset * fmt.record_bytes : (offset + 1) * fmt.record_bytes] = True
        else:
            main = fmt.record_bytes - fmt.scale_bytes
            start = size * main + offset * fmt.scale_bytes
            flat[page, offset * main : (offset + 1) * main] = True
            flat[page, start : start + fmt.scale_bytes] = True
    return allowed


def reads_back(inputs: Inputs, outputs: Outputs, load: CallFn | None) -> tuple[Outputs, Outputs]:
    """What a load returns of the stored slots is the round trip of the quantiser, and the tail as it was."""
    fmt, (_, named) = inputs["fmt"], _named_records(inputs)
    expected = torch.zeros(inputs["x_td"].shape, dtype=torch.bfloat16)
    rows = inputs["x_td"][named]
    values = fake_quantize(rows[:, : fmt.channels], fmt=fmt.quant)
    expected[named] = torch.cat([values, rows[:, fmt.channels :].double()], 1).to(torch.bfloat16)
    assert load is not None
    arguments = {"cache_pow": outputs["cache_pow_"], "slots_t": inputs["slots_t"], "layout": inputs["layout"]}
    return load({**arguments, "dtype": torch.bfloat16}), {"x_td": expected}


def stored_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The rows one after the other, and in another order, leave the same bytes."""
    order = context.rng.permutation(len(inputs["x_td"])).tolist()
    shuffled = inputs | {name: inputs[name][order] for name in ("x_td", "slots_t")}
    yield Variant(label="another order", calls=(shuffled,))
    crowd = inputs["x_td"].clone()
    crowd[1:] = crowd[1:] * 2.0**20
    first = inputs["slots_t"][:1]

    def one(outputs: Outputs) -> Outputs:
        return {"x_td": load_records(outputs["cache_pow_"], first, layout=inputs["layout"])}

    yield Variant(
        label="row 0 beside huge rows",
        calls=(inputs | {"x_td": crowd},),
        join=lambda results: one(results[0]),
        expect=one,
    )


def lean(case: WideCase) -> bool:
    """Relations run where nothing but format and layout changes what they say."""
    kinds = (("kv_v32_fmla", "interleaved"), ("index_fp8_f32", "sectioned"))
    plain = case.regime == "normal" and case.page == 5 and case.dtype == "bf16" and case.tokens == 6
    return plain and (case.fmt, case.layout) in kinds


def slow_lowered(case: WideCase) -> str | None:
    """Records do not run lowered."""
    return "the lowering on the CPU has not finished a store or a load of six records after a minute"


def layer_chunks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The tokens in two chunks; the second finds the first in its past, as the reference stores it."""
    yield _chunked(inputs, [(len(inputs["x_tm"]) + 1) // 2], "two chunks", context)


def prefixes(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The first tokens without the others: as many rows less in every product."""
    t = len(inputs["x_tm"])
    for kept in sorted(({1, t // 2} if context.full else {t // 2}) & set(range(1, t))):
        rows = {name: inputs[name][:kept] for name in ("x_tm", "positions_t", "picks_tk") if inputs[name] is not None}
        yield Variant(
            label=f"the first {kept} tokens alone",
            calls=(inputs | rows,),
            expect=pick_rows(context.op, list(range(kept))),
        )


def layer_steps(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The last three tokens one by one: a decode step is the last row of a prefill."""
    t = len(inputs["x_tm"])
    yield _chunked(inputs, [t - 3, t - 2, t - 1], "the last three tokens one by one", context)


def _chunked(inputs: Inputs, cuts: list[int], label: str, context: Context) -> Variant:
    past, calls = inputs["past"], []
    for start, end in zip([0, *cuts], [*cuts, len(inputs["x_tm"])], strict=True):
        rows = {name: inputs[name][start:end] for name in ("x_tm", "positions_t")}
        picks = None if inputs["picks_tk"] is None else inputs["picks_tk"][start:end]
        calls.append(inputs | rows | {"past": past, "picks_tk": picks})
        new = stored_state(
            rows["x_tm"], inputs["weights"], rows["positions_t"], inputs["table_sr"], inputs["config"], inputs["dtype"]
        )
        past = new if past is None else past.then(new)
    return Variant(label=label, calls=tuple(calls), join=lambda rs: join_rows(context.op, rs))


def later_tokens(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The second half of the tokens replaced by finite garbage."""
    kept = len(inputs["x_tm"]) // 2
    x = inputs["x_tm"].clone()
    x[kept:] = 30.0 * x[kept:].flip(-1)
    expect: Pick = pick_rows(context.op, list(range(kept)))
    yield Variant(label="other future", calls=(inputs | {"x_tm": x},), join=lambda rs: expect(rs[0]), expect=expect)


def unpicked_removed(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Cached tokens that no query picked leave the cache; the picks are renumbered."""
    past, picks = inputs["past"], inputs["picks_tk"].long()
    s = len(past.key_sd)
    used = torch.zeros(s, dtype=torch.bool)
    used[picks[(picks >= 0) & (picks < s)]] = True
    place = torch.cumsum(used, 0) - 1
    kept = int(used.sum())
    moved = torch.where(picks < s, place[picks.clamp(0, s - 1)], picks - s + kept)
    fewer = DsaState(
        latents=Latents(rows_sd=past.latents.rows_sd[used], positions_s=past.latents.positions_s[used]),
        key_sd=past.key_sd[used],
        key_sf_s=past.key_sf_s[used],
    )
    renumbered = torch.where(picks < 0, -1, moved).to(torch.int32)
    yield Variant(label="unpicked tokens removed", calls=(inputs | {"past": fewer, "picks_tk": renumbered},))


def few_rows(case: Any) -> bool:
    """Relations make many calls: plain small cases."""
    plain = case.regime == "normal" and case.tokens == 3 and case.heads <= 4 and case.dim == 128
    return plain and (case.rope, case.key) in (("half_split", "pow2"), ("interleaved", "none"))


def few_scores(case: Any) -> bool:
    """The same for scores; 64 heads are what vendors take."""
    plain = case.regime == "normal" and case.dim == 128 and case.scale == "f32" and case.lengths == "mixed"
    return plain and (case.tokens, case.heads, case.page) in ((4, 16, 0), (4, 64, 0), (4, 16, 7), (3, 64, 64))


def long_lists(case: MlaCase) -> bool:
    """A list of several blocks, so that another split of it shows."""
    return case.regime == "normal" and case.tokens == 3 and (case.holes == "leading" or case.gap == 0)


def cut_layers(case: LayerCase) -> bool:
    """Layers that can be cut; configurations and lists differ in nothing that a cut could show."""
    return case.tokens > 9 and case.regime == "normal" and case.config in ("tiny", "records") and case.picks != "future"


def many_shuffles(case: Any) -> str | None:
    """Index rows do not run lowered."""
    return "a transform is seven shuffles of a tile, which the lowering on the CPU has not finished after a minute"


def long_layers(case: LayerCase) -> str | None:
    """A layer is fifteen launches."""
    return (
        None if case.regime in ("normal", "small") else "one regime is enough for the interpreter: judged on a device"
    )


def many_kernels(case: LayerCase) -> str | None:
    """No layer runs lowered on a CPU."""
    return "fifteen kernels in a row, which take minutes to lower: each is run by the card of its component"


def one_lowered(case: ScoreCase) -> str | None:
    """Lowered, one shape stands for all."""
    plain = case.regime == "normal" and (case.tokens, case.heads, case.dim, case.keys) == (4, 16, 128, 40)
    if not plain or case.scale != "f32" or case.lengths != "mixed" or case.page not in (0, 16):
        return "every shape is a program of its own, which takes seconds to build: one of them stands for all"
    return None


def outside_flash_mla(case: MlaCase) -> str | None:
    """Why FlashMLA's legacy sparse decode does not take a case."""
    fits = case.heads in (64, 128) and case.tokens > 0 and case.lengths == "none"
    return None if fits and not case.gap else "64 or 128 heads, whole pages, no lengths"


def outside_specialised(case: MlaCase) -> str | None:
    """Why the kernel with specialised warps does not take a case."""
    return None if case.heads % 64 == 0 else f"64·n heads only, got {case.heads}"


def outside_specialised_scores(case: ScoreCase) -> str | None:
    """Why the kernels with specialised warps do not take a case."""
    if case.heads not in (16, 32, 64, 128) or case.dim != 128 or case.page not in (0, 64):
        return f"16, 32, 64 or 128 heads of 128 channels, pages of 64 keys, got {case.id}"
    return None


def outside_deep_gemm_scores(case: ScoreCase) -> str | None:
    """Why DeepGEMM's scores do not take a case."""
    if case.heads not in (32, 64) or case.dim != 128 or case.page not in (0, 64) or not case.tokens or not case.keys:
        return f"32 or 64 heads of 128 channels, pages of 64 keys, got {case.id}"
    return None


def short_lists(case: MlaCase) -> str | None:
    """Lowered, short lists of few heads alone."""
    if case.regime != "normal" or case.topk > 20 or case.heads > 4 or case.page != 5 or case.tokens != 3:
        return "a lowered product is a plain loop: one short list stands for all"
    return None


# golden vectors


def golden_rows() -> list[RowsCase]:
    """U13: a row after rotation and transform, both pairings, with and without the transform."""
    base = RowsCase(tokens=2, heads=1)
    return [replace(base, rope=r, key=k) for r, k in product(("half_split", "interleaved"), ("pow2", "none"))]


def golden_layer(picks: str) -> list[LayerCase]:
    """A small layer, plain and over records."""
    base = LayerCase(tokens=11, picks=picks)
    return [base, replace(base, config="records", dtype="bf16", tokens=10)]


# rows

# two roundings to bf16 on either side, the second behind a sum over all channels
INDEX_ROWS = Budget(kind="index rows")

# decoded keys stand in registers beside the accumulator
_DECODED = "the accumulator fills half of the register file, decoded keys spill once a block"
DECODED = {
    "sm90": Expect(mma="wgmma", max_stack=384, reason=_DECODED),  # 320 with triton 3.8
    "sm100": Expect(mma="tcgen05", max_stack=64, reason=_DECODED),
}

QUERIES = Op(
    name="dsa_index_queries",
    reference="deeptwin.reference.dsa_index:dsa_index_queries",
    outputs=(Output(name="q_thd", rule=INDEX_ROWS, dtype=torch.bfloat16),),
    cases=cases_rows,
    draw=draw_queries,
    rows={"q_thd": 0, "positions_t": 0},
    out_rows={"q_thd": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens", only=few_rows),
        Relation(name="layout_invariant", axis="alignment of rows", only=few_rows),
        Relation(name="chunk_invariant", axis="token chunks", hook=row_chunks, only=few_rows),
        Relation(name="run_to_run", axis="repeats", only=few_rows),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dsa:dsa_index_queries_triton",
            lowered_declines=many_shuffles,
        ),
    ),
    mutants=(
        _mutant("queries_other_pairs", "U12", "half-split instead of interleaved pairs and the reverse"),
        _mutant("queries_flag_ignored", "U14", "interleaved pairs whatever the model asks for"),
        _mutant("queries_last_channels", "U38", "the last channels rotate, as in V4"),
        _mutant("queries_not_turned", "U12", "nothing rotates"),
        _mutant("queries_next_position", "U61", "rows are rotated one position on"),
        _mutant("queries_position_of_first", "U09", "every token has the position of the first"),
        _mutant("queries_untransformed", "U15", "the Hadamard transform is left out"),
        _mutant("queries_transformed_first", "U15", "the transform comes before the rotation"),
        _mutant("queries_without_factor", "U15", "the factor of the transform is left out"),
        _mutant("queries_truncated", "R1", "the rows are truncated to bf16"),
        _mutant("queries_last_head_unwritten", "U75", "the last head is left unwritten"),
        _mutant("queries_not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(_control("right_queries"),),
    golden=golden_rows,
)

KEYS_OP = Op(
    name="dsa_index_keys",
    reference="deeptwin.reference.dsa_index:dsa_index_keys",
    outputs=(Output(name="k_td", rule=INDEX_ROWS, dtype=torch.bfloat16),),
    cases=lambda full: [replace(c, heads=1) for c in cases_rows(full) if c.heads == 4],
    draw=draw_keys,
    rows={"k_td": 0, "positions_t": 0},
    out_rows={"k_td": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens", only=few_rows),
        Relation(name="layout_invariant", axis="alignment of rows", only=few_rows),
        Relation(name="run_to_run", axis="repeats", only=few_rows),
    ),
    candidates=(
        Candidate(
            name="triton", function="deeptwin.optimized.dsa:dsa_index_keys_triton", lowered_declines=many_shuffles
        ),
    ),
    builds=(
        BuildCase(
            name="keys",
            kernel="deeptwin.kernels.triton_ops.dsa_index:_index_rows",
            launch="deeptwin.parity.builds.launches.dsa:keys",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("keys_rms_norm", "U11", "the mean is not taken out: RMSNorm instead of LayerNorm"),
        _mutant("keys_not_normalised", "U11", "keys are not normalised"),
        _mutant("keys_without_bias", "U49", "the bias of the norm is left out"),
        _mutant("keys_without_weight", "U49", "the weight of the norm is left out"),
        _mutant("keys_eps_1e_3", "U39", "eps is 1e-3"),
        _mutant("keys_other_pairs", "U12", "half-split instead of interleaved pairs and the reverse"),
        _mutant("keys_flag_ignored", "U14", "interleaved pairs whatever the model asks for"),
        _mutant("keys_last_channels", "U38", "the last channels rotate, as in V4"),
        _mutant("keys_untransformed", "U16", "queries are transformed, keys are not"),
        _mutant("keys_truncated", "R1", "the rows are truncated to bf16"),
    ),
    controls=(_control("right_keys"),),
    golden=lambda: [replace(case, heads=1) for case in golden_rows()],
)

WEIGHTS = Op(
    name="dsa_index_weights",
    reference="deeptwin.reference.dsa_index:dsa_index_weights",
    outputs=(Output(name="w_th", rule=F32_PRODUCT, dtype=torch.float32),),
    cases=cases_weights,
    draw=draw_weights,
    rows={"x_tm": 0, "q_sf_th": 0},
    out_rows={"w_th": 0},
    relations=(
        Relation(
            name="chunk_invariant", axis="tokens", hook=row_chunks, only=lambda c: c.regime == "normal" and c.tokens > 1
        ),
    ),
    mutants=(
        _mutant("weights_bf16_product", "U17", "the projection of head weights is rounded to bf16"),
        _mutant("weights_bf16_matrix", "U17", "the weights of the projection are bf16"),
        _mutant("weights_without_heads", "U05", "the factor heads^-0.5 is left out"),
        _mutant("weights_without_query_scale", "U53", "the scale of the query is left out"),
        _mutant("weights_scale_of_first_head", "U58", "all heads use the scale of the first"),
        _mutant("weights_without_width", "U05", "the factor dim^-0.5 is left out"),
        _mutant("weights_positive", "U25", "negative head weights are cut off"),
    ),
    controls=(_control("right_weights"),),
    golden=lambda: [WeightsCase(tokens=2, width=24, heads=4)],
)


def _magnitudes(inputs: Inputs) -> Tensor:
    """The scores with the sign bit of every code cleared, and of every weight."""
    plain = inputs | {"w_th": inputs["w_th"].abs()}
    q = inputs["q_thd"].contiguous().view(torch.uint8) & 0x7F
    plain["q_thd"] = q.view(torch.float8_e4m3fn)
    if "cache_pow" not in inputs:
        plain["k_sd"] = (inputs["k_sd"].contiguous().view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn)
        return dsa_index_scores(**plain, num=SEMANTIC)
    cache = inputs["cache_pow"].clone()
    p, o, w = cache.shape
    cache.view(p, o * w)[:, : o * (w - 4)] &= 0x7F  # codes of all keys come before their scales
    plain["cache_pow"] = cache
    return dsa_index_scores_paged(**plain, num=SEMANTIC)


FP8_SCORES = {"scores_ts": Fp8Unit(reach=_magnitudes)}
_NAN_HIDDEN = {"scores_ts": "a maximum with zero hides the NaN of a key; an absent page is read as page 0"}
UNCLEANED = dict.fromkeys(
    ("scores_ts", "batch_invariant", "chunk_invariant", "run_to_run", "causality", "masked_equals_absent"),
    "columns that a query does not see are written, or left as they were",
)

SCORES = Op(
    name="dsa_index_scores",
    reference="deeptwin.reference.dsa_index:dsa_index_scores",
    outputs=(Output(name="scores_ts", rule=F32_SCORES, dtype=torch.float32),),
    cases=cases_scores,
    draw=draw_scores,
    rows={"q_thd": 0, "w_th": 0, "length_t": 0},
    out_rows={"scores_ts": 0},
    tile=16,
    relations=(
        Relation(name="batch_invariant", axis="queries", only=few_scores),
        Relation(name="chunk_invariant", axis="query chunks", hook=row_chunks, only=few_scores),
        Relation(name="run_to_run", axis="repeats", only=few_scores),
        Relation(name="causality", axis="unseen keys", hook=unseen_keys, only=few_scores),
        Relation(name="masked_equals_absent", axis="keys behind", hook=more_keys, only=few_scores),
    ),
    candidates=(
        Candidate(
            name="triton", function="deeptwin.optimized.dsa:dsa_index_scores_triton", lowered_declines=one_lowered
        ),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.dsa:dsa_index_scores_tilelang",
            needs=("tilelang",),
            declines=outside_specialised_scores,
        ),
        Sm90Candidate(
            name="tilelang-fp8",
            function="deeptwin.optimized.dsa:dsa_index_scores_tilelang_fp8",
            needs=("tilelang",),
            declines=outside_specialised_scores,
            rules=FP8_SCORES,
        ),
        Sm90Candidate(
            name="deep-gemm",
            function="deeptwin.optimized.dsa:dsa_index_scores_deep_gemm",
            needs=("deep_gemm",),
            declines=outside_deep_gemm_scores,
            rules=FP8_SCORES,
            unpromised=_NAN_HIDDEN,
        ),
        Sm90Candidate(
            name="deep-gemm-uncleaned",
            function="deeptwin.optimized.dsa:dsa_index_scores_deep_gemm_uncleaned",
            needs=("deep_gemm",),
            declines=outside_deep_gemm_scores,
            rules=FP8_SCORES,
            unpromised=UNCLEANED,
        ),
    ),
    builds=(
        BuildCase(
            name="h64",
            kernel="deeptwin.kernels.triton_ops.dsa_index:_score_rows",
            launch="deeptwin.parity.builds.launches.dsa:scores",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="tilelang-h64",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.index_scores_sm90:score_program",
            launch="deeptwin.parity.builds.launches.dsa_tilelang:dense_fp8_h64",
            expect={"sm90": Expect(mma="wgmma.fp8")},
        ),
        BuildCase(
            name="tilelang-exact-h64",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.index_scores_sm90:score_program",
            launch="deeptwin.parity.builds.launches.dsa_tilelang:dense_exact_h64",
            expect={"sm90": Expect(mma="wgmma")},
        ),
    ),
    mutants=(
        _mutant("relu_missing", "U24", "negative dot products count"),
        _mutant("relu_after_the_sum", "U24", "the positive part is taken of the weighted sum"),
        _mutant("relu_is_magnitude", "U24", "the magnitude stands for the positive part"),
        _mutant("nan_hidden", "U77", "a maximum with zero hides the NaN of a key"),
        _mutant("weights_made_positive", "U25", "head weights lose their sign"),
        _mutant("heads_unweighted", "U25", "heads are added without weights"),
        _mutant("key_scale_missing", "U53", "the scale of the key is left out"),
        _mutant("key_scale_of_next", "U23", "keys are read with the scale of the next one"),
        _mutant("dots_bf16", "U17", "dot products are rounded to bf16"),
        _mutant("length_ignored", "U08", "lengths are not passed to the kernel"),
        _mutant("length_of_first", "U09", "every query has the length of the first"),
        _mutant("sees_one_more", "U25", "a query sees one key too many"),
        _mutant("own_key_hidden", "U25", "a query does not see its own key"),
        _mutant("last_head_lost", "U47", "the last head is lost"),
        _mutant("first_query_for_all", "U09", "every row is scored with the first query"),
        _mutant("unseen_times_zero", "U74", "unseen keys are read, and 0 · NaN added"),
        _mutant("unseen_is_zero", "U47", "what is not seen scores 0 and beats negative scores"),
        _mutant("depends_on_batch", "U73", "even batches add in another order"),
        _mutant("scores_not_deterministic", "U20", "every second launch differs in the last bit of one element"),
    ),
    controls=(_control("right_scores"), replace(_control("scores_of_fp8_unit"), rules=FP8_SCORES)),
    golden=lambda: [ScoreCase(tokens=3, keys=9), ScoreCase(tokens=2, keys=5, regime="ties", scale="pow2")],
)

PAGED = Op(
    name="dsa_index_scores_paged",
    reference="deeptwin.reference.dsa_index:dsa_index_scores_paged",
    outputs=(Output(name="scores_ts", rule=F32_SCORES, dtype=torch.float32),),
    cases=cases_paged,
    draw=draw_paged,
    rows={"q_thd": 0, "w_th": 0, "table_tj": 0, "length_t": 0},
    out_rows={"scores_ts": 0},
    relations=(
        Relation(name="batch_invariant", axis="queries", only=few_scores),
        Relation(name="run_to_run", axis="repeats", only=few_scores),
        Relation(name="page_permutation", axis="pages, gaps between them", hook=permuted_pages, only=few_scores),
        Relation(
            name="decode_equals_prefill",
            axis="pages and dense rows",
            hook=as_rows,
            partner="dsa_index_scores",
            only=few_scores,
        ),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dsa:dsa_index_scores_paged_triton",
            lowered_declines=one_lowered,
        ),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.dsa:dsa_index_scores_paged_tilelang",
            needs=("tilelang",),
            declines=outside_specialised_scores,
        ),
        Sm90Candidate(
            name="tilelang-fp8",
            function="deeptwin.optimized.dsa:dsa_index_scores_paged_tilelang_fp8",
            needs=("tilelang",),
            declines=outside_specialised_scores,
            rules=FP8_SCORES,
        ),
        Sm90Candidate(
            name="deep-gemm",
            function="deeptwin.optimized.dsa:dsa_index_scores_paged_deep_gemm",
            needs=("deep_gemm",),
            declines=outside_deep_gemm_scores,
            rules=FP8_SCORES,
            unpromised=_NAN_HIDDEN,
        ),
    ),
    builds=(
        BuildCase(
            name="h64-pages-of-64",
            kernel="deeptwin.kernels.triton_ops.dsa_index:_score_pages",
            launch="deeptwin.parity.builds.launches.dsa:scores_paged",
            expect=PRODUCT | MATRIX,
        ),
        BuildCase(
            name="tilelang-h64-pages",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.index_scores_sm90:score_program",
            launch="deeptwin.parity.builds.launches.dsa_tilelang:paged_fp8_h64",
            expect={"sm90": Expect(mma="wgmma.fp8")},
        ),
        BuildCase(
            name="tilelang-exact-h64-pages",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.index_scores_sm90:score_program",
            launch="deeptwin.parity.builds.launches.dsa_tilelang:paged_exact_h64",
            expect={"sm90": Expect(mma="wgmma")},
        ),
    ),
    mutants=(
        _mutant("page_interleaved", "U23", "a page is read as codes and scale of one key after the other"),
        _mutant("page_sections_of_64", "U29", "scales are looked for after 64 keys whatever the page holds"),
        _mutant("page_stride_ignored", "U22", "pages are read as if they were contiguous"),
        _mutant("page_table_of_first", "U09", "every query uses the pages of the first"),
        _mutant("page_table_reversed", "U29", "the pages of a sequence are read in another order"),
        _mutant("absent_page_wraps", "U79", "page −1 is the last page"),
        _mutant("page_0_times_zero", "U74", "hidden keys are read, and 0 · NaN added"),
        _mutant("paged_length_ignored", "U08", "lengths are not passed to the kernel"),
        _mutant("scale_keeps_its_exponent", "U52", "the mantissa of the scale is dropped"),
        _mutant("paged_relu_missing", "U24", "negative dot products count"),
    ),
    controls=(_control("right_paged"), replace(_control("paged_scores_of_fp8_unit"), rules=FP8_SCORES)),
    golden=lambda: [ScoreCase(tokens=3, keys=9, page=4)],
)

SPARSE_MLA = Op(
    name="sparse_mla",
    reference="deeptwin.reference.dsa:sparse_mla",
    outputs=(
        Output(name="out_thu", rule=ATTENTION[torch.bfloat16], dtype=torch.bfloat16),
        Output(name="lse_th", rule=LSE, dtype=torch.float32),
    ),
    cases=cases_mla,
    draw=draw_mla,
    rows={"q_thd": 0, "idx_tk": 0, "topk_length_t": 0},
    out_rows={"out_thu": 0, "lse_th": 0},
    relations=(
        Relation(name="batch_invariant", axis="query tokens", hook=in_a_crowd, only=long_lists),
        Relation(name="chunk_invariant", axis="query chunks", hook=row_chunks, only=long_lists),
        Relation(name="run_to_run", axis="repeats", only=long_lists),
        Relation(name="page_permutation", axis="pages, gaps between them", hook=moved_records, only=long_lists),
        Relation(name="masked_equals_absent", axis="list entries", hook=more_holes, only=long_lists),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.dsa:sparse_mla_triton", lowered_declines=short_lists),
        Sm90Candidate(
            name="tilelang",
            function="deeptwin.optimized.dsa:sparse_mla_tilelang",
            needs=("tilelang",),
            declines=outside_specialised,
        ),
        Sm90Candidate(
            name="flash-mla",
            function="deeptwin.optimized.dsa:sparse_mla_flash_mla",
            needs=("flash_mla",),
            declines=outside_flash_mla,
            unpromised=dict.fromkeys(("batch_invariant", "chunk_invariant"), "its schedule splits lists by the batch"),
        ),
        Sm90Candidate(
            name="flash-mla-unsplit",
            function="deeptwin.optimized.dsa:sparse_mla_flash_mla_unsplit",
            needs=("flash_mla",),
            declines=outside_flash_mla,
        ),
    ),
    builds=(
        BuildCase(
            name="h128",
            kernel="deeptwin.kernels.triton_ops.sparse_mla:_attend_records",
            launch="deeptwin.parity.builds.launches.dsa:attend_h128",
            expect=DECODED | MATRIX,
        ),
        BuildCase(
            name="tilelang-specialised-h128",
            dsl="tilelang",
            kernel="deeptwin.kernels.tilelang_ops.sparse_mla_sm90:sparse_mla_program",
            launch="deeptwin.parity.builds.launches.dsa_tilelang:sm90_records_h128",
            expect={
                "sm90": Expect(
                    mma="wgmma", max_stack=32, reason="the sums leave 88 registers to who brings; 8 words spill"
                )
            },
        ),
    ),
    peers=(
        Peer(
            name="torch-sdpa",
            function="deeptwin.parity.peers.dsa:sdpa_over_records",
            needs=(),
            explains="records decoded byte by byte with struct, then torch's scaled_dot_product_attention in fp64",
            rules={"out_thu": Close(rtol=2.0**-8), "lse_th": Close(rtol=1e-6)},
            only=lambda case: case.regime != "nankey" and case.tokens <= 3 and case.keys <= 40,
        ),
    ),
    mutants=(
        _mutant("planes_swapped", "U23", "the tail is read before the scales"),
        _mutant("page_read_sectioned", "U22", "the page is read as sections"),
        _mutant("one_scale_a_record", "U23", "the first scale of a record serves all its groups"),
        _mutant("scale_of_next_group", "U54", "groups are read with the scale of the next one"),
        _mutant("scale_missing", "U53", "codes are not scaled"),
        _mutant("scale_byte_as_exponent", "U52", "the first byte of a scale is taken for a power of two"),
        _mutant("tail_dropped", "U30", "the rotary channels of the key do not enter the score"),
        _mutant("tail_quantised", "U86", "the rotary channels are rounded to e4m3"),
        _mutant("tail_deinterleaved", "U13", "the rotary key is cached as transformers does"),
        _mutant("record_stride_ignored", "U22", "pages are read as if they were contiguous"),
        _mutant("value_from_the_rotary_end", "U23", "the value is the last 512 channels of a row"),
        _mutant("subnormal_codes_as_zero", "U60", "subnormal codes are read as zero"),
        _mutant("nan_code_is_a_number", "U77", "the NaN code is read as 480"),
        _mutant("mla_scale_off_by_3_percent", "U05", "softmax scale off by 3 %"),
        _mutant("mla_weights_truncated", "R1", "softmax weights truncated to bf16"),
        _mutant("mla_lse_base_2", "U02", "LSE in base 2 where natural is declared"),
        _mutant("mla_hole_wraps", "U79", "index −1 wraps to the last record"),
        _mutant("mla_hole_times_nan", "U74", "a masked gather computes 0 · NaN"),
        _mutant("mla_length_ignored", "U08", "topk_length is not passed to the kernel"),
        _mutant("mla_upper_bound_unchecked", "U08", "indices beyond the cache are read"),
        _mutant("mla_first_list_for_all", "U09", "every query uses the list of the first"),
        _mutant("mla_empty_row_nan", "U07", "a row without keys divides 0 by 0"),
        _mutant("mla_last_key_dropped", "U01", "the last key of the list is lost"),
        _mutant("mla_split_depends_on_batch", "U73", "the split of the list depends on the batch"),
        _mutant("mla_not_deterministic", "U10", "every second launch differs in the last bit of one element"),
    ),
    controls=(_control("right_mla"), _control("right_mla_block_128"), _control("right_mla_backwards")),
    golden=lambda: [MlaCase(tokens=2, heads=2, keys=8, topk=5, lengths="mixed")],
)

_wide, _wide_control = variants("wide_records")

STORE_WIDE = Op(
    name="store_wide_records",
    reference="deeptwin.reference.kv_cache:store_records",
    outputs=(Output(name="cache_pow_", rule=Bitwise(), dtype=torch.uint8),),
    cases=cases_wide,
    draw=draw_wide_store,
    rows={"x_td": 0, "slots_t": 0},
    out_rows={},
    writes="cache_pow_",
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lean),
        Relation(name="batch_invariant", axis="rows in another order, beside others", hook=stored_apart, only=lean),
        Relation(name="changed_slots", axis="bytes of the cache", hook=named_bytes, only=lean),
        Relation(
            name="layout_round_trip", axis="writer → reader", hook=reads_back, partner="load_wide_records", only=lean
        ),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.kv_cache:store_records_triton",
            lowered_declines=slow_lowered,
        ),
    ),
    builds=(
        BuildCase(
            name="record-656",
            kernel="deeptwin.kernels.triton_ops.wide_records:_store_wide",
            launch="deeptwin.parity.builds.launches.dsa:store_656",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="byte-by-byte",
            function="deeptwin.parity.peers.dsa:store_one_by_one",
            needs=(),
            explains="FlashMLA's quantiser (scale at least 1e-4), the release code's (amax at least 1e-4), in Python",
            only=lambda case: case.tokens <= 8 and case.page == 5,
        ),
    ),
    mutants=(
        _wide("store_other_layout", "U23", "the other layout is written"),
        _wide("store_sections_of_64", "U29", "scales of a sectioned page start after 64 entries"),
        _wide("store_planes_swapped", "U23", "the tail stands before the scales"),
        _wide("store_stride_ignored", "U22", "pages are written as if they followed one another"),
        _wide("store_hole_wraps", "U79", "slot −1 wraps to the last entry"),
        _wide("store_beyond_clamped", "U79", "a slot beyond the cache goes to its last entry"),
        _wide("store_floor_of_other_writer", "U94", "the floor is on amax instead of on the scale, and the reverse"),
        _wide("store_no_floor", "U59", "an all-zero group divides 0 by 0"),
        _wide("store_scale_unrounded", "U52", "scales are not powers of two where the writer rounds them"),
        _wide("store_scale_rounded", "U53", "scales are powers of two where the writer keeps them"),
        _wide("store_scale_by_logarithm", "U56", "pow(2, ceil(log2 s)) in fp32"),
        _wide("store_scale_big_endian", "U54", "the bytes of a scale stand in the opposite order"),
        _wide("store_codes_truncated", "U60", "codes are truncated"),
        _wide("store_tail_quantised", "U86", "rotary channels are rounded to e4m3"),
        _wide("store_tail_unwritten", "U28", "the rotary channels are never written"),
        _wide("store_tail_truncated", "R2", "the rotary channels are truncated to bf16"),
        _wide("store_first_row_for_all", "U09", "every slot gets the first row"),
        _wide("store_rows_backwards", "U26", "rows and slots are paired in opposite order"),
        _wide("store_not_deterministic", "U10", "every second launch flips a bit"),
    ),
    controls=(_wide_control("right_store"),),
    golden=lambda: [
        WideCase(tokens=2, pages=1, page=2, holes=0, fmt=f, layout=lay, regime="small")
        for f, lay in zip(WIDE, ("interleaved", "interleaved", "sectioned", "sectioned"), strict=True)
    ],
)

LOAD_WIDE = Op(
    name="load_wide_records",
    reference="deeptwin.reference.kv_cache:load_records",
    outputs=(Output(name="x_td", rule=Bitwise()),),
    cases=cases_wide,
    draw=draw_wide_load,
    rows={"slots_t": 0},
    out_rows={"x_td": 0},
    relations=(
        Relation(name="run_to_run", axis="repeats", only=lean),
        Relation(name="batch_invariant", axis="rows", only=lean),
    ),
    candidates=(
        Candidate(
            name="triton", function="deeptwin.optimized.kv_cache:load_records_triton", lowered_declines=slow_lowered
        ),
    ),
    builds=(
        BuildCase(
            name="record-656",
            kernel="deeptwin.kernels.triton_ops.wide_records:_load_wide",
            launch="deeptwin.parity.builds.launches.dsa:load_656",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _wide("load_other_layout", "U23", "the other layout is read"),
        _wide("load_sections_of_64", "U29", "scales of a sectioned page are read after 64 entries"),
        _wide("load_planes_swapped", "U23", "the tail is read before the scales"),
        _wide("load_stride_ignored", "U22", "pages are read as if they followed one another"),
        _wide("load_hole_wraps", "U79", "slot −1 reads the last entry"),
        _wide("load_hole_times_zero", "U74", "slot −1 reads entry 0 times zero: 0 · NaN"),
        _wide("load_hole_unwritten", "U75", "rows of −1 are left unwritten"),
        _wide("load_beyond_clamped", "U08", "a slot beyond the cache reads its last entry"),
        _wide("load_scale_big_endian", "U54", "the bytes of a scale are read in the opposite order"),
        _wide("load_scale_exponent", "U52", "the mantissa of a scale is dropped"),
        _wide("load_one_scale_a_record", "U23", "the first scale serves all groups"),
        _wide("load_tail_dropped", "U30", "the rotary channels come back as zeros"),
        _wide("load_first_slot_for_all", "U09", "every row reads the first slot"),
        _wide("load_truncated", "R2", "values are truncated to bf16"),
        _wide("load_not_deterministic", "U10", "every second launch differs in the last bit of one element"),
    ),
    controls=(_wide_control("right_load"),),
    golden=lambda: [WideCase(tokens=3, pages=2, page=2, holes=1)],
)

LAYER_ROWS = {"x_tm": 0, "positions_t": 0, "picks_tk": 0}

LAYER = Op(
    name="dsa_attention",
    reference="deeptwin.reference.dsa:dsa_attention",
    outputs=(Output(name="y_tm", rule=MLA_BLOCK),),
    cases=cases_layer,
    draw=draw_layer,
    rows=LAYER_ROWS,
    out_rows={"y_tm": 0},
    relations=(
        Relation(name="chunk_invariant", axis="chunks after a past", hook=layer_chunks, only=cut_layers),
        Relation(name="decode_equals_prefill", axis="single steps", hook=layer_steps, only=cut_layers),
        Relation(name="causality", axis="later tokens", hook=later_tokens, only=cut_layers),
        Relation(
            name="masked_equals_absent",
            axis="tokens that nobody picked",
            hook=unpicked_removed,
            only=lambda case: case.past > 0,
        ),
    ),
    mutants=(
        _layer("magnitude_missing", "U05", "the softmax scale misses mscale²"),
        _layer("magnitude_of_other_field", "U06", "the softmax scale is taken from the other magnitude field"),
        _layer("future_picks_attended", "U25", "the causal mask behind the selection is missing"),
        _layer("picks_of_last_query", "U25", "all queries attend to the list of the last"),
        _layer("latents_unnormalised", "U11", "latents are not normalised"),
        _layer("past_dropped", "U27", "the cached tokens are not read"),
        _layer("unpicked_mass_counted", "U08", "the denominator counts tokens that were not picked"),
    ),
    controls=(_layer_control("right_layer"),),
    golden=lambda: golden_layer("some")[:1],
)

LAYER_RECORDS = Op(
    name="dsa_attention_records",
    reference="deeptwin.reference.dsa:dsa_attention",
    outputs=(Output(name="y_tm", rule=MLA_BLOCK),),
    cases=cases_records,
    draw=draw_layer,
    rows=LAYER_ROWS,
    out_rows={"y_tm": 0},
    relations=(
        # a prefix alone sees no later token either, so causality needs no variant of its own
        Relation(name="batch_invariant", axis="numbers of tokens", hook=prefixes, only=cut_layers),
    ),
    candidates=(
        Candidate(
            name="triton",
            function="deeptwin.optimized.dsa:dsa_attention_triton",
            interpreter_declines=long_layers,
            lowered_declines=many_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="absorbed-queries",
            kernel="deeptwin.kernels.triton_ops.head_product:_head_product",
            launch="deeptwin.parity.builds.launches.dsa:absorb_h128",
            expect=PRODUCT | MATRIX,
        ),
    ),
    mutants=(
        _layer("latents_unquantised", "U86", "latents are attended before their quantiser"),
        _layer("latent_floor_on_amax", "U94", "the floor is on amax where the writer floors the scale"),
        _layer("rotary_key_quantised", "U86", "the rotary key is quantised too"),
    ),
    controls=(_layer_control("right_layer"),),
    golden=lambda: golden_layer("some")[1:],
)

# twice the worst of 50 seeds: see TRANSFORMERS of the mla card, whose layer this is
TRANSFORMERS = Close(rtol=4e-6)
EXPLAINS = "fp32 library products and cosines; picks as its own indexer makes them: the same sets in every row"


def transformers_takes(case: LayerCase) -> bool:
    """What DeepseekV32Attention can be configured to do, from position 0 and without a past."""
    return case.config == "tiny" and case.dtype == "fp32" and case.past == 0 and case.start == 0


FREE = Op(
    name="dsa_attention_free",
    reference="deeptwin.reference.dsa:dsa_attention",
    outputs=(
        # over quantised keys a near tie picks another token: only relations are exact there
        Output(name="y_tm", rule={torch.float32: MLA_BLOCK[torch.float32], torch.bfloat16: Close(rtol=1.0)}),
    ),
    cases=cases_free,
    draw=draw_layer,
    rows=LAYER_ROWS,
    out_rows={"y_tm": 0},
    relations=(
        Relation(name="chunk_invariant", axis="chunks after a past", hook=layer_chunks, only=cut_layers),
        Relation(name="decode_equals_prefill", axis="single steps", hook=layer_steps, only=cut_layers),
        Relation(name="causality", axis="later tokens", hook=later_tokens, only=cut_layers),
    ),
    peers=(
        Peer(
            name="transformers-prefill",
            function="deeptwin.parity.peers.dsa:transformers_prefill",
            needs=("transformers",),
            explains=EXPLAINS,
            rules={"y_tm": TRANSFORMERS},
            only=transformers_takes,
        ),
        Peer(
            name="transformers-steps",
            function="deeptwin.parity.peers.dsa:transformers_steps",
            needs=("transformers",),
            explains=EXPLAINS,
            rules={"y_tm": TRANSFORMERS},
            only=transformers_takes,
        ),
    ),
    mutants=(
        _layer("indexer_interleaved", "U12", "first release of V3.2: the indexer rotates interleaved pairs"),
        _layer("head_weights_relu", "U25", "negative head weights are cut off"),
        _layer("index_relu_missing", "U24", "negative dot products count"),
        _layer("index_keys_not_normalised", "U11", "index keys skip their layer norm"),
        _layer("one_token_fewer", "U19", "one token fewer is picked"),
    ),
    controls=(_layer_control("right_layer_free"),),
    golden=lambda: golden_layer("free"),
)

CARD = Card(
    component="dsa",
    summary="V3.2: lightning indexer (FP8 keys), sparse latent attention over 656-byte records, the layer",
    contract={
        "dtypes": "rows and heads bf16; index codes e4m3 with one fp32 scale a row; head weights and scores fp32",
        "rounding": "norm, rotation and transform each to bf16; dots, sum over heads and its scaling to fp32; "
        "attention as sparse_attn over bf16 values of the records",
        "indexer": "the first r channels rotate, in pairs that IndexerRope names; ReLU before the signed weight",
        "FP8 unit": "a row of its own rule: dots cut 13 bits below the largest of 32 products, as SM90's unit does",
        "selection": "s at or before the query; ties to the earlier token; all while there are no more than topk",
        "picks": "after the query, below 0 or beyond the cache: holes",
        "records": "512 e4m3, 4 fp32 scales, 64 bf16, one after the other; writers: FlashMLA floors the scale at 1e-4, "
        "the release code amax",
        "index pages": "the codes of all keys, then their fp32 scales",
        "NaN": "unseen keys, unlisted records and gaps may hold anything; a NaN that is seen stays visible",
        "memory": "pages of wide records begin at multiples of 4 bytes",
    },
    ops=(QUERIES, KEYS_OP, WEIGHTS, SCORES, PAGED, SPARSE_MLA, STORE_WIDE, LOAD_WIDE, LAYER, LAYER_RECORDS, FREE),
    equivalents=(
        Equivalent(name="the indexer's pairs at or below topk tokens", reason="everything is picked: no score decides"),
        Equivalent(
            name="Hadamard on both sides without a quantiser", reason="the transform is orthonormal: no score changes"
        ),
        Equivalent(
            name="one positive factor on all head weights of a query", reason="it scales every score of the row alike"
        ),
    ),
)
