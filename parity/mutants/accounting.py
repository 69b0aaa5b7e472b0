"""Accounts that differ from checkpoint, caches or work of a model in one reading of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deeptwin.reference import accounting
from deeptwin.reference.presets import ModelConfig, V3Config, V4Config, V41Config

from ..peers.accounting import Entry, counted, listed

Change = Callable[[Entry, ModelConfig], Iterator[Entry]]


def account_with(change: Change, *, extra: Callable[[ModelConfig], list[Entry]] | None = None) -> Callable[..., object]:
    """The count over a changed list of tensors."""

    def totals(config: ModelConfig) -> tuple[Tensor, Tensor]:
        found = [new for entry in listed(config) for new in change(entry, config)]
        return counted(found + (extra(config) if extra else []))

    return totals


def _same(entry: Entry, config: ModelConfig) -> Iterator[Entry]:
    yield entry


def _stored_as(part: str, dtype: str) -> Change:
    def change(entry: Entry, config: ModelConfig) -> Iterator[Entry]:
        name, own, shape = entry
        yield name, dtype if part in name else own, shape

    return change


def _without(start: str, part: str) -> Change:
    def change(entry: Entry, config: ModelConfig) -> Iterator[Entry]:
        if not (entry[0].startswith(start) and part in entry[0]):
            yield entry

    return change


def _head_mix(config: ModelConfig) -> list[Entry]:
    if not isinstance(config, V41Config):
        return []
    n = config.mhc.streams
    return [
        ("hc_head_fn", "F32", (n, n * config.hidden)),
        ("hc_head_base", "F32", (n,)),
        ("hc_head_scale", "F32", (1,)),
    ]


def _convolution(config: ModelConfig) -> list[Entry]:
    if not isinstance(config, V41Config):
        return []
    return [(f"layers.{i}.engram.conv", "BF16", (config.mhc.streams * config.hidden, 4)) for i in config.engram.layers]


def _hash_table(config: ModelConfig) -> list[Entry]:
    if not isinstance(config, V41Config):
        return []
    return [("layers.0.ffn.gate.tid2eid", "BF16", (config.vocab_size, config.moe.topk))]


def _only(family: type, change: Change) -> Change:
    """The change in models of one family."""

    def changed(entry: Entry, config: ModelConfig) -> Iterator[Entry]:
        yield from change(entry, config) if isinstance(config, family) else _same(entry, config)

    return changed


def _resized(part: str, size: Callable[[tuple[int, ...], ModelConfig], tuple[int, ...]]) -> Change:
    def change(entry: Entry, config: ModelConfig) -> Iterator[Entry]:
        name, dtype, shape = entry
        yield name, dtype, size(shape, config) if name.endswith(part) else shape

    return change


def _rotated_key_of_every_head(shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    assert isinstance(config, V3Config)
    return shape[0] + (config.attention.num_heads - 1) * config.attention.rope.rope_dim, shape[1]


def _biases_of_hash_layers(config: ModelConfig) -> list[Entry]:
    if not isinstance(config, V4Config):
        return []
    return [(f"layers.{i}.ffn.gate.bias", "F32", (config.router.num_experts,)) for i in range(config.hash_layers)]


def _draft_compressor(config: ModelConfig) -> list[Entry]:
    if not isinstance(config, V4Config) or not config.attention.compress_ratios[1]:
        return []
    return [("mtp.0.attn.compressor.wkv", "BF16", (config.attention.head_dim, config.hidden))]


right_list = account_with(_same)
head_mix_counted = account_with(_same, extra=_head_mix)
convolution_counted = account_with(_same, extra=_convolution)
hash_table_counted = account_with(_same, extra=_hash_table)
no_image_bias_in_drafts = account_with(_without("mtp", "bias_vl"))
no_gate_at_ratio_two = account_with(_without("layers", "compressor.wgate"))
wo_a_in_bf16 = account_with(_stored_as("wo_a", "BF16"))
compressor_in_fp8 = account_with(_stored_as("compressor.wkv", "F8"))
tables_with_tile_scales = account_with(_stored_as("engram.embed", "F8"))
confidence_in_fp32 = account_with(_stored_as("confidence_head", "F32"))

copies_forgotten = account_with(_only(V3Config, _without("layers", "embed_tokens")))
draft_projection_of_one_input = account_with(
    _only(V3Config, _resized("eh_proj", lambda shape, config: (shape[0],) * 2))
)
scales_in_one_byte = account_with(_only(V3Config, _stored_as("q_b_proj", "F8_B1")))
cut_blocks_lost = account_with(_only(V3Config, _resized("kv_a_proj_with_mqa", lambda s, c: (s[0] // 128 * 128, s[1]))))
rotated_key_of_every_head = account_with(_only(V3Config, _resized("kv_a_proj_with_mqa", _rotated_key_of_every_head)))
indexer_norm_without_bias = account_with(_only(V3Config, _without("layers", "k_norm.bias")))
dense_layers_have_a_router = account_with(
    _same, extra=lambda c: [("g", "BF16", (c.router.num_experts, c.hidden))] if isinstance(c, V3Config) else []
)
biases_in_hash_layers = account_with(_same, extra=_biases_of_hash_layers)
table_is_a_parameter = account_with(_only(V4Config, _stored_as("tid2eid", "F32")))
no_overlap_in_csa = account_with(
    _only(V4Config, _resized("attn.compressor.wkv", lambda s, c: (min(s[0], c.attention.head_dim), s[1])))
)
draft_compresses_as_layer_1 = account_with(_same, extra=_draft_compressor)
head_mix_forgotten = account_with(_only(V4Config, _without("", "hc_head")))
experts_in_fp8 = account_with(_only(V4Config, _stored_as(".experts.", "F8_B1")))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is stored and computed otherwise; the default is right."""

    pad: int = 1  # bytes of a V4 record that hold nothing
    index_key: str = "fp4"  # of V4: fp4, fp8, fp8_bare
    latent_scales: int = 4  # bytes of a scale of V3.2
    unfinished: bool = False  # a group that is not full has a record
    window: str = "ring"  # ring, growing, also_draft
    states: int = 2  # fp32 buffers of a compressor
    overlap: int = 2  # groups that a CSA compressor keeps
    bf16: int = 4  # half units of an operation
    fp4: int = 1
    core: str = "absorbed"  # absorbed, per_head, dense
    near: bool = True  # the window counts among the attended
    linear: str = "activated"  # activated, all_experts, with_embedding, with_draft
    hca_picks: bool = False


def bytes_with(sizes: Sizes) -> Callable[..., Tensor]:
    """Bytes of a sequence."""

    def sequence_bytes(config: ModelConfig, *, context: int) -> Tensor:
        if isinstance(config, V41Config):  # no fault is about V4.1
            return accounting.sequence_bytes(config, context=context)
        if isinstance(config, V3Config):
            a = config.attention
            rotated = 2 * a.rope.rope_dim
            c = a.kv_lora_rank
            latent = c + c // 128 * sizes.latent_scales + rotated if config.index else 2 * c + rotated
            key = config.index.dim + 4 if config.index else 0
            return torch.tensor([context * config.num_layers * (latent + key), 0])
        own, rope = config.attention, config.rope_main.rope_dim
        nope, dim = own.head_dim - rope, own.index_dim
        record = nope + 2 * rope + nope // 64 + sizes.pad
        key = {"fp4": dim // 2 + dim // 32, "fp8": dim + 4, "fp8_bare": dim}[sizes.index_key]
        layers = len(own.compress_ratios) if sizes.window == "also_draft" else config.num_layers
        grown, states = 0, layers * own.window * record
        if sizes.window == "growing":
            grown, states = layers * context * record, 0
        for ratio in filter(None, own.compress_ratios[: config.num_layers]):
            groups = -(-context // ratio) if sizes.unfinished else context // ratio
            grown += groups * (record + key * (ratio == 4))
            wide = 2 * (own.head_dim + dim) * sizes.overlap if ratio == 4 else own.head_dim
            states += 4 * sizes.states * ratio * wide
        return torch.tensor([grown, states])

    return sequence_bytes


def cost_with(sizes: Sizes) -> Callable[..., Tensor]:
    """Work of a decoded token."""

    def flops(config: ModelConfig, *, context: int) -> Tensor:
        if isinstance(config, V41Config):
            return accounting.flops(config, context=context)
        linear = 2 * sum(_met(entry, config, sizes) for entry in listed(config))
        indexer, core = (
            _v3_work(config, context, sizes) if isinstance(config, V3Config) else _v4_work(config, context, sizes)
        )
        units = 2 * linear + indexer * (2 if isinstance(config, V3Config) else sizes.fp4) + sizes.bf16 * core
        return torch.tensor([linear, indexer, core, units])

    return flops


def _met(entry: Entry, config: V3Config | V4Config, sizes: Sizes) -> int:
    name, dtype, shape = entry
    drafts = [f"layers.{config.num_layers + i}." for i in range(config.draft_layers)]
    expert = name.partition(".experts.")[2].partition(".")[0]
    skipped = [
        dtype == "I64",
        name.startswith(("mtp", *drafts)) and sizes.linear != "with_draft",
        name.startswith("embed") and sizes.linear != "with_embedding",
        bool(expert) and int(expert) >= config.router.topk and sizes.linear != "all_experts",
    ]
    return 0 if any(skipped) else int(torch.tensor(shape).prod())


def _v3_work(config: V3Config, context: int, sizes: Sizes) -> tuple[int, int]:
    a, index, layers = config.attention, config.index, config.num_layers
    absorbed = 2 * a.kv_lora_rank + a.rope.rope_dim
    width = a.nope_dim + a.rope.rope_dim + a.value_dim if sizes.core == "per_head" else absorbed
    seen = context if index is None or sizes.core == "dense" else min(context, index.topk)
    scores = 0 if index is None else 2 * layers * context * index.heads * index.dim
    return scores, 2 * layers * seen * a.num_heads * width


def _v4_work(config: V4Config, context: int, sizes: Sizes) -> tuple[int, int]:
    a, indexer, core = config.attention, 0, 0
    for ratio in a.compress_ratios[: config.num_layers]:
        blocks = context // ratio if ratio else 0
        picks = ratio == 4 and sizes.core != "dense" or sizes.hca_picks
        seen = (min(blocks, a.index_topk) if picks else blocks) + (min(context, a.window) if sizes.near else 0)
        indexer += 2 * blocks * a.index_heads * a.index_dim if ratio == 4 else 0
        core += 2 * seen * a.num_heads * 2 * a.head_dim
    return indexer, core


_RIGHT = Sizes()
right_bytes = bytes_with(_RIGHT)
right_cost = cost_with(_RIGHT)

padding_forgotten = bytes_with(replace(_RIGHT, pad=0))
index_key_in_fp8 = bytes_with(replace(_RIGHT, index_key="fp8"))
index_key_without_scale = bytes_with(replace(_RIGHT, index_key="fp8_bare"))
scales_as_exponents = bytes_with(replace(_RIGHT, latent_scales=1))
unfinished_groups_stored = bytes_with(replace(_RIGHT, unfinished=True))
window_grows = bytes_with(replace(_RIGHT, window="growing"))
draft_window_counted = bytes_with(replace(_RIGHT, window="also_draft"))
one_buffer = bytes_with(replace(_RIGHT, states=1))
one_group_kept = bytes_with(replace(_RIGHT, overlap=1))

bf16_counts_once = cost_with(replace(_RIGHT, bf16=2))
fp4_counts_once = cost_with(replace(_RIGHT, fp4=2))
keys_of_every_head = cost_with(replace(_RIGHT, core="per_head"))
everything_attended = cost_with(replace(_RIGHT, core="dense"))
window_not_attended = cost_with(replace(_RIGHT, near=False))
hca_picks = cost_with(replace(_RIGHT, hca_picks=True))
every_expert_active = cost_with(replace(_RIGHT, linear="all_experts"))
embedding_multiplied = cost_with(replace(_RIGHT, linear="with_embedding"))
draft_counted = cost_with(replace(_RIGHT, linear="with_draft"))
