"""Running requests that stop in one engine and go on in another: the client sees the tokens of one engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.lora.adapter_files import PIRATE, open_adapter
from engine.options.handoff import HandoffConfig
from engine.options.speculation import SpeculativeConfig
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.speculation.speculator import Speculator
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.images import PromptImages
from engine.wire.parts.speculation import Prediction
from engine.wire.remote_request import KVSource
from engine.wire.structured_outputs import StructuredOutputsParams
from engine.wire.token_delta import TokenLogprob
from tests.deltas import deltas_of
from tests.engine.kv_transfer.moving import Movers
from tests.fake_drafter import draft_always
from tests.models import make_model
from tests.products import in_turns, pairwise, slow
from tests.vision_models import MODELS, RECURRENT, Prompt, make_vision_model

RANDOM = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)
NUM_TOKENS = 160
SHORT = {"lease_s": 1.0, "heartbeat_s": 0.2, "accept_s": 1.0}  # waits of moves that fail
FAMILIES = ("gemma3", "qwen3_5", "deepseek_v3", "kimi_linear", "gpt_oss", "nemotron_h")


def prompt(length: int) -> list[int]:
    return [3 + 7 * i * i % 89 for i in range(length)]


def make_config(
    model: Path | str, moves: bool = True, waits: dict[str, float] | None = None, **options: Any
) -> EngineConfig:
    sizes = {
        "block_size": 16,
        "num_gpu_blocks_override": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
    }
    handoff = HandoffConfig(role="replica", transport="tcp", **(waits or {})) if moves else None
    return EngineConfig(**{"model": str(model), "dtype": "float32", **sizes, **options, "handoff": handoff})


def alone(config: EngineConfig, requests: list[GenerateRequest]) -> list[tuple[list[int], list[TokenLogprob]]]:
    """What one engine answers to each, one after the other."""
    core = build_engine(config)
    answers = []
    for request in requests:
        core.add(request)
        deltas = list(deltas_of(core, errors=True))
        entries = [entry for delta in deltas for entry in delta.logprobs or []]
        answers.append(([token for delta in deltas for token in delta.token_ids], entries))
    core.close()
    return answers


@pytest.fixture(scope="module", autouse=True)
def short_status_period() -> Iterator[None]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.05)
        yield
    torch.set_num_threads(before)


def start_all(movers: Movers, lengths=LENGTHS, **params: Any) -> None:
    for length in lengths:
        sampled = RANDOM if length % 2 else {}
        movers.start(f"{length}", prompt(length), **{"max_tokens": NUM_TOKENS, **sampled, **params})


def check(movers: Movers, config: EngineConfig) -> None:
    expected = alone(config, [stream.request for stream in movers.streams.values()])
    assert [(stream.tokens, stream.logprobs) for stream in movers.streams.values()] == expected
    movers.settle()


@pytest.mark.parametrize(
    ("family", "dtype"),
    pairwise(["llama"], ["float32", *slow(["bfloat16"])]) + in_turns(slow(FAMILIES), ["float32", "bfloat16"]),
)
def test_requests_go_on_with_the_same_bits_and_no_token_is_computed_twice(tmp_path, ranks, family, dtype):
    """There and back, so that tokens which came by a move move on, and find what they left behind in the cache."""
    folder = make_model(tmp_path, family)
    options = {
        "dtype": dtype,
        "num_gpu_blocks_override": 512,
    }  # room for a recurrent state at each border, also beside small KV
    with Movers(make_config(folder, **options), make_config(folder, **options), ranks) as movers:
        start_all(movers)
        computed = movers.prefill.scheduler.metrics.histograms["iteration_tokens_total"]
        for there, here in ((0, 1), (1, 0), (0, 1)):
            movers.leave(there, tokens=9)
            assert all(stream.last.records(KVSource) for stream in movers.streams.values()), "none comes without its KV"
            before, tokens = computed.sum, sum(len(stream.tokens) for stream in movers.streams.values())
            movers.arrive(here)
        movers.listen(1, movers.ended)
        tokens = sum(len(stream.tokens) for stream in movers.streams.values()) - tokens
        movers.settle()
        if family in ("llama", "gemma3", "deepseek_v3", "gpt_oss"):  # a recurrent state goes on from a border
            assert computed.sum - before == tokens - len(LENGTHS), "all but the token that came with the KV, once"
        for engine in movers.engines:
            assert (
                engine.scheduler.parts[Handoffs].moves["failed"]
                == engine.scheduler.parts[Handoffs].moves["expired"]
                == 0
            )
        check(movers, make_config(folder, moves=False, **options))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_but_the_engine_changes(ranks, monkeypatch, dtype):
    """Penalties, a grammar, drafts, log-probabilities, least and most tokens, a salt."""
    draft_always(monkeypatch)
    speculative = SpeculativeConfig(method="ngram")
    config = make_config("pocket", speculative_config=speculative, dtype=dtype)
    grammar = StructuredOutputsParams(regex="(?:ab|c|[d-z ]){400,600}")
    repeated = prompt(20) * 3
    with Movers(config, config, ranks) as movers:
        movers.start("penalties", prompt(40), max_tokens=150, repetition_penalty=1.8, presence_penalty=1.0)
        movers.start("grammar", prompt(30), max_tokens=None, structured_outputs=grammar, **RANDOM)
        movers.start("drafts", repeated, max_tokens=150, cache_salt="salt")
        movers.start("random drafts", repeated, max_tokens=150, **RANDOM)
        movers.start("expected", prompt(10), Prediction([5, 6, 7, 8] * 40), max_tokens=150)
        movers.start("no seed", prompt(12), max_tokens=150, temperature=1.0)
        movers.start("log-probabilities", prompt(14), max_tokens=150, logprobs=4, frequency_penalty=0.5)
        movers.start("bounds", prompt(33), max_tokens=150, min_tokens=140, ignore_eos=False, temperature=1.0, seed=1)
        movers.leave(0, tokens=4)
        movers.arrive(1)
        movers.listen(1, movers.ended)
        assert movers.prefill.scheduler.parts[Speculator].report().num_accepted_tokens > 0
        assert movers.prefill.scheduler.parts[Handoffs].moves == {"received": len(movers.streams)}
        check(movers, make_config("pocket", moves=False, dtype=dtype))


@pytest.mark.slow
def test_a_draft_model_goes_on_drafting_for_what_comes(ranks, monkeypatch):
    draft_always(monkeypatch)
    drafts = SpeculativeConfig(method="draft_model", model="pocket", num_speculative_tokens=3)
    config = make_config("pocket", speculative_config=drafts)
    with Movers(config, config, ranks) as movers:
        start_all(movers, lengths=(40, 64))
        movers.leave(0, tokens=4)
        movers.arrive(1)
        movers.listen(1, movers.ended)
        stats = movers.prefill.scheduler.parts[Speculator].report()
        assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 0
        check(movers, make_config("pocket", moves=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_keeps_its_adapter(ranks, dtype):
    config = make_config("pocket", enable_lora=True, dtype=dtype)
    pirate = ModelAdapter("pirate", str(PIRATE), open_adapter(PIRATE).digest)
    with Movers(config, config, ranks) as movers:
        movers.start("with", prompt(40), pirate, max_tokens=NUM_TOKENS)
        movers.start("random", prompt(40), pirate, max_tokens=NUM_TOKENS, **RANDOM)
        movers.start("without", prompt(40), max_tokens=NUM_TOKENS)
        movers.leave(0)
        movers.arrive(1)
        movers.listen(1, movers.ended)
        assert movers.prefill.scheduler.parts[Handoffs].moves == {"received": 3}
        check(movers, make_config("pocket", moves=False, enable_lora=True, dtype=dtype))
        assert movers.streams["with"].tokens != movers.streams["without"].tokens


@pytest.mark.slow
def test_a_request_whose_adapter_the_next_engine_cannot_read_ends_there_with_the_reason(ranks, tmp_path):
    config = make_config("pocket", enable_lora=True)
    gone = tmp_path / "adapter"
    gone.symlink_to(PIRATE)
    with Movers(config, config, ranks) as movers:
        movers.start(
            "with",
            prompt(40),
            ModelAdapter("pirate", str(gone), open_adapter(gone).digest),
            max_tokens=NUM_TOKENS,
        )
        movers.leave(0)
        gone.unlink()
        movers.arrive(1)
        movers.listen(1, movers.ended)
        error = movers.streams["with"].last.error
        assert error is not None and "adapter" in error.message
        movers.settle()


@pytest.mark.parametrize(("name", "dtype"), in_turns(slow(MODELS), ["float32", "bfloat16"]))
def test_a_request_keeps_its_images_which_are_not_encoded_again(ranks, tmp_path, name, dtype):
    """Those of Gemma 3 are computed whole; Qwen's have rotary sections, and vectors for deeper layers."""
    folder = make_vision_model(tmp_path, name)
    sizes = {"dtype": dtype, "block_size": 4}
    config = make_config(folder, **sizes)
    with Movers(config, config, ranks) as movers:
        for seed, sampled in enumerate(({}, RANDOM)):  # in turn: bits of heads of 12 depend on the batch
            asked = Prompt(name).text(5, 6).image(11 + seed).text(7, 8, 9, *range(3, 70))
            movers.start(f"image {seed}", asked.tokens, PromptImages(asked.images), max_tokens=NUM_TOKENS, **sampled)
            movers.leave(0)
            movers.arrive(1)
            movers.listen(1, movers.ended)
        assert movers.prefill.scheduler.parts[Handoffs].moves == {"received": 2}
        assert name in RECURRENT or movers.prefill.scheduler.parts[EncoderCacheManager].num_encoded == 0
        check(movers, make_config(folder, moves=False, **sizes))


@pytest.mark.slow
def test_what_waits_is_given_back_at_once_and_what_is_not_found_is_computed_again(ranks):
    config = make_config("pocket", waits=SHORT, max_num_seqs=2)
    with Movers(config, config, ranks) as movers:
        start_all(movers, lengths=LENGTHS[:4])
        movers.leave(0, running=2)
        assert [not stream.last.records(KVSource) for stream in movers.streams.values()] == [False, False, True, True]
        movers.arrive(1, keep_source=False)
        movers.listen(1, movers.ended)
        check(movers, make_config("pocket", moves=False))
        assert movers.decode.scheduler.parts[Handoffs].moves == {"expired": 2}


@pytest.mark.slow
def test_an_engine_that_dies_with_the_kv_delays_the_request(ranks):
    config = make_config("pocket", waits=SHORT)
    with Movers(config, config, ranks) as movers:
        start_all(movers, lengths=(40, 17))
        movers.leave(0)
        movers.decode.stop()
        movers.arrive(1)
        movers.listen(1, movers.ended)
        check(movers, make_config("pocket", moves=False))
        assert movers.prefill.scheduler.parts[Handoffs].moves == {"failed": 2}


def test_requests_of_another_model_are_refused_their_kv(ranks):
    configs = make_config("pocket", waits=SHORT), make_config("pocket", waits=SHORT, dtype="bfloat16")
    with Movers(*configs, ranks) as movers:
        movers.start("a", prompt(40), max_tokens=150)
        movers.leave(0)
        movers.arrive(1)
        movers.listen(1, movers.ended)
        assert len(movers.streams["a"].tokens) == 150
        movers.settle()
        assert movers.prefill.scheduler.parts[Handoffs].moves == {"failed": 1}
        assert movers.decode.scheduler.parts[Handoffs].moves == {"cancelled": 1}


@pytest.mark.slow
def test_requests_of_another_version_with_other_kernels_go_on_from_their_tokens(ranks, monkeypatch):
    numerics = iter(("old", "new"))
    monkeypatch.setattr("engine.kv_transfer.fingerprint.numerics_digest", lambda: next(numerics))
    config = make_config("pocket", waits=SHORT)
    with Movers(config, config, ranks) as movers:
        movers.start("a", prompt(40), max_tokens=50)
        movers.leave(0)
        movers.arrive(1)
        movers.listen(1, movers.ended)
        check(movers, make_config("pocket", moves=False))
        assert movers.prefill.scheduler.parts[Handoffs].moves == {"failed": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "stages"), [(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2)])
def test_requests_move_between_engines_of_other_sizes(tmp_path, ranks, first, second, stages):
    folder, options = make_model(tmp_path, "llama"), {"determinism": "strict"}
    layouts = ({"tensor_parallel_size": size, "pipeline_parallel_size": stages} for size in (first, second))
    configs = (make_config(folder, **layout, **options) for layout in layouts)
    with Movers(*configs, ranks) as movers:
        start_all(movers)
        movers.leave(0)
        movers.arrive(1)
        movers.listen(1, movers.ended)
        assert movers.prefill.scheduler.parts[Handoffs].moves == {"received": len(LENGTHS)}
        check(movers, make_config(folder, moves=False, **options))
