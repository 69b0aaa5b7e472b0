"""Steps of V4 over pages and states: compressed entries and index keys in pages, windows and open groups in states."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deeptwin.reference.block_weights import V4BlockWeights
from deeptwin.reference.config import PageLayout, V4AttnConfig, V4Kind, WeightCast
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.model_weights import V4Model
from deeptwin.reference.presets import V4Config
from deeptwin.reference.taps import Tap, ignore, under
from deeptwin.reference.v4_state import V4Caches, v4_caches
from deeptwin.reference.weights import MhcSite

from .plan import Plan
from .steps import Forward, bytes_of, expect_rows, fill_with
from .steps_ffn import feed_forward
from .steps_state import load_rows, ring_parts, save_rows

PAGED = ("main", "index")  # parts of a layer's caches that pages hold; states hold the others


def v4_enter_step(
    stream_tnm: Tensor,
    site: MhcSite,
    norm_m: Tensor,
    *,
    config: V4Config,
    plan: Plan,
    tap: Tap = ignore,
) -> tuple[Tensor, Tensor, Tensor]:
    """Begin a sub-layer: what it reads, normalised, and the `post` and `comb` that its output waits for."""
    pre_tn, post_tn, comb_tnn = plan.op("mhc.mhc_mixes")(stream_tnm, site, config=config.mhc)
    x_tm = plan.op("mhc.mhc_apply")(pre_tn, stream_tnm)
    for name, x in (("pre", pre_tn), ("post", post_tn), ("comb", comb_tnn), ("x", x_tm)):
        tap(name, x)
    x_tm = plan.op("rms_norm.rms_norm")(x_tm, norm_m, eps=config.norm_eps, cast=WeightCast.AFTER_WEIGHT)
    tap("norm", x_tm)
    return x_tm, post_tn, comb_tnn


def v4_block_step_(
    stream_tnm: Tensor,
    token_t: Tensor,
    weights: V4BlockWeights,
    table_sr: Tensor,
    caches: V4Caches,
    step: Csa2Step,
    *,
    config: V4Config,
    attn: V4AttnConfig,
    plan: Plan,
    tap: Tap = ignore,
) -> Tensor:
    """One block over the rows of a step, in place in its caches; as `reference.block.block_v4`."""
    own = under("attn.", tap)
    x_tm, post_tn, comb_tnn = v4_enter_step(
        stream_tnm, weights.attn_site, weights.attn_norm_m, config=config, plan=plan, tap=own
    )
    if attn.kind is V4Kind.CSA:
        y_tm = plan.op("csa.csa_step_")(x_tm, weights.attention, table_sr, caches, step, None, config=attn)
    else:
        y_tm = plan.op("hca.hca_step_")(x_tm, weights.attention, table_sr, caches, step, config=attn)
    own("out", y_tm)
    stream_tnm = plan.op("mhc.mhc_post")(stream_tnm, y_tm, post_tn, comb_tnn)
    tap("stream.attn", stream_tnm)
    own = under("ffn.", tap)
    x_tm, post_tn, comb_tnn = v4_enter_step(
        stream_tnm, weights.ffn_site, weights.ffn_norm_m, config=config, plan=plan, tap=own
    )
    y_tm = feed_forward(x_tm, token_t, None, weights.ffn, config=config.ffn, plan=plan, tap=own)
    own("out", y_tm)
    stream_tnm = plan.op("mhc.mhc_post")(stream_tnm, y_tm, post_tn, comb_tnn)
    tap("stream.ffn", stream_tnm)
    return stream_tnm


def v4_head_step(
    stream_tnm: Tensor, site: MhcSite, norm_m: Tensor, *, config: V4Config, plan: Plan, tap: Tap = ignore
) -> Tensor:
    """What the output head reads: the streams through a site of their own, normalised."""
    x_tm = plan.op("mhc.mhc_head")(stream_tnm, site, config=config.mhc)
    tap("x", x_tm)
    x_tm = plan.op("rms_norm.rms_norm")(x_tm, norm_m, eps=config.norm_eps, cast=WeightCast.AFTER_WEIGHT)
    tap("norm", x_tm)
    return x_tm


def v4_rings(caches: V4Caches, slot: int, config: V4AttnConfig) -> list[tuple[Tensor, int]]:
    """The rings of a layer in one state, and of how many positions before a group's end a sequence needs the rows.

    The open group of a compressor is empty there; with overlap the next entry pools the group before too.
    """
    assert config.cache is not None
    parts = ring_parts(caches.ring_pow, slot, fmt=config.cache, layout=PageLayout.SECTIONED)
    rings = [(part, config.window) for part in parts]
    if config.kind is V4Kind.CSA:
        carried = config.compressor.span - config.ratio
        rings += [(pool[slot], carried) for pool in (caches.pool, caches.index_pool) if pool is not None]
    return rings


class V4Runner:
    """A model of V4 over its pages and states."""

    history = 0

    def __init__(
        self,
        config: V4Config,
        weights: V4Model,
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
            ValueError: page_tokens is no multiple of every ratio, or caches are not quantised.
        """
        self.config, self.weights, self.plan = config, weights, plan
        self.vocab, self.page_tokens = config.vocab_size, page_tokens
        self.attn = [
            replace(config.attn(layer), page_tokens=page_tokens, backtracking=backtracking)
            for layer in range(config.num_layers)
        ]
        table_of = plan.op("rope.table_of")
        tables = {rope: table_of(rope, positions).to(device) for rope in {attn.rope for attn in self.attn}}
        self.tables = [tables[attn.rope] for attn in self.attn]
        self.caches = [v4_caches(attn, pages=pages, states=states, device=device) for attn in self.attn]

    def forward(self, token_t: Tensor, past_bk: Tensor, step: Csa2Step, *, tap: Tap = ignore) -> Forward:
        """Advance every sequence of `step` by its rows, and write what they leave into pages and states.

        Raises:
            ValueError: there is not one token for each row, a token lies outside the vocabulary, or a position beyond
                the angle table.
        """
        config = self.config
        expect_rows(token_t, past_bk, step, vocab=self.vocab, history=self.history, positions=len(self.tables[0]))
        embed_tm = self.weights.embed_vm[token_t]
        tap("embed", embed_tm)
        stream_tnm, _ = self.plan.op("mhc.mhc_expand")(embed_tm, config=config.mhc)
        for layer, weights in enumerate(self.weights.layers):
            stream_tnm = v4_block_step_(
                stream_tnm,
                token_t,
                weights,
                self.tables[layer],
                self.caches[layer],
                step,
                config=config,
                attn=self.attn[layer],
                plan=self.plan,
                tap=under(f"layers.{layer}.", tap),
            )
        own, ends = under("head.", tap), (self.weights.site, self.weights.norm_m)
        x_tm = v4_head_step(stream_tnm, *ends, config=config, plan=self.plan, tap=own)
        row_t = torch.arange(len(token_t), device=token_t.device)
        return Forward(row_t=row_t, hidden_ym=x_tm, features=(stream_tnm,))

    def head(self, hidden_ym: Tensor) -> Tensor:
        """Logits, fp32 [y, v]."""
        return self.plan.op("linear.linear")(hidden_ym, self.weights.head_vm, dtype=torch.float32)

    def snapshot(self, slot: int, end: int) -> bytes:
        """The windows before token `end`, the end of a page, and the groups that the next entries overlap."""
        return save_rows(self._rings(slot), end)

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """Put a snapshot into a state.

        Raises:
            ValueError: the payload has another length.
        """
        load_rows(self._rings(slot), end, payload)

    def page_bytes(self, page: int) -> bytes:
        """What a page of all layers holds."""
        return bytes_of(self._page(page))

    def load_page(self, page: int, payload: bytes) -> None:
        """Fill a page with what `page_bytes` gave.

        Raises:
            ValueError: the payload has another length.
        """
        fill_with(payload, self._page(page))

    def cache_views(self) -> dict[str, Tensor]:
        """Pages `layers.0.main`, `layers.0.index`; states `layers.0.ring`, `layers.0.pool`, `layers.0.index_pool`."""
        named = ((layer, caches.parts()) for layer, caches in enumerate(self.caches))
        return {f"layers.{layer}.{name.removesuffix('_pow')}": x for layer, parts in named for name, x in parts.items()}

    def reset(self, slot: int) -> None:
        """Nothing: a sequence reads no key and no group of positions that it has not written."""

    def _page(self, page: int) -> list[Tensor]:
        return [x[page] for name, x in self.cache_views().items() if name.rpartition(".")[2] in PAGED]

    def _rings(self, slot: int) -> list[tuple[Tensor, int]]:
        layers = zip(self.caches, self.attn, strict=True)
        return [ring for caches, attn in layers for ring in v4_rings(caches, slot, attn)]
