"""Two engines with the pocket model in float32: whatever happens between them, the text is that of one engine alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.engine_stats import stats_of
from engine.options.handoff import HandoffConfig
from engine.options.speculation import SpeculativeConfig
from engine.parts.costs.cost_ledger import CostLedger
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Abort
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.handoffs import HandoffTotals, PrefillReplica, PrefillReplicas
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams
from tests.engine.kv_transfer.pair import Pair
from tests.engine.spec_decode.draft_checkpoints import NUM_DRAFTS, VOCAB, make_drafters
from tests.fake_drafter import draft_always
from tests.models import make_model
from tests.products import slow

BLOCK = 16
RANDOM = {"temperature": 1.0, "seed": 7, "top_p": 0.9}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, 4096), k=length)


def make_config(role: str | None, *, handoff: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    defaults = {
        "dtype": "float32",
        "block_size": BLOCK,
        "num_gpu_blocks_override": 128,
        "max_num_seqs": 8,
        "num_threads": 1,
    }
    config = HandoffConfig(role=role, policy="always", **(handoff or {})) if role else None
    return EngineConfig(**{**defaults, **options, "handoff": config})


@pytest.fixture(scope="module", autouse=True)
def short_status_period() -> Iterator[None]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.05)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """What one engine answers. Params: as of SamplingParams."""
    core = build_engine(make_config(None, enable_prefix_caching=False))

    @cache
    def answer(tokens: tuple[int, ...], params: tuple[tuple[str, Any], ...]) -> list[int]:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **dict(params)})
        core.add(GenerateRequest(request_id="a", prompt=list(tokens), params=sampling))
        return [token for token_ids in steps(core) for token in token_ids]

    yield lambda tokens, **params: answer(tuple(tokens), tuple(params.items()))
    core.close()


def steps(core: EngineCore) -> Iterator[list[int]]:
    while core.has_work:
        yield from (event.delta.token_ids for event in core.step())


@pytest.fixture(scope="module")
def pair(request, ranks) -> Iterator[Pair]:
    transport = getattr(request, "param", "tcp")
    if transport == "nixl":
        pytest.importorskip("nixl")
    handoff = {"transport": transport}
    prefill = make_config("prefill", handoff=handoff, max_num_batched_tokens=64)
    with Pair(make_config("decode", handoff=handoff), prefill, ranks) as pair:
        yield pair


# what happens to requests does not depend on how their KV travels, so most tests have one transport
by_both = pytest.mark.parametrize("pair", ["tcp", *slow(["nixl"])], indirect=True)


@pytest.fixture
def fresh(pair) -> Pair:
    """With empty caches."""
    pair.forget()
    pair.remote_requests.clear()
    return pair


def results(pair: Pair, result: str = "received") -> int:
    assert pair.decode.status is not None and pair.decode.status.handoffs is not None
    return sum(pair.decode.status.handoffs.results.get(result, {}).values())


# -- the same tokens ---------------------------------------------------------------------------------------


@by_both
@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 300, *slow([5, BLOCK - 1, 2 * BLOCK, 63, 64, 65])])
def test_a_prompt_computed_elsewhere_gives_the_same_tokens(fresh, alone, length):
    before = results(fresh)
    fresh.ingress.add(f"greedy {length}", prompt(length))
    fresh.ingress.add(f"random {length}", prompt(length, 1), **RANDOM)
    assert fresh.ingress.tokens(f"greedy {length}") == alone(prompt(length))
    assert fresh.ingress.tokens(f"random {length}") == alone(prompt(length, 1), **RANDOM)
    fresh.settle()
    assert results(fresh) == before + 2, "both came from the other engine"
    assert fresh.prefill.ended >= {remote_request.handoff_id for remote_request in fresh.remote_requests}


@by_both
def test_the_kv_travels_while_the_rest_is_computed(fresh, alone, monkeypatch):
    prefill, block_bytes = fresh.prefill.server._core, fresh.decode.server._core.ranks.runner.kv_caches[0][0].nbytes
    before, step = fresh.decode.status.handoffs, prefill.step

    def blocks_read() -> int:
        after = fresh.decode.status.handoffs
        return (sum(after.bytes_read.values()) - sum(before.bytes_read.values())) // block_bytes

    def step_when_the_last_chunk_has_been_read():
        for request in prefill.scheduler.queue.running:
            fresh.wait_for(lambda blocks=request.computed // BLOCK: blocks_read() >= blocks)
        return step()

    monkeypatch.setattr(prefill, "step", step_when_the_last_chunk_has_been_read)
    fresh.ingress.add("long", prompt(700))
    assert fresh.ingress.tokens("long") == alone(prompt(700))
    fresh.settle()
    assert blocks_read() == -(-700 // BLOCK), "every block once"
    overlapped = fresh.decode.status.handoffs.bytes_overlapped - before.bytes_overlapped
    last_chunk = 700 % fresh.prefill.config.max_num_batched_tokens
    at_least = (700 - last_chunk) // BLOCK * block_bytes  # the last chunk's own blocks may win against its token
    assert at_least <= overlapped <= blocks_read() * block_bytes
    assert fresh.decode.status.stats.record(HandoffTotals).prefill_decisions.keys() == {"remote"}


def test_what_decode_has_cached_does_not_travel(fresh, alone):
    tokens = prompt(100)
    for name in ("first", "again"):
        fresh.ingress.add(name, tokens)
        assert fresh.ingress.tokens(name) == alone(tokens)
    assert [remote_request.skip for remote_request in fresh.remote_requests] == [0, 96]
    assert fresh.ingress.deltas["again"][0].num_cached_tokens == 96
    fresh.ingress.add("partly", tokens[:50] + prompt(40, 5))
    assert fresh.ingress.tokens("partly") == alone(tokens[:50] + prompt(40, 5))
    assert fresh.remote_requests[-1].skip == 48


def test_what_prefill_has_cached_is_not_computed_again(fresh, alone):
    tokens = prompt(100, 2)
    fresh.ingress.add("one", tokens)
    assert fresh.ingress.tokens("one") == alone(tokens)
    fresh.settle()
    fresh.decode.forget()
    hits = fresh.prefill.status.stats.prefix_hit_tokens
    fresh.ingress.add("two", tokens)
    assert fresh.ingress.tokens("two") == alone(tokens)
    assert fresh.remote_requests[-1].skip == 0
    assert fresh.ingress.deltas["two"][0].num_cached_tokens == 96
    fresh.settle()
    assert fresh.prefill.status.stats.prefix_hit_tokens == hits + 96


def test_what_only_decode_has_cached_is_computed_again_by_prefill_and_does_not_travel(fresh, alone):
    tokens = prompt(100, 3)
    fresh.ingress.add("fill", tokens)
    fresh.ingress.last("fill")
    fresh.settle()
    fresh.prefill.forget()
    fresh.ingress.add("after", tokens)
    assert fresh.ingress.tokens("after") == alone(tokens)
    assert fresh.remote_requests[-1].skip == 96


def test_one_token_is_all_that_is_wanted(fresh, alone):
    steps = fresh.decode.scheduler.totals.steps
    fresh.ingress.add("one token", prompt(40), max_tokens=1)
    assert fresh.ingress.tokens("one token") == alone(prompt(40), max_tokens=1)
    assert fresh.ingress.last("one token").finish_reason == "length"
    fresh.settle()
    assert fresh.decode.scheduler.totals.steps == steps, "decode has computed nothing"


def test_penalties_and_logprobs_hold_for_the_first_token_too(fresh, alone):
    penalties = {"repetition_penalty": 1.8, "presence_penalty": 1.0}
    fresh.ingress.add("penalties", prompt(40), **penalties)
    assert fresh.ingress.tokens("penalties") == alone(prompt(40), **penalties) != alone(prompt(40))
    fresh.ingress.add("logprobs", prompt(40, 1), logprobs=2)
    assert fresh.ingress.tokens("logprobs") == alone(prompt(40, 1))
    for delta in fresh.ingress.deltas["logprobs"]:
        (entry,) = delta.logprobs
        assert (entry.token_id, entry.rank, len(entry.top)) == (delta.token_ids[0], 1, 2)


@pytest.mark.parametrize("pair", [*slow(["tcp"]), "nixl"], indirect=True)
def test_many_prompts_at_once(fresh, alone):
    lengths = [3 + 17 * i % 90 for i in range(24)]
    for i, length in enumerate(lengths):
        fresh.ingress.add(f"many {i}", prompt(length, i), **(RANDOM if i % 2 else {}))
    for i, length in enumerate(lengths):
        assert fresh.ingress.tokens(f"many {i}") == alone(prompt(length, i), **(RANDOM if i % 2 else {}))
    fresh.settle()


def test_a_prompt_computed_elsewhere_gives_the_same_log_probabilities(fresh):
    found = []
    for where in ("remote", "local"):
        fresh.forget()
        name = f"log-probabilities {where}"
        fresh.ingress.add(name, prompt(40), prefill=where, logprobs=0)
        fresh.ingress.last(name)
        found.append([p for delta in fresh.ingress.deltas[name] for p in delta.logprobs])
    remote, local = found
    assert len(fresh.remote_requests) == 1
    assert [p.token_id for p in remote] == [p.token_id for p in local]
    assert [p.logprob for p in remote] == pytest.approx([p.logprob for p in local], abs=1e-4)


def test_answers_cost_together_what_both_engines_have_spent(fresh):
    """Also the prompt of a client that leaves while the other engine computes it."""
    ledgers = [engine.server._core.observers[CostLedger] for engine in (fresh.decode, fresh.prefill)]
    spent = [-ledger.ns["requests"] for ledger in ledgers]
    kv = [-ledger.kv_gib_s for ledger in ledgers]
    names = ["costs 300", "costs 64", "leaves"]
    for name, length in zip(names[:2], (300, 64), strict=True):
        fresh.ingress.add(name, prompt(length, 9))
        fresh.ingress.last(name)
        fresh.settle()
    decode_kv, prefill_kv = (start + ledger.kv_gib_s for start, ledger in zip(kv, ledgers, strict=True))
    # the bill counts until KV is released, and the books of a busy engine until the end of its step before
    most = 1.1 * (decode_kv + prefill_kv)
    assert decode_kv < sum(fresh.ingress.last(name).records(SequenceCost)[-1].kv_gib_s for name in names[:2]) <= most
    remote_requests = len(fresh.remote_requests)
    fresh.ingress.add("leaves", prompt(500, 9), max_tokens=200)
    fresh.wait_for(lambda: len(fresh.remote_requests) > remote_requests)
    fresh.ingress.send(Abort("leaves"))
    billed = sum(fresh.ingress.last(name).records(SequenceCost)[-1].compute_s for name in names)
    fresh.settle()
    spent = [start + ledger.ns["requests"] for start, ledger in zip(spent, ledgers, strict=True)]
    assert min(spent) > 0
    assert billed * 1e9 == pytest.approx(sum(spent), abs=100)


# -- ends --------------------------------------------------------------------------------------------------


def test_an_abort_before_the_prefill_request_is_taken_ends_the_request_at_once(fresh, alone):
    fresh.forwards = False
    fresh.ingress.add("gone", prompt(60))
    fresh.wait_for(lambda: bool(fresh.held))
    fresh.ingress.send(Abort("gone"))
    assert fresh.ingress.last("gone").finish_reason == "abort"
    fresh.wait_for(lambda: fresh.held[0].handoff_id in fresh.dropped)
    fresh.release_prefill_requests()  # it comes late, and is not wanted
    fresh.ingress.add("next", prompt(60))
    assert fresh.ingress.tokens("next") == alone(prompt(60))
    fresh.settle()


@by_both
@pytest.mark.parametrize("after_batches", [0, 2, *slow([1, 3])])
def test_an_abort_at_any_later_step_frees_both_engines(fresh, alone, after_batches):
    name = f"aborted after {after_batches}"
    remote_requests = len(fresh.remote_requests)
    fresh.ingress.add(name, prompt(500), max_tokens=200)
    fresh.wait_for(lambda: len(fresh.remote_requests) > remote_requests)
    for _ in range(after_batches):
        fresh.ingress.gather()
    fresh.ingress.send(Abort(name))
    assert fresh.ingress.last(name).finish_reason == "abort"
    fresh.ingress.add(f"next to {name}", prompt(500))
    assert fresh.ingress.tokens(f"next to {name}") == alone(prompt(500))
    fresh.settle()


def test_a_deadline_passes_while_the_prefill_request_is_not_taken(fresh):
    fresh.forwards = False
    for timeout_s in (0.2, 2.0, 20.0):  # one that a busy machine needs to plan its prefill request has no more to show
        fresh.ingress.add(f"late {timeout_s}", prompt(60), timeout_s=timeout_s)
        assert fresh.ingress.last(f"late {timeout_s}").error.code == "request_timeout"
        if fresh.held:
            break
    assert 0.0 < fresh.held[0].timeout_s <= timeout_s
    fresh.release_prefill_requests()
    fresh.settle()


def test_a_prefill_request_that_nobody_takes_is_computed_here_in_the_end(fresh, alone):
    fresh.fails = True
    fresh.ingress.add("nobody", prompt(60))
    assert fresh.ingress.tokens("nobody") == alone(prompt(60))
    fresh.fails = False
    assert [remote_request.attempt for remote_request in fresh.remote_requests] == [1, 2, 3]
    assert len({remote_request.handoff_id for remote_request in fresh.remote_requests}) == 3
    fresh.settle()
    assert fresh.decode.status.stats.record(HandoffTotals).prefill_decisions["local"]["attempts"] == 1


def test_without_prefill_engines_prompts_are_computed_here(fresh, alone):
    fresh.ingress.send(PrefillReplicas([]))
    fresh.ingress.add("local", prompt(60))
    assert fresh.ingress.tokens("local") == alone(prompt(60))
    assert not fresh.remote_requests
    fresh.ingress.send(PrefillReplicas([PrefillReplica(engine_id="prefill")]))
    fresh.ingress.add("remote", prompt(60, 1))
    assert fresh.ingress.tokens("remote") == alone(prompt(60, 1))
    assert len(fresh.remote_requests) == 1


# -- other pairs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decode", "prefill", "stages"),
    [
        (1, 2, 1),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2))
        ),
    ],
)
def test_engines_of_different_size_hand_over_the_heads_and_layers_of_each_rank(ranks, alone, decode, prefill, stages):
    configs = (
        make_config("decode", tensor_parallel_size=decode, pipeline_parallel_size=stages),
        make_config("prefill", tensor_parallel_size=prefill, pipeline_parallel_size=stages),
    )
    with Pair(*configs, ranks) as pair:
        for length in (5, 64, 200):
            pair.ingress.add(f"greedy {length}", prompt(length))
            pair.ingress.add(f"random {length}", prompt(length, 1), **RANDOM)
        for length in (5, 64, 200):
            assert pair.ingress.tokens(f"greedy {length}") == alone(prompt(length))
            assert pair.ingress.tokens(f"random {length}") == alone(prompt(length, 1), **RANDOM)
        pair.settle()
        assert results(pair) == 6


@pytest.mark.slow
def test_small_pools_on_both_sides_only_make_it_slower(ranks, alone):
    small = {"num_gpu_blocks_override": 16, "max_model_len": 200, "max_num_seqs": 3}
    configs = make_config("decode", **small), make_config("prefill", **small, max_num_batched_tokens=32)
    with Pair(*configs, ranks) as pair:
        lengths = [20 + 23 * i % 100 for i in range(8)]
        for i, length in enumerate(lengths):
            pair.ingress.add(f"r{i}", prompt(length, i), max_tokens=25)
        for i, length in enumerate(lengths):
            assert pair.ingress.tokens(f"r{i}") == alone(prompt(length, i), max_tokens=25)
        pair.settle()
        assert results(pair) == len(lengths)


@pytest.mark.slow
def test_a_draft_model_computes_the_prompts_that_come_from_elsewhere_itself(ranks, alone, monkeypatch):
    draft_always(monkeypatch)
    speculative = SpeculativeConfig(method="draft_model", model="pocket", num_speculative_tokens=3)
    configs = (
        make_config("decode", speculative_config=speculative),
        make_config("prefill", speculative_config=speculative),
    )
    with Pair(*configs, ranks) as pair:
        for length in (5, 64, 200):
            pair.ingress.add(f"greedy {length}", prompt(length), max_tokens=24)
        for length in (5, 64, 200):
            assert pair.ingress.tokens(f"greedy {length}") == alone(prompt(length), max_tokens=24)
        pair.settle()
        assert results(pair) == 3
        stats = stats_of(pair.decode.scheduler).record(SpecDecodeStats)
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0, "the model drafts for itself"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_follow_prompts_that_come_from_elsewhere(ranks, alone, monkeypatch, method):
    draft_always(monkeypatch)
    speculative = SpeculativeConfig(method=method)
    configs = (
        make_config("decode", speculative_config=speculative),
        make_config("prefill", speculative_config=speculative),
    )
    with Pair(*configs, ranks) as pair:
        for length in (5, 64, 200):
            tokens = prompt(length) * 2
            pair.ingress.add(f"greedy {length}", tokens, max_tokens=60)
            pair.ingress.add(f"random {length}", tokens, max_tokens=60, **RANDOM)
        for length in (5, 64, 200):
            tokens = prompt(length) * 2
            assert pair.ingress.tokens(f"greedy {length}") == alone(tokens, max_tokens=60)
            assert pair.ingress.tokens(f"random {length}") == alone(tokens, max_tokens=60, **RANDOM)
        pair.settle()
        assert results(pair) == 6
        assert stats_of(pair.decode.scheduler).record(SpecDecodeStats).num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_heads_draft_after_prompts_that_come_from_elsewhere_and_go_on_where_another_engine_died(
    ranks, tmp_path, monkeypatch, method
):
    draft_always(monkeypatch)
    folder, drafter = make_drafters(tmp_path)[method]
    speculative = SpeculativeConfig(num_speculative_tokens=NUM_DRAFTS, **drafter)
    options: dict[str, Any] = {"model": str(folder), "speculative_config": speculative, "max_model_len": 256}
    requests = [(length, params) for length in (5, 64, 150) for params in ({"temperature": 0.0}, RANDOM)]

    def words(length: int) -> list[int]:
        return random.Random(length).choices(range(3, VOCAB), k=length)

    core = build_engine(make_config(None, model=str(folder), max_model_len=256))
    expected = []
    for length, params in requests:
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, **params)
        core.add(GenerateRequest(request_id="alone", prompt=words(length), params=sampling))
        expected.append([token for tokens in steps(core) for token in tokens])
    core.close()
    with Pair(make_config("decode", **options), make_config("prefill", **options), ranks) as pair:
        for i, (length, params) in enumerate(requests):
            pair.ingress.add(f"first {i}", words(length), max_tokens=24, **params)
        assert [pair.ingress.tokens(f"first {i}") for i in range(len(requests))] == expected
        pair.forget()
        for i, (length, params) in enumerate(requests):  # a decode engine died after 7 tokens, this one goes on
            given = words(length) + expected[i][:7]
            pair.ingress.add(f"again {i}", given, max_tokens=24, num_prompt=length, **params)
        assert [pair.ingress.tokens(f"again {i}") for i in range(len(requests))] == [e[7:] for e in expected]
        pair.settle()
        assert results(pair) == 2 * len(requests)
        assert stats_of(pair.decode.scheduler).record(SpecDecodeStats).num_draft_tokens > 0


@pytest.mark.slow
def test_a_prompt_of_16k_tokens_comes_in_small_chunks(ranks, tmp_path):
    model = make_model(tmp_path, "llama", max_position_embeddings=16_500)
    options = {"model": str(model), "num_gpu_blocks_override": 1040}
    core = build_engine(make_config(None, **options))
    tokens = random.Random(16).choices(range(3, 90), k=16_384)
    core.add(GenerateRequest(request_id="a", prompt=tokens, params=SamplingParams(temperature=0.0, max_tokens=4)))
    expected = [token for token_ids in steps(core) for token in token_ids]
    core.close()
    with Pair(
        make_config("decode", **options), make_config("prefill", **options, max_num_batched_tokens=256), ranks
    ) as pair:
        pair.ingress.add("long", tokens, max_tokens=4)
        assert pair.ingress.tokens("long") == expected
        pair.settle()
        assert results(pair) == 1
        assert pair.decode.status.handoffs.bytes_overlapped > 0


def test_when_prefill_ends_decode_goes_on_alone(ranks, alone):
    configs = make_config("decode"), make_config("prefill", max_num_batched_tokens=32)
    with Pair(*configs, ranks) as pair:
        pair.ingress.add("before", prompt(100))
        assert pair.ingress.tokens("before") == alone(prompt(100))
        for i in range(4):
            pair.ingress.add(f"r{i}", prompt(300, i))
        pair.wait_for(lambda: len(pair.remote_requests) == 5)
        pair.fails = True
        pair.prefill.stop()
        for i in range(4):
            assert pair.ingress.tokens(f"r{i}") == alone(prompt(300, i))
        pair.settle()


def test_another_model_is_refused_and_the_prompt_computed_here(ranks, alone):
    configs = make_config("decode"), make_config("prefill", dtype="bfloat16")
    with Pair(*configs, ranks) as pair:
        pair.ingress.add("a", prompt(100))
        assert pair.ingress.tokens("a") == alone(prompt(100))
        pair.settle()
        assert results(pair, "failed") == len(pair.remote_requests) == 3
        assert pair.prefill.ended == {remote_request.handoff_id for remote_request in pair.remote_requests}
