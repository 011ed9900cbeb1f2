"""`python tools/routes.py` writes the table of routes in docs/security.md, as the code declares it."""

from __future__ import annotations

from pathlib import Path

from deployments.app import http_app
from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from deployments.http.route import Audience, Route
from deployments.observability.telemetry import Telemetry

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- routes: python tools/routes.py -->\n", "<!-- end of routes -->\n"
# a server that has all routes
EVERYTHING = AuthConfig(
    api_keys=(key_line("admin", "sk-admin"),),
    admin_keys=("admin",),
    allow_runtime_key_updating=True,
    allow_runtime_lora_updating=True,
)


def routes() -> list[Route]:
    found: list[Route] = http_app({}, Telemetry("tools"), EVERYTHING).state.routes
    return found


def table() -> str:
    lines = ["| who may call it | route | what it shows of other keys, or does to them |", "| --- | --- | --- |"]
    of_page = "`GET /console/page/...`"
    for audience in Audience:
        rows = {
            (of_page if route.path.startswith("/console/page/") else f"`{route.method} {route.path}`"): route.of_others
            for route in routes()
            if route.audience is audience
        }
        lines += [f"| {audience.value} | {name} | {of_others} |" for name, of_others in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the text of the page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
