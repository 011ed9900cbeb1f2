import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling.sizing import Demand, Size, Sizing
from cluster.autoscaling.slo import Slo

SLO = Slo(ttft_ms=1000, itl_ms=50)
FAST = {"decode_step_s": 0.005, "decode_sequence_s": 0.001}  # 40 sequences take 45 ms, nine tenths of the target


def decode(max_num_seqs: int = 1000) -> Sizing:
    return Sizing(SLO, max_num_seqs, prompts=False, decodes=True)


def prefill() -> Sizing:
    return Sizing(SLO, 256, prompts=True, decodes=False)


def test_nothing_to_do_needs_one_replica():
    assert decode().now(Demand(), 9) == decode().if_fewer(Demand(), 9) == Size(1, "min")


@pytest.mark.parametrize(("sequences", "replicas"), [(40, 1), (41, 2), (80, 2), (81, 3), (4000, 9)])
def test_sequences_share_replicas_so_that_their_steps_meet_the_itl_target(sequences, replicas):
    assert decode().now(Demand(sequences=sequences, **FAST), 9).replicas == replicas


def test_time_that_prompts_take_makes_steps_longer():
    demand = Demand(sequences=30, prefill_share=0.5, **FAST)
    assert decode().now(Demand(sequences=30, **FAST), 9) == Size(1, "min")
    assert decode().now(demand, 9) == Size(2, "itl")  # 35 ms in half of the time


def test_before_anything_is_known_of_steps_slots_decide():
    assert decode(max_num_seqs=10).now(Demand(sequences=27), 9) == Size(3, "slots")


def test_blocks_decide_where_sequences_are_long():
    assert decode().now(Demand(sequences=20, kv_replicas=2.0, **FAST), 9) == Size(3, "kv")


def test_a_target_that_even_one_sequence_misses_is_left_alone():
    slow = {"decode_step_s": 0.06, "decode_sequence_s": 0.001}
    assert decode(max_num_seqs=10).now(Demand(sequences=18, **slow), 9) == Size(2, "slots")


def test_fewer_replicas_are_judged_by_the_steps_that_they_would_have():
    # at 900 tokens per second one replica would be busy with sequences 90 % of its time: steps of 50 ms
    demand = Demand(sequences=6, output_tokens_per_s=900, **FAST)
    assert decode().now(demand, 9) == Size(1, "min")
    assert decode().if_fewer(demand, 9) == Size(2, "itl")
    assert decode().if_fewer(Demand(sequences=6, output_tokens_per_s=700, **FAST), 9) == Size(1, "min")


def test_of_each_limit_it_is_known_how_much_is_used():
    demand = Demand(sequences=20, prefill_share=0.5, backlog_s=0.2, prompt_s=0.1, kv_replicas=0.45, **FAST)
    both = Sizing(SLO, 100, prompts=True, decodes=True)
    assert both.used(demand, 1) == pytest.approx(
        {
            "ttft": 0.5 / 0.85,
            "queue": 0.2 / 0.9,
            "slots": 20 / 90,
            "itl": 0.025 / 0.5 / 0.045,  # 25 ms in the half of the time that prompts leave, of 45 ms
            "kv": 0.5,
        }
    )
    assert both.now(demand, 9) == Size(2, "itl")
    assert max(both.used(demand, 2).values()) < 1


def test_of_a_target_that_even_one_sequence_misses_nothing_is_used():
    assert decode().used(Demand(sequences=18, decode_step_s=0.06), 1).keys() == {"slots", "kv"}


@given(
    st.builds(
        Demand,
        sequences=st.floats(0, 500),
        output_tokens_per_s=st.floats(0, 20000),
        decode_step_s=st.floats(0, 0.1),
        decode_sequence_s=st.floats(0, 0.01),
        prefill_share=st.floats(0, 20),
        backlog_s=st.floats(0, 100),
        prompt_s=st.floats(0, 3),
        kv_replicas=st.floats(0, 20),
    ),
    st.booleans(),
    st.booleans(),
)
def test_some_number_within_the_bounds_is_always_named(demand, prompts, decodes):
    sizing = Sizing(SLO, 64, prompts=prompts, decodes=decodes)
    for size in (sizing.now(demand, 12), sizing.if_fewer(demand, 12)):
        assert 1 <= size.replicas <= 12
        assert (size.reason == "min") == (size.replicas == 1)


# -- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_s", "share"), [(0.0, 0.85), (0.01, 0.85), (0.5, 0.5), (0.9, 0.3), (5.0, 0.3)])
def test_the_longer_a_prompt_takes_the_less_of_its_time_an_engine_may_be_given(prompt_s, share):
    assert prefill().prefill_limit(prompt_s) == pytest.approx(share)


def test_prompts_need_replicas_for_their_share_of_engines_time():
    demand = Demand(prefill_share=1.2, prompt_s=0.5)
    assert prefill().now(demand, 9) == Size(3, "ttft")


def test_a_queue_is_to_be_done_within_the_ttft_target():
    demand = Demand(prefill_share=0.4, prompt_s=0.2, backlog_s=3.0)
    assert prefill().now(demand, 9) == Size(4, "queue")  # 3 s of work, of which each may have 0.8 s


def test_a_pool_without_decoding_has_no_itl_target():
    assert prefill().now(Demand(sequences=5000, **FAST), 9) == Size(1, "min")
    assert prefill().now(Demand(sequences=5000, kv_replicas=1.5), 9) == Size(2, "kv")


def test_a_pool_that_has_its_prompts_computed_elsewhere_has_no_ttft_target():
    assert decode().now(Demand(prefill_share=0.5, backlog_s=50.0, prompt_s=0.9), 9) == Size(1, "min")
