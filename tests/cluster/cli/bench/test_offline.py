from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cluster.cli import main as cli
from cluster.cli.bench import offline
from cluster.cli.bench.load import OfflineLoad
from cluster.cli.bench.prompts import WARM_UP, preset
from cluster.terminal.progress import progress_bar
from engine.errors import PromptTooLong
from engine.offline.llm import LLM
from tests.models import make_model

SMALL = ["--requests", "3", "--input-len", "20", "--output-len", "6", "--repetitions", "2", "--num-threads", "1"]


@pytest.fixture
def batches(monkeypatch) -> list[list]:
    """The prompts and answers of every batch that an engine runs."""
    seen: list[list] = []
    run = LLM.run

    def spy(self, jobs, **options):
        seen.append([])
        for request, params in jobs:
            assert params.greedy and params.ignore_eos
            seen[-1].append((request.prompt_token_ids, params.max_tokens))
        yield from run(self, jobs, **options)

    monkeypatch.setattr(LLM, "run", spy)
    return seen


def report(folder, *arguments: str, exit_code: int = 0) -> dict:
    result = CliRunner().invoke(cli.app, ["bench", "offline", "--model", str(folder), "--json", *arguments])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_figures_are_positive_and_agree_with_each_other(folder):
    fields = report(folder, *SMALL)
    assert (fields["failed"], fields["requests"], fields["input_len"], fields["output_len"]) == (0, 3, 20, 6)
    assert (fields["dtype"], fields["threads"]) == ("float32", 1)
    for name in ("output_tokens_per_s", "total_tokens_per_s", "ttft_ms", "tpot_ms"):
        values = fields[name]
        assert 0 < values["min"] <= values["median"] <= values["max"]
    ratio = fields["total_tokens_per_s"]["median"] / fields["output_tokens_per_s"]["median"]
    assert ratio == pytest.approx((20 + 6) / 6)
    assert 0 < fields["loaded_s"] <= fields["ready_s"]
    assert 0.05 < fields["peak_rss_gib"] < 100


def test_a_single_stream_spends_its_time_on_the_first_token_and_on_the_others(folder):
    fields = report(folder, *SMALL, "--requests", "1", "--repetitions", "1")
    stream_s = (fields["ttft_ms"]["median"] + 5 * fields["tpot_ms"]["median"]) / 1e3
    assert stream_s <= 6 / fields["output_tokens_per_s"]["median"]


def test_a_single_token_has_no_time_per_token(folder):
    fields = report(folder, *SMALL, "--output-len", "1")
    assert fields["tpot_ms"] is None
    assert fields["ttft_ms"]["median"] > 0


def test_every_repetition_and_the_warm_up_have_prompts_of_their_own(folder, batches):
    report(folder, *SMALL)
    report(folder, *SMALL)
    first, again = batches[:3], batches[3:]
    assert first == again
    prompts = [tuple(prompt) for batch in first for prompt, _ in batch]
    assert len(set(prompts)) == len(prompts) == 9


@pytest.mark.slow
def test_a_preset_runs_with_the_token_ids_that_every_engine_gets(tmp_path, batches):
    make_model(tmp_path, "llama", tokenizer=True, vocab_size=31000)
    fields = report(tmp_path, "--workload", "W2", "--repetitions", "2", "--num-threads", "1")
    assert (fields["workload"], fields["requests"], fields["output_len"]) == ("W2", 1, 128)
    expected = [preset("W2", "", number) for number in (WARM_UP, 0, 1)]
    assert batches == [[(job.prompt, job.max_tokens) for job in jobs] for jobs in expected]


def test_the_table_shows_throughput_and_latency(folder):
    result = CliRunner().invoke(cli.app, ["bench", "offline", "--model", str(folder), *SMALL])
    assert result.exit_code == 0, result.output
    for name in ("output tokens/s", "time to first token", "time per output token", "median", "loaded", "GiB"):
        assert name in result.stdout


def test_failed_requests_are_counted_and_fail_the_command(folder, monkeypatch):
    run_batch = offline.run_batch

    def lose_one(*arguments):
        done = run_batch(*arguments)
        done.outputs[0].finish_reason = "error"
        return done

    monkeypatch.setattr(offline, "run_batch", lose_one)
    assert report(folder, *SMALL, exit_code=1)["failed"] == 3  # one of each repetition, and of the warm-up


def test_requests_that_cannot_be_served_are_refused_before_anything_runs(folder, batches):
    with progress_bar(shown=False) as progress, pytest.raises(PromptTooLong):
        offline.measure(OfflineLoad(input_len=600), model=str(folder), num_threads=1, progress=progress)
    assert batches == []
