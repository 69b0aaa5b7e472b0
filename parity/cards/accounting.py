"""How the account of a model is checked: against the list of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from deeptwin.reference.presets import V41Config, v41_flash

from ..card import Card, Inputs, Op, Output, Peer, variants
from ..rules import Bitwise

_mutant, _control = variants("accounting")


@dataclass(frozen=True, kw_only=True)
class AccountCase:
    """A released model, or a variant of it in which no two sizes agree by chance."""

    name: str
    regime: str = "counts"

    @property
    def id(self) -> str:
        return self.name


def config_of(case: AccountCase) -> V41Config:
    """The model that a case names."""
    config = v41_flash()
    if case.name == "odd":
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
    return config


def cases(full: bool) -> list[AccountCase]:
    """The release and the odd variant."""
    return [AccountCase(name=name) for name in ("v41_flash", "odd")]


def draw(case: AccountCase, rng: np.random.Generator) -> Inputs:
    """Nothing is drawn."""
    return {"config": config_of(case)}


CARD = Card(
    component="accounting",
    summary="parameters, bytes and what one token uses, term by term",
    contract={
        "unit": "parameters are logical values; bytes count packed codes and one byte for every scale",
        "scales": "e2m1 and table rows: one for 32 values of a row; other e4m3: one for a tile of 32 x 32",
        "activated": "matrices that a token meets; norms, biases and sinks are left out, as in the published claims",
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
            ),
            controls=(_control("right_list"),),
        ),
    ),
)
