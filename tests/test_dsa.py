"""Attention of V3.2: the indexer, records, layers; laws of the reference, then what both sides refuse."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.dsa import (
    dsa_attention_triton,
    dsa_index_keys_triton,
    dsa_index_queries_triton,
    dsa_index_scores_deep_gemm,
    dsa_index_scores_deep_gemm_uncleaned,
    dsa_index_scores_paged_deep_gemm,
    dsa_index_scores_paged_tilelang,
    dsa_index_scores_paged_tilelang_fp8,
    dsa_index_scores_paged_triton,
    dsa_index_scores_tilelang,
    dsa_index_scores_tilelang_fp8,
    dsa_index_scores_triton,
    sparse_mla_flash_mla,
    sparse_mla_flash_mla_unsplit,
    sparse_mla_tilelang,
    sparse_mla_triton,
)
from deeptwin.optimized.providers import flash_mla_lists
from deeptwin.parity import goldens
from deeptwin.parity.card import case_rng, load_card
from deeptwin.parity.cards.dsa import CONFIGS, RECORDS, ScoreCase, index_config, layer_weights, stored_state, table_of
from deeptwin.parity.judge import judge
from deeptwin.parity.mutants.dsa import last_head_lost, scores_of_fp8_unit
from deeptwin.parity.mutants.dsa_layer import Faults, layer_with
from deeptwin.parity.oracles import OracleSet
from deeptwin.parity.outcome import Status
from deeptwin.parity.peers.dsa import TINY, build, run
from deeptwin.reference.config import (
    FP8_1X128,
    FP8_1X128_POW2,
    INDEX_FP8_F32,
    INDEX_FP8_POW2,
    KV_V32_DEMO,
    KV_V32_FMLA,
    DsaConfig,
    IndexerRope,
    PageLayout,
    RecordFormat,
    RopeConfig,
)
from deeptwin.reference.dsa import dsa_attention, dsa_picks, dsa_project, sparse_mla
from deeptwin.reference.dsa_index import (
    dsa_index_keys,
    dsa_index_queries,
    dsa_index_scores,
    dsa_index_scores_paged,
    dsa_index_weights,
)
from deeptwin.reference.dsa_state import DsaState, DsaWeights
from deeptwin.reference.kv_cache import load_records, pack_records, store_records, unpack_records
from deeptwin.reference.mla import mla_absorbed
from deeptwin.reference.numerics import CONTRACT, SEMANTIC, Numerics
from deeptwin.reference.quant import quantize
from deeptwin.reference.rope import rope_frequencies, rope_table, softmax_scale
from deeptwin.reference.sparse_attn import sparse_attn_decode
from deeptwin.reference.topk import topk

INTERLEAVED, SECTIONED = PageLayout.INTERLEAVED, PageLayout.SECTIONED
CARD = load_card("dsa")
V3 = RopeConfig(rope_dim=64, theta=10000.0, yarn=None)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def layer(config: DsaConfig, tokens: int, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of a layer over `tokens` tokens, the indexer picking."""
    return {
        "x_tm": draw(seed, tokens, config.mla.hidden, dtype=dtype),
        "weights": layer_weights(config, rng(seed + 1), "normal", dtype),
        "positions_t": torch.arange(tokens),
        "table_sr": table_of(config, tokens + 1),
        "picks_tk": None,
        "config": config,
        "dtype": dtype,
    }


def picked(arguments: dict[str, Any], num: Numerics = CONTRACT) -> tuple[list[set[int]], Tensor]:
    """The sets that the indexer picks, and the scores."""
    shared = {name: arguments[name] for name in ("config", "dtype")}
    first = [arguments[name] for name in ("x_tm", "weights", "positions_t", "table_sr")]
    _, latent, state = dsa_project(*first, **shared, num=num)
    picks, scores = dsa_picks(first[0], latent, *first[1:], state, **shared, num=num)
    return [{i for i in row if i >= 0} for row in picks.tolist()], scores


# properties of the reference


def test_numbers_of_the_released_model() -> None:
    assert (KV_V32_FMLA.record_bytes, INDEX_FP8_F32.record_bytes) == (656, 132) == (512 + 4 * 4 + 64 * 2, 128 + 4)
    assert 61 * (656 + 132) == 48068
    assert softmax_scale(192, _v3_yarn()) == pytest.approx(0.1352337789, rel=1e-9)
    # the factors of head weights: 64^-0.5 = 0.125 and 128^-0.5, together 0.0110485435
    ones = torch.ones(1, 64)
    weights = dsa_index_weights(torch.ones(1, 1), torch.ones(64, 1), ones, index_dim=128, num=SEMANTIC)
    assert weights[0, 0].item() == pytest.approx(0.0110485435, rel=1e-8)


def _v3_yarn() -> Any:
    from deeptwin.parity.cards.mla import V3_YARN

    return V3_YARN


def test_the_floors_of_the_two_writers() -> None:
    """U94: FlashMLA floors the scale at 1e-4, so 2^-13; the release code floors amax, so 2^-22."""
    zeros = torch.zeros(1, 576)
    for fmt, exponent in ((KV_V32_FMLA, -13), (KV_V32_DEMO, -22)):
        scales = pack_records(zeros, fmt=fmt)[0, 512:528].clone().view(torch.float32)
        assert scales.tolist() == [2.0**exponent] * 4
    tiny = torch.full((1, 576), 1e-3)
    values = [unpack_records(pack_records(tiny, fmt=fmt), dtype=torch.float32) for fmt in (KV_V32_FMLA, KV_V32_DEMO)]
    assert values[0][0, 0].item() == 2.0**-10  # 1e-3 / 2^-13 = 8.19 is nearest to 8
    assert values[1][0, 0].item() == 2.0**-18 * 256  # 1e-3 / 2^-18 = 262.1 is nearest to 256
    # above both floors the bytes are the same
    rows = draw(2, 3, 576)
    assert torch.equal(pack_records(rows, fmt=KV_V32_FMLA), pack_records(rows, fmt=KV_V32_DEMO))


def test_bytes_of_a_record_by_hand() -> None:
    x = torch.zeros(1, 576)
    x[0, 0], x[0, 128], x[0, 575] = 448.0, 1.5, -2.0
    record = pack_records(x, fmt=KV_V32_FMLA)[0]
    # 448 / 1 is code 0x7E; 1.5 / 2^-8 = 384, code 0x7C; -2 in bf16 is 0xC000, little-endian
    assert (record[0].item(), record[128].item()) == (0x7E, 0x7C)
    assert record[512:528].clone().view(torch.float32).tolist() == [1.0, 2.0**-8, 2.0**-13, 2.0**-13]
    assert record[-2:].tolist() == [0x00, 0xC0]


@pytest.mark.parametrize("layout", PageLayout, ids=lambda layout: layout.value)
@pytest.mark.parametrize("fmt", [KV_V32_FMLA, INDEX_FP8_POW2], ids=lambda fmt: fmt.name)
def test_writer_and_reader_agree_about_places(layout: PageLayout, fmt: RecordFormat) -> None:
    """U22, U23: constants and scales of their own for every token of a page of 256."""
    tokens = torch.arange(256)
    x = torch.exp2(tokens % 8)[:, None].expand(256, fmt.width).to(torch.bfloat16) * 3
    cache = torch.full((2, 256, fmt.record_bytes), 0xFF, dtype=torch.uint8)
    store_records(cache, x, tokens + 256, layout=layout, fmt=fmt)
    assert torch.equal(load_records(cache, tokens + 256, layout=layout), x.double())
    assert (cache[0] == 0xFF).all()


def test_index_pages_hold_codes_and_then_scales() -> None:
    """A page of 64 keys: 64 · 128 bytes of codes, then 64 fp32 scales."""
    k = draw(3, 64, 128)
    cache = torch.zeros(1, 64, 132, dtype=torch.uint8)
    store_records(cache, k, torch.arange(64), layout=SECTIONED, fmt=INDEX_FP8_F32)
    codes, sf = quantize(k, fmt=FP8_1X128)
    flat = cache.flatten()
    assert torch.equal(flat[: 64 * 128], codes.view(torch.uint8).flatten())
    assert torch.equal(flat[64 * 128 :].clone().view(torch.float32), sf[:, 0])


@pytest.mark.parametrize(("rope", "slot"), [("half_split", 2), ("interleaved", 1)])
def test_a_unit_vector_at_position_one(rope: str, slot: int) -> None:
    """U12: four rotary channels; half-split writes the sine into channel 2, interleaved into channel 1."""
    config = index_config(4, 16, rope, "none")
    table = rope_table(torch.arange(2), rope_frequencies(config.mla.rope))
    q = torch.zeros(1, 1, 16)
    q[0, 0, 0] = 1.0
    y = dsa_index_queries(q, table, torch.tensor([1]), config=config, dtype=torch.float32)[0, 0]
    expected = torch.zeros(16, dtype=torch.float64)
    expected[0], expected[slot] = math.cos(1.0), math.sin(1.0)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("position", [0, 1, 4095])
def test_a_key_after_its_rotation(position: int) -> None:
    """U13: pinned, so that no refactor brings the interleaved pairs back: the first channels, halves apart."""
    config = index_config(64, 128, "half_split", "none")
    table = rope_table(torch.arange(4096), rope_frequencies(V3))
    k = torch.zeros(1, 1, 128)
    k[0, 0, 0], k[0, 0, 33], k[0, 0, 64] = 1.0, 2.0, 5.0
    y = dsa_index_queries(k, table, torch.tensor([position]), config=config, dtype=torch.float32)[0, 0]
    angle = position * 10000.0 ** (-1 / 32)  # of the second pair (1, 33)
    expected = {
        0: math.cos(position),
        32: math.sin(position),
        1: -2 * math.sin(angle),
        33: 2 * math.cos(angle),
        64: 5.0,
    }
    for channel, value in expected.items():
        assert y[channel].item() == pytest.approx(value, abs=6e-4)
    assert y[65:].abs().max() == 0


def test_both_flags_give_other_rows() -> None:
    """U14: a kernel that ignores the flag returns equal rows for both."""
    x, table = draw(4, 2, 3, 128), rope_table(torch.arange(9), rope_frequencies(V3))
    rows = [
        dsa_index_queries(x, table, torch.tensor([3, 8]), config=index_config(64, 128, rope, "none"))
        for rope in ("half_split", "interleaved")
    ]
    assert (rows[0] != rows[1]).any(-1).all()


def test_keys_have_a_layer_norm_with_a_bias() -> None:
    config = index_config(64, 128, "half_split", "none")
    k = draw(5, 4, 128, dtype=torch.float32) * 3 + 7
    weight, bias = draw(6, 128, dtype=torch.float32), draw(7, 128, dtype=torch.float32)
    table = rope_table(torch.arange(1), rope_frequencies(V3))
    y = dsa_index_keys(k, weight, bias, table, torch.zeros(4, dtype=torch.int64), config=config, num=SEMANTIC)
    expected = torch.nn.functional.layer_norm(k.double(), (128,), weight.double(), bias.double(), 1e-6)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


def scored(q: Tensor, k: Tensor, w: Tensor, *, sf: Tensor | None = None, length: int | None = None) -> list[float]:
    """Scores of one query of exact codes."""
    e4m3 = torch.float8_e4m3fn
    sf = torch.ones(len(k)) if sf is None else sf
    lengths = int32([len(k) if length is None else length])
    rows = dsa_index_scores(q[None].to(e4m3), k.to(e4m3), sf, w[None], lengths)
    return rows[0].tolist()


def test_the_positive_part_is_taken_per_head() -> None:
    """U24: dots (-1, +1) and weights (1, 1) give 1, not 0."""
    q = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    assert scored(q, torch.tensor([[1.0, 5.0]]), torch.ones(2)) == [1.0]
    # signed weights make negative scores; the scale of the key multiplies them
    assert scored(q, torch.tensor([[1.0, 5.0]]), torch.tensor([1.0, -3.0]), sf=torch.tensor([0.25])) == [-0.75]
    assert scored(q, torch.ones(3, 2), torch.ones(2), length=2) == [1.0, 1.0, -math.inf]


def test_head_weights_keep_a_difference_that_bf16_loses() -> None:
    """U17: two heads, one key each, weights apart by 2^-10: the order of the keys follows fp32."""
    x, w = torch.ones(1, 1), torch.tensor([[1.0], [1.0 + 2.0**-10]])
    weights = dsa_index_weights(x, w, torch.ones(1, 2), index_dim=1)
    q, k = torch.eye(2), torch.eye(2)
    scores = scored(q, k, weights[0].float())
    assert scores[1] > scores[0]
    assert w[1].bfloat16() == w[0].bfloat16()


def test_scores_of_pages_are_those_of_rows() -> None:
    q_q, _ = quantize(draw(8, 2 * 16, 128), fmt=FP8_1X128_POW2)
    k = draw(9, 21, 128)
    codes, sf = quantize(k, fmt=FP8_1X128_POW2)
    cache = torch.full((5, 8, 132), 0xFF, dtype=torch.uint8)
    store_records(cache, k, torch.cat([torch.arange(24, 40), torch.arange(5)]), layout=SECTIONED, fmt=INDEX_FP8_POW2)
    table, w, lengths = int32([[3, 4, 0]] * 2), draw(10, 2, 16, dtype=torch.float32), int32([21, 7])
    q = q_q.view(2, 16, 128)
    paged = dsa_index_scores_paged(q, cache, w, table, lengths)
    assert torch.equal(paged[:, :21], dsa_index_scores(q, codes, sf[:, 0], w, lengths))
    assert (paged[:, 21:] == -math.inf).all()


@pytest.mark.parametrize("num", [SEMANTIC, CONTRACT], ids=lambda num: num.name)
@pytest.mark.parametrize("name", ["tiny", "records"])
def test_at_or_below_topk_it_is_dense_latent_attention(name: str, num: Numerics) -> None:
    """Section 4.5, 1: T = k exactly; the same cast policy, so the same bits."""
    config = replace(CONFIGS[name], latent=None)
    arguments = layer(config, config.topk)
    sparse = dsa_attention(**arguments, num=num)
    weights = arguments["weights"].mla
    shared = {name: arguments[name] for name in ("x_tm", "positions_t", "table_sr", "dtype")}
    dense = mla_absorbed(**shared, weights=weights, config=config.mla, num=num)
    torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-14)


def test_the_first_release_is_right_up_to_topk_tokens_and_wrong_beyond() -> None:
    """The interleaved indexer: not a bit differs while everything is picked, and the picks part as soon as not."""
    config = replace(RECORDS, mla=replace(RECORDS.mla, rope=replace(RECORDS.mla.rope, theta=2.0, yarn=None)))
    wrong = replace(config, indexer_rope=IndexerRope.INTERLEAVED)
    short = layer(config, config.topk)
    assert torch.equal(dsa_attention(**short), dsa_attention(**short | {"config": wrong}))
    long = layer(config, 120)
    right, other = dsa_attention(**long), dsa_attention(**long | {"config": wrong})
    assert torch.equal(right[: config.topk], other[: config.topk])
    sets, wrong_sets = picked(long)[0], picked(long | {"config": wrong})[0]
    overlap = [len(a & b) / len(a) for a, b in zip(sets[20:], wrong_sets[20:], strict=True)]
    assert np.mean(overlap) < 0.8
    assert (right[20:] - other[20:]).norm() > 0.3 * right[20:].norm()


def test_a_transform_on_queries_alone_picks_other_tokens() -> None:
    """U16: invisible at or below topk tokens, too."""
    arguments = layer(RECORDS, 40, dtype=torch.bfloat16)
    right, one_sided = (layer_with(Faults(transform=how)) for how in ("both", "query_only"))
    parted = (right(**arguments) != one_sided(**arguments)).any(-1)
    assert not parted[: RECORDS.topk].any()
    assert parted[RECORDS.topk + 4 :].float().mean() > 0.8


def test_ties_at_zero_go_to_the_earlier_token_on_both_paths() -> None:
    """U89: two index heads tie at the k-th place; prefill and single steps pick the same tokens all the same."""
    config = replace(TINY, index_heads=2)
    arguments = layer(config, 40, seed=5)
    sets, scores = picked(arguments)
    kth = [sorted(row[: i + 1], reverse=True) for i, row in enumerate(scores.tolist())]
    tied = [i for i, row in enumerate(kth) if i >= config.topk and row[config.topk - 1] == row[config.topk]]
    assert tied  # the case is what it says
    whole = dsa_attention(**arguments)
    past = stored_state(
        arguments["x_tm"][:36], arguments["weights"], torch.arange(36), arguments["table_sr"], config, torch.float32
    )
    for i in range(36, 40):
        one = {"x_tm": arguments["x_tm"][i : i + 1], "positions_t": torch.tensor([i])}
        assert torch.equal(dsa_attention(**arguments | one, past=past)[0], whole[i])
        state = stored_state(
            one["x_tm"], arguments["weights"], one["positions_t"], arguments["table_sr"], config, torch.float32
        )
        past = past.then(state)
    assert all(len(s) == min(i + 1, config.topk) for i, s in enumerate(sets))


def test_the_picks_do_not_depend_on_where_the_text_stands_or_on_a_factor() -> None:
    arguments = layer(TINY, 30, seed=9)
    sets, scores = picked(arguments, SEMANTIC)
    table = table_of(TINY, 80)
    shifted = arguments | {"positions_t": torch.arange(40, 70), "table_sr": table}
    moved, scores_there = picked(shifted, SEMANTIC)
    seen = torch.ones(30, 30).tril().bool()
    torch.testing.assert_close(scores[seen], scores_there[seen], rtol=1e-4, atol=1e-5)
    assert sum(a != b for a, b in zip(sets, moved, strict=True)) == 0
    weights = replace(arguments["weights"], w_head_hm=arguments["weights"].w_head_hm * 8)
    assert picked(arguments | {"weights": weights}, SEMANTIC)[0] == sets


def test_picks_in_the_future_are_holes() -> None:
    arguments = layer(TINY, 6)
    everything = torch.arange(6, dtype=torch.int32).expand(6, 6)
    causal = torch.where(everything <= torch.arange(6)[:, None], everything, -1)
    found = [dsa_attention(**arguments | {"picks_tk": picks}) for picks in (everything, causal)]
    assert torch.equal(found[0], found[1])
    nothing = dsa_attention(**arguments | {"picks_tk": torch.full((6, 3), -1, dtype=torch.int32)})
    assert nothing.abs().max() == 0


def test_attention_over_records_is_attention_over_their_values() -> None:
    cache = torch.full((3, 4, 656), 0xFF, dtype=torch.uint8)
    slots = torch.tensor([11, 0, 5, 7, 2])
    store_records(cache, draw(20, 5, 576), slots, layout=INTERLEAVED, fmt=KV_V32_FMLA)
    rows = load_records(cache, torch.arange(12), layout=INTERLEAVED).bfloat16().view(3, 4, 576)
    q, idx, length = draw(21, 2, 3, 576), int32([[11, 5, -1, 7], [2, 99, 0, 3]]), int32([4, 3])
    over_records = sparse_mla(q, cache, idx, length, scale=0.1)
    over_values = sparse_attn_decode(q, rows, idx, None, length, scale=0.1, value_dim=512)
    for a, b in zip(over_records, over_values, strict=True):
        assert torch.equal(a, b)


def test_a_query_without_records() -> None:
    cache = torch.full((1, 2, 656), 0xFF, dtype=torch.uint8)
    out, lse = sparse_mla(draw(22, 1, 2, 576), cache, int32([[-1, 2]]), None, scale=0.1)
    assert out.abs().max() == 0
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("steps", [0, 4])
def test_transformers_agrees_stage_by_stage(steps: int) -> None:
    """Scores, picked sets and outputs of DeepseekV32Attention in fp32, whole and through its cache."""
    pytest.importorskip("transformers")
    peer = build(TINY, seed=3)
    x = draw(30, 40, 64, dtype=torch.float32)
    out, picks, scores = run(peer, x, steps=steps)
    arguments = layer(TINY, 40) | {"x_tm": x, "weights": peer.weights}
    ours, our_scores = picked(arguments, SEMANTIC)
    seen = torch.ones(40, 40).tril().bool()
    assert ((our_scores - scores)[seen].norm() / our_scores[seen].norm()).item() < 1e-6
    assert ours == picks
    y = dsa_attention(**arguments, num=SEMANTIC)
    assert ((y - out).norm() / y.norm()).item() < 2e-6


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("dsa") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("dsa", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

ROWS: dict[str, Any] = {
    "table_sr": torch.zeros(4, 64),
    "positions_t": torch.zeros(2, dtype=torch.int64),
    "config": index_config(64, 128, "half_split", "pow2"),
}
KEYS: dict[str, Any] = {"k_td": draw(1, 2, 128), "weight_d": draw(2, 128), "bias_d": draw(3, 128), **ROWS}
QUERIES: dict[str, Any] = {"q_thd": draw(1, 2, 3, 128), **ROWS}
WEIGHTS: dict[str, Any] = {
    "x_tm": draw(1, 2, 8),
    "w_hm": torch.zeros(4, 8),
    "q_sf_th": torch.ones(2, 4),
    "index_dim": 128,
}
E4M3 = torch.float8_e4m3fn
SHARED: dict[str, Any] = {
    "q_thd": torch.zeros(2, 16, 128).to(E4M3),
    "w_th": torch.zeros(2, 16),
    "length_t": int32([1, 1]),
}
SCORES: dict[str, Any] = SHARED | {"k_sd": torch.zeros(3, 128).to(E4M3), "k_sf_s": torch.ones(3)}
PAGED: dict[str, Any] = SHARED | {
    "cache_pow": torch.zeros(2, 4, 132, dtype=torch.uint8),
    "table_tj": torch.zeros(2, 1, dtype=torch.int32),
}
MLA: dict[str, Any] = {
    "q_thd": draw(1, 2, 3, 576),
    "cache_pow": torch.zeros(2, 4, 656, dtype=torch.uint8),
    "idx_tk": torch.zeros(2, 5, dtype=torch.int32),
    "topk_length_t": None,
    "scale": 1.0,
}


def raises(error: type[Exception], name: str, change: dict[str, Any], good: dict[str, Any], *functions: Any) -> None:
    for function in functions:
        with pytest.raises(error, match=f"^{name}: "):
            function(**good | change)


def test_index_rows_refuse_values() -> None:
    both = (dsa_index_queries, dsa_index_queries_triton)
    raises(ValueError, "q_thd", {"q_thd": draw(1, 2, 3, 64)}, QUERIES, *both)
    raises(ValueError, "table_sr", {"table_sr": torch.zeros(4, 32)}, QUERIES, *both)
    raises(ValueError, "positions_t", {"positions_t": torch.zeros(3, dtype=torch.int64)}, QUERIES, *both)
    raises(ValueError, "positions_t", {"positions_t": torch.tensor([0, 4])}, QUERIES, dsa_index_queries)
    both = (dsa_index_keys, dsa_index_keys_triton)
    raises(ValueError, "k_td", {"k_td": draw(1, 2, 3, 128)}, KEYS, *both)
    for name in ("weight_d", "bias_d"):
        raises(ValueError, name, {name: draw(1, 64)}, KEYS, *both)


def test_index_rows_refuse_dtypes() -> None:
    raises(TypeError, "table_sr", {"table_sr": torch.zeros(4, 64).double()}, QUERIES, dsa_index_queries)
    raises(TypeError, "table_sr", {"table_sr": torch.zeros(4, 64).double()}, QUERIES, dsa_index_queries_triton)
    raises(TypeError, "positions_t", {"positions_t": torch.zeros(2)}, QUERIES, dsa_index_queries)
    raises(TypeError, "q_thd", {"q_thd": torch.zeros(2, 3, 128)}, QUERIES, dsa_index_queries_triton)
    raises(TypeError, "dtype", {"dtype": torch.float64}, QUERIES, dsa_index_queries)
    both = (dsa_index_keys, dsa_index_keys_triton)
    raises(TypeError, "k_td", {"k_td": torch.zeros(2, 128, dtype=torch.int32)}, KEYS, *both)
    raises(TypeError, "bias_d", {"bias_d": torch.zeros(128, dtype=torch.int32)}, KEYS, *both)


def test_head_weights_are_refused() -> None:
    raises(ValueError, "w_hm", {"w_hm": torch.zeros(4, 7)}, WEIGHTS, dsa_index_weights)
    raises(ValueError, "q_sf_th", {"q_sf_th": torch.ones(2, 3)}, WEIGHTS, dsa_index_weights)
    raises(ValueError, "index_dim", {"index_dim": 0}, WEIGHTS, dsa_index_weights)
    raises(TypeError, "w_hm", {"w_hm": torch.zeros(4, 8).bfloat16()}, WEIGHTS, dsa_index_weights)
    raises(TypeError, "q_sf_th", {"q_sf_th": torch.ones(2, 4).double()}, WEIGHTS, dsa_index_weights)
    raises(TypeError, "x_tm", {"x_tm": torch.zeros(2, 8, dtype=torch.int32)}, WEIGHTS, dsa_index_weights)


def test_scores_are_refused() -> None:
    rows, pages = (dsa_index_scores, dsa_index_scores_triton), (dsa_index_scores_paged, dsa_index_scores_paged_triton)
    for good, functions in ((SCORES, rows), (PAGED, pages)):
        raises(ValueError, "w_th", {"w_th": torch.zeros(2, 15)}, good, *functions)
        raises(ValueError, "length_t", {"length_t": int32([1])}, good, *functions)
        raises(TypeError, "w_th", {"w_th": torch.zeros(2, 16).bfloat16()}, good, functions[1])
        raises(TypeError, "length_t", {"length_t": torch.zeros(2)}, good, *functions)
        raises(TypeError, "q_thd", {"q_thd": torch.zeros(2, 16, 128, dtype=torch.uint8)}, good, *functions)
    raises(ValueError, "k_sd", {"k_sd": torch.zeros(3, 64).to(E4M3)}, SCORES, *rows)
    raises(ValueError, "k_sf_s", {"k_sf_s": torch.ones(2)}, SCORES, *rows)
    raises(TypeError, "k_sd", {"k_sd": torch.zeros(3, 128)}, SCORES, *rows)
    raises(TypeError, "k_sf_s", {"k_sf_s": torch.ones(3).double()}, SCORES, *rows)
    raises(ValueError, "cache_pow", {"cache_pow": torch.zeros(2, 4, 131, dtype=torch.uint8)}, PAGED, *pages)
    raises(ValueError, "table_tj", {"table_tj": int32([[0]])}, PAGED, *pages)
    raises(TypeError, "cache_pow", {"cache_pow": torch.zeros(2, 4, 132)}, PAGED, *pages)
    raises(TypeError, "table_tj", {"table_tj": torch.zeros(2, 1, dtype=torch.int64)}, PAGED, *pages)


def test_scores_of_one_chip_are_refused_elsewhere() -> None:
    rows = (
        dsa_index_scores_tilelang,
        dsa_index_scores_tilelang_fp8,
        dsa_index_scores_deep_gemm,
        dsa_index_scores_deep_gemm_uncleaned,
    )
    pages = (
        dsa_index_scores_paged_tilelang,
        dsa_index_scores_paged_tilelang_fp8,
        dsa_index_scores_paged_deep_gemm,
    )
    raises(ValueError, "k_sf_s", {"k_sf_s": torch.ones(2)}, SCORES, *rows)
    raises(TypeError, "k_sd", {"k_sd": torch.zeros(3, 128)}, SCORES, *rows)
    raises(NotImplementedError, "q_thd", {}, SCORES, *rows)
    raises(ValueError, "table_tj", {"table_tj": int32([[0]])}, PAGED, *pages)
    raises(TypeError, "cache_pow", {"cache_pow": torch.zeros(2, 4, 132)}, PAGED, *pages)
    raises(NotImplementedError, "q_thd", {}, PAGED, *pages)


def test_the_adapters_of_deep_gemm_pass_contiguous_tensors_and_clamp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, which takes every page for present and every length for one within the keys."""

    def mqa(q: Tensor, kv: tuple[Tensor, Tensor], w: Tensor, start: Tensor, end: Tensor, cleaned: bool) -> Tensor:
        assert q.is_contiguous()
        assert all(x.is_contiguous() for x in kv)
        assert int(end.max()) <= len(kv[0])
        scores = dsa_index_scores(q, *kv, w, end if cleaned else torch.full_like(end, len(kv[0])))
        return scores.float()

    def paged(q: Tensor, cache: Tensor, w: Tensor, end: Tensor, table: Tensor, *rest: object) -> Tensor:
        assert int(table.min()) >= 0
        assert int(table.max()) < len(cache)
        assert end.shape == (len(q), 1)
        return dsa_index_scores_paged(q[:, 0], cache[:, :, 0], w, table, end[:, 0]).nan_to_num(neginf=7.0).float()

    library = SimpleNamespace(
        fp8_gemm_nt=None,
        fp8_mqa_logits=mqa,
        fp8_paged_mqa_logits=paged,
        get_paged_mqa_logits_metadata=lambda *_: None,
        get_num_sms=lambda: 132,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    op = CARD.op("dsa_index_scores")
    inputs = op.draw(ScoreCase(tokens=4, keys=40, heads=64), case_rng("dsa", op.name, "adapter", 0))
    inputs["length_t"] = inputs["length_t"] + 1  # one of them lies beyond the keys
    inputs["k_sf_s"] = inputs["k_sf_s"].nan_to_num(1.0)
    right = dsa_index_scores(**inputs).float()
    assert torch.equal(dsa_index_scores_deep_gemm(**inputs), right)
    raw = dsa_index_scores_deep_gemm_uncleaned(**inputs)
    assert torch.equal(raw[right.isfinite()], right[right.isfinite()])
    assert bool(raw[right == -math.inf].isfinite().any())
    op = CARD.op("dsa_index_scores_paged")
    inputs = op.draw(ScoreCase(tokens=1, keys=70, heads=64, page=64), case_rng("dsa", op.name, "adapter", 0))
    assert torch.equal(dsa_index_scores_paged_deep_gemm(**inputs), dsa_index_scores_paged(**inputs).float())
    few = op.draw(ScoreCase(tokens=1, keys=70, heads=64, page=16), case_rng("dsa", op.name, "adapter", 0))
    raises(NotImplementedError, "cache_pow", {}, few, dsa_index_scores_paged_deep_gemm)


def test_the_fp8_unit_has_a_rule_of_its_own() -> None:
    """What it makes of a score passes that rule and no other; a lost head fails both."""
    op = CARD.op("dsa_index_scores")
    unit = next(row for row in op.controls if row.rules)
    inputs = op.draw(ScoreCase(tokens=4, keys=40, heads=64), case_rng("dsa", op.name, "unit", 0))
    oracles = OracleSet(op, inputs)
    cut = {"scores_ts": scores_of_fp8_unit(**inputs)}
    assert judge(cut, oracles, dict(unit.rules))[0].status is Status.PASSED
    assert judge(cut, oracles)[0].status is Status.MISMATCH
    lost = {"scores_ts": last_head_lost(**inputs)}
    assert judge(lost, oracles, dict(unit.rules))[0].status is Status.MISMATCH


def test_attention_over_records_is_refused() -> None:
    both = (sparse_mla, sparse_mla_triton, sparse_mla_tilelang)
    flash = (sparse_mla_flash_mla, sparse_mla_flash_mla_unsplit)
    every_row = (*both, *flash)
    raises(ValueError, "q_thd", {"q_thd": draw(1, 2, 3, 512)}, MLA, *every_row)
    raises(ValueError, "cache_pow", {"cache_pow": torch.zeros(2, 4, 655, dtype=torch.uint8)}, MLA, *every_row)
    raises(ValueError, "idx_tk", {"idx_tk": int32([0, 1])}, MLA, *every_row)
    raises(ValueError, "scale", {"scale": 0.0}, MLA, *every_row)
    raises(TypeError, "cache_pow", {"cache_pow": torch.zeros(2, 4, 656)}, MLA, *every_row)
    raises(TypeError, "idx_tk", {"idx_tk": torch.zeros(2, 5, dtype=torch.int64)}, MLA, *every_row)
    raises(ValueError, "cache_pow", {"cache_pow": torch.zeros(2, 4, 528, dtype=torch.uint8)}, MLA, *every_row)
    raises(ValueError, "topk_length_t", {"topk_length_t": int32([1])}, MLA, *both)
    raises(TypeError, "topk_length_t", {"topk_length_t": torch.zeros(2)}, MLA, *both)
    raises(TypeError, "dtype", {"dtype": torch.float64}, MLA, sparse_mla)
    raises(TypeError, "q_thd", {"q_thd": torch.zeros(2, 3, 576)}, MLA, *every_row[1:])


def test_the_kernel_with_specialised_warps_declines() -> None:
    good = MLA | {"q_thd": draw(1, 2, 64, 576)}
    of_v4 = torch.zeros(1, 4, 584, dtype=torch.uint8)
    apart = torch.zeros(2, 4 * 656 + 8, dtype=torch.uint8)[:, : 4 * 656].unflatten(1, (4, 656))
    askew = torch.zeros(2 * 4 * 656 + 8, dtype=torch.uint8)[8:].view(2, 4, 656)
    raises(NotImplementedError, "q_thd", {"q_thd": draw(1, 2, 3, 576)}, good, sparse_mla_tilelang)
    vast = torch.empty(15_000_000, 4, 656, dtype=torch.uint8, device="meta")
    for cache in (of_v4, apart, askew, vast):
        raises(NotImplementedError, "cache_pow", {"cache_pow": cache}, good, sparse_mla_tilelang)
    raises(NotImplementedError, "q_thd", {}, good, sparse_mla_tilelang)


def test_the_adapter_of_flash_mla_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # as if it were not installed
    good = MLA | {"q_thd": draw(1, 2, 64, 576)}
    apart = torch.zeros(2, 4 * 656 + 32, dtype=torch.uint8)[:, : 4 * 656].unflatten(1, (4, 656))
    for name, change in {
        "topk_length_t": {"topk_length_t": int32([1, 1])},
        "q_thd": {"q_thd": draw(1, 2, 3, 576)},
        "cache_pow": {"cache_pow": apart},
        "flash_mla": {},
    }.items():
        raises(NotImplementedError, name, change, good, sparse_mla_flash_mla, sparse_mla_flash_mla_unsplit)


def test_the_adapter_of_flash_mla_pads_lists_and_turns_the_lse_of_an_empty_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, with its conventions: what is passed, and what becomes of what it returns."""

    schedules: list[Any] = []

    def forward(
        q: Tensor, cache: Tensor, table: None, lengths: None, width: int, schedule: Any, **how: Any
    ) -> tuple[Tensor, Tensor]:
        lists = how.pop("indices")
        assert (table, lengths, width, lists.shape) == (None, None, 512, (2, 1, 64))
        assert how == {"softmax_scale": 1.0, "is_fp8_kvcache": True, "use_legacy": True}
        assert lists.min() == -1  # nothing but -1 is a hole to the library
        schedules.append(schedule)
        out, lse = sparse_mla(q[:, 0], cache[:, :, 0], lists[:, 0], None, scale=1.0)
        return out.bfloat16()[:, None], lse.float().masked_fill(lse == -torch.inf, torch.inf)[:, :, None]

    library = SimpleNamespace(
        flash_mla_with_kvcache=forward,
        get_mla_metadata=lambda: (SimpleNamespace(), None),
        flash_mla_sparse_fwd=lambda use_legacy: None,
    )
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    given = MLA | {"q_thd": draw(1, 2, 64, 576), "idx_tk": int32([[0, 3, -7], [-1, 10**6, -1]])}
    right, right_lse = sparse_mla(**given)
    for function in (sparse_mla_flash_mla, sparse_mla_flash_mla, sparse_mla_flash_mla_unsplit):
        out, lse = function(**given)
        assert torch.equal(out, right.bfloat16())
        assert torch.equal(lse, right_lse.float())
        assert bool(torch.isneginf(lse[1]).all())
    clean = given | {"idx_tk": flash_mla_lists(given["idx_tk"], 8, 64)}
    assert torch.equal(sparse_mla_flash_mla(**clean, clean_lists=True)[0], right.bfloat16())
    # a schedule is what a call leaves in it: none is used twice
    assert len({id(schedule) for schedule in schedules}) == 4
    assert [vars(schedules[i]) for i in (0, 1, 3)] == [{}, {}, {}]
    assert schedules[2].num_splits.tolist() == [0, 1, 2]
    assert schedules[2].tile_scheduler_metadata[:, [0, 1, 3]].tolist() == [[2, 0, 1], [0, 0, 1], [1, 1, 1]]


def test_kernels_decline_and_refuse_buffers() -> None:
    pytest.importorskip("triton")
    askew = torch.zeros(2 * 4 * 656 + 1, dtype=torch.uint8)[1:].view(2, 4, 656)
    raises(NotImplementedError, "cache_pow", {"cache_pow": askew}, MLA, sparse_mla_triton)
    raises(NotImplementedError, "q_thd", {"q_thd": draw(1, 2, 576, 3).mT}, MLA, sparse_mla_triton)
    of_v4 = torch.zeros(1, 4, 584, dtype=torch.uint8)
    raises(NotImplementedError, "cache_pow", {"cache_pow": of_v4}, MLA, sparse_mla_triton)
    apart = torch.zeros(2 * 4 * 132 + 1, dtype=torch.uint8)[1:].view(2, 4, 132)
    raises(NotImplementedError, "cache_pow", {"cache_pow": apart}, PAGED, dsa_index_scores_paged_triton)
    strided = {"k_sd": torch.zeros(3, 256, dtype=torch.uint8)[:, ::2].view(E4M3)}
    raises(NotImplementedError, "k_sd", strided, SCORES, dsa_index_scores_triton)
    narrow = {"config": index_config(8, 24, "half_split", "none"), "table_sr": torch.zeros(4, 8)}
    raises(NotImplementedError, "x_thd", narrow | {"q_thd": draw(1, 2, 3, 24)}, QUERIES, dsa_index_queries_triton)
    nothing = {"weight_d": draw(1, 24), "bias_d": draw(1, 24), "k_td": draw(1, 2, 24)}
    raises(NotImplementedError, "x_thd", narrow | nothing, KEYS, dsa_index_keys_triton)
    for good, function in (
        (QUERIES, dsa_index_queries_triton),
        (SCORES, dsa_index_scores_triton),
        (PAGED, dsa_index_scores_paged_triton),
    ):
        raises(ValueError, "out", {"out": torch.empty(2, 1, dtype=_out_dtype(good))}, good, function)
        raises(TypeError, "out", {"out": torch.empty(2, 1, dtype=torch.float64)}, good, function)
    raises(ValueError, "out", {"out": torch.empty(2, 5, dtype=torch.bfloat16)}, KEYS, dsa_index_keys_triton)
    raises(TypeError, "out", {"out": torch.empty(2, 128)}, KEYS, dsa_index_keys_triton)
    short = (torch.empty(2, 3, 511, dtype=torch.bfloat16), torch.empty(2, 3))
    raises(ValueError, "out", {"out": short}, MLA, sparse_mla_triton)
    wrong = (torch.empty(2, 3, 512), torch.empty(2, 3))
    raises(TypeError, "out", {"out": wrong}, MLA, sparse_mla_triton)


def _out_dtype(good: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if good is QUERIES else torch.float32


def test_configurations_are_refused() -> None:
    bad: dict[str, dict[str, Any]] = {
        "mla": {"mla": replace(TINY.mla, q_lora_rank=0)},
        "index_heads": {"index_heads": 0},
        "topk": {"topk": 0},
        "index_dim": {"index_dim": 4},
        "index_key": {"index_key": INDEX_FP8_F32},
        "latent": {"latent": KV_V32_FMLA},
        "norm_eps": {"norm_eps": 0.0},
    }
    for name, change in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            replace(TINY, **change)
    odd = RecordFormat(name="odd", channels=48, quant=replace(FP8_1X128, group=48))
    with pytest.raises(ValueError, match=r"^index_dim: expected a power of two"):
        replace(TINY, index_dim=48, index_key=odd)


def test_layers_and_states_are_refused() -> None:
    arguments = layer(TINY, 3)
    bad: dict[str, Any] = {"x_tm": draw(1, 2, 64), "picks_tk": torch.zeros(2, 4, dtype=torch.int32)}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            dsa_attention(**arguments | {name: value})
    with pytest.raises(TypeError, match=r"^picks_tk: "):
        dsa_attention(**arguments | {"picks_tk": torch.zeros(3, 4, dtype=torch.int64)})
    first = [arguments[name] for name in ("x_tm", "weights", "positions_t", "table_sr")]
    with pytest.raises(ValueError, match=r"^positions_t: "):
        dsa_project(first[0], first[1], torch.arange(2), first[3], config=TINY)
    _, latent, state = dsa_project(*first, config=TINY, dtype=torch.float32)
    assert isinstance(state, DsaState)
    with pytest.raises(ValueError, match=r"^key_sd: "):
        state.then(replace(state, key_sd=state.key_sd[:, :-1]))
    big = layer(TINY, 9)
    again = [big[name] for name in ("x_tm", "weights", "positions_t", "table_sr")]
    _, latent, state = dsa_project(*again, config=TINY, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^q_sf_th: "):
        dsa_picks(again[0][:-1], latent, *again[1:], state, config=TINY, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^state: expected indexer.wq_b.weight"):
        DsaWeights.from_state_dict(_mla_state(), prefix="", config=TINY)


def test_the_composition_is_refused() -> None:
    good = layer(RECORDS, 3, dtype=torch.bfloat16)
    good.pop("dtype")
    raises(ValueError, "x_tm", {"x_tm": draw(1, 2, 64)}, good, dsa_attention_triton)
    raises(ValueError, "picks_tk", {"picks_tk": torch.zeros(2, 4, dtype=torch.int32)}, good, dsa_attention_triton)
    raises(TypeError, "x_tm", {"x_tm": draw(1, 3, 64).float()}, good, dsa_attention_triton)
    raises(TypeError, "picks_tk", {"picks_tk": torch.zeros(3, 4, dtype=torch.int64)}, good, dsa_attention_triton)
    raises(NotImplementedError, "config", {"config": TINY}, good, dsa_attention_triton)


def _mla_state() -> dict[str, Tensor]:
    from deeptwin.parity.cards.mla import _state

    return _state(TINY.mla, rng(1), "normal", torch.float32)


def test_a_selection_of_all_is_what_topk_picks() -> None:
    scores = draw(40, 3, 8, dtype=torch.float32)
    assert topk(scores, int32([8, 3, 0]), k=8).tolist()[1] == [0, 1, 2, -1, -1, -1, -1, -1]
