"""Hyper-connections: streams, coefficients, Sinkhorn, the two schedules, eager and lazy updates."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.mhc import (
    mhc_apply_tile_kernels,
    mhc_apply_triton,
    mhc_boundary_tile_kernels,
    mhc_boundary_triton,
    mhc_expand_tile_kernels,
    mhc_expand_triton,
    mhc_head_tile_kernels,
    mhc_head_triton,
    mhc_mixes_deep_gemm,
    mhc_mixes_tile_kernels,
    mhc_mixes_triton,
    mhc_post_tile_kernels,
    mhc_post_triton,
    mhc_sinkhorn_tile_kernels,
    mhc_sinkhorn_triton,
    mhc_tap_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.mhc import MhcCase, draw_mixes
from deeptwin.reference.config import MHC_V4, MHC_V41, MhcConfig
from deeptwin.reference.mhc import (
    mhc_apply,
    mhc_boundary,
    mhc_enter,
    mhc_expand,
    mhc_head,
    mhc_mixes,
    mhc_post,
    mhc_settle,
    mhc_sinkhorn,
    mhc_tap,
)
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.weights import MhcCarry, MhcSite

CARD = load_card("mhc")
every_arithmetic = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
both_schedules = pytest.mark.parametrize("config", [MHC_V41, MHC_V4], ids=["shifted", "not-shifted"])
BF16, F32 = torch.bfloat16, torch.float32


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def site_of(width: int, seed: int = 1, outputs: int = 24, kinds: int = 3) -> MhcSite:
    return MhcSite(
        fn_wx=normal(outputs, 4 * width, seed=seed) * (4 * width) ** -0.5,
        scale_z=torch.tensor([1.0, 0.5, 2.0])[:kinds],
        base_w=normal(outputs, seed=seed + 1),
    )


def logits_of(count: int, sigma: float, seed: int = 0) -> Tensor:
    return normal(count, 4, 4, seed=seed) * sigma


# properties of the reference


def test_the_worked_matrix() -> None:
    logits = torch.tensor([[[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 0, 0], [1, -1, 1, -1]]], dtype=F32)
    found = mhc_sinkhorn(logits, iters=20, eps=1e-6, num=SEMANTIC)[0]
    expected = [
        [0.020540999, 0.127568088, 0.210621003, 0.641268910],
        [0.474899787, 0.399156516, 0.089190826, 0.036751871],
        [0.160596001, 0.366918237, 0.222862806, 0.249621956],
        [0.343962214, 0.106356159, 0.477324365, 0.072356263],
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_the_initial_matrix_and_flat_logits() -> None:
    found = mhc_sinkhorn((6 * torch.eye(4) - 3)[None], iters=20, eps=1e-6, num=SEMANTIC)[0]
    expected = 0.00246144 + (0.99261467 - 0.00246144) * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    flat = mhc_sinkhorn(torch.zeros(1, 4, 4), iters=20, eps=1e-6, num=SEMANTIC)
    torch.testing.assert_close(flat, torch.full((1, 4, 4), 0.25 - 2.5e-7, dtype=torch.float64), rtol=0, atol=1e-9)


@every_arithmetic
@pytest.mark.parametrize("sigma", [1.0, 4.0, 40.0])
def test_columns_end_near_one_and_entries_are_positive(num: Numerics, sigma: float) -> None:
    found = mhc_sinkhorn(logits_of(200, sigma), iters=20, eps=1e-6, num=num)
    assert (found > 0).all()
    columns = found.sum(1)
    assert columns.max() < 1 + 1e-6
    assert columns.min() > 1 - 3e-6


def test_rows_converge_only_where_logits_are_mild() -> None:
    mild = mhc_sinkhorn(logits_of(2000, 1.0), iters=20, eps=1e-6, num=SEMANTIC).sum(2)
    peaked = mhc_sinkhorn(logits_of(2000, 10.0), iters=20, eps=1e-6, num=SEMANTIC).sum(2)
    assert (mild - 1).abs().max() < 3e-3
    assert 1e-2 < (peaked - 1).abs().max() < 0.1


def test_the_number_of_iterations_shows_on_peaked_logits_alone() -> None:
    def moves(sigma: float, iters: int) -> float:
        logits = logits_of(2000, sigma)
        twenty = mhc_sinkhorn(logits, iters=20, eps=1e-6, num=SEMANTIC)
        return (twenty - mhc_sinkhorn(logits, iters=iters, eps=1e-6, num=SEMANTIC)).abs().max().item()

    assert moves(0.5, 19) < 1e-6
    assert moves(4.0, 19) > 1e-3
    assert moves(4.0, 10) > 1e-3


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=16, max_size=16), st.lists(st.floats(-9, 9), min_size=4, max_size=4)
)
def test_a_constant_for_a_row_of_logits_changes_nothing(logits: list[float], shift: list[float]) -> None:
    matrix = torch.tensor(logits, dtype=torch.float64).view(1, 4, 4)
    moved = matrix + torch.tensor(shift, dtype=torch.float64).view(1, 4, 1)
    a, b = (mhc_sinkhorn(x, iters=20, eps=1e-6, num=SEMANTIC) for x in (matrix, moved))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_one_iteration_is_a_softmax_and_a_column_step() -> None:
    logits = logits_of(3, 1.0).double()
    start = logits.softmax(-1) + 1e-3
    found = mhc_sinkhorn(logits, iters=1, eps=1e-3, num=SEMANTIC)
    torch.testing.assert_close(found, start / (start.sum(1, keepdim=True) + 1e-3))


@every_arithmetic
def test_zero_logits_give_gates_of_one_half(num: Numerics) -> None:
    site = MhcSite(fn_wx=torch.zeros(24, 32), scale_z=torch.ones(3), base_w=torch.zeros(24))
    pre, post, comb = mhc_mixes(normal(2, 4, 8), site, config=MHC_V41, num=num)
    assert post.tolist() == [[1.0] * 4] * 2
    torch.testing.assert_close(pre.double(), torch.full((2, 4), 0.5 + 1e-6).double(), rtol=0, atol=6e-8)
    torch.testing.assert_close(comb.double(), torch.full((2, 4, 4), 0.25 - 2.5e-7).double(), rtol=0, atol=6e-8)


def test_kinds_of_coefficients_stand_in_their_places() -> None:
    base = torch.arange(24.0) / 8 - 1.5
    site = MhcSite(fn_wx=torch.zeros(24, 32), scale_z=torch.tensor([3.0, 5.0, 7.0]), base_w=base)
    pre, post, comb = mhc_mixes(normal(1, 4, 8), site, config=MHC_V41, num=SEMANTIC)
    torch.testing.assert_close(pre[0], base[:4].double().sigmoid() + 1e-6)
    torch.testing.assert_close(post[0], 2 * base[4:8].double().sigmoid())
    expected = mhc_sinkhorn(base[8:].view(1, 4, 4), iters=20, eps=1e-6, num=SEMANTIC)
    torch.testing.assert_close(comb, expected)


def test_the_projection_is_that_of_the_stream_after_stream_row() -> None:
    stream, site = normal(3, 4, 8, dtype=BF16), site_of(8)
    flat = stream.double().reshape(3, 32)
    w = flat @ site.fn_wx.double().T / (flat.square().mean(1, keepdim=True) + 1e-20).sqrt()
    w = w * torch.tensor([1.0] * 4 + [0.5] * 4 + [2.0] * 16) + site.base_w.double()
    pre, post, comb = mhc_mixes(stream, site, config=MHC_V41, num=SEMANTIC)
    torch.testing.assert_close(pre, w[:, :4].sigmoid() + 1e-6)
    torch.testing.assert_close(post, 2 * w[:, 4:8].sigmoid())
    torch.testing.assert_close(comb, mhc_sinkhorn(w[:, 8:].reshape(3, 4, 4), iters=20, eps=1e-6, num=SEMANTIC))


@every_arithmetic
def test_ranges_of_the_gates(num: Numerics) -> None:
    site = dataclasses.replace(site_of(16), scale_z=torch.tensor([30.0, 30.0, 30.0]))
    pre, post, _ = mhc_mixes(normal(64, 4, 16, dtype=BF16), site, config=MHC_V41, num=num)
    assert pre.min() >= 1e-6 * (1 - 1e-6)
    assert pre.max() <= 1 + 1.1e-6
    assert post.min() >= 0
    assert post.max() <= 2


@pytest.mark.parametrize("num", [CONTRACT, RIVAL], ids=lambda num: num.name)
def test_a_power_of_two_on_the_stream_changes_no_bit(num: Numerics) -> None:
    stream, site = normal(5, 4, 24, dtype=BF16), site_of(24)
    plain = mhc_mixes(stream, site, config=MHC_V41, num=num)
    for power in (-8, 20):
        scaled = mhc_mixes(stream * 2.0**power, site, config=MHC_V41, num=num)
        assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_zero_streams_and_saturated_ones_leave_base_alone() -> None:
    site = site_of(16)
    zero = mhc_mixes(torch.zeros(1, 4, 16, dtype=BF16), site, config=MHC_V41)
    assert torch.isfinite(zero[0]).all()
    torch.testing.assert_close(zero[0][0], site.base_w[:4].double().sigmoid() + 1e-6, rtol=1e-6, atol=0)
    huge = mhc_mixes(normal(1, 4, 16, dtype=BF16) * 2.0**65, site, config=MHC_V41)
    assert all(torch.equal(a, b) for a, b in zip(zero, huge, strict=True))
    meant = mhc_mixes(normal(1, 4, 16, dtype=BF16) * 2.0**65, site, config=MHC_V41, num=SEMANTIC)
    assert (meant[0] - zero[0]).abs().max() > 1e-2


def test_nan_in_one_stream_spoils_its_own_token() -> None:
    stream, y, site = normal(3, 4, 8, dtype=BF16), normal(3, 8, dtype=BF16), site_of(8)
    mixes = mhc_mixes(stream, site, config=MHC_V41)
    clean = mhc_boundary(stream, y, *mixes, site, config=MHC_V41)
    stream[1, 2, 3] = torch.nan
    spoiled = mhc_boundary(stream, y, *mixes, site, config=MHC_V41)
    assert spoiled[0][1, :, 3].isnan().all()
    assert all(part[1].isnan().any() for part in spoiled)
    assert all(torch.equal(a[::2], b[::2]) for a, b in zip(clean, spoiled, strict=True))


def test_permuted_streams_permute_everything() -> None:
    stream, site = normal(3, 4, 8, dtype=BF16), site_of(8)
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.cat([order, 4 + order, (8 + 4 * order[:, None] + order).flatten()])
    moved = MhcSite(
        fn_wx=site.fn_wx.unflatten(1, (4, 8))[rows][:, order].flatten(1), scale_z=site.scale_z, base_w=site.base_w[rows]
    )
    pre, post, comb = mhc_mixes(stream, site, config=MHC_V41, num=SEMANTIC)
    other = mhc_mixes(stream[:, order], moved, config=MHC_V41, num=SEMANTIC)
    torch.testing.assert_close(other[0], pre[:, order])
    torch.testing.assert_close(other[1], post[:, order])
    torch.testing.assert_close(other[2], comb[:, order][:, :, order])


def test_the_update_sums_over_input_streams() -> None:
    stream = torch.eye(4)[None]  # channel i marks stream i
    comb = torch.arange(16.0).view(1, 4, 4)
    y = torch.tensor([[0.0, 0.0, 0.0, 64.0]])
    new = mhc_post(stream, y, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), comb, num=SEMANTIC)[0]
    # stream o, channel i: comb[i, o]; the last channel also has y
    expected = [[0, 4, 8, 12 + 64], [1, 5, 9, 13 + 128], [2, 6, 10, 14 + 192], [3, 7, 11, 15 + 256]]
    assert new.tolist() == expected
    symmetric = comb + comb.transpose(1, 2)
    a, b = (mhc_post(stream, y, torch.ones(1, 4), c, num=SEMANTIC) for c in (symmetric, symmetric.transpose(1, 2)))
    assert torch.equal(a, b)


def test_an_identity_matrix_keeps_the_streams() -> None:
    stream = normal(2, 4, 8, dtype=BF16)
    comb = torch.eye(4).expand(2, 4, 4)
    assert torch.equal(mhc_post(stream, normal(2, 8), torch.zeros(2, 4), comb), stream.double())


def test_equal_streams_shrink_by_the_column_sums_alone() -> None:
    row = normal(3, 1, 8)
    comb = mhc_sinkhorn(logits_of(3, 2.0), iters=20, eps=1e-6, num=SEMANTIC)
    new = mhc_post(row.repeat(1, 4, 1), torch.zeros(3, 8), torch.ones(3, 4), comb, num=SEMANTIC)
    torch.testing.assert_close(new, row.double() * comb.sum(1)[:, :, None])
    torch.testing.assert_close(new, row.double().repeat(1, 4, 1), rtol=2e-6, atol=0)


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_other_numbers_of_streams(streams: int) -> None:
    config = dataclasses.replace(MHC_V4, streams=streams)
    stream, _ = mhc_expand(normal(3, 8, dtype=BF16), config=config)
    outputs = config.coefficients
    site = MhcSite(
        fn_wx=normal(outputs, streams * 8) / 8, scale_z=torch.tensor([1.0, 2.0, 3.0]), base_w=normal(outputs, seed=3)
    )
    pre, post, comb = mhc_mixes(stream, site, config=config, num=SEMANTIC)
    assert [part.shape for part in (pre, post, comb)] == [(3, streams), (3, streams), (3, streams, streams)]
    torch.testing.assert_close(comb.sum(1), torch.ones(3, streams).double(), rtol=0, atol=2e-6)
    assert mhc_apply(pre, mhc_post(stream, normal(3, 8), post, comb)).shape == (3, 8)


def test_the_read_and_the_tap() -> None:
    stream = torch.tensor([[[1.0, 8.0], [2.0, 0.0], [4.0, 0.0], [9.0, 1.0]]])
    assert mhc_apply(torch.tensor([[1.0, 0.5, 0.25, 2.0]]), stream, num=SEMANTIC).tolist() == [[21.0, 10.0]]
    assert mhc_tap(stream, num=SEMANTIC).tolist() == [[4.0, 2.25]]
    # rounded once: the bf16 sum 256 + 1 + 1 + 1 would stay at 256
    steps = torch.tensor([[[256.0], [1.0], [1.0], [2.0]]], dtype=BF16)
    assert mhc_apply(torch.ones(1, 4), steps).item() == 260
    assert mhc_tap(steps, dtype=F32).item() == 65


@both_schedules
def test_the_first_sub_layer_of_a_shifted_model_reads_the_embedding(config: MhcConfig) -> None:
    rows = normal(3, 8, dtype=BF16)
    stream, pre = mhc_expand(rows, config=config)
    assert torch.equal(stream, torch.stack([rows] * 4, 1))
    assert torch.equal(mhc_apply(pre, stream), rows.double())
    x, carry = mhc_enter(MhcCarry(stream_tnm=stream, pre_tn=pre), site_of(8), config=config)
    assert torch.equal(x, rows.double()) == config.shifted
    assert carry.pre_tn is not None


def run_stack(config: MhcConfig, *, lazy: bool, num: Numerics = CONTRACT, keep: Tensor | None = None) -> Tensor:
    """Six sub-layers (tanh of the read); `keep` drops tokens before the fourth, where an update may wait."""
    stream, pre = mhc_expand(normal(5, 16, dtype=BF16), config=config)
    carry = MhcCarry(stream_tnm=stream, pre_tn=pre if config.shifted else None)
    for number in range(6):
        if keep is not None and number == 3:
            carry = carry.rows(keep)
        x, carry = mhc_enter(carry, site_of(16, seed=10 * number), config=config, num=num)
        carry = carry.left(num.bf16(torch.tanh(num.wide(x))))
        carry = carry if lazy else mhc_settle(carry, num=num)
    carry = mhc_settle(carry, num=num)
    if config.shifted:
        assert carry.pre_tn is not None
        return mhc_apply(carry.pre_tn, carry.stream_tnm, num=num)
    return mhc_head(carry.stream_tnm, site_of(16, 99, 4, 1), config=config, num=num)


@both_schedules
@every_arithmetic
def test_lazy_updates_equal_eager_ones(config: MhcConfig, num: Numerics) -> None:
    assert torch.equal(run_stack(config, lazy=True, num=num), run_stack(config, lazy=False, num=num))


@both_schedules
def test_tokens_may_be_dropped_while_an_update_waits(config: MhcConfig) -> None:
    keep = torch.tensor([4, 0, 2])
    whole = run_stack(config, lazy=True)
    assert torch.equal(run_stack(config, lazy=True, keep=keep), whole[keep])
    assert torch.equal(run_stack(config, lazy=False, keep=keep), whole[keep])


@both_schedules
def test_the_boundary_is_the_steps_between_two_sub_layers(config: MhcConfig) -> None:
    stream, pre = mhc_expand(normal(3, 16, dtype=BF16), config=config)
    first, second = site_of(16), site_of(16, seed=7)
    x, carry = mhc_enter(MhcCarry(stream_tnm=stream, pre_tn=pre), first, config=config)
    y = torch.tanh(x).to(BF16)
    expected_x, after = mhc_enter(carry.left(y), second, config=config)
    old = (carry.pre_tn, carry.post_tn, carry.comb_tnn)
    stream, x, *mixes = mhc_boundary(stream, y, *old, second, config=config)
    assert torch.equal(stream, after.stream_tnm)
    assert torch.equal(x, expected_x)
    assert all(torch.equal(a, b) for a, b in zip(mixes, (after.pre_tn, after.post_tn, after.comb_tnn), strict=True))


def test_the_two_schedules_differ() -> None:
    shifted = run_stack(dataclasses.replace(MHC_V4, shifted=True), lazy=False)
    assert (shifted - run_stack(MHC_V4, lazy=False)).abs().max() > 1e-2


def test_no_tokens() -> None:
    site, none = site_of(8), torch.zeros(0, 4, 8, dtype=BF16)
    mixes = mhc_mixes(none, site, config=MHC_V41)
    assert [tuple(part.shape) for part in mixes] == [(0, 4), (0, 4), (0, 4, 4)]
    found = mhc_boundary(none, torch.zeros(0, 8), *mixes, site, config=MHC_V41)
    assert [tuple(part.shape) for part in found] == [(0, 4, 8), (0, 8), (0, 4), (0, 4), (0, 4, 4)]


def test_weights_by_their_names_in_a_checkpoint() -> None:
    site = site_of(8)
    state = {
        "layers.0.hc_attn_fn": site.fn_wx,
        "layers.0.hc_attn_scale": site.scale_z,
        "layers.0.hc_attn_base": site.base_w,
    }

    def take(prefix: str, **other: Tensor) -> MhcSite:
        found = state | {f"layers.0.hc_attn_{name}": x for name, x in other.items()}
        return MhcSite.from_state_dict(found, prefix=prefix, config=MHC_V41)

    assert take("layers.0.hc_attn_").fn_wx is site.fn_wx
    with pytest.raises(ValueError, match="state: expected layers.1.hc_attn_fn"):
        take("layers.1.hc_attn_")
    with pytest.raises(ValueError, match="state: expected w=24, got w=23"):
        take("layers.0.hc_attn_", fn=site.fn_wx[1:])
    with pytest.raises(TypeError, match="layers.0.hc_attn_fn: expected torch.float32, got torch.bfloat16"):
        take("layers.0.hc_attn_", fn=site.fn_wx.to(BF16))
    with pytest.raises(ValueError, match="state: expected no layers.0.hc_attn_norm.weight"):
        take("layers.0.hc_attn_", **{"norm.weight": torch.ones(32)})


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("mhc") == []


def test_the_adapters_of_tile_kernels_agree_with_the_reference(tile_kernels_faults) -> None:
    assert tile_kernels_faults("mhc") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("mhc", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def stream_of(width: int = 8) -> Tensor:
    return torch.ones(1, 4, width, dtype=BF16)


@pytest.mark.parametrize("op", [mhc_expand, mhc_expand_triton, mhc_expand_tile_kernels])
def test_bad_input_of_mhc_expand_is_refused(op) -> None:
    with pytest.raises(ValueError, match="x_tm: expected 2 dims"):
        op(torch.ones(8), config=MHC_V41)
    with pytest.raises(TypeError, match="x_tm: expected"):
        op(torch.ones(1, 8, dtype=torch.int32), config=MHC_V41)


@pytest.mark.parametrize("op", [mhc_apply, mhc_apply_triton, mhc_apply_tile_kernels])
def test_bad_input_of_mhc_apply_is_refused(op) -> None:
    with pytest.raises(ValueError, match="pre_tn: expected n=4, got n=3"):
        op(torch.ones(1, 3), stream_of())
    with pytest.raises(TypeError, match="stream_tnm: expected"):
        op(torch.ones(1, 4), stream_of().int())


@pytest.mark.parametrize("op", [mhc_tap, mhc_tap_triton])
def test_bad_input_of_mhc_tap_is_refused(op) -> None:
    with pytest.raises(ValueError, match="stream_tnm: expected 3 dims"):
        op(torch.ones(1, 8, dtype=BF16))
    with pytest.raises(TypeError, match="stream_tnm: expected"):
        op(stream_of().int())


@pytest.mark.parametrize("op", [mhc_sinkhorn, mhc_sinkhorn_triton, mhc_sinkhorn_tile_kernels])
def test_bad_input_of_mhc_sinkhorn_is_refused(op) -> None:
    with pytest.raises(ValueError, match="logits_tnn: expected n=4, got n=3"):
        op(torch.ones(1, 4, 3), iters=20, eps=1e-6)
    with pytest.raises(ValueError, match="iters: expected a positive number, got 0"):
        op(torch.ones(1, 4, 4), iters=0, eps=1e-6)
    with pytest.raises(ValueError, match="eps: expected a positive number, got 0"):
        op(torch.ones(1, 4, 4), iters=20, eps=0.0)


@pytest.mark.parametrize("op", [mhc_mixes, mhc_mixes_triton, mhc_mixes_tile_kernels])
def test_bad_input_of_mhc_mixes_is_refused(op) -> None:
    site = site_of(8)
    with pytest.raises(ValueError, match="site.fn_wx: expected x=64, got x=32"):
        op(stream_of(16), site, config=MHC_V41)
    with pytest.raises(ValueError, match="stream_tnm: expected n=4, got n=2"):
        op(stream_of()[:, :2], site, config=MHC_V41)
    with pytest.raises(ValueError, match="site.scale_z: expected z=3, got z=1"):
        op(stream_of(), dataclasses.replace(site, scale_z=torch.ones(1)), config=MHC_V41)
    with pytest.raises(TypeError, match="site.fn_wx: expected torch.float32, got torch.bfloat16"):
        op(stream_of(), dataclasses.replace(site, fn_wx=site.fn_wx.to(BF16)), config=MHC_V41)
    with pytest.raises(TypeError, match="stream_tnm: expected"):
        op(stream_of().int(), site, config=MHC_V41)


@pytest.mark.parametrize("op", [mhc_post, mhc_post_triton, mhc_post_tile_kernels])
def test_bad_input_of_mhc_post_is_refused(op) -> None:
    comb = torch.ones(1, 4, 4)
    with pytest.raises(ValueError, match="comb_tnn: expected n=4, got n=3"):
        op(stream_of(), torch.ones(1, 8, dtype=BF16), torch.ones(1, 4), comb[:, :, :3])
    with pytest.raises(ValueError, match="y_tm: expected m=8, got m=7"):
        op(stream_of(), torch.ones(1, 7, dtype=BF16), torch.ones(1, 4), comb)
    with pytest.raises(TypeError, match="y_tm: expected"):
        op(stream_of(), torch.ones(1, 8, dtype=torch.int32), torch.ones(1, 4), comb)


@pytest.mark.parametrize("op", [mhc_boundary, mhc_boundary_triton, mhc_boundary_tile_kernels])
def test_bad_input_of_mhc_boundary_is_refused(op) -> None:
    mixes, y = (torch.ones(1, 4), torch.ones(1, 4), torch.ones(1, 4, 4)), torch.ones(1, 8, dtype=BF16)
    with pytest.raises(ValueError, match="site.base_w: expected w=24, got w=4"):
        op(stream_of(), y, *mixes, dataclasses.replace(site_of(8), base_w=torch.ones(4)), config=MHC_V41)
    with pytest.raises(TypeError, match="y_tm: expected"):
        op(stream_of(), y.int(), *mixes, site_of(8), config=MHC_V41)


@pytest.mark.parametrize("op", [mhc_head, mhc_head_triton, mhc_head_tile_kernels])
def test_bad_input_of_mhc_head_is_refused(op) -> None:
    head = site_of(8, 1, 4, 1)
    with pytest.raises(ValueError, match="config: expected shifted=False for a head, got True"):
        op(stream_of(), head, config=MHC_V41)
    with pytest.raises(ValueError, match="site.fn_wx: expected w=4, got w=24"):
        op(stream_of(), site_of(8), config=MHC_V4)
    with pytest.raises(TypeError, match="stream_tnm: expected"):
        op(stream_of().int(), head, config=MHC_V4)


@pytest.mark.parametrize("op", [mhc_apply, mhc_tap, mhc_post, mhc_head])
def test_a_dtype_that_is_no_storage_dtype_is_refused(op) -> None:
    inputs = {
        mhc_apply: (torch.ones(1, 4), stream_of()),
        mhc_tap: (stream_of(),),
        mhc_post: (stream_of(), torch.ones(1, 8), torch.ones(1, 4), torch.ones(1, 4, 4)),
        mhc_head: (stream_of(), site_of(8, 1, 4, 1)),
    }[op]
    options = {"config": MHC_V4} if op is mhc_head else {}
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(*inputs, dtype=torch.float64, **options)


def test_a_carry_out_of_order_is_refused() -> None:
    stream, pre = mhc_expand(torch.ones(1, 8, dtype=BF16), config=MHC_V41)
    start = MhcCarry(stream_tnm=stream, pre_tn=pre)
    with pytest.raises(ValueError, match="carry: expected an entered sub-layer"):
        start.left(torch.ones(1, 8))
    _, entered = mhc_enter(start, site_of(8), config=MHC_V41)
    with pytest.raises(ValueError, match="carry: expected the output of the sub-layer"):
        mhc_enter(entered, site_of(8), config=MHC_V41)
    with pytest.raises(ValueError, match="carry: expected the output of the sub-layer"):
        mhc_settle(entered)
    with pytest.raises(ValueError, match="carry: expected an entered sub-layer"):
        entered.left(torch.ones(1, 8)).left(torch.ones(1, 8))
    with pytest.raises(ValueError, match="carry: expected pre_tn of the sub-layer before, got None"):
        mhc_enter(MhcCarry(stream_tnm=stream, pre_tn=None), site_of(8), config=MHC_V41)
    with pytest.raises(TypeError, match="stream_tnm: expected"):
        mhc_enter(MhcCarry(stream_tnm=stream.int(), pre_tn=pre), site_of(8), config=MHC_V41)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("streams", 0, "streams: expected at least 1, got 0"),
        ("sinkhorn_iters", 0, "sinkhorn_iters: expected at least 1, got 0"),
        ("eps", 0.0, "eps: expected a positive number, got 0.0"),
        ("post_scale", -1.0, "post_scale: expected a positive number, got -1.0"),
        ("norm_eps", 1e-39, "norm_eps: expected a normal fp32 number, at least 2"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MHC_V41, **{field: value})


def test_what_the_triton_kernels_decline_and_buffers_that_do_not_fit() -> None:
    pytest.importorskip("triton")
    five, wide = torch.ones(1, 5, 8, dtype=BF16), dataclasses.replace(MHC_V41, streams=5)
    mixes, y = (torch.ones(1, 5), torch.ones(1, 5), torch.ones(1, 5, 5)), torch.ones(1, 8, dtype=BF16)
    for call in (
        lambda: mhc_apply_triton(torch.ones(1, 5), five),
        lambda: mhc_tap_triton(five),
        lambda: mhc_mixes_triton(five, site_of(8), config=wide),
        lambda: mhc_post_triton(five, y, *mixes[1:]),
        lambda: mhc_boundary_triton(five, y, *mixes, site_of(8), config=wide),
        lambda: mhc_head_triton(five, site_of(8, 1, 4, 1), config=dataclasses.replace(wide, shifted=False)),
    ):
        with pytest.raises(NotImplementedError, match="stream_tnm: expected 4 streams, got 5"):
            call()
    with pytest.raises(NotImplementedError, match="logits_tnn: expected 4 streams, got 5"):
        mhc_sinkhorn_triton(torch.ones(1, 5, 5), iters=20, eps=1e-6)
    with pytest.raises(TypeError, match="logits_tnn: expected torch.float32"):
        mhc_sinkhorn_triton(torch.ones(1, 4, 4, dtype=BF16), iters=20, eps=1e-6)
    with pytest.raises(TypeError, match="pre_tn: expected torch.float32"):
        mhc_apply_triton(torch.ones(1, 4, dtype=BF16), stream_of())
    with pytest.raises(TypeError, match="out: expected torch.bfloat16"):
        mhc_tap_triton(stream_of(), out=torch.ones(1, 8))
    with pytest.raises(ValueError, match="out: expected contiguous"):
        mhc_post_triton(stream_of(), y, torch.ones(1, 4), torch.ones(1, 4, 4), out=torch.ones(1, 3, 8, dtype=BF16))


def test_what_tile_kernels_declines() -> None:
    mixes, y = (torch.ones(0, 4), torch.ones(0, 4), torch.ones(0, 4, 4)), torch.ones(0, 128, dtype=BF16)
    none, v4 = torch.ones(0, 4, 128, dtype=BF16), MHC_V4
    head = site_of(128, outputs=4, kinds=1)
    for call in (
        lambda: mhc_apply_tile_kernels(mixes[0], none),
        lambda: mhc_mixes_tile_kernels(none, site_of(128), config=v4),
        lambda: mhc_post_tile_kernels(none, y, *mixes[1:]),
        lambda: mhc_boundary_tile_kernels(none, y, *mixes, site_of(128), config=v4),
        lambda: mhc_head_tile_kernels(none, head, config=v4),
    ):
        with pytest.raises(NotImplementedError, match="stream_tnm: expected a token, got none"):
            call()
    for rows in (none[:, 0], torch.ones(1, 128)):
        with pytest.raises(NotImplementedError, match="x_tm: expected tokens in bfloat16, got"):
            mhc_expand_tile_kernels(rows, config=v4)
    with pytest.raises(NotImplementedError, match="logits_tnn: expected a matrix, got shape"):
        mhc_sinkhorn_tile_kernels(torch.ones(0, 4, 4), iters=20, eps=1e-6)
    with pytest.raises(TypeError, match="logits_tnn: expected torch.float32"):
        mhc_sinkhorn_tile_kernels(torch.ones(1, 4, 4, dtype=BF16), iters=20, eps=1e-6)
    with pytest.raises(NotImplementedError, match="stream_tnm: expected 128·n channels, got 8"):
        mhc_apply_tile_kernels(torch.ones(1, 4), stream_of())
    one = (torch.ones(1, 4), torch.ones(1, 4), torch.ones(1, 4, 4))
    with pytest.raises(NotImplementedError, match="config: expected shifted=False"):
        mhc_boundary_tile_kernels(stream_of(128), torch.ones(1, 128, dtype=BF16), *one, site_of(128), config=MHC_V41)


def test_the_product_of_deep_gemm_comes_in_sixteen_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, which writes sums of every split, and for the launch behind it."""

    def product(a: Tensor, b: Tensor, d: Tensor, squares: Tensor, num_splits: int) -> None:
        parts = zip(a.double().tensor_split(num_splits, 1), b.double().tensor_split(num_splits, 1), strict=True)
        for split, (x, w) in enumerate(parts):
            d[split] = x @ w.T
            squares[split] = x.square().sum(1)

    from deeptwin.kernels.triton_ops import mhc as kernels

    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=None, tf32_hc_prenorm_gemm=product))
    monkeypatch.setattr(kernels, "mhc_gates", lambda partial_pwt, *rest: partial_pwt)
    inputs = draw_mixes(MhcCase(tokens=3, width=256), np.random.Generator(np.random.Philox(1)))
    stream_tx, fn_wx = inputs["stream_tnm"].flatten(1).double(), inputs["site"].fn_wx.double()
    partial_pwt = mhc_mixes_deep_gemm(**inputs)
    assert partial_pwt.shape == (16, 25, 3)
    right_wt = torch.cat([fn_wx @ stream_tx.T, stream_tx.square().sum(1)[None]])
    assert torch.allclose(partial_pwt.double().sum(0), right_wt, rtol=1e-5, atol=1e-5)
    narrow = draw_mixes(MhcCase(tokens=3, width=128), np.random.Generator(np.random.Philox(1)))
    with pytest.raises(NotImplementedError, match="stream_tnm: expected tokens of 64·n channels, n from 16 up"):
        mhc_mixes_deep_gemm(**narrow)
    with pytest.raises(TypeError, match="stream_tnm: expected"):
        mhc_mixes_deep_gemm(**(inputs | {"stream_tnm": inputs["stream_tnm"].float()}))
    with pytest.raises(ValueError, match="site.base_w: expected w=24, got w=23"):
        mhc_mixes_deep_gemm(**(inputs | {"site": replace(inputs["site"], base_w=inputs["site"].base_w[:23])}))
