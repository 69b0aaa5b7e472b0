"""What trains and measures a block drafter: its loss, the labels of its confidence head, and how these are judged.

Letters beside the project's own: b blocks, j positions of a block, n samples of a measurement. Distributions are
softmaxes of logits at temperature 1: p of the draft, q of the target.

Source: runtime.md section 1.2 (DeepSpec, modeling/dspark/loss.py and eval/; SGLang, dspark_sts_fit.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import expect_dtype, expect_in_range, expect_positive, expect_shape
from .config import DraftLossConfig
from .numerics import CONTRACT, Numerics

EPS = 1e-6  # added to the sum of the weights
CLAMP = 1e-8  # confidences are kept this far from 0 and 1, a draft probability this far from 0


def accept_labels(draft_bjv: Tensor, target_bjv: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """How probable it is that a position is accepted: what the confidence head learns.

    Math:
        c*[b, j] = clamp(1 - ½ Σ_v |p - q|, 0, 1)

    Shapes:
        draft_bjv, target_bjv: logits [b, j, v]; returns [b, j].

    Rounding:
        one, to fp32, at return.

    Raises:
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    expect_shape("draft_bjv", draft_bjv, "bjv", dims)
    expect_shape("target_bjv", target_bjv, "bjv", dims)
    distance_bj = num.sum((_softmax(draft_bjv, num) - _softmax(target_bjv, num)).abs(), dim=-1)
    return num.f32((1 - distance_bj / 2).clamp(0, 1))


def dspark_loss(
    draft_bjv: Tensor,
    target_bjv: Tensor,
    confidence_bj: Tensor,
    token_bj: Tensor,
    valid_bj: Tensor,
    *,
    config: DraftLossConfig,
    ranks: tuple[int, float] = (1, 0.0),
    num: Numerics = CONTRACT,
) -> tuple[Tensor, Tensor]:
    """Cross entropy, distance of the distributions and confidence, weighted towards the front of the block.

    Math:
        w[b, j] = valid[b, j] · exp(-j / decay)
        mean(x) = world · Σ w x / (Σ w of all ranks + 1e-6)
        CE = mean(-log p[token]);  L1 = mean(Σ_v |p - q|);  BCE = mean(cross entropy of σ(confidence) and c*)
        loss = ce · CE + l1 · L1 + confidence · BCE

    Shapes:
        draft_bjv, target_bjv: logits [b, j, v]; confidence_bj: logits [b, j]; token_bj: integer ids [b, j]; valid_bj:
        bool [b, j]; ranks: how many there are, and Σ w of the others; returns loss [1] and its terms [3].

    Rounding:
        one each, to fp32, at return.

    Edges:
        no valid position gives 0. L1 is the whole distance, without the ½ of the label. What stands at positions that
        are not valid does not count, NaN included.

    Raises:
        ValueError: shapes disagree; a token of a valid position lies outside the vocabulary; there is no rank.
        TypeError: tokens are no integers, or valid_bj is not bool.
    """
    expect_positive("ranks", ranks[0])
    dims: dict[str, int] = {}
    for name, x, letters in (("draft_bjv", draft_bjv, "bjv"), ("target_bjv", target_bjv, "bjv")):
        expect_shape(name, x, letters, dims)
    for name, x in (("confidence_bj", confidence_bj), ("token_bj", token_bj), ("valid_bj", valid_bj)):
        expect_shape(name, x, "bj", dims)
    expect_dtype("token_bj", token_bj, torch.int64, torch.int32)
    expect_dtype("valid_bj", valid_bj, torch.bool)
    token_bj = torch.where(valid_bj, token_bj.long(), 0)
    expect_in_range("token_bj", token_bj, 0, dims["v"])
    draft_bjv, target_bjv = (torch.where(valid_bj[..., None], num.wide(x), 0) for x in (draft_bjv, target_bjv))
    logit_bj = torch.where(valid_bj, num.wide(confidence_bj), 0)
    p_bjv, q_bjv = _softmax(draft_bjv, num), _softmax(target_bjv, num)
    label_bj = accept_labels(draft_bjv, target_bjv, num=num)
    weight_bj = num.wide(valid_bj) * num.wide(position_weights(dims["j"], decay=config.decay))
    total = num.sum(weight_bj.flatten(), dim=0) + ranks[1] + EPS
    terms = (
        -_log_softmax(draft_bjv, num).gather(-1, token_bj[..., None])[..., 0],
        num.sum((p_bjv - q_bjv).abs(), dim=-1),
        # log(1 + e^x) - c* x, without the overflow
        logit_bj.clamp(min=0) - logit_bj * label_bj + torch.log1p(torch.exp(-logit_bj.abs())),
    )
    means = torch.stack([num.sum((weight_bj * x).flatten(), dim=0) * ranks[0] / total for x in terms])
    loss = config.ce * means[0] + config.l1 * means[1] + config.confidence * means[2]
    return num.f32(loss[None]), num.f32(means)


def position_weights(block: int, *, decay: float) -> Tensor:
    """exp(-j / decay) of the positions of a block, fp64; the paper's text starts j at 1 and is e^(1 / decay) larger."""
    return torch.tensor([math.exp(-j / decay) for j in range(block)], dtype=torch.float64)


def expected_length(label_bj: Tensor, valid_bj: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """Tokens that one block is expected to bring, the one that verification adds included.

    Math:
        τ[b] = 1 + Σ_j Π_{i ≤ j} c*[b, i] · valid[b, i]

    Shapes:
        label_bj, valid_bj: [b, j]; returns [b].

    Rounding:
        one, to fp32, at return.

    Raises:
        ValueError: shapes disagree.
    """
    dims: dict[str, int] = {}
    expect_shape("label_bj", label_bj, "bj", dims)
    expect_shape("valid_bj", valid_bj, "bj", dims)
    survival_bj = torch.cumprod(torch.where(valid_bj, num.wide(label_bj), 0), dim=1)
    return num.f32(1 + num.sum(survival_bj, dim=1))


def block_mask(anchor_b: Tensor, *, context: int, block: int) -> Tensor:
    """Which keys [context | blocks] the positions of every block see in training.

    The context before the anchor, without the anchor itself, which is the first input of its block; and all keys of
    the own block.

    Shapes:
        anchor_b: integer [b]; returns bool [b · block, context + b · block].

    Raises:
        TypeError: anchors are no integers.
        ValueError: anchor_b has not one axis, or an anchor lies outside the context.
    """
    expect_shape("anchor_b", anchor_b, "b", {})
    expect_dtype("anchor_b", anchor_b, torch.int64, torch.int32)
    expect_in_range("anchor_b", anchor_b, 0, context)
    own_y = torch.arange(len(anchor_b)).repeat_interleave(block)
    past = torch.arange(context)[None, :] < anchor_b[own_y][:, None]
    return torch.cat([past, own_y[:, None] == own_y[None, :]], dim=1)


def evaluate_block(
    draft_jv: Tensor, target_jv: Tensor, token_j: Tensor, uniform_j: Tensor, *, num: Numerics = CONTRACT
) -> tuple[int, Tensor]:
    """How evaluation verifies one block: the accepted length, and the distribution that the next token is drawn from.

    Math:
        accept t iff u < min(1, q(t) / max(p(t), 1e-8)); the first rejection ends the block
        residual = max(q - p, 0) / its mass, q where that mass is 1e-8 or less; a full block draws from its last row

    Shapes:
        draft_jv: probabilities [γ, v]; target_jv: [γ + 1, v]; token_j, uniform_j: [γ]; returns a count and [v].

    Rounding:
        the distribution once, to fp32.

    Raises:
        ValueError: shapes disagree, or a token lies outside the vocabulary.
    """
    dims: dict[str, int] = {}
    expect_shape("draft_jv", draft_jv, "jv", dims)
    expect_shape("token_j", token_j, "j", dims)
    expect_shape("uniform_j", uniform_j, "j", dims)
    expect_shape("target_jv", target_jv, "iv", {"i": dims["j"] + 1, "v": dims["v"]})
    expect_in_range("token_j", token_j, 0, dims["v"])
    p_jv, q_jv, u_j = num.wide(draft_jv), num.wide(target_jv), num.wide(uniform_j)
    for j, token in enumerate(token_j.tolist()):
        if not u_j[j] < (q_jv[j, token] / p_jv[j, token].clamp(min=CLAMP)).clamp(max=1):
            residual_v = (q_jv[j] - p_jv[j]).clamp(min=0)
            mass = num.sum(residual_v, dim=0)
            return j, num.f32(q_jv[j] if mass <= CLAMP else residual_v / mass)
    return dims["j"], num.f32(q_jv[-1])


def calibration_error(p_n: Tensor, hit_n: Tensor, *, bins: int, num: Numerics = CONTRACT) -> Tensor:
    """Expected calibration error over bins of equal width: how far mean prediction and hit rate lie apart.

    Math:
        ECE = Σ_bins |Σ_{n in bin} (p[n] - hit[n])| / N, bin = min(floor(p · bins), bins - 1)

    Raises:
        ValueError: shapes disagree, there is no sample, or bins is not positive.
    """
    expect_positive("bins", bins)
    dims: dict[str, int] = {}
    expect_shape("p_n", p_n, "n", dims)
    expect_shape("hit_n", hit_n, "n", dims)
    expect_positive("p_n", dims["n"])
    p_n = num.wide(p_n)
    bin_n = (p_n * bins).floor().long().clamp(0, bins - 1)
    gap_i = torch.zeros(bins, dtype=p_n.dtype).index_add(0, bin_n, p_n - num.wide(hit_n))
    return num.f32(num.sum(gap_i.abs(), dim=0) / dims["n"])


def confidence_metrics(confidence_bj: Tensor, accepted_bj: Tensor, *, num: Numerics = CONTRACT) -> Tensor:
    """How good confidences are: calibration error (20 bins), area under the ROC curve (1000 bins), mean Brier score.

    Predictions are the cumulative products of the confidences of a block, targets say which prefixes were accepted.

    Shapes:
        confidence_bj: [b, j]; accepted_bj: bool [b, j]; returns [3].

    Rounding:
        one each, to fp32.

    Edges:
        without an accepted or without a rejected prefix the area is NaN.

    Raises:
        ValueError: shapes disagree, or there is no sample.
        TypeError: accepted_bj is not bool.
    """
    dims: dict[str, int] = {}
    expect_shape("confidence_bj", confidence_bj, "bj", dims)
    expect_shape("accepted_bj", accepted_bj, "bj", dims)
    expect_dtype("accepted_bj", accepted_bj, torch.bool)
    p_n = torch.cumprod(num.wide(confidence_bj), dim=1).clamp(CLAMP, 1 - CLAMP).flatten()
    hit_n = torch.cumprod(accepted_bj.long(), dim=1).flatten()
    ece = calibration_error(p_n, hit_n, bins=20, num=num)
    bin_n = (p_n * 1000).floor().long().clamp(0, 999)
    hits_i, misses_i = torch.zeros(2, 1000, dtype=torch.int64).index_put_((1 - hit_n, bin_n), torch.tensor(1), True)
    below_i = misses_i.cumsum(0) - misses_i
    pairs = hits_i.sum(dtype=torch.int64) * misses_i.sum(dtype=torch.int64)
    area = num.sum(num.wide(hits_i) * (num.wide(below_i) + num.wide(misses_i) / 2), dim=0) / num.wide(pairs)
    brier = num.sum((p_n - num.wide(hit_n)).square(), dim=0) / len(p_n)
    return num.f32(torch.stack([num.wide(ece), area, brier]))


def fit_temperatures(
    logit_bj: Tensor, accepted_bj: Tensor, *, grid: tuple[float, ...], bins: int, num: Numerics = CONTRACT
) -> tuple[float, ...]:
    """Sequential temperature scaling: position after position, the T of least calibration error of the prefix.

    Math:
        T[j] = argmin_T ECE(Π_{i<j} σ(z[i] / T[i]) · σ(z[j] / T), accepted prefix), the first minimum of the grid

    Shapes:
        logit_bj: confidence logits [b, j]; accepted_bj: bool [b, j]; returns j temperatures.

    Raises:
        ValueError: shapes disagree; the grid is empty or not positive; there is no sample.
        TypeError: accepted_bj is not bool.

    Source:
        DSpark paper section 3.2.1; public grid: 41 points, logarithmic from 0.1 to 10, 15 bins
    """
    expect_dtype("accepted_bj", accepted_bj, torch.bool)
    if not grid or min(grid) <= 0:
        raise ValueError(f"grid: expected positive temperatures, got {grid}")
    dims: dict[str, int] = {}
    expect_shape("logit_bj", logit_bj, "bj", dims)
    expect_shape("accepted_bj", accepted_bj, "bj", dims)
    hit_bj, before_b = torch.cumprod(accepted_bj.long(), dim=1), torch.ones(dims["b"], dtype=num.carrier)
    found: list[float] = []
    for j in range(dims["j"]):
        tried = [before_b * torch.sigmoid(num.wide(logit_bj[:, j]) / t) for t in grid]
        errors = [calibration_error(p_b, hit_bj[:, j], bins=bins, num=num).item() for p_b in tried]
        best = errors.index(min(errors))
        found.append(grid[best])
        before_b = tried[best]
    return tuple(found)


def log_grid() -> tuple[float, ...]:
    """The public grid of temperatures: 41 points, logarithmic from 0.1 to 10."""
    return tuple(10.0 ** (i / 20 - 1) for i in range(41))


def _log_softmax(x_bjv: Tensor, num: Numerics) -> Tensor:
    x_bjv = num.wide(x_bjv)
    x_bjv = x_bjv - x_bjv.amax(-1, keepdim=True)
    return x_bjv - torch.log(num.sum(torch.exp(x_bjv), dim=-1, keepdim=True))


def _softmax(x_bjv: Tensor, num: Numerics) -> Tensor:
    return torch.exp(_log_softmax(x_bjv, num))
