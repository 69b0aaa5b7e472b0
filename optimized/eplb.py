"""Balance of experts over devices, all layers at once."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.checks import expect_dtype, expect_shape
from deeptwin.reference.config import RebalanceConfig, ShuffleStep


def initial_placement_torch(*, layers: int, num_experts: int, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.eplb.initial_placement`.

    Raises:
        ValueError: there is no expert, a negative number of layers, or fewer slots than experts.
    """
    if layers < 0 or num_experts < 1:
        raise ValueError(f"num_experts: expected at least 1 in 0 or more layers, got {num_experts} in {layers}")
    _check_slots(num_slots, num_experts, 1)
    expert_lp = (torch.arange(num_slots) % num_experts).expand(layers, -1).contiguous()
    copies_le = _copies(expert_lp, num_experts)
    map_lej = _slot_map(expert_lp, torch.arange(num_slots).expand_as(expert_lp), num_experts)
    return expert_lp, map_lej, copies_le


def place_experts_torch(count_tle: Tensor, *, num_slots: int, slots_per_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.eplb.place_experts`; sums over steps in fp64, rounded once.

    Raises:
        ValueError: counts are not 3-D, negative, or without expert; there are fewer slots than experts, or a number
            that the ranks cannot share.
        TypeError: counts are not int32.
    """
    dims: dict[str, int] = {}
    expect_shape("count_tle", count_tle, "tle", dims)
    expect_dtype("count_tle", count_tle, torch.int32)
    if not dims["e"]:
        raise ValueError("count_tle: expected at least one expert, got none")
    if (count_tle < 0).any():
        raise ValueError(f"count_tle: expected 0 or more, got {count_tle.min().item()}")
    _check_slots(num_slots, dims["e"], slots_per_rank)
    load_lte = count_tle.transpose(0, 1).float()
    expert_lp, copies_le = _replicate(load_lte, num_slots)
    place_lp = _pack(load_lte, expert_lp, copies_le, slots_per_rank)
    map_lej = _slot_map(expert_lp, place_lp, dims["e"])
    return torch.empty_like(expert_lp).scatter_(1, place_lp, expert_lp), map_lej, copies_le


def shuffle_plan_torch(old_lp: Tensor, new_lp: Tensor, *, slots_per_rank: int) -> tuple[Tensor, Tensor]:
    """`reference.eplb.shuffle_plan`.

    Raises:
        ValueError: shapes differ; slots are not the same number on every rank; an expert is negative or a new one is
            held nowhere.
        TypeError: an argument is not int64.
    """
    dims: dict[str, int] = {}
    for name, value in (("old_lp", old_lp), ("new_lp", new_lp)):
        expect_shape(name, value, "lp", dims)
        expect_dtype(name, value, torch.int64)
        if (value < 0).any():
            raise ValueError(f"{name}: expected experts from 0 on, got {value.min().item()}")
    _check_slots(dims["p"], 1, slots_per_rank)
    layers, slots = new_lp.shape
    if not new_lp.numel():
        return torch.empty_like(new_lp), torch.empty_like(new_lp)
    num_experts = int(torch.maximum(old_lp.max(), new_lp.max())) + 1
    ranks = slots // slots_per_rank
    # first slot of every expert on every rank, or `slots` where the rank holds none
    old_ler, new_ler = (_first_slots(x, num_experts, slots_per_rank) for x in (old_lp, new_lp))
    holds_ler = old_ler < slots
    needs_ler = (new_ler < slots) & ~holds_ler
    holders_le, needy_le = holds_ler.sum(-1), needs_ler.sum(-1)
    lost = (needy_le > 0) & (holders_le == 0)
    if lost.any():
        raise ValueError(f"new_lp: expected experts that old_lp holds, got {int(lost.nonzero()[0, 1])}")
    j_ler = needs_ler.cumsum(-1) - 1
    each_le = needy_le // holders_le.clamp(min=1)
    even_le = each_le * holders_le
    server_ler = torch.where(
        j_ler < even_le[..., None],
        torch.div(j_ler, each_le.clamp(min=1)[..., None], rounding_mode="floor"),
        j_ler - even_le[..., None],
    )
    # ranks that hold the expert, ascending, stand first in a stable sort
    holder_ler = torch.sort((~holds_ler).to(torch.int8), dim=-1, stable=True).indices
    sender_ler = holder_ler.gather(-1, server_ler.clamp(0, ranks - 1))
    remote_ler = old_ler.gather(-1, sender_ler)
    slot_lp = torch.arange(slots, device=new_lp.device).expand_as(new_lp)
    rank_lp = slot_lp // slots_per_rank

    def at(x_ler: Tensor) -> Tensor:
        return x_ler.flatten(1).gather(1, new_lp * ranks + rank_lp)

    local_lp, receives_lp = at(old_ler), at(new_ler)
    step_lp = torch.where(receives_lp == slot_lp, int(ShuffleStep.RECEIVE), int(ShuffleStep.SHARE))
    source_lp = torch.where(receives_lp == slot_lp, at(remote_ler), receives_lp)
    is_local, is_kept = local_lp < slots, old_lp == new_lp
    step_lp = torch.where(is_local, int(ShuffleStep.COPY), step_lp)
    source_lp = torch.where(is_local, local_lp, source_lp)
    return torch.where(is_kept, int(ShuffleStep.KEEP), step_lp), torch.where(is_kept, slot_lp, source_lp)


def rebalance_steps_torch(is_prefill_t: Tensor, *, config: RebalanceConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.eplb.rebalance_steps`.

    Raises:
        ValueError: is_prefill_t is not 1-D.
        TypeError: is_prefill_t is not bool.
    """
    expect_shape("is_prefill_t", is_prefill_t, "t", {})
    expect_dtype("is_prefill_t", is_prefill_t, torch.bool)
    every = config.prefill_engine or config.after_prefill
    kept_t = torch.ones_like(is_prefill_t) if every else ~is_prefill_t
    if not config.interval:
        kept_t = torch.zeros_like(is_prefill_t)
    recorded_t = kept_t.cumsum(0)
    if config.after_prefill:
        before_t = torch.cat([is_prefill_t.new_zeros(min(1, len(is_prefill_t))), is_prefill_t[:-1]])
        moves_t = before_t & ~is_prefill_t & kept_t
    else:
        early = max(1, config.interval // 4)
        due_t = (recorded_t >= early) & ((recorded_t - early) % max(1, config.interval) == 0)
        moves_t = kept_t & due_t
    return kept_t, moves_t, recorded_t.clamp(max=config.window)


def _replicate(load_lte: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    layers, steps, experts = load_lte.shape
    numbers = torch.arange(experts, device=load_lte.device)
    tied_lte = load_lte + numbers.float() * torch.tensor(1e-4, dtype=torch.float32)
    copies_le = torch.ones(layers, experts, dtype=torch.int64, device=load_lte.device)
    expert_lp = numbers.expand(layers, -1)
    for _ in range(num_slots - experts):
        chosen_l = _best_copy(load_lte, tied_lte, copies_le) if layers else expert_lp[:, 0]
        copies_le = copies_le.scatter_add(1, chosen_l[:, None], torch.ones_like(chosen_l[:, None]))
        expert_lp = torch.cat([expert_lp, chosen_l[:, None]], 1)
    return expert_lp.contiguous(), copies_le


def _best_copy(load_lte: Tensor, tied_lte: Tensor, copies_le: Tensor) -> Tensor:
    """The expert of every layer whose further copy leaves the least sum of peaks."""
    share_lte = tied_lte / copies_le[:, None].float()
    peak_lt, busiest_lt = share_lte.max(-1) if share_lte.numel() else (share_lte[..., 0], share_lte[..., 0].long())
    # torch.max leaves open which of equal entries it names
    is_peak_lte = share_lte == peak_lt[..., None]
    busiest_lt = is_peak_lte.to(torch.int8).argmax(-1) if share_lte.numel() else busiest_lt
    others_lte = share_lte.scatter(-1, busiest_lt[..., None], -torch.inf)
    fewer_lte = load_lte / (copies_le + 1)[:, None].float()
    relieved_lt = torch.maximum(others_lte.amax(-1), fewer_lte.gather(-1, busiest_lt[..., None])[..., 0])
    # a step lowers the total of its busiest expert alone
    gain_le = torch.zeros(copies_le.shape, dtype=torch.float64, device=load_lte.device)
    gain_le.scatter_add_(1, busiest_lt, relieved_lt.double() - peak_lt.double())
    total_le = (peak_lt.double().sum(-1, keepdim=True) + gain_le).float()
    return (total_le == total_le.amin(-1, keepdim=True)).to(torch.int8).argmax(-1)


def _pack(load_lte: Tensor, expert_lp: Tensor, copies_le: Tensor, slots_per_rank: int) -> Tensor:
    layers, slots = expert_lp.shape
    if slots_per_rank == 1 or not layers:
        return torch.arange(slots, device=expert_lp.device).expand_as(expert_lp)
    ranks = slots // slots_per_rank
    share_let = (load_lte / copies_le[:, None].float()).transpose(1, 2).contiguous()
    weight_lp = share_let.double().sum(-1).float().gather(1, expert_lp)
    order_lp = torch.sort(weight_lp, dim=1, descending=True, stable=True).indices
    layer = torch.arange(layers, device=expert_lp.device)
    rank_lrt = share_let.new_zeros(layers, ranks, share_let.shape[-1])
    filled_lr = torch.zeros(layers, ranks, dtype=torch.int64, device=expert_lp.device)
    peak_lt = share_let.new_zeros(layers, share_let.shape[-1])
    place_lp = torch.empty_like(expert_lp)
    for slot_l in order_lp.unbind(1):
        more_lt = share_let[layer, expert_lp[layer, slot_l]]
        loaded_lrt = rank_lrt + more_lt[:, None]
        total_lr = torch.maximum(peak_lt[:, None], loaded_lrt).double().sum(-1).float()
        total_lr = total_lr.masked_fill(filled_lr >= slots_per_rank, torch.inf)
        best_l = (total_lr == total_lr.amin(-1, keepdim=True)).to(torch.int8).argmax(-1)
        place_lp[layer, slot_l] = best_l * slots_per_rank + filled_lr[layer, best_l]
        filled_lr[layer, best_l] += 1
        rank_lrt[layer, best_l] = loaded_lrt[layer, best_l]
        peak_lt = torch.maximum(peak_lt, loaded_lrt[layer, best_l])
    return place_lp


def _first_slots(expert_lp: Tensor, num_experts: int, slots_per_rank: int) -> Tensor:
    """The first slot of every rank that holds an expert, [l, e, r], or the number of slots."""
    layers, slots = expert_lp.shape
    ranks = slots // slots_per_rank
    slot_lp = torch.arange(slots, device=expert_lp.device).expand_as(expert_lp)
    first = torch.full((layers, num_experts * ranks), slots, dtype=torch.int64, device=expert_lp.device)
    first.scatter_reduce_(1, expert_lp * ranks + slot_lp // slots_per_rank, slot_lp, "amin")
    return first.view(layers, num_experts, ranks)


def _copies(expert_lp: Tensor, num_experts: int) -> Tensor:
    counts = torch.zeros(len(expert_lp), num_experts, dtype=torch.int64, device=expert_lp.device)
    return counts.scatter_add_(1, expert_lp, torch.ones_like(expert_lp))


def _slot_map(expert_lp: Tensor, place_lp: Tensor, num_experts: int) -> Tensor:
    """The places of every expert's copies, in slot order, then -1."""
    layers, slots = expert_lp.shape
    width = slots - num_experts + 1
    order_lp = torch.sort(expert_lp, dim=1, stable=True).indices
    sorted_lp = expert_lp.gather(1, order_lp)
    copies_le = _copies(expert_lp, num_experts)
    start_le = copies_le.cumsum(1) - copies_le
    nth_lp = torch.arange(slots, device=expert_lp.device) - start_le.gather(1, sorted_lp)
    map_lx = expert_lp.new_full((layers, num_experts * width), -1)
    map_lx.scatter_(1, sorted_lp * width + nth_lp, place_lp.gather(1, order_lp))
    return map_lx.view(layers, num_experts, width)


def _check_slots(num_slots: int, num_experts: int, slots_per_rank: int) -> None:
    if num_slots < num_experts:
        raise ValueError(f"num_slots: expected at least {num_experts} for as many experts, got {num_slots}")
    if slots_per_rank < 1 or num_slots % slots_per_rank:
        raise ValueError(f"slots_per_rank: expected a divisor of {num_slots} slots, got {slots_per_rank}")
