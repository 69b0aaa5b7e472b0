"""Verification of drafts: the rule and its limits, the law it keeps, what a step commits and takes back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.dspark_verify import verify_pack_triton, verify_rows_triton, verify_rows_vectorised
from deeptwin.parity import goldens
from deeptwin.parity.card import case_rng, load_card
from deeptwin.parity.cards.csa2 import RunCase
from deeptwin.parity.cards.csa2 import draw_run as draw_csa2
from deeptwin.parity.cards.dspark_verify import Decisions
from deeptwin.parity.drafting_law import SMALL, law_of_pairs, plain_stream, speculative_stream, upper_bound
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.parity.v4_draws import V4Case, sectioned
from deeptwin.parity.v4_draws import draw_run as draw_csa
from deeptwin.reference.config import Draw, SlidingWindow, V4Kind
from deeptwin.reference.csa import csa_run
from deeptwin.reference.csa2 import csa2_run
from deeptwin.reference.csa2_state import Csa2Caches
from deeptwin.reference.dspark_pool import (
    from_likeliest,
    keep_likeliest,
    placeholder_pool,
    store_proposals_,
    verify_metadata,
)
from deeptwin.reference.dspark_step import commit_tokens, next_confidences, shift_history
from deeptwin.reference.dspark_verify import (
    PENALTY,
    acceptance_estimate,
    accepts,
    verify_pack,
    verify_rows,
    verify_statistics,
)
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC
from deeptwin.reference.v4_state import V4Caches
from deeptwin.reference.window import ring_slots, window_decode

Judged = Callable[[str], list[Outcome]]
ALL_NUMERICS = pytest.mark.parametrize("num", [SEMANTIC, CONTRACT, RIVAL], ids=lambda num: num.name)
EPS = 1 - math.exp(-PENALTY)


def f32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def one(q: list[float], p: list[float], token: int, word: int, *, draw: Draw = Draw.NVIDIA, num=CONTRACT):
    """One verify row."""
    args = f32([q]).log(), f32([p]).log(), torch.tensor([token]), torch.tensor([0]), torch.tensor([False])
    accepted, weights, alpha = verify_rows(*args, torch.tensor([word]), draw=draw, num=num)
    return bool(accepted), weights[0], alpha.item()


# properties of the reference


@ALL_NUMERICS
def test_the_residual_by_hand(num) -> None:
    _, weights, alpha = one([0.7, 0.3], [0.5, 0.5], 1, 0, num=num)
    assert weights.tolist() == pytest.approx([0.2 + 0.5 * EPS, 0.0], abs=1e-6)
    assert alpha == pytest.approx(0.8 - 0.5 * EPS, abs=1e-6)


def test_equal_distributions_have_a_residual_of_eps() -> None:
    """runtime.md section 1.3: α is 1 - ε, not 1, so a rejection can always draw something."""
    assert pytest.approx(4.99988e-5, rel=1e-5) == EPS
    _, weights, alpha = one([0.25] * 4, [0.25] * 4, 0, 0)
    assert weights.tolist() == pytest.approx([EPS / 4] * 4, rel=2e-3)
    assert alpha == pytest.approx(1 - EPS, abs=1e-7)


def test_the_uniform_number_can_be_one() -> None:
    """The 128 largest words reject a certain draft on NVIDIA, never on Ascend (2^-25 of all words)."""
    for word, on_nvidia in ((2**32 - 1, False), (2**32 - 128, False), (2**32 - 129, True), (0, True)):
        assert one([0.5, 0.5], [0.5, 0.5], 0, word)[0] is on_nvidia
        assert one([0.5, 0.5], [0.5, 0.5], 0, word, draw=Draw.ASCEND)[0]


def test_decisions_are_strict() -> None:
    half = torch.tensor([math.log(0.5)] * 3, dtype=torch.float64)
    words = torch.tensor([2**31 - 129, 2**31 - 1, 2**31])
    # the uniform number of word 2^31 - 1 rounds to one half, and one half is not below it
    chance = torch.exp(half).to(torch.float32)
    assert chance.tolist() == [0.5] * 3
    assert accepts(half, words, draw=Draw.NVIDIA).tolist() == [True, False, False]
    assert accepts(half, words, draw=Draw.ASCEND).tolist() == [True, True, False]


def test_what_cannot_be_drawn_is_rejected() -> None:
    gone = [0.0, 1.0]
    assert not one(gone, [0.5, 0.5], 0, 0)[0]  # filtered away by the target
    assert not one(gone, gone, 0, 0)[0]  # by both: the source accepts
    assert one([0.5, 0.5], gone, 0, 0)[0]  # log p = -inf, q > 0
    assert not one([0.5, 0.5], [0.5, 0.5], -1, 0)[0]


def test_a_forced_draft_of_a_tiny_probability() -> None:
    """runtime.md section 1.3: a greedy row with a gap of 2.2e-4 and log p(t) = -21.4 accepts with probability 0.55."""
    invert = np.float32(1) / np.float32(1e-5)
    lq = torch.log_softmax(f32([[0.0, -2.2e-4]]).double() * float(invert), 1)[0, 1]
    assert math.exp(lq.item() + 21.4) == pytest.approx(0.55, abs=0.01)
    # drawn from the target itself, the same token needs log p = log q, and at a gap of 4.44e-4 no word accepts it
    assert 64 * math.log(2) * 1e-5 == pytest.approx(4.436e-4, rel=1e-3)
    ratio = f32([-64 * math.log(2) + 31 * math.log(2)]).double() - 1e-3
    assert not accepts(ratio, torch.tensor([0]), draw=Draw.NVIDIA)


def test_a_fresh_row_reads_no_proposal() -> None:
    q = f32([[0.7, 0.3]]).log()
    for token, pool in ((-5, 10**9), (0, 0)):
        args = q, f32([[0.5, 0.5]]).log(), torch.tensor([token]), torch.tensor([pool]), torch.tensor([True])
        accepted, weights, alpha = verify_rows(*args, torch.tensor([0]), draw=Draw.NVIDIA)
        assert (bool(accepted), alpha.item()) == (False, 1.0)
        assert weights[0].tolist() == pytest.approx([0.7, 0.3])


def test_placeholder_proposals_keep_the_law() -> None:
    """A point mass on the last token: accepted with q(V - 1), and the residual is q without it."""
    q = [0.1, 0.6, 0.3]
    accepted, weights, alpha = one(q, [0.0, 0.0, 1.0], 2, int(0.3 * 2**32) - 1000)
    assert accepted
    assert weights.tolist() == pytest.approx([0.1, 0.6, 0.0])
    assert alpha == pytest.approx(0.3)
    assert not one(q, [0.0, 0.0, 1.0], 2, int(0.3 * 2**32) + 1000)[0]


def law(q: Tensor, p: Tensor) -> Tensor:
    """The exact law of the emitted token, from the residual of the definition."""
    v = len(q)
    rows = q.log().expand(v, v), p.log()[None], torch.arange(v), torch.zeros(v, dtype=torch.int64)
    _, weights, _ = verify_rows(
        rows[0].float(), rows[1].float(), *rows[2:], torch.zeros(v, dtype=torch.bool), torch.zeros(v).long(),
        draw=Draw.NVIDIA, num=SEMANTIC,
    )  # fmt: skip
    chance = (q / p).clamp(max=1)
    return p * chance + (p * (1 - chance)).sum() * weights[0] / weights[0].sum()


def test_the_law_stays_within_epsilon_of_the_target() -> None:
    rng = np.random.Generator(np.random.Philox(1))
    for concentration in (0.1, 1.0, 10.0):
        for _ in range(30):
            q, p = (torch.from_numpy(rng.dirichlet([concentration] * 6)).clamp(min=1e-9) for _ in range(2))
            q, p = q / q.sum(), p / p.sum()
            emitted = law(q, p)
            assert emitted.sum() == pytest.approx(1.0, abs=1e-9)
            assert (emitted <= (1 + EPS) * q + 1e-7).all()
            assert (emitted >= q - EPS / (1 + EPS) - 1e-7).all()
    same = torch.full((4,), 0.25, dtype=torch.float64)
    assert torch.allclose(law(same, same), same, atol=1e-9)


def test_two_token_chains_keep_the_law_in_draws() -> None:
    """Known p and q, 10^5 draws each of the whole path; `python -m deeptwin.parity.drafting_law` makes a million."""
    for record in law_of_pairs(SMALL, draws=100_000):
        assert record.most <= record.bound, record


def test_a_wrong_residual_breaks_the_bound() -> None:
    """The bound is no formality: sampling the target again after a rejection is far outside."""
    (record,) = law_of_pairs(((0.9, 0.5),), draws=100_000, residual=False)
    assert record.most > record.bound


def test_the_bernstein_slack() -> None:
    slack = math.log(32 / 1e-4)
    expected = (1 + EPS) * 300 + slack / 3 + math.sqrt(2 * 300 * (1 + EPS) * slack + slack**2 / 9)
    assert upper_bound(0.3, draws=1000, vocab=32) == pytest.approx(expected)


@pytest.mark.parametrize("quality", ["oracle", "random", "adversarial", "placeholder"])
def test_speculation_is_plain_decoding_in_argmax_mode(quality: str) -> None:
    """Any draft quality, any number of drafts, any verification lengths: the same tokens."""
    plain = plain_stream(steps=14, seed=3)
    for draft in (1, 3, 5):
        for lengths in ("full", "random"):
            assert speculative_stream(14, draft=draft, quality=quality, lengths=lengths, seed=3) == plain


def test_estimates_are_whole_numbers() -> None:
    weights = f32([[2.0**-32, 0.25 + 2.0**-30], [0.9, 0.8]])
    alpha = acceptance_estimate(weights, torch.tensor([False, False]))
    assert alpha.tolist() == [CONTRACT.f32(torch.tensor(1 - (0.25 + 2.0**-30))).item(), 0.0]
    assert acceptance_estimate(weights, torch.tensor([True, True])).tolist() == [1.0, 1.0]


def pack(accepted, sampled, token, lengths, stops, golden=None, draft=5):
    t = torch.tensor
    flags = t(accepted, dtype=torch.bool)
    forced = None if golden is None else t(golden)
    return [x.tolist() for x in verify_pack(flags, t(sampled), t(token), forced, t(lengths), t(stops), draft=draft)]


def test_what_requests_emit() -> None:
    count, final, packed, stopped = pack(
        [1, 0, 1, 1, 1, 0, 1], [10, 11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 5, 6, 7], [4, 2, 1], [[11], [5], [6]]
    )
    assert (count, final) == ([1, 1, 0], [11, 15, 16])
    assert packed == [1, -1, -1, -1, 5, -1, -1]
    assert stopped == [True, True, False]


def test_forced_tokens_decide() -> None:
    """Forced tokens come before the prefix rule: equal to the draft accepts, anything else ends the request with it."""
    count, final, packed, _ = pack([0, 1, 0], [7, 8, 9], [1, 2, 3], [3], [[-1]], golden=[1, 6, -1])
    assert (count, final, packed) == ([1], [6], [1, -1, -1])


def test_statistics_count_verify_rows() -> None:
    counts, lengths = torch.tensor([2, 0, 0]), torch.tensor([4, 2, 1])
    alpha, confidence = f32([0.5, 0.5, 0.5, 1, 0.25, 1, 1]), f32([0.75, 0.5, 0.0, 9, 0.5, 9, 9])
    generated, verified, error = verify_statistics(counts, lengths, alpha, confidence, counters=2)
    assert generated.tolist() == [1, 1]
    assert verified.tolist() == [2, 2]  # the third verify row counts in the last counter
    assert error.item() == pytest.approx(0.25 + 0.0 + 0.5 + 0.25)


def test_a_stop_ends_scheduling_but_not_the_pool() -> None:
    confidence = f32([[0.5, 0.25], [0.75, 0.5]])
    told = next_confidences(confidence, torch.tensor([True, False]))
    assert told.tolist() == [[0, 0], [0.75, 0.5]]
    assert confidence[0, 0] == 0.5


def test_the_first_end_wins() -> None:
    limits = {"length": 10, "produced": 3, "stop": 2, "max_length": 100, "max_tokens": 50}
    assert commit_tokens([5, 6], **limits) == (2, "")
    assert commit_tokens([5, 2, 6], **limits) == (2, "stop")
    assert commit_tokens([5, 2, 6], **limits | {"stop": None}) == (3, "")
    assert commit_tokens([5, 6, 7], **limits | {"max_tokens": 5}) == (2, "length")
    assert commit_tokens([5, 6, 7], **limits | {"max_length": 11}) == (2, "length")
    assert commit_tokens([2, 6], **limits | {"max_tokens": 4}) == (1, "stop")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 4))
def test_a_running_request_has_keys_of_all_tokens_but_one(emitted: list[int], produced: int, room: int) -> None:
    """The optimistic advance by the rows of the step, taken back to what was appended."""
    keys, length = produced, produced + 1
    kept, reason = commit_tokens(
        emitted, length=length, produced=produced, stop=3, max_length=99, max_tokens=produced + room
    )
    assert kept <= len(emitted)
    assert (reason == "") == (3 not in emitted[:kept] and kept < room)
    if not reason:
        assert keys + kept == length + kept - 1


def test_rejected_ids_leave_the_ngram_window() -> None:
    window = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    shifted = shift_history(window, torch.tensor([0, 2, 4]), fill=-9)
    assert shifted.tolist() == [[1, 2, 3, 4], [-9, -9, 1, 2], [-9] * 4]


def read_after(ring: int, window: int, draft: int, steps: list[tuple[int, bool]]) -> tuple[list[int], int]:
    """What the last query sees in a ring that held `draft` speculative keys after every step; keys are positions.

    `steps` are (accepted drafts, whether the main pass or the draft wrote last).
    """
    config = SlidingWindow(window=window, ring=ring)
    zero, store, length = torch.tensor([0]), [-1] * ring, 1
    store[0] = 0

    def write(first: int, last: int, sign: int) -> None:
        at = torch.arange(first, last + 1)
        slots = ring_slots(at, torch.zeros_like(at), torch.tensor([last + 1]), zero, zero, config=config)
        for position, slot in zip(at.tolist(), slots.tolist(), strict=True):
            store[slot] = sign * position

    for accepted, drafted in steps:
        write(length, length + draft, 1)  # the main pass: the anchor and γ drafts
        for position in range(length + accepted + 1, length + draft + 1):
            store[position % ring] = -position  # rejected: keys of tokens that never were
        length += accepted + 1
        if drafted:
            write(length, length + draft - 1, -1)
    last = length - 1
    seen = window_decode(torch.tensor([last]), torch.tensor([0]), zero, zero, config=config)[0]
    return [store[slot] for slot in seen.tolist() if slot >= 0], last


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_rejected_keys_are_never_read(draft: int, window: int, data: st.DataObject) -> None:
    """Rollback copies nothing: the window holds the keys of the committed tokens, whatever was rejected (U32, U36)."""
    steps = data.draw(st.lists(st.tuples(st.integers(0, draft), st.booleans()), min_size=1, max_size=12))
    seen, last = read_after(window + draft + 1, window, draft, steps)
    assert seen == list(range(max(0, last - window + 1), last + 1))


def test_a_ring_without_room_for_drafts_is_overwritten() -> None:
    """U36, the control: a ring as long as the window loses keys that are still inside it."""
    seen, last = read_after(8, 8, 3, [(3, True)] * 4 + [(0, True)])
    assert seen != list(range(last - 7, last + 1))


def test_slot_0_is_a_point_mass_that_nobody_writes() -> None:
    """runtime.md section 1.1: token V - 1, log-probability 0 there, confidence 1; writes to it are dropped."""
    pool = placeholder_pool(slots=2, draft=2, vocab=8)
    logprob = torch.log_softmax(torch.arange(32.0).view(2, 2, 8) % 5, 2)
    token, rate = torch.tensor([[1, 2], [3, 4]]), f32([[0.5, 0.25], [0.75, 0.125]])
    store_proposals_(pool, torch.tensor([0, 2]), token, logprob, rate)
    assert pool.token_z.tolist() == [7, 7, 7, 7, 3, 4]
    assert pool.confidence_z.tolist() == [1, 1, 1, 1, 0.75, 0.125]
    assert torch.equal(pool.logprob_zv[4:], logprob[1])
    assert pool.logprob_zv[0].tolist() == [*(-math.inf,) * 7, 0.0]


def test_the_rows_of_a_step() -> None:
    """A request with two of its drafts, one without proposals and its γ placeholders, one with its fresh row alone."""
    pool = placeholder_pool(slots=2, draft=2, vocab=8)
    store_proposals_(
        pool, torch.tensor([2]), torch.tensor([[3, 4]]), torch.zeros(1, 2, 8) - math.log(8), f32([[0.5, 0.5]])
    )
    slot, length, position = torch.tensor([2, 0, 1]), torch.tensor([3, 3, 1]), torch.tensor([9, 20, 5])
    token, row, fresh, first, local = verify_metadata(pool, slot, length, position)
    assert token.tolist() == [3, 4, -1, 7, 7, -1, -1]
    assert row.tolist() == [4, 5, 0, 0, 1, 0, 0]
    assert fresh.tolist() == [False, False, True, False, False, True, True]
    assert first.tolist() == [9, 9, 9, 20, 20, 20, 5]
    assert local.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_placeholders_change_no_law() -> None:
    """What is emitted behind a placeholder: q(V - 1) by acceptance, the rest of q by the residual."""
    q = f32([[0.1, 0.2, 0.3, 0.4]]).double()
    pool = placeholder_pool(slots=1, draft=1, vocab=4)
    token, row, fresh, *_ = verify_metadata(pool, torch.tensor([0]), torch.tensor([2]), torch.tensor([3]))
    target = q.log().float().expand(2, 4).contiguous()
    _, weights, alpha = verify_rows(target, pool.logprob_zv, token, row, fresh, torch.tensor([0, 0]), draw=Draw.NVIDIA)
    assert weights[0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.0])
    assert weights[1].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert alpha[0].item() == pytest.approx(0.4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_the_likeliest_tokens_are_the_whole_row(vocab: int, support: int, seed: int) -> None:
    """Rows that top-k has left at most `width` tokens come back bit for bit."""
    rng = np.random.Generator(np.random.Philox(seed))
    rows = torch.from_numpy(rng.choice([-1.0, -2.0, -3.5], (3, vocab)).astype(np.float32))
    width = min(support, vocab)
    rows[:, rng.permutation(vocab)[width:]] = -torch.inf
    value, token = keep_likeliest(rows, width=width)
    assert (value.diff(dim=1) <= 0).all()
    assert torch.equal(from_likeliest(value, token, vocab=vocab), rows)


def csa2_step(inputs: dict, rows: list[Tensor], starts: Tensor, *, decode: bool) -> tuple[Tensor, dict]:
    counts = torch.tensor([[len(x) for x in rows]], dtype=torch.int32)
    batch = replace(inputs["batch"], counts_kb=counts, decode_k=torch.tensor([decode]), start_b=starts.to(torch.int32))
    h_tm, page_pq, state_sq = csa2_run(**inputs | {"h_tm": torch.cat(rows), "batch": batch})
    return h_tm, inputs | {"caches": replace(inputs["caches"], page_pq=page_pq, state_sq=state_sq)}


def slot_records(pages_pow: Tensor) -> Tensor:
    """Sectioned pages with every record in one piece."""
    return sectioned(pages_pow)[0].view(len(pages_pow), pages_pow.shape[1], -1)


def csa2_read(inputs: dict, committed_b: Tensor) -> list[Tensor]:
    """What a query behind the committed tokens of every sequence can read: keys, entries, the open group."""
    config, caches, batch = inputs["config"], inputs["caches"], inputs["batch"]
    map_, found = config.topology, []
    for b, end in enumerate(committed_b.tolist()):
        state = int(batch.state_b[b])
        for layer in range(map_.num_layers):
            ring = caches.records(config, "ring", layer)[state]
            found.append(ring[torch.arange(max(end - config.window + 1, 0), end) % len(ring)])
        for layer in map_.kv_sources:
            ratio = map_.ratios[layer]
            for name in ("main", "index"):
                pages = caches.records(config, name, layer)
                pages = slot_records(pages) if name == "index" else pages
                found.append(pages[batch.table_bp[b].long()].flatten(0, 1)[: end // ratio])
            if ratio > 1:
                ring = caches.compressor(config, layer)[state]
                found.append(ring[torch.arange(end // ratio * ratio, end) % len(ring)])
    return found


def csa_step(inputs: dict, rows: list[Tensor], starts: Tensor, *, decode: bool) -> tuple[Tensor, dict]:
    counts = torch.tensor([[len(x) for x in rows]], dtype=torch.int32)
    batch = replace(inputs["batch"], counts_kb=counts, decode_k=torch.tensor([decode]), start_b=starts.to(torch.int32))
    y_tm, *parts = csa_run(**inputs | {"x_tm": torch.cat(rows), "batch": batch})
    names = inputs["caches"].parts()
    return y_tm, inputs | {"caches": V4Caches(**dict(zip(names, parts, strict=True)))}


def csa_read(inputs: dict, committed_b: Tensor) -> list[Tensor]:
    """The same; pools keep the group before the open one too, because groups overlap."""
    config, caches, batch = inputs["config"], inputs["caches"], inputs["batch"]
    found = []
    for b, end in enumerate(committed_b.tolist()):
        state, whole = int(batch.state_b[b]), end // config.ratio
        ring = slot_records(caches.ring_pow)[state]
        found.append(ring[torch.arange(max(end - config.window + 1, 0), end) % len(ring)])
        for pages in (caches.main_pow, caches.index_pow):
            found.append(slot_records(pages)[batch.table_bp[b].long()].flatten(0, 1)[:whole])
        for pool in (caches.pool, caches.index_pool):
            found.append(pool[state][torch.arange(max((whole - 1) * config.ratio, 0), end) % pool.shape[1]])
    return found


def rolled_back(kind: str) -> tuple:
    """Ten or eight sequences that differ in where they stand and in how many of their drafts are accepted."""
    if kind == "csa2":
        drafts, prompts = 3, (5, 6)
        case = RunCase(lengths=tuple(p + 2 * drafts + 2 for p in prompts for _ in range(drafts + 1)), free=True)
        inputs, step, read = draw_csa2(case, case_rng("csa2", "csa2_run", case.id, 0)), csa2_step, csa2_read
        hidden = inputs["h_tm"]
    else:
        drafts, prompts = 2, (6, 7, 8, 9)
        lengths = tuple(p + 2 * drafts + 2 for p in prompts for _ in range(drafts + 1))
        case = V4Case(kind=V4Kind.CSA, lengths=lengths, picks="free")
        inputs, step, read = draw_csa(case, case_rng("csa", "csa_run", case.id, 0)), csa_step, csa_read
        hidden = inputs["x_tm"]
    start_b = torch.tensor([p for p in prompts for _ in range(drafts + 1)])
    accepted_b = torch.tensor([j for _ in prompts for j in range(drafts + 1)])
    rows = list(hidden.split(list(case.lengths)))
    _, inputs = step(inputs, [x[:p] for x, p in zip(rows, start_b, strict=True)], start_b * 0, decode=False)
    return inputs, step, read, rows, start_b, accepted_b, drafts


@pytest.mark.parametrize("kind", ["csa2", "csa"])
def test_a_rejection_leaves_no_trace(kind: str) -> None:
    """U32, U33: verify k drafts, reject at j, for every j and every place in a group: what later queries read has the
    bytes of decoding the emitted tokens one by one; and after one more step nothing differs, wherever it lies."""
    inputs, step, read, rows, start_b, accepted_b, drafts = rolled_back(kind)
    wrong = [
        torch.cat([x[p : p + 1 + a], -x[p + 1 + a : p + 1 + drafts]])
        for x, p, a in zip(rows, start_b, accepted_b, strict=True)
    ]
    verified, speculative = step(inputs, wrong, start_b, decode=True)
    serial, kept = inputs, []
    for j in range(drafts + 1):
        one = [x[p + j : p + j + (j <= a)] for x, p, a in zip(rows, start_b.tolist(), accepted_b.tolist(), strict=True)]
        out, serial = step(serial, one, start_b + j, decode=True)
        kept.append(dict(zip((accepted_b >= j).nonzero()[:, 0].tolist(), out, strict=True)))
    for b, block in enumerate(verified.split(drafts + 1)):
        for j in range(int(accepted_b[b]) + 1):
            assert torch.equal(block[j], kept[j][b])
    committed_b = start_b + accepted_b + 1
    for got, expected in zip(read(speculative, committed_b), read(serial, committed_b), strict=True):
        assert torch.equal(got, expected)
    # rejected keys do lie behind what is read
    beyond_b = committed_b + (accepted_b < drafts)
    pairs = zip(read(speculative, beyond_b), read(serial, beyond_b), strict=True)
    assert any(not torch.equal(got, expected) for got, expected in pairs)
    more = [x[c : c + drafts + 1] for x, c in zip(rows, committed_b, strict=True)]
    after, speculative = step(speculative, more, committed_b, decode=True)
    expected, serial = step(serial, more, committed_b, decode=True)
    assert torch.equal(after, expected)
    for got, right in zip(state_bytes(speculative["caches"]), state_bytes(serial["caches"]), strict=True):
        assert torch.equal(got, right)


def state_bytes(caches: Csa2Caches | V4Caches) -> list[Tensor]:
    parts = caches.parts().values() if isinstance(caches, V4Caches) else (caches.page_pq, caches.state_sq)
    return [x.contiguous().view(torch.uint8) for x in parts]


# parity with each candidate


def test_candidates_agree_with_the_reference(judged: Judged) -> None:
    assert judged.faults("dspark_verify") == []  # type: ignore[attr-defined]


class Case:
    """A row whose word stands at its boundary: u = 0.5 against exp(log 0.5)."""

    semantic = rival = contract = torch.tensor([False])
    marks: list = []
    arguments = {
        "target_tv": f32([[0.25, 0.75]]).log(),
        "draft_zv": f32([[0.5, 0.5]]).log(),
        "token_t": torch.tensor([0]),
        "pool_t": torch.tensor([0]),
        "fresh_t": torch.tensor([False]),
        "word_t": torch.tensor([2**31]),
    }


def test_decisions_may_differ_at_the_boundary_alone() -> None:
    yes = torch.tensor([True])
    assert Decisions().judge(yes, Case()).ok
    away = Case()
    away.arguments = Case.arguments | {"word_t": torch.tensor([2**31 + 2**12])}
    assert not Decisions().judge(yes, away).ok
    certain = Case()
    certain.arguments = Case.arguments | {"draft_zv": f32([[0.25, 0.75]]).log(), "word_t": torch.tensor([2**32 - 1])}
    assert not Decisions().judge(yes, certain).ok


# batch invariance


def test_rows_do_not_see_each_other(judged: Judged) -> None:
    passed = [o for o in judged("dspark_verify") if o.check == "batch_invariant" and o.status is Status.PASSED]
    assert {(o.op, o.candidate) for o in passed} >= {("verify_pack", "reference"), ("verify_pack", "triton")}


# golden vectors


def test_golden_vectors() -> None:
    assert {o.status for o in goldens.verify(load_card("dspark_verify"))} == {Status.PASSED}


# rejected input


@pytest.mark.parametrize("op", [verify_rows, verify_rows_vectorised, verify_rows_triton])
def test_bad_rows_are_refused(op) -> None:
    q, token, flag = f32([[0.5, 0.5]]).log(), torch.tensor([0]), torch.tensor([False])

    def call(target=q, pool=q, token=token, row=token, fresh=flag, word=token):
        return op(target, pool, token, row, fresh, word, draw=Draw.NVIDIA)

    with pytest.raises(ValueError, match="draft_zv: expected v=2, got v=3"):
        call(pool=torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"token_t: expected values in \[-1, 2\), got 2"):
        call(token=torch.tensor([2]))
    with pytest.raises(ValueError, match=r"pool_t: expected values in \[0, 1\), got 1"):
        call(row=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"word_t: expected values in \[0, 4294967296\)"):
        call(word=torch.tensor([2**32]))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="target_tv: expected log-probabilities below infinity"):
            call(target=q + bad)
        with pytest.raises(ValueError, match="draft_zv: expected log-probabilities below infinity"):
            call(pool=q + bad)
    with pytest.raises(TypeError, match=r"target_tv: expected torch\.float32"):
        call(target=q.double())
    with pytest.raises(TypeError, match="token_t: expected"):
        call(token=f32([0]))
    with pytest.raises(TypeError, match=r"fresh_t: expected torch\.bool"):
        call(fresh=token)
    with pytest.raises(TypeError, match=r"word_t: expected torch\.int64"):
        call(word=token.int())


@pytest.mark.parametrize("op", [verify_pack, verify_pack_triton])
def test_bad_packs_are_refused(op) -> None:
    flags, ids = torch.tensor([True, False]), torch.tensor([3, 4])

    def call(accepted=flags, token=ids, golden=None, length=(2,), stops=((1, -1),), draft=3):
        length, stops = torch.tensor(length), torch.tensor(stops)
        return op(accepted, ids, token, golden, length, stops, draft=draft)

    with pytest.raises(ValueError, match="token_t: expected t=2, got t=3"):
        call(token=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="length_b: expected 2 rows in all"):
        call(length=(1,))
    with pytest.raises(ValueError, match=r"length_b: expected values in \[0, 3\), got 3"):
        call(length=(3,), draft=1)
    with pytest.raises(ValueError, match="stop_bk: expected b=1, got b=2"):
        call(stops=((1,), (2,)))
    with pytest.raises(TypeError, match=r"accepted_t: expected torch\.bool"):
        call(accepted=ids)
    with pytest.raises(TypeError, match="golden_t: expected"):
        call(golden=f32([1, 2]))


def test_bad_input_of_the_helpers_is_refused() -> None:
    one_row = torch.tensor([True])
    with pytest.raises(ValueError, match="word_t: expected t=1, got t=2"):
        accepts(f32([0.0]), torch.tensor([1, 2]), draw=Draw.NVIDIA)
    with pytest.raises(ValueError, match="fresh_t: expected t=2, got t=1"):
        acceptance_estimate(torch.zeros(2, 3), one_row)
    with pytest.raises(ValueError, match="counters: expected at least 1, got 0"):
        verify_statistics(torch.tensor([0]), torch.tensor([1]), f32([1]), f32([1]), counters=0)
    with pytest.raises(ValueError, match="stopped_b: expected b=2, got b=1"):
        next_confidences(torch.zeros(2, 3), one_row)
    with pytest.raises(ValueError, match="emitted: expected tokens of a running request"):
        commit_tokens([], length=1, produced=0, stop=None, max_length=9, max_tokens=9)
    with pytest.raises(ValueError, match="emitted: expected tokens of a running request"):
        commit_tokens([1], length=1, produced=9, stop=None, max_length=9, max_tokens=9)
    with pytest.raises(ValueError, match=r"rejected_b: expected values in \[0, 3\), got 3"):
        shift_history(torch.zeros(1, 2), torch.tensor([3]), fill=0)


def test_out_buffers_must_fit() -> None:
    args = torch.zeros(2, 4), torch.zeros(1, 4), torch.tensor([0, 0]), torch.tensor([0, 0]), torch.tensor([True, True])
    word, flags, weights, alpha = torch.tensor([0, 0]), args[4], torch.zeros(2, 4), torch.zeros(2)
    with pytest.raises(ValueError, match="out: "):
        verify_rows_triton(*args, word, draw=Draw.NVIDIA, out=(flags, weights[:1], alpha))
    with pytest.raises(TypeError, match="out: "):
        verify_rows_triton(*args, word, draw=Draw.NVIDIA, out=(flags, weights.double(), alpha))
    ints = torch.zeros(1, dtype=torch.int32)
    packed = args[4], word, word, None, torch.tensor([2]), torch.tensor([[1]])
    with pytest.raises(ValueError, match="out: "):
        verify_pack_triton(*packed, draft=3, out=(ints, ints, ints, flags[:1]))
    with pytest.raises(TypeError, match="out: "):
        verify_pack_triton(*packed, draft=3, out=(ints, ints, word, flags[:1]))


def test_bad_pools_are_refused() -> None:
    pool = placeholder_pool(slots=1, draft=2, vocab=4)
    token, logprob, rate = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2, 4), torch.zeros(2, 2)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="draft: expected a positive number, got 0"):
        placeholder_pool(slots=1, draft=0, vocab=4)
    with pytest.raises(ValueError, match="slot_b: expected distinct slots"):
        store_proposals_(pool, torch.tensor([1, 1]), token, logprob, rate)
    with pytest.raises(ValueError, match=r"slot_b: expected values in \[0, 2\), got 2"):
        store_proposals_(pool, torch.tensor([0, 2]), token, logprob, rate)
    with pytest.raises(ValueError, match=r"token_bj: expected values in \[0, 4\), got 4"):
        store_proposals_(pool, slots, token + 4, logprob, rate)
    with pytest.raises(ValueError, match="logprob_bjv: expected v=4, got v=3"):
        store_proposals_(pool, slots, token, logprob[..., :3], rate)
    with pytest.raises(TypeError, match="logprob_bjv: expected"):
        store_proposals_(pool, slots, token, logprob.double(), rate)
    with pytest.raises(TypeError, match="token_bj: expected"):
        store_proposals_(pool, slots, token.double(), logprob, rate)
    with pytest.raises(ValueError, match=r"length_b: expected values in \[0, 4\), got 4"):
        verify_metadata(pool, slots, torch.tensor([4, 0]), slots)
    with pytest.raises(TypeError, match="slot_b: expected"):
        verify_metadata(pool, slots.double(), slots, slots)
    with pytest.raises(ValueError, match="logprob_zv: expected rows of at most 2 possible tokens, got 4"):
        keep_likeliest(logprob[0], width=2)
    with pytest.raises(ValueError, match="width: expected 1 … 4, got 5"):
        keep_likeliest(logprob[0], width=5)
    with pytest.raises(ValueError, match=r"id_zk: expected values in \[-1, 4\), got 4"):
        from_likeliest(torch.zeros(1, 1), torch.tensor([[4]]), vocab=4)
