"""Engines with one thing wrong at a time: a device, a runner or one function of the plan, in an engine that is right
otherwise. What an engine serves before a run, the streams that drafts come from and prefixes, right parts serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from deeptwin.optimized.engine_device import ModelDevice, Track
from deeptwin.optimized.scheduler import Item, Result
from deeptwin.optimized.steps import Runner
from deeptwin.optimized.steps_v4 import v4_rings
from deeptwin.reference.block_ffn import gated
from deeptwin.reference.config import FfnConfig, MlaConfig, V4AttnConfig, WeighExperts
from deeptwin.reference.csa import csa_step_
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.ffn_weights import GatedWeights, PlainExperts
from deeptwin.reference.hca import hca_step_
from deeptwin.reference.mla import mla_project
from deeptwin.reference.mla_step import mla_step_, token_slots
from deeptwin.reference.numerics import CONTRACT as NUM
from deeptwin.reference.rope import softmax_scale
from deeptwin.reference.v4_state import V4Caches
from deeptwin.reference.weights import MlaWeights

from ..serving import Parts, Served, on_columns, serve

HERE = "deeptwin.parity.mutants.engine"


# devices


class _StaleState(ModelDevice):
    """Behind a hit the state is what the last request left there."""

    def _load(self, item: Item, track: Track, start: int) -> None:
        job = self.jobs[item.id]
        super()._load(item, track, start)
        assert self.reuse is not None
        self.runner.restore(track.slot, start, self.runner.snapshot(self.slots[0] if self.slots else 0, start))
        track.valid = job.hit.valid


class _EmptyWindow(ModelDevice):
    """Behind a hit no row sees the window that lies before it."""

    def _load(self, item: Item, track: Track, start: int) -> None:
        super()._load(item, track, start)
        track.valid = start


class _Seeded(ModelDevice):
    """Draws with other seeds than those that were asked for."""

    def seeds(self, items: Sequence[Item]) -> list[int]:
        raise NotImplementedError

    def _drawn(
        self, items: Sequence[Item], rows: Sequence[int], logits_tv: Tensor, no_eos_t: Tensor | None
    ) -> dict[int, Result]:
        jobs = dict(self.jobs)
        for item, seed in zip(items, self.seeds(items), strict=True):
            job = jobs[item.id]
            self.jobs[item.id] = replace(job, params=replace(job.params, seed=seed))
        found = super()._drawn(items, rows, logits_tv, no_eos_t)
        for item in items:  # only the draw went wrong
            self.jobs[item.id].params = jobs[item.id].params
        return found


class _SeedOfThePrompt(_Seeded):
    def seeds(self, items: Sequence[Item]) -> list[int]:
        return [hash(self.jobs[item.id].prompt) % 2**63 for item in items]


class _SeedOfTheLast(_Seeded):
    def seeds(self, items: Sequence[Item]) -> list[int]:
        own = [self.jobs[item.id].params.seed for item in items]
        return own if self.pool is None else [own[-1]] * len(own)


class _SeedOfThePlace(_Seeded):
    def seeds(self, items: Sequence[Item]) -> list[int]:
        return list(range(len(items)))


class _NoSeed(_Seeded):
    def seeds(self, items: Sequence[Item]) -> list[int]:
        return [0] * len(items)


# runners


class _Altered:
    """A runner with something of its own."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


class _EightRows(_Altered):
    """From eight rows on another kernel computes the head, and rounds elsewhere."""

    def head(self, hidden_ym: Tensor) -> Tensor:
        logits_yv = self.runner.head(hidden_ym)
        return logits_yv if len(hidden_ym) < 8 else _nudged(logits_yv, torch.arange(len(logits_yv)))


class _RareRows(_Altered):
    """From sixteen rows on one in a thousand is an ulp off."""

    def head(self, hidden_ym: Tensor) -> Tensor:
        logits_yv = self.runner.head(hidden_ym)
        rare_y = (hidden_ym[:, 0] % 1009 == 0).nonzero()[:, 0]
        return logits_yv if len(hidden_ym) < 16 else _nudged(logits_yv, rare_y)


def _nudged(logits_yv: Tensor, rows: Tensor) -> Tensor:
    """The largest logit of some rows an ulp higher."""
    logits_yv, top_y = logits_yv.clone(), logits_yv.argmax(1)[rows]
    logits_yv[rows, top_y] = torch.nextafter(logits_yv[rows, top_y], torch.tensor(torch.inf))
    return logits_yv


# attention of V3


def _split_attention(
    q_thd: Tensor, k_shd: Tensor, v_shu: Tensor, bounds: Sequence[int], *, first: int, scale: float
) -> Tensor:
    """Attention over pieces of the keys, each stored in bf16 before they are put together."""
    own_t, outs, lses = first + torch.arange(len(q_thd)), [], []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        scores_ths = torch.einsum("thd,shd->ths", q_thd, k_shd[low:high]) * scale
        hidden_t1s = (torch.arange(low, high) > own_t[:, None])[:, None]
        scores_ths = scores_ths.masked_fill(hidden_t1s, -torch.inf)
        lses.append(scores_ths.logsumexp(-1))
        weights_ths = (scores_ths - lses[-1][..., None]).exp().nan_to_num(0.0)
        outs.append(torch.einsum("ths,shu->thu", weights_ths, v_shu[low:high]).bfloat16().double())
    share_pth = torch.stack(lses).softmax(0)
    return (share_pth[..., None] * torch.stack(outs)).sum(0)


def _mla_in_pieces(bounds_of: Callable[[Csa2Step, int], Sequence[int]]) -> Callable[..., Tensor]:
    """`mla_step_` with the keys of sequence b cut at `bounds_of(step, b)`; one piece is the reference itself."""

    def mla_step(
        x_tm: Tensor, weights: MlaWeights, table_sr: Tensor, cache_pod_: Tensor, step: Csa2Step, *, config: MlaConfig
    ) -> Tensor:
        y_tm = mla_step_(x_tm, weights, table_sr, cache_pod_, step, config=config)
        q_thd, _ = mla_project(x_tm, weights, step.positions_t, table_sr, config=config)
        at = step.cu_seqlens.tolist()
        for b, (first, end) in enumerate(zip(step.first_b.tolist(), step.end_b.tolist(), strict=True)):
            bounds = bounds_of(step, b)
            if len(bounds) < 3:
                continue
            rows_sd = cache_pod_[step.table_bp[b].long()].flatten(0, 1)[:end].double()
            c_sc, k_rope_sr = rows_sd.split([config.kv_lora_rank, config.rope.rope_dim], dim=-1)
            k_nope_shn = NUM.bf16(torch.einsum("sc,hnc->shn", c_sc, weights.w_uk_hnc.double()))
            v_shu = NUM.bf16(torch.einsum("sc,huc->shu", c_sc, weights.w_uv_huc.double()))
            k_shd = torch.cat([k_nope_shn, k_rope_sr[:, None].expand(-1, config.num_heads, -1)], dim=-1)
            out_thu = _split_attention(
                q_thd[at[b] : at[b + 1]],
                k_shd,
                v_shu,
                bounds,
                first=first,
                scale=softmax_scale(config.head_dim, config.rope.yarn),
            )
            y_tm[at[b] : at[b + 1]] = torch.einsum("thu,mhu->tm", NUM.bf16(out_thu), weights.w_o_mhu.double())
        return y_tm.to(torch.bfloat16)

    return mla_step


def _by_batch(step: Csa2Step, b: int) -> list[int]:
    """As many pieces as there are requests, to keep the processors busy."""
    end, pieces = int(step.end_b[b]), min(len(step.end_b), int(step.end_b[b]))
    return sorted({end * i // pieces for i in range(pieces + 1)})


def _at_the_chunk(step: Csa2Step, b: int) -> list[int]:
    """What the cache held, and what the chunk brings."""
    return sorted({0, int(step.first_b[b]), int(step.end_b[b])})


mla_split_by_batch = _mla_in_pieces(_by_batch)
mla_split_at_the_chunk = _mla_in_pieces(_at_the_chunk)
mla_not_split = _mla_in_pieces(lambda step, b: [0, int(step.end_b[b])])


def mla_first_write_stays(
    x_tm: Tensor, weights: MlaWeights, table_sr: Tensor, cache_pod_: Tensor, step: Csa2Step, *, config: MlaConfig
) -> Tensor:
    """Rows of rejected drafts are not taken back: the true row of their position does not outlive its step."""
    slot_t = token_slots(step, cache_pod_.shape[1])
    rows_od = cache_pod_.flatten(0, 1)
    kept_td = rows_od[slot_t].clone()
    y_tm = mla_step_(x_tm, weights, table_sr, cache_pod_, step, config=config).to(torch.bfloat16)
    if step.decode and len(step.positions_t) > len(step.end_b):
        is_old_t = kept_td.ne(0).any(1)
        rows_od[slot_t[is_old_t]] = kept_td[is_old_t]
    return y_tm


# experts of V3


def _experts_in(order_of: Callable[[Tensor], Sequence[int]], *, partial: torch.dtype) -> Callable[..., Tensor]:
    """`plain_experts` with sums in another order, stored in `partial` on the way."""

    def plain_experts(
        x_tm: Tensor,
        idx_tk: Tensor,
        weights_tk: Tensor,
        experts: PlainExperts,
        shared: GatedWeights,
        *,
        config: FfnConfig,
    ) -> Tensor:
        y_tm, limit = torch.zeros_like(x_tm, dtype=partial), config.swiglu_limit
        for e in order_of(idx_tk):
            token_y, slot_y = (idx_tk == e).nonzero(as_tuple=True)
            own = GatedWeights(w13_im=experts.w13_eim[e], w2_mf=experts.w2_emf[e])
            weight_y = weights_tk[token_y, slot_y].double()
            if config.weigh is WeighExperts.BEFORE_DOWN:
                o_ym = gated(x_tm[token_y], own, weight_y, limit=limit)
            else:
                o_ym = gated(x_tm[token_y], own, limit=limit) * weight_y[:, None]
            y_tm[token_y] = (y_tm[token_y].double() + o_ym).to(partial)
        return (y_tm.double() + gated(x_tm, shared, limit=limit)).float().to(torch.bfloat16)

    return plain_experts


experts_as_they_come = _experts_in(
    lambda idx_tk: list(dict.fromkeys(idx_tk.flatten().tolist())), partial=torch.bfloat16
)
experts_by_number = _experts_in(lambda idx_tk: sorted(set(idx_tk.flatten().tolist())), partial=torch.float32)


# attention of V4

Spoil = Callable[[V4Caches, Csa2Step, V4AttnConfig], None]


def _v4(before: Spoil | None = None, behind: Spoil | None = None) -> tuple[Callable[..., Tensor], ...]:
    """`csa_step_` and `hca_step_` with something that happens to the caches before or behind them."""

    def wrapped(step_: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(step_)
        def spoilt(
            x_tm: Tensor, weights: Any, table_sr: Tensor, caches: V4Caches, step: Csa2Step, *rest: Any, config: Any
        ) -> Tensor:
            if before is not None:
                before(caches, step, config)
            y_tm = step_(x_tm, weights, table_sr, caches, step, *rest, config=config).to(torch.bfloat16)
            if behind is not None:
                behind(caches, step, config)
            return y_tm

        return spoilt

    return wrapped(csa_step_), wrapped(hca_step_)


def _pools(caches: V4Caches) -> list[Tensor]:
    return [pool for pool in (caches.pool, caches.index_pool) if pool is not None]


def _forget_open_groups(caches: V4Caches, step: Csa2Step, config: V4AttnConfig) -> None:
    """A later chunk of a prompt finds the state that a first one finds."""
    for pool in [] if step.decode else _pools(caches):
        pool[step.state_b[step.first_b > 0].long()] = 0.0


def _lose_the_third(caches: V4Caches, step: Csa2Step, config: V4AttnConfig) -> None:
    """Where three tokens of a group of four are left over at the end of a prompt, the last of them is not kept."""
    third_b = step.end_b % 4 == 3
    for pool in [] if step.decode else _pools(caches):
        pool[step.state_b[third_b].long(), (step.end_b[third_b].long() - 1) % pool.shape[1]] = 0.0


def _is_verified(step: Csa2Step) -> bool:
    return step.decode and len(step.positions_t) > len(step.end_b)


def _round_verified(caches: V4Caches, step: Csa2Step, config: V4AttnConfig) -> None:
    """The kernel of several rows stores what it has as bf16."""
    for pool in _pools(caches) if _is_verified(step) else []:
        where = step.state_b[step.seq_t.long()].long(), step.positions_t.long() % pool.shape[1]
        pool[where] = pool[where].bfloat16().float()


def _keep_the_tail(caches: V4Caches, step: Csa2Step, config: V4AttnConfig) -> None:
    """Behind a step of several rows only the last group is kept, though drafts may be rejected."""
    for pool in _pools(caches) if _is_verified(step) else []:
        for slot, end in zip(step.state_b.tolist(), step.end_b.tolist(), strict=True):
            for position in range(max(end - pool.shape[1], 0), end - config.ratio):
                pool[slot, position % pool.shape[1]] = 0.0


def _alias_the_ring(caches: V4Caches, step: Csa2Step, config: V4AttnConfig) -> None:
    """A ring as long as the window: a draft takes the place of a key that the row before it still sees."""
    for slot, position in zip(step.state_b[step.seq_t.long()].tolist(), step.positions_t.tolist(), strict=True):
        for ring, window in v4_rings(caches, slot, config)[: 2 if _is_verified(step) else 0]:
            ring[(position - window) % len(ring)] = ring[position % len(ring)]


csa_chunk_anew, hca_chunk_anew = _v4(before=_forget_open_groups)
csa_without_third, hca_without_third = _v4(behind=_lose_the_third)
csa_verified_rounded, hca_verified_rounded = _v4(behind=_round_verified)
csa_tail_kept, hca_tail_kept = _v4(behind=_keep_the_tail)
csa_ring_aliased, hca_ring_aliased = _v4(behind=_alias_the_ring)


def _planned(**functions: str) -> Parts:
    """Parts whose plan has functions of this module in it: `mla_mla_step_` is the operation `mla.mla_step_`."""
    return Parts(overrides={name.replace("_", ".", 1): f"{HERE}:{function}" for name, function in functions.items()})


# what every engine has that is not right

PARTS = {
    "stale_ring": Parts(device=_StaleState),
    "window_recomputed": Parts(device=_EmptyWindow),
    "seed_of_the_prompt": Parts(device=_SeedOfThePrompt),
    "seed_of_a_neighbour": Parts(device=_SeedOfTheLast),
    "seed_of_the_place": Parts(device=_SeedOfThePlace),
    "seed_ignored": Parts(device=_NoSeed),
    "other_from_eight_rows": Parts(runner=_EightRows),
    "late_divergence": Parts(runner=_RareRows),
    "ring_of_the_window": Parts(backtracking=1),
    "split_by_batch": _planned(mla_mla_step_="mla_split_by_batch"),
    "split_at_the_chunk": _planned(mla_mla_step_="mla_split_at_the_chunk"),
    "drafts_not_taken_back": _planned(mla_mla_step_="mla_first_write_stays"),
    "combined_as_they_come": _planned(moe_plain_experts="experts_as_they_come"),
    "state_not_carried": _planned(csa_csa_step_="csa_chunk_anew", hca_hca_step_="hca_chunk_anew"),
    "third_token_lost": _planned(csa_csa_step_="csa_without_third", hca_hca_step_="hca_without_third"),
    "verified_state_rounded": _planned(csa_csa_step_="csa_verified_rounded", hca_hca_step_="hca_verified_rounded"),
    "tail_window_saved": _planned(csa_csa_step_="csa_tail_kept", hca_hca_step_="hca_tail_kept"),
    "ring_aliased": _planned(csa_csa_step_="csa_ring_aliased", hca_hca_step_="hca_ring_aliased"),
    "right_parts": _planned(mla_mla_step_="mla_not_split", moe_plain_experts="experts_by_number"),
}


def _serving(name: str) -> Served:
    return on_columns(
        lambda requests, arrivals, serving, where: serve(
            requests, arrivals, serving=serving, backend="reference", parts=PARTS[name]
        )
    )


stale_ring = _serving("stale_ring")
window_recomputed = _serving("window_recomputed")
seed_of_the_prompt = _serving("seed_of_the_prompt")
seed_of_a_neighbour = _serving("seed_of_a_neighbour")
seed_of_the_place = _serving("seed_of_the_place")
seed_ignored = _serving("seed_ignored")
other_from_eight_rows = _serving("other_from_eight_rows")
late_divergence = _serving("late_divergence")
ring_of_the_window = _serving("ring_of_the_window")
split_by_batch = _serving("split_by_batch")
split_at_the_chunk = _serving("split_at_the_chunk")
drafts_not_taken_back = _serving("drafts_not_taken_back")
combined_as_they_come = _serving("combined_as_they_come")
state_not_carried = _serving("state_not_carried")
third_token_lost = _serving("third_token_lost")
verified_state_rounded = _serving("verified_state_rounded")
tail_window_saved = _serving("tail_window_saved")
right_parts = _serving("right_parts")
