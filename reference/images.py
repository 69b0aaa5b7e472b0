"""What comes before the first number of an image model: the plan of an image, the resize of bytes, the span's types.

Definitional throughout: Python doubles, integers and bytes, the same under every numerics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import expect_dtype, expect_positive, expect_shape
from .config import ImagePlan, TokenType, VisionConfig

INTERNAL_TYPES = {  # the engine's numbering; 0 is undefined and 6 is padding there
    TokenType.TEXT: 1,
    TokenType.IMAGE: 2,
    TokenType.START: 3,
    TokenType.END: 4,
    TokenType.NEWLINE: 5,
}


def plan_image(width: int, height: int, *, config: VisionConfig) -> ImagePlan:
    """The size that an image is brought to, in pixels, patches and tokens.

    Math:
        small images grow to `min_pixels`; sides go up to whole patches; an image of more than `max_tokens` tokens
        shrinks to the largest grid of whole tokens that fits its aspect

    Rounding:
        Python doubles throughout; every direction of rounding is part of the model.

    Raises:
        ValueError: width or height is not positive.

    Source:
        v41-blocks.md section 6.1
    """
    expect_positive("width", width)
    expect_positive("height", height)
    p, r, limit = config.patch, config.downsample, config.max_tokens
    w, h = float(width), float(height)
    if config.max_wh_ratio is not None and w > h * config.max_wh_ratio:
        w = h * config.max_wh_ratio
    if 0 < w * h < config.min_pixels:
        factor = math.sqrt(config.min_pixels / (w * h))
        w, h = float(math.trunc(w * factor)), float(math.trunc(h * factor))
    plan = _grid(math.ceil(w / p) * p, math.ceil(h / p) * p, config)
    if plan.tokens <= limit:
        return plan
    aspect = h / w
    most_w = math.sqrt((limit - 2) / aspect + 0.25) - 0.5
    most_h = most_w * aspect
    if most_w < 1:
        return _grid(p * r, (limit - 2) // 2 * p * r, config)
    if most_h < 1:
        return _grid((limit - 3) * p * r, p * r, config)
    beta = min(math.floor(most_w) * p * r / w, math.floor(most_h) * p * r / h)
    return _grid(math.floor(w * beta / p) * p, math.floor(h * beta / p) * p, config)


def contained_size(width: int, height: int, plan: ImagePlan, *, stretch: bool = False) -> tuple[int, int]:
    """Width and height of the resized image inside the plan: the aspect is kept unless a side would vanish.

    Math:
        the side too long for the aspect becomes round(height / width * plan.width), or the converse, half to even

    Raises:
        ValueError: width or height is not positive.

    Source:
        v41-blocks.md section 6.1
    """
    expect_positive("width", width)
    expect_positive("height", height)
    size = (plan.width, plan.height)
    if not stretch and width / height > plan.width / plan.height:
        size = (plan.width, round(height / width * plan.width))
    elif not stretch and width / height < plan.width / plan.height:
        size = (round(width / height * plan.height), plan.height)
    return size if min(size) > 0 else (plan.width, plan.height)


def resize_image(pixels_hwc: Tensor, *, width: int, height: int) -> Tensor:
    """Antialiased bicubic resize of bytes, as Pillow computes it: two passes, each rounded and clamped to bytes.

    Math:
        taps = cubic(-0.5) over 2 max(scale, 1) pixels around (x + 0.5) scale, normalised, in 22-bit fixed point

    Shapes:
        pixels_hwc: uint8 [h, w, 3]; returns uint8 [height, width, 3].

    Rounding:
        taps to integers, sums of products half up to bytes, after each pass (definitional).

    Raises:
        TypeError: pixels are no bytes.
        ValueError: pixels are no [h, w, 3], or empty; width or height is not positive.
    """
    expect_dtype("pixels_hwc", pixels_hwc, torch.uint8)
    expect_shape("pixels_hwc", pixels_hwc, "hwc", {"c": 3})
    for name, value in (("width", width), ("height", height), ("pixels_hwc (sides)", min(pixels_hwc.shape[:2]))):
        expect_positive(name, value)
    wide = pixels_hwc if pixels_hwc.shape[1] == width else _resampled(pixels_hwc.transpose(0, 1), width).transpose(0, 1)
    return wide.contiguous() if wide.shape[0] == height else _resampled(wide, height).contiguous()


def span_types(plan: ImagePlan) -> Tensor:
    """The types of a whole span, int32 [tokens]: START, rows of IMAGE each with a NEWLINE, END."""
    row = [TokenType.IMAGE] * plan.tokens_w + [TokenType.NEWLINE]
    return torch.tensor([TokenType.START, *(row * plan.tokens_h), TokenType.END], dtype=torch.int32)


def internal_types(type_t: Tensor, *, inverse: bool = False) -> Tensor:
    """Types of the release in the engine's numbering, or back.

    Raises:
        ValueError: a type is unknown.
    """
    pairs = [(int(key), value) for key, value in INTERNAL_TYPES.items()]
    found = torch.full_like(type_t, -2)
    for release, engine in pairs:
        old, new = (engine, release) if inverse else (release, engine)
        found = torch.where(type_t == old, new, found)
    if (found == -2).any():
        raise ValueError(f"type_t: expected {sorted(p[inverse] for p in pairs)}, got {type_t.unique().tolist()}")
    return found


def _grid(width: int, height: int, config: VisionConfig) -> ImagePlan:
    columns, rows, r = width // config.patch, height // config.patch, config.downsample
    return ImagePlan(
        width=width, height=height, grid_w=columns, grid_h=rows, tokens_w=-(-columns // r), tokens_h=-(-rows // r)
    )


def _resampled(x_swc: Tensor, size: int) -> Tensor:
    """The first axis resampled to `size`, bytes to bytes."""
    old = x_swc.shape[0]
    scale = old / size
    reach = max(scale, 1.0)
    y = torch.empty(size, *x_swc.shape[1:], dtype=torch.uint8)
    for at in range(size):
        centre = (at + 0.5) * scale
        first = max(int(centre - 2 * reach + 0.5), 0)
        last = min(int(centre + 2 * reach + 0.5), old)
        taps = [_cubic((i - centre + 0.5) / reach) for i in range(first, last)]
        total = math.fsum(taps)
        fixed = torch.tensor([math.floor(abs(t / total) * 2**22 + 0.5) * (1 if t >= 0 else -1) for t in taps])
        weighted = (x_swc[first:last].long() * fixed[:, None, None]).sum(0, dtype=torch.int64)
        y[at] = ((weighted + 2**21) >> 22).clamp(0, 255).to(torch.uint8)
    return y


def _cubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0
