"""From logits to emitted tokens: decisions, words, log-probabilities, errors, streams and the law of whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.drafter import DraftBatch, NoDrafter, ScriptedDrafter
from deeptwin.optimized.plan import plan_of
from deeptwin.optimized.verification import (
    Greedy,
    Verified,
    VerifyRows,
    clear_proposals_,
    proposal_pool,
    step_tokens,
    verify,
    write_proposals_,
)
from deeptwin.parity.drafting_law import upper_bound
from deeptwin.reference.config import DRAFT_SEED_OFFSET, Draw, DrawUse, RowError
from deeptwin.reference.dspark_pool import placeholder_pool, store_proposals_, verify_metadata
from deeptwin.reference.dspark_state import DraftRequests, ProposalPool
from deeptwin.reference.philox import random_words, subsequences
from deeptwin.reference.sampling import sample_logits, sample_probs

FAST, TRUE = plan_of("v3", "vectorised"), plan_of("v3", "reference")
V = 97  # no multiple of a vector


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def logits_of(seed: int, rows: int, vocab: int = V, scale: float = 3.0) -> Tensor:
    drawn = np.random.Generator(np.random.Philox(seed)).standard_normal((rows, vocab))
    return torch.from_numpy((drawn * scale).astype(np.float32))


def requests(lengths: Sequence[int], *, temperature: float = 1.0, slots: Sequence[int] | None = None) -> VerifyRows:
    """One request for each length, of different positions and seeds, without stop tokens."""
    count = len(lengths)
    return VerifyRows(
        length_b=longs(*lengths),
        position_b=torch.arange(count) * 7 + 5,
        slot_b=torch.arange(count) + 1 if slots is None else longs(*slots),
        temperature_b=torch.full((count,), float(temperature)),
        top_p_b=torch.ones(count),
        top_k_b=longs(*[-1] * count),
        seed_b=torch.arange(count) + 11,
        stop_bk=torch.full((count, 2), -1),
    )


def point_masses(tokens: Sequence[Sequence[int]], vocab: int = V) -> ProposalPool:
    """A pool whose slots 1, 2, … propose these tokens for certain."""
    token_bj = torch.tensor(tokens)
    pool = proposal_pool(slots=len(tokens), draft=token_bj.shape[1], vocab=vocab)
    rows = torch.full((*token_bj.shape, vocab), -torch.inf).scatter_(2, token_bj[:, :, None], 0.0)
    write_proposals_(pool, torch.arange(len(tokens)) + 1, token_bj, rows, torch.ones(token_bj.shape))
    return pool


def step(
    logits: Tensor, rows: VerifyRows, pool: ProposalPool | None, greedy: Greedy = Greedy.ARGMAX, **named
) -> Verified:
    return verify(logits, rows, pool, **({"greedy": greedy, "draw": Draw.NVIDIA, "ops": FAST} | named))


def same(a: Verified, b: Verified) -> bool:
    return all(torch.equal(x, getattr(b, name)) for name, x in vars(a).items() if name not in ("alpha_t", "target_tv"))


# decisions


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("wrong", range(4))
def test_a_rejection_at_every_position(wrong: int, temperature: float) -> None:
    """Drafts count up to the first wrong one, and the token of its row is the target's own."""
    logits = logits_of(1, 4) * (1 if temperature == 0 else 100)  # a draw that is certain
    right = logits.argmax(1)
    drafts = [int(token) for token in right[:3]]
    if wrong < 3:
        drafts[wrong] = (drafts[wrong] + 1) % V
    found = step(logits, requests([4], temperature=temperature), point_masses([drafts]))
    assert found.accepted_b.tolist() == [wrong]
    assert found.token_bj.tolist() == [[*right[: wrong + 1].tolist(), *[-1] * (3 - wrong)]]
    assert found.golden_b.tolist() == [int(right[wrong])]
    assert found.emitted_b.tolist() == [wrong + 1]
    assert not found.logprob_bj[0, wrong + 1 :].any()


def test_a_right_draft_behind_a_wrong_one_does_not_count() -> None:
    logits = logits_of(2, 3)
    right = logits.argmax(1)
    found = step(logits, requests([3], temperature=0), point_masses([[(int(right[0]) + 1) % V, int(right[1])]]))
    assert found.accepted_b.tolist() == [0]


def test_requests_of_every_length_beside_one_another() -> None:
    """Padding has no row; one row is plain decoding; fewer rows than drafts are verified as far as they go."""
    logits = logits_of(3, 6)
    right = logits.argmax(1).tolist()
    pool = point_masses([[1, 2], right[:2], [right[4], 3]])
    found = step(logits, requests([0, 3, 1, 2], temperature=0, slots=[1, 2, 0, 3]), pool)
    assert found.accepted_b.tolist() == [0, 2, 0, 1]
    assert found.emitted_b.tolist() == [0, 3, 1, 2]
    assert found.token_bj.tolist() == [[-1] * 3, right[:3], [right[3], -1, -1], [*right[4:], -1]]
    assert found.golden_b.tolist() == [-1, right[2], right[3], right[5]]
    assert found.error_b.tolist() == [0] * 4


def test_a_stop_token_inside_the_accepted_prefix_is_the_last_that_counts() -> None:
    """Acceptance itself does not look at stop tokens: the device's positions follow it (runtime.md section 1.2)."""
    logits = logits_of(4, 8)
    right = logits.argmax(1).tolist()
    pool = point_masses([right[:3], right[4:7]])
    rows = replace(requests([4, 4], temperature=0), stop_bk=torch.tensor([[right[1], -1], [-1, -1]]))
    found = step(logits, rows, pool)
    assert found.accepted_b.tolist() == [3, 3]
    assert found.emitted_b.tolist() == [2, 4]
    assert found.stopped_b.tolist() == [True, False]
    last = replace(rows, stop_bk=torch.tensor([[right[3], right[3]], [right[5], right[4]]]))
    assert step(logits, last, pool).emitted_b.tolist() == [4, 1]


def test_placeholders_are_point_masses_on_the_last_token() -> None:
    logits = logits_of(5, 3)
    logits[0, V - 1] = 50
    found = step(logits, requests([3], temperature=0, slots=[0]), proposal_pool(slots=1, draft=2, vocab=V))
    assert found.accepted_b.tolist() == [1]
    assert found.token_bj[0, 0] == V - 1


def test_forced_tokens_decide() -> None:
    logits = logits_of(6, 3)
    pool, forced = point_masses([[5, 6]]), longs(5, 8, 9)
    found = step(logits, requests([3]), pool, forced_t=forced)
    assert found.token_bj.tolist() == [[5, 8, -1]]
    target = torch.log_softmax(logits.double(), 1)
    torch.testing.assert_close(found.logprob_bj[0, :2].double(), target[longs(0, 1), longs(5, 8)], rtol=0, atol=1e-5)


# what is drawn, and with which words


def test_a_request_of_one_row_is_plain_sampling() -> None:
    """Case 0 at the row's own position, whether there is a pool or none (runtime.md section 2.4)."""
    logits, rows = logits_of(7, 3), requests([1, 1, 1])
    pool = point_masses([[1], [2], [3]])
    stream = subsequences(rows.position_b, longs(0, 0, 0), use=DrawUse.FRESH)
    filters = rows.temperature_b, rows.top_p_b, rows.top_k_b
    token, _, logprob, _ = sample_logits(logits, *filters, rows.seed_b, stream, draw=Draw.NVIDIA)
    for given in (pool, None):
        found = step(logits, rows, given, ops=TRUE)
        assert torch.equal(found.token_bj[:, 0], token)
        assert torch.equal(found.logprob_bj[:, 0], logprob.gather(1, token[:, None])[:, 0].float())
        assert (found.alpha_t == 1).all()


def test_words_belong_to_the_row_and_its_use() -> None:
    """Row j of a request: acceptance by case 2 and what follows by cases 1 and 0, all at P0 + j · stride."""
    logits = logits_of(8, 2, scale=1.0)
    seen = {"accepted": 0, "again": 0}
    for seed in range(40):
        rows = replace(requests([2]), seed_b=longs(seed))
        token = int(logits[0].argmax())
        found = step(logits, rows, point_masses([[token]]), ops=TRUE)
        word = random_words(longs(seed), subsequences(longs(5), longs(0), use=DrawUse.ACCEPT), count=1)
        chance = torch.softmax(logits[0].double(), 0)[token]
        accepted = float(word) * 2.0**-32 < chance
        assert found.accepted_b.tolist() == [int(accepted)]
        if accepted:
            seen["accepted"] += 1
            stream = subsequences(longs(5), longs(1), use=DrawUse.FRESH)
            one = torch.ones(1)
            fresh, _, _, _ = sample_logits(logits[1:], one, one, longs(-1), longs(seed), stream, draw=Draw.NVIDIA)
            assert found.golden_b.tolist() == fresh.tolist()
        else:
            seen["again"] += 1
            rest = torch.softmax(logits[:1].double(), 1).float()
            rest[0, token] = 0  # of a point mass
            stream = subsequences(longs(5), longs(0), use=DrawUse.RESIDUAL)
            assert found.golden_b.tolist() == sample_probs(rest, longs(seed), stream, draw=Draw.NVIDIA)[0].tolist()
    assert min(seen.values()) > 2


@pytest.mark.parametrize("draw", list(Draw))
def test_the_largest_comes_where_no_residual_is_left(draw: Draw) -> None:
    """A proposal that claims every token leaves nothing: the target's likeliest is emitted (section 1.3)."""
    logits = logits_of(15, 2, vocab=64, scale=2.0)
    pool, rows = proposal_pool(slots=1, draft=1, vocab=64), requests([2])
    unlikely = logits[0].argmin()[None, None]
    write_proposals_(pool, longs(1), unlikely, torch.zeros(1, 1, 64), torch.ones(1, 1))
    found = step(logits, rows, pool, draw=draw)
    assert found.token_bj.tolist() == [[int(logits[0].argmax()), -1]]
    assert found.alpha_t[0] == 1


def test_log_probabilities_are_those_of_the_target() -> None:
    """Of a sampled request at its temperature, filters included; of a greedy one at temperature 1."""
    logits = logits_of(9, 4)
    rows = replace(requests([2, 2]), temperature_b=torch.tensor([0.5, 0.0]), top_k_b=longs(3, 1))
    rows = replace(rows, top_p_b=torch.tensor([1.0, 0.01]))
    right = logits.argmax(1).tolist()
    found = step(logits, rows, point_masses([[right[0]], [right[2]]]))
    cut = torch.where(logits >= logits.topk(3).values[:, -1:], logits * 2, -torch.inf)
    for b, (row, table) in enumerate(((0, cut), (2, logits))):
        for j in range(int(found.emitted_b[b])):
            expected = torch.log_softmax(table[row + j].double(), 0)[found.token_bj[b, j]]
            assert abs(found.logprob_bj[b, j].double() - expected) < 1e-5
    assert found.accepted_b[1] == 1


@pytest.mark.parametrize("gap", [5e-4, 1.0])
def test_eps_equals_argmax_where_the_gap_is_wide_enough(gap: float) -> None:
    """Above 4.44e-4 no draft but the largest can be accepted or drawn (runtime.md section 1.3)."""
    logits = torch.zeros(3 * 50, 64)
    best = torch.arange(150) * 7 % 64
    logits[torch.arange(150), best] = gap
    drafts = [[int(best[3 * b]), (int(best[3 * b + 1]) + b % 2) % 64] for b in range(50)]
    rows, pool = requests([3] * 50, temperature=0), point_masses(drafts, 64)
    argmax, eps = (step(logits, rows, pool, greedy) for greedy in Greedy)
    assert torch.equal(argmax.token_bj, eps.token_bj)
    assert argmax.accepted_b.tolist() == [2, 1] * 25


def test_both_plans_and_platforms_decide_alike() -> None:
    """Vectorised and reference operations: equal tokens; another platform draws others."""
    logits = logits_of(10, 30, vocab=64, scale=1.5)
    pool = point_masses([[b, b + 1] for b in range(10)], 64)
    rows = replace(requests([3] * 10), top_p_b=torch.linspace(0.3, 1.0, 10))
    fast, true = (step(logits, rows, pool, ops=ops) for ops in (FAST, TRUE))
    assert torch.equal(fast.token_bj, true.token_bj)
    torch.testing.assert_close(fast.logprob_bj, true.logprob_bj, rtol=0, atol=2e-6)
    other = step(logits, rows, pool, draw=Draw.ASCEND)
    assert not torch.equal(other.token_bj, fast.token_bj)


# batches


def test_no_request_sees_another() -> None:
    """Alone, in another order, beside rows of NaN: the same bits."""
    lengths = [3, 1, 0, 2, 3]
    logits = logits_of(11, sum(lengths), scale=1.0)
    pool = point_masses([[b, b + 1] for b in range(5)])
    rows = replace(
        requests(lengths), temperature_b=torch.tensor([1.0, 0.0, 1.0, 0.3, 2.0]), top_k_b=longs(-1, 5, 1, 9, 20)
    )
    whole = step(logits, rows, pool)
    starts = [0, 3, 4, 4, 6]
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own = VerifyRows(**{name: x[b : b + 1] for name, x in vars(rows).items()})
        alone = step(logits[start : start + length], own, pool)
        noisy = torch.full_like(logits, torch.nan)
        noisy[start : start + length] = logits[start : start + length]
        for found, at in ((alone, 0), (step(noisy, rows, pool), b)):
            for name in ("token_bj", "logprob_bj", "accepted_b", "golden_b", "emitted_b", "error_b"):
                assert torch.equal(getattr(found, name)[at], getattr(whole, name)[b]), (name, b)
        assert torch.equal(alone.target_tv, whole.target_tv[start : start + length])


def test_a_row_that_cannot_be_drawn_ends_its_own_request() -> None:
    """Its drafts up to there stand; where the row is behind the end of the request nobody notices."""
    logits = logits_of(12, 9)
    right = logits.argmax(1).tolist()
    logits[1] = torch.nan
    logits[5] = -torch.inf
    drafts = [[right[0], right[1]], [(right[3] + 1) % V, 3], right[6:8]]
    for temperature in (0.0, 1e-4):
        found = step(logits, requests([3, 3, 3], temperature=temperature), point_masses(drafts))
        assert found.error_b.tolist() == [RowError.INVALID, RowError.NONE, RowError.NONE]
        assert found.accepted_b.tolist() == [1, 0, 2]
        assert found.token_bj.tolist() == [[right[0], -1, -1], [right[3], -1, -1], right[6:]]
        assert found.golden_b.tolist() == [-1, right[3], right[8]]


def test_no_request_at_all() -> None:
    for pool in (None, point_masses([[1]])):
        found = step(torch.zeros(0, V), requests([]), pool)
        assert found.token_bj.shape[0] == 0
        found = step(torch.zeros(0, V), requests([0, 0], slots=[0, 0]), pool)
        assert found.emitted_b.tolist() == [0, 0]
        assert found.golden_b.tolist() == [-1, -1]


# the pool


def test_the_pool_is_that_of_the_reference() -> None:
    ours, theirs = proposal_pool(slots=3, draft=2, vocab=V), placeholder_pool(slots=3, draft=2, vocab=V)
    logprob = torch.log_softmax(logits_of(13, 6), 1).view(3, 2, V)
    given = longs(3, 0, 1), torch.tensor([[4, 5], [6, 7], [8, 9]]), logprob, torch.rand(3, 2)
    write_proposals_(ours, *given)
    store_proposals_(theirs, *given)
    for name in ("token_z", "logprob_zv", "confidence_z"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    slots, lengths = longs(1, 0, 3, 2), longs(3, 1, 2, 0)
    tokens = step_tokens(longs(50, 51, 52, 53), slots, lengths, ours)
    assert tokens.tolist() == [50, 8, 9, 51, 52, 4]
    draft, _, fresh, _, _ = verify_metadata(theirs, slots, lengths, longs(1, 1, 1, 1))
    assert torch.equal(draft[~fresh], tokens[1:][~fresh[:-1]])  # a row verifies what the row behind it reads
    clear_proposals_(ours, 3)
    assert ours.token_z.tolist() == [V - 1, V - 1, 8, 9] + [V - 1] * 4
    assert torch.equal(ours.logprob_zv[6:], placeholder_pool(slots=1, draft=2, vocab=V).logprob_zv[:2])
    assert step_tokens(longs(1, 2), longs(0, 0), longs(1, 1), None).tolist() == [1, 2]


# streams and law


def next_logits(prefix: list[int], vocab: int) -> Tensor:
    """A row that the whole prefix decides."""
    seed = crc32(repr(prefix).encode())
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal(vocab).astype(np.float32))


def served(
    prompts: list[list[int]], steps: int, drafter: NoDrafter | ScriptedDrafter, *, greedy: Greedy, trim: int
) -> list[list[int]]:
    """What every prompt becomes; in step s request b verifies (b + s) % trim of its drafts less than all."""
    tokens, gamma, vocab, count = [list(p) for p in prompts], drafter.gamma, drafter.vocab, len(prompts)
    pool = proposal_pool(slots=count, draft=gamma, vocab=vocab) if gamma else None
    slot = torch.arange(count) + 1
    for s in range(steps):
        lengths = longs(*[max(1, gamma + 1 - (b + s) % trim) for b in range(count)])
        inputs = step_tokens(longs(*[t[-1] for t in tokens]), slot, lengths, pool).tolist()
        logits, place = [], 0
        for known, length in zip(tokens, lengths.tolist(), strict=True):
            logits += [next_logits([*known, *inputs[place + 1 : place + 1 + j]], vocab) for j in range(length)]
            place += length
        base = requests(lengths.tolist(), temperature=0)
        rows = replace(base, position_b=longs(*map(len, tokens)), seed_b=longs(*[3] * count))
        found = step(torch.stack(logits), rows, pool, greedy)
        first = longs(*[len(t) - 1 for t in tokens])
        for known, new, emitted in zip(tokens, found.token_bj.tolist(), found.emitted_b.tolist(), strict=True):
            known += new[:emitted]
        if pool is not None:
            at = DraftRequests(
                golden_b=found.golden_b,
                first_b=first,
                accepted_b=found.accepted_b,
                state_b=slot,
                valid_b=slot * 0,
                temperature_b=base.temperature_b,
                top_p_b=base.top_p_b,
                top_k_b=base.top_k_b,
                seed_b=base.seed_b,
            )
            batch = DraftBatch(requests=at, ids=tuple(range(count)), table_bp=torch.zeros(count, 1, dtype=torch.int32))
            write_proposals_(pool, slot, *drafter.propose(batch))
    return tokens


@pytest.mark.parametrize("greedy", list(Greedy))
def test_drafts_never_change_a_greedy_stream(greedy: Greedy) -> None:
    """Any number of drafts, right or wrong, verified to any length: the stream of plain decoding (section 1.6.1)."""
    prompts = [[1, 2, 3], [7], [5, 5, 5, 5, 5, 5]]
    plain = served(prompts, 24, NoDrafter(vocab=40), greedy=greedy, trim=1)
    steps = {}
    for gamma, quality, trim in ((1, 100, 1), (2, 60, 1), (3, 0, 2), (5, 80, 3), (5, 100, 1)):
        drafter = ScriptedDrafter(dict(enumerate(plain)), quality=quality, gamma=gamma, vocab=40)
        got = served(prompts, 6, drafter, greedy=greedy, trim=trim)
        for a, b in zip(got, plain, strict=True):
            shared = min(len(a), len(b))
            assert a[:shared] == b[:shared], (gamma, quality)
        steps[gamma, quality] = sum(map(len, got))
    assert steps[5, 100] > steps[2, 60] > steps[3, 0]
    unknown = ScriptedDrafter({}, quality=100, gamma=2, vocab=40)
    got = served(prompts, 5, unknown, greedy=greedy, trim=1)
    assert all(a == b[: len(a)] for a, b in zip(got, plain, strict=True))


@pytest.mark.parametrize(("p", "q", "batches"), [(0.5, 0.7, 6), (0.999, 0.001, 2), (1e-6, 0.3, 2)])
def test_the_law_of_the_target_is_kept(p: float, q: float, batches: int) -> None:
    """Every token at most as often as (1 + ε) q and Bernstein's slack allow (section 1.6.2), in 10^5 whole steps."""
    counts, draws = torch.zeros(32, dtype=torch.int64), 1 << 14
    pair = torch.zeros(2, 32, dtype=torch.float64)
    pair[:, :2] = torch.tensor([[p, 1 - p], [q, 1 - q]])
    logits = pair[1].log().float().expand(2 * draws, 32).contiguous()
    draft = pair[0].log().float().expand(draws, 1, 32).contiguous()
    base, pool = requests([2] * draws), proposal_pool(slots=draws, draft=1, vocab=32)
    one, position = torch.ones(draws), torch.full((draws,), 5)
    stream = subsequences(position, position * 0, use=DrawUse.FRESH)
    for batch in range(batches):
        seed = torch.arange(draws) + batch * draws
        token, _, _, _ = FAST.op("sampling.sample_logits")(
            draft[:, 0], one, one, position * 0 - 1, seed + DRAFT_SEED_OFFSET, stream, draw=Draw.NVIDIA
        )
        write_proposals_(pool, base.slot_b, token[:, None], draft, one[:, None])
        found = step(logits, replace(base, seed_b=seed, position_b=position), pool)
        counts += torch.bincount(found.token_bj[:, 0], minlength=32)
    total = batches * draws
    assert counts.sum() == total
    assert not counts[2:].any()
    for token, chance in enumerate((q, 1 - q)):
        assert counts[token] <= upper_bound(chance, draws=total, vocab=32), (token, counts[:2].tolist())


def test_the_bound_sees_a_leak() -> None:
    """Drafts that were not drawn from the distribution they claim change the law (section 1.3)."""
    draws = 1 << 13
    logits = torch.tensor([0.3, 0.7]).log().expand(2 * draws, 2).contiguous()
    pool = proposal_pool(slots=draws, draft=1, vocab=2)
    claimed = torch.tensor([0.5, 0.5]).log().expand(draws, 1, 2).contiguous()
    rows = requests([2] * draws)
    write_proposals_(pool, rows.slot_b, torch.zeros(draws, 1, dtype=torch.int64), claimed, torch.ones(draws, 1))
    first = step(logits, replace(rows, position_b=rows.position_b * 0), pool).token_bj[:, 0]
    assert (first == 0).sum() > upper_bound(0.3, draws=draws, vocab=2)


# rejected input


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"length_b": longs(2, 3)}, ValueError, r"rows.length_b: expected 4 rows in all, got \[2, 3\]"),
        ({"length_b": longs(4, 0)}, ValueError, "length_b: expected"),
        ({"length_b": longs(2, 2).int()}, TypeError, "rows.length_b: expected"),
        ({"slot_b": longs(1, 9)}, ValueError, "slot_b: expected"),
        ({"temperature_b": torch.ones(2).double()}, TypeError, "rows.temperature_b: expected"),
        ({"top_p_b": torch.ones(3)}, ValueError, "rows.top_p_b: expected"),
        ({"stop_bk": longs(1, 2)}, ValueError, "rows.stop_bk: expected"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(change: dict[str, Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        step(logits_of(1, 4), replace(requests([2, 2]), **change), point_masses([[1, 2], [3, 4]]))


def test_other_arguments_that_do_not_fit_are_refused() -> None:
    rows, pool = requests([2, 2]), point_masses([[1], [2]])
    with pytest.raises(TypeError, match="logits_tv: expected"):
        step(logits_of(1, 4).double(), rows, pool)
    with pytest.raises(ValueError, match="pool: expected v=96, got v=97"):
        step(logits_of(1, 4, vocab=96), rows, pool)
    with pytest.raises(ValueError, match="length_b: expected"):
        step(logits_of(1, 4), rows, None)
    with pytest.raises(TypeError, match="forced_t: expected"):
        step(logits_of(1, 4), rows, pool, forced_t=torch.zeros(4))
    with pytest.raises(ValueError, match="forced_t: expected"):
        step(logits_of(1, 4), rows, pool, forced_t=longs(1))
    with pytest.raises(ValueError, match="slots: expected"):
        proposal_pool(slots=0, draft=1, vocab=2)
    with pytest.raises(ValueError, match=r"slot: expected 1 … 2, got 0"):
        clear_proposals_(pool, 0)
    with pytest.raises(ValueError, match="slot_b: expected"):
        step_tokens(longs(1), longs(3), longs(1), pool)
    with pytest.raises(TypeError, match="golden_b: expected"):
        step_tokens(longs(1).int(), longs(1), longs(1), pool)
    proposal = torch.zeros(1, 1, V), torch.ones(1, 1)
    with pytest.raises(TypeError, match="token_bj: expected"):
        write_proposals_(pool, longs(1), torch.ones(1, 1), *proposal)
    with pytest.raises(ValueError, match="logprob_bjv: expected"):
        write_proposals_(pool, longs(1), longs(1)[None], proposal[0][:, :, 1:], proposal[1])
    with pytest.raises(TypeError, match="confidence_bj: expected"):
        write_proposals_(pool, longs(1), longs(1)[None], proposal[0], proposal[1].double())
    with pytest.raises(ValueError, match="slot_b: expected"):
        write_proposals_(pool, longs(7), longs(1)[None], *proposal)
