"""Pooling of groups of tokens into entries, with state, and the norm and rotation behind it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.compressor import (
    compress_decode_triton,
    compress_prefill_triton,
    compress_tail_triton,
    compress_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.reference.compressor import (
    compress,
    compress_decode,
    compress_prefill,
    compress_project,
    compress_rows,
    compress_tail,
)
from deeptwin.reference.config import C1, C2, CSA4, HCA128, CompressorConfig, Pairing, RopeConfig, RopeSpan, WeightCast
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC
from deeptwin.reference.rms_norm import rms_norm
from deeptwin.reference.rope import rope, rope_frequencies, rope_table

CARD = load_card("compressor")
CONFIGS = [C2, CSA4, CompressorConfig(ratio=5), CompressorConfig(ratio=3, overlap=True)]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"r{c.ratio}{'o' if c.overlap else ''}")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def one_shot(value: Tensor, gate: Tensor | None, config: CompressorConfig, **kwargs: Any) -> Tensor:
    bias = kwargs.pop("bias", None)
    return compress(value, gate, bias, ints(0), ints(0, len(value)), config=config, **kwargs)[0]


# properties of the reference


def test_hand_computed_softmax_of_one_and_two_entries() -> None:
    # golden vector 3 of the spec: gates ln 3 and 0 weigh 3/4 and 1/4
    value = torch.tensor([[4.0, 8.0], [8.0, -8.0], [1.0, 1.0], [3.0, 2.0]])
    gate = torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)], [5.0, -2.0], [5.0, -2.0]])
    m = one_shot(value, gate, C2, num=SEMANTIC)
    torch.testing.assert_close(m, torch.tensor([[5.0, -4.0], [2.0, 1.5]], dtype=torch.float64), rtol=1e-7, atol=1e-7)
    assert one_shot(value[:3], gate[:3], C2).tolist() == [[5.0, -4.0]]
    assert one_shot(value[:2], gate[:2], C2).tolist() == [[5.0, -4.0]]


def test_a_chunk_that_begins_at_a_page_needs_no_state() -> None:
    # 128 is a multiple of the ratio: a prefix that is stored in whole pages comes back without its ring
    value, gate = normal(5, 8), normal(5, 8, seed=1)
    lost = torch.full((1, C2.ring(6), 2, 8), torch.nan)
    slot, ends = ints(0), ints(0, 5)
    at_page, _ = compress_prefill(value, gate, None, lost.clone(), slot, ints(128), ends, config=C2)
    assert torch.equal(at_page, one_shot(value, gate, C2))
    inside, _ = compress_prefill(value, gate, None, lost.clone(), slot, ints(129), ends, config=C2)
    assert inside.isnan().any()


def test_the_entry_is_rounded_once_to_bf16() -> None:
    value = torch.tensor([[1 + 2.0**-9], [1 + 2.0**-9]])
    assert one_shot(value, torch.zeros(2, 1), C2).tolist() == [[1.0]]
    assert one_shot(value, torch.zeros(2, 1), C2, num=SEMANTIC).tolist() == [[1 + 2.0**-9]]


def test_overlap_pools_the_group_before_through_the_first_series() -> None:
    # zero gates: entry 0 is the mean of four second-series values, entry 1 of four first and four second ones
    value = torch.zeros(8, 2)
    value[:4, 0], value[4:, 0] = 100.0, -7.0
    value[:4, 1], value[4:, 1] = 4.0, 8.0
    assert one_shot(value, torch.zeros(8, 2), CSA4).tolist() == [[4.0], [54.0]]
    # the unfinished third group, and the first series of the second one, are in no entry
    more = torch.cat([value, torch.full((3, 2), torch.nan)])
    assert one_shot(more, torch.zeros(11, 2), CSA4).tolist() == [[4.0], [54.0]]


def test_the_bias_belongs_to_the_place_in_the_group() -> None:
    value = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    bias = torch.tensor([[0.0], [50.0]])
    assert one_shot(value, torch.zeros(4, 1), C2, bias=bias).tolist() == [[2.0], [4.0]]
    state = torch.zeros(1, 7, 2, 1)
    args = (state, ints(0), ints(1), ints(0, 3))
    m, entry = compress_prefill(value[1:], torch.zeros(3, 1), bias, *args, config=C2)
    assert (m.tolist(), entry.tolist()) == ([[2.0], [4.0]], [0, 1])
    assert state[0, :, 0, 0].tolist() == [0, 50, 0, 50, 0, 0, 0]


def test_groups_of_128_without_gates_are_means() -> None:
    value = torch.arange(256.0)[:, None]
    assert one_shot(value, torch.zeros(256, 1), HCA128).tolist() == [[63.5], [192.0]]  # 191.5 is a tie in bf16


@every_config
def test_a_constant_added_to_the_gates_changes_nothing(config: CompressorConfig) -> None:
    value, gate = normal(20, 6 * config.series), normal(20, 6 * config.series, seed=1)
    # integers and halves: the sums are exact
    gate = (gate * 2).round() / 2
    moved = one_shot(value, gate + normal(6, seed=2).round().repeat(config.series), config, num=SEMANTIC)
    torch.testing.assert_close(moved, one_shot(value, gate, config, num=SEMANTIC), rtol=1e-12, atol=1e-12)


@every_config
def test_entries_are_convex_combinations(config: CompressorConfig) -> None:
    value, gate = normal(30, 4 * config.series), normal(30, 4 * config.series, seed=1) * 5
    m = one_shot(value, gate, config, num=SEMANTIC)
    assert m.min() >= value.min()
    assert m.max() <= value.max()
    selected = one_shot(value[:2], torch.tensor([[900.0], [-900.0]]).expand(2, value.shape[1]), C2)
    assert torch.equal(selected, value[:1].to(torch.bfloat16).double())


def test_ratio_1_is_the_pooled_formula_with_any_gate() -> None:
    value = normal(6, 5)
    plain = one_shot(value, None, C1)
    assert torch.equal(plain, value.to(torch.bfloat16).double())
    assert torch.equal(one_shot(value, normal(6, 5, seed=1) * 100, C1), plain)
    found = compress(value, None, None, ints(7, 0), ints(0, 4, 6), config=C1)[1]
    assert found.tolist() == [7, 8, 9, 10, 0, 1]


def test_rows_of_a_chunk() -> None:
    # lengths 0, 1, 2, 3 after 1 token, then 5 after none
    entry, seq = compress_rows(ints(1, 1, 1, 1, 0), ints(0, 0, 1, 3, 6, 11), ratio=2)
    assert (entry.tolist(), seq.tolist()) == ([-1, 0, 0, 0, 1, 0, 1], [0, 1, 2, 3, 3, 4, 4])
    for length in range(9):  # S = floor((p + 1) / r) entries once p = length - 1 has been processed
        entry, _ = compress_rows(ints(0), ints(0, length), ratio=4)
        assert [e for e in entry.tolist() if e >= 0] == list(range(length // 4))


def test_a_row_without_an_entry_is_zero_whatever_the_tokens_hold() -> None:
    nan = torch.full((1, 3), torch.nan)
    m, entry = compress(nan, nan, None, ints(0), ints(0, 1), config=C2)
    assert (m.tolist(), entry.tolist()) == ([[0.0, 0.0, 0.0]], [-1])


def test_ring_sizes() -> None:
    assert (C2.ring(6), C2.ring(0), CSA4.ring(6), HCA128.ring(1)) == (7, 2, 13, 128)
    # v41-attention.md section 7.2: one ring of a layer
    assert C2.ring(6) * 2 * 512 * 4 == 28672


def test_a_worked_ring() -> None:
    state = torch.full((2, 3, 2, 1), -9.0)
    value, gate = torch.arange(1.0, 6.0)[:, None], torch.zeros(5, 1)
    m, entry = compress_prefill(value, gate, None, state, ints(1), ints(0), ints(0, 5), config=C2)
    assert (m.tolist(), entry.tolist()) == ([[1.5], [3.5]], [0, 1])
    assert state[1, :, 1, 0].tolist() == [4, 5, 3]  # tokens 3, 4, 2: position mod 3
    assert (state[0] == -9).all()
    m, entry = compress_decode(value[:1] * 7, gate[:1], None, state, ints(1), ints(5), config=C2)
    assert (m.tolist(), entry.tolist()) == ([[6.0]], [2])
    assert state[1, :, 1, 0].tolist() == [4, 5, 7]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.sampled_from([CONTRACT, RIVAL]),
)
def test_any_split_gives_the_same_entries_and_state(which: int, sizes: list[int], decode: list[bool], num: Any) -> None:
    config, tokens = CONFIGS[which], sum(sizes)
    width = 3 * config.series
    value, gate = normal(tokens, width), normal(tokens, width, seed=1)
    bias = normal(config.ratio, width, seed=2)
    once, parts = (torch.full((2, config.ring(9), 2, width), torch.nan) for _ in range(2))
    whole = compress_prefill(value, gate, bias, once, ints(1), ints(0), ints(0, tokens), config=config, num=num)
    found, done = [], 0
    for size, step in zip(sizes, decode, strict=False):
        piece = (value[done : done + size], gate[done : done + size], bias, parts)
        if step:
            at = torch.arange(done, done + size)
            out = compress_decode(*piece, torch.ones_like(at), at, config=config, num=num)
        else:
            out = compress_prefill(*piece, ints(1), ints(done), ints(0, size), config=config, num=num)
        found += [row for row, entry in zip(*out, strict=True) if entry >= 0]
        done += size
    assert torch.equal(torch.stack(found) if found else whole[0][:0], whole[0][whole[1] >= 0])
    assert torch.equal(bits(parts), bits(once))


def test_random_rejections_equal_plain_decoding() -> None:
    rng = np.random.Generator(np.random.Philox(5))
    value, gate = normal(40, 4), normal(40, 4, seed=1)
    plain, state = torch.full((1, 7, 2, 4), torch.nan), torch.full((1, 7, 2, 4), torch.nan)
    expected = compress_prefill(value, gate, None, plain, ints(0), ints(0), ints(0, 40), config=C2)[0]
    entries: dict[int, Tensor] = {}
    done = 0
    while done < 40:
        size = int(rng.integers(1, 7))
        good = 1 if done + size > 34 else int(rng.integers(1, size + 1))  # the last tokens one by one
        size = min(size, 40 - done) if done <= 34 else 1
        good = min(good, size)
        draft = value[done : done + size].clone()
        draft[good:] = 1e6
        at = torch.arange(done, done + size)
        m, entry = compress_decode(draft, gate[at], None, state, torch.zeros_like(at), at, config=C2)
        entries |= {int(e): row for e, row in zip(entry, m, strict=True) if e >= 0}
        done += good
    assert torch.equal(torch.stack([entries[j] for j in range(20)]), expected)
    assert torch.equal(bits(state), bits(plain))


def test_projection_gives_fp32_numbers() -> None:
    x, w_value, w_gate = (normal(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate([(3, 32), (8, 32), (8, 32)]))
    value, gate = compress_project(x, w_value, w_gate)
    assert gate is not None
    assert torch.equal(value, (x.double() @ w_value.double().T).float().double())
    assert torch.equal(gate, (x.double() @ w_gate.double().T).float().double())
    assert compress_project(x, w_value, None)[1] is None


def test_the_tail_is_norm_then_rotation_at_the_first_token_of_the_group() -> None:
    m, weight = normal(5, 24, dtype=torch.bfloat16), normal(24, seed=1, dtype=torch.bfloat16)
    table = rope_table(torch.arange(40), rope_frequencies(RopeConfig(rope_dim=8, theta=160000.0, yarn=None)))
    entry = ints(0, 3, -1, 9, 2)
    m[2] = 0
    latent, key = compress_tail(m, weight, table, entry, ratio=4, eps=1e-20)
    assert torch.equal(latent, rms_norm(m, weight, eps=1e-20, cast=WeightCast.AFTER_WEIGHT))
    at = torch.tensor([0, 12, 0, 36, 8])
    turned = rope(latent[:, None], table, at, pairing=Pairing.INTERLEAVED, span=RopeSpan.LAST, inverse=False)
    assert torch.equal(key, turned[:, 0])
    assert torch.equal(key[:, :16], latent[:, :16])
    assert key[2].abs().max() == 0
    assert not torch.equal(key, compress_tail(m, weight, table, entry, ratio=3, eps=1e-20)[1])


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("compressor") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("compressor", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def test_a_bad_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="ratio: expected at least 1, got 0"):
        CompressorConfig(ratio=0)
    with pytest.raises(ValueError, match="overlap: expected False with ratio 1, got True"):
        CompressorConfig(ratio=1, overlap=True)


V, G = torch.zeros(4, 6), torch.zeros(4, 6)
STATE = torch.zeros(3, 7, 2, 6)


@pytest.mark.parametrize("op", [compress, compress_triton])
def test_bad_rows_are_refused(op: Any) -> None:
    cu = ints(0, 4)
    with pytest.raises(ValueError, match="value_tw: expected 2 dims"):
        op(V[0], G, None, ints(0), cu, config=C2)
    with pytest.raises(ValueError, match="gate_tw: expected t=4, got t=3"):
        op(V, G[:3], None, ints(0), cu, config=C2)
    with pytest.raises(ValueError, match="gate_tw: expected logits for ratio 2, got None"):
        op(V, None, None, ints(0), cu, config=C2)
    with pytest.raises(ValueError, match="bias_rw: expected r=2, got r=3"):
        op(V, G, torch.zeros(3, 6), ints(0), cu, config=C2)
    with pytest.raises(ValueError, match=r"value_tw \(last axis\): expected a multiple of 2, got 5"):
        op(V[:, :5], G[:, :5], None, ints(0), cu, config=CSA4)
    with pytest.raises(TypeError, match="value_tw: expected"):
        op(V.bfloat16(), G, None, ints(0), cu, config=C2)
    with pytest.raises(TypeError, match="gate_tw: expected"):
        op(V, G.bfloat16(), None, ints(0), cu, config=C2)
    with pytest.raises(TypeError, match=r"bias_rw: expected torch\.float32"):
        op(V, G, torch.zeros(2, 6).bfloat16(), ints(0), cu, config=C2)
    with pytest.raises(TypeError, match="start_b: expected"):
        op(V, G, None, torch.zeros(1), cu, config=C2)
    with pytest.raises(TypeError, match="cu_seqlens: expected"):
        op(V, G, None, ints(0), cu.float(), config=C2)
    with pytest.raises(ValueError, match="cu_seqlens: expected n=3, got n=2"):
        op(V, G, None, ints(0, 0), cu, config=C2)


def test_values_that_only_the_reference_inspects() -> None:
    for cu in (ints(1, 4), ints(0, 3), ints(0, 5)):
        with pytest.raises(ValueError, match="cu_seqlens: expected numbers from 0 up to 4"):
            compress(V, G, None, ints(0), cu, config=C2)
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        compress_rows(ints(0, 0), ints(0, 3, 1), ratio=2)
    with pytest.raises(ValueError, match=r"start_b: expected positions from 0 on, got \[-2\]"):
        compress_rows(ints(-2), ints(0, 4), ratio=2)
    with pytest.raises(ValueError, match="ratio: expected a positive number, got 0"):
        compress_rows(ints(0), ints(0, 4), ratio=0)
    with pytest.raises(TypeError, match="start_b: expected"):
        compress_rows(torch.zeros(1), ints(0, 4), ratio=2)
    with pytest.raises(ValueError, match=r"start_b: expected multiples of 2, got \[3\]"):
        compress(V, G, None, ints(3), ints(0, 4), config=C2)
    with pytest.raises(ValueError, match=r"start_b: expected 0, got \[4\]"):
        compress(V, G, None, ints(4), ints(0, 4), config=CSA4)
    with pytest.raises(ValueError, match="w_gate_wm: expected w=3, got w=2"):
        compress_project(torch.zeros(1, 4), torch.zeros(3, 4), torch.zeros(2, 4))


@pytest.mark.parametrize("op", [compress_prefill, compress_prefill_triton])
def test_bad_state_is_refused(op: Any) -> None:
    rest = (ints(0), ints(0), ints(0, 4))
    with pytest.raises(ValueError, match="config: expected a ratio above 1, got 1"):
        op(V, G, None, STATE, *rest, config=C1)
    with pytest.raises(TypeError, match=r"state_: expected torch\.float32"):
        op(V, G, None, STATE.double(), *rest, config=C2)
    for state in (STATE[0], STATE[..., :5], torch.zeros(1, 3, 2, 6)):
        with pytest.raises(ValueError, match=r"state_: expected \[slots, ring of at least"):
            op(V, G, None, state, *rest, config=CompressorConfig(ratio=5))
    with pytest.raises(TypeError, match="state_slot_b: expected"):
        op(V, G, None, STATE, torch.zeros(1), *rest[1:], config=C2)
    with pytest.raises(ValueError, match="state_slot_b: expected n=1, got n=2"):
        op(V, G, None, STATE, ints(0, 1), *rest[1:], config=C2)


def test_bad_slots_and_steps_are_refused_by_the_reference() -> None:
    with pytest.raises(ValueError, match=r"state_slot_b: expected values in \[-1, 3\), got 3"):
        compress_prefill(V, G, None, STATE.clone(), ints(3), ints(0), ints(0, 4), config=C2)
    with pytest.raises(ValueError, match=r"state_slot_b: expected every slot once, got \[1, 1\]"):
        compress_prefill(V, G, None, STATE.clone(), ints(1, 1), ints(0, 0), ints(0, 2, 4), config=C2)
    for slots, positions in (
        ((0, 0, 0, 0), (0, 1, 3, 4)),
        ((0, 1, 0, 1), (0, 0, 1, 1)),
        ((0, 0, -1, -1), (-1, 0, 0, 0)),
    ):
        with pytest.raises(ValueError, match="position_t: expected the tokens of a slot side by side"):
            compress_decode(V, G, None, STATE.clone(), ints(*slots), ints(*positions), config=C2)
    with pytest.raises(ValueError, match="state_: expected a ring of 5 for 4 tokens, got 4"):
        compress_decode(V, G, None, STATE[:, :4].clone(), ints(0, 0, 0, 0), ints(0, 1, 2, 3), config=C2)


@pytest.mark.parametrize("op", [compress_decode, compress_decode_triton])
def test_bad_decode_input_is_refused(op: Any) -> None:
    with pytest.raises(ValueError, match="position_t: expected"):
        op(V, G, None, STATE, ints(0, 0, 0, 0), ints(0, 1, 2), config=C2)
    with pytest.raises(TypeError, match="position_t: expected"):
        op(V, G, None, STATE, ints(0, 0, 0, 0), torch.zeros(4), config=C2)
    with pytest.raises(TypeError, match="state_slot_t: expected"):
        op(V, G, None, STATE, torch.zeros(4), ints(0, 1, 2, 3), config=C2)
    with pytest.raises(ValueError, match="config: expected a ratio above 1, got 1"):
        op(V, G, None, STATE, ints(0, 0, 0, 0), ints(0, 1, 2, 3), config=C1)


@pytest.mark.parametrize("op", [compress_tail, compress_tail_triton])
def test_a_bad_tail_is_refused(op: Any) -> None:
    m, weight, table, entry = torch.zeros(2, 8), torch.ones(8), torch.zeros(9, 4), ints(0, 1)
    with pytest.raises(ValueError, match="weight_c: expected"):
        op(m, weight[:7], table, entry, ratio=2, eps=1e-6)
    with pytest.raises(ValueError, match="entry_y: expected y=2, got y=1"):
        op(m, weight, table, entry[:1], ratio=2, eps=1e-6)
    with pytest.raises(TypeError, match="entry_y: expected"):
        op(m, weight, table, entry.float(), ratio=2, eps=1e-6)
    with pytest.raises(ValueError, match="ratio: expected a positive number, got 0"):
        op(m, weight, table, entry, ratio=0, eps=1e-6)
    with pytest.raises(ValueError, match="eps: expected a positive number, got 0"):
        op(m, weight, table, entry, ratio=2, eps=0)
    with pytest.raises(ValueError, match="table_sr: expected an even width up to"):
        op(m, weight, torch.zeros(9, 10), entry, ratio=2, eps=1e-6)
    with pytest.raises(TypeError, match=r"table_sr: expected torch\.float32"):
        op(m, weight, table.double(), entry, ratio=2, eps=1e-6)


def test_a_position_beyond_the_table_is_refused_by_the_reference() -> None:
    with pytest.raises(ValueError, match=r"positions_t: expected values in \[0, 9\), got 10"):
        compress_tail(torch.zeros(1, 8), torch.ones(8), torch.zeros(9, 4), ints(5), ratio=2, eps=1e-6)


def test_what_the_triton_kernels_decline_and_buffers_that_do_not_fit() -> None:
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError, match="table_sr: expected a power of two"):
        compress_tail_triton(torch.zeros(1, 8), torch.ones(8), torch.zeros(9, 6), ints(0), ratio=2, eps=1e-6)
    with pytest.raises(TypeError, match=r"value_tw: expected torch\.float32, got torch\.float64"):
        compress_triton(V.double(), G, None, ints(0), ints(0, 4), config=C2)
    bad_m = (torch.empty(3, 6, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int32))
    bad_entry = (torch.empty(2, 6, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int64))
    for bad, error, text in ((bad_m, ValueError, "out: expected contiguous"), (bad_entry, TypeError, "out: expected")):
        with pytest.raises(error, match=text):
            compress_triton(V, G, None, ints(0), ints(0, 4), config=C2, out=bad)
        with pytest.raises(error, match=text):
            compress_prefill_triton(V, G, None, STATE, ints(0), ints(0), ints(0, 4), config=C2, out=bad)
    bad_step = (torch.empty(3, 6, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="out: expected contiguous"):
        compress_decode_triton(V, G, None, STATE, ints(0, 0, 0, 0), ints(0, 1, 2, 3), config=C2, out=bad_step)
    bad_tail = (torch.empty(1, 7, dtype=torch.bfloat16), torch.empty(1, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out: expected contiguous"):
        compress_tail_triton(
            torch.zeros(1, 8), torch.ones(8), torch.zeros(9, 4), ints(0), ratio=2, eps=1e-6, out=bad_tail
        )
