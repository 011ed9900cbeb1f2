"""Table of all flags of `vllm serve` that are not Manta's, with their treatment. The command line, the `engine_kwargs`
of Ray Serve LLM, the arguments of `LLM` and docs/vllm.md all follow it.

`--flag` is a switch, `--flag=` takes a value, `--flag=*` several; `--flag=a|b` means only these values; other values
have another row. A switch also exists as `--no-flag`, which asks for the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Effect = Literal["other name", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class FlagRow:
    """Treatment of some flags."""

    effect: Effect
    flags: str
    note: str
    """For `other name`: our name, or a configuration key as `KEY={}`. For `ignored`: why that is harmless. For
    `refused`: the alternative."""

    def named(self) -> Iterator[tuple[str, str | None]]:
        """Yield the name and the values of each flag; values is None for a switch, "" for any value, "*" for
        several."""
        for flag in self.flags.split():
            name, takes, values = flag.partition("=")
            yield name, values if takes else None


def same(flags: str, ours: str) -> FlagRow:
    return FlagRow("other name", flags, ours)


def ignored(flags: str, why: str) -> FlagRow:
    return FlagRow("ignored", flags, why)


def refused(flags: str, instead: str) -> FlagRow:
    return FlagRow("refused", flags, instead)


TABLE = (
    same("--data-parallel-size= -dp=", "--num-replicas"),  # unless --enable-expert-parallel is given too
    same("--uvicorn-log-level=", "--log-level"),
    same("-q=", "--quantization"),
    same("--max-num-active-seqs=", "--max-num-seqs"),
    same("-sc=", "--speculative-config"),
    same("--spec-method=", "--speculative-config.method"),
    same("--spec-model= --speculative-model=", "--speculative-config.model"),
    same("--spec-tokens= --num-speculative-tokens=", "--speculative-config.num_speculative_tokens"),
    same("--rope-scaling=", "--hf-overrides.rope_scaling"),
    same("--rope-theta=", "--hf-overrides.rope_theta"),
    same("--api-server-count= -asc=", "ingress.num_replicas={}"),
    same("--max-num-queued-reqs=", "ingress.max_waiting={}"),
    same("--max-num-queued-tokens=", "ingress.max_waiting_tokens={}"),
    same("--distributed-timeout-seconds=", "decode.startup_timeout_s={}"),
    # the server
    refused("--grpc --grpc-port= --uds= --tokens-only --enable-scale-out", "the API is HTTP over TCP: --host, --port"),
    refused("--ssl-ca-certs= --ssl-cert-reqs=", "clients identify themselves by --api-key, not by certificates"),
    refused("--ssl-ciphers=", "HAProxy's default ciphers for TLS 1.2 and 1.3 are used"),
    refused(
        "--enable-ssl-refresh", "the certificate is read when the server starts; restart the server after a renewal"
    ),
    refused("--middleware=*", "the server has no plugins; put a proxy in front of it"),
    ignored("--sse-keep-alive-interval=0", "streams have no lines but events"),
    refused("--sse-keep-alive-interval=", "streams have no lines but events; raise the read timeout of the proxy"),
    refused("--shutdown-timeout=", "--set ingress.drain_s=N, and decode.drain_s"),
    refused("--enable-force-include-usage", "clients can set stream_options.include_usage"),
    refused("--return-tokens-as-token-ids", "requests can set return_tokens_as_token_ids"),
    ignored("--response-role=assistant", "answers have the role assistant"),
    refused("--response-role=", "answers have the role assistant"),
    ignored("--allow-credentials", "the server uses no cookies, and browsers send an API key without this flag"),
    ignored("--allowed-methods=* --allowed-headers=*", "pages of --allowed-origins may use any method and header"),
    ignored("--h11-max-incomplete-event-size= --h11-max-header-count=", "--set ingress.max_body_bytes=N limits bodies"),
    ignored(
        "--disable-fastapi-docs --enable-offline-docs", "/openapi.json is always served, without a page that shows it"
    ),
    ignored("--enable-request-id-headers", "X-Request-Id is always sent back"),
    ignored("--enable-server-load-tracking", "/load is always served"),
    ignored("--enable-prompt-tokens-details", "usage always contains the number of cached tokens"),
    ignored("--enable-per-request-metrics", "manta explain ID shows where a request spent its time"),
    ignored("--enable-tokenizer-info-endpoint", "the server does not show its templates"),
    ignored("--fingerprint-mode= --fingerprint-value=", "system_fingerprint is a digest of weights and options"),
    ignored("--disable-frontend-multiprocessing", "HTTP and engine are always separate processes"),
    ignored(
        "--trust-request-chat-template --trust-request-mm-kwargs",
        "templates are code, and the server runs no code from requests",
    ),
    # logs and metrics
    ignored(
        "--enable-log-requests --enable-log-outputs --enable-log-deltas --max-log-len=",
        "--log-level debug shows each request, but never its text",
    ),
    ignored(
        "--disable-log-requests --disable-uvicorn-access-log --disable-access-log-for-endpoints=",
        "each request is logged when it ends, as one line at level info without its text",
    ),
    ignored("--log-config-file= --logging-config= --log-error-stack", "--log-level, and --set log_format=json"),
    ignored("--disable-log-stats --aggregate-engine-logging", "statistics are served at /metrics, not logged"),
    refused("--otlp-traces-endpoint=", "--set tracing.otlp_endpoint=http://HOST:4318/v1/traces"),
    ignored(
        "--collect-detailed-traces= --show-hidden-metrics-for-version= --kv-cache-metrics --kv-cache-metrics-sample= "
        "--cudagraph-metrics --enable-mfu-metrics --enable-logging-iteration-details --per-request-spec-decode-metrics "
        "--custom-histogram-buckets= --enable-mm-processor-stats",
        "/metrics has all metrics (docs/observability.md)",
    ),
    ignored(
        "--enable-layerwise-nvtx-tracing --profiler-config= --jit-monitor-mode= --jit-monitor-verbose",
        "use python -m benchmarks.step to measure a step",
    ),
    # chats
    ignored("--enable-auto-tool-choice", "tools are always enabled if the model's calls can be parsed"),
    ignored("--exclude-tools-when-tool-choice-none", "the model never sees tools that it must not call"),
    ignored("--enable-reasoning", "reasoning is always separated; see --reasoning-parser"),
    ignored("--guided-decoding-backend=", "structured outputs are always on"),
    ignored("--chat-template-content-format=", "templates get the form of content that they read"),
    refused("--reasoning-config=", "use --reasoning-parser to name the format of reasoning"),
    refused(
        "--tool-parser-plugin= --reasoning-parser-plugin= --logits-processors=* --logits-processor-pattern= "
        "--io-processor-plugin=",
        "the server has no plugins; see --tool-call-parser and --reasoning-parser",
    ),
    ignored("--tool-strict-level=auto", "only tools with `strict: true` are enforced"),
    refused("--tool-strict-level=", "only tools with `strict: true` are enforced, and calls that a request forces"),
    ignored("--anthropic-disabled-thinking-effort=auto", "the template decides how thinking is turned off"),
    refused("--anthropic-disabled-thinking-effort=", "use --default-chat-template-kwargs"),
    refused("--watermark-config=", "texts have no watermark"),
    refused("--tool-server=", "clients have to run tools themselves"),
    refused("--cohere-is-reasoning-model --cohere-format=", "the server has no Cohere API"),
    # the model
    ignored(
        "--trust-remote-code --code-revision=",
        "code from a model's folder is never run; `manta check MODEL` shows which code computes it",
    ),
    refused("--model-weights=", "give the folder of the weights as the model"),
    ignored("--model-impl=", "`manta check MODEL` shows which code computes a model"),
    refused("--model-class-overrides=", "`manta check MODEL` shows which code computes a model"),
    ignored("--runner= --convert= --task= --enable-flash-late-interaction", "the model's folder determines its task"),
    refused("--pooler-config= --override-pooler-config=", "the method of pooling is read from the model's folder"),
    ignored("--config-format=", "config.json is always read, in transformers' format"),
    ignored("--tokenizer-mode=auto|hf|slow|mistral", "tokenizer.json is read, or tokenizer.model"),
    refused("--tokenizer-mode=", "tokenizer.json is read, or tokenizer.model, and the folder's chat template"),
    ignored("--allow-deprecated-quantization", "the quantization is read from the model's folder"),
    refused(
        "--hf-config-path= --tokenizer-revision= --quantization-config= --kv-cache-dtype-skip-layers=* "
        "--calculate-kv-scales",
        "this is read from the model's folder",
    ),
    refused("--skip-tokenizer-init --enable-prompt-embeds", "prompts can only be text or token ids"),
    refused("--hf-token=", "set HF_TOKEN in the environment"),
    refused("--download-dir=", "set HF_HOME in the environment"),
    ignored(
        "--ignore-patterns=* --model-loader-extra-config= --safetensors-load-strategy= "
        "--safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= --use-tqdm-on-load "
        "--pt-load-map-location= --max-parallel-loading-workers=",
        "weights are read from safetensors; each rank reads its part",
    ),
    refused("--weight-transfer-config=", "weights are read from safetensors when an engine starts"),
    ignored("--seed=", "each request sets its own `seed`"),
    ignored("--max-logprobs=5|10|20", "the limit is always 20"),
    refused("--max-logprobs=", "the limit is always 20"),
    ignored("--logprobs-mode=raw_logprobs", "log-probabilities are those of the model, before temperature"),
    refused("--aux-output-config=", "answers have only tokens and log-probabilities"),
    refused(
        "--logprobs-mode= --return-sampling-mask --enable-return-routed-experts --use-fp64-gumbel "
        "--enable-trace-replay",
        "log-probabilities are those of the model, before temperature and penalties",
    ),
    ignored(
        "--enable-sleep-mode --enable-cumem-allocator --enable-nccl-comm-suspend --sleep-mode-offload-cudagraph "
        "--sleep-preserve-parameter-names=*",
        "--min-replicas 0 --max-replicas N releases the GPUs of an idle model",
    ),
    ignored("--lora-dtype=auto", "adapters have the model's data type"),
    refused("--lora-dtype=", "adapters have the model's data type"),
    ignored("--fully-sharded-loras", "adapters are split over ranks like the layers that they change"),
    ignored("--lora-target-modules=*", "an adapter may change any linear layer"),
    ignored("--specialize-active-lora", "a step computes only the adapters of its own requests"),
    refused(
        "--enable-tower-connector-lora --default-mm-loras= --enable-mixed-moe-lora-format --enable-moe-shared-loras "
        "--max-lora-cls-labels=",
        "adapters can change only linear layers of the language model (docs/lora.md)",
    ),
    # images
    same("--limit-mm-per-prompt=", "ingress.images.max_per_request={}"),
    same("--allowed-media-domains=*", "ingress.images.allowed_media_domains={}"),
    ignored(
        "--mm-processor-cache-gb= --mm-processor-cache-type= --mm-hasher-algorithm= --mm-shm-cache-max-object-size-mb= "
        "--mm-encoder-tp-mode= --mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= "
        "--mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= --skip-mm-profiling --mm-tensor-ipc= "
        "--mm-processor-device= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize --renderer-num-workers= "
        "--disable-chunked-mm-input --enable-mm-processor-cache --disable-mm-preprocessor-cache "
        "--enable-shm-tensor-arena",
        "see ingress.images and --encoder-cache-size, which limit images and their cache (docs/images.md)",
    ),
    ignored("--allowed-local-media-path=", "images come in the request or from a URL, never from the server's files"),
    refused(
        "--enable-mm-embeds --media-io-kwargs= --mm-processor-kwargs= --mm-encoder-only --interleave-mm-strings "
        "--video-pruning-rate= --video-pruning-method= --ec-transfer-config= --ec-manager-config= --diffusion-config= "
        "-dc=",
        "models take only text and images, processed by the settings in the model's folder and in ingress.images",
    ),
    ignored(
        "--mamba-backend= --mamba-ssu-algorithm= --mamba-block-size= --mamba-cache-mode= --replayssm-buffer-len= "
        "--use-replayssm --gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= --mamba-config= "
        "--enable-mamba-shared-prefix-checkpoint --swa-bounded-replay --engram-config= "
        "--disable-hybrid-kv-cache-manager",
        "Manta chooses caches and kernels of hybrid models itself",
    ),
    refused(
        "--enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds= --mamba-cache-dtype= "
        "--mamba-ssm-cache-dtype=",
        "recurrent states always have the model's own data type",
    ),
    # ranks, nodes and replicas
    ignored(
        "--decode-context-parallel-size=1 -dcp=1 --prefill-context-parallel-size=1 -pcp=1",
        "1 is the only value; see --tensor-parallel-size and --pipeline-parallel-size",
    ),
    refused(
        "--decode-context-parallel-size= -dcp= --prefill-context-parallel-size= -pcp= "
        "--dcp-comm-backend= --dcp-q-replicate --dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size=",
        "the KV of a sequence is not split over ranks by its tokens: --tensor-parallel-size and "
        "--pipeline-parallel-size split a model",
    ),
    ignored(
        "--enable-ep-weight-filter --expert-placement-strategy=",
        "with --enable-expert-parallel, a rank reads only its own experts",
    ),
    ignored(
        "--enable-dbo --ubatch-size= --dbo-decode-token-threshold= --dbo-prefill-token-threshold= "
        "--enable-batch-sharded-sampling --enable-hc-sp",
        "all ranks compute each batch together",
    ),
    refused(
        "--headless --data-parallel-rank= -dpn= --data-parallel-start-rank= -dpr= --data-parallel-hybrid-lb -dph "
        "--data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm --node-rank= -r=",
        "start one server: --num-replicas N starts N replicas behind one address, and Ray places them on nodes",
    ),
    ignored(
        "--data-parallel-size-local= -dpl= --data-parallel-address= -dpa= --data-parallel-rpc-port= -dpp= "
        "--data-parallel-backend= -dpb= --data-parallel-supervisor-port= --dp-supervisor-probe-interval-s= "
        "--dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= --dp-sync-interval= "
        "--disable-nccl-for-dp-synchronization --distributed-executor-backend= --master-addr= --master-port= "
        "--nnodes= -n= --numa-bind --numa-bind-nodes=* --numa-bind-cpus=* --ray-workers-use-nsight --worker-use-ray "
        "--engine-use-ray --cpu-distributed-timeout-seconds=",
        "Ray places ranks and replicas on nodes; --address joins a cluster",
    ),
    refused(
        "--enable-elastic-ep --elastic-ep-max-dp-size=",
        "engines that share experts start and end together; replicas come and go (docs/rank_groups.md)",
    ),
    refused("--device-ids=*", "set CUDA_VISIBLE_DEVICES to limit the GPUs that Ray gives to ranks"),
    refused(
        "--worker-cls= --worker-extension-cls= --scheduler-cls=",
        "Manta has only one worker class and one scheduler class",
    ),
    ignored(
        "--enable-fault-tolerance --fault-tolerance-config=",
        "if a replica dies, another one always continues its requests",
    ),
    refused("--kv-transfer-config=", "--prefill-replicas N starts replicas that compute prompts for the others"),
    # KV cache and memory
    ignored(
        "--prefix-caching-hash-algo= --prefix-match-unit=",
        "the hash of a block is fixed (docs/routing.md)",
    ),
    ignored(
        "--swap-space= --preemption-mode= --cpu-offload-gb=0", "after preemption, KV is computed again, never swapped"
    ),
    ignored(
        "--kv-offloading-backend=native",
        "this is the only backend of --kv-offloading-size and --kv-offloading-disk-size",
    ),
    refused(
        "--kv-offloading-backend=",
        "use --kv-offloading-size and --kv-offloading-disk-size, which have only one backend",
    ),
    refused(
        "--cpu-offload-gb= --cpu-offload-params=* --offload-backend= --offload-group-size= --offload-num-in-group= "
        "--offload-prefetch-step= --offload-params=*",
        "weights always stay on the device; use --tensor-parallel-size or --quantization fp8 to make them fit",
    ),
    # scheduler and kernels
    ignored("--enable-chunked-prefill", "prompts are always computed in chunks; see --max-num-batched-tokens"),
    ignored(
        "--long-prefill-token-threshold-adaptive --max-num-scheduled-tokens= --prefill-schedule-interval=",
        "--max-prefill-step-s limits steps with prompts by time, and short prompts come before long ones "
        "(docs/scheduling.md)",
    ),
    ignored(
        "--scheduler-reserve-full-isl --watermark= --num-lookahead-slots= --num-scheduler-steps= "
        "--use-v2-block-manager",
        "Manta has only one scheduler; see --scheduling-policy",
    ),
    ignored("--stream-interval=", "every token is sent when it is generated; a slow client gets several at once"),
    ignored(
        "--compilation-config= -cc= --optimization-level= -O= --performance-mode= --cudagraph-capture-sizes=* "
        "--max-cudagraph-capture-size= --cuda-graph-sizes=* --max-seq-len-to-capture=",
        "use --torch-compile to compile, and --enforce-eager to turn off CUDA graphs",
    ),
    ignored(
        "--attention-backend= --attention-config= -ac= --kernel-config= --ir-op-priority= --enable-flashinfer-autotune "
        "--enable-bf16x3-router-gemm --moe-backend= --linear-backend= "
        "--sparse-indexer-topk-backend= --disable-cascade-attn --kv-sharing-fast-prefill",
        "Manta uses the fastest kernels that fit the device",
    ),
    refused("--disable-sliding-window", "a model trained with a sliding window needs it"),
    refused("--additional-config=", "it configures plugins of vLLM"),
    ignored("--fail-on-environ-validation", "Manta reads no environment variables of vLLM, except VLLM_API_KEY"),
)
SPECIAL = {  # flags handled by the command line itself
    "--model=": "give the model as the first argument, without a flag",
    "--config=": "the flags in the YAML file are read",
}
ALL2ALL = "--all2all-backend"
VALUES: dict[str, dict[str, str | None]] = {  # renamed values of flags with the same name; None drops the flag
    ALL2ALL: dict.fromkeys(
        (
            *("naive", "pplx", "deepep_high_throughput", "deepep_low_latency", "deepep_v2", "nixl_ep"),
            *("mori_high_throughput", "mori_low_latency", "flashinfer_all2allv", "flashinfer_nvlink_two_sided"),
            "flashinfer_nvlink_one_sided",
        )
    ),
    "--dtype": {"half": "float16", "float": "float32"},
    "--load-format": dict.fromkeys(
        ("safetensors", "gguf", "hf", "mistral", "fastsafetensors", "instanttensor", "runai_streamer"), "auto"
    ),
    "--log-level": {"trace": "debug", "critical": "error"},
    "--max-model-len": {"auto": None, "-1": None},  # the default is the model's own length, or what fits
    "--quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq", "gpt_oss_mxfp4": "mxfp4", "None": None},
}
RENAMED = {  # former names of fields of EngineConfig, which are refused with the new ones
    "tensor_parallel": "tensor_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
    "data_parallel": "data_parallel_size",
    "expert_parallel": "enable_expert_parallel",
    "speculative": "speculative_config",
    "num_blocks": "num_gpu_blocks_override",
    "overlap": "async_scheduling",
    "kv_cache_memory_gib": "kv_cache_memory_bytes",
}
SHORT_FLAGS = {"tensor_parallel_size": "-tp", "enable_expert_parallel": "-ep", "pipeline_parallel_size": "-pp"}
NOT_DRAFTED = ("draft_tensor_parallel_size", "disable_by_batch_size", "max_model_len")  # without effect on outputs
NOT_READ = {  # keys of objects that are left out, and why that is harmless
    "--kv-events-config": {"max_queue_size": "batches are sent at the end of each step, without a queue"},
    "--eplb-config": dict.fromkeys(
        ("use_async", "policy", "communicator", "log_balancedness_interval"),
        "experts always move in the background, over TCP",
    ),
    "--structured-outputs-config": {
        **dict.fromkeys(("backend", "disable_fallback"), "structured outputs are always on, by llguidance"),
        "disable_any_whitespace": "an answer has at most one blank, or a line break, between two tokens of JSON",
        "enable_in_reasoning": "reasoning comes before the structure",
        "reasoning_parser": "--reasoning-parser names the format of reasoning",
    },
}
NAMES = {name for row in TABLE for name, _ in row.named()}


def find(name: str, value: str | None = None) -> FlagRow | None:
    """Return the row for a flag with this value; None if there is none."""
    for row in TABLE:
        for known, values in row.named():
            if known == name and (values in (None, "", "*") or value in values.split("|")):
                return row
    return None


def takes(name: str) -> str:
    """Return how many values a flag in the table takes: "" for none, "1" or "*"."""
    values = next(values for row in TABLE for known, values in row.named() if known == name)
    return "" if values is None else "*" if values == "*" else "1"


def draft_options(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return vLLM's speculative_config as ours, and its keys that were left out, each with the reason why this is
    harmless."""
    options = dict(content)
    method = options.get("method")
    if isinstance(method, str) and method.endswith("_mtp"):  # older vLLM has one name per model family
        options["method"] = "mtp"
    if options.get("method") == "mtp":
        options.pop("model", None)  # the model's own layers
    left_out = [key for key in NOT_DRAFTED if options.pop(key, None) is not None]
    return options, dict.fromkeys(left_out, "drafts are made on the model's ranks, and become fewer under load")


def markdown() -> str:
    """Return the table of docs/vllm.md."""
    lines = ["| flags of `vllm serve` | here |", "| --- | --- |"]
    for row in TABLE:
        named = [f"{name}={values}" if values and values != "*" else name for name, values in row.named()]
        flags = " ".join(f"`{flag}`" for flag in named).replace("|", "\\|")
        value = "[A,B]" if row.flags.endswith("=*") else "N"
        ours = f"--set {row.note.format(value)}" if row.note.endswith("={}") else row.note
        what = {
            "other name": f"**same as** `{ours}`",
            "ignored": f"**ignored**: {row.note}",
            "refused": f"**not supported**: {row.note}",
        }
        lines.append(f"| {flags} | {what[row.effect]} |")
    return "\n".join([*lines, *(f"| `{name.rstrip('=')}` | {what} |" for name, what in SPECIAL.items())])


if __name__ == "__main__":
    print(markdown())
