"""Headers of safetensors files that anybody may have written."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import ModelFolderError
from engine.model.checkpoint.folder import weight_files
from engine.model.checkpoint.identity import identity_of
from engine.model.checkpoint.safetensors_header import TensorHeader, read_header


def write(file: Path, header: Any, data: int = 0, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return file


def tensor(shape: Any = (2, 2), first: Any = 0, stop: Any = 16, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, stop]}


def test_a_header_has_shape_dtype_and_place_of_each_tensor(tmp_path):
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}, tmp_path / "w", {"format": "pt"})
    assert read_header(tmp_path / "w") == {
        "b": TensorHeader("F32", (4,), (0, 16)),
        "a": TensorHeader("BF16", (2, 3), (16, 28)),
    }


@pytest.mark.parametrize(
    ("header", "data", "length", "problem"),
    [
        (b"", 0, 2**63, "the length of the header must be at most 0, got 9,223,372,036,854,775,808"),
        (b"{}", 0, 2**40, "the length of the header must be at most 2, got 1,099"),
        (b"{", 0, None, "the header cannot be read"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, None, "the header cannot be read"),
        ([], 0, None, "the header cannot be read"),
        ({"a": 5}, 0, None, "the header cannot be read"),
        ({"a": tensor(shape="wide")}, 16, None, "the header cannot be read"),
        ({"a": tensor(shape=(-2, -2))}, 16, None, "the header cannot be read"),
        ({"a": tensor(shape=(2.5, 2))}, 16, None, "the header cannot be read"),
        ({"a": tensor(dtype="F99")}, 16, None, "a.dtype must be one of F64, .*, got 'F99'"),
        ({"a": tensor((2, 3))}, 16, None, "a.data_offsets must be 24 bytes from 0, .*, got 0 to 16"),
        ({"a": tensor((2**40, 2**40))}, 16, None, "a.data_offsets must be 4835703278458516698824704 bytes"),
        ({"a": tensor(first=8, stop=24)}, 24, None, "a.data_offsets must be 16 bytes from 0, .*, got 8 to 24"),
        ({"a": tensor(), "b": tensor(first=8, stop=24)}, 24, None, "b.data_offsets must be 16 bytes from 16"),
        ({"a": tensor(first=16, stop=0)}, 16, None, "a.data_offsets must be 16 bytes from 0, .*, got 16 to 0"),
        ({"a": tensor()}, 8, None, "its tensors must be 8 bytes together, as in the file, got 16"),
        ({"a": tensor()}, 32, None, "its tensors must be 32 bytes together, as in the file, got 16"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused_by_name_as_by_the_package(tmp_path, header, data, length, problem):
    file = write(tmp_path / "model.safetensors", header, data, length)
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"^model.safetensors: {problem}"):
        read_header(file)
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()
    with pytest.raises(SafetensorError):
        safe_open(file, framework="pt").__enter__()


def test_a_shape_of_many_sizes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.shape must have at most 32 sizes, got 99"):
        read_header(write(tmp_path / "model.safetensors", {"a": tensor(shape=[1] * 99, stop=4)}, 4))


def test_an_identity_reads_no_more_of_a_header_than_there_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "model.safetensors", b"", 0, 2**62)
    with pytest.raises(ModelFolderError, match="the length of the header must be at most 0"):
        identity_of(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "model.bin", 7, None, ["a"], ".safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelFolderError, match=r"weight_map\.a must be the name of a \*\.safetensors file"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_map_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ModelFolderError, match="weight_map must be an object"):
        weight_files(tmp_path)
