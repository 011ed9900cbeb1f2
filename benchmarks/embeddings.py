"""Embeddings per second of a small encoder, against sentence-transformers and fastembed.

    python -m venv peer && peer/bin/pip install torch==2.13.0 sentence-transformers fastembed onnx
    python -m benchmarks.embeddings --peer peer/bin/python

The model has the shape of all-MiniLM-L6 and random weights; a text has 128 tokens, two of them special, which is the
worst case for an engine without padding: `--tokens 16-256` gives texts of mixed lengths. Each engine has a process of
its own and makes all embeddings once in every round, in turn, so that what else the machine does hits all alike.
Tokenizing is part of it. With one thread, time of the CPU says most on a busy machine: several threads also spin while
they wait for each other. Ratios are of medians. Without `--peer` only this engine is measured; `--http` adds a server
of its own, which is asked for all embeddings of a round at once. Its CPU time is that of all its processes.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import run

VOCABULARY, MAX_TOKENS = 30522, 256
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
Embed = Callable[[list[str]], Any]
Engine = tuple[Embed, Callable[[], float]]
"""What makes embeddings, and the seconds of CPU time that it has taken."""


def main(
    peer: Annotated[str | None, typer.Option(help="Python of an environment with the peers.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; fastembed stays with float32.")] = "float32",
    texts: Annotated[int, typer.Option(help="Texts per round.")] = 256,
    tokens: Annotated[str, typer.Option(help="Tokens of a text: a number, or two as in 16-256.")] = "128",
    rounds: Annotated[int, typer.Option(help="Rounds after the one that warms up.")] = 7,
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 2,
    http: Annotated[bool, typer.Option("--http", help="Also measure the server, over HTTP.")] = False,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if worker:
        with ENGINES[worker](Path(folder), dtype, threads) as (embed, cpu_seconds):
            serve(embed, cpu_seconds, make_texts(texts, tokens))
        return
    names = ["manta", *(["manta-http"] if http else []), *(["sentence-transformers", "fastembed"] if peer else [])]
    with tempfile.TemporaryDirectory() as made:
        make_model(Path(made))
        workers = {}
        options = [
            f"--{k}={v}" for k, v in (("dtype", dtype), ("texts", texts), ("tokens", tokens), ("threads", threads))
        ]
        for name in names:
            python = sys.executable if name.startswith("manta") else str(peer)
            command = [python, "-m", "benchmarks.embeddings", f"--worker={name}", f"--folder={made}", *options]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            workers[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            answer(workers[name])  # loaded, and warm
        rates: dict[str, list[float]] = {name: [] for name in names}
        cpu_rates: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, process in workers.items():
                taken = answer(process)
                rates[name].append(texts / taken["seconds"])
                cpu_rates[name].append(texts / taken["cpu_seconds"])
        own = answer(workers["manta"], "vectors")["vectors"]
        print(f"{texts} texts of {tokens} tokens, {dtype}, {threads} threads, {rounds} rounds")
        print("| engine | texts/s, median | best | manta against it | by CPU time | largest difference |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, process in workers.items():
            rate, cpu_rate = statistics.median(rates[name]), statistics.median(cpu_rates[name])
            difference = np.abs(np.array(own) - np.array(answer(process, "vectors")["vectors"])).max()
            ratio = statistics.median(rates["manta"]) / rate
            cpu_ratio = statistics.median(cpu_rates["manta"]) / cpu_rate
            print(
                f"| {name} | {rate:.0f} | {max(rates[name]):.0f} | {ratio:.2f} | {cpu_ratio:.2f} | {difference:.1e} |"
            )
        for process in workers.values():
            process.communicate()


def answer(process: subprocess.Popen[str], what: str = "round") -> dict[str, Any]:
    """Ask a worker, and wait for its answer."""
    assert process.stdin and process.stdout
    print(what, file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a worker has ended; its own error stands above")
    return json.loads(line)


def serve(embed: Embed, cpu_seconds: Callable[[], float], texts: list[str]) -> None:
    """A worker: make all embeddings whenever the parent asks."""
    for line in sys.stdin:
        if line == "vectors\n":
            print(json.dumps({"vectors": np.array(embed(texts[:8])).tolist()}), flush=True)
            continue
        started, cpu_started = time.perf_counter(), cpu_seconds()
        embed(texts)
        taken = {"seconds": time.perf_counter() - started, "cpu_seconds": cpu_seconds() - cpu_started}
        print(json.dumps(taken), flush=True)


@contextmanager
def open_manta(folder: Path, dtype: str, threads: int) -> Iterator[Engine]:
    from engine import LLM

    with LLM(str(folder), dtype=dtype, num_threads=threads, device="cpu") as llm:
        yield lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)], time.process_time


@contextmanager
def open_manta_http(folder: Path, dtype: str, threads: int) -> Iterator[Engine]:
    import openai

    from tests.serve.serve_run import ServeRun

    engine = {"dtype": dtype, "device": "cpu", "num_threads": threads}
    model = {"name": "random", "model": str(folder), "engine": engine, "decode": {"num_cpus": 1}}
    with ServeRun(folder, {"models": [model]}) as server:
        server.wait_until_healthy()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
        yield (
            lambda texts: [e.embedding for e in client.embeddings.create(model="random", input=texts).data],
            lambda: time.process_time() + sum(sum(p.cpu_times()[:2]) for p in server.processes()),
        )


@contextmanager
def open_sentence_transformers(folder: Path, dtype: str, threads: int) -> Iterator[Engine]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    yield lambda texts: model.encode(texts, show_progress_bar=False).astype(np.float32), time.process_time


@contextmanager
def open_fastembed(folder: Path, dtype: str, threads: int) -> Iterator[Engine]:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    export_onnx(folder)
    TextEmbedding.add_custom_model(
        model="random",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="none/none"),
        dim=SHAPE["hidden_size"],
        model_file="model.onnx",
    )
    model = TextEmbedding("random", specific_model_path=str(folder), threads=threads)
    yield lambda texts: list(model.embed(texts, batch_size=32)), time.process_time  # larger ones are slower on a CPU


def export_onnx(folder: Path) -> None:
    import torch
    from transformers import BertModel

    class HiddenStates(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel.from_pretrained(folder, attn_implementation="eager").eval()

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
    torch.onnx.export(
        HiddenStates(), example, str(folder / "model.onnx"), input_names=names, output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in [*names, "last_hidden_state"]}, dynamo=False,
    )  # fmt: skip


ENGINES: dict[str, Callable[[Path, str, int], AbstractContextManager[Engine]]] = {
    "manta": open_manta,
    "manta-http": open_manta_http,
    "sentence-transformers": open_sentence_transformers,
    "fastembed": open_fastembed,
}


def make_texts(count: int, tokens: str) -> list[str]:
    """tokens: of each text, or the fewest and the most, `16-256`, between which all numbers are equally likely."""
    numbers = random.Random(0)
    fewest, _, most = tokens.partition("-")
    lengths = [numbers.randint(int(fewest), int(most or fewest)) - 2 for _ in range(count)]
    return [" ".join(f"w{numbers.randrange(VOCABULARY - 5)}" for _ in range(length)) for length in lengths]


def make_model(folder: Path) -> None:
    """Write a model with random weights as sentence-transformers keeps it; each word is one token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=512, **SHAPE)
    transformers.BertModel(config).eval().save_pretrained(folder)
    words = [*SPECIAL, *(f"w{i}" for i in range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, **special
    ).save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps(special))  # which fastembed reads
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules.items())
    ]
    files: dict[str, Any] = {
        "modules.json": entries,
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS},
        "1_Pooling/config.json": {"word_embedding_dimension": SHAPE["hidden_size"], "pooling_mode_mean_tokens": True},
    }
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))


if __name__ == "__main__":
    run(main)
