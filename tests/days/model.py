"""The model of a simulated cluster: its next token depends on the seed and on all tokens before it. KV is a number for
all tokens up to its own, so that KV of anything else is seen when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Protocol

from engine.config import EngineConfig
from engine.costs.step_cost import StepWork
from engine.lora.messages import SequenceAdapter
from engine.parts.kv_check.messages import EQUAL, BlockCompared, BlockPair
from engine.runner.rank_part import RankParts
from engine.text.text_stream import TextStream
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.images import MultiModalFeatureSpec, PromptImages, images_in
from engine.wire.plan import NewSequence, StepPlan, StepResult
from engine.wire.sampling_params import seed_of
from engine.wire.token_delta import FinishReason, TokenDelta
from tests.fake_runner import FakeGrammar

VOCAB, EOS = 64, 0
IMAGE = VOCAB - 1  # stands in a prompt for an embedding of an image
MASK = 2**64 - 1
NO_ADAPTER = -1, 0
LETTERS = [b"", *(bytes([97 + i % 26]) for i in range(1, 56))]
LETTERS += [b"\xc3", b"\xa9", b" ", b"\n", b"ab", b"\xe2\x82", b"\xac", b"."]


def link(kv: int, token: int) -> int:
    """KV after `token`, whose predecessor has `kv`."""
    mixed = ((kv ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK
    return mixed ^ mixed >> 29


def embedding(mm_hash: bytes, index: int) -> int:
    """Return one embedding of an image."""
    return link(int.from_bytes(mm_hash[:8], "little"), index)


def origin_of(adapter: ModelAdapter | None) -> int:
    """Return the KV before the first token: weights with another adapter give another KV."""
    return 0 if adapter is None else int(adapter.digest, 16)


def inputs(tokens: list[int], images: Sequence[MultiModalFeatureSpec]) -> list[int]:
    """Return what a model takes for tokens: embeddings of images in place of their placeholders."""
    if not images:
        return tokens
    found = list(tokens)
    for image in images:
        place = image.mm_position
        places = [i for i in range(place.offset, min(place.end, len(tokens))) if tokens[i] == IMAGE]
        for index, i in enumerate(places):
            found[i] = embedding(image.mm_hash, index)
    return found


def chain(tokens: list[int], kv: int = 0) -> list[int]:
    """Return the KV of these tokens. kv: that of the token before them."""
    found = []
    for token in tokens:
        found.append(kv := link(kv, token))
    return found


def sample(seed: int, kv: int, mask: bytes | None = None) -> int:
    """Return the token after one with this KV. mask: a bit for each token, set if the token may come."""
    if mask is None:
        return link(kv, seed) % VOCAB
    allowed = [token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1]
    return allowed[link(kv, seed) % len(allowed)]


class Tokenizer:
    def token_bytes(self, token_id: int) -> bytes:
        return LETTERS[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


TOKENIZER = Tokenizer()


def alone(request: GenerateRequest, max_model_len: int) -> tuple[list[int], str, str]:
    """Return tokens, text and finish reason of a request that runs alone, without faults."""
    params, kv = request.params, origin_of(request.record(ModelAdapter))
    seed = seed_of(request.request_id) if params.seed is None else params.seed % 2**64
    for token in inputs(request.prompt, images_in(request)):
        kv = link(kv, token)
    limit = max_model_len - len(request.prompt)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    stream, tokens, text = TextStream(params, TOKENIZER), list[int](), ""
    grammar = FakeGrammar() if params.structured_outputs else None
    while True:
        token = sample(seed, kv, grammar.masks() if grammar else None)
        tokens.append(token)
        if grammar:
            grammar.accept(token)
        kv = link(kv, token)
        stops = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        complete = grammar is not None and grammar.is_done and not stops
        reason: FinishReason | None = "stop" if stops or complete else "length" if len(tokens) == limit else None
        chunk = stream.add(TokenDelta(request_id="", token_ids=[token], finish_reason=reason, text_complete=complete))
        text += chunk.text
        if chunk.finish_reason is not None:
            return tokens, text, chunk.finish_reason


class StepClock:
    """The clock of one engine: that of the world, with an error, and ahead of it during a step, which the world sees as
    one moment."""

    def __init__(self, world_now, drift: float = 1.0, offset: float = 0.0):
        self._world_now, self.drift, self._offset = world_now, drift, offset
        self.lead = 0.0  #: seconds of the world

    def world(self) -> float:
        return self._world_now() + self.lead

    def monotonic(self) -> float:
        return self._offset + self.drift * self.world()


class Flipped(int):
    """KV that a model takes for the right one, although it is not."""


class Memory(Protocol):
    """Blocks that are read and written between engines."""

    def read(self, block: int, now: float) -> list[int | None]:
        """Return what another engine sees in a block."""

    def write(self, block: int, kv: list[int | None], now: float) -> None:
        """Put what was read from another engine into a block."""

    def used_until(self, block: int) -> float:
        """Return when the newest step ends that reads or writes a block."""


class Runner:
    """Computes a step at once. It knows until when the step would take, and that its KV is not there before."""

    device = SimpleNamespace(asynchronous=True)
    parts = RankParts()

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        clock: StepClock,
        *,
        overlap: bool,
        stages: int,
        step_s: float,
    ):
        """stages: as many steps, and one more, may be launched and not collected. step_s: seconds of a step, besides an
        eighth of it per token."""
        self.overlap, self._clock, self.block_size = overlap, clock, config.block_size
        self.max_steps = 1 + stages
        self.step_s, self.token_s = step_s, step_s / 8
        self._tables = [[-1] * -(-max_model_len // config.block_size) for _ in range(config.max_num_seqs)]
        self._sequences: dict[int, NewSequence] = {}
        self._adapters: dict[int, int] = {}  # what `origin_of` says of the adapter in each slot of adapters
        self._adapter_of: dict[int, tuple[int, int]] = {}  # sequence's slot -> slot of its adapter, and its origin
        self._history: dict[int, list[int]] = {}  # slot -> KV after each known token
        self._kv: list[int | None] = [None] * (num_blocks * config.block_size)
        self._written_at = [0.0] * len(self._kv)  # of each cell, when the newest step that writes it ends
        self._read_until = [0.0] * num_blocks  # when the newest step that reads it ends
        self._free_at = 0.0
        self._compared: list[BlockCompared] = []

    def prepare(self, plan: StepPlan) -> StepPlan:
        for sequence in plan.added:
            self._sequences[sequence.slot] = sequence
            self._history[sequence.slot] = []
            self._adapter_of.pop(sequence.slot, None)
            if (adapter := sequence.record(SequenceAdapter)) is not None:
                self._adapter_of[sequence.slot] = adapter.slot, self._adapters[adapter.slot]
            sent = sequence.record(PromptImages)
            for token in inputs(sequence.tokens, [] if sent is None else sent.images):
                self._append(sequence.slot, token)
        for change in plan.blocks:
            self._tables[change.slot][change.index : change.index + len(change.blocks)] = change.blocks
        return plan

    def launch(self, plan: StepPlan) -> tuple[float, StepResult]:
        size, work = self.block_size, StepWork.of(plan)
        cost = self.step_s + self.token_s * (work.decodes + work.prefill_tokens)
        ends_at = self._free_at = max(self._free_at, self._clock.world()) + cost
        result = StepResult(plan.step, [], [None] * len(plan.slots), [None] * len(plan.slots))
        for entry, drafts in plan.drafts.items():
            for token in drafts:
                self._append(plan.slots[entry], token)
        rows, written = list(zip(plan.slots, plan.starts, plan.counts, strict=True)), set[int]()
        for slot, start, count in rows:
            history, table = self._history[slot], self._tables[slot]
            if (adapter := self._adapter_of.get(slot)) is not None:
                assert self._adapters[adapter[0]] == adapter[1], "an adapter is taken from a running sequence"
            for position in range(start, start + count):
                block = table[position // size]
                cell = block * size + position % size
                assert cell not in written, "two sequences write one cell"
                written.add(cell)
                self._kv[cell], self._written_at[cell] = history[position], ends_at
        masks = iter([plan.masks[i : i + 8] for i in range(0, len(plan.masks), 8)])
        for entry, ((slot, start, count), samples) in enumerate(zip(rows, plan.samples, strict=True)):
            history, table = self._history[slot], self._tables[slot]
            end = start + count
            seen: list[int | None] = []
            for block in table[: -(-end // size)]:
                seen += self._kv[block * size : (block + 1) * size]
                self._read_until[block] = ends_at
            assert seen[:end] == history[:end], "the KV of other tokens is read"
            result.tokens.append([])
            if samples:
                assert end == len(history)
                drafts = plan.drafts.get(entry, [])
                del history[end - len(drafts) :]
                right = True
                for draft in [*drafts, None]:
                    mask = next(masks) if entry in plan.masked else None
                    if right:
                        token = sample(self._sequences[slot].seed, history[-1], mask)
                        result.tokens[-1].append(token)
                        self._append(slot, token)
                        right = token == draft
        assert next(masks, None) is None
        if (pair := plan.record(BlockPair)) is not None:
            cached = self.content(pair.cached)
            assert self.content(pair.computed) == cached, "blocks of other tokens are compared"
            differs = any(isinstance(cell, Flipped) for cell in cached)
            self._compared.append(BlockCompared(pair.number, 0 if differs else EQUAL))
        return ends_at, result

    def answers(self) -> list[BlockCompared]:
        """As those of a BlockComparer."""
        compared, self._compared = self._compared, []
        return compared

    def collect(self, launched: tuple[float, StepResult]) -> StepResult:
        ends_at, result = launched
        self._clock.lead += max(0.0, ends_at - self._clock.world())
        return result

    def read(self, block: int, now: float) -> list[int | None]:
        """What another engine sees in a block."""
        return [None if now < self._written_at[cell] else self._kv[cell] for cell in self._cells(block)]

    def write(self, block: int, kv: list[int | None], now: float) -> None:
        """What another engine has read comes into a block."""
        assert now >= self._read_until[block], "a step reads what another engine writes"
        for cell, value in zip(self._cells(block), kv, strict=True):
            assert now >= self._written_at[cell], "a step writes where another engine does"
            self._kv[cell] = value

    def used_until(self, block: int) -> float:
        """Return when the newest step ends that reads or writes a block."""
        return max(self._read_until[block], *(self._written_at[cell] for cell in self._cells(block)))

    def content(self, block: int) -> list[int | None]:
        return [self._kv[cell] for cell in self._cells(block)]

    def _cells(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _append(self, slot: int, token: int) -> None:
        history = self._history[slot]
        before = history[-1] if history else self._adapter_of.get(slot, NO_ADAPTER)[1]
        history.append(link(before, token))

    def load_adapter(self, slot: int, origin: int) -> None:
        """origin: as `origin_of` says."""
        self._adapters[slot] = origin

    def close(self) -> None:
        pass
