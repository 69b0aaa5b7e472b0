"""CSA: the layer against its parts and its laws, cached steps against whole sequences, then what both sides refuse."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized import csa as fast
from deeptwin.optimized.csa import (
    csa_attention_triton,
    csa_run_triton,
    csa_select_triton,
    head_norm_rope_triton,
    v4_output_deep_gemm,
    v4_output_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import Output, case_rng, load_card
from deeptwin.parity.cards.csa import CSA, HeadCase, SideCase, draw_heads, draw_output, draw_select
from deeptwin.parity.oracles import OracleSet
from deeptwin.parity.v4_draws import V4Case, draw_run, draw_whole, v4_config, v4_weights
from deeptwin.reference.config import (
    FP8_1X64,
    KV_V4,
    KV_V4_FMLA,
    HeadNorm,
    IndexCast,
    OutputCast,
    ScoreOrder,
    V4Kind,
    v4_flash_attn,
    v4_pro_attn,
)
from deeptwin.reference.csa import csa_attention, csa_index_rows, csa_run, csa_scores, csa_select
from deeptwin.reference.kv_cache import pack_records, unpack_records
from deeptwin.reference.numerics import SEMANTIC
from deeptwin.reference.quant import quantize
from deeptwin.reference.rope import rope_frequencies, rope_table
from deeptwin.reference.v4_attend import attend_values, packed_positions, visible_rows
from deeptwin.reference.v4_layer import head_norm, head_norm_rope, v4_output, v4_project
from deeptwin.reference.v4_layer import product as reference_product
from deeptwin.reference.v4_layer import rotated as reference_rotated
from deeptwin.reference.v4_state import page_bytes, v4_caches
from deeptwin.reference.v4_weights import V4Weights, checkpoint_names, v4_shapes

CARD = load_card("csa")
CHOICES: dict[str, Any] = {
    "head_norm": HeadNorm.RELEASE,
    "index": IndexCast.FP4,
    "score_order": ScoreOrder.BF16_RELEASE,
    "output": OutputCast.RELEASE,
}


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def whole(case: V4Case) -> dict[str, Any]:
    return draw_whole(case, rng())


# properties of the reference


def test_released_sizes() -> None:
    """v3-v32-v4.md section 1.1."""
    flash, pro = (make(V4Kind.CSA, **CHOICES) for make in (v4_flash_attn, v4_pro_attn))
    assert (flash.hidden, flash.num_heads, flash.q_rank, flash.o_groups, flash.index_topk) == (4096, 64, 1024, 8, 512)
    assert (pro.hidden, pro.num_heads, pro.q_rank, pro.o_groups, pro.index_topk) == (7168, 128, 1536, 16, 1024)
    for config in (flash, pro):
        assert (config.head_dim, config.window, config.ratio, config.compressor.overlap) == (512, 128, 4, True)
        assert (config.rope.theta, config.rope.yarn is not None) == (160000.0, True)
    assert v4_flash_attn(V4Kind.HCA, **CHOICES).ratio == 128
    assert v4_flash_attn(V4Kind.SLIDING, **CHOICES).rope.theta == 10000.0


def parameters(config: Any) -> int:
    return sum(int(np.prod(shape)) for shape in v4_shapes(config).values())


def test_parameter_counts_of_the_released_layers() -> None:
    """v3-v32-v4.md section 1.3: attention without compressor, CSA compressor, indexer, HCA compressor."""
    for make, plain, compressor, indexer, hca in (
        (v4_pro_attn, 299_894_912, 14_684_672, 16_712_832, 7_406_080),
        (v4_flash_attn, 106_956_352, 8_393_216, 10_749_056, 4_260_352),
    ):
        counts = {kind: parameters(make(kind, **CHOICES)) for kind in V4Kind}
        assert counts[V4Kind.SLIDING] == plain
        assert counts[V4Kind.CSA] == plain + compressor + indexer
        assert counts[V4Kind.HCA] == plain + hca


def test_sizes_of_records_pages_and_states() -> None:
    """v3-v32-v4.md sections 1.4, 5.8: 584 bytes, pages of 37,440 and 149,760, fp32 states."""
    assert KV_V4.record_bytes == KV_V4_FMLA.record_bytes == 584
    assert page_bytes(KV_V4, 64) == 37_440
    assert page_bytes(KV_V4, 256) == 149_760
    caches = v4_caches(v4_flash_attn(V4Kind.CSA, **CHOICES), pages=1, states=1)
    assert caches.pool is not None
    assert caches.index_pool is not None
    assert caches.pool[0].numel() * 4 == 8 * 2 * 1024 * 4  # 8 x 2048 x 4 = 65,536
    assert caches.index_pool[0].numel() * 4 == 16_384
    pool = v4_caches(v4_flash_attn(V4Kind.HCA, **CHOICES), pages=1, states=1).pool
    assert pool is not None
    assert pool[0].numel() * 4 == 524_288


def test_writers_differ_in_their_floor() -> None:
    """Least scale bytes 105 and 114 (section 2.2); above the floors the bytes agree."""
    small = torch.full((1, 512), 2.0**-30)
    assert pack_records(small, fmt=KV_V4)[0, 448] == 105
    assert pack_records(small, fmt=KV_V4_FMLA)[0, 448] == 114
    rows = torch.from_numpy(rng().standard_normal((3, 512))).bfloat16()
    assert torch.equal(pack_records(rows, fmt=KV_V4), pack_records(rows, fmt=KV_V4_FMLA))


def test_records_keep_the_rotary_channels() -> None:
    rows = torch.from_numpy(rng().standard_normal((3, 512))).bfloat16()
    packed = pack_records(rows, fmt=KV_V4)
    back = unpack_records(packed)
    assert torch.equal(back[:, 448:], rows[:, 448:].double())
    assert not torch.equal(back[:, :448], rows[:, :448].double())
    assert packed[:, 455].tolist() == [0, 0, 0]  # codes, seven scales, the zero byte, then the tail


def test_fake_quantisation_lands_on_the_grid() -> None:
    """U86: 1.0625 · 2^k is no e4m3 number; the first revision gave it back."""
    row = torch.zeros(1, 512)
    row[0, 0], row[0, 1] = 448.0, 17.0
    assert unpack_records(pack_records(row, fmt=KV_V4))[0, 1] == 16.0
    assert FP8_1X64.max_value == 448.0


def test_a_head_has_unit_rms_whatever_its_scale() -> None:
    """U11: scaling one head's query weights by a power of two changes nothing."""
    q = torch.from_numpy(rng().standard_normal((2, 3, 512))).bfloat16()
    for cast in HeadNorm:
        y = head_norm(q, cast=cast, eps=1e-20)
        assert (y.square().mean(-1).sqrt() - 1).abs().max() < 2.0**-6
        assert torch.equal(head_norm(q * 8, cast=cast, eps=1e-20), y)


@pytest.mark.parametrize("form", ["micro", "fused", "fmla", "fp8"])
def test_steps_leave_what_whole_sequences_mean(form: str) -> None:
    """Any cut of the text: equal outputs, equal bytes; and the outputs of the form without a cache."""
    case = replace(CSA, lengths=(13, 6), form=form, picks="free")
    expected = csa_attention(**whole(case))
    first = None
    for schedule in ("one", "chunks5", "mixed", "decode"):
        run = draw_run(replace(case, schedule=schedule), rng())
        assert torch.equal(run["x_tm"], whole(case)["x_tm"])
        y, *state = csa_run(**run)
        assert torch.equal(y, expected)
        flat = [part.reshape(-1).view(torch.uint8) for part in state]
        fixed = draw_run(replace(case, schedule="one"), rng())
        assert torch.equal(fixed["batch"].table_bp, run["batch"].table_bp)
        assert first is None or all(torch.equal(a, b) for a, b in zip(first, flat, strict=True))
        first = flat


@pytest.mark.parametrize("length", [12, 13, 14, 15])
def test_every_residue_reads_its_needle(length: int) -> None:
    """U31: the last entry of a text of any length modulo 4 is there for its last query."""
    inputs = whole(replace(CSA, lengths=(length,)))
    positions, seq = packed_positions(inputs["cu_seqlens"], length)
    rows = visible_rows(positions, seq, inputs["cu_seqlens"], ratio=4)
    assert (rows[-1] >= 0).sum() == length // 4
    assert [int((row >= 0).sum()) for row in rows] == [(p + 1) // 4 for p in range(length)]


def test_with_every_entry_chosen_it_is_dense_attention() -> None:
    """Section 5.9, 7: index_topk of all entries, and the list of all entries."""
    inputs = whole(replace(CSA, lengths=(11,), picks="free"))
    config = replace(inputs["config"], index_topk=9)
    every = torch.tensor([[j if (j + 1) * 4 <= p + 1 else -1 for j in range(2)] for p in range(11)])
    dense = csa_attention(**inputs | {"config": config, "picks_tk": every.to(torch.int32)})
    assert torch.equal(csa_attention(**inputs | {"config": config}), dense)


def test_a_changed_token_reaches_no_earlier_output() -> None:
    inputs = whole(replace(CSA, lengths=(14,), picks="free"))
    before = csa_attention(**inputs)
    x = inputs["x_tm"].clone()
    x[9] *= -3
    after = csa_attention(**inputs | {"x_tm": x})
    assert torch.equal(before[:9], after[:9])
    assert not torch.equal(before[9], after[9])


def test_a_large_sink_takes_everything_and_none_takes_nothing() -> None:
    inputs = whole(replace(CSA, lengths=(6,)))
    for sink, is_zero in ((torch.inf, True), (-torch.inf, False)):
        weights = replace(inputs["weights"], sink_h=torch.full((2,), sink))
        y = csa_attention(**inputs | {"weights": weights})
        assert bool((y == 0).all()) is is_zero
        assert y.isfinite().all()


def test_a_lone_key_comes_back_unrotated() -> None:
    """Section 5.9, 10: one visible key at its own position, no sink: what the output sees is the key before RoPE."""
    config = replace(v4_config(V4Kind.CSA, "hf"), window=1, cache=None)
    table = rope_table(torch.arange(9), rope_frequencies(config.rope))
    key = torch.from_numpy(rng().standard_normal((1, 32)))
    at = torch.tensor([7])
    turned = head_norm_rope(key[None], table, at, cast=HeadNorm.FUSED, eps=1e-9, num=SEMANTIC)[0]
    none = torch.zeros(1, 0, dtype=torch.int64)
    sink = torch.full((4,), -torch.inf)
    q = torch.ones(1, 4, 32, dtype=torch.float64)
    out = attend_values(q, turned, turned[:0], none, torch.zeros(1).long(), sink, config=config, num=SEMANTIC)
    weights = v4_weights(config, rng())
    eye = torch.zeros(16, 64)
    eye[:8, 24:32] = eye[8:, 24:32] = torch.eye(8)
    plain = replace(weights, wo_a=eye, wo_b=torch.eye(64)[:, :16])
    y = v4_output(out, plain, table, at, config=config, num=SEMANTIC)
    unit = key / key.square().mean().sqrt()
    assert (y[0, :8] - unit[0, 24:]).abs().max() < 1e-6


def test_zero_scores_are_given_to_the_lower_entry() -> None:
    """U89: two index heads tie at zero all the time; whole sequences and steps choose alike."""
    inputs = draw_select(replace(CSA, lengths=(30,), form="ties", picks="free"), rng())
    names = ("x_tm", "latent_ta", "weights", "table_sr", "positions_t", "config")
    keys = torch.zeros(7, 128)
    rows = torch.arange(7).expand(30, 7)
    scores = csa_scores(*(inputs[n] for n in names[:5]), keys, rows, config=inputs["config"])
    assert (scores == 0).all()
    blank = inputs["index_pow"].clone()
    blank[:, :, :] = 0
    picks = csa_select(**inputs | {"index_pow": blank})
    assert picks[-1].tolist() == [0, 1]


def test_the_transform_changes_no_score() -> None:
    config = v4_config(V4Kind.CSA, "micro")
    q, k = (torch.from_numpy(rng(seed).standard_normal((1, 128))) for seed in (1, 2))
    turned = (csa_index_rows(x, config=config, num=SEMANTIC) for x in (q, k))
    a, b = turned
    assert float((a * b).sum()) == pytest.approx(float((q * k).sum()), rel=1e-6)
    plain = csa_index_rows(q, config=replace(config, index=IndexCast.PLAIN))
    assert torch.equal(plain, q)


def test_both_spellings_of_a_checkpoint_are_read() -> None:
    config = v4_config(V4Kind.CSA, "hf")
    drawn = {name: torch.ones(shape) for name, shape in v4_shapes(config).items()}
    for names, read in ((0, V4Weights.from_state_dict), (1, V4Weights.from_transformers)):
        spelt = {"a." + name: drawn[field] for field, name in checkpoint_names(names).items() if field in drawn}
        weights = read(spelt, prefix="a.", config=config)
        assert weights.index_entry is not None
        assert weights.index_entry.bias_rw.shape == (4, 32)


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged: Any) -> None:
    # a free selection takes an interpreter too long: on a device only
    assert judged.faults("csa") == ["csa_run_free/triton"]


def test_stored_pages_are_judged_by_slot_and_value() -> None:
    """Honest bytes pass; a moved record, one not written, another scale or a pad byte fails."""
    op = CARD.op("csa_run")
    case = op.case("csa-micro-t9-mixed-normal-forced")
    oracles = OracleSet(op, op.draw(case, case_rng("csa", op.name, case.id, 0)))
    outputs = {o.name: o for o in op.outputs}

    def ok(output: Output, got: Tensor) -> bool:
        return output.rule.judge(got, oracles.of(output)).ok

    for name in ("main_pow", "ring_pow", "index_pow"):
        rival = oracles.rival[name].to(torch.uint8)
        assert ok(outputs[name], rival)
        assert not ok(outputs[name], rival.roll(1, 1))
        assert not ok(outputs[name], oracles.inputs["caches"].parts()[name])
    main = oracles.contract["main_pow"].to(torch.uint8)
    flat = main.reshape(len(main), -1).clone()
    page = int((flat[:, 0] != 255).nonzero()[0])
    scales = main.shape[1] * 576
    for byte in (scales, scales + 7):
        spoilt = flat.clone()
        spoilt[page, byte] += 8
        assert not ok(outputs["main_pow"], spoilt.view(main.shape))
    pool = oracles.rival["pool"].float()
    assert ok(outputs["pool"], pool)
    assert not ok(outputs["pool"], pool.roll(1, 1))


# batch invariance


def test_every_candidate_is_invariant_under_steps_and_neighbours(judged: Any) -> None:
    # records and whole sequences have other relations, or none that an interpreter has time for
    stepwise = {"csa_run/triton", "csa_select/triton", "v4_output/triton"}
    assert stepwise.isdisjoint(judged.without("csa", "chunk_invariant"))


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def test_heads_are_checked() -> None:
    inputs = draw_heads(HeadCase(tokens=2), rng())
    for function in (head_norm_rope, head_norm_rope_triton):
        with pytest.raises(ValueError, match=r"^(q_thd|x_thd): "):
            function(**inputs | {"q_thd": inputs["q_thd"][0]})
    with pytest.raises(ValueError, match=r"^q_thd: "):
        head_norm(inputs["q_thd"][0], cast=HeadNorm.FUSED, eps=1e-6)
    with pytest.raises(TypeError, match=r"^q_thd: "):
        head_norm_rope_triton(**inputs | {"q_thd": inputs["q_thd"].float()})
    with pytest.raises(TypeError, match=r"^table_sr: "):
        head_norm_rope_triton(**inputs | {"table_sr": inputs["table_sr"].double()})
    with pytest.raises(TypeError, match=r"^positions_t: "):
        head_norm_rope_triton(**inputs | {"positions_t": inputs["positions_t"].float()})
    with pytest.raises(ValueError, match=r"^table_sr: "):
        head_norm_rope_triton(**inputs | {"table_sr": inputs["table_sr"][:, :63]})
    with pytest.raises(NotImplementedError, match=r"^q_thd: "):
        head_norm_rope_triton(**inputs | {"q_thd": inputs["q_thd"][..., :500]})


def test_both_sides_of_a_layer_are_checked() -> None:
    inputs = draw_output(SideCase(tokens=2), rng())
    for function in (v4_output, v4_output_triton):
        with pytest.raises(ValueError, match=r"^out_thd: "):
            function(**inputs | {"out_thd": inputs["out_thd"][:, :1]})
    x = torch.zeros(2, 127, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^x_tm: "):
        v4_project(x, inputs["weights"], inputs["table_sr"], inputs["positions_t"], config=inputs["config"])


def test_whole_sequences_are_checked() -> None:
    inputs = whole(CSA)
    for function in (csa_attention, csa_attention_triton):
        with pytest.raises(ValueError, match=r"^cu_seqlens: "):
            function(**inputs | {"cu_seqlens": torch.tensor([0, 8])})
        with pytest.raises(ValueError, match=r"^config: expected kind CSA"):
            function(**inputs | {"config": v4_config(V4Kind.HCA, "micro")})
    with pytest.raises(NotImplementedError, match=r"^config: "):
        csa_attention_triton(**whole(replace(CSA, form="hf", picks="free")))


def test_steps_are_checked() -> None:
    inputs = draw_run(CSA, rng())
    batch = inputs["batch"]
    long = replace(batch, counts_kb=torch.tensor([[9]], dtype=torch.int32), decode_k=torch.tensor([True]))
    bad: list[tuple[str, dict[str, Any]]] = [
        ("x_tm", {"x_tm": inputs["x_tm"][:, :-1]}),
        ("batch", {"x_tm": inputs["x_tm"][:-1]}),
        ("batch", {"batch": long}),
        ("caches", {"caches": replace(inputs["caches"], pool=None)}),
        ("config", {"config": v4_config(V4Kind.SLIDING, "micro")}),
    ]
    for name, change in bad:
        for function in (csa_run, csa_run_triton):
            with pytest.raises(ValueError, match=f"^{name}: "):
                function(**inputs | change)
    with pytest.raises(NotImplementedError, match=r"^config: expected index keys in FP4"):
        csa_run_triton(**draw_run(replace(CSA, form="fp8"), rng()))


def test_selections_are_checked() -> None:
    inputs = draw_select(replace(CSA, lengths=(5,), picks="free"), rng())
    without = replace(inputs["weights"], index_wq=None)
    for function in (csa_select, csa_select_triton):
        with pytest.raises(ValueError, match=r"^index_wq: "):
            function(**inputs | {"weights": without})
    with pytest.raises(ValueError, match=r"^x_tm: "):
        csa_select_triton(**inputs | {"x_tm": inputs["x_tm"][:-1]})
    with pytest.raises(ValueError, match=r"^rows_tj: "):
        csa_scores(
            *(inputs[n] for n in ("x_tm", "latent_ta", "weights", "table_sr", "positions_t")),
            torch.zeros(1, 128),
            torch.zeros(4, 1),
            config=inputs["config"],
        )
    with pytest.raises(ValueError, match=r"^x_yd: "):
        csa_index_rows(torch.zeros(1, 64), config=inputs["config"])
    with pytest.raises(NotImplementedError, match=r"^config: "):
        csa_select_triton(**inputs | {"config": v4_config(V4Kind.CSA, "fp8")})


def test_records_without_a_quantiser_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"^config: expected quantised caches"):
        v4_caches(v4_config(V4Kind.CSA, "hf"), pages=1, states=1)


def test_checkpoints_have_to_fit_the_layer() -> None:
    config = v4_config(V4Kind.CSA, "micro")
    for read in (V4Weights.from_state_dict, V4Weights.from_transformers):
        with pytest.raises(ValueError, match=r"^state: expected (wq_a|q_a_proj).weight \(128, 128\), got None"):
            read({}, prefix="", config=config)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 0},
        {"o_groups": 3},
        {"ratio": 0},
        {"page_tokens": 6},
        {"index_topk": 0},
        {"cache": KV_V4, "head_dim": 256},
        {"index_dim": 64},
        {"rope": replace(v4_config(V4Kind.CSA, "micro").rope, rope_dim=1024)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_configurations_are_checked(change: dict[str, Any]) -> None:
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"^{name}: "):
        replace(v4_config(V4Kind.CSA, "micro"), **change)


def test_the_grouped_product_of_deep_gemm_takes_codes_and_fp32_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, and the reference for the launches around it."""

    def einsum(form: str, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor) -> None:
        assert form == "bhr,hdr->bhd"
        x, w = (
            codes.double() * sf.double().repeat_interleave(128, -1)
            for codes, sf in (a, (b[0], b[1].repeat_interleave(128, 1)[:, : b[0].shape[1]]))
        )
        d.copy_(torch.einsum("bhr,hdr->bhd", x, w))

    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=None, fp8_einsum=einsum))
    monkeypatch.setattr(fast, "quantize_triton", quantize)
    monkeypatch.setattr(fast, "rotated", lambda x, *rest, **kinds: reference_rotated(x, *rest, **kinds).float())
    monkeypatch.setattr(fast, "product", lambda *operands: reference_product(*operands).bfloat16())
    inputs = draw_output(SideCase(tokens=3, form="fused"), rng())
    assert torch.equal(v4_output_deep_gemm(**inputs), v4_output(**inputs).bfloat16())
    with pytest.raises(ValueError, match="out_thd: expected t=3, got t=2"):
        v4_output_deep_gemm(**(inputs | {"out_thd": inputs["out_thd"][:2]}))
    with pytest.raises(NotImplementedError, match="config, weights: expected fused cast points and FP8 weights"):
        v4_output_deep_gemm(**draw_output(SideCase(tokens=3), rng()))
    with pytest.raises(NotImplementedError, match="weights: expected tokens, 128·n columns"):
        v4_output_deep_gemm(**draw_output(SideCase(tokens=0, form="fused"), rng()))
