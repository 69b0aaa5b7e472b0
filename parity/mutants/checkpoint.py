"""Readers and writers of tensor files that mistake one thing, and lists of tensors that differ in one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deeptwin.reference.presets import ModelConfig, V3Config, V4Config, V41Config

from ..peers.checkpoint import ORDER, Row, rows_of, table_of_rows

SIZES = {"I64": 8, "F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
KINDS = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float16: "F16",
    torch.int32: "I32",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a file is read."""

    base: str = "header"  # what offsets count from: the header's end, the length's end, or the end of its text
    aligned: bool = False  # the start is rounded down to whole elements
    reversed_shape: bool = False
    packed: bool = True  # codes are two to a byte, so their last axis is half as long
    search: str = "name"  # suffix: the first name that ends so; order: tensors lie in the order of the header
    renamed: tuple[str, str] = ("", "")  # a dtype taken for another
    swapped: bool = False  # bytes of an element from the last to the first
    cut: bool = False  # the last byte is another one


def reading_with(how: Reading) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A reader of one tensor."""

    def stored_tensor(file_n: Tensor, *, name: str) -> tuple[Tensor, Tensor, Tensor]:
        raw = bytes(file_n.tolist())
        length = int.from_bytes(raw[:8], "little")
        text = raw[8 : 8 + length]
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        key = name if how.search != "suffix" else next(one for one in header if one.endswith(name))
        record = header[key]
        start, end = record["data_offsets"]
        if how.search == "order":
            before = list(header)[: list(header).index(key)]
            start = sum(header[one]["data_offsets"][1] - header[one]["data_offsets"][0] for one in before)
            end = start + record["data_offsets"][1] - record["data_offsets"][0]
        base = 8 + {"header": length, "length": 0, "text": len(text.rstrip())}[how.base]
        size = SIZES.get(record["dtype"], 1)
        skip = (base + start) % size if how.aligned else 0
        found = raw[base + start - skip : base + end - skip]
        if how.swapped:
            found = b"".join(found[i : i + size][::-1] for i in range(0, len(found), size))
        if how.cut and found:
            found = found[:-1] + bytes([found[-1] ^ 1])
        shape = record["shape"][::-1] if how.reversed_shape else list(record["shape"])
        if not how.packed and record["dtype"] == "I8" and shape:
            shape[-1] *= 2
        dtype = how.renamed[1] if record["dtype"] == how.renamed[0] else record["dtype"]
        return (
            torch.tensor(list(found), dtype=torch.uint8),
            torch.tensor(shape, dtype=torch.int64),
            torch.tensor([ORDER.index(dtype)]),
        )

    return stored_tensor


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How a file is written."""

    by_width: bool = True  # the widest elements first
    blanks: bool = True  # the header is filled up to eight bytes
    absolute: bool = False  # offsets count from the file's first byte
    order: str = "little"  # of the length
    as_bytes: bool = False  # scales are called bytes
    strided: bool = True  # a view is written in its own order, not in that of its memory
    metadata: bool = True


def writing_with(how: Writing) -> Callable[..., Tensor]:
    """A writer of a file."""

    def file_bytes(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> Tensor:
        found = dict(zip(names, tensors, strict=True))
        kinds = {name: KINDS[x.dtype] for name, x in found.items()}
        if how.as_bytes:
            kinds = {name: "U8" if kind == "F8_E8M0" else kind for name, kind in kinds.items()}
        order = sorted(found, key=lambda name: (ORDER.index(kinds[name]) if how.by_width else 0, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if how.metadata else {}
        parts, at = b"", 0
        for name in order:
            x = found[name]
            flat = x.contiguous() if how.strided or x.is_contiguous() else x.t().contiguous()
            data = bytes(flat.reshape(-1).view(torch.uint8).tolist())
            header[name] = {"dtype": kinds[name], "shape": list(x.shape), "data_offsets": [at, at + len(data)]}
            parts, at = parts + data, at + len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8 if how.blanks else 0)
        if how.absolute:
            for name in order:
                header[name]["data_offsets"] = [n + 8 + len(text) for n in header[name]["data_offsets"]]
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
        return torch.tensor(list(len(text).to_bytes(8, how.order) + text + parts), dtype=torch.uint8)  # type: ignore[arg-type]

    return file_bytes


Change = Callable[[Row, ModelConfig], Iterator[Row]]


def table_with(change: Change) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The table of a changed list."""

    def tensor_table(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
        return table_of_rows([new for row in rows_of(config) for new in change(row, config)])

    return tensor_table


def _same(row: Row, config: ModelConfig) -> Iterator[Row]:
    yield row


def _renamed(pattern: str, name: str) -> Change:
    def change(row: Row, config: ModelConfig) -> Iterator[Row]:
        yield re.sub(pattern, name, row[0]), *row[1:]

    return change


def _without(pattern: str) -> Change:
    def change(row: Row, config: ModelConfig) -> Iterator[Row]:
        if not re.search(pattern, row[0]):
            yield row

    return change


def _stored_as(pattern: str, dtype: str) -> Change:
    def change(row: Row, config: ModelConfig) -> Iterator[Row]:
        yield row[0], dtype if re.search(pattern, row[0]) else row[1], row[2]

    return change


def _shaped(pattern: str, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Change:
    def change(row: Row, config: ModelConfig) -> Iterator[Row]:
        yield row[0], row[1], shape(row[2]) if re.search(pattern, row[0]) else row[2]

    return change


def _beside(pattern: str, name: str, model: type) -> Change:
    """Another tensor like the one found, under a name of its own."""

    def change(row: Row, config: ModelConfig) -> Iterator[Row]:
        yield row
        if isinstance(config, model) and re.search(pattern, row[0]):
            yield re.sub(pattern, name, row[0]), *row[1:]

    return change


def cut_blocks_lost(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The scale of a block that an edge cuts is left out."""
    rows, sizes = [], {name: shape for name, _, shape in rows_of(config)}
    for name, dtype, shape in rows_of(config):
        owner = name.removesuffix("_scale_inv") if name.endswith("_scale_inv") else re.sub(r"\.scale$", ".weight", name)
        if owner != name and len(sizes[owner]) == 2 and dtype in ("F32", "F8_E8M0"):
            block = {True: 128, False: 32}[isinstance(config, V3Config | V4Config)]
            edges = zip(shape, sizes[owner], strict=True)
            shape = tuple(n - 1 if n > 1 and whole % block and whole // block == n - 1 else n for n, whole in edges)
        rows.append((name, dtype, shape))
    return table_of_rows(rows)


_READ = Reading()
right_reader = reading_with(_READ)
header_forgotten = reading_with(replace(_READ, base="length"))
blanks_forgotten = reading_with(replace(_READ, base="text"))
start_aligned = reading_with(replace(_READ, aligned=True))
shape_reversed = reading_with(replace(_READ, reversed_shape=True))
codes_counted_unpacked = reading_with(replace(_READ, packed=False))
first_name_that_ends_so = reading_with(replace(_READ, search="suffix"))
order_of_the_header = reading_with(replace(_READ, search="order"))
scales_taken_for_codes = reading_with(replace(_READ, renamed=("F8_E8M0", "F8_E4M3")))
bf16_taken_for_fp16 = reading_with(replace(_READ, renamed=("BF16", "F16")))
big_endian_elements = reading_with(replace(_READ, swapped=True))
last_byte_lost = reading_with(replace(_READ, cut=True))

_WRITE = Writing()
right_writer = writing_with(_WRITE)
names_alone_decide = writing_with(replace(_WRITE, by_width=False))
no_blanks = writing_with(replace(_WRITE, blanks=False))
offsets_of_the_file = writing_with(replace(_WRITE, absolute=True))
big_endian_length = writing_with(replace(_WRITE, order="big"))
scales_called_bytes = writing_with(replace(_WRITE, as_bytes=True))
views_in_memory_order = writing_with(replace(_WRITE, strided=False))
no_metadata = writing_with(replace(_WRITE, metadata=False))

right_table = table_with(_same)
scale_of_v3_called_scale = table_with(_renamed(r"\.weight_scale_inv$", ".scale"))
prefix_lost = table_with(_renamed(r"^model\.", ""))
codes_unpacked = table_with(_shaped(r"experts\.\d+\.w\d\.weight", lambda s: (s[0], 2 * s[1])))
down_like_up = table_with(_shaped(r"(w2|down_proj)\.weight$", lambda s: s[::-1]))
output_matrix_in_bf16 = table_with(_stored_as(r"wo_a\.weight$", "BF16"))
sinks_in_bf16 = table_with(_stored_as(r"attn_sink$", "BF16"))
sites_in_bf16 = table_with(_stored_as(r"hc_\w+_fn$", "BF16"))
experts_as_bytes = table_with(_stored_as(r"experts\.\d+\.w\d\.weight$", "I64"))
scales_in_fp32 = table_with(_stored_as(r"\.scale$", "F32"))
scales_in_one_byte = table_with(_stored_as(r"_scale_inv$", "F8_E8M0"))
index_key_norm_without_bias = table_with(_without(r"indexer\.k_norm\.bias$"))
no_gate_at_ratio_two = table_with(_without(r"layers\.\d+\.attn\.compressor\.wgate"))
no_image_bias_in_drafts = table_with(_without(r"^mtp\.\d+\.ffn\.gate\.bias_vl$"))
copies_of_draft_forgotten = table_with(_without(r"(layers\.\d+\.embed_tokens|shared_head\.head)"))
draft_called_layer = table_with(_renamed(r"^mtp\.0\.", "layers.99."))
last_draft_owns_nothing = table_with(_renamed(r"^mtp\.\d+\.(markov_head|confidence_head)", r"mtp.0.\1"))
norm_of_site_kept = table_with(_beside(r"hc_attn_base$", "hc_attn_norm.weight", V41Config))
head_site_in_v41 = table_with(_beside(r"layers\.0\.hc_attn_base$", "hc_head_base", V41Config))
bias_in_hash_layers = table_with(_beside(r"gate\.tid2eid$", "gate.bias", V4Config))
