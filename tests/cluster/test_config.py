from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import main as cli
from cluster.config.app_config import AppConfig
from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import HandoffSection, ModelSection
from cluster.config.pool_section import EngineSection
from cluster.model_info import model_info
from deployments.observability import tracing
from deployments.routing.config import RoutingConfig
from engine.config import EngineConfig
from engine.errors import ConfigError, StartupError
from engine.offline.vllm_flags import RENAMED
from engine.options.handoff import HandoffConfig
from engine.text.chat_tokenizer import ChatTokenizer
from tests.pooling_models import EMBEDDINGS, make

MODEL = {"name": "pocket", "model": "pocket"}


def test_smallest_configuration_takes_all_defaults():
    (model,) = AppConfig.parse({"models": [MODEL]}).models
    assert model.engine_config() == EngineConfig(model="pocket", block_size=16)


def test_engine_section_has_every_field_of_the_engine_but_the_model():
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(EngineSection.model_fields) == names - {"model", "handoff", "encode"}


def test_handoff_section_has_every_field_of_the_handoff_but_the_role():
    names = {field.name for field in dataclasses.fields(HandoffConfig)}
    assert set(HandoffSection.model_fields) == names - {"role"}


def test_replica_has_a_bundle_per_rank_and_the_first_also_holds_its_control_actor():
    (model,) = AppConfig.parse({"models": [{**MODEL, "decode": {"num_cpus": 2, "num_gpus": 1}}]}).models
    assert model.group_spec().bundles == [{"CPU": 2.1, "GPU": 1.0}]


def test_replica_has_as_many_ranks_as_its_engine_is_parallel():
    decode = {"placement_strategy": "STRICT_SPREAD", "label_selector": {"pool": "a"}, "accelerator_type": "L4"}
    args = {"models": [{**MODEL, "engine": {"tensor_parallel_size": 2}, "decode": decode}]}
    spec = AppConfig.parse(args).models[0].group_spec()
    assert len(spec.bundles) == spec.num_ranks == 2
    assert (spec.strategy, spec.label_selector, spec.accelerator_type) == ("STRICT_SPREAD", {"pool": "a"}, "L4")


def test_parsers_of_answers_are_chosen_per_model():
    args = {"models": [MODEL, {**MODEL, "name": "b", "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}]}
    automatic, chosen = AppConfig.parse(args).models
    assert (automatic.tool_call_parser, automatic.reasoning_parser) == ("auto", "auto")
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == ("hermes", "qwen3")
    with pytest.raises(ConfigError, match=r"models\[0\].tool_call_parser must be 'auto', 'none', 'deepseek_v3'"):
        AppConfig.parse({"models": [{**MODEL, "tool_call_parser": "python"}]})


KEYS = {"api_keys": ["alice:" + 64 * "0"]}
BUDGET = {"budget_duration": "1d", "max_budget": 5}


@pytest.mark.parametrize(
    ("ingress", "message"),
    [
        ({"key_limits": {"alice": {}}}, "ingress.api_keys_file must be given"),
        ({**KEYS, "num_replicas": 2, "key_limits": {"alice": {}}}, "ingress.store must be given"),
        ({**KEYS, "key_limits": {"alice": {"budget_limits": [BUDGET]}}}, "model 'pocket' has no prices"),
        ({**KEYS, "key_limits": {"alice": {"budget_limits": [{"budget_duration": "1d"}]}}}, "max_budget or max_engine"),
        ({**KEYS, "key_limits": {"alice": {"priority": 1}}}, "ingress.key_limits.alice.priority must be 0"),
        ({**KEYS, "key_limits": {"alice": {"rpm": 1}}}, "one of the known keys .rpm_limit, tpm_limit"),
        ({**KEYS, "allow_runtime_key_updating": True}, "ingress.admin_keys must be at least one name"),
        (
            {**KEYS, "allow_runtime_key_updating": True, "admin_keys": ["alice"]},
            "ingress.store must be given",
        ),
    ],
)
def test_limits_of_keys_that_could_not_be_kept_are_refused(ingress, message):
    with pytest.raises(ConfigError, match=message):
        AppConfig.parse({"models": [MODEL], "ingress": ingress})


def test_an_admin_needs_a_key_of_the_configuration_unless_keys_are_made_while_the_server_runs(tmp_path):
    (tmp_path / "keys").write_text(f"bob:{64 * '1'}\n")
    keys = {**KEYS, "api_keys_file": str(tmp_path / "keys")}
    IngressSection(**keys, admin_keys=["alice", "bob"]).auth()
    IngressSection(**keys, admin_keys=["carol"], allow_runtime_key_updating=True, store="sqlite:///s").auth()
    with pytest.raises(ConfigError, match=r"ingress.admin_keys must be names of keys in .*, got 'carol'"):
        IngressSection(**keys, admin_keys=["alice", "carol"]).auth()


def test_a_budget_of_money_needs_prices_and_prices_are_not_negative():
    ingress = {**KEYS, "key_limits": {"alice": {"budget_limits": [BUDGET]}}}
    config = AppConfig.parse({"models": [{**MODEL, "prices": {"engine_hour": 2.0}}], "ingress": ingress})
    assert config.ingress.auth().key_limits["alice"].budget_limits[0].max_budget == 5
    with pytest.raises(ConfigError, match="at least 0"):
        AppConfig.parse({"models": [{**MODEL, "prices": {"engine_hour": -1}}]})


def test_pools_share_the_engine_section_but_for_keys_of_their_own():
    prefill = {"engine": {"tensor_parallel_size": 2, "max_num_batched_tokens": 8192}, "num_cpus": 4}
    engine = {"tensor_parallel_size": 1, "max_num_batched_tokens": 512, "dtype": "float32"}
    args = {"models": [{**MODEL, "engine": engine, "prefill": prefill, "handoff": {"lease_s": 4}}]}
    (model,) = AppConfig.parse(args).models
    decode_config, prefill_config = model.engine_config("decode"), model.engine_config("prefill")
    assert (decode_config.tensor_parallel_size, decode_config.max_num_batched_tokens) == (1, 512)
    assert (prefill_config.tensor_parallel_size, prefill_config.max_num_batched_tokens) == (2, 8192)
    assert decode_config.dtype == prefill_config.dtype == "float32"
    assert decode_config.handoff == HandoffConfig(role="decode", lease_s=4)
    assert prefill_config.handoff == HandoffConfig(role="prefill", lease_s=4)
    assert model.group_spec("prefill").bundles == [{"CPU": 4.1}, {"CPU": 4.0}]
    assert model.group_spec("decode").bundles == [{"CPU": 1.1}]


def test_a_former_key_of_the_ingress_is_refused_with_the_new_one():
    with pytest.raises(ConfigError, match=r"ingress\.cors_origins must be written allowed_origins, got \['\*'\]"):
        AppConfig.parse({"models": [MODEL], "ingress": {"cors_origins": ["*"]}})


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_former_name_is_refused_with_the_new_one(old, new):
    for model, path in (({"engine": {old: 2}}, ""), ({"prefill": {"engine": {old: 2}}}, "prefill.")):
        with pytest.raises(ConfigError, match=rf"models\[0\].{path}engine.{old} must be written {new}, got 2$"):
            AppConfig.parse({"models": [{**MODEL, **model}]})


@pytest.mark.parametrize(
    ("decode", "prefill", "engine", "block_size"),
    [
        (0, 0, {}, 16),
        (1, 1, {}, 64),
        (1, 0, {}, 64),
        (0, 0.5, {}, 64),
        (1, 1, {"device": "cpu"}, 16),
        (0, 0, {"device": "cuda"}, 64),
        (1, 1, {"block_size": 64}, 64),
    ],
)
def test_ingress_and_engines_of_both_pools_have_one_block_size_which_every_gpu_takes(
    decode, prefill, engine, block_size
):
    pools = {"decode": {"num_gpus": decode}, "prefill": {"num_gpus": prefill}}
    (model,) = AppConfig.parse({"models": [{**MODEL, "engine": engine, **pools}]}).models
    assert model_info(model, IngressSection()).block_size == block_size
    assert [model.engine_config(role).block_size for role in model.pools] == [block_size] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"decode": {"num_gpus": 1}},
        {"engine": {"quantization": "int8"}},
        {"engine": {"kv_cache_dtype": "fp8"}},
        {"prefill": {"engine": {"tensor_parallel_size": 2}}},
    ],
)
def test_answers_are_compared_bit_by_bit_only_where_all_replicas_give_the_same(options):
    (model,) = AppConfig.parse({"models": [{**MODEL, **options, "sdc_check_every": 1000}]}).models
    assert not model.same_bits
    strict = {"engine": {"determinism": "strict"}, "prefill": {"engine": {"tensor_parallel_size": 2}}}
    for same in ({}, strict):
        (model,) = AppConfig.parse({"models": [{**MODEL, **same, "sdc_check_every": 1000}]}).models
        assert model.same_bits


def test_steps_of_a_pool_with_gpus_are_larger_where_nobody_says_how_large():
    engine = {"max_num_seqs": 300, "dtype": "float16"}
    args = {"models": [{**MODEL, "engine": engine, "decode": {"num_gpus": 1}, "prefill": {}}]}
    (model,) = AppConfig.parse(args).models
    decode, prefill = model.engine_config("decode"), model.engine_config("prefill")
    assert (decode.max_num_batched_tokens, decode.max_num_seqs, decode.dtype) == (8192, 300, "float16")
    assert (prefill.max_num_batched_tokens, prefill.max_num_seqs, prefill.dtype) == (2048, 300, "float16")


def test_pools_scale_between_their_bounds_for_the_targets_of_their_model():
    decode = {"min_replicas": 0, "max_replicas": 3, "engine": {"max_num_seqs": 7}, "downscale_delay_s": 60}
    args = {"models": [{**MODEL, "decode": decode, "prefill": {"num_replicas": 2}, "slo": {"itl_ms": 20}}]}
    config = AppConfig.parse(args)
    (model,) = config.models
    assert config.autoscales
    settings = model.pool_settings("decode")
    assert (settings.limits.min_replicas, settings.limits.max_replicas, settings.limits.max_num_seqs) == (0, 3, 7)
    assert settings.limits.downscale_delay_s == 60
    assert (settings.slo.itl_ms, settings.slo.ttft_ms) == (20, 2000)
    fixed = model.pool_settings("prefill").limits
    assert (fixed.min_replicas, fixed.max_replicas) == (2, 2)
    assert not AppConfig.parse({"models": [MODEL]}).autoscales


def test_the_policy_knows_the_price_of_a_replica_which_may_have_several_engines():
    assert AppConfig.parse({"models": [MODEL]}).models[0].pool_settings("decode").replica_hour == 0
    (model,) = AppConfig.parse({"models": [{**MODEL, "prices": {"engine_hour": 2.0}}]}).models
    assert model.pool_settings("decode").replica_hour == 2.0
    (model,) = AppConfig.parse(
        {
            "models": [
                {
                    **MODEL,
                    "engine": {"data_parallel_size": 3, "enable_expert_parallel": True},
                    "prices": {"engine_hour": 2.0},
                }
            ]
        }
    ).models
    assert model.pool_settings("decode").replica_hour == 6.0


@pytest.mark.parametrize("policy", [None, {}, {"policy_function": "mine:policy"}])
def test_a_pool_with_max_replicas_wants_the_policy_in_its_application(policy):
    application = {"args": {"models": [{**MODEL, "decode": {"max_replicas": 2}}]}, "autoscaling_policy": policy}
    with pytest.raises(ConfigError, match=r"autoscaling_policy.policy_function must be manta:AutoscalingPolicy"):
        AppConfig.of(application)
    for name in ("manta:AutoscalingPolicy", "cluster.autoscaling.policy:Policy"):
        AppConfig.of({**application, "autoscaling_policy": {"policy_function": name}})


def test_each_pool_has_its_own_routing():
    prefill = {"routing": {"policy": "round_robin", "prefix_weight": 3}}
    (model,) = AppConfig.parse({"models": [{**MODEL, "prefill": prefill}]}).models
    decode, prefill_routing = (model.pools[role].routing_config() for role in ("decode", "prefill"))
    assert decode == RoutingConfig(policy="prefix_aware")
    assert prefill_routing == RoutingConfig(policy="round_robin", prefix_weight=3)
    assert decode.running_weight_of("decode") > prefill_routing.running_weight_of("prefill") == 0


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, None),
        ({"handoff": {"move_requests": True}}, {}),
        ({"handoff": {"enable_prefix_fetching": True}}, {"enable_prefix_fetching": True}),
        ({"decode": {"num_replicas": 2}}, {"transport": "tcp"}),
        ({"decode": {"max_replicas": 2}}, {"transport": "tcp"}),
        ({"decode": {"num_replicas": 2}, "handoff": {"lease_s": 9}}, {"transport": "tcp", "lease_s": 9}),
        ({"decode": {"num_replicas": 2}, "handoff": {"transport": "auto"}}, {}),
        ({"decode": {"num_replicas": 2}, "handoff": {"move_requests": False}}, None),
        ({"handoff": {"move_requests": False}}, None),
    ],
)
def test_requests_move_between_several_decode_replicas_over_tcp_unless_the_handoff_section_says_otherwise(
    keys, options
):
    (model,) = AppConfig.parse({"models": [{**MODEL, **keys}]}).models
    assert list(model.pools) == ["decode"]
    assert model.engine_config().handoff == (None if options is None else HandoffConfig(role="replica", **options))


def test_images_of_prefill_and_decode_engines_are_encoded_by_an_encode_pool():
    section = {**MODEL, "engine": {"tensor_parallel_size": 2, "dtype": "float32"}, "prefill": {}, "encode": {}}
    (model,) = AppConfig.parse({"models": [section]}).models
    decode, prefill, encode = (model.engine_config(role) for role in ("decode", "prefill", "encode"))
    assert decode.encode == prefill.encode == HandoffConfig(role="decode") and encode.encode is None
    assert (encode.handoff.role, encode.tensor_parallel_size, encode.dtype) == ("encode", 1, "float32")
    (model,) = AppConfig.parse({"models": [{**MODEL, "encode": {}, "handoff": {"lease_s": 9}}]}).models
    assert list(model.pools) == ["decode", "encode"]
    assert model.engine_config().handoff is None and model.engine_config().encode.lease_s == 9
    shared = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "all2all_backend": "alltoall",
    }
    (model,) = AppConfig.parse({"models": [{**MODEL, "engine": shared, "encode": {}}]}).models
    encode = model.engine_config("encode")
    assert (encode.data_parallel_size, encode.all2all_backend) == (1, "auto")


def test_replicas_that_change_roles_are_one_deployment_of_engines_that_can_do_both():
    pools = {"prefill": {"num_replicas": 2}, "decode": {"min_replicas": 1, "max_replicas": 4}}
    (model,) = AppConfig.parse({"models": [{**MODEL, **pools, "handoff": {"switch_roles": True}}]}).models
    assert model.deployments == {"pd-pocket": "decode"} and model.bounds("decode") == (3, 6)
    assert model.engine_config("prefill") == model.engine_config("decode")
    settings = model.pool_settings("decode")
    assert settings.roles is not None and settings.roles.initial_prefill == 2
    assert (settings.limits.min_replicas, settings.limits.max_replicas) == (1, 5)
    assert (settings.roles.prefill.min_replicas, settings.roles.prefill.max_replicas) == (1, 5)
    assert model.autoscales, "the policy gives the roles, even to a fixed number of replicas"


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (
            {"models": [{**MODEL, "handoff": {"switch_roles": True, "move_requests": True}}]},
            ["models[0].prefill must be given, because `handoff.switch_roles` needs two pools"],
        ),
        (
            {
                "models": [
                    {
                        **MODEL,
                        "prefill": {"engine": {"tensor_parallel_size": 2}},
                        "handoff": {"switch_roles": True},
                    }
                ]
            },
            ["models[0].prefill.engine.tensor_parallel_size must be the value of `decode` (1)", "got 2"],
        ),
        (
            {"models": [{**MODEL, "prefill": {"num_cpus": 2}, "handoff": {"switch_roles": True}}]},
            ["models[0].prefill.num_cpus must be the value of `decode` (1.0)", "got 2.0"],
        ),
        ({"models": [{**MODEL, "engine": {"block_sise": 3}}]}, ["models[0].engine.block_sise", "block_size"]),
        ({"models": [{**MODEL, "decod": {}}]}, ["models[0].decod", "decode"]),
        ({"model": []}, ["models"]),
        ({"models": []}, ["models", "at least 1"]),
        ({"models": [{"name": "a"}]}, ["models[0].model", "given"]),
        ({"models": [{**MODEL, "engine": {"block_size": "x"}}]}, ["models[0].engine.block_size", "'x'"]),
        ({"models": [{**MODEL, "engine": {"dtype": "int3"}}]}, ["models[0].engine.dtype", "bfloat16", "'int3'"]),
        ({"models": [{**MODEL, "decode": {"num_replicas": 0}}]}, ["models[0].decode.num_replicas", "0"]),
        ({"models": [{**MODEL, "decode": {"min_replicas": 2}}]}, ["models[0].decode.max_replicas"]),
        (
            {"models": [{**MODEL, "prefill": {"num_replicas": 2, "max_replicas": 3}}]},
            ["models[0].prefill.num_replicas", "left out if max_replicas is given", "2"],
        ),
        ({"models": [{**MODEL, "slo": {"itl_ms": 0}}]}, ["models[0].slo.itl_ms", "greater than 0"]),
        ({"models": [{**MODEL, "slo": {"tpot_ms": 10}}]}, ["models[0].slo.tpot_ms", "itl_ms"]),
        ({"models": [{**MODEL, "decode": {"placement_strategy": "TIGHT"}}]}, ["placement_strategy", "STRICT_PACK"]),
        (
            {"models": [{**MODEL, "decode": {"routing": {"policy": "random"}}}]},
            ["models[0].decode.routing.policy", "prefix_aware", "'random'"],
        ),
        (
            {"models": [{**MODEL, "prefill": {"routing": {"prefix_weight": -1}}}]},
            ["models[0].prefill.routing.prefix_weight", "at least 0", "-1"],
        ),
        ({"models": [{**MODEL, "decode": {"num_gpus": 2}}]}, ["models[0].decode.num_gpus", "less than or equal to 1"]),
        ({"models": [{**MODEL, "decode": {"num_cpus": 0}}]}, ["models[0].decode.num_cpus", "above 0"]),
        ({"models": [{**MODEL, "prefill": {"num_replica": 1}}]}, ["models[0].prefill.num_replica", "num_replicas"]),
        ({"models": [{**MODEL, "prefill": {"num_cpus": 0}}]}, ["models[0].prefill.num_cpus", "above 0"]),
        (
            {"models": [{**MODEL, "prefill": {"engine": {"block_sise": 1}}}]},
            ["models[0].prefill.engine.block_sise", "block_size"],
        ),
        (
            {"models": [{**MODEL, "prefill": {"engine": {"max_num_seqs": 0}}}]},
            ["models[0].prefill.engine.max_num_seqs", "at least 1"],
        ),
        (
            {"models": [{**MODEL, "engine": {"block_size": 32}, "prefill": {"engine": {"block_size": 16}}}]},
            ["models[0].prefill.engine.block_size", "the block size of the decode pool (32)", "got 16"],
        ),
        (
            {"models": [{**MODEL, "decode": {"engine": {"block_size": 32}}, "prefill": {}}]},
            ["models[0].engine.block_size", "the block size of the decode pool (32)", "got 16"],
        ),
        ({"models": [{**MODEL, "handoff": {"policy": "auto"}}]}, ["models[0].prefill", "given, or `encode`"]),
        (
            {"models": [{**MODEL, "encode": {"engine": {"tensor_parallel_size": 2}}}]},
            ["models[0].encode.engine.tensor_parallel_size must be 1", "got 2"],
        ),
        (
            {"models": [{**MODEL, "encode": {"min_replicas": 0, "max_replicas": 2}}]},
            ["models[0].encode.min_replicas must be at least 1"],
        ),
        (
            {"models": [{**MODEL, "encode": {"engine": {"dtype": "float32"}}}]},
            ["models[0].encode.engine.dtype must be the value of the decode pool (auto)", "got 'float32'"],
        ),
        (
            {"models": [{**MODEL, "decode": {"engine": {"determinism": "strict"}}, "encode": {}}]},
            ["models[0].engine.determinism must be the value of the decode pool (strict)", "got None"],
        ),
        (
            {"models": [{**MODEL, "prefill": {}, "handoff": {"transport": "udp"}}]},
            ["models[0].handoff.transport", "nixl"],
        ),
        (
            {"models": [{**MODEL, "prefill": {}, "handoff": {"lease_s": 1}}]},
            ["configuration: models[0].handoff.lease_s", "3 heartbeats"],
        ),
        ({"models": [MODEL, MODEL]}, ["models[1].name", "'pocket'"]),
        ({"models": [{**MODEL, "engine": {"block_size": 0}}]}, ["models[0].engine.block_size", "at least 1", "0"]),
        ({"models": [MODEL], "log_format": "xml"}, ["log_format", "json", "'xml'"]),
        ({"models": [MODEL], "log_level": "loud"}, ["log_level", "debug", "'loud'"]),
        ({"models": [MODEL], "tracing": {"otlp_endpoint": "http://a", "x": 1}}, ["tracing.x", "sampling_ratio"]),
        ({"models": [MODEL], "tracing": {"otlp_endpoint": "a:4317"}}, ["tracing.otlp_endpoint", "http://"]),
    ],
)
def test_mistake_is_one_line_with_the_path_of_the_key(args, parts):
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse(args)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_manta_check_says_which_extra_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, tracing.PACKAGE, None)  # as if it were not installed
    config = tmp_path / "config.yaml"
    args = "{models: [{name: m, model: pocket}], tracing: {otlp_endpoint: 'http://collector:4318/v1/traces'}}"
    config.write_text("applications: [{import_path: 'manta:build', args: " + args + "}]")
    result = CliRunner().invoke(cli.app, ["check", str(config)])
    assert isinstance(result.exception, StartupError)
    assert "manta-serve[otel]" in str(result.exception)


def test_manta_check_ends_with_1_and_one_line(tmp_path):
    bad = tmp_path / "bad.yaml"
    app = "{import_path: 'manta:build', args: {models: [{name: m, model: /nowhere}]}}"
    parallel = app.replace("model: /nowhere", "model: pocket, engine: {tensor_parallel_size: 7}")
    for text in (
        "applications: [" + app + "]",
        "applications: [" + parallel + "]",
        "applications: [{}]",
        "]",
        "applications: 3",
    ):
        bad.write_text(text)
        result = CliRunner().invoke(cli.app, ["check", str(bad)])
        assert isinstance(result.exception, StartupError)
        assert "\n" not in str(result.exception)


@pytest.mark.parametrize("name", ["serve_config.yaml", "serve_config_pd.yaml"])
def test_manta_check_accepts_the_bundled_configurations(name):
    result = CliRunner().invoke(cli.app, ["check", str(Path(cli.__file__).parents[2] / name)])
    assert result.exit_code == 0


def test_a_model_that_can_only_embed_is_served_as_it_is(tmp_path):
    folder = make(tmp_path, EMBEDDINGS["e5_multilingual"])
    (model,) = AppConfig.parse({"models": [{"name": "e5", "model": str(folder)}]}).models
    info = model_info(model, IngressSection())
    assert info.supported_tasks.names == ("embed", "token_embed")
    assert info.max_model_len == 60
    assert info.block_size is None, "there are no prefixes to share"


def test_a_model_that_can_only_embed_has_no_prefill_pool(tmp_path):
    folder = make(tmp_path, EMBEDDINGS["qwen3_embedding"])
    args = {"models": [{"name": "qwen", "model": str(folder), "prefill": {}}]}
    (model,) = AppConfig.parse(args).models
    with pytest.raises(ConfigError, match=r"prefill of model 'qwen' must be left out: .* can only embed"):
        model_info(model, IngressSection())


def test_chat_template_and_defaults_of_sampling_are_those_of_the_configuration(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ style }}: {{ messages[0].content }}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 5}')
    keys = {"name": "m", "model": "pocket", "generation_config": str(tmp_path)}
    plain = model_info(ModelSection(**keys), IngressSection())
    given = {
        "chat_template": str(tmp_path / "t.jinja"),
        "default_chat_template_kwargs": {"style": "brief"},
        "override_generation_config": {"top_k": 7, "top_p": 0.5},
    }
    info = model_info(ModelSection(**keys, **given), IngressSection())
    assert plain.default_sampling == {"temperature": 0.3, "top_k": 5}
    assert info.default_sampling == {"temperature": 0.3, "top_k": 7, "top_p": 0.5}
    assert info.chat_template == "{{ style }}: {{ messages[0].content }}"
    assert info.fingerprint != plain.fingerprint, "it may answer otherwise"
    none = model_info(ModelSection(**{**keys, "generation_config": "vllm"}), IngressSection())
    assert (none.default_sampling, none.max_new_tokens) == ({}, None)
    override = {"override_generation_config": {"max_new_tokens": 200}}
    limited = model_info(ModelSection(**keys, **override), IngressSection())
    assert limited.max_new_tokens == limited.default_sampling["max_tokens"] == 200
    tokenizer = ChatTokenizer.from_folder(Path(info.folder), template=info.chat_template)
    variables = info.chat_template_kwargs
    assert tokenizer.render_chat_template([{"role": "user", "content": "hi"}], **variables) == "brief: hi"
