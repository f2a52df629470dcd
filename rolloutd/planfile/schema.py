"""JSON Schema of a file, made from its models, with lookups.

Editors use it (yaml-language-server), the reference in docs/ is made from it, and mistakes quote what it
allows.  It knows models only as pydantic describes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from pydantic import BaseModel

from rolloutd.planfile.document import JSON, Path, Value

DIALECT = "https://json-schema.org/draft/2020-12/schema"

MAX_REFERENCES = 10
"""References followed from one place: the models are far flatter."""


@lru_cache(maxsize=8)
def schema_of_model(model: type[BaseModel], title: str) -> dict[str, JSON]:
    """Return the JSON Schema of a file; callers must not change it."""
    schema = model.model_json_schema(by_alias=True)
    _drop_noise(schema)
    return {"$schema": DIALECT, "title": title, **schema}


def _drop_noise(node: JSON) -> None:
    """Drop pydantic's titles, and defaults that mean nothing to a user."""
    match node:
        case dict():
            if isinstance(node.get("title"), str):
                del node["title"]
            if "default" in node and (node["default"] is None or isinstance(node["default"], dict)):
                del node["default"]
            if "patternProperties" in node:
                node["additionalProperties"] = False
            for child in node.values():
                _drop_noise(child)
        case list():
            for child in node:
                _drop_noise(child)


def schema_at(schema: dict[str, JSON], path: Path) -> dict[str, JSON] | None:
    """Return the schema at a path, references followed; None where there is none."""
    node: JSON = resolve_reference(schema, schema)
    for part in path:
        node = _child_schema(schema, node, part)
        if node is None:
            return None
    return node if isinstance(node, dict) else None


def resolve_reference(schema: dict[str, JSON], node: dict[str, JSON]) -> dict[str, JSON]:
    """Return the node with its reference followed; keys next to the reference win."""
    for _ in range(MAX_REFERENCES):
        reference = node.get("$ref")
        if reference is None:
            break
        target = schema["$defs"][reference.rsplit("/", 1)[-1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def known_keys(schema: dict[str, JSON], path: Path) -> tuple[str, ...]:
    node = schema_at(schema, path)
    choices = () if node is None else (node, *node.get("anyOf", ()))
    return tuple(key for choice in choices for key in resolve_reference(schema, choice).get("properties", ()))


def value_schema(node: dict[str, JSON]) -> dict[str, JSON] | None:
    """Return the schema of a mapping's values; None where its keys are fixed."""
    for value in (*node.get("patternProperties", {}).values(), node.get("additionalProperties")):
        if isinstance(value, dict):
            return value
    return None


def values_of_format(schema: dict[str, JSON], root: Value, name: str) -> Iterator[tuple[Path, Value, Value]]:
    """Yield the values whose schema has this `format`, each with its path and its parent."""
    pending: list[tuple[Path, Value, dict[str, JSON]]] = [((), root, schema)]
    while pending:
        path, parent, node = pending.pop()
        items = (
            parent.children.items() if isinstance(parent.children, dict) else enumerate(parent.children or ())
        )
        for part, value in items:
            child = _child_schema(schema, node, part)
            if child is None:
                continue
            if child.get("format") == name:
                yield (*path, part), value, parent
            pending.append(((*path, part), value, child))


def json_values_of_format(
    schema: dict[str, JSON], content: JSON, name: str, at: Path = ()
) -> Iterator[tuple[Path, JSON]]:
    """Yield the values of stored content whose schema has this `format`, each with its path; no empty one.

    `at` is the place of the content in the schema.
    """
    node = schema_at(schema, at)
    if node is not None:
        yield from _json_values(schema, node, content, name, ())


def _json_values(
    schema: dict[str, JSON], node: dict[str, JSON], content: JSON, name: str, path: Path
) -> Iterator[tuple[Path, JSON]]:
    if node.get("format") == name and content:
        yield path, content
    items = content.items() if isinstance(content, Mapping) else ()
    for part, value in enumerate(content) if isinstance(content, list | tuple) else items:
        child = _child_schema(schema, node, part)
        if child is not None:
            yield from _json_values(schema, child, value, name, (*path, part))


def _child_schema(schema: dict[str, JSON], node: dict[str, JSON], part: str | int) -> dict[str, JSON] | None:
    for choice in (node, *node.get("anyOf", ())):
        choice = resolve_reference(schema, choice)
        child = choice.get("items") if isinstance(part, int) else choice.get("properties", {}).get(part)
        if child is None and isinstance(part, str):
            child = value_schema(choice)
        if isinstance(child, dict):
            return resolve_reference(schema, child)
    return None
