"""Write docs/openapi.json, the description of the protocol, from the routes and the types of the coordinator.

python .ci/openapi.py docs/openapi.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter
from starlette.routing import BaseRoute, Route

from fedrecon._src.deploy.http_server import MAX_WAIT, Api, Problem
from fedrecon._src.deploy.node_keys import FIELDS
from fedrecon._src.deploy.tasks import DIGEST, TICKET, NodeTask

BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
UNCHANGED = {"304": {"description": "`If-None-Match` names what would be sent."}}
PARAMETERS: dict[str, dict[str, Any]] = {
    "digest": {"type": "string", "pattern": f"^{DIGEST}$"},
    "number": {"type": "integer", "minimum": 0, "maximum": 10**9 - 1},
    "ticket": {"type": "string", "pattern": f"^{TICKET}$"},
    "wait": {"type": "integer", "minimum": 0, "maximum": 99_999, "default": 0},
}
QUERIES = {"check_in": ("wait",)}
ANSWERS: dict[str, dict[str, Any]] = {  # by endpoint and status
    "get_plan": {"200": {"description": "The plan.", "content": {"application/json": {"schema": {}}}}} | UNCHANGED,
    "check_in": {
        "200": {
            "description": "A task.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/NodeTask"}}},
        },
        "204": {
            "description": f"No task yet. The server waits for one as long as `wait` says, at most {MAX_WAIT:g} s.",
            "headers": {"Retry-After": {"schema": {"type": "integer"}, "required": True}},
        },
    },
    "get_broadcast": {"200": {"description": "The message, which has this digest.", "content": BYTES}} | UNCHANGED,
    "put_report": {
        "200": {"description": "The report was received before, and counts once."},
        "201": {"description": "The report was received."},
    },
}


def describe_api(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """Return the description of a coordinator's routes, as OpenAPI 3.1 defines it."""
    paths: dict[str, Any] = {}
    for route in routes:
        assert isinstance(route, Route)
        methods = (route.methods or set()) - {"HEAD"}
        paths[route.path] = {method.lower(): _operation(route, method) for method in sorted(methods)}
    schemas = {kind.__name__: TypeAdapter(kind).json_schema() for kind in (NodeTask, Problem)}
    headers = {
        name: {
            "name": name,
            "in": "header",
            "required": True,
            "schema": {"type": "string", "pattern": f"^{pattern.pattern}$"},
        }
        for name, pattern in FIELDS.items()
    }
    info = {
        "title": "fedrecon coordinator",
        "version": "1",
        "description": "Every request is signed with the node's Ed25519 key: docs/deploy.md, The protocol.",
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    }
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": schemas, "parameters": headers},
    }


def _operation(route: Route, method: str) -> dict[str, Any]:
    """Describe what one method of one path does."""
    name = route.endpoint.__name__
    places = dict.fromkeys(re.findall(r"{(\w+)}", route.path), "path") | dict.fromkeys(QUERIES.get(name, ()), "query")
    parameters: list[dict[str, Any]] = [{"$ref": f"#/components/parameters/{header}"} for header in FIELDS]
    parameters += [
        {"name": key, "in": place, "required": place == "path", "schema": PARAMETERS[key]}
        for key, place in places.items()
    ]
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    refused = {"4XX": {"description": "The request was refused and has no effect.", "content": problem}}
    body = {"requestBody": {"required": True, "content": BYTES}} if method == "PUT" else {}
    summary = (route.endpoint.__doc__ or "").splitlines()[0]
    operation = {"operationId": name, "summary": summary, "parameters": parameters, **body}
    return operation | {"responses": ANSWERS[name] | refused}


if __name__ == "__main__":
    nothing: Any = SimpleNamespace()  # no request is answered
    text = json.dumps(describe_api(Api(nothing, nothing, nothing, nothing).app.routes), indent=1) + "\n"
    Path(sys.argv[1]).write_text(text)
