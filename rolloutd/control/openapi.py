"""The OpenAPI 3.1 document, made from the table of routes and the types of the wire.

Nothing is written by hand twice: the answers' schemas come from the TypedDicts,
the requests' from the models that check them.  It knows types, not handlers.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from rolloutd.control import wire
from rolloutd.control.routes import Route

REFUSALS = {
    "400": "The request is wrong: unknown keys, wrong types, no JSON.",
    "401": "The socket says nothing of who asks.",
    "403": "Not allowed; says who may.",
    "404": "There is no such thing.",
    "409": "The answer is no; says why.",
    "413": "The body is too big.",
    "422": "The plan has mistakes; lists them all.",
    "503": "The store cannot write; nothing was changed.",
}

_PART = re.compile(r"{(\w+)}")
_SCHEMAS = "#/components/schemas/"


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the document of these routes, ready for JSON."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    schema(wire.Error, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rolloutd",
            "version": version,
            "description": "The daemon's API on its Unix socket. Who asks is told by the peer credential.",
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def schema(kind: Any, into: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a type of the wire; TypedDicts are put `into` and referred to.

    Raises TypeError for a type that has no place on the wire.
    """
    if kind is Any:
        return {}
    if is_typeddict(kind):
        return _reference(kind, into)
    simple = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}.get(kind)
    if simple is not None:
        return {"type": simple}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return schema(arguments[0], into)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema(each, into) for each in arguments]}
    if origin is list:
        return {"type": "array", "items": schema(arguments[0], into)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema(arguments[1], into)}
    raise TypeError(f"{kind!r} has no place on the wire")


def _reference(kind: Any, into: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in into:
        into[name] = {}
        hints = get_type_hints(kind, include_extras=True)
        into[name] = {
            "type": "object",
            "description": (kind.__doc__ or "").strip(),
            "properties": {key: schema(hint, into) for key, hint in hints.items()},
            "required": sorted(key for key, hint in hints.items() if get_origin(hint) is not NotRequired),
            "additionalProperties": False,
        }
    return {"$ref": _SCHEMAS + name}


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    answer = schema(route.answer, schemas)
    media = "application/x-ndjson" if route.streams else "application/json"
    statuses = ["200", "201"] if route.creates else ["200"]
    found: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "x-who-may": route.who,
        "parameters": _parameters(route),
        "responses": {
            **{
                status: {"description": "Yes.", "content": {media: {"schema": answer}}} for status in statuses
            },
            **{
                status: {
                    "description": text,
                    "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}},
                }
                for status, text in REFUSALS.items()
            },
        },
    }
    if route.body is not None:
        found["requestBody"] = {
            "required": not route.optional_body,
            "content": {"application/json": {"schema": _model(route.body, schemas)}},
        }
    elif route.content is not None:
        found["requestBody"] = {
            "required": True,
            "content": {route.content: {"schema": {"type": "string", "format": "binary"}}},
        }
    return found


def _parameters(route: Route) -> Sequence[Mapping[str, Any]]:
    parts = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PART.findall(route.path)
    ]
    asked = route.query.model_json_schema(ref_template=_SCHEMAS + "{model}")
    return parts + [
        {"name": name, "in": "query", "required": False, "schema": shape}
        for name, shape in asked.get("properties", {}).items()
    ]


def _model(body: type[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    # The requests' names could be those of answers (a Freeze is sent and shown).
    name = f"{body.__name__}Request"
    if name not in schemas:
        shape = body.model_json_schema(ref_template=_SCHEMAS + "{model}")
        schemas.update(shape.pop("$defs", {}))
        schemas[name] = shape
    return {"$ref": _SCHEMAS + name}
