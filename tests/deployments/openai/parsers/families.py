"""Outputs as each family's documentation and chat template show them, with what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deployments.openai.formats.choice_parser import OutputFormat
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, OutputEvent, Reasoning

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "at": {"$ref": "#/$defs/point"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "$defs": {"point": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}


def weather(arguments: str, call_id: str | None = None) -> list[OutputEvent]:
    return [CallStart("get_weather", call_id), CallArguments(arguments)]


def now(call_id: str | None = None) -> list[OutputEvent]:
    return [CallStart("now", call_id), CallArguments("{}")]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Two calls in one output, the second without arguments, and the same of a hard text."""

    parser: str
    reasoning: str = "none"
    text: str
    expected: list[OutputEvent]
    hard: str
    """A call whose `city` is HARD, and perhaps nothing else."""
    malformed: list[str]
    """Outputs that are content, since their calls are not written as they should be."""
    id: str | None = None

    @property
    def format(self) -> OutputFormat:
        return OutputFormat(tool_calls=self.parser, tools=TOOLS, reasoning=self.reasoning)


HARD = 'a "}{[<b>\n\\n é\U0001f30d </x> ]'
HARD_JSON = '{"city": "a \\"}{[<b>\\n\\\\n é\U0001f30d </x> ]"}'
ARGS = '{"city": "Paris", "days": 2}'
FAMILIES = [
    # NousResearch/Hermes-Function-Calling
    Family(
        parser="hermes",
        text=f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>',
        expected=[Content("I look."), *weather(ARGS), *now()],
        hard=f'<tool_call>{{"name": "get_weather", "arguments": {HARD_JSON}}}</tool_call>',
        malformed=["<tool_call>now</tool_call>", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'],
    ),
    # mistral-common, tokenizers up to version 10 and from version 11
    Family(
        parser="mistral",
        text="I look.[TOOL_CALLS] "
        f'[{{"name": "get_weather", "arguments": {ARGS}}}, {{"name": "now", "arguments": {{}}}}]',
        expected=[Content("I look."), *weather(ARGS), *now()],
        hard=f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {HARD_JSON}}}]',
        malformed=["[TOOL_CALLS] [1]", "[TOOL_CALLS]", "[TOOL_CALLS] what is {"],
    ),
    Family(
        parser="mistral",
        reasoning="mistral",
        text=f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]now{{}}",
        expected=[Reasoning("Hm."), Content("I look."), *weather(ARGS), *now()],
        hard=f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{HARD_JSON}",
        malformed=["[TOOL_CALLS]a b{}", "[TOOL_CALLS]" + "x" * 500],
    ),
    # deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1, chat templates
    Family(
        parser="deepseek_v3",
        text="I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{ARGS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        expected=[Content("I look."), *weather(ARGS), *now()],
        hard="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{HARD_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        malformed=["<｜tool▁calls▁begin｜>x", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{}"],
    ),
    Family(
        parser="deepseek_v31",
        reasoning="think",
        text=f"<think>Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        expected=[Reasoning("Hm."), *weather(ARGS), *now()],
        hard=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{HARD_JSON}<｜tool▁call▁end｜>",
        malformed=["<｜tool▁call▁begin｜>{}", "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>now<｜tool▁sep｜>[]"],
    ),
    # deepseek-ai/DeepSeek-V3.2, encoding/README.md
    Family(
        parser="deepseek_v32",
        text='I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        expected=[Content("I look."), *weather(ARGS), *now()],
        hard='<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" string="true">'
        f"{HARD}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
        malformed=["<｜DSML｜function_calls>x", '<｜DSML｜invoke name="a b">'],
    ),
    # moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md
    Family(
        parser="kimi_k2",
        reasoning="kimi_k2",
        text="<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        expected=[
            *(Reasoning("Hm."), Content("I look.")),
            *(*weather(ARGS, "functions.get_weather:0"), *now("functions.now:1")),
        ],
        hard="<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{HARD_JSON}<|tool_call_end|><|tool_calls_section_end|>",
        malformed=["<|tool_calls_section_begin|> no", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}"],
        id="functions.get_weather:0",
    ),
    # Qwen/Qwen3-Coder-480B-A35B-Instruct, chat template
    Family(
        parser="qwen3_coder",
        text="I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
        "2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        expected=[Content("I look."), *weather(ARGS), *now()],
        hard=f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{HARD}\n</parameter>\n</function>\n</tool_call>",
        malformed=['<tool_call>\n{"name": "now"}\n</tool_call>', "<function=a b>", "<function=" + "x" * 500],
    ),
    # ByteDance-Seed/Seed-OSS-36B-Instruct, chat template
    Family(
        parser="seed_oss",
        reasoning="seed_oss",
        text="<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call><seed:tool_call>\n<function=now>\n</function>\n"
        "</seed:tool_call>",
        expected=[Reasoning("Hm."), *weather(ARGS), *now()],
        hard=f"<seed:tool_call><function=get_weather><parameter=city>{HARD}</parameter></function></seed:tool_call>",
        malformed=["<seed:tool_call>now</seed:tool_call>"],
    ),
    # zai-org/GLM-4.5 and GLM-4.7, chat templates
    Family(
        parser="glm45",
        reasoning="glm45",
        text="\n<think>Hm.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        expected=[Reasoning("Hm."), Content("I look."), *weather(ARGS), *now()],
        hard=f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{HARD}</arg_value></tool_call>",
        malformed=["<tool_call>a b</tool_call>", "<tool_call>now x", "<tool_call></tool_call>"],
    ),
    # MiniMaxAI/MiniMax-M2, docs/tool_calling_guide.md
    Family(
        parser="minimax_m2",
        text='I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        expected=[Content("I look."), *weather(ARGS), *now()],
        hard=f'<minimax:tool_call><invoke name="get_weather"><parameter name="city">{HARD}</parameter></invoke>'
        "</minimax:tool_call>",
        malformed=["<minimax:tool_call>x", '<invoke name="">'],
    ),
    # ibm-granite/granite-3.1-8b-instruct, chat template
    Family(
        parser="granite",
        reasoning="granite",
        text="Here is my thought process: Hm. Here is my response: I look.<|tool_call|>"
        f'[{{"name": "get_weather", "arguments": {ARGS}}}, {{"name": "now", "arguments": {{}}}}]',
        expected=[Reasoning(" Hm. "), Content(" I look."), *weather(ARGS), *now()],
        hard=f'<tool_call> [{{"name": "get_weather", "arguments": {HARD_JSON}}}]',
        malformed=["<|tool_call|>x", "<tool_call>[]"],
    ),
    # microsoft/Phi-4-mini-instruct, and vLLM's examples/tool_chat_template_phi4_mini.jinja
    Family(
        parser="phi4_mini_json",
        text=f'functools[{{"name": "get_weather", "arguments": {ARGS}}}, {{"name": "now", "arguments": {{}}}}]',
        expected=[*weather(ARGS), *now()],
        hard=f'<|tool_call|>[{{"name": "get_weather", "arguments": {HARD_JSON}}}]<|/tool_call|>',
        malformed=["functools[1]", "import functools"],
    ),
    # Google, "Gemma 4 prompt formatting"
    Family(
        parser="gemma4",
        reasoning="gemma4",
        text="<|channel>thought\nHm.<channel|>I look."
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
        expected=[Reasoning("Hm."), Content("I look."), *weather('{"city":"Paris","days":2}'), *now()],
        hard=f'<|tool_call>call:get_weather{{city:<|"|>{HARD}<|"|>}}<tool_call|>',
        malformed=["<|tool_call>call:{}<tool_call|>", "<|tool_call>now{}"],
    ),
    # meta-llama/llama-models, models/llama4/prompt_format.md
    Family(
        parser="llama4_pythonic",
        text='[get_weather(city="Paris", days=2), now()]',
        expected=[*weather('{"city":"Paris","days":2}'), *now()],
        hard=f"[get_weather(city={HARD!r})]",
        malformed=["[x for x in y]", "now()", "[now(1)]", "[now(a=b)]", "[other()]", '[now(a="'],
    ),
    # LiquidAI/LFM2-1.2B, model card
    Family(
        parser="lfm2",
        text='I look.<|tool_call_start|>[get_weather(city="Paris", days=2), now()]<|tool_call_end|>',
        expected=[Content("I look."), *weather('{"city":"Paris","days":2}'), *now()],
        hard=f"<|tool_call_start|>[get_weather(city={HARD!r})]<|tool_call_end|>",
        malformed=["<|tool_call_start|>[x]", "<|tool_call_start|>[now(1)]<|tool_call_end|>"],
    ),
    # OpenAI, "OpenAI harmony response format"
    Family(
        parser="openai",
        reasoning="openai_gptoss",
        text="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGS}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}",
        expected=[Reasoning("Hm."), Content("I look."), *weather(ARGS), *now()],
        hard=f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{HARD_JSON}",
        malformed=["text", "<|start|>", "to=functions.now"],
    ),
]
