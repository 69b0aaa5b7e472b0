"""Small models of every family: each kind of layer, each branch, widths of cache records as released.

Widths of products are multiples of the released scale groups, so the released number formats fit. There are 16 index
heads (8 in V4.1): with fewer, scores that are exactly zero tie at the last place of a selection.
"""

from __future__ import annotations

from dataclasses import replace

from .v3 import V3_YARN, V3Config, v3, v32
from .v4 import V4_YARN, V4Config, v4_flash, v4_pro
from .v41 import V41Config, v41_flash


def tiny_v3() -> V3Config:
    """One dense layer, two with experts in four groups, YaRN from position 16 on."""
    config = v3()
    yarn = replace(V3_YARN, factor=4.0, original_length=16)
    return replace(
        config,
        name="tiny_v3",
        hidden=128,
        num_layers=3,
        vocab_size=101,
        attention=replace(
            config.attention,
            hidden=128,
            num_heads=4,
            q_lora_rank=48,
            nope_dim=32,
            value_dim=32,
            rope=replace(config.attention.rope, yarn=yarn),
        ),
        dense_layers=1,
        dense_width=256,
        router=replace(config.router, num_experts=8, topk=3, num_groups=4, kept_groups=2),
        expert_width=128,
        max_positions=64,
    )


def tiny_v32() -> V3Config:
    """The tiny V3 with an indexer that leaves keys out from the ninth token on."""
    config, index = tiny_v3(), v32().index
    assert index is not None
    return replace(
        config,
        name="tiny_v32",
        index=replace(index, heads=16, topk=8),
        activation=v32().activation,
        residual=v32().residual,
    )


def tiny_v4_flash() -> V4Config:
    """A window alone, CSA, HCA of 8 tokens, CSA, and a draft; experts of the first layer from a table."""
    return _tiny_v4(v4_flash(), name="tiny_v4_flash", ratios=(0, 4, 8, 4, 0))


def tiny_v4_pro() -> V4Config:
    """HCA first, as in V4-Pro: a draft that took the schedule of layer 0 or 1 would compress."""
    return _tiny_v4(v4_pro(), name="tiny_v4_pro", ratios=(8, 8, 4, 8, 0))


def tiny_v41_flash() -> V41Config:
    """Every mode of CSA2, two memory layers, two draft blocks, a vision tower of two blocks."""
    config = v41_flash()
    return replace(
        config,
        name="tiny_v41_flash",
        hidden=128,
        num_layers=6,
        vocab_size=101,
        attention=replace(
            config.attention,
            num_heads=4,
            q_lora_rank=64,
            o_groups=2,
            o_lora_rank=32,
            window=4,
            compress_ratios=(0, 2, 2, 1, 1, 1, 0, 0),
            kv_source_layers=(1, 3),
            index_source_layers=(1, 3, 5),
            candidate_source_layer=3,
            candidate_topk_blocks=8,
            index_heads=8,
            index_topk=4,
        ),
        moe=replace(config.moe, experts=8, topk=2, width=64, swiglu_limit=0.5),
        engram=replace(
            config.engram,
            layers=(1, 4),
            table_rows=(240, 306),
            max_ngram=3,
            heads=2,
            head_dim=32,
            vocab_size=50,
            compressed_vocab_size=90,
        ),
        draft=replace(
            config.draft, layers=2, target_layers=(4, 5), experts=4, topk=2, markov_rank=32, noise_token_id=99
        ),
        vision=replace(config.vision, layers=2, hidden=64, heads=2, width=96, max_tokens=16, image_token_id=98),
        max_positions=64,
    )


def _tiny_v4(config: V4Config, *, name: str, ratios: tuple[int, ...]) -> V4Config:
    yarn = replace(V4_YARN, factor=4.0, original_length=64)
    return replace(
        config,
        name=name,
        hidden=128,
        num_layers=len(ratios) - config.draft_layers,
        vocab_size=97,
        attention=replace(
            config.attention,
            num_heads=4,
            q_lora_rank=128,
            o_groups=2,
            o_lora_rank=64,
            window=8,
            compress_ratios=ratios,
            index_heads=16,
            index_topk=3,
        ),
        rope_main=replace(config.rope_main, yarn=yarn),
        router=replace(config.router, num_experts=8, topk=2),
        hash_layers=1,
        expert_width=128,
        swiglu_limit=0.5,
        max_positions=64,
    )
