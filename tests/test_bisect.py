"""Dumps and the search for the first place where two of them part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from deeptwin.parity import bisect, peer_dump
from deeptwin.parity.__main__ import app
from deeptwin.parity.capture import BadDump, Dump, DumpWriter, captured

TOKENS, WIDTH, HEADS, LAYERS = 6, 8, 2, 4


class Mixer(nn.Module):
    """Sums over earlier tokens, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        heads = self.value(x).unflatten(-1, (HEADS, -1))
        return heads.cumsum(1), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.out = Mixer(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mixer(x)[0].flatten(-2))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack() -> Stack:
    generator = torch.Generator().manual_seed(7)
    made = Stack()
    for weight in made.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.3
    return made


def dump_of(folder: Path, model: nn.Module, dtype: torch.dtype = torch.float32) -> Path:
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(8)).to(dtype)
    with DumpWriter(folder, producer="test") as write, captured(model.to(dtype), write):
        model(x)
    return folder


def written(folder: Path, **stages: Tensor) -> Path:
    with DumpWriter(folder, producer="test") as write:
        for name, x in stages.items():
            write(name, x, ("token", "head", "channel")[: x.dim()])
    return folder


def first_difference(a: Path, b: Path, **how: object) -> bisect.Compared | None:
    found = bisect.compare(Dump(a), Dump(b), **how)  # type: ignore[arg-type]
    return next((one for one in found if one.status == "differs"), None)


# what a dump holds


def test_a_dump_gives_back_what_was_captured_in_the_order_of_the_run(tmp_path: Path) -> None:
    dump = Dump(dump_of(tmp_path / "d", stack()))
    names = [stage.name for stage in dump.stages]
    block = ["mixer.value", "mixer.0", "out", ""]
    expected = [f"layers.{i}.{part}".rstrip(".") for i in range(LAYERS) for part in block]
    assert names == [*expected, "model"]
    assert dump.tensor(dump.stages[1]).shape == (1, TOKENS, HEADS, WIDTH // HEADS)


def test_a_module_that_runs_twice_gives_two_stages(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with DumpWriter(tmp_path / "d", producer="test") as write, captured(model, write, only=["0", "1"]):
        model(torch.zeros(1, 4))
    assert [stage.name for stage in Dump(tmp_path / "d").stages] == ["0", "1", "0#2"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float64])
def test_every_dtype_comes_back_byte_for_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.arange(-3, 5).to(dtype)
    dump = Dump(written(tmp_path / "d", x=x))
    assert torch.equal(dump.tensor(dump.stages[0]).view(torch.uint8), x.view(torch.uint8))


def test_large_dumps_are_split_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deeptwin.parity.capture.SHARD_BYTES", 64)
    dump = Dump(written(tmp_path / "d", a=torch.ones(16), b=torch.ones(16) * 2, c=torch.ones(2)))
    assert len({stage.file for stage in dump.stages}) == 3
    assert dump.tensor(dump.stages[1]).tolist() == [2.0] * 16


# where two runs part


def test_equal_runs_agree_everywhere(tmp_path: Path) -> None:
    a, b = dump_of(tmp_path / "a", stack()), dump_of(tmp_path / "b", stack())
    assert first_difference(a, b) is None


def test_a_bf16_run_of_the_same_model_agrees_within_its_dtype(tmp_path: Path) -> None:
    a, b = dump_of(tmp_path / "a", stack()), dump_of(tmp_path / "b", stack(), torch.bfloat16)
    assert first_difference(a, b) is None


def in_head_one(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 3:, 1] *= 1.5
    return x


def in_one_channel(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 4, 0, 2] += 0.5
    return x


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (in_head_one, {"axis 0": "3 of 6: 3, 4, 5", "axis 1": "1 of 2: 1"}),
        (in_one_channel, {"axis 0": "1 of 6: 4", "axis 1": "1 of 2: 0", "axis 2": "1 of 4: 2"}),
    ],
)
def test_a_fault_in_the_middle_is_found_at_its_stage_row_head_and_channel(
    tmp_path: Path, fault: Callable[[Tensor], Tensor], place: dict[str, str]
) -> None:
    wrong = stack()
    right_mixer = wrong.layers[2].mixer.forward
    wrong.layers[2].mixer.forward = lambda x: (fault(right_mixer(x)[0]), None)
    a, b = dump_of(tmp_path / "a", stack()), dump_of(tmp_path / "b", wrong)
    found = first_difference(
        a, b, rules=[bisect.MapRule(reference="layers.{i}.mixer.0", candidate="layers.{i}.mixer.0")]
    )
    assert found is not None
    assert found.stage.name == "layers.2.mixer.0"
    named = {f"axis {int(axis.split()[1]) - 1}": words for axis, words in found.place.items()}
    assert {axis: words for axis, words in named.items() if not words.startswith("all")} == place


def test_the_names_and_axes_of_another_engine_are_mapped(tmp_path: Path) -> None:
    x = torch.randn(TOKENS, HEADS, 4, generator=torch.Generator().manual_seed(1))
    a = written(tmp_path / "a", **{"layers.3.attn": x})
    flat = x.permute(1, 0, 2).reshape(1, HEADS, TOKENS * 4)
    with DumpWriter(tmp_path / "b", producer="test") as write:
        write("model.layers.3.self_attn", flat)
    rule = bisect.MapRule(
        reference="layers.{i}.attn",
        candidate="model.layers.{i}.self_attn",
        shape=(1, HEADS, TOKENS, -1),
        dims=("batch", "head", "token", "channel"),
    )
    assert first_difference(a, tmp_path / "b", rules=[rule]) is None


def test_a_rival_replaces_the_limit_by_the_budget(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 4, 16, generator=generator, dtype=torch.float64)
    honest = x + 1e-3 * torch.randn(x.shape, generator=generator)
    a, rival = written(tmp_path / "a", x=x), written(tmp_path / "r", x=honest.float())
    good = written(tmp_path / "g", x=(x + 1e-3 * torch.randn(x.shape, generator=generator)).float())
    bad = written(tmp_path / "b", x=(x + 4e-3 * torch.randn(x.shape, generator=generator)).float())
    assert first_difference(a, good, rival=Dump(rival)) is None
    found = first_difference(a, bad, rival=Dump(rival))
    assert found is not None
    assert found.used > 1


def test_a_stage_without_a_yardstick_is_refused(tmp_path: Path) -> None:
    x = torch.randn(64, 4, 16, generator=torch.Generator().manual_seed(3))
    a, wrong = written(tmp_path / "a", x=x, y=x), written(tmp_path / "b", x=x, y=x * 2)
    other_shape, absent = written(tmp_path / "r", x=x, y=x[:3]), written(tmp_path / "s", x=x)
    for rival in (other_shape, absent):
        with pytest.raises(BadDump, match=r"holds no y@0\.0 of shape \[64, 4, 16\]"):
            list(bisect.compare(Dump(a), Dump(wrong), rival=Dump(rival)))
        assert CliRunner().invoke(app, ["bisect", str(a), str(wrong), "--rival", str(rival)]).exit_code == 2


def test_a_fraction_beside_an_integer_is_not_cut(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", ids=torch.tensor([1, 2])), written(tmp_path / "b", ids=torch.tensor([1.0, 2.5]))
    found = first_difference(a, b)
    assert found is not None
    assert found.message == "1 of 2 values differ"


def test_selections_are_compared_exactly_and_nan_by_its_place(tmp_path: Path) -> None:
    ids = torch.arange(12).reshape(4, 3)
    holes = torch.ones(4, 3)
    other = holes.clone()
    other[2, 1] = torch.nan
    a, b = written(tmp_path / "a", ids=ids, x=holes), written(tmp_path / "b", ids=ids.flip(1), x=other)
    wrong = [one for one in bisect.compare(Dump(a), Dump(b)) if one.status == "differs"]
    assert [one.stage.name for one in wrong] == ["ids", "x"]
    assert wrong[0].message == "8 of 12 values differ"
    assert "1 non-finite values" in wrong[1].message


def test_the_diagnosis_names_a_constant_factor(tmp_path: Path) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
    found = first_difference(written(tmp_path / "a", x=x), written(tmp_path / "b", x=x * 1.4426950408889634))
    assert found is not None
    assert found.diagnosis.startswith(("log base", "LSE", "constant scale"))


# a whole model of others beside the reference, as with an engine of one's own


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference and transformers, of one tiny V4."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("peers")
    peer_dump.dump_all(folder, "v4_flash")
    return folder


def walk(peers: Path, candidate: Path, **how: object) -> list[bisect.Compared]:
    rules = bisect.read_map(peers / "map.json")
    return list(bisect.compare(Dump(peers / "reference"), Dump(candidate), rules=rules, **how))  # type: ignore[arg-type]


def test_transformers_agrees_with_the_reference_at_every_stage(peers: Path) -> None:
    found = walk(peers, peers / "transformers", limit=1e-5)
    assert [one.stage.name for one in found if one.status == "differs"] == []
    agreed = [one for one in found if one.status == "agrees"]
    assert len(agreed) == 68
    assert max(one.used for one in agreed) < 0.5
    absent = {one.stage.name.rpartition(".")[2] for one in found if one.status == "absent"}
    assert absent == {"pre", "heads", "scores", "picks"}  # what transformers has no module for, or no rows alike
    arguments = ["bisect", str(peers / "reference"), str(peers / "transformers"), "--map", str(peers / "map.json")]
    run = CliRunner().invoke(app, [*arguments, "--limit", "1e-5"])
    assert (run.exit_code, "68 stages agree, 16 absent" in run.output) == (0, True)


@pytest.mark.parametrize(
    ("fault", "stage", "place"),
    [
        # a query head: nothing records queries, so what the head read is the first to differ
        ("model.layers.2.self_attn.q_b_proj:20:600", "layers.2.attn.turned", {"token": "20", "head": "1"}),
        ("model.layers.1.mlp:9:5", "layers.1.ffn.out", {"token": "9", "channel": "5"}),
        ("model.layers.2.mlp.gate:9:3", "layers.2.ffn.logits", {"token": "9", "expert": "3"}),
        ("model.layers.1.ffn_hc:30:2", "layers.1.ffn.post", {"token": "30", "stream": "2"}),
        ("model.layers.3:11:300", "layers.3.stream.ffn", {"token": "11", "stream": "2", "channel": "44"}),
        ("model.norm:43:1", "head.norm", {"token": "43", "channel": "1"}),
    ],
)
def test_a_fault_in_the_middle_of_a_model_is_found_where_it_is(
    peers: Path, tmp_path: Path, fault: str, stage: str, place: dict[str, str]
) -> None:
    module, token, channel = fault.split(":")
    _, peer, token_t = peer_dump.drawn_peer("v4_flash")
    if module.endswith("gate"):  # a router returns rows without a batch
        peer.get_submodule(module).register_forward_hook(lambda m, a, out: (in_row(out[0], 9, 3), *out[1:]))
    else:
        peer_dump.break_(peer, module, int(token), int(channel))
    peer_dump.dump_peer(tmp_path / "broken", peer, token_t)
    first = next(one for one in walk(peers, tmp_path / "broken", limit=1e-5) if one.status == "differs")
    assert first.stage.name == stage
    named = {axis: words.rpartition(": ")[2] for axis, words in first.place.items() if not words.startswith("all")}
    assert {axis: named.get(axis) for axis in place} == place


def in_row(x: Tensor, row: int, column: int) -> Tensor:
    x = x.clone()
    x[row, column] += 0.1
    return x


def test_a_module_that_is_not_there_cannot_be_broken() -> None:
    with pytest.raises(ValueError, match="module: expected one of the model's, got 'layers.9'"):
        peer_dump.break_(stack(), "layers.9", 0, 0)


def test_inputs_of_modules_are_recorded_too(tmp_path: Path) -> None:
    model, chosen = stack(), ["layers.1", "*.out"]
    with DumpWriter(tmp_path / "d", producer="test") as write, captured(model, write, only=[], inputs=chosen):
        model(x=torch.ones(1, TOKENS, WIDTH))
    inner = [f"layers.{i}.out.input.0" for i in range(LAYERS)]
    assert [stage.name for stage in Dump(tmp_path / "d").stages] == [*inner[:2], "layers.1.input.0", *inner[2:]]
    with DumpWriter(tmp_path / "e", producer="test") as write, captured(model, write, only=[], inputs=["model"]):
        model(x=torch.ones(1, TOKENS, WIDTH))
    assert [stage.name for stage in Dump(tmp_path / "e").stages] == ["model.input.x"]


def test_rows_without_an_order_and_other_axes_are_mapped(tmp_path: Path) -> None:
    experts, heads = torch.tensor([[3, 1], [0, 2]]), torch.arange(24.0).view(2, 3, 4)
    a = written(tmp_path / "a", experts=experts, heads=heads)
    b = written(tmp_path / "b", e=experts.flip(1), h=heads.view(1, 2, 12))
    c = written(tmp_path / "c", e=experts + 1, h=heads.view(1, 2, 12)[..., :8])

    def found(candidate: Path, **how: bool) -> list[str]:
        rules = [bisect.MapRule(reference=x, candidate=x[0], **how) for x in ("experts", "heads")]
        return [one.status for one in bisect.compare(Dump(a), Dump(candidate), rules=rules)]

    assert found(b, unordered=True, reshape=True) == ["agrees", "agrees"]
    assert found(b) == ["differs", "differs"]
    assert found(c, unordered=True, reshape=True) == ["differs", "differs"]


# what is refused


def test_a_run_that_raises_leaves_no_dump(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(5, 5))
    with pytest.raises(RuntimeError, match="shapes"):
        dump_of(tmp_path / "d", model)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_folder_a_second_recording_and_wrong_axes_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "d", x=torch.ones(2))
    with pytest.raises(ValueError, match="folder: .* exists"):
        DumpWriter(tmp_path / "d", producer="test")
    with DumpWriter(tmp_path / "e", producer="test") as write:
        write("x", torch.ones(2))
        write("x", torch.ones(2), step=1)
        with pytest.raises(ValueError, match="name: 'x' was recorded before"):
            write("x", torch.ones(2))
        with pytest.raises(ValueError, match="dims: got"):
            write("y", torch.ones(2), ("token", "channel"))


def test_edited_truncated_and_foreign_dumps_are_named(tmp_path: Path) -> None:
    dump = Dump(written(tmp_path / "d", x=torch.ones(64)))
    path = tmp_path / "d" / dump.stages[0].file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x01")
    with pytest.raises(BadDump, match="was changed: expected SHA-256"):
        dump.tensor(dump.stages[0])
    path.write_bytes(content[:-9])
    with pytest.raises(BadDump, match="cannot read x@0.0"):
        dump.tensor(dump.stages[0])
    (tmp_path / "d" / "manifest.json").write_text('{"format": "other/1"}')
    with pytest.raises(BadDump, match=r"expected format 'deeptwin.dump/1', got 'other/1'"):
        Dump(tmp_path / "d")
    with pytest.raises(BadDump, match="unreadable"):
        Dump(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "unreadable"),
        ("{}", "expected a list of rules, got dict"),
        ('[{"reference": "a"}]', "missing 1 required keyword-only argument"),
        ('[{"reference": "a", "candidate": "b.{i}"}]', "stands only in its candidate"),
    ],
)
def test_an_unusable_map_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(bisect.BadMap, match=message):
        bisect.read_map(tmp_path / "map.json")


def test_shapes_that_cannot_lie_side_by_side_differ(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", x=torch.ones(4, 3)), written(tmp_path / "b", x=torch.ones(4, 2))
    found = first_difference(a, b)
    assert found is not None
    assert "(4, 2) against (4, 3)" in found.message


# the command


def test_the_command_says_where_and_exits_by_what_was_found(tmp_path: Path) -> None:
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(2))
    wrong = x.clone()
    wrong[2, 1] = 0
    a, b = written(tmp_path / "a", **{"layers.0": x, "layers.1": x}), tmp_path / "b"
    written(b, **{"layers.0": x, "layers.1": wrong})
    written(tmp_path / "c", other=x)
    run = CliRunner().invoke
    same = run(app, ["bisect", str(a), str(a)])
    assert (same.exit_code, "2 stages agree" in same.output) == (0, True)
    found = run(app, ["bisect", str(a), str(b), "--json", str(tmp_path / "found.json")])
    assert found.exit_code == 1
    assert "first difference: layers.1" in found.output
    assert "1 of 2: 1" in found.output
    record = json.loads((tmp_path / "found.json").read_text())
    assert (record["schema"], record["first_difference"]) == ("deeptwin.bisect/1", "layers.1")
    assert run(app, ["bisect", str(a), str(tmp_path / "c")]).exit_code == 3
    assert run(app, ["bisect", str(a), str(tmp_path / "nowhere")]).exit_code == 2
    assert run(app, ["bisect", str(a), str(b), "--rival", str(a), "--limit", "1"]).exit_code == 2
    assert run(app, ["bisect", str(a), str(b), "--limit", "0"]).exit_code == 2
