"""Steps of V4.1 over pages and states: blocks around four streams, each sub-layer reading as the one before says.

Rows of a chunk that decoder layers leave out (COMPACT) are dropped at the first of them, after the entries of all rows
were stored. Steps hold text alone: images would need rows of the tower in place of embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from deeptwin.reference.block_weights import V41BlockWeights
from deeptwin.reference.cache_plan import page_bytes, state_bytes
from deeptwin.reference.config import KV_FP8, FfnConfig, OutsideVocabulary, Truncation, WeightCast
from deeptwin.reference.csa2_config import Csa2Config
from deeptwin.reference.csa2_state import Csa2Caches, Csa2Step
from deeptwin.reference.model_weights import V41Model
from deeptwin.reference.presets import V41Config
from deeptwin.reference.taps import Tap, ignore, under
from deeptwin.reference.topology import LayerMode
from deeptwin.reference.weights import MhcSite

from .plan import Plan
from .steps import Forward, bytes_of, expect_rows, fill_with
from .steps_ffn import feed_forward
from .steps_state import load_rows, ring_parts, save_rows


class Stack(Protocol):
    """A model with its choices, as `reference.block_v41.V41Stack` holds them."""

    @property
    def model(self) -> V41Config: ...

    @property
    def csa2(self) -> Csa2Config: ...

    @property
    def ffn(self) -> FfnConfig: ...


@dataclass(kw_only=True)
class _Rows:
    """What passes from one block to the next, for the rows that are still computed."""

    stream_tnm: Tensor
    pre_tn: Tensor
    row_ltz: Tensor  # rows of the memory tables
    image_t: Tensor
    row_t: Tensor  # which rows of the step these are
    step: Csa2Step
    carried: tuple[Tensor | None, Tensor | None] = (None, None)  # selection and candidate blocks
    heard: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # by the draft: streams, and which rows they are

    def keep(self, kept_t: Tensor, step: Csa2Step) -> None:
        """Go on with some of the rows: everything is per row."""
        self.stream_tnm, self.pre_tn = self.stream_tnm[kept_t], self.pre_tn[kept_t]
        self.row_ltz, self.image_t = self.row_ltz[:, kept_t], self.image_t[kept_t]
        self.row_t, self.step = self.row_t[kept_t], step
        idx_tk, blocks_tk = self.carried
        self.carried = (
            None if idx_tk is None else idx_tk[kept_t],
            None if blocks_tk is None else blocks_tk[kept_t],
        )


class V41Runner:
    """A model of V4.1 over its pages and states."""

    def __init__(
        self,
        config: Stack,
        weights: V41Model,
        plan: Plan,
        *,
        pages: int,
        states: int,
        page_tokens: int,
        backtracking: int,
        positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Empty pages and states, and the angles of so many positions.

        Raises:
            ValueError: page_tokens is no multiple of every ratio, or truncation keeps fewer tokens than a ring holds.
        """
        self.model, self.ffn, self.weights, self.plan = config.model, config.ffn, weights, plan
        self.csa2 = replace(config.csa2, page_tokens=page_tokens, backtracking=backtracking)
        self.vocab, self.page_tokens = self.model.vocab_size, page_tokens
        memory = self.model.memory
        self.history = memory.max_ngram - 1
        self.layout, self.pad_class = plan.op("engram.hash_layout")(memory), int(weights.class_v[memory.pad_id])
        table_of = plan.op("rope.table_of")
        self.caches = Csa2Caches(
            page_pq=torch.zeros(pages, page_bytes(self.csa2.plan), dtype=torch.uint8, device=device),
            state_sq=torch.zeros(states, state_bytes(self.csa2.plan), dtype=torch.uint8, device=device),
            window_table=table_of(self.csa2.rope_window, positions).to(device),
            main_table=table_of(self.csa2.rope_main, positions).to(device),
        )

    def forward(self, token_t: Tensor, past_bk: Tensor, step: Csa2Step, *, tap: Tap = ignore) -> Forward:
        """Advance every sequence of `step` by its rows, and write what they leave into pages and states.

        Raises:
            ValueError: there is not one token for each row, a token lies outside the vocabulary, or a position beyond
                the angle table.
        """
        positions = len(self.caches.main_table)
        expect_rows(token_t, past_bk, step, vocab=self.vocab, history=self.history, positions=positions)
        model, plan = self.model, self.plan
        row_ltz, image_t = self._memory_rows(token_t, past_bk, step)
        tap("memory.rows", row_ltz)
        embed_tm = self.weights.embed_vm[token_t]
        tap("embed", embed_tm)
        stream_tnm, pre_tn = plan.op("mhc.mhc_expand")(embed_tm, config=model.mhc)
        every_t = torch.arange(len(token_t), device=token_t.device)
        rows = _Rows(stream_tnm=stream_tnm, pre_tn=pre_tn, row_ltz=row_ltz, image_t=image_t, row_t=every_t, step=step)
        for layer, weights in enumerate(self.weights.layers):
            self._block(rows, weights, layer, under(f"layers.{layer}.", tap))
        x_tm = plan.op("mhc.mhc_apply")(rows.pre_tn, rows.stream_tnm)
        tap("head.x", x_tm)
        x_tm = self._normed(x_tm, self.weights.norm_m)
        tap("head.norm", x_tm)
        features = tuple(x if len(at_t) == len(rows.row_t) else x[rows.row_t] for x, at_t in rows.heard)
        return Forward(row_t=rows.row_t, hidden_ym=x_tm, features=features)

    def head(self, hidden_ym: Tensor) -> Tensor:
        """Logits, fp32 [y, v]."""
        return self.plan.op("linear.linear")(hidden_ym, self.weights.head_vm, dtype=torch.float32)

    def snapshot(self, slot: int, end: int) -> bytes:
        """The windows before token `end`, the end of a page: of encoder layers alone where the decoder truncates.

        No group is open there: every ratio divides a page. Rings of the draft are the drafter's.
        """
        return save_rows(self._rings(slot), end)

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """Put a snapshot into a state.

        Raises:
            ValueError: the payload has another length.
        """
        load_rows(self._rings(slot), end, payload)

    def page_bytes(self, page: int) -> bytes:
        """What a page of all layers holds."""
        return bytes_of([self.caches.page_pq[page]])

    def load_page(self, page: int, payload: bytes) -> None:
        """Fill a page with what `page_bytes` gave.

        Raises:
            ValueError: the payload has another length.
        """
        fill_with(payload, [self.caches.page_pq[page]])

    def cache_views(self) -> dict[str, Tensor]:
        """Pages `layers.2.main`, `layers.2.index`; states `layers.0.ring`, of draft layers too, `layers.2.pool`."""
        csa2 = self.csa2
        found: dict[str, Tensor] = {}
        for layer in range(csa2.topology.num_layers):
            if layer in csa2.topology.kv_sources:
                found |= {f"layers.{layer}.{x}": self.caches.records(csa2, x, layer) for x in ("main", "index")}
                if csa2.topology.ratios[layer] > 1:
                    found[f"layers.{layer}.pool"] = self.caches.compressor(csa2, layer)
            found[f"layers.{layer}.ring"] = self.caches.records(csa2, "ring", layer)
        return found

    def reset(self, slot: int) -> None:
        """Nothing: a sequence reads no key and no group of positions that it has not written."""

    def _memory_rows(self, token_t: Tensor, past_bk: Tensor, step: Csa2Step) -> tuple[Tensor, Tensor]:
        """The rows of the memory tables that the tokens look up, and which of them are images: none."""
        class_v, cu = self.weights.class_v, step.cu_seqlens
        past_bi = torch.where(past_bk >= 0, class_v[past_bk.clamp(min=0)], self.pad_class).to(torch.int32)
        window_tw, image_t, _ = self.plan.op("engram.engram_window")(
            token_t.to(torch.int32),
            torch.zeros(len(token_t), dtype=torch.bool, device=token_t.device),
            cu,
            cu.diff(),
            past_bi,
            class_v,
            pad_class=self.pad_class,
            outside=OutsideVocabulary.REFUSE,
        )
        return self.plan.op("engram.engram_hash")(window_tw, image_t, layout=self.layout), image_t

    def _block(self, rows: _Rows, weights: V41BlockWeights, layer: int, tap: Tap) -> None:
        model, plan = self.model, self.plan
        if weights.memory is not None:
            which = model.engram.layers.index(layer)
            table = self.weights.tables[which]
            rows.stream_tnm = plan.op("engram.engram")(
                rows.stream_tnm, rows.row_ltz[which], *table, weights.memory, eps=model.norm_eps
            )
            tap("engram.stream", rows.stream_tnm)
        own = under("attn.", tap)
        x_tm, post_tn, comb_tnn = self._enter(rows, weights.attn_site, weights.attention.attn_norm_m, own)
        if self.csa2.topology.mode(layer) is LayerMode.FULL:  # entries are made of all rows
            plan.op("csa2.csa2_compress_")(
                x_tm, weights.attention, self.caches, rows.step, layer=layer, config=self.csa2
            )
        if self._truncates(layer, rows.step):
            kept_t, step = plan.op("csa2.csa2_compact")(rows.step, config=self.csa2)
            rows.keep(kept_t, step)
            x_tm, post_tn, comb_tnn = x_tm[kept_t], post_tn[kept_t], comb_tnn[kept_t]
        if layer in model.draft.target_layers:
            rows.heard.append((rows.stream_tnm, rows.row_t))
        y_tm = self._attention(x_tm, rows, weights, layer, own)
        own("out", y_tm)
        rows.stream_tnm = plan.op("mhc.mhc_post")(rows.stream_tnm, y_tm, post_tn, comb_tnn)
        tap("stream.attn", rows.stream_tnm)
        own = under("ffn.", tap)
        x_tm, post_tn, comb_tnn = self._enter(rows, weights.ffn_site, weights.ffn_norm_m, own)
        position_t, image_t = rows.step.positions_t, rows.image_t
        y_tm = feed_forward(x_tm, position_t, image_t, weights.ffn, config=self.ffn, plan=plan, tap=own)
        own("out", y_tm)
        rows.stream_tnm = plan.op("mhc.mhc_post")(rows.stream_tnm, y_tm, post_tn, comb_tnn)
        tap("stream.ffn", rows.stream_tnm)

    def _enter(self, rows: _Rows, site: MhcSite, norm_m: Tensor, tap: Tap) -> tuple[Tensor, Tensor, Tensor]:
        """What a sub-layer reads, normalised, and its coefficients; the next one reads with those computed here."""
        pre_tn, post_tn, comb_tnn = self.plan.op("mhc.mhc_mixes")(rows.stream_tnm, site, config=self.model.mhc)
        x_tm = self.plan.op("mhc.mhc_apply")(rows.pre_tn, rows.stream_tnm)
        for name, x in (("pre", pre_tn), ("post", post_tn), ("comb", comb_tnn), ("x", x_tm)):
            tap(name, x)
        rows.pre_tn = pre_tn
        x_tm = self._normed(x_tm, norm_m)
        tap("norm", x_tm)
        return x_tm, post_tn, comb_tnn

    def _normed(self, x_tm: Tensor, norm_m: Tensor) -> Tensor:
        eps, cast = self.model.norm_eps, WeightCast.AFTER_WEIGHT
        return self.plan.op("rms_norm.rms_norm")(x_tm, norm_m, eps=eps, cast=cast)

    def _truncates(self, layer: int, step: Csa2Step) -> bool:
        at_boundary = layer == self.csa2.topology.boundary
        return at_boundary and self.csa2.truncation is Truncation.COMPACT and not step.decode

    def _attention(self, x_tm: Tensor, rows: _Rows, weights: V41BlockWeights, layer: int, tap: Tap) -> Tensor:
        own, csa2, step = weights.attention, self.csa2, rows.step
        out_thd, idx_tk, blocks_tk = self.plan.op("csa2.csa2_attention_")(
            x_tm, own, self.caches, step, rows.carried, None, layer=layer, config=csa2
        )
        rows.carried = (idx_tk, blocks_tk)
        if layer in csa2.topology.index_sources:
            tap("picks", idx_tk)
        table_sr = self.caches.table(csa2, layer)
        return self.plan.op("csa2.csa2_output")(out_thd, own, table_sr, step.positions_t, config=csa2)

    def _rings(self, slot: int) -> list[tuple[Tensor, int]]:
        csa2 = self.csa2
        layers = csa2.topology.num_layers - csa2.topology.draft_layers
        if csa2.truncation is not Truncation.OFF:
            layers = csa2.topology.boundary
        rings = []
        for layer in range(layers):
            ring_pow = self.caches.records(csa2, "ring", layer)
            parts = ring_parts(ring_pow, slot, fmt=KV_FP8, layout=csa2.layout)
            rings += [(part, csa2.window) for part in parts]
        return rings
