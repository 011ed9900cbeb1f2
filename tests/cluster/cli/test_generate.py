import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import generate
from cluster.cli.generate import OutputLine, earlier_answers, generate_file, in_order, replace_answers
from cluster.cli.main import app
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
    assert str(summary) == f"answered {COUNT} lines"


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


GOOD, BAD = {"prompt": "The quick", "max_tokens": 3}, {"prompt": "The quick", "max_tokens": 3, "temprature": 1}


def test_failed_lines_are_tried_again_in_their_places_until_none_has_an_error(llm, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    said = []
    for lines in ([BAD, GOOD, BAD, GOOD, BAD], [BAD, GOOD, GOOD, GOOD, BAD, GOOD, BAD], [GOOD] * 7, [GOOD] * 7):
        write_lines(source, lines)
        said.append(str(generate_file(lambda: llm, source, target, {}, progress=False)))
        answers = read_lines(target)
        assert [line["index"] for line in answers] == list(range(len(lines)))
        assert ["error" in line for line in answers] == [line is BAD for line in lines]
    again = "the same command tries them again"
    assert said == [
        f"answered 2 lines; 3 failed: {again}",
        f"answered 2 lines; 3 tried again; 2 answered before; 3 failed: {again}",
        "answered 3 lines; 3 tried again; 4 answered before",
        "answered 0 lines; 7 answered before",
    ]
    unbroken = tmp_path / "unbroken.jsonl"
    generate_file(lambda: llm, source, unbroken, {}, progress=False)
    assert tokens_of(target) == tokens_of(unbroken)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([BAD], "answered 0 lines; 1 failed: the same command tries it again"),
        ([GOOD], "answered 1 line"),
        ([GOOD, BAD], "answered 1 line; 1 failed: the same command tries it again"),
    ],
)
def test_the_summary_counts_failed_lines_apart_from_answered_ones(llm, tmp_path, lines, said):
    source = write_lines(tmp_path / "in.jsonl", lines)
    assert str(generate_file(lambda: llm, source, tmp_path / "out.jsonl", {}, progress=False)) == said


def test_a_line_whose_error_has_no_text_has_failed_and_is_tried_again(llm, tmp_path):
    source, target = write_lines(tmp_path / "in.jsonl", [GOOD]), tmp_path / "out.jsonl"
    write_lines(target, [{"index": 0, "error": ""}])
    summary = generate_file(lambda: llm, source, target, {}, progress=False)
    assert (summary.retried, summary.failed) == (1, 0)
    assert "error" not in read_lines(target)[0]


def tokens_of(output: Path) -> list[list[int]]:
    return [line["choices"][0]["token_ids"] for line in read_lines(output)]


def test_an_answer_that_failed_in_the_engine_is_replaced_and_others_stay_as_they_are(llm, tmp_path):
    source, target = write_lines(tmp_path / "in.jsonl", [GOOD] * 3), tmp_path / "out.jsonl"
    kept = '{"index":0, "choices":[], "note":"somebody has edited it"}\n'
    torn = {"index": 1, "choices": [{"text": "hal", "token_ids": [1], "finish_reason": "error"}], "error": "not finite"}
    write_lines(target, [kept, torn])
    generate_file(lambda: llm, source, target, {}, progress=False)
    first, *others = target.read_text().splitlines(keepends=True)
    assert first == kept
    assert [json.loads(line)["choices"][0]["finish_reason"] for line in others] == ["length", "length"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_tried_again_before_an_interrupt_or_a_crash_is_kept(llm, tmp_path, monkeypatch, error):
    source, target = write_lines(tmp_path / "in.jsonl", [BAD] * 4), tmp_path / "out.jsonl"
    generate_file(lambda: llm, source, target, {}, progress=False)
    write_lines(source, [GOOD] * 4)
    run = llm.run

    def breaks_off(*jobs, **options):
        answers = run(*jobs, **options)
        yield next(answers)
        yield next(answers)
        raise error

    monkeypatch.setattr(llm, "run", breaks_off)
    with pytest.raises(error):
        generate_file(lambda: llm, source, target, {}, progress=False)
    monkeypatch.undo()
    assert sum("error" in line for line in read_lines(target)) == 2
    summary = generate_file(lambda: llm, source, target, {}, progress=False)
    assert (summary.retried, summary.resumed, summary.failed) == (2, 2, 0)


def test_a_kill_while_lines_are_tried_again_loses_only_the_newest_answers(tmp_path):
    target = write_lines(tmp_path / "out.jsonl", [{"index": i, "error": "bad"} for i in range(5)])

    def answers() -> Iterator[OutputLine]:
        for number, index in enumerate((3, 0, 4, 1, 2)):
            assert sum("error" not in line for line in read_lines(target)) == number // 2 * 2
            yield OutputLine(index=index)

    replace_answers(target, answers(), 2)
    assert read_lines(target) == [{"index": index} for index in range(5)]


def test_other_files_beside_the_output_stay_as_they_are_while_lines_are_tried_again(tmp_path):
    target = write_lines(tmp_path / "out.jsonl", [{"index": 0, "error": "bad"}])
    others = {tmp_path / f"{start}out.jsonl{end}" for start in ("", ".") for end in (".new", ".tmp", ".")}
    for other in others:
        other.write_text("the user's")
    replace_answers(target, iter([OutputLine(index=0)]), 1)
    assert read_lines(target) == [{"index": 0}]
    assert {other for other in tmp_path.iterdir() if other.read_text() == "the user's"} == others
    assert {*tmp_path.iterdir()} == {*others, target}


@pytest.mark.parametrize(("failed", "written"), [(99, 1), (250, 3), (5_000, 50), (20_001, 50)])
def test_however_many_lines_are_tried_again_the_output_is_written_at_most_fifty_times(
    tmp_path, monkeypatch, failed, written
):
    source = write_lines(tmp_path / "in.jsonl", [GOOD] * failed)
    target = write_lines(tmp_path / "out.jsonl", [{"index": i, "error": "bad"} for i in range(failed)])
    replaced = []
    monkeypatch.setattr(generate, "replace_lines", lambda _, found: replaced.append(set(found)))
    monkeypatch.setattr(generate, "answers", lambda _, __, indices, *___: (OutputLine(index=i) for i in indices))
    generate_file(lambda: None, source, target, {}, progress=False)
    assert len(replaced) == written
    assert set().union(*replaced) == set(range(failed))


def test_an_output_that_is_a_link_stays_one_with_its_permissions_and_a_full_disk_harms_nothing(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    target, link = write_lines(tmp_path / "disk" / "out.jsonl", [{"index": 0, "error": "bad"}]), tmp_path / "link"
    target.chmod(0o640)
    link.symlink_to(target)
    before = target.read_bytes()

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            replace_answers(link, iter([OutputLine(index=0)]), 1)
    assert target.read_bytes() == before and list(target.parent.iterdir()) == [target]
    replace_answers(link, iter([OutputLine(index=0)]), 1)
    assert link.is_symlink() and read_lines(target) == [{"index": 0}]
    assert target.stat().st_mode & 0o777 == 0o640


def test_the_exit_code_tells_whether_any_line_of_the_output_has_an_error(model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    options = ["--model", str(model), "--kv-cache-memory-bytes", "10000000", "--num-threads", "1"]
    for lines, code in (([GOOD, BAD], 1), ([GOOD, BAD], 1), ([GOOD, GOOD], 0), ([GOOD, GOOD], 0)):
        write_lines(source, lines)
        result = CliRunner().invoke(app, ["generate", "--input", str(source), "--output", str(target), *options])
        assert result.exit_code == code, result.output


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
    assert len(earlier_answers(tmp_path / "out")) == 2
    assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.parametrize("content", [b"notes\n", b"notes", b'{"index":1}\n', b'{"index":0}\n{"prompt": "x"}'])
def test_file_that_is_no_output_is_refused_and_left_as_it_is(content, tmp_path):
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(RequestError, match=r"out:[12] does not answer line [12] of the input"):
        earlier_answers(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


def test_the_output_of_another_input_is_refused(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    write_lines(tmp_path / "out.jsonl", [{"index": 0}, {"index": 1}])
    with pytest.raises(RequestError, match="2 answers for 1 lines"):
        generate_file(lambda: pytest.fail("not needed"), source, tmp_path / "out.jsonl", {})


def test_answers_that_come_early_wait_for_those_before_them():
    early = iter([OutputLine(index=3), OutputLine(index=2), OutputLine(index=4)])
    assert [answer.index for answer in in_order(early, first=2)] == [2, 3, 4]
