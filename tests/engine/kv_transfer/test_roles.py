"""Two engines that change roles while prompts, KV and tokens are under way: the client sees the tokens of one engine
alone, and both give back all blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs import prompts_for_others
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add, EngineStatus, Notice
from engine.wire.parts.handoffs import (
    CancelDispatch,
    CancelPrefill,
    DispatchRemote,
    Prefill,
    PrefillReplica,
    PrefillReplicas,
    SetRole,
)
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.handoff_stats import Role
from tests.engine.kv_transfer.faulty_pair import Asked, FaultyPair
from tests.engine.kv_transfer.pair import Engine, Pair
from tests.engine.kv_transfer.test_faults import (
    CHUNK,
    STATES,
    Case,
    ends_well,
    make_config,
    one_engine,
    prompt,
)
from tests.engine_sockets import Ingress

NUM_TOKENS = 24


def switched(patient: bool = True, **options: int) -> EngineConfig:
    """An engine whose role changes; it answers requests at first. patient: else it waits briefly for other engines."""
    config = make_config("decode", **options)
    assert config.handoff is not None
    handoff = HandoffConfig(role="decode", policy="always", transport="tcp") if patient else config.handoff
    return replace(config, handoff=replace(handoff, switch_roles=True))


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[Asked], list[int]]]:
    with one_engine() as answer:
        yield answer


# -- without faults ----------------------------------------------------------------------------------------


class SwitchedPair(Pair):
    """Each engine may send prompts to the other."""

    def __init__(self, config: EngineConfig, ranks):
        super().__init__(config, config, ranks)
        self.by_name: dict[str, Engine] = {"decode": self.decode, "prefill": self.prefill}
        self.ingresses = {"decode": self.ingress, "prefill": Ingress(self._context, self.prefill.server)}
        self.answers: dict[str, tuple[str, GenerateRequest]] = {}

    def other(self, engine: Engine) -> Engine:
        return self.prefill if engine is self.decode else self.decode

    def give_roles(self, **roles: Role) -> None:
        """roles: by name of the engine. Each is told of the other as its replica would tell it."""
        for name, role in roles.items():
            self.by_name[name].send(SetRole(role))
        for name in roles:
            others = [other for other, role in roles.items() if other != name and role == "prefill"]
            self.by_name[name].send(PrefillReplicas([PrefillReplica(engine_id=other) for other in others]))
        self.wait_for(lambda: all(e.status and e.status.role == roles[n] for n, e in self.by_name.items()))

    def ask(self, where: str, name: str, length: int = 300) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
        request = GenerateRequest(
            request_id=name, prompt=prompt(name, length), params=params, reply_to=self.ingresses[where].address
        )
        self.answers[name] = (where, request)
        self.ingresses[where].send(Add(request))

    def check(self, alone: Callable[[Asked], list[int]]) -> None:
        """All that was asked is answered, once and as by an engine alone."""
        for name, (where, request) in self.answers.items():
            assert self.ingresses[where].tokens(name) == alone(Asked(request, where)), name
        self.settle()

    def _handle(self, engine: Engine, notice: Notice) -> None:
        match notice:
            case EngineStatus():
                super()._handle(engine, notice)
            case DispatchRemote(remote_request):
                self.remote_requests.append(remote_request)
                if self.forwards:
                    self.other(engine).send(Prefill(remote_request))
                else:
                    self.held.append(remote_request)
            case CancelDispatch(handoff_id):
                self.other(engine).send(CancelPrefill(handoff_id))

    def _forward(self, remote_request) -> None:
        engine = next(e for n, e in self.by_name.items() if n != remote_request.decode.engine_id)
        engine.send(Prefill(remote_request))


@pytest.fixture(autouse=True)
def short_status_period(monkeypatch):
    monkeypatch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.05)


def test_each_engine_finishes_what_it_has_when_the_roles_change_there_and_back(ranks, alone, monkeypatch):
    monkeypatch.setattr(prompts_for_others, "STUCK_S", 0.5)
    with SwitchedPair(switched(max_num_batched_tokens=CHUNK, max_num_seqs=8), ranks) as pair:
        for turn, (answering, computing) in enumerate([("decode", "prefill"), ("prefill", "decode")] * 2):
            pair.give_roles(**{answering: "decode", computing: "prefill"})
            for number in range(4):
                pair.ask(answering, f"{turn}.{number}")
            pair.ask(computing, f"{turn} from a router that knows of the change later")
            sent = len(pair.answers) - turn - 1
            pair.wait_for(lambda: len(pair.remote_requests) >= sent)  # noqa: B023
        pair.check(alone)
        assert [engine.status.role_changes for engine in pair.engines] == [3, 4]
        assert len(pair.remote_requests) == 16, "an engine that computes prompts for others computes its own"


def test_prompts_that_arrive_after_the_roles_have_changed_are_computed(ranks, alone):
    """They were on the way, to an engine that answers requests by now."""
    with SwitchedPair(switched(max_num_batched_tokens=CHUNK, max_num_seqs=8), ranks) as pair:
        pair.give_roles(decode="decode", prefill="prefill")
        pair.forwards = False
        for number in range(3):
            pair.ask("decode", f"{number}")
        pair.wait_for(lambda: len(pair.held) == 3)
        pair.give_roles(decode="prefill", prefill="decode")
        pair.release_prefill_requests()
        pair.check(alone)
        assert pair.decode.status.handoffs.results["received"], "they came from the other engine"


@pytest.mark.slow
def test_engines_whose_blocks_wait_for_each_others_prompts_refuse_them(ranks, alone, monkeypatch):
    """Both became prefill engines while their own prompts were on the way to each other."""
    monkeypatch.setattr(prompts_for_others, "STUCK_S", 0.3)
    with SwitchedPair(
        switched(num_gpu_blocks_override=24, max_num_batched_tokens=CHUNK, max_num_seqs=8), ranks
    ) as pair:
        pair.forwards = False
        for where in ("decode", "prefill"):
            pair.ask(where, f"from {where}", length=300)  # 19 of 24 blocks
        pair.wait_for(lambda: len(pair.held) == 2)
        pair.give_roles(decode="prefill", prefill="prefill")
        pair.release_prefill_requests()
        pair.check(alone)


def test_an_engine_refuses_its_own_prompt(ranks, alone):
    """Its replica's router may still take it for the prefill engine."""
    with SwitchedPair(switched(max_num_batched_tokens=CHUNK, max_num_seqs=8), ranks) as pair:
        pair.forwards = False
        pair.ask("decode", "a")
        pair.wait_for(lambda: len(pair.held) == 1)
        pair.give_roles(decode="prefill", prefill="prefill")
        pair.decode.send(Prefill(pair.held.pop()))
        pair.check(alone)


def test_a_role_is_refused_where_it_does_not_change(ranks):
    with SwitchedPair(make_config("decode"), ranks) as pair:
        pair.decode.send(SetRole("prefill"))
        pair.wait_for(lambda: pair.decode.status is not None and bool(pair.decode.status.refused))
        assert pair.decode.status.role is None


# -- with faults -------------------------------------------------------------------------------------------


def give_roles(pair: FaultyPair, decode: Role, prefill: Role) -> None:
    for name, role in (("decode", decode), ("prefill", prefill)):
        if name in pair.members:
            pair.members[name].send(SetRole(role))
    pair._tell_pool()


@pytest.fixture
def faulty_pair() -> Iterator[FaultyPair]:
    pair = FaultyPair(switched(False), switched(False, max_num_batched_tokens=CHUNK, max_num_seqs=1))
    give_roles(pair, "decode", "prefill")
    yield pair
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_roles_change_and_change_back_at_once(faulty_pair, alone, state):
    case = Case(faulty_pair, state, "roles change there and back")
    give_roles(faulty_pair, "prefill", "decode")
    give_roles(faulty_pair, "decode", "prefill")
    case.leave()
    ends_well(case, alone)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
def test_an_engine_is_killed_while_roles_change(faulty_pair, alone, state, victim):
    case = Case(faulty_pair, state, f"{victim} killed while roles change")
    give_roles(faulty_pair, "prefill", "decode")
    faulty_pair.kill(victim)
    case.leave()
    if victim == "prefill":
        faulty_pair.end_of(case.name)
    faulty_pair.start(victim)
    give_roles(faulty_pair, "decode", "prefill")
    ends_well(case, alone)
