from __future__ import annotations

from dataclasses import replace

import pytest

from tests.deployments.openai.bad_requests import BAD, CHAT, COMPLETIONS


async def test_every_bad_request_is_refused_in_one_shape_before_the_engine_sees_it(api):
    for bad in BAD:
        bad.check(await api.client.send(bad.request("http://fake")))
    assert not api.engine.added
    good = await api.post("completions", prompt="a", max_tokens=1)
    assert good.status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bad_request_for_a_stream_is_refused_with_its_status_before_the_stream_begins(path, api):
    for bad in BAD:
        if bad.path != path or not isinstance(bad.body, dict) or bad.param == "stream_options":
            continue
        streamed = replace(bad, body={"stream": True, **bad.body})
        bad.check(await api.client.send(streamed.request("http://fake")))
    assert not api.engine.added
