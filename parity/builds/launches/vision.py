"""Production calls around the image tower: an image of 969 tokens, rows of 1024 and 5120."""

from __future__ import annotations

import torch

from deeptwin.optimized.vision import image_patches_triton, insert_images_triton, pixel_unshuffle_triton
from deeptwin.reference.config import ImagePlan, VisionConfig

PLAN = ImagePlan(width=1708, height=966, grid_w=122, grid_h=69, tokens_w=41, tokens_h=23)


def patches_1708() -> None:
    """An image of 1920 x 1080, resized."""
    image_patches_triton(torch.empty(961, 1708, 3, dtype=torch.uint8), plan=PLAN, config=VisionConfig())


def unshuffle_1024() -> None:
    """Its patches, three by three."""
    x = torch.empty(PLAN.grid_h * PLAN.grid_w, 1024, dtype=torch.bfloat16)
    pixel_unshuffle_triton(x, ((PLAN.grid_h, PLAN.grid_w),), ratio=3)


def insert_5120() -> None:
    """Its tokens among 4096 rows of text."""
    tokens = PLAN.tokens_h * PLAN.tokens_w
    insert_images_triton(
        torch.empty(4096, 5120, dtype=torch.bfloat16),
        torch.empty(tokens, 5120, dtype=torch.bfloat16),
        torch.empty(3, 5120, dtype=torch.bfloat16),
        torch.empty(4096, dtype=torch.int32),
        trusted=True,
    )
