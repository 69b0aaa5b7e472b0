"""What a CSA2 stack keeps of its sequences, as bytes, and what one step tells its layers. Nothing here computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache_plan import cache_view, page_pieces, state_pieces
from .csa2_config import Csa2Config


@dataclass(frozen=True, kw_only=True, eq=False)
class Csa2Step:
    """What a step advances: packed tokens, and for every sequence where it begins and ends and what it owns."""

    positions_t: Tensor
    seq_t: Tensor
    first_b: Tensor
    end_b: Tensor
    known_b: Tensor  # tokens known of the sequence: N of the truncation rule
    valid_b: Tensor  # first position whose window state is valid
    state_b: Tensor  # slot of the state
    table_bp: Tensor  # pages of a sequence, in order
    clip_b: Tensor  # rows at the front of each chunk that are left out
    decode: bool

    @property
    def cu_seqlens(self) -> Tensor:
        """Where the chunk of every sequence begins among all rows of the step."""
        return torch.cat([self.end_b.new_zeros(1), (self.end_b - self.first_b).cumsum(0).to(torch.int32)])

    @property
    def offset_b(self) -> Tensor:
        """Where position first_b of every sequence stands among the computed rows."""
        kept_b = self.end_b - self.first_b - self.clip_b
        return kept_b.cumsum(0).to(torch.int32) - kept_b - self.clip_b


@dataclass(frozen=True, kw_only=True, eq=False)
class Csa2Caches:
    """The bytes of all pages and states, and the angle tables that the layers share."""

    page_pq: Tensor  # uint8
    state_sq: Tensor  # uint8
    window_table: Tensor  # fp32 [positions, r]: ratio 0
    main_table: Tensor

    def records(self, config: Csa2Config, name: str, layer: int) -> Tensor:
        """The cache [p, o, w] "main", "index" or "ring" of a layer, sharing memory."""
        pieces = state_pieces(config.plan) if name == "ring" else page_pieces(config.plan)
        (piece,) = (p for p in pieces if (p.name, p.layer) == (name, layer))
        return cache_view(self.state_sq if name == "ring" else self.page_pq, piece)

    def compressor(self, config: Csa2Config, layer: int) -> Tensor:
        """The ring [slots, tokens, 2, d] of a layer's compressor, fp32, sharing memory."""
        (piece,) = (p for p in state_pieces(config.plan) if (p.name, p.layer) == ("compressor", layer))
        rows_sq = self.state_sq[:, piece.offset : piece.offset + piece.size]
        return rows_sq.view(torch.float32).view(len(rows_sq), piece.entries, 2, config.head_dim)

    def table(self, config: Csa2Config, layer: int) -> Tensor:
        """The angles of everything that a layer rotates."""
        return self.main_table if config.topology.ratios[layer] else self.window_table


@dataclass(frozen=True, kw_only=True, eq=False)
class Csa2Batch:
    """How sequences advance: in step k sequence b takes counts_kb[k, b] tokens; all tensors int32 but decode_k."""

    counts_kb: Tensor
    decode_k: Tensor  # bool: the step reads the rings instead of the chunk
    start_b: Tensor  # tokens of the sequence that the caches hold before
    valid_b: Tensor
    state_b: Tensor
    table_bp: Tensor

    def steps(self) -> Iterator[tuple[Csa2Step, Tensor]]:
        """Every step, and which of the packed tokens it advances."""
        total_b, prompt_b = (
            self.counts_kb.sum(0, dtype=torch.int64),
            self.counts_kb[~self.decode_k].sum(0, dtype=torch.int64),
        )
        base_b, first_b = total_b.cumsum(0) - total_b, self.start_b.clone()
        for count_b, decode in zip(self.counts_kb, self.decode_k.tolist(), strict=True):
            active_b = (count_b > 0).nonzero()[:, 0]
            count_y, first_y = count_b[active_b].long(), first_b[active_b].long()
            seq_t = torch.arange(len(active_b), device=count_b.device).repeat_interleave(count_y)
            within_t = torch.arange(len(seq_t), device=count_b.device) - (count_y.cumsum(0) - count_y)[seq_t]
            positions_t = first_y[seq_t] + within_t
            row_t = (base_b - self.start_b)[active_b][seq_t] + positions_t
            step = Csa2Step(
                positions_t=positions_t.to(torch.int32),
                seq_t=seq_t.to(torch.int32),
                first_b=first_b[active_b],
                end_b=(first_b + count_b)[active_b],
                known_b=(self.start_b + prompt_b)[active_b].to(torch.int32),
                valid_b=self.valid_b[active_b],
                state_b=self.state_b[active_b],
                table_bp=self.table_bp[active_b],
                clip_b=torch.zeros_like(first_b[active_b]),
                decode=decode,
            )
            first_b = first_b + count_b
            if len(row_t):
                yield step, row_t
