import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from engine.multimodal.image import FORMATS, decode
from engine.multimodal.invalid_image import InvalidImage
from tests.engine.multimodal.images import file_of, picture

MAX_PIXELS = 10_000


def png_header(width: int, height: int) -> bytes:
    """Return a PNG whose header promises this size, and whose pixels are missing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_each_format_are_read(kind):
    image = decode(file_of(picture(20, 10), kind), "image", MAX_PIXELS)
    assert image.size == (20, 10) and image.mode == "RGB"


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (b"", "must be an image (JPEG"),
        (b"<html>404</html>", "must be an image (JPEG"),
        (file_of(picture(4, 4), "TIFF"), "must be an image (JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "must be an image (JPEG"),
        (file_of(picture(20, 10))[:60], "that can be decoded"),
        (file_of(picture(90, 90), "JPEG")[:900], "that can be decoded"),
        (png_header(20, 20), "that can be decoded"),
        (file_of(picture(101, 100)), "at most 10000 pixels (ingress.images.max_pixels), got 101 × 100"),
        (png_header(15_000, 10_000), "at most 10000 pixels (ingress.images.max_pixels), got 15000 × 10000"),
        (png_header(60_000, 60_000), "at most 10000 pixels"),
        (file_of(picture(201, 1)), "factor of 200, got 201 × 1"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused_by_name(file, named):
    with pytest.raises(InvalidImage) as caught:
        decode(file, "messages[0].content[1].image_url", MAX_PIXELS)
    assert str(caught.value).startswith("messages[0].content[1].image_url must be") and named in str(caught.value)


def test_the_pixels_of_an_image_that_is_too_large_are_not_decoded(monkeypatch):
    def load(image):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(InvalidImage, match="pixels"):
        decode(file_of(picture(101, 100)), "image", MAX_PIXELS)


def test_a_photo_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    assert decode(file_of(picture(20, 10), "JPEG", exif=exif), "image", MAX_PIXELS).size == (10, 20)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(mode):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    decoded = np.asarray(decode(file_of(image.convert(mode)), "image", MAX_PIXELS))
    assert decoded[0, 0].tolist() == [255] * 3 and decoded[1:].max() == 0


def test_the_first_frame_of_an_animation_is_read():
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    file = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(file, "image", MAX_PIXELS).getpixel((0, 0)) == (255, 0, 0)


def test_an_image_of_low_detail_becomes_smaller_but_never_larger():
    assert decode(file_of(picture(1000, 10)), "image", MAX_PIXELS, low_detail=True).size == (512, 5)
    assert decode(file_of(picture(20, 10)), "image", MAX_PIXELS, low_detail=True).size == (20, 10)
