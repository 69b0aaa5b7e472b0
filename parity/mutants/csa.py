"""Wrong variants of CSA: query heads, output, selection, whole sequences, and steps with spoiled state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from deeptwin.reference.config import HeadNorm, IndexCast, ScoreOrder, V4AttnConfig
from deeptwin.reference.csa import csa_run
from deeptwin.reference.csa2_state import Csa2Batch
from deeptwin.reference.v4_state import V4Caches
from deeptwin.reference.v4_weights import V4Weights

from .v4_layers import Faults, _bf, _product, e4m3, heads, output, packed, turn, whole

RIGHT = Faults()
Run = Callable[..., tuple[Tensor, ...]]
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


# query heads


def _heads(
    *,
    other: dict[HeadNorm, HeadNorm] | None = None,
    norm: str = "each",
    half_split: bool = False,
    first: bool = False,
    back: bool = False,
    next_position: int = 0,
) -> Callable[..., Tensor]:
    def head_norm_rope(q_thd: Tensor, table_sr: Tensor, positions_t: Tensor, *, cast: HeadNorm, eps: float) -> Tensor:
        q, rule = q_thd.float(), (other or {}).get(cast, cast)
        if norm == "each":
            q = heads(q, rule, eps)
        elif norm == "token":
            q = _bf(q * torch.rsqrt(q.double().square().mean((-2, -1), keepdim=True) + eps).float())
        elif norm == "unrotated":
            r = table_sr.shape[1]
            q = _bf(q * torch.rsqrt(q[..., :-r].double().square().mean(-1, keepdim=True) + eps).float())
        elif norm == "sum":
            q = _bf(q * torch.rsqrt(q.double().square().sum(-1, keepdim=True) + eps).float())
        rows = table_sr[(positions_t.long() + next_position) % len(table_sr)]
        if first:
            return turn(q.flip(-1), rows).flip(-1).bfloat16()
        return turn(q, rows, back=back, half_split=half_split).bfloat16()

    return head_norm_rope


right_heads = _heads()
heads_not_normed = _heads(norm="none")
heads_normed_together = _heads(norm="token")
heads_without_rotary_channels = _heads(norm="unrotated")
heads_sum_of_squares = _heads(norm="sum")
heads_release_in_fp32 = _heads(other={HeadNorm.RELEASE: HeadNorm.FUSED})
heads_factor_unrounded = _heads(other={HeadNorm.FACTOR: HeadNorm.FUSED})
heads_factor_rounded = _heads(other={HeadNorm.FUSED: HeadNorm.FACTOR})
heads_half_split = _heads(half_split=True)
heads_first_channels = _heads(first=True)
heads_turned_back = _heads(back=True)
heads_next_position = _heads(next_position=1)


# output


def _output(faults: Faults) -> Callable[..., Tensor]:
    def v4_output(
        out_thd: Tensor, weights: V4Weights, table_sr: Tensor, positions_t: Tensor, *, config: V4AttnConfig
    ) -> Tensor:
        return output(faults, out_thd.float(), weights, table_sr[positions_t.long()], config).bfloat16()

    return v4_output


right_output = _output(RIGHT)
output_not_turned_back = _output(replace(RIGHT, output_turn="none"))
output_turned_forward = _output(replace(RIGHT, output_turn="forward"))
output_half_split = _output(replace(RIGHT, pairs="half_split"))
output_groups_interleaved = _output(replace(RIGHT, groups="interleaved"))
output_other_cast = _output(replace(RIGHT, cast="other"))


# selection


def _e2m1(x: Tensor) -> Tensor:
    g = x.unflatten(-1, (-1, 32)).double()
    s = torch.exp2(torch.ceil(torch.log2(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)))
    size = (g / s).float().abs().contiguous()
    low, high = torch.bucketize(size, MIDPOINTS), torch.bucketize(size, MIDPOINTS, right=True)
    return (torch.copysign(GRID[torch.where(low % 2 == 0, low, high)], g.float()) * s.float()).flatten(-2)


def _hadamard(x: Tensor) -> Tensor:
    d = x.shape[-1]
    i = torch.arange(d)
    signs = torch.tensor([bin(v).count("1") % 2 for v in range(d)])[i[:, None] & i[None]]
    return _bf((x.double() @ (1.0 - 2.0 * signs.double())).float() * d**-0.5)


def _keys(index_pow: Tensor, config: V4AttnConfig, layout: str) -> Tensor:
    """Values of all slots of index pages."""
    o, w = index_pow.shape[1:]
    data, fp4 = (64 if config.index is IndexCast.FP4 else 128), config.index is IndexCast.FP4
    if layout == "interleaved":
        rows = index_pow.reshape(-1, w)
        codes, sf = rows[:, :data], rows[:, data:]
    else:
        flat = index_pow.flatten(1)
        codes, sf = flat[:, : o * data].reshape(-1, data), flat[:, o * data :].reshape(-1, w - data)
    if fp4:
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
        values = torch.cat([GRID, -GRID])[nibbles]
        return values * torch.exp2(sf.float() - 127).repeat_interleave(32, 1)
    return codes.contiguous().view(torch.float8_e4m3fn).float() * sf.contiguous().view(torch.float32)


def _select(
    *,
    transform: bool = True,
    span: str = "last",
    half_split: bool = False,
    relu: str = "before",
    ties: str = "lower",
    visible: int = 1,
    keep: int = 0,
    layout: str = "sectioned",
    position: int = 0,
    weights_of: str = "x",
    page: int = 1,
    order: dict[ScoreOrder, ScoreOrder] | None = None,
    norm: bool = False,
) -> Callable[..., Tensor]:
    def csa_select(
        x_tm: Tensor,
        latent_ta: Tensor,
        weights: V4Weights,
        table_sr: Tensor,
        positions_t: Tensor,
        index_pow: Tensor,
        table_tp: Tensor,
        *,
        config: V4AttnConfig,
    ) -> Tensor:
        assert weights.index_wq is not None
        assert weights.index_head_hm is not None
        t, heads_, d = len(x_tm), config.index_heads, config.index_dim
        q = _product(latent_ta.float(), weights.index_wq, weights.index_wq_sf).unflatten(1, (heads_, d))
        if norm:
            q = heads(q, HeadNorm.FUSED, config.eps)
        rows = table_sr[(positions_t.long() + position) % len(table_sr)]
        if span == "first":
            r = table_sr.shape[1]
            q = _bf(torch.cat([turn(q[..., :r], rows, half_split=half_split), q[..., r:]], -1))
        else:
            q = _bf(turn(q, rows, half_split=half_split))
        q = _hadamard(q) if transform else q
        if config.index is IndexCast.FP4:
            q = _e2m1(q)
        elif config.index is IndexCast.FP8:
            s = q.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
            q = (q / s).to(torch.float8_e4m3fn).float() * s
        w = _bf(_bf((x_tm.double() @ weights.index_head_hm.double().T).float()) * (heads_ * d) ** -0.5)
        w = torch.ones_like(w) if weights_of == "none" else w.abs() if weights_of == "abs" else w
        key = _keys(index_pow, config, layout)
        rule = (order or {}).get(config.score_order, config.score_order)
        picks = torch.full((t, config.index_topk), -1, dtype=torch.int32)
        for row in range(t):
            count = max((int(positions_t[row]) + visible) // config.ratio, 0)
            slots = [
                int(table_tp[row, min(j // (config.page_entries * page), table_tp.shape[1] - 1)]) * config.page_entries
                + j % config.page_entries
                for j in range(count)
            ]
            k = key[torch.tensor(slots, dtype=torch.int64) % len(key)]
            score = _score((q[row].double() @ k.double().T).float(), w[row], relu, rule)
            score = torch.where(score.isnan(), -torch.inf, score)
            find = score.flip(0) if ties == "higher" else score
            best = find.argsort(descending=True, stable=True)[: config.index_topk - keep]
            best = len(score) - 1 - best if ties == "higher" else best
            picks[row, : len(best)] = best.sort().values.to(torch.int32)
        return picks

    return csa_select


def _score(dots: Tensor, w: Tensor, relu: str, order: ScoreOrder) -> Tensor:
    if relu == "sigmoid":
        return torch.sigmoid(dots).mean(0)
    if order is ScoreOrder.BF16_RELEASE:
        dots = _bf(dots)
        terms = _bf((dots.relu() if relu == "before" else dots) * w[:, None])
        total = _bf(terms.double().sum(0).float())
        return total.relu() if relu == "after" else total
    terms = (dots.relu() if relu == "before" else dots).double() * w[:, None].double()
    total = terms.sum(0).float()
    total = total.relu() if relu == "after" else total
    return total if order is ScoreOrder.FP32 else _bf(total)


right_select = _select()
select_query_not_transformed = _select(transform=False)
select_first_channels = _select(span="first")
select_half_split = _select(half_split=True)
select_first_half_split = _select(span="first", half_split=True)
select_without_relu = _select(relu="none")
select_relu_after_the_sum = _select(relu="after")
select_sigmoid_mean = _select(relu="sigmoid")
select_ties_to_the_higher = _select(ties="higher")
select_block_one_early = _select(visible=4)
select_block_one_late = _select(visible=-1)
select_one_too_few = _select(keep=1)
select_interleaved_pages = _select(layout="interleaved")
select_query_one_position_on = _select(position=1)
select_positions_zero = _select(position=10**9)
select_weights_ignored = _select(weights_of="none")
select_weights_absolute = _select(weights_of="abs")
select_pages_of_twice_the_size = _select(page=2)
select_query_normed = _select(norm=True)


# whole sequences


def _whole(faults: Faults) -> Callable[..., Tensor]:
    attention = whole(faults)

    def csa_attention(
        x_tm: Tensor,
        weights: V4Weights,
        table_sr: Tensor,
        cu_seqlens: Tensor,
        picks_tk: Tensor | None,
        *,
        config: V4AttnConfig,
    ) -> Tensor:
        return attention(x_tm, weights, table_sr, cu_seqlens, picks_tk, config=config)

    return csa_attention


right_whole = _whole(RIGHT)
plain_base = _whole(replace(RIGHT, base="plain"))
window_plain_base = _whole(replace(RIGHT, base="window_plain"))
half_split_pairs = _whole(replace(RIGHT, pairs="half_split"))
output_kept_turned = _whole(replace(RIGHT, output_turn="none"))
head_norm_missing = _whole(replace(RIGHT, head_norm="none"))
key_tail_quantised = _whole(replace(RIGHT, key="tail_too"))
key_not_quantised = _whole(replace(RIGHT, key="plain"))
key_rounds_to_bf16 = _whole(replace(RIGHT, key="bf16"))
entry_rounds_to_bf16 = _whole(replace(RIGHT, entry="bf16"))
entry_tail_quantised = _whole(replace(RIGHT, entry="tail_too"))
sink_scaled = _whole(replace(RIGHT, sink="scaled"))
sink_ignored = _whole(replace(RIGHT, sink="ignored"))
window_one_short = _whole(replace(RIGHT, window=-1))
window_one_long = _whole(replace(RIGHT, window=1))
two_softmaxes = _whole(replace(RIGHT, softmax="two"))
duplicates_dropped = _whole(replace(RIGHT, duplicates="dropped"))
value_without_rotary_channels = _whole(replace(RIGHT, value="unrotated"))
groups_interleaved = _whole(replace(RIGHT, groups="interleaved"))
series_swapped = _whole(replace(RIGHT, series="swapped"))
own_group_twice = _whole(replace(RIGHT, series="own_twice"))
no_overlap = _whole(replace(RIGHT, series="no_overlap"))
bias_missing = _whole(replace(RIGHT, bias="none"))
bias_one_place_on = _whole(replace(RIGHT, bias="shifted"))
first_entry_pools_zeros = _whole(replace(RIGHT, first="zeros"))
one_softmax_for_all_channels = _whole(replace(RIGHT, weights="shared"))
mean_instead_of_softmax = _whole(replace(RIGHT, weights="mean"))
entry_at_its_last_token = _whole(replace(RIGHT, position="last"))
entry_at_its_centre = _whole(replace(RIGHT, position="centre"))
entry_at_its_number = _whole(replace(RIGHT, position="index"))
entry_at_the_group_before = _whole(replace(RIGHT, position="group_before"))
entry_visible_late = _whole(replace(RIGHT, visible="one_late"))
residue_three_misses_an_entry = _whole(replace(RIGHT, residue="three"))


# steps


def _run(faults: Faults, spoil: Callable[[dict[str, Tensor], V4Caches, Csa2Batch], None] | None = None) -> Run:
    def csa_run_emulated(
        x_tm: Tensor,
        weights: V4Weights,
        table_sr: Tensor,
        caches: V4Caches,
        batch: Csa2Batch,
        picks_tk: Tensor | None,
        *,
        config: V4AttnConfig,
    ) -> tuple[Tensor, ...]:
        _, ring, main, pool, index, index_pool = csa_run(
            x_tm, weights, table_sr, caches, batch, picks_tk, config=config
        )
        if picks_tk is None:
            raise NotImplementedError("picks_tk: the emulation selects nothing, got None")
        parts = {"ring": ring, "main": main, "pool": pool, "index": index, "index_pool": index_pool}
        if spoil is not None:
            spoil(parts, caches, batch)
        lengths = batch.counts_kb.sum(0).tolist()
        steps = [
            torch.arange(len(batch.counts_kb)).repeat_interleave(batch.counts_kb[:, b].long())
            for b in range(len(lengths))
        ]
        y = packed(faults, x_tm, weights, table_sr, lengths, steps, picks_tk, config)
        return (y, *parts.values())

    return csa_run_emulated


def _entries_lost(parts: dict[str, Tensor], caches: V4Caches, batch: Csa2Batch) -> None:
    assert caches.main_pow is not None
    parts["main"][:] = caches.main_pow


def _index_lost(parts: dict[str, Tensor], caches: V4Caches, batch: Csa2Batch) -> None:
    assert caches.index_pow is not None
    parts["index"][:] = caches.index_pow


def _index_interleaved(parts: dict[str, Tensor], caches: V4Caches, batch: Csa2Batch) -> None:
    p, o, w = parts["index"].shape
    data, sf = parts["index"].flatten(1).split([o * 64, o * (w - 64)], 1)
    parts["index"][:] = torch.cat([data.unflatten(1, (o, 64)), sf.unflatten(1, (o, w - 64))], 2)


def _ring_shifted(parts: dict[str, Tensor], caches: V4Caches, batch: Csa2Batch) -> None:
    data, sf = _halves(parts["ring"])
    parts["ring"][:] = _joined(data.roll(1, 1), sf.roll(1, 1))


def _pad_written(parts: dict[str, Tensor], caches: V4Caches, batch: Csa2Batch) -> None:
    data, sf = _halves(parts["main"])
    sf = sf.clone()
    sf[..., 7] = torch.where((sf[..., :7] != 255).any(-1), 127, sf[..., 7])
    parts["main"][:] = _joined(data, sf)


def _tail_first(parts: dict[str, Tensor], caches: V4Caches, batch: Csa2Batch) -> None:
    data, sf = _halves(parts["main"])
    parts["main"][:] = _joined(torch.cat([data[..., 448:], data[..., :448]], -1), sf)


def _tail_through_e4m3(parts: dict[str, Tensor], caches: V4Caches, batch: Csa2Batch) -> None:
    data, sf = _halves(parts["ring"])
    tail = data[..., 448:].contiguous().view(torch.bfloat16).float()
    data = torch.cat([data[..., :448], e4m3(tail.nan_to_num(0), 64).bfloat16().view(torch.uint8)], -1)
    written = (sf[..., :7] != 255).any(-1, keepdim=True)
    parts["ring"][:] = _joined(torch.where(written, data, 255), sf)


def _previous_group_not_kept(parts: dict[str, Tensor], caches: V4Caches, batch: Csa2Batch) -> None:
    """Of the last tokens only those of the unfinished group stay in the rings of the compressors."""
    ends, states = batch.counts_kb.sum(0).tolist(), batch.state_b.tolist()
    for name in ("pool", "index_pool"):
        ring = parts[name].shape[1]
        for end, state in zip(ends, states, strict=True):
            for p in range(max(end - ring, 0), end // 4 * 4):
                parts[name][state, p % ring] = torch.nan


def _halves(pages: Tensor) -> tuple[Tensor, Tensor]:
    p, o, _ = pages.shape
    data, sf = pages.flatten(1).split([o * 576, o * 8], 1)
    return data.unflatten(1, (o, 576)).clone(), sf.unflatten(1, (o, 8)).clone()


def _joined(data: Tensor, sf: Tensor) -> Tensor:
    p, o, _ = data.shape
    return torch.cat([data.flatten(1), sf.flatten(1)], 1).unflatten(1, (o, 584))


right_run = _run(RIGHT)
run_history_lost = _run(replace(RIGHT, chunk="history_lost"))
run_group_split = _run(replace(RIGHT, chunk="group_split"))
run_overlap_lost = _run(replace(RIGHT, chunk="overlap_lost"))
run_plain_base = _run(replace(RIGHT, base="plain"))
run_entries_never_stored = _run(RIGHT, _entries_lost)
run_index_keys_never_stored = _run(RIGHT, _index_lost)
run_index_pages_interleaved = _run(RIGHT, _index_interleaved)
run_ring_shifted = _run(RIGHT, _ring_shifted)
run_pad_byte_written = _run(RIGHT, _pad_written)
run_tail_in_front = _run(RIGHT, _tail_first)
run_tail_through_e4m3 = _run(RIGHT, _tail_through_e4m3)
run_previous_group_not_kept = _run(RIGHT, _previous_group_not_kept)


def run_stale_pool(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    batch: Csa2Batch,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
) -> tuple[Tensor, ...]:
    """A pool of another request is read where this one has no token: entry 0 pools rows of zeros with weight."""
    _, *parts = csa_run(x_tm, weights, table_sr, caches, batch, picks_tk, config=config)
    y, *_ = _run(replace(RIGHT, first="zeros"))(x_tm, weights, table_sr, caches, batch, picks_tk, config=config)
    return (y, *parts)


def select_differently_in_decode(
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    caches: V4Caches,
    batch: Csa2Batch,
    picks_tk: Tensor | None,
    *,
    config: V4AttnConfig,
) -> tuple[Tensor, ...]:
    """Prefill keeps one entry more than decode: what a step attends to depends on its kind."""
    fewer = replace(config, index_topk=config.index_topk - bool(batch.decode_k.any()))
    return csa_run(x_tm, weights, table_sr, caches, batch, picks_tk, config=fewer)
