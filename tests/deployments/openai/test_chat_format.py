from __future__ import annotations

import pytest
from tokenizers import AddedToken

from deployments.openai.chat_body import ChatBody
from deployments.openai.formats.chat_format import ChatFormat
from engine.text.chat_tokenizer import ChatTokenizer
from tests.deployments.fake_api import fake_api
from tests.deployments.openai.chat_models import DEEPSEEK, LLAMA, QWEN, VOCAB_SIZE, chat_tokenizer, hf_tokenizer
from tests.models import CHAT_TEMPLATE

HERMES_WITHOUT_REASONING = QWEN.replace("</think>", "").replace("<think>", "")
QWEN_CODER = QWEN.replace('{"name": "', "<function=")  # the same tag, but XML inside
GRANITE = LLAMA.replace('{"name": "\' + call.name + \'", "parameters": \'', "<|tool_call|>' + call.name")
REFUSES = "{{ raise_exception('no') }}"

NAME, ARGUMENTS = "' + call.name + '", "' + (call.arguments | tojson) + '"
# a call, and perhaps reasoning, as the chat templates of each family write it
WRITTEN = [
    (f'[TOOL_CALLS] [{{"name": "{NAME}", "arguments": {ARGUMENTS}}}]', "mistral", "none"),
    (f"[THINK][/THINK][TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", "mistral", "mistral"),
    (f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\\n```json\\n{ARGUMENTS}\\n```", "deepseek_v3", "none"),
    (f"</think><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}", "deepseek_v31", "think"),
    (f'<｜DSML｜invoke name="{NAME}">\\n{ARGUMENTS}', "deepseek_v32", "none"),
    (f"<|tool_call_begin|>call:0<|tool_call_argument_begin|>{ARGUMENTS}{NAME}", "kimi_k2", "none"),
    (f"<tool_call>\\n<function={NAME}>{ARGUMENTS}", "qwen3_coder", "none"),
    (f"</seed:think><seed:tool_call>\\n<function={NAME}>{ARGUMENTS}", "seed_oss", "seed_oss"),
    (f"</think><tool_call>{NAME}\\n<arg_key>key</arg_key>{ARGUMENTS}", "glm45", "think"),
    (f'<minimax:tool_call>\\n<invoke name="{NAME}">{ARGUMENTS}', "minimax_m2", "none"),
    (f'<|tool_call|>[{{"name": "{NAME}", "arguments": {ARGUMENTS}}}]', "granite", "none"),
    (f"Use <|tool_call|> followed by a JSON list. Here is my thought process:{NAME}", "granite", "granite"),
    (f'functools[{{"name": "{NAME}", "arguments": {ARGUMENTS}}}]', "phi4_mini_json", "none"),
    (
        f'Write <think></think> and <response></response>.<|tool_call|>[{{"name": "{NAME}", {ARGUMENTS}',
        "granite",
        "granite",
    ),
    (f"<|channel>thought<|tool_call>call:{NAME}{{{ARGUMENTS}}}", "gemma4", "gemma4"),
    (f'[{NAME}(key="value")]{ARGUMENTS}', "pythonic", "none"),
    (f'<|tool_call_start|>[{NAME}(key="value")]{ARGUMENTS}', "lfm2", "none"),
    (f"<|channel|>commentary to=functions.{NAME} json<|message|>{ARGUMENTS}", "openai", "openai_gptoss"),
]


def written(call: str) -> str:
    """Return a chat template that writes calls so."""
    start, end = LLAMA.index('{{- \'{"name"'), LLAMA.index("    {%- else %}")
    return f"{LLAMA[:start]}{{{{- '{call}' }}}}\n{LLAMA[end:]}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, ChatFormat("hermes", "think", shows_tools=True)),
        (HERMES_WITHOUT_REASONING, ChatFormat("hermes", "none", shows_tools=True)),
        (QWEN_CODER, ChatFormat("none", "think", shows_tools=True)),
        (LLAMA, ChatFormat("llama3_json", "none", shows_tools=True)),
        (GRANITE, ChatFormat("none", "none", shows_tools=True)),
        *((written(call), ChatFormat(*expected, shows_tools=True)) for call, *expected in WRITTEN),
        (
            LLAMA.replace("call.arguments | tojson", "call.arguments"),
            ChatFormat("llama3_json", "none", shows_tools=True),
        ),
        (DEEPSEEK, ChatFormat("none", "think", shows_tools=False)),
        (CHAT_TEMPLATE, ChatFormat("none", "none", shows_tools=False)),
        (REFUSES, ChatFormat("none", "none", shows_tools=False)),
    ],
)
def test_format_is_taken_from_what_the_chat_template_writes(template, expected):
    assert ChatFormat.of(chat_tokenizer(template)) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<|tool_call_start|>"], "lfm2"),
        (["[TOOL_CALLS]"], "mistral"),
        (["<|tool_call_start|>", "[TOOL_CALLS]"], "none"),
        (["<|tool_call|>"], "none"),  # of Granite and of Phi
        ([], "none"),
    ],
)
def test_format_of_a_template_that_writes_no_calls_is_that_of_its_only_marker(tmp_path, tokens, expected):
    tokenizer = hf_tokenizer(LLAMA.replace("'tool_calls' in message", "false"), "text")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.save_pretrained(tmp_path)
    assert ChatFormat.of(ChatTokenizer.from_folder(tmp_path)) == ChatFormat(expected, "none", shows_tools=True)


@pytest.mark.parametrize("name", ["think", "qwen3", "deepseek_r1"])
def test_configuration_goes_before_the_chat_template(name):
    assert ChatFormat.of(chat_tokenizer(QWEN), "none", "none") == ChatFormat("none", "none", shows_tools=True)
    assert ChatFormat.of(chat_tokenizer(LLAMA), "hermes", name) == ChatFormat("hermes", name, shows_tools=True)


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        (QWEN, {}, "maybe"),
        (QWEN, {"chat_template_kwargs": {"enable_thinking": False}}, "never"),
        (DEEPSEEK, {}, "begun"),
        (LLAMA, {}, "never"),
        (QWEN, {"add_generation_prompt": False, "continue_final_message": True}, "never"),
    ],
)
def test_prompt_tells_whether_reasoning_comes_next(template, fields, expected):
    tokenizer = chat_tokenizer(template)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "<think>"}], **fields})
    if body.continue_final_message:
        body.messages[0].content = "<think>a</think>b"
    prompt = tokenizer.render_chat_template(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **body.chat_template_kwargs,
    )
    assert ChatFormat.of(tokenizer).thinking(body, prompt) == expected


def test_answer_that_is_continued_inside_of_its_reasoning_goes_on_reasoning():
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    body = ChatBody.model_validate({"messages": [{"role": "assistant", "content": "<think>\na"}], **fields})
    assert ChatFormat.of(chat_tokenizer(QWEN)).thinking(body, "<|im_start|>assistant\n<think>\na") == "begun"


async def test_reasoning_before_a_call_reaches_the_template_of_gpt_oss():
    template = (
        "{% for m in messages %}{{ m.role }}: {% for c in m.tool_calls or [] %}{{ m.thinking }}|{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% else %}{{ m.content }}{% endfor %};{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    called = {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]}
    messages = [{"role": "user", "content": "What?"}, called, {"role": "tool", "tool_call_id": "a", "content": "That."}]
    tokenizer = chat_tokenizer(template)
    expected = "user: What?;assistant: Hm.|look_up{};tool: That.;"
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == expected
    async with fake_api(text_model=tokenizer, vocab_size=VOCAB_SIZE) as api:
        for name in ("reasoning", "reasoning_content"):
            sent = {"role": "assistant", name: "Hm.", "tool_calls": [call]}
            await api.post("chat/completions", messages=[messages[0], sent, messages[2]], max_tokens=1)
            assert tokenizer.decode(api.engine.added[-1].prompt) == expected
