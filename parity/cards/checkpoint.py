"""How checkpoints are checked: bytes of files against the safetensors library, names against a list that counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.presets import ModelConfig, preset

from .. import draws
from ..card import Card, Inputs, Op, Output, Peer, variants
from ..rules import Bitwise
from .accounting import VARIANTS

_mutant, _control = variants("checkpoint")
PEERS = "deeptwin.parity.peers.checkpoint"
# as the format calls them; codes and scales are drawn as bytes, so that every byte occurs
DRAWN = {
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class FileCase:
    """A file of several tensors, of which one is read; `skew` odd bytes lie before it, so it is not aligned."""

    dtype: str
    shape: tuple[int, ...]
    skew: int = 0
    twins: bool = False  # another tensor before it, whose name ends with its name
    shuffled: bool = False  # the header names tensors in another order than they lie
    regime: str = "bytes"

    @property
    def id(self) -> str:
        parts = [self.dtype.lower(), "x".join(map(str, self.shape)) or "scalar"]
        parts += [f"skew{self.skew}"] if self.skew else []
        return "-".join([*parts, *(name for name in ("twins", "shuffled") if getattr(self, name))])


@dataclass(frozen=True, kw_only=True)
class WriteCase:
    """Tensors of these dtypes, two of each; `strided` ones are views of larger tensors."""

    dtypes: tuple[str, ...]
    strided: bool = False
    regime: str = "bytes"

    @property
    def id(self) -> str:
        return "-".join(["".join(kind[-4:].lower() for kind in self.dtypes) or "nothing", *["strided"] * self.strided])


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """The released file of a model, or of a variant in which no two sizes agree by chance."""

    name: str
    regime: str = "names"

    @property
    def id(self) -> str:
        return self.name


def cases_file(full: bool) -> list[FileCase]:
    """Every dtype, shapes without and with one element or none, tensors that are not aligned."""
    found = [FileCase(dtype=dtype, shape=(3, 5)) for dtype in DRAWN]
    found += [FileCase(dtype=dtype, shape=(4, 3), skew=3, shuffled=True) for dtype in ("I64", "F32", "BF16", "F8_E8M0")]
    found += [FileCase(dtype="F32", shape=shape) for shape in ((), (0, 4), (7,), (2, 3, 4))]
    found += [FileCase(dtype="I8", shape=(6, 16), twins=True), FileCase(dtype="BF16", shape=(5,), twins=True, skew=1)]
    return found + [FileCase(dtype="F8_E4M3", shape=(256, 257)) for _ in range(full)]


def cases_write(full: bool) -> list[WriteCase]:
    """Each dtype alone, all together, views, and nothing at all."""
    every = tuple(DRAWN)
    found = [WriteCase(dtypes=(dtype,)) for dtype in DRAWN]
    return [*found, WriteCase(dtypes=every), WriteCase(dtypes=every, strided=True), WriteCase(dtypes=())]


def cases_model(full: bool) -> list[ModelCase]:
    """The tiny models, the odd variants and V4.1-Flash; all releases on demand."""
    tiny = ("tiny_v3", "tiny_v32", "tiny_v4_flash", "tiny_v4_pro", "tiny_v41_flash", *VARIANTS, "v41_flash")
    return [ModelCase(name=name) for name in (*tiny, *(("v3", "v32", "v4_flash", "v4_pro") if full else ()))]


def _drawn(rng: np.random.Generator, dtype: str, *shape: int) -> Tensor:
    kind, count = DRAWN[dtype], prod(shape)
    if kind is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, count).astype(np.bool_)).view(shape)
    if kind in (torch.int64, torch.int32):
        return torch.from_numpy(rng.integers(-(2**31), 2**31, count)).to(kind).view(shape)
    if kind.itemsize > 1:
        return draws.normal(rng, count, dtype=kind).view(shape)
    return torch.from_numpy(rng.integers(0, 256, count, dtype=np.uint8)).view(kind).view(shape)


def draw_file(case: FileCase, rng: np.random.Generator) -> Inputs:
    """A file that is put together here, byte by byte."""
    name = "layers.0.attn.wq_a.weight"
    wanted = _drawn(rng, case.dtype, *case.shape)
    parts: dict[str, tuple[str, Tensor]] = {}
    if case.skew:
        parts["a.pad"] = ("U8", _drawn(rng, "U8", case.skew))
    if case.twins:
        parts["more." + name] = (case.dtype, _drawn(rng, case.dtype, *case.shape))
    parts |= {name: (case.dtype, wanted), "norm.weight": ("BF16", _drawn(rng, "BF16", 9))}
    return {"file_n": _packed(parts, shuffled=case.shuffled), "name": name}


def _packed(parts: Mapping[str, tuple[str, Tensor]], *, shuffled: bool) -> Tensor:
    header, data = {}, b""
    for name, (dtype, x) in parts.items():
        raw = bytes(x.contiguous().flatten().view(torch.uint8).tolist())
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    order = sorted(header, reverse=True) if shuffled else list(header)
    text = json.dumps({"__metadata__": {"by": "card"}} | {name: header[name] for name in order}).encode()
    text += b" " * (8 - len(text) % 8)  # never without blanks
    return torch.tensor(list(len(text).to_bytes(8, "little") + text + data), dtype=torch.uint8)


def draw_write(case: WriteCase, rng: np.random.Generator) -> Inputs:
    """Two matrices and a vector of each dtype, named against the order in which they are written."""
    names, tensors = [], []
    for number, dtype in enumerate(case.dtypes):
        for part, shape in (("b", (3, 7)), ("a", (5,))):
            x = _drawn(rng, dtype, *shape)
            if case.strided and len(shape) > 1:
                x = _drawn(rng, dtype, *shape[::-1]).t()
            names.append(f"{len(case.dtypes) - number:02}.{part}")
            tensors.append(x)
    return {"names": tuple(names), "tensors": tuple(tensors)}


def config_of(case: ModelCase) -> ModelConfig:
    """The model that a case names."""
    return VARIANTS[case.name]() if case.name in VARIANTS else preset(case.name)


def draw_model(case: ModelCase, rng: np.random.Generator) -> Inputs:
    """Nothing is drawn."""
    return {"config": config_of(case)}


def _bytes(name: str) -> Output:
    return Output(name=name, rule=Bitwise(), dtype=torch.uint8)


def _numbers(name: str) -> Output:
    return Output(name=name, rule=Bitwise(), dtype=torch.int64)


def _peer(name: str, function: str, explains: str, needs: tuple[str, ...] = ()) -> Peer:
    return Peer(name=name, function=f"{PEERS}:{function}", needs=needs, explains=explains)


CARD = Card(
    component="checkpoint",
    summary="Hugging Face directories of every generation: mapped tensors, names, dtypes, refusals, writing",
    contract={
        "files": "safetensors: little-endian length, JSON header, bytes of tensors without gaps; nothing else is read",
        "dtypes": "exactly as stored; packed e2m1 is I8 with half the columns, low nibble first; UE8M0 is F8_E8M0",
        "names": "with or without the prefix model., never both; scales beside their weight as .scale or _scale_inv",
        "refused": "whatever is missing, one too many, of another shape or dtype than config.json says, all by name",
        "lazy": "a tensor is a view of its mapped file: a layer costs what the layer weighs",
        "not seen": "a flipped bit that gives another finite number: the format has no checksums",
    },
    ops=(
        Op(
            name="stored_tensor",
            reference="deeptwin.reference.checkpoint_file:stored_tensor",
            outputs=(_bytes("bytes"), _numbers("shape"), _numbers("dtype")),
            cases=cases_file,
            draw=draw_file,
            rows={},
            out_rows={},
            peers=(_peer("safetensors", "library_tensor", "the library's own reader"),),
            mutants=(
                _mutant("header_forgotten", "R6", "offsets count from the end of the length"),
                _mutant("blanks_forgotten", "R6", "the blanks behind the header belong to the first tensor"),
                _mutant("start_aligned", "R6", "a tensor that is not aligned begins at the element before"),
                _mutant("shape_reversed", "R6", "the last axis comes first"),
                _mutant("codes_counted_unpacked", "U49", "the columns of packed codes are counted twice"),
                _mutant("first_name_that_ends_so", "U49", "the first name with this end is taken"),
                _mutant("order_of_the_header", "R6", "tensors lie in the order in which the header names them"),
                _mutant("scales_taken_for_codes", "U49", "E8M0 is taken for E4M3: both are one byte"),
                _mutant("bf16_taken_for_fp16", "U49", "bf16 is taken for fp16: both are two bytes"),
                _mutant("big_endian_elements", "R6", "an element's bytes are turned around"),
                _mutant("last_byte_lost", "R6", "the last byte is another one"),
            ),
            controls=(_control("right_reader"),),
            golden=lambda: [case for case in cases_file(False) if case.skew],
        ),
        Op(
            name="file_bytes",
            reference="deeptwin.reference.checkpoint_file:file_bytes",
            outputs=(_bytes("file"),),
            cases=cases_write,
            draw=draw_write,
            rows={},
            out_rows={},
            peers=(_peer("safetensors", "library_bytes", "the library's own writer, byte for byte"),),
            mutants=(
                _mutant("names_alone_decide", "R6", "tensors in the order of names: some are not aligned"),
                _mutant("no_blanks", "R6", "the header ends anywhere: no tensor is aligned"),
                _mutant("offsets_of_the_file", "R6", "offsets count from the file's first byte"),
                _mutant("big_endian_length", "R6", "the length begins with its largest byte"),
                _mutant("scales_called_bytes", "U49", "UE8M0 scales are stored as U8"),
                _mutant("views_in_memory_order", "R6", "a transposed view is written as it lies in memory"),
                _mutant("no_metadata", "R6", "the file does not say which library wrote it: some refuse it then"),
            ),
            controls=(_control("right_writer"),),
            golden=lambda: [case for case in cases_write(False) if len(case.dtypes) != 1],
        ),
        Op(
            name="tensor_table",
            reference="deeptwin.reference.checkpoint_names:tensor_table",
            outputs=(_bytes("names"), _numbers("dtypes"), _numbers("shapes")),
            cases=cases_model,
            draw=draw_model,
            rows={},
            out_rows={},
            peers=(_peer("listed", "listed_table", "the list of tensors by loops whose sums are the published ones"),),
            mutants=(
                _mutant("scale_of_v3_called_scale", "U49", "V3's scales under V4's name"),
                _mutant("prefix_lost", "U49", "V3's names without model."),
                _mutant("codes_unpacked", "U49", "fp4 codes one to a byte"),
                _mutant("down_like_up", "U49", "w2 with the shape of w1"),
                _mutant("cut_blocks_lost", "U49", "no scale for a block that an edge cuts"),
                _mutant("output_matrix_in_bf16", "U49", "the grouped output matrix in bf16"),
                _mutant("sinks_in_bf16", "U49", "attention sinks in bf16"),
                _mutant("sites_in_bf16", "U49", "mixing matrices in bf16"),
                _mutant("experts_as_bytes", "U49", "codes in another integer"),
                _mutant("scales_in_fp32", "U49", "V4's exponents as fp32"),
                _mutant("scales_in_one_byte", "U49", "V3's fp32 scales as exponents"),
                _mutant("index_key_norm_without_bias", "U49", "the norm of V3.2's index keys taken for an RMS norm"),
                _mutant("no_gate_at_ratio_two", "U49", "compressors without their gate"),
                _mutant("no_image_bias_in_drafts", "U49", "drafts of V4.1 without the router's image bias"),
                _mutant("copies_of_draft_forgotten", "U49", "V3's draft without its embedding and head"),
                _mutant("draft_called_layer", "U63", "the draft block as one more layer"),
                _mutant("last_draft_owns_nothing", "U63", "Markov and confidence head in the first draft block"),
                _mutant("norm_of_site_kept", "U49", "a norm weight that is folded into fn stands there too"),
                _mutant("head_site_in_v41", "U39", "a head of the streams, which only non-shifted models have"),
                _mutant("bias_in_hash_layers", "U49", "hash layers with a bias"),
            ),
            controls=(_control("right_table"),),
            golden=lambda: [ModelCase(name=name) for name in ("tiny_v32", "tiny_v4_flash", "tiny_v41_flash")],
        ),
    ),
)
