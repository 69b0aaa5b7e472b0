"""What a step has to leave in an engine's caches, made of what the model computes for whole sequences without caches.

An image is a copy of all caches. `StepImage.write_` puts into it what the rows of one sequence leave, from the inputs
of every attention layer of `reference.model`, and nothing else: an engine's caches have to equal the image after every
step, byte for byte, in the slots that the step names and in all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from deeptwin.reference.block_v41 import V41Stack
from deeptwin.reference.compressor import compress, compress_project, compress_tail
from deeptwin.reference.config import C1, C2, FusedStore, PageLayout, RecordTap, V4Kind
from deeptwin.reference.csa import csa_index_rows
from deeptwin.reference.csa2 import csa2_project
from deeptwin.reference.csa2_config import Csa2Config
from deeptwin.reference.dsa_rows import dsa_rows
from deeptwin.reference.dsa_state import DsaWeights
from deeptwin.reference.kv_cache import norm_rope_store, store_records
from deeptwin.reference.linear import linear
from deeptwin.reference.mla import mla_project
from deeptwin.reference.model import model_v3, model_v4, model_v41
from deeptwin.reference.model_weights import V3Model, V4Model, V41Model
from deeptwin.reference.numerics import CONTRACT
from deeptwin.reference.presets import V3Config, V4Config
from deeptwin.reference.rope import table_of
from deeptwin.reference.taps import Tap
from deeptwin.reference.topology import LayerMode
from deeptwin.reference.v4_attend import whole_entries
from deeptwin.reference.v4_layer import v4_project
from deeptwin.reference.v4_weights import CompressorWeights, V4Weights, owned
from deeptwin.reference.weights import Csa2Weights, MlaWeights

Image = dict[str, Tensor]
SECTIONED = PageLayout.SECTIONED


class Sequence:
    """The rows of one sequence that a step computes: positions first … end - 1 in a state and pages."""

    def __init__(self, first: int, end: int, slot: int, pages: Tensor) -> None:
        self.first, self.end, self.slot, self.pages = first, end, slot, pages.long()
        self.positions_s = torch.arange(end)

    def entries(self, ratio: int) -> Tensor:
        """The entries that the rows complete."""
        return torch.arange(self.first // ratio, self.end // ratio)

    def slots(self, entry_y: Tensor, page_entries: int) -> Tensor:
        """Where entries lie in pages."""
        return self.pages[entry_y // page_entries] * page_entries + entry_y % page_entries

    def last(self, places: int) -> Tensor:
        """The positions that enter a ring of so many places."""
        return torch.arange(max(self.first, self.end - places), self.end)


class StepImage:
    """The caches of a model as they have to be, for page and ring sizes of an engine."""

    def __init__(
        self,
        config: V3Config | V4Config | V41Stack,
        weights: V3Model | V4Model | V41Model,
        *,
        page_tokens: int,
        backtracking: int,
    ) -> None:
        """Nothing is computed yet."""
        self.config, self.weights = config, weights
        self.page_tokens, self.backtracking = page_tokens, backtracking

    def inputs(self, token_t: Tensor) -> list[Tensor]:
        """The normalised input of every attention layer over a whole sequence, and no cache anywhere."""
        heard: dict[str, Tensor] = {}
        self._model(token_t, heard.__setitem__)
        layers = len(self.weights.layers)
        return [heard[f"layers.{layer}.attn.norm"] for layer in range(layers)]

    def write_(self, image: Image, inputs: list[Tensor], sequence: Sequence) -> None:
        """What the rows of a sequence leave, given the inputs of its layers up to the last of them, in place."""
        write: Callable[[Image, int, Tensor, Sequence], None]
        if isinstance(self.config, V3Config):
            write = self._v3
        elif isinstance(self.config, V4Config):
            write = self._v4
        else:
            write = self._v41
        for layer, x_tm in enumerate(inputs):
            prefix = f"layers.{layer}."
            own = {name.removeprefix(prefix): x for name, x in image.items() if name.startswith(prefix)}
            write(own, layer, x_tm[: sequence.end], sequence)

    def _model(self, token_t: Tensor, tap: Tap) -> Tensor:
        config, weights = self.config, self.weights
        if isinstance(config, V3Config):
            assert isinstance(weights, V3Model)
            return model_v3(token_t, weights, config=config, tap=tap)
        if isinstance(config, V4Config):
            assert isinstance(weights, V4Model)
            return model_v4(token_t, weights, config=config, tap=tap)
        assert isinstance(weights, V41Model)
        no_image_t = torch.zeros(len(token_t), dtype=torch.bool)
        return model_v41(token_t, no_image_t, weights, config=config, tap=tap)

    def _v3(self, own: Image, layer: int, x_tm: Tensor, sequence: Sequence) -> None:
        config = self.config
        assert isinstance(config, V3Config)
        weights = self.weights.layers[layer].attention
        where = (sequence.positions_s, table_of(config.attention.rope, sequence.end))
        position_y = sequence.entries(1)
        slot_y = sequence.slots(position_y, self.page_tokens)
        if isinstance(weights, DsaWeights):
            _, _, rows_td, key_td = dsa_rows(x_tm, weights, *where, config=config.dsa)
            latent, key = config.dsa.latent, config.dsa.index_key
            store_records(own["latent"], rows_td[position_y], slot_y, layout=PageLayout.INTERLEAVED, fmt=latent)
            store_records(own["index"], key_td[position_y], slot_y, layout=SECTIONED, fmt=key)
            return
        assert isinstance(weights, MlaWeights)
        _, latents = mla_project(x_tm, weights, *where, config=config.attention)
        pages_sd = own["latent"].flatten(0, 1)
        pages_sd[slot_y] = latents.rows_sd[position_y].to(pages_sd.dtype)

    def _v4(self, own: Image, layer: int, x_tm: Tensor, sequence: Sequence) -> None:
        config = self.config
        assert isinstance(config, V4Config)
        attn = replace(config.attn(layer), page_tokens=self.page_tokens, backtracking=self.backtracking)
        weights = self.weights.layers[layer].attention
        assert isinstance(weights, V4Weights)
        table_sr, cu = table_of(attn.rope, sequence.end), torch.tensor([0, sequence.end])
        _, key_td, _ = v4_project(x_tm, weights, table_sr, sequence.positions_s, config=attn)
        position_y = sequence.last(attn.sliding.ring)
        slot_y = sequence.slot * attn.sliding.ring + position_y % attn.sliding.ring
        store_records(own["ring"], key_td[position_y], slot_y, layout=SECTIONED, fmt=attn.cache)
        if attn.kind is V4Kind.SLIDING:
            return
        entry_y = sequence.entries(attn.ratio)
        slot_y = sequence.slots(entry_y, attn.page_entries)
        entry_yd = whole_entries(x_tm, owned(weights.entry, "entry"), table_sr, cu, config=attn)
        store_records(own["main"], entry_yd[entry_y], slot_y, layout=SECTIONED, fmt=attn.cache)
        _pool_rows_(own["pool"], x_tm, owned(weights.entry, "entry"), sequence)
        if attn.kind is V4Kind.CSA:
            index_yd = whole_entries(x_tm, owned(weights.index_entry, "index_entry"), table_sr, cu, config=attn)
            store_records(own["index"], csa_index_rows(index_yd, config=attn)[entry_y], slot_y, layout=SECTIONED)
            _pool_rows_(own["index_pool"], x_tm, owned(weights.index_entry, "index_entry"), sequence)

    def _v41(self, own: Image, layer: int, x_tm: Tensor, sequence: Sequence) -> None:
        config = self.config
        assert isinstance(config, V41Stack)
        csa2 = replace(config.csa2, page_tokens=self.page_tokens, backtracking=self.backtracking)
        weights = self.weights.layers[layer].attention
        assert isinstance(weights, Csa2Weights)
        table_sr = table_of(csa2.rope(layer), sequence.end)
        _, key_td, _ = csa2_project(x_tm, weights, table_sr, sequence.positions_s, config=csa2)
        ring = csa2.sliding(decoder=False).ring
        position_y = sequence.last(ring)
        slot_y = sequence.slot * ring + position_y % ring
        store_records(own["ring"], key_td[position_y], slot_y, layout=csa2.layout)
        if csa2.topology.mode(layer) is LayerMode.FULL:
            _v41_entries_(own, layer, x_tm, weights, table_sr, sequence, csa2)


def _v41_entries_(
    own: Image,
    layer: int,
    x_tm: Tensor,
    weights: Csa2Weights,
    table_sr: Tensor,
    sequence: Sequence,
    csa2: Csa2Config,
) -> None:
    """Entries and index keys of a layer that owns them, and its open group."""
    ratio = csa2.topology.ratios[layer]
    value_tw, gate_tw = compress_project(x_tm, weights.own("entry_value_dm"), weights.entry_gate_dm)
    start_b, cu = torch.tensor([0]), torch.tensor([0, sequence.end])
    pooled_yd, entry_s = compress(value_tw, gate_tw, None, start_b, cu, config=C1 if ratio == 1 else C2)
    norm_d = weights.own("entry_norm_d")
    latent_yd, entry_yd = compress_tail(pooled_yd, norm_d, table_sr, entry_s, ratio=ratio, eps=csa2.eps)
    entry_y = sequence.entries(ratio)
    slot_y = sequence.slots(entry_y, csa2.page_tokens // ratio)
    store_records(own["main"], entry_yd[entry_y], slot_y, layout=csa2.layout)
    key_yd, norm_d = linear(latent_yd[entry_y], weights.own("index_wk")), weights.own("index_norm")
    store = FusedStore(eps=csa2.eps, layout=SECTIONED, tap=RecordTap.NONE)
    norm_rope_store(own["index"], key_yd, norm_d, table_sr, entry_y * ratio, slot_y, store=store)
    if gate_tw is not None:
        _ring_rows_(own["pool"], torch.stack([gate_tw, value_tw], 1), sequence)


def _pool_rows_(pool: Tensor, x_tm: Tensor, weights: CompressorWeights, sequence: Sequence) -> None:
    """The logits, with the bias of a token's place in its group, and the values of the last tokens."""
    value_tw, gate_tw = compress_project(x_tm, weights.value_wm, weights.gate_wm)
    bias_rw = CONTRACT.wide(weights.bias_rw)
    logit_tw = CONTRACT.f32(owned(gate_tw, "gate_wm") + bias_rw[sequence.positions_s % len(bias_rw)])
    _ring_rows_(pool, torch.stack([logit_tw, value_tw], 1), sequence)


def _ring_rows_(pool: Tensor, pairs_t2w: Tensor, sequence: Sequence) -> None:
    position_y = sequence.last(pool.shape[1])
    pool[sequence.slot, position_y % pool.shape[1]] = pairs_t2w[position_y].to(pool.dtype)


def image_of(views: Image) -> Image:
    """A copy of all caches, pages next to each other."""
    return {name: x.contiguous().clone() for name, x in views.items()}


def image_faults(image: Image, views: Image) -> list[str]:
    """Where caches are not what an image says: cache, page or state, the first byte that is wrong there."""
    faults = [f"{name}: expected in both, got one" for name in sorted(image.keys() ^ views.keys())]
    for name in sorted(image.keys() & views.keys()):
        want, got = (x.contiguous().flatten(1).view(torch.uint8) for x in (image[name], views[name]))
        wrong = (want != got).nonzero()
        if len(wrong):
            place, byte = wrong[0].tolist()
            found = f"expected {want[place, byte]}, got {got[place, byte]} ({len(wrong)} bytes differ)"
            faults.append(f"{name}: {place}, byte {byte}: {found}")
    return faults
