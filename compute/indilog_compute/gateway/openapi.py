"""The OpenAPI description: the gateway's own routes, and one path for each deployed function and
operation. `GatewayApp.openapi` calls `describe`.
"""

from __future__ import annotations

from typing import Any, Final

from indilog.base.deployed import AppInfo, FunctionSpec
from indilog_compute.gateway.problems import PROBLEM_SCHEMA

_PROBLEM: Final = {
    "description": "The request failed; `detail` says why.",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def describe(base: dict[str, Any], apps: list[AppInfo]) -> dict[str, Any]:
    """Return `base`, which describes the fixed routes, with the functions and operations of `apps`
    added.
    """
    document = dict(base)
    paths = dict(base.get("paths", {}))
    components = dict(base.get("components", {}))
    schemas = dict(components.get("schemas", {}))
    schemas["Problem"] = PROBLEM_SCHEMA
    for app in apps:
        for function in app.functions:
            prefix = f"{app.name}.{function.name}."
            arguments = _hoisted(function.arguments, prefix, schemas)
            result = _hoisted(function.result, prefix, schemas)
            paths[f"/functions/{app.name}/{function.name}"] = {
                "post": _operation(app, function, arguments, result)
            }
        for operation in app.operations:
            prefix = f"{app.name}.{operation.name}."
            arguments = _hoisted(operation.arguments, prefix, schemas)
            result = _hoisted(operation.result, prefix, schemas)
            paths[f"/operations/{app.name}/{operation.name}"] = {
                "post": _described(app, operation, arguments, result)
            }
    components["schemas"] = schemas
    document["paths"] = paths
    document["components"] = components
    return document


def _operation(
    app: AppInfo, function: FunctionSpec, arguments: dict[str, Any], result: dict[str, Any]
) -> dict[str, Any]:
    described = _described(app, function, arguments, result)
    accepted = {"description": "Accepted; ask GET /invocations/{invocation} for its outcome."}
    return {
        **described,
        "parameters": [
            _query("async", "boolean", "Do not wait: answer 202 with an invocation id."),
            _query("delay", "number", "With async: start after that many seconds."),
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": {"type": "string", "maxLength": 255},
                "description": "Requests with the same key are one call with one outcome.",
            },
        ],
        "responses": {**described["responses"], "202": accepted},
    }


def _described(
    app: AppInfo, function: FunctionSpec, arguments: dict[str, Any], result: dict[str, Any]
) -> dict[str, Any]:
    """Return the parts that the descriptions of functions and operations have in common."""
    return {
        "tags": [f"app {app.name}"],
        "operationId": f"{app.name}.{function.name}",
        "summary": function.doc.partition("\n")[0] or f"{app.name}.{function.name}",
        "description": function.doc,
        "requestBody": {"content": {"application/json": {"schema": arguments}}},
        "responses": {
            "200": {
                "description": "What it returned.",
                "content": {"application/json": {"schema": result}},
            },
            "422": _PROBLEM,
            "default": _PROBLEM,
        },
    }


def _query(name: str, kind: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": kind}, "description": description}


def _hoisted(schema: dict[str, Any], prefix: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` with its `$defs` moved to `schemas`, under names unique to this function."""
    moved = _moved(schema, prefix)
    for name, definition in moved.pop("$defs", {}).items():
        schemas[prefix + name] = definition
    result: dict[str, Any] = moved
    return result


def _moved(value: Any, prefix: str) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _reference(key, inner, prefix) for key, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, prefix) for inner in value]
    return value


def _reference(key: str, value: Any, prefix: str) -> Any:  # noqa: ANN401 - any JSON value
    start = "#/$defs/"
    if key == "$ref" and isinstance(value, str) and value.startswith(start):
        return f"#/components/schemas/{prefix}{value.removeprefix(start)}"
    return _moved(value, prefix)
