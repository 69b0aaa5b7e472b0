"""Images as tokens: plan, resize, patches, tower, unshuffle, projector, insertion."""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deeptwin.optimized.vision import image_patches_triton, insert_images_triton, pixel_unshuffle_triton
from deeptwin.parity import goldens
from deeptwin.parity.card import case_rng, load_card
from deeptwin.parity.cards.vision import TINY
from deeptwin.parity.images import read_image
from deeptwin.reference.config import ImagePlan, TokenType, VisionConfig
from deeptwin.reference.images import contained_size, internal_types, plan_image, resize_image, span_types
from deeptwin.reference.numerics import SEMANTIC
from deeptwin.reference.vision import image_patches, insert_images, pixel_unshuffle, project_tokens, vision_tower

CARD = load_card("vision")
RELEASED = VisionConfig()


def noise(*shape: int, seed: int = 0) -> Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))


def plan_of(rows: int, columns: int, patch: int) -> ImagePlan:
    return ImagePlan(
        width=columns * patch,
        height=rows * patch,
        grid_w=columns,
        grid_h=rows,
        tokens_w=-(-columns // 3),
        tokens_h=-(-rows // 3),
    )


def drawn(op: str, index: int = 0) -> dict[str, Any]:
    case = CARD.op(op).cases(False)[index]
    return CARD.op(op).draw(case, case_rng("vision", op, case.id, 0))


# properties of the reference


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        ((1, 1), (546, 546, 39, 39, 13, 13, 184)),
        ((544, 544), (546, 546, 39, 39, 13, 13, 184)),
        ((640, 480), (644, 490, 46, 35, 16, 12, 206)),
        ((1920, 1080), (1708, 966, 122, 69, 41, 23, 968)),
        ((4000, 3000), (1512, 1134, 108, 81, 36, 27, 1001)),
        ((100000, 10), (42882, 42, 3063, 3, 1021, 1, 1024)),
        ((3, 5000), (42, 21462, 3, 1533, 1, 511, 1024)),
    ],
)
def test_the_golden_plans_of_the_spec(size: tuple[int, int], plan: tuple[int, ...]) -> None:
    got = plan_image(*size, config=RELEASED)
    assert (got.width, got.height, got.grid_w, got.grid_h, got.tokens_w, got.tokens_h, got.tokens) == plan


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([None, 2.0, 8.0]))
def test_every_plan_is_whole_and_fits(width: int, height: int, ratio: float | None) -> None:
    plan = plan_image(width, height, config=replace(RELEASED, max_wh_ratio=ratio))
    assert plan.tokens <= 1024
    assert (plan.width, plan.height) == (plan.grid_w * 14, plan.grid_h * 14)
    assert (plan.tokens_w, plan.tokens_h) == (-(-plan.grid_w // 3), -(-plan.grid_h // 3))
    inner = contained_size(width, height, plan)
    assert 1 <= inner[0] <= plan.width
    assert 1 <= inner[1] <= plan.height


def test_images_too_wide_are_clipped_only_when_asked() -> None:
    wide = plan_image(100000, 10, config=replace(RELEASED, max_wh_ratio=8.0))
    assert wide == plan_image(80, 10, config=RELEASED)


def test_a_side_that_would_vanish_is_stretched() -> None:
    plan = plan_image(100000, 1, config=RELEASED)
    assert contained_size(100000, 1, plan) == (plan.width, plan.height)
    assert contained_size(640, 480, plan_image(640, 480, config=RELEASED)) == (644, 483)
    assert contained_size(480, 640, plan_image(640, 480, config=RELEASED)) == (368, 490)  # 367.5: half to even
    assert contained_size(480, 640, plan_of(5, 7, 4), stretch=True) == (28, 20)


def test_normalisation_of_every_byte_value() -> None:
    # 256 values on one channel of one patch
    pixels = torch.arange(256, dtype=torch.uint8).view(16, 16, 1).expand(16, 16, 3)
    patch = image_patches(pixels, plan=plan_of(1, 1, 16), config=replace(TINY, patch=16)).to(torch.bfloat16)
    table = patch[0, :256].view(torch.int16).numpy().astype("<i2")
    digest = "3a03ac228fc325cb58ef534b6b4c1cd74ea56fc0124e63699b00fcc928ac720d"
    assert hashlib.sha256(table.tobytes()).hexdigest() == digest
    values = [int(table[v]) & 0xFFFF for v in (0, 1, 127, 128, 254, 255)]
    assert values == [0xBF80, 0xBF7E, 0xBB81, 0x3B81, 0x3F7E, 0x3F80]


def test_patches_are_channel_row_column_and_centred_on_grey() -> None:
    pixels = noise(7, 5, 3)
    y = image_patches(pixels, plan=plan_of(2, 2, 4), config=TINY, num=SEMANTIC)
    grey = (127 / 255 - 0.5) / 0.5
    canvas = torch.full((8, 8, 3), grey, dtype=torch.float64)
    canvas[0:7, 2:7] = (pixels.double() / 255 - 0.5) / 0.5  # gaps of 1 and 3: half to even is 0 and 2
    assert y[0].tolist() == pytest.approx(canvas[:4, :4].permute(2, 0, 1).flatten().tolist())
    assert y[1].tolist() == pytest.approx(canvas[:4, 4:].permute(2, 0, 1).flatten().tolist())
    assert y[2].tolist() == pytest.approx(canvas[4:, :4].permute(2, 0, 1).flatten().tolist())


@pytest.mark.parametrize(("size", "target"), [((40, 30), (13, 9)), ((17, 12), (50, 31)), ((30, 20), (30, 7))])
def test_the_resize_is_an_antialiased_cubic(size: tuple[int, int], target: tuple[int, int]) -> None:
    pixels = noise(size[1], size[0], 3) // 3 + 85  # nothing reaches the ends of a byte
    got = resize_image(pixels, width=target[0], height=target[1])
    x = pixels.permute(2, 0, 1)[None].double()
    exact = torch.nn.functional.interpolate(x, (target[1], target[0]), mode="bicubic", antialias=True)[0]
    error = (got.double() - exact.permute(1, 2, 0)).abs()
    assert error.max() < 1.6
    assert error.mean() < 0.5


def test_a_resize_to_the_same_size_and_of_flat_images_changes_nothing() -> None:
    pixels = noise(6, 9, 3)
    assert torch.equal(resize_image(pixels, width=9, height=6), pixels)
    flat = torch.full((5, 7, 3), 93, dtype=torch.uint8)
    assert (resize_image(flat, width=31, height=2) == 93).all()


def test_unshuffled_features_are_channel_row_column() -> None:
    x = torch.arange(2 * 4 * 2).view(8, 2).double()  # patch (row, column) channel
    y = pixel_unshuffle(x, ((2, 4),), ratio=3)
    assert y.shape == (2, 18)
    assert y[0].view(2, 3, 3)[0].tolist() == [[0, 2, 4], [8, 10, 12], [0, 0, 0]]
    assert y[1].view(2, 3, 3)[1].tolist() == [[7, 0, 0], [15, 0, 0], [0, 0, 0]]
    assert torch.equal(pixel_unshuffle(x, ((2, 4),), ratio=1), x)


def test_images_do_not_see_one_another_and_order_does_not_matter() -> None:
    inputs = drawn("vision_tower")
    whole = vision_tower(**inputs)
    first, second = inputs["patches_ni"].split([20, 14])
    swapped = vision_tower(torch.cat([second, first]), inputs["weights"], ((2, 7), (4, 5)), config=TINY)
    assert torch.equal(torch.cat([swapped[14:], swapped[:14]]), whole)
    poisoned = torch.cat([first, torch.full_like(second, torch.nan)])
    assert torch.equal(vision_tower(poisoned, inputs["weights"], inputs["grids"], config=TINY)[:20], whole[:20])


def test_positions_have_two_axes() -> None:
    inputs = drawn("vision_tower")
    same = inputs["patches_ni"][:1].expand(6, -1)
    for grids in (((2, 3),), ((3, 2),)):
        y = vision_tower(same, inputs["weights"], grids, config=TINY, num=SEMANTIC)
        # equal patches are told apart by nothing: values are, but keys and queries only move weights between them
        torch.testing.assert_close(y, y[:1].expand_as(y), rtol=1e-9, atol=1e-9)
    patches = inputs["patches_ni"][:6]
    tall, wide = (vision_tower(patches, inputs["weights"], g, config=TINY) for g in (((3, 2),), ((2, 3),)))
    assert not torch.equal(tall, wide)


def test_the_projector_has_the_exact_gelu() -> None:
    inputs = drawn("project_tokens")
    w, x = inputs["weights"], inputs["x_yi"].double()
    h = x @ w.w_in_fi.double().T + w.b_in_f.double()
    h = torch.tensor([[v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in row] for row in h.tolist()]).double()
    expected = h.float().double() @ w.w_out_ff.double().T + w.b_out_f.double()
    torch.testing.assert_close(project_tokens(**inputs, num=SEMANTIC), expected, rtol=1e-5, atol=1e-5)


def test_spans_and_their_types() -> None:
    types = span_types(plan_of(4, 5, 4))  # 2 rows of 2 tokens
    assert types.tolist() == [0, 1, 1, 2, 1, 1, 2, 3]
    assert len(types) == plan_of(4, 5, 4).tokens
    engine = internal_types(torch.cat([types, torch.tensor([-1])]))
    assert engine.tolist() == [3, 2, 2, 5, 2, 2, 5, 4, 1]
    assert internal_types(engine, inverse=True).tolist() == [*types.tolist(), -1]
    assert ((engine >= 2) == torch.tensor([True] * 8 + [False])).all()  # the engine's image mask
    assert {int(t) for t in TokenType} == {-1, 0, 1, 2, 3}


def test_rows_are_inserted_by_running_rank() -> None:
    embed, image, marker = torch.zeros(5, 1), torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0], [30.0]])
    y = insert_images(embed, image, marker, torch.tensor([0, 1, 2, 1, 3]))
    assert y[:, 0].tolist() == [10, 1, 20, 2, 30]


def test_no_image_and_no_token() -> None:
    none = torch.zeros(0, 3 * TINY.patch**2)
    assert vision_tower(none, drawn("vision_tower")["weights"], (), config=TINY).shape == (0, 32)
    assert pixel_unshuffle(torch.zeros(0, 4), (), ratio=3).shape == (0, 36)
    assert insert_images(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(3, 4), torch.zeros(0).int()).shape == (0, 4)


def test_real_image_files_are_read_as_rgb() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = noise(5, 7, 3)
    file = io.BytesIO()
    image.fromarray(pixels.numpy(), "RGB").save(file, "PNG")
    assert torch.equal(read_image(file), pixels)
    for mode in ("L", "CMYK", "RGBA", "P"):
        other = io.BytesIO()
        image.fromarray(pixels.numpy(), "RGB").convert(mode).save(other, "TIFF")
        assert read_image(other).shape == (5, 7, 3)
    with pytest.raises(ValueError, match="source: expected an image"):
        read_image(io.BytesIO(file.getvalue()[:40]))


# parity with each candidate


def test_every_candidate_agrees_with_the_reference(judged) -> None:
    assert judged.faults("vision") == []


# batch invariance


def test_every_candidate_is_batch_invariant(judged) -> None:
    assert judged.without("vision", "batch_invariant") == []


# golden vectors


def test_the_golden_vectors_hold() -> None:
    assert goldens.faults(CARD) == []


# rejected input


def test_a_bad_configuration_is_refused() -> None:
    for name in ("hidden", "num_heads", "num_layers", "intermediate", "model_dim", "patch", "downsample"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            replace(RELEASED, **{name: 0})
    with pytest.raises(ValueError, match="hidden: expected a multiple of 4 x 16 heads, got 1000"):
        replace(RELEASED, hidden=1000)
    with pytest.raises(ValueError, match="max_tokens: expected at least 5, got 4"):
        replace(RELEASED, max_tokens=4)
    with pytest.raises(ValueError, match=r"max_wh_ratio: expected a positive number or None, got 0\.0"):
        replace(RELEASED, max_wh_ratio=0.0)


def test_bad_sizes_and_bytes_are_refused() -> None:
    for size, name in (((0, 5), "width"), ((5, -1), "height")):
        with pytest.raises(ValueError, match=f"{name}: expected a positive number"):
            plan_image(*size, config=RELEASED)
        with pytest.raises(ValueError, match=f"{name}: expected a positive number"):
            contained_size(*size, plan_of(1, 1, 4))
        with pytest.raises(ValueError, match=f"{name}: expected a positive number"):
            resize_image(noise(2, 2, 3), width=size[0], height=size[1])
    with pytest.raises(ValueError, match=r"pixels_hwc \(sides\): expected a positive number, got 0"):
        resize_image(noise(0, 2, 3), width=1, height=1)
    with pytest.raises(ValueError, match="pixels_hwc: expected c=3, got c=4"):
        resize_image(noise(2, 2, 4), width=1, height=1)
    with pytest.raises(TypeError, match=r"pixels_hwc: expected torch\.uint8"):
        resize_image(torch.zeros(2, 2, 3), width=1, height=1)
    with pytest.raises(ValueError, match=r"type_t: expected \[-1, 0, 1, 2, 3\], got \[7\]"):
        internal_types(torch.tensor([7]))


@pytest.mark.parametrize("op", [image_patches, image_patches_triton])
def test_bad_pixels_are_refused(op: Any) -> None:
    plan = plan_of(1, 2, 4)
    with pytest.raises(ValueError, match="pixels_hwc: expected at most 4 x 8, got 5 x 8"):
        op(noise(5, 8, 3), plan=plan, config=TINY)
    with pytest.raises(ValueError, match="pixels_hwc: expected c=3, got c=1"):
        op(noise(4, 8, 1), plan=plan, config=TINY)
    with pytest.raises(TypeError, match=r"pixels_hwc: expected torch\.uint8"):
        op(torch.zeros(4, 8, 3), plan=plan, config=TINY)


@pytest.mark.parametrize("op", [pixel_unshuffle, pixel_unshuffle_triton])
def test_bad_grids_are_refused(op: Any) -> None:
    with pytest.raises(ValueError, match="grids: expected 5 patches, got 6"):
        op(torch.zeros(5, 2), ((2, 3),), ratio=3)
    with pytest.raises(ValueError, match="ratio: expected a positive number, got 0"):
        op(torch.zeros(6, 2), ((2, 3),), ratio=0)
    with pytest.raises(ValueError, match="x_nm: expected 2 dims"):
        op(torch.zeros(6), ((2, 3),), ratio=3)


@pytest.mark.parametrize("op", [insert_images, insert_images_triton])
def test_bad_rows_are_refused(op: Any) -> None:
    embed, image, marker = (torch.zeros(n, 4, dtype=torch.bfloat16) for n in (2, 1, 3))
    with pytest.raises(ValueError, match="marker_km: expected k=3, got k=2"):
        op(embed, image, marker[:2], torch.tensor([1, -1]))
    with pytest.raises(ValueError, match="image_ym: expected m=4, got m=3"):
        op(embed, image[:, :3], marker, torch.tensor([1, -1]))
    with pytest.raises(ValueError, match="type_t: expected t=2, got t=3"):
        op(embed, image, marker, torch.tensor([1, -1, -1]))
    with pytest.raises(TypeError, match="type_t: expected"):
        op(embed, image, marker, torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("op", [insert_images, insert_images_triton])
def test_images_have_to_fit_their_places(op) -> None:
    embed, image, marker = torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="image_ym: expected 2 rows, got 1"):
        op(embed, image, marker, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="type_t: expected"):
        op(embed, image, marker, torch.tensor([1, 9]))


def test_what_only_the_reference_inspects() -> None:
    inputs = drawn("vision_tower")
    with pytest.raises(ValueError, match="grids: expected 34 patches, got 4"):
        vision_tower(inputs["patches_ni"], inputs["weights"], ((2, 2),), config=TINY)
    with pytest.raises(ValueError, match="patches_ni: expected i=48"):
        vision_tower(torch.zeros(4, 7), inputs["weights"], ((2, 2),), config=TINY)


def test_buffers_and_dtypes_that_do_not_fit_are_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="out: expected contiguous"):
        pixel_unshuffle_triton(torch.zeros(4, 2), ((2, 2),), ratio=2, out=torch.zeros(2, 8))
    with pytest.raises(TypeError, match=r"out: expected torch\.float32"):
        pixel_unshuffle_triton(torch.zeros(4, 2), ((2, 2),), ratio=2, out=torch.zeros(1, 8).half())
    with pytest.raises(TypeError, match="x_nm: expected"):
        pixel_unshuffle_triton(torch.zeros(4, 2, dtype=torch.float64), ((2, 2),), ratio=2)
    with pytest.raises(TypeError, match=r"image_ym: expected torch\.float32, got torch\.float16"):
        insert_images_triton(torch.zeros(1, 4), torch.zeros(0, 4).half(), torch.zeros(3, 4), torch.tensor([-1]))
    with pytest.raises(ValueError, match="out: expected contiguous"):
        image_patches_triton(noise(4, 4, 3), plan=plan_of(1, 1, 4), config=TINY, out=torch.zeros(2, 48).bfloat16())
    with pytest.raises(TypeError, match="out: expected"):
        insert_images_triton(
            torch.zeros(1, 4), torch.zeros(0, 4), torch.zeros(3, 4), torch.tensor([-1]), out=torch.zeros(1, 4).half()
        )
