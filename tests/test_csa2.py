"""CSA2: the layer map and its rules, laws of the stack, then what both sides refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.attention_v41 import csa2_attention_triton_
from deeptwin.optimized.csa2 import csa2_output_triton, csa2_project_triton, csa2_run_triton
from deeptwin.parity import goldens
from deeptwin.parity.card import Output, load_card
from deeptwin.parity.cards.csa2 import RunCase, SideCase, draw_output, draw_project, draw_run
from deeptwin.parity.oracles import OracleSet
from deeptwin.reference import csa2
from deeptwin.reference.cache_plan import bytes_per_token, page_bytes, page_pieces, state_bytes, state_pieces
from deeptwin.reference.config import PageLayout, ScoreOrder, Truncation
from deeptwin.reference.csa2 import csa2_attention_, csa2_output, csa2_project, csa2_run, csa2_step_
from deeptwin.reference.csa2_config import CastPoints, v41_flash_csa2
from deeptwin.reference.csa2_layer import csa2_attend_, csa2_compress_, csa2_select
from deeptwin.reference.csa2_state import Csa2Batch, Csa2Caches, Csa2Step
from deeptwin.reference.rope import rope_frequencies, rope_table
from deeptwin.reference.topology import RULES, TINY_TOPOLOGY, V41_TOPOLOGY, LayerMode, Topology
from deeptwin.reference.weights import Csa2Weights

CARD = load_card("csa2")


def drawn(case: RunCase, seed: int = 1) -> dict[str, Any]:
    return draw_run(case, np.random.Generator(np.random.Philox(seed)))


def run(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return csa2_run(**inputs)


def v41() -> Any:
    return v41_flash_csa2(cast=CastPoints.RELEASE, score_order=ScoreOrder.BF16_CHAINS, layout=PageLayout.INTERLEAVED)


# properties of the reference


def test_the_released_layer_map() -> None:
    """v41-attention.md section 1.2: mode, owner of keys, source of the picks, candidates."""
    rows = [(2, 8, 2), (8, 14, 8), (14, 20, 14), (20, 24, 20), (24, 28, 24), (28, 32, 28), (32, 36, 32), (36, 40, 36)]
    for first, end, source in rows:
        owner = min(source, 20)
        for layer in range(first, end):
            kind = LayerMode.FULL if source <= 20 else LayerMode.REINDEX
            assert V41_TOPOLOGY.mode(layer) is (kind if layer == first else LayerMode.REUSE)
            assert V41_TOPOLOGY.kv_source(layer) == owner
            assert V41_TOPOLOGY.index_source(layer) == source
            assert V41_TOPOLOGY.reads_candidates(layer) == (layer in (24, 28, 32, 36))
    assert all(V41_TOPOLOGY.mode(layer) is LayerMode.SWA for layer in (0, 1, 40, 41, 42))
    modes = [V41_TOPOLOGY.mode(layer) for layer in range(40)]
    assert [modes.count(m) for m in (LayerMode.FULL, LayerMode.REINDEX, LayerMode.REUSE, LayerMode.SWA)] == [
        4,
        4,
        30,
        2,
    ]
    assert V41_TOPOLOGY.boundary == 20
    assert len(V41_TOPOLOGY.ratios) == 43


def test_890_bytes_come_out_of_the_configuration() -> None:
    plan = v41().plan
    assert bytes_per_token(plan) == 890
    assert page_bytes(plan) == 114048
    assert state_bytes(plan) == 3128928
    offsets = [(p.name, p.layer, p.offset, p.size) for p in page_pieces(plan)]
    assert offsets[:3] == [("index", 2, 0, 4352), ("main", 2, 4352, 18432), ("index", 8, 22784, 4352)]
    assert offsets[-1] == ("main", 20, 77056, 36864)


BROKEN: dict[str, dict[str, Any]] = {
    "ratios are 0, 1 or 2": {"ratios": (0, 4, 4, 1, 1, 1)},
    "sources are distinct and ascending": {"index_sources": (1, 5, 3)},
    "draft layers never share": {"draft_layers": 1},
    "a source is a compressed layer": {"kv_sources": (0, 1, 3)},
    "every compressed layer has a source before it": {"kv_sources": (3,)},
    "segments are contiguous": {"ratios": (0, 2, 0, 2, 1, 1), "kv_sources": (1, 4), "index_k_sources": (1, 4)},
    "the decoder owns its keys": {"kv_sources": (1, 4), "index_k_sources": (1, 4), "index_sources": (1, 4, 5)},
    "source and consumer have one ratio": {"ratios": (0, 2, 2, 1, 2, 1)},
    "a selection is refined inside one set of keys": {
        "ratios": (0, 2, 2, 2, 1, 1),
        "kv_sources": (1, 3, 4),
        "index_k_sources": (1, 3, 4),
        "index_sources": (1, 4, 5),
        "candidate_source": 4,
    },
    "index keys come from a compressor": {"index_k_sources": (1, 3, 5)},
    "the candidate source is an index source": {"candidate_source": 4},
    "candidate blocks are a multiple of 8 up to 4096": {"candidate_blocks": 4104},
    "a candidate block has 8 or 16 entries": {"candidate_size": 4},
    "candidates cover the selection": {"index_topk": 58},
    "a candidate consumer has up to 32 heads of 128 channels": {"index_heads": 64},
    "candidates have the ratio of their consumers": {"candidate_source": 1},
}


def test_every_rule_has_a_map_that_breaks_it() -> None:
    assert set(BROKEN) == {name for name, _, _ in RULES}
    assert replace(TINY_TOPOLOGY, candidate_blocks=16) != TINY_TOPOLOGY  # the tiny map itself breaks none


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule: str) -> None:
    with pytest.raises(ValueError, match=rf"^\w+: breaks the rule '{rule}'"):
        replace(TINY_TOPOLOGY, **BROKEN[rule])


def test_published_maps_shifted_by_one_are_refused() -> None:
    """A kv source that is no index source, index keys inside a segment of picks, a shifted decoder boundary."""
    released = {f: getattr(V41_TOPOLOGY, f) for f in V41_TOPOLOGY.__dataclass_fields__}
    shifted = (0,) * 2 + (2,) * 19 + (1,) * 19 + (0,) * 3
    for change in (
        {"index_sources": (2, 14, 20, 24, 28, 32, 36)},
        {"index_k_sources": (2, 8, 14, 20, 22)},
        {"ratios": shifted},
    ):
        with pytest.raises(ValueError, match="breaks the rule"):
            Topology(**released | change)


@pytest.mark.parametrize("layout", ["interleaved", "sectioned"])
def test_any_cut_into_steps_leaves_the_same_bytes(layout: str) -> None:
    """One shot, chunks of any size, token by token, mixed: outputs, pages and states (free selection)."""
    inputs = drawn(RunCase(config="tiny", lengths=(21,), layout=layout, free=True))
    whole = run(inputs)
    sizes = {"interleaved": [(5, False), (1, True)], "sectioned": [(7, False), (6, True)]}[layout]
    for size, decode in sizes:
        counts = [[min(size, 21 - i)] for i in range(0, 21, size)]
        steps = replace(
            inputs["batch"],
            counts_kb=torch.tensor(counts, dtype=torch.int32),
            decode_k=torch.full((len(counts),), decode),
        )
        for a, b in zip(run(inputs | {"batch": steps}), whole, strict=True):
            assert torch.equal(a, b)


def test_the_released_stack_in_any_steps() -> None:
    """40 layers of the released map over narrow rows: a chunk and a decode step leave what one shot leaves."""
    inputs = drawn(RunCase(config="released", lengths=(4,), free=True))
    assert len(inputs["layers"]) == 40
    steps = replace(
        inputs["batch"], counts_kb=torch.tensor([[3], [1]], dtype=torch.int32), decode_k=torch.tensor([False, True])
    )
    whole = run(inputs)
    assert torch.isfinite(whole[0]).all()
    for a, b in zip(run(inputs | {"batch": steps}), whole, strict=True):
        assert torch.equal(a, b)


def test_a_reuse_layer_is_the_same_at_every_place_of_its_segment() -> None:
    """Given the same queries, keys and picks; a layer of the next segment reads other entries."""
    inputs = drawn(RunCase(config="released", lengths=(6,)))
    h, layers, caches, batch, _, config = inputs.values()
    step, row_t = next(iter(batch.steps()))
    csa2_step_(h[row_t].double(), layers[:3], caches, step, None, config=config)
    rng = np.random.Generator(np.random.Philox(5))
    q_thd = torch.from_numpy(rng.standard_normal((6, config.num_heads, config.head_dim)))
    key_td = torch.from_numpy(rng.standard_normal((6, config.head_dim)))
    picks = torch.tensor([[0, -1]] * 6, dtype=torch.int32)
    picks[0] = -1  # the first token completes no entry

    def attended(layer: int) -> Tensor:
        own = replace(caches, state_sq=caches.state_sq.clone())
        sink = layers[3].sink_h
        return csa2_attend_(q_thd, key_td, sink, picks, own, step, layer=layer, config=config)

    assert torch.equal(attended(3), attended(7))
    assert not torch.equal(attended(3), attended(9))


def test_both_arrangements_of_records_mean_the_same() -> None:
    case = RunCase(config="micro", lengths=(9,), schedule="mixed")
    first, second = (run(drawn(replace(case, layout=layout)))[0] for layout in ("interleaved", "sectioned"))
    assert torch.equal(first, second)


def test_shared_picks_are_what_a_layer_would_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing = recomputation: the picks of a free run, given to every layer from outside, change nothing."""
    inputs = drawn(RunCase(config="tiny", lengths=(70,), free=True))
    found: list[Tensor] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = csa2_select(*args, **kwargs)
        found.append(result[0])
        return result

    monkeypatch.setattr(csa2, "csa2_select", watched)
    free = run(inputs)
    forced = run(inputs | {"picks_ltk": torch.stack(found)})
    assert len(found) == 3
    assert (found[1] != found[2]).any()  # a REINDEX layer picks for itself
    for a, b in zip(free, forced, strict=True):
        assert torch.equal(a, b)


def test_a_segment_does_not_read_another_ones_caches() -> None:
    inputs = drawn(RunCase(config="tiny", lengths=(18,), free=True))
    h, layers, caches, batch, _, config = inputs.values()
    (prefill, row_t) = next(iter(batch.steps()))
    csa2_step_(h[row_t].double(), layers, caches, prefill, None, config=config)
    first, end = torch.tensor([18], dtype=torch.int32), torch.tensor([19], dtype=torch.int32)
    step = replace(
        prefill,
        positions_t=torch.tensor([17], dtype=torch.int32),
        seq_t=torch.zeros(1, dtype=torch.int32),
        first_b=first - 1,
        end_b=end - 1,
        decode=True,
    )

    def encoder(spoiled_owner: int | None) -> Tensor:
        own = replace(caches, page_pq=caches.page_pq.clone(), state_sq=caches.state_sq.clone())
        if spoiled_owner is not None:
            own.records(config, "main", spoiled_owner)[:] = 0x55
            own.records(config, "index", spoiled_owner)[:] = 0x22
        return csa2_step_(h[17:18].double(), layers[:3], own, step, None, config=config)[0]

    assert torch.equal(encoder(3), encoder(None))
    assert not torch.equal(encoder(1), encoder(None))


@pytest.mark.parametrize("keep", [10, 14])
def test_truncation_is_exact_from_its_boundary_on(keep: int) -> None:
    """Three decoder layers of a window of 4: rows from N - K + 9 on are exact, the one before is not."""
    inputs = drawn(RunCase(config="tiny", lengths=(31,)))
    exact = run(inputs)
    masked = run(inputs | {"config": replace(inputs["config"], truncation=Truncation.MASK, keep=keep)})
    edge = 31 - keep + 9
    assert torch.equal(masked[0][edge:], exact[0][edge:])
    assert not torch.equal(masked[0][edge - 1], exact[0][edge - 1])
    assert torch.equal(masked[1], exact[1])  # the pages of the decoder's owner are made of encoder output


def test_truncation_that_keeps_everything_changes_nothing() -> None:
    inputs = drawn(RunCase(lengths=(12,)))
    exact = run(inputs)
    for mode in (Truncation.MASK, Truncation.COMPACT):
        same = run(inputs | {"config": replace(inputs["config"], truncation=mode, keep=12)})
        assert all(torch.equal(a, b) for a, b in zip(same, exact, strict=True))


def test_rejected_tokens_leave_no_trace() -> None:
    """U32: steps of six tokens of which some are taken back equal the accepted tokens one after the other."""
    inputs = drawn(RunCase(config="tiny", lengths=(14,), free=True))
    h, layers, caches, batch, _, config = inputs.values()
    prefill, _ = next(iter(batch.steps()))
    draft = h.flip(0)

    def advance(own: Csa2Caches, first: int, rows: Tensor) -> Tensor:
        n = len(rows)
        one = torch.tensor([first], dtype=torch.int32)
        step = replace(
            prefill,
            positions_t=torch.arange(first, first + n, dtype=torch.int32),
            seq_t=torch.zeros(n, dtype=torch.int32),
            first_b=one,
            end_b=one + n,
            known_b=one,
            decode=True,
        )
        return csa2_step_(rows.double(), layers, own, step, None, config=config)[0]

    def fresh() -> Csa2Caches:
        return replace(caches, page_pq=caches.page_pq.clone(), state_sq=caches.state_sq.clone())

    serial, verified = fresh(), fresh()
    outputs = [advance(serial, p, h[p : p + 1]) for p in range(8)]
    got, first = [], 0
    for accepted in (1, 3, 2, 2):
        tail = draft[first + accepted : first + 6]
        rows = torch.cat([h[first : first + accepted], tail])[: 14 - first]
        got.append(advance(verified, first, rows)[:accepted])
        first += accepted
    assert torch.equal(torch.cat(got), torch.cat(outputs))


def test_one_layer_of_the_released_sizes() -> None:
    """V4.1-Flash as it is: 5120 wide, 64 heads of 512, ratio 2; two tokens, then one."""
    one = replace(
        V41_TOPOLOGY,
        ratios=(2,),
        draft_layers=0,
        kv_sources=(0,),
        index_sources=(0,),
        index_k_sources=(0,),
        candidate_source=None,
    )
    config = replace(v41(), topology=one)
    rng = np.random.Generator(np.random.Philox(3))

    def fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8) & 0xB7  # up to 0.94
        scale = 127 - int(np.log2(columns) / 2)
        sf = torch.full((rows // 32, columns // 32), scale, dtype=torch.uint8)
        return torch.from_numpy(codes).view(torch.float8_e4m3fn), sf

    def bf16(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)).bfloat16()

    pairs = {
        "wq_a": fp8(1280, 5120),
        "wq_b": fp8(32768, 1280),
        "wkv": fp8(512, 5120),
        "wo_a": fp8(8192, 4096),
        "wo_b": fp8(5120, 8192),
        "index_wq": fp8(4096, 1280),
    }
    weights = Csa2Weights(
        **{f"{k}_q": v[0] for k, v in pairs.items()},
        **{f"{k}_sf": v[1] for k, v in pairs.items()},
        attn_norm_m=torch.ones(5120).bfloat16(),
        q_norm_a=torch.ones(1280).bfloat16(),
        kv_norm_d=torch.ones(512).bfloat16(),
        sink_h=torch.zeros(64),
        entry_value_dm=bf16(512, 5120, scale=5120**-0.5),
        entry_gate_dm=bf16(512, 5120, scale=5120**-0.5),
        entry_norm_d=torch.ones(512).bfloat16(),
        index_wk=bf16(128, 512, scale=512**-0.5),
        index_norm=torch.ones(128).bfloat16(),
        index_head_hm=bf16(32, 5120, scale=5120**-0.5),
    )
    table = rope_table(torch.arange(3), rope_frequencies(config.rope_main))
    caches = Csa2Caches(
        page_pq=torch.full((1, page_bytes(config.plan)), 255, dtype=torch.uint8),
        state_sq=torch.full((1, state_bytes(config.plan)), 255, dtype=torch.uint8),
        window_table=table,
        main_table=table,
    )
    zero = torch.zeros(1, dtype=torch.int32)
    batch = Csa2Batch(
        counts_kb=torch.tensor([[2], [1]], dtype=torch.int32),
        decode_k=torch.tensor([False, True]),
        start_b=zero,
        valid_b=zero,
        state_b=zero,
        table_bp=zero[None],
    )
    out, pages, _ = csa2_run(bf16(3, 5120), (weights,), caches, batch, None, config=config)
    assert out.isfinite().all()
    main = replace(caches, page_pq=pages).records(config, "main", 0)
    assert [(main[0, i] != 255).any().item() for i in range(3)] == [True, False, False]  # three tokens, one entry


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("csa2") == []


# batch invariance


def test_every_candidate_is_invariant_under_steps(judged) -> None:
    assert judged.without("csa2", "chunk_invariant") == []


def test_caches_are_judged_by_slot_and_value() -> None:
    """Honest bytes pass; a moved record, an untouched one, a NaN, another scale or a byte of padding fails."""
    op = CARD.op("csa2_run")
    oracles = OracleSet(op, drawn(RunCase(config="mono", lengths=(9,))))
    pages, states = (next(o for o in op.outputs if o.name == name) for name in ("page_pq", "state_sq"))
    plan = oracles.inputs["config"].plan
    main = next(p for p in page_pieces(plan) if p.name == "main")
    ring = next(p for p in state_pieces(plan) if p.name == "ring")

    def ok(output: Output, spoil: Callable[[Tensor], None], honest: str = "rival") -> bool:
        got = getattr(oracles, honest)[output.name].clone()
        spoil(got)
        return output.rule.judge(got, oracles.of(output)).ok

    written = int((oracles.contract["page_pq"][:, main.offset] != 255).nonzero()[0])
    owner = int((oracles.contract["state_sq"][:, ring.offset] != 255).nonzero()[0])
    record, row = slice(main.offset, main.offset + 288), slice(ring.offset, ring.offset + 528)
    for honest in ("rival", "contract"):
        assert ok(pages, lambda x: None, honest)
        assert ok(states, lambda x: None, honest)

    def moved(x: Tensor) -> None:
        x[:, ring.offset : ring.offset + ring.size] = x[:, ring.offset : ring.offset + ring.size].roll(528, 1)

    assert not ok(states, moved)
    assert not ok(states, lambda x: x[owner, row].fill_(255))
    assert not ok(states, lambda x: x[owner, ring.offset : ring.offset + 1].fill_(0x7F))
    assert not ok(states, lambda x: x[owner, row][512:].add_(1))
    assert not ok(pages, lambda x: x[written, record][256:].add_(8))
    assert not ok(pages, lambda x: x[written, record].fill_(255))
    assert not ok(pages, lambda x: x[:, -1:].fill_(0))


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def side(draw: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return draw(SideCase(tokens=2), np.random.Generator(np.random.Philox(5)))


def test_sides_refuse_other_shapes() -> None:
    rows = side(draw_project)
    for project in (csa2_project, csa2_project_triton):
        with pytest.raises(ValueError, match=r"^x_tm: "):
            project(**rows | {"x_tm": rows["x_tm"][:, :-1]})
    heads = side(draw_output)
    for output in (csa2_output, csa2_output_triton):
        with pytest.raises(ValueError, match=r"^out_thd: "):
            output(**heads | {"out_thd": heads["out_thd"][:, :1]})


def test_runs_refuse_other_layers_and_steps() -> None:
    inputs = drawn(RunCase(lengths=(5,)))
    batch = inputs["batch"]
    long = replace(batch, counts_kb=torch.tensor([[7]], dtype=torch.int32), decode_k=torch.tensor([True]))
    bad: list[tuple[str, dict[str, Any]]] = [
        ("h_tm", {"h_tm": inputs["h_tm"][:, :-1]}),
        ("layers", {"layers": inputs["layers"][:-1]}),
        ("batch", {"h_tm": inputs["h_tm"][:-1]}),
        ("batch", {"h_tm": inputs["h_tm"].repeat(2, 1)[:7], "batch": long}),
    ]
    for name, change in bad:
        for function in (csa2_run, csa2_run_triton):
            with pytest.raises(ValueError, match=f"^{name}: "):
                function(**inputs | change)


def test_stages_refuse_layers_that_own_nothing_and_other_rows() -> None:
    inputs = drawn(RunCase(lengths=(5,), config="tiny"))
    step, _ = next(iter(inputs["batch"].steps()))
    for attention in (csa2_attention_, csa2_attention_triton_):
        with pytest.raises(ValueError, match=r"^x_tm: expected t=5"):
            attention(
                torch.zeros(4, 96, dtype=torch.bfloat16),
                inputs["layers"][0],
                inputs["caches"],
                step,
                (None, None),
                None,
                layer=0,
                config=inputs["config"],
            )
    reuse, config, caches = inputs["layers"][2], inputs["config"], inputs["caches"]
    x = torch.zeros(5, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^weights: expected entry_value_dm"):
        csa2_compress_(x, reuse, caches, step, layer=2, config=config)
    latent = torch.zeros(5, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^weights: expected index_wq_q"):
        csa2_select(x, latent, reuse, caches, step, None, layer=2, config=config)
    with pytest.raises(ValueError, match=r"^x_td: "):
        csa2_attend_(
            torch.zeros(5, 4, 512), torch.zeros(5, 500), reuse.sink_h, None, caches, step, layer=0, config=config
        )


def test_checkpoints_have_to_fit_the_layer() -> None:
    config = drawn(RunCase(lengths=(5,)))["config"]
    with pytest.raises(ValueError, match=r"^state: expected layers.0.attn_norm.weight \(32,\), got None"):
        Csa2Weights.from_state_dict({}, layer=0, config=config)


@pytest.mark.parametrize(
    "change", [{"hidden": 0}, {"o_groups": 3}, {"truncation": Truncation.MASK, "keep": 9}], ids=lambda c: next(iter(c))
)
def test_configurations_are_checked(change: dict[str, Any]) -> None:
    config = drawn(RunCase(lengths=(1,)))["config"]
    name = "keep" if "keep" in change else next(iter(change))
    with pytest.raises(ValueError, match=f"^{name}: "):
        replace(config, **change)


def test_a_step_knows_its_rows() -> None:
    step = next(iter(drawn(RunCase(lengths=(4, 3)))["batch"].steps()))[0]
    assert isinstance(step, Csa2Step)
    assert step.cu_seqlens.tolist() == [0, 4, 7]
    assert step.offset_b.tolist() == [0, 4]
