"""Benches: what they draw, how they rate and compare, and what a machine without a device says."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from deeptwin.parity import bench
from deeptwin.parity.__main__ import app
from deeptwin.parity.card import Candidate, case_rng, load_card, resolve
from deeptwin.parity.device_draws import DeviceDraws
from deeptwin.parity.oracles import OracleSet

BENCHES = bench.benches()
CEILINGS = bench.Ceilings(copy_gbs=4000.0, matmul_tflops=700.0)
GATHERED = {"table_rd", "table_sf_rg", "cache_pow", "cache_pow_"}  # of these, rows are read or written
ROW = bench.Timing(bench="b", candidate="mine", status="passed", ms=0.2, graph_ms=0.1)


# what is drawn


@pytest.mark.parametrize("one", BENCHES, ids=lambda one: one.id)
def test_a_bench_draws_what_its_operation_takes(one: bench.Bench) -> None:
    op = load_card(one.component).op(one.op)
    inputs = one.draw(DeviceDraws("meta"))
    parameters = dict(inspect.signature(resolve(op.reference)).parameters)
    needed = [name for name, p in parameters.items() if name != "num" and p.default is p.empty]
    needed += ["dtype"] if any(output.dtype is None for output in op.outputs) else []  # judging asks for it
    assert set(needed) <= set(inputs) <= set(parameters)
    read = sum(x.nbytes for name, x in inputs.items() if isinstance(x, Tensor) and name not in GATHERED)
    assert one.flops or one.bytes >= read


def test_every_bench_has_its_own_name_and_components_can_be_chosen() -> None:
    assert len({one.id for one in BENCHES}) == len(BENCHES)
    assert {one.component for one in bench.benches(["mla", "topk"])} == {"mla", "topk"}


def test_draws_repeat_by_seed() -> None:
    a, b, c = DeviceDraws("cpu"), DeviceDraws("cpu"), DeviceDraws("cpu", seed=1)
    x, y, z = (draws.normal(64) for draws in (a, b, c))
    assert torch.equal(x, y)
    assert not torch.equal(x, z)
    assert set(a.order(9).tolist()) == set(range(9))
    assert int(a.bytes(118, 122, 1000).min()) == 118
    assert not a.e4m3(1000).to(torch.float32).isnan().any()


# how it is rated


def test_a_time_becomes_rates_and_the_share_of_the_tighter_ceiling() -> None:
    one = replace(BENCHES[0], flops=35e9, bytes=4e7)
    rated = bench._rated(ROW, one, CEILINGS)
    assert rated.tflops == pytest.approx(350.0)
    assert rated.gbs == pytest.approx(400.0)
    assert rated.ceiling == pytest.approx(0.5)
    unrun = replace(ROW, ms=None, graph_ms=None)
    assert bench._rated(unrun, one, CEILINGS) == unrun


def test_ratios_are_to_the_fastest_other_candidate_cold_to_cold_and_graph_to_graph() -> None:
    own = replace(ROW, ms=0.2, graph_ms=0.02)
    rows = [
        own,
        replace(own, candidate="peer", ms=0.1, graph_ms=0.03),
        replace(own, candidate="absent", ms=None, graph_ms=None),
    ]
    found = bench._compared(rows)
    assert [row.ratio for row in found] == [pytest.approx(0.5), pytest.approx(2.0), None]
    assert [row.graph_ratio for row in found] == [pytest.approx(1.5), pytest.approx(1 / 1.5), None]


@pytest.mark.parametrize(
    ("before", "now", "slower"),
    [(0.1, 0.104, False), (0.1, 0.11, True), (0.001, 0.0015, False), (0.001, 0.0019, True), (0.1, 0.05, False)],
)
def test_a_regression_is_beyond_both_limits(before: float, now: float, slower: bool) -> None:
    row = {"bench": "b", "candidate": "c", "ms": now}
    found = bench.regressions([row], [row | {"ms": before}])
    assert bool(found) is slower
    assert bench.regressions([row], [row | {"candidate": "other"}]) == []


def test_what_is_not_promised_excuses_its_own_output_only() -> None:
    op = load_card("rms_norm").op("rms_norm")
    inputs = op.draw(op.cases(False)[0], case_rng("rms_norm", "rms_norm", op.cases(False)[0].id, 0))
    oracles = OracleSet(op, inputs)
    right = oracles.contract["y_tm"].to(oracles.dtype(op.outputs[0]))
    rows = list(range(len(right)))

    def status(result: Tensor, unpromised: dict[str, str]) -> str:
        row = Candidate(name="vendor", function="never:called", unpromised=unpromised)
        return bench._verdict(result, op, rows, oracles, row)[0].value

    assert status(right, {}) == "passed"
    assert status(right * 2, {"y_tm": "its own rounding"}) == "known-failure"
    assert status(right * 2, {"another": "its own rounding"}) == "mismatch"


# a run without a device


def test_a_process_that_dies_costs_the_bench_it_was_at(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [one for one in BENCHES if one.component == "mla"][:3]
    calls: list[int] = []

    def apart(
        pending: list[bench.Bench], ceilings: bench.Ceilings, timeout: float
    ) -> tuple[list[list[bench.Timing]], str]:
        calls.append(len(pending))
        finished = 1 if len(calls) == 1 else len(pending)
        return [[replace(ROW, bench=one.id)] for one in pending[:finished]], "illegal memory access"

    monkeypatch.setattr(bench, "_apart", apart)
    monkeypatch.setattr(bench, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(bench, "facts", lambda device: {"device": device})
    record = bench.run(chosen, timeout=1.0, report=lambda name, rows: None)
    assert [row["status"] for row in record["rows"]] == ["passed", "error", "passed"]
    assert record["rows"][1]["message"] == "illegal memory access"
    assert calls == [3, 1]


def test_the_command_needs_a_device_and_a_known_shape(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    run = CliRunner().invoke
    absent = run(app, ["bench", "-c", "mla"])
    assert (absent.exit_code, "needs a CUDA device" in absent.output) == (3, True)
    assert run(app, ["bench", "--shape", "b7-nothing"]).exit_code == 2


def test_a_record_can_be_written_and_read_as_a_baseline(tmp_path: Path) -> None:
    rows = [bench.asdict(ROW)]
    (tmp_path / "old.json").write_text(json.dumps({"rows": rows}))
    assert bench.regressions(rows, json.loads((tmp_path / "old.json").read_text())["rows"]) == []
