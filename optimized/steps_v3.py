"""Steps of V3 and V3.2 over pages. Nothing but pages is kept of a sequence: a latent row for each of its tokens, and an
index key in V3.2."""

from __future__ import annotations

import torch
from torch import Tensor

from deeptwin.reference.block_weights import V3BlockWeights
from deeptwin.reference.config import ResidualNorm
from deeptwin.reference.csa2_state import Csa2Step
from deeptwin.reference.dsa_state import DsaCaches, DsaWeights
from deeptwin.reference.model_weights import V3Model
from deeptwin.reference.presets import V3Config
from deeptwin.reference.taps import Tap, ignore, under

from .plan import Plan
from .steps import Forward, bytes_of, expect_rows, fill_with
from .steps_ffn import feed_forward

V3Cache = Tensor | DsaCaches


def v3_cache(config: V3Config, *, pages: int, page_tokens: int, device: torch.device | str = "cpu") -> V3Cache:
    """The pages of one layer, all zero: bf16 rows, or the records of V3.2.

    Raises:
        ValueError: latents or index keys of V3.2 are no records.
    """
    if config.index is None:
        return torch.zeros(pages, page_tokens, config.attention.latent_dim, dtype=torch.bfloat16, device=device)
    latent, key = config.index.latent, config.index.key
    if latent is None or key is None:
        raise ValueError(f"config: expected records of latents and index keys, got {latent}, {key}")

    def records(width: int) -> Tensor:
        return torch.zeros(pages, page_tokens, width, dtype=torch.uint8, device=device)

    return DsaCaches(latent_pow=records(latent.record_bytes), index_pow=records(key.record_bytes))


def v3_cache_parts(cache: V3Cache) -> dict[str, Tensor]:
    """The tensors of a layer's cache by name."""
    if isinstance(cache, Tensor):
        return {"latent": cache}
    return {"latent": cache.latent_pow, "index": cache.index_pow}


def v3_enter_step(
    h_tm: Tensor, y_tm: Tensor, norm_m: Tensor, *, config: V3Config, plan: Plan, tap: Tap = ignore
) -> tuple[Tensor, Tensor]:
    """Add the output that waits, and normalise: what passes by, and what the sub-layer or the head reads."""
    sum_tm = h_tm.float() + y_tm.float()
    h_tm = sum_tm.to(torch.bfloat16)
    x_tm = h_tm if config.residual is ResidualNorm.ROUNDED else sum_tm
    tap("x", x_tm)
    cast = config.attention.weight_cast
    x_tm = plan.op("rms_norm.rms_norm")(x_tm, norm_m, eps=config.norm_eps, cast=cast)
    tap("norm", x_tm)
    return h_tm, x_tm


def v3_block_step_(
    h_tm: Tensor,
    y_tm: Tensor,
    weights: V3BlockWeights,
    table_sr: Tensor,
    cache: V3Cache,
    step: Csa2Step,
    *,
    config: V3Config,
    plan: Plan,
    tap: Tap = ignore,
) -> tuple[Tensor, Tensor]:
    """One block over the rows of a step, in place in its cache; as `reference.block.block_v3`."""
    own = under("attn.", tap)
    h_tm, x_tm = v3_enter_step(h_tm, y_tm, weights.attn_norm_m, config=config, plan=plan, tap=own)
    if isinstance(weights.attention, DsaWeights):
        a_tm = plan.op("dsa.dsa_step_")(x_tm, weights.attention, table_sr, cache, step, config=config.dsa)
    else:
        a_tm = plan.op("mla.mla_step_")(x_tm, weights.attention, table_sr, cache, step, config=config.attention)
    own("out", a_tm)
    own = under("ffn.", tap)
    h_tm, x_tm = v3_enter_step(h_tm, a_tm, weights.ffn_norm_m, config=config, plan=plan, tap=own)
    tap("stream.attn", h_tm)
    y_tm = feed_forward(x_tm, step.positions_t, None, weights.ffn, config=config.ffn, plan=plan, tap=own)
    own("out", y_tm)
    return h_tm, y_tm


class V3Runner:
    """A model of V3 or V3.2 over its pages."""

    history = 0

    def __init__(
        self,
        config: V3Config,
        weights: V3Model,
        plan: Plan,
        *,
        pages: int,
        page_tokens: int,
        positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Empty pages, and the angles of so many positions."""
        self.config, self.weights, self.plan = config, weights, plan
        self.vocab, self.page_tokens = config.vocab_size, page_tokens
        self.table_sr = plan.op("rope.table_of")(config.attention.rope, positions).to(device)
        self.caches = [
            v3_cache(config, pages=pages, page_tokens=page_tokens, device=device) for _ in range(config.num_layers)
        ]

    def forward(self, token_t: Tensor, past_bk: Tensor, step: Csa2Step, *, tap: Tap = ignore) -> Forward:
        """Advance every sequence of `step` by its rows, and write what they leave into the pages.

        Raises:
            ValueError: there is not one token for each row, a token lies outside the vocabulary, or a position beyond
                the angle table.
        """
        expect_rows(token_t, past_bk, step, vocab=self.vocab, history=self.history, positions=len(self.table_sr))
        h_tm = self.weights.embed_vm[token_t]
        tap("embed", h_tm)
        y_tm = torch.zeros_like(h_tm)
        for layer, (weights, cache) in enumerate(zip(self.weights.layers, self.caches, strict=True)):
            own = under(f"layers.{layer}.", tap)
            h_tm, y_tm = v3_block_step_(
                h_tm, y_tm, weights, self.table_sr, cache, step, config=self.config, plan=self.plan, tap=own
            )
        own = under("head.", tap)
        _, x_tm = v3_enter_step(h_tm, y_tm, self.weights.norm_m, config=self.config, plan=self.plan, tap=own)
        return Forward(row_t=torch.arange(len(token_t), device=token_t.device), hidden_ym=x_tm, features=())

    def head(self, hidden_ym: Tensor) -> Tensor:
        """Logits, fp32 [y, v]."""
        return self.plan.op("linear.linear")(hidden_ym, self.weights.head_vm, dtype=torch.float32)

    def snapshot(self, slot: int, end: int) -> bytes:
        """Nothing: pages hold everything."""
        return b""

    def restore(self, slot: int, end: int, payload: bytes) -> None:
        """Nothing, as `snapshot`.

        Raises:
            ValueError: the payload is not empty.
        """
        if payload:
            raise ValueError(f"payload: expected none, got {len(payload)} bytes")

    def page_bytes(self, page: int) -> bytes:
        """What a page of all layers holds."""
        return bytes_of([x[page] for x in self.cache_views().values()])

    def load_page(self, page: int, payload: bytes) -> None:
        """Fill a page with what `page_bytes` gave.

        Raises:
            ValueError: the payload has another length.
        """
        fill_with(payload, [x[page] for x in self.cache_views().values()])

    def cache_views(self) -> dict[str, Tensor]:
        """Pages of every layer: `layers.0.latent` and, in V3.2, `layers.0.index`."""
        named = ((layer, v3_cache_parts(cache)) for layer, cache in enumerate(self.caches))
        return {f"layers.{layer}.{name}": x for layer, parts in named for name, x in parts.items()}

    def reset(self, slot: int) -> None:
        """Nothing is kept in a state."""
