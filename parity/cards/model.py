"""How whole models are checked: wired to what they should be, beside transformers' models, blind to the future.

Blocks have a card of their own. Experts are chosen by biases that lie far apart and every entry is picked, so that no
honest rounding changes a choice; `python -m deeptwin.parity.peer_table` compares models in which both are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.block_v41 import V41Stack, stack_of
from deeptwin.reference.config import Combine, PageLayout, ScoreOrder
from deeptwin.reference.csa2_config import CastPoints
from deeptwin.reference.model_weights import V3Model, V4Model, V41Model
from deeptwin.reference.presets import V3Config, V4Config, V41Config

from .. import draws
from ..card import REGIMES, Card, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import Context, Variant
from ..rules import BLOCK, Bitwise, Close
from ..tiny_models import drawn_state, tiny_classes, tiny_config
from .block import GAIN, plain_v3, plain_v4

_mutant, _control = variants("model")

VOCAB = 101


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A tiny model over `tokens`: `model` v3, v32, v4 or v41; `plain`: without quantisers, as transformers has it."""

    tokens: int
    model: str
    plain: bool = True
    eps: float = 1e-6
    images: int = 0  # tokens of an image in the middle; their rows are given
    regime: str = "normal"

    @property
    def id(self) -> str:
        how = f"{'plain' if self.plain else 'release'}-eps{self.eps}-images{self.images}"
        return f"{self.model}-t{self.tokens}-{how}-{self.regime}"


def config_of(case: ModelCase) -> V3Config | V4Config | V41Stack:
    """The model of a case: a tiny one, narrower still; every entry is picked but in V3.2 without quantisers."""
    config = tiny_config(case.model, vocab=VOCAB)
    if isinstance(config, V3Config):
        config = replace(config, norm_eps=case.eps, num_layers=3)
        return plain_v3(config) if case.plain else all_keys(config)
    if isinstance(config, V4Config):
        config = replace(
            config,
            attention=replace(config.attention, num_heads=2, index_topk=16),
            norm_eps=case.eps,
            mhc=replace(config.mhc, eps=0.05, norm_eps=case.eps) if case.eps > 1e-6 else config.mhc,
            router=replace(config.router, num_experts=4),
        )
        return plain_v4(config) if case.plain else config
    return four_layers(config.model)


def four_layers(model: V41Config) -> V41Stack:
    """A window alone, both ratios with keys of their own, and a selection of the keys of the layer before."""
    attention = replace(
        model.attention,
        num_heads=2,
        q_lora_rank=32,
        compress_ratios=(0, 2, 1, 1, 0, 0),
        kv_source_layers=(1, 2),
        index_source_layers=(1, 2, 3),
        candidate_source_layer=2,
        index_topk=32,
    )
    narrow = replace(
        model,
        hidden=64,
        num_layers=4,
        attention=attention,
        moe=replace(model.moe, experts=4, width=32),
        engram=replace(model.engram, layers=(1, 3)),
        draft=replace(model.draft, target_layers=(2, 3)),
    )
    stack = stack_of(
        narrow,
        cast=CastPoints.RELEASE,
        score_order=ScoreOrder.BF16_RELEASE,
        layout=PageLayout.INTERLEAVED,
        combine=Combine.SINGLE,
    )
    return replace(stack, csa2=replace(stack.csa2, page_tokens=16))


def all_keys(config: V3Config) -> V3Config:
    """The same model, whose indexer leaves no key of a short sequence out."""
    return config if config.index is None else replace(config, index=replace(config.index, topk=32))


def draw(case: ModelCase, rng: np.random.Generator) -> Inputs:
    """Token ids and weights, and in V4.1 an image."""
    config, seed = config_of(case), int(rng.integers(2**31))
    gain = GAIN.get(case.regime, 1.0)
    state = drawn_state(config, seed=seed, fixed_experts=True, gain=gain)
    if case.regime == "mean1":
        name = next(name for name in state if name.endswith(("embed.weight", "embed_tokens.weight")))
        state[name] = (state[name].float() + 1).bfloat16()
    inputs: Inputs = {"token_t": torch.from_numpy(rng.integers(0, VOCAB, case.tokens)), "config": config}
    if isinstance(config, V3Config):
        dtype = torch.float32 if case.plain else torch.bfloat16
        state = {name: x.float() for name, x in state.items()} if case.plain else state
        weights: Any = V3Model.from_state_dict(state, config=config)
        return inputs | {"weights": weights, "dtype": dtype}
    if isinstance(config, V4Config):
        return inputs | {"weights": V4Model.from_state_dict(state, config=config)}
    weights = V41Model.from_state_dict(state, config=config, class_v=tiny_classes(config, seed=seed))
    embed_tm = None
    if case.images:
        embed_tm = draws.normal(rng, case.tokens, config.model.hidden, dtype=torch.bfloat16)
    return inputs | {"image_t": image_in_the_middle(case), "weights": weights, "embed_tm": embed_tm}


def image_in_the_middle(case: ModelCase) -> Tensor:
    """True for the tokens of the image."""
    image_t = torch.zeros(case.tokens, dtype=torch.bool)
    image_t[case.tokens // 2 : case.tokens // 2 + case.images] = True
    return image_t


def draw_rows(case: ModelCase, rng: np.random.Generator) -> Inputs:
    """Token ids with a begin of sequence among them, and neighbours in the vocabulary whose exchange would show."""
    config = tiny_config("v41", vocab=VOCAB)
    assert isinstance(config, V41Stack)
    token_t = torch.from_numpy(rng.integers(3, VOCAB, case.tokens))
    class_v = tiny_classes(config, seed=int(rng.integers(2**31)))
    for place, token in enumerate((2, 0, int((class_v == class_v[5]).nonzero()[0]))):
        token_t[place + 1 : place + 2] = token
    return {"token_t": token_t, "image_t": image_in_the_middle(case), "class_v": class_v, "config": config.model}


def cases_v3(full: bool) -> list[ModelCase]:
    """Both models, large epsilons, every rest modulo four, regimes, bf16 as released."""
    base = ModelCase(tokens=11, model="v3", eps=0.03)
    found = [base, replace(base, model="v32", eps=1e-6)]
    found += [replace(base, regime=r, tokens=9) for r in REGIMES[1:]]
    found += [replace(base, tokens=1), replace(base, tokens=0)]
    found += [replace(base, tokens=10, model=m, plain=False) for m in ("v3", "v32")]
    if full:
        found += [replace(base, tokens=30, model=m, regime=r) for m, r in product(("v3", "v32"), REGIMES)]
        found += [replace(base, tokens=30, model=m, plain=False, regime=r) for m, r in product(("v3", "v32"), REGIMES)]
    return list({case.id: case for case in found}.values())


def cases_v4(full: bool) -> list[ModelCase]:
    """Longer than the window and than a dense group, large epsilons, regimes, quantised caches."""
    base = ModelCase(tokens=11, model="v4", eps=0.3)
    found = [base, replace(base, tokens=18, eps=1e-6, plain=False)]
    found += [replace(base, regime=r, tokens=9) for r in REGIMES[1:]]
    found += [replace(base, tokens=1), replace(base, tokens=0)]
    if full:
        found += [replace(base, tokens=40, plain=p, regime=r) for p, r in product((True, False), REGIMES)]
    return list({case.id: case for case in found}.values())


def cases_v41(full: bool) -> list[ModelCase]:
    """With and without an image, longer than the window, regimes."""
    base = ModelCase(tokens=6, model="v41", plain=False, images=2)
    found = [base, replace(base, tokens=20, images=0)]
    found += [replace(base, regime=r) for r in REGIMES[1:]]
    found += [replace(base, tokens=1, images=0), replace(base, tokens=0, images=0)]
    if full:
        found += [replace(base, tokens=30, images=n, regime=r) for n, r in product((0, 3), REGIMES)]
    return list({case.id: case for case in found}.values())


def cases_rows(full: bool) -> list[ModelCase]:
    """With and without an image, shorter than a window."""
    base = ModelCase(tokens=14, model="v41", plain=False)
    found = [base, replace(base, images=1), replace(base, tokens=1), replace(base, tokens=0)]
    if full:
        found += [replace(base, tokens=200, images=n) for n in (0, 5)]
    return found


def other_ending(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Other tokens in the second half of the sequence."""
    token_t = inputs["token_t"].clone()
    kept = len(token_t) // 2
    token_t[kept:] = (token_t[kept:] + 7) % VOCAB
    yield from _beginning(f"other tokens after {kept - 1}", inputs | {"token_t": token_t}, kept)


def shorter(*rows: str) -> Callable[[Inputs, Context], Iterator[Variant]]:
    """The first tokens alone: no logit depends on how many follow."""

    def hook(inputs: Inputs, context: Context) -> Iterator[Variant]:
        for kept in sorted({1, len(inputs["token_t"]) - 1}):
            cut = {name: inputs[name][:kept] for name in rows if inputs[name] is not None}
            yield from _beginning(f"{kept} tokens", inputs | cut, kept)

    return hook


def _beginning(label: str, inputs: Inputs, kept: int) -> Iterator[Variant]:
    def first(outputs: Outputs) -> Outputs:
        return {name: value[:kept] for name, value in outputs.items()}

    yield Variant(label=label, calls=(inputs,), join=lambda results: first(results[0]), expect=first)


def several(case: ModelCase) -> bool:
    """Enough tokens to leave some out, as released."""
    return case.tokens > 8 and case.regime == "normal" and not case.plain


def plain(case: ModelCase) -> bool:
    """What transformers has."""
    return case.plain and case.tokens > 0


def _op(
    generation: str, cases: Callable[[bool], list[ModelCase]], rows: tuple[str, ...], faults: dict[str, tuple[str, str]]
) -> Op:
    peer = Peer(
        name="transformers",
        function=f"deeptwin.parity.peers.model:transformers_{generation}",
        needs=("transformers",),
        explains="fp32 products in library order; see the table of stages in DECISIONS",
        rules={"logits_tv": Close(rtol=1e-5)},
        only=plain,
    )
    return Op(
        name=f"model_{generation}",
        reference=f"deeptwin.reference.model:model_{generation}",
        outputs=(Output(name="logits_tv", rule=BLOCK, dtype=torch.float32),),
        cases=cases,
        draw=draw,
        rows=dict.fromkeys(rows, 0),
        out_rows={"logits_tv": 0},
        relations=(
            Relation(name="causality", axis="later tokens", hook=other_ending, only=several),
            Relation(name="chunk_invariant", axis="length", hook=shorter(*rows), only=several),
        ),
        peers=() if generation == "v41" else (peer,),
        mutants=tuple(_mutant(f"{generation}_{name}", entry, fault) for name, (entry, fault) in faults.items()),
        controls=(_control(f"{generation}_right"), _control(f"{generation}_right_honest")),
        golden=lambda: [case for case in cases(False) if case.tokens and not case.plain and case.regime == "normal"],
    )


COMMON = {
    "last_layer_missing": ("U39", "the last block does not run"),
    "next_embedding": ("U39", "a token has the embedding of the id after it"),
    "last_norm_missing": ("U39", "the head reads a row that was not normalised"),
    "last_norm_unweighted": ("U39", "the last norm has no weight"),
    "head_is_the_embedding": ("U39", "the head is tied to the embedding"),
    "second_pass_blind": ("U27", "what spans two passes: the second does not see the first"),
}
STREAMS = {
    "head_reads_the_first": ("U39", "the first stream alone is read at the end"),
    "one_stream_begins": ("U38", "all streams but the first begin with zeros"),
}

V3 = _op(
    "v3",
    cases_v3,
    ("token_t",),
    COMMON
    | {
        "layers_exchanged": ("U39", "two blocks run in the wrong order"),
        "embedding_scaled": ("U39", "embeddings are multiplied by the root of their width"),
        "last_output_lost": ("U39", "what the last block leaves to be added is not"),
        "last_norm_early": ("U39", "the head reads what passed by before the last block"),
        "last_norm_fixed_eps": ("U39", "the epsilon of the last norm is a constant"),
        "residue_three_loses_a_token": ("U31", "lengths of 4 n + 3 do not see their last token"),
        "plain_angles": ("U30", "angles without YaRN"),
    },
)

V4 = _op(
    "v4",
    cases_v4,
    ("token_t",),
    COMMON
    | STREAMS
    | {
        "layers_exchanged": ("U39", "two blocks run in the wrong order"),
        "last_norm_fixed_eps": ("U39", "the epsilon of the last norm is a constant"),
        "residue_three_loses_a_token": ("U31", "lengths of 4 n + 3 do not see their last token"),
        "angles_of_the_first_layer": ("U30", "every layer rotates as the first one does"),
        "head_reads_the_mean": ("U39", "the mean of the streams is read at the end"),
        "hash_of_the_next_token": ("U48", "hash-routed layers take the experts of the next token"),
    },
)

V41 = _op(
    "v41",
    cases_v41,
    ("token_t", "image_t", "embed_tm"),
    COMMON
    | STREAMS
    | {
        "last_layer_twice": ("U39", "the last block runs twice"),
        "memory_of_the_token_before": ("U40", "a token has the memory of the one before it"),
        "image_rows_ignored": ("U49", "the rows of an image are those of its token ids"),
        "images_are_text": ("U49", "image tokens are routed and looked up as text"),
        "decoder_truncated": ("U64", "early tokens of the decoder are computed as bounded replay does"),
    },
)

ROWS = Op(
    name="memory_rows",
    reference="deeptwin.reference.model:memory_rows",
    outputs=(Output(name="row_ltz", rule=Bitwise(), dtype=torch.int32),),
    cases=cases_rows,
    draw=draw_rows,
    rows={"token_t": 0, "image_t": 0},
    out_rows={"row_ltz": 1},
    mutants=(
        _mutant("rows_barrier_at_bos", "U40", "a begin of sequence breaks the window"),
        _mutant("rows_image_not_latched", "U40", "what lies behind an image is seen"),
        _mutant("rows_image_has_a_class", "U40", "an image token is looked up, as the last class"),
        _mutant("rows_pad_is_its_id", "U41", "padding is the id of the pad token, not its class"),
        _mutant("rows_zero_before_the_sequence", "U42", "class 0 lies before the sequence"),
        _mutant("rows_ids_are_classes", "U41", "token ids stand for their classes"),
        _mutant("rows_two_classes_swapped", "U41", "the map of another revision of the vocabulary"),
        _mutant("rows_one_place_late", "U61", "the window ends before the token"),
        _mutant("rows_constants_of_the_first_layer", "U43", "all layers hash with the constants of the first"),
    ),
    controls=(_control("rows_right"),),
    golden=lambda: [case for case in cases_rows(False) if case.tokens > 1],
)

CARD = Card(
    component="model",
    summary="whole models of V3, V3.2, V4 and V4.1, from token ids to logits, without a cache",
    contract={
        "sequence": "a whole sequence from its first token on; nothing is kept between calls, nothing is truncated",
        "weights": "V3: tensors after dequantisation; V4, V4.1: as stored; vocabulary classes come from the tokenizer",
        "images": "V4.1: rows with the spans put in are given; ids of image tokens may lie outside the vocabulary",
        "logits": "fp32, every position, no cap",
        "taps": "every intermediate has a name, listed in reference/model.py and reference/block.py",
    },
    ops=(V3, V4, V41, ROWS),
)
