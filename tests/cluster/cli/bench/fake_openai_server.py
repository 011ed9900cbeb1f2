"""A real HTTP server that speaks as much of OpenAI's API as a load generator needs, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web


class FakeOpenAIServer:
    """Streams one letter per token. Change the attributes between requests.

    fails: answers every second request with HTTP 500.
    sends_usage: the last chunk says how many tokens there were.
    breaks_off: ends the stream before its end. error: sends this error in the stream, in place of its end.
    hangs: never answers. stalls: never ends an answer. reasoning: a chat's first piece, if any.
    requests: (path, body) of every POST, in the order of their arrival. authorization: of the last one. sessions: of
    all that name one. cached_tokens: that the usage tells of each prompt; None if it tells of none.
    """

    def __init__(self) -> None:
        self.fails = self.breaks_off = self.hangs = self.stalls = False
        self.reasoning = ""
        self.sends_usage = True
        self.error: str | None = None
        self.models = ["fake"]
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.authorization: str | None = None
        self.sessions: list[str] = []
        self.cached_tokens: int | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runner, self.url = self._call(self._start())

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

    def close(self) -> None:
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _models(self, _: web.Request) -> web.Response:
        if not self.models:
            raise web.HTTPNotFound
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body))
        self.authorization = request.headers.get("Authorization")
        self.sessions += request.headers.getall("X-Session-Id", [])
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails and len(self.requests) % 2:
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body

        async def send(**fields: Any) -> None:
            await response.write(b"data: " + json.dumps(fields).encode() + b"\n\n")

        if chat:
            await send(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        if chat and self.reasoning:
            await send(choices=[{"index": 0, "delta": {"reasoning": self.reasoning}, "finish_reason": None}])
        for _ in range(body["max_tokens"]):
            text: dict[str, Any] = {"delta": {"content": "a"}} if chat else {"text": "a"}
            await send(choices=[{"index": 0, **text, "finish_reason": None}])
        if self.stalls:
            await asyncio.Event().wait()
        if self.error:
            await send(error={"message": self.error, "code": 500})
            return response
        if self.breaks_off:
            return response
        await send(choices=[{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": "length"}])
        if self.sends_usage:
            usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
            if self.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
            await send(choices=[], usage=usage)
        await response.write(b"data: [DONE]\n\n")
        return response
