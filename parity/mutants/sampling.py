"""Sampling one row after the other in Python numbers and numpy, with faults that can be switched on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = 1 << 32
OK, INVALID, EMPTY, OVERFULL, PARAMETER = range(5)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a sampler does wrong; the default is right."""

    rounds: int = 10
    product: str = "high"  # high, low
    key: str = "whole"  # whole, swapped, half, none
    place: bool = False  # words depend on the place in the batch
    block: str = "counted"  # counted, still
    layout: str = "above"  # above, below: where the stream number stands in the counter
    first_seed: bool = False
    refusal: str = "endless"  # endless, eight, none, uniform (no words are refused: one is scaled)
    order: str = "lanes"  # lanes, ids, narrow
    edge: str = "below"  # below, at
    weight: str = "floor"  # floor, nearest
    bad: str = "row"  # row, batch, ignored
    empty: str = "said"  # said, zero
    high_first: bool = False
    platform: str = "asked"  # asked, other
    sums: str = "whole"  # whole, float
    filters: str = "both"  # both, renormalised, union
    reach: str = "at"  # at, before, short
    ties: str = "lower"  # lower, higher, all
    zeros: str = "equal"  # equal, by_sign
    least: int = 1  # tokens that survive a tiny top_p
    first_parameters: bool = False
    temperature: str = "used"  # used, ignored, late, first
    base: float = math.e
    total: str = "wide"  # wide (fp64), forwards, backwards (fp32, in 128 lanes one after the other)
    renormalise: bool = True
    greedy: str = "drawn"  # drawn, argmax
    nan: str = "refused"  # refused, zero
    checked: bool = True
    draw: str = "cdf"  # cdf, gumbel, unfiltered


def _words(faults: Faults, seed: int, number: int, place: int = 0) -> Iterator[int]:
    """The words of a stream, without end."""
    low, high = seed % WORD, seed // WORD % WORD
    key = {"whole": (low, high), "swapped": (high, low), "half": (low, 0), "none": (0, 0)}[faults.key]
    if faults.place:
        number += place
    block = 0
    while True:
        c = [block, 0, number % WORD, number // WORD]
        if faults.layout == "below":
            c = [number % WORD, number // WORD, block, 0]
        k = list(key)
        for _ in range(faults.rounds):
            p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            upper = (p // WORD, q // WORD) if faults.product == "high" else (p % WORD, q % WORD)
            c = [upper[1] ^ c[1] ^ k[0], q % WORD, upper[0] ^ c[3] ^ k[1], p % WORD]
            k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
        yield from c
        block += faults.block == "counted"


def _streams(faults: Faults, seed_t: Tensor, number_t: Tensor) -> list[Iterator[int]]:
    seeds = seed_t.tolist()
    if faults.first_seed and seeds:
        seeds = seeds[:1] * len(seeds)
    return [_words(faults, s % 2**64, n, i) for i, (s, n) in enumerate(zip(seeds, number_t.tolist(), strict=True))]


def words_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `random_words`."""

    def random_words(seed_t: Tensor, subsequence_t: Tensor, *, count: int) -> Tensor:
        rows = [[next(stream) for _ in range(count)] for stream in _streams(faults, seed_t, subsequence_t)]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(seed_t), count)

    return random_words


def _weights(faults: Faults, prob: np.ndarray) -> list[int]:
    scaled = prob.astype(np.float64) * 2.0**31
    return [int(x) for x in (np.rint(scaled) if faults.weight == "nearest" else np.floor(scaled))]


def _fall(faults: Faults, weights: list[int], rho: int) -> tuple[int, int]:
    """Where rho falls, by walking."""
    end = 0
    for place, weight in enumerate(weights):
        before, end = end, end + weight
        if rho < end or (faults.edge == "at" and rho == end and weight):
            return place, rho - before
    return len(weights) - 1, 0


def _lanes(faults: Faults, columns: int, ascend: bool) -> int:
    power = 1
    while power < columns:
        power *= 2
    if faults.order == "narrow":
        return min(power, 1024 if columns > 1024 else 16)
    if ascend:
        return 4096 if columns >= 8192 else min(max(64, power), 2048)
    return 2048 if columns >= 8192 else power


def _pick(faults: Faults, prob: np.ndarray, stream: Iterator[int], ascend: bool) -> tuple[int, int]:
    """Token and error of one row."""
    if not (np.isfinite(prob).all() and (prob >= 0).all()):
        return -1, INVALID
    ascend ^= faults.platform == "other"
    weights = _weights(faults, prob)
    total = sum(weights)
    if total == 0:
        return (0, OK) if faults.empty == "zero" else (-1, EMPTY)
    if total >= WORD:
        return -1, OVERFULL
    if ascend:
        first, second = next(stream), next(stream)
        rho = (first * WORD + second if faults.high_first else second * WORD + first) % total
    elif faults.refusal == "uniform":
        rho = min(int(np.float32(next(stream) * 2.0**-32) * np.float32(total)), total - 1)
    else:
        limit, tried, word = (WORD - 1) // total * total, 1, next(stream)
        while word >= limit and faults.refusal != "none" and not (faults.refusal == "eight" and tried > 8):
            word, tried = next(stream), tried + 1
        rho = word % total
    if faults.order == "ids":
        return _fall(faults, weights, rho)[0], OK
    lanes = _lanes(faults, len(weights), ascend)
    lane, rest = _fall(faults, [sum(weights[k::lanes]) for k in range(min(lanes, len(weights)))], rho)
    return lane + _fall(faults, weights[lane::lanes], rest)[0] * lanes, OK


def _answer(faults: Faults, found: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    worst = max((error for _, error in found), default=OK)
    if faults.bad == "batch" and worst:
        found = [(-1, worst)] * len(found)
    token = torch.tensor([token for token, _ in found], dtype=torch.int64)
    return token, torch.tensor([error for _, error in found], dtype=torch.int32)


def draw_with(faults: Faults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `sample_probs`."""

    def sample_probs(probs_tv: Tensor, seed_t: Tensor, subsequence_t: Tensor, *, draw: Any) -> tuple[Tensor, Tensor]:
        streams = _streams(faults, seed_t, subsequence_t)
        ascend = draw.name == "ASCEND"
        return _answer(faults, [_pick(faults, p, s, ascend) for p, s in zip(probs_tv.numpy(), streams, strict=True)])

    return sample_probs


def _walked(faults: Faults, x: np.ndarray, prob: np.ndarray, top_p: float, top_k: int) -> set[int]:
    """The columns that one walk down the classes leaves."""
    columns = len(x)
    by_p, by_k = top_p < 1, 0 < top_k < columns
    target = int(np.float32(top_p) * np.float32(2.0**31)) + 1
    weights = _weights(faults, prob)
    mass: Any = np.float32(0) if faults.sums == "float" else 0
    kept: list[int] = []
    classes: dict[tuple[float, bool], list[int]] = {}
    for column in range(columns):
        below = faults.zeros == "by_sign" and bool(x[column] == 0) and bool(np.signbit(x[column]))
        classes.setdefault((-float(x[column]), below), []).append(column)
    for name in sorted(classes):
        members = classes[name]
        own = sum(weights[c] for c in members)
        if faults.sums == "float":
            after: Any = np.float32(mass)
            for c in members:
                after = np.float32(after + prob[c])
            reached = by_p and after >= np.float32(top_p)
        else:
            after = mass + own
            reached = by_p and after >= target - (1 if faults.reach == "before" else 0)
        if not reached and not (by_k and len(kept) + len(members) >= top_k):
            kept, mass = kept + members, after
            continue
        room = len(members)
        if by_k:
            room = min(room, top_k - len(kept))
        if by_p:
            p = np.float32(prob[members[0]])
            missing = np.float32(top_p) - mass if faults.sums == "float" else np.float32(target - mass) * 2.0**-31
            needed = math.ceil(min(float(np.float32(missing) / p), columns)) if p > 0 else 0
            room = min(room, max(needed, faults.least if not kept else 0) - (faults.reach == "short"))
            if faults.least == 0 and target == 1 or faults.least == 0 and target < 8:
                room = 0
        if faults.ties == "all":
            room = len(members)
        return set(kept + (members[len(members) - room :] if faults.ties == "higher" else members[: max(room, 0)]))
    return set(range(columns))


def _prefix(faults: Faults, x: np.ndarray, prob: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    if faults.filters == "renormalised":
        by_k = _walked(faults, x, prob, 1.0, top_k)
        inside = np.isin(np.arange(len(x)), list(by_k))
        left = np.where(inside, prob, 0).astype(np.float32)
        chosen = by_k & _walked(faults, x, (left / left.sum()).astype(np.float32), top_p, -1)
    elif faults.filters == "union":
        chosen = _walked(faults, x, prob, top_p, -1) | _walked(faults, x, prob, 1.0, top_k)
        active = [top_p < 1, 0 < top_k < len(x)]
        if sum(active) == 1:
            chosen = _walked(faults, x, prob, top_p, top_k)
    else:
        chosen = _walked(faults, x, prob, top_p, top_k)
    return np.isin(np.arange(len(x)), list(chosen))


def prefix_with(faults: Faults) -> Callable[..., Tensor]:
    """The emulation with the signature of `keep_prefix`."""

    def keep_prefix(logits_tv: Tensor, probs_tv: Tensor, top_p_t: Tensor, top_k_t: Tensor) -> Tensor:
        parameters = list(zip(top_p_t.tolist(), top_k_t.tolist(), strict=True))
        if faults.first_parameters:
            parameters = parameters[:1] * len(parameters)
        rows = zip(logits_tv.numpy(), probs_tv.numpy(), parameters, strict=True)
        kept = [_prefix(faults, x, prob, *own) for x, prob, own in rows]
        return torch.from_numpy(np.array(kept, dtype=bool).reshape(tuple(logits_tv.shape)))

    return keep_prefix


def _softmax(faults: Faults, x: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities in fp32."""
    inverse = np.float32(1) / np.float32(temperature)
    log_base = np.float32(math.log(faults.base))
    with np.errstate(invalid="ignore"):
        scaled = np.where(np.isneginf(x), -np.inf, ((x - x.max()) * inverse).astype(np.float32)).astype(np.float32)
    terms = np.exp(scaled * log_base)
    if faults.total != "wide":
        terms = np.pad(terms if faults.total == "forwards" else terms[::-1], (0, -len(terms) % 128))
        terms = np.cumsum(terms.reshape(-1, 128), axis=0, dtype=np.float32)[-1]
    total = terms.sum(dtype=np.float64 if faults.total == "wide" else np.float32)
    return (scaled - np.float32(math.log(total, faults.base))).astype(np.float32)


def _fault_of(faults: Faults, x: np.ndarray, temperature: float, top_p: float, top_k: int) -> int:
    right = np.float32(temperature) >= np.float32(1e-5) and math.isfinite(temperature) and top_k != 0
    if faults.checked and not (right and 0 <= top_p <= 1):
        return PARAMETER
    if np.isnan(x).any() or np.isposinf(x).any():
        return INVALID
    return EMPTY if np.isneginf(x).all() else OK


def row_with(faults: Faults) -> Callable[..., tuple[Tensor, ...]]:
    """The emulation with the signature of `sample_logits`."""

    def sample_logits(
        logits_tv: Tensor,
        temperature_t: Tensor,
        top_p_t: Tensor,
        top_k_t: Tensor,
        seed_t: Tensor,
        subsequence_t: Tensor,
        *,
        draw: Any,
    ) -> tuple[Tensor, ...]:
        logprobs = np.full(tuple(logits_tv.shape), -np.inf, np.float32)
        found, streams = [], _streams(faults, seed_t, subsequence_t)
        parameters = zip(temperature_t.tolist(), top_p_t.tolist(), top_k_t.tolist(), strict=True)
        for row, (temperature, top_p, top_k) in enumerate(parameters):
            x = logits_tv[row].numpy().copy()
            if faults.nan == "zero":
                x[np.isnan(x)] = 0
            error = _fault_of(faults, x, temperature, top_p, top_k)
            if error == OK:
                if faults.temperature != "used":
                    first = float(temperature_t[0])
                    temperature = {"ignored": 1.0, "first": first, "late": temperature}[faults.temperature]
                logprobs[row], drawn = _row(faults, x, temperature, top_p, top_k)
                found.append(_token(faults, drawn, x, temperature, streams[row], draw.name == "ASCEND"))
            else:
                found.append((-1, error))
        token, error_t = _answer(faults, found)
        if faults.bad == "batch" and bool((error_t > 0).any()):
            logprobs[:] = -np.inf
        lp = torch.from_numpy(logprobs)
        return token, error_t, lp, torch.from_numpy(np.exp(logprobs * np.float32(math.log(faults.base))))

    return sample_logits


def _row(faults: Faults, x: np.ndarray, temperature: float, top_p: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities, and the weights that the token is drawn from."""
    lp = _softmax(faults, x, temperature)
    prob = np.exp(lp * np.float32(math.log(faults.base))).astype(np.float32)
    if top_p < 1 or 0 < top_k < len(x):
        seen = np.exp(_softmax(faults, x, 1.0)) if faults.temperature == "late" else prob
        kept = _prefix(faults, x, seen, top_p, top_k)
        mass = prob[kept].sum(dtype=np.float64) if faults.renormalise else 1.0
        with np.errstate(divide="ignore"):
            lp = np.where(kept, lp - np.float32(np.log(mass)), -np.inf).astype(np.float32)
    final = np.exp(lp * np.float32(math.log(faults.base))).astype(np.float32)
    return lp, prob if faults.draw == "unfiltered" else final


def _token(
    faults: Faults, prob: np.ndarray, x: np.ndarray, temperature: float, stream: Iterator[int], ascend: bool
) -> tuple[int, int]:
    if faults.greedy == "argmax" and temperature < 1.1e-5:
        return int(np.argmax(x)), OK
    if faults.draw == "gumbel":
        uniform = np.array([(next(stream) + 0.5) / WORD for _ in prob])
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(prob) - np.log(-np.log(uniform)))), OK
    return _pick(faults, prob, stream, ascend)


_RIGHT = Faults()
right_words = words_with(_RIGHT)
words_of_seven_rounds = words_with(replace(_RIGHT, rounds=7))
words_of_the_low_product = words_with(replace(_RIGHT, product="low"))
words_of_a_swapped_key = words_with(replace(_RIGHT, key="swapped"))
words_of_half_a_seed = words_with(replace(_RIGHT, key="half"))
words_without_a_seed = words_with(replace(_RIGHT, key="none"))
words_by_place_in_the_batch = words_with(replace(_RIGHT, place=True))
words_of_one_block = words_with(replace(_RIGHT, block="still"))
words_with_the_number_below = words_with(replace(_RIGHT, layout="below"))


def words_of_the_wide_function(seed_t: Tensor, subsequence_t: Tensor, *, count: int) -> Tensor:
    """numpy's Philox has 64-bit words."""
    streams = zip(seed_t.tolist(), subsequence_t.tolist(), strict=True)
    rows = [np.random.Philox(key=seed % 2**64, counter=number).random_raw(count) % WORD for seed, number in streams]
    return torch.from_numpy(np.array(rows, dtype=np.int64).reshape(len(seed_t), count))


def _uniforms(place: int, bits: int, offset: float) -> Callable[..., Tensor]:
    def uniforms(seed_t: Tensor, subsequence_t: Tensor) -> Tensor:
        word = right_words(seed_t, subsequence_t, count=place + 1).numpy()[:, place] >> (32 - bits)
        value = word.astype(np.float32) * np.float32(2.0**-bits) + np.float32(offset)
        return torch.from_numpy(value.astype(np.float32))

    return uniforms


right_uniforms = _uniforms(0, 32, 2.0**-33)
uniforms_from_zero = _uniforms(0, 32, 0.0)
uniforms_of_24_bits = _uniforms(0, 24, 2.0**-25)
uniforms_of_the_second_word = _uniforms(1, 32, 2.0**-33)


def _numbers(stride: int = 10000019, by_use: int = 1, early: int = 0) -> Callable[..., Tensor]:
    def subsequences(position_t: Tensor, row_t: Tensor, *, use: int) -> Tensor:
        pairs = zip(position_t.tolist(), row_t.tolist(), strict=True)
        numbers = [3 * (position - early + row * stride) + by_use * int(use) for position, row in pairs]
        return torch.tensor(numbers, dtype=torch.int64)

    return subsequences


right_numbers = _numbers()
numbers_without_the_row = _numbers(stride=0)
numbers_without_the_use = _numbers(by_use=0)
numbers_of_positions_one_early = _numbers(early=1)
numbers_by_a_small_stride = _numbers(stride=1)


def _seeds(rule: Callable[[int, int, int], int]) -> Callable[..., Tensor]:
    def sample_seeds(seed_b: Tensor, *, samples: int) -> Tensor:
        rows = [[rule(seed, i, b) % 2**64 for i in range(samples)] for b, seed in enumerate(seed_b.tolist())]
        bits = np.array(rows, dtype=np.uint64).reshape(len(seed_b), samples).view(np.int64)
        return torch.from_numpy(bits)

    return sample_seeds


STRIDE = 11400714819323198485
right_seeds = _seeds(lambda seed, i, b: seed + i * STRIDE)
seeds_all_the_same = _seeds(lambda seed, i, b: seed)
seeds_of_forty_two = _seeds(lambda seed, i, b: 42 + i * STRIDE)
seeds_by_the_worker = _seeds(lambda seed, i, b: seed + (i + b) * STRIDE)
seeds_one_apart = _seeds(lambda seed, i, b: seed + i)

right_draw = draw_with(_RIGHT)
draw_of_eight_words = draw_with(replace(_RIGHT, refusal="eight"))
draw_without_refusal = draw_with(replace(_RIGHT, refusal="none"))
draw_in_the_order_of_ids = draw_with(replace(_RIGHT, order="ids"))
draw_at_the_end_of_a_lane = draw_with(replace(_RIGHT, edge="at"))
draw_in_1024_lanes = draw_with(replace(_RIGHT, order="narrow"))
draw_by_rounded_weights = draw_with(replace(_RIGHT, weight="nearest"))
draw_by_a_float_uniform = draw_with(replace(_RIGHT, refusal="uniform"))
draw_by_place_in_the_batch = draw_with(replace(_RIGHT, place=True))
draw_of_the_first_seed = draw_with(replace(_RIGHT, first_seed=True))
draw_of_a_bad_batch = draw_with(replace(_RIGHT, bad="batch"))
draw_from_nothing = draw_with(replace(_RIGHT, empty="zero"))
draw_high_word_first = draw_with(replace(_RIGHT, high_first=True))
draw_on_the_other_platform = draw_with(replace(_RIGHT, platform="other"))

right_prefix = prefix_with(_RIGHT)
prefix_renormalised_between = prefix_with(replace(_RIGHT, filters="renormalised"))
prefix_stops_at_top_p = prefix_with(replace(_RIGHT, reach="before"))
prefix_with_all_ties = prefix_with(replace(_RIGHT, ties="all"))
prefix_with_higher_ties = prefix_with(replace(_RIGHT, ties="higher"))
prefix_with_zeros_by_sign = prefix_with(replace(_RIGHT, zeros="by_sign"))
prefix_by_float_sums = prefix_with(replace(_RIGHT, sums="float"))
prefix_one_short = prefix_with(replace(_RIGHT, reach="short"))
prefix_may_be_empty = prefix_with(replace(_RIGHT, least=0))
prefix_of_the_first_parameters = prefix_with(replace(_RIGHT, first_parameters=True))
prefix_of_the_union = prefix_with(replace(_RIGHT, filters="union"))

right_row = row_with(_RIGHT)
right_row_forwards = row_with(replace(_RIGHT, total="forwards"))
right_row_backwards = row_with(replace(_RIGHT, total="backwards"))
row_without_a_temperature = row_with(replace(_RIGHT, temperature="ignored"))
row_cooled_after_the_filters = row_with(replace(_RIGHT, temperature="late"))
row_in_base_two = row_with(replace(_RIGHT, base=2.0))
row_not_renormalised = row_with(replace(_RIGHT, renormalise=False))
row_greedy_by_argmax = row_with(replace(_RIGHT, greedy="argmax"))
row_with_the_first_temperature = row_with(replace(_RIGHT, temperature="first"))
row_with_the_first_seed = row_with(replace(_RIGHT, first_seed=True))
row_of_a_bad_batch = row_with(replace(_RIGHT, bad="batch"))
row_of_nan_as_zero = row_with(replace(_RIGHT, nan="zero"))
row_without_a_check = row_with(replace(_RIGHT, checked=False))
row_by_gumbel = row_with(replace(_RIGHT, draw="gumbel"))
row_of_unfiltered_words = row_with(replace(_RIGHT, draw="unfiltered"))


def _argmax(
    last: bool = False, nan: bool = False, empty: bool = False, by_sign: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    def argmax_tokens(logits_tv: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for x in logits_tv.numpy():
            error = _fault_of(_RIGHT, x, 1.0, 1.0, 1)
            if nan and np.isnan(x).any():
                found.append((int(np.isnan(x).argmax()), OK))
            elif error == EMPTY and empty:
                found.append((0, OK))
            elif error:
                found.append((-1, error))
            else:
                best = np.flatnonzero(x == x.max())
                if by_sign and x.max() == 0 and not np.signbit(x[best]).all():
                    best = best[~np.signbit(x[best])]
                found.append((int(best[-1 if last else 0]), OK))
        return _answer(_RIGHT, found)

    return argmax_tokens


right_argmax = _argmax()
argmax_takes_the_last = _argmax(last=True)
argmax_takes_nan = _argmax(nan=True)
argmax_of_an_empty_row = _argmax(empty=True)
argmax_orders_zeros = _argmax(by_sign=True)


def _mask(
    value: float = -math.inf, upper: bool = False, first: bool = False, every_end: bool = False, list_too: bool = True
) -> Callable[..., Tensor]:
    def mask_logits(
        logits_tv: Tensor, banned_v: Tensor | None, no_eos_t: Tensor | None, allowed_ti: Tensor | None, *, eos: int
    ) -> Tensor:
        x = logits_tv.numpy().copy()
        for row in range(len(x)):
            words = None if allowed_ti is None else allowed_ti.numpy()[0 if first else row].view(np.uint32).tolist()
            ending = False
            if no_eos_t is not None:
                ending = bool(no_eos_t.any()) if every_end else bool(no_eos_t[row])
            for column in range(x.shape[1]):
                place = 31 - column % 32 if upper else column % 32
                forbidden = words is not None and not words[column // 32] >> place & 1
                listed = banned_v is not None and bool(banned_v[column]) and (list_too or words is None)
                if forbidden or listed or (ending and column == eos):
                    x[row, column] = value
        return torch.from_numpy(x)

    return mask_logits


right_mask = _mask()
mask_of_large_numbers = _mask(value=-1e9)
mask_from_the_upper_bit = _mask(upper=True)
mask_of_the_first_row = _mask(first=True)
mask_of_every_end = _mask(every_end=True)
mask_without_a_blacklist = _mask(list_too=False)


def _ranked(
    by_id: bool = False, from_above: bool = False, by_sign: bool = False, filler: int = -1
) -> Callable[..., tuple[Tensor, Tensor]]:
    def ranked(values_tv: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
        t, v = values_tv.shape
        value, place = np.full((t, k), -np.inf, np.float32), np.full((t, k), filler, np.int64)
        for row, x in enumerate(values_tv.numpy()):
            sign = np.signbit(x) & (x == 0) if by_sign else np.zeros(v, bool)
            ids = sorted(range(v), key=lambda c: (-x[c], sign[c], -c if from_above else c))[:k]
            ids = sorted(ids) if by_id else ids
            place[row, : len(ids)], value[row, : len(ids)] = ids, x[ids]
        return torch.from_numpy(value), torch.from_numpy(place)

    return ranked


right_ranking = _ranked()
ranked_by_id = _ranked(by_id=True)
ranked_ties_from_above = _ranked(from_above=True)
ranked_zeros_by_sign = _ranked(by_sign=True)
ranked_filled_with_zeros = _ranked(filler=0)


def _mass(
    itself: bool = True, all_ties: bool = False, none: bool = True, larger: bool = False
) -> Callable[..., Tensor]:
    def smaller_mass(logprobs_tv: Tensor, token_t: Tensor) -> Tensor:
        found = []
        for lp, token in zip(logprobs_tv.numpy(), token_t.tolist(), strict=True):
            if token < 0 and none:
                found.append(0.0)
                continue
            ids = np.arange(len(lp))
            own = lp[token]
            tied = (lp == own) & (all_ties | (ids <= token % len(lp)))
            counted = (lp > own if larger else lp < own) | tied
            if not itself:
                counted &= ids != token
            found.append(float(np.exp(lp[counted].astype(np.float64)).sum()))
        return torch.tensor(found, dtype=torch.float32)

    return smaller_mass


right_mass = _mass()
smaller_without_itself = _mass(itself=False)
smaller_with_all_ties = _mass(all_ties=True)
smaller_of_no_token = _mass(none=False)
smaller_is_larger = _mass(larger=True)
