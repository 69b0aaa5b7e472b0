"""The Hadamard transform: laws of the reference, then what both sides refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.hadamard import hadamard_triton
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.reference.config import FP8_1X128_UE8M0
from deeptwin.reference.hadamard import hadamard
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.quant import block_values, quantize

ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
CARD = load_card("hadamard")


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


# properties of the reference


@ALL_NUMERICS
def test_four_channels_by_hand(num: Numerics) -> None:
    y = hadamard(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), dtype=torch.float32, num=num)
    assert y.tolist() == [[5.0, -1.0, -2.0, 0.0]]


def test_a_unit_vector_gives_a_column_of_signs() -> None:
    y = hadamard(torch.eye(128), dtype=torch.float32, num=SEMANTIC) * 128**0.5
    assert torch.allclose(y.abs(), torch.ones_like(y), rtol=1e-12)
    for i, j in ((0, 5), (1, 1), (3, 3), (127, 127), (85, 42), (96, 33)):
        assert y[i, j].sign().item() == (-1) ** (i & j).bit_count()


def test_symmetric_orthonormal_and_its_own_inverse() -> None:
    """U15: H is symmetric and H H = 128 I before the factor."""
    matrix = hadamard(torch.eye(128), dtype=torch.float32, num=SEMANTIC)
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(128, dtype=torch.float64), atol=1e-15)
    x = draw(1, 3, 128)
    twice = hadamard(hadamard(x, num=SEMANTIC), num=SEMANTIC)
    assert torch.allclose(twice, x.double(), atol=1e-14)


def test_dot_products_are_kept_in_fp32() -> None:
    q, k = draw(2, 8, 128, dtype=torch.float32), draw(3, 8, 128, dtype=torch.float32)
    plain = (q.double() * k.double()).sum(1)
    turned = (hadamard(q, dtype=torch.float32) * hadamard(k, dtype=torch.float32)).sum(1)
    assert ((turned - plain).abs() <= 1e-6 * q.norm(dim=1) * k.norm(dim=1)).all()


def test_one_side_alone_changes_the_order_of_keys() -> None:
    """U16: without a quantiser <q, k> has to survive; turning only the query picks other keys."""
    q, k = draw(4, 1, 128), draw(5, 64, 128)
    plain = (k.double() @ q[0].double()).topk(8).indices.sort().values
    both = (hadamard(k, num=SEMANTIC) @ hadamard(q, num=SEMANTIC)[0]).topk(8).indices.sort().values
    one = (k.double() @ hadamard(q, num=SEMANTIC)[0]).topk(8).indices.sort().values
    assert torch.equal(both, plain)
    assert not torch.equal(one, plain)


def test_a_hot_channel_no_longer_ruins_the_quantiser() -> None:
    """U15: the error of FP8 scores of rows with a hot channel is below half; of Gaussian rows it is the same."""

    def error(hot: bool, turned: bool) -> float:
        q, k = draw(6, 64, 128, dtype=torch.float32), draw(7, 64, 128, dtype=torch.float32)
        if hot:  # in both, with rounded scales: one product of two rounded numbers is nearly all of a score
            q[:, 17] *= 100.0
            k[:, 17] *= 100.0
        truth = q.double() @ k.double().T
        rows = [hadamard(x, num=CONTRACT) if turned else x for x in (q, k)]
        values = [block_values(*quantize(x, fmt=FP8_1X128_UE8M0), fmt=FP8_1X128_UE8M0) for x in rows]
        return float((values[0] @ values[1].T - truth).norm() / truth.norm())

    assert error(hot=True, turned=True) < 0.5 * error(hot=True, turned=False)
    assert 0.8 < error(hot=False, turned=True) / error(hot=False, turned=False) < 1.25


def test_the_order_of_sums_is_fixed() -> None:
    """1 + 2^-24 is 1: only pairs that stand side by side are added first."""
    x = torch.tensor([[1.0, 2.0**-24, 2.0**-24, 2.0**-24]])
    y = hadamard(x, dtype=torch.float32, num=CONTRACT)
    # (1 + e) -> 1, (e + e) = 2^-23; their sum is exact: 1 + 2^-23, times a half
    assert y[0, 0].item() == (1.0 + 2.0**-23) / 2
    swapped = hadamard(x[:, [0, 2, 1, 3]], dtype=torch.float32, num=CONTRACT)
    assert torch.equal(swapped[:, 0], y[:, 0])


@ALL_NUMERICS
def test_one_channel_and_no_row(num: Numerics) -> None:
    assert hadamard(torch.tensor([[3.0]]), num=num).tolist() == [[3.0]]
    assert hadamard(torch.zeros(0, 128), num=num).shape == (0, 128)


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("hadamard") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("hadamard", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def test_values_are_refused() -> None:
    for function in (hadamard, hadamard_triton):
        with pytest.raises(ValueError, match="^x_td: "):
            function(draw(1, 128))
        for width in (0, 3, 96):
            with pytest.raises(ValueError, match="^x_td: expected"):
                function(draw(1, 2, width))


def test_dtypes_are_refused() -> None:
    for function in (hadamard, hadamard_triton):
        with pytest.raises(TypeError, match="^x_td: "):
            function(torch.zeros(2, 4, dtype=torch.int32))
        with pytest.raises(TypeError, match="^dtype: "):
            function(draw(1, 2, 4), dtype=torch.float64)


def test_the_kernel_declines_wide_rows_and_buffers_that_do_not_fit() -> None:
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError, match="^x_td: expected"):
        hadamard_triton(draw(1, 1, 8192))
    with pytest.raises(ValueError, match="^out: "):
        hadamard_triton(draw(1, 2, 4), out=torch.empty(2, 5, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="^out: "):
        hadamard_triton(draw(1, 2, 4), out=torch.empty(2, 4))
