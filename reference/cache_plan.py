"""How large the caches of a model are and where each begins: pages that all tokens share, a state for each sequence.

Nothing here is measured or typed in: every size follows from the record formats and the layer map.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from torch import Tensor

from .checks import expect_shape
from .config import INDEX_FP4, KV_FP4, KV_FP8, RECORD_FORMATS, PageLayout, RecordFormat


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Everything that decides how large the caches of a model are: layers, formats, window."""

    ratios: tuple[int, ...]  # compression ratio of every layer; 0: the layer has a sliding window only
    owners: tuple[int, ...]  # layers that own a compressed cache and index keys, ascending
    draft_layers: int  # the last layers, of the draft model
    page_tokens: int
    window: int
    backtracking: int  # tokens that a step may take back
    main: RecordFormat
    index: RecordFormat = INDEX_FP4
    sliding: RecordFormat = KV_FP8

    def __post_init__(self) -> None:
        for layer in self.owners:
            if not 0 <= layer < len(self.ratios) or not self.ratios[layer]:
                raise ValueError(f"owners: expected layers with a compression ratio, got {layer}")
            if self.page_tokens % self.ratios[layer]:
                raise ValueError(f"page_tokens: expected a multiple of {self.ratios[layer]}, got {self.page_tokens}")
        if list(self.owners) != sorted(set(self.owners)):
            raise ValueError(f"owners: expected ascending layers, got {self.owners}")
        if self.main.record_bytes not in RECORD_FORMATS:
            raise ValueError(f"main: expected a known record format, got {self.main.name}")

    @property
    def ring(self) -> int:
        """Rows of the ring of a sliding window."""
        return self.window + self.backtracking

    @property
    def encoder_layers(self) -> int:
        """Layers before the first of ratio 1: those whose rings outlive a request."""
        return self.ratios.index(1) if 1 in self.ratios else len(self.ratios) - self.draft_layers


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a page or of a state: where it starts, how long it is, what it holds."""

    name: str  # index, main, ring or compressor
    layer: int
    offset: int
    size: int
    entries: int


def v41_flash_caches(*, main: RecordFormat = KV_FP4) -> CachePlan:
    """The caches of V4.1-Flash; `main` = KV_FP8 is its MXFP8 option."""
    ratios = (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    owners = (2, 8, 14, 20)
    return CachePlan(
        ratios=ratios, owners=owners, draft_layers=3, page_tokens=128, window=128, backtracking=6, main=main
    )


def bytes_per_token(plan: CachePlan) -> Fraction:
    """Bytes that a source token costs in pages: an entry per owner for each `ratio` tokens."""
    entry = plan.main.record_bytes + plan.index.record_bytes
    return sum((Fraction(entry, plan.ratios[layer]) for layer in plan.owners), Fraction())


def page_pieces(plan: CachePlan) -> tuple[Piece, ...]:
    """The parts of a page in memory order: owner by owner, index keys before main entries, each padded to 32 bytes."""
    entries = [(layer, plan.page_tokens // plan.ratios[layer]) for layer in plan.owners]
    formats = (("index", plan.index), ("main", plan.main))
    return _placed([(name, i, n * fmt.record_bytes, n) for i, n in entries for name, fmt in formats])


def page_bytes(plan: CachePlan) -> int:
    """Bytes from one page to the next: whole 128-byte lines and whole main records."""
    return _aligned(_end(page_pieces(plan)), lcm(128, plan.main.record_bytes))


def state_pieces(plan: CachePlan) -> tuple[Piece, ...]:
    """The parts of a sequence's state: a ring of every layer in layer order, then the rings of the compressors.

    A compressor's ring holds the gate logits and values (fp32) of ratio + backtracking - 1 tokens; ratio 1 has none.
    """
    rows = [("ring", layer, plan.ring * plan.sliding.record_bytes, plan.ring) for layer in range(len(plan.ratios))]
    for layer in plan.owners:
        if plan.ratios[layer] > 1:
            tokens = plan.ratios[layer] + max(0, plan.backtracking - 1)
            rows.append(("compressor", layer, tokens * 2 * plan.main.channels * 4, tokens))
    return _placed(rows)


def state_bytes(plan: CachePlan) -> int:
    """Bytes from one state to the next."""
    return _aligned(_end(state_pieces(plan)), lcm(32, plan.sliding.record_bytes))


def cache_view(block_pq: Tensor, piece: Piece) -> Tensor:
    """The cache [p, o, w] that a piece of every page or state is, sharing memory with the block.

    Raises:
        ValueError: block_pq is not 2-D or ends before the piece does; the piece holds no records.
    """
    expect_shape("block_pq", block_pq, "pq", {})
    if piece.name == "compressor":
        raise ValueError(f"piece: expected records, got the {piece.name} state of layer {piece.layer}")
    if block_pq.shape[1] < piece.offset + piece.size:
        raise ValueError(f"block_pq: expected {piece.offset + piece.size} bytes or more, got {block_pq.shape[1]}")
    flat_pq = block_pq[:, piece.offset : piece.offset + piece.size]
    return flat_pq.view(len(block_pq), piece.entries, piece.size // piece.entries)


def encoder_rings(plan: CachePlan) -> list[Piece]:
    """The parts of a state that outlive a request: rings of encoder layers."""
    return [piece for piece in state_pieces(plan) if piece.name == "ring" and piece.layer < plan.encoder_layers]


def record_bytes(piece: Piece, slot: int, *, fmt: RecordFormat, layout: PageLayout) -> tuple[slice, slice]:
    """Where the codes and the scales of a slot stand in a page or state."""
    data, scales = fmt.data_bytes, fmt.record_bytes - fmt.data_bytes
    if layout is PageLayout.INTERLEAVED:
        start = piece.offset + slot * fmt.record_bytes
        return slice(start, start + data), slice(start + data, start + data + scales)
    start, behind = piece.offset + slot * data, piece.offset + piece.entries * data + slot * scales
    return slice(start, start + data), slice(behind, behind + scales)


def _placed(rows: list[tuple[str, int, int, int]]) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for name, layer, size, entries in rows:
        found.append(Piece(name=name, layer=layer, offset=_aligned(_end(found), 32), size=size, entries=entries))
    return tuple(found)


def _end(pieces: list[Piece] | tuple[Piece, ...]) -> int:
    return pieces[-1].offset + pieces[-1].size if pieces else 0


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
