"""Runs step plans on one rank: keeps per-sequence state, builds the inputs, computes, samples."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine import kv_cache
from engine.batch import Batch, split
from engine.config import EngineConfig
from engine.loader import load_weights, pack_weights
from engine.messages import TokenLogprob
from engine.model_config import ModelConfig
from engine.models.registry import Model, build_model
from engine.plan import NewSequence, StepPlan, StepResult
from engine.sampler import (
    MaskedRows,
    SampledRow,
    SamplingInputs,
    UniformSource,
    mark_broken,
    prepare_sampling,
    process_rows,
    sample,
    token_logprobs,
)
from engine.tp_group import TPGroup

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256  # rows of [vocab] float32 that are held at a time


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of hidden states whose logits give the log-probabilities of the prompt tokens that follow them."""

    entry: int  # in the plan
    first_row: int
    targets: Tensor  # [rows] int64, index into the flattened token history
    count: int  # alternatives to report


@dataclass(slots=True)
class StepInputs:
    """Everything that a step needs, prepared on the host while the step before may still be computing.

    token_index: [tokens] int64, where each input token lies in the flattened history; read only when the step
        runs, because the step before may just have sampled it.
    entries: plan entries that sample; sampled_rows [n] and written [n] int64 are their row of hidden states and
        their place in the flattened history.
    """

    plan: StepPlan
    batch: Batch
    token_index: Tensor
    entries: list[int]
    sampled_rows: Tensor
    written: Tensor
    sampling: SamplingInputs
    prompt_rows: list[PromptRows]


class ModelRunner:
    """One rank's model, KV cache and sequence state. `prepare` and `execute` may run in different threads, each
    called in the order of the plans: `prepare` owns the block tables, `execute` the token history."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path, tp: TPGroup):
        self.config = config
        self.tp = tp
        self.model_config = model_config
        self.eos = frozenset(model_config.eos_token_ids)
        self.device = choose_device(config)
        self.overlap = self.device.type != "cpu" if config.overlap is None else config.overlap
        self.dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        if config.num_threads or tp.local_size > 1:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            share = max(1, cores // tp.local_size)
            torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), share))
        self.model = self._load(folder, tp)
        on_cpu = self.device.type == "cpu"
        free = kv_cache.free_host_bytes() // tp.local_size if on_cpu else self._free_gpu_bytes(tp)
        num_blocks, longest = kv_cache.choose_num_blocks(config, model_config, self.dtype, self.device, tp, free)
        self.num_blocks = min(map(int, tp.exchange(str(num_blocks))))
        self.max_model_len = min(longest, self.num_blocks * config.block_size)
        self.kv_cache = kv_cache.allocate(self.num_blocks, model_config, config.block_size, self.dtype, self.device, tp)
        slots, longest = config.max_num_seqs, self.max_model_len
        self._history = torch.zeros(slots, longest, dtype=torch.int32, device=self.device)
        self._tables = np.zeros((slots, -(-longest // config.block_size)), dtype=np.int32)
        self._sequences: list[NewSequence | None] = [None] * slots
        self._uniform = UniformSource()

    def _load(self, folder: Path, tp: TPGroup) -> Model:
        started = time.perf_counter()
        model = build_model(self.model_config, tp, self.dtype, self.device)
        load_weights(model, folder, tp)
        parameters = sum(p.numel() for p in model.parameters())
        pack_weights(model)
        logger.info(
            "model loaded architecture=%s parameters=%.1fM dtype=%s device=%s threads=%d seconds=%.1f",
            self.model_config.architecture, parameters / 1e6, str(self.dtype).removeprefix("torch."), self.device,
            torch.get_num_threads(), time.perf_counter() - started,
        )  # fmt: skip
        return model

    def _free_gpu_bytes(self, tp: TPGroup) -> int:
        """What `gpu_memory_utilization` leaves for the KV cache beside weights and the largest step's activations,
        measured by running such a step. Has not run on a GPU yet."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run_largest_step(tp)
        activations = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used = total - free
        logger.info("profiled the largest step: %.2f GiB beside %.2f GiB in use", activations / 2**30, used / 2**30)
        return int(total * self.config.gpu_memory_utilization) - used - activations

    @torch.inference_mode()
    def run_largest_step(self, tp: TPGroup) -> None:
        """Compute as many tokens as a step may have, and logits for as many sequences, all in one KV block."""
        tokens, seqs, size = self.config.max_num_batched_tokens, self.config.max_num_seqs, self.config.block_size
        counts = np.full(seqs, tokens // seqs)
        counts[: tokens % seqs] += 1
        ids = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        single, chunks = split(counts.tolist(), counts.tolist())
        batch = Batch(
            positions=ids,
            slot_mapping=ids % size,
            query_start=self._to_device(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            kv_len=self._to_device(counts.astype(np.int32)),
            block_table=torch.zeros(seqs, -(-int(counts.max()) // size), dtype=torch.int32, device=self.device),
            kv_cache=kv_cache.allocate(1, self.model_config, size, self.dtype, self.device, tp),
            single=single.to(self.device),
            chunks=chunks,
        )
        sample(self.model.logits(self.model(ids, batch)[:seqs]), SamplingInputs([], [], []))

    def run(self, plan: StepPlan) -> StepResult:
        return self.execute(self.prepare(plan))

    # -- on the host ---------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Inputs of `plan`; needs no result of the steps before it."""
        for sequence in plan.added:
            self._sequences[sequence.slot] = sequence
        for change in plan.blocks:
            self._tables[change.slot, change.index : change.index + len(change.blocks)] = change.blocks
        slots, starts, counts = (np.array(column, dtype=np.int64) for column in (plan.slots, plan.starts, plan.counts))
        ends = starts + counts
        query_start = np.concatenate([[0], np.cumsum(counts)])
        entry = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[entry]
        block_size = self.config.block_size
        table = self._tables[slots, : -(-int(ends.max()) // block_size)]
        single, chunks = split(plan.counts, ends.tolist())
        batch = Batch(
            positions=self._to_device(positions),
            slot_mapping=self._to_device(table[entry, positions // block_size] * block_size + positions % block_size),
            query_start=self._to_device(query_start.astype(np.int32)),
            kv_len=self._to_device(ends.astype(np.int32)),
            block_table=self._to_device(table),
            kv_cache=self.kv_cache,
            single=single.to(self.device),
            chunks=chunks,
        )
        entries = [i for i, samples in enumerate(plan.samples) if samples]
        return StepInputs(
            plan=plan,
            batch=batch,
            token_index=self._to_device(slots[entry] * self.max_model_len + positions),
            entries=entries,
            sampled_rows=self._to_device(query_start[1:][entries] - 1),
            written=self._to_device(slots[entries] * self.max_model_len + np.minimum(ends[entries], self._last)),
            sampling=self._prepare_sampling(plan, entries),
            prompt_rows=self._prepare_prompt_rows(plan, query_start),
        )

    @property
    def _last(self) -> int:
        return self.max_model_len - 1

    def _prepare_sampling(self, plan: StepPlan, entries: list[int]) -> SamplingInputs:
        rows = []
        for i in entries:
            sequence = self._sequence(plan.slots[i])
            position = plan.starts[i] + plan.counts[i]
            rows.append(SampledRow(plan.slots[i], position, sequence.num_prompt, sequence.seed, sequence.params))
        inputs = prepare_sampling(rows, self.model_config.vocab_size, self._uniform, self.device)
        if plan.masked:
            inputs.masked = self._masked_rows(plan, entries)
        return inputs

    def _masked_rows(self, plan: StepPlan, entries: list[int]) -> MaskedRows:
        rows = np.searchsorted(entries, plan.masked)
        words = np.frombuffer(plan.masks, dtype=np.uint8).reshape(len(rows), -1)
        allowed = np.unpackbits(words, axis=1, count=self.model_config.vocab_size, bitorder="little")
        return MaskedRows(rows.tolist(), self._to_device(allowed == 0))

    def _prepare_prompt_rows(self, plan: StepPlan, query_start: np.ndarray) -> list[PromptRows]:
        rows = []
        for i, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            sequence = self._sequence(slot)
            stop = min(start + count, sequence.num_prompt - 1)
            if sequence.params.prompt_logprobs is not None and start < stop:
                targets = slot * self.max_model_len + np.arange(start + 1, stop + 1)
                count = sequence.params.prompt_logprobs
                rows.append(PromptRows(i, int(query_start[i]), self._to_device(targets), count))
        return rows

    def _sequence(self, slot: int) -> NewSequence:
        sequence = self._sequences[slot]
        assert sequence is not None, f"slot {slot} was never filled"
        return sequence

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    # -- on the device -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, inputs: StepInputs) -> StepResult:
        """Compute a prepared step. Steps must come in the order in which they were prepared."""
        for sequence in inputs.plan.added:
            self._history[sequence.slot, : len(sequence.tokens)] = torch.tensor(sequence.tokens, dtype=torch.int32)
        history = self._history.view(-1)
        hidden = self.model(history[inputs.token_index].long(), inputs.batch)
        tokens, logprobs = self._sample(hidden, inputs)
        # -1 ends a request, but with overlap a step that reads its token may be on the way: it must find a real one
        history[inputs.written] = tokens.clamp(min=0).int()
        count = len(inputs.plan.slots)
        result = StepResult(inputs.plan.step, [None] * count, [None] * count, [None] * count)
        for i, token, logprob in zip(inputs.entries, tokens.tolist(), logprobs, strict=True):
            result.tokens[i] = token
            result.logprobs[i] = logprob
        for rows in inputs.prompt_rows:
            result.prompt_logprobs[rows.entry] = self._prompt_logprobs(hidden, rows)
        return result

    def _sample(self, hidden: Tensor, inputs: StepInputs) -> tuple[Tensor, list[TokenLogprob | None]]:
        """Tokens [n] int64 of the sampling entries, and their log-probabilities where asked for."""
        logprobs: list[TokenLogprob | None] = [None] * len(inputs.entries)
        if not inputs.entries:
            return inputs.sampled_rows, logprobs
        if inputs.sampling.plain:
            return mark_broken(*self.model.best(hidden[inputs.sampled_rows])), logprobs
        logits = self.model.logits(hidden[inputs.sampled_rows])
        asked = {row: count for row, count in enumerate(inputs.sampling.logprobs) if count is not None}
        raw = logits[list(asked)].clone() if asked else None
        process_rows(logits, inputs.sampling, self._history, self.eos)
        tokens = sample(logits, inputs.sampling)
        if raw is not None:
            chosen = tokens[list(asked)].clamp(min=0)
            for row, value in zip(asked, token_logprobs(raw, chosen, list(asked.values())), strict=True):
                logprobs[row] = value
        return tokens, logprobs

    def _prompt_logprobs(self, hidden: Tensor, rows: PromptRows) -> list[TokenLogprob]:
        targets = self._history.view(-1)[rows.targets].long()
        values: list[TokenLogprob] = []
        for part in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            wanted = targets[part : part + PROMPT_LOGPROB_ROWS]
            first = rows.first_row + part
            logits = self.model.logits(hidden[first : first + len(wanted)])
            values += token_logprobs(logits, wanted, [rows.count] * len(wanted))
        return values


def choose_device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)
