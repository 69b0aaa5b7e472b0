"""How the n-gram memory is checked: classes, windows, hashes, looked-up bytes, projection, gate, the whole layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import ENGRAM_TINY, ENGRAM_V41, EngramLayout, OutsideVocabulary
from deeptwin.reference.engram_vocab import compress_vocabulary, hash_layout
from deeptwin.reference.weights import EngramWeights

from .. import draws, texts
from ..builds.ascend_presets import MATRIX, VECTOR
from ..builds.presets import NO_PRODUCT, PRODUCT
from ..builds.spec import BuildCase
from ..card import (
    REGIMES,
    Candidate,
    Card,
    Equivalent,
    Inputs,
    Op,
    Output,
    Outputs,
    Peer,
    Relation,
    Sm90Candidate,
    variants,
)
from ..relations import Context, Variant, batch_invariant, row_chunks
from ..rules import Bitwise, Budget, OneRounding

_mutant, _control = variants("engram")
PAD_ID = ENGRAM_V41.pad_id
EXACT = Bitwise()


_mix_mutant, _mix_control = variants("engram_mix")


def _unique(found: list[Any]) -> list[Any]:
    return list({case.id: case for case in found}.values())


@cache
def class_map() -> Tensor:
    """The classes of the V4 vocabulary."""
    return compress_vocabulary(*texts.vocabulary())


@cache
def layout(name: str) -> EngramLayout:
    """Hash constants of the released model, of the reduced one, or of three layers with 5-grams."""
    odd = replace(ENGRAM_TINY, layer_ids=(0, 3, 7), max_ngram=5, num_heads=3, num_classes=700)
    return hash_layout({"v41": ENGRAM_V41, "tiny": ENGRAM_TINY, "odd": odd}[name])


# classes of a vocabulary


@dataclass(frozen=True, kw_only=True)
class VocabularyCase:
    """A list of tokens: awkward ones by hand, drawn ones, or the real vocabulary."""

    tokens: int
    regime: str  # awkward, drawn, real

    @property
    def id(self) -> str:
        return f"t{self.tokens}-{self.regime}"

    @property
    def needs(self) -> tuple[str, ...]:
        return texts.NEEDS if self.regime == "real" else ()


AWKWARD = (
    *(
        "",
        " ",
        "  ",
        "\t",
        "\n",
        " \r\n ",
        "é",
        "É",
        "e",
        "e\u0301",
        "Ａ",
        "a",
        " a",
        "a ",
        " A ",
        "a b",
        "a  b",
        "a\tb",
    ),
    *("\u0301", "\u0301\u0301", "\u20dd", "का", "क", "ﬁ", "fi", "²", "2", "İ", "i", "i\u0307", "ß", "ss", "ẞ", "ΟΔΟΣ"),
    *("οδος", "οδοσ", "K", "k", "Å", "\u00a0", "\u3000", "\u2003a", "\u200ba", "\x1c", "\x1ca", "\x85", "½", "1⁄2"),
    *("\ue000", " \ue000", "\ufffd", "\ufffdx", "가", "가", "<｜▁pad▁｜>", "the", " the", " The", "THE", "\u0130"),
)
ALPHABET = "aAbBéÉñÑçßΣσςΩøŁłĐıİﬁ²Ａｂカガｶﾞपिक्ษำقَ가각 \t\n\u00a0\u0301\u0323\u20dd\u200d-_'<｜▁>0０①"


def draw_vocabulary(case: VocabularyCase, rng: np.random.Generator) -> Inputs:
    """Texts, and pieces that are all different."""
    if case.regime == "real":
        found, pieces = texts.vocabulary()
        step = len(found) // case.tokens
        return {"texts": found[::step], "pieces": pieces[::step]}
    if case.regime == "awkward":
        found = list(AWKWARD)
    else:
        letters = list(ALPHABET)
        found = ["".join(rng.choice(letters, int(rng.integers(0, 5)))) for _ in range(case.tokens)]
    return {"texts": found, "pieces": [f"piece {i // 2}" for i in range(len(found))]}


def cases_vocabulary(full: bool) -> list[VocabularyCase]:
    """By hand, drawn, a part of the real vocabulary; the whole of it when full."""
    found = [VocabularyCase(tokens=len(AWKWARD), regime="awkward"), VocabularyCase(tokens=3000, regime="drawn")]
    return [*found, VocabularyCase(tokens=129_280 if full else 9944, regime="real")]


CLASSES = Op(
    name="engram_classes",
    reference="deeptwin.reference.engram_vocab:compress_vocabulary",
    outputs=(Output(name="class_v", rule=EXACT, dtype=torch.int32),),
    cases=cases_vocabulary,
    draw=draw_vocabulary,
    rows={},
    out_rows={},
    peers=(
        Peer(
            name="tokenizers",
            function="deeptwin.parity.peers.engram:tokenizers_classes",
            needs=("tokenizers",),
            explains="the normalisers of the tokenizers library, which the release itself uses",
        ),
    ),
    mutants=(
        _mutant("nonspacing_marks_only", "U42", "only category Mn is removed, not Mc and Me"),
        _mutant("lone_space_is_stripped", "U42", "no sentinel: a token of white space goes by its own text"),
        _mutant("empty_is_one_class", "U42", "tokens without a normal form share the empty key"),
        _mutant("undecodable_by_text", "U42", "pieces that are no whole characters share U+FFFD"),
        _mutant("no_compatibility_forms", "U42", "canonical instead of compatibility decomposition"),
        _mutant("case_kept", "U42", "no lower case"),
        _mutant("final_sigma", "U42", "lower case by words, with a final form of sigma"),
        _mutant("white_space_runs_kept", "U42", "runs of white space are not one space"),
        _mutant("classes_sorted", "U41", "classes in alphabetical order instead of first seen"),
        _mutant("text_cleaned_up", "U42", "the decoder strips white space before"),
    ),
    controls=(_control("right_classes"),),
)


# windows


@dataclass(frozen=True, kw_only=True)
class WindowCase:
    """Requests of the given lengths, of which `kept` tokens stay; `text` takes real ids and the real class map."""

    lengths: tuple[int, ...]
    kept: str = "all"  # all, some
    history: str = "pad"  # pad, classes, images
    images: str = "none"  # none, some, many
    outside: str = "image"
    places: int = 4
    text: str = ""
    regime: str = "normal"

    @property
    def id(self) -> str:
        sizes = "_".join(map(str, self.lengths)) or "none"
        text = f"-{self.text}" if self.text else ""
        return f"b{sizes}-w{self.places}-kept_{self.kept}-past_{self.history}-images_{self.images}-{self.outside}{text}"

    @property
    def needs(self) -> tuple[str, ...]:
        return texts.NEEDS if self.text else ()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def draw_window(case: WindowCase, rng: np.random.Generator) -> Inputs:
    """Packed token ids; ids of image tokens, and with `image` some others, are nowhere in the vocabulary."""
    t, b = case.tokens, len(case.lengths)
    classes = class_map() if case.text else torch.from_numpy(rng.integers(0, 300, 500).astype(np.int32))
    if not case.text:
        classes[:4] = torch.arange(4, dtype=torch.int32)
    ids = np.resize(texts.token_ids(case.text), t) if case.text else rng.integers(0, 500, t)
    share = {"none": 0.0, "some": 0.1, "many": 0.5}[case.images]
    image = rng.random(t) < share
    strange = image if case.outside == "refuse" else image | (rng.random(t) < share / 2)
    bad = np.array([*draws.BAD_INDICES, classes.numel(), classes.numel() + 2])
    ids = np.where(strange, rng.choice(bad, t), ids)
    if case.images != "none" and t:
        ids[image & (rng.random(t) < 0.3)] = 7  # an image token may carry any id
    history = np.full((b, case.places - 1), int(classes[PAD_ID]))
    if case.history != "pad":
        history = rng.integers(0, 300, history.shape)
    if case.history == "images":
        history[rng.random(history.shape) < 0.4] = -1
    kept = np.array(case.lengths, dtype=np.int32)
    if case.kept == "some":
        kept = np.array([int(rng.integers(0, n + 1)) for n in case.lengths], dtype=np.int32)
    return {
        "ids_t": torch.from_numpy(ids.astype(np.int32)),
        "image_t": torch.from_numpy(image),
        "bounds_j": torch.from_numpy(np.cumsum([0, *case.lengths]).astype(np.int32)),
        "kept_b": torch.from_numpy(kept),
        "history_bi": torch.from_numpy(history.astype(np.int32)),
        "class_v": classes,
        "pad_class": int(classes[PAD_ID]),
        "outside": OutsideVocabulary(case.outside),
    }


DECODE = WindowCase(lengths=(4, 4, 1, 4, 0, 2), kept="some", history="images", images="some")


def cases_window(full: bool) -> list[WindowCase]:
    """Prompts, chunks that follow a history, verification steps, empty requests, nothing at all, real text."""
    found = [
        WindowCase(lengths=(9,)),
        WindowCase(lengths=(1,)),
        WindowCase(lengths=(5, 0, 70, 3, 1), images="some"),
        WindowCase(lengths=(7, 4), images="many", history="images"),
        WindowCase(lengths=(6, 30), history="classes", outside="refuse", images="some"),
        WindowCase(lengths=(2,) * 70, history="classes", kept="some"),
        DECODE,
        WindowCase(lengths=(3, 12, 1), places=2, history="images", images="some", kept="some"),
        WindowCase(lengths=(3, 12, 1), places=5, history="images", images="some", kept="some"),
        WindowCase(lengths=()),
        WindowCase(lengths=(0, 0), history="images"),
        WindowCase(lengths=(37, 24), text="mixed", outside="refuse"),
        WindowCase(lengths=(64,), text="chinese", images="some", history="pad"),
    ]
    if full:
        found += [
            WindowCase(lengths=lengths, kept=kept, history=history, images=images)
            for lengths, kept, history, images in product(
                ((1, 2, 3, 4, 5), (64, 65), (128, 0, 129)), ("all", "some"), ("pad", "images"), ("many",)
            )
        ]
    return _unique(found)


def _lengths(inputs: Inputs) -> list[int]:
    return [int(n) for n in inputs["bounds_j"].diff()]


def _requests(inputs: Inputs, order: list[int]) -> tuple[Inputs, Tensor]:
    """The chosen requests in that order, and where their tokens stood."""
    starts, lengths = inputs["bounds_j"].tolist(), _lengths(inputs)
    places = torch.tensor([i for b in order for i in range(starts[b], starts[b] + lengths[b])], dtype=torch.int64)
    bounds = torch.tensor(np.cumsum([0, *(lengths[b] for b in order)]), dtype=torch.int32)
    index = torch.tensor(order, dtype=torch.int64)
    chosen = {name: inputs[name][places] for name in ("ids_t", "image_t")} | {"bounds_j": bounds}
    chosen |= {name: inputs[name][index] for name in ("kept_b", "history_bi")}
    return inputs | chosen, places


def whole_requests(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Requests alone, in other orders, and repeated."""
    count = inputs["kept_b"].numel()
    if not count:
        yield Variant(label="repeat of no request", calls=(inputs,))
        return
    orders = [[b] for b in range(min(count, 4))] + [[int(b) for b in context.rng.permutation(count)]]
    for order in [*orders, [count - 1, 0, count - 1]]:
        chosen, places = _requests(inputs, order)
        index = torch.tensor(order, dtype=torch.int64)

        def expect(outputs: Outputs, places: Tensor = places, index: Tensor = index) -> Outputs:
            at = {"window_tw": places, "images_t": places, "next_bi": index}
            return {name: x[at[name].to(x.device)] for name, x in outputs.items()}

        yield Variant(label=f"requests {order[:8]}", calls=(chosen,), expect=expect)


def _after(history: list[int], inputs: Inputs, ids: list[int], images: list[bool]) -> list[int]:
    """What is kept after these tokens, worked out here: the last classes, -1 for image tokens."""
    table = inputs["class_v"].tolist()
    found = [-1 if image or not 0 <= i < len(table) else table[i] for i, image in zip(ids, images, strict=True)]
    return (history + found)[len(found) :]


def token_chunks(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The tokens of every request in chunks, each call with the history that the one before left."""
    if not inputs["ids_t"].numel():
        yield Variant(label="repeat of no token", calls=(inputs,))
        return
    longest = max(_lengths(inputs))
    for size in sorted({1, 2, 3, (longest + 1) // 2} if context.full else {3, (longest + 1) // 2}):
        yield _in_chunks(inputs, size, f"chunks of {size}", drafts=0)


def drafted_steps(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Decoding one token a step, each step with three drafts that are rejected."""
    if not inputs["ids_t"].numel():
        yield Variant(label="repeat of no token", calls=(inputs,))
        return
    yield _in_chunks(inputs, 1, "one token a step and three rejected drafts", drafts=3)
    yield _in_chunks(inputs, 2, "two tokens a step and a rejected draft", drafts=1)


def _in_chunks(inputs: Inputs, size: int, label: str, *, drafts: int) -> Variant:
    starts, lengths = inputs["bounds_j"].tolist(), _lengths(inputs)
    ids, images = inputs["ids_t"].tolist(), inputs["image_t"].tolist()
    history = inputs["history_bi"].tolist()
    calls, places = [], []
    for begin in range(0, max(lengths), size):
        taken = [range(s + min(begin, n), s + min(begin + size, n)) for s, n in zip(starts[:-1], lengths, strict=True)]
        packed = [[ids[i] for i in part] + [5] * drafts for part in taken]
        masks = [[images[i] for i in part] + [False] * drafts for part in taken]
        calls.append(
            inputs
            | {
                "ids_t": torch.tensor(sum(packed, []), dtype=torch.int32),
                "image_t": torch.tensor(sum(masks, []), dtype=torch.bool),
                "bounds_j": torch.tensor(np.cumsum([0, *map(len, packed)]), dtype=torch.int32),
                "kept_b": torch.tensor([len(part) for part in taken], dtype=torch.int32),
                "history_bi": torch.tensor(history, dtype=torch.int32),
            }
        )
        places.append([i for part in taken for i in [*part, *[-1] * drafts]])
        history = [
            _after(old, inputs, [ids[i] for i in part], [images[i] for i in part])
            for old, part in zip(history, taken, strict=True)
        ]
    where = torch.tensor(sum(places, []), dtype=torch.int64)

    def join(results: list[Outputs]) -> Outputs:
        joined = {}
        for name in ("window_tw", "images_t"):
            rows = torch.cat([r[name] for r in results])
            joined[name] = torch.empty_like(rows[: len(ids)])
            joined[name][where[where >= 0].to(rows.device)] = rows[(where >= 0).to(rows.device)]
        return joined | {"next_bi": results[-1]["next_bi"]}

    return Variant(label=label, calls=tuple(calls), join=join)


def strange_mates(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The ids of image tokens do not matter; neither do tokens of later requests."""
    for value in (-1, 3):
        other = torch.where(inputs["image_t"], value, inputs["ids_t"])
        yield Variant(label=f"image ids {value}", calls=(inputs | {"ids_t": other},))


def few_requests(case: WindowCase) -> bool:
    """Relations make many calls."""
    return case.tokens <= 20 and case.places == 4


def everything_stays(case: WindowCase) -> bool:
    """Chunks end where the whole ends."""
    return case.kept == "all" and few_requests(case)


WINDOW = Op(
    name="engram_window",
    reference="deeptwin.reference.engram:engram_window",
    outputs=(
        Output(name="window_tw", rule=EXACT, dtype=torch.int32),
        Output(name="images_t", rule=EXACT, dtype=torch.bool),
        Output(name="next_bi", rule=EXACT, dtype=torch.int32),
    ),
    cases=cases_window,
    draw=draw_window,
    rows={},
    out_rows={},
    relations=(
        Relation(name="batch_invariant", axis="requests", hook=whole_requests, only=few_requests),
        Relation(name="chunk_invariant", axis="token chunks", hook=token_chunks, only=everything_stays),
        Relation(name="decode_equals_prefill", axis="verified steps", hook=drafted_steps, only=everything_stays),
        Relation(name="masked_equals_absent", axis="ids of image tokens", hook=strange_mates, only=few_requests),
        Relation(name="run_to_run", axis="repeats", only=few_requests),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.engram:engram_window_triton"),),
    builds=(
        BuildCase(
            name="prefill",
            kernel="deeptwin.kernels.triton_ops.engram:_window",
            launch="deeptwin.parity.builds.launches.engram:window_prefill",
            expect=NO_PRODUCT | VECTOR,
        ),
        BuildCase(
            name="decode",
            kernel="deeptwin.kernels.triton_ops.engram:_history",
            launch="deeptwin.parity.builds.launches.engram:window_decode",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("negative_id_from_the_end", "U40", "a negative id indexes the class map from its end"),
        _mutant("image_does_not_break", "U40", "an image token is just skipped in the window"),
        _mutant("image_breaks_one_place", "U40", "no latching: only the place of the image token is padding"),
        _mutant("image_history_forgotten", "U40", "an image token leaves the class of padding in the history"),
        _mutant("map_of_another_revision", "U41", "two classes of the map are swapped"),
        _mutant("pad_is_end_of_sequence", "U41", "padding is the class of id 1, which the tokenizer names"),
        _mutant("special_tokens_break", "U42", "ids 0 and 1 end a window"),
        _mutant("windows_cross_requests", "U37", "the tokens before a request's first are the mate's"),
        _mutant("history_ignored", "U71", "every chunk begins with padding"),
        _mutant("history_of_first_request", "U09", "every request continues the history of the first"),
        _mutant("history_newest_first", "U61", "the history is read newest first"),
        _mutant("rejected_drafts_stay", "U62", "the history takes all tokens of a step, the rejected ones too"),
        _mutant("one_draft_too_many", "U62", "the history takes the token after the accepted ones"),
        _mutant("history_latched", "U40", "what lies behind an image token is forgotten too early"),
        _mutant("oldest_first", "U61", "the window runs forwards"),
        _mutant("second_call_differs", "U43", "the first call leaves something for the second"),
    ),
    controls=(_control("right_window"),),
    golden=lambda: [replace(DECODE, lengths=(4, 1, 0, 3)), WindowCase(lengths=(6, 4), images="many", history="images")],
)


# hashes


@dataclass(frozen=True, kw_only=True)
class HashCase:
    """Windows of drawn classes, of the largest ones, or of real text."""

    tokens: int
    layout: str = "v41"
    images: str = "some"
    text: str = ""
    regime: str = "normal"  # normal, largest, smallest

    @property
    def id(self) -> str:
        return f"t{self.tokens}-{self.layout}-images_{self.images}-{self.text or self.regime}"

    @property
    def needs(self) -> tuple[str, ...]:
        return texts.NEEDS if self.text else ()


def draw_hash(case: HashCase, rng: np.random.Generator) -> Inputs:
    """Windows as a strided view; the windows of image tokens are padding."""
    constants = layout(case.layout)
    shape = (case.tokens, constants.window)
    top = constants.num_classes
    low = {"largest": top - 3, "smallest": 0, "normal": 0}[case.regime]
    high = {"largest": top, "smallest": 3, "normal": top}[case.regime]
    window = rng.integers(low, high, shape)
    if case.text:
        classes = class_map()[torch.tensor(texts.token_ids(case.text))].numpy()
        padded = np.concatenate([np.full(constants.window - 1, 2), np.resize(classes, case.tokens)])
        window = np.stack([padded[constants.window - 1 - s :][: case.tokens] for s in range(constants.window)], axis=1)
    image = rng.random(case.tokens) < (0.2 if case.images == "some" else 0.0)
    window[image] = 2
    return {
        "window_tw": draws.strided(torch.from_numpy(window.astype(np.int32)), pad=3),
        "image_t": torch.from_numpy(image),
        "layout": constants,
    }


def cases_hash(full: bool) -> list[HashCase]:
    """The released constants, the reduced ones, an odd layout, the ends of the class range, real text."""
    found = [HashCase(tokens=n, layout=name) for n, name in ((7, "v41"), (70, "v41"), (1, "tiny"), (7, "odd"))]
    found += [HashCase(tokens=0)]
    found += [HashCase(tokens=9, regime=r, images="none") for r in ("largest", "smallest")]
    found += [HashCase(tokens=40, text=name) for name in ("english", "mixed")]
    if full:
        found += [HashCase(tokens=n, layout=name) for n, name in product((63, 64, 65), ("v41", "odd"))]
        found += [HashCase(tokens=60, text=name) for name in texts.TEXTS]
    return _unique(found)


def few_windows(case: HashCase) -> bool:
    """Relations make many calls."""
    return case.tokens in (0, 7) and case.layout != "odd"


HASH = Op(
    name="engram_hash",
    reference="deeptwin.reference.engram:engram_hash",
    outputs=(Output(name="row_ltz", rule=EXACT, dtype=torch.int32),),
    cases=cases_hash,
    draw=draw_hash,
    rows={"window_tw": 0, "image_t": 0},
    out_rows={"row_ltz": 1},
    tile=64,
    relations=(
        Relation(name="batch_invariant", axis="tokens", only=few_windows),
        Relation(name="chunk_invariant", axis="token chunks", hook=row_chunks, only=few_windows),
        Relation(name="run_to_run", axis="repeats", only=few_windows),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.engram:engram_hash_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.engram:engram_hash_tile_kernels",
            needs=("tile_kernels",),
        ),
    ),
    builds=(
        BuildCase(
            name="v41",
            kernel="deeptwin.kernels.triton_ops.engram:_hash",
            launch="deeptwin.parity.builds.launches.engram:hash_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.engram:tile_kernels_hash",
            needs=("tile_kernels",),
            explains="engram_hash_ref of tile_kernels 2.1.0, bit for bit",
        ),
    ),
    mutants=(
        _mutant("products_of_32_bits", "U40", "products are cut to 32 bits"),
        _mutant("sum_instead_of_xor", "U42", "products are added"),
        _mutant("last_product_only", "U42", "an n-gram hashes its oldest token alone"),
        _mutant("layers_share_multipliers", "U41", "every layer uses the multipliers of the first"),
        _mutant("multipliers_even", "U41", "multipliers are 2 r instead of 2 r + 1"),
        _mutant("heads_share_a_prime", "U42", "all heads of an n use its first prime"),
        _mutant("layers_share_primes", "U42", "the scan for primes forgets what earlier layers took"),
        _mutant("offsets_missing", "U42", "all sub-tables begin at row 0"),
        _mutant("offsets_inclusive", "U42", "the prefix sum includes the own sub-table"),
        _mutant("columns_by_head", "U42", "columns of a head stand together"),
        _mutant("window_backwards", "U61", "the oldest token takes the first multiplier"),
        _mutant("image_rows_hashed", "U40", "an image token looks up the window of padding"),
        _mutant("no_layers_at_first", "U43", "the first call knows no layers yet"),
    ),
    controls=(_control("right_hash"),),
    golden=lambda: [HashCase(tokens=5), HashCase(tokens=5, layout="tiny"), HashCase(tokens=4, regime="largest")],
)


# looked-up rows


@dataclass(frozen=True, kw_only=True)
class RowsCase:
    """`columns` rows a token from a table of `rows` rows of `dim` codes, of which only the named ones are no NaN."""

    tokens: int
    columns: int = 6
    dim: int = 128
    rows: int = 300
    holes: str = "some"
    dtype: str = ""  # of values
    regime: str = "normal"  # scales: normal, wide, tiny

    @property
    def id(self) -> str:
        dtype = f"-{self.dtype}" if self.dtype else ""
        return f"t{self.tokens}-z{self.columns}-d{self.dim}-r{self.rows}-holes_{self.holes}{dtype}-{self.regime}"


SCALES = {"normal": (114, 124), "wide": (8, 240), "tiny": (88, 104)}


def _table(rng: np.random.Generator, named: np.ndarray, rows: int, dim: int, regime: str) -> tuple[Tensor, Tensor]:
    """Every finite code among the named rows, 0xFF in all others."""
    low, high = SCALES.get(regime, SCALES["normal"])
    codes = draws.poisoned(rows, dim, dtype=torch.uint8)
    scales = draws.poisoned(rows, dim // 32, dtype=torch.uint8)
    at = torch.from_numpy(named)
    drawn = rng.integers(0, 256, (named.size, dim))
    drawn[(drawn & 127) == 127] = 0x80
    codes[at] = torch.from_numpy(drawn.astype(np.uint8))
    scales[at] = torch.from_numpy(rng.integers(low, high, (named.size, dim // 32)).astype(np.uint8))
    return draws.strided(codes, pad=16).view(torch.float8_e4m3fn), draws.strided(scales, pad=3)


def draw_rows(case: RowsCase, rng: np.random.Generator) -> Inputs:
    """A table whose unnamed rows are NaN, the last row among the named ones never, holes."""
    named = draws.distinct(rng, case.rows - 2, max(case.rows // 2, 1)) + 1
    row = rng.choice(named, (case.tokens, case.columns)) if case.tokens else np.zeros((0, case.columns), dtype=np.int64)
    if case.holes == "some":
        row[rng.random(case.tokens) < 0.3] = -1
    elif case.holes == "all":
        row[:] = -1
    table, scales = _table(rng, named, case.rows, case.dim, case.regime)
    inputs: Inputs = {
        "table_rd": table,
        "table_sf_rg": scales,
        "row_tz": draws.strided(torch.from_numpy(row.astype(np.int32)), pad=1),
    }
    return inputs | ({"dtype": draws.DTYPES[case.dtype]} if case.dtype else {})


def cases_lookup(full: bool) -> list[RowsCase]:
    """Rows of the released and the reduced size, holes, scales from one end to the other."""
    base = RowsCase(tokens=5)
    found = [
        base,
        replace(base, tokens=2, columns=24, dim=256),
        replace(base, tokens=1, columns=1, dim=32, holes="none"),
        replace(base, dim=96),
        replace(base, holes="all"),
        replace(base, tokens=0),
        replace(base, regime="wide"),
    ]
    if full:
        found += [replace(base, tokens=n, dim=d, columns=z) for n, d, z in product((17,), (64, 256), (1, 24))]
    return _unique(found)


def cases_embed(full: bool) -> list[RowsCase]:
    """The same with values, in both dtypes that a consumer may want."""
    found = [replace(case, dtype=dtype) for case in cases_lookup(full) for dtype in ("bf16", "fp32")]
    return [case for case in found if full or case.dtype == "bf16" or case.dim == 128]


def moved_rows(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same rows elsewhere in the table, as a table spread over other shards has them."""
    table, scales, row = inputs["table_rd"], inputs["table_sf_rg"], inputs["row_tz"].to(torch.int64)
    for attempt in range(4 if context.full else 2):
        order = torch.from_numpy(context.rng.permutation(table.shape[0]))
        moved = torch.empty_like(order)
        moved[order] = torch.arange(order.numel())
        renamed = torch.where(row < 0, -1, moved[row.clamp_min(0)]).to(torch.int32)
        codes = table.view(torch.uint8)[order].view(torch.float8_e4m3fn)
        other = {"table_rd": codes, "table_sf_rg": scales[order], "row_tz": renamed}
        yield Variant(label=f"row order {attempt}", calls=(inputs | other,))


def few_rows(case: RowsCase) -> bool:
    """Relations make many calls."""
    return case.tokens == 0 or (
        case.tokens == 5 and case.dim == 128 and case.regime == "normal" and case.holes == "some"
    )


ROW_RELATIONS = (
    Relation(name="batch_invariant", axis="tokens", only=few_rows),
    Relation(name="chunk_invariant", axis="token chunks", hook=row_chunks, only=few_rows),
    Relation(name="page_permutation", axis="table rows", hook=moved_rows, only=few_rows),
    Relation(name="run_to_run", axis="repeats", only=few_rows),
)
ROW_MUTANTS = (
    ("hole_wraps_to_last_row", "U79", "row -1 reads the last row"),
    ("hole_reads_row_0", "U74", "a hole reads row 0"),
    ("hole_unwritten", "U75", "a hole is left unwritten"),
    ("scale_of_next_group", "U23", "scales are off by one group"),
    ("scales_of_first_token", "U09", "every token takes the scales of the first"),
    ("last_group_lost", "U26", "the last 32 channels of a row are not copied"),
    ("columns_interleaved", "U22", "channels of the columns are interleaved instead of side by side"),
)

LOOKUP = Op(
    name="engram_lookup",
    reference="deeptwin.reference.engram:engram_lookup",
    outputs=(
        Output(name="codes_tm", rule=EXACT, dtype=torch.float8_e4m3fn),
        Output(name="sf_tg", rule=EXACT, dtype=torch.uint8),
    ),
    cases=cases_lookup,
    draw=draw_rows,
    rows={"row_tz": 0},
    out_rows={"codes_tm": 0, "sf_tg": 0},
    tile=3,
    relations=ROW_RELATIONS,
    candidates=(Candidate(name="triton", function="deeptwin.optimized.engram:engram_lookup_triton"),),
    builds=(
        BuildCase(
            name="v41",
            kernel="deeptwin.kernels.triton_ops.engram:_lookup",
            launch="deeptwin.parity.builds.launches.engram:lookup_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=tuple(_mutant(f"lookup_{name}", entry, fault) for name, entry, fault in ROW_MUTANTS),
    controls=(_control("right_lookup"),),
    golden=lambda: [RowsCase(tokens=3, columns=2, dim=32, rows=9)],
)

EMBED = Op(
    name="engram_embed",
    reference="deeptwin.reference.engram:engram_embed",
    outputs=(Output(name="e_tm", rule=EXACT),),
    cases=cases_embed,
    draw=draw_rows,
    rows={"row_tz": 0},
    out_rows={"e_tm": 0},
    tile=3,
    relations=ROW_RELATIONS,
    candidates=(Candidate(name="triton", function="deeptwin.optimized.engram:engram_embed_triton"),),
    builds=(
        BuildCase(
            name="v41",
            kernel="deeptwin.kernels.triton_ops.engram:_embed",
            launch="deeptwin.parity.builds.launches.engram:embed_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.engram:tile_kernels_rows",
            needs=("tile_kernels",),
            explains="cast_back of tile_kernels 2.1.0 on gathered rows; holes are left to us",
            only=lambda case: case.holes == "none",
        ),
    ),
    mutants=(
        *(_mutant(f"embed_{name}", entry, fault) for name, entry, fault in ROW_MUTANTS),
        _mutant("subnormal_codes_lost", "U60", "codes below 2^-6 decode to zero"),
        _mutant("subnormal_codes_doubled", "U60", "subnormal codes have the exponent of normal ones"),
        _mutant("scale_off_by_one", "U53", "the bias of the scale is 128"),
        _mutant("through_half", "U60", "values pass through fp16"),
        _mutant("divided_by_largest", "U59", "rows are divided by their largest magnitude and multiplied again"),
        _mutant("sign_of_zero_lost", "U60", "code 0x80 decodes to +0"),
    ),
    controls=(_control("right_embed"),),
    golden=lambda: [RowsCase(tokens=3, columns=2, dim=32, rows=9, dtype="bf16", regime="wide")],
)


# projection


@dataclass(frozen=True, kw_only=True)
class ProjectCase:
    """`width` looked-up channels to `outputs`; one token may hold a NaN code."""

    tokens: int
    width: int = 384
    outputs: int = 160
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-m{self.width}-u{self.outputs}-{self.regime}"


def _codes(rng: np.random.Generator, rows: int, width: int, regime: str) -> Tensor:
    values = draws.rows(rng, rows, width, dtype=torch.float32, regime=regime)
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def draw_project(case: ProjectCase, rng: np.random.Generator) -> Inputs:
    """Bytes as a table and a checkpoint hold them; scales near one, or far below what a quantiser would write."""
    regime = case.regime if case.regime in (*REGIMES, "zeros", "ties") else "normal"
    codes = _codes(rng, case.tokens, case.width, regime)
    low, high = SCALES["tiny"] if case.regime == "tiny" else (118, 124)
    scales = torch.from_numpy(rng.integers(low, high, (case.tokens, case.width // 32)).astype(np.uint8))
    if case.regime == "nanrow":
        codes.view(torch.uint8)[case.tokens // 2, 3] = 0x7F
    weight = _codes(rng, case.outputs, case.width, "normal")
    weight_sf = rng.integers(119, 122, (-(-case.outputs // 32), case.width // 32)).astype(np.uint8)
    return {
        "codes_tm": draws.strided(codes.view(torch.uint8), pad=16).view(torch.float8_e4m3fn),
        "sf_tg": draws.strided(scales, pad=4),
        "w_um": weight,
        "w_sf_ig": torch.from_numpy(weight_sf),
    }


def cases_project(full: bool) -> list[ProjectCase]:
    """Regimes with enough rows for the bias rule, odd sizes, the released width, NaN beside numbers."""
    found = [ProjectCase(tokens=33, regime=r) for r in (*REGIMES, "tiny", "zeros", "nanrow")]
    found += [
        ProjectCase(tokens=5, width=32, outputs=7),
        ProjectCase(tokens=3, width=96, outputs=64),
        ProjectCase(tokens=2, width=6144, outputs=64),
        ProjectCase(tokens=0),
    ]
    if full:
        found += [ProjectCase(tokens=n, width=768, outputs=512, regime=r) for n, r in product((65,), REGIMES)]
    return _unique(found)


def few_products(case: ProjectCase) -> bool:
    """Relations on one regime and on nothing."""
    return case.width == 96 or case.tokens == 0


PROJECT = Op(
    name="engram_project",
    reference="deeptwin.reference.engram:engram_project",
    outputs=(Output(name="kv_tu", rule=Budget(kind="bf16 product"), dtype=torch.bfloat16),),
    cases=cases_project,
    draw=draw_project,
    rows={"codes_tm": 0, "sf_tg": 0},
    out_rows={"kv_tu": 0},
    tile=64,
    relations=(
        Relation(name="batch_invariant", axis="tokens", only=few_products),
        Relation(name="chunk_invariant", axis="token chunks", hook=row_chunks, only=few_products),
        Relation(name="run_to_run", axis="repeats", only=few_products),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.engram:engram_project_triton"),),
    builds=(
        BuildCase(
            name="v41",
            kernel="deeptwin.kernels.triton_ops.engram_mix:_project",
            launch="deeptwin.parity.builds.launches.engram:project_v41",
            expect=PRODUCT | MATRIX,
        ),
    ),
    mutants=(
        _mix_mutant("quantised_again", "R11", "values go to bf16 and through a quantiser, whose floor is 1e-4"),
        _mix_mutant("weight_scales_transposed", "U57", "weight tiles are read column by column"),
        _mix_mutant("weight_scale_of_first_tile", "U53", "one weight scale for all outputs"),
        _mix_mutant("token_scales_ignored", "U53", "codes are taken for values"),
        _mix_mutant("last_channels_dropped", "U80", "the last 32 channels are lost"),
        _mix_mutant("accumulator_bf16", "R1", "the sum is kept in bf16"),
        _mix_mutant("projection_truncated", "R1", "the output is truncated to bf16"),
        _mix_mutant("nan_spreads_over_tile", "U76", "a NaN token spoils the tokens of its tile"),
        _mix_mutant("nan_hidden", "U77", "a NaN code counts as 480"),
        _mix_mutant("zero_over_zero", "U59", "tokens are divided by their largest value before and multiplied after"),
        _mix_mutant("split_by_batch", "U73", "a token alone has its channels split, the parts in bf16"),
    ),
    controls=(_mix_control("right_project"), _mix_control("right_project_backwards")),
    golden=lambda: [ProjectCase(tokens=2, width=64, outputs=40)],
)


# gate


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """Streams of a regime; what the keys are to them is a regime too."""

    tokens: int
    width: int = 512
    streams: int = 4
    eps: float = 1e-20
    images: str = "some"
    regime: str = "normal"  # of draws.rows, or: zero_keys, no_streams, aligned, opposed, tiny_keys

    @property
    def id(self) -> str:
        return f"t{self.tokens}-n{self.streams}-m{self.width}-eps{self.eps:g}-images_{self.images}-{self.regime}"


def draw_gate(case: GateCase, rng: np.random.Generator) -> Inputs:
    """Strided streams and keys; keys, value and streams of image tokens hold NaN."""
    t, n, m = case.tokens, case.streams, case.width
    regime = case.regime if case.regime in ROW_REGIMES else "normal"
    bf16 = torch.bfloat16
    r = draws.rows(rng, t * n, m, dtype=bf16, regime=regime).view(t, n, m)
    kv = draws.rows(rng, t * (n + 1), m, dtype=bf16, regime=regime).view(t, n + 1, m)
    kv[:, -1] = draws.normal(rng, t, m, dtype=bf16)
    if case.regime in ("aligned", "opposed"):
        kv[:, :n] = r * (2.0 if case.regime == "aligned" else -0.5)
    elif case.regime == "zero_keys":
        kv[:, :n] = 0
    elif case.regime == "no_streams":
        r[:] = 0
    elif case.regime == "tiny_keys":
        kv[:, :n] *= 2.0**-70
    image = torch.from_numpy(rng.random(t) < (0.3 if case.images == "some" else 0.0))
    kv[image] = torch.nan
    return {
        "r_tnm": draws.strided(r, pad=8),
        "kv_tjm": draws.strided(kv, pad=8),
        "q_weight_nm": draws.normal(rng, n, m, dtype=bf16, scale=0.4, mean=1.0),
        "k_weight_nm": draws.normal(rng, n, m, dtype=bf16, scale=0.4, mean=1.0),
        "image_t": image,
        "eps": case.eps,
    }


ROW_REGIMES = (*REGIMES, "zeros", "ties", "tiny", "huge", "cancel", "constant")
KEY_REGIMES = ("zero_keys", "no_streams", "aligned", "opposed", "tiny_keys")


def cases_gate(full: bool) -> list[GateCase]:
    """Every regime of streams and keys, production width, other stream counts, another epsilon, nothing."""
    found = [GateCase(tokens=5, regime=r) for r in (*ROW_REGIMES, *KEY_REGIMES)]
    found += [GateCase(tokens=2, width=5120, images="none", regime=r) for r in ("normal", "mean1")]
    found += [
        GateCase(tokens=3, width=300),
        GateCase(tokens=2, width=1),
        GateCase(tokens=5, width=2049, streams=1),
        GateCase(tokens=3, width=512, eps=1e-6, regime="flat"),
        GateCase(tokens=3, width=33, streams=2),
        GateCase(tokens=2, width=512),
        GateCase(tokens=0),
    ]
    if full:
        found += [GateCase(tokens=2, width=w, regime=r) for w, r in product((1024, 1500), (*REGIMES, *KEY_REGIMES))]
    return _unique(found)


def modest_batches(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The default sizes also when full: a token takes a program of the interpreter for each of its streams."""
    yield from batch_invariant(inputs, replace(context, full=False))


def streams_exchanged(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Streams in another order, with their keys and weights."""
    n = inputs["r_tnm"].shape[1]
    order = torch.from_numpy(np.roll(np.arange(n), 1))
    keys = torch.cat([inputs["kv_tjm"][:, order], inputs["kv_tjm"][:, -1:]], 1)
    other = inputs | {"r_tnm": inputs["r_tnm"][:, order].clone(), "kv_tjm": keys}
    other |= {name: inputs[name][order] for name in ("q_weight_nm", "k_weight_nm")}
    yield Variant(
        label="streams rolled",
        calls=(other,),
        expect=lambda o: {"gated_tnm": o["gated_tnm"][:, order.to(o["gated_tnm"].device)]},
    )


def keys_of_images(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Keys and value of image tokens may be anything."""
    for value in (torch.inf, 0.0):
        kv = inputs["kv_tjm"].clone()
        kv[inputs["image_t"]] = value
        yield Variant(label=f"keys and values {value}", calls=(inputs | {"kv_tjm": kv},))


def powers_of_two(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Keys scaled by a power of two change nothing: the norm takes it out, and eps is far below."""
    kv = inputs["kv_tjm"].clone()
    kv[:, :-1] *= 2.0**5
    yield Variant(label="keys times 32", calls=(inputs | {"kv_tjm": kv},))


def few_gates(case: GateCase) -> bool:
    """Relations make many calls; 512 channels are the fewest that TileKernels takes."""
    return case.width < 100 or case.tokens == 0 or (case.tokens == 2 and case.width == 512)


def outside_tile_kernels(case: GateCase) -> str | None:
    """Why TileKernels' gate does not take a case."""
    return None if case.width >= 512 and case.width % 256 == 0 else "streams of 256·n channels from 512 up"


GATE = Op(
    name="engram_gate",
    reference="deeptwin.reference.engram:engram_gate",
    outputs=(Output(name="gated_tnm", rule=OneRounding(cancellation=2.0**-8), dtype=torch.bfloat16),),
    cases=cases_gate,
    draw=draw_gate,
    rows={"r_tnm": 0, "kv_tjm": 0, "image_t": 0},
    out_rows={"gated_tnm": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens", hook=modest_batches, only=few_gates),
        Relation(name="layout_invariant", axis="alignment of rows", only=few_gates),
        Relation(name="chunk_invariant", axis="token chunks", hook=row_chunks, only=few_gates),
        Relation(name="head_permutation", axis="streams", hook=streams_exchanged, only=few_gates),
        Relation(name="masked_equals_absent", axis="keys of image tokens", hook=keys_of_images, only=few_gates),
        Relation(name="causality", axis="scale of the keys", hook=powers_of_two, only=few_gates),
        Relation(name="run_to_run", axis="repeats", only=few_gates),
    ),
    candidates=(
        Candidate(name="triton", function="deeptwin.optimized.engram:engram_gate_triton"),
        Sm90Candidate(
            name="tile-kernels",
            function="deeptwin.optimized.engram:engram_gate_tile_kernels",
            needs=("tile_kernels",),
            declines=outside_tile_kernels,
        ),
    ),
    builds=(
        BuildCase(
            name="v41",
            kernel="deeptwin.kernels.triton_ops.engram_mix:_gate",
            launch="deeptwin.parity.builds.launches.engram:gate_v41",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="tile-kernels",
            function="deeptwin.parity.peers.engram:tile_kernels_gate",
            needs=("tile_kernels",),
            explains="engram_gate_ref of tile_kernels 2.1.0; sign(d) there is 0 where ours copies a sign",
            only=lambda case: case.regime not in ("zeros", "zero_keys", "no_streams", "huge"),
        ),
    ),
    mutants=(
        _mix_mutant("sign_instead_of_copysign", "R11", "sign(d) times the root: the gate is one half at d = 0"),
        _mix_mutant("clamp_missing", "U85", "no least magnitude under the root"),
        _mix_mutant("clamp_on_root", "U85", "the clamp is applied to the root"),
        _mix_mutant("root_missing", "U38", "the gate is sigmoid(d)"),
        _mix_mutant("root_of_sum_unsigned", "U38", "the sign of d is lost"),
        _mix_mutant("eps_missing", "U59", "no eps: zero streams divide 0 by 0"),
        _mix_mutant("eps_1e_6", "U39", "eps is 1e-6 whatever is asked for"),
        _mix_mutant("norm_over_streams", "U38", "one norm over all streams of a token"),
        _mix_mutant("value_first", "U38", "the value is entry 0 of the projection, not the last"),
        _mix_mutant("key_of_first_stream", "U38", "every stream uses the first key"),
        _mix_mutant("q_weight_alone", "U38", "the key weight is left out"),
        _mix_mutant("weights_bf16_product", "U17", "the product of the weights is rounded to bf16"),
        _mix_mutant("width_scale_missing", "U05", "d is not divided by the root of the width"),
        _mix_mutant("mean_over_padded_width", "U26", "means divide by the width padded to a power of two"),
        _mix_mutant("residual_missing", "R2", "the gated value alone is returned"),
        _mix_mutant("value_rounded_first", "U86", "the gated value is rounded before it is added"),
        _mix_mutant("gate_bf16", "U17", "the gate is rounded to bf16"),
        _mix_mutant("gate_truncated", "R2", "the output is truncated to bf16"),
        _mix_mutant("memory_not_added", "R2", "the streams come back as they were"),
        _mix_mutant("image_updated", "U40", "image tokens are updated too"),
        _mix_mutant("image_nan_leaks", "U76", "image tokens are masked by a product with 0"),
        _mix_mutant("last_token_unwritten", "U75", "the last token is left unwritten"),
        _mix_mutant("statistics_of_first_token", "U75", "every token uses the norm of the first"),
        _mix_mutant("statistics_split_by_batch", "U73", "a token alone has its sums split, in bf16"),
        _mix_mutant("not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(_mix_control("right_gate"), _mix_control("right_gate_backwards")),
    golden=lambda: [GateCase(tokens=3, width=48, streams=2), GateCase(tokens=2, width=32, regime="zero_keys")],
)


# the whole layer


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A reduced layer: `heads` hashes of 2-, 3- and 4-grams, rows of 64 channels, four streams."""

    tokens: int
    width: int = 128
    heads: int = 2
    images: str = "some"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-m{self.width}-h{self.heads}-images_{self.images}-{self.regime}"


def draw_layer(case: LayerCase, rng: np.random.Generator) -> Inputs:
    """Streams, rows with holes for image tokens, a table with NaN where nobody looks, weights of a checkpoint."""
    dim, rows, streams = 64, 120, 4
    named = draws.distinct(rng, rows - 2, rows // 2) + 1
    row = rng.choice(named, (case.tokens, 3 * case.heads)) if case.tokens else np.zeros((0, 3 * case.heads), np.int64)
    if case.images == "some":
        row[rng.random(case.tokens) < 0.3] = -1
    table, scales = _table(rng, named, rows, dim, "normal")
    inputs = 3 * case.heads * dim
    weight_sf = rng.integers(112, 114, (-(-(streams + 1) * case.width // 32), inputs // 32)).astype(np.uint8)
    r = draws.rows(rng, case.tokens * streams, case.width, dtype=torch.bfloat16, regime=case.regime)
    norm = [draws.normal(rng, streams, case.width, dtype=torch.bfloat16, scale=0.4, mean=1.0) for _ in range(2)]
    return {
        "r_tnm": draws.strided(r.view(case.tokens, streams, case.width), pad=8),
        "row_tz": torch.from_numpy(row.astype(np.int32)),
        "table_rd": table,
        "table_sf_rg": scales,
        "weights": EngramWeights(
            wkv_um=_codes(rng, (streams + 1) * case.width, inputs, "normal"),
            wkv_sf_ig=torch.from_numpy(weight_sf),
            q_weight_nm=norm[0],
            k_weight_nm=norm[1],
        ),
        "eps": 1e-20,
    }


def cases_layer(full: bool) -> list[LayerCase]:
    """Regimes, one token, none, the reduced configuration of the spec."""
    found = [LayerCase(tokens=9, regime=r) for r in REGIMES]
    found += [LayerCase(tokens=1, images="none"), LayerCase(tokens=0), LayerCase(tokens=2, width=96, heads=1)]
    if full:
        found += [LayerCase(tokens=5, width=256, regime=r) for r in REGIMES]
    return _unique(found)


def few_layers(case: LayerCase) -> bool:
    """Relations on the smallest layers."""
    return case.width < 128 or case.tokens == 0


LAYER = Op(
    name="engram",
    reference="deeptwin.reference.engram:engram",
    outputs=(Output(name="gated_tnm", rule=Budget(kind="bf16 engram layer"), dtype=torch.bfloat16),),
    cases=cases_layer,
    draw=draw_layer,
    rows={"r_tnm": 0, "row_tz": 0},
    out_rows={"gated_tnm": 0},
    relations=(
        Relation(name="batch_invariant", axis="tokens", hook=modest_batches, only=few_layers),
        Relation(name="page_permutation", axis="table rows", hook=moved_rows, only=few_layers),
        Relation(name="run_to_run", axis="repeats", only=few_layers),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.engram:engram_triton"),),
    mutants=(
        _mix_mutant("layer_rows_reversed", "U42", "rows stand side by side in the order of the heads reversed"),
        _mix_mutant("layer_value_first", "U38", "the value is entry 0 of the projection"),
        _mix_mutant("layer_keys_of_first_stream", "U38", "every stream uses the first key"),
        _mix_mutant("layer_not_added", "R2", "the memory does not enter the streams"),
        _mix_mutant("layer_scales_ignored", "U53", "looked-up codes are taken for values"),
        _mix_mutant("layer_values_e4m3", "R1", "keys and value pass through e4m3"),
    ),
    controls=(_mix_control("right_layer"),),
    golden=lambda: [LayerCase(tokens=3, width=32, heads=1)],
)

CARD = Card(
    component="engram",
    summary="n-gram memory: classes, windows, hashes, table rows, projection, gate",
    contract={
        "dtypes": "ids, classes, rows int32; image mask bool; table e4m3 codes with UE8M0 bytes per 32; streams bf16",
        "rounding": "keys and value once to bf16, streams once to bf16; looked-up bytes are never quantised again",
        "integers": "64-bit products and xor, no overflow; row = hash mod prime + offset",
        "image tokens": "break every window behind them, look nothing up (-1), leave their streams bit for bit",
        "outside ids": "image tokens or an error, as the caller says; the kernels read nothing for them",
        "state": "the last classes of a request, oldest first, -1 for image tokens, the class of id 2 before the start",
        "gate": "copysign, so d = 0 gives 0.50025; least magnitude 1e-6; three sums in fp32",
        "layout": "z rows side by side, 2-grams first; projection rows: keys of stream 0, 1, …, then the value",
    },
    ops=(LAYER, CLASSES, WINDOW, HASH, LOOKUP, EMBED, PROJECT, GATE),
    equivalents=(
        Equivalent(
            name="order of summation in the projection",
            reason="sums of products of e4m3 numbers with scales of a few octaves are exact in fp32",
        ),
        Equivalent(name="a layer that updates image tokens", reason="holes look nothing up: their value is 0"),
        Equivalent(name="pad class in the windows of image tokens", reason="their rows are -1 whatever they hold"),
        Equivalent(
            name="dequantise to bf16 and quantise again, scales from 2^-22 up",
            reason="the codes come back as they were in value; below, the floor loses bits (regime tiny)",
        ),
        Equivalent(
            name="scale bytes 0 and 255 as the shifted exponent field",
            reason="no producer writes them; both readings are accepted in kernels, ours is that of OCP",
        ),
    ),
)
