import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.core.door.inputs import Aborted, Added
from engine.core.engine_stats import stats_of
from engine.core.request import State
from engine.errors import InvalidParameter
from engine.parts.grammar.inputs import GrammarSet
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.fake_runner import FakeGrammar, Harness

FORM = {"structured_outputs": StructuredOutputsParams(regex="what the fake grammar says"), "max_tokens": None}


@pytest.fixture(params=[1, 2], ids=["plain", "overlap"])
def depth(request) -> int:
    return request.param


def test_a_structured_request_obeys_its_grammar_and_ends_with_it(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth)
    for i in range(4):
        h.add(f"form {i}", [1, 2, 3], seed=i, **FORM)
    h.run()
    for i in range(4):
        last = h.finished[f"form {i}"].delta
        assert (last.finish_reason, last.text_complete) == ("stop", True)
        assert h.outputs[f"form {i}"][-1] >= 40


def test_it_is_not_planned_while_its_token_is_in_flight_and_the_others_are(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth)
    h.add("plain", [1, 2, 3], max_tokens=20)
    h.add("form", [4, 5, 6], **FORM)
    h.run()
    both = [plan for plan in h.plans if len(plan.slots) == 2]
    alone = [plan for plan in h.plans[1:] if plan.slots == [h.plans[0].slots[0]]]
    assert all(plan.masked == [1] for plan in both)
    if depth == 2:
        between = h.plans[1 : h.plans.index(both[-1])]
        assert [len(plan.slots) for plan in between] == [1, 2] * (len(both) - 2) + [1]
    assert alone, "the plain request went on"


def test_all_chunks_of_its_prompt_are_planned_at_once_and_only_the_last_has_a_mask(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth, max_num_batched_tokens=8)
    h.add("form", list(range(1, 21)), **FORM)
    h.step()
    h.step()
    h.step()
    assert [plan.masked for plan in h.plans[:3]] == [[], [], [0]]
    h.run()


def test_a_preempted_structured_request_goes_on_where_it_was(depth):
    h = Harness(num_blocks=12, max_model_len=48, depth=depth)
    for i in range(8):
        h.add(f"form {i}", [i + 1] * (3 + i), seed=i, **FORM)
        h.add(f"plain {i}", [i + 1] * (4 + i), seed=i, max_tokens=20)
    h.run()
    assert h.scheduler.totals.preemptions > 0
    assert any(h.finished[f"form {i}"].delta.num_preemptions for i in range(8))


@settings(max_examples=40)
@given(
    depth=st.integers(1, 2),
    blocks=st.integers(12, 30),
    budget=st.integers(8, 20),
    requests=st.lists(
        st.tuples(st.booleans(), st.integers(1, 14), st.integers(0, 5), st.integers(1, 25)), min_size=1, max_size=10
    ),
    aborted=st.integers(0, 9),
)
def test_any_mix_gives_what_each_gives_alone(depth, blocks, budget, requests, aborted):
    h = Harness(num_blocks=blocks, max_model_len=48, depth=depth, max_num_batched_tokens=budget)
    for i, (form, length, seed, max_tokens) in enumerate(requests):
        h.add(
            str(i),
            [seed + 1] * length,
            seed=seed,
            **({**FORM} if form else {}),
            **({} if form else {"max_tokens": max_tokens}),
        )
        h.step()
    h.abort(str(aborted))
    h.run()


def waiting_for_its_grammar(h: Harness, name: str):
    message = GenerateRequest(request_id=name, prompt=[1, 2], params=SamplingParams(seed=1, **FORM))
    return h.scheduler.apply(Added(message), 0.0)


def test_a_request_keeps_its_place_in_the_order_while_its_grammar_is_compiled():
    h = Harness(num_blocks=64, max_model_len=64, max_num_seqs=1)
    first = waiting_for_its_grammar(h, "first")
    h.add("second", [1], max_tokens=2)
    h.add("third", [1], max_tokens=2)
    assert (first.state, stats_of(h.scheduler).waiting) == (State.WAITING, 3)
    h.step()
    h.scheduler.apply(GrammarSet(first.request_id, FakeGrammar()), 0.0)
    h.outputs["first"] = []
    h.scheduler.check()
    assert [request.request_id for request in h.scheduler.queue.waiting] == ["first", "third"]
    h.run()
    assert list(h.finished) == ["second", "first", "third"]


def test_a_mask_that_is_late_holds_up_its_request_and_nobody_behind_it(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth)
    late = FakeGrammar()
    late.is_ready = False
    request = waiting_for_its_grammar(h, "late")
    h.scheduler.apply(GrammarSet(request.request_id, late), 0.0)
    h.outputs["late"] = []
    h.add("behind", [1, 2, 3], max_tokens=4)
    while "behind" not in h.finished:
        h.step()
    late.is_ready = True
    while not h.outputs["late"]:
        h.step()
    late.is_ready = False
    h.add("next", [1, 2, 3], max_tokens=4)
    while "next" not in h.finished:
        h.step()
    assert len(h.outputs["late"]) <= depth
    late.is_ready = True
    h.run()
    assert h.finished["late"].delta.finish_reason == "stop"


def test_a_request_that_waits_for_its_grammar_can_be_ended_with_an_error():
    h = Harness(num_blocks=64, max_model_len=64)
    waiting_for_its_grammar(h, "a")
    h.scheduler.apply(
        Aborted("a", error=InvalidParameter("structured_outputs.regex", "(", "a regular expression")), 0.0
    )
    (event,) = h.scheduler.out.take_events()
    assert (event.delta.finish_reason, event.delta.error.status) == ("error", 400)
    assert not h.scheduler.has_work
    h.scheduler.check()


def test_output_that_came_with_the_request_is_not_asked_for_again(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth)
    h.add("whole", [1, 2, 3], **FORM)
    h.run()
    whole = h.outputs["whole"]
    message = GenerateRequest(
        request_id="rest", prompt=[1, 2, 3, *whole[:3]], num_prompt=3, params=SamplingParams(seed=1, **FORM)
    )
    request = h.scheduler.apply(Added(message), 0.0)
    h.scheduler.apply(GrammarSet(request.request_id, FakeGrammar(whole[:3])), 0.0)
    h.outputs["rest"] = []
    h.run()
    assert whole[:3] + h.outputs["rest"] == whole
