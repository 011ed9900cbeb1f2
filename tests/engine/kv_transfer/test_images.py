"""Prompts with images that another engine computes, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.wire.parts.images import PromptImages
from tests.engine.kv_transfer.pair import Pair
from tests.models import with_slow
from tests.vision_models import MODELS, RECURRENT, WHOLE_IMAGES, Prompt, expected_tokens, make_vision_model

SIZES = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "num_threads": 1}
PREFILL_CACHE = 12  # embeddings
MAX_TOKENS = 8


class VisionPair:
    """Two engines with a model that sees."""

    def __init__(self, pair: Pair, name: str, folder: Path):
        self.pair, self.name, self.folder = pair, name, folder

    def prompt(self) -> Prompt:
        return Prompt(self.name)

    def add(self, request_id: str, prompt: Prompt, **options: Any) -> None:
        options = {"ignore_eos": False, "max_tokens": MAX_TOKENS, **options}
        self.pair.ingress.add(request_id, prompt.tokens, PromptImages.of(prompt.images), **options)

    def expected(self, prompt: Prompt) -> list[int]:
        return expected_tokens(self.folder, prompt, MAX_TOKENS)

    def encoded(self) -> tuple[int, int]:
        """Images that the decode and the prefill engine have encoded."""
        engines = self.pair.decode, self.pair.prefill
        return tuple(engine.scheduler.parts[EncoderCacheManager].num_encoded for engine in engines)


def config(folder: Path, role: Any, **options: Any) -> EngineConfig:
    handoff = HandoffConfig(role=role, policy="always", transport="tcp")
    return EngineConfig(model=str(folder), dtype="float32", handoff=handoff, **SIZES, **options)


@pytest.fixture(
    scope="module",
    params=with_slow(
        [name for name in MODELS if name not in RECURRENT], MODELS.keys() - {"gemma3", "qwen3_vl"}
    ),  # one whose images are computed whole, and one with rotary sections and with vectors for deeper layers
)
def started(request, ranks, tmp_path_factory) -> Iterator[VisionPair]:
    folder = make_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    sizes = {"max_num_batched_tokens": 12 if request.param in WHOLE_IMAGES else 5}
    configs = config(folder, "decode", **sizes), config(folder, "prefill", encoder_cache_size=PREFILL_CACHE, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.05)
        with Pair(*configs, ranks) as pair:
            yield VisionPair(pair, request.param, folder)


@pytest.fixture
def engines(started) -> VisionPair:
    """With empty prefix caches."""
    started.pair.forget()
    started.pair.remote_requests.clear()
    return started


def test_a_prefill_engine_encodes_the_images_of_the_prompts_it_computes(engines):
    wanted = [
        engines.prompt().text(5, 6).image(11).text(7, 8, 9),
        engines.prompt().text(*range(3, 16)),
        engines.prompt().image(12, 3, 2).text(11).image(13, 2, 2).image(14, 1, 4).text(12, 13),
        engines.prompt().text(5, 6, 7).image(15, 3, 3).text(9),
    ]
    before = engines.encoded()
    for i, prompt in enumerate(wanted):
        engines.add(f"of four {i}", prompt)
    for i, prompt in enumerate(wanted):
        assert engines.pair.ingress.tokens(f"of four {i}") == engines.expected(prompt)
    engines.pair.settle()
    assert len(engines.pair.remote_requests) == len(wanted)
    assert engines.encoded() == (before[0], before[1] + 5)


def test_a_decode_engine_asks_for_what_follows_the_images_that_it_has(engines):
    first, second = (engines.prompt().text(5, 6, 7).image(1, 3, 3).text(*rest) for rest in ([8, 9], [10]))
    other = engines.prompt().text(5, 6, 7).image(2, 3, 3).text(8, 9)
    assert other.tokens == first.tokens, "prompts about different pictures look alike"
    for number, prompt in enumerate((first, other, second)):
        engines.add(f"of three {number}", prompt)
        assert engines.pair.ingress.tokens(f"of three {number}") == engines.expected(prompt)
    skipped, place = [request.skip for request in engines.pair.remote_requests], first.images[0].mm_position
    assert skipped[1] <= place.offset
    windowed = (*WHOLE_IMAGES, "gemma4")  # of layers with a window only the last window was received
    assert skipped[2] <= place.offset if engines.name in windowed else place.offset < skipped[2] <= place.end
    engines.pair.settle()


def test_a_request_with_an_image_goes_on_where_another_decode_engine_died(engines):
    prompt = engines.prompt().text(5, 6).image(3).text(7, 8)
    right = engines.expected(prompt)
    assert len(right) > 3
    again = Prompt(engines.name, prompt.tokens + right[:3], prompt.images)
    engines.add("replay", again, num_prompt=len(prompt.tokens))
    assert engines.pair.ingress.tokens("replay") == right[3:]
    assert len(engines.pair.remote_requests) == 1


def test_an_image_is_encoded_where_the_request_is_when_no_prefill_engine_takes_it(engines):
    prompt = engines.prompt().text(5, 6).image(4).text(7, 8)
    before, engines.pair.fails = engines.encoded(), True
    engines.add("alone", prompt)
    assert engines.pair.ingress.tokens("alone") == engines.expected(prompt)
    engines.pair.fails = False
    assert engines.encoded() == (before[0] + 1, before[1])


def test_a_prefill_engine_refuses_an_image_that_does_not_fit_its_cache(engines):
    if engines.name in WHOLE_IMAGES:
        pytest.skip("all of its images fit")
    prompt = engines.prompt().text(5, 6).image(5, 4, PREFILL_CACHE // 4 + 1).text(7, 8)
    before = engines.encoded()
    engines.add("too large", prompt)
    assert engines.pair.ingress.tokens("too large") == engines.expected(prompt)
    assert engines.encoded() == (before[0] + 1, before[1])
    engines.pair.settle()


@pytest.mark.slow
@pytest.mark.parametrize(("decode", "prefill"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_pools_of_unequal_size_answer_about_images_as_one_engine(tmp_path, ranks, decode, prefill):
    folder = make_vision_model(tmp_path, "qwen2_5_vl")
    options = {"max_num_batched_tokens": 5}
    configs = (
        config(folder, "decode", tensor_parallel_size=decode, **options),
        config(folder, "prefill", tensor_parallel_size=prefill, **options),
    )
    with Pair(*configs, ranks) as pair:
        engines = VisionPair(pair, "qwen2_5_vl", folder)
        prompt = engines.prompt().text(5, 6).image(1).text(7).image(2, 3, 3).text(8, 9)
        engines.add("unequal", prompt)
        assert pair.ingress.tokens("unequal") == engines.expected(prompt)
        assert engines.encoded() == (0, 2)
