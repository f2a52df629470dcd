"""`explain`: the documentation of one field of plan files or settings, from their schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation
from rolloutd.cli.output import print_line
from rolloutd.texts.formats import join_limited, suggest_name

Schema = Mapping[str, Any]

ITEMS = "[]"
"""Mark of a field that holds a list; a path leads through it without naming an item."""

_INDEX = re.compile(r"\[\d*\]")
"""The item of a list in a path, as documents and errors write it: `verify[]`, `maintain[0]`."""

MAX_DEPTH = 12
"""Levels of --recursive: no file nests deeper, and a schema that contains itself ends."""

MAX_FIELDS_NAMED = 8
"""Fields in an error; `explain` of the parent lists all of them."""

MAX_COMPLETED_DEPTH = 4
"""Levels of the paths that completion offers: plan.spec.gates.start.owner."""


def register(commands: CommandGroup) -> None:
    summary = "explain a field of plan files (plan.spec.guard) or settings (settings.pools)"
    parser = commands.add_command("explain", explain, summary, formats=("json",))
    parser.argument("field", metavar="FIELD", text="plan or settings, then keys separated by dots")
    parser.flag("--recursive", text="list the fields below it at every level")


def explain(call: Invocation) -> None:
    """Print what a field is for, its type, its default and the fields below it."""
    path = str(call.args.field)
    kind, *keys = _INDEX.sub("", path).split(".")
    root = _schema_of(kind, path)
    field: Schema = root
    for depth, key in enumerate(keys):
        below = _properties(root, field)
        if key not in below and _is_name_of_map(root, field, key, keys[depth + 1 :]):
            field = _values_of_map(root, field) or field
            continue
        if key not in below:
            parent = ".".join([kind, *keys[:depth]])
            fields = join_limited(list(below), MAX_FIELDS_NAMED)
            otherwise = f"its fields are {fields}" if below else "it has no fields"
            action = suggest_name(key, below, otherwise)
            raise exits.Exit(exits.USAGE, f"explain {path}: {parent} has no field '{key}'; {action}")
        field = below[key]
    shown = _describe(root, path, field)
    if call.print_data(shown, ()):
        return
    print_line(f"FIELD: {path} <{shown['type']}>")
    for title, key in (("ALLOWED", "allowed"), ("DEFAULT", "default"), ("EXAMPLE", "example")):
        if shown[key] is not None:
            print_line(f"{title}: {shown[key]}")
    print_line()
    print_line("DESCRIPTION:")
    print_line(f"  {shown['description'] or 'none'}")
    below = _properties(root, field)
    if below:
        print_line()
        print_line("FIELDS:")
        for line in _field_lines(root, field, 1, MAX_DEPTH if call.args.recursive else 1):
            print_line(line)


def field_names() -> Iterator[str]:
    for kind in ("plan", "settings"):
        root = _schema_of(kind, kind)
        yield from (kind, *_paths_below(root, root, kind, 1))


def _paths_below(root: Schema, field: Schema, path: str, level: int) -> Iterator[str]:
    for name, each in _properties(root, field).items():
        yield f"{path}.{name}"
        if level < MAX_COMPLETED_DEPTH:
            yield from _paths_below(root, each, f"{path}.{name}", level + 1)


def _is_name_of_map(root: Schema, field: Schema, key: str, rest: Sequence[str]) -> bool:
    """Return whether a part of a path names an entry of a map, as in settings.teams.NAME.windows."""
    values = _values_of_map(root, field)
    if values is None:
        return False
    return key == "NAME" or (bool(rest) and rest[0] in _properties(root, values))


def _values_of_map(root: Schema, field: Schema) -> Schema | None:
    """Return the schema of a map's values; None for what is not a map."""
    target = _resolve(root, field)
    patterns: Mapping[str, Schema] = target.get("patternProperties", {})
    found = target.get("additionalProperties") or next(iter(patterns.values()), None)
    return found if isinstance(found, dict) and "properties" not in target else None


def _schema_of(kind: str, path: str) -> Schema:
    if kind == "plan":
        from rolloutd import planfile

        return planfile.schema()
    if kind == "settings":
        from rolloutd import settings

        return settings.schema()
    whole = f", as in plan.{path}" if kind in ("spec", "metadata") else ""
    raise exits.Exit(exits.USAGE, f"explain: '{kind}' is unknown; begin with plan or settings{whole}")


def _describe(root: Schema, path: str, field: Schema) -> dict[str, Any]:
    default, examples = field.get("default"), field.get("examples")
    target = _resolve(root, field)
    return {
        "field": path,
        "type": _type_name(root, field),
        "description": field.get("description") or target.get("description"),
        "default": None if default in (None, [], {}) else default,
        "allowed": ", ".join(map(str, target["enum"])) if "enum" in target else _limits(target),
        "example": examples[0] if examples else None,
        "fields": [
            {"name": name, "type": _type_name(root, each), "description": _summary(root, each)}
            for name, each in _properties(root, field).items()
        ],
        "required": sorted(_holder(root, field).get("required", ())),
    }


def _field_lines(root: Schema, field: Schema, level: int, levels: int) -> Iterator[str]:
    indent = "  " * level
    required = frozenset(_holder(root, field).get("required", ()))
    for name, each in _properties(root, field).items():
        mark = " -required-" if name in required else ""
        yield f"{indent}{name} <{_type_name(root, each)}>{mark}"
        if level == levels == 1:
            yield f"{indent}    {_summary(root, each)}"
        elif level < levels:
            yield from _field_lines(root, each, level + 1, levels)


def _summary(root: Schema, field: Schema) -> str:
    return str(field.get("description") or _resolve(root, field).get("description") or "")


def _limits(field: Schema) -> str | None:
    low, high = field.get("minimum"), field.get("maximum")
    return (
        None
        if low is None and high is None
        else f"{'' if low is None else low} to {'' if high is None else high}"
    )


def _resolve(root: Schema, field: Schema) -> Schema:
    """Return what a reference names; the field itself without one."""
    while "$ref" in field:
        field = root["$defs"][field["$ref"].rsplit("/", 1)[-1]]
    return field


def _holder(root: Schema, field: Schema) -> Schema:
    """Return the schema whose properties are the fields below this one: its own, or those of its items."""
    field = _resolve(root, field)
    if field.get("type") == "array":
        return _holder(root, field.get("items", {}))
    values = _values_of_map(root, field)
    return field if values is None else _holder(root, values)


def _properties(root: Schema, field: Schema) -> Mapping[str, Schema]:
    """Return the fields below one; of alternatives those of each."""
    holder = _holder(root, field)
    found: dict[str, Schema] = dict(holder.get("properties", {}))
    for each in (*holder.get("anyOf", ()), *holder.get("oneOf", ()), *holder.get("allOf", ())):
        found |= _properties(root, each)
    return found


def _type_name(root: Schema, field: Schema) -> str:
    resolved = _resolve(root, field)
    kind = resolved.get("type")
    if kind == "array":
        return f"{ITEMS}{_type_name(root, resolved.get('items', {}))}"
    values = _values_of_map(root, resolved)
    if values is not None:
        return f"map of {_type_name(root, values)}"
    alternatives = (*resolved.get("anyOf", ()), *resolved.get("oneOf", ()))
    if kind is None and alternatives:
        return " or ".join(dict.fromkeys(_type_name(root, each) for each in alternatives))
    return " or ".join(kind) if isinstance(kind, list) else str(kind or "any")
