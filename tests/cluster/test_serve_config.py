"""A Serve configuration file: what is said of its mistakes, which Ray would not tell or only later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private import constants
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster import serve_config as config
from cluster.ray_environment import ENVIRONMENT
from engine.errors import ConfigError
from tests.docs.pages import block

APPLICATION = {"import_path": "manta:build", "args": {"models": [{"name": "pocket", "model": "pocket"}]}}


def with_(**keys: Any) -> dict[str, Any]:
    return {"applications": [APPLICATION | keys]}


def test_known_keys_are_those_of_rays_schemas():
    assert set(ServeDeploySchema.model_fields) == config.TOP_KEYS
    assert set(HTTPOptionsSchema.model_fields) == config.HTTP_KEYS
    assert set(ServeApplicationSchema.model_fields) == config.APPLICATION_KEYS


def test_the_file_can_give_serves_proxy_the_time_that_operations_md_says():
    options = yaml.safe_load(block("docs/operations.md", "yaml", with_="controller_options"))
    assert config.check_serve_config(with_() | options) == ["pocket"]
    read = ServeDeploySchema.model_validate(with_() | options).controller_options
    (variable,) = read.runtime_env["env_vars"]
    assert variable in ENVIRONMENT and f'"{variable}"' in Path(constants.__file__).read_text()


@pytest.mark.parametrize(
    ("serve_config", "message"),
    [
        (with_() | {"http_option": {}}, "http_option must be one of the known keys"),
        (with_() | {"http_options": {"prot": 1}}, "http_options.prot must be one of the known keys (host, keep_alive"),
        (
            with_() | {"http_options": {"port": 99999}},
            "http_options.port must be a port between 1 and 65535, got 99999",
        ),
        (with_() | {"http_options": {"host": 1}}, "http_options.host must be a string"),
        (with_() | {"http_options": 8000}, "http_options must be a section with keys, got 8000"),
        (with_(autoscaling={}), "applications[0].autoscaling must be one of the known keys"),
        (
            with_(deployments=[{"name": "decoder-pocket"}]),
            "applications[0].deployments[0].name must be one of ingress, decode-pocket, got 'decoder-pocket'",
        ),
        (
            with_(args={"models": [{"name": "m", "model": "pocket", "engine": {"max_model_len": 9999}}]}),
            "max_model_len must be at most the model's own context (2048), got 9999",
        ),
    ],
)
def test_mistake_is_named_with_its_path_and_its_limit(serve_config, message):
    with pytest.raises(ConfigError) as caught:
        config.check_serve_config(serve_config)
    assert message in str(caught.value)


def test_deployments_that_there_will_be_may_be_named():
    named = [{"name": "ingress"}, {"name": "decode-pocket", "num_replicas": 2}]
    assert config.check_serve_config(with_(deployments=named)) == ["pocket"]


def test_deployment_of_replicas_that_change_roles_has_a_name_of_its_own():
    pools = {"prefill": {}, "decode": {"max_replicas": 2}, "handoff": {"switch_roles": True}}
    changed = APPLICATION | {
        "args": {"models": [{"name": "pocket", "model": "pocket", **pools}]},
        "autoscaling_policy": {"policy_function": "manta:AutoscalingPolicy"},
    }
    named = {"applications": [changed | {"deployments": [{"name": "pd-pocket", "max_surge_percent": 1}]}]}
    assert config.check_serve_config(named) == ["pocket"]
    named["applications"][0]["deployments"][0]["name"] = "decode-pocket"
    with pytest.raises(ConfigError, match="must be one of ingress, pd-pocket, got 'decode-pocket'"):
        config.check_serve_config(named)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "must be YAML, got"),
        ("", "a mapping with a list `applications`"),
        ("applications: 3", "a mapping with a list `applications`"),
        ("applications: [{import_path: 'other:build'}]", "an application whose import_path is manta:build, or"),
        (
            "applications: [{import_path: 'ray.serve.llm:build_openai_app', args: {llm_configs: []}}]",
            "with Ray Serve LLM's arguments manta:build_openai_app or manta:build_pd_openai_app, "
            "got ray.serve.llm:build_openai_app",
        ),
        ("applications: []", "got none"),
        ("applications: [{}]", "applications[0].import_path must be given"),
    ],
)
def test_file_that_is_no_configuration_of_ours_is_refused_in_one_line(text, message, tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
