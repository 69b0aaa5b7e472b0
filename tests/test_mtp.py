"""Draft modules of V3 and V4: order of the join, schedule of the block, transformers' module, kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.mtp import mtp_join_streams_triton, mtp_join_triton
from deeptwin.parity import goldens
from deeptwin.parity.block_draws import v3_state
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.mtp import JoinCase, ModuleCase, draw_join, draw_streams, draw_v3, draw_v4
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference.block import block_v3, block_v4
from deeptwin.reference.config import WeightCast
from deeptwin.reference.linear import linear
from deeptwin.reference.mtp import mtp_join, mtp_join_streams, mtp_v3, mtp_v4
from deeptwin.reference.mtp_weights import MtpJoin, MtpStreamJoin, MtpV3Weights, MtpV4Weights
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.presets import tiny_v3, tiny_v4_pro

ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
CARD = load_card("mtp")
Judged = Callable[[str], list[Outcome]]
AFTER = WeightCast.AFTER_WEIGHT


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def relative(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm()).item()


# properties of the reference


@ALL_NUMERICS
def test_the_embedding_stands_first(num: Numerics) -> None:
    """Columns 0 … m - 1 belong to the embedding: with an identity there the hidden state does not matter."""
    m = 4
    w = torch.cat([torch.eye(m), torch.zeros(m, m)], 1)
    weights = MtpJoin(enorm_m=torch.ones(m), hnorm_m=torch.ones(m), w_mj=w)
    e, h = torch.tensor([[1.0, -1.0, 1.0, 1.0]]), torch.tensor([[5.0, 0.0, 0.0, 0.0]])
    got = mtp_join(e, h, weights, eps=1e-6, cast=AFTER, dtype=torch.float32, num=num)
    torch.testing.assert_close(got.double(), e.double(), rtol=0, atol=1e-6)
    hidden = replace(weights, w_mj=w.roll(m, 1))
    got = mtp_join(e, h, hidden, eps=1e-6, cast=AFTER, dtype=torch.float32, num=num)
    torch.testing.assert_close(got.double(), torch.tensor([[2.0, 0, 0, 0]]).double(), rtol=0, atol=1e-6)


def test_two_products_are_one_of_both_rows() -> None:
    """V4's e_proj and h_proj are the halves of an eh_proj, for every stream alike (8.2)."""
    inputs = draw_streams(JoinCase(tokens=3, streams=4), rng(1))
    w = inputs["weights"]
    got = mtp_join_streams(**inputs, num=SEMANTIC)
    whole = MtpJoin(enorm_m=w.enorm_m, hnorm_m=w.hnorm_m, w_mj=torch.cat([w.e_mm, w.h_mm], 1))
    for n in range(4):
        row = mtp_join(inputs["e_tm"], inputs["stream_tnm"][:, n], whole, eps=1e-6, cast=AFTER, num=SEMANTIC)
        assert relative(got[:, n], row) < 1e-12


def test_every_stream_has_a_norm_of_its_own() -> None:
    inputs = draw_streams(JoinCase(tokens=2, streams=4), rng(2))
    larger = inputs["stream_tnm"].clone()
    larger[:, 2] *= 8
    a, b = (mtp_join_streams(**(inputs | {"stream_tnm": x}), num=SEMANTIC) for x in (inputs["stream_tnm"], larger))
    assert relative(b, a) < 1e-5


def test_a_module_of_v3_is_its_parts() -> None:
    inputs = draw_v3(ModuleCase(tokens=6), rng(3))
    w, config, table = inputs["weights"], inputs["config"], inputs["table_sr"]
    logits, x = mtp_v3(**inputs, num=SEMANTIC)
    e, cast = w.embed_vm[inputs["next_t"]], config.attention.weight_cast
    joined = mtp_join(e, inputs["h_tm"], w.join, eps=1e-6, cast=cast, num=SEMANTIC)
    h, y = block_v3(joined, torch.zeros_like(joined), w.block, table, config=config, num=SEMANTIC)
    total = h + y
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * w.norm_m.double()
    assert relative(x, normed) < 1e-12
    assert relative(logits, linear(normed, w.head_vm, num=SEMANTIC)) < 1e-12


def test_a_row_has_the_token_behind_it() -> None:
    """U61: the draft block is not one position early; another next token changes its own row and later ones only."""
    inputs = draw_v3(ModuleCase(tokens=6), rng(4))
    logits, _ = mtp_v3(**inputs)
    other = inputs["next_t"].clone()
    other[3] = (other[3] + 1) % 101
    changed, _ = mtp_v3(**(inputs | {"next_t": other}))
    assert torch.equal(changed[:3], logits[:3])
    assert not torch.equal(changed[3], logits[3])


def test_the_draft_of_v4_has_a_window_alone() -> None:
    """U63: layers 0 and 1 of V4-Pro compress, its draft does not; what lies outside the window is not seen."""
    inputs = draw_v4(ModuleCase(tokens=12, model="v4", dtype="bf16"), rng(5))
    config = inputs["config"]
    assert [config.attention.compress_ratios[layer] for layer in (0, 1, config.num_layers)] == [8, 8, 0]
    stream = inputs["stream_tnm"].clone()
    stream[:4] *= -3  # row 11 sees 4 … 11
    a, b = (mtp_v4(**(inputs | {"stream_tnm": x}))[0] for x in (inputs["stream_tnm"], stream))
    assert torch.equal(a[11], b[11])
    assert not torch.equal(a[10], b[10])


def test_a_module_of_v4_is_its_parts() -> None:
    inputs = draw_v4(ModuleCase(tokens=5, model="v4", dtype="bf16", plain=False), rng(6))
    w, config = inputs["weights"], inputs["config"]
    found: dict[str, Tensor] = {}
    _, stream = mtp_v4(**inputs, tap=found.__setitem__)
    joined = mtp_join_streams(w.embed_vm[inputs["next_t"]], inputs["stream_tnm"], w.join, eps=1e-6)
    assert torch.equal(found["join"], joined)
    block = block_v4(joined, inputs["next_t"], w.block, inputs["table_sr"], config=config, layer=config.num_layers)
    assert torch.equal(stream, block)
    assert [name for name in found if name.startswith("head")] == ["head.x", "head.norm"]


def test_modules_may_be_chained() -> None:
    """What a module returns is what a further one takes: transformers hands on the normalised row."""
    inputs = draw_v3(ModuleCase(tokens=5), rng(7))
    _, x = mtp_v3(**inputs, num=SEMANTIC)
    logits, _ = mtp_v3(**(inputs | {"h_tm": x, "next_t": inputs["next_t"].roll(-1)}), num=SEMANTIC)
    assert logits.isfinite().all()
    assert relative(logits, mtp_v3(**inputs, num=SEMANTIC)[0]) > 0.1


def test_weights_come_from_the_names_of_the_checkpoint() -> None:
    config = tiny_v3()
    inputs = draw_v3(ModuleCase(tokens=4), rng(8))
    w, prefix = inputs["weights"], "model.layers.3."
    state = {prefix + name: x for name, x in v3_state(config, 3, rng(9), torch.float32).items()}
    state |= {
        prefix + "enorm.weight": w.join.enorm_m,
        prefix + "hnorm.weight": w.join.hnorm_m,
        prefix + "eh_proj.weight": w.join.w_mj,
        prefix + "shared_head.norm.weight": w.norm_m,
        prefix + "shared_head.head.weight": w.head_vm,
        prefix + "embed_tokens.weight": w.embed_vm,
    }
    weights = MtpV3Weights.from_state_dict(state, prefix=prefix, config=config)
    logits, _ = mtp_v3(**(inputs | {"weights": weights, "config": config}))
    assert logits.shape == (4, 101)
    state.pop(prefix + "eh_proj.weight")
    with pytest.raises(ValueError, match=r"state: expected model\.layers\.3\.eh_proj\.weight"):
        MtpV3Weights.from_state_dict(state, prefix=prefix, config=config)
    with pytest.raises(ValueError, match=r"state: expected mtp\.0\.enorm\.weight"):
        MtpV4Weights.from_state_dict(state, prefix="mtp.0.", config=tiny_v4_pro())


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged: Any) -> None:
    assert judged.faults("mtp") == []


def test_transformers_module_agrees(judged: Judged) -> None:
    pytest.importorskip("transformers")
    outcomes = [o for o in judged("mtp") if o.candidate == "transformers"]
    assert outcomes
    assert {o.status for o in outcomes} == {Status.PASSED}


# batch invariance


def test_every_candidate_is_batch_invariant(judged: Any) -> None:
    assert judged.without("mtp", "batch_invariant") == []


# golden vectors


def test_golden_vectors_match() -> None:
    assert [o.id for o in goldens.verify(CARD) if o.status is not Status.PASSED] == []


# rejected input


@pytest.mark.parametrize("op", [mtp_join, mtp_join_triton], ids=["reference", "triton"])
def test_wrong_rows_are_refused(op: Callable[..., Tensor]) -> None:
    inputs = draw_join(JoinCase(tokens=3), rng(10))
    with pytest.raises(ValueError, match="h_tm: expected t=3, got t=2"):
        op(**(inputs | {"h_tm": inputs["h_tm"][:2]}))
    with pytest.raises(ValueError, match=r"weights\.w_mj: expected j=256, got j=128"):
        op(**(inputs | {"weights": replace(inputs["weights"], w_mj=inputs["weights"].w_mj[:, :128])}))
    with pytest.raises(ValueError, match="eps: expected a positive number, got 0"):
        op(**(inputs | {"eps": 0.0}))
    with pytest.raises(TypeError, match="x_tm: expected"):
        op(**(inputs | {"e_tm": inputs["e_tm"].int()}))
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        op(**(inputs | {"dtype": torch.float64}))


def test_weights_of_another_dtype_are_declined() -> None:
    inputs = draw_join(JoinCase(tokens=2), rng(11))
    with pytest.raises(NotImplementedError, match=r"weights\.w_mj: expected torch\.bfloat16"):
        mtp_join_triton(**(inputs | {"weights": replace(inputs["weights"], w_mj=inputs["weights"].w_mj.float())}))
    streams = draw_streams(JoinCase(tokens=1, streams=4), rng(12))
    wide = replace(streams["weights"], e_mm=streams["weights"].e_mm.float())
    with pytest.raises(NotImplementedError, match=r"weights\.e_mm: expected torch\.bfloat16"):
        mtp_join_streams_triton(**(streams | {"weights": wide}))


@pytest.mark.parametrize("op", [mtp_join_streams, mtp_join_streams_triton], ids=["reference", "triton"])
def test_wrong_streams_are_refused(op: Callable[..., Tensor]) -> None:
    inputs = draw_streams(JoinCase(tokens=3, streams=4), rng(13))
    with pytest.raises(ValueError, match="e_tm: expected t=3, got t=2"):
        op(**(inputs | {"e_tm": inputs["e_tm"][:2]}))
    with pytest.raises(ValueError, match="eps: expected a positive number, got -1"):
        op(**(inputs | {"eps": -1.0}))
    with pytest.raises(TypeError, match="x_tm: expected"):
        op(**(inputs | {"e_tm": inputs["e_tm"].int()}))


def test_scales_come_for_both_matrices() -> None:
    weights = draw_streams(JoinCase(tokens=1, streams=4, quantised=True), rng(14))["weights"]
    assert isinstance(weights, MtpStreamJoin)
    with pytest.raises(ValueError, match="h_sf: expected scales for both matrices or for none"):
        replace(weights, h_sf=None)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    inputs = draw_v3(ModuleCase(tokens=3), rng(15))
    with pytest.raises(ValueError, match=r"next_t: expected values in \[0, 101\), got 101"):
        mtp_v3(**(inputs | {"next_t": torch.tensor([0, 101, 1])}))
    with pytest.raises(ValueError, match="next_t: expected t=3, got t=2"):
        mtp_v3(**(inputs | {"next_t": torch.tensor([0, 1])}))
    with pytest.raises(TypeError, match=r"next_t: expected torch\.int64"):
        mtp_v3(**(inputs | {"next_t": torch.tensor([0.0, 1.0, 2.0])}))
    four = draw_v4(ModuleCase(tokens=2, model="v4", dtype="bf16"), rng(16))
    with pytest.raises(ValueError, match=r"next_t: expected values in \[0, 97\), got -1"):
        mtp_v4(**(four | {"next_t": torch.tensor([0, -1])}))
    with pytest.raises(TypeError, match=r"next_t: expected torch\.int64"):
        mtp_v4(**(four | {"next_t": torch.tensor([0.0, 1.0])}))
