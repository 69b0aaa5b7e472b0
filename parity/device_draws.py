"""Random tensors made on a device, of which benches are made; on `meta` only their shapes and dtypes."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceDraws:
    """Draws from one seed on one device."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self.generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers in low … high − 1, uniform, with repeats."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def order(self, count: int) -> Tensor:
        """A permutation of 0 … count − 1, int32."""
        return torch.randperm(count, generator=self.generator, device=self.device).to(torch.int32)

    def full(self, value: int, *shape: int) -> Tensor:
        """The same int32 everywhere."""
        return torch.full(shape, value, device=self.device, dtype=torch.int32)

    def e4m3(self, *shape: int) -> Tensor:
        """e4m3 codes of normal values times 64."""
        return (self.normal(*shape, dtype=torch.float32) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)

    def bytes(self, low: int, high: int, *shape: int) -> Tensor:
        """uint8 in low … high − 1."""
        return self.integers(low, high, *shape, dtype=torch.uint8)
