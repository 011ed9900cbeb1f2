"""Engines of well-known shapes with random weights on a GPU, whose steps are timed as they follow each other."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from cluster.cli.bench.prompts import FIRST_ID
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.model.transformers_backend.example_image import example_image
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import MM_HASH_BYTES, PromptImages
from engine.wire.sampling_params import SamplingParams

RESERVED = 500  # ids at the end of a vocabulary, some of which stand for images

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "head_dim": 128,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "num_key_value_heads": 8, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {  # Llama 3.1 8B
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "70B": {  # Llama 3.3 70B
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "0.6B": {  # Qwen3 0.6B
        **QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen3 8B": {
        **QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "gpt-oss 20B": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "rope_theta": 150000.0, "rms_norm_eps": 1e-5, "attention_bias": True, "hidden_act": "silu",
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    },
    "Qwen3-Next 80B-A3B": {
        **QWEN, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
        "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25, "max_position_embeddings": 262144, "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-VL 7B": {
        **QWEN, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
        "tie_word_embeddings": False, "image_token_id": 151655,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        },
    },
    "DeepSeek V2 Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "max_position_embeddings": 32768, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "attention_bias": False,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "30B-A3B": {  # Qwen3 30B A3B
        **QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
}  # fmt: skip


# yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
SHAPES["EAGLE-3 for 8B"] = {
    **SHAPES["8B"], "num_hidden_layers": 1, "draft_vocab_size": 32000, "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
}  # fmt: skip
# a part of the layers, which fits one GPU
SHAPES["Qwen3-Next, 8 layers"] = {**SHAPES["Qwen3-Next 80B-A3B"], "num_hidden_layers": 8}


def shape_config(shape: str, quantization: str | None = None, **changes: Any) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape, Path(folder), **changes)
        return ModelConfig.from_folder(Path(folder), quantization)


def write_shape(shape: str, folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], **changes}), encoding="utf-8")


class Decoding:
    """An engine with random weights, whose steps are timed as they follow each other in practice: with overlap, so that
    the host works beside the card."""

    def __init__(self, shape: str, **options: Any):
        with tempfile.TemporaryDirectory() as folder:
            write_shape(shape, Path(folder))
            options = {"load_format": "dummy", "allow_untested_kernels": True, **options}
            self.core = build_engine(EngineConfig(model=folder, device="cuda", **options))
        self.config: ModelConfig = self.core.model_config
        self.waited_s = 0.0
        self.steps = 0
        self.step_ends: list[float] = []
        collect = self.core.ranks.runner.collect

        def timed(launched: Any) -> Any:
            started = time.perf_counter()
            launched.event.wait()
            self.step_ends.append(time.perf_counter())
            self.waited_s += self.step_ends[-1] - started
            self.steps += 1
            return collect(launched)

        self.core.ranks.runner.collect = timed  # type: ignore[method-assign]

    def add(self, name: str, prompt_len: int, max_tokens: int, image_embeds: int = 0, **sampling: Any) -> None:
        """image_embeds: size of a black image before the prompt's text."""
        rng = random.Random(name)
        prompt = [rng.randrange(FIRST_ID, self.config.vocab_size - RESERVED) for _ in range(prompt_len)]
        images = []
        if image_embeds:
            assert self.config.vision is not None
            image = example_image(self.config.vision, image_embeds)
            # with its own hash, so that each is encoded
            images.append(msgspec.structs.replace(image, mm_hash=name.encode().ljust(MM_HASH_BYTES)[:MM_HASH_BYTES]))
            prompt = [self.config.vision.image_token_id] * image.num_embeds + prompt
        settings = {"temperature": 0.0, "ignore_eos": True, "seed": rng.randrange(2**31), **sampling}
        params = SamplingParams(max_tokens=max_tokens, **settings)
        self.core.add(GenerateRequest(request_id=name, prompt=prompt, params=params).asking(PromptImages.of(images)))

    def until(self, done: Callable[[], bool]) -> None:
        while self.core.has_work and not done():
            self.core.step()

    def lengths(self) -> list[int]:
        return [len(request.tokens) for request in self.core.scheduler.queue.running]

    def end(self) -> None:
        self.core.close()
        del self.core
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def engine(shape: str, **options: Any) -> Iterator[Decoding]:
    decoding = Decoding(shape, **options)
    try:
        yield decoding
    finally:
        decoding.end()
