"""What an engine or a request can turn on, a row for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cluster.lab.tape.replay import Replay
from engine.options.experts import EPLBConfig
from engine.parts.costs.cost_ledger import CostLedger
from engine.parts.kv_check.messages import KVCheckStats
from engine.parts.tape.engine_tape import EngineTape, tape_with_key
from engine.wire.part_record import PartRecord, encoded
from engine.wire.parts.costs import ReportCost
from engine.wire.parts.experts import SharedSteps
from engine.wire.parts.handoffs import HandoffTotals
from engine.wire.parts.holds import HoldMark, HoldStats, PromptHold
from engine.wire.parts.images import ImageStats, MultiModalFeatureSpec, PromptImages
from engine.wire.parts.kv_fetching import FetchStats
from engine.wire.parts.kv_offload import KVOffloadStats
from engine.wire.parts.pooling import PoolingParams
from engine.wire.parts.speculation import Prediction, SpecDecodeStats
from engine.wire.parts.stages import StageReport
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.composition.engines import Session, Stream
from tests.composition.models import Kind, Models
from tests.kv_event_reader import Subscriber
from tests.vision_models import Prompt

SIZE_GIB = 0.05
FORMS: list[dict[str, Any]] = [
    {"regex": "(?:ab|c|[d-z ]){5,12}"},
    {"json": {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}},
    {"choice": ["the quick", "the cache", "a word"]},
]
TAPE_KEY = b"a key of a tape."


@dataclass
class Draft:
    """A request in the making."""

    number: int
    models: Models
    kind: Kind
    prompt: list[int]
    params: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    records: list[PartRecord] = field(default_factory=list)
    abort_after: int | None = None


@dataclass(frozen=True)
class Setup:
    """What options may name. place: an empty folder of one engine."""

    models: Models
    kind: Kind
    place: Path


@dataclass(frozen=True)
class Run:
    """What a session did for a pair. before, after: of the engine that clients ask, then of the others."""

    before: list[EngineStats]
    after: list[EngineStats]
    streams: dict[str, Stream]

    def grew(self, name: str) -> bool:
        return sum(getattr(stats, name) for stats in self.after) > sum(getattr(stats, name) for stats in self.before)


@dataclass(frozen=True)
class Part:
    """A row and a column of the table."""

    name: str
    how: str
    """How it is turned on, for the page."""
    worked: Callable[[Run], bool]
    """Whether it had an effect."""
    options: Callable[[Setup], dict[str, Any]] | dict[str, Any] = field(default_factory=dict)
    """Of EngineConfig. Parts with different values of one option exclude each other."""
    most: dict[str, int] = field(default_factory=dict)
    """Sizes of EngineConfig; of two parts, the smaller holds."""
    kind: dict[str, Any] = field(default_factory=dict)
    """What it needs of the model."""
    ask: Callable[[Draft], None] | None = None
    """Changes the requests that it is on for."""
    twice: bool = False
    """Whether a second round of requests, which continue prompts of the first, may differ because of it."""
    evicts: bool = False
    """Whether the cache is to lose the blocks of the first round before the second."""
    audit: Callable[[Session], None] = lambda session: None
    """Checks books of its own."""
    fresh: bool = False
    """Whether its engine is started for each pair."""

    @property
    def shapes_engine(self) -> bool:
        return bool(self.options or self.most)


def speculative(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 4, **more}}


def drafted(run: Run) -> bool:
    stats = run.after[0].record(SpecDecodeStats)
    return stats is not None and stats.num_draft_tokens > 0


def loaded(run: Run) -> bool:
    stats = run.after[0].record(KVOffloadStats)
    return stats is not None and stats.hit_tokens > 0


def granted(run: Run) -> bool:
    stats = run.after[0].record(HoldStats)
    return stats is not None and stats.granted > 0


def handed_over(run: Run) -> bool:
    totals = run.after[0].record(HandoffTotals)
    return totals is not None and sum(totals.prefill_decisions.get("remote", {}).values()) > 0


def fetched(run: Run) -> bool:
    stats = run.after[0].record(FetchStats)
    return stats is not None and stats.fetched_tokens > 0


def received(run: Run) -> bool:
    totals = run.after[1].record(HandoffTotals)
    return totals is not None and totals.moves.get("received", 0) > 0


def encoded_images(run: Run) -> bool:
    return any(stats.record(ImageStats).encoded > 0 for stats in run.after)  # those of a prefill engine, for another


def in_stages(run: Run) -> bool:
    report = run.after[0].record(StageReport)
    return report is not None and len(report.stages) == 2


def shares_experts(run: Run) -> bool:
    return run.after[0].record(SharedSteps) is not None


def replay(session: Session) -> None:
    """The tape of an engine gives its decisions again."""
    for core in session.cores:
        tape = msgspec.msgpack.decode(tape_with_key(core.journal.take(), TAPE_KEY), type=EngineTape)
        again = Replay(tape)
        for _ in again.run():
            again.scheduler.check()
        assert again.scheduler.totals == core.scheduler.totals


def mirror(session: Session) -> None:
    """Whoever reads the events knows the blocks of the prefix cache."""
    core = session.cores[0]
    events = core.config.kv_events_config
    assert events is not None and events.endpoint is not None and events.replay_endpoint is not None
    subscriber = Subscriber(events.endpoint, events.replay_endpoint)
    try:
        subscriber.catch_up()
        for number, group in enumerate(core.scheduler.kv_cache.groups):
            assert subscriber.mirror.hashes(number) == set(group.pool.block_hashes())
    finally:
        subscriber.close()


def balance(session: Session) -> None:
    """Every second of an engine is on one line of its ledger."""
    for core in session.cores:
        assert sum(core.observers[CostLedger].ns.values()) == core.observers[CostLedger].wall_ns


def nobody_accused(session: Session) -> None:
    """What came from tiers and other engines has the bits that its own engine computes, as far as it was checked."""
    for core in session.cores:
        stats = core.stats().record(KVCheckStats)
        assert stats is None or not any(results["different"] for results in stats.checks.values()), stats


def hold(draft: Draft) -> None:
    marks = [HoldMark(len(draft.prompt) // 2, 60.0), HoldMark(len(draft.prompt), 60.0)]
    draft.records.append(PromptHold(marks=marks))
    draft.fields["client"] = "alice"


def adapt(draft: Draft) -> None:
    draft.records.append(draft.models.adapters(draft.kind)[draft.number % 2])


def show_images(draft: Draft) -> None:
    """Text, an image, and the text of the prompt."""
    prompt = Prompt(draft.models.family(draft.kind)).text(5, 6).image(draft.number, 2, 2).text(7)
    images: list[MultiModalFeatureSpec] = prompt.images
    draft.prompt = [*prompt.tokens, *draft.prompt]
    draft.records.append(PromptImages(images))


def give_form(draft: Draft) -> None:
    form = StructuredOutputsParams(**FORMS[draft.number % len(FORMS)])
    draft.params |= {"structured_outputs": form, "ignore_eos": False}


def sample(draft: Draft) -> None:
    draft.params |= {"temperature": 0.9, "seed": 7 + draft.number, "top_p": 0.95, "min_p": 0.01}
    draft.params |= {"top_k": 50} if draft.number % 2 else {}


def penalize(draft: Draft) -> None:
    draft.params |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}


def constrain(draft: Draft) -> None:
    banned = [[token, token + 1] for token in range(3, 60, 2)]
    bias = {token: -3.0 + token % 7 for token in range(3, 80)}
    draft.params |= {"logit_bias": bias, "bad_words_token_ids": banned, "min_tokens": 4, "ignore_eos": False}


def stop_early(draft: Draft) -> None:
    draft.params |= {"stop": ["e", "q"] if draft.number % 2 else ["th", "s"], "stop_token_ids": [300, 301, 302]}


def think(draft: Draft) -> None:
    draft.params["extra_args"] = encoded(ThinkingBudget(tokens=3, close=9))


def pool(draft: Draft) -> None:
    if not any(isinstance(record, PoolingParams) for record in draft.records):  # a model that only embeds asks for it
        draft.records.append(PoolingParams())


def leave(draft: Draft) -> None:
    draft.abort_after = 2 + draft.number % 2


def order(draft: Draft) -> None:
    draft.fields["priority"] = -draft.number


def salt(draft: Draft) -> None:
    draft.fields["cache_salt"] = f"salt {draft.number % 2}"


def asks(**params: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.params.update(params)


def grow(draft: Draft) -> None:
    draft.prompt = draft.prompt[-9:]
    draft.params["max_tokens"] = 26


def reports(draft: Draft) -> None:
    draft.records.append(ReportCost())


def predict(draft: Draft) -> None:
    draft.records.append(Prediction(tokens=[*draft.prompt[-6:], *draft.prompt[:6]]))


def offload(**tier: Any) -> dict[str, Any]:
    return {**tier, "kv_offloading_timeout_s": 60.0}


def key_file(place: Path) -> str:
    file = place / "key"
    file.write_bytes(bytes(range(32)))
    file.chmod(0o600)
    return str(file)


def always(run: Run) -> bool:
    return True


PARTS = (
    Part("prefix caching", "`enable_prefix_caching: true`, the default", lambda run: run.grew("prefix_hit_tokens"),
         {"enable_prefix_caching": True}, twice=True),
    Part("no prefix caching", "`enable_prefix_caching: false`", lambda run: not run.grew("prefix_hit_tokens"),
         {"enable_prefix_caching": False}),
    Part("cache salts", "`cache_salt`", always, ask=salt, twice=True),
    Part("chunked prefill", "`max_num_batched_tokens: 12`", always, most={"max_num_batched_tokens": 12}),
    Part("preemption", "fewer KV blocks than the requests need", lambda run: run.grew("preemptions"),
         most={"num_gpu_blocks_override": 20}, ask=grow),
    Part("overlap", "`async_scheduling: true`", always, {"async_scheduling": True}),
    Part("priorities", "`scheduling_policy: priority`", always, {"scheduling_policy": "priority"}, ask=order),
    Part("host tier", "`kv_offloading_size`", loaded, offload(kv_offloading_size=SIZE_GIB), evicts=True,
         most={"num_gpu_blocks_override": 48}, twice=True, audit=nobody_accused),
    Part("disk tier", "`kv_offloading_disk_size`", loaded, most={"num_gpu_blocks_override": 48}, evicts=True,
         options=lambda setup: offload(kv_offloading_disk_size=SIZE_GIB, kv_offloading_dir=str(setup.place)),
         twice=True, audit=nobody_accused),
    Part("store tier", "`kv_offloading_store`", loaded, most={"num_gpu_blocks_override": 48}, evicts=True,
         options=lambda setup: offload(kv_offloading_store=str(setup.place / "store"),
                                       kv_offloading_store_size=SIZE_GIB,
                                       kv_offloading_key_file=key_file(setup.place)),
         twice=True, audit=nobody_accused),
    Part("holds", "`hold` of a request", granted,
         {"max_held_share": 0.5}, ask=hold, twice=True),
    Part("KV events", "`kv_events_config`", always, audit=mirror,
         options=lambda setup: {"kv_events_config": {
             "enable_kv_cache_events": True, "use_int_block_hashes": False,
             "endpoint": f"ipc://{setup.place}/events", "replay_endpoint": f"ipc://{setup.place}/replays"}},
         twice=True),
    Part("tape", "`tape_mib`", always, {"tape_mib": 8}, audit=replay, fresh=True, twice=True),
    Part("costs", "`report_cost` of a request", lambda run: any(len(s.costs) > 2 for s in run.streams.values()),
         audit=balance, ask=reports),
    Part("handoffs", "`handoff`, a prefill and a decode engine", handed_over,
         {"handoff": {"role": "decode", "policy": "always"}}, twice=True, audit=nobody_accused),
    Part("prefix fetching", "`handoff.enable_prefix_fetching`; another engine has the KV", fetched,
         {"handoff": {"enable_prefix_fetching": True}}, twice=True, audit=nobody_accused),
    Part("moves", "`handoff.move_requests`; requests go on in another engine", received,
         {"handoff": {"move_requests": True, "lease_s": 3.0, "heartbeat_s": 0.5}}, audit=nobody_accused),
    Part("LoRA", "`lora` of a request", always, {"enable_lora": True, "max_loras": 2}, ask=adapt),
    Part("images", "`mm_features` of a request", encoded_images, kind={"images": True},
         ask=show_images),
    Part("n-gram drafts", "`speculative_config`, method `ngram`", drafted, speculative("ngram", prompt_lookup_min=1),
         twice=True),
    Part("suffix drafts", "method `suffix`", drafted, speculative("suffix"), twice=True),
    Part("draft model", "method `draft_model`", drafted,
         lambda setup: speculative("draft_model", model=str(setup.models.small(setup.kind)))),
    Part("EAGLE-3", "method `eagle3`", drafted,
         lambda setup: speculative("eagle3", model=str(setup.models.eagle3(setup.kind)))),
    Part("MTP", "method `mtp`", drafted, speculative("mtp"), kind={"experts": True}),
    Part("predicted outputs", "`prediction` of a request", always, ask=predict),
    Part("FP8 KV cache", "`kv_cache_dtype: fp8`", always, {"kv_cache_dtype": "fp8"}),
    Part("FP8 weights", "`quantization: fp8`", always, {"quantization": "fp8"}),
    Part("INT8 weights", "`quantization: int8`", always, {"quantization": "int8"}),
    Part("INT4 weights", "`quantization: int4`", always, {"quantization": "int4"}, kind={"wide": True}),
    Part("bfloat16", "`dtype: bfloat16`; the others have float32", always, {"dtype": "bfloat16"}),
    Part("tensor parallel", "`tensor_parallel_size: 2`", always, {"tensor_parallel_size": 2}),
    Part("pipeline parallel", "`pipeline_parallel_size: 2`", in_stages,
         {"pipeline_parallel_size": 2}),
    Part("expert parallel", "`enable_expert_parallel` on two ranks", always, kind={"experts": True},
         options={"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    Part("EPLB", "`enable_eplb`, also of the engine that answers alone", always, kind={"experts": True},
         options={"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True,
                  "eplb_config": EPLBConfig(window_size=2, step_interval=2, num_redundant_experts=4)}),
    Part("shared experts", "`data_parallel_size: 2`", shares_experts,
         {"data_parallel_size": 2, "enable_expert_parallel": True}, kind={"experts": True}),
    Part("strict", "`determinism: strict`", always, {"determinism": "strict"}),
    Part("sliding windows", "a model with them", always, kind={"attention": "windows"}, twice=True),
    Part("recurrent layers", "a model with them", always, kind={"attention": "recurrent"}, twice=True),
    Part("latent attention", "a model with it", always, kind={"attention": "latent"}),
    Part("experts", "a model with them", always, kind={"experts": True}),
    Part("bidirectional attention", "a model with it, which only embeds", always,
         kind={"bidirectional": True, "wide": True}),
    Part("transformers' code", "a model that transformers' own code computes", always, kind={"code": "transformers"},
         twice=True),
    Part("structured outputs", "`structured_outputs`: a regex, a JSON schema, a choice", always, ask=give_form),
    Part("sampling", "`temperature`, `top_p`, `top_k`, `min_p`, `seed`", always, ask=sample),
    Part("penalties", "`repetition_penalty`, `presence_penalty`, `frequency_penalty`", always, ask=penalize),
    Part("token constraints", "`logit_bias`, `bad_words`, `min_tokens`", always, ask=constrain),
    Part("several answers", "`n: 2`", always, ask=asks(n=2)),
    Part("stops", "`stop`, `stop_token_ids`", always, ask=stop_early),
    Part("log-probabilities", "`logprobs: 5`", always, ask=asks(logprobs=5)),
    Part("prompt log-probabilities", "`prompt_logprobs: 2`", always, ask=asks(prompt_logprobs=2)),
    Part("thinking budget", "`thinking_token_budget`", always, ask=think),
    Part("pooling", "`pooling`: an embedding beside generation", always, ask=pool),
    Part("aborts", "clients that leave", always, ask=leave),
)  # fmt: skip
