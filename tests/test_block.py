"""Whole blocks: released sizes, wiring, choices in which codes disagree, transformers' models beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.parity import goldens
from deeptwin.parity.block_draws import v3_block, v3_state, v4_block
from deeptwin.parity.card import case_rng, load_card
from deeptwin.parity.cards.block import V41, V3Case, V4Case, V41Case, draw_v3, draw_v4, v41_config
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference.block import block_v3, block_v4, embedding, v3_enter, v4_head
from deeptwin.reference.block_ffn import gated, plain_experts, routed_ffn
from deeptwin.reference.block_v41 import V41Carry, block_v41, blocks_v41, stack_of, start_v41
from deeptwin.reference.block_weights import V3BlockWeights, V4BlockWeights, V41BlockWeights
from deeptwin.reference.config import (
    FP8_128X128_UE8M0,
    MXFP4,
    Combine,
    FfnConfig,
    PageLayout,
    ResidualNorm,
    ScoreOrder,
    V4Kind,
    WeighExperts,
)
from deeptwin.reference.csa2_config import CastPoints, v41_flash_csa2
from deeptwin.reference.engram_vocab import hash_layout
from deeptwin.reference.ffn_weights import GatedWeights, MoeWeights, PlainExperts
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.presets import (
    PRESETS,
    V3Config,
    V4Config,
    V41Config,
    preset,
    tiny_v3,
    tiny_v4_flash,
    tiny_v4_pro,
    tiny_v32,
    tiny_v41_flash,
    v3,
    v4_flash,
    v4_pro,
    v32,
    v41_flash,
)
from deeptwin.reference.quant import dequantize, quantize
from deeptwin.reference.rope import table_of
from deeptwin.reference.taps import ignore, under
from deeptwin.reference.weights import MhcSite

ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
CARD = load_card("block")
Judged = Callable[[str], list[Outcome]]


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(rng(seed).standard_normal(shape)).to(dtype)


def relative(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm()).item()


def heard(found: dict[str, Tensor]) -> Callable[[str, Tensor], None]:
    return found.__setitem__


# properties of the reference


def test_sizes_of_v3_and_v32() -> None:
    a, b = v3(), v32()
    for config in (a, b):
        mla = config.attention
        assert (config.hidden, config.num_layers, config.draft_layers, config.vocab_size) == (7168, 61, 1, 129280)
        assert (mla.num_heads, mla.q_lora_rank, mla.kv_lora_rank) == (128, 1536, 512)
        assert (mla.nope_dim, mla.rope.rope_dim, mla.value_dim, mla.head_dim) == (128, 64, 128, 192)
        assert (config.dense_layers, config.dense_width, config.expert_width, config.shared_experts) == (
            3,
            18432,
            2048,
            1,
        )
        router = config.router
        assert (router.num_experts, router.topk, router.num_groups, router.kept_groups) == (256, 8, 8, 4)
        assert (router.route_scale, config.norm_eps, config.max_positions) == (2.5, 1e-6, 163840)
        yarn = mla.rope.yarn
        assert yarn is not None
        assert (mla.rope.theta, yarn.factor, yarn.original_length, yarn.mscale) == (10000.0, 40.0, 4096, 1.0)
        assert [config.is_dense(layer) for layer in (0, 2, 3, 60, 61)] == [True, True, False, False, False]
    assert a.index is None
    assert b.index is not None
    assert (b.index.heads, b.index.dim, b.index.topk, b.dsa.topk) == (64, 128, 2048, 2048)
    assert (a.residual, b.residual) == (ResidualNorm.ROUNDED, ResidualNorm.UNROUNDED)
    assert (a.activation.name, b.activation.name) == ("fp8_1x128", "fp8_1x128_ue8m0")


@pytest.mark.parametrize(
    ("config", "sizes", "experts"),
    [
        (v4_flash(), (4096, 43, 64, 1024, 8, 512), (256, 6, 1.5, 2048)),
        (v4_pro(), (7168, 61, 128, 1536, 16, 1024), (384, 6, 2.5, 3072)),
    ],
    ids=["flash", "pro"],
)
def test_sizes_of_v4(config: V4Config, sizes: tuple[int, ...], experts: tuple[float, ...]) -> None:
    a, router = config.attention, config.router
    assert (config.hidden, config.num_layers, a.num_heads, a.q_lora_rank, a.o_groups, a.index_topk) == sizes
    assert (router.num_experts, router.topk, router.route_scale, config.expert_width) == experts
    assert (a.head_dim, a.o_lora_rank, a.window, a.index_heads, a.index_dim) == (512, 1024, 128, 64, 128)
    assert (config.hash_layers, config.swiglu_limit, config.max_positions) == (3, 10.0, 1048576)
    assert (config.mhc.streams, config.mhc.sinkhorn_iters, config.mhc.eps, config.norm_eps) == (4, 20, 1e-6, 1e-6)
    yarn = config.rope_main.yarn
    assert yarn is not None
    assert (config.rope_main.theta, yarn.factor, yarn.original_length) == (160000.0, 16.0, 65536)
    assert (config.rope_window.theta, config.rope_window.yarn) == (10000.0, None)
    assert (router.num_groups, config.experts.name, config.weights.name) == (1, "mxfp4", "fp8_128x128_ue8m0")


def test_layer_maps_of_v4() -> None:
    flash, pro = v4_flash(), v4_pro()

    def layers(config: V4Config, kind: V4Kind) -> list[int]:
        return [layer for layer in range(config.num_layers + 1) if config.attention.kind(layer) is kind]

    assert layers(flash, V4Kind.SLIDING) == [0, 1, 43]
    assert layers(flash, V4Kind.CSA) == list(range(2, 43, 2))
    assert layers(flash, V4Kind.HCA) == list(range(3, 42, 2))
    assert layers(pro, V4Kind.SLIDING) == [61]
    assert layers(pro, V4Kind.CSA) == list(range(2, 61, 2))
    assert layers(pro, V4Kind.HCA) == [0, 1, *range(3, 60, 2)]
    # U63: the draft block has a schedule of its own, whatever the first layers do
    assert pro.rope(61) == pro.rope_window
    assert pro.rope(0) == pro.rope_main
    assert pro.attn(61).ratio == 0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_found_in_both_spellings(name: str) -> None:
    assert preset(name) == preset(name.replace("_", "-"))
    assert preset(name).name == name


def test_tiny_models_have_every_branch() -> None:
    for config in (tiny_v3(), tiny_v32()):
        assert {config.is_dense(layer) for layer in range(config.num_layers)} == {True, False}
        assert config.router.kept_groups < config.router.num_groups
    flash, pro = tiny_v4_flash(), tiny_v4_pro()
    assert {flash.attention.kind(layer) for layer in range(4)} == set(V4Kind)
    assert (flash.hash_layers, pro.attention.kind(0), pro.attention.kind(1)) == (1, V4Kind.HCA, V4Kind.HCA)
    index = tiny_v32().index
    assert index is not None
    assert index.heads >= 16 <= flash.attention.index_heads
    config = tiny_v41_flash()
    parts = stack_of(
        config,
        cast=CastPoints.RELEASE,
        score_order=ScoreOrder.FP32,
        layout=PageLayout.INTERLEAVED,
        combine=Combine.SINGLE,
    )
    assert len({parts.csa2.topology.mode(layer) for layer in range(6)}) == 4
    # the rows of its tables are those of its hash
    assert hash_layout(config.memory).num_rows == config.engram.table_rows


def test_the_released_stack_of_v41_is_the_one_of_its_attention() -> None:
    chosen = {"cast": CastPoints.FUSED, "score_order": ScoreOrder.BF16_CHAINS, "layout": PageLayout.SECTIONED}
    parts = stack_of(v41_flash(), combine=Combine.SINGLE, **chosen)  # type: ignore[arg-type]
    assert parts.csa2 == v41_flash_csa2(**chosen)  # type: ignore[arg-type]
    assert (parts.ffn.router.num_experts, parts.ffn.router.topk, parts.ffn.swiglu_limit) == (384, 6, 10.0)


def test_a_gated_network_by_hand() -> None:
    w = GatedWeights(w13_im=torch.tensor([[1.0, 0.0], [0.0, 2.0]]), w2_mf=torch.tensor([[1.0], [-1.0]]))
    x = torch.tensor([[3.0, 0.5]])
    silu = 3.0 / (1 + math.exp(-3.0))
    y = gated(x, w, limit=None, dtype=torch.float32, num=SEMANTIC)
    assert y.tolist() == [[pytest.approx(silu), pytest.approx(-silu)]]
    # U50, U85: both halves meet the limit, the gate from above only
    y = gated(torch.tensor([[50.0, -50.0], [-50.0, 1.0]]), w, limit=10.0, dtype=torch.float32, num=SEMANTIC)
    assert y[0, 0].item() == pytest.approx(10 / (1 + math.exp(-10)) * -10)
    assert y[1, 0].item() == pytest.approx(-50 / (1 + math.exp(50)) * 2)


def moe_of(
    seed: int, *, limit: float | None = None, weigh: WeighExperts = WeighExperts.AFTER_DOWN
) -> tuple[MoeWeights, FfnConfig]:
    weights = v3_block(tiny_v3(), 1, rng(seed), torch.float32).ffn
    assert isinstance(weights, MoeWeights)
    return weights, replace(tiny_v3().ffn, swiglu_limit=limit, weigh=weigh)


@ALL_NUMERICS
def test_experts_are_the_sum_over_the_slots_of_a_token(num: Numerics) -> None:
    weights, config = moe_of(3)
    assert isinstance(weights.experts, PlainExperts)
    assert isinstance(weights.shared, GatedWeights)
    x, idx = draw(4, 3, 128), torch.tensor([[0, 5, -1], [7, 0, 2], [-1, -1, -1]])
    share = torch.tensor([[0.5, 2.0, 9.0], [1.0, 1.5, 0.25], [9.0, 9.0, 9.0]])
    got = plain_experts(x, idx, share, weights.experts, weights.shared, config=config, dtype=torch.float32, num=num)
    expected = gated(x, weights.shared, limit=None, dtype=torch.float32, num=SEMANTIC)
    for t, j in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        e = int(idx[t, j])
        own = GatedWeights(w13_im=weights.experts.w13_eim[e], w2_mf=weights.experts.w2_emf[e])
        expected[t] += share[t, j] * gated(x[t : t + 1], own, limit=None, dtype=torch.float32, num=SEMANTIC)[0]
    assert relative(got, expected) < 1e-6


def test_where_the_routing_weight_enters_only_rounds_elsewhere() -> None:
    outputs = {}
    for num in (SEMANTIC, CONTRACT):
        for weigh in WeighExperts:
            weights, config = moe_of(5, weigh=weigh)
            outputs[num.name, weigh] = routed_ffn(
                draw(6, 9, 128, dtype=torch.bfloat16), torch.arange(9), None, weights, config=config, num=num
            )
    before, after = WeighExperts.BEFORE_DOWN, WeighExperts.AFTER_DOWN
    assert relative(outputs["semantic", before], outputs["semantic", after]) < 1e-12
    assert 1e-4 < relative(outputs["contract", before], outputs["contract", after]) < 1e-2


def test_the_norm_of_v32_reads_the_unrounded_sum() -> None:
    config, norm = tiny_v3(), torch.ones(128)
    h, y = draw(7, 5, 128, dtype=torch.bfloat16), draw(8, 5, 128, dtype=torch.bfloat16)
    rounded, unrounded = (v3_enter(h, y, norm, config=replace(config, residual=r)) for r in ResidualNorm)
    assert torch.equal(rounded[0], unrounded[0])  # what passes by is rounded either way
    total = h.double() + y.double()
    exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    assert relative(unrounded[1], exact) < relative(rounded[1], exact)


def test_hash_layers_route_by_token_alone() -> None:
    inputs = draw_v4(V4Case(tokens=6, layer=0), rng(9))
    inputs["token_t"] = torch.tensor([5, 7, 5, 5, 7, 0])
    found: dict[str, Tensor] = {}
    block_v4(**inputs, tap=heard(found))
    experts = found["ffn.experts"]
    assert torch.equal(experts[0], experts[2])
    assert torch.equal(experts[0], experts[3])
    assert torch.equal(experts[1], experts[4])
    assert torch.equal(experts[5], inputs["weights"].ffn.table_vk[0])


def test_quantised_experts_of_v4_are_near_plain_ones() -> None:
    config = tiny_v4_flash()
    inputs = draw_v4(V4Case(tokens=5, layer=1, plain=False), rng(10))
    weights = inputs["weights"]
    plain = weights.ffn
    each = [[quantize(w, fmt=MXFP4) for w in part] for part in (plain.experts.w13_eim, plain.experts.w2_emf)]
    (w13, w13_sf), (w2, w2_sf) = ([torch.stack(x) for x in zip(*part, strict=True)] for part in each)
    s13, s2 = (quantize(w, fmt=FP8_128X128_UE8M0) for w in (plain.shared.w13_im, plain.shared.w2_mf))
    from deeptwin.reference.weights import ExpertWeights

    quantised = replace(
        plain,
        experts=ExpertWeights(w13_q=w13, w13_sf=w13_sf, w2_q=w2, w2_sf=w2_sf),
        shared=ExpertWeights(w13_q=s13[0], w13_sf=s13[1], w2_q=s2[0], w2_sf=s2[1]),
    )
    back = replace(
        plain,
        experts=PlainExperts(
            w13_eim=torch.stack([dequantize(q, s, fmt=MXFP4) for q, s in each[0]]),
            w2_emf=torch.stack([dequantize(q, s, fmt=MXFP4) for q, s in each[1]]),
        ),
        shared=GatedWeights(
            w13_im=dequantize(*s13, fmt=FP8_128X128_UE8M0), w2_mf=dequantize(*s2, fmt=FP8_128X128_UE8M0)
        ),
    )
    outputs = [
        block_v4(**(inputs | {"weights": replace(weights, ffn=ffn), "config": replace(inputs["config"])}))
        for ffn in (quantised, back)
    ]
    # the rows' own quantiser is all that is left between them
    assert 1e-3 < relative(outputs[0], outputs[1]) < 0.05
    assert config.ffn.quantised is not None


def test_taps_are_heard_in_their_order() -> None:
    found: dict[str, Tensor] = {}
    block_v3(**draw_v3(V3Case(tokens=3, model="v32"), rng(11)), tap=under("layers.7.", heard(found)))
    names = ["attn.x", "attn.norm", "attn.scores", "attn.picks", "attn.out", "ffn.x", "ffn.norm", "stream.attn"]
    assert list(found) == [f"layers.7.{n}" for n in [*names, "ffn.logits", "ffn.experts", "ffn.weights", "ffn.out"]]
    found.clear()
    block_v4(**draw_v4(V4Case(tokens=3), rng(12)), tap=heard(found))
    site = ["pre", "post", "comb", "x", "norm"]
    expected = [*(f"attn.{n}" for n in [*site, "scores", "picks", "out"]), "stream.attn"]
    expected += [*(f"ffn.{n}" for n in [*site, "logits", "experts", "weights", "out"]), "stream.ffn"]
    assert list(found) == expected
    found.clear()
    blocks_v41(**v41_inputs(), tap=heard(found))
    assert found["layers.0.engram.stream"].shape == (5, 4, 64)
    assert [n for n in found if n.endswith("picks")] == ["layers.0.attn.picks", "layers.1.attn.picks"]
    ignore("anything", torch.zeros(1))


def v41_inputs() -> dict[str, object]:
    case = V41Case(tokens=5)
    return V41.draw(case, case_rng("block", "blocks_v41", case.id, 0))


def test_the_caches_of_a_sequence_are_left_alone_by_a_run() -> None:
    inputs = v41_inputs()
    sequence = inputs["sequence"]
    before = sequence.caches.page_pq.clone()  # type: ignore[attr-defined]
    first, second = (blocks_v41(**inputs)[0] for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(first, second)
    assert torch.equal(sequence.caches.page_pq, before)  # type: ignore[attr-defined]


def test_experts_of_a_checkpoint_file_may_stand_one_by_one() -> None:
    config = tiny_v3()
    state = v3_state(config, 1, rng(13), torch.float32)
    stacked = V3BlockWeights.from_state_dict(state, prefix="", config=config, layer=1)
    gate_up, down = state.pop("mlp.experts.gate_up_proj"), state.pop("mlp.experts.down_proj")
    for e in range(8):
        gate, up = gate_up[e].chunk(2)
        names = {"gate_proj": gate, "up_proj": up, "down_proj": down[e]}
        state |= {f"mlp.experts.{e}.{name}.weight": w for name, w in names.items()}
    single = V3BlockWeights.from_state_dict(state, prefix="", config=config, layer=1)
    for a, b in zip(
        vars(stacked.ffn)["experts"].__dict__.values(), vars(single.ffn)["experts"].__dict__.values(), strict=True
    ):
        assert torch.equal(a, b)


def test_the_default_gate_passes(judged: Judged) -> None:
    outcomes = [o for o in judged("block") if o.check not in ("golden",)]
    assert [o.id for o in outcomes if o.status is not Status.PASSED] == []
    assert {o.op for o in outcomes} >= {"block_v3", "block_v4", "blocks_v41"}


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_block_of_v4_does_not_see_what_follows(layer: int) -> None:
    inputs = draw_v4(V4Case(tokens=13, layer=layer), rng(14))
    whole = block_v4(**inputs)
    for kept in (1, 3, 4, 8):
        cut = {name: inputs[name][:kept] for name in ("stream_tnm", "token_t")}
        assert torch.equal(block_v4(**(inputs | cut)), whole[:kept])


def test_golden_vectors_match() -> None:
    assert [o.id for o in goldens.verify(CARD) if o.status is not Status.PASSED] == []


# rejected input


def test_sizes_that_cannot_be_are_refused() -> None:
    a, b = tiny_v3(), tiny_v4_flash()
    with pytest.raises(ValueError, match="attention: expected a hidden size of 64, got 128"):
        replace(a, hidden=64)
    with pytest.raises(ValueError, match="dense_layers: expected 0 to 3, got 4"):
        replace(a, dense_layers=4)
    with pytest.raises(ValueError, match="index: expected an indexer, got None"):
        _ = a.dsa
    with pytest.raises(ValueError, match="mla: expected a query latent"):
        replace(tiny_v32(), attention=replace(a.attention, q_lora_rank=0))
    with pytest.raises(ValueError, match="o_groups: expected a divisor of 4 heads, got 3"):
        replace(b.attention, o_groups=3)
    with pytest.raises(ValueError, match=r"compress_ratios: expected 0, 4 or more, got \[2\]"):
        replace(b.attention, compress_ratios=(0, 2, 4, 0, 0))
    with pytest.raises(ValueError, match="attention: expected a ratio for each of 5 blocks, got 4"):
        replace(b, attention=replace(b.attention, compress_ratios=(0, 4, 8, 0)))
    with pytest.raises(ValueError, match=r"attention: expected ratio 0 in drafts, got \(4,\)"):
        replace(b, attention=replace(b.attention, compress_ratios=(0, 4, 8, 4, 4)))
    with pytest.raises(ValueError, match="rope_main: expected 32 channels, got 64"):
        replace(b, rope_window=replace(b.rope_window, rope_dim=32))
    with pytest.raises(ValueError, match="hash_layers: expected 0 to 4, got 9"):
        replace(b, hash_layers=9)
    with pytest.raises(ValueError, match="swiglu_limit: expected a positive number or None, got -1"):
        replace(a.ffn, swiglu_limit=-1.0)
    with pytest.raises(ValueError, match=r"quantised: expected a limit of 3\.0, got 0\.5"):
        replace(b.ffn, swiglu_limit=3.0)


def test_wrong_shapes_are_refused() -> None:
    inputs = draw_v3(V3Case(tokens=3), rng(15))
    with pytest.raises(ValueError, match="y_tm: expected t=3, got t=2"):
        block_v3(**(inputs | {"y_tm": inputs["y_tm"][:2]}))
    with pytest.raises(ValueError, match="h_tm: expected m=128, got m=5"):
        block_v3(**(inputs | {"h_tm": torch.zeros(3, 5)}))
    four = draw_v4(V4Case(tokens=3), rng(16))
    with pytest.raises(ValueError, match="stream_tnm: expected n=4, got n=3"):
        block_v4(**(four | {"stream_tnm": four["stream_tnm"][:, :3]}))
    with pytest.raises(ValueError, match="token_t: expected t=3, got t=2"):
        block_v4(**(four | {"token_t": torch.zeros(2, dtype=torch.int64)}))
    shifted = replace(four["config"], mhc=replace(four["config"].mhc, shifted=True))
    site = MhcSite(fn_wx=torch.zeros(4, 512), scale_z=torch.ones(1), base_w=torch.zeros(4))
    with pytest.raises(ValueError, match="config: expected shifted=False for a head"):
        v4_head(four["stream_tnm"], site, torch.ones(128), config=shifted)


def test_wrong_sequences_of_v41_are_refused() -> None:
    inputs, config = v41_inputs(), v41_config()
    sequence = inputs["sequence"]
    with pytest.raises(ValueError, match="layers: expected 2, got 1"):
        blocks_v41(**(inputs | {"layers": inputs["layers"][:1]}))  # type: ignore[index, arg-type]
    with pytest.raises(ValueError, match="tables: expected 1, got 0"):
        start_v41(sequence.image_t, sequence.row_ltz, (), config=config)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="row_ltz: expected t=5, got t=4"):
        start_v41(sequence.image_t, sequence.row_ltz[:, :4], sequence.tables, config=config)  # type: ignore[attr-defined]
    carry = V41Carry(stream_tnm=torch.zeros(5, 4, 9), pre_tn=torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"carry\.stream_tnm: expected m=64, got m=9"):
        block_v41(carry, inputs["layers"][0], sequence, config=config, layer=0)  # type: ignore[index, arg-type]


def test_wrong_experts_are_refused() -> None:
    weights, config = moe_of(17)
    assert isinstance(weights.experts, PlainExperts)
    assert isinstance(weights.shared, GatedWeights)
    x, idx, share = draw(18, 2, 128), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
    both = (weights.experts, weights.shared)
    with pytest.raises(ValueError, match=r"idx_tk: expected values in \[-1, 8\), got 8"):
        plain_experts(x, idx + 8, share, *both, config=config)
    with pytest.raises(ValueError, match="weights_tk: expected k=3, got k=2"):
        plain_experts(x, idx, share[:, :2], *both, config=config)
    with pytest.raises(TypeError, match=r"idx_tk: expected torch\.int64, got torch\.int32"):
        plain_experts(x, idx.int(), share, *both, config=config)
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        plain_experts(x, idx, share, *both, config=config, dtype=torch.float64)
    with pytest.raises(TypeError, match="x_tm: expected"):
        gated(x.int(), weights.shared, limit=None)
    with pytest.raises(ValueError, match="w_fm: expected m=3, got m=128"):
        gated(x[:, :3], weights.shared, limit=None)
    with pytest.raises(ValueError, match="image_t: expected with an image bias only, got one"):
        routed_ffn(x, torch.arange(2), torch.zeros(2, dtype=torch.bool), weights, config=config)
    with pytest.raises(TypeError, match="x_tm: expected"):
        routed_ffn(x.int(), torch.arange(2), None, weights, config=config)
    with pytest.raises(ValueError, match="bias_e: expected either a bias or a table, got both"):
        replace(weights, table_vk=torch.zeros(9, 3, dtype=torch.int64))
    layer = v41_inputs()["layers"][0]  # type: ignore[index]
    with pytest.raises(ValueError, match="shared: expected plain or quantised weights as for the experts"):
        replace(weights, experts=layer.ffn.experts)
    quantised, none = replace(layer.ffn, bias_vl_e=None), replace(v41_config().ffn, quantised=None)
    with pytest.raises(ValueError, match="config: expected formats for quantised weights, got None"):
        routed_ffn(draw(19, 2, 64), torch.arange(2), None, quantised, config=none)


def test_incomplete_checkpoints_are_refused() -> None:
    config = tiny_v3()
    state = v3_state(config, 1, rng(20), torch.float32)
    for name in ("input_layernorm.weight", "mlp.gate.weight", "mlp.experts.gate_up_proj"):
        with pytest.raises(ValueError, match="state: expected"):
            V3BlockWeights.from_state_dict(
                {k: v for k, v in state.items() if k != name}, prefix="", config=config, layer=1
            )
    with pytest.raises(ValueError, match="state: expected"):
        V4BlockWeights.from_state_dict({}, prefix="layers.0.", config=tiny_v4_flash(), layer=0)
    with pytest.raises(ValueError, match="state: expected"):
        V4BlockWeights.from_transformers({}, prefix="model.layers.0.", config=tiny_v4_flash(), layer=0)
    parts = v41_config()
    with pytest.raises(ValueError, match="state: expected"):
        V41BlockWeights.from_state_dict({}, config=parts.model, csa2=parts.csa2, engram=parts.model.memory, layer=0)
    assert isinstance(parts.model, V41Config)
    assert isinstance(config, V3Config)


def test_a_block_of_v4_under_released_names() -> None:
    """The container takes what transformers' names give, renamed by the table of the spec (10.4)."""
    config = tiny_v4_flash()
    weights = v4_block(config, 0, rng(21))
    from deeptwin.reference.v4_weights import checkpoint_names

    state: dict[str, Tensor] = {}
    for field, name in checkpoint_names(0).items():
        value = None if "." in field else getattr(weights.attention, field)
        state |= {} if value is None else {f"layers.0.attn.{name}": value}
    for site, owner in (("hc_attn_", weights.attn_site), ("hc_ffn_", weights.ffn_site)):
        state |= {
            f"layers.0.{site}{n}": x for n, x in (("fn", owner.fn_wx), ("scale", owner.scale_z), ("base", owner.base_w))
        }
    state |= {"layers.0.attn_norm.weight": weights.attn_norm_m, "layers.0.ffn_norm.weight": weights.ffn_norm_m}
    ffn = weights.ffn
    assert isinstance(ffn.experts, PlainExperts)
    assert isinstance(ffn.shared, GatedWeights)
    assert ffn.table_vk is not None
    state |= {"layers.0.ffn.gate.weight": ffn.gate_em, "layers.0.ffn.gate.tid2eid": ffn.table_vk}
    each = [(f"experts.{e}.", ffn.experts.w13_eim[e], ffn.experts.w2_emf[e]) for e in range(8)]
    for name, w13, w2 in (*each, ("shared_experts.", ffn.shared.w13_im, ffn.shared.w2_mf)):
        w1, w3 = w13.chunk(2)
        state |= {f"layers.0.ffn.{name}{n}.weight": w for n, w in (("w1", w1), ("w2", w2), ("w3", w3))}
    released = V4BlockWeights.from_state_dict(state, prefix="layers.0.", config=config, layer=0)
    x, token, table = draw(22, 4, 4, 128, dtype=torch.bfloat16), torch.arange(4), table_of(config.rope(0), 4)
    a, b = (block_v4(x, token, w, table, config=config, layer=0) for w in (weights, released))
    assert torch.equal(a, b)
    state["layers.0.ffn.experts.3.w2.weight"] = torch.zeros(5, 5)
    with pytest.raises(ValueError, match="state: expected"):
        V4BlockWeights.from_state_dict(state, prefix="layers.0.", config=config, layer=0)


def test_embedding_refuses() -> None:
    table = draw(23, 5, 3)
    assert torch.equal(embedding("next_t", torch.tensor([4, 0]), table, num=SEMANTIC), table[[4, 0]].double())
    for bad in (torch.tensor([5]), torch.tensor([-1]), torch.zeros(1, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="next_t: expected"):
            embedding("next_t", bad, table)
    with pytest.raises(TypeError, match="next_t: expected"):
        embedding("next_t", torch.zeros(2), table)
