"""Images on a rank: the rows of their embeddings in a step, and the positions of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device import StagedCopy
from engine.devices.free_memory import FreeMemory
from engine.distributed.tp_group import TPGroup
from engine.model.batch import Batch, DeepStack
from engine.model.config_parts.vision import VisionConfig
from engine.model.layers.rope import rope_table
from engine.model.models.images.encoder_config import encoder_config
from engine.model.models.llama import Model
from engine.model.transformers_backend.example_image import example_image
from engine.parts.images.rank.encoder_cache import EmbeddingRows, EncoderCache, vision_encoder
from engine.runner import kv_cache
from engine.runner.graphs.warm_up import SAMPLINGS, plan
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import DummyStep, Forward, StepMemory
from engine.runner.step_layout import StepLayout
from engine.wire.parts.images import NO_IMAGES, ImageStep, MultiModalFeatureSpec, PromptImages
from engine.wire.plan import NewSequence, StepPlan

if TYPE_CHECKING:  # it needs pyzmq
    from engine.kv_transfer.transport.ranks import KVWorkerInfo

AXES = 3  # time, height and width


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """What the images of a step need."""

    embeddings: EmbeddingRows | None
    span_ends: Tensor | None  #: see Batch
    rotary: Tensor | None
    """[tokens] int64, or [3, tokens] if some are in images; None if they equal the batch's positions."""
    received: list[Tensor]  #: [n] int64 each, blocks of the inbox, of each image in `ImageStep.received`


class SequenceImages:
    """The images of one sequence."""

    def __init__(self, tokens: list[int], images: list[MultiModalFeatureSpec], cfg: VisionConfig):
        self.end = max(image.mm_position.end for image in images)
        #: Hash of each image, and the positions of its embeddings in the sequence, ascending.
        self.images: list[tuple[bytes, np.ndarray]] = []
        read = np.array(tokens[: self.end])
        for image in images:
            place = image.mm_position
            found = np.flatnonzero(read[place.offset : place.end] == cfg.image_token_id)
            self.images.append((image.mm_hash, place.offset + found))
        #: [3, end], rotary positions in time, height and width; None if they equal the positions in the sequence.
        self.positions = rotary_positions(images, cfg.merge_size) if cfg.rope_axes else None

    @property
    def shift(self) -> int:
        """Number to add to the position of a token after the last image to get its rotary position."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.end

    def rows(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, tuple[bytes, int, int]]]:
        """Yield for each image in tokens [start, stop) of the sequence: the rows of its embeddings, counted from
        `start`, and its part, as in `EmbeddingRows.parts`."""
        for mm_hash, positions in self.images:
            first, last = np.searchsorted(positions, (start, stop)).tolist()
            if first < last:
                yield positions[first:last] - start, (mm_hash, first, last)


def rotary_positions(images: list[MultiModalFeatureSpec], merge_size: int) -> np.ndarray:
    """Return positions in time, height and width: [3, tokens up to the end of the last image].

    Text after an image continues at the largest position so far, plus one. All tokens of an image have the same time;
    its rows and columns are counted from the position at which it begins: Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    pieces, end, position = [], 0, 0
    for image in images:
        text = image.mm_position.offset - end
        _, height, width = image.data["image_grid_thw"].numpy()[0] // (1, merge_size, merge_size)
        pieces.append(np.broadcast_to(position + np.arange(text), (AXES, text)))
        grid = np.stack(np.meshgrid(np.zeros(1), np.arange(height), np.arange(width), indexing="ij"))
        pieces.append(position + text + grid.reshape(AXES, -1).astype(np.int64))
        position, end = position + text + max(height, width), image.mm_position.end
    found: np.ndarray = np.concatenate(pieces, axis=1)
    return found


class Images(RankPart):
    """The images of the sequence in each slot, which are kept until the sequence's last image is computed; and on the
    first stage their embeddings. Later stages receive these as hidden states."""

    name = "images"

    def __init__(self, setup: RankSetup):
        self._setup = setup
        self.cache: EncoderCache | None = None
        self.inbox: Tensor | None = None
        self.of_ranks: list[KVWorkerInfo] = []
        """The workers of all ranks that read embeddings into inboxes."""
        self._opened = ExitStack()
        self._sequences: dict[int, SequenceImages] = {}  # by slot
        self._shifts = np.zeros(setup.config.max_num_seqs, dtype=np.int64)

    def attach(self, model: Model) -> None:
        """Open the encoder cache, and the memory into which embeddings from encode engines are read. Raises ConfigError
        for a model that reads text only."""
        setup, cfg = self._setup, self._setup.model
        if setup.config.of(EngineConfig).encode is not None:
            self.inbox = allocate_inbox(setup)
        assert cfg.vision is not None
        self._cfg, device = cfg.vision, setup.torch_device
        self._table = rope_table(cfg.rope[0], cfg.head_dim, cfg.max_position_embeddings, setup.dtype, device)
        # one axis for each column of the table: the cosines, then the sines
        self._axes = torch.tensor(2 * cfg.vision.rope_axes, dtype=torch.int64, device=device)
        if vision_encoder(model) is not None:
            self.cache = EncoderCache(model, cfg, setup.dtype, together=setup.device.asynchronous)

    def dummy_step(self, step: DummyStep) -> None:
        if self.cache is not None:
            self.cache.encode_example(self._setup.config.of(EngineConfig).encoder_cache_size)

    def reserve(self, free: FreeMemory) -> FreeMemory:
        if self.cache is None or self._setup.torch_device.type == "cpu":
            return free
        return free.less(self._setup.config.of(EngineConfig).encoder_cache_size * self.cache.embedding_bytes)

    def allocate(self, memory: StepMemory) -> None:
        self._max_model_len = memory.history.shape[1]

    def start(self, run: Run, runner: LayerRunner) -> None:
        setup = self._setup
        if setup.device.asynchronous and setup.model.head == "lm" and setup.model.stage.is_whole:
            for each in image_plans(example_image(self._cfg, 1), self._cfg.image_token_id, setup, self._max_model_len):
                run(each)
        config = setup.config.of(EngineConfig).encode
        if config is not None and self.inbox is not None:
            from engine.kv_transfer.transport.ranks import start_kv_worker  # it needs pyzmq

            layers = [range(self.inbox.shape[1])]
            worker, self.of_ranks = start_kv_worker(config, [self.inbox], [1], layers, setup.tp, setup.host)
            self._opened.callback(worker.close)

    def close(self) -> None:
        self._opened.close()

    def prepare(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> ImageInputs | None:
        """Find the rows of a step that need embeddings, and the rotary positions of its tokens. A sequence whose last
        image is computed in this step is forgotten."""
        for new in plan.added:
            self._add(new)
        query_start, positions, slots = layout.query_start, layout.positions, layout.sequences.slots[layout.entry]
        rotary: np.ndarray = positions + self._shifts[slots] if self._cfg.rope_axes else positions
        rows: list[np.ndarray] = []
        parts: list[tuple[bytes, int, int]] = []
        ends = positions + 1 if self._sequences and self._cfg.mm_tokens_per_image else None
        for i, slot in enumerate(plan.slots if self._sequences else ()):
            images = self._sequences.get(slot)
            if images is None:
                continue
            first, start, stop = query_start[i], plan.starts[i], plan.starts[i] + plan.counts[i]
            for placed, part in images.rows(start, stop):
                rows.append(first + placed)
                parts.append(part)
                if ends is not None:  # the scheduler has put the whole image into this step
                    ends[first + placed] = start + placed[-1] + 1
            if images.positions is not None and start < images.end:
                rotary = np.tile(rotary, (AXES, 1)) if rotary.ndim == 1 else rotary
                own = images.positions[:, start:stop]
                rotary[:, first : first + own.shape[1]] = own
            if stop >= images.end:
                del self._sequences[slot]
        images_step = plan.record(ImageStep) or NO_IMAGES
        received = [staged.add(np.array(image.blocks, dtype=np.int64)) for image in images_step.received]
        if rotary.ndim == 1:
            layout.rotary = rotary
        layout.fits_graph = not rows and rotary.ndim == 1
        if not rows and rotary is positions and not received:
            return None
        return ImageInputs(
            embeddings=EmbeddingRows(staged.add(np.concatenate(rows)), parts) if rows else None,
            span_ends=staged.add(ends.astype(np.int32)) if rows and ends is not None else None,
            rotary=None if rotary is positions else staged.add(rotary),
            received=received,
        )

    def _add(self, sequence: NewSequence) -> None:
        self._sequences.pop(sequence.slot, None)
        self._shifts[sequence.slot] = 0
        if (sent := sequence.record(PromptImages)) is not None:
            images = self._sequences[sequence.slot] = SequenceImages(sequence.tokens, sent.images, self._cfg)
            self._shifts[sequence.slot] = images.shift

    def before(self, step: Forward) -> None:
        needed: ImageInputs | None = step.inputs.of.get(self.name)
        if self.cache is not None:
            images = step.inputs.plan.record(ImageStep) or NO_IMAGES
            self.cache.update(images, self.inbox, [] if needed is None else needed.received)
        if needed is None or step.batch is None or not step.inputs.prepared.needs_batch:
            return
        step.batch = self._place(step.batch, needed)
        if self.cache is not None and needed.embeddings is not None:
            embeddings, *levels = self.cache.rows(needed.embeddings)
            step.embeddings = needed.embeddings.rows, embeddings
            if levels:
                step.batch = replace(step.batch, deepstack=DeepStack(needed.embeddings.rows, tuple(levels)))

    def _place(self, batch: Batch, needed: ImageInputs) -> Batch:
        """Return a step's batch with rotary positions for images, and the ends of the images in the step."""
        rotary = needed.rotary
        if rotary is not None and rotary.dim() == 1:
            batch = replace(batch, positions=rotary)
        elif rotary is not None:
            columns = torch.arange(len(self._axes), device=rotary.device)
            table = self._table[rotary[self._axes].T, columns].contiguous()
            tokens = torch.arange(rotary.shape[1], device=rotary.device)
            batch = replace(batch, positions=tokens, rope_table=table)
        return batch if needed.span_ends is None else replace(batch, span_ends=needed.span_ends)


def allocate_inbox(setup: RankSetup) -> Tensor:
    """Return memory for embeddings from encode engines. Each rank has room for as many embeddings as the encoder cache
    holds. Raises ConfigError for a model that reads text only."""
    (group,) = encoder_config(setup.model).kv_groups
    num_blocks = -(-setup.config.of(EngineConfig).encoder_cache_size // setup.block_size)
    return kv_cache.allocate(
        num_blocks, group, setup.block_size, dtype=setup.dtype, device=setup.torch_device, tp=TPGroup.single()
    )


def image_plans(image: MultiModalFeatureSpec, token_id: int, setup: RankSetup, max_model_len: int) -> list[StepPlan]:
    """Return a plan of a prompt that is one image, and a plan that forgets the image; no plans if the image is too
    long."""
    count, config = image.num_embeds, setup.config.of(EngineConfig)
    if count > min(config.max_num_batched_tokens, config.encoder_cache_size, max_model_len - 1):
        return []
    encodes, forgets = plan([count], [count], SAMPLINGS[0], 0), plan([1], [1], SAMPLINGS[0], 0)
    prompt = PromptImages([image])
    encodes.added[0] = NewSequence(0, [token_id] * count, count, SAMPLINGS[0], seed=0, parts={prompt.part: prompt})
    encodes.parts[ImageStep.part] = ImageStep([image], [], [])
    forgets.parts[ImageStep.part] = ImageStep([], [image.mm_hash], [])
    return [encodes, forgets]
