"""How sampling is checked: words and numbers of streams, filters and draws in whole numbers, whole rows of logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import Draw, DrawUse
from deeptwin.reference.numerics import Numerics
from deeptwin.reference.philox import words
from deeptwin.reference.sampling import sample_probs

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import Context, Variant, batch_invariant, row_chunks
from ..rules import LOG_PROBS, LSE, Bitwise, Law, OfStored, Within

_mutant, _control = variants("sampling")
EDGE_SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**32 - 1, 1000000007, -1000000007)
EDGE_STREAMS = (0, 1, 2, 3, 30000057, 2**31 - 1, 2**32 - 1, 2**32, 2**40 + 1)


@dataclass(frozen=True, kw_only=True)
class StreamCase:
    """`rows` streams, and how many words or samples of each."""

    rows: int
    count: int = 1
    use: str = "FRESH"
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.rows}-n{self.count}-{self.use.lower()}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class RowCase:
    """`tokens` rows of `columns`; `filters` and `temperature` are by row where they are mixed."""

    tokens: int
    columns: int
    draw: str = "NVIDIA"
    filters: str = "none"  # none, top_p, top_k, mixed
    temperature: str = "one"  # one, greedy, mixed
    k: int = 4
    regime: str = "normal"

    @property
    def id(self) -> str:
        how = f"{self.filters}-{self.temperature}-{self.draw.lower()}-k{self.k}"
        return f"t{self.tokens}-v{self.columns}-{how}-{self.regime}"


def _streams(rows: int, rng: np.random.Generator, regime: str) -> tuple[Tensor, Tensor]:
    seeds = rng.integers(-(2**63), 2**63, rows, dtype=np.int64)
    numbers = rng.integers(0, 2**31, rows, dtype=np.int64)
    if regime == "edges":
        seeds, numbers = np.resize(EDGE_SEEDS, rows), np.resize(EDGE_STREAMS, rows)
    elif regime == "equal":
        seeds[:], numbers[:] = 7, 3
    elif regime == "refused":  # streams that begin with nine words which a total of 2^31 refuses
        long = (n for n in range(2**20) if all(word >= 2**31 for word in islice(words(3, n), 9)))
        seeds[:], numbers = 3, np.array(list(islice(long, rows)))
    return torch.from_numpy(seeds.astype(np.int64)), torch.from_numpy(numbers.astype(np.int64))


def draw_words(case: StreamCase, rng: np.random.Generator) -> Inputs:
    """Seeds of all 64 bits, numbers of 31 and more."""
    seed, subsequence = _streams(case.rows, rng, case.regime)
    return {"seed_t": seed, "subsequence_t": subsequence, "count": case.count}


def draw_uniforms(case: StreamCase, rng: np.random.Generator) -> Inputs:
    """As for words."""
    seed, subsequence = _streams(case.rows, rng, case.regime)
    return {"seed_t": seed, "subsequence_t": subsequence}


def draw_numbers(case: StreamCase, rng: np.random.Generator) -> Inputs:
    """Positions up to a million, rows of a request up to 32."""
    position = torch.from_numpy(rng.integers(0, 2**20, case.rows))
    row = torch.from_numpy(rng.integers(0, 33, case.rows))
    if case.regime == "edges":
        position = torch.tensor([0, 1, 2**20, 10000018, 10000019])[: case.rows]
        row = torch.tensor([0, 1, 32, 0, 1])[: case.rows]
    return {"position_t": position, "row_t": row, "use": DrawUse[case.use]}


def draw_seeds(case: StreamCase, rng: np.random.Generator) -> Inputs:
    """Seeds of requests, some equal."""
    return {"seed_b": _streams(case.rows, rng, case.regime)[0], "samples": case.count}


def _logits(case: RowCase, rng: np.random.Generator) -> Tensor:
    known = case.regime if case.regime in (*REGIMES, "zeros", "ties", "tiny", "huge") else "normal"
    x = draws.rows(rng, case.tokens, case.columns, dtype=torch.float32, regime=known)
    if case.regime == "normal":
        x *= 3
    elif case.regime == "masked":
        x[torch.from_numpy(rng.random(x.shape)) < 0.7] = -torch.inf
        x[:, -1] = 0.0
    elif case.regime == "signed_zeros":
        x = torch.where(torch.from_numpy(rng.random(x.shape)) < 0.5, 0.0, -0.0) - torch.relu(x)
    elif case.regime == "clear":
        x[:, int(rng.integers(case.columns))] += 30
    return x


def _temperatures(case: RowCase, rng: np.random.Generator) -> Tensor:
    values = {"one": (1.0,), "greedy": (1e-5,), "mixed": (1.0, 0.5, 1e-5, 2.5, 0.06)}[case.temperature]
    return torch.tensor([values[i % len(values)] for i in range(case.tokens)])


def _filters(case: RowCase, x: Tensor, temperature: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """top_p and top_k by row; top_p in the middle of a token's mass, where an honest rounding moves no token."""
    top_p, top_k = torch.ones(case.tokens), torch.full((case.tokens,), -1)
    for row in range(case.tokens):
        how = case.filters if case.filters != "mixed" else ("both", "none", "top_p", "top_k")[row % 4]
        if how in ("top_p", "both"):
            prob = torch.softmax(x[row].double() / temperature[row].double(), 0).sort(descending=True).values
            n = int(rng.integers(max(int((prob > 1e-3).sum()), 1)))
            top_p[row] = (prob[:n].sum() + prob[n] / 2).float()
        if how in ("top_k", "both"):
            top_k[row] = int(rng.integers(1, case.columns + 2))
    return top_p, top_k


def draw_rows(case: RowCase, rng: np.random.Generator) -> Inputs:
    """Logits of a regime, parameters by row; `hostile`: rows and parameters that cannot be drawn from among others."""
    x, temperature = _logits(case, rng), _temperatures(case, rng)
    top_p, top_k = _filters(case, x, temperature, rng)
    if case.regime == "hostile":
        x[0::8, case.columns // 2], x[1::8, 0] = torch.nan, torch.inf
        x[2::8] = -torch.inf
        x[3::8, 1:] = -torch.inf
        temperature[4::8], top_p[5::8], top_k[6::8] = 9e-6, 1.25, 0
    seed, subsequence = _streams(case.tokens, rng, case.regime)
    return {
        "logits_tv": draws.strided(x, pad=8),
        "temperature_t": temperature,
        "top_p_t": top_p,
        "top_k_t": top_k,
        "seed_t": seed,
        "subsequence_t": subsequence,
        "draw": Draw[case.draw],
    }


def draw_probs(case: RowCase, rng: np.random.Generator) -> Inputs:
    """Weights: softmax rows, point masses, sums a little above one, rows far below, hostile ones; the law's one row."""
    x = _logits(case, rng)
    probs = torch.softmax(x, 1)
    if case.regime == "point":
        probs = torch.zeros_like(x)
        probs[torch.arange(case.tokens), torch.from_numpy(rng.integers(0, case.columns, case.tokens))] = 1.0
    elif case.regime == "refused":
        probs = torch.where(torch.arange(case.columns) < 16, 0.0625, 0.0).repeat(case.tokens, 1)
    elif case.regime == "above":
        probs *= 1 + 2.0**-20
    elif case.regime == "scaled":
        probs *= 1e-4
    elif case.regime == "boundary":  # a multiple of 2^-31, just below, just above, and half of it
        step = torch.tensor([1, 1 - 2.0**-24, 1 + 2.0**-23, 0.5])[torch.from_numpy(rng.integers(0, 4, x.shape))]
        probs = torch.from_numpy(rng.integers(0, 3, x.shape)) * 2.0**-31 * step
    elif case.regime == "law":
        probs = probs[:1].repeat(case.tokens, 1)
        probs[:, 1] = 0.0
    elif case.regime == "hostile":
        probs[0::8, 0], probs[1::8, 0], probs[2::8, 0], probs[3::8] = torch.nan, torch.inf, -1e-30, 0.0
        probs[4::8], probs[5::8, 0], probs[6::8] = 2.0**-33, 1e30, 0.0
        probs[6::8, case.columns - 1] = 1e-9
    seed, subsequence = _streams(case.tokens, rng, case.regime)
    streams = {"seed_t": seed, "subsequence_t": subsequence}
    return {"probs_tv": draws.strided(probs.float(), pad=8), **streams, "draw": Draw[case.draw]}


def draw_prefix(case: RowCase, rng: np.random.Generator) -> Inputs:
    """Rows with their softmax; top_p anywhere, on the sum of a prefix, tiny or out of reach, top_k around classes."""
    x, temperature = _logits(case, rng), _temperatures(case, rng)
    x = torch.where(torch.from_numpy(rng.random(x.shape)) < 0.1, -torch.inf, x) if case.regime == "ties" else x
    x[:, -1] = torch.where(x.isinf().all(1), 0.0, x[:, -1])
    probs = torch.softmax(x / temperature[:, None], 1)
    if case.regime == "dyadic":  # sums of a prefix that are exactly top_p
        power = torch.from_numpy(rng.permuted(np.tile(np.arange(case.columns), (case.tokens, 1)), axis=1))
        x, probs = power * -1.0, torch.exp2(-1.0 - power)
    top_p, top_k = torch.ones(case.tokens), torch.full((case.tokens,), -1)
    sums = probs.sort(1, descending=True).values.cumsum(1)
    for row in range(case.tokens):
        how = case.filters if case.filters != "mixed" else ("both", "top_p", "top_k", "none")[row % 4]
        n = int(rng.integers(case.columns))
        if how in ("top_p", "both"):
            top_p[row] = (sums[row, n], float(rng.random()), 1e-9, 0.999999, 0.0)[int(rng.integers(5))]
        if how in ("top_k", "both"):
            top_k[row] = (1, n + 1, max(case.columns - 1, 1), case.columns, 2**31 - 1)[int(rng.integers(5))]
    return {
        "logits_tv": draws.strided(x, pad=8),
        "probs_tv": draws.strided(probs, pad=4),
        "top_p_t": top_p.clamp(0, 1),
        "top_k_t": top_k,
    }


def draw_argmax(case: RowCase, rng: np.random.Generator) -> Inputs:
    """Rows with ties and hostile ones."""
    return {"logits_tv": draw_rows(case, rng)["logits_tv"]}


def draw_mask(case: RowCase, rng: np.random.Generator) -> Inputs:
    """A blacklist, rows that must not end, a grammar; some absent; bits behind the last column are set."""
    x = _logits(case, rng)
    absent = {"none": 7, "top_p": 3, "top_k": 5, "mixed": 0}[case.filters]
    words = -(-case.columns // 32)
    allowed = torch.from_numpy(rng.integers(-(2**31), 2**31, (case.tokens, words)).astype(np.int32))
    allowed[1:2] = 0
    return {
        "logits_tv": draws.strided(x, pad=8),
        "banned_v": None if absent & 1 else torch.from_numpy(rng.random(case.columns) < 0.2),
        "no_eos_t": None if absent & 2 else torch.from_numpy(rng.random(case.tokens) < 0.5),
        "allowed_ti": None if absent & 4 else allowed,
        "eos": min(1, case.columns - 1),
    }


def draw_ranked(case: RowCase, rng: np.random.Generator) -> Inputs:
    """Log-probabilities with ties and −inf."""
    return {"values_tv": draws.strided(_logits(case, rng), pad=8), "k": case.k}


def draw_smaller(case: RowCase, rng: np.random.Generator) -> Inputs:
    """Log-probabilities and a token of every row, or none."""
    logprobs = torch.log_softmax(_logits(case, rng), 1)
    token = torch.from_numpy(rng.integers(-1, case.columns, case.tokens))
    return {"logprobs_tv": draws.strided(logprobs, pad=8), "token_t": token}


STREAMS = StreamCase(rows=5)
ROWS = RowCase(tokens=4, columns=70)


def cases_words(full: bool) -> list[StreamCase]:
    """One word to several blocks, edge seeds, many rows, none."""
    found = [replace(STREAMS, count=9, regime=regime) for regime in (*REGIMES, "equal")]
    found += [replace(STREAMS, rows=9, count=n, regime="edges") for n in (1, 4, 13)]
    return found + [replace(STREAMS, rows=0), replace(STREAMS, rows=300, count=2 if not full else 4000)]


def cases_numbers(full: bool) -> list[StreamCase]:
    """Every use, edge positions."""
    found = [replace(STREAMS, rows=40, regime=regime) for regime in REGIMES]
    found += [replace(STREAMS, regime="edges", use=use.name) for use in DrawUse]
    return [*found, replace(STREAMS, rows=0), *([replace(STREAMS, rows=100000)] if full else [])]


def cases_rows(full: bool) -> list[RowCase]:
    """Regimes with filters and temperatures by row, both draws, hostile rows, widths around the lanes."""
    mixed = replace(ROWS, filters="mixed", temperature="mixed")
    found = [mixed, replace(mixed, tokens=2, regime="ties")]
    found += [replace(ROWS, temperature="mixed", tokens=2, regime=regime) for regime in REGIMES[1:]]
    found += [
        replace(mixed, tokens=2, columns=64, draw="ASCEND"),
        replace(ROWS, tokens=3, columns=192, draw="ASCEND", temperature="greedy", regime="ties"),
        replace(ROWS, tokens=2, regime="equal"),
        replace(ROWS, tokens=8, regime="hostile"),
        replace(ROWS, tokens=2, regime="huge"),
        replace(ROWS, tokens=2, temperature="greedy", regime="clear"),
        replace(ROWS, tokens=0),
        replace(ROWS, tokens=1, columns=1),
        replace(ROWS, tokens=1, columns=10048),
    ]
    if full:
        found += [replace(mixed, regime=regime) for regime in ("masked", "signed_zeros")]
        wide = replace(mixed, tokens=3)
        found += [replace(wide, columns=v) for v in (8, 31, 1000, 2049, 8191, 8193)]
        found += [replace(wide, columns=v, draw="ASCEND") for v in (4032, 8192)]
        found += [replace(ROWS, tokens=2, columns=129280, filters="top_k", temperature="mixed")]
    return list({case.id: case for case in found}.values())


def cases_probs(full: bool) -> list[RowCase]:
    """Regimes, totals of 2^31 and around it, weights around a step, hostile rows, both draws, the law of one row."""
    found = [replace(ROWS, regime=regime) for regime in (*REGIMES, "equal", "above", "scaled", "boundary")]
    found += [
        replace(ROWS, tokens=3, regime="ties"),
        replace(ROWS, tokens=6, columns=20, regime="refused"),
        replace(ROWS, columns=20, regime="point"),
        replace(ROWS, tokens=8, regime="hostile"),
        replace(ROWS, columns=192, draw="ASCEND"),
        replace(ROWS, tokens=2, columns=64, draw="ASCEND", regime="point"),
        replace(ROWS, tokens=0),
        replace(ROWS, tokens=1, columns=1),
        replace(ROWS, tokens=2, columns=10048),
        replace(ROWS, tokens=1, columns=8192, draw="ASCEND"),
        replace(ROWS, tokens=2000, columns=16, regime="law"),
        replace(ROWS, tokens=2000, columns=64, regime="law", draw="ASCEND"),
    ]
    if full:
        found += [replace(ROWS, tokens=4, columns=v) for v in (8, 31, 1024, 2049, 8191, 8193, 129280)]
        found += [replace(ROWS, tokens=4, columns=v, draw="ASCEND") for v in (4032, 8256, 129280)]
        found += [replace(ROWS, tokens=400, columns=8, regime="point")]
    return list({case.id: case for case in found}.values())


def cases_prefix(full: bool) -> list[RowCase]:
    """Regimes with every filter, ties and signed zeros, greedy rows, one column, two widths of the search."""
    mixed = replace(ROWS, filters="mixed")
    found = [mixed, *(replace(mixed, tokens=2, regime=r) for r in (*REGIMES[1:], "masked", "signed_zeros"))]
    found += [
        replace(mixed, tokens=3, regime="ties"),
        replace(mixed, tokens=8, regime="ties"),
        replace(mixed, tokens=2, regime="zeros"),
        replace(mixed, columns=20, filters="top_p", regime="dyadic"),
        replace(mixed, temperature="greedy"),
        replace(ROWS, filters="top_p"),
        replace(ROWS, filters="top_k"),
        replace(mixed, tokens=2, columns=1),
        replace(mixed, tokens=0),
        replace(mixed, tokens=1, columns=700, regime="ties"),
    ]
    if full:
        found += [replace(mixed, tokens=12, columns=v, regime=r) for v in (512, 513, 1500) for r in ("ties", "flat")]
        found += [replace(ROWS, tokens=1, columns=129280, filters="top_p", regime="flat")]
    return list({case.id: case for case in found}.values())


def cases_argmax(full: bool) -> list[RowCase]:
    """Regimes, ties across the lanes, hostile rows."""
    found = [replace(ROWS, regime=regime) for regime in (*REGIMES, "ties", "signed_zeros", "masked")]
    found += [
        replace(ROWS, tokens=9, regime="hostile"),
        replace(ROWS, tokens=0),
        replace(ROWS, tokens=2, columns=1),
        replace(ROWS, tokens=2, columns=9000, regime="ties"),
    ]
    return found + ([replace(ROWS, tokens=3, columns=129280, regime="ties")] if full else [])


def cases_mask(full: bool) -> list[RowCase]:
    """Which masks are there; widths around a word of bits."""
    found = [replace(ROWS, filters="mixed", regime=regime) for regime in REGIMES]
    found += [replace(ROWS, filters=how) for how in ("none", "top_p", "top_k")]
    found += [replace(ROWS, filters="mixed", columns=v) for v in (1, 31, 32, 33)]
    return [*found, replace(ROWS, filters="mixed", tokens=0), *([replace(ROWS, columns=129280)] if full else [])]


def cases_ranked(full: bool) -> list[RowCase]:
    """Regimes with ties, more places than columns."""
    found = [replace(ROWS, regime=regime) for regime in (*REGIMES, "ties", "masked", "signed_zeros", "zeros")]
    found += [replace(ROWS, columns=3, k=7, regime="ties"), replace(ROWS, k=1), replace(ROWS, tokens=0)]
    return found + ([replace(ROWS, tokens=2, columns=129280, k=1000, regime="ties")] if full else [])


def cases_smaller(full: bool) -> list[RowCase]:
    """Regimes with ties."""
    found = [replace(ROWS, tokens=12, regime=regime) for regime in (*REGIMES, "ties", "zeros", "masked")]
    found += [replace(ROWS, tokens=0), replace(ROWS, tokens=3, columns=1), replace(ROWS, tokens=2, columns=9000)]
    return found + ([replace(ROWS, tokens=2, columns=129280, regime=r) for r in ("ties", "flat")] if full else [])


def without_garbage(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows alone, in sub-batches, permuted: where NaN is no input."""
    yield from (v for v in batch_invariant(inputs, context) if "NaN" not in v.label)


def other_parameters(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """A row beside mates with other seeds and parameters, then beside mates that cannot be drawn from (U66)."""
    keep = int(context.rng.integers(len(inputs["seed_t"])))

    def kept(outputs: Outputs) -> Outputs:
        return {name: x[keep : keep + 1] for name, x in outputs.items()}

    others = {"seed_t": 42, "subsequence_t": 0, "temperature_t": 0.7, "top_p_t": 0.3, "top_k_t": 1}
    for label, changes in (("other parameters", others), ("bad parameters", others | {"top_k_t": 0, "top_p_t": -1.0})):
        changed = dict(inputs)
        for name in changes.keys() & inputs.keys():
            changed[name] = torch.full_like(inputs[name], changes[name])
            changed[name][keep] = inputs[name][keep]
        yield Variant(
            label=f"row {keep} beside mates with {label}",
            calls=(changed,),
            join=lambda results: kept(results[0]),
            expect=kept,
        )


def few(case: Any) -> bool:
    """Relations make many calls: they run on one case, whose rows differ in everything and are full of ties."""
    if isinstance(case, StreamCase):
        return case.rows == 5 and case.regime in ("mean1", "file")
    return 2 <= case.tokens <= 4 and case.columns <= 100 and case.regime in ("ties", "file")


def narrow_row(case: Any) -> str | None:
    """What an interpreter can do in seconds."""
    if case.tokens > 100:
        return f"{case.tokens} rows take the interpreter minutes: the torch form draws them"
    if case.columns > 20000:
        return f"{case.columns} columns take the interpreter minutes: a device runs them"
    return None


def prefix_sum(case: object) -> str | None:
    """No case of these runs lowered on a CPU."""
    return "a prefix sum stays a call of the chip's library, which the CPU does not have"


def _relations(*more: Relation, garbage: bool = True) -> tuple[Relation, ...]:
    return (
        Relation(name="batch_invariant", axis="rows", only=few, hook=None if garbage else without_garbage),
        Relation(name="run_to_run", axis="repeats", only=few),
        *more,
    )


def _in_torch(function: str) -> tuple[Candidate, ...]:
    return (Candidate(name="vectorised", function=function),)


def _candidates(torch_form: str, kernel: str, **declines: Any) -> tuple[Candidate, ...]:
    return *_in_torch(torch_form), Candidate(name="triton", function=kernel, **declines)


MATES = Relation(name="causality", axis="parameters of the other rows", hook=other_parameters, only=few)
STREAM_ROWS = {"seed_t": 0, "subsequence_t": 0}

WORDS = Op(
    name="random_words",
    reference="deeptwin.reference.philox:random_words",
    outputs=(Output(name="words_ti", rule=Bitwise(), dtype=torch.int64),),
    cases=cases_words,
    draw=draw_words,
    rows=STREAM_ROWS,
    out_rows={"words_ti": 0},
    relations=_relations(MATES),
    candidates=_candidates(
        "deeptwin.optimized.sampling:random_words_vectorised",
        "deeptwin.optimized.sampling:random_words_triton",
    ),
    builds=(
        BuildCase(
            name="n8",
            kernel="deeptwin.kernels.triton_ops.sampling:_random_words",
            launch="deeptwin.parity.builds.launches.sampling:words",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("words_of_seven_rounds", "R11", "seven rounds instead of ten"),
        _mutant("words_of_the_low_product", "R11", "the low word of a product stands where the high one belongs"),
        _mutant("words_of_a_swapped_key", "U68", "upper and lower half of the seed are exchanged"),
        _mutant("words_of_half_a_seed", "U68", "only 32 bits of the seed are used"),
        _mutant("words_without_a_seed", "U68", "the seed is ignored"),
        _mutant("words_by_place_in_the_batch", "U66", "one generator serves the batch: words depend on the mates"),
        _mutant("words_of_one_block", "U91", "the counter stands still: every four words are the same four"),
        _mutant("words_of_the_wide_function", "R11", "Philox of 64-bit words, as NumPy's generator has it"),
        _mutant("words_with_the_number_below", "R11", "the stream number stands in the low words of the counter"),
    ),
    controls=(_control("right_words"),),
    golden=lambda: [replace(STREAMS, rows=9, count=5, regime="edges")],
)

UNIFORMS = Op(
    name="uniforms",
    reference="deeptwin.reference.philox:uniforms",
    outputs=(Output(name="uniform_t", rule=Bitwise(), dtype=torch.float32),),
    cases=lambda full: [replace(STREAMS, rows=40, regime=r) for r in (*REGIMES, "edges")] + [replace(STREAMS, rows=0)],
    draw=draw_uniforms,
    rows=STREAM_ROWS,
    out_rows={"uniform_t": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=lambda case: case.regime == "normal"),),
    candidates=_in_torch("deeptwin.optimized.sampling:uniforms_vectorised"),
    mutants=(
        _mutant("uniforms_from_zero", "R16", "the half step is not added: 0 can be drawn"),
        _mutant("uniforms_of_24_bits", "R16", "the upper 24 bits of the word, as other libraries take them"),
        _mutant("uniforms_of_the_second_word", "R16", "the second word of the stream"),
    ),
    controls=(_control("right_uniforms"),),
    golden=lambda: [replace(STREAMS, rows=9, regime="edges")],
)

NUMBERS = Op(
    name="subsequences",
    reference="deeptwin.reference.philox:subsequences",
    outputs=(Output(name="number_t", rule=Bitwise(), dtype=torch.int64),),
    cases=cases_numbers,
    draw=draw_numbers,
    rows={"position_t": 0, "row_t": 0},
    out_rows={"number_t": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=lambda case: case.regime == "normal"),),
    candidates=_in_torch("deeptwin.optimized.sampling:subsequences_vectorised"),
    mutants=(
        _mutant("numbers_without_the_row", "U90", "rows of a verification share the words of their position"),
        _mutant("numbers_without_the_use", "U66", "the acceptance and the token after it use the same words"),
        _mutant("numbers_of_positions_one_early", "U61", "the position is that of the token before"),
        _mutant("numbers_by_a_small_stride", "U90", "row 1 at position P meets row 0 at position P + 1"),
    ),
    controls=(_control("right_numbers"),),
    golden=lambda: [replace(STREAMS, regime="edges", use="ACCEPT")],
)

SEEDS = Op(
    name="sample_seeds",
    reference="deeptwin.reference.philox:sample_seeds",
    outputs=(Output(name="seed_bi", rule=Bitwise(), dtype=torch.int64),),
    cases=lambda full: (
        [replace(STREAMS, count=8, regime=r) for r in (*REGIMES, "edges", "equal")]
        + [replace(STREAMS, rows=0), replace(STREAMS)]
    ),
    draw=draw_seeds,
    rows={"seed_b": 0},
    out_rows={"seed_bi": 0},
    relations=(
        Relation(name="batch_invariant", axis="rows", only=few),
        Relation(name="chunk_invariant", axis="workers", hook=row_chunks, only=few),
    ),
    candidates=_in_torch("deeptwin.optimized.sampling:sample_seeds_vectorised"),
    mutants=(
        _mutant("seeds_all_the_same", "U65", "every sample has the seed of the request"),
        _mutant("seeds_of_forty_two", "U65", "a fixed default takes the place of the seed"),
        _mutant("seeds_by_the_worker", "U67", "samples are numbered within the share of a worker"),
        _mutant("seeds_one_apart", "U67", "sample 1 of seed 7 meets sample 0 of seed 8"),
    ),
    controls=(_control("right_seeds"),),
    golden=lambda: [replace(STREAMS, count=3, regime="edges")],
)

PROBS = Op(
    name="sample_probs",
    reference="deeptwin.reference.sampling:sample_probs",
    outputs=(
        Output(name="token_t", rule=Bitwise(), dtype=torch.int64),
        Output(name="error_t", rule=Bitwise(), dtype=torch.int32),
    ),
    cases=cases_probs,
    draw=draw_probs,
    rows={"probs_tv": 0, **STREAM_ROWS},
    out_rows={"token_t": 0, "error_t": 0},
    relations=_relations(MATES),
    candidates=_candidates(
        "deeptwin.optimized.sampling:sample_probs_vectorised",
        "deeptwin.optimized.sampling:sample_probs_triton",
        interpreter_declines=narrow_row,
        lowered_declines=prefix_sum,
    ),
    builds=(
        BuildCase(
            name="v129280",
            kernel="deeptwin.kernels.triton_ops.sampling:_sample_probs",
            launch="deeptwin.parity.builds.launches.sampling:probs",
            expect=NO_PRODUCT,
        ),
        BuildCase(
            name="v129280-ascend",
            kernel="deeptwin.kernels.triton_ops.sampling:_sample_probs",
            launch="deeptwin.parity.builds.launches.sampling:probs_ascend",
            expect=VECTOR,
        ),
    ),
    peers=(
        Peer(
            name="numpy-choice",
            function="deeptwin.parity.peers.sampling:numpy_choice",
            needs=(),
            explains="numpy's own sampler of a discrete law, with other random numbers: both must have the law",
            rules={"token_t": Law(probs="probs_tv")},
            only=lambda case: case.regime == "law",
        ),
    ),
    mutants=(
        _mutant("draw_of_eight_words", "U91", "after eight refused words the next is taken as it is"),
        _mutant("draw_without_refusal", "U91", "the first word modulo the total, whatever it is"),
        _mutant("draw_in_the_order_of_ids", "R16", "the running sum goes over ids: the law is right, the token is not"),
        _mutant("draw_at_the_end_of_a_lane", "R16", "a number that equals the end of a lane still falls into it"),
        _mutant("draw_in_1024_lanes", "R16", "lanes of another width"),
        _mutant("draw_by_rounded_weights", "R16", "weights are rounded to the nearest"),
        _mutant("draw_by_a_float_uniform", "R16", "a float uniform number times the total"),
        _mutant("draw_by_place_in_the_batch", "U66", "words depend on the row's place in the batch"),
        _mutant("draw_of_the_first_seed", "U68", "every row draws with the seed of the first"),
        _mutant("draw_of_a_bad_batch", "U75", "one row that cannot be drawn from takes the whole batch down"),
        _mutant("draw_from_nothing", "U47", "a row without weight gives token 0"),
        _mutant("draw_high_word_first", "R16", "the Ascend draw takes the high word first"),
        _mutant("draw_on_the_other_platform", "R16", "the draw of one platform where the other is asked for"),
    ),
    controls=(_control("right_draw"),),
    golden=lambda: [
        replace(ROWS, tokens=12, columns=20, regime="point"),
        replace(ROWS, tokens=6, columns=64, draw="ASCEND"),
        replace(ROWS, tokens=8, columns=40, regime="hostile"),
    ],
)

PREFIX = Op(
    name="keep_prefix",
    reference="deeptwin.reference.sampling_filter:keep_prefix",
    outputs=(Output(name="kept_tv", rule=Bitwise(), dtype=torch.bool),),
    cases=cases_prefix,
    draw=draw_prefix,
    rows={"logits_tv": 0, "probs_tv": 0, "top_p_t": 0, "top_k_t": 0},
    out_rows={"kept_tv": 0},
    relations=_relations(garbage=False),
    candidates=_candidates(
        "deeptwin.optimized.sampling:keep_prefix_vectorised",
        "deeptwin.optimized.sampling:keep_prefix_triton",
        interpreter_declines=narrow_row,
        lowered_declines=prefix_sum,
    ),
    builds=(
        BuildCase(
            name="v129280",
            kernel="deeptwin.kernels.triton_ops.sampling:_keep_prefix",
            launch="deeptwin.parity.builds.launches.sampling:prefix",
            expect=NO_PRODUCT,  # its search is the one of the whole row, which has the Ascend builds
        ),
    ),
    peers=(
        Peer(
            name="transformers-warpers",
            function="deeptwin.parity.peers.sampling:transformers_warpers",
            needs=("transformers",),
            explains="TopPLogitsWarper and TopKLogitsWarper in fp64; one filter active, nothing ties, and no sum "
            "equals top_p (they remove a token whose predecessors have just that mass, the source keeps it)",
            only=lambda case: case.filters in ("top_p", "top_k") and case.regime == "normal",
        ),
    ),
    mutants=(
        _mutant("prefix_renormalised_between", "R16", "top-p is measured on what top-k has left"),
        _mutant("prefix_stops_at_top_p", "R16", "a token is removed as soon as the mass before it equals top_p"),
        _mutant("prefix_with_all_ties", "U45", "the whole class of equal logits is kept"),
        _mutant("prefix_with_higher_ties", "U45", "of equal logits the higher ids are kept"),
        _mutant("prefix_with_zeros_by_sign", "U89", "−0 is a class below +0"),
        _mutant("prefix_by_float_sums", "R16", "running sums in fp32, target top_p"),
        _mutant("prefix_one_short", "R16", "the token that reaches the target is removed too"),
        _mutant("prefix_may_be_empty", "U47", "a tiny top_p leaves nothing"),
        _mutant("prefix_of_the_first_parameters", "U09", "every row has the parameters of the first"),
        _mutant("prefix_of_the_union", "R16", "a token is kept if one of the filters keeps it"),
    ),
    controls=(_control("right_prefix"),),
    golden=lambda: [replace(ROWS, tokens=8, columns=40, filters="mixed", regime=r) for r in ("ties", "signed_zeros")],
)


def own_token(arguments: dict[str, Any], outputs: Mapping[str, Tensor], num: Numerics) -> Tensor:
    """The token that the definition draws from the probabilities that a candidate stored."""
    streams = arguments["seed_t"], arguments["subsequence_t"]
    return sample_probs(outputs["probs_tv"], *streams, draw=arguments["draw"])[0]


def own_probs(arguments: dict[str, Any], u: float) -> tuple[Tensor, Tensor]:
    """exp of the log-probabilities that a candidate stored; an error grows with the argument, and may be flushed."""
    logprobs = arguments["logprobs_tv"].double()
    prob = torch.exp(logprobs)
    slack = u * (4 + torch.where(prob > 0, logprobs.abs(), 0.0))
    low = torch.where(prob < 2.0**-125, 0.0, prob * (1 - slack))
    return low, torch.where(prob < 2.0**-125, 2.0**-125, prob * (1 + slack)).masked_fill(prob == 0, 0.0)


LOGITS = Op(
    name="sample_logits",
    reference="deeptwin.reference.sampling:sample_logits",
    outputs=(
        Output(name="token_t", rule=OfStored(rule=Bitwise(), again=own_token), dtype=torch.int64),
        Output(name="error_t", rule=Bitwise(), dtype=torch.int32),
        Output(name="logprobs_tv", rule=LOG_PROBS, dtype=torch.float32),
        Output(name="probs_tv", rule=Within(u=2.0**-23, interval=own_probs), dtype=torch.float32),
    ),
    cases=cases_rows,
    draw=draw_rows,
    rows={"logits_tv": 0, "temperature_t": 0, "top_p_t": 0, "top_k_t": 0, **STREAM_ROWS},
    out_rows={"token_t": 0, "error_t": 0, "logprobs_tv": 0, "probs_tv": 0},
    relations=_relations(MATES),
    candidates=_candidates(
        "deeptwin.optimized.sampling:sample_logits_vectorised",
        "deeptwin.optimized.sampling:sample_logits_triton",
        interpreter_declines=narrow_row,
        lowered_declines=prefix_sum,
    ),
    builds=(
        BuildCase(
            name="v129280",
            kernel="deeptwin.kernels.triton_ops.sampling:_sample_logits",
            launch="deeptwin.parity.builds.launches.sampling:logits",
            expect=NO_PRODUCT,
        ),
        BuildCase(
            name="v1024-ascend",
            kernel="deeptwin.kernels.triton_ops.sampling:_sample_logits",
            launch="deeptwin.parity.builds.launches.sampling:logits_ascend",
            expect=VECTOR,
        ),
    ),
    mutants=(
        _mutant("row_without_a_temperature", "R16", "the temperature is ignored"),
        _mutant("row_cooled_after_the_filters", "R16", "the filters see the softmax at temperature 1"),
        _mutant("row_in_base_two", "U02", "exponentials and logarithms of base 2"),
        _mutant("row_not_renormalised", "R16", "what is kept keeps its log-probability"),
        _mutant(
            "row_greedy_by_argmax", "R16", "a temperature of 1e-5 takes the lowest of the largest: no coin is flipped"
        ),
        _mutant("row_with_the_first_temperature", "U09", "every row has the temperature of the first"),
        _mutant("row_with_the_first_seed", "U68", "every row draws with the seed of the first"),
        _mutant("row_of_a_bad_batch", "U75", "one bad row takes the whole batch down"),
        _mutant("row_of_nan_as_zero", "U77", "NaN counts as a logit of zero"),
        _mutant("row_without_a_check", "U77", "a top_p above one is taken for no filter"),
        _mutant("row_by_gumbel", "R16", "Gumbel-max: the law is right, the token is not"),
        _mutant("row_of_unfiltered_words", "R16", "the token is drawn before the filters"),
    ),
    controls=(_control("right_row"), _control("right_row_forwards"), _control("right_row_backwards")),
    golden=lambda: [
        replace(ROWS, tokens=8, columns=40, filters="mixed", temperature="mixed"),
        replace(ROWS, tokens=8, columns=64, draw="ASCEND", regime="ties", temperature="greedy"),
    ],
)

ARGMAX = Op(
    name="argmax_tokens",
    reference="deeptwin.reference.sampling:argmax_tokens",
    outputs=(
        Output(name="token_t", rule=Bitwise(), dtype=torch.int64),
        Output(name="error_t", rule=Bitwise(), dtype=torch.int32),
    ),
    cases=cases_argmax,
    draw=draw_argmax,
    rows={"logits_tv": 0},
    out_rows={"token_t": 0, "error_t": 0},
    relations=_relations(),
    candidates=_candidates(
        "deeptwin.optimized.sampling:argmax_tokens_vectorised",
        "deeptwin.optimized.sampling:argmax_tokens_triton",
        interpreter_declines=narrow_row,
    ),
    builds=(
        BuildCase(
            name="v129280",
            kernel="deeptwin.kernels.triton_ops.sampling:_argmax",
            launch="deeptwin.parity.builds.launches.sampling:argmax",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("argmax_takes_the_last", "U45", "of equal logits the highest id"),
        _mutant("argmax_takes_nan", "U18", "NaN is the largest"),
        _mutant("argmax_of_an_empty_row", "U47", "a row of −inf gives token 0"),
        _mutant("argmax_orders_zeros", "U89", "+0 is larger than −0"),
    ),
    controls=(_control("right_argmax"),),
    golden=lambda: [replace(ROWS, tokens=8, columns=20, regime="hostile")],
)

MASK = Op(
    name="mask_logits",
    reference="deeptwin.reference.sampling_rows:mask_logits",
    outputs=(Output(name="masked_tv", rule=Bitwise(), dtype=torch.float32),),
    cases=cases_mask,
    draw=draw_mask,
    rows={"logits_tv": 0, "no_eos_t": 0, "allowed_ti": 0},
    out_rows={"masked_tv": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=lambda case: case.regime == "flat"),),
    candidates=_in_torch("deeptwin.optimized.sampling:mask_logits_vectorised"),
    mutants=(
        _mutant("mask_of_large_numbers", "R5", "−1e9 instead of −inf"),
        _mutant("mask_from_the_upper_bit", "U57", "bit 31 of a word belongs to its first column"),
        _mutant("mask_of_the_first_row", "U09", "every row has the mask of the first"),
        _mutant("mask_of_every_end", "U09", "eos is removed from every row as soon as it is from one"),
        _mutant("mask_without_a_blacklist", "U39", "the blacklist is ignored where there is a grammar"),
    ),
    controls=(_control("right_mask"),),
    golden=lambda: [replace(ROWS, tokens=3, columns=40, filters="mixed")],
)

RANKED = Op(
    name="ranked",
    reference="deeptwin.reference.sampling_rows:ranked",
    outputs=(
        Output(name="value_tk", rule=Bitwise(), dtype=torch.float32),
        Output(name="id_tk", rule=Bitwise(), dtype=torch.int64),
    ),
    cases=cases_ranked,
    draw=draw_ranked,
    rows={"values_tv": 0},
    out_rows={"value_tk": 0, "id_tk": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=few, hook=without_garbage),),
    candidates=_in_torch("deeptwin.optimized.sampling:ranked_vectorised"),
    mutants=(
        _mutant("ranked_by_id", "U46", "the selection comes out in the order of ids"),
        _mutant("ranked_ties_from_above", "U45", "of equal values the higher id first"),
        _mutant("ranked_zeros_by_sign", "U89", "+0 before −0"),
        _mutant("ranked_filled_with_zeros", "U19", "places behind the last column hold id 0"),
    ),
    controls=(_control("right_ranking"),),
    golden=lambda: [replace(ROWS, tokens=3, columns=12, k=14, regime="ties")],
)

SMALLER = Op(
    name="smaller_mass",
    reference="deeptwin.reference.sampling_rows:smaller_mass",
    outputs=(Output(name="mass_t", rule=LSE, dtype=torch.float32),),
    cases=cases_smaller,
    draw=draw_smaller,
    rows={"logprobs_tv": 0, "token_t": 0},
    out_rows={"mass_t": 0},
    relations=(Relation(name="batch_invariant", axis="rows", only=lambda case: case.tokens == 12),),
    candidates=_in_torch("deeptwin.optimized.sampling:smaller_mass_vectorised"),
    mutants=(
        _mutant("smaller_without_itself", "R16", "the token's own probability is not counted"),
        _mutant("smaller_with_all_ties", "U45", "of equal log-probabilities all are counted"),
        _mutant("smaller_of_no_token", "U40", "token −1 is the last column"),
        _mutant("smaller_is_larger", "R16", "the mass above the token"),
    ),
    controls=(_control("right_mass"),),
    golden=lambda: [replace(ROWS, tokens=8, columns=20, regime="ties")],
)

CARD = Card(
    component="sampling",
    summary="deterministic sampling: Philox streams, top-p and top-k in whole numbers, fixed-point draws, greedy rows",
    contract={
        "dtypes": "logits, probabilities, temperature and top_p fp32; seeds (bits of 64), stream numbers, top_k int64",
        "order": "masks; temperature; top-p and top-k on the full softmax, intersected; renormalise; draw",
        "ties": "logit descending, id ascending; −0 equals +0",
        "draw": "weights floor(p * 2^31); lanes of 2048 (Ascend 4096); given fp32 p the token is defined to the bit",
        "errors": "a row that cannot be drawn has token −1 and a code, log-probabilities −inf, and disturbs no other",
        "greedy": "temperature 1e-5 (draws among logits closer than 2.149e-4), or argmax_tokens (the lowest id)",
        "platforms": "the two draws give different tokens for one seed, and one law",
    },
    ops=(WORDS, UNIFORMS, NUMBERS, SEEDS, PROBS, PREFIX, LOGITS, ARGMAX, MASK, RANKED, SMALLER),
    equivalents=(
        Equivalent(
            name="a histogram, a sort or any other way to the stopping class",
            reason="the kept set is determined by whole numbers and one quotient",
        ),
        Equivalent(
            name="the order in which masks are applied",
            reason="each of them only writes −inf",
        ),
        Equivalent(
            name="the sum of a uniform number by a fused multiply-add",
            reason="the word is rounded to fp32 first and its product with 2^-32 is exact",
        ),
    ),
)
