"""Keyword arguments of `LLM` with vLLM's names."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.offline.engine_arguments import SERVED, engine_options, in_python
from engine.offline.vllm_flags import RENAMED, SPECIAL, find

FLAGS = {
    flag
    for line in (Path(__file__).parent / "vllm_serve_flags.txt").read_text().splitlines()
    if not line.startswith("#")
    for flag in line.split()
    if flag.startswith("--") and f"{flag}=" not in SPECIAL
}
ARGUMENTS = yaml.safe_load((Path(__file__).parent / "vllm_engine_args.yaml").read_text())
FLAGS |= {f"--{name.replace('_', '-')}" for name in ARGUMENTS} - {"--model"}
OWN = {"chat_template", "generation_config", "override_generation_config", "revision", "served_model_name"}
DEFAULTS = {name: value for name, value in ARGUMENTS.items() if name not in OWN}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3},
        ),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        (
            {"enable_expert_parallel": True, "data_parallel_size": 2},
            {"enable_expert_parallel": True, "data_parallel_size": 2},
        ),
        (
            {"num_gpu_blocks_override": 64, "async_scheduling": True},
            {"num_gpu_blocks_override": 64, "async_scheduling": True},
        ),
        ({"seed": 5, "gpu_memory_utilization": 0.5}, {"seed": 5, "gpu_memory_utilization": 0.5}),
        ({"max_num_seqs": None, "quantization": None, "max_model_len": -1}, {}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": torch.bfloat16, "load_format": "safetensors"}, {"dtype": "bfloat16", "load_format": "auto"}),
        ({"hf_overrides": {"rope_theta": 5}}, {"hf_overrides": '{"rope_theta": 5}'}),
        ({"rope_theta": 5}, {"hf_overrides": '{"rope_theta": 5}'}),
        (
            {"speculative_config": {"method": "deepseek_mtp", "model": "x", "num_speculative_tokens": 1}},
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        ),
        (
            {"structured_outputs_config": {"backend": "xgrammar", "disable_additional_properties": False}},
            {"structured_outputs_config": {"disable_additional_properties": False}},
        ),
        ({"cpu_offload_gb": 0, "tokenizer_mode": "auto", "kv_transfer_config": None, "hf_token": None}, {}),
        ({"dcp_kv_cache_interleave_size": 1, "skip_tokenizer_init": False, "max_logprobs": 20}, {}),
    ],
)
def test_arguments_of_vllm_become_fields_of_the_configuration(given, options):
    assert engine_options(given) == options
    EngineConfig(**{name: value for name, value in options.items() if name != "data_parallel_size"})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"tensor_paralel_size": 2}, "tensor_paralel_size must be left out; did you mean tensor_parallel_size?, got 2"),
        ({"blue": 1}, "blue must be left out, because LLM has no such option"),
        *(({old: 1}, f"{old} must be written {new}, got 1") for old, new in RENAMED.items()),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init must be left out, because it is not supported: prompts"),
        ({"cpu_offload_gb": 4}, "not supported: weights always stay on the device; use tensor_parallel_size or"),
        ({"hf_token": "x"}, "hf_token must be left out, because it is not supported: set HF_TOKEN"),
        ({"hf_overrides": print}, "hf_overrides must be a value, not a function"),
        ({"host": "0.0.0.0"}, "host must be left out, because it is not supported: it is an option of servers"),
        ({"max_num_queued_reqs": 5}, "it is an option of servers"),
    ],
)
def test_an_argument_that_cannot_be_obeyed_is_refused_by_name(given, error):
    with pytest.raises(ConfigError) as refused:
        engine_options(given)
    assert error in str(refused.value)


def test_an_argument_without_effect_on_answers_is_ignored_with_the_reason(caplog):
    given = {
        "trust_remote_code": True,
        "swap_space": 4,
        "disable_log_stats": False,
        "limit_mm_per_prompt": {"image": 2},
    }
    assert engine_options(given) == {}
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "trust_remote_code of LLM is ignored",
        "swap_space of LLM is ignored",
        "limit_mm_per_prompt of LLM is ignored",
    ]


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_every_flag_of_vllm_serve_is_an_argument_that_is_obeyed_ignored_or_refused_by_name(flag, caplog):
    name = flag.removeprefix("--").replace("-", "_")
    if name in OWN:
        return
    assert engine_options({name: None}) == {}, "nothing is asked for"
    row = find(flag, "5")
    refused = name in SERVED or (row is not None and (row.effect == "refused" or row.note.endswith("={}")))
    if refused and name != "limit_mm_per_prompt":
        with pytest.raises(ConfigError, match=rf"^configuration: {name} must be left out, because"):
            engine_options({name: "5"})
    else:
        assert engine_options({name: "5"}) or caplog.messages


def test_vllms_own_defaults_are_accepted_all_together_without_a_word(caplog):
    """As in its examples: `LLM(**vars(parser.parse_args()))` passes every argument."""
    fields = engine_options(DEFAULTS)
    EngineConfig(**fields)
    assert not caplog.messages


def test_every_default_that_is_not_vllms_stands_in_the_table_of_defaults():
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    table = page.partition("\n## Defaults\n")[2].partition("\n## ")[0]
    rows = {flag: cells for flag, *cells in re.findall(r"^\| `--([a-z0-9-]+)`.*? \| (.*?) \| (.*?) \|", table, re.M)}
    for field in fields(EngineConfig):
        theirs = ARGUMENTS.get(field.name, field.default)
        if theirs != field.default and theirs != {} and field.name != "model":
            left, right = rows[field.name.replace("_", "-")]
            assert theirs is None or f"`{theirs}`" in left, field.name
            assert field.default is None or f"`{field.default}`" in right, field.name


def test_notes_about_flags_name_arguments():
    assert in_python("see --max-num-batched-tokens") == "see max_num_batched_tokens"
    assert in_python("--prefill-replicas N starts replicas") == "--prefill-replicas N starts replicas"
