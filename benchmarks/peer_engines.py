"""The engines that benchmarks.peers compares, each in a process of its own with the Python it is installed in. Nothing
but the standard library is imported before the engine is chosen.

A process reads a line of JSON for each repetition, and answers with a line: what to do is a `Load` of peers.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

FIRST_ID, LAST_ID = 10, 31000  # of prompts: valid for the models of both shapes, and no special tokens
EOS = 2
CONTEXT = 4096
KV_GIB = 2
TEMPERATURE = 0.6
STREAM_ID = 1 << 20
SLOTS = 64  # sequences that llama.cpp's server decodes at a time
REQUEST_S = 600.0
OPTIONS = "MANTA_PEER_OPTIONS"

Request = tuple[list[int], int, float]  # prompt, tokens to answer with, temperature


class Engine(Protocol):
    def answer(self, requests: list[Request]) -> list[list[int]]:
        """Return the tokens of all answers."""

    def stream(self, request: Request) -> list[float]:
        """Return when each token came, in seconds from the request."""


class Manta:
    """With further options of `LLM` from the environment variable OPTIONS, in JSON."""

    def __init__(self, model: str, threads: int):
        from engine import LLM, SamplingParams

        given = json.loads(os.environ.get(OPTIONS, "{}"))
        self._llm = LLM(
            model, dtype="bfloat16", num_threads=threads, device="cpu", max_model_len=CONTEXT,
            kv_cache_memory_bytes=KV_GIB * 2**30, **given,
        )  # fmt: skip
        self._params = SamplingParams

    def answer(self, requests: list[Request]) -> list[list[int]]:
        params = [self._params(temperature=t, max_tokens=count, ignore_eos=True) for _, count, t in requests]
        outputs = self._llm.generate([prompt for prompt, _, _ in requests], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def stream(self, request: Request) -> list[float]:
        prompt, count, temperature = request
        params = self._params(temperature=temperature, max_tokens=count, ignore_eos=True)
        times = self._llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].times
        assert times is not None
        pace = (times.finished_s - times.first_token_s) / (count - 1)
        return [times.first_token_s + pace * i for i in range(count)]


class Vllm:
    """vLLM with torch.compile, its faster mode on a CPU."""

    def __init__(self, model: str, threads: int):
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(KV_GIB), VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS=str(threads),
        )  # fmt: skip
        import vllm

        self._llm = vllm.LLM(model=model, dtype="bfloat16", max_model_len=CONTEXT, seed=0)
        self._params, self._streams = vllm.SamplingParams, 0

    def answer(self, requests: list[Request]) -> list[list[int]]:
        params = [self._params_of(request) for request in requests]
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
        return [list(output.outputs[0].token_ids) for output in self._llm.generate(prompts, params, use_tqdm=False)]

    def stream(self, request: Request) -> list[float]:
        engine, started, times = self._llm.llm_engine, time.perf_counter(), list[float]()
        self._streams += 1
        engine.add_request(f"stream-{self._streams}", {"prompt_token_ids": request[0]}, self._params_of(request))
        while engine.has_unfinished_requests():
            for output in engine.step():
                new = len(output.outputs[0].token_ids) - len(times)
                times += [time.perf_counter() - started] * new
        return times

    def _params_of(self, request: Request) -> Any:
        _, count, temperature = request
        return self._params(max_tokens=count, temperature=temperature, ignore_eos=True, detokenize=False)


class OpenVino:
    """OpenVINO GenAI's continuous batching of the converted model, which lies beside the other as ov-NAME."""

    def __init__(self, model: str, threads: int):
        import numpy
        import openvino
        import openvino_genai

        self._genai, self._streams = openvino_genai, STREAM_ID
        self._tensor = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = KV_GIB, 2048, 256
        scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
        }  # fmt: skip
        converted = Path(model).with_name(f"ov-{Path(model).name}")
        self._pipe = openvino_genai.ContinuousBatchingPipeline(str(converted), scheduler, "CPU", properties)

    def answer(self, requests: list[Request]) -> list[list[int]]:
        prompts, params = [self._tensor(r[0]) for r in requests], [self._params_of(r) for r in requests]
        return [list(result.m_generation_ids[0]) for result in self._pipe.generate(prompts, params)]

    def stream(self, request: Request) -> list[float]:
        started, times = time.perf_counter(), []
        self._streams += 1
        handle = self._pipe.add_request(self._streams, self._tensor(request[0]), self._params_of(request))
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            if handle.can_read():
                new = sum(len(output.generated_ids) for output in handle.read().values())
                times += [time.perf_counter() - started] * new
        return times

    def _params_of(self, request: Request) -> Any:
        config = self._genai.GenerationConfig()
        _, config.max_new_tokens, temperature = request
        config.ignore_eos, config.eos_token_id, config.apply_chat_template = True, EOS, False
        config.do_sample = temperature > 0
        if config.do_sample:
            config.temperature = temperature
        return config


class LlamaCpp:
    """llama.cpp's server, as the package xllamacpp has it, asked over HTTP. The model is a GGUF file, or has one beside
    it, NAME.gguf."""

    def __init__(self, model: str, threads: int):
        import xllamacpp

        file = Path(model)
        params = xllamacpp.CommonParams()
        params.model.path = str(file if file.suffix == ".gguf" else file.with_name(f"{file.name}.gguf"))
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_parallel, params.n_ctx, params.kv_unified = SLOTS, SLOTS * CONTEXT // 4, True
        params.n_gpu_layers = params.verbosity = 0
        self._server = xllamacpp.Server(params)
        self._url = f"{self._server.listening_address}/completion"

    def answer(self, requests: list[Request]) -> list[list[int]]:
        with ThreadPoolExecutor(len(requests)) as clients:
            return list(clients.map(self._tokens, requests))

    def stream(self, request: Request) -> list[float]:
        started, times = time.perf_counter(), []
        with self._ask(request, stream=True) as events:
            for line in events:
                if line.startswith(b"data: "):
                    tokens = json.loads(line[6:]).get("tokens", [])
                    times += [time.perf_counter() - started] * len(tokens)
        return times

    def _tokens(self, request: Request) -> list[int]:
        with self._ask(request, stream=False) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def _ask(self, request: Request, *, stream: bool) -> Any:
        prompt, count, temperature = request
        body = {
            "prompt": prompt, "n_predict": count, "temperature": temperature, "ignore_eos": True, "stream": stream,
            "return_tokens": True, "cache_prompt": True,
        }  # fmt: skip
        sent = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return urllib.request.urlopen(sent, timeout=REQUEST_S)


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "manta": Manta, "vllm": Vllm, "openvino": OpenVino, "llamacpp": LlamaCpp,
}  # fmt: skip


def measure(engine: Engine, load: dict[str, Any], repetition: int) -> dict[str, float]:
    """Run a load once; its token ids depend on its name and the repetition only."""
    rng = random.Random(f"{load['name']}-{repetition}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]

    def between(bounds: list[int]) -> int:
        """A length, all orders of magnitude equally likely."""
        return round(bounds[0] * (bounds[1] / bounds[0]) ** rng.random())

    prefixes = [ids(load["prefix"]) for _ in range(load["prefixes"])]
    histories = [prefixes[i * len(prefixes) // load["requests"]] for i in range(load["requests"])]
    if load["stream"]:
        times = engine.stream((ids(load["input"][0]), load["output"][0], 0.0))
        return {"first": 1e3 * times[0], "each": 1e3 * (times[-1] - times[0]) / (len(times) - 1)}
    asked = answered = 0
    started = time.perf_counter()
    for _ in range(load["turns"]):
        temperature = TEMPERATURE if load["sampled"] else 0.0
        prompts = [history + ids(between(load["input"])) for history in histories]
        requests = [(prompt, between(load["output"]), temperature) for prompt in prompts]
        answers = engine.answer(requests)
        counts = [len(answer) for answer in answers]
        assert counts == [count for _, count, _ in requests], "answers of the wrong length"
        histories = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        asked, answered = asked + sum(map(len, prompts)), answered + sum(counts)
    seconds = time.perf_counter() - started
    return {"prompt": asked / seconds, "output": answered / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")  # what engines print goes elsewhere
    os.dup2(2, 1)
    engine = ENGINES[args.engine](args.model, args.threads)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(measure(engine, asked["load"], asked["repetition"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
