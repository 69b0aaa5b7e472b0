"""The account of V3 and V3.2: latent attention, an indexer in V3.2, dense layers, experts, one draft module."""

from __future__ import annotations

from .account_terms import CacheTerm, Precision, Stored, Term, Work, shaped
from .presets import V3Config

Shapes = tuple[tuple[int, ...], ...]


def terms_v3(config: V3Config) -> tuple[Term, ...]:
    """Every term, main model first (v3-v32-v4.md sections 1.3 and 10.2).

    The draft module is published with its own copy of embedding and head, which are those of the main model.
    """
    m, v, draft = config.hidden, config.vocab_size, config.draft_layers
    dense = config.dense_layers
    whole = (
        shaped("main", "embedding", Stored.BF16, ((v, m),)),
        shaped("main", "head", Stored.BF16, ((v, m),)),
        shaped("main", "final norm", Stored.BF16, ((m,),)),
    )
    module = (
        shaped("draft", "projection of embedding and hidden", Stored.BF16, ((m, 2 * m),), times=draft),
        shaped("draft", "norms of embedding, hidden and head", Stored.BF16, ((3, m),), times=draft),
        shaped("copies", "embedding and head", Stored.BF16, ((2, v, m),), times=draft),
    )
    main = (
        *_layers("main", config, config.num_layers),
        *_dense(config),
        *_experts("main", config, config.num_layers - dense),
    )
    return (*main, *whole, *_layers("draft", config, draft), *_experts("draft", config, draft), *module)


def activated_v3(config: V3Config) -> dict[str, int]:
    """Parameters of the main model that a token uses: everything but experts it is not sent to, and the embedding."""
    share = {"routed experts": (config.router.topk, config.router.num_experts), "embedding": (0, 1)}
    return {
        line.name: line.parameters * share.get(line.name, (1, 1))[0] // share.get(line.name, (1, 1))[1]
        for line in terms_v3(config)
        if line.part == "main"
    }


def cache_v3(config: V3Config) -> tuple[CacheTerm, ...]:
    """The latent of a token in every layer: bf16 in V3; FP8 with fp32 scales, and an FP8 index key, in V3.2."""
    c, r, layers = config.attention.kv_lora_rank, config.attention.rope.rope_dim, config.num_layers
    if config.index is None:
        return (
            CacheTerm(name="latent, bf16", formula=f"{layers}*2*({c} + {r})", layers=layers, entry_bytes=2 * (c + r)),
        )
    i = config.index.dim
    latent = c + 4 * (c // 128) + 2 * r
    return (
        CacheTerm(
            name="latent, FP8", formula=f"{layers}*({c} + 4*{c // 128} + 2*{r})", layers=layers, entry_bytes=latent
        ),
        CacheTerm(name="index key, FP8", formula=f"{layers}*({i} + 4)", layers=layers, entry_bytes=i + 4),
    )


def work_v3(config: V3Config, context: int) -> tuple[Work, ...]:
    """One token that is decoded after `context` others, with absorbed attention."""
    a, layers = config.attention, config.num_layers
    linear = sum(activated_v3(config).values())
    width = 2 * a.kv_lora_rank + a.rope.rope_dim
    seen = context if config.index is None else min(context, config.index.topk)
    found = [Work(name="linear", formula=f"2*{linear}", flops=2 * linear, precision=Precision.FP8)]
    if config.index is not None:
        heads, dim = config.index.heads, config.index.dim
        flops = 2 * layers * context * heads * dim
        found.append(
            Work(name="indexer", formula=f"2*{layers}*{context}*{heads}*{dim}", flops=flops, precision=Precision.FP8)
        )
    flops = 2 * layers * seen * a.num_heads * width
    formula = f"2*{layers}*{seen}*{a.num_heads}*{width}"
    return (*found, Work(name="core", formula=formula, flops=flops, precision=Precision.BF16))


def attention_shapes(config: V3Config) -> Shapes:
    """The matrices of one attention layer."""
    m, a = config.hidden, config.attention
    qk = a.nope_dim + a.rope.rope_dim
    return (
        (a.q_lora_rank, m),
        (a.num_heads * qk, a.q_lora_rank),
        (a.kv_lora_rank + a.rope.rope_dim, m),
        (a.num_heads * (a.nope_dim + a.value_dim), a.kv_lora_rank),
        (m, a.num_heads * a.value_dim),
    )


def _layers(part: str, config: V3Config, layers: int) -> tuple[Term, ...]:
    m, a = config.hidden, config.attention
    norms = ((a.q_lora_rank,), (a.kv_lora_rank,), (2, m))
    found = [
        shaped(part, "attention", Stored.FP8_BLOCKS_F32, attention_shapes(config), times=layers),
        shaped(part, "norms", Stored.BF16, norms, times=layers),
    ]
    if config.index is not None:
        heads, dim = config.index.heads, config.index.dim
        queries = ((heads * dim, a.q_lora_rank), (dim, m))
        found += [
            shaped(part, "indexer queries and keys", Stored.FP8_BLOCKS_F32, queries, times=layers),
            shaped(part, "indexer weights", Stored.BF16, ((heads, m),), times=layers),
            shaped(part, "indexer norm", Stored.FP32, ((2, dim),), times=layers),
        ]
    return tuple(found)


def _dense(config: V3Config) -> tuple[Term, ...]:
    f, m = config.dense_width, config.hidden
    return (
        shaped("main", "dense networks", Stored.FP8_BLOCKS_F32, ((f, m), (f, m), (m, f)), times=config.dense_layers),
    )


def _experts(part: str, config: V3Config, layers: int) -> tuple[Term, ...]:
    m, f, e = config.hidden, config.expert_width, config.router.num_experts
    wide, one = f * config.shared_experts, ((f, m), (f, m), (m, f))
    shared = ((wide, m), (wide, m), (m, wide))
    return (
        shaped(part, "routed experts", Stored.FP8_BLOCKS_F32, one, times=layers * e),
        shaped(part, "shared experts", Stored.FP8_BLOCKS_F32, shared, times=layers),
        shaped(part, "router", Stored.BF16, ((e, m),), times=layers),
        shaped(part, "router biases", Stored.FP32, ((e,),), times=layers),
    )
