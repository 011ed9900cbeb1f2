from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.simulator.write_trace import reuse, write
from cluster.lab.simulator.trace import KINDS, OUTPUT_ID, PIECE, Trace, make_trace
from engine.errors import InvalidParameter


def test_prompts_share_tokens_where_they_share_ids_and_nowhere_else():
    trace = Trace("t", np.zeros(2), np.array([PIECE + 5, PIECE + 9]), np.ones(2, dtype=int), [[1, 2], [1, 3]])
    one, other = trace.prompt(0), trace.prompt(1)
    assert (len(one), len(other)) == (PIECE + 5, PIECE + 9)
    assert one[:PIECE] == other[:PIECE]
    assert not set(one[PIECE:]) & set(other[PIECE:])


def test_prompts_without_ids_share_nothing():
    trace = make_trace("azure-code", 20, 1.0)
    firsts = [trace.prompt(i)[0] for i in range(20)]
    assert len(set(firsts)) == 20
    assert reuse(trace) == 0


def test_a_trace_survives_being_written_and_read(tmp_path):
    trace = make_trace("mooncake", 50, 2.0)
    write(trace, tmp_path / "t.jsonl")
    again = Trace.read(tmp_path / "t.jsonl")
    assert np.allclose(again.arrivals_s, trace.arrivals_s - trace.arrivals_s[0], atol=2e-6)
    assert np.array_equal(again.prompt_tokens, trace.prompt_tokens)
    assert np.array_equal(again.output_tokens, trace.output_tokens)
    assert again.hash_ids == trace.hash_ids


def test_conversations_survive_being_written_and_read(tmp_path):
    trace = make_trace("agents", 150, 2.0).scaled(0.01)
    write(trace, tmp_path / "t.jsonl")
    again = Trace.read(tmp_path / "t.jsonl")
    for session in range(2):
        (one, other) = (
            [
                (
                    int(each.prompt_tokens[i]),
                    int(each.output_tokens[i]),
                    turn.agent,
                    len(turn.after),
                    round(turn.think_s, 6),
                )
                for i, turn in enumerate(each.turns)
                if turn.session == session
            ]
            for each in (trace, again)
        )
        assert one == other
    assert reuse(again) == pytest.approx(reuse(trace), abs=0.1)


def test_prompts_of_a_file_may_have_fewer_ids_than_pieces(tmp_path):
    lines = [
        {"timestamp": 1000, "input_length": 2 * PIECE + 3, "output_length": 7, "hash_ids": [4, 5]},
        {"timestamp": 0, "input_length": 2 * PIECE + 3, "output_length": 0, "hash_ids": [4, 5]},
        {"timestamp": 2000, "input_length": 10, "output_length": 1},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = Trace.read(path)
    assert trace.arrivals_s.tolist() == [0, 1, 2]
    assert trace.output_tokens.tolist() == [1, 7, 1]
    assert trace.prompt(0)[: 2 * PIECE] == trace.prompt(1)[: 2 * PIECE]
    assert trace.prompt(0)[-1] != trace.prompt(1)[-1]
    assert len(trace.prompt(2)) == 10


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"timestamp": 0, "input_length": 5}',
        '{"timestamp": 0, "input_length": 0, "output_length": 1}',
        '{"timestamp": -1, "input_length": 5, "output_length": 1}',
        f'{{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [{OUTPUT_ID}]}}',
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"timestamp": 0, "input_length": 5, "output_length": 1}\n' + line.encode("latin-1"))
    with pytest.raises(InvalidParameter, match=r"t\.jsonl:2"):
        Trace.read(path)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n")
    with pytest.raises(InvalidParameter, match="at least one request"):
        Trace.read(path)


def test_a_trace_can_be_run_faster():
    trace = make_trace("fixed", 100, 2.0).at_rate(8.0)
    assert len(trace) / trace.duration_s == pytest.approx(8.0)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_traces_and_others_do_not(kind):
    one, again, other = (make_trace(kind, 40, 3.0, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.arrivals_s, again.arrivals_s)
    assert np.array_equal(one.prompt_tokens, again.prompt_tokens)
    assert one.hash_ids == again.hash_ids
    assert not np.array_equal(one.arrivals_s, other.arrivals_s)


@pytest.mark.parametrize(
    ("kind", "prompt", "output"),
    [("azure-conversation", (1020, 1155), (129, 211)), ("azure-code", (1500, 2048), (13, 28))],
)
def test_lengths_of_azure_are_the_published_ones(kind, prompt, output):
    trace = make_trace(kind, 20_000, 10.0)
    for lengths, (median, mean) in ((trace.prompt_tokens, prompt), (trace.output_tokens, output)):
        assert np.median(lengths) == pytest.approx(median, rel=0.04)
        assert lengths.mean() == pytest.approx(mean, rel=0.06)


def test_mooncake_prompts_are_as_long_and_as_much_alike_as_published():
    trace = make_trace("mooncake", 10_000, 6.5)
    assert trace.prompt_tokens.mean() == pytest.approx(7590, rel=0.1)
    assert trace.output_tokens.mean() == pytest.approx(182, rel=0.05)
    assert 0.45 < reuse(trace) < 0.6


def test_bursts_are_burstier_than_a_poisson_process():
    gaps = [np.diff(make_trace("fixed", 5000, 5.0, burstiness=b).arrivals_s) for b in (1.0, 0.2)]
    even, bursty = (float(gap.std() / gap.mean()) for gap in gaps)
    assert even == pytest.approx(1.0, rel=0.1)
    assert bursty == pytest.approx(5**0.5, rel=0.15)


def test_the_requests_of_a_file_come_as_bursty_as_asked_for_at_the_same_rate():
    trace = make_trace("azure-code", 3000, 5.0)
    drawn = trace.drawn(0.2, seed=1)
    assert list(drawn.prompt_tokens) == list(trace.prompt_tokens)
    assert drawn.duration_s == pytest.approx(trace.duration_s)
    gaps = np.diff(drawn.arrivals_s)
    assert gaps.std() / gaps.mean() == pytest.approx(5**0.5, rel=0.15)
    with pytest.raises(InvalidParameter):
        trace.drawn(0.0, seed=1)


@pytest.mark.parametrize(
    "arguments", [("no", 1, 1.0), ("fixed", 0, 1.0), ("fixed", 1, 0.0), ("fixed", 1, float("inf"))]
)
def test_traces_that_cannot_be_are_refused(arguments):
    with pytest.raises(InvalidParameter):
        make_trace(*arguments)


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,40,5\n2023-11-16 18:17:05.4799600,7,3\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,40,5,45,Conversation log\n5.5,GPT-4,9,0,9,API log\n6.5,GPT-4,7,3,10,API log\n",
    ],
    ids=["Azure", "BurstGPT"],
)
def test_the_csv_files_of_others_are_traces_too(text, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    trace = Trace.read(tmp_path / "t.csv")
    assert trace.arrivals_s.tolist() == pytest.approx([0, 1.5])
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([40, 7], [5, 3])


def test_a_csv_file_with_other_columns_or_no_numbers_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("when,in,out\n1,2,3\n")
    with pytest.raises(InvalidParameter, match="ContextTokens"):
        Trace.read(path)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n4,many,6\n")
    with pytest.raises(InvalidParameter, match=r"t\.csv:3"):
        Trace.read(path)


def test_the_busiest_part_begins_at_second_0_with_its_own_prompts():
    tokens = np.array([10, 10, 500, 500, 10])
    ids = [[i] for i in range(5)]
    trace = Trace("t", np.array([0.0, 5, 10, 11, 30]), tokens, np.ones(5, dtype=int), ids)
    busiest = trace.busiest(2)
    assert busiest.arrivals_s.tolist() == [0, 1]
    assert busiest.prompt_tokens.tolist() == [500, 500] and busiest.prompt(0)[0] == 2
    assert trace.busiest(5) is trace
