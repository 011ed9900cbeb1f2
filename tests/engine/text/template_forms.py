# ruff: noqa: E501
"""Small chat templates, each of a form that templates of public models have."""

from __future__ import annotations

END = "{% if add_generation_prompt %}<a>{% endif %}"
LOOP = "{% for m in messages %}"
CHATML = LOOP + "<|{{ m.role }}|>{{ m.content }}\n"
KNOWN = LOOP + "{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}\n{% endif %}"
SYSTEM = "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}</s>{% endif %}"
WITHOUT = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
)
TURNS = (
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}<|{{ m.role }}|>{{ m.content | trim }}\n"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<image>{% endif %}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
STRICT_ROLES = (
    "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('unknown role') }}{% endif %}"
)
ONE_SYSTEM = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}"
CALL = "{% for c in m.tool_calls or [] %}<call>"
DONE = "{% endfor %}"
TOJSON = CALL + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}' + DONE
TEXT = CALL + "{{ c.function.name }}({{ c.function.arguments }})" + DONE
JOINED = CALL + "{{ c.function.name + c.function.arguments }}" + DONE
EITHER_ARGUMENTS = (
    CALL + "{{ c.function.name }}{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}" + DONE
)
ITEMS = CALL + "{{ c.function.name }}{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}" + DONE
METHOD = CALL + "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}" + DONE
MAPPING = (
    CALL + "{% if c.function.arguments is not mapping %}{{ raise_exception('arguments must be an object') }}{% endif %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}" + DONE
)
ONLY_CALLS = (
    LOOP + "<|{{ m.role }}|>{% if m.tool_calls %}" + TOJSON + "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
FOR = "{% endfor %}" + END

FORMS = {
    "any role": CHATML + FOR,
    "any role, trimmed": CHATML.replace("m.content", "m.content | trim") + FOR,
    "known roles": KNOWN + FOR,
    "first system, known roles": SYSTEM + KNOWN + FOR,
    "first system, any other role": SYSTEM + WITHOUT + LOOP.replace("messages", "rest") + CHATML[len(LOOP) :] + FOR,
    "system, known roles": KNOWN.replace("('user'", "('system', 'user'") + FOR,
    "unknown roles raise": CHATML.replace("<|", STRICT_ROLES + "<|", 1) + FOR,
    "later system raises": CHATML.replace("<|", STRICT_ROLES + ONE_SYSTEM + "<|", 1) + FOR,
    "later system is skipped": LOOP + "{% if m.role != 'system' or loop.first %}" + CHATML[len(LOOP) :] + "{% endif %}" + FOR,
    "no system": NO_SYSTEM + CHATML + FOR,
    "no system, in turns": NO_SYSTEM + "{% set rest = messages %}" + TURNS + FOR,
    "system, in turns": SYSTEM + WITHOUT + TURNS + FOR,
    "system within the user, in turns": WITHOUT + TURNS.replace(
        "<|{{ m.role", "{% if loop.first and messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}<|{{ m.role"
    ) + FOR,
    "developer too": SYSTEM + KNOWN.replace("('user'", "('developer', 'user'") + FOR,
    "developer or system, first": (
        "{% if messages[0].role in ('system', 'developer') %}<d>{{ messages[0].content }}</d>{% endif %}" + KNOWN + FOR
    ),
    "developer raises unless first": (
        LOOP + "{% if m.role == 'developer' and not loop.first %}{{ raise_exception('developer must be first') }}{% endif %}"
        + CHATML[len(LOOP) :] + FOR
    ),
    "system is collected": (
        "{% set ns = namespace(s='') %}" + LOOP + "{% if m.role == 'system' %}{% set ns.s = ns.s + m.content %}{% endif %}"
        "{% endfor %}{{ ns.s }}" + KNOWN + FOR
    ),
    "last system wins": (
        "{% set ns = namespace(s='') %}" + LOOP + "{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}"
        "{% endfor %}{{ ns.s }}" + KNOWN + FOR
    ),
    "a user is required": (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
        + CHATML + FOR
    ),
    "the last is the user's": (
        CHATML + "{% endfor %}{% if messages[-1].role == 'system' %}{{ raise_exception('no system at the end') }}{% endif %}"
    ),
    "parts, any role": LOOP + "<|{{ m.role }}|>" + PARTS + "\n" + FOR,
    "parts, first read by index": (
        LOOP + "<|{{ m.role }}|>{% if m.content[0]['type'] == 'image' %}{{ '' }}{% endif %}" + PARTS + "\n" + FOR
    ),
    "parts by selectattr": (
        LOOP + "<|{{ m.role }}|>{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}" + FOR
    ),
    "parts, roles in capitals": LOOP + "{{ m.role | capitalize }}: " + PARTS + "<end>\n" + FOR,
    "parts of users only": LOOP + "{% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content }}{% endif %}\n" + FOR,
    "parts except of system": LOOP + "{% if m.role == 'system' %}{{ m.content | trim }}{% else %}" + PARTS + "{% endif %}\n" + FOR,
    "parts except of tools": LOOP + "{% if m.role == 'tool' %}{{ m.content | trim }}{% else %}" + PARTS + "{% endif %}\n" + FOR,
    "parts, in turns": NO_SYSTEM + "{% set rest = messages %}" + TURNS.replace("{{ m.content | trim }}", PARTS) + FOR,
    "texts or parts": LOOP + "<|{{ m.role }}|>" + EITHER + "\n" + FOR,
    "parts raise for a text": (
        LOOP + "{% if m.content is string %}{{ raise_exception('a list is needed') }}{% endif %}" + PARTS + FOR
    ),
    "calls as JSON": CHATML + TOJSON + FOR,
    "calls as JSON of either form": CHATML + EITHER_ARGUMENTS + FOR,
    "calls from text": CHATML + JOINED + FOR,
    "calls as text": CHATML + TEXT + FOR,
    "calls from items": CHATML + ITEMS + FOR,
    "calls from a method": CHATML + METHOD + FOR,
    "calls of objects only": CHATML + MAPPING + FOR,
    "calls without their text": ONLY_CALLS + END,
    "a single call": ONLY_CALLS.replace(
        "{% if m.tool_calls %}",
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('single calls only') }}{% endif %}",
    ) + END,
    "calls without their text, in turns": SYSTEM + WITHOUT + (
        "{% set ns = namespace(n=0) %}{% for m in rest %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}{% if m.tool_calls %}" + TOJSON + "{% else %}{{ m.content }}{% endif %}"
    ) + FOR,
    "results as JSON": CHATML.replace(
        "{{ m.content }}", "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    ) + TOJSON + FOR,
    "parts and calls from items": LOOP + "<|{{ m.role }}|>" + PARTS + ITEMS + FOR,
    "no more than reasoning's end": LOOP + "<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}\n" + FOR,
}  # fmt: skip
LOSES = {
    "only the last": "{{ messages[-1].content }}",
    "nothing": "Hello.",
    "no assistant": LOOP + "{% if m.role == 'user' %}{{ m.content }}{% endif %}" + FOR,
}
