"""Layers of V4 without any cache: every sequence at once, masks instead of lists, fp32 torch, with faults to switch on.

The bytes that an operation returns are not the subject here: they come from the reference and may be spoiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference.config import HeadNorm, OutputCast, V4AttnConfig, V4Kind
from deeptwin.reference.v4_weights import CompressorWeights, V4Weights


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the emulation does wrong; the default is right."""

    base: str = "layer"  # layer, plain (10000 without YaRN everywhere), window_plain (window keys alone)
    output_turn: str = "back"  # back, none, forward
    pairs: str = "interleaved"  # interleaved, half_split
    head_norm: str = "each"  # each, none, all_heads
    key: str = "e4m3"  # e4m3, bf16 (scaled, rounded to bf16), tail_too (rotary channels quantised as in V4.1), plain
    entry: str = "e4m3"
    sink: str = "plain"  # plain, scaled, ignored
    window: int = 0  # keys more or less
    duplicates: str = "kept"  # kept, dropped
    softmax: str = "one"  # one, two
    value: str = "all"  # all, unrotated
    groups: str = "blocks"  # blocks, interleaved
    cast: str = "given"  # given, other
    series: str = "right"  # right, swapped, own_twice, no_overlap
    bias: str = "right"  # right, none, shifted
    first: str = "absent"  # absent, zeros: what entry 0 pools instead of a group before it
    weights: str = "channel"  # channel, shared (one softmax of the mean logit for all channels), mean
    position: str = "first"  # first, last, centre, index, group_before
    visible: str = "complete"  # complete, one_early, one_late, all
    chunk: str = "seen"  # history_lost, group_split, overlap_lost: what earlier steps left is not there
    residue: str = "right"  # right, three: the last entry of a sequence of length 3 (mod 4) is not visible


def e4m3(x: Tensor, group: int, *, fault: str = "e4m3") -> Tensor:
    """Groups through e4m3 with a power-of-two scale."""
    g = x.unflatten(-1, (-1, group)).double()
    amax = g.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    mantissa, exponent = torch.frexp((amax.float() / 448).double())
    s = torch.exp2((exponent - (mantissa == 0.5).int()).double())
    q = (g / s).float()
    q = q.bfloat16().double() if fault == "bf16" else q.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    return (q * s).float().flatten(-2)


def _bf(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _mm(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double().T).float()


def _dense(codes: Tensor, sf: Tensor | None) -> Tensor:
    if sf is None:
        return codes.float()
    scale = torch.exp2(sf.float() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * scale[: codes.shape[0], : codes.shape[1]]


def _product(x: Tensor, codes: Tensor, sf: Tensor | None) -> Tensor:
    return _bf(_mm(x if sf is None else e4m3(x, 128), _dense(codes, sf)))


def _rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return _bf(x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps).float() * w.float())


def heads(q: Tensor, cast: HeadNorm, eps: float) -> Tensor:
    """The weightless norm of every head."""
    if cast is HeadNorm.RELEASE:
        mean = _bf(_bf(q * q).double().mean(-1, keepdim=True).float())
        return _bf(q * _bf(torch.rsqrt(_bf(mean + eps))))
    factor = torch.rsqrt(q.double().square().mean(-1, keepdim=True) + eps).float()
    return _bf(q * (_bf(factor) if cast is HeadNorm.FACTOR else factor))


def turn(x: Tensor, table: Tensor, *, back: bool = False, half_split: bool = False) -> Tensor:
    """x [n, ..., d] by rows of angles [n, r], in fp64."""
    r = table.shape[1]
    shape = (len(x),) + (1,) * (x.dim() - 2) + (r // 2,)
    cos, sin = table[:, : r // 2].double().reshape(shape), table[:, r // 2 :].double().reshape(shape) * (1 - 2 * back)
    y, tail = x.double().clone(), x[..., -r:].double()
    if half_split:
        u, v = tail[..., : r // 2], tail[..., r // 2 :]
        y[..., -r:] = torch.cat([u * cos - v * sin, u * sin + v * cos], -1)
    else:
        u, v = tail[..., 0::2], tail[..., 1::2]
        y[..., -r:] = torch.stack([u * cos - v * sin, u * sin + v * cos], -1).flatten(-2)
    return y.float()


def plain_table(length: int, r: int) -> Tensor:
    """The angles of base 10000 without YaRN."""
    angle = torch.arange(length).float()[:, None] * (1.0 / 10000.0 ** (torch.arange(0, r, 2).float() / r))
    return torch.cat([angle.double().cos(), angle.double().sin()], 1).float()


def entries(
    faults: Faults, x: Tensor, w: CompressorWeights, table: Tensor, config: V4AttnConfig, step_t: Tensor
) -> Tensor:
    """Rotated entries of one sequence, before a quantiser; `step_t` is the step of every token."""
    r, csa = config.ratio, config.kind is V4Kind.CSA
    n = len(x) // r
    value, gate = _mm(x, w.value_wm), _mm(x, w.gate_wm)
    place = torch.arange(len(x)) % r
    if faults.bias != "none":
        gate = gate + w.bias_rw[(place + 1) % r if faults.bias == "shifted" else place]
    value, gate, owner = (part[: n * r].unflatten(0, (n, r)) for part in (value, gate, step_t))
    gone = owner != owner[:, -1:] if faults.chunk == "group_split" else torch.zeros_like(owner, dtype=torch.bool)
    if csa:
        c = value.shape[-1] // 2
        low, high = (slice(c, None), slice(0, c)) if faults.series == "swapped" else (slice(0, c), slice(c, None))
        before_v, before_z = value.roll(1, 0)[..., low].clone(), gate.roll(1, 0)[..., low].clone()
        lost = owner.roll(1, 0) != owner[:, -1:] if faults.chunk == "overlap_lost" else torch.zeros_like(gone)
        lost = lost.clone()
        if n:
            lost[0] = True
        if faults.series == "own_twice":
            before_v, before_z, lost = value[..., low], gate[..., low], torch.zeros_like(lost)
        if faults.series == "no_overlap":
            lost = torch.ones_like(lost)
        before_v = before_v.masked_fill(lost[..., None], 0.0)
        before_z = before_z.masked_fill(lost[..., None], 0.0 if faults.first == "zeros" else -torch.inf)
        value, gate = torch.cat([before_v, value[..., high]], 1), torch.cat([before_z, gate[..., high]], 1)
        gone = torch.cat([torch.zeros_like(gone), gone], 1)
    gate = gate.masked_fill(gone[..., None], -torch.inf)
    if faults.weights == "mean":
        gate = gate.masked_fill(gate.isfinite(), 0.0)
    if faults.weights == "shared":
        gate = gate.mean(-1, keepdim=True).expand_as(gate)
    pooled = (torch.softmax(gate.double(), 1) * value).sum(1).float()
    latent = _rms(_bf(pooled), w.norm_c, config.eps)
    first = torch.arange(n) * r
    where = {
        "first": first,
        "last": first + r - 1,
        "centre": first + r // 2,
        "index": torch.arange(n),
        "group_before": (first - r).clamp(min=0),
    }[faults.position]
    return _bf(turn(latent, table[where]))


def stored(x: Tensor, fault: str, config: V4AttnConfig) -> Tensor:
    """What a cache gives back."""
    if config.cache is None or fault == "plain":
        return x
    c = config.cache.channels
    if fault == "floor":
        g = x[:, :c].unflatten(-1, (-1, 64)).double()
        s = torch.exp2(torch.ceil(torch.log2((g.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-4))))
        coded = ((g / s).float().to(torch.float8_e4m3fn).double() * s).float().flatten(-2)
    else:
        coded = e4m3(x[:, :c], 64, fault=fault)
    tail = e4m3(x[:, c:], 64) if fault == "tail_too" else x[:, c:]
    return torch.cat([coded, tail], 1)


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


def output(faults: Faults, out: Tensor, w: V4Weights, table: Tensor, config: V4AttnConfig) -> Tensor:
    """From attention to what the streams gain."""
    fused = (config.output is OutputCast.FUSED) != (faults.cast == "other")
    out = out if config.output is OutputCast.FUSED else _bf(out)
    half_split = faults.pairs == "half_split"
    if faults.output_turn != "none":
        out = turn(out, table, back=faults.output_turn == "back", half_split=half_split)
    out = out if fused else _bf(out)
    if faults.groups == "interleaved":
        out = out.unflatten(1, (-1, config.o_groups)).transpose(1, 2).flatten(1, 2)
    u = e4m3(out.flatten(1), 128) if fused else out.flatten(1)
    wo_a = _dense(w.wo_a, w.wo_a_sf).unflatten(0, (config.o_groups, -1))
    z = torch.einsum("tgk,gnk->tgn", u.unflatten(1, (config.o_groups, -1)).double(), wo_a.double()).float().flatten(1)
    return _product(_bf(z), w.wo_b, w.wo_b_sf)


def sequence(
    faults: Faults, x: Tensor, w: V4Weights, table: Tensor, step_t: Tensor, picks: Tensor | None, config: V4AttnConfig
) -> Tensor:
    """One sequence from position 0; `picks` [t, k] names entries, None: every visible one."""
    t, eps, r = len(x), config.eps, table.shape[1]
    p = torch.arange(t)
    other = plain_table(len(table), r)
    angles = other if faults.base == "plain" else table
    latent = _rms(_product(x, w.wq_a, w.wq_a_sf), w.q_norm_a, eps)
    q = _product(latent, w.wq_b, w.wq_b_sf).unflatten(1, (config.num_heads, -1))
    if faults.head_norm == "each":
        q = heads(q, config.head_norm, eps)
    elif faults.head_norm == "all_heads":
        q = _bf(q * torch.rsqrt(q.double().square().mean((-2, -1), keepdim=True) + eps).float())
    half_split = faults.pairs == "half_split"
    q = _bf(turn(q, angles[:t], half_split=half_split))
    key = _rms(_product(x, w.wkv, w.wkv_sf), w.kv_norm_d, eps)
    key = _bf(turn(key, (other if faults.base == "window_plain" else angles)[:t], half_split=half_split))
    low = p[:, None] - (config.window + faults.window)
    window = (p[None] <= p[:, None]) & (p[None] > low)
    if faults.chunk == "history_lost":
        window &= step_t[None] == step_t[:, None]
    made, seen = key[:0], window[:, :0]
    if w.entry is not None:
        made = entries(faults, x, w.entry, angles, config, step_t)
        shift = {"complete": 1, "one_early": 1 + config.ratio, "one_late": 1 - config.ratio, "all": t}[faults.visible]
        seen = (torch.arange(len(made)) + 1) * config.ratio <= p[:, None] + shift
        if faults.residue == "three" and t % config.ratio == config.ratio - 1 and len(made):
            seen[:, -1] = False
        if picks is not None:
            picked = torch.zeros(t, len(made) + 1, dtype=torch.bool)
            idx = picks.long()
            inside = (idx >= 0) & (idx < len(made))
            seen = seen & picked.scatter(1, torch.where(inside, idx, len(made)), True)[:, :-1]
        if faults.duplicates == "dropped":
            last = (torch.arange(len(made)) + 1) * config.ratio - 1
            seen = seen & ~window[:, last]
    keys = [stored(key, faults.key, config), stored(made, faults.entry, config)]
    return output(faults, _attend(faults, q, keys, [window, seen], w.sink_h, r), w, angles[:t], config)


def packed(
    faults: Faults,
    x_tm: Tensor,
    weights: V4Weights,
    table_sr: Tensor,
    lengths: list[int],
    steps: list[Tensor],
    picks_tk: Tensor | None,
    config: V4AttnConfig,
) -> Tensor:
    """Sequences one after the other."""
    found, start = [x_tm[:0].float()], 0
    for n, step_t in zip(lengths, steps, strict=True):
        rows = slice(start, start + n)
        picks = None if picks_tk is None else picks_tk[rows]
        if n:
            found.append(sequence(faults, x_tm[rows].float(), weights, table_sr, step_t, picks, config))
        start += n
    return torch.cat(found).bfloat16()


def whole(faults: Faults) -> Callable[..., Tensor]:
    """The emulation of whole sequences."""

    def attention(
        x_tm: Tensor,
        weights: V4Weights,
        table_sr: Tensor,
        cu_seqlens: Tensor,
        picks_tk: Tensor | None = None,
        *,
        config: V4AttnConfig,
    ) -> Tensor:
        if config.kind is V4Kind.CSA and picks_tk is None:
            raise NotImplementedError("picks_tk: the emulation selects nothing, got None")
        lengths = cu_seqlens.diff().tolist()
        steps = [torch.zeros(n, dtype=torch.int64) for n in lengths]
        return packed(faults, x_tm, weights, table_sr, lengths, steps, picks_tk, config)

    return attention
