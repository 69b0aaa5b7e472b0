"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to: it takes its place when the block ends, and vanishes when the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, record: Any) -> None:
    """Write a JSON record."""
    with replacing(path) as aside:
        aside.write_text(json.dumps(record, indent=1, default=str) + "\n")
