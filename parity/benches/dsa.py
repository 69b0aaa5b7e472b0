"""V3.2: index scores of a chunk and over pages of 64 keys, and sparse decode over records of 656 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

DIM, PAGE = 128, 64
HEADS, WIDTH, VALUES, RECORDS = 128, 576, 512, 65536


def _chunk(tokens: int, keys: int, heads: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        # the chunk stands at the end of the sequence
        length_t = torch.arange(keys - tokens + 1, keys + 1, dtype=torch.int32, device=draws.device)
        return {
            "q_thd": draws.e4m3(tokens, heads, DIM),
            "k_sd": draws.e4m3(keys, DIM),
            "k_sf_s": draws.normal(keys, dtype=torch.float32).abs() * 0.01 + 0.001,
            "w_th": draws.normal(tokens, heads, dtype=torch.float32),
            "length_t": length_t,
        }

    seen = tokens * keys - tokens * (tokens - 1) / 2
    return Bench(
        component="dsa",
        op="dsa_index_scores",
        shape=f"t{tokens}-s{keys}-h{heads}-d{DIM}",
        draw=draw,
        flops=2.0 * seen * heads * DIM,
        bytes=tokens * heads * (DIM + 4.0) + keys * (DIM + 4.0) + 4.0 * tokens * keys,
    )


def _pages(batch: int, keys: int, heads: int) -> Bench:
    each = keys // PAGE

    def draw(draws: DeviceDraws) -> Inputs:
        codes = draws.bytes(0, 127, batch * each, PAGE * DIM)
        scales = draws.normal(batch * each, PAGE, dtype=torch.float32).abs() * 0.01 + 0.001
        return {
            "q_thd": draws.e4m3(batch, heads, DIM),
            "cache_pow": torch.cat([codes, scales.view(torch.uint8)], 1).unflatten(1, (PAGE, DIM + 4)),
            "w_th": draws.normal(batch, heads, dtype=torch.float32),
            "table_tj": draws.order(batch * each).view(batch, each),
            "length_t": draws.full(keys, batch),
        }

    return Bench(
        component="dsa",
        op="dsa_index_scores_paged",
        shape=f"b{batch}-s{keys}-h{heads}-d{DIM}",
        draw=draw,
        flops=2.0 * batch * keys * heads * DIM,
        bytes=batch * (heads * (DIM + 4.0) + keys * (DIM + 4.0 + 4) + 4.0 * each),
    )


def _records(draws: DeviceDraws) -> Tensor:
    """Codes, scales that are powers of two, rotary channels."""
    shape = (RECORDS // PAGE, PAGE)
    codes = draws.e4m3(*shape, VALUES).view(torch.uint8)
    scales = torch.exp2(draws.integers(-8, -4, *shape, VALUES // 128).to(torch.float32)).view(torch.uint8)
    tail = draws.normal(*shape, WIDTH - VALUES).view(torch.uint8)
    return torch.cat([codes, scales, tail], -1)


def _decode(batch: int, topk: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        return {
            "q_thd": draws.normal(batch, HEADS, WIDTH),
            "cache_pow": _records(draws),
            "idx_tk": draws.integers(0, RECORDS, batch, topk),
            "topk_length_t": None,
            "scale": WIDTH**-0.5,
        }

    return Bench(
        component="dsa",
        op="sparse_mla",
        shape=f"b{batch}-h{HEADS}-k{topk}",
        draw=draw,
        flops=2.0 * batch * HEADS * topk * (WIDTH + VALUES),
        bytes=float(batch * (topk * (656 + 4) + 2 * HEADS * (WIDTH + VALUES))),
        promises={"clean_lists": True},
    )


BENCHES = (
    *(_chunk(tokens, keys, heads) for heads in (64, 32) for tokens, keys in ((4096, 8192), (1024, 65536))),
    *(_pages(batch, keys, 64) for batch, keys in ((1, 32768), (64, 32768), (128, 8192))),
    *(_decode(batch, 2048) for batch in (1, 128)),
)
