"""How the balance without an auxiliary loss is checked: counts and biases, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from .. import draws
from ..card import Card, Equivalent, Inputs, Op, Output, Peer, Relation, variants
from ..relations import Context, Variant, row_chunks
from ..rules import Bitwise

_mutant, _control = variants("load_bias")
PEERS = "deeptwin.parity.peers.load_bias"


@dataclass(frozen=True, kw_only=True)
class LoadCase:
    """`tokens` rows of `topk` slots over `experts`; a share of the slots is padding."""

    tokens: int
    topk: int = 6
    experts: int = 24
    regime: str = "normal"  # normal, hot (one expert has most), even (each the same), padding

    @property
    def id(self) -> str:
        return f"t{self.tokens}-k{self.topk}-e{self.experts}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class BiasCase:
    """Counts over `experts`: random, one hot, all equal, equal but for one, none at all."""

    experts: int
    speed: float = 0.001
    disabled: bool = False
    regime: str = "normal"  # normal, hot, even, nearly_even, none, huge

    @property
    def id(self) -> str:
        return f"e{self.experts}-speed{self.speed:g}{'-disabled' if self.disabled else ''}-{self.regime}"


def draw_load(case: LoadCase, rng: np.random.Generator) -> Inputs:
    """Distinct experts for a token; padding slots anywhere in a row."""
    t, k, e = case.tokens, case.topk, case.experts
    rows = [draws.distinct(rng, e, k) for _ in range(t)]
    idx = np.stack(rows) if t else np.zeros((0, k), dtype=np.int64)
    if case.regime == "hot" and t:
        idx[:, 0] = np.where((idx == 1).any(1), idx[:, 0], 1)
    elif case.regime == "even":
        idx = np.resize(np.arange(e), (t, k))
    elif case.regime == "padding":
        idx[rng.random(idx.shape) < 0.4] = -1
    return {"idx_tk": torch.from_numpy(idx), "num_experts": e}


def draw_bias(case: BiasCase, rng: np.random.Generator) -> Inputs:
    """Biases of both signs and of a size beside which the speed is small."""
    e = case.experts
    count = rng.integers(0, 60, e)
    if case.regime == "hot":
        count = np.where(np.arange(e) == e - 1, 5000, 1)
    elif case.regime in ("even", "nearly_even"):
        count = np.full(e, 7)
        count[0] += case.regime == "nearly_even"
    elif case.regime == "none":
        count[:] = 0
    elif case.regime == "huge":
        # counts that fp32 cannot tell from their mean
        count = np.full(e, 2**40) + np.arange(e) % 3
    bias = draws.normal(rng, e, dtype=torch.float32, scale=0.7)
    if case.disabled:
        bias[1::3] = -torch.inf
    return {"bias_e": bias, "count_e": torch.from_numpy(count.astype(np.int64)), "speed": case.speed}


def cases_load(full: bool) -> list[LoadCase]:
    """V3 and V4-Pro, padding, one hot expert, no tokens."""
    small = LoadCase(tokens=17)
    found = [replace(small, regime=r) for r in ("normal", "hot", "even", "padding")]
    found += [replace(small, tokens=0), LoadCase(tokens=1, topk=1, experts=1), LoadCase(tokens=40, topk=8, experts=256)]
    return [*found, LoadCase(tokens=4096, experts=384, regime="padding")] if full else found


def cases_bias(full: bool) -> list[BiasCase]:
    """Every regime, both released sizes, other speeds and the end of training."""
    small = BiasCase(experts=24)
    found = [replace(small, regime=r) for r in ("normal", "hot", "even", "nearly_even", "none", "huge")]
    found += [BiasCase(experts=256), BiasCase(experts=1), replace(small, disabled=True), replace(small, speed=0.0)]
    found += [replace(small, speed=0.1, experts=7), replace(small, speed=2.0**-30)]
    return (
        [*found, *(BiasCase(experts=384, regime=r, disabled=True) for r in ("normal", "hot", "huge"))]
        if full
        else found
    )


# relation hooks


def counts_add_up(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The counts of ranks or chunks add up to those of the batch; the order of tokens does not matter."""
    for variant in row_chunks(inputs, context):
        yield replace(variant, join=lambda results: {"count_e": torch.stack([r["count_e"] for r in results]).sum(0)})
    order = torch.from_numpy(context.rng.permutation(len(inputs["idx_tk"])))
    yield Variant(label="tokens permuted", calls=(inputs | {"idx_tk": inputs["idx_tk"][order]},))


def padding_is_absent(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows of empty slots count nothing."""
    idx = inputs["idx_tk"]
    empty = idx.new_full((3, idx.shape[1]), -1)
    yield Variant(label="three padding rows", calls=(inputs | {"idx_tk": torch.cat([empty, idx, empty])},))


def renumbered(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Experts renumbered: every bias moves as before."""
    order = torch.from_numpy(context.rng.permutation(len(inputs["bias_e"])))
    call = inputs | {name: inputs[name][order] for name in ("bias_e", "count_e")}
    yield Variant(
        label="experts renumbered",
        calls=(call,),
        join=lambda results: {"new_bias_e": results[0]["new_bias_e"][order.argsort()]},
    )


def times_tokens(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Only which experts have more than their share counts, not how many tokens there were."""
    for factor in (2, 1000):
        yield Variant(label=f"{factor} times the tokens", calls=(inputs | {"count_e": inputs["count_e"] * factor},))


CARD = Card(
    component="load_bias",
    summary="balance of experts without an auxiliary loss: loads of a batch and the sign rule",
    contract={
        "rule": "the sign of mean load minus own load, times a fixed speed; exactly the mean moves nothing",
        "comparison": "exact, in integers: count times experts against the sum of counts",
        "rounding": "the speed is an fp32 number; one addition in fp32",
        "training": "counts are those of the whole batch over all ranks; inference never moves a bias",
        "not defined": "V3's schedule of the speed and its sequence-wise loss are published in words only",
    },
    ops=(
        Op(
            name="expert_load",
            reference="deeptwin.reference.load_bias:expert_load",
            outputs=(Output(name="count_e", rule=Bitwise(), dtype=torch.int64),),
            cases=cases_load,
            draw=draw_load,
            rows={"idx_tk": 0},
            out_rows={},
            relations=(
                Relation(name="chunk_invariant", axis="ranks, chunks and order of tokens", hook=counts_add_up),
                Relation(name="masked_equals_absent", axis="padding rows", hook=padding_is_absent),
            ),
            peers=(Peer(name="tally", function=f"{PEERS}:counted", needs=(), explains="a dictionary of counts"),),
            mutants=(
                _mutant("padding_counts_as_last", "U40", "an empty slot counts for an expert at the end"),
                _mutant("padding_counts_as_first", "U37", "an empty slot counts for expert 0"),
                _mutant("first_choice_alone", "R6", "only the first slot of a token counts"),
                _mutant("half_the_batch", "R6", "only the first half of the batch counts"),
            ),
            controls=(_control("right_load"),),
            golden=lambda: [LoadCase(tokens=9, experts=8, topk=3, regime="padding")],
        ),
        Op(
            name="update_bias",
            reference="deeptwin.reference.load_bias:update_bias",
            outputs=(Output(name="new_bias_e", rule=Bitwise(), dtype=torch.float32),),
            cases=cases_bias,
            draw=draw_bias,
            rows={},
            out_rows={},
            relations=(
                Relation(name="head_permutation", axis="experts", hook=renumbered),
                Relation(name="scale_equivariance", axis="tokens", hook=times_tokens),
            ),
            peers=(
                Peer(
                    name="exact-mean",
                    function=f"{PEERS}:against_the_mean",
                    needs=(),
                    explains="the mean as a fraction, expert by expert",
                ),
            ),
            mutants=(
                _mutant("direction_reversed", "R6", "an overloaded expert gains"),
                _mutant("proportional", "R6", "the step is proportional to the excess, as one public port has it"),
                _mutant("balanced_goes_up", "R6", "an expert with exactly its share gains"),
                _mutant("balanced_goes_down", "R6", "an expert with exactly its share loses"),
                _mutant("mean_in_integers", "R6", "the mean is rounded down"),
                _mutant("mean_in_fp32", "R6", "counts and mean are compared in fp32"),
                _mutant("only_overloaded", "R6", "an expert with less than its share gains nothing"),
                _mutant("half_speed", "R6", "half of the speed"),
                _mutant("speed_fixed", "U49", "the speed argument is not read"),
                _mutant("against_median", "R6", "the median stands for the mean"),
                _mutant("centred", "R6", "biases are centred after the step"),
                _mutant("bias_in_bf16", "U17", "the bias is kept in bf16"),
            ),
            controls=(_control("right_update"),),
            golden=lambda: [BiasCase(experts=9), BiasCase(experts=8, regime="nearly_even", disabled=True)],
        ),
    ),
    equivalents=(
        Equivalent(
            name="a constant on all biases", reason="the ranking of a router does not see it, up to its rounding"
        ),
    ),
)
