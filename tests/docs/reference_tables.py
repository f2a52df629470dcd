"""Draws the tables of the documents: the keys of the files from their schemas, the roles from the routes.

docs/plan-file.md, docs/settings.md, docs/artifacts.md and docs/api.md hold what this draws, and a
test holds them to it, so that the documents cannot fall behind the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rolloutd.control.routes import Route
from rolloutd.planfile.schema import resolve_reference, value_schema
from tests.support.awx_rights import REQUESTS

JSON = Any
Schema = dict[str, JSON]

BEGIN = "<!-- reference: begin -->"
END = "<!-- reference: end -->"

ROLES_BEGIN = "<!-- roles: begin -->"
ROLES_END = "<!-- roles: end -->"

AWX_BEGIN = "<!-- awx rights: begin -->"
AWX_END = "<!-- awx rights: end -->"

ROLES = ("outsider", "reader", "team", "owner", "submitter", "admin", "service")

_TYPE_NAMES = {
    "object": "mapping",
    "array": "list",
    "string": "text",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
}


def render_reference(schema: Schema, other: Schema | None = None, other_document: str = "") -> str:
    """Return the tables of all mappings of a file, from the outermost in, each table once.

    A table that `other_document` has of `other` is a link there.
    """
    paths_of, elsewhere = _tables(schema), _tables(other) if other is not None else {}
    sections, links = list[str](), list[str]()
    for table, paths in paths_of.items():
        named = ", ".join(f"`{path}`" for path in paths)
        if table in elsewhere:
            first = elsewhere[table][0]
            links.append(f"- {named}: [`{first}`]({other_document}#{_anchor(first)})")
            continue
        also = f"The same keys: {', '.join(f'`{path}`' for path in paths[1:])}.\n" if paths[1:] else ""
        heading = f"### `{paths[0]}`" if paths[0] else "### The file"
        sections.append("\n".join([heading, "", table, *([also] if also else [])]))
    if links:
        sections += ["### Keys of the plan file\n", *links, ""]
    return "\n".join([BEGIN, "", *sections, END])


def _tables(schema: Schema) -> dict[str, list[str]]:
    """Return the tables of a file, each with the paths of the mappings that have these keys."""
    found: dict[str, list[str]] = {}
    for path, node in _mappings(schema, "", schema):
        paths = found.setdefault(_table(schema, node), [])
        if path not in paths:
            paths.append(path)
    return found


def _anchor(path: str) -> str:
    return "".join(each for each in path.lower() if each.isalnum() or each in "-_")


def render_roles(routes: Sequence[Route]) -> str:
    """Return the table of what each role may call."""
    lines = [ROLES_BEGIN, f"| call | {' | '.join(ROLES)} |", f"|---{'|---' * len(ROLES)}|"]
    for route in routes:
        access = route.access
        cells = ("no", access.others, access.team, access.owner, access.owner, access.admin, access.others)
        lines.append(f"| `{route.method} {route.path}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ROLES_END])


def render_awx_rights() -> str:
    """Return the table of the roles that AWX's account needs, with the requests that each is for."""
    lines = [AWX_BEGIN, "| right | requests |", "|---|---|"]
    for role in dict.fromkeys(REQUESTS.values()):
        requests = [f"{method} {path}" for (method, path), needed in REQUESTS.items() if needed == role]
        lines.append(f"| {role} | `{'`, `'.join(requests)}` |")
    return "\n".join([*lines, AWX_END])


def _mappings(schema: Schema, path: str, node: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield every mapping that has keys, with its path as people write it."""
    node = resolve_reference(schema, node)
    if node.get("properties"):
        yield path, node
    for key, child in node.get("properties", {}).items():
        yield from _mappings(schema, f"{path}.{key}".lstrip("."), child)
    if isinstance(node.get("items"), dict):
        yield from _mappings(schema, f"{path}[]", node["items"])
    free = value_schema(node)
    if free is not None:
        yield from _mappings(schema, f"{path}.NAME", free)
    for choice in node.get("anyOf", ()):
        if "items" not in choice:
            yield from _mappings(schema, path, choice)


def _table(schema: Schema, node: Schema) -> str:
    required = set(node.get("required", ()))
    lines = [node.get("description", ""), ""]
    lines += ["| key | what it is | default | meaning |", "|---|---|---|---|"]
    for key, child in node["properties"].items():
        said = resolve_reference(schema, child)
        default = "must be given" if key in required else _default(said)
        lines.append(f"| `{key}` | {_value_kind(said)} | {default} | {said.get('description', '')} |")
    return "\n".join([*lines, ""])


def _default(said: Schema) -> str:
    match said.get("default"):
        case None:
            return "none"
        case bool() as value:
            return f"`{str(value).lower()}`"
        case list() as items if not items:
            return "none"
        case list() as items:
            return f"`[{', '.join(item if isinstance(item, str) else json.dumps(item) for item in items)}]`"
        case value:
            return f"`{value}`"


def _value_kind(said: Schema) -> str:
    """Say in a word or two what a value is."""
    if "enum" in said:
        return " or ".join(f"`{value}`" for value in said["enum"])
    if "const" in said:
        return f"`{said['const']}`"
    if any("h)?" in choice.get("pattern", "") for choice in (said, *said.get("anyOf", ()))):
        return "duration"
    kinds = said.get("type", [choice.get("type", "object") for choice in said.get("anyOf", ())])
    named = [
        _TYPE_NAMES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in _TYPE_NAMES
    ]
    return " or ".join(dict.fromkeys(named))
