"""The operations of a captured step, run again on the memory that they had: what a CUDA graph is, on a CPU.

No Python of the step runs again, so a number or a branch stays as it was when the step was captured. What the step has
allocated is noise before each replay, and all but its output after it. What it reads besides must have another owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from engine.devices.device import Run
from engine.distributed.tp_group import ConnectedGroup
from engine.model.batch import Batch
from engine.model.ops import attention, moe
from engine.model.ops.latent import attention as latent_attention
from engine.model.ops.recurrent import causal_conv, linear_attention
from tests.late_device import NOISE, LateDevice

KERNELS = (
    (attention, "write_kv"), (attention, "paged_attention"), (latent_attention, "write_latent"),
    (latent_attention, "latent_attention"), (moe, "mix_experts_plain"),
    (causal_conv, "causal_conv_plain"), (linear_attention, "linear_attention_plain"),
    (ConnectedGroup, "all_gather"), (ConnectedGroup, "reduce_scatter"),
)  # fmt: skip
"""Functions that stand for kernels, which read lengths on the device."""
Launch = tuple[Callable[..., Any], Any, Any, list[Tensor | None]]  # function, its arguments, results; None for views


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with every tensor in it changed."""
    if isinstance(value, Tensor):
        return value if value.is_mkldnn else change(value)  # a packed weight, which has no storage
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, part) for part in value])
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: mapped(change, getattr(value, field.name)) for field in fields(value)})
    return value


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(lambda tensor: (found.append(tensor), tensor)[1], value)
    return found


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Records the operations of a `with` block, which also run."""

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[Launch] = []
        self._own: dict[int, Tensor] = {}  # a tensor of each allocation of the block
        self._others: dict[int, list[Tensor]] = {}  # the tape's tensors in each allocation of others
        self.output: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.launch(func, args, kwargs or {}, func._schema.is_mutable)

    def launch(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], in_place: bool = False) -> Any:
        read = {place(tensor) for tensor in tensors_in((args, kwargs))}
        result = func(*args, **kwargs)
        made = [None if in_place or place(tensor) in read else tensor for tensor in tensors_in(result)]
        self._own.update({place(tensor): tensor for tensor in made if tensor is not None})
        if in_place or result is None or any(tensor is not None for tensor in made):  # no view
            self._launches.append((func, *mapped(self._alias, (args, kwargs)), made))
        return result

    def _alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the tape's own in the same memory, so that others may let go of theirs."""
        alias = tensor.detach()
        if place(tensor) not in self._own:
            self._others.setdefault(place(tensor), []).append(alias)
        return alias

    @torch.inference_mode()
    def replay(self) -> None:
        for tensors in self._others.values():
            storage = tensors[0].untyped_storage()
            owners = torch._C._storage_Use_Count(storage._cdata) - len(tensors) - 1  # `storage`
            assert owners > 0, f"a graph reads {tuple(tensors[0].shape)} that nobody else holds any more"
        with _disable_current_modes():  # no Python runs that could make the host wait
            self._run()

    def _run(self) -> None:
        self._poison()
        for func, args, kwargs, made in self._launches:
            for tensor, value in zip(made, tensors_in(func(*args, **kwargs)), strict=True):
                if tensor is not None:
                    assert tensor.shape == value.shape, f"{func}: a size that is not that of the capture"
                    tensor.copy_(value)
        self._poison(self.output)

    def _poison(self, *but: Tensor | None) -> None:
        kept = {place(tensor) for tensor in but if tensor is not None}
        for tensor in self._own.values():
            if place(tensor) not in kept:
                tensor.untyped_storage().fill_(NOISE)


def taped(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        tape = _get_current_dispatch_mode()
        if not isinstance(tape, Tape):
            return kernel(*args, **kwargs)
        with _disable_current_modes():
            return tape.launch(planned_anew(kernel), args, kwargs)

    return call


def planned_anew(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that derives nothing from the batch of the capture, as recurrent layers do for each other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(*(without_plans(arg) if isinstance(arg, Batch) else arg for arg in args), **kwargs)

    return call


def without_plans(batch: Batch) -> Batch:
    return batch if batch.states is None else replace(batch, states=replace(batch.states, plans={}))


def tape_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models that are built from now on launch what stands for kernels so that a tape sees it."""
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, taped(getattr(module, name)))


class TapedDevice(LateDevice):
    """A late device whose graphs are tapes."""

    def record(self, run: Run) -> tuple[Tensor, Callable[[], None]]:
        tape = Tape()
        with tape:
            output = tape.output = run()
        return output, tape.replay
