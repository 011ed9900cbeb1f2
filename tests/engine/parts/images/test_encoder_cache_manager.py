from random import Random

import pytest

from engine.core.step_plan_builder import StepPlanBuilder
from engine.errors import InvalidParameter
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import NO_IMAGES, MultiModalFeatureSpec, PlaceholderRange, PromptImages
from engine.wire.sampling_params import SamplingParams

IMAGE = 9


def image(name: str, num_embeds: int, offset: int = 0, length: int | None = None) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset, num_embeds if length is None else length)
    return MultiModalFeatureSpec(data={}, mm_hash=name.encode(), mm_position=place, num_embeds=num_embeds)


def asked(images: list[MultiModalFeatureSpec]) -> GenerateRequest:
    return GenerateRequest(request_id="", prompt=PROMPT, params=SamplingParams()).asking(PromptImages.of(images))


def step(manager: EncoderCacheManager, *images: MultiModalFeatureSpec) -> tuple[list[bool], list[str], list[str]]:
    """Take images for a step; return which it finds, which it encodes, and which it drops."""
    taken = [manager.take(one, print) for one in images]
    manager.audit([])
    manager.planned(plan := StepPlanBuilder(), 1)
    step = plan.parts.get("images", NO_IMAGES)
    return taken, [one.mm_hash.decode() for one in step.encoded], [name.decode() for name in step.forgotten]


def test_an_image_is_encoded_once_as_long_as_there_is_room():
    manager = EncoderCacheManager(10, 10, IMAGE)
    assert step(manager, image("a", 4), image("a", 4)) == ([True, True], ["a"], [])
    assert step(manager, image("b", 4), image("a", 4)) == ([True, True], ["b"], [])
    assert (manager.num_encoded, manager.num_hits) == (2, 2)


def test_the_image_that_was_used_the_longest_ago_goes_first():
    manager = EncoderCacheManager(10, 10, IMAGE)
    step(manager, image("a", 4), image("b", 4))
    step(manager, image("a", 4))
    assert step(manager, image("c", 4)) == ([True], ["c"], ["b"])
    assert step(manager, image("a", 4)) == ([True], [], [])


def test_a_step_drops_nothing_that_it_needs_itself():
    manager = EncoderCacheManager(10, 100, IMAGE)
    step(manager, image("a", 6))
    assert step(manager, image("a", 6), image("b", 6)) == ([True, False], [], [])
    assert step(manager, image("b", 6)) == ([True], ["b"], ["a"])


def test_a_step_encodes_no_more_than_its_budget_but_at_least_one_image():
    manager = EncoderCacheManager(100, 10, IMAGE)
    assert step(manager, image("a", 30), image("b", 1)) == ([True, False], ["a"], [])
    assert step(manager, image("b", 6), image("c", 6), image("d", 4)) == ([True, False, True], ["b", "d"], [])


@pytest.mark.parametrize("seed", range(20))
def test_what_a_step_finds_is_what_the_device_has(seed):
    random = Random(seed)
    manager, sizes, device = EncoderCacheManager(20, 12, IMAGE), [random.randint(1, 9) for _ in range(10)], set()
    for _ in range(50):
        names = random.choices(range(10), k=random.randint(1, 6))
        images = [image(str(name), sizes[name]) for name in names]
        taken, encoded, forgotten = step(manager, *images)
        assert taken[0], "the first image of a step never waits"
        device = (device - set(forgotten)) | set(encoded)
        assert {one.mm_hash.decode() for one, found in zip(images, taken, strict=True) if found} <= device
        assert sum(sizes[int(name)] for name in device) == manager.num_embeds <= 20


PROMPT = [1, IMAGE, IMAGE, 5, IMAGE, 1]


@pytest.mark.parametrize(
    ("images", "num_prompt", "message"),
    [
        ([image("a", 2, 1, 2), image("b", 2, 2, 3)], None, r"mm_features\[1\].mm_position must be behind the image"),
        ([image("a", 1, 4, 3)], None, r"mm_features\[0\].mm_position must be .* in a prompt of 6 tokens, got \[4, 7\]"),
        ([image("a", 3, 1, 4)], 4, r"mm_features\[0\].mm_position must be .* in a prompt of 4 tokens"),
        ([image("a", 0, 3, 0)], None, r"mm_features\[0\].mm_position must be"),
        ([image("a", 3, 1, 2)], None, r"mm_features\[0\].num_embeds must be the number of its placeholders \(2\)"),
        ([image("a", 3, 1, 4)], None, r"and at most encoder_cache_size \(2\), got 3"),
    ],
)
def test_an_image_that_does_not_fit_its_prompt_is_refused(images, num_prompt, message):
    with pytest.raises(InvalidParameter, match=message):
        EncoderCacheManager(2, 10, IMAGE).check(asked(images), PROMPT[:num_prompt])


def test_tokens_between_the_placeholders_of_an_image_take_no_embedding():
    EncoderCacheManager(10, 10, IMAGE).check(asked([image("a", 3, 1, 4)]), PROMPT)
