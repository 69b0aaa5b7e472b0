"""Rotary position embedding: frequencies, table, rotation, softmax scale."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.rope import rope_table_triton, rope_tile_kernels, rope_triton
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.reference.config import MscaleRule, Pairing, RopeConfig, RopeSpan, YarnConfig
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.rope import (
    rope,
    rope_frequencies,
    rope_table,
    softmax_scale,
    table_magnitude,
    yarn_ramp_ends,
)
from deeptwin.reference.sparse_attn import sparse_attn

V3_YARN = YarnConfig(
    factor=40,
    original_length=4096,
    beta_fast=32,
    beta_slow=1,
    mscale=1,
    mscale_all_dim=1,
    mscale_rule=MscaleRule.DEMO,
)
V4_YARN = dataclasses.replace(V3_YARN, factor=16, original_length=65536, mscale=0, mscale_all_dim=0)
PLAIN = RopeConfig(rope_dim=64, theta=10000, yarn=None)
V3 = RopeConfig(rope_dim=64, theta=10000, yarn=V3_YARN)
V4 = RopeConfig(rope_dim=64, theta=160000, yarn=V4_YARN)
every_layout = pytest.mark.parametrize("pairing", Pairing, ids=lambda p: p.value)
every_span = pytest.mark.parametrize("span", RopeSpan, ids=lambda s: s.value)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def turned(
    x: Tensor, table: Tensor, positions: list[int], pairing: Pairing, *, inverse: bool = False, num: Numerics = SEMANTIC
) -> Tensor:
    rows = torch.tensor(positions, dtype=torch.int64)
    return rope(x, table, rows, pairing=pairing, span=RopeSpan.LAST, inverse=inverse, num=num)


def unit_angles(size: int) -> Tensor:
    """Frequencies whose angles are exact in fp32, so that laws hold to fp64 accuracy."""
    return torch.tensor([2.0**-i for i in range(size)])


CARD = load_card("rope")


# properties of the reference


def test_frequencies_are_power_then_reciprocal() -> None:
    freq = rope_frequencies(PLAIN)
    assert freq.dtype == torch.float32
    assert (freq[0], freq[16]) == (1.0, np.float32(0.01))
    expected = [np.float32(1) / np.float32(10000.0 ** (2 * i / 64)) for i in range(32)]
    assert freq.tolist() == [float(f) for f in expected]
    # the correctly rounded value is another number in 10 of 32 entries
    exact = torch.tensor([10000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float32)
    assert int((freq != exact).sum()) == 10
    assert ((freq.view(torch.int32) - exact.view(torch.int32)).abs() <= 1).all()


def test_yarn_ramp_ends() -> None:
    assert yarn_ramp_ends(V3) == (10, 23)
    assert yarn_ramp_ends(V4) == (15, 25)
    # no room for a ramp: the end moves by a thousandth, so nothing is divided by zero
    flat = dataclasses.replace(V4, yarn=dataclasses.replace(V4_YARN, original_length=6))
    assert yarn_ramp_ends(flat) == (0, 0.001)
    assert rope_frequencies(flat).isfinite().all()


@pytest.mark.parametrize(("config", "low", "high"), [(V3, 10, 23), (V4, 15, 25)], ids=["v3", "v4"])
def test_yarn_keeps_fast_pairs_and_slows_slow_ones(config: RopeConfig, low: int, high: int) -> None:
    assert config.yarn is not None
    base = rope_frequencies(dataclasses.replace(config, yarn=None))
    freq = rope_frequencies(config)
    assert torch.equal(freq[: low + 1], base[: low + 1])
    assert torch.equal(freq[high:], base[high:] / config.yarn.factor)
    middle = (low + high + 1) // 2
    ramp = (middle - low) / (high - low)
    expected = base[middle].item() * (ramp / config.yarn.factor + 1 - ramp)
    assert freq[middle].item() == pytest.approx(expected, rel=3e-7)
    assert (freq[1:] < freq[:-1]).all()


def test_a_factor_of_one_changes_frequencies_by_rounding_only() -> None:
    neutral = dataclasses.replace(V4, yarn=dataclasses.replace(V4_YARN, factor=1))
    torch.testing.assert_close(rope_frequencies(neutral), rope_frequencies(dataclasses.replace(V4, yarn=None)))


@pytest.mark.parametrize("config", [PLAIN, V3, V4], ids=["plain", "v3", "v4"])
def test_table_entries_are_cos_and_sin_of_the_fp32_angle(config: RopeConfig) -> None:
    freq = rope_frequencies(config)
    positions = [0, 1, 4095, 4096, 65535, 70000, 524288, 1048575]
    table = rope_table(torch.tensor(positions), freq)
    assert table.shape == (8, 64)
    assert table.dtype == torch.float32
    for row, p in zip(table.tolist(), positions, strict=True):
        angles = [float(np.float32(p) * np.float32(f)) for f in freq.tolist()]
        assert row[:32] == [float(np.float32(math.cos(a))) for a in angles]
        assert row[32:] == [float(np.float32(math.sin(a))) for a in angles]


@pytest.mark.parametrize(
    ("config", "position", "distance"),
    [(V3, 4095, 1.4e-4), (V3, 131071, 1.2e-3), (V4, 131071, 3.2e-3), (V3, 10**6, 2.2e-2), (V4, 10**6, 4.1e-2)],
)
def test_an_fp64_angle_is_another_model(config: RopeConfig, position: int, distance: float) -> None:
    assert config.yarn is not None
    low, high = yarn_ramp_ends(config)
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    exact = config.theta ** (-np.arange(32) / 32) * (ramp / config.yarn.factor + 1 - ramp)
    angle = (torch.tensor([position]) * rope_frequencies(config)).double().numpy()
    assert np.abs(angle - position * exact).max() == pytest.approx(distance, rel=0.03)


def test_the_table_is_the_same_under_every_numerics() -> None:
    freq, positions = rope_frequencies(V4), torch.tensor([0, 7, 1048575, 2**24, 2**24 + 1])
    table = rope_table(positions, freq)
    assert torch.equal(table[3], table[4])  # positions are fp32 numbers
    assert torch.equal(table[0], torch.tensor([1.0] * 32 + [0.0] * 32))
    for num in (SEMANTIC, RIVAL):
        assert torch.equal(rope_table(positions, freq, num=num), table)
    assert torch.equal(rope_table(positions, freq, magnitude=1.25), table * 1.25)
    assert torch.equal(rope_table(positions.to(torch.int32), freq), table)


@every_layout
def test_a_unit_vector_turns_into_its_partner(pairing: Pairing) -> None:
    table = rope_table(torch.arange(2), torch.tensor([1.0, 0.5]))
    x = torch.zeros(1, 1, 4)
    x[..., 0] = 1
    y = turned(x, table, [1], pairing)[0, 0]
    partner = 1 if pairing is Pairing.INTERLEAVED else 2
    assert y[0].item() == pytest.approx(math.cos(1), rel=1e-7)
    assert y[partner].item() == pytest.approx(math.sin(1), rel=1e-7)
    assert y.count_nonzero() == 2
    back = turned(x, table, [1], pairing, inverse=True)[0, 0]
    assert back[partner].item() == pytest.approx(-math.sin(1), rel=1e-7)


@every_layout
@every_span
def test_every_channel_against_complex_multiplication(pairing: Pairing, span: RopeSpan) -> None:
    x, positions = normal(3, 2, 12, dtype=torch.float64), [5, 0, 1]
    freq = torch.tensor([1.0, 0.3, 0.01])
    y = rope(
        x,
        rope_table(torch.arange(6), freq),
        torch.tensor(positions),
        pairing=pairing,
        span=span,
        inverse=False,
        num=SEMANTIC,
    )
    start = 0 if span is RopeSpan.FIRST else 6
    untouched = slice(6, 12) if span is RopeSpan.FIRST else slice(0, 6)
    assert torch.equal(y[..., untouched], x[..., untouched])
    for t, p in enumerate(positions):
        for i, f in enumerate(freq.tolist()):
            u, v = (2 * i, 2 * i + 1) if pairing is Pairing.INTERLEAVED else (i, i + 3)
            for h in range(2):
                z = complex(x[t, h, start + u], x[t, h, start + v]) * np.exp(1j * float(np.float32(p) * np.float32(f)))
                found = complex(y[t, h, start + u], y[t, h, start + v])
                assert abs(found - z) < 3e-7 * abs(z)


def test_interleaved_is_half_split_of_the_permuted_channels() -> None:
    x, table = normal(4, 3, 64), rope_table(torch.arange(100), rope_frequencies(PLAIN))
    order = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])
    for num in (SEMANTIC, CONTRACT):
        interleaved = turned(x, table, [0, 1, 50, 99], Pairing.INTERLEAVED, num=num)
        half_split = turned(x[..., order], table, [0, 1, 50, 99], Pairing.HALF_SPLIT, num=num)
        assert torch.equal(interleaved[..., order], half_split)
        assert not torch.equal(interleaved, turned(x, table, [0, 1, 50, 99], Pairing.HALF_SPLIT, num=num))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 900), st.integers(0, 900), st.integers(0, 100), st.sampled_from(list(Pairing)))
def test_scores_depend_on_the_distance_alone(p: int, q: int, shift: int, pairing: Pairing) -> None:
    table = rope_table(torch.arange(1024), unit_angles(4))
    query, key = normal(1, 1, 8, seed=1).double(), normal(1, 1, 8, seed=2).double()

    def score(a: int, b: int) -> float:
        return float((turned(query, table, [a], pairing) * turned(key, table, [b], pairing)).sum())

    assert score(p, q) == pytest.approx(score(p + shift, q + shift), abs=1e-6)


@pytest.mark.parametrize("shift", [1, 37])
def test_attention_turned_back_depends_on_distances_alone(shift: int) -> None:
    """v41-attention.md section 2.4: keys are values and rotate with them; the output is turned back at its query."""
    table = rope_table(torch.arange(64), unit_angles(4))
    query, keys = normal(3, 2, 8, seed=1).double(), normal(5, 8, seed=2).double()
    idx = torch.tensor([[0, 1, 2], [4, 1, -1], [3, 0, 4]], dtype=torch.int32)

    def attend(first: int) -> Tensor:
        q = turned(query, table, [first + 20, first + 21, first + 22], Pairing.INTERLEAVED)
        kv = turned(keys[:, None], table, [first + 3 * j for j in range(5)], Pairing.INTERLEAVED)[:, 0]
        out, _ = sparse_attn(q, kv, idx, torch.zeros(2), None, scale=0.3, value_dim=8, num=SEMANTIC)
        return turned(out, table, [first + 20, first + 21, first + 22], Pairing.INTERLEAVED, inverse=True)

    torch.testing.assert_close(attend(shift), attend(0), rtol=0, atol=1e-6)  # cosines are fp32 numbers
    kept = sparse_attn(query, keys, idx, torch.zeros(2), None, scale=0.3, value_dim=8, num=SEMANTIC)[0]
    assert (attend(0) - kept).abs().max() > 1e-2  # without positions the output is another


@every_layout
@pytest.mark.parametrize("config", [PLAIN, V4], ids=["plain", "v4"])
def test_the_inverse_undoes_the_rotation_and_norms_stay(config: RopeConfig, pairing: Pairing) -> None:
    positions = [1, 4096, 70000]
    table = rope_table(torch.tensor(positions), rope_frequencies(config))
    x = normal(3, 2, 96, dtype=torch.float64)
    y = turned(x, table, [0, 1, 2], pairing)
    torch.testing.assert_close(turned(y, table, [0, 1, 2], pairing, inverse=True), x, rtol=0, atol=1e-6)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    other = rope_table(torch.tensor(positions), rope_frequencies(V3))
    assert (turned(y, other, [0, 1, 2], pairing, inverse=True) - x).abs().max() > 0.1


def test_a_rotation_rounds_once() -> None:
    x, table = normal(50, 4, 64), rope_table(torch.arange(50), rope_frequencies(V4))
    positions = list(range(50))
    exact = turned(x, table, positions, Pairing.INTERLEAVED)
    assert torch.equal(
        turned(x, table, positions, Pairing.INTERLEAVED, num=CONTRACT), exact.to(torch.bfloat16).double()
    )
    assert torch.equal(turned(x, table, [0] * 50, Pairing.INTERLEAVED, num=CONTRACT), x.double())


def test_softmax_scale_of_the_released_models() -> None:
    assert softmax_scale(192, V3_YARN) == pytest.approx(0.1352337789, rel=1e-9)
    assert softmax_scale(512, V4_YARN) == 512**-0.5 == pytest.approx(0.0441941738, rel=1e-8)
    assert softmax_scale(128, None) == pytest.approx(0.0883883476, rel=1e-8)
    assert softmax_scale(1, V3_YARN) == pytest.approx(1.8738542071, rel=1e-9)


def test_unequal_mscales_tell_the_rules_apart() -> None:
    demo = dataclasses.replace(V3_YARN, mscale=1.0, mscale_all_dim=0.707)
    hf = dataclasses.replace(demo, mscale_rule=MscaleRule.HF)
    assert softmax_scale(1, demo) == pytest.approx(1.873854, rel=1e-6)
    assert softmax_scale(1, hf) == pytest.approx(1.589626, rel=1e-6)
    assert table_magnitude(demo) == 1.0
    assert table_magnitude(hf) == pytest.approx(1.3688879454 / 1.2608037774, rel=1e-6)
    assert table_magnitude(dataclasses.replace(V3_YARN, mscale_rule=MscaleRule.HF)) == table_magnitude(None) == 1.0


@pytest.mark.parametrize(("config", "different"), [(V3, [23, 24, 29, 31]), (V4, [])], ids=["v3", "v4"])
def test_frequencies_of_transformers_blend_in_another_order(config: RopeConfig, different: list[int]) -> None:
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import DeepseekV3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        yarn = config.yarn
        assert yarn is not None
        fields = {"factor": float(yarn.factor), "original_max_position_embeddings": yarn.original_length}
        fields |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        theirs = DeepseekV3Config(rope_parameters={"rope_type": "yarn", "rope_theta": float(config.theta), **fields})
        theirs.head_dim = 64
        freq, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, None)
    assert factor == 1.0
    ulps = (freq.view(torch.int32) - rope_frequencies(config).view(torch.int32)).abs()
    assert ulps.nonzero().flatten().tolist() == different
    assert ulps.max() <= 1


def test_no_tokens() -> None:
    y = turned(torch.zeros(0, 2, 8), torch.zeros(3, 4), [], Pairing.INTERLEAVED)
    assert y.shape == (0, 2, 8)


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("rope") == []


def test_the_adapters_of_tile_kernels_agree_with_the_reference(tile_kernels_faults) -> None:
    assert tile_kernels_faults("rope") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("rope", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

OPTIONS = {"pairing": Pairing.INTERLEAVED, "span": RopeSpan.LAST, "inverse": False}


@pytest.mark.parametrize("op", [rope, rope_triton, rope_tile_kernels])
def test_bad_input_of_rope_is_refused(op) -> None:
    x, table, positions = torch.zeros(2, 1, 8), torch.zeros(3, 4), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="positions_t: expected t=2, got t=1"):
        op(x, table, positions[:1], **OPTIONS)
    with pytest.raises(ValueError, match="x_thd: expected 3 dims"):
        op(x[0], table, positions, **OPTIONS)
    for width in (3, 10):
        with pytest.raises(ValueError, match=f"table_sr: expected an even width up to d=8, got r={width}"):
            op(x, torch.zeros(3, width), positions, **OPTIONS)
    with pytest.raises(TypeError, match="x_thd: expected"):
        op(x.to(torch.int32), table, positions, **OPTIONS)
    with pytest.raises(TypeError, match="table_sr: expected torch.float32, got torch.bfloat16"):
        op(x, table.to(torch.bfloat16), positions, **OPTIONS)
    with pytest.raises(TypeError, match="positions_t: expected"):
        op(x, table, positions.float(), **OPTIONS)
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(x, table, positions, dtype=torch.float64, **OPTIONS)


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
def test_a_position_outside_the_table_is_refused_by_rope(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"positions_t: expected values in \[0, 3\), got {bad} at \(1,\)"):
        rope(torch.zeros(2, 1, 8), torch.zeros(3, 4), torch.tensor([0, bad]), **OPTIONS)


@pytest.mark.parametrize("op", [rope_table, rope_table_triton])
def test_bad_input_of_rope_table_is_refused(op) -> None:
    positions, freq = torch.arange(3), torch.ones(4)
    with pytest.raises(ValueError, match="positions_s: expected 1 dims"):
        op(positions[None], freq)
    with pytest.raises(ValueError, match="freq_i: expected 1 dims"):
        op(positions, freq[None])
    with pytest.raises(ValueError, match="magnitude: expected a positive number"):
        op(positions, freq, magnitude=0.0)
    with pytest.raises(TypeError, match="positions_s: expected"):
        op(positions.float(), freq)
    with pytest.raises(TypeError, match="freq_i: expected torch.float32, got torch.float64"):
        op(positions, freq.double())


def test_bad_configurations_are_refused_by_yarn_ramp_ends_and_softmax_scale() -> None:
    with pytest.raises(ValueError, match="config: expected a YaRN extension"):
        yarn_ramp_ends(PLAIN)
    with pytest.raises(ValueError, match="head_dim: expected a positive number, got 0"):
        softmax_scale(0, None)
    with pytest.raises(ValueError, match="rope_dim: expected a positive even number, got 7"):
        RopeConfig(rope_dim=7, theta=10000, yarn=None)


def test_what_tile_kernels_declines() -> None:
    x, table, positions = torch.zeros(2, 1, 64), torch.zeros(3, 64), torch.tensor([0, 2])
    with pytest.raises(NotImplementedError, match="table_sr: expected 64 or 128 channels to rotate, got 32"):
        rope_tile_kernels(x, table[:, :32], positions, **OPTIONS)
    for bad, dtype in ((x, torch.bfloat16), (x.half(), torch.float16), (torch.zeros(2, 1, 65), torch.float32)):
        with pytest.raises(NotImplementedError, match="x_thd, dtype: expected 8·n channels in one of bf16 and fp32"):
            rope_tile_kernels(bad, table, positions, dtype=dtype, **OPTIONS)


def test_buffers_that_do_not_fit_are_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="out: expected contiguous"):
        rope_table_triton(torch.arange(3), torch.ones(4), out=torch.empty(3, 4))
    with pytest.raises(TypeError, match="out: expected torch.bfloat16"):
        rope_triton(torch.zeros(1, 1, 8), torch.zeros(3, 4), torch.tensor([0]), out=torch.empty(1, 1, 8), **OPTIONS)
