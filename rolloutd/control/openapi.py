"""The OpenAPI 3.1 document, generated from the route table.

Response schemas come from the TypedDicts, request schemas from the models that
check requests.  It knows types, not handlers.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from rolloutd.control import wire
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
    "503": "The store cannot write; nothing has changed.",
}

_PATH_PARAMETER = re.compile(r"{(\w+)}")
_SCHEMAS = "#/components/schemas/"


def openapi_document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    json_schema(wire.Error, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rolloutd",
            "version": version,
            "description": "The daemon's API on its Unix socket. The peer credential identifies the caller.",
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def json_schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a response type; TypedDicts are added to `schemas` and referenced.

    Raises TypeError for a type without JSON.
    """
    if kind is Any:
        return {}
    if is_typeddict(kind):
        return _schema_reference(kind, schemas)
    simple = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}.get(kind)
    if simple is not None:
        return {"type": simple}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return json_schema(arguments[0], schemas)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [json_schema(each, schemas) for each in arguments]}
    if origin is list:
        return {"type": "array", "items": json_schema(arguments[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": json_schema(arguments[1], schemas)}
    raise TypeError(f"{kind!r}: no JSON type; use a TypedDict")


def _schema_reference(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in schemas:
        schemas[name] = {}
        hints = get_type_hints(kind, include_extras=True)
        schemas[name] = {
            "type": "object",
            "description": (kind.__doc__ or "").strip(),
            "properties": {key: json_schema(hint, schemas) for key, hint in hints.items()},
            "required": sorted(key for key, hint in hints.items() if get_origin(hint) is not NotRequired),
            "additionalProperties": False,
        }
    return {"$ref": _SCHEMAS + name}


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    response_schema = json_schema(route.response_type, schemas)
    media_type = "application/x-ndjson" if route.streams else "application/json"
    statuses = ["200", "201"] if route.creates else ["200"]
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "x-who-may": route.access.callers,
        "parameters": _parameters(route),
        "responses": {
            **{
                status: {"description": "Done.", "content": {media_type: {"schema": response_schema}}}
                for status in statuses
            },
            **{
                status: {
                    "description": text,
                    "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}},
                }
                for status, text in ERROR_DESCRIPTIONS.items()
            },
        },
    }
    if route.body_model is not None:
        operation["requestBody"] = {
            "required": not route.is_body_optional,
            "content": {"application/json": {"schema": _request_schema(route.body_model, schemas)}},
        }
    elif route.upload_type is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {route.upload_type: {"schema": {"type": "string", "format": "binary"}}},
        }
    return operation


def _parameters(route: Route) -> Sequence[Mapping[str, Any]]:
    path_parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(route.path)
    ]
    query_schema = route.query_model.model_json_schema(ref_template=_SCHEMAS + "{model}")
    return path_parameters + [
        {"name": name, "in": "query", "required": False, "schema": shape}
        for name, shape in query_schema.get("properties", {}).items()
    ]


def _request_schema(body: type[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    # The suffix keeps a request apart from a response of the same name.
    name = f"{body.__name__}Request"
    if name not in schemas:
        shape = body.model_json_schema(ref_template=_SCHEMAS + "{model}")
        schemas.update(shape.pop("$defs", {}))
        schemas[name] = shape
    return {"$ref": _SCHEMAS + name}
