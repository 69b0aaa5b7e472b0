"""Each rule passes what honest arithmetic produces and fails a single planted fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from deeptwin.parity import diagnose
from deeptwin.parity.bf16_unit import lse_on_sm90, unit_dots
from deeptwin.parity.card import case_rng, load_card
from deeptwin.parity.floats import ordered, same_bytes, ulp_distance
from deeptwin.parity.judge import _nonfinite_mismatch
from deeptwin.parity.oracles import OracleSet
from deeptwin.parity.rules import LSE, Bitwise, Budget, OfStored, OneRounding, TopK

U = 2.0**-8


@dataclass
class Fixed:
    """Oracles given as tensors."""

    semantic: torch.Tensor
    contract: torch.Tensor
    rival: torch.Tensor
    marks: list = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


def attention_like(rows=64, width=128, seed=0):
    """A truth, and two independent honest bf16 evaluations of it."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(rows, width, generator=g, dtype=torch.float64)

    def honest():
        noise = torch.randn(rows, width, generator=g, dtype=torch.float64) * U * 0.3
        return (truth * (1 + noise)).float().bfloat16()

    return Fixed(semantic=truth, contract=honest().double(), rival=honest().float()), honest()


# floats


def test_ordered_integers_are_one_apart_for_neighbours():
    x = torch.tensor([-1.0, -(2.0**-149), -0.0, 0.0, 2.0**-149, 1.0])
    steps = ordered(x)
    assert steps[2] == steps[3]
    assert steps[1] == steps[2] - 1
    assert steps[4] == steps[3] + 1
    assert ulp_distance(torch.tensor([1.0]), torch.tensor([1.0 + 2.0**-23])).item() == 1


def test_same_bytes_tells_signed_zeros_apart_and_nan_payloads_together():
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bytes(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bytes(torch.zeros(2), torch.zeros(1, 2))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


# budget


def test_budget_passes_honest_arithmetic():
    oracles, got = attention_like()
    assert Budget().judge(got, oracles).ok


def scores_like(seed, visible):
    """Scores of which row i sees `visible[i]`, and two honest fp32 evaluations."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(len(visible), 96, generator=g, dtype=torch.float64)

    def honest():
        return (truth * (1 + torch.randn(truth.shape, generator=g, dtype=torch.float64) * 2.0**-24)).float()

    got, rival = honest(), honest()
    hidden = torch.arange(96) >= torch.tensor(visible)[:, None]
    for x in (truth, got, rival):
        x.masked_fill_(hidden, -torch.inf)
    return Fixed(semantic=truth, contract=truth, rival=rival), got


@pytest.mark.parametrize("visible", [(2, 90, 90), (90, 2, 90), (90, 90, 2), (0, 90, 3), (96, 96, 96)])
def test_a_row_that_sees_little_is_no_yardstick_of_its_own(visible):
    rule = Budget(row=3.0, total=2.0, bias=1.0)
    for seed in range(40):
        oracles, got = scores_like(seed, visible)
        assert rule.judge(got, oracles).ok, seed
        worst = int(torch.tensor(visible).argmax())
        got[worst, : visible[worst]] *= 1 + 2.0**-17
        assert not rule.judge(got, oracles).ok, seed


def planted(name, got):
    x = got.clone()
    if name == "row zeroed":
        x[3] = 0
    elif name == "rows shifted":
        x = x.roll(1, 0)
    elif name == "3 % scale":
        x = (x.float() * 1.03).bfloat16()
    elif name == "one element off by one":
        x[5, 7] += 1
    elif name == "truncated":
        x = ((got.float() * (1 - U * 0.5)).view(torch.int32) & -65536).view(torch.float32).bfloat16()
    elif name == "one ulp up":
        x = (x.view(torch.int16) + 1).view(torch.bfloat16)
    return x


@pytest.mark.parametrize(
    "fault", ["row zeroed", "rows shifted", "3 % scale", "one element off by one", "truncated", "one ulp up"]
)
def test_budget_fails_a_planted_fault(fault):
    oracles, got = attention_like()
    judgement = Budget().judge(planted(fault, got), oracles)
    assert not judgement.ok
    assert judgement.used > 1


def test_the_global_difference_alone_would_pass_a_zeroed_row():
    oracles, got = attention_like(rows=1024, width=1024)
    judgement = Budget().judge(planted("row zeroed", got), oracles)
    assert judgement.metrics["D"] < 1e-3
    assert not judgement.ok


def test_a_nan_never_passes_a_budget():
    oracles, got = attention_like()
    got[0, 0] = torch.nan
    assert not Budget().judge(got, oracles).ok


def test_a_row_that_must_be_zero_has_no_tolerance():
    truth = torch.zeros(2, 8, dtype=torch.float64)
    oracles = Fixed(semantic=truth, contract=truth, rival=truth.float())
    assert Budget().judge(torch.zeros(2, 8, dtype=torch.bfloat16), oracles).ok
    off = torch.zeros(2, 8, dtype=torch.bfloat16)
    off[1, 1] = 2.0**-126
    assert not Budget().judge(off, oracles).ok


def test_subnormal_results_may_be_flushed_but_not_wrong():
    truth = torch.full((40, 64), 3e-39, dtype=torch.float64)
    oracles = Fixed(semantic=truth, contract=truth, rival=truth.float())
    assert Budget().judge(torch.zeros(40, 64, dtype=torch.bfloat16), oracles).ok
    assert not Budget().judge(torch.full((40, 64), 1e-36, dtype=torch.bfloat16), oracles).ok


def test_an_lse_near_zero_is_judged_at_the_size_of_its_terms():
    truth = torch.full((4, 1), 1e-3, dtype=torch.float64)
    oracles = Fixed(semantic=truth, contract=truth, rival=truth.float())
    assert LSE.judge((truth + 2.0**-23).float(), oracles).ok
    assert not LSE.judge((truth + 2.0**-19).float(), oracles).ok


def test_lse_in_base_2_fails_and_is_diagnosed():
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(4, 16, generator=g, dtype=torch.float64) * 3 + 5
    oracles = Fixed(semantic=truth, contract=truth, rival=truth.float())
    wrong = (truth * 1.4426950408889634).float()
    assert LSE.judge(truth.float(), oracles).ok
    assert not LSE.judge(wrong, oracles).ok
    assert "log base" in diagnose.diagnose(wrong, oracles, LSE)


# one rounding, bitwise


def test_one_rounding_passes_rare_ulps_and_fails_frequent_ones():
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(4, 5000, generator=g, dtype=torch.float64)
    oracles = Fixed(semantic=truth, contract=truth, rival=truth.float())
    right = truth.float().bfloat16()
    few = right.clone()
    few.view(torch.int16)[0, :10] += 1
    assert OneRounding().judge(right, oracles).ok
    assert OneRounding().judge(few, oracles).ok
    many = right.clone()
    many.view(torch.int16)[0, :200] += 1
    assert not OneRounding().judge(many, oracles).ok
    far = right.clone()
    far.view(torch.int16)[1, 1] += 2
    assert not OneRounding().judge(far, oracles).ok
    truncated = (truth.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert "truncates" in diagnose.diagnose(truncated, oracles, OneRounding())


def test_cancellation_counts_ulps_at_the_size_of_the_row():
    truth = torch.ones(1, 64, dtype=torch.float64)
    truth[0, 0] = 2.0**-30
    oracles = Fixed(semantic=truth, contract=truth, rival=truth.float())
    got = truth.float().bfloat16()
    got[0, 0] = 2.0**-26
    assert not OneRounding().judge(got, oracles).ok
    assert OneRounding(cancellation=2.0**-15).judge(got, oracles).ok
    got[0, 0] = 2.0**-20
    assert not OneRounding(cancellation=2.0**-15).judge(got, oracles).ok


def test_bitwise_sees_the_sign_of_zero_and_names_the_bytes():
    truth = torch.zeros(2, 3)
    got = truth.clone()
    got[1, 2] = -0.0
    judgement = Bitwise().judge(got, Fixed(semantic=truth, contract=truth, rival=truth))
    assert not judgement.ok
    assert judgement.worst.index == (1, 2)
    assert "0x80000000" in judgement.worst.got


def test_bitwise_leaves_the_sign_of_a_computed_nan_open_but_not_that_of_a_code():
    truth = torch.tensor([[torch.nan, 1.0]], dtype=torch.bfloat16)
    got = truth.clone()
    got[0, 0] = -torch.nan
    assert Bitwise().judge(got, Fixed(semantic=truth, contract=truth, rival=truth)).ok
    got[0, 0] = 1.0
    assert not Bitwise().judge(got, Fixed(semantic=truth, contract=truth, rival=truth)).ok
    codes = torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    other = torch.tensor([0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert not Bitwise().judge(other, Fixed(semantic=codes, contract=codes, rival=codes)).ok
    empty = torch.zeros(0, 4)
    assert Bitwise().judge(empty, Fixed(semantic=empty, contract=empty, rival=empty)).ok


# top-k

SCORES = torch.tensor([[3.0, 1.0, 2.0, 2.0, torch.nan, -torch.inf, 0.5]])


def test_equal_bytes_of_nothing_pass():
    nothing = torch.zeros(0, 3, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.uint8):
        assert Bitwise().judge(nothing.to(dtype), Fixed(semantic=nothing, contract=nothing, rival=nothing)).ok


@pytest.mark.parametrize(
    ("chosen", "ties", "problem"),
    [
        ([0, 2, -1], "lower", "indices chosen"),
        ([0, 2], "lower", None),
        ([2, 0], "lower", None),
        ([0, 3], "lower", "tie at the k-th place"),
        ([0, 3], "any", None),
        ([0, 1], "lower", "exceeds a chosen one"),
        ([0, 0], "lower", "appears twice"),
        ([0, 9], "lower", "out of range"),
        ([0, 4], "lower", "NaN or masked"),
    ],
)
def test_top_k(chosen, ties, problem):
    got = torch.tensor([chosen], dtype=torch.int32)
    oracles = Fixed(semantic=got, contract=got, rival=got, arguments={"scores_ts": SCORES})
    judgement = TopK(scores="scores_ts", ties=ties).judge(got, oracles)
    assert judgement.ok is (problem is None)
    if problem:
        assert problem in judgement.message


def test_top_k_with_fewer_valid_scores_than_places():
    got = torch.tensor([[0, 2, 3, 1, 6, -1, -1]], dtype=torch.int32)
    oracles = Fixed(semantic=got, contract=got, rival=got, arguments={"scores_ts": SCORES})
    assert TopK(scores="scores_ts").judge(got, oracles).ok


def doubled(arguments, outputs, num):
    if outputs["first"].shape != arguments["like"].shape:
        raise ValueError("first: another shape")
    return num.bf16(num.wide(outputs["first"]) * 2)


@pytest.mark.parametrize(
    ("first", "second", "is_right"),
    [
        # the second step follows the first, wherever that went
        ([1.0, 3.0], [2.0, 6.0], True),
        ([1.0, 5.0], [2.0, 10.0], True),
        ([1.0, 5.0], [2.0, 6.0], False),
        ([1.0], [2.0], False),
    ],
)
def test_a_later_step_is_judged_on_what_was_stored(first, second, is_right):
    expected = torch.tensor([2.0, 6.0], dtype=torch.float64)
    oracles = Fixed(expected, expected, expected.float(), arguments={"like": torch.zeros(2)})
    rule = OfStored(rule=Bitwise(), again=doubled, outputs={"first": torch.tensor(first).bfloat16()})
    assert rule.judge(torch.tensor(second).bfloat16(), oracles).ok == is_right


# non-finite values: kind by kind, before anything is zeroed (U77)


@pytest.mark.parametrize(
    ("got", "expected", "side"),
    [
        ([1.0, torch.nan], [1.0, 2.0], "NaN only in the candidate"),
        ([1.0, 2.0], [1.0, torch.nan], "NaN only in the reference"),
        ([1.0, torch.inf], [1.0, -torch.inf], r"+inf only in the candidate"),
        ([1.0, 2.0], [1.0, -torch.inf], "-inf only in the reference"),
    ],
)
def test_non_finite_positions_must_match(got, expected, side):
    verdict = _nonfinite_mismatch(torch.tensor(got), torch.tensor(expected), "y")
    assert verdict is not None
    assert side in verdict.message


def test_nan_in_both_is_no_mismatch():
    x = torch.tensor([1.0, torch.nan, -torch.inf])
    assert _nonfinite_mismatch(x, x.clone(), "y") is None


# diagnoses


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda o: o * 1.0625, "constant scale"),
        (lambda o: o.roll(1, 0), "shifted by 1 along axis 0"),
        (lambda o: -o, "-1 times"),
        (lambda o: torch.cat([o[:, 0::2], o[:, 1::2]], -1), "half-split order"),
        (lambda o: torch.where(torch.arange(64)[:, None] == 3, 0, o), "rows are zero"),
    ],
)
def test_a_diagnosis_fits_its_fault(change, text):
    g = torch.Generator().manual_seed(1)
    truth = torch.randn(64, 16, generator=g, dtype=torch.float64)
    oracles = Fixed(semantic=truth, contract=truth, rival=truth.float())
    assert text in diagnose.diagnose(change(truth).float(), oracles, Budget())


# the bf16 unit of SM90


def test_the_unit_cuts_toward_zero_below_the_largest_exponent() -> None:
    def one_and_eight(first: float, small: float) -> float:
        q, k = (torch.tensor([[x, *[y] * 8]]).bfloat16() for x, y in ((first, 2.0**-13), (abs(first), small)))
        return unit_dots(q, k).item()

    # beside a product of exponent 0 the bit 2^-25 counts, 2^-26 does not
    assert one_and_eight(1.0, 2.0**-12) == 1 + 2.0**-22
    assert one_and_eight(1.0, 2.0**-13) == 1.0
    # 1.5 · 1.5 has the exponent of its factors all the same
    assert one_and_eight(1.5, 2.0**-12) == 2.25 + 2.0**-22
    # the sum is cut to fp32 toward zero
    assert one_and_eight(-1.0, 2.0**-12) == -1 + 2.0**-22
    assert one_and_eight(-1.0, 2.0**-13) == -1.0
    assert unit_dots(torch.tensor([[1.0, 2.0**-12]]).bfloat16(), torch.tensor([[1.0, 2.0**-12]]).bfloat16()).item() == 1


def test_an_lse_behind_the_unit_uses_what_a_device_left_and_sums_of_parts_pass() -> None:
    """The figure is what the kernel with specialised warps used on an H200 (golden/records/sm90)."""
    op = load_card("sparse_attn").op("sparse_attn")
    case = op.case("t2-h64-d512v512-s1400-k640-bf16-peaked-sink_normal-holes_some-len_none")
    inputs = op.draw(case, case_rng("sparse_attn", op.name, case.id, 0))
    output = next(o for o in op.outputs if o.name == "lse_th")
    oracles = OracleSet(op, inputs).of(output)
    assert LSE.judge(lse_on_sm90(inputs), oracles).used == 1.5313504589867284
    assert LSE.judge(lse_on_sm90(inputs, part=128), oracles).ok
