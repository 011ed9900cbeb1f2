"""`manta serve` with a certificate: HTTPS by HAProxy, and behind it."""

from __future__ import annotations

import ssl
import sys

import httpx
import openai
import pytest

from tests.certificate import Certificate
from tests.serve.serve_run import ServeRun

pytestmark = pytest.mark.serve


@pytest.mark.slow
def test_client_that_trusts_the_certificate_is_answered_over_https_and_nobody_without(tmp_path, model_folder):
    if sys.platform != "linux":
        pytest.skip("Ray brings HAProxy for Linux only")
    made = Certificate.make(tmp_path)
    options = {"ssl_certfile": str(made.certfile), "ssl_keyfile": str(made.keyfile)}
    args = {"models": [{"name": "tiny", "model": str(model_folder)}]}
    with ServeRun(tmp_path, args, manta=True, http_options=options) as server:
        assert f"address=https://127.0.0.1:{server.port}" in server.wait_for_line("ready address=")
        trusting = httpx.Client(verify=ssl.create_default_context(cafile=str(made.certfile)))
        url = f"https://localhost:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=trusting) as client:
            stream = client.completions.create(model="tiny", prompt="a b c", max_tokens=5, stream=True)
            assert len([chunk for chunk in stream if chunk.choices[0].text]) > 1
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{server.url}/health")
