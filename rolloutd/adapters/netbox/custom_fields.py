"""Checks of custom fields that the settings name, before NetBox ignores an unknown one silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutd.adapters.netbox.http import NetboxSession
from rolloutd.adapters.netbox.objects import CUSTOM_FIELDS, OBJECT_TYPES, read_shape
from rolloutd.adapters.netbox.registration import CUSTOM_FILTER
from rolloutd.adapters.netbox.rest import list_all
from rolloutd.ports import JSON

PATH = "/api/extras/custom-fields/"

_LISTS = frozenset({"multiselect", "multiobject"})
_ORDERED = frozenset({"integer", "decimal", "date", "datetime"})
_TEXTS = frozenset({"text", "longtext", "url", "select"})
_LOOKUPS = {
    **dict.fromkeys(("__lt", "__lte", "__gt", "__gte"), _ORDERED),
    **dict.fromkeys(("__ic", "__ie", "__isw"), _TEXTS - {"select"}),
}
"""Lookups of a filter, and the types of fields that have them; `__n` is of every type."""


@dataclass(frozen=True, slots=True)
class CustomField:
    """A custom field: its type, the kinds of objects that have it, whether lists can be filtered by it."""

    type: str
    object_types: frozenset[str]
    is_filter: bool


def needs_check(filters: Mapping[str, JSON], paths: Iterable[str]) -> bool:
    """Return whether a filter or a path names a custom field."""
    return any(name.startswith("cf_") for name in filters) or any(
        path.startswith(CUSTOM_FIELDS) for path in paths
    )


def read_custom_fields(session: NetboxSession) -> Mapping[str, CustomField]:
    """Return the server's custom fields by name; raises SourceFailed."""
    records = list_all(session, PATH, {})
    return read_shape(lambda: {str(record["name"]): _parse(record) for record in records}, session.source)


def check_filters(
    session: NetboxSession,
    kinds: Iterable[str],
    filters: Mapping[str, JSON],
    fields: Mapping[str, CustomField],
) -> None:
    """Raise SourceFailed for a filter that the server would ignore for one of the kinds."""
    for name in filters:
        match = CUSTOM_FILTER.fullmatch(name)
        if match is None:
            continue
        custom, lookup = fields.get(match[1]), match[2]
        if custom is None or not custom.is_filter:
            raise session.error(f"NetBox has no filter {name}", "name a custom field in `filter`")
        if lookup in _LOOKUPS and custom.type not in _LOOKUPS[lookup]:
            raise session.error(f"a field of type {custom.type} has no filter {name}", "correct `filter`")
        for kind in kinds:
            if OBJECT_TYPES[kind] not in custom.object_types:
                problem = f"{kind} have no custom field {match[1]}"
                raise session.error(problem, f"remove {kind} from `objects`, or {name} from `filter`")


def check_paths(
    session: NetboxSession, kinds: Iterable[str], paths: Iterable[str], fields: Mapping[str, CustomField]
) -> None:
    """Raise SourceFailed for a path to a custom field that no kind has, or that is not one text."""
    object_types = {OBJECT_TYPES[kind] for kind in kinds}
    for path in paths:
        first, _, rest = path.partition(".")
        if first != CUSTOM_FIELDS:
            continue
        name, _, keys = rest.partition(".")
        custom = fields.get(name)
        if custom is None or object_types.isdisjoint(custom.object_types):
            raise session.error(f"NetBox has no custom field {name}", "correct `labels`")
        if custom.type in _LISTS or bool(keys) != (custom.type == "json"):
            problem = f"custom field {name} has the type {custom.type}, and {path} is not one text"
            raise session.error(problem, "name another field in `labels`")


def _parse(record: Mapping[str, Any]) -> CustomField:
    return CustomField(
        str(record["type"]["value"]),
        frozenset(record["object_types"]),
        record["filter_logic"]["value"] != "disabled",
    )
