"""The integer part of the n-gram memory by other means than the reference, with faults that can be switched on.

Classes by sorting keys, windows token by token in Python, hashes in numpy, rows by their bytes. The arithmetic part,
projection, gate and layer, stands in `engram_mix.py`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import EngramLayout, OutsideVocabulary

# classes


@dataclass(frozen=True, kw_only=True)
class VocabularyFaults:
    """What the class map does wrong; the default is right."""

    marks: str = "M"  # general category whose characters are removed
    sentinel: bool = True
    empty_key: str = "text"  # text, shared
    undecodable: str = "piece"  # piece, text
    form: Literal["NFC", "NFKC"] = "NFKC"
    case: str = "letters"  # letters, words, kept
    runs: bool = True
    numbering: str = "seen"  # seen, sorted
    cleaned: bool = False


def classes_with(faults: VocabularyFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `compress_vocabulary`."""

    def folded(text: str) -> str:
        text = unicodedata.normalize("NFD", unicodedata.normalize(faults.form, text))
        kept = [c for c in text if not unicodedata.category(c).startswith(faults.marks)]
        if faults.case == "letters":
            kept = [c.lower() for c in kept]
        text = "".join(kept)
        if faults.case == "words":
            text = text.lower()
        if faults.runs:
            parts = ["".join(" " if c in " \t\r\n" else c for c in text)]
            while "  " in parts[-1]:
                parts.append(parts[-1].replace("  ", " "))
            text = parts[-1]
        if text == " " and faults.sentinel:
            return text
        # str.isspace calls the separators U+001C to U+001F white space, Unicode does not
        while text and text[0].isspace() and not "\x1c" <= text[0] <= "\x1f":
            text = text[1:]
        while text and text[-1].isspace() and not "\x1c" <= text[-1] <= "\x1f":
            text = text[:-1]
        return text.replace("\ue000", " ")

    def compress_vocabulary(texts: list[str], pieces: list[str]) -> Tensor:
        keys = []
        for text, piece in zip(texts, pieces, strict=True):
            if "\ufffd" in text and faults.undecodable == "piece":
                keys.append(piece)
                continue
            normal = folded(text.strip(" ") if faults.cleaned else text)
            keys.append(normal or ("" if faults.empty_key == "shared" else text))
        _, first, inverse = np.unique(np.array(keys, dtype=object), return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first)) if faults.numbering == "seen" else np.arange(len(first))
        return torch.from_numpy(rank[inverse.reshape(-1)].astype(np.int32))

    return compress_vocabulary


_CLASSES = VocabularyFaults()
right_classes = classes_with(_CLASSES)
nonspacing_marks_only = classes_with(replace(_CLASSES, marks="Mn"))
lone_space_is_stripped = classes_with(replace(_CLASSES, sentinel=False))
empty_is_one_class = classes_with(replace(_CLASSES, empty_key="shared"))
undecodable_by_text = classes_with(replace(_CLASSES, undecodable="text"))
no_compatibility_forms = classes_with(replace(_CLASSES, form="NFC"))
case_kept = classes_with(replace(_CLASSES, case="kept"))
final_sigma = classes_with(replace(_CLASSES, case="words"))
white_space_runs_kept = classes_with(replace(_CLASSES, runs=False))
classes_sorted = classes_with(replace(_CLASSES, numbering="sorted"))
text_cleaned_up = classes_with(replace(_CLASSES, cleaned=True))


# windows


@dataclass(frozen=True, kw_only=True)
class WindowFaults:
    """What the windows do wrong; the default is right."""

    negative: str = "image"  # image, from_end
    image: str = "latches"  # latches, one_place, skipped
    image_kept_as: int | None = None  # class that an image token leaves in the history
    swapped: bool = False
    pad: str = "given"  # given, class_1
    special: bool = False  # ids 0 and 1 end a window
    history: str = "own"  # own, mates, ignored, first, reversed
    kept: str = "asked"  # asked, all, one_more
    latched_history: bool = False
    order: str = "backwards"  # backwards, forwards
    counter: bool = False


_calls = 0


def window_with(faults: WindowFaults) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The emulation with the signature of `engram_window`."""

    def past_of(request: int, history: list[list[int]], before: list[int], pad: int) -> list[int]:
        width = len(history[request])
        if faults.history == "ignored":
            return [pad] * width
        if faults.history == "first":
            return history[0]
        if faults.history == "reversed":
            return history[request][::-1]
        if faults.history == "mates" and request:
            return [*history[request], *before][-width:]
        return history[request]

    def window_of(stream: list[int], end: int, places: int, pad: int) -> list[int]:
        found: list[int] = []
        place = end
        broken = False
        while len(found) < places and place >= 0:
            token = stream[place]
            place -= 1
            if token == -1 and faults.image == "skipped" and found:
                continue
            broken = token == -1 or (broken and faults.image == "latches")
            found.append(pad if broken else token)
        found += [pad] * (places - len(found))
        return found[::-1] if faults.order == "forwards" else found

    def engram_window(
        ids_t: Tensor,
        image_t: Tensor,
        bounds_j: Tensor,
        kept_b: Tensor,
        history_bi: Tensor,
        class_v: Tensor,
        *,
        pad_class: int,
        outside: OutsideVocabulary,
    ) -> tuple[Tensor, Tensor, Tensor]:
        global _calls
        _calls += 1
        table, history, width = class_v.tolist(), history_bi.tolist(), history_bi.shape[1]
        if faults.swapped:
            table[7], table[8], table[270], table[271] = table[8], table[7], table[271], table[270]
        pad = 1 if faults.pad == "class_1" else pad_class
        classes, images = [], []
        for token, image in zip(ids_t.tolist(), image_t.tolist(), strict=True):
            low = -len(table) if faults.negative == "from_end" else 0
            known = not image and low <= token < len(table)
            images.append(not known)
            classes.append(table[token] if known else -1)
            if faults.special and known and token in (0, 1):
                classes[-1] = -1
        windows, nexts = [], []
        for b, start in enumerate(bounds_j[:-1].tolist()):
            end = int(bounds_j[b + 1])
            past = past_of(b, history, classes[:start], pad)
            if faults.counter and _calls % 2 == 0:
                past = [pad] * width
            stream = [*past, *classes[start:end]]
            windows += [window_of(stream, width + i, width + 1, pad) for i in range(end - start)]
            stays = {"asked": int(kept_b[b]), "all": end - start}.get(faults.kept, min(int(kept_b[b]) + 1, end - start))
            kept = [*history[b], *classes[start:end]][stays : stays + width]
            if faults.image_kept_as is not None:
                kept = [faults.image_kept_as if c == -1 else c for c in kept]
            if faults.latched_history and -1 in kept:
                last = len(kept) - 1 - kept[::-1].index(-1)
                kept = [pad] * last + kept[last:]
            nexts.append(kept)
        shape = (len(windows), width + 1)
        return (
            torch.tensor(windows, dtype=torch.int32).reshape(shape),
            torch.tensor(images, dtype=torch.bool),
            torch.tensor(nexts, dtype=torch.int32).reshape(history_bi.shape),
        )

    return engram_window


_WINDOW = WindowFaults()
right_window = window_with(_WINDOW)
negative_id_from_the_end = window_with(replace(_WINDOW, negative="from_end"))
image_does_not_break = window_with(replace(_WINDOW, image="skipped"))
image_breaks_one_place = window_with(replace(_WINDOW, image="one_place"))
image_history_forgotten = window_with(replace(_WINDOW, image_kept_as=2))
map_of_another_revision = window_with(replace(_WINDOW, swapped=True))
pad_is_end_of_sequence = window_with(replace(_WINDOW, pad="class_1"))
special_tokens_break = window_with(replace(_WINDOW, special=True))
windows_cross_requests = window_with(replace(_WINDOW, history="mates"))
history_ignored = window_with(replace(_WINDOW, history="ignored"))
history_of_first_request = window_with(replace(_WINDOW, history="first"))
history_newest_first = window_with(replace(_WINDOW, history="reversed"))
rejected_drafts_stay = window_with(replace(_WINDOW, kept="all"))
one_draft_too_many = window_with(replace(_WINDOW, kept="one_more"))
history_latched = window_with(replace(_WINDOW, latched_history=True))
oldest_first = window_with(replace(_WINDOW, order="forwards"))
second_call_differs = window_with(replace(_WINDOW, counter=True))


# hashes


@dataclass(frozen=True, kw_only=True)
class HashFaults:
    """What the hash does wrong; the default is right."""

    bits: int = 64
    mix: str = "xor"  # xor, sum, last
    multipliers: str = "own"  # own, first_layer, even
    primes: str = "own"  # own, first_head, first_layer
    offsets: str = "exclusive"  # exclusive, missing, inclusive
    columns: str = "by_n"  # by_n, by_head
    window: str = "backwards"  # backwards, forwards
    images: str = "nothing"  # nothing, hashed
    lazy: bool = False


def hash_with(faults: HashFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `engram_hash`."""
    bound: list[bool] = []

    def engram_hash(window_tw: Tensor, image_t: Tensor, *, layout: EngramLayout) -> Tensor:
        window = window_tw.numpy().astype(np.int64)
        if faults.window == "forwards":
            window = window[:, ::-1]
        layers = []
        for index in range(len(layout.primes)):
            primes = layout.primes[0 if faults.primes == "first_layer" else index]
            sizes = np.array(primes, dtype=np.int64).reshape(-1, layout.num_heads)
            if faults.primes == "first_head":
                sizes = np.repeat(sizes[:, :1], layout.num_heads, axis=1)
            factors = np.array(layout.multipliers[0 if faults.multipliers == "first_layer" else index], dtype=np.int64)
            if faults.multipliers == "even":
                factors = factors - 1
            product = window * factors
            if faults.bits == 32:
                product = product.astype(np.int32).astype(np.int64) & 0x7FFFFFFF
            rows = []
            for n, size in enumerate(sizes, start=2):
                terms = product[:, :n]
                if faults.mix == "last":
                    mixed = terms[:, -1]
                else:
                    mixed = np.bitwise_xor.reduce(terms, axis=1) if faults.mix == "xor" else terms.sum(1) & (2**63 - 1)
                rows.append(mixed[:, None] % size)
            whole = np.concatenate(rows, axis=1)
            ends = np.cumsum(layout.primes[index])
            starts = {"missing": ends * 0, "inclusive": ends}.get(faults.offsets, ends - np.array(layout.primes[index]))
            whole = whole + starts
            if faults.columns == "by_head":
                whole = whole.reshape(len(whole), -1, layout.num_heads).swapaxes(1, 2).reshape(whole.shape)
            if faults.images == "nothing":
                whole[image_t.numpy()] = -1
            layers.append(whole)
        if faults.lazy and not bound:
            bound.append(True)
            layers = layers[:0]
        columns = len(layout.primes[0])
        return torch.from_numpy(np.array(layers, dtype=np.int32).reshape(len(layers), len(window), columns))

    return engram_hash


_HASH = HashFaults()
right_hash = hash_with(_HASH)
products_of_32_bits = hash_with(replace(_HASH, bits=32))
sum_instead_of_xor = hash_with(replace(_HASH, mix="sum"))
last_product_only = hash_with(replace(_HASH, mix="last"))
layers_share_multipliers = hash_with(replace(_HASH, multipliers="first_layer"))
multipliers_even = hash_with(replace(_HASH, multipliers="even"))
heads_share_a_prime = hash_with(replace(_HASH, primes="first_head"))
layers_share_primes = hash_with(replace(_HASH, primes="first_layer"))
offsets_missing = hash_with(replace(_HASH, offsets="missing"))
offsets_inclusive = hash_with(replace(_HASH, offsets="inclusive"))
columns_by_head = hash_with(replace(_HASH, columns="by_head"))
window_backwards = hash_with(replace(_HASH, window="forwards"))
image_rows_hashed = hash_with(replace(_HASH, images="hashed"))
no_layers_at_first = hash_with(replace(_HASH, lazy=True))


# looked-up rows


@dataclass(frozen=True, kw_only=True)
class RowFaults:
    """What a look-up does wrong; the default is right."""

    hole: str = "empty"  # empty, last_row, row_0, unwritten
    group_shift: int = 0
    scales: str = "own"  # own, first_token
    lost: int = 0  # channels at the end of a row
    columns: str = "side_by_side"  # side_by_side, interleaved


def _bytes_of(faults: RowFaults, table_rd: Tensor, table_sf_rg: Tensor, row_tz: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales as bytes [t, z d] and [t, z d / 32]."""
    codes, scales = table_rd.view(torch.uint8).numpy(), table_sf_rg.numpy()
    rows, dim = row_tz.numpy().astype(np.int64), codes.shape[1]
    hole = rows < 0
    source = rows if faults.hole == "last_row" else np.where(hole, 0, rows)
    picked, factors = codes[source], scales[source]
    if faults.hole in ("empty", "unwritten"):
        picked = np.where(hole[..., None], 0 if faults.hole == "empty" else 0xFF, picked)
        factors = np.where(hole[..., None], 127 if faults.hole == "empty" else 0xFF, factors)
    factors = np.roll(factors, faults.group_shift, axis=-1)
    if faults.scales == "first_token":
        factors = np.repeat(factors[:1], len(factors), axis=0)
    if faults.lost:
        picked = picked.copy()
        picked[..., dim - faults.lost :] = 0
    if faults.columns == "interleaved":
        picked, factors = picked.swapaxes(1, 2), factors.swapaxes(1, 2)
    shape = (len(rows), -1) if len(rows) else (0, rows.shape[1] * dim)
    sf_shape = (len(rows), -1) if len(rows) else (0, rows.shape[1] * scales.shape[1])
    whole = np.ascontiguousarray(picked.reshape(shape).astype(np.uint8))
    return torch.from_numpy(whole), torch.from_numpy(np.ascontiguousarray(factors.reshape(sf_shape).astype(np.uint8)))


def lookup_with(faults: RowFaults) -> Callable[..., tuple[Tensor, Tensor]]:
    """The emulation with the signature of `engram_lookup`."""

    def engram_lookup(table_rd: Tensor, table_sf_rg: Tensor, row_tz: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = _bytes_of(faults, table_rd, table_sf_rg, row_tz)
        return codes.view(torch.float8_e4m3fn), scales

    return engram_lookup


@dataclass(frozen=True, kw_only=True)
class ValueFaults:
    """How bytes become wrong values; the default is right."""

    subnormal: str = "kept"  # kept, lost, doubled
    bias: int = 127
    half: bool = False
    divided: bool = False
    zero_sign: bool = True


def values_of(faults: ValueFaults, codes: Tensor, scales: Tensor) -> Tensor:
    """fp64 values of code bytes [t, m] under scale bytes [t, m / 32]."""
    byte = codes.numpy().astype(np.int64)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    if faults.subnormal == "lost":
        value = np.where(exponent == 0, 0.0, value)
    elif faults.subnormal == "doubled":
        value = np.where(exponent == 0, value / 2, value)
    value = np.where((byte & 127) == 127, np.nan, value) * np.where(byte & 128, -1.0, 1.0)
    if not faults.zero_sign:
        value = np.where(value == 0, 0.0, value)
    factor = np.repeat(2.0 ** (scales.numpy().astype(np.float64) - faults.bias), 32, axis=-1)
    whole = value * factor
    if faults.half:
        with np.errstate(over="ignore"):
            whole = whole.astype(np.float16).astype(np.float64)
    if faults.divided:
        largest = np.abs(whole).max(-1, keepdims=True, initial=0.0)
        with np.errstate(invalid="ignore"):
            whole = whole / largest * largest
    return torch.from_numpy(whole)


def embed_with(rows: RowFaults, values: ValueFaults) -> Callable[..., Tensor]:
    """The emulation with the signature of `engram_embed`."""

    def engram_embed(table_rd: Tensor, table_sf_rg: Tensor, row_tz: Tensor, *, dtype: torch.dtype) -> Tensor:
        codes, scales = _bytes_of(rows, table_rd, table_sf_rg, row_tz)
        return values_of(values, codes, scales).float().to(dtype)

    return engram_embed


_ROWS, _VALUES = RowFaults(), ValueFaults()
right_lookup = lookup_with(_ROWS)
lookup_hole_wraps_to_last_row = lookup_with(replace(_ROWS, hole="last_row"))
lookup_hole_reads_row_0 = lookup_with(replace(_ROWS, hole="row_0"))
lookup_hole_unwritten = lookup_with(replace(_ROWS, hole="unwritten"))
lookup_scale_of_next_group = lookup_with(replace(_ROWS, group_shift=1))
lookup_scales_of_first_token = lookup_with(replace(_ROWS, scales="first_token"))
lookup_last_group_lost = lookup_with(replace(_ROWS, lost=32))
lookup_columns_interleaved = lookup_with(replace(_ROWS, columns="interleaved"))

right_embed = embed_with(_ROWS, _VALUES)
embed_hole_wraps_to_last_row = embed_with(replace(_ROWS, hole="last_row"), _VALUES)
embed_hole_reads_row_0 = embed_with(replace(_ROWS, hole="row_0"), _VALUES)
embed_hole_unwritten = embed_with(replace(_ROWS, hole="unwritten"), _VALUES)
embed_scale_of_next_group = embed_with(replace(_ROWS, group_shift=1), _VALUES)
embed_scales_of_first_token = embed_with(replace(_ROWS, scales="first_token"), _VALUES)
embed_last_group_lost = embed_with(replace(_ROWS, lost=32), _VALUES)
embed_columns_interleaved = embed_with(replace(_ROWS, columns="interleaved"), _VALUES)
subnormal_codes_lost = embed_with(_ROWS, replace(_VALUES, subnormal="lost"))
subnormal_codes_doubled = embed_with(_ROWS, replace(_VALUES, subnormal="doubled"))
scale_off_by_one = embed_with(_ROWS, replace(_VALUES, bias=128))
through_half = embed_with(_ROWS, replace(_VALUES, half=True))
divided_by_largest = embed_with(_ROWS, replace(_VALUES, divided=True))
sign_of_zero_lost = embed_with(_ROWS, replace(_VALUES, zero_sign=False))
