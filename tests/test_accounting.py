"""What a model weighs: terms, totals, what one token uses, and the command that prints them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from deeptwin.parity.__main__ import app
from deeptwin.parity.card import load_card
from deeptwin.parity.cards.accounting import AccountCase, config_of
from deeptwin.parity.gate import Runner, Settings, plan
from deeptwin.parity.outcome import Status
from deeptwin.parity.peers.accounting import checkpoint
from deeptwin.reference.accounting import Stored, account, activated, engram_bytes_per_token, totals
from deeptwin.reference.presets import V41Config, preset, v41_flash

MODELS = pytest.mark.parametrize("name", ["v41_flash", "odd"])


def model(name: str) -> V41Config:
    return config_of(AccountCase(name=name))


# properties of the reference


def test_the_published_totals() -> None:
    by_format, num_bytes = totals(v41_flash())
    assert by_format.tolist() == [557_171_343_360, 204_015_223_296, 1_976_441_856, 42_307_282]
    assert by_format.sum().item() == 763_205_315_794
    assert num_bytes.tolist() == [510_286_023_000]


@pytest.mark.parametrize(
    ("part", "names", "parameters"),
    [
        ("backbone", ("routed experts",), 543_581_798_400),
        ("backbone", ("shared experts",), 1_415_577_600),
        ("backbone", ("router", "router biases, text and image"), 78_673_920),
        ("backbone", ("attention",), 5_064_622_080),
        ("backbone", ("compressor",), 18_352_128),
        ("backbone", ("indexer queries", "indexer weights and keys"), 43_516_416),
        ("backbone", ("sinks", "norms", "final norm"), 2_560 + 486_400),
        ("backbone", ("mHC",), 39_323_760),
        ("backbone", ("embedding and head",), 1_323_827_200),
        ("Engram", ("tables",), 196_613_849_600),
        ("Engram", ("wkv", "query and key norms"), 314_654_720),
        ("draft", ("attention",), 379_846_656),
        ("draft", ("routed experts",), 13_589_544_960),
        ("draft", ("shared experts",), 106_168_320),
        ("draft", ("router", "router biases, text and image"), 1_966_848),
        ("draft", ("mHC",), 2_949_282),
        ("draft", ("target projection",), 78_643_200),
        ("draft", ("Markov head",), 66_191_360),
        ("draft", ("confidence head",), 5_376),
        ("draft", ("norms", "sinks", "target and final norm"), 46_528),
        ("vision", ("tower",), 411_842_560),
        ("vision", ("aligner",), 73_410_560),
        ("vision", ("image tokens",), 15_360),
    ],
)
def test_the_published_components(part: str, names: tuple[str, ...], parameters: int) -> None:
    found = [term for term in account(v41_flash()) if term.part == part and term.name in names]
    assert len(found) == len(names)
    assert sum(term.parameters for term in found) == parameters


def test_the_published_parts() -> None:
    sums: dict[str, int] = {}
    for term in account(v41_flash()):
        sums[term.part] = sums.get(term.part, 0) + term.parameters
    assert sums == {
        "backbone": 551_566_180_464,
        "Engram": 196_613_849_600 + 314_654_720,
        "draft": 14_225_362_530,
        "vision": 485_253_120 + 15_360,
    }


@MODELS
def test_a_formula_says_how_its_number_came_about(name: str) -> None:
    for term in account(model(name)):
        assert eval(term.formula, {"__builtins__": {}}) == term.parameters, term


def test_what_a_token_uses() -> None:
    found = activated(v41_flash())
    decode, prefill = (sum(items.values()) for items in (found["decode"], found["prefill"]))
    assert found["decode"]["experts"] == 40 * 247_726_080
    assert found["decode"]["attention"] == 40 * 126_615_552
    assert found["decode"]["router"] == 40 * 1_966_080
    assert found["decode"]["mHC"] == 40 * 983_040
    assert sum(found["prefill"][name] for name in ("experts", "attention", "router", "mHC")) == 20 * 377_290_752
    assert (round(decode / 1e9, 2), round(prefill / 1e9, 2)) == (16.13, 7.9)
    assert engram_bytes_per_token(v41_flash()) == 12_672


@pytest.mark.parametrize(
    ("stored", "num_bytes"),
    [
        (Stored.MXFP4, 512 + 32),
        (Stored.FP8_ROWS, 1024 + 32),
        (Stored.FP8_TILES, 1024 + 1),
        (Stored.BF16, 2048),
        (Stored.FP32, 4096),
    ],
)
def test_bytes_of_a_tile_of_1024_values(stored: Stored, num_bytes: int) -> None:
    assert stored.num_bytes(1024) == num_bytes


@MODELS
def test_the_formulas_count_the_tensors_of_the_checkpoint(name: str) -> None:
    assert [x.tolist() for x in totals(model(name))] == [x.tolist() for x in checkpoint(model(name))]


def test_the_gate_passes() -> None:
    card = load_card("accounting")
    with Runner(Settings(jobs=1)) as runner:
        outcomes = runner.run([job for op in card.ops for job in plan(card, op, full=False)])
    assert {o.candidate for o in outcomes} == {"reference", "checkpoint"}
    assert {o.status for o in outcomes} == {Status.PASSED}


@pytest.mark.parametrize("spelling", ["v41-flash", "v41_flash"])
def test_the_command_prints_every_term_and_the_totals(spelling: str) -> None:
    result = CliRunner().invoke(app, ["account", spelling], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for term in account(v41_flash()):
        assert f"{term.parameters:,}" in result.output
    for number in ("763,205,315,794", "510,286,023,000", "16,129,985,024", "7,895,156,608", "12,672"):
        assert number in result.output


def test_the_command_prints_json() -> None:
    found = json.loads(CliRunner().invoke(app, ["account", "v41-flash", "--json"]).output)
    assert found["parameters"] == 763_205_315_794
    assert found["bytes"] == 510_286_023_000
    assert sum(term["parameters"] for term in found["terms"]) == found["parameters"]
    assert sum(term["bytes"] for term in found["terms"]) == found["bytes"]


def test_sizes_that_are_given_to_a_variant_reach_the_totals() -> None:
    base = v41_flash()
    wider = replace(base, moe=replace(base.moe, width=2304 + 32))
    assert totals(wider)[0].sum() - totals(base)[0].sum() == 3 * 5120 * 32 * (40 * 385 + 3 * 129)
    assert totals(wider)[0].dtype == torch.int64


# rejected input


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match="name: expected one of v3, .*, got 'v41'"):
        preset("v41")
    result = CliRunner().invoke(app, ["account", "v41-flahs"])
    assert result.exit_code == 2
    assert "v41_flash" in result.output


def test_sizes_that_cannot_be_are_refused() -> None:
    base = v41_flash()
    attention, engram = base.attention, base.engram
    with pytest.raises(ValueError, match="o_groups: expected a divisor of 64 heads, got 7"):
        replace(attention, o_groups=7)
    with pytest.raises(ValueError, match="compress_ratios: expected ratios 0, 1 and 2"):
        replace(attention, compress_ratios=(4,) * 43)
    with pytest.raises(ValueError, match=r"kv_source_layers: expected layers that compress, got \[0\]"):
        replace(attention, kv_source_layers=(0, 2))
    with pytest.raises(ValueError, match="kv_source_layers: expected index sources"):
        replace(attention, kv_source_layers=(2, 9))
    with pytest.raises(ValueError, match="topk: expected a number in 1..384, got 385"):
        replace(base.moe, topk=385)
    with pytest.raises(ValueError, match="table_rows: expected one number for each"):
        replace(engram, table_rows=(1,))
    with pytest.raises(ValueError, match="attention: expected a ratio for each of 42 blocks, got 43"):
        replace(base, num_layers=39)
    with pytest.raises(ValueError, match="attention: expected ratio 0 in draft blocks"):
        replace(base, attention=replace(attention, compress_ratios=(2,) * 43))
    with pytest.raises(ValueError, match="engram: expected layers below 40"):
        replace(base, engram=replace(engram, layers=(1, 40)))
