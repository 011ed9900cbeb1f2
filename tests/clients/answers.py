"""What the model of obedient_server.py answers to prompts that belong to clients: the whole of a model's judgement."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from tests.clients.weather import WEATHER


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]

    def forms(self) -> list[str]:
        """Every way to write it: as a model that is free does (Hermes' format), as a list of calls, and as the
        arguments of a tool that is already chosen."""
        call, arguments = (dumps(value) for value in ({"name": self.name, "arguments": self.arguments}, self.arguments))
        return [f"<tool_call>\n{call}\n</tool_call>", f"[{call}]", arguments]


Answer = str | Call | dict[str, Any]
JOKE = {"setup": "Why do cats sit on keyboards?", "punchline": "To keep an eye on the mouse."}
CITY = {"name": "Paris", "population": 2_100_000}
CITY_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["name", "population"],
    "additionalProperties": False,
}
CODE = "Thought: I compute it.\n<code>\nfinal_answer(6 * 7)\n</code>"
ANSWERS: list[tuple[str, Answer]] = [
    # langchain-tests; "Hello!" is asked for any of its tools, or for this one
    (r"Hello!", Call("magic_function", {"input": 3})),
    (r"What is the value of magic_function\(3\)\? Use the tool\.", Call("magic_function", {"input": 3})),
    (r"What is the value of magic_function_no_args\(\)\? Use the tool\.", Call("magic_function_no_args", {})),
    (r"Using the tool, generate a Pirate greeting\.", Call("greeting_generator", {"answer_style": "Pirate"})),
    (r"What is 3 \+ 4", Call("my_adder_tool", {"a": 3, "b": 4})),
    (r"What is the weather in San Francisco, CA\?", Call("get_weather", {"location": "San Francisco, CA"})),
    (r"Create a customer named '(.+)' .*", Call("unicode_customer", {"customer_name": r"\1", "description": "new"})),
    (r"hi", "How are you?"),
    (r"Give me the setup to a joke about cats, no punchline\.", JOKE | {"punchline": None}),
    (r"(?:Tell|Give) me a joke about cats.*", JOKE),
    # objects, whichever way a client asks for them
    (r"Describe Paris\.", CITY),
    (r"You must format the previous response as structured output\.", CITY),  # Strands, after a free answer
    # smolagents, whose tools' results are messages of the user
    (rf"Observation:\s+{WEATHER}", Call("final_answer", {"answer": WEATHER})),
    (r"Compute 6 \* 7\.", CODE),
    (r"Compute 6 \* 7 in an object\.", {"thought": "I compute it.", "code": "final_answer(6 * 7)"}),
]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def find(text: str) -> Answer | None:
    """Return the answer to a text whose last lines are a prompt of the table."""
    for prompt, answer in ANSWERS:
        if found := re.search(rf"(?:^|\n){prompt}\s*\Z", text):
            if isinstance(answer, Call):
                filled = {key: found.expand(v) if isinstance(v, str) else v for key, v in answer.arguments.items()}
                return Call(answer.name, filled)
            return answer
    return None
