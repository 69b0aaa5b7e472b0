"""Memory of V4.1: hashes, 24 rows a token out of a table far beyond the caches, the gate over four streams of 5120."""

from __future__ import annotations

import torch

from deeptwin.reference.config import ENGRAM_V41
from deeptwin.reference.engram_vocab import hash_layout

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

TOKENS, ROWS = 8192, 2_097_152
COLUMNS, WIDTH, STREAMS, HIDDEN = (
    ENGRAM_V41.num_columns,
    ENGRAM_V41.head_dim,
    ENGRAM_V41.streams,
    ENGRAM_V41.hidden,
)


def _windows(draws: DeviceDraws) -> Inputs:
    return {
        "window_tw": draws.integers(0, ENGRAM_V41.num_classes, TOKENS, ENGRAM_V41.max_ngram),
        "image_t": draws.integers(0, 2, TOKENS) > 1,
        "layout": hash_layout(ENGRAM_V41),
    }


def _rows(draws: DeviceDraws) -> Inputs:
    return {
        "table_rd": draws.bytes(0, 127, ROWS, WIDTH).view(torch.float8_e4m3fn),
        "table_sf_rg": draws.bytes(116, 121, ROWS, WIDTH // 32),
        "row_tz": draws.integers(0, ROWS, TOKENS, COLUMNS),
    }


def _embed(draws: DeviceDraws) -> Inputs:
    return _rows(draws) | {"dtype": torch.bfloat16}


def _gate(draws: DeviceDraws) -> Inputs:
    return {
        "r_tnm": draws.normal(TOKENS, STREAMS, HIDDEN),
        "kv_tjm": draws.normal(TOKENS, STREAMS + 1, HIDDEN),
        "q_weight_nm": draws.normal(STREAMS, HIDDEN),
        "k_weight_nm": draws.normal(STREAMS, HIDDEN),
        "image_t": draws.integers(0, 2, TOKENS) > 1,
        "eps": ENGRAM_V41.eps,
    }


_READ = COLUMNS * (WIDTH + WIDTH // 32 + 4)

BENCHES = (
    Bench(
        component="engram",
        op="engram_hash",
        shape=f"t{TOKENS}-l{len(ENGRAM_V41.layer_ids)}-z{COLUMNS}",
        draw=_windows,
        bytes=TOKENS * (4.0 * (ENGRAM_V41.max_ngram + len(ENGRAM_V41.layer_ids) * COLUMNS) + 1),
        promises={"trusted": True},
    ),
    Bench(
        component="engram",
        op="engram_lookup",
        shape=f"t{TOKENS}-z{COLUMNS}-d{WIDTH}",
        draw=_rows,
        bytes=float(TOKENS * (_READ + COLUMNS * (WIDTH + WIDTH // 32))),
        promises={"trusted": True},
    ),
    Bench(
        component="engram",
        op="engram_embed",
        shape=f"t{TOKENS}-z{COLUMNS}-d{WIDTH}",
        draw=_embed,
        bytes=float(TOKENS * (_READ + 2 * COLUMNS * WIDTH)),
        promises={"trusted": True},
    ),
    Bench(
        component="engram",
        op="engram_gate",
        shape=f"t{TOKENS}-n{STREAMS}-m{HIDDEN}",
        draw=_gate,
        bytes=TOKENS * (2.0 * HIDDEN * (3 * STREAMS + 1) + 1) + 4.0 * STREAMS * HIDDEN,
    ),
)
