"""Index selection of V4.1 and V3.2 over long rows."""

from __future__ import annotations

import torch

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws


def _select(tokens: int, entries: int, k: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        scores = draws.normal(tokens, entries, dtype=torch.float32)
        return {"scores_ts": scores, "length_t": draws.full(entries, tokens), "k": k}

    return Bench(
        component="topk",
        op="topk",
        shape=f"t{tokens}-s{entries}-k{k}",
        draw=draw,
        bytes=4.0 * tokens * (entries + k),
    )


BENCHES = (_select(64, 65536, 512), _select(1024, 32768, 2048), _select(8192, 8192, 512))
