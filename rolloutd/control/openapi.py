"""The OpenAPI 3.1 document: the routes, and what pydantic says of the models of their bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from rolloutd.control import wire_errors
from rolloutd.control.daemons import wire_daemons
from rolloutd.control.routes import Route

ERROR_DESCRIPTIONS = {
    "400": "The request is malformed: unknown keys, wrong types, invalid JSON.",
    "401": "The socket gives no peer credential.",
    "403": "Not allowed; the error names who may.",
    "404": "Not found.",
    "409": "Refused; the error gives the reason.",
    "413": "The body is too big.",
    "422": "The plan has mistakes; lists them all.",
    "429": "The caller has too many connections, requests, streams or uploads open.",
    "503": "The store cannot write, or the name service does not answer; nothing has changed.",
}

_PATH_PARAMETER = re.compile(r"{(\w+)}")


@lru_cache(maxsize=1)
def openapi_document(routes: Sequence[Route], version: str) -> wire_daemons.OpenApi:
    """Return the document; the first call takes a quarter of a second."""
    models: list[tuple[object, JsonSchemaMode, TypeAdapter[Any]]] = [
        (wire_errors.Error, "serialization", TypeAdapter(wire_errors.Error))
    ]
    for each in routes:
        models.append((each.handler, "serialization", TypeAdapter(each.response_type)))
        if each.body_model is not None:
            models.append((each.handler, "validation", TypeAdapter(each.body_model)))
    schemas, definitions = TypeAdapter.json_schemas(models, ref_template="#/components/schemas/{model}")
    errors = {
        status: {"description": text, "content": _json(schemas[wire_errors.Error, "serialization"])}
        for status, text in ERROR_DESCRIPTIONS.items()
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        answer, body = schemas[route.handler, "serialization"], schemas.get((route.handler, "validation"))
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, answer, body, errors)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rolloutd",
            "version": version,
            "description": "The daemon's API on its Unix socket. The peer credential identifies the caller.",
        },
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def _operation(route: Route, answer: Any, body: Any, errors: dict[str, Any]) -> dict[str, Any]:
    content = {"application/x-ndjson": {"schema": answer}} if route.streams else _json(answer)
    statuses = ["200", "201"] if route.creates else ["200"]
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "x-who-may": route.access.callers,
        "parameters": _parameters(route),
        "responses": {status: {"description": "Done.", "content": content} for status in statuses} | errors,
    }
    if body is not None:
        operation["requestBody"] = {"required": not route.is_body_optional, "content": _json(body)}
    elif route.upload_type is not None:
        upload = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": {route.upload_type: upload}}
    return operation


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameters(route: Route) -> list[dict[str, Any]]:
    path_parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(route.path)
    ]
    query = route.query_model.model_json_schema().get("properties", {})
    return path_parameters + [
        {"name": name, "in": "query", "required": False, "schema": shape} for name, shape in query.items()
    ]
