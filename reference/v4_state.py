"""What an attention layer of V4 keeps of its sequences. Nothing here computes.

Window keys and compressed entries are records of 584 bytes, index keys records of 68 or 132 bytes, all in sectioned
pages; a page of the compressed cache is followed by as many bytes as make it a multiple of a record's codes and tail.
Compressors carry the fp32 logits and values of tokens that later entries need, in a ring [slots, tokens, 2, w].
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .config import INDEX_FP4, INDEX_FP8_F32, IndexCast, RecordFormat, V4AttnConfig, V4Kind


@dataclass(frozen=True, kw_only=True, eq=False)
class V4Caches:
    """The bytes of one layer; None where its kind keeps none."""

    ring_pow: Tensor  # uint8 [states, window + backtracking, 584]: a ring is a page
    main_pow: Tensor | None = None  # uint8 [pages, page_entries, 584]
    pool: Tensor | None = None  # float32 [states, tokens, 2, w]
    index_pow: Tensor | None = None  # uint8 [pages, page_entries, 68 or 132]
    index_pool: Tensor | None = None

    def clone(self) -> V4Caches:
        """The same bytes elsewhere, pages as far apart as before."""
        return replace(self, **{name: _copied(x) for name, x in self.parts().items()})

    def parts(self) -> dict[str, Tensor]:
        """What is there, by name, in the order of the fields."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in found.items() if x is not None}


def v4_caches(
    config: V4AttnConfig, *, pages: int, states: int, fill: int = 0, device: torch.device | str = "cpu"
) -> V4Caches:
    """New caches whose every byte is `fill`.

    Raises:
        ValueError: config.cache is None, or index keys are plain: there are no records then.
    """
    if config.cache is None or (config.kind is V4Kind.CSA and config.index is IndexCast.PLAIN):
        raise ValueError(f"config: expected quantised caches, got cache={config.cache}, index={config.index}")

    def filled(*shape: int) -> Tensor:
        return torch.full(shape, fill, dtype=torch.uint8, device=device)

    def records(count: int, entries: int) -> Tensor:
        fmt = config.cache
        assert fmt is not None
        block_pq = filled(count, page_bytes(fmt, entries))
        return block_pq[:, : entries * fmt.record_bytes].unflatten(1, (entries, fmt.record_bytes))

    def pool(channels: int) -> Tensor:
        rows = filled(states, config.compressor.ring(config.backtracking), 2, 4 * config.compressor.series * channels)
        return rows.view(torch.float32)

    ring_pow = records(states, config.sliding.ring)
    if config.kind is V4Kind.SLIDING:
        return V4Caches(ring_pow=ring_pow)
    main_pow = records(pages, config.page_entries)
    if config.kind is V4Kind.HCA:
        return V4Caches(ring_pow=ring_pow, main_pow=main_pow, pool=pool(config.head_dim))
    return V4Caches(
        ring_pow=ring_pow,
        main_pow=main_pow,
        pool=pool(config.head_dim),
        index_pow=filled(pages, config.page_entries, index_record(config).record_bytes),
        index_pool=pool(config.index_dim),
    )


def index_record(config: V4AttnConfig) -> RecordFormat:
    """What an index key is stored as."""
    return INDEX_FP4 if config.index is IndexCast.FP4 else INDEX_FP8_F32


def page_bytes(fmt: RecordFormat, entries: int) -> int:
    """Bytes from one page of records with a tail to the next: a multiple of the codes and tail of a record."""
    row = fmt.record_bytes - fmt.scale_bytes
    return -(-entries * fmt.record_bytes // row) * row


def _copied(x: Tensor) -> Tensor:
    if x.is_contiguous() or not x.numel():
        return x.clone()
    block_pq = x.as_strided((len(x), x.stride(0)), (x.stride(0), 1)).clone()
    return block_pq.as_strided(x.shape, x.stride())
