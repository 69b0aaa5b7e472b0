"""Scores 65 536 index keys for 256 queries by the reference and says how much memory that took.

`python -m deeptwin.parity.index_memory` draws records of V4.1's indexer (32 heads of 128 channels), scores them and
prints the growth of memory at its peak beside what heads × queries × keys would take at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from deeptwin.reference.config import INDEX_FP4, ScoreOrder
from deeptwin.reference.indexer import index_scores

from .engram_table import forget_peak, resident

SEED = 20261129
HEADS = 32


def measure(*, keys: int, queries: int, order: ScoreOrder) -> dict[str, float]:
    """Score drawn records, every key visible to every query.

    Raises:
        RuntimeError: a score is not finite.
    """
    rng = np.random.Generator(np.random.Philox(SEED))

    def records(*shape: int) -> torch.Tensor:
        found = rng.integers(0, 256, (*shape, INDEX_FP4.record_bytes), dtype=np.uint8)
        found[..., INDEX_FP4.data_bytes :] = 120 + found[..., INDEX_FP4.data_bytes :] % 8  # scales of 2^-7 to 1
        return torch.from_numpy(found)

    q_thw, k_sw = records(queries, HEADS), records(keys)
    w_th = torch.from_numpy(rng.standard_normal((queries, HEADS)).astype(np.float32)).bfloat16()
    first_t = torch.zeros(queries, dtype=torch.int32)
    forget_peak()
    before, started = resident(), time.monotonic()
    scores_ts = index_scores(q_thw, k_sw, w_th, first_t, first_t + keys, None, block_size=1, order=order)
    seconds = time.monotonic() - started
    if not scores_ts.isfinite().all():
        raise RuntimeError("scores: expected finite values")
    return {
        "keys": keys,
        "queries": queries,
        "peak_memory_growth_bytes": resident("VmHWM") - before,
        "peak_memory_bytes": resident("VmHWM"),
        "bytes_of_all_products_at_once": keys * queries * HEADS * 8,
        "seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.index_memory", description=__doc__)
    parser.add_argument("--keys", type=int, default=65_536)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--order", choices=[order.value for order in ScoreOrder], default=ScoreOrder.FP32.value)
    chosen = parser.parse_args(arguments)
    found = measure(keys=chosen.keys, queries=chosen.queries, order=ScoreOrder(chosen.order))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
