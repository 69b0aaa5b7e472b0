"""What a model weighs and costs: parameters, their bytes, caches and work of one token, term by term.

A term is a product of sizes, written as the sum of tensors that the checkpoint stores, of records that a token writes,
or of products that a token needs. Nothing is measured or typed in: every number follows from the configuration. What
has been published about the released models stands beside it in `account_claims`.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from .account_terms import FORMATS, CacheTerm, Term, Work
from .account_v3 import activated_v3, cache_v3, terms_v3, work_v3
from .account_v4 import activated_v4, cache_v4, table_bytes_v4, terms_v4, work_v4
from .account_v41 import activated_v41, cache_v41, terms_v41, work_v41
from .presets import ModelConfig, V3Config, V4Config


def account(config: ModelConfig) -> tuple[Term, ...]:
    """Every term of a model, the main model first.

    Math:
        the sum of the products that stand in the formulas.

    Source:
        v3-v32-v4.md section 1.3, v41-blocks.md sections 0.3 and 7
    """
    if isinstance(config, V3Config):
        return terms_v3(config)
    return terms_v4(config) if isinstance(config, V4Config) else terms_v41(config)


def totals(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Parameters of each format (FP4, FP8, BF16, F32), and the bytes of the checkpoint.

    Shapes:
        returns int64 [4] and [1].

    Edges:
        copies of embedding and head that a draft module is published with are stored and counted. The expert table of
        V4's hash layers is stored, but is no parameter.
    """
    terms = account(config)
    by_format = [sum(t.parameters for t in terms if t.stored in formats) for formats in FORMATS.values()]
    tables = table_bytes_v4(config) if isinstance(config, V4Config) else 0
    return torch.tensor(by_format), torch.tensor([sum(t.num_bytes for t in terms) + tables])


def activated(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Parameters that one token uses, item by item, by phase of the work.

    Edges:
        V3 and V4: all of the main model but the experts that a token is not sent to, and the embedding, of which it
        reads a row; decode and prefill use the same. V4.1: matrices alone (norms, biases and sinks are left out); a
        prefill ends before the first layer of ratio 1, whose keys it computes. The publisher's own list of items is
        not known: these agree with its rounded claims.

    Source:
        v3-v32-v4.md section 1.3, v41-blocks.md section 7.3
    """
    if isinstance(config, V3Config):
        return {"decode": activated_v3(config)}
    return {"decode": activated_v4(config)} if isinstance(config, V4Config) else activated_v41(config)


def engram_bytes_per_token(config: ModelConfig) -> int:
    """Bytes of table rows that a token reads: codes and one scale byte for 32 of them; 0 without Engram."""
    if isinstance(config, V3Config | V4Config):
        return 0
    row = FORMATS["FP8"][0].num_bytes(config.engram.head_dim)
    return len(config.engram.layers) * config.engram.rows_per_token * row


def caches(config: ModelConfig) -> tuple[CacheTerm, ...]:
    """What a sequence stores in the main model: records that grow with it, and what stays as large as it is.

    Source:
        v3-v32-v4.md section 1.4, v41-attention.md section 7
    """
    if isinstance(config, V3Config):
        return cache_v3(config)
    return cache_v4(config) if isinstance(config, V4Config) else cache_v41(config)


def cache_bytes_per_token(config: ModelConfig) -> Fraction:
    """Bytes that a token adds to the caches, on average over a group."""
    return sum((part.per_token for part in caches(config)), Fraction())


def sequence_bytes(config: ModelConfig, *, context: int) -> Tensor:
    """Bytes of a sequence of `context` tokens: records that grow with it, and states that do not.

    Shapes:
        returns int64 [2].

    Edges:
        a group that is not full has no record yet. States have the size for plain decode; a deployment adds the tokens
        that a step may take back.

    Raises:
        ValueError: context is negative.
    """
    if context < 0:
        raise ValueError(f"context: expected 0 or more, got {context}")
    whole = sum(part.at(context) for part in caches(config))
    states = sum(part.layers * part.state_bytes for part in caches(config))
    return torch.tensor([whole - states, states])


def work(config: ModelConfig, *, context: int) -> tuple[Work, ...]:
    """What one token costs that is decoded after `context` others: linear layers, index scores, attention.

    Math:
        linear 2 * activated parameters; indexer 2 * scored entries * heads * width; core 2 * attended entries * heads
        * (key width + value width), with absorbed attention in V3. In equivalent FP8 operations bf16 counts twice and
        FP4 half.

    Raises:
        ValueError: context is negative.

    Source:
        v3-v32-v4.md section 1.5
    """
    if context < 0:
        raise ValueError(f"context: expected 0 or more, got {context}")
    if isinstance(config, V3Config):
        return work_v3(config, context)
    return work_v4(config, context) if isinstance(config, V4Config) else work_v41(config, context)


def flops(config: ModelConfig, *, context: int) -> Tensor:
    """Operations of one decoded token: linear layers, index scores, attention, and twice their sum in FP8 units.

    Shapes:
        returns int64 [4]; no indexer counts 0. Twice, because half an operation is a unit.

    Raises:
        ValueError: context is negative.
    """
    parts = work(config, context=context)
    by_name = [sum(part.flops for part in parts if part.name == name) for name in ("linear", "indexer", "core")]
    return torch.tensor([*by_name, int(2 * sum(part.equivalent for part in parts))])
