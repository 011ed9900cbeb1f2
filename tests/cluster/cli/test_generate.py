import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cluster.cli.generate import OutputLine, complete_lines, generate_file, in_order
from engine import LLM
from engine.errors import RequestError
from tests.engine_processes import with_engine
from tests.models import make_model

COUNT = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("batch"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model), max_num_seqs=4, kv_cache_memory_bytes=10_000_000, num_threads=1) as llm:
        yield llm


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts() -> list[dict]:
    return [{"prompt": [5 + i, 7, 9], "id": f"p{i}", "max_tokens": 5 + i % 40} for i in range(COUNT)]


@contextmanager
def generating(model: Path, source: Path, target: Path) -> Iterator[BaseProcess]:
    """OutputLine the file in a process of its own, which may be killed."""
    load = partial(LLM, str(model), kv_cache_memory_bytes=10_000_000, num_threads=1)
    process = with_engine().Process(target=generate_file, args=(load, source, target, {}), kwargs={"progress": False})
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_answers_come_in_the_order_of_the_input_and_repeat_its_ids(llm, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", prompts())
    summary = generate_file(lambda: llm, source, tmp_path / "out.jsonl", {}, progress=False)
    lines = read_lines(tmp_path / "out.jsonl")
    assert [(line["index"], line["id"]) for line in lines] == [(i, f"p{i}") for i in range(COUNT)]
    assert (summary.resumed, summary.written, summary.failed) == (0, COUNT, 0)


def test_a_bad_line_gets_an_error_and_harms_no_other(llm, tmp_path):
    good = {"prompt": "The quick", "max_tokens": 3}
    bad = ["not json\n", {"prompt": "x", "temprature": 1}, {"id": 7}, {"prompt": "x", "top_p": 9}, {"prompt": []}]
    source = write_lines(tmp_path / "in.jsonl", [good, *bad, good])
    summary = generate_file(lambda: llm, source, tmp_path / "out.jsonl", {}, progress=False)
    first, *errors, last = read_lines(tmp_path / "out.jsonl")
    assert summary.failed == len(bad)
    assert len(first["choices"][0]["token_ids"]) == len(last["choices"][0]["token_ids"]) == 3
    expected = ["malformed", "unknown field 'temprature'", "needs either prompt", "top_p must be", "at least one"]
    for line, text in zip(errors, expected, strict=True):
        assert text in line["error"]
    assert errors[2]["id"] == 7


def test_what_is_finished_is_not_run_again(llm, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", prompts())
    generate_file(lambda: llm, source, tmp_path / "out.jsonl", {}, progress=False)
    before = (tmp_path / "out.jsonl").read_bytes()

    def never() -> LLM:
        raise AssertionError("there is nothing to do, so no model is needed")

    assert generate_file(never, source, tmp_path / "out.jsonl", {}).resumed == COUNT
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_killed_run_goes_on_without_losing_or_repeating_a_line(model, llm, tmp_path):
    source, target = write_lines(tmp_path / "in.jsonl", prompts()), tmp_path / "out.jsonl"
    unbroken = tmp_path / "unbroken.jsonl"
    generate_file(lambda: llm, source, unbroken, {}, progress=False)
    with generating(model, source, target) as process:
        while process.is_alive() and not (target.exists() and target.stat().st_size):
            time.sleep(0.001)  # a file does not say that it grows
    with target.open("ab") as file:
        file.write(b'{"index": 99, "torn')
    with generating(model, source, target) as process:
        process.join(60)
        assert process.exitcode == 0
    assert target.read_bytes() == unbroken.read_bytes()


def test_a_torn_line_is_cut_off(tmp_path):
    whole = b'{"index":0}\n{"index":1}\n'
    (tmp_path / "out").write_bytes(whole + b'{"ind')
    assert complete_lines(tmp_path / "out") == 2
    assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.parametrize("content", [b"notes\n", b"notes", b'{"index":1}\n', b'{"index":0}\n{"prompt": "x"}'])
def test_file_that_is_no_output_is_refused_and_left_as_it_is(content, tmp_path):
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(RequestError, match=r"out:[12] does not answer line [12] of the input"):
        complete_lines(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


def test_the_output_of_another_input_is_refused(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    write_lines(tmp_path / "out.jsonl", [{"index": 0}, {"index": 1}])
    with pytest.raises(RequestError, match="2 answers for 1 lines"):
        generate_file(lambda: pytest.fail("not needed"), source, tmp_path / "out.jsonl", {})


def test_answers_that_come_early_wait_for_those_before_them():
    early = iter([OutputLine(index=3), OutputLine(index=2), OutputLine(index=4)])
    assert [answer.index for answer in in_order(early, first=2)] == [2, 3, 4]
