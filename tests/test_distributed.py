"""Several processes as one: every scenario bit-equal with 2 and 4 of them, and a harness that sees what goes wrong."""

from __future__ import annotations

import sys
import time

import pytest

from deeptwin.parity.distributed import SCENARIOS, Report, Setup, run
from deeptwin.parity.mutants import distributed as wrong

WRONG = "deeptwin.parity.mutants.distributed"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a fork server")


@pytest.mark.parametrize("world", [2, 4])
def test_every_scenario_is_bit_equal(world: int) -> None:
    found = run(SCENARIOS, Setup(world=world))
    assert [report.problem for report in found] == [""] * len(SCENARIOS)
    assert [report.scenario for report in found if report.ok] == list(SCENARIOS)
    assert sum(report.compared for report in found) == 17


FAULTS = (
    "shards_in_reverse",
    "padding_attends",
    "merged_in_base_2",
    "cut_by_mates",
    "kept_rows_of_rank_0",
    "combined_by_arrival",
    "combined_by_rank",
    "copies_of_other_experts",
    "placeholders_routed",
    "shared_too_early",
    "compares_nothing",
)


def test_every_fault_is_seen() -> None:
    """One group, all faults; a problem names the rank, the pair and how many bytes differ."""
    found = run([f"{WRONG}:{name}" for name in FAULTS], Setup(world=2))
    assert [report.scenario.partition(":")[2] for report in found if not report.ok] == list(FAULTS)
    assert all("bytes differ" in report.problem for report in found[:-1])
    assert found[-1] == Report(scenario=f"{WRONG}:compares_nothing", compared=0)
    untried = {name for name, value in vars(wrong).items() if getattr(value, "__module__", "") == WRONG} - {*FAULTS}
    assert untried == {"dies", "raises", "never_ends", "other_bytes_next_time"}


def test_runs_that_give_other_bytes_are_seen() -> None:
    (once,) = run([f"{WRONG}:other_bytes_next_time"], Setup(world=2))
    (twice,) = run([f"{WRONG}:other_bytes_next_time"], Setup(world=2, repeats=2))
    assert once.ok
    assert "run 1" in twice.problem


@pytest.mark.parametrize(("name", "reason"), [("dies", "exit status 7"), ("raises", "no memory")])
def test_a_process_that_ends_is_reported(name: str, reason: str) -> None:
    first, second = run([f"{WRONG}:{name}", SCENARIOS[0]], Setup(world=2, limit_s=30.0))
    assert not first.ok
    assert not second.ok
    assert reason in first.problem or "rank 0" in first.problem


def test_a_process_that_hangs_is_ended() -> None:
    start = time.monotonic()
    (found,) = run([f"{WRONG}:never_ends"], Setup(world=2, limit_s=5.0))
    assert not found.ok
    assert time.monotonic() - start < 25


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 0}, "world: expected at least 1, got 0"),
        ({"world": 2, "limit_s": 0.0}, "limit_s: expected a positive"),
        ({"world": 2, "repeats": 0}, "repeats: expected at least 1, got 0"),
    ],
)
def test_bad_setups_are_refused(sizes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setup(**sizes)  # type: ignore[arg-type]
