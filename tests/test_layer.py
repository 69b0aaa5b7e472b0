"""One layer of a checkpoint beside another engine: every kind of layer agrees, faults are found where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from deeptwin.parity.__main__ import app
from deeptwin.parity.capture import Dump, DumpWriter
from deeptwin.parity.checkpoint_draws import drawn_checkpoint
from deeptwin.parity.layer import CannotJudge, Given, Walk, judge_layer, released, sources_of
from deeptwin.reference.checkpoint import OpenModel, open_model
from deeptwin.reference.checkpoint_config import write_config
from deeptwin.reference.checkpoint_write import write_checkpoint
from deeptwin.reference.model import model_v3, model_v4, model_v41
from deeptwin.reference.model_weights import V3Model, V4Model, V41Model
from deeptwin.reference.presets import V3Config, V4Config, preset, v41_flash
from deeptwin.reference.taps import Tap

TINY = ("tiny_v3", "tiny_v32", "tiny_v4_flash", "tiny_v41_flash")
TOKENS = 20
WIDE = ("logits", "pre", "post", "comb", "scores", "weights")  # stages that engines keep in fp32
Spoil = Callable[[str, Tensor], Tensor]


def run(model: OpenModel, tap: Tap) -> None:
    """A whole model over drawn tokens, one of them of an image in V4.1: what stands for somebody else's engine."""
    config, tokens = model.config, torch.arange(TOKENS)
    tap("token", tokens)
    if isinstance(config, V3Config):
        model_v3(tokens, V3Model.from_state_dict(model.weights, config=config), config=config, tap=tap)
    elif isinstance(config, V4Config):
        model_v4(tokens, V4Model.from_state_dict(model.weights, config=config), config=config, tap=tap)
    else:
        classes = config.engram.compressed_vocab_size
        class_v = (torch.arange(config.vocab_size) % classes).to(torch.int32)
        image_t = tokens == 7
        tap("image", image_t)
        stack = released(config)
        weights = V41Model.from_state_dict(model.weights, config=stack, class_v=class_v)
        model_v41(tokens, image_t, weights, config=stack, tap=tap)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A written checkpoint of every generation."""
    found = {}
    for name in TINY:
        found[name] = tmp_path_factory.mktemp("checkpoints") / name
        write_checkpoint(found[name], drawn_checkpoint(preset(name), seed=1), config=write_config(preset(name)))
    return found


@pytest.fixture(scope="session")
def stages(checkpoints: dict[str, Path]) -> dict[str, dict[str, Tensor]]:
    """What an engine that rounds as the contract says computes, in the dtypes that engines keep."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, folder in checkpoints.items():
        heard: dict[str, Tensor] = {}
        run(open_model(folder), heard.__setitem__)
        wide = (*WIDE, *((".x",) if name == "tiny_v32" else ()))  # V3.2 normalises the unrounded sum
        found[name] = {
            key: x.to(torch.float32 if key.endswith(wide) else torch.bfloat16) if x.is_floating_point() else x
            for key, x in heard.items()
        }
    return found


def dump(folder: Path, stages: dict[str, Tensor]) -> Dump:
    with DumpWriter(folder, producer="test") as write:
        for name, x in stages.items():
            write(name, x)
    return Dump(folder)


@pytest.mark.parametrize("name", TINY)
def test_every_layer_of_every_generation_agrees(
    name: str, checkpoints: dict[str, Path], stages: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    model = open_model(checkpoints[name])
    given = Given(dump=dump(tmp_path / "d", stages[name]))
    for layer in range(model.config.num_layers):
        walk = judge_layer(model, layer, given)
        assert [one.stage.name for one in walk.stages if one.status != "agrees"] == []
        assert len(walk.stages) == sum(key.startswith(f"layers.{layer}.") for key in stages[name])
        assert len(walk.open_tokens) <= TOKENS // 2


def spoiled(stages: dict[str, Tensor], name: str, change: Callable[[Tensor], None]) -> dict[str, Tensor]:
    """The stages with one of them changed."""
    x = stages[name].clone()
    change(x)
    return stages | {name: x}


def first_difference(walk: Walk) -> tuple[str, dict[str, str]]:
    found = next(one for one in walk.stages if one.status == "differs")
    return found.stage.name, found.place


def test_a_fault_is_found_in_its_stage_row_and_channel(
    checkpoints: dict[str, Path], stages: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    def nudge(x: Tensor) -> None:
        x[5, 1, 17] += 1.5

    name = "tiny_v41_flash"
    theirs = spoiled(stages[name], "layers.2.stream.attn", nudge)
    walk = judge_layer(open_model(checkpoints[name]), 2, Given(dump=dump(tmp_path / "d", theirs)))
    stage, place = first_difference(walk)
    assert stage == "layers.2.stream.attn"
    assert 5 not in walk.open_tokens
    row = 5 - sum(t < 5 for t in walk.open_tokens)
    assert place["axis 0"] == f"1 of {TOKENS - len(walk.open_tokens)}: {row}"
    assert place["axis 2"] == "1 of 128: 17"


def test_another_choice_is_found_unless_it_is_close(
    checkpoints: dict[str, Path], stages: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    model, name = open_model(checkpoints["tiny_v4_flash"]), "layers.1.ffn.experts"
    right = judge_layer(model, 1, Given(dump=dump(tmp_path / "a", stages["tiny_v4_flash"])))
    clear = next(t for t in range(TOKENS) if t not in right.open_tokens)

    def other(token: int) -> Callable[[Tensor], None]:
        def change(x: Tensor) -> None:
            x[token] = (x[token] + 1) % 8

        return change

    theirs = spoiled(stages["tiny_v4_flash"], name, other(clear))
    assert first_difference(judge_layer(model, 1, Given(dump=dump(tmp_path / "b", theirs))))[0] == name
    assert right.open_tokens  # scores of drawn keys lie close together
    theirs = spoiled(stages["tiny_v4_flash"], name, other(right.open_tokens[0]))
    walk = judge_layer(model, 1, Given(dump=dump(tmp_path / "c", theirs)))
    assert all(one.status == "agrees" for one in walk.stages)


def test_weights_of_another_layer_are_found(
    checkpoints: dict[str, Path], stages: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """An engine that loaded layer 2 where layer 1 belongs (the kind of layer is the same) parts at the first norm."""
    theirs = dict(stages["tiny_v3"])
    before = {"stream.attn": theirs["layers.1.stream.attn"], "ffn.out": theirs["layers.1.ffn.out"]}
    theirs |= {f"layers.0.{part}": x for part, x in before.items()}
    theirs |= {key.replace("layers.2.", "layers.1."): x for key, x in theirs.items() if key.startswith("layers.2.")}
    walk = judge_layer(open_model(checkpoints["tiny_v3"]), 1, Given(dump=dump(tmp_path / "d", theirs)))
    assert first_difference(walk)[0] == "layers.1.attn.norm"


def test_a_limit_replaces_the_budget(
    checkpoints: dict[str, Path], stages: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    theirs = spoiled(stages["tiny_v3"], "layers.1.attn.out", lambda x: x.mul_(1.03))
    given, model = Given(dump=dump(tmp_path / "d", theirs)), open_model(checkpoints["tiny_v3"])
    assert first_difference(judge_layer(model, 1, given))[0] == "layers.1.attn.out"
    assert all(one.status == "agrees" for one in judge_layer(model, 1, given, limit=0.05).stages)


def test_released_layers_depend_on_their_sources() -> None:
    stack = released(v41_flash())
    needed = {layer: sources_of(stack, layer) for layer in (0, 2, 5, 20, 21, 24, 39)}
    assert needed == {0: [], 2: [], 5: [2], 20: [], 21: [20], 24: [20], 39: [20]}


@pytest.mark.parametrize(
    ("name", "layer", "missing"),
    [
        ("tiny_v3", 1, "layers.0.ffn.out"),
        ("tiny_v4_flash", 0, "token"),
        ("tiny_v41_flash", 0, "embed"),
        ("tiny_v41_flash", 1, "memory.rows"),
        ("tiny_v41_flash", 2, "layers.1.attn.picks"),
        ("tiny_v41_flash", 5, "layers.3.attn.norm"),
    ],
)
def test_a_missing_input_is_named(
    name: str,
    layer: int,
    missing: str,
    checkpoints: dict[str, Path],
    stages: dict[str, dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    given = Given(dump=dump(tmp_path / "d", {key: x for key, x in stages[name].items() if key != missing}))
    with pytest.raises(CannotJudge, match=f"{missing}: expected in the dump as an input"):
        judge_layer(open_model(checkpoints[name]), layer, given)


def test_bad_layers_axes_and_weights_are_refused(
    checkpoints: dict[str, Path], stages: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    model = open_model(checkpoints["tiny_v3"])
    with pytest.raises(ValueError, match="layer: expected 0 to 2, got 3"):
        judge_layer(model, 3, Given(dump=dump(tmp_path / "a", stages["tiny_v3"])))
    theirs = stages["tiny_v3"] | {"embed": torch.zeros(2, TOKENS, 128)}
    with pytest.raises(CannotJudge, match=r"embed: expected 2 axes, got shape \(2, 20, 128\)"):
        judge_layer(model, 0, Given(dump=dump(tmp_path / "b", theirs)))
    tensors = drawn_checkpoint(preset("tiny_v3"), seed=1)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name].view(torch.uint8)[4, 5] = 0x7F
    write_checkpoint(tmp_path / "c", tensors, config=write_config(preset("tiny_v3")))
    spoiled_model = open_model(tmp_path / "c")
    given = Given(dump=dump(tmp_path / "d", stages["tiny_v3"]))
    with pytest.raises(CannotJudge, match=rf"{name}: expected numbers, got 1 that are none, the first at \[4, 5\]"):
        judge_layer(spoiled_model, 1, given)
    assert judge_layer(spoiled_model, 2, given).stages


def test_the_command_judges_a_mapped_dump(
    checkpoints: dict[str, Path], stages: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Names, a batch of one and folded heads as some engine has them; exit 0, 1 and 2."""
    theirs = {f"model.blocks.{key}": x[None] for key, x in stages["tiny_v3"].items() if "layers.1." not in key}
    theirs |= {f"block1/{key.removeprefix('layers.1.')}": x for key, x in stages["tiny_v3"].items() if "rs.1." in key}
    dump(tmp_path / "d", theirs)
    rules = [
        {"reference": "layers.1.stream.attn", "candidate": "block1/stream.attn"},
        {"reference": "layers.1.ffn.out", "candidate": "block1/ffn.out"},
        {"reference": "layers.{i}.ffn.experts", "candidate": "model.blocks.layers.{i}.ffn.experts"},
        {"reference": "layers.{i}.ffn.out", "candidate": "model.blocks.layers.{i}.ffn.out"},
    ]
    (tmp_path / "map.json").write_text(json.dumps(rules))
    command = ["layer", str(checkpoints["tiny_v3"]), str(tmp_path / "d"), "--layer", "2"]
    done = CliRunner().invoke(app, [*command, "--map", str(tmp_path / "map.json"), "--json", str(tmp_path / "j")])
    assert done.exit_code == 0, done.output
    assert "2 stages agree" in done.output
    record = json.loads((tmp_path / "j").read_text())
    assert [s["name"] for s in record["stages"] if s["status"] == "agrees"] == [
        "layers.2.ffn.experts",
        "layers.2.ffn.out",
    ]
    wrong = spoiled(theirs, "model.blocks.layers.2.ffn.out", lambda x: x.neg_())
    dump(tmp_path / "e", wrong)
    command[2] = str(tmp_path / "e")
    assert CliRunner().invoke(app, [*command, "--map", str(tmp_path / "map.json")]).exit_code == 1
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "expected in the dump as an input" in done.output
    assert CliRunner().invoke(app, [*command, "--limit", "0"]).exit_code == 2
