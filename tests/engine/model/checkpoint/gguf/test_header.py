"""Headers of GGUF files: those of the package `gguf`, and what anybody may write."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest

from engine.errors import ModelFolderError
from engine.model.checkpoint import cache
from engine.model.checkpoint.gguf.header import Header
from engine.model.checkpoint.gguf.keys import GGUFError
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from tests.gguf_files import write_gguf
from tests.models import make_model


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(make_model(folder / "llama", "llama"), folder / "model.gguf", "F16")
    return folder / "model.gguf"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def key(name: str, kind: int, value: bytes) -> bytes:
    return header(0, 1, text(name) + struct.pack("<I", kind) + value)


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, dims: int | None = None) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return header(1, 0, text("w") + struct.pack("<I", len(shape) if dims is None else dims) + sizes
                  + struct.pack("<IQ", kind, offset) + bytes(64))  # fmt: skip


def test_a_header_is_what_the_package_reads(written):
    reader, found = gguf.GGUFReader(written), Header(written)
    own = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata == own
    assert {name: (entry.shape, entry.type, entry.offset, entry.nbytes) for name, entry in found.tensors.items()} == {
        t.name: (tuple(map(int, reversed(t.shape))), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in reader.tensors
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"GG", "length of magic must be at most 2 in a file of 2 bytes, got 4"),
        (b"no model, but long enough", "is no GGUF file"),
        (header(version=1), "version must be 2 or 3, got 1"),
        (header(tensors=2**64 - 1), "length of tensor_count must be at most 0 in a file of 24 bytes, got 1844"),
        (header(keys=2**40, rest=bytes(36)), "length of kv_count must be at most 2 in a file of 60 bytes, got 1099"),
        (header(0, 1, struct.pack("<Q", 2**50) + bytes(20)), "length of name of a key must be at most 20"),
        (header(0, 2, (text("a") + struct.pack("<IB", 0, 1)) * 2), "name of a key must be there once, got a"),
        (key("a", 99, bytes(8)), "type of a must be known, got 99"),
        (key("a", 8, struct.pack("<Q", 2**60) + bytes(9)), "length of a must be at most 9 in a file"),
        (key("a", 8, struct.pack("<Q", 2) + b"\xff\xff"), "a is no text"),
        (key("a", 9, struct.pack("<IQ", 0, 2**34) + bytes(20)), "length of a must be at most 20 in a file"),
        (key("a", 9, struct.pack("<IQ", 8, 2**34) + bytes(20)), "length of a must be at most 2 in a file"),
        (key("a", 9, struct.pack("<IQ", 9, 2) + bytes(99)), "type of a must be an array of numbers or texts, got 9"),
        (
            key("general.alignment", 4, struct.pack("<I", 0)) + bytes(99),
            "general.alignment must be a power of two, got 0",
        ),
        (tensor((2**62, 8)), r"shape of w must be of what fits into \d+ bytes, got \(8, 4611"),
        (tensor((2**40, 0)), r"shape of w must be of what fits into \d+ bytes, got \(0, 1099"),
        (tensor((), dims=2**31), "dimensions of w must be from 1 to 4, got 2147483648"),
        (tensor((4,), offset=2**40), r"end of w must be within the file's \d+ bytes"),
        (tensor((17,)), r"end of w must be within the file's \d+ bytes"),
        (tensor((16,), kind=2), r"shape of w must be of whole blocks of 32 numbers \(Q4_0\), got \(16,\)"),
        (tensor((4,), kind=999), "type of w must be known, got 999"),
    ],
)
def test_a_header_that_lies_is_refused_by_name_and_takes_no_memory(tmp_path, content, problem):
    (tmp_path / "model.gguf").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(GGUFError, match=problem):
        Header(tmp_path / "model.gguf")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"llama.block_count": 2}, r"it has tensors of layer 2, but llama\.block_count = 2"),
        ({"llama.block_count": 4}, r"it has no tensors of layer 3, but llama\.block_count = 4"),
        ({"llama.block_count": 2**31}, r"block_count = 2147483648 is not supported: must be a whole number from 1"),
        ({"llama.embedding_length": "wide"}, r"embedding_length = wide is not supported: must be a whole number"),
        ({"llama.attention.head_count": 0}, r"head_count = 0 is not supported: must be a whole number from 1"),
        ({"llama.rope.freq_base": float("nan")}, r"freq_base = nan is not supported: must be above 0, and finite"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer\.ggml\.tokens must be an array of texts"),
        ({"tokenizer.ggml.merges": ["a b c"]}, r"tokenizer\.ggml\.merges must be pairs of tokens, got 'a b c'"),
        ({"tokenizer.ggml.merges": ["qqq qqq"]}, r"its vocabulary cannot be read"),
        ({"tokenizer.ggml.tokens": ["a" * 600, "b", "c"]}, r"must have at most 512 characters in a token"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, r"eos_token_id must be a number below \d+, got 1000000"),
        ({"tokenizer.chat_template": 5}, r"tokenizer\.chat_template must be a text"),
        ({"tokenizer.chat_template.tool_use": 5}, r"tokenizer\.chat_template\.tool_use must be a text"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_right_is_refused_by_name(tmp_path, metadata, problem):
    write_gguf(make_model(tmp_path / "llama", "llama"), tmp_path / "model.gguf", "F16", **metadata)
    with pytest.raises(ModelFolderError, match=problem):
        resolve(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("seed", range(3))
def test_any_damage_is_one_line(tmp_path, written, seed):
    whole, random_ = written.read_bytes(), random.Random(seed)
    for number in range(20):
        content = bytearray(whole)
        at = random_.randrange(20_000)
        size = random_.choice((1, 4, 8))
        content[at : at + size] = random_.choice((2 ** (8 * size) - 1, 0, 1 << (4 * size))).to_bytes(size, "little")
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content)
        problem = ""
        try:
            ModelConfig.from_folder(resolve(str(file)))
        except ModelFolderError as error:
            problem = str(error)
        assert "\n" not in problem and len(problem) < 1000
