"""What an image costs: the time to the first token of the first question about it, of later ones, and of text alone.

Ten questions about each image; `later` ones find its KV, and those behind other text only its embeddings. A question
begins with the file of a JPEG: the time before the engine is that of decoding it, of the model's image processor and of
the tokenizer. Texts of as many tokens as a question has go to the same model and to another engine that has its
weights without the vision tower, in turns.
"""

from __future__ import annotations

import io
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import tokenizers
import torch
import typer
from PIL import Image

from benchmarks.command import DtypeOption, JsonOption, print_report, run
from cluster.cli.bench.prompts import random_ids
from cluster.terminal.tables import figure, make_table, show
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from engine.multimodal.image import decode
from engine.offline.llm import LLM
from engine.offline.outputs import RequestOutput
from engine.wire.parts.images import ImageStats
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.engine_stats import EngineStats

QUESTIONS = 10  # about each image
OTHERS = 3  # questions behind other text, and texts without images, beside each image
KINDS = FIRST, LATER, BEHIND, TEXT, TEXT_ALONE = (
    "first question", "later", "behind other text", "only text", "only text, no tower",
)  # fmt: skip
SETTLE_S = 0.05  # before each request: the threads of another engine go to sleep
VOCABULARY = 151936
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12,
        "out_hidden_size": 1024, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [3, 6, 9], "hidden_act": "gelu_pytorch_tanh",
    },
}  # fmt: skip
"""0.44 B parameters in the shape of Qwen3-VL, 0.1 B of them in the vision tower."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one request."""

    first_ms: float  #: until its first token
    before_ms: float  #: of these, before the engine had it
    token_ms: float  #: of each further token
    cached_tokens: int  #: of its prompt, from the prefix cache


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one kind of requests."""

    kind: str
    count: int
    first_ms: float
    before_ms: float
    token_ms: float
    cached_tokens: float

    @classmethod
    def of(cls, kind: str, found: list[Timing]) -> Row:
        def middle(name: str) -> float:
            return median(getattr(timing, name) for timing in found)

        return cls(
            kind, len(found), middle("first_ms"), middle("before_ms"), middle("token_ms"), middle("cached_tokens")
        )


@dataclass(frozen=True, slots=True)
class ImagesReport:
    model: str
    dtype: str
    threads: int
    side: int  #: of the square images, in pixels
    prompt_tokens: int  #: of the first question
    image_tokens: int  #: of these, embeddings of the image
    images: int
    rows: list[Row]
    first_ratio: float  #: of texts, with the vision tower to without: median of pairs in turn
    token_ratio: float


def make_model(folder: Path) -> str:
    """Write all that QWEN3_VL needs but its weights."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bytes_only = tokenizers.models.BPE({letter: i for i, letter in enumerate(sorted(alphabet))}, [])
    tokenizer = tokenizers.Tokenizer(bytes_only)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**QWEN3_VL, "image_token_id": tokenizer.token_to_id("<|image_pad|>")}
    files = {"config": config, "tokenizer_config": {"chat_template": TEMPLATE}, "preprocessor_config": PROCESSOR}
    for name, fields in files.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return str(folder)


def picture(side: int, seed: int) -> bytes:
    """Return a JPEG that compresses as a photo does: coarse shapes, with some noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC))
    noisy = smooth + rng.normal(0, 8, smooth.shape)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def measure(
    model: str | None, *, images: int = 5, side: int = 512, output_len: int = 16, **options: Any
) -> ImagesReport:
    """model: None for QWEN3_VL with random weights. options: fields of EngineConfig."""
    with tempfile.TemporaryDirectory() as made:
        folder = str(resolve(model)) if model else make_model(Path(made))
        options = {"num_gpu_blocks_override": 512, "load_format": "auto" if model else "dummy", **options}
        with LLM(folder, **options) as sees, LLM(folder, language_model_only=True, **options) as reads:
            questioner = Questioner(sees, reads, side, output_len, ModelConfig.from_folder(Path(folder)).vocab_size)
            questioner.ask_about(0)  # warms up
            rounds = [questioner.ask_about(number) for number in range(1, images + 1)]
        dtype = sees.config.dtype
    found = {kind: [timing for timings in rounds for timing in timings[kind]] for kind in rounds[0]}
    pairs = list(zip(found[TEXT], found[TEXT_ALONE], strict=True))
    return ImagesReport(
        model=Path(model).name if model else "random weights",
        dtype=dtype,
        threads=torch.get_num_threads(),
        side=side,
        prompt_tokens=questioner.prompt_tokens,
        image_tokens=questioner.image_tokens,
        images=images,
        rows=[Row.of(kind, timings) for kind, timings in found.items()],
        first_ratio=median(sees.first_ms / reads.first_ms for sees, reads in pairs),
        token_ratio=median(sees.token_ms / reads.token_ms for sees, reads in pairs),
    )


def encoded_images(stats: EngineStats) -> int:
    found = stats.record(ImageStats)
    return 0 if found is None else found.encoded


class Questioner:
    """Asks two engines with the same weights, of which the second has no vision tower."""

    def __init__(self, sees: LLM, reads: LLM, side: int, output_len: int, vocab_size: int):
        self._sees, self._reads, self._side, self._vocab_size = sees, reads, side, vocab_size
        self._params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
        self._rng = random.Random(0)
        self.prompt_tokens = self.image_tokens = 0

    def ask_about(self, seed: int) -> dict[str, list[Timing]]:
        """Return the timings of all requests about one new image, by their kind."""
        file, before = picture(self._side, seed), encoded_images(self._sees.stats())
        first, *later = [self._question(file, f"What is in part {i} of it?") for i in range(QUESTIONS)]
        behind = [self._question(file, "What is it?", self._rng.randbytes(8).hex()) for _ in range(OTHERS)]
        encoded = encoded_images(self._sees.stats()) - before
        if encoded != 1:
            raise SystemExit(f"an image was encoded {encoded} times for {QUESTIONS + OTHERS} questions about it")
        texts: dict[LLM, list[Timing]] = {self._sees: [], self._reads: []}
        for number in range(OTHERS):
            ids = random_ids(self._rng, self.prompt_tokens, self._vocab_size)
            for llm in list(texts)[:: 1 if (seed + number) % 2 else -1]:  # each goes first in half of the pairs
                texts[llm].append(self._timed(partial(llm.generate, ids, self._params, use_tqdm=False)))
        found = ([first], later, behind, texts[self._sees], texts[self._reads])
        return dict(zip(KINDS, found, strict=True))

    def _question(self, file: bytes, question: str, before: str = "") -> Timing:
        def chat() -> list[RequestOutput]:
            image = {"type": "image", "image": decode(file, "image", self._side**2)}
            content = [{"type": "text", "text": before}, image, {"type": "text", "text": question}]
            return self._sees.chat([{"role": "user", "content": content}], self._params, use_tqdm=False)

        return self._timed(chat)

    def _timed(self, ask: Callable[[], list[RequestOutput]]) -> Timing:
        time.sleep(SETTLE_S)
        started = time.perf_counter()
        (request,) = ask()
        elapsed = time.perf_counter() - started
        (answer,) = request.outputs
        if answer.times is None or answer.finish_reason != "length":
            raise SystemExit(f"a request has ended as {answer.finish_reason}: {answer.error}")
        if request.mm_features and not self.prompt_tokens:
            self.prompt_tokens, self.image_tokens = len(request.prompt_token_ids), request.mm_features[0].num_embeds
        decoding = answer.times.finished_s - answer.times.first_token_s
        return Timing(
            first_ms=1e3 * (elapsed - decoding),
            before_ms=1e3 * (elapsed - answer.times.finished_s),
            token_ms=1e3 * decoding / (len(answer.token_ids) - 1),
            cached_tokens=request.num_cached_tokens,
        )


def show_report(report: ImagesReport) -> None:
    table = make_table("", "count", "cached tokens", "first token, ms", "before the engine", "per token")
    for row in report.rows:
        figures = (row.first_ms, row.before_ms, row.token_ms)
        table.add_row(row.kind, f"{row.count}", figure(row.cached_tokens, 0), *(figure(value) for value in figures))
    show(
        f"{report.model}, {report.dtype}, {report.threads} threads; {report.images} images of {report.side} x "
        f"{report.side} pixels, {report.image_tokens} of {report.prompt_tokens} tokens of a prompt; medians",
        table,
        f"each image was encoded once, for {QUESTIONS + OTHERS} questions",
        f"text with the vision tower / without: {report.first_ratio:.3f} to the first token, "
        f"{report.token_ratio:.3f} per token (medians of pairs)",
    )


def main(
    model: Annotated[str | None, typer.Option(help="Model folder or Hub id; default: random weights.")] = None,
    images: Annotated[int, typer.Option(min=1, help="After one that warms up.")] = 5,
    side: Annotated[int, typer.Option(min=64, help="Of the square images, in pixels.")] = 512,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 16,
    dtype: DtypeOption = "bfloat16",
    threads: Annotated[int, typer.Option(min=0, help="Threads of torch; 0: the engine's default.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure questions about images, and texts with a vision tower and without.

    Example: python -m benchmarks.images --model DIR/Qwen3-VL-2B-Instruct
    """
    options = {"dtype": dtype, "num_threads": threads or None}
    print_report(measure(model, images=images, side=side, output_len=output_len, **options), as_json, show_report)


if __name__ == "__main__":
    run(main)
