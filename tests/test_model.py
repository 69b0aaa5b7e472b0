"""Whole models: what a row depends on, what a tap hears, images, names of checkpoints, transformers' models beside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, overload

import pytest
import torch
from torch import Tensor

from deeptwin.parity import goldens, peer_table
from deeptwin.parity.card import load_card
from deeptwin.parity.outcome import Outcome, Status
from deeptwin.parity.tiny_models import (
    GENERATIONS,
    drawn_state,
    generation_of,
    released_v4,
    tiny_classes,
    tiny_config,
    tiny_model,
    tiny_state,
)
from deeptwin.reference.block_v41 import V41Stack
from deeptwin.reference.block_weights import V41BlockWeights
from deeptwin.reference.config import Truncation, V4Kind
from deeptwin.reference.mhc import mhc_apply
from deeptwin.reference.model import memory_rows, model_v3, model_v4, model_v41
from deeptwin.reference.model_weights import V3Model, V4Model, V41Model
from deeptwin.reference.numerics import CONTRACT, SEMANTIC, Numerics
from deeptwin.reference.presets import V3Config, V4Config, v41_flash
from deeptwin.reference.taps import Tap, ignore
from deeptwin.reference.topology import LayerMode

EVERY = pytest.mark.parametrize("generation", GENERATIONS)
VOCAB, TOKENS = 101, 40
CARD = load_card("model")
Judged = Callable[[str], list[Outcome]]


@cache
def drawn(generation: str) -> tuple[Any, dict[str, Tensor]]:
    return tiny_state(generation, vocab=VOCAB, seed=5)


@cache
def made(generation: str) -> tuple[Any, Any]:
    return tiny_model(generation, vocab=VOCAB, seed=5)


def tokens(count: int = TOKENS, seed: int = 3) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def text(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.bool)


def run(
    token_t: Tensor,
    config: Any,
    weights: Any,
    *,
    image_t: Tensor | None = None,
    num: Numerics = CONTRACT,
    tap: Tap = ignore,
) -> Tensor:
    if isinstance(config, V41Stack):
        image_t = text(len(token_t)) if image_t is None else image_t
        return model_v41(token_t, image_t, weights, config=config, num=num, tap=tap)
    model = model_v3 if isinstance(config, V3Config) else model_v4
    return model(token_t, weights, config=config, num=num, tap=tap)  # type: ignore[operator, no-any-return]


def stages(token_t: Tensor, config: Any, weights: Any, **how: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def hear(name: str, x: Tensor) -> None:
        assert name not in found
        found[name] = x

    run(token_t, config, weights, tap=hear, **how)
    return found


# properties of the reference


@EVERY
def test_no_row_depends_on_what_follows(generation: str) -> None:
    """Free choices of experts and keys, every boundary of windows, groups and pages: a prefix gives the same bits."""
    config, weights = made(generation)
    whole = run(tokens(), config, weights)
    for kept in (7, 9, 16, 34):  # every rest modulo 4, both sides of window, group and page
        assert torch.equal(run(tokens()[:kept], config, weights), whole[:kept]), kept


@EVERY
def test_every_row_depends_on_its_past(generation: str) -> None:
    config, weights = made(generation)
    changed = tokens()
    changed[0] = (changed[0] + 1) % VOCAB
    first, second = run(tokens(), config, weights), run(changed, config, weights)
    assert (first != second).any(-1).all()


@EVERY
def test_a_tap_hears_every_stage_once_and_changes_nothing(generation: str) -> None:
    config, weights = made(generation)
    found = stages(tokens(9), config, weights)
    layers = config.model.num_layers if isinstance(config, V41Stack) else config.num_layers
    names = list(found)
    begin = ["memory.rows", "embed"] if generation == "v41" else ["embed"]
    assert names[: len(begin)] == begin
    assert names[-3:] == ["head.x", "head.norm", "logits"]
    owners = [name.split(".")[1] for name in names[len(begin) : -3]]
    assert owners == sorted(owners)
    assert set(owners) == {str(layer) for layer in range(layers)}
    assert torch.equal(found["logits"], run(tokens(9), config, weights))


@EVERY
def test_logits_are_the_head_of_what_was_normalised_in_fp32(generation: str) -> None:
    config, weights = made(generation)
    found = stages(tokens(9), config, weights)
    by_hand = found["head.norm"].double() @ weights.head_vm.double().T
    assert torch.equal(found["logits"].float(), by_hand.float())
    assert (found["logits"].float() != found["logits"].bfloat16().float()).any()


def test_streams_are_read_at_the_end_as_the_last_sub_layer_says() -> None:
    config, weights = made("v41")
    found = stages(tokens(9), config, weights)
    last = f"layers.{config.model.num_layers - 1}"
    pre_tn, stream_tnm = found[f"{last}.ffn.pre"], found[f"{last}.stream.ffn"]
    assert torch.equal(found["head.x"], mhc_apply(pre_tn, stream_tnm))
    assert not torch.equal(found["head.x"], mhc_apply(found[f"{last}.attn.pre"], stream_tnm))
    # and the first sub-layer of a block as the last one of the block before it
    for layer in range(1, config.model.num_layers):
        if f"layers.{layer}.engram.stream" in found:
            continue
        before = f"layers.{layer - 1}"
        read = mhc_apply(found[f"{before}.ffn.pre"], found[f"{before}.stream.ffn"])
        assert torch.equal(found[f"layers.{layer}.attn.x"], read)
    assert torch.equal(found["layers.0.attn.x"], found["embed"])


def test_streams_of_v4_begin_alike_and_end_through_a_site() -> None:
    config, weights = made("v4")
    found = stages(tokens(9), config, weights)
    pre_tn = found["layers.0.attn.pre"]
    assert torch.equal(found["layers.0.attn.x"], mhc_apply(pre_tn, found["embed"][:, None].expand(-1, 4, -1)))
    moved = replace(weights, site=replace(weights.site, base_w=weights.site.base_w.flip(0)))
    other = stages(tokens(9), config, moved)
    changed = [name for name, x in found.items() if not torch.equal(x, other[name])]
    assert changed == ["head.x", "head.norm", "logits"]


@EVERY
def test_the_oracles_stay_together(generation: str) -> None:
    config = tiny_config(generation, vocab=VOCAB)
    state = drawn_state(config, seed=2, fixed_experts=True)
    if isinstance(config, V41Stack):
        topology = replace(config.csa2.topology, index_topk=32)
        config = replace(config, csa2=replace(config.csa2, topology=topology))
        weights: Any = V41Model.from_state_dict(state, config=config, class_v=tiny_classes(config, seed=2))
    elif isinstance(config, V4Config):
        config = replace(config, attention=replace(config.attention, index_topk=32))
        weights = V4Model.from_state_dict(state, config=config)
    else:
        index = None if config.index is None else replace(config.index, topk=32)
        config = replace(config, index=index)
        weights = V3Model.from_state_dict(state, config=config)
    meaning, kernel = (run(tokens(12), config, weights, num=num) for num in (SEMANTIC, CONTRACT))
    distance = (kernel - meaning).norm() / meaning.norm()
    assert 1e-4 < distance < (0.15 if generation == "v41" else 0.05)


@EVERY
def test_tiny_models_are_lively(generation: str) -> None:
    """Tokens differ in what they predict and in the experts they go to; a draw repeats itself."""
    config, weights = made(generation)
    found = stages(tokens(), config, weights)
    log_p = found["logits"].log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert 1.0 < entropy.mean() < math.log(VOCAB) - 1
    assert len(found["logits"].argmax(-1).unique()) > TOKENS // 4
    routed = [x for name, x in found.items() if name.endswith("ffn.experts")]
    assert all(len({tuple(row) for row in x.sort(-1).values.tolist()}) > 3 for x in routed)
    again = tiny_model(generation, vocab=VOCAB, seed=5)
    assert torch.equal(run(tokens(), *again), found["logits"])
    assert not torch.equal(run(tokens(), *tiny_model(generation, vocab=VOCAB, seed=6)), found["logits"])
    assert generation_of(config) == generation


def test_tiny_models_have_every_kind_of_layer() -> None:
    v3, v32, v4, v41 = (tiny_config(generation, vocab=VOCAB) for generation in GENERATIONS)
    assert isinstance(v3, V3Config)
    assert isinstance(v32, V3Config)
    assert isinstance(v4, V4Config)
    assert isinstance(v41, V41Stack)
    assert {v3.is_dense(layer) for layer in range(v3.num_layers)} == {True, False}
    assert v32.dsa.topk < TOKENS // 2
    assert {v4.attention.kind(layer) for layer in range(v4.num_layers)} == set(V4Kind)
    assert 0 < v4.hash_layers < v4.num_layers
    assert {v41.csa2.topology.mode(layer) for layer in range(v41.model.num_layers)} == set(LayerMode)
    assert v41.csa2.topology.boundary < v41.model.num_layers - 1  # encoder and decoder
    assert len(v41.model.engram.layers) == 2
    for window, entries in ((v4.attention.window, TOKENS // 4), (v41.csa2.window, TOKENS // 2)):
        assert window < TOKENS // 4
        assert entries > v4.attention.index_topk == v41.csa2.topology.index_topk
    assert v41.csa2.page_tokens < TOKENS // 2


def test_classes_of_the_tiny_vocabulary() -> None:
    config = tiny_config("v41", vocab=VOCAB)
    assert isinstance(config, V41Stack)
    class_v = tiny_classes(config, seed=1)
    assert len(class_v.unique()) == config.model.memory.num_classes
    assert int(class_v[1]) == 0  # so that the class of the pad token is not its id
    first = [class_v.tolist().index(c) for c in range(config.model.memory.num_classes)]
    assert first == sorted(first)


@pytest.mark.parametrize("position", [0, 3])
def test_rows_of_a_published_sentence(position: int) -> None:
    """Classes of "Only Alexander the Great …" under the released layout, rows as the specification lists them."""
    config = v41_flash()
    class_v = torch.arange(config.vocab_size, dtype=torch.int32).clamp(max=config.memory.num_classes - 1)
    token_t = torch.tensor([1134, 15695, 237, 2049, 1260])
    rows = memory_rows(token_t, text(5), class_v, config=config)
    expected = {
        0: ([3874264, 133374226, 266846320, 383829782], [9227404, 130679854, 370946853]),
        3: ([10824761, 129865803, 257815446, 381662576], [12495574, 141278124, 380839160]),
    }[position]
    assert rows[0, position, [0, 8, 16, 23]].tolist() == expected[0]
    assert rows[1, position, [0, 8, 23]].tolist() == expected[1]


def test_an_image_breaks_the_window_of_the_memory() -> None:
    config = tiny_config("v41", vocab=VOCAB)
    assert isinstance(config, V41Stack)
    class_v, image_t = tiny_classes(config, seed=1), text(12)
    image_t[4:6] = True
    plain = memory_rows(tokens(12), text(12), class_v, config=config.model)
    rows = memory_rows(tokens(12), image_t, class_v, config=config.model)
    assert (rows[:, 4:6] == -1).all()
    same_t = (rows == plain).all(-1).all(0)
    assert same_t.tolist() == [True] * 4 + [False] * 4 + [True] * 4  # a window holds three tokens
    # the second half reads as if it began a sequence, and begin of sequence is a token like any other
    assert torch.equal(rows[:, 6:], memory_rows(tokens(12)[6:], text(6), class_v, config=config.model))
    assert not torch.equal(plain[:, 6:], rows[:, 6:])


def test_ids_of_image_tokens_are_not_looked_at() -> None:
    config, weights = made("v41")
    token_t, image_t = tokens(10), text(10)
    image_t[3:5] = True
    rows_tm = weights.embed_vm[token_t].clone()
    rows_tm[3:5] = rows_tm[3:5].flip(0) + 0.5
    given = model_v41(token_t, image_t, weights, config=config, embed_tm=rows_tm)
    token_t[3:5] = torch.tensor([-7, 2**40])
    assert torch.equal(model_v41(token_t, image_t, weights, config=config, embed_tm=rows_tm), given)
    assert not stages(token_t, config, weights, image_t=image_t)["embed"][3:5].any()
    bare = run(token_t, config, weights, image_t=image_t)
    assert bare.isfinite().all()
    assert torch.equal(bare[:3], given[:3])
    assert (bare[3:] != given[3:]).any(-1).all()


def test_nothing_comes_of_nothing() -> None:
    for generation in GENERATIONS:
        config, weights = made(generation)
        for dtype in (torch.int32, torch.int64):
            assert run(torch.zeros(0, dtype=dtype), config, weights).shape == (0, VOCAB)


class OneByOne(Sequence[V41BlockWeights]):
    """Layers that are made when they are asked for."""

    def __init__(self, state: dict[str, Tensor], config: V41Stack) -> None:
        self.state, self.config, self.asked = state, config, list[int]()

    def __len__(self) -> int:
        return self.config.model.num_layers

    @overload
    def __getitem__(self, layer: int) -> V41BlockWeights: ...
    @overload
    def __getitem__(self, layer: slice) -> Sequence[V41BlockWeights]: ...
    def __getitem__(self, layer: int | slice) -> V41BlockWeights | Sequence[V41BlockWeights]:
        assert isinstance(layer, int)
        if layer >= len(self):
            raise IndexError(layer)
        self.asked.append(layer)
        model = self.config.model
        return V41BlockWeights.from_state_dict(
            self.state, config=model, csa2=self.config.csa2, engram=model.memory, layer=layer
        )

    def __iter__(self) -> Iterator[V41BlockWeights]:
        return (self[layer] for layer in range(len(self)))


def test_layers_may_be_made_when_they_are_asked_for() -> None:
    config, state = drawn("v41")
    assert isinstance(config, V41Stack)
    weights = V41Model.from_state_dict(state, config=config, class_v=tiny_classes(config, seed=5))
    layers = OneByOne(state, config)
    lazy = run(tokens(9), config, replace(weights, layers=layers))
    assert torch.equal(lazy, run(tokens(9), config, weights))
    assert layers.asked == list(range(config.model.num_layers))


def test_scales_and_packed_codes_come_in_the_dtypes_of_files() -> None:
    config, state = drawn("v41")
    assert isinstance(config, V41Stack)
    classes = tiny_classes(config, seed=5)
    stored = {
        name: x.view(torch.float8_e8m0fnu if name.endswith("scale") else torch.int8) if x.dtype == torch.uint8 else x
        for name, x in state.items()
    }
    assert {x.dtype for x in stored.values()} >= {torch.float8_e8m0fnu, torch.int8, torch.float8_e4m3fn}
    ours, theirs = (V41Model.from_state_dict(s, config=config, class_v=classes) for s in (state, stored))
    assert torch.equal(run(tokens(9), config, ours), run(tokens(9), config, theirs))


def test_v4_under_the_names_of_transformers() -> None:
    pytest.importorskip("transformers")
    from deeptwin.parity.peers.model import build

    config = peer_table.config_of("v4_flash", eps=False)
    assert isinstance(config, V4Config)
    theirs = build(config, seed=3).state_dict()
    state = {f"hc_head_{part}": theirs[f"model.hc_head.hc_{part}"] for part in ("fn", "scale", "base")}
    ends = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    state |= {f"{ours}.weight": theirs[f"{other}.weight"] for ours, other in ends.items()}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): x for name, x in theirs.items() if name.startswith(prefix)}
        state |= {f"layers.{layer}.{name}": x for name, x in released_v4(own).items()}
    a, b = V4Model.from_transformers(theirs, config=config), V4Model.from_state_dict(state, config=config)
    assert torch.equal(run(tokens(9) % config.vocab_size, config, a), run(tokens(9) % config.vocab_size, config, b))


def test_transformers_stage_by_stage() -> None:
    """A tiny model in fp32, in one pass; `peer_table` has all models and runs."""
    pytest.importorskip("transformers")
    found = {"v4_flash": {"runs": {"plain": peer_table.compare("v4_flash", "plain", seed=5)}}}
    assert peer_table.failures(found) == []
    assert found["v4_flash"]["runs"]["plain"]["logits"]["relative"] < 2e-6
    assert {"attn.turned", "attn.picks", "ffn.experts", "head.norm"} <= set(found["v4_flash"]["runs"]["plain"])


def test_the_recorded_table_of_peers() -> None:
    record = json.loads(peer_table.RECORD.read_text())
    assert list(record["models"]) == ["v3", "v32", "v4_flash", "v4_pro"]
    assert peer_table.failures(record["models"]) == []
    worst = max(
        numbers.get("relative", 0.0)
        for result in record["models"].values()
        for run in result["runs"].values()
        for numbers in run.values()
    )
    assert 1e-8 < worst < 2e-6


def test_the_table_of_peers_sees_a_difference() -> None:
    good = {"relative": 1e-7, "max": 0.0, "p999": 0.0, "ulp": 0.0}
    found = {"v3": {"runs": {"plain": {"attn.out": good, "ffn.experts": {"rows": 8.0, "differing_rows": 0.0}}}}}
    assert peer_table.failures(found) == []
    for broken in ({"relative": 2e-5}, {"relative": math.nan}, {"rows": 8.0, "differing_rows": 1.0}):
        found["v3"]["runs"]["plain"]["attn.out"] = broken
        assert len(peer_table.failures(found)) == 1


def test_the_default_gate_passes(judged: Judged) -> None:
    assert [o.id for o in judged("model") if o.status in (Status.MISMATCH, Status.ERROR)] == []
    assert {o.check for o in judged("model")} >= {"logits_tv", "row_ltz", "causality", "chunk_invariant"}


def test_golden_vectors_are_recomputed() -> None:
    assert {outcome.status for outcome in goldens.verify(CARD)} == {Status.PASSED}


# rejected input


@pytest.mark.parametrize("generation", ["v3", "v4"])
def test_models_of_one_text_refuse(generation: str) -> None:
    config, weights = made(generation)
    model: Any = {"v3": model_v3, "v4": model_v4}[generation]
    for bad in (torch.tensor([0, VOCAB]), torch.tensor([-1])):
        with pytest.raises(ValueError, match=rf"token_t: expected values in \[0, {VOCAB}\)"):
            model(bad, weights, config=config)
    with pytest.raises(ValueError, match="token_t: expected 1 dims"):
        model(tokens()[None], weights, config=config)
    with pytest.raises(TypeError, match="token_t: expected"):
        model(tokens().float(), weights, config=config)
    with pytest.raises(ValueError, match=r"weights.layers: expected 4, got 3"):
        model(tokens(), replace(weights, layers=weights.layers[:3]), config=config)
    with pytest.raises(ValueError, match="m="):
        model(tokens(3), replace(weights, norm_m=weights.norm_m[:5]), config=config)
    if generation == "v3":
        with pytest.raises(TypeError, match="dtype: expected"):
            model_v3(tokens(3), weights, config=config, dtype=torch.float64)


def test_model_v41_refuses() -> None:
    config, weights = made("v41")
    with pytest.raises(ValueError, match=rf"token_t: expected values in \[0, {VOCAB}\)"):
        model_v41(torch.tensor([1, 2**32 + 1]), text(2), weights, config=config)
    with pytest.raises(ValueError, match="image_t: expected t=4, got t=3"):
        model_v41(tokens(4), text(3), weights, config=config)
    with pytest.raises(ValueError, match="embed_tm: expected m=128, got m=7"):
        model_v41(tokens(4), text(4), weights, config=config, embed_tm=torch.zeros(4, 7))
    with pytest.raises(ValueError, match=r"weights.layers: expected 6, got 2"):
        model_v41(tokens(4), text(4), replace(weights, layers=weights.layers[:2]), config=config)
    cut = replace(config.csa2, truncation=Truncation.MASK, keep=config.csa2.window + config.csa2.backtracking)
    with pytest.raises(ValueError, match="config: expected a stack that does not truncate, got"):
        model_v41(tokens(4), text(4), weights, config=replace(config, csa2=cut))
    with pytest.raises(TypeError, match="image_t: expected"):
        model_v41(tokens(4), text(4).int(), weights, config=config)
    with pytest.raises(TypeError, match="token_t: expected"):
        model_v41(tokens(4).float(), text(4), weights, config=config)


def test_memory_rows_refuses() -> None:
    config = tiny_config("v41", vocab=VOCAB)
    assert isinstance(config, V41Stack)
    class_v = tiny_classes(config, seed=1)
    with pytest.raises(ValueError, match="class_v: expected v=101, got v=100"):
        memory_rows(tokens(3), text(3), class_v[:-1], config=config.model)
    with pytest.raises(ValueError, match="token_t: expected values in"):
        memory_rows(tokens(3) - VOCAB, text(3), class_v, config=config.model)
    with pytest.raises(TypeError, match="class_v: expected"):
        memory_rows(tokens(3), text(3), class_v.long(), config=config.model)
    with pytest.raises(TypeError, match="image_t: expected"):
        memory_rows(tokens(3), text(3).int(), class_v, config=config.model)
    with pytest.raises(TypeError, match="token_t: expected"):
        memory_rows(tokens(3).float(), text(3), class_v, config=config.model)


@pytest.mark.parametrize(
    ("generation", "name"),
    [
        ("v3", "model.embed_tokens.weight"),
        ("v3", "model.layers.2.mlp.experts.3.up_proj.weight"),
        ("v3", "lm_head.weight"),
        ("v4", "hc_head_scale"),
        ("v4", "layers.2.attn.compressor.ape"),
        ("v4", "norm.weight"),
        ("v41", "layers.1.engram.embed.scale"),
        ("v41", "layers.4.ffn.shared_experts.w2.weight"),
        ("v41", "head.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(generation: str, name: str) -> None:
    config, state = drawn(generation)

    def take(state: dict[str, Tensor]) -> object:
        if isinstance(config, V3Config):
            return V3Model.from_state_dict(state, config=config)
        if isinstance(config, V4Config):
            return V4Model.from_state_dict(state, config=config)
        return V41Model.from_state_dict(state, config=config, class_v=tiny_classes(config, seed=5))

    for changed in ({n: x for n, x in state.items() if n != name}, state | {name: state[name][..., :-1]}):
        with pytest.raises(ValueError, match=f"state: expected {name}"):
            take(changed)


def test_other_weights_of_v41_and_names_of_transformers_refuse() -> None:
    config, state = drawn("v41")
    assert isinstance(config, V41Stack)
    classes = tiny_classes(config, seed=5)
    with pytest.raises(ValueError, match="class_v: expected 89 classes, got 88"):
        V41Model.from_state_dict(state, config=config, class_v=classes.clamp(max=87))
    with pytest.raises(ValueError, match="class_v: expected v=101, got v=7"):
        V41Model.from_state_dict(state, config=config, class_v=classes[:7])
    with pytest.raises(TypeError, match="class_v: expected"):
        V41Model.from_state_dict(state, config=config, class_v=classes.long())
    name = "layers.4.engram.embed.weight"
    with pytest.raises(TypeError, match=f"{name}: expected"):
        V41Model.from_state_dict(state | {name: state[name].float()}, config=config, class_v=classes)
    v4 = tiny_config("v4", vocab=VOCAB)
    assert isinstance(v4, V4Config)
    with pytest.raises(ValueError, match=r"state: expected model.embed_tokens.weight"):
        V4Model.from_transformers({}, config=v4)


def test_tiny_models_refuse() -> None:
    with pytest.raises(ValueError, match="generation: expected one of v3, v32, v4, v41, got 'v5'"):
        tiny_config("v5", vocab=VOCAB)
    with pytest.raises(ValueError, match="vocab: expected at least 16, got 3"):
        tiny_model("v3", vocab=3, seed=1)
