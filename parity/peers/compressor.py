"""torch's softmax and transformers' compressors of DeepSeek-V4 as peers of `reference/compressor.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deeptwin.reference.config import CompressorConfig

Entries = tuple[Tensor, Tensor]


def _by_sequence(start_b: Tensor, cu_seqlens: Tensor) -> list[tuple[int, slice]]:
    cu = cu_seqlens.tolist()
    return [(start, slice(cu[b], cu[b + 1])) for b, start in enumerate(start_b.tolist())]


def _packed(found: list[Entries], channels: int) -> Entries:
    """Rows of all sequences; a sequence without an entry has a zero row."""
    rows = [m if len(m) else torch.zeros(1, channels) for m, _ in found]
    numbers = [n if len(n) else torch.tensor([-1]) for _, n in found]
    m = torch.cat([torch.zeros(0, channels), *(r.float() for r in rows)])
    return m.to(torch.bfloat16), torch.cat([torch.zeros(0, dtype=torch.int64), *numbers]).to(torch.int32)


def torch_fp64(
    value_tw: Tensor,
    gate_tw: Tensor | None,
    bias_rw: Tensor | None,
    start_b: Tensor,
    cu_seqlens: Tensor,
    *,
    config: CompressorConfig,
) -> Entries:
    """torch.softmax over unfolded windows, an absent group in front where windows overlap."""
    r, c = config.ratio, value_tw.shape[1] // config.series
    found = []
    for start, tokens in _by_sequence(start_b, cu_seqlens):
        v = value_tw[tokens].double()
        z = torch.zeros_like(v) if gate_tw is None else gate_tw[tokens].double()
        if bias_rw is not None:
            z = (z + bias_rw.double().repeat(len(z) // r + 1, 1)[: len(z)]).float().double()
        whole = len(v) // r
        z, v = (x[: whole * r].unflatten(0, (whole, r)) for x in (z, v))
        if config.overlap:
            before_z = torch.cat([torch.full((1, r, c), -torch.inf, dtype=torch.float64), z[:, :, :c]])[:whole]
            before_v = torch.cat([torch.zeros(1, r, c, dtype=torch.float64), v[:, :, :c]])[:whole]
            z, v = torch.cat([before_z, z[:, :, c:]], 1), torch.cat([before_v, v[:, :, c:]], 1)
        found.append(((torch.softmax(z, 1) * v).sum(1), start // r + torch.arange(whole)))
    return _packed(found, c)


class _Half(nn.Module):
    """A projection that takes its half of the hidden state as it is."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        """The first or the second half of the last axis."""
        half = x.shape[-1] // 2
        return x[..., :half] if self.first else x[..., half:]


class _NoTurn(nn.Module):
    """Rotary angles of zero."""

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Cosines of one and sines of zero, for one pair."""
        shape = (*x.shape[:2], 1)
        return x.new_ones(shape), x.new_zeros(shape)


class _NoIndexer(nn.Module):
    """Selects nothing."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """No index for any query."""
        return torch.zeros(*x.shape[:2], 0, dtype=torch.int64)


def deepseek_v4(
    value_tw: Tensor,
    gate_tw: Tensor | None,
    bias_rw: Tensor | None,
    start_b: Tensor,
    cu_seqlens: Tensor,
    *,
    config: CompressorConfig,
) -> Entries:
    """DeepseekV4HCACompressor, with overlap DeepseekV4CSACompressor, around identity layers, without a cache."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    if gate_tw is None or start_b.any():
        raise NotImplementedError("gate_tw: expected logits and sequences from position 0 on")
    channels = value_tw.shape[1] // config.series
    kind = v4.DeepseekV4CSACompressor if config.overlap else v4.DeepseekV4HCACompressor
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.compress_rate, module.head_dim = config.ratio, channels
    module.kv_proj, module.gate_proj = _Half(True), _Half(False)
    module.kv_norm, module.rotary_emb, module.indexer = nn.Identity(), _NoTurn(), _NoIndexer()
    bias = torch.zeros(config.ratio, value_tw.shape[1]) if bias_rw is None else bias_rw
    module.position_bias = nn.Parameter(bias, requires_grad=False)
    found = []
    for _, tokens in _by_sequence(start_b, cu_seqlens):
        x = torch.cat([value_tw[tokens], gate_tw[tokens]], -1)[None]
        positions = torch.arange(x.shape[1])[None]
        if x.shape[1] < config.ratio:
            found.append((torch.zeros(0, channels), positions[0, :0]))
            continue
        m = module(x, None, positions, None, 0)[0][0, 0]
        found.append((m, torch.arange(len(m))))
    return _packed(found, channels)
