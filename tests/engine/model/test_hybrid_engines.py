"""The whole engine with models that have recurrent layers: transformers' greedy tokens over borders of their states,
however the work is cut up."""

from __future__ import annotations

from typing import Any

import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.options.speculation import SpeculativeConfig
from engine.wire.parts.speculation import SpecDecodeStats
from tests.engine.model.test_parity import Reference, Run
from tests.fake_drafter import WildDrafter, draft_always
from tests.models import HYBRIDS, make_model, with_slow
from tests.products import each_once, in_turns, slow

LENGTHS = (70, 1, 64, 130, 63)
IN_EVERY_RUN = ("qwen3_5", "nemotron_h")
FAMILIES = with_slow(HYBRIDS, set(HYBRIDS) - set(IN_EVERY_RUN))
LIKE_THEM = (
    *(family for family in HYBRIDS if family not in IN_EVERY_RUN), "gemma3", "gemma3n", "gemma4", "gpt_oss",
    "mimo_v2_flash", "deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3", "deepseek_v32", "glm_moe_dsa",
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory) -> Reference:
    return Reference(make_model(tmp_path_factory.mktemp("model"), request.param))


@pytest.mark.parametrize(
    ("reference", "options", "overlap"),
    each_once(
        FAMILIES,
        [{}, {"max_num_batched_tokens": 13, "max_num_seqs": 3}, {"num_gpu_blocks_override": 46}],
        [False, True],
    ),
    indirect=["reference"],
)
def test_tokens_are_those_of_transformers(reference, options, overlap):
    with Run(reference, overlap, **options) as run:
        prompts = {str(n): reference.prompt(n, seed=n) for n in LENGTHS}
        for name, prompt in prompts.items():
            run.add(name, prompt)
        stats = run.go()
        assert (stats.preemptions > 0) == ("num_gpu_blocks_override" in options)
        assert run.tokens == {name: reference.output(prompt) for name, prompt in prompts.items()}
        assert len(set(run.tokens["70"])) > 2, "output that repeats one token would prove nothing"


@pytest.mark.parametrize("reference", FAMILIES, indirect=True)
def test_a_prompt_that_was_seen_goes_on_from_its_last_border(reference):
    with Run(reference, overlap=True) as run:
        for name in ("first", "again"):
            run.add(name, reference.prompt(130, seed=130))
            run.go()
        assert run.tokens["first"] == run.tokens["again"] == reference.output(reference.prompt(130, seed=130))
        assert run.cached == {"first": 0, "again": 128}


@pytest.mark.parametrize(
    ("reference", "dtype"),
    each_once(IN_EVERY_RUN, ["float32", "bfloat16"]) + in_turns(slow(LIKE_THEM), ["float32", "bfloat16"]),
    indirect=["reference"],
)
def test_drafts_change_no_bit(reference, dtype, monkeypatch):
    drafter = WildDrafter()
    monkeypatch.setattr("engine.parts.speculation.make.NgramDrafter", lambda shortest, longest: drafter)
    draft_always(monkeypatch)
    prompts = {
        str(n): reference.prompt(n, seed=n) for n in (110, 50)
    }  # to the first border, and to one at which there is a state
    answers: list[Any] = []
    for speculative in (None, SpeculativeConfig(method="ngram", num_speculative_tokens=16)):
        with Run(reference, overlap=True, dtype=dtype, speculative_config=speculative) as run:
            for name, prompt in prompts.items():
                run.add(name, prompt, logprobs=0, max_tokens=40)
            stats = run.go()
        answers.append((run.tokens, run.logprobs))
        drafter.know_texts([prompt + run.tokens[name] for name, prompt in prompts.items()])
    assert answers[0] == answers[1]
    assert 0 < stats.record(SpecDecodeStats).num_accepted_tokens < stats.record(SpecDecodeStats).num_draft_tokens


def test_what_does_not_go_with_recurrent_layers_is_refused_at_start(tmp_path):
    folder = make_model(tmp_path, "qwen3_5")
    with pytest.raises(ConfigError, match="torch_compile must be"):
        build_engine(EngineConfig(model=str(folder), num_gpu_blocks_override=16, torch_compile=True))
