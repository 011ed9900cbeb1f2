"""Limits on the number of values in a body: what it costs to parse grows with them, not with its bytes.

A parser of JSON keeps the GIL, so while one body is parsed all other requests wait.
"""

from __future__ import annotations

import asyncio

from engine.errors import RequestError

# What may be too many, by the byte that there is one of for each. Texts have such bytes too, so they are a limit of what
# is counted at once only; then strings are left out.
LIMITS = {
    b"{": (8_192, "objects"),
    b"[": (16_384, "lists"),
    b":": (65_536, "members of objects"),
    b",": (2**20, "values"),
}


async def check_json_size(body: bytes) -> None:
    """Raises RequestError for a body of too many values, whether it is valid JSON or not."""
    if any(body.count(byte) > limit for byte, (limit, _) in LIMITS.items()):
        await asyncio.to_thread(_check_outside_strings, body)


def _check_outside_strings(body: bytes) -> None:
    counts = dict.fromkeys(LIMITS, 0)
    start = 0
    while start < len(body):
        quote = body.find(b'"', start)
        end = len(body) if quote < 0 else quote
        for byte, (limit, what) in LIMITS.items():
            counts[byte] += body.count(byte, start, end)
            if counts[byte] > limit:
                raise RequestError(f"the body has more than {limit} {what}, the limit of this server")
        start = _end_of_string(body, end)


def _end_of_string(body: bytes, quote: int) -> int:
    """Return the position after the string that begins at `quote`, or the end of a body that ends inside it."""
    end = body.find(b'"', quote + 1)
    while end > 0:
        backslashes = end
        while body[backslashes - 1] == ord("\\"):
            backslashes -= 1
        if (end - backslashes) % 2 == 0:
            return end + 1
        end = body.find(b'"', end + 1)
    return len(body)
