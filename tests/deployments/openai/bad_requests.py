"""Requests that no server may accept, and the response to each. The servers' models have a context of 512 tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}
TYPES = {  # of errors by status; of all others it is TYPE
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    **dict.fromkeys((502, 503), "service_unavailable_error"),
    504: "timeout_error",
}
TYPE = "invalid_request_error"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Bad:
    path: str
    body: Any
    """JSON, or bytes that are sent as they are."""
    param: str | None = None
    """The field that the response must name."""
    status: int = 400
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: JSON)

    def __str__(self) -> str:
        shown = self.body if isinstance(self.body, bytes) else json.dumps(self.body)
        return f"{self.method} {self.path} {shown[:60]!r}"

    def request(self, base_url: str) -> httpx.Request:
        content = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return httpx.Request(self.method, base_url + self.path, content=content, headers=self.headers)

    def check(self, response: httpx.Response) -> None:
        """Check the status, and the body: all errors have the same shape."""
        assert response.status_code == self.status, (str(self), response.status_code, response.text)
        assert response.headers["content-type"] == "application/json", str(self)
        assert set(response.json()) == {"error"}, (str(self), response.text)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, (str(self), error)
        assert (error["type"], error["param"]) == (TYPES.get(self.status, TYPE), self.param), (str(self), error)
        assert self.param is None or self.param in error["message"], (str(self), error)
        assert 0 < len(error["message"]) < 600 and error["code"], (str(self), error)
        for leak in ("Traceback", ".py", "/home", "/root", "site-packages", "pydantic"):
            assert leak not in response.text, (str(self), error)


def completion(param: str | None = None, *, prompt: Any = "a", **fields: Any) -> Bad:
    return Bad(COMPLETIONS, {"prompt": prompt, **fields}, param)


def chat(param: str | None = None, *, messages: Any = HELLO, **fields: Any) -> Bad:
    return Bad(CHAT, {"messages": messages, **fields}, param)


PROMPTS = [
    Bad(COMPLETIONS, {}, "prompt"),
    *(completion("prompt", prompt=prompt) for prompt in ("", [], ["a", ""], [[]], [[1], []], 5, {}, True, 1.5)),
    *(completion("prompt", prompt=prompt) for prompt in ([99999], [-1], [5, 99999], [2**70], [1, "a"], [[1], ["a"]])),
    *(completion("prompt", prompt=[5] * length) for length in (512, 513, 5000)),
    completion("prompt", prompt="a b " * 4000),
    completion("prompt", prompt=["a", "a b " * 4000]),
    completion("prompt", prompt=None),
]
NUMBERS = [
    *(completion("max_tokens", max_tokens=value) for value in (0, -1, "abc", 1.5, 513, 2**70, True, [], {})),
    *(chat("max_tokens", max_tokens=value) for value in (0, -1, 513)),
    *(chat("max_completion_tokens", max_completion_tokens=value) for value in (0, "a")),
    *(completion("min_tokens", min_tokens=value) for value in (-1, 17, 2**40, "a")),
    *(completion("temperature", temperature=value) for value in (-1, "hot", 1e400, [])),
    *(completion("top_p", top_p=value) for value in (0, -0.1, 1.5, "a")),
    *(completion("top_k", top_k=value) for value in (-5, 1.5, 2**40)),
    *(completion("min_p", min_p=value) for value in (-0.1, 1.1)),
    *(completion("presence_penalty", presence_penalty=value) for value in (3, -2.1)),
    *(completion("frequency_penalty", frequency_penalty=value) for value in (3, -2.1)),
    *(completion("repetition_penalty", repetition_penalty=value) for value in (0, -1)),
    *(completion("n", n=value) for value in (0, -1, 20000, "two", 2**70)),
    completion("n", prompt=["a"] * 100, n=100),
    *(completion("seed", seed=value) for value in (2**70, -(2**63) - 1, 1.5)),
    *(completion("logprobs", logprobs=value) for value in (21, -2, "a")),
    *(completion("prompt_logprobs", prompt_logprobs=value) for value in (21, -2)),
    completion("suffix", suffix="the end"),
    completion("priority", priority=5),
    Bad(COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "temperature"),
    Bad(COMPLETIONS, b'{"prompt": "a", "top_p": Infinity}', "top_p"),
    Bad(COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "seed"),
    Bad(COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"),
]
LISTS = [
    *(completion("stop", stop=value) for value in ([""], ["a"] * 17, 5, [5], {})),
    *(completion("stop_token_ids", stop_token_ids=value) for value in ([-1], [99999], "a")),
    *(completion("bad_words", bad_words=value) for value in ([""], [1], ["a"] * 1001, ["a" * 1001])),
    *(completion("allowed_token_ids", allowed_token_ids=value) for value in ([], [99999])),
    *(completion("logit_bias", logit_bias=value) for value in ({"x": 1}, {"99999": 1}, {"-1": 1}, {"5": "a"}, [5])),
    completion("logit_bias", logit_bias={"9" * 5000: 1}),
    completion("logit_bias[5]", logit_bias={"5": 101}),
]
CHATS = [
    Bad(CHAT, {}, "messages"),
    *(chat("messages", messages=messages) for messages in ([], "hello", [5], [{}], {})),
    chat("messages", messages=[{"role": "alien", "content": "a"}]),
    chat("messages", messages=[{"role": "user", "content": 5}]),
    chat("messages", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]),
    chat("messages", messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "a"}}]}]),
    chat("messages", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    chat("messages", messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
    chat("prompt", messages=[{"role": "user", "content": "a b " * 4000}]),
    *(chat("messages", messages=[{**HELLO[0], name: {"id": "a"}}]) for name in ("audio", "function_call")),
    chat("messages", messages=[{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}]),
    chat("messages", messages=[{"role": "user", "content": [{"type": "thought", "text": "no"}]}]),
    chat("thinking", thinking={"type": "often"}),
    chat("documents", documents=["a"]),
    chat("top_logprobs", top_logprobs=1),
    *(chat("top_logprobs", logprobs=True, top_logprobs=value) for value in (21, -1, "a")),
    chat("logprobs", logprobs=3),
    chat("add_generation_prompt", continue_final_message=True),
    *(chat("chat_template_kwargs", chat_template_kwargs={name: "x"}) for name in ("messages", "chat_template", "self")),
    *(chat("tools", tools=value) for value in ("a", [{}], [TOOL] * 513)),
    *(chat("tool_choice", tools=[TOOL], tool_choice=value) for value in ("sometimes", 5)),
    chat("tool_choice", tool_choice="required"),
    *(chat("response_format", response_format=value) for value in ({"type": "yaml"}, "json", {})),
    chat("response_format", response_format={"type": "json_schema"}),
]
OFFICIAL = [  # fields of the official types without which the answer would be another
    chat("audio", audio={"voice": "alloy", "format": "wav"}),
    chat("modalities", modalities=["text", "audio"]),
    chat("functions", functions=[{"name": "f"}]),
    chat("function_call", function_call={"name": "f"}),
    chat("service_tier", service_tier="gold"),
    chat("reasoning_effort", reasoning_effort="very"),
]
BOTH = [
    *(completion("truncate_prompt_tokens", truncate_prompt_tokens=value) for value in (-2, 0, 2**31, "a")),
    completion("truncation_side", truncation_side="middle"),
    chat("chat_template", chat_template="{{ messages }}"),
    completion("session_id", session_id="a\nb"),
    completion("use_beam_search", use_beam_search=True),
    completion("stream_options", stream_options={"include_usage": True}),
    completion("stream_options", stream=True, stream_options={"no_such": True}),
    completion("prompt_logprobs", stream=True, prompt_logprobs=1),
    chat("prompt_logprobs", stream=True, prompt_logprobs=1),
    completion("stream", stream="yes"),
    completion("user", user=5),
    completion("request_id", request_id="a" * 200),
    *(Bad(COMPLETIONS, {"model": model, "prompt": "a"}, "model", status=404) for model in ("other", "a\nb", "é" * 500)),
    Bad(COMPLETIONS, {"model": 5, "prompt": "a"}, "model"),
]
PREDICTED = {"type": "content", "content": "a"}
PREDICTIONS = [
    *(chat("prediction", prediction=prediction) for prediction in ({"type": "content"}, {**PREDICTED, "content": [5]})),
    chat("prediction", prediction={**PREDICTED, "content": "ab " * 100_000}),
    *(
        chat(field, prediction=PREDICTED, **{field: value})
        for field, value in (
            ("n", 2), ("logprobs", True), ("presence_penalty", 0.5), ("frequency_penalty", 1), ("tools", [TOOL]),
            ("max_completion_tokens", 9),
        )
    ),
]  # fmt: skip
BODIES = [
    *(Bad(COMPLETIONS, raw) for raw in (b"", b"{", b"[]", b'"a"', b"5", b"null", b"\xff\xfe", b"\x00")),
    Bad(COMPLETIONS, b'{"prompt": "\xff"}'),
    Bad(COMPLETIONS, b'{"prompt": "\\ud800"}'),
    Bad(COMPLETIONS, b"[" * 100_000),
    *(
        Bad(COMPLETIONS, {"prompt": "a"}, status=415, headers=headers)
        for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"})
    ),
    Bad(COMPLETIONS, b'{"prompt": "' + b"a" * 17 * 2**20 + b'"}', status=413),
]
HEADERS = [
    *(
        Bad(COMPLETIONS, {"prompt": "a"}, "x-request-timeout-ms", headers={**JSON, "X-Request-Timeout-Ms": value})
        for value in ("0", "-1", "soon", "1.5", "1e3", "9" * 30, "5,0")
    ),
    Bad(COMPLETIONS, {"prompt": "a"}, "X-Request-Id", headers={**JSON, "X-Request-Id": "a" * 200}),
    Bad(COMPLETIONS, {"prompt": "a"}, "x-session-id", headers={**JSON, "X-Session-Id": "a" * 300}),
]
ROUTES = [
    *(
        Bad(path, b"", status=404, method="GET", headers={})
        for path in ("/nowhere", "/console", "/v1", "/v1/completions/x")
    ),
    Bad("/v1/models/a/b", b"", "model", status=404, method="GET", headers={}),
    Bad("/v1/audio/speech", {"input": "a"}, status=404),
    Bad(COMPLETIONS, b"", status=405, method="GET", headers={}),
    Bad("/v1/models", b"", status=405, method="DELETE", headers={}),
    Bad("/health", b"", status=405, method="PUT", headers={}),
]
TOKENIZING = [
    *(Bad(TOKENIZE, body, "prompt") for body in ({}, {"prompt": 5}, {"prompt": "a", "messages": HELLO})),
    Bad(TOKENIZE, {"messages": []}, "messages"),
    Bad(TOKENIZE, {"prompt": "a", "tools": [TOOL]}, "tools"),
    *(Bad(TOKENIZE, {"messages": HELLO, "tools": tools}, "tools") for tools in ([{}], ["a"])),
    Bad(TOKENIZE, {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
    Bad(TOKENIZE, {"prompt": "a", "model": "other"}, "model", status=404),
    *(Bad(DETOKENIZE, {"tokens": tokens}, "tokens") for tokens in ([99999], [-1], [2**70], ["a"], "a", None)),
]
BAD = PROMPTS + NUMBERS + LISTS + CHATS + OFFICIAL + PREDICTIONS + BOTH + BODIES + HEADERS + ROUTES + TOKENIZING
