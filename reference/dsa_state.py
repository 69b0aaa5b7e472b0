"""Containers of DeepSeek sparse attention: the weights of a block, and what tokens leave in its caches.

Nothing here computes: tensors are taken, viewed and joined, so the fast path may use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .checks import expect_shape
from .config import DsaConfig
from .weights import Latents, MlaWeights, _take


@dataclass(frozen=True, kw_only=True, eq=False)
class DsaWeights:
    """Weights of one block: latent attention, and the indexer's own projections."""

    mla: MlaWeights
    w_qb_hda: Tensor  # index queries from the query latent
    w_k_dm: Tensor
    k_norm_d: Tensor  # of a layer norm, which has a bias too
    k_bias_d: Tensor
    w_head_hm: Tensor  # fp32: the signed weight of every index head

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], *, prefix: str, config: DsaConfig) -> DsaWeights:
        """Take `prefix + "indexer.wq_b.weight"` and so on, and those of `MlaWeights` (names of transformers V3.2).

        Raises:
            ValueError: a name is missing, or a shape is not the one of `config`.
        """
        h, d, m, a = config.index_heads, config.index_dim, config.mla.hidden, config.mla.q_lora_rank
        take = partial(_take, state, prefix)
        return cls(
            mla=MlaWeights.from_state_dict(state, prefix=prefix, config=config.mla),
            w_qb_hda=take("indexer.wq_b.weight", h * d, a).view(h, d, a),
            w_k_dm=take("indexer.wk.weight", d, m),
            k_norm_d=take("indexer.k_norm.weight", d),
            k_bias_d=take("indexer.k_norm.bias", d),
            w_head_hm=take("indexer.weights_proj.weight", h, m),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DsaState:
    """What tokens leave behind: latent rows (as a cache gives them back), index keys, and the scale of each key."""

    latents: Latents
    key_sd: Tensor  # e4m3 codes, or rows where nothing is quantised
    key_sf_s: Tensor  # fp32; ones where nothing is quantised

    def then(self, later: DsaState) -> DsaState:
        """These entries followed by later ones.

        Raises:
            ValueError: rows or keys differ in width.
        """
        expect_shape("key_sd", self.key_sd, "sd", {"d": later.key_sd.shape[1]})
        return DsaState(
            latents=self.latents.then(later.latents),
            key_sd=torch.cat([self.key_sd, later.key_sd]),
            key_sf_s=torch.cat([self.key_sf_s, later.key_sf_s]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DsaCaches:
    """The pages of one layer: what attention reads of a token, and what the selection reads of it."""

    latent_pow: Tensor  # uint8 [pages, tokens, bytes of a latent record], interleaved
    index_pow: Tensor  # uint8 [pages, tokens, bytes of an index key], sectioned
