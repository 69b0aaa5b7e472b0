"""Steps of an engine: as the model without caches, however a text is cut; what they leave, byte for byte; plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deeptwin.optimized.plan import BACKENDS, GENERATIONS, OPERATIONS, Plan, plan_of
from deeptwin.optimized.runners import runner_of
from deeptwin.optimized.steps import Forward, Runner, bytes_of, fill_with
from deeptwin.optimized.steps_ffn import feed_forward
from deeptwin.optimized.steps_v3 import v3_cache
from deeptwin.parity.engine_state import Sequence as Written
from deeptwin.parity.engine_state import StepImage, image_faults, image_of
from deeptwin.parity.tiny_models import tiny_model
from deeptwin.reference.config import Truncation
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.model import model_v3, model_v4, model_v41

VOCAB = 64
PAGE = 16
BACK = 4  # the longest decode step
POSITIONS = 128
PAGED = ("latent", "main", "index")


@dataclass(frozen=True)
class Rows:
    """What a step computes of one sequence: tokens from position `first` on."""

    tokens: tuple[int, ...]  # of the sequence up to the last row
    first: int
    slot: int
    pages: tuple[int, ...]
    known: int = 0  # tokens known of it, 0: those up to the last row

    @property
    def end(self) -> int:
        return len(self.tokens)


def int32(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step_of(rows: Sequence[Rows], *, decode: bool) -> Csa2Step:
    most = max(len(r.pages) for r in rows)
    return Csa2Step(
        positions_t=int32([p for r in rows for p in range(r.first, r.end)]),
        seq_t=int32([b for b, r in enumerate(rows) for _ in range(r.first, r.end)]),
        first_b=int32([r.first for r in rows]),
        end_b=int32([r.end for r in rows]),
        known_b=int32([r.known or r.end for r in rows]),
        valid_b=int32([0] * len(rows)),
        state_b=int32([r.slot for r in rows]),
        table_bp=int32([[*r.pages, *[-1] * (most - len(r.pages))] for r in rows]),
        clip_b=int32([0] * len(rows)),
        decode=decode,
    )


def forward(runner: Runner, rows: Sequence[Rows], *, decode: bool = False) -> Forward:
    token_t = torch.tensor([t for r in rows for t in r.tokens[r.first :]])
    past = [[r.tokens[p] if p >= 0 else -1 for p in range(r.first - runner.history, r.first)] for r in rows]
    past_bk = torch.tensor(past, dtype=torch.int64).reshape(len(rows), runner.history)
    return runner.forward(token_t, past_bk, step_of(rows, decode=decode))


@cache
def tiny(generation: str) -> tuple[Any, Any]:
    return tiny_model(generation, vocab=VOCAB, seed=3)


def runner(generation: str, *, page_tokens: int = PAGE, pages: int = 12, config: Any = None, **given: Any) -> Runner:
    own, weights = tiny(generation)
    sizes = {"pages": pages, "states": 6, "page_tokens": page_tokens, "backtracking": BACK, "positions": POSITIONS}
    plan = given.pop("plan", None) or plan_of(generation, "reference")
    made = runner_of(config or own, weights, plan, **(sizes | given))
    poison(made)
    return made


def poison(made: Runner) -> None:
    """Every byte of every cache 0xff: NaN in every format."""
    for x in made.cache_views().values():
        x.copy_(
            torch.full(x.shape, 255, dtype=torch.uint8) if x.dtype == torch.uint8 else torch.full_like(x, torch.nan)
        )


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@cache
def hidden(generation: str, tokens: tuple[int, ...]) -> Tensor:
    """What the head of the model without caches reads."""
    config, weights = tiny(generation)
    heard: dict[str, Tensor] = {}
    token_t = torch.tensor(tokens)
    if generation == "v4":
        model_v4(token_t, weights, config=config, tap=heard.__setitem__)
    elif generation == "v41":
        model_v41(token_t, torch.zeros(len(tokens), dtype=torch.bool), weights, config=config, tap=heard.__setitem__)
    else:
        model_v3(token_t, weights, config=config, tap=heard.__setitem__)
    return heard["head.norm"].to(torch.bfloat16)


def expect_rows(got: Forward, rows: Sequence[Rows], wanted: Sequence[Tensor]) -> None:
    whole = torch.cat([want[r.first : r.end] for r, want in zip(rows, wanted, strict=True)])
    assert torch.equal(got.row_t, torch.arange(len(whole)))
    assert torch.equal(got.hidden_ym, whole)


# properties of the reference


PAGES = ((7, 2, 9), (3, 11, 5))  # of two sequences, in no order
CUTS = {
    "whole": (((27, 20), False),),
    "chunks": (((5, 1), False), ((9, 8), False), ((12, 4), False), ((1, 7), False)),
    # an anchor and drafts of which some are rejected: the next step begins earlier than this one ended
    "drafts": (
        ((17, 9), False),
        ((1, 1), True),
        ((4, 3), True),
        ((3, 4), True),
        ((1, 2), True),
        ((2, 4), True),
    ),
}
REJECTED = {2: (2, 1), 3: (1, 3), 5: (0, 3)}  # of "drafts": how many rows of a step do not stay


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("cut", CUTS)
def test_steps_give_the_rows_of_the_model_without_caches(generation: str, cut: str) -> None:
    texts = [text(27, 1), text(20, 2)]
    whole = [hidden(generation, tokens) for tokens in texts]
    made, done = runner(generation), [0, 0]
    for number, (counts, decode) in enumerate(CUTS[cut]):
        dropped = REJECTED.get(number, (0, 0)) if cut == "drafts" else (0, 0)
        rows, wanted = [], []
        for b, (count, lost) in enumerate(zip(counts, dropped, strict=True)):
            kept = texts[b][: done[b] + count - lost]
            tokens = (*kept, *((token + 1) % VOCAB for token in texts[b][len(kept) : len(kept) + lost]))
            rows.append(Rows(tokens, done[b], slot=4 - b, pages=PAGES[b]))
            wanted.append(whole[b] if not lost else hidden(generation, tokens))
            done[b] += count - lost
        expect_rows(forward(made, rows, decode=decode), rows, wanted)
    assert done[0] >= 24
    assert done[1] >= 16


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_step_writes_what_the_model_makes_of_its_tokens_and_nothing_else(generation: str) -> None:
    config, weights = tiny(generation)
    made = runner(generation)
    image, model = image_of(made.cache_views()), StepImage(config, weights, page_tokens=PAGE, backtracking=BACK)
    tokens = text(23, 4)
    rejected = (*tokens[:18], *text(2, 5))
    inputs = {run: model.inputs(torch.tensor(run)) for run in (tokens, rejected)}
    steps = ((tokens, 0, 11, False), (tokens, 11, 16, False), (rejected, 16, 20, True), (tokens, 18, 20, True))
    for run, first, end, decode in (*steps, (tokens, 20, 23, False)):
        forward(made, [Rows(run[:end], first, slot=3, pages=PAGES[0])], decode=decode)
        model.write_(image, inputs[run], Written(first, end, 3, torch.tensor(PAGES[0])))
        assert image_faults(image, made.cache_views()) == []
    name, x = next(iter(made.cache_views().items()))
    x[2].view(torch.uint8)[0] ^= 1
    assert [fault.partition(":")[0] for fault in image_faults(image, made.cache_views())] == [name]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_snapshot_and_pages_carry_a_sequence_to_another_state(generation: str) -> None:
    tokens = text(26, 6)
    first, second = runner(generation), runner(generation)
    forward(first, [Rows(tokens[:PAGE], 0, slot=2, pages=(4,))])
    forward(first, [Rows(tokens[: PAGE + 2], PAGE, slot=2, pages=(4, 5))], decode=True)
    kept = first.snapshot(2, PAGE)
    second.load_page(8, first.page_bytes(4))
    second.restore(5, PAGE, kept)
    assert second.page_bytes(8) == first.page_bytes(4)
    assert second.snapshot(5, PAGE) == kept
    rows = [Rows(tokens, PAGE, slot=5, pages=(8, 1))]
    expect_rows(forward(second, rows), rows, [hidden(generation, tokens)])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_used_state_and_used_pages_begin_anew(generation: str) -> None:
    made, tokens = runner(generation), text(20, 7)
    forward(made, [Rows(text(31, 8), 0, slot=2, pages=(4, 5))])
    made.reset(2)
    for first, end in ((0, 6), (6, 20)):
        rows = [Rows(tokens[:end], first, slot=2, pages=(5, 4))]
        expect_rows(forward(made, rows), rows, [hidden(generation, tokens)])


def test_truncated_decoders_compute_kept_rows_alone_and_alike() -> None:
    config, _ = tiny("v41")
    found = {}
    for mode in (Truncation.MASK, Truncation.COMPACT):
        csa2 = replace(config.csa2, truncation=mode, keep=12, backtracking=BACK)
        made, tokens = runner("v41", config=replace(config, csa2=csa2)), text(24, 9)
        parts = []
        for first, end in ((0, 9), (9, 24)):
            got = forward(made, [Rows(tokens[:end], first, slot=1, pages=(3, 2), known=24)])
            assert all(len(x) == len(got.row_t) for x in got.features)
            kept = got.row_t + first >= 12
            parts.append(got.hidden_ym[kept])
        decoded = forward(made, [Rows((*tokens, 5, 6), 24, slot=1, pages=(3, 2), known=24)], decode=True)
        parts.append(decoded.hidden_ym)
        found[mode] = torch.cat(parts)
        rows = [1, 12] if mode is Truncation.COMPACT else [9, 15]
        assert [len(forward(made, [Rows(tokens[:9], 0, 2, (4,), known=24)]).row_t)] == rows[:1]
    assert torch.equal(found[Truncation.MASK], found[Truncation.COMPACT])
    assert len(found[Truncation.MASK]) == 14
    assert not torch.equal(found[Truncation.MASK][:12], hidden("v41", text(24, 9))[12:])


# plans


def test_every_row_of_every_plan_names_a_function_that_exists() -> None:
    for name, operation in OPERATIONS.items():
        for candidate in operation.candidates:
            component = name.partition(".")[0]
            plan = Plan(candidates={component: candidate} if not operation.definitional else {component: "reference"})
            assert callable(plan.op(name)), (name, candidate)


def test_a_plan_says_what_it_chose() -> None:
    plan = plan_of("v41", "triton", {"moe": "reference", "rms_norm.rms_norm": "my_norms:norm"})
    chosen = {name: (candidate, spec) for name, candidate, spec in plan.rows()}
    assert chosen["moe.moe"] == ("reference", "deeptwin.reference.moe:moe")
    assert chosen["rms_norm.rms_norm"] == ("given", "my_norms:norm")
    assert chosen["csa2.csa2_output"] == ("triton", "deeptwin.optimized.csa2:csa2_output_triton")
    assert chosen["sampling.ranked"][0] == "vectorised"
    assert chosen["rope.table_of"][0] == "reference"
    assert not [name for name in chosen if name.startswith(("mla.", "dsa.", "csa.", "hca."))]
    for generation in GENERATIONS:
        for backend in BACKENDS:
            assert plan_of(generation, backend).rows()


def test_a_plan_takes_a_function_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def norm(x_tm, weight_m, *, eps, cast):\n    return x_tm * 0\n")
    made = runner("v3", plan=plan_of("v3", "reference", {"rms_norm.rms_norm": f"{path}:norm"}))
    assert not forward(made, [Rows((1, 2), 0, slot=1, pages=(1,))]).hidden_ym.any()


# parity with each candidate


# batch invariance


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_row_does_not_depend_on_its_neighbours(generation: str) -> None:
    lanes = [text(18 + lane, 20 + lane) for lane in range(5)]
    alone, packed = [], runner(generation, pages=24)
    for tokens in lanes:
        made = runner(generation)
        prompt = forward(made, [Rows(tokens[:-2], 0, slot=1, pages=(1, 2))])
        step = forward(made, [Rows(tokens, len(tokens) - 2, slot=1, pages=(1, 2))], decode=True)
        alone.append((prompt.hidden_ym, step.hidden_ym))
    places = [(lane + 1, (20 - 2 * lane, 3 + 2 * lane)) for lane in range(5)]
    for number, decode in ((0, False), (1, True)):
        rows = [
            Rows(tokens if decode else tokens[:-2], len(tokens) - 2 if decode else 0, slot=slot, pages=pages)
            for tokens, (slot, pages) in zip(lanes, places, strict=True)
        ]
        got = forward(packed, rows, decode=decode)
        assert torch.equal(got.hidden_ym, torch.cat([pair[number] for pair in alone]))
        assert torch.equal(packed.head(got.hidden_ym)[:1], packed.head(got.hidden_ym[:1]))


# golden vectors


# rejected input


def test_wrong_rows_are_refused() -> None:
    made = runner("v41")
    good = step_of([Rows((1, 2), 0, slot=1, pages=(1,))], decode=False)
    tokens, past = torch.tensor([1, 2]), torch.full((1, made.history), -1)
    for changed, match in (
        ((tokens[:1], past, good), "token_t: expected t=2"),
        ((tokens, past[:, :1], good), "past_bk: expected k=2"),
        ((torch.tensor([1, VOCAB]), past, good), "token_t: expected values in"),
        ((tokens, past - 1, good), "past_bk: expected values in"),
        ((tokens, past, replace(good, positions_t=good.positions_t + POSITIONS)), "step.positions_t: expected values"),
    ):
        with pytest.raises(ValueError, match=match):
            made.forward(*changed)
    with pytest.raises(TypeError, match="token_t: expected torch.int64"):
        made.forward(tokens.int(), past, good)
    for name, count in (("pages", 1), ("states", 1)):
        with pytest.raises(ValueError, match=f"{name}: expected at least 2"):
            runner("v41", **{name: count})
    with pytest.raises(ValueError, match="page_tokens: expected a multiple of 4, got 6"):
        runner("v4", page_tokens=6)
    with pytest.raises(ValueError, match="weights: expected those of V4Config, got V3Model"):
        runner_of(tiny("v4")[0], tiny("v3")[1], plan_of("v4", "reference"), pages=2, states=2, page_tokens=PAGE)


def test_wrong_payloads_are_refused() -> None:
    made = runner("v41")
    for wrong in (lambda: made.load_page(1, b"12"), lambda: made.restore(1, PAGE, b"12")):
        with pytest.raises(ValueError, match="payload: expected [0-9]+ bytes, got 2"):
            wrong()
    with pytest.raises(ValueError, match="payload: expected none, got 1 bytes"):
        runner("v3").restore(1, PAGE, b"1")
    with pytest.raises(ValueError, match="payload: expected 4 bytes, got 0"):
        fill_with(b"", [torch.zeros(1)])
    assert bytes_of([]) == b""
    plain = replace(tiny("v32")[0], index=replace(tiny("v32")[0].index, latent=None))
    with pytest.raises(ValueError, match="config: expected records of latents and index keys, got None"):
        v3_cache(plain, pages=2, page_tokens=PAGE)
    config, weights = tiny("v41")
    with pytest.raises(ValueError, match="config: expected formats for quantised weights, got None"):
        feed_forward(
            torch.zeros(1, config.model.hidden, dtype=torch.bfloat16),
            torch.zeros(1),
            torch.zeros(1, dtype=torch.bool),
            weights.layers[0].ffn,
            config=replace(config.ffn, quantised=None),
            plan=plan_of("v41", "reference"),
        )


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: plan_of("v5", "triton"), "generation: expected v3, v32, v4, v41, got 'v5'"),
        (lambda: plan_of("v3", "cuda"), "backend: expected reference, vectorised, triton, got 'cuda'"),
        (lambda: plan_of("v3", "reference", {"csa2": "triton"}), "overrides: expected parts of v3, got 'csa2'"),
        (lambda: plan_of("v3", "reference", {"rms_nrom": "triton"}), "meant 'rms_norm"),
        (lambda: plan_of("v3", "reference", {"moe": "cuda"}), "candidates: expected reference or triton for moe"),
        (lambda: plan_of("v3", "reference", {"moe.gated": "cuda"}), "candidates: expected reference or triton for moe"),
        (lambda: Plan(candidates={"nothing": "triton"}), "candidates: expected one of .*, got 'nothing'"),
        (lambda: Plan(candidates={"moe": "triton"}).op("moe.gate"), r"name: expected one of .*\(meant 'moe.gated'\?\)"),
        (lambda: Plan(candidates={}).op("moe.gated"), "candidates: expected one for moe, got only"),
        (lambda: Plan(candidates={"moe.gated": "nowhere:f"}).op("moe.gated"), "expected nowhere:f to import"),
        (lambda: Plan(candidates={"moe.gated": "no.py:f"}).op("moe.gated"), "no file no.py"),
        (lambda: Plan(candidates={"moe.gated": "math:f"}).op("moe.gated"), "expected a function 'f' in math"),
    ],
)
def test_a_wrong_plan_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
