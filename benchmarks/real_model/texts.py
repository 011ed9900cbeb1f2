"""What the model is asked and shown: made of texts that every machine with Python has, and of a list of words."""

from __future__ import annotations

import importlib
import inspect
import re
from itertools import product
from pathlib import Path
from typing import Any

from tools.pocket.words import EVERYDAY

LICENSE = Path(__file__).parents[2] / "LICENSE"  # Apache 2.0
MODULES = (
    "argparse", "ast", "asyncio", "bisect", "calendar", "collections", "contextlib", "copy", "csv", "datetime",
    "decimal", "difflib", "email", "enum", "fractions", "functools", "heapq", "inspect", "itertools", "json", "logging",
    "pickle", "random", "shutil", "statistics", "string", "subprocess", "tempfile", "textwrap", "threading",
    "traceback", "unittest", "zipfile",
)  # fmt: skip
EDITED = "textwrap", "bisect", "heapq", "shutil", "statistics", "random", "calendar", "string", "copy", "fnmatch"
WORDINGS = (
    "What is the use of the word {!r}?", "Write two sentences about {!r}.", "Give three facts about {!r}.",
    "Explain {!r} to a child.", "Write a short poem about {!r}.", "Which words are close to {!r}?",
    "Write a Python function about {!r}.", "Translate {!r} into French.", "Ask me a question about {!r}.",
    "Tell a joke about {!r}.",
)  # fmt: skip
FOLLOW_UPS = ("Say that in one sentence.", "Give an example.", "And why is that?")
NOUNS = (
    "a dog", "an oak", "a table", "Paris", "a spider", "a rose", "a bicycle", "a bee", "a river", "a horse", "a chair",
    "a fern", "London", "a cat", "a clock", "an ant", "a cactus", "a whale", "a desert", "a crab",
)  # fmt: skip
THING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["animal", "plant", "thing", "place"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
CITIES = ("Paris", "London", "Rome", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Berlin", "Madrid")
CALLS = ("What is the weather in {}?", "Will it rain in {} tomorrow?")  # each wants a call of WEATHER
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather forecast of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 24}, "day": {"enum": ["today", "tomorrow"]}},
            "required": ["city", "day"],
            "additionalProperties": False,
        },
    },
}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def questions(number: int) -> list[str]:
    """Return questions that differ in word or wording, ten of each word."""
    return [wording.format(word) for word, wording in product(EVERYDAY, WORDINGS)][:number]


def documentation() -> list[str]:
    """Return the licence, and the documentation of some modules of Python's library and of their classes."""
    texts = [LICENSE.read_text(encoding="utf-8")]
    for name in MODULES:
        module = importlib.import_module(name)
        classes = [
            found for _, found in sorted(inspect.getmembers(module, inspect.isclass)) if found.__module__ == name
        ]
        texts.append("\n\n".join(filter(None, map(inspect.getdoc, (module, *classes)))))
    return texts


def summaries(number: int) -> list[str]:
    """Return requests to summarise texts of some 200 words."""
    texts = [text[:1200] for text in documentation() if len(text) > 1200]
    return [f"Summarise this text, in its own words:\n\n{text}" for text in texts][:number]


def edits(number: int) -> list[str]:
    """Return requests to rename an argument of a function of Python's library."""
    found = []
    for name in EDITED:
        for _, function in sorted(inspect.getmembers(importlib.import_module(name), inspect.isfunction)):
            code = re.sub(r'\n *""".*?"""', "", inspect.getsource(function), flags=re.DOTALL)
            arguments = [word for word in inspect.signature(function).parameters if len(word) > 1]
            if 250 < len(code) < 800 and arguments:
                found.append(f"Write this function again, with the argument `{arguments[0]}` called `given`:\n\n{code}")
    return found[:number]


def descriptions() -> list[str]:
    """Return requests for objects of the schema THING."""
    return [f"Describe {noun} as a JSON object with the keys name, kind (animal, plant, thing or place) and legs (a "
            "number). Answer with JSON only." for noun in NOUNS]  # fmt: skip
