"""Runs step plans on one rank: keeps per-sequence state, builds the inputs, computes, samples.

On a GPU nothing here waits for the device before `collect`: inputs go there in one copy per step; sampled tokens stay
there for the next step, and are copied to the host as well. So step n+1 is in the device's queue before step n has
ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.config import BLOCK_SIZES, EngineConfig
from engine.device import DeviceEvent, open_device
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model import fixed_order
from engine.model.batch import Batch, split
from engine.model.config import ModelConfig
from engine.model.loader import count_parameters, fill_with_noise, load_weights, pack_weights
from engine.model.models.embedding_store import encoder_config
from engine.model.models.llama import Model
from engine.model.models.registry import build, build_model
from engine.model.ops import attention, dispatch
from engine.runner import kv_cache
from engine.runner.cuda_graphs import CudaGraphs, StepShape, decode_sizes, mixed_sizes
from engine.runner.images import EncoderCache
from engine.runner.inputs import InputBuilder, PromptLogprobRows, StepInputs
from engine.runner.model_drafts import draft_inputs
from engine.runner.pooler import Pooled, Pooler
from engine.runner.sampler import (
    LogprobTable,
    SampledRow,
    UniformSource,
    cpu_sampling,
    logprob_table,
    mark_non_finite,
    prepare_sampling,
    process_rows,
    sample,
)
from engine.runner.warm_up import warm_up_plans
from engine.spec_decode.drafter import ModelDrafter
from engine.spec_decode.open_drafter import open_drafter
from engine.spec_decode.target import Target
from engine.spec_decode.verification import accepted_tokens
from engine.wire.plan import StepPlan, StepResult
from engine.wire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.model.ops.cpu.step_graph import StepGraph

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256  # rows of [vocab] float32 in memory at a time
CUBLAS_BYTES = 32 << 20  # workspace of each thread that multiplies, at most (ATen's CublasHandlePool.cpp)


@dataclass(slots=True)
class LaunchedStep:
    """A step in the device's queue. Its results are in host memory once `event` has been reached."""

    inputs: StepInputs
    tokens: Tensor  #: [n] int64, of the entries that sample
    logprobs: tuple[list[int], list[int], LogprobTable] | None  #: entries, alternatives of each, and their table
    prompt_logprobs: list[tuple[PromptLogprobRows, list[LogprobTable]]]  #: with one table per PROMPT_LOGPROB_ROWS rows
    pooled: list[Pooled]
    drafts: Tensor | None  #: [entries that sample, plan.num_drafts] int64, of a drafter with weights
    draft_s: Callable[[], float]  #: seconds that it took
    event: DeviceEvent


class ModelRunner:
    """One rank's model, KV cache and sequence state.

    `prepare` and `launch` may run in different threads, each called in the order of the plans: `prepare` owns the
    host's block tables, `launch` the tensors on the device.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path, tp: TPGroup):
        self.config, self.model_config, self.tp = config, model_config, tp
        self.device = open_device(config.device)
        device = self.device.torch_device
        self.overlap = self.device.asynchronous if config.overlap is None else config.overlap
        self.dtype: torch.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
        if config.num_threads or tp.local_size > 1:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            threads = max(1, cores // tp.local_size)
            torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), threads))
        self.kv_dtype = kv_cache.cache_dtype(config, self.dtype, device)
        self.block_size = config.block_size or BLOCK_SIZES[device.type]
        self.kv_scales: Tensor | None = None
        if self.kv_dtype == torch.float8_e4m3fn:
            self.kv_scales = kv_cache.read_scales(folder, model_config.num_layers, device)
        if config.torch_compile and model_config.transformers:
            limit = f"false for {model_config.architecture}, which transformers' own code computes"
            raise ConfigError("torch_compile", True, limit)
        self.model = self._load(folder, tp)
        self._encoder_cache: EncoderCache | None = None
        if model_config.vision is not None:
            self._encoder_cache = EncoderCache(self.model, model_config, self.dtype)
        self.image_inbox: Tensor | None = None
        if config.encode is not None:
            self.image_inbox = self._allocate_inbox()
        self._pooler = Pooler(model_config, self.model, folder, self.dtype, self.device)
        if config.torch_compile:
            self._compile()
        self.drafter: ModelDrafter | None = None
        if tp.rank == 0:  # the other ranks get its drafts with the plan
            self.drafter = open_drafter(config, self._target(folder))
        if self.drafter is not None and self.drafter.aux_layers:
            self.model.aux_layers = self.drafter.aux_layers
        free = kv_cache.free_host_bytes() // tp.local_size if device.type == "cpu" else self._free_gpu_bytes()
        num_blocks, longest = kv_cache.choose_num_blocks(
            config, self.block_size, model_config, self.kv_dtype, device, tp, free,
            0 if self.drafter is None else self.drafter.block_bytes,
        )  # fmt: skip
        self.num_blocks = min(map(int, tp.exchange(str(num_blocks))))
        self.max_model_len = min(longest, self.num_blocks * self.block_size)
        self.kv_cache = kv_cache.allocate(self.num_blocks, model_config, self.block_size, self.kv_dtype, device, tp)
        if self.drafter is not None:
            self.drafter.allocate(self.num_blocks)
        slots, longest = config.max_num_seqs, self.max_model_len
        self._history = torch.zeros(slots, longest, dtype=torch.int32, device=device)
        # the device's own block tables; only changes are sent, since a batch's rows are megabytes with long contexts
        self._tables: Tensor | None = None
        self.graphs: CudaGraphs | None = None
        self._step_graph: StepGraph | None = None
        if self.device.asynchronous:
            self._tables = torch.zeros(slots, -(-longest // self.block_size), dtype=torch.int32, device=device)
            if self._can_capture():
                self.graphs = CudaGraphs(
                    self.device, self.model, self._history, self._tables, self.kv_cache, self.kv_scales,
                    budget_bytes=int(config.cuda_graph_memory_gib * 2**30), tp=tp,
                )  # fmt: skip
        elif tp.size == 1 and self._can_capture() and dispatch.cpu_kernels(self.dtype, device):
            from engine.model.ops.cpu.step_graph import RECORDED, record

            max_blocks = -(-longest // self.block_size)
            max_tokens = max(config.max_num_batched_tokens, sum(RECORDED))
            x = torch.empty(max_tokens, model_config.hidden_size, dtype=self.dtype)
            self._step_graph = record(self.model.run_layers, x, max_blocks, self.kv_cache, self.kv_scales)
        self._inputs = InputBuilder(
            config, model_config, self.device, self.kv_cache, self.kv_scales, longest,
            self.graphs.shape_for if self.graphs else lambda tokens, seqs: None,
            drafts=self.drafter is not None,
        )  # fmt: skip
        if self.device.asynchronous:
            self._warm_up()
        elif model_config.head == "lm":
            cpu_sampling()

    def _allocate_inbox(self) -> Tensor:
        """Return memory for embeddings of encode engines: as many as the encoder cache holds, all on every rank.

        Raises ConfigError for a model that reads text only.
        """
        encoder, num_blocks = encoder_config(self.model_config), -(-self.config.encoder_cache_size // self.block_size)
        device = self.device.torch_device
        return kv_cache.allocate(num_blocks, encoder, self.block_size, self.dtype, device, TPGroup.single())

    def _warm_up(self) -> None:
        """Compute steps of every kind, so that no request waits while a kernel is compiled, and capture the graphs."""
        started = time.perf_counter()
        if self.model_config.head == "lm":
            for plan in warm_up_plans(self.config, self.max_model_len):
                self.collect(self.launch(self.prepare(plan)))
            self.kv_cache[0] = 0  # where these steps left their KV
        if self.graphs is not None:
            with torch.inference_mode():
                self.graphs.capture(self._graph_shapes())
        logger.info("warmed up seconds=%.1f", time.perf_counter() - started)

    def _graph_shapes(self) -> list[StepShape]:
        model, config = self.model_config, self.config
        heads = model.num_heads, model.num_kv_heads, model.head_dim
        # each draft is a sequence of its own
        seqs = config.max_num_seqs * (1 + (config.speculative.num_speculative_tokens if config.speculative else 0))
        shapes = [StepShape(size, size) for size in decode_sizes(seqs)]
        for size in mixed_sizes(config.max_num_batched_tokens):
            rows = attention.tile_rows(size, *heads, self.dtype, self.device.torch_device)
            shapes.append(StepShape(size, min(size, seqs), rows))
        return shapes

    def _can_capture(self) -> bool:
        """Return whether no kernel needs numbers on the host, which a graph cannot hold."""
        why = None
        if self.config.enforce_eager:
            why = "enforce_eager"
        elif not self.device.asynchronous and (self.config.torch_compile or self.model_config.transformers):
            why = "its kernels are not ours"
        elif not self.device.asynchronous and self.model_config.moe is not None:
            why = "tokens are sorted by their experts on the host"
        elif self.model_config.bidirectional:
            why = "this model does not decode"
        elif self.device.torch_device.type == "cuda" and not dispatch.triton_found():
            why = "plain torch takes the place of Triton's kernels"
        if why:
            logger.info("steps run without graphs: %s", why)
        return why is None

    def _load(self, folder: Path, tp: TPGroup) -> Model:
        started = time.perf_counter()
        group = tp
        if self.config.determinism == "strict":
            fixed_order.check(self.config, self.model_config, self.device.torch_device)
            group = fixed_order.FixedOrder(tp)
        model = build_model(self.model_config, group, self.dtype, self.device.torch_device)
        if isinstance(group, fixed_order.FixedOrder):
            fixed_order.pad_layers(model)
        if (vision := self.model_config.vision) is not None:
            from engine.model.transformers_backend.vision import VisionEncoder

            model.vision = build(lambda: VisionEncoder(vision), self.dtype, self.device.torch_device)
        if self.config.load_format == "dummy":
            fill_with_noise(model)
        else:
            load_weights(model, folder, tp)
        parameters = count_parameters(model)
        pack_weights(model)
        logger.info(
            "model loaded architecture=%s parameters=%.1fM dtype=%s device=%s threads=%d seconds=%.1f",
            self.model_config.architecture, parameters / 1e6, str(self.dtype).removeprefix("torch."),
            self.device.torch_device, torch.get_num_threads(), time.perf_counter() - started,
        )  # fmt: skip
        return model

    def _target(self, folder: Path) -> Target:
        cfg, device, dummy = self.model_config, self.device.torch_device, self.config.load_format == "dummy"
        return Target(self.model, cfg, folder, self.tp, self.dtype, device, self.block_size, dummy)

    def _compile(self) -> None:
        if self.config.enforce_eager:
            logger.info("torch_compile is set aside by enforce_eager")
            return
        from engine.model.torch_compile import compile_layers  # importing torch's compiler takes seconds

        compile_layers(self.model, self.model_config, self.tp, lambda tokens: self.run_dummy_step(tokens, 1))

    def _free_gpu_bytes(self) -> int:
        """Return the bytes that `gpu_memory_utilization` leaves for the KV cache beside weights, graphs and the
        activations of the largest step, which is run to measure them."""
        largest_step = self.config.max_num_batched_tokens, self.config.max_num_seqs
        self.run_dummy_step(*largest_step)  # compiles kernels and loads libraries, whose memory stays in use
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run_dummy_step(*largest_step)
        torch.cuda.synchronize()
        activations = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used = total - free
        graphs = 0 if self.config.enforce_eager else int(self.config.cuda_graph_memory_gib * 2**30)
        longest = self.model_config.longest_sequence(self.config.max_model_len)
        sequences = 4 * self.config.max_num_seqs * (longest + -(-longest // self.block_size))  # history, block tables
        threads = CUBLAS_BYTES * (self.tp.size > 1)  # with other ranks, EngineCore launches steps in another thread
        if self._encoder_cache is not None:
            activations += self.config.encoder_cache_size * self._encoder_cache.embedding_bytes
        logger.info(
            "profiled the largest step: %.2f GiB beside %.2f GiB in use; %.2f GiB are kept for graphs, %.2f for tokens "
            "and block tables",
            activations / 2**30, used / 2**30, graphs / 2**30, sequences / 2**30,
        )  # fmt: skip
        return int(total * self.config.gpu_memory_utilization) - used - activations - graphs - sequences - threads

    @torch.inference_mode()
    def run_dummy_step(self, tokens: int, seqs: int) -> None:
        """Compute `tokens` tokens and sample for `seqs` sequences, all in one KV block."""
        size = self.block_size
        counts = np.full(seqs, tokens // seqs)
        counts[: tokens % seqs] += 1
        ids = torch.zeros(tokens, dtype=torch.int64, device=self.device.torch_device)
        single, chunks = split(counts.tolist(), counts.tolist())
        staged = self.device.staged_copy()
        batch = Batch(
            positions=ids,
            slot_mapping=ids % size,
            query_start=staged.add(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            kv_len=staged.add(counts.astype(np.int32)),
            block_table=torch.zeros(
                seqs, -(-int(counts.max()) // size), dtype=torch.int32, device=self.device.torch_device
            ),
            kv_cache=kv_cache.allocate(1, self.model_config, size, self.kv_dtype, self.device.torch_device, self.tp),
            single=staged.add(single.numpy()),
            chunks=chunks,
            kv_scales=self.kv_scales,
        )
        if self.model_config.head != "lm":
            staged.send()
            self.model(ids, batch)
            self.device.event().wait()
            return
        # both ways of drawing, since each has a kernel; top_p needs the most memory
        samplings = [
            prepare_sampling(
                [SampledRow(0, 0, 0, row, SamplingParams(temperature=1.0, top_p=top_p)) for row in range(seqs)],
                self.model_config.vocab_size, UniformSource(), staged.add,
            )
            for top_p in (1.0, 0.9)
        ]  # fmt: skip
        staged.send()
        logits = self.model.logits(self.model(ids, batch)[:seqs, : self.model_config.hidden_size])
        for sampling in samplings:
            sample(logits, sampling)
        self.device.event().wait()

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Build the inputs of `plan`, without any result of the steps before it."""
        return self._inputs.build(plan)

    # -- on the device -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """Compute a step, or put it into the device's queue. Steps must come in the order they were prepared in."""
        inputs.staged.send()
        history = self._history.view(-1)
        for new in inputs.added:
            self._history[new.slot, : len(new.tokens)] = new.tokens
        if inputs.drafted is not None:
            history[inputs.drafted.written] = inputs.drafted.tokens
        if self._tables is not None and inputs.block_tables is not None and len(inputs.block_tables.index):
            self._tables.view(-1)[inputs.block_tables.index] = inputs.block_tables.blocks
        for change in inputs.plan.blocks:
            for block, start in change.cleared:
                self.kv_cache[block, :, :, :, start:] = 0
        if self._encoder_cache is not None:
            self._encoder_cache.update(inputs.plan, self.image_inbox)
        out, size = self._forward(inputs, history), self.model_config.hidden_size
        hidden = out if self.drafter is None else out[:, :size]
        tokens, logprobs = self._sample(hidden, inputs)
        # -1 ends a request, but with overlap a step that reads this token may be under way and needs a real one
        history[inputs.written] = tokens.clamp(min=0).int()
        prompt_logprobs = [(rows, self._prompt_logprobs(hidden, rows)) for rows in inputs.prompt_logprob_rows]
        pooled = self._pooler.launch(hidden, inputs.pooled_rows) if inputs.pooled_rows else []
        drafts, draft_s = None, lambda: 0.0
        if self.drafter is not None:
            self.drafter.follow(inputs.plan)
            if inputs.plan.num_drafts or self.drafter.reads_all:
                step = draft_inputs(inputs, tokens, self._history, out, size)
                proposed, draft_s = self.device.timed(partial(self.drafter.propose, step))
                drafts = self.device.fetch(proposed)
        tokens = self.device.fetch(tokens)
        return LaunchedStep(inputs, tokens, logprobs, prompt_logprobs, pooled, drafts, draft_s, self.device.event())

    def _forward(self, inputs: StepInputs, history: Tensor) -> Tensor:
        if inputs.batch is not None and self._tables is not None and inputs.block_tables is not None:
            inputs.batch.block_table = self._tables[:, : inputs.block_tables.width].index_select(
                0, inputs.block_tables.rows
            )
        if inputs.graph is not None:
            assert self.graphs is not None
            return self.graphs.run(*inputs.graph)
        assert inputs.batch is not None
        ids, batch = history[inputs.token_index].long(), inputs.batch
        x = None
        if self._encoder_cache is not None:
            embedded = self.model.embed(ids)
            x, batch = self._encoder_cache.merge(embedded, batch, inputs.image_rows, inputs.rotary_positions)
        as_text = batch.rope_table is None and batch.deepstack is None and batch.image_ends is None
        if self._step_graph is not None and as_text:
            return self._step_graph.run(self.model.embed(ids) if x is None else x, batch)
        return self.model(ids, batch) if x is None else self.model.run_layers(x, batch)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step and return its result."""
        launched.event.wait()
        inputs = launched.inputs
        count = len(inputs.plan.slots)
        result = StepResult(inputs.plan.step, [[] for _ in range(count)], [None] * count, [None] * count, {}, {},
                            launched.draft_s())  # fmt: skip
        if inputs.plan.drafts:
            sampled = iter(launched.tokens.tolist())
            for i in dict.fromkeys(inputs.entries):
                drafts = inputs.plan.drafts.get(i, [])
                result.tokens[i] = accepted_tokens([next(sampled) for _ in range(len(drafts) + 1)], drafts)
        else:
            for i, token in zip(inputs.entries, launched.tokens.tolist(), strict=True):
                result.tokens[i] = [token]
        if launched.drafts is not None:
            result.drafts.update(zip(dict.fromkeys(inputs.entries), launched.drafts.tolist(), strict=True))
        if launched.logprobs is not None:
            entries, counts, table = launched.logprobs
            for i, logprob in zip(entries, table.rows(counts), strict=True):
                result.logprobs[i] = [*(result.logprobs[i] or ()), logprob][: len(result.tokens[i])]
        for rows, tables in launched.prompt_logprobs:
            result.prompt_logprobs[rows.entry] = [
                value for table in tables for value in table.rows([rows.count] * len(table.tokens))
            ]
        for pooled in launched.pooled:
            result.pooled.update(self._pooler.finish(pooled))
        return result

    def _sample(
        self, hidden: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, tuple[list[int], list[int], LogprobTable] | None]:
        """Return the tokens [n] int64 of the sampling entries, and the log-probabilities that were requested."""
        if not inputs.entries:
            return inputs.sampled_rows, None
        sampling = inputs.sampling
        if sampling.plain:
            return mark_non_finite(*self.model.best(hidden[inputs.sampled_rows])), None
        logits = self.model.logits(hidden[inputs.sampled_rows])
        asked = sampling.logprobs
        raw = None if asked is None else logits.index_select(0, asked.rows)
        process_rows(logits, sampling, self._history)
        tokens = sample(logits, sampling)
        if asked is None or raw is None:
            return tokens, None
        chosen = tokens.index_select(0, asked.rows).clamp(min=0)
        counts = list(asked.counts.values())
        table = logprob_table(raw, chosen, max(counts)).fetched(self.device.fetch)
        return tokens, ([inputs.entries[row] for row in asked.counts], counts, table)

    def _prompt_logprobs(self, hidden: Tensor, rows: PromptLogprobRows) -> list[LogprobTable]:
        targets = self._history.view(-1)[rows.targets].long()
        tables = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            wanted = targets[start : start + PROMPT_LOGPROB_ROWS]
            first = rows.first_row + start
            logits = self.model.logits(hidden[first : first + len(wanted)])
            tables.append(logprob_table(logits, wanted, rows.count).fetched(self.device.fetch))
        return tables
