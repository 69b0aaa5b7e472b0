"""Checkpoints: what is read, what it weighs, what is refused and how it is named; transformers on the other side."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deeptwin.parity import goldens
from deeptwin.parity.card import load_card
from deeptwin.parity.checkpoint_draws import drawn_checkpoint
from deeptwin.parity.gate import Runner, Settings, plan
from deeptwin.parity.outcome import Status
from deeptwin.reference.accounting import totals
from deeptwin.reference.checkpoint import Dequantised, open_checkpoint, open_model, value_faults
from deeptwin.reference.checkpoint_config import plain_dtype, read_config, write_config
from deeptwin.reference.checkpoint_file import (
    dtype_name,
    file_bytes,
    map_file,
    pack_header,
    read_entries,
    stored_tensor,
)
from deeptwin.reference.checkpoint_names import Spec, expected_tensors
from deeptwin.reference.checkpoint_write import write_checkpoint
from deeptwin.reference.model import model_v3, model_v4
from deeptwin.reference.model_weights import V3Model, V4Model
from deeptwin.reference.numerics import SEMANTIC
from deeptwin.reference.presets import PRESETS, V3Config, V4Config, V41Config, preset, v3, v4_flash, v32, v41_flash

CARD = load_card("checkpoint")
TINY = ("tiny_v32", "tiny_v4_flash", "tiny_v41_flash")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="session")
def drawn() -> dict[str, Tensors]:
    return {name: drawn_checkpoint(preset(name), seed=1) for name in TINY}


def raw(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def released(folder: Path, name: str, tensors: Tensors, **options: int) -> Path:
    write_checkpoint(folder, tensors, config=write_config(preset(name)), **options)
    return folder


# properties of the reference


@pytest.mark.parametrize("name", TINY)
def test_what_is_written_comes_back_bit_for_bit(name: str, drawn: dict[str, Tensors], tmp_path: Path) -> None:
    one = open_model(released(tmp_path / "one", name, drawn[name]))
    many = open_model(released(tmp_path / "many", name, drawn[name], shard_bytes=1 << 20))
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == int(totals(preset(name))[1])
    for found in (one, many):
        assert found.config == preset(name)
        assert found.plain is None
        assert set(found.tensors) == set(drawn[name])
        for key, x in drawn[name].items():
            got = found.tensors[key]
            assert (got.dtype, got.shape) == (x.dtype, x.shape)
            assert torch.equal(raw(got), raw(x)), key
    assert not list(tmp_path.glob("*.partial"))


def test_a_tensor_is_a_view_and_writing_to_it_changes_no_file(drawn: dict[str, Tensors], tmp_path: Path) -> None:
    folder = released(tmp_path / "a", "tiny_v41_flash", drawn["tiny_v41_flash"])
    before = (folder / "model.safetensors").read_bytes()
    tensors = open_checkpoint(folder)
    first, again = tensors["norm.weight"], tensors["model.norm.weight"]
    assert first.data_ptr() == again.data_ptr()
    first.fill_(3.0)
    assert torch.equal(again, torch.full_like(again, 3.0))
    assert (folder / "model.safetensors").read_bytes() == before
    tensors.release()
    assert torch.equal(tensors["norm.weight"], drawn["tiny_v41_flash"]["norm.weight"])
    assert "no.such.weight" not in tensors
    with pytest.raises(KeyError):
        tensors["no.such.weight"]


def test_both_spellings_resolve(drawn: dict[str, Tensors], tmp_path: Path) -> None:
    prefixed = {f"model.{name}": x for name, x in drawn["tiny_v41_flash"].items()}
    found = open_model(released(tmp_path / "a", "tiny_v41_flash", prefixed))
    assert "layers.0.attn_norm.weight" in found.tensors
    assert torch.equal(found.tensors["norm.weight"], found.tensors["model.norm.weight"])
    bare = {name.removeprefix("model."): x for name, x in drawn["tiny_v32"].items()}
    assert open_model(released(tmp_path / "b", "tiny_v32", bare)).config == preset("tiny_v32")


def parameters(specs: tuple[Spec, ...], *, drafts: bool) -> int:
    """Logical values, scales and tables aside."""
    counted = [spec for spec in specs if not spec.name.endswith((".scale", "_scale_inv", "tid2eid"))]
    chosen = [spec for spec in counted if drafts or not spec.is_draft]
    return sum(torch.Size(spec.shape).numel() * (2 if spec.dtype == "I8" else 1) for spec in chosen)


def test_the_names_of_v41_add_up_to_the_published_totals() -> None:
    specs = expected_tensors(v41_flash())
    by_dtype: dict[str, int] = {}
    for spec in specs:
        if not spec.name.endswith(".scale"):
            by_dtype[spec.dtype] = by_dtype.get(spec.dtype, 0) + torch.Size(spec.shape).numel()
    assert 2 * by_dtype["I8"] == 557_171_343_360
    assert by_dtype["F8_E4M3"] == 204_015_223_296
    assert by_dtype["BF16"] == 1_976_441_856
    assert by_dtype["F32"] == 42_307_282
    assert parameters(specs, drafts=True) == 763_205_315_794
    assert pack_size(specs) == 510_286_023_000
    names = [spec.name for spec in specs if not spec.is_draft]
    owned = {part: sum(part in name and name.endswith("weight") for name in names) for part in OWNED_V41}
    assert owned == OWNED_V41
    assert not any("hc_head" in name or name.endswith("hc_attn_norm.weight") for name in names)


OWNED_V41 = {"compressor.wkv": 4, "compressor.wgate": 3, "indexer.wq_b": 8, "indexer.wk.": 4}


def pack_size(specs: tuple[Spec, ...]) -> int:
    sizes = {"I64": 8, "F32": 4, "BF16": 2}
    return sum(torch.Size(spec.shape).numel() * sizes.get(spec.dtype, 1) for spec in specs)


def test_the_names_of_earlier_models_add_up_to_the_published_counts() -> None:
    specs = {name: expected_tensors(preset(name)) for name in ("v3", "v32", "v4_flash")}
    assert parameters(specs["v3"], drafts=False) == 671_026_419_200
    assert parameters(specs["v32"], drafts=False) == 671_877_944_064
    assert round(parameters(specs["v3"], drafts=True) / 1e7) == 68_449  # published as 685B
    assert round(parameters(specs["v4_flash"], drafts=False) / 1e6) == 284_332
    assert sum(spec.is_draft for spec in specs["v4_flash"]) == 1575
    assert parameters(expected_tensors(preset("tiny_v3"), plain="F32"), drafts=True) == int(
        totals(preset("tiny_v3"))[0].sum()
    )


QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
YARN_V4 = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}
# typed in from the tables of v3-v32-v4.md section 1.1 and v41-blocks.md section 0.2, not from the presets
RELEASED_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": QUANTISED,
}
RELEASED_V32 = RELEASED_V3 | {
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "quantization_config": QUANTISED | {"scale_fmt": "ue8m0"},
}
RELEASED_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": YARN_V4,
    "max_position_embeddings": 1048576,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "quantization_config": QUANTISED | {"scale_fmt": "ue8m0"},
}
RELEASED_V41: dict[str, Any] = {
    "architectures": ["one"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "image_token_id": 129264,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "vision_config": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
    "text_config": {
        "num_hidden_layers": 40,
        "num_nextn_predict_layers": 3,
        "hidden_size": 5120,
        "vocab_size": 129280,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": YARN_V4,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-20,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 14],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 16000000,
        "engram_num_embeddings": [384006168, 384016682],
        "engram_compressed_vocab_size": 99092,
        "engram_pad_token_id": 2,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
        "dspark_markov_rank": 256,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_noise_token_id": 128799,
    },
}


def test_released_configurations_are_the_presets() -> None:
    found = [read_config(one, name="x") for one in (RELEASED_V3, RELEASED_V32, RELEASED_V4, RELEASED_V41)]
    assert found == [v3(), v32(), v4_flash(), v41_flash()]
    # V3.1 scales its rows by powers of two; nothing else differs
    v31 = read_config(RELEASED_V3 | {"quantization_config": QUANTISED | {"scale_fmt": "ue8m0"}}, name="v31")
    assert v31 == replace(v3(), name="v31", activation=v32().activation)


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_configuration_survives_its_file(name: str) -> None:
    config = preset(name)
    record = json.loads(json.dumps(write_config(config)))
    assert read_config(record, name="x") == config
    assert plain_dtype(record) is None
    if isinstance(config, V3Config | V4Config):
        assert plain_dtype(write_config(config, plain="F32")) == "F32"
    renamed = replace(config, name="x", vocab_size=config.vocab_size + 1)
    assert read_config(write_config(renamed), name="mine").name == "mine"


def test_matrices_of_v3_are_codes_times_scales_in_bf16(drawn: dict[str, Tensors], tmp_path: Path) -> None:
    found = open_model(released(tmp_path / "a", "tiny_v32", drawn["tiny_v32"]))
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    codes, scale = drawn["tiny_v32"][name].float(), drawn["tiny_v32"][name + "_scale_inv"]
    assert scale.shape == (5, 1)  # the last block is cut
    wanted = torch.stack([row * scale[i // 128, 0] for i, row in enumerate(codes)]).bfloat16()
    assert torch.equal(found.weights[name], wanted)
    assert found.weights["model.layers.0.self_attn.indexer.weights_proj.weight"].dtype is torch.float32
    assert (len(found.weights), name in found.weights) == (len(found.tensors), True)
    plain = {key: Dequantised(tensors=found.tensors)[key] for key in found.weights}
    config = found.config
    assert isinstance(config, V3Config)
    tokens = torch.arange(6)
    logits = [
        model_v3(tokens, V3Model.from_state_dict(state, config=config), config=config)
        for state in (found.weights, plain)
    ]
    assert torch.equal(*logits)


SAVED = {
    "v3": "tiny_v3",
    "v32": "tiny_v32",
    "v4_flash": "tiny_v4_flash",
}


@pytest.mark.parametrize("model", list(SAVED))
def test_transformers_reads_what_is_written_and_writes_what_is_read(model: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from deeptwin.parity.peer_table import config_of

    config = config_of(model, eps=False)
    record = write_config(config, plain="F32")
    if isinstance(config, V4Config):  # transformers knows ratios of 0, 4 and 128 only, others as rates of kinds
        kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 8: "heavily_compressed_attention"}
        ratios = record.pop("compress_ratios")[: config.num_layers]
        record |= {"layer_types": [kinds[n] for n in ratios], "compress_rates": {kinds[4]: 4, kinds[8]: 8}}
    ours = tmp_path / "ours"
    write_checkpoint(ours, drawn_checkpoint(config, seed=2, plain="F32"), config=record, shard_bytes=1 << 21)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ours, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.arange(12)
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0]
    logits = []
    for folder in (ours, tmp_path / "theirs"):
        found = open_model(folder)
        assert (found.config, found.plain) == (preset(SAVED[model]), "F32")
        logits.append(_logits(tokens, found.weights, config))
    assert torch.equal(*logits)
    state = _logits(tokens, theirs.state_dict(), config)
    assert torch.equal(state, logits[0])
    assert (wanted - logits[0]).norm() < 1e-5 * wanted.norm()


def _logits(tokens: Tensor, state: Any, config: Any) -> Tensor:
    if isinstance(config, V3Config):
        weights = V3Model.from_state_dict(state, config=config)
        return model_v3(tokens, weights, config=config, dtype=torch.float32, num=SEMANTIC)
    released_names = "embed.weight" in state
    make = V4Model.from_state_dict if released_names else V4Model.from_transformers
    return model_v4(tokens, make(state, config=config), config=config, num=SEMANTIC)


LARGE = r"""
import json, re, sys
from pathlib import Path
import torch
from deeptwin.reference.block_weights import V41BlockWeights
from deeptwin.reference.checkpoint import open_model
from deeptwin.reference.block_v41 import stack_of
from deeptwin.reference.config import Combine, PageLayout, ScoreOrder
from deeptwin.reference.csa2_config import CastPoints
def peak_kib():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak_kib()
found = open_model(Path(sys.argv[1]))
stack = stack_of(found.config, cast=CastPoints.RELEASE, score_order=ScoreOrder.FP32, layout=PageLayout.INTERLEAVED,
                 combine=Combine.SINGLE)
layer = V41BlockWeights.from_state_dict(found.weights, config=found.config, csa2=stack.csa2,
                                        engram=found.config.memory, layer=1)
total = sum(x.numel() for x in vars(layer.ffn.experts).values())
table = found.tensors["layers.1.engram.embed.weight"]
rows = table.view(torch.uint8)[torch.tensor([0, len(table) // 2, len(table) - 1])]
after = peak_kib()
print(json.dumps({"grown_kib": after - before, "rows": rows[:, 0].tolist(), "total": total}))
"""


def test_a_layer_of_a_large_file_costs_what_the_layer_weighs(drawn: dict[str, Tensors], tmp_path: Path) -> None:
    """A file with holes of 17 GB: opening it and taking a layer stays far below a hundredth of it."""
    config = preset("tiny_v41_flash")
    assert isinstance(config, V41Config)
    large = replace(config, name="large", engram=replace(config.engram, vocab_size=16_000_000, head_dim=128))
    large = replace(large, engram=replace(large.engram, table_rows=_rows(large)))
    specs = expected_tensors(large)
    small = {
        spec.name: _resized(drawn["tiny_v41_flash"][spec.name], spec)
        for spec in specs
        if ".engram.embed." not in spec.name
    }
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_config(large)))
    header, order = pack_header({spec.name: (spec.dtype, spec.shape) for spec in specs})
    entries = {spec.name: spec for spec in specs}
    at = len(header)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for name in order:
            if name in small:
                file.seek(at)
                file.write(raw(small[name]).numpy().data)
            at += pack_size((entries[name],))
        file.truncate(at)
    assert at > 16e9
    command = [sys.executable, "-c", LARGE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["rows"] == [0, 0, 0]
    assert said["grown_kib"] < 50_000, said


def _rows(config: V41Config) -> tuple[int, ...]:
    from deeptwin.reference.engram_vocab import hash_layout

    return hash_layout(config.memory).num_rows


def _resized(x: Tensor, spec: Spec) -> Tensor:
    """The drawn tensor, or zeros where the model is wider."""
    return x if tuple(x.shape) == spec.shape else torch.zeros(spec.shape, dtype=torch.uint8).view(x.dtype)


def test_values_that_no_weight_can_be_are_named() -> None:
    code, scale = torch.zeros(2, 3, dtype=torch.uint8), torch.full((2,), 127, dtype=torch.uint8)
    good = {"a": code.view(torch.float8_e4m3fn), "b": scale.view(torch.float8_e8m0fnu), "c": code.view(torch.int8)}
    assert value_faults(good | {"d": torch.tensor([1.0, -0.0]), "e": torch.tensor([2**40])}) == []
    code, scale = code.clone(), scale.clone()
    code[1, 2], scale[1] = 0xFF, 0xFF
    bad = {
        "a": code.view(torch.float8_e4m3fn),
        "b": scale.view(torch.float8_e8m0fnu),
        "d": torch.tensor([1.0, float("inf"), float("nan")]),
        "c": code.view(torch.int8),
    }
    assert value_faults(bad) == [
        "a: expected numbers, got 1 that are none, the first at [1, 2]",
        "b: expected numbers, got 1 that are none, the first at [1]",
        "d: expected numbers, got 2 that are none, the first at [1]",
    ]


def test_the_gate_passes_and_the_golden_vectors_hold() -> None:
    with Runner(Settings(jobs=1)) as runner:
        outcomes = runner.run([job for op in CARD.ops for job in plan(CARD, op, full=False)[:3]])
    assert {o.candidate for o in outcomes} == {"reference", "safetensors", "listed"}
    assert {o.status for o in outcomes} == {Status.PASSED}
    assert goldens.faults(CARD) == []


# rejected input


Change = Callable[[Tensors], Tensors]


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


def without(name: str) -> Change:
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def beside(name: str, x: Tensor) -> Change:
    return lambda tensors: tensors | {name: x}


W2 = "layers.3.ffn.experts.7.w2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("norm.weight"), r"norm\.weight: expected BF16 \[128\], got no such tensor"),
        (without(f"{W2}.scale"), r"experts\.7\.w2\.scale: expected F8_E8M0 \[128, 2\], got no such tensor"),
        (renamed("ffn.experts.7.", "ffn.experts.8."), r"experts\.7\.w1\.weight: expected I8 \[64, 64\], got no such"),
        (beside("layers.0.extra", torch.zeros(1)), r"layers\.0\.extra: expected no such tensor, got one in model\."),
        (
            beside("layers.0.hc_attn_norm.weight", torch.zeros(512)),
            r"hc_attn_norm\.weight: expected no such tensor \(its values belong into the columns of the site's fn\)",
        ),
        (beside("hc_head_fn", torch.zeros(4, 512)), r"hc_head_fn: expected no such tensor \(a head of the streams"),
        (beside("norm.weight", torch.zeros(64).bfloat16()), r"norm\.weight: expected shape \[128\], got \[64\]"),
        (beside("model.norm.weight", torch.zeros(128).bfloat16()), "expected one spelling of a name, got norm.weight"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    change: Change, message: str, drawn: dict[str, Tensors], tmp_path: Path
) -> None:
    folder = released(tmp_path / "a", "tiny_v41_flash", change(drawn["tiny_v41_flash"]))
    with pytest.raises(ValueError, match=message):
        open_model(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("layers.2.hc_ffn_fn", torch.bfloat16, r"layers\.2\.hc_ffn_fn: expected F32, got BF16"),
        ("layers.2.attn.attn_sink", torch.bfloat16, r"attn_sink: expected F32, got BF16"),
        ("embed.weight", torch.float16, r"embed\.weight: expected BF16, got F16"),
        (f"{W2}.weight", torch.uint8, r"w2\.weight: expected I8, got U8"),
        (f"{W2}.scale", torch.uint8, r"w2\.scale: expected F8_E8M0, got U8"),
    ],
)
def test_other_dtypes_are_named(
    name: str, dtype: torch.dtype, message: str, drawn: dict[str, Tensors], tmp_path: Path
) -> None:
    x = drawn["tiny_v41_flash"][name]
    changed = x.view(dtype) if dtype.itemsize == x.element_size() == 1 else x.to(dtype)
    folder = released(tmp_path / "a", "tiny_v41_flash", drawn["tiny_v41_flash"] | {name: changed})
    with pytest.raises(TypeError, match=message):
        open_model(folder)


def test_what_no_source_settles_may_be_either(drawn: dict[str, Tensors], tmp_path: Path) -> None:
    wide = {name: x.float() if name.endswith("_norm.weight") else x for name, x in drawn["tiny_v4_flash"].items()}
    assert open_model(released(tmp_path / "a", "tiny_v4_flash", wide)).config == preset("tiny_v4_flash")
    wide = {name: x.float() if name.endswith("_norm.weight") else x for name, x in drawn["tiny_v41_flash"].items()}
    with pytest.raises(TypeError, match=r"attn_norm\.weight: expected BF16, got F32[\s\S]*and \d+ more"):
        open_model(released(tmp_path / "b", "tiny_v41_flash", wide))


def write_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Tensor:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return map_file(path)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry("F32", [2], 0, 8)}, 7, r"f: expected \d+ bytes, up to the end of a, got \d+"),
        ({"a": entry("F32", [2], 0, 8)}, 9, r"f: expected \d+ bytes, up to the end of a, got \d+"),
        ({"a": entry("F32", [2], 0, 4)}, 4, r"f: a: expected 8 bytes for F32 \[2\], got 4 at \[0, 4\]"),
        ({"a": entry("F4", [2], 0, 8)}, 8, "f: a: expected a dtype of I64.*, got F4"),
        ({"a": entry("U8", [-1], 0, 8)}, 8, r"f: a: expected a shape and two offsets from 0 up, got \[-1\]"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, 5, r"f: b: expected byte \d+, where a ends"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3, r"f: b: expected byte \d+, where a ends"),
        ({"a": {"dtype": "U8"}}, 0, "f: a: expected dtype, shape and data_offsets"),
        ([1], 0, "f: expected a header that is an object, got list"),
        (b"{oops", 0, "f: expected a header in JSON"),
        (b"\xff\xff\xff", 0, "f: expected a header in JSON"),
        (b'{"a": 1, "a": 2}', 0, "f: expected every name once in the header, got 'a' twice"),
    ],
)
def test_files_that_break_their_promises_are_refused(header: Any, size: int, message: str, tmp_path: Path) -> None:
    file_n = write_file(tmp_path / "f", header, bytes(size))
    with pytest.raises(ValueError, match=message):
        read_entries(file_n, file="f")


def test_truncated_and_missing_files_are_refused(drawn: dict[str, Tensors], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="f: expected at least 8 bytes, got 3"):
        read_entries(torch.zeros(3, dtype=torch.uint8), file="f")
    with pytest.raises(ValueError, match=r"f: expected a header of 2 to 4 bytes, got one that says 999: truncated\?"):
        read_entries(write_file(tmp_path / "f", b"{}  ", length=999), file="f")
    with pytest.raises(ValueError, match="none: expected a file of tensors"):
        map_file(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty: expected a file of tensors"):
        map_file(tmp_path / "empty")
    folder = released(tmp_path / "a", "tiny_v32", drawn["tiny_v32"])
    tensors = open_checkpoint(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    last = max(tensors.entries, key=lambda name: tensors.entries[name].end)
    with pytest.raises(ValueError, match=r"expected \d+ bytes, as when it was opened, got"):
        tensors[last]
    with pytest.raises(ValueError, match=r"model\.safetensors: expected \d+ bytes, up to the end of"):
        open_checkpoint(folder)


def test_an_index_that_disagrees_with_its_files_is_refused(drawn: dict[str, Tensors], tmp_path: Path) -> None:
    folder = released(tmp_path / "a", "tiny_v32", drawn["tiny_v32"], shard_bytes=1 << 20)
    path = folder / "model.safetensors.index.json"
    record = json.loads(path.read_text())
    names = sorted(record["weight_map"])
    first, files = names[0], sorted(set(record["weight_map"].values()))
    other = next(file for file in files if file != record["weight_map"][first])

    def refused(message: str, **changes: Any) -> None:
        path.write_text(json.dumps(record | changes))
        with pytest.raises(ValueError, match=message):
            open_checkpoint(folder)

    places = record["weight_map"]
    refused(rf"{first}: expected only what .* places here, it says {other}", weight_map=places | {first: other})
    refused("nothing: expected it in .* whose header lacks it", weight_map=places | {"nothing": other})
    dropped = {name: file for name, file in places.items() if name != first}
    refused(f"{first}: expected only what .* it says None", weight_map=dropped)
    refused(r"weight_map: expected files of this directory, got '\.\./x'", weight_map=places | {first: "../x"})
    refused("weight_map: expected a file for every name, got list", weight_map=[1])
    refused(r"metadata\.total_size: expected \d+, the bytes of all tensors, got 5", metadata={"total_size": 5})
    refused("metadata.total_size: expected a whole number, got '5'", metadata={"total_size": "5"})
    path.write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(ValueError, match="a: expected every key once, got it twice"):
        open_checkpoint(folder)
    path.write_text("[")
    with pytest.raises(ValueError, match="expected JSON in"):
        open_checkpoint(folder)
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected an object, got list"):
        open_checkpoint(folder)
    (folder / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"expected either .* got both"):
        open_checkpoint(folder)
    with pytest.raises(ValueError, match=r"expected either .* got neither"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: expected JSON in"):
        open_model(tmp_path)


def within(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The record with one key changed, or dropped if the value is `...`."""
    key, _, rest = path.partition("/")
    if rest:
        return record | {key: within(record[key], rest, value)}
    changed = record | {key: value}
    return {name: one for name, one in changed.items() if one is not ...}


@pytest.mark.parametrize(
    ("record", "path", "value", "message"),
    [
        (RELEASED_V3, "model_type", "llama", "model_type: expected one of deepseek_v3, .* got 'llama'"),
        (RELEASED_V3, "model_type", ..., "model_type: expected a string, got no such key"),
        (RELEASED_V3, "hidden_size", "7168", "hidden_size: expected a whole number, got '7168'"),
        (RELEASED_V3, "hidden_size", True, "hidden_size: expected a whole number, got True"),
        (RELEASED_V3, "kv_lora_rank", ..., "kv_lora_rank: expected a whole number, got no such key"),
        (RELEASED_V3, "hidden_act", "gelu", "hidden_act: expected 'silu', got 'gelu'"),
        (RELEASED_V3, "attention_bias", True, "attention_bias: expected False, got True"),
        (RELEASED_V3, "scoring_func", "softmax", "scoring_func: expected 'sigmoid', got 'softmax'"),
        (RELEASED_V3, "tie_word_embeddings", True, "tie_word_embeddings: expected False, got True"),
        (RELEASED_V3, "num_key_value_heads", 8, "num_key_value_heads: expected 128, got 8"),
        (RELEASED_V3, "rope_scaling/type", "linear", r"rope_scaling\.type: expected 'yarn' or 'default'"),
        (RELEASED_V3, "quantization_config/weight_block_size", [64, 64], r"weight_block_size: expected \[128, 128\]"),
        (RELEASED_V3, "mlp_layer_types", ["dense"], "mlp_layer_types: expected"),
        (RELEASED_V32, "quantization_config/scale_fmt", ..., "scale_fmt: expected 'ue8m0', got no such key"),
        (RELEASED_V4, "compress_ratios", [0, 4], "attention: expected a ratio for each of 44 blocks, got 2"),
        (RELEASED_V4, "compress_ratios", ..., "layer_types: expected a list of strings, got no such key"),
        (RELEASED_V4, "expert_dtype", "fp8", "expert_dtype: expected 'fp4', got 'fp8'"),
        (RELEASED_V41, "text_config", ..., "text_config: expected an object, got no such key"),
        (RELEASED_V41, "architectures", ["a", "b"], "architectures: expected one entry"),
        (RELEASED_V41, "dtype", "float16", "dtype: expected 'bfloat16', got 'float16'"),
        (RELEASED_V41, "dtype", ..., "dtype: expected 'bfloat16', got no such key"),
        (RELEASED_V41, "quantization_config", ..., "quantization_config: expected an object"),
        (RELEASED_V41, "quantization_config/quant_method", "awq", "quant_method: expected 'fp8', got 'awq'"),
        (RELEASED_V41, "quantization_config/activation_scheme", "static", "activation_scheme: expected 'dynamic'"),
        (RELEASED_V41, "quantization_config/scale_fmt", "fp32", "scale_fmt: expected 'ue8m0', got 'fp32'"),
        (RELEASED_V41, "quantization_config/expert_dtype", "fp8", "expert_dtype: expected 'fp4', got 'fp8'"),
        (RELEASED_V41, "quantization_config/weight_block_size", [128, 128], r"expected \[32, 32\], got \[128, 128\]"),
        (RELEASED_V41, "text_config/num_key_value_heads", 2, r"text_config\.num_key_value_heads: expected 1, got 2"),
        (RELEASED_V41, "text_config/attention_dropout", 0.1, "attention_dropout: expected 0.0 or 0, got 0.1"),
        (RELEASED_V41, "text_config/attention_bias", True, "attention_bias: expected False, got True"),
        (RELEASED_V41, "text_config/head_dim", 256, "head_dim: expected 512, the width of a record, got 256"),
        (RELEASED_V41, "text_config/compress_ratios", [4] * 43, "expected ratios 0, 1 and 2"),
        (RELEASED_V41, "text_config/kv_source_layer_ids", [3, 8, 14, 20], "kv_source_layers: expected index sources"),
        (
            RELEASED_V41,
            "text_config/engram_num_embeddings",
            [384006168, 384016683],
            r"engram_num_embeddings: expected \(384006168, 384016682\) by the primes of the hash",
        ),
    ],
)
def test_configurations_that_no_release_has_are_refused(
    record: dict[str, Any], path: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(within(record, path, value), name="x")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("text_config/hc_shifted", False, "hc_shifted: expected True, got False"),
        ("text_config/use_ape", True, "use_ape: expected False, got True"),
        ("text_config/compress_overlap", True, "compress_overlap: expected False, got True"),
        ("text_config/use_fp4_sparse_kv", False, "use_fp4_sparse_kv: expected True, got False"),
        ("text_config/hc_post_mult_value", 1.0, "hc_post_mult_value: expected 2.0, got 1.0"),
        ("text_config/index_k_source_layer_ids", [2], r"index_k_source_layer_ids: expected \[2, 8, 14, 20\]"),
        ("text_config/candidate_source_layer_id", None, "candidate_source_layer_id: expected a layer, got None"),
        ("text_config/candidate_source_layer_id", -1, "candidate_source_layer_id: expected a layer, got -1"),
        ("text_config/rope_scaling/factor", 8, "rope_scaling: expected that of the release"),
        ("vision_config/max_wh_ratio", 4.0, r"vision_config\.max_wh_ratio: expected None, got 4\.0"),
    ],
)
def test_variants_that_this_room_has_not_are_declined(path: str, value: Any, message: str, tmp_path: Path) -> None:
    record = within(RELEASED_V41, path, value)
    with pytest.raises(NotImplementedError, match=message):
        read_config(record, name="x")
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(NotImplementedError, match=message):
        open_model(tmp_path)


def test_plain_checkpoints_say_what_they_hold() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of .* without a quantization_config, got 'int8'"):
        plain_dtype({"dtype": "int8"})
    with pytest.raises(ValueError, match="plain: expected None for V4.1, whose weights are codes, got 'F32'"):
        write_config(v41_flash(), plain="F32")
    with pytest.raises(ValueError, match="plain: expected one of BF16, F16, F32, got 'F8'"):
        write_config(v3(), plain="F8")
    with pytest.raises(ValueError, match="plain: expected None for V4.1"):
        expected_tensors(v41_flash(), plain="BF16")
    specs = {spec.name: spec for spec in expected_tensors(preset("tiny_v4_flash"), plain="BF16")}
    assert specs["layers.0.attn.attn_sink"].dtypes == ("F32",)
    assert specs["layers.1.ffn.gate.bias"].dtypes == ("F32", "BF16")


def test_bad_writing_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    good = {"a": torch.zeros(3)}
    with pytest.raises(ValueError, match="shard_bytes: expected a positive number, got 0"):
        write_checkpoint(tmp_path / "a", good, config={}, shard_bytes=0)
    with pytest.raises(TypeError, match="b: expected a dtype of I64.* got torch.complex64"):
        write_checkpoint(tmp_path / "a", good | {"b": torch.zeros(1, dtype=torch.complex64)}, config={})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_checkpoint(tmp_path / "a", good, config={"a": object()})
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(tmp_path / "a", good, config={})
    with pytest.raises(ValueError, match="folder: expected a name that is free"):
        write_checkpoint(tmp_path / "a", good, config={})
    with pytest.raises(TypeError, match="x: expected a dtype of"):
        dtype_name("x", torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(TypeError, match="a: expected a dtype of"):
        file_bytes(("a",), (torch.zeros(1, dtype=torch.complex64),))
    with pytest.raises(ValueError, match="names: expected 1, one for each tensor, got 2"):
        file_bytes(("a", "b"), (torch.zeros(1),))
    with pytest.raises(ValueError, match="name: expected one of a, got 'b'"):
        stored_tensor(file_bytes(("a",), (torch.zeros(1),)), name="b")
