"""How the training loss of a drafter and the measures of its confidences are checked: against torch's own losses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from deeptwin.reference.config import DraftLossConfig

from .. import draws
from ..card import REGIMES, Card, Equivalent, Inputs, Op, Output, Peer, variants
from ..rules import Close

_mutant, _control = variants("dspark_loss")
F32 = torch.float32


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """`blocks` of `draft` positions over `vocab` tokens, some of them not valid; `world` ranks."""

    blocks: int
    draft: int = 5
    vocab: int = 17
    decay: float = 4.0
    valid: float = 0.7  # share of valid positions
    world: int = 1
    regime: str = "normal"

    @property
    def id(self) -> str:
        sizes = f"b{self.blocks}-j{self.draft}-v{self.vocab}"
        return f"{sizes}-decay{self.decay:g}-valid{self.valid:g}-w{self.world}-{self.regime}"


def draw_logits(case: LossCase, rng: np.random.Generator) -> Inputs:
    """Two sets of logits, the draft's a disturbed copy of the target's."""
    shape = (case.blocks * case.draft, case.vocab)
    target = draws.rows(rng, *shape, dtype=F32, regime=case.regime)
    draft = target + draws.normal(rng, *shape, dtype=F32, scale=0.5)
    view = (case.blocks, case.draft, case.vocab)
    return {"draft_bjv": draft.view(view), "target_bjv": target.view(view)}


def draw(case: LossCase, rng: np.random.Generator) -> Inputs:
    """Positions that are not valid hold NaN logits and ids outside the vocabulary."""
    shape = (case.blocks, case.draft)
    valid = torch.from_numpy(rng.random(shape) < case.valid)
    logits = draw_logits(case, rng)
    confidence = draws.normal(rng, *shape, dtype=F32, scale=3.0)
    confidence[~valid] = torch.nan
    for x in logits.values():
        x[~valid] = torch.nan
    token = torch.from_numpy(rng.integers(0, case.vocab, shape))
    token[~valid] = -7
    return {
        **logits,
        "confidence_bj": confidence,
        "token_bj": token,
        "valid_bj": valid,
        "config": DraftLossConfig(decay=case.decay),
        "ranks": (case.world, 3.25 * (case.world - 1)),
    }


def draw_confidences(case: LossCase, rng: np.random.Generator) -> Inputs:
    """Confidences on and beside the edges of bins, 0 and 1 among them, and acceptances that follow them."""
    shape = (case.blocks, case.draft)
    confidence = rng.random(shape) ** 0.3
    confidence[::3] = np.round(confidence[::3] * 20) / 20
    confidence[0, 0], confidence[-1, 0] = 0.0, 1.0
    accepted = rng.random(shape) < confidence**2
    return {"confidence_bj": torch.from_numpy(confidence.astype(np.float32)), "accepted_bj": torch.from_numpy(accepted)}


def cases(full: bool) -> list[LossCase]:
    """Every regime, one block, one position, several ranks, nothing valid."""
    small = LossCase(blocks=3)
    found = [replace(small, regime=r) for r in (*REGIMES, "huge")]
    found += [replace(small, blocks=1, draft=1, valid=1.0), replace(small, world=4), replace(small, valid=0.0)]
    found += [replace(small, decay=0.5, vocab=2)]
    return [*found, LossCase(blocks=16, draft=8, vocab=1000, world=8)] if full else found


def cases_labels(full: bool) -> list[LossCase]:
    """Every regime, and one token alone."""
    small = LossCase(blocks=3)
    return [*(replace(small, regime=r) for r in (*REGIMES, "zeros")), replace(small, vocab=1)]


def cases_metrics(full: bool) -> list[LossCase]:
    """Many samples and few."""
    return [LossCase(blocks=60), LossCase(blocks=9, draft=2)]


def golden() -> list[LossCase]:
    """Two small cases."""
    return [LossCase(blocks=2, draft=3, vocab=5), LossCase(blocks=2, draft=3, vocab=5, world=2)]


# fp64 arithmetic rounded once: two rounded fp32 numbers are 2^-24 apart
EXACT = Close(rtol=2.0**-22)

LOSS = Op(
    name="dspark_loss",
    reference="deeptwin.reference.dspark_loss:dspark_loss",
    outputs=(Output(name="loss", rule=EXACT, dtype=F32), Output(name="terms", rule=EXACT, dtype=F32)),
    cases=cases,
    draw=draw,
    rows={},
    out_rows={},
    peers=(
        Peer(
            name="torch",
            function="deeptwin.parity.peers.dspark_loss:torch_losses",
            needs=(),
            explains="the same averages over torch's own loss functions, in fp64",
            only=lambda case: case.valid in (0.0, 1.0) or case.regime != "huge",
        ),
    ),
    mutants=(
        _mutant("position_from_one", "U61", "the weight of position 0 is exp(-1 / decay)"),
        _mutant("half_distance", "R14", "L1 is half of the distance"),
        _mutant("label_of_whole_distance", "R14", "the label is 1 - the whole distance"),
        _mutant("entropy_of_target", "U49", "cross entropy of the target's distribution"),
        _mutant("local_denominator", "U67", "every rank divides by its own weights"),
        _mutant("denominator_counts", "U49", "the denominator counts valid positions"),
        _mutant("world_missing", "U67", "the mean over ranks is not scaled back"),
        _mutant("eps_large", "U39", "1e-2 is added to the weights"),
        _mutant("valid_ignored", "U75", "positions without a target count"),
        _mutant("last_position_left_out", "U26", "the last position of a block does not count"),
        _mutant("no_decay", "U49", "all positions weigh the same"),
        _mutant("decay_inverted", "U49", "exp(-j · decay)"),
        _mutant("confidence_as_probability", "U38", "the confidence logit goes through two sigmoids"),
        _mutant("factors_exchanged", "U49", "0.9 CE + 0.1 L1"),
    ),
    controls=(_control("right_loss"),),
    golden=golden,
)

LABELS = Op(
    name="accept_labels",
    reference="deeptwin.reference.dspark_loss:accept_labels",
    outputs=(Output(name="label_bj", rule=EXACT, dtype=F32),),
    cases=cases_labels,
    draw=draw_logits,
    rows={},
    out_rows={},
    peers=(
        Peer(
            name="overlap",
            function="deeptwin.parity.peers.dspark_loss:torch_labels",
            needs=(),
            explains="Σ min(p, q), the same number for distributions that sum to one",
        ),
    ),
    mutants=(
        _mutant("label_without_half", "R14", "1 - the whole distance"),
        _mutant("label_is_the_largest", "U49", "the target's probability of the draft's favourite token"),
        _mutant("label_in_bf16", "U17", "softmaxes are rounded to bf16"),
    ),
)

METRICS = Op(
    name="confidence_metrics",
    reference="deeptwin.reference.dspark_loss:confidence_metrics",
    outputs=(Output(name="metrics", rule=EXACT, dtype=F32),),
    cases=cases_metrics,
    draw=draw_confidences,
    rows={},
    out_rows={},
    peers=(
        Peer(
            name="pairs",
            function="deeptwin.parity.peers.dspark_loss:ranked_metrics",
            needs=(),
            explains="bins in a loop, and the area by counting pairs",
        ),
    ),
    mutants=(
        _mutant("not_cumulative", "U49", "predictions are single confidences"),
        _mutant("hits_not_of_prefix", "U49", "a position counts as accepted behind a rejection"),
        _mutant("bins_of_the_fit", "U49", "15 bins instead of 20"),
        _mutant("ties_count_whole", "U45", "a pair in one bin counts as ordered"),
    ),
    controls=(_control("right_metrics"),),
)

CARD = Card(
    component="dspark_loss",
    summary="what trains a block drafter and how its confidences are measured",
    contract={
        "dtypes": "logits of any float; everything returned is fp32",
        "rounding": "fp64 sums, one rounding each at return (no kernel stands behind it)",
        "weights": "valid · exp(-j / decay), j from 0: the config; the paper's text starts at 1",
        "denominator": "weights of all ranks + 1e-6; the sum is multiplied by the number of ranks",
        "L1": "the whole distance; the label takes half of it",
        "not valid": "what stands there is not read, NaN and ids outside the vocabulary included",
    },
    ops=(LOSS, LABELS, METRICS),
    equivalents=(
        Equivalent(name="BCE through log σ(x) and log σ(-x)", reason="the same function, up to its rounding"),
    ),
)
