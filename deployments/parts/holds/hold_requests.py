"""What clients ask to stay cached, as holds of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import FunctionDefinition, ImagePart, Message, TextPart, Tool
from deployments.openai.served.model_part import Draft, ModelPart
from deployments.openai.served.served_model import ServedModel
from deployments.parts.holds.cache_marks import CacheMark
from deployments.parts.holds.fields import HoldFields, marks_of
from deployments.parts.holds.marked_text import MarkedText, common_prefix, hold_marks
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.holds import HoldMark, PromptHold


class HoldRequests(ModelPart):
    def __init__(self, model: ServedModel):
        self._model = model

    def requests(self, draft: Draft, requests: list[list[GenerateRequest]]) -> list[list[GenerateRequest]]:
        """Give the first sequence of each prompt the hold that the body asks for."""
        body = draft.body
        if not isinstance(body, HoldFields):
            return requests
        name = draft.session_id or body.prompt_cache_key
        held = []
        for first, *others in requests:
            if marks := self._marks(draft, body, first.prompt):
                first = first.asking(PromptHold(marks=marks, response_id=draft.request_id, name=name))
            held.append([first, *others])
        return held

    def _marks(self, draft: Draft, body: HoldFields, prompt: list[int]) -> list[HoldMark]:
        if isinstance(body, ChatBody):
            marks = marks_of(body)
            return self._find_marks(draft, body, marks, len(prompt)) if marks else []
        return [] if body.hold_ttl_s is None else [HoldMark(len(prompt), body.hold_ttl_s)]

    def _find_marks(self, draft: Draft, body: ChatBody, marks: Sequence[CacheMark], num_tokens: int) -> list[HoldMark]:
        """Return where the marks of a chat are in its prompt. num_tokens: of the prompt."""
        model, text = self._model, draft.text
        marked, tools = MarkedText(), body.offered_tools

        def render(numbers: Sequence[int]) -> str:
            messages = list(body.messages)
            for mark, number in ((marks[number], number) for number in numbers):
                messages[mark.message] = with_word(messages[mark.message], mark.part, marked.word(number))
            return model.render_chat(messages, tools, body)

        places = marked.offsets(text, [n for n, mark in enumerate(marks) if mark.message >= 0], render)
        for number, mark in enumerate(marks):
            if mark.message < 0:
                another = Tool(type="function", function=FunctionDefinition(name=f"z{marked.word(number)[:8]}"))
                longer = [*tools[: mark.part + 1], another, *tools[mark.part + 1 :]]
                places[number] = common_prefix(text, model.render_chat(body.messages, longer, body))
        offsets = [len(model.expand(draft, text[: places[number]])) for number in range(len(marks))]
        counts = model.tokenizer.count_before(model.expand(draft, text), offsets, body.add_special_tokens)
        cut = body.truncate_prompt_tokens is not None  # then the marks may be elsewhere
        return hold_marks([(num_tokens if cut else n, mark.ttl_s) for n, mark in zip(counts, marks, strict=True)])


def with_word(message: Message, part: int, word: str) -> Message:
    """Return a message with a word at the end of a part, or after the part if that is an image."""
    if not isinstance(message.content, list) or not message.content:
        return message.model_copy(update={"content": f"{message.content or ''}{word}"})
    parts = list(message.content)
    marked = parts[part]
    if isinstance(marked, ImagePart):
        parts.insert(part + 1, TextPart(type="text", text=word))
    else:
        parts[part] = marked.model_copy(update={"text": f"{marked.text}{word}"})
    return message.model_copy(update={"content": parts})
