"""Flags of `vllm serve`: which of them `manta serve` takes under another name, and what stands for the others."""

from __future__ import annotations

import re

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
    "-q": "--quantization",
    "-sc": "--speculative-config",
}
VALUES: dict[str, dict[str, str | None]] = {  # of flags that are the same; None leaves the flag out
    "--dtype": {"half": "float16", "float": "float32"},
    "--load-format": {"safetensors": "auto"},
    "--log-level": {"trace": "debug", "critical": "error"},
    "--max-model-len": {"auto": None, "-1": None},  # without the flag it is the model's own, or what fits
}
SEVERAL = ("--served-model-name", "--api-key")  # vLLM's take several values after one flag
LEAVE_OUT = "leave it out: "
RANKS = "--tensor-parallel-size N splits a model over N ranks; there is no other way"
GRAPHS = "--torch-compile compiles, --enforce-eager does without CUDA graphs"
# flags, and what to do without them
GROUPS = {
    # the server
    "--model": "give the model without --model: manta serve MODEL",
    "--config": "give the file without --config: manta serve FILE.yaml; --print-config writes one",
    "--api-server-count -asc": "--set ingress.num_replicas=N starts more HTTP servers",
    "--grpc --uds --tokens-only": "the API is HTTP over TCP: --host, --port",
    "--ssl-ca-certs --ssl-cert-reqs": "clients are told apart by --api-key, not by certificates of theirs",
    "--ssl-ciphers": LEAVE_OUT + "TLS 1.2 and 1.3 have HAProxy's default ciphers",
    "--enable-ssl-refresh": LEAVE_OUT + "a renewed certificate is read when the server starts again",
    "--allow-credentials": LEAVE_OUT + "browsers send an API key without it; there are no cookies",
    "--allowed-methods --allowed-headers": LEAVE_OUT + "--allowed-origins may send any",
    "--middleware": "put a proxy in front: there are no plugins",
    "--shutdown-timeout": "--set ingress.drain_s=N, and decode.drain_s",
    "--h11-max-incomplete-event-size --h11-max-header-count": "--set ingress.max_body_bytes=N limits bodies",
    "--disable-fastapi-docs --enable-offline-docs": LEAVE_OUT + "there is /openapi.json, and no page for it",
    "--enable-request-id-headers": LEAVE_OUT + "X-Request-Id is always sent back",
    "--enable-server-load-tracking": LEAVE_OUT + "/load is always there",
    "--enable-prompt-tokens-details": LEAVE_OUT + "usage always says how many tokens were cached",
    "--enable-force-include-usage": "clients ask for it by stream_options.include_usage",
    "--enable-per-request-metrics": "manta explain ID shows where a request spent its time",
    "--enable-tokenizer-info-endpoint": LEAVE_OUT + "the server does not show its templates",
    "--fingerprint-mode --fingerprint-value": LEAVE_OUT + "system_fingerprint is a digest of weights and options",
    "--disable-frontend-multiprocessing": LEAVE_OUT + "HTTP and engine are always processes of their own",
    # logs and metrics
    "--enable-log-requests --enable-log-outputs --enable-log-deltas --max-log-len": "--log-level debug shows each "
    "request, but never its text",
    "--disable-log-requests --disable-uvicorn-access-log --disable-access-log-for-endpoints": LEAVE_OUT
    + "requests are only logged with --log-level debug",
    "--log-config-file --log-error-stack": "--log-level, and --set log_format=json",
    "--disable-log-stats --aggregate-engine-logging": LEAVE_OUT + "figures are only at /metrics",
    "--otlp-traces-endpoint --collect-detailed-traces": "--set tracing.otlp_endpoint=http://HOST:4318/v1/traces",
    "--show-hidden-metrics-for-version --kv-cache-metrics --kv-cache-metrics-sample --cudagraph-metrics "
    "--enable-mfu-metrics --enable-logging-iteration-details --per-request-spec-decode-metrics": LEAVE_OUT
    + "/metrics has all there is (docs/observability.md)",
    "--enable-layerwise-nvtx-tracing --profiler-config --jit-monitor-mode --jit-monitor-verbose": LEAVE_OUT
    + "python -m benchmarks.step measures a step",
    # chats
    "--chat-template-content-format": LEAVE_OUT + "templates get the content as text",
    "--trust-request-chat-template": LEAVE_OUT + "templates are code, and no code of a request is run",
    "--response-role": LEAVE_OUT + "answers have the role assistant",
    "--return-tokens-as-token-ids": "requests may ask for it by a field of that name",
    "--enable-auto-tool-choice": LEAVE_OUT + "models whose calls can be parsed may always call tools",
    "--exclude-tools-when-tool-choice-none": LEAVE_OUT + "the model is not shown tools that it must not call",
    "--enable-reasoning": LEAVE_OUT + "reasoning is always told apart; see --reasoning-parser",
    "--reasoning-config": "--reasoning-parser says how a model writes its reasoning",
    "--tool-parser-plugin --reasoning-parser-plugin --logits-processors --logits-processor-pattern "
    "--io-processor-plugin": "there are no plugins; see --tool-call-parser and --reasoning-parser",
    "--tool-server": LEAVE_OUT + "clients run their tools themselves",
    "--structured-outputs-config --guided-decoding-backend": LEAVE_OUT + "structured outputs are always on",
    "--cohere-is-reasoning-model --cohere-format": LEAVE_OUT + "there is no API of Cohere's",
    # the model
    "--trust-remote-code --code-revision --model-class-overrides --model-impl": LEAVE_OUT
    + "code from a model's folder is never run; `manta check MODEL` says by whose code it runs",
    "--runner --convert --task --enable-flash-late-interaction": LEAVE_OUT + "the model's folder says what it can do",
    "--pooler-config --override-pooler-config": LEAVE_OUT + "how a model pools is read from its folder",
    "--hf-config-path": LEAVE_OUT + "it is read from the model's folder",
    "--rope-scaling --rope-theta": "use --hf-overrides",
    "--config-format --tokenizer-mode --quantization-config --allow-deprecated-quantization "
    "--kv-cache-dtype-skip-layers --calculate-kv-scales": LEAVE_OUT + "it is read from the model's folder",
    "--tokenizer-revision": LEAVE_OUT + "it is read from the model's folder",
    "--skip-tokenizer-init --enable-prompt-embeds": LEAVE_OUT + "prompts are text or token ids",
    "--hf-token": "set HF_TOKEN in the environment",
    "--download-dir": "set HF_HOME in the environment",
    "--ignore-patterns --model-loader-extra-config --safetensors-load-strategy --safetensors-prefetch-num-threads "
    "--safetensors-prefetch-block-size --use-tqdm-on-load --pt-load-map-location --max-parallel-loading-workers "
    "--weight-transfer-config": LEAVE_OUT + "weights are read from safetensors, each rank its part",
    "--seed": LEAVE_OUT + "requests bring their own `seed`",
    "--max-logprobs": LEAVE_OUT + "the limit is 20",
    "--logprobs-mode --return-sampling-mask --enable-return-routed-experts --use-fp64-gumbel --enable-trace-replay":
    LEAVE_OUT + "log-probabilities are those of the model, before temperature and penalties",
    "--enable-sleep-mode --enable-cumem-allocator --enable-nccl-comm-suspend": "--min-replicas 0 "
    "--max-replicas N gives an idle model's GPUs back",
    "--enable-lora --lora-modules --max-loras --max-lora-rank --lora-dtype --enable-tower-connector-lora "
    "--max-cpu-loras --fully-sharded-loras --lora-target-modules --default-mm-loras --specialize-active-lora "
    "--enable-mixed-moe-lora-format --enable-moe-shared-loras": "there are no LoRA adapters: merge the adapter into "
    "the weights, and serve those",
    "--limit-mm-per-prompt": "set `ingress.images.max_per_request` in serve_config.yaml",
    "--allowed-media-domains": "set `ingress.images.allowed_media_domains` in serve_config.yaml",
    "--enable-mm-embeds --media-io-kwargs --mm-processor-kwargs "
    "--mm-processor-cache-gb --mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb "
    "--mm-encoder-only --mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype "
    "--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin "
    "--interleave-mm-strings --skip-mm-profiling --video-pruning-rate --video-pruning-method --mm-tensor-ipc "
    "--mm-processor-device --mm-ipc-gpu-memory-gb --mm-device-do-normalize --allowed-local-media-path "
    "--renderer-num-workers --ec-transfer-config --ec-manager-config --diffusion-config -dc "
    "--disable-chunked-mm-input --enable-mm-processor-cache --disable-mm-preprocessor-cache": LEAVE_OUT
    + "models take text and images, as the model's folder and `ingress.images` in serve_config.yaml say",
    "--mamba-backend --mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds "
    "--mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --replayssm-buffer-len "
    "--use-replayssm --gdn-prefill-backend --kda-prefill-backend --disable-hybrid-kv-cache-manager": LEAVE_OUT
    + "models without attention are not served",
    # ranks, nodes and replicas
    "--pipeline-parallel-size -pp --decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp "
    "--dcp-comm-backend --dcp-q-replicate --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size": RANKS,
    "--enable-expert-parallel -ep --enable-ep-weight-filter --all2all-backend --enable-eplb --eplb-config "
    "--expert-placement-strategy --enable-elastic-ep": LEAVE_OUT + "--tensor-parallel-size splits experts too",
    "--enable-dbo --ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold "
    "--enable-batch-sharded-sampling": LEAVE_OUT + "ranks compute one batch together",
    "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-size-local -dpl --data-parallel-address "
    "-dpa --data-parallel-rpc-port -dpp --data-parallel-backend -dpb --data-parallel-hybrid-lb -dph "
    "--data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port "
    "--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold "
    "--dp-sync-interval --disable-nccl-for-dp-synchronization": "--num-replicas N starts N replicas behind one "
    "address; Ray places them",
    "--distributed-executor-backend --master-addr --master-port --nnodes -n --node-rank -r --headless --numa-bind "
    "--numa-bind-nodes --numa-bind-cpus --device-ids --worker-cls --worker-extension-cls --ray-workers-use-nsight "
    "--worker-use-ray --engine-use-ray": LEAVE_OUT
    + "Ray places ranks and replicas on nodes; --address joins a cluster",
    "--distributed-timeout-seconds --cpu-distributed-timeout-seconds": "--set decode.startup_timeout_s=N",
    "--enable-fault-tolerance --fault-tolerance-config": LEAVE_OUT + "requests of a replica that dies go on elsewhere",
    "--kv-transfer-config": "--prefill-replicas N starts replicas that compute prompts for the others",
    # KV cache and memory
    "--kv-cache-memory-bytes": "--kv-cache-memory-gib has the same meaning, in GiB",
    "--kv-events-config --prefix-caching-hash-algo --prefix-match-unit --prefix-cache-retention-interval": LEAVE_OUT
    + "routers hear of cached blocks by themselves (docs/routing.md)",
    "--swap-space --kv-offloading-size --kv-offloading-backend --preemption-mode": LEAVE_OUT
    + "KV is computed again, never swapped",
    "--cpu-offload-gb --cpu-offload-params --offload-backend --offload-group-size --offload-num-in-group "
    "--offload-prefetch-step --offload-params": "weights stay on their device: --tensor-parallel-size or "
    "--quantization fp8 make them fit",
    # scheduler and kernels
    "--enable-chunked-prefill --long-prefill-token-threshold --max-num-partial-prefills --max-long-partial-prefills "
    "--max-num-scheduled-tokens --prefill-schedule-interval": LEAVE_OUT + "prompts are always computed in chunks; see "
    "--max-num-batched-tokens",
    "--max-num-queued-reqs": "--set ingress.max_waiting=N",
    "--max-num-queued-tokens": "--set ingress.max_waiting_tokens=N",
    "--scheduler-cls --scheduler-reserve-full-isl --watermark --num-lookahead-slots --num-scheduler-steps "
    "--use-v2-block-manager": LEAVE_OUT + "there is one scheduler; see --scheduling-policy",
    "--stream-interval": LEAVE_OUT + "tokens are sent as they come, several at once to a client that is slow",
    "--compilation-config -cc --optimization-level -O --performance-mode --cudagraph-capture-sizes "
    "--max-cudagraph-capture-size --cuda-graph-sizes --max-seq-len-to-capture": GRAPHS,
    "--attention-backend --attention-config -ac --kernel-config --ir-op-priority --enable-flashinfer-autotune "
    "--enable-bf16x3-router-gemm --moe-backend --linear-backend --disable-cascade-attn --disable-sliding-window "
    "--kv-sharing-fast-prefill": LEAVE_OUT + "the fastest kernels that fit the device are taken",
    "--spec-method --spec-model --spec-tokens --speculative-model --num-speculative-tokens": "they are keys of "
    "--speculative-config",
    "--additional-config --fail-on-environ-validation": LEAVE_OUT + "it is for plugins of vLLM's",
}  # fmt: skip
ANSWERS = {flag: answer for flags, answer in GROUPS.items() for flag in flags.split()}


class TakesVllmFlags(TyperCommand):
    """A command that is given flags as `vllm serve` takes them, with underscores too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Raises RequestError for a flag of vLLM's that needs another word here."""
        given = [translated(arg) if arg.startswith("-") else arg for arg in args]
        return super().parse_args(ctx, repeated(with_our_values(given)))


def translated(argument: str) -> str:
    """Return `--flag` or `--flag=value` under our name. Raises RequestError with what stands for it here."""
    name, equals, value = argument.partition("=")
    dashed = name.replace("_", "-")
    # a key inside a JSON value, as --compilation-config.mode; a level, as -O3
    known = re.sub(r"\..*|(?<=^-O)\d$", "", dashed)
    if known in ANSWERS:
        raise RequestError(f"{dashed} is vLLM's; {ANSWERS[known]}")
    switch = known.replace("--no-", "--", 1)
    if switch != known and switch in ANSWERS:
        raise RequestError(f"{dashed} is vLLM's; {LEAVE_OUT}{ANSWERS[switch].removeprefix(LEAVE_OUT)}")
    return RENAMED.get(dashed, dashed) + equals + value


def with_our_values(args: list[str]) -> list[str]:
    """Return the flags with the names that values of vLLM's have here."""
    pairs = [part for arg in args for part in (arg.split("=", 1) if arg.partition("=")[0] in VALUES else [arg])]
    result: list[str] = []
    for arg in pairs:
        values = VALUES.get(result[-1], {}) if result else {}
        if arg in values and values[arg] is None:
            result.pop()
        else:
            result.append(values.get(arg) or arg)
    return result


def repeated(args: list[str]) -> list[str]:
    """Repeat a flag of SEVERAL before each of its values, if the model comes before all flags, as in vLLM's examples.
    Elsewhere a second value might be the model."""
    if not args or args[0].startswith("-"):
        return args
    result: list[str] = []
    flag = ""
    for arg in args:
        if arg.startswith("-"):
            flag = arg
        elif flag in SEVERAL and result[-1] != flag:
            result.append(flag)
        result.append(arg)
    return result
