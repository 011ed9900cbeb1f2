"""A tool, and what leads the obedient model to call it."""

from __future__ import annotations

CALL_WEATHER = 'call get_weather {"city": "Paris"}'
WEATHER = "sunny in Paris"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of a city."}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"
