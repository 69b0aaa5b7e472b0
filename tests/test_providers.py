"""Vendor libraries: found by their distribution and the parameters of their functions, refused by name."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deeptwin.optimized import providers
from deeptwin.optimized.providers import packed, tile_kernels


def second_line() -> ModuleType:
    module = ModuleType("tile_kernels")
    module.quant = SimpleNamespace(per_token_cast=lambda x, use_e4m3_sf: x)
    module.moe = SimpleNamespace(moe_topk_gate_forward=lambda logits, image_token_mask: logits)
    return module


def first_line() -> ModuleType:
    module = second_line()
    module.quant.per_token_cast = lambda x, fmt: x
    return module


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, provider: str, chip: int | None) -> None:
    monkeypatch.setitem(sys.modules, "tile_kernels", module)
    monkeypatch.setattr(providers, "_provider", lambda name: provider)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: chip is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (chip, 0))


@pytest.mark.parametrize("chip", [9, 10])
@pytest.mark.parametrize("name", ["tile-kernels 2.1.0", "tile_kernels 2.2"])
def test_the_second_line_is_taken_on_either_chip(monkeypatch: pytest.MonkeyPatch, name: str, chip: int) -> None:
    module = second_line()
    install(monkeypatch, module, name, chip)
    assert tile_kernels() is module


@pytest.mark.parametrize(
    ("module", "provider", "chip", "message"),
    [
        (None, "", 9, "tile_kernels: expected tile-kernels 2.x, got none"),
        (first_line(), "tile-kernels 1.0.0", 9, "tile_kernels: expected tile-kernels 2.x, got tile-kernels 1.0.0"),
        (first_line(), "tile-kernels 2.0.0", 9, "tile_kernels: expected tile-kernels 2.x, got tile-kernels 2.0.0"),
        (ModuleType("tile_kernels"), "tile-kernels 2.1.0", 9, "tile_kernels: expected tile-kernels 2.x"),
        (second_line(), "an unknown distribution", 9, "tile_kernels: expected tile-kernels 2.x, got an unknown"),
        (second_line(), "tile-kernels 2.1.0", None, "tile_kernels: expected a CUDA device of SM90 or SM100, got none"),
        (second_line(), "tile-kernels 2.1.0", 8, "tile_kernels: expected a CUDA device of SM90 or SM100, got 8"),
    ],
)
def test_what_is_missing_or_of_another_line_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, provider: str, chip: int | None, message: str
) -> None:
    install(monkeypatch, module, provider, chip)
    with pytest.raises(NotImplementedError, match=message):
        tile_kernels()


def test_rows_are_packed_where_they_are_not_one_behind_the_other() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert packed(x) is x
    assert packed(x[:0]).shape == (0, 3, 4)
    for loose in (
        x[:, :, :2],
        x[:1, :2],
        x.transpose(0, 1),
        x.as_strided((1, 3), (7, 1)),
        x.as_strided((3, 1), (1, 5)),
    ):
        whole = packed(loose)
        assert torch.equal(whole, loose)
        assert whole.stride() == torch.empty(loose.shape).stride()
