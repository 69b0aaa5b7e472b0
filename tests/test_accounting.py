"""What a model weighs: terms, totals, what one token uses, and the command that prints them."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from deeptwin.reference.account_claims import claims, fp8_work, parameters
from deeptwin.reference.account_terms import Stored
from deeptwin.reference.accounting import (
    account,
    activated,
    cache_bytes_per_token,
    caches,
    engram_bytes_per_token,
    flops,
    sequence_bytes,
    totals,
    work,
)
from deeptwin.reference.cache_plan import bytes_per_token, v41_flash_caches
from deeptwin.reference.config import INDEX_FP8_F32, KV_V32_FMLA
from deeptwin.reference.presets import ModelConfig, preset, tiny_v3, v3, v4_flash, v4_pro, v32, v41_flash

MODELS = pytest.mark.parametrize("name", ["v41_flash", "odd", "v3", "v32", "odd_v32", "v4_pro", "v4_flash", "odd_v4"])
MILLION = 10**6


def model(name: str) -> ModelConfig:
    return config_of(AccountCase(name=name))


def of(config: ModelConfig, part: str, *names: str) -> int:
    """Parameters of the named terms."""
    found = [line for line in account(config) if line.part == part and line.name in names]
    assert len(found) == len(names)
    return sum(line.parameters for line in found)


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


def test_the_exact_sums_of_v3() -> None:
    """v3-v32-v4.md section 1.3."""
    assert (of(v3(), "main", "attention", "norms") - 61 * 2 * 7168) == 61 * 187_107_328
    assert of(v3(), "main", "dense networks") == 3 * 396_361_728
    experts = of(v3(), "main", "routed experts", "shared experts", "router", "router biases")
    assert experts == 58 * 11_320_164_608
    assert of(v3(), "main", "embedding") == of(v3(), "main", "head") == 926_679_040
    assert parameters(v3(), "main") == 671_026_419_200
    assert parameters(v32(), "main") == 671_877_944_064
    indexer = of(v32(), "main", "indexer queries and keys", "indexer weights", "indexer norm")
    assert indexer == 851_524_864 == 61 * 13_959_424
    billions = [round(parameters(c, *parts) / 1e9, 2) for c in (v3(), v32()) for parts in (("draft",), ())]
    assert billions == [11.61, 684.49, 11.62, 685.36]
    used = [sum(activated(c)["decode"].values()) for c in (v3(), v32())]
    assert [round(n / 1e9, 2) for n in used] == [36.63, 37.48]
    assert [round((n + 926_679_040) / 1e9, 2) for n in used] == [37.55, 38.40]


@pytest.mark.parametrize(
    ("config", "attention", "csa", "indexer", "hca", "site", "routed"),
    [
        (v4_pro(), 299_894_912, 14_684_672, 16_712_832, 7_406_080, 688_155, 1_547_396_186_112),
        (v4_flash(), 106_956_352, 8_393_216, 10_749_056, 4_260_352, 393_243, 277_025_390_592),
    ],
    ids=["v4_pro", "v4_flash"],
)
def test_the_exact_sums_of_v4(
    config: ModelConfig, attention: int, csa: int, indexer: int, hca: int, site: int, routed: int
) -> None:
    """v3-v32-v4.md section 1.3."""
    layers = config.num_layers
    kinds = [config.attention.compress_ratios[:layers].count(ratio) for ratio in (4, 128)]  # type: ignore[union-attr]
    norms = of(config, "main", "attention", "norms", "sinks") - layers * 2 * config.hidden
    assert norms == layers * attention
    assert of(config, "main", "CSA compressors", "CSA positions") == kinds[0] * csa
    names = ("indexer queries", "indexer weights", "indexer compressors", "indexer positions")
    assert of(config, "main", *names) == kinds[0] * indexer
    assert of(config, "main", "HCA compressors", "HCA positions") == kinds[1] * hca
    assert of(config, "main", "mHC") == 2 * layers * site
    assert of(config, "main", "routed experts") == routed


def test_the_sums_of_v4() -> None:
    millions = [
        round(parameters(c, *parts) / 1e6) for c in (v4_pro(), v4_flash()) for parts in (("main",), ("draft",), ())
    ]
    assert millions == [1_572_997, 25_840, 1_598_837, 284_332, 6_610, 290_942]
    used = [sum(activated(c)["decode"].values()) / 1e9 for c in (v4_pro(), v4_flash())]
    assert [round(n, 2) for n in used] == [48.85, 13.27]
    # routed experts: half a byte and a 32nd for every weight
    routed = [
        next(line for line in account(c) if line.name == "routed experts").num_bytes for c in (v4_pro(), v4_flash())
    ]
    assert [round(n / 1e9) for n in routed] == [822, 147]


def test_the_cache_of_a_token() -> None:
    """v3-v32-v4.md section 1.4, v41-attention.md section 7."""
    found = {name: cache_bytes_per_token(preset(name)) for name in ("v3", "v32", "v4_pro", "v4_flash", "v41_flash")}
    assert found == {"v3": 70_272, "v32": 48_068, "v4_pro": 5_031.4375, "v4_flash": 3_514.25, "v41_flash": 890}
    shares = [float(round(100 * found[name] / found["v32"], 1)) for name in ("v4_pro", "v4_flash")]
    assert shares == [10.5, 7.3]
    assert found["v41_flash"] == bytes_per_token(v41_flash_caches())
    latent, key = caches(v32())
    assert (latent.entry_bytes, key.entry_bytes) == (KV_V32_FMLA.record_bytes, INDEX_FP8_F32.record_bytes)


def test_the_cache_of_a_sequence() -> None:
    assert sequence_bytes(v3(), context=MILLION).tolist() == [70_272_000_000, 0]
    assert sequence_bytes(v32(), context=2**20).tolist() == [48_068 * 2**20, 0]
    # 30 * 652 * 250 000 and 31 * 584 * 7 812; at 2^20 tokens the groups come out even
    assert sequence_bytes(v4_pro(), context=MILLION)[0] == 30 * 652 * 250_000 + 31 * 584 * 7812
    assert round(sequence_bytes(v4_pro(), context=2**20)[0].item() / 1e9, 2) == 5.28
    assert round(sequence_bytes(v4_flash(), context=2**20)[0].item() / 1e9, 2) == 3.68
    states = {part.name: part.state_bytes for part in caches(v4_pro()) if part.state_bytes}
    assert states == {"CSA compressors": 65_536 + 16_384, "HCA compressors": 524_288, "sliding windows": 128 * 584}
    windows = [61 * 128 * 584, 43 * 128 * 584]
    assert [round(n / 1e6, 2) for n in windows] == [4.56, 3.21]
    assert [part.layers * part.state_bytes for c in (v4_pro(), v4_flash()) for part in caches(c)[-1:]] == windows


def test_the_work_of_a_token_at_a_million() -> None:
    """v3-v32-v4.md section 1.5."""
    found = {
        name: [part.flops for part in work(preset(name), context=MILLION)] for name in ("v32", "v4_pro", "v4_flash")
    }
    assert found["v32"][1:] == [61 * MILLION * 16384, 61 * 2048 * 128 * 1088 * 2]
    assert [round(n / 1e9, 2) for n in found["v32"]] == [74.95, 999.42, 34.80]
    assert [round(n / 1e9, 2) for n in found["v4_pro"]] == [97.70, 122.88, 73.58]
    assert [round(n / 1e9, 2) for n in found["v4_flash"]] == [26.54, 86.02, 22.61]
    units = [fp8_work(preset(name), MILLION) for name in ("v32", "v4_pro", "v4_flash")]
    assert [round(float(n) / 1e9, 1) for n in units] == [1144.0, 306.3, 114.8]
    assert [round(float(100 * n / units[0]), 2) for n in units[1:]] == [26.78, 10.03]
    later = [fp8_work(preset(name), 2**20) for name in ("v32", "v4_pro", "v4_flash")]
    assert [float(100 * n / later[0]) for n in later[1:]] == pytest.approx([26.5, 9.97], abs=0.06)


def test_the_work_of_v32_at_128k() -> None:
    """Per layer: 36.5 dense and absorbed, 10.7 with keys of every head, 0.57 + 2.15 sparse."""
    dense = work(v3(), context=131072)[1].flops / 61
    _, indexer, core = (part.flops / 61 for part in work(v32(), context=131072))
    assert [round(n / 1e9, 2) for n in (dense, indexer, core)] == [36.51, 2.15, 0.57]
    assert flops(v32(), context=131072).tolist()[1:3] == [61 * indexer, 61 * core]


def test_the_work_of_v41() -> None:
    """Three owners of ratio 2 score half of the tokens, layer 20 all, four later sources 2048 blocks of 8."""
    _, indexer, core = work(v41_flash(), context=MILLION)
    assert indexer.flops == 2 * (3 * 500_000 + MILLION + 4 * 16_384) * 32 * 128
    assert core.flops == 2 * (38 * (512 + 128) + 2 * 128) * 64 * 1024
    assert flops(v41_flash(), context=0).tolist() == [2 * 16_129_985_024, 0, 0, 4 * 16_129_985_024]


def test_claims_say_what_is_reproduced() -> None:
    found = {
        name: [(c.published, c.is_reproduced) for c in claims(preset(name))]
        for name in ("v3", "v32", "v4_pro", "v4_flash", "v41_flash")
    }
    missed = {name: [number for number, ok in rows if not ok] for name, rows in found.items()}
    assert missed == {
        "v3": ["685", "36.7", "14", "7.28"],
        "v32": ["14", "80", "80"],
        "v4_pro": ["5.48", "274", "60"],
        "v4_flash": ["285"],
        "v41_flash": ["196"],
    }
    reproduced = {number for rows in found.values() for number, ok in rows if ok}
    wanted = {
        "671",
        "684.49",
        "70272",
        "48068",
        "3514",
        "890",
        "10",
        "7",
        "27",
        "1.6",
        "1.573",
        "49",
        "284",
        "13",
        "552",
    }
    assert wanted <= reproduced
    assert claims(tiny_v3()) == ()


@MODELS
def test_a_formula_says_how_its_number_came_about(name: str) -> None:
    for term in account(model(name)):
        assert eval(term.formula, {"__builtins__": {}}) == term.parameters, term
    for part in caches(model(name)):
        assert eval(part.formula, {"__builtins__": {}}) == part.per_token or part.state_bytes, part
        assert part.per_token or eval(part.formula, {"__builtins__": {}}) == part.layers * part.state_bytes, part
    for job in work(model(name), context=777):
        assert eval(job.formula, {"__builtins__": {}}) == job.flops, job


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
        (Stored.FP8_BLOCKS, 1024),
        (Stored.INT64, 8192),
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
        outcomes = runner.run([job for op in card.ops for job in plan(card, op, full=False)[:6]])
    assert {o.candidate for o in outcomes} == {"reference", "checkpoint", "written", "multiplied"}
    assert {o.status for o in outcomes} == {Status.PASSED}


@pytest.mark.parametrize("spelling", ["v41-flash", "v41_flash"])
def test_the_command_prints_every_term_and_the_totals(spelling: str) -> None:
    result = CliRunner().invoke(app, ["account", spelling], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for term in account(v41_flash()):
        assert f"{term.parameters:,}" in result.output
    for number in ("763,205,315,794", "510,286,023,000", "16,129,985,024", "7,895,156,608", "12,672"):
        assert number in result.output


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("v3", ("671,026,419,200", "70,272 B a token", "14 B, ours 13.46")),
        ("v32", ("671,877,944,064", "48,068 B a token", "14 B, ours 0.85")),
        (
            "v4-pro",
            ("1,572,997,201,763", "5,031.44 B a token", "10 %, ours 10.47", "27 %, ours 26.78", "5.48 GB, ours 5.03"),
        ),
        ("v4-flash", ("284,332,240,471", "3,514.25 B a token", "7 %, ours 7.31", "10 %, ours 10.03")),
    ],
)
def test_the_command_prints_the_published_figures_beside_ours(name: str, numbers: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["account", name], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert [number for number in numbers if number not in result.output] == []
    assert result.output.index("published and reproduced") < result.output.index("published and NOT reproduced")


def test_the_command_takes_a_context() -> None:
    found = json.loads(CliRunner().invoke(app, ["account", "v32", "--context", "131072", "--json"]).output)
    assert found["sequence_bytes"] == {"records": 48_068 * 131_072, "states": 0}
    assert [part["flops"] for part in found["work"]][1] == 61 * 131_072 * 16_384
    assert {claim["reproduced"] for claim in found["claims"]} == {True, False}
    text = CliRunner().invoke(app, ["account", "tiny_v4_flash", "--context", "16"]).output
    assert "a sequence of 16 tokens" in text
    assert "published" not in text


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


@pytest.mark.parametrize("op", [sequence_bytes, flops, work])
def test_a_negative_context_is_refused(op: Callable[..., object]) -> None:
    for name in ("v3", "v4_flash", "v41_flash"):
        with pytest.raises(ValueError, match="context: expected 0 or more, got -1"):
            op(preset(name), context=-1)
    assert CliRunner().invoke(app, ["account", "v3", "--context", "-1"]).exit_code == 2


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
