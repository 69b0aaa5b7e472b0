"""How the account of a model is checked: against the list of its tensors, and against counts by loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from deeptwin.reference.presets import ModelConfig, V3Config, V4Config, V41Config, preset, v4_pro, v32, v41_flash

from ..card import Card, Inputs, Op, Output, Peer, variants
from ..rules import Bitwise

_mutant, _control = variants("accounting")


@dataclass(frozen=True, kw_only=True)
class AccountCase:
    """A model, or a variant in which no two sizes agree by chance; `context` tokens where they count."""

    name: str
    context: int = -1
    regime: str = "counts"

    @property
    def id(self) -> str:
        return self.name + (f"-l{self.context}" if self.context >= 0 else "")


VARIANTS: dict[str, Callable[[], ModelConfig]] = {
    "odd": lambda: odd_v41(),
    "odd_v32": lambda: odd_v32(),
    "odd_v4": lambda: odd_v4(),
}


def config_of(case: AccountCase) -> ModelConfig:
    """The model that a case names."""
    return VARIANTS[case.name]() if case.name in VARIANTS else preset(case.name)


def odd_v32() -> V3Config:
    """V3.2 with sizes that no block of 128 divides."""
    config = v32()
    assert config.index is not None
    return replace(
        config,
        name="odd_v32",
        hidden=1040,
        num_layers=7,
        draft_layers=2,
        vocab_size=1000,
        attention=replace(config.attention, hidden=1040, num_heads=12, q_lora_rank=336, nope_dim=96, value_dim=80),
        index=replace(config.index, heads=20, topk=96),
        dense_layers=2,
        dense_width=1720,
        router=replace(config.router, num_experts=24, topk=5, num_groups=4, kept_groups=2),
        shared_experts=2,
        expert_width=216,
    )


def odd_v4() -> V4Config:
    """V4 with other depths, ratios and widths."""
    config = v4_pro()
    return replace(
        config,
        name="odd_v4",
        hidden=1056,
        num_layers=6,
        draft_layers=2,
        vocab_size=999,
        attention=replace(
            config.attention,
            num_heads=12,
            q_lora_rank=352,
            o_groups=3,
            o_lora_rank=160,
            window=40,
            compress_ratios=(16, 0, 4, 16, 4, 16, 0, 0),
            index_heads=20,
            index_topk=24,
        ),
        router=replace(config.router, num_experts=20, topk=5),
        hash_layers=2,
        shared_experts=2,
        expert_width=416,
    )


def odd_v41() -> V41Config:
    """V4.1 with other depths and widths."""
    config = v41_flash()
    return replace(
        config,
        hidden=1056,
        num_layers=9,
        vocab_size=1000,
        attention=replace(
            config.attention,
            num_heads=24,
            q_lora_rank=352,
            o_groups=6,
            o_lora_rank=160,
            compress_ratios=(0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0),
            kv_source_layers=(1, 3, 5),
            index_source_layers=(1, 3, 5, 7),
            candidate_source_layer=5,
            index_heads=12,
        ),
        moe=replace(config.moe, experts=20, shared_experts=2, width=416),
        engram=replace(config.engram, layers=(2,), table_rows=(5003,), max_ngram=3, heads=4, head_dim=96),
        draft=replace(config.draft, layers=2, target_layers=(7, 8), experts=12, markov_rank=48),
        vision=replace(config.vision, layers=3, hidden=192, width=320, patch=10),
    )


RELEASED = ("v41_flash", "v3", "v32", "v4_pro", "v4_flash")
TINY = ("tiny_v3", "tiny_v32", "tiny_v4_flash", "tiny_v4_pro", "tiny_v41_flash")


def cases(full: bool) -> list[AccountCase]:
    """The releases, the odd variants and the tiny models."""
    return [AccountCase(name=name) for name in (*RELEASED, *VARIANTS, *TINY)]


def cases_context(full: bool) -> list[AccountCase]:
    """Every model below and above its window and its selection, with groups that are not full."""
    released = [AccountCase(name=name, context=131) for name in RELEASED]
    found = [AccountCase(name=name, context=n) for name in (*VARIANTS, *TINY[:4]) for n in (0, 1, 7, 39, 130)]
    return [*released, *found, *(AccountCase(name=n, context=20_005) for n in ("v32", "v4_flash") if full)]


def cases_work(full: bool) -> list[AccountCase]:
    """As for caches, and a million tokens."""
    return [*cases_context(full), *(AccountCase(name=name, context=10**6) for name in RELEASED)]


def is_earlier(case: AccountCase) -> bool:
    """Whether the model is one of V3, V3.2, V4; those of V4.1 are held by literal numbers and the cache plan."""
    return not isinstance(config_of(case), V41Config)


def draw(case: AccountCase, rng: np.random.Generator) -> Inputs:
    """Nothing is drawn."""
    return {"config": config_of(case)} | ({"context": case.context} if case.context >= 0 else {})


CARD = Card(
    component="accounting",
    summary="parameters, bytes, caches and work of every generation, term by term",
    contract={
        "unit": "parameters are logical values; bytes count packed codes and one byte for every scale",
        "scales": "V4.1: one for 32 values of e2m1 and table rows, for a tile of 32 x 32 of other e4m3; V4: one for "
        "32 values of e2m1, one for 128 x 128 of e4m3; V3: fp32, one for 128 x 128, cut blocks counted",
        "activated": "V3, V4: the main model without idle experts and embedding; V4.1: matrices that a token meets",
        "caches": "records of whole groups, and states for plain decode without tokens to take back",
        "work": "two operations for a multiplication with its addition; in FP8 units bf16 counts 2, FP4 1/2",
    },
    ops=(
        Op(
            name="totals",
            reference="deeptwin.reference.accounting:totals",
            outputs=(
                Output(name="parameters", rule=Bitwise(), dtype=torch.int64),
                Output(name="num_bytes", rule=Bitwise(), dtype=torch.int64),
            ),
            cases=cases,
            draw=draw,
            rows={},
            out_rows={},
            peers=(
                Peer(
                    name="checkpoint",
                    function="deeptwin.parity.peers.accounting:checkpoint",
                    needs=(),
                    explains="counts the tensors of the released file by name, dtype and shape",
                ),
            ),
            mutants=(
                _mutant("head_mix_counted", "U49", "a head of the streams, which only non-shifted models have"),
                _mutant("convolution_counted", "U49", "a convolution in Engram"),
                _mutant("hash_table_counted", "U49", "a hash routing table, which only V4 has"),
                _mutant("no_image_bias_in_drafts", "U49", "draft blocks without the image bias of their router"),
                _mutant("no_gate_at_ratio_two", "U49", "compressors of ratio 2 without their gate"),
                _mutant("wo_a_in_bf16", "U49", "the grouped output matrix in bf16"),
                _mutant("compressor_in_fp8", "U49", "compressors in fp8"),
                _mutant("tables_with_tile_scales", "U49", "Engram tables with one scale for 32 x 32 values"),
                _mutant("confidence_in_fp32", "U49", "the confidence head in fp32"),
                _mutant("copies_forgotten", "U49", "V3's draft module without its copy of the embedding"),
                _mutant("draft_projection_of_one_input", "U49", "eh_proj takes the hidden state alone"),
                _mutant("scales_in_one_byte", "U49", "fp32 scales of V3 counted as exponents"),
                _mutant("cut_blocks_lost", "U49", "the half block of 576 rows is left out"),
                _mutant("rotated_key_of_every_head", "U49", "a rotated key for every head (survey)"),
                _mutant("indexer_norm_without_bias", "U49", "the index key's norm is taken for an RMS norm"),
                _mutant("dense_layers_have_a_router", "U49", "one router too many in V3"),
                _mutant("biases_in_hash_layers", "U49", "V4's hash layers with biases"),
                _mutant("table_is_a_parameter", "U49", "the table of the hash layers counts as parameters"),
                _mutant("no_overlap_in_csa", "U25", "one series of values in CSA"),
                _mutant("draft_compresses_as_layer_1", "U63", "the draft block of V4-Pro takes the ratio of layer 1"),
                _mutant("head_mix_forgotten", "U39", "V4 without the mixing before its head"),
                _mutant("experts_in_fp8", "U49", "V4's experts in FP8"),
            ),
            controls=(_control("right_list"),),
            golden=lambda: [AccountCase(name=name) for name in RELEASED],
        ),
        Op(
            name="sequence_bytes",
            reference="deeptwin.reference.accounting:sequence_bytes",
            outputs=(Output(name="num_bytes", rule=Bitwise(), dtype=torch.int64),),
            cases=cases_context,
            draw=draw,
            rows={},
            out_rows={},
            peers=(
                Peer(
                    name="written",
                    function="deeptwin.parity.peers.accounting_earlier:written",
                    needs=(),
                    explains="appends token after token to every layer",
                    only=is_earlier,
                ),
            ),
            mutants=(
                _mutant("padding_forgotten", "U29", "a V4 record without its padding byte"),
                _mutant("index_key_in_fp8", "U49", "V4's index key in FP8 with a scale"),
                _mutant("index_key_without_scale", "U49", "V4's index key in FP8 without a scale (survey: 5.48 GB)"),
                _mutant("scales_as_exponents", "U49", "V3.2's scales in one byte"),
                _mutant("unfinished_groups_stored", "U26", "a group that is not full has a record"),
                _mutant("window_grows", "U36", "every token stays in the window"),
                _mutant("draft_window_counted", "U63", "the draft's window counts among the main model's"),
                _mutant("one_buffer", "U33", "compressors keep values and no logits"),
                _mutant("one_group_kept", "U33", "an overlapping compressor keeps one group"),
            ),
            controls=(_control("right_bytes"),),
            golden=lambda: [AccountCase(name=name, context=10**6) for name in RELEASED],
        ),
        Op(
            name="flops",
            reference="deeptwin.reference.accounting:flops",
            outputs=(Output(name="flops", rule=Bitwise(), dtype=torch.int64),),
            cases=cases_work,
            draw=draw,
            rows={},
            out_rows={},
            peers=(
                Peer(
                    name="multiplied",
                    function="deeptwin.parity.peers.accounting_earlier:multiplied",
                    needs=(),
                    explains="tensor by tensor, layer by layer",
                    only=is_earlier,
                ),
            ),
            mutants=(
                _mutant("bf16_counts_once", "U49", "bf16 work counts like FP8"),
                _mutant("fp4_counts_once", "U49", "FP4 work counts like FP8"),
                _mutant("keys_of_every_head", "U49", "keys and values of every head instead of the latent"),
                _mutant("everything_attended", "U49", "no selection"),
                _mutant("window_not_attended", "U49", "the window is left out"),
                _mutant("hca_picks", "U63", "HCA layers attend to picked blocks alone"),
                _mutant("every_expert_active", "U49", "every expert works"),
                _mutant("embedding_multiplied", "U49", "the embedding is a product"),
                _mutant("draft_counted", "U63", "the draft block works for every token"),
            ),
            controls=(_control("right_cost"),),
            golden=lambda: [AccountCase(name=name, context=10**6) for name in RELEASED],
        ),
    ),
)
