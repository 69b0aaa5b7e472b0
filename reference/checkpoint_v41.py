"""config.json of V4.1 as the configuration of this room, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .block_v41 import stack_of
from .checkpoint_fields import Fields, Table, expect_quantisation, read_yarn, written, written_yarn
from .config import Combine, PageLayout, ScoreOrder
from .csa2_config import V41_YARN, CastPoints
from .engram_vocab import hash_layout
from .presets import AttentionSizes, DraftSizes, EngramSizes, MoeSizes, V41Config, VisionSizes, v41_flash

MODEL: Table = {
    "hidden": ("hidden_size", "int"),
    "num_layers": ("num_hidden_layers", "int"),
    "vocab_size": ("vocab_size", "int"),
    "norm_eps": ("rms_norm_eps", "float"),
    "rope_theta": ("rope_theta", "float"),
    "compress_rope_theta": ("compress_rope_theta", "float"),
    "max_positions": ("max_position_embeddings", "int"),
}
ATTENTION: Table = {
    "num_heads": ("num_attention_heads", "int"),
    "head_dim": ("head_dim", "int"),
    "rope_dim": ("qk_rope_head_dim", "int"),
    "q_lora_rank": ("q_lora_rank", "int"),
    "o_groups": ("o_groups", "int"),
    "o_lora_rank": ("o_lora_rank", "int"),
    "window": ("sliding_window", "int"),
    "compress_ratios": ("compress_ratios", "ints"),
    "kv_source_layers": ("kv_source_layer_ids", "ints"),
    "index_source_layers": ("index_source_layer_ids", "ints"),
    "candidate_source_layer": ("candidate_source_layer_id", "int"),
    "candidate_topk_blocks": ("candidate_topk_blocks", "int"),
    "candidate_block_size": ("candidate_block_size", "int"),
    "index_heads": ("index_n_heads", "int"),
    "index_dim": ("index_head_dim", "int"),
    "index_topk": ("index_topk", "int"),
}
MOE: Table = {
    "experts": ("n_routed_experts", "int"),
    "shared_experts": ("n_shared_experts", "int"),
    "topk": ("num_experts_per_tok", "int"),
    "width": ("moe_intermediate_size", "int"),
    "route_scale": ("routed_scaling_factor", "float"),
    "swiglu_limit": ("swiglu_limit", "float"),
}
MHC: Table = {
    "streams": ("hc_mult", "int"),
    "sinkhorn_iters": ("hc_sinkhorn_iters", "int"),
    "eps": ("hc_eps", "float"),
}
ENGRAM: Table = {
    "layers": ("engram_layer_ids", "ints"),
    "table_rows": ("engram_num_embeddings", "ints"),
    "max_ngram": ("engram_max_ngram_size", "int"),
    "heads": ("engram_n_heads", "int"),
    "head_dim": ("engram_head_dim", "int"),
    "vocab_size": ("engram_vocab_size", "int"),
    "compressed_vocab_size": ("engram_compressed_vocab_size", "int"),
    "pad_token_id": ("engram_pad_token_id", "int"),
}
DRAFT: Table = {
    "layers": ("num_nextn_predict_layers", "int"),
    "target_layers": ("dspark_target_layer_ids", "ints"),
    "experts": ("dspark_n_routed_experts", "int"),
    "topk": ("dspark_num_experts_per_tok", "int"),
    "markov_rank": ("dspark_markov_rank", "int"),
    "noise_token_id": ("dspark_noise_token_id", "int"),
}
VISION: Table = {
    "layers": ("num_hidden_layers", "int"),
    "hidden": ("hidden_size", "int"),
    "heads": ("num_attention_heads", "int"),
    "width": ("intermediate_size", "int"),
    "patch": ("patch_size", "int"),
    "downsample": ("downsample_ratio", "int"),
    "rope_theta": ("rope_theta", "float"),
    "max_tokens": ("max_image_tokens", "int"),
    "min_pixels": ("min_pixels", "int"),
}
# what the runtime fixes: a file that says otherwise means another model
FIXED: dict[str, Any] = {
    "hc_shifted": True,
    "hc_pre_from_prev_sublayer": True,  # SGLang's name of hc_shifted
    "hc_dynamic": True,
    "hc_rms_after_fn": True,
    "hc_post_mult_value": 2.0,
    "is_exp_norm": False,
    "use_qnorm": False,
    "use_ape": False,
    "compress_overlap": False,
    "yoco_swa_share_hidden": False,
    "use_fp4_sparse_kv": True,
}


def config_v41(fields: Fields) -> V41Config:
    """The configuration of a V4.1 file; its text model lies under `text_config`.

    Raises:
        ValueError: a key is missing or has a value that no release has; the layer map breaks a rule; the numbers of
            table rows are not those that the hash has.
        NotImplementedError: a variant that a model may have and this room has not.

    Source:
        v41-blocks.md section 0.2, v41-attention.md sections 1.1 and 1.2
    """
    text = fields.take("text_config", "object")
    if len(fields.take("architectures", "texts")) != 1:
        raise ValueError(f"architectures: expected one entry, got {fields.values['architectures']}")
    _expect_fixed(fields, text)
    base, sizes, vision = v41_flash(), text.part(MODEL), fields.take("vision_config", "object")
    vision.decline("max_wh_ratio", None, "images keep their shape")
    config = replace(
        base,
        attention=AttentionSizes(**text.part(ATTENTION)),
        moe=MoeSizes(**text.part(MOE)),
        mhc=replace(base.mhc, norm_eps=sizes["norm_eps"], **text.part(MHC)),
        engram=EngramSizes(**text.part(ENGRAM)),
        draft=DraftSizes(**text.part(DRAFT)),
        vision=VisionSizes(**vision.part(VISION), image_token_id=fields.take("image_token_id", "int")),
        **sizes,
    )
    # the parts of the model refuse sizes and layer maps that break a rule
    stack = stack_of(
        config,
        cast=CastPoints.RELEASE,
        score_order=ScoreOrder.FP32,
        layout=PageLayout.INTERLEAVED,
        combine=Combine.SINGLE,
    )
    if config.attention.head_dim != stack.csa2.head_dim:
        got = config.attention.head_dim
        raise ValueError(f"text_config.head_dim: expected {stack.csa2.head_dim}, the width of a record, got {got}")
    table_rows = hash_layout(config.memory).num_rows if config.engram.layers else ()
    if config.engram.table_rows != table_rows:
        rows = config.engram.table_rows
        raise ValueError(
            f"text_config.engram_num_embeddings: expected {table_rows} by the primes of the hash, got {rows}"
        )
    return config


def _expect_fixed(fields: Fields, text: Fields) -> None:
    fields.expect("dtype", "bfloat16", optional=False)
    quantised = fields.take("quantization_config", "object")
    expect_quantisation(quantised, [32, 32])
    quantised.expect("scale_fmt", "ue8m0", optional=False)
    quantised.expect("expert_dtype", "fp4", optional=False)
    text.expect("hidden_act", "silu", optional=False)
    text.expect("attention_bias", False)
    text.expect("attention_dropout", 0.0, 0)
    text.expect("num_key_value_heads", 1)
    text.expect("scoring_func", "sqrtsoftplus", optional=False)
    text.expect("topk_method", "noaux_tc")
    text.expect("norm_topk_prob", True)
    text.expect("tie_word_embeddings", False)
    for key, only in FIXED.items():
        text.decline(key, only, "the runtime fixes it")
    text.decline(
        "index_k_source_layer_ids",
        text.values.get("kv_source_layer_ids"),
        "index keys are made where entries are",
    )
    source = text.values.get("candidate_source_layer_id")
    if source is None or (type(source) is int and source < 0):
        raise NotImplementedError(
            f"text_config.candidate_source_layer_id: expected a layer, got {source}: one selects candidates"
        )
    yarn = read_yarn(text.take("rope_scaling", "object"))
    if yarn != V41_YARN:
        raise NotImplementedError(f"text_config.rope_scaling: expected that of the release, got {yarn}")


def json_v41(config: V41Config) -> dict[str, Any]:
    """What `config_v41` reads."""
    text = {
        **written(config, MODEL),
        **written(config.attention, ATTENTION),
        **written(config.moe, MOE),
        **written(config.mhc, MHC),
        **written(config.engram, ENGRAM),
        **written(config.draft, DRAFT),
        "rope_scaling": written_yarn(V41_YARN),
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["DeepseekV41ForConditionalGeneration"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": config.engram.pad_token_id,
        "image_token_id": config.vision.image_token_id,
        "text_config": text,
        "vision_config": written(config.vision, VISION) | {"max_wh_ratio": None},
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
