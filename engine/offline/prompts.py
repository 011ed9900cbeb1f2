"""Prompts of the offline API, in vLLM's forms."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from engine.errors import Described, InvalidParameter, RequestError
from engine.wire.parts.images import MultiModalFeatureSpec

FORMS = "texts, lists of token ids, or dicts with `prompt` or `prompt_token_ids`"
IMAGE_PARTS = ("image", "image_pil", "image_url")
OTHER_PARTS = ("audio_url", "image_embeds", "input_audio", "video", "video_url")
NO_EFFECT: tuple[Any, ...] = (None, {}, [])
UNSUPPORTED = {  # keys of vLLM's prompts, with the alternative
    "decoder_prompt": "the server has no encoder-decoder models; use `prompt`",
    "encoder_prompt": "the server has no encoder-decoder models; use `prompt`",
    "mm_processor_kwargs": "images are processed by the settings in the model's folder",
    "multi_modal_uuids": "an image is recognized by its content; leave it out",
    "prompt_embeds": "use `prompt` or `prompt_token_ids`",
    "token_type_ids": "LLM.score gives the second text of a pair its own type",
}


class TextPrompt(TypedDict):
    """A text to continue."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any] | None]
    """`{"image": a PIL.Image or a list of them}`, one for each placeholder in the text."""
    cache_salt: NotRequired[str | None]
    """Cached prefixes are shared only with prompts that have the same salt."""


class TokensPrompt(TypedDict):
    """Token ids to continue."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    """The text of the token ids, which is only returned."""
    cache_salt: NotRequired[str | None]


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Token ids, with the images that placeholders among them stand for."""

    token_ids: list[int]
    mm_features: list[MultiModalFeatureSpec]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt whose form was checked. It has a text, token ids, or both."""

    text: str | None
    token_ids: list[int] | None = None
    images: list[Any] = field(default_factory=list)
    cache_salt: str = ""

    @property
    def content(self) -> str | list[int]:
        """What to compute: the token ids, or else the text."""
        if self.token_ids is not None:
            return self.token_ids
        assert self.text is not None
        return self.text


def parse_prompts(prompts: Any) -> list[ParsedPrompt]:
    """Return one prompt, or several. A text, a dict or a list of token ids is one. Raises RequestError."""
    if isinstance(prompts, str | Mapping):
        return [parse_prompt(prompts)]
    if not isinstance(prompts, Iterable):
        raise InvalidParameter("prompts", prompts, FORMS)
    some = list(prompts)
    if some and all(isinstance(prompt, Integral) for prompt in some):
        return [parse_prompt(some)]
    for prompt in some:
        if isinstance(prompt, Integral):
            raise RequestError(f"prompts must be {FORMS}, but {prompt} is a token id itself", "prompts")
    return [parse_prompt(prompt) for prompt in some]


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Return one prompt. Raises RequestError."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt)
    if isinstance(prompt, Mapping):
        return _of_dict(prompt)
    return ParsedPrompt(None, _token_ids(prompt))


def _of_dict(prompt: Mapping[str, Any]) -> ParsedPrompt:
    given = {key: value for key, value in prompt.items() if value is not None}
    for key in given.keys() & UNSUPPORTED.keys():
        if given.pop(key) not in NO_EFFECT:
            raise RequestError(f"prompts: {key} is not supported: {UNSUPPORTED[key]}", "prompts")
    text, token_ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    images, salt = _images(given.pop("multi_modal_data", {})), given.pop("cache_salt", "")
    for key, value in given.items():
        known = "prompt, prompt_token_ids, multi_modal_data, cache_salt"
        raise InvalidParameter(f"prompts: {key}", value, f"left out, because the keys of a prompt are {known}")
    if text is None and token_ids is None:
        raise InvalidParameter("prompts", dict(prompt), FORMS)
    for key, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidParameter(f"prompts: {key}", value, "a text")
    if token_ids is not None and images:
        raise RequestError("prompts: multi_modal_data needs `prompt`, not `prompt_token_ids`", "prompts")
    return ParsedPrompt(text, None if token_ids is None else _token_ids(token_ids), images, salt)


def _images(data: Any) -> list[Any]:
    if not isinstance(data, Mapping):
        raise InvalidParameter("prompts: multi_modal_data", data, '{"image": a PIL.Image or a list of them}')
    for kind, value in data.items():
        if kind != "image" and value not in NO_EFFECT:
            raise RequestError(f"prompts: multi_modal_data.{kind} is not supported: models read text and images")
    images = data.get("image")
    images = images if isinstance(images, list | tuple) else [] if images is None else [images]
    for image in images:
        if not hasattr(image, "convert"):
            raise InvalidParameter("prompts: multi_modal_data.image", image, "a PIL.Image or a list of them")
    return list(images)


def with_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the messages with every image in the form of templates, `{"type": "image"}`, and the images in order.
    Raises RequestError for a part of another kind than text and images."""
    images: list[Any] = []

    def placed(part: Any) -> Any:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in IMAGE_PARTS:
            if kind in OTHER_PARTS:
                raise InvalidParameter("messages: type", kind, "text or an image, because models read nothing else")
            return part
        images.append(_decoded(part[kind]) if kind == "image_url" else part[kind])
        return {"type": "image", "image": images[-1]}

    def read(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return {**message, "content": [placed(part) for part in content]} if isinstance(content, list) else message

    return [read(message) for message in messages], images


def _decoded(image_url: Any) -> Any:
    """Return the image of a data URL. Raises RequestError."""
    url = image_url.get("url") if isinstance(image_url, Mapping) else image_url
    kind, comma, data = str(url).partition(";base64,")
    shown = Described(repr(str(url)[:60]))
    if not kind.startswith("data:image/") or not comma:
        limit = "a data URL (data:image/png;base64,...), or an image_pil, because LLM fetches nothing"
        raise InvalidParameter("messages: image_url", shown, limit)
    from PIL import Image, UnidentifiedImageError  # here, since prompts of texts do without it

    try:
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    except (ValueError, UnidentifiedImageError):
        raise InvalidParameter("messages: image_url", shown, "an image that can be read") from None


def _token_ids(given: Any) -> list[int]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidParameter("prompts", given, FORMS)
    token_ids = list(given)
    for token in token_ids:
        if not isinstance(token, Integral):
            raise InvalidParameter("prompts", token, f"{FORMS}; token ids are whole numbers")
    return token_ids
