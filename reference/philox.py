"""Random words as a function of (seed, stream, place): Philox4x32-10, and how requests number their streams.

There is no generator state. A stream is named by the seed of a request, 64 bits, and by a subsequence number; its words
are those of the blocks 0, 1, 2, … of a counter, and it never ends:

    block b of stream (seed, sub) = philox(counter = (b, b >> 32, sub, sub >> 32), key = (seed, seed >> 32))

with every part taken modulo 2^32. Seeds stand in int64 tensors by their bits: 2^64 − 1 is −1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as count_from
from itertools import islice

import torch
from torch import Tensor

from .checks import expect_dtype, expect_positive, expect_shape
from .config import POSITION_STRIDE, DrawUse

MASK = 2**32 - 1
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
SAMPLE_STRIDE = 0x9E3779B97F4A7C15  # odd, so that 2^64 samples of a request have different seeds


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four words of one block."""
    x, y, z, w = counter
    for step in range(ROUNDS):
        k0, k1 = ((word + step * by) & MASK for word, by in zip(key, KEY_STEPS, strict=True))
        a, b = MULTIPLIERS[0] * x, MULTIPLIERS[1] * z
        x, y, z, w = (b >> 32) ^ y ^ k0, b & MASK, (a >> 32) ^ w ^ k1, a & MASK
    return x, y, z, w


def words(seed: int, subsequence: int) -> Iterator[int]:
    """The words of a stream, without end."""
    key = (seed & MASK, seed >> 32 & MASK)
    for block in count_from():
        yield from philox4x32((block & MASK, block >> 32, subsequence & MASK, subsequence >> 32), key)


def random_words(seed_t: Tensor, subsequence_t: Tensor, *, count: int) -> Tensor:
    """The first `count` words of every row's stream.

    Shapes:
        seed_t: int64 [t], the bits of an unsigned number; subsequence_t: int64 [t]; returns int64 [t, count].

    Edges:
        rows with the same seed and number have the same words.

    Raises:
        ValueError: shapes disagree; a number is negative; count is not positive.
        TypeError: an argument is not int64.

    Source:
        runtime.md section 2.4
    """
    _check_streams(seed_t, subsequence_t)
    expect_positive("count", count)
    streams = zip(seed_t.tolist(), subsequence_t.tolist(), strict=True)
    drawn = [list(islice(words(seed, subsequence), count)) for seed, subsequence in streams]
    return torch.tensor(drawn, dtype=torch.int64).reshape(len(seed_t), count)


def uniforms(seed_t: Tensor, subsequence_t: Tensor) -> Tensor:
    """A number in [2^-33, 1] for every row, from the first word of its stream.

    Math:
        u = word * 2^-32 + 2^-33

    Shapes:
        as `random_words`; returns fp32 [t].

    Rounding:
        the word to fp32, then the sum (definitional). The 128 largest words give exactly 1.

    Raises:
        ValueError, TypeError: as `random_words`.

    Source:
        runtime.md section 2.4
    """
    word_t = random_words(seed_t, subsequence_t, count=1)[:, 0]
    rounded_t = torch.tensor(word_t.tolist(), dtype=torch.float32)
    return rounded_t * 2.0**-32 + 2.0**-33


def subsequences(position_t: Tensor, row_t: Tensor, *, use: DrawUse) -> Tensor:
    """The numbers of the streams that rows draw from.

    Math:
        3 * (position + row * 10000019) + use

    Shapes:
        position_t: int64 [t], of the token that row 0 of the request produces in this step (of the token itself for
        a prefill and for a draft); row_t: int64 [t], of the row in its request, 0 for a prefill and for a draft;
        returns int64 [t].

    Edges:
        a position that is drafted again draws the same words again.

    Raises:
        ValueError: shapes disagree; a position or a row is negative; a number does not fit into 31 bits.
        TypeError: an argument is not int64.

    Source:
        runtime.md section 2.4
    """
    dims: dict[str, int] = {}
    for name, x in (("position_t", position_t), ("row_t", row_t)):
        expect_shape(name, x, "t", dims)
        expect_dtype(name, x, torch.int64)
        if (x < 0).any():
            raise ValueError(f"{name}: expected numbers from 0 on, got {x.tolist()}")
    number_t = 3 * (position_t + row_t * POSITION_STRIDE) + use
    if (number_t >= 2**31).any():
        raise ValueError(f"position_t: expected stream numbers below 2^31, got {number_t.tolist()}")
    return number_t


def request_seed(seed: int | None, *, drawn: int) -> int:
    """The seed of a request: the given one modulo 2^64, or without one the 64 random bits that were `drawn` for it."""
    return (drawn if seed is None else seed) % 2**64


def sample_seeds(seed_b: Tensor, *, samples: int) -> Tensor:
    """A seed for every one of the n samples of a request; the first keeps the request's own.

    Math:
        seed[b, i] = seed[b] + i * 0x9E3779B97F4A7C15 mod 2^64

    Shapes:
        seed_b: int64 [b]; returns int64 [b, samples].

    Edges:
        different i never meet; equal seeds give equal samples. However requests are split over workers, a sample has
        the same seed.

    Raises:
        ValueError: the shape is not [b]; samples is not positive.
        TypeError: seeds are not int64.

    Source:
        runtime.md section 2.5 asks for distinct seeds; the rule is ours
    """
    expect_shape("seed_b", seed_b, "b", {})
    expect_dtype("seed_b", seed_b, torch.int64)
    expect_positive("samples", samples)
    seeds = [[signed(seed + i * SAMPLE_STRIDE) for i in range(samples)] for seed in seed_b.tolist()]
    return torch.tensor(seeds, dtype=torch.int64).reshape(len(seed_b), samples)


def signed(seed: int) -> int:
    """The int64 with the bits of `seed` modulo 2^64."""
    return (seed + 2**63) % 2**64 - 2**63


def _check_streams(seed_t: Tensor, subsequence_t: Tensor) -> None:
    dims: dict[str, int] = {}
    for name, x in (("seed_t", seed_t), ("subsequence_t", subsequence_t)):
        expect_shape(name, x, "t", dims)
        expect_dtype(name, x, torch.int64)
    if (subsequence_t < 0).any():
        raise ValueError(f"subsequence_t: expected numbers from 0 on, got {subsequence_t.tolist()}")
