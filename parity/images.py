"""Image files as bytes, through Pillow (the `vision` extra); `reference/images.py` takes it from there."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import torch
from torch import Tensor


def read_image(source: Path | IO[bytes]) -> Tensor:
    """The first frame of an image file as uint8 [h, w, 3]; grey, CMYK, palette and alpha become RGB.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: the file is no image, or it is cut short.
    """
    import numpy as np
    from PIL import Image

    try:
        with Image.open(source) as image:
            pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"source: expected an image, got {error}") from error
    return torch.from_numpy(pixels)
