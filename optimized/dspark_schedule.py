"""Fast scheduling of verification; the contract is `reference/dspark_schedule.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_in_range, expect_shape
from deeptwin.reference.config import StepCost


def survival_rates_triton(confidence_bj: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`reference.dspark_schedule.survival_rates`.

    Raises:
        ValueError: confidence_bj has not two axes, or `out` does not fit.
        TypeError: confidences or `out` are not fp32.
    """
    expect_shape("confidence_bj", confidence_bj, "bj", {})
    expect_dtype("confidence_bj", confidence_bj, torch.float32)
    from deeptwin.kernels.triton_ops import dspark_schedule as kernels

    return kernels.survival_rates(confidence_bj, out=out)


def choose_total_vectorised(rate_bj: Tensor, count_b: Tensor, *, cost: StepCost) -> Tensor:
    """`reference.dspark_schedule.choose_total`, all numbers of tokens at once, on the CPU.

    Raises:
        ValueError: shapes disagree; a count is outside 0 … j; rates increase along a request, are NaN or outside
            [0, 1]; there are more requests than the largest graph has tokens.
        TypeError: rates are not fp32, or counts no integers.
    """
    import numpy as np

    stored_bj = _check_rates(rate_bj, count_b, trusted=False)
    requests = len(count_b)
    if requests > cost.sizes[-1]:
        raise ValueError(f"rate_bj: expected at most {cost.sizes[-1]} requests for the largest graph, got {requests}")
    rates = -np.sort(-rate_bj[stored_bj].cpu().numpy())
    # fp32 additions one after the other; a pairwise or fp64 sum would round elsewhere
    expected = np.add.accumulate(np.concatenate([np.array([requests], dtype=np.float32), rates]), dtype=np.float32)
    expected = expected[: cost.sizes[-1] - requests + 1].astype(np.float64)
    graph = np.searchsorted(np.array(cost.sizes), requests + np.arange(len(expected)))
    base = np.array(cost.base_ms, dtype=np.float32).astype(np.float64)[graph]
    time = base + max(0.0, cost.slope) * np.array(cost.sizes, dtype=np.float64)[graph] + cost.sampler_ms
    return torch.tensor([requests + int(np.argmax(expected / time))])  # the first of equal maxima


def allocate_vectorised(rate_bj: Tensor, count_b: Tensor, *, total: int) -> Tensor:
    """`reference.dspark_schedule.allocate` by one stable sort, on any device.

    Raises:
        ValueError: shapes disagree; a count is outside 0 … j; rates increase along a request, are NaN or outside
            [0, 1]; `total` is below the number of requests or above all their rows.
        TypeError: rates are not fp32, or counts no integers.
    """
    stored_bj = _check_rates(rate_bj, count_b, trusted=False)
    _check_total(total, len(count_b), int(count_b.sum()))
    request_y = stored_bj.nonzero()[:, 0]
    winners_y = torch.argsort(rate_bj[stored_bj], descending=True, stable=True)[: total - len(count_b)]
    wins_b = torch.bincount(request_y[winners_y], minlength=len(count_b))
    return (1 + wins_b).to(torch.int32)


def allocate_triton(
    rate_bj: Tensor, count_b: Tensor, *, total: int, trusted: bool = False, out: Tensor | None = None
) -> Tensor:
    """`reference.dspark_schedule.allocate` by counting how many drafts rank before each one.

    Inspecting values waits for the device. Without it rates that increase along a request give lengths that are no
    prefixes, a NaN ranks last, and a `total` out of range gives the nearest possible lengths.

    Raises:
        ValueError: shapes disagree; `out` does not fit; where values are inspected: a count is outside 0 … j; rates
            increase along a request, are NaN or outside [0, 1]; `total` is below the number of requests or above all
            their rows.
        TypeError: rates are not fp32, counts no integers, or `out` is not int32.
    """
    _check_rates(rate_bj, count_b, trusted=trusted)
    if not trusted:
        _check_total(total, len(count_b), int(count_b.sum()))
    from deeptwin.kernels.triton_ops import dspark_schedule as kernels

    return kernels.allocate(rate_bj, count_b, total=total, out=out)


def _check_total(total: int, requests: int, drafts: int) -> None:
    if not requests <= total <= requests + drafts:
        raise ValueError(f"total: expected {requests} to {requests + drafts}, got {total}")


def _check_rates(rate_bj: Tensor, count_b: Tensor, *, trusted: bool) -> Tensor:
    """Which rates belong to stored drafts."""
    dims: dict[str, int] = {}
    expect_shape("rate_bj", rate_bj, "bj", dims)
    expect_shape("count_b", count_b, "b", dims)
    expect_dtype("rate_bj", rate_bj, torch.float32)
    expect_dtype("count_b", count_b, torch.int32, torch.int64)
    stored_bj = torch.arange(dims["j"], device=rate_bj.device)[None, :] < count_b[:, None]
    if not trusted:
        expect_in_range("count_b", count_b, 0, dims["j"] + 1)
        is_rate_bj = (rate_bj >= 0) & (rate_bj <= 1)
        rises_bj = stored_bj[:, 1:] & (rate_bj[:, 1:] > rate_bj[:, :-1])
        bad_b = (stored_bj & ~is_rate_bj).any(1) | rises_bj.any(1)
        if bad_b.any():
            request = int(bad_b.nonzero()[0])
            got = rate_bj[request, : int(count_b[request])].tolist()
            raise ValueError(f"rate_bj: expected rates in [0, 1] that never increase, got {got} of request {request}")
    return stored_bj
