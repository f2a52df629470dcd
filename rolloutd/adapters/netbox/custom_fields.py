"""Checks of custom fields that the settings name, before NetBox ignores a filter silently."""

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
_TEXTS = frozenset({"text", "longtext", "url"})
_PLAIN = frozenset({""})
_NEGATABLE = _PLAIN | {"__n"}
_ORDERED = _NEGATABLE | {"__lt", "__lte", "__gt", "__gte"}
_TEXT_LOOKUPS = _NEGATABLE | {"__ic", "__ie", "__isw"}
_LOOKUPS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("integer", "decimal", "date", "datetime"), _ORDERED),
    **dict.fromkeys((*_TEXTS, "select"), _TEXT_LOOKUPS),
    **dict.fromkeys((*_LISTS, "boolean"), _PLAIN),
    "object": _NEGATABLE,
}
"""Lookups that NetBox 4.6 has for each type of field; it has none for `json`, and ignores all others."""

_BOOLEANS = frozenset({"true", "false"})


@dataclass(frozen=True, slots=True)
class CustomField:
    """A custom field: its type, the kinds of objects that have it, and how lists are filtered by it."""

    type: str
    object_types: frozenset[str]
    filter_logic: str

    @property
    def is_loose_text(self) -> bool:
        """Whether its plain filter finds a part of the text; then NetBox has no other lookup of it."""
        return self.type in _TEXTS and self.filter_logic == "loose"


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
    for name, value in filters.items():
        match = CUSTOM_FILTER.fullmatch(name)
        if match is None:
            continue
        custom, lookup = fields.get(match[1]), match[2] or ""
        if custom is None or custom.filter_logic == "disabled":
            raise session.error(f"NetBox has no filter {name}", "name a custom field in `filter`")
        if lookup not in _LOOKUPS.get(custom.type, ()):
            raise session.error(f"a field of type {custom.type} has no filter {name}", "correct `filter`")
        if lookup and custom.is_loose_text:
            problem = f"{match[1]} has filter logic loose, so NetBox ignores {name}"
            raise session.error(problem, "set it to exact in NetBox, or correct `filter`")
        if custom.type == "boolean" and not (isinstance(value, str) and value in _BOOLEANS):
            raise session.error(
                f"{name} is true or false, and NetBox ignores {str(value)[:30]!r}", "correct `filter`"
            )
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
        str(record["filter_logic"]["value"]),
    )
