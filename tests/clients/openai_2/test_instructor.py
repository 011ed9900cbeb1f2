from __future__ import annotations

import instructor
import openai
import pytest
from pydantic import BaseModel


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize("streamed", [False, True])
def test_answer_is_an_object(server, streamed):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        messages = [{"role": "user", "content": 'call Weather {"city": "Paris"}'}]
        request = {"model": "obedient", "messages": messages, "response_model": Weather}
        if streamed:
            *_, answer = client.chat.completions.create_partial(**request)
        else:
            answer = client.chat.completions.create(**request)
        assert answer.city == "Paris"
