"""One layer of a checkpoint, judged by what another engine's dump says went into it and came out of it.

`deeptwin layer DIR DUMP --layer 3` opens the checkpoint without reading it, takes the tensors of this layer alone, runs
the reference on the hidden states of the dump, and compares every stage of the layer that the dump has. Names are those
that `reference/block.py` gives; a map tells others. What a layer reads of a dump:

    V3, V3.2    layers.2.stream.attn and layers.2.ffn.out of the layer before; embed for layer 0
    V4          layers.2.stream.ffn; embed for layer 0; token (the ids) where a table routes
    V4.1        layers.2.stream.ffn and layers.2.ffn.pre; embed for layer 0; image (bool) if there are images;
                memory.rows for a layer with a memory. A layer that reads keys of another one needs that one's
                layers.N.attn.norm, a layer that uses the selection of another one its layers.N.attn.picks

Values are judged by the budget of blocks (R1: SEMANTIC against RIVAL), choices (experts, picks) against CONTRACT. A
token whose choices depend on how honest arithmetic rounds is not judged: within a layer no other token feels them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from deeptwin.reference.block import block_v3, block_v4
from deeptwin.reference.block_v41 import V41Carry, V41Sequence, V41Stack, block_v41, stack_of, start_v41
from deeptwin.reference.block_weights import V3BlockWeights, V4BlockWeights, V41BlockWeights
from deeptwin.reference.checkpoint import OpenModel, value_faults
from deeptwin.reference.config import Combine, PageLayout, ScoreOrder
from deeptwin.reference.csa2 import csa2_project
from deeptwin.reference.csa2_config import CastPoints
from deeptwin.reference.csa2_layer import csa2_compress_, csa2_select
from deeptwin.reference.csa2_state import Csa2Caches
from deeptwin.reference.mhc import mhc_expand
from deeptwin.reference.numerics import CONTRACT, RIVAL, SEMANTIC, Numerics
from deeptwin.reference.presets import V3Config, V4Config, V41Config
from deeptwin.reference.rope import table_of
from deeptwin.reference.taps import Tap, under
from deeptwin.reference.topology import LayerMode
from deeptwin.reference.weights import Csa2Weights, stored

from .bisect import Compared, MapRule, Misfit, aligned, compare, rule_for
from .capture import Dump, DumpWriter, Stage
from .rules import BLOCK

Run = Callable[[Numerics, Tap], None]
# every stage of a block on given rows. The mean signed error of BLOCK is in units of bf16; where it is larger, as in an
# fp32 stage behind bf16 roundings, its t decides. Measured on tiny models that round as the contract says (8 seeds,
# 32 tokens, 1 912 judgements in the layers of four generations): no alarm, at most 0.77 used
LAYER = replace(BLOCK, bias_t=6.0)


class CannotJudge(ValueError):
    """The layer cannot be run: the dump lacks an input, or the checkpoint holds values that are none."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a dump says, by the reference's names."""

    dump: Dump
    rules: Sequence[MapRule] | None = None
    step: int = 0
    rank: int = 0

    def has(self, name: str) -> bool:
        """Whether the dump has the stage."""
        return self.key(name) in {stage.key for stage in self.dump.stages}

    def __call__(self, name: str, axes: int) -> Tensor:
        """A stage with this number of axes; a batch of one before them is left out.

        Raises:
            CannotJudge: the dump has no such stage, or one with other axes.
        """
        rule, key = self._rule(name), self.key(name)
        stage = next((stage for stage in self.dump.stages if stage.key == key), None)
        if stage is None:
            raise CannotJudge(f"{name}: expected in the dump as an input, got no stage {key}")
        x = self.dump.tensor(stage)
        x = x.reshape(rule.shape) if rule is not None and rule.shape else x
        x = x[0] if x.dim() == axes + 1 and x.shape[0] == 1 else x
        if x.dim() != axes:
            raise CannotJudge(f"{name}: expected {axes} axes, got shape {tuple(x.shape)}")
        return x

    def _rule(self, name: str) -> MapRule | None:
        return next((rule for rule in self.rules or () if rule.name_of(name) is not None), None)

    def key(self, name: str) -> str:
        """How the dump calls a stage, with its step and rank."""
        rule = self._rule(name)
        called = name if self.rules is None else "-" if rule is None else rule.name_of(name)
        return f"{called}@{self.step}.{self.rank}"


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A judged layer: its stages in order, and the tokens that were not judged because their choices are close."""

    stages: list[Compared]
    open_tokens: list[int]


def judge_layer(
    model: OpenModel, layer: int, given: Given, *, stack: V41Stack | None = None, limit: float | None = None
) -> Walk:
    """Every stage of a layer beside the dump's, in the order in which they are computed.

    `stack` says which choices the engine made where implementations of V4.1 disagree; without it, the release's.
    `limit` is the relative distance that a row may have from CONTRACT, in place of R1's budget.

    Raises:
        ValueError: the layer is none of the main model.
        CannotJudge: an input is missing; weights of the layer are no numbers.
        BadDump: a tensor of the dump cannot be read.
    """
    if not 0 <= layer < model.config.num_layers:
        raise ValueError(f"layer: expected 0 to {model.config.num_layers - 1}, got {layer}")
    spoiled = value_faults({name: model.tensors[name] for name in names_of(model, layer)})
    if spoiled:
        raise CannotJudge("\n".join(spoiled))
    run = _run(model, layer, given, stack)
    contract, meant, rival = (_heard(run, num) for num in (CONTRACT, SEMANTIC, RIVAL))
    close_t = torch.zeros(len(next(iter(contract.values()))), dtype=torch.bool)
    for name, x in contract.items():
        if not x.is_floating_point():
            close_t |= ((x != meant[name]) | (x != rival[name])).flatten(1).any(1)
    if close_t.all():
        raise CannotJudge(f"tokens: expected one whose choices are clear, got {len(close_t)} that are close")
    truth = {name: meant[name] if limit is None and x.is_floating_point() else x for name, x in contract.items()}
    with TemporaryDirectory() as place:
        theirs = _aligned_rows(given, truth, ~close_t, Path(place, "theirs"))
        ours = [
            _written(Path(place, name), {key: x[~close_t] for key, x in run.items()}, given)
            for name, run in (("truth", truth), ("rival", rival))
        ]
        rival_dump = ours[1] if limit is None else None
        same = [_same_name(name, given.rules) for name in truth]
        stages = list(compare(ours[0], theirs, rival=rival_dump, rules=same, limit=limit, budget=LAYER))
    return Walk(stages=stages, open_tokens=[int(t) for t in close_t.nonzero()[:, 0]])


def _same_name(name: str, rules: Sequence[MapRule] | None) -> MapRule:
    """What is left of a stage's rule once its tensor has the reference's name and axes."""
    rule = next((rule for rule in rules or () if rule.name_of(name) is not None), None)
    return MapRule(reference=name, candidate=name, unordered=rule is not None and rule.unordered)


def _aligned_rows(given: Given, truth: Mapping[str, Tensor], keep_t: Tensor, folder: Path) -> Dump:
    """The dump's stages under the reference's names and axes, without the rows that are not judged."""
    found, theirs = {}, {stage.key: stage for stage in given.dump.stages}
    rules = None if given.rules is None else list(given.rules)
    for name, x in truth.items():
        stage = Stage(name=name, step=given.step, rank=given.rank, shape=tuple(x.shape))
        rule, other = rule_for(stage, rules), theirs.get(given.key(name))
        if rule is None or other is None:
            continue
        got = given.dump.tensor(other)
        try:
            found[name] = aligned(got, other, rule, stage)[keep_t]
        except Misfit:
            found[name] = got  # the walk says what does not fit
    return _written(folder, found, given)


def _heard(run: Run, num: Numerics) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    run(num, found.__setitem__)
    return found


def _written(folder: Path, stages: Mapping[str, Tensor], given: Given) -> Dump:
    with DumpWriter(folder, producer="reference") as write:
        for name, x in stages.items():
            write(name, x, step=given.step, rank=given.rank)
    return Dump(folder)


def names_of(model: OpenModel, layer: int) -> list[str]:
    """The tensors of a layer, without the table of its memory, of which a token reads a few rows."""
    prefixes = (f"layers.{layer}.", f"model.layers.{layer}.")
    return [name for name in model.tensors if name.startswith(prefixes) and ".engram.embed." not in name]


def _run(model: OpenModel, layer: int, given: Given, stack: V41Stack | None) -> Run:
    if isinstance(model.config, V3Config):
        return _run_v3(model, model.config, layer, given)
    if isinstance(model.config, V4Config):
        return _run_v4(model, model.config, layer, given)
    return _run_v41(model, stack or released(model.config), layer, given)


def released(config: V41Config) -> V41Stack:
    """The choices of the release."""
    return stack_of(
        config,
        cast=CastPoints.RELEASE,
        score_order=ScoreOrder.BF16_RELEASE,
        layout=PageLayout.INTERLEAVED,
        combine=Combine.SINGLE,
    )


def _run_v3(model: OpenModel, config: V3Config, layer: int, given: Given) -> Run:
    prefix = f"model.layers.{layer}."
    weights = V3BlockWeights.from_state_dict(model.weights, prefix=prefix, config=config, layer=layer)
    if layer:
        h_tm, y_tm = given(f"layers.{layer - 1}.stream.attn", 2), given(f"layers.{layer - 1}.ffn.out", 2)
    else:
        h_tm = given("embed", 2)
        y_tm = torch.zeros_like(h_tm)
    table_sr = table_of(config.attention.rope, len(h_tm))
    dtype = torch.float32 if model.plain == "F32" else torch.bfloat16

    def run(num: Numerics, tap: Tap) -> None:
        own = under(f"layers.{layer}.", tap)
        block_v3(num.wide(h_tm), num.wide(y_tm), weights, table_sr, config=config, dtype=dtype, num=num, tap=own)

    return run


def _run_v4(model: OpenModel, config: V4Config, layer: int, given: Given) -> Run:
    weights = V4BlockWeights.from_state_dict(model.weights, prefix=f"layers.{layer}.", config=config, layer=layer)
    rows = given(f"layers.{layer - 1}.stream.ffn", 3) if layer else given("embed", 2)
    tokens = len(rows)
    needs_ids = layer < config.hash_layers
    token_t = given("token", 1) if needs_ids else torch.zeros(tokens, dtype=torch.int64)
    table_sr = table_of(config.rope(layer), tokens)

    def run(num: Numerics, tap: Tap) -> None:
        x_tnm = num.wide(rows) if layer else mhc_expand(num.wide(rows), config=config.mhc)[0]
        own = under(f"layers.{layer}.", tap)
        block_v4(x_tnm, token_t, weights, table_sr, config=config, layer=layer, num=num, tap=own)

    return run


def _run_v41(model: OpenModel, stack: V41Stack, layer: int, given: Given) -> Run:
    config, state = stack.model, model.weights
    own = V41BlockWeights.from_state_dict(state, config=config, csa2=stack.csa2, engram=config.memory, layer=layer)
    is_first = layer == 0
    stream = given("embed", 2) if is_first else given(f"layers.{layer - 1}.stream.ffn", 3)
    pre_tn = None if is_first else given(f"layers.{layer - 1}.ffn.pre", 2)
    sources = {source: given(f"layers.{source}.attn.norm", 2) for source in sources_of(stack, layer)}
    needs_picks = stack.csa2.topology.mode(layer) is LayerMode.REUSE
    source = stack.csa2.topology.index_source(layer) if needs_picks else None
    idx_tk = None if source is None else given(f"layers.{source}.attn.picks", 2)
    sequence = _sequence(model, stack, layer, given, len(stream))

    def run(num: Numerics, tap: Tap) -> None:
        if pre_tn is None:
            stream_tnm, read_tn = mhc_expand(num.wide(stream), config=config.mhc)
        else:
            stream_tnm, read_tn = num.wide(stream), num.wide(pre_tn)
        caches = replace(sequence.caches, page_pq=sequence.caches.page_pq.clone())
        caches = replace(caches, state_sq=caches.state_sq.clone())
        blocks_tk = _prepare_(model, stack, sources, caches, sequence, layer, num)
        carry = V41Carry(stream_tnm=stream_tnm, pre_tn=read_tn, idx_tk=idx_tk, blocks_tk=blocks_tk)
        mine = replace(sequence, caches=caches)
        block_v41(carry, own, mine, config=stack, layer=layer, num=num, tap=under(f"layers.{layer}.", tap))

    return run


def sources_of(stack: V41Stack, layer: int) -> list[int]:
    """Other layers whose attention input a layer of V4.1 depends on: who makes its keys, who its candidates."""
    map_ = stack.csa2.topology
    if map_.mode(layer) in (LayerMode.SWA, LayerMode.FULL):
        return []
    candidates = [map_.candidate_source] if map_.reads_candidates(layer) else []
    return sorted({source for source in (map_.kv_source(layer), *candidates) if source is not None} - {layer})


def _sequence(model: OpenModel, stack: V41Stack, layer: int, given: Given, tokens: int) -> V41Sequence:
    memory, state = stack.model.memory, model.weights
    image_t = given("image", 1) if given.has("image") else torch.zeros(tokens, dtype=torch.bool)
    rows_ltz = torch.full((len(memory.layer_ids), tokens, memory.num_columns), -1, dtype=torch.int32)
    if layer in memory.layer_ids:
        rows_ltz = given("memory.rows", 3)
    names = [f"layers.{owner}.engram.embed." for owner in memory.layer_ids]
    tables = tuple((state[name + "weight"], stored(state[name + "scale"])) for name in names)
    return start_v41(image_t, rows_ltz, tables, config=stack)


def _prepare_(
    model: OpenModel,
    stack: V41Stack,
    sources: dict[int, Tensor],
    caches: Csa2Caches,
    sequence: V41Sequence,
    layer: int,
    num: Numerics,
) -> Tensor | None:
    """Store the entries that the layer reads, and find the candidates that it selects from."""
    csa2, map_, blocks_tk = stack.csa2, stack.csa2.topology, None
    for source, x_tm in sources.items():
        weights = Csa2Weights.from_state_dict(model.weights, layer=source, config=csa2)
        x_tm = num.wide(x_tm)
        if map_.mode(source) is LayerMode.FULL:
            csa2_compress_(x_tm, weights, caches, sequence.step, layer=source, config=csa2, num=num)
        if source == map_.candidate_source and map_.reads_candidates(layer):
            table_sr = caches.table(csa2, source)
            _, _, latent_ta = csa2_project(x_tm, weights, table_sr, sequence.step.positions_t, config=csa2, num=num)
            _, blocks_tk = csa2_select(
                x_tm, latent_ta, weights, caches, sequence.step, None, layer=source, config=csa2, num=num
            )
    return blocks_tk
