"""The account of V4: window, CSA and HCA layers, mHC, experts in every layer, one draft block."""

from __future__ import annotations

from .account_terms import CacheTerm, Precision, Stored, Term, Work, shaped
from .presets import V4Config

CSA = 4  # the ratio whose blocks overlap and are picked by an indexer; larger ratios are dense


def terms_v4(config: V4Config) -> tuple[Term, ...]:
    """Every term, main model first (v3-v32-v4.md sections 1.3 and 10.4).

    The table of the hash layers is stored, but is no parameter. Norms are counted as bf16: their type on disk is not
    confirmed.
    """
    m, v, n, draft = config.hidden, config.vocab_size, config.mhc.streams, config.draft_layers
    ratios = config.attention.compress_ratios[: config.num_layers]
    learned = config.num_layers - config.hash_layers
    head = ((n, n * m), (n,), (1,))
    return (
        *_layers("main", config, config.num_layers),
        shaped("main", "router biases", Stored.FP32, ((config.router.num_experts,),), times=learned),
        *_compression(config, ratios),
        shaped("main", "embedding", Stored.BF16, ((v, m),)),
        shaped("main", "head", Stored.BF16, ((v, m),)),
        shaped("main", "final norm", Stored.BF16, ((m,),)),
        shaped("main", "mHC before the head", Stored.FP32, head),
        *_layers("draft", config, draft),
        shaped("draft", "router biases", Stored.FP32, ((config.router.num_experts,),), times=draft),
        shaped("draft", "projections of embedding and streams", Stored.FP8_BLOCKS, ((m, m), (m, m)), times=draft),
        shaped("draft", "norms of embedding, streams and head", Stored.BF16, ((3, m),), times=draft),
        shaped("draft", "mHC before the head", Stored.FP32, head, times=draft),
    )


def table_bytes_v4(config: V4Config) -> int:
    """Bytes of the hash layers' tables, which are no parameters."""
    return Stored.INT64.num_bytes(config.hash_layers * config.vocab_size * config.router.topk)


def activated_v4(config: V4Config) -> dict[str, int]:
    """Parameters of the main model that a token uses: everything but experts it is not sent to, and the embedding."""
    share = {"routed experts": (config.router.topk, config.router.num_experts), "embedding": (0, 1)}
    return {
        line.name: line.parameters * share.get(line.name, (1, 1))[0] // share.get(line.name, (1, 1))[1]
        for line in terms_v4(config)
        if line.part == "main"
    }


def cache_v4(config: V4Config) -> tuple[CacheTerm, ...]:
    """An entry for every block of a compressed layer, an FP4 index key beside it in CSA; windows and compressors.

    An entry is e4m3 with one scale for 64 channels and a padding byte, its rotated channels bf16.
    """
    a, rope = config.attention, config.rope_window.rope_dim
    nope, ratios = a.head_dim - rope, a.compress_ratios[: config.num_layers]
    record, index = nope + 2 * rope + nope // 64 + 1, a.index_dim // 2 + a.index_dim // 32
    found = []
    for ratio in sorted(set(ratios) - {0}):
        layers, is_csa = ratios.count(ratio), ratio == CSA
        entry, name = (record + index, "CSA") if is_csa else (record, "HCA")
        parts = f"({record} + {index})" if is_csa else f"{record}"
        found.append(
            CacheTerm(
                name=f"{name}, ratio {ratio}",
                formula=f"{layers}*{parts}/{ratio}",
                layers=layers,
                entry_bytes=entry,
                ratio=ratio,
            )
        )
        # logits and values in fp32 of the groups that a block pools: two where they overlap
        rows, widths = (2 * ratio, 2 * a.head_dim + 2 * a.index_dim) if is_csa else (ratio, a.head_dim)
        found.append(
            CacheTerm(
                name=f"{name} compressors",
                formula=f"{layers}*{rows}*2*{widths}*4",
                layers=layers,
                state_bytes=rows * 2 * widths * 4,
            )
        )
    window = CacheTerm(
        name="sliding windows",
        formula=f"{len(ratios)}*{a.window}*{record}",
        layers=len(ratios),
        state_bytes=a.window * record,
    )
    return (*found, window)


def work_v4(config: V4Config, context: int) -> tuple[Work, ...]:
    """One token that is decoded after `context` others."""
    a = config.attention
    ratios = a.compress_ratios[: config.num_layers]
    linear = sum(activated_v4(config).values())
    scored = ratios.count(CSA) * (context // CSA)
    attended = sum(_entries(ratio, context, a.index_topk) + min(context, a.window) for ratio in ratios)
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
            formula=f"2*{attended}*{a.num_heads}*{2 * a.head_dim}",
            flops=2 * attended * a.num_heads * 2 * a.head_dim,
            precision=Precision.BF16,
        ),
    )


def _entries(ratio: int, context: int, topk: int) -> int:
    """Blocks that a layer attends to."""
    if not ratio:
        return 0
    return min(context // ratio, topk) if ratio == CSA else context // ratio


def _layers(part: str, config: V4Config, layers: int) -> tuple[Term, ...]:
    m, f, e, a = config.hidden, config.expert_width, config.router.num_experts, config.attention
    heads, out, wide = a.num_heads * a.head_dim, a.o_groups * a.o_lora_rank, f * config.shared_experts
    matrices = ((a.q_lora_rank, m), (heads, a.q_lora_rank), (a.head_dim, m), (out, heads // a.o_groups), (m, out))
    mixes, streams = config.mhc.coefficients, config.mhc.streams
    site = ((mixes, streams * m), (mixes,), (3,))
    return (
        shaped(part, "attention", Stored.FP8_BLOCKS, matrices, times=layers),
        shaped(part, "sinks", Stored.FP32, ((a.num_heads,),), times=layers),
        shaped(part, "norms", Stored.BF16, ((a.q_lora_rank,), (a.head_dim,), (2, m)), times=layers),
        shaped(part, "mHC", Stored.FP32, site, times=2 * layers),
        shaped(part, "routed experts", Stored.MXFP4, ((f, m), (f, m), (m, f)), times=layers * e),
        shaped(part, "shared experts", Stored.FP8_BLOCKS, ((wide, m), (wide, m), (m, wide)), times=layers),
        shaped(part, "router", Stored.BF16, ((e, m),), times=layers),
    )


def _compression(config: V4Config, ratios: tuple[int, ...]) -> tuple[Term, ...]:
    """Compressors of all layers that have one, and the indexers of CSA layers with their own compressors."""
    m, a = config.hidden, config.attention
    d, i, found = a.head_dim, a.index_dim, []
    for ratio in sorted(set(ratios) - {0}):
        layers, series = ratios.count(ratio), 2 if ratio == CSA else 1
        kind = "CSA" if ratio == CSA else "HCA"
        found += [
            shaped("main", f"{kind} compressors", Stored.BF16, ((2, series * d, m), (d,)), times=layers),
            shaped("main", f"{kind} positions", Stored.FP32, ((ratio, series * d),), times=layers),
        ]
    layers, queries = ratios.count(CSA), a.index_heads * i
    found += [
        shaped("main", "indexer queries", Stored.FP8_BLOCKS, ((queries, a.q_lora_rank),), times=layers),
        shaped("main", "indexer weights", Stored.BF16, ((a.index_heads, m),), times=layers),
        shaped("main", "indexer compressors", Stored.BF16, ((2, 2 * i, m), (i,)), times=layers),
        shaped("main", "indexer positions", Stored.FP32, ((CSA, 2 * i),), times=layers),
    ]
    return tuple(found)
