"""What `manta serve` says to the flags of `vllm serve`."""

from __future__ import annotations

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from cluster.cli.main import app, main
from cluster.cli.vllm_flags import ANSWERS, RENAMED
from engine.errors import RequestError

SERVE = get_command(app).commands["serve"]  # type: ignore[attr-defined]
OURS = {name for parameter in SERVE.params for name in (*parameter.opts, *parameter.secondary_opts)}
# as `vllm serve --help=listgroup` has them for models of text; those of its developers are left out
COMMON = """
--model --host --port --api-key --served-model-name --dtype --quantization --kv-cache-dtype --block-size
--gpu-memory-utilization --enforce-eager --load-format --max-model-len --max-num-batched-tokens --max-num-seqs
--scheduling-policy --enable-prefix-caching --no-enable-prefix-caching --tensor-parallel-size -tp
--pipeline-parallel-size -pp --data-parallel-size -dp --enable-expert-parallel --trust-remote-code --chat-template
--tool-call-parser --enable-auto-tool-choice --reasoning-parser --tokenizer --revision --download-dir --hf-overrides
--speculative-config --enable-lora --lora-modules --limit-mm-per-prompt --kv-transfer-config --num-gpu-blocks-override
--swap-space --cpu-offload-gb --compilation-config --enable-chunked-prefill --async-scheduling
--distributed-executor-backend --disable-log-stats --disable-log-requests --uvicorn-log-level --ssl-keyfile
--ssl-certfile --root-path --allowed-origins --generation-config --override-generation-config --max-logprobs
--structured-outputs-config --config --seed --kv-cache-memory-bytes --attention-backend --api-server-count --nnodes
--headless
"""


def test_every_common_flag_is_ours_too_or_has_an_answer():
    assert set(COMMON.split()) <= OURS | set(RENAMED) | set(ANSWERS)
    assert not OURS & (set(RENAMED) | set(ANSWERS)), "ours needs no answer"


def test_flags_that_the_answers_name_are_ours():
    named = {word.strip(":;,'()") for answer in ANSWERS.values() for word in answer.split() if word.startswith("--")}
    foreign = {"--model", "--config", "--generate", "--revision", "--address"}  # quoted, or of another command
    assert named - foreign <= OURS, named - foreign - OURS
    assert set(RENAMED.values()) <= OURS


@pytest.mark.parametrize("flag", ANSWERS)
def test_flag_that_we_do_not_have_is_one_line_that_says_what_to_do(flag):
    result = CliRunner().invoke(app, ["serve", "pocket", flag, "2"])
    assert isinstance(result.exception, RequestError)
    assert str(result.exception).startswith(f"{flag} is vLLM's; ") and "\n" not in str(result.exception)


def test_flag_with_another_name_does_what_it_does_in_vllm_with_underscores_too():
    given = ["--data-parallel-size=3", "--num_gpu_blocks_override", "64", "--max_model_len", "128"]
    result = CliRunner().invoke(app, ["serve", "pocket", *given, "--print-config"])
    assert result.exit_code == 0, result.output
    (model,) = yaml.safe_load(result.stdout)["applications"][0]["args"]["models"]
    assert model["decode"]["num_replicas"] == 3
    assert model["engine"] == {"num_blocks": 64, "max_model_len": 128}


def test_wrong_flag_ends_with_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["manta", "serve", "pocket", "--api-key", "sk-1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manta: --api-key is vLLM's; keys stand in a file: manta hash-key")
