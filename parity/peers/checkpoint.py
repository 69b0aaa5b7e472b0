"""Other readers and writers of the same bytes and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from deeptwin.reference.presets import ModelConfig, V3Config, V4Config, V41Config

from .accounting import SCALED, listed

# what stands beside the matrices and norms, whose names end in `.weight`
WHOLE_NAMES = (
    *("bias", "bias_vl", "attn_sink", "tid2eid", "ape", "e_score_correction_bias", "weight"),
    *("q_weight", "k_weight", "image_start", "image_end", "image_newline"),
)
SITES = ("_fn", "_base", "_scale")
# places in the order of the reference, which is that of the safetensors library
PLACES = {"I64": 0, "F32": 2, "BF16": 4, "F8_E8M0": 7, "F8_E4M3": 8, "I8": 10}
ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")


def library_tensor(file_n: Tensor, *, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """One tensor of a file by the safetensors library."""
    import safetensors

    (record,) = [dict(one) for key, one in safetensors.deserialize(bytes(file_n.numpy())) if key == name]
    found = torch.frombuffer(bytearray(record["data"]), dtype=torch.uint8) if record["data"] else file_n[:0].clone()
    return found, torch.tensor(record["shape"], dtype=torch.int64), torch.tensor([ORDER.index(record["dtype"])])


def library_bytes(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> Tensor:
    """A file by the safetensors library."""
    from safetensors.torch import save

    # the library refuses views: every tensor gets memory of its own
    found = {name: x.clone(memory_format=torch.contiguous_format) for name, x in zip(names, tensors, strict=True)}
    return torch.frombuffer(bytearray(save(found, metadata={"format": "pt"})), dtype=torch.uint8)


def listed_table(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The table of tensors from the list that counts parameters."""
    return table_of_rows(rows_of(config))


Row = tuple[str, str, tuple[int, ...]]


def table_of_rows(rows: Iterator[Row] | list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """A list of names, dtypes and shapes as the three tensors of a table."""
    found = sorted(rows)
    names = torch.zeros(len(found), 80, dtype=torch.uint8)
    sizes = torch.full((len(found), 2), -1)
    for row, (name, _, shape) in enumerate(found):
        names[row, : len(name)] = torch.tensor(list(name.encode()), dtype=torch.uint8)
        sizes[row, : len(shape)] = torch.tensor(shape)
    return names, torch.tensor([PLACES[dtype] for _, dtype, _ in found]), sizes


def rows_of(config: ModelConfig) -> Iterator[Row]:
    """Names, dtypes and shapes of a released file, one row for each tensor, scales among them."""
    for name, kind, shape in listed(config):
        stem = _spelled(name, config)
        last = stem.rpartition(".")[2]
        whole = last in WHOLE_NAMES or last.endswith(SITES)
        full = stem if whole else stem + ".weight"
        if kind not in SCALED:
            yield full, kind, shape
            continue
        packed = (shape[0], shape[1] // 2)
        yield full, *(("I8", packed) if kind == "I8" else ("F8_E4M3", shape))
        blocks = tuple((n + b - 1) // b for n, b in zip(shape, SCALED[kind], strict=True))
        assert prod(blocks)
        yield (full + "_scale_inv", "F32", blocks) if kind == "F8_B4" else (stem + ".scale", "F8_E8M0", blocks)


def _spelled(name: str, config: ModelConfig) -> str:
    if isinstance(config, V3Config):
        for short, long in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = re.sub(rf"\.{short}$", f".{long}", name)
        return name if name == "lm_head" else f"model.{name}"
    if isinstance(config, V4Config):
        return name
    assert isinstance(config, V41Config)
    return name.replace("mtp.last.", f"mtp.{config.draft.layers - 1}.")
