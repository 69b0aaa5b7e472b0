"""Sparse attention: laws of the reference, then what both sides refuse."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.providers import flash_mla_lists, whole_requests
from deeptwin.optimized.sparse_attn import (
    sparse_attn_decode_tilelang,
    sparse_attn_decode_triton,
    sparse_attn_flash_mla,
    sparse_attn_tilelang,
    sparse_attn_triton,
    two_cache_attn_decode_flash_mla,
    two_cache_attn_decode_flash_mla_unsplit,
    two_cache_attn_decode_tilelang,
    two_cache_attn_decode_triton,
    two_cache_attn_tilelang,
    two_cache_attn_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.sparse_attn import PairCase, draw_pair, draw_pair_decode
from deeptwin.reference.config import KV_FP4, KV_FP8, PageLayout, TwoCaches
from deeptwin.reference.kv_cache import load_records, store_records
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.sparse_attn import sparse_attn, sparse_attn_decode, two_cache_attn, two_cache_attn_decode

ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
NASTY = (-(2**31), -123456, -1, 2**31 - 1, 2_147_480_000)
INF = math.inf


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def f32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def attend(
    q: Tensor,
    kv: Tensor,
    idx: Tensor,
    sink: Tensor | None = None,
    length: Tensor | None = None,
    *,
    scale: float = 1.0,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    num: Numerics = SEMANTIC,
) -> tuple[Tensor, Tensor]:
    width = kv.shape[-1] if value_dim is None else value_dim
    return sparse_attn(q, kv, idx, sink, length, scale=scale, value_dim=width, dtype=dtype, num=num)


CARD = load_card("sparse_attn")


# properties of the reference


@ALL_NUMERICS
def test_two_keys_by_hand(num: Numerics) -> None:
    # scores ln 2 and 0: weights 2/3 and 1/3
    kv = f32([[math.log(2.0), 1.0], [0.0, 4.0]])
    out, lse = attend(f32([[[1.0, 0.0]]]), kv, int32([[0, 1]]), num=num)
    torch.testing.assert_close(out[0, 0, 1].item(), 2.0, rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.item(), math.log(3.0), rtol=1e-6, atol=0)
    # a sink of logit ln 3 doubles the denominator and leaves the lse alone; it is not scaled
    with_sink, same_lse = attend(f32([[[1.0, 0.0]]]), kv, int32([[0, 1]]), f32([math.log(3.0)]), num=num)
    torch.testing.assert_close(with_sink, out / 2, rtol=1e-6, atol=0)
    assert torch.equal(lse, same_lse)


def test_recomputed_with_a_loop_over_tokens_and_heads() -> None:
    q, kv, sink = draw(1, 3, 2, 12), draw(2, 30, 12), draw(3, 2, dtype=torch.float32)
    idx, length = int32(np.random.Generator(np.random.Philox(4)).integers(-9, 40, (3, 17))), int32([17, 5, 99])
    out, lse = attend(q, kv, idx, sink, length, scale=0.3, value_dim=8)
    for t in range(3):
        listed = idx[t, : int(length[t])].tolist()
        keys = np.array([kv[i].double().numpy() for i in listed if 0 <= i < 30])
        for h in range(2):
            weights = np.exp(0.3 * keys @ q[t, h].double().numpy())
            mixed = weights @ keys[:, :8] / (weights.sum() + math.exp(sink[h]))
            np.testing.assert_allclose(out[t, h].numpy(), mixed, rtol=1e-12)
            np.testing.assert_allclose(lse[t, h].item(), np.log(weights.sum()), rtol=1e-12)


@ALL_NUMERICS
@pytest.mark.parametrize("sink", [-INF, -3e38, -1e4, 0.0, 1e4, 3e38, INF])
@pytest.mark.parametrize("empty", [False, True])
def test_extreme_sinks(sink: float, empty: bool, num: Numerics) -> None:
    """U78, U87: the sink never enters the maximum, so no value of it makes NaN."""
    q, kv = draw(5, 1, 1, 8), draw(6, 5, 8)
    idx = int32([[-1, -1, -1]] if empty else [[4, 0, 2]])
    out, lse = attend(q, kv, idx, f32([sink]), num=num)
    plain, plain_lse = attend(q, kv, idx, num=num)
    assert torch.equal(lse, plain_lse)
    share = 0.0 if empty or sink >= 1e4 else 1 / (1 + math.exp(sink - lse.item()))
    torch.testing.assert_close(out, plain * share, rtol=1e-5, atol=0)


def test_sink_and_scores_shifted_together_change_nothing() -> None:
    q, kv = draw(7, 2, 3, 8).double(), draw(8, 9, 8).double()
    kv[:, 0] = 1.0  # channel 0 of the query shifts every score of its row
    idx, sink = int32([[0, 3, 8], [5, 5, 1]]), f32([0.5, -2.0, 1.0])
    shifted = q.clone()
    shifted[..., 0] += 2.0
    out, lse = attend(q, kv, idx, sink)
    out_shifted, lse_shifted = attend(shifted, kv, idx, sink + 2.0)
    torch.testing.assert_close(out_shifted, out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse_shifted, lse + 2.0, rtol=1e-12, atol=0)


@ALL_NUMERICS
def test_rows_without_a_key(num: Numerics) -> None:
    """R13: exactly 0 and -inf, whatever the reason and although every row holds NaN."""
    kv = torch.full((4, 8), math.nan)
    idx = int32([[-1, -1], [4, 2**31 - 1], [0, 1], [-(2**31), 7]])
    out, lse = attend(draw(9, 4, 2, 8), kv, idx, f32([0.0, INF]), int32([2, 2, 0, -3]), num=num)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


@ALL_NUMERICS
def test_unlisted_rows_and_row_zero_may_hold_nan(num: Numerics) -> None:
    """U08, U74: what stands beyond the length, and the row that a clamped hole would read, are never touched."""
    kv = draw(10, 64, 16)
    poisoned = kv.clone()
    poisoned[0] = math.nan
    poisoned[30:] = math.nan
    idx = torch.cat([int32([[3, -1, 17, 29]]), int32([list(range(30, 64)) + [0] + list(NASTY)])], dim=1)
    out, lse = attend(draw(11, 1, 2, 16), poisoned, idx, None, int32([4]), num=num)
    clean, clean_lse = attend(draw(11, 1, 2, 16), kv, idx, None, int32([4]), num=num)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    absent, _ = attend(draw(11, 1, 2, 16), kv, int32([[3, 17, 29]]), num=num)
    torch.testing.assert_close(out, absent, rtol=1e-5, atol=1e-6)


def test_a_listed_nan_stays_visible() -> None:
    kv = draw(12, 4, 8)
    kv[2] = math.nan
    out, lse = attend(draw(13, 2, 1, 8), kv, int32([[0, 2], [0, 1]]))
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert torch.isfinite(out[1]).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 11), min_size=0, max_size=9), st.randoms(use_true_random=False))
def test_order_and_holes_do_not_matter(entries: list[int], random: Random) -> None:
    q, kv = draw(14, 1, 2, 8), draw(15, 9, 8)
    mixed = [*entries, -1, 9]
    random.shuffle(mixed)
    out, lse = attend(q, kv, int32([mixed]))
    plain, plain_lse = attend(q, kv, int32([entries]).view(1, -1))
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-12, atol=1e-14)


def test_a_repeated_index_counts_twice() -> None:
    q, kv = torch.zeros(1, 1, 2), f32([[3.0, 0.0], [0.0, 3.0]])
    out, lse = attend(q, kv, int32([[0, 1, 0]]))
    torch.testing.assert_close(out[0, 0], torch.tensor([2.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(lse.item(), math.log(3.0))


def test_parts_merge_by_natural_log_sum_exp() -> None:
    """U03: shards of 1, 2, 4, 8 keys, zero scores, value = shard number."""
    shard = torch.arange(4).repeat_interleave(int32([1, 2, 4, 8]))
    kv = torch.stack([torch.zeros(15), shard.float()], dim=1)
    q = f32([[[1.0, 0.0]]])
    whole, whole_lse = attend(q, kv, torch.arange(15, dtype=torch.int32)[None])
    assert whole[0, 0, 1].item() == pytest.approx((2 * 1 + 4 * 2 + 8 * 3) / 15, rel=1e-12)
    parts = [attend(q, kv, (shard == i).nonzero().T.to(torch.int32)) for i in range(4)]
    lses = torch.stack([lse for _, lse in parts])
    merged = sum(out * (lse - lses.logsumexp(0)).exp()[..., None] for out, lse in parts)
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(lses.logsumexp(0), whole_lse, rtol=1e-12, atol=0)
    # the fault: the same merge in base 2 is far away
    wrong = sum(out * 2 ** (lse - lses.logsumexp(0))[..., None] for out, lse in parts)
    assert (wrong - whole).abs().max() > 0.1


def test_a_prefix_with_zero_values_takes_its_share() -> None:
    """U02: q = 0, 3072 keys of value 0, 64 of value 1."""
    kv = torch.zeros(3136, 1)
    kv[3072:] = 1.0
    out, lse = attend(torch.zeros(1, 1, 1), kv, torch.arange(3136, dtype=torch.int32)[None])
    assert out.item() == pytest.approx(64 / 3136, rel=1e-12)
    assert lse.item() == pytest.approx(math.log(3136), rel=1e-12)


def test_weights_are_rounded_unnormalised_and_sums_are_not() -> None:
    # one key at the maximum, one of weight w just under the tie between 0.5 and the next bf16 number
    w = 0.5 + 2.0**-9 - 2.0**-14
    kv = torch.tensor([[0.0, 0.0], [math.log(w), 1.0]], dtype=torch.float64)
    out, lse = attend(f32([[[1.0, 0.0]]]), kv, int32([[0, 1]]), dtype=torch.bfloat16, num=CONTRACT)
    assert out[0, 0, 1].item() == 170 / 512  # bf16(0.5 / (1 + w)); without the rounding of w, 171 / 512
    assert lse.item() == pytest.approx(math.log(1 + w), rel=1e-7)
    exact, _ = attend(f32([[[1.0, 0.0]]]), kv, int32([[0, 1]]), dtype=torch.float32, num=CONTRACT)
    assert exact[0, 0, 1].item() == pytest.approx(w / (1 + w), rel=1e-7)


def test_contract_is_near_semantic_and_rounds_to_dtype() -> None:
    q, kv, idx = draw(16, 2, 4, 576), draw(17, 90, 576), torch.arange(180, dtype=torch.int32).view(2, 90) % 90
    args = (q, kv, idx, draw(18, 4, dtype=torch.float32), None)
    exact, lse = sparse_attn(*args, scale=576**-0.5, value_dim=512, num=SEMANTIC)
    for num in (CONTRACT, RIVAL):
        out, near = sparse_attn(*args, scale=576**-0.5, value_dim=512, num=num)
        assert out.shape == (2, 4, 512)
        assert out.dtype == num.carrier
        assert torch.equal(out.bfloat16().to(out.dtype), out)
        assert (out - exact).norm() < 4e-3 * exact.norm()
        torch.testing.assert_close(near.double(), lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("page", [1, 2, 5, 53])
def test_pages_read_what_the_sequence_holds(page: int) -> None:
    kv = draw(19, 53, 16)
    pages = -(-53 // page)
    wide = torch.full((pages + 1, page * 16 + 8), math.nan, dtype=torch.bfloat16)
    cache = wide[:, : page * 16].view(pages + 1, page, 16)  # pages further apart than they are long
    order = torch.from_numpy(np.random.Generator(np.random.Philox(page)).permutation(pages + 1))
    for i, row in enumerate(kv):
        cache[order[i // page], i % page] = row
    idx = int32([[0, 52, 7, -1, 30], [11, 11, 1, 2, -9]])
    slot = torch.where(idx < 0, idx, order[idx.clamp_min(0) // page] * page + idx % page).to(torch.int32)
    q, sink = draw(20, 2, 3, 16), f32([0.0, 1.0, -1.0])
    paged = sparse_attn_decode(q, cache, slot, sink, int32([5, 3]), scale=0.25, value_dim=16)
    plain = sparse_attn(q, kv, idx, sink, int32([5, 3]), scale=0.25, value_dim=16)
    for a, b in zip(paged, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("t", "s", "k"), [(0, 4, 3), (2, 0, 3), (2, 4, 0), (2, 0, 0)])
def test_nothing_to_do(t: int, s: int, k: int) -> None:
    out, lse = attend(draw(21, t, 2, 8), draw(22, s, 8), torch.zeros(t, k, dtype=torch.int32), num=CONTRACT)
    assert out.shape == (t, 2, 8)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))
    cache = draw(22, 0, 5, 8)
    out, _ = sparse_attn_decode(draw(21, 2, 2, 8), cache, int32([[0, 1]] * 2), None, None, scale=1.0, value_dim=8)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("layout", PageLayout)
def test_two_caches_are_one_list_of_what_the_records_hold(layout: PageLayout) -> None:
    """528-byte and 288-byte records, written by the cache, against plain bf16 rows."""
    window, main = (torch.full((3, o, w), 255, dtype=torch.uint8) for o, w in ((5, 528), (4, 288)))
    store_records(window, draw(30, 9, 512), torch.arange(3, 12), layout=layout)
    store_records(main, draw(31, 7, 512), torch.arange(7), layout=layout)
    seen, picked = int32([[3, 11, -1], [-1, -1, -1]]), int32([[0, 6, -1, 2], [5, -1, 99, -1]])
    caches = TwoCaches(window=KV_FP8, main=KV_FP4, layout=layout, scale=512**-0.5)
    q, sink = draw(32, 2, 3, 512), f32([0.0, 1.0, -1.0])
    rows = [load_records(x, torch.arange(x.shape[0] * x.shape[1]), layout=layout) for x in (window, main)]
    both = torch.cat([seen, torch.where(picked < 0, -1, picked + 15)], 1).to(torch.int32)
    expected = sparse_attn(q, torch.cat(rows), both, sink, None, scale=512**-0.5, value_dim=512)
    decoded = two_cache_attn_decode(q, window, seen, main, picked, sink, caches=caches)
    prefilled = two_cache_attn(q, rows[0], seen, main, picked, sink, caches=caches)
    for a, b, c in zip(decoded, prefilled, expected, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_keys_of_both_caches_share_one_softmax_and_count_twice() -> None:
    one = PairCase(tokens=1, heads=1, channels=32, window=1, main=1, ring=1, page=1, main_format="fp8", holes="none")
    inputs = draw_pair_decode(one, np.random.Generator(np.random.Philox(9)))
    inputs["main_pow"] = inputs["window_pow"].clone()  # the same key once more
    inputs["main_idx_tk"] = inputs["window_idx_tk"].clone()
    out, lse = two_cache_attn_decode(**inputs | {"sink_h": None, "dtype": torch.float32}, num=SEMANTIC)
    alone = {"main_idx_tk": int32([[-1]]), "sink_h": None, "dtype": torch.float32}
    single, single_lse = two_cache_attn_decode(**inputs | alone, num=SEMANTIC)
    torch.testing.assert_close(out, single, rtol=1e-6, atol=0)
    torch.testing.assert_close(lse, single_lse + math.log(2.0), rtol=1e-6, atol=1e-6)


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("sparse_attn") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("sparse_attn", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

BAD_VALUES: dict[str, Any] = {
    "q_thd": {"q_thd": draw(1, 2, 3)},
    "idx_tk": {"idx_tk": torch.zeros(3, 4, dtype=torch.int32)},
    "sink_h": {"sink_h": torch.zeros(4)},
    "topk_length_t": {"topk_length_t": torch.zeros(3, dtype=torch.int32)},
    "scale": {"scale": 0.0},
    "value_dim": {"value_dim": 17},
}
BAD_DTYPES: dict[str, Any] = {
    "idx_tk": {"idx_tk": torch.zeros(2, 4, dtype=torch.int64)},
    "sink_h": {"sink_h": torch.zeros(3, dtype=torch.bfloat16)},
    "topk_length_t": {"topk_length_t": torch.zeros(2)},
}


def arguments(kv_name: str) -> dict[str, Any]:
    kv = draw(2, 5, 16) if kv_name == "kv_sd" else draw(2, 2, 3, 16)
    lists = {"idx_tk": torch.zeros(2, 4, dtype=torch.int32), "sink_h": None, "topk_length_t": None}
    return {"q_thd": draw(1, 2, 3, 16), kv_name: kv, **lists, "scale": 1.0, "value_dim": 16}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_are_refused(name: str) -> None:
    for function in (sparse_attn, sparse_attn_triton, sparse_attn_flash_mla, sparse_attn_tilelang):
        with pytest.raises(ValueError, match=f"^{name}: "):
            function(**arguments("kv_sd") | BAD_VALUES[name])
    for paged in (sparse_attn_decode, sparse_attn_decode_triton, sparse_attn_decode_tilelang):
        with pytest.raises(ValueError, match=f"^{name}: "):
            paged(**arguments("kv_pod") | BAD_VALUES[name])


@pytest.mark.parametrize("name", BAD_DTYPES)
def test_dtypes_are_refused(name: str) -> None:
    for function in (sparse_attn, sparse_attn_triton, sparse_attn_flash_mla, sparse_attn_tilelang):
        with pytest.raises(TypeError, match=f"^{name}: "):
            function(**arguments("kv_sd") | BAD_DTYPES[name])
    for paged in (sparse_attn_decode, sparse_attn_decode_triton, sparse_attn_decode_tilelang):
        with pytest.raises(TypeError, match=f"^{name}: "):
            paged(**arguments("kv_pod") | BAD_DTYPES[name])


def test_storage_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^dtype: "):
        sparse_attn(**arguments("kv_sd"), dtype=torch.float64)
    with pytest.raises(TypeError, match=r"^dtype: "):
        sparse_attn_decode(**arguments("kv_pod"), dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^q_thd: "):
        sparse_attn_triton(**arguments("kv_sd") | {"q_thd": draw(1, 2, 3, 16).float()})
    half = {"q_thd": draw(1, 2, 3, 16).half(), "kv_sd": draw(2, 5, 16).half(), "dtype": torch.float16}
    with pytest.raises(TypeError, match=r"^dtype: "):
        sparse_attn_triton(**arguments("kv_sd") | half)
    with pytest.raises(TypeError, match=r"^kv_pod: "):
        sparse_attn_decode_triton(**arguments("kv_pod") | {"kv_pod": draw(2, 2, 3, 16).float()})


def test_kernels_decline_widths_and_strides() -> None:
    pytest.importorskip("triton")
    narrow, skewed = {"value_dim": 12}, {"q_thd": draw(1, 2, 16, 3).mT}
    for bad, name in ((narrow, "value_dim"), (skewed, "q_thd")):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            sparse_attn_triton(**arguments("kv_sd") | bad)
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            sparse_attn_decode_triton(**arguments("kv_pod") | bad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32, "q_thd": torch.zeros(2, 64, 512), "kv_sd": torch.zeros(5, 512)}, "dtype: expected"),
        ({"q_thd": torch.zeros(2, 3, 512, dtype=torch.bfloat16), "sink_h": None}, "q_thd: expected 64·n heads"),
        ({"kv_sd": torch.zeros(512, 5, dtype=torch.bfloat16).T}, "kv_(sd|pod): expected rows one behind the other"),
        ({}, "q_thd: expected a tensor on SM90, got one on cpu"),
    ],
)
def test_the_kernel_with_specialised_warps_declines(changes: dict[str, Any], message: str) -> None:
    given = flash_arguments(**changes)
    with pytest.raises(NotImplementedError, match=message):
        sparse_attn_tilelang(**given)
    given["kv_pod"] = given.pop("kv_sd").unsqueeze(0)
    with pytest.raises(NotImplementedError, match=message):
        sparse_attn_decode_tilelang(**given)


def flash_arguments(**changes: Any) -> dict[str, Any]:
    given = {"q_thd": draw(1, 2, 64, 512), "kv_sd": draw(2, 5, 512), "sink_h": torch.zeros(64), "value_dim": 512}
    return arguments("kv_sd") | given | changes


def test_the_adapter_of_flash_mla_pads_lists_and_turns_the_lse_of_an_empty_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, with its conventions: what is passed, and what becomes of what it returns."""

    def forward(
        q: Tensor, kv: Tensor, lists: Tensor, scale: float, width: int, sink: Tensor, length: None, *, use_legacy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert use_legacy
        assert lists.shape == (2, 1, 128)
        out, lse = sparse_attn(q, kv[:, 0], lists[:, 0], sink, length, scale=scale, value_dim=width)
        return out.bfloat16(), lse, lse.float().masked_fill(lse == -INF, INF)

    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(flash_mla_sparse_fwd=forward))
    given = flash_arguments(idx_tk=torch.tensor([[0, 2, -1], [-1, -1, -1]], dtype=torch.int32), topk_length_t=None)
    out, lse = sparse_attn_flash_mla(**given)
    right, right_lse = sparse_attn(**given)
    assert torch.equal(out, right.bfloat16())
    assert torch.equal(lse, right_lse.float())
    assert (lse[1] == -INF).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": torch.float32, "q_thd": torch.zeros(2, 64, 512), "kv_sd": torch.zeros(5, 512)},
            "dtype: expected bf",
        ),
        ({"value_dim": 256}, "q_thd: expected 64 or 128 heads of 512 or 576 with 512 values"),
        ({"kv_sd": torch.zeros(0, 512, dtype=torch.bfloat16)}, "q_thd, kv_sd: expected tokens and keys"),
        (
            {"kv_sd": torch.zeros(5, 513, dtype=torch.bfloat16)[:, :512]},
            "kv_sd: expected rows at multiples of 16 bytes",
        ),
        ({}, "flash_mla: expected sgl-flash-mla"),
    ],
)
def test_the_adapter_of_flash_mla_declines(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(flash_mla_sparse_fwd=lambda q: q))  # another line
    with pytest.raises(NotImplementedError, match=message):
        sparse_attn_flash_mla(**flash_arguments(**changes))


def test_buffers_that_do_not_fit_are_refused() -> None:
    pytest.importorskip("triton")
    short = (torch.empty(2, 3, 15, dtype=torch.bfloat16), torch.empty(2, 3))
    with pytest.raises(ValueError, match=r"^out: "):
        sparse_attn_triton(**arguments("kv_sd"), out=short)
    wrong = (torch.empty(2, 3, 16, dtype=torch.bfloat16), torch.empty(2, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"^out: "):
        sparse_attn_decode_triton(**arguments("kv_pod"), out=wrong)


def pair(decode: bool) -> dict[str, Any]:
    case, rng = PairCase(tokens=2, heads=2, channels=32), np.random.Generator(np.random.Philox(4))
    return draw_pair_decode(case, rng) if decode else draw_pair(case, rng)


def test_two_caches_refuse_values() -> None:
    wide = torch.zeros(3, 8, 584, dtype=torch.uint8)  # records of V4
    bad = {"main_pow": wide, "main_idx_tk": torch.zeros(3, 4, dtype=torch.int32), "sink_h": torch.zeros(3)}
    for name, value in (bad | {"window_sd": torch.zeros(3, 31).bfloat16()}).items():
        for function in (two_cache_attn, two_cache_attn_triton, two_cache_attn_tilelang):
            with pytest.raises(ValueError, match=f"^{name}: "):
                function(**pair(False) | {name: value})
    for name, value in (bad | {"window_pow": wide}).items():
        flash = (two_cache_attn_decode_flash_mla, two_cache_attn_decode_flash_mla_unsplit)
        for paged in (two_cache_attn_decode, two_cache_attn_decode_triton, two_cache_attn_decode_tilelang, *flash):
            with pytest.raises(ValueError, match=f"^{name}: "):
                paged(**pair(True) | {name: value})
    with pytest.raises(ValueError, match=r"^main: "):
        replace(pair(True)["caches"], main=KV_FP4)


def test_two_caches_refuse_dtypes() -> None:
    inputs = pair(True)
    bad = {
        "main_pow": inputs["main_pow"].to(torch.int8),
        "main_idx_tk": inputs["main_idx_tk"].long(),
        "sink_h": torch.zeros(2, dtype=torch.bfloat16),
        "dtype": torch.float64,
    }
    for name, value in bad.items():
        for function in (two_cache_attn, two_cache_attn_triton, two_cache_attn_tilelang):
            with pytest.raises(TypeError, match=f"^{name}: "):
                function(**pair(False) | {name: value})
        flash = (two_cache_attn_decode_flash_mla, two_cache_attn_decode_flash_mla_unsplit)
        for paged in (two_cache_attn_decode, two_cache_attn_decode_triton, two_cache_attn_decode_tilelang, *flash):
            with pytest.raises(TypeError, match=f"^{name}: "):
                paged(**inputs | {name: value})


def test_two_cache_kernels_decline_and_refuse_buffers() -> None:
    pytest.importorskip("triton")
    functions: list[Callable[..., Any]] = [two_cache_attn_triton, two_cache_attn_decode_triton]
    for function, decode in zip(functions, (False, True), strict=True):
        skewed = pair(decode)
        skewed["q_thd"] = torch.zeros(2, 32, 2).bfloat16().mT
        with pytest.raises(NotImplementedError, match=r"^q_thd: "):
            function(**skewed)
        with pytest.raises(ValueError, match=r"^out: "):
            function(**pair(decode), out=(torch.empty(2, 2, 31).bfloat16(), torch.empty(2, 2)))
        with pytest.raises(TypeError, match=r"^out: "):
            function(**pair(decode), out=(torch.empty(2, 2, 32), torch.empty(2, 2)))


def wide_pair(decode: bool, **changes: Any) -> dict[str, Any]:
    case = replace(PairCase(tokens=1, heads=64, channels=512, window=3, main=4), **changes)
    rng = np.random.Generator(np.random.Philox(4))
    return draw_pair_decode(case, rng) if decode else draw_pair(case, rng)


@pytest.mark.parametrize("decode", [False, True])
def test_the_kernel_of_two_caches_with_specialised_warps_declines(decode: bool) -> None:
    function = two_cache_attn_decode_tilelang if decode else two_cache_attn_tilelang
    given = wide_pair(decode)
    odd = torch.zeros(3, 8 * 288 + 8, dtype=torch.uint8)[:, : 8 * 288].unflatten(1, (8, 288))
    v4 = wide_pair(decode, main_format="v4", layout="sectioned")
    odd_v4 = torch.zeros(3, 8 * 584 + 8, dtype=torch.uint8)[:, : 8 * 584].unflatten(1, (8, 584))
    wider = replace(KV_FP8, name="by_64", quant=replace(KV_FP8.quant, group=64), pad=8)
    for message, inputs in {
        "dtype: expected bfloat16": wide_pair(decode, dtype="fp32"),
        "q_thd: expected 64·n heads of 512, got 2 of 512": wide_pair(decode, heads=2),
        "q_thd: expected 64·n heads of 512, got 64 of 64": wide_pair(decode, channels=64),
        "main_pow: expected pages of records in order": given | {"main_pow": odd},
        "main_pow: expected pages of records": v4 | {"main_pow": odd_v4},
        "caches: expected main records of 528, 288 or 584 bytes": given
        | {"main_pow": torch.zeros(3, 8, 528, dtype=torch.uint8), "caches": replace(given["caches"], main=wider)},
        "q_thd: expected a tensor on SM90, got one on cpu": given,
        "q_thd: expected a tensor on SM90": v4,
    }.items():
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            function(**inputs)
    name = "window_pow" if decode else "window_sd"
    apart = torch.zeros(3, 528, 8, dtype=torch.uint8).mT if decode else torch.zeros(512, 5).bfloat16().T
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        function(**given | {name: apart})


def test_the_adapters_of_flash_mla_over_two_pools_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # as if it were not installed
    v4 = {"main_format": "v4", "layout": "sectioned"}
    given = wide_pair(True, **v4)
    odd = torch.zeros(3, 8 * 584 + 8, dtype=torch.uint8)[:, : 8 * 584].unflatten(1, (8, 584))
    for message, inputs in {
        "dtype: expected bfloat16": wide_pair(True, **v4, dtype="fp32"),
        "q_thd: expected tokens of 64 or 128 heads": wide_pair(True, **v4, heads=2),
        "caches: expected records of 584 bytes in sectioned pages": wide_pair(True, layout="sectioned"),
        "caches: expected records of 584 bytes in sectioned": wide_pair(True, main_format="v4"),
        "window_pow: expected pages of records in order": given | {"window_pow": odd},
        "main_pow: expected pages of records in order": given | {"main_pow": odd},
        "flash_mla: expected sgl-flash-mla": given,
    }.items():
        for function in (two_cache_attn_decode_flash_mla, two_cache_attn_decode_flash_mla_unsplit):
            with pytest.raises(NotImplementedError, match=f"^{message}"):
                function(**inputs)


def test_the_adapter_of_flash_mla_over_two_pools_cuts_lists_at_their_last_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for the library, with its conventions: what is passed, and what becomes of what it returns."""
    schedules: list[Any] = []
    caches = wide_pair(True, main_format="v4", layout="sectioned")["caches"]

    def forward(
        q: Tensor, cache: Tensor, table: None, lengths: None, width: int, schedule: Any, **how: Any
    ) -> tuple[Tensor, Tensor]:
        lists, more = how["indices"][:, 0], how["extra_indices_in_kvcache"][:, 0]
        assert (lists.shape, more.shape, width, how["use_legacy"]) == ((2, 64), (2, 64), 512, True)
        if schedules:
            assert (how["topk_length"].tolist(), how["extra_topk_length"].tolist()) == ([2, 0], [1, 0])
        else:
            assert (how["topk_length"], how["extra_topk_length"]) == (None, None)
        schedules.append(schedule)
        pages = cache[:, :, 0], how["extra_k_cache"][:, :, 0]
        out, lse = two_cache_attn_decode(q[:, 0], pages[0], lists, pages[1], more, how["attn_sink"], caches=caches)
        return out.bfloat16()[:, None], lse.float().masked_fill(lse == -INF, INF)[:, :, None]

    library = SimpleNamespace(
        flash_mla_with_kvcache=forward,
        get_mla_metadata=lambda: (SimpleNamespace(), None),
        flash_mla_sparse_fwd=lambda use_legacy: None,
    )
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    drawn = wide_pair(True, main_format="v4", layout="sectioned", tokens=2, holes="none")
    drawn["window_idx_tk"][0, 0], drawn["window_idx_tk"][0, 2], drawn["main_idx_tk"][0, 1:] = -5, 10**6, -1
    drawn["window_idx_tk"][1], drawn["main_idx_tk"][1] = -1, -1
    right, right_lse = two_cache_attn_decode(**drawn)
    clean = drawn | {name: flash_mla_lists(drawn[name], 20, 64) for name in ("window_idx_tk", "main_idx_tk")}
    out, lse = two_cache_attn_decode_flash_mla_unsplit(**clean, clean_lists=True)
    assert torch.equal(out, right.bfloat16())
    assert schedules[0].tile_scheduler_metadata[:, [0, 1, 3]].tolist() == [[2, 0, 2], [0, 0, 2], [2, 0, 2], [1, 1, 2]]
    split = two_cache_attn_decode_flash_mla
    for function in (split, split, two_cache_attn_decode_flash_mla_unsplit):
        out, lse = function(**drawn)
        assert torch.equal(out, right.bfloat16())
        assert torch.equal(lse, right_lse.float())
        assert (lse[1] == -INF).all()
    # a schedule is what a call leaves in it: none is used twice
    assert len({id(schedule) for schedule in schedules}) == 4
    assert [vars(schedule) for schedule in schedules[1:3]] == [{}, {}]
    # a window of no entry is a block too
    assert schedules[3].tile_scheduler_metadata[:, [0, 1, 3]].tolist() == [[2, 0, 2], [0, 0, 2], [2, 0, 2], [1, 1, 1]]


@pytest.mark.parametrize(("entries", "width"), [(0, 64), (1, 64), (64, 64), (65, 128)])
def test_lists_for_flash_mla_are_whole_steps_with_nothing_but_minus_one_in_holes(entries: int, width: int) -> None:
    lists = flash_mla_lists(torch.arange(-1, entries - 1, dtype=torch.int32).expand(2, -1), 40, 64)
    assert lists.shape == (2, width)
    assert lists.dtype == torch.int32
    named = torch.arange(width) - 1
    assert torch.equal(lists[1], torch.where((named < min(entries - 1, 40)) & (named >= 0), named, -1).to(torch.int32))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 20))
def test_a_schedule_of_whole_requests_holds_each_once(blocks: list[int], parts: int) -> None:
    table, splits = whole_requests(torch.tensor(blocks, dtype=torch.int32), parts)
    assert (table.dtype, table.shape) == (torch.int32, (parts, 8))
    assert splits.tolist() == list(range(len(blocks) + 1))
    held, sizes = [], []
    for first, last, first_block, last_block, *rest in table.tolist():
        assert (first_block, rest) == (0, [0, 0, 0, 0])
        if first < len(blocks):
            held += range(first, last + 1)
            sizes.append(last + 1 - first)
            assert last_block == blocks[last]
    assert held == list(range(len(blocks)))
    assert max(sizes) <= -(-len(blocks) // parts)
