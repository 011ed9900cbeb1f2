"""The table "What load scales what" of docs/autoscaling.md says what the policy decides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest

from cluster.autoscaling.sizing import Demand, Sizing
from cluster.autoscaling.slo import Slo
from cluster.lab.simulator.cost_model import find_card, find_model, kv_tokens, roofline
from tests.docs.pages import page

PROMPT = 1000  # tokens, also of a sequence
MODEL, CARD = find_model("llama-3.1-8b"), find_card("h100")
COST, KV_TOKENS = roofline(MODEL, CARD), kv_tokens(MODEL, CARD)
STEP = {"decode_step_s": COST.step_s + COST.weights_s, "decode_sequence_s": COST.sequence_s + COST.context_s * PROMPT}
POCKET = {"decode_sequence_s": 0.00031, "prefill_share": 0.01}


def table() -> str:
    text = page("docs/autoscaling.md").read_text()
    return text[text.index("## What load scales what") : text.index("## Why it does not oscillate")]


def decode(itl_ms: float, max_num_seqs: int = 256) -> Sizing:
    return Sizing(Slo(ttft_ms=1000, itl_ms=itl_ms), max_num_seqs, prompts=False, decodes=True)


def least(sizing: Sizing, load: Callable[[int], Demand], numbers: Iterable[int]) -> tuple[int, str]:
    """Return the first number for which one replica is not enough, and why."""
    return next((number, size.reason) for number in numbers if (size := sizing.now(load(number), 9)).replicas == 2)


def sequences(number: int) -> Demand:
    return Demand(sequences=number, **STEP)


def test_costs_of_the_table_are_those_of_the_simulator():
    a, b = (1000 * seconds for seconds in STEP.values())
    assert f"(a = {a:.2f} ms, b = {b:.3f} ms with 1,000 tokens\neach, t = {1e6 * COST.token_s:.0f} µs)" in table()


def test_streams_from_which_a_second_decode_replica_starts():
    found = {itl_ms: least(decode(itl_ms, 10**6), sequences, range(1, 1000)) for itl_ms in (15, 20, 40)}
    assert {reason for _, reason in found.values()} == {"itl"}
    (row,) = re.findall(r"`itl` \| (.*) \|", table())
    assert row.startswith(f"{found[20][0]} sequences; with 15 ms from {found[15][0]}, with 40 ms from {found[40][0]},")
    assert f"| `slots` | {least(decode(40), sequences, range(1, 1000))[0]} sequences |" in table()


def test_tokens_in_the_cache_from_which_a_second_replica_starts():
    number, reason = least(decode(20), lambda n: Demand(kv_replicas=n / KV_TOKENS), range(300_000, 400_000, 10))
    assert reason == "kv"
    assert f"| {round(number, -2):,} tokens |" in table()


def test_prompts_from_which_a_second_prefill_replica_starts():
    prefill = Sizing(Slo(ttft_ms=1000, itl_ms=20), 256, prompts=True, decodes=False)
    mean_s = PROMPT * COST.token_s
    rate = least(prefill, lambda n: Demand(prefill_share=n * COST.token_s, prompt_s=mean_s), range(0, 50_000, 10))
    queue = least(prefill, lambda n: Demand(backlog_s=n * COST.token_s, prompt_s=mean_s), range(0, 50_000, 10))
    assert (rate[1], queue[1]) == ("ttft", "queue")
    assert f"| {round(rate[0], -2):,} tokens per second |" in table()
    assert f"| {round(queue[0], -3):,} tokens |" in table()


def test_forty_streams_of_the_bundled_model_need_one_replica_and_two_for_a_target_of_ten_milliseconds():
    load = Demand(sequences=40, **POCKET)
    used = decode(100).used(load, 1)
    assert decode(100).now(load, 9).replicas == 1
    assert f"| {100 * used['slots']:.0f} % | 231 |" in table()
    assert used["itl"] == pytest.approx(0.13, abs=0.01)
    streams, reason = least(decode(100, 10**6), lambda n: Demand(sequences=n, **POCKET), range(1, 1000))
    assert (streams, reason) == (288, "itl")
    assert f"| 13 % of the limit | {streams} streams |" in table()
    assert decode(10).now(load, 9).replicas == 2
    assert decode(10).used(load, 1)["itl"] == pytest.approx(1.4, abs=0.01)
