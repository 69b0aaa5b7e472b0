"""Training loss of a drafter and the measures of its confidences: worked numbers, limits, refused input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.reference.config import DraftLossConfig
from deeptwin.reference.dspark_loss import (
    accept_labels,
    block_mask,
    calibration_error,
    confidence_metrics,
    dspark_loss,
    evaluate_block,
    expected_length,
    fit_temperatures,
    log_grid,
    position_weights,
)
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC

ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
CONFIG = DraftLossConfig()


def f32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def logs(*rows: list[float]) -> Tensor:
    """Logits [1, positions, v] of the given distributions."""
    return f32([rows]).log()


YES = torch.ones(1, 2, dtype=torch.bool)


# properties of the reference


@ALL_NUMERICS
def test_labels_are_the_overlap_of_the_distributions(num) -> None:
    labels = accept_labels(logs([0.5, 0.5], [1, 1e-30]), logs([0.7, 0.3], [1e-30, 1]), num=num)
    assert labels[0, 0].item() == pytest.approx(0.8, abs=1e-6)
    assert labels[0, 1].item() == pytest.approx(0.0, abs=1e-6)
    same = torch.randn(2, 3, 9)
    assert accept_labels(same, same, num=num).eq(1).all()


@ALL_NUMERICS
def test_the_loss_by_hand(num) -> None:
    """Two positions of weights 1 and e^-1/4: p = (½, ½), q = (0.7, 0.3) at both, confidence logit 0."""
    args = logs([0.5, 0.5], [0.5, 0.5]), logs([0.7, 0.3], [0.7, 0.3]), f32([[0, 0]]), torch.tensor([[0, 1]])
    loss, terms = dspark_loss(*args, YES, config=CONFIG, num=num)
    assert terms.tolist() == pytest.approx([math.log(2), 0.4, math.log(2)], rel=2e-6)
    assert loss.item() == pytest.approx(0.1 * math.log(2) + 0.9 * 0.4 + math.log(2), rel=2e-6)


def test_the_weight_of_a_position() -> None:
    """From j = 0; the paper's text, from 1 on, is the same up to a factor, which the mean takes out."""
    assert position_weights(3, decay=4.0).tolist() == pytest.approx([1, 0.7788007830714049, 0.6065306597126334])


def test_ranks_share_one_denominator() -> None:
    torch.manual_seed(0)
    args = [torch.randn(4, 3, 7), torch.randn(4, 3, 7), torch.randn(4, 3), torch.randint(0, 7, (4, 3))]
    valid = torch.rand(4, 3) < 0.6
    whole, _ = dspark_loss(*args, valid, config=CONFIG, num=SEMANTIC)
    weight = (position_weights(3, decay=4.0) * valid).sum(1)
    parts = [
        dspark_loss(
            *(x[rows] for x in args), valid[rows], config=CONFIG, ranks=(2, weight[others].sum().item()), num=SEMANTIC
        )[0]
        for rows, others in ((slice(0, 1), slice(1, 4)), (slice(1, 4), slice(0, 1)))
    ]
    # each rank multiplies by their number, so that their average is the loss of all
    assert sum(part.item() for part in parts) / 2 == pytest.approx(whole.item(), rel=1e-12)


def test_what_is_not_valid_is_not_read() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    poison = torch.full((1, 2, 3), torch.nan)
    loss, terms = dspark_loss(poison, poison, poison[..., 0], torch.tensor([[-9, 99]]), nothing, config=CONFIG)
    assert loss.item() == 0
    assert terms.tolist() == [0, 0, 0]


@ALL_NUMERICS
def test_expected_length_counts_the_prefix(num) -> None:
    valid = torch.tensor([[True, True, False, True]])
    length = expected_length(f32([[0.5, 0.5, 1, 1]]), valid, num=num)
    assert length.tolist() == [1.75]  # 1 + ½ + ¼, and nothing behind the hole


def test_a_block_sees_the_context_before_its_anchor_and_itself() -> None:
    mask = block_mask(torch.tensor([2, 0]), context=3, block=2)
    assert mask.int().tolist() == [[1, 1, 0, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 0, 1, 1]] * 2


def test_evaluation_accepts_strictly_below_the_ratio() -> None:
    p, q = f32([[0.5, 0.5]]), f32([[0.25, 0.75], [0.1, 0.9]])
    count, dist = evaluate_block(p, q, torch.tensor([0]), f32([0.4999]))
    assert count == 1
    assert dist.tolist() == pytest.approx([0.1, 0.9])
    count, dist = evaluate_block(p, q, torch.tensor([0]), f32([0.5]))
    assert count == 0
    assert dist.tolist() == [0, 1]
    # no mass is left where draft and target agree: the target itself
    count, dist = evaluate_block(p, f32([[0.5, 0.5]] * 2), torch.tensor([1]), f32([1.0]))
    assert count == 0
    assert dist.tolist() == [0.5, 0.5]


def test_evaluation_is_exact_for_one_hot_distributions() -> None:
    """Temperatures below 1e-5 are argmax distributions: a draft stands exactly if it is the target's argmax."""
    hot = torch.eye(3)
    count, dist = evaluate_block(hot[[1, 2]], hot[[1, 0, 2]], torch.tensor([1, 2]), f32([0.999, 0.0]))
    assert count == 1
    assert dist.tolist() == [1, 0, 0]


def test_evaluation_keeps_the_law_of_the_target() -> None:
    """Σ over drafts of p(t) · what follows is q: computed, not sampled."""
    rng = np.random.Generator(np.random.Philox(3))
    for _ in range(20):
        p, q = (torch.from_numpy(rng.dirichlet([0.5] * 5)) for _ in range(2))
        chance = (q / p).clamp(max=1)
        law = p * chance
        for t in range(5):
            if chance[t] < 1:
                _, after = evaluate_block(p[None], torch.stack([q, q]), torch.tensor([t]), f32([1.0]), num=SEMANTIC)
                law = law + p[t] * (1 - chance[t]) * after
        assert torch.allclose(law, q, atol=1e-7)


def test_calibration_of_known_bins() -> None:
    p, hit = f32([0.05, 0.05, 0.95, 1.0]), torch.tensor([0, 0, 1, 0])
    # bins of 0.1: |0.1 - 0| and |1.95 - 1| over four samples
    assert calibration_error(p, hit, bins=10).item() == pytest.approx((0.1 + 0.95) / 4, rel=1e-6)


def test_metrics_of_perfect_and_useless_confidences() -> None:
    accepted = torch.tensor([[True, True], [True, False], [False, True]])
    ece, area, brier = confidence_metrics(accepted.to(torch.float32), accepted).tolist()
    assert (ece, area, brier) == (pytest.approx(0, abs=1e-7), 1.0, pytest.approx(0, abs=1e-7))
    _, area, brier = confidence_metrics(torch.ones(3, 2), accepted).tolist()
    assert area == 0.5
    assert brier == pytest.approx(0.5)  # three of six prefixes are accepted
    assert math.isnan(confidence_metrics(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))[1].item())


def test_temperatures_that_were_applied_are_found_again() -> None:
    """Logits that are too sure by factors on the grid: sequential scaling brings the calibration error down."""
    rng = np.random.Generator(np.random.Philox(5))
    true = rng.normal(0.5, 1.5, (20000, 2))
    accepted = torch.from_numpy(rng.random(true.shape) < 1 / (1 + np.exp(-true)))
    grid = log_grid()
    assert (len(grid), grid[0], grid[20], grid[40]) == (41, pytest.approx(0.1), 1.0, pytest.approx(10.0))
    logits = torch.from_numpy(true) * torch.tensor([grid[30], grid[14]])
    found = fit_temperatures(logits, accepted, grid=grid, bins=15)
    assert abs(grid.index(found[0]) - 30) <= 1
    assert abs(grid.index(found[1]) - 14) <= 2
    prefix, hits = torch.cumprod(torch.sigmoid(logits), 1)[:, 1], torch.cumprod(accepted.long(), 1)[:, 1]
    fitted = torch.cumprod(torch.sigmoid(logits / torch.tensor(found)), 1)[:, 1]
    errors = [calibration_error(p, hits, bins=15).item() for p in (prefix, fitted)]
    assert errors[1] < 0.015 < errors[0]


def test_the_first_of_equal_temperatures_wins() -> None:
    zero = torch.zeros(4, 1)
    assert fit_temperatures(zero, zero.bool(), grid=(2.0, 1.0), bins=4) == (2.0,)


# rejected input


def test_bad_input_is_refused() -> None:
    x, y, flags = torch.zeros(1, 2, 3), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="target_bjv: expected v=3, got v=4"):
        accept_labels(x, torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"token_bj: expected values in \[0, 3\), got 3"):
        dspark_loss(x, x, y, ids + 3, flags, config=CONFIG)
    with pytest.raises(ValueError, match="ranks: expected a positive number, got 0"):
        dspark_loss(x, x, y, ids, flags, config=CONFIG, ranks=(0, 0.0))
    with pytest.raises(TypeError, match="token_bj: expected"):
        dspark_loss(x, x, y, y, flags, config=CONFIG)
    with pytest.raises(TypeError, match="valid_bj: expected"):
        dspark_loss(x, x, y, ids, y, config=CONFIG)
    with pytest.raises(ValueError, match="valid_bj: expected b=1, got b=2"):
        expected_length(y, torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"anchor_b: expected values in \[0, 3\), got 3"):
        block_mask(torch.tensor([3]), context=3, block=2)
    with pytest.raises(TypeError, match="anchor_b: expected"):
        block_mask(torch.tensor([1.0]), context=3, block=2)
    with pytest.raises(ValueError, match="target_jv: expected i=3, got i=2"):
        evaluate_block(x[0], x[0], ids[0], y[0])
    with pytest.raises(ValueError, match="p_n: expected a positive number, got 0"):
        calibration_error(torch.zeros(0), torch.zeros(0), bins=3)
    with pytest.raises(ValueError, match="bins: expected a positive number, got 0"):
        calibration_error(y[0], y[0], bins=0)
    with pytest.raises(ValueError, match="accepted_bj: expected j=2, got j=3"):
        confidence_metrics(y, torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="accepted_bj: expected"):
        confidence_metrics(y, y)
    with pytest.raises(ValueError, match="grid: expected positive temperatures"):
        fit_temperatures(y, flags, grid=(0.0, 1.0), bins=3)
    with pytest.raises(TypeError, match="accepted_bj: expected"):
        fit_temperatures(y, y, grid=(1.0,), bins=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"decay": 0.0}, "decay: expected a positive number"), ({"ce": -1.0}, "ce: expected 0 or more, got -1")],
)
def test_bad_configs_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftLossConfig(**change)
