"""Anthropic's client against a real `serve run`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import anthropic  # its import takes two seconds, in each process that collects

pytestmark = pytest.mark.serve

ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 20,
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def client(server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=60, max_retries=0) as client:
        yield client


def test_message_and_its_stream_are_the_same_and_its_prompt_was_counted(client):
    message = client.messages.create(**ASK)
    assert message.usage.output_tokens == 20 and message.stop_reason == "max_tokens"
    with client.messages.stream(**ASK) as stream:
        parts = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(parts) == streamed.content[0].text == message.content[0].text and len(parts) > 5
    usage = streamed.usage
    counted = client.messages.count_tokens(model="tiny", messages=ASK["messages"])
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_error_names_the_request_that_serve_gave_an_id(client):
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASK, "model": "other"})
    assert caught.value.request_id and caught.value.body["request_id"] == caught.value.request_id
