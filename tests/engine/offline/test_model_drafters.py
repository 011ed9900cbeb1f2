"""Drafters with weights in a real engine: tokens are those without speculation, whoever drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from engine import LLM, SamplingParams
from engine.core.scheduler import Scheduler
from engine.errors import ConfigError, ModelFolderError
from engine.parts.speculation.rank.drafting import Drafting
from engine.runner.model_runner import ModelRunner
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.plan import ON_DEVICE, StepResult
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.engine.spec_decode.draft_checkpoints import DRAFTERS, NUM_DRAFTS, make_drafters
from tests.fake_drafter import draft_always
from tests.models import with_slow
from tests.products import in_turns, slow

OPTIONS = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_threads": 1,
    "num_gpu_blocks_override": 128,
}
PROMPTS = [list(range(3, 30)), [5, 6, 7], [40] * 30, [9, 8]]
PARAMS = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 3},
    "penalties": {"temperature": 0.9, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 1},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="(?s).{1,15}")},  # drafts reach its end
}
METHODS = [method for method in DRAFTERS if method not in ("ngram", "suffix")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The target of each method, and the options."""
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def expected():
    """Return what a target says without drafts, by the name of its parameters."""

    @cache
    def answers(folder: Path, dtype: str = "float32") -> dict[str, Any]:
        with LLM(folder, dtype=dtype, **OPTIONS) as llm:
            return {name: run(llm, name) for name in PARAMS}

    return answers


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Draft whatever it costs."""
    draft_always(monkeypatch)
    monkeypatch.setattr("engine.spec_decode.draft_length.SequenceDrafts.acceptance", lambda drafts, length: 0.5)


def run(llm: LLM, name: str) -> list[tuple[list[int], str | None]]:
    params = SamplingParams(max_tokens=20, **{"temperature": 0.0, **PARAMS[name]})
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [(output.token_ids, output.finish_reason) for output in outputs]


# of the others, tests/engine/spec_decode/test_speculative_machine.py compares both
@pytest.mark.parametrize("method", with_slow(METHODS, set(METHODS) - {"same_model"}))
def test_tokens_and_ends_are_those_without_speculation(folders, expected, method):
    folder, options = folders[method]
    with LLM(folder, speculative_config={**options, "num_speculative_tokens": NUM_DRAFTS}, **OPTIONS) as llm:
        for name, right in expected(folder).items():
            assert run(llm, name) == right
            if (method, name) == ("same_model", "greedy"):  # which never guesses wrong
                stats = llm.stats().record(SpecDecodeStats)
                assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert llm.stats().record(SpecDecodeStats).num_draft_tokens > 0


@pytest.mark.slow
def test_in_bfloat16_drafts_are_verified_with_the_bits_of_single_rows(folders):
    folder, options = folders["same_model"]
    found = []
    for speculative in (None, {**options, "num_speculative_tokens": 4}):
        with LLM(folder, dtype="bfloat16", speculative_config=speculative, **OPTIONS) as llm:
            found.append([run(llm, name) for name in PARAMS])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("method", "dtype"), in_turns(slow(["same_model", "noisy_model", "eagle3"]), ["bfloat16", "float32"])
)
def test_preempted_sequences_and_cached_prefixes_go_on_with_drafts(folders, expected, method, dtype):
    folder, options = folders[method]
    speculative = {**options, "num_speculative_tokens": NUM_DRAFTS}
    with LLM(folder, dtype=dtype, speculative_config=speculative, **{**OPTIONS, "num_gpu_blocks_override": 18}) as llm:
        for name in ("greedy", "seeded", "grammar"):
            for _ in range(2):  # the second time prompts are cached
                assert run(llm, name) == expected(folder, dtype)[name]
        stats = llm.stats()
        assert stats.preemptions > 0 < stats.prefix_hit_tokens
        totals = stats.record(SpecDecodeStats)
        assert method == "eagle3" or totals.num_accepted_tokens > totals.num_draft_tokens / 3


ON_LATE = [method for method in METHODS if method != "hybrid_ngram"]  # these texts repeat nothing


@pytest.mark.parametrize("method", with_slow(ON_LATE, set(ON_LATE) - {"eagle3"}))
def test_on_a_gpu_the_host_does_not_wait_for_drafts(folders, expected, late, method, monkeypatch):
    monkeypatch.setattr(
        "engine.runner.graphs.gpu_layers.can_capture", lambda setup: True
    )  # hybrids too, as with Triton
    folder, options = folders[method]
    with LLM(folder, speculative_config={**options, "num_speculative_tokens": NUM_DRAFTS}, **OPTIONS) as llm:
        assert run(llm, "penalties") == expected(folder)["penalties"]
        assert llm.stats().record(SpecDecodeStats).num_draft_tokens > 0
        passes = len(late.replays) - llm.stats().steps  # of the drafter
        assert passes > 0
        if method in ("eagle3", "mtp"):
            assert passes > llm.stats().steps, "a first pass for every step, and further ones"


@pytest.mark.slow
@pytest.mark.parametrize("method", ON_LATE)
def test_on_a_gpu_the_next_step_is_planned_while_the_drafter_runs(folders, expected, late, method, monkeypatch):
    """The plain twin waits for the drafts. Neither changes a text, not even where requests are preempted, and after the
    same tokens both draft the same ones. Steps may differ: only who waits knows for whom nothing was drafted."""
    # hybrids too, as with Triton
    monkeypatch.setattr("engine.runner.graphs.gpu_layers.can_capture", lambda setup: True)
    propose, launch, collect, event = Drafting.propose, ModelRunner.launch, ModelRunner.collect, late.event
    events, drafted, results, seen, proposals = [], [], [], [], []

    def noted(drafting, launched, *args):
        drafts, begun, inputs = drafting.drafter.propose, [], launched.inputs

        def noted_drafts(step):
            begun.append(events[-1])
            found, newest = drafts(step), step.batch.positions[step.last_rows] + 1
            for i, entry in enumerate(step.entries):
                seen.append((step.history[inputs.plan.slots[entry]].clone(), newest[i], found[i].clone()))
            return found

        drafting.drafter.propose = noted_drafts
        found = propose(drafting, launched, *args)
        drafting.drafter.propose = drafts
        assert inputs.plan.masked or not begun or (launched.early_event is not begun[0]) == drafting.waits
        return found

    def planned(runner, inputs):
        if not inputs.plan.masked:
            drafted.extend(token for drafts in inputs.plan.drafts.values() for token in drafts)
        return launch(runner, inputs)

    monkeypatch.setattr(late, "event", lambda: (events.append(event()), events[-1])[1])
    monkeypatch.setattr(Drafting, "propose", noted)
    monkeypatch.setattr(ModelRunner, "launch", planned)
    monkeypatch.setattr(ModelRunner, "collect", lambda *args: (results.append(collect(*args)), results[-1])[1])
    folder, options = folders[method]
    speculative = {**options, "num_speculative_tokens": NUM_DRAFTS}
    for waits in (False, True):
        drafted.clear(), seen.clear()
        with LLM(folder, speculative_config=speculative, **{**OPTIONS, "num_gpu_blocks_override": 18}) as llm:
            llm._core.ranks.runner.parts[Drafting].waits = waits
            results.clear()
            for name in PARAMS:
                assert run(llm, name) == expected(folder)[name]
            stats = llm.stats()
            assert stats.preemptions
            if method in ("same_model", "noisy_model"):
                totals = stats.record(SpecDecodeStats)
                assert totals.num_accepted_tokens > totals.num_draft_tokens / 4
        assert drafted and all((token == ON_DEVICE) != waits for token in drafted)
        proposals.append({tuple(text[: at + 1].tolist()): drafts.tolist() for text, at, drafts in seen})
        first = [result for result in results[1:] if result.drafts_first]  # not the one behind the warm-up
        assert bool(first) != waits and all(result.draft_s for result in first)
    drafts, twins = proposals
    pairs = [pair for text in drafts.keys() & twins.keys() for pair in zip(drafts[text], twins[text], strict=False)]
    known = [(draft, twin) for draft, twin in pairs if -1 not in (draft, twin)]
    assert len(known) > 60 and all(draft == twin for draft, twin in known)


class Launches(TorchDispatchMode):
    """Operations that are no views and allocate nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "reshape")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_step_with_drafts_is_fewer_launches_since_the_drafters_passes_are_replays(folders, late, monkeypatch):
    draft_always(monkeypatch)
    launch, launched = ModelRunner.launch, []

    def counted(runner, inputs):
        with Launches() as launches:
            found = launch(runner, inputs)
        if inputs.plan.num_drafts and inputs.plan.drafts:
            launched.append(len(launches.names))
        return found

    def most() -> int:
        launched.clear()
        folder, options = folders["eagle3"]
        with LLM(folder, speculative_config={**options, "num_speculative_tokens": NUM_DRAFTS}, **OPTIONS) as llm:
            run(llm, "greedy")
        return max(launched)

    monkeypatch.setattr(ModelRunner, "launch", counted)
    with_graphs = most()
    monkeypatch.setattr(Drafting, "start", lambda drafting, run, graphs: None)
    without = most()
    print(with_graphs, without)
    assert with_graphs <= 68 and without > with_graphs + 60


@pytest.mark.parametrize(("method", "ranks"), in_turns(slow(METHODS), [1, 2]))
def test_the_last_stage_drafts_and_all_stages_verify(folders, expected, method, ranks):
    folder, options = folders[method]
    speculative, layout = (
        {**options, "num_speculative_tokens": NUM_DRAFTS},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": ranks},
    )
    with LLM(folder, **layout, speculative_config=speculative, **OPTIONS) as llm:
        for name in ("greedy", "seeded", "grammar"):
            assert run(llm, name) == expected(folder)[name]
        stats = llm.stats().record(SpecDecodeStats)
        assert stats.num_draft_tokens > 0
        assert method != "same_model" or stats.num_accepted_tokens > stats.num_draft_tokens / 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_drafter_on_the_last_stage_drafts_what_it_would_draft_on_one_rank(folders, method, monkeypatch):
    folder, options = folders[method]
    commit, found = Scheduler.commit, []

    def watched(scheduler: Scheduler, result: StepResult, now: float, step_s: float) -> Any:
        found[-1] += result.drafts.values()
        return commit(scheduler, result, now, step_s)

    monkeypatch.setattr(Scheduler, "commit", watched)
    for stages in (1, 3):
        found.append([])
        speculative = {**options, "num_speculative_tokens": NUM_DRAFTS}
        with LLM(folder, pipeline_parallel_size=stages, speculative_config=speculative, **OPTIONS) as llm:
            for prompt in PROMPTS:  # one at a time, so that the steps are the same
                llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), use_tqdm=False)
    assert found[0] == found[1]
    assert len({token for drafts in found[0] for token in drafts}) > 5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_two_ranks_verify_the_drafts_of_the_first(folders, expected, method):
    folder, options = folders[method]
    with LLM(
        folder, tensor_parallel_size=2, speculative_config={**options, "num_speculative_tokens": NUM_DRAFTS}, **OPTIONS
    ) as llm:
        for name, right in expected(folder).items():
            assert run(llm, name) == right
        assert llm.stats().record(SpecDecodeStats).num_draft_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle3"}, "speculative_config.model must be given with method eagle3"),
        ({"method": "mtp", "model": "pocket"}, "a method other than mtp for Qwen3ForCausalLM"),
        ({"method": "draft_model", "model": "/nowhere"}, "model '/nowhere': no such folder"),
        ({"method": "mtp"}, "a method other than mtp for Qwen3ForCausalLM"),
    ],
)
def test_drafters_that_cannot_start_are_refused_in_one_line(options, message):
    with pytest.raises((ConfigError, ModelFolderError), match=message) as refused:
        LLM("pocket", speculative_config=options, num_threads=1)
    assert "\n" not in str(refused.value)
