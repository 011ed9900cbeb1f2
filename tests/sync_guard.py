"""Finds on a CPU where the host would wait for a GPU: what reads a tensor, and what copies to it from pageable memory.

Every tensor stands for one on the device, except those that share the memory of a NumPy array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.devices.cuda_device import PinnedCopy
from engine.model.ops import attention, moe, sampling
from engine.model.ops.latent import attention as latent_plain
from engine.model.ops.recurrent import causal_conv, linear_attention
from engine.runner.model_runner import ModelRunner

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.bincount,
    aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive,
}  # fmt: skip
READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
COPYING_CALLS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
STAND_INS = {
    function.__code__
    for function in (
        attention.write_kv, attention.paged_attention, latent_plain.write_latent,
        latent_plain.latent_attention, moe.mix_experts_plain, sampling.draw_filtered,
        causal_conv.causal_conv_plain, linear_attention.linear_attention_plain, PinnedCopy.add,
    )
}  # fmt: skip
"""Stand for kernels, which read lengths on the device; or fill the pinned memory."""
HOST_FUNCTIONS = {"grid_inputs"}
"""Names of functions that work on the host's own memory, in modules that take long to import."""


class HostWaits(AssertionError):
    """The host would wait for the device between launch and collect."""


def of_numpy(value: object) -> bool:
    return isinstance(value, Tensor) and not value.untyped_storage().resizable()


def in_stand_in() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in STAND_INS and frame.f_code.co_name not in HOST_FUNCTIONS:
        frame = frame.f_back
    return frame is not None


def refuse(what: str, value: object = None) -> None:
    """Raise HostWaits, unless `value` is the host's own or the caller stands for something else."""
    if not in_stand_in() and not of_numpy(value):
        raise HostWaits(what)


@cache
def is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


class Operations(TorchDispatchMode):
    """Refuses operations whose result has a size, or is a number, that only the device knows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:  # in inference mode it would otherwise run unseen
                return func.decompose(*args, **kwargs)
        packet = func.overloadpacket
        if packet in READS:
            refuse(str(packet), args[0])
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            refuse("repeat_interleave without output_size", args[0])
        elif packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if masks and not (len(args) > 2 and args[2].numel() == 1):  # which is masked_fill
                refuse("a boolean index", masks[0])
        return func(*args, **kwargs)


class Calls(TorchFunctionMode):
    """Refuses methods that hand memory to the host, which no operation shows, and copies of values of the host's."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in READING_METHODS:
            refuse(f"Tensor.{func.__name__}", args[0])
        elif func in COPYING_CALLS:
            refuse(f"{func.__name__}, a copy from pageable memory")
        elif func is Tensor.to and of_numpy(args[0]) and not kwargs.get("non_blocking"):
            refuse("Tensor.to of an array, a copy from pageable memory")
        elif func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list | np.ndarray) for i in index):
                refuse("an index from pageable memory")
            is_number = func is Tensor.__setitem__ and isinstance(args[2], int | float)
            if is_number and any(isinstance(i, Tensor) and i.dtype != torch.bool for i in index):
                refuse("a number, which is copied to where an index points")
        return func(*args, **kwargs)


def forbid_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise HostWaits from `prepare` and `launch` of every runner wherever the host would wait."""
    for name in ("prepare", "launch"):
        monkeypatch.setattr(ModelRunner, name, guarded(getattr(ModelRunner, name)))


def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    def strict(*args: Any) -> Any:
        with Calls(), Operations():
            return call(*args)

    return strict
