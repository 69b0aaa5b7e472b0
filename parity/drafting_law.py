"""Whole verification steps, drawn: the law of two-token chains against its bound, and streams of a toy model.

`python -m deeptwin.parity.drafting_law` draws a million tokens for each pair of distributions, all through Philox
streams, decisions, residual weights and the fixed-point sampler, and writes to `evidence/drafting-law.json` how often
the token that comes nearest to its bound came.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from deeptwin.optimized.dspark_verify import verify_rows_vectorised
from deeptwin.optimized.sampling import random_words_vectorised, sample_probs_vectorised, subsequences_vectorised
from deeptwin.reference.config import DRAFT_SEED_OFFSET, Draw, DrawUse
from deeptwin.reference.dspark_step import commit_tokens
from deeptwin.reference.dspark_verify import PENALTY, verify_pack, verify_rows
from deeptwin.reference.philox import random_words, subsequences
from deeptwin.reference.sampling import sample_probs

from .environment import facts, fixed_numerics
from .evidence import FOLDER
from .files import write_json

EPS = 1 - math.exp(-PENALTY)
VOCAB = 32
CHUNK = 1 << 16
SMALL = ((0.5, 0.7), (0.5, 0.5), (0.999, 0.001), (1e-6, 0.3))
PAIRS = (*SMALL, (0.7, 0.5), (0.3, 0.3), (1e-10, 0.5), (0.5, 1e-10), (1 - 1e-7, 0.5), (0.5, 1 - 1e-7), (1e-4, 2e-4))


@dataclass(frozen=True, kw_only=True)
class LawRecord:
    """One pair of chains: the probability of the first token, and the count that comes nearest to its bound."""

    draft: float
    target: float
    platform: str
    draws: int
    token: int
    most: int
    bound: float
    accepted: float


def upper_bound(q: float, *, draws: int, vocab: int) -> float:
    """The most tokens of probability q in `draws`: (1 + ε) q and Bernstein's slack at 1e-4 over the vocabulary."""
    slack = math.log(vocab / 1e-4)
    mean = draws * (1 + EPS) * q
    return mean + slack / 3 + math.sqrt(2 * mean * slack + slack**2 / 9)


def law_of_pairs(
    pairs: Sequence[tuple[float, float]], *, draws: int, draw: Draw = Draw.NVIDIA, residual: bool = True
) -> Iterator[LawRecord]:
    """Verify one draft of each chain and draw from the residual (without `residual`: from the target again)."""
    for p, q in pairs:
        counts, accepted = torch.zeros(VOCAB, dtype=torch.int64), 0
        for start in range(0, draws, CHUNK):
            tokens, take = _step(p, q, torch.arange(start, min(start + CHUNK, draws)), draw, residual)
            counts += torch.bincount(tokens, minlength=VOCAB)
            accepted += int(take.sum())
        chances = (q, 1 - q, *(0.0,) * (VOCAB - 2))
        bounds = [upper_bound(chance, draws=draws, vocab=VOCAB) if chance else 0.0 for chance in chances]
        # an impossible token may not come at all
        token = max(range(VOCAB), key=lambda t: counts[t].item() - bounds[t] - (1e9 if not counts[t] else 0))
        yield LawRecord(
            draft=p,
            target=q,
            platform=draw.value,
            draws=draws,
            token=token,
            most=int(counts[token]),
            bound=bounds[token],
            accepted=accepted / draws,
        )


def _pair(x: float, width: int) -> Tensor:
    row = torch.zeros(width, dtype=torch.float64)
    row[:2] = torch.tensor([x, 1 - x], dtype=torch.float64)
    return row


def _step(p: float, q: float, seed_t: Tensor, draw: Draw, residual: bool) -> tuple[Tensor, Tensor]:
    """Draft, decide, and draw what is emitted, for as many requests as there are seeds."""
    t, width = len(seed_t), VOCAB if draw is Draw.NVIDIA else 64
    position_t, zero_t = torch.full((t,), 7), torch.zeros(t, dtype=torch.int64)
    p_v, q_v = _pair(p, width), _pair(q, width)

    def stream(use: DrawUse) -> Tensor:
        return subsequences_vectorised(position_t, zero_t, use=use)

    drafts = p_v.float().expand(t, width).contiguous()
    token_t, _ = sample_probs_vectorised(drafts, seed_t + DRAFT_SEED_OFFSET, stream(DrawUse.FRESH), draw=draw)
    word_t = random_words_vectorised(seed_t, stream(DrawUse.ACCEPT), count=1)[:, 0]
    target_tv = q_v.log().float().expand(t, width).contiguous()
    fresh_t = torch.zeros(t, dtype=torch.bool)
    accepted_t, weights_tv, _ = verify_rows_vectorised(
        target_tv, p_v.log().float()[None], token_t, zero_t, fresh_t, word_t, draw=draw, trusted=True
    )
    again_tv = weights_tv if residual else q_v.float().expand(t, width).contiguous()
    drawn_t, error_t = sample_probs_vectorised(again_tv, seed_t, stream(DrawUse.RESIDUAL), draw=draw)
    best = int(q_v.argmax())  # where no residual is left
    drawn_t = torch.where(error_t == 0, drawn_t, best)
    return torch.where(accepted_t, token_t, drawn_t), accepted_t


# streams of a toy model in argmax mode

TOY_VOCAB = 40
EOS = 39


def toy_argmax(prefix: Sequence[int]) -> int:
    """The next token of the toy model: a hash of the whole prefix."""
    return random.Random(repr(tuple(prefix))).randrange(TOY_VOCAB - 1)


def plain_stream(*, steps: int, seed: int) -> list[int]:
    """`steps` tokens, one at a time."""
    tokens = [seed]
    for _ in range(steps):
        tokens.append(toy_argmax(tokens))
    return tokens[1:]


def _proposals(tokens: list[int], draft: int, quality: str, chance: random.Random) -> tuple[list[int], Tensor]:
    """Drafts behind `tokens`, and the logarithms of the distributions that they are drawn from."""
    found: list[int] = []
    rows = torch.full((draft, TOY_VOCAB), -torch.inf)
    for j in range(draft):
        right = toy_argmax([*tokens, *found])
        if quality == "random":
            rows[j] = torch.log_softmax(torch.tensor([chance.gauss(0, 2) for _ in range(TOY_VOCAB)]), 0)
            (token,) = chance.choices(range(TOY_VOCAB), weights=rows[j].exp().tolist())
        else:
            token = {"oracle": right, "adversarial": (right + 1) % TOY_VOCAB, "placeholder": TOY_VOCAB - 1}[quality]
            rows[j, token] = 0.0
        found.append(token)
    return found, rows


def speculative_stream(steps: int, *, draft: int, quality: str, lengths: str, seed: int) -> list[int]:
    """The same tokens by drafting and verification, of all drafts ("full") or of a random number of them."""
    chance, tokens = random.Random(seed), [seed]
    while len(tokens) <= steps:
        drafts, pool = _proposals(tokens, draft, quality, chance)
        length = draft + 1 if lengths == "full" else chance.randint(1, draft + 1)
        target = torch.full((length, TOY_VOCAB), -torch.inf)
        for j in range(length):
            target[j, toy_argmax([*tokens, *drafts[:j]])] = 0.0
        row_t = torch.arange(length)
        fresh_t, position_t = row_t == length - 1, torch.full((length,), len(tokens))
        token_t = torch.tensor([*drafts[: length - 1], -1])
        seed_t = torch.full((length,), seed)
        use = {u: subsequences(position_t, row_t, use=u) for u in DrawUse}
        word_t = random_words(seed_t, use[DrawUse.ACCEPT], count=1)[:, 0]
        accepted_t, weights_tv, _ = verify_rows(
            target, pool, token_t, row_t.clamp(max=draft - 1), fresh_t, word_t, draw=Draw.NVIDIA
        )
        stream_t = torch.where(fresh_t, use[DrawUse.FRESH], use[DrawUse.RESIDUAL])
        sampled_t, error_t = sample_probs(weights_tv.float(), seed_t, stream_t, draw=Draw.NVIDIA)
        # an accepted oracle leaves no residual; nobody looks at that row
        sampled_t = torch.where(error_t == 0, sampled_t, target.argmax(1))
        count_b, final_b, packed_t, _ = verify_pack(
            accepted_t, sampled_t, token_t, None, torch.tensor([length]), torch.tensor([[EOS]]), draft=draft
        )
        emitted = [*packed_t[: int(count_b)].tolist(), int(final_b)]
        kept, _ = commit_tokens(
            emitted, length=len(tokens), produced=len(tokens) - 1, stop=None, max_length=10**6, max_tokens=10**6
        )
        tokens += emitted[:kept]
    return tokens[1 : steps + 1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the record, print the table; 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(prog="python -m deeptwin.parity.drafting_law", description=__doc__)
    parser.add_argument("--draws", type=int, default=1_000_000)
    draws = parser.parse_args(arguments).draws
    with fixed_numerics():
        found = [record for draw in Draw for record in law_of_pairs(PAIRS, draws=draws, draw=draw)]
    broken = sum(record.most > record.bound for record in found)
    command = f"python -m deeptwin.parity.drafting_law --draws {draws}"
    record = {"command": command, "environment": facts(), "broken": broken, "pairs": [asdict(one) for one in found]}
    write_json(FOLDER / "drafting-law.json", record)
    lines = [
        f"{'p':>12} {'q':>12} {'platform':>9} {'draws':>9} {'accepted':>9} {'token':>5} {'count':>8} {'bound':>10}"
    ]
    for r in found:
        numbers = f"{r.accepted:>9.6f} {r.token:>5} {r.most:>8} {r.bound:>10.1f}"
        lines.append(f"{r.draft:>12.7g} {r.target:>12.7g} {r.platform:>9} {r.draws:>9} {numbers}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
