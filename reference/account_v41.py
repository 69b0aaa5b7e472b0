"""The account of V4.1: CSA2, experts, mHC, Engram, draft blocks, vision."""

from __future__ import annotations

from functools import partial

from .account_terms import CacheTerm, Precision, Stored, Term, Work, line
from .presets import V41Config


def terms_v41(config: V41Config) -> tuple[Term, ...]:
    """Every term, backbone first (v41-blocks.md sections 0.3 and 7)."""
    backbone = _block_terms("backbone", config, config.num_layers, config.moe.experts)
    draft = _block_terms("draft", config, config.draft.layers, config.draft.experts)
    sparse, whole = _compression_terms(config), _embedding_terms(config)
    return (*backbone, *sparse, *whole, *_engram_terms(config), *draft, *_draft_terms(config), *_vision_terms(config))


def activated_v41(config: V41Config) -> dict[str, dict[str, int]]:
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


def cache_v41(config: V41Config) -> tuple[CacheTerm, ...]:
    """What the owners of caches write for a token, and the rings of all layers.

    The rings of a sliding window and of the pooled layers hold what `window` and the compressor need in plain decode;
    a deployment adds the tokens that a step may take back.
    """
    a = config.attention
    main, index = a.head_dim // 2 + a.head_dim // 16, a.index_dim // 2 + a.index_dim // 32
    record = a.head_dim + a.head_dim // 32
    found = [
        CacheTerm(
            name=f"main and index entries, ratio {ratio}",
            formula=f"{len(owners)}*({main} + {index})/{ratio}",
            layers=len(owners),
            entry_bytes=main + index,
            ratio=ratio,
        )
        for ratio in sorted(set(a.compress_ratios) - {0}, reverse=True)
        if (owners := [layer for layer in a.kv_source_layers if a.compress_ratios[layer] == ratio])
    ]
    layers, pooled = len(a.compress_ratios), [i for i in a.kv_source_layers if a.compress_ratios[i] > 1]
    ring = CacheTerm(
        name="sliding windows", formula=f"{layers}*{a.window}*{record}", layers=layers, state_bytes=a.window * record
    )
    rows = [a.compress_ratios[i] - 1 for i in pooled]
    state = CacheTerm(
        name="compressor rows",
        formula=f"{sum(rows)}*2*{a.head_dim}*4",
        layers=1,
        state_bytes=sum(rows) * 8 * a.head_dim,
    )
    return (*found, ring, state)


def work_v41(config: V41Config, context: int) -> tuple[Work, ...]:
    """One token that is decoded after `context` others; every index source behind the candidates scores those alone."""
    a = config.attention
    linear = sum(activated_v41(config)["decode"].values())
    kept = a.candidate_topk_blocks * a.candidate_block_size
    scored = attended = 0
    for layer, ratio in enumerate(a.compress_ratios[: config.num_layers]):
        entries = context // ratio if ratio else 0
        if layer in a.index_source_layers:
            scored += min(entries, kept) if layer > a.candidate_source_layer else entries
        attended += min(entries, a.index_topk) + min(context, a.window)
    heads, width = a.num_heads, 2 * a.head_dim
    return (
        Work(name="linear", formula=f"2*{linear}", flops=2 * linear, precision=Precision.FP8),
        Work(
            name="indexer",
            formula=f"2*{scored}*{a.index_heads}*{a.index_dim}",
            flops=2 * scored * a.index_heads * a.index_dim,
            precision=Precision.FP4,
        ),
        Work(
            name="core",
            formula=f"2*{attended}*{heads}*{width}",
            flops=2 * attended * heads * width,
            precision=Precision.BF16,
        ),
    )


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
    term = partial(line, part)
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
    queries, weights, term = a.index_heads * i * a.q_lora_rank, a.index_heads * m, partial(line, "backbone")
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
    m, term = config.hidden, partial(line, "backbone")
    return [
        term("final norm", f"{m}", m, Stored.BF16),
        term("embedding and head", f"2*{config.vocab_size}*{m}", 2 * config.vocab_size * m, Stored.BF16),
    ]


def _engram_projection(config: V41Config) -> int:
    """Keys for every stream and one value, from all rows of a token; all Engram layers."""
    e = config.engram
    return len(e.layers) * (config.mhc.streams + 1) * config.hidden * e.rows_per_token * e.head_dim


def _engram_terms(config: V41Config) -> list[Term]:
    e, n, m, term = config.engram, config.mhc.streams, config.hidden, partial(line, "Engram")
    rows, layers = sum(e.table_rows), len(e.layers)
    wkv = f"{layers}*{(n + 1) * m}*{e.rows_per_token * e.head_dim}"
    return [
        term("tables", f"({' + '.join(map(str, e.table_rows))})*{e.head_dim}", rows * e.head_dim, Stored.FP8_ROWS),
        term("wkv", wkv, _engram_projection(config), Stored.FP8_TILES),
        term("query and key norms", f"{layers}*2*{n}*{m}", layers * 2 * n * m, Stored.BF16),
    ]


def _draft_terms(config: V41Config) -> list[Term]:
    m, v, r, term = config.hidden, config.vocab_size, config.draft.markov_rank, partial(line, "draft")
    targets = len(config.draft.target_layers)
    return [
        term("target projection", f"{m}*{targets * m}", m * targets * m, Stored.FP8_TILES),
        term("Markov head", f"2*{v}*{r}", 2 * v * r, Stored.BF16),
        term("confidence head", f"{m} + {r}", m + r, Stored.BF16),
        term("target and final norm", f"2*{m}", 2 * m, Stored.BF16),
    ]


def _vision_terms(config: V41Config) -> list[Term]:
    s, m, term = config.vision, config.hidden, partial(line, "vision")
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
