"""The Ascend gate refuses what it should, says why, and never says passed. What needs the tools is skipped without."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deeptwin.parity.builds import ascend, ascend_run, ascend_tools
from deeptwin.parity.builds.ascend_presets import MATRIX, VECTOR
from deeptwin.parity.builds.runner import BuildJob, BuildRunner
from deeptwin.parity.builds.spec import BuildCase, Expect
from deeptwin.parity.card import Candidate, Card, Op, load_card
from deeptwin.parity.gate import Settings, plan
from deeptwin.parity.outcome import EXIT_NOT_RUN, Outcome, Status, exit_status

BROKEN = Path(__file__).parent / "broken" / "ascend_kernels.py"
MISSING = ascend_tools.find()
needs_tools = pytest.mark.skipif(isinstance(MISSING, str), reason=f"ascend950: {MISSING}")

# the tools


def wheel_of(path: Path, content: bytes) -> ascend_tools.Wheel:
    """A small wheel file with one program, and its pins."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/bin/program", content)
    digest = hashlib.sha256(content).hexdigest()
    program = ascend_tools.Program(member="package/bin/program", size=len(content), sha256=digest)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return ascend_tools.Wheel(distribution="tools", version="1", sha256=digest, programs=(program,))


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel file that is the only pinned one."""
    path = tmp_path / "tools.whl"
    monkeypatch.setattr(ascend_tools, "WHEELS", (wheel_of(path, b"a program"),))
    return path


def test_fetch_unpacks_what_is_pinned_and_nothing_else(pinned: Path, tmp_path: Path) -> None:
    tools = ascend_tools.fetch(tmp_path / "kept", lambda wheel, folder: pinned)
    assert sorted(path.name for path in tools.folder.iterdir()) == ["program", "stand-in"]
    assert (tools.folder / "program").stat().st_mode & 0o111
    assert ascend_tools.find(tmp_path / "kept") == tools


def test_another_wheel_is_refused_and_nothing_is_kept(pinned: Path, tmp_path: Path) -> None:
    pinned.write_bytes(pinned.read_bytes() + b"x")
    with pytest.raises(ascend_tools.ToolsError, match="expected SHA-256"):
        ascend_tools.fetch(tmp_path / "kept", lambda wheel, folder: pinned)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tools.whl"]


def test_another_program_in_the_wheel_is_refused(pinned: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (wheel,) = ascend_tools.WHEELS
    other = replace(wheel.programs[0], sha256="0" * 64)
    monkeypatch.setattr(ascend_tools, "WHEELS", (replace(wheel, programs=(other,)),))
    with pytest.raises(ascend_tools.ToolsError, match="program: expected SHA-256 0000"):
        ascend_tools.fetch(tmp_path / "kept", lambda wheel, folder: pinned)


def test_a_damaged_program_is_found(pinned: Path, tmp_path: Path) -> None:
    tools = ascend_tools.fetch(tmp_path / "kept", lambda wheel, folder: pinned)
    (tools.folder / "program").write_bytes(b"half")
    assert "has 4 bytes, expected 9" in str(ascend_tools.find(tools.folder))


def test_new_pins_get_a_new_folder(pinned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ascend_tools.cache_folder()
    monkeypatch.setattr(ascend_tools, "WHEELS", ())
    assert ascend_tools.cache_folder() != before


# without the tools


def builds_of(component: str) -> list[tuple[Card, Op, BuildCase]]:
    card = load_card(component)
    return [(card, op, replace(case, expect=VECTOR)) for op in card.ops for case in op.builds if case.dsl == "triton"]


def test_without_tools_a_build_did_not_run() -> None:
    card, op, case = builds_of("rope")[0]
    outcomes = ascend.build(card, op, case, tools="no tools here")
    assert [o.check for o in outcomes] == ["ascend950-simd", "ascend950-simt"]
    assert {(o.status, o.message) for o in outcomes} == {(Status.UNSUPPORTED, "no tools here")}
    assert exit_status(outcomes) == EXIT_NOT_RUN


def test_without_tools_no_case_is_judged() -> None:
    outcomes = ascend_run.judge([load_card("rope")], Settings(), tools="no tools here")
    assert {o.op for o in outcomes} == {"rope", "rope_table"}
    assert {o.status for o in outcomes} == {Status.UNSUPPORTED}
    assert exit_status(outcomes) == EXIT_NOT_RUN


# what logs and programs say


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            'loc("k.linalg":2:1): error: Failed to run pipeline\n'
            'loc("k.linalg":3:3): error: ub overflow, requires 4225280 bits while 2031616 bits available!\n',
            "error: ub overflow, requires 4225280 bits (528160 bytes) while 2031616 bits (253952 bytes) available!",
        ),
        ("LLVM ERROR: UB overflow, requires at least 9 bytes\nPLEASE submit\n", "LLVM ERROR: UB overflow, requires at"),
        ("opt: /root/x/IR/TypeRange.cpp:20: Assertion `a' failed.\n", "opt: TypeRange.cpp:20: Assertion `a' failed."),
        ('loc(fused["k":1:2, "k":3:4]): error: no form\n', "error: no form"),
        ("", "ended with status 7 and no message"),
    ],
)
def test_the_cause_is_read_off_a_log(log: str, expected: str) -> None:
    assert ascend.cause(log, 7).startswith(expected)


SIMD = """
  func.func @kernel_aic(%arg0: i64) {
    %0 = llvm.mlir.constant(4096 : i64) : i64
    %1 = hivm.hir.pointer_cast(%0) : memref<2x16x16xbf16, #hivm.address_space<cbuf>>
    func.call @mma_tile_bfloat16_t_to_float(%1) : (i64) -> ()
  func.func @kernel_aiv(%arg0: i64) {
    %0 = llvm.mlir.constant(64 : i64) : i64
    %1 = llvm.mlir.constant(1000 : i64) : i64
    %2 = hivm.hir.pointer_cast(%0, %1) : memref<8xf32, strided<[1]>, #hivm.address_space<ub>>
    %3 = hivm.hir.pointer_cast(%0) : memref<64xf8E4M3FN, #hivm.address_space<ub>>
    func.call @load_gm_to_ubuf_1d_float(%2) : (i64) -> ()
    hivm.hir.set_flag[<PIPE_V>, <PIPE_M>, <EVENT_ID0>]
"""


def test_the_numbers_of_a_simd_program() -> None:
    measured = ascend.simd_metrics(SIMD)
    assert measured["l1_bytes"] == 4096 + 2 * 16 * 16 * 2
    assert measured["ub_bytes"] == 1000 + 8 * 4
    assert (measured["l0c_bytes"], measured["mma"], measured["copies"], measured["syncs"]) == (0, 1, 1, 1)


def test_a_buffer_that_nothing_writes_is_lost() -> None:
    lost = "  func.func @k() {\n %a = memref.alloc() : memref<4xf32>\n %t = bufferization.to_tensor %a : memref<4xf32>"
    written = lost.replace(" %t =", " memref.copy %x, %a : memref<4xf32> to memref<4xf32>\n %t =")
    assert ascend.unwritten_buffers(lost) == 1
    assert ascend.unwritten_buffers(written) == 0


# broken kernels


@pytest.fixture(scope="module")
def runner() -> Iterator[BuildRunner]:
    """One compile process for all broken kernels."""
    with BuildRunner(jobs=1, use_cache=False) as started:
        yield started


def outcomes_of(runner: BuildRunner, kernel: str, launch: str, **expect: Expect) -> list[Outcome]:
    """Build one of the broken kernels; keys are paths."""
    card = load_card("rms_norm")
    case = BuildCase(
        name=launch,
        kernel=f"{BROKEN}:{kernel}",
        launch=f"{BROKEN}:launch_{launch}",
        expect={f"ascend950-{path}": expected for path, expected in expect.items()},
    )
    return runner.run_job(BuildJob(card=card, op=card.ops[0], case=case, arch="ascend950"))


@needs_tools
@pytest.mark.parametrize(
    ("kernel", "launch", "path", "mma", "cause"),
    [
        ("large_tile", "large_tile", "simd", None, "ub overflow, requires"),
        ("product", "large_product", "simt", None, "UB overflow, requires at least 524288 bytes"),
        ("product_by_hand", "product_by_hand", "simd", "cube", "declared on the cube unit, but the program has none"),
        ("product", "product", "simd", None, "the card declares none, the program has 1 on the cube unit"),
        ("scalar_quotient", "scalar_quotient", "simd", None, "tl.div_rn of scalars has no form"),
        ("first_of_the_largest", "first_of_the_largest", "simd", None, "failed to legalize operation 'linalg.reduce'"),
        ("even_elements", "even_elements", "simd", None, "loads are lost"),
        ("widened_codes", "widened_codes", "simd", None, "leaves tt.fp_to_fp as it is"),
    ],
)
def test_a_broken_kernel_is_refused_with_its_cause(
    runner: BuildRunner, kernel: str, launch: str, path: str, mma: str | None, cause: str
) -> None:
    (outcome,) = outcomes_of(runner, kernel, launch, **{path: Expect(mma=mma)})
    assert outcome.status is Status.MISMATCH
    assert cause in outcome.message


@needs_tools
def test_an_expected_failure_is_known_by_its_text(runner: BuildRunner) -> None:
    expected = Expect(mma=None, fails="linalg.reduce", reason="no argmax on the SIMD path")
    other = replace(expected, fails="ub overflow")
    (known,) = outcomes_of(runner, "first_of_the_largest", "first_of_the_largest", simd=expected)
    (wrong,) = outcomes_of(runner, "first_of_the_largest", "first_of_the_largest", simd=other)
    (stale,) = outcomes_of(runner, "first_of_the_largest", "first_of_the_largest", simt=expected)
    assert known.status is Status.KNOWN_FAILURE
    assert known.message.startswith("no argmax on the SIMD path: ")
    assert wrong.status is Status.MISMATCH
    assert "fails otherwise" in wrong.message
    assert stale.status is Status.MISMATCH
    assert "remove the expectation" in stale.message


@needs_tools
def test_a_right_kernel_is_lowered_on_both_paths_with_its_numbers(runner: BuildRunner) -> None:
    simd, simt = outcomes_of(runner, "product", "product", simd=MATRIX["ascend950-simd"], simt=MATRIX["ascend950-simt"])
    assert simd.status is simt.status is Status.LOWERED
    assert (simd.metrics["mma"], simd.metrics["l1_bytes"], simt.metrics["mma"]) == (1, 16384, 0)
    assert simt.metrics["ub_bytes"] > 0


@needs_tools
def test_a_launch_without_the_kernel_is_an_error(runner: BuildRunner) -> None:
    (outcome,) = outcomes_of(runner, "large_tile", "product", simd=Expect(mma=None))
    assert outcome.status is Status.ERROR
    assert "does not launch" in outcome.message


# lowered kernels on the CPU


def small_case(card: Card, op: Op) -> Any:
    def size(case: Any) -> int:
        return sum(value for value in vars(case).values() if isinstance(value, int))

    return min((job.case for job in plan(card, op, full=False) if job.case.tokens > 1), key=size)


@needs_tools
def test_a_lowered_kernel_is_judged_by_its_card_and_never_passes() -> None:
    card = load_card("rope")
    case = small_case(card, card.op("rope"))
    op = replace(card.op("rope"), cases=lambda full: [case])
    outcomes = ascend_run.judge([replace(card, ops=(op,))], Settings(jobs=1, relations=False))
    compared = [o for o in outcomes if o.check == "y_thd"]
    assert [o.status for o in compared] == [Status.LOWERED]
    assert {o.candidate for o in outcomes} == {ascend_run.NAME}
    assert Status.PASSED not in {o.status for o in outcomes}


@needs_tools
def test_e4m3_codes_of_a_lowered_kernel_are_judged_too() -> None:
    card = load_card("quant")
    op = card.op("quantize_e4m3_ue8m0")
    case = small_case(card, op)
    op = replace(op, cases=lambda full: [case])
    outcomes = ascend_run.judge([replace(card, ops=(op,))], Settings(jobs=1, relations=False))
    assert {(o.check, o.status) for o in outcomes} == {("codes", Status.LOWERED), ("sf", Status.LOWERED)}


@needs_tools
def test_a_wrong_kernel_is_found_by_its_lowering() -> None:
    card = load_card("rms_norm")
    op = card.op("rms_norm")
    wrong = Candidate(name="wrong", function=f"{BROKEN}:norm_without_statistics")
    with ascend_run.LoweredRunner(Settings(jobs=1, relations=False)) as runner:
        jobs = [job for job in plan(card, op, full=False, rows=(wrong,)) if job.case.id == small_case(card, op).id]
        outcomes = runner.run(jobs)
    assert [(o.status, o.check) for o in outcomes if not o.check.endswith(":rate")] == [(Status.MISMATCH, "y_tm")]


def test_the_sample_of_an_operation_starts_with_its_first_case_that_a_row_takes() -> None:
    card = load_card("rms_norm")
    op = card.op("rms_norm")
    cases = op.cases(False)
    first = cases[0].id
    row = Candidate(name="row", function="never:called", declines=lambda case: "first" if case.id == first else None)
    chosen = [job.case for job in ascend_run._sample(plan(card, op, full=False, rows=(row,)))]
    assert len(chosen) == ascend_run.SAMPLE
    assert chosen[0].id == cases[1].id
    assert cases[-1].id not in {case.id for case in chosen}
    nothing = Candidate(name="row", function="never:called", declines=lambda case: "none")
    assert [job.case.id for job in ascend_run._sample(plan(card, op, full=False, rows=(nothing,)))] == [cases[0].id]


def test_an_operation_is_summed_up_by_its_first_failure() -> None:
    (missing,) = ascend_run.judge([replace(load_card("rope"), ops=load_card("rope").ops[:1])], Settings(), tools="none")
    right = replace(missing, status=Status.LOWERED, case="a", check="y", message="", budget_used=0.5)
    wrong = replace(right, status=Status.MISMATCH, case="b", message="3 ulp", budget_used=4.0)
    (good,) = ascend_run.per_operation([right, missing])
    (bad,) = ascend_run.per_operation([right, wrong])
    (absent,) = ascend_run.per_operation([missing])
    assert (good.status, good.check, good.budget_used) == (Status.LOWERED, "ascend950-cpu", 0.5)
    assert good.metrics == {"checks": 1, "failed": 0, "declined": 1}
    assert (bad.status, bad.metrics["failed"]) == (Status.MISMATCH, 1)
    assert bad.message == f"1 of 2 checks failed, first {wrong.id}: 3 ulp"
    assert (absent.status, absent.message) == (Status.UNSUPPORTED, "none")


def test_a_tool_that_crashes_once_is_called_again_and_twice_is_refused(tmp_path: Path) -> None:
    tools = ascend_tools.Toolchain(folder=tmp_path)
    script = tmp_path / "tool.sh"
    script.write_text(f"#!/bin/sh\necho >> {tmp_path}/calls\n[ $(wc -l < {tmp_path}/calls) -gt $1 ] || kill -SEGV $$\n")
    script.chmod(0o755)
    ascend._run("adapter", [script, 1], tools)
    (tmp_path / "calls").unlink()
    with pytest.raises(ascend.Refused, match="adapter: ended with status -11"):
        ascend._run("adapter", [script, 2], tools)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_only_functions_of_the_house_have_a_lowered_row() -> None:
    card = load_card("rms_norm")
    op = card.op("rms_norm")
    row = ascend_run.row(op.candidates[0])
    assert row is not None
    assert row.function == "deeptwin.parity.builds.ascend_run:rms_norm__rms_norm_triton"
    assert ascend_run.row(Candidate(name="mine", function="mine.py:norm")) is None
    declined = [job.case for job in plan(card, op, full=False) if row.declines(job.case)]
    assert declined
    assert {case.out for case in declined} == {"fp32"}
