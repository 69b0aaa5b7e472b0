"""Which layers of a CSA2 stack own caches, which share them, and the rules that a layer map has to obey.

A compressed layer takes its keys from the nearest owner at or before it, and its selection from the nearest index
source at or before it. Four modes follow: SWA (ratio 0, its own window only), FULL (owns everything), REINDEX (its own
selection of the owner's keys) and REUSE (both of others). Nothing here computes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class LayerMode(enum.Enum):
    """What an attention layer owns."""

    SWA = "swa"  # ratio 0: no compressed keys at all
    FULL = "full"  # compressor, main cache, index keys, indexer
    REINDEX = "reindex"  # indexer only
    REUSE = "reuse"  # nothing


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The layer map: ratios of all layers, owners of caches, index sources, candidates."""

    ratios: tuple[int, ...]
    draft_layers: int  # the last layers
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_k_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int | None  # None: every index source scores all entries
    candidate_blocks: int  # blocks kept for a query
    candidate_size: int  # entries of a block

    def __post_init__(self) -> None:
        for name, field, broken in RULES:
            for got in broken(self):
                raise ValueError(f"{field}: breaks the rule {name!r}, got {got}")

    @property
    def num_layers(self) -> int:
        """Layers, the draft's included."""
        return len(self.ratios)

    @property
    def boundary(self) -> int:
        """The first decoder layer: the first of ratio 1, or the first draft layer."""
        return self.ratios.index(1) if 1 in self.ratios else self.num_layers - self.draft_layers

    def mode(self, layer: int) -> LayerMode:
        """What the layer owns."""
        if not self.ratios[layer]:
            return LayerMode.SWA
        if layer in self.kv_sources:
            return LayerMode.FULL
        return LayerMode.REINDEX if layer in self.index_sources else LayerMode.REUSE

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed keys and index keys a compressed layer reads."""
        return max(source for source in self.kv_sources if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection a compressed layer uses."""
        return max(source for source in self.index_sources if source <= layer)

    def reads_candidates(self, layer: int) -> bool:
        """Whether the layer scores the entries of candidate blocks only."""
        after = self.candidate_source is not None and layer > self.candidate_source
        return after and self.mode(layer) is LayerMode.REINDEX


def nearest(sources: tuple[int, ...], layer: int) -> int | None:
    """The last source at or before the layer."""
    return max((source for source in sources if source <= layer), default=None)


def _all_sources(map_: Topology) -> Iterator[tuple[int, ...]]:
    yield from (map_.kv_sources, map_.index_k_sources, map_.index_sources)


def _unknown_ratio(map_: Topology) -> Iterator[object]:
    yield from (r for r in map_.ratios if r not in (0, 1, 2))


def _not_ascending(map_: Topology) -> Iterator[object]:
    yield from (s for s in _all_sources(map_) if list(s) != sorted(set(s)))


def _draft_shares(map_: Topology) -> Iterator[object]:
    first = map_.num_layers - map_.draft_layers
    yield from (i for s in _all_sources(map_) for i in s if i >= first)
    yield from (i for i in range(first, map_.num_layers) if map_.ratios[i])


def _uncompressed_source(map_: Topology) -> Iterator[object]:
    yield from (i for s in _all_sources(map_) for i in s if not 0 <= i < map_.num_layers or not map_.ratios[i])


def _without_source(map_: Topology) -> Iterator[object]:
    layers = (i for i, ratio in enumerate(map_.ratios) if ratio)
    yield from (i for i in layers if any(nearest(s, i) is None for s in _all_sources(map_)))


def _segment_interrupted(map_: Topology) -> Iterator[object]:
    for layer, ratio in enumerate(map_.ratios):
        source = nearest(map_.kv_sources, layer) if ratio else None
        if source is not None and any(not map_.ratios[i] for i in range(source, layer)):
            yield layer


def _other_ratio(map_: Topology) -> Iterator[object]:
    for layer, ratio in enumerate(map_.ratios):
        sources = [nearest(s, layer) for s in _all_sources(map_)] if ratio else []
        yield from (layer for i in sources if i is not None and map_.ratios[i] != ratio)


def _coarser_index(map_: Topology) -> Iterator[object]:
    yield from (i for i in map_.kv_sources if i not in map_.index_k_sources)
    yield from (i for i in map_.index_k_sources if i not in map_.index_sources)


def _foreign_index_keys(map_: Topology) -> Iterator[object]:
    # index keys are made from the latent of the same layer's compressor
    yield from (i for i in map_.index_k_sources if i not in map_.kv_sources)


def _shared_boundary(map_: Topology) -> Iterator[object]:
    if 1 in map_.ratios and map_.boundary not in map_.kv_sources:
        yield map_.boundary


def _lost_candidates(map_: Topology) -> Iterator[object]:
    if map_.candidate_source is not None and map_.candidate_source not in map_.index_sources:
        yield map_.candidate_source


def _block_count(map_: Topology) -> Iterator[object]:
    if map_.candidate_source is not None and (not 0 < map_.candidate_blocks <= 4096 or map_.candidate_blocks % 8):
        yield map_.candidate_blocks


def _consumers(map_: Topology) -> list[int]:
    return [i for i in map_.index_sources if map_.candidate_source is not None and i > map_.candidate_source]


def _block_size(map_: Topology) -> Iterator[object]:
    legal = (8, 16) if _consumers(map_) else range(1, 17)
    if map_.candidate_source is not None and map_.candidate_size not in legal:
        yield map_.candidate_size


def _too_few_candidates(map_: Topology) -> Iterator[object]:
    # the pinned last block may hold a single entry
    least = map_.candidate_blocks * map_.candidate_size - (map_.candidate_size - 1)
    if map_.candidate_source is not None and least < map_.index_topk:
        yield least


def _wide_consumer(map_: Topology) -> Iterator[object]:
    if _consumers(map_) and (map_.index_heads > 32 or map_.index_dim != 128):
        yield map_.index_heads, map_.index_dim


def _candidate_ratio(map_: Topology) -> Iterator[object]:
    source = map_.candidate_source
    yield from (i for i in _consumers(map_) if source is not None and map_.ratios[i] != map_.ratios[source])


# what must not be found in a layer map: name, field that is at fault, finder
RULES: tuple[tuple[str, str, Callable[[Topology], Iterator[object]]], ...] = (
    ("ratios are 0, 1 or 2", "ratios", _unknown_ratio),
    ("sources are distinct and ascending", "kv_sources", _not_ascending),
    ("draft layers never share", "draft_layers", _draft_shares),
    ("a source is a compressed layer", "kv_sources", _uncompressed_source),
    ("every compressed layer has a source before it", "kv_sources", _without_source),
    ("segments are contiguous", "ratios", _segment_interrupted),
    ("the decoder owns its keys", "kv_sources", _shared_boundary),
    ("source and consumer have one ratio", "ratios", _other_ratio),
    ("a selection is refined inside one set of keys", "index_sources", _coarser_index),
    ("index keys come from a compressor", "index_k_sources", _foreign_index_keys),
    ("the candidate source is an index source", "candidate_source", _lost_candidates),
    ("candidate blocks are a multiple of 8 up to 4096", "candidate_blocks", _block_count),
    ("a candidate block has 8 or 16 entries", "candidate_size", _block_size),
    ("candidates cover the selection", "candidate_blocks", _too_few_candidates),
    ("a candidate consumer has up to 32 heads of 128 channels", "index_heads", _wide_consumer),
    ("candidates have the ratio of their consumers", "candidate_source", _candidate_ratio),
)


V41_TOPOLOGY = Topology(
    ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
    draft_layers=3,
    kv_sources=(2, 8, 14, 20),
    index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
    index_k_sources=(2, 8, 14, 20),
    index_heads=32,
    index_dim=128,
    index_topk=512,
    candidate_source=20,
    candidate_blocks=2048,
    candidate_size=8,
)
TINY_TOPOLOGY = Topology(
    ratios=(0, 2, 2, 1, 1, 1),
    draft_layers=0,
    kv_sources=(1, 3),
    index_sources=(1, 3, 5),
    index_k_sources=(1, 3),
    index_heads=8,
    index_dim=128,
    index_topk=4,
    candidate_source=3,
    candidate_blocks=8,
    candidate_size=8,
)
