"""Drafting: where a block stands, what it sees, the heads, and a whole draft forward on narrow layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.dspark import (
    confidence_triton,
    draft_hidden_triton,
    draft_rows_triton,
    main_keys_triton,
    markov_step_triton,
    target_features_triton,
)
from deeptwin.parity import goldens
from deeptwin.parity.card import case_rng, load_card
from deeptwin.parity.cards.dspark import (
    BlockCase,
    FeatureCase,
    ForwardCase,
    HeadCase,
    draw_forward,
    draw_head,
    draw_keys,
    draw_rows,
)
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.reference.config import KV_FP8, MHC_V4, DraftBlock, Draw, SlidingWindow
from deeptwin.reference.dspark import (
    confidence,
    draft_hidden,
    draft_rows,
    head_temperatures,
    main_keys,
    markov_step,
    target_features,
)
from deeptwin.reference.dspark_chain import draft_block, draft_chain
from deeptwin.reference.dspark_state import DraftHead, DraftModel, DraftRequests
from deeptwin.reference.kv_cache import pack_records
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC

Judged = Callable[[str], list[Outcome]]
ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
BLOCK = DraftBlock(draft=3, noise_token=99, window=SlidingWindow(window=4, ring=8))
RELEASED = DraftBlock(draft=5, noise_token=128799, window=SlidingWindow(window=128, ring=134))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bf16(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def drawn(draw, op: str, case):
    return draw(case, case_rng("dspark", op, case.id, 0))


# properties of the reference


def test_the_block_stands_behind_the_newest_key() -> None:
    """runtime.md section 1.1: first row at 3, two accepted: a = 5, and draft i sits at position 5 + i."""
    ids, positions, slots, seen = draft_rows(ints(7), ints(3), ints(2), ints(1), ints(0), block=BLOCK)
    assert ids.tolist() == [[7, 99, 99]]
    assert positions.tolist() == [[6, 7, 8]]
    assert slots.tolist() == [[14, 15, 8]]
    assert seen[0, :8].tolist() == [10, 11, 12, 13, 14, 15, 8, -1]  # positions 2 … 5, then the block
    assert seen.shape == (1, 64)


def test_the_released_block_sees_133_of_192_slots() -> None:
    _, positions, _, seen = draft_rows(ints(1), ints(1000), ints(0), ints(0), ints(0), block=RELEASED)
    assert seen.shape == (1, 192)
    assert (seen >= 0).sum() == 133
    assert seen[0, :133].sort().values.unique().numel() == 133
    assert positions.tolist() == [[1001, 1002, 1003, 1004, 1005]]


def test_the_block_at_the_start_of_a_sequence() -> None:
    """One committed token: its key and the block's are all there is."""
    _, positions, _, seen = draft_rows(ints(1), ints(0), ints(0), ints(0), ints(0), block=RELEASED)
    assert positions[0].tolist() == [1, 2, 3, 4, 5]
    assert seen[0, :7].tolist() == [0, 1, 2, 3, 4, 5, -1]


def test_padding_requests_touch_nothing() -> None:
    ids, positions, slots, seen = draft_rows(ints(5), ints(-1), ints(77), ints(3), ints(0), block=BLOCK)
    assert ids.tolist() == [[99, 99, 99]]
    assert positions.tolist() == [[0, 0, 0]]
    assert slots.tolist() == [[-1, -1, -1]]
    assert (seen == -1).all()


def test_a_rejected_slot_is_written_before_it_is_read() -> None:
    """Whatever was accepted, the slots of the new block cover every position the last step wrote beyond it."""
    for accepted in range(6):
        _, _, slots, seen = draft_rows(ints(1), ints(500), ints(accepted), ints(0), ints(0), block=RELEASED)
        written_by_main = {(500 + j) % 134 for j in range(accepted + 1, 6)}
        assert written_by_main & set(seen[0].tolist()) <= set(slots[0].tolist())


@ALL_NUMERICS
def test_features_are_means_side_by_side(num) -> None:
    first, second = bf16([[[1.0], [2.0], [3.0], [4.0]]]), bf16([[[8.0], [8.0], [8.0], [9.0]]])
    assert target_features((first, second), num=num).tolist() == [[2.5, 8.25]]


@ALL_NUMERICS
def test_keys_turn_with_the_position_of_their_token(num) -> None:
    """The same features at two positions: only the last 64 channels differ, and their length is the same."""
    inputs = drawn(draw_keys, "main_keys", FeatureCase(tokens=2))
    inputs["features_tz"] = inputs["features_tz"][:1].repeat(2, 1)
    inputs["positions_t"] = ints(0, 17)
    keys = main_keys(**inputs, num=num)
    assert keys.shape == (2, 3, 128)
    assert torch.equal(keys[0, :, :64], keys[1, :, :64])
    length = keys[..., 64:].double().square().sum(-1)
    assert torch.allclose(length[0], length[1], rtol=1e-2)
    assert not torch.equal(keys[0, :, 64:], keys[1, :, 64:])


@ALL_NUMERICS
def test_the_markov_step_by_hand(num) -> None:
    w1, w2 = bf16([[1.0, 2.0], [3.0, -1.0]]), bf16([[0.5, 0.25], [2.0, 1.0]])
    logits = markov_step(torch.tensor([[10.0, 20.0]]), ints(1), w1, w2, num=num)
    assert logits.tolist() == [[10 + 1.25, 20 + 5.0]]


@ALL_NUMERICS
def test_the_confidence_by_hand(num) -> None:
    h, w1, w = bf16([[1.0, 2.0]]), bf16([[4.0], [8.0]]), bf16([1.0, 0.5, 0.25])

    def at(temperature: float, token: int = 1) -> float:
        return confidence(h, ints(token), w1, w, temperature=temperature, num=num).item()

    assert at(1.0) == pytest.approx(1 / (1 + math.exp(-4)), rel=1e-6)
    assert at(2.0) == pytest.approx(1 / (1 + math.exp(-2)), rel=1e-6)
    assert at(1.0, token=0) == pytest.approx(1 / (1 + math.exp(-3)), rel=1e-6)
    assert at(0.0) == pytest.approx(1.0)  # 1e-5, then the limit of 60
    down = confidence(-h, ints(1), -w1, w, temperature=1e-9, num=num).item()
    assert down == pytest.approx(8.7565e-27, rel=1e-4)


def test_temperatures_of_the_head() -> None:
    assert head_temperatures("0.75", draft=3) == (0.75,) * 3
    assert head_temperatures("1,2,0.5", draft=3) == (1.0, 2.0, 0.5)
    for text in ("1,2", "", "1,2,3,4", "one"):
        with pytest.raises(ValueError, match="text: expected"):
            head_temperatures(text, draft=3)


FORWARD = ForwardCase(requests=2)


def test_rows_of_a_block_see_each_other() -> None:
    """Bidirectional: a later input moves the first row of its own request, and no row of another."""
    inputs = drawn(draw_forward, "draft_hidden", FORWARD)
    changed = inputs | {"embed_bjm": inputs["embed_bjm"].clone()}
    changed["embed_bjm"][0, -1] += 4
    moved = (draft_hidden(**inputs, num=SEMANTIC) != draft_hidden(**changed, num=SEMANTIC)).any(-1)
    assert moved.tolist() == [[True, True, True], [False, False, False]]


def test_what_the_last_block_left_in_the_ring_does_not_count() -> None:
    inputs = drawn(draw_forward, "draft_hidden", FORWARD)
    rings = tuple(ring.clone() for ring in inputs["rings"])
    used = inputs["slots_bj"].flatten().long()
    for ring in rings:
        ring.view(-1, KV_FP8.record_bytes)[used] = pack_records(torch.full((len(used), 512), 7.0), fmt=KV_FP8)
    assert torch.equal(draft_hidden(**inputs), draft_hidden(**inputs | {"rings": rings}))
    assert all(
        torch.equal(a, b)
        for a, b in zip(inputs["rings"], drawn(draw_forward, "draft_hidden", FORWARD)["rings"], strict=True)
    )


def test_accepted_keys_count() -> None:
    inputs = drawn(draw_forward, "draft_hidden", FORWARD)
    seen, own = set(inputs["seen_bk"][0].tolist()) - {-1}, set(inputs["slots_bj"][0].tolist())
    slot = min(seen - own)
    rings = tuple(ring.clone() for ring in inputs["rings"])
    rings[0].view(-1, KV_FP8.record_bytes)[slot] = pack_records(torch.full((1, 512), 7.0), fmt=KV_FP8)[0]
    moved = draft_hidden(**inputs) != draft_hidden(**inputs | {"rings": rings})
    assert moved[0].any()
    assert not moved[1].any()


def model_of(inputs: dict, vocab: int = 48, rank: int = 32) -> DraftModel:
    rng = np.random.Generator(np.random.Philox(4))
    m, j = inputs["embed_bjm"].shape[2], inputs["embed_bjm"].shape[1]

    def table(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * scale).to(torch.bfloat16)

    head = DraftHead(
        norm_m=table(m) * 0 + 1,
        head_vm=table(vocab, m, scale=m**-0.5),
        w1_vr=table(vocab, rank),
        w2_vr=table(vocab, rank, scale=rank**-0.5),
        confidence_x=table(m + rank, scale=(m + rank) ** -0.5),
        temperatures=(1.0,) * j,
    )
    window = SlidingWindow(window=4, ring=inputs["rings"][0].shape[1])
    return DraftModel(
        embed_vm=table(vocab, m),
        layers=inputs["layers"],
        head=head,
        config=inputs["config"],
        block=DraftBlock(draft=j, noise_token=vocab - 2, window=window),
    )


def requests_of(case: ForwardCase, golden: int, *, temperature: float = 1.0, top_k: int = -1) -> DraftRequests:
    block = BlockCase(requests=case.requests, draft=case.draft, window=4, padding=case.padding)
    rows = draw_rows(block, case_rng("dspark", "draft_hidden", case.id, 0))
    b = case.requests
    return DraftRequests(
        golden_b=torch.full((b,), golden),
        **{name: rows[name] for name in ("first_b", "accepted_b", "state_b", "valid_b")},
        temperature_b=torch.full((b,), temperature),
        top_p_b=torch.ones(b),
        top_k_b=torch.full((b,), top_k),
        seed_b=torch.arange(b) + 5,
    )


def drafted(golden: int, draw: Draw = Draw.NVIDIA, **how: object) -> tuple[Tensor, Tensor, Tensor]:
    inputs = drawn(draw_forward, "draft_hidden", FORWARD)
    model = model_of(inputs, vocab=64)
    requests = requests_of(FORWARD, golden, **how)  # type: ignore[arg-type]
    return draft_block(requests, inputs["rings"], inputs["table_sr"], model=model, draw=draw)


@pytest.mark.parametrize("draw", list(Draw))
def test_one_whole_draft(draw: Draw) -> None:
    """γ inputs give γ drafts, each one that its distribution can draw; the same streams give the same block."""
    token, logprob, rate = drafted(3, draw)
    assert token.shape == rate.shape == (2, 3)
    assert logprob.shape == (2, 3, 64)
    assert torch.allclose(logprob.double().exp().sum(2), torch.ones(2, 3, dtype=torch.float64), atol=1e-5)
    assert (logprob.gather(2, token[..., None]) > -math.log(2**31)).all()
    assert ((rate > 0) & (rate < 1)).all()
    again = drafted(3, draw)
    assert all(torch.equal(x, y) for x, y in zip((token, logprob, rate), again, strict=True))


def test_the_filters_of_the_target_hold_for_drafts() -> None:
    token, logprob, _ = drafted(3, top_k=2)
    assert ((logprob > -torch.inf).sum(2) == 2).all()
    greedy, distribution, _ = drafted(3, temperature=1e-5)
    assert torch.equal(greedy, distribution.argmax(2))


def test_a_chain_is_sequential() -> None:
    """The first distribution follows from the sampled token, the second from the first draft, and so on."""
    inputs = drawn(draw_forward, "draft_hidden", FORWARD)
    model = model_of(inputs)
    h = draft_hidden(**inputs)
    positions, requests = inputs["positions_bj"] + 1, requests_of(FORWARD, 3)
    chains = [
        draft_chain(h, torch.full((2,), golden), positions, requests, model=model, draw=Draw.NVIDIA)
        for golden in range(8)
    ]
    assert len({tuple(rate[:, 0].tolist()) for _, _, rate in chains}) == 8  # the sampled token, not the first draft
    for token, logprob, rate in chains:
        for j in range(2):
            same = [c for c in chains if c[0][0, j] == token[0, j]]
            assert all(torch.equal(c[1][0, j + 1], logprob[0, j + 1]) for c in same)
            assert all(c[2][0, j + 1] == rate[0, j + 1] for c in same)


def test_a_position_that_is_drafted_again_draws_the_same_words() -> None:
    """runtime.md section 2.4: the stream is named by the absolute position, whatever block the position is in."""
    inputs = drawn(draw_forward, "draft_hidden", FORWARD)
    model, requests = model_of(inputs), requests_of(FORWARD, 3)
    h = draft_hidden(**inputs)[:, :1].expand(-1, 3, -1)
    first = draft_chain(h, ints(3, 3), ints(7, 7)[:, None] + torch.arange(3), requests, model=model, draw=Draw.NVIDIA)
    again = draft_chain(h[:, :1], first[0][:, 0], ints(8, 8)[:, None], requests, model=model, draw=Draw.NVIDIA)
    assert torch.equal(again[0][:, 0], first[0][:, 1])
    assert torch.equal(again[1][:, 0], first[1][:, 1])


# parity with each candidate


def test_candidates_agree_with_the_reference(judged: Judged) -> None:
    assert judged.faults("dspark") == []  # type: ignore[attr-defined]


# batch invariance


def test_requests_do_not_see_each_other(judged: Judged) -> None:
    passed = [o for o in judged("dspark") if o.check == "batch_invariant" and o.status is Status.PASSED]
    assert {(o.op, o.candidate) for o in passed} >= {("markov_step", "triton"), ("confidence", "triton")}


# golden vectors


def test_golden_vectors() -> None:
    assert {o.status for o in goldens.verify(load_card("dspark"))} == {Status.PASSED}


# rejected input


@pytest.mark.parametrize("op", [draft_rows, draft_rows_triton])
def test_bad_rows_are_refused(op) -> None:
    with pytest.raises(ValueError, match="state_b: expected b=1, got b=2"):
        op(ints(1), ints(1), ints(0), ints(0, 1), ints(0), block=BLOCK)
    with pytest.raises(ValueError, match=r"accepted_b: expected values in \[0, 4\), got 4"):
        op(ints(1), ints(1), ints(4), ints(0), ints(0), block=BLOCK)
    with pytest.raises(ValueError, match=r"first_b: expected values in \[-1"):
        op(ints(1), ints(-2), ints(0), ints(0), ints(0), block=BLOCK)
    with pytest.raises(TypeError, match="golden_b: expected"):
        op(torch.ones(1), ints(1), ints(0), ints(0), ints(0), block=BLOCK)


@pytest.mark.parametrize("op", [target_features, target_features_triton])
def test_bad_streams_are_refused(op) -> None:
    with pytest.raises(ValueError, match="streams_ztnm: expected a positive number, got 0"):
        op(())
    with pytest.raises(ValueError, match="streams_ztnm: expected t=1, got t=2"):
        op((torch.zeros(1, 4, 8, dtype=torch.bfloat16), torch.zeros(2, 4, 8, dtype=torch.bfloat16)))
    with pytest.raises(TypeError, match="stream"):
        op((torch.zeros(1, 4, 8, dtype=torch.int32),))


@pytest.mark.parametrize("op", [main_keys, main_keys_triton])
def test_bad_features_are_refused(op) -> None:
    inputs = drawn(draw_keys, "main_keys", FeatureCase(tokens=2))
    with pytest.raises(ValueError, match="features_tz: expected t=1, got t=2"):
        op(**inputs | {"positions_t": ints(0)})
    with pytest.raises(ValueError, match="wkv: expected a positive number, got 0"):
        op(**inputs | {"wkv": ()})
    with pytest.raises(ValueError, match="eps: expected a positive number, got 0"):
        op(**inputs | {"eps": 0.0})


@pytest.mark.parametrize("op", [draft_hidden, draft_hidden_triton])
def test_bad_blocks_are_refused(op) -> None:
    inputs = drawn(draw_forward, "draft_hidden", FORWARD)
    with pytest.raises(ValueError, match="rings: expected 1, got 0"):
        op(**inputs | {"rings": ()})
    with pytest.raises(ValueError, match="slots_bj: expected j=3, got j=2"):
        op(**inputs | {"slots_bj": inputs["slots_bj"][:, :2]})
    with pytest.raises(ValueError, match="mhc: expected a shifted schedule"):
        replace(inputs["config"], mhc=MHC_V4)


@pytest.mark.parametrize("op", [markov_step, markov_step_triton])
def test_bad_markov_steps_are_refused(op) -> None:
    base, table = torch.zeros(1, 4), torch.zeros(4, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="w2_vr: expected r=2, got r=3"):
        op(base, ints(0), table, torch.zeros(4, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"token_b: expected values in \[0, 4\), got 4"):
        op(base, ints(4), table, table)
    with pytest.raises(TypeError, match=r"base_bv: expected torch\.float32"):
        op(base.double(), ints(0), table, table)
    with pytest.raises(TypeError, match="token_b: expected"):
        op(base, torch.zeros(1), table, table)
    with pytest.raises(TypeError, match=r"w1_vr: expected torch\.bfloat16"):
        op(base, ints(0), table.float(), table)


@pytest.mark.parametrize("op", [confidence, confidence_triton])
def test_bad_heads_are_refused(op) -> None:
    h, table, weight = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((1, 3), (4, 2), (5,)))
    with pytest.raises(ValueError, match="weight_x: expected x=5, got x=4"):
        op(h, ints(0), table, weight[:4], temperature=1.0)
    with pytest.raises(ValueError, match=r"token_b: expected values in \[0, 4\), got -1"):
        op(h, ints(-1), table, weight, temperature=1.0)
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="temperature: expected 0 or more"):
            op(h, ints(0), table, weight, temperature=bad)
    with pytest.raises(TypeError, match="token_b: expected"):
        op(h, torch.zeros(1), table, weight, temperature=1.0)
    with pytest.raises(TypeError, match=r"weight_x: expected torch\.bfloat16"):
        op(h, ints(0), table, weight.float(), temperature=1.0)


def test_out_buffers_must_fit() -> None:
    case = HeadCase(requests=2)
    head = drawn(draw_head, "confidence", case)
    with pytest.raises(ValueError, match="out: "):
        confidence_triton(**head, out=torch.zeros(3))
    with pytest.raises(TypeError, match="out: "):
        confidence_triton(**head, out=torch.zeros(2, dtype=torch.float64))
    base, table = torch.zeros(1, 4), torch.zeros(4, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out: "):
        markov_step_triton(base, ints(0), table, table, out=torch.zeros(1, 5))
    with pytest.raises(TypeError, match="out: "):
        markov_step_triton(base, ints(0), table, table, out=torch.zeros(1, 4, dtype=torch.float64))
    rows, wrong = (ints(1), ints(1), ints(0), ints(0), ints(0)), torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="out: "):
        draft_rows_triton(*rows, block=BLOCK, out=(wrong, wrong, wrong, wrong))
    with pytest.raises(TypeError, match="out: "):
        draft_rows_triton(*rows, block=BLOCK, out=(wrong.long(), wrong, wrong, wrong))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": 0}, "draft: expected 1 to 32 positions, got 0"),
        ({"draft": 33}, "draft: expected 1 to 32 positions, got 33"),
        ({"draft": 4}, "window: expected a ring of at least 9 rows, got 8"),
        ({"noise_token": -1}, "noise_token: expected a token id, got -1"),
    ],
)
def test_bad_blocks_of_the_config_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BLOCK, **change)


def test_bad_drafts_are_refused() -> None:
    inputs = drawn(draw_forward, "draft_hidden", FORWARD)
    model, requests = model_of(inputs), requests_of(FORWARD, 3)
    with pytest.raises(ValueError, match=r"golden_b: expected values in \[0, 48\), got 48"):
        draft_block(
            replace(requests, golden_b=ints(3, 48)), inputs["rings"], inputs["table_sr"], model=model, draw=Draw.NVIDIA
        )
    h, positions = torch.zeros(2, 3, 32, dtype=torch.bfloat16), inputs["positions_bj"]
    with pytest.raises(ValueError, match="positions_bj: expected j=3, got j=2"):
        draft_chain(h, ints(0, 0), positions[:, :2], requests, model=model, draw=Draw.NVIDIA)
    with pytest.raises(ValueError, match="h_bjm: expected rows that can be drawn, got errors"):
        draft_chain(h * torch.nan, ints(0, 0), positions, requests, model=model, draw=Draw.NVIDIA)
    with pytest.raises(ValueError, match="head: expected 2 temperatures, got 3"):
        replace(model, block=replace(model.block, draft=2))
