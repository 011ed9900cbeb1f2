"""A GPU that is not there: tensors that say `cuda:0`, lie in host memory, and raise where CUDA would.

    python -m pytest -p tests.gpu.stand_in tests/gpu tests/engine/model/ops/gpu

On a machine without a GPU the tests of kernels compute on the CPU and those of tests/gpu are skipped, so nothing sees a
tensor that is on the wrong device. This plugin changes torch for a whole process, before any test chooses its device:
operations that mix devices raise, a tensor of the device cannot become an array, and Triton's interpreter takes no
tensors of the host. `OUT_OF_REACH` names the tests of what it does not have.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
GIB = 1 << 30
Plain = torch._C.DisableTorchFunction  # a context in which tensors of both kinds are ordinary

OUT_OF_REACH = {
    "test_quantization.py::test_a_captured_product": "captures a graph by itself; the engine's graphs are stood in for",
    "test_kv_transfer.py::test_a_fresh_thread_that_enters": "asks CUDA's driver for its context",
    "test_kv_transfer.py::test_what_a_step_has_written": "needs a queue that is behind the host",
    "-nixl]": "NIXL registers memory of a card",
    "test_nixl_reads": "NIXL registers memory of a card",
    "test_ranks.py": "needs two GPUs",
    "the_host_never_waits": "needs CUDA's own guard of synchronization",
    "the_host_does_not_wait": "needs CUDA's own guard of synchronization",
    "test_graphs_stay_within_their_budget": "needs the memory of a card",
    "test_memory_of_another_process_does_not_count": "needs the memory of a card",
    "test_torch_compile": "Inductor compiles for the host, not for what stands in for a card",
    "BlockFP8": "torch multiplies blocks in FP8 on cards only",
}

QUICK = "test_greedy_tokens_are_the_cpus[llama]"  # of the tests of whole engines, of which each takes 20 s


class Cuda(Tensor):
    """A tensor of the device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, dict(kwargs or {}))


class Mode(TorchFunctionMode):
    """Sees calls that no tensor of the device takes part in, but may make one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, dict(kwargs or {}))


ANSWERS = {
    Tensor.device.__get__: CUDA,
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.get_device: 0,
}
BETWEEN_DEVICES = {"copy_", "record_stream", "set_", "__repr__", "_make_subclass", "__set__"}
MOVES = {"to", "cpu", "cuda"}
INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
TO_ARRAYS = {"numpy", "__array__"}


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch as it behaves with a GPU."""
    name = getattr(func, "__name__", str(func))
    mine = bool(args) and isinstance(args[0], Cuda)
    if mine and func in ANSWERS:
        return ANSWERS[func]
    if mine and name in TO_ARRAYS:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host first"
        )
    if name == "pin_memory":
        return args[0]
    if name == "is_pinned":
        return True
    if name in MOVES and args and isinstance(args[0], Tensor):
        return move(name, args[0], args[1:], kwargs)
    if name != "__get__":
        check_devices(name, args, kwargs)
    on_device = any(isinstance(tensor, Cuda) for tensor in tensors((args, kwargs)))
    if (asked := kwargs.get("device")) is not None:
        on_device, kwargs["device"] = is_cuda(asked), in_memory(asked)
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    with Plain():
        if name == "mm" and (dtype := kwargs.pop("out_dtype", None)) is not None:
            args = tuple(each.to(dtype) for each in args)  # only a card adds up rounded numbers in a wider type
        if name == "_scaled_grouped_mm":  # only a card has it
            from tests.engine.model.ops.gpu.grouped_products import scaled_grouped_mm as func
        result = func(*args, **kwargs)
        given = tensors((args, kwargs))
        return tree_map(lambda value: placed(value, on_device, given), result)


def move(name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call Tensor.to, cpu or cuda. What changes its device is copied, as between memories that are apart."""
    source = isinstance(tensor, Cuda)
    target = {"cpu": False, "cuda": True}.get(name, source)
    rest = list(args) if name == "to" else []
    for i, value in enumerate(rest):
        if isinstance(value, Tensor):
            target = isinstance(value, Cuda)
        elif isinstance(value, torch.device | str | int) and not isinstance(value, bool):
            target, rest[i] = is_cuda(value), in_memory(value)
    if name == "to" and (asked := kwargs.get("device")) is not None:
        target, kwargs["device"] = is_cuda(asked), in_memory(asked)
    with Plain():
        result = tensor.to(*rest, **kwargs) if name == "to" else tensor
        if result is tensor and target == source:
            return result
        result = result.as_subclass(Tensor)
        if target != source and result.data_ptr() == tensor.data_ptr():
            result = result.clone()
        return result.as_subclass(Cuda) if target else result


def check_devices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what CUDA raises if tensors of both devices meet. A number of the host may meet any tensor, and indices of
    the host may point into a tensor of the device."""
    found = tensors((args, kwargs))
    if name in BETWEEN_DEVICES or not any(isinstance(tensor, Cuda) for tensor in found):
        return
    with Plain():
        if name in INDEXING:
            found = [args[0], *(each for each in tensors(args[2:]) if each.dim())]
            if not isinstance(args[0], Cuda):
                found += [each for each in tensors(args[1]) if each.dim()]
        elif all(isinstance(tensor, Cuda) or not tensor.dim() for tensor in found):
            return
        if len({isinstance(tensor, Cuda) for tensor in found}) > 1:
            shapes = ", ".join(f"{'cuda:0' if isinstance(t, Cuda) else 'cpu'} {tuple(t.shape)}" for t in found)
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {shapes}")


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def placed(value: Any, on_device: bool, given: list[Tensor]) -> Any:
    """Return a result of torch's as a tensor of its device. One of the arguments stays what it is."""
    if not isinstance(value, Tensor) or any(value is each for each in given) or isinstance(value, Cuda) == on_device:
        return value
    return value.as_subclass(Cuda if on_device else Tensor)


def is_cuda(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


def in_memory(device: Any) -> torch.device:
    """Return where a tensor of a device lies: the device itself, but for that which is stood in for."""
    return CPU if is_cuda(device) else torch.device(device)


class Event:
    def __init__(self, **options: Any):
        pass

    def record(self, *args: Any) -> None:
        pass

    synchronize = wait = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Stream:
    device = CUDA

    def __init__(self, *args: Any, **options: Any):
        pass

    def synchronize(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize

    def record_event(self, event: Event | None = None) -> Event:
        return Event()

    def query(self) -> bool:
        return True


CARD = SimpleNamespace(
    name="a stand-in for an H100", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=8,
    shared_memory_per_multiprocessor=228 << 10,
)  # fmt: skip


def install() -> None:
    """Let torch have one GPU."""
    stream = Stream()
    nothing = {"_lazy_init", "synchronize", "set_device", "set_sync_debug_mode", "empty_cache", "_sleep", "set_stream",
               "reset_peak_memory_stats"}  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
        "get_device_capability": (9, 0), "get_device_properties": CARD, "get_device_name": CARD.name,
        "mem_get_info": (60 * GIB, 80 * GIB), "memory_allocated": 0, "max_memory_allocated": 1 << 20,
        "memory_reserved": 0, "current_stream": stream, "default_stream": stream, "stream": nullcontext(),
        "device": nullcontext(), "graph_pool_handle": (0, 0),
    }  # fmt: skip
    for name, answer in (answers | dict.fromkeys(nothing)).items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    host_generator = torch.Generator

    class Generator(host_generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return host_generator("cpu")

    torch.Generator = Generator
    torch.version.cuda = "13.0"
    Mode().__enter__()
    threading.setprofile(enter_thread)


def enter_thread(*event: Any) -> None:
    """Begin a thread, whose first call this is told of. torch keeps a mode for each thread."""
    sys.setprofile(None)
    Mode().__enter__()


def install_kernels() -> None:
    """Let kernels be interpreted, with tensors of the device only."""
    from triton.runtime.interpreter import GridExecutor

    from engine.assembly import open_runner
    from engine.devices.cuda_device import CudaDevice
    from engine.model.ops.gpu import dependent_launch
    from tests.engine.model.ops.gpu import interpreter

    execute = GridExecutor.__call__

    def launch(grid: Any, *args: Any, **options: Any) -> None:
        for value in (*args, *options.values()):
            if isinstance(value, Tensor) and not isinstance(value, Cuda):
                raise ValueError(f"Pointer argument of {grid.fn.__name__} cannot be accessed from Triton (cpu tensor?)")
        options.pop("launch_pdl", None)
        with Plain():
            args, options = tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, Tensor) else x, (args, options))
            execute(grid, *args, **options)

    def capture(self: Any, run: Callable[[], Tensor]) -> Any:
        output = run()
        return output, lambda: output.copy_(run()), lambda: None

    open_runner.check_kernels = lambda *args: (
        None
    )  # test_kernel_trial.py tries them, in as much time as an engine takes
    GridExecutor.__call__ = launch
    interpreter.make_exact()
    dependent_launch.supported = lambda device: False
    CudaDevice.capture = capture


def pytest_configure() -> None:
    install()
    install_kernels()
    np.seterr(all="ignore")  # exp(1000), log(0) and inf - inf are no news on a GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, reason in OUT_OF_REACH.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"out of reach of a stand-in: {reason}"))
        if "test_engine.py" in item.nodeid and not item.nodeid.endswith(QUICK):
            item.add_marker(pytest.mark.slow)
