"""Steps of a GPU on tensors that have shapes but no values: what is launched, and whether it fits.

The layers choose their kernels as on a GPU. Torch's own functions check shapes and strides as their CUDA versions do,
as far as their meta kernels go; launches of ours are counted, bound to the kernel's arguments and held against CUDA's
limits. Nothing is computed, so a 70B model takes a second.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.device import Device
from engine.distributed.tp_group import TPGroup
from engine.model import fused_rows
from engine.model.config import ModelConfig
from engine.model.layers.attention import Attention
from engine.model.layers.embedding import VocabEmbedding
from engine.model.layers.latent_attention import LatentAttention
from engine.model.layers.moe import Experts
from engine.model.loader import pack_weights
from engine.model.models.registry import build_model
from engine.model.ops import attention, dispatch, moe, quantized_linear
from engine.model.state import StateCache, state_specs
from engine.runner.cuda_graphs import CudaGraphs, StepShape, buffer_size

META = torch.device("meta")
BLOCK_SIZE, BLOCKS = 64, 8192
MAX_GRID = (2**31 - 1, 65_535, 65_535)  # of CUDA: x, y, z
MAX_OFFSET = 2**31 - 1  # of an offset of 32 bits, which Triton computes unless told otherwise
WIDE_OFFSETS = {
    "attend_kernel",
    "rotate_and_write_kernel",
    "dequantize_kernel",
    "grouped_kernel",
    "latent_kernel",
    "write_kernel",
    "linear_attention_kernel",
    "causal_conv_kernel",
    "keep_kernel",
}
"""Kernels that compute offsets into their large tensors, caches and weights, in 64 bits."""
NO_LAUNCH = ("empty", "new_empty", "detach", "_unsafe_view", "lift_fresh", "alias")
PERHAPS_VIEWS = {"flatten", "reshape", "contiguous", "to"}  # which copy only where they must
OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}  # of a launch, and no arguments
PROCESSORS = {(8, 0): 108, (8, 9): 142, (9, 0): 132, (10, 0): 148}
SHARED_KIB = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}  # of a program


class RankOf(TPGroup):
    """A rank whose collectives are launches, and nothing else."""

    def __init__(self, size: int, launched: list[str]):
        super().__init__(0, size)
        self._launched = launched

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 1:
            self._launched.append("all_reduce")
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self.size > 1:
            self._launched += ["all_gather", "cat"]
        return x.new_empty(*x.shape[:-1], self.size * x.shape[-1])


class Launches(TorchDispatchMode):
    """Names of what is launched in a `with` block: kernels of ours, and torch's operations but for those that only
    make views or take memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dependent: set[str] = set()  #: kernels that are launched while the one before them ends
        self._patch: Any = None

    def __enter__(self) -> Launches:
        from triton.runtime.jit import KernelInterface

        self._patch = mock.patch.object(KernelInterface, "__getitem__", lambda kernel, grid: self._launch(kernel, grid))
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def _launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            name, given = kernel.fn.__name__, {key: value for key, value in options.items() if key not in OPTIONS}
            inspect.signature(kernel.fn).bind(*args, **given)
            for size, limit in zip(grid, MAX_GRID, strict=False):
                if not 0 < size <= limit:
                    raise ValueError(f"{name}: a grid of {grid}, where {MAX_GRID} is the largest")
            with _disable_current_modes():
                for tensor in args:
                    if isinstance(tensor, Tensor):
                        self._check(name, tensor)
            self.names.append(name)
            if options.get("launch_pdl"):
                self.dependent.add(name)

        return launch

    def _check(self, name: str, tensor: Tensor) -> None:
        if tensor.device != META:
            raise ValueError(f"{name}: a tensor {tuple(tensor.shape)} on {tensor.device}, which the GPU cannot read")
        storage = tensor.untyped_storage().nbytes() // tensor.element_size()
        if storage > MAX_OFFSET and name not in WIDE_OFFSETS:
            raise ValueError(f"{name}: offsets of 32 bits into {storage} values")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **(kwargs or {}))
        is_view = func.is_view or name in PERHAPS_VIEWS
        if not name.startswith(NO_LAUNCH) and not (is_view and shares_memory(result, args)):
            self.names.append(name)
        return result


def shares_memory(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether what may be a view is one: a conversion, for one, may have had to copy."""
    if isinstance(result, list | tuple):
        return all(shares_memory(part, args) for part in result)
    return result.untyped_storage()._cdata == args[0].untyped_storage()._cdata


@contextmanager
def as_on_a_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Let layers that are built on META choose the kernels of a GPU of this compute capability."""
    from engine.model.ops.gpu import attention as triton_attention
    from engine.model.ops.gpu import dependent_launch
    from engine.model.ops.gpu import int4
    from engine.model.ops.gpu import quantized_linear as gpu_linear

    select_experts = moe.select

    def mix(hidden_size: int, slice_size: int, dtype: torch.dtype, device: torch.device) -> Any:
        return select_experts(hidden_size, slice_size, dtype, torch.device("cuda"))

    patches: list[tuple[Any, str, Any]] = [
        (dispatch, "gpu_kernels", lambda dtype, device: True),
        (moe, "select", mix),
        (quantized_linear, "select", gpu_linear.select),
        (gpu_linear, "in_square_blocks", lambda weight: weight.group_size == gpu_linear.BLOCK),
        (gpu_linear, "cuda_version", lambda: (13, 0)),
        (torch.cuda, "get_device_capability", lambda device=None: capability),
        (torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(
            multi_processor_count=PROCESSORS[capability]
        )),
        (dependent_launch, "supported", lambda device: capability >= dependent_launch.LEAST_CAPABILITY),
        (triton_attention, "hopper", lambda device: capability >= (9, 0)),
        (triton_attention, "processors", lambda device: PROCESSORS[capability]),
        (int4, "shared_bytes", lambda device: SHARED_KIB[capability] * 1024),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, stand_in in patches:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@dataclass
class MetaModel:
    """One rank of a model that exists in shapes only."""

    config: ModelConfig
    ranks: int = 1
    capability: tuple[int, int] = (9, 0)
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    launched: list[str] = field(default_factory=list)

    @torch.inference_mode()
    def __post_init__(self) -> None:
        with as_on_a_gpu(self.capability):
            self.tp = RankOf(self.ranks, self.launched)
            self.model = build_model(self.config, self.tp, self.dtype, META)
            pack_weights(self.model)
            fused_rows.fuse(self.model)

    @torch.inference_mode()
    def launches(self, tokens: int, seqs: int, context: int, launches: Launches | None = None) -> Counter[str]:
        """Kernels of a step that CUDA graphs hold, and those of the head: of `seqs` sequences with `context` tokens at
        most, whose chunks are `tokens` together, or which decode if there are as many tokens as sequences.

        launches: what notes them, if it notes more."""
        config, groups = self.config, self.config.kv_groups
        with as_on_a_gpu(self.capability):
            shape = StepShape(tokens, seqs, kv_groups=len(groups))
            if tokens != seqs:
                longest = -(-tokens // seqs)
                rows = min(
                    attention.tile_rows(longest, config.num_heads, group.spec, self.dtype, META) for group in groups
                )
                shape = replace(shape, tile_rows=rows)
            quantized = self.kv_dtype != self.dtype
            specs = state_specs(config.recurrent, str(self.dtype).removeprefix("torch."), self.ranks)
            graphs = CudaGraphs(
                Device(META), self.model,
                torch.zeros(seqs, context, dtype=torch.int32, device=META),
                torch.zeros(len(groups), seqs, -(-context // BLOCK_SIZE), dtype=torch.int32, device=META),
                [
                    torch.empty(BLOCKS, *group.block_shape(BLOCK_SIZE, self.ranks), dtype=self.kv_dtype, device=META)
                    for group in groups
                ],
                [torch.ones(len(group.layers), 2, device=META) if quantized else None for group in groups],
                StateCache(specs, seqs, 0, META).layers,
                budget_bytes=0, tp=self.tp,
            )  # fmt: skip
            inputs = torch.zeros(buffer_size(shape), dtype=torch.int32, device=META)
            self.launched.clear()
            with launches or Launches() as launches:
                hidden = graphs._compute(shape, inputs)
                self.model.best(hidden[:seqs])
        assert hidden.shape == (tokens, config.hidden_size) and hidden.dtype == self.dtype
        return Counter([*launches.names, *self.launched])

    def weight_bytes(self, tokens: int, of: type[nn.Module] = nn.Module) -> float:
        """Bytes of weights that a step of so many tokens reads: its rows of an embedding, unless the head has the same
        matrix, and as many experts as an even choice would pick. of: layers that are counted."""
        total, counted = 0.0, set[int]()
        for module in (module for module in self.model.modules() if isinstance(module, of)):
            part = 1.0
            if isinstance(module, VocabEmbedding) and not self.config.tie_word_embeddings:
                part = min(1.0, tokens / self.config.vocab_size)
            elif isinstance(module, Experts) and self.config.moe is not None:
                part = 1 - (1 - self.config.moe.experts_per_token / self.config.moe.num_experts) ** tokens
            elif isinstance(module, Attention | LatentAttention):
                continue  # the table of rotations, of which it reads a row for each token
            for tensor in tensors_of({**vars(module), "_modules": None}):
                if (storage := tensor.untyped_storage()._cdata) not in counted:
                    counted.add(storage)
                    total += part * tensor.nbytes
        return total


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors in containers, and in the attributes of our own objects but for modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif type(value).__module__.startswith("engine.model.") and not isinstance(value, nn.Module):
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
        yield from tensors_of([getattr(value, name) for name in names])
