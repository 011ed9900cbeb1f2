"""A runner without a model: it knows for every KV slot which tokens it was computed from, and says so when a
plan would read anything else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.door.inputs import Aborted, Added
from engine.core.door.kernel import ModelLimits
from engine.core.door.part import Part
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.output import Event
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.costs.block_usage import observe_usage
from engine.costs.request_cost import cost_of
from engine.costs.step_cost import StepTimes, StepWork
from engine.model.kv_groups import KVCacheSpec
from engine.options.speculation import SpeculativeConfig
from engine.parts.costs.cost_accounts import CostAccounts
from engine.parts.costs.cost_ledger import CostLedger
from engine.parts.grammar.grammars import Grammars
from engine.parts.grammar.inputs import GrammarSet
from engine.parts.handoffs.handoffs import Handoffs, compute_seconds
from engine.parts.holds.hold_table import HoldTable
from engine.parts.holds.holds import Holds
from engine.parts.holds.no_holds import NoHolds
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_groups.kv_cache_groups import kv_cache_of
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.kv_tiers.tier import Tier
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.parts.pooling.pooling import Pooling
from engine.parts.speculation.speculator import Speculator, any_number
from engine.parts.stages.micro_batches import MicroBatches
from engine.spec_decode.drafter import HostDrafter
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.holds import HoldMark, PromptHold
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.parts.pooling import PoolingParams, SupportedTasks
from engine.wire.parts.speculation import Prediction
from engine.wire.parts.states import NO_STATES, StateStep
from engine.wire.plan import ON_DEVICE, NewSequence, StepPlan, StepResult
from engine.wire.remote_request import KVSource
from engine.wire.sampling_params import SamplingParams
from engine.wire.timeline import TimelineEvent

VOCAB = 50
EOS = 0


def next_token(seed: int, tokens: list[int], mask: bytes | None = None) -> int:
    """What the "model" says after `tokens`: any function will do that depends on all of them."""
    allowed = [t for t in range(VOCAB) if mask is None or mask[t // 8] >> t % 8 & 1]
    return allowed[random.Random(f"{seed} {tokens}").randrange(len(allowed))]


ALL_TASKS = SupportedTasks(names=("generate", "embed", "score"))


def pooled_of(tokens: list[int]) -> bytes:
    """What the "model" makes of a whole prompt that is pooled."""
    return bytes(tokens)


class FakeGrammar:
    """Every token of the output is larger than the one before it, by 9 at most; 40 or more is the end. After a multiple
    of 10 it is larger by 1."""

    refusal = None

    def __init__(self, output: list[int] | None = None):
        self.is_done, self.is_ready = False, True
        self.drafts: list[int] = []
        self.forced = False
        self.output: list[int] = []
        for token in output or []:
            self.accept(token)

    def waits(self, in_flight: int) -> bool:
        return in_flight > 0 or not self.is_ready

    def masks(self, num_drafts: int = 0) -> bytes:
        assert num_drafts <= len(self.drafts)
        newest = [self.output[-1] if self.output else 0, *self.drafts]
        return b"".join(map(self._mask, newest[: num_drafts + 1]))

    def accept(self, token: int) -> None:
        mask = self._mask(self.output[-1] if self.output else 0)
        assert mask[token // 8] >> token % 8 & 1, f"{token} after {self.output}"
        self.output.append(token)
        self.is_done = token >= 40

    def start_masks(self, guess: list[int] | None = None) -> None:
        last, self.drafts = self.output[-1], []
        self.forced = guess is not None and last % 10 == 0
        for token in [last + 1] if self.forced else guess or []:
            if last >= 40 or not self._mask(last)[token // 8] >> token % 8 & 1:
                break
            self.drafts.append(token)
            last = token

    def _mask(self, last: int) -> bytes:
        size = 2 if last and last % 10 == 0 else 10
        return sum(1 << token for token in range(last + 1, min(last + size, VOCAB))).to_bytes(8, "little")


def expected_output(prompt: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """The output of one request computed alone."""
    assert params.seed is not None
    tokens = list(prompt)
    grammar = FakeGrammar() if params.structured_outputs else None
    while len(tokens) < max_model_len and len(tokens) - len(prompt) < (params.max_tokens or max_model_len):
        tokens.append(next_token(params.seed, tokens, grammar.masks() if grammar else None))
        if grammar:
            grammar.accept(tokens[-1])
            if grammar.is_done:
                break
        if (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


def expected_reason(output: list[int], params: SamplingParams) -> str:
    """Why a request ends with this output."""
    ends = (output[-1] == EOS and not params.ignore_eos) or output[-1] in params.stop_token_ids
    return "stop" if ends or (params.structured_outputs and output[-1] >= 40) else "length"


Propose = Callable[[int, list[int], int], list[int]]
"""(seed, tokens of a sequence, number of drafts) -> the drafts"""


Windows = Sequence[int | None]


def specs_of(windows: Windows) -> list[KVCacheSpec]:
    return [KVCacheSpec(num_kv_heads=1, head_dim=16, window=window) for window in windows]


@dataclass(frozen=True)
class BoundOfChunk:
    chunk: int

    def __call__(self, position: int) -> int:
        """How many drafts may follow the token at `position`, none of which moves a state."""
        border = (position + 1) // self.chunk * self.chunk + self.chunk  # the first behind this token
        return border - 2 - position


@dataclass
class Prepared:
    plan: StepPlan
    tables: list[list[list[int]]]  # of each group, of each entry
    sequences: list[NewSequence]


class FakeRunner:
    """Same two halves as ModelRunner: `prepare` owns block tables, `execute` the token history and the KV."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        propose: Propose | None = None,
        windows: Windows = (None,),
        chunk: int = 0,
        on_device: bool = False,
    ):
        """propose: of a drafter with weights. windows: of each KV cache group. chunk: tokens from border to border of
        recurrent states; 0 for none. on_device: whether proposals stay on the device, as on a GPU."""
        self.propose, self.chunk, self.on_device = propose, chunk, on_device
        self.proposed: dict[int, list[int]] = {}  # by slot, the proposals that stay on the device
        self.states: dict[int, tuple] = {}  # slot -> the tokens before the border at which its state stands
        self.rows: dict[int, tuple] = {}  # slot -> the tokens that its rows were computed from, with refused drafts
        self.snapshots: dict[int, tuple] = {}  # as states
        self.block_size = config.block_size
        self.specs = specs_of(windows)
        slots, blocks = range(config.max_num_seqs), -(-max_model_len // config.block_size)
        self.tables = [[[-1] * blocks for _ in slots] for _ in windows]
        self.sequences: dict[int, NewSequence] = {}
        self.history: dict[int, list[int]] = {}
        #: of each group, block * block_size + offset -> the tokens that it was computed from
        self.kvs: list[dict[int, tuple]] = [{} for _ in windows]

    @property
    def kv(self) -> dict[int, tuple]:
        return self.kvs[0]

    def prepare(self, plan: StepPlan) -> Prepared:
        for sequence in plan.added:
            self.sequences[sequence.slot] = sequence
        for change in plan.blocks:
            table = self.tables[change.group][change.slot]
            table[change.index : change.index + len(change.blocks)] = change.blocks
        tables = [[list(group[slot]) for slot in plan.slots] for group in self.tables]
        return Prepared(plan, tables, [self.sequences[slot] for slot in plan.slots])

    def execute(self, prepared: Prepared) -> StepResult:
        plan = prepared.plan
        for sequence in plan.added:
            self.history[sequence.slot] = list(sequence.tokens)
        all_drafts = {entry: self.known_drafts(plan.slots[entry], drafts) for entry, drafts in plan.drafts.items()}
        for entry, drafts in all_drafts.items():
            assert plan.samples[entry]
            self.history[plan.slots[entry]] += drafts
        rows = list(zip(plan.slots, plan.starts, plan.counts, strict=True))
        self._move_states(plan)
        for kv, tables in zip(self.kvs, prepared.tables, strict=True):
            written: set[int] = set()
            for (slot, start, count), table in zip(rows, tables, strict=True):
                for position in range(start, start + count):  # a model writes all KV of a layer before it reads any
                    cell = table[position // self.block_size] * self.block_size + position % self.block_size
                    assert cell not in written, "two sequences write one cell"
                    written.add(cell)
                    kv[cell] = tuple(self.history[slot][: position + 1])
        for spec, kv, tables in zip(self.specs, self.kvs, prepared.tables, strict=True):
            for (slot, start, count), table in zip(rows, tables, strict=True):
                for position in range(spec.first_needed(start), start + count):
                    cell = table[position // self.block_size] * self.block_size + position % self.block_size
                    seen = tuple(self.history[slot][: position + 1])
                    assert kv.get(cell) == seen, "the KV of other tokens would be read"
        masks = iter([plan.masks[i : i + 8] for i in range(0, len(plan.masks), 8)])
        result = StepResult(plan.step, [], [None] * len(rows), [None] * len(rows))
        for (slot, start, count), samples, sequence in zip(rows, plan.samples, prepared.sequences, strict=True):
            tokens = self.history[slot]
            entry, drafts = len(result.tokens), all_drafts.get(len(result.tokens), [])
            result.tokens.append([])
            if not samples:
                continue
            assert start + count == len(tokens)
            if PoolingParams.part in sequence.parts:
                result.answers[entry] = pooled_of(tokens)
                continue
            known = tokens[: len(tokens) - len(drafts)]
            wrong = False
            for draft in [*drafts, None]:
                mask = next(masks) if entry in plan.masked else None
                if not wrong:
                    known.append(next_token(sequence.seed, known, mask))
                    result.tokens[entry].append(known[-1])
                    wrong = known[-1] != draft
            tokens[:] = known
            if self.propose is not None:
                result.drafts[entry] = proposed = self.propose(sequence.seed, known, plan.num_drafts)
                if self.on_device and not plan.masked:
                    self.proposed[slot] = [token if 0 <= token < VOCAB else 0 for token in proposed]
                    result.drafts[entry] = [ON_DEVICE] * len(proposed)
        assert next(masks, None) is None
        return result

    def known_drafts(self, slot: int, drafts: list[int]) -> list[int]:
        """The drafts of the sequence in a slot, those that only the device knows filled in."""
        return self.proposed[slot][: len(drafts)] if ON_DEVICE in drafts else drafts

    def _move_states(self, plan: StepPlan) -> None:
        states = plan.record(StateStep) or NO_STATES
        assert self.chunk or states is NO_STATES
        if not self.chunk:
            return
        for slot, snapshot in states.restored:
            self.states[slot] = self.rows[slot] = self.snapshots[snapshot]
        saves = {slot: (position, snapshot) for slot, position, snapshot in states.saved}
        assert len(saves) == len(states.saved), "two states of a sequence are kept in one step"
        assert len({snapshot for _, snapshot in saves.values()}) == len(saves), "two states are kept in one place"
        for entry, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            tokens, end = self.history[slot], start + count
            known = end - len(plan.drafts.get(entry, []))
            if start == 0:
                self.states[slot] = self.rows[slot] = ()
            border, moved = (position // self.chunk * self.chunk for position in (start, end))
            assert self.states[slot] == tuple(tokens[:border]), "the state of other tokens would be read"
            assert self.rows[slot][:start] == tuple(tokens[:start]), "rows are missing, or those of refused drafts"
            assert moved <= known, "a draft moves the state"
            if slot in saves:
                position, snapshot = saves.pop(slot)
                assert start < position <= known and position % self.chunk == 0
                self.snapshots[snapshot] = tuple(tokens[:position])
            self.states[slot], self.rows[slot] = tuple(tokens[:moved]), tuple(tokens[:end])
        assert not saves, "the state of a sequence that is not computed is kept"


class Harness:
    """Scheduler, pool and fake runner, driven like EngineCore does, with up to `depth` steps planned ahead."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_model_len: int,
        depth: int = 1,
        stages: int = 1,
        handoffs: Handoffs | None = None,
        drafter: HostDrafter | None = None,
        propose: Propose | None = None,
        on_device: bool = False,
        step_cost: tuple[float, float] = (1.0, 0.02),
        draft_cost: float = 0.0,
        windows: Windows = (None,),
        blocks: list[int] | None = None,
        step_tokens: int = 1000,
        chunk: int = 0,
        num_snapshots: int = 4,
        snapshot_interval: int = 0,
        adapters: AdapterSlots | None = None,
        held_share: float = 0.0,
        held_share_per_client: float = 1.0,
        max_hold_s: float = 100.0,
        **options,
    ):
        """windows: of each KV cache group. blocks: of each, instead of num_blocks. step_tokens: see kv_cache_of.
        chunk: of recurrent states; 0 for a model without any. snapshot_interval: in borders."""
        self.config = EngineConfig(**{"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, **options})
        size, caching = self.config.block_size, self.config.enable_prefix_caching
        self.pools = [
            BlockPool(count, size, caching, null_block=window is not None)
            for count, window in zip(blocks or [num_blocks] * len(windows), windows, strict=True)
        ]
        self.pool = self.pools[0]
        snapshots = None
        if chunk:
            snapshots = BlockPool(num_snapshots, math.lcm(chunk, size), caching)
        kv_cache, limits = kv_cache_of(
            specs_of(windows),
            self.pools,
            step_tokens,
            snapshots=snapshots,
            snapshot_interval=snapshot_interval * math.lcm(chunk, size),
        )
        self.pools += [] if snapshots is None else [snapshots]
        speculator = None
        if drafter or propose:
            config = SpeculativeConfig(method="ngram")
            bound = BoundOfChunk(chunk) if chunk else any_number
            speculator = Speculator(config, drafter, lambda sequences: (*step_cost, draft_cost), VOCAB, bound)
        self.step_times = StepTimes()
        offloading, usages = self.make_offloading(kv_cache), observe_usage(kv_cache)
        holds: Part = NoHolds()
        if held_share:
            holds = Holds(
                kv_cache,
                offloading,
                usages,
                max_model_len=max_model_len,
                max_share=held_share,
                max_share_per_client=held_share_per_client,
                max_ttl_s=max_hold_s,
            )
        parts = [
            Pooling(ALL_TASKS),
            Grammars(),
            CostAccounts(),
            holds,
            offloading,
            self.make_fetching(kv_cache, handoffs, offloading),
            *limits,
        ]
        parts += [MicroBatches(stages) if stages > 1 else None, speculator, adapters, handoffs, *self.more_parts()]
        self.scheduler = Scheduler(
            self.config,
            kv_cache,
            limits=ModelLimits(max_model_len, VOCAB, frozenset({EOS})),
            parts=[part for part in parts if part is not None],
            compute_s=compute_seconds(self.step_times, handoffs),
        )
        self.runner = FakeRunner(self.config, max_model_len, propose, windows, chunk, on_device)
        self.depth = depth
        self.prepared: list[Prepared] = []
        self.prompts: dict[str, list[int]] = {}
        self.pooled: set[str] = set()
        self.params: dict[str, SamplingParams] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Event] = {}
        self.timelines: dict[str, list[TimelineEvent]] = {}
        self.holds_of: dict[str, list[HoldOutcome]] = {}
        self.cached_of: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.now = 0.0
        self.seconds: Callable[[StepPlan], float] = lambda plan: 0.0  # that a step takes
        self.clock = 0.0  # of the ledger alone
        self.tiers = [] if offloading is None else offloading.tiers
        tiers = [usage for tier in self.tiers for usage in tier.usages]
        self.ledger = CostLedger(StepTimes(), usages, [2**30] * len(usages), self.clock, tiers)
        self.seen: set[Request] = set()

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        prefill="auto",
        pooling: PoolingParams | None = None,
        prediction: list[int] | None = None,
        lora: ModelAdapter | None = None,
        kv_source: KVSource | None = None,
        kv_holder: KVHolder | None = None,
        client: str = "",
        hold: list[tuple[int, float]] | None = None,
        hold_name: str = "",
        ttft_slo_s: float | None = None,
        **params,
    ) -> None:
        """hold: (tokens, seconds) of each mark."""
        sampling = SamplingParams(**{"max_tokens": 8, "seed": 1, "ignore_eos": True, **params})
        message = GenerateRequest(
            request_id=name,
            prompt=prompt,
            params=sampling,
            priority=priority,
            cache_salt=cache_salt,
            prefill=prefill,
            client=client,
            ttft_slo_s=ttft_slo_s,
        ).asking(
            kv_source,
            pooling,
            lora,
            Prediction(prediction) if prediction else None,
            kv_holder,
            PromptHold(marks=[HoldMark(*mark) for mark in hold], name=hold_name, response_id=f"resp-{name}")
            if hold
            else None,
        )
        self.pooled |= {name} if pooling else set()
        self.scheduler.apply(Added(message), self.now)
        if sampling.structured_outputs is not None:
            self.scheduler.apply(GrammarSet(name, FakeGrammar()), self.now)
        self.prompts[name], self.params[name], self.outputs[name] = prompt, sampling, []

    def replay(self, name: str, prompt: list[int], given: list[int], **params) -> None:
        """A request that another replica has begun to answer."""
        sampling = SamplingParams(**{"seed": 1, "ignore_eos": True, **params})
        message = GenerateRequest(request_id=name, prompt=prompt + given, params=sampling, num_prompt=len(prompt))
        self.scheduler.apply(Added(message), 0.0)
        self.outputs[name] = []

    def abort(self, name: str) -> None:
        self.scheduler.apply(Aborted(name), 0.0)
        self.record()

    def step(self) -> StepPlan | None:
        plan = self.plan()
        if plan is None or len(self.prepared) >= self.depth:
            self.commit()
        return plan

    def plan(self) -> StepPlan | None:
        self.take_answers()
        self.ledger.spent("idle", self.tick())
        plan = self.scheduler.schedule(now=self.now)
        self.submit()
        self.record()
        if plan is not None:
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            self.plans.append(plan)
            self.prepared.append(self.runner.prepare(plan))
        elif not self.prepared:
            elsewhere: object = self.scheduler.parts.kept()
            parts = (self.scheduler.parts.get(KVOffloading), self.scheduler.parts.get(KVFetching))
            elsewhere = elsewhere or any(part.moving for part in parts if part is not None)
            assert elsewhere or not self.scheduler.has_work, "nothing is computed, and nothing is waited for"
        return plan

    def commit(self) -> None:
        if self.prepared:
            result = self.runner.execute(self.prepared.pop(0))
            self.ledger.step(
                StepWork.of(self.scheduler.planned[0][0]), *self.scheduler.planned[0], self.clock - 0.0001, self.tick()
            )
            step_s = self.seconds(self.scheduler.planned[0][0])
            self.now += step_s
            self.scheduler.commit(result, self.now, step_s)
            self.record()
            self.submit()

    def record(self) -> None:
        """Take what the scheduler tells clients."""
        events = self.scheduler.out.take_events()
        self.seen.update(event.request for event in events)
        for event in self.ledger.report(events):
            self._record(event)
        self.check()

    def tick(self) -> float:
        self.clock += 0.001 + len(self.plans) % 7 * 1e-8
        return self.clock

    def check(self) -> None:
        """The books balance, those of blocks and those of time."""
        self.scheduler.check()
        self.seen.update(self.scheduler.queue.live.values())
        self.ledger.check(self.seen)
        wasted = sum(cost_of(request).wasted_ns for request in self.seen)
        assert wasted == sum(self.ledger.ns[line] for line in ("preemption", "replay", "handoff"))
        for group, pool in enumerate(manager.pool for manager in self.scheduler.kv_cache.groups):
            usage = self.ledger.block_usages[group]
            tables = {r: self.scheduler.kv_cache.groups[group].held(r) for r in self.seen}
            charged = [
                usage.block_time(cost_of(r).blocks[group], tables.get(r, ()))
                for r in self.seen
                if group in cost_of(r).blocks
            ]
            copied = pool.pinned
            if (holds := self.scheduler.parts.get(Holds)) is not None:
                charged += self._charged_to_holds(holds.table, group)
                copied = copied - holds.table.pinned[group]
            charged.append(usage.block_time(usage.shared, copied.elements()))
            assert min(charged) >= 0, "who takes a reference gives it back"
            assert sum(charged) + usage.carried_ns == usage.used_ns
        for tier in self.tiers:
            self._check_tier(tier)

    def _charged_to_holds(self, table: HoldTable, group: int) -> list[int]:
        """What live holds have to pay for their blocks in a pool, and what nobody pays."""
        usage, holds = self.ledger.block_usages[group], table.by_end.values()
        live = [usage.block_time(hold.cost.blocks[group], hold.blocks[group]) for hold in holds]
        return [*live, table.unused.blocks[group].block_ns]

    def _check_tier(self, tier: Tier) -> None:
        holds = self.scheduler.parts.get(Holds)
        tiers = [cost_of(r).tiers for r in self.seen]
        charged = [accounts[tier.name].block_ns for accounts in tiers if tier.name in accounts]
        if holds is not None:
            charged.append(holds.table.unused.tiers[tier.name].block_ns)
            for hold in holds.table.by_end.values():
                account = hold.cost.tiers[tier.name]
                charged.append(tier.byte_time(hold.keys, account) if tier in hold.tiers else account.block_ns)
        assert min(charged, default=0) >= 0
        for usage in tier.usages:
            charged += [usage.cached_byte_ns, usage.carried_byte_ns]
        assert sum(charged) == sum(usage.byte_ns for usage in tier.usages)

    def _record(self, event: Event) -> None:
        name = event.delta.request_id
        assert name not in self.finished, f"{name} went on after its end"
        self.outputs[name] += event.delta.token_ids
        self.timelines.setdefault(name, []).extend(event.delta.timeline)
        if outcomes := event.delta.records(HoldOutcome):
            self.holds_of[name] = outcomes
        self.cached_of.setdefault(name, event.delta.num_cached_tokens)
        if event.delta.finish_reason:
            self.finished[name] = event

    def more_parts(self) -> list[Part]:
        """Those that come last."""
        return []

    def make_offloading(self, kv_cache: KVCacheManager) -> KVOffloading | None:
        """The tiers below the cache."""
        return None

    def make_fetching(
        self, kv_cache: KVCacheManager, handoffs: Handoffs | None, offloading: KVOffloading | None
    ) -> KVFetching | None:
        """What fetches KV from the caches of other engines."""
        return None

    def take_answers(self) -> None:
        """Called before a step is planned."""

    def submit(self) -> None:
        """Called to deliver what may leave the scheduler."""

    def drain(self) -> None:
        """Called once all requests have ended."""

    def settle(self) -> None:
        """Called when nothing can be computed before another engine has done something."""
        raise AssertionError("there is no other engine")

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left to do; every output must be what the request gives alone."""
        while self.scheduler.has_work:
            idle = not self.prepared
            if self.step() is None and idle and self.scheduler.has_work:
                self.settle()
            limit -= 1
            assert limit > 0, "no end in sight"
        self.drain()
        if (holds := self.scheduler.parts.get(Holds)) is not None:
            holds.update(self.now + 1e9)
        self.scheduler.check()
        assert not any(pool.num_used for pool in self.pools)
        for name, prompt in self.prompts.items():
            reason = self.finished[name].delta.finish_reason
            if name in self.pooled:
                assert self.outputs[name] == []
                assert reason == "abort" or self.finished[name].delta.answer == pooled_of(prompt)
                continue
            expected = expected_output(prompt, self.params[name], self.scheduler.limits.max_model_len)
            if reason == "abort":
                assert self.outputs[name] == expected[: len(self.outputs[name])]
            else:
                assert self.outputs[name] == expected, name
                assert reason == expected_reason(expected, self.params[name]), name


__all__ = ["EOS", "VOCAB", "FakeGrammar", "FakeRunner", "Harness", "expected_output"]
