"""Images that an encode engine computes for an engine that answers about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.engine_stats import load_of
from engine.errors import ConfigError
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.image_courier import ImageCourier
from engine.parts.images.image_handoffs import AHEAD, MAX_FAILED, ImageHandoffs
from engine.parts.images.inputs import EncodersSet, ImageWentOn
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import Failed, FirstToken, OpenHandoff, Received
from engine.wire.parts.handoffs import CancelDispatch, DispatchRemote, PrefillReplica, RemoteRequestFailed
from engine.wire.parts.images import (
    ImageStats,
    MultiModalFeatureSpec,
    PlaceholderRange,
    PromptImages,
    ReceivedImage,
    images_in,
)
from engine.wire.remote_request import Peer
from engine.wire.sampling_params import SamplingParams
from engine.wire.timeline import TimelineEvent
from tests.examples import examples
from tests.models import make_model
from tests.products import few
from tests.rank_pool import RankPool
from tests.vision_models import Prompt, expected_tokens, make_vision_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SIZES = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32"}
LIMIT_S = 60.0
IMAGE, BLOCK, NUM_BLOCKS = 90, 4, 6


# -- with engines ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr("engine.parts.images.image_handoffs.TIMEOUT_S", 60.0)


@contextmanager
def engines(folder: Path, ranks: int = 1, **options) -> Iterator[tuple[EngineCore, EngineCore]]:
    """An engine that answers, of so many ranks, and one that encodes images for it."""
    answers = HandoffConfig(role="decode", transport="tcp")
    config = EngineConfig(model=str(folder), tensor_parallel_size=ranks, encode=answers, **{**SIZES, **options})
    handoff = HandoffConfig(role="encode", transport="tcp")
    with RankPool() as pool, ExitStack() as opened:
        core = opened.enter_context(pool.engine(config))
        encode = build_engine(EngineConfig(model=str(folder), handoff=handoff, **{**SIZES, **options}))
        opened.callback(encode.close)
        core.apply(EncodersSet([PrefillReplica(engine_id="engine")]))
        yield core, encode


def run(core: EngineCore, *prompts: Prompt, dispatch: Callable[[DispatchRemote], object]) -> list[list[int]]:
    """Answer the prompts together. dispatch: takes images to an encode engine."""
    outputs: dict[str, list[int]] = {f"{i}": [] for i in range(len(prompts))}
    for name, prompt in zip(outputs, prompts, strict=True):
        core.add(
            GenerateRequest(request_id=name, prompt=prompt.tokens, params=GREEDY).asking(PromptImages.of(prompt.images))
        )
    deadline = time.monotonic() + LIMIT_S
    while core.has_work:
        assert time.monotonic() < deadline
        for event in core.step():
            assert event.delta.error is None, event.delta.error
            outputs[event.delta.request_id] += event.delta.token_ids
        for notice in core.mail.take_notices():
            if isinstance(notice, DispatchRemote):
                dispatch(notice)
        core.scheduler.check()
    core.scheduler.parts[EncoderCacheManager].handoffs.check()
    return list(outputs.values())


def by(encode: EngineCore, core: EngineCore, *prompts: Prompt) -> list[list[int]]:
    """Answer the prompts, with images from `encode`."""
    step = core.step

    def both():
        encode.step()
        return step()

    core.step = both  # type: ignore[method-assign]
    found = run(core, *prompts, dispatch=lambda notice: encode.mail[HandoffCourier].prefill(encode, notice.request))
    core.step = step  # type: ignore[method-assign]
    return found


def prompts(name: str) -> list[Prompt]:
    return [
        Prompt(name).text(5, 6).image(1).text(7, 8, 9),
        Prompt(name).text(*range(3, 16)),
        Prompt(name).image(2, 3, 2).text(11).image(3, 2, 2).image(1, 2, 3).text(12, 13),
    ]


@pytest.mark.parametrize("name", few(1, ["qwen3_vl", "gemma3", "mistral3"]))
def test_answers_about_images_that_an_encode_engine_has_encoded_are_those_of_one_engine(tmp_path, name):
    folder, wanted = make_vision_model(tmp_path, name), prompts(name)
    with engines(folder, max_num_batched_tokens=12) as (core, encode):
        expected = [expected_tokens(folder, prompt, 8) for prompt in wanted]
        assert by(encode, core, *wanted) == expected
        assert (core.stats().record(ImageStats).encoded, encode.stats().record(ImageStats).encoded) == (0, 3)
        assert load_of(core.scheduler).queued_embeds == 0
        lost = Prompt(name).text(5, 6).image(7).text(9)
        fail = lambda notice: core.mail[ImageCourier].channel.submit(  # noqa: E731
            RemoteRequestFailed(notice.request.handoff_id, "gone", True)
        )
        assert run(core, lost, dispatch=fail) == [expected_tokens(folder, lost, 8)]
        assert core.stats().record(ImageStats).encoded == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("determinism", [None, "strict"])
def test_every_rank_and_strict_determinism_take_images_from_an_encode_engine(tmp_path, determinism, ranks):
    folder, wanted = make_vision_model(tmp_path, "qwen3_vl", intermediate_size=96), prompts("qwen3_vl")
    expected = [expected_tokens(folder, prompt, 8) for prompt in wanted]
    with engines(folder, ranks, determinism=determinism) as (core, encode):
        assert by(encode, core, *wanted) == expected
        assert (core.stats().record(ImageStats).encoded, encode.stats().record(ImageStats).encoded) == (0, 3)


@pytest.mark.parametrize(("cache_size", "at_once"), [(64, AHEAD), (16, 1)])
def test_the_images_of_a_request_are_encoded_side_by_side_as_long_as_there_is_room(
    tmp_path, monkeypatch, cache_size, at_once
):
    folder, prompt = make_vision_model(tmp_path, "qwen3_vl"), prompts("qwen3_vl")[2]
    with engines(folder, encoder_cache_size=cache_size) as (core, encode):
        taken, take = [], core.mail.take_notices
        monkeypatch.setattr(core.mail, "take_notices", lambda: taken.append(take()) or taken[-1])
        assert by(encode, core, prompt) == [expected_tokens(folder, prompt, 8)]
        assert len(taken[0]) == at_once
        assert (core.stats().record(ImageStats).encoded, encode.stats().record(ImageStats).encoded) == (0, 3)


def test_images_that_wait_in_an_encode_engine_are_not_queued_here_and_the_timeline_tells_of_them(tmp_path):
    folder = make_vision_model(tmp_path, "mistral3")
    with engines(folder) as (core, encode):
        prompt, load = Prompt("mistral3").text(5, 6).image(1).text(7), partial(load_of, core.scheduler)
        core.add(
            GenerateRequest(request_id="r", prompt=prompt.tokens, params=GREEDY).asking(PromptImages.of(prompt.images))
        )
        assert load().queued_embeds == prompt.images[0].num_embeds
        core.step()
        assert load().queued_embeds == 0, "it waits in the encode pool"
        (notice,) = core.mail.take_notices()
        assert encode.mail[HandoffCourier].prefill(encode, notice.request)
        deadline = time.monotonic() + LIMIT_S
        while not core.scheduler.parts[EncoderCacheManager].handoffs._ready:
            assert time.monotonic() < deadline
            encode.step()
            for event in core.mail[ImageCourier].channel.events():
                core.apply(ImageWentOn(event))
        assert load().queued_embeds == 0, "it is in the inbox"
        events = [event for _ in range(2) for event in core.step()]
        told = [line.what for event in events for line in event.delta.timeline if "image" in line.what]
        assert told == ["an image of 6 tokens is to be encoded by an encode engine", "received an image from engine"]


def test_a_text_model_has_no_images_encoded_and_what_was_started_for_handoffs_is_closed(tmp_path):
    handoff = HandoffConfig(role="decode", transport="tcp")
    with pytest.raises(ConfigError, match="encode must be left out: this model reads text only"):
        build_engine(EngineConfig(model=str(make_model(tmp_path, "llama")), encode=handoff, **SIZES))


# -- without -------------------------------------------------------------------------------------------------------


HERE = Peer("decode", "", 1)


def image(name: int) -> MultiModalFeatureSpec:
    """An image of `name` embeddings and more, up to two blocks."""
    size = 1 + name % (2 * BLOCK)
    place = PlaceholderRange(3, size)
    return MultiModalFeatureSpec(data={}, mm_hash=bytes([name]), mm_position=place, num_embeds=size)


def silent(what: str) -> None:
    pass


class ImageHandoffsMachine(RuleBasedStateMachine):
    """Images that are asked for, come, fail and are used in any order. Each block knows whose embeddings it holds."""

    def __init__(self):
        super().__init__()
        self.handoffs = ImageHandoffs(HERE, "print", IMAGE, NUM_BLOCKS, BLOCK)
        self.open: dict[str, OpenHandoff] = {}
        self.content: dict[int, bytes] = {}
        self.steps: list[ReceivedImage] = []
        self.failed: set[bytes] = set()

    @rule(engines=st.sets(st.sampled_from("ab")), bad=st.sets(st.sampled_from("ab")))
    def engines_come_and_go(self, engines, bad):
        self.handoffs.replicas = [PrefillReplica(engine_id=name) for name in sorted(engines)]
        self.handoffs.resting = sorted(bad)

    @rule(name=st.integers(0, 11))
    def need(self, name):
        wanted, count = image(name), len(self.open)
        up = {replica.engine_id for replica in self.handoffs.replicas} - set(self.handoffs.resting)
        was_there, was_awaited = self.handoffs.has(wanted.mm_hash), wanted.mm_hash in self.awaited
        if self.handoffs.awaits(wanted, silent):
            self.forward()
            assert len(self.open) == count + (not was_awaited)
            assert was_awaited or (up and wanted.mm_hash not in self.failed)
            return
        self.forward()
        received = self.handoffs.take(wanted, silent)
        self.failed.discard(wanted.mm_hash)
        assert (received is not None) == was_there
        if received is not None:
            assert {self.content[block] for block in received.blocks} == {wanted.mm_hash}
            self.steps.append(received)

    @rule(name=st.integers(0, 11))
    def need_later(self, name):
        there = {other for other in range(12) if self.handoffs.has(image(other).mm_hash)}
        count, free = len(self.open), len(self.handoffs._free)
        self.handoffs.awaits(image(name), silent, ahead=True)
        self.forward()
        if len(self.open) > count:
            assert count < AHEAD * len({one.engine_id for one in self.handoffs.replicas} - set(self.handoffs.resting))
            assert free > len(self.handoffs._free) >= NUM_BLOCKS // 2, "no room is left for what is needed at once"
        assert there <= {other for other in range(12) if self.handoffs.has(image(other).mm_hash)}, "it took their room"

    @precondition(lambda self: self.open)
    @rule(data=st.data(), came=st.booleans())
    def end(self, data, came):
        handoff_id = data.draw(st.sampled_from(sorted(self.open)))
        opened = self.open.pop(handoff_id)
        (wanted,) = images_in(opened.remote_request)
        if came:
            first = FirstToken(0, None, b"", 0, [TimelineEvent(0.0, "x", "a")])
            self.handoffs.handle(Received(handoff_id, first))
            self.content |= dict.fromkeys(opened.blocks, wanted.mm_hash)
        else:
            self.handoffs.handle(Failed(handoff_id, "silent", 0, True))
            self.failed.add(wanted.mm_hash)
        assert self.forward() == ([] if came else [handoff_id])

    @precondition(lambda self: self.steps)
    @rule()
    def commit(self):
        received = self.steps.pop(0)
        assert {self.content[block] for block in received.blocks} == {received.mm_hash}, "it was overwritten"
        self.handoffs.release([received])

    @property
    def awaited(self) -> set[bytes]:
        return {images_in(opened.remote_request)[0].mm_hash for opened in self.open.values()}

    def forward(self) -> list[str]:
        """Take what is asked of the channel and the control actor; return what is cancelled."""
        cancelled = []
        out = self.handoffs.out
        for action in [*out.take_messages("encode engines", 0), *out.take_messages("control", 0)]:
            match action:
                case OpenHandoff(request, blocks):
                    assert len(blocks) == -(-len(request.token_ids) // BLOCK)
                    self.open[request.handoff_id] = action
                    self.content |= dict.fromkeys(blocks, b"half written")
                case DispatchRemote(request, "encode"):
                    assert request.handoff_id in self.open, "it is opened before anybody hears of it"
                case CancelDispatch(handoff_id):
                    cancelled.append(handoff_id)
                case _:
                    raise AssertionError(action)
        return cancelled

    @invariant()
    def nothing_is_lost(self):
        self.handoffs.check(self.steps)


TestImageHandoffs = ImageHandoffsMachine.TestCase
TestImageHandoffs.settings = settings(max_examples=examples(100), stateful_step_count=40)


def test_images_that_failed_and_that_nobody_needs_any_more_are_forgotten():
    handoffs = ImageHandoffs(HERE, "print", IMAGE, NUM_BLOCKS, BLOCK)
    handoffs.replicas = [PrefillReplica(engine_id="a")]
    for number in range(MAX_FAILED + 2):
        one = msgspec.structs.replace(image(1), mm_hash=number.to_bytes(4))
        assert handoffs.awaits(one, silent)
        (opened,) = handoffs.out.take_messages("encode engines", 0)
        handoffs.handle(Failed(opened.remote_request.handoff_id, "silent", 0, True))
        assert not handoffs.awaits(one, silent), "it is encoded here"
    assert len(handoffs._failed) == MAX_FAILED
