"""Flags of `vllm serve`: which of them `manta serve` takes under another name, and what stands for the others."""

from __future__ import annotations

import typer
from typer.core import TyperCommand

from engine.errors import RequestError

RENAMED = {
    "--data-parallel-size": "--num-replicas",
    "-dp": "--num-replicas",
    "--num-gpu-blocks-override": "--num-blocks",
    "--async-scheduling": "--overlap",
    "--no-async-scheduling": "--no-overlap",
    "--uvicorn-log-level": "--log-level",
}
LEAVE_OUT = "leave it out: "
TEXT_ONLY = LEAVE_OUT + "models take text only"
FROM_FOLDER = LEAVE_OUT + "it is read from the model's folder"
RAY_DOES = LEAVE_OUT + "Ray places ranks and replicas on nodes; --address joins a cluster"
NO_LORA = "there are no LoRA adapters: merge the adapter into the weights, and serve those"
NO_TLS = "there is no TLS: put a proxy in front"
ANSWERS = {
    "--model": "give the model without --model: manta serve MODEL",
    "--config": "give the file without --config: manta serve FILE.yaml; --print-config writes one",
    "--api-key": "keys stand in a file: manta hash-key NAME --generate >> keys, then --api-keys-file keys",
    "--kv-transfer-config": "--prefill-replicas N starts replicas that compute prompts for the others",
    "--pipeline-parallel-size": "--tensor-parallel-size N splits a model over N ranks; there are no pipeline stages",
    "-pp": "--tensor-parallel-size N splits a model over N ranks; there are no pipeline stages",
    "--enable-expert-parallel": LEAVE_OUT + "--tensor-parallel-size splits experts too",
    "--decode-context-parallel-size": "--tensor-parallel-size N splits a model over N ranks",
    "--kv-cache-memory-bytes": "--kv-cache-memory-gib has the same meaning, in GiB",
    "--api-server-count": "--set ingress.num_replicas=N starts more HTTP servers",
    "--allowed-origins": "--set 'ingress.cors_origins=[\"https://a.example\"]'",
    "--chat-template": "put the template into the model's folder, as chat_template.jinja",
    "--trust-remote-code": LEAVE_OUT + "code from a model's folder is never run",
    "--enable-auto-tool-choice": LEAVE_OUT + "models whose calls can be parsed may always call tools",
    "--enable-reasoning": LEAVE_OUT + "reasoning is always told apart; see --reasoning-parser",
    "--enable-chunked-prefill": LEAVE_OUT + "prompts are always computed in chunks; see --max-num-batched-tokens",
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; see --max-num-batched-tokens",
    "--compilation-config": "--torch-compile compiles, --enforce-eager does without CUDA graphs",
    "-O": "--torch-compile compiles, --enforce-eager does without CUDA graphs",
    "--speculative-config": LEAVE_OUT + "there is no speculative decoding",
    "--swap-space": LEAVE_OUT + "KV is computed again, never swapped",
    "--cpu-offload-gb": "weights stay on their device: --tensor-parallel-size or --quantization fp8 make them fit",
    "--max-logprobs": LEAVE_OUT + "the limit is 20",
    "--structured-outputs-config": LEAVE_OUT + "structured outputs are always on",
    "--guided-decoding-backend": LEAVE_OUT + "structured outputs are always on",
    "--override-generation-config": "defaults of sampling stand in generation_config.json of the model's folder",
    "--generation-config": FROM_FOLDER,
    "--tokenizer": FROM_FOLDER,
    "--tokenizer-mode": FROM_FOLDER,
    "--hf-config-path": FROM_FOLDER,
    "--hf-overrides": "change config.json in a copy of the model's folder",
    "--revision": "download that revision (hf download REPO --revision ...), and serve its folder",
    "--download-dir": "set HF_HOME in the environment",
    "--enable-lora": NO_LORA,
    "--lora-modules": NO_LORA,
    "--limit-mm-per-prompt": TEXT_ONLY,
    "--mm-processor-kwargs": TEXT_ONLY,
    "--ssl-keyfile": NO_TLS,
    "--ssl-certfile": NO_TLS,
    "--root-path": "route_prefix in a serve_config.yaml; --print-config writes one",
    "--distributed-executor-backend": RAY_DOES,
    "--nnodes": RAY_DOES,
    "--node-rank": RAY_DOES,
    "--master-addr": RAY_DOES,
    "--headless": RAY_DOES,
    "--data-parallel-backend": RAY_DOES,
    "--data-parallel-address": RAY_DOES,
    "--enable-log-requests": "--log-level debug shows each request",
    "--disable-log-requests": LEAVE_OUT + "requests are only logged with --log-level debug",
    "--disable-log-stats": LEAVE_OUT + "figures are only at /metrics",
    "--disable-uvicorn-access-log": LEAVE_OUT + "requests are only logged with --log-level debug",
    "--attention-backend": LEAVE_OUT + "the fastest that fits the device is taken",
    "--seed": LEAVE_OUT + "requests bring their own `seed`",
}


class TakesVllmFlags(TyperCommand):
    """A command that is given flags as `vllm serve` takes them, with underscores too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Raises RequestError for a flag of vLLM's that needs another word here."""
        return super().parse_args(ctx, [translated(arg) if arg.startswith("-") else arg for arg in args])


def translated(argument: str) -> str:
    """Return `--flag` or `--flag=value` under our name. Raises RequestError with what stands for it here."""
    name, equals, value = argument.partition("=")
    dashed = name.replace("_", "-")
    if dashed in ANSWERS:
        raise RequestError(f"{dashed} is vLLM's; {ANSWERS[dashed]}")
    return RENAMED.get(dashed, dashed) + equals + value
