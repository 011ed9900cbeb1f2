"""Compares what each kernel computes in the steps of a model with what plain torch computes from the same inputs.

A kernel is compared at its first call with inputs of some shapes. At its second call with the same shapes, it is also
captured in a graph with the inputs of the first, and compared once more when the graph is replayed with the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.devices.device import Device
from engine.kernel_trial.tried_part import tried_parts
from engine.kernel_trial.twins import MEANINGS, Op, name_of, twin, twins
from engine.model.batch import Batch
from engine.model.ops.gpu.libraries import attention
from engine.model.quantization.rows import QuantizedRows
from engine.model.state import StateBatch

MAX_ERROR = 0.03  # of a row, relative to its length; bfloat16 gives 0.005
MAX_ROUNDED_ERROR = 0.1  # the same of rows in float8, where a last bit more or less rounds to another number
FEW_TIES = 2  # in a call
MAX_TIES = 0.05  # of whole numbers, such as experts, that may differ where the numbers beside them are equal
LARGEST_COPY = 64 << 20  # bytes; a larger tensor is a weight, which no kernel writes to
HIDDEN = ("plans", "views", "layers")  # fields of a batch that are for layers: what they derive, and all their states

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments by position and by name


@dataclass(slots=True)
class Verdict:
    """What a trial has found out about a kernel."""

    op: str
    kernel: Op
    calls: int = 0
    """Calls that were compared."""
    graphs: int = 0
    """Replayed graphs that were compared."""
    error: float = 0.0
    """Largest error of a row, relative to its length."""
    wrong: str = ""
    """What was wrong first; empty if nothing was."""

    def facts(self) -> dict[str, Any]:
        """Return everything but the kernel itself."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kernel"}


@dataclass
class KernelTrial:
    """The kernels of a model, and what was found out about each."""

    device: Device
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], Call | None] = field(default_factory=dict)

    @contextmanager
    def watching(self, runner: Any) -> Iterator[KernelTrial]:
        """Compare every kernel that a ModelRunner calls in the `with` block: those of layers, sampling and parts."""
        replaced: list[tuple[Any, str, Any]] = []

        def watch(owner: Any) -> None:
            for name, value in list(vars(owner).items()):
                if (watched := self.watched(value)) is not value:
                    replaced.append((owner, name, value))
                    setattr(owner, name, watched)

        parts = tried_parts(runner)
        for part in parts:
            twins().update(part.twins())
        added = [each for part in parts for each in part.added()]
        for owner in (runner, *runner.parts.all, *runner.model.modules(), *added):
            watch(owner)
        try:
            yield self
        finally:
            for owner, name, value in replaced:
                setattr(owner, name, value)

    def watched(self, value: Any) -> Any:
        """Return what takes the place of a kernel, or of all kernels in a tuple; `value` itself if it is neither."""
        if value is attention:
            return SimpleNamespace(**{name: WatchedKernel(self, getattr(value, name)) for name in attention.__all__})
        if isinstance(value, tuple):
            parts = [self.watched(part) for part in value]
            same = all(new is old for new, old in zip(parts, value, strict=True))
            return value if same else remade(value, parts)
        return value if isinstance(value, ModuleType) or twin(value) is None else WatchedKernel(self, value)

    def compare(self, kernel: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a kernel, and note whether it computes what its plain twin does. Returns the kernel's results."""
        args, kwargs = changed(unwatched, (args, kwargs))
        verdict = self.verdicts.setdefault(name_of(kernel), Verdict(name_of(kernel), kernel))
        key = (verdict.op, *signature((args, kwargs)))
        first = self._seen.get(key)
        if key in self._seen and first is None:  # compared often enough
            return kernel(*args, **kwargs)
        before = copied((args, kwargs))
        self._seen[key] = before if first is None else None
        plain, twin_call = twin(kernel), changed(plain_part, copied(before))
        assert plain is not None
        expected = plain(*twin_call[0], **twin_call[1])
        found = kernel(*args, **kwargs)
        verdict.calls += 1
        self._judge(verdict, "", (found, (args, kwargs)), (expected, twin_call), before)
        if first is not None and self.device.asynchronous:
            replayed = self._replayed(kernel, first, before)
            verdict.graphs += 1
            self._judge(verdict, "in a replayed graph, ", replayed, (expected, twin_call), before)
        return found

    def _replayed(self, kernel: Op, first: Call, then: Call) -> tuple[Any, Call]:
        """Return the results and arguments of a graph that was captured with the arguments of `first` and is replayed
        with those of `then`."""
        call, (args, kwargs) = copied(first), copied(first)
        kernel(*args, **kwargs)  # a graph cannot contain a compilation
        output: list[Any] = []

        def run() -> Tensor:
            args, kwargs = changed(lambda part: part, call)  # the same tensors, and nothing that was derived from them
            output[:] = [kernel(*args, **kwargs)]
            return torch.empty(0, device=self.device.torch_device)

        _, replay, destroy = self.device.capture(run)
        for target, source in zip(tensors(call), tensors(then), strict=True):
            if target is not source:
                target.copy_(source)
        replay()
        found = copied((output[0], call))
        destroy()
        return found

    def _judge(
        self, verdict: Verdict, where: str, found: tuple[Any, Call], expected: tuple[Any, Call], before: Call
    ) -> None:
        """Compare results, and the arguments that the plain twin has changed."""
        pairs = list(zip(tensors(readable(found[0])), tensors(readable(expected[0])), strict=True))
        if (meaning := MEANINGS.get(verdict.kernel)) is not None:
            pairs += zip(meaning(found[1][0]), meaning(expected[1][0]), strict=True)
        else:
            arguments = zip(tensors(found[1]), tensors(expected[1]), tensors(before), strict=True)
            pairs += [
                (own, right)
                for own, right, old in arguments
                if right is not old and not torch.equal(bits(right), bits(old))
            ]
        results = found[0] if isinstance(found[0], tuple) and not isinstance(found[0], QuantizedRows) else (found[0],)
        limit = MAX_ROUNDED_ERROR if any(isinstance(part, QuantizedRows) for part in results) else MAX_ERROR
        error = worst(pairs, real_rows(before))
        verdict.error = max(verdict.error, error)
        if not error < limit and not verdict.wrong:
            verdict.wrong = f"{where}a row of its results differs by {error:.1%}"


class WatchedKernel:
    """A kernel whose calls are compared."""

    def __init__(self, trial: KernelTrial, kernel: Op):
        self.trial, self.kernel = trial, kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.trial.compare(self.kernel, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def remade(value: tuple[Any, ...], parts: list[Any]) -> Any:
    """Return a tuple, named or not, with other parts."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def unwatched(value: Any) -> Any:
    return value.kernel if isinstance(value, WatchedKernel) else value


def plain_part(value: Any) -> Any:
    """Return the plain version of a kernel that is an argument, such as the activation of experts."""
    return (twin(value) or value) if callable(value) else value


def changed(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with `change` applied to all parts of its tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor | WatchedKernel):
        return change(value)
    if isinstance(value, dict):
        return {key: changed(change, part) for key, part in value.items()}
    if isinstance(value, tuple):
        return remade(value, [changed(change, part) for part in value])
    if isinstance(value, list):
        return [changed(change, part) for part in value]
    if isinstance(value, Batch | StateBatch):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{k: type(v)() if k in HIDDEN else changed(change, v) for k, v in parts.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: changed(change, getattr(value, f.name)) for f in fields(value) if f.init})
    return change(value)


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in a value, in a fixed order."""
    found: list[Tensor] = []

    def note(part: Any) -> Any:
        if isinstance(part, Tensor):
            found.append(part)
        return part

    changed(note, value)
    return found


def copied(value: Any) -> Any:
    """Return a value with its tensors copied, each once and with its strides, except weights."""
    copies: dict[int, Tensor] = {}

    def copy(part: Any) -> Any:
        if not isinstance(part, Tensor) or part.nbytes > LARGEST_COPY:
            return part
        if id(part) not in copies:
            copies[id(part)] = torch.empty_strided(
                part.size(), part.stride(), dtype=part.dtype, device=part.device
            ).copy_(part)
        return copies[id(part)]

    return changed(copy, value)


def signature(value: Any) -> list[Any]:
    """Return what a kernel may depend on besides the values of tensors."""
    found: list[Any] = []

    def note(part: Any) -> Any:
        found.append((part.shape, part.stride(), part.dtype) if isinstance(part, Tensor) else repr(part))
        return part

    changed(note, value)
    return found


def readable(results: Any) -> Any:
    """Return results with quantized rows replaced by what they stand for."""
    if isinstance(results, QuantizedRows):
        return results.dequantize()
    return tuple(map(readable, results)) if isinstance(results, tuple) else results


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.dtype != torch.bool else x


def real_rows(call: Call) -> Tensor | None:
    """Return which rows of a call's batch are no padding; None if it has no batch."""
    batches = [part for part in (*call[0], *call[1].values()) if isinstance(part, Batch)]
    return batches[0].slot_mapping >= 0 if batches else None


def worst(pairs: list[tuple[Tensor, Tensor]], real: Tensor | None) -> float:
    """Return the largest error of a row of the first tensor of each pair, relative to the length of the second's.
    real: rows that are no padding, of tensors with as many."""
    errors, whole = [0.0], []
    for found, expected in pairs:
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return float("inf")
        if real is not None and len(found) == len(real):
            found, expected = found[real], expected[real]
        if not expected.dtype.is_floating_point:
            whole.append((found, expected))
        elif expected.numel():
            errors.append(row_error(found.float().flatten(1), expected.float().flatten(1)))
    for found, expected in whole:
        wrong, count = int((found != expected).sum()), max(1, expected.numel())
        tied = wrong <= max(FEW_TIES, MAX_TIES * count) and len(pairs) > len(whole)
        errors.append(0.0 if tied else wrong / count)
    return max(errors)


def row_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a row, infinity if a number is finite in one of the tensors only."""
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    found, expected = (x.nan_to_num(0.0, 0.0, 0.0) for x in (found, expected))
    length = expected.norm(dim=1)
    return ((found - expected).norm(dim=1) / torch.where(length > 0, length, 1.0)).max().item()
