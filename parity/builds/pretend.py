"""A device that is not there: launchers run on it as far as the call of a kernel, which is recorded and not made.

Tensors are torch's fake tensors, which have shapes, strides and offsets but no memory, on `cuda` or `npu`; triton's
launcher is given a driver that answers for that device. Imported in a compile process only.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

SM90 = 90  # the target that specialises arguments where triton has no backend; every target does it alike


class _Driver:
    """What triton's launcher asks of a driver before it compiles."""

    def __init__(self, arch: str, capability: int) -> None:
        self.arch = arch
        self.capability = capability

    def get_current_device(self) -> str:
        return f"pretended {self.arch}"  # a key of triton's caches

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class _WithoutDeviceGuard(TorchFunctionMode):
    """Indexing and `contiguous` by other functions: their own bindings switch devices, and there is none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and _is_basic(args[1]):
            return _index(*args)
        if func is Tensor.contiguous and not args[0].is_contiguous():
            return args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **kwargs)


def _is_basic(index: Any) -> bool:
    return all(
        part is None or part is Ellipsis or isinstance(part, int | slice)
        for part in (index if isinstance(index, tuple) else (index,))
    )


def _index(x: Tensor, index: Any) -> Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    named = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis in parts:
        where = parts.index(Ellipsis)
        parts[where : where + 1] = [slice(None)] * (x.dim() - named)
    axis = 0
    for part in parts:
        if part is None:
            x, axis = x.unsqueeze(axis), axis + 1
        elif isinstance(part, slice):
            x, axis = torch.ops.aten.slice(x, axis, part.start, part.stop, part.step or 1), axis + 1
        else:
            x = x.select(axis, part)
    return x


@contextmanager
def pretended_device(arch: str, capability: int | None, record: Callable[..., bool]) -> Iterator[None]:
    """Within it new tensors are on the device of `arch`, and `record` is given every call of a kernel.

    `capability` is that of an NVIDIA architecture, `None` stands for an Ascend device.
    """
    from triton import knobs
    from triton.runtime import driver

    with ExitStack() as stack:
        stack.callback(setattr, driver, "_active", driver.__dict__.get("_active"))
        stack.callback(setattr, knobs.runtime, "jit_cache_hook", knobs.runtime.jit_cache_hook)
        driver.set_active(_Driver(arch, capability or SM90))
        knobs.runtime.jit_cache_hook = record
        # the binder asks every tensor for its address; a fake one warns and answers with its offset
        stack.enter_context(warnings.catch_warnings(action="ignore", category=UserWarning))
        if capability is not None:
            answer = divmod(capability, 10)
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=answer))
        else:
            _know_npu()
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.device("npu" if capability is None else "cuda"))
        stack.enter_context(_WithoutDeviceGuard())
        yield


def _know_npu() -> None:
    """Give torch the device type `npu` and the few functions that it asks of a device module."""
    if hasattr(torch, "npu"):
        return
    module: Any = types.ModuleType("torch.npu")
    module.is_initialized = module.is_available = module._is_in_bad_fork = lambda: False
    module.current_device, module.device_count = lambda: 0, lambda: 1
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", module)
