"""What has been published about the sizes of the released models, beside the numbers of the account.

A claim that the account does not reproduce stays in the list, with our own number: it says where two counts differ.
"""

from __future__ import annotations

from fractions import Fraction

from .account_terms import Claim
from .accounting import account, activated, cache_bytes_per_token, work
from .presets import ModelConfig, V3Config, V41Config, v32

MILLION_TOKENS = 10**6
BILLION, TRILLION = 10**9, 10**12
LLAMA_405B = 126 * 8 * 128 * 2 * 2  # bytes of a token: layers, key heads, head size, key and value, bf16


def claims(config: ModelConfig) -> tuple[Claim, ...]:
    """The published figures of a released model, each with our number in its unit.

    Edges:
        a model that was not released (a variant, a tiny one) has none.

    Source:
        v3-v32-v4.md sections 1.3 to 1.5 and 11, v41-blocks.md section 7
    """
    if config.name in ("v3", "v32") and isinstance(config, V3Config):
        return (*_parameters_v3(config), *_caches_v3(config))
    if config.name in ("v4_pro", "v4_flash"):
        return (*_parameters_v4(config), *_ratios_v4(config))
    if config.name == "v41_flash" and isinstance(config, V41Config):
        return _v41(config)
    return ()


def parameters(config: ModelConfig, *parts: str) -> int:
    """Parameters of the named parts of an account, of all without names."""
    return sum(line.parameters for line in account(config) if not parts or line.part in parts)


def fp8_work(config: ModelConfig, context: int) -> Fraction:
    """What a decoded token costs in equivalent FP8 operations."""
    return sum((part.equivalent for part in work(config, context=context)), Fraction())


def _claim(what: str, published: str, unit: str, own: Fraction | None, note: str = "") -> Claim:
    return Claim(what=what, published=published, unit=unit, own=own, note=note)


def _parameters_v3(config: V3Config) -> tuple[Claim, ...]:
    main, draft, every = parameters(config, "main"), parameters(config, "draft"), parameters(config)
    used = sum(activated(config)["decode"].values())
    embedding, size = config.vocab_size * config.hidden, Fraction(every, BILLION)
    shared = [
        _claim("parameters of the checkpoint, as named", "685", "B", size, "with a copy of embedding and head"),
        _claim("activated, without the embedding", "37", "B", Fraction(used, BILLION)),
    ]
    if config.index is None:
        joined = 2 * config.hidden**2
        return (
            _claim("parameters of the main model", "671", "B", Fraction(main, BILLION)),
            _claim("parameters of the checkpoint", "684.49", "B", size),
            *shared,
            _claim("activated (weights README)", "36.7", "B", Fraction(used, BILLION), "what it counts is not said"),
            _claim("activated with the embedding", "37.6", "B", Fraction(used + embedding, BILLION)),
            _claim(
                "own parameters of the draft module", "11.5", "B", Fraction(draft - joined, BILLION), "without eh_proj"
            ),
            _claim(
                "weights of the draft module",
                "14",
                "B",
                Fraction(every - main, BILLION),
                "the difference of two rounded sums",
            ),
        )
    indexer = sum(line.parameters for line in account(config) if line.part == "main" and "indexer" in line.name)
    return (
        *shared,
        _claim("the indexer (survey)", "14", "B", Fraction(indexer, BILLION), "685 - 671 B is the draft module of V3"),
    )


def _caches_v3(config: V3Config) -> tuple[Claim, ...]:
    token = cache_bytes_per_token(config)
    if config.index is None:
        ratio = LLAMA_405B / token
        return (
            _claim("cache", "70272", "B a token", token),
            _claim("Llama-3.1-405B's cache against it (survey)", "7.28", "times", ratio),
        )
    context = 131072
    parts = {part.name: part.flops for part in work(config, context=context)}
    a, layers = config.attention, config.num_layers
    absorbed = 2 * layers * context * a.num_heads * (2 * a.kv_lora_rank + a.rope.rope_dim)
    plain = 2 * layers * context * a.num_heads * (a.nope_dim + a.rope.rope_dim + a.value_dim)
    sparse = parts["indexer"] + parts["core"]
    text = "attention work that selection saves at 128K (survey)"
    return (
        _claim("cache", "48068", "B a token", token),
        _claim(text, "80", "%", 100 * (1 - Fraction(sparse, absorbed)), "against absorbed attention"),
        _claim(text, "80", "%", 100 * (1 - Fraction(sparse, plain)), "against keys and values of every head"),
    )


def _parameters_v4(config: ModelConfig) -> tuple[Claim, ...]:
    main, every = parameters(config, "main"), parameters(config)
    used = Fraction(sum(activated(config)["decode"].values()), BILLION)
    if config.name == "v4_pro":
        return (
            _claim("parameters, draft included", "1.6", "T", Fraction(every, TRILLION)),
            _claim("parameters of the main model", "1.573", "T", Fraction(main, TRILLION)),
            _claim("activated, without the embedding", "49", "B", used),
        )
    return (
        _claim("parameters of the main model", "284", "B", Fraction(main, BILLION)),
        _claim("parameters (survey)", "285", "B", Fraction(main, BILLION), "290.9 B with the draft block"),
        _claim("activated, without the embedding", "13", "B", used),
    )


def _ratios_v4(config: ModelConfig) -> tuple[Claim, ...]:
    token = cache_bytes_per_token(config)
    cache = 100 * token / cache_bytes_per_token(v32())
    cost = 100 * fp8_work(config, MILLION_TOKENS) / fp8_work(v32(), MILLION_TOKENS)
    grouped = 100 * token / (config.num_layers * 8 * 128 * 2 * 2)
    against = "work of a token at 10^6, of V3.2's"
    shared = [_claim("cache, of grouped attention with 8 key heads in bf16", "2", "%", grouped)]
    gigabytes = token * MILLION_TOKENS / BILLION
    if config.name == "v4_pro":
        return (
            _claim("cache, of V3.2's", "10", "%", cache),
            _claim(against, "27", "%", cost, "bf16 counts twice, FP4 half"),
            *shared,
            _claim(
                "cache at 10^6 tokens (survey)", "5.48", "GB", gigabytes, "5.48 has an FP8 index key without its scale"
            ),
            _claim(
                "Llama-3.1's cache at 10^6 tokens (survey)", "274", "GB", Fraction(LLAMA_405B * MILLION_TOKENS, BILLION)
            ),
            _claim("GLM-5's cache at 10^6 tokens (survey)", "60", "GB", None, "its sizes are not in the specification"),
        )
    return (
        _claim("cache (V4.1 report)", "3514", "B a token", token),
        _claim("cache, of V3.2's", "7", "%", cache),
        _claim(against, "10", "%", cost, "bf16 counts twice, FP4 half"),
        *shared,
    )


def _v41(config: V41Config) -> tuple[Claim, ...]:
    used = {phase: Fraction(sum(items.values()), BILLION) for phase, items in activated(config).items()}
    backbone = parameters(config, "backbone")
    tables = sum(line.parameters for line in account(config) if line.name == "tables")
    return (
        _claim("parameters of the backbone", "552", "B", Fraction(backbone, BILLION)),
        _claim("parameters of the memory tables", "196", "B", Fraction(tables, BILLION), "cut, not rounded"),
        _claim("parameters of backbone and tables", "748", "B", Fraction(backbone + tables, BILLION)),
        _claim("activated in decode", "16", "B", used["decode"]),
        _claim("activated in prefill", "8", "B", used["prefill"]),
        _claim("cache", "890", "B a token", cache_bytes_per_token(config)),
    )
