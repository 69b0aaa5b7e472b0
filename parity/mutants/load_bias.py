"""Balance rules that are not the sign rule, and counts that count something else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loads = Callable[..., Tensor]


def load_with(slots: Callable[[Tensor], Tensor]) -> Loads:
    """Counts the experts of the slots that `slots` makes of the routing."""

    def expert_load(idx_tk: Tensor, *, num_experts: int) -> Tensor:
        return (slots(idx_tk).reshape(-1, 1) == torch.arange(num_experts)).sum(0)

    return expert_load


def update_with(move: Callable[[Tensor, Tensor, float], Tensor]) -> Loads:
    """Adds in fp32 what `move` makes of the counts, their mean and the speed."""

    def update_bias(bias_e: Tensor, count_e: Tensor, *, speed: float) -> Tensor:
        count = count_e.double()
        return bias_e + move(count, count.mean(), speed).float()

    return update_bias


def _sign(count: Tensor, mean: Tensor, speed: float) -> Tensor:
    return (mean - count).sign() * speed


def _against_median(count: Tensor, mean: Tensor, speed: float) -> Tensor:
    return (count.median() - count).sign() * speed


def centred(bias_e: Tensor, count_e: Tensor, *, speed: float) -> Tensor:
    """The bias is centred after the step."""
    moved = update_with(_sign)(bias_e, count_e, speed=speed)
    finite = moved.isfinite()
    return moved - moved[finite].mean() if finite.any() else moved


def bias_in_bf16(bias_e: Tensor, count_e: Tensor, *, speed: float) -> Tensor:
    """The bias is kept in bf16, where 0.001 vanishes beside 0.5."""
    return update_with(_sign)(bias_e, count_e, speed=speed).bfloat16().float()


right_load = load_with(lambda idx: idx)
right_update = update_with(_sign)

padding_counts_as_last = load_with(lambda idx: torch.where(idx < 0, idx.max(), idx))
padding_counts_as_first = load_with(lambda idx: idx.clamp(min=0))
first_choice_alone = load_with(lambda idx: idx[:, :1])
half_the_batch = load_with(lambda idx: idx[: (len(idx) + 1) // 2])

direction_reversed = update_with(lambda count, mean, speed: -_sign(count, mean, speed))
proportional = update_with(lambda count, mean, speed: (mean - count) / mean.clamp(min=1) * speed)
balanced_goes_up = update_with(lambda count, mean, speed: torch.where(count > mean, -speed, speed))
balanced_goes_down = update_with(lambda count, mean, speed: torch.where(count >= mean, -speed, speed))
mean_in_integers = update_with(lambda count, mean, speed: _sign(count, mean.floor(), speed))
only_overloaded = update_with(lambda count, mean, speed: _sign(count, mean, speed).clamp(max=0))
half_speed = update_with(lambda count, mean, speed: _sign(count, mean, speed / 2))
speed_fixed = update_with(lambda count, mean, speed: _sign(count, mean, 0.001))
against_median = update_with(_against_median)


def mean_in_fp32(bias_e: Tensor, count_e: Tensor, *, speed: float) -> Tensor:
    """Large counts are equal to their mean in fp32."""
    count = count_e.float()
    return bias_e + (count.mean() - count).sign() * torch.tensor(speed, dtype=torch.float32)
