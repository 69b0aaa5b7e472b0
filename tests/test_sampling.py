"""Sampling: known answers and worked numbers of the source, laws, limits, and what both sides refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized import sampling as fast
from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.rules import Law, chi_square
from deeptwin.reference.config import DRAFT_SEED_OFFSET, Draw, DrawUse, RowError, SamplingParams
from deeptwin.reference.philox import (
    philox4x32,
    random_words,
    request_seed,
    sample_seeds,
    signed,
    subsequences,
    uniforms,
    words,
)
from deeptwin.reference.sampling import argmax_tokens, log_probs, num_lanes, sample_logits, sample_probs
from deeptwin.reference.sampling_filter import fixed_point, keep_prefix
from deeptwin.reference.sampling_rows import mask_logits, ranked, smaller_mass

CARD = load_card("sampling")
INF, NAN = math.inf, math.nan
VOCABULARY = 129280


def int64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def normal(seed: int, *shape: int) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def row_of(
    x: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, rows: int = 1
) -> dict[str, Any]:
    """Equal rows with streams of their own."""
    return {
        "logits_tv": torch.tensor([x] * rows, dtype=torch.float32),
        "temperature_t": torch.full((rows,), temperature),
        "top_p_t": torch.full((rows,), top_p),
        "top_k_t": torch.full((rows,), top_k),
        "seed_t": torch.arange(rows),
        "subsequence_t": zeros(rows),
        "draw": Draw.NVIDIA,
    }


# properties of the reference


@pytest.mark.parametrize(
    ("counter", "key", "known"),
    [
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_has_its_known_answers(counter: tuple[int, ...], key: tuple[int, ...], known: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox4x32(counter, key)) == known
    # the same blocks as streams: key and the upper half of the counter are seed and number, the lower is the block
    if counter[:2] == (0, 0):
        drawn = random_words(int64([signed(key[0] + (key[1] << 32))]), int64([0]), count=6)
        assert drawn[0, :4].tolist() == [int(word, 16) for word in known.split()]
        assert drawn[0, 4:].tolist() == list(philox4x32((1, 0, 0, 0), key))[:2]


def test_a_uniform_number_is_never_zero_and_rarely_one() -> None:
    """word · 2^-32 + 2^-33 with the word rounded to fp32: the 128 largest words give 1."""
    number = torch.arange(200)
    drawn, word = uniforms(zeros(200), number), random_words(zeros(200), number, count=1)[:, 0]
    exact = word.double() * 2.0**-32 + 2.0**-33
    assert ((drawn.double() - exact).abs() <= 2.0**-24).all()
    assert drawn.min() >= 2.0**-33
    rounded = torch.tensor([0, 2**32 - 129, 2**32 - 128, 2**32 - 1], dtype=torch.int64).float() * 2.0**-32 + 2.0**-33
    assert rounded.tolist() == [2.0**-33, 1 - 2.0**-24, 1.0, 1.0]


def test_stream_numbers_by_hand() -> None:
    position, row = int64([5, 5, 5, 2**20]), int64([0, 1, 1, 32])
    assert subsequences(position, row, use=DrawUse.FRESH).tolist() == [15, 30000072, 30000072, 963147552]
    assert subsequences(position, row, use=DrawUse.ACCEPT).tolist() == [17, 30000074, 30000074, 963147554]
    assert 963147554 < 2**31


def test_numbers_of_a_request_never_meet() -> None:
    position, row = torch.meshgrid(torch.arange(300), torch.arange(6), indexing="ij")
    numbers = torch.cat([subsequences(position.flatten(), row.flatten(), use=use) for use in DrawUse])
    assert len(numbers.unique()) == len(numbers)


def test_a_draft_has_other_words_than_its_target() -> None:
    """The same position, another seed; and a position that is drafted again has the same words again."""
    number = subsequences(int64([9]), int64([0]), use=DrawUse.FRESH)
    target, draft = int64([7]), int64([7 + DRAFT_SEED_OFFSET])
    assert not torch.equal(random_words(target, number, count=4), random_words(draft, number, count=4))
    assert torch.equal(random_words(draft, number, count=4), random_words(draft, number.clone(), count=4))


def test_seeds_of_requests_and_samples() -> None:
    """U65, U67: without a seed the drawn bits are taken; n samples differ, also from those of neighbouring seeds."""
    assert request_seed(-1, drawn=5) == 2**64 - 1
    assert request_seed(2**64 + 3, drawn=5) == 3
    assert request_seed(None, drawn=5) == 5
    seeds = sample_seeds(int64([7, 8, 9, signed(2**64 - 1)]), samples=8)
    assert seeds[:, 0].tolist() == [7, 8, 9, -1]
    assert len(seeds.unique()) == 32
    split = torch.cat([sample_seeds(int64([7]), samples=8), sample_seeds(int64([8, 9, -1]), samples=8)])
    assert torch.equal(split, seeds)


def test_parameters_of_a_request() -> None:
    greedy = SamplingParams(seed=1, temperature=1e-6, top_p=0.5, top_k=3, max_tokens=0).drawn
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.max_tokens) == (1e-5, 1.0, -1, 1)
    warm = SamplingParams(seed=1, temperature=0.5, top_p=0.5, top_k=3)
    assert warm.drawn == warm
    for bad in (
        {"temperature": -1.0},
        {"temperature": NAN},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"top_k": 2**31},
        {"max_tokens": -1},
        {"top_logprobs": 1001},
        {"seed": 2**64},
    ):
        (name,) = bad
        with pytest.raises(ValueError, match=f"^{name}: "):
            SamplingParams(**{"seed": 0} | bad)


def test_floors_of_a_uniform_row() -> None:
    """129 280 equal weights lose 13 568 of 2^31, so a top_p above 0.999994 is out of reach and removes nothing."""
    row = torch.full((1, VOCABULARY), 1 / VOCABULARY)
    assert 2**31 - int(fixed_point(row[0]).sum()) == 13568
    flat = torch.zeros(1, VOCABULARY)
    unlimited = int64([-1])
    assert keep_prefix(flat, row, torch.tensor([0.999995]), unlimited).all()
    kept = keep_prefix(flat, row, torch.tensor([0.99999]), unlimited)[0]
    assert 0 < int((~kept).sum()) < 5
    assert kept[: int(kept.sum())].all()  # of equal logits, the lowest ids


def test_the_gap_below_which_a_greedy_row_is_a_draw() -> None:
    """2.14876e-4 by bisection of the fp32 formula; above it the runner-up has no weight."""
    low, high = 1e-4, 4e-4
    for _ in range(40):
        gap = (low + high) / 2
        lp = log_probs(torch.tensor([0.0, -gap]), torch.tensor(1e-5))
        low, high = (gap, high) if int(fixed_point(lp.exp().float())[1]) else (low, gap)
    assert low == pytest.approx(2.14876e-4, abs=2e-9)
    tied = row_of([1.0, 1.0, 0.0], temperature=1e-5, rows=400)
    token = sample_logits(**tied)[0]
    assert 140 < int((token == 0).sum()) < 260
    assert set(token.tolist()) == {0, 1}
    clear = sample_logits(**row_of([1.0, 1.0 - 3e-4, 0.0], temperature=1e-5, rows=400))[0]
    assert torch.equal(clear, argmax_tokens(torch.tensor([[1.0, 1.0 - 3e-4, 0.0]] * 400))[0])


def test_the_order_of_the_inverse_cdf() -> None:
    """Every number below the total, by hand: lanes first, then what lies in the lane; not the order of ids."""
    weight = [0, 1, 2, 0, 1]
    lanes = 2  # columns 0 2 4 | 1 3
    by_hand = [2, 2, 4, 1]
    lane_sums = [sum(weight[k::lanes]) for k in range(lanes)]
    found = []
    for rho in range(4):
        k = 0 if rho < lane_sums[0] else 1
        rest, m = rho - (lane_sums[0] if k else 0), 0
        while rest >= weight[k + m * lanes]:
            rest, m = rest - weight[k + m * lanes], m + 1
        found.append(k + m * lanes)
    assert found == by_hand
    assert [num_lanes(v, Draw.NVIDIA) for v in (1, 5, 8, 4097, 8191, 8192, VOCABULARY)] == [
        1,
        8,
        8,
        8192,
        8192,
        2048,
        2048,
    ]
    assert [num_lanes(v, Draw.ASCEND) for v in (64, 192, 4096, 8128, 8192, VOCABULARY)] == [
        64,
        256,
        2048,
        2048,
        4096,
        4096,
    ]


@pytest.mark.parametrize("draw", Draw)
def test_a_wide_row_is_drawn_over_lanes(draw: Draw) -> None:
    """Against a walk over the lanes in Python numbers, with weights at columns of one lane and of others."""
    probs = torch.zeros(40, 8256)
    columns = [3, 3 + 2048, 3 + 4096, 4, 4 + 6144, 8255]
    probs[:, columns] = torch.tensor([0.1, 0.2, 0.15, 0.3, 0.05, 0.2])
    token, error = sample_probs(probs, torch.arange(40), zeros(40), draw=draw)
    lanes = 2048 if draw is Draw.NVIDIA else 4096
    order = sorted(columns, key=lambda c: (c % lanes, c // lanes))
    weight = {c: int(probs[0, c].double() * 2**31) for c in columns}
    total = sum(weight.values())
    for row in range(40):
        stream = words(row, 0)
        if draw is Draw.NVIDIA:
            rho = next(w for w in stream if w < (2**32 - 1) // total * total) % total
        else:
            rho = (next(stream) + (next(stream) << 32)) % total
        for column in order:
            if rho < weight[column]:
                break
            rho -= weight[column]
        assert token[row] == column
    assert not error.any()


def test_refused_words_cross_blocks() -> None:
    """U91: a total of 2^31 refuses every second word; one in 256 rows refuses more than eight."""
    halves = torch.tensor([[0.5, 0.5]]).repeat(1500, 1)
    drawn = fast.random_words_vectorised(zeros(1500), torch.arange(1500), count=40)
    first = (drawn < 2**31).int().argmax(1)
    assert int((first >= 8).sum()) > 3
    expected = drawn.gather(1, first[:, None])[:, 0] // 2**30
    for sample in (sample_probs, fast.sample_probs_vectorised):
        assert torch.equal(sample(halves, zeros(1500), torch.arange(1500), draw=Draw.NVIDIA)[0], expected)


LAWS = {
    "uniform": lambda v: torch.ones(v),
    "softmax": lambda v: torch.softmax(normal(v, v) * 2, 0),
    "zipf": lambda v: 1.0 / torch.arange(1, v + 1),
    "geometric": lambda v: 0.5 ** torch.arange(v).clamp(max=40),
    "sparse": lambda v: torch.zeros(v).scatter(0, (torch.arange(8) * 7919) % v, torch.arange(1.0, 9.0)),
}


@pytest.mark.parametrize("draw", Draw)
@pytest.mark.parametrize("columns", [16, 100])
@pytest.mark.parametrize("name", LAWS)
def test_draws_have_the_law(name: str, columns: int, draw: Draw) -> None:
    """Chi-square below its 99.9 % quantile, 20 000 draws; scaling all weights by 1e-4 keeps it (a million: see
    `python -m deeptwin.parity.sampling_laws`)."""
    columns = 64 * -(-columns // 64) if draw is Draw.ASCEND else columns
    prob = LAWS[name](columns)
    prob = prob / prob.sum()
    for scale, start in ((1.0, 0), (1e-4, 10**6)):
        rows = (prob * scale).expand(20000, columns)
        token, error = fast.sample_probs_vectorised(rows, torch.arange(20000), zeros(20000) + start, draw=draw)
        assert not error.any()
        problem, likely = chi_square(token, prob.double())
        assert problem == ""
        assert likely > 1e-3


def test_the_law_rule_sees_another_law() -> None:
    prob = torch.tensor([0.7, 0.3, 0.0])
    fair = torch.tensor([0] * 700 + [1] * 300)
    assert chi_square(fair, prob.double())[1] > 0.999
    assert chi_square(torch.tensor([0] * 620 + [1] * 380), prob.double())[1] < 1e-3
    assert "no weight" in chi_square(torch.tensor([2] + [0] * 99), prob.double())[0]
    assert "expectation" in chi_square(torch.tensor([0] * 300 + [1] * 700), prob.double())[0]
    assert "no column" in chi_square(torch.tensor([3]), prob.double())[0]
    oracles = type("Oracles", (), {"contract": fair, "arguments": {"probs_tv": prob[None]}})()
    assert Law(probs="probs_tv").judge(fair, oracles).ok
    assert not Law(probs="probs_tv").judge(torch.tensor([0] * 620 + [1] * 380), oracles).ok
    oracles.contract = torch.tensor([0] * 620 + [1] * 380)
    assert "contract" in Law(probs="probs_tv").judge(fair, oracles).message


def test_small_probabilities_appear_as_often_as_they_should() -> None:
    """1e-9 alone is drawn always; 2^-31 counts, what is below does not."""
    probs = torch.zeros(5, 8)
    probs[:, 6] = torch.tensor([1.0, 1e-9, 2.0**-31, 2.0**-32, 0.0])
    token, error = sample_probs(probs, torch.arange(5), zeros(5), draw=Draw.NVIDIA)
    assert token.tolist() == [6, 6, 6, -1, -1]
    assert error.tolist() == [0, 0, 0, RowError.EMPTY, RowError.EMPTY]


def test_the_prefix_by_hand() -> None:
    """A token is removed iff the mass before it exceeds top_p: at equality it stays."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125]])

    def kept(top_p: float, top_k: int = -1) -> list[int]:
        return keep_prefix(logits, probs, torch.tensor([top_p]), int64([top_k]))[0].nonzero()[:, 0].tolist()

    assert kept(0.49) == [1]
    assert kept(0.5) == [1, 2]
    assert kept(0.75) == [0, 1, 2]
    assert kept(1e-9) == [1]
    assert kept(1.0, 1) == [1]
    assert kept(0.75, 2) == [1, 2]
    assert kept(0.5, 3) == [1, 2]
    assert kept(1.0, 4) == kept(1.0, 10**9) == [0, 1, 2, 3]


def test_a_class_of_equal_logits_is_cut_at_the_lowest_ids() -> None:
    """The class holds 0.6; with 0.3 wanted of it, ids 1 and 2 stay, and a tiny top_p leaves one."""
    logits = torch.tensor([[5.0, 1.0, 1.0, 1.0, 0.0, -0.0]])
    probs = torch.tensor([[0.3, 0.2, 0.2, 0.2, 0.05, 0.05]])
    for top_p, top_k, wanted in ((0.6, -1, [0, 1, 2]), (0.6, 2, [0, 1]), (1.0, 5, [0, 1, 2, 3, 4]), (1e-9, 4, [0])):
        kept = keep_prefix(logits, probs, torch.tensor([top_p]), int64([top_k]))[0]
        assert kept.nonzero()[:, 0].tolist() == wanted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(0, 64), st.integers(1, 24))
def test_the_prefix_is_the_shortest_that_suffices(values: list[int], p64: int, top_k: int) -> None:
    """Dyadic weights, so that every sum is exact: against the rule of the source, token by token."""
    logits = torch.tensor([values], dtype=torch.float32)
    raw = torch.exp2(logits)
    probs = raw / 2.0 ** math.ceil(math.log2(float(raw.sum())))
    top_p = p64 / 64
    kept = keep_prefix(logits, probs, torch.tensor([top_p]), int64([top_k]))[0]
    by_rank = sorted(range(len(values)), key=lambda c: (-values[c], c))
    before, wanted = 0.0, []
    for rank, column in enumerate(by_rank):
        by_p = top_p == 1 or before <= top_p
        # what is missing of the class may round to nothing in fp32: then its quotient asks for one token less
        if by_p and (top_k >= len(values) or rank < top_k):
            wanted.append(column)
        before += float(probs[0, column])
    found = kept.nonzero()[:, 0].tolist()
    exact = [c for c in sorted(wanted) if c not in found]
    assert set(found) <= set(wanted)
    # at equality inside a class (2^31 p + 1 rounds to 2^31 p in fp32) the last one is not asked for
    assert len(exact) <= 1
    if exact:
        assert values.count(values[exact[0]]) > 1
    assert found


def test_filters_meet_the_source_s_acceptance() -> None:
    """Against a float stable sort on 300 mixed rows: a survivor, sums of one, order, minimality and sufficiency."""
    x = normal(3, 300, 200) * 3
    x[::3] = (x[::3] * 2).round() / 2
    top_p, top_k = torch.linspace(0.05, 0.999, 300), int64([-1, 5, 50, 200] * 75)
    temperature = torch.tensor([0.3, 1.0, 2.0]).repeat(100)
    rest = zeros(300)
    for run in (sample_logits, fast.sample_logits_vectorised):
        _, error, logprobs, probs = run(x, temperature, top_p, top_k, rest, rest, draw=Draw.NVIDIA)
        assert not error.any()
        kept, full = logprobs > -INF, torch.softmax(x.double() / temperature[:, None].double(), 1)
        assert kept.any(1).all()
        assert (probs.double().sum(1) - 1).abs().max() < 1e-5
        worst_kept = torch.where(kept, x, INF).amin(1)
        assert (torch.where(kept, -INF, x).amax(1) <= worst_kept).all()
        mass = torch.where(kept, full, 0).sum(1)
        slightest = torch.where(kept, full, INF).amin(1)
        count = kept.sum(1)
        by_count = (top_k > 0) & (count == top_k)
        assert ((mass >= top_p.double() - 1e-4) | by_count).all()
        assert ((mass - slightest <= top_p.double() + 1e-4) | (count == 1)).all()
        assert ((top_k < 0) | (count <= top_k)).all()
        assert (probs.double() - full * kept / mass[:, None]).abs().sum(1).max() < 1e-4


def test_rows_that_cannot_be_drawn_say_why() -> None:
    """And disturb no other row."""
    rows = row_of([0.0, 1.0, 2.0, -INF], rows=9)
    rows["logits_tv"][1, 0], rows["logits_tv"][2, 0], rows["logits_tv"][3] = NAN, INF, -INF
    rows["temperature_t"][4], rows["temperature_t"][5] = 0.0, NAN
    rows["top_p_t"][6], rows["top_k_t"][7] = 1.5, 0
    codes = [0, 1, 1, 2, 4, 4, 4, 4, 0]
    for run in (sample_logits, fast.sample_logits_vectorised):
        token, error, logprobs, probs = run(**rows)
        assert error.tolist() == codes
        assert (token[1:8] == -1).all()
        assert (logprobs[1:8] == -INF).all()
        assert (probs[1:8] == 0).all()
        for row in (0, 8):
            alone = {name: x[row : row + 1] if isinstance(x, Tensor) else x for name, x in rows.items()}
            assert all(
                torch.equal(x[row : row + 1], y)
                for x, y in zip((token, error, logprobs, probs), run(**alone), strict=True)
            )


def test_masks_that_leave_nothing_are_no_silent_row() -> None:
    """A grammar and a blacklist that exclude each other: EMPTY."""
    logits = torch.zeros(1, 4)
    masked = mask_logits(
        logits, torch.tensor([True, False, False, False]), None, torch.tensor([[1]], dtype=torch.int32), eos=3
    )
    assert (masked == -INF).all()
    assert (logits == 0).all()
    assert argmax_tokens(masked)[1].tolist() == [RowError.EMPTY]


def test_the_least_temperature_is_one_of_fp32() -> None:
    assert sample_logits(**row_of([0.0, 1.0], temperature=1e-5))[1].tolist() == [0]
    assert sample_logits(**row_of([0.0, 1.0], temperature=9.9e-6))[1].tolist() == [RowError.PARAMETER]


def test_expected_differences() -> None:
    """What the same seed does not promise: the local row, the use, the platform; and what it does: equal requests."""
    prob = torch.full((200, 64), 0.015)  # with 1 / 64, half of the tokens of the two platforms agree
    seed, position = zeros(200) + 5, torch.arange(200)

    def drawn(row: int, use: DrawUse, draw: Draw = Draw.NVIDIA) -> Tensor:
        number = subsequences(position, zeros(200) + row, use=use)
        return sample_probs(prob, seed, number, draw=draw)[0]

    plain = drawn(0, DrawUse.FRESH)
    assert torch.equal(plain, drawn(0, DrawUse.FRESH))
    for other in (drawn(1, DrawUse.FRESH), drawn(0, DrawUse.RESIDUAL), drawn(0, DrawUse.FRESH, Draw.ASCEND)):
        assert 0 < int((plain == other).sum()) < 20
    two_seeds = sample_probs(prob, seed + 1, subsequences(position, zeros(200), use=DrawUse.FRESH), draw=Draw.NVIDIA)[0]
    assert int((plain == two_seeds).sum()) < 20


def test_top_log_probs_and_a_forced_top_k() -> None:
    values = torch.tensor([[1.0, 3.0, -INF, 3.0, -0.0, 0.0]])
    value, place = ranked(values, k=8)
    assert place.tolist() == [[1, 3, 0, 4, 5, 2, -1, -1]]
    assert value[0, :5].tolist() == [3.0, 3.0, 1.0, 0.0, 0.0]
    assert (value[0, 5:] == -INF).all()
    token = sample_logits(**row_of(value[0, :4].tolist(), rows=50))[0]
    assert set(place[0][token].tolist()) <= {0, 1, 3, 4}


def test_the_mass_that_ranks_no_higher() -> None:
    logprobs = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log().repeat(5, 1)
    mass = smaller_mass(logprobs, int64([-1, 0, 2, 3, 1]))
    assert mass.tolist() == pytest.approx([0.0, 0.125, 0.25, 0.5, 1.0], abs=1e-6)


def test_the_torch_form_draws_what_the_definition_draws() -> None:
    """Token for token, given the same probabilities, on rows of every kind."""
    prob = torch.softmax(normal(11, 1500, 24) * 3, 1)
    prob[::7] = torch.eye(24)[torch.arange(len(prob[::7])) % 24]
    seed, number = torch.arange(1500) * 977, torch.arange(1500)
    for draw, probs in ((Draw.NVIDIA, prob), (Draw.ASCEND, torch.cat([prob, torch.zeros(1500, 40)], 1))):
        assert torch.equal(
            sample_probs(probs, seed, number, draw=draw)[0],
            fast.sample_probs_vectorised(probs, seed, number, draw=draw)[0],
        )


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("sampling") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("sampling", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input

ONE, LONG = torch.ones(2), int64([3, 4])
TABLE = torch.zeros(2, 64)
ROW = {"temperature_t": ONE, "top_p_t": ONE, "top_k_t": LONG, "seed_t": LONG, "subsequence_t": LONG}
CALLS: dict[str, tuple[list[Callable[..., Any]], dict[str, Any]]] = {
    "random_words": (
        [random_words, fast.random_words_vectorised, fast.random_words_triton],
        {"seed_t": LONG, "subsequence_t": LONG, "count": 2},
    ),
    "uniforms": ([uniforms, fast.uniforms_vectorised], {"seed_t": LONG, "subsequence_t": LONG}),
    "subsequences": (
        [subsequences, fast.subsequences_vectorised],
        {"position_t": LONG, "row_t": LONG, "use": DrawUse.FRESH},
    ),
    "sample_seeds": ([sample_seeds, fast.sample_seeds_vectorised], {"seed_b": LONG, "samples": 2}),
    "sample_probs": (
        [sample_probs, fast.sample_probs_vectorised, fast.sample_probs_triton],
        {"probs_tv": TABLE, "seed_t": LONG, "subsequence_t": LONG, "draw": Draw.NVIDIA},
    ),
    "keep_prefix": (
        [keep_prefix, fast.keep_prefix_vectorised, fast.keep_prefix_triton],
        {"logits_tv": TABLE, "probs_tv": TABLE, "top_p_t": ONE, "top_k_t": LONG},
    ),
    "sample_logits": (
        [sample_logits, fast.sample_logits_vectorised, fast.sample_logits_triton],
        {"logits_tv": TABLE, **ROW, "draw": Draw.NVIDIA},
    ),
    "argmax_tokens": (
        [argmax_tokens, fast.argmax_tokens_vectorised, fast.argmax_tokens_triton],
        {"logits_tv": TABLE},
    ),
    "mask_logits": (
        [mask_logits, fast.mask_logits_vectorised],
        {
            "logits_tv": TABLE,
            "banned_v": torch.zeros(64, dtype=torch.bool),
            "no_eos_t": torch.zeros(2, dtype=torch.bool),
            "allowed_ti": torch.zeros(2, 2, dtype=torch.int32),
            "eos": 1,
        },
    ),
    "ranked": ([ranked, fast.ranked_vectorised], {"values_tv": TABLE, "k": 2}),
    "smaller_mass": ([smaller_mass, fast.smaller_mass_vectorised], {"logprobs_tv": TABLE, "token_t": LONG}),
}
NOT_A_SHAPE = {"count": 0, "samples": 0, "k": 0, "eos": 64}


def wrong(name: str, value: Any) -> Any:
    """An argument of another shape, or outside its range."""
    return NOT_A_SHAPE.get(name, value[:1, None] if isinstance(value, Tensor) else value)


@pytest.mark.parametrize(
    ("op", "name"), [(op, n) for op, (_, good) in CALLS.items() for n in good if n not in ("use", "draw")]
)
def test_values_are_refused(op: str, name: str) -> None:
    functions, good = CALLS[op]
    for function in functions:
        with pytest.raises(ValueError, match=r"^\w+( \(columns\))?: "):
            function(**good | {name: wrong(name, good[name])})


@pytest.mark.parametrize(
    ("op", "name"), [(op, n) for op, (_, good) in CALLS.items() for n, x in good.items() if isinstance(x, Tensor)]
)
def test_dtypes_are_refused(op: str, name: str) -> None:
    functions, good = CALLS[op]
    for function in functions:
        with pytest.raises(TypeError, match=f"^{name}: "):
            function(**good | {name: good[name].to(torch.float16)})


def test_every_function_refuses_by_name() -> None:
    """The errors that each docstring promises, by function."""
    bad_table, half = TABLE[0], TABLE.half()
    for error, table, row in ((ValueError, bad_table, LONG[:1]), (TypeError, half, LONG.half())):
        with pytest.raises(error):
            random_words(row if error is TypeError else row[:, None], LONG, count=1)
        with pytest.raises(error):
            fast.random_words_vectorised(row, LONG, count=1)
        with pytest.raises(error):
            fast.random_words_triton(row, LONG, count=1)
        with pytest.raises(error):
            uniforms(row, LONG)
        with pytest.raises(error):
            fast.uniforms_vectorised(row, LONG)
        with pytest.raises(error):
            subsequences(row, LONG, use=DrawUse.FRESH)
        with pytest.raises(error):
            fast.subsequences_vectorised(row, LONG, use=DrawUse.FRESH)
        with pytest.raises(error):
            sample_seeds(row[:, None] if error is ValueError else row, samples=1)
        with pytest.raises(error):
            fast.sample_seeds_vectorised(row[:, None] if error is ValueError else row, samples=1)
        with pytest.raises(error):
            sample_probs(table, LONG, LONG, draw=Draw.NVIDIA)
        with pytest.raises(error):
            fast.sample_probs_vectorised(table, LONG, LONG, draw=Draw.NVIDIA)
        with pytest.raises(error):
            fast.sample_probs_triton(table, LONG, LONG, draw=Draw.NVIDIA)
        with pytest.raises(error):
            keep_prefix(table, TABLE, ONE, LONG)
        with pytest.raises(error):
            fast.keep_prefix_vectorised(table, TABLE, ONE, LONG)
        with pytest.raises(error):
            fast.keep_prefix_triton(table, TABLE, ONE, LONG)
        with pytest.raises(error):
            sample_logits(table, **ROW, draw=Draw.NVIDIA)
        with pytest.raises(error):
            fast.sample_logits_vectorised(table, **ROW, draw=Draw.NVIDIA)
        with pytest.raises(error):
            fast.sample_logits_triton(table, **ROW, draw=Draw.NVIDIA)
        with pytest.raises(error):
            argmax_tokens(table)
        with pytest.raises(error):
            fast.argmax_tokens_vectorised(table)
        with pytest.raises(error):
            fast.argmax_tokens_triton(table)
        with pytest.raises(error):
            mask_logits(table, None, None, None, eos=0)
        with pytest.raises(error):
            fast.mask_logits_vectorised(table, None, None, None, eos=0)
        with pytest.raises(error):
            ranked(table, k=1)
        with pytest.raises(error):
            fast.ranked_vectorised(table, k=1)
        with pytest.raises(error):
            smaller_mass(table, LONG)
        with pytest.raises(error):
            fast.smaller_mass_vectorised(table, LONG)


def test_the_definition_inspects_values() -> None:
    with pytest.raises(ValueError, match=r"^subsequence_t: "):
        random_words(LONG, int64([0, -1]), count=1)
    with pytest.raises(ValueError, match=r"^subsequence_t: "):
        uniforms(LONG, int64([0, -1]))
    with pytest.raises(ValueError, match=r"^position_t: expected numbers from 0 on"):
        subsequences(int64([-1]), int64([0]), use=DrawUse.FRESH)
    with pytest.raises(ValueError, match=r"^position_t: expected stream numbers below"):
        subsequences(int64([2**30]), int64([0]), use=DrawUse.FRESH)
    for name, bad in (("logits_tv", {"logits_tv": TABLE * NAN}), ("probs_tv", {"probs_tv": TABLE - 1})):
        with pytest.raises(ValueError, match=f"^{name}: "):
            keep_prefix(**CALLS["keep_prefix"][1] | bad)
    for name, value in (("top_p_t", ONE * 2), ("top_k_t", LONG * 0)):
        with pytest.raises(ValueError, match=f"^{name}: "):
            keep_prefix(**CALLS["keep_prefix"][1] | {name: value})
    with pytest.raises(ValueError, match=r"^values_tv: "):
        ranked(TABLE * NAN, k=1)
    with pytest.raises(ValueError, match=r"^token_t: "):
        smaller_mass(TABLE, int64([64, 0]))


@pytest.mark.parametrize("op", ["sample_probs", "sample_logits", "argmax_tokens"])
def test_rows_without_columns_are_refused(op: str) -> None:
    functions, good = CALLS[op]
    name = next(iter(good))
    for function in functions:
        with pytest.raises(ValueError, match=f"^{name}: expected at least one column"):
            function(**good | {name: TABLE[:, :0]})
        if "draw" in good:
            with pytest.raises(ValueError, match=rf"^{name} \(columns\): expected a multiple of 64"):
                function(**good | {name: TABLE[:, :40], "draw": Draw.ASCEND})


def test_columns_that_are_not_contiguous_are_declined() -> None:
    turned = torch.zeros(64, 2).T
    with pytest.raises(NotImplementedError, match=r"^probs_tv: "):
        fast.sample_probs_triton(turned, LONG, LONG, draw=Draw.NVIDIA)
    with pytest.raises(NotImplementedError, match=r"^logits_tv: "):
        fast.keep_prefix_triton(turned, TABLE, ONE, LONG)
    with pytest.raises(NotImplementedError, match=r"^logits_tv: "):
        fast.argmax_tokens_triton(turned)
    with pytest.raises(NotImplementedError, match=r"^logits_tv: "):
        fast.sample_logits_triton(turned, **ROW, draw=Draw.NVIDIA)
    wide = torch.zeros(1, 1).expand(2, 2**20 + 1)
    with pytest.raises(NotImplementedError, match=r"^logits_tv: expected at most"):
        fast.sample_logits_triton(wide, **ROW, draw=Draw.NVIDIA)


def test_buffers_that_do_not_fit_are_refused() -> None:
    for out, error in ((int64([[0]]), ValueError), (torch.zeros(2, 2), TypeError)):
        with pytest.raises(error, match=r"^out: "):
            fast.random_words_triton(LONG, LONG, count=2, out=out)
    for out, error in ((torch.zeros(1, 1, dtype=torch.bool), ValueError), (TABLE, TypeError)):
        with pytest.raises(error, match=r"^out: "):
            fast.keep_prefix_triton(TABLE, TABLE, ONE, LONG, out=out)
