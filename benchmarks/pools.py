"""100 mixed prompts from 32 clients, through pools of several layouts: `python -m benchmarks.pools [tcp|nixl ...]`.

A real `serve run` for each layout and transport, with a model of one replica that computes its prompts itself beside;
float32, greedy. Prints for each how many texts are those of that replica, how many prompts the prefill pool computed,
and how much KV travelled.
"""

from __future__ import annotations

import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.models import make_model
from tests.serve.serve_run import ServeRun, wait_until

PROMPTS, CLIENTS, TOKENS = 100, 32, 20
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "num_gpu_blocks_override": 2048,
    "max_num_batched_tokens": 256,
}
LAYOUTS = {  # replicas and ranks of prefill, then of decode
    "1P + 1D": (1, 1, 1, 1),
    "2P + 2D": (2, 1, 2, 1),
    "1P (TP2) + 1D": (1, 2, 1, 1),
    "1P + 1D (TP2)": (1, 1, 1, 2),
}


def prompts() -> list[str]:
    """Return prompts of one word to some hundred tokens; every fourth begins as another does."""
    chance = random.Random(0)
    words = ["key", "value", "block", "pool", "lease", "token", "chunk", "cache", "prefill", "decode"]
    texts = [" ".join(chance.choices(words, k=chance.choice((1, 3, 16, 40, 90)))) for _ in range(PROMPTS)]
    return [texts[i - 1] + " " + text if i % 4 == 3 else text for i, text in enumerate(texts)]


def pool(replicas: int, ranks: int) -> dict[str, Any]:
    return {"num_replicas": replicas, "num_cpus": 0.1, "engine": {"tensor_parallel_size": ranks}}


def ask_all(server: ServeRun, model: str) -> list[str]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0) as client:

        def ask(prompt: str) -> str:
            answer = client.completions.create(
                model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
            )
            return answer.choices[0].text

        with ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(ask, prompts()))


def metric(server: ServeRun, name: str, *labels: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


def run(folder: Path, transport: str, name: str) -> None:
    p_replicas, p_ranks, d_replicas, d_ranks = LAYOUTS[name]
    one = {"name": "one", "model": str(folder), "engine": ENGINE, "decode": {"num_cpus": 0.1}}
    apart = {
        "name": "apart",
        "model": str(folder),
        "engine": ENGINE,
        "prefill": pool(p_replicas, p_ranks),
        "decode": pool(d_replicas, d_ranks),
        "handoff": {"transport": transport, "policy": "always"},
    }
    with tempfile.TemporaryDirectory() as config, ServeRun(Path(config), {"models": [one, apart]}) as server:
        for _ in range(d_replicas):
            server.wait_for_line("prefill engine prefill-apart-", timeout_s=300)
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=5).status_code == 200)
        expected = ask_all(server, "one")
        before = metric(server, "manta_handoffs_total", 'result="received"')
        answers = ask_all(server, "apart")
        same = sum(a == b for a, b in zip(answers, expected, strict=True))
        remote = metric(server, "manta_handoffs_total", 'result="received"') - before
        failed = metric(server, "manta_handoffs_total", 'result="failed"')
        bytes_ = metric(server, "manta_handoff_bytes_total", f'transport="{transport}"')
        print(
            f"| {name} | {transport} | {same} of {PROMPTS} | {remote:.0f} | {failed:.0f} | {bytes_ / 2**20:.1f} |",
            flush=True,
        )


def main() -> None:
    print("| pools | transport | same text | prompts computed by prefill | failed | MiB moved |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), "llama", tokenizer=True, max_position_embeddings=2048)
        for transport in sys.argv[1:] or ["tcp", "nixl"]:
            for name in LAYOUTS:
                run(model, transport, name)


if __name__ == "__main__":
    main()
