"""Places images in a step: the rows of their embeddings, and the positions of their tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.device import StagedCopy
from engine.model.batch import Batch, DeepStack
from engine.model.config import ModelConfig
from engine.model.config_parts.vision import VisionConfig
from engine.model.layers.rope import rope_table
from engine.model.models.llama import Model
from engine.model.transformers_backend.example_image import example_image
from engine.runner.step_layout import StepLayout
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.plan import NewSequence, StepPlan

logger = logging.getLogger(__name__)

AXES = 3  # time, height and width


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Rows of a step whose token embeddings are replaced by embeddings of images."""

    rows: Tensor  #: [n] int64
    parts: list[tuple[bytes, int, int]]  #: hash of an image, and the range [first, stop) of its embeddings
    image_ends: Tensor | None  #: see Batch


class PromptImages:
    """The images of one sequence."""

    def __init__(self, sequence: NewSequence, cfg: VisionConfig):
        self.end = max(image.mm_position.end for image in sequence.images)
        #: Hash of each image, and the positions of its embeddings in the sequence, ascending.
        self.images: list[tuple[bytes, np.ndarray]] = []
        tokens = np.array(sequence.tokens[: self.end])
        for image in sequence.images:
            place = image.mm_position
            found = np.flatnonzero(tokens[place.offset : place.end] == cfg.image_token_id)
            self.images.append((image.mm_hash, place.offset + found))
        #: [3, end], rotary positions in time, height and width; None if they equal the positions in the sequence.
        self.positions = rotary_positions(sequence.images, cfg.merge_size) if cfg.rope_axes else None

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


class NoSlotImages:
    """Stand-in for SlotImages in an engine whose model takes no images."""

    def add(self, sequence: NewSequence) -> None:
        pass

    def place(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> tuple[EmbeddingRows | None, np.ndarray]:
        return None, layout.positions


class SlotImages:
    """The images of the sequence in each slot. They are kept until the sequence's last image is computed."""

    def __init__(self, cfg: VisionConfig, slots: int):
        self._cfg = cfg
        self._sequences: dict[int, PromptImages] = {}
        self._shifts = np.zeros(slots, dtype=np.int64)

    def add(self, sequence: NewSequence) -> None:
        self._sequences.pop(sequence.slot, None)
        self._shifts[sequence.slot] = 0
        if sequence.images:
            images = self._sequences[sequence.slot] = PromptImages(sequence, self._cfg)
            self._shifts[sequence.slot] = images.shift

    def place(self, plan: StepPlan, layout: StepLayout, staged: StagedCopy) -> tuple[EmbeddingRows | None, np.ndarray]:
        """Return the rows of a step that need embeddings, or None, and the rotary positions of its tokens: [tokens], or
        [3, tokens] if some are in images. A sequence whose last image is computed in this step is forgotten."""
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
        if not rows:
            return None, rotary
        image_ends = None if ends is None else staged.add(ends.astype(np.int32))
        return EmbeddingRows(staged.add(np.concatenate(rows)), parts, image_ends), rotary


def open_encoder_cache(
    model: Model, cfg: ModelConfig, dtype: torch.dtype, device: torch.device, *, together: bool
) -> EncoderCache | NoEncoderCache:
    """Return what places images in the steps of this rank. together: as for EncoderCache."""
    if cfg.vision is None:
        return NoEncoderCache()
    return (
        ImagePlaces(cfg, dtype, device) if model.vision is None else EncoderCache(model, cfg, dtype, together=together)
    )


class NoEncoderCache:
    """Stand-in for EncoderCache in an engine whose model takes no images."""

    embedding_bytes = 0

    def update(self, plan: StepPlan, inbox: Tensor | None, blocks: list[Tensor]) -> None:
        pass

    def embed(
        self, ids: Tensor, batch: Batch, needed: EmbeddingRows | None, rotary: Tensor | None
    ) -> tuple[Tensor | None, Batch]:
        return None, batch

    def place(self, batch: Batch, needed: EmbeddingRows | None, rotary: Tensor | None) -> Batch:
        return batch

    def encode_example(self, num_embeds: int) -> None:
        pass


class ImagePlaces(NoEncoderCache):
    """Stand-in for EncoderCache in a pipeline stage that receives the embeddings as hidden states."""

    def __init__(self, cfg: ModelConfig, dtype: torch.dtype, device: torch.device):
        assert cfg.vision is not None
        self._device = device
        self._table = rope_table(cfg.rope[0], cfg.head_dim, cfg.max_position_embeddings, dtype, device)
        # one axis for each column of the table: the cosines, then the sines
        self._axes = torch.tensor(2 * cfg.vision.rope_axes, dtype=torch.int64, device=device)

    def place(self, batch: Batch, needed: EmbeddingRows | None, rotary: Tensor | None) -> Batch:
        """Return a step's batch with rotary positions for images, and the ends of the images in the step.

        rotary: see StepInputs.rotary_positions.
        """
        if rotary is not None and rotary.dim() == 1:
            batch = replace(batch, positions=rotary)
        elif rotary is not None:
            columns = torch.arange(len(self._axes), device=self._device)
            table = self._table[rotary[self._axes].T, columns].contiguous()
            tokens = torch.arange(rotary.shape[1], device=self._device)
            batch = replace(batch, positions=tokens, rope_table=table)
        return batch if needed is None else replace(batch, image_ends=needed.image_ends)


class EncoderCache(ImagePlaces):
    """Embeddings of images on the device, by hash. Rank 0's EncoderCacheManager decides which are kept."""

    def __init__(self, model: Model, cfg: ModelConfig, dtype: torch.dtype, *, together: bool):
        """together: whether images of a step that `go_together` are encoded by one call. The last bits of an image's
        embeddings then depend on the other images, as they do on a GPU anyway."""
        assert model.vision is not None and cfg.vision is not None
        super().__init__(cfg, dtype, model.vision.device)
        self._model = model
        self._vision, self._hidden_size, self._dtype, self._cfg = model.vision, cfg.hidden_size, dtype, cfg.vision
        self._width = cfg.hidden_size * (1 + cfg.vision.deepstack)
        self.embedding_bytes = self._width * dtype.itemsize
        self._together = together
        self._embeddings: dict[bytes, Tensor] = {}

    def update(self, plan: StepPlan, inbox: Tensor | None, blocks: list[Tensor]) -> None:
        """Drop, receive and compute embeddings as the plan says. inbox: [blocks, layers, 2, 1, block_size, hidden / 2],
        memory into which embeddings from encode engines are read. blocks: for each received image, [n] int64, its
        blocks in `inbox`."""
        for mm_hash in plan.forgotten:
            self._embeddings.pop(mm_hash, None)  # the step may be launched again (launching/recovery.py)
        for received, index in zip(plan.received, blocks, strict=True):
            assert inbox is not None
            rows = inbox[index].permute(0, 4, 1, 2, 3, 5).reshape(-1, self._width)
            self._embeddings[received.mm_hash] = rows[: received.num_embeds]
        for images in self._calls(plan.encoded):
            self._embeddings |= self._encode(images)

    def _calls(self, images: list[MultiModalFeatureSpec]) -> list[list[MultiModalFeatureSpec]]:
        """Divide images into groups, each of which one call of the encoder computes."""
        calls: list[list[MultiModalFeatureSpec]] = []
        for image in images:
            if calls and self._together and self._vision.go_together(calls[-1][0].data, image.data):
                calls[-1].append(image)
            else:
                calls.append([image])
        return calls

    def embed(
        self, ids: Tensor, batch: Batch, needed: EmbeddingRows | None, rotary: Tensor | None
    ) -> tuple[Tensor | None, Batch]:
        """Return the embeddings [tokens, hidden] of a step's tokens, image tokens included, and the step's batch with
        rotary positions for images. The embeddings are None if the model can embed the tokens itself.

        ids: [tokens] int64. rotary: see StepInputs.rotary_positions.
        """
        x, batch = self._model.embed(ids), self.place(batch, needed, rotary)
        if needed is not None:
            found = torch.cat([self._embeddings[mm_hash][first:stop] for mm_hash, first, stop in needed.parts])
            embeddings, *levels = found.split(self._hidden_size, dim=1)
            x = x.index_copy(0, needed.rows, embeddings)
            if levels:
                batch = replace(batch, deepstack=DeepStack(needed.rows, tuple(levels)))
        return x, batch

    def encode_example(self, num_embeds: int) -> None:
        """Encode a black image with about `num_embeds` embeddings, and drop it."""
        self._encode([example_image(self._cfg, num_embeds)])

    def _encode(self, images: list[MultiModalFeatureSpec]) -> dict[bytes, Tensor]:
        """Return the embeddings of each image by its hash, computed by one call."""
        sizes = [image.num_embeds for image in images]
        shape = sum(sizes), self._width
        try:
            found = self._vision(*(image.data for image in images))
            if found.shape == shape:
                parts = found.split(sizes)
                if len(parts) > 1:  # each in its own memory, which goes with its image
                    parts = tuple(part.clone() for part in parts)
                return dict(zip((image.mm_hash for image in images), parts, strict=True))
            problem = f"the encoder made {list(found.shape)} of it, not {list(shape)}"
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            problem = f"{type(error).__name__}: {error}"
        if len(images) > 1:  # each by itself, so that only requests with a broken image end
            return {mm_hash: rows for image in images for mm_hash, rows in self._encode([image]).items()}
        # NaN ends the requests with this image, and no others
        logger.error("an image cannot be encoded mm_hash=%s: %s", images[0].mm_hash.hex(), problem)
        return {images[0].mm_hash: torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)}
