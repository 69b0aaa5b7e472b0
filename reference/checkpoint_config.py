"""config.json of V3, V3.2 and V4 as the configurations of this room, and back.

The file says sizes. Where implementations of the same file disagree (rounding of norms, order of index scores, formats
of caches) it says nothing: those choices are the release's, as the presets have them. Keys that say how a model was
trained or is served are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .checkpoint_fields import Fields, Table, expect_quantisation, read_yarn, written, written_yarn
from .checkpoint_v41 import MHC, config_v41, json_v41
from .config import FP8_1X128, FP8_1X128_UE8M0, RopeConfig, RouterConfig
from .presets import PRESETS, IndexSizes, ModelConfig, V3Config, V4Config, v3, v4_flash, v32

V3_MODEL: Table = {
    "hidden": ("hidden_size", "int"),
    "num_layers": ("num_hidden_layers", "int"),
    "vocab_size": ("vocab_size", "int"),
    "norm_eps": ("rms_norm_eps", "float"),
    "dense_layers": ("first_k_dense_replace", "int"),
    "dense_width": ("intermediate_size", "int"),
    "shared_experts": ("n_shared_experts", "int"),
    "expert_width": ("moe_intermediate_size", "int"),
    "max_positions": ("max_position_embeddings", "int"),
}
V3_ATTENTION: Table = {
    "hidden": ("hidden_size", "int"),
    "num_heads": ("num_attention_heads", "int"),
    "kv_lora_rank": ("kv_lora_rank", "int"),
    "nope_dim": ("qk_nope_head_dim", "int"),
    "value_dim": ("v_head_dim", "int"),
}
ROUTER: Table = {
    "num_experts": ("n_routed_experts", "int"),
    "topk": ("num_experts_per_tok", "int"),
    "route_scale": ("routed_scaling_factor", "float"),
}
GROUPS: Table = {"num_groups": ("n_group", "int"), "kept_groups": ("topk_group", "int")}
INDEX: Table = {"heads": ("index_n_heads", "int"), "dim": ("index_head_dim", "int"), "topk": ("index_topk", "int")}
V4_MODEL: Table = {
    "hidden": ("hidden_size", "int"),
    "num_layers": ("num_hidden_layers", "int"),
    "vocab_size": ("vocab_size", "int"),
    "norm_eps": ("rms_norm_eps", "float"),
    "shared_experts": ("n_shared_experts", "int"),
    "expert_width": ("moe_intermediate_size", "int"),
    "swiglu_limit": ("swiglu_limit", "float"),
    "max_positions": ("max_position_embeddings", "int"),
}
V4_ATTENTION: Table = {
    "num_heads": ("num_attention_heads", "int"),
    "head_dim": ("head_dim", "int"),
    "q_lora_rank": ("q_lora_rank", "int"),
    "o_groups": ("o_groups", "int"),
    "o_lora_rank": ("o_lora_rank", "int"),
    "window": ("sliding_window", "int"),
    "index_heads": ("index_n_heads", "int"),
    "index_dim": ("index_head_dim", "int"),
    "index_topk": ("index_topk", "int"),
}
RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
PLAIN = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def read_config(record: Mapping[str, Any], *, name: str) -> ModelConfig:
    """The configuration that a config.json says; it is called `name` unless it is one of the presets.

    Raises:
        ValueError: `model_type` is of no model of this room; a key is missing, of another kind, or has a value that no
            release has; sizes do not fit together.
        NotImplementedError: a variant that a model may have and this room has not.

    Source:
        v3-v32-v4.md section 1.1, v41-blocks.md section 0.2, v41-attention.md section 1.1
    """
    fields = Fields(values=record)
    kind = fields.take("model_type", "text")
    readers: dict[str, Callable[[Fields], ModelConfig]] = {
        "deepseek_v3": _v3,
        "deepseek_v32": _v3,
        "deepseek_v4": _v4,
        "deepseek_v41": config_v41,
    }
    if kind not in readers:
        raise ValueError(f"model_type: expected one of {', '.join(readers)}, got {kind!r}")
    found = readers[kind](fields)
    presets = [make() for make in PRESETS.values()]
    same = [preset.name for preset in presets if replace(found, name=preset.name) == preset]
    return replace(found, name=[*same, name][0])


def plain_dtype(record: Mapping[str, Any]) -> str | None:
    """What the weights are stored as where no `quantization_config` says that they are codes: BF16, F16 or F32.

    Raises:
        ValueError: neither a `quantization_config` nor one of these dtypes.
    """
    if record.get("quantization_config") is not None:
        return None
    said = record.get("dtype", record.get("torch_dtype"))
    if said not in PLAIN:
        raise ValueError(f"dtype: expected one of {', '.join(PLAIN)} without a quantization_config, got {said!r}")
    return PLAIN[said]


def write_config(config: ModelConfig, *, plain: str | None = None) -> dict[str, Any]:
    """The config.json of a model, quantised as released or plain (BF16, F16, F32): what `read_config` reads.

    Raises:
        ValueError: V4.1 is asked for plain, or `plain` is no dtype of weights.
    """
    if plain is not None and plain not in PLAIN.values():
        raise ValueError(f"plain: expected one of {', '.join(PLAIN.values())}, got {plain!r}")
    if isinstance(config, V3Config | V4Config):
        found = _json_v3(config) if isinstance(config, V3Config) else _json_v4(config)
    elif plain is not None:
        raise ValueError(f"plain: expected None for V4.1, whose weights are codes, got {plain!r}")
    else:
        return json_v41(config)
    if plain is not None:
        del found["quantization_config"]
        found["torch_dtype"] = next(said for said, stored in PLAIN.items() if stored == plain)
    return found


def _expect_common(fields: Fields) -> None:
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", False)
    fields.expect("attention_dropout", 0.0, 0)
    fields.expect("tie_word_embeddings", False)
    fields.expect("norm_topk_prob", True)
    fields.expect("topk_method", "noaux_tc")
    fields.expect("moe_layer_freq", 1)


def _scaling(fields: Fields, *part: str) -> tuple[Fields, float]:
    """Where the rotary table is described, and its base: transformers 5 has one object for both."""
    if "rope_parameters" in fields.values:
        found = fields.take("rope_parameters", "object")
        for key in part:
            found = found.take(key, "object")
        return found, found.take("rope_theta", "float")
    return fields.take("rope_scaling", "object", Fields(values={"type": "default"})), fields.take("rope_theta", "float")


def _v3(fields: Fields) -> V3Config:
    _expect_common(fields)
    fields.expect("scoring_func", "sigmoid")
    base = v3() if fields.values["model_type"] == "deepseek_v3" else v32()
    scaling, theta = _scaling(fields)
    rope = RopeConfig(rope_dim=fields.take("qk_rope_head_dim", "int"), theta=theta, yarn=read_yarn(scaling))
    attention = replace(
        base.attention, rope=rope, q_lora_rank=fields.take("q_lora_rank", "int", 0), **fields.part(V3_ATTENTION)
    )
    fields.expect("num_key_value_heads", attention.num_heads)
    index: IndexSizes | None = None if base.index is None else replace(base.index, **fields.part(INDEX))
    sizes = fields.part(V3_MODEL)
    dense, layers = sizes["dense_layers"], sizes["num_layers"]
    fields.expect("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense))
    activation = base.activation
    if "quantization_config" in fields.values:
        quantised = fields.take("quantization_config", "object")
        expect_quantisation(quantised, [128, 128])
        quantised.expect("scale_fmt", "ue8m0", optional=index is None)
        activation = FP8_1X128_UE8M0 if "scale_fmt" in quantised.values else FP8_1X128
    return replace(
        base,
        draft_layers=fields.take("num_nextn_predict_layers", "int", 0),
        attention=attention,
        index=index,
        router=replace(base.router, **fields.part({**ROUTER, **GROUPS})),
        activation=activation,
        **sizes,
    )


def _json_v3(config: V3Config) -> dict[str, Any]:
    a, is_v32 = config.attention, config.index is not None
    kind = "V32" if is_v32 else "V3"
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    ue8m0 = {"scale_fmt": "ue8m0"} if config.activation == FP8_1X128_UE8M0 else {}
    scaling = {} if a.rope.yarn is None else {"rope_scaling": written_yarn(a.rope.yarn)}
    return {
        "architectures": [f"Deepseek{kind}ForCausalLM"],
        "model_type": f"deepseek_{kind.lower()}",
        **written(config, V3_MODEL),
        **written(a, V3_ATTENTION),
        "num_key_value_heads": a.num_heads,
        "q_lora_rank": a.q_lora_rank or None,
        "qk_rope_head_dim": a.rope.rope_dim,
        "rope_theta": a.rope.theta,
        **scaling,
        "num_nextn_predict_layers": config.draft_layers,
        **_json_router(config.router),
        **written(config.router, GROUPS),
        "scoring_func": "sigmoid",
        **(written(config.index, INDEX) if is_v32 else {}),
        **COMMON,
        "quantization_config": quantised | ue8m0,
    }


COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _json_router(router: RouterConfig) -> dict[str, Any]:
    return written(router, ROUTER) | {"norm_topk_prob": True, "topk_method": "noaux_tc"}


def _v4(fields: Fields) -> V4Config:
    _expect_common(fields)
    fields.expect("scoring_func", "sqrtsoftplus")
    fields.expect("num_key_value_heads", 1)
    base, sizes = v4_flash(), fields.part(V4_MODEL)
    drafts = fields.take("num_nextn_predict_layers", "int", 0)
    scaling, _ = _scaling(fields, "compress")
    rotary = fields.take("qk_rope_head_dim", "int")
    theta = fields.take("compress_rope_theta", "float")
    attention = replace(
        base.attention, compress_ratios=_ratios(fields, sizes["num_layers"], drafts), **fields.part(V4_ATTENTION)
    )
    if "quantization_config" in fields.values:
        quantised = fields.take("quantization_config", "object")
        expect_quantisation(quantised, [128, 128])
        quantised.expect("scale_fmt", "ue8m0", optional=False)
        fields.expect("expert_dtype", "fp4")
    hashed = fields.take("num_hash_layers", "int", None)
    if hashed is None:
        kinds = fields.take("mlp_layer_types", "texts")
        hashed = kinds.count("hash_moe")
        fields.expect("mlp_layer_types", ["hash_moe"] * hashed + ["moe"] * (sizes["num_layers"] - hashed))
    return replace(
        base,
        draft_layers=drafts,
        attention=attention,
        rope_window=RopeConfig(rope_dim=rotary, theta=fields.take("rope_theta", "float"), yarn=None),
        rope_main=RopeConfig(rope_dim=rotary, theta=theta, yarn=read_yarn(scaling)),
        mhc=replace(base.mhc, norm_eps=sizes["norm_eps"], **fields.part(MHC)),
        router=replace(base.router, **fields.part(ROUTER)),
        hash_layers=hashed,
        **sizes,
    )


def _ratios(fields: Fields, layers: int, drafts: int) -> tuple[int, ...]:
    """One ratio for each block; transformers writes kinds of layers, those of the main model alone."""
    if "compress_ratios" in fields.values:
        found: tuple[int, ...] = fields.take("compress_ratios", "ints")
        return found
    rates = RATIOS | dict(fields.take("compress_rates", "object", Fields(values={})).values)
    kinds = fields.take("layer_types", "texts")
    unknown = [kind for kind in kinds if kind not in rates]
    if unknown or len(kinds) != layers:
        raise ValueError(f"layer_types: expected {layers} of {', '.join(rates)}, got {kinds}")
    return (*(rates[kind] for kind in kinds), *[0] * drafts)


def _json_v4(config: V4Config) -> dict[str, Any]:
    a, yarn = config.attention, config.rope_main.yarn
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **written(config, V4_MODEL),
        **written(a, V4_ATTENTION),
        "num_key_value_heads": 1,
        "compress_ratios": list(a.compress_ratios),
        "qk_rope_head_dim": config.rope_main.rope_dim,
        "rope_theta": config.rope_window.theta,
        "compress_rope_theta": config.rope_main.theta,
        **({} if yarn is None else {"rope_scaling": written_yarn(yarn)}),
        **written(config.mhc, MHC),
        **_json_router(config.router),
        "scoring_func": "sqrtsoftplus",
        "num_hash_layers": config.hash_layers,
        "num_nextn_predict_layers": config.draft_layers,
        **COMMON,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
    }
