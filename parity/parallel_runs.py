"""What several processes must do as one: scenarios of `distributed`.

Context parallel attention, the exchange of bounded replay, experts on other ranks (with copies, under any placement),
requests on any rank of attention data parallelism, and experts that move. Everything is compared byte by byte; keys
that are split over ranks also within the budget of one list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import (
    ROUTER_V41,
    Combine,
    MoeConfig,
    RouterConfig,
    ShuffleStep,
    moe_v41,
)
from deeptwin.reference.context_parallel import compact_exchange, mirror_keys, mirror_split, take_rows
from deeptwin.reference.eplb import initial_placement, place_experts, shuffle_plan
from deeptwin.reference.quant import quantize
from deeptwin.reference.router import map_replicas
from deeptwin.reference.weights import ExpertWeights

from . import draws
from .card import Inputs, load_card
from .distributed import Group, Pairs
from .oracles import OracleSet

EXPERTS, TOPK, MODEL, INNER = 8, 3, 128, 64
HEADS, DIM = 2, 32


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The functions that compute: the reference on a CPU, kernels on a device."""

    sparse_attn: Callable[..., tuple[Tensor, Tensor]]
    route: Callable[..., tuple[Tensor, Tensor]]
    dispatch: Callable[..., tuple[Tensor, Tensor, Tensor]]
    expert_up: Callable[..., tuple[Tensor, Tensor]]
    linear_grouped: Callable[..., Tensor]
    combine: Callable[..., Tensor]

    @staticmethod
    def of(group: Group) -> Arithmetic:
        """What the device of the group computes with."""
        if group.device.type == "cpu":
            from deeptwin.reference import linear, moe, router, sparse_attn

            return Arithmetic(
                sparse_attn=sparse_attn.sparse_attn,
                route=router.route,
                dispatch=moe.dispatch,
                expert_up=moe.expert_up,
                linear_grouped=linear.linear_grouped,
                combine=moe.combine,
            )
        from deeptwin.optimized import linear as fast_linear
        from deeptwin.optimized import moe as fast_moe
        from deeptwin.optimized import router as fast_router
        from deeptwin.optimized import sparse_attn as fast_attn

        return Arithmetic(
            sparse_attn=fast_attn.sparse_attn_triton,
            route=fast_router.route_triton,
            dispatch=fast_moe.dispatch_triton,
            expert_up=fast_moe.expert_up_triton,
            linear_grouped=fast_linear.linear_grouped_triton,
            combine=fast_moe.combine_triton,
        )


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How the group works; the defaults are right, other values are the faults that the harness must see."""

    gather_reversed: bool = False  # shards are put together from the last rank to the first
    padding_attends: bool = False  # padding rows see the keys of their sequence
    kept_of_rank_0: bool = False  # every rank sends the rows that rank 0 should
    combine: str = "slots"  # slots (in order), arrival (by sending rank), partial (rounded sum per rank)
    padding_routed: bool = False  # placeholder rows of idle ranks go to experts
    next_rank: bool = False  # a row goes to the slot of the next rank, whatever it holds
    shared_late: bool = True  # copies of received weights are made after they arrive
    lse_base_2: bool = False  # partial results are merged as if their LSE were in base 2
    split_by_mates: bool = False  # where the keys are cut depends on the batch


RIGHT = Habits()


# attention over a split prefill


def context_parallel(group: Group, habits: Habits = RIGHT) -> Pairs:
    """Rows of three sequences on all ranks: keys gathered, attention of the own rows, output put back."""
    rng, do = group.rng("context"), Arithmetic.of(group)
    rows = torch.tensor([21, 5, 1])
    q_tz = draws.normal(rng, int(rows.sum()), HEADS * DIM, dtype=torch.bfloat16).to(group.device)
    kv_td = draws.normal(rng, int(rows.sum()), DIM, dtype=torch.bfloat16).to(group.device)
    sink_h = draws.normal(rng, HEADS, dtype=torch.float32).to(group.device)
    longest = int(rows.max())

    def attend(index_i: Tensor, keys_td: Tensor, first_i: Tensor, end_i: Tensor) -> Tensor:
        place = torch.arange(longest)
        idx = torch.where(place < (end_i - first_i)[:, None], first_i[:, None] + place, -1)
        q = take_rows(q_tz, index_i).view(-1, HEADS, DIM)
        idx = idx.to(torch.int32).to(group.device)
        out, _ = do.sparse_attn(q, keys_td, idx, sink_h, None, scale=DIM**-0.5, value_dim=DIM)
        return out.to(torch.bfloat16).flatten(1)

    gather_ci, inverse_t = mirror_split(rows, ranks=group.world)
    _, first_ci, end_ci = mirror_keys(rows, rows, ranks=group.world, ratio=1)
    if habits.padding_attends:
        end_ci = torch.where(gather_ci < 0, first_ci + 1, end_ci)
    own = gather_ci[group.rank]
    keys = take_rows(_together(group, take_rows(kv_td, own), habits), inverse_t)
    shard = attend(own, keys, first_ci[group.rank], end_ci[group.rank])
    out = take_rows(_together(group, shard, habits), inverse_t)
    whole = torch.arange(int(rows.sum()))
    _, first_1i, end_1i = (x[0, mirror_split(rows, ranks=1)[1]] for x in mirror_keys(rows, rows, ranks=1, ratio=1))
    alone = attend(whole, kv_td, first_1i, end_1i)
    return {
        "keys": (keys, kv_td),
        "attention": (out, alone),
        "padding rows": (shard[own < 0], torch.zeros_like(shard[own < 0])),
    }


def merged_keys(group: Group, habits: Habits = RIGHT) -> Pairs:
    """Every rank holds a part of the keys of each query; partial results are merged by their LSE, natural logarithms.

    The merge is compared bit by bit with one rank that makes the same parts, alone and beside other queries; the whole
    list at once sums in another order and is compared within the budget of fp32 attention.
    """
    do, dtype = Arithmetic.of(group), torch.float32
    tokens, keys = 4, 96
    rng = group.rng("merged")
    q_thd = draws.normal(rng, tokens, HEADS, DIM, dtype=dtype).to(group.device)
    kv_sd = draws.normal(rng, keys, DIM, dtype=dtype).to(group.device)
    sink_h = draws.normal(rng, HEADS, dtype=dtype).to(group.device)
    seen_t = torch.tensor([keys, 1, 0, 50])

    def part(rank: int, q: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Output and LSE of one rank's keys: every world-th block of eight."""
        blocks = group.world + (habits.split_by_mates and len(q) == 1)
        place = torch.arange(keys)
        idx = torch.where((place < seen[:, None]) & (place // 8 % blocks % group.world == rank), place, -1)
        idx = idx.to(torch.int32).to(group.device)
        out, lse = do.sparse_attn(q, kv_sd, idx, None, None, scale=DIM**-0.5, value_dim=DIM, dtype=dtype)
        return out.to(dtype), lse.to(dtype)

    def merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """In the order of the ranks; a part without keys has LSE −inf and no weight."""
        unit = 0.6931471805599453 if habits.lse_base_2 else 1.0
        lse = torch.stack([lse for _, lse in parts]) * unit
        total = torch.logaddexp(lse.logsumexp(0), sink_h)
        weight = torch.exp(lse - total)
        return sum((w[..., None] * out for w, (out, _) in zip(weight, parts, strict=True)), torch.zeros_like(q_thd[:1]))

    out, lse = part(group.rank, q_thd, seen_t)
    packed = group.gathered(torch.cat([out, lse[..., None]], -1)).view(group.world, tokens, HEADS, DIM + 1)
    together = merged([(one[..., :DIM], one[..., DIM]) for one in packed])
    alone = merged([part(rank, q_thd, seen_t) for rank in range(group.world)])
    single = [
        merged([part(rank, q_thd[t : t + 1], seen_t[t : t + 1]) for rank in range(group.world)]) for t in range(tokens)
    ]
    place = torch.arange(keys)
    whole = {
        "q_thd": q_thd.cpu(),
        "kv_sd": kv_sd.cpu(),
        "idx_tk": torch.where(place < seen_t[:, None], place, -1).to(torch.int32),
        "sink_h": sink_h.cpu(),
        "topk_length_t": None,
        "scale": DIM**-0.5,
        "value_dim": DIM,
        "dtype": dtype,
    }
    return {
        "merged": (together, alone),
        "queries alone": (together, torch.cat(single)),
        "within the budget of one list": _within_budget(together.cpu(), whole),
    }


def _within_budget(out_thu: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Whether the card of sparse attention passes an output; a pair like the others."""
    op = load_card("sparse_attn").op("sparse_attn")
    output = op.outputs[0]
    judgement = output.rule_for(out_thu.dtype).judge(out_thu, OracleSet(op, inputs).of(output))
    return torch.tensor([judgement.ok]), torch.tensor([True])


def bounded_replay(group: Group, habits: Habits = RIGHT) -> Pairs:
    """The last rows of every sequence leave the full split and are split anew."""
    rng = group.rng("replay")
    rows, kept = torch.tensor([23, 6, 2]), torch.tensor([9, 6, 1])
    x_tm = draws.normal(rng, int(rows.sum()), 16, dtype=torch.bfloat16).to(group.device)
    sent_ci, arrival_t = compact_exchange(rows, kept, ranks=group.world)
    shard = take_rows(x_tm, mirror_split(rows, ranks=group.world)[0][group.rank])
    mine = sent_ci[0 if habits.kept_of_rank_0 else group.rank]
    arrived = take_rows(_together(group, take_rows(shard, mine), habits), arrival_t)
    start = rows.cumsum(0) - kept
    wanted = torch.cat([x_tm[int(s) : int(s + k)] for s, k in zip(start, kept, strict=True)])
    again_ci, inverse_t = mirror_split(kept, ranks=group.world)
    back = take_rows(_together(group, take_rows(arrived, again_ci[group.rank]), habits), inverse_t)
    return {"kept rows": (arrived, wanted), "second split": (back, wanted)}


def _together(group: Group, shard: Tensor, habits: Habits) -> Tensor:
    whole = group.gathered(shard)
    return whole.view(group.world, *shard.shape).flip(0).flatten(0, 1) if habits.gather_reversed else whole


# experts on other ranks


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A router and its experts, the same on every rank; ranks hold the slots of a placement."""

    gate_em: Tensor
    bias_e: Tensor
    experts: ExpertWeights
    router: RouterConfig
    moe: MoeConfig

    @staticmethod
    def drawn(group: Group) -> Layer:
        """Eight experts in MXFP4, three a token; every other one returns large values, so the order of a sum shows."""
        rng, config = group.rng("experts"), moe_v41(Combine.SINGLE)

        def quantised(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            w = draws.normal(rng, EXPERTS, rows, columns, dtype=torch.float32, scale=columns**-0.5)
            if rows == MODEL:
                w[::2] *= 2.0**23
            codes, sf = (torch.stack(x) for x in zip(*(quantize(one, fmt=config.routed) for one in w), strict=True))
            return codes.to(group.device), sf.to(group.device)

        (w13_q, w13_sf), (w2_q, w2_sf) = quantised(2 * INNER, MODEL), quantised(MODEL, INNER)
        return Layer(
            gate_em=draws.normal(rng, EXPERTS, MODEL, dtype=torch.float32, scale=MODEL**-0.5).to(group.device),
            bias_e=draws.normal(rng, EXPERTS, dtype=torch.float32, scale=0.1).to(group.device),
            experts=ExpertWeights(w13_q=w13_q, w13_sf=w13_sf, w2_q=w2_q, w2_sf=w2_sf),
            router=replace(ROUTER_V41, num_experts=EXPERTS, topk=TOPK),
            moe=config,
        )

    def routed(self, x_tm: Tensor, mask_t: Tensor, do: Arithmetic) -> tuple[Tensor, Tensor]:
        """Experts and weights of rows; logits are fp64 sums, rounded once."""
        logits = (x_tm.double()[:, None] * self.gate_em.double()).sum(-1).float()
        idx, weights = do.route(logits, self.bias_e, None, None, mask_t, config=self.router)
        return idx, weights.to(torch.float32)

    def computed(self, slots_p: Tensor, rows: tuple[Tensor, ...], do: Arithmetic) -> Tensor:
        """Rows (codes, scales, routing weight, place among `slots_p`) through the experts of these slots."""
        x_q, x_sf, weight_y, place_y = rows
        order = torch.sort(place_y, stable=True).indices
        sizes = torch.bincount(place_y, minlength=len(slots_p))
        e = self.experts
        held = [w[slots_p] for w in (e.w13_q, e.w13_sf, e.w2_q, e.w2_sf)]
        v = do.expert_up(x_q[order], x_sf[order], held[0], held[1], sizes, weight_y[order], config=self.moe)
        out = do.linear_grouped(*v, held[2], held[3], sizes, x_fmt=self.moe.activation, w_fmt=self.moe.routed)
        return torch.empty_like(out).index_copy_(0, order, out).to(torch.bfloat16)

    def alone(self, x_tm: Tensor, mask_t: Tensor, do: Arithmetic) -> Tensor:
        """The block on one rank, every expert once."""
        idx, weights = self.routed(x_tm, mask_t, do)
        return self._block(x_tm, idx, weights, do, lambda rows: self.computed(torch.arange(EXPERTS), rows, do))

    def _block(
        self,
        x_tm: Tensor,
        place_tk: Tensor,
        weights_tk: Tensor,
        do: Arithmetic,
        compute: Callable[[tuple[Tensor, ...]], Tensor],
        rank_tk: Tensor | None = None,
    ) -> Tensor:
        """Quantise, send every slot's row through `compute`, add up in slot order."""
        x_q, x_sf = quantize(x_tm.cpu(), fmt=self.moe.activation)
        x_q, x_sf = x_q.to(x_tm.device), x_sf.to(x_tm.device)
        used = (place_tk >= 0).nonzero()
        token, place = used[:, 0], place_tk[place_tk >= 0]
        out_ym = compute((x_q[token], x_sf[token], weights_tk[place_tk >= 0], place))
        row_tk = torch.full_like(place_tk, -1, dtype=torch.int32)
        row_tk[place_tk >= 0] = torch.arange(len(token), dtype=torch.int32, device=row_tk.device)
        rule = Combine.SINGLE if rank_tk is None else Combine.MULTIPLE
        y_tm = do.combine(out_ym, row_tk, rank_tk, None, None, rule=rule, dtype=torch.float32)
        return y_tm.to(torch.float32)  # the reference returns its carrier

    def spread(
        self, x_tm: Tensor, mask_t: Tensor, placement: Placement, group: Group, do: Arithmetic, habits: Habits
    ) -> Tensor:
        """The block with experts on all ranks: rows go to the rank of their slot's copy and come back."""
        idx, weights = self.routed(x_tm, mask_t, do)
        if habits.padding_routed:
            idx = torch.where(mask_t[:, None], idx, torch.arange(TOPK, device=idx.device))
            weights = torch.where(mask_t[:, None], weights, 1.0)
        slot_tk = map_replicas(idx.cpu(), placement.map_ej, placement.count_e, ep_rank=group.rank)
        if habits.next_rank:
            slot_tk = torch.where(slot_tk >= 0, (slot_tk + placement.cap) % len(placement.expert_p), -1)
        if habits.combine == "arrival":  # slots come in the order of their rank
            order = torch.sort(slot_tk, dim=-1, stable=True).indices
            slot_tk, weights = slot_tk.gather(-1, order), weights.gather(-1, order.to(weights.device))
        rank_tk = (slot_tk // placement.cap).to(torch.int32).to(x_tm.device) if habits.combine == "partial" else None

        def compute(rows: tuple[Tensor, ...]) -> Tensor:
            rank_y = (rows[3] // placement.cap).cpu()
            mine = [(rank_y == rank).nonzero().flatten().to(x_tm.device) for rank in range(group.world)]
            came = [group.exchanged([(x if x.dim() > 1 else x[:, None])[i] for i in mine]) for x in rows]
            counts = [len(part) for part in came[0]]
            got = [torch.cat(parts) for parts in came]
            place = got[3].flatten() - group.rank * placement.cap
            slots = placement.expert_p[group.rank * placement.cap : (group.rank + 1) * placement.cap]
            out = self.computed(slots.to(x_tm.device), (got[0], got[1], got[2].flatten(), place), do)
            back = group.exchanged(list(out.split(counts)))
            whole = torch.empty(len(rank_y), MODEL, dtype=torch.bfloat16, device=x_tm.device)
            for index, part in zip(mine, back, strict=True):
                whole[index] = part
            return whole

        return self._block(x_tm, slot_tk.to(x_tm.device), weights, do, compute, rank_tk)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which expert each slot holds, and the slots of each expert."""

    expert_p: Tensor
    map_ej: Tensor
    count_e: Tensor
    cap: int


def placements(group: Group) -> dict[str, Placement]:
    """The first one, that of skewed loads, and a random one with copies of its own; 4 to 8 slots beyond the experts."""
    slots = (EXPERTS // group.world + 2) * group.world
    cap = slots // group.world
    rng = group.rng("placements")
    count = torch.from_numpy(rng.poisson(9 * rng.pareto(1.0, (3, 1, EXPERTS)))).to(torch.int32)
    first = initial_placement(layers=1, num_experts=EXPERTS, num_slots=slots)
    balanced = place_experts(count, num_slots=slots, slots_per_rank=cap)
    held = rng.permutation(np.concatenate([np.arange(EXPERTS), rng.integers(0, EXPERTS, slots - EXPERTS)]))
    own = [[p for p, e in enumerate(held) if e == expert] for expert in range(EXPERTS)]
    rows = torch.tensor([x + [-1] * (slots - len(x)) for x in own])
    drawn = Placement(
        expert_p=torch.from_numpy(held), map_ej=rows, count_e=torch.tensor([len(x) for x in own]), cap=cap
    )
    made = {
        name: Placement(expert_p=x[0][0], map_ej=x[1][0], count_e=x[2][0], cap=cap)
        for name, x in (("first", first), ("balanced", balanced))
    }
    return made | {"random": drawn}


def expert_parallel(group: Group, habits: Habits = RIGHT) -> Pairs:
    """Every rank has tokens of its own; experts have copies on several ranks; one rank alone gives the same bytes."""
    do, layer = Arithmetic.of(group), Layer.drawn(group)
    tokens = 5
    x = draws.normal(group.rng("tokens"), group.world * tokens, MODEL, dtype=torch.bfloat16).to(group.device)
    real = torch.ones(len(x), dtype=torch.bool, device=group.device)
    alone = layer.alone(x, real, do)
    own = slice(group.rank * tokens, (group.rank + 1) * tokens)
    return {
        f"{name} placement": (layer.spread(x[own], real[own], placement, group, do, habits), alone[own])
        for name, placement in placements(group).items()
    }


def data_parallel(group: Group, habits: Habits = RIGHT) -> Pairs:
    """Requests on any rank, idle ranks with a placeholder row: attention at home, experts everywhere, equal bytes."""
    do, layer, placement = Arithmetic.of(group), Layer.drawn(group), placements(group)["balanced"]
    rng = group.rng("requests")
    lengths = (4, 1, 7)  # tokens in the cache of each request; one query each
    caches = [draws.normal(rng, n, DIM, dtype=torch.bfloat16).to(group.device) for n in lengths]
    queries = draws.normal(rng, len(lengths), HEADS * DIM, dtype=torch.bfloat16).to(group.device)
    hidden = draws.normal(rng, len(lengths), MODEL - HEADS * DIM, dtype=torch.bfloat16).to(group.device)

    def attended(request: int) -> Tensor:
        idx = torch.arange(lengths[request], dtype=torch.int32, device=group.device)[None]
        q = queries[request].view(1, HEADS, DIM)
        out, _ = do.sparse_attn(q, caches[request], idx, None, None, scale=DIM**-0.5, value_dim=DIM)
        return torch.cat([out.to(torch.bfloat16).flatten(1), hidden[request][None]], 1)

    def step(mine: list[int]) -> Tensor:
        """One step of this rank; ranks without a request take part with a masked row."""
        rows = [attended(request) for request in mine]
        x = torch.cat(rows or [torch.full((1, MODEL), 1000.0, dtype=torch.bfloat16, device=group.device)])
        mask = torch.full((len(x),), bool(mine), device=group.device)
        return layer.spread(x, mask, placement, group, do, habits)

    truth = torch.cat([attended(i) for i in range(len(lengths))])
    alone = layer.alone(truth, torch.ones(len(lengths), dtype=torch.bool, device=group.device), do)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    homes = ([0, 0, 0], [0, 1, 1], [1, 0, group.world - 1])
    for home in homes:
        mine = [request for request, rank in enumerate(home) if rank == group.rank]
        out = step(mine)
        expected = alone[mine] if mine else torch.zeros_like(out)
        pairs[f"requests on ranks {home}"] = (out, expected)
    return pairs


# experts that move


def moving_experts(group: Group, habits: Habits = RIGHT) -> Pairs:
    """The plan carried out between ranks: every slot of the new placement holds its expert's bytes."""
    layer, found = Layer.drawn(group), placements(group)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for before, after in (("first", "balanced"), ("balanced", "random"), ("random", "first")):
        old, new, cap = found[before], found[after], found[before].cap
        own = range(group.rank * cap, (group.rank + 1) * cap)
        weights = layer.experts.w13_q
        held = torch.stack([weights[old.expert_p[p]] for p in own])
        step_lp, source_lp = shuffle_plan(old.expert_p[None], new.expert_p[None], slots_per_rank=cap)
        pairs[f"{before} to {after}"] = (
            _moved(group, held, step_lp[0].tolist(), source_lp[0].tolist(), cap, habits),
            torch.stack([weights[new.expert_p[p]] for p in own]),
        )
    return pairs


def _moved(group: Group, held: Tensor, step_p: list[int], source_p: list[int], cap: int, habits: Habits) -> Tensor:
    """What the rank's slots hold afterwards; sources are read before anything is written."""
    base, result = group.rank * cap, held.clone()
    fetched = [p for p, step in enumerate(step_p) if step == ShuffleStep.RECEIVE]
    sends = [(p // cap, held[source_p[p] - base][None]) for p in fetched if source_p[p] // cap == group.rank]
    places = [p for p in fetched if p // cap == group.rank]
    buffers = [(source_p[p] // cap, torch.empty_like(held[:1])) for p in places]

    def share() -> None:
        for p in range(base, base + cap):
            if step_p[p] == ShuffleStep.SHARE:
                result[p - base] = result[source_p[p] - base]

    if not habits.shared_late:
        share()
    group.moved(sends, buffers)
    for p, (_, buffer) in zip(places, buffers, strict=True):
        result[p - base] = buffer[0]
    for p in range(base, base + cap):
        if step_p[p] == ShuffleStep.COPY:
            result[p - base] = held[source_p[p] - base]
    if habits.shared_late:
        share()
    return result
