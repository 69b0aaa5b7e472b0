"""How whole blocks are checked: wired to what they should be, beside transformers' layers, blind to the future.

What a block is made of has cards of its own. Choices (experts, keys) are drawn so that no honest rounding changes one;
`python -m deeptwin.parity.peer_table` compares whole models in which they are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.block_v41 import V41Stack, stack_of, start_v41
from deeptwin.reference.config import (
    Combine,
    HeadNorm,
    IndexCast,
    PageLayout,
    ResidualNorm,
    ScoreOrder,
    WeighExperts,
    WeightCast,
)
from deeptwin.reference.csa2_config import CastPoints
from deeptwin.reference.engram import engram_hash
from deeptwin.reference.engram_vocab import hash_layout
from deeptwin.reference.presets import V3Config, V4Config, preset, tiny_v3, tiny_v32, tiny_v41_flash
from deeptwin.reference.rope import table_of

from .. import draws
from ..block_draws import memory_tables, v3_block, v4_block, v41_block
from ..card import REGIMES, Card, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import Context, Variant
from ..rules import BLOCK, Close

_mutant, _control = variants("block")

GAIN = {"peaked": 4.0, "flat": 0.1}


@dataclass(frozen=True, kw_only=True)
class V3Case:
    """A block over `tokens`: `model` v3 or v32, `layer` 0 dense or 1 with experts; `plain` as transformers has it."""

    tokens: int
    model: str = "v3"
    layer: int = 1
    dtype: str = "fp32"
    plain: bool = True
    eps: float = 1e-6
    regime: str = "normal"

    @property
    def id(self) -> str:
        how = f"{'plain' if self.plain else 'release'}-eps{self.eps}"
        return f"{self.model}-l{self.layer}-t{self.tokens}-{how}-{self.dtype}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class V4Case:
    """Layer `layer` of a tiny V4 over `tokens`; `plain`: without quantisers, as transformers has it."""

    tokens: int
    model: str = "flash"
    layer: int = 1
    plain: bool = True
    eps: float = 1e-6
    regime: str = "normal"

    @property
    def id(self) -> str:
        how = f"{'plain' if self.plain else 'release'}-eps{self.eps}"
        return f"{self.model}-l{self.layer}-t{self.tokens}-{how}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class V41Case:
    """Two narrow layers of V4.1 over `tokens`, some of them of an image."""

    tokens: int
    images: int = 1
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"t{self.tokens}-images{self.images}-{self.regime}"


def v3_config(case: V3Case) -> V3Config:
    """The tiny model of a case."""
    config = tiny_v3() if case.model == "v3" else tiny_v32()
    config = replace(config, norm_eps=case.eps)
    return plain_v3(config) if case.plain else config


def plain_v3(config: V3Config) -> V3Config:
    """The same model as transformers has it: nothing quantised, weights behind a rounding."""
    index = None if config.index is None else replace(config.index, key=None, latent=None)
    attention = replace(config.attention, weight_cast=WeightCast.BEFORE_WEIGHT)
    return replace(config, attention=attention, index=index, residual=ResidualNorm.ROUNDED)


def v4_config(case: V4Case) -> V4Config:
    """The tiny model of a case; every block of 4 tokens is picked."""
    config = preset(f"tiny_v4_{case.model}")
    assert isinstance(config, V4Config)
    attention = replace(config.attention, index_topk=16)
    if case.plain:
        attention = plain_v4(replace(config, attention=attention)).attention
    mhc = replace(config.mhc, eps=0.05, norm_eps=case.eps) if case.eps > 1e-6 else config.mhc
    return replace(config, attention=attention, norm_eps=case.eps, mhc=mhc)


def plain_v4(config: V4Config) -> V4Config:
    """The same model as transformers has it: no quantisers, no Hadamard transform, fp32 index scores."""
    attention = replace(
        config.attention,
        head_norm=HeadNorm.FACTOR,
        index=IndexCast.PLAIN,
        score_order=ScoreOrder.FP32,
        cache=None,
    )
    return replace(config, attention=attention, weigh=WeighExperts.AFTER_DOWN)


def v41_config() -> V41Stack:
    """Two narrow layers that own keys, one of each ratio; the first has a memory. Every entry is picked.

    Quantisers amplify what honest arithmetic differs in: by 2 to 7 % behind four layers (20 % with sharp attention),
    where the faults of the seams drown.
    """
    model = tiny_v41_flash()
    narrow = replace(
        model,
        hidden=64,
        num_layers=2,
        attention=replace(
            model.attention,
            num_heads=2,
            q_lora_rank=32,
            compress_ratios=(2, 1, 0, 0),
            kv_source_layers=(0, 1),
            index_source_layers=(0, 1),
            candidate_source_layer=1,
            index_topk=16,
        ),
        moe=replace(model.moe, experts=4, width=32),
        engram=replace(model.engram, layers=(0,), table_rows=(240,)),
        draft=replace(model.draft, target_layers=(0, 1)),
    )
    return stack_of(
        narrow,
        cast=CastPoints.RELEASE,
        score_order=ScoreOrder.BF16_RELEASE,
        layout=PageLayout.INTERLEAVED,
        combine=Combine.SINGLE,
    )


def _rows(rng: np.random.Generator, regime: str, *shape: int, dtype: torch.dtype) -> Tensor:
    return draws.normal(rng, *shape, dtype=dtype, mean=1.0 if regime == "mean1" else 0.0)


def draw_v3(case: V3Case, rng: np.random.Generator) -> Inputs:
    """What passes by, and the output of a block before."""
    config, dtype = v3_config(case), {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    return {
        "h_tm": _rows(rng, case.regime, case.tokens, config.hidden, dtype=dtype),
        "y_tm": _rows(rng, case.regime, case.tokens, config.hidden, dtype=dtype),
        "weights": v3_block(config, case.layer, rng, dtype, gain=GAIN.get(case.regime, 1.0)),
        "table_sr": table_of(config.attention.rope, case.tokens + 1),
        "config": config,
        "dtype": dtype,
    }


def draw_v4(case: V4Case, rng: np.random.Generator) -> Inputs:
    """Streams, and token ids for the table of layer 0."""
    config = v4_config(case)
    n, m = config.mhc.streams, config.hidden
    return {
        "stream_tnm": _rows(rng, case.regime, case.tokens, n, m, dtype=torch.bfloat16),
        "token_t": torch.from_numpy(rng.integers(0, config.vocab_size, case.tokens)),
        "weights": v4_block(config, case.layer, rng, gain=GAIN.get(case.regime, 1.0)),
        "table_sr": table_of(config.rope(case.layer), case.tokens + 1),
        "config": config,
        "layer": case.layer,
    }


def draw_v41(case: V41Case, rng: np.random.Generator) -> Inputs:
    """Embeddings, rows of both memory tables, image tokens in the middle."""
    config, tokens = v41_config(), case.tokens
    image_t = torch.zeros(tokens, dtype=torch.bool)
    image_t[tokens // 2 : tokens // 2 + case.images] = True
    engram = config.model.memory
    window = torch.from_numpy(rng.integers(0, engram.num_classes, (tokens, engram.max_ngram)).astype(np.int32))
    row_ltz = engram_hash(window, image_t, layout=hash_layout(engram))
    gain = GAIN.get(case.regime, 1.0)
    return {
        "embed_tm": _rows(rng, case.regime, tokens, config.model.hidden, dtype=torch.bfloat16),
        "layers": tuple(v41_block(config, layer, rng, gain=gain) for layer in range(config.model.num_layers)),
        "sequence": start_v41(image_t, row_ltz, memory_tables(config, rng), config=config),
        "config": config,
    }


def cases_v3(full: bool) -> list[V3Case]:
    """Both kinds of layer of both models, both places of the norm's sum, large epsilons, regimes."""
    base = V3Case(tokens=12)
    found = [base, replace(base, eps=0.03)]
    found += [replace(base, model=m, layer=layer) for m, layer in product(("v3", "v32"), (0, 1))]
    found += [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, tokens=1), replace(base, tokens=0)]
    found += [replace(base, tokens=7, model=m, dtype="bf16", plain=False) for m in ("v3", "v32")]
    if full:
        found += [replace(base, tokens=40, model=m, regime=r) for m, r in product(("v3", "v32"), REGIMES)]
        found += [
            replace(base, tokens=8, model=m, layer=layer, dtype="bf16", plain=False, regime=r)
            for m, layer, r in product(("v3", "v32"), (0, 1), REGIMES)
        ]
    return list({case.id: case for case in found}.values())


def cases_v4(full: bool) -> list[V4Case]:
    """Every kind of attention and both routers, with and without quantisers, large epsilons, regimes."""
    base = V4Case(tokens=18)
    found = [replace(base, layer=0), replace(base, eps=0.03), base, replace(base, layer=2)]
    found += [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, model="pro", layer=0)]
    found += [replace(base, layer=layer, plain=False) for layer in range(3)]
    found += [replace(base, tokens=1), replace(base, tokens=0)]
    if full:
        found += [
            replace(base, tokens=40, model=m, layer=layer, plain=p, regime=r)
            for m, layer, p, r in product(("flash", "pro"), range(4), (True, False), REGIMES)
        ]
    return list({case.id: case for case in found}.values())


def cases_v41(full: bool) -> list[V41Case]:
    """With and without an image, regimes."""
    base = V41Case(tokens=5)
    found = [replace(base, regime=r) for r in REGIMES] + [replace(base, tokens=1, images=0)]
    if full:
        found += [replace(base, tokens=14, images=n, regime=r) for n, r in product((0, 3), REGIMES)]
    return list({case.id: case for case in found}.values())


def later_tokens(row: str) -> Callable[[Inputs, Context], Iterator[Variant]]:
    """The second half of the sequence replaced by other rows."""

    def hook(inputs: Inputs, context: Context) -> Iterator[Variant]:
        kept = len(inputs[row]) // 2
        x = inputs[row].clone()
        x[kept:] = 30.0 * x[kept:].flip(-1)

        def first(outputs: Outputs) -> Outputs:
            return {name: value[:kept] for name, value in outputs.items()}

        yield Variant(
            label=f"garbage after token {kept - 1}",
            calls=(inputs | {row: x},),
            join=lambda rs: first(rs[0]),
            expect=first,
        )

    return hook


def shorter(*rows: str) -> Callable[[Inputs, Context], Iterator[Variant]]:
    """The first tokens alone: no row depends on how many follow."""

    def hook(inputs: Inputs, context: Context) -> Iterator[Variant]:
        for kept in sorted({1, len(inputs[rows[0]]) - 1}):

            def first(outputs: Outputs, kept: int = kept) -> Outputs:
                return {name: value[:kept] for name, value in outputs.items()}

            cut = {name: inputs[name][:kept] for name in rows}
            yield Variant(label=f"{kept} tokens", calls=(inputs | cut,), expect=first)

    return hook


def experts_renumbered(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The experts under other numbers: what is added is the same, in another order."""
    weights = inputs["weights"]
    ffn = weights.ffn
    order = torch.from_numpy(context.rng.permutation(len(ffn.gate_em)))
    place = torch.argsort(order)
    moved = replace(
        ffn,
        gate_em=ffn.gate_em[order],
        bias_e=None if ffn.bias_e is None else ffn.bias_e[order],
        table_vk=None if ffn.table_vk is None else place[ffn.table_vk],
        experts=replace(ffn.experts, w13_eim=ffn.experts.w13_eim[order], w2_emf=ffn.experts.w2_emf[order]),
    )
    yield Variant(label="other numbers", calls=(inputs | {"weights": replace(weights, ffn=moved)},))


def plain_fp32(case: V3Case) -> bool:
    """What transformers has."""
    return case.plain and case.dtype == "fp32" and case.tokens > 0


def plain(case: V4Case) -> bool:
    """What transformers has."""
    return case.plain and case.tokens > 0


def several(case: V3Case | V4Case | V41Case) -> bool:
    """Enough tokens to leave some out: every kind of layer once, as released."""
    released = isinstance(case, V41Case) or not case.plain
    return released and case.tokens > 2 and case.regime == "normal"


EXPLAINS = "fp32 products in library order; see the table of stages in DECISIONS"

V3 = Op(
    name="block_v3",
    reference="deeptwin.reference.block:block_v3",
    outputs=tuple(
        Output(name=name, rule={torch.float32: Close(rtol=2e-6), torch.bfloat16: BLOCK}) for name in ("h_tm", "y_tm")
    ),
    cases=cases_v3,
    draw=draw_v3,
    rows={"h_tm": 0, "y_tm": 0},
    out_rows={"h_tm": 0, "y_tm": 0},
    relations=(
        Relation(name="causality", axis="later tokens", hook=later_tokens("h_tm"), only=several),
        Relation(name="chunk_invariant", axis="length", hook=shorter("h_tm", "y_tm"), only=several),
    ),
    peers=(
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.block:transformers_v3",
            needs=("transformers",),
            explains=EXPLAINS,
            rules={name: Close(rtol=4e-6) for name in ("h_tm", "y_tm")},
            only=plain_fp32,
        ),
    ),
    mutants=(
        _mutant("v3_pending_lost", "U39", "the output of the block before is not added"),
        _mutant("v3_attention_lost", "U39", "attention is not added to what passes by"),
        _mutant("v3_attention_twice", "U39", "attention is added twice"),
        _mutant("v3_experts_beside_attention", "U39", "the feed-forward half reads what attention read"),
        _mutant("v3_norms_swapped", "U39", "the norms of the two halves are exchanged"),
        _mutant("v3_fixed_eps", "U39", "the epsilon of the norms is a constant"),
        _mutant("v3_shared_expert_missing", "U39", "the shared expert is left out"),
        _mutant("v3_not_weighed", "U44", "experts are added without their weights"),
        _mutant("v3_weighed_twice", "U44", "the routing weight stands before and behind the down projection"),
        _mutant("v3_gate_and_up_swapped", "U50", "the up projection is the gate"),
        _mutant("v3_next_expert", "U47", "every expert is the next one"),
        _mutant("v3_bias_ignored", "U49", "the router has no bias"),
    ),
    controls=(_control("v3_right"), _control("v3_right_honest")),
    golden=lambda: [V3Case(tokens=5, model=m, dtype="bf16", plain=False) for m in ("v3", "v32")],
)

V4 = Op(
    name="block_v4",
    reference="deeptwin.reference.block:block_v4",
    outputs=(Output(name="stream_tnm", rule=BLOCK, dtype=torch.bfloat16),),
    cases=cases_v4,
    draw=draw_v4,
    rows={"stream_tnm": 0, "token_t": 0},
    out_rows={"stream_tnm": 0},
    relations=(
        Relation(name="causality", axis="later tokens", hook=later_tokens("stream_tnm"), only=several),
        Relation(name="chunk_invariant", axis="length", hook=shorter("stream_tnm", "token_t"), only=several),
        Relation(
            name="masked_equals_absent",
            axis="expert numbers",
            promise="within contract",
            hook=experts_renumbered,
            only=several,
        ),
    ),
    peers=(
        Peer(
            name="transformers",
            function="deeptwin.parity.peers.block:transformers_v4",
            needs=("transformers",),
            explains="its fp32 streams rounded to bf16 once, which is all of the distance; the table of peers compares "
            "every stage in fp32",
            rules={"stream_tnm": Close(rtol=3e-3)},
            only=plain,
        ),
    ),
    mutants=(
        _mutant("v4_comb_not_transposed", "U38", "streams are mixed by the matrix and not by its transpose"),
        _mutant("v4_post_not_doubled", "U38", "the post gate is a sigmoid and not twice one"),
        _mutant("v4_plain_angles", "U30", "every layer rotates with the plain base"),
        _mutant("v4_compressed_angles", "U30", "every layer rotates with the compressed base"),
        _mutant("v4_attention_lost", "U39", "attention does not reach the streams"),
        _mutant("v4_experts_beside_attention", "U39", "the experts read the streams before attention"),
        _mutant("v4_read_as_before", "U38", "the experts read the streams as attention did"),
        _mutant("v4_norms_swapped", "U39", "the norms of the two halves are exchanged"),
        _mutant("v4_fixed_eps", "U39", "both epsilons are constants"),
        _mutant("v4_shared_expert_unclamped", "U85", "the shared expert has no limit"),
        _mutant("v4_gate_clamped_on_both_sides", "U50", "the gate is limited from below too"),
        _mutant("v4_not_clamped", "U50", "no expert has a limit"),
        _mutant("v4_not_weighed", "U44", "experts are added without their weights"),
        _mutant("v4_weighed_twice", "U44", "the routing weight stands before and behind the down projection"),
        _mutant("v4_other_router", "U48", "hash-routed layers select, and selecting layers read a table"),
    ),
    controls=(_control("v4_right"), _control("v4_right_honest")),
    golden=lambda: [V4Case(tokens=9, layer=layer, plain=False) for layer in range(3)],
)

V41 = Op(
    name="blocks_v41",
    reference="deeptwin.reference.block_v41:blocks_v41",
    outputs=(
        Output(name="stream_tnm", rule=BLOCK, dtype=torch.bfloat16),
        Output(name="pre_tn", rule=BLOCK, dtype=torch.float32),
    ),
    cases=cases_v41,
    draw=draw_v41,
    rows={"embed_tm": 0},
    out_rows={"stream_tnm": 0, "pre_tn": 0},
    relations=(Relation(name="causality", axis="later tokens", hook=later_tokens("embed_tm"), only=several),),
    mutants=(
        _mutant("v41_reads_as_v4", "U38", "a sub-layer reads the streams with its own coefficients"),
        _mutant("v41_reads_first_stream", "U38", "every block begins with the first stream"),
        _mutant("v41_comb_not_transposed", "U38", "streams are mixed by the matrix and not by its transpose"),
        _mutant("v41_memory_after_attention", "U43", "the memory is added behind attention"),
        _mutant("v41_memory_missing", "U43", "no layer has a memory"),
        _mutant("v41_memory_of_the_token_before", "U40", "a token reads the rows of the one before it"),
        _mutant("v41_image_bias_ignored", "U49", "image tokens are routed with the text bias"),
        _mutant("v41_first_selection_kept", "U93", "every layer uses the first selection"),
        _mutant("v41_shared_expert_missing", "U39", "the shared expert is left out"),
        _mutant("v41_not_weighed", "U44", "experts are added without their weights"),
        _mutant("v41_attention_lost", "U39", "attention does not reach the streams"),
    ),
    controls=(_control("v41_right"), _control("v41_right_honest")),
    golden=lambda: [V41Case(tokens=4)],
)

CARD = Card(
    component="block",
    summary="decoder blocks of V3, V3.2, V4 and V4.1, made of the components",
    contract={
        "sequence": "whole sequences from position 0 on; nothing is kept between calls",
        "residual": "V3 and V3.2: the output of a block is added at the start of the next; the norm reads the stored "
        "sum (V3) or the fp32 one (V3.2). V4 and V4.1: streams are stored in bf16 after every sub-layer",
        "experts": "plain weights: fp32 sums in the order of the experts, the shared one last; quantised: as moe",
        "taps": "every intermediate has a name, listed in reference/block.py",
    },
    ops=(V3, V4, V41),
)
