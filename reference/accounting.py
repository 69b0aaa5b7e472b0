"""What a model weighs: every term of its parameters, in which format each is stored, and what one token uses.

A term is a product of sizes, written as the sum of matrices that the checkpoint stores. The bytes follow from the
format: packed e2m1 and e4m3 with UE8M0 scales of 1 x 32 or 32 x 32 values, bf16, fp32.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .presets import V41Config


class Stored(enum.Enum):
    """How a tensor lies in the checkpoint; one scale is one byte."""

    MXFP4 = "e2m1, 1x32"
    FP8_ROWS = "e4m3, 1x32"
    FP8_TILES = "e4m3, 32x32"
    BF16 = "bf16"
    FP32 = "fp32"

    def num_bytes(self, parameters: int) -> int:
        """Bytes of the values and their scales."""
        return {
            Stored.MXFP4: parameters // 2 + parameters // 32,
            Stored.FP8_ROWS: parameters + parameters // 32,
            Stored.FP8_TILES: parameters + parameters // 1024,
            Stored.BF16: parameters * 2,
            Stored.FP32: parameters * 4,
        }[self]


FORMATS = {
    "FP4": (Stored.MXFP4,),
    "FP8": (Stored.FP8_ROWS, Stored.FP8_TILES),
    "BF16": (Stored.BF16,),
    "F32": (Stored.FP32,),
}


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of the account: `formula` is how `parameters` came about."""

    part: str
    name: str
    formula: str
    parameters: int
    stored: Stored

    @property
    def num_bytes(self) -> int:
        """Bytes in the checkpoint, scales included."""
        return self.stored.num_bytes(self.parameters)


def account(config: V41Config) -> tuple[Term, ...]:
    """Every term of a model, backbone first.

    Math:
        the sum of the products that stand in the formulas.

    Source:
        v41-blocks.md sections 0.3 and 7
    """
    backbone = _block_terms("backbone", config, config.num_layers, config.moe.experts)
    draft = _block_terms("draft", config, config.draft.layers, config.draft.experts)
    sparse, whole = _compression_terms(config), _embedding_terms(config)
    return (*backbone, *sparse, *whole, *_engram_terms(config), *draft, *_draft_terms(config), *_vision_terms(config))


def totals(config: V41Config) -> tuple[Tensor, Tensor]:
    """Parameters of each format (FP4, FP8, BF16, F32), and the bytes of the checkpoint.

    Shapes:
        returns int64 [4] and [1].
    """
    terms = account(config)
    by_format = [sum(t.parameters for t in terms if t.stored in formats) for formats in FORMATS.values()]
    return torch.tensor(by_format), torch.tensor([sum(t.num_bytes for t in terms)])


def activated(config: V41Config) -> dict[str, dict[str, int]]:
    """Parameters that one token uses in decode and in prefill, item by item; norms and biases are left out.

    Edges:
        a prefill ends before the first layer of ratio 1, whose keys it computes. The publisher's own list of items is
        not known: these agree with its rounded claims.

    Source:
        v41-blocks.md section 7.3
    """
    m, moe, a = config.hidden, config.moe, config.attention
    layer = {
        "experts": (moe.topk + moe.shared_experts) * 3 * m * moe.width,
        "attention": _attention_matrices(config),
        "router": moe.experts * m,
        "mHC": 2 * config.mhc.coefficients * config.mhc.streams * m,
    }
    sources = {term.name: term.parameters for term in _compression_terms(config)}
    whole = {name: config.num_layers * count for name, count in layer.items()} | sources
    whole |= {"Engram wkv": _engram_projection(config), "head": config.vocab_size * m}
    encoder = a.compress_ratios.index(1)
    kv = [layer for layer in a.kv_source_layers if layer < encoder]
    index = [layer for layer in a.index_source_layers if layer < encoder]
    half = {name: encoder * count for name, count in layer.items()}
    half |= {term.name: term.parameters for term in _compression_terms(config, tuple(kv), tuple(index))}
    half |= {"Engram wkv": _engram_projection(config), "key projection of the decoder": a.head_dim * m}
    return {"decode": whole, "prefill": half}


def engram_bytes_per_token(config: V41Config) -> int:
    """Bytes of table rows that a token reads: codes and one scale byte for 32 of them."""
    row = Stored.FP8_ROWS.num_bytes(config.engram.head_dim)
    return len(config.engram.layers) * config.engram.rows_per_token * row


def _attention_matrices(config: V41Config) -> int:
    m, a = config.hidden, config.attention
    heads, out = a.num_heads * a.head_dim, a.o_groups * a.o_lora_rank
    return a.q_lora_rank * m + heads * a.q_lora_rank + a.head_dim * m + out * (heads // a.o_groups) + m * out


def _block_terms(part: str, config: V41Config, blocks: int, experts: int) -> list[Term]:
    m, f, a, mhc = config.hidden, config.moe.width, config.attention, config.mhc
    heads, out, shared = a.num_heads * a.head_dim, a.o_groups * a.o_lora_rank, config.moe.shared_experts
    q, d, n = a.q_lora_rank, a.head_dim, mhc.streams
    matrices = f"{q}*{m} + {heads}*{q} + {d}*{m} + {out}*{heads // a.o_groups} + {m}*{out}"
    site = mhc.coefficients * n * m + mhc.coefficients + 3
    term = partial(_term, part)
    return [
        term("routed experts", f"{blocks}*{experts}*3*{m}*{f}", blocks * experts * 3 * m * f, Stored.MXFP4),
        term("shared experts", f"{blocks}*{shared}*3*{m}*{f}", blocks * shared * 3 * m * f, Stored.FP8_TILES),
        term("router", f"{blocks}*{experts}*{m}", blocks * experts * m, Stored.BF16),
        term("router biases, text and image", f"{blocks}*2*{experts}", blocks * 2 * experts, Stored.FP32),
        term("attention", f"{blocks}*({matrices})", blocks * _attention_matrices(config), Stored.FP8_TILES),
        term("sinks", f"{blocks}*{a.num_heads}", blocks * a.num_heads, Stored.FP32),
        term("norms", f"{blocks}*({q} + {d} + 2*{m})", blocks * (q + d + 2 * m), Stored.BF16),
        term(
            "mHC", f"{blocks}*2*({mhc.coefficients}*{n * m} + {mhc.coefficients} + 3)", blocks * 2 * site, Stored.FP32
        ),
    ]


def _compression_terms(
    config: V41Config, kv: tuple[int, ...] | None = None, index: tuple[int, ...] | None = None
) -> list[Term]:
    """Compressors and indexers of the layers that own one, or of the named layers alone."""
    m, a = config.hidden, config.attention
    kv = a.kv_source_layers if kv is None else kv
    index = a.index_source_layers if index is None else index
    pooled = sum(a.compress_ratios[layer] > 1 for layer in kv)
    single, d, i = len(kv) - pooled, a.head_dim, a.index_dim
    queries, weights, term = a.index_heads * i * a.q_lora_rank, a.index_heads * m, partial(_term, "backbone")
    compressor = f"{pooled}*(2*{d}*{m} + {d}) + {single}*({d}*{m} + {d})"
    size = pooled * (2 * d * m + d) + single * (d * m + d)
    heads_and_keys = f"{len(index)}*{a.index_heads}*{m} + {len(kv)}*({i}*{d} + {i})"
    return [
        term("compressor", compressor, size, Stored.BF16),
        term(
            "indexer queries",
            f"{len(index)}*{a.index_heads * i}*{a.q_lora_rank}",
            len(index) * queries,
            Stored.FP8_TILES,
        ),
        term("indexer weights and keys", heads_and_keys, len(index) * weights + len(kv) * (i * d + i), Stored.BF16),
    ]


def _embedding_terms(config: V41Config) -> list[Term]:
    m, term = config.hidden, partial(_term, "backbone")
    return [
        term("final norm", f"{m}", m, Stored.BF16),
        term("embedding and head", f"2*{config.vocab_size}*{m}", 2 * config.vocab_size * m, Stored.BF16),
    ]


def _engram_projection(config: V41Config) -> int:
    """Keys for every stream and one value, from all rows of a token; all Engram layers."""
    e = config.engram
    return len(e.layers) * (config.mhc.streams + 1) * config.hidden * e.rows_per_token * e.head_dim


def _engram_terms(config: V41Config) -> list[Term]:
    e, n, m, term = config.engram, config.mhc.streams, config.hidden, partial(_term, "Engram")
    rows, layers = sum(e.table_rows), len(e.layers)
    wkv = f"{layers}*{(n + 1) * m}*{e.rows_per_token * e.head_dim}"
    return [
        term("tables", f"({' + '.join(map(str, e.table_rows))})*{e.head_dim}", rows * e.head_dim, Stored.FP8_ROWS),
        term("wkv", wkv, _engram_projection(config), Stored.FP8_TILES),
        term("query and key norms", f"{layers}*2*{n}*{m}", layers * 2 * n * m, Stored.BF16),
    ]


def _draft_terms(config: V41Config) -> list[Term]:
    m, v, r, term = config.hidden, config.vocab_size, config.draft.markov_rank, partial(_term, "draft")
    targets = len(config.draft.target_layers)
    return [
        term("target projection", f"{m}*{targets * m}", m * targets * m, Stored.FP8_TILES),
        term("Markov head", f"2*{v}*{r}", 2 * v * r, Stored.BF16),
        term("confidence head", f"{m} + {r}", m + r, Stored.BF16),
        term("target and final norm", f"2*{m}", 2 * m, Stored.BF16),
    ]


def _vision_terms(config: V41Config) -> list[Term]:
    s, m, term = config.vision, config.hidden, partial(_term, "vision")
    d, f, patch, joined = s.hidden, s.width, 3 * s.patch**2, s.hidden * s.downsample**2
    block, text = (
        2 * d + 3 * d * d + 3 * d + d * d + d + 3 * f * d,
        f"2*{d} + 3*{d}*{d} + 3*{d} + {d}*{d} + {d} + 3*{f}*{d}",
    )
    tower = d * patch + d + s.layers * block + d
    return [
        term("tower", f"{d}*{patch} + {d} + {s.layers}*({text}) + {d}", tower, Stored.BF16),
        term("aligner", f"{m}*{joined} + {m} + {m}*{m} + {m}", m * joined + m + m * m + m, Stored.BF16),
        term("image tokens", f"3*{m}", 3 * m, Stored.BF16),
    ]


def _term(part: str, name: str, formula: str, parameters: int, stored: Stored) -> Term:
    return Term(part=part, name=name, formula=formula, parameters=parameters, stored=stored)
