"""Decodes image files of unknown origin."""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from engine.errors import Described
from engine.multimodal.invalid_image import InvalidImage

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_ASPECT_RATIO = 200  # beyond it Qwen's processor refuses an image, and others would stretch it
LOW_DETAIL = (512, 512)
READABLE = f"an image ({', '.join(FORMATS)})"


def decode(file: bytes, field: str, max_pixels: int, low_detail: bool = False) -> Image.Image:
    """Return the first frame of an image file, upright and in RGB; transparent pixels become white, as in vLLM.

    field: the image's name in errors. low_detail: whether to shrink it to fit into LOW_DETAIL. Raises InvalidImage if
    the file cannot be read or has too many pixels, which are counted before they are decoded.
    """
    small_enough = f"an image of at most {max_pixels} pixels (ingress.images.max_pixels)"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's limit of pixels; ours is checked below
            image: Image.Image = Image.open(io.BytesIO(file), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidImage(field, str(error), small_enough) from None
    except UnidentifiedImageError:
        raise InvalidImage(field, file[:16], READABLE) from None
    except Exception as error:  # noqa: BLE001  decoders raise many errors for a broken header
        raise InvalidImage(field, _reason(error), READABLE) from None
    size = Described(f"{image.width} × {image.height}")
    if image.width * image.height > max_pixels:
        raise InvalidImage(field, size, small_enough)
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise InvalidImage(field, size, f"an image whose sides differ at most by a factor of {MAX_ASPECT_RATIO}")
    try:
        ImageOps.exif_transpose(image, in_place=True)
        image = _on_white(image) if image.has_transparency_data else image.convert("RGB")
    except Exception as error:  # noqa: BLE001  a file that is truncated, or crafted to break decoders
        raise InvalidImage(field, _reason(error), f"{READABLE} that can be decoded") from None
    if low_detail:
        image.thumbnail(LOW_DETAIL)
    return image


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
