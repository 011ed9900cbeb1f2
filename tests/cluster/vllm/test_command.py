"""What `manta serve` makes of the flags of `vllm serve`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app, main
from cluster.config.app_config import AppConfig
from cluster.config.ingress_section import IngressSection
from cluster.model_info import model_info
from cluster.vllm.command import arguments, translated
from engine.errors import ConfigError, InvalidParameter, RequestError
from engine.offline.vllm_flags import RENAMED, TABLE

FLAGS = [(row, name, values) for row in TABLE for name, values in row.named()]


def configured(*args: str) -> dict[str, Any]:
    """Return the `args` that a command stands for."""
    result = CliRunner().invoke(app, ["serve", *args, "--print-config"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = yaml.safe_load(result.stdout)["applications"][0]["args"]
    return found


@pytest.mark.parametrize(("row", "name", "values"), FLAGS, ids=[f"{name}={values}" for _, name, values in FLAGS])
def test_a_flag_takes_no_more_than_its_value_and_does_what_its_row_says(row, name, values):
    value = (values or "").split("|")[0].strip("*") or "7"
    given = [name] if values is None else [name, value]
    if row.effect == "refused":
        with pytest.raises(RequestError, match="is not supported: ") as refusal:
            translated(["pocket", *given, "--num-cpus", "2"])
        assert str(refusal.value).endswith(row.note)
    elif row.effect == "ignored":
        command = translated(["pocket", *given, "--num-cpus", "2"])
        assert command.args == ["pocket", "--num-cpus", "2"]
        assert command.ignored == {name: row.note}


def test_one_line_names_all_that_was_left_out(capsys, monkeypatch):
    given = ["--seed", "1", "--trust-remote-code", "--swap-space=4", "--runner", "generate", "--no-enable-sleep-mode"]
    monkeypatch.setattr("sys.argv", ["manta", "serve", "pocket", *given, "--print-config"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manta: ignored: --seed (each request sets its own `seed`); --trust-remote-code (code")
    assert all(flag in line for flag in ("--swap-space (", "--runner (", "--no-enable-sleep-mode ("))


def test_what_would_change_results_or_capacity_ends_with_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["manta", "serve", "pocket", "--cpu-offload-gb", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manta: --cpu-offload-gb is not supported: weights always stay on the device")


def test_all_unsupported_flags_of_a_command_are_named_at_once():
    with pytest.raises(RequestError) as refusal:
        translated(["--cpu-offload-gb", "4", "--dtype", "float32", "--grpc", "--ssl-ciphers=AES"])
    reasons = str(refusal.value).split("; ")
    named = [reason.partition(" is not supported: ")[0] for reason in reasons if " is not supported: " in reason]
    assert named == ["--cpu-offload-gb", "--grpc", "--ssl-ciphers"]


def test_flags_with_another_name_do_what_they_do_in_vllm_with_underscores_too():
    given = ["--data-parallel-size=3", "--num_gpu_blocks_override", "64", "--max_model_len", "128", "-asc", "2"]
    found = configured("pocket", *given, "--no-async-scheduling", "--max-num-queued-reqs", "9")
    (model,) = found["models"]
    assert model["decode"]["num_replicas"] == 3
    assert model["engine"] == {"num_gpu_blocks_override": 64, "max_model_len": 128, "async_scheduling": False}
    assert found["ingress"] == {"num_replicas": 2, "max_waiting": 9}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
@pytest.mark.parametrize("command", ["serve pocket", "generate", "bench offline"])
def test_a_former_name_is_refused_with_the_new_one(command, old, new, monkeypatch, capsys):
    flag = f"--{old.replace('_', '-')}"
    monkeypatch.setattr("sys.argv", ["manta", *command.split(), flag])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith(f"manta: {flag} must be written --{new.replace('_', '-')}; see manta ")


def test_a_former_name_in_a_file_of_flags_is_refused_with_the_new_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "flags.yaml").write_text("model: pocket\noverlap: false\n")
    monkeypatch.setattr("sys.argv", ["manta", "serve", "--config", str(tmp_path / "flags.yaml")])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith("manta: --no-overlap must be written --async-scheduling; see manta serve")


@pytest.mark.parametrize(
    ("given", "number"),
    [("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("2m", 2_000_000), ("1M", 2**20), ("300", 300)],
)
def test_sizes_may_have_a_unit_as_in_vllm(given, number):
    flags = ["--max-model-len", given, f"--max-num-batched-tokens={given}", "--kv-cache-memory-bytes", given]
    found = configured("pocket", *flags, "--max-num-queued-tokens", given)
    sizes = {"max_model_len": number, "max_num_batched_tokens": number, "kv_cache_memory_bytes": number}
    assert found["models"][0]["engine"] == sizes
    assert found["ingress"] == {"max_waiting_tokens": number}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--enable-lora --max-lora-rank 64 --max-cpu-loras 2", {"lora_slots": 2, "max_cpu_loras": 2}),
        ("--enable-lora --max-lora-rank 64", {"lora_slots": 8}),
        ("--enable-lora --max-loras 1 --max-cpu-loras 1", {"lora_slots": 1}),
        ("--enable-lora --max-cpu-loras 30", {"lora_slots": 8, "max_cpu_loras": 30}),
        ("--max-num-active-seqs 5", {"max_num_seqs": 5}),
        ("--kv-cache-memory-bytes 1G --load-format gguf", {"kv_cache_memory_bytes": 2**30}),
    ],
)
def test_a_valid_command_starts(flags, expected):
    (model,) = AppConfig.parse(configured("pocket", *flags.split())).models
    config = model.engine_config()
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "sampling", "limit"),
    [
        ({"max_new_tokens": 200}, {"max_tokens": 200}, 200),
        ({"temperature": 3.0, "do_sample": True}, {"temperature": 3.0}, None),
        ({"presence_penalty": 1.5, "min_p": 0.1}, {"presence_penalty": 1.5, "min_p": 0.1}, None),
    ],
)
def test_every_field_that_vllm_overrides_is_a_default_of_requests(given, sampling, limit):
    flags = ["--generation-config", "vllm", "--override-generation-config", json.dumps(given)]
    (model,) = AppConfig.parse(configured("pocket", *flags)).models
    info = model_info(model, IngressSection())
    assert (info.default_sampling, info.max_new_tokens) == (sampling, limit)


def test_a_fraction_of_a_binary_unit_is_refused_as_in_vllm():
    with pytest.raises(InvalidParameter, match=r"--max-model-len must be a whole number, or written 1\.5k"):
        translated(["pocket", "--max-model-len", "1.5K"])


def test_values_of_vllms_mean_what_they_mean_there():
    given = ["--dtype=half", "--load-format", "mistral", "--uvicorn-log-level", "trace", "--max-model-len", "-1"]
    found = configured("pocket", *given, "-q", "awq_marlin")
    assert found["models"][0]["engine"] == {"dtype": "float16", "load_format": "auto", "quantization": "awq"}
    assert found["log_level"] == "debug"


def test_limits_of_images_are_ours_and_no_images_at_all_leaves_their_encoder_out():
    two = configured("pocket", "--limit-mm-per-prompt", '{"image": 2, "video": 1}')
    assert two["ingress"]["images"] == {"max_per_request": 2}
    none = configured("pocket", "--limit-mm-per-prompt.image=0")
    assert none["models"][0]["engine"] == {"language_model_only": True}
    assert configured("pocket", "--allowed-media-domains", "a.example", "b.example")["ingress"]["images"] == {
        "allowed_media_domains": ["a.example", "b.example"]
    }


def test_an_object_may_come_in_parts():
    parts = ["--speculative-config.method", "ngram", "--spec-tokens", "3", "--hf-overrides", '{"rope_theta": 1}']
    found = configured("pocket", *parts, "--rope-scaling", '{"rope_type": "yarn"}', "--rope-theta=2")
    engine = found["models"][0]["engine"]
    assert engine["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}
    assert json.loads(engine["hf_overrides"]) == {"rope_theta": 2, "rope_scaling": {"rope_type": "yarn"}}
    with pytest.raises(InvalidParameter, match="--hf-overrides"):
        translated(["pocket", "--hf-overrides", "no"])


def test_drafts_by_the_models_own_layers_have_one_name():
    config = '{"method": "ernie_mtp", "model": "itself", "num_speculative_tokens": 1, "draft_tensor_parallel_size": 1}'
    command = translated(["pocket", "--speculative-config", config])
    assert json.loads(command.args[-1]) == {"method": "mtp", "num_speculative_tokens": 1}
    assert list(command.ignored) == ["--speculative-config.draft_tensor_parallel_size"]


def test_kv_events_have_the_same_keys_but_no_queue_to_bound():
    command = translated(
        ["pocket", "--kv-events-config", '{"max_queue_size": 9, "hwm": 7}', "--kv-events-config.topic=t"]
    )
    assert json.loads(command.args[-1]) == {"hwm": 7, "topic": "t"}
    assert list(command.ignored) == ["--kv-events-config.max_queue_size"]
    found = configured("pocket", "--kv-events-config", '{"enable_kv_cache_events": true}')
    assert found["models"][0]["engine"]["kv_events_config"] == {"enable_kv_cache_events": True}


def test_objects_of_schemas_are_open_if_vllms_option_says_so():
    words = ["--structured-outputs-config", '{"backend": "guidance"}']
    command = translated(["pocket", *words, "--structured-outputs-config.disable_additional_properties", "false"])
    assert json.loads(command.args[-1]) == {"disable_additional_properties": False}
    assert list(command.ignored) == ["--structured-outputs-config.backend"]
    (model,) = AppConfig.parse(configured(*command.args)).models
    assert not model_info(model, IngressSection()).closed_objects
    (model,) = AppConfig.parse(configured("pocket")).models
    assert model_info(model, IngressSection()).closed_objects


def test_experts_move_as_in_vllm():
    config = (
        '{"window_size": 100, "step_interval": 200, "num_redundant_experts": 8, "use_async": true, "policy": "default"}'
    )
    flags = "-ep", "-tp", "8", "--enable-eplb", "--eplb-config", config
    engine = configured("pocket", *flags)["models"][0]["engine"]
    assert engine["enable_eplb"] is True
    assert engine["eplb_config"] == {"window_size": 100, "step_interval": 200, "num_redundant_experts": 8}
    assert list(translated(["pocket", *flags]).ignored) == ["--eplb-config.use_async", "--eplb-config.policy"]


def test_tokens_travel_to_experts_as_in_vllm_or_as_manta_chooses():
    flags = "pocket", "-ep", "-dp", "4", "--all2all-backend"
    (model,) = configured(*flags, "allgather_reducescatter")["models"]
    assert model["engine"]["all2all_backend"] == "allgather_reducescatter"
    for name in ("deepep_high_throughput", "flashinfer_nvlink_one_sided"):
        (model,) = configured(*flags, name)["models"]
        assert "all2all_backend" not in model["engine"]


@pytest.mark.parametrize("flags", [["-tp", "2", "-ep"], ["-dp", "4"], ["-dp", "1", "-ep"]], ids=" ".join)
def test_the_way_of_tokens_to_experts_is_ignored_where_no_engines_share_experts(flags):
    flags = ["pocket", "--all2all-backend", "allgather_reducescatter", *flags]
    assert "all2all_backend" not in configured(*flags)["models"][0].get("engine", {})
    assert list(translated(flags).ignored) == ["--all2all-backend"]


def test_experts_are_spread_over_ranks_or_over_engines_that_share_them_and_not_over_replicas():
    assert configured("pocket", "-ep", "-tp", "8")["models"][0]["engine"]["enable_expert_parallel"] is True
    assert (
        configured("pocket", "--enable-expert-parallel", "-dp", "1")["models"][0]["engine"]["enable_expert_parallel"]
        is True
    )
    for flags in (["-dp", "8", "-ep"], ["--enable-expert-parallel", "--data-parallel-size=8"]):
        found = configured("pocket", *flags)["models"][0]
        assert (found["engine"]["data_parallel_size"], found["engine"]["enable_expert_parallel"]) == (8, True)
        assert "decode" not in found
    assert configured("pocket", "-dp", "8")["models"][0]["decode"]["num_replicas"] == 8


def test_a_file_of_flags_stands_for_them_and_the_command_line_comes_first(tmp_path):
    (file := tmp_path / "flags.yaml").write_text(
        "model: pocket\nmax-model-len: 64\nmax-num-seqs: 2\nno-enable-prefix-caching: true\nserved-model-name: [a, b]\n"
    )
    (model,) = configured("--config", str(file), "--max-num-seqs", "3")["models"]
    assert (model["name"], model["aliases"], model["model"]) == ("a", ["b"], "pocket")
    assert model["engine"] == {"max_model_len": 64, "max_num_seqs": 3, "enable_prefix_caching": False}
    file.write_text("applications: []")
    with pytest.raises(ConfigError, match=r"manta serve FILE\.yaml"):
        translated(["--config", str(file)])


def test_the_model_may_come_as_a_flag():
    (model,) = configured("--max-num-seqs", "3", "--model", "pocket", "--served-model-name", "a")["models"]
    assert (model["model"], model["name"]) == ("pocket", "a")


@pytest.mark.parametrize("given", ["-O3", "-O=3", "--compilation-config.mode=3", "-cc.pass_config.x=True"])
def test_every_way_to_write_a_flag_is_understood(given):
    assert list(translated([given]).ignored.values()) == [
        "use --torch-compile to compile, and --enforce-eager to turn off CUDA graphs"
    ]


def test_arguments_of_the_engine_are_flags():
    kwargs = {"max_model_len": 64, "trust_remote_code": True, "enable_prefix_caching": False, "seed": None,
              "hf_overrides": {"a": 1}}  # fmt: skip
    expected = ["--max-model-len=64", "--trust-remote-code", "--no-enable-prefix-caching", '--hf-overrides={"a": 1}']
    assert arguments(kwargs) == expected
