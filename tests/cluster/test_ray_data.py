"""Batch inference in Ray Data: rows in an engine, and a job that is killed and goes on."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from cluster.ray_data import ERROR, ProcessorConfig, _Embed, _Generate, _same, build_processor
from engine import LLM, SamplingParams
from engine.errors import ConfigError, RequestError, StartupError
from tests.pooling_models import EMBEDDINGS, make
from tests.serve.serve_run import ray_environment

pa = pytest.importorskip("pyarrow")
pytest.importorskip("ray.data")  # sets a variable of the environment

WORDS = ["ocean", "lamp", "winter", "dog", "music", "river"]
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "num_gpu_blocks_override": 512,
    "tensor_parallel_size": 1,
}
ROOT = Path(__file__).parents[2]


PARAMS = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def ask(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "prompt": f"The {row['word']} is", "sampling_params": PARAMS}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What the engine says by itself."""
    with LLM("pocket", dtype="float32", num_threads=1, num_gpu_blocks_override=512) as llm:
        found = llm.generate([f"The {word} is" for word in WORDS], SamplingParams(**PARAMS), use_tqdm=False)
        return {word: output.outputs[0].text for word, output in zip(WORDS, found, strict=True)}


async def answered(actor: _Generate, *batches: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    async def one(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
        (columns,) = [columns async for columns in actor(pa.Table.from_pylist(rows))]
        return columns

    return await asyncio.wait_for(asyncio.gather(*map(one, batches)), 240)


def test_batches_side_by_side_have_the_texts_of_the_engine_and_keep_their_columns(texts):
    actor = _Generate(ProcessorConfig(engine_kwargs=ENGINE, id_column="word"), ask, _same)
    rows = [{"word": word, "page": page} for page, word in enumerate(WORDS)]
    for columns, part in zip(asyncio.run(answered(actor, rows[:4], rows[4:])), (rows[:4], rows[4:]), strict=True):
        assert columns["page"] == [row["page"] for row in part]
        assert columns["generated_text"] == [texts[row["word"]] for row in part]
        assert columns["num_generated_tokens"] == [len(ids) for ids in columns["generated_tokens"]] == [8] * len(part)
        assert set(columns["finish_reason"]) == {"length"}


def test_a_row_that_cannot_be_answered_ends_the_job_or_is_told_alone():
    rows: list[dict[str, Any]] = [
        {"prompt": "An ocean is", "messages": None, "sampling_params": {"max_tokens": 2}},  # names all columns
        {"prompt": "An ocean is", "sampling_params": {"max_tokens": -1}},
        {"sampling_params": {"max_tokens": 2}},
        {"messages": [{"role": "user", "content": "What is an ocean?"}], "sampling_params": {"max_tokens": 2}},
    ]
    config = ProcessorConfig(engine_kwargs=ENGINE, should_continue_on_error=True)
    actor = _Generate(config, _same, lambda row: {"text": row["generated_text"]})
    (columns,) = asyncio.run(answered(actor, rows))
    first, second, third, fourth = columns[ERROR]
    assert first == fourth == "" and "max_tokens" in second and "a row needs one of messages, prompt" in third
    assert columns["text"][0] and columns["text"][3] and columns["text"][1:3] == [None, None]
    object.__setattr__(config, "should_continue_on_error", False)
    with pytest.raises(RequestError, match="max_tokens"):
        asyncio.run(answered(actor, rows))


def test_with_an_id_a_row_is_sampled_alike_beside_any_others():
    actor = _Generate(ProcessorConfig(engine_kwargs=ENGINE, id_column="word"), ask, _same)
    hot = [{**ask({"word": word}), "sampling_params": {**PARAMS, "temperature": 1.0}} for word in WORDS]
    actor._preprocess = _same
    together, alone = asyncio.run(answered(actor, hot)), asyncio.run(answered(actor, hot[3:4]))
    assert alone[0]["generated_text"] == together[0]["generated_text"][3:4]
    with pytest.raises(RequestError, match="two rows have the same word: row dog"):
        asyncio.run(answered(actor, [hot[3], hot[3]]))


def test_embeddings_are_those_of_the_engine(tmp_path):
    folder = make(tmp_path / "model", EMBEDDINGS["minilm"])
    actor = _Embed(ProcessorConfig(model_source=str(folder), task_type="embed"), _same, _same)
    columns = actor(pa.Table.from_pylist([{"prompt": word} for word in WORDS]))
    expected = [output.outputs.embedding for output in actor.llm.embed(WORDS, use_tqdm=False)]
    assert columns["embeddings"] == expected


def test_options_that_no_engine_has_are_refused_where_the_processor_is_built():
    with pytest.raises(StartupError, match=r"engine_kwargs: .*tensor-paralel"):
        build_processor(ProcessorConfig(engine_kwargs={"tensor_paralel": 2}))
    with pytest.raises(ConfigError, match="chat_template"):
        build_processor(ProcessorConfig(engine_kwargs={"chat_template": "{{ messages }}"}))
    with pytest.raises(ConfigError, match="max_num_seqs"):
        build_processor(ProcessorConfig(engine_kwargs={"max_num_seqs": 0}))


def environment_of_ray(folder: Path) -> dict[str, str]:
    """Of a process whose Ray nobody else sees."""
    return ray_environment(str(folder)) | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="manta", dir="/tmp") as folder:  # paths of sockets must be short
        yield Path(folder)


@pytest.mark.serve
@pytest.mark.slow
def test_the_example_of_the_documentation_answers(tmp_path, ray_folder):
    text = (ROOT / "docs" / "ray_data.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    program = f"import ray\nray.init(address='local', num_cpus=3, include_dashboard=False)\n{example}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment_of_ray(ray_folder),
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(row["id"] for row in rows) == [0, 1, 2, 3] and all(row["answer"] for row in rows)


JOB = """
import sys
import ray
from ray.data.checkpoint import CheckpointConfig
from manta import ProcessorConfig, build_processor

out, checkpoint, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
ray.init(num_cpus=3, logging_level="ERROR", include_dashboard=False)
context = ray.data.DataContext.get_current()
context.enable_progress_bars = False
context.checkpoint_config = CheckpointConfig("id", checkpoint, delete_checkpoint_on_success=False)
engine = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 512}
processor = build_processor(
    ProcessorConfig(engine_kwargs=engine, batch_size=4, concurrency=1, id_column="id"),
    preprocess=lambda row: {
        **row, "messages": [{"role": "user", "content": f"What is {row['id']}?"}],
        "sampling_params": {"max_tokens": 40, "ignore_eos": True},
    },
    postprocess=lambda row: {"id": row["id"], "answer": row["generated_text"]},
)
dataset = processor(ray.data.range(rows, override_num_blocks=rows // 4))
dataset.write_parquet(out, mode=ray.data.SaveMode.APPEND)
"""


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_killed_goes_on_where_it_was_and_gives_what_it_would_have_given(tmp_path, ray_folder):
    from pyarrow.parquet import read_table

    (tmp_path / "job.py").write_text(JOB)

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "job.py", f"{tmp_path}/{name}", f"{tmp_path}/{name}-checkpoint", "160"]
        return subprocess.Popen(command, cwd=tmp_path, env=environment_of_ray(ray_folder), start_new_session=True)

    def done() -> int:
        files = (tmp_path / "killed-checkpoint").rglob("*.parquet")
        return len(list(files))

    whole = start("whole")
    assert whole.wait(300) == 0
    killed = start("killed")
    while done() < 3:
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    before = done()
    assert before < 40  # blocks
    assert start("killed").wait(300) == 0
    tables = [read_table(tmp_path / name).to_pydict() for name in ("whole", "killed")]
    answers = [dict(zip(table["id"], table["answer"], strict=True)) for table in tables]
    assert answers[0] == answers[1] and len(answers[0]) == len(tables[1]["id"]) == 160
