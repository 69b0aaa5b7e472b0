"""The runner of a model: which class steps through which generation."""

from __future__ import annotations

import torch

from deeptwin.reference.model_weights import V3Model, V4Model, V41Model
from deeptwin.reference.presets import V3Config, V4Config

from .plan import Plan
from .steps import Runner
from .steps_v3 import V3Runner
from .steps_v4 import V4Runner
from .steps_v41 import Stack, V41Runner


def runner_of(
    config: V3Config | V4Config | Stack,
    weights: V3Model | V4Model | V41Model,
    plan: Plan,
    *,
    pages: int,
    states: int,
    page_tokens: int,
    backtracking: int = 6,
    positions: int | None = None,
    device: torch.device | str = "cpu",
) -> Runner:
    """A model over so many pages and states, the null ones among them.

    `backtracking` is the longest decode step, an anchor and its drafts; `positions` how long a sequence may get, by
    default as long as the model allows.

    Raises:
        ValueError: weights are of another generation than `config`, there are fewer than two pages or states, or
            page_tokens is no multiple of a compression ratio.
    """
    for name, count in (("pages", pages), ("states", states)):
        if count < 2:
            raise ValueError(f"{name}: expected at least 2, the null one and another, got {count}")
    sizes = {"pages": pages, "page_tokens": page_tokens}
    if isinstance(config, V3Config) and isinstance(weights, V3Model):
        longest = config.max_positions if positions is None else positions
        return V3Runner(config, weights, plan, **sizes, positions=longest, device=device)
    sizes |= {"states": states, "backtracking": backtracking}
    if isinstance(config, V4Config) and isinstance(weights, V4Model):
        longest = config.max_positions if positions is None else positions
        return V4Runner(config, weights, plan, **sizes, positions=longest, device=device)
    if isinstance(weights, V41Model) and not isinstance(config, V3Config | V4Config):
        longest = config.model.max_positions if positions is None else positions
        return V41Runner(config, weights, plan, **sizes, positions=longest, device=device)
    raise ValueError(f"weights: expected those of {type(config).__name__}, got {type(weights).__name__}")
