"""The other engine of a handoff, and all between, for a scheduler: KV is written and read as the protocol allows."""

from __future__ import annotations

from engine.costs.request_cost import cost_of
from engine.costs.step_cost import StepCost
from engine.model.kv_groups import KVCacheSpec
from engine.options.handoff import HandoffConfig
from engine.parts.grammar.inputs import GrammarSet
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.inputs import AddedRemote, HandoffWentOn
from engine.parts.handoffs.remote_prefill_policy import RemotePrefillPolicy
from engine.wire.handoff import (
    CancelHandoff,
    Closed,
    Failed,
    FinishPrefill,
    FirstToken,
    HandoffEvent,
    OpenHandoff,
    Received,
    RefusePrefill,
    ReportProgress,
)
from engine.wire.parts.handoffs import CancelDispatch, DispatchRemote
from engine.wire.plan import StepPlan
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from tests.fake_runner import FakeGrammar, Harness, next_token


def first_token(remote_request: RemoteRequest) -> int:
    grammar = (
        FakeGrammar(remote_request.token_ids[remote_request.num_prompt :])
        if remote_request.params.structured_outputs
        else None
    )
    return next_token(remote_request.seed, remote_request.token_ids, grammar.masks() if grammar else None)


def handed_over(request: RemoteRequest, spec: KVCacheSpec, size: int) -> range:
    """The blocks of a prompt, by number, that one KV cache group hands over."""
    tokens = len(request.token_ids)
    return range(max(request.skip, spec.first_needed(tokens)) // size, -(-tokens // size))


def border_handed_over(request: RemoteRequest, harness: Harness) -> int:
    """The position of the state that is handed over; 0 if none is."""
    size = harness.pools[-1].block_size if harness.runner.chunk else len(request.token_ids)
    last = (len(request.token_ids) - 1) // size * size
    return last if last > request.skip else 0


class DecodeHarness(Harness):
    """A decode engine. Whatever has not come yet is overwritten with nonsense before every step."""

    def __init__(self, *, max_attempts: int = 3, **options):
        config = HandoffConfig(role="decode", policy="always", max_attempts=max_attempts)
        self.policy = RemotePrefillPolicy(config, StepCost())
        super().__init__(handoffs=Handoffs(self.policy, Peer("decode", "", 1), "print"), **options)
        self.open: dict[str, OpenHandoff] = {}
        self.cancelled: dict[str, int] = {}  # with what is paid
        self.forgotten: set[str] = set()

    def plan(self) -> StepPlan | None:
        self._forward()
        for handoff in self.open.values():
            self._write(handoff, 0)
        plan = super().plan()
        self._forward()
        return plan

    def commit(self) -> None:
        super().commit()
        self._forward()

    def receive(self, handoff_id: str, cached: int = 0, byte_ns: float = 0.0) -> None:
        handoff = self.open.pop(handoff_id)
        tokens = handoff.remote_request.token_ids
        self._write(handoff, len(tokens))
        token = first_token(handoff.remote_request)
        self.handle(Received(handoff_id, FirstToken(token, None, b"", cached), byte_ns))

    def fail(self, handoff_id: str, verified_blocks: int = 0, retry: bool = True) -> None:
        """verified_blocks: of those that were to come; less if there are no so many whole ones, and none before all are
        there if some of the KV comes at the end."""
        handoff = self.open.pop(handoff_id)
        skip, size = handoff.remote_request.skip, self.config.block_size
        whole = max(skip, len(handoff.remote_request.token_ids) // size * size)
        verified = min(skip + verified_blocks * size, whole)
        parts = self.runner.chunk or any(spec.window is not None for spec in self.runner.specs)
        if verified < whole and parts:
            verified = skip
        self._write(handoff, verified)
        self.handle(Failed(handoff_id, "link", verified, retry))
        assert handoff_id in self.forgotten

    def handle(self, event: HandoffEvent) -> None:
        self.scheduler.apply(HandoffWentOn(event), 0.0)
        self.record()
        self._forward()

    def settle(self) -> None:
        self._forward()
        self.receive(next(iter(self.open)))

    def _forward(self) -> None:
        for action in [*self.scheduler.take_messages("engines"), *self.scheduler.take_messages("control")]:
            match action:
                case OpenHandoff(remote_request, blocks, others):
                    for spec, own in zip(self.runner.specs, [blocks, *others], strict=not self.runner.chunk):
                        assert len(own) == len(handed_over(remote_request, spec, self.config.block_size))
                    if self.runner.chunk:
                        assert len(others) == len(self.runner.specs)
                        assert len(others[-1]) == (border_handed_over(remote_request, self) > 0)
                    self.open[remote_request.handoff_id] = action
                case CancelHandoff(handoff_id, paid_ns):
                    self.cancelled[handoff_id] = paid_ns
                case CancelDispatch(handoff_id):
                    self.forgotten.add(handoff_id)
                case DispatchRemote(remote_request):
                    assert remote_request.handoff_id in self.open, "it is opened before anybody hears of it"
                case _:
                    raise AssertionError(action)

    def _write(self, handoff: OpenHandoff, right: int) -> None:
        """KV of tokens up to `right`, and nonsense behind them."""
        request, size = handoff.remote_request, self.config.block_size
        groups = [handoff.blocks, *handoff.others]
        if self.runner.chunk:
            border = border_handed_over(request, self)
            for snapshot in groups.pop():
                whole = border <= right
                self.runner.snapshots[snapshot] = tuple(request.token_ids[:border]) if whole else ("nonsense",)
        for spec, kv, blocks in zip(self.runner.specs, self.runner.kvs, groups, strict=True):
            for index, block in zip(handed_over(request, spec, size), blocks, strict=True):
                for position in range(index * size, min((index + 1) * size, len(request.token_ids))):
                    value = tuple(request.token_ids[: position + 1]) if position < right else ("nonsense",)
                    kv[block * size + position % size] = value


class PrefillHarness(Harness):
    """A prefill engine. Everything that it has reported is read again after every step, until the handoff is closed."""

    def __init__(self, **options):
        super().__init__(handoffs=Handoffs(None, Peer("prefill", "", 1), "print"), **options)
        self.remote_requests: dict[str, RemoteRequest] = {}  # those that are not closed
        self.reports: dict[str, ReportProgress] = {}
        self.firsts: dict[str, FirstToken] = {}
        self.refused: dict[str, str] = {}
        self.ended: set[str] = set()

    def add_remote_prefill(
        self, name: str, prompt: list[int], *, skip: int = 0, seed: int = 1, timeout_s=None, ttft_slo_s=None, **params
    ) -> None:
        remote_request = RemoteRequest(
            handoff_id=name,
            request_id=f"request of {name}",
            attempt=1,
            token_ids=prompt,
            num_prompt=len(prompt),
            params=SamplingParams(**params),
            seed=seed,
            cache_salt="",
            skip=skip,
            fingerprint="print",
            decode=Peer("decode", "", 1),
            timeout_s=timeout_s,
            ttft_slo_s=ttft_slo_s,
        )
        request = self.scheduler.apply(AddedRemote(remote_request), 0.0)
        if remote_request.params.structured_outputs is not None:
            self.scheduler.apply(GrammarSet(request.request_id, FakeGrammar()), 0.0)
        self.remote_requests[name] = remote_request

    def commit(self) -> None:
        super().commit()
        self.read()

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        self.read()
        return plan

    def abort(self, name: str) -> None:
        super().abort(name)
        self.read()

    def close(self, name: str, reason: str = "released", paid_ns: int = 0) -> None:
        del self.remote_requests[name]
        self.scheduler.apply(HandoffWentOn(Closed(name, reason, paid_ns)), 0.0)
        (event,) = self.scheduler.out.take_events()
        assert event.delta.finish_reason == ("length" if reason == "released" else "abort")
        self.ledger.report([event])
        self.ended.add(event.delta.request_id)
        self.check()
        if reason != "released" or name in self.firsts:
            told = self.reports[name].cost.compute_ns if reason == "released" else paid_ns
            assert self.ledger.of(event.request) == told

    def settle(self) -> None:
        self.close(next(iter(self.scheduler.parts[Handoffs].for_others.leased)))

    def read(self) -> None:
        for action in self.scheduler.take_messages("engines"):
            match action:
                case ReportProgress(handoff_id, upto, blocks):
                    before = self.reports.get(handoff_id)
                    assert before is None or (before.upto <= upto and before.blocks == blocks[: len(before.blocks)])
                    self.reports[handoff_id] = action
                    self._check_cost(action)
                case FinishPrefill(handoff_id, first):
                    remote_request = self.remote_requests[handoff_id]
                    assert first.token == first_token(remote_request)
                    assert self.reports[handoff_id].upto == len(remote_request.token_ids)
                    self.firsts[handoff_id] = first
                case RefusePrefill(remote_request, reason):
                    self.refused[remote_request.handoff_id] = reason
                case _:
                    raise AssertionError(action)
        size = self.config.block_size
        for name in self.reports.keys() & self.remote_requests.keys():
            report, remote_request = self.reports[name], self.remote_requests[name]
            blocks, whole = iter(report.blocks), report.upto == len(remote_request.token_ids)
            for spec, kv in zip(self.runner.specs, self.runner.kvs, strict=True):
                for index in handed_over(remote_request, spec, size):
                    if not whole and index * size >= report.upto:
                        break
                    block = next(blocks)
                    for position in range(index * size, min((index + 1) * size, report.upto)):
                        seen = tuple(remote_request.token_ids[: position + 1])
                        assert kv[block * size + position % size] == seen, "other KV would be read"
                if not whole:
                    break  # those of other groups come at the end
            if whole and self.runner.chunk and (border := border_handed_over(remote_request, self)):
                seen = tuple(remote_request.token_ids[:border])
                assert self.runner.snapshots[next(blocks)] == seen, "another state would be read"
            assert next(blocks, None) is None

    def _check_cost(self, report: ReportProgress) -> None:
        """What the other engine is told is what the books of this one say."""
        request = self.scheduler.queue.live[report.handoff_id]
        assert report.cost.compute_ns == self.ledger.of(request)
        if report.at_ns == self.ledger.wall_ns:  # the start of this engine is 0
            held = [group.held(request) for group in self.scheduler.kv_cache.groups]
            exact = sum(
                usage.block_time(cost_of(request).blocks[i], held[i])
                for i, usage in enumerate(self.ledger.block_usages)
            )
            fractions = sum(map(len, held))  # of a nanosecond, which a block owes to whom it leaves last
            assert abs(report.cost.byte_ns / 2**30 - exact) <= fractions, report.cost.byte_ns / 2**30 - exact
