"""The gate is tested: every checker fails when it should, and no candidate stops a run."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from deeptwin.parity import casefile, changed, ledger, report
from deeptwin.parity.__main__ import _shrink_first, app
from deeptwin.parity.card import Candidate, Relation, card_names, case_rng, load_card
from deeptwin.parity.gate import Job, Runner, Settings, plan
from deeptwin.parity.outcome import Outcome, Status, exit_status
from deeptwin.parity.pairing import every_pair
from deeptwin.parity.pool import Worker
from deeptwin.parity.protocol import BuildRequest
from deeptwin.parity.relations import Context, compare, in_a_crowd
from deeptwin.parity.shrink import Shrinker

TESTS = Path(__file__).parent
BAD = TESTS / "candidates" / "bad.py"
CARD = load_card("rms_norm")
OP = CARD.op("rms_norm")


def cases_named(*regimes):
    """One case per regime; the first has rows enough for every relation."""
    bf16 = [c for c in OP.cases(False) if c.dtype == c.out == "bf16" and c.tokens > 1]
    related = [c for c in bf16 if all(relation.only(c) for relation in OP.relations)]
    first = next(c for c in related if c.regime == regimes[0])
    return [first, *(next(c for c in bf16 if c.regime == regime) for regime in regimes[1:])]


def judge(function, *, path=BAD, timeout=60.0, cases=None, relations=True):
    row = Candidate(name=function, function=f"{path}:{function}", required=False)
    chosen = {c.id for c in (cases or cases_named("normal"))}
    jobs = [job for job in plan(CARD, OP, full=False, rows=(row,)) if job.case.id in chosen]
    with Runner(Settings(jobs=1, timeout=timeout, relations=relations)) as runner:
        return runner.run(jobs)


def failures(outcomes):
    return [o for o in outcomes if o.status in (Status.MISMATCH, Status.ERROR)]


# bad candidates: one verdict each, and the run goes on


def test_a_right_candidate_passes_everything():
    outcomes = judge("right", cases=cases_named("normal", "peaked"))
    assert not failures(outcomes)
    assert {o.check for o in outcomes} >= {"y_tm", "batch_invariant", "run_to_run"}


@pytest.mark.parametrize(
    ("function", "status", "text"),
    [
        ("wrong_shape", Status.MISMATCH, "expected torch.bfloat16"),
        ("wrong_dtype", Status.MISMATCH, "got torch.float64"),
        ("wrong_device", Status.MISMATCH, "expected device cpu, got meta"),
        ("not_a_tensor", Status.MISMATCH, "expected a tensor, got list"),
        ("nan", Status.MISMATCH, "NaN only in the candidate"),
        ("unwritten", Status.MISMATCH, "NaN only in the candidate"),
        ("raises", Status.ERROR, "RuntimeError: illegal instruction in lane 7"),
        ("mutates_input", Status.MISMATCH, "weight_m: changed this input"),
        ("writes_around_input", Status.MISMATCH, "weight_m: wrote outside this input"),
        ("view_of_input", Status.MISMATCH, "view of the input x_tm"),
        ("exits", Status.ERROR, "the worker process died: exit status 0"),
        ("segfault", Status.ERROR, "SIGSEGV"),
        ("needs_more", Status.ERROR, "extra parameter workspace needs a default"),
        ("lacks_eps", Status.ERROR, "missing parameter eps, cast"),
        ("no_such_function", Status.ERROR, "has no function 'no_such_function'"),
        ("declines", Status.UNSUPPORTED, "expected a width of 12"),
    ],
)
def test_a_bad_candidate_gets_a_verdict_that_names_its_fault(function, status, text):
    first = judge(function)[0]
    assert first.status is status
    assert text in first.message


def test_unwritten_elements_are_diagnosed():
    assert "unwritten output" in judge("unwritten")[0].diagnosis


def test_a_worker_with_a_poisoned_device_is_replaced(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "candidates"))
    worker = Worker(module="poisoned_worker")
    request = BuildRequest(component="rms_norm", op="rms_norm", case=OP.builds[0], arch="sm90")
    try:
        first, second = worker.ask(request), worker.ask(request)
    finally:
        worker.stop()
    assert first.status == second.status == "error"
    assert first.message != second.message  # the process ids


def test_every_pair_of_choices_is_met():
    axes = ("ab", (0, 1, 2), (True, False), range(5))
    chosen = every_pair(*axes)
    for i, j in combinations(range(len(axes)), 2):
        assert {(row[i], row[j]) for row in chosen} == set(product(axes[i], axes[j]))
    assert len(chosen) == len(set(chosen)) < 30  # of 60
    with pytest.raises(ValueError, match="axes: expected two or more, got 1"):
        every_pair(range(3))


def test_a_hanging_candidate_is_killed_once_and_given_up():
    outcomes = judge("hangs", timeout=4.0, cases=cases_named("normal", "peaked", "flat"))
    assert [o.status for o in outcomes] == [Status.ERROR]
    assert "no answer within 4 s" in outcomes[0].message
    assert "remaining cases were not run" in outcomes[0].message


@pytest.mark.parametrize(
    ("function", "relation", "text"),
    [
        ("not_deterministic", "run_to_run", "launch 1"),
        ("batch_dependent", "batch_invariant", "row 0 alone"),
        ("layout_dependent", "layout_invariant", "rows with 1 more between them"),
        ("writes_around_out", "run_to_run", "wrote outside the buffer"),
        ("ignores_out", "run_to_run", "is not what was written to the buffer"),
    ],
)
def test_a_relation_catches_what_one_call_cannot_show(function, relation, text):
    found = {o.check: o for o in judge(function)}
    assert found["y_tm"].status is Status.PASSED
    assert found[relation].status is Status.MISMATCH
    assert text in found[relation].message


def test_a_store_that_writes_between_the_pages_of_its_cache_is_caught(tmp_path):
    (tmp_path / "store.py").write_text(
        "def store(cache_pod_, latent_td, slots_t):\n"
        "    used = slots_t >= 0\n"
        "    o, d = cache_pod_.shape[1:]\n"
        "    slots = slots_t[used].long()\n"
        "    cache_pod_[slots // o, slots % o] = latent_td[used]\n"
        "    gap = cache_pod_.as_strided((1,), (1,), cache_pod_.storage_offset() + o * d)\n"
        "    gap.fill_(1.0)\n"
        "    return cache_pod_\n"
    )
    card = load_card("mla")
    op = card.op("store_latent")
    row = Candidate(name="spills", function=f"{tmp_path / 'store.py'}:store")
    job = next(j for j in plan(card, op, full=False, rows=(row,)) if j.case.gap and j.case.tokens)
    with Runner(Settings(jobs=1, relations=False)) as runner:
        first = runner.run([job])[0]
    assert first.status is Status.MISMATCH
    assert "cache_pod_: wrote between its rows or pages" in first.message


def test_noise_on_stdout_does_not_disturb_the_protocol():
    assert not failures(judge("prints"))


def test_a_module_that_does_not_import_is_one_error():
    outcomes = judge("rms_norm", path=TESTS / "candidates" / "does_not_import.py", cases=cases_named("normal", "flat"))
    assert len(outcomes) == 1
    assert "No module named 'deeptwin_has_no_such_module'" in outcomes[0].message


def test_a_crash_does_not_stop_the_next_candidate():
    rows = [Candidate(name=name, function=f"{BAD}:{name}") for name in ("segfault", "right")]
    job = next(j for j in plan(CARD, OP, full=False, rows=rows) if j.case.id == cases_named("normal")[0].id)
    with Runner(Settings(jobs=1, relations=False)) as runner:
        outcomes = runner.run([job])
    assert [o.status for o in outcomes if ":rate" not in o.check] == [Status.ERROR, Status.PASSED]


# exit status


def outcome(status, **changes):
    base = Outcome(component="c", op="o", candidate="x", case="1", check="y", status=status)
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["passed"], 0),
        (["passed", "known-failure"], 0),
        (["passed", "mismatch"], 1),
        (["passed", "error"], 1),
        (["passed", "unsupported"], 3),
        ([], 3),
        (["compiled"], 3),
        (["lowered"], 3),
    ],
)
def test_exit_status(statuses, code):
    assert exit_status([outcome(Status(s)) for s in statuses]) == code


def test_an_unsupported_row_that_was_not_required_does_not_fail_the_run():
    assert exit_status([outcome(Status.PASSED), outcome(Status.UNSUPPORTED, required=False)]) == 0


def test_what_looks_at_a_crowd_is_caught_only_with_wide_rows():
    op = replace(OP, rows={"x_tm": 0}, out_rows={"y_tm": 0})
    relation = Relation(name="batch_invariant", axis="requests", hook=in_a_crowd)

    def split_by_the_batch(inputs):
        x_tm = inputs["x_tm"]
        return {"y_tm": x_tm + (len(x_tm) > 100)}

    def found(width, full):
        context = Context(op=op, relation=relation, rng=np.random.default_rng(0), full=full)
        inputs = {"x_tm": torch.ones(3, width)}
        return compare(split_by_the_batch, inputs, in_a_crowd(inputs, context), context)

    assert found(8192, True).detail.startswith("batch of 130: y_tm[0, 0]: 2 against 1")
    assert found(8192, False).status == "bit-equal"
    # narrow rows meet large batches anyway
    assert found(8, True).detail.startswith("batch of 127")


# ledger


ENTRY = ledger.Entry(component="c", op="o", candidate="x", case="*", check="y", issue="#7", mode="run")


def test_a_tolerated_failure_becomes_a_known_failure():
    assert ledger.apply(outcome(Status.MISMATCH), (ENTRY,)).status is Status.KNOWN_FAILURE


def test_a_tolerated_check_that_passes_fails():
    stale = ledger.apply(outcome(Status.PASSED), (ENTRY,))
    assert stale.status is Status.MISMATCH
    assert "#7" in stale.message


def test_an_entry_covers_only_its_own_check():
    assert ledger.apply(outcome(Status.MISMATCH, check="z"), (ENTRY,)).status is Status.MISMATCH


def test_a_tolerated_failure_that_gets_worse_fails():
    bounded = replace(ENTRY, at_most=2.0, cause="measured")
    assert ledger.apply(outcome(Status.MISMATCH, budget_used=1.7), (bounded,)).status is Status.KNOWN_FAILURE
    for used in (2.1, float("inf")):
        worse = ledger.apply(outcome(Status.MISMATCH, budget_used=used), (bounded,))
        assert worse.status is Status.MISMATCH
        assert "up to 2.0 of the budget (#7)" in worse.message
    assert ledger.apply(outcome(Status.PASSED, budget_used=0.5), (bounded,)).diagnosis == "stale ledger entry"


def test_an_entry_may_be_about_one_architecture(tmp_path):
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps([vars(ENTRY), vars(replace(ENTRY, arch="sm90"))]))
    assert [entry.arch for entry in ledger.read(path)] == ["", "sm90"]
    assert [entry.arch for entry in ledger.read(path, arch="cpu")] == [""]


def test_a_ledger_entry_without_issue_or_with_a_bad_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="issue: expected"):
        replace(ENTRY, issue="")
    with pytest.raises(ValueError, match="cause: expected"):
        replace(ENTRY, at_most=2.0)
    with pytest.raises(ValueError, match="mode: expected"):
        replace(ENTRY, mode="skip")
    (tmp_path / "ledger.json").write_text('[{"component": "c"}]')
    with pytest.raises(ValueError, match=r"ledger\.json: expected a list of ledger entries"):
        ledger.read(tmp_path / "ledger.json")


def test_every_entry_of_the_ledger_is_about_a_check_that_there_is():
    for entry in ledger.read():
        op = load_card(entry.component).op(entry.op)
        assert any(fnmatch.fnmatch(case.id, entry.case) for case in op.cases(True)), entry
        assert entry.candidate in {row.name for row in op.candidates}, entry
        checks = {output.name for output in op.outputs} | {relation.name for relation in op.relations}
        assert fnmatch.filter(checks, entry.check), entry


def test_never_launch_is_not_launched(monkeypatch):
    entry = ledger.Entry(
        component="rms_norm", op="rms_norm", candidate="hangs", case="*", check="*", issue="#1", mode="never-launch"
    )
    row = Candidate(name="hangs", function=f"{BAD}:hangs")
    job = plan(CARD, OP, full=False, rows=(row,))[0]
    with Runner(Settings(jobs=1)) as runner:
        monkeypatch.setattr(runner, "entries", (entry,))
        assert [o.status for o in runner.run_job(job)] == [Status.KNOWN_FAILURE]


# shrinking and case files


@pytest.fixture(scope="module")
def shrunk():
    row = Candidate(name="drops", function=f"{BAD}:batch_dependent")
    job = next(j for j in plan(CARD, OP, full=False, rows=(row,)) if j.case.id == cases_named("normal")[0].id)
    with Runner(Settings(jobs=1)) as runner:
        failed = failures(runner.run_job(job))[0]
        return Shrinker(runner, row, failed.check, seconds=20).shrink(job, failed)


def test_only_a_failure_of_the_candidate_is_made_small(tmp_path, capsys):
    case = cases_named("normal")[0]
    inputs = OP.draw(case, case_rng("rms_norm", "rms_norm", case.id, 0))
    row = Candidate(name="narrow", function=f"{BAD}:wrong_shape")
    job = Job(card=CARD, op=OP, case=case, candidates=(row,), inputs=inputs)
    with Runner(Settings(jobs=1, relations=False)) as runner:
        refused = runner.run_job(replace(job, inputs=inputs | {"eps": -1.0}))
        own = failures(runner.run_job(job))
    assert [o.candidate for o in refused] == ["reference"]
    _shrink_first(Settings(jobs=1), [job], refused, tmp_path)
    assert "no failure is the candidate's own" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    _shrink_first(Settings(jobs=1), [job], refused + own, tmp_path)
    assert "minimal failing case" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 1


def test_shrinking_keeps_the_failing_check_and_ends_small(shrunk):
    assert shrunk.outcome.check == "batch_invariant"
    assert shrunk.inputs["x_tm"].shape == (1, 1)  # a batch of this row twice shows it
    assert set(shrunk.inputs["x_tm"].flatten().tolist()) <= {0.0, 1.0}


def test_a_case_file_repeats_the_failure(shrunk, tmp_path):
    case = casefile.CaseFile(
        component="rms_norm",
        op="rms_norm",
        candidate=f"{BAD}:batch_dependent",
        check=shrunk.outcome.check,
        seed=0,
        case=casefile.StoredCase(id="small"),
        inputs=shrunk.inputs,
    )
    path = casefile.write(tmp_path / "small.safetensors", case)
    back = casefile.read(path)
    assert back.inputs["cast"] is shrunk.inputs["cast"]
    assert torch.equal(back.inputs["x_tm"], shrunk.inputs["x_tm"])
    assert back.inputs["x_tm"].stride() == shrunk.inputs["x_tm"].stride()
    result = CliRunner().invoke(app, ["run", "--case", str(path)])
    assert result.exit_code == 1
    assert "not batch_invariant" in result.output
    fixed = CliRunner().invoke(app, ["run", "--case", str(path), "--candidate", f"{BAD}:right"])
    assert fixed.exit_code == 0


def test_a_damaged_case_file_is_refused_with_its_path(shrunk, tmp_path):
    case = casefile.CaseFile(
        component="rms_norm",
        op="rms_norm",
        candidate="triton",
        check="y_tm",
        seed=0,
        case=casefile.StoredCase(id="small"),
        inputs=shrunk.inputs,
    )
    path = casefile.write(tmp_path / "small.safetensors", case)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(casefile.BadCaseFile, match=r"small\.safetensors: tensors were changed: expected SHA-256"):
        casefile.read(path)
    path.write_bytes(whole[:50])
    with pytest.raises(casefile.BadCaseFile, match=r"small\.safetensors: not a readable case file"):
        casefile.read(path)
    with pytest.raises(TypeError, match="x: cannot be written"):
        casefile.write(tmp_path / "odd.safetensors", replace(case, inputs={"x": object()}))
    assert not list(tmp_path.glob("*.partial"))


def test_a_case_file_may_not_name_foreign_types():
    with pytest.raises(casefile.BadCaseFile, match=r"only name types of deeptwin\.reference"):
        casefile._named("subprocess:Popen")


# changed components


def test_a_change_touches_the_components_that_import_it():
    assert changed.affected_components(["reference/vision.py"]) == ("vision",)
    assert changed.affected_components(["reference/mla.py"]) == ("block", "dsa", "engine", "mla", "model", "mtp")
    assert set(changed.affected_components(["reference/rope.py"])) >= {"rope", "mla"}
    assert set(changed.affected_components(["kernels/triton_ops/quant.py"])) >= {"quant", "rms_norm"}
    assert "sparse_attn" in changed.affected_components(["parity/gate.py"])
    assert changed.affected_components(["golden/rope/vectors.safetensors"]) == ("rope",)
    assert changed.affected_components(["README.md"]) == ()


def test_an_unknown_revision_is_bad_usage():
    result = CliRunner().invoke(app, ["gate", "--changed", "no-such-revision"])
    assert result.exit_code == 2
    assert "no-such-revision" in result.output


# reports


def test_json_and_junit_hold_every_outcome():
    outcomes = [outcome(Status.PASSED), outcome(Status.MISMATCH, check="z", message="broken \x00 byte")]
    record = report.to_json(outcomes, command="deeptwin gate", environment={}, seed=3)
    assert record["schema"] == "deeptwin.report/1"
    assert [o["id"] for o in json.loads(json.dumps(record))["outcomes"]] == ["c.o/x/1/y", "c.o/x/1/z"]
    root = ElementTree.fromstring(report.to_junit(outcomes))
    assert root.find("testsuite").get("failures") == "1"
    assert len(root.findall(".//testcase")) == 2


# command line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "rms_nrom"], "Did you mean rms_norm"),
        (["run", "rms_norm", "--candidate", "tritn"], "Did you mean triton"),
        (["run", "rms_norm", "--candidate", "nowhere.py:f"], "no such file 'nowhere.py'"),
        (["run", "rms_norm", "--candidate", "a:b:c d"], "expected path/to/file.py:function"),
        (["run", "rms_norm", "--candidate", "triton", "--case", "t2-m7168"], "no case called"),
        (["run", "rms_norm", "--op", "rms"], "no op called 'rms'"),
        (["run"], "expected a component name or --case FILE"),
        (["run", "--case", "gone.safetensors"], "no such file 'gone.safetensors'"),
        (["gate", "--device", "tpu"], "expected cpu or cuda"),
        (["gate", "--jobs", "0"], "expected at least 1"),
        (["show", "nothing"], "no component called 'nothing'"),
    ],
)
def test_bad_usage_exits_2_and_names_the_fix(arguments, text):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert text in result.output.replace("\n", " ")


def test_a_required_architecture_that_did_not_run_exits_3():
    result = CliRunner().invoke(app, ["gate", "-c", "rope", "--require", "sm90"])
    assert result.exit_code == 3
    assert "required but not run: sm90" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_cuda_without_a_device_exits_3():
    result = CliRunner().invoke(app, ["gate", "--device", "cuda"])
    assert result.exit_code == 3
    assert "no CUDA device" in result.output


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "sm90"), ((10, 3), "sm100"), ((8, 0), None)])
def test_a_device_is_given_the_rows_of_its_family(monkeypatch, capability, expected):
    """Rows that a card declares for a CPU alone are not tried on a device, nor those of another chip."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    schedule, scores = load_card("dspark_schedule"), load_card("dsa")
    assert plan(schedule, schedule.op("choose_total"), full=False, device="cuda") == []
    jobs = plan(scores, scores.op("dsa_index_scores"), full=False, device="cuda")
    named = {row.name for job in jobs for row in job.candidates}
    assert ("triton" in named) is (expected is not None)
    assert ("deep-gemm" in named) is (expected == "sm90")


def test_list_and_show_describe_every_operation():
    listed = json.loads(CliRunner().invoke(app, ["list", "--json"]).output)
    assert [entry["component"] for entry in listed] == list(card_names())
    assert {"accounting", "csa2", "engram"} <= set(card_names())
    shown = CliRunner().invoke(app, ["show", "sparse_attn"])
    assert shown.exit_code == 0
    assert "sparse_attn_decode(" in shown.output
    assert "lse_th" in shown.output


def test_a_candidate_is_matched_to_its_operation_by_signature(tmp_path):
    kernel = tmp_path / "mine.py"
    kernel.write_text("def my_pages(q_thd, kv_pod, idx_tk, sink_h, topk_length_t, *, scale, value_dim): ...\n")
    result = CliRunner().invoke(app, ["run", "sparse_attn", "--candidate", f"{kernel}:my_pages", "--no-shrink"])
    assert result.exit_code == 1
    assert "sparse_attn.sparse_attn_decode/" in result.output
    kernel.write_text("def other(a, b): ...\n")
    result = CliRunner().invoke(app, ["run", "sparse_attn", "--candidate", f"{kernel}:other"])
    assert result.exit_code == 2
    assert "has the parameters of no operation" in " ".join(result.output.split())


def test_importing_the_gate_does_not_import_a_kernel_language():
    code = "import sys, deeptwin.parity.__main__; assert not {'triton', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# the fault catalogue


def entries(*spans):
    """Names of the entries of spans: (8, 11) is U08 to U11."""
    return {f"U{number:02d}" for first, last in spans for number in range(first, last + 1)}


# what the issues name: each needs a mutant of some card, those of compilers may have a broken kernel instead
PROMISED = {
    "foundation": entries((1, 9), (12, 14), (30, 30), (52, 60), (74, 75), (77, 79), (86, 88), (92, 92)),
    "compile gates": entries((80, 84)),
    "attention": entries((8, 11), (15, 29), (31, 37), (74, 74), (79, 79), (89, 89), (93, 95)),
    "whole model and engine": entries((27, 27), (31, 36), (62, 62), (65, 73)),
    "runtime": entries((32, 36), (40, 40), (61, 73), (90, 91)),
    "outside attention": entries((38, 60), (76, 76), (85, 85)),
    "earlier generations": entries(
        *((5, 6), (11, 17), (24, 25), (30, 30), (33, 33), (38, 39), (44, 51), (61, 61), (63, 63), (85, 86), (89, 89))
    ),
}


def entries_held():
    broken = "".join(path.read_text() for path in (TESTS / "broken").glob("*.py"))
    cards = [load_card(name) for name in card_names()]
    return {mutant.entry for card in cards for op in card.ops for mutant in op.mutants}.union(
        re.findall(r"\bU\d\d\b", broken)
    )


@pytest.mark.parametrize("issue", PROMISED)
def test_every_entry_that_an_issue_names_is_held(issue):
    assert sorted(PROMISED[issue] - entries_held()) == []


def test_the_engine_holds_its_entries_itself():
    held = {mutant.entry for op in load_card("engine").ops for mutant in op.mutants}
    assert sorted(PROMISED["whole model and engine"] - held) == []


def test_an_entry_without_a_mutant_is_found():
    assert entries((96, 97)) - entries_held() == {"U96", "U97"}


# inputs


def test_a_case_draws_the_same_bytes_every_time_and_others_under_another_seed():
    case = cases_named("normal")[0]
    draws = [OP.draw(case, case_rng("rms_norm", "rms_norm", case.id, seed))["x_tm"] for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_case_that_the_reference_refuses_is_an_error_of_the_case():
    case = cases_named("normal")[0]
    inputs = OP.draw(case, case_rng("rms_norm", "rms_norm", case.id, 0)) | {"eps": -1.0}
    row = Candidate(name="right", function=f"{BAD}:right")
    with Runner(Settings(jobs=1)) as runner:
        found = runner.run_job(Job(card=CARD, op=OP, case=case, candidates=(row,), inputs=inputs))
    assert [o.candidate for o in found] == ["reference"]
    assert "the reference refuses this case: eps" in found[0].message
