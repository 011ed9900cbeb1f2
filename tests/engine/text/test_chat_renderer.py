import logging

import pytest

from engine import pocket
from engine.errors import RequestError
from engine.text.chat_renderer import TOOL, reading, render_all
from engine.text.chat_tokenizer import ChatTokenizer
from tests.engine.text.template_forms import FORMS, LOSES


def say(role: str, content: object = None, **more: object) -> dict:
    return {"role": role, "content": f"text of {role}" if content is None else content, **more}


def called(arguments: object, content: str = "") -> dict:
    call = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return say("assistant", content, tool_calls=[call])


USER, ANSWER, RESULT = say("user"), say("assistant"), say("tool", tool_call_id="call00001", name="look_up")
CONVERSATIONS = {
    "user": [USER],
    "parts": [say("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])],
    "system": [say("system"), USER],
    "only system": [say("system")],
    "developer": [say("developer"), USER],
    "system, developer": [say("system"), say("developer"), USER],
    "developer, system": [say("developer"), say("system"), USER],
    "two systems": [say("system"), say("system", "second"), USER, ANSWER, USER],
    "three instructions": [say("system"), say("developer"), say("system", "third"), USER],
    "system at the end": [USER, say("system")],
    "system behind an answer": [USER, ANSWER, say("system")],
    "system before an answer": [USER, say("system"), ANSWER, USER],
    "later system": [USER, ANSWER, say("system"), say("user", "second")],
    "later developer": [USER, ANSWER, say("developer"), say("user", "second")],
    "system, later system": [
        say("system"),
        USER,
        ANSWER,
        say("system", "later"),
        say("developer"),
        say("user", "second"),
    ],
    "two users": [USER, say("user", "second"), ANSWER, USER],
    "two answers": [USER, ANSWER, say("assistant", "second"), USER],
    "an answer first": [ANSWER, USER],
    "system, an answer first": [say("system"), ANSWER, USER],
    "a call": [USER, called('{"key": "wanted"}'), RESULT],
    "a call, and an answer": [USER, called('{"key": "wanted"}'), RESULT, ANSWER, say("user", "second")],
    "a call with text": [USER, called('{"key": "wanted"}', "I look."), RESULT, ANSWER, say("user", "second")],
    "system behind a result": [USER, called('{"key": "wanted"}'), RESULT, say("system"), ANSWER, say("user", "second")],
}


def texts(messages: list[dict]) -> list[str]:
    contents = [message["content"] for message in messages]
    return [
        text for each in contents for text in ([part["text"] for part in each] if isinstance(each, list) else [each])
    ]


@pytest.mark.parametrize("form", FORMS)
def test_every_text_of_every_conversation_is_in_the_prompt(form):
    for name, messages in CONVERSATIONS.items():
        tools = [TOOL] if any("tool_calls" in message for message in messages) else None
        prompt = render_all(FORMS[form], messages, tools, {}, {"add_generation_prompt": True})
        for text in texts(messages):
            assert text in prompt, f"{name}: {prompt}"
        if tools:
            assert "look_up" in prompt and "wanted" in prompt, f"{name}: {prompt}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", ["", " ", "null", None, "[]", '"wanted"', '{"key": "wan', '["wanted"]', "5"])
def test_an_earlier_call_without_an_object_is_written(form, arguments):
    prompt = render_all(FORMS[form], [USER, called(arguments), RESULT], [TOOL], {}, {"add_generation_prompt": True})
    assert "look_up" in prompt and "text of tool" in prompt
    assert (arguments or "").strip(' []{"').partition('"')[0].replace("null", "") in prompt


@pytest.mark.parametrize("form", LOSES)
def test_a_text_that_no_form_saves_is_refused_by_name(form):
    with pytest.raises(RequestError, match=r"leaves out the text of messages\[\d\], whose role is (user|assistant)"):
        render_all(LOSES[form], [say("user", "first"), say("assistant", "second"), say("user", "third")], None, {}, {})


def test_a_text_that_is_part_of_another_does_not_hide_that_it_is_left_out():
    prompt = render_all(
        FORMS["first system, known roles"], [say("developer", "Be."), say("user", "Be. Now")], None, {}, {}
    )
    assert prompt.startswith("<s>Be.</s>")


def test_what_a_template_writes_stays_as_it_is():
    messages = [say("system"), say("system", "second"), USER, ANSWER, say("system", "late"), USER]
    prompt = render_all(FORMS["any role"], messages, None, {}, {})
    assert prompt == "".join(f"<|{message['role']}|>{message['content']}\n" for message in messages)


def test_instructions_are_merged_where_they_stand():
    messages = [
        say("system", "a"),
        say("developer", "b"),
        say("user", "c"),
        ANSWER,
        say("system", "d"),
        say("user", "e"),
    ]
    prompt = render_all(FORMS["first system, known roles"], messages, None, {}, {})
    assert prompt == (
        "<s>a\n\nb</s><|user|>c\n<|assistant|>text of assistant\n"
        "<|user|><system-reminder>\nd\n</system-reminder>\n\ne\n"
    )


def test_what_a_template_reads_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    source = FORMS["parts except of system"] + "{# logged #}"
    for _ in range(2):
        reading(source)
    assert [record.message for record in caplog.records] == [
        "chat template instructions=system late=system parts=assistant,tool,user tools=results arguments=object"
    ]


def test_a_template_that_computes_for_ever_ends_its_check(monkeypatch):
    monkeypatch.setattr("engine.text.chat_template.MAX_CPU_S", 0.02)
    slow = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    assert not reading(slow).known


def test_image_stays_beside_the_instruction_that_is_merged_with_it():
    image = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    prompt = render_all(FORMS["parts, in turns"], [say("system", "Be brief."), say("user", image)], None, {}, {})
    assert prompt == "<|user|>Be brief.\n\n<image>What is it?"


@pytest.mark.parametrize("message", ["hi", {"content": "hi"}, {"role": 5, "content": "hi"}])
def test_what_is_no_message_is_refused_by_its_place(message):
    with pytest.raises(RequestError, match=r"messages\[1\] must be an object with a role"):
        ChatTokenizer.from_folder(pocket.PATH).render_chat_template([USER, message])
