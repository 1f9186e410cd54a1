"""Describes the proxy's own calls in the format of OpenAPI 3.1, from the routes and their types.

python -m evoke_proxy.web.openapi > docs/openapi.json
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import msgspec

from evoke_proxy import __version__
from evoke_proxy.web import admin_api
from evoke_proxy.web import admin_types as types
from evoke_proxy.web.endpoints import PREFETCH_PATH

_ABOUT = """\
The calls of evoke-proxy itself; every other path is relayed to llama-server. Except for health and
readiness they are served at `security.admin_listen`, by default 127.0.0.1:18090. Whole numbers
are written without a decimal point."""
_REFERENCE = "#/components/schemas/{name}"
_PARAMETERS = {
    "id": "The id of a session, from the list of sessions.",
    "name": "The name of a server, from the list of servers.",
    "tenant": "A tenant; `-` for requests without a key.",
}
_ERRORS = {
    "400": "The request is invalid; `message` says why.",
    "401": "The admin token is missing or wrong.",
    "403": "Not at the admin address, or from the page of another site.",
    "404": "Nothing has this id, name or range.",
    "409": "A request of the session runs, or it is only on disk.",
    "413": "The body is larger than limits.body_bytes.",
    "415": "The body is not of the type application/json.",
    "502": "llama-server refuses, or answers in another format.",
    "503": "llama-server cannot be reached.",
    "504": "llama-server does not answer in time.",
}
_PREFETCH_ERRORS = {
    "401": "The key of the client is missing or wrong.",
    "404": "The address serves only the admin API.",
    "503": "llama-server cannot be reached, or the proxy has no memory for the body, or stops.",
}
_UPSTREAM = ("502", "503", "504")


def document() -> dict[str, Any]:
    """Return the description as a JSON object."""
    named = {t for route in admin_api.ROUTES for t in (route.body, route.answer)}
    every = [t for t in named if isinstance(t, type)]
    every += [types.Error, types.Health, types.Readiness, types.Draft, types.Prefetched]
    every.sort(key=lambda item: item.__name__)
    _, schemas = msgspec.json.schema_components(every, ref_template=_REFERENCE)
    for route in admin_api.ROUTES:
        if route.body is not None:
            schemas[route.body.__name__]["minProperties"] = 1
    paths: dict[str, dict[str, Any]] = {
        "/evoke/health": {"get": _open("health", "Whether the proxy runs.", {"200": types.Health})},
        "/evoke/ready": {
            "get": _open(
                "ready",
                "Whether requests can be served.",
                {"200": types.Readiness, "503": types.Readiness},
            )
        },
    }
    paths[PREFETCH_PATH] = {"post": _prefetch()}
    for route in admin_api.ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "evoke-proxy",
            "version": __version__,
            "description": " ".join(_ABOUT.split()),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:18090"}],
        "security": [{}, {"admin_token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "admin_token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The token of security.admin_token_file, if that is set.",
                }
            },
        },
    }


def text() -> str:
    """Return the text of docs/openapi.json."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def _open(id: str, summary: str, answers: dict[str, type]) -> dict[str, Any]:
    """A call that needs no token."""
    responses = {
        status: {"description": inspect.getdoc(answer), "content": _json(answer)}
        for status, answer in answers.items()
    }
    return {"operationId": id, "summary": summary, "security": [], "responses": responses}


def _prefetch() -> dict[str, Any]:
    """The call that clients make with the keys and at the address of chat requests."""
    operation = _open(
        "prefetch",
        "Bring back the blocks that the draft of a message needs, before it is sent.",
        {"200": types.Prefetched},
    )
    about = (
        "Served at the address of `listen`, with the key and the headers of a chat request. Nothing"
        " is decoded, and the conversation does not change."
    )
    for status in ("400", "401", "404", "413", *_UPSTREAM):
        operation["responses"][status] = {
            "description": _PREFETCH_ERRORS.get(status, _ERRORS[status]),
            "content": _json(types.Error),
        }
    body = {"required": True, "content": _json(types.Draft)}
    return operation | {"description": about, "requestBody": body}


def _operation(route: admin_api.Route) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", route.path)
    summary = (inspect.getdoc(route.handler) or "").partition("\n")[0]
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__.strip("_"),
        "summary": summary,
        "parameters": [_parameter(name) for name in names],
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(route.body)}
    is_json = isinstance(route.answer, type)
    content = _json(route.answer) if is_json else {str(route.answer): {"schema": {}}}
    operation["responses"] = {"200": {"description": summary, "content": content}}
    for status in _statuses(route, names):
        about = {"description": _ERRORS[status], "content": _json(types.Error)}
        operation["responses"][status] = about
    return operation


def _statuses(route: admin_api.Route, names: list[str]) -> list[str]:
    """The statuses of the errors that a call can have."""
    statuses = {"401", "403"}
    if names:
        statuses |= {"404", *_UPSTREAM}
    if names and route.method != "GET":
        statuses.add("409")
    if route.body is not None:
        statuses |= {"400", "413", "415"}
    return sorted(statuses)


def _parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    about = _PARAMETERS[name]
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": about}


def _json(answer: type | str) -> dict[str, Any]:
    assert isinstance(answer, type)
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=answer.__name__)}}}


if __name__ == "__main__":
    print(text(), end="")
