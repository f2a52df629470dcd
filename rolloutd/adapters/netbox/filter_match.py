"""Comparison of returned objects with the filter: a server that ignores a filter answers with every object.

It compares what an object shows; NetBox alone knows a search, a tenant group or the children of a role.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rolloutd.adapters.netbox.custom_fields import CustomField
from rolloutd.adapters.netbox.objects import CUSTOM_FIELDS, TAGS, NetboxObject
from rolloutd.adapters.netbox.registration import CUSTOM_FILTER
from rolloutd.ports import JSON, STATUS

NULL: Final = "null"
"""Value of a filter by which NetBox finds objects without a value."""

_NESTED = frozenset({"site", "tenant", "cluster", "device_type"})
"""Fields that are compared by slug or name; a role or a platform also means its children."""

_NUMBERS = frozenset({"integer", "decimal", "object", "multiobject"})

_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)

_Compare = Callable[[Any, Any], bool]

_COMPARISONS: Mapping[str, _Compare] = {
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


def compared_fields(filters: Mapping[str, JSON]) -> frozenset[str]:
    bases = {name.partition("__")[0] for name in filters}
    fields = {"tag": TAGS} | {name: name for name in (*_NESTED, STATUS)}
    found = {fields[base] for base in bases if base in fields}
    return frozenset(found | ({CUSTOM_FIELDS} if any(base.startswith("cf_") for base in bases) else set()))


def find_mismatch(
    found: NetboxObject, filters: Mapping[str, JSON], custom: Mapping[str, CustomField]
) -> str | None:
    """Return the name of a filter that an object does not match; None if all match or are not compared."""
    return next((name for name, value in filters.items() if not _matches(found, name, value, custom)), None)


def _matches(found: NetboxObject, name: str, value: JSON, custom: Mapping[str, CustomField]) -> bool:
    base, _, lookup = name.partition("__")
    # The server strips a value too.
    wanted = [str(each).strip() for each in (value if isinstance(value, list) else [value])]
    if NULL in wanted:
        return True
    if match := CUSTOM_FILTER.fullmatch(name):
        return _matches_custom(found.custom_fields.get(match[1]), custom[match[1]], lookup, wanted)
    if base == "has_primary_ip":
        return bool(found.addresses) == (wanted == ["true"])
    if base == "tag" and not lookup:
        return set(wanted) <= found.tags
    values = _values(found, base)
    if name == "name":
        lookup = "ie"
    return values is None or _compare(values, lookup, wanted)


def _values(found: NetboxObject, base: str) -> Iterable[str] | None:
    """Return the object's values of a field of the server; None if they are not compared."""
    match base:
        case "tag":
            return found.tags
        case "id":
            return (str(found.id),)
        case "name":
            return (found.name or "",)
        case _ if base in (STATUS, *_NESTED):
            return (found.values[base] or "",)
    return None


def _matches_custom(value: JSON, field: CustomField, lookup: str, wanted: Sequence[str]) -> bool:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if field.type == "datetime" or (field.type == "date" and not all(map(_DATE.fullmatch, wanted))):
        return True  # the same instant has several texts
    if field.type == "boolean":
        return [str(each).lower() for each in values] == wanted
    if field.type in _NUMBERS:
        return _compare([float(each) for each in values], lookup, [float(each) for each in wanted])
    return _compare([str(each) for each in values], "ic" if field.is_loose_text else lookup, wanted)


def _compare(values: Iterable[Any], lookup: str, wanted: Sequence[Any]) -> bool:
    pairs = [(value, each) for value in values for each in wanted]
    if lookup in ("ic", "ie", "isw") and not all(text.isascii() for pair in pairs for text in pair):
        return True  # the server's database has its own rules for the case of other letters
    compare = _COMPARISONS[lookup]
    return any(compare(value, each) for value, each in pairs) != (lookup == "n")
