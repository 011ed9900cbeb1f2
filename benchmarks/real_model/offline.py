"""What needs no server: perplexity, drafts, and whether a chat depends on the chats beside it."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.real_model.texts import THING, descriptions, documentation, edits, questions, summaries, user
from engine.errors import EngineError
from engine.model.checkpoint.folder import weight_files
from engine.model.checkpoint.resolve import resolve
from engine.offline.llm import LLM
from engine.offline.outputs import RequestOutput
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tools.gguf_numbers import write_numbers

Row = tuple[str, ...]
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**30, "seed": 0}
WINDOW = 512  # tokens of a text whose perplexity is measured at a time
DRAFT_TOKENS = 96  # of an answer
CHAT_TOKENS = 16
BATCH, CHUNK, BLOCK_SIZE = 64, 40, 16


def perplexities(model: str, tokens: int) -> Iterator[Row]:
    """How well the model, in each form, knows `tokens` tokens of documentation, in windows.

    model: a GGUF file, whose numbers are those of all forms, or a checkpoint that is not quantized.
    """
    first, source = None, resolve(model)
    is_gguf = "gguf" in weight_files(source)[0].name
    with tempfile.TemporaryDirectory() as folder:
        if is_gguf:
            write_numbers(source, Path(folder))
        numbers = folder if is_gguf else model
        for form, name, options in (
            ("float32", numbers, {"dtype": "float32"}),
            ("bfloat16", numbers, {"dtype": "bfloat16"}),
            ("GGUF, kept packed", model, {}),
            ("int8", numbers, {"quantization": "int8"}),
            ("int4", numbers, {"quantization": "int4"}),
            ("bfloat16, KV in FP8", numbers, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
            ("GGUF, kept packed, KV in FP8", model, {"kv_cache_dtype": "fp8"}),
        ):
            if form.startswith("GGUF") and not is_gguf:
                continue
            with LLM(name, **OPTIONS | {"enable_prefix_caching": False} | options) as llm:
                found, best = perplexity(llm, tokens)
            first = first or found
            yield form, f"{found:.3f}", f"{found / first - 1:+.2%}", f"{best:.1%}"


def perplexity(llm: LLM, tokens: int) -> tuple[float, float]:
    """Return the perplexity, and the share of tokens that are the likeliest in their place."""
    ids = [token for text in documentation() for token in llm.tokenizer.encode(text)][:tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)]
    answers = llm.generate(windows, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = [next(iter(entry.values())) for answer in answers for entry in answer.prompt_logprobs or [] if entry]
    loss = -sum(entry.logprob for entry in found) / len(found)
    return math.exp(loss), sum(entry.rank == 1 for entry in found) / len(found)


def drafts(model: str, number: int) -> Iterator[Row]:
    """Each answer by an engine without drafts and by others with them, in turns, one stream at a time."""
    schema = StructuredOutputsParams(json=THING)
    tasks: tuple[tuple[str, list[str], StructuredOutputsParams | None], ...] = (
        ("summarise", summaries(number), None),
        ("edit code", edits(number), None),
        ("JSON, free", descriptions()[:number], None),
        ("JSON by its schema", descriptions()[:number], schema),
        ("chat", questions(10 * number)[::10], None),
    )
    engines = {"": LLM(model, **OPTIONS)}
    engines |= {method: LLM(model, **OPTIONS, speculative_config={"method": method}) for method in ("ngram", "suffix")}
    for task, texts, grammar in tasks:
        params = SamplingParams(temperature=0.0, max_tokens=DRAFT_TOKENS, structured_outputs=grammar)
        before = {method: llm.stats() for method, llm in engines.items()}
        found = [{method: answer(llm, text, params) for method, llm in engines.items()} for text in texts]
        for method, llm in engines.items():
            verified, earlier = llm.stats().record(SpecDecodeStats), before[method].record(SpecDecodeStats)
            if verified is None or earlier is None:
                continue
            assert all(tokens_of(outputs[method]) == tokens_of(outputs[""]) for outputs in found)
            tokens = sum(len(tokens_of(outputs[method])) for outputs in found)
            drafted = verified.num_draft_tokens - earlier.num_draft_tokens
            held = verified.num_accepted_tokens - earlier.num_accepted_tokens
            quotients = [decode_s(outputs[""]) / decode_s(outputs[method]) for outputs in found]
            low, middle, high = statistics.quantiles(quotients, n=4)
            shares = f"{held / drafted:.0%}" if drafted else "", f"{held / tokens:.0%}"
            yield task, method, str(tokens), str(drafted), *shares, f"{middle:.2f} ({low:.2f} to {high:.2f})"
    for llm in engines.values():
        llm.close()


def answer(llm: LLM, text: str, params: SamplingParams) -> RequestOutput:
    (output,) = llm.chat(user(text), params, use_tqdm=False)
    return output


def decode_s(output: RequestOutput) -> float:
    times = output.outputs[0].times
    assert times is not None
    return times.finished_s - times.first_token_s


def chats(model: str, number: int) -> Iterator[Row]:
    """Chats alone, one after the other, and the same ones beside others: how many have another text."""
    asked = [user(text) for text in questions(number)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=CHAT_TOKENS) for i in range(number)]

    def among_others(**options: Any) -> list[RequestOutput]:
        with LLM(model, **OPTIONS | {"max_num_seqs": BATCH} | options) as llm:
            return llm.chat(asked, params, use_tqdm=False)

    def compared(name: str, outputs: list[RequestOutput], begun: bool = False) -> Row:
        wanted = [tokens[len(tokens) // 2 if begun else 0 :] for tokens in alone]
        others = sum(tokens_of(output) != tokens for output, tokens in zip(outputs, wanted, strict=True))
        return name, str(number), str(others), str(sum(map(len, wanted)))

    with LLM(model, **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [tokens_of(llm.chat(chat, own, use_tqdm=False)[0]) for chat, own in zip(asked, params, strict=True)]
        prompts = [llm.tokenizer.apply_chat_template(chat) for chat in asked]
        yield "alone", str(number), "", str(sum(map(len, alone)))
        # as when another engine goes on with them
        begun = [[*prompt, *tokens[: len(tokens) // 2]] for prompt, tokens in zip(prompts, alone, strict=True)]
        rest = [msgspec.structs.replace(own, max_tokens=CHAT_TOKENS - len(tokens) // 2)
                for own, tokens in zip(params, alone, strict=True)]  # fmt: skip
        yield compared("replayed from their middle", llm.generate(begun, rest, use_tqdm=False), begun=True)
    yield compared(f"in batches of {BATCH}, prefixes cached", among_others())
    blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts[:CHUNK])  # none is left for their answers
    outputs = among_others(
        num_gpu_blocks_override=blocks, kv_cache_memory_bytes=None, max_num_seqs=CHUNK, max_num_batched_tokens=CHUNK
    )
    preempted = sum(output.outputs[0].num_preemptions > 0 for output in outputs)
    yield compared(f"in steps of {CHUNK} tokens; {preempted} preempted", outputs)
    yield compared("with drafts (suffix)", among_others(speculative_config={"method": "suffix"}))


def tokens_of(output: RequestOutput) -> list[int]:
    """Raises EngineError for a request that failed."""
    (own,) = output.outputs
    if own.error is not None:
        raise EngineError(output.request_id, own.error)
    return own.token_ids
