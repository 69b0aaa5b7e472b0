"""How images are checked: resize, patches, tower, unshuffle, projector, and rows among text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import ImagePlan, VisionConfig
from deeptwin.reference.images import span_types
from deeptwin.reference.weights import VisionBlockWeights, VisionWeights

from .. import draws
from ..builds.ascend_presets import VECTOR
from ..builds.presets import NO_PRODUCT
from ..builds.spec import BuildCase
from ..card import REGIMES, Candidate, Card, Equivalent, Inputs, Op, Output, Outputs, Peer, Relation, variants
from ..relations import Context, Variant
from ..rules import Bitwise, Budget, Close

_mutant, _control = variants("vision")
PEERS = "deeptwin.parity.peers.vision"
TINY = VisionConfig(hidden=32, num_heads=2, num_layers=2, intermediate=24, model_dim=40, patch=4)
Grids = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ResizeCase:
    """An image brought to another size."""

    width: int
    height: int
    to_width: int
    to_height: int
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"{self.width}x{self.height}-to-{self.to_width}x{self.to_height}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class PatchCase:
    """A grid of `rows` x `columns` patches, of which the image leaves `gap_h` and `gap_w` pixels grey."""

    rows: int
    columns: int
    gap_h: int = 0
    gap_w: int = 0
    patch: int = 14
    regime: str = "normal"

    @property
    def id(self) -> str:
        return f"{self.rows}x{self.columns}-gap{self.gap_h}.{self.gap_w}-p{self.patch}-{self.regime}"


@dataclass(frozen=True, kw_only=True)
class GridCase:
    """Images of the given grids, rows of `width`."""

    grids: Grids
    width: int = 32
    ratio: int = 3
    seed: int = 0
    regime: str = "normal"

    @property
    def id(self) -> str:
        shapes = ".".join(f"{h}x{w}" for h, w in self.grids) or "-"
        return f"{shapes}-m{self.width}-x{self.ratio}-s{self.seed}-{self.regime}"

    @property
    def tokens(self) -> int:
        """Patches of the call."""
        return sum(h * w for h, w in self.grids)


@dataclass(frozen=True, kw_only=True)
class InsertCase:
    """Spans of rows x columns tokens with text around; the chunk begins `skip` tokens into the prompt."""

    spans: Grids
    text: int = 3
    skip: int = 0
    width: int = 40
    index: str = "int32"
    regime: str = "normal"

    @property
    def id(self) -> str:
        shapes = ".".join(f"{h}x{w}" for h, w in self.spans) or "-"
        return f"{shapes}-text{self.text}-skip{self.skip}-m{self.width}-{self.index}-{self.regime}"


# inputs


def draw_resize(case: ResizeCase, rng: np.random.Generator) -> Inputs:
    """Random bytes, or extreme ones, as a view."""
    high = 2 if case.regime == "peaked" else 256
    x = rng.integers(0, high, (case.height, case.width + 3, 3), dtype=np.uint8) * (255 if high == 2 else 1)
    return {"pixels_hwc": torch.from_numpy(x)[:, : case.width], "width": case.to_width, "height": case.to_height}


def draw_patches(case: PatchCase, rng: np.random.Generator) -> Inputs:
    """Random bytes as a view of a wider image."""
    p = case.patch
    plan = ImagePlan(
        width=case.columns * p,
        height=case.rows * p,
        grid_w=case.columns,
        grid_h=case.rows,
        tokens_w=-(-case.columns // 3),
        tokens_h=-(-case.rows // 3),
    )
    shape = (plan.height - case.gap_h, plan.width - case.gap_w + 5, 3)
    x = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))[:, : plan.width - case.gap_w]
    return {"pixels_hwc": x, "plan": plan, "config": replace(TINY, patch=p)}


def draw_unshuffle(case: GridCase, rng: np.random.Generator) -> Inputs:
    """Rows as a view with NaN behind them."""
    x = draws.rows(rng, case.tokens, case.width, dtype=torch.bfloat16, regime=case.regime)
    return {"x_nm": draws.strided(x, pad=8), "grids": case.grids, "ratio": case.ratio}


def _weights(rng: np.random.Generator, config: VisionConfig, regime: str) -> VisionWeights:
    m, f, d = config.hidden, config.intermediate, config.model_dim
    sharp = {"peaked": 3.0, "flat": 0.2}.get(regime, 1.0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return draws.normal(rng, rows, columns, dtype=torch.bfloat16, scale=scale * columns**-0.5)

    def vector(size: int, mean: float = 0.0) -> Tensor:
        return draws.normal(rng, size, dtype=torch.bfloat16, scale=0.2, mean=mean)

    def block() -> VisionBlockWeights:
        return VisionBlockWeights(
            norm1_m=vector(m, 1.0),
            w_qkv_zm=matrix(3 * m, m, sharp),
            b_qkv_z=vector(3 * m),
            w_o_mm=matrix(m, m),
            b_o_m=vector(m),
            norm2_m=vector(m, 1.0),
            w1_im=matrix(2 * f, m),
            w2_mf=matrix(m, f),
        )

    return VisionWeights(
        w_patch_mi=matrix(m, 3 * config.patch**2, 2.0),
        b_patch_m=vector(m),
        blocks=tuple(block() for _ in range(config.num_layers)),
        norm_m=vector(m, 1.0),
        w_in_fi=matrix(d, m * config.downsample**2),
        b_in_f=vector(d),
        w_out_ff=matrix(d, d),
        b_out_f=vector(d),
    )


def draw_tower(case: GridCase, rng: np.random.Generator) -> Inputs:
    """Normalised patches of two or three images, and a tower of two blocks."""
    patches = draws.rows(rng, case.tokens, 3 * TINY.patch**2, dtype=torch.bfloat16, regime=_shift(case.regime))
    weights = _weights(rng, TINY, case.regime)
    return {"patches_ni": draws.strided(patches, pad=8), "weights": weights, "grids": case.grids, "config": TINY}


def _shift(regime: str) -> str:
    return "mean1" if regime == "mean1" else "normal"


def draw_project(case: GridCase, rng: np.random.Generator) -> Inputs:
    """Rows of nine patches."""
    x = draws.rows(rng, case.tokens, TINY.hidden * 9, dtype=torch.bfloat16, regime=_shift(case.regime))
    return {"x_yi": draws.strided(x, pad=8), "weights": _weights(rng, TINY, case.regime)}


def draw_insert(case: InsertCase, rng: np.random.Generator) -> Inputs:
    """Text between spans; embedding rows under a span are NaN."""
    types = [torch.full((case.text,), -1, dtype=torch.int32)]
    for h, w in case.spans:
        plan = ImagePlan(width=1, height=1, grid_w=1, grid_h=1, tokens_w=w, tokens_h=h)
        types += [span_types(plan), torch.full((case.text,), -1, dtype=torch.int32)]
    type_t = torch.cat(types)[case.skip :].to(getattr(torch, case.index))
    embed = draws.rows(rng, len(type_t), case.width, dtype=torch.bfloat16, regime=case.regime)
    embed[type_t >= 0] = torch.nan
    image = draws.rows(rng, int((type_t == 1).sum()), case.width, dtype=torch.bfloat16, regime=case.regime)
    marker = draws.rows(rng, 3, case.width, dtype=torch.bfloat16, regime=case.regime)
    return {
        "embed_tm": draws.strided(embed, pad=8),
        "image_ym": draws.strided(image, pad=4),
        "marker_km": marker,
        "type_t": type_t,
    }


# which cases


def cases_resize(full: bool) -> list[ResizeCase]:
    """Up, down, one side only, no change, one pixel, extreme shapes, black and white."""
    sizes = [(7, 5, 19, 13), (40, 30, 13, 9), (31, 17, 31, 5), (12, 9, 5, 9), (6, 4, 6, 4), (1, 1, 5, 3), (90, 2, 7, 1)]
    found = [ResizeCase(width=w, height=h, to_width=a, to_height=b) for w, h, a, b in sizes]
    found += [replace(c, regime="peaked") for c in found[:2]]
    found += [replace(found[0], to_width=23, regime=r) for r in ("flat", "mean1")]
    if full:
        found += [ResizeCase(width=160, height=121, to_width=n, to_height=n + 3) for n in (20, 77, 160, 200)]
    return found


def cases_patches(full: bool) -> list[PatchCase]:
    """Even and odd gaps on both sides, other patch sizes, every byte value."""
    base = PatchCase(rows=2, columns=3)
    found = [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, gap_h=5, gap_w=3), replace(base, gap_h=1), replace(base, gap_w=27), replace(base, gap_h=27)]
    found += [PatchCase(rows=1, columns=1, patch=4), PatchCase(rows=3, columns=2, patch=4, gap_w=3)]
    if full:
        found += [
            PatchCase(rows=r, columns=c, gap_h=g, gap_w=g, patch=5) for r in (1, 4) for c in (2, 7) for g in range(5)
        ]
    return found


def cases_unshuffle(full: bool) -> list[GridCase]:
    """Whole and cut grids, several images, no image, other ratios, the production width."""
    base = GridCase(grids=((4, 5), (3, 6)))
    found = [replace(base, regime=r) for r in REGIMES]
    found += [
        replace(base, grids=((1, 1),)),
        replace(base, grids=((2, 4), (1, 4), (4, 4)), ratio=2, width=7),
        replace(base, grids=()),
        replace(base, grids=((3, 2),), ratio=1),
        replace(base, grids=((4, 4),), width=1024),
    ]
    if full:
        found += [replace(base, grids=((h, w), (w, h)), width=40) for h in range(1, 8) for w in range(1, 8)]
    return found


def cases_tower(full: bool) -> list[GridCase]:
    """Two images in every regime, one patch, three images, none; several seeds, so that bias has rows."""
    base = GridCase(grids=((4, 5), (2, 7)))
    found = [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, grids=((1, 1),)), replace(base, grids=((1, 9), (6, 1), (3, 3))), replace(base, grids=())]
    if full:
        found += [replace(base, seed=s, regime=r) for s in range(1, 8) for r in REGIMES]
    return found


def cases_project(full: bool) -> list[GridCase]:
    """Every regime, one row, none."""
    base = GridCase(grids=((6, 6),))
    found = [replace(base, regime=r) for r in REGIMES]
    found += [replace(base, grids=((1, 1),)), replace(base, grids=())]
    if full:
        found += [replace(base, seed=s, regime=r) for s in range(1, 8) for r in REGIMES]
    return found


def cases_insert(full: bool) -> list[InsertCase]:
    """Several spans, none, a chunk that begins inside a span, no text, both index types, the production width."""
    base = InsertCase(spans=((2, 3), (1, 4)))
    found = [replace(base, regime=r) for r in REGIMES]
    found += [
        replace(base, spans=()),
        replace(base, spans=(), text=0),
        replace(base, text=0, index="int64"),
        replace(base, skip=6),
        replace(base, skip=11),
        replace(base, spans=((1, 1),), text=1, width=5120),
    ]
    if full:
        found += [replace(base, skip=n, index="int64") for n in range(20)]
    return found


# relation hooks


def bands(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Rows of patches as images of their own."""
    plan, p = inputs["plan"], inputs["config"].patch
    for row in range(plan.grid_h):
        one = replace(plan, height=p, grid_h=1, tokens_h=1)
        kept = slice(row * plan.grid_w, (row + 1) * plan.grid_w)
        yield Variant(
            label=f"patch row {row}",
            calls=(inputs | {"pixels_hwc": inputs["pixels_hwc"][row * p : (row + 1) * p], "plan": one},),
            expect=_kept("y_ni", kept),
        )


def _kept(name: str, kept: slice | Tensor) -> Any:
    return lambda outputs: {name: outputs[name][kept]}


def images_apart(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """Every image alone, and all of them in reverse."""
    name, grids = ("x_nm" if "x_nm" in inputs else "patches_ni"), inputs["grids"]
    ratio = inputs.get("ratio", 1)
    rows = [h * w for h, w in grids]
    tokens = [-(-h // ratio) * -(-w // ratio) for h, w in grids]
    parts, places = inputs[name].split(rows), torch.arange(sum(tokens)).split(tokens)
    out = context.op.outputs[0].name
    if not grids:
        yield Variant(label="no image again", calls=(inputs,))
        return
    for order in [*([b] for b in range(len(grids))), list(reversed(range(len(grids))))]:
        apart = {name: torch.cat([parts[b] for b in order]), "grids": tuple(grids[b] for b in order)}
        kept = torch.cat([places[b] for b in order])
        yield Variant(label=f"images {order}", calls=(inputs | apart,), expect=_kept(out, kept))


def cut_spans(inputs: Inputs, context: Context) -> Iterator[Variant]:
    """The prompt in two chunks at every place, spans cut or not, and token by token."""
    t = len(inputs["type_t"])
    sizes = sorted({1, 4, 7, (t + 1) // 2} - {0})
    for size in sizes if t else [1]:
        calls, done = [], 0
        for start in range(0, max(t, 1), size):
            kept = slice(start, start + size)
            count = int((inputs["type_t"][kept] == 1).sum())
            part = {"embed_tm": inputs["embed_tm"][kept], "type_t": inputs["type_t"][kept]}
            calls.append(inputs | part | {"image_ym": inputs["image_ym"][done : done + count]})
            done += count
        yield Variant(label=f"chunks of {size}", calls=tuple(calls), join=_joined)


def _joined(results: list[Outputs]) -> Outputs:
    return {"y_tm": torch.cat([r["y_tm"] for r in results])}


def few_calls(case: Any) -> bool:
    """Relations run on the normal regime and narrow rows."""
    return case.regime in ("normal", "file") and getattr(case, "width", 0) <= 100


def no_gap(case: Any) -> bool:
    """Images that fill their grid."""
    return case.regime == "file" or (case.regime == "normal" and case.gap_h == case.gap_w == 0)


def golden_patches() -> list[PatchCase]:
    """One small image with gaps."""
    return [PatchCase(rows=1, columns=2, gap_h=1, gap_w=3, patch=4)]


def golden_resize() -> list[ResizeCase]:
    """One up, one down."""
    return [
        ResizeCase(width=5, height=4, to_width=9, to_height=3),
        ResizeCase(width=9, height=9, to_width=2, to_height=4),
    ]


def golden_unshuffle() -> list[GridCase]:
    """A cut grid."""
    return [GridCase(grids=((2, 4),), width=2)]


def golden_tower() -> list[GridCase]:
    """Two images."""
    return [GridCase(grids=((2, 3), (1, 2)))]


def golden_project() -> list[GridCase]:
    """Two rows."""
    return [GridCase(grids=((1, 2),))]


def golden_insert() -> list[InsertCase]:
    """A span with text around."""
    return [InsertCase(spans=((1, 2),), text=1, width=3)]


# two blocks, some twenty roundings in a row: limits of whole blocks. Measured on fp32 torch with every stored value
# rounded, keys taken 64 and 5 at a time: 6 cases x 50 seeds, 600 judgements. Worst element 0.74 of its budget, row
# 3.19, total 1.43, mean signed error 0.62 units (rows share weights: t says nothing)
BF16_TOWER = Budget(
    kind="bf16 vision tower", element_factor=2.5, element_slack=3.0, row=4.0, total=2.0, bias=1.0, bias_t=0.01
)
# four roundings; 5 cases x 50 seeds: worst element 0.31 of the tower's budget, row 1.14, total 1.01, bias 0.08 units
BF16_PROJECTOR = Budget(kind="bf16 projector", bias=0.2)
NO_ROWS: dict[str, int] = {}  # rows of an image, and of a prompt, belong together: the relations cut them

RESIZE = Op(
    name="resize_image",
    reference="deeptwin.reference.images:resize_image",
    outputs=(Output(name="y_hwc", rule=Bitwise(), dtype=torch.uint8),),
    cases=cases_resize,
    draw=draw_resize,
    rows=NO_ROWS,
    out_rows=NO_ROWS,
    peers=(
        Peer(
            name="pillow",
            function=f"{PEERS}:pillow_resize",
            needs=("PIL",),
            explains="Image.resize, bicubic: the library whose bytes the release feeds",
        ),
    ),
    mutants=(
        _mutant("passes_not_rounded", "U86", "the passes are not rounded to bytes between"),
        _mutant("not_antialiased", "U49", "four taps whatever the scale"),
        _mutant("bilinear", "U49", "a triangle instead of the cubic"),
    ),
    golden=golden_resize,
)

PATCHES = Op(
    name="image_patches",
    reference="deeptwin.reference.vision:image_patches",
    outputs=(Output(name="y_ni", rule=Bitwise(), dtype=torch.bfloat16),),
    cases=cases_patches,
    draw=draw_patches,
    rows=NO_ROWS,
    out_rows=NO_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="rows of patches", hook=bands, only=no_gap),
        Relation(name="run_to_run", axis="repeats", only=no_gap),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.vision:image_patches_triton"),),
    builds=(
        BuildCase(
            name="p14",
            kernel="deeptwin.kernels.triton_ops.vision:_patches",
            launch="deeptwin.parity.builds.launches.vision:patches_1708",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("grey_128", "U58", "the rest is 128"),
        _mutant("padded_at_the_corner", "U58", "the image stands in the corner"),
        _mutant("offset_rounded_up", "U58", "half a pixel of the gap goes to the other side"),
        _mutant("reciprocal_of_255", "U56", "multiplication by fp32(1 / 255)"),
        _mutant("divided_by_256", "U56", "division by 256"),
        _mutant("mean_127", "U49", "the mean is 127 / 255"),
        _mutant("channels_last", "U22", "features are row, column, channel"),
        _mutant("pixels_transposed", "U22", "features are channel, column, row"),
        _mutant("patches_down_columns", "U22", "patches are numbered down the columns"),
        _mutant("patches_truncated", "R2", "truncated to bf16"),
        _mutant("last_patch_unwritten", "U75", "the last patch is left unwritten"),
        _mutant("patches_not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(_control("right_patches"),),
    golden=golden_patches,
)

TOWER = Op(
    name="vision_tower",
    reference="deeptwin.reference.vision:vision_tower",
    outputs=(Output(name="y_nm", rule=BF16_TOWER, dtype=torch.bfloat16),),
    cases=cases_tower,
    draw=draw_tower,
    rows=NO_ROWS,
    out_rows=NO_ROWS,
    relations=(Relation(name="batch_invariant", axis="images", hook=images_apart, only=few_calls),),
    peers=(
        Peer(
            name="torch",
            function=f"{PEERS}:torch_tower",
            needs=(),
            explains="torch in fp64 without a rounding inside: fp64 angles, complex rotations, its own attention",
            rules={"y_nm": Close(rtol=2.0**-7)},
        ),
    ),
    mutants=(
        _mutant("columns_before_rows", "U12", "columns turn the first angles"),
        _mutant("rows_only", "U12", "columns do not turn"),
        _mutant("one_dimensional_positions", "U12", "patches are numbered through"),
        _mutant("interleaved_pairs", "U12", "interleaved pairs"),
        _mutant("keys_not_rotated", "U16", "only queries turn"),
        _mutant("values_rotated", "U16", "values turn too"),
        _mutant("images_attend_to_each_other", "U37", "the images of a batch see each other"),
        _mutant("causal_attention", "U39", "patches see earlier ones only"),
        _mutant("scale_off_by_5_percent", "U05", "softmax scale off by 5 %"),
        _mutant("up_before_gate", "U50", "gate and up change places"),
        _mutant("swiglu_clamped", "U85", "gate and up are clamped, as in the text model"),
        _mutant("bias_ignored", "U49", "linears without their bias"),
        _mutant("residual_of_the_norm", "U38", "the residual is the normalised row"),
        _mutant("last_norm_missing", "U39", "no norm behind the last block"),
    ),
    controls=(
        _control("right_tower"),
        _control("right_tower_blocks_of_5"),
    ),
    golden=golden_tower,
)

UNSHUFFLE = Op(
    name="pixel_unshuffle",
    reference="deeptwin.reference.vision:pixel_unshuffle",
    outputs=(Output(name="y_yi", rule=Bitwise(), dtype=torch.bfloat16),),
    cases=cases_unshuffle,
    draw=draw_unshuffle,
    rows=NO_ROWS,
    out_rows=NO_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="images", hook=images_apart, only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=few_calls),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.vision:pixel_unshuffle_triton"),),
    builds=(
        BuildCase(
            name="m1024",
            kernel="deeptwin.kernels.triton_ops.vision:_unshuffle",
            launch="deeptwin.parity.builds.launches.vision:unshuffle_1024",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("patch_before_channel", "U22", "features are patch, channel"),
        _mutant("square_transposed", "U22", "the nine patches run down the columns"),
        _mutant("edge_repeated", "U58", "the edge is repeated where zeros belong"),
        _mutant("images_joined", "U37", "images of one width are joined"),
        _mutant("last_token_unwritten", "U75", "the last token is left unwritten"),
        _mutant("unshuffle_not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(_control("right_unshuffle"),),
    golden=golden_unshuffle,
)

PROJECT = Op(
    name="project_tokens",
    reference="deeptwin.reference.vision:project_tokens",
    outputs=(Output(name="y_yf", rule=BF16_PROJECTOR, dtype=torch.bfloat16),),
    cases=cases_project,
    draw=draw_project,
    rows={"x_yi": 0},
    out_rows={"y_yf": 0},
    peers=(
        Peer(
            name="torch",
            function=f"{PEERS}:torch_project",
            needs=(),
            explains="torch's exact GELU in fp64 without a rounding inside",
            rules={"y_yf": Close(rtol=2.0**-7)},
        ),
    ),
    mutants=(
        _mutant("silu_for_gelu", "U48", "SiLU instead of GELU"),
        _mutant("project_bias_ignored", "U49", "linears without their bias"),
        _mutant("project_bias_after_rounding", "U86", "products are rounded before their bias"),
    ),
    controls=(_control("right_project"),),
    golden=golden_project,
)

INSERT = Op(
    name="insert_images",
    reference="deeptwin.reference.vision:insert_images",
    outputs=(Output(name="y_tm", rule=Bitwise(), dtype=torch.bfloat16),),
    cases=cases_insert,
    draw=draw_insert,
    rows=NO_ROWS,
    out_rows=NO_ROWS,
    relations=(
        Relation(name="batch_invariant", axis="chunks that cut spans", hook=cut_spans, only=few_calls),
        Relation(name="run_to_run", axis="repeats", only=few_calls),
    ),
    candidates=(Candidate(name="triton", function="deeptwin.optimized.vision:insert_images_triton"),),
    builds=(
        BuildCase(
            name="m5120",
            kernel="deeptwin.kernels.triton_ops.vision:_insert",
            launch="deeptwin.parity.builds.launches.vision:insert_5120",
            expect=NO_PRODUCT | VECTOR,
        ),
    ),
    mutants=(
        _mutant("rank_from_token", "U37", "the image row is taken by token, not by running rank"),
        _mutant("images_reversed", "U37", "image rows in reverse"),
        _mutant("one_marker_for_all", "U49", "every marker is START"),
        _mutant("newline_kept", "U74", "newline rows keep what the embedding held"),
        _mutant("last_embedding_unwritten", "U75", "the last row is left unwritten"),
        _mutant("insert_not_deterministic", "U10", "a counter leaks into the output"),
    ),
    controls=(_control("right_insert"),),
    golden=golden_insert,
)

CARD = Card(
    component="vision",
    summary="images as tokens: resize, patches, tower with two-dimensional positions, unshuffle, projector, insertion",
    contract={
        "plan": "Python doubles and integers; the resize is that of Pillow, byte for byte",
        "dtypes": "pixels uint8; patches, tower, tokens bf16; types int32 or int64, in the release's numbering",
        "rounding": "patches once (fp32 steps); tower and projector: linears after their bias, rotations, attention,"
        " silu · up and sums to bf16",
        "masks": "an image sees itself, whole, and nothing else",
        "features": "patch: channel, row, column; token: channel, row, column of its 3 x 3 patches, zeros at the edge",
        "rows": "image rows by the running rank of IMAGE tokens: a chunk receives exactly the rows it covers",
    },
    ops=(PATCHES, UNSHUFFLE, INSERT, RESIZE, TOWER, PROJECT),
    equivalents=(
        Equivalent(
            name="tanh form of GELU",
            reason="off by at most 5e-4, a quarter of a bf16 step near one: the budget sees it in 2 of 250 draws;"
            " a test of the reference pins the exact form",
        ),
    ),
)
