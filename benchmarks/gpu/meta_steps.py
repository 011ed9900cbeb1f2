"""Steps of a GPU on tensors that have shapes but no values: what is launched, and whether it fits.

The layers choose their kernels as on a GPU. Torch's own functions check shapes and strides as their CUDA versions do,
as far as their meta kernels go; launches of ours are counted, bound to the kernel's arguments and held against CUDA's
limits. Nothing is computed, so a 70B model takes a second.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.model.layers.attention import Attention
from engine.model.layers.embedding import VocabEmbedding
from engine.model.layers.latent_attention import LatentAttention
from engine.model.layers.moe import Experts
from engine.offline.weightless_model import META, WeightlessModel
from engine.runner.graphs.cuda_graphs import CudaGraphs, StepShape

MAX_GRID = (2**31 - 1, 65_535, 65_535)  # of CUDA: x, y, z
MAX_OFFSET = 2**31 - 1  # of an offset of 32 bits, which Triton computes unless told otherwise
WIDE_OFFSETS = {
    "attend_kernel",
    "rotate_and_write_kernel",
    "dequantize_kernel",
    "grouped_kernel",
    "latent_kernel",
    "attend_splits_kernel",
    "write_kernel",
    "rotate_and_write_latent_kernel",
    "linear_attention_kernel",
    "causal_conv_kernel",
    "keep_kernel",
}
"""Kernels that compute offsets into their large tensors, caches and weights, in 64 bits."""
NO_LAUNCH = ("empty", "new_empty", "detach", "_unsafe_view", "lift_fresh", "alias")
PERHAPS_VIEWS = {"flatten", "reshape", "contiguous", "to"}  # which copy only where they must
OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion"}
"""Options of a launch, which are no arguments."""


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


class MetaModel(WeightlessModel):
    """A model whose launches and bytes are counted."""

    def launches(self, tokens: int, seqs: int, context: int, launches: Launches | None = None) -> Counter[str]:
        """Kernels of a step that CUDA graphs hold, and those of the head: see `compute`. launches: what notes them, if
        it notes more."""
        self._noted = launches or Launches()
        self.compute(tokens, seqs, context)
        return Counter([*self._noted.names, *self.launched])

    def compute_shape(self, graphs: CudaGraphs, shape: StepShape, inputs: Tensor) -> Tensor:
        with self._noted:
            return super().compute_shape(graphs, shape, inputs)

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
