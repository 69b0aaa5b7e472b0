"""The indexer: laws of the reference, then what both sides refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.indexer import (
    index_keys_triton,
    index_queries_triton,
    index_scores_paged_triton,
    index_scores_triton,
    index_weights_triton,
)
from deeptwin.parity import goldens, index_memory
from deeptwin.parity.card import load_card
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference.config import INDEX_FP4, RopeConfig, ScoreOrder
from deeptwin.reference.indexer import (
    index_keys,
    index_queries,
    index_scores,
    index_scores_paged,
    index_visible,
    index_weights,
)
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.quant import dequantize, quantize
from deeptwin.reference.rope import rope_frequencies, rope_table
from deeptwin.reference.topk import candidate_blocks, compact_lengths, restore_indices, topk

CARD = load_card("indexer")
Judged = Callable[[str], list[Outcome]]
ORDERS = pytest.mark.parametrize("order", list(ScoreOrder), ids=lambda order: order.value)
TABLE = rope_table(torch.arange(64), rope_frequencies(RopeConfig(rope_dim=64, theta=160000.0, yarn=None)))
INF = math.inf


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)


def records(rows: Tensor) -> Tensor:
    flat = rows.reshape(-1, 128)
    return torch.cat(quantize(flat, fmt=INDEX_FP4.quant), 1).reshape(*rows.shape[:-1], 68)


def values(records_w: Tensor) -> Tensor:
    flat = records_w.reshape(-1, 68)
    decoded = dequantize(flat[:, :64], flat[:, 64:], fmt=INDEX_FP4.quant, num=SEMANTIC)
    return decoded.reshape(*records_w.shape[:-1], 128)


def row(**channels: float) -> Tensor:
    x = torch.zeros(128, dtype=torch.bfloat16)
    for name, value in channels.items():
        x[int(name[1:])] = value
    return x


def paged(k_sw: Tensor, entries: int, order: list[int], pages: int) -> tuple[Tensor, Tensor]:
    """A cache with the keys on the pages of `order`, all other bytes 0xFF, and the table."""
    cache = torch.full((pages, entries, 68), 0xFF, dtype=torch.uint8)
    flat = cache.view(pages, -1)
    for j, record in enumerate(k_sw):
        page, slot = order[j // entries], j % entries
        flat[page, slot * 64 : slot * 64 + 64] = record[:64]
        flat[page, entries * 64 + slot * 4 : entries * 64 + slot * 4 + 4] = record[64:]
    return cache, int32([order])


def scored(q: Tensor, k: Tensor, w: Tensor, length: Tensor, order: ScoreOrder, num: Numerics = CONTRACT) -> Tensor:
    first = torch.zeros(len(q), dtype=torch.int32)
    return index_scores(q, k, w, first, length, None, block_size=8, order=order, num=num)


# properties of the reference


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_an_entry_is_seen_with_its_last_token(ratio: int) -> None:
    """U25: entry j is visible at p iff (j + 1) ratio <= p + 1, at every residue."""
    positions = torch.arange(3 * ratio + 2, dtype=torch.int32)
    seen = index_visible(positions, ratio=ratio)
    assert seen.tolist() == [
        sum((j + 1) * ratio <= p + 1 for j in range(len(positions))) for p in range(len(positions))
    ]
    assert index_visible(int32([ratio - 2, ratio - 1, ratio]), ratio=ratio).tolist() == (
        [0, 1, 2] if ratio == 1 else [0, 1, 1]
    )


def test_a_record_by_hand() -> None:
    # groups of 32 with largest magnitudes 6, 12, 0.75 and 0: scales 1, 2, 1/8, and 2^-126 of the floor
    q = row(c0=6.0, c1=-0.5, c2=0.25, c3=0.75, c32=12.0, c33=1.0, c70=0.75, c71=-0.3125)
    found = index_queries(q.view(1, 1, 128), TABLE, int32([0]))[0, 0]  # position 0 turns nothing
    assert found.shape == (68,)
    assert found[64:].tolist() == [127, 128, 124, 1]
    # 6 is code 7, −0.5 code 9; the tie 0.25 goes to 0, the tie 0.75 to 1.0 (code 2)
    assert found[:2].tolist() == [0x97, 0x20]
    assert found[16].item() == 0x17  # 12 / 2 = 6, 1 / 2 = 0.5
    assert found[35].item() == 0xC7  # 0.75 · 8 = 6; −0.3125 · 8 = −2.5, a tie, to −2 (code 12)


def test_rope_turns_interleaved_pairs_of_the_last_channels() -> None:
    """U12: at position 1 the first pair of the rotary slice turns by one radian, into channel 65."""
    found = values(index_queries(row(c64=1.0, c0=1.0).view(1, 1, 128), TABLE, int32([1])))[0, 0]
    assert found[0] == 1.0
    assert abs(found[64].item() - math.cos(1)) < 0.1
    assert abs(found[65].item() - math.sin(1)) < 0.1
    assert not found[66:].any()


def test_keys_are_normalised_before_they_are_rotated() -> None:
    lat, wk = draw(1, 5, 32), draw(2, 128, 32)
    weight = torch.ones(128, dtype=torch.bfloat16)
    positions = torch.arange(5) * 2
    found = values(index_keys(lat, wk, weight, TABLE, positions, eps=1e-20))
    # the scale of the latent does not matter, and 1e-20 is small beside it
    small = values(index_keys(lat * 2.0**-30, wk, weight, TABLE, positions, eps=1e-20))
    assert torch.equal(found, small)
    assert (found.square().mean(-1).sqrt() - 1).abs().max() < 0.15
    assert not values(index_keys(lat * 0, wk, weight, TABLE, positions, eps=1e-20)).any()


def test_weights_are_rounded_and_scaled_by_a_power_of_two() -> None:
    x, w = draw(3, 4, 96), draw(4, 32, 96)
    found = index_weights(x, w, scale=2.0**-6)
    plain = (x.double() @ w.double().T).float().bfloat16().double()
    assert torch.equal(found, plain * 2.0**-6)


@ORDERS
@pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
def test_relu_is_taken_of_every_head(order: ScoreOrder, num: Numerics) -> None:
    """U24: dots −1 and +1 with weights 1 and 1 give 1."""
    q = records(torch.stack([row(c0=-1.0), row(c0=1.0)])[None])
    k = records(row(c0=1.0)[None])
    w = torch.ones(1, 2, dtype=torch.bfloat16)
    assert scored(q, k, w, int32([1]), order, num).tolist() == [[1.0]]
    assert scored(q, k, w, int32([0]), order, num).tolist() == [[-INF]]


@ORDERS
def test_scores_follow_the_formula(order: ScoreOrder) -> None:
    q, k, w = records(draw(5, 3, 8, 128)), records(draw(6, 40, 128)), draw(7, 3, 8)
    exact = scored(q, k, w, int32([40, 17, 0]), order, SEMANTIC)
    dots = torch.einsum("thd,sd->ths", values(q), values(k)).relu()
    plain = torch.einsum("th,ths->ts", w.double(), dots)
    hidden = torch.arange(40) >= torch.tensor([[40], [17], [0]])
    torch.testing.assert_close(exact, plain.masked_fill(hidden, -INF), rtol=1e-12, atol=1e-12)
    for num in (CONTRACT, RIVAL):
        near = scored(q, k, w, int32([40, 17, 0]), order, num)
        bound = 1e-5 if order is ScoreOrder.FP32 else 0.05
        assert (near - exact).nan_to_num().abs().max() < bound * plain.abs().max()


@ORDERS
def test_negated_weights_negate_and_zero_weights_tie(order: ScoreOrder) -> None:
    q, k, w = records(draw(8, 2, 8, 128)), records(draw(9, 20, 128)), draw(10, 2, 8)
    full = int32([20, 20])
    assert torch.equal(scored(q, k, -w, full, order), -scored(q, k, w, full, order))
    zero = scored(q, k, w * 0, full, order)
    assert not zero.any()
    assert topk(zero.float(), full, k=4).tolist() == [[0, 1, 2, 3]] * 2


def test_a_chain_rounds_once() -> None:
    """Heads 0 and 4 add −2^-30 and 7 · 37/256: 259/256 less a little, so 258/256; two roundings give 260/256."""
    heads = [row() for _ in range(8)]
    heads[0], heads[4] = row(c32=2.0**-20), row(c0=6.0, c1=1.0)
    q, k = records(torch.stack(heads)[None]), records(row(c0=1.0, c1=1.0, c32=1.0)[None])
    w = torch.zeros(1, 8, dtype=torch.bfloat16)
    w[0, 0], w[0, 4] = -(2.0**-10), 37 / 256
    assert scored(q, k, w, int32([1]), ScoreOrder.BF16_CHAINS).item() == 258 / 256
    assert scored(q, k, w, int32([1]), ScoreOrder.BF16_RELEASE).item() == 260 / 256
    assert scored(q, k, w, int32([1]), ScoreOrder.FP32).item() == 259 / 256


def test_four_chains_take_every_fourth_head() -> None:
    # 256 in chain 0 swallows the 1 of the same chain, a tie to even, and not that of chain 1
    for other, total in ((4, 256.0), (1, 256.0), (2, 256.0)):
        w = torch.zeros(1, 8, dtype=torch.bfloat16)
        w[0, 0], w[0, other] = 256.0, 1.0
        q, k = records(row(c0=1.0).expand(1, 8, 128)), records(row(c0=1.0)[None])
        assert scored(q, k, w, int32([1]), ScoreOrder.BF16_CHAINS).item() == total
    # three ones: in one chain each is lost; in chain 1 they add up to 3 first, and 259 is a tie that goes to 260
    for places, total in (((4, 8, 12), 256.0), ((1, 5, 9), 260.0)):
        w = torch.zeros(1, 16, dtype=torch.bfloat16)
        w[0, 0] = 256.0
        w[0, list(places)] = 1.0
        q, k = records(row(c0=1.0).expand(1, 16, 128)), records(row(c0=1.0)[None])
        assert scored(q, k, w, int32([1]), ScoreOrder.BF16_CHAINS).item() == total
        assert scored(q, k, w, int32([1]), ScoreOrder.FP32).item() == 259.0


@ORDERS
def test_candidates_and_pages_have_the_bits_of_the_whole_row(order: ScoreOrder) -> None:
    q, k, w = records(draw(11, 4, 8, 128)), records(draw(12, 45, 128)), draw(13, 4, 8)
    lengths, first = int32([45, 9, 0, 30]), torch.zeros(4, dtype=torch.int32)
    whole = index_scores(q, k, w, first, lengths, None, block_size=8, order=order)
    cache, table = paged(k, 7, [4, 0, 6, 2, 8, 1, 5], 9)
    tables = table.expand(4, -1)
    assert torch.equal(index_scores_paged(q, cache, w, tables, lengths, None, block_size=8, order=order)[:, :45], whole)
    blocks = candidate_blocks(whole, lengths, block_size=8, k=3)
    compact = index_scores(q, k, w, first, lengths, blocks, block_size=8, order=order)
    entry = (blocks.long()[:, :, None] * 8 + torch.arange(8)).flatten(1)
    known = (entry >= 0) & (entry < lengths[:, None])
    assert torch.equal(compact, torch.where(known, whole.gather(1, entry.clamp(0, 44)), -INF))
    in_pages = index_scores_paged(q, cache, w, tables, lengths, blocks, block_size=8, order=order)
    assert torch.equal(in_pages, compact)
    # the whole of the selection, by way of the candidates
    kept = compact_lengths(blocks, lengths, block_size=8)
    found = restore_indices(topk(compact, kept, k=5), blocks, block_size=8)
    allowed = torch.full_like(whole, -INF).scatter(1, torch.where(known, entry, 0), compact)
    assert torch.equal(found[0], topk(allowed, lengths, k=5)[0])


@ORDERS
def test_unseen_memory_may_hold_anything(order: ScoreOrder) -> None:
    """U74: bytes 0xFF are NaN scales; none of them spreads, and a seen one stays visible."""
    q, k, w = records(draw(14, 2, 8, 128)), records(draw(15, 12, 128)), draw(16, 2, 8)
    clean = scored(q, k, w, int32([5, 0]), order)
    poisoned = k.clone()
    poisoned[5:] = 0xFF
    assert torch.equal(scored(q, poisoned, w, int32([5, 0]), order), clean)
    seen = scored(q, poisoned, w, int32([6, 0]), order)
    assert seen[0, 5].isnan()
    assert torch.equal(seen[:, :5], clean[:, :5])


def test_packed_sequences_do_not_see_each_other() -> None:
    """U37: three sequences in one buffer, each as alone."""
    q, k, w = records(draw(17, 3, 8, 128)), records(draw(18, 16, 128)), draw(19, 3, 8)
    first, lengths = int32([0, 3, 7]), int32([3, 4, 9])
    packed = index_scores(q, k, w, first, lengths, None, block_size=8, order=ScoreOrder.BF16_CHAINS)
    for i in range(3):
        own = k[first[i] : first[i] + lengths[i]]
        alone = scored(q[i : i + 1], own, w[i : i + 1], lengths[i : i + 1], ScoreOrder.BF16_CHAINS)
        assert torch.equal(packed[i, : lengths[i]], alone[0])
        assert (packed[i, lengths[i] :] == -INF).all()


def test_places_without_a_key_are_hidden() -> None:
    q, k, w = records(draw(20, 2, 2, 128)), records(draw(21, 4, 128)), draw(22, 2, 2)
    first = int32([2, -1])
    found = index_scores(q, k, w, first, int32([4, 4]), None, block_size=8, order=ScoreOrder.FP32)
    assert found.isinf().tolist() == [[False, False, True, True], [True, False, False, False]]
    cache, _ = paged(k, 2, [0, 1], 2)
    tables = int32([[1, -1, 0], [2, 0, 2**31 - 1]])
    hidden = index_scores_paged(q, cache, w, tables, int32([6, 6]), None, block_size=8, order=ScoreOrder.FP32)
    assert hidden.isinf().tolist() == [[False, False, True, True, False, False], [True, True, False, False, True, True]]


def test_the_measuring_command_measures() -> None:
    """Heads x queries x keys never stand in memory at once; here they would be 512 MiB."""
    found = index_memory.measure(keys=16384, queries=128, order=ScoreOrder.FP32)
    assert found["bytes_of_all_products_at_once"] == 2**29
    assert found["peak_memory_growth_bytes"] < 2**28


@pytest.mark.parametrize(("t", "s"), [(0, 4), (2, 0)])
def test_nothing_to_do(t: int, s: int) -> None:
    q, k, w = records(draw(23, t, 2, 128)), records(draw(24, s, 128)), draw(25, t, 2)
    found = scored(q, k, w, int32([s] * t), ScoreOrder.BF16_CHAINS)
    assert found.shape == (t, s)
    none = torch.zeros(t, 0, dtype=torch.int32)
    empty = torch.zeros(0, 8, 68, dtype=torch.uint8)
    lengths = int32([0] * t)
    assert index_scores_paged(q, empty, w, none, lengths, None, block_size=8, order=ScoreOrder.FP32).shape == (t, 0)


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("indexer") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged: Judged) -> None:
    outcomes = [o for o in judged("indexer") if o.check == "batch_invariant" and o.status is Status.PASSED]
    invariant = {op.name for op in CARD.ops for r in op.relations if r.name == "batch_invariant"}
    promised = {(op.name, row.name) for op in CARD.ops for row in op.candidates if op.name in invariant}
    # the other orders are the same kernel with another epilogue
    others = {"index_scores_fp32", "index_scores_once", "index_scores_release"}
    assert invariant >= {op.name for op in CARD.ops} - {"index_visible", *others}
    assert promised <= {(o.op, o.candidate) for o in outcomes}


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

QUERY, KEY, WEIGHT = records(draw(1, 2, 4, 128)), records(draw(2, 6, 128)), draw(3, 2, 4)
LENGTHS = int32([6, 3])
SCORE: dict[str, Any] = {
    "q_thw": QUERY,
    "k_sw": KEY,
    "w_th": WEIGHT,
    "first_t": int32([0, 0]),
    "length_t": LENGTHS,
    "blocks_tk": int32([[0], [0]]),
    "block_size": 8,
    "order": ScoreOrder.FP32,
}
PAGED = {("cache_pow" if n == "k_sw" else "table_tj" if n == "first_t" else n): x for n, x in SCORE.items()} | {
    "cache_pow": KEY.view(2, 3, 68),
    "table_tj": int32([[0, 1], [1, 0]]),
}
BAD_SCORE_VALUES: dict[str, Any] = {
    "q_thw": QUERY[..., :66],
    "w_th": WEIGHT[:, :3],
    "length_t": int32([1]),
    "blocks_tk": int32([0]),
    "block_size": 0,
}
BAD_SCORE_DTYPES: dict[str, Any] = {
    "q_thw": QUERY.float(),
    "w_th": WEIGHT.to(torch.int32),
    "length_t": LENGTHS.long(),
    "blocks_tk": torch.zeros(2, 1),
}


@pytest.mark.parametrize("name", [*BAD_SCORE_VALUES, "k_sw", "first_t"])
def test_values_of_scores_are_refused(name: str) -> None:
    bad = BAD_SCORE_VALUES | {"k_sw": torch.zeros(6, 584, dtype=torch.uint8), "first_t": int32([0])}
    for function in (index_scores, index_scores_triton):
        with pytest.raises(ValueError, match=f"^{name}: "):
            function(**SCORE | {name: bad[name]})
    name = {"k_sw": "cache_pow", "first_t": "table_tj"}.get(name, name)
    bad |= {"cache_pow": torch.zeros(2, 3, 132, dtype=torch.uint8), "table_tj": int32([[0]])}
    for paged_function in (index_scores_paged, index_scores_paged_triton):
        with pytest.raises(ValueError, match=f"^{name}: "):
            paged_function(**PAGED | {name: bad[name]})


@pytest.mark.parametrize("name", [*BAD_SCORE_DTYPES, "k_sw", "first_t"])
def test_dtypes_of_scores_are_refused(name: str) -> None:
    bad = BAD_SCORE_DTYPES | {"k_sw": KEY.to(torch.int8), "first_t": torch.zeros(2)}
    for function in (index_scores, index_scores_triton):
        with pytest.raises(TypeError, match=f"^{name}: "):
            function(**SCORE | {name: bad[name]})
    name = {"k_sw": "cache_pow", "first_t": "table_tj"}.get(name, name)
    bad |= {"cache_pow": torch.zeros(2, 3, 68), "table_tj": torch.zeros(2, 2)}
    for paged_function in (index_scores_paged, index_scores_paged_triton):
        with pytest.raises(TypeError, match=f"^{name}: "):
            paged_function(**PAGED | {name: bad[name]})


def test_a_wrong_record_width_names_the_known_one() -> None:
    with pytest.raises(ValueError, match=r"expected records of 68 bytes, got shape \(6, 584\)"):
        index_scores(**SCORE | {"k_sw": torch.zeros(6, 584, dtype=torch.uint8)})


KEYS: dict[str, Any] = {
    "lat_sc": draw(1, 3, 32),
    "wk_dc": draw(2, 128, 32),
    "norm_d": draw(3, 128),
    "table_ir": TABLE,
    "positions_s": torch.arange(3),
    "eps": 1e-20,
}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("lat_sc", draw(1, 3)),
        ("wk_dc", draw(2, 128, 31)),
        ("wk_dc", draw(2, 64, 32)),
        ("eps", 0.0),
    ],
)
def test_values_of_keys_are_refused(name: str, bad: Any) -> None:
    for function in (index_keys, index_keys_triton):
        arguments = KEYS | ({"norm_d": draw(3, 64)} if name == "wk_dc" and len(bad) == 64 else {}) | {name: bad}
        with pytest.raises(ValueError, match=f"^{name}"):
            function(**arguments)
    with pytest.raises(ValueError, match=r"^positions"):
        index_keys(**KEYS | {"positions_s": torch.tensor([0, 1, 64])})


@pytest.mark.parametrize("name", ["lat_sc", "wk_dc", "table_ir", "positions_s"])
def test_dtypes_of_keys_are_refused(name: str) -> None:
    bad = {"table_ir": TABLE.double(), "positions_s": torch.zeros(3)}.get(name, KEYS[name].to(torch.int32))
    for function in (index_keys, index_keys_triton):
        with pytest.raises(TypeError, match=f"^{name.removesuffix('_s')}"):
            function(**KEYS | {name: bad})


def test_bad_queries_are_refused() -> None:
    for function in (index_queries, index_queries_triton):
        with pytest.raises(ValueError, match=r"^q_thd: expected 128 channels"):
            function(draw(1, 2, 3, 64), TABLE, int32([0, 1]))
        with pytest.raises(ValueError, match=r"^positions_t: "):
            function(draw(1, 2, 3, 128), TABLE, int32([0]))
        with pytest.raises(TypeError, match=r"^table_"):
            function(draw(1, 2, 3, 128), TABLE.double(), int32([0, 1]))
    with pytest.raises(ValueError, match=r"^table_ir: "):
        index_queries_triton(draw(1, 2, 3, 128), TABLE[:, :63], int32([0, 1]))
    with pytest.raises(TypeError, match=r"^q_thd: "):
        index_queries_triton(draw(1, 2, 3, 128).float(), TABLE, int32([0, 1]))


def test_bad_weights_and_positions_are_refused() -> None:
    for function in (index_weights, index_weights_triton):
        with pytest.raises(ValueError, match=r"^w_hm: "):
            function(draw(1, 2, 8), draw(2, 4, 7), scale=1.0)
        with pytest.raises(ValueError, match=r"^scale: "):
            function(draw(1, 2, 8), draw(2, 4, 8), scale=0.0)
        with pytest.raises(TypeError, match=r"^x_tm: "):
            function(int32([[1, 2]]), draw(2, 4, 2), scale=1.0)
    with pytest.raises(ValueError, match=r"^ratio: "):
        index_visible(int32([0]), ratio=0)
    with pytest.raises(ValueError, match=r"^positions_t: "):
        index_visible(int32([[0]]), ratio=1)
    with pytest.raises(TypeError, match=r"^positions_t: "):
        index_visible(torch.zeros(2), ratio=1)


def test_strided_bytes_are_declined() -> None:
    wide = torch.zeros(6, 136, dtype=torch.uint8)[:, ::2]
    with pytest.raises(NotImplementedError, match=r"^k_sw: "):
        index_scores_triton(**SCORE | {"k_sw": wide})
    with pytest.raises(NotImplementedError, match=r"^cache_pow: "):
        index_scores_paged_triton(**PAGED | {"cache_pow": torch.zeros(2, 6, 68, dtype=torch.uint8)[:, ::2]})


def test_buffers_that_do_not_fit_are_refused() -> None:
    for function, arguments in ((index_scores_triton, SCORE), (index_scores_paged_triton, PAGED)):
        with pytest.raises(ValueError, match=r"^out: "):
            function(**arguments, out=torch.zeros(1))
        with pytest.raises(TypeError, match=r"^out: "):
            function(**arguments, out=torch.zeros(2, 8, dtype=torch.bfloat16))
