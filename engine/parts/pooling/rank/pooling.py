"""Makes embeddings, classes and scores from hidden states. If a prompt is computed in several chunks, the pooler keeps
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
from engine.model.config_parts.pooling import Activation, DenseConfig
from engine.model.models.llama import Model
from engine.parts.of_sequences import OfSequences
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import Forward, LaunchedStep
from engine.runner.step_layout import StepLayout
from engine.wire.parts.pooling import EMBEDS, PoolingParams
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
    vectors: Tensor
    """[vectors, size] float32: one for each row, or, for tasks of tokens, one for each token of each row's prompt. For
    a generative reranker, the logits of yes and no."""


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
        self._carried: dict[int, Tensor] = {}  # by slot: what the prompt's earlier chunks gave, [1 or tokens, hidden]

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
            hidden = (
                out[:, : self._config.hidden_size] if self._config.head == "lm" else out
            )  # without drafters' inputs
            step.of[self.name] = self.launch(hidden, pooled.rows)

    def collected(self, step: LaunchedStep, result: StepResult) -> StepResult:
        for pooled in step.of.get(self.name, ()):
            result.answers.update(self.finish(pooled))
        return result

    def launch(self, hidden: Tensor, rows: list[PooledRows]) -> list[Pooled]:
        """Take the hidden states [tokens, hidden] of a step, and pool the sequences whose prompts end in it."""
        ended: dict[str, tuple[list[PooledRows], list[Tensor]]] = {}
        for row in rows:
            vectors = self._pool(hidden[row.first_row : row.first_row + row.count], row)
            if row.is_last:
                some, pooled = ended.setdefault(row.params.asked, ([], []))
                some.append(row)
                pooled.append(vectors)
            else:
                self._carried[row.slot] = vectors.clone()  # a graph's next replay overwrites its hidden states
        return [
            Pooled(some, self._device.fetch(self._finished(task, some, torch.cat(pooled))))
            for task, (some, pooled) in ended.items()
        ]

    def finish(self, pooled: Pooled) -> dict[int, bytes]:
        """Return results by entry of the plan. Call it once the device has completed the step."""
        counts = [row.start + row.count if row.params.of_tokens else 1 for row in pooled.rows]
        parts = np.split(pooled.vectors.numpy(), np.cumsum(counts)[:-1])
        return {row.entry: self._result(row.params, part) for row, part in zip(pooled.rows, parts, strict=True)}

    def _pool(self, own: Tensor, row: PooledRows) -> Tensor:
        """Return what the prompt's tokens so far give: [1 or tokens, hidden]. own: those of this step."""
        carried = self._carried.pop(row.slot, None) if row.start else None
        if row.params.of_tokens:
            return own if carried is None else torch.cat((carried, own))
        kind = "last" if row.params.asked == "score" and self._config.head == "lm" else self._pooling.type
        if kind == "last":
            return own[-1:]
        if kind == "cls":
            return own[:1] if carried is None else carried
        total = own.sum(0, keepdim=True, dtype=torch.float32)
        if carried is not None:
            total += carried
        return total / (row.start + row.count) if row.is_last else total

    def _finished(self, task: str, rows: list[PooledRows], vectors: Tensor) -> Tensor:
        """Apply what follows pooling: [vectors, hidden] -> [vectors, size] float32."""
        if task in EMBEDS:
            vectors = vectors.float()
            for weight, bias, activation in self._dense:
                vectors = activation(F.linear(vectors, weight, bias))
            return vectors
        vectors = vectors.to(self._dtype)  # means are float32
        if self._config.head != "lm":
            return self._model.scores(vectors).float()
        ids = copy_to([row.params.score_token_ids for row in rows], vectors.device)
        return self._model.logits(vectors).gather(1, ids)

    def _result(self, params: PoolingParams, vectors: np.ndarray) -> bytes:
        """Return the bytes of a sequence's answer; empty if a number is not finite. vectors: [1 or tokens, size]"""
        if params.asked in EMBEDS:
            vectors = vectors[:, : params.dimensions]
            if self._pooling.normalize if params.use_activation is None else params.use_activation:
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), SMALLEST_NORM)
        else:
            vectors = vectors[:, :1] - vectors[:, 1:] if self._config.head == "lm" else vectors
            vectors = as_probabilities(vectors, self._activation(params.use_activation))
        return vectors.astype("<f4").tobytes() if np.isfinite(vectors).all() else b""

    def _activation(self, used: bool | None) -> Activation:
        named = self._pooling.activation
        if used is None or (used and named != "Identity"):
            return named
        if not used:
            return "Identity"
        return "Softmax" if len(self._pooling.labels) > 1 else "Sigmoid"


def as_probabilities(scores: np.ndarray, activation: Activation) -> np.ndarray:
    """Apply an activation to scores [vectors, labels]."""
    match activation:
        case "Identity":
            return scores
        case "Sigmoid":
            return 1 / (1 + np.exp(-scores))
        case "Softmax":
            exp = np.exp(scores - scores.max(axis=1, keepdims=True))
            return exp / exp.sum(axis=1, keepdims=True)


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
