"""Muon: the published ranges of singular values, its laws, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.gate import Runner, Settings, plan
from deeptwin.parity.outcome import Status
from deeptwin.reference.config import MUON_EXACT, MUON_FAST, MUON_V4, MuonConfig
from deeptwin.reference.muon import muon_step, newton_schulz
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC

CARD = load_card("muon")


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal(shape, dtype=np.float32))


def spread(shape: tuple[int, int], config: MuonConfig, draws: int = 20) -> tuple[float, float]:
    """The least and the largest singular value over Gaussian draws."""
    found = [
        torch.linalg.svdvals(newton_schulz(gaussian(s, *shape), config=config, num=SEMANTIC)) for s in range(draws)
    ]
    return min(x.min().item() for x in found), max(x.max().item() for x in found)


# properties of the reference


@pytest.mark.parametrize(
    ("schedule", "low", "high"),
    [
        (MUON_V4.schedule, 1.0000, 1.0006),
        ((MUON_FAST,) * 8, 0.68, 1.13),
        ((MUON_FAST,) * 5, 0.68, 1.13),
    ],
)
def test_the_published_range_of_a_rectangular_gaussian(
    schedule: tuple[tuple[float, float, float], ...], low: float, high: float
) -> None:
    """v3-v32-v4.md section 9.1: 64 x 256, 20 draws."""
    least, most = spread((64, 256), replace(MUON_V4, schedule=schedule))
    assert (round(least, 2), round(most, 2)) == (round(low, 2), round(high, 2))
    assert low - 5e-3 < least < most < high + 5e-3


def test_square_gaussians_are_not_well_conditioned() -> None:
    """Five steps leave singular values near zero that ten still bring to one, in most draws."""
    assert spread((64, 64), replace(MUON_V4, schedule=(MUON_FAST,) * 5))[0] < 0.1
    assert spread((64, 64), MUON_V4)[0] > 0.98


def test_the_schedule_of_v4() -> None:
    assert MUON_V4.schedule == ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
    # the last steps have a fixed point at one, with slope zero: errors are squared
    assert sum(MUON_EXACT) == 1.0
    assert MUON_EXACT[0] + 3 * MUON_EXACT[1] + 5 * MUON_EXACT[2] == 0.0
    assert (MUON_V4.momentum, MUON_V4.update_scale, MUON_V4.weight_decay) == (0.95, 0.18, 0.1)


def test_singular_vectors_stay_and_values_become_one() -> None:
    u, _, v = torch.linalg.svd(gaussian(3, 12, 30).double(), full_matrices=False)
    x = ((u * torch.linspace(1, 0.1, 12, dtype=torch.float64)) @ v).float()
    found = newton_schulz(x, config=MUON_V4)
    torch.testing.assert_close(found, u @ v, rtol=0, atol=2e-3)
    assert torch.linalg.svdvals(found.double()).sub(1).abs().max() < 2e-3


def test_zero_singular_values_stay_zero() -> None:
    found = newton_schulz(gaussian(4, 9, 3) @ gaussian(5, 3, 20), config=MUON_V4, num=SEMANTIC)
    values = torch.linalg.svdvals(found)
    assert (values[:3] - 1).abs().max() < 2e-2
    # what fp32 left of them in the product, stretched by every fast step
    assert values[3:].max() < 1e-2
    assert newton_schulz(torch.zeros(3, 5), config=MUON_V4).tolist() == torch.zeros(3, 5).tolist()


def test_a_factor_a_rotation_and_a_transposition() -> None:
    x, q = gaussian(6, 8, 24), torch.linalg.qr(gaussian(7, 8, 8).double()).Q
    plain = newton_schulz(x, config=MUON_V4, num=SEMANTIC)
    torch.testing.assert_close(newton_schulz(x * 2.0**9, config=MUON_V4, num=SEMANTIC), plain, rtol=0, atol=1e-12)
    turned = newton_schulz((q @ x.double()).float(), config=MUON_V4, num=SEMANTIC)
    torch.testing.assert_close(turned, q @ plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(newton_schulz(x.T, config=MUON_V4, num=SEMANTIC), plain.T, rtol=0, atol=1e-12)


def test_every_arithmetic_is_close_to_the_meaning() -> None:
    x = gaussian(8, 16, 64)
    meaning = newton_schulz(x, config=MUON_V4, num=SEMANTIC)
    for num in (CONTRACT, RIVAL):
        torch.testing.assert_close(newton_schulz(x, config=MUON_V4, num=num).double(), meaning, rtol=0, atol=2e-6)


def test_a_step_by_hand() -> None:
    """One element: the direction is a sign, and what is left are the scale, the decay and the momentum."""
    one = torch.ones(1, 1)
    config = replace(MUON_V4, schedule=(MUON_EXACT,))  # one stays one
    weight, momentum = muon_step(4 * one, 2 * one, -3 * one, learning_rate=0.5, config=config, num=SEMANTIC)
    assert momentum.item() == pytest.approx(0.95 * 2 - 3)
    assert weight.item() == pytest.approx(4 * (1 - 0.05) + 0.5 * 0.18)


def test_the_scale_is_the_longer_side_and_later_axes_are_flattened() -> None:
    zero, g = torch.zeros(4, 2, 8), gaussian(9, 4, 2, 8)
    weight, momentum = muon_step(zero, zero, g, learning_rate=1.0, config=MUON_V4, num=SEMANTIC)
    expected = -0.18 * 4 * newton_schulz(g.flatten(1), config=MUON_V4, num=SEMANTIC)
    torch.testing.assert_close(weight.flatten(1), expected, rtol=0, atol=1e-5)
    assert torch.equal(momentum, g.double())
    # a weight whose update is zero decays alone
    shrunk, _ = muon_step(g, zero, zero, learning_rate=0.5, config=MUON_V4, num=SEMANTIC)
    torch.testing.assert_close(shrunk, g.double() * 0.95, rtol=1e-12, atol=0)


def test_the_gate_passes_and_the_golden_vectors_hold() -> None:
    with Runner(Settings(jobs=1)) as runner:
        outcomes = runner.run([job for op in CARD.ops for job in plan(CARD, op, full=False)[:3]])
    assert {o.candidate for o in outcomes} == {"reference", "singular-values"}
    assert {o.status for o in outcomes} == {Status.PASSED}
    assert goldens.faults(CARD) == []


# rejected input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": ()}, "schedule: expected at least one step"),
        ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay: expected 0 or more, got -0.1"),
        ({"update_scale": 0.0}, "update_scale: expected a positive number, got 0.0"),
        ({"norm_floor": math.nan}, "norm_floor: expected a positive number, got nan"),
    ],
)
def test_bad_configs_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MUON_V4, **change)  # type: ignore[arg-type]


def test_bad_updates_are_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"update_ij: expected 2 dims \[i, j\]"):
        newton_schulz(x[0], config=MUON_V4)
    with pytest.raises(ValueError, match="update_ij: expected at least one element"):
        newton_schulz(x[:0], config=MUON_V4)
    with pytest.raises(ValueError, match=r"update_ij: expected finite values, got nan at \(0, 0\)"):
        newton_schulz(x * math.nan, config=MUON_V4)
    with pytest.raises(TypeError, match=r"update_ij: expected torch\.float32"):
        newton_schulz(x.bfloat16(), config=MUON_V4)


def test_bad_steps_are_refused() -> None:
    x = torch.ones(2, 3)

    def step(weight: Tensor = x, momentum: Tensor = x, gradient: Tensor = x, rate: float = 0.1) -> object:
        return muon_step(weight, momentum, gradient, learning_rate=rate, config=MUON_V4)

    with pytest.raises(ValueError, match=r"momentum: expected two axes or more, as weight \(2, 3\)"):
        step(momentum=x.T)
    with pytest.raises(ValueError, match="weight: expected two axes or more"):
        step(x[0], x[0], x[0])
    with pytest.raises(ValueError, match="gradient: expected at least one element"):
        step(x[:0], x[:0], x[:0])
    with pytest.raises(ValueError, match="gradient: expected finite values"):
        step(gradient=x / 0)
    with pytest.raises(ValueError, match="learning_rate: expected a positive number, got 0"):
        step(rate=0)
    with pytest.raises(TypeError, match=r"gradient: expected torch\.float32"):
        step(gradient=x.double())
