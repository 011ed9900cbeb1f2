"""Makes embeddings and scores from hidden states. If a prompt is computed in several chunks, the pooler keeps
intermediate results until the last chunk. Every rank computes the same result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.devices.device import StagedCopy, copy_to
from engine.errors import ModelFolderError
from engine.model.config_parts.pooling import DenseConfig
from engine.model.models.llama import Model
from engine.parts.of_sequences import OfSequences
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import Forward, LaunchedStep
from engine.runner.step_layout import StepLayout
from engine.wire.parts.pooling import PoolingParams
from engine.wire.plan import StepPlan, StepResult

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"Identity": lambda x: x, "Tanh": torch.tanh}
SMALLEST_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The hidden states of one pooled sequence in a step."""

    entry: int  #: index in the plan
    slot: int
    first_row: int
    start: int  #: position of the first row in the sequence
    count: int
    is_last: bool  #: whether the prompt ends with these rows
    params: PoolingParams


@dataclass(frozen=True, slots=True)
class Pooled:
    """Vectors of sequences whose prompts end in this step, before normalisation."""

    rows: list[PooledRows]
    vectors: Tensor  #: [rows, size] float32; for a generative reranker, the logits of yes and no


@dataclass(frozen=True, slots=True)
class PooledStep:
    """The pooled sequences of a step."""

    rows: list[PooledRows]
    token_types: Tensor | None  #: [tokens] int64, see Batch


class Pooler(RankPart):
    name = "pooling"

    def __init__(self, setup: RankSetup):
        self._setup, self._config, self._pooling = setup, setup.model, setup.model.pooling
        self._dtype, self._device = setup.dtype, setup.device
        self._of_sequences = OfSequences[PoolingParams]()
        self._carried: dict[int, Tensor] = {}  # by slot: what the prompt's earlier chunks gave, [hidden]

    def attach(self, model: Model) -> None:
        """Raises ModelFolderError if the weights of a dense layer cannot be read."""
        self._model = model
        self._dense = [
            (*read_dense(self._setup.folder, dense, self._device.torch_device), ACTIVATIONS[dense.activation])
            for dense in self._pooling.dense
        ]

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> PooledStep | None:
        of_sequences = self._of_sequences
        of_sequences.add(plan.added, lambda new: new.record(PoolingParams))
        if not of_sequences:
            return None
        layout.unsampled = of_sequences
        columns = zip(plan.slots, layout.query_start.tolist(), plan.starts, plan.counts, plan.samples, strict=False)
        rows = [
            PooledRows(i, slot, row, start, count, is_last, of_sequences[slot])
            for i, (slot, row, start, count, is_last) in enumerate(columns)
            if slot in of_sequences
        ]
        return PooledStep(rows, self._token_types(plan, layout, staged))

    def _token_types(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> Tensor | None:
        of_sequences = self._of_sequences
        firsts = [of_sequences[s].token_types_from if s in of_sequences else None for s in plan.slots]
        if not any(firsts):
            return None
        first = np.array([sys.maxsize if first is None else first for first in firsts])
        return staged.add((layout.positions >= first[layout.entry]).astype(np.int64))

    def before(self, step: Forward) -> None:
        pooled: PooledStep | None = step.inputs.of.get(self.name)
        if pooled is not None and step.batch is not None:
            step.batch.token_types = pooled.token_types

    def after(self, step: LaunchedStep, out: Tensor, tokens: Tensor) -> None:
        pooled: PooledStep | None = step.inputs.of.get(self.name)
        if pooled is not None and pooled.rows:
            step.of[self.name] = self.launch(out[:, : self._config.hidden_size], pooled.rows)

    def collected(self, step: LaunchedStep, result: StepResult) -> StepResult:
        for pooled in step.of.get(self.name, ()):
            result.answers.update(self.finish(pooled))
        return result

    def launch(self, hidden: Tensor, rows: list[PooledRows]) -> list[Pooled]:
        """Take the hidden states [tokens, hidden] of a step, and pool the sequences whose prompts end in it."""
        ended: dict[str, tuple[list[PooledRows], list[Tensor]]] = {}
        for row in rows:
            vector = self._pool(hidden[row.first_row : row.first_row + row.count], row)
            if row.is_last:
                some, vectors = ended.setdefault(row.params.task, ([], []))
                some.append(row)
                vectors.append(vector)
            else:
                self._carried[row.slot] = vector.clone()  # a graph's next replay overwrites its hidden states
        heads = {"embed": self._embed, "score": self._score}
        return [
            Pooled(some, self._device.fetch(heads[task](some, torch.stack(vectors))))
            for task, (some, vectors) in ended.items()
        ]

    def finish(self, pooled: Pooled) -> dict[int, bytes]:
        """Return results by entry of the plan. Call it once the device has completed the step."""
        vectors = pooled.vectors.numpy()
        return {row.entry: self._result(row.params, vector) for row, vector in zip(pooled.rows, vectors, strict=True)}

    def _pool(self, own: Tensor, row: PooledRows) -> Tensor:
        kind = "last" if row.params.task == "score" and self._config.head == "lm" else self._pooling.type
        if kind == "last":
            return own[-1]
        if kind == "cls":
            return own[0] if row.start == 0 else self._carried[row.slot]
        total = own.sum(0, dtype=torch.float32)
        if row.start:
            total += self._carried[row.slot]
        return total / (row.start + row.count) if row.is_last else total

    def _embed(self, rows: list[PooledRows], vectors: Tensor) -> Tensor:
        vectors = vectors.float()
        for weight, bias, activation in self._dense:
            vectors = activation(F.linear(vectors, weight, bias))
        return vectors

    def _score(self, rows: list[PooledRows], vectors: Tensor) -> Tensor:
        vectors = vectors.to(self._dtype)  # means are float32
        if self._config.head == "score":
            return self._model.scores(vectors).float()
        ids = copy_to([row.params.score_token_ids for row in rows], vectors.device)
        return self._model.logits(vectors).gather(1, ids)

    def _result(self, params: PoolingParams, vector: np.ndarray) -> bytes:
        if params.task == "embed":
            vector = vector[: params.dimensions]
            if self._pooling.normalize if params.use_activation is None else params.use_activation:
                vector = vector / max(np.linalg.norm(vector), SMALLEST_NORM)
        else:
            vector = vector[:1] - vector[1:] if len(vector) == 2 else vector
            if self._pooling.sigmoid if params.use_activation is None else params.use_activation:
                vector = 1 / (1 + np.exp(-vector))
        return vector.astype("<f4").tobytes() if np.isfinite(vector).all() else b""


def read_dense(folder: Path, dense: DenseConfig, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Read the weight [outputs, inputs] and the bias of a dense layer, in float32."""
    name = f"{dense.path}/model.safetensors"
    try:
        tensors = load_file(folder / name)
        weight, bias = tensors["linear.weight"], tensors["linear.bias"] if dense.bias else None
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelFolderError(str(folder), f"cannot read {name}: {error}") from error
    if weight.shape != (dense.outputs, dense.inputs):
        problem = f"{name} has shape {list(weight.shape)}, its config.json asks for {[dense.outputs, dense.inputs]}"
        raise ModelFolderError(str(folder), problem)
    return weight.float().to(device), None if bias is None else bias.float().to(device)
