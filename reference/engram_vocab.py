"""What the n-gram memory computes once, on the host: classes of the vocabulary, primes and multipliers of the hash.

Tokens that read alike share a class: " The", "the" and " the" are one. Classes are numbered in the order in which
they first appear, and their number goes into every multiplier of the hash, so a vocabulary that is folded in another
way reads other rows of the table. Nothing would fail; therefore the number and a checksum of the map are checked.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .checks import expect_dtype, expect_shape
from .config import EngramConfig, EngramLayout

LONE_SPACE = "\ue000"  # stands in for a string that is one space, while white space is stripped
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
UNDECODABLE = "\ufffd"
CLASSES_V41 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"  # map of the V4 and V4.1 vocabulary


def normalize_text(text: str) -> str:
    """Fold compatibility forms, accents, case and runs of white space; a lone space stays a space.

    Math:
        NFKC, NFD, drop every character of a mark category (Mn, Mc and Me), lower case character by character, each
        run of space, tab, CR and LF to one space, strip Unicode white space unless the whole is one space

    Source:
        v41-blocks.md section 3.1
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    # not text.lower(): that gives a Greek sigma at the end of a word its final form
    text = "".join(c.lower() for c in text)
    text = re.sub(r"[ \t\r\n]+", " ", text)
    text = LONE_SPACE if text == " " else text
    return text.strip(WHITE_SPACE).replace(LONE_SPACE, " ")


def compress_vocabulary(texts: Sequence[str], pieces: Sequence[str]) -> Tensor:
    """The class of every token id.

    `texts[v]` is what the bare byte-level decoder makes of token v alone, special tokens kept and nothing cleaned up;
    `pieces[v]` is its spelling in the vocabulary, which tells apart the pieces that are no whole characters.

    Shapes:
        texts, pieces: v strings; returns int32 [v].

    Edges:
        a text whose normal form is empty is its own key; one with U+FFFD goes by its piece.

    Raises:
        ValueError: there are not as many texts as pieces.

    Source:
        v41-blocks.md section 3.1
    """
    if len(texts) != len(pieces):
        raise ValueError(f"texts: expected {len(pieces)} as there are pieces, got {len(texts)}")
    class_of: dict[str, int] = {}
    classes = []
    for text, piece in zip(texts, pieces, strict=True):
        key = piece if UNDECODABLE in text else normalize_text(text) or text
        classes.append(class_of.setdefault(key, len(class_of)))
    return torch.tensor(classes, dtype=torch.int32)


def vocabulary_digest(class_v: Tensor) -> str:
    """SHA-256 of a class map as int32 little-endian."""
    return hashlib.sha256(class_v.numpy().astype("<i4").tobytes()).hexdigest()


def expect_vocabulary(class_v: Tensor, *, num_classes: int, sha256: str) -> None:
    """Refuse a class map that is not the one that a table was trained with.

    Raises:
        TypeError: class_v is not int32.
        ValueError: class_v is not 1-D; it has another number of classes, or another checksum.
    """
    expect_shape("class_v", class_v, "v", {})
    expect_dtype("class_v", class_v, torch.int32)
    found = class_v.unique().numel()
    if found != num_classes:
        raise ValueError(f"class_v: expected {num_classes} classes, got {found} of {class_v.numel()} token ids")
    digest = vocabulary_digest(class_v)
    if digest != sha256:
        raise ValueError(f"class_v: expected a map with SHA-256 {sha256}, got {digest}")


def hash_layout(config: EngramConfig) -> EngramLayout:
    """Multipliers and table sizes of every layer.

    Math:
        multipliers[l, s] = 2 r + 1, r from numpy's default_rng(10007 l) in [0, floor(floor((2^63-1) / classes) / 2))
        primes: for each layer and each n, `num_heads` ascending primes from vocab_start on that no earlier layer, n
        or head took

    Source:
        v41-blocks.md sections 3.2, 3.3
    """
    bound = max(1, (2**63 - 1) // config.num_classes // 2)
    multipliers, primes = [], []
    unused = _primes_from(config.vocab_start)
    for layer in config.layer_ids:
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=config.max_ngram, dtype=np.int64)
        multipliers.append(tuple(2 * int(r) + 1 for r in drawn))
        # every n starts to look at vocab_start again, but all that lies before the next unused prime is taken
        primes.append(tuple(next(unused) for _ in range(config.num_columns)))
    return EngramLayout(
        num_heads=config.num_heads,
        num_classes=config.num_classes,
        multipliers=tuple(multipliers),
        primes=tuple(primes),
    )


def _primes_from(start: int) -> Iterator[int]:
    while True:
        if all(start % d for d in range(2, int(start**0.5) + 1)):
            yield start
        start += 1
