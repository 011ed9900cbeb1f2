"""Steps of a GPU on tensors that have shapes but no values. The layers choose their kernels as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from engine.devices.device import Device
from engine.distributed.tp_group import TPGroup
from engine.model import fused_rows
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.loader import pack_weights
from engine.model.models.llama import Model
from engine.model.models.registry import build_model
from engine.model.ops import dispatch, moe, quantized_linear
from engine.model.ops.latent import tiles
from engine.model.shard import ShardPlan
from engine.model.state import StateCache, state_specs
from engine.runner.graphs.cuda_graphs import CudaGraphs, StepShape, buffer_size
from engine.runner.step import StepMemory
from engine.wire.parts.states import StateStep

META = torch.device("meta")
BLOCKS = 8192  # of a KV cache
PROCESSORS = {(8, 0): 108, (8, 9): 142, (9, 0): 132, (10, 0): 148}


class RankOf(TPGroup):
    """A rank whose collectives only record which kernels they would launch."""

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


@contextmanager
def as_on_a_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Let layers that are built on META choose the kernels of a GPU of this compute capability."""
    from engine.model.ops.gpu import attention as triton_attention
    from engine.model.ops.gpu import dependent_launch
    from engine.model.ops.gpu import quantized_linear as gpu_linear
    from engine.model.ops.gpu.experts import moe as gpu_experts

    select_experts = moe.select

    def mix(hidden_size: int, slice_size: int, dtype: torch.dtype, device: torch.device, some: bool) -> Any:
        return select_experts(hidden_size, slice_size, dtype, torch.device("cuda"), some)

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
        (gpu_experts, "multiplies_float8", lambda device: capability >= gpu_experts.LEAST_FLOAT8),
        (triton_attention, "hopper", lambda device: capability >= (9, 0)),
        (triton_attention, "processors", lambda device: PROCESSORS[capability]),
        (torch, "equal", lambda one, other: True),  # groups of a checkpoint are taken to be even
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, stand_in in patches:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@dataclass
class WeightlessModel:
    """One rank of a model that exists in shapes only."""

    config: ModelConfig
    ranks: int = 1
    capability: tuple[int, int] = (9, 0)
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    block_size: int = 64
    extend: Callable[[Model], None] = lambda model: None  #: adds to the layers, as parts of a rank do
    launched: list[str] = field(default_factory=list)

    @torch.inference_mode()
    def __post_init__(self) -> None:
        with as_on_a_gpu(self.capability):
            self.tp: TPGroup = RankOf(self.ranks, self.launched)
            self.model = build_model(self.config, ShardPlan(self.tp), self.dtype, META)
            pack_weights(self.model)
            self.extend(self.model)
            fused_rows.fuse(self.model)

    @torch.inference_mode()
    def compute(self, tokens: int, seqs: int, context: int, verified: int = 0, images: bool = False) -> Tensor:
        """Compute a step as CUDA graphs do, and the best tokens of `seqs` rows. Returns [tokens, hidden].

        The step computes `tokens` tokens of `seqs` sequences, each with at most `context` tokens. It is a decode step
        if `tokens` equals `seqs`. verified: most tokens per sequence if the step verifies drafts, else 0. images:
        whether the step contains tokens of images, which attend to each other.
        """
        config, groups = self.config, self.config.kv_groups
        with as_on_a_gpu(self.capability):
            shape = StepShape(tokens, seqs, kv_groups=len(groups), verified=verified)
            if tokens != seqs:
                longest = verified or -(-tokens // seqs)
                rows = min(tiles.tile_rows(longest, config.num_heads, group.spec, self.dtype, META) for group in groups)
                shape = replace(shape, tile_rows=rows)
            quantized = self.kv_dtype != self.dtype
            specs = state_specs(config.recurrent, str(self.dtype).removeprefix("torch."), self.ranks)
            size = self.block_size
            graphs = CudaGraphs(
                Device(META), self._forward_images if images else self.model,
                torch.zeros(len(groups), seqs, -(-context // size), dtype=torch.int32, device=META),
                StepMemory(
                    [
                        torch.empty(BLOCKS, *group.block_shape(size, self.ranks), dtype=self.kv_dtype, device=META)
                        for group in groups
                    ],
                    [torch.ones(len(group.layers), 2, device=META) if quantized else None for group in groups],
                    torch.zeros(seqs, context, dtype=torch.int32, device=META),
                    {StateStep.part: StateCache(specs, seqs, 0, META)},
                ),
                budget_bytes=0, tp=self.tp,
            )  # fmt: skip
            inputs = torch.zeros(buffer_size(shape), dtype=torch.int32, device=META)
            self.launched.clear()
            hidden = self.compute_shape(graphs, shape, inputs)
        assert hidden.shape == (tokens, config.hidden_size) and hidden.dtype == self.dtype
        return hidden

    def compute_shape(self, graphs: CudaGraphs, shape: StepShape, inputs: Tensor) -> Tensor:
        hidden = graphs._compute(shape, inputs)
        self.model.best(hidden[: shape.seqs])
        return hidden

    def _forward_images(self, ids: Tensor, batch: Batch) -> Tensor:
        return self.model(ids, replace(batch, span_ends=batch.positions.int()))
