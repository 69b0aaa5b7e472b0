"""A CSA2 stack without any cache: every sequence at once, masks instead of lists, fp32 torch, with faults to switch on.

The bytes that the operation returns are not the subject here: they come from the reference and may be spoiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.cache_plan import page_pieces, state_pieces
from deeptwin.reference.config import Truncation
from deeptwin.reference.csa2 import csa2_run
from deeptwin.reference.csa2_config import CastPoints, Csa2Config
from deeptwin.reference.csa2_state import Csa2Batch, Csa2Caches
from deeptwin.reference.numerics import Numerics
from deeptwin.reference.weights import Csa2Weights

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the emulation does wrong; the default is right."""

    pairs: str = "interleaved"  # interleaved, half_split
    table: str = "of_layer"  # of_layer, window, main
    output_turn: str = "back"  # back, none, forward, first_key
    head_norm: bool = False  # the per-head query norm of V4
    key_norm: str = "all"  # all, unrotated
    turn_then_quantise: bool = True
    entry_position: str = "first"  # first, last, index
    sink: str = "plain"  # plain, scaled, ignored
    softmax: str = "one"  # one, two
    duplicates: str = "kept"  # kept, dropped
    value: str = "all"  # all, unrotated
    groups: str = "blocks"  # blocks, interleaved
    cast: str = "given"  # given, other
    main: str = "fp4"  # fp4, unquantised
    sharing: str = "owner"  # owner, previous_owner
    window: int = 0  # keys more or less
    chunk: str = "seen"  # history_lost: window keys of earlier steps are unseen; group_split: so are their group tokens
    compressor: str = "softmax"  # softmax, mean
    norm_eps: float = 1e-20
    bytes: str = "right"  # right, entries_lost, index_pages_interleaved, ring_shifted, tail_bf16


def fake_e4m3(x: Tensor) -> Tensor:
    """Groups of 32 through e4m3 with a power-of-two scale."""
    g = x.unflatten(-1, (-1, 32)).double()
    s = torch.exp2(torch.ceil(torch.log2(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return ((g / s).float().to(torch.float8_e4m3fn).double() * s).float().flatten(-2)


def fake_e2m1(x: Tensor) -> Tensor:
    """Groups of 16 through e2m1 with an e4m3 scale."""
    g = x.unflatten(-1, (-1, 16)).float()
    s = (g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    size = (g / s).abs().contiguous()
    low, high = torch.bucketize(size, MIDPOINTS), torch.bucketize(size, MIDPOINTS, right=True)
    return (torch.copysign(GRID[torch.where(low % 2 == 0, low, high)], g) * s).flatten(-2)


def _bf(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _mm(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double().T).float()


def _weight(codes: Tensor, sf: Tensor) -> Tensor:
    scale = torch.exp2(sf.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return codes.float() * scale[: codes.shape[0], : codes.shape[1]]


def _rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return _bf(x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps).float() * w.float())


def _turn(x: Tensor, table: Tensor, faults: Faults, *, back: bool = False) -> Tensor:
    """x [n, ..., d] by rows of angles [n, r]."""
    r = table.shape[1]
    shape = (len(x),) + (1,) * (x.dim() - 2) + (r // 2,)
    cos, sin = table[:, : r // 2].reshape(shape), table[:, r // 2 :].reshape(shape) * (-1 if back else 1)
    y, tail = x.clone(), x[..., -r:]
    if faults.pairs == "half_split":
        u, v = tail[..., : r // 2], tail[..., r // 2 :]
        y[..., -r:] = torch.cat([u * cos - v * sin, u * sin + v * cos], -1)
    else:
        u, v = tail[..., 0::2], tail[..., 1::2]
        y[..., -r:] = torch.stack([u * cos - v * sin, u * sin + v * cos], -1).flatten(-2)
    return y


def _lin8(x: Tensor, codes: Tensor, sf: Tensor) -> Tensor:
    return _bf(_mm(fake_e4m3(x), _weight(codes, sf)))


def project(
    faults: Faults, x: Tensor, w: Csa2Weights, table: Tensor, config: Csa2Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads, window keys before their quantiser, the query latent."""
    r, eps = table.shape[1], faults.norm_eps
    latent = _rms(_lin8(x, w.wq_a_q, w.wq_a_sf), w.q_norm_a, eps)
    q = _lin8(latent, w.wq_b_q, w.wq_b_sf).unflatten(1, (config.num_heads, -1))
    if faults.head_norm:
        q = _bf(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps))
    key = _lin8(x, w.wkv_q, w.wkv_sf)
    if faults.key_norm == "unrotated":
        key = torch.cat([_rms(key[:, :-r], w.kv_norm_d[:-r], eps), key[:, -r:]], 1)
    else:
        key = _rms(key, w.kv_norm_d, eps)
    return _bf(_turn(q, table, faults)), _bf(_turn(key, table, faults)), latent


def output(faults: Faults, out: Tensor, w: Csa2Weights, table: Tensor, config: Csa2Config) -> Tensor:
    """From attention to the residual stream."""
    fused = (config.cast is CastPoints.FUSED) != (faults.cast == "other")
    if faults.output_turn != "none":
        angles = table[:1].expand_as(table) if faults.output_turn == "first_key" else table
        out = _turn(out, angles, faults, back=faults.output_turn != "forward")
    out = out if fused else _bf(out)
    if faults.groups == "interleaved":
        out = out.unflatten(1, (-1, config.o_groups)).transpose(1, 2).flatten(1, 2)
    u = fake_e4m3(out.flatten(1)) if fused else out.flatten(1)
    wo_a = _weight(w.wo_a_q, w.wo_a_sf).unflatten(0, (config.o_groups, -1))
    z = torch.einsum("tgk,gnk->tgn", u.unflatten(1, (config.o_groups, -1)).double(), wo_a.double()).float().flatten(1)
    return _lin8(z if fused else _bf(z), w.wo_b_q, w.wo_b_sf)


def _entries(faults: Faults, x: Tensor, w: Csa2Weights, table: Tensor, ratio: int, step_t: Tensor) -> Tensor:
    """Compressed entries of one sequence as attention sees them."""
    n = len(x) // ratio
    assert w.entry_value_dm is not None
    value = _mm(x, w.entry_value_dm)[: n * ratio].unflatten(0, (n, ratio))
    pooled = value[:, 0]
    if ratio > 1:
        assert w.entry_gate_dm is not None
        gate = _mm(x, w.entry_gate_dm)[: n * ratio].unflatten(0, (n, ratio))
        if faults.compressor == "mean":
            gate = torch.zeros_like(gate)
        if faults.chunk == "group_split":
            owner = step_t[: n * ratio].unflatten(0, (n, ratio))
            gone = (owner != owner[:, -1:])[..., None]
            value, gate = value.masked_fill(gone, 0.0), gate.masked_fill(gone, 0.0)
        pooled = (torch.softmax(gate.double(), 1) * value).sum(1).float()
    assert w.entry_norm_d is not None
    latent = _rms(_bf(pooled), w.entry_norm_d, faults.norm_eps)
    place = {"first": 0, "last": ratio - 1}.get(faults.entry_position, 0)
    where = torch.arange(n) * (1 if faults.entry_position == "index" else ratio) + place
    turned = _bf(_turn(latent, table[where], faults))
    return turned if faults.main == "unquantised" else fake_e2m1(turned)


def _attend(faults: Faults, q: Tensor, keys: list[Tensor], seen: list[Tensor], sink: Tensor, r: int) -> Tensor:
    scale = q.shape[-1] ** -0.5
    if faults.softmax == "two" and keys[1].numel():
        one = replace(faults, softmax="one")
        none = torch.zeros_like(seen[1]), torch.zeros_like(seen[0])
        halves = [_attend(one, q, keys, pair, sink, r) for pair in ([seen[0], none[0]], [none[1], seen[1]])]
        return (halves[0] + halves[1]) / 2
    k, mask = torch.cat(keys), torch.cat(seen, 1)
    scores = torch.einsum("thd,sd->ths", q.double(), k.double()).float() * scale
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    p = torch.exp((scores - top).double()).float()
    factor = {"plain": 1.0, "scaled": scale, "ignored": 0.0}[faults.sink]
    mass = p.sum(-1, keepdim=True) + (faults.sink != "ignored") * torch.exp(sink.float()[:, None] * factor - top)
    value = torch.cat([k[:, :-r], torch.zeros_like(k[:, -r:])], 1) if faults.value == "unrotated" else k
    return torch.einsum("ths,sd->thd", _bf(p).double(), value.double()).float() / mass


def sequence(
    faults: Faults,
    h: Tensor,
    layers: tuple[Csa2Weights, ...],
    tables: tuple[Tensor, Tensor],
    step_t: Tensor,
    picks: Tensor,
    config: Csa2Config,
) -> Tensor:
    """One sequence from position 0 through all layers; `picks` [index sources, t, k] names the entries."""
    map_, t = config.topology, len(h)
    p = torch.arange(t)
    owned: dict[int, Tensor] = {}
    picked = torch.zeros(t, 0, dtype=torch.bool)
    for layer, w in enumerate(layers):
        ratio = map_.ratios[layer]
        main = {"of_layer": ratio > 0, "window": False, "main": True}[faults.table]
        table = tables[main][:t].float()
        x = _rms(h, w.attn_norm_m, faults.norm_eps)
        if layer in map_.kv_sources:
            owned[layer] = _entries(faults, x, w, tables[main].float(), ratio, step_t)
        if layer in map_.index_sources:
            idx = picks[map_.index_sources.index(layer)].long()
            picked = torch.zeros(t, len(owned[max(owned)]) + 1, dtype=torch.bool)
            picked = picked.scatter(1, torch.where(idx >= 0, idx, picked.shape[1] - 1), True)[:, :-1]
        q, key, _ = project(faults, x, w, table, config)
        quantised = fake_e4m3(key)
        low = p[:, None] - (config.window + faults.window)
        window = (p[None] <= p[:, None]) & (p[None] > low)
        if config.truncation is not Truncation.OFF and ratio and layer >= map_.boundary:
            window &= p[None] >= t - config.keep
        if faults.chunk == "history_lost":
            window &= step_t[None] == step_t[:, None]
        entries, seen = quantised[:0], picked[:, :0]
        if ratio:
            source = max(owned)
            if faults.sharing == "previous_owner" and len(owned) > 1 and layer != source:
                source = sorted(owned)[-2]
            entries = owned[source]
            seen = picked[:, : len(entries)]
            if faults.duplicates == "dropped":
                seen = seen & ~window[:, : len(entries) * ratio : ratio][:, : len(entries)]
        out = _attend(faults, q, [quantised, entries], [window, seen], w.sink_h, table.shape[1])
        h = _bf(h + output(faults, out, w, table, config))
    if config.truncation is Truncation.COMPACT:
        for step in step_t.unique():
            rows = (step_t == step).nonzero()[:, 0]
            h[rows[: min(max(t - config.keep - int(rows[0]), 0), len(rows) - 1)]] = 0
    return h


def run(faults: Faults) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The emulation with the signature of `csa2_run`; picks have to be given."""

    def csa2_run_emulated(
        h_tm: Tensor,
        layers: tuple[Csa2Weights, ...],
        caches: Csa2Caches,
        batch: Csa2Batch,
        picks_ltk: Tensor | None,
        *,
        config: Csa2Config,
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, page_pq, state_sq = csa2_run(h_tm, layers, caches, batch, picks_ltk, config=config)
        if picks_ltk is None:
            raise NotImplementedError("picks_ltk: the emulation selects nothing, got None")
        out, start = [], 0
        for b, n in enumerate(batch.counts_kb.sum(0).tolist()):
            step_t = torch.arange(len(batch.counts_kb)).repeat_interleave(batch.counts_kb[:, b].long())
            rows = slice(start, start + n)
            tables = (caches.window_table, caches.main_table)
            out.append(sequence(faults, h_tm[rows].float(), layers, tables, step_t, picks_ltk[:, rows], config))
            start += n
        page_pq, state_sq = _spoiled(faults.bytes, page_pq, state_sq, caches, config)
        return torch.cat([h_tm[:0].float(), *out]).bfloat16(), page_pq, state_sq

    return csa2_run_emulated


def _spoiled(
    fault: str, page_pq: Tensor, state_sq: Tensor, caches: Csa2Caches, config: Csa2Config
) -> tuple[Tensor, Tensor]:
    for piece in page_pieces(config.plan):
        part = slice(piece.offset, piece.offset + piece.size)
        if fault == "entries_lost" and piece.name == "main":
            page_pq[:, part] = caches.page_pq[:, part]
        if fault == "index_pages_interleaved" and piece.name == "index":
            data, sf = page_pq[:, part].split([piece.entries * 64, piece.entries * 4], 1)
            rows = [data.unflatten(1, (-1, 64)), sf.unflatten(1, (-1, 4))]
            page_pq[:, part] = torch.cat(rows, 2).flatten(1)
    for piece in state_pieces(config.plan):
        part = slice(piece.offset, piece.offset + piece.size)
        if fault == "tail_bf16" and piece.name == "ring":  # the upper bytes of bf16 values, as far as there is room
            rows = state_sq[:, part].unflatten(1, (-1, 528))
            codes, sf = rows[..., 448:512].contiguous().view(torch.float8_e4m3fn), rows[..., 526:].float() - 127
            values = (codes.float() * torch.exp2(sf).repeat_interleave(32, -1)).bfloat16()
            rows[..., 448:512] = values.view(torch.uint8)[..., 1::2]
            state_sq[:, part] = rows.flatten(1)
        if fault == "ring_shifted" and piece.name == "ring":
            state_sq[:, part] = state_sq[:, part].roll(528, 1)
    return page_pq, state_sq


def projected(faults: Faults) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The emulation with the signature of `csa2_project`."""

    def csa2_project(
        x_tm: Tensor, weights: Csa2Weights, table_sr: Tensor, positions_t: Tensor, *, config: Csa2Config
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, key, latent = project(faults, x_tm.float(), weights, table_sr[positions_t.long()], config)
        return q.bfloat16(), key.bfloat16(), latent.bfloat16()

    return csa2_project


def returned(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `csa2_output`."""

    def csa2_output(
        out_thd: Tensor, weights: Csa2Weights, table_sr: Tensor, positions_t: Tensor, *, config: Csa2Config
    ) -> Tensor:
        return output(faults, out_thd.float(), weights, table_sr[positions_t.long()], config).bfloat16()

    return csa2_output


_RIGHT = Faults()
right_run = run(_RIGHT)
right_project = projected(_RIGHT)
right_output = returned(_RIGHT)

project_half_split_pairs = projected(replace(_RIGHT, pairs="half_split"))
project_head_norm = projected(replace(_RIGHT, head_norm=True))
project_key_norm_without_tail = projected(replace(_RIGHT, key_norm="unrotated"))
project_large_eps = projected(replace(_RIGHT, norm_eps=1e-6))

output_not_turned_back = returned(replace(_RIGHT, output_turn="none"))
output_turned_forward = returned(replace(_RIGHT, output_turn="forward"))
output_turned_at_first_row = returned(replace(_RIGHT, output_turn="first_key"))
output_groups_interleaved = returned(replace(_RIGHT, groups="interleaved"))
output_other_cast = returned(replace(_RIGHT, cast="other"))
output_half_split_pairs = returned(replace(_RIGHT, pairs="half_split"))

window_table_everywhere = run(replace(_RIGHT, table="window"))
main_table_everywhere = run(replace(_RIGHT, table="main"))
window_tail_not_quantised = run(replace(_RIGHT, bytes="tail_bf16"))
entry_at_its_last_token = run(replace(_RIGHT, entry_position="last"))
entry_at_its_number = run(replace(_RIGHT, entry_position="index"))
sink_scaled = run(replace(_RIGHT, sink="scaled"))
sink_ignored = run(replace(_RIGHT, sink="ignored"))
two_softmaxes = run(replace(_RIGHT, softmax="two"))
duplicates_dropped = run(replace(_RIGHT, duplicates="dropped"))
value_without_rotary_channels = run(replace(_RIGHT, value="unrotated"))
head_norm_of_v4 = run(replace(_RIGHT, head_norm=True))
output_turn_missing = run(replace(_RIGHT, output_turn="none"))
groups_interleaved = run(replace(_RIGHT, groups="interleaved"))
entries_not_quantised = run(replace(_RIGHT, main="unquantised"))
previous_segment_read = run(replace(_RIGHT, sharing="previous_owner"))
window_one_short = run(replace(_RIGHT, window=-1))
window_one_long = run(replace(_RIGHT, window=1))
history_lost_at_a_chunk = run(replace(_RIGHT, chunk="history_lost"))
group_split_at_a_chunk = run(replace(_RIGHT, chunk="group_split"))
mean_instead_of_softmax = run(replace(_RIGHT, compressor="mean"))
entries_never_stored = run(replace(_RIGHT, bytes="entries_lost"))
index_pages_interleaved = run(replace(_RIGHT, bytes="index_pages_interleaved"))
ring_shifted = run(replace(_RIGHT, bytes="ring_shifted"))


@dataclass(frozen=True, kw_only=True)
class Forwards(Numerics):
    """Sums in fp32, blocks of 16 from the first on; every block alone is exact, so a row never sees its batch."""

    def sum(self, x: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
        total = torch.zeros(())
        for part in x.split(16, dim):
            total = total + part.sum(dim, keepdim=keepdim).float()
        return total.double()

    def einsum(self, equation: str, a: Tensor, b: Tensor) -> Tensor:
        left, right = equation.partition("->")[0].split(",")
        (along,) = (c for c in left if c in right and c not in equation.partition("->")[2])
        total = torch.zeros(())
        for x, y in zip(a.split(16, left.index(along)), b.split(16, right.index(along)), strict=True):
            total = total + torch.einsum(equation, x, y).float()
        return total.double()


def right_run_forwards(
    h_tm: Tensor,
    layers: tuple[Csa2Weights, ...],
    caches: Csa2Caches,
    batch: Csa2Batch,
    picks_ltk: Tensor | None,
    *,
    config: Csa2Config,
) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of honest arithmetic that is no oracle's: another order of sums, softmax weights at another scale."""
    num = Forwards(name="forwards", carrier=torch.float64, marks=True, free_scale=0.7)
    h, page_pq, state_sq = csa2_run(h_tm, layers, caches, batch, picks_ltk, config=config, num=num)
    return h.bfloat16(), page_pq, state_sq


def stale_index_keys(
    h_tm: Tensor,
    layers: tuple[Csa2Weights, ...],
    caches: Csa2Caches,
    batch: Csa2Batch,
    picks_ltk: Tensor | None,
    *,
    config: Csa2Config,
) -> tuple[Tensor, Tensor, Tensor]:
    """The release's decode: an owner publishes its index keys only when its compressor has just ended a group, so on
    other steps the keys that the last owner of the step before left are scored."""
    owners = config.topology.kv_sources
    index = {p.layer: p for p in page_pieces(config.plan) if p.name == "index"}
    last, state = caches, (caches.page_pq.clone(), caches.state_sq.clone())
    out = torch.zeros_like(h_tm, memory_format=torch.contiguous_format)
    total_b, done_b = batch.counts_kb.sum(0), batch.start_b.clone()
    base_b = total_b.cumsum(0) - total_b
    for count_b, decode in zip(batch.counts_kb, batch.decode_k, strict=True):
        row_t = torch.cat(
            [torch.arange(f, f + n) for f, n in zip((base_b + done_b).tolist(), count_b.tolist(), strict=True)]
        )
        one = replace(batch, counts_kb=count_b[None], decode_k=decode[None], start_b=done_b, valid_b=batch.valid_b)
        stale = bool(decode) and bool(((done_b + count_b) % 2 != 0).any())
        fed = replace(last, page_pq=state[0].clone(), state_sq=state[1].clone())
        if stale:
            for owner in owners[:-1]:
                size = min(index[owner].size, index[owners[-1]].size)
                a, b = index[owner].offset, index[owners[-1]].offset
                fed.page_pq[:, a : a + size] = state[0][:, b : b + size]
        h, page_pq, state_sq = csa2_run(h_tm[row_t], layers, fed, one, None, config=config)
        out[row_t] = h.bfloat16()
        if stale:
            for owner in owners[:-1]:
                a, size = index[owner].offset, index[owner].size
                page_pq[:, a : a + size] = state[0][:, a : a + size]
        state, done_b = (page_pq, state_sq), done_b + count_b
    return out, *state
