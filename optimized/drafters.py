"""The drafter of a model: which class drafts for which runner."""

from __future__ import annotations

from deeptwin.reference.config import Draw
from deeptwin.reference.dspark_state import DraftMain, DraftModel
from deeptwin.reference.mtp_weights import MtpV3Weights, MtpV4Weights

from .drafter import Drafter
from .drafter_dspark import DsparkDrafter
from .drafter_mtp import MtpDrafter, V3Module, V4Module
from .steps import Runner
from .steps_v3 import V3Runner
from .steps_v4 import V4Runner
from .steps_v41 import V41Runner


def drafter_of(
    runner: Runner,
    weights: MtpV3Weights | MtpV4Weights | tuple[DraftModel, DraftMain],
    *,
    gamma: int,
    states: int,
    draw: Draw,
) -> Drafter:
    """What drafts beside a runner, over as many pages and states, with its plan.

    Raises:
        ValueError: weights are of another generation than the runner; gamma is not positive, above what a step of the
            runner may take back, or for V4.1 not the length of the block.
    """
    plan = runner.plan
    if isinstance(runner, V3Runner) and isinstance(weights, MtpV3Weights):
        table_sr, view = runner.table_sr, next(iter(runner.cache_views().values()))
        sizes = {"pages": len(view), "page_tokens": runner.page_tokens, "positions": len(table_sr)}
        v3 = V3Module(runner.config, weights, plan, **sizes, device=table_sr.device)
        return MtpDrafter(v3, gamma=gamma, states=states, draw=draw, plan=plan, device=table_sr.device)
    if isinstance(runner, V4Runner) and isinstance(weights, MtpV4Weights):
        table_sr, backtracking = runner.tables[0], runner.attn[0].backtracking
        _expect_room(gamma, backtracking)
        sizes = {"states": states, "backtracking": backtracking, "positions": len(table_sr)}
        v4 = V4Module(runner.config, weights, plan, **sizes, device=table_sr.device)
        return MtpDrafter(v4, gamma=gamma, states=states, draw=draw, plan=plan, device=table_sr.device)
    if isinstance(runner, V41Runner) and isinstance(weights, tuple):
        model, main = weights
        _expect_room(gamma, runner.csa2.backtracking)
        if gamma != model.block.draft:
            raise ValueError(f"gamma: expected {model.block.draft}, the length of the block, got {gamma}")
        views, first = runner.cache_views(), runner.model.num_layers
        rings = [views[f"layers.{first + i}.ring"] for i in range(len(model.layers))]
        return DsparkDrafter(model, main, rings, runner.caches.window_table, draw=draw, ops=plan)
    raise ValueError(f"weights: expected those of {type(runner).__name__}, got {type(weights).__name__}")


def _expect_room(gamma: int, backtracking: int) -> None:
    if gamma + 1 > backtracking:
        raise ValueError(f"gamma: expected at most {backtracking - 1}, an anchor and drafts in a step, got {gamma}")
