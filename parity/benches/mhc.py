"""Residual streams of V4.1: reads, coefficients, the update alone, the boundary between two sub-layers in one pass."""

from __future__ import annotations

import torch

from deeptwin.reference.config import MHC_V41
from deeptwin.reference.weights import MhcSite

from ..bench import Bench
from ..card import Inputs
from ..device_draws import DeviceDraws

WIDTH, STREAMS = 5120, 4
MIXES = (2 + STREAMS) * STREAMS


def _update(draws: DeviceDraws, tokens: int) -> Inputs:
    return {
        "stream_tnm": draws.normal(tokens, STREAMS, WIDTH),
        "y_tm": draws.normal(tokens, WIDTH),
        "post_tn": draws.normal(tokens, STREAMS, dtype=torch.float32).abs(),
        "comb_tnn": torch.softmax(draws.normal(tokens, STREAMS, STREAMS, dtype=torch.float32), -1),
    }


def _site(draws: DeviceDraws) -> Inputs:
    site = MhcSite(
        fn_wx=draws.normal(MIXES, STREAMS * WIDTH, dtype=torch.float32) * 0.01,
        scale_z=draws.normal(3, dtype=torch.float32),
        base_w=draws.normal(MIXES, dtype=torch.float32),
    )
    return {"site": site, "config": MHC_V41}


def _post(tokens: int) -> Bench:
    return Bench(
        component="mhc",
        op="mhc_post",
        shape=f"t{tokens}-n{STREAMS}-m{WIDTH}",
        draw=lambda draws: _update(draws, tokens),
        bytes=tokens * (2.0 * WIDTH * (2 * STREAMS + 1) + 4 * STREAMS * (1 + STREAMS)),
    )


def _mixes(tokens: int) -> Bench:
    return Bench(
        component="mhc",
        op="mhc_mixes",
        shape=f"t{tokens}-n{STREAMS}-m{WIDTH}",
        draw=lambda draws: {"stream_tnm": draws.normal(tokens, STREAMS, WIDTH)} | _site(draws),
        bytes=tokens * (2.0 * WIDTH * STREAMS + 4 * MIXES) + 4.0 * MIXES * STREAMS * WIDTH,
    )


def _boundary(tokens: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        pre = torch.sigmoid(draws.normal(tokens, STREAMS, dtype=torch.float32))
        return _update(draws, tokens) | {"pre_tn": pre} | _site(draws)

    return Bench(
        component="mhc",
        op="mhc_boundary",
        shape=f"t{tokens}-n{STREAMS}-m{WIDTH}",
        draw=draw,
        bytes=tokens * (4.0 * WIDTH * (STREAMS + 1) + 8 * MIXES) + 4.0 * MIXES * STREAMS * WIDTH,
    )


def _apply(tokens: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        pre = torch.sigmoid(draws.normal(tokens, STREAMS, dtype=torch.float32))
        return {"pre_tn": pre, "stream_tnm": draws.normal(tokens, STREAMS, WIDTH)}

    return Bench(
        component="mhc",
        op="mhc_apply",
        shape=f"t{tokens}-n{STREAMS}-m{WIDTH}",
        draw=draw,
        bytes=tokens * (2.0 * WIDTH * (STREAMS + 1) + 4 * STREAMS),
    )


def _sinkhorn(tokens: int) -> Bench:
    def draw(draws: DeviceDraws) -> Inputs:
        logits = draws.normal(tokens, STREAMS, STREAMS, dtype=torch.float32)
        return {"logits_tnn": logits, "iters": MHC_V41.sinkhorn_iters, "eps": MHC_V41.eps}

    return Bench(
        component="mhc",
        op="mhc_sinkhorn",
        shape=f"t{tokens}-n{STREAMS}-i{MHC_V41.sinkhorn_iters}",
        draw=draw,
        bytes=8.0 * tokens * STREAMS * STREAMS,
    )


BENCHES = (
    *(_apply(tokens) for tokens in (64, 8192)),
    *(_sinkhorn(tokens) for tokens in (64, 4096)),
    *(_post(tokens) for tokens in (64, 8192)),
    *(_mixes(tokens) for tokens in (64, 8192)),
    *(_boundary(tokens) for tokens in (64, 8192)),
)
