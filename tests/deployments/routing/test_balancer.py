"""Where requests go, with engines that say what they do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_update

from deployments.routing.balancer import BROKEN_S, Balancer
from deployments.routing.choice_observer import Choice, ChoiceObserver
from deployments.routing.config import PolicyName, RoutingConfig
from deployments.routing.prompt_digest import PromptDigest, PromptDigester
from engine.wire.messages import EngineUpdate
from engine.wire.parts.images import MultiModalFeatureSpec, PlaceholderRange
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import Peer
from engine.wire.stats.engine_stats import EngineLoad
from tests.deployments.routing.pools import BLOCK, PoolEngine, block_hashes, prompt

ENGINES = ["decode-m-a", "decode-m-b", "decode-m-c", "decode-m-d"]


def balancer(policy: PolicyName = "prefix_aware", **weights: float) -> Balancer:
    return Balancer(RoutingConfig(policy=policy, **weights), "decode", BLOCK, random.Random(0))


def report(engine: str, number: int = 0, *, snapshot: bool = True, stored: bytes = b"", **load: Any) -> EngineUpdate:
    return EngineUpdate(
        engine_id=engine,
        number=number,
        snapshot=snapshot,
        load=EngineLoad(**{"slots": 128, "blocks_total": 10_000, **load}),
        stored=stored,
        removed=b"",
        admitted=[],
        prefilled=[],
    )


def reported(policy: PolicyName = "prefix_aware") -> Balancer:
    """A balancer to which all engines have reported that they have nothing to do."""
    router = balancer(policy)
    for engine in ENGINES:
        router.update(report(engine))
    return router


def plain(number: int, tokens: int = 40) -> PromptDigest:
    """A prompt that has nothing in common with others."""
    return prompt(f"r{number}", [number * 1000 + i for i in range(tokens)])


# fetching


def peer_of(engine: str) -> Peer:
    return Peer(engine, f"tcp://{engine}", 1)


def holding(router: Balancer, policy_load: dict[str, Any], tokens: list[int], *, fetching: bool = True) -> None:
    """The last engine has the KV of some tokens, and this load."""
    stored = b"".join(block_hashes(tokens))
    for engine in ENGINES:
        last = engine == ENGINES[-1]
        made = report(engine, stored=stored if last else b"", **(policy_load if last else {}))
        router.update(msgspec.structs.replace(made, peer=peer_of(engine) if fetching else None))


TOKENS = list(range(100))
NOW = 1000.0


def test_a_request_that_another_engine_gets_learns_who_has_its_prefix():
    router = balancer()
    holding(router, {"queued_tokens": 1000}, TOKENS[:80])
    decision = router.choose(prompt("r", TOKENS), ENGINES)
    assert decision.engines[0] != ENGINES[-1]
    assert decision.holder == KVHolder(peer_of(ENGINES[-1]), 80)
    router.update(msgspec.structs.replace(report(decision.engines[0], stored=b"".join(block_hashes(TOKENS[:80])))))
    assert router.choose(prompt("r", TOKENS), decision.engines[:1]).holder is None, "it has as much now"


def test_a_holder_without_free_capacity_counts_but_not_one_that_has_just_failed():
    router = balancer()
    holding(router, {}, TOKENS)
    assert router.choose(prompt("r", TOKENS), ENGINES[:2]).holder == KVHolder(peer_of(ENGINES[-1]), 99)
    router.mark_unhealthy(ENGINES[-1])
    assert router.choose(prompt("r", TOKENS), ENGINES[:2]).holder is None


def test_there_is_no_holder_where_prefixes_are_not_fetched():
    router = balancer()
    holding(router, {"queued_tokens": 1000}, TOKENS, fetching=False)
    assert router.choose(prompt("r", TOKENS), ENGINES).holder is None


def test_only_blocks_that_are_computed_can_be_fetched():
    router = balancer("round_robin")
    holding(router, {}, [])
    assert [router.choose(prompt(f"r{n}", TOKENS), ENGINES).holder for n in range(3)] == [None] * 3


# adapters


class Heard(ChoiceObserver):
    def __init__(self) -> None:
        self.watched: list[str] = []
        self.choices: list[Choice] = []

    def watch(self, role: str, policy: str, cost: Any) -> None:
        self.watched.append(f"{role} {policy}")

    def chosen(self, choice: Choice) -> None:
        self.choices.append(choice)


def test_an_observer_hears_of_the_choices_from_then_on():
    router, heard = reported(), Heard()
    router.choose(plain(1), ENGINES)
    for number in (2, 3):
        router.use_observer(heard)
        decision = router.choose(plain(number), ENGINES)
    assert heard.watched == ["decode prefix_aware"]
    assert [choice.prompt.request_id for choice in heard.choices] == [plain(2).request_id, plain(3).request_id]
    assert (heard.choices[-1].ranked, heard.choices[-1].reason) == (decision.engines, decision.reason)


def adapted(number: int, adapter: str, tokens: int = 40) -> PromptDigest:
    return replace(plain(number, tokens), adapter=adapter)


def test_requests_go_where_their_adapter_is_or_is_being_loaded():
    router = reported()
    router.update(report(ENGINES[2], adapters=("sql",), blocks_used=20))
    assert router.choose(adapted(0, "sql"), ENGINES).engines[0] == ENGINES[2]
    home = router.choose(adapted(1, "new"), ENGINES).engines[0]
    assert [router.choose(adapted(n, "new", 8), ENGINES).engines[0] for n in range(2, 5)] == [home] * 3
    assert router.stats.adapters == {"held": 4, "to_load": 1}
    router.placements.check()


def test_an_adapter_that_is_hot_is_loaded_where_there_is_less_to_do():
    router = balancer()
    for engine in ENGINES:
        router.update(report(engine, adapters=("hot",) if engine == ENGINES[0] else ()))
    placed = [router.choose(adapted(number, "hot"), ENGINES).engines[0] for number in range(64)]
    assert placed[0] == ENGINES[0] and {*placed} == {*ENGINES}
    assert all(placed.count(engine) >= 10 for engine in ENGINES)


def test_what_is_expected_of_a_request_ends_with_it():
    router = reported()
    home = router.choose(adapted(0, "sql"), ENGINES).engines[0]
    assert router.placements.engine(home).holds("sql")
    router.end("r0", confirmed=False)
    assert not router.placements.engine(home).holds("sql") and router.placements.engine(home).holds("")


def test_ingresses_that_have_heard_nothing_choose_one_engine_for_an_adapter():
    chosen = {balancer().choose(adapted(number, "sql"), ENGINES).engines[0] for number in range(5)}
    assert len(chosen) == 1


def test_blocks_of_another_adapter_are_no_prefix():
    digester, tokens = PromptDigester(BLOCK), list(range(40))
    keys = [digester.digest("r", tokens, "", adapter=adapter).keys for adapter in ("", "a", "b", "")]
    assert len({*map(tuple, keys)}) == 3 and keys[0] == keys[3]


# the three bugs that other routers had


@pytest.mark.parametrize("policy", ["prefix_aware", "power_of_two"])
def test_448_requests_at_once_do_not_all_go_to_one_engine(policy):
    """Nothing has been reported since the first: what was placed just now has to count."""
    router = reported(policy)
    placed = [router.choose(plain(number), ENGINES).engines[0] for number in range(448)]
    assert all(abs(placed.count(engine) - 112) <= 8 for engine in ENGINES)


def test_448_requests_of_one_prefix_do_not_all_go_to_the_engine_that_has_it():
    router, prefix = balancer(), list(range(400))
    first = router.choose(prompt("first", prefix), ENGINES).engines[0]
    placed = [router.choose(prompt(f"r{n}", [*prefix, n, n, n]), ENGINES).engines[0] for n in range(448)]
    assert placed[0] == first
    assert all(placed.count(engine) > 50 for engine in ENGINES)


@pytest.mark.parametrize(
    ("weights", "chosen"),
    [
        ({"prefix_weight": 1.0, "running_weight": 0.1}, "decode-m-a"),
        ({"prefix_weight": 0.0, "running_weight": 0.1}, "decode-m-b"),
        ({"prefix_weight": 1.0, "running_weight": 2.0}, "decode-m-b"),
        ({"prefix_weight": 9.0, "running_weight": 2.0}, "decode-m-a"),
    ],
)
def test_each_weight_changes_where_a_request_goes(weights, chosen):
    """10 blocks of the prompt are at `a`, where 20 blocks are in use."""
    router = balancer(**weights)
    tokens = list(range(10 * BLOCK + 1))
    a, b = PoolEngine("decode-m-a"), PoolEngine("decode-m-b")
    a.serve("before", tokens)
    a.serve("other", list(range(500, 500 + 9 * BLOCK)))
    assert a.pool.num_used == 20
    for engine in (a, b):
        router.update(engine.snapshot())
    assert router.choose(prompt("r", tokens), [a.name, b.name]).engines[0] == chosen


def test_an_estimate_does_not_drift_from_what_engines_report():
    """Requests end, are lost, are cancelled, and never reach their engine; and after each report the load is
    what the report says."""
    router, rng = balancer(), random.Random(1)
    for number in range(2000):
        request = plain(number % 50, 20)
        request = PromptDigest(f"r{number}", request.num_tokens, request.keys)
        router.choose(request, ENGINES)
        if rng.random() < 0.9:
            router.end(request.request_id, confirmed=rng.random() < 0.5)
        if number % 100 == 99:
            pending = [name for engine in ENGINES for name in router.placements.engine(engine).pending]
            for engine in ENGINES:
                load = EngineLoad(number % 7, number % 11, number % 13, 128, 10_000)
                admitted = list(router.placements.engine(engine).pending)
                router.placements.report(engine, load, admitted)
                assert router.placements.engine(engine).load == load
            assert pending, "something was under way"
        router.placements.check()


# prefixes


def test_a_prompt_goes_where_its_prefix_is_and_the_estimate_is_right():
    router, tokens = balancer(), list(range(41))
    engines = {name: PoolEngine(name) for name in ENGINES}
    for engine in engines.values():
        router.update(engine.snapshot())
    first = router.choose(prompt("1", tokens), ENGINES)
    assert (first.reason, first.cached_tokens) == ("no_prefix", 0)
    engine = engines[first.engines[0]]
    engine.serve("1", tokens)
    router.update(engine.update())
    router.end("1", confirmed=True)
    again = router.choose(prompt("2", [*tokens, 99]), ENGINES)
    assert (again.engines[0], again.reason, again.cached_tokens) == (engine.name, "longest_prefix", 40)
    assert (router.stats.estimated_tokens, router.stats.cached_tokens, router.stats.drift_tokens) == (0, 0, 0)
    engine.serve("2", [*tokens, 99])
    router.update(engine.update())
    assert (router.stats.estimated_tokens, router.stats.cached_tokens, router.stats.drift_tokens) == (40, 40, 0)


@pytest.mark.parametrize("policy", ["power_of_two", "round_robin"])
def test_a_policy_that_ignores_prefixes_gives_no_prefix_as_its_reason_and_knows_what_will_be_cached(policy):
    router, tokens = balancer(policy), list(range(40))
    found = [router.choose(prompt(f"r{number}", [*tokens, number]), ENGINES) for number in range(8)]
    assert {decision.reason for decision in found} == {"prefix_ignored"}
    seen: set[str] = set()
    for decision in found:
        assert decision.cached_tokens == (40 if decision.engines[0] in seen else 0)
        seen.add(decision.engines[0])


def test_a_prompt_that_was_just_sent_counts_as_there_before_the_engine_says_so():
    router, tokens = balancer(), list(range(40))
    first = router.choose(prompt("1", tokens), ENGINES)
    assert router.choose(prompt("2", tokens), ENGINES).engines[0] == first.engines[0]


def test_blocks_of_a_request_that_has_ended_are_expected_until_its_engine_has_spoken():
    router, tokens = balancer(), list(range(40))
    engines = {name: PoolEngine(name) for name in ENGINES}
    for engine in engines.values():
        router.update(engine.snapshot())
    engine = engines[router.choose(prompt("1", tokens), ENGINES).engines[0]]
    router.end("1", confirmed=True)
    assert router.placements.engine(engine.name).prefixes.match(prompt("", tokens).keys) == 10
    engine.take("1", tokens)
    engine.end("1")  # it was aborted before it ran
    router.update(engine.update())
    assert router.placements.engine(engine.name).prefixes.match(prompt("", tokens).keys) == 0


@pytest.mark.parametrize("runs", [True, False], ids=["it runs", "it has ended"])
def test_blocks_of_a_request_whose_prompt_was_computed_before_a_snapshot_are_not_expected_after_its_end(runs):
    """Seed 33 of tests.days: the engine had said so in an update that this router did not get."""
    router, tokens, engine = balancer(), list(range(40)), PoolEngine("decode-m-a")
    router.choose(prompt("1", tokens), [engine.name])
    engine.serve("1", tokens)
    if not runs:
        engine.end("1")
    engine.update()  # for other routers
    router.update(engine.snapshot())
    assert router.placements.engine(engine.name).load.sequences == 1, "it counts once"
    engine.end("1")
    router.update(engine.update())
    router.end("1", confirmed=True)
    engine.pool.clear_cache()
    router.update(engine.update())
    assert router.placements.engine(engine.name).prefixes.match(prompt("", tokens).keys) == 0
    router.placements.check()


def test_blocks_of_a_request_that_never_got_there_are_not_expected():
    router, tokens = balancer(), list(range(40))
    engine = router.choose(prompt("1", tokens), ENGINES).engines[0]
    router.end("1", confirmed=False)
    assert router.placements.engine(engine).prefixes.match(prompt("", tokens).keys) == 0
    assert router.placements.engine(engine).load == EngineLoad()


def test_lost_updates_are_noticed_and_a_snapshot_puts_everything_right():
    router, engine = balancer(), PoolEngine("decode-m-a")
    assert not router.update(engine.update()), "there was no snapshot before"
    assert router.update(engine.snapshot())
    router.choose(prompt("1", list(range(8))), ["decode-m-a"])
    engine.serve("1", list(range(8)))
    engine.update()  # is lost
    router.end("1", confirmed=True)
    assert not router.update(engine.update())
    assert router.update(engine.snapshot())
    assert router.placements.engine("decode-m-a").prefixes.stored.to_set() == set(prompt("", list(range(8))).keys)
    engine.end("1")
    engine.pool.clear_cache()
    assert router.update(engine.update())
    assert router.placements.engine("decode-m-a").prefixes.match(prompt("", list(range(8))).keys) == 0, (
        "nothing of the lost message is left"
    )


# load


def test_a_request_goes_where_it_need_not_wait_rather_than_to_its_prefix():
    router, tokens = balancer(), list(range(400))
    full, free = PoolEngine("decode-m-a", 256, slots=1), PoolEngine("decode-m-b", 256)
    full.serve("1", tokens)
    for engine in (full, free):
        router.update(engine.snapshot())
    decision = router.choose(prompt("2", tokens), [full.name, free.name])
    assert (decision.engines, decision.reason) == ([free.name, full.name], "shorter_prefix")


def test_a_request_goes_where_its_blocks_fit():
    router, tokens = balancer(running_weight=0.0), list(range(100))
    small, large = PoolEngine("decode-m-a", 24), PoolEngine("decode-m-b", 256)
    for engine in (small, large):
        router.update(engine.snapshot())
    assert router.choose(prompt("1", tokens), [small.name, large.name]).engines[0] == large.name


def test_prefill_looks_at_queues_and_not_at_blocks_that_wait_to_be_read():
    router = Balancer(RoutingConfig(), "prefill", BLOCK, random.Random(0))
    router.update(report("p-a", blocks_used=9000))
    router.update(report("p-b", queued_tokens=40))
    assert router.choose(plain(1), ["p-a", "p-b"]).engines[0] == "p-a"
    router.update(report("p-a", blocks_used=9000, queued_tokens=80))
    assert router.choose(plain(2), ["p-a", "p-b"]).engines[0] == "p-b"


# replicas come and go


def test_an_engine_that_lost_a_request_comes_last_until_it_speaks_again():
    router = balancer()
    for engine in ENGINES[1:]:
        router.update(report(engine, queued_tokens=1000))
    router.update(report(ENGINES[0]))
    assert router.choose(plain(1), ENGINES).engines[0] == ENGINES[0]
    router.end("r1", confirmed=False)
    router.mark_unhealthy(ENGINES[0])
    decision = router.choose(plain(1), ENGINES)
    assert decision.engines[0] != ENGINES[0] and decision.engines[-1] == ENGINES[0]
    router.end("r1", confirmed=False)
    assert router.choose(plain(1), ENGINES[:1]).engines == ENGINES[:1], "it is better than none"
    router.update(report(ENGINES[0], 1, snapshot=False))
    assert router.choose(plain(2), ENGINES).engines[0] == ENGINES[0]


def test_an_engine_that_is_about_to_stop_comes_last_however_often_it_reports():
    router = balancer()
    for engine in ENGINES[1:]:
        router.update(report(engine, queued_tokens=1000))
    for number in range(2):
        router.update(replace_update(report(ENGINES[0], number), draining=True))
        assert router.choose(plain(number), ENGINES).engines[-1] == ENGINES[0]
    router.keep(ENGINES[1:], NOW)
    router.update(report(ENGINES[0]))
    assert router.choose(plain(3), ENGINES).engines[0] == ENGINES[0], "another engine of its name"


def test_nothing_is_left_of_an_engine_that_is_gone():
    router, engine = balancer(), PoolEngine("decode-m-a")
    tokens = list(range(8))
    engine.serve("0", tokens)
    router.update(engine.snapshot())
    router.choose(prompt("1", tokens), [engine.name])
    router.choose(prompt("2", tokens), [engine.name])
    router.end("2", confirmed=True)
    router.mark_unhealthy(engine.name)
    router.keep(["decode-m-b"], NOW)
    assert router.placements.engine(engine.name).prefixes.match(prompt("", tokens).keys) == 0
    assert router.placements.engine(engine.name).load == EngineLoad()
    assert not router.placements.records
    router.end("1", confirmed=True)
    router.placements.check()
    assert router.choose(prompt("3", tokens), [engine.name, "decode-m-b"]).reason == "no_prefix"


def test_a_request_that_its_first_engine_did_not_take_is_placed_on_the_second_alone():
    router = balancer()
    first = router.choose(plain(1), ENGINES).engines[0]
    second = router.choose(plain(1), [e for e in ENGINES if e != first]).engines[0]
    assert router.placements.engine(first).load == EngineLoad()
    assert router.placements.engine(second).load.sequences == 1
    assert router.placements.engine(first).prefixes.match(plain(1).keys) == 0
    assert sum(router.stats.routed.values()) == 1


# sessions


def chosen_for(router: Balancer, session: str, number: int, engines: list[str]) -> tuple[str, str]:
    decision = router.choose(prompt(f"{session}-{number}", [number] * 40, session), engines)
    router.end(f"{session}-{number}", confirmed=False)
    return decision.engines[0], decision.reason


@pytest.mark.parametrize("policy", ["prefix_aware", "power_of_two", "round_robin"])
def test_a_session_stays_with_its_engine_whatever_the_policy(policy):
    router = balancer(policy)
    assert len({chosen_for(router, "s", number, ENGINES) for number in range(20)}) == 1


def test_sessions_spread_over_engines_and_two_routers_agree():
    homes = [chosen_for(balancer(), f"s{number}", 0, ENGINES)[0] for number in range(200)]
    assert homes == [chosen_for(balancer(), f"s{number}", 1, ENGINES)[0] for number in range(200)]
    assert all(homes.count(engine) > 25 for engine in ENGINES)


def test_only_the_sessions_of_an_engine_that_goes_move_and_they_come_back_with_it():
    router = balancer()
    homes = {f"s{number}": chosen_for(router, f"s{number}", 0, ENGINES)[0] for number in range(100)}
    later = {session: chosen_for(router, session, 1, ENGINES[1:])[0] for session in homes}
    assert all(later[session] == home for session, home in homes.items() if home != ENGINES[0])
    assert len({later[session] for session, home in homes.items() if home == ENGINES[0]}) == 3, "they spread"
    assert {session: chosen_for(router, session, 2, ENGINES)[0] for session in homes} == homes


def test_a_session_leaves_its_engine_only_where_even_a_full_cache_would_not_be_worth_the_load_and_always_for_the_same():
    router = balancer()
    home, _ = chosen_for(router, "s", 0, ENGINES)
    for engine in ENGINES:
        router.update(report(engine))
    router.update(report(home, queued_tokens=80))
    assert chosen_for(router, "s", 1, ENGINES) == (home, "session"), "its prompt alone counts as much"
    router.update(report(home, queued_tokens=84))
    moved = {chosen_for(router, "s", number, ENGINES) for number in range(2, 12)}
    assert len(moved) == 1 and (home, "session") not in moved
    assert moved.pop()[1] == "session_moved"
    router.update(report(home))
    assert chosen_for(router, "s", 12, ENGINES) == (home, "session")


def test_a_session_leaves_its_engine_where_it_would_have_to_wait_for_a_slot_and_others_have_one():
    router = balancer()
    home, _ = chosen_for(router, "s", 0, ENGINES)
    for engine in ENGINES:
        router.update(report(engine))
    router.update(report(home, sequences=128))
    assert chosen_for(router, "s", 1, ENGINES)[1] == "session_moved"
    for engine in ENGINES:
        router.update(report(engine, sequences=128))
    assert chosen_for(router, "s", 2, ENGINES) == (home, "session"), "it would have to wait everywhere"


def test_images_go_where_fewer_embeddings_wait_to_be_made():
    """Both engines have as many prompt tokens before them, and one has pictures among them."""
    router = balancer()
    queue = {"queued_tokens": 400, "blocks_used": 100, "sequences": 4}
    router.update(report(ENGINES[0], queued_embeds=300, **queue))
    router.update(report(ENGINES[1], **queue))
    engines = ENGINES[:2]
    images = [MultiModalFeatureSpec(data={}, mm_hash=b"", mm_position=PlaceholderRange(2, 100), num_embeds=100)]
    chosen = []
    for number in range(5):
        tokens = [number] * 2 + [7] * 100 + [3]
        digest = PromptDigester(BLOCK).digest(f"r{number}", tokens, str(number), "", images)
        chosen.append(router.choose(digest, engines).engines[0])
    assert chosen[0] == ENGINES[1] and set(chosen) == set(engines)  # until it has as much before it
    assert router.placements.engine(ENGINES[1]).load.queued_embeds == 100 * chosen.count(ENGINES[1])


def test_a_question_about_an_image_goes_to_the_engine_that_has_seen_it():
    """Two images have the same placeholders; only their hashes tell them apart."""

    def asked(name: str, image: bytes) -> tuple[str, int]:
        place = PlaceholderRange(4, 24)
        images = [MultiModalFeatureSpec(data={}, mm_hash=image, mm_position=place, num_embeds=24)]
        digest = PromptDigester(BLOCK).digest(name, [1] * 4 + [7] * 24 + [2, 3], "", "", images)
        decision = router.choose(digest, ENGINES)
        return decision.engines[0], decision.cached_tokens

    router = balancer()
    seen = {image: asked(f"first {image!r}", image) for image in (b"a" * 16, b"b" * 16)}
    assert all(cached <= 4 for _, cached in seen.values())  # what comes before the image may be the same
    for image, (engine, _) in seen.items():
        assert asked(f"again {image!r}", image) == (engine, 28)


# holds


def held_by(engine: str, digest: PromptDigest, blocks: int, number: int = 0, **load: Any) -> EngineUpdate:
    """A report of an engine that holds the first blocks of a prompt. The other half of each hash is made up."""
    end = digest.keys[blocks - 1].to_bytes(8, "little") + bytes(8)
    return msgspec.structs.replace(report(engine, number, **load), held=end)


def test_prompt_goes_where_it_is_held_even_if_another_engine_has_less_to_do():
    router, talk = reported(), plain(1)
    router.update(held_by(ENGINES[2], talk, 3, queued_tokens=talk.num_tokens - 1))
    decision = router.choose(talk, ENGINES)
    assert (decision.engines[0], decision.reason) == (ENGINES[2], "held")
    assert router.choose(plain(2), ENGINES).reason == "no_prefix"
    router.update(held_by(ENGINES[2], talk, 3, queued_tokens=10 * talk.num_tokens))
    assert router.choose(replace(talk, request_id="later"), ENGINES).reason != "held", "it would come last there"


def test_prompt_goes_where_more_of_it_is_held_and_its_session_comes_second():
    router, talk = reported(), replace(plain(1), session="s")
    home = router.choose(talk, ENGINES).engines[0]
    others = [engine for engine in ENGINES if engine != home]
    router.update(held_by(others[0], talk, 1))
    router.update(held_by(others[1], talk, 3))
    assert router.choose(replace(talk, request_id="later"), ENGINES).engines[0] == others[1]


def test_hold_that_has_ended_attracts_nobody():
    router, talk = balancer(), plain(1)
    router.update(held_by(ENGINES[2], talk, 3))
    router.update(msgspec.structs.replace(report(ENGINES[2], 1, snapshot=False), held=None))
    assert router.placements.engine(ENGINES[2]).held, "nothing was said of holds"
    router.update(msgspec.structs.replace(report(ENGINES[2], 2, snapshot=False), held=b""))
    assert not router.placements.engine(ENGINES[2]).held


def test_holds_of_an_engine_that_goes_are_broken_and_the_next_turn_is_told_once():
    router, talk = reported(), plain(1)
    router.update(held_by(ENGINES[2], talk, 3))
    left = [engine for engine in ENGINES if engine != ENGINES[2]]
    router.keep(left, NOW)
    assert router.stats.holds_broken == 0, "it may be on its way to another engine"
    told = [router.choose(replace(talk, request_id=f"turn {i}"), left).lost_hold for i in range(2)]
    assert told == [True, False]
    router.count_broken_holds(NOW + BROKEN_S)
    assert router.stats.holds_broken == 1


def test_a_hold_is_broken_once_no_other_engine_has_had_it_for_a_time():
    router, talk, other = reported(), plain(1), plain(2)
    router.update(held_by(ENGINES[2], talk, 3))
    router.update(held_by(ENGINES[1], other, 3))
    router.keep(ENGINES[:1], NOW)
    router.count_broken_holds(NOW + BROKEN_S - 1)
    assert router.stats.holds_broken == 0
    router.update(held_by(ENGINES[0], talk, 3))
    router.count_broken_holds(NOW + BROKEN_S)
    router.count_broken_holds(NOW + 2 * BROKEN_S)
    assert router.stats.holds_broken == 1, "the other one has moved"
    turns = [replace(each, request_id=f"turn {each.request_id}") for each in (talk, other)]
    assert [router.choose(turn, ENGINES[:1]).lost_hold for turn in turns] == [False, True]


def test_turn_is_not_told_of_a_broken_hold_that_another_ingress_has_made_good():
    router, talk = reported(), plain(1)
    router.update(held_by(ENGINES[2], talk, 2))
    router.keep(ENGINES[:2], NOW)
    router.update(held_by(ENGINES[1], talk, 3))
    decision = router.choose(replace(talk, request_id="later"), ENGINES[:2])
    assert (decision.reason, decision.lost_hold) == ("held", False)
