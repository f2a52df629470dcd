"""A small judge of JSON against the schemas of our OpenAPI document; no more of JSON Schema than that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def schema_errors(
    value: Any, schema: Mapping[str, Any], document: Mapping[str, Any], at: str = "$"
) -> Iterator[str]:
    """Yield what is wrong with a value, each with its place."""
    if "$ref" in schema:
        yield from schema_errors(value, _resolve_ref(schema["$ref"], document), document, at)
        return
    if "anyOf" in schema:
        if all(list(schema_errors(value, each, document, at)) for each in schema["anyOf"]):
            yield f"{at}: {value!r} is none of {schema['anyOf']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is not in {schema['enum']}"
    if "type" in schema and not _has_type(value, schema["type"]):
        yield f"{at}: {value!r} is no {schema['type']}"
        return
    if isinstance(value, dict):
        yield from _object_errors(value, schema, document, at)
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from schema_errors(item, schema.get("items", {}), document, f"{at}[{number}]")


def _object_errors(
    value: dict[str, Any], schema: Mapping[str, Any], document: Mapping[str, Any], at: str
) -> Iterator[str]:
    known = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{at}: {key} is missing"
    for key, item in value.items():
        if key in known:
            yield from schema_errors(item, known[key], document, f"{at}.{key}")
        elif more is False:
            yield f"{at}: {key} is unknown"
        elif isinstance(more, Mapping):
            yield from schema_errors(item, more, document, f"{at}.{key}")


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def _resolve_ref(reference: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found
