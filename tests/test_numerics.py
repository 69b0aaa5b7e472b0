"""The three arithmetics: what each mark rounds to, and that CONTRACT does not depend on the order of summation."""

from __future__ import annotations

import pytest
import torch

from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, round_up_to_power_of_two

E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
ORACLES = (SEMANTIC, CONTRACT, RIVAL)


def bf16(g, *shape, spread=1.0):
    return (torch.randn(*shape, generator=g) * spread).bfloat16()


def operands(kind, g, rows, inner):
    if kind == "bf16":
        return bf16(g, rows, inner), bf16(g, rows, inner)
    if kind == "fp8":
        return tuple(torch.randn(rows, inner, generator=g).to(torch.float8_e4m3fn) for _ in range(2))
    if kind == "fp4":
        codes = torch.randint(0, 8, (2, rows, inner), generator=g)
        signs = torch.randint(0, 2, (2, rows, inner), generator=g) * 2 - 1
        return tuple(E2M1_VALUES[codes] * signs)
    # 11 significant bits, exponents spread over 28 bits in all: 14 for each operand
    whole = torch.randint(-2047, 2048, (2, rows, inner), generator=g, dtype=torch.float64)
    return tuple(whole * torch.exp2(torch.randint(0, 14, (2, rows, inner), generator=g).double()))


def product(num, a, b):
    return num.einsum("tk,sk->ts", num.wide(a), num.wide(b))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp4", "11 bits"])
def test_contract_is_free_of_order_for_narrow_operands(kind):
    g = torch.Generator().manual_seed(7)
    flips = 0
    for inner in (1, 7, 64, 500, 4096):
        a, b = operands(kind, g, 24, inner)
        whole = product(CONTRACT, a, b)
        order = torch.randperm(inner, generator=g)
        flips += int((product(CONTRACT, a[:, order], b[:, order]) != whole).sum())
        # split in two unrounded parts and merged, as a split-K kernel with exact partials would
        half = inner // 2
        parts = product(SEMANTIC, a[:, :half], b[:, :half]) + product(SEMANTIC, a[:, half:], b[:, half:])
        flips += int((parts.float().double() != whole).sum())
        for row in (0, 11, 23):
            flips += int((product(CONTRACT, a[row : row + 1], b) != whole[row : row + 1]).sum())
    assert flips == 0


def test_contract_sums_are_free_of_order_for_narrow_operands():
    g = torch.Generator().manual_seed(7)
    x = bf16(g, 64, 7168)
    squares = CONTRACT.wide(x) * CONTRACT.wide(x)
    order = torch.randperm(7168, generator=g)
    assert torch.equal(CONTRACT.sum(squares, -1), CONTRACT.sum(squares[:, order], -1))
    assert torch.equal(CONTRACT.sum(squares, -1)[3:4], CONTRACT.sum(squares[3:4], -1))


def test_fp32_operands_are_order_free_within_the_stated_bound():
    g = torch.Generator().manual_seed(7)
    a, b = (torch.randn(32, 4096, generator=g) for _ in range(2))
    order = torch.randperm(4096, generator=g)
    moved = product(SEMANTIC, a[:, order], b[:, order]) - product(SEMANTIC, a, b)
    bound = 2.0**-50 * product(SEMANTIC, a.abs(), b.abs())
    assert (moved.abs() <= bound).all()
    assert (moved != 0).any()  # the bound is about something


def test_rival_depends_on_the_order():
    g = torch.Generator().manual_seed(7)
    a, b = operands("bf16", g, 24, 4096)
    order = torch.randperm(4096, generator=g)
    changed = product(RIVAL, a[:, order], b[:, order]) != product(RIVAL, a, b)
    assert changed.double().mean() > 0.5


def test_rival_takes_blocks_in_reverse():
    cancels, loses = torch.zeros(2, 192)
    cancels[0], cancels[64], cancels[128] = 1.0, 2.0**25, -(2.0**25)
    loses[0], loses[64], loses[128] = -(2.0**25), 2.0**25, 1.0
    assert RIVAL.sum(cancels, -1).item() == 1.0
    assert RIVAL.sum(loses, -1).item() == 0.0


def test_contractions_are_rounded_once_to_fp32_under_contract_only():
    x = torch.tensor([[1.0, 2.0**-30]], dtype=torch.float64)
    assert SEMANTIC.sum(x, -1).item() == 1.0 + 2.0**-30
    assert CONTRACT.sum(x, -1).item() == 1.0
    assert CONTRACT.einsum("tk,k->t", x, torch.ones(2, dtype=torch.float64)).item() == 1.0


def test_equations_need_two_operands_and_an_output():
    with pytest.raises(ValueError, match="equation: expected"):
        CONTRACT.einsum("ab,bc", torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(ValueError, match="equation: expected"):
        CONTRACT.einsum("a,b,c->abc", torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("num", ORACLES, ids=lambda n: n.name)
def test_einsum_with_and_without_a_summed_letter(num):
    a, b = num.wide(torch.arange(6.0).reshape(2, 3)), num.wide(torch.arange(12.0).reshape(3, 4))
    assert torch.equal(num.einsum("ij,jk->ik", a, b), a @ b)
    assert torch.equal(num.einsum("ij,jk->ijk", a, b), a[:, :, None] * b[None])


# marks


def test_marks_round_through_fp32():
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert CONTRACT.bf16(x).item() == 1.0  # rounded to 1 + 2^-8 in fp32 first: a tie, to even
    assert CONTRACT.store(x, torch.bfloat16).item() == 1.0


@pytest.mark.parametrize("num", ORACLES, ids=lambda n: n.name)
def test_values_stay_in_the_carrier(num):
    x = torch.randn(8)
    marks = (num.f32, num.bf16, num.fp16, num.e4m3, num.e5m2, num.e2m1, num.ue8m0)
    assert all(mark(num.wide(x.abs() + 1)).dtype == num.carrier for mark in marks)


def test_semantic_marks_are_the_identity():
    x = torch.randn(64, dtype=torch.float64)
    for mark in (SEMANTIC.f32, SEMANTIC.bf16, SEMANTIC.fp16, SEMANTIC.e4m3, SEMANTIC.e5m2, SEMANTIC.e2m1):
        assert torch.equal(mark(x), x)
    assert torch.equal(SEMANTIC.store(x, torch.bfloat16, free_scale=True), x)


@pytest.mark.parametrize("num", [CONTRACT, RIVAL], ids=lambda n: n.name)
@pytest.mark.parametrize(
    ("mark", "value", "rounded"),
    [
        ("bf16", 1.00390625, 1.0),
        ("bf16", 1.01171875, 1.015625),
        ("fp16", 1 + 2.0**-11, 1.0),
        ("fp16", 65520.0, torch.inf),
        ("e4m3", 17.0, 16.0),
        ("e4m3", 19.0, 20.0),
        ("e4m3", 432.0, 448.0),
        ("e4m3", 1e9, 448.0),
        ("e4m3", torch.inf, 448.0),
        ("e4m3", -torch.inf, -448.0),
        ("e4m3", 2.0**-10, 0.0),
        ("e4m3", 1.5 * 2.0**-9, 2.0**-8),
        ("e5m2", 61440.0, 57344.0),
        ("e5m2", 1.125, 1.0),
        ("e2m1", 0.25, 0.0),
        ("e2m1", 0.75, 1.0),
        ("e2m1", 1.25, 1.0),
        ("e2m1", 1.75, 2.0),
        ("e2m1", 2.5, 2.0),
        ("e2m1", 3.5, 4.0),
        ("e2m1", 5.0, 4.0),
        ("e2m1", -5.0001, -6.0),
        ("e2m1", 100.0, 6.0),
        ("ue8m0", 1.0, 1.0),
        ("ue8m0", 1.0000001, 2.0),
        ("ue8m0", 0.0, 2.0**-127),
    ],
)
def test_a_mark_rounds_as_its_format_does(num, mark, value, rounded):
    assert getattr(num, mark)(num.wide(torch.tensor([value]))).item() == rounded


@pytest.mark.parametrize("mark", ["bf16", "fp16", "e4m3", "e5m2", "e2m1"])
def test_nan_and_the_sign_of_zero_survive(mark):
    out = getattr(CONTRACT, mark)(torch.tensor([torch.nan, -0.0], dtype=torch.float64))
    assert out[0].isnan()
    assert torch.signbit(out[1])


def test_e2m1_is_the_nearest_code_with_ties_to_the_even_one():
    x = CONTRACT.f32(torch.linspace(-8, 8, 64001, dtype=torch.float64))
    distance = (x.abs()[:, None] - E2M1_VALUES).abs()
    least = distance.min(-1, keepdim=True).values
    nearest = distance == least
    even = torch.arange(8) % 2 == 0
    code = torch.where(nearest.sum(-1) == 1, nearest.int().argmax(-1), (nearest & even).int().argmax(-1))
    assert torch.equal(CONTRACT.e2m1(x), torch.copysign(E2M1_VALUES[code], x))


@pytest.mark.parametrize("k", range(-30, 30))
def test_scales_are_rounded_up_exactly_where_a_logarithm_fails(k):
    power = torch.tensor([2.0**k])
    above = torch.nextafter(power, torch.tensor([torch.inf]))
    assert round_up_to_power_of_two(power).item() == 2.0**k
    assert round_up_to_power_of_two(above).item() == 2.0 ** (k + 1)


def test_a_free_scale_is_free_only_under_rival():
    p = torch.rand(4096, dtype=torch.float64)
    assert torch.equal(CONTRACT.store(p, torch.bfloat16, free_scale=True), CONTRACT.store(p, torch.bfloat16))
    fixed, free = (RIVAL.store(RIVAL.wide(p), torch.bfloat16, free_scale=f) for f in (False, True))
    assert (fixed != free).double().mean() > 0.5
    assert ((free - p).abs() <= 2.0**-8 * p).all()


def test_store_refuses_other_dtypes():
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        CONTRACT.store(torch.ones(1), torch.float64)


def test_an_observer_is_told_the_input_of_every_mark():
    seen = []
    num = CONTRACT.observed(lambda name, x: seen.append((name, x.item())))
    num.e4m3(num.f32(torch.tensor(17.0, dtype=torch.float64)))
    num.store(torch.tensor(3.1, dtype=torch.float64), torch.bfloat16)
    assert seen == [("f32", 17.0), ("e4m3", 17.0), ("bf16", 3.1)]
    assert CONTRACT.observer is None
