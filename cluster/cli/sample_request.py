"""A first request to a server, as a command to copy."""

from __future__ import annotations

import json
import shlex
from typing import Any
from urllib.parse import urlsplit

from deployments.http.origin import LOCAL_HOSTS

QUESTION = "What is an ocean?"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {  # by a model's task: path, and the body without the model
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    "generate": ("/v1/completions", {"prompt": "An ocean is", "max_tokens": 20}),
    "embed": ("/v1/embeddings", {"input": QUESTION}),
    "classify": ("/classify", {"input": QUESTION}),
    "token_classify": ("/pooling", {"input": QUESTION, "task": "token_classify"}),
    "score": ("/v1/rerank", {"query": QUESTION, "documents": ["A lamp.", "A large sea."]}),
}


def curl(address: str, model: str, task: str, *, needs_key: bool) -> str:
    """Return a command with a request for a model, in lines that a terminal of 80 columns holds.

    task: as ServedModel.main_task. needs_key: whether the server admits only clients with a key.
    """
    path, rest = REQUESTS[task]
    url = urlsplit(address)
    # on this machine, where the certificate need not name the address, nobody else can answer
    insecure = " --insecure" if url.scheme == "https" and url.hostname in LOCAL_HOSTS else ""
    key = ' \\\n  -H "authorization: Bearer $MANTA_API_KEY"' if needs_key else ""
    body = f'{{"model": {json.dumps(model)},\n    {json.dumps(rest)[1:]}'
    start = f"curl{insecure} {shlex.quote(address + path)}{key}"
    return f"{start} \\\n  -H 'content-type: application/json' \\\n  -d {shlex.quote(body)}"
