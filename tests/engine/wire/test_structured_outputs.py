"""Answers of a given form, by a model that knows words and by one that knows nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.errors import InvalidParameter
from engine.offline.outputs import CompletionOutput
from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import encoded
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.structured_outputs import MAX_CHARS, MAX_GBNF_CHARS, StructuredOutputsParams
from tests.deltas import deltas_of
from tests.examples import examples
from tests.models import EOS, make_model
from tests.rank_pool import RankPool

OPTIONS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 128, "num_threads": 1}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_PROMPT = 'The same as JSON: {"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random weights: every allowed token is about as likely as any other."""
    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(folder) -> Iterator[LLM]:
    with LLM(folder, num_gpu_blocks_override=8000, async_scheduling=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def overlapping_llm(folder) -> Iterator[LLM]:
    with LLM(folder, num_gpu_blocks_override=8000, async_scheduling=True, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def pocket() -> Iterator[LLM]:
    with LLM("pocket", num_gpu_blocks_override=8000, **OPTIONS) as llm:
        yield llm


def structured(**form: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**form)


def answer(
    llm: LLM, *, prompt: str = JSON_PROMPT, params: dict[str, Any] | None = None, **form: Any
) -> CompletionOutput:
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": None, **(params or {})}
    (result,) = llm.generate(prompt, SamplingParams(**fields, structured_outputs=structured(**form)), use_tqdm=False)
    return result.outputs[0]


# -- what is allowed, and nothing else -------------------------------------------------------------------------

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text('abé😀"\\\n/', max_size=4))
NAMES = st.text('abkéñ _"', min_size=1, max_size=5)


@st.composite
def bounded_integers(draw) -> dict[str, Any]:
    low = draw(st.integers(-1000, 1000))
    return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 500))}


@st.composite
def bounded_strings(draw) -> dict[str, Any]:
    least = draw(st.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 5))}


@st.composite
def objects(draw, children) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, children, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@st.composite
def arrays(draw, children) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    return {"type": "array", "items": draw(children), "minItems": least, "maxItems": least + draw(st.integers(0, 2))}


LEAVES = st.one_of(
    bounded_integers(),
    bounded_strings(),
    st.sampled_from([
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "ipv4"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
        {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
    ]),
    SCALARS.map(lambda value: {"const": value}),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        objects(children),
        arrays(children),
        st.lists(children, min_size=1, max_size=3).map(lambda any_: {"anyOf": any_}),
    ),
    max_leaves=6,
)
ATOMS = st.one_of(
    st.text("abz -é😀", min_size=1, max_size=4).map(re.escape),
    st.sampled_from(["[a-f]", "[^\\n]", "[0-9]", "\\.", "[à-ü]", "(?:one|two|three)"]),
)
REGEXES = st.recursive(
    ATOMS,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.tuples(parts, st.integers(0, 2), st.integers(0, 3)).map(lambda t: f"(?:{t[0]}){{{t[1]},{t[1] + t[2]}}}"),
        st.lists(parts, min_size=2, max_size=3).map(lambda alternatives: f"(?:{'|'.join(alternatives)})"),
        parts.map(lambda part: f"(?:{part})?"),
    ),
    max_leaves=6,
)
FORMS = st.one_of(
    SCHEMAS.map(lambda schema: {"json": schema}),
    SCHEMAS.map(lambda schema: {"json": json.dumps(schema)}),
    REGEXES.map(lambda regex: {"regex": regex}),
    st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5).map(lambda choice: {"choice": choice}),
)


def check(form: dict[str, Any], text: str) -> None:
    match form:
        case {"json": schema}:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
            validator.validate(json.loads(text))
        case {"regex": regex}:
            assert re.fullmatch(regex, text), (regex, text)
        case {"choice": choice}:
            assert text in choice


@pytest.mark.parametrize("name", ["llm", "overlapping_llm", "pocket"])
@settings(max_examples=examples(24), suppress_health_check=list(HealthCheck))
@given(forms=st.lists(FORMS, min_size=6, max_size=10), temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99))
def test_every_answer_has_its_form_whatever_it_is_batched_with(name, forms, temperature, seed, request):
    llm = request.getfixturevalue(name)
    common = {"temperature": temperature, "seed": seed}
    plain = SamplingParams(**common, max_tokens=20)
    params = [SamplingParams(**common, max_tokens=None, structured_outputs=structured(**form)) for form in forms]
    results = llm.generate([JSON_PROMPT] * (len(params) + 2), [plain, *params, plain], use_tqdm=False)
    for form, result in zip(forms, results[1:-1], strict=True):
        output = result.outputs[0]
        assert output.finish_reason == "stop", (form, output)
        check(form, output.text)
    (alone,) = llm.generate(JSON_PROMPT, plain, use_tqdm=False)
    assert results[0].outputs[0].token_ids == results[-1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_any_json_object_is_one(pocket):
    params = SamplingParams(n=8, seed=1, max_tokens=150, structured_outputs=structured(json_object=True))
    (result,) = pocket.generate(JSON_PROMPT, params, use_tqdm=False)
    ended = [json.loads(output.text) for output in result.outputs if output.finish_reason == "stop"]
    assert ended and all(isinstance(value, dict) for value in ended)


def test_a_text_that_can_go_on_for_ever_ends_at_its_limit(llm):
    output = answer(llm, regex="[a-z ]+", params={"max_tokens": 30, "min_tokens": 25})
    assert output.finish_reason == "length" or len(output.token_ids) >= 25
    assert re.fullmatch("[a-z ]+", output.text)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= item ("," item){2}\nitem ::= "x" [0-9]{2} | "(" root ")"',
        'start: item ("," item){2}\nitem: "x" /[0-9]{2}/ | "(" start ")"',
    ],
    ids=["gbnf", "lark"],
)
def test_a_grammar_in_either_dialect(llm, grammar):
    often = {llm.tokenizer.encode("x")[0]: 1.5}  # or there would be more and more brackets
    sampling = SamplingParams(
        n=8, seed=0, logit_bias=often, max_tokens=None, structured_outputs=structured(grammar=grammar)
    )
    (result,) = llm.generate(JSON_PROMPT, sampling, use_tqdm=False)
    texts = [output.text for output in result.outputs]
    assert any(text.count("(") > 2 for text in texts)
    innermost = re.compile(r"\((?:x\d\d|y),(?:x\d\d|y),(?:x\d\d|y)\)")
    for text in texts:
        while innermost.search(text):
            text = innermost.sub("y", text)
        assert re.fullmatch(r"(?:x\d\d|y),(?:x\d\d|y),(?:x\d\d|y)", text)


def test_a_model_may_not_put_blanks_for_ever(llm):
    blank = llm.tokenizer.encode(" ")[0]
    params = {"logit_bias": {blank: 100.0}, "temperature": 0.0}
    assert json.loads(answer(llm, json=PERSON, params=params).text)["age"] <= 130


def test_the_end_is_reached_without_a_token_for_it(llm):
    """The whole text is in the answer, its last token too, and nothing was computed after it."""
    output = answer(llm, choice=["yes", "no"])
    assert (output.text in ("yes", "no"), output.finish_reason, output.stop_reason) == (True, "stop", None)
    assert llm.tokenizer.decode(output.token_ids) == output.text and EOS not in output.token_ids


def test_a_text_that_may_end_ends_with_the_models_own_end(llm):
    params = {"logit_bias": {EOS: 100.0}, "temperature": 0.0}
    output = answer(llm, regex="(abc)+", params=params)
    assert (output.text, output.token_ids[-1]) == ("abc", EOS)
    output = answer(llm, regex="(abc)+", params={**params, "min_tokens": 8})
    assert re.fullmatch("(abc){2,}", output.text)


def test_n_answers_all_have_the_form(llm):
    params = SamplingParams(n=5, max_tokens=None, seed=1, structured_outputs=structured(json=PERSON))
    (result,) = llm.generate(JSON_PROMPT, params, use_tqdm=False)
    texts = [output.text for output in result.outputs]
    for text in texts:
        check({"json": PERSON}, text)
    assert len(set(texts)) == 5


@pytest.mark.parametrize("name", ["llm", "overlapping_llm"])
def test_reasoning_ends_after_its_budget_or_the_character_that_it_is_in_and_the_form_follows(name, request):
    llm: LLM = request.getfixturevalue(name)
    tag = llm.tokenizer.encode("<|im_start|>", add_special_tokens=False)[0]
    form = structured(grammar=f"start: TEXT <[{tag}]> ANSWER\nTEXT: /(?s:.*)/\nANSWER: /[a-z]{{3}}/")
    params = [
        SamplingParams(seed=seed, max_tokens=40, structured_outputs=form, extra_args=encoded(ThinkingBudget(5, tag)))
        for seed in range(24)
    ]
    outputs = [result.outputs[0] for result in llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)]
    ends = {output.token_ids.index(tag) for output in outputs}
    assert 5 in ends and 5 < max(ends) <= 8, "some are inside a character"
    for output in outputs:
        assert output.finish_reason == "stop" and re.fullmatch("[a-z]{3}", output.text[-3:])


def test_logprobs_are_the_models_own_before_the_grammar(llm):
    free = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    bound = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, structured_outputs=structured(regex="[0-9]+"))
    results = llm.generate([JSON_PROMPT] * 2, [free, bound], use_tqdm=False)
    (free_entry,), (entry,) = (result.outputs[0].logprobs for result in results)
    (token_id,) = results[1].outputs[0].token_ids
    own = entry.pop(token_id)
    assert entry == free_entry
    assert llm.tokenizer.token_text(token_id).isdigit() and own.rank > 1


# -- with the other parts of the engine ------------------------------------------------------------------------


def mixed() -> list[SamplingParams]:
    forms = [{"json": PERSON}, {"regex": "(?:ab|c){5,9}"}, {"choice": ["one", "two and three"]}, None]
    return [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=None if form else 30,
            structured_outputs=structured(**form) if form else None,
        )
        for i, form in enumerate(forms * 3)
        for temperature in (0.0, 1.0)
    ]


def tokens_of(llm: LLM) -> list[list[int]]:
    params = mixed()
    prompts = [[5 + i, 6, 7] * 3 for i in range(len(params))]
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]


def test_overlap_changes_nothing(llm, overlapping_llm):
    assert tokens_of(llm) == tokens_of(overlapping_llm)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_preemption_changes_nothing(llm, folder, overlap):
    with LLM(folder, num_gpu_blocks_override=40, max_model_len=160, async_scheduling=overlap, **OPTIONS) as small:
        tokens = tokens_of(small)
        assert small.stats().preemptions > 0
    assert tokens == tokens_of(llm)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def run(core: EngineCore, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    for delta in deltas_of(core):
        outputs[delta.request_id] += delta.token_ids
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_two_ranks_give_the_same_as_one(folder, ranks, llm, overlap):
    requests = [
        GenerateRequest(request_id=str(i), prompt=[5 + i, 6, 7] * 3, params=params) for i, params in enumerate(mixed())
    ]
    config = {"model": str(folder), "num_gpu_blocks_override": 2000, "async_scheduling": overlap, **OPTIONS}
    with ranks.engine(EngineConfig(**config, tensor_parallel_size=2)) as core:
        assert list(run(core, requests).values()) == tokens_of(llm)


def test_an_answer_goes_on_where_another_replica_stopped(llm):
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=None, structured_outputs=structured(json=PERSON))
    prompt = llm.tokenizer.encode(JSON_PROMPT)
    (whole,) = run(llm._core, [GenerateRequest(request_id="whole", prompt=prompt, params=params)]).values()
    assert len(whole) > 8
    replays = [
        GenerateRequest(request_id=str(k), prompt=prompt + whole[:k], num_prompt=len(prompt), params=params)
        for k in range(1, len(whole))
    ]
    for k, rest in run(llm._core, replays).items():
        assert whole[: int(k)] + rest == whole


@pytest.mark.parametrize("configured", [None, {"disable_additional_properties": False}], ids=["closed", "open"])
@pytest.mark.parametrize("asked", [None, True, False])
def test_objects_are_closed_unless_the_request_or_the_configuration_says_otherwise(folder, configured, asked):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "maxProperties": 2}
    form = StructuredOutputsParams(json=schema, disable_additional_properties=asked)
    options = {**OPTIONS, "num_gpu_blocks_override": 400, "structured_outputs_config": configured}
    with LLM(folder, **options) as llm:
        params = [SamplingParams(seed=seed, max_tokens=80, structured_outputs=form) for seed in range(12)]
        texts = [result.outputs[0].text for result in llm.generate([[5, 6, 7]] * 12, params, use_tqdm=False)]
    closed = configured is None if asked is None else asked
    assert all(re.fullmatch(r'\{\s*"a"\s*:\s*1\s*}', text) for text in texts) == closed


# -- what cannot be done ---------------------------------------------------------------------------------------

HOPELESS = [
    (
        {"json": {"type": "text"}},
        "structured_outputs.json must be a JSON schema that .*#/type must be one or several of",
    ),
    ({"json": {"not": {"minLength": 3}}}, "enforced .*not"),
    ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "enforced .*minLength .3. is greater"),
    ({"json": {"$ref": "https://example.org/schema"}}, "enforced .*example.org"),
    ({"regex": "(ab"}, "structured_outputs.regex must be a regular expression in Rust's syntax .*unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"grammar": "root = nothing"}, "structured_outputs.grammar must be a grammar .*Expected NAME ::="),
    ({"grammar": "start: missing"}, "unknown name"),
]


@pytest.mark.parametrize(("form", "message"), HOPELESS)
def test_what_cannot_be_compiled_is_refused_with_the_reason(llm, form, message):
    with pytest.raises(InvalidParameter, match=message):
        answer(llm, **form)


def test_what_cannot_be_compiled_ends_no_other_request(llm):
    params = [
        SamplingParams(max_tokens=None, structured_outputs=structured(regex="[abc]{4}")),
        *(SamplingParams(structured_outputs=structured(**form)) for form, _ in HOPELESS),
        SamplingParams(max_tokens=20),
    ]
    jobs = [(llm.request(JSON_PROMPT, p), p) for p in params]
    results = {request.request_id: request for request in llm.run(jobs, use_tqdm=False)}
    first, *hopeless, last = (results[request.request_id].outputs[0] for request, _ in jobs)
    assert re.fullmatch("[abc]{4}", first.text) and last.finish_reason in ("stop", "length")
    for output, (_, message) in zip(hopeless, HOPELESS, strict=True):
        assert output.finish_reason == "error" and re.search(message, output.error)


def test_a_grammar_that_other_parameters_contradict_ends_its_own_request(llm):
    digit = llm.tokenizer.encode("7")[0]
    bad = SamplingParams(allowed_token_ids=[digit], structured_outputs=structured(regex="[a-z]+"))
    good = SamplingParams(allowed_token_ids=[digit], max_tokens=5, structured_outputs=structured(regex="[0-9a-z]+"))
    jobs = [(llm.request(JSON_PROMPT, p), p) for p in (bad, good)]
    results = {request.request_id: request for request in llm.run(jobs, use_tqdm=False)}
    failed, fine = (results[request.request_id].outputs[0] for request, _ in jobs)
    assert failed.finish_reason == "error" and "all tokens are banned" in failed.error
    assert (fine.text, fine.finish_reason) == ("77777", "length")


def test_a_model_without_a_tokenizer_refuses_grammars_and_serves_the_rest(tmp_path):
    core = build_engine(
        EngineConfig(model=str(make_model(tmp_path, "llama")), num_gpu_blocks_override=64, num_threads=1)
    )
    bound = SamplingParams(structured_outputs=structured(regex="a"))
    with pytest.raises(InvalidParameter, match="must be left out: this model's tokenizer cannot be used for it"):
        core.check(GenerateRequest(request_id="a", prompt=[1], params=bound))
    assert (
        len(run(core, [GenerateRequest(request_id="b", prompt=[1], params=SamplingParams(ignore_eos=True))])["b"]) == 16
    )
    core.close()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "structured_outputs must be an object with exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"json_object": False}, "exactly one of"),
        ({"choice": []}, "structured_outputs.choice must be a list of at least one text"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"json": "{"}, "structured_outputs.json must be valid JSON"),
        ({"json": "[1]"}, "structured_outputs.json must be a JSON object"),
        ({"json": {"const": object()}}, "structured_outputs.json must be valid JSON"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"at most {MAX_CHARS} characters"),
        ({"grammar": "a" * (MAX_GBNF_CHARS + 1)}, f"at most {MAX_GBNF_CHARS} characters"),
        ({"json": {"enum": ["a" * MAX_CHARS]}}, f"at most {MAX_CHARS} characters"),
        ({"json": {"maximum": 10**20}}, "integers have at most 64 bits"),
        ({"json": "[" * 50_000}, "structured_outputs.json must be valid JSON"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_at_once(form, message):
    with pytest.raises(InvalidParameter, match=message):
        structured(**form)
