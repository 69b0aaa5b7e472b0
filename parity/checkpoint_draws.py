"""Drawn checkpoints: every tensor that a configuration asks for, in the names, dtypes and shapes of the release."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.checkpoint_names import Spec, expected_tensors
from deeptwin.reference.config import FP8_32X32, FP8_128X128, FP8_128X128_UE8M0, MXFP4, Q8, QuantFormat
from deeptwin.reference.presets import ModelConfig, V3Config, V4Config
from deeptwin.reference.quant import quantize

from . import draws

PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SCALES = (".scale", "_scale_inv")


def drawn_checkpoint(config: ModelConfig, *, seed: int, plain: str | None = None) -> dict[str, Tensor]:
    """The tensors of a model by name, as released or with `plain` weights (BF16, F16, F32); small models only.

    Matrices keep the size of a row, norms lie near one, experts of a token id are distinct.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    found: dict[str, Tensor] = {}
    for spec in expected_tensors(config, plain=plain):
        if spec.dtype in ("I8", "F8_E4M3"):
            found |= _codes(spec, config, rng)
        elif not spec.name.endswith(SCALES):
            found[spec.name] = _values(spec, config, rng)
    for name in [name for name in found if name.endswith("gate.bias_vl")]:
        found[name] = -found[name.removesuffix("_vl")]  # images go to the experts that text avoids
    return found


def _codes(spec: Spec, config: ModelConfig, rng: np.random.Generator) -> dict[str, Tensor]:
    rows, columns = spec.shape[0], spec.shape[1] * (2 if spec.dtype == "I8" else 1)
    w = draws.normal(rng, rows, columns, dtype=torch.bfloat16, scale=columns**-0.5)
    codes, scale = quantize(w, fmt=_format(spec, config))
    if isinstance(config, V3Config):
        return {spec.name: codes, spec.name + "_scale_inv": scale}
    stored = codes.view(torch.int8) if spec.dtype == "I8" else codes
    return {spec.name: stored, spec.name.removesuffix("weight") + "scale": scale.view(torch.float8_e8m0fnu)}


def _format(spec: Spec, config: ModelConfig) -> QuantFormat:
    if spec.dtype == "I8":
        return MXFP4
    if isinstance(config, V3Config | V4Config):
        return FP8_128X128 if isinstance(config, V3Config) else FP8_128X128_UE8M0
    return Q8 if "engram.embed." in spec.name else FP8_32X32


def _values(spec: Spec, config: ModelConfig, rng: np.random.Generator) -> Tensor:
    name, shape = spec.name, spec.shape
    if spec.dtype == "I64":
        assert isinstance(config, V4Config)
        rows = [draws.distinct(rng, config.router.num_experts, shape[1]) for _ in range(shape[0])]
        return torch.from_numpy(np.stack(rows).astype(np.int64))
    dtype = PLAIN[spec.dtype]
    if name.endswith(("gate.bias", "e_score_correction_bias")):
        return torch.from_numpy(0.1 * rng.permutation(shape[0])).to(dtype)
    if len(shape) == 1:
        is_factor = name.endswith(("norm.weight", "layernorm.weight", "norm1.weight", "norm2.weight", "scale"))
        scale, mean = (0.2, 1.0) if is_factor else (0.3, 0.0)
        return draws.normal(rng, *shape, dtype=dtype, scale=scale, mean=mean)
    if name.endswith(("q_weight", "k_weight")):
        return draws.normal(rng, *shape, dtype=dtype, mean=1.0)
    is_row_table = name.endswith(("embed.weight", "embed_tokens.weight", ".ape"))
    return draws.normal(rng, *shape, dtype=dtype, scale=1.0 if is_row_table else shape[-1] ** -0.5)
