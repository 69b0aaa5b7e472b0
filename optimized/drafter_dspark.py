"""DSpark drafts of V4.1: keys of the main model's tokens in rings, and a block of drafts from one forward and a chain.

The rings are parts of the states: one of every draft layer, with the rows of a window layer's ring. Only keys of the
main model stand in them; those of a block live for one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeptwin.reference.config import KV_FP8, Draw, WeightCast
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.dspark_state import DraftMain, DraftModel, DraftRequests

from .drafter import DraftBatch, draw_drafts
from .steps import Forward
from .steps_state import load_rows, ring_parts, save_rows
from .verification import Operations


class DsparkDrafter:
    """Drafts a block for every request; `rings`: uint8 [states, rows, bytes] of every draft layer, written in place."""

    def __init__(
        self,
        model: DraftModel,
        main: DraftMain,
        rings: Sequence[Tensor],
        table_sr: Tensor,
        *,
        draw: Draw,
        ops: Operations,
    ) -> None:
        if len(rings) != len(model.layers):
            raise ValueError(f"rings: expected {len(model.layers)}, got {len(rings)}")
        # the rows that truncation leaves out have no features, so a draft layer stores what a decoder layer does
        self.window = model.config.csa2.sliding(decoder=True)
        if any(ring.shape[1] != self.window.ring for ring in rings) or model.block.window.ring != self.window.ring:
            got = [ring.shape[1] for ring in rings]
            raise ValueError(f"rings: expected {self.window.ring} rows, got {got}, blocks of {model.block.window.ring}")
        self.model = model
        self.main = main
        self.rings = tuple(rings)
        self.table_sr = table_sr
        self.draw = draw
        self.ops = ops
        self.gamma = model.block.draft

    def observe(self, forward: Forward, token_t: Tensor, step: Csa2Step) -> None:
        """Store the keys of a step's rows; those that verification rejects are overwritten before any read."""
        csa2 = self.model.config.csa2
        positions_y, seq_y = step.positions_t[forward.row_t], step.seq_t[forward.row_t]
        features_yz = self.ops.op("dspark.target_features")(forward.features)
        wkv = [(own.attention.wkv_q, own.attention.wkv_sf, own.attention.kv_norm_d) for own in self.model.layers]
        main = self.main.proj_q, self.main.proj_sf, self.main.norm_m, wkv
        keys_yid = self.ops.op("dspark.main_keys")(features_yz, *main, self.table_sr, positions_y, eps=csa2.eps)
        slots_y = self.ops.op("window.ring_slots")(
            positions_y, seq_y, step.end_b, step.known_b, step.state_b, config=self.window
        )
        for ring_pow, key_yd in zip(self.rings, keys_yid.unbind(1), strict=True):
            self.ops.op("kv_cache.store_records")(ring_pow, key_yd.contiguous(), slots_y, layout=csa2.layout)

    def propose(self, batch: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
        """A block for every request, and how probable it is that its drafts are accepted."""
        requests, model = batch.requests, self.model
        ids_bj, positions_bj, slots_bj, seen_bk = self.ops.op("dspark.draft_rows")(
            requests.golden_b,
            torch.where(batch.real_b, requests.first_b, -1),
            requests.accepted_b,
            requests.state_b,
            requests.valid_b,
            block=model.block,
        )
        embed_bjm = model.embed_vm[ids_bj.long()]
        h_bjm = self.ops.op("dspark.draft_hidden")(
            embed_bjm,
            model.layers,
            self.rings,
            self.table_sr,
            positions_bj,
            slots_bj,
            seen_bk,
            config=model.config,
        )
        return self._chain(h_bjm, ids_bj[:, 0].long(), positions_bj.long() + 1, requests)

    def _chain(
        self, h_bjm: Tensor, token_b: Tensor, positions_bj: Tensor, requests: DraftRequests
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Token after token: each changes the logits of the next position and how much it is trusted."""
        head, op, found = self.model.head, self.ops.op, []
        for j, temperature in enumerate(head.temperatures):
            h_bm = h_bjm[:, j].contiguous()
            normed_bm = op("rms_norm.rms_norm")(
                h_bm, head.norm_m, eps=self.model.config.csa2.eps, cast=WeightCast.AFTER_WEIGHT
            )
            base_bv = op("linear.linear")(normed_bm, head.head_vm, dtype=torch.float32)
            logits_bv = op("dspark.markov_step")(base_bv, token_b, head.w1_vr, head.w2_vr)
            rate_b = op("dspark.confidence")(h_bm, token_b, head.w1_vr, head.confidence_x, temperature=temperature)
            token_b, logprob_bv = draw_drafts(
                logits_bv, positions_bj[:, j].contiguous(), requests, draw=self.draw, ops=self.ops
            )
            found.append((token_b, logprob_bv, rate_b))
        token_bj, logprob_bjv, rate_bj = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
        return token_bj, logprob_bjv, rate_bj

    def page_bytes(self, page: int, before: int) -> bytes:
        """Pages hold nothing."""
        return b""

    def load_page(self, page: int, before: int, payload: bytes) -> None:
        """Pages hold nothing."""

    def snapshot(self, slot: int, end: int) -> bytes:
        """The windows before token `end`."""
        return save_rows(self._windows(slot), end)

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """Put a snapshot into a state.

        Raises:
            ValueError: the payload has another length.
        """
        load_rows(self._windows(slot), end, payload)

    def _windows(self, slot: int) -> list[tuple[Tensor, int]]:
        layout = self.model.config.csa2.layout
        parts = [part for ring in self.rings for part in ring_parts(ring, slot, fmt=KV_FP8, layout=layout)]
        return [(part, self.window.window) for part in parts]
