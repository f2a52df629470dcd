"""The JSON Schema of a file, made from its types, and ways to look things up in it.

Editors use it (yaml-language-server), the reference in docs/ is drawn from it,
and mistakes ask it what would have been allowed at a path.  It knows models
only as pydantic describes them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from rolloutd.planfile.wording import Path

JSON = Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"

MAX_REFERENCES = 10
"""References followed from one place: the models are far flatter."""


@lru_cache(maxsize=8)
def schema_of_model(model: type[BaseModel], title: str) -> dict[str, JSON]:
    """Return the JSON Schema of a file; callers must not change it."""
    schema = model.model_json_schema(by_alias=True)
    _tidy(schema)
    return {"$schema": DIALECT, "title": title, **schema}


def _tidy(node: JSON) -> None:
    """Drop what pydantic adds for itself: titles, and defaults that say nothing to a person."""
    match node:
        case dict():
            if isinstance(node.get("title"), str):
                del node["title"]
            if "default" in node and (node["default"] is None or isinstance(node["default"], dict)):
                del node["default"]
            if "patternProperties" in node:
                node["additionalProperties"] = False
            for child in node.values():
                _tidy(child)
        case list():
            for child in node:
                _tidy(child)


def at_path(schema: dict[str, JSON], path: Path) -> dict[str, JSON] | None:
    """Return what the schema says of a path, references followed; None where it says nothing."""
    node: JSON = resolved(schema, schema)
    for part in path:
        node = _step_into(schema, node, part)
        if node is None:
            return None
    return node if isinstance(node, dict) else None


def resolved(schema: dict[str, JSON], node: dict[str, JSON]) -> dict[str, JSON]:
    """Return the node with its reference followed; what stands beside the reference wins."""
    for _ in range(MAX_REFERENCES):
        reference = node.get("$ref")
        if reference is None:
            break
        target = schema["$defs"][reference.rsplit("/", 1)[-1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def known_keys(schema: dict[str, JSON], path: Path) -> tuple[str, ...]:
    """Return the keys that a mapping at the path may have, in the order of the model."""
    node = at_path(schema, path)
    return tuple(node.get("properties", ())) if node is not None else ()


def values_of(node: dict[str, JSON]) -> dict[str, JSON] | None:
    """Return what the values of a mapping with free keys are; None where the keys are not free."""
    for value in (*node.get("patternProperties", {}).values(), node.get("additionalProperties")):
        if isinstance(value, dict):
            return value
    return None


def _step_into(schema: dict[str, JSON], node: dict[str, JSON], part: str | int) -> dict[str, JSON] | None:
    for choice in (node, *node.get("anyOf", ())):
        choice = resolved(schema, choice)
        child = choice.get("items") if isinstance(part, int) else choice.get("properties", {}).get(part)
        if child is None and isinstance(part, str):
            child = values_of(choice)
        if isinstance(child, dict):
            return resolved(schema, child)
    return None
