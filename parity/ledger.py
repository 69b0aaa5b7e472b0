"""The ledger of known failures: the only place where a failing check may be tolerated, each with its issue.

`parity/ledger.json` is a list of entries; `case` and `check` are shell-style patterns. A tolerated check that passes
fails the run, so that no entry outlives its cause.
"""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass, replace
from pathlib import Path

from .outcome import Outcome, Status

LEDGER = Path(__file__).with_name("ledger.json")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tolerated failure. `mode` is "run", or "never-launch" for what would hang or lose the device."""

    component: str
    op: str
    candidate: str
    case: str
    check: str
    issue: str
    mode: str

    def __post_init__(self) -> None:
        if self.mode not in ("run", "never-launch"):
            raise ValueError(f"mode: expected 'run' or 'never-launch', got {self.mode!r}")
        if not self.issue:
            raise ValueError("issue: expected a link or number, got an empty string")

    def covers(self, component: str, op: str, candidate: str, case: str, check: str = "") -> bool:
        """Whether this entry is about that check (an empty `check` matches any)."""
        same = (self.component, self.op, self.candidate) == (component, op, candidate)
        return same and fnmatch.fnmatch(case, self.case) and (not check or fnmatch.fnmatch(check, self.check))


def read(path: Path = LEDGER) -> tuple[Entry, ...]:
    """All entries.

    Raises:
        ValueError: the file is not a list of complete entries.
    """
    try:
        return tuple(Entry(**entry) for entry in json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a list of ledger entries: {error}") from error


def apply(outcome: Outcome, entries: tuple[Entry, ...]) -> Outcome:
    """Turn a tolerated failure into `known-failure`, and a tolerated check that passes into a mismatch."""
    for entry in entries:
        if not entry.covers(outcome.component, outcome.op, outcome.candidate, outcome.case, outcome.check):
            continue
        if outcome.status in (Status.MISMATCH, Status.ERROR):
            return replace(outcome, status=Status.KNOWN_FAILURE, message=f"{entry.issue}: {outcome.message}")
        if outcome.status is Status.PASSED:
            message = f"passes although the ledger says it fails ({entry.issue}): remove the entry"
            return replace(outcome, status=Status.MISMATCH, message=message, diagnosis="stale ledger entry")
    return outcome
