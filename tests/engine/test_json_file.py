"""JSON files that anybody may have written."""

from __future__ import annotations

import os

import pytest

from engine.errors import ModelFolderError
from engine.json_file import MAX_BYTES, read_json, read_object


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "config.json is not valid JSON: Expecting property name"),
        ("[1]", "config.json is not a JSON object"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "config.json must have at most 32 levels, got more"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "config.json must have at most 32 levels, got more"),
        ('{"a": ' + '{"a":' * 40 + "1" + "}" * 41, "config.json must have at most 32 levels, got more"),
        ('{"a": ' + "1" * 5000 + "}", "config.json is not valid JSON: Exceeds the limit"),
        ('{"a": {"__float__": "no"}}', "config.json is not valid JSON: could not convert string"),
        ('{"a": {"__float__": []}}', "config.json is not valid JSON: float"),
        (b'{"a": "\xff"}', "config.json is not valid JSON: 'utf-8' codec"),
        (" " * (MAX_BYTES + 1), "config.json must have at most 8,388,608 bytes, got 8,388,609"),
    ],
    ids=range(10),
)
def test_a_file_that_is_no_object_within_bounds_is_refused_in_one_line(tmp_path, content, problem):
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelFolderError, match=problem) as refused:
        read_object(tmp_path / "config.json")
    assert "\n" not in str(refused.value)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        read_object(tmp_path / "config.json")


def test_infinity_is_read_as_both_versions_of_transformers_write_it(tmp_path):
    (tmp_path / "a.json").write_text('[Infinity, {"__float__": "Infinity"}]')
    assert read_json(tmp_path / "a.json") == [float("inf")] * 2
