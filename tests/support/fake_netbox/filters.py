"""Filters of a list as NetBox 4.6 applies them: it ignores a filter, and a boolean, that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

JSON = Any

NESTED = ("site", "tenant", "role", "platform", "device_type", "cluster", "manufacturer")

_NEGATION = ("n",)
_ORDER = ("n", "lt", "lte", "gt", "gte")
_TEXT = ("n", "ic", "ie", "isw")
_LOOKUPS = {
    **dict.fromkeys(("integer", "decimal", "date", "datetime"), _ORDER),
    "object": _NEGATION,
    "select": _TEXT,
}
"""Lookups of custom fields by type, besides the plain one; a text has them only if its logic is exact."""

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "": lambda value, wanted: value == wanted,
    "n": lambda value, wanted: value == wanted,
    "lt": lambda value, wanted: value < wanted,
    "lte": lambda value, wanted: value <= wanted,
    "gt": lambda value, wanted: value > wanted,
    "gte": lambda value, wanted: value >= wanted,
    "ic": lambda value, wanted: wanted.lower() in value.lower(),
    "ie": lambda value, wanted: wanted.lower() == value.lower(),
    "isw": lambda value, wanted: value.lower().startswith(wanted.lower()),
}

_BOOLEANS = {"true": True, "false": False}


class BadValue(Exception):
    """The server answers with HTTP status 400."""


def matches(record: Mapping[str, JSON], query: Any, custom_fields: Iterable[Mapping[str, JSON]]) -> bool:
    """Return whether the list has the object; `query` is the request's."""
    fields = {each["name"]: each for each in custom_fields}
    return all(_matches(record, name, query.getall(name), fields) for name in set(query))


def values_of(record: Mapping[str, JSON], name: str) -> set[str]:
    """Return what a filter on a field of the server is compared with."""
    match name:
        case "tag":
            return {tag["slug"] for tag in record["tags"]}
        case "status":
            return {record["status"]["value"]}
        case "id" | "name":
            return {str(record[name])}
        case _:
            return {(record.get(name) or {}).get("slug", "")}


def _matches(
    record: Mapping[str, JSON], name: str, wanted: list[str], fields: Mapping[str, Mapping[str, JSON]]
) -> bool:
    base, _, lookup = name.partition("__")
    if base.startswith("cf_"):
        field = fields.get(base.removeprefix("cf_"))
        return field is None or _matches_custom(record, field, lookup, wanted)
    if name == "has_primary_ip":
        expected = _BOOLEANS.get(wanted[-1].lower())
        return expected is None or (record["primary_ip"] is not None) == expected
    if name == "q":
        return wanted[-1].strip().lower() in (record["name"] or "").lower()
    if base not in ("tag", "status", "id", "name", *NESTED):
        return True
    found = values_of(record, base)
    if name == "tag":
        return set(wanted) <= found
    if name == "name":
        lookup = "ie"
    hit = any(_COMPARE[lookup](value, each) for value in found for each in wanted)
    return hit != (lookup == "n")


def _matches_custom(
    record: Mapping[str, JSON], field: Mapping[str, JSON], lookup: str, wanted: list[str]
) -> bool:
    kind, logic = field["type"]["value"], field["filter_logic"]["value"]
    object_type = "dcim.device" if "device_type" in record else "virtualization.virtualmachine"
    is_text = kind in ("text", "longtext", "url")
    known = _TEXT if is_text and logic == "exact" else _LOOKUPS.get(kind, ())
    if (
        kind == "json"
        or logic == "disabled"
        or object_type not in field["object_types"]
        or lookup not in ("", *known)
    ):
        return True
    if kind == "boolean":
        expected = _BOOLEANS.get(wanted[-1].lower())
        return expected is None or record["custom_fields"].get(field["name"]) is expected
    value = record["custom_fields"].get(field["name"])
    values = [each["id"] if isinstance(each, Mapping) else each for each in _list_of(value)]
    compare = _COMPARE["ic" if is_text and logic == "loose" else lookup]
    numbers = [_parse(kind, each) for each in wanted]
    hit = any(compare(each, number) for each in values for number in numbers)
    return hit != (lookup == "n")


def _list_of(value: JSON) -> list[JSON]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _parse(kind: str, text: str) -> JSON:
    if kind not in ("integer", "decimal", "object", "multiobject"):
        return text
    try:
        return float(text)
    except ValueError:
        raise BadValue("Enter a number.") from None
