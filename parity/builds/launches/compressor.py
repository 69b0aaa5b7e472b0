"""Production calls of the compressor: entries of 512 channels, rings for six tokens to take back."""

from __future__ import annotations

import torch

from deeptwin.optimized.compressor import (
    compress_decode_triton,
    compress_prefill_triton,
    compress_tail_triton,
    compress_triton,
)
from deeptwin.reference.config import C1, C2, CSA4, HCA128, CompressorConfig

TOKENS, CHANNELS, SEQUENCES, SLOTS = 4096, 512, 8, 65
BACKTRACK = 6


def _rows(tokens: int, config: CompressorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    # value and gate side by side, as one product leaves them
    both = torch.empty(tokens, 2 * CHANNELS * config.series, dtype=torch.float32)
    return both[:, : CHANNELS * config.series], both[:, CHANNELS * config.series :]


def _state(config: CompressorConfig) -> torch.Tensor:
    return torch.empty(SLOTS, config.ring(BACKTRACK), 2, CHANNELS * config.series, dtype=torch.float32)


def _bias(config: CompressorConfig) -> torch.Tensor | None:
    if config.ratio <= 2:
        return None
    return torch.empty(config.ratio, CHANNELS * config.series, dtype=torch.float32)


def _index(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32)


def _prefill(config: CompressorConfig) -> None:
    entries = TOKENS // config.ratio
    compress_prefill_triton(
        *_rows(TOKENS, config),
        _bias(config),
        _state(config),
        _index(SEQUENCES),
        _index(SEQUENCES),
        _index(SEQUENCES + 1),
        config=config,
        rows=(_index(entries), _index(entries)),
    )


def _decode(config: CompressorConfig) -> None:
    tokens = 64 * BACKTRACK
    compress_decode_triton(
        *_rows(tokens, config), _bias(config), _state(config), _index(tokens), _index(tokens), config=config
    )


def chunk_c1() -> None:
    """The decoder of V4.1: every token is an entry."""
    value, _ = _rows(TOKENS, C1)
    rows = (_index(TOKENS), _index(TOKENS))
    compress_triton(value, None, None, _index(SEQUENCES), _index(SEQUENCES + 1), config=C1, rows=rows)


def prefill_c2() -> None:
    """The encoder of V4.1."""
    _prefill(C2)


def prefill_csa4() -> None:
    """V4, groups of four with overlap."""
    _prefill(CSA4)


def prefill_hca128() -> None:
    """V4, groups of 128."""
    _prefill(HCA128)


def decode_c2() -> None:
    """64 sequences of six tokens."""
    _decode(C2)


def decode_csa4() -> None:
    """The same with overlap."""
    _decode(CSA4)


def decode_hca128() -> None:
    """The same in groups of 128."""
    _decode(HCA128)


def tail_512() -> None:
    """Norm and rotation of 512 channels, the last 64 rotary."""
    compress_tail_triton(
        torch.empty(TOKENS, CHANNELS, dtype=torch.bfloat16),
        torch.empty(CHANNELS, dtype=torch.bfloat16),
        torch.empty(1 << 20, 64, dtype=torch.float32),
        _index(TOKENS),
        ratio=2,
        eps=1e-20,
    )


def tail_128() -> None:
    """Index keys of V4: 128 channels."""
    compress_tail_triton(
        torch.empty(TOKENS, 128, dtype=torch.bfloat16),
        torch.empty(128, dtype=torch.bfloat16),
        torch.empty(1 << 20, 64, dtype=torch.float32),
        _index(TOKENS),
        ratio=4,
        eps=1e-6,
    )
