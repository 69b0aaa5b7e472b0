"""Mixture of experts: laws of the layout and of the sums, the worked cases of the spec, then what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.moe import combine_triton, dispatch_triton, expert_up_triton, gather_rows_triton, moe_triton
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.moe import BLOCK, CombineCase, ExpertCase, MoeCase, draw_combine, draw_expert, draw_moe
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference.config import (
    MXFP4,
    Q8,
    Combine,
    MoeConfig,
    moe_v41,
)
from deeptwin.reference.moe import combine, dispatch, expert_up, gather_rows, moe
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.quant import quantize
from deeptwin.reference.router import map_replicas
from deeptwin.reference.weights import ExpertWeights

ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
SINGLE, MULTIPLE = Combine.SINGLE, Combine.MULTIPLE


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def bf16(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def add_up(rows: Tensor, ranks: list[int] | None = None, shared: Tensor | None = None, **more: Any) -> Tensor:
    """`combine` of one token whose slots stand in the rows."""
    row_tk = torch.arange(len(rows), dtype=torch.int32)[None]
    rank_tk = None if ranks is None else int32([ranks])
    rule = SINGLE if ranks is None else MULTIPLE
    return combine(rows, row_tk, rank_tk, None, shared, rule=rule, **more)


def drawn(seed: int = 0, **changes: Any) -> dict[str, Any]:
    case = MoeCase(tokens=4, topk=3, experts=6, width=128, inner=64)
    return draw_moe(replace(case, **changes), rng(seed))


def drawn_expert() -> dict[str, Any]:
    return draw_expert(ExpertCase(sizes=(2, 0, 1), width=64, inner=32), rng(3))


def block(inputs: dict[str, Any], num: Numerics = CONTRACT) -> Tensor:
    return moe(**inputs, num=num)


def tiny_expert(gate: float, up: float) -> ExpertWeights:
    """One expert of width 32 whose gate and up are the first channel times these, and whose down copies channel 0."""
    w13, w2 = torch.zeros(64, 32), torch.zeros(32, 32)
    w13[0, 0], w13[32, 0], w2[0, 0] = gate, up, 1.0
    pairs = [quantize(w, fmt=MXFP4) for w in (w13, w2)]
    (w13_q, w13_sf), (w2_q, w2_sf) = ((codes[None], sf[None]) for codes, sf in pairs)
    return ExpertWeights(w13_q=w13_q, w13_sf=w13_sf, w2_q=w2_q, w2_sf=w2_sf)


def through(expert: ExpertWeights, weight: float = 1.0, limit: float | None = 10.0) -> float:
    """Channel 0 of the block's output for a row with 1 in channel 0."""
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    config = replace(moe_v41(SINGLE), swiglu_limit=limit)
    idx, weights = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), weight)
    return moe(*quantize(x, fmt=Q8), idx, weights, None, expert, None, config=config)[0, 0].item()


CARD = load_card("moe")
Judged = Callable[[str], list[Outcome]]


# properties of the reference


def test_layout_of_a_worked_routing() -> None:
    row, slot, end = dispatch(torch.tensor([[1, 0], [1, -1], [3, 1], [0, 3]]), num_experts=4, alignment=4)
    assert row.tolist() == [[4, 0], [5, -1], [8, 6], [1, 9]]
    assert slot[:12].tolist() == [1, 6, -1, -1, 0, 2, 5, -1, 4, 7, -1, -1]
    assert end.tolist() == [2, 7, 8, 10]  # expert 2 has no row: its end is its start
    assert (slot[12:] == -1).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 7), st.sampled_from([1, 3, 8]), st.integers(0, 2**32 - 1))
def test_layouts_are_permutations_with_aligned_starts(t: int, k: int, e: int, alignment: int, seed: int) -> None:
    idx = torch.from_numpy(rng(seed).integers(-1, e, (t, k)))
    row, slot, end = dispatch(idx, num_experts=e, alignment=alignment)
    used = (slot >= 0).nonzero().flatten()
    assert torch.equal(row.flatten()[slot[used].long()], used.to(torch.int32))
    assert len(used) == int((idx >= 0).sum())
    last = 0
    for expert in range(e):
        start = -(-last // alignment) * alignment
        last = int(end[expert])
        slots = slot[start:last].tolist()
        assert slots == sorted(slots)
        assert all(idx.flatten()[s] == expert for s in slots)
    assert last <= len(slot)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_rows_are_copied_as_they_are_and_holes_are_zero(dtype: torch.dtype) -> None:
    x = torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype)
    slot = int32([4, -1, 0, 5])
    expected = [[8, 9, 10, 11], [0, 0, 0, 0], [0, 1, 2, 3], [8, 9, 10, 11]]
    for op in (gather_rows, gather_rows_triton) if _interpreted() else (gather_rows,):
        rows = op(x, slot, topk=2)
        assert rows.dtype == dtype
        assert rows.float().tolist() == expected


def _interpreted() -> bool:
    pytest.importorskip("triton")
    from deeptwin.kernels.triton_ops import INTERPRETED

    return INTERPRETED


def test_eight_outputs_that_cancel() -> None:
    """U70: 1e8 swallows what is added to it, so the order is visible; ours is that of the slots."""
    ordered = torch.tensor([[1e8], [1.0], [-1e8], [1.0], [1e8], [1.0], [-1e8], [1.0]])
    assert add_up(ordered, dtype=torch.float32).item() == 1.0
    assert add_up(ordered[[0, 2, 4, 6, 1, 3, 5, 7]], dtype=torch.float32).item() == 4.0
    assert add_up(ordered, shared=torch.tensor([[1.0]]), dtype=torch.float32).item() == 1.0
    assert add_up(ordered, num=SEMANTIC).item() == 4.0


def test_both_reductions_by_hand() -> None:
    """1 + 2^-8 is a tie of bf16: a partial sum loses it, a single reduction keeps two of them."""
    small = 2.0**-8
    rows = bf16([[1.0], [small], [small]])
    assert add_up(rows).item() == 1 + 2 * small
    assert add_up(rows, [0, 0, 1]).item() == 1.0  # bf16(1 + 2^-8) = 1, then 1 + 2^-8 again
    assert add_up(rows, [0, 1, 1]).item() == 1 + 2 * small
    assert add_up(rows, [0, 1, 2]).item() == add_up(rows).item()  # one slot a rank: nothing is rounded early
    # even on one rank the variants differ once there is a shared expert
    shared = bf16([[1.0]])
    assert add_up(rows[1:], shared=shared).item() == 1 + 2 * small
    three = bf16([[1.0], [small]])
    assert add_up(three, [0, 0], bf16([[small]])).item() == 1.0
    assert add_up(three, shared=bf16([[small]])).item() == 1 + 2 * small


def test_a_rank_stands_in_its_last_slot() -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    # rank 0 holds slots 0 and 2: their sum 0 comes after slot 1
    assert add_up(rows, [0, 1, 0], dtype=torch.float32).item() == 1.0
    # rank 0 holds slots 0 and 1: 1e8 swallows the 1
    assert add_up(rows, [0, 0, 1], dtype=torch.float32).item() == 0.0


def test_ranks_of_one_node_are_added_first() -> None:
    rows = bf16([[1.0], [2.0**-8], [2.0**-8], [2.0**-8]])
    row_tk, rank = torch.arange(4, dtype=torch.int32)[None], int32([[0, 1, 2, 2]])
    without = combine(rows, row_tk, rank, None, None, rule=MULTIPLE)
    node = combine(rows, row_tk, rank, int32([[0, 0, 1, 1]]), None, rule=MULTIPLE)
    assert without.item() == 1 + 2.0**-7 + 2.0**-7  # 1 + 3 · 2^-8, a tie, to even
    assert node.item() == 1 + 2.0**-7


@pytest.mark.parametrize(("k", "ranks", "low", "high"), [(3, 1, 0.15, 0.35), (6, 1, 0.15, 0.4), (6, 8, 0.1, 0.4)])
def test_the_variants_differ_as_often_as_the_spec_says(k: int, ranks: int, low: float, high: float) -> None:
    """v41-blocks.md section 1.1: 25 % at k = 3, 19 to 32 % at k = 6, by one step."""
    case = CombineCase(tokens=16, topk=k, width=256, ranks=ranks)
    inputs = draw_combine(case, rng(3))
    multiple = combine(**inputs)
    single = combine(**(inputs | {"rank_tk": None, "rule": SINGLE}))
    assert low < (multiple != single).double().mean() < high


def test_holes_are_not_read_and_empty_tokens_have_the_shared_row() -> None:
    outputs = bf16([[math.nan], [2.0]])
    row = int32([[-1, 1], [-1, -1]])
    assert combine(outputs, row, None, None, None, rule=SINGLE).flatten().tolist() == [2.0, 0.0]
    shared = bf16([[1.0], [5.0]])
    assert combine(outputs, row, None, None, shared, rule=SINGLE).flatten().tolist() == [3.0, 5.0]
    ranks = int32([[77, 0], [77, 77]])
    assert combine(outputs, row, ranks, None, shared, rule=MULTIPLE).flatten().tolist() == [3.0, 5.0]


def test_limits_of_an_asymmetric_expert() -> None:
    """U50, v41-blocks.md section 1.2: gate 20 and up -20 tell w1 from w3, and the sides of the limits."""
    silu10 = 10 / (1 + math.exp(-10))
    # gate and up pass through e2m1: 24 and -24 are representable
    limited = through(tiny_expert(24.0, -24.0))
    assert limited == pytest.approx(-10 * silu10, rel=2**-4)
    assert through(tiny_expert(-24.0, 24.0)) == pytest.approx(0, abs=1e-6)  # silu(-24) · 10: no limit from below
    assert through(tiny_expert(24.0, -24.0), limit=None) == pytest.approx(-24 * 24, rel=2**-4)
    assert through(tiny_expert(4.0, 24.0)) == pytest.approx(10 * 4 / (1 + math.exp(-4)), rel=2**-4)


def test_the_weight_is_applied_before_the_quantiser() -> None:
    """A power of two scales the output exactly, three does not."""
    inputs = drawn(1, shared=False)
    inputs["idx_tk"] = inputs["idx_tk"][:, :1]
    ones = torch.ones_like(inputs["weights_tk"][:, :1])
    base = block(inputs | {"weights_tk": ones})
    assert torch.equal(block(inputs | {"weights_tk": ones / 4}), base / 4)
    third = block(inputs | {"weights_tk": ones * 3})
    assert not torch.equal(third, CONTRACT.bf16(base * 3))
    torch.testing.assert_close(third, base * 3, rtol=0.2, atol=0.2 * base.abs().max().item())


def test_the_first_half_of_an_expert_by_hand() -> None:
    """Rows of ones against weights of ones: gate 64 is limited to 10, up 64 to 10, each silu(10) · 10 · weight."""
    config = moe_v41(SINGLE)
    x_q, x_sf = torch.ones(2, 64).to(torch.float8_e4m3fn), torch.full((2, 2), 127, dtype=torch.uint8)
    w_q, w_sf = torch.full((1, 64, 32), 0x22, dtype=torch.uint8), torch.full((1, 64, 2), 127, dtype=torch.uint8)
    weight = torch.tensor([1.0, 0.25])
    codes, sf = expert_up(x_q, x_sf, w_q, w_sf, int32([2]), weight, config=config)
    assert sf.flatten().tolist() == [125, 123]  # 99.99 / 448 and a quarter of it, rounded up to 2^-2 and 2^-4
    assert (codes.float() == 384).all()  # 399.98, just below the midpoint 400 of 384 and 416


def test_recomputed_token_by_token_without_dispatch() -> None:
    """The whole block from the formulas, one slot after the other, in numpy."""
    inputs = drawn(2, regime="clamped", routing="holes", tokens=5)
    expected = _by_hand(inputs)
    got = block(inputs)
    assert torch.equal(got, expected)


def _by_hand(inputs: dict[str, Any]) -> Tensor:
    def dequantised(q: Tensor, sf: Tensor, rows: int) -> np.ndarray:
        scale = np.exp2(sf.numpy().astype(np.float64) - 127).repeat(rows, 0)[: len(q)].repeat(32, 1)
        if q.dtype == torch.uint8:
            grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            nibble = np.stack([q.numpy() & 15, q.numpy() >> 4], -1).reshape(len(q), -1)
            return np.where(nibble > 7, -1, 1) * grid[nibble & 7] * scale
        return q.double().numpy() * scale

    def expert(x: np.ndarray, w: list[Tensor], rows: int, weight: float) -> np.ndarray:
        w13, w2 = dequantised(w[0], w[1], rows), dequantised(w[2], w[3], rows)
        u = torch.from_numpy(w13 @ x).float().bfloat16().double().numpy()
        gate, up = np.split(u, 2)
        gate, up = np.minimum(gate, 10), np.clip(up, -10, 10)
        v = gate / (1 + np.float32(np.exp(-gate)).astype(np.float64)) * up * weight
        codes, sf = quantize(torch.from_numpy(v)[None], fmt=Q8)
        return torch.from_numpy(w2 @ dequantised(codes, sf, 1)[0]).float().bfloat16().float().numpy()

    x, experts, shared = dequantised(inputs["x_q"], inputs["x_sf"], 1), inputs["experts"], inputs["shared"]
    out = []
    for t, (idx, weights) in enumerate(zip(inputs["idx_tk"].tolist(), inputs["weights_tk"].tolist(), strict=True)):
        total = expert(x[t], [shared.w13_q, shared.w13_sf, shared.w2_q, shared.w2_sf], 32, 1.0)
        for e, weight in zip(idx, weights, strict=True):
            if e >= 0:
                own = [experts.w13_q[e], experts.w13_sf[e], experts.w2_q[e], experts.w2_sf[e]]
                total = total + expert(x[t], own, 1, weight)
        out.append(torch.from_numpy(total).bfloat16())
    return torch.stack(out).double()


@ALL_NUMERICS
def test_a_row_of_zeros_gives_zeros(num: Numerics) -> None:
    inputs = drawn(4)
    inputs["x_q"] = torch.zeros_like(inputs["x_q"])
    assert (block(inputs, num) == 0).all()


def test_padding_tokens_have_the_shared_row_alone() -> None:
    inputs = drawn(5)
    empty = inputs | {"idx_tk": torch.full_like(inputs["idx_tk"], -1)}
    shared = block(empty)
    assert (shared != 0).any()
    assert (block(empty | {"shared": None}) == 0).all()
    weights = inputs["weights_tk"].clone()
    weights[:] = math.nan
    assert torch.equal(block(empty | {"weights_tk": weights}), shared)


@pytest.mark.parametrize("ep_rank", [0, 1, 5])
def test_replica_maps_change_nothing(ep_rank: int) -> None:
    """The sum goes by slot: whichever replica computes a slot, the bits are the same."""
    inputs = drawn(6)
    names = ("w13_q", "w13_sf", "w2_q", "w2_sf")
    experts = inputs["experts"]
    holders = [0, 1, 2, 3, 4, 5, 2, 2, 4]  # expert 2 three times, expert 4 twice
    held = ExpertWeights(**{name: torch.stack([getattr(experts, name)[e] for e in holders]) for name in names})
    table = torch.full((6, 3), -(2**31))
    for expert in range(6):
        places = [place for place, e in enumerate(holders) if e == expert]
        table[expert, : len(places)] = torch.tensor(places)
    count = torch.tensor([holders.count(e) for e in range(6)])
    physical = map_replicas(inputs["idx_tk"], table, count, ep_rank=ep_rank)
    assert torch.equal(block(inputs | {"experts": held, "idx_tk": physical}), block(inputs))


def test_ranks_change_bits_with_multiple_reductions_only() -> None:
    inputs = drawn(7, ranks=2, width=256)
    one = block(inputs | {"rank_e": torch.zeros(6, dtype=torch.int32)})
    apart = block(inputs | {"rank_e": torch.arange(6, dtype=torch.int32)})
    assert not torch.equal(one, apart)
    single = {**inputs, "rank_e": None, "config": moe_v41(SINGLE)}
    assert torch.equal(apart, block(single))


def test_the_rule_of_the_block_sees_a_scale_and_a_row() -> None:
    inputs = drawn(8, tokens=8)
    contract, rival = block(inputs), block(inputs, RIVAL)
    oracles = type("Oracles", (), {"contract": contract, "rival": rival})()
    assert BLOCK.judge(contract.bfloat16(), oracles).ok
    assert not BLOCK.judge((contract * 1.005).bfloat16(), oracles).ok
    spoiled = contract.clone()
    spoiled[3] = 0
    assert not BLOCK.judge(spoiled.bfloat16(), oracles).ok
    assert not BLOCK.judge(contract.roll(1, 0).bfloat16(), oracles).ok


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("moe") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged: Judged) -> None:
    outcomes = [o for o in judged("moe") if o.check == "batch_invariant" and o.status is Status.PASSED]
    # where a slot goes depends on all slots
    promised = {(op.name, row.name) for op in CARD.ops for row in op.candidates if op.name != "dispatch"}
    assert promised <= {(o.op, o.candidate) for o in outcomes}


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def test_bad_configs_are_refused() -> None:
    config = moe_v41(SINGLE)
    with pytest.raises(ValueError, match="activation: expected groups of one row, got 32 rows"):
        MoeConfig(routed=MXFP4, shared=config.shared, activation=config.shared, swiglu_limit=10.0, combine=SINGLE)
    with pytest.raises(ValueError, match="swiglu_limit: expected a positive number or None, got 0"):
        replace(config, swiglu_limit=0.0)


@pytest.mark.parametrize("op", [dispatch, dispatch_triton])
def test_bad_input_of_dispatch_is_refused(op) -> None:
    idx = torch.tensor([[0, 1], [2, -1]])
    with pytest.raises(ValueError, match=r"idx_tk: expected values in \[-1, 2\), got 2 at \(1, 0\)"):
        op(idx, num_experts=2, alignment=1)
    with pytest.raises(ValueError, match=r"idx_tk: expected values in \[-1, 3\), got -2"):
        op(idx - 1, num_experts=3, alignment=1)
    with pytest.raises(ValueError, match="idx_tk: expected 2 dims"):
        op(idx[0], num_experts=3, alignment=1)
    with pytest.raises(ValueError, match="alignment: expected at least 1, got 0"):
        op(idx, num_experts=3, alignment=0)
    with pytest.raises(ValueError, match="num_experts: expected at least 1, got 0"):
        op(idx, num_experts=0, alignment=1)
    with pytest.raises(TypeError, match=r"idx_tk: expected torch\.int64"):
        op(idx.int(), num_experts=3, alignment=1)


@pytest.mark.parametrize("op", [gather_rows, gather_rows_triton])
def test_bad_input_of_gather_rows_is_refused(op) -> None:
    x, slot = torch.ones(2, 4), int32([0, 3])
    with pytest.raises(ValueError, match=r"slot_y: expected values in \[-1, 2\), got 3"):
        op(x, slot, topk=1)
    with pytest.raises(ValueError, match="topk: expected at least 1, got 0"):
        op(x, slot, topk=0)
    with pytest.raises(ValueError, match="x_tm: expected 2 dims"):
        op(x[0], slot, topk=2)
    with pytest.raises(TypeError, match=r"slot_y: expected torch\.int32"):
        op(x, slot.long(), topk=2)


@pytest.mark.parametrize("op", [combine, combine_triton])
def test_bad_input_of_combine_is_refused(op) -> None:
    outputs, row, rank = torch.ones(3, 4, dtype=torch.bfloat16), int32([[0, 2]]), int32([[0, 1]])
    with pytest.raises(ValueError, match=r"row_tk: expected values in \[-1, 3\), got 3"):
        op(outputs, row + 1, None, None, None, rule=SINGLE)
    with pytest.raises(ValueError, match="rank_tk: expected ranks with MULTIPLE and none with SINGLE, got ranks with"):
        op(outputs, row, rank, None, None, rule=SINGLE)
    with pytest.raises(ValueError, match="rank_tk: expected ranks with MULTIPLE and none with SINGLE, got none with"):
        op(outputs, row, None, None, None, rule=MULTIPLE)
    with pytest.raises(ValueError, match="node_tk: expected with rank_tk, got it alone"):
        op(outputs, row, None, rank, None, rule=SINGLE)
    with pytest.raises(ValueError, match="rank_tk: expected k=2, got k=1"):
        op(outputs, row, rank[:, :1], None, None, rule=MULTIPLE)
    with pytest.raises(ValueError, match="shared_tm: expected m=4, got m=3"):
        op(outputs, row, None, None, torch.ones(1, 3, dtype=torch.bfloat16), rule=SINGLE)
    with pytest.raises(TypeError, match=r"row_tk: expected torch\.int32"):
        op(outputs, row.long(), None, None, None, rule=SINGLE)
    with pytest.raises(TypeError, match=r"rank_tk: expected torch\.int32"):
        op(outputs, row, rank.long(), None, None, rule=MULTIPLE)
    with pytest.raises(TypeError, match="expert_ym: expected"):
        op(outputs.int(), row, None, None, None, rule=SINGLE)
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(outputs, row, None, None, None, rule=SINGLE, dtype=torch.float64)


@pytest.mark.parametrize("op", [expert_up, expert_up_triton])
def test_bad_input_of_expert_up_is_refused(op) -> None:
    inputs = drawn_expert()
    with pytest.raises(
        ValueError, match=r"group_sizes_e: expected sizes from 0 up that add up to y=3, got \[2, 0, 2\]"
    ):
        op(**(inputs | {"group_sizes_e": int32([2, 0, 2])}))
    with pytest.raises(ValueError, match="group_sizes_e: expected e=3, got e=2"):
        op(**(inputs | {"group_sizes_e": int32([2, 1])}))
    with pytest.raises(ValueError, match="weight_(y|t): expected [ty]=3, got [ty]=2"):
        op(**(inputs | {"weight_y": inputs["weight_y"][:2]}))
    with pytest.raises(ValueError, match="expected a multiple of"):
        op(**(inputs | {"w_q": inputs["w_q"][:, :48], "w_sf": inputs["w_sf"][:, :48]}))
    with pytest.raises(TypeError, match="group_sizes_e: expected"):
        op(**(inputs | {"group_sizes_e": torch.tensor([2.0, 0, 1])}))
    with pytest.raises(TypeError, match=r"(w_q|codes): expected torch\.uint8"):
        op(**(inputs | {"w_q": inputs["w_q"].int()}))
    with pytest.raises(TypeError, match="weight_(y|t): expected"):
        op(**(inputs | {"weight_y": inputs["weight_y"].int()}))


def test_expert_up_needs_buffers_that_fit() -> None:
    pytest.importorskip("triton")
    inputs = drawn_expert()
    codes, sf = torch.empty(3, 32, dtype=torch.float8_e4m3fn), torch.empty(3, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out: expected contiguous"):
        expert_up_triton(**inputs, out=(codes[:2], sf))
    with pytest.raises(TypeError, match=r"out: expected torch\.uint8"):
        expert_up_triton(**inputs, out=(codes, sf.float()))
    with pytest.raises(NotImplementedError, match="w_q: expected contiguous rows"):
        expert_up_triton(**(inputs | {"w_q": inputs["w_q"].repeat_interleave(2, -1)[..., ::2]}))


@pytest.mark.parametrize("op", [moe, moe_triton])
def test_bad_input_of_moe_is_refused(op) -> None:
    inputs = drawn(9)
    with pytest.raises(ValueError, match=r"idx_tk: expected values in \[-1, 6\), got 6"):
        op(**(inputs | {"idx_tk": torch.full_like(inputs["idx_tk"], 6)}))
    with pytest.raises(ValueError, match="weights_tk: expected k=3, got k=2"):
        op(**(inputs | {"weights_tk": inputs["weights_tk"][:, :2]}))
    with pytest.raises(ValueError, match="rank_tk: expected ranks with MULTIPLE and none with SINGLE, got ranks"):
        op(**(inputs | {"rank_e": torch.zeros(6, dtype=torch.int32)}))
    with pytest.raises(ValueError, match="rank_tk: expected ranks with MULTIPLE and none with SINGLE, got none"):
        op(**(inputs | {"config": moe_v41(MULTIPLE)}))
    with pytest.raises(ValueError, match="rank_e: expected e=6, got e=5"):
        op(**(inputs | {"config": moe_v41(MULTIPLE), "rank_e": torch.zeros(5, dtype=torch.int32)}))
    with pytest.raises(TypeError, match=r"rank_e: expected torch\.int32"):
        op(**(inputs | {"config": moe_v41(MULTIPLE), "rank_e": torch.zeros(6)}))
    with pytest.raises(TypeError, match=r"weights_tk: expected torch\.float32"):
        op(**(inputs | {"weights_tk": inputs["weights_tk"].bfloat16()}))
    with pytest.raises(ValueError, match="idx_tk: expected t=4, got t=3"):
        op(**(inputs | {"idx_tk": inputs["idx_tk"][:3]}))


def test_what_the_triton_kernels_decline_and_buffers_that_do_not_fit() -> None:
    pytest.importorskip("triton")
    rows = torch.ones(40, 4, dtype=torch.bfloat16)
    many = torch.arange(33, dtype=torch.int32)[None]
    with pytest.raises(NotImplementedError, match="row_tk: expected at most 32 slots, got 33"):
        combine_triton(rows, many, None, None, None, rule=SINGLE)
    with pytest.raises(ValueError, match="out: expected contiguous"):
        combine_triton(rows, many[:, :2], None, None, None, rule=SINGLE, out=torch.empty(2, 4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"out: expected torch\.bfloat16"):
        combine_triton(rows, many[:, :2], None, None, None, rule=SINGLE, out=torch.empty(1, 4))
    inputs = drawn(10, experts=40, topk=33)
    with pytest.raises(NotImplementedError, match="idx_tk: expected at most 32 slots, got 33"):
        moe_triton(**inputs)
