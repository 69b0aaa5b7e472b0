"""Drafters beside runners of tiny models: what they propose against the reference, and on what it may not depend."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deeptwin.optimized.drafter import DraftBatch, NoDrafter, ScriptedDrafter, draw_drafts
from deeptwin.optimized.drafter_dspark import DsparkDrafter
from deeptwin.optimized.drafter_mtp import MtpDrafter
from deeptwin.optimized.drafters import drafter_of
from deeptwin.optimized.plan import plan_of
from deeptwin.optimized.runners import runner_of
from deeptwin.optimized.steps import Forward
from deeptwin.optimized.verification import Greedy, VerifyRows, proposal_pool, step_tokens, verify, write_proposals_
from deeptwin.parity.house import worker_environment
from deeptwin.parity.tiny_drafts import tiny_draft, tiny_draft_state
from deeptwin.parity.tiny_models import tiny_model
from deeptwin.reference.block_v41 import V41Stack
from deeptwin.reference.config import DRAFT_SEED_OFFSET, MHC_V4, DraftBlock, Draw, DrawUse, Truncation
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.dspark import main_keys, target_features
from deeptwin.reference.dspark_chain import draft_block
from deeptwin.reference.dspark_state import DraftRequests
from deeptwin.reference.dspark_weights import draft_config, draft_main, draft_model
from deeptwin.reference.kv_cache import store_records
from deeptwin.reference.model import model_v3, model_v4, model_v41
from deeptwin.reference.mtp import mtp_v3, mtp_v4
from deeptwin.reference.mtp_weights import MtpV3Weights, MtpV4Weights
from deeptwin.reference.philox import subsequences
from deeptwin.reference.rope import table_of
from deeptwin.reference.sampling import sample_logits

VOCAB, GAMMA, PAGE, STATES, PAGES, POSITIONS = 97, 3, 16, 4, 10, 64
GENERATIONS = ("v3", "v32", "v4", "v41")
EVERY = pytest.mark.parametrize("generation", GENERATIONS)
PROMPT = [int(token) for token in torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:37]]
# where the cuts of a sequence are, and how many further tokens of every decode step are wrong
WHOLE: list[tuple[int, int]] = [(37, 0)]
CUT: list[tuple[int, int]] = [(1, 0), (15, 0), (1, 0), (9, 0), (1, 3), (2, 2), (4, 0), (3, 1), (1, 0)]
# the kernel does not take eight experts in groups
DECLINED = {("v3", "triton"): {"router": "reference"}}
PROMPTS = 4  # of the steps of CUT are chunks of a prompt


@cache
def parts(generation: str) -> tuple[Any, Any, Any]:
    config, weights = tiny_model(generation, vocab=VOCAB, seed=1)
    return config, weights, tiny_draft(generation, config, weights, seed=1, gamma=GAMMA)


class Host:
    """A runner and its drafter, and sequences that advance in them; `backend` is the drafter's."""

    def __init__(self, generation: str, *, backend: str = "reference") -> None:
        config, weights, draft = parts(generation)
        sizes = {"pages": PAGES, "states": STATES, "page_tokens": PAGE, "positions": POSITIONS}
        self.runner = runner_of(config, weights, plan_of(generation, "reference"), **sizes)
        kept, self.runner.plan = self.runner.plan, plan_of(generation, backend, DECLINED.get((generation, backend), {}))
        self.drafter = drafter_of(self.runner, draft, gamma=GAMMA, states=STATES, draw=Draw.NVIDIA)
        self.runner.plan = kept
        self.known: dict[int, list[int]] = {}

    def advance(self, rows: dict[int, tuple[int, list[int]]], *, decode: bool, valid: int = 0) -> Forward:
        """By state: the first position, and the tokens from there on."""
        first = torch.tensor([first for first, _ in rows.values()], dtype=torch.int32)
        count = torch.tensor([len(tokens) for _, tokens in rows.values()], dtype=torch.int32)
        state = torch.tensor(list(rows), dtype=torch.int32)
        seq = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(count)
        position = torch.cat(
            [torch.arange(f, f + n, dtype=torch.int32) for f, n in zip(first.tolist(), count.tolist(), strict=True)]
        )
        past = []
        for slot, (start, tokens) in rows.items():
            before = self.known.get(slot, [])[:start]
            self.known[slot] = [*before, *tokens]
            past.append(([-1] * self.runner.history + before)[len(before) :])
        step = Csa2Step(
            positions_t=position,
            seq_t=seq,
            first_b=first,
            end_b=first + count,
            known_b=first + count,
            valid_b=first * 0 + valid,
            state_b=state,
            table_bp=torch.tensor([pages_of(slot) for slot in rows], dtype=torch.int32),
            clip_b=first * 0,
            decode=decode,
        )
        token = torch.tensor([token for _, tokens in rows.values() for token in tokens])
        forward = self.runner.forward(token, torch.tensor(past, dtype=torch.int64).view(len(rows), -1), step)
        self.drafter.observe(forward, token, step)
        return forward

    def run(self, slot: int, steps: list[tuple[int, int]], *, tokens: list[int] = PROMPT, first: int = 0) -> None:
        for number, (count, wrong) in enumerate(steps):
            rows = [*tokens[first : first + count], *[(7 * token + 1) % VOCAB for token in tokens[:wrong]]]
            self.advance({slot: (first, rows)}, decode=number >= PROMPTS)
            first += count

    def propose(
        self, *slots: int, end: int = 37, golden: int = 5, accepted: int = 0, **changes: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.drafter.propose(batch_of(slots, end=end, golden=golden, accepted=accepted, **changes))


def pages_of(slot: int) -> list[int]:
    """Three pages of a state, in no order; state 1 has 7, 4, 1."""
    return [9 - 3 * i - (slot + 1) % 3 for i in range(3)]


def batch_of(slots: tuple[int, ...], *, end: int, golden: int, accepted: int, **changes: Any) -> DraftBatch:
    """Requests that know `end` keys, all alike but for their state."""
    count, one = len(slots), torch.ones(len(slots))
    whole = {
        "golden_b": torch.full((count,), golden),
        "first_b": torch.full((count,), end - 1 - accepted),
        "accepted_b": torch.full((count,), accepted),
        "state_b": torch.tensor(slots),
        "valid_b": torch.zeros(count, dtype=torch.int64),
        "temperature_b": one,
        "top_p_b": one,
        "top_k_b": torch.full((count,), -1),
        "seed_b": torch.full((count,), 77),
    }
    table = torch.tensor([pages_of(slot) for slot in slots], dtype=torch.int32)
    return DraftBatch(requests=DraftRequests(**(whole | changes)), ids=tuple(range(count)), table_bp=table)


def bit_equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# against the reference


def heard(generation: str, tokens: list[int]) -> dict[str, Tensor]:
    """Everything that the stateless model says of a sequence."""
    config, weights, _ = parts(generation)
    found: dict[str, Tensor] = {}
    token_t = torch.tensor(tokens)
    if generation == "v41":
        image_t = torch.zeros(len(tokens), dtype=torch.bool)
        model_v41(token_t, image_t, weights, config=config, tap=found.__setitem__)
    else:
        model = model_v4 if generation == "v4" else model_v3
        model(token_t, weights, config=config, tap=found.__setitem__)
    return found


def drawn_by_hand(logits: Tensor, position: int) -> tuple[Tensor, Tensor]:
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    stream = subsequences(zero + position, zero, use=DrawUse.FRESH)
    seed = zero + 77 + DRAFT_SEED_OFFSET
    token, _, logprob, _ = sample_logits(logits.float(), one, one, zero - 1, seed, stream, draw=Draw.NVIDIA)
    return token, logprob.float()


@pytest.mark.parametrize("generation", ["v3", "v32", "v4"])
def test_a_chain_of_modules_is_the_module_over_the_longer_sequence(generation: str) -> None:
    """Draft j comes out of the stateless module over all rows and j rows more that hold its own output."""
    config, _, draft = parts(generation)
    states, tokens = heard(generation, PROMPT), [*PROMPT[1:], 5]
    name = f"layers.{config.num_layers - 1}.stream.ffn" if generation == "v4" else "head.norm"
    hidden = states[name].to(torch.bfloat16)
    host = Host(generation)
    host.run(1, WHOLE)
    found, logprobs, trust = host.propose(1)
    for j in range(GAMMA):
        rows = torch.tensor(tokens), hidden, draft
        if isinstance(draft, MtpV4Weights):
            logits, carried = mtp_v4(*rows, table_of(config.rope(config.num_layers), POSITIONS), config=config)
        else:
            assert isinstance(draft, MtpV3Weights)
            logits, carried = mtp_v3(*rows, table_of(config.attention.rope, POSITIONS), config=config)
        token, logprob = drawn_by_hand(logits[-1:], 38 + j)
        assert found[0, j] == token
        assert torch.equal(logprobs[0, j], logprob[0])
        tokens.append(int(token))
        hidden = torch.cat([hidden, carried[-1:].to(torch.bfloat16)])
    assert (trust == 1).all()


def test_a_block_of_dspark_is_the_reference_over_rings_of_the_stateless_model() -> None:
    """Keys of every token, made of the streams that enter the target layers' attention (runtime.md section 1.1)."""
    config, _, (model, main) = parts("v41")
    assert isinstance(config, V41Stack)
    states, streams = heard("v41", PROMPT), []
    for layer in config.model.draft.target_layers:
        memory = f"layers.{layer}.engram.stream"
        streams.append(states.get(memory, states[f"layers.{layer - 1}.stream.ffn"]))
    wkv = [(x.attention.wkv_q, x.attention.wkv_sf, x.attention.kv_norm_d) for x in model.layers]
    table, position = table_of(config.csa2.rope_window, POSITIONS), torch.arange(len(PROMPT))
    features = target_features(streams)
    keys = main_keys(features, main.proj_q, main.proj_sf, main.norm_m, wkv, table, position, eps=config.csa2.eps)
    host = Host("v41")
    host.run(1, WHOLE)
    assert isinstance(host.drafter, DsparkDrafter)
    ring = config.csa2.plan.ring
    rings = [torch.full_like(x, 0xFF) for x in host.drafter.rings]
    newest = position[-ring:]
    for i, mine in enumerate(rings):
        store_records(mine, keys[newest, i], ring + newest % ring, layout=config.csa2.layout)
        assert torch.equal(mine[1], host.drafter.rings[i][1])
        assert not host.drafter.rings[i][2:].any()
    batch = batch_of((1,), end=37, golden=5, accepted=0)
    expected = draft_block(batch.requests, rings, table, model=model, draw=Draw.NVIDIA)
    assert bit_equal(host.propose(1), tuple(x.float() if x.is_floating_point() else x for x in expected))


# on what proposals may not depend


@EVERY
def test_the_cuts_of_a_sequence_do_not_show(generation: str) -> None:
    """Chunks of any length, decode steps of any width, drafts that were rejected: the bits of one prefill."""
    one, cut = Host(generation), Host(generation)
    one.run(1, WHOLE)
    cut.run(1, CUT)
    expected = one.propose(1)
    assert bit_equal(cut.propose(1), expected)
    # again: what the first proposal left behind is not read
    assert bit_equal(cut.propose(1), expected)
    assert bit_equal(one.propose(1, accepted=2), expected)
    other = one.propose(1, golden=6)
    assert not torch.equal(other[1], expected[1])
    assert_null_is_empty(cut)


def assert_null_is_empty(host: Host) -> None:
    """State 0 and page 0 belong to nobody."""
    views = [*host.runner.cache_views().values()]
    if isinstance(host.drafter, MtpDrafter):
        views += [row[None] for row in host.drafter.module.page_rows(0)]
        views += [ring[None] for ring, _ in host.drafter.module.state_rings(0)]
        views.append(host.drafter.hidden)
    assert views
    for x in views:
        assert not x[0].contiguous().view(torch.uint8).any()


@EVERY
def test_requests_do_not_see_one_another(generation: str) -> None:
    """Packed or alone, in any state and on any pages, beside padding: the same bits."""
    sequences = {1: PROMPT[:20], 2: PROMPT[5:], 3: PROMPT[30:32]}
    packed = Host(generation)
    packed.advance({slot: (0, tokens[:-1]) for slot, tokens in sequences.items()}, decode=False)
    packed.advance({slot: (len(tokens) - 1, [*tokens[-1:], 8, 9]) for slot, tokens in sequences.items()}, decode=True)
    last = torch.tensor([len(tokens) - 1 for tokens in sequences.values()])
    padded = {"first_b": torch.cat([last, torch.tensor([-1])]), "valid_b": torch.zeros(4, dtype=torch.int64)}
    together = packed.propose(1, 2, 3, 0, **padded)
    # a request whose row could not be drawn has no newest token, and drafts something of no meaning
    failed = packed.propose(1, 2, **{name: x[:2] for name, x in padded.items()}, golden_b=torch.tensor([-1, 5]))
    assert bit_equal(tuple(x[1:] for x in failed), tuple(x[1:2] for x in together))
    for b, tokens in enumerate(sequences.values()):
        alone, slot = Host(generation), 3 - b
        alone.run(slot, [(len(tokens), 0)], tokens=tokens)
        assert bit_equal(alone.propose(slot, end=len(tokens)), tuple(x[b : b + 1] for x in together)), b


@EVERY
def test_a_prefix_goes_on_elsewhere(generation: str) -> None:
    """Pages and a snapshot carry everything; a page says the same whatever follows its tokens."""
    one, other, whole = Host(generation), Host(generation), Host(generation)
    one.run(1, [(32, 0)])
    other.run(1, [(37, 0)], tokens=[*PROMPT[:32], 1, 2, 3, 4, 5])
    whole.run(1, WHOLE)
    pages = pages_of(1)
    payloads = [
        x.drafter.page_bytes(page, before)
        for x in (one, other)
        for page, before in ((pages[0], 0), (pages[1], pages[0]))
    ]
    assert payloads[:2] == payloads[2:]
    assert (payloads[0] != payloads[1]) == (generation in ("v3", "v32"))
    host, mine = Host(generation), pages_of(2)
    host.known[2] = PROMPT[:32]
    for i, payload in enumerate(payloads[:2]):
        host.runner.load_page(mine[i], one.runner.page_bytes(pages[i]))
        host.drafter.load_page(mine[i], mine[i - 1] if i else 0, payload)
    host.runner.restore(2, 32, one.runner.snapshot(1, 32))
    host.drafter.restore(2, 32, one.drafter.snapshot(1, 32))
    host.run(2, [(5, 0)], first=32)
    assert bit_equal(host.propose(2), whole.propose(1))


def test_what_truncation_leaves_out_is_not_kept() -> None:
    """Under COMPACT features exist for kept rows alone: no other key is written (runtime.md section 4.2)."""
    config, weights, draft = parts("v41")
    short = replace(config, csa2=replace(config.csa2, truncation=Truncation.COMPACT, keep=14))
    host = Host("v41")
    sizes = {"pages": PAGES, "states": STATES, "page_tokens": PAGE, "positions": POSITIONS}
    host.runner = runner_of(short, weights, host.runner.plan, **sizes)
    model = replace(draft[0], config=replace(draft[0].config, csa2=short.csa2))
    host.drafter = drafter_of(host.runner, (model, draft[1]), gamma=GAMMA, states=STATES, draw=Draw.NVIDIA)
    forward = host.advance({1: (0, PROMPT[:16])}, decode=False)
    assert forward.row_t.tolist() == [*range(2, 16)]
    assert isinstance(host.drafter, DsparkDrafter)
    written = [place for place in range(14) if host.drafter.rings[0][1, place].any()]
    assert written == [*range(14)]
    assert torch.isfinite(host.propose(1, end=16)[2]).all()


def test_a_sequence_that_starts_in_its_middle_has_no_row_before() -> None:
    """A restart with an empty window: the first row's own hidden state is the first there is."""
    host = Host("v4")
    host.known[1] = PROMPT[:20]
    host.advance({1: (20, PROMPT[20:26])}, decode=False, valid=20)
    valid = torch.tensor([20])
    first = host.propose(1, end=26, valid_b=valid)
    host.advance({1: (26, [5])}, decode=True, valid=20)
    assert not torch.equal(host.propose(1, end=27, valid_b=valid)[0], first[0])


def test_a_draft_that_cannot_be_drawn_is_a_placeholder() -> None:
    """V - 1 for certain, whatever else is in the batch."""
    batch, logits = batch_of((1, 2), end=9, golden=5, accepted=0), torch.zeros(2, VOCAB)
    logits[0] = torch.nan
    position, given = torch.tensor([10, 10]), {"draw": Draw.NVIDIA, "ops": plan_of("v3", "vectorised")}
    token, logprob = draw_drafts(logits, position, batch.requests, **given)
    assert token[0] == VOCAB - 1
    assert logprob[0].tolist() == [-torch.inf] * (VOCAB - 1) + [0]
    alone, expected = draw_drafts(
        logits[1:], position[1:], batch_of((2,), end=9, golden=5, accepted=0).requests, **given
    )
    assert torch.equal(token[1:], alone)
    assert torch.equal(logprob[1:], expected)


def test_a_greedy_request_drafts_the_likeliest_token() -> None:
    host = Host("v3")
    host.run(1, WHOLE)
    cold = host.propose(1, temperature_b=torch.zeros(1), top_p_b=torch.full((1,), 0.5), top_k_b=torch.tensor([4]))
    warm = host.propose(1)
    assert cold[0][0, 0] == warm[1][0, 0].argmax()
    assert cold[1][0, 0].max() == 0


def measured_apart() -> None:
    """By generation: how far the distributions of the first draft, and confidences, are apart in two plans."""
    found = {}
    for generation in ("v3", "v41"):  # a chain of modules, and a block
        (_, logprob, trust), *other = (proposed(generation, backend) for backend in ("reference", "triton"))
        variation = (logprob[0, 0].exp() - other[0][1][0, 0].exp()).abs().sum() / 2
        found[generation] = {"variation": variation.item(), "trust": (trust - other[0][2]).abs().max().item()}
    sys.stdout.write(json.dumps(found))


def proposed(generation: str, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    host = Host(generation, backend=backend)
    host.run(1, [(5, 0)])
    return host.propose(1, end=5)


@pytest.mark.slow
def test_kernels_propose_nearly_the_same_distributions() -> None:
    """A whole drafter under the interpreter, which has to be asked for before triton is imported."""
    name = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(name.parent)!r}); import {name.stem} as t; t.measured_apart()"
    child = subprocess.run(
        [sys.executable, "-c", code], env=worker_environment("cpu"), capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    for generation, found in json.loads(child.stdout).items():
        # V3's kernels have the absorbed form, which rounds elsewhere
        assert found["variation"] < (0.05 if generation == "v3" else 1e-3), (generation, found)
        assert found["trust"] < 1e-3, (generation, found)


# whole streams


@pytest.mark.parametrize("generation", ["v3", "v41"])
def test_a_stream_with_drafts_is_that_of_the_model_alone(generation: str) -> None:
    """Prefill, then steps of an anchor and its drafts: every greedy token is the stateless model's (section 1.6.1)."""
    host, golden, end = Host(generation), -1, 20
    pool, one = proposal_pool(slots=2, draft=GAMMA, vocab=VOCAB), torch.tensor([1])
    tokens, forward = PROMPT[:end], host.advance({1: (0, PROMPT[:end])}, decode=False)
    hidden, first, drafts = forward.hidden_ym[-1:], end - 1, 0
    while len(tokens) < end + 7:
        rows = VerifyRows(
            length_b=one + drafts,
            position_b=one + first,
            slot_b=one,
            temperature_b=torch.zeros(1),
            top_p_b=torch.ones(1),
            top_k_b=-one,
            seed_b=one + 76,
            stop_bk=-one[:, None],
        )
        given: dict[str, Any] = {"greedy": Greedy.ARGMAX, "draw": Draw.NVIDIA, "ops": host.runner.plan}
        found = verify(host.runner.head(hidden), rows, pool, **given)
        accepted, golden = int(found.accepted_b), int(found.golden_b)
        tokens = [*tokens, *found.token_bj[0, : accepted + 1].tolist()]
        write_proposals_(pool, one, *host.propose(1, end=first + accepted + 1, golden=golden, accepted=accepted))
        first, drafts = first + accepted + 1, GAMMA
        inputs = step_tokens(found.golden_b, one, one + drafts, pool).tolist()
        hidden = host.advance({1: (first, inputs)}, decode=True).hidden_ym
    logits = heard(generation, tokens)["logits"]
    assert tokens[end:] == logits[end - 1 : -1].argmax(1).tolist()


# scripts


def test_a_script_is_right_as_often_as_it_says() -> None:
    """Quality 0 and 100 are certain, between them the share is near; every draft is a point mass."""
    streams = {0: list(range(90)), 1: list(range(90))[::-1]}
    batch = batch_of((1, 2), end=10, golden=3, accepted=0)
    for quality in (0, 70, 100):
        drafter, right = ScriptedDrafter(streams, quality=quality, gamma=6, vocab=VOCAB), []
        for end in range(1, 60):
            batch = batch_of((1, 2), end=end, golden=3, accepted=min(end - 1, 2))
            token, logprob, trust = drafter.propose(batch)
            for b in range(2):
                right += [int(token[b, j]) == streams[b][end + 1 + j] for j in range(6)]
            assert torch.equal(logprob.argmax(2), token)
            assert ((logprob == 0).sum(2) == 1).all()
            assert (logprob.exp().sum(2) == 1).all()
            assert ((trust >= 0) & (trust <= 1)).all()
        assert abs(sum(right) / len(right) - quality / 100) < 0.06
    assert trust.unique().numel() > 3


def test_a_script_depends_on_request_and_position_alone() -> None:
    """In whichever batch and however many drafts: what stands at a position is the same; behind the end it is V - 1."""
    drafter = ScriptedDrafter({0: list(range(20)), 1: list(range(20))}, quality=50, gamma=4, vocab=VOCAB)
    both = drafter.propose(batch_of((1, 2), end=9, golden=3, accepted=0))
    shifted = drafter.propose(batch_of((1, 2), end=11, golden=3, accepted=1))
    assert torch.equal(both[0][:, 2:], shifted[0][:, :2])
    assert torch.equal(both[2][:, 2:], shifted[2][:, :2])
    assert not torch.equal(both[0][0], both[0][1])
    late = drafter.propose(batch_of((1,), end=18, golden=3, accepted=0))
    assert late[0][0, 1:].tolist() == [VOCAB - 1] * 3
    unknown = ScriptedDrafter({}, quality=50, gamma=2, vocab=VOCAB).propose(batch_of((1,), end=2, golden=3, accepted=0))
    assert unknown[0].tolist() == [[VOCAB - 1] * 2]


def test_without_a_drafter_there_are_no_drafts() -> None:
    drafter = NoDrafter(vocab=VOCAB)
    token, logprob, trust = drafter.propose(batch_of((1, 2), end=3, golden=3, accepted=0))
    assert (token.shape, logprob.shape, trust.shape) == ((2, 0), (2, 0, VOCAB), (2, 0))
    assert drafter.gamma == 0
    assert drafter.snapshot(1, 16) + drafter.page_bytes(1, 0) == b""


# rejected input


def test_a_drafter_that_was_not_told_says_so() -> None:
    host = Host("v3")
    host.known[1] = PROMPT[:20]
    with pytest.raises(
        ValueError, match="step: expected rows behind one whose hidden state was seen, got none of position 19"
    ):
        host.advance({1: (20, PROMPT[20:22])}, decode=True)
    host.run(1, [(20, 0)])
    with pytest.raises(ValueError, match="hidden state was seen, got none of position 20 in state 1"):
        host.propose(1, end=21)
    with pytest.raises(ValueError, match="got none of position 10 in state 1"):
        host.drafter.snapshot(1, 11)


@EVERY
def test_payloads_of_another_length_are_refused(generation: str) -> None:
    host = Host(generation)
    with pytest.raises(ValueError, match="payload: expected"):
        host.drafter.restore(1, 16, b"abc")
    if generation in ("v3", "v32"):
        with pytest.raises(ValueError, match="payload: expected"):
            host.drafter.load_page(1, 0, b"abc")


def test_drafters_that_do_not_fit_their_runner_are_refused() -> None:
    v3, v4, v41 = (Host(generation).runner for generation in ("v3", "v4", "v41"))
    given: dict[str, Any] = {"states": STATES, "draw": Draw.NVIDIA}
    with pytest.raises(ValueError, match="weights: expected those of V3Runner, got MtpV4Weights"):
        drafter_of(v3, parts("v4")[2], gamma=2, **given)
    with pytest.raises(ValueError, match="gamma: expected at most 5, an anchor and drafts in a step, got 6"):
        drafter_of(v4, parts("v4")[2], gamma=6, **given)
    with pytest.raises(ValueError, match="gamma: expected 3, the length of the block, got 2"):
        drafter_of(v41, parts("v41")[2], gamma=2, **given)
    with pytest.raises(ValueError, match="gamma: expected at least one draft, got 0"):
        drafter_of(v3, parts("v3")[2], gamma=0, **given)
    model, main = parts("v41")[2]
    ring = torch.zeros(2, 13, 1, dtype=torch.uint8)
    for rings, match in (([ring], "rings: expected 2, got 1"), ([ring, ring], "rings: expected 14 rows")):
        with pytest.raises(ValueError, match=match):
            DsparkDrafter(model, main, rings, torch.zeros(1, 1), draw=Draw.NVIDIA, ops=v41.plan)
    with pytest.raises(ValueError, match="quality: expected 0 to 100, got 101"):
        ScriptedDrafter({}, quality=101, gamma=1, vocab=2)
    with pytest.raises(ValueError, match="gamma: expected at least one draft, got 0"):
        ScriptedDrafter({}, quality=1, gamma=0, vocab=2)


def test_draft_weights_that_do_not_fit_are_refused() -> None:
    config, weights, _ = parts("v41")
    state = tiny_draft_state(config, np.random.Generator(np.random.Philox(1)))
    state |= {"embed.weight": weights.embed_vm, "head.weight": weights.head_vm}
    block = DraftBlock(draft=2, noise_token=1, window=config.csa2.sliding(decoder=False))
    given: dict[str, Any] = {"config": config, "block": block, "temperatures": (1.0, 2.0)}
    assert len(draft_model(state, **given).layers) == config.model.draft.layers
    for name in ("mtp.1.norm.weight", "mtp.0.attn.wkv.weight", "mtp.1.ffn.experts.3.w2.scale"):
        with pytest.raises(ValueError, match="state: expected"):
            draft_model({key: x for key, x in state.items() if key != name}, **given)
    plain = {key: x for key, x in state.items() if not (".ffn." in key and key.endswith(".scale"))}
    with pytest.raises(ValueError, match="state: expected mtp.0.ffn"):
        draft_model(plain, **given)
    with pytest.raises(ValueError, match="head: expected 2 temperatures, got 1"):
        draft_model(state, **(given | {"temperatures": (1.0,)}))
    with pytest.raises(ValueError, match="state: expected mtp.0.main_proj.scale"):
        draft_main(state | {"mtp.0.main_proj.scale": state["mtp.0.main_norm.weight"]}, config=config)
    with pytest.raises(ValueError, match="config: expected formats for quantised experts, got None"):
        draft_config(replace(config, ffn=replace(config.ffn, quantised=None)))
    with pytest.raises(ValueError, match="mhc: expected a shifted schedule"):
        draft_config(replace(config, model=replace(config.model, mhc=MHC_V4)))
    with pytest.raises(ValueError, match="weights: expected those of a tiny v4, got V41Model"):
        tiny_draft("v4", parts("v4")[0], weights, seed=1)
