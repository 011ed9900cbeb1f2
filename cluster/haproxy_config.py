"""Rewrites the configurations that Ray writes for HAProxy: text in, text out."""

from __future__ import annotations

import json
import re

# Errors that HAProxy answers itself: type, code and message of OpenAI's error, by status. HAProxy quotes them with '.
ERRORS = {
    400: ("invalid_request_error", "bad_request", "this is not a valid HTTP request"),
    408: ("timeout_error", "request_timeout", "the request was not received in time"),
    500: ("internal_error", "internal_error", "the proxy failed; its log says why"),
    502: ("service_unavailable_error", "bad_gateway", "the server ended before it answered; send the request again"),
    503: (
        "service_unavailable_error",
        "service_unavailable",
        "no server is up at the moment; send the request again",
    ),
    504: ("timeout_error", "gateway_timeout", "the server did not answer in time"),
}
HEADERS = {503: " hdr Retry-After 1", 408: " hdr X-Should-Retry false", 504: " hdr X-Should-Retry false"}
NO_ROUTE = ("not_found_error", "route_not_found", "this route does not exist")
HEADER_S = 10  # that a client has to send the header of a request
FRONTEND = re.compile(r"(?ms)^frontend http_frontend\n\s*bind (\S*):(\d+)$.*?(?=^backend )")
"""The section of clients: its host and port."""
BACKEND = re.compile(r"(?m)^backend (\S+)\n((?:[ \t].*\n|\n)*)")
SERVER = re.compile(r"(?m)^ *server .*\n")


def rewritten(config: str) -> str:
    """Return Ray's configuration, changed so that HAProxy's own errors have OpenAI's body and the right status.

    By default, 502, 503 and 504 become a 500 of plain text. Requests that HAProxy cannot even parse are refused with a
    body that no configuration can change. While the configuration names no application yet, 404 becomes 503, because no
    client retries after a 404. Every HAProxy starts with such a configuration, even one that replaces another after
    failed health checks.
    """
    errors = "".join(f"    http-error {_answer(status, *error)}\n" for status, error in ERRORS.items())
    config = re.sub(r"(^ *errorfile .*\n)+", lambda _: errors, config, flags=re.MULTILINE)
    named = re.search(r"^\s*use_backend ", config, re.MULTILINE)
    unknown = _answer(404, *NO_ROUTE) if named else _answer(503, *ERRORS[503])
    return re.sub(r"http-request return status 404 .*", lambda _: f"http-request return {unknown}", config)


def _answer(status: int, kind: str, code: str, message: str) -> str:
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    return f"status {status} content-type application/json string '{body}'{HEADERS.get(status, '')}"


def closed_to_others(config: str) -> str:
    """Return Ray's configuration, changed so that statistics are only on loopback, metrics are on the API's address,
    and only this user can open the admin socket.

    In Ray's own configuration, every machine can see the replicas' addresses, and every local user can stop servers.
    """
    for section, host in (("listen stats", "127.0.0.1"), ("frontend prometheus", _frontend(config)[1])):
        config = _changed(config, rf"(?m)^({section}\n\s*bind )\S*:(\d+)$", rf"\g<1>{host}:\2")
    return re.sub(r"(?m)^(\s*stats socket \S+ mode )666 ", r"\g<1>600 ", config)


def over_tls(config: str, certificate: str) -> str:
    """Return Ray's configuration with HTTPS for clients and towards the ingresses, which Serve starts with the same
    certificate. HAProxy does not verify the ingresses' certificate, which is issued for the API's host name.

    certificate: path of a PEM file that includes the private key.
    """
    config = _changed(config, r"(?m)^(frontend http_frontend\n\s*bind .*)$", rf"\1 ssl crt {certificate} alpn http/1.1")
    return re.sub(r"(?m)^(\s*server \S+ \S+)", r"\1 ssl verify none", config)


def limited(config: str, connections: int) -> str:
    """Return Ray's configuration with limits, so that clients that send nothing or send slowly cannot shut out others:
    a time limit for headers, a maximum number of connections, and at most three quarters of them for one source.
    HTTP/2, which can be expensive in other ways, is disabled.

    connections: maximum number of clients at a time.
    """
    limit = f"maxconn {connections}\n    no strict-limits"  # else it would want two for each
    config = _changed(config, r"(?m)^(global\n(?:[ \t].*\n)*?\s*)maxconn \d+$", rf"\g<1>{limit}")
    waits = f"    timeout http-request {HEADER_S}s\n    option disable-h2-upgrade\n"
    config = _changed(config, r"(?m)^(defaults\n)", rf"\g<1>{waits}")
    by_source = (
        "    stick-table type ipv6 size 100k expire 1m store conn_cur\n"
        "    tcp-request connection track-sc0 src\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {connections * 3 // 4} }}\n"
    )
    return _changed(config, r"(?m)^(frontend http_frontend\n\s*bind .*\n)", rf"\g<1>{by_source}")


def with_header(config: str, header: str, value: str) -> str:
    """Return Ray's configuration with a header added to every request, by which ingresses recognise the HAProxy."""
    line = f"    http-request set-header {header} {value}\n"
    return _changed(config, r"(?m)^(frontend http_frontend\n\s*bind .*\n)", rf"\g<1>{line}")


def with_successor(config: str) -> str:
    """Return Ray's configuration, changed so that a replaced process passes requests on to its successor, which has the
    same address, if there is one.

    Ray keeps clients' idle connections to a replaced process open until their next answer. That process knows only the
    ingresses of its own time, which are about to end. If it stops because its manager has died, nothing has its address
    at first: the request is then tried again with these ingresses, and so are all later ones.
    """
    frontend = _frontend(config)
    applications = re.findall(r"(?m)^ *use_backend (\S+) if ", frontend[0])
    host = "127.0.0.1" if frontend[1] == "0.0.0.0" else frontend[1]
    server = f"    server successor {host}:{frontend[2]}"

    def backend(found: re.Match[str]) -> str:
        if found[1] not in applications:
            return found[0]
        return f"{found[0]}    use-server successor if {{ stopping }}\n{server} weight 0 no-check\n"

    config = BACKEND.sub(backend, config)
    unknown = "    use_backend successor if { stopping }\n"
    config = _changed(config, r"(?m)^( *default_backend default_backend\n)", rf"{unknown}\1")
    return _changed(config, r"(?m)^(backend default_backend\n)", rf"backend successor\n{server}\n\1")


def without_fallback(config: str, ingresses: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return Ray's configuration without Serve's own proxy as a fallback; also return the ingresses that it then names.

    ingresses: server lines, by backend, of the previous configuration. A backend keeps them if the new configuration
    gives it none: while Serve rebuilds an application, no ingresses are named for some seconds, although they still
    answer. Health checks find ingresses that do not answer, and clients then get 503 at once. Serve's proxy stays in
    the configuration but is disabled, because Ray counts the servers that HAProxy shows.
    """
    named: dict[str, str] = {}

    def backend(found: re.Match[str]) -> str:
        name, section = found[1], re.sub(r"(?m)^( *server .* backup)$", r"\1 disabled", found[2])
        servers = [line for line in SERVER.findall(section) if " backup" not in line]
        if servers:
            named[name] = "".join(servers)
        elif name in ingresses:
            named[name] = ingresses[name]
            section += named[name]
        return f"backend {name}\n{section}"

    return BACKEND.sub(backend, config), named


def _frontend(config: str) -> re.Match[str]:
    found = FRONTEND.search(config)
    assert found is not None, "Ray's configuration has no frontend"
    return found


def _changed(config: str, pattern: str, to: str) -> str:
    config, found = re.subn(pattern, to, config, count=1)
    assert found, f"Ray's configuration has no line that matches {pattern}"
    return config
