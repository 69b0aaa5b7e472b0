"""What the cards of `csa` and `hca` share: configurations, cases, inputs, the rule of stored records, relations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import (
    FP8_128X128_UE8M0,
    KV_V4_FMLA,
    RECORD_FORMATS,
    V4_ROPE_COMPRESSED,
    V4_ROPE_SLIDING,
    V4_YARN,
    HeadNorm,
    IndexCast,
    OutputCast,
    PageLayout,
    RecordFormat,
    RopeConfig,
    ScoreOrder,
    V4AttnConfig,
    V4Kind,
)
from deeptwin.reference.csa2_state import Csa2Batch
from deeptwin.reference.kv_cache import unpack_records
from deeptwin.reference.numerics import SEMANTIC
from deeptwin.reference.quant import quantize
from deeptwin.reference.rope import rope_frequencies, rope_table
from deeptwin.reference.v4_state import V4Caches, v4_caches
from deeptwin.reference.v4_weights import MATRICES, V4Weights, checkpoint_names, v4_shapes

from . import draws
from .card import Inputs, Outputs
from .relations import Context, Variant
from .rules import V4_LAYER, Judgement, Oracles, Rule, TopK

# configurations


def v4_config(kind: V4Kind, form: str) -> V4AttnConfig:
    """A small layer with real record sizes, or with sizes that transformers takes (`hf`, `hf_eps`).

    micro: release choices; fused: DeepGEMM's and SGLang's; fmla: FlashMLA's floor; fp8: index keys as e4m3 rows;
    ties: two index heads; wide: the window and the ratio of the release.
    """
    csa, sliding = kind is V4Kind.CSA, kind is V4Kind.SLIDING
    config = V4AttnConfig(
        kind=kind,
        hidden=128,
        num_heads=2,
        head_dim=512,
        q_rank=128,
        o_groups=2,
        o_rank=64,
        window=4,
        ratio={V4Kind.SLIDING: 0, V4Kind.CSA: 4, V4Kind.HCA: 8}[kind],
        index_heads=4 * csa,
        index_dim=128 * csa,
        index_topk=2 * csa,
        rope=V4_ROPE_SLIDING if sliding else V4_ROPE_COMPRESSED,
        head_norm=HeadNorm.RELEASE,
        index=IndexCast.FP4,
        score_order=ScoreOrder.BF16_RELEASE,
        output=OutputCast.RELEASE,
        backtracking=3,
        page_tokens=8,
    )
    if form == "fused":
        config = replace(
            config, head_norm=HeadNorm.FUSED, output=OutputCast.FUSED, score_order=ScoreOrder.BF16_ONCE, num_heads=4
        )
    if form == "fmla":
        config = replace(config, cache=KV_V4_FMLA, head_norm=HeadNorm.FACTOR, score_order=ScoreOrder.FP32)
    if form == "fp8":
        config = replace(config, index=IndexCast.FP8, score_order=ScoreOrder.FP32)
    if form == "ties":
        config = replace(config, index_heads=2)
    if form == "wide":
        config = replace(config, window=128, ratio={0: 0, 4: 4, 8: 128}[config.ratio], page_tokens=128)
    if form.startswith("hf"):
        yarn = replace(V4_YARN, original_length=32, factor=4.0)
        theta = 10000.0 if sliding else 160000.0
        config = replace(
            config,
            hidden=64,
            num_heads=4,
            head_dim=32,
            q_rank=24,
            o_rank=8,
            window=8,
            index_heads=16 * csa,
            index_dim=16 * csa,
            index_topk=3 * csa,
            rope=RopeConfig(rope_dim=8, theta=theta, yarn=None if sliding else yarn),
            head_norm=HeadNorm.FUSED,
            index=IndexCast.PLAIN,
            score_order=ScoreOrder.FP32,
            cache=None,
            eps=0.03 if form == "hf_eps" else 1e-6,
        )
    return config


# cases


@dataclass(frozen=True, kw_only=True)
class V4Case:
    """Packed sequences of `lengths`; `schedule`: one, chunksN, decode, mixed (a chunk, then decode steps) or last_two.

    `picks`: forced (drawn) or free (the layer selects).
    """

    kind: V4Kind
    lengths: tuple[int, ...]
    form: str = "micro"
    schedule: str = "one"
    regime: str = "normal"
    picks: str = "forced"

    @property
    def id(self) -> str:
        shape = f"{self.kind.value}-{self.form}-t{'.'.join(str(n) for n in self.lengths)}"
        return f"{shape}-{self.schedule}-{self.regime}-{self.picks}"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def config(self) -> V4AttnConfig:
        """The layer."""
        return v4_config(self.kind, self.form)


# inputs


def v4_weights(config: V4AttnConfig, rng: np.random.Generator, regime: str = "normal") -> V4Weights:
    """Release matrices where the cache is quantised, plain ones otherwise; every bias and norm weight is drawn."""
    released = config.cache is not None
    names = checkpoint_names(0)
    state: dict[str, Tensor] = {}
    for name, shape in v4_shapes(config).items():
        gain = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        if name.startswith("wq_b"):
            gain *= {"peaked": 4.0, "flat": 0.1}.get(regime, 1.0)
        if name == "sink_h" or name.endswith("bias_rw"):
            state[names[name]] = draws.normal(rng, *shape, dtype=torch.float32)
        elif "norm" in name:
            weight = draws.normal(rng, *shape, dtype=torch.float32, scale=0.1, mean=1.0)
            if regime == "rotary" and shape[0] == config.head_dim:  # positions show
                weight[-config.rope.rope_dim :] *= 8
            state[names[name]] = weight.to(torch.bfloat16) if released else weight
        elif name in MATRICES and released:
            w = draws.normal(rng, *shape, dtype=torch.float32, scale=gain)
            state[names[name]], state[names[f"{name}_sf"]] = quantize(w, fmt=FP8_128X128_UE8M0)
        else:
            dtype = torch.bfloat16 if released else torch.float32
            state[names[name]] = draws.normal(rng, *shape, dtype=dtype, scale=gain)
    return V4Weights.from_state_dict(state, prefix="", config=config)


def v4_table(config: V4AttnConfig, length: int) -> Tensor:
    """Angles of the first positions."""
    return rope_table(torch.arange(length), rope_frequencies(config.rope))


def v4_rows(case: V4Case, rng: np.random.Generator) -> Tensor:
    """Normalised hidden rows."""
    dtype = torch.bfloat16 if case.config.cache is not None else torch.float32
    x = draws.normal(rng, case.tokens, case.config.hidden, dtype=dtype, mean=1.0 if case.regime == "mean1" else 0.0)
    if case.regime == "far":  # one row in three is small: groups at the floor of the quantiser
        x[::3] *= 2.0**-20
    return draws.strided(x, pad=8)


def v4_picks(case: V4Case, rng: np.random.Generator) -> Tensor | None:
    """Entries that every query may see, or None."""
    config = case.config
    if case.kind is not V4Kind.CSA or case.picks == "free":
        return None
    positions = np.concatenate([np.arange(n) for n in case.lengths])
    picks = np.full((case.tokens, config.index_topk), -1, np.int32)
    for row, p in enumerate(positions):
        found = np.sort(rng.permutation((int(p) + 1) // config.ratio)[: config.index_topk])
        picks[row, : len(found)] = found
    return torch.from_numpy(picks)


def draw_whole(case: V4Case, rng: np.random.Generator) -> Inputs:
    """Whole sequences."""
    config = case.config
    inputs: Inputs = {
        "x_tm": v4_rows(case, rng),
        "weights": v4_weights(config, rng, case.regime),
        "table_sr": v4_table(config, max(case.lengths, default=0) + 1),
        "cu_seqlens": torch.tensor(np.cumsum([0, *case.lengths]).astype(np.int32)),
    }
    if case.kind is V4Kind.CSA:
        inputs["picks_tk"] = v4_picks(case, rng)
    return inputs | {"config": config}


def draw_run(case: V4Case, rng: np.random.Generator) -> Inputs:
    """The same with caches of 0xFF bytes, pages and states in random order."""
    config = case.config
    whole = draw_whole(case, rng)
    inputs: Inputs = {name: whole[name] for name in ("x_tm", "weights", "table_sr")}
    pages = [-(-n // config.page_tokens) for n in case.lengths]
    order = rng.permutation(sum(pages) + 2)
    table = np.full((len(pages), max(pages) + 1), -1)
    for b, n in enumerate(pages):
        table[b, :n] = order[sum(pages[:b]) : sum(pages[:b]) + n]
    inputs["caches"] = v4_caches(config, pages=sum(pages) + 2, states=len(pages) + 1, fill=255)
    states = rng.permutation(len(pages) + 1)[: len(pages)]
    inputs["batch"] = batch_of(case.lengths, case.schedule, config, table, states)
    if case.kind is V4Kind.CSA:
        inputs["picks_tk"] = whole["picks_tk"]
    return inputs | {"config": config}


def batch_of(
    lengths: tuple[int, ...], schedule: str, config: V4AttnConfig, table: np.ndarray, states: np.ndarray
) -> Csa2Batch:
    """The steps of a schedule."""
    counts, decode = counts_of(lengths, schedule, config.backtracking)
    zeros = torch.zeros(len(lengths), dtype=torch.int32)
    return Csa2Batch(
        counts_kb=torch.tensor(counts, dtype=torch.int32),
        decode_k=torch.tensor(decode),
        start_b=zeros,
        valid_b=zeros.clone(),
        state_b=torch.from_numpy(states.astype(np.int32)),
        table_bp=torch.from_numpy(table.astype(np.int32)),
    )


def counts_of(lengths: tuple[int, ...], schedule: str, most: int) -> tuple[list[list[int]], list[bool]]:
    """Tokens a step and sequence, and which steps are decode steps."""
    left, counts, decode = list(lengths), [], []

    def take(sizes: list[int], is_decode: bool) -> None:
        step = [min(n, size) for n, size in zip(left, sizes, strict=True)]
        counts.append(step)
        decode.append(is_decode)
        for b, n in enumerate(step):
            left[b] -= n

    if schedule == "one":
        take(list(lengths), False)
    elif schedule == "last_two":
        take([max(n - 2, 0) for n in lengths], False)
    elif schedule == "mixed":
        take([n // 2 for n in lengths], False)
    size = (
        {"decode": 1, "last_two": 2}.get(schedule) or int(schedule.removeprefix("chunks") or 1)
        if any(left) and (schedule != "mixed")
        else 1
    )
    while any(left):
        sizes = [1 + (b + len(counts)) % most if schedule == "mixed" else size for b in range(len(left))]
        take(sizes, not schedule.startswith("chunks"))
    return counts or [[0] * len(lengths)], decode or [False]


# stored records


def sectioned(cache_pow: Tensor, *, interleaved: bool = False) -> tuple[Tensor, RecordFormat]:
    """The records of all slots of sectioned pages, one to a row, and their format; interleaved ones stand so."""
    fmt = RECORD_FORMATS[cache_pow.shape[2]]
    if interleaved:
        return cache_pow.reshape(-1, fmt.record_bytes), fmt
    rest = fmt.record_bytes - fmt.scale_bytes
    flat = cache_pow.flatten(1)
    data, sf = flat.split([cache_pow.shape[1] * rest, cache_pow.shape[1] * fmt.scale_bytes], 1)
    data, sf = data.reshape(-1, rest), sf.reshape(-1, fmt.scale_bytes)
    return torch.cat([data[:, : fmt.data_bytes], sf, data[:, fmt.data_bytes :]], 1), fmt


@dataclass(frozen=True, kw_only=True)
class StoredPages:
    """Sectioned pages after a run: written slots by their values, every other slot untouched.

    `part` names the argument, or the field of the argument `caches`, that holds the bytes before the call; pad bytes
    are zero.
    """

    part: str
    limit: Rule

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Slots as CONTRACT writes them, values inside the limit."""
        arguments = oracles.arguments
        held = arguments[self.part] if self.part in arguments else getattr(arguments["caches"], self.part)
        interleaved = "store" in arguments and arguments["store"].layout is PageLayout.INTERLEAVED
        before, fmt = sectioned(held.cpu(), interleaved=interleaved)
        have, want, honest, rival = (
            sectioned(x.to(torch.uint8), interleaved=interleaved)[0]
            for x in (got.cpu(), oracles.contract, oracles.semantic, oracles.rival)
        )
        written = (want != before).any(1)
        wrong = ((have != before).any(1) != written).nonzero()[:, 0]
        if len(wrong):
            state = "left" if written[wrong[0]] else "written"
            return _refused(
                f"{len(wrong)} slots written or left otherwise than by CONTRACT, first {int(wrong[0])} {state}"
            )
        if not written.any():
            return Judgement(ok=True, used=0.0)
        pads = have[written][:, fmt.data_bytes + fmt.scale_bytes - fmt.pad : fmt.data_bytes + fmt.scale_bytes]
        if fmt.pad and pads.any():
            return _refused("a byte behind the scales is not zero")
        rows = [
            unpack_records(x[written], fmt=fmt, num=SEMANTIC).to(torch.float64) for x in (honest, want, rival, have)
        ]
        coded, tails = ([x[:, part] for x in rows] for part in (slice(fmt.channels), slice(fmt.channels, None)))
        found = [self.limit.judge(coded[3].to(torch.float32), _views(coded, oracles))]
        if fmt.tail:  # apart and in its own dtype: beside codes a wrong rounding of it is too small to be seen
            found.append(V4_LAYER.judge(tails[3].to(torch.bfloat16), _views(tails, oracles)))
        return max(found, key=lambda judgement: (not judgement.ok, judgement.used))


@dataclass(frozen=True, kw_only=True)
class StoredPool:
    """The fp32 ring of a compressor: written rows by their values, every other row untouched (poisoned)."""

    limit: Rule

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Rows as CONTRACT writes them, values inside the limit."""
        written = ~oracles.contract.isnan().all(-1)
        if not written.any():
            return Judgement(ok=True, used=0.0)
        views = _Values(
            semantic=oracles.semantic[written],
            contract=oracles.contract[written],
            rival=oracles.rival[written],
            arguments=oracles.arguments,
        )
        return self.limit.judge(got[written.to(got.device)], views)


@dataclass(frozen=True, kw_only=True)
class _Values:
    semantic: Tensor
    contract: Tensor
    rival: Tensor
    arguments: dict[str, Any]
    marks: list[tuple[str, Tensor]] = field(default_factory=list)


def _views(rows: list[Tensor], oracles: Oracles) -> _Values:
    return _Values(semantic=rows[0], contract=rows[1], rival=rows[2], arguments=oracles.arguments)


def _refused(message: str) -> Judgement:
    return Judgement(ok=False, used=float("inf"), message=message)


@dataclass(frozen=True, kw_only=True)
class Selected:
    """A selection whose scores are no input: CONTRACT makes them, `rule` judges the selection on them."""

    rule: TopK
    scores: Callable[[dict[str, Any]], Tensor] = field(repr=False)

    def judge(self, got: Tensor, oracles: Oracles) -> Judgement:
        """Judge by the scores of CONTRACT; ties at zero, which no rounding makes or breaks, go to the lower entry."""
        scores = self.scores(oracles.arguments)
        views = _Values(
            semantic=oracles.semantic,
            contract=oracles.contract,
            rival=oracles.rival,
            arguments=oracles.arguments | {self.rule.scores: scores},
        )
        found = self.rule.judge(got, views)
        for row, (picks, score) in enumerate(zip(got.cpu(), scores, strict=True)):
            zeros = (score == 0).nonzero()[:, 0]
            chosen = torch.isin(zeros, picks.long())
            if found.ok and bool((~chosen[:-1] & chosen[1:]).any()):
                return _refused(f"row {row}: of the entries {zeros.tolist()}, all of score 0, a later one was chosen")
        return found


# relation hooks


def other_schedules(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The same tokens in other steps: outputs, pages and states keep their bytes."""
    batch, config = inputs["batch"], inputs["config"]
    lengths = tuple(batch.counts_kb.sum(0).tolist())
    schedules = ["last_two"] if sum(lengths) < 12 else ["mixed", "chunks5"]
    for schedule in [*schedules, "one", "chunks1", "decode", "chunks7"] if context.full else schedules:
        counts, decode = counts_of(lengths, schedule, config.backtracking)
        changed = replace(batch, counts_kb=torch.tensor(counts, dtype=torch.int32), decode_k=torch.tensor(decode))
        yield Variant(label=f"schedule {schedule}", calls=(inputs | {"batch": changed},))


def moved_pages(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The pages of all sequences elsewhere; moved back, they hold the same bytes."""
    batch, paged = inputs["batch"], ("main_pow", "index_pow")
    order = torch.from_numpy(context.rng.permutation(len(inputs["caches"].main_pow)))
    table = torch.where(batch.table_bp >= 0, order[batch.table_bp.clamp(min=0).long()], -1).to(torch.int32)

    def back(results: list[Outputs]) -> Outputs:
        return {name: x[order] if name in paged else x for name, x in results[0].items()}

    yield Variant(label="other pages", calls=(inputs | {"batch": replace(batch, table_bp=table)},), join=back)


def alone(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Each packed sequence without its neighbours."""
    batch, start = inputs["batch"], 0
    for b, n in enumerate(batch.counts_kb.sum(0).tolist()):
        rows = slice(start, start + n)
        start += n
        steps = batch.counts_kb[:, b] > 0
        if not n:
            continue
        own = Csa2Batch(
            counts_kb=batch.counts_kb[steps][:, b : b + 1],
            decode_k=batch.decode_k[steps],
            **{f: getattr(batch, f)[b : b + 1] for f in ("start_b", "valid_b", "state_b", "table_bp")},
        )
        call = inputs | {"x_tm": inputs["x_tm"][rows], "batch": own}
        if inputs.get("picks_tk") is not None:
            call["picks_tk"] = inputs["picks_tk"][rows]

        def picked(outputs: Outputs, rows: slice = rows) -> Outputs:
            return {"y_tm": outputs["y_tm"][rows]}

        yield Variant(
            label=f"sequence {b} alone", calls=(call,), join=lambda rs: {"y_tm": rs[0]["y_tm"]}, expect=picked
        )


def later_tokens(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The last tokens of a single sequence replaced by garbage."""
    kept = len(inputs["x_tm"]) // 2

    def first(outputs: Outputs) -> Outputs:
        return {"y_tm": outputs["y_tm"][:kept]}

    x = inputs["x_tm"].clone()
    x[kept:] = 30.0 * x[kept:].flip(-1)
    yield Variant(label="other future", calls=(inputs | {"x_tm": x},), join=lambda rs: first(rs[0]), expect=first)


def taken_back(inputs: Inputs, call: Any, context: Context) -> Iterator[tuple[str, Outputs, Outputs]]:
    """Steps of which tokens are rejected and run again leave what the accepted tokens leave alone (single sequence)."""
    config, batch, total = inputs["config"], inputs["batch"], len(inputs["x_tm"])
    most = config.backtracking
    one = replace(
        batch, counts_kb=torch.ones(total, 1, dtype=torch.int32), decode_k=torch.ones(total, dtype=torch.bool)
    )
    expected = call(inputs | {"batch": one})
    caches, done, turn, rows, got = inputs["caches"], 0, 0, [], expected
    while done < total:
        size = min(most, total - done)
        accepted = min(1 + turn % most, size)
        x = inputs["x_tm"][done : done + size].clone()
        x[accepted:] = -x[accepted:]
        step = replace(
            batch,
            counts_kb=torch.tensor([[size]], dtype=torch.int32),
            decode_k=torch.tensor([True]),
            start_b=torch.tensor([done], dtype=torch.int32),
        )
        now = inputs | {"x_tm": x, "caches": caches, "batch": step}
        if inputs.get("picks_tk") is not None:
            now["picks_tk"] = inputs["picks_tk"][done : done + size]
        got = call(now)
        rows.append(got["y_tm"][:accepted])
        caches = V4Caches(**{name: got[name] for name in caches.parts()})
        done, turn = done + accepted, turn + 1
    yield "rejected tokens leave no trace", got | {"y_tm": torch.cat(rows)}, expected


def sequences_alone(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Each whole sequence without its neighbours."""
    bounds = inputs["cu_seqlens"].tolist()
    for low, high in zip(bounds, bounds[1:], strict=False):
        if low == high:
            continue
        call = inputs | {"x_tm": inputs["x_tm"][low:high], "cu_seqlens": torch.tensor([0, high - low])}
        if inputs.get("picks_tk") is not None:
            call["picks_tk"] = inputs["picks_tk"][low:high]
        yield Variant(
            label=f"rows {low} to {high} alone",
            calls=(call,),
            expect=lambda outputs, a=low, b=high: {"y_tm": outputs["y_tm"][a:b]},  # type: ignore[misc]
        )
