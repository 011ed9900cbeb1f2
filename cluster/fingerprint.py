"""`system_fingerprint` of responses: digests of everything that may change the answer to a request.

There are several digests, so that `manta verify` can tell what has changed. They do not cover the kind of CPU or GPU,
because the process that makes them does not compute the answers.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

from cluster.distribution import DISTRIBUTION, ROOT
from engine.config import EngineConfig
from engine.source_digest import KERNEL_PACKAGES, as_in_a_checkout, digest, digest_of_files, package_version
from engine.text.tokenizer_files import VOCABULARY_FILES
from engine.wire.generate_request import ModelIdentity

PARTS = ("weights", "tokenizer", "options", "code", "adapter")  # the last one only where there is an adapter
DIGITS = 8  # hexadecimal digits of each part
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
              "chat_template*", "additional_chat_templates/*", *VOCABULARY_FILES)  # fmt: skip
KV_OPTIONS = ("dtype", "quantization", "kv_cache_dtype", "block_size", "load_format", "torch_compile", "determinism")
"""Options on which the bits of KV depend."""
NUMERICS = (*KV_OPTIONS, "structured_outputs")
ANSWER_PACKAGES = (DISTRIBUTION, *KERNEL_PACKAGES, "tokenizers", "llguidance")


def fingerprint(identity: ModelIdentity, text_folder: Path, pools: Collection[EngineConfig], *more: object) -> str:
    """Return `fp_`, followed by a digest for each of PARTS except `adapter`, which ModelInfo.adapted adds.

    text_folder: folder of the tokenizer and the chat template. pools: engine options of all pools that take part in an
    answer. more: other options that may change an answer.
    """
    ranks = [None if pool.determinism == "strict" else pool.layout for pool in pools]
    options = [*([getattr(pool, name) for name in NUMERICS] for pool in pools), ranks, *more]
    digests = identity.weights, digest_of_files(text_folder, TEXT_FILES), digest([repr(options).encode()]), _code()
    return "fp_" + "_".join(each[:DIGITS] for each in digests)


def differing_parts(one: str, other: str) -> list[str]:
    """Return the names of the parts in which two fingerprints differ: all of them if their forms differ."""
    ours, theirs = (text.removeprefix("fp_").split("_") for text in (one, other))
    ours, theirs = ([*parts, ""] if len(parts) == len(PARTS) - 1 else parts for parts in (ours, theirs))
    if len(ours) != len(theirs):
        return list(PARTS)
    return [part for part, a, b in zip(PARTS, ours, theirs, strict=True) if a != b]


@cache
def _code() -> str:
    """Return the digest of the sources that affect answers, and of the versions of the packages whose kernels they
    call."""
    folders = ROOT / "engine", ROOT / "deployments" / "openai"
    sources = [digest_of_files(folder, ["**/*.py"], as_in_a_checkout) for folder in folders]
    return digest(text.encode() for text in (*sources, *map(package_version, ANSWER_PACKAGES)))
