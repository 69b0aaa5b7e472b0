"""The compile gate for SM90 and SM100: what it captures, refuses, remembers and never claims."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deeptwin.parity.__main__ import app
from deeptwin.parity.builds import machine_code, records
from deeptwin.parity.builds.runner import BuildJob, BuildRunner, key_of, outcome_of, plan
from deeptwin.parity.builds.spec import BuildCase, Expect
from deeptwin.parity.card import card_names, load_card
from deeptwin.parity.changed import affected_components
from deeptwin.parity.house import HOUSE, worker_environment
from deeptwin.parity.outcome import BUILT, EXIT_FAILED, EXIT_NOT_RUN, EXIT_PASSED, Outcome, Status, exit_status

BROKEN = HOUSE / "tests" / "broken" / "triton_builds.py"
UNITS = {"sm90": "wgmma", "sm100": "tcgen05"}
Built = Callable[..., Outcome]


def job(launch: str, kernel: str, arch: str, expect: Expect) -> BuildJob:
    """A build of a kernel of `tests/broken`, filed under a card that is not its own."""
    card = load_card("quant")
    case = BuildCase(
        name=launch, kernel=f"{BROKEN}:{kernel}", launch=f"{BROKEN}:launch_{launch}", expect={arch: expect}
    )
    return BuildJob(card=card, op=card.ops[0], case=case, arch=arch)


@pytest.fixture(scope="module")
def built() -> Built:
    with BuildRunner(jobs=1, use_cache=False) as runner:

        def build(launch: str, kernel: str, arch: str, expect: Expect) -> Outcome:
            (outcome,) = runner.run_job(job(launch, kernel, arch, expect))
            return outcome

        yield build


@pytest.fixture(scope="module")
def folder_of_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture
def kept_builds(folder_of_builds: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of finished builds, shared by the tests of this file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder_of_builds))
    return folder_of_builds


# what a launch compiles

CAPTURE = """
import json, sys
import torch
from deeptwin.parity.builds.spec import capture
from deeptwin.parity.builds.launches import mla, sparse_attn, topk
from deeptwin.optimized.rms_norm import rms_norm_triton
from deeptwin.reference.config import WeightCast

def odd():
    x = torch.empty(3, 1001, dtype=torch.bfloat16)[:, 1:]
    rms_norm_triton(x, torch.empty(1000), eps=1e-6, cast=WeightCast.AFTER_WEIGHT)

def seen(launch, arch="sm90"):
    return [[c.kernel, dict(c.signature), dict(c.constexprs), c.divisible, c.num_warps] for c in capture(launch, arch)]

json.dump({
    "sm90": seen(sparse_attn.prefill_h64_d512), "sm100": seen(sparse_attn.prefill_h64_d512, "sm100"),
    "ascend950": seen(sparse_attn.prefill_h64_d512, "ascend950"), "odd": seen(odd),
    "limits": [[c.max_registers for c in capture(launch)] for launch in (topk.topk_at_once, topk.compact)],
    "two": seen(mla.decode_h128), "again": seen(mla.decode_h128), "cuda": torch.cuda.is_available(),
}, sys.stdout)
"""


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command,
        env=worker_environment("cuda") | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_capture_sees_what_a_launch_would_compile() -> None:
    done = run_python(CAPTURE)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    ((kernel, signature, constants, divisible, num_warps),) = seen["sm90"]
    names = list(signature)
    assert kernel == "deeptwin.kernels.triton_ops.sparse_attn:_attend_split"
    assert signature["q_ptr"] == "*bf16"
    assert signature["scale_log2"] == "fp32"
    assert signature["num_heads"] == "i32"
    assert signature["head_tiles"] == "constexpr"  # an integer that is 1 becomes a constant, as on a device
    assert (constants["head_tiles"], constants["BLOCK_KEYS"], num_warps) == (1, 64, 8)
    assert seen["limits"] == [[64], [None]]  # registers of a thread, where the launch limits them
    assert names.index("q_ptr") in divisible
    # the launch config of the other chip, on a machine that has neither
    assert seen["sm100"][0][2]["BLOCK_KEYS"] == 32
    assert seen["ascend950"][0][0] == kernel
    # a view that begins two bytes into its row is not aligned, and neither is its stride
    _, signature, _, divisible, _ = seen["odd"][0]
    assert list(signature).index("x_ptr") not in divisible
    assert list(signature).index("stride_xt") not in divisible
    assert list(signature).index("y_ptr") in divisible
    assert [call[0].partition(":")[2] for call in seen["two"]] == ["_decode_split", "_combine_splits"]
    assert seen["two"] == seen["again"]


def test_capture_refuses_an_interpreted_process() -> None:
    script = "from deeptwin.parity.builds.spec import capture\ncapture(lambda: None)"
    done = run_python(script, TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET is set" in done.stderr


def test_an_expectation_gives_its_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        Expect(mma=None, max_stack=8)
    with pytest.raises(ValueError, match="reason"):
        Expect(mma="mma.sync")
    with pytest.raises(ValueError, match="reason"):
        Expect(mma=None, fails="overflow")
    with pytest.raises(ValueError, match="expect"):
        BuildCase(name="a", kernel="k:k", launch="l:l", expect={"sm80": Expect(mma=None)})
    with pytest.raises(ValueError, match="expect"):
        BuildCase(name="a", kernel="k:k", launch="l:l", expect={})
    with pytest.raises(ValueError, match="dsl"):
        BuildCase(name="a", kernel="k:k", launch="l:l", expect={"sm90": Expect(mma=None)}, dsl="cuda")


# what the cards declare


def every_build() -> list[BuildJob]:
    return plan([load_card(name) for name in card_names()], ("sm90", "sm100", "ascend950"))


def test_every_triton_kernel_is_built_for_both_chips() -> None:
    jobs = [found for found in every_build() if found.case.dsl == "triton"]
    kernels = {arch: {found.case.kernel for found in jobs if found.arch == arch} for arch in UNITS}
    # block scales in the instruction are there on SM100 only
    assert kernels["sm100"] - kernels["sm90"] == {"deeptwin.kernels.triton_ops.linear_native:_linear_codes_native"}
    assert kernels["sm90"] < kernels["sm100"]
    assert len(kernels["sm90"]) >= 60


def test_builds_have_names_of_their_own() -> None:
    names = [(found.arch, found.label, found.case.dsl) for found in every_build()]
    assert len(names) == len(set(names)) > 80


# a broken kernel of every kind

KINDS = {
    "no matrix unit": (
        "without_matrix_unit",
        "without_matrix_unit",
        "",
        "expected {unit} ({name} in SASS), found none",
    ),
    "silent fall-back": ("few_rows", "product", "", "fall-back: 16 mma.sync instructions where {unit} is declared"),
    "wide operands": ("widened_fp8", "widened_fp8", ".fp8", "matrix product: expected {unit}.fp8"),
    "no block scales": ("scaled_outside", "scaled_outside", "block_scale", "matrix product: expected block_scale"),
    "spill": ("too_many_accumulators", "without_matrix_unit", None, "bytes of stack a thread"),
    "shared memory": ("too_much_shared", "product", "", "bytes of shared memory, at most 232448 declared"),
    "undeclared product": ("right", "product", None, "matrix product: none declared, found 8 {unit}"),
    "refused by the language": ("mixed_types", "mixed_types", "", "must be same dtype. Got bf16 and fp16"),
}


@pytest.mark.parametrize("arch", UNITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_kernel_is_refused_by_its_cause(built: Built, kind: str, arch: str) -> None:
    launch, kernel, suffix, message = KINDS[kind]
    unit = UNITS[arch]
    mma = None if suffix is None else suffix if suffix == "block_scale" else unit + suffix
    outcome = built(launch, kernel, arch, Expect(mma=mma))
    assert outcome.status is Status.MISMATCH
    assert message.format(unit=unit, name=machine_code.SPELLINGS[unit]) in outcome.message
    assert exit_status([outcome], ran=BUILT) == EXIT_FAILED


@pytest.mark.parametrize("arch", UNITS)
def test_a_right_kernel_is_compiled_and_never_passed(built: Built, arch: str) -> None:
    outcome = built("right", "product", arch, Expect(mma=UNITS[arch]))
    assert outcome.status is Status.COMPILED
    assert outcome.metrics[UNITS[arch]] == 8
    assert outcome.metrics["registers"] > 0
    assert outcome.metrics["shared"] >= 98304
    assert (outcome.metrics["tmem"] > 0) == (arch == "sm100")
    assert exit_status([outcome], ran=BUILT) == EXIT_PASSED


def test_block_scales_are_seen_where_they_are_used(built: Built) -> None:
    outcome = built("block_scaled", "block_scaled", "sm100", Expect(mma="block_scale"))
    assert (outcome.status, outcome.message) == (Status.COMPILED, "")


def test_limits_of_the_card_are_limits(built: Built) -> None:
    expect = Expect(mma="tcgen05", max_registers=100, max_shared=1000, max_tmem=64)
    outcome = built("right", "product", "sm100", expect)
    assert outcome.status is Status.MISMATCH
    for name in ("registers: ", "shared: ", "tmem: 128 columns of tensor memory, at most 64 declared"):
        assert name in outcome.message


def test_an_expected_failure_has_to_happen_and_in_the_expected_way(built: Built) -> None:
    fails = Expect(mma="wgmma", fails="bytes of shared memory", reason="needs a smaller tile")
    outcome = built("too_much_shared", "product", "sm90", fails)
    assert outcome.status is Status.KNOWN_FAILURE
    assert outcome.message.startswith("needs a smaller tile: ")
    outcome = built("mixed_types", "mixed_types", "sm90", fails)
    assert outcome.status is Status.MISMATCH
    assert "but it fails otherwise" in outcome.message
    outcome = built("right", "product", "sm90", fails)
    assert outcome.status is Status.MISMATCH
    assert "remove the expectation" in outcome.message


def test_a_launch_that_never_starts_its_kernel_is_an_error(built: Built) -> None:
    outcome = built("nothing", "product", "sm90", Expect(mma="wgmma"))
    assert outcome.status is Status.ERROR
    assert "it launches nothing" in outcome.message


def test_a_compiler_that_dies_costs_one_build(built: Built) -> None:
    outcome = built("and_die", "product", "sm90", Expect(mma="wgmma"))
    assert outcome.status is Status.ERROR
    assert "SIGABRT" in outcome.message
    assert built("mixed_types", "mixed_types", "sm90", Expect(mma=None)).status is Status.MISMATCH


# reading machine code

DUMP = """
 Function product:
  REG:{reg} STACK:{stack} SHARED:1024 LOCAL:0 CONSTANT[0]:588 TEXTURE:0
        /*0000*/                   LDC R1, c[0x0][0x37c] ;       /* 0x0000df00ff017b82 */
        /*0010*/              @!P0 HGMMA.64x128x16.F32 R24, gdesc[UR8] ;
        /*0020*/             @!UP1 UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11] ;
        /*0030*/                   UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R6, R4 ;
        /*0050*/                   STL [R1], R2 ;
        /*0060*/                   LDL R2, [R1] ;
        /*0070*/                   LDGSTS.E.128 [R9], desc[UR14][R2.64] ;
"""


def test_instructions_are_counted_by_unit() -> None:
    measured = machine_code.measure(DUMP.format(reg=40, stack=8), "tcgen05.mma.cta_group::1.kind::mxf4.block_scale a;")
    assert {name: n for name, n in measured.items() if n} == {
        **{"registers": 40, "stack": 8, "wgmma": 1, "tcgen05": 2, "tcgen05.fp8": 1, "mma.sync": 1},
        **{"block_scale": 1, "async_copies": 1, "local_memory": 2, "instructions": 8},
    }


def test_the_largest_function_of_a_cubin_counts() -> None:
    two = DUMP.format(reg=40, stack=0) + DUMP.format(reg=30, stack=16)
    measured = machine_code.measure(two)
    assert (measured["registers"], measured["stack"]) == (40, 16)


def test_a_cubin_that_cannot_be_read_is_not_taken_for_a_clean_one() -> None:
    with pytest.raises(machine_code.Unreadable):
        machine_code.measure("nothing here")


# numbers that are remembered

OUTCOME = Outcome(
    component="rope",
    op="rope",
    candidate="triton",
    case="key",
    check="sm90",
    status=Status.COMPILED,
    metrics={"registers": 40, "stack": 0, "seconds": 1.5},
)


def test_a_change_against_the_record_is_shown(tmp_path: Path) -> None:
    assert records.changes(OUTCOME, records.read("sm90", tmp_path)) == ["new"]
    assert records.update("sm90", [OUTCOME], complete=True, folder=tmp_path) == [OUTCOME.id]
    recorded = records.read("sm90", tmp_path)
    assert recorded["toolchain"]["triton"]
    assert records.changes(OUTCOME, recorded) == []
    slower = replace(OUTCOME, metrics={"registers": 40, "stack": 0, "seconds": 9.0})
    assert records.changes(slower, recorded) == []
    wider = replace(OUTCOME, metrics={"registers": 48, "seconds": 1.0})
    assert records.changes(wider, recorded) == ["registers 40 → 48", "stack 0 → -"]
    assert records.changes(replace(wider, status=Status.MISMATCH), recorded) == []


def test_an_update_keeps_what_it_did_not_build(tmp_path: Path) -> None:
    other = replace(OUTCOME, case="query")
    records.update("sm90", [OUTCOME, other], complete=True, folder=tmp_path)
    failed = replace(OUTCOME, status=Status.MISMATCH, metrics={})
    assert records.update("sm90", [failed], complete=False, folder=tmp_path) == []
    assert set(records.read("sm90", tmp_path)["builds"]) == {OUTCOME.id, other.id}
    assert records.update("sm90", [OUTCOME], complete=True, folder=tmp_path) == [other.id]
    assert set(records.read("sm90", tmp_path)["builds"]) == {OUTCOME.id}


@pytest.mark.parametrize("arch", UNITS)
def test_the_recorded_numbers_are_those_of_the_cards(arch: str) -> None:
    recorded = set(records.read(arch)["builds"])
    declared = {
        f"{found.label.partition('/')[0]}/{found.case.dsl}/{found.case.name}/{arch}"
        for found in every_build()
        if found.arch == arch
    }
    assert recorded == declared


def test_a_build_is_reused_until_something_it_depends_on_changes(kept_builds: Path) -> None:
    (rope,) = [found for found in plan([load_card("rope")], ["sm90"]) if found.case.name == "key-v3"]
    with BuildRunner(jobs=1) as runner:
        (first,) = runner.run_job(rope)
        before = runner.reused
        (second,) = runner.run_job(rope)
    assert first.status is Status.COMPILED
    assert (second, runner.reused - before) == (first, 1)
    other = replace(rope, case=replace(rope.case, expect={"sm90": Expect(mma=None, max_registers=10)}))
    assert len({key_of(rope), key_of(other), key_of(replace(rope, arch="sm100"))}) == 3
    with BuildRunner(jobs=1) as runner:
        (refused,) = runner.run_job(other)
        (again,) = runner.run_job(other)
    assert refused.status is again.status is Status.MISMATCH
    assert runner.reused == 0  # a failure is never remembered


def test_an_outcome_survives_its_file() -> None:
    assert outcome_of(json.loads(json.dumps(OUTCOME.to_json()))) == OUTCOME


def test_a_launch_belongs_to_the_component_whose_card_names_it() -> None:
    assert affected_components(["parity/builds/launches/engram.py"]) == ("engram",)
    # a card that borrows from another one is affected with it
    assert affected_components(["parity/builds/launches/rope.py"]) == ("kv_cache", "rope")
    assert affected_components(["parity/builds/nvidia.py"]) == card_names()


# verdict and command line


def test_builds_count_as_run_and_missing_tools_do_not() -> None:
    absent = replace(OUTCOME, status=Status.UNSUPPORTED)
    assert exit_status([OUTCOME], ran=BUILT) == EXIT_PASSED
    assert exit_status([OUTCOME]) == EXIT_NOT_RUN  # to a gate, a build is no judgement
    assert exit_status([replace(OUTCOME, status=Status.LOWERED)], ran=BUILT) == EXIT_PASSED
    assert exit_status([absent], ran=BUILT) == EXIT_NOT_RUN
    assert exit_status([OUTCOME, absent], ran=BUILT) == EXIT_NOT_RUN
    assert exit_status([OUTCOME, replace(absent, required=False)], ran=BUILT) == EXIT_PASSED


def test_the_command_builds_one_component_and_says_that_nothing_ran(kept_builds: Path, tmp_path: Path) -> None:
    report = tmp_path / "builds.json"
    words = ["compile", "--arch", "sm90", "--require", "sm90", "--component", "rope", "--jobs", "1"]
    result = CliRunner().invoke(app, [*words, "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert "built, not run: 5 compiled" in result.output
    assert "passed" not in result.output
    record = json.loads(report.read_text())
    assert record["counts"] == {"compiled": 5}
    assert record["toolchain"]["sm90"]["triton"]
    assert all(outcome["metrics"]["registers"] for outcome in record["outcomes"])


def test_what_is_required_but_not_built_is_not_a_success(kept_builds: Path) -> None:
    words = ["compile", "--arch", "sm90", "--require", "sm100", "--component", "rope", "--jobs", "1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == EXIT_NOT_RUN
    assert "required but not built: sm100" in result.output


def test_an_unknown_architecture_is_bad_usage() -> None:
    result = CliRunner().invoke(app, ["compile", "--arch", "sm10"])
    assert result.exit_code == 2
    assert "Did you mean sm100" in result.output
