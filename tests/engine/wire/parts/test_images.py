import msgspec
import numpy as np
import pytest

from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import (
    MultiModalFeatureSpec,
    PlaceholderRange,
    PromptImages,
    TensorData,
    images_in,
    mm_hash,
)


def data(**arrays: np.ndarray) -> dict[str, TensorData]:
    return {name: TensorData.of(array) for name, array in arrays.items()}


def test_an_image_arrives_as_it_was_sent():
    pixels = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)  # not contiguous
    sent = data(pixel_values=pixels, image_grid_thw=np.array([[1, 2, 4]]))
    feature = MultiModalFeatureSpec(data=sent, mm_hash=mm_hash(sent), mm_position=PlaceholderRange(3, 2), num_embeds=2)
    request = GenerateRequest(request_id="r", prompt=[1, 2, 3, 7, 7, 4]).asking(PromptImages.of([feature]))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest)
    assert images_in(arrived) == [feature]
    assert np.array_equal(images_in(arrived)[0].data["pixel_values"].numpy(), pixels)
    assert images_in(arrived)[0].data["image_grid_thw"].numpy().tolist() == [[1, 2, 4]]


def test_pixels_are_copied_when_a_request_is_sent_and_when_it_arrives_but_not_when_a_part_reads_it():
    sent = TensorData("uint8", (4,), b"abcd")
    image = MultiModalFeatureSpec(data={"p": sent}, mm_hash=b"h", mm_position=PlaceholderRange(0, 1), num_embeds=1)
    request = GenerateRequest(request_id="r", prompt=[1]).asking(PromptImages([image]))
    assert images_in(request)[0].data["p"].data is sent.data
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest)
    assert images_in(arrived)[0].data["p"].data is images_in(arrived)[0].data["p"].data


def test_a_request_without_images_says_nothing_of_them():
    request = GenerateRequest(request_id="r", prompt=[1])
    assert msgspec.msgpack.encode(request.asking(PromptImages.of([]))) == msgspec.msgpack.encode(request)


def test_a_tensor_of_fewer_bytes_than_its_shape_asks_for_is_refused():
    with pytest.raises(ValueError, match="reshape"):
        TensorData("float32", (2, 2), bytes(12)).numpy()


def test_images_of_one_hash_have_the_same_names_shapes_types_and_elements():
    pixels = np.arange(6, dtype=np.float32)
    different = [
        data(pixel_values=pixels),
        data(pixel_values=pixels.reshape(2, 3)),
        data(pixel_values=pixels.reshape(3, 2)),
        data(pixel_values=pixels.view(np.int32)),
        data(pixel_values=pixels[::-1]),
        data(other=pixels),
        data(pixel_values=pixels[:3], other=pixels[3:]),
    ]
    assert len({mm_hash(tensors) for tensors in different}) == len(different)
    assert mm_hash(data(a=pixels, b=pixels[:2])) == mm_hash(data(b=pixels[:2], a=pixels))
