"""The whole engine against transformers: the same greedy tokens and log-probabilities, however the work is cut up."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from engine import pocket
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import TokenLogprob
from tests.deltas import deltas_of
from tests.models import FAMILIES, make_model

LENGTHS = (33, 1, 8, 50, 20)  # the windows of sliding-window models are 8
MAX_TOKENS = 20
TEXT = (
    "A harbor is a sheltered port where ships can take on or discharge cargo. What is an ocean? "
    "An island is a land mass that is surrounded by water, and a river is a large natural stream. "
)


class Reference:
    """transformers' answers for one model, each computed once."""

    def __init__(self, folder: Path, text: str | None = None):
        """text: what prompts are made of; None for random tokens."""
        self.folder = folder
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # every generation is as long as asked for
        self.context: int = self._model.config.max_position_embeddings
        self._text = None if text is None else ChatTokenizer.from_folder(folder).encode(text)
        self._outputs: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def prompt(self, length: int, seed: int) -> list[int]:
        if self._text is None:
            generator = torch.Generator().manual_seed(seed)
            return torch.randint(self._model.config.vocab_size, (length,), generator=generator).tolist()
        start = seed % len(self._text)
        return (self._text * (2 + length // len(self._text)))[start : start + length]

    @torch.inference_mode()
    def output(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
        key = (tuple(prompt), max_tokens)
        if key not in self._outputs:
            ids = torch.tensor([prompt])
            settings = {"max_new_tokens": max_tokens, "do_sample": False}
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            self._outputs[key] = out[0, len(prompt) :].tolist()
        return self._outputs[key]

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> Tensor:
        """[tokens, vocab]: row i is about the token after i."""
        return self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)


# What families differ in, their attention and their layers, meets what cuts work up in these. The others are about what
# comes before and after the model.
OF_EVERY_FAMILY = (
    "test_a_batch_of_different_lengths",
    "test_prompts_cut_into_chunks_that_mix_with_decodes",
    "test_prompts_whose_prefix_is_cached",
    "test_requests_that_are_preempted",
)
CUT = OF_EVERY_FAMILY[1:3]  # which ordinary runs try with a family of each kind
IN_EVERY_TEST = ("llama", "gemma2")  # the second caps its logits, of which log-probabilities are made
SCALED = (
    "llama_rope_scaled",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
)  # whose positions turn otherwise far into the context
SLOW = (
    "mistral",
    "qwen3",
    "gemma3n",
    "gemma4_moe",
    "gemma4_unified",
    "mixtral",
    "qwen2_moe",
    "phi3",
    "llama_tied",
    "llama_rope_scaled",
    "qwen2",
    "gemma4",
    "glm4_moe",
    "mimo_v2_flash",
    "gpt_oss",
    "deepseek_v2",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "longcat_flash",
    "minicpm3",
)
"""Others have the same attention; the logits of all are compared in models/test_parity.py."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test the families that it is for, each with one of the loops in turns; some have both."""
    names, loops = [*FAMILIES, "pocket"], [False, True] if "overlap" in metafunc.fixturenames else [True]
    test = metafunc.function.__name__
    meant = {*IN_EVERY_TEST, *(SCALED if test == "test_prompts_that_nearly_fill_the_context" else ())}
    params = []
    for (i, name), overlap in product(enumerate(names), loops):
        in_turn = len(loops) == 1 or (i + len(test)) % 2 == overlap
        if not (name in IN_EVERY_TEST or (in_turn and (name in meant or test in OF_EVERY_FAMILY))):
            continue
        quick = in_turn and name not in SLOW and (name in IN_EVERY_TEST or test in CUT)
        marks = [] if quick else [pytest.mark.slow]
        id_ = f"{name}-{'overlap' if overlap else 'plain'}" if len(loops) > 1 else name
        values = (name, overlap) if len(loops) > 1 else (name,)
        params.append(pytest.param(*values, marks=marks, id=id_))
    arguments = ["reference", "overlap"][: len(loops)]
    metafunc.parametrize(arguments, params, indirect=["reference"], scope="module")


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory) -> Reference:
    if request.param != "pocket":
        return Reference(make_model(tmp_path_factory.mktemp("model"), request.param))
    if not (pocket.PATH / "config.json").is_file():
        pytest.skip(f"the bundled model is not in {pocket.PATH.name}/ yet: python -m tools.pocket.train makes it")
    return Reference(pocket.PATH, TEXT)


class Run:
    """One engine, and everything that came out of it."""

    def __init__(self, reference: Reference, overlap: bool, **options):
        defaults = {"block_size": 4, "max_num_seqs": 8, "num_gpu_blocks_override": 128, "num_threads": 1}
        config = EngineConfig(
            **{"model": str(reference.folder), "dtype": "float32", "async_scheduling": overlap, **defaults, **options}
        )
        self.core = build_engine(config)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        self.cached: dict[str, int] = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_) -> None:
        self.core.close()

    def add(self, name: str, prompt: list[int], **params) -> None:
        settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **params}
        self.core.add(GenerateRequest(request_id=name, prompt=prompt, params=SamplingParams(**settings)))
        self.tokens[name], self.logprobs[name], self.cached[name] = [], [], 0

    def go(self) -> EngineStats:
        for delta in deltas_of(self.core):
            name = delta.request_id
            self.tokens[name] += delta.token_ids
            self.logprobs[name] += delta.logprobs or []
            self.cached[name] += delta.num_cached_tokens
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[name] = delta.prompt_logprobs
        stats = self.core.stats()
        assert stats.blocks_used == 0
        return stats


def test_requests_one_after_another(reference, overlap):
    with Run(reference, overlap, max_num_seqs=1) as run:
        prompts = {str(n): reference.prompt(n, seed=n) for n in LENGTHS}
        for name, prompt in prompts.items():
            run.add(name, prompt)
        run.go()
        assert run.tokens == {name: reference.output(prompt) for name, prompt in prompts.items()}
        assert len(set(run.tokens["33"])) > 2, "output that repeats one token would prove nothing"


def test_a_batch_of_different_lengths(reference, overlap):
    with Run(reference, overlap) as run:
        prompts = {str(n): reference.prompt(n, seed=n) for n in LENGTHS}
        for name, prompt in prompts.items():
            run.add(name, prompt)
        stats = run.go()
        assert run.tokens == {name: reference.output(prompt) for name, prompt in prompts.items()}
        assert stats.steps < MAX_TOKENS + 5, "they ran together"


def test_prompts_cut_into_chunks_that_mix_with_decodes(reference, overlap):
    with Run(reference, overlap, max_num_batched_tokens=7, max_num_seqs=3) as run:
        prompts = {str(n): reference.prompt(n, seed=n) for n in LENGTHS}
        for name, prompt in prompts.items():
            run.add(name, prompt)
        run.go()
        assert run.tokens == {name: reference.output(prompt) for name, prompt in prompts.items()}


def test_prompts_whose_prefix_is_cached(reference, overlap):
    first, other = reference.prompt(50, seed=50), reference.prompt(8, seed=8)
    with Run(reference, overlap, max_num_batched_tokens=16) as run:
        run.add("first", first)
        run.go()
        run.add("again", first)
        run.add("shares 40", first[:40] + other)
        run.add("is a part", first[:33])
        run.add("turns off at the first token", [*other, *first])
        run.go()
        turn = first + run.tokens["first"][:-2] + other
        run.add("next turn", turn)
        run.go()
        assert run.cached == {
            "first": 0,
            "again": 48,
            "shares 40": 40,
            "is a part": 32,
            "turns off at the first token": 0,
            "next turn": (50 + MAX_TOKENS - 2) // 4 * 4,
        }
        assert run.tokens["first"] == run.tokens["again"] == reference.output(first)
        assert run.tokens["shares 40"] == reference.output(first[:40] + other)
        assert run.tokens["is a part"] == reference.output(first[:33])
        assert run.tokens["turns off at the first token"] == reference.output([*other, *first])
        assert run.tokens["next turn"] == reference.output(turn)


def test_requests_that_are_preempted(reference, overlap):
    check_preempted(reference, overlap)


@pytest.mark.slow
def test_requests_that_are_preempted_without_a_prefix_cache(reference, overlap):
    check_preempted(reference, overlap, enable_prefix_caching=False)


def check_preempted(reference: Reference, overlap: bool, **options) -> None:
    with Run(reference, overlap, num_gpu_blocks_override=26, **options) as run:
        prompts = {str(n): reference.prompt(n, seed=n) for n in LENGTHS}
        for name, prompt in prompts.items():
            run.add(name, prompt)
        stats = run.go()
        whole = run.core.model_config.kv_groups[0].spec.window is None  # windows alone fit next to each other
        assert stats.preemptions > 0 or not whole
        assert run.tokens == {name: reference.output(prompt) for name, prompt in prompts.items()}


def test_prompts_that_nearly_fill_the_context(reference, overlap):
    context = reference.context
    options = {"max_num_batched_tokens": context // 3, "num_gpu_blocks_override": context // 4}
    with Run(reference, overlap, **options) as run:
        whole, almost = reference.prompt(context - 1, seed=1), reference.prompt(context - 5, seed=2)
        run.add("one token left", whole, max_tokens=None)
        run.add("five tokens left", almost, max_tokens=None)
        run.go()
        assert run.core.max_model_len == context
        assert run.tokens == {
            "one token left": reference.output(whole, 1),
            "five tokens left": reference.output(almost, 5),
        }


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}, {"num_gpu_blocks_override": 26}],
    ids=["whole prompts", "chunks", "preempted"],
)
def test_log_probabilities(reference, overlap, options):
    with Run(reference, overlap, **options) as run:
        prompts = {str(n): reference.prompt(n, seed=n) for n in LENGTHS}
        for name, prompt in prompts.items():
            run.add(name, prompt, logprobs=5, prompt_logprobs=3)
        stats = run.go()
        assert (stats.preemptions > 0) == ("num_gpu_blocks_override" in options)
        for name, prompt in prompts.items():
            assert run.tokens[name] == reference.output(prompt)
            tokens = prompt + run.tokens[name]
            rows = reference.logprobs(tokens)
            assert run.prompt_logprobs[name][0] is None
            assert len(run.prompt_logprobs[name]) == len(prompt)
            check_logprobs(run.prompt_logprobs[name][1:], tokens[1 : len(prompt)], rows[: len(prompt) - 1], 3)
            check_logprobs(run.logprobs[name], run.tokens[name], rows[len(prompt) - 1 : -1], 5)


def test_log_probabilities_of_a_prompt_longer_than_the_rows_held_at_a_time(reference):
    prompt = reference.prompt(300, seed=300)
    with Run(reference, overlap=True) as run:
        run.add("a", prompt, prompt_logprobs=0, max_tokens=1)
        run.go()
        check_logprobs(run.prompt_logprobs["a"][1:], prompt[1:], reference.logprobs(prompt)[:-1], 0)


def test_log_probabilities_of_a_prompt_whose_prefix_is_cached(reference, overlap):
    prompt = reference.prompt(50, seed=50)
    with Run(reference, overlap) as run:
        run.add("first", prompt)
        run.go()
        run.add("again", prompt, prompt_logprobs=2)
        run.go()
        assert run.tokens["again"] == reference.output(prompt)
        check_logprobs(run.prompt_logprobs["again"][1:], prompt[1:], reference.logprobs(prompt)[:-1], 2)


def check_logprobs(entries: list[TokenLogprob], tokens: list[int], rows: Tensor, count: int) -> None:
    """rows: [tokens, vocab] log-probabilities of the reference."""
    assert [entry.token_id for entry in entries] == tokens
    if not entries:
        return
    own = rows.gather(1, torch.tensor(tokens)[:, None])
    near = {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(torch.tensor([entry.logprob for entry in entries]), own[:, 0], **near)
    ranks = torch.tensor([entry.rank for entry in entries])
    assert (ranks > (rows > own + 1e-4).sum(-1)).all() and (ranks <= (rows > own - 1e-4).sum(-1)).all()
    assert all(len(entry.top) == count for entry in entries)
    if count:
        values = torch.tensor([[value for _, value in entry.top] for entry in entries])
        ids = torch.tensor([[token for token, _ in entry.top] for entry in entries])
        torch.testing.assert_close(values, rows.topk(count).values, **near)
        torch.testing.assert_close(values, rows.gather(1, ids), **near)
