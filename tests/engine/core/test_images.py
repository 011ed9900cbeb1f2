"""Requests with images, through the whole engine, against transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import LLM
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.engine_stats import load_of
from engine.core.request import Request
from engine.errors import ConfigError, InvalidParameter
from engine.model.transformers_backend import tower_attention, vision
from engine.model.transformers_backend.example_image import example_image
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.rank.encoder_cache import vision_encoder
from engine.parts.images.rank.images import Images
from engine.parts.kept import images_of
from engine.wire.block_hash import block_hashes
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import ImageStats, PlaceholderRange, PromptImages, TensorData, places_of
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams
from tests.cpu_kernels import needs_linear_kernel
from tests.deltas import deltas_of
from tests.fake_caches import split
from tests.fake_drafter import WildDrafter, draft_always
from tests.late_engine import generate
from tests.models import make_model, make_tokenizer, with_slow
from tests.products import few
from tests.sync_guard import HostWaits
from tests.tape import TapedDevice
from tests.vision_models import (
    IMAGE,
    MODELS,
    MROPE,
    RECURRENT,
    WHOLE_IMAGES,
    Prompt,
    expected_logprobs,
    expected_tokens,
    make_vision_model,
)

MAX_TOKENS = 8
IN_PARTS = [name for name in MODELS if name not in WHOLE_IMAGES]  # of which a step may compute a part of an image
QUICK = {"mistral3", "qwen3_vl", "qwen3_5"}  # plain, with vectors for deeper layers, and recurrent
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cache(lambda name: make_vision_model(tmp_path_factory.mktemp(name), name))


def engine(folder: Path, **options) -> EngineCore:
    sizes = {"block_size": 4, "num_gpu_blocks_override": 128, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32"}
    return build_engine(EngineConfig(model=str(folder), **{**sizes, **options}))


def run(core: EngineCore, *prompts: Prompt) -> list[list[int]]:
    """Answer the prompts together."""
    outputs: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        outputs[f"{i}"] = []
        core.add(
            GenerateRequest(request_id=f"{i}", prompt=prompt.tokens, params=GREEDY).asking(
                PromptImages.of(prompt.images)
            )
        )
    for delta in deltas_of(core):
        outputs[delta.request_id] += delta.token_ids
    return list(outputs.values())


def prompts(name: str) -> list[Prompt]:
    return [
        Prompt(name).text(5, 6).image(1).text(7, 8, 9),
        Prompt(name).text(*range(3, 16)),
        Prompt(name).image(2, 3, 2).text(11).image(3, 2, 2).image(4, 1, 4).text(12, 13),
    ]


@pytest.mark.parametrize("name", with_slow(MODELS, MODELS.keys() - QUICK - {"gemma3"}))
def test_answers_about_images_are_those_of_transformers(folder, name):
    core, wanted = engine(folder(name)), prompts(name)
    expected = [expected_tokens(folder(name), prompt, MAX_TOKENS) for prompt in wanted]
    assert [run(core, prompt)[0] for prompt in wanted] == expected
    assert run(core, *wanted) == expected
    core.close()


@pytest.mark.parametrize("name", MODELS)
def test_logits_behind_an_image_are_those_of_transformers(folder, name):
    core, prompt = engine(folder(name)), Prompt(name).text(5, 6).image(1).text(7)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    core.add(
        GenerateRequest(request_id="r", prompt=prompt.tokens, params=params).asking(PromptImages.of(prompt.images))
    )
    (found,) = [event.delta.logprobs for event in core.step() if event.delta.token_ids]
    expected = expected_logprobs(folder(name), prompt)
    assert found is not None
    assert dict(found[0].top) == pytest.approx({i: expected[i].item() for i, _ in found[0].top}, abs=1e-4)
    core.close()


@pytest.mark.parametrize("name", with_slow(IN_PARTS, set(IN_PARTS) - QUICK))
def test_a_chunk_may_end_inside_an_image(folder, name):
    core, wanted = engine(folder(name), max_num_batched_tokens=5), prompts(name)
    assert run(core, *wanted) == [expected_tokens(folder(name), prompt, MAX_TOKENS) for prompt in wanted]
    core.close()


@pytest.mark.parametrize("name", with_slow(WHOLE_IMAGES, {"gemma4_moe"}))
@pytest.mark.parametrize("sequences", [1, 4])
def test_no_chunk_ends_inside_an_image_whose_tokens_see_each_other(folder, sequences, name):
    core = engine(folder(name), max_num_batched_tokens=8 + sequences, max_num_seqs=sequences)
    # where an answer follows at once, what its tokens see shows in it the most
    wanted = [*prompts(name), *[Prompt(name).text(5, 6).image(seed) for seed in range(5, 9)]]
    assert run(core, *wanted) == [expected_tokens(folder(name), prompt, MAX_TOKENS) for prompt in wanted]
    core.close()
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be at least 12: a step computes all 9 tokens"):
        engine(folder(name), max_num_batched_tokens=11)


def test_a_cached_prefix_that_ends_in_such_an_image_is_left_before_it(folder):
    core, name = engine(folder("gemma3"), block_size=8), "gemma3"
    first, second = (Prompt(name).text(*range(3, 10)).image(1).image(2).text(*rest) for rest in ([8, 9], [10]))
    one, two = (image.mm_position for image in first.images)
    assert one.offset == 8 and (one.end - 1) // 8 == two.offset // 8 and two.end % 8, "a block has parts of both"
    assert run(core, first) == [expected_tokens(folder(name), first, MAX_TOKENS)]
    before = core.stats().prefix_hit_tokens
    assert run(core, second) == [expected_tokens(folder(name), second, MAX_TOKENS)]
    assert core.stats().prefix_hit_tokens - before == one.offset
    core.close()


def test_an_image_too_large_for_one_step_is_refused_where_it_has_to_be_in_one(folder):
    core, prompt = engine(folder("gemma3")), Prompt("gemma3").image(1).text(IMAGE)
    place = PlaceholderRange(prompt.images[0].mm_position.offset, 10)
    images = [msgspec.structs.replace(prompt.images[0], mm_position=place, num_embeds=10)]
    with pytest.raises(InvalidParameter, match=r"mm_features\[0\].mm_position.length must be at most 9"):
        core.add(GenerateRequest(request_id="r", prompt=prompt.tokens).asking(PromptImages.of(images)))
    core.close()


@pytest.mark.parametrize("name", with_slow([name for name in IN_PARTS if name not in RECURRENT], set(IN_PARTS) - QUICK))
def test_a_cached_prefix_may_end_inside_an_image(folder, name):
    core = engine(folder(name), encoder_cache_size=12, block_size=6)  # one image
    first, second = (Prompt(name).text(5, 6, 7).image(1, 3, 3).text(*rest) for rest in ([8, 9], [10]))
    other = Prompt(name).text(5, 6, 7).image(2, 3, 3).text(8, 9)
    assert other.tokens == first.tokens, "prompts about different pictures look alike"
    place = first.images[0].mm_position
    cached = []
    for prompt in (first, other, second):
        before = core.stats().prefix_hit_tokens
        assert run(core, prompt) == [expected_tokens(folder(name), prompt, MAX_TOKENS)]
        cached.append(core.stats().prefix_hit_tokens - before)
    assert cached[1] <= place.offset, "an image was taken for another"
    assert place.offset < cached[2] < place.end
    assert core.scheduler.parts[EncoderCacheManager].num_encoded == 3
    core.close()


def test_the_same_image_asked_about_ten_times_is_encoded_once(folder):
    core = engine(folder("mistral3"), enable_prefix_caching=False)
    asked = [Prompt("mistral3").text(5 + i).image(1).text(8) for i in range(10)]
    for i, prompt in enumerate(asked):
        core.add(GenerateRequest(request_id=f"early {i}", prompt=prompt.tokens).asking(PromptImages.of(prompt.images)))
    live = core.scheduler.queue.live.values()
    assert len({id(images_of(request)[0].data["pixel_values"]) for request in live}) == 1, "pixels are kept ten times"
    assert load_of(core.scheduler).queued_embeds == asked[0].images[0].num_embeds
    for i in range(len(asked)):
        core.abort(f"early {i}")
    run(core, *asked)
    assert load_of(core.scheduler).queued_embeds == 0
    stats = core.stats()
    assert stats.record(ImageStats) == ImageStats(encoded=1, cache_hits=9)
    core.close()


@pytest.mark.parametrize("name", few(2, ["gemma3", "qwen3_vl", "gemma4", "mistral3"]))
def test_a_request_with_images_goes_on_after_preemption(folder, name):
    core = engine(folder(name), num_gpu_blocks_override=9, max_model_len=36, encoder_cache_size=9)
    wanted = [Prompt(name).text(5, 6).image(seed).text(7, 8, 9) for seed in (1, 2, 3)]
    assert run(core, *wanted) == [expected_tokens(folder(name), prompt, MAX_TOKENS) for prompt in wanted]
    assert core.scheduler.totals.preemptions > 0
    core.close()


def test_drafts_behind_an_image_are_verified_at_their_rotary_positions(folder, monkeypatch):
    drafter = WildDrafter()
    monkeypatch.setattr("engine.parts.speculation.make.NgramDrafter", lambda shortest, longest: drafter)
    draft_always(monkeypatch)
    wanted = Prompt("qwen2_5_vl").text(5, 6).image(1).text(7, 8, 9)
    right = expected_tokens(folder("qwen2_5_vl"), wanted, MAX_TOKENS)
    drafter.rest_of = lambda tokens: right[len(tokens) - len(wanted.tokens) :]
    core = engine(folder("qwen2_5_vl"), speculative_config={"method": "ngram"})
    assert run(core, wanted) == [right]
    assert core.stats().record(SpecDecodeStats).num_accepted_tokens > 0
    core.close()


@needs_linear_kernel
@pytest.mark.parametrize(("name", "eager"), [("mistral3", 0), ("qwen3_vl", 1)])
def test_only_steps_with_positions_in_an_image_run_without_the_recorded_graph(tmp_path, monkeypatch, name, eager):
    wide = {"hidden_size": 128, "intermediate_size": 1152, "vocab_size": 192, "head_dim": 32}
    wide |= {"rope_parameters": {**MROPE, "mrope_section": [8, 4, 4]}} if name == "qwen3_vl" else {}
    path, wanted = make_vision_model(tmp_path, name, **wide), prompts(name)
    options = {"dtype": "bfloat16", "enable_prefix_caching": False}
    expected = run(engine(path, enforce_eager=True, **options), *wanted)
    core, steps = engine(path, **options), []
    assert core.ranks.runner.layers.graph is not None
    run_layers = core.ranks.runner.model.run_layers
    monkeypatch.setattr(core.ranks.runner.model, "run_layers", lambda *args: steps.append(1) or run_layers(*args))
    assert run(core, *wanted) == expected
    assert len(steps) == eager
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_answer_about_images_as_one_does(folder, name, tmp_path):
    path, wanted = make_vision_model(tmp_path, name), prompts(name)
    make_tokenizer().save_pretrained(path)
    with LLM(
        str(path), tensor_parallel_size=2, dtype="float32", block_size=4, num_gpu_blocks_override=64, max_num_seqs=4
    ) as llm:
        assert run(llm._core, *wanted) == [expected_tokens(path, prompt, MAX_TOKENS) for prompt in wanted]


@pytest.mark.parametrize("name", with_slow(MODELS, MODELS.keys() - {"qwen3_vl"}))
def test_on_a_gpu_the_host_does_not_wait_for_images(folder, name, monkeypatch):
    for module in (vision, tower_attention):
        monkeypatch.setattr(module, "copy_to", lambda values, device: torch.from_numpy(np.asarray(values)).clone())
    wanted = prompts(name)
    requests = [
        GenerateRequest(request_id=str(i), prompt=prompt.tokens, params=GREEDY).asking(PromptImages.of(prompt.images))
        for i, prompt in enumerate(wanted)
    ]
    found = generate(folder(name), requests, TapedDevice(), max_num_batched_tokens=32)
    assert [tokens for tokens, _ in found.values()] == [
        expected_tokens(folder(name), prompt, MAX_TOKENS) for prompt in wanted
    ]


def test_a_host_read_in_a_tower_is_found(folder, monkeypatch):
    for module in (vision, tower_attention):
        monkeypatch.setattr(module, "copy_to", lambda values, device: torch.from_numpy(np.asarray(values)).clone())
    forward = vision.TowerLinear.forward
    monkeypatch.setattr(vision.TowerLinear, "forward", lambda layer, x: forward(layer, x[: len(x.amax(-1).tolist())]))
    prompt = Prompt("qwen3_vl").text(5, 6).image(1).text(7)
    request = GenerateRequest(request_id="r", prompt=prompt.tokens, params=GREEDY).asking(
        PromptImages.of(prompt.images)
    )
    with pytest.raises(HostWaits, match="tolist"):
        generate(folder("qwen3_vl"), [request], TapedDevice(), max_num_batched_tokens=32)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_larger_image_takes_no_more_operations(folder, name):
    core, counts = engine(folder(name)), []
    for height, width in ((5, 5), (13, 9)):  # with windows of two embeddings, those at both edges are smaller
        image = Prompt(name).image(1, height, width).images[0]
        with CountedOperations() as counted, torch.inference_mode():
            core.ranks.runner.model.vision(image.data)
        counts.append(counted.count)
    assert counts[0] == counts[1]
    core.close()


@pytest.mark.parametrize("name", ["gemma3", "internvl", "qwen2_5_vl", "qwen3_vl"])
def test_images_of_any_size_are_encoded_by_one_call_as_alone(folder, name):
    core = engine(folder(name))
    vision, sizes = core.ranks.runner.model.vision, ((5, 5), (2, 3), (2, 3), (13, 9))
    images = [Prompt(name).image(seed, *size).images[0].data for seed, size in enumerate(sizes)]
    assert all(vision.go_together(images[0], image) for image in images)
    with torch.inference_mode():
        torch.testing.assert_close(
            vision(*images), torch.cat([vision(image) for image in images]), atol=1e-5, rtol=1e-5
        )
    core.close()


@pytest.mark.parametrize("name", few(1, ["qwen2_5_vl", "gemma3", "mistral3"]))
def test_a_gpu_encodes_the_images_of_a_step_by_one_call_where_the_tower_can(folder, name, monkeypatch):
    for module in (vision, tower_attention):
        monkeypatch.setattr(module, "copy_to", lambda values, device: torch.from_numpy(np.asarray(values)).clone())
    calls, encode = [], vision.VisionEncoder.forward
    monkeypatch.setattr(
        vision.VisionEncoder, "forward", lambda tower, *images: (calls.append(len(images)), encode(tower, *images))[1]
    )
    prompt = Prompt(name).text(5).image(1).text(6).image(2).text(7).image(3).text(8)
    request = GenerateRequest(request_id="r", prompt=prompt.tokens, params=GREEDY).asking(
        PromptImages.of(prompt.images)
    )
    sizes = {"max_num_batched_tokens": 64, "max_model_len": 128, "enforce_eager": True}
    found = {}
    for device in (TapedDevice(), None):
        calls.clear()
        found[device is None] = generate(folder(name), [request], device, **sizes), calls[-3:]
    assert found[True][0] == found[False][0]
    assert found[True][1] == [1, 1, 1], "a CPU computes each by itself, with the same bits as ever"
    assert found[False][1][-1:] == ([1] if name == "mistral3" else [3])


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_an_image_that_cannot_be_encoded_spoils_none_that_is_encoded_with_it(folder, name, monkeypatch):
    core = engine(folder(name))
    cache, (good, bad, other) = core.ranks.runner.parts[Images].cache, Prompt(name).image(1).image(2).image(3).images
    bad = msgspec.structs.replace(bad, num_embeds=bad.num_embeds + 1)
    with torch.inference_mode():
        found, alone = cache._encode([good, bad, other]), cache._encode([good])
    assert found[bad.mm_hash].isnan().all() and len(found) == 3
    assert torch.equal(found[good.mm_hash], alone[good.mm_hash]) and not found[other.mm_hash].isnan().any()
    core.close()


@pytest.mark.parametrize("name", MODELS)
def test_an_image_of_any_size_can_be_made_and_encoded(folder, name):
    core = engine(folder(name))
    for wanted in (1, 12, 50):
        image = example_image(core.model_config.vision, wanted)
        assert image.num_embeds <= max(wanted, 9) and image.num_embeds >= min(wanted, 4)
        with torch.inference_mode():
            assert core.ranks.runner.model.vision(image.data).shape[0] == image.num_embeds
    core.close()


def test_an_image_that_cannot_be_encoded_ends_its_own_request_only(folder):
    core = engine(folder("qwen2_5_vl"))
    good, bad = (Prompt("qwen2_5_vl").text(5, 6).image(seed).text(7) for seed in (1, 2))
    grid = TensorData.of(np.array([[1, 7, 5]]))
    bad.images[0] = msgspec.structs.replace(bad.images[0], data={**bad.images[0].data, "image_grid_thw": grid})
    core.add(GenerateRequest(request_id="bad", prompt=bad.tokens, params=GREEDY).asking(PromptImages.of(bad.images)))
    (event,) = [event for _ in range(2) for event in core.step()]
    assert event.delta.error is not None and "not finite" in event.delta.error.message
    assert run(core, good) == [expected_tokens(folder("qwen2_5_vl"), good, MAX_TOKENS)]
    core.close()


def test_a_text_model_refuses_images(tmp_path):
    core = engine(make_model(tmp_path, "llama"))
    prompt = Prompt("mistral3").image(1)
    with pytest.raises(InvalidParameter, match="mm_features must be left out: this model reads text only"):
        core.add(GenerateRequest(request_id="r", prompt=prompt.tokens).asking(PromptImages.of(prompt.images)))
    core.close()


def test_a_multimodal_model_can_be_served_as_a_text_model(folder):
    core = engine(folder("gemma3"), language_model_only=True, max_num_batched_tokens=5)
    picture, text, _ = prompts("gemma3")
    assert vision_encoder(core.ranks.runner.model) is None
    assert run(core, text) == [expected_tokens(folder("gemma3"), text, MAX_TOKENS)]
    with pytest.raises(InvalidParameter, match="this model reads text only"):
        core.add(GenerateRequest(request_id="r", prompt=picture.tokens).asking(PromptImages.of(picture.images)))
    core.close()


class CountedOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "more"), [("gemma3", 0), ("internvl", 0), ("mistral3", 0), ("qwen3_vl", 1)])
def test_a_text_costs_the_same_operations_with_a_vision_tower_and_without(folder, name, more):
    """more: operations of each step, which bring positions to the device where images have several."""
    found = []
    for language_model_only in (True, False):
        options = {"enforce_eager": True, "enable_prefix_caching": False}
        core = engine(folder(name), language_model_only=language_model_only, **options)
        run(core, prompts(name)[1])  # what is made once, is made now
        before = core.stats().steps
        with CountedOperations() as counted:
            run(core, prompts(name)[1])
        found.append(counted.count)
        steps = core.stats().steps - before
        core.close()
    assert found[1] - found[0] == more * steps, found


def test_other_images_at_the_same_place_have_other_block_hashes():
    one, two = (Prompt("qwen3_vl").text(*range(1, 6)).image(seed).text(5, 6, 7) for seed in (1, 2))
    plain, first, second = (
        split(block_hashes(one.tokens, 4, places=places_of(images))) for images in ([], one.images, two.images)
    )
    assert plain[0] == first[0] == second[0], "the image begins behind the first block"
    assert len({*plain[1:], *first[1:], *second[1:]}) == 3 * len(plain[1:])
    moved = [msgspec.structs.replace(one.images[0], mm_position=PlaceholderRange(5, 6))]
    assert split(block_hashes(one.tokens, 4, places=places_of(moved)))[1] != first[1]
    request = Request.create(GenerateRequest(request_id="r", prompt=one.tokens), 99, 0)
    request.prefix.places = places_of(one.images)
    assert request.hashes(len(first), 4) == first
