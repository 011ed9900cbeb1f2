"""Several tokens per step: the same outputs in fewer steps, whatever is drafted."""

from __future__ import annotations

import pytest

from engine.core.engine_stats import stats_of
from engine.core.request import Request
from engine.core.step_plan_builder import StepPlanBuilder
from engine.options.speculation import SpeculativeConfig
from engine.parts.speculation.speculator import Speculator
from engine.spec_decode.suffix import SuffixDrafter
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.speculation import SpecDecodeStats, Verified
from engine.wire.plan import ON_DEVICE
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.fake_drafter import WildDrafter, draft_always
from tests.fake_runner import VOCAB, Harness, expected_output

FORM = StructuredOutputsParams(regex="what the fake grammar says")
PROMPT = [1, 2, 3]
OUTPUT = expected_output(PROMPT, SamplingParams(max_tokens=31, seed=1, ignore_eos=True), 64)


@pytest.fixture(params=[1, 2], ids=["plain", "overlap"])
def depth(request) -> int:
    return request.param


def make(*kinds: str, **options) -> Harness:
    drafter = WildDrafter(kinds=kinds)
    harness = Harness(**{"num_blocks": 64, "max_model_len": 64, "drafter": drafter, **options})
    drafter.know(harness)
    return harness


def opened(speculator: Speculator, max_model_len: int = 64, params: SamplingParams | None = None) -> Request:
    """Return a request that has just been queued."""
    message = GenerateRequest(request_id="a", prompt=PROMPT, params=params or SamplingParams())
    request = Request.create(message, max_model_len, now=0.0)
    speculator.opened(request, message)
    return request


def test_right_drafts_are_accepted_and_counted(depth):
    h = make("right", depth=depth)
    h.add("a", PROMPT, max_tokens=31)
    h.run()
    assert len(h.plans) == 1 + 1 + 5, "the prompt; one draft as a trial; then five drafts and one more token a step"
    stats = stats_of(h.scheduler).record(SpecDecodeStats)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 24, 24)
    assert stats.num_accepted_tokens_per_pos == [6, 5, 5, 4, 4]
    assert "24 of 24 drafted tokens were accepted" in [event.what for event in h.timelines["a"]]


@pytest.mark.parametrize(("kind", "steps"), [("right", {7}), ("half", range(8, 20)), ("none", {31})])
def test_drafts_with_weights_are_accepted_as_far_as_they_are_right(depth, kind, steps):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth, propose=WildDrafter(kinds=(kind,)).propose)
    h.add("a", PROMPT, max_tokens=31)
    h.run()
    assert len(h.plans) in steps


def test_chunks_of_a_prompt_are_computed_once_beside_a_drafter_with_weights(depth):
    propose = WildDrafter(kinds=("none",)).propose
    h = Harness(num_blocks=64, max_model_len=64, max_num_batched_tokens=8, depth=depth, propose=propose)
    h.add("a", list(range(1, 31)), max_tokens=3)
    h.run()
    assert sum(plan.num_tokens for plan in h.plans) == 30 + 2


@pytest.mark.parametrize("max_tokens", range(1, 15))
def test_drafts_end_before_the_last_token(depth, max_tokens):
    h = make("right", "long", depth=depth)
    h.add("a", PROMPT, max_tokens=max_tokens)
    h.run()
    assert h.outputs["a"] == OUTPUT[:max_tokens]


@pytest.mark.parametrize("position", range(8))
def test_a_stop_token_within_a_draft_ends_the_output_there(depth, position):
    h = make("long", depth=depth)
    token = OUTPUT[position]
    h.add("a", PROMPT, max_tokens=31, stop_token_ids=[token])
    h.run()
    assert h.outputs["a"] == OUTPUT[: OUTPUT.index(token) + 1]
    last = h.finished["a"].delta
    assert (last.finish_reason, last.stop_reason, last.token_ids[-1]) == ("stop", token, token)


def test_a_token_that_a_grammar_forces_is_a_draft_of_its_own(depth):
    h = make("none", depth=depth)
    for seed in range(20):
        h.add(str(seed), [seed + 1], seed=seed, max_tokens=None, structured_outputs=FORM)
    h.run()
    stats = stats_of(h.scheduler).record(SpecDecodeStats)
    assert 0 < stats.num_drafts == stats.num_draft_tokens == stats.num_accepted_tokens


def test_drafts_that_break_the_grammar_are_not_computed(depth):
    h = make("wrong", depth=depth)
    h.add("a", PROMPT, max_tokens=None, structured_outputs=FORM)
    h.run()
    stats = stats_of(h.scheduler).record(SpecDecodeStats)
    assert stats.num_draft_tokens == stats.num_accepted_tokens, "those that remain were forced"


def test_nobody_is_preempted_for_a_draft(depth):
    """Two requests fill all blocks but for the places of drafts."""
    h = make("right", depth=depth, num_blocks=4, max_model_len=16, max_num_seqs=2)
    for name in ("a", "b"):
        h.add(name, PROMPT, max_tokens=5)
    h.run()
    assert h.scheduler.totals.preemptions == 0 < stats_of(h.scheduler).record(SpecDecodeStats).num_drafts


def test_drafts_leave_the_budget_of_a_step_to_those_behind():
    h = make("right", max_num_seqs=4, max_num_batched_tokens=6)
    for i in range(4):
        h.add(str(i), [i], max_tokens=12)
    h.step()
    assert [len(h.step().slots) for _ in range(3)] == [4, 4, 4]
    assert all(plan.num_tokens == 6 for plan in h.plans[1:])
    h.run()


def test_where_a_token_costs_as_much_as_its_share_of_a_step_nothing_is_drafted():
    h = make("right", step_cost=(0.0, 1.0))
    h.add("a", PROMPT, max_tokens=31)
    h.run()
    assert stats_of(h.scheduler).record(SpecDecodeStats).num_drafts == 0


def test_a_request_whose_drafts_fail_is_tried_again_ever_more_rarely():
    h = make("wrong", max_model_len=400, num_blocks=100)
    h.add("a", PROMPT, max_tokens=300)
    h.run()
    drafted = [i for i, plan in enumerate(h.plans) if plan.drafts]
    assert 4 < len(drafted) < 10
    assert drafted[-1] - drafted[-2] > 64 > drafted[1] - drafted[0]


def test_with_overlap_a_request_without_a_proposal_is_planned_ahead():
    for kind, waits in (("none", False), ("right", True)):
        h = make(kind, depth=2)
        h.add("a", PROMPT, max_tokens=20)
        h.plan()
        assert (h.plan() is None) == waits
        h.run()


@pytest.mark.parametrize("weights", [False, True])
def test_with_overlap_requests_that_came_at_different_times_verify_their_drafts_in_the_same_steps(weights, monkeypatch):
    draft_always(monkeypatch)
    if weights:
        h = Harness(num_blocks=64, max_model_len=64, depth=2, propose=WildDrafter(kinds=("half",)).propose)
    else:
        h = make("half", depth=2)
    for name, prompt in (("a", PROMPT), ("b", [4, 5])):
        h.add(name, prompt, max_tokens=30)
        for _ in range(3):
            h.step()
    first = len(h.plans)
    for _ in range(6):
        h.step()
    assert {len(plan.slots) for plan in h.plans[first:]} == {2}


def test_the_tokens_of_a_step_come_in_one_delta():
    h = make("right")
    h.add("a", PROMPT, max_tokens=31)
    deltas = []
    h._record = lambda event: deltas.append(event.delta)
    while h.scheduler.has_work:
        h.step()
    assert [delta.position for delta in deltas] == [0, 1, *range(3, 31, 6)]
    assert [len(delta.token_ids) for delta in deltas] == [1, 2, 6, 6, 6, 6, 4]


def test_an_answer_makes_the_same_request_shorter_if_its_cache_salt_is_the_same(depth):
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix"))
    h = Harness(num_blocks=64, max_model_len=64, drafter=drafter, depth=depth, enable_prefix_caching=False)
    steps = []
    for name, salt in (("first", "mine"), ("other", "yours"), ("again", "mine")):
        before = len(h.plans)
        h.add(name, PROMPT, max_tokens=31, cache_salt=salt)
        h.run()
        assert h.outputs[name] == OUTPUT
        steps.append(len(h.plans) - before)
    assert steps[0] == steps[1] > 2 * steps[2]


def test_a_prediction_is_what_the_drafts_of_a_request_are_taken_from_and_its_tokens_are_counted(depth):
    h = make("wrong", depth=depth)
    told: list[Verified] = []
    record = h._record

    def count(event):
        told.extend(event.delta.records(Verified))
        record(event)

    h._record = count
    h.add("a", PROMPT, max_tokens=31, prediction=[*OUTPUT[:10], VOCAB - 1, *OUTPUT[14:]])
    h.run()
    accepted, rejected = sum(each.accepted for each in told), sum(each.rejected for each in told)
    stats = stats_of(h.scheduler).record(SpecDecodeStats)
    assert (accepted, accepted + rejected) == (stats.num_accepted_tokens, stats.num_draft_tokens)
    assert accepted > 10 and 0 < rejected <= 5
    assert len(h.plans) < 20


def test_without_a_drafter_a_prediction_changes_nothing(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth)
    h.add("a", PROMPT, max_tokens=31, prediction=OUTPUT)
    h.run()
    assert h.outputs["a"] == OUTPUT and len(h.plans) == 31
    assert not h.finished["a"].delta.records(Verified)


def test_a_drafter_with_weights_that_costs_more_than_it_gains_is_asked_ever_more_rarely():
    costs = {"cheap": 0.05, "dear": 0.9}
    asked = {}
    for name, proposal in costs.items():
        speculator = Speculator(SpeculativeConfig(method="ngram"), None, lambda _, p=proposal: (1.0, 0.02, p), VOCAB)
        request = opened(speculator, 1000)
        asked[name] = []
        for step in range(600):
            speculator.start_step(1)
            request.computed = len(request.tokens) - 1
            drafts = speculator.draft(request, 1, 10)
            assert not drafts or asked[name][-1] == step - 1, "only what the step before has proposed is verified"
            speculator.verifies(request, len(drafts))
            plan = StepPlanBuilder()
            plan.requests.append(request)
            speculator.planned(plan, step)
            speculator.start_step(1)
            request.computed, request.in_flight = len(request.tokens), 1
            assert speculator.up_to(request, 1) or plan.num_drafts, "it waits for drafts that will not come"
            request.in_flight = 0
            asked[name] += [step] * (plan.num_drafts > 0)
            accepted = min(len(drafts), step % 2)  # every other draft is right
            request.tokens += [1] * (1 + accepted)
            speculator.verified(request, accepted, [1] * plan.num_drafts)
    assert len(asked["cheap"]) > 400
    assert len(asked["dear"]) < 15


def test_proposals_of_a_drafter_with_weights_are_for_one_token_only():
    speculator = Speculator(SpeculativeConfig(method="ngram"), None, lambda sequences: (1.0, 0.02, 0.0), VOCAB)
    request = opened(speculator)
    speculator.start_step(1)
    speculator.verified(request, 0, [7, VOCAB, 8])
    assert speculator.guess(request) == [7]
    assert speculator.guess(request) == []


def test_drafts_that_only_the_device_knows_are_planned_but_are_no_guesses_for_a_grammar():
    speculator = Speculator(SpeculativeConfig(method="ngram"), None, lambda sequences: (1.0, 0.02, 0.0), VOCAB)
    request = opened(speculator)
    request.computed = len(PROMPT) - 1
    speculator.start_step(1)
    speculator.verified(request, 0, [ON_DEVICE, ON_DEVICE])
    assert speculator.draft(request, 1, 10) == [ON_DEVICE]  # one is enough to try a new request
    speculator.verified(request, 0, [ON_DEVICE, ON_DEVICE])
    assert speculator.guess(request) == []


class NothingFound:
    """A drafter that counts how often it is asked, and finds nothing."""

    def __init__(self) -> None:
        self.asked = 0

    def follow(self, tokens: list[int], cache_salt: str) -> NothingFound:
        return self

    def propose(self, limit: int) -> list[int]:
        self.asked += 1
        return []

    def finish(self, tokens: list[int], num_prompt: int, cache_salt: str) -> None:
        pass


@pytest.mark.parametrize(("sequences", "times"), [(1, 160), (64, 10)])
def test_among_many_sequences_one_that_finds_no_draft_looks_for_it_more_rarely(sequences, times):
    drafter = NothingFound()
    speculator = Speculator(SpeculativeConfig(method="ngram"), drafter, lambda _: (1.0, 0.02, 0.0), VOCAB)
    request = opened(speculator, 1000, SamplingParams(max_tokens=500))
    for _ in range(160):
        speculator.start_step(sequences)
        assert not speculator.guess(request)
        request.tokens.append(1)
    assert drafter.asked == times
