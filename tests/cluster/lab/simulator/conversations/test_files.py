"""Conversations in the formats of others, and what is said of files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.lab.simulator.trace import OUTPUT_ID, Trace
from engine.errors import InvalidParameter


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def call(t: float, tokens: int, hash_ids: list[int], out: int = 5, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "opus", "in": tokens, "out": out, "hash_ids": hash_ids, **more}


def weka(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "c", "models": ["opus"], "block_size": 4, "hash_id_scope": "local", "requests": requests} | more


def subagent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "a", "subagent_type": "Explore", "status": "completed",
            "models": ["opus"], "requests": requests}  # fmt: skip


def waits(trace: Trace) -> list[tuple[int, tuple[int, ...], float]]:
    """The agent of each request, what it waits for, and its pause."""
    assert trace.turns is not None
    return [(turn.agent, turn.after, pytest.approx(turn.think_s)) for turn in trace.turns]


# -- Weka, which AgentX replays ----------------------------------------------------------------------------


def test_calls_of_an_agent_come_one_after_another_with_the_recorded_pauses(tmp_path):
    calls = [
        call(0, 8, [1, 2], api_time=2.0),
        call(5, 12, [1, 2, 3], api_time=1.0),
        call(9, 15, [1, 2, 3, 4], think_time=0.5) | {"type": "s", "ttft": 0.1},
    ]
    trace = Trace.read(written(tmp_path / "t.jsonl", weka(*calls)))
    assert waits(trace) == [(0, (), 0.0), (0, (0,), 3.0), (0, (1,), 0.5)]
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([8, 12, 15], [5, 5, 5])
    first, second, third = (trace.prompt(index) for index in range(3))
    assert second[:8] == first and third[:12] == second and len(third) == 15


@pytest.mark.parametrize("begun_s", [0.0, 4.0], ids=["times of the whole", "times of the subagent"])
def test_an_agent_waits_for_its_subagents_which_run_at_a_time(tmp_path, begun_s):
    inner = [
        subagent(4, call(4 - begun_s, 4, [50], api_time=2.0), call(8 - begun_s, 8, [50, 51], api_time=2.0)),
        subagent(4, call(5 - begun_s, 4, [60], api_time=1.0)),
    ]
    calls = [call(0, 8, [1, 2], api_time=3.0), *inner, call(12, 12, [1, 2, 3])]
    trace = Trace.read(written(tmp_path / "t.jsonl", weka(*calls)))
    assert waits(trace) == [(0, (), 0.0), (1, (0,), 1.0), (2, (0,), 2.0), (1, (1,), 2.0), (0, (2, 3), 2.0)]


def test_calls_at_a_time_stay_at_a_time_and_the_next_waits_for_both(tmp_path):
    calls = [
        call(0, 8, [1], api_time=1.0),
        call(2, 8, [1], api_time=5.0),
        call(3, 8, [1], api_time=1.0),
        call(9, 8, [1]),
    ]
    trace = Trace.read(written(tmp_path / "t.jsonl", weka(*calls)))
    assert [after for _, after, _ in waits(trace)] == [(), (0,), (0,), (1, 2)]


def test_a_subagent_that_nothing_waits_for_is_left_running(tmp_path):
    calls = [call(0, 8, [1], api_time=1.0), subagent(1, call(1, 4, [9], api_time=60.0)), call(3, 8, [1])]
    trace = Trace.read(written(tmp_path / "t.jsonl", weka(*calls)))
    assert [after for _, after, _ in waits(trace)] == [(), (0,), (0,)]


def test_hash_ids_are_of_one_conversation_unless_the_file_says_that_they_are_of_all(tmp_path):
    for scope, alike in (("local", False), ("global", True)):
        lines = [weka(call(0, 8, [1, 2]), hash_id_scope=scope) for _ in range(2)]
        trace = Trace.read(written(tmp_path / "t.jsonl", *lines))
        assert (trace.prompt(0) == trace.prompt(1)) == alike
        assert {turn.session for turn in trace.turns} == {0, 1}


def test_conversations_may_be_files_of_a_folder_on_many_lines_each(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(weka(call(0, 8, [1]), call(1, 8, [1])), indent=2))
    (tmp_path / "README.md").write_text("traces")
    trace = Trace.read(tmp_path)
    assert len(trace) == 4 and len(trace.turns) == 4


def test_blocks_that_are_not_named_are_shared_with_nobody(tmp_path):
    trace = Trace.read(written(tmp_path / "t.jsonl", weka(call(0, 12, [1]), call(1, 12, [1]))))
    assert trace.prompt(0)[:4] == trace.prompt(1)[:4]
    assert not set(trace.prompt(0)[4:]) & set(trace.prompt(1)[4:])


# -- AIPerf's multi-turn files -----------------------------------------------------------------------------


def test_turns_of_text_are_added_to_the_answers_before_them(tmp_path):
    turns = [{"text": "x" * 40, "output_length": 7}, {"texts": ["y" * 8, {"contents": ["z" * 4]}], "delay": 1500}]
    trace = Trace.read(written(tmp_path / "t.jsonl", {"session_id": "s", "turns": turns}))
    assert waits(trace) == [(0, (), 0.0), (0, (0,), 1.5)]
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([10, 10 + 7 + 2 + 1], [7, 128])
    assert trace.prompt(1)[:10] == trace.prompt(0)
    assert trace.prompt(1)[10] >= OUTPUT_ID, "an answer, whose tokens no text of the file has"


def test_equal_texts_at_the_beginning_are_shared_and_a_system_text_is_no_turn(tmp_path):
    def talk(question: str) -> dict[str, Any]:
        return {"turns": [{"role": "system", "text": "You are terse. " * 4}, {"text": question}]}

    trace = Trace.read(written(tmp_path / "t.jsonl", talk("Why is that?"), talk("When was it?")))
    assert len(trace) == 2
    assert trace.prompt(0)[:15] == trace.prompt(1)[:15] and trace.prompt(0)[15:] != trace.prompt(1)[15:]


def test_lines_of_one_session_are_one_conversation_and_timestamps_set_the_pauses(tmp_path):
    lines = [
        {"session_id": "s", "turns": [{"text": "one", "timestamp": 500}]},
        {"session_id": "other", "turns": [{"text": "two", "timestamp": 1000}]},
        {"session_id": "s", "turns": [{"text": "three", "timestamp": 2500}]},
    ]
    trace = Trace.read(written(tmp_path / "t.jsonl", *lines))
    assert waits(trace) == [(0, (), 0.0), (0, (), 0.0), (0, (0,), 2.0)]
    assert trace.arrivals_s.tolist()[:2] == [0, 0.5]


# -- Mooncake's lines with AIPerf's sessions ----------------------------------------------------------------


def test_lines_of_a_session_are_what_is_new_in_its_turns(tmp_path):
    lines = [
        {"session_id": "s", "timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [7, 8]},
        {"session_id": "s", "delay": 250, "input_length": 20, "output_length": 5},
        {"session_id": "r", "timestamp": 9000, "input_length": 600, "output_length": 1, "hash_ids": [7, 8]},
    ]
    trace = Trace.read(written(tmp_path / "t.jsonl", *lines))
    assert waits(trace) == [(0, (), 0.0), (0, (0,), 0.25), (0, (), 0.0)]
    assert trace.prompt_tokens.tolist() == [600, 630, 600]
    assert trace.prompt(0) == trace.prompt(1)[:600] == trace.prompt(2)


@pytest.mark.parametrize(("mode", "tokens"), [("history", [2, 5]), ("delta", [2, 2 + 128 + 5])])
def test_messages_are_whole_prompts_or_what_is_new(tmp_path, mode, tokens):
    asked, answered = {"role": "user", "content": "x" * 8}, {"role": "assistant", "content": "y" * 12}
    lines = [
        {"session_id": "s", "message_mode": mode, "messages": [asked]},
        {"session_id": "s", "message_mode": mode, "messages": [asked, answered]},
    ]
    trace = Trace.read(written(tmp_path / "t.jsonl", *lines))
    assert trace.prompt_tokens.tolist() == tokens
    assert trace.prompt(1)[:2] == trace.prompt(0)


def test_texts_and_payloads_are_requests_too(tmp_path):
    lines = [
        {"timestamp": 0, "text_input": "x" * 40, "output_length": 3},
        {"timestamp": 1, "payload": {"prompt": "x" * 80, "max_tokens": 4}},
        {"timestamp": 2, "payload": {"messages": [{"role": "user", "content": "x" * 4}], "max_completion_tokens": 5}},
    ]
    trace = Trace.read(written(tmp_path / "t.jsonl", *lines))
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([10, 20, 1], [3, 4, 5])


# -- files that are wrong ----------------------------------------------------------------------------------

TURN = {"turns": [{"text": "a"}]}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([weka(call(0, 8, [1])), weka(call(0, 8, ["one"]))], r"t\.jsonl:2.*hash_ids\[0\]"),
        ([weka(call(0, 0, []))], r"t\.jsonl:1.*requests\[0\]\.in"),
        ([weka({"t": 0, "type": "x"})], r"t\.jsonl:1.*requests\[0\]\.type"),
        ([weka(subagent(0, subagent(0)))], r"t\.jsonl:1.*requests\[0\]\.requests\[0\]"),
        ([weka(call(0, 8, [1]), block_size=0)], r"t\.jsonl:1.*block_size"),
        ([weka(call(0, 8, [1])), weka(call(0, 8, [1]), block_size=8)], r"t\.jsonl:2, block_size.*first conversation"),
        ([TURN, {"turns": []}], r"t\.jsonl:2.*turns"),
        ([TURN, {"turns": [{"text": "a"}, {"delay": 5}]}], r"t\.jsonl:2, turns\[1\]\.text"),
        ([{"turns": [{"text": "a", "images": ["a.png"]}]}], r"t\.jsonl:1, turns\[0\]\.images"),
        ([{"turns": [{"text": "a", "delay": -1}]}], r"t\.jsonl:1.*turns\[0\]\.delay"),
        ([TURN, weka(call(0, 8, [1]))], r"t\.jsonl:2.*turns"),
        ([{"timestamp": 0, "output_length": 1}], r"t\.jsonl:1.*input_length, text_input"),
        ([{"timestamp": 0, "input_length": 1, "text_input": "a", "output_length": 1}], r"t\.jsonl:1.*text_input"),
        ([{"session_id": "s", "input_length": 1}], r"t\.jsonl:1, output_length"),
        ([{"input_length": 1, "output_length": 1}], r"t\.jsonl:1, timestamp"),
        ([{"timestamp": 0, "input_length": 10**12, "output_length": 1}], r"t\.jsonl:1.*input_length"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named_with_its_line_and_field(tmp_path, lines, said):
    with pytest.raises(InvalidParameter, match=said):
        Trace.read(written(tmp_path / "t.jsonl", *lines))


def test_the_line_inside_of_a_conversation_that_is_no_json_is_named(tmp_path):
    text = json.dumps(weka(call(0, 8, [1]), call(1, 8, [1])), indent=1).splitlines()
    text[3] += " {"
    (tmp_path / "t.json").write_text("\n".join(text))
    with pytest.raises(InvalidParameter, match=r"t\.json:4"):
        Trace.read(tmp_path / "t.json")


@pytest.mark.parametrize("name", ["empty", "empty.jsonl"])
def test_a_folder_or_a_file_without_requests_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text("\n") if path.suffix else path.mkdir()
    with pytest.raises(InvalidParameter, match="at least one request"):
        Trace.read(path)
