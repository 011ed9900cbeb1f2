"""Lines that are made to cost a server more than their bytes."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path

import pytest

from deployments.openai.batches.input_file import MAX_ENVELOPE_BYTES, BatchRequest, InputFile
from tests.deployments.openai.batches.batches import jsonl, line

MIB = 2**20
OBJECTS = b"[" + b"{}," * MIB + b"{}]"  # 3 MiB, and 70 once they are decoded


def check(path: Path, max_body_bytes: int = 16 * MIB) -> list[tuple[int | None, str, str | None]]:
    _, errors = asyncio.run(InputFile(path, max_body_bytes).check("/v1/completions", ("fake",)))
    return [(error.line, error.code, error.param) for error in errors]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "body", "other"])
def test_nothing_is_made_of_a_value_that_no_field_of_a_line_has(path, field):
    parts = {name: json.dumps(value).encode() for name, value in line("a").items()}
    pairs = [b'"%s":%s' % (name.encode(), value) for name, value in {**parts, field: OBJECTS}.items()]
    path.write_bytes(b"{" + b",".join(pairs) + b"}\n")
    tracemalloc.start()
    try:
        assert [code for _, code, _ in check(path)] == ["invalid_body"]
        assert tracemalloc.get_traced_memory()[1] < 5 * len(OBJECTS)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("field", ["model", "stream", "background"])
def test_nothing_is_made_of_the_values_of_a_body_before_its_route_reads_it(path, field):
    texts = [f"{i}{{[," for i in range(50_000)]  # few enough lists and objects
    path.write_bytes(jsonl(line("a", **{field: texts})))
    tracemalloc.start()
    try:
        found = check(path)
        assert tracemalloc.get_traced_memory()[1] < 5 * path.stat().st_size
    finally:
        tracemalloc.stop()
    expected = {"model": [(1, "model_mismatch", "body.model")], "stream": [(1, "invalid_body", "body.stream")]}
    assert found == expected.get(field, [])


def test_a_line_that_is_too_long_is_reported_by_its_number_and_never_read_as_a_whole(path):
    limit = MIB + MAX_ENVELOPE_BYTES
    with path.open("wb") as file:
        file.write(jsonl(line("a")))
        file.write(b'"' + b"x" * (8 * MIB) + b'"\n\n')
        file.write(jsonl(line("a")))
        file.write(b" " * (limit - 1) + b"{\n")
        file.write(b"y" * (limit + 1))
    tracemalloc.start()
    try:
        found = check(path, max_body_bytes=MIB)
        assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    finally:
        tracemalloc.stop()
    assert found == [
        (2, "line_too_long", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_json_line", None),
        (6, "line_too_long", None),
    ]


def test_a_body_that_a_route_would_take_fits_into_a_line_whatever_its_custom_id(path):
    custom_id = "\U0001f600" * 512
    body = json.dumps({"prompt": "x" * MIB}).encode()
    text = json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}).encode()
    path.write_bytes(text[:-1] + b', "body": ' + body + b"}\n")
    assert check(path, max_body_bytes=len(body)) == []
    requests = list(InputFile(path, len(body)).requests())
    assert requests == [BatchRequest(1, custom_id, body)]


def test_names_of_fields_may_be_escaped_and_the_last_of_several_counts(path):
    path.write_bytes(
        b'{"custom_id": 3, "custom\\u005fid": "a", "method": "POST", "url": "/v1/completions", "body": {}}'
    )
    assert check(path) == []
