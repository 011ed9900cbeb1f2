"""What tests compare with transformers, by architecture, read from the parameters of the tests themselves.

`python -m tests.compared` writes it to engine/model/families/compared.json, with the version of transformers, for
`manta models` and `manta check`. A test holds the file to the tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.cli.model_support import COMPARED
from tests.engine.model.models.test_parity import VARIANTS
from tests.models import FAMILIES, HYBRIDS
from tests.pooling_models import KINDS

MODEL = "tests.engine.model"
# What is compared, the module and the name of the test that does it.
TESTS = (
    ("logits", f"{MODEL}.models.test_parity", "test_logits_of_a_whole_prompt_equal_those_of_transformers"),
    (
        "logits", f"{MODEL}.models.test_hybrids",
        "test_logits_equal_those_of_transformers_whole_and_in_parts_beside_another",
    ),
    (
        "logits", f"{MODEL}.transformers_backend.test_parity",
        "test_logits_of_a_prompt_in_two_chunks_equal_those_of_transformers",
    ),
    (
        "greedy tokens", f"{MODEL}.models.test_parity",
        "test_greedy_tokens_of_mixed_chunked_sequences_equal_those_of_transformers",
    ),
    ("greedy tokens", f"{MODEL}.test_hybrid_engines", "test_tokens_are_those_of_transformers"),
    ("greedy tokens", f"{MODEL}.transformers_backend.test_parity", "test_greedy_tokens_equal_those_of_transformers"),
    ("chunks and batches", f"{MODEL}.test_parity", "test_prompts_cut_into_chunks_that_mix_with_decodes"),
    ("chunks and batches", f"{MODEL}.test_hybrid_engines", "test_tokens_are_those_of_transformers"),
    (
        "chunks and batches", f"{MODEL}.transformers_backend.test_parity",
        "test_greedy_tokens_equal_those_of_transformers",
    ),
    ("cached prefixes", f"{MODEL}.test_parity", "test_prompts_whose_prefix_is_cached"),
    ("cached prefixes", f"{MODEL}.test_hybrid_engines", "test_a_prompt_that_was_seen_goes_on_from_its_last_border"),
    ("cached prefixes", f"{MODEL}.transformers_backend.test_parity", "test_greedy_tokens_equal_those_of_transformers"),
    ("preemption", f"{MODEL}.test_parity", "test_requests_that_are_preempted"),
    ("preemption", f"{MODEL}.test_hybrid_engines", "test_tokens_are_those_of_transformers"),
    ("ranks", f"{MODEL}.models.test_tensor_parallel", "test_every_rank_has_the_logits_of_the_unsharded_model"),
    ("ranks", f"{MODEL}.models.test_hybrids", "test_both_of_two_ranks_have_the_logits_of_the_unsharded_model"),
    (
        "ranks", f"{MODEL}.transformers_backend.test_tensor_parallel",
        "test_every_rank_has_the_logits_of_the_unsharded_model",
    ),
    (
        "ranks", f"{MODEL}.transformers_backend.test_tensor_parallel",
        "test_every_rank_has_the_logits_of_the_unsharded_text_part",
    ),
    (
        "GGUF files", f"{MODEL}.checkpoint.gguf.test_families",
        "test_a_file_gives_the_tokens_that_transformers_gives_for_its_numbers",
    ),
    (
        "embeddings", "tests.engine.offline.test_pooling",
        "test_embeddings_are_those_of_transformers_alone_and_in_a_batch",
    ),
    (
        "vectors of tokens", "tests.engine.offline.test_pooling",
        "test_vectors_of_each_token_are_those_of_transformers_alone_and_in_a_batch",
    ),
    (
        "classes", "tests.engine.offline.test_pooling",
        "test_classes_of_a_text_are_those_of_transformers_alone_and_in_a_batch",
    ),
    (
        "classes of tokens", "tests.engine.offline.test_pooling",
        "test_classes_of_each_token_are_those_of_transformers_alone_and_in_a_batch",
    ),
    ("scores", "tests.engine.offline.test_pooling", "test_scores_of_a_reranker_are_those_of_transformers"),
)  # fmt: skip


def compared() -> dict[str, Any]:
    """Return the contents of the file."""
    found: dict[str, dict[str, None]] = {}
    for what, module, name in TESTS:
        for model in models_of(module, name):
            found.setdefault(architecture_of(model), {})[what] = None
    architectures = {name: list(found[name]) for name in sorted(found)}
    return {"transformers": version("transformers"), "architectures": architectures}


def models_of(module: str, name: str) -> Iterator[str]:
    """Yield the names of the models with which a test runs. Raises AttributeError if there is no such test."""
    test = getattr(import_module(module), name)
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    if not marks:  # pytest_generate_tests of tests/engine/model/test_parity.py gives it all of them
        assert name in import_module(module).OF_EVERY_FAMILY
        yield from FAMILIES
    for mark in marks:
        for values in mark.args[1]:
            values = getattr(values, "values", values)
            names = (values,) if isinstance(values, str) else values if isinstance(values, tuple | list) else ()
            yield from (one for one in names[:1] if isinstance(one, str))


def architecture_of(model: str) -> str:
    """Return the architecture of one of the tests' models, as config.json names it."""
    if model in VARIANTS:
        model = VARIANTS[model][0]
    if model in FAMILIES | HYBRIDS:
        return f"{(FAMILIES | HYBRIDS)[model][0]}ForCausalLM"
    if model in KINDS:
        return KINDS[model].model
    return model.split()[0]


def as_text(found: dict[str, Any]) -> str:
    """Return the file's text, with a line for each architecture."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(what)}" for name, what in found["architectures"].items())
    return f'{{"transformers": {json.dumps(found["transformers"])}, "architectures": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    Path(COMPARED).write_text(as_text(compared()))
