"""The TileLang gates refuse what they should, say why, and never say passed. Builds are skipped without the tools."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from deeptwin.parity.builds import tilelang_ascend, tilelang_cuda, tilelang_lower
from deeptwin.parity.builds.spec import BuildCase, Expect
from deeptwin.parity.builds.tilelang_lower import Lowered, Product, Refused
from deeptwin.parity.builds.tilelang_outcome import Row, judge, tile_faults
from deeptwin.parity.card import load_card
from deeptwin.parity.outcome import EXIT_NOT_RUN, Outcome, Status, exit_status

BROKEN = Path(__file__).parent / "broken" / "tilelang_programs.py"
LOWER = functools.cache(tilelang_lower.lower)
CARD = load_card("quant")  # the broken programs are filed under a card that is not their own
NO_CUDA, NO_ASCEND = tilelang_cuda.unsupported(), tilelang_lower.missing()
needs_cuda = pytest.mark.skipif(bool(NO_CUDA), reason=f"sm100: {NO_CUDA}")
needs_ascend = pytest.mark.skipif(bool(NO_ASCEND), reason=f"ascend950: {NO_ASCEND}")


@pytest.fixture(autouse=True)
def lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tests look at one program: it is lowered for the first of them."""
    for builder in (tilelang_cuda, tilelang_ascend):
        monkeypatch.setattr(builder, "lower", LOWER)


def case(name: str, key: str, **expected: object) -> BuildCase:
    expect = Expect(reason="a program of the tests", **({"mma": None} | expected))  # type: ignore[arg-type]
    spec = f"{BROKEN}:{name}"
    return BuildCase(name=name, kernel=spec, launch=spec, dsl="tilelang", expect={key: expect})


def compiled(name: str, mma: str | None) -> Outcome:
    (outcome,) = tilelang_cuda.build(CARD, CARD.ops[0], case(name, "sm100", mma=mma), "sm100")
    return outcome


def lowered(name: str, mma: str | None) -> Outcome:
    (outcome,) = tilelang_ascend.build(CARD, CARD.ops[0], case(name, tilelang_ascend.KEY, mma=mma))
    return outcome


# SM100


@needs_cuda
def test_a_right_program_is_compiled_and_measured() -> None:
    outcome = compiled("right", "tcgen05")
    assert (outcome.status, outcome.message, outcome.id) == (
        Status.COMPILED,
        "",
        f"quant.{CARD.ops[0].name}/tilelang/right/sm100",
    )
    assert (outcome.metrics["tcgen05"], outcome.metrics["mma.sync"], outcome.metrics["tmem"]) == (8, 0, 128)
    assert outcome.metrics["shared"] == 2 * 128 * 64 * 2 + 12  # two tiles, a barrier, an address


@needs_cuda
@pytest.mark.parametrize(
    ("name", "mma", "cause"),
    [
        (
            "falls_back_to_mma_sync",
            "tcgen05",
            r"silent fall-back: 128 mma\.sync instructions where tcgen05 is declared",
        ),
        ("overflows_shared_memory", "tcgen05", r"shared: 262156 bytes of shared memory, at most 232448 declared"),
        ("overflows_tensor_memory", "tcgen05", r"768 TMEM columns .* only has 512 columns"),
        ("spills", None, r"spill: \d{4} bytes of stack a thread \(\d+ loads and stores of local memory\)"),
        ("drops_the_end_of_k", "mma.sync", r"block_K \(24\) must be a multiple of .* \(16\)"),
        ("is_wrong_for_odd_eights", "mma.sync", r"128 x 24 x 64 of bfloat16, its n is 8 modulo 16.*U81"),
        ("right", "block_scale", r"expected block_scale .*, found 8 tcgen05"),
    ],
)
def test_a_broken_program_is_refused_by_name(name: str, mma: str | None, cause: str) -> None:
    outcome = compiled(name, mma)
    assert outcome.status is Status.MISMATCH
    assert re.search(cause, outcome.message), outcome.message


def test_without_a_compiler_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilelang_cuda, "find_nvcc", lambda: None)
    monkeypatch.setattr(tilelang_cuda, "missing", lambda: "")
    outcome = compiled("right", "tcgen05")
    assert outcome.status is Status.UNSUPPORTED
    assert "nvcc was not found" in outcome.message
    assert exit_status([outcome]) == EXIT_NOT_RUN


# Ascend 950


@needs_ascend
@pytest.mark.parametrize(("name", "mma", "products"), [("ascend_right", None, 0), ("ascend_right_product", "cube", 1)])
def test_a_right_program_is_lowered_and_measured(name: str, mma: str | None, products: int) -> None:
    outcome = lowered(name, mma)
    assert (outcome.status, outcome.message, outcome.check) == (Status.LOWERED, "", tilelang_ascend.KEY)
    assert outcome.metrics["mma"] == products
    assert outcome.metrics["ub_bytes"] == (0 if products else 2 * 2 * 256 * 4)  # two rows in flight, each way


@needs_ascend
@pytest.mark.parametrize(
    ("name", "mma", "cause"),
    [
        ("overflows_the_unified_buffer", None, r'scheduling failed: scope "shared" capacity'),
        ("overflows_the_accumulator", "cube", r'scope "shared\.l0c" capacity 262144 is insufficient .* 524288'),
        ("stores_what_nobody_wrote", None, r"lowers with a warning: .*`y` is read before anything writes it"),
        ("is_not_scheduled_as_asked", None, r'lowers with a warning: .*multi-buffering for buffer "x"'),
        ("casts_without_a_vector_instruction", None, r'unsupported expr: T\.Cast\("float8_e4m3fn"'),
        ("multiplies_bytes", "cube", r"64 x 128 x 128 of int8, 8-bit integer products .*U84"),
        ("ascend_right", "cube", r"expected one on the cube unit, found none"),
        ("ascend_right_product", None, r"none declared, found 1 on the cube unit"),
    ],
)
def test_a_broken_ascend_program_is_refused_by_name(name: str, mma: str | None, cause: str) -> None:
    outcome = lowered(name, mma)
    assert outcome.status is Status.MISMATCH
    assert re.search(cause, outcome.message), outcome.message


def test_without_tilelang_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilelang_ascend, "missing", lambda: "tilelang is not installed")
    outcome = lowered("ascend_right", None)
    assert (outcome.status, exit_status([outcome])) == (Status.UNSUPPORTED, EXIT_NOT_RUN)


def test_every_memory_of_a_core_has_a_limit() -> None:
    sizes = {"shared": 253953, "shared.l1": 524288, "shared.l0a": 65537, "shared.new": 1}
    program = Lowered(source="", memory=sizes, products=(), seconds=0)
    found = tilelang_ascend.faults(program, {"mma": 0}, Expect(mma=None))
    assert found == [
        "unified buffer overflow: 253953 bytes of 253952",
        "L0A overflow: 65537 bytes of 65536",
        "shared.new overflow: 1 bytes of 0",
    ]
    (fault,) = tilelang_ascend.faults(
        Lowered(source="", memory={}, products=(), seconds=0), {"mma": 0}, Expect(mma="wgmma")
    )
    assert "expected 'cube' or None" in fault


def test_instructions_of_the_chip_are_counted_by_kind() -> None:
    source = """
    __simd_vf__ inline void f(__ubuf__ float* x) { auto a = simd_inst::vcvt<float>(simd_inst::vld(x), v); }
    asc_sync_notify(PIPE_V, PIPE_M, 0); asc_copy_gm2ub_align(a, b); ascend_gemm_l1<64, 512, true>(c, a, b);
    asc_mmad(c, a, b);
    """
    metrics = tilelang_ascend.measure(Lowered(source=source, memory={"shared": 7}, products=(), seconds=0))
    assert (metrics["mma"], metrics["vector_functions"], metrics["vector_instructions"]) == (2, 1, 2)
    assert (metrics["copies"], metrics["syncs"], metrics["ub_bytes"], metrics["l1_bytes"]) == (1, 1, 7, 0)


def test_a_named_barrier_belongs_to_one_role() -> None:
    source = """
  if (((int)threadIdx.x) < 128) {
    tl::__sync_thread_partial(3, 128);
tl::cp_async_gs<16>(written, at_the_margin);
    for (int i = 0; i < n; ++i) {
      tl::__sync_thread_partial(3, 128);
    }
  } else {
    if (((int)threadIdx.x) < 256) {
      tl::__sync_thread_partial(4, 128);
    } else {
      if (whole) {
        tl::__sync_thread_partial(5, 128);
      } else {
        tl::__sync_thread_partial(THIRD, 128);
      }
    }
  }
"""
    assert tilelang_cuda.barrier_faults(source.replace("THIRD", "5")) == []
    for taken in ("3", "4"):
        fault = f"named barrier {taken} is shared by 2 roles"
        assert tilelang_cuda.barrier_faults(source.replace("THIRD", taken)) == [fault]


# verdicts


def row() -> Row:
    return Row(card=CARD, op=CARD.ops[0], case=case("right", "sm100"), arch="sm100", check="sm100")


def test_an_expected_failure_must_be_that_failure() -> None:
    expect = Expect(mma=None, fails="does not fit", reason="the tile is too large")

    def refuse() -> tuple[dict[str, float], list[str]]:
        raise Refused("it does not fit")

    known = judge(row(), expect, Status.COMPILED, refuse)
    assert (known.status, known.message) == (Status.KNOWN_FAILURE, "the tile is too large: it does not fit")
    for numbers, faults in (({"registers": 1.0}, []), ({}, ["something else"])):
        outcome = judge(row(), expect, Status.COMPILED, lambda found=(numbers, faults): found)
        assert outcome.status is Status.MISMATCH
        assert outcome.diagnosis == "expected failure"


def test_tiles_that_compute_wrongly_are_named() -> None:
    deep = Product(m=64, n=64, k=24, dtype="bfloat16")
    assert ["U80" in fault for fault in tile_faults([deep, deep], npu=False)] == [True]
    assert [f[-5:] for f in tile_faults([Product(m=64, n=40, k=16, dtype="bfloat16")], npu=False)] == ["(U81)"]
    small = Product(m=64, n=64, k=32, dtype="int8")
    assert tile_faults([small], npu=False) == []
    assert [f[-5:] for f in tile_faults([small], npu=True)] == ["(U84)"]
    fine = [Product(m=64, n=n, k=32, dtype=dtype) for n in (16, 48, 256) for dtype in ("bfloat16", "float8_e4m3fn")]
    assert tile_faults(fine, npu=True) == []


# the process that lowers


def test_a_log_is_reduced_to_its_cause() -> None:
    trace = 'Traceback (most recent call last):\n  File "<unknown>", line 0, in f\n'
    assert (
        tilelang_lower.cause(f"{trace}tvm.error.InternalError: Check failed: a is b: c")
        == "InternalError: Check failed: a is b: c"
    )
    assert tilelang_lower.cause("ValueError: axis: expected 2") == "ValueError: axis: expected 2"
    assert tilelang_lower.cause("") == "no message"


def test_warnings_are_collected_with_the_buffers_they_name() -> None:
    log = "[18:00:00] : Warning: Buffer read before initialization: 1 buffer\n  [1] `y` is read\n  --> file:1\nfine\n"
    assert tilelang_lower.warnings(log) == ["Buffer read before initialization: 1 buffer (`y` is read)"]
    assert tilelang_lower.warnings("all is well\n  [1] a list") == []


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match="target: expected one of sm90, sm100, ascend950, got 'sm80'"):
        tilelang_lower.lower("a:b", "a:b", "sm80")


@needs_ascend
def test_a_program_that_does_not_import_or_end_costs_one_verdict() -> None:
    with pytest.raises(Refused, match="does not lower: CandidateNotFound: no.module does not import"):
        tilelang_lower.lower("no.module:f", "no.module:f", "ascend950")
    with pytest.raises(Refused, match=r"does not lower within 0.01 s"):
        tilelang_lower.lower("no.module:f", "no.module:f", "ascend950", time_limit_s=0.01)
