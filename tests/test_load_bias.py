"""Balance without an auxiliary loss: the sign rule on numbers worked by hand, its laws, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.gate import Runner, Settings, plan
from deeptwin.parity.outcome import Status
from deeptwin.reference.config import ROUTER_V3
from deeptwin.reference.load_bias import expert_load, update_bias
from deeptwin.reference.numerics import RIVAL, SEMANTIC
from deeptwin.reference.router import route

CARD = load_card("load_bias")


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# properties of the reference


def test_the_sign_rule_by_hand() -> None:
    """Mean 4: above goes down, below goes up, exactly at the mean stays; by how much plays no part."""
    moved = update_bias(f32(0, 0, 0.5, -0.5), counts(9, 4, 3, 0), speed=0.25)
    assert moved.tolist() == [-0.25, 0.0, 0.75, -0.25]


def test_the_comparison_is_exact_beyond_fp32() -> None:
    moved = update_bias(f32(0, 0, 0), counts(2**40 + 1, 2**40, 2**40 - 1), speed=1.0)
    assert moved.tolist() == [-1.0, 0.0, 1.0]


def test_the_speed_is_an_fp32_number() -> None:
    moved = update_bias(f32(0, 0), counts(1, 3), speed=0.001)
    assert moved.tolist() == [float(np.float32(0.001)), -float(np.float32(0.001))]
    assert update_bias(f32(0, 0), counts(1, 3), speed=0.001, num=SEMANTIC).tolist() == [0.001, -0.001]


def test_disabled_experts_stay_disabled_and_an_empty_batch_moves_nothing() -> None:
    bias = f32(-math.inf, 0.25, 1.0)
    assert update_bias(bias, counts(0, 2, 9), speed=0.5).tolist() == [-math.inf, 0.75, 0.5]
    assert update_bias(bias, counts(0, 0, 0), speed=0.5).tolist() == bias.tolist()
    assert update_bias(bias, counts(5, 0, 0), speed=0.0).tolist() == bias.tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=12))
def test_every_arithmetic_moves_the_same_experts(loads: list[int]) -> None:
    bias = torch.zeros(len(loads))
    moved = [update_bias(bias, counts(*loads), speed=1.0, num=num) for num in (SEMANTIC, RIVAL)]
    assert moved[0].tolist() == moved[1].tolist()
    assert (moved[0].sum() > 0) == (sum(x < np.mean(loads) for x in loads) > sum(x > np.mean(loads) for x in loads))


def test_repeated_steps_balance_a_skewed_router() -> None:
    """What the rule is for: the load of the busiest expert falls towards the mean, weights stay those of the scores."""
    rng = np.random.Generator(np.random.Philox(7))
    skew = torch.linspace(1.5, -1.5, 256)
    logits = torch.from_numpy(rng.standard_normal((256, 256), dtype=np.float32)) + skew
    bias = torch.zeros(256)
    busiest = []
    for _ in range(60):
        idx, _ = route(logits, bias, None, None, None, config=ROUTER_V3)
        count = expert_load(idx, num_experts=256)
        busiest.append(int(count.max()))
        bias = update_bias(bias, count, speed=0.01).float()
    assert count.sum() == 256 * 8
    assert busiest[-1] < busiest[0] / 2


def test_loads_count_slots_and_not_padding() -> None:
    idx = torch.tensor([[0, 2], [2, -1], [-1, -1]])
    assert expert_load(idx, num_experts=4).tolist() == [1, 0, 2, 0]
    assert expert_load(idx[:0], num_experts=2).tolist() == [0, 0]


def test_the_gate_passes_and_the_golden_vectors_hold() -> None:
    with Runner(Settings(jobs=1)) as runner:
        outcomes = runner.run([job for op in CARD.ops for job in plan(CARD, op, full=False)[:4]])
    assert {o.candidate for o in outcomes} == {"reference", "tally", "exact-mean"}
    assert {o.status for o in outcomes} == {Status.PASSED}
    assert goldens.faults(CARD) == []


# rejected input


def test_bad_loads_are_refused() -> None:
    idx = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=r"idx_tk: expected 2 dims \[t, k\]"):
        expert_load(idx[0], num_experts=2)
    with pytest.raises(ValueError, match=r"idx_tk: expected values in \[-1, 2\), got 2"):
        expert_load(idx + 1, num_experts=2)
    with pytest.raises(ValueError, match="num_experts: expected at least 1, got 0"):
        expert_load(idx, num_experts=0)
    with pytest.raises(TypeError, match=r"idx_tk: expected torch\.int64"):
        expert_load(idx.int(), num_experts=2)


def test_bad_updates_are_refused() -> None:
    bias, count = f32(0, 0), counts(1, 2)
    with pytest.raises(ValueError, match="count_e: expected e=2, got e=3"):
        update_bias(bias, counts(1, 2, 3), speed=0.1)
    with pytest.raises(ValueError, match="bias_e: expected at least one expert, got none"):
        update_bias(bias[:0], count[:0], speed=0.1)
    with pytest.raises(ValueError, match="count_e: expected 0 or more, got -1"):
        update_bias(bias, counts(1, -1), speed=0.1)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"bias_e: expected finite values or -inf"):
            update_bias(f32(0, bad), count, speed=0.1)
        with pytest.raises(ValueError, match="speed: expected a finite number from 0 on"):
            update_bias(bias, count, speed=bad)
    with pytest.raises(ValueError, match="speed: expected a finite number from 0 on, got -1"):
        update_bias(bias, count, speed=-1)
    with pytest.raises(TypeError, match=r"bias_e: expected torch\.float32"):
        update_bias(bias.double(), count, speed=0.1)
    with pytest.raises(TypeError, match=r"count_e: expected torch\.int64"):
        update_bias(bias, count.int(), speed=0.1)
