"""Files of Ray Serve LLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import app, ray_serve_llm
from cluster.config.app_config import AppConfig
from cluster.serve_config import check, load
from engine.errors import ConfigError, StartupError
from manta import LLMConfig
from tests.weightless_models import make_folder

SAMPLES = yaml.safe_load((Path(__file__).parent / "ray_serve_llm_samples.yaml").read_text())
MODEL = {"model_loading_config": {"model_id": "m", "model_source": "pocket"}}


def args_of(**keys: Any) -> dict[str, Any]:
    return ray_serve_llm.serving_args({"llm_configs": [{**MODEL, **keys}]})


def section(**keys: Any) -> dict[str, Any]:
    (found,) = args_of(**keys)["models"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample["from"] for sample in SAMPLES])
def test_a_published_file_is_fine_with_another_import_path(sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    small = str(make_folder(tmp_path / "models", "Qwen2ForCausalLM", sample.get("quantized")))
    (given,) = sample["serve"]["applications"]
    configs = [*sample.get("files", {}).values(), *given["args"]["llm_configs"]]
    for config in configs:
        if isinstance(config, dict):
            config["model_loading_config"]["model_source"] = small
    for name, config in sample.get("files", {}).items():
        Path(name).write_text(yaml.safe_dump(config))
    given["import_path"] = "manta:build_openai_app"
    (file := tmp_path / "serve.yaml").write_text(yaml.safe_dump(sample["serve"]))
    ids = [config["model_loading_config"]["model_id"] for config in configs if isinstance(config, dict)]
    assert check(file) == ids


def test_there_are_ten_of_them():
    assert len(SAMPLES) >= 10


def test_keys_mean_here_what_they_mean_there():
    deployment = {
        "autoscaling_config": {"min_replicas": 0, "max_replicas": 3, "downscale_delay_s": 9.0},
        "max_ongoing_requests": 32,
        "graceful_shutdown_timeout_s": 5,
    }
    found = section(
        accelerator_type="L4",
        engine_kwargs={"tensor_parallel_size": 2, "reasoning_parser": "qwen3", "max_model_len": 64},
        deployment_config=deployment,
        placement_group_config={"bundle_per_worker": {"CPU": 2, "GPU": 1}, "strategy": "STRICT_PACK"},
    )
    assert found["name"] == "m" and found["reasoning_parser"] == "qwen3"
    assert found["engine"] == {"tensor_parallel_size": 2, "max_model_len": 64}
    assert found["decode"] == {
        "num_gpus": 1, "num_cpus": 2, "placement_strategy": "STRICT_PACK", "accelerator_type": "L4",
        "min_replicas": 0, "max_replicas": 3, "downscale_delay_s": 9.0, "max_ongoing_requests": 32, "drain_s": 5,
    }  # fmt: skip


def test_a_model_asks_for_a_gpu_unless_it_is_said_to_be_on_cpus():
    assert section()["decode"]["num_gpus"] == 1
    assert section(accelerator_config={"kind": "cpu"})["decode"]["num_gpus"] == 0
    assert section(placement_group_config={"bundles": [{"CPU": 1}] * 2})["decode"] == {"num_gpus": 0, "num_cpus": 1}


def test_as_many_replicas_as_at_least_is_a_fixed_number():
    scaling = {"min_replicas": 2, "max_replicas": 2, "target_ongoing_requests": 5}
    assert section(deployment_config={"autoscaling_config": scaling})["decode"]["num_replicas"] == 2
    assert section(deployment_config={"num_replicas": "auto"})["decode"]["max_replicas"] == 100


def test_what_is_left_out_is_in_the_log(caplog):
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 5}
    section(
        deployment_config={"autoscaling_config": scaling, "health_check_period_s": 3},
        engine_kwargs={"enable_chunked_prefill": True},
        log_engine_metrics=False,
    )
    said = "\n".join(caplog.messages)
    assert "target_ongoing_requests of llm_configs[0].deployment_config.autoscaling_config" in said
    assert "health_check_period_s of llm_configs[0].deployment_config" in said
    assert "log_engine_metrics of llm_configs[0]" in said
    assert "llm_configs[0].engine_kwargs: ignored: --enable-chunked-prefill (" in said


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_config": {"dynamic_lora_loading_path": "ftp://b"}}, r"\.lora_config\.dynamic_lora_loading"),
        ({"server_cls": "sglang:Server"}, r"llm_configs\[0\]\.server_cls must be left out"),
        ({"llm_engine": "SGLang"}, r"llm_configs\[0\]\.llm_engine must be vLLM"),
        ({"engine_kwargs": {"max_modle_len": 8}}, r"llm_configs\[0\]\.engine_kwargs: No such option: --max-modle-len"),
        ({"engine_kwargs": {"dtype": "int4"}}, r"engine_kwargs: Invalid value for '--dtype'"),
        ({"model_loading_config": {}}, r"llm_configs\[0\]\.model_loading_config\.model_id must be given"),
        ({"model_loading_config": {"model_id": "m", "model_source": {"bucket_uri": "s3://b"}}}, "source must be a"),
        ({"model_loading_config": {"model_id": "m", "model_source": "s3://b"}}, "mount the bucket"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}, {"TPU": 1}]}}, r"placement_group_config\.bundles must be"),
        ({"accelerator_config": {"kind": "tpu"}}, r"accelerator_config\.kind must be gpu or cpu"),
        ({"runtime_env": {"pip": ["x"]}}, r"llm_configs\[0\]\.runtime_env\.pip must be one of the known keys"),
        ({"runtime_env": {"env_vars": {"HF_TOKEN": "x"}}}, r"env_vars\.HF_TOKEN must be set by runtime_env of the app"),
        ({"modell": 1}, r"llm_configs\[0\]\.modell must be one of the known keys"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_said_by_name(keys, message, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(StartupError, match=message):
        args_of(**keys)


def test_variables_of_a_model_become_those_of_the_application_where_that_is_seen(tmp_path):
    environment = {"env_vars": {"HF_TOKEN": "x", "VLLM_USE_V1": "1"}}
    given = {
        "import_path": "manta:build_openai_app",
        "args": {"llm_configs": [{**MODEL, "runtime_env": environment, "engine_kwargs": {"hf_token": "y"}}]},
        "runtime_env": {"env_vars": {"A": "b"}},
    }
    (file := tmp_path / "serve.yaml").write_text(yaml.safe_dump({"applications": [given]}))
    (found,) = load(file)["applications"]
    assert found["runtime_env"] == {"env_vars": {"HF_TOKEN": "x", "A": "b"}}
    assert found["import_path"] == "manta:build"
    AppConfig.of(found)


def test_variables_that_are_set_already_are_fine(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "x")
    assert section(runtime_env={"env_vars": {"HF_TOKEN": "x"}})


def test_keys_of_ours_may_stand_beside_the_models():
    args = {"llm_configs": [MODEL], "log_format": "json", "ingress": {"max_replays": 1},
            "ingress_deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}}  # fmt: skip
    found = ray_serve_llm.serving_args(args)
    assert found["log_format"] == "json"
    assert found["ingress"] == {"max_replays": 1, "num_replicas": 4}
    assert AppConfig.parse(found).ingress.num_replicas == 4


def test_prefill_and_decode_are_pools_of_one_model(caplog):
    connector = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}
    scaling = {"autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}
    args = {
        "prefill_config": {**MODEL, "engine_kwargs": {**connector, "max_num_seqs": 2}, "deployment_config": scaling},
        "decode_config": {**MODEL, "engine_kwargs": connector},
    }
    (model,) = AppConfig.parse(ray_serve_llm.serving_args(args)).models
    assert model.prefill is not None and model.prefill.num_replicas == 2
    assert model.engine_config("prefill").max_num_seqs == 2
    assert model.engine_config("decode").handoff is not None
    for section in args:
        assert f"left out: kv_transfer_config of {section}.engine_kwargs" in caplog.text
    args["prefill_config"] = {"model_loading_config": {"model_id": "other", "model_source": "pocket"}}
    with pytest.raises(ConfigError, match=r"prefill_config \(name\) must be the same as in decode_config"):
        ray_serve_llm.serving_args(args)


def test_python_code_builds_an_application_of_it():
    config = LLMConfig(**MODEL, accelerator_config={"kind": "cpu"}, engine_kwargs={"max_model_len": 64})
    application = app.build_openai_app({"llm_configs": [config]})
    assert application._bound_deployment.name == "ingress"
