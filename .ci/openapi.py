"""Write docs/openapi*.json, descriptions of the protocols, from the routes and the types of the servers.

python .ci/openapi.py docs
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from starlette.routing import BaseRoute, Route

from fedrecon._src.deploy.admission import FIELDS
from fedrecon._src.deploy.devices import DeviceApi, DeviceTask
from fedrecon._src.deploy.helper_server import LONGEST_RUN, HelperApi
from fedrecon._src.deploy.http_server import Problem
from fedrecon._src.deploy.tasks import DIGEST, MAX_WAIT, TICKET, Api, NodeTask

BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
UNCHANGED = {"304": {"description": "`If-None-Match` names what would be sent."}}
PARAMETERS: dict[str, dict[str, Any]] = {
    "digest": {"type": "string", "pattern": f"^{DIGEST}$"},
    "number": {"type": "integer", "minimum": 0, "maximum": 10**9 - 1},
    "ticket": {"type": "string", "pattern": f"^{TICKET}$"},
    "wait": {"type": "integer", "minimum": 0, "maximum": 99_999, "default": 0},
    "batch": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "run": {"type": "string", "minLength": 1, "maxLength": LONGEST_RUN},
    "broadcast": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
}
SIGNATURE = {
    name: {"name": name, "in": "header", "required": True, "schema": {"type": "string", "pattern": f"^{form.pattern}$"}}
    for name, form in FIELDS.items()
}
TOKEN = {"authorization": {"name": "authorization", "in": "header", "required": True, "schema": {"type": "string"}}}


class Described(NamedTuple):
    """A server: its name, who may ask, with which headers and queries, its types (of a task first), what 204 means."""

    title: str
    description: str
    headers: dict[str, dict[str, Any]]
    queries: dict[str, tuple[str, ...]]
    types: tuple[type, ...]
    no_task: str = ""


NODES = Described(
    "fedrecon coordinator",
    "Every request is signed with the node's Ed25519 key: docs/deploy.md, The protocol.",
    SIGNATURE,
    {"check_in": ("wait",)},
    (NodeTask, Problem),
    f"No task yet. The server waits for one as long as `wait` says, at most {MAX_WAIT:g} s.",
)
DEVICES = Described(
    "fedrecon coordinator of devices",
    "Every request has `Authorization: Bearer TOKEN`: docs/deploy.md, Devices.",
    TOKEN,
    {},
    (DeviceTask, Problem),
    "No task now: no round is open, or this one has the device's report.",
)
HELPER = Described(
    "fedrecon helper",
    "Batches are signed with the coordinator's Ed25519 key, as nodes sign: docs/deploy.md, Devices.",
    SIGNATURE,
    {"post_batch": ("run", "broadcast")},
    (Problem,),
)
ANSWERS: dict[str, dict[str, Any]] = {  # by endpoint and status
    "get_plan": {"200": {"description": "The plan.", "content": {"application/json": {"schema": {}}}}} | UNCHANGED,
    "check_in": {
        "200": {
            "description": "A task.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/NodeTask"}}},
        },
        "204": {
            "description": "NoTask",
            "headers": {"Retry-After": {"schema": {"type": "integer"}, "required": True}},
        },
    },
    "get_broadcast": {"200": {"description": "The message, which has this digest.", "content": BYTES}} | UNCHANGED,
    "put_report": {
        "200": {"description": "The report was received before, and counts once."},
        "201": {"description": "The report was received."},
    },
    "get_key": {
        "200": {"description": "64 hexadecimal digits.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    },
    "post_batch": {
        "200": {"description": "A bit for each report, and the sum of the masks, packed.", "content": BYTES}
    },
}


def describe_api(routes: Iterable[BaseRoute], server: Described = NODES) -> dict[str, Any]:
    """Return the description of a server's routes, as OpenAPI 3.1 defines it."""
    paths: dict[str, Any] = {}
    for route in routes:
        assert isinstance(route, Route)
        methods = (route.methods or set()) - {"HEAD"}
        paths[route.path] = {method.lower(): _operation(route, method, server) for method in sorted(methods)}
    info = {
        "title": server.title,
        "version": "1",
        "description": server.description,
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    }
    schemas = {kind.__name__: TypeAdapter(kind).json_schema() for kind in server.types}
    components = {"schemas": schemas, "parameters": server.headers}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(route: Route, method: str, server: Described) -> dict[str, Any]:
    """Describe what one method of one path does."""
    name = route.endpoint.__name__
    queries = server.queries.get(name, ())
    places = dict.fromkeys(re.findall(r"{(\w+)}", route.path), "path") | dict.fromkeys(queries, "query")
    headers = {} if name == "get_key" else server.headers  # a public key is for everybody
    parameters: list[dict[str, Any]] = [{"$ref": f"#/components/parameters/{header}"} for header in headers]
    parameters += [
        {"name": key, "in": place, "required": key != "wait", "schema": PARAMETERS[key]}
        for key, place in places.items()
    ]
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    refused = {"4XX": {"description": "The request was refused and has no effect.", "content": problem}}
    body = {"requestBody": {"required": True, "content": BYTES}} if method in ("PUT", "POST") else {}
    summary = (route.endpoint.__doc__ or "").splitlines()[0]
    operation = {"operationId": name, "summary": summary, "parameters": parameters, **body}
    answers = json.dumps(ANSWERS[name] | refused)
    answers = answers.replace("NodeTask", server.types[0].__name__).replace("NoTask", server.no_task)
    return operation | {"responses": json.loads(answers)}


def descriptions() -> dict[str, str]:
    """Return the text of every file."""
    nothing: Any = SimpleNamespace()  # no request is answered
    servers = {
        "openapi.json": (Api(nothing, nothing, nothing, nothing), NODES),
        "openapi-devices.json": (DeviceApi(nothing, b"", limits=nothing), DEVICES),
        "openapi-helper.json": (HelperApi(nothing, nothing, nothing), HELPER),
    }
    return {
        name: json.dumps(describe_api(service.app.routes, about), indent=1) + "\n"
        for name, (service, about) in servers.items()
    }


if __name__ == "__main__":
    for name, text in descriptions().items():
        (Path(sys.argv[1]) / name).write_text(text)
