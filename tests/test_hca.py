"""HCA and sliding layers: laws of the layer, cached steps against whole sequences, then what both sides refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.hca import hca_attention_triton, hca_run_triton, sliding_attention_triton, sliding_run_triton
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.hca import HCA, SLIDING
from deeptwin.parity.v4_draws import V4Case, draw_run, draw_whole, taken_back, v4_config
from deeptwin.reference.config import V4Kind
from deeptwin.reference.hca import hca_attention, hca_run, sliding_attention, sliding_run
from deeptwin.reference.v4_layer import v4_output, v4_project

CARD = load_card("hca")
WHOLE: dict[V4Kind, Callable[..., Tensor]] = {V4Kind.HCA: hca_attention, V4Kind.SLIDING: sliding_attention}
RUN: dict[V4Kind, Callable[..., tuple[Tensor, ...]]] = {V4Kind.HCA: hca_run, V4Kind.SLIDING: sliding_run}
NAMES = ("y_tm", "ring_pow", "main_pow", "pool")
BASES = [HCA, SLIDING]


def rng() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(1))


def whole(case: V4Case) -> dict[str, Any]:
    return draw_whole(case, rng())


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def ids(value: Any) -> str:
    return value.kind.value if isinstance(value, V4Case) else str(value)


# properties of the reference


@pytest.mark.parametrize("form", ["micro", "fused", "fmla"])
@pytest.mark.parametrize("base", BASES, ids=ids)
def test_steps_leave_what_whole_sequences_mean(base: V4Case, form: str) -> None:
    """Any cut of the text: equal outputs, equal bytes; and the outputs of the form without a cache."""
    case = replace(base, lengths=(19, 6), form=form)
    expected = WHOLE[base.kind](**whole(case))
    first: list[Tensor] = []
    for schedule in ("one", "chunks5", "mixed", "decode"):
        y, *state = RUN[base.kind](**draw_run(replace(case, schedule=schedule), rng()))
        assert torch.equal(y, expected)
        first = first or state
        assert all(same(a, b) for a, b in zip(first, state, strict=True))


@pytest.mark.parametrize("base", BASES, ids=ids)
def test_rejected_tokens_leave_no_trace(base: V4Case) -> None:
    """U32, U33: steps of which tokens are taken back equal the accepted tokens one after the other."""
    inputs = draw_run(replace(base, lengths=(18,), schedule="decode"), rng())

    def call(arguments: dict[str, Any]) -> dict[str, Tensor]:
        return dict(zip(NAMES, RUN[base.kind](**arguments), strict=False))

    for _, got, expected in taken_back(inputs, call, None):  # type: ignore[arg-type]
        assert all(same(got[name], expected[name]) for name in expected)


def test_the_window_ends_where_it_should() -> None:
    """Section 5.1: the output sees the token W - 1 before it, not the one before that."""
    inputs = whole(replace(SLIDING, lengths=(9,)))
    before = sliding_attention(**inputs)
    x = inputs["x_tm"].clone()
    x[2] *= -3
    moved = (sliding_attention(**inputs | {"x_tm": x}) != before).any(1)
    assert moved.tolist() == [False, False, True, True, True, True, False, False, False]


def test_an_entry_is_seen_from_its_last_token_on() -> None:
    """Section 5.3: a token outside the window shows through its entry at p = 7, not before."""
    inputs = whole(replace(HCA, lengths=(12,)))
    before = hca_attention(**inputs)
    x = inputs["x_tm"].clone()
    x[1] *= -3
    moved = (hca_attention(**inputs | {"x_tm": x}) != before).any(1)
    assert moved.tolist() == [False] + [True] * 4 + [False, False] + [True] * 5


def test_without_gate_and_bias_an_entry_is_a_mean() -> None:
    """Section 5.9, 2, seen through the layer: tokens of a group may change places."""
    inputs = whole(replace(HCA, lengths=(24,), regime="normal"))
    entry = inputs["weights"].entry
    flat = replace(entry, gate_wm=torch.zeros_like(entry.gate_wm), bias_rw=torch.zeros_like(entry.bias_rw))
    inputs["weights"] = replace(inputs["weights"], entry=flat)
    x = inputs["x_tm"].clone()
    x[:8] = x[:8].flip(0)
    a, b = (hca_attention(**inputs | {"x_tm": rows})[20:] for rows in (inputs["x_tm"], x))
    assert (a - b).abs().max() < 2.0**-5  # the order of a sum in fp32, then e4m3
    gated = whole(replace(HCA, lengths=(24,)))
    a, b = (hca_attention(**gated | {"x_tm": rows})[20:] for rows in (gated["x_tm"], x))
    assert (a - b).abs().max() > 2.0**-5


def test_a_short_text_is_its_window() -> None:
    """Fewer tokens than a group: entries, compressor and bias do not show."""
    inputs = whole(replace(HCA, lengths=(7,)))
    entry = inputs["weights"].entry
    other = replace(inputs["weights"], entry=replace(entry, norm_c=entry.norm_c * 3))
    assert torch.equal(hca_attention(**inputs), hca_attention(**inputs | {"weights": other}))


def test_a_pool_of_another_request_is_not_read() -> None:
    """Section 5.10: V4-ref keeps state between requests; here a short text sees none of it."""
    case = replace(HCA, lengths=(9,), schedule="decode")
    clean, dirty = draw_run(case, rng()), draw_run(case, rng())
    dirty["caches"].pool.fill_(3.0)
    dirty["caches"].ring_pow.fill_(0x3C)
    assert torch.equal(hca_run(**clean)[0], hca_run(**dirty)[0])


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged: Any) -> None:
    assert judged.faults("hca") == []


# batch invariance


def test_every_candidate_is_invariant_under_steps_and_neighbours(judged: Any) -> None:
    # the other rows are the same code on whole sequences, or without entries
    assert "hca_run/triton" not in judged.without("hca", "chunk_invariant")


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def test_whole_sequences_are_checked() -> None:
    for base, functions in (
        (HCA, (hca_attention, hca_attention_triton)),
        (SLIDING, (sliding_attention, sliding_attention_triton)),
    ):
        inputs = whole(base)
        for function in functions:
            with pytest.raises(ValueError, match=r"^cu_seqlens: "):
                function(**inputs | {"cu_seqlens": torch.tensor([0, 8])})
            with pytest.raises(ValueError, match=r"^config: expected kind"):
                function(**inputs | {"config": v4_config(V4Kind.CSA, "micro")})
    for base, function in ((HCA, hca_attention_triton), (SLIDING, sliding_attention_triton)):
        with pytest.raises(NotImplementedError, match=r"^config: "):
            function(**whole(replace(base, form="hf")))


def test_steps_are_checked() -> None:
    for base, functions in ((HCA, (hca_run, hca_run_triton)), (SLIDING, (sliding_run, sliding_run_triton))):
        inputs = draw_run(base, rng())
        batch = inputs["batch"]
        long = replace(batch, counts_kb=torch.tensor([[9]], dtype=torch.int32), decode_k=torch.tensor([True]))
        bad: list[tuple[str, dict[str, Any]]] = [
            ("x_tm", {"x_tm": inputs["x_tm"][:, :-1]}),
            ("batch", {"x_tm": inputs["x_tm"][:-1]}),
            ("batch", {"batch": long}),
            ("config", {"config": v4_config(V4Kind.CSA, "micro")}),
        ]
        if base.kind is V4Kind.HCA:
            bad += [("caches", {"caches": replace(inputs["caches"], **{n: None})}) for n in ("main_pow", "pool")]
        for name, change in bad:
            for function in functions:
                with pytest.raises(ValueError, match=f"^{name}: "):
                    function(**inputs | change)


def test_ends_of_a_layer_are_checked() -> None:
    inputs = whole(HCA)
    at = torch.zeros(9, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^x_tm: "):
        v4_project(inputs["x_tm"][:, 1:], inputs["weights"], inputs["table_sr"], at, config=inputs["config"])
    with pytest.raises(ValueError, match=r"^out_thd: "):
        v4_output(torch.zeros(9, 3, 512), inputs["weights"], inputs["table_sr"], at, config=inputs["config"])
