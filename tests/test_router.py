"""Routers: worked numbers of the spec, laws of the reference, then what both sides refuse."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.router import map_replicas_triton, route_hash_triton, route_tile_kernels, route_triton
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.router import Selection, weight_interval
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference.config import (
    ROUTER_V3,
    ROUTER_V41,
    GroupScore,
    RouterConfig,
    Scoring,
    WeightSum,
)
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.router import map_replicas, route, route_hash

ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
EIGHT = RouterConfig(
    num_experts=8, topk=6, scoring=Scoring.SQRT_SOFTPLUS, weight_sum=WeightSum.PLUS_EPS, route_scale=1.5
)
GROUPED = replace(ROUTER_V3, num_experts=16, topk=3, num_groups=4, kept_groups=2)


def f32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal(shape, dtype=np.float32))


def logits_of(scores: list[float]) -> Tensor:
    """Logits whose sqrt(softplus) is close to `scores`."""
    return torch.log(torch.expm1(torch.tensor([scores], dtype=torch.float64).square())).float()


def plain(
    logits: Tensor, config: RouterConfig, bias: Tensor | None = None, num: Numerics = CONTRACT
) -> tuple[Tensor, Tensor]:
    bias = torch.zeros(config.num_experts) if bias is None else bias
    return route(logits, bias, None, None, None, config=config, num=num)


CARD = load_card("router")
Judged = Callable[[str], list[Outcome]]


# properties of the reference


def test_sqrt_softplus_at_the_listed_points() -> None:
    """v41-blocks.md section 9, correctly rounded from fp64; U51: no infinity at 89, no zero at -40."""
    points = [-20.0, -1.0, 0.0, 1.0, 20.0, 88.0, 1000.0, -104.0]
    one = replace(EIGHT, topk=1, route_scale=1.0)
    # alone, a score appears as bias + score in the ranking only: read it from the marks
    seen: list[Tensor] = []
    plain(f32([points]), one, num=CONTRACT.observed(lambda name, x: seen.append(x)))
    bits = [f"{int(i) & 0xFFFFFFFF:08X}" for i in seen[0].float().view(torch.int32).flatten()]
    assert bits == ["383E6BCE", "3F0F485C", "3F55224D", "3F92AF5A", "408F1BBD", "411617E3", "41FCFB72", "19FC7361"]
    seen.clear()
    plain(f32([[-40.0, 89.0] * 4]), one, num=CONTRACT.observed(lambda name, x: seen.append(x)))
    assert [float(f"{v:.6g}") for v in seen[0][0, :2].tolist()] == [2.06115e-09, 9.43398]


@ALL_NUMERICS
def test_selection_of_the_worked_row(num: Numerics) -> None:
    """v41-blocks.md section 9: ties 2 | 3 and 1 | 5 go to the smaller index, S = 12.5."""
    idx, weights = plain(logits_of([1, 2, 3, 3, 0.5, 2, 1.5, 0.25]), EIGHT, num=num)
    assert idx.tolist() == [[2, 3, 1, 5, 6, 0]]
    listed = [0.359999985, 0.359999985, 0.239999995, 0.239999995, 0.179999992, 0.119999997]
    torch.testing.assert_close(weights[0].double(), torch.tensor(listed).double(), rtol=3e-7, atol=0)


def test_bias_decides_the_selection_and_not_the_weights() -> None:
    """U44: equal logits, +10 on expert 0."""
    bias = f32([10.0] + [0.0] * 7)
    idx, weights = plain(torch.zeros(1, 8), EIGHT, bias)
    assert idx.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert weights.unique().numel() == 1
    last = plain(torch.zeros(1, 8), EIGHT, bias.flip(0))[0]
    assert last.tolist() == [[7, 0, 1, 2, 3, 4]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-30, 30), min_size=16, max_size=16), st.integers(0, 1000))
def test_recomputed_with_a_loop(numbers: list[int], seed: int) -> None:
    logits, bias = f32([numbers]) / 8, draw(seed, 16).round(decimals=1)
    score = [math.sqrt(math.log1p(math.exp(x))) for x in logits[0].tolist()]
    config = replace(GROUPED, scoring=Scoring.SQRT_SOFTPLUS)
    rank = [float(np.float32(np.float32(s) + np.float32(b))) for s, b in zip(score, bias.tolist(), strict=True)]
    value = [float(np.float32(sum(sorted(rank[g * 4 : g * 4 + 4])[-2:]))) for g in range(4)]
    kept = sorted(range(4), key=lambda g: (-value[g], g))[:2]
    order = sorted((e for e in range(16) if e // 4 in kept), key=lambda e: (-rank[e], e))[:3]
    total = sum(score[e] for e in order)
    idx, weights = plain(logits, config, bias)
    assert idx[0].tolist() == order
    assert weights[0].tolist() == pytest.approx([2.5 * score[e] / total for e in order], rel=1e-6)


def test_group_score_is_an_argument() -> None:
    logits = f32([[2.0, -9, -9, -9, 1.2, 1.2, -9, -9, 1.1, 1.1, -9, -9, -9, -9, -9, -9]])
    assert plain(logits, GROUPED)[0].tolist() == [[4, 5, 8]]
    best = replace(GROUPED, group_score=GroupScore.MAX)
    assert plain(logits, best)[0].tolist() == [[0, 4, 5]]


def test_a_masked_group_stays_out_when_every_rank_is_negative() -> None:
    """U47: filling with 0 would let the other groups win."""
    idx, _ = plain(draw(1, 5, 16), GROUPED, torch.full((16,), -50.0))
    assert (idx >= 0).all()
    assert all(len({e // 4 for e in row}) <= 2 for row in idx.tolist())
    assert torch.equal(idx, plain(draw(1, 5, 16), GROUPED)[0])


def test_groups_that_tie_go_to_the_smaller_one() -> None:
    logits = draw(2, 1, 4).repeat(1, 4)
    assert {e // 4 for e in plain(logits, GROUPED)[0][0].tolist()} <= {0, 1}


def test_zeros_of_either_sign_tie() -> None:
    bias = f32([0.0, -0.0] * 4)
    assert plain(torch.zeros(1, 8), EIGHT, bias)[0].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_image_tokens_have_their_own_bias() -> None:
    bias, vision = f32([9.0] + [0.0] * 7), f32([0.0] * 7 + [9.0])
    image = torch.tensor([False, True])
    idx, _ = route(torch.zeros(2, 8), bias, vision, image, None, config=EIGHT)
    assert idx[:, 0].tolist() == [0, 7]
    assert plain(torch.zeros(1, 8), EIGHT, vision)[0].tolist() == idx[1:].tolist()


def test_padding_rows_are_empty_whatever_they_hold() -> None:
    logits = draw(3, 3, 8)
    logits[1] = math.nan
    mask = torch.tensor([True, False, True])
    idx, weights = route(logits, torch.zeros(8), None, None, mask, config=EIGHT)
    assert idx[1].tolist() == [-1] * 6
    assert weights[1].tolist() == [0.0] * 6
    assert torch.equal(idx[::2], plain(logits[::2], EIGHT)[0])


@pytest.mark.parametrize(("logit", "share"), [(-70, 0.999997), (-80, 0.9996), (-90, 0.945), (-100, 0.104)])
def test_the_epsilon_shows_on_far_negative_logits(logit: float, share: float) -> None:
    """v3-v32-v4.md section 7.2."""
    logits = torch.full((1, 8), float(logit))
    assert plain(logits, EIGHT)[1].sum().item() / 1.5 == pytest.approx(share, abs=6e-4)
    exact = replace(EIGHT, weight_sum=WeightSum.EXACT)
    assert plain(logits, exact)[1].sum().item() / 1.5 == pytest.approx(1, rel=1e-6)


def test_six_scores_of_zero_give_weights_of_zero() -> None:
    _, weights = plain(torch.full((1, 8), -1e6), EIGHT)
    assert weights.tolist() == [[0.0] * 6]


def test_constant_on_all_biases_changes_nothing() -> None:
    logits, bias = draw(4, 20, 16), draw(5, 16)
    for config in (GROUPED, replace(GROUPED, num_groups=1, kept_groups=1)):
        idx, weights = plain(logits, config, bias)
        moved_idx, moved_weights = plain(logits, config, bias + 0.5)
        assert torch.equal(idx, moved_idx)
        assert torch.equal(weights, moved_weights)


def test_weights_sum_to_the_route_scale() -> None:
    for config in (ROUTER_V41, ROUTER_V3):
        _, weights = plain(draw(6, 8, config.num_experts), config)
        torch.testing.assert_close(weights.sum(-1), torch.full((8,), config.route_scale).double(), rtol=5e-7, atol=0)


def test_scores_in_bf16_are_those_of_the_v3_release() -> None:
    logits = draw(7, 4, 16)
    idx, weights = route(logits, torch.zeros(16), None, None, None, config=GROUPED, dtype=torch.bfloat16)
    scores = torch.sigmoid(logits.double()).float().bfloat16().gather(1, idx)
    total = scores.double().sum(-1, keepdim=True).float().bfloat16()
    expected = (scores.float() / total.float()).bfloat16().float() * 2.5
    assert torch.equal(weights.float(), expected.bfloat16().float())


def test_hash_routing_reads_the_table_and_learns_the_weights() -> None:
    logits, config = draw(8, 3, 8), replace(EIGHT, topk=2, weight_sum=WeightSum.EXACT)
    table = torch.tensor([[1, 7], [5, 0], [2, 3]])
    idx, weights = route_hash(logits, torch.tensor([2, 0, 2]), table, None, config=config)
    assert idx.tolist() == [[2, 3], [1, 7], [2, 3]]
    score = torch.nn.functional.softplus(logits.double()).sqrt().gather(1, idx)
    torch.testing.assert_close(weights, 1.5 * score / score.sum(-1, keepdim=True), rtol=1e-6, atol=0)
    padding = torch.tensor([True, False, True])
    idx, weights = route_hash(logits, torch.tensor([2, -1, 1]), table, padding, config=config)
    assert (idx[1].tolist(), weights[1].tolist()) == ([-1, -1], [0.0, 0.0])


def test_replicas_are_spread_by_row_and_rank() -> None:
    table, count = torch.tensor([[0, 3], [1, 9], [2, 4]]), torch.tensor([2, 1, 2])
    idx = torch.tensor([[0, 1], [2, -1], [0, 2]])
    assert map_replicas(idx, table, count, ep_rank=0).tolist() == [[0, 1], [4, -1], [0, 2]]
    assert map_replicas(idx, table, count, ep_rank=1).tolist() == [[3, 1], [2, -1], [3, 4]]
    # rank + 1 is one row further: 23333 is odd, so it is 1 modulo 2
    shifted = map_replicas(torch.cat([idx[:1], idx]), table, count, ep_rank=0)[1:]
    assert torch.equal(shifted, map_replicas(idx, table, count, ep_rank=1))


def test_replicas_beyond_32_bits() -> None:
    t = 92_037  # 92 036 * 23333 + 23333 passes 2^31
    idx = torch.zeros(t + 1, 1, dtype=torch.int64)
    chosen = map_replicas(idx, torch.tensor([[0, 1, 2]]), torch.tensor([3]), ep_rank=0)
    assert chosen[-1].item() == t * 23333 % 3
    assert (t * 23333 - 2**32) % 3 != t * 23333 % 3


def test_no_tokens() -> None:
    idx, weights = plain(torch.zeros(0, 8), EIGHT)
    assert (idx.shape, weights.shape) == ((0, 6), (0, 6))


def test_the_rule_accepts_a_near_tie_and_refuses_a_wrong_one() -> None:
    """The judge itself: scores that honest arithmetic may swap, against those that it may not."""
    near = f32([[1.0, 1.0 + 2.0**-23, 0.0, -1.0]])
    config = replace(EIGHT, num_experts=4, topk=2)

    def accepts(logits: Tensor, got: list[int]) -> bool:
        arguments = {
            **{"logits_te": logits, "bias_e": torch.zeros(4), "bias_vl_e": None, "image_mask_t": None},
            **{"mask_t": None, "config": config, "dtype": torch.float32},
        }
        contract = route(**arguments)[0]  # type: ignore[arg-type]
        oracles = type("Oracles", (), {"contract": contract, "arguments": arguments})()
        return Selection().judge(torch.tensor([got]), oracles).ok

    assert accepts(near, [1, 0])
    assert accepts(near, [0, 1])
    assert not accepts(near, [0, 2])
    equal = f32([[1.0, 1.0, 0.0, -1.0]])
    assert accepts(equal, [0, 1])
    assert not accepts(equal, [1, 0])
    assert not accepts(equal, [0, 0])
    assert not accepts(equal, [0, 4])


def test_weight_interval_holds_the_contract_and_is_narrow() -> None:
    inputs = {
        **{"logits_te": draw(9, 6, 384), "bias_e": torch.zeros(384), "bias_vl_e": None, "image_mask_t": None},
        **{"mask_t": None, "config": ROUTER_V41, "dtype": torch.float32},
    }
    idx, weights = route(**inputs)  # type: ignore[arg-type]
    low, high = weight_interval({**inputs, "idx_tk": idx}, 2.0**-22)
    assert ((low <= weights) & (weights <= high)).all()
    assert ((high - low) / weights).max() < 3e-6


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("router") == []


def test_the_adapters_of_tile_kernels_agree_with_the_reference(tile_kernels_faults) -> None:
    assert tile_kernels_faults("router") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged: Judged) -> None:
    outcomes = [o for o in judged("router") if o.check == "batch_invariant" and o.status is Status.PASSED]
    # a replica is chosen by the row in the batch
    rows = ((op.name, row) for op in CARD.ops for row in op.candidates if op.name != "map_replicas")
    promised = {(name, row.name) for name, row in rows if "cpu" in row.archs}
    assert promised <= {(o.op, o.candidate) for o in outcomes}


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 3}, "num_groups: expected a divisor of 16 experts, got 3"),
        ({"kept_groups": 5}, "kept_groups: expected 1 to 4, got 5"),
        ({"num_groups": 16, "kept_groups": 4}, "num_groups: expected two experts a group for its score, got 1"),
        ({"topk": 9}, "topk: expected 1 to 8 experts, got 9"),
        ({"route_scale": 0.0}, "route_scale: expected a positive number, got 0"),
    ],
)
def test_bad_configs_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GROUPED, **change)


@pytest.mark.parametrize("op", [route, route_triton, route_tile_kernels])
def test_bad_input_of_route_is_refused(op) -> None:
    logits, bias = torch.zeros(2, 8), torch.zeros(8)

    def call(logits=logits, bias=bias, vision=None, image=None, mask=None, config=EIGHT, **more):
        return op(logits, bias, vision, image, mask, config=config, **more)

    with pytest.raises(ValueError, match="logits_te: expected e=8, got e=7"):
        call(torch.zeros(2, 7))
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = logits.clone()
        spoiled[1, 3] = bad
        with pytest.raises(ValueError, match=r"logits_te: expected finite values, got .* at \(1, 3\)"):
            call(spoiled)
    with pytest.raises(ValueError, match="logits_te: expected finite values"):
        call(torch.full((2, 8), -math.inf))
    with pytest.raises(ValueError, match="bias_e: expected finite values"):
        call(bias=bias + math.inf)
    with pytest.raises(ValueError, match="bias_e: expected at least 6 enabled experts"):
        call(bias=f32([0.0] * 5 + [-math.inf] * 3))
    # one expert alone makes no group: a single group is left where two are kept
    few = f32([0.0, 0, 0, 0] + [0.0, -math.inf, -math.inf, -math.inf] * 3)
    with pytest.raises(ValueError, match="bias_e: expected at least 3 enabled experts"):
        call(torch.zeros(2, 16), few, config=GROUPED)
    with pytest.raises(ValueError, match="bias_vl_e: expected together with image_mask_t"):
        call(vision=bias)
    with pytest.raises(ValueError, match="mask_t: expected t=2, got t=3"):
        call(mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"logits_te: expected torch\.float32"):
        call(logits.bfloat16())
    with pytest.raises(TypeError, match=r"bias_e: expected torch\.float32"):
        call(bias=bias.double())
    with pytest.raises(TypeError, match=r"image_mask_t: expected torch\.bool"):
        call(vision=bias, image=torch.ones(2))
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        call(dtype=torch.float64)


@pytest.mark.parametrize("op", [route_hash, route_hash_triton])
def test_bad_input_of_route_hash_is_refused(op) -> None:
    logits, config = torch.zeros(2, 8), replace(EIGHT, topk=2)
    token, table = torch.tensor([0, 1]), torch.tensor([[1, 7], [5, 0]])
    with pytest.raises(ValueError, match=r"token_t: expected values in \[0, 2\), got -1"):
        op(logits, torch.tensor([0, -1]), table, None, config=config)
    with pytest.raises(ValueError, match=r"token_t: expected values in \[0, 2\), got 2"):
        op(logits, torch.tensor([2, 1]), table, None, config=config)
    with pytest.raises(ValueError, match=r"table_vk: expected values in \[0, 8\), got 8"):
        op(logits, token, torch.tensor([[1, 8], [5, 0]]), None, config=config)
    with pytest.raises(ValueError, match="table_vk: expected 2 different experts in a row"):
        op(logits, token, torch.tensor([[1, 1], [5, 0]]), None, config=config)
    with pytest.raises(ValueError, match="table_vk: expected k=2, got k=3"):
        op(logits, token, torch.zeros(2, 3, dtype=torch.int64), None, config=config)
    with pytest.raises(ValueError, match="logits_te: expected finite values"):
        op(logits + math.nan, token, table, None, config=config)
    with pytest.raises(TypeError, match="token_t: expected"):
        op(logits, token.float(), table, None, config=config)
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(logits, token, table, None, config=config, dtype=torch.float64)


@pytest.mark.parametrize("op", [map_replicas, map_replicas_triton])
def test_bad_input_of_map_replicas_is_refused(op) -> None:
    idx, table, count = torch.tensor([[0, 1]]), torch.tensor([[0, 2], [1, 1]]), torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"idx_tk: expected values in \[-1, 2\), got 2"):
        op(idx + 1, table, count, ep_rank=0)
    with pytest.raises(ValueError, match=r"count_e: expected values in \[1, 3\), got 0"):
        op(idx, table, count - 1, ep_rank=0)
    with pytest.raises(ValueError, match="count_e: expected e=2, got e=1"):
        op(idx, table, count[:1], ep_rank=0)
    with pytest.raises(ValueError, match="ep_rank: expected 0 or more, got -1"):
        op(idx, table, count, ep_rank=-1)
    with pytest.raises(TypeError, match=r"idx_tk: expected torch\.int64"):
        op(idx.int(), table, count, ep_rank=0)
    with pytest.raises(TypeError, match=r"count_e: expected torch\.int64"):
        op(idx, table, count.int(), ep_rank=0)


def test_what_the_triton_kernels_decline() -> None:
    pytest.importorskip("triton")
    many = replace(EIGHT, num_experts=1025)
    with pytest.raises(NotImplementedError, match="config: expected at most 1024 experts, got 1025"):
        route_triton(torch.zeros(1, 1025), torch.zeros(1025), None, None, None, config=many)
    wide = replace(EIGHT, num_experts=64, topk=33)
    with pytest.raises(NotImplementedError, match="config: expected at most 32 selected experts, got 33"):
        route_triton(torch.zeros(1, 64), torch.zeros(64), None, None, None, config=wide)
    table = torch.arange(33)[None]
    with pytest.raises(NotImplementedError, match="config: expected at most 32 selected experts, got 33"):
        route_hash_triton(torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64), table, None, config=wide)
    odd = replace(GROUPED, num_experts=24, num_groups=4)
    with pytest.raises(NotImplementedError, match="config: expected powers of two, got 4 groups of 6"):
        route_triton(torch.zeros(1, 24), torch.zeros(24), None, None, None, config=odd)


def test_what_tile_kernels_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, bias = torch.zeros(1, 16), torch.zeros(16)
    good = replace(EIGHT, num_experts=16, weight_sum=WeightSum.PLUS_EPS)
    odd = replace(good, num_experts=15)
    for config in (replace(good, weight_sum=WeightSum.EXACT), replace(good, scoring=Scoring.SIGMOID), GROUPED, odd):
        with pytest.raises(NotImplementedError, match="config: expected sqrt-softplus, no groups, sum"):
            route_tile_kernels(logits[:, : config.num_experts], bias[: config.num_experts], *[None] * 3, config=config)
    with pytest.raises(NotImplementedError, match="dtype: expected float32, got torch.bfloat16"):
        route_tile_kernels(logits, bias, None, None, None, config=good, dtype=torch.bfloat16)
    monkeypatch.setitem(sys.modules, "tile_kernels", None)  # as if it were not installed
    with pytest.raises(NotImplementedError, match="tile_kernels: expected tile-kernels 2.x, got none"):
        route_tile_kernels(logits, bias, None, None, None, config=good)
