"""Drafting in plain torch on the CPU, with faults that can be switched on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deeptwin.reference.config import DraftBlock, PageLayout
from deeptwin.reference.dspark_state import DraftConfig, DraftLayer

from .csa2 import fake_e4m3


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the rows of a block do wrong; the default is right."""

    shift: int = 0  # of the whole block
    accepted: bool = True
    golden: str = "first"  # first, last, all, none
    window: int = 0  # keys more or less
    stride: str = "ring"  # ring, window
    padding: str = "skipped"  # skipped, slot_0, token
    causal: bool = False
    own: bool = True  # the keys of the block are seen
    restart: bool = True  # positions before v0 are not seen
    state: str = "own"  # own, index
    order: str = "oldest"  # oldest, newest
    width: str = "64"
    noise: str = "given"  # given, zero
    before: bool = True  # positions below 0 are left out


def _rows(faults: Rows) -> Callable[..., tuple[Tensor, ...]]:
    def draft_rows(
        golden_b: Tensor, first_b: Tensor, accepted_b: Tensor, state_b: Tensor, valid_b: Tensor, *, block: DraftBlock
    ) -> tuple[Tensor, ...]:
        gamma, window = block.draft, block.window.window + faults.window
        stride = block.window.ring if faults.stride == "ring" else block.window.window
        width = -(-(block.window.window + gamma) // 64) * 64
        noise = block.noise_token if faults.noise == "given" else 0
        found: list[list[list[int]]] = [[], [], [], []]
        for b, (golden, first, accepted, state, valid) in enumerate(
            zip(*(x.tolist() for x in (golden_b, first_b, accepted_b, state_b, valid_b)), strict=True)
        ):
            if first < 0:
                slot = 0 if faults.padding == "slot_0" else -1
                ids = [golden if faults.padding == "token" else noise] + [noise] * (gamma - 1)
                for part, value in zip(found, (ids, [0] * gamma, [slot] * gamma, [-1] * width), strict=True):
                    part.append(value)
                continue
            base = (b if faults.state == "index" else state) * stride
            last = first + (accepted if faults.accepted else 0) + faults.shift
            ids = [noise] * gamma
            where = {"first": [0], "last": [gamma - 1], "all": range(gamma), "none": []}[faults.golden]
            for j in where:
                ids[j] = golden
            positions = [last + 1 + j for j in range(gamma)]
            low = last - window + 1
            low = max(low, valid) if faults.restart else low
            low = max(low, 0) if faults.before else low
            end = last + (1 if faults.causal else gamma) if faults.own else last
            seen = [base + p % stride for p in range(low, end + 1)]
            seen = seen[::-1] if faults.order == "newest" else seen
            parts = (ids, positions, [base + p % stride for p in positions], (seen + [-1] * width)[:width])
            for part, value in zip(found, parts, strict=True):
                part.append(value)
        sizes = (gamma, gamma, gamma, width)
        return tuple(
            torch.tensor(part, dtype=torch.int32).reshape(-1, size) for part, size in zip(found, sizes, strict=True)
        )

    return draft_rows


right_rows = _rows(Rows())
block_one_early = _rows(Rows(shift=-1))
block_one_late = _rows(Rows(shift=1))
accepted_forgotten = _rows(Rows(accepted=False))
golden_last = _rows(Rows(golden="last"))
golden_everywhere = _rows(Rows(golden="all"))
golden_missing = _rows(Rows(golden="none"))
window_one_more = _rows(Rows(window=1))
window_one_less = _rows(Rows(window=-1))
stride_of_window = _rows(Rows(stride="window"))
padding_in_slot_0 = _rows(Rows(padding="slot_0"))
padding_reads_token = _rows(Rows(padding="token"))
first_key_of_block = _rows(Rows(causal=True))
block_unseen = _rows(Rows(own=False))
restart_ignored = _rows(Rows(restart=False))
state_by_request = _rows(Rows(state="index"))
newest_first = _rows(Rows(order="newest"))
noise_zero = _rows(Rows(noise="zero"))
before_the_sequence = _rows(Rows(before=False, restart=False))


def _features(
    *, mean: bool = True, streams: int = 4, order: int = 1, wide: bool = True, tail: int = 0
) -> Callable[..., Tensor]:
    def target_features(streams_ztnm: Sequence[Tensor]) -> Tensor:
        parts = []
        for x in list(streams_ztnm)[::order]:
            x = x[:, :streams]
            if wide:
                total = x.double().sum(1)
            else:
                total = x[:, 0].clone()
                for i in range(1, x.shape[1]):
                    total = total + x[:, i]
            total = total.double() / (x.shape[1] if mean else 1)
            parts.append(total.bfloat16().roll(tail, 0))
        return torch.cat(parts, 1)

    return target_features


right_features = _features()
sum_of_streams = _features(mean=False)
first_stream = _features(streams=1)
layers_reversed = _features(order=-1)
sum_in_bf16 = _features(wide=False)
features_of_token_before = _features(tail=1)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What the keys of the main model's tokens do wrong; the default is right."""

    norms: str = "both"  # both, no_main, no_key
    weights: str = "own"  # own, first, reversed
    turn: str = "interleaved"  # interleaved, half_split, none
    span: str = "last"  # last, first
    position: int = 0
    quantised: str = "both"  # both, features, none
    eps: str = "given"  # given, 1e-3


def _bf(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _product(x: Tensor, codes: Tensor, sf: Tensor, *, quantised: bool) -> Tensor:
    scale = torch.exp2(sf.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    w = codes.float() * scale[: codes.shape[0], : codes.shape[1]]
    return _bf(((fake_e4m3(x) if quantised else x).double() @ w.double().T).float())


def _rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return _bf((x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)).float() * w.float())


def _keys(faults: Keys) -> Callable[..., Tensor]:
    def main_keys(
        features_tz: Tensor,
        proj_q: Tensor,
        proj_sf: Tensor,
        norm_m: Tensor,
        wkv: Sequence[tuple[Tensor, Tensor, Tensor]],
        table_sr: Tensor,
        positions_t: Tensor,
        *,
        eps: float,
    ) -> Tensor:
        eps = eps if faults.eps == "given" else 1e-3
        u = _product(features_tz.float(), proj_q, proj_sf, quantised=faults.quantised != "none")
        u = u if faults.norms == "no_main" else _rms(u, norm_m, eps)
        order = {"own": list(wkv), "first": [wkv[0]] * len(wkv), "reversed": list(wkv)[::-1]}[faults.weights]
        keys = []
        for w_q, w_sf, norm_d in order:
            key = _product(u, w_q, w_sf, quantised=faults.quantised == "both")
            keys.append(key if faults.norms == "no_key" else _rms(key, norm_d, eps))
        out, r = torch.stack(keys, 1), table_sr.shape[1]
        if faults.turn == "none":
            return out.bfloat16()
        rows = table_sr[(positions_t.long() + faults.position).clamp(0, len(table_sr) - 1)]
        cos, sin = rows[:, None, : r // 2], rows[:, None, r // 2 :]
        at = slice(0, r) if faults.span == "first" else slice(out.shape[2] - r, out.shape[2])
        tail = out[..., at]
        if faults.turn == "half_split":
            a, b = tail[..., : r // 2], tail[..., r // 2 :]
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        else:
            a, b = tail[..., 0::2], tail[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        out[..., at] = turned
        return out.bfloat16()

    return main_keys


right_keys = _keys(Keys())
main_norm_missing = _keys(Keys(norms="no_main"))
key_norm_missing = _keys(Keys(norms="no_key"))
keys_of_first_layer = _keys(Keys(weights="first"))
keys_reversed = _keys(Keys(weights="reversed"))
keys_half_split = _keys(Keys(turn="half_split"))
keys_not_turned = _keys(Keys(turn="none"))
keys_turned_in_front = _keys(Keys(span="first"))
keys_one_position_late = _keys(Keys(position=1))
products_unquantised = _keys(Keys(quantised="none"))
second_product_unquantised = _keys(Keys(quantised="features"))


@dataclass(frozen=True, kw_only=True)
class Markov:
    """What the Markov step does wrong; the default is right. `backwards` is an honest choice."""

    backwards: bool = False
    tables: str = "given"  # given, exchanged, first_twice
    base: str = "f32"  # f32, bf16, missing
    product: str = "f32"  # f32, bf16
    token: str = "own"  # own, before, next
    scale: float = 1.0
    rank: int = 0  # ranks left out
    vocab: bool = True  # the last token gets its part


def _markov(faults: Markov) -> Callable[..., Tensor]:
    def markov_step(base_bv: Tensor, token_b: Tensor, w1_vr: Tensor, w2_vr: Tensor) -> Tensor:
        first, second = {"given": (w1_vr, w2_vr), "exchanged": (w2_vr, w1_vr), "first_twice": (w1_vr, w1_vr)}[
            faults.tables
        ]
        token = token_b.long()
        token = {"own": token, "before": token.roll(1, 0), "next": (token + 1) % len(w1_vr)}[faults.token]
        e = first[token].double()
        e = e[:, : e.shape[1] - faults.rank] if faults.rank else e
        parts = e[:, None, :] * second.double()[None, :, : e.shape[1]]
        added = (parts.flip(-1) if faults.backwards else parts).float().sum(-1) * faults.scale
        if faults.product == "bf16":
            added = added.bfloat16().float()
        if not faults.vocab:
            added[:, -1] = 0
        base = {"f32": base_bv, "bf16": base_bv.bfloat16().float(), "missing": base_bv * 0}[faults.base]
        return base + added

    return markov_step


right_markov = _markov(Markov())
right_markov_backwards = _markov(Markov(backwards=True))
tables_exchanged = _markov(Markov(tables="exchanged"))
first_table_twice = _markov(Markov(tables="first_twice"))
base_in_bf16 = _markov(Markov(base="bf16"))
base_missing = _markov(Markov(base="missing"))
product_in_bf16 = _markov(Markov(product="bf16"))
token_of_mate = _markov(Markov(token="before"))
next_token = _markov(Markov(token="next"))
product_scaled = _markov(Markov(scale=2.0**-4))
last_rank_left_out = _markov(Markov(rank=1))
last_token_left_out = _markov(Markov(vocab=False))


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the confidence head does wrong; the default is right. `backwards` is an honest choice."""

    backwards: bool = False
    norm: bool = False
    token: str = "own"  # own, mate, missing
    temperature: str = "divides"  # divides, multiplies, ignored, clamp_first
    limit: float = 60.0
    precision: str = "f32"  # f32, bf16, f16_weights
    sigmoid: bool = True
    bias: float = 0.0
    halves: bool = True  # hidden row first
    product: bool = True


def _head(faults: Head) -> Callable[..., Tensor]:
    def confidence(h_bm: Tensor, token_b: Tensor, w1_vr: Tensor, weight_x: Tensor, *, temperature: float) -> Tensor:
        h = h_bm.double()
        if faults.norm:
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-20)
        token = token_b.long().roll(1, 0) if faults.token == "mate" else token_b.long()
        e = w1_vr[token].double() * (0 if faults.token == "missing" else 1)
        row = torch.cat([h, e] if faults.halves else [e, h], 1) * weight_x.double()
        row = row.flip(1) if faults.backwards else row
        z = row.bfloat16().float().sum(1) if faults.precision == "bf16" else row.float().sum(1)
        z = z + faults.bias
        t = max(temperature, 1e-5)
        if faults.temperature == "clamp_first":
            z = z.clamp(-60, 60)
        z = {"divides": z / t, "multiplies": z * t, "ignored": z, "clamp_first": z / t}[faults.temperature]
        if faults.temperature != "clamp_first":
            z = z.clamp(-faults.limit, faults.limit)
        return torch.sigmoid(z.double()).float() if faults.sigmoid else z

    return confidence


right_head = _head(Head())
right_head_backwards = _head(Head(backwards=True))
normed_row = _head(Head(norm=True))
token_part_of_mate = _head(Head(token="mate"))
token_part_missing = _head(Head(token="missing"))
temperature_multiplies = _head(Head(temperature="multiplies"))
temperature_ignored = _head(Head(temperature="ignored"))
limit_before_temperature = _head(Head(temperature="clamp_first"))
limit_missing = _head(Head(limit=1e9))
limit_30 = _head(Head(limit=30.0))
head_in_bf16 = _head(Head(precision="bf16"))
sigmoid_missing = _head(Head(sigmoid=False))
with_bias = _head(Head(bias=0.125))
token_part_first = _head(Head(halves=False))


def right_in_place(
    embed_bjm: Tensor,
    layers: Sequence[DraftLayer],
    rings: Sequence[Tensor],
    table_sr: Tensor,
    positions_bj: Tensor,
    slots_bj: Tensor,
    seen_bk: Tensor,
    *,
    config: DraftConfig,
) -> Tensor:
    """The kernels as production calls them: the keys of the block stay in the rings."""
    from deeptwin.optimized.dspark import draft_hidden_triton

    own = tuple(ring.clone() for ring in rings)
    rows = positions_bj, slots_bj, seen_bk
    h_bjm = draft_hidden_triton(embed_bjm, layers, own, table_sr, *rows, config=config, in_place=True)
    for ring, before in zip(own, rings, strict=True):
        moved = (ring.flatten(0, 1) != before.flatten(0, 1)).any(1).nonzero()[:, 0].tolist()
        if config.csa2.layout is PageLayout.INTERLEAVED and not set(moved) <= set(slots_bj.flatten().tolist()):
            raise AssertionError(f"rings: slots {moved} changed, expected some of {slots_bj.tolist()}")
    return h_bjm
