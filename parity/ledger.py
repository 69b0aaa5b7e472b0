"""The ledger of known failures: the only place where a failing check may be tolerated, each with its issue.

`parity/ledger.json` is a list of entries; `case` and `check` are shell-style patterns. A tolerated check that passes
fails the run, so that no entry outlives its cause, and so does one that fails by more than the entry knows. An entry
may be about one architecture. Whether a rounding is too much hangs on the draw: entries are about seed 0, as records.
"""

from __future__ import annotations

import fnmatch
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from .outcome import Outcome, Status

LEDGER = Path(__file__).with_name("ledger.json")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tolerated failure. `mode` is "run", or "never-launch" for what would hang or lose the device.

    `arch` is "cpu", "sm90", … or "" for all; `at_most` is what the failure may use of its budget, by the measurement
    that `cause` names.
    """

    component: str
    op: str
    candidate: str
    case: str
    check: str
    issue: str
    mode: str
    arch: str = ""
    cause: str = ""
    at_most: float = math.inf

    def __post_init__(self) -> None:
        if self.mode not in ("run", "never-launch"):
            raise ValueError(f"mode: expected 'run' or 'never-launch', got {self.mode!r}")
        if not self.issue:
            raise ValueError("issue: expected a link or number, got an empty string")
        if math.isfinite(self.at_most) and not self.cause:
            raise ValueError("cause: expected what fixed at_most, got an empty string")

    def covers(self, component: str, op: str, candidate: str, case: str, check: str = "") -> bool:
        """Whether this entry is about that check (an empty `check` matches any)."""
        same = (self.component, self.op, self.candidate) == (component, op, candidate)
        return same and fnmatch.fnmatch(case, self.case) and (not check or fnmatch.fnmatch(check, self.check))


def read(path: Path = LEDGER, *, arch: str = "") -> tuple[Entry, ...]:
    """All entries, or those that are about an architecture.

    Raises:
        ValueError: the file is not a list of complete entries.
    """
    try:
        entries = tuple(Entry(**entry) for entry in json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a list of ledger entries: {error}") from error
    return tuple(entry for entry in entries if not arch or entry.arch in ("", arch))


def apply(outcome: Outcome, entries: tuple[Entry, ...]) -> Outcome:
    """Turn a tolerated failure into `known-failure`; one that passes, or fails by more, is a mismatch."""
    for entry in entries:
        if not entry.covers(outcome.component, outcome.op, outcome.candidate, outcome.case, outcome.check):
            continue
        if (outcome.budget_used or 0.0) > entry.at_most:
            message = f"the ledger knows up to {entry.at_most} of the budget ({entry.issue}): {outcome.message}"
            return replace(outcome, message=message)
        if outcome.status in (Status.MISMATCH, Status.ERROR):
            cause = f" ({entry.cause})" if entry.cause else ""
            message = f"{entry.issue}{cause}: {outcome.message}"
            return replace(outcome, status=Status.KNOWN_FAILURE, message=message)
        if outcome.status is Status.PASSED:
            message = f"passes although the ledger says it fails ({entry.issue}): remove the entry"
            return replace(outcome, status=Status.MISMATCH, message=message, diagnosis="stale ledger entry")
    return outcome
